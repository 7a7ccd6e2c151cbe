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

from ...state.arena import BufferSpec

__all__ = ["LARGE", "Distance", "distance", "floor", "known", "magnitude", "sketch"]

_NEIGHBOURS = 64
_CHUNK = 2**21  # elements to sum at a time
_TILE = 2**16  # elements after which the signs repeat; a tensor of at most this many is small
LARGE = _TILE + 1  # elements of the smallest tensor that is summed
_ODD = 0x9E3779B1  # near the golden ratio of 2^32
_FLOOR = 2.0  # ulps
_NAN, _INFINITE = 1e300, 2e300  # stand for what is not finite: equal to themselves, far from all numbers


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

    def over(self, size: Distance) -> Distance:
        """Return this distance as a part of a magnitude."""
        return Distance(self.norm / (size.norm or 1.0), self.greatest / (size.greatest or 1.0))

    def by(self, size: Distance) -> Distance:
        """Return such a part of a magnitude."""
        return Distance(self.norm * size.norm, self.greatest * size.greatest)

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
        sums = [part.double() for part in _numbers(tensor)]
    else:
        place = torch.arange(_TILE, device=tensor.device)
        signs = 1.0 - 2.0 * (place * _ODD >> 16 & 1).view(-1, _NEIGHBOURS)
        sums = []
        for part in _numbers(tensor):
            whole = part.double()
            if len(part) % _TILE:
                whole = F.pad(whole, (0, -len(part) % _TILE))
            sums.append((whole.view(-1, *signs.shape) * signs).sum(-1).flatten())
    joined = sums[0] if len(sums) == 1 else torch.cat(sums or [tensor.new_zeros(0, dtype=torch.float64)])
    return joined.nan_to_num(_NAN, _INFINITE, -_INFINITE)


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Return the distance of two sketches, f64[2], for :func:`known`; NaN equals NaN, and equal infinities match."""
    return _norms(one - other)


def magnitude(tensor: Tensor) -> Tensor:
    """Return the distance of a tensor's finite elements from zero, f64[2], for :func:`known`; 0 for integers."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return torch.zeros(2, dtype=torch.float64, device=tensor.device)
    norms = [_norms(part.nan_to_num(0.0, 0.0, 0.0)) for part in _numbers(tensor)]
    if len(norms) == 1:
        return norms[0]
    joined = torch.stack(norms)
    return torch.stack([torch.linalg.vector_norm(joined[:, 0]), joined[:, 1].amax()])


def floor(size: Distance, spec: BufferSpec) -> Distance:
    """Return the distance that rounding of a result itself explains.

    Args:
      size: Its magnitude.
      spec: Its shape and dtype.
    """
    if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        return Distance(0.0, 0.0)
    spacing = torch.finfo(spec.dtype)
    smallest, rounding = spacing.smallest_normal * spacing.eps, _FLOOR * spacing.eps
    # A sketch adds neighbours up.
    greatest = min(size.greatest * math.sqrt(_NEIGHBOURS), size.norm) if spec.numel > _TILE else size.greatest
    return Distance(
        max(size.norm * rounding, smallest * math.sqrt(spec.numel)), max(greatest * rounding, smallest)
    )


def known(measured: Sequence[Tensor]) -> list[Distance]:
    """Return distances as Python numbers; waits for each device once."""
    found: dict[int, Distance] = {}
    for device in dict.fromkeys(one.device for one in measured):
        places = [place for place, one in enumerate(measured) if one.device == device]
        for place, (norm, greatest) in zip(
            places, torch.stack([measured[place] for place in places]).tolist(), strict=True
        ):
            unknown = math.isnan(norm) or not greatest < _NAN / 2
            found[place] = Distance(math.inf, math.inf) if unknown else Distance(norm, greatest)
    return [found[place] for place in range(len(measured))]


def _norms(numbers: Tensor) -> Tensor:
    """Return the Euclidean norm and the largest magnitude, f64[2]."""
    if not numbers.numel():
        return torch.zeros(2, dtype=torch.float64, device=numbers.device)
    norms = torch.empty(2, dtype=torch.float64, device=numbers.device)
    for place, order in enumerate((2, math.inf)):
        torch.linalg.vector_norm(numbers, order, dtype=torch.float64, out=norms[place])
    return norms


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
