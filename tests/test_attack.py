"""Programs that were written to break a step: what surrounds the call in them is unusual, the answer is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functional_cg as fcg
from functional_cg.testing import Simulator

_OPTIMIZERS = {
    "sgd": fcg.optim.sgd(0.1, momentum=0.9),
    "adam": fcg.optim.adam(0.1),
    "adamw": fcg.optim.adamw(0.1, weight_decay=0.01),
    "adagrad": fcg.optim.adagrad(0.1),
}


def _same(a: Any, b: Any) -> bool:
    pairs = zip(fcg.tree.leaves(fcg.snapshot(a)), fcg.tree.leaves(fcg.snapshot(b)), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("name", _OPTIMIZERS)
@pytest.mark.parametrize("backend", ["auto", "simulator"])
def test_gradients_overwritten_after_the_update_do_not_change_it(name: str, backend: str) -> None:
    """A fused update that moved to the end of the replay would read gradients that are zero by then."""
    tx = _OPTIMIZERS[name]

    def update(state: Any, x: torch.Tensor) -> tuple[Any, Any]:
        grads = fcg.grad(lambda params: ((x @ params["w"]) ** 2).mean())(state.params)
        state = state.apply_gradients(grads)
        grads["w"].view(-1)[1:].zero_()
        return state, {"grad": grads["w"]}

    step = fcg.graph_step(update, backend=Simulator() if backend == "simulator" else "auto", lowering="aten")
    state = fcg.TrainState.create(params={"w": torch.randn(4, 3)}, optimizer=tx)
    twin = fcg.fork(state)
    for _ in range(3):
        x = torch.randn(5, 4)
        state, metrics = step(state, x)
        twin, expected = step.eager(twin, x)
        assert _same(state, twin)
        assert _same(metrics, expected)
