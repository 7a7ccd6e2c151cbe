"""What a class of torch.optim calls the state and the numbers of a transformation, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
      state: Field -> key in torch's state of a parameter; None for a count that torch does not keep.
      numbers: Attribute -> key in a parameter group; with an index, one of a tuple, as in ``betas``.
      fixed: Key in a parameter group -> the only value with this formula.
    """

    state: tuple[tuple[str, str | None], ...] = ()
    numbers: tuple[tuple[str, str], ...] = ()
    fixed: tuple[tuple[str, Any], ...] = ()


_BETAS = (("b1", "betas 0"), ("b2", "betas 1"), ("eps", "eps"))
_MOMENTS = (("count", "step"), ("mu", "exp_avg"), ("nu", "exp_avg_sq"))

BY_TORCH: Mapping[type, Names] = MappingProxyType(
    {
        trace: Names((("trace", "momentum_buffer"),), (("decay", "momentum"), ("nesterov", "nesterov"))),
        scale_by_adam: Names(_MOMENTS, _BETAS, (("amsgrad", False),)),
        scale_by_amsgrad: Names((*_MOMENTS, ("nu_max", "max_exp_avg_sq")), _BETAS, (("amsgrad", True),)),
        scale_by_adamax: Names((("count", "step"), ("mu", "exp_avg"), ("nu", "exp_inf")), _BETAS),
        scale_by_nadam: Names(
            (*_MOMENTS, ("product", "mu_product")), (*_BETAS, ("momentum_decay", "momentum_decay"))
        ),
        scale_by_radam: Names(_MOMENTS, _BETAS),
        scale_by_rss: Names((("count", "step"), ("sum_of_squares", "sum")), (("eps", "eps"),)),
        scale_by_rms: Names(
            (("nu", "square_avg"), ("mu", "grad_avg")),
            (("decay", "alpha"), ("eps", "eps"), ("centered", "centered")),
        ),
        scale_by_adadelta: Names(
            (("of_updates", "square_avg"), ("of_deltas", "acc_delta")), (("decay", "rho"), ("eps", "eps"))
        ),
        scale_by_learning_rate: Names((("count", None),), (("learning_rate", "lr"),)),
        scale_by_schedule: Names((("count", None),)),
        scale: Names(),
        add_decayed_weights: Names(),
    }
)
# Links that torch applies last.
_RATES = (scale_by_learning_rate, scale_by_schedule, scale)
# Moments behind which torch has weight decay, too.
_DECOUPLED = (scale_by_adam, scale_by_amsgrad, scale_by_nadam, scale_by_radam)

# What a number of a group must be where no transformation has it.
NEUTRAL = MappingProxyType(
    {
        "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False,
        "amsgrad": None, "centered": False, "lr_decay": 0.0, "ns_steps": None,
    }
)  # fmt: skip


@dataclass
class Survey:
    """Where the state of each parameter lies; all keys are names of parameters.

    Attributes:
      slots: Name -> key in torch's state -> the leaf that holds it.
      counts: A leaf that several parameters share, its key in torch's state (None: torch has none), and their names.
      numbers: Name -> key in torch's group -> the number of the transformation.
      of_groups: Name -> key in torch's group -> the leaf that holds it.
      unknown: What no class of torch.optim computes.
      links: Name -> the links so far.
    """

    slots: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    counts: list[tuple[Tensor, str | None, list[str]]] = field(default_factory=list)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    of_groups: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    links: dict[str, list[Any]] = field(default_factory=dict)


