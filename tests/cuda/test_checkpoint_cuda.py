"""Saving from the GPU and loading into a captured step there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import functional_cg as fcg
from tests.test_checkpoint import assert_bitwise, new_run, new_step, take

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]


def test_a_run_goes_on_bitwise_from_a_file_without_a_recapture(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    step = new_step()
    state, _ = take(step, fcg.place(fcg.snapshot(new_run(seed=1)), "cuda"), 0, 3)
    fcg.save(path, state)
    state, wanted = take(step, state, 3, 3)
    later = fcg.state_dict(state)
    assert all(tensor.device.type == "cpu" for tensor in later.values())
    state = fcg.load(path, state)
    assert state.step.device.type == "cuda"
    state, losses = take(step, state, 3, 3)
    assert_bitwise(losses, wanted)
    assert_bitwise(fcg.state_dict(state), later)
    assert (step.stats.captures, step.stats.replays) == (1, 9)


def test_values_may_come_from_another_device_and_go_to_one() -> None:
    values = {"w": torch.randn(2, 3, 4, 5), "n": torch.tensor(3)}
    kept = fcg.state_dict(fcg.place(values, "cuda"))
    assert_bitwise(
        fcg.state_dict(fcg.load_state_dict(fcg.place(fcg.tree.map(torch.zeros_like, values)), kept)), kept
    )
    there = fcg.tree.map(lambda leaf: leaf.cuda(), kept)
    assert_bitwise(fcg.state_dict(fcg.load_state_dict(fcg.place(values), there)), kept)


def test_a_dict_is_complete_when_it_is_returned_from_a_side_stream() -> None:
    state = fcg.place({"w": torch.zeros(1 << 22)}, "cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        state = state.replace(w=torch.ones(1 << 22))  # type: ignore[attr-defined]
    assert fcg.state_dict(state)["w"].sum().item() == 1 << 22


def test_a_copy_is_queued_before_the_next_step_writes(tmp_path: Path) -> None:
    """The state is donated at once, again and again; each checkpoint has the values of its own step."""
    large = 1 << 24

    def advance(state: Any, x: torch.Tensor) -> Any:
        return {"w": state["w"] + x, "step": state["step"] + 1}, {}

    step, one = fcg.graph_step(advance), torch.ones((), device="cuda")
    state = fcg.place({"w": torch.zeros(large, device="cuda"), "step": 0})
    with fcg.checkpoints(tmp_path, keep=None) as saved:
        for _ in range(4):
            state, _ = step(state, one)
            saved.save(state)
            for _ in range(3):
                state, _ = step(state, one)
        saved.wait()
        assert saved.steps() == [1, 5, 9, 13]
        for number in saved.steps():
            state = saved.load(state, step=number)
            assert state["w"].eq(number).all()
            assert state["step"].item() == number
