"""Shard a state over the ranks of a mesh."""

from __future__ import annotations

from typing import Literal

import torch

from ..messages.tracebacks import entry
from ..precision import Policy
from ..shards.mesh import Mesh
from ..shards.zero import Zero
from ..tensors.aten import adds_up
from .launch import check_mesh

__all__ = ["zero"]


@entry("fcg.sharding.zero(mesh, stage=3)")
def zero(
    mesh: Mesh,
    *,
    stage: Literal[1, 2, 3] = 3,
    bucket_bytes: int = 32 * 2**20,
    prefetch: int = 1,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    policy: Policy | None = None,
    reshard: bool = True,
) -> Zero:
    """Shard a state over the ranks of a mesh: ``TrainState.create(..., sharding=zero(mesh, stage=3))``.

    A rank holds its shard of the moments (stage 1), of the gradients as well (stage 2), and of the parameters as well
    (stage 3). At stages 1 and 2 the new parameters are gathered at the end of the step; at stage 3 each is gathered
    where a loss reads it. On a mesh of one rank nothing is sharded, and the graph has no collectives.

    Args:
      mesh: A mesh from :func:`mesh`.
      stage: 1, 2 or 3.
      bucket_bytes: Size of a bucket: leaves read consecutively are gathered together up to this size, and their
        gradients reduced together.
      prefetch: How many buckets ahead of its use a leaf is gathered, overlapping with the compute in between; 0 holds
        the fewest whole leaves.
      param_dtype: Dtype that a loss sees, such as ``torch.bfloat16`` for f32 parameters: gathers are half as large.
      reduce_dtype: Dtype in which gradients are summed over ranks and divided by their number; by default their own
        dtype, which ``param_dtype`` determines. All ranks get the same bits of a sum, but in bf16 it is rounded to 8
        bits after each of the ``ranks - 1`` additions, in an order that the backend chooses; ``torch.float32`` rounds
        once, at the end, and sends twice the bytes.
      policy: Replaces these two dtypes by its ``compute`` and ``reduce``.
      reshard: Gather again in the backward (stage 3), which holds fewer whole leaves at a time.
    Returns:
      A sharding for the argument ``sharding`` of :meth:`TrainState.create`, for all parameters; or a leaf of a prefix
      of their tree, for those below it: ``sharding={"embedding": zero(mesh, stage=1), "blocks": zero(mesh, stage=3)}``.
      Buckets and prefetch are those of the first leaf.
    Raises:
      TypeError: If an argument has the wrong type, or a policy is given together with a dtype.
      ValueError: If the stage is not 1, 2 or 3, ``bucket_bytes`` is not positive, or ``prefetch`` is negative.

    Example:
      >>> import torch, functional_cg as fcg
      >>> mesh = fcg.sharding.mesh({"data": -1})
      >>> state = fcg.TrainState.create(
      ...     params={"w": torch.ones(4)}, optimizer=fcg.optim.sgd(0.1), sharding=fcg.sharding.zero(mesh, stage=3)
      ... )
    """
    check_mesh(mesh, "zero")
    if not isinstance(stage, int) or stage not in (1, 2, 3) or isinstance(stage, bool):
        raise ValueError(
            f"sharding.zero: stage must be 1, 2 or 3, got {stage!r}.\n"
            "To fix: `stage=3` shards everything, `stage=1` the state of the optimizer."
        )
    for name, number in (("bucket_bytes", bucket_bytes), ("prefetch", prefetch)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"sharding.zero: {name} must be an integer, got {number!r}")
    if bucket_bytes < 1:
        raise ValueError(f"sharding.zero: bucket_bytes must be positive, got {bucket_bytes!r}")
    if prefetch < 0:
        raise ValueError(f"sharding.zero: prefetch must not be negative, got {prefetch!r}")
    if policy is not None:
        if not isinstance(policy, Policy) or param_dtype is not None or reduce_dtype is not None:
            raise TypeError(
                "sharding.zero: expected a `fcg.precision.Policy` in place of param_dtype and reduce_dtype, got "
                f"policy={policy!r}, param_dtype={param_dtype}, reduce_dtype={reduce_dtype}"
            )
        param_dtype, reduce_dtype = policy.compute, policy.reduce
    if not isinstance(reshard, bool):
        raise TypeError(f"sharding.zero: reshard must be True or False, got {reshard!r}")
    for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype is not None and not adds_up(dtype):
            raise TypeError(
                f"sharding.zero: {name} must be a floating dtype of 16 bits or more, such as torch.bfloat16, got "
                f"{dtype!r}"
            )
    return Zero(mesh, stage, bucket_bytes, prefetch, param_dtype, reduce_dtype, reshard)
