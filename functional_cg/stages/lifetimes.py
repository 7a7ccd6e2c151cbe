"""How long values of a program live, and how many bytes they take together."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from .program import Instr, Var

__all__ = ["alive_at_peak", "last_uses", "peak_bytes", "spanned", "storage_bytes"]


def storage_bytes(instrs: Iterable[Instr]) -> dict[int, int]:
    """Return the bytes of each storage that the results of the calls span."""
    sizes: dict[int, int] = {}
    for var in (var for instr in instrs for var in instr.outputs()):
        sizes[var.storage] = max(sizes.get(var.storage, 0), spanned(var))
    return sizes


def spanned(var: Var) -> int:
    """Return the bytes of a storage up to the variable's last element; expanded dimensions add none."""
    if not var.spec.numel:
        return 0
    steps = zip(var.spec.shape, var.spec.stride, strict=True)
    return (var.offset + 1 + sum((size - 1) * step for size, step in steps)) * var.spec.dtype.itemsize


def peak_bytes(instrs: Sequence[Instr], kept: Collection[int], sizes: Mapping[int, int]) -> int:
    """Return the peak bytes of temporaries while calls run.

    Args:
      instrs: The calls; each temporary lives from the call that makes it to the last call that reads it.
      kept: Storages that are read after the calls.
      sizes: Bytes of each storage to count.
    """
    return sum(sizes[one] for one in alive_at_peak(instrs, kept, sizes))


def alive_at_peak(instrs: Sequence[Instr], kept: Collection[int], sizes: Mapping[int, int]) -> list[int]:
    """Return the temporaries that are alive while most bytes are, by storage; for the arguments see `peak_bytes`."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, instr in enumerate(instrs):
        for one in (var.storage for var in (*instr.outputs(), *instr.inputs()) if var.storage in sizes):
            first.setdefault(one, number)
            last[one] = number
    last |= dict.fromkeys(first.keys() & kept, len(instrs))
    change = [0] * (len(instrs) + 2)
    for one, start in first.items():
        change[start] += sizes[one]
        change[last[one] + 1] -= sizes[one]
    alive = list(itertools.accumulate(change))
    place = max(range(len(alive)), key=alive.__getitem__)
    return [one for one, start in first.items() if start <= place <= last[one]]


def last_uses(instrs: Sequence[Instr]) -> dict[int, list[Var]]:
    """Return the results to drop after each call, by its number: those that no later call reads."""
    last = {var: number for number, instr in enumerate(instrs) for var in instr.outputs()}
    for number, instr in enumerate(instrs):
        last |= {var: number for var in instr.inputs() if var in last}
    drop: dict[int, list[Var]] = {}
    for var, number in last.items():
        drop.setdefault(number, []).append(var)
    return drop
