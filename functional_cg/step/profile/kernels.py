"""Name the kernels of a compiled step, from the source that inductor generates for the host.

That source launches the kernels line by line. Above each line a comment lists the nodes of the graph that the kernel
computes, by the names that the graph had when it was compiled.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Kernel", "Launches", "kernels"]

Line = tuple[str, int] | str  # of a file; or the name of a call outside of the generated source

_NODES = re.compile(r"\s*# .*Source Nodes: \[(.*?)\], Original ATen:")
_CALLED = re.compile(r"(?:[\w, ]+ = )?([\w.]+)\(")
_PARTIAL = re.compile(
    r"\w+ = workspace_\d+\[.*\.sum\("
)  # a kernel has left a sum for each of its blocks there
_OUTER = re.compile(r"call|partition_\d+")
_FUSED = ("triton_", "cpp_fused_", "multi_kernel_")
_LAUNCHES = (*_FUSED, "extern_kernels.", "torch.ops.", "aten.")
_RUN, _SUM = ".run", "workspace.sum"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, or what else a line launches.

    Attributes:
      name: Its name in the generated source: ``triton_poi_fused_gelu_3``, ``extern_kernels.mm``.
      nodes: Names of the nodes that it computes.
      seconds: Time of the device.
    """

    name: str
    nodes: tuple[str, ...]
    seconds: float


@dataclass(slots=True)
class Launches:
    """Ticks before each line of the generated source that runs inside of it.

    Python's trace function tells of the lines, so a debugger does not stop meanwhile; it gets its own back.

    Attributes:
      tick: What to call before each line.
      leave: What to call where that source is left.
      lines: What runs after each of these calls; None for what has no name.
    """

    tick: Callable[[], None]
    leave: Callable[[], None]
    lines: list[Line | None] = field(default_factory=list)
    _before: Any = None

    def __enter__(self) -> Self:
        self.lines.clear()
        self._before = sys.gettrace()
        sys.settrace(self._enters)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        sys.settrace(self._before)
        if self.lines and self.lines[-1] is not None:
            self._at(None)

    def call(self, name: str | None) -> None:
        """Tick before a call outside of the generated source, or after the last."""
        self._at(name)

    def _enters(self, frame: FrameType, event: str, value: Any) -> Any:
        code = frame.f_code
        generated = _OUTER.fullmatch(code.co_name) and any(map(_NODES.match, _text(code.co_filename)))
        return self._runs if generated else None

    def _runs(self, frame: FrameType, event: str, value: Any) -> Any:
        if event in ("line", "return"):
            self._at((frame.f_code.co_filename, frame.f_lineno) if event == "line" else None)
        return self._runs

    def _at(self, line: Line | None) -> None:
        self.lines.append(line)
        (self.leave if line is None else self.tick)()


def kernels(lines: Iterable[Line | None], seconds: Iterable[float]) -> list[Kernel]:
    """Return what the lines launch, in order; those that take no time of the device are left out.

    Args:
      lines: Lines of the generated source, as :class:`Launches` has them.
      seconds: What each takes.
    """
    comments: dict[str, Mapping[int, tuple[str, ...]]] = {}
    found = []
    for line, took in zip(lines, seconds, strict=True):
        if line is None or not took:
            continue
        if isinstance(line, str):
            found.append(Kernel(line, (line,), took))
            continue
        file, number = line
        if file not in comments:
            comments[file] = _nodes_above(_text(file))
        name = _name(_text(file)[number - 1].strip())
        nodes = comments[file].get(number, ())
        # What inductor calls of other libraries is its last node; those before it are views of arguments, and what
        # made them.
        found.append(Kernel(name, nodes if name.startswith((*_FUSED, _SUM)) else nodes[-1:], took))
    return found


def _name(line: str) -> str:
    if _PARTIAL.match(line):
        return _SUM
    called = _CALLED.match(line)
    return called[1].removesuffix(_RUN) if called is not None else "(no call)"


def _nodes_above(text: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Return the nodes of the comment above each line, by the line's number; it is of the first launch below it.

    What sums up a kernel's partial results is of that kernel.
    """
    found: dict[int, tuple[str, ...]] = {}
    nodes: tuple[str, ...] = ()
    launched = nodes
    for number, line in enumerate(text, 1):
        comment = _NODES.match(line)
        if comment is not None:
            nodes = tuple(filter(None, comment[1].split(", ")))
        name = _name(line.strip())
        found[number] = launched if name == _SUM else nodes
        if name.startswith(_LAUNCHES):
            launched, nodes = nodes, ()
    return found


def _text(file: str) -> list[str]:
    return linecache.getlines(file)
