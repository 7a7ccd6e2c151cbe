"""Results of lowering and capture: ``Lowered`` (a plan, no device work), ``Captured`` (bound to memory)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from torch import Tensor

from ..call.inputs import InputLayout
from ..call.mismatch import alike, layout_differences, layout_fix, order_differences, states_fix
from ..call.signature import Call
from ..concurrency.turns import Inner
from ..errors import LayoutError
from ..manual import Documented
from ..messages.html import Html, card, element, fold, line
from ..messages.units import size_of
from ..shards.collectives import WAIT
from ..shards.groups import Groups
from ..shards.mesh import Mesh
from ..shards.peers import watched
from ..shards.transfers import TRANSFERS
from ..stages.lower.costs import constant_costs, input_costs, metric_costs, slot_costs, staged_pairs
from ..stages.plan import Plan, Replay
from ..stages.program import Program
from ..stages.run.replay import Stats
from ..stages.template import unrolled
from ..stages.trace.footprint import Inspection
from ..stages.trace.recipe import BoundState, Recipe
from ..stages.trace.runs import agree
from ..stages.trial.reference import Reference
from ..stages.trial.trial import Certificate, Trial
from ..stages.watch.host_watch import HostWatch
from ..state.arena import Arena, dtype_name
from ..state.boundary import mesh_of
from ..state.handle import Handle, Lease, fill
from ..state.outline import Entry, branches_html, columns, count, listed, outline, size_text, tree_html
from ..tree import KeyPath, Treedef, path_string, structure_diff
from .constants import Constants
from .costs import CostAnalysis, cost_analysis
from .memory import MemoryAnalysis, memory_analysis
from .ranks.meeting import meet

__all__ = ["Captured", "Lowered"]

_STAGED_SHOWN = 8


@dataclass(eq=False)
class Captured(metaclass=Documented):
    """A lowered step captured on one arena (or several, for a function of several states).

    Attributes:
      run: ``run(args, kwargs)`` returns the new state and tensors, or MISS if the call does not fit.
      launched: To be called after a call that came by the slow path, the first one among them.
      finish: Builds the result of a call from these; runs user code, such as the classes of the metrics.
      replay: The backend's replay.
      arenas: The memory that the capture is bound to, one arena per state; it outlives the capture.
      constants: Tensors that the step owns, kept alive here: the graph only holds their addresses.
      treedef: Structure of the first state, whose arena takes the next plain tree once its handles are gone;
        None on several ranks, as one that still holds a handle would capture again, alone.
      paths: Its key paths.
      lowered: What was captured.
    """

    run: Inner
    launched: Callable[[], None]
    finish: Callable[[Any], Any]
    replay: Replay
    arenas: tuple[Arena, ...]
    constants: tuple[Tensor, ...]
    treedef: Treedef | None
    paths: list[KeyPath]
    lowered: Lowered

    @classmethod
    def of(
        cls,
        run: Inner,
        finish: Callable[[Any], Any],
        replay: Replay,
        call: Call,
        constants: Sequence[Tensor],
        lowered: Lowered,
        stats: Stats,
    ) -> Captured:
        """Return a capture made for a call; it keeps the call's memory alive, not its handles."""
        lease, arena = (call.states[0].lease, call.states[0].arena) if call.states else (None, None)
        several = (mesh := lowered.mesh) is not None and mesh.everyone > 1
        communicates = any(instr.op is WAIT or instr.op in TRANSFERS for instr in lowered.program.instrs)
        run, launched = watched(run, mesh, lowered.name, (stats, arena) if communicates else None)
        captured = cls(
            run,
            launched,
            finish,
            replay,
            tuple(state.arena for state in call.states),
            tuple(constants),
            lease.treedef if lease and not several else None,
            lease.paths if lease else [],
            lowered,
        )
        lowered.groups.hold(captured)
        return captured

    @property
    def arena(self) -> Arena:
        return self.arenas[0]

    @property
    def spare(self) -> bool:
        """Whether one of its states has no handle or leaf left."""
        return any(arena.free for arena in self.arenas)

    def taken_over(self, leaves: Sequence[Tensor]) -> Handle | None:
        """Return a new state in the first arena if that is free; None if another thread took it first."""
        assert self.treedef is not None
        return fill(Lease(self.arena, self.treedef, self.paths), leaves) if self.arena.free else None

    def cost_analysis(
        self,
        seconds: float | None = None,
        *,
        bandwidth: float | None = None,
        peak_flops: float | None = None,
    ) -> CostAnalysis:
        """Return the cost of a call and its distance from the floor; see :meth:`Lowered.cost_analysis`."""
        return self.lowered.cost_analysis(seconds, bandwidth=bandwidth, peak_flops=peak_flops)

    def close(self) -> None:
        """Free the capture; the arenas live as long as their handles."""
        self.replay.close()

    def __repr__(self) -> str:
        return f"<Captured on {self}>"

    def __str__(self) -> str:
        return ", ".join(map(_arena_text, self.arenas)) or "no state"


