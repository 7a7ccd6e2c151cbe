"""The leaves of a state as a flat dict of host tensors under dotted names, and back into the same slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import tree as pytree
from ..ambient.modes import ordinary, without_gradients
from ..concurrency.turns import at_one_time
from ..errors import LayoutError
from ..messages.tracebacks import entry
from ..shards.tensor import Sharded
from ..state.arena import BufferSpec, refuse_unplaceable
from ..state.handle import Handle
from ..state.leaf import Leaf, as_tensor, key_name, owned, turns_of
from ..tree import Treedef, path_string
from .matching import Part, check_range, matched, memory_of, type_of

__all__ = [
    "load_state_dict",
    "names_of",
    "opened",
    "put",
    "slots_of",
    "state_dict",
    "written",
]

T = TypeVar("T")


@entry()
def state_dict(state: Any) -> dict[str, Tensor]:
    """Copy the leaves of a state, of part of a state, or of a plain pytree to the host, under dotted names.

    The tensors are contiguous and owned by the caller: ``torch.save`` them (``torch.load`` needs no
    ``weights_only=False``), or let :func:`save` write them. Parameters keep the names they have in their
    module, so ``module.load_state_dict(fcg.state_dict(state.params))`` loads them back into the module.

    Args:
      state: A handle or a pytree of tensors; Python numbers and numpy arrays become tensors.
    Returns:
      One CPU tensor per leaf, in flat order, with the leaf's shape and dtype.
    Raises:
      DonatedStateError: If the handle was donated.
      LayoutError: If a leaf is not a dense tensor, or is sharded.
      ValueError: If two leaves have the same name, as in ``{"a.b": x, "a": {"b": y}}``.

    Example:
      >>> import torch, functional_cg as fcg
      >>> module = torch.nn.Linear(2, 1)
      >>> params = dict(module.named_parameters())
      >>> state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
      >>> list(fcg.state_dict(state))
      ['step', 'params.bias', 'params.weight']
      >>> module.load_state_dict(fcg.state_dict(state.params))
      <All keys matched successfully>
    """
    leaves, treedef = opened(state)
    names = names_of(treedef)
    return dict(zip(names, at_one_time(turns_of(leaves), partial(_all_on_host, names, leaves)), strict=True))


@entry("state = fcg.load_state_dict(state, values)")
def load_state_dict(state: T, d: Mapping[str, Any], *, part: Part = None, cast: bool = False) -> T:
    """Write a flat dict, as returned by :func:`state_dict`, into a state; donates the handle.

    The values go into the memory of the state: steps keep their captures, and leaves keep their strides. A
    plain pytree is not written to; a copy is returned. A module is written to.

    Args:
      state: A handle, a pytree of tensors, or a module.
      d: One value per leaf, of the leaf's shape and dtype: tensors on any device, or numpy arrays.
      part: Which leaves, if not all, and under which names: see :func:`load`.
      cast: Whether floating values of another floating dtype are converted to that of the leaf.
    Returns:
      The new handle, the new pytree, or the module.
    Raises:
      DonatedStateError: If the handle was donated.
      LayoutError: If names are missing or unexpected, or values do not fit; lists them all, writes nothing.
      TypeError: If ``d`` is not a mapping, or ``state`` is part of a state.

    Example:
      >>> import torch, functional_cg as fcg
      >>> module = torch.nn.Linear(2, 1)
      >>> params = dict(module.named_parameters())
      >>> state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
      >>> kept = fcg.state_dict(state)
      >>> state = state.replace(step=7)
      >>> state = fcg.load_state_dict(state, kept)
      >>> int(state.step)
      0
      >>> pretrained = torch.nn.Linear(2, 1).state_dict()
      >>> state = fcg.load_state_dict(state, pretrained, part={"params": ""})
    """
    return written(state, d, "fcg.load_state_dict", part=part, cast=cast)


def written(
    state: T, d: Mapping[str, Any], function: str, where: str = "", part: Part = None, *, cast: bool = False
) -> T:
    """Write values into a state by name; see :func:`load_state_dict`."""
    if not isinstance(d, Mapping):
        raise TypeError(
            f"{function}: expected a dict of names and tensors, got {type(d).__name__}.\n"
            f"To fix: `state = {function}(state, values)`, the state first."
        )
    slots, optional = slots_of(state, function)
    values = {name: owned(as_tensor(value)) for name, value in d.items()}
    types = {name: type_of(value) for name, value in values.items()}
    found = matched(slots, types, function, where, part, cast=cast, optional=optional)
    values = {name: values[source] for name, source in found.items()}
    with ordinary():
        without_gradients()
        check_range(slots, values, function)
    return put(state, slots, values, function)


def slots_of(state: Any, function: str) -> tuple[dict[str, Tensor], set[str]]:
    """Return the leaves of a state, or the tensors of a module, by name; and those that need no value.

    Raises:
      TypeError: For a part of a state, which cannot be written to.
    """
    if isinstance(state, Handle) and state._owner is not None:
        path = state._part.path
        raise TypeError(
            f"{function}: `{path}` is a part of a state; write through the whole.\n"
            f'To fix: `state = fcg.load_state_dict(state, d, part={{"params": ""}})`, for example; a file, '
            '`state = fcg.load(path, state, part="params")`.'
        )
    optional: set[str] = set()
    if isinstance(state, nn.Module):
        tensors = [module(remove_duplicate=False) for module in (state.named_parameters, state.named_buffers)]
        optional = {
            f"{path}.{name}".lstrip(".")
            for path, module in state.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }
        state = dict(chain(*tensors))
    leaves, treedef = opened(state)
    return dict(zip(names_of(treedef, function), leaves, strict=True)), optional


def put(state: T, slots: Mapping[str, Tensor], values: Mapping[str, Tensor], function: str) -> T:
    """Write values into the leaves of a state, of a copy of a plain pytree, or into the tensors of a module."""
    with ordinary():
        without_gradients()
        values = {name: value.to(slots[name].dtype) for name, value in values.items()}
        if isinstance(state, Handle):
            new = {position: values[name] for position, name in enumerate(slots) if name in values}
            return state._write(new, function, [])  # type: ignore[return-value]
        first = {memory_of(slots[name]): value for name, value in reversed(values.items())}
        if isinstance(state, nn.Module):
            rows = [name for name, value in values.items() if not _same(value, first[memory_of(slots[name])])]
            if rows:
                raise LayoutError.of(
                    "",
                    f"{function}: names of one tensor have different values; the module is unchanged.",
                    rows=rows,
                    fix="load one of them, `part={...: None}` for the others; or untie the module's tensors.",
                )
            fixed = [
                f"{name}  expected memory that can be written   got "
                + ("an inference tensor" if one.is_inference() else "several elements in one place")
                for name, one in slots.items()
                if name in values
                and (
                    one.is_inference()
                    or any(size > 1 > step for size, step in zip(one.shape, one.stride(), strict=True))
                )
            ]
            if fixed:
                raise LayoutError.of(
                    "",
                    f"{function}: the module has tensors that cannot be written; it is unchanged.",
                    rows=fixed,
                    fix="give them memory of their own, a buffer by `module.name = module.name.clone()`, a parameter "
                    "by `module.name = torch.nn.Parameter(module.name.clone())`.",
                )
            for name, value in values.items():
                slots[name].copy_(value)
            return state
        # Of a tensor with several names, one may have the value.
        copies = [
            torch.empty_like(leaf).copy_(values.get(name, first.get(memory_of(leaf), leaf)))
            for name, leaf in slots.items()
        ]
    return pytree.unflatten(pytree.flatten(state)[1], copies)  # type: ignore[no-any-return]


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two values have the same bits: a NaN equals itself."""
    one_bits, other_bits = (value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return one_bits.equal(other_bits)


def opened(state: Any) -> tuple[list[Tensor], Treedef]:
    """Return the leaves of a state as tensors, and its structure."""
    flat, treedef = pytree.flatten(state)
    leaves = [as_tensor(leaf) for leaf in flat]
    plain = [
        (path, leaf)
        for path, leaf in zip(treedef.paths(), leaves, strict=True)
        if not isinstance(leaf, Leaf | Sharded)
    ]
    refuse_unplaceable([path for path, _ in plain], [leaf for _, leaf in plain], [None] * len(plain), "state")
    return leaves, treedef


def names_of(treedef: Treedef, function: str = "fcg.state_dict", root: str = "state") -> list[str]:
    """Return the dotted names of all leaves, in flat order.

    Dots inside a key stay as they are, because a module's own names contain them.

    Raises:
      ValueError: If two leaves would get the same name.
    """
    paths: dict[str, Any] = {}
    for path in treedef.paths():
        name = ".".join(str(key_name(key)) for key in path)
        if name in paths:
            raise ValueError(
                f"{function}: `{path_string(paths[name], root)}` and `{path_string(path, root)}` have the same name, "
                f"{name!r}. To fix: rename one of the keys."
            )
        paths[name] = path
    return list(paths)


def _all_on_host(names: Sequence[str], leaves: Sequence[Tensor]) -> list[Tensor]:
    with ordinary():
        without_gradients()
        return [_on_host(name, leaf) for name, leaf in zip(names, leaves, strict=True)]


def _on_host(name: str, leaf: Tensor) -> Tensor:
    if isinstance(leaf, Sharded):
        raise LayoutError.of(
            "",
            "fcg.state_dict: the state is sharded.",
            rows=[f"{name}  {BufferSpec.of(leaf)}"],
            why="This rank holds its shards only.",
            fix="`fcg.sharding.state_dict(state)`, on all ranks; rank 0 gets all of it.",
        )
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu").copy_(leaf)
