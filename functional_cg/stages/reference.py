"""The reference: the calls that were traced, run one by one on given buffers, of which none is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..source import Location
from .lower import Buffers, evaluate, quiet
from .program import Instr, Program, Var, live, peak_bytes, written_storages
from .remat_plan import in_order, within
from .row_blocks import in_blocks
from .ulps import BESIDE, Shaker
from .unchecked import Unchecked

__all__ = ["Output", "Reference"]

_LEAST, _MOST = 2**16, 2**24  # elements that are moved at a time
# What is divided: from which part of the room on a value is large, and into how many blocks.
_DIVISIONS = ((8, 8), (16, 16), (64, 16), (64, 64))


@dataclass(frozen=True, slots=True)
class Output:
    """What a step computes that is seen from outside.

    Attributes:
      name: Its key path.
      var: The variable.
      slot: The number of the slot whose new value it is; None for a metric, and for what is printed or tapped.
    """

    name: str
    var: Var
    slot: int | None = None


class Reference:
    """Runs a traced program call by call.

    Args:
      program: As it was traced: nothing that the lowering does is in it.

    Attributes:
      outputs: What it computes: metrics first.
      unchecked: Which of its slots and inputs may hold any value.
      chunk: How many elements a shaker should move at a time.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.unchecked = Unchecked.of(program)
        leaves = zip(program.slot_names, program.slots, program.new_state, strict=False)
        self.outputs = [Output(name, var) for name, var in program.named_results()]
        self.outputs += [Output(name, new, i) for i, (name, old, new) in enumerate(leaves) if old is not new]
        kept = [out.var for out in self.outputs]
        self._instrs, _ = live(program.instrs, kept)
        self._actions = in_order(self._instrs, kept)
        self.chunk = _MOST
        written = written_storages(self._instrs)
        self._written = {i for i, c in enumerate(program.constants) if c.var.storage in written}

    def run(self, buffers: Buffers, shaker: Shaker | None = None) -> list[Tensor]:
        """Run the program once, and return its outputs.

        Args:
          buffers: Slots, inputs and constants.
          shaker: Moves what the calls return by ulps.
        """
        values = self._bound(buffers)
        static = frozenset(values)
        with quiet():
            for action in self._actions:
                for var in action.forget:
                    del values[var]
                if action.instr is not None:
                    self._call(action.instr, values, static, shaker)
        return [values[out.var] for out in self.outputs]

    def made(self, metrics: Iterable[Tensor], slots: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of a plan that has run, in the order of :attr:`outputs`.

        Args:
          metrics: What it has returned.
          slots: The slots that it has written.
        """
        rest = iter(metrics)
        return [next(rest) if out.slot is None else slots[out.slot] for out in self.outputs]

    def fit(self, room: int) -> int:
        """Let runs take no more memory than there is room for beside the buffers, if that can be had.

        What does not fit is dropped and computed again.

        Args:
          room: Bytes.
        Returns:
          Bytes that a run takes at a time: more than there is room for, where no such order is found.
        """
        static = {var.storage for var in self._bound_vars()}
        sizes: dict[int, int] = {}
        for var in (var for instr in self._instrs for var in instr.outputs()):
            if var.storage not in static:
                sizes[var.storage] = max(sizes.get(var.storage, 0), var.spec.nbytes)
        kept = [out.var for out in self.outputs]
        self.chunk = min(max(room // (8 * BESIDE * torch.float64.itemsize), _LEAST), _MOST)
        beside = BESIDE * min(max(sizes.values(), default=0), self.chunk * torch.float64.itemsize)
        peak, _ = peak_bytes(self._instrs, {var.storage for var in kept}, sizes)
        if peak + beside <= room:
            return peak + beside
        for instrs in self._divided(room):
            actions = within(instrs, kept, static, room - beside)
            if actions is not None:
                self._actions = actions
                return room
        return peak + beside

    def _divided(self, room: int) -> Iterator[Sequence[Instr]]:
        """The calls as they are, then with large values in blocks of rows."""
        yield self._instrs
        for part, blocks in _DIVISIONS:
            yield in_blocks(self._instrs, [out.var for out in self.outputs], room // part, blocks)

    def raises_at(self, buffers: Buffers) -> Location | None:
        """The user's line whose call raises on these buffers; None if none does."""
        values = self._bound(buffers)
        static = frozenset(values)
        with quiet():
            for instr in self._instrs:
                try:
                    self._call(instr, values, static, None)
                except Exception:  # whatever a kernel raises
                    return instr.site
        return None

    def site_of(self, var: Var) -> Location | None:
        """The user's line that computes a variable."""
        return next((instr.site for instr in self._instrs if var in set(instr.outputs())), None)

    def _bound_vars(self) -> list[Var]:
        program = self._program
        return [*program.slots, *program.inputs, *(constant.var for constant in program.constants)]

    def _bound(self, buffers: Buffers) -> dict[Var, Tensor]:
        own = [one.clone() if i in self._written else one for i, one in enumerate(buffers.constants)]
        return dict(zip(self._bound_vars(), [*buffers.slots, *buffers.inputs, *own], strict=True))

    def _call(
        self, instr: Instr, values: dict[Var, Tensor], static: Iterable[Var], shaker: Shaker | None
    ) -> None:
        moved: dict[Var, Tensor] = {}
        if shaker is not None:
            instr, moved = shaker.scalars(instr), shaker.arguments(instr, values)
        result = evaluate(instr, lambda var: moved[var] if var in moved else values[var])
        made = list(_assigned(instr.out, result))
        values.update((var, tensor) for var, tensor in made if var not in static)
        if shaker is not None:
            shaker.results(instr, [(var, tensor) for var, tensor in made if var not in static])


def _assigned(out: object, value: object) -> Iterable[tuple[Var, Tensor]]:
    """Variables of a result with their tensors."""
    if isinstance(out, Var):
        assert isinstance(value, Tensor)
        yield out, value
    elif isinstance(out, (list, tuple)):
        assert isinstance(value, (list, tuple))
        for item, part in zip(out, value, strict=False):
            yield from _assigned(item, part)
