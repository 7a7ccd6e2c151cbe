"""The pass that groups collectives: laws on random programs, whose values are computed as terms, and a few examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_cg.shards.collectives import ALL_REDUCE, GATHER, REDUCE_SCATTER, WAIT, is_collective
from functional_cg.shards.placement import Reading
from functional_cg.stages.fx_passes.old_values import LATER
from functional_cg.stages.passes.grouping import group_collectives, groups
from functional_cg.stages.program import Instr, Var
from functional_cg.state.arena import BufferSpec

aten = torch.ops.aten
COLLECTIVES = (GATHER, REDUCE_SCATTER)
RANKS = 2
DEVICES = (torch.device("cpu"), torch.device("cuda"))  # where they run one at a time, and side by side


many = hypothesis.settings(max_examples=40 * hypothesis.settings().max_examples)


# -- cutting a sequence -------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 40), max_size=12), limit=st.integers(1, 50))
def test_runs_are_the_sequence_cut_at_the_limit(sizes: list[int], limit: int) -> None:
    runs = groups(sizes, limit)
    assert [i for run in runs for i in run] == list(range(len(sizes)))
    assert all(runs)
    totals = [sum(sizes[i] for i in run) for run in runs]
    assert all(total <= limit or len(run) == 1 for total, run in zip(totals, runs, strict=True))
    firsts = [sizes[run[0]] for run in runs[1:]]
    assert all(total + first > limit for total, first in zip(totals, firsts, strict=False)), (
        "a run had room for one more"
    )


# -- programs -----------------------------------------------------------------------------------------------------


class Builder:
    """Makes the calls of a program."""

    def __init__(self, slots: int = 0) -> None:
        self.instrs: list[Instr] = []
        self.vars: list[Var] = []
        self._storages = 0
        self.slots = [self.new(4) for _ in range(slots)]
        self.backward = False

    def new(self, numel: int, dtype: torch.dtype = torch.float32, storage: int | None = None) -> Var:
        if storage is None:
            self._storages += 1
        spec = BufferSpec((numel,), (1,), dtype, torch.device("cpu"))
        var = Var(len(self.vars), spec, self._storages if storage is None else storage, 0, True)
        self.vars.append(var)
        return var

    def call(self, op: Any, args: tuple[Any, ...], out: Any, writes: tuple[Var, ...] = ()) -> Any:
        self.instrs.append(Instr(op, args, {}, out, writes, None, self.backward))
        return out

    def gather(self, source: Var, group: str = "g") -> Var:
        out = self.new(source.spec.numel * RANKS, source.spec.dtype)
        return self.call(GATHER, ([source], RANKS, group), [out])[0]

    def reduce(self, source: Var, group: str = "g") -> Var:
        out = self.new(max(source.spec.numel // RANKS, 1), source.spec.dtype)
        return self.call(REDUCE_SCATTER, ([source], "sum", RANKS, group), [out])[0]

    def sum(self, source: Var, group: str = "g") -> Var:
        return self.call(ALL_REDUCE, (source, "sum", group), self.new(source.spec.numel, source.spec.dtype))

    def wait(self, a: Var) -> Var:
        return self.call(WAIT, (a,), self.new(a.spec.numel, a.spec.dtype, a.storage))

    def add(self, a: Var, b: Var) -> Var:
        return self.call(aten.add.Tensor, (a, b), self.new(a.spec.numel, a.spec.dtype))

    def cast(self, a: Var, dtype: torch.dtype) -> Var:
        return self.call(aten._to_copy.default, (a, dtype), self.new(a.spec.numel, dtype))

    def view(self, a: Var) -> Var:
        return self.call(aten.view.default, (a,), self.new(a.spec.numel, a.spec.dtype, a.storage))

    def later(self, a: Var, b: Var) -> Var:
        """A name for a value, which is there once another one is."""
        return self.call(LATER, (a, b), self.new(a.spec.numel, a.spec.dtype, a.storage))

    def add_(self, a: Var, b: Var) -> Var:
        return self.call(aten.add_.Tensor, (a, b), a, (a,))


@st.composite
def programs(draw: Callable[[Any], Any], more: tuple[str, ...] = ()) -> Builder:
    """Collectives of slots, of values and of each other, with casts, views and writes in place between them."""
    program = Builder(slots=draw(st.integers(1, 4)))
    kinds = (
        "gather",
        "gather",
        "gather",
        "reduce",
        "reduce",
        "reduce",
        "sum",
        "add",
        "cast",
        "view",
        "write",
        *more,
    )
    for _ in range(draw(st.integers(0, 14))):
        kind = draw(st.sampled_from(kinds))
        some = st.sampled_from(program.vars)
        if kind in ("gather", "reduce", "sum"):  # a trace waits for what it launches
            program.wait(getattr(program, kind)(draw(some), draw(st.sampled_from("ggh"))))
        elif kind in ("add", "later"):
            getattr(program, kind)(draw(some), draw(some))
        elif kind == "cast":
            program.cast(draw(some), draw(st.sampled_from((torch.float32, torch.bfloat16))))
        elif kind == "view":
            program.view(draw(some))
        else:
            slots = {slot.storage for slot in program.slots}  # a trace refuses to write into a slot
            fresh = [var for var in program.vars if var.storage not in slots]
            if fresh:
                program.add_(draw(st.sampled_from(fresh)), draw(some))
        program.backward = program.backward or draw(st.integers(0, 4)) == 0
    return program


def values(instrs: Sequence[Instr], slots: Sequence[Var]) -> dict[int, Any]:
    """What each storage holds in the end, as a term; what is read before it is made fails."""
    content: dict[int, Any] = {slot.storage: f"slot {slot.index}" for slot in slots}
    there = set(slots)
    for instr in instrs:
        assert there.issuperset(instr.inputs()), instr
        there.update(instr.outputs())
        if instr.op in COLLECTIVES:
            terms = [(str(instr.op), instr.args[1:], content[var.storage]) for var in instr.args[0]]
            content.update({var.storage: term for var, term in zip(instr.out, terms, strict=True)})
        elif instr.op in (aten.view.default, WAIT, LATER):
            assert content[instr.args[0].storage] is not None
        else:
            term = (str(instr.op), *(content[v.storage] if isinstance(v, Var) else v for v in instr.args))
            content[instr.out.storage] = term
    return content


def single(instrs: Sequence[Instr]) -> Iterator[tuple[Any, ...]]:
    """Each call, a launch of several collectives as so many."""
    for instr in instrs:
        if instr.op in COLLECTIVES:
            pairs = zip(instr.args[0], instr.out, strict=True)
            yield from (
                (instr.op, source, instr.args[1:], result, instr.backward) for source, result in pairs
            )
        else:
            yield (instr.op, instr.args, instr.out)


@many
@given(program=programs(), limit=st.integers(1, 200), ahead=st.integers(0, 3), side_by_side=st.booleans())
def test_grouping_moves_calls_and_changes_no_value(
    program: Builder, limit: int, ahead: int, side_by_side: bool
) -> None:
    """Whatever depends on what: nothing is lost, doubled, read too early, or moved across a write."""
    grouped = group_collectives(program.instrs, Reading(limit, ahead), DEVICES[side_by_side])
    assert values(grouped, program.slots) == values(program.instrs, program.slots)
    assert Counter(map(str, single(grouped))) == Counter(map(str, single(program.instrs)))
    for instr in grouped:
        if instr.op in COLLECTIVES:
            sizes = [max(a.spec.nbytes, b.spec.nbytes) for a, b in zip(instr.args[0], instr.out, strict=True)]
            assert sum(sizes) <= limit or len(sizes) == 1
            assert len({var.spec.dtype for var in instr.args[0]}) == 1, "a launch moves one dtype"
    hypothesis.event(f"launches of several: {any(len(i.out) > 1 for i in grouped if i.op in COLLECTIVES)}")


@many
@given(program=programs(), limit=st.integers(1, 200), ahead=st.integers(0, 3))
def test_of_those_that_are_not_side_by_side_one_is_under_way_at_a_time(
    program: Builder, limit: int, ahead: int
) -> None:
    """Gloo breaks its heap otherwise, once in some thousand pairs of gathers."""
    under_way: set[Var] = set()
    for instr in group_collectives(program.instrs, Reading(limit, ahead), DEVICES[False]):
        if is_collective(instr.op):
            assert not under_way
            under_way.update(instr.outputs())
        elif instr.op is WAIT:
            under_way.remove(instr.args[0])
        else:
            assert not under_way


def shown(instrs: Sequence[Instr]) -> list[str]:
    names = {GATHER: "gather", REDUCE_SCATTER: "reduce"}
    return [
        f"{names.get(i.op, 'compute')} {len(i.out) if i.op in COLLECTIVES else ''}".strip() for i in instrs
    ]


def a_model(layers: int) -> Builder:
    """Gather and compute in turn, then compute and reduce."""
    program = Builder(slots=layers)
    h = program.slots[0]
    for slot in program.slots:
        h = program.add(program.gather(slot), h)
    program.backward = True
    for _ in range(layers):
        h = program.add(h, h)
        program.reduce(h)
    return program


@pytest.mark.parametrize(
    ("limit", "ahead", "expected"),
    [
        (1, 0, "g c g c g c g c"),
        (64, 0, "gg c c gg c c"),
        (64, 1, "gg gg c c c c"),
        (10**6, 0, "gggg c c c c"),
        (32, 1, "g g c g c g c c"),
        (32, 2, "g g g c g c c c"),
    ],
)
def test_gathers_start_with_their_group_or_some_groups_ahead(limit: int, ahead: int, expected: str) -> None:
    instrs = [
        instr
        for instr in group_collectives(a_model(4).instrs, Reading(limit, ahead), DEVICES[True])
        if not instr.backward
    ]
    assert " ".join("g" * len(i.out) if i.op is GATHER else "c" for i in instrs) == expected


def test_reductions_wait_for_the_last_of_their_group() -> None:
    instrs = [
        instr for instr in group_collectives(a_model(4).instrs, Reading(64), DEVICES[True]) if instr.backward
    ]
    assert " ".join("r" * len(i.out) if i.op is REDUCE_SCATTER else "c" for i in instrs) == "c c rr c c rr"


@pytest.mark.parametrize("reduce", ["reduce", "sum"])
def test_what_needs_a_reduction_comes_after_the_launch_of_the_next(reduce: str) -> None:
    program = Builder(slots=1)
    program.backward = True
    h = program.slots[0]
    for _ in range(3):
        h = program.add(h, h)
        program.view(getattr(program, reduce)(h))
    names = {REDUCE_SCATTER: "r", ALL_REDUCE: "r", aten.view.default: "u"}
    assert (
        "".join(names.get(i.op, "c") for i in group_collectives(program.instrs, Reading(1), DEVICES[True]))
        == "crcrucruu"
    )


def test_the_gathers_of_a_second_gradient_wait_for_the_first() -> None:
    """Grouped among themselves: all of the first gradient lies between the two."""
    program = Builder(slots=2)
    first = [program.gather(slot) for slot in program.slots]
    moved = [program.reduce(program.add(whole, whole)) for whole in first]
    for slot, step in zip(program.slots, moved, strict=True):
        program.reduce(program.gather(program.add(slot, step)))
    grouped = group_collectives(program.instrs, Reading(10**6, 2), DEVICES[True])
    assert [text for text in shown(grouped) if text != "compute"] == [
        "gather 2",
        "reduce 2",
        "gather 2",
        "reduce 2",
    ]


def test_a_gather_stays_behind_a_write_to_what_it_gathers() -> None:
    program = Builder(slots=2)
    copy = program.add(program.slots[0], program.slots[1])
    program.gather(program.slots[0])
    program.add_(program.view(copy), program.slots[1])
    program.gather(copy)
    grouped = group_collectives(program.instrs, Reading(10**6, 1), DEVICES[True])
    assert values(grouped, program.slots) == values(program.instrs, program.slots)


def test_the_terms_tell_programs_apart() -> None:
    """The judge of this file: a gather that is moved across a write is another program, one too early is none."""
    program = Builder(slots=2)
    copy = program.add(program.slots[0], program.slots[1])
    program.add_(copy, program.slots[1])
    program.gather(copy)
    made, written, gathered = program.instrs
    assert values([made, gathered, written], program.slots) != values(program.instrs, program.slots)
    with pytest.raises(AssertionError, match="all_gather"):
        values([gathered, made, written], program.slots)
