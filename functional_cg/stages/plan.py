"""Lower a traced program to a plan: ATen calls that run on static buffers.

What it runs, and in which order, is a ``Schedule``, from ``stages.schedule``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..concurrency.interrupts import uninterrupted
from ..messages.source import Location
from ..tensors.aten import UNGROUPED, copies
from .evaluate import AS_STRIDED, as_strided, evaluate
from .layouts import laid_out, unsure
from .lifetimes import dropped_in, last_uses
from .passes.fused import in_place
from .passes.rewrite import clears, range_tensor
from .program import Instr, Program, Var, vars_in
from .schedule import Schedule, schedule
from .template import Template
from .together import Together

__all__ = [
    "AtenPlan",
    "Backend",
    "Buffers",
    "ExecutionPlan",
    "Replay",
    "Run",
    "Spare",
    "lower_aten",
    "note",
    "staged_line",
]

Before = Sequence[Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class Buffers:
    """The static buffers that a plan is bound to, in the order of the program."""

    slots: Sequence[Tensor]
    inputs: Sequence[Tensor]
    constants: Sequence[Tensor]


class Run(Protocol):
    """A bound plan: runs ``before`` (C-level calls) and the commit as one uninterrupted block, returns metrics."""

    def __call__(self, before: Before, /) -> Sequence[Tensor]: ...


class ExecutionPlan(Protocol):
    """The result of a lowering, which can be bound to buffers.

    Attributes:
      schedule: Its calls and commits.
      compiled: Whether a compiler chooses the kernels.
      functions: Number of compiled functions.
      copies: Whether new values are computed elsewhere and copied into their slots.
      branches: What runs side by side, in words; empty if that is no question.
      temporaries: Bytes of temporaries at the peak if that is more than in one line; else 0.
      shared: Which calls share a compiled function, in words: a line for each such function.
    """

    schedule: Schedule
    compiled: bool
    functions: int
    copies: bool
    branches: str
    temporaries: int
    shared: Sequence[str]

    def bind(self, buffers: Buffers) -> Run:
        """Bind the plan to buffers; the result runs on exactly these addresses."""
        ...

    def as_text(self) -> str:
        """Return the plan as source code."""
        ...


@dataclass(frozen=True, slots=True)
class Spare(Buffers):
    """Buffers for a warm-up, with slots separate from the state.

    Attributes:
      copied: Slots that may not hold any value, such as one that counts steps and is an index.
      originals: The slots of the state that they are copies of.
    """

    copied: Sequence[Tensor]
    originals: Sequence[Tensor]

    def reset(self) -> None:
        """Let the next run begin where the state is: after others, an index might be behind the end of its table."""
        for call in copies(self.copied, self.originals):
            call()


class Replay(Protocol):
    """A captured plan that can be replayed.

    Attributes:
      fresh: Whether each call returns new tensors rather than the same static ones, which must be copied out.
    """

    fresh: bool

    def __call__(self, before: Before, /) -> Sequence[Tensor]:
        """Run once, with ``before`` and the commit as one uninterrupted block; return metrics."""
        ...

    def close(self) -> None:
        """Free the graph and its memory."""
        ...


class Backend(Protocol):
    """Where captures run; each step has one backend.

    Attributes:
      name: Name in messages and ``explain()``.
      has_lanes: If there and true: it runs a plan with branches on lanes, by ``bound``.
      record: If there: ``record(run)`` captures any run. Replays that are not fresh then have their outputs as
        ``static``, and are so by ``capture`` and by ``record`` alike.
    """

    name: str

    def capture(self, plan: ExecutionPlan, buffers: Buffers, scratch: Callable[[], Spare]) -> Replay:
        """Capture a plan on its static buffers.

        Args:
          plan: What to run.
          buffers: The static buffers, filled with real inputs.
          scratch: Makes buffers for warm-up, with slots separate from the state.
        """
        ...


class AtenPlan:
    """Runs the traced ATen calls one by one, in a generated function with all names bound.

    Views of static buffers are taken once, at binding. Temporaries are dropped after their last use. A template is a
    function of its own, which drops what it is given after its last use, too.

    Attributes:
      ticks: If it is timed: what runs before each ``tick``, a call, or the name of what is copied.
      head: The calls that the function makes before the commit, in order.
      dropped: The variables that it drops after each of them, by number.
    """

    compiled = False
    functions = 0
    copies = True
    branches = ""
    temporaries = 0
    shared: Sequence[str] = ()

    def __init__(self, program: Program, plan: Schedule, *, timed: bool = False) -> None:
        self.program, self._timed = program, timed
        self.ticks: list[Instr | str] = []
        self._plan = self.schedule = plan
        self._ops: dict[str, Any] = {}
        self._functions: dict[Template, str] = {}
        self._hoisted, self.head = self._split_hoisted()
        self._source = self._generate(self.head)
        self._code = compile(self._source, f"<plan of {program.function}>", "exec")

    def as_text(self) -> str:
        return self._source

    def bind(
        self,
        buffers: Buffers,
        raised_at: Callable[[], Location | None] = lambda: None,
        tick: Callable[[], None] = lambda: None,
    ) -> Run:
        """Bind the plan to buffers.

        Args:
          buffers: The buffers.
          raised_at: Finds the user's line for an exception from a call without a known site.
          tick: What to call after each call, if the plan is timed.
        """
        names = {**self._names(buffers, raised_at), "tick": tick}
        exec(self._code, names)
        run = names.pop("run")  # no cycle, here and below: buffers are freed with it
        run.__kwdefaults__ = {name: names.pop(name) for name in self._functions.values()}
        return run  # type: ignore[no-any-return]

    def _names(self, buffers: Buffers, raised_at: Callable[[], Location | None]) -> dict[str, Any]:
        """Return what the generated function refers to."""
        names, program = dict(self._ops), self.program
        for var, tensor in zip(program.slots, buffers.slots, strict=True):
            names[repr(var)] = tensor
        for var, tensor in zip(program.inputs, buffers.inputs, strict=True):
            names[repr(var)] = tensor
        for i, (constant, tensor) in enumerate(zip(program.constants, buffers.constants, strict=True)):
            names[f"c{i}" if i in self._plan.written_constants else repr(constant.var)] = tensor
        with torch.inference_mode(False), torch.no_grad():
            for known in program.ranges:
                names[repr(known.var)] = range_tensor(known, [names[repr(leaf)] for leaf in known.leaves])
            for instr in self._hoisted:
                names[repr(instr.out)] = evaluate(instr, lambda var: names[repr(var)])
        names["uninterrupted"], names["partial"] = uninterrupted, partial
        names["copy_all"], names["laid_out"] = torch._foreach_copy_, laid_out
        names["note"] = partial(note, program.function, self._sites, raised_at)
        names["commit_slots"] = tuple(
            [names[repr(old)] for old, _ in group] for group in self._commit_groups()
        )
        names["clears"] = clears(program, {known.var: names[repr(known.var)] for known in program.ranges})
        return names

    def _split_hoisted(self) -> tuple[list[Instr], list[Instr]]:
        """Separate the calls that only take views of static buffers from the rest of the head."""
        fixed = {*self.program.slots, *self.program.inputs, *(known.var for known in self.program.ranges)}
        fixed |= {
            c.var for i, c in enumerate(self.program.constants) if i not in self._plan.written_constants
        }
        self._fixed = fixed
        hoisted, head = [], []
        for instr in self._plan.head:
            makes_one = (
                isinstance(instr.out, Var) and not instr.writes and not fixed.isdisjoint(instr.inputs())
            )
            if makes_one and instr.is_view and all(var in fixed for var in instr.inputs()):
                fixed.add(instr.out)
                hoisted.append(instr)
            else:
                head.append(instr)
        return hoisted, head

    def _commit_groups(self) -> list[list[tuple[Var, Var]]]:
        """Group commits by dtype and by whether strides match: each group is one grouped copy on CUDA."""
        groups: dict[tuple[torch.dtype, bool], list[tuple[Var, Var]]] = {}
        for old, new in self._plan.commits:
            groups.setdefault((old.spec.dtype, old.spec.stride == new.spec.stride), []).append((old, new))
        return list(groups.values())

    def _op(self, op: Any) -> str:
        name = "op_" + "".join(c if c.isalnum() else "_" for c in str(op))
        function = getattr(op, "_op", op)  # the bare C++ entry, without OpOverload's Python frame
        while self._ops.setdefault(name, function) is not function:
            name += "_"
        return name

    def _lines(self, instr: Instr, dead: Collection[Var] = ()) -> list[str]:
        """Return the source of a call of the head, and of dropping variables after it."""
        if isinstance(instr.op, Template):
            name = self._functions.setdefault(instr.op, f"template_{len(self._functions)}")
            return self._together.call(instr, name, dead)
        return self._in_line(instr, self._fixed, dead)

    def _in_line(self, instr: Instr, fixed: Collection[Var], dead: Iterable[Var]) -> list[str]:
        call = f"{_target(instr.out, fixed)}{self._call(instr, instr.op)}"
        turned = (f"{var!r} = laid_out({var!r}, {var.spec.stride})" for var in unsure(instr))
        return [call, *turned, *_dropped(dead)]

    def _function(self, template: Template, name: str, line: int) -> list[str]:
        """Return the source of the function of a template, which begins at a line."""
        dropped = template.known("dropped", dropped_in)
        lines = [
            f"def {name}(given):",
            f"    [{', '.join(map(repr, self._together.takes(template)))}] = given",
            "    given.clear()",
        ]
        lines += [f"    {text}" for text in _dropped(dropped.get(0, ()))]
        for number, instr in enumerate(template.calls, 1):
            self._sites[line + len(lines)] = instr.site
            lines += [f"    {text}" for text in self._in_line(instr, template.given, dropped.get(number, ()))]
        return [*lines, f"    return [{', '.join(map(repr, self._together.returns(template)))}]"]

    def _call(self, instr: Instr, op: Any) -> str:
        arguments = [self._literal(arg) for arg in instr.args]
        if op is AS_STRIDED:
            self._ops["as_strided"] = as_strided
            return f"as_strided({instr.args[0].offset}, {', '.join(arguments)})"
        arguments += [f"{name}={self._literal(value)}" for name, value in instr.kwargs.items()]
        return f"{self._op(op)}({', '.join(arguments)})"

    def _literal(self, value: Any) -> str:
        if isinstance(value, (Var, int, str, type(None))):
            return repr(value)
        if isinstance(value, float) and value == value and value not in (float("inf"), float("-inf")):
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self._literal, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(self._literal(item) + ',' for item in value)})"
        name = f"k{len(self._ops)}"
        self._ops[name] = value
        return name

    def _constant_line(self, i: int) -> str:
        return f"{self.program.constants[i].var!r} = c{i}.clone()"

    def _metric_line(self, i: int) -> str:
        return f"m{i} = {self._plan.outputs[i]!r}{'.clone()' if i in self._plan.cloned else ''}"

    def _fused_call(self, instr: Instr) -> str:
        return "partial(" + self._call(instr, in_place(instr.op)).replace("(", ", ", 1)

    def _commit_calls(self) -> Iterator[tuple[list[tuple[Var, Var]], list[str]]]:
        """Yield each group of commits with the calls that copy it."""
        for number, group in enumerate(self._commit_groups()):
            values = [f"w_{old!r}" if old in self._plan.staged else repr(new) for old, new in group]
            if group[0][0].spec.dtype in UNGROUPED:
                pairs = zip(group, values, strict=True)
                yield group, [f"partial({old!r}.copy_, {value})" for (old, _), value in pairs]
            else:
                yield group, [f"partial(copy_all, commit_slots[{number}], [{', '.join(values)}])"]

    def _generate(self, head: Sequence[Instr]) -> str:
        plan = self._plan
        lines = [self._constant_line(i) for i in sorted(plan.written_constants)]
        tail_vars = {var for instr in plan.fused for var in instr.inputs()} | {var for _, var in plan.commits}
        views = {var for instr in self._hoisted for var in instr.outputs()}
        kept = {*tail_vars, *plan.outputs, *views}
        self.dropped, self._together = last_uses(head, kept), Together(head, kept, self._fixed)
        self._sites: dict[int, Location | None] = {}

        def tick(of: Instr | str, into: list[str], text: str = "tick()") -> None:
            if self._timed:
                self.ticks.append(of)
                into.append(text)

        tick("constants", lines)
        for number, instr in enumerate(head):
            self._sites[len(lines) + 3] = instr.site  # after `def` and `try`; lines count from 1
            lines += self._lines(instr, self.dropped.get(number, ()))
            tick(instr, lines)
        lines += [self._metric_line(i) for i in range(len(plan.outputs))]
        tick("metrics", lines)
        lines += [staged_line(old, new) for old, new in plan.commits if old in plan.staged]
        tick("new state", lines)
        calls: list[str] = []
        for instr in plan.fused:
            calls.append(self._fused_call(instr))
            tick(instr, calls, "tick")
        calls += [call for _, group in self._commit_calls() for call in group]
        calls.append("*clears")
        tick("new state", calls, "tick")
        functions = "".join(f", {name}" for name in self._functions.values())
        source = (
            f"def run(before{functions and ', *' + functions}):\n    try:\n"
            + "".join(f"        {line}\n" for line in lines or ["pass"])
            + "    except Exception as error:\n        note(error)\n        raise\n"
            + f"    uninterrupted((*before, {', '.join(calls)}))\n"
            + f"    return ({''.join(f'm{i}, ' for i in range(len(plan.outputs)))})\n"
        )
        for template, name in self._functions.items():
            source += "\n".join(self._function(template, name, source.count("\n") + 1)) + "\n"
        return source


def _dropped(dead: Iterable[Var]) -> list[str]:
    names = ", ".join(map(repr, dead))
    return [f"del {names}"] if names else []


def lower_aten(program: Program, *, timed: bool = False) -> AtenPlan:
    """Lower to ATen calls; fused optimizer ops write their slots in place. For ``timed``, see :class:`AtenPlan`."""
    return AtenPlan(program, schedule(program), timed=timed)


def staged_line(old: Var, new: Var) -> str:
    return f"w_{old!r} = {new!r}.clone()"


def note(
    function: str,
    sites: Mapping[int, Location | None],
    raised_at: Callable[[], Location | None],
    error: Exception,
) -> None:
    """Add the user's line to an exception raised by a kernel (an index out of range, say)."""
    site, here = None, error.__traceback__
    plan = here and here.tb_frame.f_code.co_filename
    while here is not None and here.tb_frame.f_code.co_filename == plan:
        site, here = sites.get(here.tb_lineno, site), here.tb_next
    site = site or raised_at()
    error.add_note(
        f"`{function}`: raised by its replay{f', at {site}' if site else ''}; the state is unchanged."
    )


def _target(out: Any, fixed: Collection[Var]) -> str:
    """Return the left-hand side that unpacks a call's result as the trace saw it.

    A result that is a static buffer is already bound, so it is skipped: ``native_dropout`` may return its argument.
    """

    def text(value: Any) -> str:
        if isinstance(value, Var):
            return "_" if value in fixed else repr(value)
        if isinstance(value, (list, tuple)) and value:
            return f"[{', '.join(map(text, value))}]"
        return "_"

    return f"{text(out)} = " if vars_in(out) else ""
