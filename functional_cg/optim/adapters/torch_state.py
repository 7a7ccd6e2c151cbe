"""Moves the state of a torch optimizer into a state of this package, and out again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.checkpoint import load_state_dict, names_of, state_dict
from functional_cg.errors import LayoutError
from functional_cg.optim.adapters.torch_names import NEUTRAL, Survey, surveyed

from ...tensors.parts import as_complex, as_real

T = TypeVar("T")

_WRAPPERS = frozenset({"module", "_orig_mod"})  # of DistributedDataParallel and torch.compile
# Keys of a group that older versions of torch lack.
_OPTIONAL = frozenset(
    {"decoupled_weight_decay", "maximize", "foreach", "capturable", "differentiable", "fused"}
)


class _Entry(NamedTuple):
    """What torch has of one parameter."""

    group: dict[str, Any]
    number: int
    kept: dict[str, Any]


def load_torch_state(
    state: T, torch_state: Mapping[str, Any], *, names: Sequence[str] | None = None, step: int | None = None
) -> T:
    """Write ``optimizer.state_dict()`` of a torch optimizer into a state, which goes on where torch stopped.

    Moments, counts, and the numbers that :class:`inject_hyperparams` keeps come from the dict, ``state.step`` and the
    counts of schedules too. The parameters are those of ``state``: load them into the module first. All other numbers
    are compared with those of the dict (except where a schedule stands for one), and so is the formula: SGD, Adam,
    AdamW, AMSGrad, Adamax, NAdam, RAdam, RMSprop, Adadelta, Adagrad, in any ``chain`` or ``partition``, and every class
    that :func:`from_torch` adapts. The handle is donated, and steps keep their captures.

    Args:
      state: A ``TrainState``, or a handle to one.
      torch_state: ``{"state": ..., "param_groups": ...}``.
      names: The names of the parameters in the order of the groups; None if the optimizer was made of
        ``named_parameters()``, so that the dict has them. ``module.`` and ``_orig_mod.`` are dropped. A parameter that
        torch has never updated, such as an unused one, may be frozen here. (Plain SGD keeps nothing to tell by, and
        dicts of old versions of torch do not say whether Adam's weight decay is decoupled.)
      step: Number of updates so far; needed where torch keeps no count, as for SGD.
    Returns:
      The new handle, or the new state.
    Raises:
      LayoutError: If the dict does not fit: other parameters, shapes, numbers or formulas, or a count per parameter
        where this package has one for several. Lists the differences; ``state`` is unchanged.
      TypeError: If ``state`` has no optimizer.
      ValueError: If ``names`` or ``step`` is needed.

    Example:
      >>> import torch, functional_cg as fcg
      >>> module = torch.nn.Linear(2, 1)
      >>> adam = torch.optim.Adam(module.parameters(), lr=0.1)
      >>> module(torch.ones(2)).sum().backward()
      >>> adam.step()
      >>> apply, params, buffers = fcg.from_module(module)
      >>> state = fcg.TrainState.create(params=params, optimizer=fcg.optim.adam(0.1))
      >>> names = [name for name, _ in module.named_parameters()]
      >>> state = fcg.optim.load_torch_state(state, adam.state_dict(), names=names)
      >>> int(state.step), fcg.snapshot(state).opt_state[0].mu["bias"]
      (1, tensor([0.1000]))
    """
    host, plain = _opened(state, "load_torch_state")
    ours = _surveyed(plain, plain.opt_state)
    first = _surveyed(plain, plain.optimizer.init(tree.map(as_real, plain.params)))
    entries = _entries(torch_state, names, ours, "load_torch_state")
    place = {id(leaf): name for name, leaf in zip(host, tree.leaves(plain), strict=True)}
    rows, values = _differences(ours, entries, place)
    rows += [
        f"{name}  expected momentum_buffer, since dampening does not damp the first one   got none"
        for name, slots in ours.slots.items()
        if ours.numbers[name].get("dampening")
        and slots.get("momentum_buffer") is not None
        and entries[name].kept.get("momentum_buffer") is None
    ]
    steps: list[int] = []
    counts: dict[tuple[str, str], dict[str, float]] = {}  # of a leaf that several parameters share
    for name, slots in ours.slots.items():
        kept = {key: value for key, value in entries[name].kept.items() if value is not None}
        known = {**first.slots[name], **kept}
        for key, leaf in slots.items():
            value = known[key]
            if leaf.dim() == 0 and not (isinstance(value, Tensor) and value.dim()):
                value = torch.as_tensor(value, dtype=leaf.dtype)
                counts.setdefault((place[id(leaf)], key), {})[name] = float(value)
            values[place[id(leaf)]] = as_real(value) if isinstance(value, Tensor) else value
        if "step" in known:  # RMSprop keeps one that its formula does not use
            steps.append(int(known["step"]))
        for key, leaf in ours.of_groups.get(name, {}).items():
            values[place[id(leaf)]] = torch.as_tensor(entries[name].group[key], dtype=leaf.dtype)
    unlike = {key: of for (_, key), of in counts.items() if len(set(of.values())) > 1}
    for key, of in unlike.items():
        rows += [f"{name}  {key} {count:g}" for name, count in sorted(of.items(), key=lambda it: it[1])]
    never = [f"`{name}`" for of in unlike.values() for name in of if not entries[name].kept]
    if rows:
        raise LayoutError.of(
            "",
            "load_torch_state: the dict does not fit the optimizer of `state`, which is unchanged.",
            rows=rows,
            why="Another formula, another number, or one count for parameters that torch counts apart, would go on "
            "differently.",
            fix=f"torch has never updated {', '.join(never)}: `requires_grad_(False)` before `from_module`."
            if never
            else "make the optimizer as it was in torch (a `partition` has one count per label); to go on with other "
            "numbers, write them into the dict, `group['lr'] = 0.1`.",
        )
    if step is None and not steps:
        raise ValueError(
            "load_torch_state: torch keeps no count for this optimizer. To fix: `step=`, the number of updates so far."
        )
    done = max(steps) if step is None else step
    if done < 0 or (steps and done != max(steps)):
        raise ValueError(
            f"load_torch_state: step={step}, but the dict counts {max(steps, default=0)} updates"
        )
    values |= {place[id(leaf)]: torch.tensor(done) for leaf in ours.counts}
    return load_state_dict(state, {**host, "step": torch.tensor(done), **values})


def torch_state(state: Any, like: Mapping[str, Any], *, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Copy the state of the optimizer to a dict for ``load_state_dict`` of a torch optimizer.

    Args:
      state: A ``TrainState``, or a handle to one.
      like: ``state_dict()`` of that optimizer, for its groups; not changed. Its learning rates, and what
        :class:`inject_hyperparams` keeps, become those of ``state``; the other numbers must agree.
      names: See :func:`load_torch_state`.
    Returns:
      ``{"state": ..., "param_groups": ...}`` with tensors on the host, owned by the caller.
    Raises:
      LayoutError: If the torch optimizer has other parameters, numbers or another formula.
      TypeError: If ``state`` has no optimizer.
      ValueError: If ``names`` is needed.

    Example:
      >>> import torch, functional_cg as fcg
      >>> module = torch.nn.Linear(2, 1)
      >>> apply, params, buffers = fcg.from_module(module)
      >>> state = fcg.TrainState.create(params=params, optimizer=fcg.optim.adam(0.1))
      >>> state = state.apply_gradients(fcg.tree.map(torch.ones_like, params))
      >>> adam = torch.optim.Adam(module.named_parameters(), lr=0.1)
      >>> adam.load_state_dict(fcg.optim.torch_state(state, adam.state_dict()))
      >>> adam.state[module.bias]["exp_avg"]
      tensor([0.1000])
    """
    _, plain = _opened(state, "torch_state")
    ours = _surveyed(plain, plain.opt_state)
    out = {**like, "param_groups": copy.deepcopy(like["param_groups"]), "state": {}}
    entries = _entries({**out, "state": {}}, names, ours, "torch_state")
    rates, unlike = dict[tuple[int, str], float](), list[str]()
    for name, entry in entries.items():
        for key, number in ours.numbers.get(name, {}).items():
            if callable(number):
                number = float(number(int(plain.step)))
            elif key != "lr" and not isinstance(number, Tensor):
                continue
            _put(entry.group, key, float(number))
            other = rates.setdefault((id(entry.group), key), float(number))
            if other != float(number):
                unlike.append(
                    f"{name}: {key}  expected {other!r}, as for others of its group   got {float(number)!r}"
                )
        entry.group.update({key: float(leaf) for key, leaf in ours.of_groups.get(name, {}).items()})
    rows = unlike + _differences(ours, entries, {})[0]
    if rows:
        raise LayoutError.of(
            "",
            "torch_state: the torch optimizer differs from the optimizer of `state`.",
            rows=rows,
            why="With another formula or other numbers it would not go on where `state` is.",
            fix="make the torch optimizer with the numbers and groups of `state.optimizer`.",
        )
    params = dict(zip(names_of(tree.flatten(plain.params)[1]), tree.leaves(plain.params), strict=True))
    for name, slots in ours.slots.items():
        if slots:  # RMSprop and Adadelta keep a step unused; torch's SGD ignores it
            out["state"][entries[name].number] = {
                key: _kept_by_torch(key, leaf, params[name])
                for key, leaf in {"step": plain.step, **slots}.items()
            }
    return out


def _kept_by_torch(key: str, leaf: Tensor, param: Tensor) -> Tensor:
    if key in ("step", "mu_product"):
        return leaf.to(torch.float32, copy=True)
    return as_complex(leaf.clone(), param) if leaf.dim() else leaf.clone()


def _opened(state: Any, function: str) -> tuple[dict[str, Tensor], Any]:
    """The leaves by name, on the host, and the state made of them."""
    if not all(hasattr(state, name) for name in ("params", "opt_state", "optimizer", "step")):
        raise TypeError(
            f"{function}: expected a `TrainState`, got {type(state).__name__}: the optimizer says where its state lies"
        )
    host = state_dict(state)
    return host, tree.unflatten(tree.flatten(state)[1], host.values())


def _surveyed(plain: Any, opt_state: Any) -> Survey:
    found = surveyed(plain.optimizer, opt_state, tree.map(as_real, plain.params))
    if found.unknown:
        raise LayoutError.of(
            "",
            "optim: no class of torch.optim computes what this optimizer does.",
            rows=found.unknown,
            fix="move the state with an optimizer of links that torch.optim has: `sgd`, `adam`, `adamw`, `rmsprop`, "
            "with clips before them and rates behind.",
        )
    return found


def _entries(d: Any, names: Sequence[str] | None, ours: Survey, function: str) -> dict[str, _Entry]:
    """What torch has of each parameter, by our names; nothing for one that is frozen here and unknown there."""
    if not (isinstance(d, Mapping) and {"state", "param_groups"} <= d.keys()):
        raise TypeError(f"{function}: expected `optimizer.state_dict()`, with `state` and `param_groups`")
    groups = d["param_groups"]
    owner = {number: group for group in groups for number in group["params"]}
    kept = [name for group in groups for name in group.get("param_names", ())]
    if names is None and not all("param_names" in group for group in groups):
        raise ValueError(
            f"{function}: the dict numbers its parameters and has no names. To fix: `names=[name for name, _ in "
            "model.named_parameters()]`, in the order in which the optimizer got them, group after group."
        )
    names = kept if names is None else list(names)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"{function}: expected names, got {names[0]!r}. To fix: `names=[name for name, _ in ...]`."
        )
    if kept and [_bare(name, ours) for name in kept] != [_bare(name, ours) for name in names]:
        raise ValueError(
            f"{function}: `names` differ from those in the dict, {kept}. To fix: leave `names` out."
        )
    if len(names) != len(owner):
        raise ValueError(f"{function}: {len(names)} names for {len(owner)} parameters of the torch optimizer")
    updated = {number: kept for number, kept in d["state"].items() if kept.get("step") != 0}
    found = {
        _bare(name, ours): _Entry(group, number, dict(updated.get(number, {})))
        for name, (number, group) in zip(names, owner.items(), strict=True)
    }
    if d["state"]:  # what torch has never updated may be frozen here
        found = {name: entry for name, entry in found.items() if name in ours.slots or entry.kept}
        names = [name for name in names if _bare(name, ours) in found]
    rows = [f"{name}  expected a parameter of `state`   got none" for name in found if name not in ours.slots]
    rows += [
        f"{name}  expected in the torch optimizer   got nothing"
        for name, slots in ours.slots.items()
        if name not in found and (slots or ours.numbers[name])
    ]
    if len(found) < len(names):
        rows.append(f"names  expected {len(names)} of them   got {len(found)}, and others twice")
    if rows:
        raise LayoutError.of(
            "",
            f"{function}: the parameters of the torch optimizer are not those of `state`.",
            rows=rows,
            fix="name them as `fcg.state_dict(state.params)` does (a tied weight by its first name, as "
            "`named_parameters()` does), and leave out of training what torch left out: "
            "`optim.partition(..., optim.set_to_zero())`.",
        )
    return {**{name: _Entry({}, -1, {}) for name in ours.slots}, **found}