def _arena_text(arena: Arena) -> str:
    lease = arena.lease() if arena.lease is not None else None
    use = f"in generation {lease.cell[0]}" if lease is not None else "gone"
    return f"{size_of(arena.plan.nbytes)} of memory on {arena.device}, whose state is {use}"


@dataclass(eq=False)
class Lowered(metaclass=Documented):
    """A traced, checked and planned step; no device work has been done for it.

    Attributes:
      name: Name of the user's function.
      states, layout: The states that it binds, and the layout of its inputs.
      program: The traced calls, rewritten.
      plan: What runs.
      watch: Host values that are compared at each call.
      inspection: What was checked; prints as text.
      reference: The traced calls before any rewrite.
      certificate, trial: Whether a compiled plan was compared with them, set at its capture; what compares it.
      tables, groups: Constants that functions remember; process groups on a GPU.
      orders: Other orders of keys, and whether the function does the same with them.
      counts: Whether a call has run it or it was captured on demand; otherwise ``max_captures`` ignores it.
    """

    name: str
    states: tuple[BoundState, ...]
    layout: InputLayout
    program: Program
    plan: Plan
    watch: HostWatch
    inspection: Inspection
    reference: Reference
    tables: Constants
    groups: Groups
    certificate: Certificate | None = None
    trial: Trial | None = None
    counts: bool = False
    capture_here: Callable[[], Captured] | None = None
    orders: dict[tuple[Any, ...], bool] = field(default_factory=dict)

    @property
    def originals(self) -> list[Any]:
        """The modules of which the trace ran copies."""
        return list(dict.fromkeys(one.original for one in self.program.applications))

    def at(self, capture_here: Callable[[], Captured]) -> Lowered:
        """Return the same plan, ready to be captured for the arguments of one call."""
        return replace(self, capture_here=capture_here)

    def capture(self) -> Captured:
        """Capture the plan on the memory of the state it was lowered with."""
        assert self.capture_here is not None
        (captured := self.capture_here()).lowered.counts = True
        return captured

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of its states."""
        return mesh_of([spec for state in self.states for spec in state.specs])

    def meet(self) -> None:
        """Wait until all ranks of the mesh are about to capture the same step; else a collective would hang.

        Raises:
          RankError: On all ranks, naming those that are missing or differ, or leaves that would diverge.
        """
        if (mesh := self.mesh) is not None and mesh.ranks is not None:
            specs = [spec for state in self.states for spec in state.specs]
            traced = self.reference.program  # what passes make of a program may depend on the rank
            on_lanes = self.plan.timeline.lanes > 1
            meet(self.name, mesh, traced, self.program, specs, self.layout.live_names, on_lanes=on_lanes)

    def fits(self, call: Call) -> bool:
        """Whether a call has this layout, in whatever order its keys are."""
        return not self.state_differences(call) and alike(self.layout, call.layout)

    def seen(self, call: Call) -> Call:
        """Return a call that fits, as the trace sees it."""
        return call.laid_out(self.layout, [state.treedef for state in self.states])

    def runs(self, call: Call, recipe: Callable[[Call], Recipe]) -> bool:
        """Whether a call fits, and the function does the same with its keys in this order as in that of the trace."""
        fits, order = self.fits(call), call.order
        if fits and order not in self.orders:
            seen, turned = self.seen(call), replace(call, layout=self.layout.ordered_as(call.layout))
            self.orders[order] = order == seen.order or agree(recipe(seen), recipe(turned))
        return fits and self.orders[order]

    def state_differences(self, call: Call) -> list[str]:
        """Return how the states of a call differ from those of this plan, one line each."""
        rows: list[str] = []
        if len(call.states) != len(self.states):
            names, given = {s.name for s in self.states}, {s.name for s in call.states}
            rows += [f"{name}  expected a state   got none" for name in sorted(names - given)]
            return rows + [f"{name}  expected no state   got one" for name in sorted(given - names)]
        for want, have in zip(self.states, call.states, strict=True):
            if have.handle._node != want.treedef:
                rows += structure_diff(want.treedef, have.handle._node, want.name)
                continue
            slots = have.arena.plan.slots[have.start : have.stop]
            rows += [
                f"{path_string(path, want.name)}  expected {spec}   got {slot.spec}"
                + f", with strides {spec.stride} and {slot.spec.stride}" * (str(spec) == str(slot.spec))
                for path, spec, slot in zip(want.treedef.paths(), want.specs, slots, strict=True)
                if spec != slot.spec
            ]
        return rows

    def refusal(self, call: Call, transform: str, max_captures: int) -> LayoutError:
        """Return the error for a call with another layout when no more captures are allowed."""
        more = f"`{transform}(max_captures={max_captures + 1})`"
        of_states = self.state_differences(call)
        if not of_states:
            fix = layout_fix(self.layout, call.layout, more)
        elif len(call.states) != len(self.states):
            fix = states_fix({state.name: state.treedef for state in self.states}, self.layout, call)
        else:
            another = f"`{transform}({self.name if self.name.isidentifier() else 'step'}.__wrapped__)`"
            fix = f"make a step for each layout of the state, {another}; or pay for one more graph, {more}."
        return LayoutError.of(
            self.name,
            f"called with another layout than it was captured for (max_captures={max_captures}); "
            "the state is unchanged.",
            rows=of_states + layout_differences(self.layout, call.layout)
            or order_differences(self.seen(call), call),
            why="A captured graph has fixed shapes, dtypes and structure.",
            fix=fix,
        )

    def as_text(self) -> str:
        """Return the traced calls and the plan that runs them."""
        return f"{unrolled(self.program).as_text()}\n\n{self.plan.as_text()}"

    def memory_analysis(self) -> MemoryAnalysis:
        """Return bytes by use, and the temporaries at the peak; prints as a table.

        Keys: ``state``, and its fields if it is a dataclass (``state.params``); ``inputs``, ``constants``,
        ``metrics``; ``temporaries``, their total; ``peak``, the most that all but metrics take at one time.
        Temporaries are those of the program; a compiler makes fewer.

        Example:
          >>> import torch, functional_cg as fcg
          >>> step = fcg.graph_step(lambda state, x: ({"w": state["w"] + x * 2}, {}))
          >>> step.lower({"w": torch.ones(4)}, torch.ones(4)).memory_analysis()["peak"]
          64
        """
        return memory_analysis(self.program, self.plan.temporaries)

    def cost_analysis(
        self,
        seconds: float | None = None,
        *,
        bandwidth: float | None = None,
        peak_flops: float | None = None,
    ) -> CostAnalysis:
        """Return FLOPs, bytes moved, calls by kind and floor of a call; prints as a table, or ``as_dict()``.

        The floor is the roofline of the whole step: products at peak rate, or the bytes any implementation
        must move at full bandwidth, whichever takes longer. Rates of H100 (SXM) and H200 are built in; fp32
        products count at the TF32 rate unless ``torch.set_float32_matmul_precision`` is ``"highest"``.

        Args:
          seconds: Measured seconds of a call; gives the distance to the floor.
          bandwidth: Memory bandwidth in bytes per second, for another device or as measured.
          peak_flops: FLOPs per second of products of any dtype, for another device or as measured.
        Raises:
          ValueError: If one of the three is not a positive number.

        Example:
          >>> import torch, functional_cg as fcg
          >>> step = fcg.graph_step(lambda state, x: ({"w": state["w"] @ x}, {}))
          >>> lowered = step.lower({"w": torch.ones(4, 4)}, torch.ones(4, 4))
          >>> costs = lowered.cost_analysis(1e-5, bandwidth=1e9, peak_flops=1e9)
          >>> costs.flops, costs.bytes_least, costs.bound, costs.floor_s
          (128, 192, 'memory', 1.92e-07)
        """
        return cost_analysis(
            self.program, self.plan, seconds=seconds, bandwidth=bandwidth, peak_flops=peak_flops
        )

    def __repr__(self) -> str:
        return f"<Lowered {self.name}: {self._plan_line()}>"

    def __str__(self) -> str:
        dtypes = sorted({dtype_name(var.spec.dtype) for var in self.program.slots})
        memory = self.memory_analysis()
        parts = [(name, nbytes) for name, nbytes in memory.parts() if nbytes]
        sizes = ", ".join(f"{name.strip()} {size_of(nbytes)}" for name, nbytes in parts if "." not in name)
        header = ("key path", "spec", "bytes", "copied per call", "role")
        branches = [
            branch
            for state, entries in self._state_costs()
            for branch in outline(state.treedef, entries, state.name).ends()
        ] + [branch for _, costs in self._other_costs() for branch in listed(costs)]
        rows = [(b.path, b.what, size_of(b.nbytes), size_of(b.copied), b.role) for b in branches]
        return "\n".join(
            [
                str(self.inspection),
                *(f"  {text}" for text in self._plan_lines("plan: ")),
                *(f"  {line}" for note in self.program.notes for line in note.splitlines()),
                f"  memory: {size_of(memory['peak'])} at the peak: {sizes}",
                f"  dtypes of the state: {', '.join(dtypes)}",
                *columns([header, *rows]),
            ]
        )

    def _repr_html_(self) -> str:
        return card(f"{self.name}, lowered", self.body_html())

    def body_html(self) -> Html:
        """Return plan, memory, leaves and what was checked as HTML, without a title."""
        parts = [line(text) for text in self._plan_lines()]
        for title, *rows in map(str.splitlines, self.program.notes):
            parts.append(fold(title, *map(line, rows)) if rows else line(title))
        memory = self.memory_analysis()
        parts.append(fold(f"memory at the peak: {size_of(memory['peak'])}", memory.table(), opened=True))
        for state, entries in self._state_costs():
            title = f"{state.name}: {size_text(entries)}"
            parts.append(fold(title, tree_html(state.treedef, entries, state.name)))
        for kind, costs in self._other_costs():
            total = sum(entry.spec.nbytes for _, entry in costs)
            if costs:
                parts.append(fold(f"{kind}: {len(costs):,}", branches_html(listed(costs), max(total, 1))))
        return element("div", *parts, fold("what was checked", line(str(self.inspection))))

    def _plan_line(self) -> str:
        plan = self.plan.schedule
        calls = count(len(plan.head) + len(plan.fused), "ATen call")
        fused = f", {len(plan.fused)} of them in place" if plan.fused else ""
        into = "one function" if self.plan.functions == 1 else f"{self.plan.functions} functions"
        how = f"{calls}{fused}, compiled into {into}" if self.plan.compiled else f"{calls}{fused}"
        copied = len(plan.commits) if self.plan.copies else len(plan.staged)
        twice = f", {len(plan.staged)} of them twice" if plan.staged else ""
        return f"{how}; {count(copied, 'new value')} copied into the state{twice}"

    def _plan_lines(self, title: str = "") -> list[str]:
        certificate = [str(self.certificate)] if self.certificate else []
        pairs = staged_pairs(self.program, self.plan.schedule)
        twice = [f"copied twice: {old} <- {new}, which the same call overwrites" for old, new in pairs]
        more = [f"… and {len(twice) - _STAGED_SHOWN:,} more"] if len(twice) > _STAGED_SHOWN else []
        branches = [*self.plan.shared, *([self.plan.branches] if self.plan.branches else [])]
        return [f"{title}{self._plan_line()}", *branches, *certificate, *twice[:_STAGED_SHOWN], *more]

    def _state_costs(self) -> Iterator[tuple[BoundState, list[Entry]]]:
        """Yield each state with what a call does with its leaves."""
        entries = iter(slot_costs(self.program, self.plan.schedule, copies=self.plan.copies))
        for state in self.states:
            yield state, list(islice(entries, len(state.specs)))

    def _other_costs(self) -> list[tuple[str, list[tuple[str, Entry]]]]:
        program, plan = self.program, self.plan.schedule
        return [
            ("inputs", input_costs(program, plan, self.layout.live_names)),
            ("constants", constant_costs(program, plan)),
            ("metrics", metric_costs(program, plan)),
        ]
