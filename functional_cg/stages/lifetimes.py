"""How long values of a program live, and how many bytes they take together."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from .program import Instr, Var

__all__ = ["alive_at_peak", "last_uses", "lives_of", "peak_bytes", "spanned", "storage_bytes"]


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
    lives = lives_of(instrs, kept, sizes)
    change = [0] * (len(instrs) + 2)
    for one, (start, end) in lives.items():
        change[start] += sizes[one]
        change[end + 1] -= sizes[one]
    alive = list(itertools.accumulate(change))
    place = max(range(len(alive)), key=alive.__getitem__)
    return [one for one, (start, end) in lives.items() if start <= place <= end]


def lives_of(
    instrs: Sequence[Instr], kept: Collection[int], storages: Collection[int]
) -> dict[int, tuple[int, int]]:
    """Return the numbers of the calls that make and last touch each storage; behind the last call for what is kept."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, instr in enumerate(instrs):
        for var in (*instr.outputs(), *instr.inputs()):
            if var.storage in storages:
                first.setdefault(var.storage, i)
                last[var.storage] = i
    last |= {one: len(instrs) for one in kept if one in first}
    return {one: (start, last[one]) for one, start in first.items()}


def last_uses(head: Sequence[Instr], kept: Collection[Var]) -> dict[int, list[Var]]:
    """Return the variables to drop after each call of a head: those that neither later calls nor ``kept`` contain."""
    born = {var: number for number, instr in enumerate(head) for var in instr.outputs()}
    last = dict(born)
    for number, instr in enumerate(head):
        for var in instr.inputs():
            if var in born:
                last[var] = number
    drop: dict[int, list[Var]] = {}
    for var, number in last.items():
        if var not in kept:
            drop.setdefault(number, []).append(var)
    return drop
