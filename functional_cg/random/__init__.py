"""Stateless random numbers: a draw is a pure function of a key.

The generator is Philox4x32-10: ten rounds of a keyed bijection turn a 128-bit counter into four 32-bit words
(Salmon, Moraes, Dror, Shaw: *Parallel random numbers: as easy as 1, 2, 3*, SC 2011). Nothing is stored
between draws, so a replayed graph draws new numbers exactly when its key is new.

A key is an ``i64[2]`` tensor of two 32-bit words. Never draw twice from one key: `split` it, `fold_in` a
number, or give each draw its own ``stream``, a number from 0 to 2**63 - 1 that is part of the counter and
costs nothing; a step that draws twice from one key gets a warning. Results live on the key's device. Shapes and
numbers are Python values, checked at the call; no function reads a tensor on the host. All draws come from one
registered op, ``fcg::random_bits``: one node in a trace, and the same bits on CPU and CUDA, in eager and compiled
code. Draws other than uniform ones compute logarithms and the like, whose last bits may differ.
"""

import typing as _typing

from ..names import no_such_name as _no_such_name
from .distributions import beta, dirichlet, exponential, gamma, poisson, truncated_normal
from .keyed import keyed
from .samplers import (
    bernoulli,
    categorical,
    dropout,
    fold_in,
    keep_mask,
    key,
    normal,
    permutation,
    randint,
    split,
    uniform,
)
from .words import bits, decompose_random_bits

__all__ = [
    "bernoulli",
    "beta",
    "bits",
    "categorical",
    "decompose_random_bits",
    "dirichlet",
    "dropout",
    "exponential",
    "fold_in",
    "gamma",
    "keep_mask",
    "key",
    "keyed",
    "normal",
    "permutation",
    "poisson",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
]


if not _typing.TYPE_CHECKING:  # a type checker would let any name pass

    def __getattr__(name: str) -> object:
        raise _no_such_name(__name__, name, __all__)
