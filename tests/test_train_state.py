"""TrainState: created in place, updated functionally, extended by inheritance."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim, tree
from functional_cg.errors import AliasError, DonatedStateError, LayoutError


class EMAState(fcg.TrainState):
    """A state with a field more; no decorator, no registration."""

    ema: Any

    def averaged(self, decay: float) -> EMAState:
        """Move the average towards the parameters."""
        return self.replace(ema=tree.map(lambda e, p: decay * e + (1 - decay) * p, self.ema, self.params))

    @property
    def distance(self) -> Tensor:
        return sum(tree.leaves(tree.map(lambda e, p: (e - p).square().sum(), self.ema, self.params)))


def params() -> dict[str, Any]:
    return {"w": torch.tensor([1.0, 2.0]), "layer": [torch.ones(2, 2), torch.zeros(2, dtype=torch.float64)]}


def grads_like(nest: Any) -> Any:
    return tree.map(lambda p: torch.full_like(p, 0.5), nest)


ADAM = optim.adamw(0.1, weight_decay=0.01)


def test_create_places_fresh_optimizer_state_and_counters() -> None:
    given = params()
    state = fcg.TrainState.create(
        params=given, optimizer=ADAM, key=fcg.random.key(3), buffers={"m": torch.ones(1)}
    )
    copied = fcg.snapshot(state)
    assert isinstance(copied, fcg.TrainState)
    assert (copied.step.dtype, copied.step.shape, copied.step.item()) == (torch.int64, (), 0)
    torch.testing.assert_close(copied.params, given)
    torch.testing.assert_close(copied.opt_state, ADAM.init(given))
    assert torch.equal(copied.key, fcg.random.key(3))  # type: ignore[arg-type]
    assert copied.buffers["m"].item() == 1.0
    assert copied.grads is None
    assert copied.optimizer == ADAM
    assert state.generation == 0  # type: ignore[attr-defined]
    given["w"].fill_(9)
    assert state.params["w"].tolist() == [1.0, 2.0]


def test_fields_that_are_not_given_are_none() -> None:
    state = fcg.TrainState.create(params=params(), optimizer=optim.sgd(0.1))
    assert (state.buffers, state.key, state.grads) == (None, None, None)


def test_accumulate_adds_zeros_like_params() -> None:
    state = fcg.TrainState.create(params=params(), optimizer=ADAM, accumulate=True)
    torch.testing.assert_close(fcg.snapshot(state).grads, tree.map(torch.zeros_like, params()))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_create_takes_modules_parameters_and_no_modes(mode: Any) -> None:
    module = torch.nn.Linear(2, 3)
    with mode():
        state: Any = fcg.TrainState.create(params=dict(module.named_parameters()), optimizer=ADAM)
    for slot in state._lease.arena.slots:
        assert (slot.requires_grad, slot.is_inference(), type(slot)) == (False, False, Tensor)
    assert torch.equal(state.params["weight"].clone(), module.weight.detach())


def test_create_from_parts_of_another_state() -> None:
    old = fcg.TrainState.create(params=params(), optimizer=ADAM)
    new = fcg.TrainState.create(params=old.params, optimizer=optim.sgd(0.1))
    torch.testing.assert_close(fcg.snapshot(new).params, params())


def test_create_refuses_aliases_and_objects_with_their_paths() -> None:
    shared = torch.ones(2)
    with pytest.raises(AliasError, match=r"state.params\['a'\].*\n  state.params\['b'\]"):
        fcg.TrainState.create(params={"a": shared, "b": shared}, optimizer=optim.sgd(0.1))
    with pytest.raises(AliasError, match=r"state.params\['w'\].*\n  state.buffers"):
        fcg.TrainState.create(params={"w": shared}, optimizer=optim.sgd(0.1), buffers=shared)
    with pytest.raises(LayoutError, match=r"state.buffers\['name'\]  expected a dense tensor   got str"):
        fcg.TrainState.create(params=params(), optimizer=optim.sgd(0.1), buffers={"name": "x"})


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ("params=params, ema=params", "ema=fcg.tree.map(torch.clone, params)"),
        ("params=params, ema={'w': params['w'], 'b': own}", "ema['w'] = params['w'].clone()"),
        ("params=params, ema={'w': params['w'][:1]}", "ema['w'] = ema['w'].clone()"),
        (
            "params={'online': params, 'target': params}, ema=own",
            "params['target'] = fcg.tree.map(torch.clone, ",
        ),
        ("params=params, ema=own, buffers=params['w'].detach()", "buffers=params['w'].clone()"),
    ],
)
def test_advice_for_an_alias_works_as_it_is_written(fields: str, advice: str) -> None:
    """``name=...`` stands in the call, an assignment before it; both in the names of the arguments."""
    names: dict[str, Any] = {"fcg": fcg, "torch": torch, "params": params(), "own": torch.ones(3)}
    names["arguments"] = eval(f"dict({fields})", names)
    with pytest.raises(AliasError, match="share memory") as caught:
        EMAState.create(optimizer=ADAM, **names["arguments"])
    (fix,) = re.findall(r"To fix: copy it, `(.*?)` \(targets", str(caught.value))
    assert fix.startswith(advice)
    names |= names["arguments"]
    if " = " in fix:
        exec(fix, names)
    else:
        names["arguments"] |= eval(f"dict({fix})", names)
    values = fcg.snapshot(EMAState.create(optimizer=ADAM, **names["arguments"]))
    torch.testing.assert_close(values.ema, names["arguments"]["ema"])


def test_unknown_and_missing_fields_are_type_errors() -> None:
    with pytest.raises(TypeError, match="`TrainState` has no field `nope`"):
        fcg.TrainState.create(params=params(), optimizer=ADAM, nope=1)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'ema'"):
        EMAState.create(params=params(), optimizer=ADAM)
    state = fcg.snapshot(fcg.TrainState.create(params=params(), optimizer=ADAM))
    with pytest.raises(TypeError, match="unexpected keyword argument 'nope'"):
        state.apply_gradients(grads_like(state.params), nope=1)


def test_create_says_what_it_wants_in_place_of_torch_objects() -> None:
    module = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"got a module.\nTo fix: `apply, params, buffers = fcg.from_module"):
        fcg.TrainState.create(params=module, optimizer=ADAM)
    with pytest.raises(
        TypeError, match=r"got a generator.\nTo fix: `apply, params, buffers = fcg.from_module"
    ):
        fcg.TrainState.create(params=module.parameters(), optimizer=ADAM)
    for one in (optim.sgd(0.1), ADAM):
        with pytest.raises(
            LayoutError, match=r"no tensors.\n  params\[0\]\[0\]  expected a tensor   got str\n"
        ):
            fcg.TrainState.create(params=list(module.named_parameters()), optimizer=one)
    of_torch = r"; or `optimizer=fcg\.optim\.from_torch\(torch\.optim\.SGD, lr=0\.1\)`, of its class"
    for wrong, got in (
        (torch.optim.SGD(module.parameters(), lr=0.1), ("SGD", of_torch)),
        (torch.optim.SGD, ("SGD", of_torch)),
        (optim.sgd, ("sgd", "")),
        (0.1, ("float", "")),
    ):
        optimizer: Any = wrong
        text = rf"must be one of `fcg.optim`, got {got[0]}\.\nTo fix: `optimizer=fcg\.optim\.sgd\(0\.1\)`{got[1]}\."
        with pytest.raises(TypeError, match=text):
            fcg.TrainState.create(params=params(), optimizer=optimizer)
    key: Any = 0
    with pytest.raises(TypeError, match=r"got 0\.\nTo fix: make one, `key=fcg\.random\.key\(0\)`"):
        fcg.TrainState.create(params=params(), optimizer=ADAM, key=key)


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.sgd(0.1),
        ADAM,
        optim.chain(optim.clip_by_global_norm(1.0), optim.adam(0.1)),
        optim.inject_hyperparams(optim.sgd)(learning_rate=0.1),
        optim.lamb(0.1, weight_decay=0.0),
    ],
)
def test_gradients_unlike_the_parameters_are_refused(optimizer: Any) -> None:
    weights = {"w": torch.ones(4)}

    @fcg.graph_step
    def swapped(state: Any) -> Any:
        grads, _ = fcg.value_and_grad(lambda p: (p["w"] ** 2).sum())(state.params)
        return state.apply_gradients(grads), {}

    @fcg.graph_step
    def reduced(state: Any) -> Any:
        return state.apply_gradients(tree.map(torch.sum, state.params)), {}

    state = fcg.TrainState.create(params=weights, optimizer=optimizer)
    with pytest.raises(LayoutError, match="grads  expected dict with 1 children   got a leaf"):
        swapped(state)
    with pytest.raises(
        LayoutError, match=r"grads\['w'\]  expected torch.float32 \[4\]   got torch.float32 \[\]"
    ):
        reduced(state)
    assert state.step.item() == 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32])
def test_gradients_that_are_not_floating_are_refused(dtype: torch.dtype) -> None:
    for optimizer in (
        optim.sgd(0.1),
        optim.adam(0.1),
        ADAM,
        optim.adagrad(0.1),
        optim.lion(0.1, weight_decay=0.0),
    ):
        state = fcg.snapshot(fcg.TrainState.create(params={"w": torch.ones(4)}, optimizer=optimizer))
        with pytest.raises(LayoutError, match=rf"grads\['w'\]  expected torch.float32 \[4\]   got {dtype}"):
            state.apply_gradients({"w": torch.ones(4, dtype=dtype)})


def by_hand(optimizer: Any, steps: int) -> Any:
    p = params()
    opt_state = optimizer.init(p)
    for _ in range(steps):
        updates, opt_state = optimizer.update(grads_like(p), opt_state, p)
        p = optim.apply_updates(p, updates)
    return p, opt_state


@pytest.mark.parametrize(
    "optimizer", [ADAM, optim.sgd(0.1, momentum=0.9), optim.chain(optim.clip_by_global_norm(1.0), ADAM)]
)
def test_apply_gradients_equals_the_optimizer_by_hand(optimizer: Any) -> None:
    state = fcg.snapshot(fcg.TrainState.create(params=params(), optimizer=optimizer))
    for _ in range(3):
        state = state.apply_gradients(grads_like(state.params))
    expected, opt_state = by_hand(optimizer, 3)
    torch.testing.assert_close(state.params, expected)
    torch.testing.assert_close(state.opt_state, opt_state)
    assert state.step.item() == 3


def test_apply_gradients_on_a_handle_outside_of_a_step() -> None:
    """It runs eagerly on read-only leaves and gives a plain tree; the handle stays alive."""
    state = fcg.TrainState.create(params=params(), optimizer=ADAM, buffers={"m": torch.ones(1)})
    new = state.apply_gradients(grads_like(state.params), buffers={"m": torch.zeros(1)})
    assert type(new) is fcg.TrainState
    torch.testing.assert_close(new.params, by_hand(ADAM, 1)[0])
    assert state.step.item() == 0
    placed = fcg.place(new)
    assert (placed.step.item(), placed.buffers["m"].item()) == (1, 0.0)


def test_apply_gradients_in_a_step_equals_eager() -> None:
    @fcg.graph_step
    def step(state: fcg.TrainState, scale: Tensor) -> Any:
        grads = tree.map(lambda p: torch.full_like(p, 0.5) * scale, state.params)
        return state.apply_gradients(grads), {"step": state.step}

    state: Any = fcg.TrainState.create(params=params(), optimizer=ADAM)
    eager = fcg.snapshot(state)
    for i in range(3):
        state, metrics = step(state, torch.tensor(1.0))
        eager = eager.apply_gradients(grads_like(eager.params))
        assert metrics["step"].item() == i
        torch.testing.assert_close(tree.leaves(fcg.snapshot(state)), tree.leaves(eager), rtol=0, atol=0)


def test_accumulation_over_calls_equals_one_large_batch() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        return (p["w"] * x).square().mean()

    @fcg.graph_step
    def accumulate(state: fcg.TrainState, x: Tensor) -> Any:
        grads = tree.map(torch.add, state.grads, fcg.grad(loss)(state.params, x))
        return state.replace(grads=grads), {}

    @fcg.graph_step
    def apply(state: fcg.TrainState) -> Any:
        new = state.apply_gradients(tree.map(lambda g: g / 2, state.grads))
        return new.replace(grads=tree.map(torch.zeros_like, state.grads)), {}

    start = {"w": torch.tensor([1.0, 2.0])}
    batches = torch.randn(2, 4, 2)
    state: Any = fcg.TrainState.create(params=start, optimizer=optim.sgd(0.1), accumulate=True)
    for batch in batches:
        state, _ = accumulate(state, batch)
    state, _ = apply(state)
    whole = start["w"] - 0.1 * fcg.grad(loss)(start, batches.reshape(8, 2))["w"]
    torch.testing.assert_close(state.params["w"].clone(), whole)
    assert not state.grads["w"].any()
    assert state.step.item() == 1


# --- subclasses --------------------------------------------------------------------------------------------


def ema_state() -> EMAState:
    return EMAState.create(params=params(), optimizer=ADAM, ema=params())


def test_subclass_is_a_pytree_with_methods_and_properties() -> None:
    state = ema_state()
    assert state.distance.item() == 0.0
    moved = state.apply_gradients(grads_like(state.params)).averaged(0.5)
    assert type(moved) is EMAState
    assert moved.distance.item() > 0
    state = fcg.place(moved)
    assert state.distance.item() == moved.distance.item()
    paths = {str(path[0]) for path in tree.flatten(state)[1].paths()}
    assert paths == {".step", ".params", ".opt_state", ".ema"}


def test_subclass_in_a_step() -> None:
    @fcg.graph_step
    def step(state: EMAState, scale: Tensor) -> Any:
        return state.apply_gradients(grads_like(state.params)).averaged(0.9), {
            "distance": state.distance * scale
        }

    state, eager = ema_state(), fcg.snapshot(ema_state())
    for _ in range(3):
        state, metrics = step(state, torch.tensor(1.0))
        assert metrics["distance"].item() == eager.distance.item()
        eager = eager.apply_gradients(grads_like(eager.params)).averaged(0.9)
    torch.testing.assert_close(tree.leaves(fcg.snapshot(state)), tree.leaves(eager), rtol=0, atol=0)


def test_subclass_of_a_subclass_has_all_fields() -> None:
    class Deeper(EMAState):
        extra: Any = None

    state = Deeper.create(params=params(), optimizer=ADAM, ema=params(), extra=torch.ones(1))
    assert [field.name for field in dataclasses.fields(Deeper)][-2:] == ["ema", "extra"]
    assert state.extra.item() == 1.0


def test_optimizer_is_a_part_of_the_structure() -> None:
    one = fcg.snapshot(fcg.TrainState.create(params=params(), optimizer=optim.sgd(0.1)))
    two = dataclasses.replace(one, optimizer=optim.sgd(0.2))
    assert tree.flatten(one)[1] != tree.flatten(two)[1]
    rows = tree.structure_diff(tree.flatten(one)[1], tree.flatten(two)[1], "state")
    assert len(rows) == 1
    assert rows[0].startswith("state  expected static fields")


# --- the handle of a TrainState ----------------------------------------------------------------------------


def test_replace_latest_and_donation() -> None:
    state = fcg.TrainState.create(params=params(), optimizer=ADAM)
    new = state.replace(step=7)
    assert new.step.item() == state.latest().step.item() == 7
    with pytest.raises(
        DonatedStateError, match=r"`state.step` was used after `state` was donated to `replace`"
    ):
        state.step  # noqa: B018
    plain = fcg.snapshot(new)
    assert plain.latest() is plain
    assert plain.replace(step=torch.tensor(1)).step.item() == 1


def test_a_plain_state_is_frozen() -> None:
    plain = fcg.snapshot(fcg.TrainState.create(params=params(), optimizer=ADAM))
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'step'"):
        plain.step = torch.tensor(1)  # type: ignore[misc]


def test_a_pickled_handle_comes_back_as_a_plain_state() -> None:
    state = fcg.TrainState.create(params=params(), optimizer=ADAM)
    back = pickle.loads(pickle.dumps(state))
    assert type(back) is fcg.TrainState
    assert back.optimizer == ADAM
    torch.testing.assert_close(back.params, params())


def test_repr_names_fields_and_specs() -> None:
    state = fcg.TrainState.create(params={"w": torch.ones(2)}, optimizer=optim.sgd(0.1))
    assert repr(state).startswith("state: TrainState, generation 0, on cpu, 2 leaves, 16 B\n  state.step")
    assert "  state.params['w']  f32[2]  8 B" in repr(state)


def test_subclasses_declare_static_fields_of_their_own():
    class Run(fcg.TrainState):
        ema: dict
        depth: int = fcg.tree.static(default=2)

    def create(**fields):
        params = {"w": torch.ones(2)}
        return Run.create(params=params, optimizer=fcg.optim.sgd(0.5), ema={"w": torch.zeros(2)}, **fields)

    @fcg.graph_step
    def train(state, batch):
        assert type(state.depth) is int
        grads = fcg.grad(lambda p: (p["w"] * batch).sum() * state.depth)(state.params)
        return state.apply_gradients(grads, ema=state.params), {}

    state, _ = train(create(), torch.ones(2))
    assert (state.depth, type(state.tree), state.params["w"].tolist()) == (2, Run, [0.0, 0.0])
    assert fcg.snapshot(state).depth == 2
    with pytest.raises(fcg.LayoutError, match=r"static fields"):
        train(create(depth=3), torch.ones(2))


def test_gradients_that_are_not_there():
    state = fcg.TrainState.create(params={"w": torch.ones(2)}, optimizer=fcg.optim.sgd(0.5))

    def apply(state, batch):
        return state.apply_gradients(state.grads), {}

    def add(state, batch):
        return state.replace(grads=fcg.tree.map(torch.add, state.grads, state.params)), {}

    for function in (apply, add):
        with pytest.raises(
            fcg.LayoutError,
            match=r"^`(apply|add)`: .*, at test_train_state(.|\n)*TrainState\.create\(.*accumulate=True",
        ):
            fcg.graph_step(function)(state, torch.ones(2))


def test_a_field_that_the_class_lacks_is_refused_with_how_to_add_it() -> None:
    params = {"w": torch.ones(2)}
    with pytest.raises(
        TypeError, match=r"`TrainState` has no field `ema`(.|\n)*class MyState\(fcg.TrainState\): ema: dict"
    ):
        fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1), ema=params)

    class MyState(fcg.TrainState):
        ema: dict  # type: ignore[type-arg]

    state = MyState.create(params=params, optimizer=fcg.optim.sgd(0.1), ema=fcg.snapshot(params))
    assert torch.equal(state.ema["w"], params["w"])
