"""Each optimizer against a reference, and each captured step against its eager run.

The judges are ``torch.optim``, ``torch_optimizer`` and the papers' formulas written out here: 20 steps in float64. The
tolerance is relative to how far a leaf has gone: 1e-12, a few roundings a step, or what the judge's own arithmetic
allows where it computes in float32 or bfloat16.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim, tree
from functional_cg.errors import LayoutError
from functional_cg.optim.algebra.base import Optimizer
from tests.exports import exports
from tests.shares import CALLS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch_optimizer

STEPS = 20
RATE = 0.05
SHAPES = ((4, 3), (3, 5), (7,), ())
MATRICES = ((4, 3), (3, 5), (3, 3))

Judge = Callable[[list[Tensor]], Any]


def problem(
    shapes: Any = SHAPES, *, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(1)

    def leaves() -> list[Tensor]:
        return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]

    return leaves(), [leaves() for _ in range(STEPS)]


def ours(tx: optim.GradientTransformation, params: Any, steps: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Parameters and state after each step, by ``update``."""
    state = tx.init(params)
    for grads in steps:
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        yield params, state


def judged(make: Judge, params: list[Tensor], steps: list[list[Tensor]]) -> Iterator[list[Tensor]]:
    leaves = [leaf.clone().requires_grad_() for leaf in params]
    optimizer = make(leaves)
    for grads in steps:
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad.clone()
        optimizer.step()
        yield [leaf.detach().clone() for leaf in leaves]


def assert_near(got: list[Tensor], expected: list[Tensor], start: list[Tensor], tolerance: float) -> None:
    for x, y, before in zip(got, expected, start, strict=True):
        way = float((y - before).abs().max())
        assert way > 0, "the judge stands still"
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * way)


