"""Testing tools for steps: an adversarial replay simulator, assertions and hypothesis strategies.

The package is an opt-in import. Two of its modules need hypothesis and are imported separately:
``functional_cg.testing.strategies``, and ``functional_cg.testing.stateful``, whose ``machine`` does to a step what a
training loop does between two calls.
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
