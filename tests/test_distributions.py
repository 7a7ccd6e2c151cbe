"""Further distributions follow their distribution functions, and their gradients move the mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import random

N = 100_000
F64 = torch.float64


def deviation(probabilities: Tensor) -> float:
    """Kolmogorov's statistic of numbers that should be uniform: above 1.95 once in a thousand times."""
    ordered = probabilities.sort().values
    steps = torch.arange(1, len(ordered) + 1, dtype=F64) / len(ordered)
    return float((ordered - steps).abs().max()) * len(ordered) ** 0.5


@pytest.mark.parametrize("rate", [1e-3, 1.0, 40.0])
def test_exponential(rate: float) -> None:
    draws = random.exponential(random.key(1), (N,), rate=rate, dtype=F64)
    assert deviation(-torch.expm1(-rate * draws)) < 1.95


def test_exponential_numbers_are_never_zero() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert bool((random.exponential(random.key(1), (N,), rate=1e6, dtype=dtype) > 0).all())


@pytest.mark.parametrize(
    ("low", "high"),
    [(-2.0, 2.0), (0.5, 0.6), (3.0, math.inf), (-math.inf, -6.0), (20.0, 21.0), (-math.inf, math.inf)],
)
def test_truncated_normal(low: float, high: float) -> None:
    draws = random.truncated_normal(random.key(2), (N,), low, high, dtype=F64)
    assert bool(((draws >= low) & (draws <= high)).all())
    # In the lower tail: there, a probability has all its digits.
    sign = -1.0 if low > 0 else 1.0
    bounds = torch.stack([torch.full_like(draws, low), draws, torch.full_like(draws, high)])
    at = torch.erfc(bounds * (-sign / 2**0.5))
    assert deviation((at[1] - at[0]) / (at[2] - at[0])) < 1.95
    rounded = random.truncated_normal(random.key(2), (N,), low, high, dtype=torch.bfloat16)
    assert bool(
        ((rounded >= torch.tensor(low).bfloat16()) & (rounded <= torch.tensor(high).bfloat16())).all()
    )


@pytest.mark.parametrize("concentration", [0.01, 0.3, 0.999, 1.0, 2.5, 50.0, 1e5])
def test_gamma(concentration: float) -> None:
    alpha = torch.tensor(concentration, dtype=F64)
    draws = random.gamma(random.key(3), concentration, (N,), dtype=F64)
    assert deviation(torch.special.gammainc(alpha, draws)) < 1.95
    assert torch.equal(draws, random.gamma(random.key(3), alpha, (N,), dtype=F64))


@pytest.mark.parametrize("concentration", [0.01, 0.3, 1.0, 2.5, 50.0])
def test_gamma_moves_with_its_concentration(concentration: float) -> None:
    """The mean is the concentration, the mean of the logarithm is its digamma: so are their derivatives."""
    alpha = torch.full((N,), concentration, dtype=F64)

    def moved(function: Any) -> Tensor:
        slopes: Tensor = fcg.grad(lambda a: function(random.gamma(random.key(4), a, (N,), dtype=F64)).sum())(
            alpha
        )
        tangent = torch.func.jvp(
            lambda a: function(random.gamma(random.key(4), a, (N,), dtype=F64)),
            (alpha,),
            (torch.ones_like(alpha),),
        )
        torch.testing.assert_close(slopes, tangent[1])
        return slopes

    slopes = moved(lambda x: x)
    assert abs(float(slopes.mean()) - 1) < 5 * float(slopes.std()) / N**0.5
    if concentration > 0.1:  # below, numbers underflow
        slopes = moved(torch.log)
        expected = float(torch.special.polygamma(1, torch.tensor(concentration, dtype=F64)))
        assert abs(float(slopes.mean()) - expected) < 5 * float(slopes.std()) / N**0.5


def test_gamma_of_what_is_no_concentration_is_nan() -> None:
    alpha = torch.tensor([-1.0, 0.0, math.nan, 1.0])
    assert random.gamma(random.key(0), alpha, (4,)).isnan().tolist() == [True, True, True, False]
    tiny = random.gamma(random.key(0), torch.full((N,), 1e-4), (N,))
    assert bool((tiny > 0).all())


