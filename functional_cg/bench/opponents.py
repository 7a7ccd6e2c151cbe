"""The systems: ours, and ordinary, fair implementations of the same step by other means.

Systems with static buffers copy the batch in and the loss out at each step, so that the caller may keep both, as with
every other system.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

import functional_cg as fcg

from .workloads import Batch, Params, Workload, jax_loss, torch_loss

__all__ = ["OPPONENTS", "OURS", "System", "Unavailable", "build", "ours"]

OURS = ("ours", "ours-aten")
OPPONENTS = ("eager", "compile", "reduce-overhead", "hand-graph", "hand-graph-compiled", "jax")
_BETAS, _EPS = (0.9, 0.999), 1e-8
_WARM_UPS = 3


class Unavailable(Exception):
    """A system that cannot run here; the text says why."""


@dataclass(eq=False)
class System:
    """A system that is ready for its first step.

    Attributes:
      name: As on the command line.
      step: ``step(batch) -> loss``: one update; the loss is a value on the device.
      batches: Batches on the device, as ``step`` takes them.
      wait: Blocks until the device is done.
      close: Gives up graphs and memory.
      counts: Captures and replays so far, where the system counts them.
      peak_bytes: Peak of an allocator of its own, in bytes; None where torch's allocator knows it.
      notes: What a reader should know about this row.
    """

    name: str
    step: Callable[[Any], Any]
    batches: Sequence[Any]
    wait: Callable[[], None]
    close: Callable[[], None]
    counts: Callable[[], dict[str, int]] = dict
    peak_bytes: Callable[[], int | None] = lambda: None
    notes: list[str] = field(default_factory=list)


def build(name: str, work: Workload, device: torch.device, batches: Sequence[Batch]) -> System:
    """Build a system.

    Args:
      name: One of ``OURS`` and ``OPPONENTS``.
      work: What it trains.
      device: Where.
      batches: Batches on the CPU.
    Raises:
      Unavailable: If it cannot run here.
    """
    if name == "jax":
        return _jax(work, device, batches)
    there = [{key: value.to(device) for key, value in batch.items()} for batch in batches]
    if name in OURS:
        return replace(ours("aten" if name == "ours-aten" else "inductor", work, device, there), name=name)
    if device.type != "cuda" and name in ("reduce-overhead", "hand-graph", "hand-graph-compiled"):
        raise Unavailable("needs CUDA graphs")
    if work.kind == "leaves" and name != "hand-graph":
        raise Unavailable("a loop that updates one tensor does not have the other leaves")
    if name in ("hand-graph", "hand-graph-compiled"):
        return _hand_graph(name, work, device, there)
    return _module(name, work, device, there)


def _waiter(device: torch.device) -> Callable[[], None]:
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def ours(
    lowering: Literal["aten", "inductor"],
    work: Workload,
    device: torch.device,
    batches: Sequence[Batch],
    **options: Any,
) -> System:
    """Build ours.

    Args:
      lowering: Of the step.
      work: What it trains.
      device: Where.
      batches: Batches there.
      options: More of :func:`functional_cg.graph_step`.
    """
    params = {key: value.to(device) for key, value in work.params().items()}
    step: Any
    if work.kind == "leaves":
        step = fcg.graph_step(_one_leaf, lowering=lowering, **options)
        state: Any = fcg.place(params)
    else:
        step = fcg.graph_step(_train_step(work), lowering=lowering, **options)
        optimizer = fcg.optim.adamw(
            work.learning_rate, b1=_BETAS[0], b2=_BETAS[1], eps=_EPS, weight_decay=work.weight_decay
        )
        state = fcg.TrainState.create(params=params, optimizer=optimizer)
    del params
    states = [state]
    del state

    def run(batch: Batch) -> Any:
        states[0], metrics = step(states[0], batch)
        return metrics["loss"]

    def close() -> None:
        states.clear()
        step.close()

    def counts() -> dict[str, int]:
        return {"captures": step.stats.captures, "replays": step.stats.replays}

    return System("ours", run, batches, _waiter(device), close, counts)


def _train_step(work: Workload) -> Callable[[Any, Batch], tuple[Any, dict[str, Tensor]]]:
    loss_of = torch_loss(work)

    def train_step(state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        loss, grads = fcg.value_and_grad(loss_of)(state.params, batch["x"], batch["y"])
        return state.apply_gradients(grads), {"loss": loss}

    return train_step


def _one_leaf(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    leaf = state["leaf00000"] * 0.99 + batch["x"]
    return {**state, "leaf00000": leaf}, {"loss": leaf.sum()}


class _Model(nn.Module):
    """A workload as an ordinary module."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self._loss = torch_loss(work)
        self._names = tuple(work.params())
        for name, value in work.params().items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        params: Params = {name: getattr(self, name) for name in self._names}
        return self._loss(params, x, y)


def _adamw(work: Workload, model: nn.Module, **options: Any) -> torch.optim.AdamW:
    rate, decay = work.learning_rate, work.weight_decay
    return torch.optim.AdamW(
        model.parameters(), lr=rate, betas=_BETAS, eps=_EPS, weight_decay=decay, fused=True, **options
    )


