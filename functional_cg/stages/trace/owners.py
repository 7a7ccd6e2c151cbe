"""Find who owns a tensor that the trace does not know, and suggest a fix."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ...nn.module import Apply
from ...state.leaf import Leaf

__all__ = ["module_fix", "owned_fix", "owns", "read_fix"]


def read_fix(name: str, tensor: Tensor) -> str:
    passed = f"pass {f'`{name}`' if name else 'it'} as an input or in the state"
    if isinstance(tensor, Leaf):  # it changes from call to call
        return f"{passed}."
    return f"{passed}; or declare it, `constants=({name or 'tensor'},)`."


def module_fix(tensor: Tensor) -> str:
    """Return the fix for a tensor owned by a module, or a module's function, on the stack; "" for other tensors."""
    fix, frame = "", sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if owns(owner, tensor):
            fix = _pure_module_fix(type(owner).__name__)
        elif isinstance(owner, Apply):
            given = {root: frame.f_locals.get(root) for root in ("params", "buffers")}
            roots = [
                root for root, tree in given.items() if isinstance(tree, dict) and _stands_in(tree, tensor)
            ]
            fix = _state_fix(roots[0]) if roots else fix
    return fix


def owns(owner: Any, tensor: Tensor) -> bool:
    if not isinstance(owner, torch.nn.Module):
        return False
    return any(tensor is one for one in (*owner.parameters(), *owner.buffers()))


def _stands_in(tree: dict[str, Any], tensor: Tensor) -> bool:
    return any(one is tensor for one in tree.values())


def _pure_module_fix(name: str) -> str:
    return (
        f"make the {name} a pure function, `apply, params, buffers = fcg.from_module(model)`: keep `params` and "
        "`buffers` in the state, and in the step `out, buffers = apply(state.params, state.buffers, x)`."
    )


def owned_fix(name: str, module: str) -> str:
    """Return the fix for a module's tensor that is read directly: training changes it, so it is not a constant."""
    return (
        f"pass `{name}` as an input or in the state: `apply, params, buffers = fcg.from_module(model)` makes the "
        f"{module} a pure function of both."
    )


def _state_fix(root: str) -> str:
    return (
        f"keep them in the state, `TrainState.create(..., {root}={root})`: in the step `out, new_buffers = "
        "apply(state.params, state.buffers, x)`, and `new_buffers` go into the new state."
    )
