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
from ..plan import Plan
from ..program import Program
from ..schedule import schedule
from ..sub_programs import SubProgram, calls_of
from ..trial.reference import Reference
from .functions import Compiler, checked, collects, whole
from .in_place import SMALL, InPlacePlan, largest
from .inductor import start_workers
from .known_masks import use_known_masks
from .parts import by_sub_programs, in_parts

__all__ = ["announce", "lower", "prepare", "without_lanes"]

_PAYS = 1000  # calls that need not be compiled, ten seconds: worth parts that nobody asked for
_LARGE = 2**20  # bytes: recomputing or storing a smaller value takes a kernel longer than it is worth


def announce(device: torch.device, options: Options) -> None:
    """Say before a trace that its program will be lowered, so that what a compiler needs starts beside the trace."""
    if device.type == "cuda" and options.lowering in ("auto", "inductor"):
        start_workers()


def lower(program: Program, device: torch.device, options: Options, reference: Reference) -> Plan:
    """Lower a rewritten program: the first row that fits says how.

    ===========================================  ============================================================
    program, ``lowering=``, device               plan
    ===========================================  ============================================================
    no calls; ``"aten"``; ``"auto"`` on a CPU    the ATen calls, in one line or on lanes
    stages of a pipeline                         a function for each sub-program, among ATen calls
    equal parts, with ``compile_once``           a function for each kind of part; on a GPU it writes the slots
    inductor, on a GPU or for lanes              one function that writes the slots, in one line or on lanes
    another compiler; inductor on a CPU          one function that writes no slot, then the commit in ATen calls
    ===========================================  ============================================================

    Lanes on a CPU are simulated ones, which stand for a GPU.

    Args:
      program: The program.
      device: Where it runs.
      options: The options of the step.
      reference: The program as traced, which finds the user's line for an exception from a compiled function.
    """
    on_gpu, choice, auto = device.type == "cuda", options.lowering, options.branches == "auto"
    compiler = None if isinstance(choice, str) else choice
    asked = options.branches != 1 and options.compile_once is not True
    backend_lacks = without_lanes(device, options.backend) if asked else ""
    why = _in_one_line(program, options) if asked and not backend_lacks else ""
    lanes = asked and bool(program.instrs) and not (backend_lacks or why)
    held = sum(
        var.spec.nbytes for var in (*program.slots, *program.inputs, *(c.var for c in program.constants))
    )
    spread = partial(choose, asked=options.branches, held=held, memory=options.branch_memory)
    if not program.instrs or choice == "aten" or (choice == "auto" and not on_gpu):
        if lanes:
            program.instrs = calls_of(program.instrs)
            beside_collectives(program, device, held, options.branch_memory)
        plan = Plan(program, schedule(program), spread=spread if lanes else None)
    elif _in_stages(program):
        plan = by_sub_programs(program, device, compiler, reference)
    else:
        in_place = compiler is None and (on_gpu or lanes)
        if on_gpu or in_place:
            prepare(program, budget=options.activation_memory_budget)
        if in_place and lanes:
            beside_collectives(program, device, held, options.branch_memory)
            why = _in_one_line(program, options, compiled=True)
        on_lanes = in_place and lanes and not why
        pays = in_place and not on_lanes and len(program.instrs) > _PAYS
        parted = None
        if options.compile_once is True or (options.compile_once == "auto" and pays):
            least = 0 if options.compile_once is True else _PAYS
            parted = in_parts(program, device, compiler, reference, in_place=in_place, least=least)
        if parted is not None:
            plan = parted
        elif in_place:
            plan = InPlacePlan(program, device, spread if on_lanes else None)
        else:
            plan = _as_head(program, device, compiler, reference)
    if asked and (why or not auto) and not plan.branches:
        plan.branches = f"branches: none, {why or backend_lacks or 'with this lowering it runs in one line'}"
    return plan


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


def _in_one_line(program: Program, options: Options, *, compiled: bool = False) -> str:
    """Return why a program runs in one line, from what is known before it is compiled; empty if it may not.

    A step whose lanes nobody asked for is rehearsed and measured before its capture. So ranks would have to agree on
    that, or one would wait for the others.

    Args:
      program: The program.
      options: The options of the step.
      compiled: Whether it is ready to be compiled; else what it says holds for ATen calls, too.
    """
    auto = options.branches == "auto"
    if auto and (collects(program) or _in_stages(program)):
        return "beside collectives a number of lanes has to be asked for"
    if (auto or compiled) and largest(program) > SMALL:
        return "its values are so large that each kernel fills the device"
    if compiled and auto and torch.are_deterministic_algorithms_enabled():
        return "since algorithms have to be deterministic, and a measurement chooses lanes"
    return in_advance(in_line(launches_of(program)), options.branches) if compiled else ""


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


def _as_head(program: Program, device: torch.device, compiler: Compiler | None, reference: Reference) -> Plan:
    """Return a plan that runs a compiled function that writes no slot, then the commit of the ATen lowering."""
    scheduled = schedule(program)
    plan = replace(scheduled, head=checked(program, scheduled.head, compiler, device))
    # A compiler drops calls without results, so checks run outside of it, before the commit.
    checks = [instr for instr in plan.head if instr.checks]
    plan = replace(plan, head=[instr for instr in plan.head if not instr.checks])
    _, runs = whole(program, plan, checks, compiler, device, in_place=False)
    return Plan(program, scheduled, runs, raised_at=reference.raises_at)
