"""SGD, Adam, AdamW and Adagrad, each with a formula and a fused step.

Each is a transformation that includes its learning rate and spells out ``update`` as a formula. Its ``step`` runs the
fused ATen op that ``torch.optim`` runs with ``fused=True``, bit for bit. Formula and op agree to a few roundings: per
step, relative to the largest number in the leaf, 1e-6 in float32 and 1e-12 in float64.

A learning rate is a Python number (a constant of the capture), a schedule, or f32[]. A parameter the loss does not
use has a zero gradient, not None as in ``torch.optim``: moments and weight decay still move it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.optim.algebra.base import (
    Optimizer,
    Params,
    Scalar,
    ScalarOrSchedule,
    StepFn,
    Updates,
    freeze,
    full_like_tree,
    in_range,
    need_params,
    rate_at,
    rate_in_range,
    shared,
    zero_count,
)
from functional_cg.optim.algebra.fitting import refuse_unlike
from functional_cg.optim.algebra.links import (
    Mask,
    ScaleByAdamState,
    ScaleByRssState,
    TraceState,
    add_decayed_weights,
    check_adam,
    descend,
    scale_by_adam,
    scale_by_rss,
    scale_by_yogi,
    trace,
)
from functional_cg.optim.algebra.selection import resolve_flags
from functional_cg.optim.rules import fused as _fused


def are_numbers(*values: object) -> bool:
    """Whether the fused op accepts these arguments: only its learning rate may be a tensor."""
    return all(isinstance(value, (int, float)) for value in values)


class SgdState(NamedTuple):
    """State of :class:`sgd`."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far
    trace: Updates | None  # momentum, like params; None without momentum


@dataclass(frozen=True)
class sgd(Optimizer):
    r"""Stochastic gradient descent: ``t <- momentum * t + g``, ``p <- p - learning_rate * t``.

    With ``nesterov``, ``p <- p - learning_rate * (g + momentum * t)``. For L2 regularization, put
    ``add_decayed_weights`` before it in a ``chain``. ``step`` runs ``aten._fused_sgd``.

    Source: ``torch.optim.SGD``, ``optax.sgd``; Sutskever et al. 2013.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      momentum: In [0, 1).
      nesterov: Look one step ahead; needs momentum.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.sgd(0.1)
      >>> state = optimizer.init(params)
      >>> optimizer.step({"w": torch.tensor([1.0, -1.0])}, state, params)[0]
      {'w': tensor([0.9000, 2.1000])}
    """

    learning_rate: ScalarOrSchedule
    momentum: Scalar = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        rate_in_range("sgd: learning_rate", self.learning_rate)
        in_range("sgd: momentum", self.momentum, below=1.0)
        if self.nesterov and not self._has_trace:
            raise ValueError("sgd: nesterov=True needs momentum above 0")

    @property
    def _has_trace(self) -> bool:
        return not isinstance(self.momentum, (int, float)) or self.momentum != 0

    def init(self, params: Params) -> SgdState:
        return SgdState(zero_count(params), full_like_tree(params) if self._has_trace else None)

    def update(
        self, updates: Updates, state: SgdState, params: Params | None = None
    ) -> tuple[Updates, SgdState]:
        buffers = state.trace
        if self._has_trace:
            updates, (buffers,) = trace(self.momentum, self.nesterov).update(updates, TraceState(buffers))
        return descend(updates, rate_at(self.learning_rate, state.count)), SgdState(state.count + 1, buffers)

    @property
    def step(self) -> StepFn | None:
        return self._step if are_numbers(self.momentum) else None

    def _step(self, grads: Updates, state: SgdState, params: Params) -> tuple[Params, SgdState]:
        lr = rate_at(self.learning_rate, state.count)

        def call(columns: Any, _: Any) -> Any:
            return _fused.sgd(columns, lr=lr, momentum=self.momentum, nesterov=self.nesterov)

        trees = [params, grads, state.trace] if self._has_trace else [params, grads]
        new, *rest = update_trees(call, trees)
        return new, SgdState(state.count + 1, rest[0] if rest else None)


