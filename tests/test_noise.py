"""Gradient noise: the paper's variance, independent draws, and the same bits when captured."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim
from tests.test_optimizers import RATE, assert_captured

ETA, GAMMA = 0.3, 0.55
SIZE = 40_000
UPDATES = 5


def draws(tx: optim.GradientTransformation) -> list[dict[str, Tensor]]:
    """What is added to gradients, at each update and leaf."""
    grads = {"a": torch.full((SIZE,), 2.0, dtype=torch.float64), "b": torch.zeros(4, SIZE // 4)}
    state, out = tx.init(grads), []
    for _ in range(UPDATES):
        updates, state = tx.update(grads, state)
        out.append({name: (updates[name] - grads[name]).flatten().double() for name in grads})
    return out


def variances_are(tx: optim.GradientTransformation, expected: list[float]) -> bool:
    """Within 5 standard errors: of the variance of n normal numbers, sqrt(2 / n) of itself."""
    near = 5 * (2 / SIZE) ** 0.5
    return all(
        abs(float(noise.var()) / wanted - 1) < near and abs(float(noise.mean())) < 5 * (wanted / SIZE) ** 0.5
        for leaves, wanted in zip(draws(tx), expected, strict=True)
        for noise in leaves.values()
    )


def of_the_paper(eta: float, gamma: float) -> list[float]:
    return [eta / (1 + t) ** gamma for t in range(UPDATES)]


def test_the_variance_is_that_of_the_paper() -> None:
    assert variances_are(optim.add_noise(ETA, GAMMA, key=0), of_the_paper(ETA, GAMMA))
    assert not variances_are(optim.add_noise(ETA**0.5, GAMMA, key=0), of_the_paper(ETA, GAMMA))
    assert not variances_are(optim.add_noise(ETA, GAMMA + 0.1, key=0), of_the_paper(ETA, GAMMA))


def test_the_variance_is_that_of_optax() -> None:
    optax = pytest.importorskip("optax")
    grads = {"a": torch.zeros(SIZE).numpy()}
    tx = optax.add_noise(ETA, GAMMA, 0)
    state, variances = tx.init(grads), []
    for _ in range(UPDATES):
        updates, state = tx.update(grads, state)
        variances.append(float(updates["a"].var()))
    expected = of_the_paper(ETA, GAMMA)
    assert all(abs(a / b - 1) < 5 * (2 / SIZE) ** 0.5 for a, b in zip(variances, expected, strict=True))


def test_no_two_draws_have_anything_in_common() -> None:
    """Correlations of n independent numbers have a standard error of n^-1/2."""
    seeds = [draws(optim.add_noise(1.0, 0.0, key=seed)) for seed in range(2)]
    rows = torch.stack([noise for run in seeds for leaves in run for noise in leaves.values()])
    others = torch.corrcoef(rows) - torch.eye(len(rows), dtype=torch.float64)
    assert len(rows) == 4 * UPDATES
    assert others.abs().max() < 6 / SIZE**0.5


def test_captured_noise_is_the_eager_noise() -> None:
    assert_captured(optim.chain(optim.add_noise(ETA, GAMMA, key=3), optim.sgd(RATE)))
    assert_captured(
        optim.chain(
            optim.inject_hyperparams(optim.add_noise, ("key",))(eta=ETA, gamma=GAMMA, key=3), optim.sgd(RATE)
        )
    )


def test_noise_goes_on_from_its_state() -> None:
    tx, grads = optim.add_noise(ETA, GAMMA, key=0), {"w": torch.zeros(8)}
    state, seen = tx.init(grads), []
    for _ in range(2):
        updates, state = tx.update(grads, state)
        seen.append(updates["w"])
    again, _ = tx.update(grads, state._replace(count=torch.ones((), dtype=torch.int64)))
    assert torch.equal(again["w"], seen[1])
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_every_leaf_keeps_its_dtype_and_shape(dtype: torch.dtype) -> None:
    grads = {"w": torch.ones(3, 2, dtype=dtype), "one": torch.ones((), dtype=dtype), "none": torch.ones(0)}
    updates, _ = (tx := optim.add_noise(1.0, GAMMA, key=0)).update(grads, tx.init(grads))
    for name, grad in grads.items():
        assert (updates[name].dtype, updates[name].shape) == (grad.dtype, grad.shape)
        assert not (updates[name] == grad).any()


def test_noise_is_a_value() -> None:
    key = fcg.random.split(fcg.random.key(5))[1]
    tx = optim.add_noise(ETA, GAMMA, key)
    assert tx == optim.add_noise(ETA, GAMMA, key.clone()) == pickle.loads(pickle.dumps(tx))
    assert hash(tx) == hash(optim.add_noise(ETA, GAMMA, key.clone()))
    assert tx != optim.add_noise(ETA, GAMMA, fcg.random.key(5))
    assert torch.equal(tx.init({"w": torch.ones(1)}).key, key)


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ((-1.0, GAMMA, 0), ValueError, "add_noise: eta must be at least 0"),
        ((ETA, -1.0, 0), ValueError, "add_noise: gamma must be at least 0"),
        ((ETA, GAMMA, 0.5), TypeError, r"add_noise: key must be a key, i64\[2\], or a Python int, got float: 0.5"),
        ((ETA, GAMMA, torch.zeros(2)), TypeError, r"add_noise: key must be a key(.|\n)*To fix: `key=fcg.random"),
    ],
)  # fmt: skip
def test_arguments_are_checked(arguments: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        optim.add_noise(*arguments)
