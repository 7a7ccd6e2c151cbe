"""Control flow inside a step: ``cond`` on the device, and ``scan`` over a leading dimension.

A captured graph runs the same kernels at each call. So ``cond`` runs both branches and selects, and ``scan`` is
unrolled. Names and argument order are those of ``jax.lax``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import tree as pytree
from ..errors import LayoutError
from ..messages.tracebacks import entry
from ..state.arena import BufferSpec
from ..tensors.aten import is_batched, is_in_place, one_unwrapped, tensors_in
from ..tree import path_string, structure_diff

__all__ = ["cond", "scan"]

_ABOUT_TENSORS = frozenset("__get__ __set__ backward register_hook retain_grad requires_grad_".split())


@entry("fcg.cond(pred, lambda: a, lambda: b)")
def cond(pred: Tensor, true_fn: Callable[..., Any], false_fn: Callable[..., Any], *operands: Any) -> Any:
    """Select ``true_fn(*operands)`` if ``pred`` is true, else ``false_fn(*operands)``; both branches run.

    Use it for a condition that only the device knows. For one that Python knows, use an ordinary ``if``.

    Both branches cost time at each call. The one that is not selected passes no gradient on, of any order: an infinite
    derivative or a NaN in it does no harm, unlike with ``torch.where``.

    Args:
      pred: bool, of shape [].
      true_fn: Returns a pytree of tensors.
      false_fn: Returns a pytree of the same structure, shapes and dtypes.
      operands: Passed to both.
    Returns:
      The selected pytree. If both branches return the same tensor as a leaf, it is returned as it is; other leaves are
      new tensors.
    Raises:
      TypeError: If ``pred`` is not a tensor of dtype bool and shape [].
      LayoutError: If the branches return different structures, shapes or dtypes, or leaves that are not tensors.

    Example:
      >>> import torch, functional_cg as fcg
      >>> @fcg.graph_fn
      ... def clipped(x):
      ...     return fcg.cond(x.norm() > 1, lambda x: x / x.norm(), lambda x: x, x)
      >>> clipped(torch.tensor([3.0, 4.0])), clipped(torch.tensor([0.3, 0.4]))
      (tensor([0.6000, 0.8000]), tensor([0.3000, 0.4000]))
    """
    if not isinstance(pred, Tensor) or pred.dtype != torch.bool or pred.dim():
        got = str(BufferSpec.of(pred)) if isinstance(pred, Tensor) else repr(pred)
        raise TypeError(
            f"cond: `pred` has to be a tensor of dtype bool and shape [], got {got}; a condition of Python is an `if`"
        )
    if not callable(true_fn) or not callable(false_fn):
        raise TypeError(
            "cond: the branches have to be functions, of which one is selected.\n"
            "To fix: `fcg.cond(pred, lambda: a, lambda: b)`; of two tensors, `torch.where(pred, a, b)`."
        )
    with _Side(pred):
        chosen = true_fn(*operands)
    with _Side(~pred):
        other = false_fn(*operands)
    _refuse_unlike("cond", "false_fn", chosen, "true_fn", other)
    return pytree.map(lambda one, two: one if one is two else torch.where(pred, one, two), chosen, other)


class _Gate(torch.autograd.Function):
    """The identity, which passes a gradient on if a side is selected, and zeros otherwise, whatever the gradient is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, selected: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (selected,) = ctx.saved_tensors
        (gradient,) = gradients
        return torch.where(selected, gradient, 0), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].view_as(tangents[0])


