"""Rematerialization: less memory for activations, paid for with a second forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .. import tree as pytree
from .debug import Silence

__all__ = ["remat"]

P = ParamSpec("P")
T = TypeVar("T")

Policy = Callable[[OpOverload], bool]


def remat(fn: Callable[P, T], *, policy: Policy | None = None) -> Callable[P, T]:
    """``fn``, whose intermediate values are computed again in the backward pass in place of being kept.

    What is kept are the arguments, and results of ops that ``policy`` names. The second run has the same keys, so it
    draws the same dropout; gradients have the same bits. No pass merges the two runs.

    Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost; the name is that of ``jax.checkpoint``. It is
    ``torch.utils.checkpoint`` for pytrees, with no generator's state to restore.

    Args:
      fn: A pure function of pytrees, such as one layer of a model: ``remat(layer)(params, x, key)``. Of modules it is
        the ``apply`` of :func:`from_module`, of a model or of one of its blocks, from outside; inside of a module's
        ``forward`` it is refused.
      policy: ``policy(op) -> bool``: whether the result of an op is kept. None keeps nothing;
        ``lambda op: op is torch.ops.aten.mm.default`` keeps matrix products and computes what lies between them.
    Returns:
      A function with the signature of ``fn``.
    Raises:
      TypeError: If ``fn`` or ``policy`` cannot be called.

    Example:
      >>> import torch, functional_cg as fcg
      >>> layer = fcg.remat(lambda p, x: torch.relu(x @ p["w"]))
      >>> fcg.grad(lambda p: layer(p, torch.ones(1, 2)).sum())({"w": torch.ones(2, 1)})
      {'w': tensor([[1.],
              [1.]])}
    """
    for name, value in (("fn", fn), ("policy", policy)):
        if not callable(value) and not (name == "policy" and value is None):
            raise TypeError(f"remat: `{name}` has to be a function, got {type(value).__name__}")

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        # Leaves are handed over one by one: torch's own way to look for tensors does not know our trees.
        leaves, treedef = pytree.flatten((args, kwargs))
        results: list[pytree.Treedef] = []

        def on_leaves(*leaves: Any) -> tuple[Any, ...]:
            args, kwargs = pytree.unflatten(treedef, leaves)
            with Silence(on=bool(results)):  # what the first run has printed and tapped
                out, out_def = pytree.flatten(fn(*args, **kwargs))
            results.append(out_def)
            return tuple(out)

        options: dict[str, Any] = {}
        if policy is not None:
            options["context_fn"] = functools.partial(
                create_selective_checkpoint_contexts, _policy_of(policy)
            )
        out = checkpoint(on_leaves, *leaves, use_reentrant=False, preserve_rng_state=False, **options)
        return pytree.unflatten(results[0], out)  # type: ignore[no-any-return]

    return wrapped


def _policy_of(policy: Policy) -> Callable[..., CheckpointPolicy]:
    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del context, args, kwargs
        return CheckpointPolicy.MUST_SAVE if policy(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return decide
