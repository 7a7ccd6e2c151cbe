"""What an ATen op does beyond its values: which arguments it writes, whether it draws, whether it needs the host.

Schemas tell most of it. What they hide stands in the tables below: batch norm writes its running statistics
without saying so; the tag ``nondeterministic_seeded`` is on attention and RNN ops even where they draw nothing;
``dynamic_output_shape`` is on integer indexing too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "FUSED",
    "UNGROUPED",
    "adds_up",
    "argument",
    "can_draw",
    "copies",
    "is_batched",
    "named_arguments",
    "returns_view",
    "sync_reason",
    "tensors_in",
    "unwrapped",
    "written_arguments",
]

# Beginnings of the names of fused optimizers; `aten::_fused_rms_norm` is none.
FUSED = ("aten::_fused_ada", "aten::_fused_sgd")

# On CUDA torch has no grouped copy of these.
UNGROUPED = frozenset({torch.uint16, torch.uint32, torch.uint64})

# op name -> (arguments written, flag argument that switches writing on, or "" for always)
_HIDDEN_WRITES: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType(
    {
        "aten::native_batch_norm": (("running_mean", "running_var"), "training"),
        "aten::cudnn_batch_norm": (("running_mean", "running_var"), "training"),
        "aten::miopen_batch_norm": (("running_mean", "running_var"), "training"),
        "aten::batch_norm_update_stats": (("running_mean", "running_var"), ""),
        "aten::batch_norm_gather_stats": (("running_mean", "running_var"), ""),
        "aten::batch_norm_gather_stats_with_counts": (("running_mean", "running_var"), ""),
    }
)

_PROBABILITIES = ("p", "dropout_p", "dropout")

_NEEDS_VALUE = frozenset(
    {"aten::_local_scalar_dense", "aten::equal", "aten::allclose", "aten::is_nonzero", "aten::item"}
)


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor stands for a batch under ``torch.func.vmap``."""
    return torch._C._functorch.is_batchedtensor(tensor)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that stands below the transforms of ``torch.func``."""
    functorch = torch._C._functorch  # private; test_nn notices a change
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in an op's argument or result, lists included."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def named_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by their schema names, defaults included."""
    named = {}
    for position, parameter in enumerate(func._schema.arguments):
        if position < len(args) and not parameter.kwarg_only:
            named[parameter.name] = args[position]
        elif parameter.name in kwargs:
            named[parameter.name] = kwargs[parameter.name]
        elif parameter.has_default_value():
            named[parameter.name] = parameter.default_value
    return named


def argument(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """One argument of a call by its schema name; None if the op has no such argument."""
    return named_arguments(func, args, kwargs).get(name)


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that the op writes."""
    hidden = _HIDDEN_WRITES.get(func._schema.name)
    if hidden is not None:
        names, flag = hidden
        named = named_arguments(func, args, kwargs)
        return list(tensors_in([named.get(name) for name in names])) if not flag or named.get(flag) else []
    if not func._schema.is_mutable:
        return []
    written: list[Tensor] = []
    for position, parameter in enumerate(func._schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(parameter.name)
            written.extend(tensors_in(value))
    return written


def returns_view(func: Any) -> bool:
    """Whether the result shares memory with an argument that the op does not write."""
    returns = func._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def can_draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call draws from a generator; attention and RNNs without dropout do not."""
    named: dict[str, Any] | None = None
    if any(
        str(parameter.type) in {"Optional[Generator]", "Generator"} for parameter in func._schema.arguments
    ):
        named = named_arguments(func, args, kwargs)
        if named.get("generator") is not None:
            return True
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    named = named or named_arguments(func, args, kwargs)
    if named.get("train") is False or named.get("training") is False or named.get("is_training") is False:
        return False
    probabilities = [named[name] for name in _PROBABILITIES if isinstance(named.get(name), (int, float))]
    return not probabilities or any(p > 0 for p in probabilities)


def sync_reason(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why the call needs the host, or an empty string."""
    name = func._schema.name
    if name in _NEEDS_VALUE:
        return "asks for the value of a tensor on the host"
    if name == "aten::repeat_interleave" and argument(func, "output_size", args, kwargs) is not None:
        return ""
    if name == "aten::histc" and argument(func, "min", args, kwargs) == argument(func, "max", args, kwargs):
        return "takes its range from the values of a tensor"
    if name == "aten::_linalg_check_errors" and args[0].device.type == "cuda":
        return "checks on the host whether a decomposition succeeded"
    if name in {
        "aten::index",
        "aten::index_put",
        "aten::index_put_",
        "aten::_unsafe_index",
        "aten::_index_put_impl_",
    }:
        indices = named_arguments(func, args, kwargs).get("indices") or ()
        masks = [i for i in tensors_in(list(indices)) if i.dtype in (torch.bool, torch.uint8)]
        return "has a result whose shape depends on the values of a mask" if masks else ""
    if torch.Tag.dynamic_output_shape in func.tags:
        return "has a result whose shape depends on the values of a tensor"
    if torch.Tag.data_dependent_output in func.tags:
        return "asks for the value of a tensor on the host"
    return ""


def copies(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> list[Callable[[], Any]]:
    """Few calls that copy each source into its target: one for all that torch can copy as a group."""
    pairs = list(zip(targets, sources, strict=True))
    grouped = [(target, source) for target, source in pairs if target.dtype not in UNGROUPED]
    calls: list[Callable[[], Any]] = [
        partial(target.copy_, source) for target, source in pairs if target.dtype in UNGROUPED
    ]
    if grouped:
        into, out_of = zip(*grouped, strict=True)
        calls.append(partial(torch._foreach_copy_, list(into), list(out_of)))
    return calls


def adds_up(dtype: object) -> bool:
    """Whether it is a floating dtype with sums: any but those of 8 bits."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
