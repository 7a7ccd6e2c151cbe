"""A precision policy on a mesh: a loss gets leaves in its dtype, each gathered where it is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functional_cg as fcg
from functional_cg import optim
from functional_cg.precision import Policy
from functional_cg.shards.collectives import GATHER
from tests.sharding.law import CALLS, assert_same_step, batches, on_gloo_and_nccl, rank_of
from tests.sharding.programs import Setting, mlp_loss, mlp_params
from tests.sharding.ranks import on_ranks

POLICY = Policy(compute=torch.bfloat16)


def loss_of(params: Any, batch: Any, *, key: Any) -> Any:
    params, batch = POLICY.to_compute((params, batch))
    return mlp_loss(params, batch, key)[0]


def uncast(params: Any, batch: Any, *, key: Any) -> Any:
    return mlp_loss(params, POLICY.to_compute(batch), key)[0]


def in_the_loss(state: Any, batch: Any, loss: Any = loss_of) -> Any:
    key = fcg.random.fold_in(state.key, state.step)
    grads_of = fcg.microbatches(2, dtype=POLICY.accumulate)(fcg.value_and_grad(loss))
    value, grads = grads_of(state.params, batch, key=key)
    return state.apply_gradients(grads), {"loss": fcg.sharding.mean(value), "norm": optim.global_norm(grads)}


def without_a_cast(state: Any, batch: Any) -> Any:
    return in_the_loss(state, batch, uncast)


def narrow_gradients(state: Any, batch: Any) -> Any:
    key = fcg.random.fold_in(state.key, state.step)
    value, grads = fcg.value_and_grad(loss_of)(POLICY.to_compute(state.params), batch, key=key)
    assert {leaf.dtype for leaf in fcg.tree.leaves(grads)} == {torch.bfloat16}
    return state.apply_gradients(grads), {"loss": fcg.sharding.mean(value)}


def trained(stages: list[int], device: str) -> Any:
    """Captured steps have the bits of eager ones; the numbers of gathers in a program."""
    gathers = {}
    for stage in stages:
        for function in (in_the_loss, without_a_cast, narrow_gradients):
            zero = Setting({"data": 2}, stage, {"policy": POLICY}).zero(device)
            params = fcg.tree.map(lambda leaf: leaf.to(device), mlp_params())
            captured = fcg.TrainState.create(
                params=params,
                optimizer=optim.adamw(0.01, weight_decay=0.1),
                key=fcg.random.key(7),
                sharding=zero,
            )
            eager, batch_of = fcg.fork(captured), batches("mlp", device, rank_of())
            step = fcg.graph_step(function, lowering="aten")
            program = step.lower(captured, batch_of(0)).program
            gathers[stage, function.__name__] = sum(instr.op is GATHER for instr in program.instrs)
            for call in range(CALLS if function is not without_a_cast else 0):
                captured, eager, _, _ = assert_same_step(step, captured, eager, batch_of(call), call)
            assert {leaf.dtype for leaf in fcg.tree.leaves(captured.params)} == {torch.float32}
    return gathers


@on_gloo_and_nccl
@pytest.mark.parametrize("stage", [3])
def test_a_policy_on_two_ranks(stage: int, device: str) -> None:
    gathers, _ = on_ranks(2, trained, [stage], device, device=device)
    assert gathers[stage, "in_the_loss"] == gathers[stage, "without_a_cast"]
