"""Quantization-aware training with torch's own modules, compared with a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def batch(number: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(number)) * (1 + number)


def prepared(backend: str) -> nn.Module:
    model = nn.Sequential(
        quantization.QuantStub(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), quantization.DeQuantStub()
    )
    model.qconfig = quantization.get_default_qat_qconfig(backend)  # type: ignore[assignment]
    return quantization.prepare_qat(model.train())


def between(quantizer: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), quantizer(), nn.Linear(16, 4))


def channels(observer: Any, **options: Any) -> nn.Module:
    return between(lambda: quantization.FakeQuantize(observer, ch_axis=1, **options))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "prepare_qat, per channel": lambda: prepared("x86"),
    "prepare_qat, per tensor": lambda: prepared("qnnpack"),
    "smallest and largest": lambda: channels(quantization.PerChannelMinMaxObserver),
    "moving averages": lambda: channels(
        quantization.MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8
    ),
    "a moving average": lambda: between(quantization.default_fake_quant),
    "a symmetric one": lambda: between(quantization.default_weight_fake_quant),
    "a smallest and a largest": lambda: between(
        lambda: quantization.FakeQuantize(quantization.MinMaxObserver, dtype=torch.quint8)
    ),
    "fixed": lambda: between(quantization.default_fixed_qparams_range_0to1_fake_quant),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def stepped(model: nn.Module) -> tuple[Any, Any, Any]:
    apply, params, buffers = fcg.from_module(model)

    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            out, buffers = apply(params, state.buffers, x)
            return out.square().mean(), buffers

        (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, buffers=buffers), {"loss": loss}

    state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=fcg.optim.sgd(0.1))
    return apply, fcg.graph_step(train_step, lowering="aten"), state


CHANNELS = ("prepare_qat, per channel", "smallest and largest", "moving averages")


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_a_plain_loop(name: str) -> None:
    """Per channel after one batch: before, buffers have no shape."""
    plain, model = made(name), made(name)
    if name in CHANNELS:
        with torch.no_grad():
            plain(batch(9)), model(batch(9))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    apply, step, state = stepped(model)
    twin = fcg.fork(state)
    for call in range(4):
        loss = plain(batch(call)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state, metrics = step(state, batch(call))
        twin, expected = step.eager(twin, batch(call))
        assert_trees_all_equal((state, metrics), (twin, expected), f"call {call}")
        torch.testing.assert_close(metrics["loss"], loss.detach())
    ours = apply.state_dict(state.params, state.buffers)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(ours[key], value, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", CHANNELS)
def test_without_a_first_batch_it_is_refused(name: str) -> None:
    """The message tells to run the module first, which the test above does."""
    _, step, state = stepped(made(name))
    for call in (step, step.eager):
        with pytest.raises(
            fcg.LayoutError, match=r"has no shape yet(.|\n)*`model\(x\)`, before `from_module`"
        ):
            call(state, batch(0))


def test_a_buffer_without_elements_may_be_written_if_it_stays_so() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)
            self.register_buffer("none", torch.zeros(0))

        def forward(self, x: Tensor) -> Tensor:
            self.none.zero_().add_(1)
            return self.linear(x)

    _, step, state = stepped(Empty())
    state, _ = step(state, batch(0))
    assert state.buffers["none"].shape == (0,)


def test_an_observer_with_a_forward_of_its_own_runs_it() -> None:
    class Doubling(quantization.MovingAverageMinMaxObserver):
        def forward(self, x: Tensor) -> Tensor:
            self.min_val.copy_(x.min() * 2)
            self.max_val.copy_(x.max() * 2)
            return x

    model = between(lambda: quantization.FakeQuantize(Doubling))
    expected = model[0](batch(0)).max() * 2
    _, step, state = stepped(model)
    state, _ = step(state, batch(0))
    torch.testing.assert_close(
        fcg.snapshot(state.buffers["1.activation_post_process.max_val"]), expected.detach()
    )
