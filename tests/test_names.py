"""Leaves by name: groups by patterns, with misspelt ones refused, and norms as metrics."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import functional_cg as fcg
from functional_cg import optim, tree
from functional_cg.errors import LayoutError
from tests.test_optimizers import assert_captured

GROUPS = optim.by_name(
    {"blocks.[0-3].*": "frozen", "wte.*": "slow", "*.bias": "no decay", "*norm*": "no decay"}, default="decay"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(2), nn.Linear(2, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(2, 2)


def nested(flat: dict[str, Any]) -> Any:
    """The same leaves in dicts and a list: other trees, the same names."""
    blocks = [
        {part: {kind: flat[f"blocks.{i}.{part}.{kind}"] for kind in ("weight", "bias")} for part in ("norm", "up")}
        for i in range(6)
    ]  # fmt: skip
    head = {kind: flat[f"head.{kind}"] for kind in ("weight", "bias")}
    return {"wte": {"weight": flat["wte.weight"]}, "blocks": blocks, "head": head}


def label_of(name: str) -> str:
    if name.startswith(tuple(f"blocks.{i}." for i in range(4))):
        return "frozen"
    if name == "wte.weight":
        return "slow"
    return "no decay" if "norm" in name or name.endswith("bias") else "decay"


@pytest.fixture(scope="module")
def params() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: leaf.detach() for name, leaf in Model().named_parameters()}


@pytest.mark.parametrize("shape", [dict, nested])
def test_patterns_label_the_leaves_of_a_module_and_of_a_nested_tree(shape: Any, params: Any) -> None:
    labels = GROUPS(shape(params))
    assert tree.flatten(labels)[1] == tree.flatten(shape(params))[1]
    expected = {name: label_of(name) for name in params}
    assert set(expected.values()) == {"frozen", "slow", "no decay", "decay"}
    assert labels == shape(expected)


def test_groups_train_as_groups_of_torch_do(params: Any) -> None:
    rules = {
        "frozen": optim.set_to_zero(), "slow": optim.sgd(0.01),
        "no decay": optim.sgd(0.1), "decay": optim.chain(optim.add_decayed_weights(0.5), optim.sgd(0.1)),
    }  # fmt: skip
    hyper = {"frozen": {"lr": 0.0}, "slow": {"lr": 0.01}, "no decay": {}, "decay": {"weight_decay": 0.5}}
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    judge = torch.optim.SGD(
        [{"params": [leaf], **hyper[label_of(name)]} for name, leaf in leaves.items()], lr=0.1
    )
    tx = optim.partition(rules, GROUPS)
    state, now = tx.init(params), params
    assert not tree.leaves(state.inner_states["frozen"])
    for step in range(3):
        grads = tree.map(lambda leaf, step=step: (leaf + step).cos(), params)
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone()
        judge.step()
        now, state = tx.step(grads, state, now)
    for name, leaf in leaves.items():
        torch.testing.assert_close(now[name], leaf.detach(), rtol=0, atol=1e-6)
        assert torch.equal(now[name], params[name]) == (label_of(name) == "frozen")


def test_patterns_are_masks_and_values() -> None:
    no_decay = optim.by_name({"b": False}, default=True)
    by_hand = optim.adamw(0.1, weight_decay=0.1, mask={"w": True, "b": False})
    params = {"w": torch.ones(2), "b": torch.ones(2)}
    grads = tree.map(torch.zeros_like, params)
    ends = [
        tx.update(grads, tx.init(params), params)[0]
        for tx in (by_hand, optim.adamw(0.1, weight_decay=0.1, mask=no_decay))
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in params)
    assert ends[0]["b"].any() != ends[0]["w"].any()
    same = optim.by_name({"b": False}, default=True)
    assert same == no_decay == pickle.loads(pickle.dumps(no_decay))
    assert hash(same) == hash(no_decay)
    assert no_decay != optim.by_name({"b": False}, default=None)
    assert eval(repr(no_decay), {"by_name": optim.by_name}) == no_decay
    assert_captured(optim.partition({True: optim.adam(0.1), False: optim.set_to_zero()}, no_decay))


def test_a_misspelt_pattern_is_refused_with_the_names_that_there_are(params: Any) -> None:
    groups = optim.by_name(
        {"block.[0-3].*": "frozen", "*bias": "no decay", "head.bias": "x", "*.0.*.bias": "y"}, default="decay"
    )
    with pytest.raises(LayoutError) as caught:
        optim.partition({"decay": optim.sgd(0.1)}, groups).init(params)
    text = str(caught.value)
    assert "optim.by_name: a pattern decides for no leaf" in text
    assert "'block.[0-3].*'  expected to match a leaf   got none\n" in text
    assert "'head.bias'  expected to match a leaf   got 'head.bias', for which '*bias' decides\n" in text
    assert (
        "'*.0.*.bias'  expected to match a leaf   got 'blocks.0.norm.bias', for which '*bias' decides\n"
        in text
    )
    assert "'*bias'  expected" not in text
    assert "To fix: write it as the leaves are named, blocks.0.norm.bias, " in text
    assert "and 22 more; or move it to the front; or, " in text


@pytest.mark.parametrize("patterns", [["*.bias"], {1: "a"}, "*.bias"])
def test_patterns_are_a_mapping(patterns: Any) -> None:
    with pytest.raises(TypeError, match=r"by_name: takes \{pattern: value\}, as in \{'\*.bias'"):
        optim.by_name(patterns, default="x")


# -- norms --------------------------------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """The ops that run; ``promote_types`` asks for no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name != "aten::promote_types":
            self.calls.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [dict, nested])
