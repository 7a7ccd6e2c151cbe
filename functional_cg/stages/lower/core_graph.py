"""Turn a graph into one of core calls, which writes nothing but its arguments, and these at its end.

Torch does this to any graph that it compiles, by running it twice on fake tensors. A step has thousands of calls but
few distinct ones: here each distinct call is traced once, and what it became is put in for every equal call.

A write becomes a new value of the memory; whoever reads another view of that memory later views the new value.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .expansion import Expander, Expansion, Same

__all__ = ["core_graph"]

_NUMBERED = re.compile(r"_\d+$")
# Two equal ones of these types, with equal names, are one to any call.
_PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_COPY_BACK = torch.ops.aten.copy_.default


@dataclass(slots=True, eq=False)
class _Memory:
    """Memory that a call made, or an argument's: how often it has been written, and who it belongs to.

    Attributes:
      owners: How many values are said to be all of it; more than one cannot be told apart, and must not be written.
      writes: How often it has been written.
    """

    owners: int = 1
    writes: int = 0


@dataclass(slots=True, eq=False)
class _Call:
    """A call of the graph, with a place for each tensor among its arguments.

    Attributes:
      source: Its node.
      apply: The call as a function of its tensors.
      key: What says which calls are equal, but for the tensors; None if it is unknown.
    """

    source: fx.Node
    apply: Callable[..., Any]
    key: Hashable


@dataclass(slots=True, eq=False)
class _Value:
    """A tensor of the graph.

    Attributes:
      node: The node of its value as of some number of writes.
      memory: The memory that it lies in.
      writes: That number.
      base: What it is a view of; None for all of a memory.
      call: The call that views.
      given: The nodes of the call's tensors; that of the base is out of date after a write.
      number: Which of these is the base.
      place: Which of the call's results it is.
    """

    node: fx.Node
    memory: _Memory
    writes: int = 0
    base: _Value | None = None
    call: _Call | None = None
    given: Sequence[fx.Node] = ()
    number: int = 0
    place: int = 0


def core_graph(module: fx.GraphModule, arguments: Sequence[Tensor], mode: Any) -> fx.GraphModule:
    """Return the graph's core calls.

    Args:
      module: The graph; it is not changed.
      arguments: Fake tensors as its arguments.
      mode: Their mode.
    """
    return _Builder(Expander(mode), mode).build(module, arguments)


@dataclass(slots=True)
class _Builder:
    expander: Expander
    mode: Any
    graph: fx.Graph = field(default_factory=fx.Graph)
    root: torch.nn.Module = field(default_factory=torch.nn.Module)
    known: dict[Hashable, Expansion] = field(default_factory=dict)
    storages: dict[int, _Memory] = field(default_factory=dict)

    def build(self, module: fx.GraphModule, arguments: Sequence[Tensor]) -> fx.GraphModule:
        values: dict[fx.Node, Any] = {}
        entering: list[tuple[fx.Node, _Value]] = []
        given = iter(arguments)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                made = self.graph.placeholder(f"arg{len(entering)}_1")
                made.meta["val"] = next(given)
                values[node] = _Value(made, _Memory())
                entering.append((made, values[node]))
            elif node.op == "output":
                (results,) = pytree.tree_map_only(fx.Node, values.__getitem__, node.args)
                results = pytree.tree_map_only(_Value, self.current, results)
                self._copy_back(entering)
                self.graph.output(tuple(results))
            elif node.target is operator.getitem:
                whole, at = node.args
                values[node] = values[whole][at]
            else:
                values[node] = self._call(node, values)
        self.graph.eliminate_dead_code()
        return fx.GraphModule(self.root, self.graph)

    def _copy_back(self, entering: Sequence[tuple[fx.Node, _Value]]) -> None:
        for argument, value in entering:
            if value.memory.writes:
                new = self.current(value)
                written = self.graph.create_node(
                    "call_function", _COPY_BACK, (argument, new), {}, "copy_"
                )
                written.meta.update(new.meta, val=argument.meta["val"])

    def _call(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        arguments = pytree.tree_map_only(fx.Node, values.__getitem__, (node.args, node.kwargs))
        flat, spec = pytree.tree_flatten(arguments)
        tensors = list(dict.fromkeys(one for one in flat if isinstance(one, _Value)))
        places = {one: place for place, one in enumerate(tensors)}
        fixed = [places.get(one, -1) if isinstance(one, _Value) else -1 for one in flat]
        target: Any = node.target

        def apply(*given: Tensor) -> Any:
            filled = [one if at < 0 else given[at] for one, at in zip(flat, fixed, strict=True)]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            return target(*args, **kwargs)

        constants = [_constant(one) for one in flat if not isinstance(one, _Value)]
        key = None if None in constants else (target, tuple(fixed), tuple(constants), spec)
        call = _Call(node, apply, key)
        given = [self.current(one) for one in tensors]
        expansion = self._expansion("call", call, given)
        nodes = self._put_in(expansion, node, given)
        for number, new in expansion.written.items():
            self._write(tensors[number], nodes[new])

        def result(place: int, one: Any) -> Any:
            if isinstance(one, Same):
                return tensors[one.number]
            if not isinstance(one, fx.Node):
                return one
            made = nodes[one]
            return self._value(made, place, call, tensors, given)

        leaves, nesting = pytree.tree_flatten(expansion.results)
        return pytree.tree_unflatten([result(place, one) for place, one in enumerate(leaves)], nesting)

    def _value(
        self, node: fx.Node, place: int, call: _Call, tensors: Sequence[_Value], given: Sequence[fx.Node]
    ) -> _Value:
        """Return a result of a call as a value: a view of one of the call's tensors, or new memory."""
        storage = _storage(node.meta["val"])
        for number, one in enumerate(given):
            if _storage(one.meta["val"]) == storage:
                base = tensors[number]
                return _Value(node, base.memory, base.memory.writes, base, call, given, number, place)
        if (memory := self.storages.get(storage)) is not None:
            memory.owners += 1
        else:
            memory = self.storages[storage] = _Memory()
        return _Value(node, memory)

    def current(self, value: _Value) -> fx.Node:
        """Return the node of a value, after all writes so far."""
        if value.writes != value.memory.writes:
            assert value.base is not None and value.call is not None
            given = list(value.given)
            given[value.number] = self.current(value.base)
            expansion = self._expansion("call", value.call, given)
            nodes = self._put_in(expansion, value.call.source, given)
            value.node = nodes[pytree.tree_leaves(expansion.results)[value.place]]
            value.writes = value.memory.writes
        return value.node

    def _write(self, value: _Value, new: fx.Node) -> None:
        if value.base is None:
            if value.memory.owners > 1:
                raise NotImplementedError("a call writes memory that two results of another call share")
            value.node = self._laid_out(new, value.node)
            value.memory.writes += 1
            value.writes = value.memory.writes
            return
        assert value.call is not None
        given = list(value.given)
        given[value.number] = self.current(value.base)
        given.append(new)
        expansion = self._expansion(f"write {value.place} {value.number}", value.call, given, value)
        nodes = self._put_in(expansion, value.call.source, given)
        self._write(value.base, nodes[expansion.written[value.number]])

    def _laid_out(self, new: fx.Node, old: fx.Node) -> fx.Node:
        """Return a new value of a memory in its strides, which views of it count on."""
        return new

    def _expansion(
        self, what: str, call: _Call, given: Sequence[fx.Node], written: _Value | None = None
    ) -> Expansion:
        tensors = [one.meta["val"] for one in given]
        key = None if call.key is None else (what, call.key, *map(_like, tensors))
        found = self.known.get(key) if key is not None else None
        if found is None:
            copies = [self._copy(one) for one in tensors]
            if written is None:
                found = self.expander.call(call.source, call.apply, copies)
            else:
                found = self.expander.scatter(call.source, call.apply, written.place, written.number, copies)
            if key is not None:
                self.known[key] = found
        return found

    def _put_in(
        self, expansion: Expansion, source: fx.Node, given: Sequence[fx.Node]
    ) -> dict[fx.Node, fx.Node]:
        nodes: dict[fx.Node, fx.Node] = {}
        storages: dict[int, torch.UntypedStorage] = {}
        places = iter(given)
        origin: Any = None

        def tensor(value: Any) -> Any:
            return self._again(value, storages) if isinstance(value, Tensor) else value

        for one in expansion.graph.nodes:
            if one.op == "placeholder":
                nodes[one] = made = next(places)
                storages[_storage(one.meta["val"])] = made.meta["val"].untyped_storage()
            elif one.op == "call_function":
                arguments = fx.node.map_arg(one.args, nodes.__getitem__)
                keywords = fx.node.map_arg(one.kwargs, nodes.__getitem__)
                made = self.graph.create_node(
                    "call_function", one.target, arguments, keywords, _NUMBERED.sub("", one.name)
                )
                made.meta.update(one.meta)
                if "from_node" in one.meta:
                    origin = origin or [fx.traceback.NodeSource(source, "core_graph", fx.traceback.NodeSourceAction.CREATE)]
                    made.meta["from_node"] = origin
                value = one.meta.get("val")
                if one.target is operator.getitem:
                    made.meta["val"] = made.args[0].meta["val"][made.args[1]]
                else:
                    made.meta["val"] = pytree.tree_map(tensor, value)
                nodes[one] = made
            elif one.op == "get_attr":
                name = f"_constant{len(list(self.root.buffers()))}"
                self.root.register_buffer(name, getattr(expansion.module, one.target))
                nodes[one] = made = self.graph.get_attr(name)
                made.meta.update(one.meta)
        return nodes

    def _again(self, value: Any, storages: dict[int, torch.UntypedStorage]) -> Tensor:
        """Return a tensor like one of an expansion, in memory that corresponds."""
        from torch._subclasses.fake_tensor import FakeTensor

        key = _storage(value)
        if key not in storages:
            storages[key] = torch.UntypedStorage(value.untyped_storage().nbytes(), device="meta")
        made = torch.empty(0, dtype=value.dtype, device="meta").set_(
            storages[key], value.storage_offset(), value.shape, value.stride()
        )
        return FakeTensor(self.mode, made, value.device)

    def _copy(self, value: Tensor) -> Tensor:
        """Return a tensor with memory of its own."""
        return self._again(value, {})


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _constant(value: Any) -> Hashable:
    return (type(value), str(value)) if isinstance(value, _PLAIN) else None


def _like(value: Tensor) -> Hashable:
    """Return what a call can tell of a tensor."""
    return (
        tuple(value.shape),
        value.stride(),
        value.storage_offset(),
        value.dtype,
        value.device,
        value.untyped_storage().nbytes(),
    )