def update_trees(call: Any, trees: list[Any], tags: list[Any] | None = None) -> list[Any]:
    """Run a fused op over trees of equal structure (params, grads, moments...); return all but the grads."""
    refuse_unlike(trees[0], trees[1])
    treedef = tree.flatten(trees[0])[1]
    columns = [tree.leaves(one) for one in trees]
    if any(p.dtype != g.dtype for p, g in zip(*columns[:2], strict=True)):
        call, tags = _fused.converting(call, columns, tags)
    results = _fused.per_group(call, columns, tags) if columns[0] else [[] for _ in range(len(trees) - 1)]
    return [tree.unflatten(treedef, column) for column in results]


@dataclass(frozen=True)
class AdamLike(Optimizer):
    """A direction computed from Adam's numbers, times the learning rate.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
    """

    learning_rate: ScalarOrSchedule
    b1: Scalar = 0.9
    b2: Scalar = 0.999
    eps: Scalar = 1e-8

    def __post_init__(self) -> None:
        name = type(self).__name__
        rate_in_range(f"{name}: learning_rate", self.learning_rate)
        check_adam(name, self.b1, self.b2, self.eps)

    @property
    def _moments(self) -> scale_by_adam | scale_by_yogi:
        return scale_by_adam(self.b1, self.b2, self.eps)

    def init(self, params: Params) -> ScaleByAdamState:
        return self._moments.init(params)

    def update(
        self, updates: Updates, state: ScaleByAdamState, params: Params | None = None
    ) -> tuple[Updates, ScaleByAdamState]:
        rate = rate_at(self.learning_rate, state.count)
        updates, state = self._moments.update(updates, state, params)
        return descend(self._directed(updates, params), rate), state

    def _directed(self, updates: Updates, params: Params | None) -> Updates:
        """The direction, given the scaled moments."""
        return updates

    def _run_fused(self, op: Any, columns: Any, lr: Scalar, count: Tensor, weight_decay: Scalar = 0.0) -> Any:
        return _fused.adam(
            op, columns, lr=lr, count=count, b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=weight_decay
        )


@dataclass(frozen=True)
class DecayedAdam(AdamLike):
    """:class:`AdamLike` with decoupled weight decay.

    Attributes:
      weight_decay: Number or f32[]; no default.
      mask: Which leaves decay: None for all, a prefix tree of bools, or a function from the parameters to one.
    """

    weight_decay: Scalar = field(kw_only=True)
    mask: Mask = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range(f"{type(self).__name__}: weight_decay", self.weight_decay)
        object.__setattr__(self, "mask", freeze(self.mask))

    def _directed(self, updates: Updates, params: Params | None) -> Updates:
        return add_decayed_weights(self.weight_decay, self.mask).update(updates, (), params)[0]

    def update(
        self, updates: Updates, state: ScaleByAdamState, params: Params | None = None
    ) -> tuple[Updates, ScaleByAdamState]:
        return super().update(updates, state, need_params(type(self).__name__, params))


@dataclass(frozen=True)
class adam(AdamLike):
    r"""Adam: ``p <- p - learning_rate * mu_hat / (sqrt(nu_hat) + eps)``; see ``scale_by_adam``.

    ``step`` runs ``aten._fused_adam``. Moments have the dtypes of the parameters.

    Source: Kingma and Ba 2015; ``torch.optim.Adam``, ``optax.adam``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.adam(0.1)
      >>> optimizer.step({"w": torch.tensor([1.0, -1.0])}, optimizer.init(params), params)[0]
      {'w': tensor([0.9000, 2.1000])}
    """

    @property
    def step(self) -> StepFn | None:
        return self._step if are_numbers(self.b1, self.b2, self.eps) else None

    def _step(
        self, grads: Updates, state: ScaleByAdamState, params: Params
    ) -> tuple[Params, ScaleByAdamState]:
        lr, count = rate_at(self.learning_rate, state.count), state.count + 1

        def call(columns: Any, _: Any) -> Any:
            return self._run_fused(_fused.aten._fused_adam, columns, lr, count)

        params, mu, nu = update_trees(call, [params, grads, state.mu, state.nu])
        return params, ScaleByAdamState(count, mu, nu)


