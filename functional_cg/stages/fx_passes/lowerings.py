"""How inductor lowers the ops that the compiler's graph has of this library, and the pass that inserts some of them.

This module is the only one that uses inductor's lowerings and its intermediate representation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...tensors import op_table
from ...tensors.aten import returns_view
from ...tensors.op_table import row_of
from . import old_values, updates
from .old_values import AFTER, NOW, OWN, keep_old_values
from .rounding import HALF, ROUNDED
from .updates import UPDATE, Kind, as_calls

__all__ = ["compiler_pass", "register_lowerings"]

_SUMS = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor})
_CAST = torch.ops.prims.convert_element_type.default


def compiler_pass(more: str = "") -> Any:
    """Wrap :func:`keep_old_values` as inductor's last pass before it decides what runs in place.

    Args:
      more: What else inductor shall look up a compiled graph by.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class KeepOldValues(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            keep_old_values(graph)

        def uuid(self) -> Any:
            files = old_values.__file__, updates.__file__, op_table.__file__
            return get_hash_for_files((__file__, *map(str, files)), more)

    return KeepOldValues()


def register_lowerings() -> None:
    """Tell inductor how to lower our ops."""
    # Imported here: it takes a second, which a step that is not compiled, or found compiled, should not pay.
    from torch._inductor.lowering import lowerings, register_lowering

    if OWN not in lowerings:
        known: dict[Any, Any] = {
            OWN: _owned,
            NOW: _computed,
            AFTER: _computed_after,
            UPDATE: _updated,
            ROUNDED: _rounded,
        }
        for op, lowering in known.items():
            register_lowering(op, type_promotion_kind=None)(lowering)


def _owned(value: Any) -> Any:
    """Lower ``fcg::own`` in inductor: copy the value if it is the memory of an argument of the graph."""
    from torch._inductor import ir
    from torch._inductor.lowering import clone, fallback_handler, unsupported_input_tensor
    from torch._inductor.virtualized import V

    call = V.graph.current_node
    if any(user.op == "output" for user in call.users):
        value.realize()  # as the compiler does for an output with other readers: they read it from memory
    if not isinstance(_memory(value), (ir.InputBuffer, ir.ConstantBuffer)):
        return value
    if unsupported_input_tensor(call.all_input_nodes[0].meta["val"]):  # complex numbers: torch copies them
        return fallback_handler(torch.ops.aten.clone.default, add_to_fallback_set=False)(value)
    return clone(value)


def _computed(value: Any) -> Any:
    """Lower ``fcg::now`` in inductor: store the value in memory here."""
    _stored(value)
    return value


def _computed_after(value: Any, other: Any) -> Any:
    """Lower ``fcg::after`` in inductor: store the value in memory, but not before the other one can be computed."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    _stored(value)
    made, known = _memory(value), _memory(other)
    if isinstance(made, ir.Operation):
        names = {known.get_name()} if isinstance(known, ir.Buffer) else known.get_read_names()
        V.graph.additional_buffer_deps[made.get_operation_name()].update(
            names & V.graph.name_to_buffer.keys()
        )
    return value


def _stored(value: Any) -> None:
    """Store a value in memory; one of other strides than contiguous ones gets those that it was traced with.

    Until the compiler lays it out, it looks contiguous to what reads it and is laid out by what it reads: one such
    value among others of channels_last, and the reader is written across the memory of all of them.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    value.realize()
    made = value.data.data if isinstance(value.data, ir.StorageBox) else None
    traced: torch.Tensor = V.graph.current_node.meta["val"]
    if (
        isinstance(made, ir.ComputedBuffer)
        and isinstance(made.layout, ir.FlexibleLayout)
        and 0 not in traced.stride()
        and not traced.is_contiguous()
    ):
        made.freeze_layout_with_same_order(traced.stride())


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    """Lower ``fcg::rounded`` in inductor: to the dtype, and back to that in which all that reads it computes."""
    from torch._inductor import ir
    from torch._inductor.lowering import make_pointwise
    from torch._inductor.virtualized import V, ops

    wide = value.get_dtype()
    if wide == dtype and isinstance(_memory(value), (ir.InputBuffer, ir.ConstantBuffer, ir.ExternKernel)):
        return value  # it was rounded when it was stored
    on_host = value.get_device().type == "cpu"
    hides = not on_host and wide in (*HALF, torch.float32) and _may_be_contracted(V.graph.current_node)

    def rounded(one: Any) -> Any:
        if hides:
            # Triton's compiler takes a product of halves in single precision, rounded, for a product in half precision,
            # and then a sum of that for one operation, which does not round the product. It does not look into this.
            one = ops.inline_asm_elementwise(
                one, asm="mov.f32 $0, $1;", constraints="=f,f", dtype=torch.float32
            )
        half = ops.to_dtype(one, dtype, src_dtype=wide, use_compute_types=False)
        if on_host:
            # torch 2.11 takes what comes back from a cast for what went in, unless it was something else
            bits = ops.to_dtype_bitcast(half, torch.int16, dtype)
            half = ops.to_dtype_bitcast(bits, dtype, torch.int16)
        return ops.to_dtype(half, dtype)

    return make_pointwise(rounded, override_return_dtype=dtype)(value)


def _may_be_contracted(call: fx.Node) -> bool:
    """Whether the value that a call of ``fcg::rounded`` rounds may be a product, and what it returns may be summed."""
    if call.target is not ROUNDED:
        return True  # it is a part of a formula
    source = call.args[0]
    is_product = not isinstance(source, fx.Node) or not (source.op == "placeholder" or source.target in _SUMS)
    return is_product and _may_be_summed(call)


def _may_be_summed(value: fx.Node) -> bool:
    """Whether a value may be a term of a sum: not if it is only stored or multiplied."""
    same = [value]
    for one in same:
        for user in one.users:
            op, row = user.target, row_of(user.target)
            if user.op == "output" or op is torch.ops.aten.mul.Tensor or row.library or user in same:
                continue
            is_view = isinstance(op, torch._ops.OpOverload) and returns_view(op)
            if not (is_view or row.moves or row.selects or op in (_CAST, OWN, NOW, AFTER)):
                return True
            same.append(user)
    return False


def _updated(formula: str, old: Sequence[Any], values: Sequence[Any], numbers: Sequence[float]) -> list[Any]:
    """Lower ``fcg::update`` in inductor: by the lowerings of the calls of its formula, with each result in memory."""
    calls = as_calls(formula, tuple(map(_kind, old)), tuple(map(_kind, values)), tuple(numbers))
    found: list[Any] = _Lowering(calls).run(*(value for value in (*old, *values) if value is not None))
    return found


def _kind(value: Any) -> Kind | None:
    return None if value is None else (value.get_dtype(), bool(value.get_size()))


class _Lowering(fx.Interpreter):
    """Lowers calls in turn, as inductor does those of its own graph."""

    def __init__(self, calls: fx.GraphModule) -> None:
        super().__init__(calls)
        self._results = frozenset(calls.graph.output_node().all_input_nodes)

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if node in self._results:
            value.realize()
        elif node.op != "output":
            value.mark_reuse(len(node.users))
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch._inductor.lowering import lowerings

        return lowerings[target](*args, **kwargs)


def _memory(value: Any) -> Any:
    """Return what stands behind the views of a value in inductor: a buffer, or a computation that has none yet."""
    from torch._inductor import ir

    memory = value.data
    while isinstance(memory, (ir.BaseView, ir.MutableBox)):
        memory = memory.data
    return memory
