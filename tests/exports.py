"""The public names of a module: what it imports under its own name, ``from .x import name as name``.

Public modules have no ``__all__``: ``help()`` would show the whole manual of each name in it. Their docstrings have an
index instead.
"""

from __future__ import annotations

import ast
import inspect
import re
from types import ModuleType

__all__ = ["exports", "index"]


def exports(module: ModuleType) -> list[str]:
    """List the names that a module exports, sorted."""
    imports = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ImportFrom)]
    return sorted(alias.name for node in imports for alias in node.names if alias.asname == alias.name)


def index(module: ModuleType) -> list[str]:
    """List the names in the index of a module's docstring, sorted."""
    entries = re.findall(r"^  (?! )(.+?)(?:,?$|  )", module.__doc__ or "", re.MULTILINE)
    return sorted(name for entry in entries for name in entry.split(", "))
