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

_CHUNK = 2**20  # elements to measure at a time
# Elements that a first reduction takes together: all of a GPU reduces, whatever tensor they are of.
_ROW = 2**8
_FLOOR = 2.0  # ulps
_FAR = 1e300  # stands for infinity, and twice as much for NaN: equal ones are 0 apart, others farther than all numbers
_norms = torch.ops.aten._foreach_norm.Scalar


class Distances:
    """Measures how far tensors are from expected ones; reading the distances waits for the GPU.

    NaN equals NaN, and equal infinities match. Of integers and flags, such as tokens, each element that differs counts
    1, by however much.
    """

    def __init__(self) -> None:
        # By device, and whether they are integers or flags: pieces with their rows, and how many elements they have.
        self._waiting: dict[tuple[torch.device, bool], list[tuple[int, Tensor, Tensor]]] = {}
        self._counts: dict[tuple[torch.device, bool], int] = {}
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
        group = one.device, not (one.is_floating_point() or one.is_complex())
        for piece, other in zip(_pieces(one), _pieces(expected), strict=True):
            self._waiting.setdefault(group, []).append((number, piece, other))
            self._counts[group] = self._counts.get(group, 0) + _rows(piece) * _ROW
            if self._counts[group] >= _CHUNK:
                self._measure(group)
        if one.numel() > _CHUNK:  # what is left would keep all of it alive
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

    def _measure(self, group: tuple[torch.device, bool]) -> None:
        waiting, self._waiting[group], self._counts[group] = self._waiting[group], [], 0
        if not waiting:
            return
        device, is_discrete = group
        numbers, ones, others = zip(*waiting, strict=True)
        one, other = _in_rows(ones), _in_rows([piece.to(device) for piece in others])
        if is_discrete:
            apart = (one != other).double()
            size = torch.zeros_like(apart)
        else:
            one, other = one.double(), other.double()
            size = other.nan_to_num(0.0, 0.0, 0.0)
            apart = _all_finite(one).sub_(_all_finite(other))
        counts = [_rows(piece) for piece in ones]
        far = torch.nn.functional.hardshrink(apart, _FAR / 2)  # zero for what is not
        finite = apart - far
        norms = [
            _norms(torch.linalg.vector_norm(of, order, 1).split(counts), order)
            for of, order in ((finite, 2), (apart, math.inf), (size, 2), (size, math.inf))
        ]
        self._measured.append((numbers, torch.stack([*map(torch.stack, norms)])))


def _all_finite(numbers: Tensor) -> Tensor:
    """Replace, in place, what is not finite by numbers far from all others, and from each other."""
    return numbers.nan_to_num_(2 * _FAR, _FAR, -_FAR)


def _rows(piece: Tensor) -> int:
    return -(-len(piece) // _ROW)


def _in_rows(pieces: Sequence[Tensor]) -> Tensor:
    """Join pieces as a matrix; the last row of each is filled with zeros."""
    zeros = pieces[0].new_zeros(_ROW)
    filled = (part for piece in pieces for part in (piece, zeros[: -len(piece) % _ROW]))
    return torch.cat([*filled]).view(-1, _ROW)


def _joined(parts: Sequence[tuple[Sequence[int], Tensor]]) -> tuple[Sequence[int], Tensor]:
    """Join what is read at once. A graph may write a part at each replay, so a single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    return [number for numbers, _ in parts for number in numbers], torch.cat([norms for _, norms in parts], 1)


def between(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> Distances:
    """Measure how far each output is from what it should be."""
    found = Distances()
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


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements in logical order, complex ones as pairs, in a dtype that others of its kind fit into."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    narrow = torch.float32 if tensor.itemsize == 1 else tensor.dtype
    dtype = narrow if tensor.is_floating_point() else torch.int64
    for piece in tensor.reshape(-1).split(_CHUNK) if tensor.numel() else ():
        yield piece.to(dtype)
