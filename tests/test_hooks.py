"""Hooks on the forward are a part of it; what they leave elsewhere is refused."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import functional_cg as fcg
from functional_cg.errors import BakedValueError, ForeignTensorError, SideEffectError
from functional_cg.testing import assert_trees_all_equal
from tests.shares import CALLS, THOROUGH

pytestmark = pytest.mark.usefixtures("scalar_loops")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Linear(8, 4))


def doubles(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda module, args, out: out * 2)


def changes_arguments(model: nn.Sequential) -> None:
    model[3].register_forward_pre_hook(lambda module, args: (args[0].tanh(),))


def of_keywords(model: nn.Sequential) -> None:
    model[0].register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)
    model[0].register_forward_hook(
        lambda module, args, kwargs, out: out + module.bias, with_kwargs=True, always_call=True
    )


def draws(model: nn.Sequential) -> None:
    model[1].register_forward_hook(lambda module, args, out: out + torch.randn_like(out) * module.training)


class Scale:
    """A hook with a value of its own."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * self.factor


def holds_a_value(model: nn.Sequential) -> None:
    model.register_forward_hook(Scale(0.5))


def freezes_nothing(model: nn.Sequential) -> None:
    """As ``enable_input_require_grads`` of transformers."""
    model[0].register_forward_hook(lambda module, args, out: out.requires_grad_(True))


def old_weight_norm(model: nn.Sequential) -> None:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        nn.utils.weight_norm(model[0])


def old_spectral_norm(model: nn.Sequential) -> None:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        nn.utils.spectral_norm(model[3])


def pruned(model: nn.Sequential) -> None:
    prune.l1_unstructured(model[1], "weight", 0.3)
    prune.random_unstructured(model[3], "bias", 0.5)


HOOKS: dict[str, Callable[[nn.Sequential], None]] = {
    one.__name__: one
    for one in (
        doubles, changes_arguments, of_keywords, draws, holds_a_value, freezes_nothing,
        old_weight_norm, old_spectral_norm, pruned,
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("names", "lowering"), [*(([name], "aten") for name in HOOKS), *[([*HOOKS], "inductor")] * THOROUGH]
)
def test_hooks_of_the_forward_are_a_part_of_it(names: list[str], lowering: Any) -> None:
    model = net()
    for name in names:
        HOOKS[name](model)
    apply, params, buffers = fcg.from_module(model)
    state = fcg.TrainState.create(
        params=params,
        buffers=buffers,
        optimizer=fcg.optim.sgd(0.1),
        key=fcg.random.key(1),
    )

    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            key = fcg.random.fold_in(state.key, state.step)
            out, new = apply(params, state.buffers, x, key=key)
            return (out - x).square().mean(), new

        (loss, new), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads).replace(buffers=new), {"loss": loss}

    step, placed = fcg.graph_step(train_step, lowering=lowering), fcg.place(state)
    same = torch.equal if lowering == "aten" else lambda a, b: torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    for _ in range(CALLS):
        x = torch.randn(6, 4)
        state, expected = train_step(state, x)
        placed, metrics = step(placed, x)
        assert same(metrics["loss"], expected["loss"])
        for key, value in (state.params | state.buffers).items():
            assert same((placed.params if key in state.params else placed.buffers)[key], value), key
    assert step.stats.captures == 1


@pytest.mark.parametrize("name", [name for name in HOOKS if name != "draws"])
def test_results_and_gradients_are_those_of_the_module(name: str) -> None:
    model = net()
    model[2] = nn.Identity()
    HOOKS[name](model)
    apply, params, buffers = fcg.from_module(model)
    for _ in range(3):  # what the module writes, it writes again
        x = torch.randn(6, 4)
        (out, buffers), grads = (
            fcg.value_and_grad(
                lambda p, x=x, b=buffers: ((r := apply(p, b, x))[0].square().sum(), r), has_aux=True
            )(params)[0][1],
            fcg.grad(lambda p, x=x, b=buffers: apply(p, b, x)[0].square().sum())(params),
        )
        model.zero_grad()
        expected = model(x)
        expected.square().sum().backward()
        assert torch.equal(out, expected)
        for key, parameter in model.named_parameters():
            assert torch.equal(grads[key], parameter.grad), key
        for key, buffer in model.named_buffers():
            assert torch.equal(buffers[key], buffer), key


