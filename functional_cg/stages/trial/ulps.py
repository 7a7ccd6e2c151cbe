"""Measure what rounding does to a program: run it again with each call's results perturbed by an ulp.

Two programs that compute the same thing in another order round in different places. Nobody knows in advance how much
their results may differ: a sum of thousands of terms, the sign of a gradient near zero, a sampled token can each
amplify the last bits without limit. So we measure it: run one program again, perturb the results of its calls by an ulp
at random, and see how its outputs change.

We perturb Python numbers among the arguments, too: kernels hold them in float32, which costs three digits when an
optimizer subtracts its decay of 0.999 from 1.

We perturb only rounded results. A result whose last bits are zero, such as a whole number, counts as exact. So an
exact program shows no spread at all, and any result that is not equal to it is wrong.

Source: Parker 1997, "Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic".
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...tensors.op_table import row_of
from ...tensors.ulps import AWAY_FROM_ZERO, DOWN, MOVABLE, TO_ZERO, UP, move
from ..program import Instr, Var

__all__ = ["INTEGERS", "ORDERED", "Bounds", "Shaker", "bounds_of", "copies_arguments"]

Bounds = tuple[Tensor, Tensor]  # the least and the greatest number, without dimensions

_WIDE = MappingProxyType({torch.bfloat16: torch.float32, torch.float16: torch.float32})
_MOST_NARROW = 8  # ulps of a 16-bit dtype: more would change the number too much
INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
ORDERED = frozenset({*MOVABLE, *INTEGERS, torch.bool})  # dtypes whose numbers have bounds
_TF32 = 2.0**-11  # relative rounding of its factors
_IN_A_ROW = 16  # terms that are summed in a fixed order: in a vector unit, in a tile of a product


@dataclass(slots=True)
class Shaker:
    """Perturbs the results of calls at random, by up to ``most`` ulps.

    Attributes:
      most: Ulps, a whole number.
      decisions: Ulps by which to perturb the arguments of a deciding call (a comparison, ``argmax``, a rounding), for
        that call only.
      leans: Whether all elements of a result are perturbed in one direction: up, down, away from zero or towards it.
        Equal numbers round alike, so the error of a sum over thousands of them is thousands of times as large.
      dice: Draws for Python numbers, and the seeds for tensors.
    """

    most: int = 1
    decisions: int = 0
    leans: bool = False
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def before(
        self, bounds: Mapping[Instr, Mapping[Var, Bounds]], instr: Instr, values: dict[Var, Tensor]
    ) -> tuple[Instr, dict[Var, Tensor]]:
        """Return the call with other arguments, of which those that have bounds stay within them."""
        kept = {var: _within(values[var], known) for var, known in bounds.get(instr, {}).items()}
        moved = self.arguments(instr, values) | kept
        return self.scalars(instr), values | moved if moved else values

    def arguments(self, instr: Instr, values: Mapping[Var, Tensor]) -> dict[Var, Tensor]:
        """Return perturbed arguments that replace some of a call's own."""
        most = self.decisions if _decides(instr) else self.most if row_of(instr.op).cancels else 0
        if not most:
            return {}
        moved = {}
        for var in dict.fromkeys(instr.inputs()):
            if values[var].dtype in MOVABLE and var not in instr.writes:
                moved[var] = values[var].clone()
                self.move(moved[var], most, 0.0)
        return moved

    def scalars(self, instr: Instr) -> Instr:
        """Return the call with its Python numbers rounded as kernels may hold them."""
        kwargs = {name: self._moved(value) for name, value in instr.kwargs.items()}
        return replace(instr, args=self._moved(instr.args), kwargs=kwargs)

    def _moved(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(self._moved, value))
        if not isinstance(value, float) or not math.isfinite(value) or _is_single(value):
            return value
        return value * (1.0 + self.dice.randint(-self.most, self.most) * 2.0**-24)

    def after(self, instr: Instr, made: Sequence[tuple[Var, Tensor]]) -> None:
        """Perturb the results of a call, in place."""
        if row_of(instr.op).moves or instr.is_view:
            return
        taken = {var.storage for var in instr.inputs()}
        # Other calls, such as index_add_, write only some elements.
        if instr.by_element or instr.op._overloadname.endswith("out"):
            taken -= {var.storage for var in instr.writes}
        for var, tensor in made:
            if var.storage not in taken:
                most = min(self.most, _MOST_NARROW) if tensor.dtype in _WIDE else self.most
                self.move(tensor, most, _spread(instr, tensor) * most)

    def move(self, tensor: Tensor, most: int, spread: float) -> None:
        """Perturb a tensor that shares no memory; ``spread`` is relative to its root mean square."""
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.dtype not in MOVABLE or not tensor.numel():
            return
        flat = _flat_in_memory(tensor)
        if flat is None:
            return
        direction = self.dice.choice((UP, DOWN, AWAY_FROM_ZERO, TO_ZERO)) if self.leans else 0
        seed, scale = self.dice.getrandbits(31), spread / math.sqrt(tensor.numel())
        root = torch.linalg.vector_norm(flat, dtype=_WIDE.get(flat.dtype)) if spread else None
        move(flat, most, root, scale, seed, direction)


