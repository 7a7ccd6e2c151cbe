"""Tap values inside a step, to be read outside after any call.

Tapped values leave the step along with its metrics, into a ring of the last values per name. Nothing waits for the
device until a value is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..ambient.modes import ordinary, without_gradients
from ..messages.tracebacks import entry
from ..state.arena import BufferSpec
from ..state.leaf import owned
from .alarms import Alarm

__all__ = ["TAP", "Taps", "tap"]

# The registration lives as long as this module.
_library = torch.library.Library("fcg", "FRAGMENT")
# With `rows`, one name a line, the value has a row for each.
_library.define("tap(str name, str? rows, int keep, Tensor[] values) -> ()")


_listener: ContextVar[Taps | None] = ContextVar("listener", default=None)


def _record(name: str, rows: str | None, keep: int, values: Sequence[Tensor]) -> None:
    """Record a value in an eager run; a trace records the call instead, and outside a step there is no listener."""
    taps = _listener.get()
    if taps is not None:
        taps.record(name, rows, keep, values)


def _batched(
    info: Any, in_dims: Any, name: str, rows: str | None, keep: int, values: Sequence[Tensor]
) -> tuple[None, None]:
    """Tap under ``vmap``: the values of the whole batch at once, batch dimension first."""
    del info
    whole = [v if dim is None else v.movedim(dim, 0) for v, dim in zip(values, in_dims[3], strict=True)]
    torch.ops.fcg.tap(name, rows, keep, whole)
    return None, None


_library.impl("tap", _record, "CompositeExplicitAutograd")
torch.library.register_vmap("fcg::tap", _batched, lib=_library)
TAP = torch.ops.fcg.tap.default


@entry()
def tap(name: str, x: Tensor, *, keep: int = 1) -> None:
    """Record a value inside a step, to be read as ``step.taps[name]`` after any call.

    The computation does not change; the value leaves the step as a metric does, without a host sync. With ``keep``, the
    last values stay on the device, so a loss can be recorded at each call and read every hundred calls. If a name is
    tapped several times in a call, as in a loop, each value is recorded, in order. A value with another shape, dtype or
    ``keep`` discards the earlier ones, so give it another name. Under ``vmap``, the batch is the first dimension of a
    value. Outside a step nothing is recorded.

    Args:
      name: Name under which to read it.
      x: Tensor of any shape and dtype.
      keep: Number of values to keep; they take device memory.
    Raises:
      TypeError: If ``name`` is not a string, or ``x`` not a tensor.
      ValueError: If ``keep`` is below 1.

    Example:
      >>> import torch, functional_cg as fcg
      >>> @fcg.graph_step
      ... def step(state, x):
      ...     hidden = torch.relu(x @ state["w"])
      ...     fcg.tap("hidden", hidden)
      ...     fcg.tap("sum", hidden.sum(), keep=3)
      ...     return state, {}
      >>> state = {"w": torch.ones(2, 1)}
      >>> for i in range(5):
      ...     state, _ = step(state, torch.full((1, 2), float(i)))
      >>> step.taps["hidden"], step.taps["sum"]
      (tensor([[8.]]), tensor([4., 6., 8.]))
    """
    if not isinstance(name, str):
        raise TypeError(f"tap: `name` has to be a text, got {name!r}")
    if not isinstance(x, Tensor):
        raise TypeError(
            f"tap: {name!r} has to be a tensor, got {type(x).__name__}; a Python value needs no tap"
        )
    if type(keep) is not int or keep < 1:
        raise ValueError(f"tap: `keep` has to be an integer of 1 or more, got {keep!r}")
    with ordinary():  # a copy, since the step may write to it later
        without_gradients()
        value = owned(x).detach().clone()
    TAP(name, None, keep, [value])


def _layout(tapped: Any) -> tuple[Any, ...]:
    rows, _, value = tapped if isinstance(tapped, tuple) else (None, None, tapped)
    return rows, value.shape, value.dtype


class Taps(Mapping[str, Tensor]):
    """The tapped values of a step by name: the last one, or with ``keep`` the last ones as [n, ...], oldest first.

    Reading returns a copy; it waits for the device only when the numbers are used on the host.
    """

    def __init__(self) -> None:
        self._rings: dict[str, deque[Tensor]] = {}
        self._tables: dict[str, deque[tuple[str, int, Tensor]]] = {}  # rows, number of the call, value
        self.calls = -1  # the number of the last call of the step
        self.alarms: dict[str, Alarm] = {}

    def record(self, name: str, rows: str | None, keep: int, values: Sequence[Tensor]) -> None:
        """Record a value; earlier values with other rows, another shape, dtype or ``keep`` are dropped."""
        (value,) = values
        rings: dict[str, deque[Any]] = self._rings if rows is None else self._tables
        one = value if rows is None else (rows, self.calls, value)
        ring = rings.get(name)
        if ring is None or ring.maxlen != keep or _layout(ring[-1]) != _layout(one):
            ring = rings[name] = deque(maxlen=keep)
        ring.append(one)

    def tables(self) -> dict[str, tuple[list[str], list[int], Tensor]]:
        """Return the values with rows by name: the rows' names, for the last values the numbers of their calls, and the
        values as [n, ..., rows, columns].
        """
        with ordinary():
            without_gradients()
            found = {}
            for name, ring in list(self._tables.items()):
                rows, calls, values = zip(*ring, strict=True)
                found[name] = rows[-1].split("\n"), [*calls], torch.stack(values).cpu()
            return found

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._rings)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._rings:
            known = f"; tapped are {', '.join(self._rings)}" if self._rings else "; nothing was tapped yet"
            raise KeyError(f"{name!r} was not tapped{known}")
        ring = self._rings[name]
        with ordinary():
            without_gradients()
            return ring[-1].clone() if ring.maxlen == 1 else torch.stack(list(ring))

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._rings))

    def __len__(self) -> int:
        return len(self._rings)

    def __repr__(self) -> str:
        lines = [
            f"{name}  {BufferSpec.of(ring[-1])}" + (f"  last {len(ring)}" if ring.maxlen != 1 else "")
            for name, ring in list(self._rings.items())
        ]
        return "\n".join(lines) or "nothing was tapped yet"

    def alarm(self, step: str, text: str) -> Alarm:
        """Return the alarm of a text: all of that text are one."""
        return self.alarms.setdefault(text, Alarm(step, text))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record taps of this thread here immediately, as an eager run does, while the context is open."""
        self.calls += 1
        token = _listener.set(self)
        try:
            yield
        finally:
            _listener.reset(token)
