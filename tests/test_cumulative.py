"""Products of the first entries: a gradient that is as long for a thousand entries as for ten, and is torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.tensors.recorded.cumulative import CUMULATIVE, cumprod
from functional_cg.testing import assert_trees_all_equal
from tests.shares import few


def gradient(product: Any, values: Tensor, dim: int, grad: Tensor) -> Tensor:
    leaf = values.clone().requires_grad_()
    (found,) = torch.autograd.grad(product(leaf, dim), leaf, grad)
    return found


@few
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(0, 2),
    st.sampled_from([torch.float32, torch.float64, torch.complex128]),
    st.integers(0, 3),
    st.integers(0, 10**6),
)
def test_the_gradient_is_that_of_torch(
    shape: list[int], dim: int, dtype: torch.dtype, zeros: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    values, grad = (torch.randn(shape, generator=draw, dtype=dtype) for _ in range(2))
    for _ in range(zeros):
        values.view(-1)[int(torch.randint(values.numel(), (), generator=draw))] = 0
    dim = dim % len(shape) - len(shape) * (seed % 2)
    found, expected = (gradient(one, values, dim, grad) for one in (cumprod, torch.cumprod))
    if zeros:
        torch.testing.assert_close(found, expected)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("shape", "dim"), [((0,), 0), ((3, 0), 1), ((0, 3), 1), ((0, 3), 0)])
def test_of_no_entries_the_gradient_has_none(shape: tuple[int, ...], dim: int) -> None:
    assert gradient(cumprod, torch.empty(shape), dim, torch.empty(shape)).shape == shape


@pytest.mark.parametrize("zeros", [0, 2])
def test_the_second_derivative_is_that_of_torch(zeros: int) -> None:
    values = torch.randn(3, 4, dtype=torch.float64)
    values[0, :zeros] = 0
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: cumprod(x, 1), values)
    assert torch.autograd.gradgradcheck(lambda x: cumprod(x, 1), values)


def calls_for(entries: int) -> int:
    step = fcg.graph_step(lambda s, x: (s, fcg.grad(lambda w: (w.cumprod(0) * x).sum())(s)), lowering="aten")
    x = torch.randn(entries, 2)
    return len(step.lower(x, x).program.instrs)


def test_a_step_has_as_many_calls_for_any_number_of_entries() -> None:
    assert calls_for(4) == calls_for(64) < 60


@pytest.mark.parametrize("product", [Tensor.cumprod, torch.cumprod])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_transmittance_along_rays(product: Any, dtype: torch.dtype | None) -> None:
    """Rendering as neural radiance fields do, with a density that lets no light through; a step has eager's bits."""

    def step_fn(state: Any, depth: Tensor) -> Any:
        def loss_fn(density: Tensor) -> Tensor:
            alpha = 1 - torch.exp(-density.relu() * depth)
            through = product(1 - alpha + 1e-10, -1, dtype=dtype)
            return (alpha * through).sum(-1).square().mean()

        loss, grad = fcg.value_and_grad(loss_fn)(state["density"])
        return {"density": state["density"] - 0.1 * grad}, {"loss": loss, "grad": grad}

    step = fcg.graph_step(step_fn, lowering="aten")
    density = torch.randn(8, 32)
    density[0, 5] = 1e4
    state, eager = fcg.place({"density": density}), {"density": density.clone()}
    for call in range(4):
        depth = torch.rand(8, 32, generator=torch.Generator().manual_seed(call))
        state, metrics = step(state, depth)
        eager, expected = step_fn(eager, depth)
        assert_trees_all_equal(metrics, expected)
    assert_trees_all_equal(fcg.snapshot(state), eager)


def test_what_transforms_of_torch_make_of_it_is_up_to_torch() -> None:
    values = torch.randn(3, 4)
    of = torch.func.vmap(torch.func.grad(lambda row: cumprod(row, 0).sum()))
    torch.testing.assert_close(
        of(values), torch.func.vmap(torch.func.grad(lambda row: row.cumprod(0).sum()))(values)
    )
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(values.clone().requires_grad_(), torch.ones(3, 4))
        tangent = torch.autograd.forward_ad.unpack_dual(cumprod(dual, 1)).tangent
        assert torch.equal(tangent, torch.autograd.forward_ad.unpack_dual(torch.cumprod(dual, 1)).tangent)
    with torch.autocast("cpu", torch.bfloat16):
        assert cumprod(values.requires_grad_(), 0).dtype == torch.cumprod(values, 0).dtype
    assert cumprod(values.detach(), 0, dtype=torch.float64).dtype is torch.float64


def test_a_torch_that_takes_no_more_calls_keeps_its_own() -> None:
    old = torch.__version__ < "2.13"
    assert set(CUMULATIVE) == ({torch.cumprod, Tensor.cumprod} if old else set())
