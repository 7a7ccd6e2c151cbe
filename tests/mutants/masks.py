"""Mutants of attention's known masks: one that hides less than the future, and one that a call writes later."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MASKS"]

TESTS = "tests/test_known_masks.py::"
NO_GPU = "masks are known from the program, the same on every device"

MASKS = (
    Mutant(
        "N150",
        "a mask that only makes the future unlikely counts as one that hides it",
        ((" and bool((hides == ~past).all())", ""),),
        (f"{TESTS}test_what_a_flag_says_needs_no_mask[a large number]",),
        no_gpu=NO_GPU,
    ),
)
