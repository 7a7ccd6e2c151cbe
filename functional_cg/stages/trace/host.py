"""Catch what a step's Python does besides ATen calls: reads, random generators, changed values.

Printing, numpy, pickling and ``.data = `` bypass the dispatcher. A function mode sees them before they happen, on
tensors of the trace and on all others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import constraints, continuous_bernoulli, distribution, geometric
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode

from ...ambient.torch_modes import TORCH_MODES, modes_now
from ...errors import CaptureError, FunctionalCGError, SideEffectError
from ...messages.advice import ADDRESS
from ...messages.guards import compares_in_guard, guard_of, may_swallow
from ...messages.source import at_here, frames, is_user_file
from ..watch.host_reads import HostReads
from ..watch.host_watch import HostWatch
from ..watch.values import shown
from .known import aside_from_modes
from .places import at_a_place
from .rules import Rules

__all__ = ["HostGuard", "refuse_changes", "refuse_moved", "taken_as_valid"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
# Python frames of the methods themselves, between the caller and the mode.
_METHODS = tuple(
    _TORCH + name for name in ("overrides.py", "_tensor.py", "_tensor_str.py", "utils/_contextlib.py")
)

_BY_ELEMENT = "calls Python for each element of a tensor"
_VALUES = "asks for the values of a tensor on the host"
# Name of a tensor method -> what a call of it does.
_READS: Mapping[str, str] = MappingProxyType(
    {
        "__repr__": _VALUES,
        "__format__": _VALUES,
        "__array__": _VALUES,
        "__dlpack__": _VALUES,
        "__reduce_ex__": _VALUES,
        "numpy": _VALUES,
        "tolist": _VALUES,
        "cpu": "copies a tensor to the host",
        "data_ptr": "asks for the address of a tensor on the host",
        "apply_": _BY_ELEMENT,
        "map_": _BY_ELEMENT,
        "map2_": _BY_ELEMENT,
    }
)

# Files that read whether values are valid, and nothing else.
_VALIDATING = frozenset(
    {constraints.__file__, continuous_bernoulli.__file__, distribution.__file__, geometric.__file__}
)
_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
_ENTRY = f"{__package__}.runs"  # calls the user's function
_PLUMBING = frozenset({"torch.overrides", "torch.utils._python_dispatch"})
_OF_VALUES = frozenset({"__repr__", "__format__", "__array__", "numpy", "tolist"})


class HostGuard(TorchFunctionMode):
    """Refuses operations that read or replace a tensor without an ATen call.

    Args:
      rules: The rules of the trace, which word the errors.
      value_of: Returns what a tensor of the trace holds; None if that is not known.
    """

    def __init__(self, rules: Rules, value_of: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self._rules, self._value_of = rules, value_of

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            return self._call(func, args, kwargs or {})
        except FunctionalCGError as error:
            self._rules.remember(error)
            raise

    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS and not _called_by_torch(sys._getframe(2)):
            value = self._value_of(args[0]) if name in _OF_VALUES else None
            if value is not None:
                return aside_from_modes(lambda: getattr(value, name)(*args[1:], **kwargs))
            if isinstance(args[0], FakeTensor):
                raise self._rules.host_read(_READS[name], fix=ADDRESS if name == "data_ptr" else "")
            raise self._rules.foreign(name, args[0])
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise self._rules.data_assigned()
        clips = func == _GRADIENT and _caller(sys._getframe(2)) == clip_grad.__file__
        if clips and func(*args) is None:  # torch's clip does nothing then
            raise self._rules.gradient_read()
        if func is Tensor.__deepcopy__:
            return args[0].clone()
        if func is Tensor.item and _only_compares(args[0]) and self._value_of(args[0]) is None:
            number = args[0].reshape(())
            return number if number.dtype is torch.bool else number.double()
        found = at_a_place(func, args, self._call, self._rules.places)
        return func(*args, **kwargs) if found is None else found[0]


def _only_compares(number: Tensor) -> bool:
    """Whether the host asks for a number to compare it, in float64, and raise if that fails."""
    frame = _asking()
    return number.numel() == 1 and not number.is_complex() and frame is not None and compares_in_guard(frame)


def taken_as_valid(func: Any, args: Sequence[Any], call: Callable[..., Any]) -> bool | None:
    """Return what the host is told if it asks for a truth value only to raise; None for any other read.

    A trace takes values as valid. What ``torch.distributions`` validates, an eager run alone does. All other checks
    stay in the program: they raise in a replay as well.

    Args:
      func: The op.
      args: Its arguments.
      call: ``call(op, args, kwargs)`` runs an op.
    """
    if func is not torch.ops.aten._local_scalar_dense.default:
        return None
    frame = _asking()
    if frame is None or _may_go_on(frame):
        return None
    if _validates(frame):
        return True
    guard = guard_of(frame)
    if guard is None:
        return None
    passes, text = guard
    true = args[0] if args[0].dtype is torch.bool else call(torch.ops.aten.ne.Scalar, (args[0], 0), {})
    valid = true if passes else call(torch.ops.aten.logical_not.default, (true,), {})
    call(torch.ops.aten._assert_async.msg, (valid, f"`{text}` raises{at_here()}"), {})
    return passes


def _asking() -> FrameType | None:
    """Return the frame of the code that calls an op, or asks for a value."""
    return next((one for one in frames(sys._getframe(1)) if not _between(one)), None)


def _may_go_on(frame: FrameType | None) -> bool:
    """Whether the step may go on after what a frame raises: then the test decides more than whether to raise."""
    own = takewhile(lambda one: one.f_globals.get("__name__") != _ENTRY, frames(frame))
    return any(not _of_torch_or_ours(one) and may_swallow(one) for one in own)


def _of_torch_or_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "functional_cg")


def _validates(frame: FrameType | None) -> bool:
    """Whether ``torch.distributions`` validates for the user's code."""
    inner = takewhile(lambda one: not is_user_file(one.f_code.co_filename), frames(frame))
    return any(one.f_code.co_filename in _VALIDATING for one in inner)


