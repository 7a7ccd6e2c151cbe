"""``remat``: the same bits with less memory; recomputed values are not merged away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.shares import CALLS, share

pytestmark = pytest.mark.usefixtures("scalar_loops")

LAYERS = 3
MM = torch.ops.aten.mm.default


def layer(p: Any, x: Tensor, key: Tensor) -> Any:
    hidden = torch.nn.functional.gelu(x @ p["in"])
    return {"out": x + fcg.random.dropout(key, hidden, 0.2) @ p["out"]}


def without_dropout(p: Any, x: Tensor, key: Tensor) -> Any:
    return {"out": x + torch.nn.functional.gelu(x @ p["in"]) @ p["out"]}


KINDS: dict[str, Any] = {
    "plain": lambda fn: fn,
    "all again": fcg.remat,
    "products kept": lambda fn: fcg.remat(fn, policy=lambda op: op is MM),
}


def train_step(kind: str, layer: Any = layer) -> Any:
    of_layer = KINDS[kind](layer)

    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            h = x
            for i, p in enumerate(params):
                h = of_layer(p, h, fcg.random.fold_in(state.key, i))["out"]
            return (h**2).mean()

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        key = fcg.random.fold_in(state.key, state.step)
        return state.apply_gradients(grads).replace(key=key), {"loss": loss}

    return step


def a_state(device: str = "cpu") -> Any:
    torch.manual_seed(0)
    params = [{"in": torch.randn(16, 32) / 4, "out": torch.randn(32, 16) / 4} for _ in range(LAYERS)]
    params = fcg.tree.map(lambda leaf: leaf.to(device), params)
    return fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1), key=fcg.random.key(3))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("kind", ["all again", "products kept"])
def test_the_same_bits_as_without(kind: str, device: str) -> None:
    step, plain = (fcg.graph_step(train_step(name), lowering="aten") for name in (kind, "plain"))
    state = a_state(device)
    twin, other = fcg.fork(state), fcg.fork(state)
    for call in range(CALLS):
        x = torch.randn(64, 16, device=device)
        state, metrics = step(state, x)
        twin, expected = step.eager(twin, x)
        other, reference = plain(other, x)
        assert_trees_all_equal((state, metrics), (twin, expected), f"eager, call {call}")
        assert_trees_all_equal((state, metrics), (other, reference), f"without remat, call {call}")
    assert (step.stats.captures, step.stats.replays) == (1, CALLS)


@pytest.mark.parametrize("policy", [None, lambda op: op is MM], ids=["all again", "products kept"])
def test_the_apply_of_a_module(policy: Any) -> None:
    torch.manual_seed(0)
    parts = [
        nn.Linear(16, 16),
        nn.BatchNorm1d(16),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Linear(16, 16),
        nn.Dropout(0.2),
    ]
    apply, params, buffers = fcg.from_module(nn.Sequential(*parts))

    def step_of(block: Any) -> Any:
        def loss_fn(params: Any, buffers: Any, x: Tensor, key: Tensor) -> Any:
            for i in range(2):
                x, buffers = block(params, buffers, x, key=fcg.random.fold_in(key, i))
            return x.square().mean(), buffers

        def step(state: Any, x: Tensor) -> Any:
            key = fcg.random.fold_in(state.key, state.step)
            grads_of = fcg.value_and_grad(loss_fn, has_aux=True)
            (loss, buffers), grads = grads_of(state.params, state.buffers, x, key)
            return state.apply_gradients(grads, buffers=buffers), {"loss": loss, "grads": grads}

        return fcg.graph_step(step, lowering="aten")

    step, plain = step_of(fcg.remat(apply, policy=policy)), step_of(apply)
    state = fcg.TrainState.create(
        params=params, buffers=buffers, optimizer=fcg.optim.sgd(0.1), key=fcg.random.key(3)
    )
    twin, other = fcg.fork(state), fcg.fork(state)
    for call in range(CALLS):
        x = torch.randn(8, 16)
        state, metrics = step(state, x)
        twin, expected = step.eager(twin, x)
        assert_trees_all_equal((state, metrics), (twin, expected), f"eager, call {call}")
        other, reference = plain(other, x)
        assert_trees_all_equal((state, metrics), (other, reference), f"without remat, call {call}")


def lowered(kind: str, lowering: Any) -> Any:
    return fcg.graph_step(train_step(kind), lowering=lowering).lower(a_state(), torch.randn(256, 16))


def test_products_and_memory() -> None:
    found = {kind: lowered(kind, "aten") for kind in KINDS}
    products = {kind: sum(instr.op is MM for instr in one.program.instrs) for kind, one in found.items()}
    # A layer has two products, and two gradients of each, but for the first input; the first product comes again.
    assert products == {"plain": 6 * LAYERS - 1, "all again": 7 * LAYERS - 1, "products kept": 6 * LAYERS - 1}
    peaks = {kind: one.memory_analysis()["peak"] for kind, one in found.items()}
    assert peaks["all again"] < peaks["products kept"] < peaks["plain"]
    values = 256 * 32 * 4  # bytes of one value between two products; keeping all is three of them per layer
    assert peaks["plain"] - peaks["all again"] >= 2 * (LAYERS - 1) * values


@pytest.mark.kernels
@pytest.mark.parametrize(("kind", "again"), share([("all again", 1), ("plain", 0)], 2))
def test_the_compiler_does_not_merge_the_two_runs(kind: str, again: int) -> None:
    """Without masks, which take a compiler seconds."""
    step = fcg.graph_step(train_step(kind, without_dropout), lowering="inductor")
    _, codes = run_and_get_code(step, a_state(), torch.randn(256, 16))
    products = sum(code.count("extern_kernels.mm(") + code.count("extern_kernels.addmm(") for code in codes)
    assert products == (6 + again) * LAYERS - 1


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="`fn` must be a function, got Tensor"):
        fcg.remat(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`policy` must be a function, got str"):
        fcg.remat(layer, policy="dots")  # type: ignore[arg-type]
