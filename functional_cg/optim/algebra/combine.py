"""Combines transformations: in sequence, on part of the tree, by label, or on one vector."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from functional_cg import tree
from functional_cg.optim.algebra.base import (
    Advance,
    Checked,
    Combined,
    GradientTransformation,
    OptState,
    Params,
    Rule,
    StepFn,
    Updates,
    by_update,
    need_params,
    need_transformations,
    require,
)
from functional_cg.optim.algebra.fitting import in_dtypes_of
from functional_cg.optim.algebra.selection import (
    FrozenTree,
    broadcast_prefix,
    freeze,
    replace_selected,
    resolve_flags,
    select,
    thaw,
)
from functional_cg.state.flat import ravel, unravel


class Sequence(Combined):
    """Transformations in sequence, each of which gets what the one before has made; its state is a tuple of theirs."""

    links: Any  # a tuple of transformations

    @property
    def parts(self) -> tuple[GradientTransformation, ...]:
        return self.links  # type: ignore[no-any-return]

    @property
    def paths(self) -> list[tuple[GradientTransformation, ...]]:
        ways: list[tuple[GradientTransformation, ...]] = [()]
        for link in self.links:
            ways = _distinct((*way, *path) for way, path in itertools.product(ways, link.paths))
        return ways

    def init(self, params: Params) -> OptState:
        return tuple(link.init(params) for link in self.links)

    def run(self, advance: Advance, updates: Updates, state: OptState, params: Any) -> tuple[Any, OptState]:
        if advance is not by_update and tree.leaves(state[:-1]):  # moments before the last link
            updates = in_dtypes_of(params, updates)
        states = []
        for i, (link, old) in enumerate(zip(self.links, state, strict=True), 1):
            updates, new = (advance if i == len(state) else by_update)(link, updates, old, params)
            states.append(new)
        return updates, tuple(states)

    def rules(self, state: OptState, params: Params) -> Iterator[Rule]:
        for link, own in zip(self.links, state, strict=True):
            yield from link.rules(own, params)

    @property
    def step(self) -> StepFn | None:
        return super().step if self.links and self.links[-1].step is not None else None


@dataclass(frozen=True, init=False, repr=False)
class chain(Sequence):
    """Apply transformations in sequence, feeding the output of each to the next.

    The state is a tuple of their states. If the last link has a fused ``step``, the chain has one too, which treats
    the output of the earlier links as the gradients. Source: ``optax.chain``.

    Attributes:
      links: The transformations.

    Example:
      >>> from functional_cg import optim
      >>> optim.chain(optim.clip_by_global_norm(1.0), optim.add_decayed_weights(0.1))
      chain(clip_by_global_norm(max_norm=1.0, order=2), add_decayed_weights(weight_decay=0.1, mask=None))
    """

    links: tuple[GradientTransformation, ...]

    def __init__(self, *links: GradientTransformation) -> None:
        need_transformations("chain", *links)
        object.__setattr__(self, "links", links)

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.links))})"


def _distinct(
    paths: Iterable[tuple[GradientTransformation, ...]],
) -> list[tuple[GradientTransformation, ...]]:
    """Return one of all paths whose links play the same roles in turn."""
    kept: dict[Any, tuple[GradientTransformation, ...]] = {}
    for path in paths:
        roles = [link.role for link in path if link.role != "neutral"]
        pairs = zip(
            roles, ["", *roles], strict=False
        )  # one after another of its kind changes nothing, but for rates
        kept.setdefault(tuple(role for role, last in pairs if role != last or role == "rate"), path)
    return list(kept.values())


class MaskedState(NamedTuple):
    """State of :class:`masked`."""

    inner_state: OptState  # None in place of unselected leaves; None if no leaf is selected


@dataclass(frozen=True)
class masked(Checked):
    """Apply ``inner`` where ``mask`` is True and pass the other updates through unchanged.

    ``inner`` sees the tree with None in place of the other leaves. Since those pass through unchanged, ``inner`` must
    not be an optimizer: raw gradients would be *added* to the other parameters.

    Source: ``optax.masked``.

    Attributes:
      inner: A transformation that does not scale by a learning rate.
      mask: A prefix tree of bools, or a function from the parameters to one.
    Raises:
      ValueError: If ``inner`` scales by a learning rate.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> tx = optim.masked(optim.scale(0.5), {"w": True, "b": False})
      >>> grads = {"w": torch.tensor(2.0), "b": torch.tensor(2.0)}
      >>> tx.update(grads, tx.init(grads), grads)[0]
      {'w': tensor(1.), 'b': tensor(2.)}
    """

    inner: GradientTransformation
    mask: Any

    def __post_init__(self) -> None:
        need_transformations("masked", self.inner)
        require(
            not self.inner.applies_learning_rate,
            f"masked: {self.inner!r} scales by a learning rate, and `masked` passes the other leaves through: "
            "their raw gradients would be added to the parameters. To leave leaves out of the weight decay, use "
            "`adamw(..., mask=...)`; to treat leaves differently, use `partition`, with `set_to_zero()` for frozen "
            "ones.",
        )
        super().__post_init__()

    @property
    def paths(self) -> list[tuple[GradientTransformation, ...]]:
        return [*self.inner.paths, (self,)]  # what it passes through is as it came

    def init(self, params: Params) -> MaskedState:
        flags = resolve_flags(self.mask, params)
        return MaskedState(self.inner.init(select(params, flags)) if any(flags) else None)

    def update(
        self, updates: Updates, state: MaskedState, params: Params | None = None
    ) -> tuple[Updates, MaskedState]:
        flags = resolve_flags(self.mask, updates if params is None else params)
        if not any(flags):
            return updates, state
        inner_params = None if params is None else select(params, flags)
        part, inner_state = self.inner.update(select(updates, flags), state.inner_state, inner_params)
        return replace_selected(updates, flags, part), MaskedState(inner_state)

    def rules(self, state: MaskedState, params: Params) -> Iterator[Rule]:
        flags = resolve_flags(self.mask, params)
        return self.inner.rules(state.inner_state, select(params, flags)) if any(flags) else iter(())


class PartitionState(NamedTuple):
    """State of :class:`partition`."""

    inner_states: dict[Any, OptState]  # by label; only the labels that occur


@dataclass(frozen=True, init=False)
class partition(Combined):
    """Transform each leaf according to its label.

    Each transformation sees the tree with None in place of leaves with other labels; an unused label costs nothing.
    The partition has a fused ``step`` if any of the transformations does.

    Source: ``optax.partition`` (formerly ``multi_transform``).

    Attributes:
      transforms: ``{label: transformation}``.
      labels: A prefix tree of labels, or a function from the parameters to one.
    Raises:
      ValueError: At the first use, if a leaf has a label without a transformation.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> tx = optim.partition({"train": optim.sgd(0.5), "freeze": optim.set_to_zero()}, {"w": "train", "b": "freeze"})
      >>> params = {"w": torch.tensor(2.0), "b": torch.tensor(2.0)}
      >>> tx.step(params, tx.init(params), params)[0]
      {'w': tensor(1.), 'b': tensor(2.)}
    """

    transforms: FrozenTree
    labels: Any

    def __init__(
        self,
        transforms: Mapping[Any, GradientTransformation] | FrozenTree,
        labels: Callable[[Params], Any] | Any,
    ) -> None:
        frozen = transforms if isinstance(transforms, FrozenTree) else freeze(dict(transforms))
        need_transformations("partition", *frozen.thaw().values())
        object.__setattr__(self, "transforms", frozen)
        object.__setattr__(self, "labels", freeze(labels))

    def _groups(self, params: Params) -> dict[Any, tuple[GradientTransformation, list[bool]]]:
        """Map each label in use to its transformation and to a flag per leaf."""
        labels = self.labels(params) if callable(self.labels) else thaw(self.labels)
        names = broadcast_prefix(labels, params, "labels")
        transforms = self.transforms.thaw()
        for name, (path, _) in zip(names, tree.flatten_with_path(params)[0], strict=True):
            require(
                name in transforms,
                f"partition: {tree.path_string(path, 'params')} has the label {name!r}, "
                f"which is none of {sorted(transforms, key=str)}.\n"
                f"To fix: give it one, `fcg.optim.partition({{..., {name!r}: fcg.optim.sgd(0.1)}}, labels)`.",
            )
        present = sorted(set(names), key=lambda name: (type(name).__name__, repr(name)))
        return {name: (transforms[name], [other == name for other in names]) for name in present}

    def init(self, params: Params) -> PartitionState:
        groups = self._groups(params)
        return PartitionState({name: tx.init(select(params, flags)) for name, (tx, flags) in groups.items()})

    def run(
        self, advance: Advance, updates: Updates, state: PartitionState, params: Any
    ) -> tuple[Any, PartitionState]:
        out, states = (updates if advance is by_update else need_params("partition", params)), {}
        for name, (tx, flags) in self._groups(updates if params is None else params).items():
            own = None if params is None else select(params, flags)
            part, states[name] = advance(tx, select(updates, flags), state.inner_states[name], own)
            out = replace_selected(out, flags, part)
        return out, PartitionState(states)

    def rules(self, state: PartitionState, params: Params) -> Iterator[Rule]:
        for name, (tx, flags) in self._groups(params).items():
            yield from tx.rules(state.inner_states[name], select(params, flags))


@dataclass(frozen=True)
class flatten(Combined):
    """Run ``inner`` on all leaves as one vector: a handful of ops, however many leaves there are.

    Moments become vectors, with the padding of :func:`functional_cg.state.flat.ravel` between leaves. Elementwise
    transformations give the same results as leaf by leaf, up to the last bits (SIMD blocks fall differently), and so
    does a norm of gradients. A norm *after* moments includes their values in the padding: zero for Adam with a
    positive ``eps``, nonzero for Yogi, which does not start at 0.

    ``inner`` never sees the tree: masks and labels go around it, as in
    ``partition({"decay": flatten(adamw(...)), "rest": flatten(adam(...))}, labels)``.

    Source: ``optax.flatten``.

    Attributes:
      inner: A transformation without per-leaf norms. All leaves need one dtype and one device.
    Raises:
      ValueError: If ``inner`` acts leaf by leaf, as ``lamb`` does.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> optimizer = optim.flatten(optim.sgd(0.5))
      >>> params = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
      >>> optimizer.step(params, optimizer.init(params), params)[0]
      {'w': tensor([0.5000, 1.0000]), 'b': tensor(1.5000)}
    """

    inner: GradientTransformation

    def __post_init__(self) -> None:
        need_transformations("flatten", self.inner)
        require(
            not self.inner.acts_per_leaf,
            f"flatten: {self.inner!r} takes a norm per leaf, or a draw; on one vector it would be another optimizer",
        )

    def init(self, params: Params) -> OptState:
        return self.inner.init(ravel(params))

    def run(self, advance: Advance, updates: Updates, state: OptState, params: Any) -> tuple[Any, OptState]:
        like = updates if params is None else params
        vector = None if params is None else ravel(params)
        out, state = advance(self.inner, ravel(in_dtypes_of(like, updates), like), state, vector)
        return unravel(like, out), state