def _is_single(value: float) -> bool:
    """Whether float32 holds a number exactly, or not at all."""
    return ctypes.c_float(value).value in (value, math.inf, -math.inf)


def _flat_in_memory(tensor: Tensor) -> Tensor | None:
    """Return the elements of a dense tensor in memory order; None if it is not dense, or a zero without memory."""
    if torch._is_zerotensor(tensor):  # the tangent of a constant
        return None
    strides = tensor.stride()
    flat = tensor.permute(sorted(range(tensor.dim()), key=lambda axis: -strides[axis]))
    return flat.view(-1) if flat.is_contiguous() else None


def bounds_of(value: Tensor) -> Bounds:
    """Return the least and the greatest number of a tensor; infinite ones if it holds NaN."""
    low, high = value.aminmax()
    if not value.is_floating_point():
        return low, high
    return low.nan_to_num(-math.inf, math.inf, -math.inf), high.nan_to_num(math.inf, math.inf, -math.inf)


def _within(value: Tensor, bounds: Bounds) -> Tensor:
    """Return a tensor whose numbers are within bounds."""
    low, high = bounds
    return (value | low) & high if value.dtype is torch.bool else value.clamp(low, high)


def copies_arguments(instr: Instr) -> bool:
    """Whether a shaker may perturb arguments of a call, and so copies them."""
    return _decides(instr) or row_of(instr.op).cancels


def _decides(instr: Instr) -> bool:
    """Whether a call maps many values to few: a comparison, a sort, a cast to a non-floating or 8-bit dtype."""
    narrows = instr.name == "_to_copy" and all(out.spec.dtype not in MOVABLE for out in instr.outputs())
    return row_of(instr.op).decides or narrows


def _spread(instr: Instr, result: Tensor) -> float:
    """Return how far sums of the same terms in another order differ, relative to their root mean square."""
    if not isinstance(instr.out, Var) and any(isinstance(out, (list, tuple)) for out in instr.out):
        return 0.0  # one of the grouped ops, which are elementwise
    row = row_of(instr.op)
    terms = _terms(instr, result, product=row.product or row.library)
    precise = torch.finfo(
        torch.float64 if result.dtype in (torch.float64, torch.complex128) else torch.float32
    )
    spread = precise.eps * math.sqrt(terms / _IN_A_ROW) if terms > _IN_A_ROW else 0.0
    return spread + (_TF32 if row.library and _in_tf32(instr.name, result) else 0.0)


def _terms(instr: Instr, result: Tensor, *, product: bool) -> float:
    """Estimate how many terms are summed in each element of a result."""
    sizes = sorted((var.spec.numel for var in instr.inputs()), reverse=True)
    if not sizes or not result.numel():
        return 0.0
    if product and len(sizes) > 1:
        return math.sqrt(sizes[0] * sizes[1] / result.numel())
    return sizes[0] / result.numel()


def _in_tf32(name: str, result: Tensor) -> bool:
    """Whether a product may round its factors to TF32; convolutions do by torch's default."""
    may = name.startswith("convolution") or torch.get_float32_matmul_precision() != "highest"
    return may and result.is_cuda and result.dtype == torch.float32
