"""Choose which values the backward recomputes and which the forward keeps for it.

A kept value costs its memory, and its memory traffic: one read, and one write if the forward would otherwise not store
it. A recomputed value costs memory traffic only if it must be stored: an elementwise chain between two kernels is free,
the argument of a matrix product is written and read. What it is made from is read for it alone, unless a kernel that
reads that anyway can store it: one that does not wait for the product. The gradient of a convolution's argument comes
from the call that reads the argument, that of a linear layer from another one. The choice with the lowest total is a
minimum cut between what the forward must compute and what the backward reads. A parameter, the price of traffic, trades
time for memory.

Only elementwise calls, casts and normalizations with known statistics are recomputed. Along a chain of them, at most
one call may read a value from before the last product, convolution or the like: a residual stream is a sum over all
layers, and recomputing it from its terms would start at the first layer each time. So every other sum is kept.

Source: He & Yu 2023, "Transcending Runtime-Memory Tradeoffs in Checkpointing by Being Fusion Aware" (MLSys).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...tensors.op_table import row_of
from ..lifetimes import storage_bytes
from ..program import Instr, Program, Var, written_storages
from .normalized import normalized

__all__ = ["Choice", "Forward", "is_cheap", "is_fused", "recomputed", "stored"]

_FORWARD, _BACKWARD = "forward", "backward"  # the ends of a network
_LONG = 64  # calls in a chain of recomputed values
_NEAR = 25 * 2**20  # bytes of which the next call finds most in the cache of a GPU: half of the L2 of an H100


@dataclass(slots=True)
class Forward:
    """The values that the forward makes.

    Attributes:
      maker: The call that makes each variable; for a normalization, the call that recomputes it from its statistics.
      place: Number of the call that makes each storage.
      root: The variable that a storage was made as.
      sizes: Bytes of each storage.
      needed: Storages that the backward reads, each with the variables it reads them as.
      written: Storages that some call writes in place.
    """

    maker: dict[Var, Instr]
    place: dict[int, int]
    root: dict[int, Var]
    sizes: Mapping[int, int]
    needed: dict[int, set[Var]]
    written: set[int]

    @classmethod
    def of(cls, program: Program) -> Forward:
        made = cls({}, {}, {}, storage_bytes(program.instrs), {}, written_storages(program.instrs))
        for number, instr in enumerate(program.instrs):
            if instr.backward:
                for var in instr.inputs():
                    if var.storage in made.place:
                        made.needed.setdefault(var.storage, set()).add(var)
            for position, var in enumerate(instr.outputs()):
                made.maker[var] = (normalized(instr) or instr) if position == 0 else instr
                if not instr.backward and not instr.is_view:
                    made.place.setdefault(var.storage, number)
                    made.root.setdefault(var.storage, var)
        return made


@dataclass(frozen=True, slots=True)
class Choice:
    """What is kept and what is recomputed.

    Attributes:
      again: Storages that the backward recomputes if it needs them.
      kept: Bytes that the forward keeps for the backward.
    """

    again: set[int]
    kept: int


def recomputed(program: Program, forward: Forward, *, prices: Sequence[float], large: int) -> list[Choice]:
    """Choose what the backward recomputes, at each of some prices.

    Args:
      program: The program.
      forward: Its forward.
      prices: What a byte of memory traffic costs, in bytes of memory kept.
      large: Bytes from which a value is worth recomputing.
    """
    import networkx as nx  # torch requires it

    recipes = _recipes(program, forward, large)
    own_memory = {var.storage for var in (*program.results, *program.new_state)}
    in_memory, in_memory_again = stored(program, forward)
    alone = _read_alone(program, recipes, forward, in_memory)

    def choice(price: float) -> Choice:
        """Cut a network with two nodes for each storage, before and after it is stored."""
        network: Any = nx.DiGraph()
        visited: set[int] = set()
        front = list(forward.needed)
        while front:
            one = front.pop()
            if one in visited:
                continue
            visited.add(one)
            size, recipe = forward.sizes.get(one, 0), recipes.get(one)
            traffic = size * (1 if one in in_memory else 2)
            network.add_edge(
                (one, 0), (one, 1), capacity=(0 if one in own_memory else size) + price * traffic
            )
            if one in forward.needed:
                network.add_edge((one, 1), _BACKWARD, capacity=math.inf)
            if recipe is None:
                network.add_edge(_FORWARD, (one, 0), capacity=math.inf)
                continue
            sources = {var.storage: var for var in recipe.inputs()}
            outside = sum(var.spec.nbytes for storage, var in sources.items() if storage not in forward.place)
            computed = outside + (_traffic(size) if one in in_memory_again else 0)
            network.add_edge(_FORWARD, (one, 0), capacity=price * computed)
            inside = sources.keys() & forward.place.keys()
            network.add_edges_from((((source, 1), (one, 0)) for source in inside), capacity=math.inf)
            for source, read in alone.get(one, {}).items():  # if the source is not computed, too
                network.add_edge((source, 0), (one, 0), capacity=price * read)
            front += inside
        again, kept = _cheapest(network)
        return Choice(again, sum(forward.sizes.get(one, 0) for one in kept - own_memory))

    return list(map(choice, prices))


def _traffic(size: int) -> float:
    """Return the bytes that are moved to store a value for the next call, which reads it."""
    return size * (1.5 if size <= _NEAR else 2.0)


def _recipes(program: Program, forward: Forward, large: int) -> dict[int, Instr]:
    """Return the calls that may recompute a storage."""
    until = _at_hand_until(program)
    lengths: dict[int, int] = {}
    leaps: dict[int, int] = {}
    out: dict[int, Instr] = {}
    made_late = (instr for instr in program.instrs if instr.backward and not instr.is_view)
    outside = {var.storage for instr in made_late for var in instr.outputs()}
    for storage, number in forward.place.items():
        instr = forward.maker[forward.root[storage]]
        inputs = {var.storage for var in instr.inputs()}
        inside = inputs & forward.place.keys()
        length = 1 + max((lengths.get(one, 0) for one in inside), default=0)
        leap = max((leaps.get(one, 0) + (until.get(one, number) < number) for one in inside), default=0)
        if (
            is_cheap(instr)
            and not instr.writes
            and forward.sizes.get(storage, 0) >= large
            and length <= _LONG
            and leap <= 1
            and forward.written.isdisjoint({storage, *inputs})
            and outside.isdisjoint(inputs)
            and all(_by_views(forward, var) for var in forward.needed.get(storage, ()))
        ):
            lengths[storage], leaps[storage] = length, leap
            out[storage] = instr
    return out


def _read_alone(
    program: Program, recipes: dict[int, Instr], forward: Forward, in_memory: Container[int]
) -> dict[int, dict[int, int]]:
    """Return what the calls that recompute a storage in memory read for it alone: storages, each with its bytes.

    Such a call shares a read with a fused call that need not wait for what reads the storage. And it reads for more
    than the storage if the backward wants what that is made from, too.
    """
    first, shared = _waiting(program, recipes)
    makes: dict[int, set[int]] = {}  # for each storage, those that are recomputed from it and wanted
    for one, instr in reversed(recipes.items()):  # what is made from it comes after it
        if one in forward.needed or makes.get(one):
            for var in instr.inputs():
                makes.setdefault(var.storage, set()).add(one)
    reads: dict[int, dict[int, int]] = {}
    for one, call in first.items():
        front, seen = [one], set[int]()
        while front:
            made = front.pop()
            sources = {var.storage: var.spec.nbytes for var in recipes[made].inputs()}
            for source in sources.keys() - seen:
                seen.add(source)
                if not shared.get(source, -1) & call:
                    continue
                if source in recipes and source not in in_memory:
                    if source not in forward.needed and makes[source] == {made}:
                        front.append(source)
                elif source in forward.place:
                    reads.setdefault(one, {})[source] = sources[source]
    return reads


def _waiting(program: Program, recipes: Mapping[int, Instr]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the first call of the backward that reads each of some storages from memory, as a bit, and for each
    storage the bits of such calls that all fused calls which read it wait for."""
    first: dict[int, int] = {}
    waits: dict[int, int] = {}  # for each storage, the bits of what makes it and of what that waits for
    shared: dict[int, int] = {}
    bit = 1
    for instr in (instr for instr in program.instrs if instr.backward):
        storages = {var.storage for var in instr.inputs()}
        before = functools.reduce(operator.or_, (waits.get(one, 0) for one in storages), 0)
        if is_fused(instr):
            for one in () if instr.is_view else storages:
                shared[one] = shared.get(one, before) & before
        elif new := (storages & recipes.keys()) - first.keys():
            first |= dict.fromkeys(new, bit)
            before, bit = before | bit, bit << 1
        for var in instr.outputs():
            waits[var.storage] = waits.get(var.storage, 0) | before
    return first, shared


