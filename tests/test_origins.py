"""Which module and which line a call of a trace belongs to, in the backward, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_cg as fcg
from functional_cg.messages.origins import Origin
from functional_cg.messages.source import Location
from functional_cg.stages.passes.recompute import keep_as_buffers, recompute
from functional_cg.stages.program import Instr
from functional_cg.step.profile.measure import phases
from tests.nn_models import GPT

GRADS = {"value_and_grad": fcg.grad, "torch.func.grad": torch.func.grad}


def calls_of(fn: Any, *args: Any) -> list[Instr]:
    return fcg.graph_step(fn, lowering="aten").lower(*args).program.instrs


def text_of(instr: Instr) -> str:
    """The source of the line that a call belongs to."""
    assert instr.origin.line is not None
    with open(instr.origin.line.filename, encoding="utf-8") as file:
        return file.read().splitlines()[instr.origin.line.line - 1].strip()


def descent(loss: Callable[..., Tensor], grad: Callable[..., Any] = fcg.grad) -> Any:
    """A step of gradient descent on a dict of parameters, written by hand."""

    def step(state: Any, x: Tensor) -> Any:
        grads = grad(loss)(state, x)
        norm = grads["w"].norm()
        return {"w": state["w"] - 0.1 * grads["w"] / norm}, {"norm": norm}

    return step


# --- lines -------------------------------------------------------------------------------------------------


def chain(p: Any, x: Tensor) -> Tensor:
    h = x @ p["w"]
    h = h.sin()
    h = F.layer_norm(h, (3,))
    h = F.gelu(h)
    h = h.softmax(-1)
    return h.square().sum()


# Ops that only the backward of one op makes.
BACKWARD_OF = {
    "cos": "h.sin()",
    "native_layer_norm_backward": "F.layer_norm(",
    "gelu_backward": "F.gelu(",
    "_softmax_backward_data": "h.softmax(",
}


@pytest.mark.parametrize("name", GRADS)
def test_a_call_of_the_backward_belongs_to_the_line_that_it_differentiates(name: str) -> None:
    calls = calls_of(descent(chain, GRADS[name]), {"w": torch.randn(3, 3)}, torch.randn(4, 3))
    found = {one.name: text_of(one) for one in calls if one.backward}
    for op, line in BACKWARD_OF.items():
        assert line in found[op]
    products = [text_of(one) for one in calls if one.name == "mm"]
    assert products == ['h = x @ p["w"]'] * 2  # forward, and the gradient of `w`


@pytest.mark.parametrize("name", GRADS)
def test_second_derivatives_belong_to_the_line_of_the_value(name: str) -> None:
    grad = GRADS[name]

    def penalty(p: Any, x: Tensor) -> Tensor:
        force = grad(lambda x: (x @ p["w"]).sin().sum())(x)
        return force.square().mean()

    calls = calls_of(descent(penalty, grad), {"w": torch.randn(3, 3)}, torch.randn(4, 3))
    assert {text_of(one) for one in calls if one.name in ("sin", "cos")} == {
        'force = grad(lambda x: (x @ p["w"]).sin().sum())(x)'
    }
    assert all(one.backward for one in calls if one.name == "cos")


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.pow(3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x.square()


def test_users_code_in_a_backward_has_its_own_lines() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        h = x @ p["w"]
        h.register_hook(lambda grad: grad.clamp(-1, 1))
        return Cube.apply(h).sum()  # type: ignore[no-any-return, no-untyped-call]

    calls = calls_of(descent(loss), {"w": torch.randn(3, 3)}, torch.randn(4, 3))
    found = {one.name: text_of(one) for one in calls if one.backward}
    assert found["clamp"] == "h.register_hook(lambda grad: grad.clamp(-1, 1))"
    assert found["pow"] == "return grads[0] * 3 * x.square()"


def test_a_line_of_a_comprehension_is_one_of_the_function_around_it() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        return torch.stack(list(part.exp() for part in (x @ p["w"]).unbind(0))).sum()

    calls = calls_of(descent(loss), {"w": torch.randn(3, 3)}, torch.randn(4, 3))
    assert {one.origin.line.function for one in calls if one.name == "exp" and one.origin.line} == {"loss"}


# --- modules -----------------------------------------------------------------------------------------------


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).sigmoid())  # type: ignore[no-any-return]

    def sample(self, x: Tensor) -> Tensor:
        return self.a(x).tanh()  # type: ignore[no-any-return]


class Whole(nn.Module):
    """Two halves; the first may be under a checkpoint."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.recomputes = Half(), Half(), recomputes

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False) if self.recomputes else self.first(x)
        return self.second(x)  # type: ignore[no-any-return]


