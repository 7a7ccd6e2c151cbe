"""Which classes are pytree nodes: registered ones, such as dataclasses with static fields, and torch's block masks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch.utils import _pytree as torch_pytree
from typing_extensions import dataclass_transform

from .sameness import alike

__all__ = [
    "as_node",
    "register_dataclass",
    "register_dataclass_node",
    "registered_node",
    "same_static",
    "static",
]

T = TypeVar("T")

_STATIC = "functional_cg.static"


def static(**options: Any) -> Any:
    """Declare a static dataclass field, part of the structure: a name, a number of layers, an activation.

    The value is baked into a graph, so states that differ in it have different layouts. Values are compared
    by type and ``==``, numbers also by their bits: 1, 1.0 and True differ. Arrays and tensors are leaves and
    cannot be static.

    Args:
      options: Options of ``dataclasses.field``, such as ``default``.

    Example:
      >>> import torch, functional_cg as fcg
      >>> class Run(fcg.TrainState):
      ...     name: str = fcg.tree.static(default="run")
      >>> state = Run.create(params={"w": torch.ones(2)}, optimizer=fcg.optim.sgd(0.1), name="first")
      >>> state.name
      'first'
    """
    return dataclasses.field(metadata={_STATIC: True}, **options)


def same_static(a: Any, b: Any) -> bool:
    """Whether two static values make the same graph: of one type, equal, with numbers equal to the bit.

    Raises:
      TypeError: If the values cannot be compared.
    """
    try:
        return alike(a, b)
    except TypeError as error:
        raise TypeError(
            f"static {error}; "
            "make an array a leaf of the tree, or give the class an `__eq__` that returns a bool"
        ) from None


@overload
def register_dataclass(cls: type[T], /) -> type[T]: ...
@overload
def register_dataclass(*, static: Sequence[str] = ...) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def register_dataclass(cls: type[Any] | None = None, /, *, static: Sequence[str] = ()) -> Any:
    """Register a dataclass as a pytree node; fields in ``static``, or declared so, are part of the structure.

    A class that is not yet a dataclass becomes a frozen one. Nodes are rebuilt without ``__init__`` and
    ``__post_init__``, so neither can create stray tensors.

    Example:
      >>> from functional_cg import tree
      >>> @tree.register_dataclass(static=("name",))
      ... class Point:
      ...     x: int
      ...     name: str
      >>> tree.map(lambda v: v + 1, Point(1, "p"))
      Point(x=2, name='p')
    """
    if cls is None:
        return lambda owner: register_dataclass_node(owner, static)
    return register_dataclass_node(cls, static)


def register_dataclass_node(cls: type[T], static: Sequence[str] = ()) -> type[T]:
    """Register ``cls`` with torch's pytree registry; see :func:`register_dataclass`."""
    if "__dataclass_fields__" not in cls.__dict__:
        cls = dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = [field.name for field in fields]
    unknown = sorted(set(static) - set(names))
    if unknown:
        raise ValueError(f"register_dataclass: {cls.__name__} has no field named {', '.join(unknown)}")
    static = [field.name for field in fields if field.name in static or _STATIC in field.metadata]
    dynamic = [name for name in names if name not in static]

    def flatten_fn(node: Any) -> tuple[list[Any], Any]:
        context = tuple(getattr(node, name) for name in static)
        for name, value in zip(static, context, strict=True):
            _refuse_array(cls, name, value)
        return [getattr(node, name) for name in dynamic], context

    def flatten_with_keys_fn(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten_fn(node)
        return [
            (torch_pytree.GetAttrKey(name), child) for name, child in zip(dynamic, children, strict=True)
        ], context

    def unflatten_fn(children: Iterable[Any], context: Any) -> Any:
        node = object.__new__(cls)
        for name, value in [*zip(dynamic, children, strict=True), *zip(static, context, strict=True)]:
            object.__setattr__(node, name, value)
        return node

    torch_pytree.register_pytree_node(
        cls, flatten_fn, unflatten_fn, flatten_with_keys_fn=flatten_with_keys_fn
    )
    return cls


def as_node(value: Any, name: str) -> str:
    """Return how to make a leaf that is a container of tensors a tree, as an instruction; "" for any other leaf.

    Args:
      value: The leaf.
      name: What it is called.
    """
    kind = type(value)
    if isinstance(value, Mapping):
        held, how = list(value.values()), f"pass `dict({name})`"
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        how = f"register the class once, `fcg.tree.register_dataclass({kind.__name__})`"
    elif kind.__hash__ is None and hasattr(value, "__dict__"):  # compared by what it holds, as a namespace is
        held, how = (
            list(vars(value).values()),
            f"pass `vars({name})`, a dict: `{name}.x` becomes `{name}['x']`",
        )
    else:
        return ""
    return how if any(isinstance(part, torch.Tensor) for part in held) else ""


def registered_node(kind: type) -> torch_pytree.NodeDef | None:
    """Return how nodes of a type are taken apart and rebuilt; None for leaves.

    Beside torch's registry, torch's own block masks of flex attention are nodes: their tensors are leaves.
    """
    known = torch_pytree.SUPPORTED_NODES.get(kind)
    if (
        known is None
        and kind.__name__ == "BlockMask"
        and kind.__module__ == "torch.nn.attention.flex_attention"
    ):
        return _block_mask_node(kind)
    return known


@functools.cache
def _block_mask_node(kind: Any) -> torch_pytree.NodeDef:
    names = [*inspect.signature(kind).parameters]  # its attributes have the names of its arguments

    def keyed(mask: Any) -> tuple[list[tuple[Any, Any]], Any]:
        values = {name: getattr(mask, name) for name in names}
        leaves = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        rest = tuple((name, value) for name, value in values.items() if name not in leaves)
        return [(torch_pytree.GetAttrKey(name), leaf) for name, leaf in leaves.items()], rest

    def flat(mask: Any) -> tuple[list[Any], Any]:
        pairs, rest = keyed(mask)
        return [leaf for _, leaf in pairs], rest

    def rebuilt(leaves: Iterable[Any], rest: Any) -> Any:
        mask, fixed = object.__new__(kind), dict(rest)
        for name, leaf in zip((name for name in names if name not in fixed), leaves, strict=True):
            setattr(mask, name, leaf)
        for name, value in rest:
            setattr(mask, name, value)
        return mask

    return torch_pytree.NodeDef(kind, flat, rebuilt, keyed)


def _refuse_array(cls: type, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor) or getattr(value, "ndim", None):
        raise TypeError(
            f"`{cls.__name__}`: the static field `{name}` holds an array ({type(value).__name__}): a graph would have "
            f"its values baked in. To fix: make `{name}` a field that is not static."
        )
