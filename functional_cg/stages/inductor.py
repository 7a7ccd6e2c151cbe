"""Lower with a compiler: the whole step as one graph for inductor, or for any backend of ``torch.compile``.

Slots enter as separate inputs that the graph writes in place at its end, so gradients fuse into the update and no
copy of the state is made. The door to ``torch._inductor.standalone_compile``.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from ..arena import dense_stride
from ..interrupts import Deferred
from ..leaf import uninterrupted
from ..random import decompose_random_bits
from .cross_entropy import ON_CROSS_ENTROPY, join_gradients
from .formulas import FORMULAS, WITH_SCALARS
from .grouping import is_launch
from .in_place import compiler_pass
from .logits import ON_LOGITS, has_large_logits, read_targets_first
from .lower import Before, Buffers, Run, Schedule, schedule
from .products import batch_gradients
from .program import Instr, Program, SlotRange, Var, map_vars
from .recompute import keep_as_buffers, recompute
from .rewrite import clears, range_tensor

__all__ = ["CompiledPlan", "Entrance", "build_graph", "lower_compiled"]

_BULK = 2**16  # words; a launch costs as much as to compute about so many of them one by one

# One graph for all: inductor's own CUDA graphs off, whatever the user's global configuration says.
_INDUCTOR_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"triton.cudagraphs": False, "triton.cudagraph_trees": False}
)

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
_SMALL = 2**24  # bytes

# In others it is the compiler that takes time. The update of each leaf reads the scalars of the optimizer: of all pairs
# of readers of a value, those are tried for fusion that are close in the order. For 148 leaves it halves the search,
# and the kernels are the same.
_CLOSE_PAIRS: Mapping[str, Any] = MappingProxyType({"max_fusion_buffer_group_pairwise_attempts": 16})

# Loops of fewer elements run on one thread of the host: to wake another takes longer than inductor believes. A step of
# four layers of 64 takes 0.13 ms in place of 0.17.
_ON_HOST: Mapping[str, Any] = MappingProxyType({"cpp.min_chunk_size": 8192})


class CompiledPlan:
    """Runs a compiled function on static buffers."""

    def __init__(
        self, program: Program, plan: Schedule, device: torch.device, compiler: Callable[..., Any] | None
    ):
        self._program = program
        self._plan = self.schedule = plan
        self.compiled = True
        self._entrance = Entrance.of(program, plan)
        self._graph = build_graph(program, plan, self._entrance)
        self._in_order = any(is_launch(instr) for instr in program.instrs)
        on_gpu = device.type == "cuda" and compiler is None
        self._small = on_gpu and not self._in_order and _largest(program) <= _SMALL
        if self._small:
            batch_gradients(self._graph.graph)
            self._graph.recompile()
        elif on_gpu and has_large_logits(program):
            join_gradients(self._graph.graph)
            read_targets_first(self._graph.graph)
            self._graph.recompile()
        self._device = device
        self._compiler = compiler
        self._compiled: Callable[..., Any] | None = None

    def as_text(self) -> str:
        return str(self._graph.code)

    def bind(self, buffers: Buffers) -> Run:
        tensors = dict(zip(self._program.slots, buffers.slots, strict=True))
        for known in self._program.ranges:
            tensors[known.var] = range_tensor(known, [tensors[leaf] for leaf in known.leaves])
        arguments = [*(tensors[var] for var in self._entrance.slots), *buffers.inputs, *buffers.constants]
        if self._compiled is None:
            self._compiled = self._compile(arguments)
        compiled, count = self._compiled, len(self._plan.outputs)
        # Not in the graph: to write at some places of a result takes a copy of it there.
        after = clears(self._program, tensors)

        def run_on_device(before: Before) -> Sequence[Tensor]:
            with torch.no_grad():
                uninterrupted(before)
                metrics: Sequence[Tensor] = compiled(*arguments)[:count]
                uninterrupted(after)
                return metrics

        def run_on_host(before: Before) -> Sequence[Tensor]:
            # A compiled host function writes slots while Python runs: Ctrl-C waits until it is done.
            with torch.no_grad(), Deferred():
                metrics = compiled(*arguments)[:count]
                uninterrupted((*before, *after))
                return _apart(metrics)

        return run_on_host if self._device.type == "cpu" else run_on_device

    def _compile(self, arguments: list[Tensor]) -> Callable[..., Any]:
        with torch.no_grad():
            if self._compiler is not None:
                compiled: Callable[..., Any] = self._compiler(self._graph, arguments)
                return compiled
            from torch._inductor import standalone_compile

            options = {**_INDUCTOR_OPTIONS, "unsafe_marked_cacheable_functions": _sources()}
            options["post_grad_custom_post_pass"] = compiler_pass()
            if self._device.type == "cpu":
                options |= _ON_HOST
            else:
                options |= {**_ON_GPU, **(_TOGETHER if self._small else _CLOSE_PAIRS)}
            if self._in_order:
                options |= _IN_ORDER
            if torch.are_deterministic_algorithms_enabled():
                options["deterministic"] = True  # no variant of a reduction is chosen by timing it
            return standalone_compile(
                self._graph,
                list[Any](arguments),
                dynamic_shapes="from_example_inputs",
                options={"config_patches": options},
            )


def lower_compiled(
    program: Program, device: torch.device, compiler: Callable[..., Any] | None
) -> CompiledPlan:
    """Lower through inductor, or through ``compiler(graph_module, example_inputs) -> callable``."""
    if device.type == "cuda":
        recompute(program)
        keep_as_buffers(program)
    return CompiledPlan(program, schedule(program, fuse=False), device, compiler)


@dataclass(frozen=True, slots=True)
class Entrance:
    """How the state enters a compiled function: what is written has one name there, and no other name reads it.

    Attributes:
      slots: Slots and ranges that are arguments: some call reads them, or the commit writes them.
      windows: Slots inside of a range that is written, which are read as a part of it: range, first element.
      gathered: Ranges of which a slot is written by itself: their vector is put together from the slots.
    """

    slots: list[Var]
    windows: dict[Var, tuple[Var, int]]
    gathered: list[SlotRange]

    @classmethod
    def of(cls, program: Program, plan: Schedule) -> Entrance:
        written = {old for old, _ in plan.commits}
        used = {var for instr in plan.head for var in instr.inputs()} | set(plan.outputs) | written
        used |= {new for _, new in plan.commits}
        ranges = [known for known in program.ranges if known.var in used]
        windows = {
            leaf: (known.var, at)
            for known in ranges
            if known.var in written
            for leaf, at in zip(known.leaves, known.offsets, strict=True)
        }
        changing = written | windows.keys()
        gathered = [r for r in ranges if r.var not in written and not changing.isdisjoint(r.leaves)]
        used |= {leaf for known in gathered for leaf in known.leaves}
        outside = windows.keys() | {known.var for known in gathered}
        entering = [*program.slots, *(known.var for known in ranges)]
        read = {leaf: window for leaf, window in windows.items() if leaf in used}
        return cls([var for var in entering if var in used - outside], read, gathered)


def build_graph(program: Program, plan: Schedule, entrance: Entrance) -> fx.GraphModule:
    """The program as an FX graph: placeholders are the state, inputs, constants; outputs are the metrics.

    What a variable is stands in its node's ``meta["spec"]``.
    """
    graph = fx.Graph()
    nodes: dict[Var, fx.Node] = {}
    for var in [*entrance.slots, *program.inputs, *(c.var for c in program.constants)]:
        nodes[var] = graph.placeholder(repr(var))
        nodes[var].meta["spec"] = var.spec
    for leaf, (vector, at) in entrance.windows.items():
        nodes[leaf] = graph.call_function(_restrided, (nodes[vector], leaf.spec.shape, leaf.spec.stride, at))
    for known in entrance.gathered:
        leaves = [nodes[leaf] for leaf in known.leaves]
        nodes[known.var] = graph.call_function(
            torch.ops.fcg.ravel.default, (leaves, list(known.offsets), known.length)
        )
    roots, entering = {var: var for var in nodes}, frozenset(nodes)
    for i in plan.written_constants:
        var = program.constants[i].var
        nodes[var] = graph.call_function(torch.ops.aten.clone.default, (nodes[var],))

    def node(var: Var) -> fx.Node:
        return nodes[var]

    def assign(out: Any, value: fx.Node) -> None:
        if isinstance(out, Var):
            if out not in entering:  # `native_dropout` may return its argument
                nodes[out] = value
                value.meta["spec"] = out.spec
        elif isinstance(out, (list, tuple)):
            for i, item in enumerate(out):
                if item is not None and not (isinstance(item, (list, tuple)) and not item):
                    assign(item, graph.call_function(operator.getitem, (value, i)))

    scalars: list[fx.Node] = []
    for instr in plan.head:
        kwargs = {name: map_vars(node, value) for name, value in instr.kwargs.items()}
        source = instr.args[0] if instr.args else None
        if instr.op is torch.ops.aten.as_strided.default and source in roots:
            _, size, stride, *given = (*instr.args, *kwargs.values())
            offset = given[0] if given and given[0] is not None else source.offset
            at = offset - roots[source].offset
            value = graph.call_function(_restrided, (nodes[roots[source]], size, stride, at))
        else:
            value = graph.call_function(_target(instr), map_vars(node, instr.args), kwargs)
        assign(instr.out, value)
        for out in instr.outputs():
            root = next((roots[v] for v in instr.inputs() if v in roots and v.storage == out.storage), None)
            if root is not None:
                roots[out] = root
        if instr.op._schema.name in WITH_SCALARS:
            steps = instr.args[5]
            corrections = graph.call_function(operator.getitem, (value, len(instr.out)))
            scalars += [
                graph.call_function(operator.getitem, (corrections, i)) for i in range(2 * len(set(steps)))
            ]
    clone = torch.ops.aten.clone.default
    outputs = [
        graph.call_function(clone, (nodes[var],)) if i in plan.cloned else nodes[var]
        for i, var in enumerate(plan.outputs)
    ]
    values = [
        graph.call_function(clone, (nodes[new],)) if old in plan.staged else nodes[new]
        for old, new in plan.commits
    ]
    for (old, _), value in zip(plan.commits, values, strict=True):
        graph.call_function(torch.ops.aten.copy_.default, (nodes[old], value))
    # A staged value that is returned has to be a buffer of its own; inductor drops a clone that is only written.
    staged = [value for (old, _), value in zip(plan.commits, values, strict=True) if old in plan.staged]
    # So has a scalar of the optimizer: else the compiler puts its powers into every update kernel.
    results = [*outputs, *staged, *scalars]
    if not results:  # a compiled function has to return something
        device = program.slots[0].spec.device if program.slots else torch.device("cpu")
        results = [graph.call_function(torch.ops.aten.zeros.default, ([0],), {"device": device})]
    graph.output(tuple(results))
    return fx.GraphModule(torch.nn.Module(), graph)


def _apart(metrics: Sequence[Tensor]) -> list[Tensor]:
    """Metrics with a storage each: a compiler may return one buffer for two equal results."""
    seen: set[int] = set()
    apart = []
    for metric in metrics:
        key = metric.untyped_storage()._cdata
        apart.append(metric.clone() if key in seen else metric)
        seen.add(key)
    return apart


def _restrided(root: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """``as_strided`` on a tensor of the state, with offsets from its own beginning.

    Taken literally, the compiler would count them from the beginning of the slab that the tensor lies in.
    """
    memory = root.permute(_outer_first(root.stride())).reshape(-1)
    order = _outer_first(stride)
    if dense_stride(torch.empty_strided(shape, stride, device="meta")) == tuple(stride):
        part = memory.narrow(0, offset, math.prod(shape)).view([shape[axis] for axis in order])
        return part.permute([order.index(axis) for axis in range(len(shape))])
    index = torch.full((), offset, device=root.device)
    for axis, (size, step) in enumerate(zip(shape, stride, strict=True)):
        along = torch.arange(size, device=root.device) * step
        index = index + along.view([-1 if other == axis else 1 for other in range(len(shape))])
    return memory[index]


def _outer_first(stride: Sequence[int]) -> list[int]:
    """Axes in the order of memory."""
    return sorted(range(len(stride)), key=lambda axis: -stride[axis])


def _target(instr: Instr) -> Callable[..., Any]:
    """The call's target; ops of our own and fused optimizers are traced as formulas, which the compiler can fuse."""
    name = instr.op._schema.name
    if name == "fcg::random_bits" and not _draws_in_bulk(instr):
        return decompose_random_bits
    return FORMULAS.get(name, instr.op)


def _largest(program: Program) -> int:
    """Bytes of the largest value that the step computes."""
    return max((var.spec.nbytes for instr in program.instrs for var in instr.outputs()), default=0)


def _sources() -> dict[str, str]:
    """Functions of ours that a graph may call, with a digest of what they are: part of the key of torch's cache.

    Of a graph that calls a function unknown to it, torch keeps the kernels alone, and traces it anew in each process.
    """
    functions = (
        decompose_random_bits,
        _restrided,
        dense_stride,
        *FORMULAS.values(),
        *ON_LOGITS,
        *ON_CROSS_ENTROPY,
    )
    modules = {function.__module__: inspect.getmodule(function) for function in functions}
    digests = {
        name: hashlib.sha256(inspect.getsource(module).encode()).hexdigest()
        for name, module in modules.items()
        if module is not None
    }
    return {f"{f.__module__}.{f.__name__}": digests[f.__module__] for f in functions}


def _draws_in_bulk(instr: Instr) -> bool:
    """Whether a kernel of its own draws faster than the kernels that it could be fused into.

    It makes four words of one block, where a fused formula computes the whole block for each of them.
    """
    words = instr.out.spec
    return bool(words.device.type == "cuda" and words.numel >= _BULK)
