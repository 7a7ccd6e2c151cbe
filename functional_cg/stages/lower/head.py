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
from ..program import Program, Var
from ..trial.judge import miscompiled
from .inductor import compile_graph

__all__ = ["Compiler", "Head", "by_inductor", "refuse_other_results"]

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


def refuse_other_results(
    name: str, expected: Sequence[Var], results: Sequence[Tensor], program: Program | None = None
) -> None:
    """Refuse a compiled function whose results are not of the dtypes, shapes and strides of the trace.

    They are the same in each run. It is asked before any result becomes a leaf or a metric.

    Args:
      name: Name of the step.
      expected: Variables of the results.
      results: The results.
      program: The program, which knows what its results are called.
    Raises:
      MiscompileError: With the results that differ.
    """
    known = {} if program is None else {var: path for path, var in program.named_results()}
    rows = [
        f"{known.get(var, f'value {var!r}')}  expected {var.spec}, strides {list(var.spec.stride)}   "
        f"got {str(one.dtype).removeprefix('torch.')}{list(one.shape)}, strides {list(one.stride())}"
        for var, one in zip(expected, results, strict=False)
        if not _is_as_traced(var, one)
    ]
    if rows:
        raise miscompiled(
            name,
            "results of another kind; the state is unchanged.",
            rows,
            "The trace tells dtype, shape and strides of each result, for all calls.",
        )


def _is_as_traced(var: Var, result: Tensor) -> bool:
    spec = var.spec
    if (result.dtype, result.shape) != (spec.dtype, spec.shape):
        return False
    dims = [each for each in zip(spec.shape, spec.stride, result.stride(), strict=True) if each[0] != 1]
    dense = 1 + sum((size - 1) * step for size, step, _ in dims) == result.numel()
    return not dense or all(step == other for _, step, other in dims)  # copies of other tensors are made dense


class Head:
    """A compiled function as an op: its results never alias an argument.

    Args:
      name: Name in the plan's text.
      graph: What to compile.
      compiler: ``compiler(graph_module, example_inputs) -> callable``.
      results: The variables of those of its results that are used.
      metrics: How many of them leave the step; each of these gets separate memory.
      known: Whether the compiler is the built-in one, whose results never alias an argument.
      program: The program that it is a part of.

    Attributes:
      compiled: What the compiler returned; None before.
      after: If there: called with the arguments and the results of each call.
    """

    def __init__(
        self,
        name: str,
        graph: fx.GraphModule,
        compiler: Compiler,
        *,
        results: Sequence[Var],
        metrics: int,
        known: bool,
        program: Program | None = None,
    ) -> None:
        self.graph, self._name, self._compiler = graph, name, compiler
        self._results, self._metrics, self._known = results, metrics, known
        self._program = program
        self._new = True  # whether it has not run yet
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
            results = self.compiled(*arguments)[: len(self._results)]
        if self._new:
            refuse_other_results(self._name, self._results, results, self._program)
            self._new = False
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
