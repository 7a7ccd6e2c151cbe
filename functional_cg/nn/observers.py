"""Let torch's observers of ranges, in quantization-aware training, ask the host for nothing.

For a range of one number each, torch decides in Python whether it is the first one, and builds scales from Python
numbers. For ranges of several channels, it stays with tensors.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["on_device"]

_FILE = "torch.ao.quantization.observer"


def on_device(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield, by name, what computes the same on the device as a method of a module that is one of those observers."""
    torch_s = sys.modules.get(_FILE)  # not imported: no module is one
    kind: Any = type(module)
    if torch_s is None or not isinstance(module, torch_s.MinMaxObserver):
        return
    if kind.forward is torch_s.MovingAverageMinMaxObserver.forward:
        yield "forward", partial(_observe, weakref.ref(module))
    if kind.calculate_qparams is torch_s.MinMaxObserver.calculate_qparams:
        yield "calculate_qparams", partial(_parameters, weakref.ref(module))


def _observe(observer: weakref.ref[Any], x: Tensor) -> Tensor:
    """Move the range towards that of ``x``; the first time, take it."""
    self: Any = observer()
    if not x.numel():
        return x
    low, high = torch.aminmax(x.detach().to(self.min_val.dtype))
    first = (self.min_val == torch.inf) & (self.max_val == -torch.inf)
    for held, now in ((self.min_val, low), (self.max_val, high)):
        held.copy_(torch.where(first, now, held + self.averaging_constant * (now - held)))
    return x


def _parameters(observer: weakref.ref[Any]) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point, as of one channel."""
    self: Any = observer()
    scale, zero_point = self._calculate_qparams(self.min_val[None], self.max_val[None])
    return scale, zero_point
