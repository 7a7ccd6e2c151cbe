"""Record each ATen call of a run of the user's function on fake tensors.

The recorder is a dispatch mode below autograd, entered inside the fake mode, so it sees each op before anything runs:
a write to a closed-over tensor is refused, not executed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ... import tree as pytree
from ...ambient.running import OwnWork, Run
from ...ambient.setting import in_a_backward
from ...errors import FunctionalCGError, HostSyncError
from ...messages.origins import Origins
from ...shards.reader import Reader
from ...shards.tensor import Sharded
from ...state.arena import BufferSpec
from ...state.boundary import mesh_of
from ...tensors.aten import map_tensors, sync_reason, tensors_in, written_arguments
from ...tensors.fake_mode import FakeMode
from ...tensors.op_table import row_of
from ...tensors.overlap import storage_key
from ...transforms.debug import REPORTS
from ...tree import KeyPath, path_string
from ..blocks import Blocks
from ..keys import inputs_behind, is_drawn
from ..kinds import not_strided, refuse_layouts, refuse_mixed_dtypes
from ..program import Constant, Instr, Program, Report, Var
from ..variables import History, Reference, Variables
from ..watch.frames import Follower
from .host import taken_as_valid
from .known import BY_NUMBER, Supposed, as_filling, aside_from_modes, by_places, filled, result_of, value_of
from .members import for_members
from .recipe import Recipe
from .rules import Rules
from .strays import Table, may_be_table
from .twice import LITERAL

__all__ = ["Recorder"]

_Act = Callable[..., Any]
_DEVICE = torch.ops.prim.device.default
_IN_OTHER_STRIDES_ = torch.ops.aten.as_strided_.default


class Recorder(TorchDispatchMode, Run):
    """Records ATen calls as instructions."""

    def __init__(self, recipe: Recipe, mode: FakeMode, checkpoint: _Act, follower: Follower) -> None:
        super().__init__()
        self.program = Program(recipe.name, [], [], [])
        self._input_names = recipe.input_names
        self._mode, self._checkpoint = mode, checkpoint
        self._aside, self._follower = follower.aside, follower
        self.variables = Variables(mode)
        self.blocks = Blocks(self.program, self.variables)
        self.history = History(self.program, self.variables.of)
        self._protected: dict[int, str] = {}
        self.copied: set[int] = set()  # storages of inputs
        self.declared = self.variables.declared
        self.tables: list[Table] = []
        self.mesh = mesh_of([spec for state in recipe.states for spec in state.specs])
        self.work: OwnWork = OwnWork()
        owners, meshed = (self._protected, self.copied, self.work.fixed), self.mesh is not None
        self.rules = Rules(recipe.name, *owners, recipe.function, self.history, on_a_mesh=meshed)
        self._origins = Origins(self.work)
        self.supposed = Supposed(self.program, recipe.value)
        self._as_before: Any = None

    def fake(self, spec: BufferSpec, owner: str) -> tuple[Tensor, Var]:
        """Make a fake tensor, and its variable, for a leaf that exists outside the step."""
        with self._mode:
            tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
        self._protected[storage_key(tensor)] = owner
        return tensor, self._new_var(tensor)

    def declare(self, name: str, value: Tensor) -> None:
        """Declare a closed-over tensor a constant; it is recognised by identity."""
        tensor, var = self.fake(BufferSpec.of(value), name)
        self.declared[id(value)] = tensor
        self.program.constants.append(Constant(var, value.detach(), name))

    def variable(self, path: KeyPath, leaf: Tensor, root: str) -> Var:
        """Return the variable of a result."""
        var = self.variables.of(leaf)
        if var is None:
            raise self.rules.returned(path_string(path, root), leaf)
        if id(leaf) not in self.declared and not self.variables.describes(var, leaf):
            raise self.rules.data_assigned()
        return var

    def _new_var(self, tensor: Tensor) -> Var:
        if tensor.layout != torch.strided:
            raise not_strided(self.program.function, f"{tensor.layout} of shape {list(tensor.shape)}")
        return self.variables.new(tensor)

    def release(self) -> list[Reference]:
        """Drop all tensors of the trace; any that stay alive are held by user code."""
        references, work = self.variables.release(), self.work
        kept = self.blocks.known, work.buffers, work.applied, work.fixed, work.replaced, self.rules.places
        for one in kept:
            one.clear()
        return references

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Check the calls of a block, and forget them: what they compute is computed again, elsewhere."""
        start = len(self.program.instrs)
        try:
            yield
        finally:
            del self.program.instrs[start:]
            self.history.forget()

    def unknown(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Make a fake tensor that no call computes, so that the host cannot read it."""
        with self._mode:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        self.history.mark(self._new_var(tensor))
        return tensor

    def place(self) -> Any:
        """Return where the last call comes from."""
        last = self.program.instrs[-1] if self.program.instrs else None
        return None if last is None else (last.site, last.backward, last.inner, last.origin)

    @contextmanager
    def as_before(self, place: Any) -> Iterator[None]:
        """Record the calls of a block as ones that come from a place, which :meth:`place` returned."""
        self._as_before = place
        try:
            yield
        finally:
            self._as_before = None

    def repeated(
        self,
        name: Hashable,
        act: Callable[[list[Tensor]], list[Tensor]],
        given: Sequence[Any],
        title: str = "",
    ) -> list[Any]:
        """Record what a block computes, or add its calls once more; return tensors, or variables without any."""
        self._checkpoint()
        with torch._C.DisableTorchFunction():
            found = self._aside(self.blocks.again, name, given)
        return self.blocks.recorded(name, act, given, title) if found is None else found

    def tensor(self, value: Any) -> Tensor:
        """Return the tensor that a result of a block stands for."""
        return self.variables.tensor(value)

    def copying(self) -> AbstractContextManager[None]:
        """Follow only the user's own code, and what that calls, in a block."""
        return self._follower.copying()

    def for_members(
        self,
        act: Callable[[list[Tensor]], list[Tensor]],
        given: Sequence[Tensor],
        names: Sequence[str],
        count: int,
    ) -> list[Tensor]:
        """Record what a function of one member computes, for all members."""
        return for_members(self, act, given, names, count)

    def announce(self, text: str) -> None:
        """Add a note to the program."""
        self.program.notes.append(text)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device  # torch asks several times per op
        if Sharded in types or Reader in types:
            return NotImplemented  # its ops on local shards are dispatched here again
        try:
            return self._aside(self._dispatch, func, args, kwargs or {})
        except FunctionalCGError as error:
            self.rules.remember(error)
            raise

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.rules.is_query(func):
            return func(*args, **kwargs)
        self._checkpoint()
        if func in REPORTS:
            self.program.reports.append(Report(func, tuple(args[:-1]), tuple(self._freeze(list(args[-1])))))
            return None
        row = row_of(func)
        if row.lifts and not isinstance(args[0], FakeTensor):
            return self._literal(args[0])
        self._adopt(func, args, kwargs)
        if self.declared or self.work.fixed:
            args, kwargs = map_tensors(self._standing, args), map_tensors(self._standing, kwargs)
        if row.puts:
            args = self._from_here(args)
        tensors = list(tensors_in([*args, *kwargs.values()]))
        refuse_layouts(self.program.function, func, tensors)
        if tensors and all(one.device.type == "meta" and self.variables.of(one) is None for one in tensors):
            return aside_from_modes(lambda: func(*args, **kwargs))  # there are no values that could go stale
        if func in BY_NUMBER and args[2].is_cuda:
            return filled(func, args, self._dispatch)
        if reason := sync_reason(func, args, kwargs):
            if known := self._known_result(func, args, kwargs):
                return known[0]
            if filling := as_filling(func, args, kwargs, self._dispatch):
                return self._dispatch(*filling, {})
            if (valid := taken_as_valid(func, args, self._dispatch)) is not None:
                return valid
            owner = self._protected.get(storage_key(tensors[0]), "") if tensors else ""
            read = [var for one in tensors if (var := self.variables.of(one))]
            behind = inputs_behind(self.program, self._input_names, read)
            inputs, drawn = behind if "shape" in reason else [], is_drawn(self.program, read)
            raise self.rules.host_read(reason, func, owner, tensors=tensors, inputs=inputs, drawn=drawn)
        written = self.rules.check(func, args, kwargs)
        for tensor in tensors:
            self._refuse_unknown(func, tensor, written)
        refuse_mixed_dtypes(func, tensors)
        out = func(*args, **kwargs)
        _refuse_absent_device(out)
        if not self._fold(func, args, out):
            self._record(func, args, kwargs, out, written)
        return out

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return what a tensor of the trace holds, if that is the same in each replay; else None."""
        var = self.variables.of(self._standing(tensor))
        buffers = list(map(self.variables.of, self.work.buffers))
        return value_of(self.program, var, partial(self.supposed.value_of, buffers=buffers))

    def _known_result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any] | None:
        """Return the result, as a 1-tuple, of a call that needs only known values on the host; else None."""
        device = next(tensors_in([*args, *kwargs.values()])).device

        def literal(value: Any) -> Any:
            return self._literal(value, device) if type(value) is Tensor else value

        indexing = by_places(func, args, kwargs, self.value_of, self._dispatch)
        if indexing is not None:  # its other arguments need not be known
            op, named = indexing
            named["indices"] = list(map(literal, named["indices"]))
            return (self._dispatch(op, tuple(named.values()), {}),)
        known = result_of(func, args, kwargs, self.value_of)
        return known and (pytree.map(literal, known[0]),)

    def _standing(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor that stands for a declared constant; any other tensor as it is."""
        if id(tensor) in self.work.fixed and id(tensor) not in self.declared:
            with _disable_current_modes():
                self.declare(*self.work.fixed[id(tensor)])
        return self.declared.get(id(tensor), tensor)

    def _adopt(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take what a call reads of earlier calls' tensors as constants for now."""
        new = [
            one
            for one in tensors_in([*args, *kwargs.values()])
            if self.variables.of(one) is None and id(one) not in self.work.fixed and may_be_table(one)
        ]
        written = set(map(id, written_arguments(func, args, kwargs))) if new else set()
        for one in {id(one): one for one in new if id(one) not in written}.values():
            with _disable_current_modes():
                refusal, name = self.rules.foreign(func, one), f"remembered {len(self.tables)}"
                self.declare(name, one)
                self.tables.append(Table(name, one, refusal))

    def _refuse_unknown(self, func: Any, tensor: Tensor, written: Sequence[Tensor]) -> None:
        if (var := self.variables.get(tensor)) is None:
            raise self.rules.foreign(func, tensor, written=any(other is tensor for other in written))
        if not self.variables.describes(var, tensor):
            raise self.rules.data_assigned()

    def _freeze(self, value: Any) -> Any:
        return map_tensors(self.variables.__getitem__, value)

    def _born(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._born, value))
        if not isinstance(value, Tensor):
            return None
        var = self.variables.get(value)
        # Ops such as `t_` and `resize_` return their argument with another layout: it becomes a new variable.
        return var if var is not None and self.variables.describes(var, value) else self._new_var(value)

    def _record(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, written: Sequence[Tensor]
    ) -> None:
        if func is _IN_OTHER_STRIDES_:  # it writes no element and returns a view
            func, written = torch.ops.aten.as_strided.default, ()
        frozen, named = self._freeze(tuple(args)), self._freeze(kwargs)
        writes = tuple(self.variables[tensor] for tensor in written)
        # Built last: the result may be an argument that this call turns into a new variable.
        born = self._born(out)
        place = self._as_before or self._place()
        self.program.instrs.append(Instr(func, frozen, named, born, writes, *place))

    def _place(self) -> tuple[Any, bool, bool, Any]:
        line = self._origins.line()
        return line, in_a_backward(), bool(self.work.running), self._origins.here(line)

    def _literal(self, value: Tensor, device: torch.device | None = None) -> Tensor:
        """Record ``torch.tensor([...])`` as a constant; refuse memory shared with numpy, which the caller owns."""
        if not value.untyped_storage().resizable():
            raise self.rules.foreign_array(value)
        tensor, var = self.fake(replace(BufferSpec.of(value), device=device or value.device), "a literal")
        del self._protected[storage_key(tensor)]  # writing it is harmless: each run starts from a copy
        with unset_fake_temporarily():
            self._add_literal(var, value.detach().clone())
        return tensor

    def _add_literal(self, var: Var, value: Tensor) -> None:
        name = f"{LITERAL} {len(self.program.constants)}"
        self.program.constants.append(Constant(var, value, name, self._origins.line()))

    def _fold(self, func: Any, args: Sequence[Any], out: Any) -> bool:
        """Fold a known value moved to the device into a literal there: a graph cannot copy from pageable memory."""
        source = args[0] if func is torch.ops.aten._to_copy.default else None
        # Under `vmap`, the source may be a Python number.
        if not isinstance(source, Tensor) or out.device == source.device:
            return False
        known = self.value_of(source)
        if known is None:
            raise HostSyncError.of(
                self.program.function,
                f"copies a tensor that was computed on {source.device} to {out.device}.",
                rows=[f"{func}, at {self._origins.line()}"],
                why="Work on the host is not part of a graph.",
                fix=f'create it on the device, `device="{out.device.type}"`.',
            )
        with unset_fake_temporarily():
            self._add_literal(self._new_var(out), known.to(out.dtype).clone())
        return True

    def _from_here(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Move known values, such as the 3 of ``x[0] = 3``, to the device of the tensor that the call writes."""
        to, device = torch.ops.aten._to_copy.default, args[0].device

        def here(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.device == device or value.device.type != "cpu":
                return value
            return self._dispatch(to, (value,), {"device": device})

        return tuple(map(here, args))


def _refuse_absent_device(out: Any) -> None:
    """Refuse, as eager does, a result on a GPU where torch sees none; a fake tensor may lie anywhere.

    Raises:
      RuntimeError: Naming the device.
    """
    for tensor in tensors_in([out]):
        if tensor.device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"a tensor on {tensor.device}, and no CUDA device is available")
