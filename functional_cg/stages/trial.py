"""The trial of a compiled plan: does it compute what the program says, on real values, before it may commit anything?

The judge is the program as it was traced, run call by call. A compiler rounds elsewhere, so the results differ, by as
much as rounding makes of them: by how much is found out by running the program again, with what its calls return moved
by an ulp (:mod:`functional_cg.stages.ulps`). A leaf that lies further off than a few times what such runs do is not
rounding. What jumps (a token that is drawn, a route that is taken) jumps in some of these runs, too: before anything is
refused, more of them look further.

Two steps are compared, the second from where the first has led: at the first a learning rate that warms up is zero, an
average is what it averages, and what is written too early is not seen.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..source import Location
from .lower import Buffers, ExecutionPlan, quiet
from .reference import Reference
from .ulps import CHUNK, Shaker

__all__ = ["Certificate", "Difference", "Space", "Trial"]

_log = logging.getLogger("functional_cg")
# Runs that measure rounding: by how many ulps results are moved, and what is decided by; how many times what such a
# run makes of a result it may lie off. Where nothing jumps, what a run makes of it grows with the ulps: each of them
# says the same then.
_RUNS = (
    (1, 0, 8.0),
    (1, 0, 8.0),
    *((most, 8 * most, max(8.0 / most, 2.0)) for most in (1, 2, 4, 8) for _ in "1234"),
)
_FLOOR = 2.0  # ulps of the result itself


@dataclass(frozen=True, slots=True)
class Certificate:
    """Whether a compiled plan was compared with its program. It prints as a line of ``explain()``.

    Attributes:
      certified: Whether it was, and computes the same.
      why_not: Why it was not.
      share: The largest difference, in parts of what rounding explains.
    """

    certified: bool
    why_not: str = ""
    share: float = 0.0

    def __str__(self) -> str:
        if not self.certified:
            return f"not certified: {self.why_not}"
        found = (
            f"differences come to {self.share:.0%} of what rounding explains" if self.share else "bit by bit"
        )
        return f"certified: on the values of the first call it computes what its calls do one by one; {found}"


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


class Space(Protocol):
    """Static buffers with the values of a call, in which a trial may write.

    Attributes:
      buffers: The buffers.
    """

    buffers: Buffers

    def reset(self) -> None:
        """Put the values of the call into the slots again."""
        ...

    def room(self) -> int | None:
        """Bytes that the reference may take; None if that is no matter."""
        ...

    def keep(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Copies of values, where they are not in the way."""
        ...


class Trial:
    """A plan beside its program.

    Args:
      reference: The program.
      plan: The plan.
      together: ``together(flag)`` says whether the flag is set here, or on another rank that does the same.

    Attributes:
      lacking: Bytes that the program takes and that there is no room for; then nothing was compared.
      share: The largest difference that was found, in parts of what rounding explains.
    """

    def __init__(self, reference: Reference, plan: ExecutionPlan, together: Callable[[bool], bool]) -> None:
        self._reference, self._plan, self._together = reference, plan, together
        self._leaves = [
            (place, out.slot) for place, out in enumerate(reference.outputs) if out.slot is not None
        ]
        self.lacking = 0
        self.share = 0.0

    def rehearse(self, buffers: Buffers, scratch: Sequence[Tensor]) -> None:
        """Compile the plan, and run it once, on other inputs: what it keeps of them shows in the trial.

        Args:
          buffers: Static buffers with the values of the call, which stay as they are.
          scratch: Slots for a warm-up.
        """
        zeros = replace(buffers, inputs=[torch.zeros_like(one) for one in buffers.inputs])
        with quiet():
            self._plan.bind(zeros)  # compiles it, for slots that do not overlap
            run = self._plan.bind(replace(zeros, slots=scratch))
            try:
                run(())
            except (
                Exception
            ) as error:  # zeros may be what a kernel of the host refuses, such as a singular matrix
                _log.debug("not rehearsed: %s", error)

    def differences(self, space: Space) -> list[Difference]:
        """What the plan computes otherwise; empty if it is what the program says but for rounding, or was not compared.

        Args:
          space: Where the plan and the program run.
        """
        slots = space.buffers.slots
        with quiet():
            run = self._plan.bind(space.buffers)
            first = self._outputs(slots, run(()))
        space.reset()
        if not self._fits(space.room()):
            return []
        found = self._compared(first, space.buffers)
        if self._together(bool(found)) or not self._leaves:
            return found
        led_to = space.keep([first[place] for place, _ in self._leaves])
        del first
        self._write(slots, led_to)
        with quiet():
            second = self._outputs(slots, run(()))
        self._write(slots, led_to)
        return self._compared(second, space.buffers)

    def _fits(self, room: int | None) -> bool:
        if room is None:
            return True
        needed = self._reference.fit(room)
        if not self._together(needed > room):
            return True
        self.lacking = max(needed - room, 1)
        return False

    def _outputs(self, slots: Sequence[Tensor], metrics: Sequence[Tensor]) -> list[Tensor]:
        """A copy of each output, after the plan has run."""
        left = iter(metrics)
        return [(next(left) if o.slot is None else slots[o.slot]).clone() for o in self._reference.outputs]

    def _write(self, slots: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for (_, slot), value in zip(self._leaves, values, strict=True):
            slots[slot].copy_(value)

    def _compared(self, got: Sequence[Tensor], buffers: Buffers) -> list[Difference]:
        """How the outputs of a step lie from what the program makes of the buffers."""
        reference = self._reference
        expected = [value.clone() for value in reference.run(buffers)]
        off = [_distance(one, other) for one, other in zip(got, expected, strict=True)]
        limits = [_floor(value) for value in expected]
        generator, dice = torch.Generator(_device(buffers)).manual_seed(0), random.Random(0)
        for most, decisions, factor in _RUNS:
            if not self._together(not all(map(_Distance.within, off, limits))):
                self.share = max([self.share, *map(_Distance.share, off, limits)])
                return []
            for number, value in enumerate(reference.run(buffers, Shaker(generator, most, decisions, dice))):
                limits[number] = limits[number].or_more(_distance(expected[number], value).times(factor))
        return [
            Difference(out.name, apart.greatest, limit.greatest, reference.site_of(out.var))
            for out, apart, limit in zip(reference.outputs, off, limits, strict=True)
            if not apart.within(limit)
        ]


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

    def share(self, limit: _Distance) -> float:
        """Which part of a limit, within which it is, it comes to."""
        if not math.isfinite(limit.greatest):
            return 0.0
        return max(self.norm / (limit.norm or 1.0), self.greatest / (limit.greatest or 1.0))


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
        yield from tensor.reshape(-1).split(CHUNK)
