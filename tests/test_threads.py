"""Other threads during a trace: their actions are not its side effects, and it does not change them."""

from __future__ import annotations

import ctypes
import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_cg as fcg
from functional_cg import tree
from functional_cg.random import kernels
from tests.at_once import at_once

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


class Recomputed(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


RECOMPUTED, SAME_PARAMS, _ = fcg.from_module(Recomputed(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh()))


def of_a_module_that_recomputes(state: Any, x: Tensor) -> Any:
    key = fcg.random.fold_in(fcg.random.key(1), 0)
    grads = fcg.grad(lambda params: RECOMPUTED(params, {}, x, key=key)[0].sum())(state)
    return tree.map(torch.sub, state, grads), {}


@pytest.mark.parametrize(
    ("fn", "make"),
    [
        (trained, a_train_state),
        (of_a_module, lambda: PARAMS),
        (of_a_module_that_recomputes, lambda: SAME_PARAMS),
    ],
)
def test_a_trace_leaves_no_cycles_behind(
    fn: Any, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fcg.graph_step(lambda s, x: (s, x * 1))(
        {"w": torch.ones(1)}, torch.ones(1)
    )  # torch imports more of itself
    monkeypatch.setattr(gc, "collect", lambda *_: 0)  # as while another thread collects
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
    def work() -> None:
        for _ in range(8):
            fcg.graph_step(lambda s, x: ({"w": s["w"] * x}, {}))({"w": torch.ones(3)}, torch.ones(3))

    assert at_once(work, work, work) == [None, None, None]


# -- random numbers -------------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[], Any]] = {
    "torch (CPU)": lambda: torch.randn(4).tolist(),
    "random": random.random,
    "numpy.random": lambda: np.random.rand(4).tolist(),
}


@contextmanager
def beside(act: Callable[[], Any], *, pause: float) -> Iterator[list[Any]]:
    """Another thread that acts again and again; what it got."""
    over, results = threading.Event(), list[Any]()

    def work() -> None:
        while not over.wait(pause):
            results.append(act())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield results
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_another_thread_may_draw_and_gets_each_number_once(draw: Callable[[], Any]) -> None:
    with beside(draw, pause=0.0005) as drawn:
        for _ in range(8):
            fcg.graph_step(lambda s, x: ({"w": s["w"] * x}, {}))({"w": torch.ones(3)}, torch.ones(3))
    assert len(drawn) == len(set(map(str, drawn))) > 8


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_thread_that_draws_nothing_hides_nobody(draw: Callable[[], Any]) -> None:
    numpy_and_python = draw is not DRAWS["torch (CPU)"]

    def step(state: Any, x: Tensor) -> Any:
        draw()
        return state, {}

    step.__name__ = "sampling"
    expected = "moves a random generator on the host" if numpy_and_python else "draws random numbers"
    before = draw(), random.getstate(), np.random.get_state()[2]
    with beside(lambda: None, pause=0.001), pytest.raises(fcg.ImplicitRandomnessError, match=expected):
        fcg.graph_step(step)({"w": torch.ones(3)}, torch.ones(3))
    assert (random.getstate(), np.random.get_state()[2]) == before[1:]


def test_what_a_step_draws_beside_a_thread_that_draws_is_seen_in_the_second_trace() -> None:
    with (
        beside(random.random, pause=0.0),
        pytest.raises(fcg.BakedValueError, match="two traces of it differ"),
    ):
        fcg.graph_step(lambda s, x: ({"w": s["w"] * random.random()}, {}))(
            {"w": torch.ones(3)}, torch.ones(3)
        )


def test_an_rnn_on_another_thread_changes_no_mode_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken apart without cuDNN and oneDNN, which the whole process sees between two of its calls."""
    step, apply, params, buffers = fcg.graph_fn(lambda x: x + 1), *fcg.from_module(nn.LSTM(2, 2))
    step(torch.ones(2))
    inside, go_on = threading.Event(), threading.Event()

    class Slow(kernels._InModes):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not torch.backends.cudnn.enabled:
                inside.set()
                assert go_on.wait(10)
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr(kernels, "_InModes", Slow)

    def slowly() -> Any:
        return apply(params, buffers, torch.ones(3, 2))[0][0]

    def replay() -> Any:
        assert inside.wait(10)
        threading.Timer(0.1, go_on.set).start()
        return step(torch.ones(2)).tolist(), fcg.graph_fn(lambda x: x + 2)(torch.ones(2)).tolist()

    out, found = at_once(slowly, replay)
    assert found == ([2, 2], [3, 3])
    assert out.shape == (3, 2)


def test_a_trace_holds_nothing_that_another_thread_is_building() -> None:
    """A tuple that anybody else holds cannot be finished: the thread would get a SystemError."""
    ended, table, before = threading.Event(), {"rate": 2.0}, sys.getswitchinterval()

    def builds() -> None:
        while not ended.is_set():
            tuple(number for number in range(400))

    def traces() -> None:
        for _ in range(3):
            fcg.graph_fn(lambda x: x * table["rate"] + sum(iter(range(3))))(torch.ones(2))

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(1) as pool:
            builder = pool.submit(builds)
            traces()
            ended.set()
            builder.result()
    finally:
        ended.set()
        sys.setswitchinterval(before)


def test_what_was_made_just_before_a_step_is_not_of_the_step() -> None:
    """Though the collector has it among the youngest, as what the step makes."""
    fcg.graph_fn(lambda x: x + 1)(torch.ones(()))  # the first trace of a process imports, and collects
    gc.disable()
    given = iter((2.0,) * 9)
    address = id(given)

    def takes(x: Tensor) -> Tensor:
        found = ctypes.cast(address, ctypes.py_object).value  # by no name that the step reads
        return x * next(found, 0.0)

    try:
        with pytest.raises(fcg.SideEffectError):
            fcg.graph_fn(takes)(torch.ones(()))
    finally:
        gc.enable()
