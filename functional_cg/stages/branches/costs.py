"""How long a call takes on a GPU, roughly: enough to tell a step that waits for launches from one that computes.

Fitted to an H100. On another GPU the numbers differ, but not what matters: a small kernel takes as long as it takes to
begin and to end, and leaves most of the device idle.
"""

from __future__ import annotations

from types import MappingProxyType

import torch

from ...shards.collectives import is_collective
from ..program import Instr
from ..work import bytes_of, flops_of
from .units import Unit, fixed_by

__all__ = ["SYNC", "WORKSPACE", "copy_micros", "estimate", "estimate_launch", "transfer_micros", "weighed"]

_BANDWIDTH = 2.5e6  # bytes per microsecond
_RATES = MappingProxyType({2: 500e6, 4: 100e6, 8: 30e6})  # FLOPs per microsecond, by bytes of an element
_KERNEL = 2.0  # microseconds of a kernel that does next to nothing, one after another
_PRODUCT = 4.0  # of a small product
_REDUCTION = 3.0
_LINK = 0.4e6  # bytes per microsecond that a rank sends and receives, half of what an NVLink of an H100 is made for
_COLLECTIVE = 15.0  # of a collective of a few bytes
SYNC = 1.0  # what waiting for another lane adds
WORKSPACE = 2**25  # bytes that cuBLAS takes for a stream on an H100; less on GPUs before it


def weighed(unit: Unit, instr: Instr, *, fused: bool = False) -> Unit:
    """Return a unit with what its call takes, and why all units must then run on one lane, if they must.

    Args:
      unit: The unit.
      instr: Its call.
      fused: Whether a compiler fuses what is no product, no sum over elements and no collective with other calls.
    """
    unit.micros, unit.busy = estimate(instr)
    if fused and not (flops_of(instr) or is_collective(instr.op) or _reduces(instr)):
        unit.micros = unit.busy
    unit.product, unit.fixed = bool(flops_of(instr)), fixed_by(instr.op)
    unit.link = is_collective(instr.op)
    return unit


def estimate(instr: Instr) -> tuple[float, float]:
    """Return the microseconds of a call that runs alone, and those that it keeps the whole device busy."""
    flops = flops_of(instr)
    moved = bytes_of(instr, frozenset(instr.outputs()))
    if is_collective(instr.op):
        return transfer_micros(moved), 0.0
    if not flops:
        busy = moved / _BANDWIDTH
        by_element = torch.Tag.pointwise in instr.op.tags
        return busy + (_KERNEL if by_element else _REDUCTION), busy
    itemsize = instr.inputs()[0].spec.dtype.itemsize
    busy = max(flops / _RATES.get(itemsize, _RATES[2]), moved / _BANDWIDTH)
    return busy + _PRODUCT, busy


def _reduces(instr: Instr) -> bool:
    """Whether a result has fewer elements than an argument."""
    read = max((var.spec.numel for var in instr.inputs()), default=0)
    return any(var.spec.numel < read for var in instr.outputs())


def estimate_launch(flops: int, moved: int, itemsize: int) -> tuple[float, float]:
    """Return the same for a launch of a compiled function, by its FLOPs, its bytes and the size of an element."""
    busy = max(flops / _RATES.get(itemsize, _RATES[2]), moved / _BANDWIDTH)
    return busy + (_PRODUCT if flops else _KERNEL), busy


def copy_micros(nbytes: int) -> tuple[float, float]:
    """Return the same for a copy."""
    return 2 * nbytes / _BANDWIDTH + _KERNEL, 2 * nbytes / _BANDWIDTH


def transfer_micros(nbytes: int) -> float:
    """Return the microseconds of a collective, during which the device is free, by the bytes that go in and out."""
    return nbytes / _LINK + _COLLECTIVE
