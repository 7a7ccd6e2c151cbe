"""Strategy for chains of writes to parts of a value, some links of which are kept inside of other values.

A compiler runs such a write in place where nobody reads the old value later. Whether it knows all who do is the
question: a value may have been computed in the memory of a concatenation, of a padded value, or be seen by views.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from functional_cg.testing.programs import Operation, StepProgram

__all__ = ["overwritten"]

SIZE = 4


def _order(v: Tensor) -> Tensor:
    """A permutation of the rows that is known at the replay only."""
    return torch.argsort(v[0], stable=True)


def _filled(a: Tensor) -> Tensor:
    copy = a.clone()
    copy.diagonal().fill_(3)
    return copy


def _row_added(a: Tensor, v: Tensor) -> Tensor:
    copy = a.clone()
    copy[_order(v)[:1]] += v[:1]
    return copy


# Of a value, and of values to write.
WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_put": lambda a, v: a.index_put((_order(v)[:2],), v[:2]),
    "index_put_all": lambda a, v: a.index_put((_order(v),), v + a),
    "index_put_added": lambda a, v: a.index_put((_order(v)[:2],), v[:2], accumulate=True),
    "index_add": lambda a, v: a.index_add(0, _order(v)[:2], v[:2]),
    "index_copy": lambda a, v: a.index_copy(1, _order(v)[:2], v[:, :2]),
    # torch 2.11's compiler gives up on one of a transposed value
    "index_fill": lambda a, v: a.contiguous().index_fill(0, _order(v)[:1], 2),
    "scatter": lambda a, v: a.scatter(0, _order(v)[None], v),
    "scatter_add": lambda a, v: a.scatter_add(1, _order(v)[:, None], v),
    "scatter_reduce": lambda a, v: a.scatter_reduce(0, _order(v)[None], v, "amax"),
    "masked_scatter": lambda a, v: a.masked_scatter(v > 0, v + a),
    "masked_fill": lambda a, v: a.masked_fill(v > 0, 1),
    "slice_scatter": lambda a, v: a.slice_scatter(v[1:3], 0, 0, 2),
    "select_scatter": lambda a, v: a.select_scatter(v[0], 1, 1),
    "diagonal_scatter": lambda a, v: a.diagonal_scatter(v[0]),
    "row_added": _row_added,
    "filled": lambda a, v: _filled(a),
}
# Of a value, and of another one; the result contains the first one.
KEPT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "stack": lambda a, b: torch.stack([a, b]),
    "stack_last": lambda a, b: torch.stack([b, a], -1),
    "cat": lambda a, b: torch.cat([a, b]),
    "cat_columns": lambda a, b: torch.cat([b, a], 1),
    "cat_of_part": lambda a, b: torch.cat([a[1:], b]),
    "cat_of_turned": lambda a, b: torch.cat([a.mT, b, a]),
    "cat_twice": lambda a, b: torch.cat([torch.cat([a, b]), a]),
    "pad": lambda a, b: F.pad(a, (0, 1)),
    "pad_all": lambda a, b: F.pad(a, (1, 1, 1, 1)),
    "roll": lambda a, b: a.roll(1, 0),
    "row": lambda a, b: a[1],
    "part": lambda a, b: a[:, 1:],
    "sum": lambda a, b: a + b,
    "split": lambda a, b: torch.cat(a.split(1)),
    "repeat": lambda a, b: a.repeat(2, 1),
    "itself": lambda a, b: a,
}
# Of a value: what lies between two writes.
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda a: a.mT,
    "turned_clone": lambda a: a.mT.clone(),
    "clone": torch.clone,
    "negative": torch.neg,
    "plus_one": lambda a: a + 1,
    "flip": lambda a: a.flip(0),
    "as_is": lambda a: a.view(-1).view(a.shape) if a.is_contiguous() else a.reshape(-1).view(a.shape),
    "clamped": lambda a: a.clamp(-8, 8),
}
STATE, OTHER, INPUT = range(3)  # numbers of the first values


@st.composite
def overwritten(draw: DrawFn, *, max_operations: int = 16) -> StepProgram:
    """Draw a step that writes to parts of a value again and again, and keeps some links of the chain."""
    numbers = torch.arange(SIZE * SIZE).reshape(SIZE, SIZE).float()
    operations: list[Operation] = []

    def done(name: str, function: Callable[..., Tensor], *operands: int) -> int:
        operations.append(Operation(name, function, operands))
        return INPUT + len(operations)

    links, kept = [STATE], []
    for _ in range(draw(st.integers(3, max_operations))):
        kind = draw(st.sampled_from(("write", "write", "keep", "keep", "between")))
        last, old = links[-1], draw(st.sampled_from([OTHER, INPUT, *links]))
        if kind == "write":
            name = draw(st.sampled_from(list(WRITES)))
            links.append(done(name, WRITES[name], last, draw(st.sampled_from((OTHER, INPUT)))))
        elif kind == "keep":
            name = draw(st.sampled_from(list(KEPT)))
            kept.append(done(name, KEPT[name], last, old))
        else:
            name = draw(st.sampled_from(list(BETWEEN)))
            links.append(done(name, BETWEEN[name], last))
    new = done("clamped", BETWEEN["clamped"], links[-1])
    other = draw(st.sampled_from([OTHER, new, STATE]))
    state = (numbers.remainder(7) - 3, numbers.remainder(5) - 2)
    return StepProgram(state, numbers.remainder(3), tuple(operations), (new, other), tuple(kept))