def training(*modules: nn.Module, wrap: Callable[[Any], Any] = lambda apply: apply) -> tuple[Any, Any]:
    """A step that trains modules one after another, and its state."""
    made = [fcg.from_module(module) for module in modules]
    states = [fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1)) for _, params, _ in made]

    def step(state: Any, x: Tensor) -> Any:
        new = []
        for part, (apply, _, _) in zip(state, made, strict=True):
            grads = fcg.grad(lambda p, apply=apply: wrap(apply)(p, {}, x)[0].square().sum())(part.params)
            new.append(part.apply_gradients(grads))
        return new, {}

    return step, [fcg.snapshot(one) for one in states]


def modules_of(calls: list[Instr], op: str, *, backward: bool) -> list[str]:
    return [one.origin.module for one in calls if one.name == op and one.backward is backward]


def test_each_call_knows_its_module() -> None:
    step, state = training(Whole())
    calls = calls_of(step, state, torch.randn(4, 3))
    linear = ["Whole.first.a", "Whole.first.b", "Whole.second.a", "Whole.second.b"]
    assert modules_of(calls, "addmm", backward=False) == linear
    assert modules_of(calls, "sigmoid", backward=False) == ["Whole.first", "Whole.second"]
    assert modules_of(calls, "sigmoid_backward", backward=True) == ["Whole.second", "Whole.first"]
    weights, inputs = linear, linear[1:]  # `x` needs no gradient
    assert sorted(modules_of(calls, "mm", backward=True)) == sorted([*weights, *inputs])
    assert not any(one.origin.module for one in calls if one.name.startswith("_fused_sgd"))


@pytest.mark.parametrize("how", ["a checkpoint in the module", "remat around it"])
def test_what_is_recomputed_is_backward_and_knows_its_module(how: str) -> None:
    inside = how == "a checkpoint in the module"
    step, state = training(Whole(recomputes=inside), wrap=(lambda apply: apply) if inside else fcg.remat)
    calls = calls_of(step, state, torch.randn(4, 3))
    again = modules_of(calls, "sigmoid", backward=True)
    assert again == (["Whole.first"] if inside else ["Whole.first", "Whole.second"])
    assert {phase for one, phase in phases(calls).items() if one.backward} == {"backward"}
    assert sorted(set(modules_of(calls, "mm", backward=True))) == [
        f"Whole.{half}.{name}" for half in ("first", "second") for name in "ab"
    ]


def test_two_models_of_one_class_are_told_apart() -> None:
    step, state = training(Half(), Half())
    calls = calls_of(step, state, torch.randn(4, 3))
    assert modules_of(calls, "sigmoid", backward=False) == ["Half", "Half#2"]
    assert modules_of(calls, "sigmoid_backward", backward=True) == ["Half", "Half#2"]


def test_a_method_of_a_submodule_is_that_submodules() -> None:
    apply, params, _ = fcg.from_module(Whole())
    sample, second = apply.method("first.sample"), apply.method("second")

    def step(state: Any, x: Tensor) -> Any:
        return state, {"y": sample(state, {}, x)[0].sum() + second(state, {}, x)[0].sum()}

    calls = calls_of(step, params, torch.randn(4, 3))
    assert modules_of(calls, "tanh", backward=False) == ["Whole.first"]
    assert modules_of(calls, "sigmoid", backward=False) == ["Whole.second"]


