"""Modes of torch that a kernel reads when it runs: a replay finds those around the call, not those of the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..tensors.aten import of_another_library
from ..tensors.op_table import row_of
from .modes import SWITCH

__all__ = ["KernelModes", "precision_of"]


def precision_of(backend: str, of: str) -> str:
    """Return in which precision a backend of torch multiplies float32."""
    name = torch._C._get_fp32_precision_getter(backend, of)
    return "ieee" if name == "none" else name  # "none" is "ieee" that was never set


# Name -> (what reads it, of what, the column of the op table that says which ops ask for it; all of them if empty).
_MODES: Mapping[str, tuple[Callable[..., object], tuple[str, ...], str]] = MappingProxyType(
    {
        "torch.get_default_dtype()": (torch.get_default_dtype, (), ""),
        "torch.are_deterministic_algorithms_enabled()": (torch._C._get_deterministic_algorithms, (), ""),
        "torch.backends.cuda.matmul.fp32_precision": (precision_of, ("cuda", "matmul"), "multiplies"),
        "torch.backends.mkldnn.matmul.fp32_precision": (precision_of, ("mkldnn", "matmul"), "multiplies"),
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
            torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
            (),
            "multiplies",
        ),
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
            torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
            (),
            "multiplies",
        ),
        "torch.backends.cuda.matmul.allow_fp16_accumulation": (
            torch._C._get_cublas_allow_fp16_accumulation,
            (),
            "multiplies",
        ),
        "torch.backends.mkldnn.enabled": (torch._C._get_mkldnn_enabled, (), "multiplies"),
        "torch.backends.cudnn.conv.fp32_precision": (precision_of, ("cuda", "conv"), "cudnn"),
        "torch.backends.mkldnn.conv.fp32_precision": (precision_of, ("mkldnn", "conv"), "cudnn"),
        "torch.backends.cudnn.enabled": (torch._C._get_cudnn_enabled, (), "cudnn"),
        "torch.backends.cudnn.benchmark": (torch._C._get_cudnn_benchmark, (), "cudnn"),
        "torch.backends.cudnn.deterministic": (torch._C._get_cudnn_deterministic, (), "cudnn"),
    }
)
_DEFAULT_DTYPE, *_ = _MODES


class KernelModes:
    """The modes as they are now; :meth:`changed` tells which of them an op would find to be others."""

    def __init__(self) -> None:
        with SWITCH:
            self._then = _now()

    def changed(
        self, func: Any, kwargs: Mapping[str, Any], tensors: Callable[[], Iterable[Tensor]]
    ) -> tuple[str, object, object] | None:
        """Return (name, before, now) of a mode that has changed and that an op asks for; None if there is none.

        Args:
          func: The op.
          kwargs: Its named arguments.
          tensors: Returns its tensors.
        """
        if _now() == self._then:
            return None
        with SWITCH:  # another thread may have been in the middle of an op
            now = _now()
        row, may_ask = row_of(func), of_another_library(func)
        for (name, (*_, column)), before, after in zip(_MODES.items(), self._then, now, strict=True):
            if before != after and (may_ask or not column or getattr(row, column)):
                if name != _DEFAULT_DTYPE or _takes_the_default(kwargs, tensors()):
                    return name, before, after
        return None


def _now() -> tuple[object, ...]:
    return tuple([read(*of) for read, of, _ in _MODES.values()])


def _takes_the_default(kwargs: Mapping[str, Any], tensors: Iterable[Tensor]) -> bool:
    """Whether the dtype of a result may be the default one: no argument says another."""
    return kwargs.get("dtype") is None and not any(
        one.is_floating_point() or one.is_complex() for one in tensors
    )
