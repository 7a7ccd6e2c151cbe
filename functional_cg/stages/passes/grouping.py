"""Group the collectives of a traced program into buckets, and start gathers early.

A trace has one gather per read of a sharded leaf, and one reduction per gradient. Consecutive ones share a launch, up
to a number of bytes: a gather moves up to the first of its bucket, since it depends on slots alone; a reduction moves
down to the last. A bucket of gathers may start ``ahead`` buckets before its first use. Calls that need a reduction's
result are delayed until the next reduction is launched. So both overlap with the compute in between. Moved calls
compute the same values: only the order of independent calls changes.

On a CPU each launch is waited for at once. Gloo runs two collectives of one process group concurrently, and with
gathers this corrupts its heap: torch 2.13 by itself aborts or hangs after a few thousand pairs of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...messages.origins import Origin
from ...shards.collectives import ALL_REDUCE, GATHER, REDUCE_SCATTER, WAIT, is_collective
from ...shards.placement import Reading
from ..program import Instr, vars_in
from .changes import behind_needs, needs_of

__all__ = ["group_collectives", "groups"]


def groups(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Cut a sequence of sizes into buckets of at most ``limit`` bytes; a larger item gets its own bucket.

    Example:
      >>> from functional_cg.stages.passes.grouping import groups
      >>> groups([10, 20, 50, 5, 5], 30)
      [[0, 1], [2], [3, 4]]
    """
    out: list[list[int]] = []
    filled = limit + 1
    for i, size in enumerate(sizes):
        if filled + size > limit:
            out.append([])
            filled = 0
        out[-1].append(i)
        filled += size
    return out


def group_collectives(instrs: list[Instr], reading: Reading, device: torch.device) -> list[Instr]:
    """Return the instructions with their collectives grouped into buckets.

    Args:
      instrs: The instructions of a traced program.
      reading: Bytes per bucket, and how many buckets ahead a gather may start.
      device: Where they run; on a CPU, collectives run one at a time.
    """
    gathered = _gathers(instrs, reading.bucket_bytes, reading.prefetch)
    grouped = _reductions(gathered, reading.bucket_bytes)
    return _one_at_a_time(grouped) if device.type == "cpu" else grouped


def _gathers(instrs: Sequence[Instr], limit: int, ahead: int) -> list[Instr]:
    """Let each bucket of gathers start where the first of it stands, or the first of an earlier bucket."""
    needs, place = needs_of(instrs), {instr: float(number) for number, instr in enumerate(instrs)}
    launches: dict[Instr, Instr] = {}
    for buckets in _buckets(instrs, GATHER, limit, needs):
        for number, bucket in enumerate(buckets):
            start = place[buckets[max(0, number - ahead)][0]]
            place[launch := _joined(bucket)] = start
            launches |= dict.fromkeys(bucket, launch)
    return _moved(instrs, launches, needs, place)


def _reductions(instrs: Sequence[Instr], limit: int) -> list[Instr]:
    """Let each bucket of reductions start where the last of it stands; what needs them waits for the next bucket.

    What needs the last bucket comes at the end.
    """
    needs, place = needs_of(instrs), {instr: float(number) for number, instr in enumerate(instrs)}
    launches = {instr: instr for instr in instrs if instr.op is ALL_REDUCE}
    for buckets in _buckets(instrs, REDUCE_SCATTER, limit, needs):
        for bucket in buckets:
            place[launch := _joined(bucket)] = place[bucket[-1]]
            launches |= dict.fromkeys(bucket, launch)
    starts = sorted({place[launch] for launch in launches.values()})
    following = dict(itertools.pairwise([*starts, len(instrs)]))
    for instr in instrs:
        if instr not in launches:
            there = [
                following[place[launches[one]]] + 0.5 if one in launches else place[one]
                for one in needs[instr]
            ]
            place[instr] = max([place[instr], *there])
    return _moved(instrs, launches, needs, place)


def _moved(
    instrs: Sequence[Instr],
    launches: Mapping[Instr, Instr],
    needs: Mapping[Instr, Sequence[Instr]],
    place: Mapping[Instr, float],
) -> list[Instr]:
    """Return the instructions in the order of their places, each behind what it needs.

    Args:
      instrs: The instructions.
      launches: What stands for some of them.
      needs: What each of them needs.
      place: The place of each, and of what stands for some.
    """
    # Launches first: of calls with one place, they are the earliest.
    joined = {one: list[Instr]() for one in (*launches.values(), *instrs) if launches.get(one, one) is one}
    for instr in instrs:
        joined[launches.get(instr, instr)] += [launches.get(one, one) for one in needs[instr]]
    return behind_needs(sorted(joined, key=place.__getitem__), joined.__getitem__)


def _one_at_a_time(instrs: Sequence[Instr]) -> list[Instr]:
    """Move the waits of each launch to directly after it."""
    place = {instr: float(number) for number, instr in enumerate(instrs)}
    launched = {var: place[one] for one in instrs if is_collective(one.op) for var in one.outputs()}
    for instr in instrs:
        if instr.op is WAIT and instr.args[0] in launched:
            place[instr] = launched[instr.args[0]] + 0.5
    return sorted(instrs, key=place.__getitem__)


def _buckets(
    instrs: Sequence[Instr], op: object, limit: int, needs: Mapping[Instr, Sequence[Instr]]
) -> list[list[list[Instr]]]:
    """Return runs of consecutive collectives, each cut into buckets of at most ``limit`` bytes of whole leaves.

    All of a run have one dtype and process group, and are in the backward or none is. No collective of a run needs the
    result of another: in a step with two gradients, the gathers of the second depend on those of the first.
    """
    depth: dict[Instr, int] = {}  # number of such collectives that a call depends on in sequence
    for instr in instrs:
        depth[instr] = max((depth[one] + (one.op is op) for one in needs[instr]), default=0)

    def kind(launch: Instr) -> tuple[Any, ...]:
        return launch.args[0][0].spec.dtype, *launch.args[1:], launch.backward, depth[launch]

    cut = []
    for _, alike in itertools.groupby((instr for instr in instrs if instr.op is op), kind):
        run = list(alike)
        sizes = [max(one.args[0][0].spec.nbytes, one.out[0].spec.nbytes) for one in run]
        cut.append([[run[number] for number in bucket] for bucket in groups(sizes, limit)])
    return cut


def _joined(launches: Sequence[Instr]) -> Instr:
    """Join several launches into one."""
    first = launches[0]
    inputs = [var for launch in launches for var in vars_in(launch.args[0])]
    results = [var for launch in launches for var in launch.outputs()]
    origin = Origin.of_all(launch.origin for launch in launches)
    return replace(first, args=(inputs, *first.args[1:]), out=results, origin=origin)
