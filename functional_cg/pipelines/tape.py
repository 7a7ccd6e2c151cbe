"""The ATen calls of a loss and of its gradients, stage by stage, as recorded on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .. import tree as pytree
from ..ambient.rehearsal import as_before, place, repeated, traced, unknown
from ..errors import LayoutError
from ..shards.reader import Reader
from ..shards.tensor import Sharded, title
from ..tensors.aten import tensors_in, written_arguments
from ..tensors.op_table import row_of
from ..tensors.overlap import storage_key
from ..transforms.debug import REPORTS

__all__ = ["Call", "Part", "Tape", "cut", "map_tensors", "play"]

T = TypeVar("T")
_current: ContextVar[Tape | None] = ContextVar("tape", default=None)


@dataclass(eq=False, slots=True)
class Call:
    """One ATen call on the tensors of a tape.

    Attributes:
      op: The op.
      args: Its arguments; tensors that the tape does not know are those of the surroundings.
      kwargs: The same, by name.
      out: Its result.
      written: The tensors among the arguments that it writes.
      part: The part of the loss that it belongs to by its place: ("F", stage) or ("B", stage).
      where: Where it comes from, for the running trace.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    written: list[Tensor]
    part: tuple[str, int]
    where: Any

    @property
    def read(self) -> list[Tensor]:
        return list(tensors_in([*self.args, *self.kwargs.values()]))

    @property
    def made(self) -> list[Tensor]:
        return list(tensors_in(self.out if isinstance(self.out, (list, tuple)) else [self.out]))

    def __str__(self) -> str:
        line = self.where[0] if self.where else None
        return f"{self.op}" + (f", at {line}" if line else "")


class Part:
    """Calls of a tape that are made together, once for each micro-batch.

    Attributes:
      calls: The calls, in order.
      read: Ids of the tensors that they read and do not make.
      made: Ids of those that they make, and that are wanted.
    """

    __slots__ = ("calls", "made", "read")

    def __init__(self, calls: Sequence[Call] = (), wanted: Collection[int] = ()) -> None:
        self.calls = calls
        made, read = dict[int, None](), dict[int, None]()
        for call in calls:
            read.update({id(one): None for one in call.read if id(one) not in made})
            made.update({id(one): None for one in call.made})
        self.made, self.read = [one for one in made if one in wanted], list(read)


