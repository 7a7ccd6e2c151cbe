"""Matrix products of a small step in fewer kernels: which are merged, and that results do not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

import functional_cg as fcg
from functional_cg.stages.fx_passes.products import batch_gradients
from tests.compiled_graphs import assert_same_results, graph_of

aten = torch.ops.aten
N, WIDTH = 12, 8


def initial(layers: int = 4, width: int = WIDTH, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    params = {f"w{i}": torch.randn(width, width, device=device) * 0.5 for i in range(layers)}
    params |= {f"b{i}": torch.randn(width, device=device) for i in range(layers)}
    return fcg.TrainState.create(params=params, optimizer=fcg.optim.adamw(1e-2, weight_decay=0.1))


def batch(seed: int = 0, width: int = WIDTH, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(N, width, generator=generator).to(device) for name in ("x", "y")}


def mlp(p: Any, x: Tensor, dtype: torch.dtype = torch.float32, activation: Any = torch.relu) -> Tensor:
    h = x.to(dtype)
    for i in range(len(p) // 2):
        h = F.linear(activation(h) if i else h, p[f"w{i}"].to(dtype), p[f"b{i}"].to(dtype))
    return h.float()


def step_of(loss: Any) -> Any:
    def train_step(state: Any, batch: Any) -> Any:
        value, grads = fcg.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads), {"loss": value}

    return train_step


def plain(p: Any, batch: Any) -> Tensor:
    return F.mse_loss(mlp(p, batch["x"]), batch["y"])


def count(graph: fx.Graph, target: Any) -> int:
    return len(graph.find_nodes(op="call_function", target=target))


def changed(train_step: Any, change: Any, state: Any = None, given: Any = None) -> fx.Graph:
    """The changed graph; fp32 sums in another order are 1e-5 apart."""
    module, arguments = graph_of(train_step, state or initial(), given or batch())
    assert_same_results(module, arguments, change, rtol=1e-5, atol=1e-5)
    return module.graph


def test_gradients_of_weights_are_one_product_and_those_of_biases_one_sum() -> None:
    graph = changed(step_of(plain), batch_gradients)
    assert (count(graph, aten.bmm.default), count(graph, aten.mm.default)) == (1, 3)  # those of inputs stay
    assert count(graph, aten.sum.dim_IntList) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_in_other_dtypes(dtype: torch.dtype) -> None:
    loss = lambda p, batch: F.mse_loss(mlp(p, batch["x"], dtype), batch["y"])  # noqa: E731
    module, arguments = graph_of(step_of(loss), initial(), batch())
    # A gradient that is rounded to bf16 the other way moves AdamW's first update by less than its rate.
    assert_same_results(module, arguments, batch_gradients, rtol=1e-2, atol=1e-2)
    assert count(module.graph, aten.bmm.default) == 1


def test_each_shape_has_a_product_of_its_own() -> None:
    torch.manual_seed(0)
    shapes = {"a": (6, 8), "b": (8, 6), "c": (6, 8), "d": (8, 6), "e": (3, 8)}
    state = fcg.TrainState.create(
        params={name: torch.randn(shape) for name, shape in shapes.items()}, optimizer=fcg.optim.sgd(0.1)
    )

    def loss(p: Any, batch: Any) -> Tensor:
        h = batch["x"]
        for name in "abcd":
            h = torch.tanh(F.linear(h, p[name]))
        return F.linear(h, p["e"]).square().mean()

    graph = changed(step_of(loss), batch_gradients, state)
    assert (count(graph, aten.bmm.default), count(graph, aten.mm.default)) == (2, 5 + 4 + 1)


def second_order(p: Any, batch: Any) -> Tensor:
    """Its weights' gradients are factors of products again."""
    inner = fcg.grad(lambda q: F.mse_loss(mlp(q, batch["x"]), batch["y"]))(p)
    stepped = {name: p[name] - 0.1 * inner[name] for name in p}
    return F.mse_loss(mlp(stepped, batch["x"]), batch["y"])


@pytest.mark.parametrize(
    "loss",
    [
        second_order,
        lambda p, batch: plain(p, batch) + plain(p, {"x": batch["y"], "y": batch["x"]}),
        lambda p, batch: (
            (F.linear(batch["x"], p["w0"], p["b0"]) + F.linear(batch["y"], p["w1"])).square().mean()
        ),
        lambda p, batch: F.mse_loss(mlp({"w0": p["w0"], "b0": p["b0"]}, batch["x"]), batch["y"]),
    ],
    ids=["second order", "two networks", "one gradient for two", "one layer"],
)  # fmt: skip
def test_what_products_need_comes_before_them(loss: Any) -> None:
    changed(step_of(loss), batch_gradients)


LAYERS = st.tuples(
    st.integers(0, 9), st.integers(0, 9), st.integers(0, 3), st.booleans(), st.booleans(), st.booleans()
)


