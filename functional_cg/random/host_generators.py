"""Generators of random numbers that belong to the host, which a step must not move."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import ImplicitRandomnessError
from ..messages.libraries import in_place_fix
from ..messages.source import frames, is_user_file, place_of, user_frame

__all__ = ["HostRandomness"]

_RUNS = 3  # another thread is unlikely to draw in each run and in no pause
_FIX = "draw from a key in the state with `fcg.random`, or pass the numbers as an input"


@dataclass(slots=True)
class HostRandomness:
    """States of the host's random generators, compared before and after a trace."""

    torch_state: Tensor
    python_state: Any
    numpy_state: Any

    @classmethod
    def read(cls) -> HostRandomness:
        numpy = sys.modules.get("numpy")
        return cls(torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state())

    def moved(self) -> list[str]:
        """Return the names of the generators whose state has changed."""
        now = HostRandomness.read()
        same = {
            "torch (CPU)": torch.equal(self.torch_state, now.torch_state),
            "random": self.python_state == now.python_state,
            "numpy.random": _comparable(self.numpy_state) == _comparable(now.numpy_state),
        }
        return [name for name, still in same.items() if not still]

    def restore(self) -> None:
        """Restore the generators to the recorded states."""
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        if self.numpy_state is not None:
            sys.modules["numpy"].random.set_state(self.numpy_state)

    def restore_own(self) -> None:
        """Restore the generators unless another thread may have drawn since: it would get the same numbers twice."""
        if _alone() and self.moved():
            self.restore()

    def refuse_draws(self, function: str, again: Callable[[], object]) -> None:
        """Raise if the function has advanced a generator, after restoring it.

        If other threads run, the function counts as the one that drew only if a generator advances in each of its runs
        and in no pause between them. A thread that draws at exactly these times is mistaken for the function. A
        function that draws while others do is missed here, and so is one that reseeds to the same state each time.
        Such draws show up when the programs of the two traces differ.

        Args:
          function: Name of the user's function.
          again: Runs it once more.
        Raises:
          ImplicitRandomnessError: Naming the generators.
        """
        moved = self.moved()
        for _ in range(0 if _alone() else _RUNS):
            if moved:
                moved = _moved_alone_by(again, moved)
        if moved:
            self.restore()
            place, fix = self._drawn_by(again)
            self.restore()
            raise ImplicitRandomnessError.of(
                function,
                f"moves a random generator on the host: {', '.join(moved)}.",
                rows=[f"at {place}"] if place else [],
                why="Python runs when the step is traced, not when it is replayed: the numbers never change.",
                fix=f"{fix}.",
            )

    def _drawn_by(self, run: Callable[[], object]) -> tuple[str, str]:
        """Return the first line of user code in a run after which a generator has moved, or "", and what to do."""
        found: list[tuple[str, str]] = []

        def note(frame: FrameType | None, line: int) -> None:
            with _disable_current_modes(), torch._C.DisableTorchFunction():  # a trace is running
                moved = not found and self.moved()
            if frame is not None and moved:
                outer = ((one.f_code, one.f_lineno) for one in frames(frame.f_back))
                found.append((place_of([(frame.f_code, line), *outer]), in_place_fix(frame, _FIX)))

        def called(frame: FrameType, event: str, arg: object) -> Any:
            if found or not is_user_file(frame.f_code.co_filename):
                return None
            if (caller := user_frame(frame.f_back)) is not None:
                note(caller, caller.f_lineno)
            line = frame.f_lineno

            def ran(frame: FrameType, event: str, arg: object) -> Any:
                nonlocal line
                note(frame, line)
                line = frame.f_lineno
                return None if found else ran

            return ran

        before = sys.gettrace()
        try:
            sys.settrace(called)
            run()
        finally:
            sys.settrace(before)
        return found[0] if found else ("", _FIX)


def _comparable(state: Any) -> Any:
    """A state of numpy's generators, whose arrays compare element by element, as what compares as a whole."""
    if isinstance(state, tuple):
        return tuple(map(_comparable, state))
    if isinstance(state, dict):  # as of any bit generator but the first one
        return {name: _comparable(part) for name, part in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


def _alone() -> bool:
    return threading.active_count() == 1


def _moved_alone_by(run: Callable[[], object], suspects: Sequence[str]) -> list[str]:
    """Return the generators that advance during a run, but not during a pause of the same length."""
    before, start = HostRandomness.read(), time.perf_counter()
    run()
    seconds, moved, resting = time.perf_counter() - start, before.moved(), HostRandomness.read()
    time.sleep(seconds)
    return [name for name in suspects if name in moved and name not in resting.moved()]
