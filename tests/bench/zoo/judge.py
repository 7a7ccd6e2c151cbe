"""Judge one model: does a captured step train it as its eager run does, and as an ordinary loop does?

A captured step is compared with its eager run call by call, both from the same state: over several steps, a network
may make anything of rounding errors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import functional_cg as fcg

from .case import Case
from .rounding import MOST, MOVED, Rounding, excess

__all__ = ["Outcome", "judge"]

# Not Adam, which makes a whole step of a gradient that is a rounding error of 0.
_RATE, _MOMENTUM = 1e-3, 0.9
_MOVED_IN_DOUBLE = 1e-12  # as `MOVED`, which is for float32
_RARE = 8  # one call in so many may be off by a kink


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a model.

    Attributes:
      verdict: ``"works"``, ``"refused"``, ``"wrong"`` or ``"crashed"``; ``"unusable"`` if no ordinary loop trains it.
      reason: First two lines of the error, or what differs; empty if it works.
      fix: What the error suggests.
      worst: The largest difference of a call from its eager run, in multiples of what rounding explains.
    """

    verdict: str
    reason: str = ""
    fix: str = ""
    worst: float = 0.0


class _Forward:
    """Stands for a module inside of a step: hands its buffers on, and folds the key for each call."""

    def __init__(self, apply: Any, params: Any, buffers: Any, key: Any, *, train: bool) -> None:
        self._apply, self._params, self.buffers, self._key, self._train = apply, params, buffers, key, train
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = fcg.random.fold_in(self._key, self._calls)
        self._calls += 1
        out, self.buffers = self._apply(
            self._params, self.buffers, *args, key=key, train=self._train, **kwargs
        )
        return out


@dataclass(frozen=True, slots=True)
class _Trial:
    """A model, and how it is tried.

    Attributes:
      case: The model.
      device: Where it runs.
      lowering: As for ``graph_step``. With ``"aten"``, each call has to be bitwise equal to its eager run.
      calls: How many steps, each with new data.
      double: Whether all is in float64.
    """

    case: Case
    device: str
    lowering: Any
    calls: int
    double: bool = False

    def module(self) -> nn.Module:
        return self.case.module(self.device, double=self.double).train()

    def data(self, call: int) -> dict[str, Tensor]:
        return self.case.data(call, self.device, double=self.double)


def judge(case: Case, device: str, lowering: Any, calls: int, most: int) -> Outcome:
    """Compare a captured step with its eager run, and that with an ordinary loop.

    Args:
      case: The model.
      device: Where.
      lowering: As for ``graph_step``.
      calls: How many steps, each with new data.
      most: Parameters of the largest model to run.
    """
    trial = _Trial(case, device, lowering, calls)
    try:
        module = trial.module()
        if sum(param.numel() for param in module.parameters()) > most:
            return Outcome("unusable", "too large")
        draws = _draws(trial, module)
        plain = _plain(
            trial, train=not draws
        )  # a loop draws other numbers: it is compared in evaluation mode
        beside = _plain(trial, train=not draws, moved=MOVED)
    except Exception as error:  # whatever keeps a model from running is no finding about the library
        return Outcome("unusable", _told(error))
    if not all(map(math.isfinite, plain.losses)):
        return Outcome("unusable", "its loss is not finite")
    try:
        worst, reason = _captured(trial, draws=draws)
        reason = reason or _differs_from_loop(trial, plain, beside, train=not draws)
    except fcg.MiscompileError as error:
        return Outcome("wrong", _told(error))
    except Exception as error:  # any other error is a finding
        text = str(error)
        refused = isinstance(error, fcg.FunctionalCGError) or "To fix" in text
        fix = next(
            (line.removeprefix("To fix: ") for line in text.splitlines() if line.startswith("To fix")), ""
        )
        return Outcome("refused" if refused else "crashed", _told(error), fix)
    return Outcome("wrong" if reason else "works", reason, worst=worst)


def _differs_from_loop(trial: _Trial, plain: _Run, beside: _Run, *, train: bool) -> str:
    """Return how eager runs differ from an ordinary loop by more than rounding."""
    reason = _unlike(_eager(trial, train=train), plain, beside, 1e-4)
    # Batch norm over few values makes anything of rounding errors within a few steps, in float64 too. So a single step
    # counts in training mode, and all of them in evaluation mode.
    only_rounding = (
        bool(reason)
        and _differs_in_double(trial, train=train, calls=1) is False
        and not _differs_in_double(trial, train=False, calls=trial.calls)
    )
    return "" if only_rounding else reason


def _differs_in_double(trial: _Trial, *, train: bool, calls: int) -> bool | None:
    """Whether eager runs differ from the loop in float64: if not, it was rounding that made them differ in float32.

    None if no ordinary loop trains the model so: it makes float32 tensors, or does not train in evaluation mode.

    Args:
      trial: What is tried.
      train: Whether the module trains.
      calls: How many steps.
    """
    other = replace(trial, double=True, calls=calls)
    try:
        plain = _plain(other, train=train)
        beside = _plain(other, train=train, moved=_MOVED_IN_DOUBLE)
    except RuntimeError:
        return None
    return bool(_unlike(_eager(other, train=train), plain, beside, 1e-5))


def _told(error: Exception) -> str:
    """Return what an error says in its first two lines: what happened, and where."""
    lines = str(error).strip().splitlines()[:2]
    return f"{type(error).__name__}: {' '.join(map(str.strip, lines))}"


@dataclass(frozen=True, slots=True)
class _Run:
    losses: list[float]
    state: Mapping[str, Tensor]


