"""The CTC loss in a step: torch's values and gradients, with lengths of the host or of the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.tensors.recorded.ctc import ctc_loss
from functional_cg.testing import assert_trees_all_equal
from tests.shares import CALLS, on_a_host_or_a_gpu

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def example(seed: int, sizes: tuple[int, int, int, int], blank: int, device: str) -> tuple[Tensor, ...]:
    times, examples, classes, longest = sizes
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(times, examples, classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, classes - 1, (examples, longest), generator=generator)
    inputs = torch.randint(1, times + 1, (examples,), generator=generator)
    outputs = torch.randint(0, longest + 1, (examples,), generator=generator)
    return tuple(one.to(device) for one in (logits, labels + (labels >= blank), inputs, outputs))


def test_all_its_arguments_count_in_a_step() -> None:
    logits, labels, inputs, outputs = example(0, (6, 3, 5, 2), 2, "cpu")
    rows = logits.log_softmax(-1)
    step = fcg.graph_fn(lambda *given: F.ctc_loss(*given, blank=2, reduction="none"))
    expected = F.ctc_loss(rows, labels, inputs, outputs, blank=2, reduction="none")
    torch.testing.assert_close(step(rows, labels, inputs, outputs), expected)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 5), st.integers(2, 6), st.integers(1, 6)),
    reduction=st.sampled_from(["none", "mean", "sum"]),
    zero_infinity=st.booleans(),
    joined=st.booleans(),
    as_lists=st.booleans(),
    data=st.data(),
)
def test_it_is_torch_s(
    device: str,
    seed: int,
    sizes: tuple[int, int, int, int],
    reduction: str,
    zero_infinity: bool,
    joined: bool,
    as_lists: bool,
    data: Any,
) -> None:
    blank = data.draw(st.integers(0, sizes[2] - 1))
    logits, labels, inputs, outputs = example(seed, sizes, blank, device)
    if joined:
        labels = torch.cat([row[:length] for row, length in zip(labels, outputs.tolist(), strict=True)])
    lengths = (inputs.tolist(), outputs.tolist()) if as_lists else (inputs, outputs)

    def both(loss: Any, x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        value = loss(x.log_softmax(-1), *given, blank, reduction, zero_infinity)
        return value, torch.autograd.grad(value.sum(), x)[0]

    expected = both(F.ctc_loss, logits.cpu(), labels.cpu(), inputs.cpu(), outputs.cpu())
    got = both(ctc_loss, logits, labels, *lengths)
    torch.testing.assert_close(got[0].cpu(), expected[0], rtol=1e-9, atol=1e-9, equal_nan=True)
    if zero_infinity or expected[0].isfinite().all():
        torch.testing.assert_close(got[1].cpu(), expected[1], rtol=1e-8, atol=1e-9)


class Speech(nn.Module):
    """A recogniser that counts its own frames and labels."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(6, 5), nn.CTCLoss(zero_infinity=True)

    def forward(self, x: Tensor, labels: Tensor, frames: Tensor) -> Tensor:
        outputs = (labels > 0).sum(1)
        return self.loss(self.head(x).log_softmax(-1).transpose(0, 1), labels, frames, outputs)  # type: ignore[no-any-return]


