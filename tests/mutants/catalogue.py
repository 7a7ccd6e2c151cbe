"""The mutants: wrong implementations, each the shipped code with one thing wrong.

A mutant replaces a passage or two. What a naive implementation does literally is often impossible here (nothing
that the caller owns is ever an address in a plan), so each is the nearest mistake that this architecture allows; where
that is not the literal one, ``what`` says so. ``killers`` are tests that must fail, all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAX_LINES = 20


class StaleMutantError(Exception):
    """A mutant's passage is not in the code any more."""


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
      name: Number in the list of naive designs, with a word where a number has several mutants.
      what: The mistake.
      edits: Pairs of a passage, which must occur exactly once in the package, and what stands there instead.
      killers: Ids of the tests that notice.
    """

    name: str
    what: str
    edits: tuple[tuple[str, str], ...]
    killers: tuple[str, ...]

    def apply(self, package: Path) -> None:
        """Patch a copy of the package.

        Raises:
          StaleMutantError: If a passage is not there exactly once, or the patch is too long.
        """
        if sum(len(new.splitlines()) for _, new in self.edits) > MAX_LINES:
            raise StaleMutantError(f"{self.name}: a mutant is a patch of at most {MAX_LINES} lines")
        for old, new in self.edits:
            sources = {file: file.read_text(encoding="utf-8") for file in package.rglob("*.py")}
            found = [file for file, source in sources.items() for _ in range(source.count(old))]
            if len(found) != 1 or old == new:
                raise StaleMutantError(
                    f"{self.name} ({self.what}): this passage occurs {len(found)} times; write the mutant anew:\n{old}"
                )
            found[0].write_text(sources[found[0]].replace(old, new), encoding="utf-8")


OWNERSHIP = "tests/test_ownership.py::"
REPLAY = "tests/properties/test_replay.py::"

MUTANTS = (
    Mutant(
        "N1",
        "returns static outputs: metrics are not copied out of the pool",
        (("return finish(static if fresh else copy_out(static))", "return build(static)"),),
        (
            f"{OWNERSHIP}test_what_was_returned_never_changes[simulator]",
            f"{OWNERSHIP}test_gradients_returned_are_owned_and_sum_in_order[simulator]",
            f"{OWNERSHIP}test_writing_into_what_was_returned_has_no_effect[simulator]",
        ),
    ),
    Mutant(
        "N2 inputs",
        "adopts the first call's inputs as static buffers",
        (("        staging.copy_in(call.live)\n", "        staging.slots = tuple(call.live)\n"),),
        (f"{OWNERSHIP}test_a_batch_that_is_kept_stays_as_it_was[cpu]",),
    ),
    Mutant(
        "N2 state",
        "adopts the leaves of a plain state as slots",
        (
            (
                "            torch._foreach_copy_(list(lease.arena.slots), [leaf.detach() for leaf in leaves])\n",
                "            lease.arena.slots = tuple(leaf.detach() for leaf in leaves)\n",
            ),
        ),
        (
            f"{OWNERSHIP}test_a_plain_state_stays_the_callers[cpu]",
            f"{OWNERSHIP}test_a_plain_state_stays_the_callers[simulator]",
        ),
    ),
    Mutant(
        "N3",
        "closes over the module: an unknown tensor becomes a constant in silence",
        (
            (
                ("        if self.declared:\n            args, kwargs = "),
                (
                    "        for tensor in tensors_in([*args, *kwargs.values()]):\n"
                    "            if not isinstance(tensor, FakeTensor) and id(tensor) not in self.declared:\n"
                    "                with unset_fake_temporarily():\n"
                    '                    self.declare("closure", tensor)\n'
                    "        if self.declared:\n"
                    "            args, kwargs = "
                ),
            ),
        ),
        (
            f"{OWNERSHIP}test_a_closed_over_tensor_is_refused_with_its_place",
            f"{OWNERSHIP}test_a_closed_over_module_is_refused",
        ),
    ),
    Mutant(
        "N4",
        "keeps addresses without ownership: nobody holds the constants that a capture reads",
        (("            tuple(constants),\n", "            (),\n"),),
        (
            f"{OWNERSHIP}test_constants_are_the_steps_own[simulator]",
            f"{REPLAY}test_literals_and_constants_live_as_long_as_the_capture[simulator]",
        ),
    ),
    Mutant(
        "N5 address",
        "skips the copy-in of what lies at the address of the last call",
        (
            (
                ("            torch._foreach_copy_(self.slots, list(leaves))\n            return\n"),
                (
                    '            seen = self.__dict__.setdefault("seen", {})\n'
                    "            for i, leaf in enumerate(leaves):\n"
                    "                if seen.get(i) != leaf.data_ptr():\n"
                    "                    self.slots[i].copy_(leaf)\n"
                    "                seen[i] = leaf.data_ptr()\n"
                    "            return\n"
                ),
            ),
        ),
        (
            f"{REPLAY}test_one_address_with_other_strides_is_read_anew",
            f"{OWNERSHIP}test_the_caller_may_overwrite_its_inputs_when_the_call_returns[tensor-cpu]",
        ),
    ),
    Mutant(
        "N5 layout",
        "copies in without looking at shapes and dtypes: copy_ broadcasts and casts",
        (("{t}.shape != {name(want.shape)} or {t}.dtype is not {name(want.dtype)} ", "{t}.is_sparse "),),
        (
            f"{REPLAY}test_a_broadcastable_shape_is_refused[(1, 3)]",
            f"{REPLAY}test_a_broadcastable_shape_is_refused[()]",
            f"{REPLAY}test_another_dtype_is_refused[torch.int64]",
        ),
    ),
    Mutant(
        "N6",
        "takes gradients through .grad of the leaves handed in, for somebody else to reset",
        (
            ("    return leaf.detach().requires_grad_()\n", "    return leaf.requires_grad_()\n"),
            (
                "    grads = torch.autograd.grad(value, leaves, create_graph=create_graph, allow_unused=True)\n",
                (
                    "    value.backward(create_graph=create_graph)\n"
                    "    grads = [leaf.grad for leaf in leaves]\n"
                ),
            ),
        ),
        (
            f"{OWNERSHIP}test_gradients_of_one_step_do_not_add_up_by_themselves[twice]",
            f"{OWNERSHIP}test_gradients_of_one_step_do_not_add_up_by_themselves[micro-batches]",
        ),
    ),
    Mutant(
        "N7",
        "Python numbers and flags: what the step's Python reads is not compared at each call",
        (("        return ({body})\\n", "        return True\\n"),),
        (
            f"{OWNERSHIP}test_a_host_value_that_changed_is_loud[cpu]",
            f"{OWNERSHIP}test_a_host_value_that_changed_is_loud[simulator]",
        ),
    ),
    Mutant(
        "N8",
        "warm-up is not rolled back: it runs on the state's own slots",
        (("Buffers(scratch(slots), staging.slots, constants)", "Buffers(slots, staging.slots, constants)"),),
        (
            f"{REPLAY}test_call_n_is_n_updates[simulator]",
            f"{REPLAY}test_bias_correction_and_schedule_move_with_the_count[simulator]",
        ),
    ),
    Mutant(
        "N14 commit",
        "Ctrl-C may strike in the middle of the commit",
        (("    deque(map(operator.call, calls), maxlen=0)\n", ("    for call in calls:\n        call()\n")),),
        (
            f"{OWNERSHIP}test_ctrl_c_at_every_bytecode_of_a_call[cpu]",
            f"{OWNERSHIP}test_ctrl_c_at_every_bytecode_of_a_call[simulator]",
        ),
    ),
    Mutant(
        "N15",
        "a handle without generation: the update does not raise it",
        (
            ("(partial(setitem, lease.cell, 0, generation + 1),)", "()"),
            ("return Handle(lease, generation + 1), metrics", "return Handle(lease, generation), metrics"),
        ),
        (
            f"{REPLAY}test_an_old_state_never_shows_new_values[cpu]",
            f"{REPLAY}test_an_old_state_never_shows_new_values[simulator]",
        ),
    ),
    Mutant(
        "N16",
        "sequential commit: a new leaf that is another slot is not staged",
        (
            (
                "    plan.staged = {old for old, new in plan.commits if new.storage in in_slots}\n",
                "    plan.staged = set()\n",
            ),
        ),
        (
            f"{REPLAY}test_commit_is_parallel[cpu]",
            f"{REPLAY}test_commit_is_parallel[simulator]",
        ),
    ),
    Mutant(
        "N17",
        "silent eager fallback: runs the Python each time, and counts it as a replay",
        (
            (
                "        args, kwargs = call.arguments()\n        try:\n",
                (
                    "        self.stats.replays += 1\n"
                    "        return run_eager(self._fn, call, self._name, donates=self._donates)\n"
                    "        args, kwargs = call.arguments()\n        try:\n"
                ),
            ),
        ),
        (f"{REPLAY}test_the_python_body_runs_at_trace_time_only",),
    ),
)
