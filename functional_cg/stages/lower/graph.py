"""Build the FX graph for a compiler: the head of a program, and how the state enters it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from ...random import decompose_random_bits
from ...shards.transfers import TRANSFERS
from ...tensors.op_table import row_of
from ..evaluate import AS_STRIDED
from ..fx_passes.canonical import CAST, VIEWS
from ..layouts import laid_out
from ..passes.division import division_of
from ..passes.float8 import overflow_of, to_float8
from ..passes.formulas import FORMULAS
from ..passes.literals import as_held
from ..program import Instr, Program, SlotRange, Var, map_vars, vars_in, written_storages
from ..schedule import Schedule

__all__ = ["Entrance", "build_graph", "calls_of"]

_CLONE = torch.ops.aten.clone.default
# Kinds of ops of which torch chooses the kernel by the strides of the arguments: on the wrong ones it is slower.
_BY_STRIDES = ("convolution", "attention")
# Torch's compiler makes ``addmm`` of a product and its sum with something, and forgets what the sum multiplies it by.
_SUMS = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor})
_BULK = 2**16  # words; a launch costs about as much as computing this many one by one


@dataclass(frozen=True, slots=True)
class Entrance:
    """How the state enters a compiled function: written memory is a single argument, with no alias that reads it.

    Attributes:
      slots: Slots and ranges that are arguments: a call reads them, or the commit writes them.
      windows: Slots inside a written range, which are read as parts of it: (range, first element).
      gathered: Ranges with a slot that is written on its own: their vector is assembled from the slots.
    """

    slots: list[Var]
    windows: dict[Var, tuple[Var, int]]
    gathered: list[SlotRange]

    def takes(self, program: Program) -> list[Var]:
        """Return the variables of the arguments."""
        return [*self.slots, *program.inputs, *(constant.var for constant in program.constants)]

    @classmethod
    def of(
        cls,
        program: Program,
        plan: Schedule,
        *,
        handed_on: Sequence[Var] = (),
        writes: Sequence[tuple[Var, Var]] = (),
    ) -> Entrance:
        """Decide how the state enters a graph; the arguments are those of :func:`build_graph`."""
        written = {old for old, _ in writes}
        used = {var for instr in plan.head for var in instr.inputs()} | {*plan.outputs, *handed_on} | written
        used |= {new for _, new in writes}
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


def build_graph(
    program: Program,
    plan: Schedule,
    entrance: Entrance,
    *,
    handed_on: Sequence[Var] = (),
    writes: Sequence[tuple[Var, Var]] = (),
    as_traced: bool = False,
) -> fx.GraphModule:
    """Build the head of a program as an FX graph from state, inputs and constants to metrics.

    Each node of a variable has its spec in ``meta["spec"]``; ``meta["written"]`` says whether a call writes its memory;
    ``meta["call"]`` of a call's node is the call.

    Args:
      program: The program.
      plan: Its schedule.
      entrance: How the state enters.
      handed_on: Values to return after the metrics, to be read before the next call.
      writes: Pairs (slot or range, new value) to write at the end.
      as_traced: Whether results lie as the trace saw them: they do not if a formula of the compiler gives them other
        strides, and another function may have been compiled for those of the trace.
    """
    graph = fx.Graph()
    nodes: dict[Var, fx.Node] = {}
    changed = written_storages(plan.head)
    for var in entrance.takes(program):
        nodes[var] = graph.placeholder(repr(var))
        nodes[var].meta["spec"] = var.spec
        nodes[var].meta["written"] = var.storage in changed
    for leaf, (vector, at) in entrance.windows.items():
        nodes[leaf] = graph.call_function(_restrided, (nodes[vector], leaf.spec.shape, leaf.spec.stride, at))
    for known in entrance.gathered:
        leaves = [nodes[leaf] for leaf in known.leaves]
        nodes[known.var] = graph.call_function(
            torch.ops.fcg.ravel.default, (leaves, list(known.offsets), known.length)
        )
    entering = frozenset(nodes)
    _add_calls(graph, plan.head, nodes, entering)
    memory = {var.storage for var in entering}

    def apart(var: Var) -> fx.Node:
        return graph.call_function(_CLONE, (nodes[var],)) if var.storage in memory else nodes[var]

    results = [
        graph.call_function(_CLONE, (nodes[var],)) if i in plan.cloned else nodes[var]
        for i, var in enumerate(plan.outputs)
    ]
    if as_traced:
        results = [
            graph.call_function(laid_out, (value, var.spec.stride)) if len(var.spec.shape) > 1 else value
            for value, var in zip(results, plan.outputs, strict=True)
        ]
    results += [apart(var) for var in handed_on]
    values = [apart(new) for _, new in writes]
    for (old, _), value in zip(writes, values, strict=True):
        graph.call_function(torch.ops.aten.copy_.default, (nodes[old], value))
    # The last one depends on all others, and what depends on nothing is dropped.
    results += [nodes[vars_in(instr.out)[-1]] for instr in plan.head if instr.op in TRANSFERS][-1:]
    if not results:  # a compiled function has to return something
        device = program.slots[0].spec.device if program.slots else torch.device("cpu")
        results = [graph.call_function(torch.ops.aten.zeros.default, ([0],), {"device": device})]
    graph.output(tuple(results))
    return fx.GraphModule(torch.nn.Module(), graph)


def _add_calls(
    graph: fx.Graph, head: Sequence[Instr], nodes: dict[Var, fx.Node], entering: Collection[Var]
) -> None:
    """Add the calls of a head and the nodes of their results."""
    roots = {var: var for var in nodes}
    written = written_storages(head)

    def node(var: Var) -> fx.Node:
        return nodes[var]

    def node_as_traced(var: Var) -> fx.Node:
        if var in entering or 0 in var.spec.stride:
            return nodes[var]
        return graph.call_function(laid_out, (nodes[var], var.spec.stride))

    def assign(out: Any, value: fx.Node) -> None:
        if isinstance(out, Var):
            if out not in entering:  # `native_dropout` may return its argument
                nodes[out] = value
                value.meta["spec"] = out.spec
                value.meta["written"] = out.storage in written
        elif isinstance(out, (list, tuple)):
            for i, item in enumerate(out):
                if item is not None and not (isinstance(item, (list, tuple)) and not item):
                    assign(item, graph.call_function(operator.getitem, (value, i)))

    for call in head:
        instr = as_held(call)
        kwargs = {name: map_vars(node, value) for name, value in instr.kwargs.items()}
        if instr.op is AS_STRIDED:
            source, size, stride, *given = (*instr.args, *kwargs.values())
            root = roots[source]
            offset = given[0] if given and given[0] is not None else source.offset
            laid = None if root in entering else (root.spec.stride, root.storage in written)
            value = graph.call_function(_restrided, (nodes[root], size, stride, offset - root.offset, laid))
        else:
            # What is written is not laid out anew: the write would be to the copy.
            by_strides = not instr.writes and row_of(instr.op).kind in _BY_STRIDES
            target = _target(instr, written)
            args = map_vars(node_as_traced if by_strides else node, _with_floats(instr))
            narrow = None
            if instr.op in _SUMS and isinstance(instr.args[1], Var) and "alpha" in kwargs:
                args, narrow = _times(graph, args, kwargs.pop("alpha"), instr)
            if (overflow := overflow_of(instr)) is not None:
                target, kwargs = to_float8, {**kwargs, "overflow": overflow}
            value = graph.call_function(target, args, kwargs)
            if narrow is not None:
                value = graph.call_function(CAST, (value,), {"dtype": narrow})
        value.meta["call"] = call
        assign(instr.out, value)
        for out in instr.outputs():
            roots[out] = next((roots[var] for var in instr.inputs() if var.storage == out.storage), out)


def _times(
    graph: fx.Graph, args: tuple[Any, ...], alpha: float, instr: Instr
) -> tuple[tuple[Any, ...], torch.dtype | None]:
    """Multiply the summand of a sum by a number, in the dtype that the sum computes in.

    Returns:
      The arguments of the sum, and the dtype that its result is rounded to; None if it has its dtype.
    """
    dtype = instr.out.spec.dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype  # an op rounds once
    summand, here = args[1], instr.args[1].spec.dtype
    for to in (dtype, wide):
        if here != to:
            summand, here = graph.call_function(CAST, (summand,), {"dtype": to}), to
    narrow = dtype if wide != dtype and not instr.writes else None  # what is written has its dtype
    return (args[0], graph.call_function(torch.ops.aten.mul.Tensor, (summand, alpha))), narrow


def _restrided(
    root: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    laid: tuple[Sequence[int], bool] | None = None,
) -> Tensor:
    """Call ``as_strided`` with an offset relative to the start of ``root``, as slots lie inside a slab.

    Args:
      root: All of the memory that the result lies in.
      shape: Shape of the result.
      stride: Its strides.
      offset: Elements from the start of ``root``.
      laid: For a value that the step computes, the strides that its op gives it, which a formula of the compiler may
        not, and whether a call writes it; None for an argument.
    """
    if laid is not None:
        expected, written = laid
        start, root = root, laid_out(root, tuple(expected))
        if written and root is not start:
            raise RuntimeError(
                f"a value that is written has the strides {start.stride()}, not {root.stride()}"
            )
    return root.as_strided(shape, stride, root.storage_offset() + offset)


def _target(instr: Instr, written: Collection[int]) -> Any:
    """Return a call's target; fused optimizers and the library's ops become formulas, which the compiler can fuse.

    The compiler's formulas for torch's own ops lay out some results differently from the ops themselves (``cat`` of one
    nonempty tensor keeps its strides), so some views are not possible there. ``reshape`` is equivalent if nobody
    writes the memory.
    """
    name = instr.op._schema.name
    if instr.op in VIEWS and instr.out.storage not in written:
        return torch.ops.aten.reshape.default
    if name == "fcg::random_bits" and not _draws_in_bulk(instr):
        return decompose_random_bits
    formula = division_of(instr) or FORMULAS.get(name.removesuffix("_"))
    if formula is None or any(argument.is_out for argument in instr.op._schema.arguments):
        return instr.op  # no formula writes elsewhere
    if not name.endswith("_"):
        return formula
    return _in_place(formula) if instr.writes == (instr.out,) else instr.op


@cache
def _in_place(formula: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return the formula for an op as one for the op that writes over its first argument."""

    def written(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x.copy_(formula(x, *args, **kwargs))
        return x

    written.__name__ = f"{formula.__name__}_in_place"
    return written


def _with_floats(instr: Instr) -> tuple[Any, ...]:
    """Return a call's arguments; an integer 0 in a float product becomes 0.0, since compilers fold ``x * 0`` to 0."""
    if instr.op._schema.name != "aten::mul" or not instr.out.spec.dtype.is_floating_point:
        return instr.args
    return tuple(0.0 if type(arg) is int and arg == 0 else arg for arg in instr.args)


def calls_of(graph: fx.Graph) -> dict[str, Instr]:
    """Return the call of each node by the node's name; what a pass has put in is of the call that it reads from."""
    found: dict[str, Instr] = {}
    for node in graph.nodes:
        before = (found[one.name] for one in node.all_input_nodes if one.name in found)
        call = node.meta.get("call") or next(before, None)
        if call is not None:
            found[node.name] = call
    return found


def _draws_in_bulk(instr: Instr) -> bool:
    """Whether a separate kernel draws faster than a formula fused into other kernels.

    The kernel makes four words from one block; a fused formula computes the whole block for each word.
    """
    words = instr.out.spec
    return bool(words.device.type == "cuda" and words.numel >= _BULK)
