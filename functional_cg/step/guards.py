"""Guards: all that a step has taken from the host when it was traced; each call asks whether it is still so.

These are Python values and modes of torch (:class:`HostWatch`), tensors that the step closes over or finds in a cache
(:class:`Constants`), buffers of a state that Python reads (:class:`Supposed`), modules, and process groups.

What a replay cannot follow is refused: constants that were written, modules that were changed, modes of torch, process
groups that have ended. Of another host value it is not known whether it matters: the step is traced again, and goes on
if its program is the same.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import tree as pytree
from ..ambient.torch_modes import refuse_ambient_modes
from ..call.signature import Call, StateArgument, on_host
from ..errors import BakedValueError, ForeignTensorError, FunctionalCGError, LayoutError
from ..messages.source import warn
from ..shards.groups import Groups
from ..stages.program import Program
from ..stages.trace.twice import another_program
from ..stages.watch.host_watch import HostWatch, refusal
from ..state.arena import BufferSpec, as_plain
from ..state.leaf import Leaf
from ..tensors.fingerprint import as_now, seen

__all__ = ["Constants", "Guards", "Supposed"]

_OFTEN = 3  # traces that one value has caused
_SHOWN = 8  # elements of a buffer


class Constants:
    """Tensors declared with ``constants=``, or remembered: copied at lowering, and watched for later writes.

    Other memory (``table.data = other``, ``torch.utils.swap_tensors``), or another part of the same memory, is noticed
    as well. Writes that torch does not count (into ``table.data``, through ``table.numpy()``, through a view in
    inference mode) go unnoticed, as does a move into room that ``table.untyped_storage().resize_`` has added;
    ``debug="verify"`` finds their effects. Memory that torch does not own alone, such as numpy's or a file's, is
    refused for the same reason. The host watch detects names that are rebound to another tensor.

    Args:
      function: Name of the user's function, for messages.
      tree: Tensors or trees of them.
      kind: What they are, for messages.

    Attributes:
      unchanged: Returns whether no original has been written since it was copied.
    """

    def __init__(self, function: str, tree: Any, kind: str = "declared") -> None:
        self._kind, (named, _) = kind, pytree.flatten_with_path(tree)
        self._items = [(pytree.path_string(path, "constants"), leaf) for path, leaf in named]
        for name, leaf in self._items:
            if isinstance(leaf, Leaf):
                raise TypeError(
                    f"`{function}`: {name} is of a state, which changes from call to call.\n"
                    f"To fix: a state is an argument, `{function}(state, ...)`; a fixed copy is `fcg.snapshot(state)`."
                )
            if not isinstance(leaf, Tensor):
                fix = "leave it out: numbers that the function reads are watched; a table as `torch.tensor(...)`."
                if isinstance(leaf, torch.nn.Module):
                    fix = (
                        "if it is trained, `apply, params, buffers = fcg.from_module(model)`, with `params` and "
                        "`buffers` in the state; if not, `constants=(*model.parameters(), *model.buffers())`."
                    )
                raise TypeError(
                    f"`{function}`: {name} must be a tensor, got {type(leaf).__name__}.\nTo fix: {fix}"
                )
            if leaf.layout is not torch.strided or leaf.is_nested:
                raise LayoutError.of(
                    function,
                    "declares a constant that is not dense.",
                    rows=[f"{name}  {leaf.layout} of {leaf.dim()} dimensions"],
                    fix=f"declare `{name}.to_dense()`, or, of a nested one, "
                    f"`torch.nested.to_padded_tensor({name}, 0.0)`.",
                )
            if better := as_plain(leaf, name):
                raise LayoutError.of(
                    function,
                    "declares a constant of a class of its own.",
                    rows=[f"{name}  expected a plain tensor   got the subclass {type(leaf).__name__}"],
                    why="The step would see a plain one.",
                    fix=f"{better}, and read that in the step.",
                )
            if not leaf.untyped_storage().resizable():
                raise ForeignTensorError.of(
                    function,
                    "declares a constant whose memory is not torch's alone: that of numpy, of a buffer or of a file.",
                    rows=[f"{name}  {BufferSpec.of(leaf)}"],
                    why="What others write there would not be noticed, and the step goes on with a copy.",
                    fix="declare a copy, and read that in the step: `table = table.clone()`, `constants=(table,)`.",
                )
        # Each tensor's count of writes, its memory, and the part of it that it was when copied.
        self._copied: list[tuple[int, Any, Any]] = []
        self.unchanged: Callable[[], bool] = lambda: True

    def __iter__(self) -> Iterator[Tensor]:
        return iter([leaf for _, leaf in self._items])

    def __bool__(self) -> bool:
        return bool(self._items)

    def named(self) -> tuple[tuple[str, Tensor], ...]:
        """Return the originals by name; from the first lowering on, changes are noticed."""
        if not self._copied:
            self._copied = list(map(seen, self))
            self.unchanged = as_now(list(self))
        return tuple(self._items)

    def check(self, function: str) -> None:
        """Raise if an original has been written since it was copied.

        Raises:
          BakedValueError: Naming these constants.
        """
        rows = []
        for (name, leaf), (written, memory, view) in zip(self._items, self._copied, strict=True):
            count, place, part = seen(leaf)
            changes = (
                ("has other memory", place is not memory),
                (f"written {count - written} time(s)", count != written),
                ("is another part of its memory", part != view),
            )
            rows += [f"{name}  {change} since" for change, is_so in changes if is_so][:1]
        if rows:
            raise BakedValueError.of(
                function,
                f"a {self._kind} constant was written after the step copied it.",
                rows=rows,
                why="The step replays with the value that it had then.",
                fix="pass it as an input, or keep it in the state.",
            )


class Supposed:
    """The values of buffers with which a program was traced, compared unless only its capture has updated the states.

    A trace may read a buffer on the host that the step never changes. Whether a state still holds the value is clear
    from its generation while only this step has updated it; else its value is compared, which waits for the device.

    Args:
      program: The program.
      states: The states that it is bound to.
    """

    def __init__(self, program: Program, states: Sequence[StateArgument]) -> None:
        slots = [(state.arena, slot) for state in states for slot in range(state.start, state.stop)]
        self._values = [(one, *slots[program.slot_names.index(one.name)]) for one in program.suppositions]
        self._positions = [state.position for state in states]
        self._seen: list[tuple[weakref.ref[Any], int]] = []

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether the states among the arguments hold them."""
        states = [args[position] for position in self._positions]
        same = len(self._seen) == len(states) and all(
            lease() is state._lease and generation == state._generation
            for (lease, generation), state in zip(self._seen, states, strict=True)
        )
        return same or all(one.holds(on_host(arena, slot)) for one, arena, slot in self._values)

    def keep(self, args: Sequence[Any], new: Any) -> None:
        """Note that they still hold them after a call, which returned a new state in place of the first or none."""
        first, *others = (args[position] for position in self._positions)
        states = (first if new is None else new, *others)
        self._seen = [(weakref.ref(state._lease), state._generation) for state in states]


