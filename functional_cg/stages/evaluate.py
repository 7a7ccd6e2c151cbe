"""Run recorded calls one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .program import Instr, Var, map_vars

__all__ = ["AS_STRIDED", "as_strided", "assigned", "evaluate", "evaluate_all", "quiet"]

AS_STRIDED = torch.ops.aten.as_strided.default


def as_strided(
    traced: int, tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor:
    """Call ``torch.as_strided`` with the storage offset corrected: slots lie elsewhere than in the trace."""
    if offset is not None:
        offset += int(tensor.storage_offset()) - traced
    return torch.as_strided(tensor, size, stride, offset)


def evaluate(instr: Instr, value: Callable[[Var], Any]) -> Any:
    """Run a single call.

    Args:
      instr: The call.
      value: Maps a variable to its tensor.
    """
    args = [value(one) if type(one) is Var else map_vars(value, one) for one in instr.args]
    kwargs = {name: map_vars(value, item) for name, item in instr.kwargs.items()} if instr.kwargs else {}
    if instr.op is AS_STRIDED:
        return as_strided(instr.args[0].offset, *args, **kwargs)
    return getattr(instr.op, "_op", instr.op)(*args, **kwargs)  # as in a plan


def evaluate_all(instrs: Iterable[Instr], values: dict[Var, Any]) -> None:
    """Run calls one by one, and add their results to the values of the variables before."""
    for instr in instrs:
        values.update(assigned(instr.out, evaluate(instr, values.__getitem__)))


def assigned(out: Any, value: Any) -> Iterator[tuple[Var, Any]]:
    """Yield the variables of a result with their values: tensors, or None for what a kernel omits."""
    if isinstance(out, Var):
        yield out, value
    elif isinstance(out, (list, tuple)):
        for one, part in zip(out, value, strict=True):
            yield from assigned(one, part)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Enter the modes in which a plan runs: plain tensors, no autograd."""
    with torch.inference_mode(False), torch.no_grad():
        yield
