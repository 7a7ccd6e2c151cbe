"""The calls of a profiled step, and what they add up to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .phases import Phase

__all__ = ["KernelRow", "ProfileRow", "ProfiledCall", "ProfiledKernel"]


@dataclass(frozen=True, slots=True)
class ProfiledCall:
    """A call of a step, or its copies of inputs, metrics or new state.

    Attributes:
      op: Name of the ATen op, or of what is copied.
      module: Path of its module, from the name of the model on: ``GPT.h.0.attn``. Outside of modules the function that
        makes it, ``loss_fn()``, or a kind in parentheses: ``(optimizer)``, ``(copies)``, ``(unknown)``.
      line: The user's line, ``model.py:33``; for a call of the backward, that of the call that it differentiates.
      source: What stands on that line; empty if its file is gone.
      phase: ``"forward"``, ``"backward"`` or ``"update"``. What the backward recomputes is backward; what is computed
        from gradients, such as a clip, is update.
      seconds: Time of the call by itself: the median of several runs; on a GPU, the mean time of its kernels. Of a
        kernel that computes several calls, the call's share.
      nbytes: Bytes of its results that are in memory at the step's peak.
    """

    op: str
    module: str
    line: str
    source: str
    phase: Phase
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class ProfiledKernel:
    """A kernel of a compiled step, or what else a line of the compiled function launches.

    Attributes:
      name: Name that inductor gives it: ``triton_poi_fused_gelu_3``, ``extern_kernels.mm``.
      seconds: Mean time that it takes on the device.
      calls: The calls that it computes.
    """

    name: str
    seconds: float
    calls: tuple[ProfiledCall, ...]


@dataclass(frozen=True, slots=True)
class KernelRow:
    """All kernels of one name that are parts of the same modules and phases.

    Attributes:
      name: Their name.
      kernels: How many there are.
      seconds: Their seconds.
      modules: What they are parts of.
      lines: The user's lines that they compute.
      phases: ``"forward"``, ``"backward"``, ``"update"``, or several.
    """

    name: str
    kernels: int
    seconds: float
    modules: tuple[str, ...]
    lines: tuple[str, ...]
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """All calls of one module or line.

    Attributes:
      name: The module or the line.
      source: For a line, what stands on it.
      calls: Number of calls.
      forward_s: Seconds of its calls in the forward.
      backward_s: Seconds of its calls in the backward.
      update_s: Seconds of its calls in the update.
      nbytes: Bytes of their results that are in memory at the step's peak.
    """

    name: str
    source: str
    calls: int
    forward_s: float
    backward_s: float
    update_s: float
    nbytes: int

    @property
    def seconds(self) -> float:
        """Seconds of all its calls."""
        return math.fsum((self.forward_s, self.backward_s, self.update_s))

    @classmethod
    def of(cls, name: str, calls: Iterable[ProfiledCall], source: str = "") -> ProfileRow:
        """Sum up calls."""
        found = list(calls)

        def seconds(phase: Phase) -> float:
            return math.fsum(one.seconds for one in found if one.phase == phase)

        nbytes = sum(one.nbytes for one in found)
        return cls(
            name, source, len(found), seconds("forward"), seconds("backward"), seconds("update"), nbytes
        )
