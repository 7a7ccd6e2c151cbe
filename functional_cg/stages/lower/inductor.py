"""The door to ``torch._inductor.standalone_compile``: the options with which the graph of a step is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from ..passes.old_values import compiler_pass
from .graph import sources

__all__ = ["compile_graph"]

# One graph for all: inductor's own CUDA graphs off, whatever the user's global configuration says.
_INDUCTOR_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"triton.cudagraphs": False, "triton.cudagraph_trees": False}
)

# Kernels are timed on the values of the first run, as under `torch.compile`. This way of compiling would time them
# on values that it makes up, whose indices may be out of range: a fault from which a GPU does not recover.
_REAL_VALUES: Mapping[str, Any] = MappingProxyType({"triton.autotune_at_compile_time": False})

# Inductor's passes put the launch of a collective next to its wait, or the wait next to the first use of its result;
# our own order has both where compute runs in between.
_IN_ORDER: Mapping[str, Any] = MappingProxyType(
    {"reorder_for_peak_memory": False, "reorder_for_locality": False}
)

# Its pass over the order would put a weight's gradient next to the update at the end of the step, with all that is
# computed anew for it, and so far from the kernels that read the same values.
_ON_GPU: Mapping[str, Any] = MappingProxyType({"reorder_for_locality": False})

# In a step of small values launches are what takes time: kernels that do not need each other are launched together,
# casts of weights, sums for biases, updates of leaves. A GPT of four layers of 256 has 136 nodes in place of 176.
# Large ones are left alone: what is launched together is in memory together, and a reduction may run many times slower.
_TOGETHER: Mapping[str, Any] = MappingProxyType({"combo_kernels": True})

# In others it is the compiler that takes time. The update of each leaf reads the scalars of the optimizer: of all pairs
# of readers of a value, those are tried for fusion that are close in the order. For 148 leaves it halves the search,
# and the kernels are the same.
_CLOSE_PAIRS: Mapping[str, Any] = MappingProxyType({"max_fusion_buffer_group_pairwise_attempts": 16})

# Loops of fewer elements run on one thread of the host: to wake another takes longer than inductor believes. A step of
# four layers of 64 takes 0.13 ms in place of 0.17.
_ON_HOST: Mapping[str, Any] = MappingProxyType({"cpp.min_chunk_size": 8192})


def compile_graph(
    graph: fx.GraphModule, arguments: Sequence[Tensor], *, on_host: bool, small: bool, in_order: bool
) -> Callable[..., Any]:
    """Compile a graph of :func:`functional_cg.stages.lower.graph.build_graph` for these arguments.

    Args:
      graph: The graph.
      arguments: Tensors of the shapes and alignments that it will run on.
      on_host: Whether it runs on a CPU.
      small: Whether launches are what takes time.
      in_order: Whether its collectives stay where they are.
    """
    from torch._inductor import standalone_compile

    options = {**_INDUCTOR_OPTIONS, **_REAL_VALUES, "unsafe_marked_cacheable_functions": sources()}
    options["post_grad_custom_post_pass"] = compiler_pass()
    options |= _ON_HOST if on_host else {**_ON_GPU, **(_TOGETHER if small else _CLOSE_PAIRS)}
    if in_order:
        options |= _IN_ORDER
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True  # no variant of a reduction is chosen by timing it
    return standalone_compile(
        graph,
        list[Any](arguments),
        dynamic_shapes="from_example_inputs",
        options={"config_patches": options},
    )
