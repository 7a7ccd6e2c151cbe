"""A number on the device is a place: `table[t]` is read, written and differentiated as with a number of Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.shares import share

Read = Callable[[Any, Any, Any], Any]
MASK = torch.tensor([True, False, True, True])
SIZES = (3, 5, 4)

READS: dict[str, Read] = {
    "one": lambda x, t, u: x[t],
    "two": lambda x, t, u: x[t, u],
    "behind a slice": lambda x, t, u: x[:, u],
    "behind all": lambda x, t, u: x[..., t],
    "before a slice": lambda x, t, u: x[..., t, 1:3],
    "beside a new axis": lambda x, t, u: x[None, t, :, None, u],
    "beside a number": lambda x, t, u: x[2, t, -1],
    "beside a list": lambda x, t, u: x[t, :, [0, 3, 0]],
    "behind a list": lambda x, t, u: x[[0, 2], u],
    "beside a table": lambda x, t, u: x[t, :, torch.tensor([[0, 3], [1, 1]])],
    "beside a mask": lambda x, t, u: x[:, u, torch.tensor([True, False, True, True])],
    "behind a mask": lambda x, t, u: x[torch.tensor([[True] * 5, [False] * 5, [True] * 5]), t],
    "beside a truth": lambda x, t, u: x[True, t],
    "negative": lambda x, t, u: x[-t - 1, u - 5],
    "after reshaping": lambda x, t, u: x.flatten(1)[t, u],
    "select": lambda x, t, u: x.select(1, u) + torch.select(x, -2, t),
    "of what was taken": lambda x, t, u: x[t][u][t],
    "a row of a computed": lambda x, t, u: (x * 2).mT[u % 3],
}


def _written(write: Callable[[Tensor, Any, Any], object]) -> Read:
    def read(x: Any, t: Any, u: Any) -> Any:
        y = x * 1
        write(y, t, u)
        return y

    return read


def _set(at: Callable[[Any, Any], Any], value: Callable[[Tensor], Any]) -> Read:
    def write(y: Tensor, t: Any, u: Any) -> None:
        y[at(t, u)] = value(y)

    return _written(write)


def _count(y: Tensor, t: Any, u: Any) -> None:
    y[t] += 1
    y[:, u] *= 3.0
    y[t, u] -= y[0, 0]


WRITES: dict[str, Read] = {
    "a number": _set(lambda t, u: t, lambda y: 3),
    "a row": _set(lambda t, u: t, lambda y: y[0] * 2),
    "one element": _set(lambda t, u: (t, u, t), lambda y: y.sum()),
    "a column": _set(lambda t, u: (slice(None), u), lambda y: y[0, 0]),
    "what a mask picks": _set(
        lambda t, u: (t, torch.tensor([True, False, True, False, True])), lambda y: 0.5
    ),
    "what a list picks": _set(lambda t, u: ([0, 1], u), lambda y: y[:2, 3] + 1),
    "in place": _written(_count),
    "of other dtypes": _set(lambda t, u: (t, u), lambda y: torch.arange(4)),
}


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
@pytest.mark.parametrize("kind", [*READS, *WRITES])
def test_a_number_on_the_device_is_a_place(kind: str, lowering: Any) -> None:
    """Values and gradients have the bits of what numbers of Python give, but for signs of zeros in gradients."""
    if lowering == "inductor" and kind not in share(("beside a list", "two", "one element", "in place"), 4):
        pytest.skip("one of a kind is compiled")
    read = READS.get(kind) or WRITES[kind]

    def both(x: Tensor, weights: Tensor, t: Any, u: Any) -> Any:
        def weighted(x: Tensor) -> tuple[Tensor, Tensor]:
            out = read(x, t, u)
            return (out * weights[: out.numel()].view_as(out)).sum(), out

        grads, out = fcg.grad(weighted, has_aux=True)(x)
        return out, grads + 0.0

    fn = fcg.graph_fn(both, lowering=lowering)
    for call in range(4):
        draw = torch.Generator().manual_seed(call)
        x, weights = torch.randn(*SIZES, generator=draw), torch.randn(60, generator=draw).relu().neg()
        t, u = (torch.randint(0, high, (), generator=draw) for high in (3, 4))
        got, expected = fn(x, weights, t.int(), u), both(x, weights, int(t), int(u))
        if lowering == "aten":
            assert_trees_all_equal(got, expected, f"call {call}")
        else:
            torch.testing.assert_close(got, expected)
    assert fn.stats.captures == 1


@pytest.mark.cuda
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
@pytest.mark.parametrize(
    "kind", ["one", "two", "before a slice", "negative", "a row", "one element", "in place"]
)
def test_places_of_a_gpu(kind: str, lowering: Any) -> None:
    """In a captured graph, for numbers that change from call to call."""
    use = READS.get(kind) or WRITES[kind]

    def both(x: Tensor, t: Any, u: Any) -> Any:
        return use(x, t, u), fcg.grad(lambda x: use(x, t, u).sin().sum())(x)

    fn = fcg.graph_fn(both, lowering=lowering)
    for call in range(6):
        x = torch.randn(*SIZES, generator=torch.Generator().manual_seed(call)).cuda()
        got = fn(x, torch.tensor(call % 3).cuda(), torch.tensor(call % 4).cuda())
        torch.testing.assert_close(got, both(x, call % 3, call % 4))
    assert fn.stats.captures == 1


def test_derivatives_of_any_order_and_direction() -> None:
    """Under `torch.func`, too, and twice."""

    def f(x: Tensor, t: Any) -> Tensor:
        return (x[t].sin() * x[:, t].sum() ** 2).sum()

    def all_of_them(x: Tensor, t: Any) -> Any:
        twice = fcg.grad(lambda x: fcg.grad(lambda x: f(x, t))(x).square().sum())(x)
        forward = torch.func.jvp(lambda x: f(x, t), (x,), (x.cos(),))
        batched = torch.func.vmap(torch.func.grad(lambda x: f(x, t)))(torch.stack([x, 2 * x]))
        hessian = torch.func.hessian(lambda x: f(x, t))(x)
        return twice, forward, batched, hessian

    fn = fcg.graph_fn(all_of_them, lowering="aten")
    for call in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(call), dtype=torch.float64)
        torch.testing.assert_close(fn(x, torch.tensor(call)), all_of_them(x, call))


def test_a_buffer_of_a_state_is_filled_row_by_row() -> None:
    """As a replay buffer is: the count is a leaf, too."""

    @fcg.graph_step(lowering="aten")
    def push(state: Any, row: Tensor) -> Any:
        rows = state["rows"].clone()
        rows[state["count"] % 3] = row
        last = rows[(state["count"] - 1) % 3]
        return {"rows": rows, "count": state["count"] + 1}, {"last": last}

    state = fcg.place({"rows": torch.zeros(3, 2), "count": torch.tensor(0)})
    expected = torch.zeros(3, 2)
    for call in range(8):
        row = torch.tensor([call, -call], dtype=torch.float32)
        expected[call % 3] = row
        state, metrics = push(state, row)
        assert torch.equal(state["rows"], expected)
        assert torch.equal(metrics["last"], expected[(call - 1) % 3])


class Queue(torch.nn.Module):
    """Remembers the last rows that it has seen, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(5, 2))
        self.register_buffer("at", torch.tensor(0))
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        last = self.rows[(self.at - 1) % 5].clone()
        for row in x.detach():
            self.rows[self.at] = row
            self.rows[self.at, 0] -= 1.0
            self.at.add_(1).remainder_(5)
        return self.scale * (x @ self.rows.clone().T).sum() + last.sum()


