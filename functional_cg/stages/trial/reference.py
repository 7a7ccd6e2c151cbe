"""The reference: runs the traced calls one by one on given buffers, without writing any of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...messages.source import Location
from ..layouts import laid_out, unsure
from ..lifetimes import peak_bytes, storage_bytes
from ..passes.fused import at_places, group_size
from ..passes.min_cut import Forward, recomputed
from ..plan import Buffers, evaluate, quiet
from ..program import Instr, Program, Var, live, written_storages
from ..template import calls_of
from .host_memory import HostMemory
from .remat_plan import Action, in_order, within
from .row_blocks import in_blocks
from .ulps import Shaker, decides
from .unchecked import Unchecked

__all__ = ["Output", "Reference"]

_library = torch.library.Library("fcg", "FRAGMENT")
_library.define("shown(Tensor value) -> ()")
_SHOWN = torch.ops.fcg.shown.default  # marks where a run hands an output to its observer

_FEW = 2**10  # smaller values than this part of the room are not worth recomputing
# Pairs (part, blocks) to try: values of at least room / part bytes are divided into so many blocks.
_DIVISIONS = ((8, 8), (16, 16), (64, 16), (64, 64))


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


class Reference:
    """Runs a traced program call by call.

    Args:
      program: The program as traced, before any lowering.
      outputs: Its outputs, if they are not its metrics and new leaves.

    Attributes:
      program: The program.
      outputs: Its outputs, metrics first.
      unchecked: Which of its slots and inputs may hold any value.
    """

    def __init__(self, program: Program, outputs: Sequence[Output] = ()) -> None:
        self.program = program
        self.unchecked = Unchecked.of(program)
        leaves = zip(program.slot_names, program.slots, program.new_state, strict=False)
        self.outputs = [*outputs] or [Output(name, var) for name, var in program.named_results()]
        self.outputs += [Output(name, new, i) for i, (name, old, new) in enumerate(leaves) if old is not new]
        self._turned: dict[Instr, Collection[Var]] = {}  # results that may lie in other strides, by call
        self._host = HostMemory()

    @cached_property  # like the other two: a step that is not compiled needs none of them
    def _actions(self) -> list[Action]:
        return in_order(self._instrs)

    @cached_property
    def _written(self) -> set[int]:
        written = written_storages(self._instrs)
        return {i for i, c in enumerate(self.program.constants) if c.var.storage in written}

    @cached_property
    def _instrs(self) -> list[Instr]:
        """The calls that outputs need, with a call that shows each output after the last write to it."""
        instrs, _ = live(calls_of(self.program.instrs), [out.var for out in self.outputs])
        instrs = [one for instr in instrs for one in _leaf_by_leaf(instr)]
        last: dict[int, int] = {}
        for number, instr in enumerate(instrs):
            last |= dict.fromkeys((var.storage for var in (*instr.outputs(), *instr.writes)), number)
        shown: dict[int, list[Instr]] = {}
        for var in dict.fromkeys(out.var for out in self.outputs):
            call = Instr(_SHOWN, (var,), {}, None, (), None)
            shown.setdefault(last.get(var.storage, -1), []).append(call)
        calls = [call for number, instr in enumerate(instrs) for call in (instr, *shown.get(number, ()))]
        return [*shown.get(-1, ()), *calls]

    def run(self, buffers: Buffers, see: Callable[[int, Tensor], None], shaker: Shaker | None = None) -> None:
        """Run the program once.

        Args:
          buffers: Slots, inputs and constants.
          see: Called as ``see(number, value)`` once per output, in any order; it must not keep the value.
          shaker: Perturbs the results of calls by ulps.
        """
        numbers: dict[Var, list[int]] = {}
        for number, out in enumerate(self.outputs):
            numbers.setdefault(out.var, []).append(number)
        values = self._bound(buffers)
        static = frozenset(values)
        with quiet():
            for action in self._actions:
                for var in action.forget:
                    del values[var]
                for group in action.aside:
                    self._host.put([(var, values.pop(var)) for var in group])
                if action.back:
                    values.update(self._host.take(action.back[0].storage))
                if action.instr is not None and action.instr.op is _SHOWN:
                    (var,) = action.instr.inputs()
                    for number in numbers[var]:
                        see(number, values[var])
                elif action.instr is not None:
                    self._call(action.instr, values, static, shaker)
        self._host.end_run()

    def free(self) -> None:
        """Give back the host memory that runs have taken."""
        self._host.free()

    def made(self, metrics: Iterable[Tensor], slots: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of a plan that has run, in the order of :attr:`outputs`.

        Args:
          metrics: What the plan returned.
          slots: The slots that it wrote.
        """
        rest = iter(metrics)
        return [next(rest) if out.slot is None else slots[out.slot] for out in self.outputs]

    def fit(self, room: int, *, host: int = 0) -> int:
        """Make runs fit into the given memory, buffers not counted, by rematerialization and host memory if needed.

        Args:
          room: Bytes.
          host: Bytes of host memory in which values may wait; :meth:`free` gives it back.
        Returns:
          Peak bytes of a run; more than ``room`` if no order is found that fits.
        """
        static = {var.storage for var in self._bound_vars()}
        sizes = {one: size for one, size in storage_bytes(self._instrs).items() if one not in static}
        beside = max(map(_copied, self._instrs), default=0)
        beside += sum(
            self.program.constants[one].var.spec.nbytes for one in self._written
        )  # runs write copies
        peak = peak_bytes(self._instrs, (), sizes)
        if peak + beside <= room:
            return peak + beside
        for instrs in self._divided(room):
            actions = within(instrs, static, room - beside, self._cheap(instrs, room), host)
            if actions is not None:
                self._actions = actions
                return room
        return peak + beside

    def _divided(self, room: int) -> Iterator[Sequence[Instr]]:
        """Yield the calls as they are, then with large values in ever smaller blocks of rows."""
        yield self._instrs
        for part, blocks in _DIVISIONS:
            yield in_blocks(self._instrs, room // part, blocks)

    def _cheap(self, instrs: Sequence[Instr], room: int) -> set[int]:
        """Return the storages that a backward recomputes which keeps as few bytes as possible."""
        program = replace(self.program, instrs=[*instrs])
        forward = Forward.of(program)
        (choice,) = recomputed(program, forward, prices=(0.0,), large=room // _FEW)
        return choice.again

    def raises_at(self, buffers: Buffers) -> Location | None:
        """Return the user's line whose call raises on these buffers; None if no call raises."""
        values = self._bound(buffers)
        static = frozenset(values)
        with quiet():
            for instr in self._instrs:
                if instr.op is _SHOWN:
                    continue
                try:
                    self._call(instr, values, static, None)
                except Exception:  # whatever a kernel raises
                    return instr.site
        return None

    def site_of(self, var: Var) -> Location | None:
        """Return the user's line that computes a variable."""
        return next((instr.site for instr in self._instrs if var in set(instr.outputs())), None)

    def _bound_vars(self) -> list[Var]:
        program = self.program
        return [*program.slots, *program.inputs, *(constant.var for constant in program.constants)]

    def _bound(self, buffers: Buffers) -> dict[Var, Tensor]:
        own = [one.clone() if i in self._written else one for i, one in enumerate(buffers.constants)]
        return dict(zip(self._bound_vars(), [*buffers.slots, *buffers.inputs, *own], strict=True))

    def _call(
        self, instr: Instr, values: dict[Var, Tensor], static: Iterable[Var], shaker: Shaker | None
    ) -> None:
        given = values
        if shaker is not None:
            instr, moved = shaker.scalars(instr), shaker.arguments(instr, values)
            given = values | moved if moved else values
        result = evaluate(instr, given.__getitem__)
        turned = self._turned.get(instr)
        if turned is None:
            turned = self._turned[instr] = unsure(instr)
        made = [
            (var, laid_out(one, var.spec.stride) if var in turned else one)
            for var, one in _assigned(instr.out, result)
        ]
        values.update((var, tensor) for var, tensor in made if var not in static)
        if shaker is not None:
            shaker.results(instr, [(var, tensor) for var, tensor in made if var not in static])


def _leaf_by_leaf(instr: Instr) -> list[Instr]:
    """Split a call on lists of tensors into one call per list position, so that results need not coexist in memory."""
    return [at_places(instr, [place]) for place in range(group_size(instr))] or [instr]


def _copied(instr: Instr) -> int:
    """Return the extra bytes that a shaker takes for a call: it perturbs copies of a deciding call's arguments."""
    return sum(var.spec.nbytes for var in set(instr.inputs())) if decides(instr) else 0


def _assigned(out: object, value: object) -> Iterable[tuple[Var, Tensor]]:
    """Yield the variables of a result with their tensors."""
    if isinstance(out, Var):
        assert isinstance(value, Tensor)
        yield out, value
    elif isinstance(out, (list, tuple)):
        assert isinstance(value, (list, tuple))
        for item, part in zip(out, value, strict=False):
            yield from _assigned(item, part)
