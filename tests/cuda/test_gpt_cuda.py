"""The GPT on CUDA: bitwise against eager, against an independent implementation, and as a program."""

from __future__ import annotations

import pytest
import torch

from functional_cg.examples.transformer import GPT
from tests.gpt_runs import TINY, assert_replay_equals_eager, run_example, train_both

pytestmark = pytest.mark.cuda


def test_replay_equals_eager_bitwise() -> None:
    model = GPT(layers=2, width=64, heads=4, block_size=64, dropout=0.2)
    assert_replay_equals_eager(model, batch_size=4, calls=20, device=torch.device("cuda"))


def test_training_agrees_with_an_ordinary_module() -> None:
    model = GPT(layers=2, width=64, heads=4, block_size=32, dropout=0.0)
    (losses, weights), (judged_losses, judged_weights) = train_both(
        model, batch_size=8, steps=30, device=torch.device("cuda")
    )
    assert losses[-1] < losses[0] - 1
    torch.testing.assert_close(losses, judged_losses, rtol=1e-3, atol=0.0)
    for name, judged in judged_weights.items():
        distance = (weights[name] - judged).norm() / judged.norm()
        assert distance < 1e-3, f"{name}: relative distance {distance:.1e}"


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_program_learns_and_tells(lowering: str) -> None:
    result = run_example(*TINY, "--steps", "60", "--lr", "0.01", "--device", "cuda", "--lowering", lowering)
    assert result["replay_equals_eager"] is True, result["replay_eager_distance"]
    assert (result["steps"], result["captures"], result["replays"]) == (60, 1, 60)
    assert (result["device"], result["lowering"]) == ("cuda", lowering)
    assert result["loss_last"] < result["loss_first"] - 1.5
