"""The rules of a trace: what a step must not do, checked op by op before each op runs.

The recorder applies them as ops arrive. They live here so that they can be read in one place.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.cuda import jiterator

from ...ambient.setting import refuse_anomaly_mode
from ...ambient.torch_modes import KernelModes
from ...errors import (
    CaptureError,
    ForeignTensorError,
    FunctionalCGError,
    HostSyncError,
    ImplicitRandomnessError,
    ReadOnlyError,
    SideEffectError,
)
from ...messages.libraries import copy_fix, in_place_fix, keyed_fix, sync_fix
from ...messages.source import at_here, frames, here, is_user_file, user_frame
from ...nn.refusals import registered_fix
from ...pytree.trees import opened
from ...state.arena import BufferSpec
from ...tensors.aten import argument, can_draw, full_name, tensors_in, written_arguments
from ...tensors.op_table import row_of
from ...tensors.overlap import storage_key
from ..variables import History
from .naming import module_fix, owned_fix, owns, read_fix, way_to
from .overlaps import reads_what_it_writes
from .places import Places

__all__ = ["Rules", "host_sync"]

_WRITE_FIX = "return the new value in `metrics` or in the new state, and write it in the loop."
_DECIDE_OUTSIDE = "return the value in `metrics` and decide outside of the step"

_DEBUGGERS = frozenset({"pdb", "reprlib", "debugpy", "pydevd", "_pydevd_bundle"})

# In-place collectives, sends and receives; symmetric memory that ranks registered with each other.
_BETWEEN_RANKS = frozenset({"c10d", "symm_mem"})
# Functional collectives: allowed on a state's mesh, which makes the ranks agree.
_COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
# Their offsets count from the start of the storage, which for a leaf is the start of its slab.
_FROM_THE_STORAGE = frozenset({"aten::as_strided_", "aten::as_strided_copy", "aten::as_strided_scatter"})
# Calls C code that makes memory for its results by these ops, and then launches a kernel that is no op.
_JITERATED = jiterator._JittedFunction.__call__.__code__  # private; test_tensors notices a change
_MEMORY = frozenset({"aten::empty", "aten::empty_strided"})


def _frames() -> Iterator[FrameType]:
    """Return the frames of the trace, innermost first; those below, such as `python -m pdb`, belong to the caller."""
    return takewhile(lambda frame: frame.f_code.co_name != "_run", frames(sys._getframe(1)))


def _in_a_debugger() -> bool:
    """Whether a debugger reads a value to show it: it catches the exception, and nothing depends on the value."""
    return any(frame.f_globals.get("__name__", "").partition(".")[0] in _DEBUGGERS for frame in _frames())


def _torch_optimizer() -> str:
    """Return the class of the torch optimizer whose step is running; "" if none is."""
    for frame in _frames():
        if isinstance(owner := frame.f_locals.get("self"), torch.optim.Optimizer):
            return "" if frame.f_code.co_name == "zero_grad" else type(owner).__name__
    return ""


def _jiterated() -> bool:
    """Whether ``torch.cuda.jiterator`` makes an op, which it does for the memory of its results."""
    for frame in _frames():
        if frame.f_code is _JITERATED or is_user_file(frame.f_code.co_filename):
            return frame.f_code is _JITERATED
    return False


def host_sync(function: str, reason: str, row: str, fix: str) -> HostSyncError:
    """Return the error for a value needed on the host; ``fix`` may be empty, then the general fix is given."""
    return HostSyncError.of(
        function,
        f"{reason}.",
        rows=[row],
        why="Replay repeats kernels, not Python: what is decided now would be decided for ever.",
        fix=(fix or _DECIDE_OUTSIDE).rstrip(".") + ".",
    )


class Rules:
    """The rules of one trace: :meth:`check` sees each op before it runs.

    Args:
      function: Name of the user's function, for messages.
      protected: Name of the state leaf, input or constant that owns a storage, by storage key.
      copied: Those that may be written nevertheless: the step writes its own copy of an input.
      fixed: By id, name and tensor of what modules hold beside parameters and buffers; may still grow.
      code: The function itself, searched for the names of tensors in messages.
      history: What the calls of the trace have written.
      on_a_mesh: Whether the ranks of a state's mesh trace together and agree.
    """

    def __init__(
        self,
        function: str,
        protected: Mapping[int, str],
        copied: Collection[int],
        fixed: Mapping[int, tuple[str, Tensor]],
        code: Callable[..., Any],
        history: History,
        *,
        on_a_mesh: bool,
    ) -> None:
        self._function, self._code, self._on_a_mesh = function, code, on_a_mesh
        self._protected, self._copied, self._fixed = protected, copied, fixed
        self._modes = KernelModes()
        self.places = Places(function, history)  # what was copied where PyTorch has views
        self._first: FunctionalCGError | None = None

    def remember(self, error: FunctionalCGError) -> None:
        """Keep the first refusal: the function may catch it and go on with a value that replay would repeat."""
        if not _in_a_debugger():
            self._first = self._first or error

    def refuse_what_was_caught(self) -> None:
        """Raise the first refusal again if the function caught it and returned."""
        if self._first is not None:
            raise self._first
        self.places.refuse_owed()

    def check(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Refuse an op, or return the tensors that it writes."""
        name = full_name(func)
        if func.namespace in _BETWEEN_RANKS:
            raise self._between_ranks(func)
        if func.namespace in _COLLECTIVES and not self._on_a_mesh:
            raise self._without_a_mesh(func)
        if mode := self._modes.changed(func, kwargs, lambda: tensors_in([*args, *kwargs.values()])):
            raise self._mode_changed(func, *mode)
        if can_draw(func, args, kwargs):
            raise self._random(func)
        if row_of(func).casts:
            self._check_move(func, args, kwargs)
        if name in _FROM_THE_STORAGE and storage_key(args[0]) in self._protected:
            raise self._from_the_storage(func)
        if name in _MEMORY and _jiterated():
            raise self._launched_directly()
        written = written_arguments(func, args, kwargs)
        self.places.check(func, args, kwargs, written)
        if written and reads_what_it_writes(func, args, kwargs, written):
            raise self._reads_what_it_writes(func)
        for tensor in written:
            owner = self._protected.get(storage_key(tensor))
            if owner is not None and storage_key(tensor) not in self._copied:
                raise self._mutation(func, owner, tensor)
        return written

    def is_query(self, func: Any) -> bool:
        """Whether an op computes nothing: it asks for a device, or names a block for a profiler."""
        if func.namespace == "profiler" and (optimizer := _torch_optimizer()):
            raise CaptureError.of(
                self._function,
                f"calls `step()` of an optimizer of torch, {optimizer}{at_here()}.",
                why="It writes into parameters of a module, which are not the state's.",
                fix=f"`state = state.apply_gradients(grads)`, of a state with `optimizer=fcg.optim.from_torch("
                f"torch.optim.{optimizer}, lr=...)`, or with an optimizer of `fcg.optim`.",
            )
        return func is torch.ops.prim.device.default or func.namespace == "profiler"

    def _mode_changed(self, func: Any, name: str, before: object, now: object) -> SideEffectError:
        fix = f"set it before the first call and leave it: `{name.removesuffix('()')}` is one for the whole step."
        if isinstance(now, torch.dtype):
            fix = f"say which dtype, `torch.ones(3, dtype={now})`, `x.to({now})`, where the default one is of use."
        return SideEffectError.of(
            self._function,
            "sets a mode of torch for a part of it.",
            rows=[f"{name}  before {before}   now {now}, in {func}{at_here()}"],
            why="A kernel asks for it when it runs: a replay would find the mode around the call.",
            fix=fix,
        )

    def _from_the_storage(self, func: Any) -> CaptureError:
        return CaptureError.of(
            self._function,
            f"calls `{func.overloadpacket}`.",
            rows=[f"{func}{at_here()}"],
            why="It counts from the beginning of a storage, and in a replay a leaf begins elsewhere in its own.",
            fix="read by `torch.as_strided(x, ...).clone()`; write by `y = x.clone()` and "
            "`torch.as_strided(y, ...).copy_(z)`.",
        )

    def _launched_directly(self) -> CaptureError:
        return CaptureError.of(
            self._function,
            f"launches a kernel of `torch.cuda.jiterator`{at_here()}.",
            why="It is no op: a trace would launch it, on tensors without memory, and a replay could not.",
            fix="write it with ops of torch; or wrap it in an op of your own, `torch.library.custom_op`.",
        )

    def _reads_what_it_writes(self, func: Any) -> CaptureError:
        return CaptureError.of(
            self._function,
            "writes elements that the same call reads for others.",
            rows=[f"{func}{at_here()}"],
            why="A kernel may read them before or after it writes them; torch itself raises where it can tell.",
            fix="read a copy: `y[:, 1:] += y[:, :-1].clone()`.",
        )

    def _between_ranks(self, func: Any) -> CaptureError:
        return CaptureError.of(
            self._function,
            f"talks to other ranks by {func}{at_here()}.",
            why="What works in place on memory of a trace, or waits for one rank alone, has no place in a graph.",
            fix="`fcg.sharding.mean(value)` or `sum` over the ranks of its state, `fcg.sharding.gather(leaf)` for a "
            "leaf; stages of a pipeline send by `fcg.sharding.pipeline(mesh, ...)`.",
        )

    def _without_a_mesh(self, func: Any) -> CaptureError:
        return CaptureError.of(
            self._function,
            f"talks to other ranks by {func}{at_here()}, and its state is on no mesh.",
            why="Nothing would see to it that all ranks take part, with values of one shape: they would wait for ever.",
            fix="make the state one of all ranks, `TrainState.create(..., sharding=fcg.sharding.zero(mesh, stage=1))`; "
            "in the step `fcg.sharding.mean(value)` or `sum`. For a rank's own pieces, "
            "`state = fcg.sharding.from_local(mesh, tree)`.",
        )

    def foreign(self, call: Any, tensor: Tensor, *, written: bool = False) -> ForeignTensorError:
        """Return the error for a tensor that the trace does not know."""
        name, fix = self._name_of(tensor)
        return ForeignTensorError.of(
            self._function,
            f"{'writes' if written else 'reads'} a tensor that is in neither the state nor the inputs.",
            rows=[f"{name}  {BufferSpec.of(tensor)} in {call}{at_here()}".strip()],
            why="Replay would write to that address after the tensor is freed or replaced."
            if written
            else "Replay would keep reading that address after the tensor is freed or replaced.",
            fix=module_fix(tensor) or (_WRITE_FIX if written else fix or read_fix(name, tensor)),
        )

    def returned(self, path: str, tensor: Tensor) -> ForeignTensorError:
        """Return the error for a result that the trace does not know."""
        name, fix = self._name_of(tensor)
        return ForeignTensorError.of(
            self._function,
            "returns a tensor that is in neither the state nor the inputs.",
            rows=[f"{path}  {BufferSpec.of(tensor)}" + (f"   which is {name}" if name else "")],
            why="Replay would return the same memory each time.",
            fix=fix or read_fix(name, tensor),
        )

    def _name_of(self, tensor: Tensor) -> tuple[str, str]:
        """Return a tensor's name in the code, such as ``W``, and the fix if an object owns it; or ""."""
        name, way = way_to(tensor, self._code)
        owner = next((value for value in way if owns(value, tensor)), None)
        if owner is not None:
            return name, owned_fix(name, type(owner).__name__)
        if way and not isinstance(way[-1], dict | list | tuple) and opened(way[-1]):
            return name, read_fix(name.rpartition(".")[0], tensor)  # the others of its tensors are read next
        return name, ""

    def foreign_array(self, tensor: Tensor) -> ForeignTensorError:
        """Return the error for a tensor that shares its memory with a numpy array or a buffer."""
        frame = user_frame()
        fix = (
            "pass it as an input; what numpy draws, draw with torch, `torch.rand(shape) < p`, which has a key in a "
            "module; a table that never changes can be a literal, `torch.tensor(array.tolist())`"
        )
        return ForeignTensorError.of(
            self._function,
            "reads an array of numpy that is in neither the state nor the inputs.",
            rows=[f"{BufferSpec.of(tensor)}{at_here()}"],
            why="What the array holds now would be used for ever.",
            fix=f"{fix if frame is None else in_place_fix(frame, fix)}.",
        )

    def gradient_read(self) -> SideEffectError:
        """Return the error for a gradient that nothing has left on a tensor."""
        return SideEffectError.of(
            self._function,
            "clips `.grad` of a tensor, and there is nothing.",
            rows=[f"at {here()}"] if here() else [],
            why="Gradients are values: nothing leaves them on the parameters.",
            fix="use what `value_and_grad` returned; `fcg.optim.chain(fcg.optim.clip_by_global_norm(1.0), ...)` clips "
            "in the update.",
        )

    def data_assigned(self) -> ReadOnlyError:
        """Return the error for a tensor whose memory was replaced behind the dispatcher's back."""
        return ReadOnlyError.of(
            self._function,
            "exchanges the memory of a tensor (`.data = ...`, `swap_tensors`).",
            rows=[f"at {here()}"] if here() else [],
            why="No kernel does it, so a replay would not repeat it.",
            fix="write the values, `x.data.copy_(new)`; or bind the new tensor to a name of its own and return that.",
        )

    def host_read(
        self,
        reason: str,
        call: Any = "",
        owner: str = "",
        fix: str = "",
        *,
        tensors: Sequence[Tensor] = (),
        inputs: Sequence[str] = (),
        drawn: bool = False,
    ) -> HostSyncError:
        """Return the error for a value needed on the host, worded for the line that asks for it.

        Args:
          reason: What happens, as a verb phrase.
          call: The op.
          owner: Name of the argument that is read, if any.
          fix: What to do; by default, what suits the line.
          tensors: What the op is given.
          inputs: Names of the inputs that decide on a shape, if nothing else does.
          drawn: Whether the value is drawn at random.
        """
        refuse_anomaly_mode(self._function)  # asks for values itself
        frame = user_frame()
        masks = [one.ndim for one in tensors[1:] if one.dtype in (torch.bool, torch.uint8)]
        axes = (tensors[0].ndim, masks[0]) if masks and "index" in str(call) else None
        what, spelled = sync_fix(frame, axes=axes, drawn=drawn) if frame is not None else ("", "")
        fix = fix or spelled
        if inputs:
            names = " and ".join(f"`{name}`" for name in inputs)
            them = "never changes, close over it and declare it"
            if len(inputs) > 1:
                them = "never change, close over them and declare them"
            fix = f"{fix or _DECIDE_OUTSIDE}; if {names} {them}, `constants=`"
        elif owner.isidentifier() and "shape" not in reason:  # what was passed may have been a Python flag
            else_fix = fix or _DECIDE_OUTSIDE
            fix = f'if `{owner}` is a Python value that chooses code, `static_argnames=("{owner}",)`; else {else_fix}'
        shown = f"{call} (from {what})" if call and what else str(call or what)
        return host_sync(self._function, reason, f"{shown}{at_here()}", fix)

    def _random(self, func: Any) -> ImplicitRandomnessError:
        return ImplicitRandomnessError.of(
            self._function,
            "draws random numbers from a generator that is not in the state.",
            rows=[f"{func}{at_here()}"],
            why="Replay would draw from a generator that nobody manages, or the same numbers each time.",
            fix=keyed_fix(user_frame())
            or "draw from a key: `key = fcg.random.fold_in(state.key, state.step)`, then "
            "`fcg.random.dropout(key, x, p)`, `normal`, `uniform`, `bernoulli`, ...",
        )

    def _mutation(self, func: Any, owner: str, tensor: Tensor) -> ReadOnlyError:
        pure = module_fix(tensor)
        if pure:
            copies = "buffers = {name: b.clone() for name, b in buffers.items()}"
            pure = f"{pure.removesuffix('.')}; or run it on copies, `{copies}`, and return these in the new state."
        return ReadOnlyError.of(
            self._function,
            f"writes in place into `{owner}`.",
            rows=[f"{func}{at_here()}"],
            why="A step is a pure function: warm-up and replay would see different values than the eager run.",
            fix=(registered_fix(owner) if any(owner == name for name, _ in self._fixed.values()) else "")
            or pure
            or copy_fix(user_frame(), owner)
            or "compute a new tensor (`x = x + noise`) and return it in the new state"
            + (f", `state.replace({field}=...)`." if (field := _field(owner)) else "."),
        )

    def _check_move(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        source = next(tensors_in(list(args)), None)
        target = argument(func, "device", args, kwargs)
        if func is torch.ops.aten.copy_.default:
            source, target = args[1], args[0].device
        if source is None or target is None or torch.device(target).type == source.device.type:
            return
        if source.device.type == "cuda":
            raise self.host_read("copies a tensor to the host", func)


def _field(owner: str) -> str:
    """Return the field that a leaf of a state is in, as ``params`` of ``state.params['w']``; "" in other trees."""
    found = re.match(r"\w+\.(\w+)", owner)
    return found[1] if found else ""
