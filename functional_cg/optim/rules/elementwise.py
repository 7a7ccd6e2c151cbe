"""Elementwise optimizers without a step count: SGD, Adagrad, RMSprop, Adadelta and Lion."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_cg.optim.algebra.arithmetic import averaged
from functional_cg.optim.algebra.base import (
    Direction,
    GradientTransformation,
    Params,
    Scalar,
    ScalarOrSchedule,
    StepFn,
    Updates,
    full_like_tree,
    require,
)
from functional_cg.optim.algebra.links import Mask, add_decayed_weights, scale_by_learning_rate, trace
from functional_cg.optim.rules.aliases import Alias, Fused


@dataclass(frozen=True)
class sgd(Fused):
    r"""Stochastic gradient descent: ``t <- momentum * t + g``, ``p <- p - learning_rate * t``.

    With ``nesterov``, ``p <- p - learning_rate * (g + momentum * t)``. With ``weight_decay``, ``g`` is ``g +
    weight_decay * p`` (L2 regularization). ``step`` runs ``aten._fused_sgd``, unless the decay is in the state.

    Source: ``torch.optim.SGD``, ``optax.sgd``; Sutskever et al. 2013.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      momentum: In [0, 1).
      nesterov: Look one step ahead; needs momentum.
      weight_decay: Number or f32[].
      mask: Which leaves decay, as in :class:`add_decayed_weights`.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.sgd(0.1)
      >>> state = optimizer.init(params)
      >>> optimizer.step({"w": torch.tensor([1.0, -1.0])}, state, params)[0]
      {'w': tensor([0.9000, 2.1000])}
    """

    momentum: Scalar = 0.0
    nesterov: bool = False
    weight_decay: Scalar = 0.0
    mask: Mask = None

    packet = torch.ops.aten._fused_sgd
    names = MappingProxyType({"momentum": "momentum", "nesterov": "nesterov"})
    # A trace of zeros replaces `is_first_step`, a Python bool that a capture would freeze.
    constants = MappingProxyType({"dampening": 0.0, "is_first_step": False})

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.nesterov or _acts(self.momentum), "sgd: nesterov=True needs momentum above 0")

    @property
    def links(self) -> tuple[GradientTransformation, ...]:
        decay = (add_decayed_weights(self.weight_decay, self.mask),) if _acts(self.weight_decay) else ()
        moving = (trace(self.momentum, self.nesterov),) if _acts(self.momentum) else ()
        return *decay, *moving, scale_by_learning_rate(self.learning_rate)

    @property
    def step(self) -> StepFn | None:
        return None if isinstance(self.weight_decay, Tensor) else super().step


def _acts(number: Scalar) -> bool:
    """Whether a number needs a link: it is not 0."""
    return isinstance(number, Tensor) or number != 0


class ScaleByRssState(NamedTuple):
    """State of :class:`scale_by_rss`."""

    count: Tensor  # type: ignore[assignment]  # i64[], updates so far
    sum_of_squares: Updates  # like params


@dataclass(frozen=True)
class scale_by_rss(Direction):
    """Scale by the root of the sum of squared updates: ``s <- s + u^2``, giving ``u / (sqrt(s) + eps)``.

    ``eps`` is outside the root and ``s`` starts at 0, as in ``torch.optim.Adagrad``; ``optax.scale_by_rss`` has it
    inside and starts at 0.1.

    Attributes:
      initial_accumulator_value: Initial value of the sums.
      eps: Added outside the root.
    """

    initial_accumulator_value: float = 0.0
    eps: Scalar = 1e-10

    keeps = ScaleByRssState

    def leaf(self, n: Any, u: Tensor, p: Any, s: Tensor) -> tuple[Tensor, Tensor]:
        s = s + u * u
        return u / (s.sqrt() + n.eps(s)), s


@dataclass(frozen=True)
class adagrad(Fused):
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

    initial_accumulator_value: float = 0.0
    eps: Scalar = 1e-10

    rule = (scale_by_rss,)
    packet = torch.ops.aten._fused_adagrad
    names = MappingProxyType({"eps": "eps"})
    constants = MappingProxyType({"lr_decay": 0.0})


class ScaleByRmsState(NamedTuple):
    """State of :class:`scale_by_rms`."""

    nu: Updates  # running mean of squares, like params
    mu: Updates | None  # running mean, like params; None unless it is subtracted


@dataclass(frozen=True)
class scale_by_rms(Direction):
    """Scale by the running root mean square: ``nu <- decay nu + (1 - decay) u^2``, ``u / (sqrt(nu) + eps)``.

    With ``centered``, scale by the standard deviation, ``sqrt(nu - mu^2)`` with the running mean ``mu``.

    State: nu like params; mu too with ``centered``.

    Source: Hinton 2012, lecture 6e; ``torch.optim.RMSprop``. ``optax.scale_by_rms`` has ``eps`` inside the root.

    Attributes:
      decay: In [0, 1).
      eps: Added outside the root.
      centered: Subtract the mean.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> link = optim.scale_by_rms(decay=0.75)
      >>> link.update({"w": torch.tensor([4.0, -2.0])}, link.init({"w": torch.zeros(2)}))[0]
      {'w': tensor([ 2., -2.])}
    """

    decay: Scalar = 0.99
    eps: Scalar = 1e-8
    centered: bool = False

    keeps = ScaleByRmsState

    def init(self, params: Params) -> ScaleByRmsState:
        return ScaleByRmsState(full_like_tree(params), full_like_tree(params) if self.centered else None)

    def leaf(self, n: Any, u: Tensor, p: Any, nu: Tensor, mu: Tensor | None) -> tuple[Tensor | None, ...]:
        nu = averaged(n.decay, nu, torch.square(u))
        mu = None if mu is None else averaged(n.decay, mu, u)
        variance = nu if mu is None else nu - mu * mu
        return u / (variance.sqrt() + n.eps(variance)), nu, mu


@dataclass(frozen=True)
class rmsprop(Alias):
    """RMSprop: ``scale_by_rms``, then momentum, then the learning rate.

    State: that of ``scale_by_rms``; a trace like params with momentum; count i64[] for a schedule.

    Source: Hinton 2012, lecture 6e; ``torch.optim.RMSprop``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      decay: Decay of the mean square, in [0, 1); ``alpha`` in torch.
      eps: Added outside the root.
      momentum: In [0, 1).
      centered: Scale by the standard deviation.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.rmsprop(0.1, decay=0.75)
      >>> optimizer.update({"w": torch.tensor([4.0, -2.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.2000,  0.2000])}
    """

    decay: Scalar = 0.99
    eps: Scalar = 1e-8
    momentum: Scalar = 0.0
    centered: bool = False

    @property
    def links(self) -> tuple[GradientTransformation, ...]:
        moving = (trace(self.momentum),) if _acts(self.momentum) else ()
        return self._made(scale_by_rms), *moving, scale_by_learning_rate(self.learning_rate)


class ScaleByAdadeltaState(NamedTuple):
    """State of :class:`scale_by_adadelta`."""

    of_updates: Updates  # running mean of the squared inputs, like params
    of_deltas: Updates  # running mean of the squared outputs, like params


@dataclass(frozen=True)
class scale_by_adadelta(Direction):
    """Scale by the running RMS of past steps over that of the gradients.

    ``s <- decay s + (1 - decay) u^2``, the result is ``d = sqrt(e + eps) / sqrt(s + eps) u``, and
    ``e <- decay e + (1 - decay) d^2``.

    State: of_updates and of_deltas like params.

    Source: Zeiler 2012; ``torch.optim.Adadelta``, ``optax.scale_by_adadelta``.

    Attributes:
      decay: In [0, 1); ``rho`` in torch.
      eps: Added inside both roots.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> link = optim.scale_by_adadelta(decay=0.75, eps=1.0)
      >>> link.update({"w": torch.tensor([0.0, 2.0])}, link.init({"w": torch.zeros(2)}))[0]
      {'w': tensor([0.0000, 1.4142])}
    """

    decay: Scalar = 0.9
    eps: Scalar = 1e-6

    keeps = ScaleByAdadeltaState

    def leaf(self, n: Any, u: Tensor, p: Any, s: Tensor, e: Tensor) -> tuple[Tensor, ...]:
        s = averaged(n.decay, s, torch.square(u))
        out = (e + n.eps(e)).sqrt() / (s + n.eps(s)).sqrt() * u
        return out, s, averaged(n.decay, e, torch.square(out))


@dataclass(frozen=True)
class adadelta(Alias):
    """Adadelta: ``scale_by_adadelta``, then the learning rate, which is 1 in the paper.

    State: that of ``scale_by_adadelta``; count i64[] for a schedule.

    Source: Zeiler 2012; ``torch.optim.Adadelta``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      decay: Decay of both running averages, in [0, 1); ``rho`` in torch.
      eps: Added inside both roots.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.adadelta(0.5, decay=0.75, eps=1.0)
      >>> optimizer.update({"w": torch.tensor([0.0, 2.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.0000, -0.7071])}
    """

    learning_rate: ScalarOrSchedule = 1.0
    decay: Scalar = 0.9
    eps: Scalar = 1e-6

    rule = (scale_by_adadelta,)


class ScaleByLionState(NamedTuple):
    """State of :class:`scale_by_lion`."""

    mu: Updates  # running mean, like params


@dataclass(frozen=True)
class scale_by_lion(Direction):
    """Take the sign of a running mean: ``sign(b1 mu + (1 - b1) u)``, then ``mu <- b2 mu + (1 - b2) u``.

    State: mu like params.

    Source: Chen et al. 2023, algorithm 2; ``optax.scale_by_lion``.

    Attributes:
      b1: Weight of the mean in the sign, in [0, 1).
      b2: Decay of the mean, in [0, 1).
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> link = optim.scale_by_lion()
      >>> link.update({"w": torch.tensor([4.0, -2.0])}, link.init({"w": torch.zeros(2)}))[0]
      {'w': tensor([ 1., -1.])}
    """

    b1: Scalar = 0.9
    b2: Scalar = 0.99

    keeps = ScaleByLionState

    def leaf(self, n: Any, u: Tensor, p: Any, mu: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sign(averaged(n.b1, mu, u)), averaged(n.b2, mu, u)


@dataclass(frozen=True)
class lion(Alias):
    """Lion: ``p <- p - learning_rate * (sign(b1 mu + (1 - b1) g) + weight_decay * p)``; see ``scale_by_lion``.

    Every element moves by the learning rate: choose one 3 to 10 times smaller than for AdamW, and a weight decay
    larger by the same factor.

    State: that of ``scale_by_lion``; count i64[] for a schedule.

    Source: Chen et al. 2023; ``optax.lion``, which decays by 1e-3.

    Attributes:
      learning_rate: Number, f32[], or schedule; also scales the decay.
      b1: Weight of the mean in the sign, in [0, 1).
      b2: Decay of the mean, in [0, 1).
      weight_decay: Number or f32[]; no default.
      mask: Which leaves decay; see ``adamw``.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.lion(0.1, weight_decay=0.5)
      >>> optimizer.update({"w": torch.tensor([4.0, -2.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.1500, -0.0000])}
    """

    b1: Scalar = 0.9
    b2: Scalar = 0.99
    weight_decay: Scalar = field(kw_only=True)
    mask: Mask = field(default=None, kw_only=True)

    rule = (scale_by_lion, add_decayed_weights)
