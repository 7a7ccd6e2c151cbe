"""``Profile``: the time and the memory of a step by module and by line. Prints as a table."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from ...messages.html import element, key, stack
from ..costs import COPIES, WHAT_COPIES_ARE
from ..report import Part, Report, as_text, grouped, shortened

__all__ = [
    "PHASES",
    "KernelRow",
    "LocatedCall",
    "Phase",
    "Profile",
    "ProfileRow",
    "ProfiledCall",
    "ProfiledKernel",
    "folded",
    "title",
]

Phase = Literal["forward", "backward", "update"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "update")

_ROWS = 16
_WIDEST = 40  # characters of a name or of a line's source
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class LocatedCall:
    """A call of a step, and where it comes from.

    Attributes:
      op: Name of the ATen op, or of what is copied.
      module: Path of its module, from the name of the model on: ``GPT.h.0.attn``. Outside of modules the function that
        makes it, ``loss_fn()``, or a kind in parentheses: ``(optimizer)``, ``(copies)``, ``(unknown)``.
      line: The user's line, ``model.py:33``; for a call of the backward, that of the call that it differentiates.
      source: What stands on that line; empty if its file is gone.
      phase: ``"forward"``, ``"backward"`` or ``"update"``. What the backward recomputes is backward; what is computed
        from gradients, such as a clip, is update.
    """

    op: str
    module: str
    line: str
    source: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class ProfiledCall(LocatedCall):
    """A call of a step, or its copies of inputs, metrics or new state: what :class:`LocatedCall` says, and its costs.

    Attributes:
      seconds: Time of the call by itself: the median of several runs; on a GPU, the mean time of its kernels. Of a
        kernel that computes several calls, the call's share.
      nbytes: Bytes of its results that are in memory at the step's peak.
    """

    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class ProfiledKernel:
    """A kernel of a compiled step, or what else a line of the compiled function launches.

    Attributes:
      name: Name that inductor gives it: ``triton_poi_fused_gelu_3``, ``extern_kernels.mm``.
      seconds: Mean time that it takes on the device.
      calls: The calls that it computes.
    """

    name: str
    seconds: float
    calls: tuple[ProfiledCall, ...]


@dataclass(frozen=True, slots=True)
class KernelRow:
    """All kernels of one name that are parts of the same modules and phases.

    Attributes:
      name: Their name.
      kernels: How many there are.
      seconds: Their seconds.
      modules: What they are parts of.
      lines: The user's lines that they compute.
      phases: ``"forward"``, ``"backward"``, ``"update"``, or several.
    """

    name: str
    kernels: int
    seconds: float
    modules: tuple[str, ...]
    lines: tuple[str, ...]
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """All calls of one module or line.

    Attributes:
      name: The module or the line.
      source: For a line, what stands on it.
      calls: Number of calls.
      forward_s: Seconds of its calls in the forward.
      backward_s: Seconds of its calls in the backward.
      update_s: Seconds of its calls in the update.
      nbytes: Bytes of their results that are in memory at the step's peak.
    """

    name: str
    source: str
    calls: int
    forward_s: float
    backward_s: float
    update_s: float
    nbytes: int

    @property
    def parts(self) -> tuple[float, float, float]:
        """Seconds of its calls in the forward, the backward and the update."""
        return self.forward_s, self.backward_s, self.update_s

    @property
    def seconds(self) -> float:
        """Seconds of all its calls."""
        return math.fsum(self.parts)


@dataclass(frozen=True, repr=False, slots=True)
class Profile(Report):
    """The time and the memory of a step by module and by line; prints as a table. Made by ``step.profile``.

    Each call of the step is in one row by module and in one row by line, so the rows of either add up to the whole.

    Module paths are known in the forward of a module from :func:`functional_cg.from_module`, and in the backward of its
    calls; a module that is used in several places goes by the first of its names. What is outside of modules goes by
    the function that computes it. If the step is compiled, its kernels span several calls: rows then have the times of
    the calls before that, and the result says so. With the environment variable ``FCG_PROFILE_KERNELS=1``, on a GPU,
    the kernels of a step that inductor compiles are timed in place of its calls.

    Attributes:
      function: Name of the user's function.
      device: Name of the device.
      compiled: Whether the step is compiled. Where ``kernels`` is empty, too, the seconds are those of its calls one by
        one, before it was compiled, and only ``call_s`` is that of the compiled step.
      call_s: Median seconds of a call of the step: a replay and the copies of its inputs.
      calls: The calls, in the order of the program.
      resident: Bytes of what lies in memory all the time: parts of the state, inputs, constants.
      kernels: What a step launches that is compiled on a GPU, in order. A kernel that computes several calls shares its
        time among them, by the bytes that each reads and writes.
    """

    function: str
    device: str
    compiled: bool
    call_s: float
    calls: tuple[ProfiledCall, ...]
    resident: Mapping[str, int] = field(default_factory=dict)
    kernels: tuple[ProfiledKernel, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of all calls, run one by one."""
        return math.fsum(one.seconds for one in self.calls)

    @property
    def nbytes(self) -> int:
        """Bytes at the peak: what lies in memory all the time, and the results of calls."""
        return sum(self.resident.values()) + sum(one.nbytes for one in self.calls)

    def by_module(self, depth: int | None = None, *, fold: bool = True) -> tuple[ProfileRow, ...]:
        """Return a row for each module, slowest first; a module's row does not include those of its submodules.

        Args:
          depth: How many names of a path to keep: 1 is the model, 2 its parts, each with all that is below; None for
            whole paths.
          fold: Whether numbered blocks with the same submodules share rows: ``GPT.h.0-11.attn``.
        Raises:
          ValueError: If ``depth`` is not None or a positive int.
        """
        if depth is not None and (type(depth) is not int or depth < 1):
            raise ValueError(
                f"by_module: depth must be None or a positive int, got {depth!r}.\nTo fix: `by_module(1)` is the model."
            )
        paths = {path: name if fold else path for path, name in self._folded().items()}
        names = {path: ".".join(name.split(".")[:depth]) for path, name in paths.items()}
        return self._rows(lambda call: names.get(call.module, call.module))

    def by_line(self) -> tuple[ProfileRow, ...]:
        """Return a row for each line of user code, slowest first."""
        return self._rows(lambda call: call.line)

    def by_kernel(self) -> tuple[KernelRow, ...]:
        """Return a row for the kernels of one name in the same modules and phases, slowest first; none if not compiled.

        Numbered blocks are one, as in :meth:`by_module`.
        """
        names = self._folded()

        def parts_of(kernel: ProfiledKernel) -> tuple[str, tuple[str, ...], tuple[Phase, ...]]:
            modules = dict.fromkeys(names.get(call.module, call.module) for call in kernel.calls)
            found = {call.phase for call in kernel.calls}
            return kernel.name, tuple(modules), tuple(phase for phase in PHASES if phase in found)

        rows = [
            KernelRow(
                name,
                len(kernels),
                math.fsum(kernel.seconds for kernel in kernels),
                modules,
                tuple(dict.fromkeys(call.line for kernel in kernels for call in kernel.calls)),
                phases,
            )
            for (name, modules, phases), kernels in grouped(self.kernels, parts_of).items()
        ]
        return tuple(sorted(rows, key=lambda row: row.seconds, reverse=True))

    def _folded(self) -> dict[str, str]:
        """Return the names of the modules, in which numbered blocks are one."""
        return folded({one.module for one in self.calls if not one.module.partition(".")[0].endswith(")")})

    def _rows(self, name: Callable[[ProfiledCall], str]) -> tuple[ProfileRow, ...]:
        sources = {call.line: call.source for call in self.calls}
        rows = []
        for one, calls in grouped(self.calls, name).items():
            forward, backward, update = (
                math.fsum(call.seconds for call in calls if call.phase == phase) for phase in PHASES
            )
            nbytes = sum(call.nbytes for call in calls)
            rows.append(ProfileRow(one, sources.get(one, ""), len(calls), forward, backward, update, nbytes))
        return tuple(sorted(rows, key=lambda row: row.seconds, reverse=True))

    def table(self, rows: int = _ROWS) -> str:
        """Return the slowest modules and lines as text.

        Args:
          rows: How many of each to show; the rest is summed up in one line.
        Raises:
          ValueError: If ``rows`` is not a positive int.
        """
        if type(rows) is not int or rows < 1:
            raise ValueError(f"table: rows must be a positive int, got {rows!r}")
        return as_text(self.report(rows))

    def report(self, rows: int = _ROWS) -> list[Part]:
        """Return what was measured, and the slowest modules, lines and kernels."""
        legend = [WHAT_COPIES_ARE] if any(one.module == COPIES for one in self.calls) else []
        kernels = ["", _of_kernels(self.by_kernel(), rows)] if self.kernels else []
        made = sum(one.nbytes for one in self.calls)
        sizes = {**self.resident, "results of calls, by the names above": made}
        return [
            f"{self.function} on {self.device}: {_ms(self.call_s)} ms a call, {_mib(self.nbytes)} MiB at the peak",
            self._measured(),
            key(PHASES),
            "",
            _of_calls("by module", self.by_module(), rows),
            "",
            _of_calls("by line", self.by_line(), rows),
            *kernels,
            "",
            f"MiB at the peak: {', '.join(f'{name} {_mib(nbytes)}' for name, nbytes in sizes.items())}",
            *legend,
        ]

    def _measured(self) -> str:
        calls = f"{len(self.calls):,} calls"
        if self.kernels:
            return (
                f"It is compiled: its {len(self.kernels):,} kernels take {_ms(self.seconds)} ms and compute {calls}. "
                "In the rows by module and by line, a kernel's time is shared among its calls, by the bytes of each."
            )
        if self.compiled:
            return (
                f"It is compiled: a kernel computes several calls. The rows below are its {calls} run one by one, not "
                f"compiled, {_ms(self.seconds)} ms in all: what is large, not what the compiler makes of it."
            )
        return f"Its {calls} take {_ms(self.seconds)} ms, run one by one; the rows below add up to it."


