"""The order of calls beside collectives: what may fill their time does, and no value, no wait and no memory is lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_cg.options import Options
from functional_cg.shards.collectives import WAIT, is_collective
from functional_cg.stages.branches.listing import Timeline, in_line, listed
from functional_cg.stages.branches.order import beside_collectives
from functional_cg.stages.branches.races import refuse_races
from functional_cg.stages.branches.units import LINK, Unit
from functional_cg.stages.lower.compiled import lower
from functional_cg.stages.program import Instr, Program
from tests.sharding.test_grouping import DEVICES, Builder, many, programs, values

# -- what fills the time of a collective --------------------------------------------------------------------------


def unit(name: str, micros: float, reads: str, writes: str, nbytes: int = 0, *, link: bool = False) -> Unit:
    """A unit that reads some memory and makes other, a letter each."""
    made = dict.fromkeys(writes, nbytes)
    touched = frozenset(writes) | ({LINK} if link else set())
    return Unit(name, [], frozenset(reads), touched, made, micros=micros, link=link)


def backward(*, reduced: bool) -> list[Unit]:
    """Two layers whose inputs' gradients are summed over ranks; a weight's gradient is made before that, as torch does.

    Args:
      reduced: Whether the weights' gradients are summed, too.
    """
    own = [unit("sum w2", 10, "c", "d", link=True)] * reduced
    return [
        unit("grad w2", 8, "a", "c"),
        unit("grad x2", 8, "a", "b"),
        *own,
        unit("sum x2", 10, "b", "e", link=True),
        unit("grad w1", 8, "e", "f"),
        unit("grad x1", 8, "e", "g"),
        unit("sum x1", 10, "g", "h", link=True),
        unit("update", 2, "cdfh" if reduced else "cfh", "i"),
    ]


def order(timeline: Timeline) -> list[str]:
    refuse_races(timeline, "step")
    return [timeline.units[place.unit].name for place in timeline.places]


def test_a_weights_gradient_waits_for_the_time_of_a_collective() -> None:
    units = backward(reduced=False)
    timeline = listed(units, 2)
    assert order(timeline)[:3] == ["grad x2", "grad w2", "sum x2"]
    assert order(timeline).index("grad x1") < order(timeline).index("grad w1")
    places = {units[place.unit].name: place for place in timeline.places}
    assert places["grad w2"].start >= places["sum x2"].start - 1 < places["sum x2"].end
    assert {place.lane for place in timeline.places if units[place.unit].link} == {1}
    assert timeline.micros < in_line(units).micros
    text = "\n".join(timeline.collectives())
    assert "2 collectives, estimated 20 us" in text
    assert "sum x2, beside grad w2" in text


def test_a_weights_gradient_comes_first_where_its_reduction_is_next_in_the_order() -> None:
    """The order of collectives is that of the program: on lanes nothing overtakes there."""
    timeline = listed(backward(reduced=True), 2)
    links = [timeline.units[place.unit].name for place in timeline.places if timeline.units[place.unit].link]
    assert links == ["sum w2", "sum x2", "sum x1"]
    assert order(timeline)[0] == "grad w2"


def test_of_a_program_the_reduction_on_the_critical_way_is_put_first() -> None:
    """Where nobody has fixed the order, a weight's own reduction waits, too."""
    program = Builder(slots=1)
    a = program.slots[0]
    summed = [program.wait(program.sum(program.add(a, a)))]  # of a weight
    way = program.wait(program.sum(program.view(program.add(a, a))))
    for _ in range(30):
        way = program.add(way, way)
    traced = program_of(program, [*summed, way])
    first, second = (instr for instr in program.instrs if is_collective(instr.op))
    beside_collectives(traced, DEVICES[True], 0)
    found = [instr for instr in traced.instrs if is_collective(instr.op)]
    assert found == [second, first], traced.notes
    assert traced.notes[0].startswith("order: chosen, estimated"), traced.notes


