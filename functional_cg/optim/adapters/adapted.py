"""The transformation that :func:`.proof.from_torch` returns: a torch optimizer class run as pure functions."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.errors import LayoutError
from functional_cg.optim.adapters.hosted import HostNumbers, RefusedError, Shelf, every_way, hosted, number
from functional_cg.optim.algebra.base import (
    Params,
    ScalarOrSchedule,
    Stepper,
    Updates,
    rate_at,
    zero_count,
)
from functional_cg.optim.algebra.fitting import refuse_unlike
from functional_cg.optim.algebra.selection import FrozenTree, thaw
from functional_cg.shards.tensor import Sharded
from functional_cg.tensors.overlap import storage_key


class AdaptedState(NamedTuple):
    """State of a transformation made by :func:`from_torch`."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far
    leaves: tuple[Any, ...]  # per parameter, the state the class keeps, with numbers as f64[]


@dataclass(frozen=True, repr=False)
class Adapted(Stepper):
    """A torch optimizer class adapted by :func:`from_torch`.

    Attributes:
      cls: The class.
      learning_rate: Its ``lr``, a number, f64[] or a schedule; None for the default of the class.
      hyper: Its other arguments.
      joined: Whether the first step has a different formula from later ones.
    """

    cls: type[torch.optim.Optimizer]
    learning_rate: ScalarOrSchedule | None
    hyper: FrozenTree
    joined: bool = field(default=False, compare=False)

    def __repr__(self) -> str:
        rate = {} if self.learning_rate is None else {"lr": self.learning_rate}
        hyper = {**rate, **thaw(self.hyper)}
        module = self.cls.__module__.partition(".")[0]
        home = "torch.optim" if module == "torch" else module
        return f"from_torch({', '.join([f'{home}.{self.cls.__name__}', *(f'{k}={v!r}' for k, v in hyper.items())])})"

    acts_per_leaf = True

    def __post_init__(self) -> None:
        """The class checks its own arguments."""

    def made(self, leaves: Sequence[Tensor], cls: type[torch.optim.Optimizer] | None = None) -> Any:
        """Instantiate the class, or its hosted subclass, for these parameters."""
        rate, hyper = self.learning_rate, thaw(self.hyper)
        if rate is not None:
            hyper["lr"] = rate if isinstance(rate, (int, float)) else 1.0
        return (cls or self.cls)(leaves, **hyper)

    def init(self, params: Params) -> AdaptedState:
        _refuse_sharded(params)
        with torch.no_grad():
            kept = tuple(self._first_kept(leaf) for leaf in tree.leaves(params))
        return AdaptedState(zero_count(params), kept)

    def owners(self, state: AdaptedState, params: Params) -> list[int | None]:
        counts = [len(tree.leaves(kept)) for kept in state.leaves]
        return [None, *(i for i, count in enumerate(counts) for _ in range(count))]

    def advance(self, grads: Updates, state: AdaptedState, params: Params) -> tuple[Params, AdaptedState]:
        refuse_unlike(params, grads)
        leaves, treedef = tree.flatten(params)
        cls, first = hosted(self.cls), state.count == 0
        rate = None if self.learning_rate is None else rate_at(self.learning_rate, state.count)
        with torch.no_grad():
            rows = [
                self._advanced(cls, rate, leaf, grad, old, first)
                for leaf, grad, old in zip(leaves, tree.leaves(grads), state.leaves, strict=True)
            ]
        kept = tuple(own for _, own in rows)
        return tree.unflatten(treedef, [new for new, _ in rows]), AdaptedState(state.count + 1, kept)

    def _advanced(
        self, cls: Any, rate: Any, leaf: Tensor, grad: Tensor, old: Any, first: Tensor
    ) -> tuple[Tensor, Any]:
        """Step one leaf; return its new value and state."""
        flat, treedef = tree.flatten(old)

        def run(ask: Callable[[Tensor], bool]) -> list[Tensor]:
            fresh = self.joined and ask(first)
            start = None if fresh else tree.unflatten(treedef, [one.clone() for one in flat])
            one = _Stepped(self, cls, leaf, rate, grad.to(leaf.dtype, copy=True), start, ask)
            strange = next((name for name in one.moved if name not in old["group"]), None)
            if strange is not None:
                shared = strange in one.group
                where = "for all parameters at once" if shared else "on the object, not in its state"
                raise RefusedError(f"changes `{strange}` {where}")
            names = {name: one.group[name] for name in old["group"]}
            kept, structure = tree.flatten(
                _on_device({"state": dict(one.state), "group": names}, leaf.device)
            )
            if structure != treedef:
                raise RefusedError("keeps other things after one step than after another")
            return [one.leaf, *kept]

        new, *kept = _apart(every_way(run))
        kept = [one.to(like.dtype) for one, like in zip(kept, flat, strict=True)]
        return new, tree.unflatten(treedef, kept)

    def _first_kept(self, leaf: Tensor) -> Any:
        """Initial state of a leaf: the values first assigned during a step with zero gradients."""
        one = _Stepped(self, hosted(self.cls), leaf, None, torch.zeros_like(leaf).contiguous())
        numbers = {name: one.before[name] for name in one.moved if type(one.group.get(name)) in (int, float)}
        kept = {"state": one.state.at_first(), "group": numbers}
        return tree.map(torch.clone, _on_device(kept, leaf.device))


