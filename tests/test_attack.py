"""Programs that were written to break a step: what surrounds the call in them is unusual, the answer is not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
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


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Threads that take turns as often as Python allows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("restless_threads")
def test_threads_that_share_a_function_and_a_state_get_their_own_results() -> None:
    """Its input buffers belong to one call at a time, from the first call on."""
    scaled = fcg.graph_fn(lambda state, x: x * 2 + state["w"])
    state = fcg.place({"w": torch.ones(3)})
    wrong: list[Any] = []
    start = threading.Barrier(4)

    def work(number: float) -> None:
        try:
            start.wait()
            for _ in range(1000):
                got = scaled(state, torch.full((3,), number))[0].item()
                if got != 1 + 2 * number:
                    wrong.append((number, got))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert scaled.stats.traces == 1
