"""Counts what torch's compiler would launch on a GPU, without one: ``python -m tests.bench.kernels zoo-gpt2``.

Each function of the plan goes through inductor's passes and its scheduler as on an H100, up to the code of the kernels.
Two commits that launch the same kernels take the same time, so compare the counts before and after a change. Of what
autotuning decides, of cuBLAS and of cuDNN it says nothing; patterns that inductor looks for by running examples, such
as attention written by hand, and folded constants are left out.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._inductor import config, scheduler
from torch._inductor.fx_passes import joint_graph, post_grad, reinplace
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from functional_cg.graph_step import GraphStep
from functional_cg.options import Options
from functional_cg.stages.fx_passes.lowerings import compiler_pass
from functional_cg.stages.lower import inductor
from functional_cg.stages.lower.compiled import lower

from .modules import names, workload
from .systems.opponents import build
from .workloads import Workload

__all__ = ["launches", "main"]

_CUDA = torch.device("cuda", 0)
_H100 = SimpleNamespace(
    name="H100", type="cuda", index=0, major=9, minor=0, cc=90, warp_size=32, multi_processor_count=132,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=50 * 2**20,
    total_memory=80 * 2**30, gcnArchName="",
)  # fmt: skip


class _CaughtError(BaseException):
    """Carries what a call would have worked with."""


def launches(work: Workload) -> Counter[str]:
    """Return how often a step launches each kernel, named by the calls that it computes."""
    system = build("ours-aten", work, torch.device("cpu"), work.batches(1))

    def caught(*given: Any) -> Any:
        raise _CaughtError(*given)

    with mock.patch.object(GraphStep, "__call__", caught):
        step, *given = _caught(lambda: system.step(system.batches[0]))
    low = step.lower(*given)
    plan = lower(low.program, _CUDA, Options(branches=1), low.reference)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    graphs = [(_on_a_gpu(_core(head), mode), times) for head, times in plan.heads.items()]
    found = Counter[str]()
    with _as_on_a_gpu():
        for graph, times in graphs:
            for name, count in Counter(map(_name, _scheduled(graph, mode))).items():
                found[name] += times * count
    return found


def _caught(call: Any) -> Any:
    try:
        call()
    except _CaughtError as caught:
        return caught.args
    raise AssertionError("it was not called")


def _core(head: Any) -> fx.GraphModule:
    """Return the graph of core calls that inductor would get for a function."""
    head._compiler = partial(inductor.compile_graph, on_host=False, small=False, in_order=False)

    def caught(module: fx.GraphModule) -> Any:
        raise _CaughtError(module)

    with (
        mock.patch.object(inductor, "_made", caught),
        mock.patch.object(inductor, "key_of", return_value=None),
    ):
        (module,) = _caught(lambda: head.compile({}))
    return module  # type: ignore[no-any-return]


def _on_a_gpu(module: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    """Move what a graph is told of its values to a GPU, in place."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_CUDA)

    with mode:
        for node in module.graph.nodes:
            if isinstance(value := node.meta.get("val"), (list, tuple)):
                node.meta["val"] = type(value)(map(moved, value))
            elif value is not None:
                node.meta["val"] = moved(value)
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": _CUDA}
    module.recompile()
    return module


def _scheduled(module: fx.GraphModule, mode: FakeTensorMode) -> Sequence[Any]:
    """Return inductor's kernels for a graph."""
    options: dict[str, Any] = {**inductor._INDUCTOR_OPTIONS, **inductor._REAL_VALUES, **inductor._ON_GPU}
    options |= {**inductor._CLOSE_PAIRS, "fx_graph_cache": False, "joint_graph_constant_folding": False}
    options["post_grad_custom_post_pass"] = compiler_pass()
    with (
        config.patch(options),
        torch._guards.tracing(torch._guards.TracingContext(mode)),
        V.set_fake_mode(mode),
    ):
        found: Any = _caught(lambda: inductor._made(module))
    return found[0].nodes  # type: ignore[no-any-return]


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Let inductor take this machine for one with a GPU, as far as its scheduler."""
    from torch._dynamo import utils
    from torch._dynamo.device_interface import CudaInterface

    def caught(self: Any) -> Any:
        raise _CaughtError(self)

    def always(value: Any) -> Any:
        return lambda *args, **options: value

    patches: list[tuple[Any, str, Any]] = [
        (CudaInterface, "get_device_properties", staticmethod(always(_H100))),
        (CudaInterface.Worker, "get_device_properties", staticmethod(always(_H100))),
        (CudaInterface, "is_triton_capable", staticmethod(always(True))),
        (CudaInterface, "raise_if_triton_unavailable", staticmethod(always(None))),
        (CudaInterface, "get_compute_capability", staticmethod(always(90))),
        (CudaInterface, "is_bf16_supported", staticmethod(always(True))),
        (torch.cuda, "get_device_properties", always(_H100)),
        (torch.cuda, "get_device_capability", always((9, 0))),
        *((torch.cuda, name, always(0)) for name in ("current_device", "_exchange_device", "_maybe_exchange_device")),
        *((torch.cuda, name, always(None)) for name in ("synchronize", "set_device", "set_rng_state")),
        (torch.cuda, "get_rng_state", lambda *args: torch.zeros(1)),
        (torch.cuda, "is_available", always(True)),
        (torch.cuda, "is_initialized", always(False)),
        (utils, "preserve_rng_state", contextlib.nullcontext),
        (joint_graph, "lazy_init", always(None)),
        (post_grad, "lazy_init", always(None)),
        (reinplace, "canonicalize_view_scatter_ops", always(None)),
        (scheduler, "has_triton", always(True)),
        (scheduler.Scheduler, "codegen", caught),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for where, name, value in patches:
            stack.enter_context(mock.patch.object(where, name, value))
        yield


def _name(kernel: Any) -> str:
    origins = {
        origin.target
        for part in kernel.get_nodes()
        if part.node is not None and hasattr(part.node, "get_origins")
        for origin in part.node.get_origins()
    }
    calls = " ".join(sorted(getattr(target, "__name__", str(target)) for target in origins))
    return f"{type(kernel).__name__}: {calls}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program, and print the kernels of each workload, those launched most often first."""
    parser = argparse.ArgumentParser("python -m tests.bench.kernels", description=__doc__)
    parser.add_argument("workload", choices=names(), nargs="+")
    for name in parser.parse_args(argv).workload:
        found = launches(workload(name))
        print(f"{name}: {found.total()} kernels")
        for kernel, count in found.most_common():
            print(f"  {count:5d}  {kernel}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
