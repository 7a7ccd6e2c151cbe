"""Defines the gradient transformation: ``init`` and ``update``, two pure functions held as one value.

A :class:`GradientTransformation` turns gradients into updates and passes its state through explicitly::

    opt_state = tx.init(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = apply_updates(params, updates)

Transformations are frozen dataclasses: equal arguments give equal, hashable, printable, picklable objects, so an
optimizer can be a static field of a state and part of the key under which a capture is cached.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.errors import LayoutError
from functional_cg.optim.algebra.arguments import Called, check_numbers, no_such_attribute, seed_of
from functional_cg.optim.algebra.arguments import in_range as in_range
from functional_cg.optim.algebra.arguments import require as require
from functional_cg.optim.algebra.fitting import in_dtypes_of, owners_by_path
from functional_cg.optim.algebra.selection import FrozenTree, freeze, resolve_flags

Params = Any  # PyTree of floating tensors
Updates = Any  # PyTree like Params
OptState = Any  # PyTree of tensors

InitFn = Callable[[Params], OptState]
UpdateFn = Callable[[Updates, OptState, Params | None], tuple[Updates, OptState]]
StepFn = Callable[[Updates, OptState, Params], tuple[Params, OptState]]
Advance = Callable[["GradientTransformation", Updates, OptState, Any], tuple[Any, OptState]]
Rule = tuple["GradientTransformation", OptState, Params]
Scalar = float | Tensor
ScalarOrSchedule = float | Tensor | Callable[[Any], Any]


class EmptyState(NamedTuple):
    """State of a stateless transformation."""


class GradientTransformation(Called):
    """A pure map from gradients to updates that takes its state and returns the next one.

    Subclasses are frozen dataclasses whose fields are the hyperparameters. A Python number in a field is a constant
    of the capture; for a number that changes between calls without a recapture, use a schedule or
    :class:`inject_hyperparams`.

    Source: ``optax.GradientTransformation``, plus the third function :attr:`step`.
    """

    if not TYPE_CHECKING:  # a type checker would let any name pass

        def __getattr__(self, name: str) -> Any:
            raise no_such_attribute(self, name)

    @abstractmethod
    def init(self, params: Params) -> OptState:
        """Build the initial state, on the devices of ``params``."""

    @abstractmethod
    def update(
        self, updates: Updates, state: OptState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        """Transform ``updates``, which are the gradients for the first link of a chain. Writes nothing in place.

        Returns:
          (updates, state): a tree like ``updates``, and the next state, laid out like ``state``.
        """

    @property
    def step(self) -> StepFn | None:
        """``step(grads, state, params) -> (new_params, new_state)`` in one fused op, or None.

        Equal to ``update`` followed by :func:`apply_updates`, within the tolerance that the class states.
        """
        return None

    @property
    def parts(self) -> tuple[GradientTransformation, ...]:
        """The transformations this one is built from."""
        return ()

    def rules(self, state: OptState, params: Params) -> Iterator[Rule]:
        """Yield each transformation that it runs, with the part of ``state`` and of ``params`` that it has.

        What only combines others yields theirs. The state of a transformation is yielded once.
        """
        yield self, state, params

    def owners(self, state: OptState, params: Params) -> list[int | None]:
        """For each leaf of ``state``, as :meth:`rules` yields it, the position of its parameter; None if shared."""
        return owners_by_path(state, params)

    # What it does with a learning rate: "rate" applies one and turns the sign; "direction" makes a direction, in which
    # nothing is left of a rate in front of it; "step" makes steps downhill; "factor" is a learning rate
    # that leaves the sign to others; "neutral" keeps sign and size; yours are "trusted" to go with the others.
    role: str = "trusted"

    @property
    def paths(self) -> list[tuple[GradientTransformation, ...]]:
        """The links that a gradient passes in turn, for ways through the parts that differ as to learning rates."""
        return [path for part in self.parts for path in part.paths] if self.parts else [(self,)]

    @property
    def applies_learning_rate(self) -> bool:
        """Whether the updates are ready to be added to the parameters."""
        return any(link.role in ("rate", "step", "factor") for path in self.paths for link in path)

    @property
    def acts_per_leaf(self) -> bool:
        """Whether leaf boundaries matter, as they do for per-leaf norms and random draws."""
        return any(part.acts_per_leaf for part in self.parts)

    @staticmethod
    def from_functions(init: InitFn, update: UpdateFn, step: StepFn | None = None) -> GradientTransformation:
        """Build a transformation from your own functions.

        Two of these are equal when their functions are; module-level functions keep it picklable.

        Args:
          init: ``init(params) -> state``.
          update: ``update(updates, state, params) -> (updates, state)``, pure.
          step: Optional ``step(grads, state, params) -> (new_params, new_state)``; must equal ``update`` followed by
            :func:`apply_updates`, learning rate included.

        Example:
          >>> import torch
          >>> from functional_cg import optim, tree
          >>> sign = optim.GradientTransformation.from_functions(
          ...     init=lambda params: optim.EmptyState(),
          ...     update=lambda updates, state, params: (tree.map(torch.sign, updates), state),
          ... )
          >>> sign.update({"w": torch.tensor([-3.0, 2.0])}, sign.init(None))[0]
          {'w': tensor([-1.,  1.])}
        """
        return FromFunctions(init, update, step)


@dataclass(frozen=True)
class FromFunctions(GradientTransformation):
    """A transformation that calls user-supplied functions; see :meth:`GradientTransformation.from_functions`."""

    init_fn: InitFn
    update_fn: UpdateFn
    step_fn: StepFn | None = None

    def init(self, params: Params) -> OptState:
        return self.init_fn(params)

    def update(
        self, updates: Updates, state: OptState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        return self.update_fn(updates, state, params)

    @property
    def step(self) -> StepFn | None:
        return self.step_fn

    @property
    def role(self) -> str:  # type: ignore[override]
        return "trusted" if self.step_fn is None else "step"


class Checked(GradientTransformation):
    """A transformation of this package: its arguments are checked, and stored such that it is a value."""

    role = "neutral"

    def __post_init__(self) -> None:
        seed = partial(seed_of, type(self).__name__)
        stored: dict[str, Callable[[Any], Any]] = {"mask": freeze, "labels": freeze, "key": seed}
        for name in stored.keys() & {one.name for one in fields(cast("Any", self))}:
            object.__setattr__(self, name, stored[name](getattr(self, name)))
        check_numbers(self)

    @property
    def parts(self) -> tuple[GradientTransformation, ...]:
        held = [value.leaves if isinstance(value, FrozenTree) else (value,) for value in vars(self).values()]
        return tuple(one for values in held for one in values if isinstance(one, GradientTransformation))


class Link(Checked):
    """A transformation of one leaf after the other, by :attr:`leaf`.

    Its state is the NamedTuple ``keeps``: ``count`` starts at 0, ``product`` at 1, and all else is like the parameters.
    In ``n``, each field is a function: ``n.eps(u)`` is ``eps`` in the dtype of ``u``. With a field ``mask``,
    leaves that it does not select pass unchanged.
    """

    keeps: ClassVar[Any] = EmptyState
    needs_params: ClassVar[bool] = False
    initial_accumulator_value: float = 0.0

    def init(self, params: Params) -> Any:
        one = torch.ones((), dtype=torch.float64, device=device_of(params))
        counters = {"count": zero_count(params), "product": one}
        return self.keeps(
            *(
                counters[name] if name in counters else full_like_tree(params, self.initial_accumulator_value)
                for name in self.keeps._fields
            )
        )

    # ``leaf(n, u, p, *kept) -> u``, or ``(u, *kept)``: one leaf's update, its parameter, and what the state has for it.
    leaf: ClassVar[Callable[..., Any]]

    def begin(self, state: Any) -> tuple[Any, dict[str, Scalar]]:
        """Advance the counters, and compute what all leaves share in this update beside the fields."""
        return (state._replace(count=state.count + 1) if "count" in self.keeps._fields else state), {}

    def update(self, updates: Updates, state: Any, params: Params | None = None) -> tuple[Updates, Any]:
        if self.needs_params:
            params = need_params(type(self).__name__, params)
        flat, treedef = tree.flatten(updates)
        flags = resolve_flags(getattr(self, "mask", None), updates if params is None else params)
        state, more = self.begin(state)
        n = SimpleNamespace(**{name: Shared(value) for name, value in {**vars(self), **more}.items()})
        names = [name for name in self.keeps._fields if name not in ("count", "product")]
        columns = [_aligned(updates, one) for one in (params, *(getattr(state, name) for name in names))]
        rows: list[tuple[Any, ...]] = []
        for u, on, p, *kept in zip(flat, flags, *columns, strict=True):
            out = self.leaf(n, u, p, *kept) if on else (u, *kept)
            rows.append(out if isinstance(out, tuple) else (out,))
        out, *new = ([row[i] for row in rows] for i in range(1 + len(names)))
        changed = {
            name: tree.unflatten(treedef, column)
            for name, column in zip(names, new, strict=True)
            if getattr(state, name) is not None
        }
        return tree.unflatten(treedef, out), state._replace(**changed) if changed else state


class Direction(Link):
    """A link that makes a direction out of gradients: nothing is left of a learning rate in front of it."""

    role = "direction"


class Optimizer(Checked):
    """A transformation whose updates are ready to be added to the parameters."""

    role = "rate"


class Combined(Checked):
    """A transformation that runs others, either by their ``update`` or by their ``step``.

    ``run(advance, updates, state, params)`` is both: ``advance(tx, updates, state, params)`` returns what ``tx`` makes
    of the updates, which is updates again or new parameters, and its next state.
    """

    @abstractmethod
    def run(self, advance: Advance, updates: Updates, state: Any, params: Any) -> tuple[Any, Any]:
        """Run the parts once."""

    def update(self, updates: Updates, state: Any, params: Params | None = None) -> tuple[Updates, Any]:
        return self.run(by_update, updates, state, params)

    @property
    def step(self) -> StepFn | None:
        return partial(self.run, step_or_update) if any(tx.step is not None for tx in self.parts) else None


def by_update(
    tx: GradientTransformation, updates: Updates, state: OptState, params: Params | None
) -> tuple[Updates, OptState]:
    """Transform updates with ``tx.update``."""
    return tx.update(updates, state, params)


class Stepper(Optimizer):
    """An optimizer that computes new parameters, of which its updates are the differences to the old ones."""

    @abstractmethod
    def advance(self, grads: Updates, state: Any, params: Params) -> tuple[Params, Any]:
        """The new parameters and state."""

    def update(
        self, updates: Updates, state: OptState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        params = need_params(type(self).__name__, params)
        new, state = self.advance(updates, state, params)
        return tree.map(torch.sub, new, params), state

    @property
    def step(self) -> StepFn:
        return self.advance


def apply_updates(params: Params, updates: Updates) -> Params:
    """Add ``updates`` to ``params`` leaf by leaf; each leaf keeps its dtype.

    Source: ``optax.apply_updates``.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> optim.apply_updates({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, -0.5])})
      {'w': tensor([1.5000, 1.5000])}
    """
    return tree.map(lambda p, u: (p + u).to(p.dtype), params, updates)


def step_or_update(
    tx: GradientTransformation, grads: Updates, state: OptState, params: Params
) -> tuple[Params, OptState]:
    """Take one step with ``tx.step`` if it exists, otherwise with ``update`` and ``apply_updates``.

    Gradients may have a different floating dtype from the parameters; a ``step`` converts them where it needs to.
    """
    if tx.step is not None:
        return tx.step(grads, state, params)
    made = tx.update(in_dtypes_of(params, grads), state, params)
    if not isinstance(made, tuple) or len(made) != 2:
        raise TypeError(
            f"{type(tx).__name__}.update: expected a pair of updates and state, got {type(made).__name__}.\n"
            "To fix: `return updates, state`."
        )
    return apply_updates(params, made[0]), made[1]


def resting(tx: GradientTransformation, state: OptState, params: Params, positions: set[int]) -> list[bool]:
    """Flag each leaf of the optimizer state that stays as it is while the parameters at ``positions`` do.

    These are the leaves that belong to one of those parameters, and whatever a rule shares among its parameters, such
    as a count, if all of them stay.
    """
    place = {path: i for i, path in enumerate(tree.flatten(params)[1].paths())}
    found: set[int] = set()
    for rule, own, part in tx.rules(state, params):
        stays = [place[path] in positions for path in tree.flatten(part)[1].paths()]
        for leaf, owner in zip(tree.leaves(own), rule.owners(own, part), strict=True):
            if all(stays) if owner is None else stays[owner]:
                found.add(id(leaf))
    return [id(leaf) in found for leaf in tree.leaves(state)]


def device_of(params: Params) -> torch.device:
    """The device for counters: that of the first leaf."""
    return next((leaf.device for leaf in tree.leaves(params)), torch.device("cpu"))


def zero_count(params: Params) -> Tensor:
    """Make a step counter: i64[] with value 0, on the device of the parameters."""
    return torch.zeros((), dtype=torch.int64, device=device_of(params))


def full_like_tree(params: Params, value: float = 0.0) -> Params:
    """Make a tree of accumulators with the shapes, dtypes, strides and devices of ``params``.

    Raises:
      LayoutError: If a leaf is not floating.
    """
    flat, treedef = tree.flatten_with_path(params)
    rows = [
        f"params{tree.path_string(path)}  got {leaf.dtype}"
        for path, leaf in flat
        if not leaf.is_floating_point()
    ]
    if rows:
        raise LayoutError.of(
            "",
            "optim: parameters must be floating; these leaves are not.",
            rows=rows,
            fix="keep integer and boolean tensors in `buffers`, or give the optimizer only a part of the tree with "
            "`optim.partition`; for a complex one, `torch.view_as_real(w)`, as `TrainState` does if it is not sharded.",
        )
    return tree.unflatten(treedef, [torch.full_like(leaf, value) for _, leaf in flat])


def need_params(name: str, params: Params | None) -> Params:
    """Return ``params``, or raise ``ValueError`` if an update that reads them got None."""
    if params is None:
        raise ValueError(
            f"{name}: needs the parameters, got None.\nTo fix: `update(updates, state, params)`."
        )
    return params


def need_transformations(name: str, *given: object) -> None:
    """Raise ``TypeError`` for anything that is not a gradient transformation."""
    for tx in given:
        if not isinstance(tx, GradientTransformation):
            got = f"the class `{tx.__name__}`" if isinstance(tx, type) else f"{type(tx).__name__}: {tx!r}"
            raise TypeError(f"{name}: takes gradient transformations, such as `optim.sgd(0.1)`, got {got}")


def need_steps(name: str, inner: GradientTransformation) -> None:
    """Raise ``ValueError`` for a transformation without a learning rate."""
    need_transformations(name, inner)
    if not inner.applies_learning_rate:  # its text may read a tensor
        raise ValueError(
            f"{name}: {inner!r} makes no steps; put a learning rate behind it, or use an optimizer"
        )


def rate_at(learning_rate: ScalarOrSchedule, count: Any) -> float | Tensor:
    """The learning rate at ``count``: a Python number unchanged, anything else as f64[], rounded later per leaf."""
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    return rate.to(torch.float64) if isinstance(rate, Tensor) else float(rate)


class Shared:
    """A number that all leaves share: a tensor is cast once per dtype and device instead of once per leaf.

    Without the cast, a 0-dim float32 leaf times a float64 scalar would be float64.
    """

    def __init__(self, scalar: Any) -> None:
        self._scalar = scalar
        self._copies: dict[Any, Tensor] = {}

    def __call__(self, leaf: Tensor) -> Any:
        """The number for a leaf; a flag keeps its dtype."""
        scalar = self._scalar
        if not isinstance(scalar, Tensor):
            return scalar
        dtype = leaf.dtype if scalar.is_floating_point() else scalar.dtype
        if (dtype, leaf.device) not in self._copies:
            self._copies[dtype, leaf.device] = scalar.to(device=leaf.device, dtype=dtype)
        return self._copies[dtype, leaf.device]

    @functools.cached_property
    def rest(self) -> Shared:
        """1 minus the number."""
        return Shared(1 - self._scalar)


def _aligned(like: Updates, value: Any) -> list[Any]:
    """What a tree has for each leaf of ``like``; None where it has nothing."""
    found = dict(tree.flatten_with_path(value)[0])
    out = [found.pop(path, None) for path in tree.flatten(like)[1].paths()]
    if found:
        tree.map(lambda one, _: one, like, value)  # raises, and names the differences
    return out
