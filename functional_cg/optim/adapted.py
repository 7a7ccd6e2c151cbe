"""Optimizer classes of other libraries as gradient transformations."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.errors import CaptureError
from functional_cg.optim.base import (
    FrozenTree,
    Optimizer,
    Params,
    ScalarOrSchedule,
    StepFn,
    Updates,
    freeze,
    need_params,
    rate_at,
    refuse_unlike,
    thaw,
    zero_count,
)
from functional_cg.optim.hosted import HostNumbers, RefusedError, Shelf, every_way, hosted, number
from functional_cg.overlap import storage_key

STEPS = 12  # of the proof
TOLERANCE = 1e-5  # of the proof in f64, of the way that a leaf has gone so far: some classes compute in f32
# Leaves of the proof; a class that takes matrices alone has the second row.
_SHAPES = (((3, 4), (5,)), ((3, 4), (4, 2)))

# What stands here for a class that cannot be adapted.
NATIVE = MappingProxyType({"Lookahead": "optim.lookahead(inner, sync_period, slow_step_size)"})


class AdaptedState(NamedTuple):
    """State of an optimizer made by :func:`from_torch`."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far
    leaves: tuple[Any, ...]  # for each parameter, what the class keeps of it; its numbers are f64[]


@dataclass(frozen=True, repr=False)
class Adapted(Optimizer):
    """What :func:`from_torch` returns.

    Attributes:
      cls: The class.
      learning_rate: Its ``lr``, a number, f64[] or a schedule; None where the class has its default.
      hyper: Its other arguments.
      joined: Whether the first step is another formula than those after it.
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

    @property
    def acts_per_leaf(self) -> bool:
        return True

    def made(self, leaves: Sequence[Tensor], cls: type[torch.optim.Optimizer] | None = None) -> Any:
        """An object of the class, or of its hosted subclass, for these parameters."""
        rate, hyper = self.learning_rate, thaw(self.hyper)
        if rate is not None:
            rate = rate(0) if callable(rate) else rate
            hyper["lr"] = 1.0 if isinstance(rate, Tensor) else rate
        return (cls or self.cls)(leaves, **hyper)

    def init(self, params: Params) -> AdaptedState:
        with torch.no_grad():
            kept = tuple(self._first_kept(leaf) for leaf in tree.leaves(params))
        return AdaptedState(zero_count(params), kept)

    def update(
        self, updates: Updates, state: AdaptedState, params: Params | None = None
    ) -> tuple[Updates, AdaptedState]:
        params = need_params("from_torch", params)
        new, state = self._step(updates, state, params)
        return tree.map(torch.sub, new, params), state

    @property
    def step(self) -> StepFn | None:
        return self._step

    def _step(self, grads: Updates, state: AdaptedState, params: Params) -> tuple[Params, AdaptedState]:
        refuse_unlike(params, grads, dtypes=True)
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
        """One leaf and what is kept of it, after a step."""
        flat, treedef = tree.flatten(old)

        def run(ask: Callable[[Tensor], bool]) -> list[Tensor]:
            fresh = self.joined and ask(first)
            start = None if fresh else tree.unflatten(treedef, [one.clone() for one in flat])
            one = _Leaf(self, cls, leaf, rate)
            one.run(grad.clone(), start, ask)
            strange = [name for name in one.moved() if name not in old["group"]]
            if strange:
                raise RefusedError(
                    f"changes its `{strange[0]}`, of all parameters at once, on some steps only"
                )
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
        """What is kept of a leaf before the first step: values as they are first assigned, of gradients of zeros."""
        one = _Leaf(self, hosted(self.cls), leaf, None)
        one.run(torch.zeros_like(leaf).contiguous(), None, lambda condition: True)
        numbers = [name for name in one.moved() if _is_number(one.group.get(name))]
        kept = {"state": one.first_state(), "group": {name: one.before[name] for name in numbers}}
        return tree.map(torch.clone, _on_device(kept, leaf.device))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors, each in memory of its own."""
    seen: set[Any] = set()
    out = []
    for tensor in tensors:
        key = storage_key(tensor)
        out.append(tensor.clone() if key in seen else tensor)
        seen.add(key)
    return out


