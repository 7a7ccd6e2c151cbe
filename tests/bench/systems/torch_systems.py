"""Ordinary torch systems: eager, compiled, and with graphed forward and backward, all with fused AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..system import BETAS, EPS, System, Unavailable, nothing, there, waiter
from ..workloads import MANY_LEAVES, Batch, Workload
from .environment import Environment
from .losses import Model
from .rules import in_classes

__all__ = ["Alone", "in_torch", "optimizer_for"]

_BREAKS = MappingProxyType(
    {
        "lamb": "the class counts in Python and writes `p.data`: most of it stays eager",
        "adafactor": "the class reads its count on the host: most of it stays eager",
    }
)


def in_torch(name: str, work: Workload, device: torch.device, batches: Sequence[Batch]) -> System:
    """Build ``eager``, ``compile``, ``reduce-overhead`` or ``graphed-callables``.

    Args:
      name: One of these.
      work: What it trains.
      device: Where.
      batches: Batches on the CPU.
    Raises:
      Unavailable: If it cannot run here.
    """
    if device.type != "cuda" and name in ("reduce-overhead", "graphed-callables"):
        raise Unavailable("needs CUDA graphs")
    if work.kind == "optimizer":
        return _optimizer_alone(name, work, device, batches)
    model: Model = Model(work).to(device)
    optimizer = optimizer_for(work, model)
    call = _called(name, model, device, batches)
    own_pool = name == "reduce-overhead"

    def update(x: Tensor, y: Tensor) -> Tensor:
        loss = call(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone() if own_pool else loss.detach()  # type: ignore[no-any-return]

    def run(batch: Batch) -> Tensor:
        if own_pool:
            torch.compiler.cudagraph_mark_step_begin()
        return update(batch["x"], batch["y"])

    def run_from_host(batch: Batch) -> Tensor:
        return run({key: value.to(device, non_blocking=True) for key, value in batch.items()})

    close = torch._dynamo.reset if name in ("compile", "reduce-overhead") else nothing
    if work.kind == "loop":
        turn = _turn(name, work, device, model, update)
        return System(name, turn, [None], waiter(device), close)
    if work.host:
        return System(name, run_from_host, pinned(batches, device), waiter(device), close)
    return System(name, run, there(batches, device), waiter(device), close)


def _called(name: str, model: Model, device: torch.device, batches: Sequence[Batch]) -> Any:
    if name == "compile":
        return torch.compile(model)
    if name == "reduce-overhead":
        return torch.compile(model, mode="reduce-overhead")
    if name == "graphed-callables":
        sample = tuple(batches[0][key].to(device) for key in "xy")
        make: Any = torch.cuda.make_graphed_callables
        return make(model, sample)
    return model


def _turn(
    name: str, work: Workload, device: torch.device, model: Model, update: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Any], Tensor]:
    """Make one iteration of the reinforcement-learning loop."""
    environment = Environment(work.batch)
    modes = {"compile": None, "reduce-overhead": "reduce-overhead"}
    choose: Any = torch.compile(model.act, mode=modes[name]) if name in modes else model.act

    def act(seen: Any) -> Any:
        with torch.no_grad():
            return choose(torch.from_numpy(seen).to(device)).cpu().numpy()

    def learn(x: Any, y: Any) -> Tensor:
        if name == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        return update(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device))

    return lambda batch: environment.turn(act, learn)


def optimizer_for(work: Workload, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Make the optimizer of a workload: fused AdamW, or SGD for dropout alone."""
    if work.kind == "dropout":
        return torch.optim.SGD(model.parameters(), lr=work.learning_rate, fused=True)
    return torch.optim.AdamW(
        model.parameters(), lr=work.learning_rate, betas=BETAS, eps=EPS, weight_decay=work.weight_decay,
        **{"fused": True, **options},
    )  # fmt: skip


def pinned(batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    """Pin batches in host memory, as a data loader does."""
    return [
        {key: value.pin_memory() if device.type == "cuda" else value for key, value in batch.items()}
        for batch in batches
    ]


class Alone(nn.Module):
    """Parameters with fixed gradients, for timing an optimizer alone."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self._work = work
        for name, value in work.params().items():
            self.register_parameter(name, nn.Parameter(value))

    def with_gradients(self, device: torch.device) -> Alone:
        """Move the module to a device, and set the gradients of the workload."""
        self.to(device)
        gradients = self._work.gradients()
        for name, param in self.named_parameters():
            param.grad = gradients[name].to(device)
        return self

    def shown(self) -> Tensor:
        """Return one element of one leaf, which is compared in place of a loss."""
        return self.get_parameter(self._work.shown).detach().view(-1)[0].clone()


def _optimizer_alone(name: str, work: Workload, device: torch.device, batches: Sequence[Batch]) -> System:
    if name == "compile" and work.leaves > MANY_LEAVES:
        raise Unavailable(f"takes minutes to compile for {work.leaves:,} leaves")
    model = Alone(work).with_gradients(device)
    compiled = name == "compile"
    step = _adamw(work, model, device, compiled=compiled) if work.rule == "adamw" else _rule(work, model)
    advance: Any = torch.compile(step) if compiled else step

    def run(batch: Batch) -> Tensor:
        shown = model.shown()
        advance()
        return shown

    close = torch._dynamo.reset if compiled else nothing
    notes = [_BREAKS[work.rule]] if compiled and work.rule in _BREAKS else []
    return System(name, run, there(batches, device), waiter(device), close, notes=notes)


def _adamw(work: Workload, model: nn.Module, device: torch.device, *, compiled: bool) -> Callable[[], Any]:
    options = {"fused": False, "foreach": True, "capturable": device.type == "cuda"} if compiled else {}
    return optimizer_for(work, model, **options).step


def _rule(work: Workload, model: nn.Module) -> Callable[[], None]:
    optimizers = in_classes(work, list(model.parameters()))

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step
