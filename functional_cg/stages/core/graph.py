"""Turn a graph into one of core calls, which writes nothing but its arguments, and these at its end.

Torch does so to any graph that it compiles, by running it twice on fake tensors. A step has thousands of calls, but few
distinct ones: here each distinct call is traced once, and what it becomes is put in for every equal call.

A write makes a new value of the memory; what reads another view of that memory later views the new value.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate, map_arg
from torch.fx.traceback import NodeSource, NodeSourceAction

from ...tensors.overlap import storage_key
from ..layouts import laid_out
from ..passes.equal_calls import PLAIN
from .expansion import Expander, Expansion, Same, leaves, written_through

__all__ = ["core_graph"]

_NUMBER = re.compile(r"_\d+$")
_COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True, slots=True)
class _Nth:
    """Stands for a tensor among the arguments of a call."""

    number: int


@dataclass(slots=True, eq=False)
class _Memory:
    """Memory of an argument, or that a call made.

    Attributes:
      results: How many results of that call lie in it; which bytes of it are whose is not known if several do.
      writes: How often it has been written.
    """

    results: int = 1
    writes: int = 0


@dataclass(slots=True, eq=False)
class _Call:
    """A call of the graph.

    Attributes:
      source: Its node.
      apply: The call as a function of its tensors.
      key: What it is but for its tensors: equal calls have equal keys; None if it cannot be told.
    """

    source: fx.Node
    apply: Callable[..., Any]
    key: Hashable


@dataclass(slots=True, eq=False)
class _View:
    """How a value is made of another, whose memory it lies in.

    Attributes:
      base: The other value.
      call: The call that returns the view.
      given: Nodes of the call's tensors.
      number: Which of these is the base.
      place: The view's place among the results of the call.
    """

    base: _Value
    call: _Call
    given: Sequence[fx.Node]
    number: int
    place: int


@dataclass(slots=True, eq=False)
class _Value:
    """A tensor of the graph.

    Attributes:
      node: The node that computes it, as of some number of writes.
      memory: The memory that it lies in.
      view: How it is made of another value; None if it is all of its memory.
      writes: The number of writes to its memory that its node knows of.
    """

    node: fx.Node
    memory: _Memory
    view: _View | None = None
    writes: int = 0

    def __post_init__(self) -> None:
        self.writes = self.memory.writes


def core_graph(module: fx.GraphModule, arguments: Sequence[Tensor], mode: Any) -> fx.GraphModule:
    """Return the core calls of a graph; ``meta["val"]`` of each node is what it computes, as fake tensors.

    ``meta["result"]`` of a node is true if a call of the graph returns it; the others are what these are made of.

    Args:
      module: The graph; it stays as it is.
      arguments: Fake tensors like its arguments.
      mode: The mode of the fake tensors.
    """
    return _Builder(Expander(mode), mode).build(module.graph, arguments)


@dataclass(slots=True)
class _Builder:
    """Builds a graph of core calls.

    Attributes:
      expander: What traces calls.
      mode: The mode of its fake tensors.
      graph: The graph.
      root: Whose attributes the graph's constants are.
      known: Expansions of the distinct calls so far.
      memories: What the calls have made so far, by the storages of their fake tensors.
    """

    expander: Expander
    mode: Any
    graph: fx.Graph = field(default_factory=fx.Graph)
    root: torch.nn.Module = field(default_factory=torch.nn.Module)
    known: dict[Hashable, Expansion] = field(default_factory=dict)
    memories: dict[int, _Memory] = field(default_factory=dict)

    def build(self, source: fx.Graph, arguments: Sequence[Tensor]) -> fx.GraphModule:
        values: dict[fx.Node, Any] = {}
        entering: list[tuple[fx.Node, _Value]] = []
        given = iter(arguments)
        for node in source.nodes:
            if node.op == "placeholder":
                argument = self.graph.placeholder(f"arg{len(entering)}_1")
                argument.meta["val"] = self._copy(next(given), {})
                values[node] = _Value(argument, _Memory())
                entering.append((argument, values[node]))
            elif node.op == "output":
                (results,) = map_arg(node.args, lambda one: self._current(values[one]))
                for argument, value in entering:
                    if value.memory.writes:
                        new = self._current(value)
                        meta = {**new.meta, "original_aten": _COPY, "val": argument.meta["val"]}
                        self._add(_COPY, (argument, new), {}, "copy_", meta)
                self.graph.output(tuple(results))
            elif node.target is operator.getitem:
                whole, place = node.args
                values[node] = values[whole][place]
            else:
                values[node] = self._call(node, values)
            if isinstance(values.get(node), _Value) and (spec := node.meta.get("spec")) is not None:
                self._hold(values[node], spec, node)
        self.graph.eliminate_dead_code()
        return fx.GraphModule(self.root, self.graph)

    def _call(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """Add a call; return its results."""
        tensors: dict[_Value, _Nth] = {}

        def place(one: Any) -> Any:
            return tensors.setdefault(one, _Nth(len(tensors))) if isinstance(one, _Value) else one

        arguments = map_aggregate(map_arg((node.args, node.kwargs), values.__getitem__), place)
        # Two such arguments are one to a call if they have one text.
        known = all(isinstance(one, (_Nth, *PLAIN)) for one in leaves(arguments))
        call = _Call(
            node, partial(_apply, node.target, arguments), (node.target, repr(arguments)) if known else None
        )
        given = list(map(self._current, tensors))
        expansion, nodes = self._put_in(call, given)
        for one in (*leaves(expansion.results), *expansion.written.values()):
            if isinstance(one, fx.Node):
                nodes[one].meta["result"] = True
        entering = list(tensors)
        for number, new in expansion.written.items():
            self._write(entering[number], nodes[new], node)
        places = count()

        def result(one: Any) -> Any:
            place = next(places)
            if isinstance(one, Same):
                return entering[one.number]
            return self._value(nodes[one], place, call, entering, given) if isinstance(one, fx.Node) else one

        return map_aggregate(expansion.results, result)

    def _hold(self, value: _Value, spec: Any, source: fx.Node) -> None:
        """Hold a result to the dtype of the trace; a formula of the compiler may give it another one.

        Raises:
          NotImplementedError: If it has another shape.
        """
        made = value.node.meta["val"]
        if made.shape != spec.shape:
            raise NotImplementedError(
                f"{source.target} is of shape {list(made.shape)}, for {list(spec.shape)}"
            )
        if made.dtype != spec.dtype:
            call = _Call(source, partial(Tensor.to, dtype=spec.dtype), (Tensor.to, spec.dtype))
            expansion, nodes = self._put_in(call, [value.node])
            value.node = nodes[expansion.results]
            value.node.meta["result"] = True

    def _value(
        self, node: fx.Node, place: int, call: _Call, tensors: Sequence[_Value], given: Sequence[fx.Node]
    ) -> _Value:
        """Return a result of a call: a view of one of its tensors, or new memory."""
        storage = storage_key(node.meta["val"])
        for number, (base, one) in enumerate(zip(tensors, given, strict=True)):
            if storage_key(one.meta["val"]) == storage:
                return _Value(node, base.memory, _View(base, call, given, number, place))
        if (memory := self.memories.get(storage)) is not None:
            memory.results += 1
            return _Value(node, memory)
        self.memories[storage] = memory = _Memory()
        return _Value(node, memory)

    def _current(self, value: _Value) -> fx.Node:
        """Return the node of a value after all writes so far."""
        view = value.view
        if view is not None and value.writes != value.memory.writes:
            expansion, nodes = self._put_in(view.call, self._given(view))
            value.node = nodes[leaves(expansion.results)[view.place]]
            value.writes = value.memory.writes
        return value.node

    def _given(self, view: _View) -> list[fx.Node]:
        """Return the tensors of a call that views, after all writes to its base."""
        given = list(view.given)
        given[view.number] = self._current(view.base)
        return given

    def _write(self, value: _Value, new: fx.Node, source: fx.Node) -> None:
        """Give a value, and the memory that it lies in, a new value."""
        view = value.view
        if view is None:
            if value.memory.results > 1:
                raise NotImplementedError(f"{source.target} writes memory that another result lies in")
            value.node = self._laid_out(new, value.node.meta["val"].stride(), source)
            value.memory.writes += 1
            value.writes = value.memory.writes
            return
        key = None if view.call.key is None else (view.call.key, view.place, view.number)
        call = _Call(view.call.source, written_through(view.call.apply, view.place, view.number), key)
        expansion, nodes = self._put_in(call, [*self._given(view), new])
        self._write(view.base, nodes[expansion.written[view.number]], source)

    def _laid_out(self, new: fx.Node, stride: tuple[int, ...], source: fx.Node) -> fx.Node:
        """Return a new value in the strides of the memory: an op that writes keeps them, its other form may not."""
        if new.meta["val"].stride() == stride:
            return new
        call = _Call(source, partial(laid_out, stride=stride), (laid_out, stride))
        expansion, nodes = self._put_in(call, [new])
        return nodes.get(expansion.results, new)

    def _expansion(self, call: _Call, given: Sequence[fx.Node]) -> Expansion:
        """Return what a call becomes for these tensors."""
        tensors = [node.meta["val"] for node in given]
        key = (call if call.key is None else call.key, *map(_like, tensors))
        if key not in self.known:
            copies = [self._copy(one, {}) for one in tensors]
            self.known[key] = self.expander.call(call.source, call.apply, copies)
        return self.known[key]

    def _put_in(self, call: _Call, given: Sequence[fx.Node]) -> tuple[Expansion, dict[fx.Node, fx.Node]]:
        """Add what a call becomes; return that, and the nodes that stand for its own."""
        expansion = self._expansion(call, given)
        nodes: dict[fx.Node, fx.Node] = {}
        storages: dict[int, torch.UntypedStorage] = {}
        tensors = iter(given)
        origin = [NodeSource(call.source, __name__, NodeSourceAction.CREATE)]

        def again(one: Any) -> Any:
            return self._copy(one, storages) if isinstance(one, Tensor) else one

        for one in expansion.module.graph.nodes:
            if one.op == "placeholder":
                nodes[one] = node = next(tensors)
                storages[storage_key(one.meta["val"])] = node.meta["val"].untyped_storage()
            elif one.op == "get_attr":
                nodes[one] = self._constant(one, getattr(expansion.module, one.target))
            elif one.op == "call_function":
                args = map_arg(one.args, nodes.__getitem__)
                kwargs = map_arg(one.kwargs, nodes.__getitem__)
                nodes[one] = node = self._add(one.target, args, kwargs, _NUMBER.sub("", one.name), one.meta)
                node.meta["from_node"] = origin
                if one.target is operator.getitem:
                    node.meta["val"] = args[0].meta["val"][args[1]]
                else:
                    value = one.meta.get("val")
                    several = isinstance(value, (list, tuple))
                    node.meta["val"] = type(value)(map(again, value)) if several else again(value)
        return expansion, nodes

    def _add(self, target: Any, args: Any, kwargs: Any, name: str, meta: dict[str, Any]) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        node.meta.update(meta)
        return node

    def _constant(self, node: fx.Node, value: Any) -> fx.Node:
        name = next((known for known, one in self.root.named_buffers() if one is value), None)
        if name is None:
            name = f"_constant{len(list(self.root.buffers()))}"
            self.root.register_buffer(name, value)
        made = self.graph.get_attr(name)
        made.meta.update(node.meta)
        return made

    def _copy(self, value: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
        """Return a fake tensor like another one, in the storage that is there for the other's, or in a new one."""
        key = storage_key(value)
        if key not in storages:
            storages[key] = torch.UntypedStorage(value.untyped_storage().nbytes(), device="meta")
        made = torch.empty(0, dtype=value.dtype, device="meta")
        made.set_(storages[key], value.storage_offset(), value.shape, value.stride())
        made = torch._conj(made) if value.is_conj() else made
        made = torch._neg_view(made) if value.is_neg() else made
        return FakeTensor(self.mode, made, value.device)


def _apply(target: Any, arguments: Any, *tensors: Tensor) -> Any:
    # Such a call turns the tensor that it is given: a view, which is a name of its own.
    if torch.Tag.inplace_view in getattr(target, "tags", ()):
        tensors = tuple(map(torch.ops.aten.alias.default, tensors))
    args, kwargs = map_aggregate(arguments, lambda one: tensors[one.number] if isinstance(one, _Nth) else one)
    return target(*args, **kwargs)


def _like(tensor: Tensor) -> Hashable:
    """Return all that a call can tell of a tensor without its values."""
    return (
        *(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()),
        *(tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()),
    )
