"""Copy a state into another arena; send a state's memory away between phases, and bring it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from ..ambient.modes import ordinary
from ..ambient.setting import inside_a_step
from ..concurrency.interrupts import held_back
from ..errors import AsleepError, BusyError, SideEffectError
from ..messages.tracebacks import entry
from .arena import Arena
from .handle import Handle, place, snapshot
from .pages import Pages

__all__ = ["fork", "sleep", "staying", "wake"]

T = TypeVar("T")


def fork(state: T) -> T:
    """Copy a state into a second arena; the two states are independent.

    Example:
      >>> import torch, functional_cg as fcg
      >>> state = fcg.place({"w": torch.ones(2)})
      >>> twin = fcg.fork(state)
      >>> state = state.replace(w=torch.zeros(2))
      >>> twin["w"].tolist()
      [1.0, 1.0]
    """
    return place(snapshot(state))


@entry("state = fcg.sleep(state)")
def sleep(state: T) -> T:
    """Move a state to pinned host memory, and give its memory on the device back, until :func:`wake`.

    For phases that need the memory for something else: generation in reinforcement learning, an evaluation, another
    model. Captures stay valid, since the memory comes back at the same addresses. Until then, any use of the state
    raises. The state must have been made with ``can_sleep=True``. It waits for the device. On a mesh, each rank does it
    by itself. A state that sleeps already stays as it is. Captures keep their temporaries, see ``memory_analysis()``;
    ``step.close()`` frees them. On an H100, 2 GiB leave in 40 ms and come back in 50; host memory that torch has not
    pinned before costs 0.6 s per GiB.

    Args:
      state: A whole state.
    Returns:
      The same handle.
    Raises:
      BusyError: If another thread is capturing a step with it.
      DonatedStateError: If the handle was donated.
      RuntimeError: If there is not enough host memory; the state stays awake.
      SideEffectError: If it is called inside of a step.
      TypeError: If it is no whole state.
      ValueError: If it was made without ``can_sleep=True``.

    Example:
      >>> import torch, functional_cg as fcg
      >>> step = fcg.graph_step(lambda state, x: ({"w": state["w"] + x}, {}))
      >>> state = fcg.place({"w": torch.ones(2)}, can_sleep=True)
      >>> state, _ = step(state, torch.ones(2))
      >>> state = fcg.sleep(state)  # its memory is free
      >>> state = fcg.wake(state)
      >>> state, _ = step(state, torch.ones(2))
      >>> state["w"].tolist(), step.stats.captures
      ([3.0, 3.0], 1)
    """
    arena = _arena_of(state, "sleep")
    if not arena.asleep:
        with held_back(), ordinary():
            arena.turn.shut_down(partial(_leave, state, arena), partial(_asleep, state._part.path))  # type: ignore[attr-defined]
    return state


@entry("state = fcg.wake(state)")
def wake(state: T) -> T:
    """Bring a state's memory back to the device, at the same addresses and with the same values.

    A state that is awake stays as it is. See :func:`sleep`.

    Args:
      state: A whole state.
    Returns:
      The same handle.
    Raises:
      DonatedStateError: If the handle was donated.
      SideEffectError: If it is called inside of a step.
      torch.OutOfMemoryError: If the device has not enough memory; the state stays asleep, and nothing is lost.
      TypeError: If it is no whole state.
      ValueError: If it was made without ``can_sleep=True``.
    """
    arena = _arena_of(state, "wake")
    if arena.asleep and arena.pages is not None:
        with held_back(), ordinary():
            arena.turn.reopen(arena.pages.come_back)
    return state


@contextmanager
def staying(arenas: Iterable[Arena]) -> Iterator[None]:
    """Keep states awake during a block that uses their memory and has not their turn, such as a capture."""
    used: list[Pages] = []
    try:
        for arena in arenas:
            if arena.pages is not None:
                with arena.turn.lock:
                    if arena.asleep:
                        raise arena.turn.refusal()
                    arena.pages.users.append(None)
                    used.append(arena.pages)
        yield
    finally:
        for pages in used:
            pages.users.pop()


def _leave(state: Any, arena: Arena) -> None:
    state._check()
    if arena.pages is not None and arena.pages.users:
        raise BusyError.of(
            "",
            f"`{state._part.path}` cannot sleep while a step is being captured with it.",
            why="Another thread is in the first call of a step, which reads its memory.",
            fix="wait for that call, then `fcg.sleep(state)`.",
        )
    if arena.stream is not None:
        arena.stream.synchronize()
    assert arena.pages is not None
    arena.pages.leave()


def _arena_of(state: Any, what: str) -> Arena:
    if inside_a_step():
        raise SideEffectError.of(
            "",
            f"calls `fcg.{what}`.",
            why="Python runs when the step is traced, never again: a replay would not repeat it.",
            fix=f"call `fcg.{what}` before or after the step.",
        )
    if not isinstance(state, Handle) or state._owner is not None:
        got = type(state).__name__ if not isinstance(state, Handle) else f"a part, `{state._part.path}`"
        raise TypeError(f"fcg.{what}: expected a whole state, got {got}.\nTo fix: `fcg.{what}(state)`.")
    state._check()
    arena = state._lease.arena
    if arena.pages is None:
        raise ValueError(
            f"fcg.{what}: the state lies in memory that cannot leave its addresses.\n"
            "To fix: `TrainState.create(..., can_sleep=True)`, or `fcg.place(tree, can_sleep=True)`."
        )
    return arena


def _asleep(name: str) -> AsleepError:
    return AsleepError.of(
        "",
        f"`{name}` was used while it is asleep.",
        why="Its values are in host memory, and its own memory may belong to somebody else.",
        fix=f"`{name} = fcg.wake({name})` first.",
    )