def test_lanes_beside_collectives_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on lanes runs its step once before the capture: alone, if another estimates that they do not pay."""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    program = Builder(slots=1)
    a = program.slots[0]
    both = [program.wait(program.sum(program.add(a, a))) for _ in range(2)]
    reference: Any = None
    plans = []
    for options in (Options(lowering="aten"), Options(lowering="aten", branches=3), Options()):
        traced = program_of(program, both)
        plans.append(lower(traced, torch.device("cuda"), options, reference).branches)
        assert [note.partition(":")[0] for note in traced.notes] == ["order"] * (options.branches == 3)
    why = "branches: none, beside collectives a number of lanes has to be asked for"
    assert plans[0] == plans[2] == why
    assert "one of them for 2 collectives" in plans[1]


def test_units_behind_a_late_collective_let_others_pass() -> None:
    """What waits for a collective takes no lane while it waits."""
    units = [
        unit("gather", 100, "", "a", link=True),
        unit("first", 1, "a", "b"),
        *(unit(f"other {letter}", 10, "", letter) for letter in "stuv"),
        unit("last", 1, "bstuv", "c"),
    ]
    timeline = listed(units, 2)
    assert order(timeline)[-2:] == ["first", "last"]
    assert timeline.micros == pytest.approx(103, abs=2)


# -- memory -------------------------------------------------------------------------------------------------------


def gathers(layers: int, nbytes: int) -> list[Unit]:
    """A forward of leaves that are gathered where they are read; the device is slower than the link."""
    units, h = [], "x"
    for number in range(layers):
        leaf, out = f"leaf {number}", f"h {number}"
        units.append(
            Unit(leaf, [], frozenset(), frozenset({leaf, LINK}), {leaf: nbytes}, micros=1, link=True)
        )
        units.append(Unit(out, [], frozenset({leaf, h}), frozenset({out}), {out: 1}, micros=10))
        h = out
    return units


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gathers_run_ahead_as_far_as_there_is_room(groups: int) -> None:
    nbytes = 2**20  # from which on a lane waits for memory
    units = gathers(12, nbytes)
    bound, free = listed(units, 2, ahead=groups * nbytes), listed(units, 2)
    refuse_races(bound, "step")
    assert free.peak >= 12 * nbytes
    # What runs ahead, the group in use, and that which a lane frees after it has taken the next one.
    assert groups * nbytes <= bound.peak < (groups + 3.5) * nbytes
    assert bound.micros <= free.micros + 12 * 3


@st.composite
def graphs(draw: st.DrawFn) -> list[Unit]:
    """Random units, some of them collectives."""
    units: list[Unit] = []
    for number in range(draw(st.integers(1, 12))):
        known = st.sets(st.sampled_from(["s", *range(number)]), max_size=3)
        link = draw(st.integers(0, 3)) == 0
        made = {number: draw(st.sampled_from([0, 1, 5]))}
        writes = {number, LINK} if link else {number, *draw(st.sets(st.just("s")))}
        micros = draw(st.sampled_from([0.0, 1.0, 9.0, 60.0]))
        units.append(
            Unit(f"u{number}", [], frozenset(draw(known)), frozenset(writes), made, micros=micros, link=link)
        )
    return units


def assert_room(timeline: Timeline, ahead: int) -> None:
    """What units allocate that overtake others is within a limit, and so is all memory beyond that of the line."""
    units, missing = timeline.units, {*range(len(timeline.units))}
    line = max(sum(alive(units, {*range(n + 1)}, n).values()) for n in range(len(units)))
    for place in timeline.places:
        front = min(missing)
        missing.remove(place.unit)
        held = alive(units, {*range(len(units))} - missing, place.unit)
        if place.unit > front and units[place.unit].made[place.unit]:
            assert sum(nbytes for memory, nbytes in held.items() if memory > front) <= ahead
        assert sum(held.values()) <= line + ahead


def alive(units: Sequence[Unit], run: set[int], now: int) -> dict[int, int]:
    """The memory in use while a unit runs as the last of some: by the unit that made it, its bytes."""
    left = [unit.reads | unit.writes for n, unit in enumerate(units) if n not in run]
    return {n: units[n].made[n] for n in run if n == now or any(n in touched for touched in left)}


@many
@given(
    units=graphs(),
    lanes=st.integers(1, 5),
    ahead=st.sampled_from([0, 3, 10, 10**9]),
    much=st.sampled_from([1, 4, 2**20]),
)
def test_laws_of_collectives_on_lanes(units: list[Unit], lanes: int, ahead: int, much: int) -> None:
    """No race; one lane of collectives, in the order of the plan; and no unit ahead for which there is no room."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("functional_cg.stages.branches.listing._MUCH", much)
        timeline = listed(units, lanes, frozenset(), ahead)
    refuse_races(timeline, "step")
    links = [place for place in timeline.places if units[place.unit].link]
    assert [place.unit for place in links] == sorted(place.unit for place in links)
    others = {place.lane for place in timeline.places if not units[place.unit].link}
    if lanes > 1:
        assert len({place.lane for place in links}) <= 1
        assert others.isdisjoint(place.lane for place in links)
        assert len(others) + bool(links) <= lanes
    if lanes > 1:
        assert_room(timeline, ahead)
    hypothesis.event(f"collectives: {bool(links)}")