def _refuse_sharded(params: Params) -> None:
    flat, _ = tree.flatten_with_path(params)
    rows = [
        f"{tree.path_string(path, 'params')}  {list(leaf.shape)} {leaf.placement.describe()}"
        for path, leaf in flat
        if isinstance(leaf, Sharded)
    ]
    if rows:
        raise LayoutError.of(
            "",
            "from_torch: an optimizer class sees whole parameters; these lie on a mesh.",
            rows=rows,
            why="A rank holds a shard, and the class would take that for all of it.",
            fix="use a transformation of `optim`; functional_cg/optim/README.md says which has the same formula.",
        )


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Clone tensors that share storage with an earlier one."""
    keys = [storage_key(tensor) for tensor in tensors]
    return [
        one.clone() if key in keys[:i] else one
        for i, (one, key) in enumerate(zip(tensors, keys, strict=True))
    ]


class _First(dict[Any, Any]):
    """The state a class keeps for a parameter; ``first`` has the first value assigned to each name."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[Any, Any] = {}

    def __setitem__(self, name: Any, value: Any) -> None:
        if name not in self:
            self.first[name] = tree.map(lambda one: one.clone() if isinstance(one, Tensor) else one, value)
        super().__setitem__(name, value)

    def at_first(self) -> dict[Any, Any]:
        """Each value as first assigned; zeros where its structure changed later."""
        pairs = {name: (self.first[name], value) for name, value in self.items()}
        return {
            name: first if tree.flatten(first)[1] == tree.flatten(now)[1] else tree.map(torch.zeros_like, now)
            for name, (first, now) in pairs.items()
        }


class _Stepped:
    """An optimizer object for one parameter, after one step.

    Attributes:
      leaf: The parameter.
      group: Its group.
      state: What the class keeps for it.
      before: Contents of the group and the object before the step, except parameters and their state.
      moved: The names whose values the step changed.
    """

    def __init__(
        self,
        of: Adapted,
        cls: Any,
        leaf: Tensor,
        rate: Any,
        grad: Tensor,
        kept: Any = None,
        ask: Callable[[Tensor], bool] = lambda condition: True,
    ) -> None:
        """Run one step from the given state, or from scratch."""
        self.leaf = leaf.detach().clone()
        optimizer = of.made([self.leaf], cls)
        self.group = optimizer.param_groups[0]
        if rate is not None:
            self.group["lr"] = number(rate, leaf.device) if isinstance(rate, Tensor) else rate
        # torch turns them on by default on a GPU; a graph needs neither
        off = {name: False for name in ("foreach", "fused") if self.group.get(name, ...) is None}
        self.group.update(off)
        for place in (self.group, vars(optimizer)):
            lists = {name: value for name, value in place.items() if type(value) is list}
            place.update({k: Shelf(v) for k, v in lists.items() if k not in ("params", "param_groups")})
        self.state = _First()
        for name, value in optimizer.state.get(self.leaf, {}).items():
            self.state[name] = value.contiguous() if isinstance(value, Tensor) else value
        optimizer.state[self.leaf] = self.state
        if kept is not None:
            self.state.update(kept["state"])
            self.group.update(kept["group"])
        self.before = _held(optimizer)
        marks = {name: _mark(value) for name, value in self.before.items()}
        self.leaf.grad = grad
        with warnings.catch_warnings(), torch.device(leaf.device), HostNumbers(leaf.device, ask):
            warnings.simplefilter("ignore")  # warnings about the style of the class itself
            inspect.unwrap(type(optimizer).step)(optimizer)
        self.moved = [name for name, value in _held(optimizer).items() if _mark(value) != marks.get(name)]


def _held(optimizer: Any) -> dict[str, Any]:
    held = {**vars(optimizer), **optimizer.param_groups[0]}
    return {key: value for key, value in held.items() if key not in ("state", "params", "param_groups")}


def _mark(value: Any) -> Any:
    """Fingerprint a value: equal before and after a step that did not change it.

    The entries of a list may change inside: classes use them as a cache shared by all parameters.
    """
    inside = [*value, *value.values()] if isinstance(value, dict) else value
    items = tuple(map(id, inside)) if isinstance(inside, (list, tuple, set)) else ()
    return id(value), getattr(value, "_version", None), items


def _on_device(kept: Any, device: torch.device) -> Any:
    """What a class keeps, with its numbers as f64[]."""

    def moved(value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(device)
        if isinstance(value, (int, float)):
            return number(value, device)
        raise RefusedError(f"keeps {type(value).__name__} {value!r}")

    return tree.map(moved, kept)
