"""Process groups end in any order, with captures alive; and which of them a capture may hold."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import functional_cg as fcg
from functional_cg.shards.groups import Captures, Groups
from tests.sharding.endings import LIMIT, WAYS, ended, leaves
from tests.sharding.law import rank_of
from tests.sharding.programs import mlp_batch, mlp_state, mlp_step
from tests.sharding.ranks import on_ranks, outcomes, outcomes_of_each
from tests.shares import share

GONE = "RankError: `mlp_step`: the process groups of the mesh are gone; the state is that of the last step."


def test_a_run_on_gloo_ends_in_any_order() -> None:
    ways = share(WAYS, 2)
    found = outcomes_of_each(2, leaves, [(way, "cpu") for way in ways], timeout=80)
    for way, ends in zip(ways, found, strict=True):
        for end in ends:
            assert (end.code, end.error) == (0, ""), (way, end)
            _, _, said, count = end.value
            assert count == 3, way
            assert not said or said.startswith((GONE, "ClosedError: ")), way


@pytest.mark.multi_gpu(2)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("way", WAYS)
def test_a_run_on_nccl_ends_in_any_order(way: str) -> None:
    """It does not hang; ``python -m tests.sharding.endings`` is a table of seconds until the process is gone."""
    for end in ended([(way, "cuda", True)])[0]:
        assert end.seconds < 5 * LIMIT, end
        assert end.code == 0, end
        assert "state.step 3" in end.log
        assert "destroy" not in way or any(
            words in end.log for words in (GONE, "ClosedError: ", "call: -")
        ), end


# -- the thread, where nothing but Python has to wait ---------------------------------------------------------------


class Held:
    """Stands for a capture."""

    def __init__(self) -> None:
        self.alive = threading.Lock()
        self.alive.acquire()

    def close(self) -> None:
        if self.alive.locked():
            self.alive.release()


class Waits(dist.ProcessGroup):
    """A process group whose end waits for a capture, in C, as NCCL's does."""

    def __init__(self, options: Any, _: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._name = options.group_id

    @property
    def group_name(self) -> str:
        return self._name

    def waits_for(self, held: Held) -> None:
        # Not more than a while: nobody frees it where the thread is broken.
        self.shutdown = self.abort = functools.partial(held.alive.acquire, True, 4 * LIMIT)


ENDS: dict[str, Callable[[Any], Any]] = {
    "destroy": lambda group: dist.destroy_process_group(group),
    "abort": lambda group: distributed_c10d._abort_process_group(group),
}


def waits(how: str, whose: str) -> Any:
    """Ends a group for which a capture is alive; and tells which of two were freed, and after how long."""
    dist.Backend.register_backend("waits", Waits, extended_api=True, devices=["cpu"])
    dist.init_process_group("waits", store=dist.HashStore(), rank=0, world_size=1)
    other = dist.new_group([0], backend="waits")
    groups: dict[str, Any] = {"all": dist.group.WORLD, "one": other}
    captures, held = Captures(), {name: Held() for name in groups}
    names = {name: Groups([group.group_name], captures) for name, group in groups.items()}
    for name, group in groups.items():
        group.waits_for(held[name])
        captures.add(held[name], names[name].names)
    time.sleep(3 * LIMIT / 20)  # the thread has seen that nothing ends
    before = [one.unchanged() for one in names.values()]
    begin = time.monotonic()
    ENDS[how](groups[whose])
    took = time.monotonic() - begin
    return before, took, [name for name in groups if not names[name].unchanged()]


@pytest.mark.parametrize("whose", ["all", "one"])
@pytest.mark.parametrize("how", ENDS)
def test_a_group_that_waits_for_a_capture_ends(how: str, whose: str) -> None:
    ((before, took, freed),) = on_ranks(1, waits, how, whose)
    assert before == [True, True]
    assert took < LIMIT
    assert freed == (["all", "one"] if whose == "all" else ["one"]), "only those that the end waits for"


def test_a_step_whose_groups_have_ended_is_refused() -> None:
    captures = Captures()
    groups = Groups(["a", "b"], captures)
    groups.check("train_step")
    captures.ended.add("b")
    with pytest.raises(
        fcg.RankError, match="`train_step`: the process groups of the mesh are gone; the state is"
    ):
        groups.check("train_step")


# -- backends -------------------------------------------------------------------------------------------------------


def refused(backend: str) -> str:
    """What a step on a GPU would say of a backend."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    groups = Groups([dist.group.WORLD.group_name], Captures())
    groups.refuse_backend("train_step", torch.device("cpu"))
    try:
        groups.refuse_backend("train_step", torch.device("cuda"))
    except fcg.CaptureError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo", "cpu:gloo"])
def test_a_collective_that_cannot_be_captured_is_refused(backend: str) -> None:
    (said,) = on_ranks(1, refused, backend)
    got = "none" if backend == "cpu:gloo" else "gloo"
    assert said.startswith(
        f"`train_step`: a collective of this step runs by {got} on cuda, and cannot be captured"
    )
    assert f"process group '0'  expected nccl   got {got}" in said


def on_the_host() -> list[float]:
    """The advice: a mesh on the host, beside a gloo group that was there before."""
    dist.init_process_group("gloo")
    mesh = fcg.sharding.mesh({"data": -1}, device="cpu", timeout=20.0)
    state: Any = mlp_state()(fcg.sharding.zero(mesh, stage=3), "cpu")
    step = fcg.graph_step(mlp_step, lowering="aten")
    losses = []
    for call in range(2):
        state, metrics = step(state, mlp_batch(call, rank_of()))
        losses.append(float(metrics["loss"]))
    return losses


def test_on_the_host_gloo_will_do() -> None:
    one, other = on_ranks(2, on_the_host)
    assert one == other


def by(backend: str) -> Any:
    """A step on this rank's GPU, by a backend."""
    dist.init_process_group(backend)
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = fcg.sharding.mesh({"data": -1}, timeout=20.0)
    state: Any = mlp_state()(fcg.sharding.zero(mesh, stage=3), "cuda")
    step = fcg.graph_step(mlp_step, lowering="aten")
    batch = fcg.tree.map(lambda leaf: leaf.cuda(), mlp_batch(0, rank_of()))
    try:
        state, _ = step(state, batch)
    except fcg.CaptureError as error:
        return str(error), int(state.step)
    return "", int(state.step)


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
def test_gloo_on_a_gpu_is_refused_before_the_capture() -> None:
    """It was a fault of the process; two ranks may share one GPU here."""
    for end in outcomes(2, by, "gloo", device="cuda"):
        assert (end.code, end.error) == (0, ""), end
        said, count = end.value
        assert "runs by gloo on cuda, and cannot be captured; the state is unchanged" in said
        assert count == 0


@pytest.mark.multi_gpu(2)
@pytest.mark.filterwarnings("default")
def test_its_advice_works() -> None:
    for said, count in on_ranks(2, by, "cpu:gloo,cuda:nccl", device="cuda"):
        assert (said, count) == ("", 1)
