"""Keep old values intact in a compiled step: results must not alias slots that the step overwrites.

A compiled step writes its slots itself, so a value that leaves it, as a metric or into another slot, must not alias a
slot that changes. In the program such a value is a copy, but a compiler drops copies: graph passes drop some, and the
lowering of single calls drops others (``cat`` of one tensor, ``pow(x, 1)``). Each is right by itself; together they are
wrong. It also runs calls in place in an argument that seems to have no later reader. Five rules, applied to the graph
after all of the compiler's passes, prevent this:

* A value that leaves the graph goes through ``fcg::own``. The op is lowered when the memory of its argument is known:
  the memory of a slot or an input is copied, and any other argument costs nothing. The copy is a read like any other,
  so the compiler orders it before the write. And since the op declares its result a view, no call is run in place in a
  value that has yet to leave.
* A call that reads a value which an op outside the compiler may overwrite is followed by ``fcg::now``, which has it
  computed before that op. A compiler delays cheap computations until their result is needed, and would then read the
  overwritten value (torch 2.11 and 2.13 do this under ``torch.compile``, too).
* A concatenation reads a copy of a value in which a later call may be run in place: the compiler computes the parts of
  a concatenation in its memory, so that call would change the concatenation, too.
* A call that may be run in place is given a copy of an argument whose elements share memory, as those of an expanded
  gradient do: one write would change them all. So is one that replaces a part of a value by another part of it: it
  would read what it has just written. (Under ``torch.compile``, torch 2.11 and 2.13 do both.)
* A view that the compiler leaves to torch (of another element size, or of complex numbers) is taken of a copy: the
  compiler does not know that it shares memory with the argument.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ...tensors.aten import returns_view
from ...tensors.op_table import row_of
from ...tensors.overlap import overlaps_itself

__all__ = ["AFTER", "KEPT", "LATER", "NOW", "OWN", "keep_old_values"]

_aten = torch.ops.aten
_COPY = _aten.copy_.default

_library = torch.library.Library("fcg", "FRAGMENT")
# Declared as views: the compiler runs no call in place in memory that a view reads later.
_library.define("own(Tensor(a) value) -> Tensor(a)")
_library.define("now(Tensor(a) value) -> Tensor(a)")
for _name in ("own", "now"):
    _library.impl(_name, _aten.alias.default, "CompositeExplicitAutograd")
    _library._register_fake(_name, _aten.alias.default)
# Stands for `now` until the compiler's passes are done: those that make a graph functional know no views but torch's.
_library.define("kept(Tensor value) -> Tensor")
_library.impl("kept", _aten.clone.default, "CompositeExplicitAutograd")
_library._register_fake("kept", _aten.clone.default)
KEPT: OpOverload = torch.ops.fcg.kept.default
torch.library.register_vmap("fcg::kept", lambda _, dims, value: (KEPT(value), dims[0]), lib=_library)
# Stands for `after`: the value, in memory, but not before the other argument is there.
_library.define("later(Tensor value, Tensor other) -> Tensor")
_library.define("after(Tensor(a) value, Tensor other) -> Tensor(a)")
for _name, _function in (("later", torch.clone), ("after", _aten.alias.default)):
    _library.impl(_name, lambda value, _, function=_function: function(value), "CompositeExplicitAutograd")
    _library._register_fake(_name, lambda value, _, function=_function: function(value))
LATER = torch.ops.fcg.later.default
AFTER = torch.ops.fcg.after.default
OWN = torch.ops.fcg.own.default
NOW = torch.ops.fcg.now.default


def keep_old_values(graph: fx.Graph) -> None:
    """Ensure that no value that leaves a graph aliases an argument.

    Args:
      graph: The graph after the compiler's own passes: arguments are written at its end only, by ``copy_``.
    """
    for kept in graph.find_nodes(op="call_function", target=KEPT):
        kept.target = NOW
    for later in graph.find_nodes(op="call_function", target=LATER):
        later.target = AFTER
    for argument in graph.find_nodes(op="placeholder"):
        _copy_for_foreign_views(graph, argument)
    _copy_into_concatenations(graph)
    _copy_what_overlaps(graph)
    _own_what_leaves(graph, graph.find_nodes(op="call_function", target=_COPY))
    _read_before_writes(graph)


def _own_what_leaves(graph: fx.Graph, writes: Sequence[fx.Node]) -> None:
    """Insert ``own`` between each value and the slot or output that it becomes."""
    *_, last_argument = graph.find_nodes(op="placeholder")
    owned: dict[fx.Node, fx.Node] = {}

    def own(value: fx.Node) -> fx.Node:
        if value not in owned:
            with graph.inserting_after(last_argument if value.op == "placeholder" else value):
                owned[value] = graph.call_function(OWN, (value,))
        return owned[value]

    for write in writes:
        slot, value = map(_as_node, write.args)
        if not _is_done_in(slot, value):
            write.args = (slot, own(value))
    output = graph.output_node()
    output.args = (fx.map_arg(output.args[0], own),)


def _as_node(argument: Any) -> fx.Node:
    assert isinstance(argument, fx.Node)
    return argument


def _is_done_in(slot: fx.Node, value: fx.Node) -> bool:
    """Whether the compiler may compute a slot's new value in the slot itself, which leaves nothing to copy."""
    new, old = value.meta["val"], slot.meta["val"]
    alike = (new.dtype, new.shape, new.stride()) == (old.dtype, old.shape, old.stride())
    return bool(alike) and _begins_in(slot, value)