SEEN: list[Tensor] = []
COUNTED = {"calls": 0}


def appends(model: nn.Sequential) -> None:
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out))


def appends_to_a_global(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda module, args, out: SEEN.append(out.detach()))


def counts_in_a_global(model: nn.Sequential) -> None:
    def count(module: nn.Module, args: Any) -> None:
        COUNTED["calls"] += 1

    model[0].register_forward_pre_hook(count)


def counts(model: nn.Sequential) -> None:
    calls = 0

    def count(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1

    model[0].register_forward_pre_hook(count)


class Counts:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.calls += 1


def counts_in_itself(model: nn.Sequential) -> None:
    model[0].register_forward_pre_hook(Counts())


def leaves_an_attribute(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda module, args, out: setattr(module, "last", out))


LEAVING: dict[str, tuple[Callable[[nn.Sequential], None], str]] = {
    "appends": (appends, "seen"),
    "appends to a global": (appends_to_a_global, "SEEN"),
    "counts in a global": (counts_in_a_global, "COUNTED"),
    "counts": (counts, "calls"),
    "counts in itself": (counts_in_itself, "calls"),
    "leaves an attribute": (leaves_an_attribute, "last"),
}


@pytest.mark.parametrize("name", LEAVING)
def test_what_a_hook_leaves_is_refused_by_name(name: str) -> None:
    model, (register, left) = net(), LEAVING[name]
    register(model)
    apply, params, buffers = fcg.from_module(model)
    with pytest.raises(SideEffectError, match=rf"its forward changes 1 attribute of the module(.|\n)*{left}"):
        apply(params, buffers, torch.randn(6, 4), key=fcg.random.key(0))


class Features(nn.Module):
    """Features of two layers, which hooks gather."""

    def __init__(self, made: bool) -> None:
        super().__init__()
        self.layers = net()
        self.features: dict[int, Tensor] = {}
        for at in (0, 3):
            self.layers[at].register_forward_hook(self.saver(at) if made else partial(self.save, at))

    def saver(self, at: int) -> Any:
        def save(module: nn.Module, args: Any, out: Tensor) -> None:
            self.features[at] = out

        return save

    def save(self, at: int, module: nn.Module, args: Any, out: Tensor) -> None:
        self.features[at] = out

    def forward(self, x: Tensor) -> Tensor:
        self.layers(x)
        gathered = dict(self.features)
        self.features.clear()
        return gathered[0].sum() + gathered[3].sum()


def test_a_hook_that_holds_on_to_the_module_is_refused() -> None:
    model = net()
    model[0].register_forward_hook(lambda module, args, out: out + model[3].bias.sum())
    with pytest.raises(
        ForeignTensorError, match=r"a hook of `0`, `.*<lambda>`, is a function that holds on to the module"
    ):
        fcg.from_module(model)


def test_a_compiled_method_that_holds_on_to_the_module_is_refused() -> None:
    model = Features(made=False)
    model.score = torch.compile(model.save)
    with pytest.raises(
        ForeignTensorError, match=r"`score` is a function that(.|\n)*leave out `torch.compile`"
    ):
        fcg.from_module(model)
    model.score = model.save
    fcg.from_module(model)


def test_what_is_advised_for_hooks_that_hold_on_to_the_module_works() -> None:
    advised = r"`register_forward_hook\(self.save\)`, or `functools.partial\(self.save, ...\)`"
    with pytest.raises(ForeignTensorError, match=rf"a hook of `layers.0`, `Features.*save`(.|\n)*{advised}"):
        fcg.from_module(Features(made=True))
    x = torch.randn(6, 4)
    apply, params, buffers = fcg.from_module(Features(made=False))
    other, _ = apply(fcg.tree.map(lambda p: p + 1, params), buffers, x, train=False)
    assert not torch.equal(other, apply(params, buffers, x, train=False)[0])


def test_a_tensor_that_no_hook_sets_is_refused() -> None:
    model = net()
    model[0].table = torch.ones(8)
    model[0].register_forward_pre_hook(lambda module, args: None)
    model[0].register_forward_hook(lambda module, args, out: out * (1 if module.table.is_meta else 2))
    apply, params, buffers = fcg.from_module(model)
    with pytest.raises(ForeignTensorError, match=r"`0\.table` is a tensor(.|\n)*register_buffer"):
        apply(params, buffers, torch.randn(6, 4), key=fcg.random.key(0))


def test_the_module_is_left_as_it_was() -> None:
    model = net()
    old_weight_norm(model)
    weight, keys = model[0].weight, set(vars(model[0]))
    apply, params, buffers = fcg.from_module(model)
    apply(params, buffers, torch.randn(6, 4), key=fcg.random.key(0))
    assert model[0].weight is weight
    assert set(vars(model[0])) == keys
    loaded = copy.deepcopy(net())
    old_weight_norm(loaded)
    loaded.load_state_dict(apply.state_dict(params, buffers))


def test_a_hook_that_is_removed_after_the_copy_is_noticed() -> None:
    model = net()
    handle = model[0].register_forward_hook(lambda module, args, out: out * 2)
    apply, params, buffers = fcg.from_module(model)
    handle.remove()
    with pytest.raises(BakedValueError, match="_forward_hooks"):
        apply(params, buffers, torch.randn(6, 4), key=fcg.random.key(0))


TAKEN: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], None], Callable[[Any], Tensor]]] = {
    "popped from a dict": (dict, lambda kept, out: kept.__setitem__("h", out), lambda kept: kept.pop("h")),
    "deleted from a dict": (
        dict,
        lambda kept, out: kept.__setitem__("h", out),
        lambda kept: (kept["h"], kept.__delitem__("h"))[0],
    ),
    "popped from a list": (list, lambda kept, out: kept.append(out), lambda kept: kept.pop()),
    "cleared": (list, lambda kept, out: kept.append(out), lambda kept: (kept[0], kept.clear())[0]),
    "values of a dict": (
        dict,
        lambda kept, out: kept.__setitem__("h", out),
        lambda kept: (next(iter(kept.values())), kept.clear())[0],
    ),
}


