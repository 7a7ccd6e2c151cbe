"""Which calls run row by row: on some of the rows of their arguments, they make the same rows of their result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ...state.arena import BufferSpec
from ...tensors.aten import named_arguments
from ..program import Instr, Var

__all__ = [
    "COPIES",
    "DIM",
    "FILLED",
    "MEAN",
    "PICKS",
    "SUM",
    "VIEWS",
    "Rows",
    "is_dense",
    "is_half",
    "name_of",
    "rows_of",
    "viewed",
]

VIEWS = frozenset({"view", "_unsafe_view", "reshape"})
_SOFTMAX = frozenset(
    {"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "logsumexp"}
)
PICKS = frozenset({"gather", "scatter", "scatter_add"})
DIM: Mapping[str, int] = MappingProxyType(  # the place of the dimension among the arguments
    {
        "_softmax": 1,
        "_log_softmax": 1,
        "_softmax_backward_data": 2,
        "_log_softmax_backward_data": 2,
        "scatter": 1,
        "scatter_add": 1,
    }
)
_SUMS = frozenset({"sum", "mean", "amax", "amin", "argmax"})
# The place of the shape among the arguments of calls that make one number everywhere.
FILLED: Mapping[str, int] = MappingProxyType({"full": 0, "zeros": 0, "new_zeros": 1, "new_full": 1})
COPIES = frozenset({"_to_copy", "clone", "detach", "alias"})
SUM, MEAN = 2, 1  # how torch numbers the reductions of a loss


@dataclass(slots=True)
class Rows:
    """How to run a call on some rows.

    Attributes:
      sliced: Arguments of which it reads the same rows.
      sums: Whether its results are sums over all rows instead of rows.
    """

    sliced: Sequence[Var]
    sums: bool = False


def name_of(instr: Instr) -> str:
    """Return the name of an op without its overload, unless that is another op: a view of another dtype."""
    name = str(instr.op._schema.name).removeprefix("aten::")
    return f"{name}.dtype" if instr.op._overloadname == "dtype" else name


def viewed(instr: Instr, var: Var) -> Var | None:
    """Return the argument that shares its memory with a result, if there is one."""
    return next((one for one in instr.inputs() if one.storage == var.storage), None)


def rows_of(instr: Instr) -> Rows | None:
    """Return which arguments a call reads row by row to make the same rows; None if that is not known."""
    name = name_of(instr)
    rule: Callable[[Instr], Rows | None] | None = None
    if name in VIEWS:
        rule = _of_view
    elif name == "nll_loss_forward":
        rule = _of_loss
    elif name == "nll_loss_backward":
        rule = _of_loss_backward
    elif name in _SOFTMAX:
        rule = _along_other_axes
    elif name in PICKS:
        rule = _of_places
    elif name in _SUMS:
        rule = _of_sum
    elif name in FILLED:
        rule = _of_filled
    elif instr.by_element or name in COPIES:
        rule = _of_elements
    return rule(instr) if rule is not None else None


def is_half(spec: BufferSpec) -> bool:
    return spec.dtype in (torch.float16, torch.bfloat16)


def is_dense(var: Var) -> bool:
    step, strides = 1, []
    for size in reversed(var.spec.shape):
        strides.append(step)
        step *= size
    return var.spec.stride == tuple(reversed(strides))


def _of_view(instr: Instr) -> Rows | None:
    (source,) = instr.inputs()
    if not source.spec.shape or not instr.out.spec.shape or not is_dense(source):
        return None
    return Rows([source])


def _of_filled(instr: Instr) -> Rows | None:
    return (
        Rows([]) if instr.out.spec.shape and all(not var.spec.shape for var in instr.inputs()[1:]) else None
    )


def _of_elements(instr: Instr) -> Rows | None:
    if not isinstance(instr.out, Var) or not instr.out.spec.shape:
        return None
    shape, sliced = instr.out.spec.shape, []
    for var in dict.fromkeys(instr.inputs()):
        if len(var.spec.shape) == len(shape) and var.spec.shape[0] == shape[0]:
            sliced.append(var)
        elif len(var.spec.shape) == len(shape) and var.spec.shape[0] != 1:
            return None
    return Rows(sliced) if sliced else None


def _along_other_axes(instr: Instr) -> Rows | None:
    named = named_arguments(instr.op, instr.args, instr.kwargs)
    sliced = [*dict.fromkeys(instr.inputs())]
    dims = named["dim"] if isinstance(named["dim"], (list, tuple)) else [named["dim"]]
    axes = len(sliced[0].spec.shape)
    if not isinstance(instr.out, Var) or not instr.out.spec.shape or any(dim % axes == 0 for dim in dims):
        return None
    return Rows(sliced)


def _of_places(instr: Instr) -> Rows | None:
    rows = {var.spec.shape[:1] for var in (*instr.inputs(), *instr.outputs()) if var.spec.shape}
    return _along_other_axes(instr) if len(rows) == 1 else None  # there may be fewer rows of places


def _of_sum(instr: Instr) -> Rows | None:
    named = named_arguments(instr.op, instr.args, instr.kwargs)
    if named.get("dim") is None:
        whole = name_of(instr) in ("sum", "mean") and bool(named["self"].spec.shape)
        floats = whole and instr.out.spec.dtype.is_floating_point and named.get("dtype") is None
        return Rows([named["self"]], sums=True) if floats else None
    return _along_other_axes(instr)


def _of_loss(instr: Instr) -> Rows | None:
    rows, target, _, reduction, _ = instr.args
    sums = reduction in (SUM, MEAN)
    if len(rows.spec.shape) != 2 or (sums and is_half(rows.spec)):
        return None  # a sum in half precision overflows before it is divided
    return Rows([rows, target], sums=sums)


def _of_loss_backward(instr: Instr) -> Rows | None:
    slope, rows, target, _, reduction, *_ = instr.args
    if len(rows.spec.shape) != 2:
        return None
    return Rows([rows, target] if reduction else [slope, rows, target])
