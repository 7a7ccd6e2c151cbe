"""The law that each rank checks: a captured step is bitwise eager, on every shard, after every call.

A compiled one gives them but for rounding, which does not add up: the eager run starts at each call where that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import functional_cg as fcg
from functional_cg.shards.tensor import Sharded
from functional_cg.testing import assert_no_alias, assert_trees_all_equal
from tests.hazards.law import COMPILED, CPU, Place, overwrite
from tests.sharding.programs import PROGRAMS, Setting, key_of, mlp_loss, mlp_state
from tests.shares import CALLS_ON_RANKS as CALLS

__all__ = [
    "CALLS", "HYBRID", "Run", "assert_same_step", "backends", "batches", "forks_in_turn", "held", "law",
    "on_gloo_and_nccl", "rank_of", "trained", "two_steps_on_one_state",
]  # fmt: skip

HYBRID = {"replica": 2, "shard": 2}


def backends(gpus: int) -> pytest.MarkDecorator:
    """On gloo, and on NCCL where there are as many GPUs."""
    # Warnings are printed and not raised on a GPU: what libraries warn of depends on the machine.
    marks = [pytest.mark.multi_gpu(gpus), pytest.mark.filterwarnings("default")]
    return pytest.mark.parametrize(
        "device", [pytest.param("cpu", id="gloo"), pytest.param("cuda", id="nccl", marks=marks)]
    )


on_gloo_and_nccl = backends(2)


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
            [self.program, axes, f"zero {self.setting.stage}", *(f"{k}={v}" for k, v in named.items())]
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


def assert_same_step(
    step: Any, captured: Any, eager: Any, batch: Any, call: Any, place: Place = CPU
) -> tuple[Any, Any, Any, Any]:
    """One call of each; afterwards states and metrics are the same on this rank, as far as they are so in a place.

    Returns:
      Both states, and both metrics.
    """
    eager, expected = step.eager(eager, batch)
    captured, metrics = step(captured, batch)
    overwrite(batch)
    place.assert_same((held(captured), metrics), (held(eager), expected), f"call {call}")
    return captured, eager, metrics, expected


def law(run: Run, device: str) -> Any:
    """Calls with new data, replayed and on a fork eagerly.

    Returns:
      The metrics of each call; the state as a dict on rank 0; and the numbers of traces, captures and replays.
    """
    program = PROGRAMS[run.program]
    captured = program.state(run.setting.zero(device), device)
    eager, batch_of = fcg.fork(captured), batches(run.program, device, rank_of())
    # As it is, a replay repeats the calls of the eager run, and the two agree in every bit.
    step = fcg.graph_step(program.step, **{"lowering": "aten", **run.options})
    place = COMPILED if run.options.get("lowering") == "inductor" else CPU
    kept: list[Any] = []
    copies: list[Any] = []
    for call in range(CALLS):
        if place is COMPILED:
            eager = fcg.fork(captured)
        captured, eager, metrics, _ = assert_same_step(step, captured, eager, batch_of(call), call, place)
        kept.append(metrics)
        copies.append(fcg.snapshot(metrics))
    assert_trees_all_equal(kept, copies, "kept metrics")
    assert_no_alias(kept, held(captured))
    whole = fcg.sharding.state_dict(captured)
    return {"metrics": [on_host(metrics) for metrics in kept], "state": whole, "counts": counts_of(step)}


def counts_of(step: Any) -> tuple[int, int, int]:
    return step.stats.traces, step.stats.captures, step.stats.replays


def forks_in_turn(setting: Setting, device: str) -> Any:
    """Two states of one step, each with batches of its own, called in turn."""
    program, rank = PROGRAMS["mlp"], rank_of()
    step = fcg.graph_step(program.step, lowering="aten")
    first = program.state(setting.zero(device), device)
    pairs = [(first, fcg.fork(first)), (fcg.fork(first), fcg.fork(first))]
    for call in range(CALLS):
        for number, (captured, eager) in enumerate(pairs):
            batch = batches("mlp", device, rank + 10 * number)(call)
            pairs[number] = assert_same_step(step, captured, eager, batch, (call, number))[:2]
    ends = [fcg.sharding.gather(captured.params["w1"]) for captured, _ in pairs]
    assert not ends[0].equal(ends[1])
    return counts_of(step)


def two_steps_on_one_state(setting: Setting, device: str) -> Any:
    """Three calls of a step that adds up gradients, then one of a step that updates, and so on."""
    captured = mlp_state(accumulate=True)(setting.zero(device), device)
    eager, batch_of = fcg.fork(captured), batches("mlp", device, rank_of())
    add, update = fcg.graph_step(add_up, lowering="aten"), fcg.graph_step(update_with_sum, lowering="aten")
    for call in range(CALLS):
        step = update if call % 4 == 3 else add
        captured, eager, _, _ = assert_same_step(step, captured, eager, batch_of(call), call)
    assert int(captured.step) == CALLS // 4
    return [counts_of(add), counts_of(update)]


def add_up(state: Any, batch: Any) -> Any:
    loss, grads = fcg.value_and_grad(lambda p: mlp_loss(p, batch, key_of(state))[0])(state.params)
    key = fcg.random.fold_in(state.key, 1)
    return state.replace(grads=fcg.tree.map(torch.add, state.grads, grads), key=key), {"loss": loss}


def update_with_sum(state: Any, batch: Any) -> Any:
    new = state.apply_gradients(state.grads, grads=fcg.tree.map(torch.zeros_like, state.grads))
    return new, {"norm": fcg.optim.global_norm(state.grads)}


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