def _at_hand_until(program: Program) -> dict[int, int]:
    """Return the first call after each storage that a kernel of its own computes from it, directly or through others.

    Until then, kernels that a compiler fuses have the value in registers or have just stored it.
    """
    until: dict[int, int] = {}
    end = len(program.instrs)
    for number in range(end - 1, -1, -1):
        instr = program.instrs[number]
        if instr.backward:
            continue
        reach = number
        if is_fused(instr):
            reach = min((until.get(var.storage, end) for var in instr.outputs()), default=end)
        for var in instr.inputs():
            until[var.storage] = min(until.get(var.storage, end), reach)
    return until


def stored(program: Program, forward: Forward) -> tuple[set[int], set[int]]:
    """Return the storages that the forward has to store, and those that the backward would have to: a call reads them
    that a compiler does not fuse with the call that makes them."""
    forwards = {var.storage for var in forward.root.values() if not is_cheap(forward.maker[var])}
    backwards: set[int] = set()
    for instr in program.instrs:
        if not is_fused(instr):
            (backwards if instr.backward else forwards).update(var.storage for var in instr.inputs())
    return forwards, backwards


def is_cheap(instr: Instr) -> bool:
    """Whether a call makes a single pass over its arguments."""
    return not instr.is_view and (instr.by_element or row_of(instr.op).untagged)


