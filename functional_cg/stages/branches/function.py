"""The launches of a compiled function, which run on lanes where that pays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors.words import words_of
from ..plan import Spread
from .listing import Timeline, in_line
from .races import refuse_races
from .source import Code, on_lanes
from .units import Memory, Unit
from .weights import Weighing, on_meta
from .wrapper import ALIGN, UnknownStatement, Wrapper

__all__ = ["scope_of", "spread_launches"]


def spread_launches(
    wrapper: Wrapper,
    code: Code,
    names: Mapping[str, Any],
    arguments: Sequence[Tensor],
    spread: Spread,
    padded: Collection[Memory] = (),
) -> Timeline:
    """Return what runs where of what a compiled function launches.

    Args:
      wrapper: What it launches.
      code: What else it has.
      names: The globals of its module.
      arguments: Tensors like its arguments.
      spread: Chooses what runs where.
      padded: Memory that is cleared after all else.
    Raises:
      UnknownStatement: If an op does not run on shapes alone.
      CaptureError: If there is a race.
    """
    for parameter, argument in zip(wrapper.parameters, arguments, strict=True):
        if parameter in wrapper.aligned and names[ALIGN](argument) is not argument:
            raise UnknownStatement(f"{ALIGN}({parameter})")
    units = list(wrapper.units)
    if padded:
        units.append(Unit("padding", ["*clears"], writes=frozenset(padded), commits=True))
    weighing = Weighing(arguments, wrapper.known)
    scope = weighing.names(wrapper, names) | dict(
        zip(wrapper.parameters, map(on_meta, arguments), strict=True)
    )
    try:
        on_lanes(weighing, in_line(units, code.kept), code, {**scope, "clears": ()})(())
    except Exception as error:  # of any op
        raise UnknownStatement(f"{type(error).__name__}: {words_of(error)}") from error
    weighing.weigh(units)
    timeline = spread(units, code.kept)
    refuse_races(timeline, code.function)
    return timeline


def scope_of(
    wrapper: Wrapper,
    names: Mapping[str, Any],
    arguments: Sequence[Tensor],
    clears: Sequence[Callable[[], Any]],
) -> dict[str, Any]:
    """Return what launches refer to, for arguments and what to call after all else."""
    given = dict(zip(wrapper.parameters, arguments, strict=True))
    return {**names, **given, "empty_strided_cpu": _allocated, "clears": clears}


def _allocated(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate on the CPU, where the dispatcher sees it, and with it a simulated lane."""
    return torch.empty_strided(size, stride, dtype=dtype)
