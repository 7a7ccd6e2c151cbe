"""Find which bytes of a storage tensors occupy and whether they overlap, from shapes and strides alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["byte_range", "crosses", "overlapping", "overlaps_itself", "share_bytes", "storage_key"]


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage; two tensors share memory only if their keys are equal."""
    return int(tensor.untyped_storage()._cdata)


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and one past its last."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor share memory, as in an expanded tensor."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return False
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    dims = sorted(((step, size - 1) for step, size in pairs if size > 1), reverse=True)
    # Two places are the same if steps add up to nothing, of which the first goes forward.
    return dims[-1][0] == 0 or any(
        _is_met([(step, 1, most), *((one, -many, many) for one, many in dims[number + 1 :])], 0, 0)
        for number, (step, most) in enumerate(dims)
    )


def crosses(one: Tensor, other: Tensor) -> bool:
    """Whether tensors of one storage share bytes, but not each element with the one at its own place.

    An element may be a part of the other one, as the real part is of a complex number.
    """
    (first, steps), (second, others) = _laid(one), _laid(other)
    within = 0 <= first - second <= other.itemsize - one.itemsize
    around = 0 <= second - first <= one.itemsize - other.itemsize
    return not (steps == others and (within or around)) and share_bytes(one, other)


def share_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether tensors of one storage share bytes."""
    if not one.numel() or not other.numel():
        return False
    (first, steps), (second, others) = _laid(one), _laid(other)
    reach: dict[int, list[int]] = {}  # by step, how far it may lead down and up
    for sign, dims in ((0, others), (1, steps)):
        for size, step in dims:
            reach.setdefault(step, [0, 0])[sign] += size - 1
    terms = [(step, -down, up) for step, (down, up) in sorted(reach.items(), reverse=True) if step]
    return _is_met(terms, second - first - one.itemsize + 1, second - first + other.itemsize - 1)


def _laid(tensor: Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Return where a tensor begins, and its sizes and steps but for those of 1, in bytes."""
    width = tensor.itemsize
    dims = [(n, step * width) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]
    return int(tensor.storage_offset()) * width, dims


def _is_met(terms: Sequence[tuple[int, int, int]], least: int, most: int) -> bool:
    """Whether a sum of multiples of steps lies within bounds.

    Args:
      terms: Each step, largest first, with the least and the greatest multiple of it.
      least: The lower bound.
      most: The upper bound.
    """
    if not terms:
        return least <= 0 <= most
    (step, low, high), *rest = terms
    down = sum(one * fewest for one, fewest, _ in rest)
    up = sum(one * greatest for one, _, greatest in rest)
    first, last = max(low, -((up - least) // step)), min(high, (most - down) // step)
    return any(_is_met(rest, least - step * n, most - step * n) for n in range(first, last + 1))


def overlapping(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the positions of two tensors that overlap, all of one storage; None if none do."""
    ranges = [byte_range(tensor) for tensor in tensors]
    for cluster in _clusters(ranges):
        # Columns of one matrix interleave without sharing a byte, so the bytes decide.
        length = max(ranges[i][1] for i in cluster)
        taken = torch.zeros(length, dtype=torch.bool, device="cpu")
        for n, i in enumerate(cluster):
            if _bytes_in(taken, tensors[i]).any():
                return next((j, i) for j in cluster[:n] if share_bytes(tensors[j], tensors[i]))
            _bytes_in(taken, tensors[i]).fill_(True)
    return None


def _clusters(ranges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Group ranges that overlap, directly or through others; return groups of at least two."""
    groups: list[list[int]] = []
    reach = 0
    for i in sorted(range(len(ranges)), key=ranges.__getitem__):
        first, end = ranges[i]
        if groups and first < reach:
            groups[-1].append(i)
        else:
            groups.append([i])
        reach = max(reach, end)
    return [group for group in groups if len(group) > 1]


def _bytes_in(mask: Tensor, tensor: Tensor) -> Tensor:
    """Return a view of the bytes of ``tensor`` in a mask over the bytes of its storage."""
    shape, size = (*tensor.shape, tensor.itemsize), tensor.itemsize
    stride = (*(step * size for step in tensor.stride()), 1)
    return torch.as_strided(mask, shape, stride, tensor.storage_offset() * size)
