"""Hand-written CUDA graphs of the eager and the compiled step, and tensordict's ``CudaGraphModule``.

They use static buffers. Each step copies the batch in and the loss out, so that the caller may keep both, as with every
other system.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..system import System, Unavailable, nothing, there, waiter
from ..workloads import Batch, Workload
from .losses import Model
from .torch_systems import Alone, optimizer_for

__all__ = ["by_hand", "captured", "cudagraph_module", "forget", "in_tensordict"]

_WARM_UPS = 3
# An update on static buffers, a function that undoes the warm-up, and one that drops gradients.
_InPlace = tuple[Callable[[], Any], Callable[[], None], Callable[[], None]]


def captured(
    step: Callable[[], Any], device: torch.device, between: Callable[[], object], **options: Any
) -> tuple[Any, Any]:
    """Warm a step up on a side stream, then capture it there.

    Args:
      step: The step.
      device: Where it runs.
      between: Called after the warm-up.
      options: Of ``torch.cuda.graph``.
    Returns:
      The graph, and what the step returned as it was captured. The step's tensors have to stay alive.
    """
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            step()
    torch.cuda.synchronize(device)
    between()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, **options):
        result = step()
    torch.cuda.current_stream(device).wait_stream(side)
    return graph, result


def by_hand(name: str, work: Workload, device: torch.device, batches: Sequence[Batch]) -> System:
    """Build a hand-written graph: warm-up and capture on a side stream, static batch, copy-in, replay.

    Args:
      name: ``hand-graph`` or ``hand-graph-compiled``.
      work: What it trains.
      device: Where.
      batches: Batches on the CPU.
    Raises:
      Unavailable: If there are no CUDA graphs.
    """
    if device.type != "cuda":
        raise Unavailable("needs CUDA graphs")
    given = there(batches, device)
    static = {key: value.clone() for key, value in given[0].items()}
    update, restore, drop = _in_place(name, work, device, static)
    graph, loss = captured(update, device, drop)
    restore()
    held: list[Any] = [graph, loss, update]  # a graph reads addresses: the tensors there must stay alive
    del graph, loss
    keys = list(static)

    def run(batch: Batch) -> Tensor:
        for key in keys:
            static[key].copy_(batch[key])
        held[0].replay()
        return held[1].clone()  # type: ignore[no-any-return]

    def close() -> None:
        torch.cuda.synchronize(device)
        held[0].reset()
        held.clear()
        drop()
        if name == "hand-graph-compiled":
            torch._dynamo.reset()

    return System(name, run, given, waiter(device), close)


def cudagraph_module(device: torch.device) -> Any:
    """Return tensordict's ``CudaGraphModule``.

    Raises:
      Unavailable: If tensordict is missing, or there are no CUDA graphs.
    """
    if device.type != "cuda":
        raise Unavailable("needs CUDA graphs")
    try:
        return importlib.import_module("tensordict.nn").CudaGraphModule
    except ImportError as error:
        raise Unavailable(f"{error}") from error


def in_tensordict(work: Workload, device: torch.device, batches: Sequence[Batch]) -> System:
    """Wrap the ordinary update in ``tensordict.nn.CudaGraphModule``.

    Raises:
      Unavailable: If tensordict is missing, or there are no CUDA graphs.
    """
    graphed = cudagraph_module(device)
    model: Any = Model(work).to(device)
    optimizer = optimizer_for(work, model, **_capturable(work))

    def update(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    call = graphed(update)
    notes = [
        "its first calls are eager, then it captures: the time to the first step is that of an eager one"
    ]

    def run(batch: Batch) -> Tensor:
        return call(batch["x"], batch["y"])  # type: ignore[no-any-return]

    return System("cudagraph-module", run, there(batches, device), waiter(device), notes=notes)


def _capturable(work: Workload) -> dict[str, bool]:
    return {} if work.kind == "dropout" else {"capturable": True}


def _in_place(name: str, work: Workload, device: torch.device, static: Batch) -> _InPlace:
    if work.kind == "leaves":
        return _one_leaf(work, device, static)
    if work.kind == "optimizer":
        return _optimizer_alone(work, device)
    model: Any = Model(work).to(device)
    optimizer = optimizer_for(work, model, **_capturable(work))
    call: Any = torch.compile(model) if name == "hand-graph-compiled" else model
    initial = {**work.params(), **work.buffers()}

    def update() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = call(static["x"], static["y"])
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    def restore() -> None:
        with torch.no_grad():
            for key, value in (*model.named_parameters(), *model.named_buffers()):
                value.copy_(initial[key])
        forget(optimizer)

    def drop() -> None:
        optimizer.zero_grad(set_to_none=True)

    return update, restore, drop


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Reset moments and counts to zero."""
    for moments in optimizer.state.values():
        for value in moments.values():
            if isinstance(value, Tensor):
                value.zero_()


def _one_leaf(work: Workload, device: torch.device, static: Batch) -> _InPlace:
    initial = work.params()["leaf00000"].to(device)
    leaf = initial.clone()

    def update() -> Tensor:
        leaf.mul_(0.99).add_(static["x"])
        return leaf.sum()

    def restore() -> None:
        leaf.copy_(initial)

    return update, restore, nothing


def _optimizer_alone(work: Workload, device: torch.device) -> _InPlace:
    model = Alone(work).with_gradients(device)
    optimizer = optimizer_for(work, model, capturable=True)
    initial = work.params()

    def update() -> Tensor:
        shown = model.shown()
        optimizer.step()
        return shown

    def restore() -> None:
        with torch.no_grad():
            for key, param in model.named_parameters():
                param.copy_(initial[key])
        forget(optimizer)

    return update, restore, nothing
