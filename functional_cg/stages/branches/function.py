"""A compiled function whose launches a capture spreads over lanes; everywhere else it runs in one line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors.words import words_of
from ..plan import Run, Spread
from .listing import in_line
from .races import refuse_races
from .rehearsal import Lanes, Rehearsal
from .source import on_lanes
from .units import Memory, Unit
from .weights import Weighing, on_meta
from .wrapper import ALIGN, UnknownStatement, Wrapper

__all__ = ["Launches"]

Clears = Sequence[Callable[[], Any]]


class Launches:
    """The launches of a compiled function, on lanes where that pays.

    Args:
      name: Name of the user's function.
      wrapper: What the function launches.
      names: The globals of its module.
      arguments: Tensors like its arguments.
      count: How many of its results leave the step.
      padded: Memory that is cleared after all else.
      spread: Chooses what runs where.
    Attributes:
      timeline: What runs where.
    Raises:
      UnknownStatement: If an op does not run on shapes alone.
      CaptureError: If there is a race.
    """

    def __init__(
        self,
        name: str,
        wrapper: Wrapper,
        names: Mapping[str, Any],
        arguments: Sequence[Tensor],
        *,
        count: int,
        padded: Collection[Memory],
        spread: Spread,
    ) -> None:
        self._name, self._wrapper, self._names, self._count = name, wrapper, names, count
        for parameter, argument in zip(wrapper.parameters, arguments, strict=True):
            if parameter in wrapper.aligned and names[ALIGN](argument) is not argument:
                raise UnknownStatement(f"{ALIGN}({parameter})")
        units = list(wrapper.units)
        if padded:
            units.append(Unit("padding", ["*clears"], writes=frozenset(padded), commits=True))
        self.timeline = in_line(units, wrapper.returned)
        weighing = Weighing(arguments, wrapper.known)
        weigh = self._bind([on_meta(one) for one in arguments], (), weighing, weighing.names(wrapper, names))
        try:
            weigh(())
        except Exception as error:  # of any op
            raise UnknownStatement(f"{type(error).__name__}: {words_of(error)}") from error
        weighing.weigh(units)
        self.timeline = spread(units, wrapper.returned)
        refuse_races(self.timeline, name)
        self._settled = self.timeline.lanes == 1

    def rehearse(self, arguments: Sequence[Tensor], clears: Clears) -> None:
        """Run once on arguments of no value, in one line, and stay there if values lie elsewhere than the code says."""
        if self._settled:
            return
        rehearsal = Rehearsal(arguments, self._wrapper.known)
        self._bind(arguments, clears, rehearsal)(())
        if rehearsal.surprise:
            why = f"`{rehearsal.surprise}` returns other memory than its code says"
            self.timeline = replace(in_line(self.timeline.units, self._wrapper.returned), why=why)
        self._settled = True

    def bind_to(self, arguments: Sequence[Tensor], clears: Clears, lanes: Lanes) -> Run:
        """Bind the launches to arguments and lanes."""
        return self._bind(arguments, clears, lanes)

    def _bind(
        self,
        arguments: Sequence[Tensor],
        clears: Clears,
        lanes: Lanes,
        names: Mapping[str, Any] | None = None,
    ) -> Run:
        wrapper = self._wrapper
        scope = {**self._names, "empty_strided_cpu": _allocated} if names is None else dict(names)
        scope |= {kernel: lanes.kernel(scope[kernel]) for kernel in wrapper.functions}
        scope |= zip(wrapper.parameters, arguments, strict=True)
        scope["clears"] = clears
        results = f"{wrapper.results}[:{self._count}]"
        return on_lanes(lanes, self.timeline, wrapper.first, results, scope, self._name, wrapper.entering)


def _allocated(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate on the CPU, where the dispatcher sees it, and with it a simulated lane."""
    return torch.empty_strided(size, stride, dtype=dtype)
