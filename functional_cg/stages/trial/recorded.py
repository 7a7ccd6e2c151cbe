"""A comparison recorded as graphs: it takes at most three launches, however many calls the program has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ...errors import CaptureError
from ..evaluate import quiet
from ..plan import Before, Replay, Run
from .distances import Distances, between
from .reference import Reference
from .space import Space
from .ulps import Shaker

__all__ = ["Recorded"]


class Recorded:
    """Three graphs on static buffers: a program, the distances of a replay's outputs from its own, a perturbed run.

    Args:
      reference: The program.
      space: The buffers, and copies of their values.
      metrics: The metrics of the replay, if each call writes the same tensors.
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
        self._values = values = _Values()
        self._replays: list[Replay] = []

        def program(before: Before) -> Sequence[Tensor]:
            space.keep()
            with quiet():
                return run(before)

        def measure(before: Before) -> Sequence[Tensor]:
            values.apart = between(values.outputs, values.expected, finite=True)
            values.apart.measure()
            return ()

        def shake(before: Before) -> Sequence[Tensor]:
            values.moved = moved = Distances()
            expected = values.expected
            reference.run(space.buffers, lambda n, one: moved.add(n, one, expected[n]), Shaker(leans=True))
            moved.measure()
            return ()

        try:
            self._replays.append(record(program))
            if self._replays[0].fresh is not (metrics is None):
                raise CaptureError.of(
                    "", "what is recorded is not what is replayed.", fix="use one backend for both."
                )
            expected = self.expect()
            values.outputs = expected if metrics is None else reference.made(metrics, space.buffers.slots)
            self._replays += [record(measure), record(shake)]
        except BaseException:
            self.close()
            raise

    def expect(self) -> Sequence[Tensor]:
        """Keep the values of the buffers, run the program, and return its outputs, which its next run may overwrite."""
        self._values.expected = self._replays[0](())
        return self._values.expected

    def apart(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return how far the outputs of the replay are from those of the program, and the size of the latter."""
        self._values.outputs = outputs
        self._replays[1](())
        apart, sizes = self._values.apart.known(len(outputs))
        if apart.isfinite().all():
            return apart, sizes
        return between(outputs, self._values.expected).known(len(outputs))

    def moved(self) -> Tensor:
        """Return how far the program's outputs move if the results of each call lean by an ulp."""
        self._replays[2](())
        return self._values.moved.known(len(self._values.expected))[0]

    def forget(self) -> None:
        """Drop the outputs: until the next comparison, the user may own them."""
        self._values.outputs, self._values.expected = (), ()

    def close(self) -> None:
        """Free the graphs and their memory."""
        for replay in self._replays:
            replay.close()
        self._values = _Values()


@dataclass
class _Values:
    """Outputs, those of the program, and their distances. The recorded runs refer to it, and not to the comparison."""

    outputs: Sequence[Tensor] = ()
    expected: Sequence[Tensor] = ()
    apart: Distances = field(default_factory=Distances)
    moved: Distances = field(default_factory=Distances)
