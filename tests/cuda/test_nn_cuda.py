"""``from_module`` on CUDA: replay against eager, dropout masks against the CPU's, outputs against the plain module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.testing import assert_replay_equals_eager, assert_trees_all_close
from tests.nn_models import DRAWING, GPT, PLAIN, mean_square, state_of, tokens, train_step

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    # cuDNN's RNNs say so for weights of a functional call, which lie where the state has them.
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk"),
]


def on_cuda(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cuda() for name, value in batch.items()}


@pytest.mark.parametrize("case", [*PLAIN, *DRAWING])
def test_replay_equals_eager(case: str) -> None:
    make, batch = (PLAIN | DRAWING)[case]
    apply, state = state_of(make().cuda(), fcg.optim.adamw(1e-2, weight_decay=0.1))
    step = train_step(apply, lowering="aten")
    assert_replay_equals_eager(step, state, [batch().cuda() for _ in range(16)])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("flash", [True, False])
def test_replay_of_a_gpt_equals_eager(dropout: float, flash: bool) -> None:
    apply, state = state_of(GPT(dropout, flash=flash).cuda(), fcg.optim.adamw(1e-2, weight_decay=0.1))
    step = train_step(apply, lambda out, batch: out[1], lambda batch: batch, lowering="aten")
    assert_replay_equals_eager(step, state, [on_cuda(tokens()) for _ in range(16)])


def test_compiled_replay_of_a_gpt_is_close_to_eager() -> None:
    apply, state = state_of(GPT(0.1).cuda())
    step = train_step(apply, lambda out, batch: out[1], lambda batch: batch, lowering="inductor")
    # A compiler reorders sums; 16 steps add the differences up.
    batches = [on_cuda(tokens()) for _ in range(16)]
    assert_replay_equals_eager(step, state, batches, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", DRAWING)
def test_draws_are_those_of_the_cpu(case: str) -> None:
    make, batch = DRAWING[case]
    module, x = make(), batch()
    apply, params, buffers = fcg.from_module(module)
    moved = fcg.tree.map(Tensor.cuda, (params, buffers))
    before = torch.cuda.get_rng_state()
    there = apply(*moved, x.cuda(), key=fcg.random.key(3, "cuda"))[0]
    assert torch.equal(torch.cuda.get_rng_state(), before)
    here = apply(params, buffers, x, key=fcg.random.key(3))[0]
    # One differing mask would move an output by far more than another order of sums does.
    assert_trees_all_close(fcg.tree.map(Tensor.cpu, there), here, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", DRAWING)
def test_draws_leave_the_generator_alone_and_are_a_function_of_the_key(case: str) -> None:
    make, batch = DRAWING[case]
    apply, params, buffers = fcg.from_module(make().cuda())
    x, before = batch().cuda(), torch.cuda.get_rng_state()
    first, again, other = (
        apply(params, buffers, x, key=fcg.random.key(seed, "cuda"))[0] for seed in (3, 3, 4)
    )
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert_trees_all_close(first, again, rtol=0, atol=0)
    with pytest.raises(AssertionError):
        assert_trees_all_close(first, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mask_of_the_fused_dropout_is_that_of_the_backward(dtype: torch.dtype) -> None:
    apply, _, _ = fcg.from_module(nn.Dropout(0.25))
    x = torch.ones(1000, device="cuda", dtype=dtype, requires_grad=True)
    out, _ = apply({}, {}, x, key=fcg.random.key(3, "cuda"))
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out, grad)
    assert 0.2 < (out == 0).float().mean() < 0.3


@pytest.mark.parametrize("case", PLAIN)
def test_outputs_and_gradients_are_close_to_the_plain_modules(case: str) -> None:
    make, batch = PLAIN[case]
    module, x = make().cuda(), batch().cuda()
    apply, params, buffers = fcg.from_module(module)

    def loss_fn(params: Any) -> Tensor:
        return mean_square(apply(params, buffers, x.clone())[0], x)

    loss, grads = fcg.value_and_grad(loss_fn)(params)
    expected = mean_square(module(x.clone()), x)
    expected.backward()
    want = {name: p.grad for name, p in module.named_parameters()}
    assert_trees_all_close((loss, grads), (expected.detach(), want), rtol=1e-4, atol=1e-5)
