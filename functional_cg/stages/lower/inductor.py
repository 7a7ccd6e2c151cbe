"""Compile a step's graph with inductor, and choose its options."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from ...concurrency.garbage import no_garbage_collection
from ...tensors.fake_mode import compiler_mode
from ..core.graph import core_graph
from ..core.lookup import found, keep, key_of, signatures
from ..fx_passes.lowerings import compiler_pass, register_lowerings
from ..fx_passes.rounding import keep_roundings
from ..fx_passes.signs import keep_signs

__all__ = ["compile_graph", "opened", "start_workers"]

# The step is captured as one CUDA graph: turn inductor's own off, whatever the user's global configuration says.
# Rows are not padded either: a value with padded rows is laid out after views of it were taken, in another order of
# dimensions if a later reader turns it, and then the views read the wrong elements (torch 2.11).
_INDUCTOR_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"triton.cudagraphs": False, "triton.cudagraph_trees": False, "comprehensive_padding": False}
)

# Autotune kernels on the values of the first run, as `torch.compile` does, and not on made-up values, whose indices may
# be out of range: a fault from which a GPU does not recover.
_REAL_VALUES: Mapping[str, Any] = MappingProxyType({"triton.autotune_at_compile_time": False})

# Inductor's passes move the launch of a collective next to its wait, or the wait next to the first use of its result;
# the order of `passes.grouping` keeps compute between them.
_IN_ORDER: Mapping[str, Any] = MappingProxyType(
    {"reorder_for_peak_memory": False, "reorder_for_locality": False}
)

# Inductor's locality pass would move a weight's gradient next to the update at the end of the step, with all that is
# recomputed for it, and so far from the kernels that read the same values.
_ON_GPU: Mapping[str, Any] = MappingProxyType({"reorder_for_locality": False})

# A step of small values is bound by launches, so independent kernels (casts of weights, sums for biases, updates of
# leaves) are launched together: a GPT with four layers of width 256 has 136 graph nodes instead of 176. Larger steps
# are left alone: values of kernels launched together are in memory together, and a reduction may be many times slower.
_TOGETHER: Mapping[str, Any] = MappingProxyType({"combo_kernels": True})

# For larger steps, compile time matters. The update of each leaf reads the scalars of the optimizer, and inductor tries
# to fuse pairs of readers of a value. This restricts it to pairs that are close in the order: for 148 leaves it halves
# the search, and the kernels are the same.
_CLOSE_PAIRS: Mapping[str, Any] = MappingProxyType({"max_fusion_buffer_group_pairwise_attempts": 16})

# A launch waits for all that touched the memory that it writes. So memory is not reused by name, nor is a value written
# over what a kernel reads, which in a transformer let each layer's backward wait for the gradient of a weight: the
# allocator reuses memory, on each lane.
_BESIDE: Mapping[str, Any] = MappingProxyType({"allow_buffer_reuse": False, "inplace_buffers": False})

# CPU loops of fewer elements run on one thread: waking another takes longer than inductor assumes. A step with four
# layers of width 64 takes 0.13 ms instead of 0.17 ms.
# On a CPU the compiler leaves out roundings that a call asks for unless it keeps all. There it also forgets, for loops
# whose ranges it aligns, which write a read waits for; an order for less memory then reads too early (2.11 and 2.13).
_ON_HOST: Mapping[str, Any] = MappingProxyType(
    {"cpp.min_chunk_size": 8192, "emulate_precision_casts": True, "reorder_for_peak_memory": False}
)

# Ops of a value up to which the compiler computes it where it is read: it stores a longer one, and then the next, which
# cannot overwrite what both read. It counts conversions, too, and each call in half precision makes up to six.
_IN_HALVES: Mapping[str, Any] = MappingProxyType({"realize_opcount_threshold": 64})

# Where a number on a CPU meets a GPU, inductor's folding of uniform values fails: it multiplies one element of each.
_ON_BOTH: Mapping[str, Any] = MappingProxyType({"joint_graph_constant_folding": False})


def start_workers() -> None:
    """Start what a compilation for a GPU waits for, and return at once.

    The processes that compile kernels take seconds to import torch, until which this process compiles one after the
    other; `torch.compile` starts them in front of its own trace, too. And the key of a compiled graph in torch's cache
    holds hashes of the compilers, of which Triton alone has hundreds of megabytes.
    """
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()
    threading.Thread(target=_hash_compilers, name="hash of compilers", daemon=True).start()


def _hash_compilers() -> None:
    """Hash the compilers' files; torch and Triton remember the result."""
    from torch._inductor.codecache import torch_key
    from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

    torch_key()
    if HAS_TRITON:
        triton_key()


