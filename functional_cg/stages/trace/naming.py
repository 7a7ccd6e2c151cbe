"""Name an object as the user's code writes it, such as ``W`` or ``model.weight``, and tell who owns it."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType, MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...messages.source import frames, is_user_file
from ...nn.attributes import variables
from ...nn.module import Apply
from ...state.leaf import Leaf
from ..watch.kinds import is_user_class
from ..watch.places import ATTRIBUTE, ITEM, Step
from ..watch.values import instance_dict, is_value

__all__ = ["module_fix", "owned_fix", "owns", "read_fix", "way_to"]

_MOST = 4096  # objects to visit


def way_to(target: object, function: Callable[..., Any]) -> tuple[str, tuple[object, ...]]:
    """Return how ``function``, or a user's function that it leads to, writes ``target``, and the objects on the way.

    The name is "" if none does; the function comes first.
    """
    waiting: deque[tuple[str, Any, tuple[object, ...]]] = deque([("self", function, ())])
    seen: dict[int, object] = {}
    while waiting and len(seen) < _MOST:
        name, value, way = waiting.popleft()
        if value is target:
            return name, way
        if id(value) not in seen and not is_value(value):
            seen[id(value)] = value
            waiting.extend((part, found, (*way, value)) for part, found in _parts(name, value))
    return "", ()


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if kind is FunctionType and is_user_file(value.__code__.co_filename):
        yield from variables(value)
    elif kind is MethodType:
        yield "self", value.__self__
        yield name, value.__func__
    elif issubclass(kind, functools.partial):
        yield name, value.func
        yield f"{name}.args", value.args
    elif issubclass(kind, dict | list | tuple):
        pairs = dict.items(value) if issubclass(kind, dict) else enumerate(value)
        yield from ((Step(ITEM, key).shown(name), part) for key, part in pairs)
    elif issubclass(kind, torch.nn.Module):
        for registry in ("_parameters", "_buffers", "_modules"):
            yield from ((f"{name}.{key}", part) for key, part in vars(value)[registry].items())
    if issubclass(kind, type) and is_user_class(value):
        yield from ((Step(ATTRIBUTE, key).shown(name), part) for key, part in vars(value).items())
    elif not issubclass(kind, Tensor | type | FunctionType):
        yield from ((Step(ATTRIBUTE, key).shown(name), part) for key, part in instance_dict(value).items())
        yield from ((name, getattr(kind, method, None)) for method in ("__call__", "forward"))


def read_fix(name: str, tensor: Tensor) -> str:
    passed = f"pass {f'`{name}`' if name else 'it'} as an input or in the state"
    if isinstance(tensor, Leaf):  # it changes from call to call
        return f"{passed}."
    return f"{passed}; or declare it, `constants=({name or 'tensor'},)`."


def module_fix(tensor: Tensor) -> str:
    """Return the fix for a tensor owned by a module, or a module's function, on the stack; "" for other tensors."""
    fix = ""
    for frame in frames(sys._getframe(2)):
        owner = frame.f_locals.get("self")
        if owns(owner, tensor):
            fix = _pure_module_fix(owner, _called_as(owner, frame))
        elif isinstance(owner, Apply):
            for root in ("buffers", "params"):
                tree = frame.f_locals.get(root)
                if isinstance(tree, dict) and any(one is tensor for one in tree.values()):
                    fix = _state_fix(root)
    return fix


def owns(owner: Any, tensor: Tensor) -> TypeGuard[torch.nn.Module]:
    if not isinstance(owner, torch.nn.Module):
        return False
    return any(tensor is one for one in (*owner.parameters(), *owner.buffers()))


def _called_as(owner: Any, frame: FrameType) -> str:
    """Return the name by which the code around a module's frame knows it; ``model`` if by none."""
    scopes = (scope for above in frames(frame) for scope in (above.f_locals, above.f_globals))
    names = (name for scope in scopes for name, one in scope.items() if one is owner and name != "self")
    return next(names, "model")


def _pure_module_fix(owner: torch.nn.Module, name: str) -> str:
    trained = any(one.requires_grad for one in owner.parameters())
    if not trained and not any(part.training for part in owner.modules()):
        return (
            f"`{name}` is not trained: declare its tensors, "
            f"`constants=(*{name}.parameters(), *{name}.buffers())`."
        )
    kind = type(owner).__name__
    return (
        f"make the {kind} a pure function, `apply, params, buffers = fcg.from_module(model)`: keep `params` and "
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
