"""Schedules: hyperparameters that are a function of the update count.

A schedule is an immutable, callable value. Given an i64[] count on the device, as inside a step, it returns f64[] on
that device, using ops that a capture replays; given a Python int, it returns a Python float, ready to plot::

    plt.plot([schedule(count) for count in range(1000)])

The count is the number of previous updates: the first update uses ``schedule(0)``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from functional_cg.optim.algebra.arguments import Called, are_numbers, in_range, require


class Schedule(Called):
    """A function of the update count that is also an immutable value.

    For one of your own, make a frozen dataclass that overrides ``value(t)``, and pass it in place of a rate.

    Example:
      >>> from dataclasses import dataclass
      >>> from functional_cg import optim
      >>> @dataclass(frozen=True)
      ... class InverseRoot(optim.Schedule):
      ...     peak: float
      ...     def value(self, t):
      ...         return self.peak * (t + 1) ** -0.5
      >>> InverseRoot(0.1)(3)
      0.05
      >>> optimizer = optim.adam(InverseRoot(0.1))
    """

    @overload
    def __call__(self, count: Tensor) -> Tensor: ...
    @overload
    def __call__(self, count: int) -> float: ...
    def __call__(self, count: int | Tensor) -> float | Tensor:
        if isinstance(count, Tensor):
            out: Tensor = self.value(count.to(torch.float64))
            return out
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # a trace may be running
            return float(self.value(torch.tensor(float(count), dtype=torch.float64, device="cpu")))

    @abstractmethod
    def value(self, t: Any) -> Any:
        """Return the value at ``t``, f64[], which a subclass says; for a Python number it is computed on the host."""


class _Checked(Schedule):
    """A schedule of this package, whose numbers are checked."""

    def __post_init__(self) -> None:
        numbers = {
            one.name: getattr(self, one.name)
            for one in fields(cast("Any", self))
            if one.name not in _OTHERS and not (getattr(self, one.name) is None and one.default is None)
        }
        _check(type(self).__name__, **numbers)


_OTHERS = ("boundaries_and_scales", "staircase")  # arguments that are no numbers
_POSITIVE = (
    *("transition_steps", "decay_steps", "decay_rate", "power", "cycles"),
    *("pct_start", "div_factor", "final_div_factor", "length_factor"),
)


def _check(factory: str, **values: Any) -> None:
    """Raise for the first number, by its name, that is negative, not finite, or 0 where that has no meaning."""
    are_numbers(factory, **values)
    for name, value in values.items():
        below = 1.0 if name == "pct_start" else math.inf
        in_range(f"{factory}: {name}", value, below=below, zero=name not in _POSITIVE, count=name == "cycles")


@dataclass(frozen=True)
class constant(_Checked):
    """The same value at every count. Source: ``optax.constant_schedule``.

    Attributes:
      constant_value: The value.
    """

    constant_value: float

    def value(self, t: Any) -> Any:
        return torch.full_like(t, self.constant_value)


@dataclass(frozen=True)
class linear(_Checked):
    """A straight line from ``init_value`` to ``end_value``, flat before and after.

    Source: ``optax.linear_schedule``.

    Attributes:
      init_value: Value up to ``transition_begin``.
      end_value: Value from ``transition_begin + transition_steps`` on.
      transition_steps: Length of the line, in updates.
      transition_begin: Update at which the line begins.

    Example:
      >>> from functional_cg import optim
      >>> [optim.linear(1.0, 0.0, transition_steps=4)(count) for count in (0, 1, 4, 9)]
      [1.0, 0.75, 0.0, 0.0]
    """

    init_value: float
    end_value: float
    transition_steps: int
    transition_begin: int = 0

    def value(self, t: Any) -> Any:
        part = ((t - self.transition_begin) / self.transition_steps).clamp(0.0, 1.0)
        return self.init_value * (1 - part) + self.end_value * part


@dataclass(frozen=True)
class polynomial(_Checked):
    """A power of a straight line: ``end + (init - end) (1 - t / transition_steps)^power``, flat before and after.

    Source: ``optax.polynomial_schedule``; ``torch.optim.lr_scheduler.PolynomialLR``, to zero.

    Attributes:
      init_value: Value up to ``transition_begin``.
      end_value: Value from ``transition_begin + transition_steps`` on.
      power: The power, positive; 1 is :class:`linear`.
      transition_steps: Length, in updates.
      transition_begin: Update at which it begins.

    Example:
      >>> from functional_cg import optim
      >>> [optim.polynomial(1.0, 0.0, power=2, transition_steps=4)(count) for count in (0, 2, 4, 9)]
      [1.0, 0.25, 0.0, 0.0]
    """

    init_value: float
    end_value: float
    power: float
    transition_steps: int
    transition_begin: int = 0

    def value(self, t: Any) -> Any:
        left = 1 - ((t - self.transition_begin) / self.transition_steps).clamp(0.0, 1.0)
        return self.end_value + (self.init_value - self.end_value) * left**self.power


@dataclass(frozen=True)
class cosine(_Checked):
    """Cosine decay: half a period from ``init_value`` to ``end_value``, then flat.

    ``end + (init - end) (1 + cos(pi t / decay_steps)) / 2``. ``optax.cosine_decay_schedule`` takes
    ``alpha = end_value / init_value``. Source: Loshchilov and Hutter 2017.

    Attributes:
      init_value: Value at 0.
      decay_steps: Length, in updates.
      end_value: Value from ``decay_steps`` on.
    """

    init_value: float
    decay_steps: int
    end_value: float = 0.0

    def value(self, t: Any) -> Any:
        part = (1 + torch.cos(math.pi * (t / self.decay_steps).clamp(0.0, 1.0))) / 2
        return self.init_value * part + self.end_value * (1 - part)


@dataclass(frozen=True)
class warmup_cosine(_Checked):
    """Linear warmup from ``init_value`` to ``peak_value``, then cosine decay to ``end_value``.

    ``decay_steps`` includes the warmup: the end value is reached at ``count = decay_steps``. With the default
    ``init_value``, the first update has a learning rate of 0. Source: ``optax.warmup_cosine_decay_schedule``.

    Attributes:
      peak_value: Value at ``warmup_steps``.
      warmup_steps: Length of the warmup, in updates.
      decay_steps: Total length including the warmup, in updates.
      end_value: Value from ``decay_steps`` on.
      init_value: Value at 0.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> schedule = optim.warmup_cosine(3e-4, warmup_steps=100, decay_steps=10_000)
      >>> schedule(0), schedule(50), schedule(100), schedule(10_000)
      (0.0, 0.00015, 0.0003, 0.0)
      >>> schedule(torch.tensor(100))
      tensor(0.0003, dtype=torch.float64)
    """

    peak_value: float
    warmup_steps: int
    decay_steps: int
    end_value: float = 0.0
    init_value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.decay_steps > self.warmup_steps,
            f"warmup_cosine: decay_steps counts the warm-up in, so it must be above warmup_steps; got "
            f"decay_steps={self.decay_steps}, warmup_steps={self.warmup_steps}.\n"
            f"To fix: `decay_steps={self.warmup_steps + self.decay_steps}`, if {self.decay_steps} updates follow it.",
        )

    def value(self, t: Any) -> Any:
        decay = cosine(self.peak_value, self.decay_steps - self.warmup_steps, self.end_value)
        down = decay.value((t - self.warmup_steps).clamp(0.0, math.inf))
        if self.warmup_steps == 0:
            return down
        up = linear(self.init_value, self.peak_value, self.warmup_steps).value(t)
        return torch.where(t < self.warmup_steps, up, down)


@dataclass(frozen=True)
class piecewise_constant(_Checked):
    """Start at ``init_value`` and multiply by a scale at each boundary.

    A scale takes effect at ``count = boundary``. Source: ``optax.piecewise_constant_schedule``.

    Attributes:
      init_value: Value before the first boundary.
      boundaries_and_scales: ``{boundary: scale}``; kept as sorted pairs.

    Example:
      >>> from functional_cg import optim
      >>> [optim.piecewise_constant(1.0, {2: 0.5, 4: 0.5})(count) for count in range(5)]
      [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    init_value: float
    boundaries_and_scales: Mapping[int, float] | tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.boundaries_and_scales
        pairs = tuple(sorted(given.items() if isinstance(given, Mapping) else given))
        for i, (boundary, scale) in enumerate(pairs):
            _check("piecewise_constant: boundaries_and_scales", boundary=boundary, scale=scale)
            require(
                i == 0 or pairs[i - 1][0] < boundary,
                f"piecewise_constant: boundaries_and_scales has the boundary {boundary} twice",
            )
        object.__setattr__(self, "boundaries_and_scales", pairs)

    def value(self, t: Any) -> Any:
        out = torch.full_like(t, self.init_value)
        for boundary, factor in cast("tuple[tuple[int, float], ...]", self.boundaries_and_scales):
            out = torch.where(t >= boundary, out * factor, out)
        return out


@dataclass(frozen=True)
class exponential(_Checked):
    """Decay by ``decay_rate`` every ``transition_steps``: ``init_value * decay_rate^(t / transition_steps)``.

    Source: ``optax.exponential_decay``.

    Attributes:
      init_value: Value at 0.
      transition_steps: Updates per factor.
      decay_rate: The factor, positive.
      staircase: Round the exponent down.
      end_value: Bound that the value never crosses, or None.

    Example:
      >>> from functional_cg import optim
      >>> [optim.exponential(1.0, transition_steps=2, decay_rate=0.25)(count) for count in range(3)]
      [1.0, 0.5, 0.25]
    """

    init_value: float
    transition_steps: int
    decay_rate: float
    staircase: bool = False
    end_value: float | None = None

    def value(self, t: Any) -> Any:
        exponent = t / self.transition_steps
        out = self.init_value * self.decay_rate ** (torch.floor(exponent) if self.staircase else exponent)
        bounds = (self.end_value, math.inf) if self.decay_rate < 1 else (-math.inf, self.end_value)
        return out if self.end_value is None else out.clamp(*bounds)


@dataclass(frozen=True)
class join_schedules(Schedule):
    """One schedule after another, each of which begins to count at its boundary.

    Source: ``optax.join_schedules``.

    Attributes:
      schedules: Schedules, or functions of the count, in order; kept as a tuple.
      boundaries: Update at which each but the first begins, ascending; kept as a tuple.
    Raises:
      ValueError: If there are not as many boundaries as schedules but the first, they do not ascend, or one is
        negative.

    Example:
      >>> from functional_cg import optim
      >>> schedule = optim.join_schedules([optim.constant(1.0), optim.exponential(1.0, 1, 0.5)], [2])
      >>> [schedule(count) for count in range(5)]
      [1.0, 1.0, 1.0, 0.5, 0.25]
    """

    schedules: Sequence[Callable[[Any], Any]]
    boundaries: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedules", tuple(self.schedules))
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        for one in self.schedules:
            if not callable(one):
                raise TypeError(
                    f"join_schedules: takes schedules, got {one!r}.\nTo fix: `optim.constant({one!r})`, for a number."
                )
        _check("join_schedules: boundaries", **{f"[{i}]": one for i, one in enumerate(self.boundaries)})
        require(
            len(self.schedules) == len(self.boundaries) + 1
            and list(self.boundaries) == sorted(self.boundaries),
            "join_schedules: boundaries must ascend, with a boundary for each of the schedules but the first; got "
            f"{list(self.boundaries)} for {len(self.schedules)}",
        )

    def value(self, t: Any) -> Any:
        starts = (0, *self.boundaries)
        # A function may return a number, which is f64 as the others are.
        parts = [
            one(t - start) + torch.zeros_like(t) for start, one in zip(starts, self.schedules, strict=True)
        ]
        out = parts[0]
        for boundary, part in zip(self.boundaries, parts[1:], strict=True):
            out = torch.where(t < boundary, out, part)
        return out


def warmup_exponential(
    peak_value: float,
    warmup_steps: int,
    transition_steps: int,
    decay_rate: float,
    *,
    init_value: float = 0.0,
    staircase: bool = False,
    end_value: float | None = None,
) -> join_schedules:
    """Linear warmup from ``init_value`` to ``peak_value``, then :class:`exponential` decay.

    Source: ``optax.warmup_exponential_decay_schedule``.

    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> from functional_cg import optim
      >>> schedule = optim.warmup_exponential(1.0, warmup_steps=2, transition_steps=1, decay_rate=0.5)
      >>> [schedule(count) for count in range(5)]
      [0.0, 0.5, 1.0, 0.5, 0.25]
    """
    _check("warmup_exponential", peak_value=peak_value, warmup_steps=warmup_steps, init_value=init_value)
    down = exponential(peak_value, transition_steps, decay_rate, staircase, end_value)
    if warmup_steps == 0:
        return join_schedules([down], [])
    return join_schedules([linear(init_value, peak_value, warmup_steps), down], [warmup_steps])


def one_cycle(
    peak_value: float,
    transition_steps: int,
    *,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> join_schedules:
    """Half a period of a cosine from ``peak_value / div_factor`` to ``peak_value``, and another one down.

    It ends at ``peak_value / (div_factor * final_div_factor)``. Source: Smith and Topin 2018;
    ``optax.cosine_onecycle_schedule``; ``torch.optim.lr_scheduler.OneCycleLR`` begins an update earlier to fall.

    Args:
      peak_value: The largest value.
      transition_steps: Length of all, in updates.
      pct_start: Part of it that rises.
      div_factor: By how much the first value is below the peak.
      final_div_factor: By how much the last value is below the first.
    Raises:
      ValueError: If a number is out of range, or no update is left to rise or to fall.

    Example:
      >>> from functional_cg import optim
      >>> [round(optim.one_cycle(1.0, transition_steps=10)(count), 3) for count in (0, 3, 10)]
      [0.04, 1.0, 0.0]
    """
    _check("one_cycle", **locals())
    top, start = int(pct_start * transition_steps), peak_value / div_factor
    require(
        0 < top < transition_steps,
        f"one_cycle: of transition_steps={transition_steps}, pct_start={pct_start} leaves {top} to rise",
    )
    down = cosine(peak_value, transition_steps - top, start / final_div_factor)
    return join_schedules([cosine(start, top, peak_value), down], [top])


def cosine_restarts(
    peak_value: float,
    decay_steps: int,
    cycles: int,
    *,
    warmup_steps: int = 0,
    end_value: float = 0.0,
    length_factor: float = 1.0,
    peak_factor: float = 1.0,
) -> join_schedules:
    """Cosine decay with warm restarts (SGDR): ``cycles`` times :class:`warmup_cosine`, then flat.

    Source: Loshchilov and Hutter 2017; ``optax.sgdr_schedule``;
    ``torch.optim.lr_scheduler.CosineAnnealingWarmRestarts``, without an end.

    Args:
      peak_value: Peak of the first cycle.
      decay_steps: Length of the first cycle, its warmup included, in updates.
      cycles: How many.
      warmup_steps: Length of the warmup of each, from ``end_value``.
      end_value: Value at the end of each.
      length_factor: Each cycle is longer than the one before by this factor, rounded.
      peak_factor: And its peak lower or higher by this one.
    Raises:
      ValueError: If a number is out of range, or a cycle is no longer than its warmup.

    Example:
      >>> from functional_cg import optim
      >>> schedule = optim.cosine_restarts(1.0, 2, cycles=2, length_factor=2)
      >>> [round(schedule(count), 3) for count in range(7)]
      [1.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    _check("cosine_restarts", **locals())
    lengths = [round(decay_steps * length_factor**i) for i in range(cycles)]
    require(
        min(lengths) > warmup_steps,
        f"cosine_restarts: decay_steps counts the warm-up in; the cycles are {lengths} long, and warmup_steps="
        f"{warmup_steps}.\nTo fix: a longer `decay_steps`, or a larger `length_factor`.",
    )
    peaks = [peak_value * peak_factor**i for i in range(cycles)]
    parts = [
        warmup_cosine(peak, warmup_steps, length, end_value, end_value)
        for peak, length in zip(peaks, lengths, strict=True)
    ]
    return join_schedules(parts, [sum(lengths[: i + 1]) for i in range(cycles - 1)])
