"""A call that replaces some elements of a leaf writes these alone: values and errors are those of a copy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.testing import Simulator, assert_trees_all_equal

ROWS, WIDTH, FEW = 7, 3, 4
State = dict[str, Tensor]

# Of torch's functions without an underscore and of its methods with one, the same arguments.
WRITES: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "index_copy": lambda at, rows: (0, at, rows),
    "index_add": lambda at, rows: (0, at, rows),
    "index_fill": lambda at, rows: (0, at, 2.0),
    "index_reduce": lambda at, rows: (0, at, rows, "amax"),
    "index_put": lambda at, rows: ((at,), rows),
    "scatter": lambda at, rows: (0, at[:, None].expand_as(rows), rows),
    "scatter_add": lambda at, rows: (0, at[:, None].expand_as(rows), rows),
    "scatter_reduce": lambda at, rows: (0, at[:, None].expand_as(rows), rows, "amin"),
}


@dataclass(frozen=True)
class Write:
    """A write; ``rows`` says where they come from, ``copy`` whether a clone is written, ``moves`` them later."""

    op: str
    rows: str
    copy: bool
    moves: bool = False

    def __call__(self, new: Tensor, state: State, batch: State, moved: list[Tensor]) -> Tensor:
        rows = {
            "batch": batch["rows"],
            "old": state["table"][:FEW],
            "other": state["other"][:FEW],
            "new": new[:FEW] * 2,
            "itself": new,
        }[self.rows]
        rows = rows.clone() if self.moves else rows
        new = self._written(new, WRITES[self.op](batch["at"][: len(rows)], rows))
        if self.moves:
            moved.append(rows.mul_(2))
        return new

    def _written(self, new: Tensor, arguments: tuple[Any, ...]) -> Tensor:
        if not self.copy:
            return getattr(new, self.op)(*arguments)  # type: ignore[no-any-return]
        new = new.clone()
        getattr(new, f"{self.op}_")(*arguments)
        return new


WRITE = st.builds(
    Write, st.sampled_from(sorted(WRITES)), st.sampled_from(["batch", "old", "other", "new"]), st.booleans()
)
SEEN = st.sets(st.sampled_from(["old", "view", "new", "whole", "branch", "copy", "moved over"]), max_size=2)


def step_of(writes: list[Write], others: list[Write], seen: set[str]) -> Any:
    def step(state: State, batch: State) -> tuple[State, Any]:
        table, other = state["table"], state["other"]
        moved: list[Tensor] = []
        for write in writes:
            table = write(table, state, batch, moved)
        for write in others:
            other = write(other, state, batch, moved)
        values = {
            "old": lambda: state["table"].sum(),
            "view": lambda: state["table"][1],
            "new": lambda: table.sum(),
            "whole": lambda: table,
            "branch": lambda: table.index_fill(0, batch["at"][:2], 1.0).sum(),
        }
        metrics = {
            "moved": moved,
            **{name: values[name]() for name in sorted(seen & values.keys())},
        }
        if "copy" in seen:
            table = table.clone()
        if "moved over" in seen:
            other = state["table"]
        return {"table": table, "other": other}, metrics

    return step


def whole(rows: int, draw: torch.Generator) -> Tensor:
    """Draw whole numbers, whose sums have no rounding."""
    return torch.randint(-8, 9, (rows, WIDTH), generator=draw).float()


def start() -> Any:
    draw = torch.Generator().manual_seed(0)
    return fcg.place({name: whole(ROWS, draw) for name in ("table", "other")})


def batches(count: int) -> list[State]:
    draw = torch.Generator().manual_seed(1)
    return [
        {
            "at": torch.randperm(ROWS, generator=draw),
            "rows": whole(FEW, draw),
        }
        for _ in range(count)
    ]


def assert_as_eager(step: Any, calls: int = 16) -> None:
    state, eager = start(), start()
    for batch in batches(calls):
        state, metrics = step(state, batch)
        eager, expected = step.eager(eager, batch)
        assert_trees_all_equal(fcg.state_dict(state), fcg.state_dict(eager))
        assert_trees_all_equal(metrics, expected)


@example([Write("index_put", "old", copy=False)], [], set())
@example([Write("index_copy", "itself", copy=False)], [], set())
@example([Write("index_add", "batch", copy=False), Write("index_copy", "itself", copy=False)], [], set())
@example([Write("scatter", "batch", copy=True), Write("scatter_add", "itself", copy=True)], [], set())
@example([Write("index_add", "batch", copy=False, moves=True)], [], {"old"})
@example([Write("index_copy", "batch", copy=True)], [], {"whole"})
@example([Write("index_copy", "batch", copy=False), Write("index_put", "new", copy=True)], [], {"branch"})
@example([Write("index_copy", "other", copy=False)], [Write("index_add", "old", copy=False)], {"view"})
@example([Write("index_copy", "batch", copy=False)], [], {"copy"})
@example([Write("index_copy", "batch", copy=False)], [], {"moved over"})
@example([Write("index_copy", "batch", copy=False)], [Write("index_add", "old", copy=False)], {"whole"})
@given(st.lists(WRITE, min_size=1, max_size=3), st.lists(WRITE, max_size=2), SEEN)
def test_the_bits_are_those_of_a_copy(writes: list[Write], others: list[Write], seen: set[str]) -> None:
    step = step_of(writes, others, seen)
    assert_as_eager(fcg.graph_step(step), calls=3)
    assert_as_eager(fcg.graph_step(step, backend=Simulator(), branches=2), calls=3)


@pytest.mark.parametrize("op", WRITES)
@pytest.mark.parametrize("copy", [False, True])
def test_rows_are_written_where_they_are(op: str, *, copy: bool) -> None:
    step = fcg.graph_step(step_of([Write(op, "batch", copy)] * 2, [], {"old", "view"}))
    assert_as_eager(step)
    assert re.search(r"state\['table'\] .* 0 B  updated in place", str(step.explain()))


@pytest.mark.parametrize("op", WRITES)
@pytest.mark.parametrize("copy", [False, True])
def test_an_index_out_of_bounds_leaves_the_state_as_it_is(op: str, *, copy: bool) -> None:
    step = fcg.graph_step(step_of([Write(op, "batch", copy)], [], set()))
    state = start()
    for batch in batches(3):
        state, _ = step(state, batch)
    kept = fcg.state_dict(state)
    wrong = batches(1)[0]
    wrong["at"][FEW - 1] = ROWS
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        step(state, wrong)
    state = state.latest()
    assert_trees_all_equal(fcg.state_dict(state), kept)
    step(state, batches(1)[0])


def test_an_input_that_is_written_becomes_a_leaf() -> None:
    def step(state: State, batch: State) -> tuple[State, None]:
        rows = batch["rows"]
        rows.index_fill_(0, batch["at"][:2], 1.0)
        return {"table": state["table"], "other": rows.index_fill(0, batch["at"][1:3], 3.0)}, None

    captured, like = (
        fcg.graph_step(step),
        {"table": torch.zeros(ROWS, WIDTH), "other": torch.zeros(FEW, WIDTH)},
    )
    batch = {"rows": torch.zeros(FEW, WIDTH), "at": torch.arange(ROWS)}
    with pytest.warns(UserWarning, match="its own copy"):
        state, _ = captured(fcg.place(like), batch)
    assert fcg.state_dict(state)["other"][:, 0].tolist() == [1.0, 3.0, 3.0, 0.0]


@pytest.mark.kernels
def test_compiled() -> None:
    writes = [Write("index_copy", "batch", copy=False), Write("index_put", "batch", copy=True)]
    step = fcg.graph_step(step_of(writes, [], {"old", "copy", "moved over"}), lowering="inductor")
    assert_as_eager(step)
    assert re.search(r"state\['table'\] .* 0 B  updated in place", str(step.explain()))
