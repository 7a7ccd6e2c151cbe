"""Sizes of memory, and lists that may be long, as text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["first", "size_of"]

_MIB = 2**20


def size_of(nbytes: int) -> str:
    """Return a number of bytes in MiB, or exactly if it is less than a hundredth of one.

    Example:
      >>> from functional_cg.messages.units import size_of
      >>> size_of(3 * 2**19), size_of(4096)
      ('1.50 MiB', '4,096 B')
    """
    return f"{nbytes / _MIB:,.2f} MiB" if nbytes >= _MIB / 100 else f"{nbytes:,} B"


def first(lines: Sequence[str], most: int, more: str = "more") -> list[str]:
    """Return the first lines, and one that counts the others.

    Example:
      >>> from functional_cg.messages.units import first
      >>> first(["a", "b", "c"], 1, "more letters")
      ['a', '… and 2 more letters']
    """
    return [*lines[:most], *([f"… and {len(lines) - most:,} {more}"] if len(lines) > most else [])]
