"""What a warm-up runs: each call at least once, and what is made again for each micro-batch not as often as that.

A warm-up is there for what a first use makes: handles and kernels of libraries, what is tuned, links between ranks. So
the first call of a pipeline does not take longer by a whole step with more micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from ..plan import Run

__all__ = ["once"]

_Function = Callable[[list[Tensor]], Sequence[Tensor]]


def once(run: Run) -> Run:
    """Return a bound plan in which a template computes at its first call: what later ones return has its values, too.

    What stands between them, such as transfers to other ranks, is run each time. It must not be captured.

    Args:
      run: A bound plan.
    """
    functions: dict[str, _Function] = getattr(run, "__kwdefaults__", None) or {}
    return partial(run, **{name: _Once(function) for name, function in functions.items()})


class _Once:
    """A function whose later calls return what the first one has, unless that was written since."""

    def __init__(self, function: _Function) -> None:
        self._function = function
        self._made: list[tuple[Tensor, int]] | None = None  # with how often each was written

    def __call__(self, given: list[Tensor]) -> list[Tensor]:
        if self._made is None or any(one._version != version for one, version in self._made):
            self._made = [(one, one._version) for one in self._function(given)]
        given.clear()
        return [one for one, _ in self._made]
