"""Compile a whole step to one function that writes the slots itself, and spread what it launches over lanes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...concurrency.interrupts import uninterrupted
from ..branches.launches import Launches, UnknownLaunch
from ..branches.listing import Timeline, in_line
from ..branches.races import refuse_races
from ..branches.source import Lanes
from ..branches.units import Unit
from ..fx_passes.cross_entropy import suit
from ..fx_passes.products import batch_gradients
from ..passes.fused import split_light, written_pairs
from ..passes.rewrite import clears
from ..plan import Before, Buffers, Plan, Run, Spread, by_itself
from ..program import Instr, Program, Var
from ..schedule import Schedule, schedule
from .functions import collects, whole
from .graph import calls_of
from .inductor import opened

__all__ = ["SMALL", "InPlacePlan", "is_small", "largest"]

SMALL = 2**24  # bytes of values that leave room on the device for other kernels


class InPlacePlan(Plan):
    """Runs a compiled function that writes the slots, then the light updates.

    Args:
      program: The program.
      device: Where it runs.
      spread: Chooses which of its launches run side by side; None for one line.
    """

    def __init__(self, program: Program, device: torch.device, spread: Spread | None = None) -> None:
        self.program, self._device, self._spread, self._small = program, device, spread, is_small(program)
        # Where launches are what counts, the compiler launches updates together; on lanes, they run beside the others.
        light = split_light(program) if spread is None and not self._small else set()
        plan = schedule(program, fuse=light)
        _move_lists(plan, light)
        lists = [instr for instr in plan.fused if not written_pairs(instr)]
        updates = replace(plan, fused=[instr for instr in plan.fused if instr not in lists])
        self._head, runs = whole(program, updates, lists, None, device, in_place=True, small=self._small)
        suit(self._head.graph.graph)
        self._head.graph.recompile()
        if spread is None:
            self._suit_one_line()
        super().__init__(program, plan, runs, timed=True)
        self.timeline = replace(self.timeline, estimated=spread is not None)
        self.branches = "branches: told once it is compiled" if spread is not None else ""

    def named_calls(self) -> Mapping[str, Instr]:
        """Return the calls of the compiled function, by the names that inductor's kernels have for them."""
        return calls_of(self._head.graph.graph)

    def bind(self, buffers: Buffers, tick: Callable[[], None] = lambda: None) -> Run:
        launch = super().bind(buffers, tick)

        def run(before: Before) -> Sequence[Tensor]:
            uninterrupted(before)  # the function writes the state
            return launch(())

        return run

    def bind_to(self, buffers: Buffers, lanes: Lanes) -> Run:
        launch = super().bind_to(buffers, lanes)

        def run(before: Before) -> Sequence[Tensor]:
            return self._head.expected.as_traced(launch(before))

        return run

    def in_line(self) -> Plan:
        return InPlacePlan(self.program, self._device)

    def _scope(self, buffers: Buffers) -> tuple[Mapping[str, Any], Sequence[Tensor]]:
        tensors = self._tensors(buffers)
        arguments = [tensors[var] for var in self._head.takes]
        # Not part of the graph, where writing to some elements of a result would copy it.
        return self._launches.scope(arguments, clears(self.program, tensors)), arguments

    def _compile(self, known: Mapping[Var, Tensor]) -> None:
        head, spread = self._head, self._spread
        if spread is not None and head.compiled is None:
            compiled = head.compile(known, beside=True)
            timeline = self._beside(spread, compiled, known)
            if timeline.lanes > 1:
                head.compiled = compiled
            else:
                self._spread = None
                self._suit_one_line()
            self.tell(timeline)
        super()._compile(known)

    def _beside(self, spread: Spread, compiled: Callable[..., Any], known: Mapping[Var, Tensor]) -> Timeline:
        """Return what runs where if the launches of a compiled function run side by side, as far as that pays."""
        takes, name, found = self._head.takes, self.program.function, opened(compiled)
        if found is None:
            return replace(in_line(()), why="torch's compiler does not show what it wrote")
        if len({var.storage for var in takes}) < len(takes):
            return replace(in_line(()), why="two arguments of its compiled function share memory")
        arguments = [by_itself(known[var]) for var in takes]
        try:
            self._launches = Launches(name, *found, arguments, len(self.schedule.outputs))
        except UnknownLaunch as error:
            return replace(in_line(()), why=f"`{error}` is not known to be a launch")
        self._code = code = self._launches.code
        padding = Unit("padding", ["*clears"], writes=frozenset(code.known), commits=True)
        timeline = spread([*self._launches.units, *[padding] * bool(clears(self.program, known))], code.kept)
        refuse_races(timeline, name)
        return timeline

    def _suit_one_line(self) -> None:
        """Batch the weight gradients of small steps; on lanes, they run beside the chain of the others."""
        if self._small:
            batch_gradients(self._head.graph.graph)
            self._head.graph.recompile()


def _move_lists(plan: Schedule, light: Collection[Instr]) -> None:
    """Move calls on lists to the tail whose results its light updates alone read, such as a clip."""
    read = {var for instr in plan.fused for var in instr.inputs()}
    lists = [instr for instr in plan.head if instr in light and read.issuperset(instr.outputs())]
    plan.head = [instr for instr in plan.head if instr not in lists]
    plan.fused = [*lists, *plan.fused]


def is_small(program: Program) -> bool:
    """Whether a program computes small values alone, so that its run time is bound by launches."""
    return largest(program) <= SMALL and not collects(program)


def largest(program: Program) -> int:
    """Return the bytes of the largest value that a program computes."""
    return max((var.spec.nbytes for instr in program.instrs for var in instr.outputs()), default=0)
