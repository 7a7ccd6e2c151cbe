"""Which calls of attention with dropout a kernel takes on a GPU, and what its derivative refuses; the rest: cuda/."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import functional_cg as fcg
from functional_cg.random.attention import _Attention, attention_for

LENGTH = 16


class Results(TorchDispatchMode):
    """Lists the results of what runs in it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen += [one for one in (out if isinstance(out, tuple) else (out,)) if isinstance(one, Tensor)]
        return out


def given(mask: str, device: str) -> tuple[list[Tensor], Tensor | None]:
    operands = [torch.zeros(2, 2, LENGTH, 32, device=device, dtype=torch.float16) for _ in range(3)]
    dtype = getattr(torch, mask, None)
    return operands, None if dtype is None else torch.ones(LENGTH, LENGTH, device=device, dtype=dtype)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "float16", "float32", "float64", "bfloat16", "int64"])
def test_a_kernel_takes_what_torch_takes(mask: str, is_causal: bool) -> None:
    (query, key, value), other = given(mask, "cpu")
    try:
        F.scaled_dot_product_attention(query, key, value, other, 0.5, is_causal)
    except RuntimeError:
        takes = False
    else:
        takes = True
    with FakeTensorMode():
        (query, key, value), other = given(mask, "cuda")
        assert (attention_for(query, key, value, other, 0.5, is_causal) is not None) == takes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("keys", [1, 13, 16])
@pytest.mark.parametrize("width", [1, 24, 40, 48, 72, 80, 96, 128, 256, 257])
def test_a_kernel_takes_heads_of_any_width_and_any_number_of_keys(
    width: int, keys: int, dtype: torch.dtype
) -> None:
    with FakeTensorMode():
        query, key, value = (
            torch.zeros(2, 3, n, width, device="cuda", dtype=dtype) for n in (LENGTH, keys, keys)
        )
        takes = attention_for(query, key, value, None, 0.5, False) is not None
    assert takes == (width <= 256 and dtype != torch.float64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("keys", "width"), [(64, 16), (65, 16), (1000, 64), (4096, 64), (1100, 64)])
def test_what_the_forward_keeps_of_the_mask_is_no_larger_than_the_query(
    keys: int, width: int, dtype: torch.dtype
) -> None:
    """A bit a weight, or nothing where those are more: the backward draws them again."""
    with FakeTensorMode():
        query = torch.zeros(2, 3, 40, width, device="cuda", dtype=dtype)
        key = torch.zeros(2, 3, keys, width, device="cuda", dtype=dtype)
        attend = attention_for(query, key, key, None, 0.5, False)
        assert attend is not None
        with Results() as results:
            attend(torch.zeros(2, dtype=torch.int64, device="cuda"), 0)
    (kept,) = (one for one in results.seen if one.dtype == torch.int32)
    bits = 2 * 3 * 40 * -(-keys // 32) * 4
    query_bytes = query.numel() * query.element_size()
    assert kept.numel() * 4 == (bits if bits <= query_bytes else 0)


def test_a_second_derivative_is_refused() -> None:
    """It would be left out of a sum in silence, since torch goes no way that leads to no input."""
    (query, key, value), _ = given("none", "meta")
    draws = torch.zeros(2, dtype=torch.int64, device="meta")
    out: Tensor = _Attention.apply(
        query.requires_grad_(), key, value, None, draws, 0, 32768, 2.0, False, 0.25, True
    )
    torch.autograd.grad(out.sum(), query, retain_graph=True)
    (once,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match=r"(?s)differentiated twice.*To fix: .*SDPBackend.MATH"):
        torch.autograd.grad(once.sum(), query)


def penalized(kernels: Callable[[], AbstractContextManager[object]]) -> Any:
    @fcg.graph_step
    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(w: Tensor) -> Tensor:
            def score(x: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(x * w, x, x).square().sum()

            with kernels():
                return fcg.grad(score)(x).square().sum()

        loss, grad = fcg.value_and_grad(loss_fn)(state["w"])
        return {"w": state["w"] - 1e-3 * grad}, {"loss": loss}

    return step


def test_a_penalty_on_the_gradient_of_attention_has_a_fix_that_works() -> None:
    state, x = (
        fcg.place({"w": torch.ones(8)}),
        torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0)),
    )
    with pytest.raises(
        fcg.CaptureError, match=r"(?s)derivative for.*To fix: .*sdpa_kernel\(SDPBackend.MATH\)"
    ):
        penalized(nullcontext)(state, x)
    step = penalized(partial(sdpa_kernel, SDPBackend.MATH))
    expected, _ = step.eager(fcg.snapshot(state), x)
    state, _ = step(state, x)
    assert torch.equal(state["w"] + 0, expected["w"] + 0)
