"""Capture a bound plan for replay; the only module that uses CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...concurrency.garbage import no_garbage_collection
from ...concurrency.interrupts import uninterrupted
from ...concurrency.streams import current_device
from ...errors import CaptureError, FunctionalCGError, StreamError
from ...errors.words import words_of
from ..branches.source import Lanes
from ..evaluate import quiet
from ..plan import (
    Backend,
    Before,
    Buffers,
    Plan,
    Replay,
    Run,
    Spare,
    bound,
    faster,
)
from .reserve import at_once

__all__ = ["CPUBackend", "CUDABackend", "backend_for"]

_CROSSES_THE_BORDER = ("unjoined work", "uncaptured work")  # in the driver's messages on streams and events
_LATER = "previous error during capture"
_ROUNDS, _ROUND_MS, _SECONDS = 12, 4.0, 0.2  # of a measurement: at most, at least, and at most


@dataclass(eq=False)
class _DirectReplay:
    """Replays by running the bound plan directly."""

    run: Callable[[Before], Sequence[Tensor]] | None
    fresh: bool = True

    def __call__(self, before: Before, /) -> Sequence[Tensor]:
        # Nothing here requires grad, so the caller's grad mode makes no difference; autocast was refused.
        return self.run(before)  # type: ignore[misc]

    def close(self) -> None:
        self.run = None


class CPUBackend:
    """Replays the plan on static buffers without a GPU, so that the guarantees can be tested anywhere."""

    name = "cpu"

    def capture(self, plan: Plan, buffers: Buffers, scratch: Callable[[], Spare]) -> Replay:
        return _DirectReplay(plan.bind(buffers))


class _GraphReplay:
    """Launches a CUDA graph; metrics lie in its private pool.

    Attributes:
      static: The metrics.
    """

    fresh = False

    def __init__(
        self, graph: torch.cuda.CUDAGraph, run: Any, static: Sequence[Tensor], device: torch.device
    ) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._run = run  # keeps constants and views of static buffers alive as long as the graph
        self.static = static
        self._device = device
        # the C method itself: in the Python override, Ctrl-C could strike between launch and new generation
        self._launch = super(torch.cuda.CUDAGraph, graph).replay

    def __call__(self, before: Before, /) -> Sequence[Tensor]:
        if current_device() == self._device.index:
            uninterrupted((*before, self._launch))
        else:
            with torch.cuda.device(self._device):
                uninterrupted((*before, self._launch))
        return self.static

    @property
    def alive(self) -> bool:
        """Whether it may be launched."""
        return self._graph is not None

    def close(self) -> None:
        if self._graph is not None:
            torch.cuda.synchronize(self._device)  # a replay may be in flight
            self.static, self._run = (), None
            self._graph.reset()
            self._graph = None


class CUDABackend:
    """Captures into CUDA graphs, with one memory pool for all graphs of a step.

    Nothing in the pool is alive between calls (metrics are copied out), so graphs can share it. Warm-up and capture use
    different streams: cuBLAS keeps a workspace per stream, and a graph's workspace must come from the graph's pool. Any
    other workspace may be freed at any time, by a compiled function's own graphs for example, and unmapped while the
    graph still uses it.
    """

    name = "cuda"
    has_lanes = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._sharing = weakref.WeakSet[_GraphReplay]()  # the graphs of the pool
        self._streams: tuple[torch.cuda.Stream, ...] = ()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Run work before a capture on the warm-up stream, so that the warm-up reuses its memory."""
        with torch.cuda.device(self._device):
            if not self._streams:
                # torch hands out streams from a small pool; high-priority ones are rarely shared with other users
                self._streams = tuple(torch.cuda.Stream(self._device, priority=-1) for _ in range(2))
            caller, warm_up = torch.cuda.current_stream(self._device), self._streams[0]
            warm_up.wait_stream(caller)
            torch.cuda.empty_cache()  # else memory cached while building the state adds to this work's
            try:
                with torch.cuda.stream(warm_up):
                    yield
            except BaseException:
                with contextlib.suppress(
                    torch.AcceleratorError
                ):  # a failed device; the original error is on its way
                    caller.wait_stream(warm_up)  # the old values were restored last
                _free_workspaces()
                raise
            warm_up.synchronize()

    def capture(self, plan: Plan, buffers: Buffers, scratch: Callable[[], Spare]) -> Replay:
        with torch.cuda.device(self._device), quiet():
            caller = torch.cuda.current_stream(self._device)
            with self.aside():
                # With a compiler, compiles here: for slots that do not overlap.
                run, spare = plan.bind(buffers), scratch()
                warm = plan.bind(spare)
                warm(())
                spare.reset()
                run = bound(plan, run, buffers, spare, self._lanes)
                memory = [StorageWeakRef(slot.untyped_storage()) for slot in spare.slots]
                del warm, spare
                if not all(one.expired() for one in memory):
                    gc.collect()  # a reference cycle holds it; to look for that takes a second
            # A pool is taken from by all captures of a step: later ones fill what the first has left free.
            # Another allocator would make what is taken nodes of the graph.
            first = _is_native() and not self._is_shared()
            replay = self._graph(run, *(at_once(plan) if first else ()))
            caller.wait_stream(self._streams[1])
            return replay

    def recorder(self) -> Callable[[Run], Replay]:
        """Return what captures runs that write nothing that others read, into a pool of their own: results stay.

        A run may overwrite what an earlier one has freed, so replay them in order.
        """
        own = CUDABackend(self._device)

        def record(run: Run) -> Replay:
            with torch.cuda.device(self._device), quiet():
                with own.aside():
                    run(())
                return own._graph(run)

        return record

    def _graph(self, run: Run, segments: Sequence[int] = (), multiplies: bool = False) -> _GraphReplay:  # noqa: FBT001, FBT002
        graph = torch.cuda.CUDAGraph()
        if not self._is_shared():
            self._pool = torch.cuda.graph_pool_handle()
        # A stream may be another one's underneath, with a workspace from elsewhere that whoever made it may free;
        # and what runs on it later may not use that of the graph, which may be replayed meanwhile.
        _free_workspaces()
        try:
            with (
                no_garbage_collection(),  # no finalizer may destroy graphs or events while a stream is capturing
                _empty_graphs_are_fine(),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._streams[1], capture_error_mode="thread_local"
                ),
            ):
                _take(segments, self._device, multiplies=multiplies)
                static = run(())
        except BaseException as error:
            _abandon(graph, self._pool, self._device)
            _let_draw(self._streams[1])
            _let_solve(error, self._device)
            _free_workspaces()
            self._sharing.clear()  # the next capture takes another pool: torch 2.11 considers this one in use forever
            if isinstance(error, FunctionalCGError) or not isinstance(error, Exception):
                raise
            # Not bound to a name: that would make a reference cycle with this frame, which holds tensors.
            raise _failure(_first(error)) from _first(error)
        _free_workspaces()
        self._sharing.add(replay := _GraphReplay(graph, run, static, self._device))
        return replay

    def _is_shared(self) -> bool:
        """Whether a graph still keeps the pool: torch takes no pool that all have left while something lies in it."""
        return any(replay.alive for replay in self._sharing)

    def choose_lanes(self, plan: Plan, buffers: Buffers, scratch: Callable[[], Spare]) -> Plan:
        """Return a plan, or, if an estimate has put it on lanes and is measured to be wrong, the one for one line.

        Args:
          plan: The plan.
          buffers: As for :meth:`capture`; nothing runs on the slots.
          scratch: Likewise.
        """
        if not plan.timeline.estimated:
            return plan
        with torch.cuda.device(self._device), quiet():
            with self.aside():
                plan.bind(buffers)  # with a compiler, compiles here, and only then knows what it may launch
                if not plan.timeline.estimated:
                    return plan
                spare = scratch()
                plan.rehearse(spare)
                if not plan.timeline.estimated:  # memory is elsewhere than it says
                    return plan
                line = plan.in_line()
                line.bind(buffers)
                runs = [line.bind(spare), plan.bind_to(spare, self._lanes(plan.timeline.lanes))]
                for warm in (runs[0], plan.bind(spare)):
                    spare.reset()
                    warm(())
            replays: list[_GraphReplay] = []
            try:
                for run in runs:
                    replays.append(self._graph(run))
                in_line, on_lanes = self._milliseconds(replays, spare)
            finally:
                for replay in replays:
                    replay.close()
        return faster(plan, on_lanes, line, in_line)

    def _milliseconds(self, replays: Sequence[_GraphReplay], spare: Spare) -> list[float]:
        """Return what a replay of each takes at least, each in turn, until a fifth of a second has gone by.

        Each time it begins where the state is, and what that takes is a part of it.
        """
        least = [math.inf for _ in replays]
        with torch.cuda.stream(self._streams[1]):
            start, count = time.perf_counter(), 1
            for _ in range(_ROUNDS):
                for number, replay in enumerate(replays):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    for _ in range(count):
                        spare.reset()
                        replay(())
                    end.record()
                    end.synchronize()
                    least[number] = min(least[number], begin.elapsed_time(end) / count)
                if time.perf_counter() - start > _SECONDS:
                    break
                count = max(count, int(_ROUND_MS / max(least)))
        return least

    def _lanes(self, count: int) -> Lanes:
        while len(self._streams) < 1 + count:
            self._streams = (*self._streams, torch.cuda.Stream(self._device, priority=-1))
        return _Streams(self._streams[1 : 1 + count])


