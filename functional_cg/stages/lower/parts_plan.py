"""Run a program in parts, of which equal ones are compiled once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from ...state.outline import count
from ..fx_passes.canonical import pick_by_comparison
from ..fx_passes.cross_entropy import rewrite_losses
from ..fx_passes.logits import has_large_logits
from ..passes.bounds import check_values
from ..plan import AtenPlan, Buffers, Run
from ..program import Instr, Program
from ..schedule import Schedule
from ..trial.reference import Reference
from .arguments import by_itself, like
from .graph import Entrance, build_graph
from .head import Compiler, Head, by_inductor
from .parts import Part, Parts

__all__ = ["PartsPlan"]


class PartsPlan:
    """Runs compiled functions one after another, those of equal parts several times.

    Args:
      program: A rewritten program.
      device: Where it runs.
      plan: Its schedule.
      parts: Its parts.
      compiler: Compiles a part; None for inductor.
      reference: Finds the user's line for an exception from a compiled function.
    """

    compiled = True
    branches = ""
    temporaries = 0

    def __init__(
        self,
        program: Program,
        device: torch.device,
        plan: Schedule,
        parts: Parts,
        compiler: Compiler | None,
        reference: Reference,
    ) -> None:
        self._program, self._device, self._compiler, self._reference = program, device, compiler, reference
        self.schedule, self.copies = plan, device.type == "cpu" and bool(plan.commits)
        self._large = has_large_logits(program)
        self._heads: dict[Head, Part] = {}
        calls = {part: call for alike in parts.alike for part, call in self._compiled(alike)}
        self.functions = len(self._heads)
        self.times = [len(alike) for alike in parts.alike]
        self.shared: Sequence[str] = [_said(alike) for alike in parts.alike if len(alike) > 1]
        checks = [instr for instr in plan.head if instr.checks]
        head = [instr for part in parts.order for instr in (*part.before, calls[part])]
        head += [*parts.after, *checks]
        self._aten = AtenPlan(program, replace(plan, head=head, commits=parts.commits))

    def _compiled(self, alike: Sequence[Part]) -> Iterator[tuple[Part, Instr]]:
        """Yield the call of each of some parts that share a compiled function."""
        first, name = alike[0], f"part_{len(self._heads) + 1}"
        on_host, known = self._device.type == "cpu", self._compiler is None
        part = Program(name, [], [], first.inputs, instrs=first.calls, outputs=[*first.outputs])
        calls = check_values(part, first.calls) if on_host and known else first.calls
        plan = Schedule(calls, outputs=first.outputs)
        graph = build_graph(part, plan, Entrance([], {}, []), writes=first.commits, as_traced=True)
        if not on_host and known:
            pick_by_comparison(graph.graph)
            if self._large:
                rewrite_losses(graph.graph)
            graph.recompile()
        compile_it = self._compiler or partial(
            by_inductor, self._program.function, on_host=on_host, small=False, in_order=False
        )
        head = Head(name, graph, compile_it, results=first.outputs, metrics=first.metrics, known=known)
        self._heads[head] = first
        for one in alike:
            yield one, Instr(head, tuple(one.inputs), {}, one.outputs, (), None)

    def as_text(self) -> str:
        pairs = zip(self._heads, self.times, strict=True)
        texts = [f"{head}, which runs {count(times, 'time')}:\n{head.graph.code}" for head, times in pairs]
        return "\n".join([*texts, self._aten.as_text()])

    def bind(self, buffers: Buffers) -> Run:
        # A compiled kernel may take a CPU scalar as if it were on the device.
        here = [one.to(self._device) for one in buffers.constants]
        slots, inputs = map(by_itself, buffers.slots), map(by_itself, buffers.inputs)
        buffers = Buffers([*slots], [*inputs], [*map(by_itself, here)])
        program = self._program
        known = [*program.slots, *program.inputs, *(constant.var for constant in program.constants)]
        tensors = dict(zip(known, [*buffers.slots, *buffers.inputs, *buffers.constants], strict=True))
        for head, part in self._heads.items():
            if head.compiled is None:
                head.compile([tensors[var] if var in tensors else like(var) for var in part.inputs])
        return self._aten.bind(buffers, partial(self._reference.raises_at, buffers))


def _said(alike: Sequence[Part]) -> str:
    """Return in words which calls share a function."""
    calls = count(len(alike[0].calls), "call")
    return f"compiled once: {len(alike)} x {calls}, {_where(alike[0])}; ...; {_where(alike[-1])}"


def _where(part: Part) -> str:
    """Return where the calls of a part come from: modules, or lines where there are none."""
    places = [one.origin.module or (str(one.site) if one.site else "") for one in part.calls]
    known = list(dict.fromkeys(filter(None, places))) or ["the update"]
    return known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"
