"""optax: each transformation and schedule that exists there and here, at numbers that are no defaults, for 30 steps.

All is in float64, and the bound is 1e-10 of the way that a leaf has gone: a few roundings a step.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy
import torch

import functional_cg as fcg
from functional_cg import optim
from tests.judges.rows import Row, Verdict, first_line

__all__ = ["JUDGE", "cases", "run"]

JUDGE = "optax"

STEPS = 30
TOLERANCE = 1e-10
# What has no rate of its own gets one, or `TrainState.create` refuses it.
DIRECTIONS = ("scale_by_", "clip", "trace", "adaptive_grad_clip", "centralize")
MISSING = "optax or jax is not installed"


@cache
def _pairs() -> dict[str, tuple[Any, Any]]:
    """Ours and theirs by optax's name."""
    import optax
    from optax import contrib

    b = {"b1": 0.8, "b2": 0.95}
    mask = {"a": True, "b": False, "c": True}
    labels = {"a": "one", "b": "other", "c": "one"}
    cosine = (optim.cosine(0.05, 20, 0.01), optax.cosine_decay_schedule(0.05, 20, 0.2))
    warm_up = (optim.linear(0.01, 0.05, 15), optax.linear_schedule(0.01, 0.05, 15))
    wrap = (optim.scale_by_learning_rate(0.1), optax.scale_by_learning_rate(0.1))
    decayed = {"weight_decay": 0.05}
    return {
        "sgd": (optim.sgd(0.05, 0.8), optax.sgd(0.05, 0.8)),
        "sgd nesterov": (optim.sgd(0.05, 0.8, True), optax.sgd(0.05, 0.8, nesterov=True)),
        "sgd schedule": (optim.sgd(cosine[0], 0.8), optax.sgd(cosine[1], 0.8)),
        "adam": (optim.adam(0.03, **b, eps=1e-4), optax.adam(0.03, **b, eps=1e-4)),
        "adam schedule": (optim.adam(cosine[0], **b), optax.adam(cosine[1], **b)),
        "adamw": (optim.adamw(0.03, **b, **decayed), optax.adamw(0.03, **b, **decayed)),
        "adamw mask": (
            optim.adamw(0.03, **b, **decayed, mask=mask),
            optax.adamw(0.03, **b, **decayed, mask=mask),
        ),
        "amsgrad": (optim.amsgrad(0.03, **b), optax.amsgrad(0.03, **b)),
        "adamax": (optim.adamax(0.03, **b), optax.adamax(0.03, **b)),
        "nadam": (optim.nadam(0.03, **b), optax.nadam(0.03, **b)),
        "radam": (optim.radam(0.03, **b, eps=1e-16), optax.radam(0.03, **b, eps=1e-16)),
        "radam eps": (optim.radam(0.03, **b, eps=1e-3), optax.radam(0.03, **b, eps=1e-3)),
        "adabelief": (
            optim.adabelief(0.03, **b, eps=1e-4),
            optax.adabelief(0.03, **b, eps=1e-4, eps_root=1e-4),
        ),
        "adabelief eps_root": (
            optim.adabelief(0.03, **b, eps=1e-4),
            optax.adabelief(0.03, **b, eps=1e-4, eps_root=1e-3),
        ),
        "yogi": (optim.yogi(0.03, **b), optax.yogi(0.03, **b)),
        "lamb": (optim.lamb(0.03, **b, **decayed), optax.lamb(0.03, **b, **decayed)),
        "lion": (optim.lion(0.03, **b, **decayed), optax.lion(0.03, **b, **decayed)),
        "lars": (optim.lars(0.03, 0.8, **decayed), optax.lars(0.03, 0.05, momentum=0.8, eps=1e-8)),
        "lars without decay": (
            optim.lars(0.03, 0.8, weight_decay=0.0, eps=1e-5),
            optax.lars(0.03, momentum=0.8, eps=1e-5),
        ),
        "adagrad": (optim.adagrad(0.03, 0.2, 1e-30), optax.adagrad(0.03, 0.2, 1e-30)),
        "adagrad eps": (optim.adagrad(0.03, 0.2, 1e-3), optax.adagrad(0.03, 0.2, 1e-3)),
        "adadelta": (optim.adadelta(0.3, 0.8), optax.adadelta(0.3, 0.8)),
        "rmsprop": (optim.rmsprop(0.03, 0.8, 1e-4), optax.rmsprop(0.03, 0.8, 1e-4, eps_in_sqrt=False)),
        "rmsprop momentum": (
            optim.rmsprop(0.03, 0.8, 1e-4, 0.5),
            optax.rmsprop(0.03, 0.8, 1e-4, eps_in_sqrt=False, momentum=0.5),
        ),
        "rmsprop centered": (
            optim.rmsprop(0.03, 0.8, 1e-4, centered=True),
            optax.rmsprop(0.03, 0.8, 1e-4, eps_in_sqrt=False, centered=True),
        ),
        "rmsprop eps_in_sqrt": (optim.rmsprop(0.03, 0.8, 1e-4), optax.rmsprop(0.03, 0.8, 1e-4)),
        "novograd": (
            optim.novograd(0.03, 0.8, 0.9, **decayed),
            optax.novograd(0.03, 0.8, 0.9, eps=1e-8, **decayed),
        ),
        "adafactor": (optim.adafactor(0.03), optax.adafactor(0.03)),
        # `contrib.scale_by_muon` alone has no form for a tree of plain arrays.
        "contrib.muon": (
            optim.muon(0.03, 0.8, ns_dtype=torch.float64, weight_decay=0.0),
            contrib.muon(0.03, beta=0.8),
        ),
        "lookahead": (optim.lookahead(optim.sgd(0.05), 3, 0.3), "lookahead"),
        "contrib.schedule_free": (
            optim.schedule_free(optim.sgd(0.05), 0.05, b1=0.8),
            contrib.schedule_free(optax.sgd(0.05), 0.05, b1=0.8),
        ),
        "contrib.schedule_free warm-up": (
            optim.schedule_free(optim.sgd(warm_up[0]), warm_up[0], b1=0.8),
            contrib.schedule_free(optax.sgd(warm_up[1]), warm_up[1], b1=0.8),
        ),
        "clip_by_global_norm": (optim.clip_by_global_norm(1.5), optax.clip_by_global_norm(1.5)),
        "clip": (optim.clip_by_value(0.3), optax.clip(0.3)),
        "clip_by_block_rms": (optim.clip_by_rms(0.4), optax.clip_by_block_rms(0.4)),
        "adaptive_grad_clip": (optim.adaptive_clip(0.1), optax.adaptive_grad_clip(0.1)),
        "centralize": (optim.centralize(), optax.centralize()),
        "scale": (optim.scale(-0.3), optax.scale(-0.3)),
        "identity": (optim.chain(optim.identity(), wrap[0]), optax.chain(optax.identity(), wrap[1])),
        "set_to_zero": (optim.set_to_zero(), optax.set_to_zero()),
        "trace": (optim.trace(0.7), optax.trace(0.7)),
        "trace nesterov": (optim.trace(0.7, True), optax.trace(0.7, nesterov=True)),
        "add_decayed_weights": (
            optim.chain(optim.add_decayed_weights(0.1, mask), wrap[0]),
            optax.chain(optax.add_decayed_weights(0.1, mask), wrap[1]),
        ),
        # Of an optimizer with a rate, `masked` is refused here: the other leaves would get raw gradients.
        "masked": (
            optim.chain(optim.masked(optim.scale_by_adam(**b), mask), wrap[0]),
            optax.chain(optax.masked(optax.scale_by_adam(**b), mask), wrap[1]),
        ),
        "partition": (
            optim.partition({"one": optim.adam(0.03, **b), "other": optim.sgd(0.1, 0.7)}, labels),
            optax.partition({"one": optax.adam(0.03, **b), "other": optax.sgd(0.1, 0.7)}, labels),
        ),
        "freeze": (
            optim.chain(optim.adam(0.03, **b), optim.freeze(mask)),
            optax.chain(optax.adam(0.03, **b), optax.freeze(mask)),
        ),
        "flatten": (
            optim.flatten(optim.adamw(0.03, **b, **decayed)),
            optax.flatten(optax.adamw(0.03, **b, **decayed)),
        ),
        "inject_hyperparams": (
            optim.inject_hyperparams(optim.adamw)(learning_rate=cosine[0], **b, weight_decay=0.05),
            optax.inject_hyperparams(optax.adamw)(learning_rate=cosine[1], **b, weight_decay=0.05),
        ),
        "chain": (
            optim.chain(optim.clip_by_global_norm(1.0), optim.trace(0.7), optim.scale(-0.02)),
            optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.7), optax.scale(-0.02)),
        ),
        "scale_by_learning_rate": (
            optim.scale_by_learning_rate(cosine[0]),
            optax.scale_by_learning_rate(cosine[1]),
        ),
        "scale_by_schedule": (optim.scale_by_schedule(cosine[0]), optax.scale_by_schedule(cosine[1])),
        "scale_by_adam": (optim.scale_by_adam(**b), optax.scale_by_adam(**b)),
        "scale_by_adamax": (optim.scale_by_adamax(**b), optax.scale_by_adamax(**b)),
        "scale_by_amsgrad": (optim.scale_by_amsgrad(**b), optax.scale_by_amsgrad(**b)),
        "scale_by_adadelta": (optim.scale_by_adadelta(0.8, 1e-4), optax.scale_by_adadelta(0.8, 1e-4)),
        "scale_by_belief": (
            optim.scale_by_belief(**b, eps=1e-4),
            optax.scale_by_belief(**b, eps=1e-4, eps_root=1e-4),
        ),
        "scale_by_lion": (optim.scale_by_lion(**b), optax.scale_by_lion(**b)),
        "scale_by_novograd": (
            optim.chain(optim.scale_by_novograd(0.9), optim.trace(0.8)),
            optax.scale_by_novograd(0.8, 0.9),
        ),
        "scale_by_radam": (optim.scale_by_radam(**b, eps=1e-16), optax.scale_by_radam(**b, eps=1e-16)),
        "scale_by_rms": (optim.scale_by_rms(0.8, 1e-4), optax.scale_by_rms(0.8, 1e-4, eps_in_sqrt=False)),
        "scale_by_stddev": (
            optim.scale_by_rms(0.8, 1e-4, True),
            optax.scale_by_stddev(0.8, 1e-4, eps_in_sqrt=False),
        ),
        "scale_by_rss": (optim.scale_by_rss(0.2, 1e-4), optax.scale_by_rss(0.2, 1e-4)),
        "scale_by_trust_ratio": (optim.scale_by_trust_ratio(), optax.scale_by_trust_ratio()),
        "scale_by_yogi": (optim.scale_by_yogi(**b), optax.scale_by_yogi(**b)),
        "scale_by_param_block_rms": (optim.scale_by_param_rms(0.01), optax.scale_by_param_block_rms(0.01)),
        "scale_by_factored_rms": (
            optim.scale_by_factored_rms(0.7),
            optax.scale_by_factored_rms(decay_rate=0.7),
        ),
    }


