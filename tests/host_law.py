"""The law of host reads: after a host value changes, the next call uses the new value or raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import functional_cg as fcg

X = torch.tensor([1.0, 2.0])


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return [leaf.tolist() for leaf in fcg.tree.leaves(call())]
    except fcg.FunctionalCGError as error:
        return error


def law(
    make: Callable[[], tuple[Callable[[Any, Any], Any], Callable[[], Any]]], *, refused: bool = False
) -> Any:
    """Call, change, call: equal to eager, or loud. `make` gives a function of a tensor and a change."""
    eager, change = make()
    expected = [eager(X, 1.0)]
    change()
    expected.append(eager(X, 1.0))
    scale, change = make()
    step = fcg.graph_fn(scale)
    first = outcome(lambda: step(X, 1.0))
    if isinstance(first, fcg.FunctionalCGError):
        return first
    assert first == [expected[0].tolist()]
    again = outcome(lambda: step(X, 1.0))
    if isinstance(again, fcg.FunctionalCGError):
        return again
    change()
    second = outcome(lambda: step(X, 1.0))
    if isinstance(second, fcg.BakedValueError):
        assert "To fix:" in str(second)
        return second
    assert second == [expected[1].tolist()], "the old value, in silence"
    assert not refused, "nothing has changed"
    return second
