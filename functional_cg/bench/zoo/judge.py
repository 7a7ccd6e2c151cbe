"""Judge one model: does a captured step train it as its eager run does, and as an ordinary loop does?"""

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

__all__ = ["Outcome", "judge"]

# Not Adam, which makes a whole step of a gradient that is a rounding error of 0.
_RATE, _MOMENTUM = 1e-3, 0.9
_EAGER = "its eager run"
# Relative, by how much the weights of the run differ that shows how rounding errors grow; and in float64, where a
# compiled step begins about as far from its eager run.
_BESIDE, _BESIDE_IN_DOUBLE = 3e-7, 1e-12


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a model.

    Attributes:
      verdict: ``"works"``, ``"refused"``, ``"wrong"`` or ``"crashed"``; ``"unusable"`` if no ordinary loop trains it.
      reason: First two lines of the error, or what differs; empty if it works.
      fix: What the error suggests.
    """

    verdict: str
    reason: str = ""
    fix: str = ""


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
      lowering: As for ``graph_step``. With ``"aten"``, the step has to be bitwise equal to its eager run.
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
    """Train a model in an ordinary loop, in a captured step and in the eager run of that, and compare.

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
        plain = _plain(trial, train=not draws)  # what draws is compared with it in evaluation mode
        beside = _plain(trial, train=not draws, moved=_BESIDE)
    except Exception as error:  # whatever keeps a model from running is no finding about the library
        return Outcome("unusable", _told(error))
    if not all(map(math.isfinite, plain.losses)):
        return Outcome("unusable", "its loss is not finite")
    try:
        reason = _differs(trial, plain, beside, train=not draws)
        if not reason and draws:
            reason = _differs_from_eager(trial, plain, beside, train=True)[1]
    except Exception as error:  # any other error is a finding
        text = str(error)
        refused = isinstance(error, fcg.FunctionalCGError) or "To fix" in text
        fix = next(
            (line.removeprefix("To fix: ") for line in text.splitlines() if line.startswith("To fix")), ""
        )
        return Outcome("refused" if refused else "crashed", _told(error), fix)
    return Outcome("wrong", reason) if reason else Outcome("works")


def _differs(trial: _Trial, plain: _Run, beside: _Run, *, train: bool) -> str:
    """Return how a step differs from its eager run or from an ordinary loop by more than rounding."""
    ours, reason = _differs_from_eager(trial, plain, beside, train=train)
    if reason:
        return reason
    reason = _unlike(ours, plain, (plain, beside), 1e-4, "an ordinary loop")
    # Batch norm over few values makes anything of rounding errors within a few steps, in float64 too. So a single step
    # counts in training mode, and all of them in evaluation mode.
    only_rounding = (
        bool(reason)
        and _differs_in_double(trial, train=train, calls=1, loop=True) is False
        and not _differs_in_double(trial, train=False, calls=trial.calls, loop=True)
    )
    return "" if only_rounding else reason


def _differs_from_eager(trial: _Trial, plain: _Run, beside: _Run, *, train: bool) -> tuple[_Run, str]:
    ours, reason = _captured(trial, plain, beside, train=train)
    if reason.endswith(_EAGER) and _differs_in_double(trial, train=train, calls=trial.calls) is False:
        reason = ""
    return ours, reason


def _differs_in_double(trial: _Trial, *, train: bool, calls: int, loop: bool = False) -> bool | None:
    """Whether a step differs in float64: if not, it was rounding that made it differ in float32.

    None if no ordinary loop trains the model so: it makes float32 tensors, or does not train in evaluation mode.

    Args:
      trial: What is tried.
      train: Whether the module trains.
      calls: How many steps.
      loop: Whether an ordinary loop has to agree, too.
    """
    other = replace(trial, double=True, calls=calls)
    try:
        plain = _plain(other, train=train)
        beside = _plain(other, train=train, moved=_BESIDE_IN_DOUBLE)
    except RuntimeError:
        return None
    ours, reason = _captured(other, plain, beside, train=train)
    return bool(reason or (loop and _unlike(ours, plain, (plain, beside), 1e-5, "an ordinary loop")))


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


def _captured(trial: _Trial, plain: _Run, beside: _Run, *, train: bool) -> tuple[_Run, str]:
    """Train in a captured step, and a second state in its eager run; returns the run and what differs."""
    module = trial.module()
    apply, params, buffers = fcg.from_module(module)
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
    twin = fcg.fork(state)
    losses, wanted = [], []
    for call in range(trial.calls):
        batch = trial.data(call)
        state, metrics = train_step(state, batch)
        twin, expected = train_step.eager(twin, batch)
        losses.append(metrics["loss"].item())
        wanted.append(expected["loss"].item())
    if train_step.stats.replays != trial.calls:
        return _Run(losses, {}), f"it did not replay: {train_step!r}"
    values, eager = _values(apply, state), _Run(wanted, _values(apply, twin))
    ours = _Run(losses, values)
    module.load_state_dict(apply.state_dict(state.params, state.buffers))
    back = [name for name, value in module.state_dict().items() if not _same(value, values[name])]
    if back:
        return ours, f"load_state_dict changes `{back[0]}`"
    if trial.lowering == "aten":
        other = [name for name, value in values.items() if not _same(value, eager.state[name])]
        if other or list(map(str, losses)) != list(map(str, wanted)):  # NaN is equal to NaN
            return ours, f"not bitwise equal to its eager run: {other[:3]}"
        return ours, ""
    return ours, _unlike(ours, eager, (plain, beside), 1e-5 if trial.double else 1e-3, _EAGER)


def _values(apply: Any, state: Any) -> dict[str, Tensor]:
    return {
        name: value + 0 if value.is_floating_point() else value.clone()
        for name, value in apply.state_dict(state.params, state.buffers).items()
    }


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


def _unlike(ours: _Run, theirs: _Run, runs: tuple[_Run, _Run], relative: float, what: str) -> str:
    """Return what differs by more than ``relative`` and ten times what rounding grows to between two runs."""
    one, other = runs
    for call, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        grown = 10 * abs(one.losses[call] - other.losses[call])
        if not abs(a - b) <= max(relative * abs(b), grown, 2e-6):
            return f"loss {call} is {a:.7g}, not {b:.7g} as in {what}"
    for name, value in ours.state.items():
        if value.numel() and value.is_floating_point():
            distance = (value.double() - theirs.state[name].double()).abs()
            moved = 10 * (one.state[name].double() - other.state[name].double()).abs().max()
            bound = (relative * theirs.state[name].double().abs()).clamp(min=2e-6).maximum(moved)
            if (distance > bound).any():
                return f"`{name}` is {distance.max():.3g} away from that in {what}"
    return ""
