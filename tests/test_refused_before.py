"""What people do and what was refused: it works, or the message says what to do and that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal


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


def test_a_complex_number_is_live_as_others_are() -> None:
    def turned(state: Any, by: complex) -> Any:
        return {"z": state["z"] * by}, {"sum": (state["z"] * by).sum()}

    step = fcg.graph_step(turned, lowering="aten")
    state, numbers = {"z": torch.ones(2, dtype=torch.complex64)}, [1j, 2 + 1j, 0.5 - 3j]
    wanted = torch.ones(2, dtype=torch.complex64)
    for by in numbers:
        state, _ = step(state, by)
        wanted = wanted * by
        torch.testing.assert_close(fcg.snapshot(state)["z"], wanted, rtol=0, atol=0)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def test_functional_call_of_batch_norm_in_training() -> None:
    """Its buffers are leaves of the state, which nothing writes in place: the fix trains as torch does."""
    torch.manual_seed(0)
    model = Normed()
    params = {name: one.detach().clone() for name, one in model.named_parameters()}
    buffers = {name: one.clone() for name, one in model.named_buffers()}
    batches = [torch.randn(8, 3) for _ in range(3)]

    def step_of(call: Callable[..., Any]) -> Any:
        def train_step(state: Any, x: Tensor) -> Any:
            def loss_fn(params: Any) -> Any:
                out, new = call(params, state["buffers"], x)
                return out.square().mean(), new

            (loss, new), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state["params"])
            moved = fcg.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
            return {"params": moved, "buffers": new}, {"loss": loss}

        return fcg.graph_step(train_step, lowering="aten")

    def in_place(params: Any, buffers: Any, x: Tensor) -> Any:
        return torch.func.functional_call(model, (params, buffers), (x,)), buffers

    def on_copies(params: Any, buffers: Any, x: Tensor) -> Any:
        return in_place(params, {name: one.clone() for name, one in buffers.items()}, x)

    state = {"params": params, "buffers": buffers}
    with pytest.raises(fcg.ReadOnlyError) as refusal:
        step_of(in_place)(state, batches[0])
    assert "`apply, params, buffers = fcg.from_module(model)`" in str(refusal.value)
    assert "`buffers = {name: b.clone() for name, b in buffers.items()}`" in str(refusal.value)
    states = [state, state]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in batches:
        states = [
            step_of(call)(one, x)[0]
            for call, one in zip([fcg.from_module(model)[0], on_copies], states, strict=True)
        ]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    for one in map(fcg.snapshot, states):
        torch.testing.assert_close(one["params"], {n: p.detach() for n, p in model.named_parameters()})
        torch.testing.assert_close(one["buffers"], dict(model.named_buffers()))


class Checkpointed(nn.Module):
    def __init__(self, *, layer: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drops = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)]) if layer else None

    def dropped(self, y: Tensor, number: int) -> Tensor:
        return F.dropout(y, 0.5) if self.drops is None else self.drops[number](y)

    def forward(self, x: Tensor, *, kept: bool = False) -> Tensor:
        for number, layer in enumerate([self.one, self.two]):

            def part(x: Tensor, layer: nn.Module = layer, number: int = number) -> Tensor:
                return self.dropped(layer(x).tanh(), number)

            x = part(x) if kept else checkpoint(part, x, use_reentrant=False)
        return x


def test_a_checkpoint_that_draws() -> None:
    """Around a function of a module, the draws belong into a submodule: both runs have the same ones."""

    def trained(*, layer: bool, kept: bool) -> Any:
        torch.manual_seed(0)
        apply, params, buffers = fcg.from_module(Checkpointed(layer=layer))
        state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1), key=fcg.random.key(1))

        @fcg.graph_step(lowering="aten")
        def train_step(state: Any, x: Tensor) -> Any:
            key = fcg.random.fold_in(state.key, state.step)
            loss, grads = fcg.value_and_grad(
                lambda params: apply(params, buffers, x, key=key, kept=kept)[0].square().sum()
            )(state.params)
            return state.apply_gradients(grads), {"loss": loss}

        for call in range(3):
            state, metrics = train_step(state, torch.linspace(-1, 1, 12).view(3, 4) + call)
        return fcg.snapshot(state.params), metrics

    with pytest.raises(
        fcg.CaptureError, match=r"To fix: draw in a submodule, of `self\.drop = torch\.nn\.Dropout\(p\)`"
    ):
        trained(layer=False, kept=False)
    assert_trees_all_equal(trained(layer=True, kept=False), trained(layer=True, kept=True))


def test_a_checkpoint_that_draws_in_a_function_of_the_step() -> None:
    """The fix of the refusal, a key, under the checkpoint."""

    def step_of(drop: Callable[..., Tensor], run: Callable[..., Tensor]) -> Any:
        def train_step(state: Any, x: Tensor) -> Any:
            key = fcg.random.fold_in(state["key"], state["step"])
            loss, grads = fcg.value_and_grad(
                lambda w: run(lambda y: drop(key, torch.tanh(y * w)), x).square().sum()
            )(state["w"])
            return {**state, "w": state["w"] - grads, "step": state["step"] + 1}, {"loss": loss}

        return fcg.graph_step(train_step, lowering="aten")

    def kept(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return run(x)

    def checkpointed(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        out: Tensor = checkpoint(run, x, use_reentrant=False)
        return out

    def by_key(key: Tensor, y: Tensor) -> Tensor:
        return fcg.random.dropout(key, y, 0.5)

    state = {"w": torch.ones(4), "key": fcg.random.key(0), "step": torch.tensor(0)}
    x = torch.linspace(-1, 1, 12).view(3, 4)
    with pytest.raises(fcg.ImplicitRandomnessError, match=r"`fcg\.random\.dropout\(key, x, p\)`"):
        step_of(lambda key, y: F.dropout(y, 0.5), checkpointed)(state, x)
    one, other = (fcg.snapshot(step_of(by_key, run)(state, x)) for run in (checkpointed, kept))
    assert_trees_all_equal(one, other)


@pytest.mark.filterwarnings("ignore:.*_prims_common.check:FutureWarning")  # by a lowering of torch
def test_a_scatter_into_a_diagonal_whose_gradient_is_expanded() -> None:
    """Its backward writes zeros into the gradient of a sum, which is expanded; and ``isclose`` of bools."""

    def show(x: Tensor, y: Tensor) -> Any:
        grad = fcg.grad(lambda x: torch.diagonal_scatter(x, y).sum())(x)
        return grad, torch.isclose(x > 0, x > 1)

    x, y = torch.randn(9, 9, generator=torch.Generator().manual_seed(0)), torch.zeros(9)
    grad, close = fcg.graph_fn(show, lowering="inductor")(x, y)
    assert torch.equal(grad, 1 - torch.eye(9))
    assert torch.equal(close, (x > 0) == (x > 1))
