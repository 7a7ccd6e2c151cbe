"""Trace one call of a graph into the core calls that torch's compiler knows: no writes, and no ops of other ops.

This module is the only one that uses torch's tracer of graphs, its table of formulas, and its tensors that turn writes
into values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

__all__ = ["Expander", "Expansion"]


@dataclass(frozen=True, slots=True)
class Expansion:
    """What a call becomes.

    Attributes:
      graph: Its calls, and the tensors in ``meta["val"]``; the placeholders are the tensors among the arguments.
      module: What the graph's attributes belong to.
      results: The call's results, as it nests them: nodes, numbers of arguments that are returned, other values.
      written: The new values of the arguments that the call writes, by their numbers.
    """

    graph: fx.Graph
    module: fx.GraphModule
    results: Any
    written: Mapping[int, fx.Node]


@dataclass(frozen=True, slots=True)
class Same:
    """A result that is an argument: the one with this number."""

    number: int


class Expander:
    """Traces calls on fake tensors.

    Args:
      mode: The mode of the fake tensors.
    """

    def __init__(self, mode: Any) -> None:
        from torch._inductor.decomposition import select_decomp_table

        self._mode, self._table = mode, select_decomp_table()

    def call(self, source: fx.Node, call: Callable[..., Any], tensors: Sequence[Tensor]) -> Expansion:
        """Expand a call, given as a function of its tensors.

        Args:
          source: The node that it is made for.
          call: The function.
          tensors: Fake tensors like its arguments; they are not written.
        """

        def traced(*given: Tensor) -> Any:
            functional = [_functional(one) for one in given]
            before = [(one.shape, one.stride(), one.storage_offset()) for one in given]
            flat, spec = pytree.tree_flatten(call(*functional))
            numbers = {id(one): number for number, one in enumerate(functional)}
            results: list[Any] = []
            for one in flat:
                number = numbers.get(id(one))
                if number is not None and before[number] == (one.shape, one.stride(), one.storage_offset()):
                    results.append(Same(number))
                else:
                    results.append(_plain(one))
            written = {
                number: _plain(one) for number, one in enumerate(functional) if _is_written(one)
            }
            found.extend((results, spec, list(written)))
            tensors = [one for one in (*results, *written.values()) if isinstance(one, Tensor)]
            return tensors

        found: list[Any] = []
        module = self._trace(source, traced, tensors)
        results, spec, written = found
        (nodes,) = module.graph.output_node().args
        rest = iter(nodes)
        named = [next(rest) if isinstance(one, Tensor) else one for one in results]
        return Expansion(
            module.graph, module, pytree.tree_unflatten(named, spec), dict(zip(written, rest, strict=True))
        )

    def scatter(
        self, source: fx.Node, call: Callable[..., Any], place: int, base: int, tensors: Sequence[Tensor]
    ) -> Expansion:
        """Expand the write of the last tensor into a view: the one written value is the tensor that is viewed.

        Args:
          source: The node that it is made for.
          call: Returns the view, given all but the last tensor.
          place: The view's position among the results of the call.
          base: The number of the tensor that is viewed.
          tensors: The tensors of the call, and the new value of the view.
        """

        def traced(*given: Tensor) -> Any:
            functional = [_functional(one) for one in given[:-1]]
            view: Any = pytree.tree_leaves(call(*functional))[place]
            view.replace_(given[-1])
            view.commit_update()
            return [_plain(functional[base])]

        module = self._trace(source, traced, tensors)
        ((node,),) = module.graph.output_node().args
        return Expansion(module.graph, module, (), {base: node})

    def _trace(self, source: fx.Node, call: Callable[..., Any], tensors: Sequence[Tensor]) -> fx.GraphModule:
        from torch._dispatch.python import enable_python_dispatcher
        from torch._subclasses.functional_tensor import FunctionalTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        with (
            fx.traceback.preserve_node_meta(),
            fx.traceback.set_current_meta(source),
            self._mode,
            enable_python_dispatcher(),
            FunctionalTensorMode(_allow_token_discovery=True),
        ):
            return make_fx(call, decomposition_table=self._table, _disable_torch_fn_metadata_mode=True)(*tensors)


def _functional(tensor: Tensor) -> Any:
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FunctionalTensor.to_functional(tensor)


def _plain(value: Any) -> Any:
    from torch._subclasses.functional_tensor import FunctionalTensor

    return value.from_functional() if isinstance(value, FunctionalTensor) else value


def _is_written(tensor: Any) -> bool:
    return torch._functionalize_has_data_mutation(tensor.elem)
