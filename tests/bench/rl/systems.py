"""Builds the systems of a learner: ours, and the update in place in the ways in which LeanRL and others speed it up.

Compiled updates compile the optimizer, too, in its foreach form, as LeanRL does; others use the fused one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import functional_cg as fcg

from ..system import LANES, LINE, OURS, System, Unavailable, nothing, there, waiter
from ..systems.by_hand import captured, cudagraph_module, forget
from ..systems.of_step import of_step
from ..workloads import Batch
from .in_jax import in_jax
from .nets import Learner
from .workloads import LearnerWorkload

__all__ = ["of_learner"]

_BRANCHES = MappingProxyType({LANES: "auto", LINE: 1})
_COMPILED = ("compile", "reduce-overhead", "hand-graph-compiled", "cudagraph-module")


def of_learner(name: str, work: LearnerWorkload, device: torch.device, batches: Sequence[Batch]) -> System:
    """Build a system that runs the update of a learner.

    Args:
      name: One of the workload's systems.
      work: The workload.
      device: Where.
      batches: Batches on the CPU.
    Raises:
      Unavailable: If it cannot run here.
    """
    if name == "jax":
        return in_jax(work, device, batches)
    if name in (*OURS, LANES, LINE):
        return _ours(name, work, device, batches)
    if device.type != "cuda" and name not in ("eager", "compile"):
        raise Unavailable("needs CUDA graphs")
    graphed = cudagraph_module(device) if name == "cudagraph-module" else None
    torch.manual_seed(0)
    options = {"capturable": device.type == "cuda", "foreach" if name in _COMPILED else "fused": True}
    learner = work.learned.learner(device, options)
    if name in _COMPILED:
        learner.compile_with("reduce-overhead" if name == "reduce-overhead" else None)
    given = there(batches, device)
    close = torch._dynamo.reset if name in _COMPILED else nothing
    if name.startswith("hand-graph"):
        return _by_hand(name, learner, device, given, close)
    update: Any = learner.update if graphed is None else graphed(learner.update)

    def run(batch: Batch) -> Tensor:
        if name != "reduce-overhead":
            return update(*batch.values())  # type: ignore[no-any-return]
        torch.compiler.cudagraph_mark_step_begin()
        return update(*batch.values()).clone()  # type: ignore[no-any-return]

    return System(name, run, given, waiter(device), close)


def _ours(name: str, work: LearnerWorkload, device: torch.device, batches: Sequence[Batch]) -> System:
    if name in _BRANCHES and device.type != "cuda":
        raise Unavailable("is made for GPUs")
    once = {"compile_once": work.learned.compile_once}
    options: dict[str, Any] = {"branches": _BRANCHES[name]} if name in _BRANCHES else once
    lowering: Any = "aten" if name == "ours-aten" else "inductor"
    step: Any = fcg.graph_step(work.learned.step, lowering=lowering, **options)
    return replace(of_step(step, work.learned.state(device), device, there(batches, device)), name=name)


def _by_hand(
    name: str, learner: Learner, device: torch.device, given: Sequence[Batch], close: Callable[[], None]
) -> System:
    """Capture the update over static buffers, and undo what the warm-up changed."""
    static = {key: value.clone() for key, value in given[0].items()}
    initial = {key: value.clone() for key, value in learner.state_dict().items()}

    def drop() -> None:
        for optimizer in learner.optimizers:
            optimizer.zero_grad(set_to_none=True)

    graph, loss = captured(lambda: learner.update(*static.values()), device, drop)
    learner.load_state_dict(initial)
    for optimizer in learner.optimizers:
        forget(optimizer)
    held: list[Any] = [graph, loss, learner]  # a graph reads addresses: the tensors there must stay alive
    del graph, loss

    def run(batch: Batch) -> Tensor:
        for key, value in static.items():
            value.copy_(batch[key])
        held[0].replay()
        return held[1].clone()  # type: ignore[no-any-return]

    def shut() -> None:
        torch.cuda.synchronize(device)
        held[0].reset()
        held.clear()
        close()

    return System(name, run, given, waiter(device), shut)