def _bare(name: str, ours: Survey) -> str:
    """The name without the prefixes of wrappers, unless it is one of ours as it stands."""
    bare = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return name if name in ours.slots else bare


def _differences(
    ours: Survey, entries: Mapping[str, _Entry], place: Mapping[int, str]
) -> tuple[list[str], dict[str, Any]]:
    """Rows for what differs, and values for the numbers in the state."""
    rows: list[str] = []
    values: dict[str, Any] = {}
    for name, entry in entries.items():
        known = set(ours.slots[name])
        got = {key for key, value in entry.kept.items() if value is not None}
        # RMSprop and Adadelta keep a count that their formulas do not use.
        if got and (known - got or got - known - {"step"}):
            rows.append(f"{name}  expected {_words(known)}   got {_words(got)}")
        mine, decays = ours.numbers[name], _number(entry.group, "weight_decay")
        for key, number in {**NEUTRAL, **mine}.items():
            theirs = _number(entry.group, key)
            if theirs is None:
                if entry.group and key in mine and key not in _OPTIONAL and (number or key == "amsgrad"):
                    shown = "a schedule" if callable(number) else repr(number)
                    rows.append(f"{name}: {key}  expected {shown}   got nothing")
            elif callable(number) or not mine or (key == "decoupled_weight_decay" and not decays):
                continue
            elif isinstance(number, Tensor) and id(number) in place:
                slot = place[id(number)]
                value = values.setdefault(slot, torch.tensor(float(theirs), dtype=number.dtype))
                if float(value) != float(theirs):
                    rows.append(
                        f"{name}: {key}  expected {float(value)!r}, as for the others   got {theirs!r}"
                    )
            elif number is None or float(_rounded(number, theirs)) != float(theirs):
                rows.append(f"{name}: {key}  expected {number!r}   got {theirs!r}")
    return rows, values


def _rounded(number: Any, theirs: Any) -> Any:
    """The number, as a tensor of torch's has rounded it."""
    return torch.as_tensor(float(number), dtype=theirs.dtype) if isinstance(theirs, Tensor) else number


def _words(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"


def _number(group: Mapping[str, Any], key: str) -> Any:
    """A number of a group; one of a tuple by its index."""
    name, _, index = key.partition(" ")
    value = group.get(name)
    value = value[int(index)] if index and value is not None else value
    return value if isinstance(value, int | float | Tensor) else None


def _put(group: dict[str, Any], key: str, value: float) -> None:
    name, _, index = key.partition(" ")
    if index and name in group:
        group[name] = tuple(value if i == int(index) else one for i, one in enumerate(group[name]))
    elif name in group and not isinstance(group[name], bool):
        held = group[name]
        group[name] = torch.full_like(held, value) if isinstance(held, Tensor) else value