def compile_graph(
    graph: fx.GraphModule,
    arguments: Sequence[Tensor],
    *,
    on_host: bool,
    small: bool,
    in_order: bool,
    beside: bool = False,
) -> Callable[..., Any]:
    """Compile a graph from :func:`functional_cg.stages.lower.graph.build_graph` for these arguments.

    Args:
      graph: The graph.
      arguments: Tensors with the shapes and alignments that it will run on.
      on_host: Whether it runs on a CPU.
      small: Whether its run time is bound by launches.
      in_order: Whether its collectives must keep their order.
      beside: Whether its launches may run side by side.
    """
    options = {**_INDUCTOR_OPTIONS, **_REAL_VALUES}
    options["post_grad_custom_post_pass"] = compiler_pass()
    options |= _ON_HOST if on_host else {**_ON_GPU, **(_TOGETHER if small else _CLOSE_PAIRS)}
    if in_order:
        options |= _IN_ORDER
    if beside:
        options |= _BESIDE
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True  # never choose a variant of a reduction by timing it
    # The compiler makes a million objects, none of them garbage: to look for it took a tenth of a compilation.
    with no_garbage_collection(), _for_this_cpu() if on_host else contextlib.nullcontext():
        return _compiled(graph, arguments, options)


def _for_this_cpu() -> contextlib.AbstractContextManager[None]:
    """Let torch's cache of compiled graphs tell apart the vector instructions of processors.

    Else it finds loops that were written for vectors of another one, or for another `ATEN_CPU_CAPABILITY`, and compiles
    them for this one.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    config: Any = torch.compiler.config
    isa = pick_vec_isa()
    macros = isa.build_macro() if isa else []  # on ARM, all have one name
    patched: contextlib.AbstractContextManager[None] = config.patch(
        cache_key_tag=" ".join([config.cache_key_tag, str(isa), *macros])
    )
    return patched


def _compiled(
    graph: fx.GraphModule, arguments: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Any]:
    """Return what inductor makes of a graph's core graph, or made of an equal one's."""
    from torch._inductor import config
    from torch._inductor.debug import reset_provenance_globals
    from torch._inductor.virtualized import V
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    mode = compiler_mode()
    with (
        config.patch(options),
        torch._guards.tracing(torch._guards.TracingContext(mode)),
        V.set_fake_mode(mode),
        reset_provenance_globals(),
        _use_lazy_graph_module(True),
    ):
        given = [mode.from_tensor(one, static_shapes=True) for one in arguments]
        key = key_of(graph, given)
        compiled = None if key is None else found(key, given)
        if compiled is None:
            compiled = _made(core_graph(graph, given, mode))
            if key is not None:
                keep(key, compiled)

    return partial(_with_list, compiled)


def _with_list(compiled: Callable[[list[Tensor]], Any], *given: Tensor) -> Any:
    return compiled(list(given))


def _made(module: fx.GraphModule) -> Any:
    """Call inductor behind torch's own trace of a graph, which :func:`core_graph` replaces."""
    from torch._inductor import compile_fx, config

    register_lowerings()
    rounds = keep_roundings(module.graph)
    last = compiler_pass(signatures(module.graph))
    values = [node.meta.get("val") for node in module.graph.nodes]
    devices = {value.device for value in values if isinstance(value, Tensor)}
    keep_signs(module.graph)
    module.recompile()  # torch looks up compiled graphs by the module's code
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    outputs: Any = module.graph.output_node().args[0]
    extra: Any = compile_fx.create_compiler_config_extra
    (asked,) = inspect.signature(extra).parameters  # torch 2.11 asks for its options, 2.13 for the graph
    options = {"post_grad_custom_post_pass": last, **(_IN_HALVES if rounds else {})}
    if len(devices) > 1:
        options |= _ON_BOTH
    with config.patch(options):
        return compile_fx.compile_fx_forward(
            module,
            inputs,
            num_orig_model_outputs=len(outputs),
            num_example_inputs=len(inputs),
            compiler_config_extra=extra({"config": config, "gm": module}[asked]),
            is_inference=True,
        )


def opened(compiled: Callable[..., Any]) -> tuple[str, dict[str, Any]] | None:
    """Return what the compiler wrote for a function of :func:`compile_graph`: the source of a module, and its globals.

    None if it is not there.
    """
    from torch._inductor.output_code import CompiledFxGraph

    while isinstance(compiled, partial):
        compiled = compiled.args[-1]
    if not isinstance(compiled, CompiledFxGraph):
        return None
    call: Any = getattr(getattr(compiled, "compiled_fn_runner", None), "call", compiled.current_callable)
    return compiled.source_code, inspect.unwrap(call).__globals__
