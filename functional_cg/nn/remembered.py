"""Tell what a forward works out once and remembers, such as the kind of a loss, from what it counts.

A forward may set an attribute that was None, and go by its value from then on. If it makes the same calls before and
after, and changes nothing more, then it is a pure function all the same. Both runs are on fake tensors, which takes no
arithmetic and draws no numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import tree
from ..tensors.fake_mode import aside_on_fakes
from .attributes import Held, changed, held, newly_known

__all__ = ["only_remembers"]


def only_remembers(
    copied: Callable[[Mapping[str, Tensor]], nn.Module],
    tensors: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    before: Held,
    after: Held,
) -> bool:
    """Whether a forward that has changed its module will make the same calls from now on, and change nothing more.

    Args:
      copied: Makes a private module that holds the given tensors.
      tensors: Parameters and buffers.
      args: Arguments of the forward.
      kwargs: Likewise.
      before: Contents of the module before it ran.
      after: Contents after it.
    """
    known = newly_known(before, after)
    if known is None:
        return False
    with aside_on_fakes() as fake:
        module = copied({name: fake(tensor) for name, tensor in tensors.items()})
        args, kwargs = tree.map(
            lambda one: fake(one) if isinstance(one, Tensor) else one, (tuple(args), dict(kwargs))
        )
        start = held(module)
        try:
            calls, found = _calls(module, args, kwargs), held(module)
            again, at_last = _calls(module, args, kwargs), held(module)
        except Exception:  # whatever a forward raises on tensors without values
            return False
        return newly_known(start, found) == known and not changed(found, at_last) and calls == again


def _calls(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    calls = _Calls()
    with calls:
        module(*args, **kwargs)
    return calls.seen


class _Calls(TorchDispatchMode):
    """Lists the ops that run, with their arguments; tensors go by the order in which they appear.

    Attributes:
      seen: The ops so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self._numbers: dict[int, tuple[int, Tensor]] = {}  # with the tensors, so that no id is taken again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.seen.append((func, self._named((args, kwargs))))
        result = func(*args, **(kwargs or {}))
        self.seen.append(self._named(result))
        return result

    def _named(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            number, _ = self._numbers.setdefault(id(value), (len(self._numbers), value))
            return torch.Tensor, number, value.dtype, value.shape, value.stride(), value.device
        if isinstance(value, (list, tuple)):
            return [self._named(item) for item in value]
        if isinstance(value, dict):
            return {name: self._named(item) for name, item in value.items()}
        return type(value), value