def folded(paths: Collection[str]) -> dict[str, str]:
    """Return a name for each path of a module; numbered siblings with the same submodules share one.

    Siblings without submodules keep names of their own: they may be different layers of a ``Sequential``.

    Example:
      >>> from functional_cg.step.profile.result import folded
      >>> folded(["h.0.fc", "h.0.act", "h.1.fc", "h.1.act", "out.0", "out.1"])["h.1.fc"]
      'h.0-1.fc'
      >>> folded(["h.0.fc", "h.0.act", "h.1.fc", "h.1.act", "out.0", "out.1"])["out.1"]
      'out.1'
    """
    below: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
    split = {path: tuple(path.split(".")) for path in paths}
    for parts in split.values():
        for place in range(len(parts)):
            below[parts[: place + 1]].add(parts[place + 1 :])
    numbered = [parts for parts, rests in below.items() if parts[-1].isdecimal() and len(rests) > 1]
    blocks = grouped(numbered, lambda parts: (parts[:-1], frozenset(below[parts])))
    names = {
        parts: _ranges(sorted(int(one[-1]) for one in alike)) for alike in blocks.values() for parts in alike
    }
    return {
        path: ".".join(names.get(parts[: place + 1], part) for place, part in enumerate(parts))
        for path, parts in split.items()
    }


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges: ``0-3,5``."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)