def _draws(trial: _Trial, module: nn.Module) -> bool:
    """Whether the forward draws from torch's generator, be it without effect on this loss."""
    state = torch.cuda.get_rng_state if trial.device != "cpu" else torch.get_rng_state
    before = state()
    with torch.no_grad():
        trial.case.loss(copy.deepcopy(module), trial.data(0))
    return not torch.equal(before, state())


def _plain(trial: _Trial, *, train: bool, moved: float = 0.0) -> _Run:
    """Train in an ordinary loop; with weights moved by a little, to see how rounding errors grow."""
    module = trial.module().train(train)
    params = [param for param in module.parameters() if param.requires_grad]
    generator = torch.Generator(trial.device).manual_seed(1)
    with torch.no_grad():
        for param in params if moved else ():
            noise = torch.randn(param.shape, dtype=param.dtype, generator=generator, device=param.device)
            param.mul_(1 + moved * noise)
    optimizer = torch.optim.SGD(params, lr=_RATE, momentum=_MOMENTUM)
    losses = []
    for call in range(trial.calls):
        optimizer.zero_grad()
        loss = trial.case.loss(module, trial.data(call))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return _Run(losses, {name: value.detach() for name, value in module.state_dict().items()})


def _step(trial: _Trial, *, train: bool) -> tuple[Any, Any, Any]:
    """Return ``apply``, a step that trains the module, and its first state."""
    apply, params, buffers = fcg.from_module(trial.module())
    optimizer = fcg.optim.sgd(_RATE, momentum=_MOMENTUM)

    @fcg.graph_step(lowering=trial.lowering)
    def train_step(state: Any, batch: Any) -> Any:
        key = fcg.random.fold_in(state.key, state.step)

        def loss_fn(params: Any) -> Any:
            forward = _Forward(apply, params, state.buffers, key, train=train)
            return trial.case.loss(forward, batch), forward.buffers

        (loss, new), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, buffers=new), {"loss": loss}

    state = fcg.TrainState.create(
        params=params, buffers=buffers, optimizer=optimizer, key=fcg.random.key(1, device=trial.device)
    )
    return apply, train_step, state


def _eager(trial: _Trial, *, train: bool) -> _Run:
    """Train in eager runs of a step."""
    apply, train_step, state = _step(trial, train=train)
    losses = []
    for call in range(trial.calls):
        state, metrics = train_step.eager(state, trial.data(call))
        losses.append(metrics["loss"].item())
    return _Run(losses, apply.state_dict(state.params, state.buffers))


def _captured(trial: _Trial, *, draws: bool) -> tuple[float, str]:
    """Train in a captured step, and compare each call with the eager run from the same state.

    Returns:
      The largest difference, in multiples of what rounding explains, and what differs by more than that.
    """
    apply, train_step, state = _step(trial, train=True)
    rounding = None
    if trial.lowering != "aten":
        # In float64, `torch.rand` draws other numbers.
        wide = None if draws or trial.double else _step(replace(trial, double=True), train=True)[1]
        moved = _MOVED_IN_DOUBLE if trial.double else MOVED
        rounding = Rounding(train_step.eager, wide.eager if wide else None, moved)
    worst, missed = 0.0, list[str]()
    for call in range(trial.calls):
        batch, before = trial.data(call), fcg.snapshot(state)
        expected = train_step.eager(before, batch)
        state, metrics = train_step(state, batch)
        off = excess((state, metrics), expected, rounding.others(before, batch) if rounding else ())
        worst = max(worst, off.times)
        if off.times > (MOST if rounding else 0):
            missed.append(f"call {call}: {off}")
    if missed and not (
        rounding and len(missed) * _RARE <= trial.calls and _is_exact_in_double(trial, draws=draws)
    ):
        return worst, missed[0]
    if train_step.stats.replays != trial.calls:
        return worst, f"it did not replay: {train_step!r}"
    module = trial.module()
    values = apply.state_dict(state.params, state.buffers)
    module.load_state_dict(values)
    back = [name for name, value in module.state_dict().items() if not _same(value, values[name])]
    return worst, f"load_state_dict changes `{back[0]}`" if back else ""


def _is_exact_in_double(trial: _Trial, *, draws: bool) -> bool:
    """Whether the captured step agrees with its eager run at each call in float64.

    Rounding may change the sign of what is almost zero, and so the slope of a rectifier: rarely, by any amount,
    and in float64 a billion times less often.
    """
    if trial.double:
        return False
    try:
        return not _captured(replace(trial, double=True), draws=draws)[1]
    except (RuntimeError, fcg.FunctionalCGError):  # it makes float32 tensors
        return False


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


def _unlike(ours: _Run, plain: _Run, beside: _Run, relative: float) -> str:
    """Return what differs by more than ``relative`` and ten times what rounding grows to between two loops."""
    for call, (a, b) in enumerate(zip(ours.losses, plain.losses, strict=True)):
        grown = 10 * abs(b - beside.losses[call])
        if not abs(a - b) <= max(relative * abs(b), grown, 2e-6):
            return f"loss {call} is {a:.7g}, not {b:.7g} as in an ordinary loop"
    for name, value in ours.state.items():
        if value.numel() and value.is_floating_point():
            there = plain.state[name].double()
            distance = (value.double() - there).abs()
            moved = 10 * (there - beside.state[name].double()).abs().max()
            bound = (relative * there.abs()).clamp(min=2e-6).maximum(moved)
            if (distance > bound).any():
                return f"`{name}` is {distance.max():.3g} away from that in an ordinary loop"
    return ""