@cache
def _schedules() -> dict[str, tuple[Any, Any]]:
    import optax

    return {
        "constant_schedule": (optim.constant(0.3), optax.constant_schedule(0.3)),
        "linear_schedule": (optim.linear(0.1, 0.7, 12, 5), optax.linear_schedule(0.1, 0.7, 12, 5)),
        "cosine_decay_schedule": (optim.cosine(0.3, 20, 0.06), optax.cosine_decay_schedule(0.3, 20, 0.2)),
        "exponential_decay": (optim.exponential(0.3, 7, 0.6), optax.exponential_decay(0.3, 7, 0.6)),
        "exponential_decay staircase": (
            optim.exponential(0.3, 7, 0.6, True, 0.1),
            optax.exponential_decay(0.3, 7, 0.6, staircase=True, end_value=0.1),
        ),
        "piecewise_constant_schedule": (
            optim.piecewise_constant(0.3, {5: 0.5, 12: 0.1}),
            optax.piecewise_constant_schedule(0.3, {5: 0.5, 12: 0.1}),
        ),
        "warmup_cosine_decay_schedule": (
            optim.warmup_cosine(0.3, 6, 25, 0.02, 0.01),
            optax.warmup_cosine_decay_schedule(0.01, 0.3, 6, 25, 0.02),
        ),
    }


