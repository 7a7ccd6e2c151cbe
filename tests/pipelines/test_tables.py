"""Tables of schedules: what torch makes is what it was, and what the proof accepts is what ends in the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import functional_cg as fcg
from functional_cg.pipelines.actions import COSTS, Action, Table, read_rows
from functional_cg.pipelines.order import arrivals, efficiency, ends_of, prove, with_transfers
from functional_cg.pipelines.schedules import NAMES, edges_of, forward_of, table_of
from tests.pipelines.model import run

SINGLE = ("gpipe", "1f1b")


def of(name: str, ranks: int, microbatches: int) -> Table:
    return table_of(name, ranks, microbatches, ranks if name in SINGLE else 2 * ranks)


def computed(table: Table) -> list[str]:
    return [" ".join(str(action) for action in row if action.computes) for row in table.rows]


# What torch 2.11 and 2.13 make, with both halves of each backward whose gradient is sent: another order would be
# another program, and it would say so here first.
KNOWN = {
    "gpipe": ["0F0 0F1 0B0 0B1", "1F0 1F1 1I0 1W0 1I1 1W1"],
    "1f1b": ["0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1I1 1W1"],
    "interleaved": [
        "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0B0 0B1",
        "1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1I0 1W0 1I1 1W1",
    ],
    "looped_bfs": [
        "0F0 0F1 2F0 2F1 2I1 2W1 2I0 2W0 0B1 0B0",
        "1F0 1F1 3F0 3F1 3I1 3W1 3I0 3W0 1I1 1W1 1I0 1W0",
    ],
    "zero_bubble": [
        "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1",
        "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1",
    ],
}
OF_FOUR = {
    "zbv": [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    ],
    "dualpipev": [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3I1 3W1 3F2 0B0 3I2 3W2 3F3 0B1 3I3 3W3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1I0 1W0 1F3 2B1 2F3 1I1 1W1 2B2 1I2 1W2 2I3 1I3 2W3 1W3",
    ],
}


@pytest.mark.parametrize("name", NAMES)
def test_the_tables_are_what_they_were(name: str) -> None:
    known = KNOWN.get(name)
    assert computed(of(name, 2, 2 if known else 4)) == (known or OF_FOUR[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 8), (4, 8)])
def test_each_table_ends_whether_ranks_wait_for_transfers_or_not(
    name: str, ranks: int, microbatches: int
) -> None:
    table = of(name, ranks, microbatches)
    one_queue = dict.fromkeys(table.edges, 0)
    assert not run(table).stuck
    assert not run(table, at_once=True).stuck
    assert not run(table, queue_of=one_queue).stuck
    assert set(table.edges) <= set(edges_of(name, ranks))
    alone = of(name, 1, microbatches) if name not in SINGLE else table_of(name, 1, microbatches, ranks)
    for stage in range(min(table.stages, alone.stages)):  # a rank alone adds up gradients in the same order
        orders = [
            [a.microbatch for row in one.rows for a in row if a.stage == stage and a.kind in "BW"]
            for one in (table, alone)
        ]
        assert orders[0] == orders[1]


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "busy", "held"),
    [
        ("1f1b", 2, 4, 0.857, 2), ("gpipe", 4, 8, 0.8, 8), ("interleaved", 2, 4, 0.923, 5),
        ("zero_bubble", 4, 8, 0.941, 8), ("zbv", 2, 8, 0.98, 4), ("dualpipev", 4, 16, 0.97, 9),
    ],
)  # fmt: skip
def test_how_busy_ranks_are_at_best(name: str, ranks: int, microbatches: int, busy: float, held: int) -> None:
    table = of(name, ranks, microbatches)
    found = run(table)
    ends, begins = ends_of(table, transfer=0.0), dict(one for row in found.begins for one in row)
    assert begins == {action: end - COSTS[action.kind] for action, end in ends.items()}
    assert found.efficiency(table) == efficiency(table) == pytest.approx(busy, abs=1e-3)
    assert max(found.in_flight) == held


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("forward_only", [False, True])
def test_what_transfers_take_does_not_grow_with_the_micro_batches(name: str, *, forward_only: bool) -> None:
    """They take place beside computations: only the first ones and the last ones are waited for."""
    for ranks in (2, 4):
        lost = list[float]()
        for microbatches in (8, 16, 32):
            table = of(name, ranks, microbatches)
            table = forward_of(table) if forward_only else table
            lost.append(run(table, transfer=0.2).ends - run(table).ends)
        assert 0 < lost[0] < 1 + ranks
        assert lost == pytest.approx([lost[0]] * 3)


@pytest.mark.parametrize("name", NAMES)
def test_the_forwards_of_a_table_are_a_table(name: str) -> None:
    """Of the same stages on the same ranks, which are busy, with at most three results of a rank under way; it ends."""
    table = of(name, 4, 8)
    found = forward_of(table)
    assert not run(found, at_once=True).stuck
    assert run(found).efficiency(found) > 0.7
    assert (found.owners, found.forward_only, run(found).in_flight) == (table.owners, True, (0,) * 4)
    for rank, row in enumerate(found.rows):
        assert {a for a in row if a.computes} == {a for a in table.rows[rank] if a.kind == "F"}
        for stage in {a.stage for a in row}:
            assert [a.microbatch for a in row if a.computes and a.stage == stage] == list(range(8))
        ends, under_way = arrivals(found, rank), set[Action]()
        for action in row:
            under_way |= {action} if action.sends else set()
            under_way -= {*ends.get(action, ())}
            assert len(under_way) <= 3


def test_text_is_read_as_it_is_written() -> None:
    table = of("zero_bubble", 2, 4)
    assert read_rows(str(table)) == table.computations
    assert table_of(str(table), 2, 4, 4).rows == table.rows
    from_torch = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1RECV_F0,1F0,,1B0,1SEND_B0"
    assert computed(table_of(from_torch, 2, 1, 2)) == ["0F0 0B0", "1F0 1I0 1W0"]


@st.composite
def tables(draw: Any) -> Table:
    """A table that ends, and then two neighbours of one row, or of several, have changed places."""
    ranks, microbatches = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    stages = ranks * draw(st.integers(1, 2))
    owners = draw(st.permutations([stage % ranks for stage in range(stages)]))
    halves = draw(st.booleans())
    left = {
        (stage, microbatch): ["F", *(("I", "W") if halves else ("B",))]
        for stage in range(stages)
        for microbatch in range(microbatches)
    }
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    done = set[tuple[int, str, int]]()
    while any(left.values()):
        ready = [
            (stage, kinds[0], microbatch)
            for (stage, microbatch), kinds in left.items()
            if kinds and _is_ready(stage, kinds[0], microbatch, stages, done)
        ]
        stage, kind, microbatch = draw(st.sampled_from(ready))
        left[stage, microbatch].pop(0)
        done.add((stage, kind, microbatch))
        rows[owners[stage]].append(Action(stage, kind, microbatch))  # type: ignore[arg-type]
    swapped = [list(row) for row in rows]
    for _ in range(draw(st.integers(0, 3))):
        row = swapped[draw(st.integers(0, ranks - 1))]
        if len(row) > 1:
            at = draw(st.integers(0, len(row) - 2))
            row[at], row[at + 1] = row[at + 1], row[at]
    return Table("drawn", tuple(map(tuple, swapped)), microbatches)


def _is_ready(stage: int, kind: str, microbatch: int, stages: int, done: set[tuple[int, str, int]]) -> bool:
    if kind == "F":
        return not stage or (stage - 1, "F", microbatch) in done
    if kind == "W":
        return (stage, "I", microbatch) in done
    behind = stage == stages - 1 or any((stage + 1, one, microbatch) in done for one in "BI")
    return behind and (stage, "F", microbatch) in done


def _computes(table: Table) -> bool:
    """Whether ranks that compute in the order of their rows, as soon as they can, do all of it."""
    left = [list(row) for row in table.rows]
    done = set[tuple[int, str, int]]()
    while ready := [
        row
        for row in left
        if row and _is_ready(row[0].stage, row[0].kind, row[0].microbatch, table.stages, done)
    ]:
        action = ready[0].pop(0)
        done.add((action.stage, action.kind, action.microbatch))
    return not any(left)


@given(tables())
def test_what_is_accepted_ends_and_what_is_refused_does_not(table: Table) -> None:
    """Ranks that compute are stuck just when the proof says so; with transfers none is, however they are waited for."""
    if not _computes(table):
        with pytest.raises(fcg.LayoutError, match="waits for"):
            prove(table)
        event("refused")
        return
    prove(table)
    placed = with_transfers(table)
    assert not run(placed, at_once=True).stuck
    assert not run(placed).stuck
    assert not run(placed, queue_of=dict.fromkeys(placed.edges, 0)).stuck
    event("accepted")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_free_early_has_been_read(name: str) -> None:
    """A send that ends with a computation was read by the receiver before, and most sends end so."""
    table = of(name, 4, 8)
    begins = {action: start for row in run(table).begins for action, start in row}
    early = 0
    for rank, row in enumerate(table.rows):
        for action, sends in arrivals(table, rank).items():
            early += len(sends)
            for send in sends:
                to, kinds = send.other_end.stage, ("F",) if send.kind == "SEND_F" else ("B", "I")
                readers = (Action(to, kind, send.microbatch) for kind in kinds)  # type: ignore[arg-type]
                assert begins[next(one for one in readers if one in begins)] < begins[action]
        assert len({send for sends in arrivals(table, rank).values() for send in sends} - set(row)) == 0
    sends = sum(action.sends for row in table.rows for action in row)
    assert early >= 0.4 * sends


SHORT = "0F0,0B0\n1F0,1B0"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0\n1F0", r"is not complete\.\n  1B0  expected one   got none"),
        ("0F0,0B0,0B0\n1F0,1B0", r"0B0  expected one   got 2"),
        ("0F0,1B0\n1F0,0B0", r"1B0 on rank 0  expected on rank 1"),
        ("0F0,0I0\n1F0,1B0", r"0W0  expected one   got none"),
        ("0F0,0B0,0F1\n1F0,1B0", r"0F1  expected none   got one"),
        ("0F0,0B0\n1B0,1F0", r"would wait for ever\.\n(.*\n)*.*rank 1  1B0  waits for"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_table_is_said(text: str, said: str) -> None:
    with pytest.raises(fcg.LayoutError, match=said):
        table_of(text, 2, 1, 2)


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "stages", "said"),
    [
        ("1b1f", 2, 4, 2, "there is no schedule '1b1f'"),
        ("1f1b", 2, 4, 4, "one stage on each rank, and the loss has 4 stages for 2 ranks"),
        ("zbv", 2, 4, 2, "torch has no schedule 'ZBVZeroBubble' of 2 stages on 2 ranks"),
        ("dualpipev", 2, 2, 4, "DualPipeV requires at least as many microbatches as stages"),
        ("0F0,0X0\n1F0", 2, 1, 2, "'0X0' is no action of a schedule"),
        (SHORT, 2, 1, 3, "is for 2 stages on 2 ranks; the mesh has 2 along its stage axis, and the loss 3 stages"),
    ],
)  # fmt: skip
def test_what_there_is_no_schedule_for_is_said(
    schedule: str, ranks: int, microbatches: int, stages: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        table_of(schedule, ranks, microbatches, stages)


def rows_of(table: Table) -> Sequence[Sequence[str]]:
    return [[str(action) for action in row] for row in table.rows]


def test_a_table_of_lists_is_a_table() -> None:
    table = of("1f1b", 2, 4)
    assert table_of("\n".join(",".join(row) for row in rows_of(table)), 2, 4, 2).rows == table.rows
