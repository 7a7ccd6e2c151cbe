"""Gradients as values: ``value_and_grad``, ``grad`` and micro-batches.

Gradients are taken by ``torch.autograd.grad`` with respect to fresh leaves made inside the call. Nothing is stored in
``.grad``, and no autograd node survives the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from . import tree as pytree
from .arena import BufferSpec
from .errors import CaptureError, LayoutError
from .random import fold_in
from .tree import path_string

__all__ = ["grad", "microbatches", "value_and_grad"]

P = ParamSpec("P")
Params = TypeVar("Params")
Aux = TypeVar("Aux")
Out = TypeVar("Out")


@overload
def value_and_grad(
    fn: Callable[Concatenate[Params, P], tuple[Tensor, Aux]], *, has_aux: Literal[True]
) -> Callable[Concatenate[Params, P], tuple[tuple[Tensor, Aux], Params]]: ...
@overload
def value_and_grad(
    fn: Callable[Concatenate[Params, P], Tensor], *, has_aux: Literal[False] = False
) -> Callable[Concatenate[Params, P], tuple[Tensor, Params]]: ...
def value_and_grad(fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """Make a function that returns the value of ``fn`` and its gradient with respect to the first argument.

    The order is JAX's (value, grad); ``torch.func.grad_and_value`` has the other one. A leaf that ``fn`` does not
    use gets a gradient of zeros, where ``torch.optim`` would skip it: weight decay then moves that leaf. Nested calls
    keep second-order terms: inside another ``value_and_grad`` the gradients are differentiable themselves.

    Args:
      fn: Returns a scalar f32[] (or another floating dtype), or a pair of scalar and auxiliary tree.
      has_aux: Whether ``fn`` returns such a pair.
    Returns:
      A function with the arguments of ``fn`` that returns ``(value, grads)``, or ``((value, aux), grads)``. ``grads``
      has structure, shapes and dtypes of the first argument.
    Raises:
      LayoutError: If a leaf of the first argument is not floating, or the value is not a scalar.
      CaptureError: Under ``torch.func`` transforms, which need ``torch.func.grad``.

    Example:
      >>> import torch, functional_cg as fcg
      >>> fcg.value_and_grad(lambda w: (w * w).sum())(torch.tensor([1.0, 2.0]))
      (tensor(5.), tensor([2., 4.]))
    """
    name = getattr(fn, "__name__", type(fn).__name__)

    @wraps(fn)
    def wrapped(params: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_transforms(name)
        flat, treedef = pytree.flatten(params)
        _refuse_undifferentiable(name, treedef, flat)
        with torch.enable_grad():
            # An outer call's leaf carries a graph: alias it, so that second-order terms flow through.
            leaves = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in flat]
            out = fn(pytree.unflatten(treedef, leaves), *args, **kwargs)
            value, aux = out if has_aux else (out, None)
            _refuse_vector(name, value)
            nested = any(x.requires_grad for x in flat) or _depends_on_others(value, leaves)
            grads = _gradients(value, leaves, create_graph=nested)
        if not nested:
            value, aux = value.detach(), pytree.map(_detached, aux)
        result = (value, aux) if has_aux else value
        return result, pytree.unflatten(treedef, grads)

    return wrapped


def grad(fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """Like :func:`value_and_grad`, without the value: returns ``grads``, or ``(grads, aux)``.

    Example:
      >>> import torch, functional_cg as fcg
      >>> fcg.grad(fcg.grad(lambda x: x**3))(torch.tensor(2.0))
      tensor(12.)
    """
    both = value_and_grad(fn, has_aux=has_aux)  # type: ignore[call-overload]

    @wraps(fn)
    def wrapped(params: Any, *args: Any, **kwargs: Any) -> Any:
        out, grads = both(params, *args, **kwargs)
        return (grads, out[1]) if has_aux else grads

    return wrapped


def _gradients(value: Tensor, leaves: Sequence[Tensor], *, create_graph: bool) -> list[Tensor]:
    if not leaves or not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    grads = torch.autograd.grad(
        value, leaves, create_graph=create_graph, allow_unused=True, materialize_grads=False
    )
    # zeros_like keeps a layout of the leaf's own; autograd's materialized zeros may be expanded
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True)]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _depends_on_others(value: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether the value's graph reaches leaves other than ours: then an outer call differentiates through us."""
    ours = {id(leaf) for leaf in leaves}
    stack = [value.grad_fn]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # set on the nodes that end at a leaf
        if variable is not None and id(variable) not in ours:
            return True
        stack.extend(parent for parent, _ in node.next_functions)
    return False


