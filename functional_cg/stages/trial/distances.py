"""Distances: how far tensors are apart, measured for many small ones at a time.

A distance is a row of two numbers, f64: the Euclidean norm of the difference, and its greatest element. Where only one
of two elements is finite, the second is infinite, and the norm is that of the other elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...state.arena import BufferSpec

__all__ = ["Distances", "between", "rounded"]

_AT_ONCE = 2**24  # elements to measure at a time
_CAREFULLY = 2**20  # likewise, with several copies in double precision
_FLOOR = 2.0  # ulps
_FAR = 1e300  # stands for infinity, and twice as much for NaN: equal ones are 0 apart, others farther than all numbers
_differences = torch.ops.aten._foreach_sub.List
_norms = torch.ops.aten._foreach_norm.Scalar


class Distances:
    """Measures how far tensors are from expected ones; reading the distances waits for the GPU.

    NaN equals NaN, and equal infinities match. Of integers and flags, such as tokens, each element that differs counts
    1, by however much.

    Args:
      finite: Whether to take all elements for finite: that is quicker, and a distance is NaN or infinite if one is not.
    """

    def __init__(self, *, finite: bool = False) -> None:
        self._finite = finite
        self._at_once = _AT_ONCE if finite else _CAREFULLY
        # By device and dtype: pieces with their rows, and how many elements they have.
        self._waiting: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor, Tensor]]] = {}
        self._counts: dict[tuple[torch.device, torch.dtype], int] = {}
        # Rows with their norms.
        self._measured: list[tuple[Sequence[int], Tensor]] = []
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
        for piece, other in zip(self._pieces(one), self._pieces(expected), strict=True):
            group = piece.device, piece.dtype
            self._waiting.setdefault(group, []).append((number, piece, other))
            self._counts[group] = self._counts.get(group, 0) + len(piece)
            # What is left of a large tensor would keep all of it alive.
            if self._counts[group] >= self._at_once or one.numel() > self._at_once:
                self._measure(group)

    def known(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the distances, f64[count, 2], and how far what was expected is from zero, 0 for integers."""
        self.measure()
        found = [(0.0, 0.0, 0.0, 0.0)] * count
        for numbers, norms in self._measured:
            for number, (apart, greatest, size, largest) in zip(numbers, norms.T.tolist(), strict=True):
                a, b, c, d = found[number]
                found[number] = math.hypot(a, apart), max(b, greatest), math.hypot(c, size), max(d, largest)
        known, sizes = torch.tensor(found, dtype=torch.float64).view(count, 2, 2).unbind(1)
        known[known > _FAR / 2] = math.inf
        known[self._unlike] = math.nan
        return known, sizes

    def measure(self) -> None:
        """Measure all that waits, without waiting for the GPU."""
        for group in self._waiting:
            self._measure(group)
        by_device: dict[torch.device, list[tuple[Sequence[int], Tensor]]] = {}
        for part in self._measured:
            by_device.setdefault(part[1].device, []).append(part)
        self._measured = [_joined(parts) for parts in by_device.values()]

    def _measure(self, group: tuple[torch.device, torch.dtype]) -> None:
        waiting, self._waiting[group], self._counts[group] = self._waiting[group], [], 0
        if not waiting:
            return
        device, dtype = group
        numbers, ones, others = zip(*waiting, strict=True)
        sizes = [piece.to(device) for piece in others]
        if dtype is torch.int64:
            finite = apart = [(one != other).float() for one, other in zip(ones, sizes, strict=True)]
            sizes = [torch.zeros_like(one) for one in apart]
        elif self._finite:
            finite = apart = _differences(ones, sizes)
        else:
            finite, apart, sizes = _carefully(ones, sizes)
        norms = [
            _norms(of, order, torch.float64)
            for of, order in ((finite, 2), (apart, math.inf), (sizes, 2), (sizes, math.inf))
        ]
        self._measured.append((numbers, torch.stack([*map(torch.stack, norms)])))

    def _pieces(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the elements in logical order, complex ones as pairs, as f32, f64 or i64."""
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        exact = torch.float64 if tensor.dtype is torch.float64 else torch.float32
        dtype = exact if tensor.is_floating_point() else torch.int64
        for piece in tensor.reshape(-1).split(self._at_once) if tensor.numel() else ():
            yield piece.to(dtype)


def _carefully(ones: Sequence[Tensor], others: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the differences of finite elements, those of all, and what was expected, with zeros for the rest of it."""
    one, other = (torch.cat([*pieces]).double() for pieces in (ones, others))
    size = other.nan_to_num(0.0, 0.0, 0.0)
    apart = _all_finite(one).sub_(_all_finite(other))
    # Zero for what is not far.
    far = torch.nn.functional.hardshrink(apart, _FAR / 2)
    counts = [len(piece) for piece in ones]
    return [[*of.split(counts)] for of in (apart - far, apart, size)]


def _all_finite(numbers: Tensor) -> Tensor:
    """Replace, in place, what is not finite by numbers far from all others, and from each other."""
    return numbers.nan_to_num_(2 * _FAR, _FAR, -_FAR)


def _joined(parts: Sequence[tuple[Sequence[int], Tensor]]) -> tuple[Sequence[int], Tensor]:
    """Join what is read at once. A graph may write a part at each replay, so a single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    return [number for numbers, _ in parts for number in numbers], torch.cat([norms for _, norms in parts], 1)


def between(outputs: Sequence[Tensor], expected: Sequence[Tensor], *, finite: bool = False) -> Distances:
    """Measure how far each output is from what it should be."""
    found = Distances(finite=finite)
    for number, (one, other) in enumerate(zip(outputs, expected, strict=True)):
        found.add(number, one, other)
    return found


def rounded(specs: Sequence[BufferSpec]) -> tuple[Tensor, Tensor]:
    """Return what rounding of a result itself explains: a part of its size, f64[n, 1], and at least so much, f64[n, 2].

    Args:
      specs: Shapes and dtypes of results; integers and flags do not round.
    """
    table = torch.tensor([_explained(spec) for spec in specs], dtype=torch.float64).view(-1, 3)
    return table[:, :1], table[:, 1:]


def _explained(spec: BufferSpec) -> tuple[float, float, float]:
    """Return the part of its size, and at least how much: as a norm, and by element."""
    if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        return 0.0, 0.0, 0.0
    info = torch.finfo(spec.dtype)
    least = info.smallest_normal * info.eps
    return _FLOOR * info.eps, least * math.sqrt(spec.numel), least
