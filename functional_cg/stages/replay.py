"""Replay: the call that users make thousands of times. Constant work in Python, whatever the size of the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from operator import setitem
from typing import Any

from torch import Tensor

from .. import tree as pytree
from ..arena import Arena
from ..debug import DEBUG_PRINT, show
from ..staging import Staging
from ..state import Handle
from ..taps import TAP, Taps
from ..tree import Treedef
from .capture import Replay, copy_out
from .program import Program, Var

__all__ = ["MISS", "Bound", "Stats", "finisher", "output_builder", "replayer"]


class _Miss:
    """Says that the fast path does not apply; the slow path finds out why."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "MISS"


MISS = _Miss()


@dataclass(slots=True)
class Stats:
    """What a step has done so far.

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
    """A state argument of one capture: where it stands among the arguments, and the slots that it must be."""

    position: int
    arena: Arena
    start: int
    stop: int

    def accepts(self, value: Any) -> bool:
        """Whether the argument is a living handle of exactly these slots."""
        return (
            type(value) is Handle
            and value._lease.arena is self.arena
            and value._start == self.start
            and value._node.num_leaves == self.stop - self.start
            and value._lease.cell[0] == value._generation
        )


def finisher(program: Program, taps: Taps | None) -> Callable[[Sequence[Tensor]], Any]:
    """What is made of a replay's tensors: the pytree of outputs, the lines to print, and what was tapped.

    Args:
      program: The traced step.
      taps: Where tapped values go; None prints and taps nothing.
    """
    assert program.output_def is not None
    build = output_builder(program.output_def, program.outputs)
    if taps is None or not program.reports:
        return build
    receivers: dict[Any, Callable[..., None]] = {DEBUG_PRINT: show, TAP: taps.record}
    reports = [(partial(receivers[r.func], *r.args), len(r.values)) for r in program.reports]
    metrics = sum(isinstance(out, Var) for out in program.outputs)

    def reporting(tensors: Sequence[Tensor]) -> Any:
        start = metrics
        for report, count in reports:
            report(tensors[start : start + count])
            start += count
        return build(tensors)

    return reporting


def output_builder(treedef: Treedef, outputs: Sequence[Any]) -> Callable[[Sequence[Tensor]], Any]:
    """Generate ``build(tensors) -> pytree of outputs``; Python values among the outputs come back as they were."""
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
        return f"{name(pytree.node_unflatten)}({name(node)}, [{', '.join(children)}])"

    source = f"def build(m):\n    return {expression(treedef)}\n"
    exec(compile(source, "<outputs>", "exec"), names)
    return names["build"]  # type: ignore[no-any-return]


def replayer(
    *,
    name: str,
    bound: Sequence[Bound],
    donates: bool,
    match: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    unchanged: Callable[[], bool],
    staging: Staging,
    replay: Replay,
    finish: Callable[[Sequence[Tensor]], Any],
    stats: Stats,
    lock: AbstractContextManager[Any],
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Make the fast path of one capture: ``call(args, kwargs) -> result, or MISS``."""
    fresh = replay.fresh
    # Where outputs are static, work is queued, if only on a simulated stream.
    queued = staging.arena.on_cuda or not fresh
    joined = list(dict.fromkeys([*(b.arena for b in bound), staging.arena])) if queued else []
    positions = frozenset(b.position for b in bound)
    last = max(positions, default=-1)
    copy_in, set_donor = staging.copy_in if queued else staging.fill, object.__setattr__

    def run(leaves: list[Tensor], before: Sequence[Any]) -> Any:
        for arena in joined:
            arena.join()
        if leaves:
            copy_in(leaves)
        static = replay(before)
        stats.replays += 1
        return finish(static if fresh else copy_out(static))

    # Of several threads, one at a time: in the buffers of this step, and in each state that it reads.
    states = sorted(dict.fromkeys(b.arena for b in bound), key=id)

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) <= last or not all(b.accepts(args[b.position]) for b in bound):
            return MISS
        leaves = match(_without(args, positions), kwargs)
        if leaves is None or not unchanged():
            return MISS
        return run(leaves, ())

    if not donates:
        return _under([lock, *(arena.lock for arena in states)], read)

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
        metrics = run(leaves, (partial(setitem, lease.cell, 0, generation + 1),))
        set_donor(state, "_donor", name)
        return Handle(lease, generation + 1), metrics

    return _under([lock, *(arena.lock for arena in states)], step)


def _under(
    locks: Sequence[AbstractContextManager[Any]], call: Callable[[tuple[Any, ...], dict[str, Any]], Any]
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """The call with locks held; each by a ``with`` of its own, in which Ctrl-C cannot lose it."""

    def nested(lock: AbstractContextManager[Any], inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with lock:
                result = inner(args, kwargs)  # a `return` here would leave the block with the lock held
            return result

        return outer

    for lock in reversed(locks):
        call = nested(lock, call)
    return call


def _without(args: tuple[Any, ...], positions: frozenset[int]) -> tuple[Any, ...]:
    return tuple(arg for i, arg in enumerate(args) if i not in positions)
