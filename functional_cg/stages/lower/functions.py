"""Compiled functions as ops, and the plan that calls them among ATen calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ...ambient.modes import ordinary, without_gradients
from ...errors import CaptureError
from ...errors.words import words_of
from ...shards.transfers import is_between_ranks
from ...tensors.overlap import storage_key
from ..evaluate import AS_STRIDED
from ..layouts import laid_out
from ..passes.bounds import check_values
from ..passes.changes import Fresh
from ..passes.equal_calls import frozen, frozen_call
from ..plan import by_itself
from ..program import Instr, Program, Var, layouts_of
from ..schedule import Schedule
from ..trial.judge import miscompiled
from .graph import Entrance, build_graph
from .inductor import compile_graph

__all__ = [
    "Compiler", "Head", "Part", "Results", "by_inductor", "checked", "collects", "compiled_once",
    "grouped", "whole",
]  # fmt: skip

Compiler = Callable[..., Any]
_ALIGNMENT = 16  # bytes; a compiled function copies an argument that is aligned to fewer


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

    return partial(_reported, name, compiled)


def _reported(name: str, compiled: Callable[..., Any], *given: Tensor) -> Any:
    try:
        return compiled(*given)
    except AssertionError as error:
        raise _gave_up(name, error) from error


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
        self._dense = list(map(_is_dense, expected))
        # Places of results in other strides; None before the first run.
        self._turned: list[int] | None = None

    def as_traced(self, results: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the results of a run in the shapes and strides of the trace.

        Dtypes, shapes and strides are the same in each run. They are asked for in the first one, before any result
        becomes a leaf or a metric. Some reductions of torch's compiler return their memory as a vector (2.11).

        Raises:
          MiscompileError: If dtypes or shapes differ.
        """
        if self._turned is None:
            self._refuse_others(results)
            self._turned = [
                place
                for place, (var, one) in enumerate(zip(self._expected, results, strict=False))
                if self._dense[place] and _as_traced(one, var) is not one
            ]
        if not self._turned:
            return results
        laid = list(results)
        for place in self._turned:
            laid[place] = _as_traced(laid[place], self._expected[place])
        return laid

    def _refuse_others(self, results: Sequence[Tensor]) -> None:
        known = {} if self._program is None else {var: path for path, var in self._program.named_results()}
        rows = [
            f"{known.get(var, f'value {var!r}')}  expected {var.spec}   "
            f"got {str(one.dtype).removeprefix('torch.')}{list(one.shape)}"
            for var, one in zip(self._expected, results, strict=False)
            if one.dtype != var.spec.dtype or not (one.shape == var.spec.shape or _is_flat(one, var))
        ]
        if rows:
            raise miscompiled(
                self._name,
                "results of another kind; the state is unchanged.",
                rows,
                "The trace tells dtype and shape of each result, for all calls.",
            )


def _as_traced(result: Tensor, var: Var) -> Tensor:
    """Return a result in the shape and strides of its variable."""
    return result.view(var.spec.shape) if _is_flat(result, var) else laid_out(result, var.spec.stride)


def _is_flat(result: Tensor, var: Var) -> bool:
    """Whether a result is a vector of the elements of its variable, in their order."""
    flat = result.dim() == 1 != len(var.spec.shape) and result.numel() == var.spec.numel
    return flat and result.is_contiguous() and result.view(var.spec.shape).stride() == var.spec.stride


def _is_dense(var: Var) -> bool:
    """Whether a value has no gaps and shares no element; copies of others are made so."""
    lies = torch.empty_strided(var.spec.shape, var.spec.stride, device="meta")
    return torch.empty_like(lies).stride() == lies.stride()


