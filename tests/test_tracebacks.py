"""Tracebacks end at the user's frames, say how to see all, and lines of libraries name the user's own line."""

from __future__ import annotations

import importlib
import pdb
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import functional_cg as fcg
from functional_cg.messages.source import is_installed

X = torch.ones(4, 3)
NOTE = "FCG_TRACEBACK=full shows them"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(4, 1)

    def forward(self, x):
        return self.second(self.first(x))


apply, params, buffers = fcg.from_module(Net())


def train(state, x):
    def loss_fn(params):
        out, _ = apply(params, {}, x)
        return out.mean()

    loss, grads = fcg.value_and_grad(loss_fn)(state["params"])
    return state, {"loss": loss, "grads": grads}


def raised_by(call: Any) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def frames(error: BaseException | None) -> list[str]:
    assert error is not None
    return [one.name for one in traceback.extract_tb(error.__traceback__)]


def a_call() -> None:
    fcg.graph_step(train)({"params": params}, X)


def test_a_wrong_shape_shows_only_frames_of_the_user(monkeypatch):
    monkeypatch.delenv("FCG_TRACEBACK", raising=False)
    error = raised_by(a_call)
    assert frames(error) == ["raised_by", "a_call"]
    assert frames(error.__cause__) == ["train", "loss_fn", "forward"]
    shown = "".join(traceback.format_exception(error))
    assert shown.count(NOTE) == 1
    assert shown.rstrip().endswith(f"{NOTE}.)")
    assert len(shown.splitlines()) < 40
    assert {Path(one.filename).name for one in traceback.extract_tb(error.__cause__.__traceback__)} == {
        "test_tracebacks.py"
    }


def test_with_the_variable_all_frames_are_there(monkeypatch):
    monkeypatch.setenv("FCG_TRACEBACK", "full")
    error = raised_by(a_call)
    assert {"__call__", "_slow", "trace"} <= {*frames(error), *frames(error.__cause__)}
    assert "_call_impl" in frames(error.__cause__)  # of torch
    assert NOTE not in "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("call", "last"),
    [
        (lambda: fcg.graph_step(train).eager({"params": params}, X), "forward"),
        (lambda: fcg.graph_step(train).lower({"params": params}, X), "<lambda>"),
        (lambda: apply(params, buffers, X), "forward"),
        (lambda: fcg.value_and_grad(lambda p: apply(p, buffers, X)[0].sum())(params), "forward"),
        (lambda: fcg.TrainState.create(params=Net(), optimizer=fcg.optim.sgd(0.1)), "<lambda>"),
        (lambda: fcg.place({"w": "text"}), "<lambda>"),
        (lambda: fcg.load("absent", {"w": X}), "<lambda>"),
        (lambda: fcg.from_module(3), "<lambda>"),
    ],
    ids=["eager", "lower", "apply", "value_and_grad", "create", "place", "load", "from_module"],
)
def test_entries_leave_out_frames_of_the_package_and_of_torch(call, last):
    error = raised_by(call)
    assert frames(error)[0] == "raised_by"
    assert frames(error)[-1] == last
    files = [one.filename for one in traceback.extract_tb(error.__traceback__)]
    assert {Path(name).name for name in files} == {"test_tracebacks.py"}
    assert any(NOTE in note for note in error.__notes__)


def test_what_torch_caught_on_the_way_is_left_out_and_what_the_user_caught_stays():
    def step(state, x):
        try:
            x @ x
        except RuntimeError:
            raise KeyError("mine")  # noqa: B904

    error = raised_by(lambda: fcg.graph_step(step)({"w": X}, X))
    assert type(error.__cause__) is KeyError
    assert type(error.__cause__.__context__) is RuntimeError
    assert frames(error.__cause__.__context__) == ["step"]
    assert "_dispatch" not in "".join(traceback.format_exception(error))


def test_a_debugger_starts_in_the_frame_of_the_user():
    error = raised_by(lambda: apply(params, buffers, X))
    stack, at = pdb.Pdb().get_stack(None, error.__traceback__)
    assert stack[at][0].f_code.co_name == "forward"
    assert torch.equal(stack[at][0].f_locals["x"], X)


