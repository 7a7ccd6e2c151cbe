"""Adapted optimizer classes: equal to the class for 20 steps, captured bit for bit, and refused where they differ."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim, tree
from functional_cg.errors import CaptureError
from functional_cg.optim.adapters.hosted import Shelf, every_way
from tests import optimizer_table as table
from tests.exports import exports
from tests.shares import share
from tests.test_optimizers import (
    MATRICES,
    RATE,
    SHAPES,
    STEPS,
    assert_captured,
    assert_near,
    judged,
    ours,
    problem,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch_optimizer

REFUSED = MappingProxyType(
    {
        "torch.optim": ("LBFGS", "SparseAdam"),
        "torch_optimizer": ("Adahessian", "Lookahead", "SWATS", "Shampoo"),
    }
)


@dataclass(frozen=True, eq=False)
class Case:
    """A class, what it is made with, and what its own arithmetic allows of the way of a leaf.

    Attributes:
      package: Where it is from.
      name: The class.
      hyper: Its arguments.
      tolerance: Of the way; larger where the class itself computes in float32.
      shapes: Of the leaves.
      joined: Whether its first step is apart.
    """

    package: str
    name: str
    hyper: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-11
    shapes: Any = SHAPES
    joined: bool = False

    def __str__(self) -> str:
        return f"{self.package}.{self.name}({', '.join(f'{k}={v!r}' for k, v in self.hyper.items())})"

    @property
    def cls(self) -> Any:
        return getattr(
            {"torch.optim": torch.optim, "torch_optimizer": torch_optimizer}[self.package], self.name
        )


IMAGES = ((2, 3, 2, 2), (4, 3), (3,))
DECAY = {"lr": RATE, "weight_decay": 0.1}
MOMENTUM = {**DECAY, "momentum": 0.8}

of_torch, of_other = partial(Case, "torch.optim"), partial(Case, "torch_optimizer")

CASES = [
    of_torch("ASGD", {"lr": RATE, "t0": 5.0, "lambd": 0.1}, 1e-5),  # its rates are float32 on the host
    of_torch("Adadelta", {**DECAY, "rho": 0.8}),
    of_torch("Adafactor", DECAY),
    of_torch("Adagrad", {**DECAY, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    of_torch("Adam", DECAY),
    of_torch("Adam", {**DECAY, "amsgrad": True, "maximize": True}),
    of_torch("AdamW", DECAY),
    of_torch("Adamax", DECAY),
    of_torch("Muon", DECAY, 1e-11, MATRICES),
    of_torch("NAdam", {**DECAY, "decoupled_weight_decay": True}, 1e-6),  # its product of momenta is float32
    of_torch("RAdam", {**DECAY, "betas": (0.8, 0.9)}),
    of_torch("RAdam", {**DECAY, "betas": (0.8, 0.99), "decoupled_weight_decay": True}),
    of_torch("RMSprop", {**MOMENTUM, "centered": True}),
    of_torch("Rprop", {"lr": RATE}),
    of_torch("SGD", {"lr": RATE}),
    of_torch("SGD", {**MOMENTUM, "nesterov": True}, joined=True),
    of_torch("SGD", {**MOMENTUM, "dampening": 0.5}, joined=True),
    of_other("A2GradExp", {"lips": 5.0, "rho": 0.3}),
    of_other("A2GradInc", {"beta": 5.0}),
    of_other("A2GradUni", {"beta": 5.0}),
    of_other("AccSGD", DECAY),
    of_other("AdaBelief", {**DECAY, "betas": (0.8, 0.9), "rectify": True, "amsgrad": True}),
    of_other("AdaBelief", {**DECAY, "rectify": False, "weight_decouple": False}),
    of_other("AdaBound", {**DECAY, "gamma": 0.1, "amsbound": True}),
    of_other("AdaMod", {**DECAY, "beta3": 0.9}),
    of_other("Adafactor", {"beta1": 0.8, "weight_decay": 0.1}),
    of_other("Adafactor", {"lr": RATE, "relative_step": False, "warmup_init": False}),
    of_other("AdamP", {**DECAY, "nesterov": True, "delta": 0.3}, shapes=IMAGES),
    of_other("AggMo", {**DECAY, "betas": (0.0, 0.5, 0.9)}),
    of_other("Apollo", {**DECAY, "warmup": 5}),
    of_other("DiffGrad", DECAY),
    of_other("LARS", {**MOMENTUM, "nesterov": True, "trust_coefficient": 0.1}, joined=True),
    of_other("Lamb", {**DECAY, "debias": True}),
    of_other("MADGRAD", MOMENTUM),
    of_other("MADGRAD", {**MOMENTUM, "momentum": 0.0}),
    of_other("NovoGrad", {**DECAY, "grad_averaging": True, "amsgrad": True}, 1e-5),  # its norms are float32
    of_other("PID", {**MOMENTUM, "dampening": 0.5}, joined=True),
    of_other("QHAdam", {**DECAY, "nus": (0.7, 0.9), "decouple_weight_decay": True}),
    of_other("QHM", {**MOMENTUM, "nu": 0.6, "weight_decay_type": "direct"}),
    of_other("RAdam", {**DECAY, "betas": (0.8, 0.9)}, 1e-5),  # its parameters are float32
    of_other("RangerQH", {**DECAY, "k": 3}, joined=True),
    of_other(
        "Ranger", {**DECAY, "k": 3, "betas": (0.8, 0.9)}, 1e-5, joined=True
    ),  # so are its, and the next one's
    of_other("RangerVA", {**DECAY, "k": 3}, 1e-5, joined=True),
    of_other("SGDP", {**MOMENTUM, "delta": 0.3}, shapes=IMAGES),
    of_other("SGDW", {**MOMENTUM, "dampening": 0.5}, joined=True),
    of_other("Yogi", DECAY),
]


@pytest.mark.parametrize("package", REFUSED)
def test_every_class_is_here_or_refused(package: str) -> None:
    here = {case.name for case in CASES if case.package == package}
    assert here | set(REFUSED[package]) == {cls.__name__ for cls in table.classes(package)}
    assert not here & set(REFUSED[package])


@cache
def adapted(case: Case) -> Any:
    """Made once: it runs the class and what it made of it beside each other."""
    return optim.from_torch(case.cls, **case.hyper)


@pytest.mark.parametrize("case", share(CASES, 2), ids=str)
def test_adapted_equals_the_class(case: Case) -> None:
    tx = adapted(case)
    assert tx.joined == case.joined
    # A number meets a float32 tensor rounded once more or less than on the host: the first steps show it.
    for dtype, tolerance, count in ((torch.float64, case.tolerance, STEPS), (torch.float32, 1e-4, 6)):
        params, steps = problem(case.shapes, dtype=dtype)
        steps = steps[:count]
        state, now = tx.init(params), params
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the judge, on its own style
            for grads, expected in zip(
                steps, judged(lambda p: case.cls(p, **case.hyper), params, steps), strict=True
            ):
                now, state = tx.step(grads, state, now)
                assert_near(now, expected, params, tolerance)


class MatricesAlone(optim.GradientTransformation):
    """Trains ``w`` by one transformation, and leaves ``b``."""

    def __init__(self, inner: Any) -> None:
        self.inner = optim.partition({"w": inner, "b": optim.set_to_zero()}, {"w": "w", "b": "b"})

    def init(self, params: Any) -> Any:
        return self.inner.init(params)

    def update(self, updates: Any, state: Any, params: Any = None) -> Any:
        return self.inner.update(updates, state, params)


@pytest.mark.parametrize("case", share(CASES, 4), ids=str)
def test_captured_adapted_equals_eager(case: Case) -> None:
    tx = adapted(case)
    assert_captured(MatricesAlone(tx) if case.shapes is MATRICES else tx)


@pytest.mark.parametrize("name", ["SGD", "NAdam"])
def test_a_rate_may_be_a_schedule_or_a_tensor_of_the_state(name: str) -> None:
    cls, hyper = getattr(torch.optim, name), {"momentum": 0.8} if name == "SGD" else {}
    schedule = optim.linear(0.0, 0.1, 10)
    params, steps = problem()
    leaves = [leaf.clone().requires_grad_() for leaf in params]
    judge = cls(leaves, lr=1.0, **hyper)
    scheduled = optim.from_torch(cls, lr=schedule, **hyper)
    injected = optim.inject_hyperparams(partial(optim.from_torch, cls, **hyper))(lr=0.5)
    now, state = params, scheduled.init(params)
    other, other_state = params, injected.init(params)
    for count, grads in enumerate(steps):
        judge.param_groups[0]["lr"] = schedule(count)
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad.clone()
        judge.step()
        now, state = scheduled.step(grads, state, now)
        other_state = optim.set_hyperparams(other_state, lr=schedule(count))
        updates, other_state = injected.update(grads, other_state, other)
        other = optim.apply_updates(other, updates)
        if count:
            for got in (now, other):
                assert_near(got, [leaf.detach() for leaf in leaves], params, 1e-5)


def test_a_captured_step_with_a_schedule_equals_eager() -> None:
    assert_captured(optim.from_torch(torch.optim.RAdam, lr=optim.warmup_cosine(0.1, 3, 20), betas=(0.8, 0.9)))
    assert_captured(
        optim.inject_hyperparams(partial(optim.from_torch, torch.optim.SGD, momentum=0.8))(lr=0.05)
    )


def test_an_adapted_class_is_a_value_and_keeps_layouts() -> None:
    tx = optim.from_torch(torch.optim.RMSprop, lr=0.1, momentum=0.8)
    assert pickle.loads(pickle.dumps(tx)) == tx
    assert hash(tx) == hash(optim.from_torch(torch.optim.RMSprop, momentum=0.8, lr=0.1))
    assert tx != optim.from_torch(torch.optim.RMSprop, lr=0.1)
    assert repr(tx) == "from_torch(torch.optim.RMSprop, lr=0.1, momentum=0.8)"
    params = {"w": torch.randn(3, 4), "b": [torch.randn(0, 2), torch.randn(())]}
    before = tree.map(torch.clone, params)
    state = tx.init(params)
    new, after = tx.step(params, state, params)
    assert tree.flatten(after)[1] == tree.flatten(state)[1]
    for x, y in zip(tree.leaves((new, after)), tree.leaves((params, state)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
    for x, y in zip(tree.leaves(params), tree.leaves(before), strict=True):
        assert torch.equal(x, y)


def test_update_and_step_agree() -> None:
    params, steps = problem()
    tx = optim.from_torch(torch.optim.NAdam, lr=0.1)
    state, now = tx.init(params), params
    for grads, (updated, _) in zip(steps, ours(tx, params, steps), strict=True):
        now, state = tx.step(grads, state, now)
        assert_near(updated, now, params, 1e-12)


def test_nothing_of_the_class_or_its_module_is_changed() -> None:
    cls = torch_optimizer.AdamP
    module = __import__(cls.__module__, fromlist=["AdamP"])
    cls([torch.zeros(2)])  # torch hooks a class when it is first constructed
    before = dict(vars(cls)), dict(vars(module)), dict(vars(torch.optim.Optimizer))
    optim.from_torch(cls, lr=0.1)
    assert (dict(vars(cls)), dict(vars(module)), dict(vars(torch.optim.Optimizer))) == before


# -- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "name", "reason"),
    [
        ("torch.optim", "LBFGS", r"missing 1 required positional argument: 'closure'(.|\n)*from_functions"),
        ("torch.optim", "SparseAdam", "does not support dense gradients"),
        ("torch_optimizer", "Adahessian", "does not have grad_fn"),
        ("torch_optimizer", "Lookahead", r"cannot be constructed of parameters(.|\n)*use `optim.lookahead\("),
        ("torch_optimizer", "SWATS", "changes `lr` for all parameters at once"),
        ("torch_optimizer", "Shampoo", "reads a tensor on the host, by `cpu`"),
    ],
)
def test_a_class_is_refused_by_name(package: str, name: str, reason: str) -> None:
    case = Case(package, name)
    with pytest.raises(CaptureError, match=rf"{name}` cannot be made a pure function(.|\n)*{reason}"):
        optim.from_torch(case.cls)


class Own(torch.optim.Optimizer):
    """What the planted classes share."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0
        self.past: list[float] = []

    def each(self) -> Any:
        return [
            (leaf, self.state[leaf], self.param_groups[0]["lr"]) for leaf in self.param_groups[0]["params"]
        ]