def _between(frame: FrameType) -> bool:
    """Whether a frame belongs to what runs between the code that asks for a value and the trace."""
    if is_user_file(frame.f_code.co_filename):
        return False
    module = frame.f_globals.get("__name__", "")
    return module in _PLUMBING or module.startswith(("functional_cg.", "torch._"))


def _called_by_torch(frame: FrameType | None) -> bool:
    """Whether torch itself reads, such as for an error message; only reads by user code are refused."""
    return _caller(frame).startswith(_TORCH)


def _caller(frame: FrameType | None) -> str:
    """Return the file that calls a method of a tensor; between are the method's own frames and other modes."""
    others = (one.f_code.co_filename for one in frames(frame) if not _is_ours(one))
    return next((name for name in others if not name.startswith(_METHODS)), "")


def _is_ours(frame: FrameType) -> bool:
    ours = str(frame.f_globals.get("__name__", "")).startswith("functional_cg.")
    return ours and not is_user_file(frame.f_code.co_filename)


def refuse_changes(function: str, modes: Sequence[object], watched: HostWatch, reads: HostReads) -> None:
    """Raise if the traces changed a mode, or the last trace changed a watched value or advanced an iterator.

    A value that only the first trace sets up (a flag, a number computed once) is not a change.

    Args:
      function: Name of the user's function.
      modes: The modes of torch before the first trace.
      watched: What the last trace read.
      reads: How it read that.
    Raises:
      SideEffectError: Naming each change.
    """
    pairs = zip(TORCH_MODES, modes, modes_now(), strict=True)
    rows = watched.differences() + [(mode.name, old, new) for mode, old, new in pairs if old != new]
    if reads.asked_types:
        raise CaptureError.of(
            function,
            "asks for the type of a tensor.",
            rows=[str(site) for site in dict.fromkeys(reads.asked_types)],
            why="The tensors of a trace are of another class: the answer would be baked in, and wrong.",
            fix="`isinstance(x, torch.Tensor)`; to look at it, `print(type(x))`, by itself.",
        )
    if reads.threads:
        raise SideEffectError.of(
            function,
            "starts a thread.",
            rows=[str(site) for site in dict.fromkeys(reads.threads)],
            why="It would run when the step is traced, not when it is replayed; and nobody sees what it reads.",
            fix="call its function in the step itself; or start it in the loop around the step.",
        )
    advanced = reads.taken_from()
    if advanced:
        raise SideEffectError.of(
            function,
            "takes from what goes on from call to call, or adds to it.",
            rows=[f"{name}, at {site}" for name, site in advanced],
            why="Python runs when the step is traced, not when it is replayed: every call would get the same.",
            fix="do it in the loop around the step: what is taken is an input, what is added a metric; random "
            "numbers come from a key in the state, `fcg.random`.",
        )
    refuse_moved(function, rows)


def refuse_moved(function: str, rows: Sequence[tuple[str, object, object]]) -> None:
    """Raise if traces have changed values of the host.

    Args:
      function: Name of the user's function.
      rows: (name, before, after) of each value.
    Raises:
      SideEffectError: Naming each value.
    """
    if rows:
        raise SideEffectError.of(
            function,
            f"changes {'a value' if len(rows) == 1 else f'{len(rows)} values'} of the host while it runs.",
            rows=[f"{name}  before {shown(old)}   after {shown(new)}" for name, old, new in rows],
            why="Python runs when the step is traced, not when it is replayed: it would change no more.",
            fix="count in the state (`state.step`), or do it in the loop around the step.",
        )
