"""Find what each call of a trace is a part of: the user's line, the module, and whether it is differentiated.

A call of a backward belongs where the call does that it differentiates. Autograd numbers its nodes in order of
creation, and a node is made just before the op that it differentiates is called, so a trace that notes the number at
each call knows which call a node was made for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

import torch

from ..ambient.running import OwnWork
from .source import Location, locate

__all__ = ["Origin", "Origins"]

# All private; test_origins notices a change.
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_node = torch._C._current_autograd_node
_next_number = torch._C._autograd._get_sequence_nr


@dataclass(frozen=True, slots=True)
class Origin:
    """What a call is a part of; for a call of a backward, what the call is a part of that it differentiates.

    Attributes:
      module: Path of the innermost module, from the name of its model on, ``GPT.h.0.attn``; "" outside of modules.
      line: The line of user code, if known.
      forward: Whether it is a part of a forward: in a module, or differentiated.
    """

    module: str = ""
    line: Location | None = None
    forward: bool = False

    @classmethod
    def of_all(cls, origins: Iterable[Origin]) -> Origin:
        """Return the origin of one call that stands for several: what they have in common."""
        found = list(origins)
        columns = zip(*(one.module.split(".") for one in found), strict=False)
        path = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
        lines = {one.line for one in found}
        line = lines.pop() if len(lines) == 1 else None
        return cls(".".join(path), line, any(one.forward for one in found))


class Origins:
    """Finds the origin of each call of a trace, in order.

    Args:
      work: What the library's calls report to the trace.
    """

    def __init__(self, work: OwnWork) -> None:
        self._work = work
        self._numbers: list[int] = []
        self._last = _next_number()
        self._origins: list[Origin] = []

    def line(self) -> Location | None:
        """Return the innermost line of user code that is running."""
        return locate()

    def here(self, line: Location | None) -> Origin:
        """Return the origin of the call that is dispatched now, below autograd, from its :meth:`line`."""
        module, node, number = self._work.module, _node(), _next_number()
        if node is None:
            origin = Origin(module, line, bool(module) or number > self._last)
        else:
            made_for = self._of(node._sequence_nr())
            # A line only if code of the user runs inside of the backward: recomputed, a hook, an `autograd.Function`.
            inside = locate(until=_ENGINE)
            origin = Origin(module or made_for.module, inside or made_for.line, forward=True)
        if not self._numbers or number > self._last:
            self._numbers.append(number)
            self._origins.append(origin)
        self._last = number
        return origin

    def _of(self, node: int) -> Origin:
        """Return the origin of the call that a node was made for; its number was the next one at that call."""
        place = bisect_right(self._numbers, node + 1) - 1
        return self._origins[place] if place >= 0 else Origin()