class Guards:
    """What a lowered step has taken from the host.

    Args:
      program: The traced calls before any rewrite.
      watch: The host values that it has read, and the modes of torch.
      declared: The declared constants.
      groups: The process groups on a GPU.

    Attributes:
      unchanged: Returns whether all is as it was, but for the values of states; a call asks it.
      watch: The host values as they were when the step was last traced.
      groups: The process groups.
    """

    def __init__(self, program: Program, watch: HostWatch, declared: Constants, groups: Groups) -> None:
        self.groups = groups
        self._program, self._function = program, program.function
        remembered = Constants(program.function, dict(program.tables), "remembered")
        remembered.named()  # from now on, writes are noticed
        self._constants = remembered, declared
        self._causes: Counter[str] = Counter()
        self._adopt(program, watch)

    def _adopt(self, program: Program, watch: HostWatch) -> None:
        originals = dict.fromkeys(one.original for one in program.applications)
        self.watch, self._fixed = watch, [*originals, *filter(None, (*self._constants, self.groups))]
        every = [one.unchanged for one in (watch, *self._fixed)]
        self.unchanged: Callable[[], bool] = functools.reduce(_both, every)

    def check(self, call: Call, again: Callable[[], tuple[Program, HostWatch]]) -> bool:
        """Raise if the host has changed such that the step would do something else now.

        Args:
          call: The call.
          again: Traces the step for the call.
        Returns:
          Whether it was traced again.
        Raises:
          BakedValueError: Naming each value, as traced and as it is now, and what the step does now. If a first call
            would be refused for that, its error is the cause. Or naming each buffer of which a state holds another
            value than that with which it was traced.
        """
        changed: list[tuple[str, object, object]] = []
        if not self.unchanged():
            refuse_ambient_modes(self._function)
            for one in self._fixed:
                one.check(self._function)
            # What changed before without effect comes last: the fix is for the first.
            changed = sorted(self.watch.differences(), key=lambda row: self._causes[row[0]])
            # A trace tells nothing of modes: kernels read them.
            if modes := self.watch.other_modes():
                raise refusal(self._function, changed + modes)
        self._refuse_other_buffers(call)
        if changed:
            self._confirm(changed, again)
        return bool(changed)

    def _refuse_other_buffers(self, call: Call) -> None:
        numbers = map(self._program.slot_names.index, (one.name for one in self._program.suppositions))
        held = zip(self._program.suppositions, map(call.value, numbers), strict=True)
        rows = [
            f"{one.name}  traced with {_text(one.value)}   got {_text(value)}"
            for one, value in held
            if value is None or not one.holds(value)
        ]
        if rows:
            raise BakedValueError.of(
                self._function,
                "is called with another value of a buffer that it reads on the host; the state is unchanged.",
                rows=rows,
                why="Python runs when the step is traced, not when it is replayed: it went on with the old value.",
                fix="make a step for the new value, `graph_step(fn)`; or keep the decision on the device, "
                "`torch.where(flag, a, b)`.",
            )

    def _confirm(
        self, changed: Sequence[tuple[str, Any, Any]], again: Callable[[], tuple[Program, HostWatch]]
    ) -> None:
        """Trace the step again; take what it reads now for what it has read, if the program is the same."""
        start = time.perf_counter()
        try:
            program, watch = again()
        except FunctionalCGError as error:  # what a first call is refused for
            text = str(error).partition("\n")[0].removeprefix(f"`{self._function}`: ")
            raise refusal(self._function, changed, [f"the step now {text}"]) from error
        if difference := another_program(self._program, program):
            rows = [f"{name}  traced {one}   now {other}" for name, one, other in difference.rows[:1]]
            raise refusal(self._function, changed, rows)
        self._adopt(program, watch)
        if (
            not watch.unchanged()
        ):  # it is another value while a step is traced, as a collector that is switched off
            raise refusal(self._function, watch.differences())
        names = list(dict.fromkeys(name for name, *_ in changed))
        self._causes.update(names)
        often = [name for name in names if self._causes[name] == _OFTEN]
        if often:
            read = ", ".join(f"`{name}`" for name in often)
            warn(
                f"`{self._function}`: {read} changed before each of {_OFTEN} calls, and the step reads it: such a call "
                f"traces the step again, {time.perf_counter() - start:.2f} s, to see that it does the same.\n"
                "To fix: pass it as an input, or do not read it in the step."
            )


def _both(one: Callable[[], bool], two: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: one() and two()


def _text(value: Tensor | None) -> str:
    return "other values" if value is None or value.numel() > _SHOWN else str(value.tolist())