def _refuse_transforms(name: str) -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None:  # private; test_autodiff notices a change
        raise CaptureError.of(
            name,
            "`value_and_grad` is called under a `torch.func` transform such as `vmap`.",
            why="It uses the autograd tape, which those transforms do not see.",
            fix="use `torch.func.grad` or `torch.func.grad_and_value` inside of `vmap`.",
        )


def _refuse_undifferentiable(name: str, treedef: pytree.Treedef, flat: Sequence[Any]) -> None:
    rows = [
        f"{path_string(path, 'params')}  expected a floating tensor   got "
        + (str(BufferSpec.of(leaf)) if isinstance(leaf, Tensor) else type(leaf).__name__)
        for path, leaf in zip(treedef.paths(), flat, strict=True)
        if not (isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()))
    ]
    if rows:
        raise LayoutError.of(
            name,
            "the first argument of `value_and_grad` has leaves that cannot be differentiated.",
            rows=rows,
            fix="pass only the trained tensors first, and the rest as further arguments.",
        )


def _refuse_vector(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or value.dim() != 0 or not value.is_floating_point():
        got = BufferSpec.of(value) if isinstance(value, Tensor) else type(value).__name__
        raise LayoutError.of(
            name,
            "the value to differentiate is not a floating scalar.",
            rows=[f"value  expected f32[]   got {got}"],
            fix="reduce it, `loss.mean()`; return further results with `has_aux=True`.",
        )


def microbatches(k: int) -> Callable[[Callable[Concatenate[Params, P], Out]], Callable[Concatenate[Params, P], Out]]:
    """Run a gradient function over ``k`` equal slices of the batch and average what it returns.

    Wrap the result of :func:`value_and_grad`: activations of one slice are freed before the next starts. The second
    argument (the batch) is cut along dimension 0. A keyword argument ``key`` is folded with the slice's number, so
    that slices draw differently. Floating leaves of the result are averaged, in order; integer leaves are summed.

    Args:
      k: Number of slices, at least 1.
    Raises:
      LayoutError: If a leaf of the batch cannot be cut into ``k`` equal slices.

    Example:
      >>> import torch, functional_cg as fcg
      >>> loss = lambda w, x: (w * x).mean()
      >>> fcg.microbatches(2)(fcg.value_and_grad(loss))(torch.tensor(2.0), torch.arange(4.0))
      (tensor(3.), tensor(1.5000))
    """
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"microbatches: expected a positive int, got {k!r}")

    def transform(fn: Callable[Concatenate[Params, P], Out]) -> Callable[Concatenate[Params, P], Out]:
        @wraps(fn)
        def wrapped(params: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            flat, treedef = pytree.flatten(batch)
            _refuse_uneven(getattr(fn, "__name__", "microbatches"), treedef, flat, k)
            slices = [leaf.unflatten(0, (k, leaf.shape[0] // k)).unbind(0) for leaf in flat]
            key = kwargs.get("key")
            total = None
            for i in range(k):
                if key is not None:
                    kwargs["key"] = fold_in(key, i)
                out = fn(params, pytree.unflatten(treedef, [s[i] for s in slices]), *args, **kwargs)  # type: ignore[call-arg, arg-type]
                total = out if total is None else pytree.map(torch.add, total, out)
            return pytree.map(lambda x: x / k if x.is_floating_point() else x, total)

        return wrapped

    return transform


def _refuse_uneven(name: str, treedef: pytree.Treedef, flat: Sequence[Any], k: int) -> None:
    rows = [
        f"{path_string(path, 'batch')}  expected a tensor whose first dimension divides by {k}   got "
        + (str(BufferSpec.of(leaf)) if isinstance(leaf, Tensor) else type(leaf).__name__)
        for path, leaf in zip(treedef.paths(), flat, strict=True)
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] % k
    ]
    if rows:
        raise LayoutError.of(
            name,
            f"the batch cannot be cut into {k} equal micro-batches.",
            rows=rows,
            fix="pad or drop the rest, or pass what has no batch dimension as a further argument.",
        )
