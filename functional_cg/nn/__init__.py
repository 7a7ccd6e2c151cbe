"""Modules as pure functions (``from_module``), memory-efficient cross-entropy, and fp8 linear layers."""

from __future__ import annotations

import typing as _typing

from ..names import no_such_name as _no_such_name
from .cross_entropy import linear_cross_entropy
from .fp8 import Fp8Scaling, fp8_linear
from .module import Apply, from_module

__all__ = ["Apply", "Fp8Scaling", "fp8_linear", "from_module", "linear_cross_entropy"]


if not _typing.TYPE_CHECKING:  # a type checker would let any name pass

    def __getattr__(name: str) -> object:
        raise _no_such_name(__name__, name, __all__)