@given(layers=st.lists(LAYERS, min_size=1, max_size=6), seen=st.integers(0, 3))
def test_any_network_of_shared_weights_keeps_its_gradients(layers: list[Any], seen: int) -> None:
    """In fp64, where another order of sums is far below any mistake."""

    def loss(p: Any, batch: Any) -> Tensor:
        known = [batch["x"].double(), batch["y"].double()]
        for one, other, weight, has_bias, is_bent, is_detached in layers:
            bias = p[f"b{weight}"].double() if has_bias else None
            h = F.linear(known[one % len(known)], p[f"w{weight}"].double(), bias)
            h = torch.relu(h) if is_bent else h
            kept = known[other % len(known)]
            known.append(h + 0.5 * (kept.detach() if is_detached else kept))
        return known[-1].square().mean()

    def train_step(state: Any, batch: Any) -> Any:
        value, grads = fcg.value_and_grad(loss)(state["p"], batch)
        new = {name: state["p"][name] - 0.1 * grads[name] for name in grads}
        return {"p": new}, {"loss": value, "grad": grads[f"w{seen}"], "twice": grads[f"b{seen}"] * 2}

    params = {name: value.double() for name, value in initial().params.tree.items()}
    module, arguments = graph_of(train_step, fcg.place({"p": params}), batch())
    assert_same_results(module, arguments, batch_gradients, rtol=1e-10, atol=1e-10)


def test_gradients_that_orthogonal_updates_multiply_are_left_alone() -> None:
    params = {f"w{i}": torch.eye(WIDTH) for i in range(3)}
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.muon(1e-2, weight_decay=0.1))

    def loss(p: Any, batch: Any) -> Tensor:
        h = batch["x"]
        for i in range(3):
            h = torch.tanh(F.linear(h, p[f"w{i}"]))
        return F.mse_loss(h, batch["y"])

    module, _ = graph_of(step_of(loss), state, batch())
    before = count(module.graph, aten.bmm.default)
    batch_gradients(module.graph)
    assert count(module.graph, aten.bmm.default) == before


def test_gradients_that_are_seen_and_clipped_are_the_same() -> None:
    chosen = fcg.optim.chain(fcg.optim.clip_by_global_norm(0.1), fcg.optim.adamw(1e-2, weight_decay=0.1))

    def train_step(state: Any, batch: Any) -> Any:
        value, grads = fcg.value_and_grad(plain)(state.params, batch)
        metrics = {
            "loss": value,
            "norm": fcg.optim.global_norm(grads),
            "grad": grads["w2"],
            "bias": grads["b1"],
        }
        return state.apply_gradients(grads), metrics

    state = fcg.TrainState.create(params=dict(initial().params.tree), optimizer=chosen)
    assert count(changed(train_step, batch_gradients, state), aten.bmm.default) == 1


def test_large_factors_are_left_alone() -> None:
    graph = changed(step_of(plain), batch_gradients, initial(width=128), batch(width=128))
    assert count(graph, aten.bmm.default) == 1
    wide = {name: value.repeat(2000, 1) for name, value in batch(width=128).items()}
    graph = changed(step_of(plain), batch_gradients, initial(width=128), wide)
    assert count(graph, aten.bmm.default) == 0


def by_hand(act: Any) -> Any:
    """A step without autograd; ``act`` gets two matrices from the batch and returns metrics."""

    def train_step(state: Any, batch: Any) -> Any:
        return state, act(batch["x"] * 1, batch["y"] * 1)

    return train_step


def sums_first(x: Tensor, y: Tensor) -> Any:
    biases = [0.1 - z.sum(0, keepdim=True)[0] for z in (x, y)]
    return [*biases, x.t() @ x, y.t() @ y]


def sum_needed_by_a_product(x: Tensor, y: Tensor) -> Any:
    first, total = x.t() @ y, x.sum(0, keepdim=True)
    centred = y - total / N
    return first, centred.t() @ y, centred.sum(0, keepdim=True)


def written_before_the_sums(x: Tensor, y: Tensor) -> Any:
    products = x.t() @ x, y.t() @ y
    x[0].mul_(2.0)
    return products, x.sum(0, keepdim=True), y.sum(0, keepdim=True)


def written_before_the_products(x: Tensor, y: Tensor) -> Any:
    sums = x.sum(0, keepdim=True), y.sum(0, keepdim=True)
    x[0].mul_(2.0)
    return sums, x.t() @ x, y.t() @ y


def written_between_the_products(x: Tensor, y: Tensor) -> Any:
    first = x.t() @ x
    x[0].mul_(2.0)
    return first, y.t() @ y, x.t() @ x


def restrided(x: Tensor, y: Tensor) -> Any:
    return x.t() @ y, torch.as_strided(y.t() @ y, (WIDTH,), (WIDTH + 1,), 0)


@pytest.mark.parametrize(
    ("act", "batched"),
    [
        (sums_first, 1), (sum_needed_by_a_product, 1), (written_before_the_sums, 1), (written_before_the_products, 1),
        (written_between_the_products, 0), (restrided, 1),
    ],
)  # fmt: skip
def test_values_are_read_where_they_are_what_they_were(act: Any, batched: int) -> None:
    assert count(changed(by_hand(act), batch_gradients), aten.bmm.default) == batched


@pytest.mark.cuda
def test_a_captured_step_is_within_rounding_of_the_eager_one() -> None:
    step = fcg.graph_step(step_of(plain), branches=1)
    state, twin = initial(device="cuda"), initial(device="cuda")
    for seed in range(16):
        state, metrics = step(state, batch(seed, device="cuda"))
        twin, expected = step.eager(twin, batch(seed, device="cuda"))
        torch.testing.assert_close(metrics["loss"], expected["loss"], rtol=1e-4, atol=1e-5)
    assert step.stats.replays == 16
    assert step.lower(state, batch(device="cuda")).plan.as_text().count("aten.bmm.default(") == 1
