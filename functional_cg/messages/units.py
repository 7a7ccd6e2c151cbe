"""Sizes of memory as text."""

from __future__ import annotations

__all__ = ["size_of"]

_MIB = 2**20


def size_of(nbytes: int) -> str:
    """Return a number of bytes in MiB, or exactly if it is less than a hundredth of one.

    Example:
      >>> from functional_cg.messages.units import size_of
      >>> size_of(3 * 2**19), size_of(4096)
      ('1.50 MiB', '4,096 B')
    """
    return f"{nbytes / _MIB:,.2f} MiB" if nbytes >= _MIB / 100 else f"{nbytes:,} B"
