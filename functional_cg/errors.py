"""The errors of functional_cg: one class per mistake, one message template.

Every class also inherits the builtin that a caller would expect. A message says what happened, shows the key
paths with *expected* and *got*, says why replay would make it wrong, and gives one fix::

    LayoutError: `train_step`: called with another layout than it was captured for; `state` is unchanged.
      batch['x']  expected i64[8,1024]@cuda:0   got i64[8,960]@cuda:0
    A captured graph has fixed shapes.
    To fix: pad the last batch or drop it; to pay for a second graph, use `graph_step(max_captures=2)`.
    Docs: errors#LayoutError

Errors are raised before anything is launched: the state that was passed in stays valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

__all__ = [
    "AliasError",
    "BakedValueError",
    "CaptureError",
    "ClosedError",
    "DonatedStateError",
    "ForeignTensorError",
    "FunctionalCGError",
    "HostSyncError",
    "ImplicitRandomnessError",
    "LayoutError",
    "ReadOnlyError",
    "SideEffectError",
    "StreamError",
]

_ROWS_SHOWN = 5


class FunctionalCGError(Exception):
    """Base class of every error that functional_cg raises about a broken guarantee."""

    @classmethod
    def of(
        cls,
        function: str,
        what: str,
        *,
        rows: Sequence[str] = (),
        why: str = "",
        fix: str = "",
    ) -> Self:
        """Compose the message from the template.

        Args:
          function: Name of the user's function; empty for errors outside of a step.
          what: What happened, one sentence, present tense.
          rows: One line per difference; 5 are shown, the rest is counted.
          why: Why replay makes it wrong, one sentence.
          fix: One imperative, with the user's names.
        """
        lines = [f"`{function}`: {what}" if function else what]
        lines += [f"  {row}" for row in rows[:_ROWS_SHOWN]]
        if len(rows) > _ROWS_SHOWN:
            lines.append(f"  … and {len(rows) - _ROWS_SHOWN} more")
        if why:
            lines.append(why)
        if fix:
            lines.append(f"To fix: {fix}")
        lines.append(f"Docs: errors#{cls.__name__}")
        return cls("\n".join(lines))


class LayoutError(FunctionalCGError, ValueError):
    """Structure, shape, dtype or device is not what the step was lowered for.

    Raised when the inputs have another layout than the capture, and when a step returns a new state that is
    unlike the old one. Shapes are strict: nothing is broadcast, nothing is cast. Pad the last batch, or allow a
    second capture with ``max_captures``.
    """


class DonatedStateError(FunctionalCGError, RuntimeError):
    """A state was used after it was donated.

    The call ``state, metrics = step(state, batch)`` takes over the buffers of the state passed in. Use the
    returned one; ``state.latest()`` gives the living handle; ``fcg.snapshot(state)`` beforehand keeps the old values.
    """


class AliasError(FunctionalCGError, ValueError):
    """Two leaves of a state share memory.

    Each leaf owns one slot. Keep one name and read it twice (tied weights), or copy it (targets, EMA copies).
    """


class ReadOnlyError(FunctionalCGError, RuntimeError):
    """A leaf of a state was written to, or an input was written to inside the step.

    State changes only by what the step returns, or by ``state.replace(...)`` and ``fcg.tree.at(...)``. This is a
    RuntimeError, never a TypeError: ``leaf += 1`` would otherwise rebind the name in silence.
    """


class ForeignTensorError(FunctionalCGError, RuntimeError):
    """The step reads a tensor that is neither state, nor input, nor declared constant.

    A graph would keep reading that address after the tensor is freed or replaced. Pass it in, or declare it with
    ``graph_step(constants=(tensor,))``.
    """


class HostSyncError(FunctionalCGError, RuntimeError):
    """The step asks for the value of a tensor on the host, or for a shape that depends on one.

    Replay repeats kernels, not Python: the branch taken at trace time would be taken for ever.
    """


class BakedValueError(FunctionalCGError, RuntimeError):
    """A Python value that the graph has baked in differs now, or differed between two traces."""


class ImplicitRandomnessError(FunctionalCGError, RuntimeError):
    """A random op draws from a generator that is not in the state. Draw from a key with ``fcg.random``."""


class SideEffectError(FunctionalCGError, RuntimeError):
    """The step does something that replay will not repeat: it keeps a tensor, or changes host state."""


class StreamError(FunctionalCGError, RuntimeError):
    """Work crosses the border of the capture: an event or a stream that was not joined back."""


class CaptureError(FunctionalCGError, RuntimeError):
    """Tracing, lowering or capturing failed; the first cause is chained, the state is unchanged."""


class ClosedError(FunctionalCGError, RuntimeError):
    """A step was used after ``close()``, which frees its captures. States stay valid; make a new step."""
