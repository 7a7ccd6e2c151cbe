"""What makes or stores a state belongs outside of a step; a module or an optimizer is no state."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import functional_cg as fcg

CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "save": lambda state, folder: fcg.save(folder / "new.safetensors", state),
    "load": lambda state, folder: fcg.load(folder / "old.safetensors", state),
    "checkpoints": lambda state, folder: fcg.checkpoints(folder / "run").save(state, step=1),
    "state_dict": lambda state, _: fcg.state_dict(state),
    "load_state_dict": lambda state, _: fcg.load_state_dict(state, {"w": torch.ones(2)}),
    "fork": lambda state, _: fcg.fork(state),
    "place": lambda state, _: fcg.place({"v": state["w"]}),
    "sleep": lambda state, _: fcg.sleep(state),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_refused_in_a_step_and_works_between_steps(name: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    state = fcg.place({"w": torch.ones(2)}, can_sleep=True)
    fcg.save(tmp_path / "old.safetensors", state)

    def train_step(state: Any) -> Any:
        CALLS[name](state, tmp_path)
        return {"w": state["w"] + 1}, {}

    with pytest.raises((fcg.CaptureError, fcg.SideEffectError)) as caught:
        fcg.graph_step(train_step)(state)
    text = str(caught.value)
    assert "at test_making_states.py:" in text
    assert re.search(r"To fix: call .*(between steps|before or after the step)", text)
    assert "Fake" not in text
    assert "raised" not in text
    CALLS[name](state, tmp_path)  # as it says


def no_state(thing: Any, fix: str) -> Any:
    return pytest.param(thing, fix, id=type(thing).__name__)


@pytest.mark.parametrize(
    ("thing", "fix"),
    [
        no_state(nn.Linear(2, 1), "apply, params, buffers = fcg.from_module(model)"),
        no_state(torch.optim.SGD([torch.ones(1)], lr=0.1), "fcg.optim.from_torch(torch.optim.SGD, lr=0.1)"),
    ],
)
def test_a_module_or_an_optimizer_is_no_state(thing: Any, fix: str) -> None:
    step = fcg.graph_step(lambda state, x: (state, {}))
    for call in (lambda: fcg.place(thing), lambda: step(thing, 1.0), lambda: fcg.place({"m": thing})):
        with pytest.raises(fcg.LayoutError) as caught:
            call()
        assert fix in str(caught.value).partition("To fix: ")[2]


def test_a_module_is_no_constant_and_its_tensors_are() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match=r"constants must be a tensor, got Linear") as caught:
        fcg.graph_fn(lambda x: model(x), constants=model)
    assert "constants=(*model.parameters(), *model.buffers())" in str(caught.value)
    predict = fcg.graph_fn(lambda x: model(x), constants=(*model.parameters(), *model.buffers()))
    assert torch.equal(predict(torch.ones(3, 2)), model(torch.ones(3, 2)).detach())
