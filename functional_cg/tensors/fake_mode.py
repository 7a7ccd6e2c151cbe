"""Torch's fake mode, made to give the same results in every run and to raise without logging."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import _disable_current_modes

from .aten import named_arguments
from .kernel_results import KernelResults
from .op_table import row_of

__all__ = ["FakeMode", "aside_on_fakes", "compiler_mode", "without_log"]

# The tangent of a constant. What torch skips for such a tensor, it skips in a replay too; as a fake tensor it would be
# taken for one on the meta device.
_ZERO_TANGENT = torch.ops.aten._efficientzerotensor.default
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_AS_THEY_ARE = frozenset(
    {bool, complex, float, int, str, type(None), torch.dtype, torch.device, torch.layout}
)


class FakeMode(fake_tensor.FakeTensorMode):
    """The mode in which a step is traced: ops compute shapes, strides, dtypes and devices, but no values."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._kernels = KernelResults()

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NOTHING
    ) -> Any:
        """Return what an op would, without values."""
        if isinstance(func, torch._ops.HigherOrderOperator):
            # Below a `triton_op`, the kernels that it wraps. Torch looks rules up by exact type.
            rule = func.python_key_table.get(fake_tensor.FakeTensorMode)
            return NotImplemented if rule is None else rule(self, *args, **kwargs)
        if row_of(func).uncached:
            with fake_tensor.disable_fake_tensor_cache(self):
                return super().dispatch(func, types, args, kwargs)
        if func is _ZERO_TANGENT:
            func = torch.ops.aten.zeros.default
        out = super().dispatch(func, types, args, kwargs)
        out = self._kernels.correct(func, args, kwargs, out)
        return _without_masked(func, args, kwargs, out) if _has_mask(func) else out

    def _prep_args_for_hash(
        self, result: list[object], args: Any, state: Any, id_hashed_objects: list[object]
    ) -> None:
        """Append to the key of a cached result what the result depends on, as torch does, in a fifth of the time.

        Torch takes a tensor apart into some thirty entries; here it is one. That was a third of a trace.
        """
        if isinstance(args, dict):
            super()._prep_args_for_hash(result, args, state, id_hashed_objects)
            return
        if isinstance(args, list | tuple):
            result += (type(args), len(args))
        for arg in args:
            kind = type(arg)
            if kind in _AS_THEY_ARE:
                result += (kind, arg)
            elif kind is fake_tensor.FakeTensor and self._is_dense(arg):
                result.append(_layout(arg))
            elif isinstance(arg, list | tuple):
                self._prep_args_for_hash(result, arg, state, id_hashed_objects)
            else:
                super()._prep_args_for_hash(result, (arg,), state, id_hashed_objects)

    def _is_dense(self, tensor: Any) -> bool:
        """Whether a tensor is of this mode, has no known value, and is described by its layout in memory."""
        ours = tensor.fake_mode is self and tensor.constant is None
        return ours and tensor.layout is torch.strided and not tensor._has_symbolic_sizes_strides

    def forget(self) -> None:
        """Drop torch's own weak references to the tensors of this mode, which may then be swapped."""
        self.fake_tensor_converter.meta_converter.tensor_memo.clear()


def _layout(tensor: Any) -> tuple[object, ...]:
    """Return all that a cached result may depend on of a dense tensor without values."""
    return (
        tensor.dtype, tensor.fake_device, tensor.shape, tensor.stride(), tensor.storage_offset(),
        tensor.untyped_storage().nbytes(), tensor.requires_grad, tensor.is_conj(), tensor.is_neg(),
        tensor.is_inference(), tensor.is_quantized,
    )  # fmt: skip


@cache
def _has_mask(func: Any) -> bool:
    """Whether a call says which of its results it is asked for."""
    schema = func._schema
    written = any(one.alias_info is not None for one in schema.returns)
    return not written and any(one.name == "output_mask" for one in schema.arguments)


def _without_masked(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """Leave out what a call is not asked for, as kernels do; for a batch norm, torch's fake tensors do not."""
    mask = named_arguments(func, args, kwargs)["output_mask"]
    return tuple(one if wanted else None for one, wanted in zip(out, mask, strict=True))


@contextmanager
def without_log() -> Iterator[None]:
    """Stop torch, on this thread, from logging the traceback of a failing op; the op still raises."""
    thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != thread or not str(record.msg).startswith(
            "failed while attempting to run meta"
        )

    fake_tensor.log.addFilter(passes)
    try:
        yield
    finally:
        fake_tensor.log.removeFilter(passes)


@contextmanager
def aside_on_fakes() -> Iterator[Callable[[Tensor], Tensor]]:
    """Run on fake tensors, apart from all modes around; yields what makes a fake tensor like a given one."""
    # Function modes, too: they watch for reads of values.
    with _disable_current_modes(), torch._C.DisableTorchFunction(), FakeMode():
        yield lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)


def compiler_mode() -> fake_tensor.FakeTensorMode:
    """Return a mode as torch's compiler uses it for a graph of tensors of known shapes."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
