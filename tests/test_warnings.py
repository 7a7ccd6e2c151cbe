"""What a step is warned of: through ``warnings``, at the user's line, once, and as an error under ``-W error``."""

from __future__ import annotations

import ast
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg


def state_of() -> Any:
    return fcg.TrainState.create(
        params={"w": torch.ones(2)}, optimizer=fcg.optim.sgd(0.1), key=fcg.random.key(0)
    )


def constant_keys(state: Any, x: Tensor) -> Any:
    noise = fcg.random.normal(fcg.random.fold_in(state.key, 1), (2,))
    return state.replace(), {"a": noise + fcg.random.normal(fcg.random.fold_in(state.key, 2), (2,))}


def one_key(state: Any, x: Tensor) -> Any:
    key = fcg.random.fold_in(state.key, state.step)
    noise = fcg.random.normal(key, (2,))
    return state.apply_gradients({"w": noise + fcg.random.uniform(key, (2,))}), {}


def detached(state: Any, x: Tensor) -> Any:
    def loss_fn(weights: Any) -> Tensor:
        return (x * weights["w"].detach()).sum()

    return state.apply_gradients(fcg.grad(loss_fn)(state.params)), {}


def from_outside(state: Any, x: Tensor) -> Any:
    return state.apply_gradients(fcg.grad(lambda p: (x * state.params["w"]).sum())(state.params)), {}


def dropped(state: Any, x: Tensor) -> Any:
    state.apply_gradients({"w": x})
    return state.replace(), {}


def written(state: Any, x: Tensor) -> Any:
    x += 1
    return state.apply_gradients({"w": x}), {}


CASES: dict[Callable[..., Any], list[str]] = {
    constant_keys: ["draw the same numbers at each call", "test_warnings.py:2"],
    one_key: ["draw from one and the same key"],
    detached: ["`loss_fn`", "without `.detach()`", "compute it with `weights`", "test_warnings.py:"],
    from_outside: ["`<lambda>`", "compute it with `p`, not with the state from outside"],
    dropped: ["new values were computed and dropped"],
    written: ["`x`: the step writes in place into its own copy"],
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_a_cause_is_one_warning_at_the_line_that_calls(function: Callable[..., Any]) -> None:
    step, state = fcg.graph_step(function), state_of()
    with warnings.catch_warnings(record=True, action="always") as seen:
        state, _ = step(state, torch.ones(2))
        state, _ = step(state, torch.ones(2))
    (one,) = seen
    assert one.filename == __file__
    text = str(one.message)
    assert text.startswith(f"`{function.__name__}`: ")
    assert all(part in text for part in CASES[function])
    assert f"warning: {text.partition(': ')[2]}" in step.explain()


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_a_filter_makes_it_an_error_before_anything_runs(function: Callable[..., Any]) -> None:
    step, state = fcg.graph_step(function), state_of()
    with warnings.catch_warnings(action="error"):
        for _ in range(2):
            with pytest.raises(UserWarning, match=f"`{function.__name__}`: "):
                step(state, torch.ones(2))
    with warnings.catch_warnings(action="ignore"):
        state, _ = step(state, torch.ones(2))
    assert state.generation == 1


def test_outside_of_a_step_it_is_at_the_line_itself() -> None:
    with warnings.catch_warnings(record=True, action="always") as seen:
        fcg.value_and_grad(lambda p: torch.tensor(3.0))(torch.ones(2))
        fcg.grad(lambda p: p.detach().sum())(torch.ones(2))
    assert [one.filename for one in seen] == [__file__] * 2


def test_the_log_announces_and_warns_of_nothing(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    caplog.set_level(logging.INFO, logger="functional_cg")
    fcg.graph_step(constant_keys)(state_of(), torch.ones(2))
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert len(recwarn) == 1
    package = Path(fcg.__file__).parent
    calls = [
        f"{file.relative_to(package)}: {ast.unparse(node)}"
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("warnings.warn", "log.warning", "_log.warning")
    ]
    # What the user has asked for is announced: a filter must not stop a debugging session.
    assert sorted(call.partition(":")[0] for call in calls) == ["messages/source.py", "step/captures.py"]
    assert any("FCG_DISABLE_CAPTURE" in call for call in calls)
