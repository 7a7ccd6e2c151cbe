"""Replicated and sharded leaves: a step that would make ranks diverge is refused, and no other step is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg import optim, sharding
from tests.sharding.law import HYBRID, on_gloo_and_nccl
from tests.sharding.mistakes import same
from tests.sharding.programs import PROGRAMS, Setting
from tests.sharding.ranks import on_ranks
from tests.shares import THOROUGH, share, thorough


class WithMore(fcg.TrainState):
    mean: Any = None
    count: Any = None


def make(setting: Setting, device: str) -> Any:
    home, zero = setting.mesh(device).device, setting.zero(device)
    return WithMore.create(
        params={"w": torch.linspace(-1, 1, 5, device=home)}, optimizer=optim.adamw(0.1, weight_decay=0.0),
        mean=torch.zeros(5, device=home), count=torch.zeros((), dtype=torch.int64, device=home),
        key=fcg.random.key(1), sharding=zero,
    )  # fmt: skip


def stepping(change: Callable[[Any, Any], dict[str, Any]]) -> Any:
    """A step that trains, and writes more."""

    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: (batch["x"] @ p["w"]).square().mean())(state.params)
        return state.apply_gradients(grads).replace(**change(state, batch)), {"loss": sharding.mean(loss)}

    return train_step


def rows_of_a_rank(state: Any, batch: Any) -> Tensor:
    """Of what is the same on all ranks, another part on each: by a number of Python."""
    table = torch.arange(10.0, device=state.mean.device).reshape(2, 5) + state.count
    return table[dist.get_rank() % 2]


REFUSED = "gives {} that all ranks hold whole another value on each; the state is unchanged."
MEAN = r"state\.mean  differs over {axes}"
LAST = r"state\.mean  differs over {last}"

# What of the data gets into a leaf that is whole: refused. Name -> what the new leaf is, what the message names.
DIFFER: dict[str, tuple[Callable[[Any, Any], dict[str, Any]], str]] = {
    "the batch": (lambda s, b: {"mean": b["x"].mean(0)}, MEAN + r", by batch\['x'\]"),
    "a running mean": (lambda s, b: {"mean": 0.9 * s.mean + 0.1 * b["x"].mean(0)}, MEAN),
    "the loss": (lambda s, b: {"mean": s.mean + F.relu(b["x"]).sum()}, MEAN),
    "an integer": (
        lambda s, b: {"count": s.count + (b["x"] > 0).sum()},
        r"state\.count  differs over {axes}",
    ),
    "written in place": (lambda s, b: {"mean": s.mean.clone().add_(b["x"][0])}, MEAN),
    "a view": (lambda s, b: {"mean": b["x"].t()[:, 0]}, MEAN),
    "this rank's shard": (
        lambda s, b: {"mean": s.mean + sharding.local(s.params["w"]).sum()},
        LAST + r", by (a number of Python|state)",
    ),
    "this rank's key": (
        lambda s, b: {"mean": fcg.random.normal(sharding.fold_in(s.key), (5,))},
        MEAN + r", by literal",
    ),
    "this rank's number": (
        lambda s, b: {"mean": s.mean + 0.1 * dist.get_rank()},
        MEAN + r", by a number of Python",
    ),
    "this rank's rows": (lambda s, b: {"mean": rows_of_a_rank(s, b)}, LAST + r", by a number of Python"),
}

# Whole leaves that are the same everywhere, and shards that fit each other: taken.
AGREE: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "nothing": lambda s, b: {},
    "the mean of all": lambda s, b: {"mean": 0.9 * s.mean + 0.1 * sharding.mean(b["x"].mean(0))},
    "the sum of all": lambda s, b: {"count": s.count + sharding.sum((b["x"] > 0).sum())},
    "a gathered leaf": lambda s, b: {"mean": sharding.gather(s.params["w"]) + 1},
    "a norm": lambda s, b: {"mean": s.mean + s.params["w"].norm()},
    "the shape of the data": lambda s, b: {"mean": s.mean + torch.ones_like(b["x"][0]) + b["x"].new_zeros(5)},
    "a key": lambda s, b: {"key": fcg.random.fold_in(s.key, 1), "mean": fcg.random.normal(s.key, (5,))},
    "a number among the inputs": lambda s, b: {"mean": s.mean * b["rate"], "count": s.count + 1},
    "a flag": lambda s, b: {"mean": torch.where(b["flag"], s.mean, s.mean + 1)},
    "rows of all": lambda s, b: {"mean": sharding.mean(rows_of_a_rank(s, b))},
    "shards by data of all": lambda s, b: {"params": fcg.tree.map(lambda p: p * due(s, b).exp(), s.params)},
}  # fmt: skip


def due(state: Any, batch: Any) -> Tensor:
    return sharding.mean(batch["x"].mean())  # type: ignore[no-any-return]


# Shards computed with another value on each rank. Before stage 3 it may be whole leaves that would differ.
PATCHWORKS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "scaled by the batch": lambda s, g, b: s.apply_gradients({"w": g["w"] / b["x"].abs().sum()}),
    "chosen by the batch": lambda s, g, b: s.replace(
        params=fcg.cond(b["x"].sum() > 0, lambda: s.apply_gradients(g).params, lambda: s.params)
    ),
    "the batch added": lambda s, g, b: s.replace(params={"w": s.params["w"] + b["x"][0]}),
    "moments of own gradients": lambda s, g, b: s.apply_gradients(
        fcg.grad(lambda p: (b["x"] @ p["w"]).square().mean())({"w": sharding.gather(s.params)["w"] * 1})
    ),
}


def pulled_apart(stages: list[int]) -> dict[tuple[int, str], str]:
    said = {}
    for stage in stages:
        state = make(Setting({"data": 2}, stage), "cpu")
        batch = batch_of("cpu", dist.get_rank())
        for name, change in PATCHWORKS.items():

            def train_step(state: Any, batch: Any, change: Any = change) -> Any:
                grads = fcg.grad(lambda p: (batch["x"] @ p["w"]).square().mean())(state.params)
                return change(state, grads, batch), {}

            before = fcg.fork(state)
            try:
                fcg.graph_step(train_step, lowering="aten")(before, batch)
            except fcg.RankError as error:
                said[stage, name] = str(error)
                assert same(sharding.gather(before.params["w"]), sharding.gather(state.params["w"])), name
    return said


def test_shards_are_not_computed_with_other_data_on_each_rank() -> None:
    apart = "computes the shards of {} with other data on each rank; the state is unchanged."
    for said in on_ranks(2, pulled_apart, [1, 2, 3]):
        for name, stage in product(PATCHWORKS, (1, 2, 3)):
            message = said.get((stage, name), "nothing")
            ways = [apart] if stage == 3 else [apart, REFUSED]
            expected = "|".join(way.format("(a leaf|3 leaves)") for way in ways)
            assert re.match(f"`train_step`: ({expected})", message), (stage, name, message)
            if stage == 3:
                assert "state.params['w']  each shard over data by its own batch['x']" in message
                assert "To fix: `sharding.mean(value)` or `sharding.sum(value)` of what comes" in message


def batch_of(device: Any, rank: int) -> dict[str, Any]:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)).to(device)
    return {"x": x, "rate": 0.5, "flag": torch.tensor(True)}


@dataclass(frozen=True)
class Cases:
    """Names of steps that are refused, and of steps that are taken."""

    refused: list[str]
    taken: list[str]


ALL = Cases([*DIFFER], [*AGREE])


def some(device: str) -> Cases:
    """Where all of them are judged in another setting."""
    return Cases(share(DIFFER, 3, device), share(AGREE, 3, device))


def judged(setting: Setting, cases: Cases, device: str) -> Any:
    """What is said of the steps that are refused; and what whole leaves are after the others."""
    state = make(setting, device)
    batch = batch_of(state.mean.device, dist.get_rank())
    said = {}
    for name in cases.refused:
        before = fcg.fork(state)
        step = fcg.graph_step(stepping(DIFFER[name][0]), lowering="aten")
        try:
            step(before, batch)
        except fcg.RankError as error:
            said[name] = str(error)
            assert same(before.mean, state.mean), name
    ends = {}
    for name in cases.taken:
        step = fcg.graph_step(stepping(AGREE[name]), lowering="aten")
        new = fcg.fork(state)
        for _ in range(2):
            new, _ = step(new, batch)
        ends[name] = [leaf.cpu() for leaf in (new.mean.clone(), new.count.clone(), new.key.clone())]
    return said, ends


def assert_judged(
    results: list[Any], cases: Cases, axes: str, last: str, left_out: tuple[str, ...] = ()
) -> None:
    for said, ends in results:
        assert said.keys() == {*cases.refused} - {*left_out}
        for name, message in said.items():
            assert message.startswith(f"`train_step`: {REFUSED.format('a leaf')}"), (name, message)
            assert re.search(DIFFER[name][1].format(axes=axes, last=last), message), (name, message)
            assert "To fix: `sharding.mean(value)` of it" in message
        for name in ends:
            assert all(same(ends[name], other[name]) for _, other in results), name


@on_gloo_and_nccl
@pytest.mark.parametrize("stage", share([3, 1], 2))
def test_only_what_all_ranks_agree_on_goes_into_a_whole_leaf(stage: int, device: str) -> None:
    cases = ALL if stage == 3 and THOROUGH else some(device)
    results = on_ranks(2, judged, Setting({"data": 2}, stage), cases, device, device=device)
    # At stage 1 parameters are whole: this rank's part of one is nothing that ranks differ in.
    assert_judged(results, cases, "data", "data", ("this rank's shard",) if stage == 1 else ())


def test_on_a_hybrid_mesh_axes_are_told_apart() -> None:
    cases = Cases(share(DIFFER, 6), share(AGREE, 6))
    results = on_ranks(4, judged, Setting(HYBRID, 3), cases, "cpu")
    assert_judged(results, cases, "replica, shard", "shard")


def lowers(device: str) -> list[str]:
    """Programs of the tests of sharding on a hybrid mesh: which are refused. The others run in ``test_bitwise``."""
    refused = []
    for name in ("accumulation", "average", "sharpness-aware"):
        program = PROGRAMS[name]
        state = program.state(Setting(HYBRID, 3).zero(device), device)
        try:
            fcg.graph_step(program.step, lowering="aten").lower(
                state, program.batch(0, dist.get_rank())
            ).meet()
        except fcg.RankError as error:
            refused.append(f"{name}: {error}")
    return refused


@thorough
def test_no_program_of_the_tests_is_refused() -> None:
    assert on_ranks(4, lowers, "cpu") == [[]] * 4


# -- BatchNorm ----------------------------------------------------------------------------------------------------


def with_batch_norm(average: bool, device: str) -> Any:
    """Running statistics of each rank's slice, or their mean over ranks."""
    mesh = sharding.mesh({"data": 2}, device=device)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    apply, params, buffers = fcg.from_module(module)
    state = fcg.TrainState.create(
        params=params, buffers=buffers, optimizer=optim.sgd(0.1), sharding=sharding.zero(mesh, stage=3)
    )

    @fcg.graph_step
    def train_step(state: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            out, buffers = apply(params, state.buffers, x)
            return out.square().mean(), buffers

        (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        if average:
            buffers = fcg.tree.map(lambda b: sharding.mean(b) if b.is_floating_point() else b, buffers)
        return state.apply_gradients(grads, buffers=buffers), {"loss": sharding.mean(loss)}

    x = batch_of(mesh.device, mesh.rank)["x"]
    try:
        state, _ = train_step(state, x)
    except fcg.RankError as error:
        return str(error)
    return {name: leaf.cpu() for name, leaf in fcg.snapshot(state.buffers).items()}


@on_gloo_and_nccl
def test_running_statistics_of_a_slice_are_refused_and_their_mean_is_taken(device: str) -> None:
    for message in on_ranks(2, with_batch_norm, False, device, device=device):
        assert message.startswith(f"`train_step`: {REFUSED.format('2 leaves')}")
        assert "state.buffers['1.running_mean']  differs over data, by x" in message
        assert "state.buffers['1.running_var']  differs over data, by x" in message
        assert "num_batches_tracked" not in message
    first, second = on_ranks(2, with_batch_norm, True, device, device=device)
    assert same(first, second)
    assert first["1.running_mean"].any()


def guarded(stages: list[int]) -> list[bool]:
    """Whether a step that skips what is not finite is taken, and skipped by all where one rank overflows."""

    def train_step(state: Any, x: Tensor) -> Any:
        grads = fcg.grad(lambda p: (x @ p["w"] + p["v"]).square().mean())(state.params)
        finite = fcg.optim.global_norm(grads).isfinite()
        return fcg.cond(finite, lambda: state.apply_gradients(grads), lambda: state), {"finite": finite}

    seen = []
    for stage in stages:
        mesh = sharding.mesh({"data": 2}, device="cpu", timeout=30.0)
        # Leaves that two ranks divide: their parts are views of gradients that are the same on both.
        state = fcg.TrainState.create(
            params={"w": torch.ones(5, 4), "v": torch.ones(4)}, optimizer=fcg.optim.adam(0.1),
            sharding=sharding.zero(mesh, stage=stage),  # type: ignore[arg-type]
        )  # fmt: skip
        step = fcg.graph_step(train_step, lowering="aten")
        for largest in (1.0, float("inf") if dist.get_rank() else 1.0, 2.0):
            state, metrics = step(state, torch.full((4, 5), largest))
            seen.append(bool(metrics["finite"]))
        assert int(state.step) == 2
    return seen


def test_a_norm_of_evenly_cut_gradients_is_the_same_on_all_ranks() -> None:
    assert on_ranks(2, guarded, [1, 2, 3]) == [[True, False, True] * 3] * 2
