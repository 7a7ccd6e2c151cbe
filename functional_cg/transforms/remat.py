"""Rematerialization: save activation memory at the price of a second forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .. import tree as pytree
from ..messages.tracebacks import entry
from .debug import Silence

__all__ = ["remat"]

P = ParamSpec("P")
T = TypeVar("T")

Policy = Callable[[OpOverload], bool]


@entry()
def remat(fn: Callable[P, T], *, policy: Policy | None = None) -> Callable[P, T]:
    """Wrap ``fn`` so that its intermediate values are recomputed in the backward pass instead of kept.

    Only the arguments and the results of ops selected by ``policy`` are kept. The second run uses the same keys, so it
    draws the same dropout; gradients have the same bits. No pass merges the two runs.

    Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost; named after ``jax.checkpoint`` (``jax.remat``). It
    is ``torch.utils.checkpoint`` for pytrees, without generator state to restore.

    Args:
      fn: A pure function of pytrees, such as one layer of a model: ``remat(layer)(params, x, key)``. For modules, wrap
        the ``apply`` of :func:`from_module`, of a model or of one of its blocks, from outside; inside a module's
        ``forward``, ``remat`` is refused.
      policy: ``policy(op) -> bool``: whether to keep the result of an op. None keeps nothing;
        ``lambda op: op is torch.ops.aten.mm.default`` keeps matrix products and recomputes everything between them.
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
            fix = (
                "`fcg.remat(block)(params, x)`" if name == "fn" else "leave `policy` out, or give a function"
            )
            raise TypeError(
                f"remat: `{name}` must be a function, got {type(value).__name__}.\nTo fix: {fix}."
            )

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = policy is not None and policy(op)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        # Leaves are passed one by one: torch's own search for tensors does not know these trees.
        leaves, treedef = pytree.flatten((args, kwargs))
        results: list[pytree.Treedef] = []

        def on_leaves(*leaves: Any) -> tuple[Any, ...]:
            args, kwargs = pytree.unflatten(treedef, leaves)
            with Silence(on=bool(results)):  # the first run has printed and tapped already
                out, out_def = pytree.flatten(fn(*args, **kwargs))
            results.append(out_def)
            return tuple(out)

        options: dict[str, Any] = {}
        if policy is not None:
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, decide)
        out = checkpoint(on_leaves, *leaves, use_reentrant=False, preserve_rng_state=False, **options)
        return pytree.unflatten(results[0], out)  # type: ignore[no-any-return]

    return wrapped
