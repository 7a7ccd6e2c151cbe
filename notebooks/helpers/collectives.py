"""Lists the collectives of a lowered step, and computes what each rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import functional_cg as fcg
from functional_cg.shards.mesh import Axis, Mesh
from functional_cg.shards.placement import Placement

__all__ = ["Launch", "launches", "pieces", "planned_bytes", "whole_bytes"]

_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "_c10d_functional::all_gather_into_tensor_coalesced": "gather",
        "_c10d_functional::reduce_scatter_tensor_coalesced": "reduce",
        "_c10d_functional::all_reduce": "all-reduce",
    }
)
_WAIT = "_c10d_functional::wait_tensor"


@dataclass(frozen=True)
class Launch:
    """One collective of a program.

    Attributes:
      kind: ``gather``, ``reduce`` (each rank gets its shard of a sum) or ``all-reduce`` (each gets all of it).
      place: Its index among the program's calls.
      use: Index of the first call that reads its result; the calls in between may overlap with it, and do so on a
        GPU. On a CPU each collective is waited for at once.
      leaves: Number of tensors that it moves.
      nbytes: Their bytes, counted as whole leaves.
      backward: Whether it belongs to the backward.
    """

    kind: str
    place: int
    use: int
    leaves: int
    nbytes: int
    backward: bool


def launches(lowered: Any) -> list[Launch]:
    """List the collectives of a lowered step in program order.

    Args:
      lowered: What ``step.lower(...)`` returns.
    """
    instrs = lowered.program.instrs
    uses: dict[Any, int] = {}
    for place, instr in reversed(list(enumerate(instrs))):
        if instr.op._schema.name == _WAIT:
            (given,), (made,) = instr.inputs(), instr.outputs()
            uses[given] = uses.get(made, len(instrs))
        else:
            uses.update(dict.fromkeys(instr.inputs(), place))
    found = []
    for place, instr in enumerate(instrs):
        kind = _KINDS.get(instr.op._schema.name)
        if kind is not None:
            made, given = instr.outputs(), instr.inputs()
            sizes = [max(a.spec.nbytes, b.spec.nbytes) for a, b in zip(given, made, strict=True)]
            first = min(uses.get(var, len(instrs)) for var in made)
            found.append(Launch(kind, place, first, len(made), sum(sizes), instr.backward))
    return found


def whole_bytes(lowered: Any) -> list[int]:
    """Count the bytes of gathered leaves alive at each call of a program, from gather to last use.

    Args:
      lowered: What ``step.lower(...)`` returns.
    """
    instrs = lowered.program.instrs
    memory: dict[int, int] = {}  # storage of a wait's result -> storage of the gathered leaf
    born: dict[int, tuple[int, int]] = {}
    last: dict[int, int] = {}
    for place, instr in enumerate(instrs):
        name = instr.op._schema.name
        if _KINDS.get(name) == "gather":
            born.update({var.storage: (place, var.spec.nbytes) for var in instr.outputs()})
        if name == _WAIT:
            (given,), (made,) = instr.inputs(), instr.outputs()
            memory[made.storage] = given.storage
        for var in instr.inputs():
            last[memory.get(var.storage, var.storage)] = place
    alive = [0] * len(instrs)
    for storage, (start, nbytes) in born.items():
        for place in range(start, last[storage] + 1):
            alive[place] += nbytes
    return alive


def pieces(numel: int, ranks: int) -> list[range]:
    """List the elements of a leaf that each rank holds; indices past its end are padding.

    Example:
      >>> from notebooks.helpers.collectives import pieces
      >>> pieces(5, 2)
      [range(0, 3), range(3, 6)]
    """
    return [
        range(place.mesh.rank * place.length, (place.mesh.rank + 1) * place.length)
        for place in _places((numel,), ranks)
    ]


def planned_bytes(params: Any, ranks: int, stage: int) -> dict[str, int]:
    """Compute the bytes per rank of training with AdamW at a stage of ZeRO, padding included.

    Args:
      params: Pytree of tensors, whole.
      ranks: Number of ranks.
      stage: 1, 2 or 3.

    Example:
      >>> import torch
      >>> from notebooks.helpers.collectives import planned_bytes
      >>> planned_bytes({"w": torch.zeros(10)}, ranks=4, stage=2)
      {'parameters': 40, 'gradients': 12, 'moments': 24}
    """
    leaves = fcg.tree.leaves(params)
    whole = sum(leaf.nbytes for leaf in leaves)
    shards = sum(next(_places(tuple(leaf.shape), ranks)).length * leaf.itemsize for leaf in leaves)
    return {
        "parameters": shards if stage == 3 else whole,
        "gradients": shards if stage >= 2 else whole,
        "moments": 2 * shards,
    }


def _places(shape: tuple[int, ...], ranks: int) -> Any:
    """Compute each rank's placement of a leaf; no rank needs to be running."""
    for rank in range(ranks):
        yield Placement(Mesh((Axis("data", ranks, rank, ""),)), shape, sharded=True)
