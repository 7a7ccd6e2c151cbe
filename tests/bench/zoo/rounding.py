"""How far a call of a compiled step may be from its eager run, which rounds at other places.

The eager run is repeated from the same state in other roundings: with weights moved by some ulps, and in float64. A
leaf may be off by a few times what it differs among these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import functional_cg as fcg

__all__ = ["MOST", "MOVED", "Excess", "Rounding", "excess"]

MOVED = 3e-7  # by how much, relatively, weights are moved
MOST = 8.0  # times what rounding explains
_RUNS = 3


@dataclass(frozen=True, slots=True)
class Excess:
    """The leaf that is off by most.

    Attributes:
      times: By how many times what rounding explains.
      name: Key path of the leaf.
      apart: The largest difference of an element.
      rounding: How much of it rounding explains.
    """

    times: float
    name: str = ""
    apart: float = 0.0
    rounding: float = 0.0

    def __str__(self) -> str:
        return (
            f"`{self.name}` is {self.apart:.3g} away from that in its eager run, "
            f"{self.times:.3g} times what rounding explains"
        )


class Rounding:
    """Runs a step in other roundings.

    Args:
      eager: ``eager(state, batch)``, the step.
      wide: The same in float64, if there is that.
      moved: By how much, relatively, weights are moved.
    """

    def __init__(
        self, eager: Callable[..., Any], wide: Callable[..., Any] | None, moved: float = MOVED
    ) -> None:
        self._eager, self._wide, self._by = eager, wide, moved

    def others(self, state: Any, batch: Any) -> Iterator[Any]:
        """Yield results of the step in other roundings, as pairs of a state and metrics.

        Args:
          state: A snapshot of the state before the call.
          batch: The batch of the call.
        """
        for seed in range(_RUNS):
            yield self._eager(state.replace(params=_moved(state.params, seed, self._by)), batch)
        if self._wide is not None:
            try:
                result = self._wide(_wider(state), _wider(batch))
            except RuntimeError:  # the model makes float32 tensors, which do not meet float64
                self._wide = None
            else:
                yield result


def excess(ours: Any, eager: Any, others: Iterable[Any]) -> Excess:
    """Return the leaf that is off by most from the eager run, in multiples of what rounding explains.

    Without ``others`` there is no rounding, and any difference is infinite.

    Args:
      ours: New state and metrics of a call.
      eager: Those of its eager run.
      others: Those of its eager run in other roundings.
    """
    named = _leaves(eager)
    off = {name: _apart(value, named[name]) for name, value in _leaves(ours).items()}
    rounding: dict[Any, Tensor] = {}
    for one in map(_leaves, others):
        for name, value in one.items():
            apart = _apart(value, named[name])
            rounding[name] = torch.maximum(rounding.get(name, apart), apart)
    largest: dict[Any, Tensor] = {}
    for name, value in named.items() if rounding else ():
        role, size = name[:2], value.double().abs().nan_to_num(0, 0).max()
        largest[role] = torch.maximum(largest.get(role, size), size)
    worst = Excess(0.0)
    for name, apart in off.items():
        # A gradient that is zero up to rounding is as exact as the largest ones are.
        explained = (
            rounding[name].maximum(_precision(named[name]) * largest[name[:2]])
            if rounding
            else torch.zeros_like(apart)
        )
        times = float(torch.where(apart == 0, 0.0, apart / explained).max())
        if times > worst.times:
            worst = Excess(
                times, fcg.tree.path_string(name[1:], name[0]), float(apart[0]), float(explained[0])
            )
    return worst


def _precision(value: Tensor) -> float:
    return torch.finfo(torch.float64 if value.dtype is torch.float64 else torch.float32).eps


def _leaves(result: Any) -> dict[tuple[Any, ...], Tensor]:
    """Return the tensors of a state and metrics by where they are; the first two keys tell the role."""
    return {
        (root, *path): fcg.snapshot(leaf)
        for root, tree in zip(("state", "metrics"), result, strict=True)
        for path, leaf in fcg.tree.flatten_with_path(tree)[0]
        if isinstance(leaf, Tensor) and leaf.numel()
    }


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Return the largest difference of an element, and the root of the mean of their squares."""
    equal = (one == other) | (one.isnan() & other.isnan())
    distance = torch.where(equal, 0.0, one.double() - other.double()).abs().nan_to_num(torch.inf)
    return torch.stack([distance.max(), distance.square().mean().sqrt()])


def _moved(params: Any, seed: int, by: float) -> Any:
    def move(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        generator = torch.Generator(value.device).manual_seed(seed)
        noise = torch.randn(value.shape, dtype=value.dtype, generator=generator, device=value.device)
        return value * (1 + by * noise)

    return fcg.tree.map(move, params)


def _wider(tree: Any) -> Any:
    return fcg.tree.map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, tree
    )
