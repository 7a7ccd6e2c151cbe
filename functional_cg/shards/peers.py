"""Agree with other ranks outside graphs, and turn c10d's errors on lost ranks into ``RankError``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from ..errors import FunctionalCGError, RankError
from ..errors.words import words_of
from .groups import gone
from .mesh import Mesh

__all__ = ["among", "on_any", "together", "watched"]

# Fragments of c10d's messages about broken connections.
_CONNECTION = ("gloo", "pair closure", "TCPStore", "Connection reset", "Connection closed", "Broken pipe")
_NO_GROUP = ("process group", "has been destroyed", "has not been initialized")


def together(mesh: Mesh | None, function: str, what: str) -> None:
    """Wait until all ranks are about to do the same, outside graphs; does nothing on one rank.

    Raises:
      RankError: On all ranks, naming the ranks that are missing or differ.
    """
    if mesh is not None and mesh.ranks is not None:
        mesh.ranks.agree(function, what)


def on_any(mesh: Mesh | None, function: str, flag: bool) -> bool:  # noqa: FBT001 - it is what is asked
    """Whether a flag is set on any rank; all ranks must ask, outside graphs."""
    if mesh is None or mesh.ranks is None:
        return flag
    said = mesh.ranks.shared(function, f"certify `{function}`\n{'yes' if flag else 'no'}")
    return any(text.endswith("yes") for text in said)


@contextlib.contextmanager
def among(mesh: Mesh | None, function: str) -> Iterator[None]:
    """Wrap a block that communicates with other ranks, to turn a lost connection into a ``RankError``.

    Raises:
      RankError: If a connection breaks.
    """
    try:
        yield
    except RuntimeError as error:
        found = _lost(mesh, function, error)
        if found is None:
            raise
        raise found from error


def watched(
    launch: Callable[..., Any], mesh: Mesh | None, function: str, waits: tuple[Any, Any] | None
) -> tuple[Callable[..., Any], Callable[[], None]]:
    """Return the launch of a captured function, and what to do after the first one.

    On a CPU, where a collective returns when it is done, each launch is wrapped. On a GPU they stay as they are: the
    watchdog looks at their counter and at the device.

    Args:
      launch: Launches it.
      mesh: The mesh of its states.
      function: Name of the user's function.
      waits: The counter of its replays, and the memory of its first state; None if it waits for no other rank.
    """
    if mesh is None or mesh.ranks is None:
        return launch, _nothing
    if mesh.device.type == "cuda":
        return launch, _nothing if waits is None else mesh.watchdog.device(function, *waits).look
    seen = SimpleNamespace(begun=0, done=0) if waits is None else mesh.watchdog.host(function)

    def watched_launch(before: Any) -> Any:
        mesh.ranks.refuse_if_lost(function)
        seen.begun += 1
        try:
            with among(mesh, function):
                return launch(before)
        finally:
            seen.done = seen.begun

    return watched_launch, _nothing


def _nothing() -> None:
    pass


def _lost(mesh: Mesh | None, function: str, error: RuntimeError) -> RankError | None:
    """Return the library's error for c10d's error on a broken connection; None for any other error."""
    if mesh is None or mesh.ranks is None or isinstance(error, FunctionalCGError):
        return None
    if any(words in words_of(error) for words in _NO_GROUP):
        return gone(function, _first_line(error))
    if not any(words in words_of(error) for words in _CONNECTION):
        return None
    absent = mesh.ranks.absent()
    names = ", ".join(map(str, absent))
    who = f"rank{'s' * (len(absent) > 1)} {names}" if absent else "the other ranks"
    return RankError.of(
        function,
        f"rank {mesh.number} of {mesh.everyone} has lost {who}; the state is that of the last step.",
        rows=[_first_line(error)],
        why="A collective waits for all ranks: one of them has ended, or has not come in time.",
        fix="see what that rank said, and call steps on all ranks in one order; then start all ranks again, from "
        "the last checkpoint.",
    )


def _first_line(error: RuntimeError) -> str:
    """Return the first line of c10d's message, without its source location and advice."""
    return (
        words_of(error).partition("\n")[0].partition("] ")[2].partition(". This is")[0]
        or words_of(error).partition("\n")[0]
    )
