"""The fake mode of a trace: consistent between runs, and silent. The torch names it uses are private."""

import inspect
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


def test_torch_still_asks_for_the_key_of_a_result_as_the_mode_of_a_trace_makes_it():
    torchs, ours = (one._prep_args_for_hash for one in (fake_tensor.FakeTensorMode, FakeMode))
    assert [*inspect.signature(torchs).parameters] == [*inspect.signature(ours).parameters]
    with FakeMode() as mode:
        key = mode._cache_key(
            fake_tensor._CacheKeyState(None), torch.ops.aten.add.Tensor, (torch.ones(3), torch.ones(3)), {}
        )
    assert any(isinstance(entry, tuple) and torch.Size([3]) in entry for entry in key.key)


# What a result may depend on: each of these tensors differs from another one in a single thing.
TENSORS = {
    "plain": lambda: torch.empty(4, 6),
    "another dtype": lambda: torch.empty(4, 6, dtype=torch.float64),
    "another shape": lambda: torch.empty(6, 4),
    "one row more": lambda: torch.empty(5, 6),
    "other strides": lambda: torch.empty(6, 4).t(),
    "with gaps": lambda: torch.empty(4, 12)[:, ::2],
    "further on": lambda: torch.empty(40)[16:].view(4, 6),
    "in more memory": lambda: torch.empty(40)[:24].view(4, 6),
    "one row more in that memory": lambda: torch.empty(40)[:30].view(5, 6),
    "on another device": lambda: torch.empty(4, 6, device="meta"),
    "expanded": lambda: torch.empty(6).expand(4, 6),
    "complex": lambda: torch.empty(4, 6, dtype=torch.complex64),
    "conjugate": lambda: torch.empty(4, 6, dtype=torch.complex64).conj(),
    "negative": lambda: torch._neg_view(torch.empty(4, 6)),
}
CALLS_OF_ONE = {
    "sum": lambda x: x.sum(0),
    "double": lambda x: x * 2,
    "with a number": lambda x: x + 1.5,
    "with another": lambda x: x + 1,
    "to float": lambda x: x.to(torch.complex128),
    "flat": lambda x: x.reshape(-1),
    "clone": torch.clone,
    "transposed": lambda x: x.t(),
    "first rows": lambda x: x[:2],
    "stacked": lambda x: torch.cat([x, x]),
    "stacked beside": lambda x: torch.cat([x, x], 1),
    "split": lambda x: x.split(2),
    "zeros": torch.zeros_like,
    "another row": lambda x: x.select_scatter(torch.zeros_like(x[0]), 0, 1),
    "other rows": lambda x: x.slice_scatter(torch.zeros_like(x[:2]), 0, 1, 3),
    "another diagonal": lambda x: x.diagonal_scatter(torch.zeros_like(x.diagonal())),
}


def layouts(x):
    def of(one):
        facts = (
            one.shape,
            one.stride(),
            one.storage_offset(),
            one.dtype,
            one.device,
            one.is_conj(),
            one.is_neg(),
        )
        return *facts, one.untyped_storage().nbytes(), one._is_view()

    return [of(one) for one in (x if isinstance(x, tuple | list) else (x,))]


@pytest.mark.parametrize("call", CALLS_OF_ONE.values(), ids=CALLS_OF_ONE)
def test_a_result_from_the_cache_is_that_of_these_arguments(call):
    """Each after all the others, so that a key that leaves something out finds the result of another tensor."""
    with FakeMode() as mode:
        with fake_tensor.disable_fake_tensor_cache(mode):
            expected = {name: layouts(call(make())) for name, make in TENSORS.items()}
        for _ in range(2):
            assert {name: layouts(call(make())) for name, make in TENSORS.items()} == expected


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
