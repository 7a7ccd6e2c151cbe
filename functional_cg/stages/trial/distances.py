"""Distances: how far tensors are apart, measured for many small ones at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...state.arena import BufferSpec

__all__ = ["Distance", "Distances", "floor"]

_CHUNK = 2**20  # elements to measure at a time
_FLOOR = 2.0  # ulps
_norms = torch.ops.aten._foreach_norm.Scalar


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

    def and_then(self, more: Distance) -> Distance:
        """Return the distance of two pieces together."""
        return Distance(math.hypot(self.norm, more.norm), max(self.greatest, more.greatest))

    def within(self, limit: Distance) -> bool:
        return self.norm <= limit.norm and self.greatest <= limit.greatest

    def share(self, limit: Distance) -> float:
        """Return this distance as a fraction of a limit that it is within."""
        if not math.isfinite(limit.greatest):
            return 0.0
        return max(self.norm / (limit.norm or 1.0), self.greatest / (limit.greatest or 1.0))


class Distances:
    """Measures how far tensors are from expected ones, in doubles; a GPU is waited for when that is read.

    NaN equals NaN, and equal infinities match. Of integers and flags it matters only whether they differ, not by how
    much, as of tokens: each that does counts 1.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[torch.device, bool], list[tuple[int, Tensor, Tensor]]] = {}
        self._counts: dict[tuple[torch.device, bool], int] = {}
        self._measured: dict[torch.device, list[tuple[Sequence[int], Tensor]]] = {}

    def add(self, number: int, one: Tensor, expected: Tensor) -> None:
        """Measure a tensor.

        Args:
          number: What :meth:`known` calls it.
          one: The tensor. It may wait here, and must keep its values.
          expected: A tensor of its dtype and shape, here or on the host.
        """
        group = one.device, not (one.is_floating_point() or one.is_complex())
        waiting = self._waiting.setdefault(group, [])
        for piece, other in zip(_pieces(one), _pieces(expected), strict=True):
            waiting.append((number, piece, other))
            self._counts[group] = self._counts.get(group, 0) + len(piece)
            if self._counts[group] >= _CHUNK:
                self._measure(group)

    def known(self, count: int) -> list[tuple[Distance, Distance]]:
        """Return, for numbers up to a count, the distance and the size of what was expected, its distance from zero."""
        for group in self._waiting:
            self._measure(group)
        found = [(Distance(0.0, 0.0), Distance(0.0, 0.0))] * count
        for measured in self._measured.values():
            numbers = [number for some, _ in measured for number in some]
            values = torch.cat([norms for _, norms in measured], dim=1).T.tolist()
            for number, (norm, greatest, *size) in zip(numbers, values, strict=True):
                apart = Distance(norm, greatest) if math.isfinite(norm) else Distance(math.inf, math.inf)
                before = found[number]
                found[number] = before[0].and_then(apart), before[1].and_then(Distance(*size))
        return found

    def _measure(self, group: tuple[torch.device, bool]) -> None:
        """Measure what waits."""
        waiting = self._waiting[group][:]
        self._waiting[group].clear()
        self._counts[group] = 0
        if not waiting:
            return
        numbers, ones, others = zip(*waiting, strict=True)
        one, other = torch.cat(ones), torch.cat([piece.to(group[0]) for piece in others])
        if group[1]:
            apart = (one != other).double()
            size = torch.zeros_like(apart)
        else:
            one, other = one.double(), other.double()
            same = (one == other) | (one.isnan() & other.isnan())
            apart, size = (one - other).masked_fill_(same, 0.0), other.nan_to_num_(0.0, 0.0, 0.0)
        sizes = [len(piece) for piece in ones]
        norms = [_norms(of.split(sizes), order) for of in (apart, size) for order in (2, math.inf)]
        self._measured.setdefault(group[0], []).append((numbers, torch.stack([*map(torch.stack, norms)])))


def floor(size: Distance, spec: BufferSpec) -> Distance:
    """Return the distance that rounding of a result itself explains.

    Args:
      size: Its distance from zero.
      spec: Its shape and dtype.
    """
    if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        return Distance(0.0, 0.0)
    spacing = torch.finfo(spec.dtype)
    smallest, rounding = spacing.smallest_normal * spacing.eps, _FLOOR * spacing.eps
    return Distance(
        max(size.norm * rounding, smallest * math.sqrt(spec.numel)), max(size.greatest * rounding, smallest)
    )


def _pieces(tensor: Tensor) -> Iterable[Tensor]:
    """Return the elements in logical order, complex ones as pairs."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    elif not tensor.is_floating_point():
        tensor = tensor.long()
    elif tensor.itemsize == 1:
        tensor = tensor.float()
    flat = tensor.reshape(-1)
    return flat.split(_CHUNK) if len(flat) > _CHUNK else [flat] if len(flat) else []
