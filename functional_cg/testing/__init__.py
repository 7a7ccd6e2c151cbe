"""Tests for steps: an adversarial replay, laws to assert, and hypothesis strategies (opt-in imports).

Two modules need hypothesis and are imported by their own names: ``functional_cg.testing.strategies``, and
``functional_cg.testing.stateful``, whose ``machine`` does with a step what a loop does between two calls.
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
