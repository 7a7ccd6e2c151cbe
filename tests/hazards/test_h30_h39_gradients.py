"""H30 to H39: gradients are values inside the step; nothing remains in ``.grad``, hooks or other threads."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.hazards.law import CPU, GPU, Place, assert_law, everywhere, on_both_devices
from tests.shares import CALLS, few


def params(place: Place) -> dict[str, Tensor]:
    return {"w": place.randn(4, 5, seed=1) / 2, "b": place.randn(5, seed=2), "v": place.randn(5, 1, seed=3)}


def batches(place: Place, calls: int = CALLS, rows: int = 8) -> list[Tensor]:
    return [place.randn(rows, 4, seed=100 + n) for n in range(calls)]


def loss_of(p: Any, x: Tensor) -> Tensor:
    return (torch.tanh(x @ p["w"] + p["b"]) @ p["v"]).square().mean()


def descend(p: Any, grads: Any, rate: float = 0.1) -> Any:
    return fcg.tree.map(lambda leaf, g: leaf - rate * g, p, grads)


@everywhere
def test_h30_gradients_that_lie_about_have_no_effect(place: Place) -> None:
    """The caller's tensors have gradients, lose them, and get others between two calls."""
    mine = {name: leaf.requires_grad_() for name, leaf in params(place).items()}
    step = place.step(lambda p, x: (descend(p, fcg.grad(loss_of)(p, x)), fcg.grad(loss_of)(p, x)))
    state, twin = fcg.place(mine), fcg.place({name: leaf.detach() for name, leaf in mine.items()})
    for n, x in enumerate(batches(place)):
        loss_of(mine, x).backward()
        if n % 3 == 0:
            for leaf in mine.values():
                leaf.grad = None
        before = [None if leaf.grad is None else leaf.grad.clone() for leaf in mine.values()]
        state, metrics = step(state, x)
        twin, expected = step.eager(twin, x)
        place.assert_same((state, metrics), (twin, expected), f"call {n}")
        place.assert_same([leaf.grad for leaf in mine.values()], before, "the caller's gradients")


@everywhere
def test_h31_gradients_of_a_first_step_are_those_of_torch_func(place: Place) -> None:
    """Nothing is left behind that they could add up to: not by warm-up, not by the gradient before."""

    def step_fn(p: Any, x: Tensor) -> Any:
        return p, [fcg.grad(loss_of)(p, part) for part in (x, x[:4], x)]

    p, x = params(place), batches(place, 1)[0]
    step = place.step(step_fn)
    for run in (step, step.eager):
        _, metrics = run(fcg.place(p), x)
        for got, part in zip(metrics, (x, x[:4], x), strict=True):
            expected = torch.func.grad(loss_of)(p, part)
            for name, leaf in got.items():
                torch.testing.assert_close(leaf, expected[name], rtol=1e-5, atol=1e-6)


@on_both_devices
def test_h33_backward_stays_on_the_calling_thread(place: Place) -> None:
    """Autograd would use a thread per device: in a capture that is another thread's work."""
    threads: list[int] = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            threads.append(threading.get_ident())
            return grad

    def step_fn(p: Any, x: Tensor) -> Any:
        return descend(p, fcg.grad(lambda p: Identity.apply(loss_of(p, x)))(p)), {}

    step = place.step(step_fn)
    state, _ = step(params(place), batches(place, 1)[0])
    step.eager(state, batches(place, 1)[0])
    assert len(threads) == 4  # three traces, since it fills a list, and the eager call
    assert set(threads) == {threading.get_ident()}


