"""Modules as pure functions, ``apply, params, buffers = from_module(model)``, and losses made for a step's memory."""

from __future__ import annotations

from .cross_entropy import linear_cross_entropy
from .module import Apply, from_module

__all__ = ["Apply", "from_module", "linear_cross_entropy"]
