"""What other threads do while a step is traced is neither its side effect nor changed by it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg import tree

# -- collections ----------------------------------------------------------------------------------------------------


def trained(state: Any, x: Tensor) -> Any:
    key = fcg.random.fold_in(state.key, state.step)

    def loss_fn(params: Any) -> Tensor:
        return (fcg.random.dropout(key, x @ params["w"], 0.1) ** 2).sum()

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss, "n": (state.step, [None])}


def a_train_state() -> Any:
    optimizer = fcg.optim.adamw(fcg.optim.warmup_cosine(1e-2, 2, 10), weight_decay=0.1)
    return fcg.TrainState.create(
        params={"w": torch.ones(3, 1)}, optimizer=optimizer, key=fcg.random.key(0), accumulate=True
    )


APPLY, PARAMS, _ = fcg.from_module(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.LSTM(4, 2)))


def of_a_module(state: Any, x: Tensor) -> Any:
    key = fcg.random.fold_in(fcg.random.key(1), 0)
    grads = fcg.grad(lambda params: APPLY(params, {}, x, key=key)[0][0].sum())(state)
    return tree.map(torch.sub, state, grads), {}


@pytest.mark.parametrize(("fn", "make"), [(trained, a_train_state), (of_a_module, lambda: PARAMS)])
def test_a_trace_leaves_no_cycles_behind(
    fn: Any, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fcg.graph_step(lambda s, x: (s, x * 1))(
        {"w": torch.ones(1)}, torch.ones(1)
    )  # torch imports more of itself
    monkeypatch.setattr(gc, "collect", lambda: 0)  # as while another thread collects
    gc.disable()
    try:
        fcg.graph_step(fn)(make(), torch.ones(4, 3))
    finally:
        gc.enable()


def test_unflatten_keeps_no_leaf() -> None:
    leaves = [torch.ones(1), torch.ones(1)]
    gone = [weakref.ref(leaf) for leaf in leaves]
    _, treedef = tree.flatten({"a": (1, [2])})
    gc.disable()
    try:
        tree.unflatten(treedef, leaves)
        leaves.clear()
        assert [leaf() for leaf in gone] == [None, None]
    finally:
        gc.enable()


def test_threads_may_trace_at_one_time() -> None:
    failures: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(8):
                fcg.graph_step(lambda s, x: ({"w": s["w"] * x}, {}))({"w": torch.ones(3)}, torch.ones(3))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