# -- programs -----------------------------------------------------------------------------------------------------


def program_of(program: Builder, outputs: Sequence[Any]) -> Program:
    names = [f"s{n}" for n in range(len(program.slots))]
    return Program("step", program.slots, names, [], instrs=program.instrs, outputs=list(outputs))


def assert_waited_for(instrs: Sequence[Instr], *, at_once: bool) -> None:
    """Nothing reads what is under way, or writes what is being sent."""
    under_way: dict[int, Instr] = {}  # by storage of a result
    for instr in instrs:
        if instr.op is WAIT:
            under_way.pop(instr.args[0].storage, None)
            continue
        touched = {var.storage for var in (*instr.inputs(), *instr.outputs())}
        written = {var.storage for var in instr.writes}
        if not instr.only_views:
            assert touched.isdisjoint(under_way), instr
        for launch in under_way.values():
            assert written.isdisjoint(var.storage for var in launch.inputs()), instr
        assert not (at_once and under_way), "one at a time"
        if is_collective(instr.op):
            under_way |= dict.fromkeys((var.storage for var in instr.outputs()), instr)
    assert not under_way


def test_what_is_sent_is_written_after_the_wait() -> None:
    """The wait comes as late as it may, and its result is read later still."""
    program = Builder(slots=1)
    a = program.slots[0]
    sent, way = program.add(a, a), program.add(a, a)
    summed = program.wait(program.sum(sent))
    program.add_(sent, a)
    for _ in range(30):
        way = program.add(way, way)
    traced = program_of(program, [summed, sent, way])
    beside_collectives(traced, DEVICES[True], 0)
    assert traced.notes[0].startswith("order: chosen"), traced.notes
    assert_waited_for(traced.instrs, at_once=False)
    ops = [instr.op for instr in traced.instrs]
    assert ops.index(WAIT) > next(n for n, op in enumerate(ops) if is_collective(op)) + 5


@many
@given(program=programs(("later",) * 2), on_gpu=st.booleans(), number=st.integers(0, 2**16))
def test_another_order_changes_no_value(program: Builder, on_gpu: bool, number: int) -> None:
    """By random durations: any order may come that keeps what reads, writes and waits need."""
    chance = random.Random(number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "functional_cg.stages.branches.costs.estimate", lambda _: (chance.choice((0.0, 1.0, 50.0)), 0.0)
        )
        patch.setattr("functional_cg.stages.branches.order._GAIN", 0.0)
        results = [var for var in program.vars if var not in program.slots]
        traced = program_of(program, results)
        before = list(traced.instrs)
        beside_collectives(traced, DEVICES[on_gpu], 0)
    assert Counter(map(id, traced.instrs)) == Counter(map(id, before))
    assert values(traced.instrs, program.slots) == values(before, program.slots)
    if any(text.startswith("order: chosen") for text in traced.notes):
        assert_waited_for(traced.instrs, at_once=not on_gpu)
    hypothesis.event(f"another order: {traced.instrs != before}")