class Counting(Own):
    """Counts on the object, not in the state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for leaf, _, lr in self.each():
            leaf.data.add_(leaf.grad, alpha=-lr / self.calls)


class Remembering(Own):
    """Keeps a list on the object."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.past.append(1.0)
        for leaf, _, lr in self.each():
            leaf.data.add_(leaf.grad, alpha=-lr / len(self.past))


class Swinging(Own):
    """Keeps numbers in a dict on the object, and needs them late."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rates = {"count": 0}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.rates["count"] += 1
        for leaf, _, lr in self.each():
            leaf.data.add_(leaf.grad, alpha=-lr if self.rates["count"] < 100 else lr)


class Averaging(Own):
    """Keeps a tensor on the object, written in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.mean = torch.zeros(())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.mean += 1
        for leaf, _, lr in self.each():
            leaf.data.add_(leaf.grad, alpha=-lr * (self.mean > 100))


class Mixing(Own):
    """Divides by the norm of all gradients together."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = torch.stack([leaf.grad.norm() for leaf, _, _ in self.each()]).norm()
        for leaf, _, lr in self.each():
            leaf.data.add_(leaf.grad / norm, alpha=-lr)


class Growing(Own):
    """Keeps another list at every step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for leaf, state, lr in self.each():
            state["past"] = [*state.get("past", []), leaf.grad.clone()]
            leaf.data.add_(sum(state["past"]), alpha=-lr)


