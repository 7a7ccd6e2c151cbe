"""A comparison recorded as graphs: it takes at most three launches, however many calls the program has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from torch import Tensor

from ..plan import Before, Replay, Run
from .distances import Distances, between
from .reference import Reference
from .space import Space
from .ulps import Shaker

__all__ = ["Recorded"]


class Recorded:
    """Three graphs on static buffers: the program, how far a replay's outputs are from its own, a perturbed run.

    Args:
      reference: The program.
      space: The buffers, and copies of their values.
      outputs: The outputs of the replay, which each call writes again.
      record: Records a run.
    """

    def __init__(
        self, reference: Reference, space: Space, outputs: Sequence[Tensor], record: Callable[[Run], Replay]
    ) -> None:
        self.space, self._count = space, len(outputs)
        # The recorded runs refer to what they measure, and not to the comparison.
        self._measured = measured = {"apart": Distances(), "moved": Distances()}

        def program(before: Before) -> Sequence[Tensor]:
            space.keep()
            return reference.values(space.buffers)

        def measure(before: Before) -> Sequence[Tensor]:
            measured["apart"] = between(outputs, expected)
            return ()

        def shake(before: Before) -> Sequence[Tensor]:
            measured["moved"] = reference.moved(space.buffers, expected, Shaker(leans=True))
            return ()

        with ExitStack() as graphs:  # if one cannot be recorded, those before it are freed

            def recorded(run: Run) -> Replay:
                return graphs.enter_context(closing(record(run)))

            self._program = recorded(program)
            expected = self.expect()
            self._measure, self._shake = recorded(measure), recorded(shake)
            self._graphs = graphs.pop_all()

    def expect(self) -> Sequence[Tensor]:
        """Keep the values of the buffers, run the program, and return its outputs, which its next run overwrites."""
        return self._program(())

    def apart(self) -> tuple[Tensor, Tensor]:
        """Return how far the outputs of the replay are from those of the program, and the size of the latter."""
        self._measure(())
        return self._measured["apart"].known(self._count)

    def moved(self) -> Tensor:
        """Return how far the program's outputs move if the results of each call lean by an ulp."""
        self._shake(())
        return self._measured["moved"].known(self._count)[0]

    def close(self) -> None:
        """Free the graphs and their memory."""
        self._graphs.close()
        self._measured.clear()
