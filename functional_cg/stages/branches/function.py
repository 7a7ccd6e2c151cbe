"""A compiled function whose launches a capture spreads over lanes; everywhere else it runs in one line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ...concurrency.interrupts import uninterrupted
from ..plan import Run
from .costs import estimate_launch
from .listing import Timeline, in_line
from .plan import Lanes, Spread
from .races import refuse_races
from .rehearsal import Rehearsal
from .source import on_lanes
from .units import Memory, Unit
from .wrapper import Wrapper

__all__ = ["Launches"]

Clears = Sequence[Callable[[], Any]]


class Launches:
    """The launches of a compiled function, in one line until a rehearsal has seen what each of them takes.

    Args:
      name: Name of the user's function.
      wrapper: What the function launches.
      names: The globals of its module.
      count: How many of its results leave the step.
      padded: Memory that is cleared after all else.
      spread: Chooses what runs where.
    Attributes:
      timeline: What runs where.
    """

    def __init__(
        self,
        name: str,
        wrapper: Wrapper,
        names: Mapping[str, Any],
        *,
        count: int,
        padded: Collection[Memory],
        spread: Spread,
    ) -> None:
        self._name, self._wrapper, self._names = name, wrapper, dict(names)
        self._count, self._spread = count, spread
        units = list(wrapper.units)
        if padded:
            units.append(Unit("padding", ["for clear in clears: clear()"], frozenset(), frozenset(padded)))
        self.timeline = in_line(units, wrapper.returned)
        refuse_races(self.timeline, name)
        self._rehearsed = False

    def rehearse(self, arguments: Sequence[Tensor], clears: Clears) -> None:
        """Run once on arguments of no value, in one line; then choose what runs side by side."""
        if self._rehearsed:
            return
        rehearsal = _Weighed(arguments, self._wrapper.known)
        self._bind(arguments, clears, rehearsal, rehearsal)(())
        if rehearsal.surprise:
            why = f"`{rehearsal.surprise}` returns other memory than its code says"
            self.timeline = replace(self.timeline, why=why)
        else:
            rehearsal.weigh(self.timeline.units)
            self.timeline = self._spread(self.timeline.units, self._wrapper.returned)
            refuse_races(self.timeline, self._name)
        self._rehearsed = True

    def bind_to(self, arguments: Sequence[Tensor], clears: Clears, lanes: Lanes) -> Run:
        """Bind the launches to arguments and lanes."""
        return self._bind(arguments, clears, lanes, None)

    def _bind(
        self, arguments: Sequence[Tensor], clears: Clears, lanes: Lanes, rehearsal: Rehearsal | None
    ) -> Run:
        wrapper, timeline = self._wrapper, self.timeline
        names = {
            **self._names,
            **{kernel: lanes.kernel(self._names[kernel]) for kernel in wrapper.kernels},
            **dict(zip(wrapper.parameters, arguments, strict=True)),
            "empty_strided_cpu": _allocated,
            "uninterrupted": uninterrupted, "clears": clears, "lanes": lanes, "on": lanes.on, "wait": lanes.wait,
            "record": lanes.record, "rehearsal": rehearsal, "units": timeline.units, "places": timeline.places,
        }  # fmt: skip
        lines = [
            *wrapper.before,
            *(
                line
                for line, _ in on_lanes(
                    timeline,
                    wrapper.variables,
                    wrapper.defined,
                    rehearsed=rehearsal is not None,
                    entering=wrapper.entering,
                )
            ),
        ]
        source = (
            "def run(before):\n    uninterrupted(before)\n    with lanes:\n"
            + "".join(f"        {line}\n" for line in lines or ["pass"])
            + f"    return {wrapper.results}[:{self._count}]\n"
        )
        exec(compile(source, f"<launches of {self._name}>", "exec"), names)
        return names.pop("run")  # type: ignore[no-any-return]


def _allocated(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate on the CPU, where the dispatcher sees it, and with it a simulated lane."""
    return torch.empty_strided(size, stride, dtype=dtype)


class _Weighed(Rehearsal):
    """A rehearsal that sees how large memory is, and how many FLOPs each unit takes."""

    def __init__(self, static: Sequence[Tensor], known: Sequence[Memory]) -> None:
        super().__init__(static, known)
        self._sizes = {memory: (one.nbytes, one.itemsize) for memory, one in zip(known, static, strict=True)}
        self._flops: dict[Unit, int] = {}

    def __enter__(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode  # imports triton if installed

        self._counter: Any = FlopCounterMode(display=False)
        self._counter.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._counter.__exit__(kind, error, at)

    def defined(self, unit: Unit, values: Iterable[tuple[Memory, object]]) -> None:
        known = list(values)
        super().defined(unit, known)
        self._flops[unit] = self._counter.get_total_flops() - sum(self._flops.values())
        for memory, value in known:
            every = value if isinstance(value, (tuple, list)) else [value]
            tensors = [one for one in every if isinstance(one, Tensor)]
            nbytes = sum(one.untyped_storage().nbytes() for one in tensors)
            if tensors and memory not in self._sizes:
                self._sizes[memory] = nbytes, tensors[0].itemsize

    def weigh(self, units: Iterable[Unit]) -> None:
        """Tell units what they allocate, and how long they probably take."""
        for unit in units:
            unit.made = {memory: self._sizes.get(memory, (0, 1))[0] for memory in unit.made}
            touched = [self._sizes[one] for one in unit.reads | unit.writes if one in self._sizes]
            moved, width = (
                sum(nbytes for nbytes, _ in touched),
                max((width for _, width in touched), default=4),
            )
            unit.product = bool(self._flops.get(unit))
            unit.micros, unit.busy = estimate_launch(self._flops.get(unit, 0), moved, width)
