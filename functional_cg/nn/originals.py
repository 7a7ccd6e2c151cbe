"""The modules that were copied: whether one was changed since, which would have no effect.

A captured step does not come by its modules again, so each call of it asks here. As long as a module is alive, what it
stores under names and keys is compared by identity, in C; only where something differs it is looked at what has
changed. Modes, and tensors in place of others, are no changes: a mode is an argument of the call, and the values of the
tensors were copied.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import BakedValueError
from .attributes import Held, changed, held, walked

__all__ = ["Applied", "Original", "meeting", "note"]

_met: ContextVar[list[Applied] | None] = ContextVar("met", default=None)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_BY_NAME = ("_parameters", "_buffers")  # other tensors may take their places
_MANY = 256  # of what stands in longer containers, the number alone is compared at each call


class Original:
    """A module that was copied, and what it held then.

    It holds on to no module: one that nobody else has cannot be changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__
        self._module = weakref.ref(module, self._gone)
        self._held = _compared(module)
        self._remember(module)

    def _remember(self, module: nn.Module) -> None:
        parts = [part for _, part in module.named_modules()]
        names = vars(nn.Module()).keys() - {"_modules"}  # under which torch keeps things in each module
        found = [value for path, value in walked(module) if path.rpartition(".")[2] not in names]
        stores = [store for value in found for store in _stores(value, names)]
        entries = [entry for store, names in stores for entry in ((store, name) for name in names)]
        self._counted = [store for store, _ in stores]
        self._counts = list(map(len, self._counted))
        self._owners, self._names = [owner for owner, _ in entries], [name for _, name in entries]
        self._values = list(map(operator.getitem, self._owners, self._names))
        self._hooks = [
            getattr(part, name) for part in parts for name in _HOOKS
        ]  # none, or it would not be here
        self._parameters = list(module.parameters())
        self._grads = [one.requires_grad for one in self._parameters]

    def _gone(self, _: object) -> None:
        # What is left of the module goes with this.
        self._counted, self._owners, self._names, self._values = [], [], [], []
        self._hooks, self._parameters, self._counts, self._grads, self._held = [], [], [], [], {}

    def __reduce__(self) -> Any:
        return _Unknown, ()  # a copy of the function is one of a copy: there is no module to change

    def unchanged(self) -> bool:
        """Whether what the module holds is as it was, at a glance."""
        try:
            if (
                not any(self._hooks)
                and list(map(len, self._counted)) == self._counts
                and all(map(operator.is_, map(operator.getitem, self._owners, self._names), self._values))
                and [one.requires_grad for one in self._parameters] == self._grads
            ):
                return True
        except (KeyError, IndexError):  # one is gone
            pass
        return not self._changes()

    def _changes(self) -> list[str]:
        module = self._module()
        if module is None:
            return []
        paths = changed(self._held, _compared(module))
        if not paths:
            self._remember(module)  # a mode, or another tensor
        return paths

    def check(self, function: str = "") -> None:
        """Raise if the module was changed since it was copied.

        Raises:
          BakedValueError: Naming what has changed.
        """
        paths = [] if self.unchanged() else self._changes()
        if paths:
            raise BakedValueError.of(
                function or self._name,
                f"{self._name} was changed after `from_module` copied it.",
                rows=[f"`{path}`" for path in paths],
                why="`apply` runs the copy: the change would have no effect.",
                fix="change the module before `apply, params, buffers = fcg.from_module(model)`, and make the step "
                "anew, `graph_step(fn)`.",
            )


class _Unknown:
    """In place of an original in another process, or of a copy."""

    def unchanged(self) -> bool:
        """Nobody can change it."""
        return True

    def check(self, function: str = "") -> None:
        """Nothing is wrong with it."""


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """One call of a module's function, as a trace finds it.

    Attributes:
      original: The module that was copied.
      name: Its class.
      by_mode: Whether it did what a module does in training mode alone: draw numbers, or write buffers.
      parts: Parts of the module whose buffers were written, with their class.
      written: New values of these buffers.
    """

    original: Original | _Unknown
    name: str
    by_mode: bool
    parts: tuple[str, ...]
    written: tuple[Tensor, ...]


def note(applied: Applied) -> None:
    """Show a call of a module's function to the trace that runs, if there is one."""
    found = _met.get()
    if found is not None:
        found.append(applied)


def _compared(module: nn.Module) -> Held:
    """What has to stay as it is: all that a module holds but modes, and the identity of tensors."""
    found = {
        path: content
        for path, content in held(module).items()
        if path and path.rpartition(".")[2] != "training" and "<" not in path
    }
    grads = {f"{name}.requires_grad": param.requires_grad for name, param in module.named_parameters()}
    tensors = {path for path, value in walked(module) if isinstance(value, Tensor)}
    return {path: content for path, content in found.items() if path not in tensors} | grads


def _stores(value: Any, of_torch: Set[str]) -> Iterator[tuple[Any, Sequence[Any]]]:
    """What an object stores its state in, and the names or keys under which it is compared."""
    attributes = getattr(value, "__dict__", None)
    if isinstance(value, nn.Module):
        yield from ((getattr(value, name), ()) for name in _BY_NAME)
        yield value._modules, tuple(value._modules)
        yield vars(value), tuple(vars(value).keys() - of_torch - {"_modules"})
    elif isinstance(attributes, dict) and not isinstance(value, Tensor):
        yield attributes, tuple(attributes)
    if isinstance(value, (dict, list, deque)):
        names = tuple(value) if isinstance(value, dict) else range(len(value))
        yield value, names if len(names) <= _MANY else ()
    elif isinstance(value, (set, bytearray)):
        yield value, ()


@contextmanager
def meeting() -> Iterator[list[Applied]]:
    """Collect the calls of modules' functions."""
    found: list[Applied] = []
    token = _met.set(found)
    try:
        yield found
    finally:
        _met.reset(token)
