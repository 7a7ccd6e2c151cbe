"""What lanes cost, and what the calls on them do."""

from __future__ import annotations

from collections.abc import Iterable

from ...shards.collectives import is_collective
from ..program import Instr
from ..work import estimate, flops_of
from .units import Unit, fixed_by, ordered

__all__ = ["SYNC", "WORKSPACE", "weigh"]

SYNC = 1.0  # what waiting for another lane adds, in microseconds
WORKSPACE = 2**25  # bytes that cuBLAS takes for a stream on an H100; less on GPUs before it


def weigh(units: Iterable[Unit], *, fused: bool = False, fits: bool = False) -> None:
    """Tell units with calls what these take, what order they keep, and why all must run on one lane, if they must.

    Args:
      units: The units.
      fused: Whether a compiler fuses what is no product, no sum over elements and no collective with other calls.
      fits: As for :func:`fixed_by`.
    """
    for unit in units:
        if (instr := unit.call) is not None:
            unit.micros, unit.busy = estimate(instr)
            unit.product, unit.link = bool(flops_of(instr)), is_collective(instr.op)
            if fused and not (unit.product or unit.link or _reduces(instr)):
                unit.micros = unit.busy
            unit.fixed = fixed_by(instr.op, fits=fits)
            unit.writes |= ordered(instr)


def _reduces(instr: Instr) -> bool:
    """Whether a result has fewer elements than an argument."""
    read = max((var.spec.numel for var in instr.inputs()), default=0)
    return any(var.spec.numel < read for var in instr.outputs())