def cases(device: str) -> list[str]:
    """optax's names of what exists in both."""
    del device
    if importlib.util.find_spec("optax") is None or importlib.util.find_spec("jax") is None:
        return [MISSING]
    # Draws differ by design: another generator.
    return [*_pairs(), *_schedules(), "add_noise", "global_norm"]


def run(case: str, lowering: str, device: str) -> Iterator[Row]:
    """Judge one name."""
    row = Row(JUDGE, case, lowering, device)
    start = time.monotonic()
    try:
        row.add([_verdict(case, lowering, device)])
    except fcg.FunctionalCGError as error:
        row.add([Verdict("refused", "", f"{type(error).__name__}: {first_line(error)}")])
    except Exception as error:  # whatever it is, optax runs
        row.add([Verdict("DIFFERS", "", f"{type(error).__name__}: {first_line(error)}")])
    row.seconds = round(time.monotonic() - start, 1)
    yield row


def _verdict(case: str, lowering: str, device: str) -> Verdict:
    if case == MISSING:
        return Verdict("not run", "", MISSING)
    if case == "add_noise":
        return Verdict(
            "documented", "", "the same variance from other draws: keys here are those of this package"
        )
    import jax
    import optax

    with jax.enable_x64(True):
        rng = numpy.random.default_rng(3)

        def leaves() -> dict[str, Any]:
            return {"a": rng.normal(size=(4, 3)), "b": rng.normal(size=(3, 5)), "c": rng.normal(size=(5, 5))}

        params, steps = leaves(), [leaves() for _ in range(STEPS)]
        if case == "global_norm":
            with fcg.graph_fn(optim.global_norm, lowering=lowering) as norm:
                return _near(
                    [float(norm(_torch(g, device))) for g in steps],
                    [float(optax.global_norm(g)) for g in steps],
                )
        if case in _schedules():
            return _schedule(case, lowering, device)
        ours, theirs = _pairs()[case]
        if case.removeprefix("contrib.").startswith(DIRECTIONS) and "learning_rate" not in case:
            ours, theirs = optim.chain(ours, optim.scale(-0.1)), optax.chain(theirs, optax.scale(-0.1))
        got = _ours(ours, params, steps, lowering, device)
        expected = _lookahead(params, steps) if theirs == "lookahead" else _theirs(theirs, params, steps)
        for name, before in params.items():
            way = max(float(numpy.abs(expected[name] - before).max()), 1e-30)
            distance = float(numpy.abs(got[name] - expected[name]).max())
            if not distance <= TOLERANCE * way:
                return Verdict("DIFFERS", name, f"off by {distance / way:.0e} of the way")
    same = all(numpy.array_equal(got[name], expected[name]) for name in params)
    return Verdict("equal" if same else "rounded")


