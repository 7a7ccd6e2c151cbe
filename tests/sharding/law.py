"""What runs on each rank: a captured step gives, on every shard and after every call, the bits of the eager run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import functional_cg as fcg
from functional_cg.shards.tensor import Sharded
from functional_cg.surroundings import AsTraced
from functional_cg.testing import assert_no_alias, assert_trees_all_equal
from tests.hazards.law import overwrite
from tests.sharding.programs import PROGRAMS, Setting

__all__ = ["CALLS", "HYBRID", "Run", "held", "law", "on_gloo_and_nccl", "rank_of", "trained"]

CALLS = 16
HYBRID = {"replica": 2, "shard": 2}

on_gloo_and_nccl = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", id="gloo"),
        # Warnings are printed and not raised on a GPU: what libraries warn of depends on the machine.
        pytest.param("cuda", id="nccl", marks=[pytest.mark.multi_gpu, pytest.mark.filterwarnings("default")]),
    ],
)


@dataclass(frozen=True)
class Run:
    """A program in a setting.

    Attributes:
      program: Its name.
      setting: How its state lies on ranks.
      options: Of ``graph_step``.
    """

    program: str
    setting: Setting
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        axes = "x".join(str(size) for size in self.setting.axes.values())
        named = {**self.setting.options, **self.options}
        return "-".join(
            [self.program, axes, f"zero{self.setting.stage}", *(f"{k}={v}" for k, v in named.items())]
        )


def rank_of() -> int:
    """This process' rank; 0 if nobody launched it."""
    return dist.get_rank() if dist.is_initialized() else 0


def held(tree: Any) -> Any:
    """What this rank holds of each leaf, padding included."""
    return fcg.tree.map(lambda leaf: leaf.local if isinstance(leaf, Sharded) else leaf, tree)


def batches(program: str, device: str, rank: int) -> Callable[[int], Any]:
    make = PROGRAMS[program].batch
    return lambda call: fcg.tree.map(lambda leaf: leaf.to(device), make(call, rank))


def law(run: Run, device: str) -> Any:
    """Sixteen calls with new data, replayed and on a fork eagerly.

    Returns:
      The metrics of each call; the state as a dict on rank 0; and the numbers of traces, captures and replays.
    """
    program, rank = PROGRAMS[run.program], rank_of()
    captured = program.state(run.setting.zero(device), device)
    eager, batch_of = fcg.fork(captured), batches(run.program, device, rank)
    # A replay that repeats the calls of the eager run, so that the two agree in every bit.
    step = fcg.graph_step(program.step, **{"lowering": "aten", **run.options})
    kept: list[Any] = []
    copies: list[Any] = []
    for call in range(CALLS):
        batch = batch_of(call)
        with AsTraced():
            eager, expected = step.eager(eager, batch)
        captured, metrics = step(captured, batch)
        overwrite(batch)
        assert_trees_all_equal((held(captured), metrics), (held(eager), expected), f"call {call}")
        kept.append(metrics)
        copies.append(expected)
    assert_trees_all_equal(kept, copies, "kept metrics")
    assert_no_alias(kept, held(captured))
    counts = (step.stats.traces, step.stats.captures, step.stats.replays)
    whole = fcg.sharding.state_dict(captured)
    return {"metrics": [on_host(metrics) for metrics in kept], "state": whole, "counts": counts}


def on_host(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in metrics.items()}


def trained(run: Run, device: str, calls: int) -> Any:
    """The whole state after some calls, on rank 0."""
    program = PROGRAMS[run.program]
    state, batch_of = program.state(run.setting.zero(device), device), batches(run.program, device, rank_of())
    step = fcg.graph_step(program.step, **{"lowering": "aten", **run.options})
    for call in range(calls):
        state, _ = step(state, batch_of(call))
    assert step.stats.replays == calls
    return fcg.sharding.state_dict(state)
