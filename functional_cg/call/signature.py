"""Split a call of a step into bound states, copied inputs and static arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import tree as pytree
from ..ambient.compiling import inlining
from ..errors import AliasError, LayoutError
from ..pytree.sameness import Exact
from ..pytree.treedef import order_of
from ..pytree.trees import static_values
from ..state.arena import Arena, BufferSpec
from ..state.boundary import refuse_meshes
from ..state.handle import Handle, check_alive
from ..transforms.control import loop
from ..tree import Treedef
from .inputs import InputLayout, input_layout

__all__ = ["Call", "Signature", "StateArgument", "new_state_and_metrics", "on_host"]


@dataclass(frozen=True, slots=True)
class StateArgument:
    """A handle among the arguments: the step reads its slots, nothing is copied in."""

    position: int
    name: str
    handle: Handle
    seen_as: Treedef | None = None

    @property
    def node(self) -> Treedef:
        """Structure of the tree that the function sees; a trace sets its key order."""
        return self.seen_as or self.handle._node

    @property
    def arena(self) -> Arena:
        return self.handle._lease.arena

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
    """One call, split into its parts.

    Attributes:
      function: Name of the user's function, for messages.
      states: Bound states; for a donating step, the first one is donated.
      inputs: The ``(args, kwargs)`` to copy in.
      statics: Static arguments by name.
      layout: Layout of the inputs.
      live: Input leaves as tensors.
      device: Where the step runs.
      steps: Number of steps in the call; inputs and metrics are stacked over them.
    """

    function: str
    states: tuple[StateArgument, ...]
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    statics: dict[str, Any]
    layout: InputLayout
    live: list[Tensor]
    device: torch.device
    steps: int

    @property
    def order(self) -> tuple[Any, ...]:
        """The keys of all dicts among the arguments, in the order that the function sees."""
        return tuple(order_of(self.layout.treedef, *(state.node for state in self.states)))

    def value(self, number: int) -> Tensor | None:
        """Return a copy on the host of what a slot holds, counted over all states; None for a leaf on a mesh."""
        slots = [(one.arena, slot) for one in self.states for slot in range(one.start, one.stop)]
        arena, slot = slots[number]
        return None if arena.plan.slots[slot].spec.placement is not None else on_host(arena, slot)

    @property
    def arenas(self) -> tuple[tuple[int, int, int], ...]:
        """The memory that the call is bound to: arena and slot range of each state."""
        return tuple((id(state.arena), state.start, state.stop) for state in self.states)

    def places(self) -> list[tuple[int, int]]:
        """Return slab number and offset of each bound slot; no two states share a slab number."""
        places: list[tuple[int, int]] = []
        for number, state in enumerate(self.states):
            slots = state.arena.plan.slots[state.start : state.stop]
            places += [(number * 2**20 + slot.slab, slot.offset) for slot in slots]
        return places

    @property
    def static_key(self) -> tuple[Any, ...]:
        """The static arguments as a dict key, in which 1, 1.0 and True differ, also inside containers."""
        return tuple(
            (name, Exact(value)) for name, value in sorted(self.statics.items(), key=lambda item: item[0])
        )

    @property
    def objects(self) -> tuple[tuple[str, Any], ...]:
        """(name, object) pairs baked into the graph: static arguments and fields, objects among inputs."""
        leaves = zip(self.layout.names, self.layout.leaves, strict=True)
        inputs = [(name, leaf) for name, leaf in leaves if not isinstance(leaf, BufferSpec)]
        fields = [value for state in self.states for value in static_values(state.handle._node)]
        # Code reaches an optimizer in a static field through the state, not by a name.
        return (
            *inputs,
            *self.statics.items(),
            *((f"static {type(value).__name__}", value) for value in fields),
        )

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call as a capture takes it: with handles and tensors, without static arguments."""
        args, kwargs = self.assemble([state.handle for state in self.states], self.live)
        return args, {name: value for name, value in kwargs.items() if name not in self.statics}

    def assemble(self, trees: Sequence[Any], live: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the user function's arguments, from trees of the states and leaves of the inputs."""
        copied, named = self.layout.fill(live)
        args = list(copied)
        for state, tree in zip(self.states, trees, strict=True):
            args.insert(state.position, tree)
        return tuple(args), {**named, **self.statics}

    def apply(self, fn: Callable[..., Any], trees: Sequence[Any], live: Sequence[Tensor]) -> Any:
        """Call ``fn`` once per step, on the state from the last one; stack the metrics of several steps."""

        def one(state: Any, inputs: Sequence[Tensor]) -> Any:
            args, kwargs = self.assemble([state, *trees[1:]] if trees else (), inputs)
            return inlining(fn, *args, **kwargs)

        first = trees[0] if trees else None
        if self.steps == 1:
            return one(first, live)
        columns = [leaf.unbind(0) for leaf in live]

        def next_one(state: Any, inputs: Sequence[Tensor]) -> tuple[Any, Any]:
            new, metrics = new_state_and_metrics(self.function, one(state, inputs))
            return _laid_out_as(first, new), metrics

        return loop(
            next_one,
            first,
            [[column[i] for column in columns] for i in range(self.steps)],
            names=(self.function, self.states[0].name, "metrics"),
        )


def on_host(arena: Arena, slot: int) -> Tensor:
    """Return a copy of a slot on the host; waits for the device."""

    def copied() -> Tensor:
        arena.join()
        return arena.slots[slot].to("cpu", copy=True)

    return arena.turn.read(copied)  # type: ignore[no-any-return]


def new_state_and_metrics(function: str, result: Any) -> tuple[Any, Any]:
    """Return a step's result; check that it is a pair.

    Raises:
      LayoutError: If it is not.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise LayoutError.of(
            function,
            "does not return a pair of new state and metrics.",
            rows=[f"result  expected (state, metrics)   got {_kind(result)}"],
            why="A step returns the state for the next call, and what it measured.",
            fix=_return_fix(result),
        )
    return result


def _kind(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"a tensor, {BufferSpec.of(result)}"
    size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
    return "nothing" if result is None else f"{type(result).__name__}{size}"


def _return_fix(result: Any) -> str:
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        if inspect.iscoroutine(result):
            result.close()  # it would warn that nobody awaits it
        return "write a plain function, `def`, with `return state, metrics` in place of `yield` or `await`."
    if isinstance(result, Tensor):
        return '`return state, {"loss": loss}`; for a read-only function use `graph_fn`.'
    if isinstance(result, tuple | list) and len(result) > 2:
        return "`return state, (a, b)`: what follows the state is one tree, such as a tuple or a dict."
    return "`return state, {}` if there are no metrics; for a read-only function use `graph_fn`."


class Signature:
    """Splits calls of one function into their parts.

    Args:
      fn: The user's function.
      static_argnames: Names of arguments that are Python constants of a capture.
      donates: Whether a call donates its first argument, a state.
      steps: Number of steps per call.
    """

    def __init__(
        self, fn: Callable[..., Any], static_argnames: Sequence[str], *, donates: bool, steps: int = 1
    ) -> None:
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.donates, self._steps = donates, steps
        given: Any = (static_argnames,) if isinstance(static_argnames, str) else static_argnames
        self._static = tuple(given) if isinstance(given, Iterable) else ()
        if not isinstance(given, Iterable) or not all(isinstance(name, str) for name in self._static):
            raise TypeError(
                f"`{self.name}`: static_argnames must be names of parameters, got {static_argnames!r}.\n"
                'To fix: `static_argnames=("train",)`.'
            )
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):  # a builtin without a signature
            parameters = []
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [p.name for p in parameters if p.kind in positional]
        self._nameless = {p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY}
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self._known = {
            p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD
        } - self._nameless
        known = {p.name for p in parameters}
        unknown = [name for name in self._static if name not in known]
        if unknown and not takes_any:
            raise ValueError(f"`{self.name}`: static_argnames names no parameter: {', '.join(unknown)}")

    def parameter(self, position: int) -> str:
        """Return the name of the parameter at a position."""
        return self._names[position] if position < len(self._names) else f"inputs[{position}]"

    def by_position(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move arguments passed by name to their positions: ``step(s, b=batch)`` is ``step(s, batch)``."""
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
        """Split off static arguments: ``(args, kwargs, statics)``. Those after a static one become named."""
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
                    f"`{self.name}`: static argument `{name}` must be hashable, got {type(value).__name__}\n"
                    "To fix: pass a tuple in place of a list, or a frozen dataclass in place of a dict."
                ) from None
        return args[:first], named, statics

    def refuse_pair(self, tree: Any) -> None:
        """Raise if a pair that a step returned is passed as a state.

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
        """Split a call into its parts.

        Raises:
          DonatedStateError: If a handle was donated.
          AliasError: If a donating step gets a part of a state as its first argument.
          LayoutError: If an input cannot be copied in or is not stacked over the steps of a call, or if
            states lie on several meshes.
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
        device = states[0].arena.device if states else None
        layout, live, device = input_layout(roots, inputs, device, self.name, self._known)
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
        """Whether a donating step binds the arena already: it writes there, so this handle is copied in."""
        return self.donates and any(state.arena is value._lease.arena for state in states)


def _laid_out_as(state: Any, new: Any) -> Any:
    """Return a new state with the strides of a state, as the arena hands it to the next call."""
    old, (leaves, treedef) = pytree.leaves(state), pytree.flatten(new)

    def laid_out(have: Any, leaf: Any) -> Any:
        alike = not isinstance(leaf, Tensor) or leaf.shape != have.shape or leaf.stride() == have.stride()
        return leaf if alike else torch.empty_like(have, dtype=leaf.dtype).copy_(leaf)

    if len(leaves) != len(old):
        return new  # to be refused
    return pytree.unflatten(treedef, [laid_out(*pair) for pair in zip(old, leaves, strict=True)])
