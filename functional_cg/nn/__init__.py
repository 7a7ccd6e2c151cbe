"""Modules as pure functions (``from_module``), memory-efficient cross-entropy, and fp8 linear layers.

Modules:

  from_module           a module's forward as a pure function, and copies of its parameters and buffers
  Apply                 that function: ``apply(params, buffers, *args) -> (out, new_buffers)``

Layers that save memory or time:

  linear_cross_entropy  cross-entropy of a linear layer without the logits in memory
  fp8_linear            a linear layer in fp8, accumulated in f32
  Fp8Scaling            its delayed scales; part of the state
"""

from __future__ import annotations

import typing as _typing

from ..names import listed as _listed
from ..names import missing as _missing
from .cross_entropy import linear_cross_entropy as linear_cross_entropy
from .fp8 import Fp8Scaling as Fp8Scaling
from .fp8 import fp8_linear as fp8_linear
from .module import Apply as Apply
from .module import from_module as from_module

if not _typing.TYPE_CHECKING:  # a type checker would let any name pass
    __getattr__, __dir__ = _missing(__name__), _listed(__name__)
