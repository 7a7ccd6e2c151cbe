"""Offload values to the host while a run needs the device's memory for others: which, when, and how they move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor

from ...tensors.overlap import storage_key
from ..program import Var

__all__ = ["offloads", "transferred"]


def offloads(
    needed: Sequence[Set[int]], sizes: Mapping[int, int], room: int
) -> tuple[dict[int, list[int]], int]:
    """Return which storages leave the device before which calls, and the most bytes that wait at a time.

    Source: Belady 1966, "A study of replacement algorithms for a virtual-storage computer".

    Args:
      needed: The storages of each call, together at most ``room``; all have to be on the device then.
      sizes: Bytes of each storage.
      room: Bytes that those on the device may take.
    """
    uses: dict[int, list[int]] = {}  # the places of calls still to come, the next one last
    for place in reversed(range(len(needed))):
        for storage in needed[place]:
            uses.setdefault(storage, []).append(place)
    alive, here, most = set[int](), set[int](), 0
    leaving: dict[int, list[int]] = {}
    for place, storages in enumerate(needed):
        for storage in storages:
            uses[storage].pop()
        alive |= storages
        here |= storages
        while sum(sizes[one] for one in here) > room:
            latest = max(here - storages, key=lambda one: uses[one][-1])
            leaving.setdefault(place, []).append(latest)
            here.remove(latest)
        alive = {one for one in alive if uses[one]}
        here &= alive
        most = max(most, sum(sizes[one] for one in alive - here))
    return leaving, most


def transferred(values: Mapping[Var, Tensor], *, to_host: bool) -> dict[Var, Tensor]:
    """Copy the values of a storage to the host, or back; views still share their memory there."""
    device = torch.device("cpu") if to_host else next(iter(values)).spec.device
    storages = {storage_key(one): one.untyped_storage() for one in values.values()}
    blocks = {key: _flat(one).to(device, copy=True).untyped_storage() for key, one in storages.items()}
    return {
        var: torch.empty(0, dtype=one.dtype, device=device).set_(
            blocks[storage_key(one)], one.storage_offset(), one.shape, one.stride()
        )
        for var, one in values.items()
    }


def _flat(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
