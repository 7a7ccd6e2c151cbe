"""The check of a schedule for races: what is ordered passes, and each way to lose an order is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from functional_cg import CaptureError
from functional_cg.stages.branches.listing import Place, Timeline
from functional_cg.stages.branches.races import refuse_races
from functional_cg.stages.branches.units import Unit, predecessors

# A slot s, an input x; temporaries 1 and 2 are made of them, and 2 becomes the new s.
UNITS = (
    Unit("make 1", [], frozenset({"x"}), frozenset({1}), {1: 4}),
    Unit("make 2", [], frozenset({"s", 1}), frozenset({2}), {2: 4}),
    Unit("read s", [], frozenset({"s"}), frozenset({3}), {3: 4}),
    Unit("commit", [], frozenset({2}), frozenset({"s"})),
)


def place(unit: int, lane: int, *waits: int, records: bool = True, frees: tuple[int, ...] = ()) -> Place:
    return Place(unit, lane, waits, records, frees, 0.0, 0.0)


LEGAL = (place(0, 1), place(2, 2), place(1, 0, 0), place(3, 1, 1, 2))


def refused(found: str, *places: Place, units: tuple[Unit, ...] = UNITS) -> None:
    with pytest.raises(CaptureError, match=f"the branches of its graph are not ordered: {found}"):
        refuse_races(Timeline(units, places, 3), "step")


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
    # Lane 1 made it and lane 0 reads it: lane 1 may free it once it has waited for that.
    refuse_races(Timeline(UNITS, [*LEGAL[:3], replace(LEGAL[3], frees=(1,))], 3), "step")
    late = place(3, 2, 1)
    refused(
        "memory is free after commit", place(0, 1), place(1, 0, 0), place(2, 2), replace(late, frees=(1,))
    )
    own = (*UNITS[:3], Unit("other", [], frozenset(), frozenset()), UNITS[3])
    places = (place(0, 1), place(1, 0, 0), place(2, 2), place(3, 1, frees=(1,)), place(4, 1, 1, 2))
    refused("memory is free after other, but may still be in use", *places, units=own)


def test_what_never_runs_or_is_not_recorded_is_refused() -> None:
    refused("a unit of work is missing, or runs twice", *LEGAL[:3])
    refused("a unit of work is missing, or runs twice", *LEGAL, LEGAL[0])
    refused("make 2 waits for what runs later", place(1, 0, 0), place(0, 1), *LEGAL[1:2], LEGAL[3])
    refused("make 2 waits for what", replace(LEGAL[0], records=False), *LEGAL[1:])
