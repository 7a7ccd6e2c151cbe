"""What a mask selects may go where the same mask selects: no length is needed. Any other use is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg

Put = Callable[[Tensor, Tensor], Tensor]


def put(at: Callable[[Tensor], Tensor], between: Callable[[Tensor, Tensor], object] | None = None) -> Put:
    """Return what puts values of ``y`` into ``x`` by a mask."""

    def made(x: Tensor, y: Tensor) -> Tensor:
        x, y = x * 1, y * 1
        mask = at(y)
        selected = y[mask]
        if between is not None:
            between(y, mask)
        x[mask] = selected
        return x * y

    return made


def into_a_view(x: Tensor, y: Tensor) -> Tensor:
    x = x * 1
    mask = y[0] > 0
    x[0][mask] = y[0][mask]
    return x


def farthest(x: Tensor, y: Tensor) -> Tensor:
    """Farthest point sampling, as point clouds are thinned out."""
    distance = torch.full(x.shape[:1], 1e10)
    chosen, at = torch.zeros(3, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    for i in range(3):
        chosen[i] = at[0]
        far = (x - x[at]).square().sum(-1)
        mask = far < distance
        distance[mask] = far[mask]
        at = distance.max(0, keepdim=True)[1]
    return x[chosen]


PUTS: dict[str, Put] = {
    "elements": put(lambda y: y > 0),
    "rows": put(lambda y: y[:, 0] > 0),
    "old values": put(lambda y: y > 0, lambda y, mask: y.zero_()),
    "into a view": into_a_view,
    "a loop": farthest,
}


@pytest.mark.parametrize("kind", PUTS)
def test_what_a_mask_selects_goes_where_it_selects(kind: str) -> None:
    def both(state: Any, x: Tensor, y: Tensor) -> Any:
        def total(pair: Any) -> Tensor:
            return (PUTS[kind](*pair) * state["w"][0]).sum()

        return {"new": PUTS[kind](x, y), "grads": fcg.grad(total)((x, y))}

    fn, state = fcg.graph_fn(both, lowering="aten"), {"w": torch.full((1,), 3.0)}
    placed = fcg.place(state)
    for call in range(4):
        x, y = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(call))
        got, expected = fn(placed, x, y), both(state, x, y)
        for ours, theirs in zip(fcg.tree.leaves(got), fcg.tree.leaves(expected), strict=True):
            assert torch.equal(ours, theirs)


def other_mask(x: Tensor, y: Tensor) -> Tensor:
    mask, again = y > 0, y > 0
    x[again] = y[mask]
    return x


def other_dtype(x: Tensor, y: Tensor) -> Tensor:
    wide, mask = x.double(), y > 0
    wide[mask] = y[mask]
    return wide


def more(x: Tensor, y: Tensor) -> Tensor:
    mask = y > 0
    x[mask] += 2 * y[mask]
    return x


REFUSED: dict[str, tuple[Put, str]] = {
    "a mask that is written": (put(lambda y: y > 0, lambda y, mask: mask.logical_not_()), r"y\[mask\]"),
    "a mask that is written aside": (put(lambda y: y > 0, lambda y, mask: mask.data.logical_not_()), r"y\[mask\]"),
    "another mask": (other_mask, r"y\[mask\]"),
    "another dtype": (other_dtype, r"(?s)y\[mask\].*`wide = torch.where\(mask, y, wide\)`"),
    "more to it": (more, r"(?s)y\[mask\].*`x = torch.where\(mask, x \+ 2 \* y, x\)`"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_any_other_use_is_refused(kind: str) -> None:
    function, match = REFUSED[kind]
    with pytest.raises(fcg.HostSyncError, match=match):
        fcg.graph_fn(lambda state, x, y: function(x * state["w"], y))(
            fcg.place({"w": torch.ones(1)}), torch.randn(4, 5), torch.randn(4, 5)
        )


def test_the_fix_of_the_refusal_works() -> None:
    def fixed(x: Tensor, y: Tensor) -> Tensor:
        mask = y > 0
        x = torch.where(mask, x + 2 * y, x)
        return x

    x, y = torch.randn(2, 4, 5)
    got = fcg.graph_fn(lambda state, x, y: fixed(x * state["w"], y))(fcg.place({"w": torch.ones(1)}), x, y)
    assert torch.equal(got, more(x.clone(), y))


@pytest.mark.parametrize("written", ["labels", "mask"])
def test_labels_stay_as_they_were_selected(written: str) -> None:
    """A loss that takes labels of any number gets those of the selection, not what was written since."""

    def loss(state: Any, x: Tensor, y: Tensor) -> Tensor:
        labels, mask = y.clone(), (y > 2).logical_or(torch.tensor([True, False, False, False]))
        lengths, selected = mask.sum(-1), labels[mask]
        if written == "labels":
            labels.fill_(1)
        else:
            mask.fill_(True)
        return F.ctc_loss(x.log_softmax(-1) + state["w"], selected, torch.tensor([9, 9]), lengths)

    fn, state = fcg.graph_fn(loss, lowering="aten"), {"w": torch.zeros(1)}
    placed = fcg.place(state)
    for call in range(3):
        made = torch.Generator().manual_seed(call)
        x, y = torch.randn(9, 2, 6, generator=made), torch.randint(1, 6, (2, 4), generator=made)
        torch.testing.assert_close(fn(placed, x, y), loss(state, x, y))
