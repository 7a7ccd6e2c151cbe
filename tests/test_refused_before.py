"""What people do and what was refused: it works, or the message says what to do and that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_cg as fcg


def causal(size: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(size)


def a_layer(kind: type[nn.Module]) -> Any:
    return kind(16, 2, 32, dropout=0.0, batch_first=True)


TRANSFORMERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], dict[str, bool]]] = {
    "encoder": (
        lambda: nn.TransformerEncoder(a_layer(nn.TransformerEncoderLayer), 2),
        lambda call, x, mask, **said: call(x, mask=mask, **said),
        {"is_causal": False},
    ),
    "decoder": (
        lambda: nn.TransformerDecoder(a_layer(nn.TransformerDecoderLayer), 2),
        lambda call, x, mask, **said: call(x, x, tgt_mask=mask, **said),
        {"tgt_is_causal": False},
    ),
    "both": (
        lambda: nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True),
        lambda call, x, mask, **said: call(x, x, src_mask=mask, tgt_mask=mask, **said),
        {"src_is_causal": False, "tgt_is_causal": False},
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_mask_that_torch_compares_with_a_causal_one(name: str) -> None:
    make, call, said = TRANSFORMERS[name]
    torch.manual_seed(0)
    module = make()
    apply, params, buffers = fcg.from_module(module)

    def stepped(**said: bool) -> Any:
        def show(params: Any, x: Tensor, mask: Tensor) -> Tensor:
            return call(lambda *args, **kwargs: apply(params, buffers, *args, **kwargs)[0], x, mask, **said)

        return fcg.graph_fn(show, lowering="aten")

    x, masks = torch.randn(2, 5, 16), [causal(5), torch.randn(5, 5)]
    with pytest.raises(fcg.HostSyncError) as refusal:
        stepped()(params, x, masks[0])
    fix = str(refusal.value).partition("To fix: ")[2]
    assert fix.startswith("pass " + " and ".join(f"`{name}=False`" for name in said) + " beside the mask")
    step = stepped(**said)
    for mask in masks:  # causal or not, in one capture
        torch.testing.assert_close(step(params, x, mask), call(module, x, mask).detach())


def test_a_gradient_that_is_not_there_is_none() -> None:
    """Libraries look whether a gradient is there, as vector-quantize-pytorch does."""

    def train_step(state: Any, x: Tensor) -> Any:
        assert x.grad is None
        loss, grads = fcg.value_and_grad(lambda p: (p["w"] * x).sum() if p["w"].grad is None else x.sum())(
            state
        )
        return {"w": state["w"] - grads["w"]}, {"loss": loss}

    state, metrics = fcg.graph_step(train_step, lowering="aten")({"w": torch.ones(2)}, torch.arange(2.0))
    assert metrics["loss"].item() == 1.0
    assert state["w"].tolist() == [1.0, 0.0]
