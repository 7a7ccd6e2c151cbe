"""Which leaves are gathered together: a pure function of names and sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..tree import KeyPath

__all__ = ["buckets", "layer_of"]

_NUMBER = re.compile(r"^(.*?\.)?\d+(\.|$)")


def layer_of(path: KeyPath) -> str:
    """The layer that a leaf belongs to: its key path up to the last number in it, ``['h.3.']`` or ``['blocks'][3]``.

    Example:
      >>> from functional_cg import tree
      >>> from functional_cg.sharding.plan import layer_of
      >>> paths = tree.flatten_with_path({"h.3.attn.weight": 0, "blocks": [{"w": 1}], "wte": 2})[0]
      >>> [layer_of(path) for path, _ in paths]
      ["['blocks'][0]", "['h.3.']", '']
    """
    text = ""
    found = ""
    for key in path:
        name = getattr(key, "key", None)
        match = _NUMBER.match(name) if isinstance(name, str) else None
        if match:
            found = f"{text}[{match.group(0)!r}]"
        text += str(key)
        if hasattr(key, "idx") or isinstance(name, int):
            found = text
    return found


def buckets(layers: Sequence[str], nbytes: Sequence[int], limit: int) -> list[int]:
    """A bucket for each leaf.

    Leaves of one layer stay together as far as the limit allows; leaves of no layer, such as embeddings, are cut by
    size alone. Buckets of different layers are joined while they fit: many small layers cost one collective.

    Args:
      layers: Layer of each leaf; empty for none.
      nbytes: Size of each leaf.
      limit: Bytes of a bucket; a leaf that is larger has one of its own.
    Returns:
      The number of its bucket for each leaf, counted from 0.
    """
    members: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        members.setdefault(layer, []).append(i)
    out = [0] * len(layers)
    number, filled = -1, limit + 1
    for layer, leaves in members.items():
        whole = sum(nbytes[i] for i in leaves)
        if filled + whole > limit or not layer:  # the next layer, or a cut by size, begins a bucket
            filled = limit + 1
        for i in leaves:
            if filled + nbytes[i] > limit:
                number, filled = number + 1, 0
            out[i] = number
            filled += nbytes[i]
        if not layer:
            filled = limit + 1
    return out
