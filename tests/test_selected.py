"""What a mask selects has no fixed length: it is refused, and the advice computes the same with a fixed shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg

Put = Callable[[Tensor, Tensor], Tensor]


def elements(x: Tensor, y: Tensor) -> Tensor:
    mask = y > 0
    x[mask] = y[mask]
    return x


def more(x: Tensor, y: Tensor) -> Tensor:
    mask = y > 0
    x[mask] += 2 * y[mask]
    return x


FIXES: dict[str, tuple[Put, str, Put]] = {
    "elements": (elements, r"`x = torch.where\(mask, y, x\)`", lambda x, y: torch.where(y > 0, y, x)),
    "more": (
        more,
        r"`x = torch.where\(mask, x \+ 2 \* y, x\)`",
        lambda x, y: torch.where(y > 0, x + 2 * y, x),
    ),
}


@pytest.mark.parametrize("kind", FIXES)
def test_the_fix_for_a_write_of_what_a_mask_selects_works(kind: str) -> None:
    refused, match, fixed = FIXES[kind]
    x, y = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    with pytest.raises(fcg.HostSyncError, match=rf"(?s)\[mask\].*{match}"):
        fcg.graph_fn(lambda x, y: refused(x * 1, y))(x, y)
    assert torch.equal(fcg.graph_fn(lambda x, y: fixed(x * 1, y))(x, y), refused(x.clone(), y))


SELECT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "method": lambda labels, mask: labels.masked_select(mask),
    "index": lambda labels, mask: labels[mask],
}


@pytest.mark.parametrize("select", SELECT.values(), ids=SELECT)
def test_labels_of_a_ctc_loss_stay_padded(select: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Libraries drop the padding of labels first; the loss takes them padded, beside their lengths."""

    def loss(pick: Callable[[Tensor, Tensor], Tensor], x: Tensor, labels: Tensor) -> Any:
        mask = labels > 0
        return F.ctc_loss(x.log_softmax(-1), pick(labels, mask), torch.tensor([9, 9]), mask.sum(-1))

    def padded(labels: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, labels, 0)

    x, labels = torch.randn(9, 2, 6), torch.tensor([[1, 2, 3], [4, 0, 0]])
    with pytest.raises(fcg.HostSyncError, match=r"`torch.where\(mask, labels, 0\)`"):
        fcg.graph_fn(lambda x, labels: loss(select, x, labels))(x, labels)
    step = fcg.graph_fn(lambda x, labels: loss(padded, x, labels), lowering="aten")
    for given in (labels, torch.tensor([[5, 0, 0], [2, 1, 0]])):
        torch.testing.assert_close(step(x, given), loss(select, x, given))
