"""Rejects modules that cannot be pure functions of their tensors, before anything is copied."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ForeignTensorError, FunctionalCGError, LayoutError, SideEffectError
from .attributes import COMPILED, plain_tensor, variables

__all__ = ["made_by_hooks", "refuse_impure", "registered_fix"]

# Wrapper class in torch -> what to pass instead. By name, because some take a second to import.
_WRAPPERS = (
    ("DistributedDataParallel", "pass the module inside, `model.module`"),
    ("DataParallel", "pass the module inside, `model.module`"),
    ("FullyShardedDataParallel", "pass the module before it was wrapped"),
    ("FSDPModule", "pass the module before `fully_shard`"),
    ("OptimizedModule", "pass the module before `torch.compile`; a step is compiled as a whole"),
    ("ScriptModule", "pass the module before `torch.jit.script` or `trace`"),
)
_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
_CONTAINERS, _CALLABLES = (dict, list, tuple, set, frozenset, CellType), (FunctionType, MethodType, partial)
_FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def refuse_impure(module: nn.Module) -> None:
    """Raise for the first part of a module that ``from_module`` cannot make pure.

    Raises:
      TypeError: For wrappers: DDP, FSDP, compiled and scripted modules.
      SideEffectError: For hooks on tensors and on the backward of modules.
      LayoutError: For lazy, sparse and meta tensors.
      ForeignTensorError: For tensors that are plain attributes, and functions that reference the module.
    """
    name = type(module).__name__
    parts = [
        (f"`{path}` ({type(part).__name__})" if path else f"`{name}` itself", part)
        for path, part in module.named_modules()
    ]
    for place, part in parts:
        _refuse_wrapper(place, part)
    for root, tensors in (("params", module.named_parameters()), ("buffers", module.named_buffers())):
        for path, tensor in tensors:
            _refuse_tensor(name, f"{root}[{path!r}]", tensor)
    for place, part in parts:  # after the tensors: a lazy module has a hook
        _refuse_hooks(name, place, part)
    _refuse_attributes(name, module)


def registered_fix(path: str) -> str:
    """Return the fix for a write to a tensor that a module holds as neither parameter nor buffer."""
    return (
        "make it a buffer, which the state keeps: `self.register_buffer(name, value)` in the module, for its "
        f"`{path}`, and `self.name` in the forward."
    )


def _refuse_wrapper(place: str, part: nn.Module) -> None:
    classes = {cls.__name__ for cls in type(part).__mro__ if cls.__module__.startswith("torch.")}
    fix = next((fix for wrapper, fix in _WRAPPERS if wrapper in classes), None)
    if fix is not None:
        raise TypeError(
            f"from_module: {place} is a wrapper: what it does besides calling its module is not a function of "
            f"parameters.\nTo fix: {fix}."
        )


def _refuse_hooks(name: str, place: str, part: nn.Module) -> None:
    rows = [f"{kind.strip('_')}: {len(hooks)}" for kind in _HOOKS if (hooks := getattr(part, kind))]
    if rows:
        raise SideEffectError.of(
            name,
            f"{place} has hooks on its backward.",
            rows=rows,
            why="Gradients are taken with respect to the state's tensors, where these hooks would not run.",
            fix="remove them, `handle.remove()`, and change the gradients in the step.",
        )


def _refuse_tensor(name: str, place: str, tensor: Tensor) -> None:
    # Private attributes, but the only sign of a hook on a tensor.
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise SideEffectError.of(
            name,
            f"`{place}` has hooks.",
            why="Gradients are taken with respect to the state's tensors, where these hooks would not run.",
            fix="remove them, and change the gradients in the step.",
        )
    error: FunctionalCGError | None = None
    if torch.nn.parameter.is_lazy(tensor):
        error = _layout(name, place, "has no shape yet", "run the module once on an example, `model(x)`.")
    elif tensor.layout != torch.strided:
        error = _layout(name, place, f"is {tensor.layout}", "make it dense, `.to_dense()`.")
    elif tensor.is_meta:
        error = _layout(
            name, place, "is on the meta device, without values", "load it: `model.to_empty(device=...)`."
        )
    if error is not None:
        raise error


def _layout(name: str, place: str, what: str, fix: str) -> LayoutError:
    return LayoutError.of(name, f"`{place}` {what}.", why="A state holds values of fixed shapes.", fix=fix)


def _refuse_attributes(name: str, module: nn.Module) -> None:
    own = {id(one) for one in (*module.parameters(), *module.buffers(), *module.modules())}
    made = made_by_hooks(module)
    of_torch = vars(nn.Module()).keys() - {*_FORWARD_HOOKS} | {COMPILED}
    for path, part in module.named_modules():
        for attribute, value in vars(part).items():
            where = f"{path}.{attribute}" if path else attribute
            for element, found, in_function in _reached(value) if attribute not in of_torch else ():
                is_own = id(found) in own
                if in_function and is_own:
                    raise _holds_on(name, path or name, where, attribute, element)
                if found is element and isinstance(found, Tensor) and not is_own and where not in made:
                    raise plain_tensor(name, where)


def _holds_on(name: str, part: str, where: str, attribute: str, value: Any) -> ForeignTensorError:
    """Return the error for a function that holds on to the module that it is a part of."""
    what = f"`{where}`"
    of = "of the module's class or of a module that holds this one"
    fix = f"write it as a method, `def {attribute}(self, ...)`, {of}"
    if hasattr(value, "_torchdynamo_orig_callable"):
        fix = "leave out `torch.compile`: a step is compiled as a whole"
    elif attribute in _FORWARD_HOOKS:
        spelled = getattr(value, "__name__", "hook")
        method = f"self.{spelled if spelled.isidentifier() else 'hook'}"
        what = f"a hook of `{part}`, `{getattr(value, '__qualname__', value)}`,"
        fix = (
            f"register a method {of}, "
            f"`register{attribute.removesuffix('s')}({method})`, or `functools.partial({method}, ...)` to tell layers "
            "apart"
        )
    return ForeignTensorError.of(
        name,
        f"{what} is a function that holds on to the module.",
        why="In a copy of the module it would go on reading the tensors of the original.",
        fix=f"{fix}.",
    )


def made_by_hooks(module: nn.Module) -> dict[str, Tensor]:
    """Return, by path, the plain tensors that a hook before the forward may set at each call, as weight norm does."""
    return {
        f"{path}.{name}" if path else name: value
        for path, part in module.named_modules()
        if part._forward_pre_hooks
        for name, value in vars(part).items()
        if isinstance(value, Tensor)
    }


def _reached(value: Any) -> Iterator[tuple[Any, Any, bool]]:
    """Yield what an attribute reaches through containers and functions.

    ``copy.deepcopy`` copies containers, bound methods and partials with their contents, but not functions: these keep
    their closure, their defaults and the globals that they read, which still belong to the original. Functions of
    another file, such as those of a library, lead too far.

    Yields:
      (element, found, in_function): an element of the containers, what it reaches, and whether a function holds that.
    """
    seen: dict[Any, Any] = {}  # keeps the values alive, so that no id is taken again
    left: list[tuple[Any, Any, bool]] = [(None, value, False)]
    while left:
        element, found, in_function = left.pop()
        if (in_function, id(found)) in seen:
            continue
        seen[in_function, id(found)] = found
        if not isinstance(found, _CONTAINERS):
            element = found if element is None else element
            yield element, found, in_function
        below = gc.get_referents(found) if isinstance(found, (*_CONTAINERS, *_CALLABLES)) else []
        if isinstance(found, FunctionType):
            own, read = found.__globals__, [value for _, value in variables(found)]
            below = [one for one in below if one is not own]
            below += [one for one in read if not isinstance(one, FunctionType) or one.__globals__ is own]
            in_function = True
        left += [(element, one, in_function) for one in below]