class _First(dict[Any, Any]):
    """What a class keeps of a parameter; remembers the value that each name had first."""

    def __init__(self, made: Mapping[Any, Any]) -> None:
        super().__init__()
        self.first: dict[Any, Any] = {}
        for name, value in made.items():
            self[name] = value

    def __setitem__(self, name: Any, value: Any) -> None:
        if name not in self:
            self.first[name] = _copied(value)
        super().__setitem__(name, value)


class _Leaf:
    """A class at work on one parameter: an object of it that lives for one step."""

    def __init__(self, of: Adapted, cls: Any, leaf: Tensor, rate: Any) -> None:
        self.leaf = leaf.detach().clone()
        self.optimizer = of.made([self.leaf], cls)
        self.group = self.optimizer.param_groups[0]
        if rate is not None:
            self.group["lr"] = number(rate, leaf.device) if isinstance(rate, Tensor) else rate
        for place in (self.group, vars(self.optimizer)):
            lists = {name: value for name, value in place.items() if type(value) is list}
            place.update({k: Shelf(v) for k, v in lists.items() if k not in ("params", "param_groups")})
        made = self.optimizer.state.get(self.leaf, {})
        self.state = _First({k: v.contiguous() if isinstance(v, Tensor) else v for k, v in made.items()})
        self.optimizer.state[self.leaf] = self.state

    def run(self, grad: Tensor, kept: Any, ask: Callable[[Tensor], bool]) -> None:
        """One step, from what was kept, or from the start."""
        if kept is not None:
            self.state.update(kept["state"])
            self.group.update(kept["group"])
        self.before = {**vars(self.optimizer), **self.group}
        self.leaf.grad = grad
        with torch.device(self.leaf.device), HostNumbers(self.leaf.device, ask):
            inspect.unwrap(type(self.optimizer).step)(self.optimizer)

    def moved(self) -> list[str]:
        """Which numbers, tensors and texts of the group or of the object itself the step has changed."""
        after = {**vars(self.optimizer), **self.group}
        held = [k for k, v in after.items() if isinstance(v, (int, float, str, Tensor))]
        return [name for name in held if after[name] is not self.before.get(name)]

    def first_state(self) -> dict[Any, Any]:
        """What is kept of the parameter, in values as they were first assigned; zeros for what was filled later."""
        first = self.state.first
        return {
            name: first[name]
            if _structure(first[name]) == _structure(value)
            else tree.map(torch.zeros_like, value)
            for name, value in self.state.items()
        }


def _copied(value: Any) -> Any:
    if isinstance(value, (dict, list, tuple)):
        return tree.map(_copied, value)
    return value.clone() if isinstance(value, Tensor) else value


def _structure(value: Any) -> Any:
    return tree.flatten(value)[1] if isinstance(value, (dict, list, tuple)) else None


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _on_device(item, device) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_on_device(item, device) for item in value]
    if isinstance(value, Tensor):
        return value.to(device)
    if value is None:
        return None
    if isinstance(value, (int, float)):
        return number(value, device)
    raise RefusedError(f"keeps {type(value).__name__} {value!r}")


# -- the proof ----------------------------------------------------------------------------------------------------


