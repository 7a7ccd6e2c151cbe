"""The trial of a compiled plan: does it compute what the program says, on real values, before it may commit anything?

The judge is the program as it was traced, run call by call. A compiler rounds elsewhere, so the results differ, by as
much as rounding makes of them: by how much is found out by running the program again, with what its calls return moved
by an ulp (:mod:`functional_cg.stages.ulps`). A leaf that lies further off than a few times what such runs do is not
rounding. What jumps (a token that is drawn, a route that is taken) jumps in some of these runs, too: before anything is
refused, more of them look further.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..source import Location
from .lower import Buffers, ExecutionPlan, quiet
from .reference import Reference
from .ulps import Shaker

__all__ = ["Certificate", "Difference", "Trial"]

# Runs that measure rounding: by how many ulps results are moved, and what is decided by; how many times what such a
# run makes of a result it may lie off. Where nothing jumps, what a run makes of it grows with the ulps: each of them
# says the same then.
_RUNS = (
    (1, 0, 8.0),
    (1, 0, 8.0),
    *((most, 8 * most, max(8.0 / most, 2.0)) for most in (1, 2, 4, 8) for _ in "1234"),
)
_FLOOR = 2.0  # ulps of the result itself
_CHUNK = 2**22  # elements


@dataclass(frozen=True, slots=True)
class Certificate:
    """Whether a compiled plan was compared with its program. It prints as a line of ``explain()``.

    Attributes:
      certified: Whether it was, and computes the same.
      why_not: Why it was not.
    """

    certified: bool
    why_not: str = ""

    def __str__(self) -> str:
        if self.certified:
            return "certified: on the values of the first call, the compiled plan computes what the traced calls do"
        return f"not certified: {self.why_not}"


@dataclass(frozen=True, slots=True)
class Difference:
    """A result that is not what the program says.

    Attributes:
      name: Key path of the leaf or metric.
      greatest: The greatest difference of an element.
      rounding: How much of it rounding may explain.
      site: The user's line that computes it.
    """

    name: str
    greatest: float
    rounding: float
    site: Location | None

    def __str__(self) -> str:
        where = f", computed at {self.site}" if self.site is not None else ""
        return f"{self.name}  differs by {self.greatest:.3g}, of which rounding explains {self.rounding:.3g}{where}"


@dataclass(slots=True)
class Trial:
    """What a plan has made of real values, to be compared with the program.

    Attributes:
      reference: The program.
      got: What the plan computes in place of the program's outputs, on the host.
    """

    reference: Reference
    got: list[Tensor]

    @classmethod
    def of(cls, reference: Reference, plan: ExecutionPlan, buffers: Buffers) -> Trial:
        """Run a plan once on buffers that it may write."""
        with quiet():
            metrics = iter(plan.bind(buffers)(()))
            return cls(
                reference,
                _aside(
                    [
                        next(metrics) if out.slot is None else buffers.slots[out.slot]
                        for out in reference.outputs
                    ]
                ),
            )

    def differences(self, buffers: Buffers, together: Callable[[bool], bool]) -> list[Difference]:
        """What the plan computes otherwise; empty if it is what the program says but for rounding.

        Args:
          buffers: The values that the plan has run on; they are only read.
          together: ``together(flag)`` says whether the flag is set here, or on another rank that does the same.
        """
        first = self.reference.run(buffers)
        off = [_distance(one, other) for one, other in zip(self.got, first, strict=True)]
        limits = [_floor(value) for value in first]
        expected = _aside(first)
        del first
        generator = torch.Generator(_device(buffers)).manual_seed(0)
        for most, decisions, factor in _RUNS:
            if not together(not all(map(_Distance.within, off, limits))):
                return []
            for number, value in enumerate(self.reference.run(buffers, Shaker(generator, most, decisions))):
                limits[number] = limits[number].or_more(_distance(expected[number], value).times(factor))
        return [
            Difference(out.name, apart.greatest, limit.greatest, self.reference.site_of(out.var))
            for out, apart, limit in zip(self.reference.outputs, off, limits, strict=True)
            if not apart.within(limit)
        ]


def _aside(values: Sequence[Tensor]) -> list[Tensor]:
    """Values on the host, where they take none of the device's memory."""
    return [value.to("cpu", copy=True) for value in values]


def _device(buffers: Buffers) -> torch.device:
    tensors = (*buffers.slots, *buffers.inputs, *buffers.constants)
    return next((tensor.device for tensor in tensors if not tensor.is_cpu), torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class _Distance:
    """How far apart two tensors are.

    Attributes:
      norm: Of the difference; of whole numbers and flags, the root of how many differ.
      greatest: The greatest difference of an element.
    """

    norm: float
    greatest: float

    def times(self, factor: float) -> _Distance:
        return _Distance(self.norm * factor, self.greatest * factor)

    def or_more(self, other: _Distance) -> _Distance:
        return _Distance(max(self.norm, other.norm), max(self.greatest, other.greatest))

    def within(self, limit: _Distance) -> bool:
        return self.norm <= limit.norm and self.greatest <= limit.greatest


def _distance(kept: Tensor, value: Tensor) -> _Distance:
    """The distance of two tensors of one shape and dtype; a NaN is as good as another, and so is an infinity."""
    norm = greatest = 0.0
    for one, other in zip(_numbers(kept), _numbers(value), strict=True):
        one = one.to(other.device)
        if not one.is_floating_point():
            apart = one != other
            norm += float(apart.sum())
            # Which numbers they are says nothing: of two tokens one is as far off as the other.
            greatest = max(greatest, float(apart.any()))
            continue
        one, other = one.double(), other.double()
        same = (one == other) | (one.isnan() & other.isnan())
        apart = torch.where(same, 0.0, one - other).abs()
        norm += float(apart.square().sum())
        greatest = max(greatest, float(apart.max()))
    unknown = math.isnan(norm) or math.isnan(greatest)
    return _Distance(math.inf, math.inf) if unknown else _Distance(math.sqrt(norm), greatest)


def _floor(value: Tensor) -> _Distance:
    """What the rounding of a result itself may make of it."""
    if not (value.is_floating_point() or value.is_complex()):
        return _Distance(0.0, 0.0)
    spacing = torch.finfo(value.dtype)
    norm = greatest = 0.0
    for part in _numbers(value):
        finite = torch.where(part.isfinite(), part, 0.0).double().abs()
        norm += float(finite.square().sum())
        greatest = max(greatest, float(finite.max()))
    smallest = spacing.smallest_normal * spacing.eps
    return (
        _Distance(math.sqrt(norm), greatest)
        .times(_FLOOR * spacing.eps)
        .or_more(_Distance(smallest * math.sqrt(value.numel()), smallest))
    )


def _numbers(tensor: Tensor) -> Iterator[Tensor]:
    """The elements in logical order, some at a time, complex ones as pairs, in a dtype that computes."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point() and tensor.itemsize == 1:
        tensor = tensor.float()
    if tensor.numel():
        yield from tensor.reshape(-1).split(_CHUNK)
