"""A compiled function as an op of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...ambient.modes import ordinary, without_gradients
from ...errors import CaptureError
from ...errors.words import words_of
from ...tensors.overlap import storage_key
from .inductor import compile_graph

__all__ = ["Compiler", "Head", "by_inductor"]

Compiler = Callable[..., Any]


def by_inductor(
    name: str, graph: fx.GraphModule, arguments: Sequence[Tensor], **options: bool
) -> Callable[..., Any]:
    """Call :func:`compile_graph`; raise :class:`CaptureError` if torch's compiler fails."""
    try:
        return compile_graph(graph, arguments, **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # it promises no type: passes before inductor assert
        raise CaptureError.of(
            name,
            "torch's compiler gave up on it; the state is unchanged.",
            rows=[f"{type(error).__name__}: {words_of(error).strip().partition(chr(10))[0]}"],
            fix='`lowering="aten"` runs the calls as they are.',
        ) from error


class Head:
    """A compiled function as an op: its results never alias an argument.

    Args:
      name: Name in the plan's text.
      graph: What to compile.
      compiler: ``compiler(graph_module, example_inputs) -> callable``.
      metrics: How many of its results leave the step; each of them gets separate memory.
      count: How many of its results are used.
      known: Whether the compiler is the built-in one, whose results never alias an argument.

    Attributes:
      compiled: What the compiler returned; None before.
      after: If there: called with the arguments and the results of each call.
    """

    def __init__(
        self, name: str, graph: fx.GraphModule, compiler: Compiler, *, metrics: int, count: int, known: bool
    ) -> None:
        self.graph, self._name, self._compiler = graph, name, compiler
        self._metrics, self._count, self._known = metrics, count, known
        self.compiled: Callable[..., Any] | None = None
        self.after: Callable[[Sequence[Tensor], Sequence[Tensor]], None] | None = None

    def __str__(self) -> str:
        return f"compiled.{self._name}"

    def compile(self, arguments: Sequence[Tensor]) -> None:
        with ordinary():
            without_gradients()
            self.compiled = self._compiler(self.graph, list(arguments))

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        assert self.compiled is not None
        with ordinary():
            without_gradients()
            results = self.compiled(*arguments)[: self._count]
        taken = set() if self._known else {storage_key(one) for one in arguments}
        apart = []
        for position, result in enumerate(results):
            key = storage_key(result)
            apart.append(result.clone() if key in taken else result)
            if position < self._metrics:
                taken.add(key)  # a compiler may return one buffer for two equal results
        if self.after is not None:
            self.after(arguments, apart)
        return apart
