"""Mutants of parts that are compiled once: parts that only look alike, and leaves written too early."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["PARTS"]

TESTS = "tests/test_parts.py::"
NO_GPU = "parts are chosen from the program, the same on every device"

PARTS = (
    Mutant(
        "N140",
        "parts share a function although their calls are on other values",
        (
            (
                "frozen_call(instr, numbers.__getitem__) for instr in self.calls)",
                "frozen_call(instr, lambda var: var.spec) for instr in self.calls)",
            ),
        ),
        (f"{TESTS}test_blocks_that_only_look_alike_share_nothing[the same calls on other values]",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N141",
        "parts share a function although their constants differ",
        (("return type(value).__name__, repr(value)", 'return type(value).__name__, ""'),),
        (
            f"{TESTS}test_arguments_are_equal_only_if_all_of_them_is",
            f"{TESTS}test_blocks_that_only_look_alike_share_nothing[another constant]",
        ),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N142",
        "a part writes a leaf that a later part reads",
        (("home >= last.get(old.storage, 0)", "home >= 0"),),
        (f"{TESTS}test_a_leaf_is_written_after_its_last_reader",),
        no_gpu=NO_GPU,
    ),
    Mutant(
        "N143",
        "small leaves are updated by the gradients of others",
        (
            (
                "tuple(head.takes), {}, [*outputs, *names.values()]",
                "tuple(head.takes), {}, [*outputs, *[*names.values()][::-1]]",
            ),
        ),
        ("tests/test_light_updates.py::test_exact_steps_are_exact[cpu as a GPU-train_step]",),
        gpu=("tests/test_light_updates.py::test_exact_steps_are_exact[cuda-train_step]",),
    ),
)
