"""Modules as pure functions (``from_module``), memory-efficient cross-entropy, and fp8 linear layers."""

from __future__ import annotations

from .cross_entropy import linear_cross_entropy
from .fp8 import Fp8Scaling, fp8_linear
from .module import Apply, from_module

__all__ = ["Apply", "Fp8Scaling", "fp8_linear", "from_module", "linear_cross_entropy"]
