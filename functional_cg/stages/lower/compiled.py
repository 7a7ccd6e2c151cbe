"""Lower a program to ATen calls, or with a compiler: inductor, or any backend of ``torch.compile``.

On a GPU, inductor compiles the whole step to one function that writes the slots itself, so gradients fuse into the
update and the state is not copied. This is safe because nothing raises on a GPU once the function runs. On a CPU a call
may raise midway, and how another compiler uses memory is unknown: there the compiled function is only the head, which
writes no slot, and ATen calls commit what it returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ambient.modes import ordinary, without_gradients
from ...concurrency.interrupts import uninterrupted
from ...options import Options
from ...shards.transfers import TRANSFERS
from ..branches.choice import choose
from ..branches.plan import BranchedPlan
from ..fx_passes.canonical import pick_by_comparison
from ..fx_passes.cross_entropy import join_gradients
from ..fx_passes.logits import has_large_logits, read_targets_first
from ..fx_passes.products import batch_gradients
from ..passes.bounds import check_values
from ..passes.equal_calls import share_equal_calls
from ..passes.grouping import is_launch
from ..passes.out_of_place import write_out_of_place
from ..passes.recompute import keep_as_buffers, recompute
from ..passes.rewrite import clears, range_tensor
from ..plan import AtenPlan, Before, Buffers, ExecutionPlan, Run, lower_aten
from ..program import Instr, Program, Var, highest, map_vars
from ..schedule import Schedule, schedule
from ..trial.reference import Reference
from .arguments import by_itself
from .graph import Entrance, build_graph, calls_of
from .head import ONE_LINE, Compiler, Head, by_inductor
from .parts import parts_of
from .parts_plan import PartsPlan
from .regions import RegionsPlan

__all__ = ["HeadPlan", "InPlacePlan", "in_parts", "lower", "prepare", "without_lanes"]

_SMALL = 2**24  # bytes
_LARGE = 2**20  # bytes: recomputing or storing a smaller value takes a kernel longer than it is worth


def lower(program: Program, device: torch.device, options: Options, reference: Reference) -> ExecutionPlan:
    """Lower a rewritten program.

    Args:
      program: The program.
      device: Where it runs.
      options: The options of the step: ``lowering``, ``compile_once`` and ``activation_memory_budget``.
      reference: The program as traced, which finds the user's line for an exception from a compiled function.
    """
    on_gpu, choice = device.type == "cuda", options.lowering
    if choice == "aten" or (choice == "auto" and not on_gpu):
        asked = options.branches != 1
        why = without_lanes(device, options.backend) if asked else ""
        if asked and not why:
            return _in_branches(program, options)
        plan = lower_aten(program)
        if why:
            plan.branches = f"branches: none, {why}"
        return plan
    if any(instr.region for instr in program.instrs):
        return RegionsPlan(program, device, None if isinstance(choice, str) else choice, reference)
    if on_gpu:
        prepare(program, budget=options.activation_memory_budget)
    compiler = None if isinstance(choice, str) else choice
    in_place = on_gpu and compiler is None
    if options.compile_once:
        parted = in_parts(program, device, compiler, reference, in_place=in_place)
        if parted is not None:
            return parted
    return InPlacePlan(program, device) if in_place else HeadPlan(program, device, compiler, reference)


def in_parts(
    program: Program,
    device: torch.device,
    compiler: Compiler | None,
    reference: Reference,
    *,
    in_place: bool,
) -> PartsPlan | None:
    """Return a plan that compiles equal parts of a program once; None if that would save too little.

    Args:
      program: A rewritten program.
      device: Where it runs.
      compiler: Compiles a part; None for inductor.
      reference: The program as traced.
      in_place: Whether the compiled functions write the slots.
    """
    write_out_of_place(program)
    plan = schedule(program, fuse=not in_place)
    parts = parts_of(program, plan, in_place=in_place)
    return None if parts is None else PartsPlan(program, device, plan, parts, compiler, reference)


def without_lanes(device: torch.device, backend: Any) -> str:
    """Return why a backend runs no calls side by side; empty if it does."""
    if not isinstance(backend, str):
        return (
            ""
            if getattr(backend, "has_lanes", False)
            else f"`{type(backend).__name__}` runs one call at a time"
        )
    if device.type != "cuda":
        return "a CPU runs one call at a time"
    if torch.cuda.get_allocator_backend() != "native":
        return "`cudaMallocAsync` cannot free the workspaces that captures on lanes take"
    return ""


def _in_branches(program: Program, options: Options) -> ExecutionPlan:
    """Lower to ATen calls that run side by side where that pays."""
    held = sum(
        var.spec.nbytes for var in (*program.slots, *program.inputs, *(c.var for c in program.constants))
    )
    return BranchedPlan(program, schedule(program), partial(choose, asked=options.branches, held=held))


def prepare(program: Program, *, budget: float | None = None, large: int = _LARGE) -> None:
    """Rewrite a program in place for a compiler that gets all of it: choose what the forward keeps for the backward.

    Args:
      program: A rewritten program.
      budget: What the forward keeps, from 0, the least, to 1; None for what pays.
      large: Bytes from which a value is worth a kernel.
    """
    write_out_of_place(program)
    share_equal_calls(program)
    recompute(program, budget=budget, large=large)
    keep_as_buffers(program, large=large)


class InPlacePlan:
    """Runs a compiled function that returns the metrics and writes the slots."""

    compiled = True
    functions = 1
    copies = False
    branches = ONE_LINE
    temporaries = 0
    shared: Sequence[str] = ()

    def __init__(self, program: Program, device: torch.device) -> None:
        self._program = program
        self.schedule = plan = schedule(program, fuse=False)
        self._entrance = Entrance.of(program, plan, writes=plan.commits)
        self._graph = build_graph(program, plan, self._entrance, writes=plan.commits)
        self._device = device
        self._in_order = _collects(program)
        pick_by_comparison(self._graph.graph)
        self._small = not self._in_order and _largest(program) <= _SMALL
        if self._small:
            batch_gradients(self._graph.graph)
        elif has_large_logits(program):
            join_gradients(self._graph.graph)
            read_targets_first(self._graph.graph)
        self._graph.recompile()
        self._compiled: Callable[..., Any] | None = None

    def as_text(self) -> str:
        return str(self._graph.code)

    def named_calls(self) -> Mapping[str, Instr]:
        return calls_of(self._graph.graph)

    def bind(self, buffers: Buffers) -> Run:
        # A compiled kernel may take a CPU scalar as if it were on the device.
        here = [one.to(self._device) for one in buffers.constants]
        arguments, ranges = _arguments(self._program, self._entrance, replace(buffers, constants=here))
        if self._compiled is None:
            self._compiled = self._compile(arguments)
        compiled, count = self._compiled, len(self.schedule.outputs)
        # Not part of the graph, where writing to some elements of a result would copy it.
        after = clears(self._program, ranges)

        def run(before: Before) -> Sequence[Tensor]:
            with ordinary():
                without_gradients()
                uninterrupted(before)
                metrics: Sequence[Tensor] = compiled(*arguments)[:count]
                uninterrupted(after)
                return metrics

        return run

    def _compile(self, arguments: Sequence[Tensor]) -> Callable[..., Any]:
        with ordinary():
            without_gradients()
            return by_inductor(
                self._program.function,
                self._graph,
                arguments,
                on_host=self._device.type == "cpu",
                small=self._small,
                in_order=self._in_order,
            )


class HeadPlan:
    """Runs a compiled function that writes no slot, then the commit of the ATen lowering."""

    compiled = True
    functions = 1
    copies = True
    branches = ONE_LINE
    temporaries = 0
    shared: Sequence[str] = ()

    def __init__(
        self, program: Program, device: torch.device, compiler: Compiler | None, reference: Reference
    ) -> None:
        self._program, self._reference = program, reference
        self.schedule = plan = schedule(program)
        if device.type == "cpu" and compiler is None:
            plan = replace(plan, head=check_values(program, plan.head))
        # A compiler drops calls without results, so checks run outside of it, before the commit.
        checks = [instr for instr in plan.head if instr.checks]
        plan = replace(plan, head=[instr for instr in plan.head if not instr.checks])
        born = {var for instr in plan.head for var in instr.outputs()}
        read = (var for instr in (*checks, *plan.fused) for var in instr.inputs() if var in born)
        handed_on = list(dict.fromkeys([*read, *(new for _, new in plan.commits)]))
        entrance = Entrance.of(program, plan, handed_on=handed_on)
        graph = build_graph(program, plan, entrance, handed_on=handed_on)
        compile_head = compiler or partial(
            by_inductor,
            program.function,
            on_host=device.type == "cpu",
            small=False,
            in_order=_collects(program),
        )
        self._head = Head(
            program.function,
            graph,
            compile_head,
            metrics=len(plan.outputs),
            count=len(plan.outputs) + len(handed_on),
            known=compiler is None,
        )
        self._entrance = entrance
        self._aten = AtenPlan(program, _around(self._head, program, plan, entrance, handed_on, checks))

    def as_text(self) -> str:
        return f"{self._head.graph.code}\n{self._aten.as_text()}"

    def named_calls(self) -> Mapping[str, Instr]:
        return {}

    def bind(self, buffers: Buffers) -> Run:
        if self._head.compiled is None:
            self._head.compile(_arguments(self._program, self._entrance, buffers)[0])
        return self._aten.bind(buffers, partial(self._reference.raises_at, buffers))


def _around(
    head: Head,
    program: Program,
    plan: Schedule,
    entrance: Entrance,
    handed_on: Sequence[Var],
    checks: Sequence[Instr],
) -> Schedule:
    """Return the schedule that calls a compiled head, runs the checks, and commits the values it hands on."""
    index, storage = highest(program)
    arguments = [*entrance.slots, *program.inputs, *(c.var for c in program.constants)]
    number = itertools.count(1)

    def fresh(var: Var) -> Var:
        n = next(number)
        return replace(var, index=index + n, storage=storage + n, offset=0, fills=True)

    metrics = [fresh(var) for var in plan.outputs]
    names = {var: fresh(var) for var in handed_on}

    def new(var: Var) -> Var:
        return names.get(var, var)

    def renamed(instr: Instr) -> Instr:
        kwargs = {name: map_vars(new, value) for name, value in instr.kwargs.items()}
        return replace(instr, args=map_vars(new, instr.args), kwargs=kwargs)

    fused = list(map(renamed, plan.fused))
    call = Instr(head, tuple(arguments), {}, [*metrics, *names.values()], (), None)
    return Schedule(
        [call, *map(renamed, checks)],
        fused,
        [(old, names[value]) for old, value in plan.commits],
        outputs=metrics,
    )


def _arguments(
    program: Program, entrance: Entrance, buffers: Buffers
) -> tuple[list[Tensor], dict[Var, Tensor]]:
    """Return the arguments of a graph, and the tensors of all slots and ranges."""
    tensors = dict(zip(program.slots, buffers.slots, strict=True))
    for known in program.ranges:
        tensors[known.var] = range_tensor(known, [tensors[leaf] for leaf in known.leaves])
    arguments = [*(tensors[var] for var in entrance.slots), *buffers.inputs, *buffers.constants]
    return list(map(by_itself, arguments)), tensors


def _collects(program: Program) -> bool:
    """Whether a program has collectives or transfers."""
    return any(is_launch(instr) or instr.op in TRANSFERS for instr in program.instrs)


def _largest(program: Program) -> int:
    """Return the bytes of the largest value that the step computes."""
    return max((var.spec.nbytes for instr in program.instrs for var in instr.outputs()), default=0)
