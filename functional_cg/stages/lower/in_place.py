"""Compile a whole step to one function that writes the slots itself, and spread what it launches over lanes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ambient.modes import ordinary, without_gradients
from ...concurrency.interrupts import uninterrupted
from ...shards.transfers import is_between_ranks
from ..branches.launches import Launches, UnknownLaunch
from ..branches.listing import in_line
from ..branches.races import refuse_races
from ..branches.rehearsal import Lanes
from ..branches.units import Unit
from ..evaluate import evaluate, evaluate_all
from ..fx_passes.canonical import pick_by_comparison
from ..fx_passes.cross_entropy import rewrite_losses
from ..fx_passes.logits import has_large_logits
from ..fx_passes.products import batch_gradients
from ..passes.fused import group_size, in_place, split_light, written_pairs
from ..passes.rewrite import clears
from ..plan import Before, Buffers, Plan, Run, Spread
from ..program import Instr, Program, Var
from ..schedule import Schedule, schedule
from .arguments import by_itself, tensors_of
from .functions import Results, by_inductor
from .graph import Entrance, build_graph, calls_of
from .inductor import opened

__all__ = ["SMALL", "InPlacePlan", "collects", "is_small", "largest"]

SMALL = 2**24  # bytes of values that leave room on the device for other kernels


class InPlacePlan(Plan):
    """Runs a compiled function that returns the metrics and writes the slots.

    Args:
      program: The program.
      device: Where it runs.
      spread: Chooses which of its launches run side by side; None for one line.
      why: Why it is None; empty if nothing else was asked for.
    """

    compiled = True
    functions = 1
    copies = False

    def __init__(
        self, program: Program, device: torch.device, spread: Spread | None = None, why: str = ""
    ) -> None:
        self._program, self._device, self._spread = program, device, spread
        self._in_order, self._small = collects(program), is_small(program)
        # Where launches are what counts, the compiler launches updates together; on lanes, they run beside the others.
        light = split_light(program) if spread is None and not self._small else set()
        self.schedule = plan = schedule(program, fuse=light)
        _move_lists(plan, light)
        born = {var for instr in plan.head for var in instr.outputs()}
        read = (var for instr in plan.fused for var in instr.inputs())
        self._handed_on = [var for var in dict.fromkeys(read) if var in born]
        self._light = {f"{instr.name}.{number}": instr for number, instr in enumerate(plan.fused)}
        given: Any = {"handed_on": self._handed_on, "writes": plan.commits}
        self._entrance = Entrance.of(program, plan, **given)
        self._graph = build_graph(program, plan, self._entrance, **given)
        pick_by_comparison(self._graph.graph)
        if spread is None:
            self._suit_one_line()
        self._graph.recompile()
        self._compiled: Callable[..., Any] | None = None
        self._expected = Results(program.function, [*plan.outputs, *self._handed_on], program)
        self.timeline = replace(self.timeline, estimated=spread is not None)
        self.branches = f"branches: none, {why}" if why else ""
        if spread is not None:
            self.branches = "branches: told once it is compiled"

    def as_text(self) -> str:
        behind = (
            f"# then {name}: {group_size(one)} leaves, by its own kernel" for name, one in self._light.items()
        )
        return "\n".join([str(self._graph.code), *behind])

    def named_calls(self) -> Mapping[str, Instr]:
        """Return the calls by the names that inductor's kernels have for them, or that :meth:`bind` tells."""
        return {**calls_of(self._graph.graph), **self._light}

    def bind(self, buffers: Buffers, tick: Callable[[str], None] = lambda _: None) -> Run:
        """Bind the plan to buffers.

        Args:
          buffers: The buffers.
          tick: What to call before each call that updates small leaves, with its name.
        """
        arguments, tensors = self._tensors(buffers)
        after = clears(self._program, tensors)
        if self._compiled is None:
            with ordinary():
                without_gradients()
                if self._spread is not None:
                    self._beside(self._spread, arguments, padded=bool(after))
                if self._compiled is None:
                    self._compiled = self._compile(arguments, beside=False)
        compiled, outputs = self._compiled, self.schedule.outputs
        count = len(outputs)
        update = self._updates(tensors, tick)

        def run(before: Before) -> Sequence[Tensor]:
            with ordinary():
                without_gradients()
                uninterrupted(before)
                results = self._expected.as_traced(compiled(*arguments))
                uninterrupted((*update(results[count:]), *after))
                return results[:count]

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
                return self._expected.as_traced(launch(before))

        return run

    def in_line(self) -> Plan:
        return InPlacePlan(self._program, self._device)

    def _scope(self, buffers: Buffers) -> tuple[Mapping[str, Any], Sequence[Tensor]]:
        arguments, tensors = self._tensors(buffers)
        # Not part of the graph, where writing to some elements of a result would copy it.
        return self._launches.scope(arguments, clears(self._program, tensors)), arguments

    def _tensors(self, buffers: Buffers) -> tuple[list[Tensor], dict[Var, Tensor]]:
        """Return the arguments of the function, and the tensors of all that is there before it."""
        tensors = tensors_of(self._program, buffers, self._device)
        return [by_itself(tensors[var]) for var in self._entrance.takes(self._program)], tensors

    def _updates(
        self, known: Mapping[Var, Tensor], tick: Callable[[str], None]
    ) -> Callable[[Sequence[Tensor]], Sequence[Callable[[], Any]]]:
        """Return what makes the calls of the light updates, given the values that the function hands on."""

        def of(instr: Instr, every: dict[Var, Tensor]) -> Callable[[], Any]:
            if not written_pairs(instr):
                return partial(evaluate_all, [instr], every)
            return partial(evaluate, replace(instr, op=in_place(instr.op)), every.__getitem__)

        def update(values: Sequence[Tensor]) -> Sequence[Callable[[], Any]]:
            every = {**known, **dict(zip(self._handed_on, values, strict=False))}
            calls = ((partial(tick, name), of(instr, every)) for name, instr in self._light.items())
            return [act for told_and_call in calls for act in told_and_call]

        return update

    def _beside(self, spread: Spread, arguments: Sequence[Tensor], *, padded: bool) -> None:
        """Compile to launches that run side by side; compile nothing if that does not pay."""
        compiled = self._compile(arguments, beside=True)
        found, timeline = opened(compiled), self.timeline
        program = self._program
        entering = self._entrance.takes(program)
        if found is None:
            timeline = replace(in_line(()), why="torch's compiler does not show what it wrote")
        elif len({var.storage for var in entering}) < len(entering):
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
                timeline = spread([*launches.units, *[padding] * padded], launches.code.kept)
                refuse_races(timeline, name)
        if timeline.lanes > 1:
            self._compiled = compiled
        else:
            self._suit_one_line()
            self._graph.recompile()
        self.tell(timeline)

    def _suit_one_line(self) -> None:
        """Change the graph as suits one line; on lanes, weight gradients run beside the chain of the others."""
        if self._small:
            batch_gradients(self._graph.graph)
        elif has_large_logits(self._program):
            rewrite_losses(self._graph.graph)

    def _compile(self, arguments: Sequence[Tensor], *, beside: bool) -> Callable[..., Any]:
        return by_inductor(
            self._program.function,
            self._graph,
            arguments,
            on_host=self._device.type == "cpu",
            small=self._small,
            in_order=self._in_order,
            beside=beside,
        )


def _move_lists(plan: Schedule, light: Collection[Instr]) -> None:
    """Move calls on lists to the tail whose results its light updates alone read, such as a clip."""
    read = {var for instr in plan.fused for var in instr.inputs()}
    lists = [instr for instr in plan.head if instr in light and read.issuperset(instr.outputs())]
    plan.head = [instr for instr in plan.head if instr not in lists]
    plan.fused = [*lists, *plan.fused]


def collects(program: Program) -> bool:
    """Whether a program has collectives or transfers."""
    return any(is_between_ranks(instr.op) for instr in program.instrs)


def is_small(program: Program) -> bool:
    """Whether a program computes small values alone, so that its run time is bound by launches."""
    return largest(program) <= SMALL and not collects(program)


def largest(program: Program) -> int:
    """Return the bytes of the largest value that a program computes."""
    return max((var.spec.nbytes for instr in program.instrs for var in instr.outputs()), default=0)
