"""``Lowered``: a plan, no device work. ``Captured``: that plan bound to memory, and the fast path of its calls.

A replay takes constant work in Python, whatever the size of the state: all of it is :meth:`Captured.run`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from operator import setitem
from typing import Any

import torch
from torch import Tensor

from ..call.inputs import InputLayout
from ..call.matcher import layout_matcher
from ..call.mismatch import alike, layout_differences, layout_fix, order_differences, states_fix
from ..call.signature import Call
from ..call.staging import Staging
from ..concurrency.turns import Turn
from ..errors import LayoutError, MiscompileError
from ..manual import Documented
from ..messages.html import Html, card, element, fold, line, table
from ..messages.units import first, size_of
from ..shards.collectives import WAIT
from ..shards.mesh import Mesh
from ..shards.peers import watched
from ..shards.transfers import TRANSFERS
from ..stages.plan import Buffers, Plan, Replay
from ..stages.program import Program
from ..stages.run.memory import copy_out
from ..stages.run.ranges import in_a_range
from ..stages.run.results import Stats, output_builder, reported, unfinished
from ..stages.sub_programs import unrolled
from ..stages.trace.footprint import Inspection
from ..stages.trace.recipe import BoundState, Recipe
from ..stages.trace.runs import agree
from ..stages.trial.reference import Reference
from ..stages.trial.trial import Certificate, Trial
from ..state.arena import Arena, dtype_name
from ..state.boundary import mesh_of
from ..state.handle import Handle, Lease, fill
from ..state.outline import Entry, branches_html, columns, count, listed, outline, size_text, tree_html
from ..transforms.alarms import ALARM
from ..transforms.debug import DEBUG_PRINT, show
from ..transforms.taps import TAP, Taps
from ..tree import path_string, structure_diff
from .costs import CostAnalysis, cost_analysis
from .guards import Guards, Supposed
from .leaf_costs import leaf_costs, staged_pairs
from .memory import MemoryAnalysis, memory_analysis
from .ranks import meet

__all__ = ["MISS", "Captured", "Lowered"]

_STAGED_SHOWN = 8
_set = object.__setattr__  # handles refuse assignments


MISS = object()  # the result of a fast path that does not apply; the slow path finds out why


class Captured(metaclass=Documented):
    """A lowered step captured on one arena (or several, for a function of several states).

    Attributes:
      replay: The backend's replay.
      arenas: The memory that the capture is bound to, one arena per state; it outlives the capture.
      constants: Tensors that the step owns, kept alive here: the graph only holds their addresses.
      lowered: What was captured.
      ran: Whether a call that it fits may begin with it.
    """

    ran = False

    def __init__(
        self,
        lowered: Lowered,
        call: Call,
        staging: Staging,
        constants: Sequence[Tensor],
        replay: Replay,
        *,
        donates: bool,
        turn: Turn,
        stats: Stats,
        taps: Taps,
    ) -> None:
        """Bind a capture to the memory of a call; it keeps that memory alive, not the handles."""
        self.lowered, self.replay, self.constants = lowered, replay, tuple(constants)
        self.arenas = tuple(state.arena for state in call.states)
        # Of the first state, whose arena takes the next plain tree once its handles are gone; not on several ranks,
        # where one that still holds a handle would capture again, alone.
        lease, mesh = (call.states[0].handle._lease if call.states else None), lowered.mesh
        self._treedef = lease.treedef if lease and (mesh is None or mesh.everyone == 1) else None
        self._paths = lease.paths if lease else []
        self._name, self._donates, self._stats = lowered.name, donates, stats
        # Where each state is among the arguments, and which slots it must be.
        self._bound = [(s.position, s.arena, s.start, s.stop - s.start) for s in call.states]
        positions = [position for position, *_ in self._bound]
        self._last = max(positions, default=-1)
        # One within the other: the step's turn, and then those of its states.
        self.turns: tuple[Any, ...] = ()
        for one in sorted({arena.turn for arena in self.arenas}, key=lambda turn: turn.rank, reverse=True):
            self.turns = one, self.turns
        self.turns = turn, self.turns
        self._match = layout_matcher(call.layout, call.device, positions)
        self._guards, supposes = lowered.guards, lowered.program.suppositions
        self._supposed = Supposed(lowered.program, call.states) if supposes else None
        # Static outputs mean that work is queued, if only on a simulated stream.
        on_gpu, self._fresh = staging.arena.on_cuda, replay.fresh
        queued = on_gpu or not replay.fresh
        self._joined = list(dict.fromkeys([*self.arenas, staging.arena])) if queued else []
        self._copy_in = staging.copy_in if queued else partial(torch._foreach_copy_, staging.slots)
        communicates = any(instr.op is WAIT or instr.op in TRANSFERS for instr in lowered.program.instrs)
        waits = (stats, self.arenas[0] if self.arenas else None) if communicates else None
        launch = in_a_range(replay, lowered.name) if on_gpu else replay
        self._launch, self.launched = watched(launch, mesh, lowered.name, waits)
        self._tapped: list[tuple[Callable[..., None], slice]] = [
            (partial(taps.record, *tap.args), place) for tap, place in reported(lowered.program, TAP)
        ]
        self._printed: list[tuple[Callable[..., None], slice]] = [
            (partial(show, *line.args), place) for line, place in reported(lowered.program, DEBUG_PRINT)
        ]
        self._taps, alarms = taps, reported(lowered.program, ALARM)
        self._alarms = [(taps.alarm(lowered.name, *one.args), place.start) for one, place in alarms]
        self._build = output_builder(lowered.program)
        lowered.guards.groups.hold(self)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], turns: tuple[Any, ...]) -> Any:
        """Take the turns, then replay a call: return its new state and its tensors for ``finish``, or MISS.

        All of a replay is here. Each turn is taken in C by a ``with`` of its own, so that no signal strikes between
        taking and releasing it; the innermost call has them all. No user code runs there but the handlers of signals,
        so nothing else can ask for a turn that it holds. After MISS nothing has changed.
        """
        if turns:
            turn, inner = turns
            if turn.busy:
                turn.wait()
            with turn.lock:
                busy = turn.busy
                if busy and (self._donates or not turn.whole):
                    if turn.over is None:
                        raise turn.refusal(self._name)
                    result = MISS
                else:
                    turn.busy = True
                    try:
                        result = self.run(args, kwargs, inner)
                    finally:
                        turn.busy = busy
            return result

        # Does the call fit? The states by their memory, the inputs by their layout, the host by what was read of it.
        if len(args) <= self._last:
            return MISS
        for position, arena, start, size in self._bound:
            state = args[position]
            if (
                type(state) is not Handle
                or state._lease.arena is not arena
                or state._part.start != start
                or state._part.node.num_leaves != size
                or state._lease.cell[0] != state._generation
            ):
                return MISS
        state = args[0] if self._donates else None
        if state is not None and state._owner is not None:  # a part of it, even if it has all leaves
            return MISS
        leaves = self._match(args, kwargs)
        if leaves is None:
            return MISS
        if not self._guards.unchanged() or not (self._supposed is None or self._supposed.holds(args)):
            return MISS

        # It does: copy in, launch, copy out. The state has a new generation as soon as it has new values.
        for arena in self._joined:
            arena.join()
        if leaves:
            self._copy_in(leaves)
        if state is None:
            static = self._launch(())
        else:
            lease, generation = state._lease, state._generation
            static = self._launch((partial(setitem, lease.cell, 0, generation + 1),))
        self._stats.replays += 1
        self._taps.calls += 1
        tensors = static if self._fresh else copy_out(static)
        for record, place in self._tapped:
            record(tensors[place])
        new = None
        if state is not None:
            _set(state, "_donor", self._name)
            new = Handle(lease, generation + 1)
        if self._supposed is not None:
            self._supposed.keep(args, new)
        return new, tensors

    def finish(self, done: tuple[Handle | None, Sequence[Tensor]]) -> Any:
        """Print lines, hear alarms, and build the result of a call from what ``run`` returned.

        Both run user code, ``sys.stdout`` and the classes of the metrics, which may call the library and may raise.
        """
        new, tensors = done
        for show_line, place in self._printed:
            show_line(tensors[place])
        for one, at in self._alarms:
            one.hear(self._taps.calls, tensors[at])
        for one, _ in self._alarms:
            one.catch_up(wait=False)
        try:
            result = self._build(tensors)
        except Exception as error:
            raise unfinished(self.lowered.program, error, new, tensors) from error
        return (new, result) if self._donates else result

    @property
    def spare(self) -> bool:
        """Whether one of its states has no handle or leaf left."""
        return any(arena.free for arena in self.arenas)

    def taken_over(self, treedef: Any, plan: Any, leaves: Sequence[Tensor]) -> Handle | None:
        """Return a new state in the first arena if that has this layout and is free; None otherwise."""
        arena = self.arenas[0]
        if not arena.vacant or self._treedef != treedef or arena.plan != plan:
            return None

        def taken() -> Handle | None:  # unless another thread took it first
            return fill(Lease(arena, treedef, self._paths), leaves) if arena.free else None

        return arena.turn.alone(taken, self._name)  # type: ignore[no-any-return]

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
        with contextlib.ExitStack() as last:  # each, even if a warning raises
            for one, _ in self._alarms:
                last.callback(one.catch_up, wait=True)

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
      program, plan: The traced calls, rewritten; what runs.
      guards: What it has taken from the host, compared at each call.
      inspection: What was checked; prints as text.
      reference: The traced calls before any rewrite.
      certificate, trial, refuted: How a compiled plan compares with them; what compares it; the error if it is wrong.
      orders: Other orders of keys, and whether the function does the same with them.
      counts: Whether a call has run it or it was captured on demand; otherwise ``max_captures`` ignores it.
    """

    name: str
    states: tuple[BoundState, ...]
    layout: InputLayout
    program: Program
    plan: Plan
    guards: Guards
    inspection: Inspection
    reference: Reference
    certificate: Certificate | None = None
    trial: Trial | None = None
    refuted: Callable[[], MiscompileError] | None = None
    counts: bool = False
    capture_here: Callable[[], Captured] | None = None
    orders: dict[tuple[Any, ...], bool] = field(default_factory=dict)

    def at(self, capture_here: Callable[[], Captured]) -> Lowered:
        """Return the same plan, ready to be captured for the arguments of one call."""
        return replace(self, capture_here=capture_here)

    def capture(self) -> Captured:
        """Capture the plan on the memory of the state it was lowered with."""
        assert self.capture_here is not None
        (captured := self.capture_here()).lowered.counts = True
        return captured

    def buffers(self, call: Call, arenas: Iterable[Arena]) -> tuple[Buffers, Staging]:
        """Return static buffers of a call, whose inputs are copied in, for states in these arenas."""
        staging = Staging(self.layout.specs, call.device)
        staging.copy_in(call.live)
        slots = [
            slot
            for s, arena in zip(call.states, arenas, strict=True)
            for slot in arena.slots[s.start : s.stop]
        ]
        constants = [c.value.to(c.var.spec.device, copy=True) for c in self.program.constants]
        return Buffers(slots, staging.slots, constants), staging

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
            traced, on_lanes = self.reference.program, self.plan.timeline.lanes > 1
            meet(mesh, traced, self.program, specs, self.layout.live_names, on_lanes=on_lanes)

    def fits(self, call: Call) -> bool:
        """Whether a call has this layout, in whatever order its keys are."""
        return not self.state_differences(call) and alike(self.layout, call.layout)

    def seen(self, call: Call) -> Call:
        """Return a call that fits, as the trace sees it: with the strides and the key order of this plan."""
        pairs = zip(call.states, self.states, strict=True)
        states = tuple(replace(state, seen_as=bound.treedef) for state, bound in pairs)
        return replace(call, layout=self.layout, states=states)

    def runs(self, call: Call, recipe: Callable[[Call], Recipe]) -> bool:
        """Whether the function does the same with the keys of a call that fits as in the order of the trace."""
        order = call.order
        if order not in self.orders:
            seen, turned = self.seen(call), replace(call, layout=self.layout.ordered_as(call.layout))
            self.orders[order] = order == seen.order or agree(recipe(seen), recipe(turned))
        return self.orders[order]

    def state_differences(self, call: Call) -> list[str]:
        """Return how the states of a call differ from those of this plan, one line each."""
        if len(call.states) != len(self.states):
            names, given = {s.name for s in self.states}, {s.name for s in call.states}
            missing = [f"{name}  expected a state   got none" for name in sorted(names - given)]
            return missing + [f"{name}  expected no state   got one" for name in sorted(given - names)]
        rows: list[str] = []
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

    def _of_members(self, call: Call) -> bool:
        """Whether the leaves of a call's states are those of this plan without a first dimension that all have."""
        want = [spec.shape for state in self.states for spec in state.specs]
        have = [spec.shape for state in call.states for spec in state.specs]
        first = {shape[:1] for shape in want}
        return len(first) == 1 and () not in first and [shape[1:] for shape in want] == have

    def refusal(self, call: Call, transform: str, max_captures: int) -> LayoutError:
        """Return the error for a call with another layout when no more captures are allowed."""
        more = f"`{transform}(max_captures={max_captures + 1})`"
        of_states = self.state_differences(call)
        if not of_states:
            fix = layout_fix(self.layout, call.layout, more)
        elif len(call.states) != len(self.states):
            fix = states_fix({state.name: state.treedef for state in self.states}, self.layout, call)
        elif self._of_members(call):
            fix = (
                "this is a state of one member: stack those of all, `fcg.tree.stack(states)`; or train it by a step "
                "of the function without `fcg.sweep`."
            )
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
        states, others = self._costs()
        ends = (outline(state.treedef, entries, state.name).ends() for state, entries in states)
        branches = chain(*ends, *map(listed, others.values()))
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
        notes = [
            fold(title, *map(line, rows)) if rows else line(title)
            for title, *rows in map(str.splitlines, self.program.notes)
        ]
        memory = self.memory_analysis()
        states, others = self._costs()
        trees = [
            fold(f"{state.name}: {size_text(entries)}", tree_html(state.treedef, entries, state.name))
            for state, entries in states
        ]
        lists = [
            fold(
                f"{kind}: {len(costs):,}",
                branches_html(listed(costs), max(sum(entry.spec.nbytes for _, entry in costs), 1)),
            )
            for kind, costs in others.items()
            if costs
        ]
        return element(
            "div",
            *map(line, self._plan_lines()),
            *notes,
            fold(f"memory at the peak: {size_of(memory['peak'])}", table(memory.bars()), opened=True),
            *trees,
            *lists,
            fold("what was checked", line(str(self.inspection))),
        )

    def _plan_line(self) -> str:
        plan = self.plan.schedule
        calls = count(len(plan.head) + len(plan.fused), "ATen call")
        fused = f", {len(plan.fused)} of them in place" if plan.fused else ""
        into = "one function" if len(self.plan.heads) == 1 else f"{len(self.plan.heads)} functions"
        how = f"{calls}{fused}, compiled into {into}" if self.plan.compiled else f"{calls}{fused}"
        copied = len(self.plan.copied | plan.staged)
        twice = f", {len(plan.staged)} of them twice" if plan.staged else ""
        return f"{how}; {count(copied, 'new value')} copied into the state{twice}"

    def _plan_lines(self, title: str = "") -> list[str]:
        certificate = [str(self.certificate)] if self.certificate else []
        pairs = staged_pairs(self.program, self.plan)
        twice = [f"copied twice: {old} <- {new}, which the same call overwrites" for old, new in pairs]
        branches = [*self.plan.shared, *([self.plan.branches] if self.plan.branches else [])]
        return [f"{title}{self._plan_line()}", *branches, *certificate, *first(twice, _STAGED_SHOWN)]

    def _costs(self) -> tuple[list[tuple[BoundState, list[Entry]]], dict[str, list[tuple[str, Entry]]]]:
        """Return what a call does with each leaf: those of each state, and the others by kind and name."""
        others = leaf_costs(self.program, self.plan, self.layout.live_names)
        entries = (entry for _, entry in others.pop("state"))
        return [(state, list(islice(entries, len(state.specs)))) for state in self.states], others
