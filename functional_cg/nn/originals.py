"""Detects changes to modules after ``from_module`` copied them, which would have no effect.

A captured step never visits its modules again, so each call of it asks here. While a module is alive, its attributes
and items are compared by identity, in C; only if something differs are the contents examined. A call compares a small
module whole, and a slice of a large one, so that its time does not grow with the model. Modes, dtypes and other tensors
do not count as changes: the mode is an argument of the call, and tensor values were copied; but those of tensors that
plain objects hold do, since nobody would pass other values.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BakedValueError
from ..tensors.fingerprint import as_now, seen
from .attributes import Buffer, Held, Same, changed, held, walked
from .refusals import made_by_hooks

__all__ = ["Original", "fixed_tensors"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_hooks_of, _is_trained = operator.attrgetter("_backward_hooks"), operator.attrgetter("requires_grad")
# What `torch.compile` and `torch.jit.script` put on a module.
_MARKS = frozenset({"_is_torch_compile", "__overloads__"})
_MANY = 256  # of what stands in longer containers, the number alone is compared at each call
_WHOLE = 16  # a module with so many submodules is compared whole at each call
_AT_ONCE = 4  # of a larger one, so many


class Original:
    """A copied module and its contents at the time.

    It references the module only weakly: a module that nobody else holds cannot be changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__
        self._module = weakref.ref(module, self._gone)
        self._held = _compared(module)
        self._remember(module)

    def _remember(self, module: nn.Module) -> None:
        parts, params = list(module.modules()), list(module.parameters())
        of_torch = vars(nn.Module()).keys() - {"_modules"}  # under which torch keeps things in each module
        values = [value for path, value in walked(module) if path.rpartition(".")[2] not in of_torch]
        stores = [store for value in values for store in _stores(value, of_torch)]
        stores += [(vars(torch.nn.modules.module)[f"_global{name}"], ()) for name in _HOOKS]
        number = 1 if len(parts) <= _WHOLE else -(-len(parts) // _AT_ONCE)
        below, fixed = parts[1:], list(fixed_tensors(module).values())  # the module would keep itself alive
        self._slices = [
            _Slice(below[i::number], params[i::number], stores[i::number], fixed[i::number])
            for i in range(number)
        ]
        self._class: type = type(module)
        self._next = 0

    def _gone(self, _: object) -> None:
        # What is left of the module goes with this. At the end of the process, names of modules are gone before.
        self._slices, self._held, self._class = [], {}, None.__class__

    def __reduce__(self) -> Any:
        return Original, (
            nn.Module(),
        )  # a copy of the function is one of a copy: no module that anybody changes

    def unchanged(self) -> bool:
        """Whether a slice of the module is unchanged, the next one at each call; of a small module, all of it.

        It compares identities. A slice that has changed is compared again at the next call.
        """
        if not self._same(self._slices[self._next : self._next + 1]):
            return not self._changes()
        self._next = self._next + 1 if self._next + 1 < len(self._slices) else 0
        return True

    def _same(self, slices: Sequence[_Slice]) -> bool:
        try:
            return type(self._module()) is self._class and all(map(_Slice.unchanged, slices))
        except (KeyError, IndexError):  # an attribute or an element is gone
            return False

    def _changes(self) -> list[str]:
        module = self._module()
        if module is None:
            return []
        paths = changed(self._held, _compared(module))
        if not paths:
            self._remember(module)  # another tensor
        return paths

    def check(self, function: str = "") -> None:
        """Raise if any of the module changed after it was copied.

        Raises:
          BakedValueError: Names what changed.
        """
        paths = [] if self._same(self._slices) else self._changes()
        if paths:
            raise BakedValueError.of(
                function or self._name,
                f"{self._name} was changed after `from_module` copied it.",
                rows=[f"`{path}`" for path in paths],
                why="`apply` runs the copy: the change would have no effect.",
                fix="change the module before `apply, params, buffers = fcg.from_module(model)`, and make the step "
                "anew, `graph_step(fn)`.",
            )


class _Slice:
    """Some of the submodules, parameters and stores of a module, compared by identity, in C.

    Args:
      parts: Submodules.
      params: Parameters.
      stores: Containers that store the state of an object, with the names or keys to compare in each.
      fixed: Tensors of plain objects.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        params: Sequence[Tensor],
        stores: Sequence[tuple[Any, Sequence[Any]]],
        fixed: Sequence[Tensor],
    ) -> None:
        self._parts, self._params = parts, params
        self._stores, self._empty = [one for one, _ in stores if one], [one for one, _ in stores if not one]
        entries = [(store, name) for store, names in stores for name in names]
        self._owners, self._names = [owner for owner, _ in entries], [name for _, name in entries]
        self._values = list(map(operator.getitem, self._owners, self._names))
        self._then, self._fixed = self._now(), as_now(fixed)

    def _now(self) -> tuple[list[Any], ...]:
        return (
            list(map(type, self._parts)),
            list(map(len, self._stores)),
            list(map(_is_trained, self._params)),
        )

    def unchanged(self) -> bool:
        return (
            not any(self._empty)
            and self._now() == self._then
            and all(map(operator.is_, map(operator.getitem, self._owners, self._names), self._values))
            and not any(map(_hooks_of, self._params))
            and self._fixed()
        )


def fixed_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return, by path, the tensors that plain objects of a module hold, such as a noise schedule."""
    made = made_by_hooks(module)
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers(), *made.values())}
    return {path: one for path, one in walked(module) if isinstance(one, Tensor) and id(one) not in known}


def _compared(module: nn.Module) -> Held:
    """Whatever must not change: all contents of a module except its modes and which registered tensors it holds."""
    fixed, first = fixed_tensors(module), dict[int, str]()
    on_all = [len(vars(torch.nn.modules.module)[f"_global{name}"]) for name in _HOOKS]
    found: Held = {"hooks of all modules": on_all}
    for path, content in held(module).items():
        is_tensor = isinstance(content, Same) and (
            isinstance(content, Buffer) or isinstance(content.value, Tensor)
        )
        if path and path.rpartition(".")[2] not in {"training", *_MARKS} and (path in fixed or not is_tensor):
            found[path] = content
    for name, param in module.named_parameters(remove_duplicate=False):
        found[f"{name}.requires_grad"] = param.requires_grad
        found[f"{name}._backward_hooks"] = bool(_hooks_of(param))
        found[f"{name} is"] = first.setdefault(id(param), name)
    for name, tensor in fixed.items():
        count, memory, view = seen(tensor)
        found[f"values of {name}"] = (count, Same(memory), view)
    return found | {f"{name}.__class__".lstrip("."): type(part) for name, part in module.named_modules()}


def _stores(value: Any, of_torch: Set[str]) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield the containers that store an object's state, with the names or keys to compare in each."""
    attributes = getattr(value, "__dict__", None)
    if isinstance(value, nn.Module):
        yield vars(value), tuple(vars(value).keys() - of_torch - {"_modules"})
        for name in ("_modules", "_parameters", "_buffers", *_HOOKS):
            yield vars(value)[name], tuple(vars(value)[name])
    elif isinstance(attributes, dict) and not isinstance(value, Tensor):
        yield attributes, tuple(attributes)
    if isinstance(value, (dict, list, deque, set, bytearray)):
        names = tuple(value) if isinstance(value, dict) else range(len(value))
        yield value, names if len(names) <= _MANY and hasattr(value, "__getitem__") else ()
