"""Follow logits from their product to their loss, call by call, and their gradient back.

Between the two, models cast logits, scale them (``logits / 8``), or cap them as Gemma 2 does (``30 * tanh(logits /
30)``). The gradient passes the same calls in reverse. A kernel that knows them reads the product itself and leaves the
product's gradient in its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from .canonical import CAST, VIEWS, behind, is_written

__all__ = ["DTYPES", "Link", "back_through", "chain_of", "gradient_of", "through"]

_aten = torch.ops.aten
DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_TANH_SLOPE = _aten.tanh_backward.default
_NAMES: Mapping[Any, str] = MappingProxyType(
    {CAST: "cast", _aten.mul.Tensor: "mul", _aten.div.Tensor: "div", _aten.tanh.default: "tanh"}
)
_FORWARD: Mapping[str, Callable[[Tensor, float], Tensor]] = MappingProxyType(
    {"cast": lambda x, _: x, "mul": torch.mul, "div": torch.div, "tanh": lambda x, _: x.tanh()}
)


@dataclass(frozen=True, slots=True)
class Link:
    """A call by element between a product and its loss.

    Attributes:
      call: ``"cast"``, ``"mul"``, ``"div"`` or ``"tanh"``.
      number: The other operand, of ``mul`` and ``div``.
      dtype_name: Dtype of the result.
    """

    call: str
    number: float
    dtype_name: str

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)  # type: ignore[no-any-return]


def through(rows: Tensor, chain: Sequence[Link]) -> list[Tensor]:
    """Return the logits and what each call of a chain makes of them."""
    values = [rows]
    for link in chain:
        values.append(_FORWARD[link.call](values[-1], link.number).to(link.dtype))
    return values


def back_through(slope: Tensor, values: Sequence[Tensor], chain: Sequence[Link]) -> Tensor:
    """Return the gradient of the logits, given that of what a chain makes of them.

    Args:
      slope: The gradient of the last value.
      values: What :func:`through` returns.
      chain: The chain.
    """
    slope = slope.to(values[-1].dtype)
    for link, before, after in reversed([*zip(chain, values[:-1], values[1:], strict=True)]):
        slope = _TANH_SLOPE(slope, after) if link.call == "tanh" else _FORWARD[link.call](slope, link.number)
        slope = slope.to(before.dtype)
    return slope


def chain_of(calls: Sequence[fx.Node]) -> tuple[Link, ...] | None:
    """Return the chain that calls by element are; None if one of them is of another kind."""
    links = []
    for node in calls:
        name, spec = _NAMES.get(node.target), node.meta.get("spec")
        number = node.args[1] if name in ("mul", "div") else 1.0
        if name is None or spec is None or spec.dtype not in DTYPES or isinstance(number, bool | complex):
            return None
        if not isinstance(number, int | float) or node.kwargs.keys() - {"dtype", "layout", "device"}:
            return None
        links.append(Link(name, float(number), str(spec.dtype).removeprefix("torch.")))
    return tuple(links)


def gradient_of(
    slope: fx.Node, calls: Sequence[fx.Node], remade: Callable[[fx.Node, fx.Node], bool]
) -> list[fx.Node] | None:
    """Follow the gradient of a chain's last value back to that of its first.

    Args:
      slope: The gradient of the last value.
      calls: The calls of the chain.
      remade: Whether a node, the first, is the value of the other, a call of the chain.

    Returns:
      The nodes from the one to the other; None if the graph computes the gradient in another way, or reads it on its
      way.
    """
    path = [slope]
    for call in reversed(calls):
        node = path[-1]
        path += _to_only_reader(node)
        user = path[-1]
        if user.target in VIEWS or user is node or is_written(user):
            return None
        (source,) = call.all_input_nodes
        if call.target is _aten.tanh.default:
            grad, value = user.args if user.target is _TANH_SLOPE else (None, None)
            if not isinstance(value, fx.Node) or not remade(value, call):
                return None
            follows = behind(grad) is behind(node)
        else:
            follows = user.target is call.target and user.args[1:] == call.args[1:]
        if not follows or user.meta["spec"].dtype is not source.meta["spec"].dtype:
            return None
    return path


def _to_only_reader(node: fx.Node) -> list[fx.Node]:
    """Return the views of a value up to the only call that reads it; up to the last view if there is none."""
    found = []
    while len(node.users) == 1:
        (node,) = node.users
        found.append(node)
        if node.target not in VIEWS:
            break
    return found
