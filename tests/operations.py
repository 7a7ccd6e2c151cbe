"""Operations for generated losses: functions of a value, another one, and a weight.

All are [rows, width], in f32 or bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["COMMON"]

COMMON: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "matmul": lambda a, b, w: a @ w.to(a.dtype),
        "gelu": lambda a, b, w: F.gelu(a),
        "silu": lambda a, b, w: F.silu(a),
        "tanh": lambda a, b, w: torch.tanh(a),
        "exp": lambda a, b, w: torch.exp(-a.square()),
        "softmax": lambda a, b, w: torch.softmax(a, -1),
        "bf16": lambda a, b, w: a.bfloat16(),
        "f32": lambda a, b, w: a.float(),
        "add": lambda a, b, w: a + b,
        "mul": lambda a, b, w: a * b,
        "addcmul": lambda a, b, w: torch.addcmul(a, a, b.to(a.dtype)),
        "row": lambda a, b, w: a * w[0].to(a.dtype),
        "view": lambda a, b, w: a.unflatten(0, (4, -1)).flatten(0, 1),
        "transpose": lambda a, b, w: torch.sin(a.t()).t(),
    }
)
