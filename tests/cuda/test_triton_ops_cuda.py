"""A user's Triton kernels in a step: as ops of `torch.library` they are captured, launched bare they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_close

triton = pytest.importorskip("triton")
tl = triton.language

pytestmark = pytest.mark.cuda
BLOCK = 256


@triton.jit
def scaled_by(x, y, factor, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, tl.load(x + place, place < count) * factor, place < count)


def _launched(kernel: Any, x: Tensor, factor: float) -> Tensor:
    y = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, factor, x.numel(), BLOCK=BLOCK)
    return y


@torch.library.triton_op("fcg_tests::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    return _launched(torch.library.wrap_triton(scaled_by), x, factor)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.factor = inputs[1]


scaled.register_autograd(lambda ctx, grad: (scaled(grad.contiguous(), ctx.factor), None), setup_context=_keep)


class Bare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return _launched(scaled_by, x, factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _launched(scaled_by, grad.contiguous(), ctx.factor), None


class Net(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op, self.inner, self.outer = op, nn.Linear(300, 300), nn.Linear(300, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.op(self.inner(x).relu(), 3.0))  # type: ignore[no-any-return]


def _train_step(op: Any, lowering: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    apply, params, buffers = fcg.from_module(Net(op).cuda())

    def train_step(state: Any, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: apply(p, buffers, x)[0].square().mean())(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.adam(1e-3))
    return fcg.graph_step(train_step, lowering=lowering), state


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_an_op_of_triton_trains_as_eager_does(lowering: str) -> None:
    step, state = _train_step(scaled, lowering)
    twin = fcg.fork(state)
    for call in range(16):
        x = torch.randn(8, 300, generator=torch.Generator().manual_seed(call)).cuda()
        state, metrics = step(state, x)
        twin, expected = step.eager(twin, x)
        assert_trees_all_close((state, metrics), (twin, expected), rtol=1e-4, atol=1e-5)
    assert step.stats.replays == 16


def test_a_bare_kernel_is_refused_and_the_op_is_what_the_message_names() -> None:
    step, state = _train_step(Bare.apply, "aten")
    with pytest.raises(fcg.HostSyncError, match=r"the address of a tensor(.|\n)*triton_op(.|\n)*wrap_triton"):
        step(state, torch.randn(8, 300, device="cuda"))
