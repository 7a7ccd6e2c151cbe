"""Gradients as values: ``value_and_grad`` and ``grad``.

Gradients are taken by ``torch.autograd.grad`` with respect to fresh leaves made inside the call. Nothing is stored in
``.grad``, and no autograd node survives the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from .. import tree as pytree
from ..ambient.running import running
from ..ambient.setting import is_constant
from ..errors import CaptureError, LayoutError
from ..messages.source import at_here, warn
from ..messages.tracebacks import entry
from ..shards.reader import like_leaf, readers, variable_of, whole
from ..shards.tensor import refuse_at_rest
from ..state.arena import BufferSpec
from ..state.handle import Leaf
from ..tree import path_string

__all__ = [
    "grad",
    "refuse_undifferentiable",
    "refuse_vector",
    "split_result",
    "value_and_grad",
]

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
    if not callable(fn):
        raise TypeError(
            f"value_and_grad: expected a function, got {name}.\n"
            "To fix: `loss, grads = fcg.value_and_grad(loss_fn)(state.params, batch)`: what `fcg.value_and_grad` "
            "returns is a function, to be called."
        )

    @entry(f"fcg.value_and_grad({name})(state.params, ...)")
    @wraps(fn)
    def wrapped(params: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_transforms(name)
        flat, treedef = pytree.flatten(params)
        refuse_undifferentiable(name, treedef, flat)
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
                value, aux = split_result(name, out) if has_aux else (out, None)
                aux = pytree.map(whole, aux)
                refuse_vector(name, value)
                nested = recording and _depends_on_others([value, *pytree.leaves(aux)], leaves)
                grads = _gradients(value, leaves, create_graph=nested)
            grads = [like_leaf(leaf, grad) for leaf, grad in zip(flat, grads, strict=True)]
        if leaves and not value.requires_grad:
            _warn_of_zeros(name, fn)
        for leaf in leaves:
            if leaf.is_leaf:
                leaf.requires_grad_(False)  # so that an outer call that meets it in its graph ignores it
        if not nested:
            value, aux = (
                value.detach(),
                pytree.map(lambda one: one.detach() if isinstance(one, Tensor) else one, aux),
            )
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


def _depends_on_others(results: Iterable[Any], leaves: Sequence[Tensor]) -> bool:
    """Whether results depend on other leaves: then an outer call differentiates through this one."""
    ours = {id(leaf) for leaf in leaves}

    def is_other(leaf: Tensor) -> bool:
        return leaf.requires_grad and id(leaf) not in ours and not is_constant(leaf)

    roots = [tensor for tensor in results if isinstance(tensor, Tensor) and tensor.requires_grad]
    if any(tensor.is_leaf and is_other(tensor) for tensor in roots):
        return True
    stack, seen = [tensor.grad_fn for tensor in roots], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, _LEAF_NODE) and is_other(node.variable):
            return True
        stack.extend(parent for parent, _ in node.next_functions)
    return False


def split_result(name: str, out: Any) -> tuple[Any, Any]:
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


def _warn_of_zeros(name: str, fn: Callable[..., Any]) -> None:
    """Warn that a value has no gradient; in a trace, when it ends."""
    try:
        first = f"`{next(iter(signature(fn).parameters))}`"
    except ValueError:  # torch's own functions have no signature
        first = "its first argument"
    text = (
        f"`{name}`: its value depends on no leaf of its first argument, so all gradients are zero{at_here()}.\n"
        f"To fix: compute it with {first}, not with the state from outside, and without `.detach()`, "
        "`torch.no_grad()` or `.item()` in between."
    )
    work = running().work
    if work is None:
        warn(text)
    else:
        work.warnings.append(text)


def refuse_undifferentiable(name: str, treedef: pytree.Treedef, flat: Sequence[Any]) -> None:
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


def refuse_vector(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
        got = BufferSpec.of(value) if isinstance(value, Tensor) else type(value).__name__
        raise LayoutError.of(
            name,
            "the value to differentiate is not a floating scalar.",
            rows=[f"value  expected f32[]   got {got}"],
            fix="reduce it, `loss.mean()`; return further results with `has_aux=True`.",
        )
