"""Weigh the launches of a compiled function: how large their memory is, and how long they probably take.

The wrapper runs once on tensors without memory. Kernels are left out; products and other ops run on shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..work import flops, micros
from .rehearsal import Rehearsal
from .units import Memory, Unit
from .wrapper import Wrapper

__all__ = ["Weighing", "on_meta"]


class Weighing(Rehearsal):
    """A rehearsal on tensors without memory.

    Args:
      static: Tensors that are there before the run.
      known: Their memory.
    """

    def __init__(self, static: Sequence[Tensor], known: Sequence[Memory]) -> None:
        super().__init__((), known)
        self._sizes = {memory: (one.nbytes, one.itemsize) for memory, one in zip(known, static, strict=True)}
        self._flops: dict[Unit, int] = {}
        self._counter = _Counter()

    def names(self, wrapper: Wrapper, names: Mapping[str, Any]) -> dict[str, Any]:
        """Return the globals of a wrapper for the rehearsal."""
        kernels = dict.fromkeys(wrapper.signatures, SimpleNamespace(run=_nothing)) | dict.fromkeys(
            wrapper.functions, _nothing
        )
        constants = {name: on_meta(one) for name, one in names.items() if isinstance(one, Tensor)}
        allocators = {name: _allocated for name in names if name.startswith("empty_strided")}
        views = {"reinterpret_tensor": torch.as_strided, "get_raw_stream": _nothing}
        return {**names, **kernels, **constants, **allocators, **views}

    def __enter__(self) -> None:
        self._counter.__enter__()

    def __exit__(self, *error: object) -> None:
        self._counter.__exit__(*error)

    def defined(self, unit: Unit, values: Iterable[tuple[Memory, object]]) -> None:
        self._flops[unit] = self._counter.flops - sum(self._flops.values())
        for memory, value in values:
            tensors = [one for one in _flat(value) if isinstance(one, Tensor)]
            if tensors and memory not in self._sizes:
                nbytes = sum(one.untyped_storage().nbytes() for one in tensors)
                self._sizes[memory] = nbytes, tensors[0].itemsize

    def weigh(self, units: Iterable[Unit]) -> None:
        """Tell units what they allocate, and how long they probably take."""
        for unit in units:
            unit.made = {memory: self._sizes.get(memory, (0, 1))[0] for memory in unit.made}
            touched = [self._sizes[one] for one in unit.reads | unit.writes if one in self._sizes]
            moved = sum(nbytes for nbytes, _ in touched)
            itemsize = max((width for _, width in touched), default=4)
            unit.product = bool(self._flops.get(unit))
            unit.micros, unit.busy = micros(moved, self._flops.get(unit, 0), itemsize, linked=unit.link)


class _Counter(TorchDispatchMode):
    """Counts the FLOPs of products."""

    flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.flops += flops(func, args, kwargs, out)
        return out


def on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same layout without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _allocated(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _nothing(*_: object, **__: object) -> int:
    return 0


def _flat(value: object) -> Sequence[object]:
    return value if isinstance(value, (tuple, list)) else [value]