def _of_calls(name: str, rows: Sequence[ProfileRow], most: int) -> list[tuple[str, ...]]:
    """Return rows as cells, after a title for each column; in a notebook, with a bar for the time of each."""
    total = math.fsum(row.seconds for row in rows)
    longest = max((row.seconds for row in rows), default=0.0) or 1.0
    cells = [
        (
            title(row),
            f"{row.calls:,}",
            *(_ms(part) if part else "" for part in row.parts),
            *_time(row.seconds, total),
            _mib(row.nbytes) if row.nbytes else "",
            stack([part / longest for part in row.parts]),
        )
        for row in shortened(rows, most)
    ]
    return [(name, "calls", *PHASES, "ms", "%", "peak MiB", element("span")), *cells]


def _of_kernels(rows: Sequence[KernelRow], most: int) -> list[tuple[str, ...]]:
    total = math.fsum(row.seconds for row in rows)
    cells = [
        (
            _start(row.name),
            f"{row.kernels:,}",
            ", ".join(row.phases),
            *_time(row.seconds, total),
            _several(list(map(_end, row.modules))),
            _several(row.lines),
        )
        for row in shortened(rows, most)
    ]
    return [("by kernel", "kernels", "phase", "ms", "%", "modules", "lines"), *cells]


def _time(seconds: float, total: float) -> tuple[str, str]:
    """Return milliseconds, and their percentage of a total."""
    return _ms(seconds), f"{100 * seconds / total:.1f}" if total else ""


def title(row: ProfileRow, source: int = _WIDEST) -> str:
    """Return the name of a row, and what stands on its line, up to so many characters."""
    return f"{_end(row.name)}  {_start(row.source, source)}".rstrip()


def _end(name: str) -> str:
    """Return the end of a name, from the first part of its path on that fits."""
    path, cut = name, name
    while len(cut) > _WIDEST and path.partition(".")[2]:
        path = path.partition(".")[2]
        cut = f"…{path}"
    return cut


def _start(text: str, most: int = _WIDEST) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _several(names: Sequence[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.2f}"