def _begins_in(slot: fx.Node, value: fx.Node) -> bool:
    """Whether a value is a slot after a chain of calls that may write it in place."""
    call = _viewed(value)
    return call is not slot and any(
        _viewed(argument) is slot or _begins_in(slot, argument)
        for argument in call.all_input_nodes
        if _may_be_in_place(call, argument)
    )


def _viewed(value: fx.Node) -> fx.Node:
    """Return the result that a value is a part or a view of."""
    while _is_part(value):
        value = _as_node(value.args[0])
    return value


def _copy_for_foreign_views(graph: fx.Graph, value: fx.Node) -> None:
    """Let views that torch itself makes read a copy of the value."""
    for view in list(value.users):
        if not _is_part(view) or "val" not in value.meta:
            continue
        if _is_foreign(view, value):
            with graph.inserting_before(view):
                copy = graph.call_function(_aten.clone.default, (value,))
            view.replace_input_with(value, copy)
        else:
            _copy_for_foreign_views(graph, view)


def _copy_into_concatenations(graph: fx.Graph) -> None:
    """Let concatenations read copies of what a later call may be run in place in."""
    place = {node: number for number, node in enumerate(graph.nodes)}  # copies made below have none
    for cat in graph.find_nodes(op="call_function", target=_aten.cat.default):
        for part in dict.fromkeys(cat.all_input_nodes):
            value = _viewed(part)
            if any(
                place.get(user, 0) > place[cat] and _may_overwrite(user, value) for user in _readers(value)
            ):
                with graph.inserting_before(cat):
                    copy = graph.call_function(_aten.clone.default, (part,))
                cat.replace_input_with(part, copy)


def _copy_what_overlaps(graph: fx.Graph) -> None:
    """Give calls that may be run in place in an argument a copy of it where another element lies in the same place."""
    options: dict[str, Any] = {"memory_format": torch.contiguous_format}
    for call in list(graph.nodes):
        for argument in call.all_input_nodes if call.op == "call_function" else ():
            if _may_be_in_place(call, argument) and (_overlaps(argument) or _reads_again(call, argument)):
                with graph.inserting_before(call):
                    copy = graph.call_function(_aten.clone.default, (argument,), options)
                if row_of(call.target).replaces:
                    call.update_arg(0, copy)
                else:
                    call.replace_input_with(argument, copy)


def _overlaps(argument: fx.Node) -> bool:
    value = argument.meta.get("val")
    return isinstance(value, torch.Tensor) and overlaps_itself(value)


def _reads_again(call: fx.Node, argument: fx.Node) -> bool:
    """Whether a call that replaces a part of an argument reads what it replaces it with from the same memory."""
    if not row_of(call.target).replaces:
        return False
    others: list[fx.Node] = []
    fx.map_arg((call.args[1:], call.kwargs), others.append)
    return any(_viewed(one) is _viewed(argument) for one in others)


def _may_overwrite(call: fx.Node, value: fx.Node) -> bool:
    """Whether a call may write its result into the memory of a value or of a view of it."""
    return any(
        _viewed(argument) is value and _may_be_in_place(call, argument) for argument in call.all_input_nodes
    )


def _is_foreign(view: fx.Node, value: fx.Node) -> bool:
    """Whether torch itself makes a view, rather than the compiler by loads at other offsets."""
    new, old = view.meta.get("val"), value.meta["val"]
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return False
    return new.is_complex() or old.is_complex() or new.itemsize != old.itemsize


def _read_before_writes(graph: fx.Graph) -> None:
    """Insert ``now`` after each call that reads a value which a later call may overwrite unseen by the compiler."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    readers = [
        reader
        for call in filter(_wraps, place)
        for argument in call.all_input_nodes
        for reader in _readers(argument)
        if place[reader] < place[call] and isinstance(reader.meta.get("val"), torch.Tensor)
    ]
    for reader in dict.fromkeys(readers):
        users = list(reader.users)
        with graph.inserting_after(reader):
            now = graph.call_function(NOW, (reader,))
        for user in users:
            user.replace_input_with(reader, now)


def _readers(value: fx.Node) -> Iterator[fx.Node]:
    """Yield the calls that compute with a value or with a view of it."""
    for user in value.users:
        if _is_part(user):
            yield from _readers(user)
        elif user.op == "call_function" and user.target is not _COPY:
            yield user


def _may_be_in_place(call: fx.Node, argument: fx.Node) -> bool:
    """Whether a call may write its result into the memory of an argument."""
    # Reductions over ranks have an in-place form.
    collective = (
        isinstance(call.target, torch._ops.OpOverload) and call.target.namespace == "_c10d_functional"
    )
    return collective or _wraps(call) or (row_of(call.target).replaces and call.args[0] is argument)


def _wraps(call: fx.Node) -> bool:
    """Whether a call wraps an op or a Triton kernel that writes its arguments."""
    return isinstance(call.target, torch._ops.HigherOrderOperator)


def _is_part(call: fx.Node) -> bool:
    """Whether a call returns its argument, or a view of it."""
    if isinstance(call.target, torch._ops.OpOverload):
        return returns_view(call.target)
    return call.target is operator.getitem
