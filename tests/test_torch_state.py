"""State of torch optimizers moved in and out: the oracle is the run in torch that was not interrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import functional_cg as fcg
from functional_cg import optim

NAMES = ("up.weight", "up.bias", "down.weight", "down.bias")
MATRICES = {name: "decay" if name.endswith("weight") else "rest" for name in NAMES}
ADAMW: dict[str, Any] = {"b1": 0.8, "b2": 0.99, "eps": 1e-6}


def groups(p: dict[str, Any]) -> list[dict[str, Any]]:
    """Decay and no-decay, as nanoGPT does it: the order of the groups is not that of the module."""
    return [
        {"params": [p[name] for name in NAMES if MATRICES[name] == "rest"], "weight_decay": 0.0},
        {"params": [p[name] for name in NAMES if MATRICES[name] == "decay"], "weight_decay": 0.1},
    ]


BY_GROUP = [name for label in ("rest", "decay") for name in NAMES if MATRICES[name] == label]
OF_ADAMW = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6}

# id -> (ours, torch's, names in the order of torch's groups)
CASES: dict[str, tuple[optim.GradientTransformation, Callable[[dict[str, Any]], Any], Any]] = {
    "sgd": (optim.sgd(0.1, momentum=0.9), lambda p: torch.optim.SGD(p.values(), 0.1, momentum=0.9), NAMES),
    "plain sgd": (optim.sgd(0.1), lambda p: torch.optim.SGD(p.values(), 0.1), NAMES),
    "sgd, decay as L2, nesterov": (
        optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p.values(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        NAMES,
    ),
    "adam": (optim.adam(1e-2), lambda p: torch.optim.Adam(p.values(), 1e-2), NAMES),
    "adam, with names": (optim.adam(1e-2), lambda p: torch.optim.Adam(p.items(), 1e-2), None),
    "adamw in groups": (
        optim.partition(
            {
                "decay": optim.adamw(1e-2, weight_decay=0.1, **ADAMW),
                "rest": optim.adamw(1e-2, weight_decay=0.0, **ADAMW),
            },
            MATRICES,
        ),
        lambda p: torch.optim.AdamW(groups(p), **OF_ADAMW),
        BY_GROUP,
    ),
    "adamw with a mask": (
        optim.adamw(
            1e-2, weight_decay=0.1, mask={name: MATRICES[name] == "decay" for name in NAMES}, **ADAMW
        ),
        lambda p: torch.optim.AdamW(groups(p), **OF_ADAMW),
        BY_GROUP,
    ),
    "injected": (
        optim.inject_hyperparams(optim.adamw)(learning_rate=0.5, weight_decay=0.5),
        lambda p: torch.optim.AdamW(p.values(), 1e-2, weight_decay=0.1),
        NAMES,
    ),
    "links": (
        optim.chain(
            optim.scale_by_adam(), optim.add_decayed_weights(0.1), optim.scale_by_learning_rate(1e-2)
        ),
        lambda p: torch.optim.AdamW(p.values(), 1e-2, weight_decay=0.1),
        NAMES,
    ),
    "scheduled": (
        optim.adam(optim.constant(1e-2)),
        lambda p: torch.optim.Adam(p.values(), 1e-2),
        NAMES,
    ),
    "amsgrad": (optim.amsgrad(1e-2), lambda p: torch.optim.Adam(p.values(), 1e-2, amsgrad=True), NAMES),
    "adamax": (optim.adamax(1e-2), lambda p: torch.optim.Adamax(p.values(), 1e-2), NAMES),
    "nadam": (optim.nadam(1e-2), lambda p: torch.optim.NAdam(p.values(), 1e-2), NAMES),
    "radam": (optim.radam(1e-2), lambda p: torch.optim.RAdam(p.values(), 1e-2), NAMES),
    "rmsprop": (
        optim.rmsprop(1e-2, momentum=0.9, centered=True),
        lambda p: torch.optim.RMSprop(p.values(), 1e-2, momentum=0.9, centered=True),
        NAMES,
    ),
    "adadelta": (optim.adadelta(), lambda p: torch.optim.Adadelta(p.values()), NAMES),
    "adagrad": (optim.adagrad(1e-2), lambda p: torch.optim.Adagrad(p.values(), 1e-2), NAMES),
    "from_torch": (
        optim.from_torch(torch.optim.Adam, lr=1e-2),
        lambda p: torch.optim.Adam(p.values(), 1e-2),
        NAMES,
    ),
}


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 4), (3,), (2, 3), (2,))
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator)
        for name, shape in zip(NAMES, shapes, strict=True)
    }


def trained(judge: Any, params: dict[str, Any], steps: range) -> None:
    for i in steps:
        for name, gradient in drawn(i).items():
            params[name].grad = gradient
        judge.step()


def parameters(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: torch.nn.Parameter(value.detach().clone()) for name, value in values.items()}


def state_of(params: dict[str, Any], optimizer: optim.GradientTransformation) -> Any:
    values = {name: p.detach().clone() for name, p in params.items()}
    return fcg.TrainState.create(params=values, optimizer=optimizer)


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_here_and_back_in_torch(case: str) -> None:
    optimizer, make, names = CASES[case]
    params = parameters(drawn(99))
    judge = make(params)
    trained(judge, params, range(5))
    counted = {"step": 5} if "sgd" in case else {}
    state = optim.load_torch_state(state_of(params, optimizer), judge.state_dict(), names=names, **counted)
    assert int(state.step) == 5

    @fcg.graph_step
    def train_step(state: Any, grads: Any) -> Any:
        return state.apply_gradients(grads), None

    trained(judge, params, range(5, 15))
    for i in range(5, 15):
        state, _ = train_step(state, drawn(i))
    # torch keeps the product of NAdam's momenta in float32.
    close = {"rtol": 1e-6, "atol": 1e-7} if case == "nadam" else {"rtol": 1e-11, "atol": 1e-12}
    for name, p in params.items():
        torch.testing.assert_close(fcg.snapshot(state.params)[name], p.detach(), **close)

    back = parameters(fcg.snapshot(state.params))
    other = make(back)
    other.load_state_dict(optim.torch_state(state, other.state_dict(), names=names))
    trained(judge, params, range(15, 25))
    trained(other, back, range(15, 25))
    for name, p in params.items():
        torch.testing.assert_close(back[name], p, **close)


def after(make: Callable[[dict[str, Any]], Any], steps: int = 3) -> tuple[Any, dict[str, Any]]:
    params = parameters(drawn(99))
    judge = make(params)
    trained(judge, params, range(steps))
    return judge.state_dict(), params


def adam(p: dict[str, Any]) -> Any:
    return torch.optim.Adam(p.values(), 1e-2)


@pytest.mark.parametrize(
    ("optimizer", "make", "match"),
    [
        (optim.amsgrad(1e-2), adam, r"expected .*max_exp_avg_sq.*got exp_avg, exp_avg_sq, step"),
        (optim.sgd(1e-2), adam, r"expected nothing   got exp_avg"),
        (optim.radam(1e-2), adam, r"amsgrad  expected None   got False"),
        (optim.adam(1e-2, b1=0.8), adam, r"betas 0  expected 0.8   got 0.9"),
        (optim.adam(1e-1), adam, r"lr  expected 0.1   got 0.01"),
        (
            optim.adamw(1e-2, weight_decay=0.1),
            lambda p: torch.optim.Adam(p.values(), 1e-2, weight_decay=0.1),
            "decoupled_weight_decay  expected True   got False",
        ),
        (
            optim.sgd(0.1, momentum=0.9),
            lambda p: torch.optim.SGD(p.values(), 0.1, momentum=0.9, dampening=0.5),
            "dampening  expected 0.0   got 0.5",
        ),
        (optim.lookahead(optim.adam(1e-2)), adam, "no class of torch.optim computes what"),
    ],
)
def test_what_is_another_optimizer_is_refused(optimizer: Any, make: Any, match: str) -> None:
    saved, params = after(make)
    state = state_of(params, optimizer)
    with pytest.raises(fcg.LayoutError, match=match):
        optim.load_torch_state(state, saved, names=NAMES, step=3)
    assert int(state.step) == 0


def test_parameters_that_torch_counts_apart_need_labels() -> None:
    params = parameters(drawn(99))
    judge = adam(params)
    trained(judge, params, range(2))
    for p in params.values():
        p.grad = None
    params["up.weight"].grad = torch.ones_like(params["up.weight"])
    judge.step()
    with pytest.raises(
        fcg.LayoutError, match=r"up.bias  step 2\n  up.weight  step 3[\s\S]*one count per label"
    ):
        optim.load_torch_state(state_of(params, optim.adam(1e-2)), judge.state_dict(), names=NAMES)
    labels = dict.fromkeys(NAMES, "rest") | {"up.weight": "first"}
    parted = optim.partition({"first": optim.adam(1e-2), "rest": optim.adam(1e-2)}, labels)
    state = optim.load_torch_state(state_of(params, parted), judge.state_dict(), names=NAMES)
    assert {label: int(one[0].count) for label, one in state.opt_state.inner_states.items()} == {
        "first": 3,
        "rest": 2,
    }


def test_names_are_needed_and_lose_the_prefixes_of_wrappers() -> None:
    saved, params = after(adam)
    state = state_of(params, optim.adam(1e-2))
    with pytest.raises(ValueError, match=r"has no names\. To fix: `names="):
        optim.load_torch_state(state, saved)
    with pytest.raises(ValueError, match="3 names for 4 parameters"):
        optim.load_torch_state(state, saved, names=NAMES[:3])
    with pytest.raises(fcg.LayoutError, match=r"head\.weight  expected a parameter[\s\S]*by its first name"):
        optim.load_torch_state(state, saved, names=("head.weight", *NAMES[1:]))
    state = optim.load_torch_state(state, saved, names=[f"_orig_mod.module.{name}" for name in NAMES])
    assert torch.equal(state.opt_state[0].mu["up.bias"], saved["state"][1]["exp_avg"])


def test_sgd_needs_a_step() -> None:
    saved, params = after(CASES["sgd"][1])
    with pytest.raises(ValueError, match="torch keeps no count"):
        optim.load_torch_state(state_of(params, CASES["sgd"][0]), saved, names=NAMES)


def test_a_frozen_label_has_no_state_in_torch() -> None:
    params = parameters(drawn(99))
    trainable = {name: p for name, p in params.items() if name.startswith("up")}
    judge = torch.optim.Adam(trainable.items(), 1e-2)
    trained(judge, params, range(3))
    labels = {name: "on" if name in trainable else "off" for name in NAMES}
    optimizer = optim.partition({"on": optim.adam(1e-2), "off": optim.set_to_zero()}, labels)
    state = optim.load_torch_state(state_of(params, optimizer), judge.state_dict())
    assert int(state.step) == 3
    with pytest.raises(fcg.LayoutError, match=r"down\.weight  expected in the torch optimizer"):
        optim.load_torch_state(state_of(params, optim.adam(1e-2)), judge.state_dict())


def test_a_state_is_needed() -> None:
    saved, params = after(adam)
    with pytest.raises(TypeError, match="load_torch_state: expected a `TrainState`"):
        optim.load_torch_state(state_of(params, optim.adam(1e-2)).opt_state, saved)
    with pytest.raises(TypeError, match=r"expected `optimizer\.state_dict\(\)`"):
        optim.load_torch_state(state_of(params, optim.adam(1e-2)), saved["state"])


class Tied(torch.nn.Module):
    """A language model whose head is its embedding, with a parameter that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.embedding, self.norm = torch.nn.Embedding(11, 8), torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.head(self.norm(self.embedding(x)))
        return torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def test_a_parameter_that_torch_never_updated_is_frozen_here() -> None:
    model = Tied()
    judge = torch.optim.AdamW(model.named_parameters(), 1e-2)
    batches = torch.randint(0, 11, (20, 2, 6))

    def steps(batches: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for x in batches:
            judge.zero_grad()
            losses.append(model(x))
            losses[-1].backward()
            judge.step()
        return [loss.detach() for loss in losses]

    steps(batches[:4])
    saved, twin = judge.state_dict(), Tied()
    twin.load_state_dict(model.state_dict())

    def moved_in() -> tuple[Any, Any]:
        apply, params, buffers = fcg.from_module(twin)
        state = fcg.TrainState.create(
            params=params, buffers=buffers, optimizer=optim.adamw(1e-2, weight_decay=1e-2)
        )
        return apply, optim.load_torch_state(state, saved)

    with pytest.raises(fcg.LayoutError, match=r"never updated `unused`: `requires_grad_\(False\)` before"):
        moved_in()
    twin.unused.requires_grad_(False)
    apply, state = moved_in()

    @fcg.graph_step
    def train_step(state: Any, x: torch.Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: apply(p, state.buffers, x)[0])(state.params)
        return state.apply_gradients(grads), loss

    for x, expected in zip(batches[4:], steps(batches[4:]), strict=True):
        state, loss = train_step(state, x)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert int(state.step) == 20
    with pytest.raises(ValueError, match=r"`names` differ from those in the dict[\s\S]*leave `names` out"):
        optim.load_torch_state(state, saved, names=["unused", "other.weight", "norm.weight", "norm.bias"])


def _linked(*links: Any) -> Any:
    return optim.chain(*links, optim.scale_by_learning_rate(1e-2))


def rmsprop(p: dict[str, Any]) -> Any:
    return torch.optim.RMSprop(p.values(), 1e-2)


def momentum(p: dict[str, Any], **options: Any) -> Any:
    return torch.optim.SGD(p.values(), 1e-2, momentum=0.9, **options)


# Formulas that keep what torch keeps, and compute something else.
ALIKE: dict[str, tuple[Any, Callable[[dict[str, Any]], Any]]] = {
    "another class": (optim.adam(1e-2), lambda p: torch.optim.RAdam(p.values(), 1e-2)),
    "muon": (optim.sgd(1e-2, momentum=0.95, nesterov=True), lambda p: torch.optim.Muon(p.values(), 1e-2)),
    "rate before the momentum": (optim.chain(optim.scale_by_learning_rate(1e-2), optim.trace(0.9)), momentum),
    "decay behind the momentum": (
        _linked(optim.trace(0.9), optim.add_decayed_weights(0.1)),
        lambda p: momentum(p, weight_decay=0.1),
    ),
    "decay behind rms": (
        _linked(optim.scale_by_rms(0.99), optim.add_decayed_weights(0.1)),
        lambda p: torch.optim.RMSprop(p.values(), 1e-2, weight_decay=0.1),
    ),
    "decay twice": (
        _linked(optim.scale_by_adam(), optim.add_decayed_weights(0.1), optim.add_decayed_weights(0.1)),
        lambda p: torch.optim.AdamW(p.values(), 1e-2, weight_decay=0.1),
    ),
    "no bias correction": (_linked(optim.scale_by_adam(bias_correction=False)), adam),
    "another factor": (optim.chain(optim.scale_by_adam(), optim.scale(-0.5)), adam),
    "a factor behind": (optim.chain(optim.adam(1e-2), optim.scale(0.5)), adam),
    "trust ratio": (_linked(optim.scale_by_adam(), optim.scale_by_trust_ratio()), adam),
    "moments twice": (_linked(optim.scale_by_adam(), optim.scale_by_adam()), adam),
    "clip behind the moments": (_linked(optim.scale_by_adam(), optim.clip_by_global_norm(0.1)), adam),
    "momentum before rms": (_linked(optim.trace(0.9), optim.scale_by_rms(0.99)), rmsprop),
}


@pytest.mark.parametrize("case", ALIKE)
def test_formulas_that_only_look_alike_are_refused(case: str) -> None:
    optimizer, make = ALIKE[case]
    if case == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    drawn_matrices = {name: torch.ones(3, 2, dtype=torch.float64) for name in NAMES}
    params = {name: p.requires_grad_() for name, p in drawn_matrices.items()}
    judge = make(params)
    for _ in range(3):
        for p in params.values():
            p.grad = torch.ones_like(p)
        judge.step()
    state = state_of(params, optimizer)
    with pytest.raises(fcg.LayoutError):
        optim.load_torch_state(state, judge.state_dict(), names=NAMES, step=3)
    if "factor" not in case:  # a rate is written into the dict
        with pytest.raises(fcg.LayoutError):
            optim.torch_state(state, make(params).state_dict(), names=NAMES)


def test_moments_are_no_state_of_an_optimizer_without_them() -> None:
    _, params = after(adam)
    for make in (lambda p: torch.optim.SGD(p.values(), 1e-2), rmsprop):
        with pytest.raises(fcg.LayoutError, match=r"betas 0  expected 0\.9   got nothing"):
            optim.torch_state(state_of(params, optim.adam(1e-2)), make(params).state_dict(), names=NAMES)


@pytest.mark.parametrize(
    "rate",
    [
        optim.scale(-1e-2),
        optim.chain(optim.scale_by_schedule(optim.constant(0.5)), optim.scale(-2e-2)),
        optim.scale_by_schedule(lambda count: -1e-2),
    ],
    ids=["scale", "schedule and scale", "schedule"],
)
def test_a_rate_is_the_product_of_its_links(rate: Any) -> None:
    saved, params = after(adam)
    state = optim.load_torch_state(
        state_of(params, optim.chain(optim.scale_by_adam(), rate)), saved, names=NAMES
    )
    judge = torch.optim.Adam(params.values(), 1e-2 if isinstance(rate, type(optim.scale(-1.0))) else 5.0)
    assert optim.torch_state(state, judge.state_dict(), names=NAMES)["param_groups"][0][
        "lr"
    ] == pytest.approx(1e-2)


def test_a_schedule_has_one_clock() -> None:
    params = parameters(drawn(99))
    judge = adam(params)
    for i in range(3):
        for name, p in params.items():
            p.grad = drawn(i)[name] if i or name != "up.bias" else None
        judge.step()
    labels = dict.fromkeys(NAMES, "early") | {"up.bias": "late"}

    rate = optim.linear(1e-2, 1e-3, transition_steps=20)
    parted = optim.partition({"early": optim.adam(rate), "late": optim.adam(rate)}, labels)
    state = optim.load_torch_state(state_of(params, parted), judge.state_dict(), names=NAMES)
    assert int(state.step) == 3
    moments, clock = state.opt_state.inner_states["late"]
    assert (int(moments.count), int(clock.count)) == (2, 3)


def test_a_group_has_one_rate_and_a_rate_one_type() -> None:
    _, params = after(adam)
    labels = dict.fromkeys(NAMES, "fast") | {"up.bias": "slow"}
    parts = {"fast": optim.adam(optim.constant(0.1)), "slow": optim.adam(optim.constant(1e-3))}
    with pytest.raises(fcg.LayoutError, match=r"lr  expected .*, as for others of its group"):
        optim.torch_state(
            state_of(params, optim.partition(parts, labels)), adam(params).state_dict(), names=NAMES
        )
    tensor = torch.optim.Adam(params.values(), torch.tensor(1e-2))
    state = state_of(params, optim.adam(1e-2))
    assert isinstance(
        optim.torch_state(state, tensor.state_dict(), names=NAMES)["param_groups"][0]["lr"], torch.Tensor
    )
    assert (
        int(
            optim.load_torch_state(
                state, tensor.state_dict() | {"state": after(adam)[0]["state"]}, names=NAMES
            ).step
        )
        == 3
    )


def test_injected_numbers_become_those_of_the_group_and_others_have_to_agree() -> None:
    params = parameters(drawn(99))
    like = torch.optim.AdamW(params.values(), 1e-3, weight_decay=0.1).state_dict()
    state = state_of(params, optim.inject_hyperparams(optim.adamw)(learning_rate=1e-2, weight_decay=0.3))
    group = optim.torch_state(state, like, names=NAMES)["param_groups"][0]
    assert (group["lr"], group["weight_decay"]) == pytest.approx((1e-2, 0.3))
    with pytest.raises(fcg.LayoutError, match=r"weight_decay  expected 0\.3   got 0\.1"):
        optim.torch_state(state_of(params, optim.adamw(1e-2, weight_decay=0.3)), like, names=NAMES)


def test_a_momentum_that_torch_has_not_begun_is_not_damped() -> None:
    params = parameters(drawn(99))
    judge = momentum(params, dampening=0.5)
    for name, p in params.items():
        p.grad = drawn(0)[name] if name != "up.bias" else None
    judge.step()
    state = state_of(params, optim.from_torch(torch.optim.SGD, lr=1e-2, momentum=0.9, dampening=0.5))
    with pytest.raises(fcg.LayoutError, match=r"up\.bias  expected momentum_buffer, since dampening"):
        optim.load_torch_state(state, judge.state_dict(), names=NAMES, step=1)


@pytest.mark.parametrize(("step", "match"), [(100, "counts 3 updates"), (-3, "step=-3")])
def test_a_step_that_the_dict_contradicts_is_refused(step: int, match: str) -> None:
    saved, params = after(adam)
    with pytest.raises(ValueError, match=match):
        optim.load_torch_state(state_of(params, optim.adam(1e-2)), saved, names=NAMES, step=step)


def test_names_are_strings() -> None:
    saved, params = after(adam)
    pairs: Any = list(params.items())
    with pytest.raises(ValueError, match="expected names, got"):
        optim.load_torch_state(state_of(params, optim.adam(1e-2)), saved, names=pairs)
