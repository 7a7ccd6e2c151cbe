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

Keys:

  key               a key from a seed
  fold_in           a key from a key and a number, such as the step count
  split             several keys from one
  keyed             a function that draws with torch's random ops, as a function of a key

Draws:

  uniform           numbers from [low, high)
  normal            normal distribution; :func:`truncated_normal` between two bounds
  truncated_normal  standard normal distribution between ``low`` and ``high``
  bernoulli         booleans that are true with probability ``p``
  randint           integers from low to high - 1
  categorical       indices with probabilities ``softmax(logits)``
  permutation       the numbers 0 to n - 1 in a random order
  exponential       exponential distribution
  gamma, beta       gamma and beta distribution; differentiable, as is :func:`dirichlet`
  dirichlet         shares that sum to 1
  poisson           counts
  dropout           zeros with probability ``p``, the rest scaled up
  keep_mask         the mask of ``dropout``

Bits:

  bits              words of 32 random bits
  decompose_random_bits   the generator as plain ATen ops, for compilers
"""

import typing as _typing

from ..names import listed as _listed
from ..names import missing as _missing
from .distributions import beta as beta
from .distributions import dirichlet as dirichlet
from .distributions import exponential as exponential
from .distributions import gamma as gamma
from .distributions import poisson as poisson
from .distributions import truncated_normal as truncated_normal
from .keyed import keyed as keyed
from .samplers import bernoulli as bernoulli
from .samplers import categorical as categorical
from .samplers import dropout as dropout
from .samplers import fold_in as fold_in
from .samplers import keep_mask as keep_mask
from .samplers import key as key
from .samplers import normal as normal
from .samplers import permutation as permutation
from .samplers import randint as randint
from .samplers import split as split
from .samplers import uniform as uniform
from .words import bits as bits
from .words import decompose_random_bits as decompose_random_bits

if not _typing.TYPE_CHECKING:  # a type checker would let any name pass
    __getattr__, __dir__ = _missing(__name__), _listed(__name__)
