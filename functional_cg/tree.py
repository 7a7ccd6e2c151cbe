"""Pytrees: nested containers with tensors as leaves.

Dicts are flattened and compared by sorted key, so insertion order never affects whether structures match; a rebuilt
dict keeps its insertion order. ``None`` is a node without leaves, as in JAX; a ``torch.Size`` is a leaf. Types
registered with ``torch.utils._pytree`` are nodes here too.

Leaves and structure:

  flatten             the leaves of a tree, in flat order, and its treedef
  flatten_with_path   the same, each leaf with its key path
  unflatten           a tree from its treedef and leaves
  leaves              the leaves alone
  map                 apply a function to the leaves of one or several trees of one structure
  stack               stack trees leaf by leaf: the states of many models become one
  take                a member of such a stack, or some of them
  at                  replace what ``lambda t: t.params["w"]`` selects, functionally

Your own nodes:

  register_dataclass  make a dataclass a pytree node
  static              declare a field that is part of the structure, not a leaf

Types and messages:

  Treedef             structure of a tree without its leaves
  KeyPath             where a leaf is; a tuple of keys
  path_string         a key path as a Python expression: ``state.params['w']``
  structure_diff      where two structures differ, one line each
"""

from __future__ import annotations

import typing as _typing

from .names import listed as _listed
from .names import missing as _missing
from .pytree.nodes import register_dataclass as register_dataclass
from .pytree.nodes import static as static
from .pytree.treedef import KeyPath as KeyPath
from .pytree.treedef import Treedef as Treedef
from .pytree.treedef import path_string as path_string
from .pytree.treedef import structure_diff as structure_diff
from .pytree.trees import at as at
from .pytree.trees import flatten as flatten
from .pytree.trees import flatten_with_path as flatten_with_path
from .pytree.trees import leaves as leaves
from .pytree.trees import map as map
from .pytree.trees import stack as stack
from .pytree.trees import take as take
from .pytree.trees import unflatten as unflatten

if not _typing.TYPE_CHECKING:  # a type checker would let any name pass
    __getattr__, __dir__ = _missing(__name__), _listed(__name__)
