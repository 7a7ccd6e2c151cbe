"""Sketches: measure the distance of two tensors from a small linear summary of each.

A sketch is linear: the sketch of a difference is the difference of the sketches. It sums groups of neighbours
with random signs, so its norm equals that of the tensor on average, and the nonzero elements of a sparse tensor all
survive. A small tensor is its own sketch.

Source: Charikar, Chen, Farach-Colton 2002, "Finding frequent items in data streams".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["LARGE", "Distance", "distance", "floor", "known", "sketch"]

_NEIGHBOURS = 64
_CHUNK = 2**21  # elements to sum at a time
_TILE = 2**16  # elements after which the signs repeat; a tensor of at most this many is small
LARGE = _TILE + 1  # elements of the smallest tensor that is summed
_ODD = 0x9E3779B1  # near the golden ratio of 2^32
_FLOOR = 2.0  # ulps


@dataclass(frozen=True, slots=True)
class Distance:
    """How far apart two tensors are.

    Attributes:
      norm: Euclidean norm of the difference.
      greatest: The largest difference of an element.
    """

    norm: float
    greatest: float

    def times(self, factor: float) -> Distance:
        return Distance(self.norm * factor, self.greatest * factor)

    def or_more(self, other: Distance) -> Distance:
        return Distance(max(self.norm, other.norm), max(self.greatest, other.greatest))

    def within(self, limit: Distance) -> bool:
        return self.norm <= limit.norm and self.greatest <= limit.greatest

    def share(self, limit: Distance) -> float:
        """Return this distance as a fraction of a limit that it is within."""
        if not math.isfinite(limit.greatest):
            return 0.0
        return max(self.norm / (limit.norm or 1.0), self.greatest / (limit.greatest or 1.0))


def sketch(tensor: Tensor) -> Tensor:
    """Return an f64 vector that stands for a tensor in :func:`distance`."""
    if tensor.numel() <= _TILE:
        return torch.cat(
            [part.double() for part in _numbers(tensor)] or [tensor.new_zeros(0, dtype=torch.float64)]
        )
    place = torch.arange(_TILE, device=tensor.device)
    signs = 1.0 - 2.0 * (place * _ODD >> 16 & 1).view(-1, _NEIGHBOURS)
    sums = []
    for part in _numbers(tensor):
        whole = F.pad(part.double(), (0, -part.numel() % _TILE)).view(-1, *signs.shape)
        sums.append((whole * signs).sum(-1).flatten())
    return torch.cat(sums)


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Return the distance of two sketches, f64[2], for :func:`known`; NaN equals NaN, and equal infinities match."""
    same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(same, 0.0, one - other)
    if not apart.numel():
        return apart.new_zeros(2)
    return _norms(apart)


def floor(tensor: Tensor) -> Tensor:
    """Return the distance that rounding of the result itself explains, f64[2], for :func:`known`."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return torch.zeros(2, dtype=torch.float64, device=tensor.device)
    finite = (torch.where(part.isfinite(), part, 0.0) for part in _numbers(tensor))
    norms = torch.stack([_norms(part) for part in finite])
    norm, greatest = torch.linalg.vector_norm(norms[:, 0]), norms[:, 1].amax()
    if tensor.numel() > _TILE:  # a sketch adds neighbours up
        greatest = torch.minimum(greatest * math.sqrt(_NEIGHBOURS), norm)
    spacing = torch.finfo(tensor.dtype)
    smallest = spacing.smallest_normal * spacing.eps
    least = smallest * math.sqrt(tensor.numel())
    rounding = _FLOOR * spacing.eps
    return torch.stack([(norm * rounding).clamp(min=least), (greatest * rounding).clamp(min=smallest)])


def known(measured: Sequence[Tensor]) -> list[Distance]:
    """Return distances as Python numbers; waits for each device once."""
    found: dict[int, Distance] = {}
    for device in dict.fromkeys(one.device for one in measured):
        places = [place for place, one in enumerate(measured) if one.device == device]
        for place, (norm, greatest) in zip(
            places, torch.stack([measured[place] for place in places]).tolist(), strict=True
        ):
            unknown = math.isnan(norm) or math.isnan(greatest)
            found[place] = Distance(math.inf, math.inf) if unknown else Distance(norm, greatest)
    return [found[place] for place in range(len(measured))]


def _norms(numbers: Tensor) -> Tensor:
    """Return the Euclidean norm and the largest magnitude, f64[2]; NaN if any number is."""
    return torch.stack(
        [torch.linalg.vector_norm(numbers, order, dtype=torch.float64) for order in (2, math.inf)]
    )


def _numbers(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements in logical order, in chunks, complex ones as pairs, in a dtype that supports arithmetic.

    Integers are hashed to the unit interval: for a token it matters only whether it differs, not by how much.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    for part in tensor.reshape(-1).split(_CHUNK) if tensor.numel() else ():
        if part.is_floating_point():
            yield part.float() if part.itemsize == 1 else part
        else:
            yield (part.long() * _ODD & 0xFFFF_FFFF).double() / 2.0**32
