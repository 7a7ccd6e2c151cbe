"""Independent judges: ranks train on slices as one process does on the whole batch; H93, H94, H98 and streams in turn.

On gloo there are no streams and no kernels that are late; the same functions run there all the same.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim, sharding
from functional_cg.testing import assert_trees_all_equal
from tests.sharding.law import CALLS as CALLS_ON_RANKS
from tests.sharding.law import HYBRID, held, on_gloo_and_nccl
from tests.sharding.programs import Setting, randn
from tests.sharding.ranks import on_ranks
from tests.shares import CALLS

ROWS = 4  # of each rank
LATE = 20_000_000  # cycles that a kernel takes which the next one waits for


def params() -> dict[str, Tensor]:
    """Leaves that two and four ranks do not divide, and one smaller than they are."""
    return {"w": randn(1, 5, 7) / 2, "b": torch.zeros(7), "v": randn(2, 7, 3) / 2, "one": torch.ones(1)}


def loss_fn(params: Any, batch: Any) -> Tensor:
    hidden = torch.tanh(batch["x"] @ params["w"] + params["b"])
    return (params["one"] * (hidden @ params["v"]) - batch["y"]).square().mean()


def train_step(state: Any, batch: Any) -> Any:
    loss, grads = fcg.value_and_grad(loss_fn)(state.params, batch)
    metrics = {"loss": sharding.mean(loss), "norm": optim.global_norm(grads)}
    return state.apply_gradients(grads), metrics


def rows(call: int, rank: int) -> dict[str, Tensor]:
    seed = 100 * call + rank
    return {"x": randn(seed, ROWS, 5), "y": randn(seed + 50, ROWS, 3)}


def created(setting: Setting, device: str) -> Any:
    home = setting.mesh(device).device
    leaves = {name: leaf.to(home) for name, leaf in params().items()}
    return fcg.TrainState.create(
        params=leaves, optimizer=optim.adamw(0.05, weight_decay=0.1), sharding=setting.zero(device)
    )


# -- one process with the whole batch -----------------------------------------------------------------------------


def on_slices(settings: list[Setting], device: str) -> Any:
    found = []
    for setting in settings:
        state, step = created(setting, device), fcg.graph_step(train_step, lowering="aten")
        metrics: Any = {}
        for call in range(CALLS):
            batch = {name: leaf.to(device) for name, leaf in rows(call, dist.get_rank()).items()}
            state, metrics = step(state, batch)
        whole = {name: leaf.cpu() for name, leaf in sharding.gather(state.params).items()}
        found.append((whole, {name: leaf.cpu() for name, leaf in metrics.items()}))
    return found


def on_the_whole(ranks: int) -> Any:
    """torch alone, in float64: no code of the package."""
    leaves = {name: leaf.double().requires_grad_() for name, leaf in params().items()}
    adamw = torch.optim.AdamW(leaves.values(), lr=0.05, weight_decay=0.1)
    loss, norm = torch.zeros(()), torch.zeros(())
    for call in range(CALLS):
        slices = [rows(call, rank) for rank in range(ranks)]
        batch = {name: torch.cat([part[name] for part in slices]).double() for name in ("x", "y")}
        adamw.zero_grad()
        loss = loss_fn(leaves, batch)
        loss.backward()
        norm = torch.stack([leaf.grad.norm() for leaf in leaves.values()]).norm()
        adamw.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}, {"loss": loss.detach(), "norm": norm}


def assert_close(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        for name, leaf in b.items():
            torch.testing.assert_close(a[name].double(), leaf, rtol=1e-3, atol=1e-4)


@on_gloo_and_nccl
def test_slices_train_as_the_whole_batch_does(device: str) -> None:
    """The mean over ranks, and not the sum: the norm of a gradient says so, which Adam does not see."""
    results = on_ranks(
        2, on_slices, [Setting({"data": 2}, stage) for stage in (1, 2, 3)], device, device=device
    )  # type: ignore[arg-type]
    for of_rank in results:
        for found in of_rank:
            assert_close(found, on_the_whole(2))


def test_slices_of_a_hybrid_mesh_train_as_the_whole_batch_does() -> None:
    for of_rank in on_ranks(4, on_slices, [Setting(HYBRID, 1), Setting(HYBRID, 3)], "cpu"):
        for found in of_rank:
            assert_close(found, on_the_whole(4))


# -- hostile surroundings -----------------------------------------------------------------------------------------


def streams(device: str) -> list[Any]:
    """The default stream and two others; on the CPU nothing of the kind."""
    if device == "cpu":
        return []
    return [contextlib.nullcontext(), *(torch.cuda.stream(torch.cuda.Stream()) for _ in range(2))]


def late(device: str, batch: Any) -> Any:
    """The batch, at the end of a long kernel."""
    if device == "cuda":
        torch.cuda._sleep(LATE)
    return {name: leaf + 0 for name, leaf in batch.items()}


def gathered_batch(device: str, call: int) -> Any:
    """Rows of this rank that come out of an asynchronous collective, waited for on the caller's stream."""
    mine = {name: leaf.to(device) for name, leaf in rows(call, dist.get_rank()).items()}
    out = {}
    for name, leaf in mine.items():
        parts = [torch.empty_like(leaf) for _ in range(dist.get_world_size())]
        work = dist.all_gather(parts, leaf, async_op=True)
        work.wait()
        out[name] = parts[(dist.get_rank() + 1) % len(parts)]
    return out


