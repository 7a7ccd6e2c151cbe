"""Other values for a comparison, made from the first batch, to show what that batch hides.

The first call may hide a mistake: behind a closed gate (a hinge, a clip, a condition on the number of steps), in a
product with ones and zeros, which does not round, or where numbers would overflow and do not yet. So the trial compares
the plan again on values like the first ones, with other signs, sizes and counts. It changes only slots and inputs that
may hold any value. It ignores runs in which single precision overflows: that depends on the order of the calls.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from ...tensors.op_table import row_of
from ..program import Instr, Program, Var
from ..sub_programs import each_once

__all__ = ["KINDS", "OVERFLOW", "Finite", "overflows", "vary"]

KINDS = ("positive", "negative", "large")
OVERFLOW = "overflow"

_HALF = frozenset({torch.float16, torch.bfloat16})
_STILL = frozenset({torch.uint16, torch.uint32, torch.uint64})  # which GPUs do not add
_SMALL = 0.01  # the size of numbers in place of zeros
_COUNT = 1000  # steps that counters are ahead
_HUGE = 2.0**17  # the largest number of float16 is 65,504


def overflows(program: Program) -> bool:
    """Whether a program has numbers that overflow where those of single precision do not."""
    return any(
        var.spec.dtype is torch.float16 for instr in each_once(program.instrs) for var in instr.outputs()
    )


def vary(tensor: Tensor, kind: str, seed: int, *, leaf: bool) -> None:
    """Overwrite a tensor with numbers made from its own.

    Args:
      tensor: The tensor.
      kind: Of :data:`KINDS`, or :data:`OVERFLOW`.
      seed: Says which numbers: on all ranks the same for the same leaf.
      leaf: Whether it is a slot: if all of its numbers are positive, as an optimizer's squares are, they stay so.
    """
    if tensor.dtype is torch.bool:
        tensor.copy_({"positive": tensor | True, "negative": tensor & False}.get(kind, ~tensor))
    elif not (tensor.is_floating_point() or tensor.is_complex()):
        if kind != OVERFLOW and tensor.dtype not in _STILL:
            tensor.add_(
                {"positive": min(_COUNT, torch.iinfo(tensor.dtype).max // 4), "negative": 3}.get(kind, 1)
            )
    elif tensor.itemsize > 1 and tensor.numel():
        generator = torch.Generator(tensor.device).manual_seed(seed)
        wide = tensor.real.dtype if tensor.is_complex() else tensor.dtype
        some = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=torch.float32).to(
            wide
        )
        tensor.copy_(_numbers(tensor, kind, some, leaf=leaf))


def _numbers(old: Tensor, kind: str, some: Tensor, *, leaf: bool) -> Tensor:
    if kind == OVERFLOW:
        by_itself = leaf or old.dtype in _HALF or not old.dim()
        return old if by_itself else old * (_HUGE / old.abs().max().clamp(min=1.0))
    if leaf and not old.dim():  # a rate or a decay
        return old * (1.0 - some / 4)
    if kind == "large" or old.is_complex():
        return old * (0.75 + some / 2) * (1.0 if leaf else 8.0)
    # Not much larger: what an attention makes of large scores is a difference of equal numbers, and no rounding.
    size = torch.where(old == 0, _SMALL, old.abs()) * (0.75 + some / 2) * (1.0 if leaf else 2.0)
    signed = bool((old < 0).any()) if leaf else True
    return -size if kind == "negative" and signed else size


class Finite:
    """Watches which calls turn finite numbers into others, in single or double precision.

    It ignores results in half precision of calls that round once. Calls that round on the way count: how often they
    do depends on the kernel.
    """

    def __init__(self) -> None:
        self._flags: list[Tensor] = []
        self._flag_of: dict[Var, int] = {}
        self._rows: list[tuple[Sequence[int], Sequence[int], Instr]] = []

    def __call__(self, instr: Instr, made: Sequence[tuple[Var, Tensor]]) -> None:
        read, wide = [self._flag_of[var] for var in instr.inputs() if var in self._flag_of], []
        # Where another call overflows in half precision, that is for its kernel to decide.
        once = row_of(instr.op).once
        for var, tensor in made:
            if tensor.itemsize > 1 and (tensor.is_floating_point() or tensor.is_complex()):
                self._flag_of[var] = len(self._flags)
                wide += [] if once and tensor.itemsize == 2 else [len(self._flags)]
                self._flags.append(tensor.isfinite().all())
        self._rows.append((read, wide, instr))

    def found(self) -> tuple[set[int], set[int]]:
        """Return the numbers of the calls at which finite numbers end, and of those that read what is not finite."""
        here = self._flags[0].device if self._flags else None
        known = torch.stack([one.to(here) for one in self._flags]).tolist() if self._flags else []
        meet = {number for number, (read, *_) in enumerate(self._rows) if not all(known[one] for one in read)}
        end = {
            number for number, (_, made, _) in enumerate(self._rows) if not all(known[one] for one in made)
        }
        return end - meet, meet

    def unclear(self, meet: Container[int]) -> set[int]:
        """Return the storages whose numbers depend on what a call of several operations makes of infinity.

        A kernel that interpolates multiplies it by zero where a formula does not.

        Args:
          meet: The calls that read infinity here, and not on other values, as a softmax of masked scores does.
        """
        found = set[int]()
        for number, (*_, instr) in enumerate(self._rows):
            row = row_of(instr.op)
            passes_on = row.once or row.moves or row.decides or instr.is_view or instr.by_element
            reads = not found.isdisjoint(var.storage for var in instr.inputs())
            if reads or (number in meet and not passes_on):
                found.update(var.storage for var in (*instr.outputs(), *instr.writes))
        return found
