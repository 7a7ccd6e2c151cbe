"""The judges by name."""

from __future__ import annotations

from types import MappingProxyType

from tests.judges import opinfo

__all__ = ["JUDGES"]

# Each has `cases(device)`, the names of its cases, and `run(case, lowering, device)`, which yields rows.
JUDGES = MappingProxyType({"opinfo": opinfo})
