"""The check of a schedule for races: what is ordered passes, and each way to lose an order is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_cg as fcg
from functional_cg import CaptureError
from functional_cg.stages.branches.listing import Place, Timeline, listed
from functional_cg.stages.branches.races import refuse_races
from functional_cg.stages.branches.units import Unit, fixed_by, predecessors
from functional_cg.testing.strategies import StepProgram
from tests.exact_steps import exact_step_fns
from tests.shares import THOROUGH

# A slot s, an input x; temporaries 1 and 2 are made of them, and 2 becomes the new s.
UNITS = (
    Unit("make 1", [], frozenset({"x"}), frozenset({1}), {1: 4}),
    Unit("make 2", [], frozenset({"s", 1}), frozenset({2}), {2: 4}),
    Unit("read s", [], frozenset({"s"}), frozenset({3}), {3: 4}),
    Unit("commit", [], frozenset({2}), frozenset({"s"})),
)


def place(unit: int, lane: int, *waits: int, frees: tuple[int, ...] = ()) -> Place:
    return Place(unit, lane, waits, frees)


LEGAL = (place(0, 1), place(2, 2), place(1, 0, 0), place(3, 1, 1, 2))


def refused(found: str, *places: Place, units: tuple[Unit, ...] = UNITS, lanes: int = 3) -> None:
    with pytest.raises(CaptureError, match=f"the branches of its graph are not ordered: {found}"):
        refuse_races(Timeline(units, places, lanes), "step")


def without(position: int, wait: int) -> list[Place]:
    places = list(LEGAL)
    places[position] = replace(
        places[position], waits=tuple(one for one in places[position].waits if one != wait)
    )
    return places


def test_what_is_ordered_passes() -> None:
    refuse_races(Timeline(UNITS, LEGAL, 3), "step")
    refuse_races(Timeline(UNITS, [place(n, 0) for n in range(4)], 1), "step")
    # An order that goes by another lane is one, too; and what only reads needs none.
    by_another = (place(0, 0), place(1, 1, 0), place(2, 2, 1), place(3, 0, 2))
    refuse_races(Timeline(UNITS, by_another, 3), "step")


@hypothesis.settings(max_examples=300 if THOROUGH else 20)
@given(exact_step_fns())
def test_a_plan_in_one_line_is_a_schedule_without_races(program: StepProgram) -> None:
    """Nothing touches what was dropped before, and nothing is dropped that the commit reads."""
    step = fcg.graph_step(program, lowering="aten")
    plan = step.lower(fcg.place(program.state), program.x).plan
    assert plan.timeline.lanes == 1
    refuse_races(plan.timeline, "step")


def test_the_orders_of_units() -> None:
    assert predecessors(UNITS) == [[], [0], [], [1, 2]]


@pytest.mark.parametrize(("position", "wait"), [(2, 0), (3, 1), (3, 2)])
def test_each_dropped_edge_is_refused(position: int, wait: int) -> None:
    refused(f"{UNITS[wait].name} and {UNITS[LEGAL[position].unit].name} touch", *without(position, wait))


def test_a_branch_past_the_commit_is_refused() -> None:
    """The commit is captured before a unit that reads the old value: on another lane, and even on its own."""
    refused("commit and read s touch", place(0, 1), place(1, 0, 0), place(3, 1, 1), place(2, 2))
    refused("commit and read s touch", place(0, 0), place(1, 0), place(3, 0), place(2, 0))


def test_an_early_reuse_of_memory_is_refused() -> None:
    free = place(0, 1, frees=(1,))
    refused("make 2 touches memory that is free", free, *LEGAL[1:])
    refused(
        "make 2 touches memory that is free",
        place(0, 0, frees=(1,)),
        *(place(n, 0) for n in (1, 2, 3)),
        lanes=1,
    )
    # Lane 1 made it and lane 0 reads it: lane 1 may free it once it has waited for that.
    refuse_races(Timeline(UNITS, [*LEGAL[:3], replace(LEGAL[3], frees=(1,))], 3), "step")
    late = place(3, 2, 1)
    refused(
        "memory is free after commit", place(0, 1), place(1, 0, 0), place(2, 2), replace(late, frees=(1,))
    )
    own = (*UNITS[:3], Unit("other", [], frozenset(), frozenset()), UNITS[3])
    places = (place(0, 1), place(1, 0, 0), place(2, 2), place(3, 1, frees=(1,)), place(4, 1, 1, 2))
    refused("memory is free after other, but may still be in use", *places, units=own)


def test_what_never_runs_is_refused() -> None:
    refused("a unit of work is missing, or runs twice", *LEGAL[:3])
    refused("a unit of work is missing, or runs twice", *LEGAL, LEGAL[0])
    refused("make 2 waits for what runs later", place(1, 0, 0), place(0, 1), *LEGAL[1:2], LEGAL[3])


# -- the check against a definition -------------------------------------------------------------------------------


def races(timeline: Timeline) -> bool:
    """Whether two units that touch the same memory are not ordered as in the plan, or memory is freed too early."""
    after: dict[int, set[int]] = {}  # by unit: what must have run
    last: dict[int, int] = {}
    for place in timeline.places:
        before = {*place.waits, *([last[place.lane]] if place.lane in last else [])}
        after[place.unit] = before.union(*(after[one] for one in before))
        last[place.lane] = place.unit
    units = timeline.units
    for one, other in itertools.combinations(range(len(units)), 2):
        touched = [units[n].reads | units[n].writes for n in (one, other)]
        conflict = units[one].writes & touched[1] or units[other].writes & touched[0]
        if conflict and one not in after[other]:
            return True
    for place in timeline.places:
        for memory in place.frees:
            using = {n for n, unit in enumerate(units) if memory in unit.reads | unit.writes}
            made = next(p.lane for p in timeline.places if memory in units[p.unit].made)
            if not using <= after[place.unit] | {place.unit} or made != place.lane:
                return True
    return False


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Legal schedules of random units, and such with one thing wrong."""
    units, born = [], list[int | str]()
    for number in range(draw(st.integers(2, 8))):
        known = st.sets(st.sampled_from(["s", "t", *born]), max_size=2)
        reads, writes = frozenset(draw(known)), frozenset(draw(known))
        made = {number: 4} if draw(st.booleans()) else {}
        born += made
        micros = draw(st.sampled_from([0.0, 1.0, 9.0]))
        units.append(Unit(f"u{number}", [], reads, writes | made.keys(), made, micros=micros))
    timeline = listed(units, draw(st.integers(1, 4)))
    places = list(timeline.places)
    at, wrong = draw(st.integers(0, len(places) - 1)), draw(st.integers(0, 4))
    if wrong == 1 and places[at].waits:
        places[at] = replace(places[at], waits=places[at].waits[1:])
    elif wrong == 2 and at:
        places[at - 1 : at + 1] = places[at], places[at - 1]
    elif wrong == 3:
        places[at] = replace(places[at], lane=draw(st.integers(0, 4)))
    elif wrong == 4 and (freed := [p for p in places if p.frees]):
        memory = freed[0].frees[0]
        places = [replace(p, frees=tuple(one for one in p.frees if one != memory)) for p in places]
        places[at] = replace(places[at], frees=(*places[at].frees, memory))
    return Timeline(units, places, 5)


@given(timelines())
def test_exactly_schedules_with_a_race_are_refused(timeline: Timeline) -> None:
    seen = set[int]()
    for place in timeline.places:  # what nobody can capture
        if not seen.issuperset(place.waits):
            return
        seen.add(place.unit)
    if races(timeline):
        with pytest.raises(CaptureError):
            refuse_races(timeline, "step")
    else:
        refuse_races(timeline, "step")


# -- what is not known to be a kernel -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (torch.ops._c10d_functional.all_reduce.default, ""),
        (torch.ops.c10d.allreduce_.default, "is an op of another library"),
        (torch.ops.fcg.send.default, "keeps its place among transfers"),
        (torch.ops.fcg.end.default, "keeps its place among transfers"),
        (torch.ops.aten.resize_.default, "gives a tensor other memory"),
        (torch.ops.aten.add.out, "gives a tensor other memory"),
        (torch.ops.aten.add_.Tensor, ""),
        (torch.ops.fcg.ravel.default, ""),
    ],
    ids=str,
)
def test_what_holds_a_step_on_one_lane(op: Any, why: str) -> None:
    assert fixed_by(op).endswith(why)
    assert bool(why) == bool(fixed_by(op))
