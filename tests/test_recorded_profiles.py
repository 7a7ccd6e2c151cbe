"""A profile that is written as JSON and read again is the same, but for the text of lines."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.step.profile.result import ProfiledKernel
from notebooks.helpers.profiles import packed, unpacked


def test_a_profile_survives_json() -> None:
    apply, params, buffers = fcg.from_module(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1)))
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.adamw(1e-2, weight_decay=0.0))

    @fcg.graph_step
    def train_step(state: Any, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: apply(p, buffers, x)[0].square().mean())(state.params)
        return state.apply_gradients(grads), loss

    profile = train_step.profile(state, torch.randn(8, 4))
    profile = replace(profile, calls=tuple(replace(call, source="") for call in profile.calls))
    kernels = tuple(ProfiledKernel(f"fused_{n}", 1e-6 * n, profile.calls[n : n + 2]) for n in range(3))
    for one in (profile, replace(profile, compiled=True, kernels=kernels)):
        again = unpacked(json.loads(json.dumps({"machine": "any", **packed(one)})))
        assert again == one
        assert str(again) == str(one)
