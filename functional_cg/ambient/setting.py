"""The setting in which a step runs, and checks for modes in which it cannot."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CaptureError
from ..shards.mesh import Mesh
from ..tensors.recorded.ctc import ctc_loss
from ..tensors.recorded.cumulative import CUMULATIVE
from ..tensors.recorded.higher_order import associative_scan, flex_attention
from ..tensors.recorded.one_hot import one_hot
from ..tensors.recorded.packed import PACKED
from .modes import DEVICES

__all__ = [
    "AsTraced",
    "backward_number",
    "canonical",
    "current_mesh",
    "default_device",
    "diverted",
    "foreign_function_modes",
    "in_a_backward",
    "inside_a_step",
    "is_constant",
    "refuse_anomaly_mode",
    "refuse_foreign_modes",
    "refuse_reentrant_checkpoint",
]

# Torch's functions that read values on the host, or take functions -> the same by calls that a trace can record.
_AS_CALLS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        F.ctc_loss: ctc_loss,
        torch.ctc_loss: ctc_loss,
        torch.ops.higher_order.associative_scan: associative_scan,
        torch.ops.higher_order.flex_attention: flex_attention,
        F.one_hot: one_hot,
        **PACKED,
        **CUMULATIVE,
    }
)
_NEAR = 6  # frames from the grad mode's setter up to the checkpoint


class _InStep(BaseTorchFunctionMode):
    """On while a step runs, traced or eager; modules such as MHA take another path under a mode.

    Attributes:
      mesh: Mesh of the step's states; None if they lie on none.
      constants: Ids of the declared constants: no gradient with respect to them is of use.
      casts_kept: Whether autocast may have kept a cast: the step itself has turned its cache on.
    """

    def __init__(self, mesh: Mesh | None, constants: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.mesh = mesh
        self.constants = frozenset(map(id, constants))
        self.casts_kept = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.casts_kept |= torch.is_autocast_cache_enabled()
        if func in _AS_CALLS:
            return _AS_CALLS[func](*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:  # the first thing that a reentrant checkpoint does
            _refuse_reentrant_checkpoint()
        return super().__torch_function__(func, types, args, kwargs)


class AsTraced(TorchDispatchMode):
    """Makes torch choose the kernels that it chooses in a trace.

    For some ops torch checks whether a dispatch mode is on, as in a trace, and then computes differently:
    singular values, nuclear norms and the gradient of ``prod`` differ in their last bits. It costs a Python
    call per op.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def _refuse_reentrant_checkpoint() -> None:
    frame = inspect.currentframe()
    for _ in range(_NEAR):
        frame = frame and frame.f_back
        if frame and frame.f_code is checkpoint.CheckpointFunction.forward.__code__:
            refuse_reentrant_checkpoint("")


def refuse_reentrant_checkpoint(name: str) -> None:
    """Raise for a reentrant checkpoint, which differentiates only its own arguments.

    Args:
      name: Name of the function or the module.
    Raises:
      CaptureError: Always.
    """
    raise CaptureError.of(
        name,
        "calls `torch.utils.checkpoint` with `use_reentrant=True`.",
        why="It differentiates its own arguments only: the gradient of what its function closes over, or gets "
        "in a dict, would be zero.",
        fix="`checkpoint(fn, *args, use_reentrant=False)`; in transformers, `model.gradient_checkpointing_enable("
        '{"use_reentrant": False})`.',
    )