def test_ctrl_c_is_left_alone():
    def step(state, x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        fcg.graph_step(step)({"w": X}, X)
    assert "trace" in frames(caught.value)
    assert not hasattr(caught.value, "__notes__")


def test_a_step_in_a_step_is_explained_by_the_outer_one_alone():
    inner = fcg.graph_fn(lambda x: x @ x)
    error = raised_by(lambda: fcg.graph_fn(lambda x: inner(x))(X))
    assert not hasattr(error.__cause__, "__notes__")
    assert frames(error.__cause__) == ["<lambda>", "<lambda>"]


def test_a_call_that_does_not_fit_says_what_would():
    for call, fix in (
        (lambda: fcg.load("file"), "state = fcg.load(path, state)"),
        (lambda: fcg.random.normal((4, 3)), "fcg.random.normal(key, shape)"),
        (lambda: fcg.save("file"), "fcg.save(path, state)"),
        (lambda: apply(params), "out, new_buffers = apply(params, buffers, x)"),
    ):
        with pytest.raises(TypeError, match="missing") as caught:
            call()
        assert str(caught.value).endswith(f"To fix: `{fix}`.")

    def loss_fn(params, batch):
        return params

    with pytest.raises(TypeError, match="loss_fn") as caught:  # the user's function, which an entry calls
        fcg.value_and_grad(loss_fn)(X)
    assert "To fix" not in str(caught.value)


# -- libraries --------------------------------------------------------------------------------------------------

SOURCE = """
import numpy as np
import torch
from torch import nn

def spread(x):
    return (x - x.mean().item()).square().mean()

def noisy(x):
    return x + torch.randn_like(x)

def centered_(x):
    x -= x.mean()
    return x

class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(3, 1)

    def forward(self, x):
        if x.sum() > 0:
            return self.w(x)
        return self.w(-x)

class Plain(Gate):
    def forward(self, x):
        return self.w(x)

class Stack(nn.Module):
    def __init__(self, layerdrop):
        super().__init__()
        self.layers, self.layerdrop = nn.ModuleList(nn.Linear(3, 3) for _ in range(2)), layerdrop

    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand([]) < self.layerdrop:
                continue
            x = layer(x)
        return x

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(3, 1)

    def forward(self, x):
        return self.w(x) * self.mask(x)

    def mask(self, x):
        return torch.as_tensor(np.random.rand(len(x), 1) < 0.5)

class LoopedExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w, self.config = nn.Linear(3, 1), config

    def forward(self, x):
        for row in (x.sum(0) > 0).nonzero():
            x = x + row
        return self.w(x)

class Labelled(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w, self.config = nn.Linear(3, 1), config

    def forward(self, x):
        if self.config.problem_type is None:
            if x.dim() == 2:
                return self.w(x)[(x[:, 0] >= 0).nonzero()].mean()
        elif self.config.problem_type == "regression":
            return self.w(x).square().mean()
        elif self.config.problem_type == "ranking":
            return self.w(x).mean()
"""


@pytest.fixture(params=["site-packages", "target"])
def helpful(request, tmp_path, monkeypatch) -> ModuleType:
    """A library, installed as pip does it, with or without ``--target``."""
    home = tmp_path / request.param
    (home / "helpful").mkdir(parents=True)
    (home / "helpful-1.0.dist-info").mkdir()
    (home / "helpful" / "layers.py").write_text(SOURCE)
    (home / "helpful" / "__init__.py").write_text("from .layers import *")
    monkeypatch.syspath_prepend(str(home))
    for name in ("helpful", "helpful.layers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("helpful")
    yield module
    for name in ("helpful", "helpful.layers"):
        sys.modules.pop(name, None)


def test_the_line_of_a_library_is_named_with_the_users_own(helpful):
    state = fcg.place({"key": fcg.random.key(0)})

    def reads(state, x):
        return helpful.spread(x)

    with pytest.raises(
        fcg.HostSyncError, match=r"at helpful/layers\.py:\d+, called at test_tracebacks\.py:\d+\n"
    ) as caught:
        fcg.graph_fn(reads)(state, X)
    assert "To fix: the line belongs to `helpful`: call `helpful.spread(x)` outside of the step" in str(
        caught.value
    )
    assert fcg.graph_fn(lambda state, spread: spread * 2)(state, helpful.spread(X)) == 0.0

    def draws(state, x):
        return helpful.noisy(x)

    with pytest.raises(fcg.ImplicitRandomnessError, match=r"called at test_tracebacks") as caught:
        fcg.graph_fn(draws)(state, X)
    assert "`fcg.random.keyed(helpful.noisy)(key, x)`" in str(caught.value)

    def fixed(state, x):
        key = fcg.random.fold_in(state["key"], 0)
        return fcg.random.keyed(helpful.noisy)(key, x)

    assert fcg.graph_fn(fixed)(state, X).std() > 0

    def writes(state):
        return helpful.centered_(state["x"])

    copied = r"in `helpful.centered_\(state\['x'\]\)`, pass a copy, `state\['x'\].clone\(\)`"
    with pytest.raises(fcg.ReadOnlyError, match=copied):
        fcg.graph_fn(writes)(fcg.place({"x": X}))
    assert fcg.graph_fn(lambda state: helpful.centered_(state["x"].clone()))({"x": X}).sum() == 0.0


def test_a_module_of_a_library_is_overridden_in_a_class_of_the_users_own(helpful):
    apply, params, _ = fcg.from_module(helpful.Gate())

    def predict(params, x):
        return apply(params, {}, x)[0]

    with pytest.raises(fcg.HostSyncError, match=r"inherits from `Gate`, override `Gate\.forward`") as caught:
        fcg.graph_fn(predict)(params, X)
    assert "called at test_tracebacks.py" in str(caught.value)

    class Mine(helpful.Gate):
        def forward(self, x):
            return torch.where(x.sum() > 0, self.w(x), self.w(-x))

    apply, params, _ = fcg.from_module(Mine())
    assert fcg.graph_fn(predict)(params, X).shape == (4, 1)


def predicted(module: nn.Module) -> Any:
    apply, params, _ = fcg.from_module(module)
    run = fcg.graph_fn(lambda state, x: apply(state["params"], {}, x, key=state["key"])[0])
    return run({"params": params, "key": fcg.random.key(0)}, X)


def test_layers_that_a_library_leaves_out_at_random_are_selected(helpful):
    with pytest.raises(
        fcg.HostSyncError, match="such as `layerdrop`, to 0, and put each layer into a module"
    ):
        predicted(helpful.Stack(0.5))

    class Selected(nn.Module):
        def __init__(self, layer: nn.Module, p: float) -> None:
            super().__init__()
            self.layer, self.p = layer, p

        def forward(self, x, *args, **kwargs):
            y = self.layer(x, *args, **kwargs)
            return torch.where(torch.rand([], device=x.device) < self.p, x, y) if self.training else y

    for p in (0.0, 0.5, 1.0):
        stack = helpful.Stack(0.0)
        whole = stack(X)
        stack.layers = nn.ModuleList(Selected(layer, p) for layer in stack.layers)
        assert torch.equal(predicted(stack), X) is (p == 1.0)
        torch.testing.assert_close(stack.eval()(X), whole)


def test_what_a_library_draws_by_numpy_is_drawn_by_torch(helpful):
    advice = (
        r"inherits from `Masked`, override `Masked\.mask`: .* draw with torch, `torch\.rand\(shape\) < p`"
    )
    with pytest.raises(fcg.ForeignTensorError, match=advice):
        predicted(helpful.Masked())

    class Mine(helpful.Masked):
        def mask(self, x):
            return torch.rand(len(x), 1) < 0.5

    assert predicted(Mine()).shape == (4, 1)


def test_experts_in_a_loop_have_a_switch(helpful):
    config = SimpleNamespace(_experts_implementation="eager")
    with pytest.raises(fcg.HostSyncError, match=r'`model.set_experts_implementation\("batched_mm"\)`'):
        predicted(helpful.LoopedExperts(config))


def test_a_branch_that_a_setting_decides_names_the_setting_and_its_other_values(helpful):
    module = helpful.Labelled(SimpleNamespace(problem_type=None))
    message = (
        r"`helpful`: it runs since `self.config.problem_type is None`; before `from_module`, set "
        r"`model.config.problem_type` to 'regression' or 'ranking'; or, in a class of your own"
    )
    with pytest.raises(fcg.HostSyncError, match=message):
        predicted(module)
    for value in ("regression", "ranking"):
        module.config.problem_type = value
        assert predicted(module).shape == ()


def test_a_wrong_shape_in_a_library_asks_for_another_input(helpful):
    apply, params, _ = fcg.from_module(helpful.Plain())

    def predict(params, x):
        return apply(params, {}, x)[0]

    with pytest.raises(
        fcg.CaptureError, match=r"To fix: `w`, Linear\(.*\), .* an input whose last dimension is 3\."
    ):
        fcg.graph_fn(predict)(params, torch.ones(4, 2))
    assert fcg.graph_fn(predict)(params, torch.ones(4, 3)).shape == (4, 1)


@pytest.mark.parametrize(
    ("name", "installed"),
    [
        ("/usr/lib/python3/dist-packages/timm/layers.py", True),
        ("/home/me/.venv/lib/python3.11/site-packages/timm/layers.py", True),
        ("/home/me/project/train.py", False),
        (__file__, False),
    ],
)
def test_what_is_installed(name, installed):
    assert is_installed(name) is installed