class _Side(TorchFunctionMode):
    """What a branch reads from outside, by argument or by closure, passes a gate.

    Args:
      selected: bool[]: whether the branch is selected.
    """

    def __init__(self, selected: Tensor) -> None:
        super().__init__()
        self._selected = selected
        self._made: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._gated: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled() or _is_about_tensors(func):
            return func(*args, **kwargs)
        if is_in_place(getattr(func, "__name__", "")):  # what is written stays itself
            return func(*args[:1], *self._inside(args[1:]), **self._inside(kwargs))
        out = func(*self._inside(args), **self._inside(kwargs))
        self._made.update((id(one), one) for one in tensors_in([out]))
        return out

    def _inside(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._behind_the_gate(value) if _differentiated(value) else value
        if isinstance(value, dict):
            return {name: self._inside(one) for name, one in value.items()}
        if type(value) in (list, tuple):  # an index that is a list means something else
            return type(value)(map(self._inside, value))
        return value

    def _behind_the_gate(self, tensor: Tensor) -> Tensor:
        if self._made.get(id(tensor)) is tensor:
            return tensor
        if id(tensor) not in self._gated:
            outer = tensor.view_as(tensor)  # which passes the gate of an outer branch
            self._gated[id(tensor)] = tensor, _Gate.apply(outer, self._selected)
        return self._gated[id(tensor)][1]


def _differentiated(tensor: Tensor) -> bool:
    while is_batched(tensor):  # it shows beneath
        tensor = one_unwrapped(tensor)
    return tensor.requires_grad


def _is_about_tensors(func: Any) -> bool:
    """Whether a function asks or sets what a tensor is, or differentiates; it computes nothing from it."""
    name, module = getattr(func, "__name__", ""), getattr(func, "__module__", None) or ""
    return name in _ABOUT_TENSORS or module.startswith("torch.autograd")


@entry("carry, ys = fcg.scan(lambda carry, x: (carry, y), init, xs)")
def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    length: int | None = None,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Loop over the first dimension of ``xs`` with a carry; the loop is unrolled, one copy of the body per element.

    Args:
      fn: ``fn(carry, x) -> (carry, y)``; the new carry has the structure, shapes and dtypes of the old one.
      init: The initial carry.
      xs: A pytree of tensors [n, ...]; ``x`` is the tree of their elements. None to loop without ``xs``.
      length: The number of elements; required if ``xs`` has no leaves.
      reverse: Whether to start with the last element; ``ys`` keep the order of ``xs``.
    Returns:
      The final carry, and the ``y`` of all elements, stacked: tensors [n, ...].
    Raises:
      TypeError: If ``fn`` does not return a pair, or ``length`` is not an integer.
      ValueError: If there is no length, or the loop has no elements and so nothing to stack.
      LayoutError: If leaves of ``xs`` have no length or different lengths, or a carry or ``y`` differs in structure,
        shapes or dtypes from the one before or has a leaf that is not a tensor.

    Example:
      >>> import torch, functional_cg as fcg
      >>> fcg.scan(lambda total, x: (total + x, total), torch.tensor(0), torch.tensor([1, 2, 3]))
      (tensor(6), tensor([0, 1, 3]))

      Several training steps in one graph, on batches [k, ...]; the metrics of a call are those of its steps:

      >>> @fcg.graph_step
      ... def train_step(state, batch):
      ...     return {"n": state["n"] + batch.sum()}, {"n": state["n"]}
      >>> @fcg.graph_step
      ... def several_steps(state, batches):
      ...     return fcg.scan(train_step, state, batches)
      >>> several_steps({"n": torch.tensor(0.0)}, torch.ones(3, 2))[1]
      {'n': tensor([0., 2., 4.])}
    """
    if length is not None and type(length) is not int:
        raise TypeError(f"scan: `length` has to be an integer, got {length!r}")

    def pair(carry: Any, x: Any) -> tuple[Any, Any]:
        out = fn(carry, x)
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(
                f"scan: `fn` has to return a pair (carry, y), got {type(out).__name__}.\n"
                "To fix: `return carry, None` if there is nothing to collect, `return carry, y` otherwise."
            )
        return out

    leaves, treedef = pytree.flatten(xs)
    count = _length(leaves, treedef, length)
    columns = [leaf.unbind(0) for leaf in leaves]
    elements = [pytree.unflatten(treedef, [column[i] for column in columns]) for i in range(count)]
    return loop(pair, init, elements, names=("scan", "carry", "y"), reverse=reverse)


def loop(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    elements: Sequence[Any],
    *,
    names: tuple[str, str, str],
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Run the loop of :func:`scan` over elements; ``names`` are function, carry and ``y`` for error messages."""
    function, carried, stacked = names
    ys: list[Any] = []
    for element in reversed(elements) if reverse else elements:
        new, y = fn(carry, element)
        _refuse_unlike(function, carried, carry, f"the {carried} before", new)
        _refuse_unlike(function, stacked, ys[0] if ys else y, f"the first {stacked}", y)
        carry = new
        ys.append(y)
    return carry, pytree.map(lambda *column: torch.stack(column), *(reversed(ys) if reverse else ys))


def _length(leaves: list[Any], treedef: pytree.Treedef, length: int | None) -> int:
    rows = [
        f"{path_string(path, 'xs')}  expected a tensor [{'n' if length is None else length}, ...]   got "
        + (str(BufferSpec.of(leaf)) if isinstance(leaf, Tensor) else type(leaf).__name__)
        for path, leaf in zip(treedef.paths(), leaves, strict=True)
    ]
    sizes = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else -1 for leaf in leaves}
    sizes |= set() if length is None else {length}
    if leaves and (len(sizes) > 1 or -1 in sizes):
        raise LayoutError.of(
            "scan",
            "`xs` has no common first dimension.",
            rows=rows,
            fix="pass what is the same for all elements by closure; `length` may be left out where there are `xs`.",
        )
    if max(sizes, default=0) < 1:
        raise ValueError(
            "scan: there is no element; give `xs` with a first dimension of 1 or more, or `length`"
        )
    return int(max(sizes))


def _refuse_unlike(function: str, name: str, expected: Any, other: str, got: Any) -> None:
    """Refuse two trees of different structures, shapes or dtypes."""
    want, treedef = pytree.flatten(expected)
    have, found = pytree.flatten(got)
    rows = structure_diff(treedef, found, name)
    if not rows:
        rows = [
            f"{path_string(path, name)}  {_difference(a, b)}"
            for path, a, b in zip(treedef.paths(), want, have, strict=True)
            if not (isinstance(a, Tensor) and isinstance(b, Tensor))
            or (a.shape, a.dtype) != (b.shape, b.dtype)
        ]
    if rows:
        raise LayoutError.of(
            function,
            f"`{name}` is unlike {other}.",
            rows=rows,
            why="One graph serves all values, so shapes and dtypes cannot depend on them.",
            fix="return tensors of the same structure, shapes and dtypes; a number as `torch.full((), 0.0)`.",
        )


def _difference(expected: Any, got: Any) -> str:
    if not isinstance(expected, Tensor):
        return f"expected a tensor   got {expected!r}"
    return f"expected {BufferSpec.of(expected)}   got " + (
        str(BufferSpec.of(got)) if isinstance(got, Tensor) else repr(got)
    )
