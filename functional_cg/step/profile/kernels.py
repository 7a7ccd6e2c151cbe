"""Name the kernels of a compiled step, from the source that inductor generates for the host.

That source launches the kernels line by line. Above each line a comment lists the nodes of the graph that the kernel
computes, by the names that the graph had when it was compiled.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["launched_in", "lines_told"]

_NODES = re.compile(r"\s*# .*Source Nodes: \[(.*?)\], Original ATen:")
_CALLED = re.compile(r"(?:[\w, ]+ = )?([\w.]+)\(")
_PARTIAL = re.compile(r"\w+ = workspace_\d+\[.*\.sum\(")  # a kernel left a sum for each of its blocks there
_OUTER = re.compile(r"call|partition_\d+")
_FUSED = ("triton_", "cpp_fused_", "multi_kernel_")
_LAUNCHES = (*_FUSED, "extern_kernels.", "torch.ops.", "aten.")
_SUM = "workspace.sum"


@contextmanager
def lines_told(tick: Callable[[tuple[str, int] | None], None]) -> Iterator[None]:
    """Tell of each line of generated source before it runs, by file and number, and where that source is left.

    Python's trace function tells of the lines, so a debugger does not stop meanwhile; it gets its own back.

    Args:
      tick: What to call with a line, or with None.
    """

    def enter(frame: FrameType, event: str, value: Any) -> Any:
        code = frame.f_code
        generated = _OUTER.fullmatch(code.co_name) and any(
            map(_NODES.match, linecache.getlines(code.co_filename))
        )
        return inside if generated else None

    def inside(frame: FrameType, event: str, value: Any) -> Any:
        if event in ("line", "return"):
            tick((frame.f_code.co_filename, frame.f_lineno) if event == "line" else None)
        return inside

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def launched_in(file: str) -> dict[int, tuple[str, tuple[str, ...]]]:
    """Return what each line of generated source launches: its name, and the names of the nodes that it computes.

    A comment is of the first launch below it. What sums up a kernel's partial results is of that kernel.
    """
    found: dict[int, tuple[str, tuple[str, ...]]] = {}
    nodes: tuple[str, ...] = ()
    launched = nodes
    for number, line in enumerate(linecache.getlines(file), 1):
        if comment := _NODES.match(line):
            nodes = tuple(filter(None, comment[1].split(", ")))
        called = _CALLED.match(line.strip())
        name = called[1].removesuffix(".run") if called else "(no call)"
        if _PARTIAL.match(line.strip()):
            found[number] = _SUM, launched
            continue
        # What inductor calls of other libraries is its last node; those before it are views of arguments, and what
        # made them.
        found[number] = name, nodes if name.startswith(_FUSED) else nodes[-1:]
        if name.startswith(_LAUNCHES):
            launched, nodes = nodes, ()
    return found