class Tape(TorchDispatchMode):
    """Records the calls of one run of a loss; what it computes is kept alive, so that identities stay unique.

    Attributes:
      calls: The calls, in order.
      part: The part that is recorded now.
      cuts: For each cut, what it was given and what the next stage gets in its place.
      given: By storage, what the tensors that are given depend on: see :meth:`letters`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.part = ("F", 0)
        self.cuts: list[tuple[list[Tensor], list[Tensor]]] = []
        self.given: dict[int, set[str]] = {}
        self._kept: list[Any] = []
        self._stand_ins: dict[int, Tensor] = {}
        self._originals: dict[int, Tensor] = {}
        self._pauses = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[Tape]:
        token = _current.set(self)
        try:
            with self:
                yield self
        finally:
            _current.reset(token)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._pauses = True
        try:
            yield
        finally:
            self._pauses = False

    def fake(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
        """Make a tensor that stands for one which is known later."""
        with self.paused(), torch.no_grad():
            made = unknown(tuple(shape), tuple(stride), dtype, device)
        self._kept.append(made)
        return made

    def like(self, tensor: Tensor) -> Tensor:
        """Make a contiguous tensor of another's shape and dtype, as one that arrives from another rank is."""
        stride = torch.empty(tensor.shape, device="meta").stride()
        return self.fake(tensor.shape, stride, tensor.dtype, tensor.device)

    def give(self, tensors: Iterable[Tensor], letter: str) -> None:
        """Note what tensors depend on that the calls do not compute."""
        self.given.update({storage_key(one): {letter} for one in tensors})

    def letters(self) -> dict[int, set[str]]:
        """Return what each storage depends on: ``p`` for parameters, ``d`` for data, ``s`` if it stays in its stage.

        What depends on parameters and data together stays in the stage in which it is computed, and so does what
        depends on such a value, and what only has an effect.
        """
        found, grown = {key: set(letters) for key, letters in self.given.items()}, True
        while grown:
            grown = False
            for call in self.calls:
                letters = {one for tensor in call.read for one in found.get(storage_key(tensor), ())}
                if letters >= {"p", "d"} or not (call.made or call.written):
                    letters.add("s")
                for tensor in (*call.made, *call.written):
                    known = found.setdefault(storage_key(tensor), set())
                    grown |= not letters <= known
                    known |= letters
        return found

    def cut(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Begin the next stage; return what it gets in place of ``leaves``.

        What depends on data alone, such as a mask, is not sent: each stage computes it.
        """
        if self.part[0] == "B":
            raise LayoutError.of(
                "",
                "cuts a loss where its backward computes it again.",
                why="A stage begins at a cut, and the backward of a checkpoint would begin it once more.",
                fix="cut between the parts that are checkpointed.",
            )
        letters = self.letters()
        sent = [leaf for leaf in leaves if "s" in letters.get(storage_key(leaf), ())]
        self._kept += sent
        arrived = [self.like(leaf).requires_grad_(leaf.requires_grad) for leaf in sent]
        self.give(arrived, "s")
        self.cuts.append((sent, arrived))
        self.part = ("F", len(self.cuts))
        following = iter(arrived)
        return [next(following) if "s" in letters.get(storage_key(leaf), ()) else leaf for leaf in leaves]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if Sharded in types or Reader in types:
            for leaf in tensors_in([*args, *kwargs.values()]):
                if isinstance(leaf, Sharded) and leaf.placement.holders is not None:
                    raise _of_other_stages(leaf)
            return NotImplemented
        if self._pauses or func is torch.ops.prim.device.default or func.namespace == "profiler":
            return func(*args, **kwargs)
        if func in REPORTS:
            out = None
        elif traced():
            out = func(*args, **kwargs)
        elif row_of(func).lifts:
            out = self._stand_in(args[0])
        else:
            args, kwargs = map_tensors(self._stand_in, args), map_tensors(self._stand_in, kwargs)
            out = func(*args, **kwargs)
        self._kept += [args, kwargs, out]
        call = Call(
            func, args, kwargs, out, written_arguments(func, args, kwargs), self.part,
            None if func in REPORTS else place(),
        )  # fmt: skip
        self.calls.append(call)
        return out

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor for a real one of the surroundings."""
        if isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor):
            return tensor
        if id(tensor) not in self._stand_ins:
            made = self.fake(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            self._stand_ins[id(tensor)], self._originals[id(made)] = made, tensor
            self._kept.append(tensor)
        return self._stand_ins[id(tensor)]

    def original(self, tensor: Tensor) -> Tensor:
        """Return the real tensor that a fake one stands for; any other tensor as it is."""
        return self._originals.get(id(tensor), tensor)


def cut(tree: T) -> T:
    """Begin the next stage of the loss that is recorded, if any, with the tensors of a tree; return what it gets."""
    tape = _current.get()
    if tape is None:
        return tree
    flat, treedef = pytree.flatten(tree)
    arrived = iter(tape.cut([leaf for leaf in flat if isinstance(leaf, Tensor)]))
    return pytree.unflatten(  # type: ignore[no-any-return]
        treedef, [next(arrived) if isinstance(leaf, Tensor) else leaf for leaf in flat]
    )


def play(tape: Tape, part: Part, values: dict[int, Any], title: str) -> None:
    """Make the calls of a part again, on other tensors.

    Args:
      tape: The tape that recorded them.
      part: The calls.
      values: What takes the place of each tensor of the tape, by identity; what the calls compute is added.
      title: Name of the calls.
    """
    given = [number for number in part.read if number in values]

    def act(tensors: list[Tensor]) -> list[Tensor]:
        known = dict(zip(given, tensors, strict=True))
        for call in part.calls:
            with as_before(call.where):
                _bind(call.out, _made_again(tape, call, known), known)
        return [known[number] for number in part.made]

    made = repeated(part, act, [values[number] for number in given], title)
    values.update(zip(part.made, made, strict=True))


def _made_again(tape: Tape, call: Call, values: Mapping[int, Tensor]) -> Any:
    if row_of(call.op).lifts:  # a literal is another tensor each time, which may be written
        with _disable_current_modes():
            literal = tape.original(call.args[0]).clone()
        return call.op(literal)

    def value(tensor: Tensor) -> Tensor:
        return values.get(id(tensor), tape.original(tensor))

    return call.op(*map_tensors(value, call.args), **map_tensors(value, call.kwargs))


def _bind(recorded: Any, out: Any, values: dict[int, Tensor]) -> None:
    if isinstance(recorded, Tensor):
        values[id(recorded)] = out
    elif isinstance(recorded, (list, tuple)):
        for one, other in zip(recorded, out, strict=True):
            _bind(one, other, values)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return an argument or result with ``function`` applied to each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: map_tensors(function, item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def _of_other_stages(leaf: Sharded) -> LayoutError:
    return LayoutError.of(
        "",
        "computes in a loss of a pipeline with a leaf that it did not get as an argument.",
        rows=[title(leaf)],
        why="Only the stages that read it hold it, and those are found from what the loss gets.",
        fix="pass it as part of the first argument, `pipe.value_and_grad(loss_fn)(state.params, batch)`.",
    )