class Head:
    """A compiled function as an op: its results never alias an argument.

    Args:
      part: What it computes.
      plan: Its schedule.
      compiler: ``compiler(graph_module, example_inputs) -> callable``; None for inductor, whose results never alias an
        argument.
      device: Where it runs.
      step: Name of the step.
      entrance: How the state enters, for a whole program; None for a part of one, whose results lie as traced.
      handed_on: As for :func:`build_graph`, like ``writes``.
      writes: Likewise.
      metrics: How many of its first results leave the step; each of these gets separate memory.
      in_order: Whether calls between ranks keep their order.
      small: Whether its run time is bound by launches.

    Attributes:
      graph: What to compile.
      takes: The variables of its arguments.
      expected: What it has to return.
      compiled: What the compiler returned; None before.
      after: If there: called with the arguments and the results of each call.
    """

    namespace = "fcg"
    tags = ()
    _schema = torch._C.parse_schema("fcg::compiled(Tensor[] given) -> Tensor[]")

    def __init__(
        self,
        part: Program,
        plan: Schedule,
        compiler: Compiler | None,
        device: torch.device,
        step: str,
        *,
        entrance: Entrance | None = None,
        handed_on: Sequence[Var] = (),
        writes: Sequence[tuple[Var, Var]] = (),
        metrics: int = 0,
        in_order: bool = True,
        small: bool = False,
    ) -> None:
        given, of_part = entrance or Entrance([], {}, []), entrance is None
        self.device, self.part, self.takes, self._metrics, self._known = (
            device,
            part,
            given.takes(part),
            metrics,
            compiler is None,
        )
        self.graph = build_graph(part, plan, given, handed_on=handed_on, writes=writes, as_traced=of_part)
        on_host = device.type == "cpu"
        self._compiler = compiler or partial(
            by_inductor, step, on_host=on_host, small=small, in_order=in_order
        )
        self._results = [*plan.outputs, *handed_on]
        self.expected = Results(part.function, self._results, None if of_part else part)
        self.compiled: Callable[..., Any] | None = None
        self.after: Callable[[Sequence[Tensor], Sequence[Tensor]], None] | None = None

    def __str__(self) -> str:
        return f"compiled.{self.part.function.replace(' ', '_')}"

    def compile(self, known: Mapping[Var, Tensor], **options: bool) -> Callable[..., Any]:
        """Compile it for those of its arguments that are known, and for others of their layout."""
        arguments = [by_itself(known[var]) if var in known else _like(var) for var in self.takes]
        return self._compiler(self.graph, arguments, **options)

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        assert self.compiled is not None
        with ordinary():
            without_gradients()
            results = self.compiled(*arguments)[: len(self._results)]
        results = self.expected.as_traced(results)
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


def _like(var: Var) -> Tensor:
    """Return a tensor with the layout of a variable, of any values."""
    spec = var.spec
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)


@dataclass(eq=False)
class Part:
    """Calls that one compiled function runs.

    Attributes:
      calls: The calls.
      inputs: What it reads and writes of others, in order of first use.
      outputs: What others read of it, first what leaves the step.
      commits: Pairs (slot, new value) that it writes at its end.
      metrics: How many of its outputs leave the step.
      before: Views among its inputs, to be taken before it runs.
      after: Views of its outputs, to be taken after it.
      name: Name of the function; empty if its number will do.
    """

    calls: list[Instr]
    inputs: list[Var] = field(default_factory=list)
    outputs: list[Var] = field(default_factory=list)
    commits: list[tuple[Var, Var]] = field(default_factory=list)
    metrics: int = 0
    before: list[Instr] = field(default_factory=list)
    after: list[Instr] = field(default_factory=list)
    name: str = ""

    def signature(self, slots: Collection[Var] = ()) -> Hashable:
        """Return what is equal only for parts whose calls are equal up to the names of variables.

        Args:
          slots: The slots of the program.
        """
        made = (var for instr in self.calls for var in instr.outputs())
        numbers = {var: number for number, var in enumerate(dict.fromkeys([*self.inputs, *made]))}
        # The offset of `as_strided` counts from where the memory begins.
        part = 2**63 if any(instr.op is AS_STRIDED for instr in self.calls) else _ALIGNMENT
        places = tuple((var.offset * var.spec.dtype.itemsize % part, var in slots) for var in numbers)
        calls = tuple(frozen_call(instr, numbers.__getitem__) for instr in self.calls)
        results = [(instr.out, instr.writes) for instr in self.calls]
        others = frozen([results, self.outputs, self.commits], numbers.__getitem__)
        return len(self.inputs), self.metrics, layouts_of(numbers), places, calls, others


