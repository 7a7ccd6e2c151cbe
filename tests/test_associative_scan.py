"""Associative scans inside of a step: state space models write their recurrence so."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._higher_order_ops.associative_scan import AssociativeScanOp, associative_scan

import functional_cg as fcg
from functional_cg.tensors.recorded import higher_order
from functional_cg.testing import assert_trees_all_close, assert_trees_all_equal
from tests.compiled_graphs import ON_A_GPU
from tests.shares import CALLS


def then(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What two linear maps are one after the other."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def one_by_one(decay: Tensor, inputs: Tensor) -> Tensor:
    h, states = torch.zeros_like(inputs[0]), []
    for a, x in zip(decay, inputs, strict=True):
        h = a * h + x
        states.append(h)
    return torch.stack(states)


def flat(al: Tensor, bl: Tensor, ar: Tensor, br: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    assert len(others) == 1  # what the operator gets besides
    return then((al, bl), (ar, br))


@given(count=st.integers(1, 40), width=st.integers(1, 3), data=st.data())
def test_each_place_has_what_is_made_of_all_up_to_it(count: int, width: int, data: st.DataObject) -> None:
    numbers = st.lists(st.integers(-2, 2), min_size=count * width, max_size=count * width)
    decay, inputs = (torch.tensor(data.draw(numbers)).view(count, width) for _ in range(2))
    products, states = higher_order.associative_scan(flat, [decay, inputs], [decay])
    assert torch.equal(products, decay.cumprod(0))
    assert torch.equal(states, one_by_one(decay, inputs))


def recurrent(scanned: Any) -> Any:
    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            states: Tensor = scanned(torch.sigmoid(params["decay"]).expand(len(x), -1), x * params["scale"])
            return states.square().mean()

        loss, grads = fcg.value_and_grad(loss_fn)(state)
        return fcg.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss}

    return step


def by_operator(decay: Tensor, inputs: Tensor) -> Tensor:
    states: Tensor = torch.ops.higher_order.associative_scan(
        lambda *four: then(four[:2], four[2:]), [decay, inputs], ()
    )[1]
    return states


def by_torch(decay: Tensor, inputs: Tensor) -> Tensor:
    mode = "pointwise" if decay.is_cuda else "generic"
    states: Tensor = associative_scan(then, (decay, inputs), dim=0, combine_mode=mode)[1]
    return states


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
@pytest.mark.parametrize("scanned", [by_operator, by_torch])
def test_a_step_with_a_scan_replays_and_trains_as_a_loop_does(scanned: Any, device: str) -> None:
    step, loop = fcg.graph_step(recurrent(scanned), lowering="aten"), recurrent(one_by_one)
    params = {"decay": torch.zeros(3, device=device), "scale": torch.ones(3, device=device)}
    state, eager = fcg.place(params), fcg.place(params)
    generator = torch.Generator().manual_seed(0)
    for _ in range(CALLS):
        x = torch.randn(13, 3, generator=generator).to(device)
        params, expected = loop(params, x)
        eager, told = step.eager(eager, x)
        state, metrics = step(state, x)
        assert_trees_all_equal((state, metrics), (eager, told))
        assert_trees_all_close((fcg.snapshot(state), metrics), (params, expected), rtol=1e-4, atol=1e-5)
    assert step.stats.replays == CALLS


def test_torch_calls_its_operator_as_we_expect() -> None:
    assert [*inspect.signature(AssociativeScanOp.__call__).parameters] == [
        "self",
        "combine_fn",
        "xs",
        "additional_inputs",
    ]
