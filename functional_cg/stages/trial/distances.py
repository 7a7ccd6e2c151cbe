"""Distances: how far tensors are apart, measured for many small ones at a time.

A distance is a row of two numbers, f64: the Euclidean norm of the difference, and its greatest element. Where only one
of two elements is finite, or the difference overflows, the second is infinite; the norm leaves those elements out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...state.arena import BufferSpec

__all__ = ["Distances", "between", "rounded"]

_AT_ONCE = 2**21  # elements to measure at a time, with several copies; fewer would leave a GPU idle
_FLOOR = 2.0  # ulps


class Distances:
    """Measures how far tensors are from expected ones; reading the distances waits for the GPU.

    NaN equals NaN, and equal infinities match. Of integers and flags, such as tokens, each element that differs counts
    1, by however much.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Tensor, Tensor]] = []  # rows, pieces, and what they should be
        self._count = 0  # how many elements they have
        self._measured: list[tuple[Tensor, Tensor]] = []  # rows, each once, and their norms: f64[4, rows]
        self._unlike: list[int] = []

    def add(self, number: int, one: Tensor, expected: Tensor) -> None:
        """Measure a tensor.

        Args:
          number: Its row.
          one: The tensor. A small one waits here, until :meth:`known` at the latest, and must keep its values.
          expected: What it should be, here or on the host. From one of another dtype or shape the distance is NaN.
        """
        if one.dtype is not expected.dtype or one.shape != expected.shape:
            self._unlike.append(number)
            return
        for piece, other in zip(_pieces(one), _pieces(expected), strict=True):
            self._waiting.append((number, piece, other))
            self._count += len(piece)
            # What is left of a large tensor would keep all of it alive.
            if one.numel() > _AT_ONCE or self._count >= _AT_ONCE:
                self.measure()

    def known(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the distances, f64[count, 2], and how far what was expected is from zero, 0 for integers."""
        self.measure()
        table = torch.zeros(4, count, dtype=torch.float64)
        for numbers, norms in self._measured:
            found = norms.cpu()
            table[:2, numbers] = table[:2, numbers].hypot(found[:2])
            table[2:, numbers] = table[2:, numbers].maximum(found[2:])
        known, sizes = table.view(2, 2, count).permute(1, 2, 0).contiguous()
        known[self._unlike] = math.nan
        return known, sizes

    def measure(self) -> None:
        """Measure all that waits, without waiting for the GPU."""
        for device in {one.device for _, one, _ in self._waiting}:
            here = [piece for piece in self._waiting if piece[1].device == device]
            numbers, ones, others = zip(*here, strict=True)
            finite, apart, sizes = _parts(ones, others)
            norms = [
                torch.stack(torch._foreach_norm(of, ord, torch.float64))
                for of, ord in ((finite, 2), (sizes, 2), (apart, math.inf), (sizes, math.inf))
            ]
            self._measured.append((torch.tensor(numbers), torch.stack(norms)))
        self._waiting, self._count = [], 0


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements in logical order, complex ones as pairs, and integers as they are."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    yield from tensor.reshape(-1).split(_AT_ONCE) if tensor.numel() else ()


def _parts(ones: Sequence[Tensor], others: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the differences of finite elements, those of all, and what was expected, with zeros for the rest of it."""
    pairs = [_numbers(one, other.to(one.device)) for one, other in zip(ones, others, strict=True)]
    one, other = map(torch.cat, zip(*pairs, strict=True))
    same = (one == other).logical_or_(one.isnan().logical_and_(other.isnan()))
    apart = one.sub(other).masked_fill_(same, 0.0).nan_to_num_(math.inf, math.inf, -math.inf)
    counts = [len(piece) for piece in ones]
    return [[*of.split(counts)] for of in (_finite(apart), apart, _finite(other))]


def _numbers(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return two pieces as f32 or f64; of integers, 1 where they differ, and 0."""
    if one.is_floating_point():
        exact = torch.float64 if one.dtype is torch.float64 else torch.float32
        return one.to(exact), other.to(exact)
    return (one != other).float(), torch.zeros_like(one, dtype=torch.float32)


def _finite(numbers: Tensor) -> Tensor:
    return numbers.nan_to_num(0.0, 0.0, 0.0)


def between(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> Distances:
    """Measure how far each output is from what it should be."""
    found = Distances()
    for number, (one, other) in enumerate(zip(outputs, expected, strict=True)):
        found.add(number, one, other)
    found.measure()
    return found


def rounded(spec: BufferSpec) -> tuple[float, float, float]:
    """Return what rounding of a result itself explains: a part of its size, and at least so much in norm, by element.

    Integers and flags do not round.
    """
    if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        return 0.0, 0.0, 0.0
    info = torch.finfo(spec.dtype)
    least = info.smallest_normal * info.eps
    return _FLOOR * info.eps, least * math.sqrt(spec.numel), least