def _module(name: str, work: Workload, device: torch.device, batches: Sequence[Batch]) -> System:
    """Eager, or with the forward and backward compiled; fused AdamW either way."""
    model = _Model(work).to(device)
    optimizer = _adamw(work, model)
    call: Any = model
    if name != "eager":
        call = torch.compile(model, mode="reduce-overhead" if name == "reduce-overhead" else None)
    own_pool = name == "reduce-overhead"

    def run(batch: Batch) -> Tensor:
        if own_pool:
            torch.compiler.cudagraph_mark_step_begin()
        loss = call(batch["x"], batch["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone() if own_pool else loss.detach()  # type: ignore[no-any-return]

    return System(name, run, batches, _waiter(device), _nothing if name == "eager" else torch._dynamo.reset)


def _hand_graph(name: str, work: Workload, device: torch.device, batches: Sequence[Batch]) -> System:
    """A CUDA graph as one writes it by hand: warm-up and capture on a side stream, static batch, copy-in, replay."""
    static = {key: torch.empty_like(value) for key, value in batches[0].items()}
    for key, value in batches[0].items():
        static[key].copy_(value)
    if work.kind == "leaves":
        update, restore, drop = _one_leaf_in_place(work, device, static)
    else:
        update, restore, drop = _module_in_place(name, work, device, static)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            update()
    torch.cuda.synchronize(device)
    drop()
    graph: Any = torch.cuda.CUDAGraph()  # noqa: TID251
    with torch.cuda.graph(graph, stream=side):  # noqa: TID251
        loss = update()
    torch.cuda.current_stream(device).wait_stream(side)
    restore()
    held: list[Any] = [graph, loss]
    del graph, loss
    pairs = list(static)

    def run(batch: Batch) -> Tensor:
        for key in pairs:
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

    return System(name, run, batches, _waiter(device), close)


_InPlace = tuple[Callable[[], Any], Callable[[], None], Callable[[], None]]


def _nothing() -> None:
    pass


def _module_in_place(name: str, work: Workload, device: torch.device, static: Batch) -> _InPlace:
    """The module's update on static buffers, how to undo the warm-up, and how to drop gradients."""
    model = _Model(work).to(device)
    optimizer = _adamw(work, model, capturable=True)
    call: Any = torch.compile(model) if name == "hand-graph-compiled" else model
    initial = work.params()

    def update() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = call(static["x"], static["y"])
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    def restore() -> None:
        with torch.no_grad():
            for key, param in model.named_parameters():
                param.copy_(initial[key])
            for moments in optimizer.state.values():
                for value in moments.values():
                    value.zero_()

    def drop() -> None:
        optimizer.zero_grad(set_to_none=True)

    return update, restore, drop


def _one_leaf_in_place(work: Workload, device: torch.device, static: Batch) -> _InPlace:
    initial = work.params()["leaf00000"].to(device)
    leaf = initial.clone()

    def update() -> Tensor:
        leaf.mul_(0.99).add_(static["x"])
        return leaf.sum()

    def restore() -> None:
        leaf.copy_(initial)

    return update, restore, _nothing


def _jax(work: Workload, device: torch.device, batches: Sequence[Batch]) -> System:
    """``jax.jit`` with donated state and ``optax.adamw``."""
    try:
        jax: Any = importlib.import_module("jax")
        optax: Any = importlib.import_module("optax")
    except ImportError as error:
        raise Unavailable(f"{error}") from error
    try:
        place = jax.devices("cpu" if device.type == "cpu" else "gpu")[0]
    except RuntimeError as error:
        raise Unavailable(f"jax has no {device.type} device: {error}") from error
    optimizer = optax.adamw(
        work.learning_rate, b1=_BETAS[0], b2=_BETAS[1], eps=_EPS, weight_decay=work.weight_decay
    )
    before = (place.memory_stats() or {}).get("bytes_in_use", 0)
    notes = [f"jax {jax.__version__}, optax {optax.__version__}"]
    held: dict[str, Any] = {}

    def fresh() -> Any:
        params = {key: jax.device_put(value.numpy(), place) for key, value in work.params().items()}
        return params if work.kind == "leaves" else (params, optimizer.init(params))

    def compiled(attention: str | None) -> Any:
        if work.kind == "leaves":

            def leaves_step(state: Any, batch: Any) -> Any:
                state, metrics = _one_leaf(state, batch)
                return state, metrics["loss"]

            return jax.jit(leaves_step, donate_argnums=0)
        loss_of = jax_loss(work, jax, optax, attention)

        def step(state: Any, batch: Any) -> Any:
            params, opt_state = state
            loss, grads = jax.value_and_grad(loss_of)(params, batch["x"], batch["y"])
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

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

    def run(batch: Any) -> Any:
        if "state" not in held:
            return first(batch)
        held["state"], held["loss"] = held["fn"](held["state"], batch)
        return held["loss"]

    def peak() -> int | None:
        stats = place.memory_stats() or {}
        return int(stats["peak_bytes_in_use"]) - before if "peak_bytes_in_use" in stats else None

    def close() -> None:
        held.clear()
        jax.clear_caches()

    there = [
        {key: jax.device_put(_narrow(value).numpy(), place) for key, value in b.items()} for b in batches
    ]

    def wait() -> None:
        jax.block_until_ready(held["loss"])

    return System("jax", run, there, wait, close, peak_bytes=peak, notes=notes)


def _narrow(value: Tensor) -> Tensor:
    return value.to(torch.int32) if value.dtype == torch.int64 else value