class Forces(nn.Module):
    """Differentiates its own energy in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Half()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.net(x).sum()
            (grad,) = torch.autograd.grad(energy, x, create_graph=True)
        return -grad


def test_a_backward_inside_of_a_forward_belongs_to_the_submodules_that_it_differentiates() -> None:
    step, state = training(Forces())
    calls = calls_of(step, state, torch.randn(4, 3))
    last = next(place for place, one in enumerate(calls) if one.name == "neg")
    inside = [one for one in calls[:last] if one.backward]
    assert modules_of(inside, "mm", backward=True) == ["Forces.net.b", "Forces.net.a"]
    assert modules_of(inside, "sigmoid_backward", backward=True) == ["Forces.net"]


def test_passes_keep_the_origin_of_what_they_rewrite() -> None:
    torch.manual_seed(0)
    apply, params, buffers = fcg.from_module(GPT())
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.adamw(1e-3, weight_decay=0.1))

    def step(state: Any, x: Tensor) -> Any:
        loss = lambda p: apply(p, buffers, x, x.flip(1))[0][1]  # noqa: E731
        return state.apply_gradients(fcg.grad(loss)(state.params)), {}

    program = fcg.graph_step(step, lowering="aten").lower(state, torch.randint(0, 11, (4, 8))).program
    before = len(program.instrs)
    recompute(program, budget=0.0, large=0)
    keep_as_buffers(program, large=0)
    assert len(program.instrs) > before  # it did recompute and keep
    assert all(one.origin.line is not None for one in program.instrs)
    assert all(one.origin.module for one in program.instrs if one.name in ("kept", "later", "gelu", "addmm"))


# --- several in one ----------------------------------------------------------------------------------------

PLACES = st.builds(
    Origin,
    st.sampled_from(["", "Net", "Net.h.0", "Net.h.1.fc", "Net.h.10", "Other.h"]),
    st.sampled_from([None, Location("a.py", 1, "f"), Location("a.py", 2, "f")]),
    st.booleans(),
)


@given(st.lists(PLACES, min_size=1))
def test_one_call_for_several_is_where_all_of_them_are(origins: list[Origin]) -> None:
    found = Origin.of_all(origins)
    path = found.module.split(".") if found.module else []
    assert all(one.module.split(".")[: len(path)] == path for one in origins)
    assert found.line in (None, origins[0].line)
    assert Origin.of_all([origins[0]] * 3) == origins[0]
    assert Origin.of_all([Origin("Net.h.1"), Origin("Net.h.10")]).module == "Net.h"


# --- phases ------------------------------------------------------------------------------------------------


def test_what_is_made_of_gradients_is_the_update() -> None:
    calls = calls_of(descent(chain), {"w": torch.randn(3, 3)}, torch.randn(4, 3))
    found = [(one.name, phase) for one, phase in phases(calls).items() if not one.backward]
    assert [name for name, phase in found if phase == "update"][-1] == "sub"
    assert "linalg_vector_norm" in {name for name, phase in found if phase == "update"}
    assert {phase for name, phase in found if name in ("mm", "sin", "gelu", "_softmax")} == {"forward"}


def test_a_second_forward_in_the_same_step_is_forward() -> None:
    def step(state: Any, x: Tensor) -> Any:
        for _ in range(2):
            grads = fcg.grad(chain)(state, x)
            state = {"w": state["w"] - 0.1 * grads["w"]}
        return state, {}

    found = phases(calls_of(step, {"w": torch.randn(3, 3)}, torch.randn(4, 3)))
    assert [phase for one, phase in found.items() if one.name == "sin"] == ["forward"] * 2
    assert [phase for one, phase in found.items() if one.name == "sub"] == ["update"] * 2


def test_matching_gradients_is_forward() -> None:
    def penalty(p: Any, x: Tensor) -> Tensor:
        force = fcg.grad(lambda x: (x @ p["w"]).sin().sum())(x)
        return (force - 1).abs().mean()

    found = phases(calls_of(descent(penalty), {"w": torch.randn(3, 3)}, torch.randn(4, 3)))
    assert [phase for one, phase in found.items() if one.name == "abs"] == ["forward"]
