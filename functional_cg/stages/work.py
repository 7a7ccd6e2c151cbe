"""What a call costs: the bytes that it moves, its floating-point operations, and the time that both take on a GPU.

The time is rough: enough to tell a step that waits for launches from one that computes. It is fitted to an H100. On
another GPU the numbers differ, but not what matters: a small kernel takes as long as it takes to begin and to end, and
leaves most of the device idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from ..shards.collectives import is_collective
from ..tensors.aten import named_arguments
from ..tensors.op_table import row_of
from .program import Instr, Var, map_arguments, map_vars

__all__ = ["beside", "bytes_of", "estimate", "flops", "flops_of", "micros"]

_BANDWIDTH = 2.5e6  # bytes per microsecond
_RATES = MappingProxyType({2: 500e6, 4: 100e6, 8: 30e6})  # FLOPs per microsecond, by bytes of an element
_KERNEL = 2.0  # microseconds of a kernel that does next to nothing, one after another
_PRODUCT = 4.0  # of a small product
_REDUCTION = 3.0
_LINK = 0.4e6  # bytes per microsecond that a rank sends and receives, half of what an NVLink of an H100 is made for
_COLLECTIVE = 15.0  # of a collective of a few bytes


def bytes_of(instr: Instr, used: Container[Var]) -> int:
    """Return the bytes of a call: each argument once, used results, and what it writes in place."""
    read = {var: var.spec.nbytes for var in instr.inputs()}
    results = {var: var.spec.nbytes for var in instr.outputs() if var in used and var not in instr.writes}
    return sum(read.values()) + sum(results.values()) + sum(var.spec.nbytes for var in instr.writes)


def beside(instr: Instr) -> int:
    """Return the bytes that a kernel takes beside its results while it runs, as far as that is known.

    In half precision, attention's backward adds up the gradient of the queries in single precision, and keeps a number
    for each query.
    """
    if row_of(instr.op).kind != "attention" or "backward" not in instr.name:
        return 0
    query = named_arguments(instr.op, instr.args, instr.kwargs)["query"].spec
    return 4 * (query.numel + math.prod(query.shape[:-1])) if query.dtype.itemsize == 2 else 0


def flops_of(instr: Instr) -> int:
    """Return the FLOPs of a call if it is a product, else 0."""
    if row_of(instr.op).kind not in _MULTIPLIED:
        return 0
    spec = attrgetter("spec")
    return flops(instr.op, *map_arguments(spec, instr), map_vars(spec, instr.out))


def flops(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs of a product, else 0: a multiplication and an addition for each pair of numbers.

    Args:
      op: The op.
      args: Its arguments: tensors, or their specs.
      kwargs: Its arguments by name.
      out: Its result.
    """
    multiplied = _MULTIPLIED.get(row_of(op).kind)
    return 0 if multiplied is None else 2 * multiplied(op.name(), named_arguments(op, args, kwargs), out)


def _by_matrices(_: str, named: Mapping[str, Any], __: Any) -> Any:
    added = int("beta" in named)  # to the first argument
    left, right = [one.shape for one in named.values() if hasattr(one, "shape")][added : added + 2]
    return math.prod(left) * math.prod(right[1:][-1:])


def _by_filters(_: str, named: Mapping[str, Any], out: Any) -> Any:
    """Each element of the wider side, with a filter; for the gradients of the argument and of the filters as often."""
    wide = named["input"] if named.get("transposed") else named.get("grad_output", out)
    return (
        math.prod(wide.shape) * math.prod(named["weight"].shape[1:]) * sum(named.get("output_mask", (1,))[:2])
    )


def _by_scores(name: str, named: Mapping[str, Any], _: Any) -> Any:
    """Two products forward, five backward, one of which recomputes the scores; ``is_causal`` leaves scores out."""
    at = -3 if name.startswith(("aten::_flash", "aten::_efficient")) else -2  # before or behind the heads
    query, key, value = (named[one].shape for one in ("query", "key", "value"))
    queries, keys, width, values = query[at], key[at], query[-1], value[-1]
    scores = queries * keys
    if named.get("is_causal"):
        last = min(queries, keys)  # row i keeps its first i + 1 scores
        scores = last * (last + 1) // 2 + (queries - last) * keys
    per_score = 3 * width + 2 * values if "backward" in name else width + values
    return math.prod(query) // max(queries * width, 1) * scores * per_score


# How many pairs of numbers an op multiplies, by its kind.
_MULTIPLIED: Mapping[str | None, Callable[[str, Mapping[str, Any], Any], int]] = MappingProxyType(
    {"matmul": _by_matrices, "convolution": _by_filters, "attention": _by_scores}
)


def estimate(instr: Instr) -> tuple[float, float]:
    """Return the microseconds of a call that runs alone, and those that it keeps the whole device busy."""
    itemsize = next((var.spec.dtype.itemsize for var in instr.inputs()), 4)
    return micros(
        bytes_of(instr, frozenset(instr.outputs())), flops_of(instr), itemsize,
        least=_KERNEL if instr.by_element else _REDUCTION, linked=is_collective(instr.op),
    )  # fmt: skip


def micros(
    moved: int, flops: int = 0, itemsize: int = 4, *, least: float = _KERNEL, linked: bool = False
) -> tuple[float, float]:
    """Return the microseconds that some work takes alone, and those that it keeps the whole device busy.

    Args:
      moved: The bytes that it reads and writes.
      flops: FLOPs of products.
      itemsize: Bytes of an element.
      least: Microseconds of its kernel if it does next to nothing, and is no product.
      linked: Whether it is a collective, during which the device is free.
    """
    if linked:
        return moved / _LINK + _COLLECTIVE, 0.0
    busy = max(flops / _RATES.get(itemsize, _RATES[2]), moved / _BANDWIDTH)
    return busy + (_PRODUCT if flops else least), busy