# -- classes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Ours, and its judge.

    Attributes:
      tx: The transformation.
      judge: Makes an optimizer object of leaves.
      tolerance: Relative to the way.
      shapes: Of the leaves.
    """

    tx: optim.GradientTransformation
    judge: Judge
    tolerance: float = 1e-12
    shapes: Any = SHAPES

    def __str__(self) -> str:
        return repr(self.tx)


def torch_class(name: str, **hyper: Any) -> Judge:
    return lambda leaves: getattr(torch.optim, name)(leaves, **hyper)


def other_class(name: str, **hyper: Any) -> Judge:
    return lambda leaves: getattr(torch_optimizer, name)(leaves, **hyper)


B = {"b1": 0.8, "b2": 0.9}
BETAS = (0.8, 0.9)

CASES = [
    Case(optim.amsgrad(RATE, **B), torch_class("Adam", lr=RATE, betas=BETAS, amsgrad=True)),
    Case(optim.adamax(RATE, **B), torch_class("Adamax", lr=RATE, betas=BETAS)),
    # The judge keeps its product of momenta in float32.
    Case(
        optim.nadam(RATE, **B, momentum_decay=0.1),
        torch_class("NAdam", lr=RATE, betas=BETAS, momentum_decay=0.1),
        1e-6,
    ),
    Case(optim.radam(RATE, **B), torch_class("RAdam", lr=RATE, betas=BETAS)),
    Case(optim.radam(RATE, b1=0.8, b2=0.99), torch_class("RAdam", lr=RATE, betas=(0.8, 0.99))),
    Case(optim.radam(RATE, **B), other_class("RAdam", lr=RATE, betas=BETAS), 1e-5),
    Case(
        optim.adabelief(RATE, **B, eps=1e-8),
        other_class("AdaBelief", lr=RATE, betas=BETAS, eps=1e-8, rectify=False, weight_decouple=False),
    ),
    Case(optim.adadelta(0.5, decay=0.8), torch_class("Adadelta", lr=0.5, rho=0.8)),
    Case(optim.rmsprop(RATE, decay=0.8), torch_class("RMSprop", lr=RATE, alpha=0.8)),
    Case(
        optim.rmsprop(RATE, decay=0.8, momentum=0.5, centered=True, eps=1e-3),
        torch_class("RMSprop", lr=RATE, alpha=0.8, momentum=0.5, centered=True, eps=1e-3),
    ),
    Case(
        optim.lars(RATE, 0.8, trust_coefficient=0.1, weight_decay=0.1),
        other_class("LARS", lr=RATE, momentum=0.8, trust_coefficient=0.1, weight_decay=0.1),
    ),
    Case(
        optim.lars(RATE, 0.8, nesterov=True, trust_coefficient=0.1, weight_decay=0.1),
        other_class("LARS", lr=RATE, momentum=0.8, nesterov=True, trust_coefficient=0.1, weight_decay=0.1),
    ),
    # The judge keeps its norms in float32.
    Case(
        optim.novograd(RATE, **B, weight_decay=0.1),
        other_class("NovoGrad", lr=RATE, betas=BETAS, weight_decay=0.1),
        1e-5,
    ),
    Case(optim.adafactor(0.5), torch_class("Adafactor", lr=0.5)),
    Case(
        optim.adafactor(0.5, 0.6, (1e-3, 0.1), 1.2, weight_decay=0.1),
        torch_class("Adafactor", lr=0.5, beta2_decay=-0.6, eps=(1e-3, 0.1), d=1.2, weight_decay=0.1),
    ),
    # Both iterate in bfloat16, by the same products.
    Case(
        optim.muon(RATE, weight_decay=0.1),
        torch_class("Muon", lr=RATE, weight_decay=0.1),
        1e-12,
        MATRICES,
    ),
    Case(
        optim.muon(RATE, 0.8, nesterov=False, match_rms=True, ns_steps=4, weight_decay=0.1),
        torch_class(
            "Muon", lr=RATE, weight_decay=0.1, momentum=0.8, nesterov=False, ns_steps=4,
            adjust_lr_fn="match_rms_adamw",
        ),
        1e-12,
        MATRICES,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_its_judge(case: Case) -> None:
    params, steps = problem(case.shapes)
    for (got, _), expected in zip(
        ours(case.tx, params, steps), judged(case.judge, params, steps), strict=True
    ):
        assert_near(got, expected, params, case.tolerance)


@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        (optim.amsgrad(RATE, b1=0.8, b2=0.9001), CASES[0]),
        (optim.scale(-RATE), CASES[1]),
        (optim.nadam(RATE, **B, momentum_decay=0.2), CASES[2]),
        (optim.adam(RATE, **B), CASES[3]),
        (optim.lars(RATE, 0.8, trust_coefficient=0.1, weight_decay=0.11), CASES[10]),
        (optim.adafactor(0.5, 0.81), CASES[13]),
        (optim.muon(RATE, weight_decay=0.1, nesterov=False), CASES[15]),
    ],
    ids=str,
)
def test_a_judge_finds_a_planted_bug(wrong: optim.GradientTransformation, case: Case) -> None:
    params, steps = problem(case.shapes)
    with pytest.raises(AssertionError, match="not close"):  # noqa: PT012
        for (got, _), expected in zip(
            ours(wrong, params, steps), judged(case.judge, params, steps), strict=True
        ):
            assert_near(got, expected, params, case.tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_average_is_that_of_torch(dtype: torch.dtype) -> None:
    params, steps = problem(dtype=dtype)
    leaves = torch.nn.ParameterList([leaf.clone() for leaf in params])
    judge = torch.optim.swa_utils.AveragedModel(
        leaves, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    judge.update_parameters(leaves)  # the first time, it copies
    inner = optim.sgd(RATE, 0.9)
    tx, alone = optim.ema(inner, 0.9), inner.init(params)
    state, now, expected = (
        tx.init(params),
        params,
        [leaf.to(torch.promote_types(dtype, torch.float32)) for leaf in params],
    )
    for grads in steps:
        params, alone = inner.step(grads, alone, params)  # type: ignore[misc]
        now, state = tx.step(grads, state, now)
        assert all(torch.equal(x, y) for x, y in zip(now, params, strict=True))
        for leaf, new in zip(leaves, now, strict=True):
            leaf.data = new
        judge.update_parameters(leaves)
        expected = [old.lerp(new.to(old.dtype), 0.1) for old, new in zip(expected, now, strict=True)]
    for x, y, theirs in zip(state.ema, expected, judge.module, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
        if dtype is torch.float64:
            torch.testing.assert_close(x, theirs.detach(), rtol=1e-12, atol=1e-12)


def test_lookahead_is_the_judges_from_its_second_step_on() -> None:
    """``torch_optimizer.Lookahead`` takes its slow parameters after the first step."""
    params, steps = problem()
    inner = optim.sgd(RATE, 0.8)
    tx = optim.lookahead(inner, sync_period=3, slow_step_size=0.3)
    expected = list(
        judged(
            lambda leaves: torch_optimizer.Lookahead(torch.optim.SGD(leaves, RATE, 0.8), k=3, alpha=0.3),
            params,
            steps,
        )
    )
    (first, inner_state), *_ = ours(inner, params, steps[:1])
    assert_near(first, expected[0], params, 1e-12)
    state, now = tx.init(first)._replace(inner_state=inner_state), first
    for grads, theirs in zip(steps[1:], expected[1:], strict=True):
        now, state = tx.step(grads, state, now)
        assert_near(now, theirs, params, 1e-12)


# -- papers -------------------------------------------------------------------------------------------------------


def test_lion_is_algorithm_2() -> None:
    params, steps = problem()
    got = [one for one, _ in ours(optim.lion(RATE, 0.8, 0.9, weight_decay=0.1), params, steps)]
    for i, p in enumerate(params):
        m = torch.zeros_like(p)
        for step, grads in enumerate(steps):
            g = grads[i]
            update = torch.sign(0.8 * m + 0.2 * g)
            p = p - RATE * (update + 0.1 * p)
            m = 0.9 * m + 0.1 * g
            assert_near([got[step][i]], [p], [params[i]], 1e-12)


@pytest.mark.parametrize("schedule", [0.05, optim.linear(0.0, 0.1, 8)], ids=["constant", "warm-up"])
def test_schedule_free_is_equations_3_to_5(schedule: Any) -> None:
    start, steps = problem()
    rate_of = schedule if callable(schedule) else lambda count: schedule
    tx = optim.schedule_free(optim.sgd(schedule), schedule, b1=0.8)
    x, z, total, largest = start, start, 0.0, 0.0
    for count, (grads, (y, state)) in enumerate(zip(steps, ours(tx, start, steps), strict=True)):
        rate = rate_of(count)
        z = [a - rate * g for a, g in zip(z, grads, strict=True)]
        largest = max(largest, rate)
        total += largest**2
        part = largest**2 / total if total else 0.0
        x = [(1 - part) * a + part * b for a, b in zip(x, z, strict=True)]
        if rate:
            # A schedule is evaluated in float32.
            tolerance = 1e-5 if callable(schedule) else 1e-12
            assert_near(y, [0.2 * a + 0.8 * b for a, b in zip(z, x, strict=True)], start, tolerance)
            assert_near(tx.eval_params(state, y), x, start, tolerance)


def test_schedule_free_averages_the_way_with_a_constant_rate() -> None:
    start, steps = problem()
    tx, z, way = optim.schedule_free(optim.sgd(RATE), b1=0.8), start, []
    for grads in steps:
        z = [a - RATE * g for a, g in zip(z, grads, strict=True)]
        way.append(z)
    *_, (y, state) = ours(tx, start, steps)
    mean = [torch.stack(leaf).mean(0) for leaf in zip(*way, strict=True)]
    assert_near(tx.eval_params(state, y), mean, start, 1e-12)


@pytest.mark.parametrize("adaptive", [False, True])
def test_sam_is_the_gradient_uphill(adaptive: bool) -> None:
    params = dict(zip("ab", problem()[0], strict=False))

    def loss(p: Any) -> Tensor:
        return (p["a"].sin().sum() + p["b"].square().sum() * p["a"].mean()).square()

    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    grads = dict(zip(leaves, torch.autograd.grad(loss(leaves), [*leaves.values()]), strict=True))
    weights = {
        name: leaf.detach().abs() if adaptive else torch.ones_like(leaf) for name, leaf in leaves.items()
    }
    size = math.sqrt(sum(float((weights[name] * grads[name]).square().sum()) for name in leaves))
    uphill = {
        name: (leaf + 0.1 * weights[name].square() * grads[name] / size).detach().requires_grad_()
        for name, leaf in leaves.items()
    }
    expected = dict(zip(leaves, torch.autograd.grad(loss(uphill), [*uphill.values()]), strict=True))
    value, got = optim.sam(fcg.value_and_grad(loss), 0.1, adaptive=adaptive)(params)
    torch.testing.assert_close(value, loss(params), rtol=1e-14, atol=0)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert not any(torch.allclose(got[name], grads[name], rtol=1e-3) for name in got)


def test_clip_by_value_is_torchs() -> None:
    grads, _ = problem()
    leaves = [torch.zeros_like(leaf, requires_grad=True) for leaf in grads]
    for leaf, grad in zip(leaves, grads, strict=True):
        leaf.grad = grad.clone()
    torch.nn.utils.clip_grad_value_(leaves, 0.3)
    got, _ = optim.clip_by_value(0.3).update(grads, ())
    assert all(torch.equal(x, leaf.grad) for x, leaf in zip(got, leaves, strict=True))


def test_clip_by_norm_is_torchs_for_each_leaf() -> None:
    grads = [*problem()[0], torch.zeros(2, dtype=torch.float64), torch.full((3,), 0.01, dtype=torch.float64)]
    got, _ = optim.clip_by_norm(0.3).update(grads, ())
    for x, grad in zip(got, grads, strict=True):
        leaf = torch.zeros_like(grad, requires_grad=True)
        leaf.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_([leaf], 0.3)
        # torch divides by the norm plus 1e-6
        torch.testing.assert_close(x, leaf.grad, rtol=1e-5, atol=0)


def test_adaptive_clip_is_equation_3_for_each_row() -> None:
    params, (grads, *_) = problem(((4, 3), (2, 3, 2), (5,)))
    got, _ = optim.adaptive_clip(0.5, eps=0.1).update(grads, (), params)
    rows = 0
    for x, g, p in zip(got, grads, params, strict=True):
        units = zip(x, g, p, strict=True) if g.dim() > 1 else [(x, g, p)]
        for unit, grad, weight in units:
            limit = 0.5 * max(float(weight.norm()), 0.1)
            expected = grad * limit / grad.norm() if grad.norm() > limit else grad
            torch.testing.assert_close(unit, expected, rtol=1e-12, atol=0)
            rows += bool(grad.norm() > limit)
    assert 0 < rows < 7, "some rows are clipped, some are not"


def test_centralized_rows_have_no_mean() -> None:
    grads, _ = problem(((4, 3), (2, 3, 2), (5,)))
    got, _ = optim.centralize().update(grads, ())
    for x, g in zip(got[:2], grads, strict=False):
        torch.testing.assert_close(
            x.flatten(1).mean(1), torch.zeros(len(x), dtype=x.dtype), rtol=0, atol=1e-15
        )
        torch.testing.assert_close(
            (x - g).flatten(1).std(1), torch.zeros(len(x), dtype=x.dtype), rtol=0, atol=1e-15
        )
    assert got[2] is grads[2]


def test_frozen_leaves_stay_and_the_others_move() -> None:
    params = dict(zip("ab", problem()[0], strict=False))
    tx = optim.chain(optim.adamw(RATE, weight_decay=0.1), optim.freeze({"a": True, "b": False}))
    (got, _), *_ = ours(tx, params, [params])
    assert torch.equal(got["a"], params["a"])
    assert not torch.equal(got["b"], params["b"])


def test_muon_orthogonalizes() -> None:
    """In float64, and against the singular value decomposition: the iteration ends between 0.7 and 1.2."""
    grads = {"w": problem(((6, 4),))[0][0]}
    link = optim.scale_by_muon(ns_dtype=torch.float64, nesterov=False)
    u, s, v = torch.linalg.svd(grads["w"], full_matrices=False)
    assert s.max() / s.min() > 1.5, "far from orthogonal"
    out = link.update(grads, link.init(grads))[0]["w"] / math.sqrt(6 / 4)
    inner = u.T @ out @ v.T
    assert (inner - torch.diag(inner.diag())).abs().max() < 1e-10, "the same singular vectors"
    assert ((inner.diag() > 0.65) & (inner.diag() < 1.25)).all()


def test_muon_gives_each_leaf_to_its_label() -> None:
    params = dict(zip("abc", problem((*MATRICES[:2], (5,)))[0], strict=True))
    labels = {"a": "adamw", "b": "muon", "c": "adamw"}
    tx = optim.muon(RATE, weight_decay=0.1, adamw_learning_rate=0.01, labels=labels)
    adamw = optim.adamw(0.01, weight_decay=0.1)
    (got, _), *_ = ours(tx, params, [params])
    (alone, _), *_ = ours(adamw, params, [params])
    assert [torch.equal(got[name], alone[name]) for name in "abc"] == [True, False, True]


# -- captured -----------------------------------------------------------------------------------------------------

SCHEDULE = optim.warmup_cosine(0.05, 3, 20)

CAPTURED = [
    *{repr(case.tx): case.tx for case in CASES}.values(),
    optim.sgd(SCHEDULE, 0.9),
    optim.adam(SCHEDULE),
    optim.adamw(SCHEDULE, weight_decay=0.1),
    optim.adagrad(SCHEDULE),
    optim.lamb(SCHEDULE, weight_decay=0.1),
    optim.yogi(SCHEDULE),
    optim.nadam(SCHEDULE),
    optim.radam(SCHEDULE, b2=0.9),
    optim.adafactor(SCHEDULE, weight_decay=0.1),
    optim.muon(SCHEDULE, weight_decay=0.1),
    optim.lion(SCHEDULE, weight_decay=0.1),
    optim.lookahead(optim.adamw(SCHEDULE, weight_decay=0.1), sync_period=3),
    optim.ema(optim.adam(SCHEDULE), 0.9),
    optim.schedule_free(optim.sgd(SCHEDULE), SCHEDULE),
    optim.stochastic_rounding(optim.adamw(SCHEDULE, weight_decay=0.1), key=3),
    optim.chain(optim.clip_by_value(0.5), optim.adam(RATE)),
    optim.chain(optim.clip_by_norm(0.1), optim.sgd(RATE)),
    optim.chain(optim.adaptive_clip(0.01), optim.sgd(RATE)),
    optim.chain(optim.centralize(), optim.trace(0.9), optim.scale(-RATE)),
    optim.chain(optim.adam(RATE), optim.freeze({"w": False, "b": True})),
    optim.inject_hyperparams(optim.lion)(learning_rate=0.05, b1=0.9, weight_decay=0.1),
    optim.inject_hyperparams(optim.lars)(learning_rate=0.05, momentum=0.9, weight_decay=0.1),
    optim.inject_hyperparams(partial(optim.muon, weight_decay=0.1))(learning_rate=0.05, momentum=0.9),
    optim.inject_hyperparams(partial(optim.adafactor))(learning_rate=0.05, decay_rate=0.8),
    optim.inject_hyperparams(optim.radam, ("b2",))(learning_rate=0.05, b1=0.9, b2=0.9, eps=1e-8),
]


def loss_of(params: Any, batch: Tensor) -> Tensor:
    return ((batch @ params["w"]).tanh() + params["b"] - 1).square().mean()


def step_of(state: Any, batch: Tensor) -> Any:
    loss, grads = fcg.value_and_grad(loss_of)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


def sharp_step_of(state: Any, batch: Tensor) -> Any:
    loss, grads = optim.sam(fcg.value_and_grad(loss_of), 0.1)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


def assert_captured(tx: optim.GradientTransformation, function: Any = step_of) -> None:
    """Calls with new data: the captured step and the eager one have the same bits, and move."""
    generator = torch.Generator().manual_seed(2)
    params = {"w": torch.randn(5, 4, generator=generator), "b": torch.randn(4, generator=generator)}
    captured = fcg.TrainState.create(params=params, optimizer=tx)
    eager, step = fcg.fork(captured), fcg.graph_step(function, lowering="aten")
    for call in range(CALLS):
        batch = torch.randn(6, 5, generator=generator)
        eager, expected = step.eager(eager, batch)
        captured, metrics = step(captured, batch)
        for x, y in zip(tree.leaves((captured, metrics)), tree.leaves((eager, expected)), strict=True):
            assert torch.equal(x, y), call
            assert not x.isnan().any(), call
    assert step.stats.captures == 1
    assert not torch.equal(captured.params["w"], params["w"])


@pytest.mark.parametrize("tx", CAPTURED, ids=repr)
def test_captured_equals_eager(tx: optim.GradientTransformation) -> None:
    assert_captured(tx)


def test_captured_sharpness_aware_step_equals_eager() -> None:
    assert_captured(optim.sgd(RATE), sharp_step_of)


# -- mistakes -----------------------------------------------------------------------------------------------------

# What numbers without a default may be, of any optimizer and link.
GOOD = {
    "learning_rate": 0.1, "weight_decay": 0.1, "max_norm": 1.0, "max_delta": 1.0, "threshold": 1.0, "clipping": 0.1,
    "decay": 0.9, "eta": 0.1, "gamma": 0.5, "inner": optim.sgd(0.1), "key": 0,
    "loss_fn": lambda p: p.sum(), "rho": 0.1,
}  # fmt: skip
SIGNED = {"scale": {"step_size"}}  # a negative one descends


def numbers_of(make: Any) -> list[str]:
    """The arguments that take a number, or a tensor in its place."""
    parameters = inspect.signature(make).parameters.values()
    return [
        p.name for p in parameters if re.match(r"(Scalar|ScalarOrSchedule)( \| None)?$", str(p.annotation))
    ]


def makers() -> list[tuple[str, str]]:
    """All optimizers and links, with each of their numbers."""
    made = {name: getattr(optim, name) for name in exports(optim)}
    kinds = {
        n: m for n, m in made.items() if isinstance(m, type) and issubclass(m, optim.GradientTransformation)
    }
    return [(name, number) for name, make in kinds.items() for number in numbers_of(make)]


@pytest.mark.parametrize("wrong", [-1.0, math.nan, "0.1"])
@pytest.mark.parametrize(("name", "number"), makers())
def test_each_number_of_each_link_is_checked(name: str, number: str, wrong: Any) -> None:
    make = getattr(optim, name)
    required = [p.name for p in inspect.signature(make).parameters.values() if p.default is p.empty]
    rest = {key: GOOD[key] for key in required if key != number}
    make(**rest, **{number: torch.tensor(0.5)})
    if wrong == -1.0 and number in SIGNED.get(name, ()):
        return
    # It may go by another name in the link that checks it: a momentum is the decay of a trace.
    with pytest.raises((ValueError, TypeError), match=r"must be (positive|at least|in \[|a number)"):
        make(**rest, **{number: wrong})


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: optim.nadam(-0.1), "nadam: learning_rate must be at least 0"),
        (lambda: optim.radam(0.1, b1=1.0), r"radam: b1 must be in \[0, 1\)"),
        (lambda: optim.nadam(0.1, momentum_decay=-1.0), "momentum_decay must be at least 0"),
        (lambda: optim.rmsprop(0.1, decay=1.0), r"rmsprop: decay must be in \[0, 1\)"),
        (lambda: optim.adadelta(decay=2.0), "adadelta: decay must be in"),
        (lambda: optim.lion(0.1, weight_decay=-1.0), "lion: weight_decay must be at least"),
        (lambda: optim.lars(0.1, weight_decay=-1.0), "lars: weight_decay must be at least 0"),
        (lambda: optim.novograd(0.1, b2=1.0), "novograd: b2 must be in"),
        (lambda: optim.adafactor(0.1, eps=(1.0,)), "adafactor: eps is a pair"),
        (lambda: optim.adafactor(0.1, eps=1e-8), "adafactor: eps is a pair, got 1e-08"),
        (lambda: optim.clip_by_rms(0.0), "clip_by_rms: threshold must be positive"),
        (lambda: optim.clip_by_value(0.0), "clip_by_value: max_delta must be positive"),
        (lambda: optim.clip_by_norm(-1.0), "clip_by_norm: max_norm must be positive"),
        (lambda: optim.adaptive_clip(0.0), "adaptive_clip: clipping must be positive"),
        (lambda: optim.scale_by_muon(ns_coefficients=(1.0, 2.0)), "ns_coefficients are three numbers"),
        (lambda: optim.lookahead(optim.sgd(0.1), sync_period=0), "sync_period must be a positive int, got 0"),
        (lambda: optim.lookahead(optim.sgd(0.1), slow_step_size=1.1), "slow_step_size must be in"),
        (lambda: optim.lookahead(optim.scale_by_adam()), "lookahead: .* makes no steps"),
        (lambda: optim.schedule_free(optim.trace(0.9)), "schedule_free: .* makes no steps"),
        (lambda: optim.schedule_free(optim.sgd(0.1), b1=0.0), "schedule_free: b1 is 0"),
        (lambda: optim.sam(loss_of, -1.0), "sam: rho must be at least 0"),
    ],
)  # fmt: skip
def test_arguments_are_checked(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


NEW = (
    "scale_by_amsgrad scale_by_adamax scale_by_nadam scale_by_radam scale_by_belief amsgrad adamax nadam radam "
    "adabelief scale_by_rms rmsprop scale_by_adadelta adadelta scale_by_lion lion scale_by_lars lars "
    "scale_by_novograd novograd scale_by_factored_rms adafactor clip_by_rms scale_by_param_rms scale_by_muon muon "
    "clip_by_value clip_by_norm adaptive_clip centralize add_noise freeze lookahead ema schedule_free "
    "stochastic_rounding"
).split()


@pytest.mark.parametrize("name", NEW)
def test_a_docstring_says_where_it_is_from_what_it_takes_and_what_it_keeps(name: str) -> None:
    cls: Any = getattr(optim, name)
    text = cls.__doc__
    assert "Source:" in text
    assert "Example:" in text
    assert "``" in text.partition("Source:")[0], "its formula"
    for one in dataclasses.fields(cls):
        assert f"\n      {one.name}: " in text, one.name
    if dataclasses.fields(cls):
        assert "Raises:" in text
    if tree.leaves(cls(**ARGUMENTS.get(name, {})).init({"w": torch.zeros(2, 2)})):
        assert "State:" in text


ARGUMENTS: dict[str, dict[str, Any]] = {
    **{name: {"learning_rate": 0.1} for name in ("amsgrad", "adamax", "nadam", "radam", "adabelief")},
    **{name: {"learning_rate": 0.1} for name in ("rmsprop", "novograd")},
    **{name: {"learning_rate": 0.1, "weight_decay": 0.1} for name in ("lion", "lars", "muon")},
    **{name: {"inner": optim.sgd(0.1)} for name in ("lookahead", "ema", "schedule_free")},
    "scale_by_lars": {"weight_decay": 0.1}, "clip_by_rms": {"threshold": 1.0}, "clip_by_value": {"max_delta": 1.0},
    "clip_by_norm": {"max_norm": 1.0}, "adaptive_clip": {"clipping": 0.1}, "freeze": {"mask": True},
    "add_noise": {"eta": 1.0, "gamma": 0.55, "key": 0}, "stochastic_rounding": {"inner": optim.sgd(0.1), "key": 0},
}  # fmt: skip


def test_a_link_has_the_defaults_of_its_optimizer() -> None:
    others = {"belief": "adabelief", "rms": "rmsprop", "rss": "adagrad"}

    def defaults(make: Any) -> dict[str, Any]:
        return {
            one.name: one.default
            for one in inspect.signature(make).parameters.values()
            if one.default is not one.empty
        }

    found = 0
    for name in vars(optim):
        rule = name.removeprefix("scale_by_")
        optimizer = getattr(optim, others.get(rule, rule), None)
        if rule != name and optimizer is not None and rule not in ("learning_rate", "schedule"):
            link, whole = defaults(getattr(optim, name)), defaults(optimizer)
            shared = link.keys() & whole.keys()
            assert {one: link[one] for one in shared} == {one: whole[one] for one in shared}, name
            found += len(shared)
    assert found > 30


def test_every_optimizer_is_captured_above() -> None:
    classes = {
        name: value
        for name, value in vars(optim).items()
        if isinstance(value, type)
        and issubclass(value, optim.GradientTransformation)
        and name in exports(optim)
    }
    steppers = {name for name, value in classes.items() if issubclass(value, Optimizer)}
    assert len(steppers) >= 20
    assert steppers <= {word for tx in CAPTURED for word in re.findall(r"\w+", repr(tx))}


def test_muon_names_the_leaves_that_are_no_matrices() -> None:
    with pytest.raises(LayoutError, match=r"takes matrices(.|\n)*params\['b'\]  got \[3\](.|\n)*optim.muon"):
        optim.scale_by_muon().init({"w": torch.zeros(2, 2), "b": torch.zeros(3)})


def test_flatten_refuses_what_acts_leaf_by_leaf() -> None:
    for tx in (
        optim.lars(0.1, weight_decay=0.1), optim.novograd(0.1), optim.adafactor(0.1), optim.muon(0.1, weight_decay=0.1),
        optim.clip_by_norm(1.0), optim.adaptive_clip(0.1), optim.centralize(),
        optim.add_noise(1.0, 0.5, key=0), optim.stochastic_rounding(optim.sgd(0.1), key=0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="takes a norm per leaf"):
            optim.flatten(tx)


# Where eps bounds a size from below, the step has a length of its own, or momentum comes after the division.
EPS_ELSEWHERE = {"adadelta", "scale_by_adadelta", "adaptive_clip", "lamb", "lars", "novograd"}


def with_eps() -> list[str]:
    return sorted({name for name, number in makers() if number == "eps"} - EPS_ELSEWHERE)


@pytest.mark.parametrize("name", with_eps())
def test_a_large_eps_makes_steps_small_and_turns_none(name: str) -> None:
    """``eps`` is added to a size that divides: the larger, the smaller the step, in the same direction."""
    make = getattr(optim, name)
    required = [p.name for p in inspect.signature(make).parameters.values() if p.default is p.empty]
    rest = {key: 0.0 if key == "weight_decay" else GOOD[key] for key in required}
    params = {"w": torch.tensor([[0.3, -0.2], [0.7, 0.1]]), "b": torch.tensor([0.5, -0.4])}
    grads = [tree.map(lambda p, k=k: (p * 3 + k).cos(), params) for k in range(12)]

    def updates(eps: float) -> list[Any]:
        tx, found = make(**rest, eps=eps), []
        state = tx.init(params)
        for grad in grads:
            out, state = tx.update(grad, state, params)
            found += tree.leaves(out)
        return found

    small, large = (torch.cat([leaf.flatten() for leaf in updates(eps)]) for eps in (1e-8, 10.0))
    assert bool((large.abs() <= small.abs() * 1.0001).all())
    assert bool((large * small >= 0).all())
    assert bool((large.abs() < small.abs() / 2).any())


def _given_by_name() -> list[tuple[str, str, Any]]:
    """List what numbers alone make, with each of its fields that holds a number or several."""
    found = []
    for name in sorted(exports(optim)):
        cls = getattr(optim, name)
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            continue
        fields = [one for one in dataclasses.fields(cls) if one.init]
        needed = {
            one.name: 8.0 - number
            for number, one in enumerate(fields)
            if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        }
        try:
            made = cls(**{key: value / 10 for key, value in needed.items()})
        except (TypeError, ValueError):  # of other things than small numbers
            continue
        held = ((one.name, getattr(made, one.name)) for one in fields)
        found += [
            (name, key, made)
            for key, value in held
            if isinstance(value, (int, float, tuple)) and not isinstance(value, bool)
        ]
    return found


@pytest.mark.parametrize(
    ("name", "field", "made"), _given_by_name(), ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_word_in_place_of_a_number_is_refused_by_name(name: str, field: str, made: Any) -> None:
    if (name, field) in {
        ("freeze", "mask"),
        ("inject_hyperparams", "factory"),
        ("inject_hyperparams", "static_args"),
        ("scale_by_schedule", "schedule"),
    }:
        pytest.skip("takes anything but numbers")
    with pytest.raises((TypeError, ValueError), match=f"^{name}: (.*: )?{field}"):
        dataclasses.replace(made, **{field: "a word"})
