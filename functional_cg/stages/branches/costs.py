"""What lanes cost, and what the calls on them do."""

from __future__ import annotations

from ...shards.collectives import is_collective
from ..program import Instr
from ..work import estimate, flops_of
from .units import Unit, fixed_by

__all__ = ["SYNC", "WORKSPACE", "weighed"]

SYNC = 1.0  # what waiting for another lane adds, in microseconds
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


def _reduces(instr: Instr) -> bool:
    """Whether a result has fewer elements than an argument."""
    read = max((var.spec.numel for var in instr.inputs()), default=0)
    return any(var.spec.numel < read for var in instr.outputs())
