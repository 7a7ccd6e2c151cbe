"""What a class of torch.optim calls the state and the numbers of a transformation, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from functional_cg import tree
from functional_cg.checkpoint import names_of
from functional_cg.optim.adapters.adapted import Adapted
from functional_cg.optim.algebra.base import GradientTransformation, OptState, Params, thaw
from functional_cg.optim.algebra.hyperparams import InjectedTransformation
from functional_cg.optim.algebra.links import (
    add_decayed_weights,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_rss,
    scale_by_schedule,
    trace,
)
from functional_cg.optim.algebra.selection import resolve_flags
from functional_cg.optim.rules.adaptive import (
    scale_by_adamax,
    scale_by_amsgrad,
    scale_by_nadam,
    scale_by_radam,
)
from functional_cg.optim.rules.aliases import adagrad, adam, adamw, sgd
from functional_cg.optim.rules.elementwise import scale_by_adadelta, scale_by_rms


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


_RATE = (("learning_rate", "lr"),)
_BETAS = (("b1", "betas 0"), ("b2", "betas 1"), ("eps", "eps"))
_MOMENTS = (("count", "step"), ("mu", "exp_avg"), ("nu", "exp_avg_sq"))
_MOMENTUM = (("decay", "momentum"), ("momentum", "momentum"), ("nesterov", "nesterov"))

BY_TORCH: Mapping[type, Names] = MappingProxyType(
    {
        sgd: Names((("count", None), ("trace", "momentum_buffer")), _RATE + _MOMENTUM),
        trace: Names((("trace", "momentum_buffer"),), _MOMENTUM),
        adam: Names(_MOMENTS, _RATE + _BETAS, (("amsgrad", False),)),
        adamw: Names(_MOMENTS, _RATE + _BETAS, (("amsgrad", False),)),
        scale_by_adam: Names(_MOMENTS, _BETAS, (("amsgrad", False),)),
        scale_by_amsgrad: Names((*_MOMENTS, ("nu_max", "max_exp_avg_sq")), _BETAS, (("amsgrad", True),)),
        scale_by_adamax: Names((("count", "step"), ("mu", "exp_avg"), ("nu", "exp_inf")), _BETAS),
        scale_by_nadam: Names(
            (*_MOMENTS, ("product", "mu_product")), (*_BETAS, ("momentum_decay", "momentum_decay"))
        ),
        scale_by_radam: Names(_MOMENTS, _BETAS),
        adagrad: Names((("count", "step"), ("sum_of_squares", "sum")), (*_RATE, ("eps", "eps"))),
        scale_by_rss: Names((("sum_of_squares", "sum"),), (("eps", "eps"),)),
        scale_by_rms: Names(
            (("nu", "square_avg"), ("mu", "grad_avg")),
            (("decay", "alpha"), ("eps", "eps"), ("centered", "centered")),
        ),
        scale_by_adadelta: Names(
            (("of_updates", "square_avg"), ("of_deltas", "acc_delta")), (("decay", "rho"), ("eps", "eps"))
        ),
        scale_by_learning_rate: Names((("count", None),), _RATE),
        scale_by_schedule: Names((("count", None),)),
        add_decayed_weights: Names(),
    }
)
# What a number of a group must be where no transformation has it.
NEUTRAL = MappingProxyType(
    {
        "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False,
        "amsgrad": None, "centered": False, "lr_decay": 0.0,
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
      unknown: What keeps a state that no class of torch.optim has.
    """

    slots: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    counts: list[tuple[Tensor, str | None, list[str]]] = field(default_factory=list)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    of_groups: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def surveyed(tx: GradientTransformation, state: OptState, params: Params) -> Survey:
    """Find the state of each parameter by walking the transformations."""
    out = Survey()
    for rule, own, part in tx.rules(state, params):
        members = names_of(tree.flatten(part)[1], "optim", "params")
        for name in members:
            out.slots.setdefault(name, {})
            out.numbers.setdefault(name, {})
        if isinstance(rule, Adapted):
            _of_class(out, rule, own, members, part)
        elif type(rule) in BY_TORCH:
            _of_rule(out, rule, own, members, part)
        elif isinstance(rule, InjectedTransformation):
            out.counts += [(own.count, None, members)] if own.count is not None else []
        elif tree.leaves(own):
            out.unknown.append(f"{rule!r}")
    return out


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
            numbers["decoupled_weight_decay"] = type(rule) is adamw or "exp_avg" in out.slots[member]
        numbers.update({key: getattr(rule, name) for name, key in names.numbers if hasattr(rule, name)})
        numbers.update(names.fixed)


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
