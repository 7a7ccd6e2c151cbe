"""Tests for steps: an adversarial replay, laws to assert, and hypothesis strategies (opt-in imports).

``functional_cg.testing.strategies`` needs hypothesis and is imported by its own name.
"""

from __future__ import annotations

from .laws import (
    assert_no_alias,
    assert_pure,
    assert_replay_equals_eager,
    assert_trees_all_close,
    assert_trees_all_equal,
)
from .simulator import Simulator

__all__ = [
    "Simulator",
    "assert_no_alias",
    "assert_pure",
    "assert_replay_equals_eager",
    "assert_trees_all_close",
    "assert_trees_all_equal",
]