@everywhere
def test_h34_hooks_inside_of_the_step_are_a_part_of_it(place: Place) -> None:
    """A hook on a tensor and one on a module that the step calls: what they compute is captured."""
    net = nn.Linear(4, 5, bias=False)
    net.register_forward_hook(lambda module, args, out: out * 2)

    def step_fn(p: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            hidden = torch.func.functional_call(net, {"weight": p["w"].T}, (x,)) + p["b"]
            hidden.register_hook(lambda grad: grad * 3)
            return torch.tanh(hidden @ p["v"]).square().mean()

        grads = fcg.grad(loss)(p)
        return descend(p, grads), grads

    assert_law(place, step_fn, params(place), batches(place))
    twice = torch.func.functional_call(net, {"weight": torch.eye(5, 4)}, (torch.eye(4),))
    assert float(twice.max()) == 2.0


CHECKPOINTED = {
    "in a dict": lambda p, x, call: call(loss_of, p, x),
    "closed over": lambda p, x, call: call(lambda x: loss_of(p, x), x),
    "in part": lambda p, x, call: loss_of(p, x) + call(lambda h: (h @ p["v"]).sum(), x @ p["w"]),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # all that torch says
@pytest.mark.parametrize("spelling", CHECKPOINTED.values(), ids=CHECKPOINTED.keys())
def test_h35_a_reentrant_checkpoint_is_refused(spelling: Any) -> None:
    """The gradients of what it closes over were zeros, with a warning at most."""

    def step_fn(p: Any, x: Tensor) -> Any:
        return p, fcg.grad(lambda p: spelling(p, x, partial(checkpoint, use_reentrant=how[0])))(p)

    how, x = [True], batches(CPU, 1)[0]
    step, state = CPU.step(step_fn), fcg.place(params(CPU))
    said = r"`torch.utils.checkpoint` with `use_reentrant=True`(.|\n)*To fix: .*use_reentrant=False"
    with pytest.raises(fcg.CaptureError, match=r"`step_fn`: calls(.|\n)*, at test_h30(.|\n)*zero") as caught:
        step(state, x)
    assert caught.match(said)
    with pytest.raises(fcg.CaptureError, match=said):
        step.eager(state, x)
    how[0] = False  # the fix
    _, metrics = step(state, x)
    expected = torch.func.grad(lambda p: spelling(p, x, lambda fn, *args: fn(*args)))(params(CPU))
    for name, leaf in metrics.items():
        torch.testing.assert_close(leaf, expected[name], rtol=1e-5, atol=1e-6)


@everywhere
def test_h36_a_gradient_penalty_is_differentiated(place: Place) -> None:
    def penalised(p: Any, x: Tensor) -> Tensor:
        slope = fcg.grad(lambda x: loss_of(p, x))(x)
        return loss_of(p, x) + (slope.square().sum() - 1).square()

    def step_fn(p: Any, x: Tensor) -> Any:
        value, grads = fcg.value_and_grad(penalised)(p, x)
        return descend(p, grads, 0.01), {"value": value, "grads": grads}

    _, state, _ = assert_law(place, step_fn, params(place), batches(place))
    x = batches(place, 1)[0]
    p = {name: leaf.detach() + 0 for name, leaf in fcg.snapshot(state).items()}
    _, metrics = place.step(step_fn)(p, x)

    def judge(p: Any) -> Tensor:
        slope = torch.func.grad(lambda x: loss_of(p, x))(x)
        return loss_of(p, x) + (slope.square().sum() - 1).square()

    expected = torch.func.grad(judge)(p)
    for name, leaf in metrics["grads"].items():
        torch.testing.assert_close(leaf, expected[name], rtol=1e-4, atol=1e-5)


@everywhere
def test_h37_the_order_of_gradients_does_not_matter(place: Place) -> None:
    """Gradients of inputs first or of weights first, late ones after the update: data decides, not order."""

    def first(p: Any, x: Tensor) -> Any:
        dx = fcg.grad(lambda x: loss_of(p, x))(x)
        dw = fcg.grad(loss_of)(p, x)
        return descend(p, dw), {"dx": dx, "dw": dw}

    def last(p: Any, x: Tensor) -> Any:
        dw = fcg.grad(loss_of)(p, x)
        new = descend(p, dw)
        dx = fcg.grad(lambda x: loss_of(p, x))(x)
        return new, {"dx": dx, "dw": dw}

    runs = [assert_law(place, fn, params(place), batches(place))[1:] for fn in (first, last)]
    place.assert_same(runs[0], runs[1], "orders")


@everywhere
@few
@given(slices=st.sampled_from([1, 2, 4, 8]))
def test_h38_micro_batches_replay_as_eager(place: Place, slices: int) -> None:
    def step_fn(p: Any, x: Tensor) -> Any:
        loss, grads = fcg.microbatches(slices)(fcg.value_and_grad(loss_of))(p, x)
        return descend(p, grads), {"loss": loss}

    assert_law(place, step_fn, params(place), batches(place, 4))


@everywhere
def test_h39_parameters_that_the_loss_does_not_use_have_zero_gradients(place: Place) -> None:
    """And defined moments: the optimizer goes over them as over all others."""
    state = fcg.TrainState.create(
        params={**params(place), "unused": place.randn(3, seed=9)}, optimizer=fcg.optim.adam(0.1)
    )

    def step_fn(state: Any, x: Tensor) -> Any:
        grads = fcg.grad(loss_of)(state.params, x)
        return state.apply_gradients(grads), {"unused": grads["unused"]}

    _, after, kept = assert_law(place, step_fn, fcg.snapshot(state), batches(place))
    assert all(metrics["unused"].tolist() == [0.0] * 3 for metrics in kept)
    assert_trees_all_equal(after.params["unused"], place.randn(3, seed=9), "unused")


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_h32_eager_training_before_leaves_no_stream_behind(
    lowering: Any, recwarn: pytest.WarningsRecorder
) -> None:
    """T-STR-3: a model trained on the default stream, whose accumulation nodes somebody keeps."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(GPU.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    nodes = [leaf.expand_as(leaf).grad_fn.next_functions[0][0] for leaf in model.parameters()]  # type: ignore[union-attr]
    losses = []
    for n in range(3):
        loss = F.mse_loss(model(GPU.randn(32, 64, seed=n)), GPU.randn(32, 1, seed=n + 50))
        loss.backward(retain_graph=True)
        optimizer.step()
        losses.append(loss)
    apply, values, buffers = fcg.from_module(model)
    state = fcg.TrainState.create(params=values, buffers=buffers, optimizer=fcg.optim.sgd(0.1))

    def step_fn(state: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> Tensor:
            return F.mse_loss(apply(p, state.buffers, batch["x"])[0], batch["y"])

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    step = fcg.graph_step(step_fn, lowering=lowering)
    reference = fcg.graph_step(step_fn, lowering=lowering)
    twin = fcg.fork(state)
    for n in range(CALLS):
        batch = {"x": GPU.randn(32, 64, seed=n), "y": GPU.randn(32, 1, seed=n + 50)}
        state, metrics = step(state, batch)
        twin, expected = (reference.eager if lowering == "aten" else reference)(twin, batch)
        assert_trees_all_equal((state, metrics), (twin, expected), f"call {n}")
    assert len(nodes) == 4
    assert len(losses) == 3
    said = [str(one.message) for one in recwarn]
    assert not [text for text in said if "AccumulateGrad" in text or "stream" in text], said