@pytest.mark.parametrize("a", [0.02, 0.5, 1.0, 7.0])
def test_beta(a: float) -> None:
    """With ``b = 1`` the distribution function is a power; with a and b swapped, the draws are mirrored."""
    draws = random.beta(random.key(5), a, 1.0, (N,), dtype=F64)
    assert deviation(draws**a) < 1.95
    mirrored = random.beta(random.key(6), 1.0, a, (N,), dtype=F64)
    if a > 0.1:  # below, most are 1 to the last bit
        assert deviation((1 - mirrored) ** a) < 1.95


def test_dirichlet_shares_are_beta() -> None:
    alpha = torch.tensor([0.5, 1.0, 3.0], dtype=F64)
    draws = random.dirichlet(random.key(7), alpha, (N, 3), dtype=F64)
    torch.testing.assert_close(draws.sum(-1), torch.ones(N, dtype=F64))
    error = draws.std(0) / N**0.5
    assert bool(((draws.mean(0) - alpha / alpha.sum()).abs() < 5 * error).all())
    one = random.dirichlet(random.key(8), torch.ones(2, dtype=F64), (N, 2), dtype=F64)[:, 0]
    assert deviation(one) < 1.95


def test_dirichlet_of_few_and_many() -> None:
    """Numbers far below the smallest float are shares still, and sum to 1."""
    draws = random.dirichlet(random.key(7), torch.full((4,), 1e-4), (1000, 4))
    assert bool(draws.isfinite().all())
    torch.testing.assert_close(draws.sum(-1), torch.ones(1000))
    assert float(draws.max(-1).values.mean()) > 0.99


@pytest.mark.parametrize("rate", [1e-6, 0.3, 4.0, 9.9, 37.0, 1e3, 1e7, 1e12])
def test_poisson(rate: float) -> None:
    draws = random.poisson(random.key(9), rate, (N,))
    assert draws.dtype == torch.int64
    assert bool((draws >= 0).all())
    counts = draws.double()
    assert abs(float(counts.mean()) - rate) < 5 * (rate / N) ** 0.5
    if rate > 0.1:
        assert abs(float(counts.var()) / rate - 1) < 0.03
    assert torch.equal(draws, random.poisson(random.key(9), torch.tensor(rate, dtype=F64), (N,)))


@pytest.mark.parametrize("rate", [0.3, 4.0, 37.0])
def test_poisson_counts_are_as_likely_as_they_should_be(rate: float) -> None:
    draws = random.poisson(random.key(10), rate, (N,))
    most = int(rate + 4 * rate**0.5) + 2
    k = torch.arange(most, dtype=F64)
    likely = (k * math.log(rate) - rate - torch.lgamma(k + 1)).exp()
    chosen = likely * N > 5
    observed = torch.bincount(draws, minlength=most)[:most][chosen].double()
    statistic = ((observed - likely[chosen] * N) ** 2 / (likely[chosen] * N)).sum()
    freedom = int(chosen.sum())
    assert abs(float(statistic) - freedom) < 5 * (2 * freedom) ** 0.5


def test_poisson_of_what_is_no_rate() -> None:
    assert random.poisson(random.key(0), torch.tensor([-1.0, math.nan, 0.0]), (3,)).tolist() == [-1, -1, 0]


def test_they_are_new_at_every_replay() -> None:
    """Numbers and their gradients, drawn in a step, are those that eager code draws from the same key."""

    def losses(params: Any, key: Tensor) -> Tensor:
        return (
            random.gamma(key, params["a"].exp(), (8,), stream=1).sum()
            + (random.beta(key, params["a"].exp(), 2.0, (8,), stream=2) * 3).sum()
            + (random.dirichlet(key, params["a"].exp(), (4, 8), stream=3) ** 2).sum()
            + random.poisson(key, params["a"].detach().exp(), (8,), stream=4).sum()
            + random.exponential(key, (8,), stream=5).sum()
            + random.truncated_normal(key, (8,), 0.0, 1.0, stream=6).sum()
        )

    def train_step(state: Any, key: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(losses)(state.params, key)
        return state.apply_gradients(grads), {"loss": loss}

    start = {"a": torch.linspace(-2, 2, 8)}
    state = fcg.TrainState.create(params=start, optimizer=fcg.optim.sgd(1e-2))
    eager, placed = state, fcg.place(state)
    step = fcg.graph_step(train_step, lowering="aten")
    for number in range(16):
        eager, expected = train_step(eager, random.key(number))
        placed, metrics = step(placed, random.key(number))
        assert torch.equal(metrics["loss"], expected["loss"])
        assert torch.equal(placed.params["a"], eager.params["a"])
    assert step.stats.captures == 1