def test_a_buffer_of_a_module_counts_where_it_writes() -> None:
    """Its value is no condition of the trace: the module changes it."""
    module = Queue()
    apply, params, buffers = fcg.from_module(module)

    @fcg.graph_step(lowering="aten")
    def step(state: Any, x: Tensor) -> Any:
        out, new = apply(state["params"], state["buffers"], x)
        return {"params": state["params"], "buffers": new}, {"out": out}

    state = fcg.place({"params": params, "buffers": buffers})
    for call in range(6):
        x = torch.randn(3, 2, generator=torch.Generator().manual_seed(call))
        state, metrics = step(state, x)
        assert torch.equal(metrics["out"], module(x))
        assert torch.equal(state["buffers"]["rows"], module.rows)
    assert step.stats.captures == 1


def write_into_it(y: Tensor, t: Tensor) -> Tensor:
    y[t].add_(1)
    return y


def write_into_a_view_of_it(y: Tensor, t: Tensor) -> Tensor:
    row = y[t]
    row[0] = 5.0
    return y


def write_before_it_is_read(y: Tensor, t: Tensor) -> Tensor:
    row = y[t]
    y.mul_(2)
    return row + 1


def read_clone(y: Tensor, t: Tensor) -> Tensor:
    row = y[t].clone()
    y.mul_(2)
    return row.add_(1) + y[t]


@pytest.mark.parametrize(
    ("use", "error", "fixed"),
    [
        (write_into_it, fcg.ReadOnlyError, r"y\[t\] = y\[t\] \+ x"),
        (write_into_a_view_of_it, fcg.ReadOnlyError, "would be lost"),
        (write_before_it_is_read, fcg.CaptureError, r"y\[t\].clone\(\)"),
        (read_clone, None, ""),
    ],
    ids=["written", "a view of it written", "read after a write", "a clone"],
)
def test_a_copy_never_passes_for_a_view(use: Callable[..., Tensor], error: Any, fixed: str) -> None:
    def both(x: Tensor, t: Tensor) -> Tensor:
        return use(x * 1, t)

    fn, x, t = fcg.graph_fn(both, lowering="aten"), torch.arange(6.0).view(3, 2), torch.tensor(1)
    if error is None:
        assert torch.equal(fn(x, t), both(x, t))
        return
    with pytest.raises(error, match=fixed):
        fn(x, t)
