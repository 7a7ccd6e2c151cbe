"""H102, H103: communication that bypasses the traced collectives is refused before anything is sent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import functional_cg as fcg
from tests.sharding.law import on_gloo_and_nccl
from tests.sharding.mistakes import metric
from tests.sharding.programs import Setting, mlp_state
from tests.sharding.ranks import on_ranks

PACKAGE = Path(fcg.__file__).parent


@pytest.mark.parametrize("name", ["one_shot_all_reduce", "two_shot_all_reduce_", "multimem_all_reduce_"])
def test_h102_ops_on_registered_memory_are_refused(name: str) -> None:
    op = getattr(torch.ops.symm_mem, name)

    def train_step(state: Any, x: Tensor) -> Any:
        return state, {"sum": op(x * 2, "sum", "0")}

    state = fcg.place({"w": torch.ones(3)})
    with pytest.raises(
        fcg.CaptureError, match=rf"^`train_step`: talks to other ranks by symm_mem\.{name}\.default, at"
    ):
        fcg.graph_step(train_step)(state, torch.ones(3))
    assert state.generation == 0


def test_h102_the_package_registers_no_memory() -> None:
    """Collectives read and write what the graph's own pool or an arena holds, which stays where it is."""
    asks = re.compile(r"symm_mem\.|_symmetric_memory|register_mem|MemPool")
    found = [str(file) for file in PACKAGE.rglob("*.py") if asks.search(file.read_text(encoding="utf-8"))]
    assert found == []


def handed_on(x: Tensor, rank: int) -> Tensor:
    """The first rank computes half of a model, the second one the rest."""
    if rank == 0:
        dist.send(h := torch.tanh(x), 1)
        return h
    dist.recv(h := torch.empty_like(x), 0)
    return h * 2


def handed_around(x: Tensor, rank: int) -> Tensor:
    got = torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x * 2, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


def collected(x: Tensor, rank: int) -> Tensor:
    """Leaves the group of all ranks collecting calls: torch's manager does not clean up after an exception."""
    with dist._coalescing_manager():
        dist.all_reduce(x)
        return x * float(x.sum())


def after_a_refusal(device: str) -> float:
    zero = Setting({"data": 2}, 1).zero(device)
    with pytest.raises(fcg.HostSyncError, match="float"):
        metric(lambda s, x: collected(x, zero.mesh.rank), mlp_state()(zero, device), torch.ones(2))
    dist.all_reduce(x := torch.ones(2, device=device))
    return float(x.sum())


@on_gloo_and_nccl
def test_h103_a_refused_call_leaves_no_group_collecting(device: str) -> None:
    assert on_ranks(2, after_a_refusal, device, device=device) == [4.0, 4.0]


def pipelines(device: str) -> Any:
    """What each rank is told; afterwards they train on together."""
    zero = Setting({"data": 2}, 3).zero(device)
    state, rank = mlp_state()(zero, device), zero.mesh.rank
    said = []
    for pipeline in (handed_on, handed_around):
        try:
            metric(lambda s, x, pipeline=pipeline: pipeline(x, rank), state, torch.ones(2))
        except fcg.CaptureError as error:
            said.append(str(error))
    return said, float(metric(lambda s: fcg.sharding.gather(s.params["one"]).sum(), state))


@on_gloo_and_nccl
def test_h103_sends_and_receives_are_refused(device: str) -> None:
    for rank, (said, one) in enumerate(on_ranks(2, pipelines, device, device=device)):
        assert one == 1.0
        for message, op in zip(said, (("send", "recv_")[rank], r"\w+"), strict=True):
            assert re.match(
                rf"`train_step`: talks to other ranks by c10d\.{op}\.default, at test_h102", message
            ), message
            assert "stages of a pipeline send by `fcg.sharding.pipeline(mesh, ...)`" in message
