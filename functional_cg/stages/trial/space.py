"""The buffers that a comparison runs on."""

from __future__ import annotations

from typing import Protocol

from ..plan import Buffers

__all__ = ["Space"]


class Space(Protocol):
    """Static buffers with the values of a call, which a trial may write.

    Attributes:
      buffers: The buffers.
      ample: Whether there is memory on the device for whatever is kept.
    """

    buffers: Buffers
    ample: bool

    def keep(self) -> None:
        """Keep the values that the buffers have now."""
        ...

    def reset(self) -> None:
        """Restore the values of the call."""
        ...

    def vary(self, kind: str) -> None:
        """Put other values in the buffers, made from those of the call."""
        ...

    def room(self) -> int | None:
        """Return the bytes that the reference may take; None for no limit."""
        ...

    def host(self) -> int:
        """Return the bytes of host memory that it may take."""
        ...