def _near(got: list[float], expected: list[float]) -> Verdict:
    distance = max(abs(x - y) for x, y in zip(got, expected, strict=True))
    if distance > TOLERANCE * max(map(abs, expected)):
        return Verdict("DIFFERS", "", f"off by {distance:.0e}")
    return Verdict("equal" if got == expected else "rounded")


def _schedule(case: str, lowering: str, device: str) -> Verdict:
    ours, theirs = _schedules()[case]
    with fcg.graph_fn(
        lambda count: torch.as_tensor(ours(count), dtype=torch.float64), lowering=lowering
    ) as value:
        got = [float(value(torch.tensor(count, device=device))) for count in range(STEPS)]
    return _near(got, [float(theirs(count)) for count in range(STEPS)])


def _torch(leaves: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: torch.from_numpy(leaf).to(device) for name, leaf in leaves.items()}


def _ours(tx: Any, params: Any, steps: Any, lowering: str, device: str) -> dict[str, Any]:
    def train(state: Any, grads: Any) -> Any:
        return state.apply_gradients(grads), {}

    state = fcg.TrainState.create(params=_torch(params, device), optimizer=tx)
    with fcg.graph_step(train, lowering=lowering) as step:
        for grads in steps:
            state, _ = step(state, _torch(grads, device))
        return {name: leaf.cpu().numpy() for name, leaf in fcg.snapshot(state.params).items()}


def _theirs(tx: Any, params: Any, steps: Any) -> dict[str, Any]:
    import jax
    import optax

    params = jax.tree.map(jax.numpy.asarray, params)
    state = tx.init(params)

    @jax.jit
    def train(state: Any, params: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return state, optax.apply_updates(params, updates)

    for grads in steps:
        state, params = train(state, params, grads)
    return {name: numpy.asarray(leaf) for name, leaf in params.items()}


def _lookahead(params: Any, steps: Any) -> dict[str, Any]:
    """optax has parameters in pairs, fast and slow."""
    import jax
    import optax

    pair = optax.LookaheadParams.init_synced(jax.tree.map(jax.numpy.asarray, params))
    tx = optax.lookahead(optax.sgd(0.05), 3, 0.3)
    state = tx.init(pair)
    for grads in steps:
        updates, state = tx.update(grads, state, pair)
        pair = optax.apply_updates(pair, updates)
    return {name: numpy.asarray(leaf) for name, leaf in pair.fast.items()}
