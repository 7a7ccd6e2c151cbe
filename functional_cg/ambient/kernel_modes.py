"""Modes of torch that a kernel reads when it runs: a replay finds those around the call, not those of the trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .modes import SWITCH

__all__ = ["KernelModes", "precision_of"]

_PRODUCTS = re.compile(r"mm|mv|dot|linear|attention|conv|rnn|lstm|gru")
_CONVOLUTIONS = re.compile(r"conv|cudnn|rnn")


def precision_of(backend: str, of: str) -> str:
    """Return in which precision a backend of torch multiplies float32."""
    name = torch._C._get_fp32_precision_getter(backend, of)
    return "ieee" if name == "none" else name  # "none" is "ieee" that was never set


# Name -> (what reads it, of what, the ops that ask for it; all of them if None).
_MODES: Mapping[str, tuple[Callable[..., object], tuple[str, ...], re.Pattern[str] | None]] = (
    MappingProxyType(
        {
            "torch.get_default_dtype()": (torch.get_default_dtype, (), None),
            "torch.are_deterministic_algorithms_enabled()": (
                torch._C._get_deterministic_algorithms,
                (),
                None,
            ),
            "torch.backends.cuda.matmul.fp32_precision": (precision_of, ("cuda", "matmul"), _PRODUCTS),
            "torch.backends.mkldnn.matmul.fp32_precision": (precision_of, ("mkldnn", "matmul"), _PRODUCTS),
            "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
                torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
                (),
                _PRODUCTS,
            ),
            "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
                torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
                (),
                _PRODUCTS,
            ),
            "torch.backends.cuda.matmul.allow_fp16_accumulation": (
                torch._C._get_cublas_allow_fp16_accumulation,
                (),
                _PRODUCTS,
            ),
            "torch.backends.mkldnn.enabled": (torch._C._get_mkldnn_enabled, (), _PRODUCTS),
            "torch.backends.cudnn.conv.fp32_precision": (precision_of, ("cuda", "conv"), _CONVOLUTIONS),
            "torch.backends.mkldnn.conv.fp32_precision": (precision_of, ("mkldnn", "conv"), _CONVOLUTIONS),
            "torch.backends.cudnn.enabled": (torch._C._get_cudnn_enabled, (), _CONVOLUTIONS),
            "torch.backends.cudnn.benchmark": (torch._C._get_cudnn_benchmark, (), _CONVOLUTIONS),
            "torch.backends.cudnn.deterministic": (torch._C._get_cudnn_deterministic, (), _CONVOLUTIONS),
        }
    )
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
        for (name, (*_, asks)), before, after in zip(_MODES.items(), self._then, now, strict=True):
            if before != after and (asks is None or asks.search(func._schema.name)):
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
