"""Value numbering: which values are equal, since the same calls made them from equal values.

Equal numbers mean equal values; different numbers prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .op_table import row_of

__all__ = ["Numbers"]


class Numbers:
    """The numbers of values, updated call by call.

    Two values get the same number if the same op made them from arguments with the same numbers, or if one is a copy of
    the other. A write in place gives a new number to what is in that memory.

    Args:
      kind: Class of what stands for a value: tensors, or variables of a program.
      storage_of: Returns what identifies the memory of one.
      known: Numbers of another run, which hold here as well.
    """

    def __init__(
        self, kind: type, storage_of: Callable[[Any], int], known: dict[Any, int] | None = None
    ) -> None:
        self._kind, self._storage_of = kind, storage_of
        self._of: dict[Any, tuple[int, int]] = {}  # number, last write to its memory before that
        self._writes: dict[int, int] = {}
        self.known = {} if known is None else known

    def of(self, one: Any) -> int:
        """Return the number of the value that one holds now."""
        if one not in self._of:
            self.name(one, self.number(object()))
        number, then = self._of[one]
        now = self.last_write(self._storage_of(one))
        return number if now == then else self.number((number, now))

    def number(self, what: Any) -> int:
        """Return a number: the same one for the same ``what``."""
        return self.known.setdefault(what, len(self.known))

    def name(self, one: Any, number: int) -> None:
        """Say which value one holds."""
        self._of[one] = number, self.last_write(self._storage_of(one))

    def last_write(self, storage: int) -> int:
        """Return the number of what was written last into a storage; -1 if nothing was."""
        return self._writes.get(storage, -1)

    def forget_write(self, storage: int) -> None:
        """Let a storage hold what it held before the first write."""
        self._writes.pop(storage, None)

    def call(
        self,
        op: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[Any],
        writes: Sequence[Any],
    ) -> None:
        """Number the results of a call, and what it writes."""
        # Compared as text, since 1 == 1.0 == True and 0.0 == -0.0.
        made = op, repr(self._told((args, tuple(kwargs.items()))))
        copied = self.of(args[0]) if row_of(op).copies else None
        for place, one in enumerate(writes):
            self._writes[self._storage_of(one)] = self.number((*made, "writes", place))
        for place, one in enumerate(results):
            if one not in self._of:  # otherwise it is an argument written in place
                self.name(one, self.number((*made, place)) if copied is None else copied)

    def _told(self, value: Any) -> Any:
        if isinstance(value, self._kind):
            return f"value {self.of(value)}"  # an argument may be the number itself
        return list(map(self._told, value)) if isinstance(value, (list, tuple)) else value