class Wording(Own):
    """Keeps a word."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for leaf, state, lr in self.each():
            state["phase"] = "second" if "phase" in state else "first"
            leaf.data.add_(leaf.grad, alpha=-lr if state["phase"] == "first" else -lr / 2)


class Listing(Own):
    """Asks numpy."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for leaf, _, lr in self.each():
            leaf.data.add_(leaf.grad, alpha=-lr * float(leaf.grad.numpy().max()))


class Branching(Own):
    """Has another way for each of many elements."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for leaf, _, lr in self.each():
            for one in leaf.grad.flatten():
                if one > 0:
                    leaf.data.add_(leaf.grad, alpha=-lr)


class Exploding(Own):
    """Ends in infinity."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for leaf, _, _ in self.each():
            leaf.data.mul_(1e200)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Counting, "changes `calls` on the object"),
        (Remembering, "changes `past` on the object"),
        (Swinging, "changes `rates` on the object"),
        (Averaging, "changes `mean` on the object"),
        (Mixing, "differs from itself as a function at step 1, by"),
        (Growing, "keeps other things after one step than after another"),
        (Wording, "keeps str 'first'"),
        (Listing, "reads a tensor on the host, by `numpy`"),
        (Exploding, "is not finite at step 2 with these arguments"),
        (Branching, "branches on tensors in more than 64 ways"),
    ],
)
def test_what_would_be_wrong_in_a_graph_is_refused(cls: Any, reason: str) -> None:
    with pytest.raises(CaptureError, match=rf"{cls.__name__}  {reason}"):
        optim.from_torch(cls)


