"""Optimizers with a norm or a matrix for each leaf, on shards: what one process computes with the leaves whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim
from functional_cg.shards.tensor import Sharded
from tests.sharding.law import CALLS as CALLS_BESIDE
from tests.sharding.law import assert_same_step, batches, on_gloo_and_nccl, rank_of
from tests.sharding.programs import PROGRAMS, Setting, mlp_state
from tests.sharding.ranks import on_ranks
from tests.shares import diagonal, share

RANKS = 2
CALLS = 16  # so that each leaf goes further than sums in another order differ

PLANTED = "norms of shards"


def of_this_rank(grads: Any, state: Any, params: Any) -> Any:
    """Gradients over their norm, which forgets what the other ranks hold."""

    def scaled(g: Tensor) -> Tensor:
        held = g.local if isinstance(g, Sharded) else g
        return g / (held.norm() + 1e-3)

    return fcg.tree.map(scaled, grads), state


def no_state(params: Any) -> Any:
    return optim.EmptyState()


# Some of them in a row: each costs the ranks two traces and the steps of two runs, at each stage.
OPTIMIZERS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "lars": lambda: optim.lars(0.05, trust_coefficient=0.1, weight_decay=0.1),
        "adafactor": lambda: optim.adafactor(0.05, weight_decay=0.1),
        "muon": lambda: optim.muon(0.05, weight_decay=0.1, ns_dtype=torch.float32),
        "noisy, centred and clipped": lambda: optim.chain(
            optim.add_noise(1e-3, 0.55, key=3), optim.centralize(), optim.adaptive_clip(0.05),
            optim.clip_by_norm(0.05), optim.sgd(0.5),
        ),
        "averaged, lookahead, novograd": lambda: optim.ema(
            optim.lookahead(optim.novograd(0.05, weight_decay=0.1), sync_period=3), 0.9
        ),
        "schedule-free, sharpness-aware": lambda: optim.schedule_free(optim.sgd(0.05)),
        PLANTED: lambda: optim.chain(
            optim.GradientTransformation.from_functions(no_state, of_this_rank), optim.sgd(0.05)
        ),
    }
)  # fmt: skip


def step_of(state: Any, batch: Any) -> Any:
    """As of the MLP, without a draw: all ranks together see what one process sees of all rows."""
    loss, grads = fcg.value_and_grad(loss_of)(state.params, batch)
    new = state.apply_gradients(grads)
    return new, {"loss": fcg.sharding.mean(loss), "sizes": optim.norms(new.params)}


def sharp_step_of(state: Any, batch: Any) -> Any:
    """The same with gradients from uphill, which lies where the mean over ranks of the gradients leads."""
    loss, grads = optim.sam(fcg.value_and_grad(loss_of), 0.1, adaptive=True)(state.params, batch)
    return state.apply_gradients(grads), {"loss": fcg.sharding.mean(loss)}


def loss_of(params: Any, batch: Any) -> Tensor:
    h = torch.tanh(batch["x"] @ params["w1"] + params["b1"])
    out = params["scale"] * (h @ params["w2"] + params["b2"]) * params["one"]
    return (out + params["none"].sum() + params["even"].square().mean() - batch["y"]).square().mean()


STEP_OF: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"schedule-free, sharpness-aware": sharp_step_of}
)


def trained(runs: list[tuple[str, int]], device: str) -> Any:
    """Optimizers, each at a stage: captured steps begin with the bits of eager ones; the parameters, on rank 0."""
    ends = {}
    for name, stage in runs:
        captured = mlp_state(OPTIMIZERS[name])(Setting({"data": RANKS}, stage).zero(device), device)
        eager, batch_of = fcg.fork(captured), batches("mlp", device, rank_of())
        step = fcg.graph_step(STEP_OF.get(name, step_of), lowering="aten")
        for call in range(CALLS_BESIDE):
            captured, eager, metrics, _ = assert_same_step(step, captured, eager, batch_of(call), call)
        for call in range(CALLS_BESIDE, CALLS):
            captured, metrics = step(captured, batch_of(call))
        assert step.stats.replays == CALLS
        ends[name, stage] = whole = fcg.sharding.state_dict(captured)
        for leaf, size in metrics.get("sizes", {}).items() if whole else ():
            torch.testing.assert_close(size.cpu(), whole[f"params.{leaf}"].norm(), rtol=1e-5, atol=0)
    return ends


@cache
def alone(name: str) -> Any:
    """The same on one process, on the rows of all ranks."""
    state = mlp_state(OPTIMIZERS[name])(None, "cpu")
    step = fcg.graph_step(STEP_OF.get(name, step_of), lowering="aten")
    for call in range(CALLS):
        parts = [PROGRAMS["mlp"].batch(call, rank) for rank in range(RANKS)]
        state, _ = step.eager(state, fcg.tree.map(lambda *rows: torch.cat(rows), *parts))
    return fcg.state_dict(state)


def gaps(name: str, stage: int, end: Any) -> list[str]:
    """The leaves of the parameters that ended elsewhere than on one process.

    Sums over ranks and rows are taken in another order: a rounding of each number, and 1e-4 of the way of a leaf.
    """
    start, expected = fcg.state_dict(mlp_state(OPTIMIZERS[name])(None, "cpu")), alone(name)
    assert end.keys() == expected.keys()
    found = []
    for path in (path for path in expected if path.startswith("params.")):
        if expected[path].numel():
            way = float((expected[path] - start[path]).abs().max())
            assert way > 1e-4, (name, path)
            gap = float((expected[path] - end[path]).abs().max())
            if not gap <= 1e-4 * way + 1e-6:
                found.append(f"{name} at stage {stage}: {path} by {gap:.1e} of {way:.1e}")
    return found


@on_gloo_and_nccl
def test_sharded_optimizers_are_those_of_whole_leaves(device: str) -> None:
    names = share([name for name in OPTIMIZERS if name != PLANTED], 3, device)
    runs = [*diagonal(names, [3, 1], device), (PLANTED, 3)]
    ends, *others = on_ranks(RANKS, trained, runs, device, device=device)
    assert all(not part for other in others for part in other.values())
    assert len(gaps(PLANTED, 3, ends.pop((PLANTED, 3)))) > 1
    assert [row for (name, stage), end in ends.items() for row in gaps(name, stage, end)] == []


def refused_on_a_mesh() -> str:
    try:
        mlp_state(lambda: optim.from_torch(torch.optim.NAdam, lr=0.1))(
            Setting({"data": RANKS}).zero("cpu"), "cpu"
        )
    except fcg.LayoutError as error:
        return str(error)
    return ""


def test_an_adapted_class_is_refused_on_a_mesh() -> None:
    for text in on_ranks(RANKS, refused_on_a_mesh):
        assert "an optimizer class sees whole parameters; these lie on a mesh" in text
        assert "params['b1']  [7] sharded over data=2" in text
