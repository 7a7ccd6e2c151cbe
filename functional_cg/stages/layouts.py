"""Hold results to the strides that the trace saw, where a kernel may choose others.

A trace runs on fake tensors, whose formulas for strides are torch's own and are at times not those of its kernels. A
later call may rely on them: a view fails on other strides, and `as_strided` reads other elements. Nor does a formula
know that a kernel returns complex numbers as conjugates of what is in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .program import Instr, Var

__all__ = ["laid_out", "unsure"]


def unsure(instr: Instr) -> list[Var]:
    """Return the new results of a call whose strides a kernel may choose: complex ones, those of turned tensors."""
    turned = not all(_in_order(var) for var in instr.inputs())
    known = {var.storage for var in instr.inputs()}
    return [
        var
        for var in instr.outputs()
        if len(var.spec.shape) > 1
        and (turned or var.spec.dtype.is_complex)
        and var.storage not in known
        and not _expanded(var)
    ]


def laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a tensor in these strides; a copy if it has others. None, for a result that a kernel omits, stays None.

    An attention without gradients omits the logarithms of its sums, which a trace, and the op's schema, know of.
    """
    if tensor is None:
        return tensor
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    here = tensor.stride()
    if here == stride or not tensor.numel():
        return tensor
    if all(size == 1 or a == b for size, a, b in zip(tensor.shape, here, stride, strict=True)):
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _in_order(var: Var) -> bool:
    """Whether the elements of a tensor lie in the order of its dimensions, with or without gaps."""
    steps = [step for size, step in zip(var.spec.shape, var.spec.stride, strict=True) if size > 1]
    return steps == sorted(steps, reverse=True)


def _expanded(var: Var) -> bool:
    """Whether several elements share memory, as a fake result may say; that of a kernel has memory for each."""
    return any(size > 1 and step == 0 for size, step in zip(var.spec.shape, var.spec.stride, strict=True))