def speech(call: int, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(call)
    lengths = torch.randint(1, 5, (3,), generator=generator)
    labels = torch.randint(1, 5, (3, 4), generator=generator)
    batch = {
        "x": torch.randn(3, 12, 6, generator=generator),
        "labels": torch.where(torch.arange(4) < lengths[:, None], labels, 0),
        "frames": torch.randint(9, 13, (3,), generator=generator),
    }
    return {name: one.to(device) for name, one in batch.items()}


@on_a_host_or_a_gpu("lowering", ["aten", "inductor"], 2)
def test_a_model_learns_with_lengths_of_its_batches(device: str, lowering: Any) -> None:
    apply, params, buffers = fcg.from_module(Speech().to(device))

    @fcg.graph_step(lowering=lowering)
    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: apply(p, buffers, **batch)[0])(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
    for call in range(CALLS):
        batch, before = speech(call, device), fcg.snapshot(state.params)
        expected, wanted = train_step.eager(fcg.fork(state), batch)
        state, metrics = train_step(state, batch)
        if lowering == "aten" and device == "cpu":  # on a GPU, what comes to one label is added in any order
            assert_trees_all_equal((state, metrics), (expected, wanted))
        torch.testing.assert_close(metrics["loss"], apply(before, buffers, **batch)[0], rtol=1e-5, atol=1e-5)
        for name, value in expected.params.items():
            torch.testing.assert_close(state.params[name] + 0, value + 0, rtol=1e-5, atol=1e-6)
    assert train_step.stats.captures == 1


@pytest.mark.parametrize("device", DEVICES)
def test_one_example_and_lengths_of_the_host(device: str) -> None:
    x = torch.randn(7, 4, device=device).log_softmax(-1)
    step = fcg.graph_fn(lambda x: F.ctc_loss(x, torch.tensor([1, 2], device=x.device), (7,), (2,)))
    expected = F.ctc_loss(x.cpu(), torch.tensor([1, 2]), (7,), (2,))
    for _ in range(3):
        torch.testing.assert_close(step(x).cpu(), expected)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [(((9,), (1,)), "`input_lengths` from 0 to 7, got 9"), (((7,), (3,)), "`target_lengths` from 0 to 2, got 3"),
     (((7, 7), (1,)), "expected 1 `input_lengths`, one per example, got 2")],
)  # fmt: skip
def test_wrong_lengths_are_refused(lengths: Any, message: str) -> None:
    x = torch.randn(7, 1, 4).log_softmax(-1)
    with pytest.raises(fcg.CaptureError, match=message):
        fcg.graph_fn(lambda x: F.ctc_loss(x, torch.tensor([[1, 2]]), *lengths))(x)


def test_autocast_widens_half_precision_and_narrows_nothing() -> None:
    x = torch.randn(7, 1, 4, dtype=torch.float64).log_softmax(-1)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return F.ctc_loss(x, torch.tensor([[1, 2]]), (7,), (2,))

    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        expected = loss(x.to(dtype))
        out = fcg.graph_fn(loss)(x.to(dtype))
        assert out.dtype is expected.dtype
        torch.testing.assert_close(out, expected)


def test_differentiating_twice_is_refused_and_never_loses_terms() -> None:
    log_probs, targets, inputs, outputs = example(0, (6, 2, 4, 2), 0, "cpu")

    def slope(scale: Tensor) -> Tensor:
        loss = fcg.grad(lambda x: ctc_loss(x * scale, targets, inputs, outputs))
        return loss(log_probs.detach()).square().sum()

    with pytest.raises(RuntimeError, match="ctc_loss: it is differentiated twice"):
        fcg.grad(slope)(torch.ones(()))


def test_a_loss_of_an_input_that_asks_for_a_gradient_is_differentiated_once() -> None:
    """As in wav2vec2 of transformers, whose first layer sets ``requires_grad`` of what it is given."""
    log_probs, targets, inputs, outputs = example(0, (6, 2, 4, 2), 0, "cpu")

    def losses(asks: bool) -> Any:
        def train_step(state: Any, x: Tensor, targets: Tensor, inputs: Tensor, outputs: Tensor) -> Any:
            def loss_fn(params: Any) -> Tensor:
                h = x * 1.0
                h.requires_grad = asks
                return F.ctc_loss((h * params["w"]).log_softmax(-1), targets, inputs, outputs)

            loss, grads = fcg.value_and_grad(loss_fn)(state)
            return {"w": state["w"] - grads["w"]}, {"loss": loss}

        state = {"w": torch.ones(4, dtype=torch.float64)}
        step = fcg.graph_step(train_step, lowering="aten")
        return fcg.snapshot(step(fcg.place(state), log_probs, targets, inputs, outputs))

    assert_trees_all_equal(losses(True), losses(False))
