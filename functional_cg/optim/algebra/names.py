"""Groups leaves by their names in ``fcg.state_dict``, and computes norms under those names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from functional_cg import tree
from functional_cg.checkpoint import names_of
from functional_cg.errors import LayoutError
from functional_cg.optim.algebra.arithmetic import leaf_norms
from functional_cg.optim.algebra.base import Params
from functional_cg.tensors.aten import adds_up

_SHOWN = 5


@dataclass(frozen=True, init=False, repr=False)
class by_name:
    """Assign each leaf a label or flag by the first pattern that matches its name.

    The result maps parameters to a tree like them: use it as ``labels`` of :class:`partition` and :class:`muon`, or as
    ``mask`` of :class:`adamw`, :class:`masked` and :class:`freeze`. Names are those of ``fcg.state_dict(params)``. In a
    pattern, ``*`` matches any text, dots included, ``?`` any character and ``[0-3]`` one of four
    (``fnmatch.fnmatchcase``).

    Attributes:
      patterns: ``{pattern: value}``, tried in order.
      default: Value for leaves that no pattern matches.
    Raises:
      LayoutError: At the first use, if a pattern decides no leaf: it is misspelled, or earlier patterns shadow it.
      TypeError: If ``patterns`` is not a mapping from strings.

    Example:
      >>> import torch
      >>> from functional_cg import tree
      >>> from functional_cg import optim
      >>> groups = optim.by_name(
      ...     {"blocks.0.*": "frozen", "wte": "slow", "*.bias": "no decay", "*norm*": "no decay"}, default="decay"
      ... )
      >>> params = {"wte": 1, "norm": 1, "blocks": [{"up": {"weight": 1, "bias": 1}} for _ in range(2)]}
      >>> groups(params)["blocks"]
      [{'up': {'weight': 'frozen', 'bias': 'frozen'}}, {'up': {'weight': 'decay', 'bias': 'no decay'}}]
      >>> optimizer = optim.partition(
      ...     {
      ...         "frozen": optim.set_to_zero(),
      ...         "slow": optim.adamw(3e-5, weight_decay=0.1),
      ...         "no decay": optim.adamw(3e-4, weight_decay=0.0),
      ...         "decay": optim.adamw(3e-4, weight_decay=0.1),
      ...     },
      ...     groups,
      ... )
      >>> sorted(optimizer.init(tree.map(lambda leaf: torch.ones(2), params)).inner_states)
      ['decay', 'frozen', 'no decay', 'slow']
    """

    patterns: tuple[tuple[str, Any], ...]
    default: Any

    def __init__(self, patterns: Mapping[str, Any], *, default: Any) -> None:
        if not isinstance(patterns, Mapping) or not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(
                f"by_name: takes {{pattern: value}}, as in {{'*.bias': 'no decay'}}, got {patterns!r}"
            )
        object.__setattr__(self, "patterns", tuple(patterns.items()))
        object.__setattr__(self, "default", default)

    def __repr__(self) -> str:
        return f"by_name({dict(self.patterns)!r}, default={self.default!r})"

    def __call__(self, params: Params) -> Any:
        treedef = tree.flatten(params)[1]
        names = names_of(treedef, "optim.by_name", "params")
        deciding = [self._deciding(name) for name in names]
        self._refuse_idle(names, deciding)
        values = dict(self.patterns)
        return tree.unflatten(
            treedef, [self.default if pattern is None else values[pattern] for pattern in deciding]
        )

    def _deciding(self, name: str) -> str | None:
        return next((pattern for pattern, _ in self.patterns if fnmatchcase(name, pattern)), None)

    def _refuse_idle(self, names: list[str], deciding: list[str | None]) -> None:
        rows = []
        for pattern, _ in self.patterns:
            if pattern not in deciding:
                first = next((name for name in names if fnmatchcase(name, pattern)), None)
                got = "none" if first is None else f"{first!r}, for which {self._deciding(first)!r} decides"
                rows.append(f"{pattern!r}  expected to match a leaf   got {got}")
        if rows:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise LayoutError.of(
                "",
                "optim.by_name: a pattern decides for no leaf.",
                rows=rows,
                why="The first pattern that matches a name decides. A parameter that does not require gradients is a "
                "buffer, and frozen already.",
                fix=f"write it as the leaves are named, {', '.join(names[:_SHOWN])}{more}; or move it to the front; "
                "or, for what is frozen already, leave it out.",
            )


def norms(values: Any) -> dict[str, Tensor]:
    """L2 norm of each leaf, keyed by its name in ``fcg.state_dict(values)``: metrics, computed on the device.

    Leaves with the same dtype share one op, and sharded ones one collective; their norms are those of the whole leaf.
    The size of a step relative to the parameters::

        moved = optim.norms(fcg.tree.map(torch.sub, new.params, state.params))
        metrics = {name: moved[name] / size for name, size in optim.norms(state.params).items()}

    Args:
      values: Gradients, updates, parameters: a tree of floating leaves.
    Returns:
      ``{name: norm}``, f32[] each, f64[] for a leaf in float64.
    Raises:
      LayoutError: If a leaf is not floating, or is 8-bit.
      ValueError: If two leaves share a name.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> optim.norms({"head": {"w": torch.tensor([3.0, 4.0]), "b": torch.tensor(-1.0)}})
      {'head.b': tensor(1.), 'head.w': tensor(5.)}
    """
    flat, treedef = tree.flatten_with_path(values)
    rows = [
        f"{tree.path_string(path, 'values')}  expected a floating leaf of 16 bits or more   got "
        f"{getattr(leaf, 'dtype', repr(leaf))}"
        for path, leaf in flat
        if not adds_up(getattr(leaf, "dtype", None))
    ]
    if rows:
        raise LayoutError.of(
            "",
            "optim.norms: these leaves have no norm.",
            rows=rows,
            fix="pass the part of the tree that is floating, `optim.norms(state.params)`.",
        )
    return dict(
        zip(names_of(treedef, "optim.norms", "values"), leaf_norms([leaf for _, leaf in flat]), strict=True)
    )
