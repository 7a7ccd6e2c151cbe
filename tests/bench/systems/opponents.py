"""Builds systems by name: ours, and fair, ordinary implementations of the same step elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import functional_cg as fcg

from ..modules import ModuleWorkload
from ..rl.systems import of_learner
from ..rl.workloads import LearnerWorkload
from ..system import (
    BETAS,
    EPS,
    FEW,
    FEW_LEAVES,
    LINE,
    OURS,
    RECORDED,
    VARIANTS,
    WATCHED,
    System,
    Unavailable,
    there,
    waiter,
)
from ..workloads import MANY_LEAVES, Batch, Workload
from . import rules
from .by_hand import by_hand, in_tensordict
from .environment import Environment
from .jax_systems import in_jax
from .losses import Model, actor_outputs, torch_loss
from .of_modules import of_module
from .of_step import counts, of_step
from .torch_systems import in_torch, pinned

__all__ = ["build", "ours"]

_CLIP = 1.0


def build(name: str, work: Workload, device: torch.device, batches: Sequence[Batch]) -> System:
    """Build a system by name.

    Args:
      name: One of ``OURS``, ``VARIANTS`` and ``OPPONENTS``.
      work: What it trains.
      device: Where.
      batches: Batches on the CPU.
    Raises:
      Unavailable: If it cannot run here, or does not support this workload.
    """
    if name not in work.systems:
        raise Unavailable(f"is not made for {work.name}")
    if isinstance(work, ModuleWorkload):
        return of_module(name, work, device, batches)
    if isinstance(work, LearnerWorkload):
        return of_learner(name, work, device, batches)
    if name == "jax":
        return in_jax(work, device, batches)
    if name in (*OURS, *VARIANTS):
        return _ours(name, work, device, batches)
    if name in ("hand-graph", "hand-graph-compiled"):
        return by_hand(name, work, device, batches)
    if name == "cudagraph-module":
        return in_tensordict(work, device, batches)
    return in_torch(name, work, device, batches)


def _ours(name: str, work: Workload, device: torch.device, batches: Sequence[Batch]) -> System:
    # Variants are compared with the anchor: on a CPU they use the default lowering there.
    lowering: Literal["aten", "inductor"] = "inductor"
    if name == "ours-aten" or (name in VARIANTS and device.type == "cpu"):
        lowering = "aten"
    if name == "ours-leaves" and work.leaves > MANY_LEAVES:
        lowering = "aten"
    if name in VARIANTS and work.slow_to_compile:
        lowering = "aten"
    if lowering == "inductor" and work.slow_to_compile:
        raise Unavailable(f"takes minutes to compile for {work.leaves:,} leaves")
    if work.kind == "loop":
        return replace(_loop(lowering, work, device), name=name)
    if name in ("ours-host", "ours-prefetch"):
        return replace(_from_host(name, lowering, work, device, batches), name=name)
    trained = replace(work, leaves=FEW_LEAVES) if name == FEW else work
    options = {"branches": 1} if name == LINE else {}
    system = ours(lowering, trained, device, there(batches, device), variant=name, **options)
    return replace(system, name=name)


def ours(
    lowering: Literal["aten", "inductor"],
    work: Workload,
    device: torch.device,
    batches: Sequence[Batch],
    *,
    variant: str = OURS[0],
    **options: Any,
) -> System:
    """Build one of our systems.

    Args:
      lowering: Lowering of the step.
      work: What it trains.
      device: Where.
      batches: Batches on that device.
      variant: Name of the system, which says what is added to an optimizer alone.
      options: Further options of :func:`functional_cg.graph_step`.
    """
    train_step = _step_of(work, variant)
    watched = fcg.statistics(train_step) if variant == WATCHED else train_step
    step: Any = fcg.graph_step(watched, lowering=lowering, **options)
    return of_step(step, _state_of(work, device, variant), device, batches, recorded=variant == RECORDED)


def _state_of(work: Workload, device: torch.device, variant: str) -> Any:
    params = {key: value.to(device) for key, value in work.params().items()}
    if work.kind == "leaves":
        return fcg.place(params)
    optimizer = _optimizer(work, variant)
    if work.kind == "optimizer":
        state = fcg.TrainState.create(params=params, optimizer=optimizer, accumulate=True)
        return state.replace(grads={name: value.to(device) for name, value in work.gradients().items()})
    key = fcg.random.key(0).to(device) if work.kind == "dropout" else None
    buffers = {name: value.to(device) for name, value in work.buffers().items()} or None
    return fcg.TrainState.create(params=params, optimizer=optimizer, buffers=buffers, key=key)


def _optimizer(work: Workload, variant: str) -> Any:
    if work.kind == "dropout":
        return fcg.optim.sgd(work.learning_rate)
    if work.rule != "adamw":
        return rules.in_ours(work)
    rate: Any = work.learning_rate
    if variant in ("ours-schedule", "ours-recipe"):
        rate = fcg.optim.linear(rate, rate, 1000)  # with the same rate, so that values stay comparable
    adamw = fcg.optim.adamw(rate, b1=BETAS[0], b2=BETAS[1], eps=EPS, weight_decay=work.weight_decay)
    chosen: Any = adamw
    if variant in ("ours-clip", "ours-recipe"):
        chosen = fcg.optim.chain(fcg.optim.clip_by_global_norm(_CLIP), adamw)
    return fcg.optim.flatten(chosen) if work.flat and variant != "ours-leaves" else chosen


def _step_of(work: Workload, variant: str) -> Callable[[Any, Batch], tuple[Any, dict[str, Tensor]]]:
    if work.kind == "leaves":
        return _one_leaf
    if work.kind == "optimizer":
        return _guarded(work) if variant in ("ours-guard", "ours-recipe") else _update_alone(work)
    if work.kind == "cnn":
        return _with_buffers(work)
    loss_of = torch_loss(work)

    def train_step(state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        key = None if state.key is None else fcg.random.fold_in(state.key, state.step)
        loss, grads = fcg.value_and_grad(loss_of)(state.params, batch["x"], batch["y"], key)
        return state.apply_gradients(grads), {"loss": loss}

    return train_step


def _with_buffers(work: Workload) -> Callable[[Any, Batch], tuple[Any, dict[str, Tensor]]]:
    apply, _, _ = fcg.from_module(Model(work))

    def train_step(state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        loss_fn = lambda params: apply(params, state.buffers, batch["x"], batch["y"])  # noqa: E731
        (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, buffers=buffers), {"loss": loss}

    return train_step


def _one_leaf(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    leaf = state["leaf00000"] * 0.99 + batch["x"]
    return {**state, "leaf00000": leaf}, {"loss": leaf.sum()}


def _update_alone(work: Workload) -> Callable[[Any, Batch], tuple[Any, dict[str, Tensor]]]:
    """Make an update that returns an old value as its loss: a new one would have to be kept apart from its slot."""

    def update(state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        return state.apply_gradients(state.grads), {"loss": state.params[work.shown].view(-1)[0]}

    return update


def _guarded(work: Workload) -> Callable[[Any, Batch], tuple[Any, dict[str, Tensor]]]:
    """Make a step that leaves the state unchanged if the batch is not finite."""
    update = _update_alone(work)

    def guarded(state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        new, metrics = update(state, batch)
        fine = torch.isfinite(batch["x"].sum())
        return fcg.tree.map(lambda after, before: torch.where(fine, after, before), new, state), metrics

    return guarded


def _from_host(
    name: str, lowering: Any, work: Workload, device: torch.device, batches: Sequence[Batch]
) -> System:
    """Build the step with pinned host batches, passed directly or through ``fcg.prefetch``."""
    step: Any = fcg.graph_step(_step_of(work, name), lowering=lowering)
    states = [_state_of(work, device, name)]
    given = pinned(batches, device)
    coming = iter(fcg.prefetch(itertools.cycle(given), step)) if name == "ours-prefetch" else None

    def run(batch: Batch) -> Any:
        states[0], metrics = step(states[0], batch if coming is None else next(coming))
        return metrics["loss"]

    def close() -> None:
        states.clear()
        step.close()

    return System(name, run, given, waiter(device), close, partial(counts, step))


def _loop(lowering: Any, work: Workload, device: torch.device) -> System:
    update: Any = fcg.graph_step(_step_of(work, OURS[0]), lowering=lowering)
    choose: Any = fcg.graph_fn(
        lambda state, seen: actor_outputs(work, state.params, seen)[0].argmax(-1), lowering=lowering
    )
    states = [_state_of(work, device, OURS[0])]
    environment = Environment(work.batch)

    def act(seen: Any) -> Any:
        return choose(states[0], seen).cpu().numpy()

    def learn(x: Any, y: Any) -> Any:
        states[0], metrics = update(states[0], {"x": x, "y": y})
        return metrics["loss"]

    def close() -> None:
        states.clear()
        update.close()
        choose.close()

    return System(
        "ours", lambda batch: environment.turn(act, learn), [None], waiter(device), close,
        partial(counts, update, choose),
    )  # fmt: skip
