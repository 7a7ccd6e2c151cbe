"""Systems that train a module as it is: eager, through ``torch.compile``, and ours through ``from_module``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config, list_mode_options

import functional_cg as fcg

from ..modules import ModuleWorkload
from ..system import (
    BETAS,
    BUDGETS,
    EPS,
    ONCE,
    RECORDED,
    TUNED,
    WATCHED,
    System,
    Unavailable,
    nothing,
    there,
    waiter,
)
from ..workloads import Batch
from .of_step import counts
from .torch_systems import optimizer_for

__all__ = ["of_module"]

_SEED = 1
_MODES: Mapping[str, str | None] = MappingProxyType(
    {"compile": None, "reduce-overhead": "reduce-overhead", "max-autotune": "max-autotune-no-cudagraphs"}
)


def of_module(name: str, work: ModuleWorkload, device: torch.device, batches: Sequence[Batch]) -> System:
    """Build a system that trains a module.

    Args:
      name: One of ``MODULES``.
      work: What it trains.
      device: Where.
      batches: Batches on the CPU.
    Raises:
      Unavailable: If it cannot run here.
    """
    if not work.installed:
        raise Unavailable(f"{work.library} is not installed")
    if device.type != "cuda" and name in ("reduce-overhead", "max-autotune", TUNED, *BUDGETS):
        raise Unavailable("is made for GPUs")
    torch.manual_seed(_SEED)
    module = work.make().to(device).train()
    if name.startswith("ours"):
        return _ours(name, work, module, device, batches)
    called: Any = torch.compile(module, mode=_MODES[name]) if name in _MODES else module
    optimizer = optimizer_for(work, module)

    def run(batch: Batch) -> Tensor:
        if name == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device.type, torch.bfloat16):
            loss = work.loss(called, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone() if name == "reduce-overhead" else loss.detach()

    close = torch._dynamo.reset if name in _MODES else nothing
    return System(name, run, there(batches, device), waiter(device), close)


def _ours(
    name: str, work: ModuleWorkload, module: nn.Module, device: torch.device, batches: Sequence[Batch]
) -> System:
    apply, params, buffers = fcg.from_module(module)
    b1, b2 = BETAS
    optimizer = fcg.optim.adamw(work.learning_rate, b1=b1, b2=b2, eps=EPS, weight_decay=work.weight_decay)
    key = fcg.random.key(_SEED).to(device)
    states = [fcg.TrainState.create(params=params, buffers=buffers, optimizer=optimizer, key=key)]

    lowering: Any = "aten" if name == "ours-aten" else "inductor"

    def train_step(state: Any, batch: Batch) -> Any:
        def loss_fn(params: Any) -> Any:
            new: list[Any] = []

            def called(*args: Any, **kwargs: Any) -> Any:
                key = fcg.random.fold_in(state.key, state.step)
                out, buffers = apply(params, state.buffers, *args, key=key, train=True, **kwargs)
                new.append(buffers)
                return out

            with torch.autocast(device.type, torch.bfloat16):
                loss = work.loss(called, batch)  # type: ignore[arg-type]
            return loss, new[0]

        (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, buffers=buffers), {"loss": loss}

    step = fcg.graph_step(
        fcg.statistics(train_step) if name == WATCHED else train_step,
        lowering=lowering,
        activation_memory_budget=BUDGETS.get(name),
        compile_once=name == ONCE or "auto",
    )
    made: Any = fcg.record(step) if name == RECORDED else step

    def run(batch: Batch) -> Any:
        compiles = name == TUNED and not step.stats.captures
        with _tuned() if compiles else contextlib.nullcontext():
            states[0], metrics = made(states[0], batch)
        return metrics["loss"]

    def close() -> None:
        states.clear()
        step.close()

    return System(name, run, there(batches, device), waiter(device), close, partial(counts, step))


def _tuned() -> Any:
    """Set inductor's options as the mode of the opponent does."""
    return config.patch(list_mode_options(_MODES["max-autotune"]))
