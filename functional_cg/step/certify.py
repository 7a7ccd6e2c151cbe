"""Certify a compiled step: compare its plan with the program on real values before the plan commits anything.

The program runs in the memory that is free. If that is too little, the values that it needs last wait on the host; if
a single call takes more, the step is not certified. The first call is compared before the capture. Later calls, by
default those whose number is a power of two, compare what the replay itself computes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..concurrency.garbage import no_garbage_collection
from ..concurrency.interrupts import held_back, uninterrupted
from ..errors import CaptureError
from ..messages.source import warn
from ..options import Certify
from ..shards.peers import on_any
from ..stages.plan import Backend, Before, Buffers, Replay, Run
from ..stages.run.capture import CUDABackend
from ..stages.run.memory import scratch
from ..stages.trial.judge import Difference, miscompiled
from ..stages.trial.recorded import Recorded
from ..stages.trial.space import Space, device_of
from ..stages.trial.trial import Certificate, Trial, TrialOfFunctions
from ..state.arena import Arena
from .log import log
from .lowered import Lowered

__all__ = ["Certified", "certify"]

_RECORDED = 2**28  # bytes that a recorded comparison takes at most, and keeps


def certify(
    lowered: Lowered, buffers: Buffers, arenas: Sequence[Arena], backend: Backend, asked: Certify
) -> Trial:
    """Compare a compiled plan with its program on the values in the static buffers, which keep these values.

    Args:
      lowered: The lowered step; its certificate is set.
      buffers: Static buffers with real values.
      arenas: Arenas of the slots.
      backend: Where the plan will run.
      asked: The ``certify`` option; with True it is an error if memory does not allow the comparison.
    Returns:
      What compares later calls.
    Raises:
      MiscompileError: If the plan computes something else.
      CaptureError: If it was asked for, and memory is too little.
    """
    _refuse_refuted(lowered)
    start, mesh = time.perf_counter(), lowered.mesh
    kind = TrialOfFunctions if lowered.plan.one_by_one else Trial
    trial = kind(lowered.reference, lowered.plan, partial(on_any, mesh, lowered.name))
    with backend.aside() if isinstance(backend, CUDABackend) else contextlib.nullcontext():
        trial.rehearse(buffers, scratch(buffers, lowered.reference.unchecked.slots).slots)
        turns = sorted({arena.turn for arena in arenas}, key=lambda turn: turn.rank)
        # Slow after compiling, and a capture begins with one.
        with _alone(turn.shut() for turn in turns), no_garbage_collection():
            found = _differences(trial, Space.of(lowered.reference, buffers, inputs=True))
    _refuse(lowered, found, trial)
    lowered.certificate = Certificate(not trial.lacking, _lacking(trial), trial.share)
    if trial.lacking and asked is True:
        raise CaptureError.of(
            lowered.name,
            f"it is {lowered.certificate}; the state is unchanged.",
            why="`certify=True` asks for a comparison with the calls of the step, run one by one.",
            fix='leave `certify` out; or `lowering="aten"`, which needs none.',
        )
    if trial.lacking:
        warn(f"`{lowered.name}`: {lowered.certificate}")
    else:
        log.info("%s: %s; in %.2f s", lowered.name, lowered.certificate, time.perf_counter() - start)
    return trial


class Certified:
    """A replay that is compared with its program at some calls, before their new state counts.

    Args:
      replay: The replay.
      lowered: Its step.
      trial: What compares it.
      buffers: Its static buffers.
      arenas: Arenas of the slots, whose turns whoever calls holds.
      backend: Where the replay runs; None to compare without a recording, which takes memory.
      asked: The ``certify`` option.
    """

    def __init__(
        self,
        replay: Replay,
        lowered: Lowered,
        trial: Trial,
        buffers: Buffers,
        arenas: Sequence[Arena],
        backend: Backend | None,
        asked: Certify,
    ) -> None:
        self.fresh, self._replay = replay.fresh, replay
        self._lowered, self._trial, self._buffers, self._arenas = lowered, trial, buffers, arenas
        self._every = asked if type(asked) is int else 0  # 0 for powers of two
        self._calls, self._due = 0, self._every + 1 if self._every else 2
        self._recorded = self._record(getattr(backend, "recorder", None))
        _give_back(buffers)

    def __call__(self, before: Before, /) -> Sequence[Tensor]:
        _refuse_refuted(self._lowered)
        self._calls += 1
        if self._calls != self._due:
            return self._replay(before)
        self._due += self._every or self._due
        with held_back(), _alone(turn.torn() for turn in {arena.turn for arena in self._arenas}):
            metrics = self._compared()
            uninterrupted(before)  # the slots hold the new state from here on
        if self._recorded is None:
            _give_back(self._buffers)
        if self._trial.lacking:  # not before the new state counts: a filter may raise it
            warn(f"`{self._lowered.name}`: not compared at call {self._calls}: {_lacking(self._trial)}")
        return metrics

    def _compared(self) -> Sequence[Tensor]:
        lowered, trial, recorded = self._lowered, self._trial, self._recorded
        space = recorded.space if recorded else Space.of(lowered.reference, self._buffers, inputs=False)
        try:
            metrics, found = trial.compare(space, partial(self._replay, ()), recorded)
            _refuse(lowered, found, trial, call=self._calls)
            if metrics is None:  # a rank that runs before all have found nothing would wait for the others
                metrics = self._replay(())
        except BaseException as error:
            space.reset()
            # Of several ranks, the others wait for what this one has found.
            if lowered.mesh is not None or not isinstance(error, torch.OutOfMemoryError):
                raise
            metrics, trial.lacking = self._replay(()), trial.lacking or 1
        if not trial.lacking and lowered.certificate is not None:
            lowered.certificate = lowered.certificate.also(self._calls, trial.share)
        return metrics

    def _record(self, recorder: Callable[[], Callable[[Run], Replay]] | None) -> Recorded | None:
        """Record what later comparisons run, if every rank can in little memory: small programs wait for the host."""
        trial, reference, buffers = self._trial, self._lowered.reference, self._buffers
        # Pages can leave the device.
        if (
            recorder is None
            or self.fresh
            or self._lowered.plan.one_by_one
            or any(arena.pages for arena in self._arenas)
        ):
            return None
        kept = sum(buffers.slots[out.slot].nbytes for out in reference.outputs if out.slot is not None)
        if trial.together(bool(trial.lacking) or reference.at_once + kept > _RECORDED):
            return None
        recorded: Recorded | None = None
        try:
            space = Space.of(reference, buffers, inputs=False)
            outputs = reference.made(cast("Any", self._replay).static, buffers.slots)
            recorded = Recorded(reference, space, outputs, recorder())
        except Exception as error:  # out of memory, a kernel that refuses: it can be compared call by call
            log.debug("later comparisons are not recorded: %s", error)
        failed = trial.together(recorded is None)
        if failed and recorded is not None:
            recorded.close()
        return None if failed else recorded

    def close(self) -> None:
        self._replay.close()
        if self._recorded is not None:
            self._recorded.close()
            self._recorded = None


def _give_back(buffers: Buffers) -> None:
    """Give the device back what a comparison took."""
    if device_of(buffers).type == "cuda":
        torch.cuda.empty_cache()


def _differences(trial: Trial, space: Space) -> list[Difference]:
    try:
        return trial.differences(space)
    except torch.OutOfMemoryError as error:  # memory in pieces: what is free is not all of one piece
        trial.lacking = trial.lacking or 1
        log.debug("not compared: %s", error)
        return []
    finally:
        space.reset()


def _lacking(trial: Trial) -> str:
    """Return by how much memory is too little, in words; empty if it is enough."""
    gib = f"{trial.lacking / 2**30:.2f} GiB"
    return f"by {gib}, which its calls one by one take more than is free" if trial.lacking else ""


def _refuse(lowered: Lowered, found: Sequence[Difference], trial: Trial, call: int = 1) -> None:
    """Raise if a comparison has found a difference; from then on no call of the plan counts."""
    name, mesh = lowered.name, lowered.mesh
    if not on_any(mesh, name, bool(found)):
        return
    on_others = f"; here, on other values made from those of the call ({trial.kind})" if trial.kind else ""
    where = f"rank {mesh.rank} has found no difference, another rank has" if mesh is not None else ""
    which = "the first call" if call == 1 else f"call {call:,}"
    lowered.certificate = Certificate(
        certified=False, why_not=f"{which} found that it computes something else"
    )
    lowered.refuted = partial(
        miscompiled,
        name,
        "something else; the state is unchanged.",
        list(map(str, found)) if found else [where],
        f"Before {which} changes the state, the compiled step is compared with its calls, run one by one{on_others}.",
    )
    raise lowered.refuted()


def _refuse_refuted(lowered: Lowered) -> None:
    if lowered.refuted is not None:
        raise lowered.refuted()


@contextlib.contextmanager
def _alone(locks: Iterable[contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Keep all others away from the states during a block, while they hold other values."""
    with contextlib.ExitStack() as all_of_them:
        for lock in locks:
            all_of_them.enter_context(lock)
        yield
