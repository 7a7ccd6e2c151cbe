"""What a class of torch.optim calls the state and the numbers of a transformation, parameter by parameter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from functional_cg import tree
from functional_cg.checkpoint import names_of
from functional_cg.optim.adapters.adapted import Adapted
from functional_cg.optim.algebra.base import GradientTransformation, OptState, Params
from functional_cg.optim.algebra.hyperparams import InjectedTransformation
from functional_cg.optim.algebra.links import (
    add_decayed_weights,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
    trace,
)
from functional_cg.optim.algebra.selection import resolve_flags, thaw
from functional_cg.optim.rules.adam import (
    scale_by_adam,
    scale_by_adamax,
    scale_by_amsgrad,
    scale_by_nadam,
    scale_by_radam,
)
from functional_cg.optim.rules.elementwise import scale_by_adadelta, scale_by_rms, scale_by_rss


class Names(NamedTuple):
    """The names that torch has for a transformation.

    Attributes:
      kind: A letter, for the order in which torch applies it.
      state: Field -> key in torch's state of a parameter; None for a count that torch does not keep.
      numbers: Attribute -> key in a parameter group; with an index, one of a tuple, as in ``betas``.
      fixed: Key in a parameter group -> the only value with this formula.
    """

    kind: str
    state: tuple[tuple[str, str | None], ...] = ()
    numbers: tuple[tuple[str, str], ...] = ()
    fixed: tuple[tuple[str, Any], ...] = ()


_BETAS = (("b1", "betas 0"), ("b2", "betas 1"), ("eps", "eps"))
_MOMENTS = (("count", "step"), ("mu", "exp_avg"), ("nu", "exp_avg_sq"))

BY_TORCH: Mapping[type, Names] = MappingProxyType(
    {
        trace: Names("t", (("trace", "momentum_buffer"),), (("decay", "momentum"), ("nesterov", "nesterov"))),
        scale_by_adam: Names("M", _MOMENTS, _BETAS, (("amsgrad", False),)),
        scale_by_amsgrad: Names("M", (*_MOMENTS, ("nu_max", "max_exp_avg_sq")), _BETAS, (("amsgrad", True),)),
        scale_by_adamax: Names("m", (("count", "step"), ("mu", "exp_avg"), ("nu", "exp_inf")), _BETAS),
        scale_by_nadam: Names(
            "M", (*_MOMENTS, ("product", "mu_product")), (*_BETAS, ("momentum_decay", "momentum_decay"))
        ),
        scale_by_radam: Names("M", _MOMENTS, _BETAS),
        scale_by_rss: Names("m", (("count", "step"), ("sum_of_squares", "sum")), (("eps", "eps"),)),
        scale_by_rms: Names(
            "R",
            (("nu", "square_avg"), ("mu", "grad_avg")),
            (("decay", "alpha"), ("eps", "eps"), ("centered", "centered")),
        ),
        scale_by_adadelta: Names(
            "m",
            (("of_updates", "square_avg"), ("of_deltas", "acc_delta")),
            (("decay", "rho"), ("eps", "eps")),
        ),
        scale_by_learning_rate: Names("r", (("count", None),), (("learning_rate", "lr"),)),
        scale_by_schedule: Names("r", (("count", None),), (("schedule", "lr"),)),
        scale: Names("s", (), (("step_size", "lr"),)),
        add_decayed_weights: Names("d", (), (("weight_decay", "weight_decay"),)),
    }
)
# The orders in which torch applies links: g changes the gradient, as a clip does, d adds decayed weights, M and m are
# moments, behind which torch has weight decay or not, R and t the mean square and the momentum of RMSprop, r a rate.
_ORDER = re.compile("g*(dg*)?r*|g*dg*([Mmt]|Rt?)[rs]*|g*(Md?|[mt]|Rt?)[rs]*")

# What a number of a group must be where no transformation has it.
NEUTRAL = MappingProxyType(
    {
        "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False,
        "amsgrad": None, "centered": False, "lr_decay": 0.0, "ns_steps": None,
    }
)  # fmt: skip


class Survey(NamedTuple):
    """Where the state of each parameter lies; all keys are names of parameters.

    Attributes:
      slots: Name -> key in torch's state -> the leaf that holds it.
      counts: The leaves that count updates, and have no key in torch's state.
      numbers: Name -> key in torch's group -> the number of the transformation.
      of_groups: Name -> key in torch's group -> the leaf that holds it.
      unknown: What no class of torch.optim computes.
    """

    slots: dict[str, dict[str, Tensor]]
    counts: list[Tensor]
    numbers: dict[str, dict[str, Any]]
    of_groups: dict[str, dict[str, Tensor]]
    unknown: list[str]


def surveyed(tx: GradientTransformation, state: OptState, params: Params) -> Survey:
    """Find the state of each parameter by walking the transformations."""
    every = names_of(tree.flatten(params)[1], "optim", "params")
    out = Survey({name: {} for name in every}, [], {name: {} for name in every}, {}, [])
    links: dict[str, list[Any]] = {name: [] for name in every}
    for rule, own, part in tx.rules(state, params):
        members = names_of(tree.flatten(part)[1], "optim", "params")
        if isinstance(rule, InjectedTransformation):
            out.counts.extend(tree.leaves(own))
            continue
        if isinstance(rule, Adapted):
            _of_class(out, rule, own, members, part)
        elif type(rule) in BY_TORCH:
            _of_rule(out, rule, own, members, part)
        elif tree.leaves(own):
            out.unknown.append(f"{rule!r}")
        for name in members:
            links[name].append(rule)
        others = [links[one] for one in members if not _ORDER.fullmatch("".join(map(_kind, links[one])))]
        if others:
            before = f"  after {others[0][-2]!r}" if len(others[0]) > 1 else ""
            out.unknown.append(f"{rule!r}{before}")
    return out


def _kind(rule: Any) -> str:
    """One letter for what a link does, for ``_ORDER``."""
    if type(rule) in BY_TORCH:
        return BY_TORCH[type(rule)].kind if getattr(rule, "bias_correction", True) else "x"
    return "m" if isinstance(rule, Adapted) else "g"


def _of_rule(out: Survey, rule: Any, own: Any, members: list[str], part: Params) -> None:
    names = BY_TORCH[type(rule)]
    for name, key in names.state:
        value = own._asdict().get(name)  # a tuple has a `count` of its own
        if key is None:
            out.counts.extend(tree.leaves(value))
        elif value is not None:
            shared = key in ("step", "mu_product")
            leaves = [value] * len(members) if shared else tree.leaves(value)
            for member, leaf in zip(members, leaves, strict=True):
                out.slots[member][key] = leaf
    for member, on in zip(members, resolve_flags(getattr(rule, "mask", None), part), strict=True):
        numbers = out.numbers[member]
        before = numbers.get("lr")
        own_numbers = {key: getattr(rule, name) if on else 0.0 for name, key in names.numbers}
        numbers.update({**own_numbers, **dict(names.fixed)})
        if isinstance(rule, add_decayed_weights):  # before the moments, it is part of the gradient
            numbers["decoupled_weight_decay"] = "exp_avg" in out.slots[member]
        descends = isinstance(rule, scale_by_learning_rate)
        if "lr" in own_numbers and (before is not None or not descends):
            factor = _times(-1.0, numbers["lr"]) if descends else numbers["lr"]
            numbers["lr"] = _times(-1.0 if before is None else before, factor)


def _times(a: Any, b: Any) -> Any:
    if callable(a) or callable(b):
        return lambda step: (a(step) if callable(a) else a) * (b(step) if callable(b) else b)
    return a * b


def _of_class(out: Survey, rule: Adapted, own: Any, members: list[str], part: Params) -> None:
    out.counts.append(own.count)
    for member, leaf, kept in zip(members, tree.leaves(part), own.leaves, strict=True):
        out.slots[member].update(kept["state"])
        out.of_groups[member] = kept["group"]
        rate = {} if rule.learning_rate is None else {"lr": rule.learning_rate}
        given = {**rule.made([leaf]).defaults, **thaw(rule.hyper), **rate}
        out.numbers[member].update(
            {
                key: value
                for key, one in given.items()
                for key, value in _flat(key, one)
                if key not in kept["group"]
            }
        )


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Name the numbers of a tuple one by one."""
    if isinstance(value, tuple | list):
        yield from ((f"{key} {i}", one) for i, one in enumerate(value))
    elif value is not None:
        yield key, value
