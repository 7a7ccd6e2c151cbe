"""Compile a whole step to one function that writes the slots itself, and spread what it launches over lanes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ...ambient.modes import ordinary, without_gradients
from ...concurrency.interrupts import uninterrupted
from ..branches.launches import Launches, UnknownLaunch
from ..branches.listing import in_line
from ..branches.races import refuse_races
from ..branches.rehearsal import Lanes
from ..branches.units import Unit
from ..fx_passes.canonical import pick_by_comparison
from ..fx_passes.cross_entropy import rewrite_losses
from ..fx_passes.logits import has_large_logits
from ..fx_passes.products import batch_gradients
from ..passes.fused import group_size, split_light, written_pairs
from ..passes.rewrite import clears
from ..plan import Before, Buffers, Plan, Run, Spread
from ..program import Instr, Program, Var
from ..schedule import Schedule, schedule
from .arguments import by_itself
from .functions import FunctionsPlan, collects, whole
from .graph import calls_of
from .inductor import opened

__all__ = ["SMALL", "InPlacePlan", "is_small", "largest"]

SMALL = 2**24  # bytes of values that leave room on the device for other kernels


class InPlacePlan(FunctionsPlan):
    """Runs a compiled function that writes the slots, then the light updates.

    Args:
      program: The program.
      device: Where it runs.
      spread: Chooses which of its launches run side by side; None for one line.
      why: Why it is None; empty if nothing else was asked for.
    """

    def __init__(
        self, program: Program, device: torch.device, spread: Spread | None = None, why: str = ""
    ) -> None:
        self.program, self._spread, self._small = program, spread, is_small(program)
        # Where launches are what counts, the compiler launches updates together; on lanes, they run beside the others.
        light = split_light(program) if spread is None and not self._small else set()
        plan = schedule(program, fuse=light)
        _move_lists(plan, light)
        self._light = {f"{instr.name}.{number}": instr for number, instr in enumerate(plan.fused)}
        lists = [instr for instr in plan.fused if not written_pairs(instr)]
        updates = replace(plan, fused=[instr for instr in plan.fused if instr not in lists])
        given: Any = {"in_place": True, "small": self._small, "suit": self._suit}
        head, runs = whole(program, updates, lists, None, device, **given)
        super().__init__(program, plan, runs, device, [head], copies=False, timed=True)
        self.timeline = replace(self.timeline, estimated=spread is not None)
        self.branches = f"branches: none, {why}" if why else ""
        if spread is not None:
            self.branches = "branches: told once it is compiled"

    @property
    def graph(self) -> fx.GraphModule:
        """What is compiled."""
        return self._heads[0].graph

    def as_text(self) -> str:
        behind = (
            f"# then {name}: {group_size(one)} leaves, by its own kernel" for name, one in self._light.items()
        )
        return "\n".join([str(self.graph.code), *behind])

    def named_calls(self) -> Mapping[str, Instr]:
        """Return the calls of the compiled function, by the names that inductor's kernels have for them."""
        return calls_of(self.graph.graph)

    def bind(self, buffers: Buffers, tick: Callable[[], None] = lambda: None) -> Run:
        launch = super().bind(buffers, tick)

        def run(before: Before) -> Sequence[Tensor]:
            uninterrupted(before)  # the function writes the state
            return launch(())

        return run

    def rehearse(self, buffers: Buffers) -> None:
        with ordinary():
            without_gradients()
            super().rehearse(buffers)

    def bind_to(self, buffers: Buffers, lanes: Lanes) -> Run:
        launch = super().bind_to(buffers, lanes)

        def run(before: Before) -> Sequence[Tensor]:
            with ordinary():
                without_gradients()
                return self._heads[0].expected.as_traced(launch(before))

        return run

    def in_line(self) -> Plan:
        return InPlacePlan(self.program, self._device)

    def _scope(self, buffers: Buffers) -> tuple[Mapping[str, Any], Sequence[Tensor]]:
        tensors = self._tensors(buffers)
        arguments = [tensors[var] for var in self._heads[0].takes]
        # Not part of the graph, where writing to some elements of a result would copy it.
        return self._launches.scope(arguments, clears(self.program, tensors)), arguments

    def _compile(self, known: Mapping[Var, Tensor]) -> None:
        if self._spread is not None and self._heads[0].compiled is None:
            with ordinary():
                without_gradients()
                try:
                    self._beside(self._spread, known)
                except BaseException:  # the next call begins anew
                    self._heads[0].compiled = None
                    raise
        super()._compile(known)

    def _beside(self, spread: Spread, known: Mapping[Var, Tensor]) -> None:
        """Compile to launches that run side by side; compile nothing if that does not pay."""
        head, program = self._heads[0], self.program
        head.compile(known, beside=True)
        assert head.compiled is not None
        found, timeline = opened(head.compiled), self.timeline
        arguments = [by_itself(known[var]) for var in head.takes]
        if found is None:
            timeline = replace(in_line(()), why="torch's compiler does not show what it wrote")
        elif len({var.storage for var in head.takes}) < len(head.takes):
            timeline = replace(in_line(()), why="two arguments of its compiled function share memory")
        else:
            name, count = program.function, len(self.schedule.outputs)
            try:
                self._launches = launches = Launches(name, *found, arguments, count)
            except UnknownLaunch as error:
                timeline = replace(in_line(()), why=f"`{error}` is not known to be a launch")
            else:
                self._code = launches.code
                padding = Unit("padding", ["*clears"], writes=frozenset(launches.code.known), commits=True)
                timeline = spread(
                    [*launches.units, *[padding] * bool(clears(program, known))], launches.code.kept
                )
                refuse_races(timeline, name)
        if timeline.lanes == 1:
            head.compiled = None
            self._suit_one_line(head.graph.graph)
            head.graph.recompile()
        self.tell(timeline)

    def _suit(self, graph: fx.Graph) -> None:
        pick_by_comparison(graph)
        if self._spread is None:
            self._suit_one_line(graph)

    def _suit_one_line(self, graph: fx.Graph) -> None:
        """Change the graph as suits one line; on lanes, weight gradients run beside the chain of the others."""
        if self._small:
            batch_gradients(graph)
        elif has_large_logits(self.program):
            rewrite_losses(graph)


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
