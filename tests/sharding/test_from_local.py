"""Parallelism that a step writes by hand, on a rank's own pieces: ``sharding.from_local``.

The judge is one process in plain PyTorch, with whole parameters and the batches of all ranks.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg
from functional_cg import sharding
from tests.sharding.law import on_gloo_and_nccl
from tests.sharding.programs import randn
from tests.sharding.ranks import on_ranks
from tests.shares import THOROUGH

RANKS, STEPS, RATE = 2, 4, 0.05


def whole() -> dict[str, Tensor]:
    return {"w1": randn(1, 6, 8), "w2": randn(2, 8, 4), "b": randn(3, 8)}


def batch(call: int, rank: int) -> tuple[Tensor, Tensor]:
    return randn(100 * call + rank, 5, 6), randn(100 * call + rank + 50, 5, 4)


def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(torch.tanh(x @ params["w1"] + params["b"]) @ params["w2"], y)


def judged(ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """One process in plain PyTorch: the losses, and the parameters at the end."""
    params = {name: value.requires_grad_() for name, value in whole().items()}
    optimizer, losses = torch.optim.Adam(params.values(), RATE), []
    for call in range(STEPS):
        loss = torch.stack([loss_of(params, *batch(call, rank)) for rank in range(ranks)]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in params.items()}


def functional() -> Any:
    import torch.distributed._functional_collectives as functional

    return functional


def piece(value: Tensor, mesh: Any, dim: int = 0) -> Tensor:
    return value.chunk(mesh.shards.size, dim)[mesh.shards.rank].contiguous().to(mesh.device)


def adam(param: Tensor, grad: Tensor, mu: Tensor, nu: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mu, nu = mu.lerp(grad, 0.1), nu.lerp(grad.square(), 0.001)
    step = (mu / (1 - 0.9**count)) / ((nu / (1 - 0.999**count)).sqrt() + 1e-8)
    return param - RATE * step, mu, nu


def own_fsdp(lowering: str, device: str) -> Any:
    """FSDP and Adam by hand, in a plain pytree."""
    warnings.simplefilter("ignore", FutureWarning)  # torch renames its functional collectives
    torch_, mesh = functional(), sharding.mesh({"data": -1}, device=device)
    group = mesh.shards.group
    params = sharding.from_local(mesh, {name: piece(value, mesh) for name, value in whole().items()})
    zeros = fcg.tree.map(torch.zeros_like, params)
    state = {"params": params, "mu": zeros, "nu": fcg.tree.map(torch.zeros_like, params)}
    state["count"] = torch.zeros((), device=mesh.device)

    @fcg.graph_step(lowering=lowering)
    def train_step(state: Any, x: Tensor, y: Tensor) -> Any:
        full = {n: torch_.all_gather_tensor(p, 0, group) for n, p in state["params"].items()}
        loss, grads = fcg.value_and_grad(loss_of)(full, x, y)
        count, new = state["count"] + 1, {"params": {}, "mu": {}, "nu": {}}
        for name, grad in grads.items():
            mine = torch_.reduce_scatter_tensor(grad, "avg" if device == "cuda" else "sum", 0, group)
            mine = mine if device == "cuda" else mine / mesh.size
            moved = adam(state["params"][name], mine, state["mu"][name], state["nu"][name], count)
            for part, value in zip(new, moved, strict=True):
                new[part][name] = value
        return {**new, "count": count}, {"loss": sharding.mean(loss)}

    return trained(train_step, state, mesh, lambda state: state["params"])


def our_adam(lowering: str, device: str) -> Any:
    """The same with collectives that autograd goes through, in a ``TrainState`` with Adam of this package."""
    warnings.simplefilter("ignore", FutureWarning)
    torch_, mesh = functional(), sharding.mesh({"data": -1}, device=device)
    pieces = sharding.from_local(mesh, {name: piece(value, mesh) for name, value in whole().items()})
    state = fcg.TrainState.create(params=pieces, optimizer=fcg.optim.adam(RATE))

    @fcg.graph_step(lowering=lowering)
    def train_step(state: Any, x: Tensor, y: Tensor) -> Any:
        def of_pieces(pieces: Any) -> Tensor:
            gathered = {
                n: torch_.all_gather_tensor_autograd(p, 0, dist.group.WORLD) for n, p in pieces.items()
            }
            return loss_of(gathered, x, y)

        loss, grads = fcg.value_and_grad(of_pieces)(state.params)
        grads = fcg.tree.map(lambda grad: grad / mesh.size, grads)
        return state.apply_gradients(grads), {"loss": sharding.mean(loss)}

    return trained(train_step, state, mesh, lambda state: state.params)


def tensor_parallel(lowering: str, device: str) -> Any:
    """Columns of the first product and rows of the second: one sum over the ranks of the last axis."""
    mesh = sharding.mesh({"data": -1, "model": 2}, device=device)
    data, torch_ = mesh.axes[0], functional()
    params = whole()
    cut = {
        "w1": piece(params["w1"], mesh, 1),
        "w2": piece(params["w2"], mesh, 0),
        "b": piece(params["b"], mesh),
    }
    state = fcg.TrainState.create(params=sharding.from_local(mesh, cut), optimizer=fcg.optim.adam(RATE))

    @fcg.graph_step(lowering=lowering)
    def train_step(state: Any, x: Tensor, y: Tensor) -> Any:
        def partial_loss(params: Any) -> Tensor:
            mine = torch.tanh(x @ params["w1"] + params["b"]) @ params["w2"]
            both = torch_.all_reduce(mine.detach(), "sum", mesh.shards.group)
            return F.mse_loss(mine + (both - mine).detach(), y)  # its gradient is that of the sum

        loss, grads = fcg.value_and_grad(partial_loss)(state.params)
        if data.size > 1:
            grads = {
                name: torch_.all_reduce(grad, "sum", data.group) / data.size for name, grad in grads.items()
            }
            loss = torch_.all_reduce(loss, "sum", data.group) / data.size
        return state.apply_gradients(grads), {"loss": loss}

    return trained(train_step, state, mesh, lambda state: state.params, data.rank)


def trained(train_step: Any, state: Any, mesh: Any, params_of: Any, rank: int | None = None) -> Any:
    losses = []
    for call in range(STEPS):
        x, y = batch(call, mesh.rank if rank is None else rank)
        state, metrics = train_step(state, x.to(mesh.device), y.to(mesh.device))
        losses.append(metrics["loss"].item())
    params = sharding.gather(dict(params_of(state)))
    return losses, {name: value.cpu() for name, value in params.items()}


def assert_as_judged(found: Any, ranks: int, dims: dict[str, int] | None = None) -> None:
    losses, params = judged(ranks)
    for ours, stacked in found:
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses))
        for name, pieces in stacked.items():
            joined = torch.cat(list(pieces), (dims or {}).get(name, 0))
            torch.testing.assert_close(joined, params[name], rtol=1e-4, atol=1e-5)


@on_gloo_and_nccl
@pytest.mark.parametrize(
    ("program", "lowering"), [(own_fsdp, "aten"), (our_adam, "aten"), (own_fsdp, "inductor")]
)
def test_fsdp_by_hand_is_one_process(program: Any, lowering: str, device: str) -> None:
    if lowering == "inductor" and device == "cpu" and not THOROUGH:
        pytest.skip("each rank would compile it")
    assert_as_judged(on_ranks(RANKS, program, lowering, device, device=device, timeout=300.0), RANKS)


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallelism_by_hand_is_one_process(ranks: int) -> None:
    found = on_ranks(ranks, tensor_parallel, "aten", "cpu")
    assert_as_judged(found, ranks // 2, {"w1": 1})


def different(kind: str) -> str:
    """A rank that does something else than the others, or lets leaves diverge; what it is told."""
    mesh, torch_ = sharding.mesh({"data": -1}, device="cpu", timeout=20.0), functional()
    odd = mesh.rank == 1
    long = 4 if odd and kind == "another shape" else 3
    state: Any = sharding.from_local(mesh, {"w": torch.ones(long)})
    state["n"] = torch.zeros(())

    def train_step(state: Any, x: Tensor) -> Any:
        w, n = state["w"], state["n"]
        if odd and kind == "another program":
            w = w * 2 + 1
        if kind == "leaves beside it":
            n = n + w.sum()
        if kind == "leaves of data":
            n = n + x.sum()
        if kind == "an exchange":
            n = n + torch_.all_to_all_single(w[:2], None, None, mesh.shards.group).sum()
        if kind == "repaired":
            n = n + torch_.all_reduce(w.sum() + x.sum(), "sum", mesh.shards.group)
        return {"w": w + x.sum(), "n": n}, {}

    try:
        state, _ = fcg.graph_step(train_step, lowering="aten")(state, torch.ones(2) * mesh.rank)
    except fcg.FunctionalCGError as error:
        return f"{type(error).__name__}: {error}"
    return f"n={state['n'].item():g} w={sharding.local(state['w']).tolist()}"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("another shape", r"RankError.*rank 1 differs from rank 0.*state\['w'\]  f32\[3\]"),
        ("another program", r"RankError.*rank 1 differs from rank 0.*ATen calls"),
        ("leaves beside it", r"RankError.*state\['n'\]  differs over data, by state\['w'\]"),
        ("leaves of data", r"RankError.*state\['n'\]  differs over data, by "),
        ("an exchange", r"RankError.*state\['n'\]  differs over data, by "),
    ],
)
def test_a_rank_that_is_different_is_refused(kind: str, says: str) -> None:
    for told in on_ranks(RANKS, different, kind):
        assert re.search(says, told, re.DOTALL), told


def test_each_rank_keeps_its_own_data_in_its_piece() -> None:
    """What of a shard would be a patchwork: here a piece is the rank's own."""
    assert on_ranks(RANKS, different, "repaired") == ["n=8 w=[1.0, 1.0, 1.0]", "n=8 w=[3.0, 3.0, 3.0]"]


