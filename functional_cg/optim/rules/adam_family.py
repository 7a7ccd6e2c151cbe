"""Adam variants by name: each one a link from :mod:`.adaptive`, then the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

from functional_cg.optim.algebra.base import GradientTransformation, Scalar, ScalarOrSchedule
from functional_cg.optim.algebra.combine import Composed
from functional_cg.optim.algebra.links import scale_by_learning_rate
from functional_cg.optim.rules.adaptive import (
    scale_by_adamax,
    scale_by_amsgrad,
    scale_by_belief,
    scale_by_nadam,
    scale_by_radam,
)


@dataclass(frozen=True)
class _Family(Composed):
    """A moments link, then the learning rate. For L2 decay, use ``chain(add_decayed_weights(...), ...)``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Keeps the denominator away from 0.
    """

    learning_rate: ScalarOrSchedule
    b1: Scalar = 0.9
    b2: Scalar = 0.999
    eps: Scalar = 1e-8

    _link: ClassVar[Callable[..., GradientTransformation]]

    @property
    def moments(self) -> GradientTransformation:
        """The link that turns gradients into a direction, with all numbers but the learning rate."""
        return self._link(*(getattr(self, one.name) for one in fields(self)[1:]))

    @property
    def links(self) -> tuple[GradientTransformation, ...]:
        return self.moments, scale_by_learning_rate(self.learning_rate)


@dataclass(frozen=True)
class amsgrad(_Family):
    """AMSGrad: Adam with the largest second moment so far; see ``scale_by_amsgrad``.

    State: that of ``scale_by_amsgrad``, plus count i64[] if the rate is a schedule.

    Source: Reddi et al. 2018; ``torch.optim.Adam(amsgrad=True)``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.amsgrad(0.1)
      >>> optimizer.update({"w": torch.tensor([4.0, -2.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.1000,  0.1000])}
    """

    _link = scale_by_amsgrad


@dataclass(frozen=True)
class adamax(_Family):
    """AdaMax: Adam with a decayed maximum as its second moment; see ``scale_by_adamax``.

    State: that of ``scale_by_adamax``, plus count i64[] if the rate is a schedule.

    Source: Kingma and Ba 2015, section 7.1; ``torch.optim.Adamax``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added to the absolute gradient before the maximum.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.adamax(0.1)
      >>> optimizer.update({"w": torch.tensor([4.0, -2.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.1000,  0.1000])}
    """

    _link = scale_by_adamax


@dataclass(frozen=True)
class nadam(_Family):
    """NAdam: Adam with Nesterov momentum; see ``scale_by_nadam``, also for ``momentum_decay``.

    State: that of ``scale_by_nadam``, plus count i64[] if the rate is a schedule.

    Source: Dozat 2016; ``torch.optim.NAdam``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
      momentum_decay: How fast the momentum grows; 0 keeps it constant.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.nadam(0.1)
      >>> optimizer.update({"w": torch.tensor([4.0, -2.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.1056,  0.1056])}
    """

    momentum_decay: Scalar = 4e-3

    _link = scale_by_nadam


@dataclass(frozen=True)
class radam(_Family):
    """RAdam: plain momentum until the variance of the second moment is tractable, then Adam; see ``scale_by_radam``.

    State: that of ``scale_by_radam``, plus count i64[] if the rate is a schedule.

    Source: Liu et al. 2020; ``torch.optim.RAdam``, ``torch_optimizer.RAdam``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added outside the root.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.radam(0.1)
      >>> optimizer.update({"w": torch.tensor([4.0, -2.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.4000,  0.2000])}
    """

    _link = scale_by_radam


@dataclass(frozen=True)
class adabelief(_Family):
    """AdaBelief: Adam scaled by how far gradients stray from their running mean; see ``scale_by_belief``.

    State: that of ``scale_by_belief``, plus count i64[] if the rate is a schedule.

    Source: Zhuang et al. 2020; ``optax.adabelief``, ``torch_optimizer.AdaBelief``.

    Attributes:
      learning_rate: Number, f32[], or schedule.
      b1: Decay of the first moment, in [0, 1).
      b2: Decay of the second moment, in [0, 1).
      eps: Added to the second moment at each step, and again outside the root.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer = optim.adabelief(0.1)
      >>> optimizer.update({"w": torch.tensor([4.0, -2.0])}, optimizer.init(params), params)[0]
      {'w': tensor([-0.1111,  0.1111])}
    """

    eps: Scalar = 1e-16

    _link = scale_by_belief
