"""Keeps hyperparameters in the state, so they can change between calls without a recapture."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.optim.algebra.base import (
    Advance,
    Combined,
    GradientTransformation,
    OptState,
    Params,
    Rule,
    Updates,
    device_of,
    require,
    zero_count,
)
from functional_cg.optim.algebra.links import scale_by_learning_rate
from functional_cg.optim.algebra.schedules import Schedule
from functional_cg.optim.algebra.selection import freeze, thaw

S = TypeVar("S")
Arguments = tuple[tuple[str, Any], ...]


class InjectHyperparamsState(NamedTuple):
    """State of a transformation made by :class:`inject_hyperparams`."""

    hyperparams: dict[str, Tensor]  # f64[] each
    inner_state: OptState
    count: Tensor | None = None  # type: ignore[assignment]  # i64[], updates so far; None without schedules


@dataclass(frozen=True)
class inject_hyperparams:
    """Move a transformation's numeric hyperparameters into its state.

    Every ``float`` and ``int`` argument passed by name becomes an f64[] in the state, to be changed with
    :func:`set_hyperparams`. A :class:`Schedule`, of whichever number, is evaluated at each update, at a count in the
    state. Omitted arguments, functions, masks, bools and the names in ``static_args`` stay constants.

    The fused ``step`` takes tensors for ``learning_rate`` (rounded to the dtype of the parameters) and
    ``weight_decay``; with ``b1``, ``b2``, ``eps`` or ``momentum`` in the state, the unfused formula runs.

    Source: ``optax.inject_hyperparams``.

    Attributes:
      factory: Builds the transformation: ``adamw``, or your own function.
      static_args: Names of numeric arguments that stay constants.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> optimizer = optim.inject_hyperparams(optim.sgd)(learning_rate=0.5)
      >>> params = {"w": torch.tensor(1.0)}
      >>> state = optim.set_hyperparams(optimizer.init(params), learning_rate=0.25)
      >>> optimizer.step({"w": torch.tensor(1.0)}, state, params)[0]
      {'w': tensor(0.7500)}
      >>> decay = optim.linear(0.04, 0.4, transition_steps=1000)
      >>> optimizer = optim.inject_hyperparams(optim.adamw)(learning_rate=1e-3, weight_decay=decay)
    """

    factory: Callable[..., GradientTransformation]
    static_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.factory, GradientTransformation):
            name = type(self.factory).__name__
            raise TypeError(
                f"inject_hyperparams: expected a factory, got the optimizer {self.factory!r}.\n"
                f"To fix: `fcg.optim.inject_hyperparams(fcg.optim.{name})(learning_rate=...)`, its numbers by name."
            )
        names = (self.static_args,) if isinstance(self.static_args, str) else tuple(sorted(self.static_args))
        object.__setattr__(self, "static_args", names)

    def __call__(self, *unnamed: Any, **arguments: Any) -> InjectedTransformation:
        if unnamed:
            raise TypeError(
                f"inject_hyperparams: numbers go by name, got {unnamed[0]!r}: `learning_rate={unnamed[0]!r}`"
            )
        pairs = tuple((name, freeze(value)) for name, value in sorted(arguments.items()))
        numbers = {name: schedule(torch.tensor(0)) for name, schedule in _scheduled(pairs, self.static_args)}
        made: Any = self.factory(**{**{name: thaw(value) for name, value in pairs}, **numbers})
        if not isinstance(made, GradientTransformation):
            raise TypeError(f"inject_hyperparams: the factory returned {type(made).__name__}: {made!r}")
        return InjectedTransformation(self.factory, pairs, self.static_args, made)


@dataclass(frozen=True, repr=False)
class InjectedTransformation(Combined):
    """The result of ``inject_hyperparams(factory)(...)``; ``prototype`` has the numbers as constants."""

    factory: Callable[..., GradientTransformation]
    arguments: tuple[tuple[str, Any], ...]
    static_args: tuple[str, ...]
    prototype: GradientTransformation = field(compare=False)

    def __repr__(self) -> str:
        name = getattr(self.factory, "__name__", repr(self.factory))
        static = f", static_args={self.static_args!r}" if self.static_args else ""
        return f"inject_hyperparams({name}{static})({', '.join(f'{k}={v!r}' for k, v in self.arguments)})"

    def _make(self, hyperparams: dict[str, Any], count: Tensor | None) -> GradientTransformation:
        constants = {name: thaw(value) for name, value in self.arguments}
        schedules = _scheduled(self.arguments, self.static_args)  # without any, there is no count
        return self.factory(**{**constants, **hyperparams, **{name: now(count) for name, now in schedules}})  # type: ignore[arg-type]

    def init(self, params: Params) -> InjectHyperparamsState:
        device = device_of(params)
        numbers = {
            name: torch.full((), float(value), dtype=torch.float64, device=device)
            for name, value in self.arguments
            if name not in self.static_args and type(value) is not bool and isinstance(value, (int, float))
        }
        count = zero_count(params) if _scheduled(self.arguments, self.static_args) else None
        return InjectHyperparamsState(numbers, self._make(numbers, count).init(params), count)

    def run(
        self, advance: Advance, updates: Updates, state: InjectHyperparamsState, params: Any
    ) -> tuple[Any, InjectHyperparamsState]:
        tx = self._make(state.hyperparams, state.count)
        out, inner = advance(tx, updates, state.inner_state, params)
        count = None if state.count is None else state.count + 1
        return out, InjectHyperparamsState(state.hyperparams, inner, count)

    def rules(self, state: InjectHyperparamsState, params: Params) -> Iterator[Rule]:
        yield self, InjectHyperparamsState({}, None, state.count), params
        yield from self._make(state.hyperparams, state.count).rules(state.inner_state, params)


def _scheduled(arguments: Arguments, static_args: tuple[str, ...]) -> list[tuple[str, Schedule]]:
    """The arguments that are evaluated at each update."""
    return [
        (name, value) for name, value in arguments if isinstance(value, Schedule) and name not in static_args
    ]


def _positions(node: tree.Treedef, start: int) -> Iterator[tuple[str, int]]:
    """Yield name and flat position of every injected number below ``node``."""
    offset = start
    for key, child in zip(node.keys, node.children, strict=True):
        if node.kind is InjectHyperparamsState and str(key) == ".hyperparams":
            yield from ((name, offset + i) for i, name in enumerate(child.context.sorted))
        else:
            yield from _positions(child, offset)
        offset += child.num_leaves


def set_hyperparams(state: S, **values: float | Tensor) -> S:
    """Change hyperparameters that :func:`inject_hyperparams` keeps in the state.

    A plain tree is copied, structure only; for a state handle, the values are written into its memory, the old
    handle is donated, and no step is recaptured. Values are not checked. Where several groups of a ``partition`` inject
    a number of the same name, all of them get the value. To leave a group out, do not inject the number there:
    ``inject_hyperparams(adamw, static_args=("weight_decay",))(...)``; or set a single one with ``fcg.tree.at``.

    Args:
      state: A state containing an ``opt_state``, a handle to one, or an ``opt_state`` itself.
      **values: New numbers or 0-dim tensors, by name; in the state of a :func:`functional_cg.sweep`, one for all
        members, or a tensor [n] with one for each.
    Returns:
      The state with the new numbers.
    Raises:
      ValueError: If a name is not in the state, or a tensor has another shape.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> optimizer = optim.inject_hyperparams(optim.adamw)(learning_rate=0.1, weight_decay=0.5)
      >>> state = optimizer.init({"w": torch.zeros(3)})
      >>> optim.set_hyperparams(state, learning_rate=0.01).hyperparams
      {'learning_rate': tensor(0.0100, dtype=torch.float64), 'weight_decay': tensor(0.5000, dtype=torch.float64)}
    """
    old, treedef = tree.flatten(state)
    found: dict[str, list[int]] = {}
    for name, position in _positions(treedef, 0):
        found.setdefault(name, []).append(position)
    for name, value in values.items():
        require(name in found, _not_injected(name, sorted(found)))
        if not isinstance(value, (numbers.Real, Tensor)):
            raise TypeError(
                f"set_hyperparams: {name} must be a number, or a tensor with one for each member, got "
                f"{type(value).__name__}.\nTo fix: `{name}=0.05`, or `{name}=torch.tensor([0.1, 0.01])`; what "
                f"follows a schedule is made with it, `inject_hyperparams(factory)({name}=schedule)`, and not set."
            )
    if not values:
        return state
    positions = [i for name in values for i in found[name]]
    new = [_like(name, value, old[i]) for name, value in values.items() for i in found[name]]
    return tree.at(lambda view: [tree.leaves(view)[i] for i in positions], state, new)


def learning_rate(state: Any) -> Tensor:
    """Return the learning rate of the update that ``state.apply_gradients`` makes next, such as for metrics.

    Args:
      state: A ``TrainState``, in a step or outside, or a handle to one.
    Returns:
      f64[] on the device of the parameters.
    Raises:
      ValueError: If its optimizer has no learning rate of its own, or one for each of several groups.

    Example:
      >>> import torch, functional_cg as fcg
      >>> optimizer = fcg.optim.sgd(fcg.optim.linear(1.0, 0.0, 4))
      >>> state = fcg.TrainState.create(params={"w": torch.ones(2)}, optimizer=optimizer)
      >>> @fcg.graph_step
      ... def step(state, x):
      ...     return state.apply_gradients({"w": x}), {"rate": fcg.optim.learning_rate(state)}
      >>> [float(step(state.latest(), torch.ones(2))[1]["rate"]) for _ in range(3)]
      [1.0, 0.75, 0.5]
    """
    found = [
        rule.rate(own)[0]
        for rule, own, _ in state.optimizer.rules(state.opt_state, state.params)
        if isinstance(rule, scale_by_learning_rate)
    ]
    require(
        len(found) == 1,
        f"learning_rate: the optimizer has {len(found)} learning rates: {state.optimizer!r}.\n"
        "To fix: `schedule(state.step)`, of the schedule that you mean.",
    )
    return found[0] + torch.zeros((), dtype=torch.float64, device=device_of(state.params))


def _not_injected(name: str, found: list[str]) -> str:
    if found:
        fix = f"set one of these, `fcg.optim.set_hyperparams(state, {found[0]}=...)`"
    else:
        fix = (
            f"`fcg.optim.inject_hyperparams(fcg.optim.sgd)({name}=0.1)` makes an optimizer whose numbers can be set; "
            "one that follows a schedule cannot: begin with a number"
        )
    return f"set_hyperparams: the state has no injected number {name!r}, it has {found or 'none'}.\nTo fix: {fix}."


def _like(name: str, value: float | Tensor, slot: Tensor) -> Tensor:
    """Make a new tensor from ``value`` with the shape, dtype and device of ``slot``."""
    if not isinstance(value, Tensor):
        return torch.full_like(slot, float(value))
    if value.dim() and value.shape != slot.shape:
        raise ValueError(
            f"set_hyperparams: {name} is {list(slot.shape)} in the state, and got {list(value.shape)}.\nTo fix: one "
            "number for all, or a tensor of that shape."
        )
    return value.detach().to(dtype=slot.dtype, device=slot.device, copy=True).expand_as(slot).contiguous()
