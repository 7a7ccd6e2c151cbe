"""The table of optimizers that torch tests itself with: our transformations and `from_torch` against its classes.

Each configuration of the table trains for some steps in float64, in bfloat16, in two groups with rates of their own,
with gradients that are missing, and with a leaf that has no elements.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import functional_cg as fcg
from functional_cg import optim
from tests.judges.rows import Row, Verdict, compare, first_line

__all__ = ["JUDGE", "cases", "run"]

JUDGE = "torch.optim"

STEPS = 6


@cache
def _table() -> dict[str, Any]:
    from torch.testing._internal.common_optimizers import optim_db

    return {entry.optim_cls.__name__: entry for entry in optim_db}


def cases(device: str) -> list[str]:
    """The names of the classes of the table."""
    del device
    return list(_table())


def run(case: str, lowering: str, device: str) -> Iterator[Row]:
    """Judge one class with all configurations of the table."""
    row = Row(JUDGE, case, lowering, device)
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for given in _table()[case].optim_inputs_func(device=device):
            row.add(_configuration(case, given.desc, dict(given.kwargs), lowering, device))
    row.seconds = round(time.monotonic() - start, 1)
    yield row


def _configuration(
    case: str, name: str, hyper: dict[str, Any], lowering: str, device: str
) -> Iterator[Verdict]:
    cls = getattr(torch.optim, case)
    hyper = tree_map_only(Tensor, float, hyper)
    makers: dict[str, Callable[[dict[str, Any]], Any]] = {"from_torch": lambda h: optim.from_torch(cls, **h)}
    if case in NATIVE and not (hyper.get("dampening")):
        makers["ours"] = NATIVE[case]
    for maker, make in makers.items():
        for variant in VARIANTS:
            if (
                variant != "float64"
                and name != "default"
                and not (variant == "bfloat16" and "weight_decay" in hyper)
            ):
                continue
            where = f"{name}, {maker}, {variant}"
            try:
                yield _trained(cls, hyper, make, variant, where, lowering, device)
            except fcg.FunctionalCGError as error:
                outcome = "DIFFERS" if isinstance(error, fcg.MiscompileError) else "refused"
                yield Verdict(outcome, where, f"{type(error).__name__}: {first_line(error)}")
            except Exception as error:  # whatever it is, torch's class trains
                yield Verdict("DIFFERS", where, f"{type(error).__name__}: {first_line(error)}")


VARIANTS = ("float64", "bfloat16", "groups", "missing gradients", "no elements")


def _trained(
    cls: Any, hyper: dict[str, Any], make: Any, variant: str, where: str, lowering: str, device: str
) -> Verdict:
    matrices = cls is torch.optim.Muon
    shapes: list[tuple[int, ...]] = [(4, 3), (3, 5), (3, 3)] if matrices else [(4, 3), (3, 5), (7,), ()]
    if variant == "no elements":
        shapes.append((0, 3))
    dtype = torch.bfloat16 if variant == "bfloat16" else torch.float64
    generator = torch.Generator().manual_seed(1)

    def leaves() -> list[Tensor]:
        return [
            torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes
        ]

    start, steps = leaves(), [leaves() for _ in range(STEPS)]
    missing = {1} if variant == "missing gradients" else set()
    groups = variant == "groups"
    tx = make(dict(hyper))
    try:
        expected = _theirs(cls, hyper, start, steps, missing, groups)
    except Exception as error:  # torch's own class does not take this
        return Verdict("not run", where, f"torch raises: {first_line(error)}")
    wide = [[g.double() for g in grads] for grads in steps]
    exact = _theirs(cls, hyper, [p.double() for p in start], wide, missing, groups)
    names = [f"p{i}" for i in range(len(shapes))]
    if groups:
        rate = hyper.get("lr", _default(cls, "lr"))
        other = make({**hyper, "lr": 3 * rate})
        tx = optim.partition({"one": tx, "other": other}, {n: "other" if n == "p0" else "one" for n in names})

    def train(state: Any, grads: dict[str, Tensor]) -> Any:
        given = {n: None if i in missing else grads[n] for i, n in enumerate(names)}
        return state.apply_gradients(given), {}

    state = fcg.TrainState.create(params=dict(zip(names, start, strict=True)), optimizer=tx)
    with fcg.graph_step(train, lowering=lowering) as step:
        for grads in steps:
            state, _ = step(state, dict(zip(names, grads, strict=True)))
        got = fcg.snapshot(state.params)
    outcome = "equal"
    for n, want, true, before in zip(names, expected, exact, start, strict=True):
        verdict = compare(got[n], want, where, lambda true=true: true)
        if verdict.outcome == "DIFFERS" and dtype is torch.float64 and got[n].dtype is dtype:
            # A few roundings a step, relative to the way that the leaf has gone.
            way = float((want - before).abs().max())
            if float((got[n] - want).abs().max()) <= 1e-12 * way:
                verdict = Verdict("rounded", where)
        if verdict.outcome == "DIFFERS":
            return Verdict("DIFFERS", where, f"{n}: {verdict.why}")
        outcome = max(outcome, verdict.outcome, key=("equal", "rounded").index)
    return Verdict(outcome, where)


def _theirs(
    cls: Any,
    hyper: dict[str, Any],
    start: list[Tensor],
    steps: list[list[Tensor]],
    missing: set[int],
    groups: bool,
) -> list[Tensor]:
    params = [p.clone().requires_grad_() for p in start]
    given: Any = params
    if groups:
        rate = hyper.get("lr", _default(cls, "lr"))
        given = [{"params": params[1:]}, {"params": params[:1], "lr": 3 * rate}]
    optimizer = cls(given, **hyper)
    for grads in steps:
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            p.grad = None if i in missing else g.clone()
        optimizer.step()
    return [p.detach() for p in params]


def _default(cls: Any, name: str) -> float:
    return float(cls([torch.zeros(2, 2, requires_grad=True)]).defaults[name])


# -- ours ---------------------------------------------------------------------------------------------------------


def _with(hyper: dict[str, Any], tx: Any, rate: float, *, decoupled: bool = False) -> Any:
    """torch's order: the sign of the gradient, weight decay, the rule; or the rule, weight decay, the rate."""
    decay = optim.add_decayed_weights(hyper.get("weight_decay", 0.0))
    sign = [optim.scale(-1.0)] if hyper.get("maximize") else []
    middle = [tx, decay] if decoupled else [decay, tx]
    return optim.chain(*sign, *middle, optim.scale_by_learning_rate(rate))


