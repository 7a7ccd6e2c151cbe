"""The jax system: ``jax.jit`` with donated state and ``optax.adamw``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..system import BETAS, EPS, System, Unavailable
from ..workloads import Batch, Workload
from .environment import Environment
from .jax_losses import jax_actor, jax_loss
from .rules import in_optax

__all__ = ["in_jax", "modules", "narrow", "peak_of"]


def in_jax(work: Workload, device: torch.device, batches: Sequence[Batch]) -> System:
    """Build the jax system.

    Args:
      work: The workload.
      device: Device to run on.
      batches: Batches on the CPU.
    Raises:
      Unavailable: If jax or optax is missing, or has no such device.
    """
    jax, optax, place = modules(device)
    peak = peak_of(place)
    notes = [f"jax {jax.__version__}, optax {optax.__version__}"]
    held: dict[str, Any] = {}
    optimizer = _optimizer(work, optax)
    put = lambda value: jax.device_put(value, place)  # noqa: E731

    def shaped(value: Tensor) -> Any:
        # Copies: an array on numpy's memory, once donated, would overwrite the workload's values.
        return (value.T if work.rule != "adamw" else value).numpy().copy()

    def fresh() -> Any:
        params = {key: put(shaped(value)) for key, value in work.params().items()}
        if work.kind == "leaves":
            return params
        if work.kind == "optimizer":
            grads = {key: put(shaped(value)) for key, value in work.gradients().items()}
            return params, optimizer.init(params), grads
        extra = {key: put(value.numpy().copy()) for key, value in work.buffers().items()}
        if work.kind == "dropout":
            extra["count"] = put(torch.zeros((), dtype=torch.int32).numpy())
        return params, optimizer.init(params), extra

    def compiled(attention: str | None) -> Any:
        if work.kind == "leaves":
            return jax.jit(_one_leaf, donate_argnums=0)
        if work.kind == "optimizer":
            return jax.jit(_update_alone(work, optimizer, optax), donate_argnums=0)
        loss_of = jax_loss(work, jax, optax, attention)

        def step(state: Any, batch: Any) -> Any:
            params, opt_state, extra = state
            grad_of = jax.value_and_grad(loss_of, has_aux=True)
            (loss, extra), grads = grad_of(params, extra, batch["x"], batch["y"])
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state, extra), loss

        return jax.jit(step, donate_argnums=0)

    def first(batch: Any) -> Any:
        attentions: tuple[str | None, ...] = (None,)
        if work.kind == "gpt" and work.bf16 and device.type == "cuda":
            attentions = ("cudnn", None)
        for attention in attentions:
            held["fn"] = compiled(attention)
            try:
                held["state"], held["loss"] = held["fn"](fresh(), batch)
                jax.block_until_ready(held["loss"])
            except Exception as error:
                if attention is None:
                    raise
                notes.append(f"attention {attention} failed ({type(error).__name__}: {str(error)[:200]})")
                continue
            if work.kind == "gpt":
                notes.append(f"attention {attention or 'by default'}")
            return held["loss"]
        raise AssertionError("the last one returns or raises")

    def update(batch: Any) -> Any:
        batch = batch if not work.host else {key: put(value) for key, value in batch.items()}
        if "state" not in held:
            return first(batch)
        held["state"], held["loss"] = held["fn"](held["state"], batch)
        return held["loss"]

    def close() -> None:
        held.clear()
        jax.clear_caches()

    def wait() -> None:
        jax.block_until_ready(held["loss"])

    here = [{key: narrow(value).numpy() for key, value in batch.items()} for batch in batches]
    given = here if work.host else [{key: put(value) for key, value in batch.items()} for batch in here]
    run = update
    if work.kind == "loop":
        outputs = jax_actor(work, jax)
        choose = jax.jit(lambda params, x: outputs(params, x)[0].argmax(-1))
        held["state"], held["fn"] = fresh(), compiled(None)
        environment = Environment(work.batch)

        def act(seen: Any) -> Any:
            return jax.device_get(choose(held["state"][0], put(seen)))

        def learn(x: Any, y: Any) -> Any:
            return update({"x": put(x), "y": put(y)})

        def run(batch: Any) -> Any:
            return environment.turn(act, learn)

    return System("jax", run, given, wait, close, peak_bytes=peak, notes=notes)


def modules(device: torch.device) -> tuple[Any, Any, Any]:
    """Return jax, optax and jax's name for a device.

    Raises:
      Unavailable: If jax or optax is missing, or has no such device.
    """
    try:
        jax: Any = importlib.import_module("jax")
        optax: Any = importlib.import_module("optax")
    except ImportError as error:
        raise Unavailable(f"{error}") from error
    try:
        return jax, optax, jax.devices("cpu" if device.type == "cpu" else "gpu")[0]
    except RuntimeError as error:
        raise Unavailable(f"jax has no {device.type} device: {error}") from error


def peak_of(place: Any) -> Callable[[], int | None]:
    """Return a function that tells the peak of memory on a device, above what is in use now."""
    before = (place.memory_stats() or {}).get("bytes_in_use", 0)

    def peak() -> int | None:
        stats = place.memory_stats() or {}
        return int(stats["peak_bytes_in_use"]) - before if "peak_bytes_in_use" in stats else None

    return peak


def _optimizer(work: Workload, optax: Any) -> Any:
    if work.kind == "dropout":
        return optax.sgd(work.learning_rate)
    if work.rule != "adamw":
        return in_optax(work, optax)
    return optax.adamw(work.learning_rate, b1=BETAS[0], b2=BETAS[1], eps=EPS, weight_decay=work.weight_decay)


def _one_leaf(state: Any, batch: Any) -> Any:
    leaf = state["leaf00000"] * 0.99 + batch["x"]
    return {**state, "leaf00000": leaf}, leaf.sum()


def _update_alone(work: Workload, optimizer: Any, optax: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
        params, opt_state, grads = state
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, grads), params[work.shown].reshape(-1)[0]

    return step


def narrow(value: Tensor) -> Tensor:
    """Convert batches to jax conventions: int32 and channels last."""
    value = value.permute(0, 2, 3, 1) if value.dim() == 4 else value
    return value.to(torch.int32) if value.dtype == torch.int64 else value
