"""A weight that is applied several times gets its gradient from one product of all rows, where that moves less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.stages.lower.compiled import prepare
from functional_cg.stages.passes.out_of_place import write_out_of_place
from functional_cg.stages.passes.summed_products import join_summed_products
from functional_cg.stages.plan import Buffers, lower_aten
from functional_cg.stages.program import Program
from functional_cg.testing import assert_trees_all_close, assert_trees_all_equal
from tests.compiled_graphs import compiled_in_turn

CALLS = 16


def whole(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers: sums of them are exact in any order."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def results(program: Program) -> list[Tensor]:
    slots = [whole(var.spec.shape, n, var.spec.dtype) for n, var in enumerate(program.slots)]
    inputs = [whole(var.spec.shape, 50 + n, var.spec.dtype) for n, var in enumerate(program.inputs)]
    constants = [constant.value.clone() for constant in program.constants]
    metrics = lower_aten(program).bind(Buffers(slots, inputs, constants))(())
    return [*slots, *(metric.clone() for metric in metrics)]


def products(program: Program) -> int:
    return sum(instr.name == "mm" for instr in program.instrs)


def joined(program: Program) -> tuple[int, int]:
    """The products before and after; the results stay, bit by bit."""
    write_out_of_place(program)
    expected, before = results(program), products(program)
    join_summed_products(program)
    for got, want in zip(results(program), expected, strict=True):
        assert torch.equal(got, want)
    return before, products(program)


def applied(w: Tensor, xs: Tensor, way: str, dtype: torch.dtype) -> Tensor:
    """The sum of what a weight makes of each of some matrices, so that each has its own gradient."""
    turned = w.t()
    total = torch.zeros((), dtype=w.dtype)
    for n, x in enumerate(xs):
        if way == "linear":
            made = nn.functional.linear(x.to(dtype), w.to(dtype))
        elif way == "transposed once":
            made = x.to(dtype) @ turned.to(dtype)
        else:
            made = (w.to(dtype) @ x.t().to(dtype)).t()
        total = total + (made.float() * (n - 1)).sum()
    return total


@given(
    way=st.sampled_from(["linear", "transposed once", "from the left"]),
    times=st.integers(2, 6),
    rows=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    decay=st.booleans(),
    other=st.sampled_from([0, 1, 2]),
)
def test_sums_of_products_stay(
    way: str, times: int, rows: int, dtype: torch.dtype, decay: bool, other: int
) -> None:
    """Also with terms that are no such products, and for several spellings of one layer."""

    def step(state: Any, xs: Tensor) -> Any:
        def loss(p: Any) -> Any:
            total = applied(p["w"], xs, way, dtype)
            for n in range(other):  # products of other kinds: of a part of the weight, in another dtype
                total = total + (xs[n].double() @ p["w"].double().t()).sum().float() * n
            return total + ((p["w"] * 2).sum() if decay else 0)

        value, grads = fcg.value_and_grad(loss)(state)
        return fcg.tree.map(lambda p, g: p - g, state, grads), value

    state = fcg.place({"w": torch.zeros(9, 12)})
    program = fcg.graph_step(step, lowering="aten").lower(state, torch.zeros(times, rows, 12)).program
    before, after = joined(program)
    assert after <= before
    if times * rows * 21 < (times - 1) * 9 * 12:
        assert after <= before - times + 1


def whole_and_small(h: Tensor) -> Tensor:
    return h.clamp(-2, 2)


def recurrent(
    steps: int, rows: int, width: int, bounded: Callable[[Tensor], Tensor] = whole_and_small
) -> tuple[Callable[..., Any], Any, Tensor]:
    def step(state: Any, xs: Tensor) -> Any:
        def loss(p: Any) -> Any:
            h = torch.zeros_like(xs[0])
            for x in xs:
                h = bounded(h @ p["w"] + x)
            return h.sum()

        value, grads = fcg.value_and_grad(loss)(state)
        return fcg.tree.map(lambda p, g: (p - g).clamp(-1, 1), state, grads), value

    state = fcg.place({"w": whole((width, width), 0).clamp(-1, 1)})
    return step, state, whole((steps, rows, width), 1)


def test_a_recurrent_network_makes_one_product_for_its_weight() -> None:
    step, state, xs = recurrent(10, 2, 8)
    program = fcg.graph_step(step, lowering="aten").lower(state, xs).program
    before, after = joined(program)
    assert (before, after) == (29, 20)  # forward, the gradient that goes back, and one for the weight


@pytest.mark.parametrize(("steps", "rows"), [(10, 64), (2, 8)], ids=["many rows", "few steps"])
def test_where_the_rows_are_more_than_the_matrix_products_stay(steps: int, rows: int) -> None:
    step, state, xs = recurrent(steps, rows, 8)
    before, after = joined(fcg.graph_step(step, lowering="aten").lower(state, xs).program)
    assert before == after


def test_what_is_read_again_or_written_stays() -> None:
    def step(state: Any, xs: Tensor) -> Any:
        one, two, three = (x.t() @ x for x in xs)
        three.add_(1.0)
        return {"w": state["w"] + ((one + two) + three)}, two * 1.0

    state = fcg.place({"w": torch.zeros(8, 8)})
    before, after = joined(fcg.graph_step(step, lowering="aten").lower(state, torch.zeros(3, 1, 8)).program)
    assert before == after == 3


@pytest.mark.parametrize("view", [False, True])
def test_a_term_that_is_written_before_the_last_product_is_added_as_it_was(view: bool) -> None:
    def step(state: Any, xs: Tensor) -> Any:
        one, two, three, four = (x.t() @ x for x in xs)
        other = state["w"] * 2.0
        total = ((other[:8] if view else other) + one) + two
        other[0].add_(100.0)
        return {"w": (total + three) + four}, other * 1.0

    state = fcg.place({"w": torch.zeros(8, 8)})
    joined(fcg.graph_step(step, lowering="aten").lower(state, torch.zeros(4, 1, 8)).program)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.int32,),
        (torch.int32, torch.float32),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=["int32", "int32 and back", "float8 and back", "float16"],
)
def test_products_stay_whose_cast_is_not_that_of_their_sum(dtypes: tuple[torch.dtype, ...]) -> None:
    """A cast that rounds, or that leaves the range: each product is rounded, and the sum is that of the rounded."""

    def step(state: Any, xs: Tensor) -> Any:
        products = [(x * 6.3).t() @ x for x in xs]
        for dtype in dtypes:
            products = [product.to(dtype) for product in products]
        return {"w": sum(products, state["w"])}, {}

    state = fcg.place({"w": torch.zeros(8, 8, dtype=dtypes[-1])})
    before, after = joined(fcg.graph_step(step, lowering="aten").lower(state, torch.zeros(4, 1, 8)).program)
    assert before == after == 4


def test_products_of_float16_stay_whose_sum_only_float32_holds() -> None:
    def step(state: Any, xs: Tensor) -> Any:
        products = [((x * 100).half().t() @ (x * 60).half()).float() for x in xs]
        return {"w": sum(products, state["w"])}, {}

    state = fcg.place({"w": torch.zeros(8, 8)})
    joined(fcg.graph_step(step, lowering="aten").lower(state, torch.zeros(9, 1, 8)).program)


def test_no_row_is_kept_that_memory_was_not_there_for() -> None:
    """Gradients that are accumulated: the layers before need their memory for one part of the batch at a time."""

    def step(state: Any, xs: Tensor) -> Any:
        total = fcg.tree.map(torch.zeros_like, state)
        for x in xs:
            grads = fcg.grad(lambda p, x=x: ((x @ p["w"]).tanh() @ p["v"]).sum())(state)
            total = fcg.tree.map(torch.add, total, grads)
        return fcg.tree.map(lambda p, g: p - g, state, total), {}

    state = fcg.place({"w": torch.zeros(256, 256), "v": torch.zeros(256, 256)})
    program = fcg.graph_step(step, lowering="aten").lower(state, torch.zeros(32, 100, 256)).program
    write_out_of_place(program)
    before = products(program)
    join_summed_products(program)
    assert products(program) == before


@pytest.mark.parametrize("cell", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_modules_are_prepared_so(cell: type[nn.Module]) -> None:
    apply, params, buffers = fcg.from_module(cell(16, 16))

    def step(params: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Any:
            (out, _), _ = apply(p, buffers, x, train=False)
            return out.square().mean()

        value, grads = fcg.value_and_grad(loss)(params)
        return fcg.tree.map(lambda p, g: p - g, params, grads), value

    program = fcg.graph_step(step, lowering="aten").lower(fcg.place(params), torch.zeros(24, 2, 16)).program
    before = products(program)
    prepare(program)
    assert products(program) < before - 20


@compiled_in_turn("exact", [(True,), (False,)], 2)
def test_a_compiled_step_computes_what_its_eager_run_does(compiled_on: str, exact: bool) -> None:
    # The gradient of a clamp jumps, so that a last bit may decide on it.
    fn, state, xs = recurrent(10, 2, 8, whole_and_small if exact else torch.tanh)
    step = fcg.graph_step(fn, lowering="inductor")
    state = fcg.place({"w": (state["w"] * (1 if exact else 0.37)).to(compiled_on)})
    for call in range(CALLS):
        data = whole(tuple(xs.shape), call).to(compiled_on) * (1 if exact else 0.37)
        expected, value = step.eager(fcg.snapshot(state), data)
        state, got = step(state, data)
        if exact:
            assert_trees_all_equal((state, got), (expected, value))
        else:
            # Gradients are sums of some tens, in another order.
            assert_trees_all_close((state, got), (expected, value), rtol=1e-5, atol=1e-4)
    assert step.stats.replays == CALLS
