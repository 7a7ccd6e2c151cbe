"""Alarms inside a step: the host is warned soon after the call in which one goes off, and never waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import LayoutError
from ..messages.source import warn
from ..messages.tracebacks import entry
from ..state.arena import BufferSpec
from ..state.leaf import owned

__all__ = ["ALARM", "Alarm", "alarm"]

# The registration lives as long as this module.
_library = torch.library.Library("fcg", "FRAGMENT")
_library.define("alarm(str text, Tensor[] values) -> ()")


def _warn(text: str, flags: Tensor, when: str = "") -> None:
    """Warn at the user's line if a flag is true; of the flags of members, say whose."""
    if not bool(flags.any()):
        return
    which = ""
    if flags.dim():
        on = (
            flags.flatten(1).any(1).nonzero().flatten().tolist()
            if flags.dim() > 1
            else flags.nonzero().flatten().tolist()
        )
        which = f", of {len(on):,} of {len(flags):,} members: {', '.join(map(str, on[:_NAMED]))}"
        which += ", …" if len(on) > _NAMED else ""
    warn(f"{when}{text}{which}")


def _batched(info: Any, in_dims: Any, text: str, values: Sequence[Tensor]) -> tuple[None, None]:
    """An alarm under ``vmap``: the flags of the whole batch at once."""
    del info
    torch.ops.fcg.alarm(
        text, [v if dim is None else v.movedim(dim, 0) for v, dim in zip(values, in_dims[1], strict=True)]
    )
    return None, None


_library.impl("alarm", lambda text, values: _warn(text, values[0]), "CompositeExplicitAutograd")
torch.library.register_vmap("fcg::alarm", _batched, lib=_library)
ALARM = torch.ops.fcg.alarm.default
_NAMED = 8  # members that a warning names


@entry("fcg.alarm('the loss is above 10', loss > 10)")
def alarm(text: str, when: Tensor) -> None:
    """Warn on the host when a condition inside a step becomes true, without ever waiting for the device.

    The condition leaves the step along with its metrics. A ``UserWarning`` with the number of the call, counted from 0,
    follows as soon as the device has computed it, at the latest when the step is closed: some calls later if the host
    is ahead. It is given when the condition turns true, and again only after it was false; all alarms of one text are
    one. An eager run warns at once. With ``python -W error``, the call that notices it raises; the new state is
    ``state.latest()``, and a recorder has the call. In a sweep, and under ``vmap``, the warning names the members for
    which it turned true. Of ``cond``, both branches run, and so do their alarms. A comparison with NaN is false:
    ``~(loss <= 10)`` is true of a loss of NaN, too.

    Args:
      text: What has happened.
      when: bool[].
    Raises:
      TypeError: If ``text`` is not a string, or ``when`` not a tensor.
      LayoutError: If ``when`` is not bool[].

    Example:
      >>> import torch, warnings, functional_cg as fcg
      >>> @fcg.graph_step
      ... def step(state, x):
      ...     fcg.alarm("the input is negative", x.amin() < 0)
      ...     return {"sum": state["sum"] + x.sum()}, {}
      >>> state = fcg.place({"sum": torch.tensor(0.0)})
      >>> with warnings.catch_warnings(record=True, action="always") as seen:
      ...     for x in (1.0, -1.0, -2.0):
      ...         state, _ = step(state, torch.tensor([x]))
      >>> print(*(one.message for one in seen))
      `step`, call 1: the input is negative
    """
    if not isinstance(text, str):
        got = repr(text) if not isinstance(text, Tensor) else "a tensor, which comes second"
        raise TypeError(f"alarm: `text` has to be a text, got {got}")
    if not isinstance(when, Tensor):
        raise TypeError(
            f"alarm: {text!r} needs a tensor, bool[], got {type(when).__name__}; a Python value needs no alarm"
        )
    if when.dtype is not torch.bool or when.dim():
        raise LayoutError.of(
            "",
            f"alarm: {text!r} needs a condition that is one tensor, bool[].",
            rows=[f"when  expected bool[]   got {BufferSpec.of(when)}"],
            fix="compare, and reduce it: `(x > 10).any()`.",
        )
    with torch.no_grad():
        ALARM(text, [owned(when).detach().clone()])


class Alarm:
    """An alarm of a step: hears its condition after each call.

    Args:
      step: Name of the step.
      text: What has happened.
    """

    def __init__(self, step: str, text: str) -> None:
        self._step, self._text = step, text
        self._on: Tensor | None = None  # the last condition that is known
        self._ahead: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def hear(self, call: int, flags: Tensor) -> None:
        """Take the condition of a call; what it means is told by :meth:`catch_up`.

        Args:
          call: Its number.
          flags: bool[], or bool[n, ...] of members.
        """
        event = None
        if flags.is_cuda:
            copy = torch.empty(flags.shape, dtype=torch.bool, pin_memory=True)
            flags, event = copy.copy_(flags, non_blocking=True), torch.cuda.Event()
            event.record()
        self._ahead.append((call, flags, event))

    def catch_up(self, *, wait: bool) -> None:
        """Warn of the calls that are done, with ``wait`` of all."""
        while self._ahead and (wait or self._ahead[0][2] is None or self._ahead[0][2].query()):
            call, flags, event = self._ahead.popleft()
            if event is not None:
                event.synchronize()
            before, self._on = self._on, flags
            turned = flags if before is None or before.shape != flags.shape else flags & ~before
            _warn(self._text, turned, f"`{self._step}`, call {call:,}: ")
