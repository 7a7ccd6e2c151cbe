"""Lower a program to ATen calls, or with a compiler: inductor, or any backend of ``torch.compile``.

On a GPU, inductor compiles the whole step to one function that writes the slots itself, so gradients fuse into the
update and the state is not copied. This is safe because nothing raises on a GPU once the function runs. On a CPU a call
may raise midway, and how another compiler uses memory is unknown: there the compiled function is only the head, which
writes no slot, and ATen calls commit what it returns.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...options import Options
from ...shards.transfers import TRANSFERS
from ..branches.choice import choose, in_advance
from ..branches.listing import in_line
from ..branches.order import beside_collectives, launches_of
from ..passes.equal_calls import share_equal_calls
from ..passes.out_of_place import write_out_of_place
from ..passes.recompute import keep_as_buffers, recompute
from ..passes.summed_products import join_summed_products
from ..plan import AtenPlan, Plan, Spread, lower_aten
from ..program import Program
from ..schedule import schedule
from ..sub_programs import SubProgram, calls_of
from ..trial.reference import Reference
from .functions import Compiler, FunctionsPlan, checked, collects, whole
from .in_place import SMALL, InPlacePlan, largest
from .inductor import start_workers
from .known_masks import use_known_masks
from .parts import by_sub_programs, in_parts

__all__ = ["announce", "lower", "prepare", "without_lanes"]

_FULL = "its values are so large that each kernel fills the device"
_PAYS = 1000  # calls that need not be compiled, ten seconds: worth parts that nobody asked for
_LARGE = 2**20  # bytes: recomputing or storing a smaller value takes a kernel longer than it is worth


def announce(device: torch.device, options: Options) -> None:
    """Say before a trace that its program will be lowered, so that what a compiler needs starts beside the trace."""
    if device.type == "cuda" and options.lowering in ("auto", "inductor"):
        start_workers()


def lower(program: Program, device: torch.device, options: Options, reference: Reference) -> Plan:
    """Lower a rewritten program.

    Args:
      program: The program.
      device: Where it runs.
      options: The options of the step.
      reference: The program as traced, which finds the user's line for an exception from a compiled function.
    """
    on_gpu, choice, auto = device.type == "cuda", options.lowering, options.branches == "auto"
    asked = options.branches != 1 and options.compile_once is not True
    why = without_lanes(device, options.backend) if asked else ""
    lanes, told = asked and not why, ""
    if lanes and auto:
        told = _not_unasked(program)
        lanes = not told
    if choice == "aten" or (choice == "auto" and not on_gpu):
        if lanes:
            program.instrs = calls_of(program.instrs)
            beside_collectives(program, device, _held(program), options.branch_memory)
            return AtenPlan(program, schedule(program), _spread(program, options))
        plan: Plan = lower_aten(program)
    elif not program.instrs:
        plan = lower_aten(program)  # there is nothing to compile
    else:
        plan = _compiled(program, device, options, reference, lanes=lanes)
    if told or (asked and not auto and not plan.branches):
        plan.branches = f"branches: none, {told or why or 'with this lowering it runs in one line'}"
    return plan


def _compiled(
    program: Program, device: torch.device, options: Options, reference: Reference, *, lanes: bool
) -> Plan:
    on_gpu, choice = device.type == "cuda", options.lowering
    compiler = None if isinstance(choice, str) else choice
    if _in_stages(program):
        return by_sub_programs(program, device, compiler, reference)
    on_lanes = lanes and compiler is None  # on a CPU, simulated ones: it stands for a GPU
    if on_gpu or on_lanes:
        prepare(program, budget=options.activation_memory_budget)
    if on_lanes:
        beside_collectives(program, device, _held(program), options.branch_memory)
    in_place = compiler is None and (on_gpu or on_lanes)
    why = _fills_a_line(program, options) if in_place and lanes else ""
    spread = _spread(program, options) if in_place and lanes and not why else None
    unasked = options.compile_once == "auto" and in_place and spread is None
    if options.compile_once is True or (unasked and len(program.instrs) > _PAYS):
        least = _PAYS if unasked else 0
        parted = in_parts(program, device, compiler, reference, in_place=in_place, least=least)
        if parted is not None:
            return parted
    if not in_place:
        return _as_head(program, device, compiler, reference)
    return InPlacePlan(program, device, spread, why)


def _in_stages(program: Program) -> bool:
    """Whether a program runs the stages of a pipeline."""
    return any(isinstance(one.op, SubProgram) or one.op in TRANSFERS for one in program.instrs)


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


def _spread(program: Program, options: Options) -> Spread:
    """Return what chooses which units run side by side: those that pay."""
    return partial(choose, asked=options.branches, held=_held(program), memory=options.branch_memory)


def _held(program: Program) -> int:
    """Return the bytes that a step holds besides temporaries."""
    held = (*program.slots, *program.inputs, *(c.var for c in program.constants))
    return sum(var.spec.nbytes for var in held)


def _fills_a_line(program: Program, options: Options) -> str:
    """Return why a compiled step is not worth lanes, from what is known before it is compiled; empty if it may be."""
    if largest(program) > SMALL:
        return _FULL
    if options.branches == "auto" and torch.are_deterministic_algorithms_enabled():
        return "since algorithms have to be deterministic, and a measurement chooses lanes"
    return in_advance(in_line(launches_of(program)), options.branches)


def _not_unasked(program: Program) -> str:
    """Return why a program runs in one line if nobody asks for a number of lanes, whatever its calls take.

    A step on lanes is rehearsed and measured before its capture. So ranks have to agree on that, or one would wait for
    the others.
    """
    if collects(program) or _in_stages(program):
        return "beside collectives a number of lanes has to be asked for"
    return _FULL if largest(program) > SMALL else ""


def prepare(program: Program, *, budget: float | None = None, large: int = _LARGE) -> None:
    """Rewrite a program in place for a compiler that gets all of it: choose what the forward keeps for the backward.

    Args:
      program: A rewritten program.
      budget: What the forward keeps, from 0, the least, to 1; None for what pays.
      large: Bytes from which a value is worth a kernel.
    """
    write_out_of_place(program)
    share_equal_calls(program)
    join_summed_products(program)
    use_known_masks(program)
    recompute(program, budget=budget, large=large)
    keep_as_buffers(program, large=large)


def _as_head(
    program: Program, device: torch.device, compiler: Compiler | None, reference: Reference
) -> FunctionsPlan:
    """Return a plan that runs a compiled function that writes no slot, then the commit of the ATen lowering."""
    scheduled = schedule(program)
    plan = replace(scheduled, head=checked(program, scheduled.head, compiler, device))
    # A compiler drops calls without results, so checks run outside of it, before the commit.
    checks = [instr for instr in plan.head if instr.checks]
    plan = replace(plan, head=[instr for instr in plan.head if not instr.checks])
    head, runs = whole(program, plan, checks, compiler, device, in_place=False)
    return FunctionsPlan(program, scheduled, runs, device, [head], raised_at=reference.raises_at)
