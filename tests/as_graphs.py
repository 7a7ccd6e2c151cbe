"""A backend on a CPU whose replays are like those of a GPU: Python runs once, and calls write the same memory again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from functional_cg.stages.plan import Before, Buffers, Plan, Replay, Run, Spare
from functional_cg.tensors.overlap import storage_key

__all__ = ["AsGraphs"]


class AsGraphs:
    """Records calls; a plan itself runs anew, and its metrics go where those of its first run were."""

    name = "as graphs"

    def capture(self, plan: Plan, buffers: Buffers, scratch: Callable[[], Spare]) -> Replay:
        run, static = plan.bind(buffers), [metric.clone() for metric in plan.bind(scratch())(())]
        return _Again(lambda before: _into(static, run(before)), static)

    def recorder(self) -> Callable[[Run], Replay]:
        return _recorded


def _recorded(run: Run) -> Replay:
    run(())
    with _Calls() as calls:
        static = run(())
    return _Again(lambda before: calls.repeat(), static)


class _Again:
    fresh = False

    def __init__(self, call: Callable[[Before], None], static: Sequence[Tensor]) -> None:
        self._call, self.static = call, static

    def __call__(self, before: Before, /) -> Sequence[Tensor]:
        self._call(before)
        return self.static

    def close(self) -> None:
        self._call, self.static = (lambda before: None), ()


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.inplace_view not in func.tags:  # that turns a tensor and runs nothing
            alias = pytree.tree_map_only(Tensor, Tensor.detach, out)  # as it lies now
            self._calls.append((func, args, kwargs or {}, alias))
        return out

    def repeat(self) -> None:
        for func, args, kwargs, out in self._calls:
            _into(pytree.tree_leaves(out), pytree.tree_leaves(func(*args, **kwargs)))


def _into(static: Sequence[Any], made: Sequence[Any]) -> None:
    """Copy what a call makes into what its first run made; views are there already."""
    for old, new in zip(static, made, strict=True):
        if isinstance(old, Tensor) and storage_key(old) != storage_key(new):
            old.copy_(new)