def _betas(hyper: dict[str, Any]) -> dict[str, float]:
    b1, b2 = hyper.get("betas", (0.9, 0.999))
    return {"b1": b1, "b2": b2, "eps": hyper.get("eps", 1e-8)}


def _adam(hyper: dict[str, Any]) -> Any:
    rule = optim.scale_by_amsgrad if hyper.get("amsgrad") else optim.scale_by_adam
    return _with(hyper, rule(**_betas(hyper)), hyper.get("lr", 1e-3))


def _adamw(hyper: dict[str, Any]) -> Any:
    hyper = {"weight_decay": 1e-2, **hyper}
    if hyper.get("amsgrad"):
        return _with(hyper, optim.scale_by_amsgrad(**_betas(hyper)), hyper.get("lr", 1e-3), decoupled=True)
    sign = [optim.scale(-1.0)] if hyper.get("maximize") else []
    rule = optim.adamw(hyper.get("lr", 1e-3), **_betas(hyper), weight_decay=hyper["weight_decay"])
    return optim.chain(*sign, rule)


def _adadelta(hyper: dict[str, Any]) -> Any:
    return _with(hyper, optim.scale_by_adadelta(hyper.get("rho", 0.9)), hyper.get("lr", 1.0))


def _adafactor(hyper: dict[str, Any]) -> Any:
    rule = optim.adafactor(
        hyper.get("lr", 1e-2),
        -hyper.get("beta2_decay", -0.8),
        hyper.get("eps", (None, 1e-3)),
        hyper.get("d", 1.0),
        weight_decay=hyper.get("weight_decay", 0.0),
    )
    return optim.chain(*([optim.scale(-1.0)] if hyper.get("maximize") else []), rule)


def _adagrad(hyper: dict[str, Any]) -> Any:
    rate, decay = hyper.get("lr", 1e-2), hyper.get("lr_decay", 0.0)
    rule = optim.scale_by_rss(hyper.get("initial_accumulator_value", 0.0))
    return _with(hyper, rule, (lambda count: rate / (1 + count.to(torch.float64) * decay)) if decay else rate)


def _adamax(hyper: dict[str, Any]) -> Any:
    return _with(hyper, optim.scale_by_adamax(**_betas(hyper)), hyper.get("lr", 2e-3))


def _muon(hyper: dict[str, Any]) -> Any:
    numbers = {key: hyper[key] for key in ("momentum", "ns_steps", "ns_coefficients") if key in hyper}
    return _with(
        {"weight_decay": 0.1, **hyper}, optim.scale_by_muon(**numbers), hyper.get("lr", 1e-3), decoupled=True
    )


def _nadam(hyper: dict[str, Any]) -> Any:
    rule = optim.scale_by_nadam(**_betas(hyper), momentum_decay=hyper.get("momentum_decay", 4e-3))
    return _with(hyper, rule, hyper.get("lr", 2e-3), decoupled=hyper.get("decoupled_weight_decay", False))


def _radam(hyper: dict[str, Any]) -> Any:
    rule = optim.scale_by_radam(**_betas(hyper))
    return _with(hyper, rule, hyper.get("lr", 1e-3), decoupled=hyper.get("decoupled_weight_decay", False))


def _rmsprop(hyper: dict[str, Any]) -> Any:
    rule = optim.scale_by_rms(0.99, 1e-8, hyper.get("centered", False))
    momentum = hyper.get("momentum", 0.0)
    return _with(hyper, optim.chain(rule, optim.trace(momentum)) if momentum else rule, hyper.get("lr", 1e-2))


def _sgd(hyper: dict[str, Any]) -> Any:
    momentum = hyper.get("momentum", 0.0)
    rule = optim.trace(momentum, hyper.get("nesterov", False)) if momentum else optim.identity()
    return _with(hyper, rule, hyper.get("lr", 1e-3))


# ASGD, LBFGS, Rprop and SparseAdam have no transformation, dampening none either: `from_torch` alone is judged.
NATIVE = MappingProxyType(
    {
        "Adam": _adam,
        "AdamW": _adamw,
        "Adadelta": _adadelta,
        "Adafactor": _adafactor,
        "Adagrad": _adagrad,
        "Adamax": _adamax,
        "Muon": _muon,
        "NAdam": _nadam,
        "RAdam": _radam,
        "RMSprop": _rmsprop,
        "SGD": _sgd,
    }
)
