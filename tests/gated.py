"""Strategy for losses that are switched on late, over values that are expanded, overlap, are viewed, and written.

The gradient of a sum is one number in all places, without memory for each. A compiler that runs a write in place where
nobody reads the old value later may run it there. While a gate is closed, every gradient is zero, and nothing tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

import functional_cg as fcg
from functional_cg.tensors.overlap import crosses, overlaps_itself, storage_key

__all__ = ["Gated", "found_before", "gated"]

ROWS, COLUMNS = 4, 3
OPENS = 3  # the call from which a gate on the step's own count is open

# Of a value that may be written, and of other numbers: each writes it and returns nothing. The gradient of what
# `masked_scatter` takes asks the host how much it took, which no CUDA graph can.
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rows": lambda y, b: y.__setitem__([0, -1], b[0]),
    "row_and_number": lambda y, b: y.__setitem__(1, 2.0),
    "slice": lambda y, b: y.__setitem__(slice(1, 3), b[1:3]),
    "column": lambda y, b: y.__setitem__((slice(None), 0), b[:, 0]),
    "diagonal": lambda y, b: y.diagonal().copy_(b.diagonal()),
    "index_put": lambda y, b: y.index_put_((_places(y, b), _places(y, b) % y.shape[1]), b[0, 0]),
    "index_put_added": lambda y, b: y.index_put_((_places(y, b),), b[:2], accumulate=True),
    "index_add": lambda y, b: y.index_add_(0, _places(y, b), b[:2]),
    "index_copy": lambda y, b: y.index_copy_(0, _places(y, b), b[1:3]),
    "index_fill": lambda y, b: y.index_fill_(0, _places(y, b), 1.0),
    "scatter": lambda y, b: y.scatter_(0, _places(y, b)[:, None].expand(2, y.shape[1]), b[:2]),
    "scatter_number": lambda y, b: y.scatter_(1, (_places(y, b) % y.shape[1])[:, None], 3.0),
    "scatter_add": lambda y, b: y.scatter_add_(0, _places(y, b)[:, None].expand(2, y.shape[1]), b[:2]),
    "scatter_sum": lambda y, b: y.scatter_reduce_(
        0, _places(y, b)[:, None].expand(2, y.shape[1]), b[:2], "sum"
    ),
    "masked_fill": lambda y, b: y.masked_fill_(b > 0, 2.0),
    "masked_scatter": lambda y, b: y.masked_scatter_(b > 0, b.flip(0).detach()),
    "put": lambda y, b: y.put_(_places(y, b), b[0, :2]),
    "put_added": lambda y, b: y.put_(_places(y, b), b[0, :2], accumulate=True),
    "swapped": lambda y, b: y.__setitem__([0, 1], y[[1, 0]]),
    "add": lambda y, b: y.add_(b),
    "mul": lambda y, b: y.mul_(b.sign()),
    "copy": lambda y, b: y.copy_(b[0]),
    "clamp": lambda y, b: y.clamp_(-3, 3),
    "relu": lambda y, b: y.relu_(),
    "neg": lambda y, b: y.neg_(),
    "row_zero": lambda y, b: y[0].zero_(),
    "part_added": lambda y, b: y[1:, 1:].add_(b[1:, 1:]),
    "turned_added": lambda y, b: y.t().add_(b.t()),
    "tril": lambda y, b: y.tril_(),
    "cumsum": lambda y, b: y.cumsum_(0),
    "fill_diagonal": lambda y, b: y.fill_diagonal_(2.0),
    "number": lambda y, b: y.fill_(1.0),
}
# The same without writing: what a compiler makes of the others.
SCATTERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_put": lambda y, b: y.index_put((_places(y, b),), b[:2]),
    "index_add": lambda y, b: y.index_add(0, _places(y, b), b[:2]),
    "index_copy": lambda y, b: y.index_copy(0, _places(y, b), b[1:3]),
    "scatter": lambda y, b: y.scatter(0, _places(y, b)[:, None].expand(2, y.shape[1]), b[:2]),
    "masked_scatter": lambda y, b: y.masked_scatter(b > 0, b.flip(0).detach()),
    "put": lambda y, b: y.put(_places(y, b), b[0, :2]),
    "slice_scatter": lambda y, b: torch.slice_scatter(y, b[:2], 0, 1, 3),
    "select_scatter": lambda y, b: torch.select_scatter(y, b[0], 0, 1),
    "diagonal_scatter": lambda y, b: torch.diagonal_scatter(y, b.diagonal()),
    "strided_scatter": lambda y, b: torch.as_strided_scatter(y.clone(), b[0, :2], (2,), (2,), 1),
}
# Values in other memory, or in that of another value, with several elements in one place or not.
LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded_sum": lambda y: y.sum().expand(ROWS, COLUMNS),
    "expanded_number": lambda y: y[1, 1].expand(ROWS, COLUMNS),
    "expanded_row": lambda y: y[0].expand(ROWS, COLUMNS),
    "expanded_column": lambda y: y[:, :1].expand(ROWS, COLUMNS),
    # Of an expanded value torch divides the gradient by how many elements share memory, which rounds.
    "overlapping": lambda y: y.contiguous().view(-1).as_strided((ROWS, COLUMNS), (1, 1)),
    "windows": lambda y: y.reshape(-1)[:6].unfold(0, COLUMNS, 1),
    "repeated": lambda y: y[:1].repeat(ROWS, 1),
    "turned": lambda y: y.t().contiguous().t(),
    "turned_view": lambda y: y.reshape(COLUMNS, ROWS).t(),
    "flipped": lambda y: y.flip(0),
    "whole": lambda y: y.view_as(y),
    "joined": lambda y: torch.cat([y[2:], y[:2]]),
    "twice": lambda y: y + y,
    "square": lambda y: y * y.clamp(-2, 2),
    "broadcast": lambda y: torch.broadcast_tensors(y[:1], y)[0],
    "rows_chosen": lambda y: y[torch.tensor([3, 0, 0, 1], device=y.device)],
    "stacked": lambda y: torch.stack([y[0]] * ROWS),
}
# How a value reaches the loss, given the step's count.
GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hinge": lambda y, n: torch.relu(y.sum() + 40 * n - 40 * OPENS),
    "count": lambda y, n: torch.where(n >= OPENS, y.sum(), 0.0),
    "branch": lambda y, n: fcg.cond(n >= OPENS, lambda: y.sum(), lambda: torch.zeros_like(y.sum())),
    "weight": lambda y, n: y.sum() * (n >= OPENS),
    "clamp": lambda y, n: (y.sum(0) + 60 * n).clamp(min=60 * OPENS).sum(),
    "rows": lambda y, n: (y.sum(1) * torch.arange(y.shape[0], device=y.device) * (n >= OPENS)).sum(),
    "maximum": lambda y, n: torch.maximum(y.sum(1).sum(), 100.0 * (OPENS - n)),
    "open": lambda y, n: y.sum(),
    "squares": lambda y, n: (y * y.detach().sign()).sum() * (n >= OPENS),
}
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda y: y * 1.0,
    "clone": lambda y: y.clone(),
    "dense": lambda y: y.contiguous(),
    "as_is": lambda y: y,
}


def _places(y: Tensor, b: Tensor) -> Tensor:
    """Two different rows, known on the device alone."""
    return torch.argsort(b[: y.shape[0], 0], stable=True)[:2]


@dataclass(frozen=True)
class Gated:
    """A step that differentiates a loss with gates; its repr is its text.

    Attributes:
      state: Parameters, and the number of steps.
      x: An example input.
      lines: Kind, name, operands: a line makes a value of earlier ones; 0 are the parameters, 1 the input.
      gates: Names of gates, and the values that go through them.
    """

    state: Any
    x: Tensor
    lines: tuple[tuple[str, str, int, int, str], ...]
    gates: tuple[tuple[str, int], ...]

    def loss(self, params: Tensor, x: Tensor, count: Tensor) -> Tensor:
        values = [params, x]
        for line in self.lines:
            values.append(_value(line, values))
        return sum((GATES[name](values[i], count) for name, i in self.gates), params.sum() * 0)  # type: ignore[return-value]

    def __call__(self, state: Any, x: Tensor) -> tuple[Any, dict[str, Tensor]]:
        loss, grad = fcg.value_and_grad(self.loss)(state["params"], x, state["count"])
        params = (state["params"] - grad.sign() + x.sign()).clamp(-8, 8)
        return {"params": params, "count": state["count"] + 1}, {"loss": loss, "grad": grad}


def _value(line: tuple[str, str, int, int, str], values: list[Tensor]) -> Tensor:
    kind, name, i, j, how = line
    if kind == "laid":
        return LAID[name](values[i])
    if kind == "scatter":
        return SCATTERS[name](MADE[how](values[i]), values[j])
    y = MADE[how](values[i])
    # Most ops that write refuse that; what the others mean by it, nobody says.
    if overlaps_itself(y) or _shares_elements(y, values[j]):
        raise RuntimeError("elements share memory")
    WRITES[name](y, values[j])
    return y


def _shares_elements(y: Tensor, b: Tensor) -> bool:
    """Whether values share elements, but not each with its own place."""
    if storage_key(y) != storage_key(b):
        return False
    return crosses(y.detach(), b.detach())


def _fits(line: tuple[str, str, int, int, str], values: list[Tensor]) -> Tensor | None:
    """The value of a line, if torch itself runs it, and it is a matrix of numbers that stay small."""
    try:
        made = _value(line, values)
        if made.requires_grad:
            torch.autograd.grad(made.sum(), values[0], retain_graph=True, allow_unused=True)
    except RuntimeError:  # it writes where elements share memory, or what a gradient needs
        return None
    return made if made.shape == (ROWS, COLUMNS) and float(made.detach().abs().max()) < 2**12 else None


@st.composite
def gated(draw: DrawFn, *, max_lines: int = 6) -> Gated:
    """Draw a loss with gates over values that are laid out in many ways and written in part."""
    state, x = _start()
    params = state["params"].clone().requires_grad_()
    values, lines = [params, x.clone()], []
    for _ in range(draw(st.integers(2, max_lines))):
        kind = draw(st.sampled_from(("laid", "write", "write", "scatter")))
        table = {"laid": LAID, "write": WRITES, "scatter": SCATTERS}[kind]
        line = (
            kind,
            draw(st.sampled_from(list(table))),
            draw(st.integers(0, len(values) - 1)),
            draw(st.integers(0, len(values) - 1)),
            draw(st.sampled_from(list(MADE))),
        )
        # A write to a value that another line reads, too, would change what it was when that line ran.
        inside = kind == "write" and line[4] in ("as_is", "dense") and line[2] < 2
        if not inside and (made := _fits(line, values)) is not None:
            lines.append(line)
            values.append(made)
    names = st.lists(st.sampled_from(list(GATES)), min_size=1, max_size=3)
    gates = tuple((name, draw(st.integers(0, len(values) - 1))) for name in draw(names))
    last = ((draw(st.sampled_from(list(GATES))), len(values) - 1),)
    program = Gated(state, x, tuple(lines), gates + last)
    try:
        loss = program.loss(state["params"].clone().requires_grad_(), x.clone(), state["count"])
        loss.backward()
    except RuntimeError:  # a later line writes what the gradient of an earlier one needs
        reject()
    return program


def found_before() -> list[Gated]:
    """The programs that a compiler got wrong: a write in memory with stride 0, and one that reads what it replaces."""
    rows = (("write", "rows", 0, 1, "product"),)
    moved = [
        (("laid", "twice", 0, 0, "as_is"), ("scatter", name, 2, 2, "as_is"))
        for name in ("slice_scatter", "diagonal_scatter", "index_add", "index_copy")
    ]
    return [
        Gated(*_start(), rows, (("hinge", 2),)),
        *(Gated(*_start(), lines, (("open", 3), ("squares", 3))) for lines in moved),
    ]


def _start() -> tuple[dict[str, Tensor], Tensor]:
    numbers = torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).float()
    state = {"params": numbers.remainder(5) - 2, "count": torch.zeros((), dtype=torch.int64)}
    return state, numbers.remainder(7) - 3
