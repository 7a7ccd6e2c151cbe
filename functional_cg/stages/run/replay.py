"""Replay: the fast path of each call, with constant work in Python whatever the size of the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import setitem
from typing import Any

from torch import Tensor

from ...call.staging import Staging
from ...concurrency.turns import Inner, Turn, in_turn
from ...errors import ResultError
from ...pytree.trees import node_unflatten
from ...state.arena import Arena
from ...state.handle import Handle
from ...transforms.debug import DEBUG_PRINT, show
from ...transforms.taps import TAP, Taps
from ...tree import Treedef
from ..plan import Replay
from ..program import Program, Report, Var
from .memory import copy_out
from .ranges import in_a_range

__all__ = ["MISS", "Bound", "Stats", "finisher", "output_builder", "recorder", "replayer"]


class _Miss:
    """The result of a fast path that does not apply; the slow path finds out why."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "MISS"


MISS = _Miss()


@dataclass(slots=True)
class Stats:
    """Counters of what a step has done so far.

    Attributes:
      traces: Programs traced (each counts once, although it is traced twice).
      captures: Captures made.
      replays: Calls that replayed a capture.
      eager_calls: Calls that ran the Python function on real values.
    """

    traces: int = 0
    captures: int = 0
    replays: int = 0
    eager_calls: int = 0


@dataclass(frozen=True, slots=True)
class Bound:
    """A state argument of one capture: its position among the arguments, and the slots it must refer to."""

    position: int
    arena: Arena
    start: int
    stop: int

    def accepts(self, value: Any) -> bool:
        """Whether an argument is a live handle of exactly these slots."""
        return (
            type(value) is Handle
            and value._lease.arena is self.arena
            and value._start == self.start
            and value._node.num_leaves == self.stop - self.start
            and value._lease.cell[0] == value._generation
        )


def recorder(program: Program, taps: Taps) -> Callable[[Sequence[Tensor]], None] | None:
    """Return a function that records the tapped values among a replay's tensors; None if nothing is tapped."""
    places: list[tuple[Callable[..., None], int]] = [
        (partial(taps.record, *r.args), start) for r, start in _reported(program) if r.func is TAP
    ]
    if not places:
        return None

    def record(tensors: Sequence[Tensor]) -> None:
        for report, start in places:
            report(tensors[start : start + 1])

    return record


def finisher(name: str, program: Program, *, donates: bool) -> Callable[[Any], Any]:
    """Generate ``finish(done)``, which prints lines and builds the result of a call; it maps MISS to MISS.

    It writes to ``sys.stdout`` and calls the classes of the metrics. Both run user code, which may call the library
    and may raise.
    """
    assert program.output_def is not None
    result, names = _expression(program.output_def, program.outputs)
    metrics = sum(isinstance(out, Var) for out in program.outputs)
    lines: list[tuple[Callable[..., None], int, int]] = [
        (partial(show, *r.args), start, start + len(r.values))
        for r, start in _reported(program)
        if r.func is DEBUG_PRINT
    ]
    prints = "".join(f"    lines[{i}][0](m[{a}:{b}])\n" for i, (_, a, b) in enumerate(lines))
    names |= {"MISS": MISS, "lines": lines, "unfinished": partial(_unfinished, name, metrics)}
    source = (
        "def finish(done):\n    if done is MISS: return MISS\n    state, m = done\n"
        f"{prints}    try:\n        result = {result}\n"
        "    except Exception as error:\n        raise unfinished(error, state, m) from error\n"
        f"    return {'state, result' if donates else 'result'}\n"
    )
    exec(compile(source, "<result>", "exec"), names)
    return names["finish"]  # type: ignore[no-any-return]


def _reported(program: Program) -> list[tuple[Report, int]]:
    """Return the reports, each with the position of its first tensor: they follow the metrics, in order."""
    starts = accumulate(
        (len(report.values) for report in program.reports),
        initial=sum(isinstance(out, Var) for out in program.outputs),
    )
    return list(zip(program.reports, starts, strict=False))


def _unfinished(
    name: str, metrics: int, error: Exception, state: Handle | None, tensors: Sequence[Tensor]
) -> ResultError:
    found = ResultError.of(
        name,
        f"{type(error).__name__} was raised where its {'outputs' if state is None else 'metrics'} are put together.",
        why="The call is done; "
        + ("nothing was lost." if state is None else "its new state is `error.state`."),
        fix="let the class take whatever leaves it gets; what was computed is in `error.leaves`.",
    )
    found.state, found.leaves = state, list(tensors[:metrics])
    return found