def is_fused(instr: Instr) -> bool:
    """Whether a compiler fuses a call with its neighbours."""
    return (
        instr.is_view or is_cheap(instr) or torch.Tag.reduction in instr.op.tags or row_of(instr.op).one_pass
    )


def _by_views(forward: Forward, var: Var) -> bool:
    """Whether a variable is what its storage was made as, or is made from it by views alone."""
    while var is not forward.root[var.storage]:
        maker = forward.maker.get(var)
        if maker is None or not maker.is_view:
            return False
        var = next(one for one in maker.inputs() if one.storage == var.storage)
    return True


def _cheapest(network: Any) -> tuple[set[int], set[int]]:
    """Return the storages to recompute, and those to keep, which the cheapest cut runs through."""
    import networkx as nx

    ends = {_FORWARD, _BACKWARD}
    late: set[Any] = set()
    inner = network.copy()
    inner.remove_nodes_from(ends)
    for part in nx.weakly_connected_components(inner):
        own = nx.DiGraph([*network.in_edges(part, data=True), *network.out_edges(part, data=True)])
        own.add_nodes_from(ends)
        if all(math.isinf(edge["capacity"]) for edge in own[_FORWARD].values()):
            late |= own.pred[_BACKWARD].keys()
        else:
            late |= nx.minimum_cut(own, _FORWARD, _BACKWARD)[1][1]
    again = {one for one, stored in late - ends if not stored}
    return again, {one for one, stored in late - ends if stored} - again
