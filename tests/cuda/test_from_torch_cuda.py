"""Optimizer classes of torch and torch_optimizer on the GPU: captured equals eager, and equals the class itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import functional_cg as fcg
from functional_cg import optim, tree
from tests.cuda.helpers_cuda import DEVICE, marks
from tests.cuda.test_agreement import agree
from tests.test_from_torch import CASES, Case, MatricesAlone
from tests.test_optimizers import MATRICES, STEPS, assert_near, judged, problem, step_of

pytestmark = marks
ALL = pytest.mark.parametrize("case", CASES, ids=str)


def tolerance_of(case: Case) -> float:
    """How far apart the two may end, in parts of the way of a leaf, in float64.

    On a GPU a class takes its kernels for lists of leaves, which round other products than ours with their counts on
    the device: 1e-9 for 20 steps of a few roundings each, some of them divided by small roots. Muon rounds to
    bfloat16 in between: one number that falls to the other side is 2^-8 of itself away.
    """
    return 2e-2 if case.name == "Muon" else max(1e-9, case.tolerance)


@ALL
def test_captured_adapted_equals_eager(case: Case) -> None:
    tx: Any = optim.from_torch(case.cls, **case.hyper)
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(6, 5, generator=generator) for _ in range(STEPS)]
    params = {"w": torch.randn(5, 4, generator=generator), "b": torch.randn(4, generator=generator)}
    state = fcg.TrainState.create(
        params=tree.map(lambda leaf: leaf.to(DEVICE), params),
        optimizer=MatricesAlone(tx) if case.shapes is MATRICES else tx,
    )
    agree(step_of, state, lambda call: batches[call].to(DEVICE), STEPS)


def end_of(case: Case, hyper: Any) -> tuple[Any, Any, Any]:
    """Parameters before, where the adapted class ends, and where the class itself does with arguments of its own."""
    params, steps = (tree.map(lambda leaf: leaf.to(DEVICE), one) for one in problem(case.shapes))
    tx = optim.from_torch(case.cls, **case.hyper)
    state, now, expected = tx.init(params), params, params
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the class, on its own style
        for grads, expected in zip(steps, judged(lambda p: case.cls(p, **hyper), params, steps), strict=True):  # noqa: B007
            now, state = tx.step(grads, state, now)
    return params, now, expected


@ALL
def test_adapted_ends_where_the_class_does(case: Case) -> None:
    params, now, expected = end_of(case, case.hyper)
    assert_near(now, expected, params, tolerance_of(case))


def test_another_learning_rate_is_found() -> None:
    case = next(case for case in CASES if case.name == "RMSprop")
    params, now, expected = end_of(case, {**case.hyper, "lr": case.hyper["lr"] * (1 + 1e-6)})
    with pytest.raises(AssertionError, match="not close"):
        assert_near(now, expected, params, tolerance_of(case))
