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
from ..layouts import laid_out
from ..program import Program, Var
from ..trial.judge import miscompiled
from .inductor import compile_graph

__all__ = ["Compiler", "Head", "Results", "by_inductor"]

Compiler = Callable[..., Any]


def by_inductor(
    name: str, graph: fx.GraphModule, arguments: Sequence[Tensor], **options: bool
) -> Callable[..., Any]:
    """Call :func:`compile_graph`; raise :class:`CaptureError` if torch's compiler fails.

    Its code asserts the strides of what kernels return; where those of torch's trace are wrong, that fails in each run.
    """
    try:
        compiled = compile_graph(graph, arguments, **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # it promises no type: passes before inductor assert
        raise _gave_up(name, error) from error

    def run(*given: Tensor) -> Any:
        try:
            return compiled(*given)
        except AssertionError as error:
            raise _gave_up(name, error) from error

    return run


def _gave_up(name: str, error: Exception) -> CaptureError:
    return CaptureError.of(
        name,
        "torch's compiler gave up on it; the state is unchanged.",
        rows=[f"{type(error).__name__}: {words_of(error).strip().partition(chr(10))[0]}"],
        fix='`lowering="aten"` runs the calls as they are.',
    )


class Results:
    """What a compiled function has to return, by the trace.

    Args:
      name: Name of the step.
      expected: Variables of the results.
      program: The program, which knows what its results are called.
    """

    def __init__(self, name: str, expected: Sequence[Var], program: Program | None = None) -> None:
        self._name, self._expected, self._program = name, expected, program
        # Places of results in other strides; None before the first run.
        self._turned: list[int] | None = None

    def as_traced(self, results: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the results of a run in the strides of the trace.

        Dtypes, shapes and strides are the same in each run. They are asked for in the first one, before any result
        becomes a leaf or a metric.

        Raises:
          MiscompileError: If dtypes or shapes differ.
        """
        if self._turned is None:
            self._refuse_others(results)
            self._turned = [
                place
                for place, (var, one) in enumerate(zip(self._expected, results, strict=False))
                if _is_dense(var) and laid_out(one, var.spec.stride) is not one
            ]
        if not self._turned:
            return results
        laid = list(results)
        for place in self._turned:
            laid[place] = laid_out(laid[place], self._expected[place].spec.stride)
        return laid

    def _refuse_others(self, results: Sequence[Tensor]) -> None:
        known = {} if self._program is None else {var: path for path, var in self._program.named_results()}
        rows = [
            f"{known.get(var, f'value {var!r}')}  expected {var.spec}   "
            f"got {str(one.dtype).removeprefix('torch.')}{list(one.shape)}"
            for var, one in zip(self._expected, results, strict=False)
            if (one.dtype, one.shape) != (var.spec.dtype, var.spec.shape)
        ]
        if rows:
            raise miscompiled(
                self._name,
                "results of another kind; the state is unchanged.",
                rows,
                "The trace tells dtype and shape of each result, for all calls.",
            )


def _is_dense(var: Var) -> bool:
    """Whether a value has no gaps and shares no element; copies of others are made so."""
    pairs = [(step, size) for size, step in zip(var.spec.shape, var.spec.stride, strict=True) if size != 1]
    reach = 1
    for step, size in sorted(pairs):
        if step != reach:
            return False
        reach *= size
    return True


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
        self._expected = Results(name, results, program)
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
        results = self._expected.as_traced(results)
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