def from_torch(cls: type[torch.optim.Optimizer], **hyper: Any) -> Adapted:
    """Turn a class of ``torch.optim``, ``torch_optimizer`` or your own into a gradient transformation.

    The step of the class runs as a pure function: its counts and bias corrections are f64[] on the device, a branch on
    them or on data is computed both ways and joined by ``torch.where``, and each parameter has an object of its own,
    so that a class whose parameters act on each other is refused. Where the first step is another formula, both are
    computed. Prefer a transformation of this package where there is one: it computes nothing twice.

    Before it returns, it runs the class itself and what it made of it for 12 steps beside each other, in f64.

    State: a count, and for each parameter what the class keeps of it, its numbers as f64[].

    Args:
      cls: The class.
      hyper: What it is constructed with. ``lr`` may be a schedule, or f64[] of a state.
    Raises:
      TypeError: If ``cls`` is no optimizer class, or a number other than ``lr`` is a tensor.
      CaptureError: If the two differ, or the step asks for what only the host has; it names the class.

    Example:
      >>> from functional_cg import optim
      >>> optimizer = optim.from_torch(torch.optim.SGD, lr=0.5, momentum=0.9)
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer.step({"w": torch.tensor([1.0, -1.0])}, optimizer.init(params), params)[0]
      {'w': tensor([0.5000, 2.5000])}
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(
            f"from_torch: takes an optimizer class, as in `from_torch(torch.optim.NAdam, lr=0.1)`, got {cls!r}"
        )
    tensors = [name for name, value in hyper.items() if name != "lr" and isinstance(value, Tensor)]
    if tensors:
        raise TypeError(f"from_torch: `{tensors[0]}` is a tensor; of the numbers only `lr` may be one")
    learning_rate = hyper.pop("lr", None)
    pairs = freeze(dict(hyper))
    if isinstance(learning_rate, Tensor):  # one of a state: proved with a number before, and not read here
        return Adapted(cls, learning_rate, pairs, joined=True)
    reasons: list[str] = []
    for joined in (False, True):
        candidate = Adapted(cls, learning_rate, pairs, joined=joined)
        reason = _difference(candidate)
        if not reason:
            return candidate
        reasons.append(reason)
    raise _refusal(cls, reasons[-1])


def _refusal(cls: type, reason: str) -> CaptureError:
    native = NATIVE.get(cls.__name__)
    other = (
        "write its formula as a transformation, `optim.GradientTransformation.from_functions(init, update)`."
    )
    return CaptureError.of(
        "",
        f"from_torch: `{cls.__module__.partition('.')[0]}.{cls.__name__}` cannot be made a pure function.",
        rows=[f"{cls.__name__}  {reason}"],
        why="A graph repeats kernels: what the host decides or keeps is decided once, for ever.",
        fix=f"use `{native}`." if native else other,
    )


def _problem(shapes: Any) -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(0)

    def tensors() -> list[Tensor]:
        return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]

    return tensors(), [tensors() for _ in range(STEPS)]


def _constructed(tx: Adapted) -> tuple[Any, list[Tensor], list[list[Tensor]]]:
    """The class itself on the leaves of the proof, and gradients for them."""
    for shapes in _SHAPES[:-1]:
        params, grads = _problem(shapes)
        try:
            return tx.made(params), params, grads
        except ValueError:
            continue  # a class of matrices alone; or wrong arguments, which are wrong for matrices too
    params, grads = _problem(_SHAPES[-1])
    return tx.made(params), params, grads


def _difference(tx: Adapted) -> str:
    """How what was made of a class differs from it; empty if it does not."""
    try:
        optimizer, theirs, steps = _constructed(tx)
    except ValueError:
        raise  # the class' own words on its arguments
    except Exception as error:
        return f"cannot be constructed of parameters: {_words(error)}"
    start, rate = [leaf.clone() for leaf in theirs], tx.learning_rate
    ours = start
    try:
        state = tx.init(ours)
        for count, grads in enumerate(steps):
            for leaf, grad in zip(theirs, grads, strict=True):
                leaf.grad = grad.clone()
            if callable(rate):
                optimizer.param_groups[0]["lr"] = float(rate(count))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the class, on its own style
                optimizer.step()
                ours, state = tx._step(grads, state, ours)
            gap = max(_gap(*three) for three in zip(ours, theirs, start, strict=True))
            if not gap <= TOLERANCE:
                return (
                    f"differs from itself as a function at step {count + 1}, by {gap:.1e} of the way so far"
                )
    except RefusedError as error:
        return str(error)
    except Exception as error:
        return f"its step raises {_words(error)}"
    return ""


def _gap(ours: Tensor, theirs: Tensor, start: Tensor) -> float:
    return float((ours - theirs).abs().max() / (theirs - start).abs().max())


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