@pytest.mark.parametrize(("taken", "inside"), [*zip(TAKEN, itertools.cycle([True, False]), strict=False)])
def test_what_a_hook_keeps_and_the_step_takes_again_is_no_change(taken: str, *, inside: bool) -> None:
    """Features of a layer, as a perceptual loss takes them: what holds them is as empty afterwards as before."""
    make, put, take = TAKEN[taken]
    kept, model = make(), nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model[1].register_forward_hook(lambda module, args, out: put(kept, out))
    params = {name: one.detach().clone() for name, one in model.named_parameters()}

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.model(x), take(kept)

    apply, of_both, _ = fcg.from_module(Both())

    @fcg.graph_step
    def step(params: Any, x: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            if inside:
                (out, features), _ = apply(params, {}, x)
            else:
                out, features = torch.func.functional_call(model, params, (x,)), take(kept)
            return out.square().mean() + features.sum()

        value, grads = fcg.value_and_grad(loss)(params)
        return fcg.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    state = of_both if inside else params
    for _ in range(3):
        x = torch.randn(5, 4)
        expected, of_eager = step.eager(fcg.snapshot(state), x)
        state, value = step(state, x)
        assert torch.equal(value, of_eager)
        assert_trees_all_equal(fcg.snapshot(state), expected)
    assert not kept


def test_what_a_container_held_before_the_step_is_still_compared() -> None:
    kept: dict[str, Any] = {"rate": 2.0}

    @fcg.graph_step
    def step(state: Any, x: Tensor) -> Any:
        kept["h"] = x
        total = sum(list(kept.values()))
        del kept["h"]
        return state, total

    with pytest.raises(SideEffectError, match="kept"):  # not told from a change of its own
        step({"w": torch.ones(2)}, torch.ones(2))