@dataclass(frozen=True)
class adamw(DecayedAdam):
    r"""AdamW: Adam with decoupled weight decay.

    ``p <- p - learning_rate * (mu_hat / (sqrt(nu_hat) + eps) + weight_decay * p)``; see ``scale_by_adam``.

    ``weight_decay`` has no default: ``optax.adamw`` silently decays by 1e-4, and ``torch.optim.AdamW`` by 1e-2.
    ``step`` runs ``aten._fused_adamw``; with a ``mask``, it runs once for the decayed leaves and once for the rest,
    bitwise equal to ``torch.optim`` with two parameter groups.

    Source: Loshchilov and Hutter 2019; ``torch.optim.AdamW``, ``optax.adamw``.

    Attributes:
      learning_rate: Number, f32[], or schedule; also scales the decay.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
      weight_decay: Number or f32[].
      mask: Which leaves decay: None for all, a prefix tree of bools, or a function from the parameters to one.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(1.0)}
      >>> optimizer = optim.adamw(0.1, weight_decay=0.5, mask={"w": True, "b": False})
      >>> optimizer
      adamw(learning_rate=0.1, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.5, mask={'w': True, 'b': False})
      >>> grads = {"w": torch.tensor([1.0, -1.0]), "b": torch.tensor(0.0)}
      >>> optimizer.step(grads, optimizer.init(params), params)[0]
      {'w': tensor([0.8500, 2.0000]), 'b': tensor(1.)}
    """

    @property
    def step(self) -> StepFn | None:
        return self._step if are_numbers(self.b1, self.b2, self.eps) else None

    def _step(
        self, grads: Updates, state: ScaleByAdamState, params: Params
    ) -> tuple[Params, ScaleByAdamState]:
        lr, count = rate_at(self.learning_rate, state.count), state.count + 1
        keep = shared(1 - lr * self.weight_decay if isinstance(self.weight_decay, Tensor) else 1.0)

        def call(columns: Any, decays: Any) -> Any:
            weight_decay = self.weight_decay if decays else 0.0
            if isinstance(weight_decay, Tensor):  # the op takes only a number: apply the same factor first
                leaves = torch._foreach_mul(columns[0], keep(columns[0][0]))
                columns, weight_decay = [leaves, *columns[1:]], 0.0
            return self._run_fused(_fused.aten._fused_adamw, columns, lr, count, weight_decay)

        flags = resolve_flags(self.mask, params)
        params, mu, nu = update_trees(call, [params, grads, state.mu, state.nu], flags)
        return params, ScaleByAdamState(count, mu, nu)


class AdagradState(NamedTuple):
    """State of :class:`adagrad`."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far
    sum_of_squares: Updates  # like params


@dataclass(frozen=True)
class adagrad(Optimizer):
    r"""Adagrad: ``s <- s + g^2``, ``p <- p - learning_rate * g / (sqrt(s) + eps)``.

    ``eps`` and the initial ``s`` are those of torch; ``optax.adagrad`` starts at 0.1 with ``eps=1e-7`` inside of
    the root. ``step`` runs ``aten._fused_adagrad``.

    Source: Duchi et al. 2011; ``torch.optim.Adagrad``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      initial_accumulator_value: Initial value of the sums.
      eps: Added outside the root.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.adagrad(0.1)
      >>> optimizer.step({"w": torch.tensor([3.0, -3.0])}, optimizer.init(params), params)[0]
      {'w': tensor([0.9000, 2.1000])}
    """

    learning_rate: ScalarOrSchedule
    initial_accumulator_value: float = 0.0
    eps: Scalar = 1e-10

    def __post_init__(self) -> None:
        rate_in_range("adagrad: learning_rate", self.learning_rate)
        in_range("adagrad: initial_accumulator_value", self.initial_accumulator_value)
        in_range("adagrad: eps", self.eps)

    def init(self, params: Params) -> AdagradState:
        return AdagradState(zero_count(params), full_like_tree(params, self.initial_accumulator_value))

    def update(
        self, updates: Updates, state: AdagradState, params: Params | None = None
    ) -> tuple[Updates, AdagradState]:
        rate = rate_at(self.learning_rate, state.count)
        scaled, (sums,) = scale_by_rss(eps=self.eps).update(updates, ScaleByRssState(state.sum_of_squares))
        return descend(scaled, rate), AdagradState(state.count + 1, sums)

    @property
    def step(self) -> StepFn | None:
        return self._step if are_numbers(self.eps) else None

    def _step(self, grads: Updates, state: AdagradState, params: Params) -> tuple[Params, AdagradState]:
        lr, count = rate_at(self.learning_rate, state.count), state.count + 1

        def call(columns: Any, _: Any) -> Any:
            return _fused.adagrad(columns, lr=lr, count=count, eps=self.eps)

        params, sums = update_trees(call, [params, grads, state.sum_of_squares])
        return params, AdagradState(count, sums)
