"""``torch.distributions`` with validation on, as they are: eager runs validate, traces take what is given as valid."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as td

import functional_cg as fcg
from tests.shares import CALLS

X = torch.linspace(0.2, 1.4, 12).view(4, 3)
# Each from a positive tensor [4, 3]; two of a kind have a divergence.
MADE: dict[str, Callable[[Tensor], td.Distribution]] = {
    "normal": lambda x: td.Normal(x, x + 1),
    "log normal": lambda x: td.LogNormal(x, x + 1),
    "half normal": td.HalfNormal,
    "laplace": lambda x: td.Laplace(x, x),
    "cauchy": lambda x: td.Cauchy(x, x),
    "gumbel": lambda x: td.Gumbel(x, x),
    "student": lambda x: td.StudentT(x + 1, x, x),
    "uniform": lambda x: td.Uniform(-x, x),
    "exponential": td.Exponential,
    "gamma": lambda x: td.Gamma(x, x + 1),
    "beta": lambda x: td.Beta(x, x + 1),
    "dirichlet": td.Dirichlet,
    "chi2": td.Chi2,
    "poisson": td.Poisson,
    "bernoulli": lambda x: td.Bernoulli(logits=x),
    "bernoulli by p": lambda x: td.Bernoulli(x / 2),
    "geometric": lambda x: td.Geometric(x / 2),
    "categorical": lambda x: td.Categorical(logits=x),
    "categorical by p": td.Categorical,
    "one-hot": lambda x: td.OneHotCategorical(logits=x),
    "relaxed": lambda x: td.RelaxedOneHotCategorical(torch.tensor(0.7), logits=x),
    "independent": lambda x: td.Independent(td.Normal(x, x), 1),
    "multivariate": lambda x: td.MultivariateNormal(x, x.mT @ x + torch.eye(3)),
    "transformed": lambda x: td.TransformedDistribution(td.Normal(x, x), [td.TanhTransform(cache_size=1)]),
    "mixture": lambda x: td.MixtureSameFamily(td.Categorical(logits=x), td.Normal(x, x)),
    "pareto": lambda x: td.Pareto(x, x + 1),
    "weibull": lambda x: td.Weibull(x, x + 1),
    "kumaraswamy": lambda x: td.Kumaraswamy(x, x + 1),
    "von mises": lambda x: td.VonMises(x, x),
    "negative binomial": lambda x: td.NegativeBinomial(x + 1, x / 2),
    "low rank": lambda x: td.LowRankMultivariateNormal(x, x[..., None], x + 1),
    "continuous bernoulli": lambda x: td.ContinuousBernoulli(x / 2),
}
UNDRAWN = {
    "von mises",
    "negative binomial",
}  # in a loop until all are accepted; by a rate that is drawn itself
NO_ENTROPY = {"poisson", "transformed", "mixture", "relaxed", "von mises", "negative binomial"}
BY_TRANSFORMS = {
    "weibull",
    "kumaraswamy",
    "transformed",
}  # a divergence asks whether the transforms are equal


def results(name: str, of: Callable[[Tensor], td.Distribution]) -> Callable[..., Any]:
    """All that a distribution offers, as a function of a key and parameters."""

    def compute(key: Tensor, x: Tensor) -> Any:
        one, other = of(x), of(x + 0.1)
        found: dict[str, Any] = {}
        if name in UNDRAWN:
            return {"log_prob": one.log_prob(x.round())}
        sample = fcg.random.keyed(one.sample)(key)
        found |= {"sample": sample, "log_prob": one.log_prob(sample)}
        if one.has_rsample:
            found["gradient"] = fcg.grad(lambda x: fcg.random.keyed(of(x).rsample)(key).sum())(x)
        if name not in NO_ENTROPY:
            found["entropy"] = one.entropy()
        if name not in BY_TRANSFORMS:
            with contextlib.suppress(NotImplementedError):
                found["divergence"] = td.kl_divergence(one, other)
        return found

    return compute


@pytest.fixture(autouse=True)
def validation() -> Iterator[None]:
    """Some versions of torch turn it off for good once their compiler is imported."""
    before = td.Distribution._validate_args
    td.Distribution.set_default_validate_args(True)
    yield
    td.Distribution.set_default_validate_args(before)


@pytest.mark.parametrize("name", MADE)
def test_samples_densities_entropies_and_divergences(name: str) -> None:
    compute = results(name, MADE[name])
    step = fcg.graph_fn(compute)
    for call in range(CALLS):
        key, x = fcg.random.key(call), X.roll(call, 0) + 0.01 * call
        expected, got = compute(key, x), step(key, x)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert step.stats.replays == CALLS


def test_an_eager_run_validates() -> None:
    def log_prob(x: Tensor) -> Tensor:
        return td.Normal(x, x, validate_args=True).log_prob(x)

    step = fcg.graph_fn(log_prob)
    step(X)
    with pytest.raises(ValueError, match="Expected parameter scale"):
        step.eager(-X)


def test_what_a_trace_knows_is_validated() -> None:
    def log_prob(x: Tensor) -> Tensor:
        return td.Normal(torch.zeros(3), torch.tensor([1.0, -1.0, 1.0]), validate_args=True).log_prob(x)

    step = fcg.graph_fn(log_prob)
    with pytest.raises(fcg.CaptureError, match=r"raised ValueError(.|\n)*Expected parameter scale"):
        step(X)


def test_questions_of_the_users_own_are_no_validation() -> None:
    def asks(x: Tensor) -> Tensor:
        return x * 2 if td.constraints.positive.check(x).all() else x

    with pytest.raises(fcg.HostSyncError, match="test_torch_distributions"):
        fcg.graph_fn(asks)(X)