class _Streams(Lanes):
    """The lanes of a branched plan as streams of one capture, which the first of them began."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = streams
        self._events: dict[int, torch.cuda.Event] = {}

    def __enter__(self) -> None:
        for stream in self._streams[1:]:
            stream.wait_stream(self._streams[0])

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._streams[0])
        # After a failure the capture is invalid, and so is each further call.
        with contextlib.suppress(*([torch.AcceleratorError] if error[0] is not None else [])):
            for stream in self._streams[1:]:
                self._streams[0].wait_stream(stream)

    def on(self, lane: int) -> None:
        torch.cuda.set_stream(self._streams[lane])

    def wait(self, unit: int) -> None:
        torch.cuda.current_stream().wait_event(self._events[unit])

    def record(self, unit: int) -> None:
        self._events[unit] = torch.cuda.current_stream().record_event()


def _take(segments: Sequence[int], device: torch.device, *, multiplies: bool) -> None:
    """Let a capture that has begun take segments, if there is room; where there is none, there may be for less."""
    if segments:
        if multiplies:
            torch.cuda.current_blas_handle()  # takes its workspace, which else would lie in the way until the end
        with contextlib.suppress(torch.OutOfMemoryError):
            # All of them, then none: the allocator would cut the next one out of what is free.
            _ = [torch.empty(size, dtype=torch.uint8, device=device) for size in segments]


def _first(error: Exception) -> Exception:
    """Return the error that broke the capture, if the driver's final error only says that one occurred."""
    before = error.__context__
    return before if _LATER in words_of(error) and isinstance(before, Exception) else error


