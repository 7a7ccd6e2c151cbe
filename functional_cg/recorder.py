"""Record a run, so that any of its last calls can be made again: states and batches, kept on the host.

A replay gives the same bits each time, so a state now and then and the batches since are enough to return to each call
in between. A span is one such state and the inputs of the calls that followed. A new one begins when the last is full,
or when a call gets a state that no call has returned, such as an edited one.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
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
from .concurrency.turns import at_one_time
from .errors import CaptureError, LayoutError
from .graph_step import GraphStep
from .manual import Documented
from .messages.tracebacks import entry
from .messages.units import size_of
from .shards.peers import on_any
from .state.boundary import held, mesh_of
from .state.handle import Handle
from .state.leaf import as_tensor, turns_of
from .step.nonfinite import Nonfinite

__all__ = ["Recorder", "record"]

P = ParamSpec("P")
R = TypeVar("R")
_Given = tuple[tuple[Any, ...], dict[str, Any]]


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
    wrong. What it repeats has the same bits if all kernels add in a fixed order, as they do with
    ``torch.use_deterministic_algorithms(True)``.

    A copy of the state takes the device as long as its bytes take to the host, 27 ms for the 1.5 GB of GPT-2 with AdamW
    on an H200. Each rank of a mesh records its own pieces, and all of them make the same calls.

    Args:
      step: A step of :func:`functional_cg.graph_step`. It is not changed, and may be called by itself, too.
      every: Calls from one copy of the state to the next.
      keep: How many copies of the state stay, with the inputs of the calls since.
      start: The number of the first call, in a run that was resumed.
      inputs: What makes the inputs of a call again, in place of copies: ``inputs(number)`` returns what the call took
        after the state, as a tuple. For large batches that are functions of their number.
      verify: Whether each call whose state is copied is made twice, and all bits of the results are compared: hardware
        that computes wrong now and then is found so. Its prints come twice, too.
    Raises:
      TypeError: If ``step`` is no step of ``graph_step``.
      ValueError: If ``every`` or ``keep`` is not a positive integer.

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
    for name, number in (("every", every), ("keep", keep)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"record: {name} must be a positive integer, got {number!r}")
    return Recorder(step, every, keep, start, inputs, verify=verify)


@dataclass(eq=False, slots=True)
class _Span:
    """A state, and the calls that followed.

    Attributes:
      start: Number of the first call.
      state: The leaves before it, on the host.
      edited: Whether no call had returned this state: it was edited, or is another one.
      inputs: What each call got after the state: copies, or None where they are made again.
      shelves: The memory of these copies: one tensor for each of a call, with a row for each call. To pin memory call
        by call takes longer than a short step.
    """

    start: int
    state: list[Tensor]
    edited: bool = False
    inputs: list[_Given | None] = field(default_factory=list)
    shelves: list[Tensor] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.start + len(self.inputs)


class Recorder(Generic[P, R], metaclass=Documented):
    """A step whose last calls can be made again; made by :func:`record`.

    Calls are counted from 0. A negative number counts from the end: -1 is the last call. What takes a state donates it,
    as the step does, and writes into the same memory, so that nothing is captured anew: go on with what is returned.
    A call with a returned state goes on from there, and the calls that followed in the recording are dropped.

    Attributes:
      step: The step.
      first, calls: The number of the first call that it can go back to; one past that of the last.
      nbytes: Bytes on the host.
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
        self._spare = _Span(0, [])  # one that was dropped: its memory is for the next
        self._stream: torch.cuda.Stream | None = None  # for copies of inputs
        # The state that a call or a rewind has returned last: its lease, its generation, the number of the next call.
        self._last: tuple[Callable[[], Any], int, int] = (lambda: None, 0, start)

    @property
    def calls(self) -> int:
        return self._spans[-1].stop if self._spans else self._start

    @property
    def first(self) -> int:
        return self._spans[0].start if self._spans else self._start

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for span in (*self._spans, self._spare) for one in (*span.state, *span.shelves))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Make a call of the step, and record it. If it raises, nothing is recorded."""
        if inside_a_step():
            raise CaptureError.of(
                self.step._name,
                "its recorder was called in a step.",
                why="It copies values to the host, and a graph repeats what is done on the device.",
                fix="record the step that calls it.",
            )
        (state, *given), named = self.step._signature.by_position(args, kwargs)
        number = self._number_of(state)
        span = self._span_of(number)
        if span is None:
            span = _Span(self.calls if number is None else number, self._copied(state), number is None)
            span.shelves, self._spare.shelves = self._spare.shelves, []
        number = span.stop if number is None else number
        beside = None if self._again is not None else self._beside()
        result: Any = self.step(state, *given, **named)
        self._drop_from(number)
        if not self._spans or self._spans[-1] is not span:
            if len(self._spans) == self._spans.maxlen:
                self._spare = self._spans[0]
            self._spans.append(span)
        if beside is None:
            span.inputs.append(None)
        else:
            with beside:  # the step has not written them, and the caller has not got back to them
                span.inputs.append(self._kept(span, given, named))
        if self._verify and span.start == number:
            result = self._verified(span, result)
        self._note(result[0], number + 1)
        return result  # type: ignore[no-any-return]

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
        return self._at(state, self._checked(number, self.calls))

    def inputs(self, number: int) -> _Given:
        """Return what a call got after the state: ``args, kwargs = train.inputs(-1)``; tensors are on the host.

        Raises:
          IndexError: If the recording has no such call.
        """
        args, named = self._inputs(self._checked(number, self.calls - 1))
        _wait()
        return tuple(map(_own, args)), {name: _own(one) for name, one in named.items()}

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

        What the loop has edited between two calls is edited again.

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
        first, last = self._checked(first, self.calls - 1), self._checked(last, self.calls - 1)
        for number in range(first, last + 1):
            state, metrics = self._made(step or self.step, self._at(state, number), number)
            see(number, state, metrics)
        return state

    def find(self, state: Any, predicate: Callable[[Any, Any], Any]) -> tuple[Any, int | None]:
        """Find the first call after which something is true, and remains so.

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
        self._checked(-1, self.calls - 1)

        def holds_after(number: int) -> bool:
            nonlocal state
            state, metrics = self._made(self.step, self._at(state, number), number)
            mesh = mesh_of([slot.spec for slot in state._lease.arena.plan.slots])
            return on_any(mesh, self.step._name, bool(predicate(state, metrics)))

        probes = sorted({*(span.start for span in self._spans if span.inputs), self.calls - 1})
        place = bisect.bisect_left(probes, True, key=holds_after)
        if place == len(probes):
            return self._at(state, self.calls), None
        number = probes[place]
        if place:
            between = range(probes[place - 1] + 1, number)
            number = next((one for one in between if holds_after(one)), number)
        return self._at(state, number), number

    def find_nonfinite(self, state: Any) -> tuple[Any, Nonfinite]:
        """Find the first call after which a leaf or a metric holds a NaN or an infinity that it did not hold before.

        Returns:
          The state before that call, and what ``step.find_nonfinite`` says of it, with ``.number``; if there is none,
          the newest state, and a report that is false.
        Raises:
          IndexError: If nothing is recorded.
        """
        state = self._at(state, self._checked(self.first, self.calls - 1))
        usual = _nonfinite(state, {})
        state, number = self.find(state, lambda new, metrics: not _nonfinite(new, metrics) <= usual)
        if number is None:
            return state, Nonfinite(self.step._name)
        args, kwargs = self.inputs(number)
        find: Any = self.step.find_nonfinite
        return state, replace(find(state, *args, **kwargs), number=number)

    def __repr__(self) -> str:
        return (
            f"<Recorder of {self.step._name}: calls {self.first:,} to {self.calls:,}, {len(self._spans)} states, "
            f"{size_of(self.nbytes)} on the host>"
        )

    def _number_of(self, state: Any) -> int | None:
        """Return the number of the call that a state is for; None if no call or rewind has returned it."""
        lease, generation, number = self._last
        known = isinstance(state, Handle) and state._lease is lease() and state._generation == generation
        return number if known else None

    def _beside(self) -> AbstractContextManager[None]:
        """Return a block whose copies run beside a step that is launched before it, and before all that comes later."""
        if not torch.cuda.is_initialized():
            return contextlib.nullcontext()
        current = torch.cuda.current_stream()
        if self._stream is None or self._stream.device != current.device:
            self._stream = torch.cuda.Stream(current.device)
        self._stream.wait_stream(current)
        return _then(current, self._stream)

    def _note(self, state: Handle, number: int) -> None:
        self._last = weakref.ref(state._lease), state._generation, number

    def _span_of(self, number: int | None) -> _Span | None:
        """Return the span that a call goes on, if there is one and it has room."""
        if number is None:
            return None
        span = next((one for one in reversed(self._spans) if one.start <= number), None)
        return span if span is not None and number - span.start < self._every else None

    def _drop_from(self, number: int) -> None:
        """Forget this call and what followed."""
        while self._spans and self._spans[-1].start > number:
            self._spans.pop()
        if self._spans:
            del self._spans[-1].inputs[number - self._spans[-1].start :]

    def _checked(self, number: int, last: int) -> int:
        found = number + self.calls if number < 0 else number
        if not self.first <= found <= last:
            has = f"from {self.first:,} to {last:,}" if self.first <= last else "none yet"
            raise IndexError(
                f"{self.step._name}: call {number:,} is not in the recording, which has {has}.\n"
                "To fix: record more, `fcg.record(step, every=..., keep=...)`: the last `every * (keep - 1)` calls are "
                "always there."
            )
        return found

    def _at(self, state: Any, number: int) -> Any:
        """Return the state before a call."""
        if self._number_of(state) == number:
            return state
        span = next(span for span in reversed(self._spans) if span.start <= number)
        state = self._restored(state, span)
        self._note(state, span.start)
        for one in range(span.start, number):
            state, _ = self._made(self.step, state, one)
        return state

    def _inputs(self, number: int) -> _Given:
        span = next(span for span in reversed(self._spans) if span.start <= number)
        given = span.inputs[number - span.start]
        if given is not None:
            return given
        assert self._again is not None
        return tuple(self._again(number)), {}

    def _kept(self, span: _Span, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Given:
        """Copy the inputs of a span's next call to the host; another state stays, and must not be donated."""
        row, shelves, places = len(span.inputs), span.shelves, itertools.count()

        def kept(leaf: Any) -> Any:
            tensor = as_input(leaf) if isinstance(leaf, Tensor) or getattr(leaf, "shape", None) else None
            if tensor is None:
                return leaf
            place = next(places)
            if place < len(shelves) and _alike(shelves[place][0], tensor):
                memory = shelves[place][row]
            elif row and place < len(shelves):
                memory = _host_memory(tensor)  # of another layout than in this span's first call
            else:
                shelves[place:] = [_host_memory(tensor, rows=self._every)]
                memory = shelves[place][row]
            return memory.copy_(tensor, non_blocking=True)

        def kept_all(argument: Any) -> Any:
            return argument if isinstance(argument, Handle) else pytree.map(kept, argument)

        with ordinary():
            without_gradients()
            return tuple(map(kept_all, args)), {name: kept_all(one) for name, one in kwargs.items()}

    def _made(self, step: Callable[..., Any], state: Any, number: int) -> tuple[Any, Any]:
        """Make a call of the recording again."""
        args, kwargs = self._inputs(number)
        state, metrics = step(state, *args, **kwargs)
        if not any(span.edited and span.start == number + 1 for span in self._spans):
            self._note(state, number + 1)
        return state, metrics

    def _copied(self, state: Any) -> list[Tensor]:
        """Copy the leaves of a state, or this rank's pieces of them, to the host."""
        leaves = [as_tensor(held(leaf)) for leaf in pytree.leaves(state)]
        spare, self._spare.state = self._spare.state, []
        fits = len(spare) == len(leaves) and all(map(_alike, spare, leaves))
        copies = spare if fits else list(map(_host_memory, leaves))

        def copy() -> None:
            with ordinary():
                without_gradients()
                for into, leaf in zip(copies, leaves, strict=True):
                    into.copy_(leaf, non_blocking=True)

        at_one_time(turns_of(leaves), copy)
        return copies

    def _restored(self, state: Any, span: _Span) -> Any:
        """Write a kept state into the memory of one."""
        if not isinstance(state, Handle) or state._owner is not None:
            raise TypeError(
                f"record: expected a state that `{self.step._name}` has returned, got {type(state).__name__}.\n"
                "To fix: `state = train.rewind(state, number)`."
            )
        slots = state._lease.arena.slots
        if len(slots) != len(span.state) or not all(map(_alike, slots, span.state)):
            raise LayoutError.of(
                "",
                f"record: the state before call {span.start:,} has another layout than `state`, which is unchanged.",
                why="It is written into the memory of the state.",
                fix="pass the state that the recorded step has returned.",
            )
        _wait()
        write = partial(state._written, range(len(slots)), span.state, "train.rewind")
        return state._lease.arena.turn.alone(write)

    def _verified(self, span: _Span, result: tuple[Any, Any]) -> tuple[Any, Any]:
        """Make the first call of a span again, and compare all bits."""
        state, metrics = result
        device, mesh = (
            state._lease.arena.device,
            mesh_of([slot.spec for slot in state._lease.arena.plan.slots]),
        )
        names = [f"state{pytree.path_string(path, '')}" for path in state._lease.paths]
        expected = self._copied(state)
        state, again = self._made(self.step, self._restored(state, span), span.start)
        _wait()
        pairs = [*zip(names, expected, state._lease.arena.slots, strict=True)]
        flat, leaves = pytree.flatten_with_path(metrics)[0], pytree.leaves(again)
        pairs += [
            (pytree.path_string(path, "metrics"), held(one), held(other))
            for (path, one), other in zip(flat, leaves, strict=True)
            if isinstance(one, Tensor)
        ]
        rows = [
            f"{name}  in {count:,} of {one.numel():,} elements"
            for name, one, other in pairs
            if (count := _differing(one, other))
        ]
        self._spare.state = expected
        if on_any(mesh, self.step._name, bool(rows)):
            raise CaptureError.of(
                self.step._name,
                f"call {span.start:,} gives other bits when it is made again, on {device}.",
                rows=rows or ["on another rank"],
                why="The values and the kernels are the same. Either these add in any order, as those with atomics do, "
                "or the hardware computes wrong. `state.latest()` is what the second run made.",
                fix="`torch.use_deterministic_algorithms(True)` before the first call. If that was on, or it happens "
                "now and then, run the job without this device.",
            )
        return state, again


@contextlib.contextmanager
def _then(current: torch.cuda.Stream, other: torch.cuda.Stream) -> Iterator[None]:
    """Queue the work of a block on another stream; what comes later on the current one waits for it."""
    with torch.cuda.stream(other):
        yield
    current.wait_stream(other)


def _own(argument: Any) -> Any:
    if isinstance(argument, Handle):
        return argument
    return pytree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, argument)


