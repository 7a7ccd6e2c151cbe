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
        hyper = thaw(self.hyper)
        if self.learning_rate is not None:
            hyper = {"lr": self.learning_rate, **hyper}
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
        new, kept = [], []
        for leaf, grad, old in zip(leaves, tree.leaves(grads), state.leaves, strict=True):
            with torch.no_grad():
                out = self._advanced(cls, rate, leaf, grad, old, first)
            new.append(out[0])
            kept.append(out[1])
        return tree.unflatten(treedef, new), AdaptedState(state.count + 1, tuple(kept))

    def _advanced(
        self, cls: Any, rate: Any, leaf: Tensor, grad: Tensor, old: Any, first: Tensor
    ) -> tuple[Tensor, Any]:
        """Step one leaf; return its new value and state."""
        flat, treedef = tree.flatten(old)

        def run(ask: Callable[[Tensor], bool]) -> list[Tensor]:
            fresh = self.joined and ask(first)
            start = None if fresh else tree.unflatten(treedef, [one.clone() for one in flat])
            one = _Leaf(self, cls, leaf, rate)
            one.run(grad.to(leaf.dtype, copy=True), start, ask)
            strange = [name for name in one.moved if name not in old["group"]]
            if strange:
                where = (
                    "for all parameters at once"
                    if strange[0] in one.group
                    else "on the object, not in its state"
                )
                raise RefusedError(f"changes `{strange[0]}` {where}")
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
        one = _Leaf(self, hosted(self.cls), leaf, None)
        one.run(torch.zeros_like(leaf).contiguous(), None, lambda condition: True)
        numbers = {name: one.before[name] for name in one.moved if type(one.group.get(name)) in (int, float)}
        kept = {"state": one.first_state(), "group": numbers}
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
    seen: set[Any] = set()
    out = []
    for tensor in tensors:
        key = storage_key(tensor)
        out.append(tensor.clone() if key in seen else tensor)
        seen.add(key)
    return out


class _First(dict[Any, Any]):
    """The state a class keeps for a parameter; ``first`` has the first value assigned to each name."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[Any, Any] = {}

    def __setitem__(self, name: Any, value: Any) -> None:
        if name not in self:
            self.first[name] = tree.map(lambda one: one.clone() if isinstance(one, Tensor) else one, value)
        super().__setitem__(name, value)


class _Leaf:
    """An optimizer object for one parameter that lives for one step.

    Attributes:
      before: Contents of the group and the object before the step, except parameters and their state.
      moved: The names whose values the step changed.
    """

    before: dict[str, Any]
    moved: list[str]

    def __init__(self, of: Adapted, cls: Any, leaf: Tensor, rate: Any) -> None:
        self.leaf = leaf.detach().clone()
        self.optimizer = of.made([self.leaf], cls)
        self.group = self.optimizer.param_groups[0]
        if rate is not None:
            self.group["lr"] = number(rate, leaf.device) if isinstance(rate, Tensor) else rate
        for name in ("foreach", "fused"):  # torch turns them on by default on a GPU; a graph needs neither
            if name in self.group and self.group[name] is None:
                self.group[name] = False
        for place in (self.group, vars(self.optimizer)):
            lists = {name: value for name, value in place.items() if type(value) is list}
            place.update({k: Shelf(v) for k, v in lists.items() if k not in ("params", "param_groups")})
        self.state = _First()
        for name, value in self.optimizer.state.get(self.leaf, {}).items():
            self.state[name] = value.contiguous() if isinstance(value, Tensor) else value
        self.optimizer.state[self.leaf] = self.state

    def run(self, grad: Tensor, kept: Any, ask: Callable[[Tensor], bool]) -> None:
        """Run one step from the given state, or from scratch."""
        if kept is not None:
            self.state.update(kept["state"])
            self.group.update(kept["group"])
        self.before = self._held()
        marks = {name: _mark(value) for name, value in self.before.items()}
        self.leaf.grad = grad
        with warnings.catch_warnings(), torch.device(self.leaf.device), HostNumbers(self.leaf.device, ask):
            warnings.simplefilter("ignore")  # warnings about the style of the class itself
            inspect.unwrap(type(self.optimizer).step)(self.optimizer)
        self.moved = [name for name, value in self._held().items() if _mark(value) != marks.get(name)]

    def _held(self) -> dict[str, Any]:
        held = {**vars(self.optimizer), **self.group}
        return {key: value for key, value in held.items() if key not in ("state", "params", "param_groups")}

    def first_state(self) -> dict[Any, Any]:
        """The parameter's state with each value as first assigned; zeros where the structure changed later."""
        kept = {}
        for name, value in self.state.items():
            first = self.state.first[name]
            same = tree.flatten(first)[1] == tree.flatten(value)[1]
            kept[name] = first if same else tree.map(torch.zeros_like, value)
        return kept


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
