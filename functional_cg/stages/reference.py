"""The reference: the calls that were traced, run one by one on given buffers, of which none is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..source import Location
from .lower import Buffers, evaluate, quiet
from .program import Instr, Program, Var, live, peak_bytes, written_storages
from .ulps import Shaker

__all__ = ["Output", "Reference"]


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
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        leaves = zip(program.slot_names, program.slots, program.new_state, strict=False)
        self.outputs = [Output(name, var) for name, var in program.named_results()]
        self.outputs += [Output(name, new, i) for i, (name, old, new) in enumerate(leaves) if old is not new]
        kept = [out.var for out in self.outputs]
        self._instrs, _ = live(program.instrs, kept)
        self._last = _last_reads(self._instrs, kept)
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
            for number, instr in enumerate(self._instrs):
                self._call(instr, values, static, shaker)
                for var in self._last.get(number, ()):
                    del values[var]
        return [values[out.var] for out in self.outputs]

    def peak(self) -> int:
        """The most bytes that a run takes at a time beside its buffers."""
        static = {var.storage for var in self._bound_vars()}
        sizes: dict[int, int] = {}
        for var in (var for instr in self._instrs for var in instr.outputs()):
            if var.storage not in static:
                sizes[var.storage] = max(sizes.get(var.storage, 0), var.spec.nbytes)
        return peak_bytes(self._instrs, {out.var.storage for out in self.outputs}, sizes)[0]

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
        moved = {} if shaker is None else shaker.arguments(instr, values)
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


def _last_reads(instrs: Sequence[Instr], kept: Iterable[Var]) -> dict[int, list[Var]]:
    """Variables to forget after each call: made by a call, and read by no later one."""
    born = {var for instr in instrs for var in instr.outputs()}
    last: dict[Var, int] = {}
    for number, instr in enumerate(instrs):
        for var in (*instr.inputs(), *instr.outputs()):
            last[var] = number
    keep = set(kept)
    forget: dict[int, list[Var]] = {}
    for var, number in last.items():
        if var in born and var not in keep:
            forget.setdefault(number, []).append(var)
    return forget
