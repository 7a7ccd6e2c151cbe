"""Record a run, so that any of its last calls can be made again: states and batches, kept on the host.

A replay gives the same bits each time, so a state now and then and the batches since are enough to return to each call
in between. A span is one such state and the inputs of the calls that followed. A new one begins when the last is full,
or when a call gets another state than the one that the call before has returned, such as an edited one.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from . import tree as pytree
from .ambient.modes import ordinary, without_gradients
from .ambient.setting import inside_a_step
from .call.inputs import as_input
from .checkpoint.matching import type_of
from .concurrency.turns import at_one_time
from .errors import CaptureError, LayoutError
from .graph_step import GraphStep
from .manual import Documented
from .messages.tracebacks import entry
from .messages.units import size_of
from .pytree.sameness import same
from .shards.peers import on_any
from .state.boundary import held, mesh_of
from .state.handle import Handle
from .state.leaf import as_tensor, turns_of
from .step.nonfinite import Nonfinite

__all__ = ["Recorder", "record"]

P = ParamSpec("P")
R = TypeVar("R")
_Given = tuple[tuple[Any, ...], dict[str, Any]]
_ROWS = 16  # calls whose inputs share a piece of memory


@entry("train = fcg.record(train_step)")
def record(
    step: GraphStep[P, R],
    *,
    every: int = 100,
    keep: int = 4,
    start: int = 0,
    inputs: Callable[[int], tuple[Any, ...]] | None = None,
    verify: bool = False,
) -> Recorder[P, R]:
    """Record the calls of a step, to return to any of the last ones: ``train = fcg.record(train_step)``.

    ``train(state, batch)`` is ``train_step(state, batch)``, and keeps on the host what it takes to do it again: a copy
    of the state at every ``every``-th call, and a copy of the inputs of each. With that, the recorder goes back to the
    state before any of the last ``every * (keep - 1)`` calls or more, makes calls again, and finds the first that went
    wrong. A state that is edited between two calls is copied, too, and counts for ``keep``. What is made again has the
    same bits if all kernels add in a fixed order, as they do with ``torch.use_deterministic_algorithms(True)``.

    A copy of the state takes the device as long as its bytes take to the host, 27 ms for the 1.5 GB of GPT-2 with AdamW
    on an H200. Each rank of a mesh records its own pieces, and all of them make the same calls.

    Args:
      step: A step of :func:`functional_cg.graph_step`. It is not changed, and may be called by itself, too.
      every: Calls from one copy of the state to the next.
      keep: How many copies of the state stay, with the inputs of the calls since.
      start: The number of the first call, in a run that was resumed.
      inputs: What makes the inputs of a call again, in place of copies: ``inputs(number)`` returns what the call took
        after the state, as a tuple. For large batches that are functions of their number. Whenever the state is copied,
        it is compared with what the call gets.
      verify: Whether each call whose state is copied is made twice, and all bits of the results are compared. This
        finds hardware that computes wrong now and then. Prints of such a call come twice.
    Raises:
      TypeError: If ``step`` is no step of ``graph_step``.
      ValueError: If ``every`` or ``keep`` is not a positive integer, or ``start`` is negative.

    Example:
      >>> import torch, functional_cg as fcg
      >>> @fcg.graph_step
      ... def train_step(state, x):
      ...     return {"w": state["w"] - x.log()}, {"loss": x.sum()}
      >>> train = fcg.record(train_step, every=10)
      >>> state = fcg.place({"w": torch.ones(2)})
      >>> for number in range(30):
      ...     state, metrics = train(state, torch.full((2,), 1.0 - (number == 17)))
      >>> state, found = train.find_nonfinite(state)
      >>> found.number, found.calls[0].made
      (17, 'f32[2]  -inf in 2 of 2, first at [0]')
      >>> state["w"].tolist()  # before that call
      [1.0, 1.0]
    """
    if not isinstance(step, GraphStep):
        raise TypeError(
            f"record: expected a step, got {type(step).__name__}.\n"
            "To fix: pass what `graph_step` returned, `train = fcg.record(train_step)`."
        )
    for name, number, least in (("every", every, 1), ("keep", keep, 1), ("start", start, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"record: {name} must be an integer from {least} on, got {number!r}")
    return Recorder(step, every, keep, start, inputs, verify=verify)


@dataclass(eq=False, slots=True)
class _Span:
    """A state, and the calls that followed.

    Attributes:
      start: Number of the first call.
      treedef: Structure of the state.
      state: The leaves before that call, on the host.
      edited: Whether it is another state than the one that the call before has returned.
      inputs: What each call got after the state: copies, or None where they are made again.
      shelves: The memory of these copies, by place among the tensors of a call, for some calls each. To pin memory call
        by call takes longer than a short step.
    """

    start: int
    treedef: Any = None
    state: list[Tensor] = field(default_factory=list)
    edited: bool = False
    inputs: list[_Given | None] = field(default_factory=list)
    shelves: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.start + len(self.inputs)


class Recorder(Generic[P, R], metaclass=Documented):
    """A step whose last calls can be made again; made by :func:`record`.

    Calls are counted from 0. A negative number counts from the end: -1 is the last call. What takes a state donates it,
    as the step does, and writes into the same memory, so that nothing is captured anew: go on with what is returned.
    A call with a returned state, edited or not, goes on from there, and the calls that followed in the recording are
    dropped. After a checkpoint of another call is loaded, make another recorder: ``fcg.record(step, start=number)``.

    Attributes:
      step: The step.
      first, calls: The number of the first call that it can go back to; one past that of the last.
      nbytes: Bytes of the copies on the host.
    """

    def __init__(
        self,
        step: GraphStep[P, R],
        every: int,
        keep: int,
        start: int,
        inputs: Callable[[int], tuple[Any, ...]] | None,
        *,
        verify: bool,
    ) -> None:
        self.step = step
        self._every, self._again, self._verify = every, inputs, verify
        self._spans: deque[_Span] = deque(maxlen=keep)
        self._start = start
        self._spare = _Span(0)  # one that was dropped: its memory is for the next
        self._stream: torch.cuda.Stream | None = None  # for copies of inputs
        # Of the state that a call or a rewind has returned last: the lease, the number of the next call, and the
        # generation in which it is the recorded state before that call.
        self._last: tuple[Callable[[], Any], int, int | None] = (lambda: None, start, None)
        self._lock = threading.RLock()

    @property
    def calls(self) -> int:
        return self._spans[-1].stop if self._spans else self._start

    @property
    def first(self) -> int:
        return self._spans[0].start if self._spans else self._start

    @property
    def nbytes(self) -> int:
        given = [inputs for span in self._spans for inputs in span.inputs if inputs is not None]
        own = [
            one for args, named in given for one in (*args, *named.values()) if not isinstance(one, Handle)
        ]
        leaves = [*pytree.leaves(own), *(leaf for span in (*self._spans, self._spare) for leaf in span.state)]
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Make a call of the step, and record it; one that raises is recorded if there is a new state, `.latest()`."""
        if inside_a_step():
            raise CaptureError.of(
                self.step._name,
                "its recorder was called in a step.",
                why="It copies values to the host, and a graph repeats what is done on the device.",
                fix="record the step that calls it.",
            )
        given, named = self.step._signature.by_position(args, kwargs)
        if not given:
            return self.step(*args, **kwargs)  # which says what is missing
        with self._lock:
            return self._recorded(given[0], given[1:], named)  # type: ignore[no-any-return]

    def _recorded(self, state: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        number, follows = self._place(state)
        span = self._span_of(number) if follows else None
        begins = span is None
        if span is None:
            leaves, treedef = pytree.flatten(state)
            span = _Span(number, treedef, self._copied(leaves), not follows)
            span.shelves, self._spare.shelves = self._spare.shelves, {}
        if begins and self._again is not None:
            self._compare(number, given, named)
        with self._beside() as stream:
            kept = None
            if self._again is None:
                with stream:
                    kept = self._kept(span, number - span.start, given, named)
            try:
                result: Any = self.step(state, *given, **named)
            except BaseException:
                if isinstance(state, Handle) and (new := state.latest())._generation > state._generation:
                    self._append(span, number, kept, new)  # the state is new: an alarm raised, or a print
                raise
        self._append(span, number, kept, result[0])
        return self._verified(span, result) if self._verify and begins else result

    def _append(self, span: _Span, number: int, kept: _Given | None, new: Any) -> None:
        """Add a call to the recording, in place of the calls that followed there."""
        while self._spans and self._spans[-1].start >= number and self._spans[-1] is not span:
            self._spans.pop()
        if self._spans:
            del self._spans[-1].inputs[number - self._spans[-1].start :]
        if span not in self._spans:
            if len(self._spans) == self._spans.maxlen:
                self._spare = _Span(0, state=self._spans[0].state, shelves=self._spans[0].shelves)
            self._spans.append(span)
        span.inputs.append(kept)
        self._note(new, number + 1)

    def rewind(self, state: Any, number: int) -> Any:
        """Return the state as it was before a call; donates the state that is passed in.

        It takes the copy of the state that was made last before that call, and makes the calls since again.

        Args:
          state: The state that the step has returned, or any of the same layout: its memory is written.
          number: Of the call.
        Raises:
          IndexError: If the recording does not reach back to that call.
          LayoutError: If the state has another layout.
        """
        with self._lock:
            return self._at(state, self._checked(number, self.calls))

    def inputs(self, number: int) -> _Given:
        """Return what a call got after the state: ``args, kwargs = train.inputs(-1)``; tensors are on the host.

        Raises:
          IndexError: If the recording has no such call.
        """
        with self._lock:
            return self._own(self._checked(number, self.calls - 1))

    def replay(
        self,
        state: Any,
        first: int,
        last: int = -1,
        see: Callable[[int, Any, Any], object] = lambda number, state, metrics: None,
        *,
        step: Callable[..., Any] | None = None,
    ) -> Any:
        """Make calls of the recording again, and return the state after the last one.

        What the loop has edited between two calls is edited again. Calls before the first one may run, and print, too.

        Args:
          state: Is donated, as in :meth:`rewind`.
          first, last: The numbers of the first and the last call.
          see: ``see(number, state, metrics)`` is called after each with what it has returned.
          step: What makes the calls, such as a step of the same function with taps or prints, or ``train_step.eager``.
            By default the step itself.
        Raises:
          IndexError: If the recording has no such calls.

        Example:
          >>> import torch, functional_cg as fcg
          >>> step = fcg.graph_step(lambda state, x: ({"w": state["w"] + x}, {"sum": x.sum()}))
          >>> train, state = fcg.record(step), fcg.place({"w": torch.zeros(2)})
          >>> for number in range(5):
          ...     state, metrics = train(state, torch.full((2,), float(number)))
          >>> state = train.replay(
          ...     state, 2, 3, lambda number, state, metrics: print(number, state["w"].tolist(), metrics["sum"].item())
          ... )
          2 [3.0, 3.0] 4.0
          3 [6.0, 6.0] 6.0
        """
        with self._lock:
            first, last = self._checked(first, self.calls - 1), self._checked(last, self.calls - 1)
            state = self._at(state, first)
            for number in range(first, last + 1):
                if self._begins_edited(number):
                    state = self._at(state, number)
                state, metrics = self._made(step or self.step, state, number)
                see(number, state, metrics)
            return state

    def find(self, state: Any, predicate: Callable[[Any, Any], Any]) -> tuple[Any, int | None]:
        """Find the first call after which something is true, and remains so.

        A comparison with NaN is false: to find a loss that is above 6 or NaN, ask for ``~(metrics["loss"] <= 6)``.

        Looks at the calls whose states are kept and at the last one, by bisection, and then at each call in between.

        Args:
          state: Is donated, as in :meth:`rewind`.
          predicate: ``predicate(state, metrics)`` of what a call has returned, a boolean or a tensor of one. On several
            ranks, it holds if it does on one of them.
        Returns:
          The state before that call, and its number; or the newest state and None.
        Raises:
          IndexError: If nothing is recorded.
        """
        with self._lock:
            return self._found(state, predicate, remains=True)

    def find_nonfinite(self, state: Any) -> tuple[Any, Nonfinite]:
        """Find the first call after which leaves or metrics hold more NaN or infinities than at the start.

        The start is the state before the first call of the recording, and the metrics of that call.

        Returns:
          The state before the call that was found, and what ``step.find_nonfinite`` says of it, with ``.number``; if
          there is none, the newest state, and a report that is false.
        Raises:
          IndexError: If nothing is recorded.
        """
        with self._lock:
            first = self._checked(self.first, self.calls - 1)
            state = self._at(state, first)
            usual = _nonfinite("state", state)
            state, metrics = self._made(self.step, state, first)
            if not _more(_nonfinite("state", state), usual):
                usual |= _nonfinite("metrics", metrics)

            def turned(state: Any, metrics: Any) -> bool:
                return _more(_nonfinite("state", state) | _nonfinite("metrics", metrics), usual)

            state, number = self._found(state, turned, remains=True)
            if number is None:  # it may have gone again
                state, number = self._found(state, turned, remains=False)
            if number is None:
                given = tuple(
                    f"{name} in {count:,}, from call {first:,} on" for name, count in usual.items() if count
                )
                return state, Nonfinite(
                    f"{self.step._name}, calls {first:,} to {self.calls - 1:,}", given=given
                )
            args, kwargs = self._own(number)
            find: Any = self.step.find_nonfinite
            return state, replace(find(state, *args, **kwargs), number=number)

    def __repr__(self) -> str:
        return (
            f"<Recorder of {self.step._name}: calls {self.first:,} to {self.calls:,}, {len(self._spans)} states, "
            f"{size_of(self.nbytes)} on the host>"
        )

    def _found(
        self, state: Any, predicate: Callable[[Any, Any], Any], *, remains: bool
    ) -> tuple[Any, int | None]:
        """Find the first call after which something is true: by bisection if it remains so, else one by one."""
        self._checked(-1, self.calls - 1)

        def holds_after(number: int) -> bool:
            nonlocal state
            state, metrics = self._made(self.step, self._at(state, number), number)
            mesh = mesh_of([slot.spec for slot in state._lease.arena.plan.slots])
            return on_any(mesh, self.step._name, bool(predicate(state, metrics)))

        probes = sorted({*(span.start for span in self._spans if span.inputs), self.calls - 1})
        place = bisect.bisect_left(probes, True, key=holds_after) if remains else len(probes)
        if place == len(probes):
            between = range(0) if remains else range(self.first, self.calls)
        else:
            between = range(probes[place - 1] + 1 if place else probes[0], probes[place] + 1)
        number = next((one for one in between if holds_after(one)), None)
        return self._at(state, self.calls if number is None else number), number

    def _place(self, state: Any) -> tuple[int, bool]:
        """Return the number of the call that a state is for, and whether it is the recorded state before that call.

        A state that was edited, or whose leaves were loaded, is still for that call.
        """
        lease, number, generation = self._last
        if not isinstance(state, Handle) or state._lease is not lease():
            return self.calls, False
        return number, state._generation == generation

    def _note(self, state: Any, number: int, *, recorded: bool = True) -> None:
        if not isinstance(state, Handle):
            raise TypeError(
                f"{self.step._name}: the recorder expected a step that returns `(state, metrics)`, and got "
                f"{type(state).__name__} as the state.\nTo fix: `step=train_step.eager`, or another `graph_step`."
            )
        self._last = weakref.ref(state._lease), number, state._generation if recorded else None

    @contextlib.contextmanager
    def _beside(self) -> Iterator[AbstractContextManager[Any]]:
        """Yield a stream whose copies run while a step of the block does; what is queued later waits for both."""
        if not torch.cuda.is_initialized():
            yield contextlib.nullcontext()
            return
        current = torch.cuda.current_stream()
        if self._stream is None or self._stream.device != current.device:
            self._stream = torch.cuda.Stream(current.device)
        self._stream.wait_stream(current)
        try:
            yield torch.cuda.stream(self._stream)
        finally:
            current.wait_stream(self._stream)

    def _span_of(self, number: int) -> _Span | None:
        """Return the span that a call goes on, if there is one and it has room."""
        span = next((one for one in reversed(self._spans) if one.start <= number), None)
        return span if span is not None and number - span.start < self._every else None

    def _begins_edited(self, number: int) -> bool:
        return any(span.edited and span.start == number for span in self._spans)

    def _checked(self, number: Any, last: int) -> int:
        found = operator.index(number)
        found += self.calls if found < 0 else 0
        if not self._spans or not self.first <= found <= last:
            has = f"is not in the recording, which has {self.first:,} to {last:,}"
            raise IndexError(
                f"{self.step._name}: call {number:,} {has if self._spans else 'was not recorded: nothing is, yet'}.\n"
                "To fix: record more, `fcg.record(step, every=..., keep=...)`: of a state that nothing edits, the last "
                "`every * (keep - 1)` calls are always there."
            )
        return found

    def _at(self, state: Any, number: int) -> Any:
        """Return the state before a call."""
        if self._place(state) == (number, True):
            return state
        span = next(span for span in reversed(self._spans) if span.start <= number)
        state = self._restored(state, span)
        self._note(state, span.start)
        for one in range(span.start, number):
            state, _ = self._made(self.step, state, one)
        return state

    def _made(self, step: Callable[..., Any], state: Any, number: int) -> tuple[Any, Any]:
        """Make a call of the recording again."""
        own = step is self.step  # others may write what they get
        args, kwargs = self._inputs(number) if own else self._own(number)
        state, metrics = step(state, *args, **kwargs)
        self._note(state, number + 1, recorded=own and not self._begins_edited(number + 1))
        return state, metrics

    def _inputs(self, number: int) -> _Given:
        span = next(span for span in reversed(self._spans) if span.start <= number)
        given = span.inputs[number - span.start]
        if given is not None:
            return given
        assert self._again is not None
        return tuple(self._again(number)), {}

    def _own(self, number: int) -> _Given:
        """Return copies of the inputs of a call."""

        def own(argument: Any) -> Any:
            if isinstance(argument, Handle):
                return argument
            return pytree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, argument)

        args, kwargs = self._inputs(number)
        _wait()
        return tuple(map(own, args)), {name: own(one) for name, one in kwargs.items()}

    def _compare(self, number: int, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Compare what a call gets with what is made for its number.

        Raises:
          ValueError: If they differ.
        """
        assert self._again is not None
        made = self._again(number)
        if named or not isinstance(made, tuple) or not _same(given, made):
            raise ValueError(
                f"record: `inputs({number})` is not what call {number:,} of `{self.step._name}` gets.\n"
                "To fix: return all that the call takes after the state, in order, as a tuple; the first call has the "
                "number `start`, and each has the next one."
            )

    def _kept(self, span: _Span, row: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Given:
        """Copy the inputs of a call of a span to the host; another state stays, and must not be donated."""
        places, shelves = itertools.count(), span.shelves

        def kept(leaf: Any) -> Any:
            tensor = as_input(leaf) if getattr(leaf, "shape", None) is not None else None
            if tensor is None:
                return leaf
            shelf, place = (next(places), row // _ROWS), row % _ROWS
            if not place and (shelf not in shelves or not _alike(shelves[shelf][0], tensor)):
                shelves[shelf] = _host_memory(tensor, rows=min(_ROWS, self._every))
            # What a call that may raise would replace, or what is of another layout, has memory of its own.
            fits = row >= len(span.inputs) and shelf in shelves and _alike(shelves[shelf][0], tensor)
            memory = shelves[shelf][place] if fits else _host_memory(tensor)
            return memory.copy_(tensor, non_blocking=True)

        def kept_all(argument: Any) -> Any:
            return argument if isinstance(argument, Handle) else pytree.map(kept, argument)

        with ordinary():
            without_gradients()
            return tuple(map(kept_all, args)), {name: kept_all(one) for name, one in kwargs.items()}

    def _copied(self, state: Sequence[Any]) -> list[Tensor]:
        """Copy the leaves of a state, or this rank's pieces of them, to the host."""
        leaves = [as_tensor(held(leaf)) for leaf in state]
        spare, self._spare.state = self._spare.state, []
        fits = len(spare) == len(leaves) and all(map(_alike, spare, leaves))

        def copied() -> list[Tensor]:
            with ordinary():
                without_gradients()
                copies = spare if fits else list(map(_host_memory, leaves))
                for into, leaf in zip(copies, leaves, strict=True):
                    into.copy_(leaf, non_blocking=True)
                return copies

        return at_one_time(turns_of(leaves), copied)  # type: ignore[no-any-return]

    def _restored(self, state: Any, span: _Span) -> Any:
        """Write a kept state into the memory of one."""
        if not isinstance(state, Handle) or state._owner is not None:
            raise TypeError(
                f"record: expected a state that `{self.step._name}` has returned, got {type(state).__name__}.\n"
                "To fix: `state = train.rewind(state, number)`."
            )
        slots = state._lease.arena.slots
        rows = pytree.structure_diff(span.treedef, state._lease.treedef, "state") + [
            f"{name}  expected {type_of(one)}   got {type_of(slot)}"
            for name, one, slot in zip(_names("state", state), span.state, slots, strict=False)
            if (one.shape, one.dtype) != (slot.shape, slot.dtype)
        ]
        if rows or span.treedef != state._lease.treedef:
            raise LayoutError.of(
                "",
                f"record: the state before call {span.start:,} has another layout than `state`, which is unchanged.",
                rows=rows,
                why="It is written into the memory of the state.",
                fix="pass the state that the recorded step has returned.",
            )
        _wait()
        write = partial(state._written, range(len(slots)), span.state, "train.rewind")
        return state._lease.arena.turn.alone(write)

    def _verified(self, span: _Span, result: tuple[Any, Any]) -> tuple[Any, Any]:
        """Make the first call of a span again, and compare all bits."""
        state, metrics = result
        lease, expected = state._lease, self._copied(pytree.leaves(state))
        state, again = self._made(self.step, self._restored(state, span), span.start)
        _wait()
        rows = [
            f"{name}  in {count:,} of {one.numel():,} elements"
            for name, one, other in [
                *zip(_names("state", state), expected, lease.arena.slots, strict=True),
                *zip(_names("metrics", metrics), pytree.leaves(metrics), pytree.leaves(again), strict=True),
            ]
            if isinstance(one, Tensor) and (count := _differing(held(one), held(other)))
        ]
        self._spare.state = expected
        mesh = mesh_of([slot.spec for slot in lease.arena.plan.slots])
        if on_any(mesh, self.step._name, bool(rows)):
            raise CaptureError.of(
                self.step._name,
                f"call {span.start:,} gives other bits when it is made again, on {lease.arena.device}.",
                rows=rows or ["on another rank"],
                why="The values and the kernels are the same. Either these add in any order, as those with atomics do, "
                "or the hardware computes wrong. `state.latest()` is what the second run made.",
                fix="`torch.use_deterministic_algorithms(True)` before the first call. If that was on, or it happens "
                "now and then, run the job without this device.",
            )
        return state, again


def _host_memory(tensor: Tensor, rows: int | None = None) -> Tensor:
    """Return host memory for a tensor, pinned if it is on a GPU; for so many of them, one after another, if asked."""
    one = torch.empty_like(tensor, device="meta")
    many = rows is not None
    shape, stride = ((rows, *one.shape), (one.numel(), *one.stride())) if many else (one.shape, one.stride())
    return torch.empty_strided(shape, stride, dtype=one.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _wait() -> None:
    """Wait until copies to the host are there."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _same(one: Any, other: Any) -> bool:
    """Whether two trees have the same structure and the same bits."""
    (leaves, treedef), (others, like) = pytree.flatten(one), pytree.flatten(other)
    pairs = [(as_tensor(held(a)), as_tensor(held(b))) for a, b in zip(leaves, others, strict=False)]
    return treedef == like and all(
        (a.shape, a.dtype) == (b.shape, b.dtype) and not _differing(a, b)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else same(a, b)
        for a, b in pairs
    )


def _differing(one: Tensor, other: Tensor) -> int:
    """Return how many elements of two tensors have different bits."""
    return int((_bits(one.to(other.device)) != _bits(other)).sum())


def _bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return real.detach().resolve_neg().view(kinds[real.itemsize])


def _names(root: str, tree: Any) -> list[str]:
    return [pytree.path_string(path, root) for path, _ in pytree.flatten_with_path(tree)[0]]


def _nonfinite(root: str, tree: Any) -> dict[str, int]:
    """Return how many NaN and how many infinities each leaf holds, by its name and the kind."""
    names: list[str] = []
    counts: list[Tensor] = []
    for name, leaf in zip(_names(root, tree), pytree.leaves(tree), strict=True):
        one = held(leaf)
        if isinstance(one, Tensor) and (one.is_floating_point() or one.is_complex()):
            wide = one.float() if one.itemsize == 1 else one
            names += [f"{name} {kind}" for kind in ("nan", "inf")]
            counts += [wide.isnan().sum().detach(), wide.isinf().sum().detach()]
    return dict(zip(names, torch.stack(counts).tolist() if counts else [], strict=True))


def _more(counts: Mapping[str, int], usual: Mapping[str, int]) -> bool:
    return any(count > usual.get(name, 0) for name, count in counts.items())
