"""A call of a step, taken apart: bound states, copied inputs, static arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import tree as pytree
from ..errors import AliasError, LayoutError
from ..pytree.sameness import Exact
from ..state.arena import Arena, BufferSpec
from ..state.boundary import refuse_meshes
from ..state.handle import Handle, Lease, check_alive
from ..transforms.control import loop
from ..tree import Treedef
from .inputs import InputLayout, as_input, input_layout

__all__ = ["Call", "Signature", "new_state_and_metrics"]


@dataclass(frozen=True, slots=True)
class StateArgument:
    """A handle among the arguments: read from its slots, not copied in."""

    position: int
    name: str
    handle: Handle
    seen_as: Treedef | None = None

    @property
    def node(self) -> Treedef:
        """Structure of the tree that the function sees: a trace decides in which order keys are gone through."""
        return self.seen_as or self.handle._node

    @property
    def arena(self) -> Arena:
        return self.handle._lease.arena

    @property
    def lease(self) -> Lease:
        return self.handle._lease

    @property
    def specs(self) -> tuple[BufferSpec, ...]:
        return tuple(slot.spec for slot in self.arena.plan.slots[self.start : self.stop])

    @property
    def start(self) -> int:
        return self.handle._start

    @property
    def stop(self) -> int:
        return self.handle._start + self.handle._node.num_leaves


@dataclass(frozen=True, slots=True)
class Call:
    """One call, taken apart.

    Attributes:
      function: The user's function, in messages.
      states: Bound states; for a donating step, the first one is donated.
      inputs: ``(args, kwargs)`` that are copied in.
      statics: Static arguments by name.
      layout: Layout of the inputs.
      live: Input leaves as tensors.
      device: Where the step runs.
      steps: How many steps the call is: inputs are stacked, and so are the metrics.
    """

    function: str
    states: tuple[StateArgument, ...]
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    statics: dict[str, Any]
    layout: InputLayout
    live: list[Tensor]
    device: torch.device
    steps: int = 1

    def laid_out(self, layout: InputLayout, structures: Sequence[Treedef]) -> Call:
        """The same call, as a trace sees it: inputs in the strides of a layout, states with their keys in one order."""
        states = (
            replace(state, seen_as=structure)
            for state, structure in zip(self.states, structures, strict=True)
        )
        return replace(self, layout=layout, states=tuple(states))

    @property
    def arenas(self) -> tuple[tuple[int, int, int], ...]:
        """Which memory the call is bound to."""
        return tuple((id(state.arena), state.start, state.stop) for state in self.states)

    def places(self) -> list[tuple[int, int]]:
        """Slab and offset of each bound slot; slabs of different states have different numbers."""
        places: list[tuple[int, int]] = []
        for number, state in enumerate(self.states):
            slots = state.arena.plan.slots[state.start : state.stop]
            places += [(number * 2**20 + slot.slab, slot.offset) for slot in slots]
        return places

    @property
    def static_key(self) -> tuple[Any, ...]:
        """The static arguments as a key, under which 1, 1.0 and True differ, and what holds them."""
        return tuple(
            (name, Exact(value)) for name, value in sorted(self.statics.items(), key=lambda item: item[0])
        )

    @property
    def objects(self) -> tuple[tuple[str, Any], ...]:
        """(name, object) of what the graph has baked in: static arguments and fields, objects among the inputs."""
        leaves = zip(self.layout.names, self.layout.leaves, strict=True)
        inputs = [(name, leaf) for name, leaf in leaves if not isinstance(leaf, BufferSpec)]
        fields = [value for state in self.states for value in pytree.static_values(state.handle._node)]
        # An optimizer in a static field is reached through the state, not through a name in the code.
        return (
            *inputs,
            *self.statics.items(),
            *((f"static {type(value).__name__}", value) for value in fields),
        )

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call as a capture takes it: handles and tensors in place, static arguments gone."""
        args, kwargs = self.assemble([state.handle for state in self.states], self.live)
        return args, {name: value for name, value in kwargs.items() if name not in self.statics}

    def assemble(self, trees: Sequence[Any], live: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The user function's arguments, from trees of the states and leaves of the inputs."""
        copied, named = self.layout.fill(live)
        args = list(copied)
        for state, tree in zip(self.states, trees, strict=True):
            args.insert(state.position, tree)
        return tuple(args), {**named, **self.statics}

    def apply(self, fn: Callable[..., Any], trees: Sequence[Any], live: Sequence[Tensor]) -> Any:
        """What ``fn`` returns, called for each step on the state that the one before has returned."""

        def one(state: Any, inputs: Sequence[Tensor]) -> Any:
            args, kwargs = self.assemble([state, *trees[1:]] if trees else (), inputs)
            return fn(*args, **kwargs)

        first = trees[0] if trees else None
        if self.steps == 1:
            return one(first, live)
        columns = [leaf.unbind(0) for leaf in live]
        return loop(
            lambda state, inputs: new_state_and_metrics(self.function, one(state, inputs)),
            first,
            [[column[i] for column in columns] for i in range(self.steps)],
            names=(self.function, self.states[0].name, "metrics"),
        )


def new_state_and_metrics(function: str, result: Any) -> tuple[Any, Any]:
    """What a step returns.

    Raises:
      LayoutError: If it is no pair.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise LayoutError.of(
            function,
            "does not return a pair of new state and metrics.",
            rows=[f"result  expected (state, metrics)   got {type(result).__name__}"],
            fix="`return state, {}` if there are no metrics; for a read-only function use `graph_fn`.",
        )
    return result


class Signature:
    """How calls of one function are taken apart.

    Args:
      fn: The user's function.
      static_argnames: Names of arguments that are Python constants of a capture.
      donates: Whether the first argument is a state that the call takes over.
      steps: How many steps a call is.
    """

    def __init__(
        self, fn: Callable[..., Any], static_argnames: Sequence[str], *, donates: bool, steps: int = 1
    ) -> None:
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.donates, self._steps = donates, steps
        self._static = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):  # a builtin without a signature
            parameters = []
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [p.name for p in parameters if p.kind in positional]
        self._nameless = {p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY}
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        known = {p.name for p in parameters}
        unknown = [name for name in self._static if name not in known]
        if unknown and not takes_any:
            raise ValueError(f"`{self.name}`: static_argnames names no parameter: {', '.join(unknown)}")

    @property
    def has_statics(self) -> bool:
        return bool(self._static)

    def parameter(self, position: int) -> str:
        """Name of the parameter at a position."""
        return self._names[position] if position < len(self._names) else f"inputs[{position}]"

    def by_position(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments passed by name, moved to their positions: ``step(s, b=batch)`` is ``step(s, batch)``."""
        moved = list(args)
        for name in self._names[len(args) :]:
            if name not in kwargs or name in self._nameless:
                break
            moved.append(kwargs[name])
        names = self._names[len(args) : len(moved)]
        return tuple(moved), {name: value for name, value in kwargs.items() if name not in names}

    def split_static(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """Move static arguments out: ``(args, kwargs, statics)``. Those after a static one go by name."""
        if not self._static:
            return args, kwargs, {}
        first = next((i for i, _ in enumerate(args) if self.parameter(i) in self._static), len(args))
        named = {self.parameter(i): args[i] for i in range(first, len(args))} | kwargs
        statics = {name: named.pop(name) for name in self._static if name in named}
        for name, value in statics.items():
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"`{self.name}`: static argument `{name}` must be hashable, got {type(value).__name__}"
                ) from None
        return args[:first], named, statics

    def refuse_pair(self, tree: Any) -> None:
        """Raise for what a step returns, passed on as a state.

        Raises:
          LayoutError: If it is a pair of a handle and metrics.
        """
        match tree:
            case (Handle(generation=int(n)), other) if (
                n and type(tree) is tuple and not isinstance(other, Handle)
            ):
                state = self.parameter(0)
                raise LayoutError.of(
                    self.name,
                    f"was called with a pair of a state and metrics as `{state}`; the state is unchanged.",
                    rows=[f"{state}  expected a state   got tuple"],
                    why="A step returns both, the new state and the metrics.",
                    fix=f"unpack what it returns, `{state}, metrics = {self.name}({state}, ...)`.",
                )

    def take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any], statics: dict[str, Any]) -> Call:
        """Take a call apart; every handle must be alive.

        Raises:
          DonatedStateError: If a handle was donated.
          LayoutError: If an input cannot be copied in, or has no first dimension for the steps of a call.
        """
        states: list[StateArgument] = []
        copied: list[Any] = []
        roots: list[str] = []
        for position, value in enumerate(args):
            name = self.parameter(position)
            if isinstance(value, Handle):
                check_alive(value, name, self.name)
                if not self._shares_memory(value, states):
                    states.append(StateArgument(position, name, value))
                    continue
            copied.append(value)
            roots.append(name)
        if self.donates and (not states or states[0].position != 0 or states[0].handle._owner is not None):
            raise AliasError.of(
                self.name,
                f"was called with a part of a state as `{self.parameter(0)}`.",
                why="A step takes over whole states.",
                fix="pass the whole state; a read-only function of a part is a `graph_fn`.",
            )
        refuse_meshes(((state.name, spec) for state in states for spec in state.specs), self.name)
        inputs = (tuple(copied), kwargs)
        device = states[0].arena.device if states else _first_device(inputs)
        layout, live = input_layout(roots, inputs, device, self.name)
        if self._steps > 1:
            self._refuse_unstacked(layout)
        return Call(self.name, tuple(states), inputs, statics, layout, live, device, self._steps)

    def _refuse_unstacked(self, layout: InputLayout) -> None:
        rows = [
            f"{name}  expected [{self._steps}, ...]   got {spec}"
            for name, spec in zip(layout.live_names, layout.specs, strict=True)
            if spec.shape[:1] != (self._steps,)
        ]
        if rows:
            raise LayoutError.of(
                self.name,
                f"takes {self._steps} steps per call, and so inputs of as many; the state is unchanged.",
                rows=rows,
                why="Each step takes one element along the first dimension.",
                fix=f"stack the inputs of {self._steps} steps, `fcg.tree.map(lambda *leaves: torch.stack(leaves), "
                "*batches)`; what is the same in all goes into the state, or is a static argument.",
            )

    def _shares_memory(self, value: Handle, states: Sequence[StateArgument]) -> bool:
        """A second handle of the donated arena is copied in: the step writes there."""
        return self.donates and any(state.arena is value._lease.arena for state in states)


def _first_device(inputs: Any) -> torch.device:
    for leaf in pytree.leaves(inputs):
        tensor = as_input(leaf)
        if tensor is not None and not tensor.is_cpu:
            return tensor.device
    return torch.device("cpu")
