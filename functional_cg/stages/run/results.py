"""The result of a call, from the tensors of a replay: metrics as the function returned them, lines, tapped values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any

from torch import Tensor

from ...errors import ResultError
from ...pytree.trees import node_unflatten
from ...state.handle import Handle
from ...tree import Treedef
from ..program import Program, Report, Var

__all__ = ["Stats", "output_builder", "reported", "unfinished"]


@dataclass(slots=True)
class Stats:
    """Counters of what a step has done so far.

    Attributes:
      traces: Programs traced (each counts once, although it is traced twice), also to see whether a value on the
        host that has changed matters.
      captures: Captures made.
      replays: Calls that replayed a capture.
      eager_calls: Calls that ran the Python function on real values.
    """

    traces: int = 0
    captures: int = 0
    replays: int = 0
    eager_calls: int = 0


def reported(program: Program, func: Any) -> list[tuple[Report, slice]]:
    """Return the reports to a function, each with the place of its tensors: they follow the metrics, in order."""
    starts = accumulate(
        (len(report.values) for report in program.reports),
        initial=sum(isinstance(out, Var) for out in program.outputs),
    )
    return [
        (report, slice(start, start + len(report.values)))
        for report, start in zip(program.reports, starts, strict=False)
        if report.func is func
    ]


def unfinished(
    program: Program, error: Exception, state: Handle | None, tensors: Sequence[Tensor]
) -> ResultError:
    """Return the error for a result that cannot be put together."""
    found = ResultError.of(
        program.function,
        f"{type(error).__name__} was raised where its {'outputs' if state is None else 'metrics'} are put together.",
        why="The call is done; "
        + ("nothing was lost." if state is None else "its new state is `error.state`."),
        fix="let the class take whatever leaves it gets; what was computed is in `error.leaves`.",
    )
    metrics = sum(isinstance(out, Var) for out in program.outputs)
    found.state, found.leaves = state, list(tensors[:metrics])
    return found


def output_builder(program: Program) -> Callable[[Sequence[Tensor]], Any]:
    """Generate ``build(tensors) -> pytree of outputs``; Python values among the outputs are returned as they were."""
    assert program.output_def is not None
    names: dict[str, Any] = {}
    leaves, places = iter(program.outputs), count()

    def name(value: Any) -> str:
        text = f"k{len(names)}"
        names[text] = value
        return text

    def expression(node: Treedef) -> str:
        if node.is_leaf:
            leaf = next(leaves)
            return f"m[{next(places)}]" if isinstance(leaf, Var) else name(leaf)
        children = [expression(child) for child in node.children]
        if node.kind is dict:
            values = dict(zip(node.context.sorted, children, strict=True))
            return "{" + ", ".join(f"{name(k)}: {values[k]}" for k in node.context.put_in) + "}"
        return f"{name(node_unflatten)}({name(node)}, [{', '.join(children)}])"

    exec(compile(f"def build(m):\n    return {expression(program.output_def)}\n", "<outputs>", "exec"), names)
    return names["build"]  # type: ignore[no-any-return]
