"""Complex parameters train as in torch: an optimizer sees their real and imaginary parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg import optim


class Net(nn.Module):
    """Has complex parameters with axes, transposed, and with none, beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(shape, dtype=torch.complex128, generator=made)  # noqa: E731
        self.weight, self.scale = nn.Parameter(draw(3, 4)), nn.Parameter(draw())
        self.turned, self.bias = nn.Parameter(draw(2, 4).T), nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return ((x.to(torch.complex128) @ self.weight * self.scale) @ self.turned).abs() + self.bias


PAIRS: dict[str, tuple[Any, Any]] = {
    "sgd": (optim.sgd(0.05, momentum=0.9), (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})),
    "adamw": (optim.adamw(0.05, weight_decay=0.1), (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1})),
    "rmsprop": (optim.rmsprop(0.05), (torch.optim.RMSprop, {"lr": 0.05})),
    "flat": (optim.flatten(optim.adam(0.05)), (torch.optim.Adam, {"lr": 0.05})),
}


def train_step_of(apply: Any) -> Any:
    def train_step(state: Any, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda params: apply(params, {}, x)[0].square().mean())(state.params)
        return state.apply_gradients(grads), loss

    return train_step


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    module(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", PAIRS)
def test_complex_parameters_train_as_in_torch(kind: str) -> None:
    ours, (theirs, options) = PAIRS[kind]
    module = Net()
    apply, params, _ = fcg.from_module(module)
    train_step, optimizer = train_step_of(apply), theirs(module.parameters(), **options)
    state = fcg.TrainState.create(params=params, optimizer=ours)
    step = fcg.graph_step(train_step, lowering="aten")
    for call in range(4):
        x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(call))
        # From the same state each time: left to itself, an eager loop lays a transposed leaf out anew, and a product of
        # other strides may add up in another order.
        plain, expected = train_step(fcg.snapshot(state), x)
        state, loss = step(state, x)
        assert torch.equal(loss, expected)
        for ours_, theirs_ in zip(fcg.tree.leaves(state), fcg.tree.leaves(plain), strict=True):
            assert torch.equal(ours_, theirs_)
        trained(module, optimizer, x)
        for name, param in module.named_parameters():
            torch.testing.assert_close(fcg.snapshot(state.params[name]), param.detach())
    state.apply_gradients({**state.params, "scale": None})
    module.load_state_dict(apply.state_dict(state.params, {}))


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_complex_moments_move_from_torch_and_back(kind: str) -> None:
    ours, (theirs, options) = PAIRS[kind]
    module = Net()
    optimizer = theirs(module.parameters(), **options)
    trained(module, optimizer, torch.ones(2, 3, dtype=torch.float64))
    apply, params, _ = fcg.from_module(module)
    names = [name for name, _ in module.named_parameters()]
    state = fcg.TrainState.create(params=params, optimizer=ours)
    state = fcg.optim.load_torch_state(state, optimizer.state_dict(), names=names, step=1)
    other = copy.deepcopy(module)
    again = theirs(other.parameters(), **options)
    again.load_state_dict(fcg.optim.torch_state(state, again.state_dict(), names=names))
    state, _ = fcg.graph_step(train_step_of(apply), lowering="aten")(
        state, torch.zeros(2, 3, dtype=torch.float64)
    )
    for one, its in ((module, optimizer), (other, again)):
        trained(one, its, torch.zeros(2, 3, dtype=torch.float64))
        for name, param in one.named_parameters():
            torch.testing.assert_close(fcg.snapshot(state.params[name]), param.detach())


def test_flags_by_axes_choose_complex_parameters_as_real_ones() -> None:
    decay = optim.adamw(
        0.1, weight_decay=0.5, mask=lambda params: fcg.tree.map(lambda p: p.dim() > 1, params)
    )
    state = fcg.TrainState.create(
        params={"w": torch.ones(2, 2) + 0j, "b": torch.ones(2) + 0j}, optimizer=decay
    )
    state = state.apply_gradients(fcg.tree.map(torch.zeros_like, state.params))
    assert torch.equal(state.params["b"], torch.ones(2) + 0j)
    torch.testing.assert_close(state.params["w"], torch.full((2, 2), 0.95 + 0j))


def test_averages_of_complex_parameters() -> None:
    optimizer = optim.schedule_free(optim.sgd(0.1), learning_rate=0.1)
    state = fcg.TrainState.create(params={"w": torch.ones(1) + 1j}, optimizer=optimizer)
    state = state.apply_gradients({"w": torch.ones(1) + 0j})
    average = optimizer.eval_params(state.opt_state, state.params)["w"]
    torch.testing.assert_close(average, torch.tensor([0.9 + 1j]))


def test_an_optimizer_by_hand_takes_the_parts() -> None:
    weight = torch.ones(2) + 1j
    with pytest.raises(fcg.LayoutError, match=r"for a complex one, `torch.view_as_real\(w\)`"):
        optim.adam(0.1).init({"w": weight})
    parts = {"w": torch.view_as_real(weight)}
    adam = optim.adam(0.1)
    new, _ = adam.step({"w": torch.ones(2, 2)}, adam.init(parts), parts)  # type: ignore[misc]
    torch.testing.assert_close(torch.view_as_complex(new["w"]), weight - (0.1 + 0.1j))
