"""Trace one call of a graph into the core calls that torch's compiler knows: no writes, and no ops made of other ops.

This module is the only one that uses torch's tracer of graphs, its formulas for ops, and the tensors that turn writes
into values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops.effects import has_effects
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

__all__ = ["Expander", "Expansion", "Same", "leaves", "written_through"]


@dataclass(frozen=True, slots=True)
class Same:
    """A result of a call that is one of its tensors: that with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Expansion:
    """What a call becomes.

    Attributes:
      module: Its calls, on one placeholder for each tensor; ``meta["val"]`` of a node is a fake tensor, or several.
      results: The call's results, nested as it nests them: nodes, :class:`Same`, and what is no tensor.
      written: The new values of tensors that the call writes, by their numbers.
    """

    module: fx.GraphModule
    results: Any
    written: Mapping[int, fx.Node]


class Expander:
    """Traces calls on fake tensors.

    Args:
      mode: The mode of the fake tensors.
    """

    def __init__(self, mode: Any) -> None:
        from torch._inductor.decomposition import select_decomp_table

        self._mode, self._formulas = mode, select_decomp_table()

    def call(self, source: fx.Node, call: Callable[..., Any], tensors: Sequence[Tensor]) -> Expansion:
        """Expand a call.

        Args:
          source: Its node.
          call: The call as a function of its tensors.
          tensors: Fake tensors like them, each with memory of its own.
        """
        found: list[Any] = []
        # Torch keeps such calls in order by tokens; ours write no tensor, and stay where they are.
        op: Any = source.target
        pure = not has_effects(op)
        schema = getattr(op, "_schema", None)
        foreign = schema is not None and schema.is_mutable and op.namespace not in ("aten", "prims")

        def traced(*given: Tensor) -> list[Tensor]:
            known = list(map(FunctionalTensor.to_functional, given)) if pure else list(given)
            numbers = {id(one): number for number, one in enumerate(known)}

            def plain(one: Any) -> Any:
                number = numbers.get(id(one))
                return _plain(one) if number is None else Same(number)

            # Torch copies what an op of another library writes, and takes it for all of its memory.
            begins = [_wholly(one) if foreign else one for one in known]
            results = map_aggregate(call(*begins), plain)
            for one, copy in zip(known, begins, strict=True):
                if copy is not one and _is_written(copy):
                    one.copy_(copy)
            written = {number: _plain(one) for number, one in enumerate(known) if pure and _is_written(one)}
            made, memory = _tensors(results), {_memory(one) for one in written.values()}
            if any(_memory(one) in memory for one in made):
                raise NotImplementedError(f"{source.target} writes a tensor and returns a view of it")
            found.extend((results, list(written)))
            return [*made, *written.values()]

        with (
            fx.traceback.preserve_node_meta(),
            self._mode,
            enable_python_dispatcher(),
            FunctionalTensorMode() if pure else nullcontext(),
        ):
            trace = make_fx(traced, decomposition_table=self._formulas, _disable_torch_fn_metadata_mode=True)
            module = trace(*tensors)
        for node in module.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            if node.op == "call_function" and schema is not None and schema.is_mutable:
                raise NotImplementedError(f"{source.target} writes by {node.target}, which has no other form")
        nodes: Any = module.graph.output_node().args[0]
        results, written = found
        rest = iter(nodes)
        results = map_aggregate(results, lambda one: next(rest) if isinstance(one, Tensor) else one)
        return Expansion(module, results, dict(zip(written, rest, strict=True)))


def written_through(call: Callable[..., Any], place: int, number: int) -> Callable[..., None]:
    """Return what writes a view that a call returns: a function of the call's tensors and the view's new value.

    Args:
      call: The call as a function of its tensors.
      place: The view's place among its results.
      number: Which of its tensors is viewed, and thereby written.
    """

    def write(*given: Any) -> None:
        *known, new = given
        view: Any = leaves(call(*known))[place]
        if _memory(view.elem) != _memory(known[number].elem):  # its schema does not say that it is one
            view = known[number].as_strided(view.shape, view.stride(), view.storage_offset())
        view.replace_(_plain(new))
        view.commit_update()

    return write


def leaves(nested: Any) -> list[Any]:
    """Return what is in nested lists, tuples and dicts, in order."""
    found: list[Any] = []
    map_aggregate(nested, found.append)
    return found


def _tensors(nested: Any) -> list[Tensor]:
    return [one for one in leaves(nested) if isinstance(one, Tensor)]


def _plain(value: Any) -> Any:
    return value.from_functional() if isinstance(value, FunctionalTensor) else value


def _is_written(tensor: Any) -> bool:
    written: Any = getattr(torch, "_functionalize_has_data_mutation")  # noqa: B009
    return bool(written(tensor.elem))


def _wholly(tensor: Tensor) -> Tensor:
    """Return a tensor that is all of its memory: a copy if that is more."""
    whole = tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
    return tensor if whole else tensor.clone()


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
