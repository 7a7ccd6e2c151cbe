"""What a compiler may write in place of a slot: torch's own answer is wrong for some steps.

It turns ``new = index_put(slot, ...)`` into a write to the slot if a later call writes the slot anyway, whatever that
call writes, and whether or not ``new`` is still to be read after it: a metric or another slot then gets what the slot
became (so torch 2.11 and 2.13, ``torch.compile``, too). Where that could be, the call gets a copy of the slot.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..ops import returns_view

__all__ = ["compiler_pass", "keep_slots"]

_aten = torch.ops.aten
_COPY = _aten.copy_.default
# Their result is their first argument but for a part.
_PARTIAL = frozenset(
    {
        _aten.index_put.default,
        _aten._unsafe_index_put.default,
        _aten.slice_scatter.default,
        _aten.select_scatter.default,
        _aten.diagonal_scatter.default,
        _aten.as_strided_scatter.default,
    }
)


def compiler_pass() -> Any:
    """:func:`keep_slots` as a pass of inductor, right before it decides what is done in place."""
    # Two seconds, which a step that is not compiled does not need.
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class KeepSlots(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            keep_slots(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return KeepSlots()


def keep_slots(graph: fx.Graph) -> None:
    """Give a copy of the slot to calls that could be done in it, and whose result is read after the slot's next value.

    Args:
      graph: After the compiler's own changes: arguments that are written are so at the end, by ``copy_``.
    """
    for slot in dict.fromkeys(node.args[0] for node in graph.find_nodes(op="call_function", target=_COPY)):
        for call in list(slot.users):
            if _may_be_in_place(call, slot) and _outlives(call, slot):
                with graph.inserting_before(call):
                    copy = graph.call_function(_aten.clone.default, (slot,))
                call.replace_input_with(slot, copy)


def _may_be_in_place(call: fx.Node, argument: fx.Node) -> bool:
    """Whether the result may be written into the memory of an argument."""
    # Higher-order operators wrap ops and Triton kernels that write their arguments; a sum over ranks has such a form.
    wraps = isinstance(call.target, torch._ops.HigherOrderOperator) or _is_collective(call)
    return wraps or (call.target in _PARTIAL and call.args[0] is argument)


def _is_collective(call: fx.Node) -> bool:
    return isinstance(call.target, torch._ops.OpOverload) and call.target.namespace == "_c10d_functional"


def _outlives(call: fx.Node, slot: fx.Node) -> bool:
    """Whether the result, or what shares its memory, is an output, or becomes another slot."""
    known, front = {call}, [call]
    while front:
        one = front.pop()
        for user in one.users:
            if user.op == "output" or (user.target is _COPY and user.args[0] is not slot):
                return True
            if user not in known and (_is_part(user) or _may_be_in_place(user, one)):
                known.add(user)
                front.append(user)
    return False


def _is_part(call: fx.Node) -> bool:
    """Whether a call returns its argument, or a view of it."""
    if isinstance(call.target, torch._ops.OpOverload):
        return returns_view(call.target)
    return call.target is operator.getitem