def advice(_: int) -> tuple[str, float]:
    """What a step on plain tensors is told, and what its fix gives."""
    mesh, torch_ = sharding.mesh({"data": -1}, device="cpu"), functional()

    def train_step(state: Any, x: Tensor) -> Any:
        return {"w": state["w"] + torch_.all_reduce(x, "sum", mesh.shards.group)}, {}

    tree = {"w": torch.ones(1)}
    try:
        fcg.graph_step(train_step)(tree, torch.ones(1))
    except fcg.CaptureError as error:
        said = str(error)
    state = fcg.sharding.from_local(mesh, tree)
    state, _ = fcg.graph_step(train_step)(state, torch.ones(1))
    return said, sharding.local(state["w"]).item()


def test_plain_tensors_are_told_how() -> None:
    for said, value in on_ranks(RANKS, advice, 0):
        assert "To fix:" in said
        assert "`state = fcg.sharding.from_local(mesh, tree)`" in said
        assert value == 3.0


def kept(folder: str) -> list[Any]:
    """Checkpoints, forks and assignments of pieces; what each rank then holds."""
    mesh = sharding.mesh({"data": -1}, device="cpu")
    state = fcg.place(
        sharding.from_local(
            mesh, {"w": torch.full((2, 2), float(mesh.rank)), "s": torch.tensor(3.0 + mesh.rank)}
        )
    )
    saved = fcg.checkpoints(folder)
    saved.save(state, step=1, wait=True)
    names = sharding.state_dict(state)
    cleared = fcg.tree.at(lambda s: s["w"], state, torch.zeros(2, 2, 2))
    zero = sharding.local(cleared["w"]).sum().item()
    loaded = saved.load(cleared)
    held = [sharding.local(loaded["w"]).tolist(), sharding.local(loaded["s"]).item()]
    return [
        zero,
        held,
        sharding.gather(loaded["w"]).flatten().tolist(),
        {n: list(v.shape) for n, v in names.items()},
    ]


def test_pieces_are_saved_and_loaded(tmp_path: Path) -> None:
    shapes = {"w": [2, 2, 2], "s": [2]}
    both = [0.0] * 4 + [1.0] * 4
    assert on_ranks(RANKS, kept, str(tmp_path)) == [
        [0.0, [[[0.0, 0.0], [0.0, 0.0]], 3.0], both, shapes],
        [0.0, [[[1.0, 1.0], [1.0, 1.0]], 4.0], both, {}],
    ]


def test_what_is_no_piece_is_refused() -> None:
    mesh = sharding.mesh({"data": -1}, device="cpu")
    with pytest.raises(fcg.LayoutError, match=r"sharding\.from_local: .*no pieces"):
        sharding.from_local(mesh, {"w": sharding.from_local(mesh, torch.ones(2))})
    with pytest.raises(fcg.LayoutError, match=r"tree\['name'\]"):
        sharding.from_local(mesh, {"name": "w"})
    with pytest.raises(TypeError, match=r"sharding\.from_local: mesh must be made with"):
        sharding.from_local("data", torch.ones(2))  # type: ignore[arg-type]
