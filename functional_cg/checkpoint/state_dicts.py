"""The leaves of a state as a flat dict of host tensors under dotted names, and back into the same slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import tree as pytree
from ..ambient.modes import ordinary, without_gradients
from ..concurrency.turns import at_one_time
from ..errors import LayoutError
from ..messages.tracebacks import entry
from ..shards.tensor import Sharded
from ..state.arena import BufferSpec, refuse_unplaceable, unplaceable
from ..state.handle import Handle
from ..state.leaf import Leaf, as_tensor, key_name, owned, turns_of
from ..tree import Treedef, path_string

__all__ = [
    "load_state_dict",
    "names_of",
    "opened",
    "refuse_misfits",
    "refuse_part",
    "state_dict",
    "type_of",
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
def load_state_dict(state: T, d: Mapping[str, Any]) -> T:
    """Write a flat dict, as returned by :func:`state_dict`, into a state; donates the handle.

    The values go into the memory of the state: steps keep their captures, and leaves keep their strides. A
    plain pytree is not written to; a copy is returned. To load only part of a state, such as the parameters
    of a pretrained module, use ``state.replace``.

    Args:
      state: A handle, or a pytree of tensors.
      d: One value per leaf, of the leaf's shape and dtype: tensors on any device, or numpy arrays.
    Returns:
      The new handle, or the new pytree.
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
      >>> state = state.replace(params={name: pretrained[name] for name in state.params})
    """
    return written(state, d, "fcg.load_state_dict")


def written(state: T, d: Mapping[str, Any], function: str, where: str = "") -> T:
    """Write values into a state by name; see :func:`load_state_dict`."""
    if not isinstance(d, Mapping):
        raise TypeError(
            f"{function}: expected a dict of names and tensors, got {type(d).__name__}.\n"
            f"To fix: `state = {function}(state, values)`, the state first."
        )
    refuse_part(state, function)
    leaves, treedef = opened(state)
    values = {name: owned(as_tensor(value)) for name, value in d.items()}
    slots = dict(zip(names_of(treedef), leaves, strict=True))
    refuse_misfits(
        {name: type_of(slot) for name, slot in slots.items()},
        {name: type_of(value) for name, value in values.items()},
        function,
        where,
    )
    ordered = [values[name] for name in slots]
    if isinstance(state, Handle):
        return state._write(dict(enumerate(ordered)), function, [])  # type: ignore[return-value]
    with ordinary():
        without_gradients()
        copies = [torch.empty_like(leaf).copy_(value) for leaf, value in zip(leaves, ordered, strict=True)]
    return pytree.unflatten(treedef, copies)  # type: ignore[no-any-return]


def refuse_part(state: Any, function: str) -> None:
    """Raise ``TypeError`` for a part of a state, which cannot be written to."""
    if isinstance(state, Handle) and state._owner is not None:
        path = state._part.path
        raise TypeError(
            f"{function}: `{path}` is a part of a state; write through the whole: "
            f"`state = state.replace(params=fcg.load_state_dict(fcg.snapshot({path}), d))`, for example"
        )


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


def _part_fix(slots: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Return the fix for values that are those of a field, such as the parameters; "" for others."""
    fields = dict.fromkeys(name.partition(".")[0] for name in slots if "." in name)
    for field in fields:
        if set(values) == {name.partition(".")[2] for name in slots if name.startswith(f"{field}.")}:
            return f"these are the names of one field: `state = state.replace({field}=dict(values))`."
    return ""


def refuse_misfits(slots: Mapping[str, str], values: Mapping[str, str], function: str, where: str) -> None:
    """Compare the types of slots with those of values, by name.

    Raises:
      LayoutError: With one row for each name that is missing, unexpected, or has another shape or dtype.
    """
    rows = [
        f"{name}  expected {slots.get(name, 'nothing')}   got {values.get(name, 'nothing')}"
        for name in [*slots, *(name for name in values if name not in slots)]
        if slots.get(name) != values.get(name)
    ]
    if rows:
        raise LayoutError.of(
            "",
            f"{function}: the values{where} do not fit `state`, which is unchanged.",
            rows=rows,
            why="The memory of each name has a fixed shape and dtype.",
            fix=_part_fix(slots, values)
            or "create the state as it was when the values were saved (model, optimizer, fields), or rename and "
            "convert the values first; nothing is broadcast and nothing is cast.",
        )


def type_of(value: Any) -> str:
    """Return dtype and shape as text, without the device, which may differ."""
    problem = "" if isinstance(value, Leaf | Sharded) else unplaceable(value)
    return problem or str(BufferSpec.of(value)).partition("@")[0]
