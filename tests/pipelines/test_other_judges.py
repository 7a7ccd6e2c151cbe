"""Other judges than an eager run: torch's own pipelines, a simulator of memory and late arrivals, other schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg import optim, sharding
from functional_cg.testing import Simulator, assert_trees_all_equal
from tests.pipelines.programs import CUTS, ONE, TWO, Run, params, rows, trained
from tests.sharding.ranks import on_ranks
from tests.shares import THOROUGH, share, thorough

RATE, DECAY, MICROBATCHES = 0.05, 0.1, 4


class Part(nn.Module):
    """Some layers of the program, for torch."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        every = ["emb", *(f"w{i}" for i in range(4)), "head"]
        self.names = every[first + 1 if first else 0 : last + 1 if last < 4 else 6]
        self.leaves = nn.ParameterDict({name: nn.Parameter(params()[name]) for name in self.names})

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            leaf = self.leaves[name]
            x = leaf[x] if name == "emb" else x @ leaf if name == "head" else torch.tanh(x @ leaf)
        return x


def by_torch(schedule: str, calls: int) -> dict[str, Tensor]:
    """Train with ``torch.distributed.pipelining`` and torch's AdamW; what this rank holds then."""
    from torch.distributed import pipelining

    rank, several = torch.distributed.get_rank(), schedule != "1f1b"
    bounds = [0, 1, 2, 3, 4] if several else [0, 2, 4]
    own = range(rank, len(bounds) - 1, 2)
    parts = [Part(bounds[i], bounds[i + 1]) for i in own]
    stages = [
        pipelining.PipelineStage(part, i, len(bounds) - 1, torch.device("cpu"))
        for part, i in zip(parts, own, strict=True)
    ]
    made: Any = pipelining.ScheduleInterleaved1F1B if several else pipelining.Schedule1F1B
    runs = made(stages if several else stages[0], MICROBATCHES, loss_fn=F.cross_entropy)
    leaves = {name: leaf for part in parts for name, leaf in part.leaves.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=RATE, weight_decay=DECAY)
    for call in range(calls):
        batch = rows(call, 0)
        runs.step(*([batch["x"]] if rank == 0 else []), **({"target": batch["y"]} if rank == 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def by_us(schedule: str, calls: int) -> dict[str, Tensor]:
    mesh = sharding.mesh(TWO, device="cpu", timeout=20)
    pipe = sharding.pipeline(mesh, schedule=schedule, microbatches=MICROBATCHES)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x = params["emb"][batch["x"]]
        for i in range(4):
            x = torch.tanh((pipe.cut(x) if i in CUTS[schedule] else x) @ params[f"w{i}"])
        return F.cross_entropy(x @ params["head"], batch["y"])

    zero = pipe.zero(loss_fn, params(), rows(0, 0))
    rule = optim.adamw(RATE, weight_decay=DECAY)
    state = fcg.TrainState.create(params=params(), optimizer=rule, sharding=zero)

    @fcg.graph_step(lowering="aten")
    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = pipe.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    for call in range(calls):
        state, _ = train_step(state, rows(call, 0))
    return dict(sharding.gather(state.params))


def both(schedule: str) -> list[str]:
    """The leaves of this rank, which both find close to each other."""
    ours, theirs = by_us(schedule, 6), by_torch(schedule, 6)
    for name, leaf in theirs.items():
        torch.testing.assert_close(ours[name], leaf, rtol=1e-4, atol=1e-5)
        assert not ours[name].isclose(params()[name], rtol=1e-2).all()
    return sorted(theirs)


@pytest.mark.parametrize(
    ("schedule", "held"),
    share(
        [
            ("1f1b", [["emb", "w0", "w1"], ["head", "w2", "w3"]]),
            ("interleaved", [["emb", "w0", "w2"], ["head", "w1", "w3"]]),
        ],
        2,
    ),
)
def test_torchs_pipeline_and_optimizer_train_to_the_same_weights(
    schedule: str, held: Sequence[list[str]]
) -> None:
    assert on_ranks(2, both, schedule) == held


def simulated(run: Run, axes: Any) -> Any:
    return trained([replace(run, options={"backend": Simulator()})], axes)[0]


def test_nothing_is_read_before_it_arrives_or_after_its_memory_is_free() -> None:
    """A simulated replay poisons its pool, and what another rank sends is there when it has been waited for."""
    run = Run("zbv", ("tied", "clip", "adamw")) if THOROUGH else Run("1f1b", ("tied", "adamw"))
    metrics, state = trained([run], ONE)[0]
    for rank, (found, held) in enumerate(on_ranks(2, simulated, run, TWO)):
        assert_trees_all_equal(found, metrics)
        if rank == 0:
            assert_trees_all_equal(held, state)


@thorough
@pytest.mark.parametrize(("ranks", "axes"), [(1, ONE), (2, ONE), (4, TWO)])
def test_nor_with_shards(ranks: int, axes: Any) -> None:
    run = Run("zbv", ("tied", "clip", "adamw", "dropout", "averages"), stage=3)
    expected = on_ranks(ranks, trained, [run], axes)
    assert_trees_all_equal(on_ranks(ranks, simulated, run, axes), [found for (found,) in expected])


@thorough
def test_all_schedules_but_one_add_up_in_the_same_order() -> None:
    """With the same stages they give the same bits; ``looped_bfs`` starts with the last micro-batch."""
    features = ("dropout", "clip", "adamw", "tied")
    found = {name: trained([Run(name, features, cuts=(1, 2, 3))], ONE)[0] for name in CUTS}
    same, (other, _) = found["1f1b"], found.pop("looped_bfs")
    for name, one in found.items():
        assert_trees_all_equal(one, same, name)
    assert any(not mine["norm"].equal(its["norm"]) for mine, its in zip(other, same[0], strict=True))
