"""Dtype policy for parameters, compute, gradient reduction and gradient accumulation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import tree as pytree
from ..manual import Documented
from ..tensors.aten import adds_up

__all__ = ["Policy"]

T = TypeVar("T")


@dataclass(frozen=True)
class Policy(metaclass=Documented):
    """The dtypes for storing parameters, computing with them, and summing their gradients.

    An immutable value that a step may close over; it has no effect by itself. Apply the dtypes with explicit calls:
    ``policy.to_compute(params)`` in the loss, ``fcg.microbatches(k, dtype=policy.accumulate)``,
    ``fcg.sharding.zero(mesh, policy=policy)``. If the loss casts float32 parameters, their gradients are float32.
    Gradients with respect to the cast parameters are as narrow as those and take half the memory: ``apply_gradients``
    accepts them directly.

    Source: Micikevicius et al. 2018, "Mixed Precision Training"; ``jmp.Policy``, without its ``output``.

    Attributes:
      param: Dtype of the parameters in the state, and thus of the optimizer's moments.
      compute: Dtype of the parameters and inputs in the loss.
      reduce: Dtype of gradients summed over ranks.
      accumulate: Dtype of gradients summed over micro-batches.
    Raises:
      TypeError: If one is not a floating dtype, or is 8-bit, which cannot be summed: see ``fcg.nn.fp8_linear``.

    Example:
      >>> import torch, functional_cg as fcg
      >>> policy = fcg.precision.Policy(compute=torch.bfloat16)
      >>> def loss_fn(params, x):
      ...     params, x = policy.to_compute((params, x))
      ...     return (x @ params["w"]).float().square().mean()
      >>> @fcg.graph_step
      ... def train_step(state, x):
      ...     grads_of = fcg.microbatches(2, dtype=policy.accumulate)(fcg.value_and_grad(loss_fn))
      ...     loss, grads = grads_of(state.params, x)
      ...     return state.apply_gradients(grads), {"loss": loss}
      >>> params = policy.to_param({"w": torch.ones(4, 2)})
      >>> state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
      >>> state, metrics = train_step(state, torch.ones(8, 4))
      >>> metrics["loss"], state.params["w"].dtype
      (tensor(16.), torch.float32)
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32
    accumulate: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for field in fields(self):
            dtype = getattr(self, field.name)
            if not adds_up(dtype):
                raise TypeError(
                    f"precision.Policy: {field.name} must be a floating dtype of 16 bits or more, such as "
                    f"torch.bfloat16, got {dtype!r}"
                )

    def to_param(self, tree: T) -> T:
        """Cast floating leaves to ``param``; leave all others unchanged."""
        return _cast(tree, self.param)

    def to_compute(self, tree: T) -> T:
        """Cast floating leaves to ``compute``; leave all others unchanged.

        Leaves already in that dtype are not read: on a mesh, ``zero(mesh, policy=policy)`` passes such leaves to the
        loss, and each is gathered where it is read. Under any other sharding, this call reads and gathers all of them.
        """
        return _cast(tree, self.compute)


def _cast(tree: T, dtype: torch.dtype) -> T:
    def cast(leaf: Any) -> Any:
        differs = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype
        return leaf.to(dtype) if differs else leaf

    return pytree.map(cast, tree)  # type: ignore[no-any-return]