def _failure(error: Exception) -> FunctionalCGError:
    """Return the library's error for a failed capture."""
    said = f"{type(error).__name__}: {words_of(error).splitlines()[0] if words_of(error) else ''}"
    if any(words in words_of(error) for words in _CROSSES_THE_BORDER):
        return StreamError.of(
            "",
            f"capture failed: {said}",
            why="An operation of the step works on a stream of its own, which is no part of the graph.",
            fix="in that operation, join what it forks, `torch.cuda.current_stream().wait_stream(side)`, and wait for "
            "work from outside before the step.",
        )
    return CaptureError.of(
        "",
        f"capture failed: {said}",
        why="An operation of the step cannot be part of a CUDA graph; the state is unchanged.",
        fix="see the original exception above; `step.lower(...).as_text()` lists the operations.",
    )


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
    """Free a graph whose capture failed, and its memory."""
    graph.reset()
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:
        return  # the capture ended properly: its memory was freed with the graph
    torch._C._cuda_releasePool(device.index, pool)


def _let_draw(stream: torch.cuda.Stream) -> None:
    """Take the device's generator out of a capture that failed, by one that ends: torch 2.11 leaves it there.

    Until then each draw on that device would raise, in the whole process.
    """
    with (
        contextlib.suppress(RuntimeError),  # a failed device; the original error is on its way
        no_garbage_collection(),
        _empty_graphs_are_fine(),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"),
    ):
        pass


def _let_solve(error: BaseException, device: torch.device) -> None:
    """Take a failed capture's error out of cuSOLVER, whose next call in this thread would raise it once more."""
    before: BaseException | None = error
    while before is not None and "cusolver" not in words_of(before):
        before = before.__context__
    if before is not None:
        with contextlib.suppress(RuntimeError):
            torch.linalg.eigvalsh(torch.ones(1, 1, device=device, dtype=torch.float32))


def _free_workspaces() -> None:
    """Free the workspaces of cuBLAS: some 30 MB for each stream that ran a product, even a failed one.

    cuBLAS allocates new ones on demand. Live graphs are not affected: their workspaces come from their own pools.
    With ``cudaMallocAsync`` they are not freed: it makes the allocations of a capture nodes of the graph.
    """
    if _is_native():
        torch._C._cuda_clearCublasWorkspaces()


def _is_native() -> bool:
    """Whether torch's own allocator is in use."""
    return bool(torch.cuda.get_allocator_backend() == "native")


@contextlib.contextmanager
def _empty_graphs_are_fine() -> Iterator[None]:
    """Silence torch's warning about an empty graph: a step that changes nothing has no kernels."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        yield


def backend_for(device: torch.device) -> Backend:
    """Return a new backend for the device that a state lives on."""
    return CUDABackend(device) if device.type == "cuda" else CPUBackend()
