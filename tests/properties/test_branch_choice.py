"""Which schedule is chosen for units: within the memory that it may take, and only what can pay."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from functional_cg.stages.branches.choice import allowance, choose, in_advance
from functional_cg.stages.branches.listing import in_line, listed, longest_way
from functional_cg.stages.branches.races import refuse_races
from functional_cg.stages.branches.units import Unit, predecessors


def backward(layers: int, nbytes: int) -> list[Unit]:
    """A chain of gradients, each with that of a weight, which takes long and reads what the chain makes."""
    units = []
    for layer in range(layers):
        chain, weight = f"chain {layer}", f"weight {layer}"
        read = frozenset({f"chain {layer - 1}"} if layer else ())
        units += [
            Unit(chain, [], read, frozenset({chain}), {chain: nbytes}, micros=4.0, product=True),
            Unit(weight, [], frozenset({chain}), frozenset({weight}), {weight: 8}, micros=3.9, product=True),
        ]
    return units


def test_a_chain_waits_for_others_only_where_memory_is_short() -> None:
    """It could reuse what they have read, and estimates say that they are done: they may be wrong."""
    units = backward(7, 2**22)
    line = in_line(units)
    given: Any = {"asked": "auto", "held": 0}
    roomy = choose(units, frozenset(), **given)
    assert roomy.lanes == 2
    assert not [one for place in roomy.places if place.lane == 0 for one in place.waits]
    short = choose(units, frozenset(), **given, memory=roomy.taken - line.taken - 1)
    assert short.lanes == 2
    assert [one for place in short.places if place.lane == 0 for one in place.waits]
    assert line.taken < short.taken < roomy.taken
    for timeline in (roomy, short):
        refuse_races(timeline, "step")


def test_memory_that_lanes_may_take_is_bounded() -> None:
    """By the option, or a share of the step's; fewer lanes take less."""
    units = backward(7, 2**22)
    none = choose(units, frozenset(), asked="auto", held=0, memory=2**25 - 1)
    assert str(none) == "branches: none, more lanes would take over 32.00 MiB of memory"
    assert choose(units, frozenset(), asked=2, held=0, memory=0).lanes == 1
    assert choose(units, frozenset(), asked=2, held=0).lanes == 2
    mib = 2**20
    assert allowance(in_line([]), 100 * mib, None) == 64 * mib
    assert allowance(in_line([]), 10_000 * mib, None) == 500 * mib
    assert allowance(in_line([]), 10_000 * mib, 7) == 7


def test_each_lane_with_products_takes_a_workspace() -> None:
    units = [
        Unit(str(n), [], frozenset(), frozenset({n}), {n: 8}, micros=9.0, product=bool(n)) for n in range(3)
    ]
    assert listed(units, 3).taken == 3 * 8 + 2 * 2**25


@st.composite
def some_units(draw: st.DrawFn) -> list[Unit]:
    """Units that make memory of both kinds of names, and read what others made; many end at one time."""
    made: list[int | str] = []
    units = []
    for number in range(draw(st.integers(1, 12))):
        read = draw(st.frozensets(st.sampled_from(made), max_size=3)) if made else frozenset()
        new: dict[int | str, int] = dict.fromkeys([number, f"staged {number}"][: draw(st.integers(0, 2))], 8)
        made.extend(new)
        micros = draw(st.sampled_from([0.0, 1.0, 5.0]))
        units.append(
            Unit(str(number), [], read, frozenset(new), new, micros=micros, link=draw(st.booleans()))
        )
    return units


@given(units=some_units(), lanes=st.integers(2, 5), ahead=st.sampled_from([0, 8, 40, math.inf]))
def test_each_unit_runs_once_and_after_those_that_it_reads(
    units: list[Unit], lanes: int, ahead: float
) -> None:
    found = listed(units, lanes, frozenset(), ahead)
    turn = {place.unit: turn for turn, place in enumerate(found.places)}
    assert sorted(turn) == list(range(len(units)))
    for number, before in enumerate(predecessors(units)):
        assert all(turn[one] < turn[number] for one in before)
    assert found.micros >= longest_way(units)
    for frugal in (False, True):
        refuse_races(listed(units, lanes, frozenset(), ahead, frugal=frugal), "step")


@given(units=some_units(), busy=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=12, max_size=12))
def test_what_is_decided_in_advance_is_what_a_schedule_would_say(
    units: list[Unit], busy: list[float]
) -> None:
    """No schedule gains what the longest way and a full device do not leave."""
    for unit, share in zip(units, busy, strict=False):
        unit.busy = 0.0 if unit.link else share * unit.micros
    line = in_line(units)
    if in_advance(line, "auto"):
        assert all(
            listed(units, lanes).micros * 1.2 > line.micros or not line.micros for lanes in range(2, 5)
        )
    if in_advance(line, 4):
        assert listed(units, 4).micros >= line.micros