class Alternating(Own):
    """Branches on its count and on data, in the state: nothing that a graph could not hold."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for leaf, state, lr in self.each():
            state["count"] = state.get("count", 0) + 1
            if state["count"] % 3 == 0 and leaf.grad.norm().item() > 1.5:
                leaf.data.mul_(0.9)
            elif leaf.grad.sum() < 0:
                leaf.data.sub_(leaf.grad, alpha=lr * max(1.0, float(leaf.grad.max())))
            leaf.data.sub_(leaf.grad.sign(), alpha=lr / state["count"])


def test_an_own_class_that_branches_is_adapted() -> None:
    params, steps = problem()
    tx = optim.from_torch(Alternating, lr=0.1)
    for (now, _), expected in zip(ours(tx, params, steps), judged(Alternating, params, steps), strict=True):
        assert_near(now, expected, params, 1e-11)
    assert_captured(tx)


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="takes an optimizer class, as in"):
        optim.from_torch(optim.sgd)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="`momentum` is a tensor or a schedule; of the numbers only `lr` may be one"
    ):
        optim.from_torch(torch.optim.SGD, lr=0.1, momentum=torch.tensor(0.9))
    with pytest.raises(ValueError, match=r"Invalid learning rate: -1\.0"):
        optim.from_torch(torch.optim.SGD, lr=-1.0)


def test_a_class_is_not_adapted_inside_of_a_step() -> None:
    @fcg.graph_step
    def step(state: Any, batch: Tensor) -> Any:
        tx = optim.from_torch(torch.optim.SGD, lr=0.1)
        return {"w": tx.step({"w": batch}, tx.init(state), state)[0]["w"]}, {}

    with pytest.raises(
        CaptureError, match=r"`SGD` is adapted inside of a step(.|\n)*make the optimizer once, outside"
    ):
        step({"w": torch.ones(2)}, torch.ones(2))


# -- pieces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [-2.0, -0.5, 0.5, 2.0])
def test_every_way_is_the_way_that_python_takes(x: float) -> None:
    def f(value: Tensor, ask: Any) -> Tensor:
        if ask(value > 0):
            return value * 2 if ask(value > 1) else value + 10
        if ask(value < -1):
            return value - 100
        return -value

    value = torch.tensor(x)
    (got,) = every_way(lambda ask: [f(value, ask)])
    assert torch.equal(got, f(value, bool))


def test_a_shelf_gives_the_first_of_equal_entries() -> None:
    shelf = Shelf([[None], [None]])
    assert shelf[torch.tensor(1.0)] is shelf[0]
    with pytest.raises(Exception, match="looks a number up in a list"):
        Shelf([1, 2])[torch.tensor(1.0)]


def test_the_table_is_current() -> None:
    """If it is not: ``python -m tests.optimizer_table``."""
    assert table.readme().read_text(encoding="utf-8") == table.current()


def test_the_table_names_transformations_that_are_there() -> None:
    assert {name for names in table.BESIDE.values() for name in names} <= set(exports(optim))
    assert "| `NAdam` | adapted | `nadam` |" in table.readme().read_text(encoding="utf-8")


def test_the_readme_names_what_there_is() -> None:
    text = table.readme().read_text(encoding="utf-8")
    cells = [line.split("|")[2] for line in text.partition("| | |")[2].partition("\n\n")[0].splitlines()[2:]]
    names = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(names) > 30
    assert set(names) <= set(exports(optim))


def test_the_examples_of_the_readme_run() -> None:
    from_torch, average, _own, adapted = re.findall(
        r"```python\n(.*?)```", table.readme().read_text(encoding="utf-8"), re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(from_torch, names)
    assert int(names["state"].step) == 1
    exec(adapted, names)
    assert names["state"].opt_state.leaves[0]["state"]["prev"].shape == (3,)
    torch.manual_seed(0)
    exec(average, names)
    before = fcg.snapshot(names["state"])
    assert not torch.equal(before.opt_state.ema["w"], before.params["w"])
    state, metrics = names["train_step"](names["state"], torch.full((4, 3), torch.nan))
    assert metrics["skipped"]
    assert all(torch.equal(x, y) for x, y in zip(tree.leaves(state), tree.leaves(before), strict=True))
    state, metrics = names["train_step"](state, torch.ones(4, 3))
    assert not metrics["skipped"]
    assert not torch.equal(state.opt_state.ema["w"], before.opt_state.ema["w"])


@pytest.mark.parametrize(
    "grads",
    [{"w": torch.ones(4)}, {"v": torch.ones(3)}, {"w": torch.ones(3), "b": torch.ones(1)}, {"w": 3}],
    ids=["shape", "name", "more", "a number"],
)
def test_gradients_that_are_unlike_the_parameters_are_refused(grads: Any) -> None:
    tx = fcg.optim.from_torch(torch.optim.SGD, lr=0.1)
    params: Any = {"w": torch.ones(3)}
    with pytest.raises(fcg.LayoutError, match="the gradients are unlike the parameters"):
        tx.update(grads, tx.init(params), params)
