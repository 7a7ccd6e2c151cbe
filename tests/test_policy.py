"""Precision policies: where casts happen, sums in another dtype, gradients narrower than parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim
from functional_cg.optim.rules import fused as _fused
from functional_cg.precision import Policy
from functional_cg.testing import assert_trees_all_close, assert_trees_all_equal

CALLS = 16  # as many as a loss needs to fall

BF16 = Policy(compute=torch.bfloat16)
F16 = Policy(compute=torch.float16)

on_both_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_params() -> Any:
    return {"in": randn(0, 8, 16) / 3, "out": randn(1, 16, 1) / 4, "scale": torch.ones(())}


def batch_of(call: int, device: str) -> Any:
    x = randn(call + 2, 32, 8)
    return {"x": x.to(device), "y": x.sum(1).to(device)}


def loss_of(params: Any, batch: Any) -> Tensor:
    hidden = torch.relu(batch["x"].to(params["in"].dtype) @ params["in"])
    out = (hidden @ params["out"]).squeeze(1) * params["scale"]
    return (out.float() - batch["y"]).square().mean()


# -- recipes ------------------------------------------------------------------------------------------------------


class Scaled(fcg.TrainState):
    loss_scale: fcg.LossScale


def cast_in_the_loss(state: Any, batch: Any) -> Any:
    loss, grads = fcg.value_and_grad(lambda p: loss_of(BF16.to_compute(p), batch))(state.params)
    assert_dtypes(grads, torch.float32)
    return state.apply_gradients(grads), {"loss": loss}


def narrow_gradients(state: Any, batch: Any) -> Any:
    """Of the parameters as they are cast, half as large."""
    loss, grads = fcg.value_and_grad(loss_of)(BF16.to_compute(state.params), batch)
    assert_dtypes(grads, torch.bfloat16)
    return state.apply_gradients(grads), {"loss": loss, "norm": optim.global_norm(grads)}


def microbatches(state: Any, batch: Any) -> Any:
    grads_of = fcg.microbatches(4, dtype=BF16.accumulate)(fcg.value_and_grad(loss_of))
    loss, grads = grads_of(BF16.to_compute(state.params), batch)
    assert_dtypes(grads, torch.float32)
    return state.apply_gradients(grads), {"loss": loss}


def loss_scale(state: Any, batch: Any) -> Any:
    grads_of = fcg.value_and_grad(lambda p: state.loss_scale.scaled(loss_of(F16.to_compute(p), batch)))
    loss, grads = grads_of(state.params)
    grads = state.loss_scale.unscaled(grads)
    finite = optim.global_norm(grads).isfinite()
    new = fcg.cond(finite, lambda: state.apply_gradients(grads), lambda: state)
    return new.replace(loss_scale=state.loss_scale.adjusted(finite)), {"loss": loss, "finite": finite}


def assert_dtypes(tree: Any, dtype: torch.dtype) -> None:
    assert {leaf.dtype for leaf in fcg.tree.leaves(tree)} == {dtype}


RECIPES = {
    "cast in the loss": (cast_in_the_loss, optim.adamw(0.01, weight_decay=0.1), BF16),
    "narrow gradients": (narrow_gradients, optim.adamw(0.01, weight_decay=0.1), BF16),
    "narrow gradients, clipped": (
        narrow_gradients, optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.01, 0.9)), BF16,
    ),
    "narrow gradients, a formula": (narrow_gradients, optim.lion(0.003, weight_decay=0.1), BF16),
    "microbatches": (microbatches, optim.adam(0.01), BF16),
    "loss scale": (loss_scale, optim.adam(0.01), F16),
    "stochastic rounding": (
        microbatches, optim.stochastic_rounding(optim.adam(0.01), key=0), Policy(param=torch.bfloat16),
    ),
}  # fmt: skip


@on_both_devices
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_bits_of_the_eager_run_and_trains(name: str, device: str) -> None:
    function, optimizer, policy = RECIPES[name]
    params = policy.to_param(fcg.tree.map(lambda leaf: leaf.to(device), make_params()))
    state: Any = Scaled.create(
        params=params, optimizer=optimizer, loss_scale=fcg.LossScale.create(2.0**12, device=device)
    )
    twin, step, losses = fcg.fork(state), fcg.graph_step(function, lowering="aten"), []
    for call in range(CALLS):
        state, metrics = step(state, batch_of(call, device))
        twin, expected = step.eager(twin, batch_of(call, device))
        assert_trees_all_equal((state, metrics), (twin, expected), f"call {call}")
        losses.append(float(metrics["loss"]))
    assert (step.stats.captures, step.stats.replays) == (1, CALLS)
    assert_dtypes(state.params, policy.param)
    assert sum(losses[-4:]) < sum(losses[:4])


# -- gradients of another dtype ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optim.sgd(0.1, 0.9),
    "adamw": lambda: optim.adamw(0.1, weight_decay=0.1, mask={"in": True, "out": False, "scale": True}),
    "adagrad": lambda: optim.adagrad(0.1),
    "clipped adam": lambda: optim.chain(optim.clip_by_value(0.5), optim.adam(0.1)),
    "moments first": lambda: optim.chain(optim.scale_by_rms(), optim.sgd(0.1)),
    "formula": lambda: optim.rmsprop(0.1),
    "partition": lambda: optim.partition(
        {"a": optim.adam(0.1), "b": optim.lion(0.1, weight_decay=0.0)}, {"in": "a", "out": "b", "scale": "b"}
    ),
    "lookahead": lambda: optim.lookahead(optim.adam(0.1), sync_period=2),
    "average": lambda: optim.ema(optim.adam(0.1), 0.5),
    "schedule-free": lambda: optim.schedule_free(optim.sgd(0.1)),
    "flat": lambda: optim.flatten(optim.adam(0.1)),
    "rounded": lambda: optim.stochastic_rounding(optim.adam(0.1), key=0),
    "class": lambda: optim.from_torch(torch.optim.Rprop, lr=0.1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_of_another_dtype_are_those_converted(name: str, dtype: torch.dtype) -> None:
    """Small ones too: in float16 their squares would be zeros."""
    one, other = (fcg.TrainState.create(params=make_params(), optimizer=OPTIMIZERS[name]()) for _ in range(2))
    one, other = fcg.snapshot(one), fcg.snapshot(other)
    for call in range(3):
        grads = fcg.tree.map(lambda p, n=call: randn(n, *p.shape).to(dtype) * 1e-4, make_params())
        one = one.apply_gradients(grads)
        other = other.apply_gradients(fcg.tree.map(Tensor.float, grads))
    assert_trees_all_equal(one, other)


def test_a_gradient_that_is_no_tensor_is_refused() -> None:
    state = fcg.TrainState.create(params={"w": torch.ones(3)}, optimizer=optim.sgd(0.1))
    with pytest.raises(
        fcg.LayoutError, match=r"grads\['w'\]  expected torch.float32 \[3\]   got 1\.0(.|\n)*To fix"
    ):
        state.apply_gradients({"w": 1.0})


def test_narrow_gradients_are_never_all_converted_at_once() -> None:
    """Beside bfloat16 parameters and gradients, a step holds buckets of what it converts, and no second copy."""
    count, size = 12, 2**18
    total = 4 * count * size
    assert total >= 3 * _fused.BUCKET_BYTES

    def step_fn(state: Any, x: Tensor) -> Any:
        narrow = BF16.to_compute(state.params)
        grads = fcg.grad(lambda p: sum((leaf * x).float().sum() for leaf in p.values()))(narrow)
        return state.apply_gradients(grads), {}

    for optimizer, wide in ((optim.adamw(0.1, weight_decay=0.1), 4), (optim.sgd(0.1, 0.9), 3)):
        params = {str(n): torch.zeros(size) for n in range(count)}
        state = fcg.TrainState.create(params=params, optimizer=optimizer)
        lowered = fcg.graph_step(step_fn, lowering="aten").lower(state, torch.ones((), dtype=torch.bfloat16))
        memory = lowered.memory_analysis()
        # Of a bucket: the gradient, and what the op returns of params and moments.
        allowed = total + wide * _fused.BUCKET_BYTES
        assert memory["peak"] - memory["state"] <= allowed + 4096, memory


# -- micro-batches ----------------------------------------------------------------------------------------------------


@given(k=st.integers(1, 6), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_slices_are_summed_in_the_asked_dtype(k: int, dtype: torch.dtype) -> None:
    params, x = torch.linspace(-1, 1, 6).bfloat16(), randn(k, 2 * k, 6).bfloat16()

    def loss(p: Tensor, x: Tensor) -> Any:
        return (x * p).square().mean(), {"rows": torch.tensor(float(len(x))), "out": x.float().mean()}

    def summed(wanted: torch.dtype | None) -> Any:
        return fcg.microbatches(k, dtype=wanted)(fcg.value_and_grad(loss, has_aux=True))(params, x)

    (value, aux), grads = summed(dtype)
    parts = [fcg.value_and_grad(loss, has_aux=True)(params, part) for part in x.chunk(k)]
    assert torch.equal(grads, sum(part[1].to(dtype) for part in parts) / k)
    assert torch.equal(value, sum(part[0][0].to(dtype) for part in parts) / k)
    assert (aux["out"].dtype, aux["rows"].dtype, float(aux["rows"])) == (dtype, dtype, 2.0)
    assert summed(None)[1].dtype == torch.bfloat16
    assert_trees_all_close(summed(None)[1].float(), grads.float(), rtol=0.1, atol=0.05)


def test_many_small_gradients_add_up_in_float32_only() -> None:
    """600 ones: in bfloat16 the sum stops at 256."""
    grads_of = fcg.value_and_grad(lambda p, x: (p * x).sum())
    p, x = torch.zeros((), dtype=torch.bfloat16), torch.ones(600, dtype=torch.bfloat16)
    assert float(fcg.microbatches(600, dtype=torch.float32)(grads_of)(p, x)[1]) == 1.0
    assert float(fcg.microbatches(600)(grads_of)(p, x)[1]) < 0.5


def test_what_is_handed_on_keeps_its_dtype() -> None:
    def loss(p: Tensor, x: Tensor, *, buffers: Any) -> Any:
        return (p * x).sum(), {"buffers": {"seen": buffers["seen"] + x.sum()}}

    grads_of = fcg.microbatches(2, carry="buffers", dtype=torch.float64)(
        fcg.value_and_grad(loss, has_aux=True)
    )
    (value, aux), _ = grads_of(torch.ones(()), torch.ones(4), buffers={"seen": torch.zeros(())})
    assert (value.dtype, aux["buffers"]["seen"].dtype) == (torch.float64, torch.float32)
    assert float(aux["buffers"]["seen"]) == 4


# -- the value itself -------------------------------------------------------------------------------------------------


def test_only_floating_leaves_that_differ_are_cast() -> None:
    tree = {
        "w": torch.ones(2),
        "narrow": torch.ones(2).bfloat16(),
        "n": torch.arange(3),
        "name": "x",
        "none": None,
    }
    cast = BF16.to_compute(tree)
    assert cast["w"].dtype == torch.bfloat16
    assert all(cast[name] is tree[name] for name in ("narrow", "n", "name"))
    assert BF16.to_param(cast)["narrow"].dtype == torch.float32


def test_a_policy_is_a_value() -> None:
    assert Policy(compute=torch.float16) == F16 != BF16
    assert len({F16, BF16, Policy(compute=torch.float16)}) == 2
    with pytest.raises(
        TypeError, match=r"precision.Policy: reduce must be a floating dtype .*got torch.int32"
    ):
        Policy(reduce=torch.int32)
    with pytest.raises(
        TypeError, match=r"microbatches: dtype must be a floating dtype of 16 bits or more, such as .*got 32"
    ):
        fcg.microbatches(2, dtype=32)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_dtype_without_sums_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"microbatches: dtype must be .* of 16 bits or more, .*got {dtype}"):
        fcg.microbatches(2, dtype=dtype)
    with pytest.raises(TypeError, match=f"Policy: accumulate must be .* of 16 bits or more, .*got {dtype}"):
        Policy(accumulate=dtype)
    with pytest.raises(ValueError, match="microbatches: expected a positive int, got True"):
        fcg.microbatches(True)


def test_another_policy_is_not_overlooked() -> None:
    policy = BF16

    def step_fn(state: Any, x: Tensor) -> Any:
        return state, {"out": policy.to_compute(x) + 1}

    state, step = fcg.place({"n": torch.zeros(())}), fcg.graph_step(step_fn)
    state, metrics = step(state, torch.ones(2))
    assert metrics["out"].dtype == torch.bfloat16
    policy = F16
    with pytest.raises(
        fcg.BakedValueError, match=r"policy  traced .*compute=torch.bfloat16.*   now .*compute=torch.float16"
    ):
        step(state, torch.ones(2))


def test_a_policy_makes_a_sharding() -> None:
    mesh = fcg.sharding.mesh({"data": -1}, device="cpu")
    zero = fcg.sharding.zero(mesh, policy=Policy(compute=torch.float16, reduce=torch.bfloat16))
    assert zero == fcg.sharding.zero(mesh, param_dtype=torch.float16, reduce_dtype=torch.bfloat16)
    for options in ({"policy": BF16, "param_dtype": torch.bfloat16}, {"policy": torch.bfloat16}):
        with pytest.raises(
            TypeError, match=r"expected a `fcg.precision.Policy` in place of param_dtype and reduce"
        ):
            fcg.sharding.zero(mesh, **options)  # type: ignore[arg-type]
