"""Sweeps: a step that is written for one model trains many at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from .. import tree as pytree
from ..ambient.running import running
from ..errors import LayoutError
from ..messages.tracebacks import entry
from ..shards.tensor import placed
from ..state.arena import BufferSpec
from ..tree import path_string

__all__ = ["sweep"]

_ACTIVE = "active"


@entry("fcg.sweep(train_step)")
def sweep(fn: Callable[..., Any], *, each: str | Collection[str] = ()) -> Callable[..., Any]:
    """Make a step of one model a step of many, whose states are one state with the member axis first.

    The function is traced for one member, so it may do whatever a single step may: ``value_and_grad``, fused
    optimizers, dropout by the member's key, batch norm, ``microbatches``, ``scan``, ``cond``. Its calls are then
    recorded for all members: products as batched products, the optimizer over all members in one kernel. Each member
    computes what it computes alone, up to the order in which a batched kernel sums.

    Whatever differs between members is in their states: seeds, initial values, and hyperparameters of
    :class:`functional_cg.optim.inject_hyperparams`, which :func:`functional_cg.optim.set_hyperparams` sets for each.
    :func:`functional_cg.tree.stack` makes one state of many, and :func:`functional_cg.tree.take` returns a member, or
    a selection of them in any order.

    The new function takes one more keyword argument, ``active``, bool[n]: members where it is false keep their state.

    Args:
      fn: ``fn(state, *inputs) -> (state, metrics)``, or any function whose first argument is a pytree of tensors.
      each: Names of further arguments with the member axis, such as ``"batch"`` if each member has a batch of its own.
        All members share the others.
    Returns:
      A function of the same arguments. Its results are those of the members, stacked: tensors [n, ...]. Results that
      are not tensors are those of the first member.
    Raises:
      TypeError: If ``fn`` has no argument of a name in ``each``, or one called ``active``.
      LayoutError: If arguments with the member axis have no common first dimension, or are on a mesh, or if ``active``
        is not bool[n].
      CaptureError: If the function runs a pipeline, or a gradient is taken of the sweep: a member takes its own.

    Example:
      >>> import torch, functional_cg as fcg
      >>> apply, _, _ = fcg.from_module(torch.nn.Linear(4, 1))
      >>> def train_step(state, batch):
      ...     x, y = batch
      ...     loss = lambda params: (apply(params, {}, x)[0] - y).square().mean()
      ...     value, grads = fcg.value_and_grad(loss)(state.params)
      ...     return state.apply_gradients(grads), {"loss": value}
      >>> def create(seed):
      ...     torch.manual_seed(seed)
      ...     params = fcg.from_module(torch.nn.Linear(4, 1))[1]
      ...     return fcg.TrainState.create(params=params, optimizer=fcg.optim.adam(1e-3))
      >>> step = fcg.graph_step(fcg.sweep(train_step))
      >>> state = fcg.tree.stack([create(seed) for seed in range(16)])
      >>> state, metrics = step(state, (torch.ones(8, 4), torch.ones(8, 1)))
      >>> metrics["loss"].shape
      torch.Size([16])
      >>> best = fcg.tree.take(state, metrics["loss"].nan_to_num(torch.inf).argmin())
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    signature = inspect.signature(fn)
    own = [next(iter(signature.parameters), ""), *([each] if isinstance(each, str) else each)]
    for argument in own:
        if argument not in signature.parameters:
            raise TypeError(
                f"sweep: `{name}` has no argument {argument!r}; it has {', '.join(signature.parameters) or 'none'}."
            )
    if _ACTIVE in signature.parameters:
        raise TypeError(
            f"sweep: `{name}` has an argument `{_ACTIVE}`, which the sweep adds: it tells which members are trained.\n"
            "To fix: give it another name; of what is a sweep already, `lambda state, batch: swept(state, batch)`."
        )

    @wraps(fn)
    def of_all(*args: Any, active: Tensor | None = None, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        trees = {argument: bound.arguments[argument] for argument in own if argument in bound.arguments}
        leaves, treedef = pytree.flatten(trees)
        owners = [str(path[0]).strip("[]'") for path in treedef.paths()]
        names = [path_string(path[1:], of) for path, of in zip(treedef.paths(), owners, strict=True)]
        count = _members(name, [of == own[0] for of in owners], names, leaves)
        _check_active(name, active, count)
        returned = _Returned()

        def of_one(tensors: Sequence[Tensor]) -> list[Tensor]:
            bound.arguments.update(pytree.unflatten(treedef, list(tensors)))
            return returned.keep(fn(*bound.args, **bound.kwargs))

        out = returned.rebuilt(running().for_members(of_one, leaves, names, count))
        if active is None:
            return out
        new, *rest = out if isinstance(out, tuple) else (out,)
        if pytree.flatten(new)[1] != pytree.flatten(trees[own[0]])[1]:
            raise LayoutError.of(
                name,
                "gets `active`, and returns no new state, of which members could keep the old one.",
                fix="leave `active` out; of results, select those that count.",
            )
        new = pytree.map(partial(_where, active), new, trees[own[0]])
        return (new, *rest) if isinstance(out, tuple) else new

    parameters = list(signature.parameters.values())
    place = next((n for n, one in enumerate(parameters) if one.kind is one.VAR_KEYWORD), len(parameters))
    parameters.insert(place, inspect.Parameter(_ACTIVE, inspect.Parameter.KEYWORD_ONLY, default=None))
    of_all.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return of_all


class _Returned:
    """What the function of one member returns: its structure, and its leaves that are no tensors."""

    def keep(self, out: Any) -> list[Tensor]:
        """Return the tensors of a result."""
        leaves, self._treedef = pytree.flatten(out)
        self._leaves = leaves
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        """Return the result with other tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return pytree.unflatten(self._treedef, leaves)


def _where(active: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(active.view(-1, *[1] * (new.dim() - 1)), new, old)


def _check_active(function: str, active: Any, count: int) -> None:
    if active is None:
        return
    if not isinstance(active, Tensor) or active.dtype is not torch.bool or active.shape != (count,):
        got = BufferSpec.of(active) if isinstance(active, Tensor) else type(active).__name__
        raise LayoutError.of(
            function,
            "is swept over members, and `active` does not say of each whether it is trained.",
            rows=[f"active  expected bool[{count}]   got {got}"],
            fix="`active=losses < 10`, one for each member.",
        )


def _members(function: str, is_state: Sequence[bool], names: Sequence[str], leaves: Sequence[Any]) -> int:
    """Return the number of members.

    Args:
      function: Name of the swept function.
      is_state: Whether each leaf with the member axis is of the first argument.
      names: Of these leaves, each with that of its argument in front.
      leaves: The leaves.

    Raises:
      LayoutError: If leaves have none, or another one than others.
    """
    sizes = [leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else 0 for leaf in leaves]
    of_state = [size for size, one in zip(sizes, is_state, strict=True) if one] or sizes
    count = max(of_state, key=of_state.count, default=0)
    shown = count if count and 2 * of_state.count(count) > len(of_state) else "n"
    wrong = {
        name: f"{name}  expected a tensor [{shown}, ...]   got "
        + (str(BufferSpec.of(leaf)) if isinstance(leaf, Tensor) else type(leaf).__name__)
        for name, leaf, size in zip(names, leaves, sizes, strict=True)
        if size != count or not count
    }
    if wrong or not count:
        only_inputs = wrong and {*of_state} == {count}
        raise LayoutError.of(
            function,
            "is swept over members, and its arguments have no common member axis.",
            rows=[*wrong.values()],
            why="The first dimension of each leaf of the state, and of the arguments in `each`, is the number of the "
            "member.",
            fix="stack what each member gets, `torch.stack([x, x])`; leave what all share out of `each`."
            if only_inputs
            else "`state = fcg.tree.stack([create(seed) for seed in range(16)])`.",
        )
    on_mesh = [name for name, leaf in zip(names, leaves, strict=True) if placed(leaf) is not None]
    if on_mesh:
        raise LayoutError.of(
            function,
            "is swept over members of a state on a mesh.",
            rows=on_mesh,
            why="A leaf is cut over ranks or over members.",
            fix="a state of its own members on each rank, without a mesh.",
        )
    return count
