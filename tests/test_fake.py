"""The fake mode of a trace: consistent between runs, and silent. The torch names it uses are private."""

import logging
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor

import functional_cg as fcg
from functional_cg.tensors.fake_mode import FakeMode
from functional_cg.testing import assert_trees_all_equal

SIZES = {"ih": (16, 3), "hh": (16, 4), "bias_ih": (16,), "bias_hh": (16,)}


def lstm_step(state, x):
    """One step of gradient descent for ``torch.lstm``: the CPU's backward returns one tensor for both biases."""

    def loss_fn(params):
        h = torch.zeros(1, x.shape[1], 4)
        weights = [params[name] for name in SIZES]
        return torch.lstm(x, (h, h), weights, True, 1, 0.0, False, False, False)[0].square().mean()

    loss, grads = fcg.value_and_grad(loss_fn)(dict(state))
    return fcg.tree.map(lambda p, g: p - 0.1 * g, dict(state), grads), {"loss": loss, "grads": grads}


def test_op_that_returns_one_tensor_twice_is_traced_alike_with_and_without_the_cache():
    state = {name: torch.full(size, 0.1) for name, size in SIZES.items()}
    x = torch.linspace(-1, 1, 30).reshape(5, 2, 3)
    fake_tensor.FakeTensorMode.cache_clear()
    for _ in range(2):
        step = fcg.graph_step(lstm_step)
        expected, wanted = step.eager(fcg.place(state), x)
        new, metrics = step(fcg.place(state), x)
        assert_trees_all_equal(fcg.snapshot(new), fcg.snapshot(expected))
        assert_trees_all_equal(metrics, wanted)


class Kept(logging.Handler):
    """Keeps the messages that it is given."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def test_failing_op_is_raised_and_not_logged():
    text = "failed while attempting to run meta for %s"
    log, kept = logging.getLogger("torch._subclasses.fake_tensor"), Kept()

    def step(s, b):
        other = threading.Thread(target=log.error, args=(text, "the op of another thread"))
        other.start()
        other.join()
        log.error("another message")
        return s, b @ b

    before = list(log.filters)
    log.addHandler(kept)
    try:
        with pytest.raises(fcg.CaptureError, match="raised RuntimeError") as caught:
            fcg.graph_step(step)(fcg.place({"w": torch.ones(3)}), torch.ones(2, 3))
        assert kept.messages == [text % "the op of another thread", "another message"]
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert log.filters == before
        with fake_tensor.FakeTensorMode(), pytest.raises(RuntimeError, match="reduction dim"):
            torch.ones(2, 3) @ torch.ones(2, 3)
        assert kept.messages[2:] == [text % "aten.mm.default"]  # torch logs it, in these words
    finally:
        log.removeHandler(kept)


FIRST_LAYERS = {
    "batch norm": (lambda: nn.BatchNorm1d(3), (4, 3)),
    "batch norm of images": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True), (4, 3, 5)),
}


@pytest.mark.parametrize(("layer", "shape"), FIRST_LAYERS.values(), ids=FIRST_LAYERS)
def test_a_layer_that_reads_data_is_trained_by_each_lowering(layer: Any, shape: tuple[int, ...]) -> None:
    """Kernels return no gradient of what needs none, where torch's fake tensors may say that they do."""
    torch.manual_seed(0)
    apply, params, buffers = fcg.from_module(layer())

    def loss(params: Any, buffers: Any, x: Tensor) -> Any:
        out, buffers = apply(params, buffers, x)
        return (out * x.sum()).square().mean(), buffers

    def f(state: Any, x: Tensor) -> Any:
        (value, buffers), grads = fcg.value_and_grad(loss, has_aux=True)(state["p"], state["b"], x)
        return {"p": fcg.tree.map(lambda p, g: p - 0.01 * g, state["p"], grads), "b": buffers}, value

    for options in (
        {"lowering": "aten"},
        {"lowering": "inductor"},
        {"lowering": "inductor", "debug": "verify+poison"},
    ):
        step = fcg.graph_step(f, **options)
        state = fcg.place({"p": params, "b": buffers})
        for _ in range(3):
            x = torch.randn(shape)
            expected, _ = step.eager(fcg.fork(state), x)
            state, _ = step(state, x)
            for got, want in zip(fcg.tree.leaves(state), fcg.tree.leaves(expected), strict=True):
                torch.testing.assert_close(got.clone(), want.clone())


def test_what_a_call_is_not_asked_for_it_does_not_return() -> None:
    with FakeMode():
        x, w = torch.empty(4, 3), torch.empty(3)
        found = torch.ops.aten.native_batch_norm_backward(
            x, x, w, None, None, w, w, True, 1e-5, [False, True, False]
        )
    assert found[0] is None
    assert found[1].shape == (3,)
    assert found[2] is None
