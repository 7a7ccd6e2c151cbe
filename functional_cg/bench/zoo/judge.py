"""Judge one model: does a captured step train it as its eager run does, and as an ordinary loop does?"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import functional_cg as fcg

from .case import Case

__all__ = ["Outcome", "judge"]

_RATE, _EPS = (
    1e-3,
    1e-4,
)  # a large epsilon, or Adam would make a whole step of a gradient that is a rounding error of 0
_BESIDE = 3e-7  # relative, by how much the weights of the run differ that shows how rounding errors grow


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a model.

    Attributes:
      verdict: ``"works"``, ``"refused"``, ``"wrong"`` or ``"crashed"``; ``"unusable"`` if no ordinary loop trains it.
      reason: First line of the error, or what differs; empty if it works.
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


def judge(case: Case, device: str, lowering: Any, calls: int, most: int) -> Outcome:
    """Train a model in four ways and compare.

    Args:
      case: The model.
      device: Where.
      lowering: As for ``graph_step``. ``"aten"`` has to be bitwise equal to the eager run of the step.
      calls: How many steps, each with new data.
      most: Parameters of the largest model to run.
    """
    try:
        module = case.module(device).train()
        if sum(param.numel() for param in module.parameters()) > most:
            return Outcome("unusable", "too large")
        draws = _draws(case, module, device)
        train = not draws  # what draws is compared with an ordinary loop in evaluation mode
        plain = _plain(case, device, calls, train=train)
        beside = _plain(case, device, calls, train=train, moved=_BESIDE)
    except Exception as error:
        return Outcome("unusable", f"{type(error).__name__}: {_first_line(error)}")
    if not all(map(math.isfinite, plain.losses)):
        return Outcome("unusable", "its loss is not finite")
    try:
        ours, reason = _captured(case, device, lowering, calls, train=train, beside=(plain, beside))
        if not reason and draws:
            _, reason = _captured(case, device, lowering, calls, train=True, beside=(plain, beside))
    except Exception as error:
        text = str(error)
        refused = isinstance(error, fcg.FunctionalCGError) or "To fix" in text
        fix = next(
            (line.removeprefix("To fix: ") for line in text.splitlines() if line.startswith("To fix")), ""
        )
        return Outcome(
            "refused" if refused else "crashed", f"{type(error).__name__}: {_first_line(error)}", fix
        )
    reason = reason or _unlike(ours, plain, beside, relative=1e-4, what="an ordinary loop")
    return Outcome("wrong", reason) if reason else Outcome("works")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


@dataclass(frozen=True, slots=True)
class _Run:
    losses: list[float]
    state: Mapping[str, Tensor]


def _draws(case: Case, module: nn.Module, device: str) -> bool:
    """Whether two forwards in training mode differ."""
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            found.append(case.loss(copy.deepcopy(module), case.data(0, device)).item())
    return found[0] != found[1] and not all(map(math.isnan, found))


def _plain(case: Case, device: str, calls: int, *, train: bool, moved: float = 0.0) -> _Run:
    """Train in an ordinary loop; with weights moved by a little, to see how rounding errors grow."""
    module = case.module(device).train(train)
    params = [param for param in module.parameters() if param.requires_grad]
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for param in params if moved else ():
            param.mul_(1 + moved * torch.randn(param.shape, generator=generator, device=device))
    optimizer = torch.optim.AdamW(params, lr=_RATE, eps=_EPS, weight_decay=0.0)
    losses = []
    for call in range(calls):
        optimizer.zero_grad()
        loss = case.loss(module, case.data(call, device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return _Run(losses, {name: value.detach() for name, value in module.state_dict().items()})


def _captured(
    case: Case, device: str, lowering: Any, calls: int, *, train: bool, beside: tuple[_Run, _Run]
) -> tuple[_Run, str]:
    """Train in a captured step, and a second state in its eager run; returns the run and what differs."""
    module = case.module(device).train()
    apply, params, buffers = fcg.from_module(module)
    optimizer = fcg.optim.adamw(_RATE, eps=_EPS, weight_decay=0.0)

    @fcg.graph_step(lowering=lowering)
    def train_step(state: Any, batch: Any) -> Any:
        key = fcg.random.fold_in(state.key, state.step)

        def loss_fn(params: Any) -> Any:
            forward = _Forward(apply, params, state.buffers, key, train=train)
            return case.loss(forward, batch), forward.buffers

        (loss, new), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, buffers=new), {"loss": loss}

    state = fcg.TrainState.create(
        params=params, buffers=buffers, optimizer=optimizer, key=fcg.random.key(1, device=device)
    )
    twin = fcg.fork(state)
    losses, wanted = [], []
    for call in range(calls):
        batch = case.data(call, device)
        state, metrics = train_step(state, batch)
        twin, expected = train_step.eager(twin, batch)
        losses.append(metrics["loss"].item())
        wanted.append(expected["loss"].item())
    if train_step.stats.replays != calls:
        return _Run(losses, {}), f"it did not replay: {train_step!r}"
    values = _values(apply, state)
    ours, eager = _Run(losses, values), _Run(wanted, _values(apply, twin))
    module.load_state_dict(dict(values))
    back = [name for name, value in module.state_dict().items() if not _same(value, values[name])]
    if back:
        return ours, f"load_state_dict changes `{back[0]}`"
    if lowering == "aten":
        other = [name for name, value in values.items() if not _same(value, eager.state[name])]
        if other or losses != wanted:
            return ours, f"not bitwise equal to its eager run: {other[:3]}"
        return ours, ""
    return ours, _unlike(ours, eager, *beside, relative=1e-3, what="its eager run")


def _values(apply: Any, state: Any) -> dict[str, Tensor]:
    return {
        name: value + 0 if value.is_floating_point() else value.clone()
        for name, value in apply.state_dict(state.params, state.buffers).items()
    }


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


def _unlike(ours: _Run, theirs: _Run, *runs: _Run, relative: float, what: str) -> str:
    """Return what differs by more than ``relative`` and ten times what rounding grows to between two runs."""
    one, other = runs if len(runs) == 2 else (theirs, *runs)
    for call, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        grown = 10 * abs(one.losses[call] - other.losses[call])
        if not abs(a - b) <= max(relative * abs(b), grown, 2e-6):
            return f"loss {call} is {a:.7g}, that of {what} {b:.7g}"
    for name, value in ours.state.items():
        if value.numel() and value.is_floating_point():
            distance = (value.double() - theirs.state[name].double()).abs()
            moved = 10 * (one.state[name].double() - other.state[name].double()).abs().max()
            bound = (relative * theirs.state[name].double().abs()).clamp(min=2e-6).maximum(moved)
            if (distance > bound).any():
                return f"`{name}` is {distance.max():.3g} away from that of {what}"
    return ""