def _host_memory(tensor: Tensor, rows: int | None = None) -> Tensor:
    """Return host memory for a tensor, pinned if it is on a GPU; for so many of them, one after another, if asked."""
    one = torch.empty_like(tensor, device="meta")
    shape, stride = (
        (one.shape, one.stride()) if rows is None else ((rows, *one.shape), (one.numel(), *one.stride()))
    )
    return torch.empty_strided(shape, stride, dtype=one.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _wait() -> None:
    """Wait until copies to the host are there."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _differing(one: Tensor, other: Tensor) -> int:
    """Return how many elements of two tensors have different bits."""
    return int((_bits(one.to(other.device)) != _bits(other)).sum())


def _bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return real.detach().resolve_neg().view(kinds[real.itemsize])


def _nonfinite(state: Any, metrics: Any) -> set[str]:
    """Return the names of the leaves and metrics that hold NaN, and of those that hold infinities."""
    names: list[str] = []
    flags: list[Tensor] = []
    for root, tree in (("state", state), ("metrics", metrics)):
        for path, leaf in pytree.flatten_with_path(tree)[0]:
            one = held(leaf)
            if isinstance(one, Tensor) and one.itemsize > 1 and (one.is_floating_point() or one.is_complex()):
                for kind, count in (("nan", one.isnan().any()), ("inf", one.isinf().any())):
                    names.append(f"{pytree.path_string(path, root)} {kind}")
                    flags.append(count.detach())
    held_there = torch.stack(flags).tolist() if flags else []
    return {name for name, flag in zip(names, held_there, strict=True) if flag}
