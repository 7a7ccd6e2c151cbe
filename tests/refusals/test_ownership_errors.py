"""States used after donation, leaves written to, parts of states, steps used after ``close()``."""

import operator

import pytest
import torch

import functional_cg as fcg
from functional_cg import AliasError, ClosedError, DonatedStateError, ReadOnlyError
from tests.refusals.judge import a_batch, a_state, assert_still_good, pure, same


def a_train_state():
    return fcg.TrainState.create(params={"w": torch.ones(3)}, optimizer=fcg.optim.sgd(0.1))


def train(s, b):
    return s.apply_gradients({"w": b["x"].sum(0)}), {}


USES = {
    "call": lambda step, state, leaf: step(state, a_batch()),
    "eager": lambda step, state, leaf: step.eager(state, a_batch()),
    "lower": lambda step, state, leaf: step.lower(state, a_batch()),
    "read a leaf": lambda step, state, leaf: state["w"] + 1,
    "read an old leaf": lambda step, state, leaf: leaf + 1,
    "numpy of an old leaf": lambda step, state, leaf: leaf.numpy(),
    "value of an old leaf": lambda step, state, leaf: leaf[0].item(),
    "clone of an old leaf": lambda step, state, leaf: leaf.clone(),
    "as input": lambda step, state, leaf: step(state.latest(), {**a_batch(), "x": leaf}),
    "its tree": lambda step, state, leaf: state.tree,
    "snapshot": lambda step, state, leaf: fcg.snapshot(state),
    "fork": lambda step, state, leaf: fcg.fork(state),
    "replace": lambda step, state, leaf: state.replace(w=torch.zeros(3)),
    "iterate": lambda step, state, leaf: list(state),
}


@pytest.mark.parametrize("name", USES)
def test_use_after_donation(name):
    step, state = fcg.graph_step(pure), a_state()
    leaf = state["w"]
    new, _ = step(state, a_batch())
    before, replays = fcg.snapshot(new), step.stats.replays
    match = r"was used after `state` was donated to `pure` \(generation 0\)(.|\n)*now hold generation 1"
    with pytest.raises(DonatedStateError, match=match):
        USES[name](step, state, leaf)
    assert step.stats.replays == replays
    assert "donated" in repr(state)
    assert "tensor(" not in repr(leaf)
    assert_still_good(state.latest(), before, 1)


def test_branch_after_donation():
    step, state = fcg.graph_step(train), a_train_state()
    branch, leaf = state.params, state.params["w"]
    new, _ = step(state, a_batch())
    for use in (lambda: branch["w"], lambda: leaf * 1, lambda: step(state.params, a_batch())):
        with pytest.raises(DonatedStateError, match=r"`state\.params"):
            use()
    torch.testing.assert_close(new.params["w"] + 0, torch.ones(3) - 0.1 * a_batch()["x"].sum(0))


def test_state_that_is_donated_and_an_input_of_the_same_call():
    step, state = fcg.graph_step(lambda s, other: ({**s, "w": s["w"] + other["w"]}, {})), a_state()
    for _ in range(3):  # read before it is written
        state, _ = step(state, state)
    assert same(state["w"], torch.tensor([0.0, 8.0, 16.0]))


def test_part_of_a_state():
    step, state = fcg.graph_step(train), a_train_state()
    with pytest.raises(AliasError, match=r"was called with a part of a state as `s`(.|\n)*is a `graph_fn`"):
        step(state.params, a_batch())
    with pytest.raises(AliasError, match=r"was called with a part of a state as `s`"):
        step(state.params, a_train_state())
    total = fcg.graph_fn(lambda params: params["w"].sum())  # the advice
    assert total(state.params) == 3.0
    new, _ = step(state, a_batch())
    assert new.generation == 1


WRITES = {
    "add_": lambda leaf: leaf.add_(1),
    "+=": lambda leaf: operator.iadd(leaf, 1),
    "[0] =": lambda leaf: operator.setitem(leaf, 0, 1.0),
    "[0] +=": lambda leaf: leaf[0].add_(1),
    "view": lambda leaf: leaf[1:].zero_(),
    "data": lambda leaf: leaf.data.zero_(),
    "data =": lambda leaf: setattr(leaf, "data", torch.zeros(3)),
    "detach": lambda leaf: leaf.detach().zero_(),
    "out=": lambda leaf: torch.add(torch.ones(3), 1, out=leaf),
    "foreach": lambda leaf: torch._foreach_add_([leaf], 1.0),
    "copy_": lambda leaf: leaf.copy_(torch.zeros(3)),
    "requires_grad_": lambda leaf: leaf.requires_grad_(),
    "requires_grad =": lambda leaf: setattr(leaf, "requires_grad", True),
    "init": lambda leaf: torch.nn.init.zeros_(leaf),
}


@pytest.mark.parametrize("name", WRITES)
def test_write_into_a_leaf(name):
    state = a_state()
    with pytest.raises(
        ReadOnlyError, match=r"`state\['w'\](\.\w+)?` was written to(.|\n)*`state = state\.replace"
    ):
        WRITES[name](state["w"])
    assert_still_good(state, fcg.snapshot(a_state()), 0)


def test_assignment_to_a_state():
    state = a_state()
    with pytest.raises(ReadOnlyError, match=r"`state\['w'\]` was assigned to"):
        state["w"] = torch.zeros(3)
    with pytest.raises(ReadOnlyError, match=r"`state\.w` was assigned to"):
        state.w = torch.zeros(3)
    state = state.replace(w=torch.zeros(3))  # the advice
    assert same(state["w"], torch.zeros(3))
    state = fcg.tree.at(lambda s: s["w"], state, torch.ones(3))
    assert same(state["w"], torch.ones(3))


def test_use_after_close():
    step, state = fcg.graph_step(pure), a_state()
    state, _ = step(state, a_batch())
    before = fcg.snapshot(state)
    step.close()
    for use in (step, step.eager, step.lower):
        with pytest.raises(
            ClosedError, match=r"called after `close\(\)`(.|\n)*make a new step, `graph_step\(fn\)`"
        ):
            use(state, a_batch())
    step.close()  # once more is fine
    assert_still_good(state, before, 1)


def test_with_closes():
    with fcg.graph_step(pure) as step:
        state, _ = step(a_state(), a_batch())
    with pytest.raises(ClosedError, match="called after"):
        step(state, a_batch())
    with pytest.raises(ZeroDivisionError, match="division"), fcg.graph_step(pure) as step:
        1 / 0  # noqa: B018
    with pytest.raises(ClosedError, match="called after"):
        step(state, a_batch())