def grouped(parts: Iterable[Part], slots: Collection[Var] = ()) -> list[list[Part]]:
    """Return the parts, those that can share a compiled function together."""
    alike: dict[Hashable, list[Part]] = {}
    for part in parts:
        alike.setdefault(part.signature(slots), []).append(part)
    return [*alike.values()]


def compiled_once(
    alike: Iterable[Sequence[Part]],
    compiler: Compiler | None,
    device: torch.device,
    step: str,
    **options: Any,
) -> dict[Part, list[Instr]]:
    """Make a function for each group of equal parts; return for each part what calls it.

    Args:
      alike: The groups.
      compiler: As for :class:`Head`, like all that follows.
      device: Likewise.
      step: Likewise.
      options: Likewise.
    """
    calls: dict[Part, list[Instr]] = {}
    for number, (first, *others) in enumerate(alike, 1):
        name = first.name or f"part_{number}"
        part = Program(name, [], [], first.inputs, instrs=first.calls, outputs=[*first.outputs])
        computed = Schedule(checked(part, first.calls, compiler, device), outputs=first.outputs)
        given: Any = {"writes": first.commits, "metrics": first.metrics, **options}
        head = Head(part, computed, compiler, device, step, **given)
        for one in (first, *others):
            call = Instr(head, tuple(one.inputs), {}, one.outputs, (), None)
            calls[one] = [*one.before, call, *one.after]
    return calls


def whole(
    program: Program,
    plan: Schedule,
    after: Sequence[Instr],
    compiler: Compiler | None,
    device: torch.device,
    *,
    in_place: bool,
    **options: Any,
) -> tuple[Head, Schedule]:
    """Return a function that computes a whole program, and the schedule that calls it, then others, and commits.

    Args:
      program: The program.
      plan: Its schedule.
      after: Calls that are made after the function, in front of the commit.
      compiler: As for :class:`Head`, like ``device`` and ``options``.
      device: Likewise.
      in_place: Whether the function writes the slots.
      options: Likewise.
    """
    born = {var for instr in plan.head for var in instr.outputs()}
    read = (var for instr in (*after, *plan.fused) for var in instr.inputs() if var in born)
    inside, outside = (plan.commits, []) if in_place else ([], plan.commits)
    computed = [*read, *(new for _, new in outside if new in born)]
    given: Any = {"handed_on": list(dict.fromkeys(computed)), "writes": inside}
    entrance, metrics = Entrance.of(program, plan, **given), 0 if in_place else len(plan.outputs)
    options = {**given, **options, "entrance": entrance, "metrics": metrics, "in_order": collects(program)}
    head = Head(program, plan, compiler, device, program.function, **options)
    fresh = partial(Fresh(program).like, offset=0, fills=True)
    outputs = list(map(fresh, plan.outputs))
    names = {var: fresh(var) for var in given["handed_on"]}

    def new(var: Var) -> Var:
        return names.get(var, var)

    call = Instr(head, tuple(head.takes), {}, [*outputs, *names.values()], (), None)
    calls = [call, *(instr.reading(new) for instr in after)]
    fused = [instr.reading(new) for instr in plan.fused]
    commits = [(old, new(value)) for old, value in outside]
    return head, Schedule(calls, fused, commits, plan.staged.intersection(dict(commits)), outputs)


def collects(program: Program) -> bool:
    """Whether a program has collectives or transfers."""
    return any(is_between_ranks(instr.op) for instr in program.instrs)


def checked(
    part: Program, calls: list[Instr], compiler: Compiler | None, device: torch.device
) -> list[Instr]:
    """Return calls with the checks that inductor's kernels lack on a host."""
    return check_values(part, calls) if device.type == "cpu" and compiler is None else calls
