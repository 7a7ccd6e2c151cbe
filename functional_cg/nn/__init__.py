"""Modules as pure functions: ``apply, params, buffers = from_module(model)``."""

from __future__ import annotations

from .module import Apply, from_module

__all__ = ["Apply", "from_module"]
