"""Testing tools for steps: an adversarial replay simulator, assertions and hypothesis strategies.

The package is imported on first use, `fcg.testing`.

  assert_replay_equals_eager  every replay matches the pure function, bit for bit
  assert_pure                 a step depends on its arguments alone
  assert_no_alias             no two leaves share memory
  assert_trees_all_equal      equal structures, bitwise equal leaves
  assert_trees_all_close      equal structures, close values
  Simulator                   ``graph_step(backend=Simulator())``: a graph's hazards without a GPU

Two of its modules need hypothesis and are imported on first use: ``functional_cg.testing.strategies``, and
``functional_cg.testing.stateful``, whose ``machine`` does to a step what a training loop does between two calls.
"""

from __future__ import annotations

import typing as _typing

from ..names import listed as _listed
from ..names import missing as _missing
from .laws import assert_no_alias as assert_no_alias
from .laws import assert_pure as assert_pure
from .laws import assert_replay_equals_eager as assert_replay_equals_eager
from .laws import assert_trees_all_close as assert_trees_all_close
from .laws import assert_trees_all_equal as assert_trees_all_equal
from .simulator import Simulator as Simulator

if not _typing.TYPE_CHECKING:  # a type checker would let any name pass
    __getattr__, __dir__ = _missing(__name__), _listed(__name__)
