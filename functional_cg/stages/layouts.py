"""Give results the strides that the trace saw, where a kernel may choose others.

A trace runs on fake tensors. Torch's formulas for their strides at times differ from what its kernels return. A later
call may rely on the strides of the trace: on others, a view fails, and `as_strided` reads the wrong elements. A kernel
may also return complex numbers as conjugates of what is in memory, which no formula says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .program import Instr, Var

__all__ = ["laid_out", "unsure"]


def unsure(instr: Instr) -> list[Var]:
    """Return the new results of a call whose strides a kernel may choose: complex ones, those of turned tensors."""
    if instr.op._schema.name == "fcg::compiled":  # what it returns lies as the trace says
        return []
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
    """Return a tensor in these strides; a copy if it has others. None stands for a result that a kernel omits.

    An attention kernel that needs no gradients omits the logarithms of its sums, although the schema promises them.
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