def surveyed(tx: GradientTransformation, state: OptState, params: Params) -> Survey:
    """Find the state of each parameter by walking the transformations."""
    out = Survey()
    for rule, own, part in tx.rules(state, params):
        members = names_of(tree.flatten(part)[1], "optim", "params")
        for name in members:
            out.slots.setdefault(name, {})
            out.numbers.setdefault(name, {})
        if isinstance(rule, InjectedTransformation):
            out.counts += [(own.count, None, members)] if own.count is not None else []
            continue
        if isinstance(rule, Adapted):
            _of_class(out, rule, own, members, part)
        elif type(rule) in BY_TORCH:
            _of_rule(out, rule, own, members, part)
        elif tree.leaves(own):
            out.unknown.append(f"{rule!r}")
        others = [
            links for links in (out.links.get(name, []) for name in members) if not _may_follow(rule, links)
        ]
        if others:
            out.unknown.append(f"{rule!r}" + (f"  after {others[0][-1]!r}" if others[0] else ""))
        for name in members:
            out.links.setdefault(name, []).append(rule)
    return out


def _may_follow(rule: Any, links: Sequence[Any]) -> bool:
    """Whether torch computes a link at this place: what changes the gradient, moments, decay of weights, rates."""
    kinds = {type(link) for link in links}
    moments = [link for link in links if isinstance(link, Adapted) or BY_TORCH.get(type(link), Names()).state]
    moments = [link for link in moments if type(link) not in _RATES]
    if not getattr(rule, "bias_correction", True):
        return False
    if type(rule) in _RATES:
        return bool(moments) or not isinstance(rule, scale)
    if type(rule) is add_decayed_weights:
        return all(type(link) in _DECOUPLED for link in moments) and not kinds & {
            add_decayed_weights,
            *_RATES,
        }
    if isinstance(rule, Adapted) or type(rule) in BY_TORCH:
        of_rms = type(rule) is trace and [type(link) for link in moments] == [scale_by_rms]
        return (not moments or of_rms) and not kinds & {*_RATES}
    return not moments and not kinds & {*_RATES}  # it changes the gradient, as a clip does


def _of_rule(out: Survey, rule: Any, own: Any, members: list[str], part: Params) -> None:
    names = BY_TORCH[type(rule)]
    fields = own._asdict()
    for name, key in names.state:
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, Tensor) and (key is None or key in ("step", "mu_product")):
            out.counts.append((value, key, members))
            continue
        for member, leaf in zip(members, tree.leaves(value), strict=True):
            out.slots[member][str(key)] = leaf
    for member, decays in zip(members, resolve_flags(getattr(rule, "mask", None), part), strict=True):
        numbers = out.numbers[member]
        decay = getattr(rule, "weight_decay", None)
        if decay is not None:
            numbers["weight_decay"] = decay if decays else 0.0
            # Decay before the moments is part of the gradient.
            numbers["decoupled_weight_decay"] = "exp_avg" in out.slots[member]
        before = numbers.get("lr")
        numbers.update({key: getattr(rule, name) for name, key in names.numbers})
        numbers.update(names.fixed)
        if type(rule) in _RATES and (before is not None or type(rule) is not scale_by_learning_rate):
            numbers["lr"] = _times(-1.0 if before is None else before, _factor(rule))


def _factor(rule: Any) -> Any:
    """What a link multiplies updates by: a number, or a function of the step."""
    if isinstance(rule, scale_by_learning_rate):
        return _times(-1.0, rule.learning_rate)
    return rule.schedule if isinstance(rule, scale_by_schedule) else rule.step_size


def _times(a: Any, b: Any) -> Any:
    if callable(a) or callable(b):
        return lambda step: (a(step) if callable(a) else a) * (b(step) if callable(b) else b)
    return a * b


def _of_class(out: Survey, rule: Adapted, own: Any, members: list[str], part: Params) -> None:
    out.counts.append((own.count, None, members))
    for member, leaf, kept in zip(members, tree.leaves(part), own.leaves, strict=True):
        out.slots[member].update(kept["state"])
        out.of_groups[member] = kept["group"]
        given = {**rule.made([leaf]).defaults, **thaw(rule.hyper)}
        given["lr"] = given.get("lr") if rule.learning_rate is None else rule.learning_rate
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
