"""Side effects of ATen ops: which arguments an op writes, whether it draws, whether it needs the host.

Schemas tell most of it, and the op table what they hide: batch norm writes its running statistics without declaring
it. Arguments tell the rest: attention and RNN ops have the tag ``nondeterministic_seeded`` even where they draw
nothing; integer indexing has ``dynamic_output_shape``, too. What an op's schema says is kept: torch makes new objects
for each question.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .op_table import row_of

__all__ = [
    "UNGROUPED",
    "adds_up",
    "argument",
    "can_draw",
    "copies",
    "full_name",
    "is_batched",
    "is_in_place",
    "map_tensors",
    "named_arguments",
    "of_another_library",
    "one_unwrapped",
    "only_batching_rules",
    "returns_view",
    "sync_reason",
    "tags_of",
    "tensors_in",
    "unwrapped",
    "written_arguments",
]

# dtypes without a grouped copy on CUDA.
UNGROUPED = frozenset({torch.uint16, torch.uint32, torch.uint64})

# Names of methods of tensors that write, besides those that end in `_`.
_IN_PLACE = frozenset(
    f"__{name}__"
    for name in "setitem iadd isub imul imatmul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split()
)

_PROBABILITIES = ("p", "dropout_p", "dropout")


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor is a batch under ``torch.func.vmap``."""
    return torch._C._functorch.is_batchedtensor(tensor)


@contextlib.contextmanager
def only_batching_rules() -> Iterator[None]:
    """Let ``vmap`` raise for an op without a batching rule, in place of running it once for each element."""
    functorch: Any = torch._C._functorch  # private; test_sweep notices a change
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


def one_unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor beneath one wrapper of a ``torch.func`` transform."""
    return torch._C._functorch.get_unwrapped(tensor)


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor beneath the wrappers of ``torch.func`` transforms."""
    functorch = torch._C._functorch  # private; test_nn notices a change
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in an op's argument or result, including those in lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return an argument or result of a function with ``function`` applied to each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: map_tensors(function, item) for name, item in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def named_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by schema name, defaults included."""
    named = {}
    for position, parameter in enumerate(_parameters(func)):
        if position < len(args) and not parameter.kwarg_only:
            named[parameter.name] = args[position]
        elif parameter.name in kwargs:
            named[parameter.name] = kwargs[parameter.name]
        elif parameter.has_default:
            named[parameter.name] = parameter.default
    return named


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    kwarg_only: bool
    has_default: bool
    default: Any
    is_generator: bool


@cache
def _parameters(func: Any) -> tuple[_Parameter, ...]:
    return tuple(
        _Parameter(
            one.name,
            one.kwarg_only,
            one.has_default_value(),
            one.default_value,
            str(one.type) in {"Optional[Generator]", "Generator"},
        )
        for one in func._schema.arguments
    )


@cache
def full_name(func: Any) -> str:
    """Return the name of an op with its namespace and without its overload."""
    return str(func._schema.name)


@cache
def tags_of(func: Any) -> frozenset[Any]:
    """Return the tags of an op."""
    return frozenset(func.tags)


def argument(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return one argument of a call by schema name; None if the op has no such argument."""
    return named_arguments(func, args, kwargs).get(name)


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that the op writes."""
    # Dynamo looks into it, below a leaf of a state, but not into the table, which is cached.
    trains = "batch_norm" in func._schema.name and row_of(func).statistics
    trains = trains and argument(func, "training", args, kwargs) is not False
    if not (trains or func._schema.is_mutable):
        return []
    written: list[Tensor] = []
    for position, parameter in enumerate(func._schema.arguments):
        declared = parameter.alias_info is not None and parameter.alias_info.is_write
        if declared or (trains and parameter.name in ("running_mean", "running_var")):
            value = args[position] if position < len(args) else kwargs.get(parameter.name)
            written.extend(tensors_in(value))
    return written


def of_another_library(op: Any) -> bool:
    """Whether an op is none of torch's or ours, so that its name does not say what it does."""
    return not op._schema.name.startswith(("aten::", "fcg::", "prims::", "_c10d_functional::"))


def is_in_place(name: str) -> bool:
    """Whether a function or method of tensors of this name writes its first argument."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


@cache
def returns_view(func: Any) -> bool:
    """Whether the result shares memory with an argument that the op does not write."""
    returns = func._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def can_draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call draws from a generator; attention and RNNs without dropout do not."""
    seeded = torch.Tag.nondeterministic_seeded in tags_of(func)
    if not (seeded or any(parameter.is_generator for parameter in _parameters(func))):
        return False
    named = named_arguments(func, args, kwargs)
    if named.get("generator") is not None:
        return True
    if not seeded or any(named.get(name) is False for name in ("train", "training", "is_training")):
        return False
    probabilities = [named[name] for name in _PROBABILITIES if isinstance(named.get(name), (int, float))]
    return not probabilities or any(p > 0 for p in probabilities)


def sync_reason(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return why the call needs the host, or an empty string."""
    name, row, tags = full_name(func), row_of(func), tags_of(func)
    if row.asks or torch.Tag.data_dependent_output in tags:
        return "asks for the value of a tensor on the host"
    if name == "aten::histc" and argument(func, "min", args, kwargs) == argument(func, "max", args, kwargs):
        return "takes its range from the values of a tensor"
    if name == "aten::_linalg_check_errors" and args[0].device.type == "cuda":
        return "checks on the host whether a decomposition succeeded"
    if row.masks:
        indices = tensors_in(list(argument(func, "indices", args, kwargs) or ()))
        masks = any(one.dtype in (torch.bool, torch.uint8) for one in indices)
        return "has a result whose shape depends on the values of a mask" if masks else ""
    if torch.Tag.dynamic_output_shape in tags and argument(func, "output_size", args, kwargs) is None:
        return "has a result whose shape depends on the values of a tensor"
    return ""


def copies(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> list[Callable[[], Any]]:
    """Return calls that copy each source into its target: one for all of a dtype, which torch makes one kernel."""
    calls: list[Callable[[], Any]] = []
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.dtype in UNGROUPED:
            calls.append(partial(target.copy_, source))
        else:
            into, out_of = groups.setdefault(target.dtype, ([], []))
            into.append(target)
            out_of.append(source)
    return calls + [partial(torch._foreach_copy_, *group) for group in groups.values()]


def adds_up(dtype: object) -> bool:
    """Whether this is a floating dtype that supports sums: all but the 8-bit ones."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
