"""Give numbered blocks of a model that are alike, ``h.0`` to ``h.11``, one name: ``h.0-11``."""

from __future__ import annotations

from collections.abc import Collection, Set
from itertools import groupby

__all__ = ["folded"]

Path = tuple[str, ...]


def folded(paths: Collection[str]) -> dict[str, str]:
    """Return a name for each path of a module; numbered siblings with the same submodules share one.

    Siblings without submodules keep names of their own: they may be different layers of a ``Sequential``.

    Example:
      >>> from functional_cg.step.profile.folding import folded
      >>> folded(["h.0.fc", "h.0.act", "h.1.fc", "h.1.act", "out.0", "out.1"])["h.1.fc"]
      'h.0-1.fc'
      >>> folded(["h.0.fc", "h.0.act", "h.1.fc", "h.1.act", "out.0", "out.1"])["out.1"]
      'out.1'
    """
    return {
        ".".join(path): ".".join(name) for path, name in _named({tuple(p.split(".")) for p in paths}).items()
    }


def _named(paths: Set[Path]) -> dict[Path, Path]:
    below: dict[str, set[Path]] = {}
    for path in paths:
        if path:
            below.setdefault(path[0], set()).add(path[1:])
    alike: dict[tuple[frozenset[Path], bool], list[str]] = {}
    for head, tails in below.items():
        numbered = head.isdecimal() and len(tails) > 1
        alike.setdefault((frozenset(tails), numbered), []).append(head)
    names: dict[Path, Path] = {(): ()} if () in paths else {}
    for (rests, numbered), heads in alike.items():
        inner = _named(rests)
        for head in heads:
            name = _ranges(sorted(map(int, heads))) if numbered else head
            names |= {(head, *rest): (name, *inner[rest]) for rest in rests}
    return names


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as ranges: ``0-3,5``."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)