def hostile(state: Any, module: torch.nn.Module) -> None:
    """Whatever the user can reach, between two calls."""
    for leaf in module.parameters():
        leaf.grad = torch.full_like(leaf, 7.0)
        leaf.data = torch.zeros_like(leaf)
    module.zero_grad(set_to_none=True)
    module.to(torch.float64)
    for leaf in fcg.tree.leaves(sharding.gather(state.params)):
        leaf.fill_(float("nan"))  # copies, the caller's own


def kept(surroundings: str, stage: int, device: str) -> Any:
    """Calls in some surroundings, each with the bits of the eager run of the same batch."""
    setting = Setting({"data": 2}, stage)  # type: ignore[arg-type]
    state = created(setting, device)
    eager, home = fcg.fork(state), setting.mesh(device).device
    step, module = fcg.graph_step(train_step, lowering="aten"), torch.nn.Linear(3, 3)
    places = streams(device)
    for call in range(CALLS_ON_RANKS):
        batch = {name: leaf.to(home) for name, leaf in rows(call, dist.get_rank()).items()}
        with places[call % 3] if surroundings == "streams" else contextlib.nullcontext():
            if surroundings == "collectives before":
                for _ in range(50):
                    dist.all_reduce(torch.ones(1000, device=home), async_op=True)
            batch = (
                gathered_batch(str(home), call) if surroundings == "an async batch" else late(device, batch)
            )
            expected_batch = {name: leaf.clone() for name, leaf in batch.items()}
            state, metrics = step(state, batch)
            for leaf in batch.values():
                leaf.fill_(float("nan"))  # the caller's own, as soon as the call has returned
            eager, expected = step.eager(eager, expected_batch)
            assert_trees_all_equal((held(state), metrics), (held(eager), expected), f"call {call}")
        if surroundings == "hostile code":
            hostile(state, module)
    if surroundings == "many captures":
        for _ in range(100 if device == "cuda" else 2):
            dist.all_reduce(torch.ones(1000, device=home), async_op=True)
            with fcg.graph_step(train_step, lowering="aten") as another:
                another(fcg.fork(state), batch_of(home))
    return step.stats.captures, step.stats.replays


def batch_of(home: torch.device) -> Any:
    return {name: leaf.to(home) for name, leaf in rows(0, dist.get_rank()).items()}


SURROUNDINGS = ("streams", "collectives before", "an async batch", "hostile code", "many captures")


def surroundings(device: str) -> tuple[str, ...]:
    return SURROUNDINGS[device == "cpu" :]  # which has no streams


def all_kept(device: str, stage: int) -> Any:
    return {name: kept(name, stage, device) for name in surroundings(device)}


@on_gloo_and_nccl
@pytest.mark.parametrize("stage", [3])
def test_h93_h94_h98_surroundings_do_not_matter(stage: int, device: str) -> None:
    """Streams in turn behind late kernels; captures right after collectives, and before any of a group; batches that
    come out of a collective; code that takes back all that it can reach: the bits of the eager run, after each call.
    """
    for counts in on_ranks(2, all_kept, device, stage, device=device):
        assert counts == dict.fromkeys(surroundings(device), (1, CALLS_ON_RANKS))


def mixed(device: str) -> Any:
    """Parameters in float32, read and reduced in bfloat16: each step's bits, and the dtypes of what is moved."""
    options = {"param_dtype": torch.bfloat16}
    state = created(Setting({"data": 2}, 3, options), device)
    eager, home = fcg.fork(state), state.params["w"].device

    def mixed_step(state: Any, batch: Any) -> Any:
        return train_step(state, {"x": batch["x"].bfloat16(), "y": batch["y"]})

    step = fcg.graph_step(mixed_step, lowering="aten")
    for _ in range(CALLS_ON_RANKS):
        batch = batch_of(home)
        state, metrics = step(state, batch)
        eager, expected = step.eager(eager, batch)
        assert_trees_all_equal((held(state), metrics), (held(eager), expected))
    instrs = step.lower(state, batch_of(home)).program.instrs
    moved = [
        {var.spec.dtype for var in instr.inputs()}
        for instr in instrs
        if "all_gather" in str(instr.op) or "reduce_scatter" in str(instr.op)
    ]
    return moved, {str(leaf.dtype) for leaf in fcg.tree.leaves(held(state.params))}


@on_gloo_and_nccl
def test_h116_what_is_moved_is_bfloat16_and_what_is_kept_float32(device: str) -> None:
    for moved, dtypes in on_ranks(2, mixed, device, device=device):
        assert moved == [{torch.bfloat16}] * len(moved) != []
        assert dtypes == {"torch.float32"}
