"""The reference: runs the traced calls one by one on given buffers, without writing any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from ...messages.source import Location
from ...tensors.aten import copies
from ..evaluate import assigned, evaluate, quiet
from ..layouts import laid_out, unsure
from ..lifetimes import last_uses, peak_bytes, storage_bytes
from ..passes.fused import at_places, group_size
from ..plan import Buffers
from ..program import Instr, Program, Var, live
from ..sub_programs import calls_of
from .distances import Distances
from .offload import offloads, transferred
from .ulps import Bounds, Shaker, bounds_of, copies_arguments
from .unchecked import Unchecked, moved_checks

__all__ = ["After", "Before", "Output", "Reference", "ignore"]

_Values = dict[Var, Tensor]
# Hooks of a run: one returns the call to run, and its arguments; the other gets the call, with what it makes.
Before = Callable[[Instr, _Values], tuple[Instr, _Values]]
After = Callable[[Instr, Sequence[tuple[Var, Tensor]]], None]

_library = torch.library.Library("fcg", "FRAGMENT")
_library.define("shown(Tensor value, int number) -> ()")
_SHOWN = torch.ops.fcg.shown.default  # marks where a run hands an output to its observer


@dataclass(frozen=True, slots=True)
class Output:
    """An observable result of a step: a metric, a printed or tapped value, or a new leaf.

    Attributes:
      name: Its key path.
      var: The variable.
      slot: Number of the slot whose new value it is; None for a metric or a printed or tapped value.
    """

    name: str
    var: Var
    slot: int | None = None


def _as_it_is(instr: Instr, values: _Values) -> tuple[Instr, _Values]:
    return instr, values


def ignore(*given: object) -> None:
    """Do nothing: a run without a hook."""


class Reference:
    """Runs a traced program call by call.

    Args:
      program: The program as traced, before any lowering.
      outputs: Its outputs, if they are not its metrics and new leaves.

    Attributes:
      program: The program.
      outputs: Its outputs, metrics first.
    """

    def __init__(self, program: Program, outputs: Sequence[Output] = ()) -> None:
        self.program = program
        leaves = zip(program.slot_names, program.slots, program.new_state, strict=False)
        self.outputs = [*outputs] or [Output(name, var) for name, var in program.named_results()]
        self.outputs += [Output(name, new, i) for i, (name, old, new) in enumerate(leaves) if old is not new]
        # The storages that leave for the host before a call, by its place.
        self._leaving: Mapping[int, Sequence[int]] = {}

    @cached_property  # like those below: a step that is not compiled needs few of them
    def unchecked(self) -> Unchecked:
        """Which slots and inputs of the program may hold any value."""
        return Unchecked.of(self.program)

    @cached_property
    def _instrs(self) -> list[Instr]:
        """The calls that outputs need, with a call that shows each output after the last write to it."""
        instrs, _ = live(calls_of(self.program.instrs), [out.var for out in self.outputs])
        instrs = [one for instr in instrs for one in _leaf_by_leaf(instr)]
        writes = enumerate((*instr.outputs(), *instr.writes) for instr in instrs)
        last = {var.storage: number for number, written in writes for var in written}
        shown: dict[int, list[Instr]] = {}
        for number, out in enumerate(self.outputs):
            call = Instr(_SHOWN, (out.var, number), {}, None, (), None)
            shown.setdefault(last.get(out.var.storage, -1), []).append(call)
        calls = [call for number, instr in enumerate(instrs) for call in (instr, *shown.get(number, ()))]
        return [*shown.get(-1, ()), *calls]

    @cached_property
    def _unsure(self) -> dict[Instr, Sequence[Var]]:
        """The results whose strides a kernel may choose, by call."""
        return {instr: unsure(instr) for instr in self._instrs}

    @cached_property
    def _checks(self) -> dict[Instr, list[Var]]:
        """The arguments that calls check and that rounding moves, by call."""
        return moved_checks(instr for instr in self._instrs if instr.op is not _SHOWN)

    @cached_property
    def _dead(self) -> dict[int, list[Var]]:
        return last_uses(self._instrs)

    @cached_property
    def _sizes(self) -> dict[int, int]:
        """Bytes of each storage that a run makes."""
        static = {var.storage for var in self._static()}
        return {one: size for one, size in storage_bytes(self._instrs).items() if one not in static}

    @cached_property
    def _memory(self) -> tuple[int, int]:
        """Bytes that a run holds at most, and those of the copies that it makes beside them."""
        beside = max(map(_copied, self._instrs), default=0)
        return peak_bytes(self._instrs, (), self._sizes), beside

    @property
    def kept(self) -> int:
        """Bytes of the outputs."""
        return sum(out.var.spec.nbytes for out in self.outputs)

    @property
    def at_once(self) -> int:
        """Bytes that a run takes at most whose outputs stay on the device."""
        return self.kept + sum(self._memory)

    def values(self, buffers: Buffers, *, on_host: bool = False, after: After = ignore) -> list[Tensor]:
        """Run the program, and return its outputs, each in memory of its own.

        Args:
          buffers: Slots, inputs and constants from before the call.
          on_host: Whether to keep the outputs on the host, where they leave the device's memory to other runs.
          after: As for :meth:`run`.
        """
        values: dict[int, Tensor] = {}
        in_buffers: dict[int, Tensor] = {}  # they stay there until the end, and are copied together

        def keep(number: int, value: Tensor) -> None:
            if on_host:
                values[number] = value.to("cpu", copy=True)
            elif self.outputs[number].var.storage not in self._sizes:
                in_buffers[number] = value
            else:
                values[number] = value if value.untyped_storage().nbytes() == value.nbytes else value.clone()

        self.run(buffers, keep, after=after)
        own = {number: torch.empty_like(value) for number, value in in_buffers.items()}
        for copy in copies([*own.values()], [*in_buffers.values()]):
            copy()
        values |= own
        return [values[number] for number in range(len(self.outputs))]

    def moved(self, buffers: Buffers, expected: Sequence[Tensor], shaker: Shaker) -> Distances:
        """Return how far the outputs move if the results of calls are perturbed.

        Args:
          buffers: Slots, inputs and constants.
          expected: The outputs.
          shaker: Perturbs the results; arguments that calls check stay within the bounds that they have without it.
        """
        bounds: dict[Instr, dict[Var, Bounds]] = {}
        if self._checks:

            def note(instr: Instr, values: _Values) -> tuple[Instr, _Values]:
                bounds[instr] = {var: bounds_of(values[var]) for var in self._checks.get(instr, ())}
                return instr, values

            self.run(buffers, ignore, before=note)
        found = Distances()
        self.run(
            buffers,
            lambda number, value: found.add(number, value, expected[number]),
            before=partial(shaker.before, bounds),
            after=shaker.after,
        )
        found.measure()
        return found

    def run(
        self,
        buffers: Buffers,
        see: Callable[[int, Tensor], None],
        *,
        before: Before = _as_it_is,
        after: After = ignore,
    ) -> None:
        """Run the program once.

        Args:
          buffers: Slots, inputs and constants.
          see: Called as ``see(number, value)`` once per output, in any order; it may keep small values for a while.
          before: Called for each call, with the values of all variables.
          after: Called for each call, with what it makes; it may overwrite that.
        """
        given = [*buffers.slots, *buffers.inputs, *buffers.constants]
        values, away = dict(zip(self._static(), given, strict=True)), dict[int, dict[Var, Tensor]]()
        static = frozenset(values)
        with quiet():
            for place, instr in enumerate(self._instrs):
                for storage in self._leaving.get(place, ()):
                    leaving = [var for var in values if var.storage == storage]
                    away[storage] = transferred({var: values.pop(var) for var in leaving}, to_host=True)
                for storage in away.keys() & _touched(instr):
                    values |= transferred(away.pop(storage), to_host=False)
                if instr.op is _SHOWN:
                    var, number = instr.args
                    see(number, values[var])
                else:
                    self._call(instr, values, static, before, after)
                for var in self._dead.get(place, ()):
                    values.pop(var, None)

    def made(self, metrics: Iterable[Tensor], slots: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of a plan that has run, in the order of :attr:`outputs`.

        Args:
          metrics: What the plan returned.
          slots: The slots that it wrote.
        """
        rest = iter(metrics)
        return [next(rest) if out.slot is None else slots[out.slot] for out in self.outputs]

    def fit(self, room: int, *, host: int = 0) -> int:
        """Make runs fit into the given memory, buffers not counted: what is needed last waits on the host.

        Args:
          room: Bytes.
          host: Bytes of host memory in which values may wait.
        Returns:
          Bytes that are lacking: those of the call that takes most, or of what would have to wait.
        """
        _, beside = self._memory
        needed = [_touched(instr) & self._sizes.keys() for instr in self._instrs]
        takes = (sum(map(self._sizes.__getitem__, storages)) for storages in needed)
        lacking = max(takes, default=0) + beside - room
        if lacking > 0:
            return lacking
        self._leaving, waiting = offloads(needed, self._sizes, room - beside)
        return max(waiting - host, 0)

    def raises_at(self, buffers: Buffers) -> Location | None:
        """Return the user's line whose call raises on these buffers; None if no call raises."""
        done: list[Instr] = []
        try:
            self.run(buffers, ignore, after=lambda instr, made: done.append(instr))
        except Exception:  # whatever a kernel raises
            return [instr for instr in self._instrs if instr.op is not _SHOWN][len(done)].site
        return None

    def site_of(self, var: Var) -> Location | None:
        """Return the user's line that computes a variable."""
        return next((instr.site for instr in self._instrs if var in set(instr.outputs())), None)

    def _static(self) -> list[Var]:
        program = self.program
        return [*program.slots, *program.inputs, *(constant.var for constant in program.constants)]

    def _call(
        self, instr: Instr, values: dict[Var, Tensor], static: Set[Var], before: Before, after: After
    ) -> None:
        """Run a call. No name is bound to what it makes any longer: that would stay for another call."""
        called, given = before(instr, values)
        turned = self._unsure[instr]
        made = [
            (var, laid_out(one, var.spec.stride) if var in turned else one)
            for var, one in assigned(instr.out, evaluate(called, given.__getitem__))
            if var not in static and one is not None
        ]
        values.update(made)
        after(instr, made)


def _touched(instr: Instr) -> set[int]:
    return {var.storage for var in (*instr.inputs(), *instr.outputs())}


def _leaf_by_leaf(instr: Instr) -> list[Instr]:
    """Split a call on lists of tensors into one call per list position, so that results need not coexist in memory."""
    return [at_places(instr, [place]) for place in range(group_size(instr))] or [instr]


def _copied(instr: Instr) -> int:
    """Return the extra bytes that a shaker takes for a call: it perturbs copies of some arguments."""
    return sum(var.spec.nbytes for var in set(instr.inputs())) if copies_arguments(instr) else 0
