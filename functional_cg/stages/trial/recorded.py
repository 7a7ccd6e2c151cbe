"""A comparison recorded as two graphs, so that it takes as many launches, however many calls the program has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ...errors import CaptureError
from ..evaluate import quiet
from ..plan import Before, Replay, Run
from .distances import Distances, between
from .reference import Reference
from .space import Space

__all__ = ["Recorded"]


class Recorded:
    """A program on static buffers, and the distances of a replay's outputs from its own.

    Args:
      reference: The program.
      space: The buffers, and what keeps their values aside.
      metrics: Metrics of the replay, if each call of it writes the same ones.
      record: Records a run.
    Raises:
      CaptureError: If the program cannot be recorded.
    """

    def __init__(
        self,
        reference: Reference,
        space: Space,
        metrics: Sequence[Tensor] | None,
        record: Callable[[Run], Replay],
    ) -> None:
        self.space = space
        run = reference.all_at_once(space.buffers)
        self._pair = pair = _Pair()

        def program(before: Before) -> Sequence[Tensor]:
            with quiet():
                return run(before)

        def measure(before: Before) -> Sequence[Tensor]:
            pair.distances = between(pair.outputs, pair.expected)
            pair.distances.measure()
            return ()

        self._program = record(program)
        try:
            if self._program.fresh is not (metrics is None):
                raise CaptureError.of(
                    "", "what is recorded is not what is replayed.", fix="use one backend for both."
                )
            pair.expected = self._program(())
            pair.outputs = pair.expected if metrics is None else reference.made(metrics, space.buffers.slots)
            self._measure = record(measure)
        except BaseException:
            self._program.close()
            raise

    def expect(self) -> Sequence[Tensor]:
        """Run the program, and return its outputs, which its next run may overwrite."""
        self._pair.expected = self._program(())
        return self._pair.expected

    def apart(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return how far outputs of the replay are from those of the program, and the size of these."""
        self._pair.outputs = outputs
        self._measure(())
        # Until the next comparison they are the user's, or nobody's.
        self._pair.outputs, self._pair.expected = (), ()
        return self._pair.distances.known(len(outputs))

    def close(self) -> None:
        """Free the graphs and their memory."""
        self._program.close()
        self._measure.close()
        self._pair.clear()


class _Pair:
    """Outputs, those of the program, and how far they are apart."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.outputs: Sequence[Tensor] = ()
        self.expected: Sequence[Tensor] = ()
        self.distances = Distances()
