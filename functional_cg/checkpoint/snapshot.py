"""What one rank writes of a state: its pieces, copied to memory that the state does not share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ambient.modes import ordinary, without_gradients
from ..concurrency.turns import at_one_time
from ..shards.mesh import Mesh
from ..shards.tensor import Sharded
from ..state.boundary import held
from ..state.leaf import turns_of
from .matching import type_of

__all__ = ["Copy", "Part", "Stage", "mesh_of"]

_ALIGNMENT = 64  # bytes: the largest dtype has 16, and lines of a cache have this


def mesh_of(leaves: Sequence[Any]) -> Mesh | None:
    """Return the mesh of the first leaf that lies on one."""
    return next((leaf.placement.mesh for leaf in leaves if isinstance(leaf, Sharded)), None)


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a flattened leaf.

    Attributes:
      start: Its first element, in the whole leaf.
      data: The elements, a vector.
    """

    start: int
    data: Tensor


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of this rank's part of a state.

    Attributes:
      parts: By name of the leaf; leaves of which this rank writes nothing are missing.
      types: Of all leaves.
      step: The leaf ``step`` of the state, if it has one.
      ready: Waits on the host until the copy is complete.
    """

    parts: Mapping[str, Part]
    types: Mapping[str, str]
    step: Tensor | None
    ready: Callable[[], None]


def _range(leaf: Any, mesh: Mesh | None) -> tuple[int, int, int]:
    """Return which of the elements that this rank holds it writes, and the index of the first one in the whole leaf.

    Ranks that hold the same elements of a leaf on the mesh share them out; of the stages of a pipeline that hold it,
    the first one writes. Any other leaf is small: rank 0 writes it.
    """
    if not isinstance(leaf, Sharded):
        return (0, leaf.numel() if mesh is None or mesh.number == 0 else 0, 0)
    placement, ranks = leaf.placement, leaf.placement.mesh
    if placement.holders is not None and not placement.holders.first:
        return 0, 0, 0
    if placement.sharded:
        count, first, (which, sharing) = (
            placement.elements,
            placement.start,
            (
                ranks.rank // ranks.shards.size,
                ranks.size // ranks.shards.size,
            ),
        )
    else:
        count, first, (which, sharing) = placement.numel, 0, (ranks.rank, ranks.size)
    each = -(-count // sharing)
    start, stop = min(which * each, count), min((which + 1) * each, count)
    return start, stop, first + start


class Stage:
    """Host memory for copies, used again for each; pinned for states on a GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, names: Sequence[str], leaves: Sequence[Tensor]) -> Copy:
        """Copy this rank's pieces; the previous copy is overwritten. On a GPU, the copy is queued."""
        return at_one_time(  # type: ignore[no-any-return]
            turns_of(map(held, leaves)), partial(self._taken, names, leaves)
        )

    def _taken(self, names: Sequence[str], leaves: Sequence[Tensor]) -> Copy:
        mesh = mesh_of(leaves)
        ranges = [_range(leaf, mesh) for leaf in leaves]
        offsets, end = [], 0
        for leaf, (start, stop, _) in zip(leaves, ranges, strict=True):
            offsets.append(end)
            end += -(-(stop - start) * leaf.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        device = next((held(leaf).device for leaf in leaves if not leaf.is_cpu), torch.device("cpu"))
        with ordinary():
            without_gradients()
            memory = self._of(end, pinned=device.type == "cuda")
            parts: dict[str, Part] = {}
            for name, leaf, (start, stop, first), offset in zip(names, leaves, ranges, offsets, strict=True):
                if start == stop:
                    continue
                data = memory[offset : offset + (stop - start) * leaf.dtype.itemsize].view(leaf.dtype)
                own = held(leaf)
                if stop - start == own.numel():
                    data.view(own.shape).copy_(own, non_blocking=True)
                else:
                    data.copy_(own.reshape(-1)[start:stop], non_blocking=True)
                parts[name] = Part(first, data)
            step = dict(zip(names, leaves, strict=True)).get("step")
            if step is not None:
                step = torch.empty(
                    held(step).shape, dtype=step.dtype, device="cpu", pin_memory=device.type == "cuda"
                ).copy_(held(step), non_blocking=True)
        types = {name: type_of(leaf) for name, leaf in zip(names, leaves, strict=True)}
        return Copy(parts, types, step, _queued(device))

    def _of(self, size: int, *, pinned: bool) -> Tensor:
        if len(self._memory) < size or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # freed before the larger one is made
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._memory


def _queued(device: torch.device) -> Callable[[], None]:
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
