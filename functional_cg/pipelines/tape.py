"""The ATen calls of a loss and of its gradients, stage by stage, as recorded on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from itertools import compress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import tree as pytree
from ..ambient.running import running
from ..errors import LayoutError
from ..messages.origins import Origin
from ..shards.reader import Reader
from ..shards.tensor import Sharded, title
from ..stages.program import Instr, Var
from ..state.arena import BufferSpec
from ..tensors.aten import map_tensors, tensors_in, written_arguments
from ..tensors.op_table import row_of
from ..tensors.overlap import storage_key
from ..transforms.debug import REPORTS

__all__ = ["Tape", "contiguous_strides", "cut"]

T = TypeVar("T")
_current: ContextVar[Tape | None] = ContextVar("tape", default=None)


class Tape(TorchDispatchMode):
    """Records the calls of one run of a loss; it keeps all tensors, so that each has a variable of its own.

    Attributes:
      calls: The calls, in order, with the part of the loss in which each stands.
      part: The part that is recorded now: ("F", stage) or ("B", stage).
      cuts: For each cut, what it was given and what the next stage gets in its place.
      given: By storage, what the variables that are given depend on: see :meth:`letters`.
      tensors: What variables stand for: the tensors of the surroundings, and fake ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Instr, tuple[str, int]] = {}
        self.part = ("F", 0)
        self.cuts: list[tuple[list[Tensor], list[Tensor]]] = []
        self.given: dict[int, set[str]] = {}
        self.tensors: dict[Var, Tensor] = {}
        self._vars: dict[int, Var] = {}
        self._stand_ins: dict[int, Tensor] = {}
        self._pauses = False

    def var(self, tensor: Tensor) -> Var:
        """Return the variable of a tensor."""
        if id(tensor) not in self._vars:
            spec, storage = BufferSpec.of(tensor), tensor.untyped_storage()
            start, fills = int(tensor.storage_offset()), storage.nbytes() == spec.nbytes
            var = Var(len(self._vars), spec, storage_key(tensor), start, fills)
            self._vars[id(tensor)] = var
            self.tensors[var] = tensor
        return self._vars[id(tensor)]

    def vars(self, tensors: Iterable[Tensor]) -> list[Var]:
        """Return the variables of tensors."""
        return list(map(self.var, tensors))

    @contextlib.contextmanager
    def recording(self) -> Iterator[Tape]:
        token = _current.set(self)
        try:
            with self:
                yield self
        finally:
            _current.reset(token)

    def fake(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
        """Make a tensor that stands for one which is known later."""
        self._pauses = True
        try:
            with torch.no_grad():
                made = running().unknown(tuple(shape), tuple(stride), dtype, device)
        finally:
            self._pauses = False
        self.var(made)
        return made

    def like(self, tensor: Tensor) -> Tensor:
        """Make a contiguous tensor of another's shape and dtype, as one that arrives from another rank is."""
        return self.fake(tensor.shape, contiguous_strides(tensor.shape), tensor.dtype, tensor.device)

    def give(self, tensors: Iterable[Tensor], letter: str) -> list[Var]:
        """Note what tensors depend on that the calls do not compute; return their variables."""
        given = self.vars(tensors)
        self.given.update({var.storage: {letter} for var in given})
        return given

    def letters(self) -> dict[int, set[str]]:
        """Return what each storage depends on: ``p`` for parameters, ``d`` for data, ``s`` if it stays in its stage.

        What depends on parameters and data together stays in the stage in which it is computed, and so does what
        depends on such a value, and what only has an effect.
        """
        found, grown = {key: set(letters) for key, letters in self.given.items()}, True
        while grown:
            grown = False
            for call in self.calls:
                letters = {one for var in call.inputs() for one in found.get(var.storage, ())}
                if letters >= {"p", "d"} or call.checks:
                    letters.add("s")
                for var in (*call.outputs(), *call.writes):
                    known = found.setdefault(var.storage, set())
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
        stays = ["s" in letters.get(self.var(leaf).storage, ()) for leaf in leaves]
        sent = list(compress(leaves, stays))
        arrived = [self.like(leaf).requires_grad_(leaf.requires_grad) for leaf in sent]
        self.give(arrived, "s")
        self.cuts.append((sent, arrived))
        self.part = ("F", len(self.cuts))
        following = iter(arrived)
        return [next(following) if own else leaf for leaf, own in zip(leaves, stays, strict=True)]

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
        elif running().work is not None:
            out = func(*args, **kwargs)
        elif row_of(func).lifts:
            out = self._stand_in(args[0])
        else:
            args, kwargs = map_tensors(self._stand_in, args), map_tensors(self._stand_in, kwargs)
            out = func(*args, **kwargs)
        frozen, named, made = (map_tensors(self.var, one) for one in (args, kwargs, out))
        writes = tuple(self.vars(written_arguments(func, args, kwargs)))
        site, backward, inner, origin = running().place() or (None, False, False, Origin())
        self.calls[Instr(func, frozen, named, made, writes, site, backward, inner, origin)] = self.part
        return out

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor for a real one of the surroundings."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._stand_ins:
            made = self.fake(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            self._stand_ins[id(tensor)] = made
            self.tensors[self.var(made)] = tensor
        return self._stand_ins[id(tensor)]


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


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(tuple(shape), device="meta").stride()


def _of_other_stages(leaf: Sharded) -> LayoutError:
    return LayoutError.of(
        "",
        "computes in a loss of a pipeline with a leaf that it did not get as an argument.",
        rows=[title(leaf)],
        why="Only the stages that read it hold it, and those are found from what the loss gets.",
        fix="pass it as part of the first argument, `pipe.value_and_grad(loss_fn)(state.params, batch)`.",
    )