@contextlib.contextmanager
def canonical(mesh: Mesh | None = None, constants: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Enter the setting in which a step runs, traced or eager, regardless of the caller's modes.

    The caller's grad mode and autocast do not apply; its inference mode has been left already. Autograd records, as
    it does where the function is called by itself. The autocast cache is off (it would make a weight's gradient
    depend on how often the weight was cast), autograd stays on the calling thread, scripted functions run call by
    call (specialised to what they have seen, they refuse the tensors of a trace), and a function mode is on, since
    modules such as ``MultiheadAttention`` take another path under one.

    Args:
      mesh: Mesh of the step's states; None if they lie on none.
      constants: Declared constants.
    """
    mode = _InStep(mesh, constants)
    call_by_call = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False), call_by_call:
        with mode, _without_autocast(mode):
            yield


@contextlib.contextmanager
def _without_autocast(mode: _InStep) -> Iterator[None]:
    """Turn autocast off without ``torch.autocast``, which empties its cache at the end.

    It holds a lock of torch's meanwhile. In a process that was forked while another thread was there, that lock would
    never be free. So the cache is emptied only if something may be in it.
    """
    before = {device: torch.is_autocast_enabled(device) for device in DEVICES}
    cached = torch.is_autocast_cache_enabled()
    torch.autocast_increment_nesting()  # no `torch.autocast` of the step is the outermost one, and empties the cache
    try:
        for device in before:
            torch.set_autocast_enabled(device, False)
        torch.set_autocast_cache_enabled(False)
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for device, enabled in before.items():
            torch.set_autocast_enabled(device, enabled)
        if torch.autocast_decrement_nesting() == 0 and mode.casts_kept:
            torch.clear_autocast_cache()


def inside_a_step() -> bool:
    """Whether a step's function is running on this thread: a step called now becomes part of it."""
    return _step() is not None


def current_mesh() -> Mesh | None:
    """Return the mesh of the step running on this thread; None without a step, or without a mesh."""
    step = _step()
    return None if step is None else step.mesh


def is_constant(tensor: torch.Tensor) -> bool:
    """Whether the step running on this thread, if any, has declared a tensor a constant."""
    step = _step()
    return step is not None and id(tensor) in step.constants


def _step() -> _InStep | None:
    modes = _get_current_function_mode_stack()  # private to torch
    return next((mode for mode in reversed(modes) if isinstance(mode, _InStep)), None)


def default_device() -> torch.device:
    """Return the device of new tensors; torch's own getter creates a tensor to find out."""
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return modes[-1].device if modes else torch.device("cpu")


def foreign_function_modes() -> list[str]:
    """Name the active function modes, outermost first, except those of a default device or a step."""
    modes = _get_current_function_mode_stack()  # private to torch
    return [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext | _InStep)]


def backward_number() -> int:
    """Return a number of autograd's backward that is running on this thread, the innermost; -1 if none is."""
    return torch._C._current_graph_task_id()  # private; test_keys notices a change


def in_a_backward() -> bool:
    """Whether autograd's backward is running on this thread, as when a checkpoint recomputes."""
    return backward_number() != -1


def diverted() -> bool:
    """Whether a call made now, under a dispatch mode, becomes part of another step or is refused."""
    return inside_a_step() or _under_fake_mode()


def _under_fake_mode() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def refuse_foreign_modes(function: str) -> None:
    """Raise under a transform of ``torch.func`` or a fake mode: neither sees what a replay computes.

    Raises:
      CaptureError: Naming the function to transform instead.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:  # private, as is the next one
        raise CaptureError.of(
            function,
            "is called under a transform of `torch.func`, such as `grad` or `vmap`; the state is unchanged.",
            why="A transform does not see what a replay computes: gradients would be zeros.",
            fix="transform inside of the step, `fcg.value_and_grad(loss_fn)(params)` or `torch.func.vmap(fn)(x)`; "
            f"or transform the Python function, `{function}.__wrapped__`.",
        )
    if _under_fake_mode():
        raise CaptureError.of(
            function,
            "is called under a `FakeTensorMode`; the state is unchanged.",
            why="There are no values to compute with.",
            fix=f"leave the mode before the call; `{function}.lower(...)` plans a call without running it.",
        )


def refuse_anomaly_mode(function: str) -> None:
    """Raise if anomaly detection checks for NaN while a step is traced.

    Raises:
      CaptureError: Naming the search for the call.
    """
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise CaptureError.of(
            function,
            "is traced under `torch.autograd.detect_anomaly()`; the state is unchanged.",
            why="It looks at values, which a trace does not have, and a replay would not look again.",
            fix=f"leave it out, and `{function}.find_nonfinite(...)` names the first call that makes a NaN; or run one "
            f"step under it on real values, `{function}.eager(...)`.",
        )