def output_builder(treedef: Treedef, outputs: Sequence[Any]) -> Callable[[Sequence[Tensor]], Any]:
    """Generate ``build(tensors) -> pytree of outputs``; Python values among the outputs are returned as they were."""
    result, names = _expression(treedef, outputs)
    exec(compile(f"def build(m):\n    return {result}\n", "<outputs>", "exec"), names)
    return names["build"]  # type: ignore[no-any-return]


def _expression(treedef: Treedef, outputs: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """Return source that builds a pytree from tensors `m`, and the names it uses."""
    names: dict[str, Any] = {}
    leaves = iter(outputs)
    count = 0

    def name(value: Any) -> str:
        text = f"k{len(names)}"
        names[text] = value
        return text

    def expression(node: Treedef) -> str:
        nonlocal count
        if node.is_leaf:
            leaf = next(leaves)
            if not isinstance(leaf, Var):
                return name(leaf)
            count += 1
            return f"m[{count - 1}]"
        children = [expression(child) for child in node.children]
        if node.kind is dict:
            values = dict(zip(node.context.sorted, children, strict=True))
            return "{" + ", ".join(f"{name(k)}: {values[k]}" for k in node.context.put_in) + "}"
        return f"{name(node_unflatten)}({name(node)}, [{', '.join(children)}])"

    return expression(treedef), names


def replayer(
    *,
    name: str,
    bound: Sequence[Bound],
    donates: bool,
    match: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    unchanged: Callable[[], bool],
    staging: Staging,
    replay: Replay,
    taps: Callable[[Sequence[Tensor]], None] | None,
    stats: Stats,
) -> Inner:
    """Make the fast path of one capture: ``run(args, kwargs)`` returns the new state and tensors, or MISS.

    No user code runs in it except signal handlers, so nothing else can ask for a turn that it holds.
    """
    fresh, on_gpu = replay.fresh, staging.arena.on_cuda
    launch = in_a_range(replay, name) if on_gpu else replay
    # Static outputs mean that work is queued, if only on a simulated stream.
    queued = on_gpu or not fresh
    joined = list(dict.fromkeys([*(b.arena for b in bound), staging.arena])) if queued else []
    positions = frozenset(b.position for b in bound)
    last = max(positions, default=-1)
    copy_in, set_donor = staging.copy_in if queued else staging.fill, object.__setattr__

    def run(leaves: list[Tensor], before: Sequence[Any]) -> Any:
        for arena in joined:
            arena.join()
        if leaves:
            copy_in(leaves)
        static = launch(before)
        stats.replays += 1
        tensors = static if fresh else copy_out(static)
        if taps is not None:
            taps(tensors)
        return tensors

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) <= last:
            return MISS
        for b in bound:
            if not b.accepts(args[b.position]):
                return MISS
        leaves = match(_without(args, positions), kwargs)
        if leaves is None or not unchanged():
            return MISS
        return None, run(leaves, ())

    turns = sorted({b.arena.turn for b in bound}, key=lambda turn: turn.rank)
    if not donates:
        return _in_turns(turns, read, name, reads=True)

    own, rest = bound[0].arena, bound[1:]

    def step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args or type(args[0]) is not Handle:
            return MISS
        state = args[0]
        lease, generation = state._lease, state._generation
        if lease.arena is not own or state._owner is not None:
            return MISS
        if rest and (len(args) <= last or not all(b.accepts(args[b.position]) for b in rest)):
            return MISS
        leaves = match(_without(args, positions) if rest else args[1:], kwargs)
        if leaves is None or not unchanged():
            return MISS
        if lease.cell[0] != generation:
            return MISS
        tensors = run(leaves, (partial(setitem, lease.cell, 0, generation + 1),))
        set_donor(state, "_donor", name)
        return Handle(lease, generation + 1), tensors

    return _in_turns(turns, step, name)


def _in_turns(turns: Sequence[Turn], call: Inner, name: str, *, reads: bool = False) -> Inner:
    for turn in reversed(turns):
        call = in_turn(turn, call, name, reads=reads, ended=MISS)  # the call may have come with another state
    return call


def _without(args: tuple[Any, ...], positions: frozenset[int]) -> tuple[Any, ...]:
    return tuple(arg for i, arg in enumerate(args) if i not in positions)
