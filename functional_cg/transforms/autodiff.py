"""Gradients as values: ``value_and_grad``, ``grad`` and micro-batches.

Gradients are taken by ``torch.autograd.grad`` with respect to fresh leaves made inside the call. Nothing is stored in
``.grad``, and no autograd node survives the call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast, overload

import torch
from einops import rearrange
from torch import Tensor

from .. import tree as pytree
from ..errors import CaptureError, LayoutError
from ..messages.tracebacks import entry
from ..pytree.trees import no_tensors
from ..random import fold_in
from ..shards.reader import like_leaf, readers, variable_of, whole
from ..shards.tensor import refuse_at_rest
from ..state.arena import BufferSpec
from ..state.handle import Leaf
from ..tensors.aten import adds_up
from ..tree import path_string

__all__ = ["grad", "microbatches", "value_and_grad"]

P = ParamSpec("P")
Params = TypeVar("Params")
Aux = TypeVar("Aux")
Out = TypeVar("Out")

# The node where an autograd graph ends at a leaf. Private in torch; test_autodiff notices a change.
_LEAF_NODE = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


@overload
def value_and_grad(
    fn: Callable[Concatenate[Params, P], tuple[Tensor, Aux]], *, has_aux: Literal[True]
) -> Callable[Concatenate[Params, P], tuple[tuple[Tensor, Aux], Params]]: ...
@overload
def value_and_grad(
    fn: Callable[Concatenate[Params, P], Tensor], *, has_aux: Literal[False] = False
) -> Callable[Concatenate[Params, P], tuple[Tensor, Params]]: ...
@entry("loss, grads = fcg.value_and_grad(loss_fn)(state.params, batch)")
def value_and_grad(fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """Make a function that returns the value of ``fn`` and its gradient with respect to the first argument.

    The order is JAX's, (value, grad); ``torch.func.grad_and_value`` has the opposite order. A leaf that ``fn`` does not
    use gets a gradient of zeros, whereas ``torch.optim`` would skip it: weight decay then changes that leaf (freeze it
    with ``optim.masked`` or ``optim.partition``). Nested calls keep second-order terms: inside another
    ``value_and_grad`` the gradients are differentiable themselves, unless the inner call is under ``torch.no_grad()``.
    A value that depends on no leaf at all gives a warning.

    Args:
      fn: Returns a scalar f32[] (or of another floating dtype), or a pair (scalar, auxiliary tree).
      has_aux: Whether ``fn`` returns such a pair.
    Returns:
      A function with the arguments of ``fn`` that returns ``(value, grads)``, or ``((value, aux), grads)``. ``grads``
      has the structure, shapes and dtypes of the first argument.
    Raises:
      LayoutError: If a leaf of the first argument is not floating, or the value is not a scalar.
      CaptureError: Under ``torch.func`` transforms, which need ``torch.func.grad``.

    Example:
      >>> import torch, functional_cg as fcg
      >>> fcg.value_and_grad(lambda w: (w * w).sum())(torch.tensor([1.0, 2.0]))
      (tensor(5.), tensor([2., 4.]))
    """
    name = getattr(fn, "__name__", type(fn).__name__)

    @entry(f"fcg.value_and_grad({name})(state.params, ...)")
    @wraps(fn)
    def wrapped(params: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_transforms(name)
        flat, treedef = pytree.flatten(params)
        _refuse_undifferentiable(name, treedef, flat)
        refuse_at_rest(flat, "gradients")
        recording = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        threads = torch.autograd.is_multithreading_enabled()  # leaving inference mode would switch it on
        with (
            torch.inference_mode(False),
            torch.autograd.set_multithreading_enabled(threads),
            torch.enable_grad(),
        ):
            leaves = [_differentiable(leaf, recording=recording) for leaf in flat]
            with readers(flat, leaves, treedef) as handed:
                out = fn(pytree.unflatten(treedef, handed), *args, **kwargs)
                value, aux = _split(name, out) if has_aux else (out, None)
                aux = pytree.map(whole, aux)
                _refuse_vector(name, value)
                nested = recording and _depends_on_others([value, *pytree.leaves(aux)], leaves)
                grads = _gradients(value, leaves, create_graph=nested)
            grads = [like_leaf(leaf, grad) for leaf, grad in zip(flat, grads, strict=True)]
        if leaves and not value.requires_grad:
            warnings.warn(
                f"`{name}`: its value depends on no leaf of its first argument, so all gradients are zero. It has to "
                "compute with that argument, `lambda p: ...`, and not with `state.params` from outside.",
                stacklevel=2,
            )
        for leaf in leaves:
            if leaf.is_leaf:
                leaf.requires_grad_(False)  # so that an outer call that meets it in its graph ignores it
        if not nested:
            value, aux = value.detach(), pytree.map(_detached, aux)
        result = (value, aux) if has_aux else value
        return result, pytree.unflatten(treedef, grads)

    return wrapped


@overload
def grad(
    fn: Callable[Concatenate[Params, P], tuple[Tensor, Aux]], *, has_aux: Literal[True]
) -> Callable[Concatenate[Params, P], tuple[Params, Aux]]: ...
@overload
def grad(
    fn: Callable[Concatenate[Params, P], Tensor], *, has_aux: Literal[False] = False
) -> Callable[Concatenate[Params, P], Params]: ...
@entry("grads = fcg.grad(loss_fn)(state.params, batch)")
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


def _differentiable(leaf: Tensor, *, recording: bool) -> Tensor:
    """Return a stand-in for a leaf to differentiate with respect to; for a leaf on a mesh, the part a rank keeps."""
    leaf = variable_of(whole(leaf))
    if recording and leaf.requires_grad:
        return leaf.view_as(leaf)  # an outer call's leaf: an alias lets second-order terms flow through
    if isinstance(leaf, Leaf) or leaf.is_inference():
        return leaf.clone().requires_grad_()  # neither can require gradients itself
    return leaf.detach().requires_grad_()


def _gradients(value: Tensor, leaves: Sequence[Tensor], *, create_graph: bool) -> list[Tensor]:
    if not leaves or not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    grads = torch.autograd.grad(value, leaves, create_graph=create_graph, allow_unused=True)
    # not `materialize_grads`: its zeros may be expanded, these have the layout of the leaf
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True)]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _depends_on_others(results: Iterable[Any], leaves: Sequence[Tensor]) -> bool:
    """Whether results depend on other leaves: then an outer call differentiates through this one."""
    ours = {id(leaf) for leaf in leaves}
    roots = [tensor for tensor in results if isinstance(tensor, Tensor) and tensor.requires_grad]
    if any(tensor.is_leaf and id(tensor) not in ours for tensor in roots):
        return True
    stack, seen = [tensor.grad_fn for tensor in roots], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, _LEAF_NODE) and node.variable.requires_grad and id(node.variable) not in ours:
            return True
        stack.extend(parent for parent, _ in node.next_functions)
    return False


def _split(name: str, out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise LayoutError.of(
            name,
            "does not return a pair of value and auxiliary tree.",
            rows=[f"result  expected (value, aux)   got {type(out).__name__}"],
            fix="`return loss, aux`; or leave out `has_aux=True`.",
        )
    return out


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
            fix="pass only the trained tensors first, `fcg.value_and_grad(loss_fn)(state.params, batch)`, and the rest "
            "as further arguments.",
        )


def _refuse_vector(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
        got = BufferSpec.of(value) if isinstance(value, Tensor) else type(value).__name__
        raise LayoutError.of(
            name,
            "the value to differentiate is not a floating scalar.",
            rows=[f"value  expected f32[]   got {got}"],
            fix="reduce it, `loss.mean()`; return further results with `has_aux=True`.",
        )


@entry()
def microbatches(
    k: int, *, carry: str | None = None, dtype: torch.dtype | None = None
) -> Callable[[Callable[Concatenate[Params, P], Out]], Callable[Concatenate[Params, P], Out]]:
    """Run a gradient function over ``k`` equal slices of the batch and average the results.

    Wrap the result of :func:`value_and_grad`: activations of one slice are freed before the next starts. The second
    argument (the batch) is cut along dimension 0. A keyword argument ``key`` is folded with the slice's number, so
    that slices draw differently. Floating and complex leaves of the result are averaged, in order; integer leaves
    (counts) are summed.

    Buffers that each slice updates, such as those of batch norm, must be neither averaged nor summed: pass them as a
    keyword argument, return the new ones in the auxiliary tree under the same name, and give that name as ``carry``.

    Args:
      k: Number of slices, at least 1.
      carry: Name of a keyword argument passed from slice to slice: each slice gets what the previous one returned under
        that name, and the result has the value of the last.
      dtype: Dtype in which floating leaves are summed and returned, such as ``torch.float32`` for gradients in
        bfloat16, whose sums would lose small terms; None for their own. The values of ``carry`` keep their own dtype.
    Raises:
      ValueError: If ``k`` is not an integer of 1 or more.
      TypeError: If ``dtype`` is not a floating dtype of 16 bits or more, or the argument named by ``carry`` is missing.
      LayoutError: If a leaf of the batch cannot be cut into ``k`` equal slices, a leaf of the result is not a tensor,
        or the result has no value with the structure of the argument under the name ``carry``.

    Example:
      >>> import torch, functional_cg as fcg
      >>> loss = lambda w, x: (w * x).mean()
      >>> fcg.microbatches(2)(fcg.value_and_grad(loss))(torch.tensor(2.0), torch.arange(4.0))
      (tensor(3.), tensor(1.5000))

      With batch norm, as one slice after the other would update it:

      >>> apply, params, buffers = fcg.from_module(torch.nn.BatchNorm1d(3))
      >>> def loss(params, x, *, buffers):
      ...     out, buffers = apply(params, buffers, x)
      ...     return out.square().mean(), {"buffers": buffers}
      >>> grads_of = fcg.microbatches(2, carry="buffers")(fcg.value_and_grad(loss, has_aux=True))
      >>> (value, aux), grads = grads_of(params, torch.randn(8, 3), buffers=buffers)
      >>> aux["buffers"]["num_batches_tracked"]
      tensor(2)
    """
    if type(k) is not int or k < 1:
        raise ValueError(f"microbatches: expected a positive int, got {k!r}")
    if dtype is not None and not adds_up(dtype):
        raise TypeError(
            f"microbatches: dtype must be a floating dtype of 16 bits or more, such as torch.float32, got {dtype!r}"
        )

    def transform(fn: Callable[Concatenate[Params, P], Out]) -> Callable[Concatenate[Params, P], Out]:
        name = getattr(fn, "__name__", type(fn).__name__)

        @wraps(fn)
        def wrapped(params: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            flat, treedef = pytree.flatten(batch)
            _refuse_uneven(name, treedef, flat, k)
            slices = [rearrange(leaf, "(k b) ... -> k b ...", k=k) for leaf in flat]
            key = kwargs.get("key")
            total: Any = None
            handed: list[int] = []
            for i in range(k):
                if key is not None:
                    kwargs["key"] = fold_in(key, i)
                part = pytree.unflatten(treedef, [leaf[i] for leaf in slices])
                out = cast("Callable[..., Any]", fn)(params, part, *args, **kwargs)
                if total is None:
                    _refuse_objects(name, out)
                if carry is not None:
                    handed, kwargs[carry] = _handed_on(name, carry, kwargs, out)
                out = _by_position(partial(_in_dtype, dtype, handed), out)
                total = out if total is None else _by_position(partial(_sum_or_last, handed), total, out)
            return _by_position(partial(_mean_or_sum, k, handed), total)

        return cast("Callable[Concatenate[Params, P], Out]", wrapped)

    return transform


def _by_position(function: Callable[..., Tensor], *trees: Any) -> Any:
    """Map over the leaves of trees; the function also gets their flat position."""
    treedef = pytree.flatten(trees[0])[1]
    return pytree.map(function, pytree.unflatten(treedef, range(treedef.num_leaves)), *trees)


def _in_dtype(dtype: torch.dtype | None, handed: Sequence[int], position: int, leaf: Tensor) -> Tensor:
    return leaf if dtype is None or position in handed or not leaf.is_floating_point() else leaf.to(dtype)


def _sum_or_last(handed: Sequence[int], position: int, total: Tensor, new: Tensor) -> Tensor:
    return new if position in handed else total + new


def _mean_or_sum(k: int, handed: Sequence[int], position: int, total: Tensor) -> Tensor:
    averaged = (total.is_floating_point() or total.is_complex()) and position not in handed
    return total / k if averaged else total


def _handed_on(name: str, carry: str, kwargs: dict[str, Any], out: Any) -> tuple[list[int], Any]:
    """Return the positions in the result of an argument's next value, and that value in the argument's structure."""
    if carry not in kwargs:
        raise TypeError(
            f"microbatches: `carry={carry!r}`, but `{name}` is called without a keyword argument `{carry}`.\n"
            f"To fix: `grads_of(params, batch, {carry}=...)`."
        )
    known = pytree.flatten(kwargs[carry])[1]
    found = [
        (path_string(path[depth + 1 :], carry), position, leaf)
        for position, (path, leaf) in enumerate(pytree.flatten_with_path(out)[0])
        for depth, key in enumerate(path)
        if str(key) in (f"[{carry!r}]", f".{carry}")
    ]
    paths = [path_string(path, carry) for path in known.paths()]
    at = {path: (position, leaf) for path, position, leaf in found}
    if sorted(path for path, _, _ in found) != sorted(paths):
        raise LayoutError.of(
            name,
            f"does not hand on `{carry}` from one micro-batch to the next.",
            rows=[
                f"{path}  expected one   got {sum(path == other for other, _, _ in found)}" for path in paths
            ]
            + [f"{path}  expected nothing" for path in at if path not in paths],
            fix=f'return the new ones in the auxiliary tree, `return loss, {{"{carry}": {carry}}}`.',
        )
    return [at[path][0] for path in paths], pytree.unflatten(known, [at[path][1] for path in paths])


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
            fix=_divisor(flat, k)
            + "pad or drop the rest, or pass what has no batch dimension as a further argument.",
        )


def _divisor(flat: Sequence[Any], k: int) -> str:
    sizes = {leaf.shape[0] for leaf in flat if isinstance(leaf, Tensor) and leaf.dim()}
    fits = next((n for n in range(k, 1, -1) if sizes and not any(size % n for size in sizes)), 0)
    return f"`microbatches({fits})`; or " if fits else ""


def _refuse_objects(name: str, out: Any) -> None:
    rows = no_tensors(out, "result")
    if rows:
        raise LayoutError.of(
            name,
            "returns leaves that cannot be averaged over micro-batches.",
            rows=rows,
            fix="return tensors, and keep other objects outside of the function.",
        )
