"""Find what torch's compiler made of an equal graph, in this process or an earlier one, without its core graph.

torch keeps what it compiled on disk, by the core graph. To make that takes longer than all that follows if it is there;
so the key that torch found it by is written next to it, by a key of the graph that the core graph is made of.

This module is the only one that uses the compiler's disk cache.
"""

from __future__ import annotations

import hashlib
import json
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ...tensors.aten import of_another_library
from .expansion import leaves

__all__ = ["found", "keep", "key_of", "signatures"]


def key_of(module: fx.GraphModule, arguments: Sequence[Tensor]) -> str | None:
    """Return a key of all that decides what a graph is compiled to: its calls, its arguments, options, and versions.

    Args:
      module: The graph.
      arguments: Fake tensors like its arguments.

    Returns:
      None if that cannot be told: the graph calls something that is no op of torch's or ours, or torch is told not to
      keep what it compiles.
    """
    from torch._inductor import config
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.decomposition import select_decomp_table

    if config.force_disable_caches or not config.fx_graph_cache:
        return None
    calls = (node.target for node in module.graph.nodes if node.op not in ("placeholder", "output"))
    if not all(map(_is_known, calls)) or not all(map(_is_ours, select_decomp_table().values())):
        return None
    # torch's key says nothing of these: to its compiler they are all alike, to what our calls become they need not be.
    places = [(one.storage_offset(), one.untyped_storage().nbytes()) for one in arguments]
    more: Any = {"sources": _digest(), "dtype": str(torch.get_default_dtype()), "places": places}
    more["signatures"] = signatures(module.graph)
    key, _ = FxGraphCache.prepare_key(module, arguments, more, [], False)
    return None if key is None else key[0]


def signatures(graph: fx.Graph) -> str:
    """Return what ops of other libraries take and return in a graph: their names, torch's key, do not say.

    Args:
      graph: A graph for the compiler, before or after its calls became core calls.
    """
    calls = (node for node in graph.nodes if isinstance(node.target, OpOverload))
    return str([(node.target._schema, *_results(node)) for node in calls if of_another_library(node.target)])


def _results(node: fx.Node) -> Iterator[Any]:
    call = node.meta.get("call")
    if call is not None:
        yield from ((var.spec.shape, var.spec.stride, var.spec.dtype) for var in call.outputs())
    for one in leaves(node.meta.get("val")):
        if isinstance(one, Tensor):
            yield one.shape, one.stride(), one.dtype


def found(key: str, arguments: Sequence[Tensor]) -> Callable[[list[Tensor]], Any] | None:
    """Return what an equal graph was compiled to, ready to run; None if it is not there.

    Args:
      key: The key of the graph.
      arguments: Fake tensors like its arguments.
    """
    from torch._functorch._aot_autograd.aot_autograd_result import CompiledForward
    from torch._functorch._aot_autograd.autograd_cache import FXGraphCacheMiss
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.utils import BoxedBool

    try:
        entry = CompiledForward(*json.loads(_file(key).read_text()))
        graph = entry.load(arguments)
    except (
        FileNotFoundError,
        ValueError,
        FXGraphCacheMiss,
    ):  # a file that says something else counts as none
        return None
    options: Any = {
        "cudagraphs": BoxedBool(False),
        "boxed_forward_device_index": BoxedDeviceIndex(None),
        "is_backward": False,
    }
    return entry.post_compile(graph, options)


def keep(key: str, compiled: Any) -> None:
    """Write down that a graph has been compiled.

    Args:
      key: The key of the graph.
      compiled: What the compiler returned.
    """
    from torch._inductor.codecache import write_atomic

    if (known := getattr(compiled, "_fx_graph_cache_key", None)) is not None:
        write_atomic(str(_file(key)), json.dumps([[known, []], compiled.guards_expr]), make_dirs=True)


@cache
def _digest() -> str:
    """Return a digest of this library."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _file(key: str) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "functional_cg" / key[1:3] / key


def _is_known(target: Any) -> bool:
    """Whether a call is told by its name: an op of torch's or ours, or a function of ours that can be imported."""
    if isinstance(target, OpOverload):
        # An op that is made of others is so by code that its name says nothing of.
        composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        return not (of_another_library(target) and composite)
    if not callable(target) or not _is_ours(target):
        return False
    return getattr(sys.modules.get(target.__module__), target.__qualname__, None) is target


def _is_ours(function: Any) -> bool:
    """Whether a function is torch's or this library's, whose version or sources are part of the key, or an operator."""
    while isinstance(function, partial):
        function = function.func
    owner = function.__module__.partition(".")[0]
    return owner in ("torch", __name__.partition(".")[0], operator.mul.__module__)