def test_norms_have_the_names_of_a_state_dict_and_cost_one_op(shape: Any, params: Any) -> None:
    with Counted() as counted:
        norms = optim.norms(shape(params))
    assert counted.calls == ["aten::_foreach_norm"]
    assert list(norms) == list(fcg.state_dict(shape(params)))
    assert norms.keys() == params.keys()
    for name, norm in norms.items():
        torch.testing.assert_close(norm, params[name].norm(), rtol=1e-6, atol=0)


def test_norms_of_leaves_of_several_dtypes() -> None:
    values = {
        "a": torch.full((300, 300), 2.0, dtype=torch.bfloat16),
        "b": torch.ones(4).double(),
        "c": torch.ones(0),
    }
    norms = optim.norms(values)
    assert {name: (norm.dtype, norm.item()) for name, norm in norms.items()} == {
        "a": (torch.float32, 600.0), "b": (torch.float64, 2.0), "c": (torch.float32, 0.0)
    }  # fmt: skip
    assert optim.norms({}) == {}


def test_norms_are_metrics_of_a_captured_step() -> None:
    def step_of(state: Any, batch: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: ((batch @ p["w"]).tanh() + p["b"] - 1).square().mean())(
            state.params
        )
        new = state.apply_gradients(grads)
        moved = optim.norms(tree.map(torch.sub, new.params, state.params))
        ratios = {name: moved[name] / size for name, size in optim.norms(state.params).items()}
        return new, {"loss": loss, "norms": optim.norms(grads), "ratios": ratios}

    assert_captured(optim.adam(0.1), step_of)


def test_what_has_no_norm_is_refused() -> None:
    with pytest.raises(
        LayoutError, match=r"optim.norms: these leaves have no norm(.|\n)*values\.count  expected a f"
    ):
        optim.norms(optim.scale_by_adam().init({"w": torch.ones(2)}))
    with pytest.raises(
        LayoutError, match=r"values\['a'\]  expected a floating leaf of 16 bits or more   got 1\.0\n"
    ):
        optim.norms({"a": 1.0})
    with pytest.raises(LayoutError, match=r"of 16 bits or more   got torch.float8_e5m2\n"):
        optim.norms({"a": torch.ones(2).to(torch.float8_e5m2)})
    with pytest.raises(
        ValueError, match=r"optim.norms: `values\['a'\]\['b'\]` and .* have the same name, 'a.b'"
    ):
        optim.norms({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})
