"""Leaves, gradients and metrics of dtypes that a backend does not send or add up itself; and how sums are rounded."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim, sharding
from tests.sharding.law import on_gloo_and_nccl
from tests.sharding.programs import Setting, randn
from tests.sharding.ranks import on_ranks

RANKS = 4
PLACES = 1000


def complex_leaf() -> Tensor:
    return torch.complex(randn(1, 5, 3), randn(2, 5, 3))


def buffers() -> dict[str, Tensor]:
    """Of dtypes that no backend sends as they are, and lazily conjugated or negated ones."""
    return {
        "small": torch.arange(-2, 3, dtype=torch.int16), "wide": torch.tensor(7, dtype=torch.uint16),
        "float8": randn(3, 4).to(torch.float8_e5m2), "mask": torch.tensor([True, False]),
        "conjugated": complex_leaf().conj(), "negative": complex_leaf().conj().imag,
    }  # fmt: skip


def complex_loss(params: Any, x: Tensor) -> Tensor:
    return (x.to(params["w"].dtype) @ params["w"].conj()).abs().square().mean() + params["b"].square().sum()


def filters_step(state: Any, x: Tensor) -> Any:
    """Complex parameters beside trained ones, with their gradients and reductions among the metrics."""
    loss, grads = fcg.value_and_grad(complex_loss)(state.params, x)
    w = state.params["w"]
    metrics = {
        "loss": sharding.mean(loss), "grad": sharding.gather(grads["w"]), "norm": w.norm(), "sum": w.sum(),
        "mean": sharding.mean(1j * x.sum()), "moved": sharding.gather(w * 1j),
    }  # fmt: skip
    return state.apply_gradients(grads), metrics


def trained(device: str, stage: int) -> Any:
    zero = Setting({"data": 2}, stage).zero(device)
    rules = {"trained": optim.sgd(0.1), "kept": optim.set_to_zero()}
    rank, home = zero.mesh.rank, zero.mesh.device
    state = fcg.TrainState.create(
        params={"w": complex_leaf(), "b": torch.ones(3)}, buffers=buffers(), sharding=zero,
        optimizer=optim.partition(rules, {"w": "kept", "b": "trained"}),
    )  # fmt: skip
    step, eager = fcg.graph_step(filters_step, lowering="aten"), fcg.fork(state)
    for call in range(2):
        x = randn(10 * call + rank, 4, 5).to(home)
        eager, expected = step.eager(eager, x)
        state, metrics = step(state, x)
        assert all(torch.equal(metrics[name], expected[name]) for name in expected), call
    whole = sharding.state_dict(state).get("params.w")  # on rank 0
    mine = {name: bits(leaf.cpu()) for name, leaf in fcg.snapshot(state.buffers).items()}
    return {name: leaf.cpu() for name, leaf in metrics.items()}, whole, mine


def bits(tensor: Tensor) -> str:
    memory = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(memory.numpy().tobytes()).hexdigest()


@on_gloo_and_nccl
@pytest.mark.parametrize("stage", [1, 3])
def test_complex_leaves_are_gathered_and_their_gradients_reduced(stage: int, device: str) -> None:
    results = on_ranks(2, trained, device, stage, device=device)
    w = complex_leaf().requires_grad_()
    x = torch.cat([randn(10, 4, 5), randn(11, 4, 5)])
    loss = (x.to(w.dtype) @ w.conj()).abs().square().mean()
    (grad,) = torch.autograd.grad(loss, w)
    for metrics, _, mine in results:
        expected = {"grad": grad, "norm": w.norm(), "sum": w.sum(), "mean": 0.5j * x.sum(), "moved": 1j * w}
        for name, value in expected.items():
            torch.testing.assert_close(metrics[name], value.detach(), msg=name)
        assert mine == {name: bits(leaf) for name, leaf in buffers().items()}
    assert torch.equal(results[0][1], complex_leaf())


def counted(device: str) -> Any:
    zero = Setting({"data": 2}, 3).zero(device)
    state = fcg.TrainState.create(params={"w": torch.ones(3)}, optimizer=optim.sgd(0.1), sharding=zero)
    numbers = [
        torch.tensor([100, 3], dtype=d)
        for d in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    ]

    def count(state: Any, numbers: list[Tensor]) -> Any:
        return sharding.mean(numbers), sharding.sum(numbers)

    def nothing(state: Any) -> Any:
        return state, {"parts": {}}

    means, sums = fcg.graph_fn(count, lowering="aten")(state, [n.to(zero.mesh.device) for n in numbers])
    state, _ = fcg.graph_step(nothing, lowering="aten")(state)
    return [n.tolist() for n in means], [(n.dtype, n[1].item()) for n in sums], state.generation


@on_gloo_and_nccl
def test_integers_are_counted_whatever_their_size(device: str) -> None:
    """And a step that computes nothing is captured on all ranks, too."""
    for means, sums, generation in on_ranks(2, counted, device, device=device):
        assert means == [[100.0, 3.0]] * 5
        assert sums == [(d, 6) for d in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)]
        assert generation == 1


# -- rounding -----------------------------------------------------------------------------------------------------


def values(rank: int) -> Tensor:
    return randn(rank, PLACES).bfloat16()


def rounded(rank_axes: dict[str, int]) -> Any:
    """What a rank holds of sums in bf16: among the metrics, and of gradients that it keeps whole or in shards."""
    found: dict[str, Any] = {}
    for stage in (1, 3):
        zero = Setting(rank_axes, stage, {"param_dtype": torch.bfloat16}).zero("cpu")
        state = fcg.TrainState.create(
            params={"w": torch.ones(PLACES)}, optimizer=optim.sgd(1.0), sharding=zero
        )

        def step(state: Any, x: Tensor) -> Any:
            grads = fcg.grad(lambda p: (p["w"] * x).sum())(state.params)
            out = {"sum": sharding.sum(x), "mean": sharding.mean(x), "grad": sharding.gather(grads["w"])}
            return state.apply_gradients(grads), out

        state, metrics = fcg.graph_step(step, lowering="aten")(state, values(zero.mesh.rank))
        found |= {f"{name} at stage {stage}": value for name, value in metrics.items()}
        found[f"new leaf at stage {stage}"] = sharding.gather(state.params["w"])
    return {name: (bits(value), value) for name, value in found.items()}


@pytest.mark.parametrize("axes", [{"data": RANKS}, {"replica": 2, "shard": 2}], ids=str)
def test_all_ranks_hold_the_same_bits_of_a_sum_in_bf16(axes: dict[str, int]) -> None:
    """Each of its additions rounds, and nothing else does."""
    results = on_ranks(RANKS, rounded, axes)
    every = torch.stack([values(rank).double() for rank in range(RANKS)])
    largest = every.abs().sum(0)
    for name, (_, value) in results[0].items():
        assert len({of_rank[name][0] for of_rank in results}) == 1, name
        if not name.startswith("new leaf"):
            exact = every.sum(0) if name.startswith("sum") else every.mean(0)
            off = (value.double() - exact).abs() / (largest if name.startswith("sum") else largest / RANKS)
            assert off.max() <= (RANKS - 1) * 2**-8, name
            assert off.max() > 2**-9, f"{name} is more exact than the page says"


def averaged(device: str) -> Any:
    """An average of f32 parameters that a loss sees in bf16, moved in the step; and both kinds of gathers outside."""
    policy = fcg.precision.Policy()
    zero = sharding.zero(Setting({"data": 2}, 3).zero(device).mesh, stage=3, policy=policy)
    params = {"w": randn(3, 7, 5), "b": randn(4, 3)}
    rate, mean = optim.sgd(0.1), fcg.snapshot(params)
    state = fcg.TrainState.create(params=params, buffers=mean, optimizer=rate, sharding=zero)

    def step(state: Any, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: (x.bfloat16() @ p["w"]).sum() + p["b"].sum())(state.params)
        new = state.apply_gradients(grads)
        whole = sharding.gather(new.params, masters=True)
        mean = fcg.tree.map(lambda mean, p: mean.lerp(p, 0.25), state.buffers, whole)
        return new.replace(buffers=mean), {"loss": loss}

    with pytest.raises(fcg.LayoutError, match=r"To fix: give `fcg.sharding.gather\(leaf, masters=True\)`"):
        fcg.graph_step(lambda state: (state.replace(buffers=state.params), {}), lowering="aten")(state)
    captured, eager = fcg.graph_step(step, lowering="aten"), fcg.fork(state)
    before = sharding.gather(state.params, masters=True)
    x = randn(1, 2, 7).to(zero.mesh.device)
    eager, _ = captured.eager(eager, x)
    state, _ = captured(state, x)
    masters, seen = sharding.gather(state.params, masters=True), sharding.gather(state.params)
    moved = fcg.tree.map(lambda mean, p: mean.lerp(p, 0.25), before, masters)
    results = before, masters, seen, moved, fcg.snapshot(state.buffers), fcg.snapshot(eager.buffers)
    return [{name: leaf.cpu() for name, leaf in tree.items()} for tree in results]


@on_gloo_and_nccl
def test_masters_are_gathered_in_their_own_dtype(device: str) -> None:
    for before, masters, seen, moved, mean, again in on_ranks(2, averaged, device, device=device):
        assert torch.equal(before["w"], randn(3, 7, 5))
        for name in ("w", "b"):
            assert torch.equal(mean[name], moved[name])
            assert torch.equal(mean[name], again[name])
            assert torch.equal(seen[name], masters[name].bfloat16())
            assert not torch.equal(seen[name].float(), masters[name])
