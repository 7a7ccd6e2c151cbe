"""``Profile``: the time and the memory of a step by module and by line. Prints as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...messages.html import Html, card, fold, key, line, table
from ..costs import COPIES, WHAT_COPIES_ARE
from .folding import folded
from .phases import PHASES, Phase
from .rows import KernelRow, ProfiledCall, ProfiledKernel, ProfileRow
from .tables import html, kernel_rows, of_kernels, shown, size, text

__all__ = ["Profile"]

_ROWS = 16


@dataclass(frozen=True, repr=False, slots=True)
class Profile:
    """The time and the memory of a step by module and by line; prints as a table. Made by ``step.profile``.

    Each call of the step is in one row by module and in one row by line, so the rows of either add up to the whole.

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
        paths = self._paths()
        names = folded(paths) if fold else {}

        def name(call: ProfiledCall) -> str:
            path = names.get(call.module, call.module)
            return path if call.module not in paths else ".".join(path.split(".")[:depth])

        return self._rows(name)

    def by_line(self) -> tuple[ProfileRow, ...]:
        """Return a row for each line of user code, slowest first."""
        return self._rows(lambda call: call.line)

    def by_kernel(self) -> tuple[KernelRow, ...]:
        """Return a row for the kernels of one name in the same modules and phases, slowest first; none if not compiled.

        Numbered blocks are one, as in :meth:`by_module`.
        """
        names = folded(self._paths())
        groups: dict[tuple[str, tuple[str, ...], tuple[Phase, ...]], list[ProfiledKernel]] = {}
        for kernel in self.kernels:
            modules = dict.fromkeys(names.get(call.module, call.module) for call in kernel.calls)
            found = {call.phase for call in kernel.calls}
            phases = tuple(phase for phase in PHASES if phase in found)
            groups.setdefault((kernel.name, tuple(modules), phases), []).append(kernel)
        rows = [
            KernelRow(
                name,
                len(kernels),
                math.fsum(kernel.seconds for kernel in kernels),
                modules,
                tuple(dict.fromkeys(call.line for kernel in kernels for call in kernel.calls)),
                phases,
            )
            for (name, modules, phases), kernels in groups.items()
        ]
        return tuple(sorted(rows, key=lambda row: row.seconds, reverse=True))

    def _paths(self) -> set[str]:
        return {one.module for one in self.calls if not one.module.partition(".")[0].endswith(")")}

    def _rows(self, name: Callable[[ProfiledCall], str]) -> tuple[ProfileRow, ...]:
        groups: dict[str, list[ProfiledCall]] = {}
        for call in self.calls:
            groups.setdefault(name(call), []).append(call)
        sources = {call.line: call.source for call in self.calls}
        rows = [ProfileRow.of(one, calls, sources.get(one, "")) for one, calls in groups.items()]
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
        parts = (("by module", self.by_module()), ("by line", self.by_line()))
        tables = [one for title, found in parts for one in ("", *text(title, found, rows))]
        if self.kernels:
            tables += ["", *of_kernels(self.by_kernel(), rows)]
        return "\n".join([*self._said(), *tables, "", self._memory(), *self._legend()])

    def _said(self) -> list[str]:
        """Say what was measured."""
        calls = f"{len(self.calls):,} calls"
        head = f"{self.function} on {self.device}: {shown(self.call_s)} ms a call, {size(self.nbytes)} MiB at the peak"
        if self.kernels:
            said = (
                f"It is compiled: its {len(self.kernels):,} kernels take {shown(self.seconds)} ms and compute {calls}. "
                "In the rows by module and by line, a kernel's time is shared among its calls, by the bytes of each."
            )
        elif self.compiled:
            said = (
                f"It is compiled: a kernel computes several calls. The rows below are its {calls} run one by one, not "
                f"compiled, {shown(self.seconds)} ms in all: what is large, not what the compiler makes of it."
            )
        else:
            said = f"Its {calls} take {shown(self.seconds)} ms, run one by one; the rows below add up to it."
        return [head, said]

    def _memory(self) -> str:
        made = sum(one.nbytes for one in self.calls)
        fixed = [f"{name} {size(nbytes)}" for name, nbytes in self.resident.items()]
        return f"MiB at the peak: {', '.join([*fixed, f'results of calls, by the names above {size(made)}'])}"

    def _legend(self) -> list[str]:
        return [WHAT_COPIES_ARE] if any(one.module == COPIES for one in self.calls) else []

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__

    def _repr_html_(self) -> Html:
        head, *rest = self._said()
        folds = [fold("by line", html(self.by_line(), _ROWS))]
        if self.kernels:
            folds.append(fold("by kernel", table(kernel_rows(self.by_kernel(), _ROWS))))
        return card(
            head,
            *map(line, rest),
            key(PHASES),
            html(self.by_module(), _ROWS),
            *folds,
            line(self._memory()),
            *map(line, self._legend()),
        )
