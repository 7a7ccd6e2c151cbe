"""Which dtype does what: parameters, products, sums over ranks and sums over micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import tree as pytree
from ..tensors.aten import adds_up

__all__ = ["Policy"]

T = TypeVar("T")


@dataclass(frozen=True)
class Policy:
    """The dtypes of a training: in which parameters are kept, computed with, and their gradients summed.

    A value that a step may close over; it changes nothing by itself. What is to be in one of the dtypes is put there by
    a call: ``policy.to_compute(params)`` in the loss, ``fcg.microbatches(k, dtype=policy.accumulate)``,
    ``fcg.sharding.zero(mesh, policy=policy)``. Gradients of float32 parameters that a loss casts are float32. Those of
    the cast parameters are as narrow as these, and take half the memory: ``apply_gradients`` takes them as they are.

    Source: Micikevicius et al. 2018, "Mixed Precision Training"; ``jmp.Policy``, without its ``output``.

    Attributes:
      param: Of the parameters in the state, and so of the optimizer's moments.
      compute: Of the parameters and inputs that a loss computes with.
      reduce: Of gradients that are summed over ranks.
      accumulate: Of gradients that are summed over micro-batches.
    Raises:
      TypeError: If one of them is no floating dtype, or one of 8 bits, which has no sums: see ``fcg.nn.fp8_linear``.

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
        """Floating leaves in ``param``; all other leaves as they are."""
        return _cast(tree, self.param)

    def to_compute(self, tree: T) -> T:
        """Floating leaves in ``compute``; all other leaves as they are.

        Leaves that are so already are not touched: on a mesh, ``zero(mesh, policy=policy)`` hands a loss such leaves,
        each of which is gathered where it is read. Under another sharding this call reads, and gathers, all of them.
        """
        return _cast(tree, self.compute)


def _cast(tree: T, dtype: torch.dtype) -> T:
    def cast(leaf: Any) -> Any:
        differs = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype
        return leaf.to(dtype) if differs else leaf

    return pytree.map(cast, tree)  # type: ignore[no-any-return]
