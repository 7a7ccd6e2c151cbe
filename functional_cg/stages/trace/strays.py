"""Strays: tensors of a trace that are still referenced after it ends, such as a table in a cache.

After a successful trace, a stray is an error. After a refused trace, a stray becomes lazy. If it was made from Python
numbers alone, it is computed on first use, so a cache holds what a run without a trace would have put there. If it was
made from leaves of a state or from inputs, it has no values, and using it raises.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import SideEffectError
from ..program import Program, Var
from .known import value_of

__all__ = ["Stray", "disown", "refuse_kept"]

_DEVICE = torch.ops.prim.device.default
_RNN_FIX = "call an RNN by `apply, params, buffers = fcg.from_module(module)`: it stores its parameters. Or "


class Stray(Tensor):
    """A tensor without memory, whose values are computed on first use. Ops on it return ordinary tensors."""

    _var: Var
    _compute: Callable[[], Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:
            return args[0].device
        return func(*_found(args), **{name: _found(value) for name, value in (kwargs or {}).items()})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._var.spec.device

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        try:
            return repr(self._compute())
        except SideEffectError:
            return f"<a tensor of a refused trace, {self._var.spec}>"

    def tolist(self) -> Any:
        return self._compute().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self._compute().numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        return self._compute().__dlpack__(**options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._compute().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._compute().__reduce_ex__(protocol)


def _found(value: Any) -> Any:
    if isinstance(value, Stray):
        return value._compute()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_found, value))
    return value


def disown(program: Program, tensors: Sequence[weakref.ref[Tensor]], variables: Sequence[Var]) -> None:
    """Turn the tensors of a trace that are still alive into strays."""
    for reference, var in zip(tensors, variables, strict=True):
        tensor: Any = reference()
        if tensor is not None:
            tensor.__class__ = Stray
            tensor._var, tensor._compute = var, _Value(program, var)


class _Value:
    """The value of a variable, computed once."""

    def __init__(self, program: Program, var: Var) -> None:
        self._program, self._var = program, var
        self._known: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._known is None:
            self._known = value_of(self._program, self._var)
        if self._known is None:
            raise _without_values(self._program, self._var)
        return self._known


def _without_values(program: Program, var: Var) -> SideEffectError:
    sites = [instr.site for instr in program.instrs if var in instr.outputs()]
    return SideEffectError.of(
        program.function,
        "a tensor of a call that was refused is used; it has no values.",
        rows=[f"{var.spec}, made at {sites[0] if sites else 'entry'}"],
        why="It was made of the state or the inputs while the step was traced, and something has kept it.",
        fix="clear what keeps it (a cache, an attribute, a list), and return it from the step instead.",
    )


def refuse_kept(
    name: str, program: Program, variables: Sequence[Var], references: Sequence[weakref.ref[Tensor]]
) -> None:
    """Raise if a tensor of a trace is still alive: user code has stored it.

    Args:
      name: Name of the step.
      program: The traced program.
      variables: Its variables.
      references: Weak references to their tensors.
    """
    if not any(reference() is not None for reference in references):
        return
    # Break reference cycles of the user's, such as an autograd context. `collect` does nothing while another thread
    # collects, so try again.
    if not gc.collect():
        time.sleep(0.01)
        gc.collect()
    sites = {id(var): instr.site for instr in program.instrs for var in instr.outputs()}
    rows = [
        f"{var.spec}, made at {sites.get(id(var), 'entry')}"
        for var, reference in zip(variables, references, strict=True)
        if reference() is not None
    ]
    if rows:
        raise SideEffectError.of(
            name,
            f"keeps {'a tensor' if len(rows) == 1 else f'{len(rows)} tensors'} of the step beyond its end.",
            rows=rows,
            why="Python runs when the step is traced, not when it is replayed: what was kept would never be updated.",
            fix=(_RNN_FIX if all(row.endswith("entry") for row in rows) else "")
            + "return it in the metrics or in the new state instead of storing it (attribute, list, cache). "
            f"A debugger keeps what it sees: use it in `{name}.eager(...)`, or with FCG_DISABLE_CAPTURE=1.",
        )
