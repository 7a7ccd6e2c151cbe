"""Certify a compiled step: compare its plan with the program on real values before the plan commits anything.

By default this takes no more memory than the step itself: on a GPU the old values of the slots that the plan
writes are kept on the host, and the program runs in the memory that the plan has freed. What does not fit is computed
again when it is needed, or waits on the host. If a single call takes too much, the step is not certified.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from ..concurrency.garbage import no_garbage_collection
from ..concurrency.interrupts import uninterrupted
from ..errors import MiscompileError
from ..options import Certify
from ..shards.mesh import Mesh
from ..shards.peers import on_any
from ..stages.lower.regions import RegionsPlan
from ..stages.plan import Buffers
from ..stages.run.capture import Backend, CUDABackend
from ..stages.run.memory import scratch
from ..stages.trial.judge import Difference, load_kernels, miscompiled
from ..stages.trial.trial import Certificate, Trial, TrialOfFunctions
from ..state.arena import Arena
from ..tensors.aten import copies
from .lowered import Lowered

__all__ = ["certify"]

_log = logging.getLogger("functional_cg")
_LARGE = 2**20  # bytes
_WORKSPACE = 8  # the fraction 1 / _WORKSPACE of free memory is left for the workspaces of kernels
_SHARE = 4  # the fraction 1 / _SHARE of the host's free memory may hold values of the program for a while
_INTEGERS = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


def certify(
    lowered: Lowered, buffers: Buffers, arenas: Sequence[Arena], backend: Backend, asked: Certify
) -> Certificate:
    """Compare a compiled plan with its program on the values in the static buffers, which keep these values.

    Args:
      lowered: The lowered step.
      buffers: Static buffers with real values.
      arenas: Arenas of the slots.
      backend: Where the plan will run.
      asked: The ``certify`` option; ``"auto"`` compares only if the step's own memory is enough.
    Raises:
      MiscompileError: If the plan computes something else.
    """
    start = time.perf_counter()
    aside = backend.aside() if isinstance(backend, CUDABackend) else contextlib.nullcontext()
    with aside:
        certificate = _certificate(lowered, buffers, arenas, asked)
    level = logging.INFO if certificate.certified else logging.WARNING
    _log.log(level, "%s: %s; in %.2f s", lowered.name, certificate, time.perf_counter() - start)
    return certificate


def _certificate(lowered: Lowered, buffers: Buffers, arenas: Sequence[Arena], asked: Certify) -> Certificate:
    mesh = lowered.mesh
    together = partial(on_any, mesh, lowered.name)
    written = [out.slot for out in lowered.reference.outputs if out.slot is not None]
    needed = sum(buffers.slots[slot].nbytes for slot in written)
    if together(_host_memory() < needed):
        return Certificate(False, f"the host has no {needed:,} B to keep values in")
    kind = TrialOfFunctions if isinstance(lowered.plan, RegionsPlan) else Trial
    trial = kind(lowered.reference, lowered.plan, together)
    on_gpu = any(one.is_cuda for one in (*buffers.slots, *buffers.inputs))
    with ThreadPoolExecutor(1) as meanwhile:  # kernels load while the plan compiles
        loaded = [meanwhile.submit(load_kernels, _gpu(buffers))] if on_gpu else []
        trial.rehearse(buffers, scratch(buffers, lowered.reference.unchecked.slots).slots)
    for one in loaded:
        one.result()
    of = _InPlace.of(buffers, written, arenas, asked) if on_gpu else _Copied.of(buffers, arenas)
    with no_garbage_collection(), of as space:  # slow after compiling, and a capture begins with one
        found = trial.differences(space)
    if trial.lacking:
        return Certificate(
            False,
            f"call by call it takes {trial.lacking:,} B more than the step; `certify=True` takes them",
        )
    if together(bool(found)):
        raise _error(lowered.name, found, mesh)
    return Certificate(certified=True, share=trial.share)


def _error(name: str, found: Sequence[Difference], mesh: Mesh | None) -> MiscompileError:
    where = f"rank {mesh.rank} has found no difference, another rank has" if mesh is not None else ""
    return miscompiled(
        name,
        "something else; the state is unchanged.",
        map(str, found) if found else [where],
        "Before the first call changes the state, the compiled step is compared with its calls, run one by one.",
    )


@dataclass
class _Copied:
    """Buffers like the given ones, with copied slots.

    Attributes:
      given: The original buffers.
      buffers: The buffers with copied slots, which may be written.
    """

    given: Buffers
    buffers: Buffers

    @classmethod
    @contextlib.contextmanager
    def of(cls, buffers: Buffers, arenas: Sequence[Arena]) -> Iterator[Self]:
        """Provide the space for a trial."""
        slots: dict[int, Tensor] = {}
        for arena in dict.fromkeys(arenas):
            slots |= zip(map(id, arena.slots), arena.copy().slots, strict=True)
        yield cls(buffers, replace(buffers, slots=[slots[id(slot)] for slot in buffers.slots]))

    def reset(self, only: Sequence[bool] | None = None) -> None:
        for at, (mine, slot) in enumerate(zip(self.buffers.slots, self.given.slots, strict=True)):
            if only is None or only[at]:
                mine.copy_(slot)

    def room(self) -> int | None:
        return None

    def host(self) -> int:
        return 0


@dataclass
class _InPlace:
    """The buffers themselves; old values of written slots are kept on the host, to take no memory of the GPU.

    Attributes:
      buffers: The buffers.
      written: Positions of the slots that the step writes.
      kept: These slots, with their old values; None for zeros.
      limited: Whether memory may not exceed its peak so far.
    """

    buffers: Buffers
    written: Sequence[int]
    kept: list[tuple[Tensor, Tensor | None]]
    limited: bool

    @classmethod
    @contextlib.contextmanager
    def of(
        cls, buffers: Buffers, written: Sequence[int], arenas: Sequence[Arena], asked: Certify
    ) -> Iterator[Self]:
        """Provide the space for a trial; restore the slots at its end."""
        slots = [buffers.slots[slot] for slot in written]
        with contextlib.ExitStack() as locks:
            for arena in sorted(dict.fromkeys(arenas), key=lambda arena: arena.turn.rank):
                locks.enter_context(arena.turn.shut())
            space = cls(buffers, written, [(slot, _on_host(slot)) for slot in slots], asked == "auto")
            try:
                yield space
            finally:
                space.reset()

    def reset(self, only: Sequence[bool] | None = None) -> None:
        kept = [one for at, one in zip(self.written, self.kept, strict=True) if only is None or only[at]]
        pairs = [(slot, value) for slot, value in kept if value is not None]
        zeros = [partial(slot.zero_) for slot, value in kept if value is None]
        uninterrupted([*copies([slot for slot, _ in pairs], [value for _, value in pairs]), *zeros])

    def room(self) -> int | None:
        if not self.limited:
            return None
        stats: dict[str, Any] = torch.cuda.memory_stats(_gpu(self.buffers))
        room = int(stats["allocated_bytes.all.peak"]) - int(stats["allocated_bytes.all.current"])
        return room - room // _WORKSPACE

    def host(self) -> int:
        return _host_memory() // _SHARE


def _gpu(buffers: Buffers) -> torch.device:
    return next(one.device for one in (*buffers.slots, *buffers.inputs) if one.is_cuda)


def _on_host(slot: Tensor) -> Tensor | None:
    """Copy a slot to the host; return None if it is all zeros, as an optimizer's moments are at first."""
    integer = _INTEGERS.get(slot.itemsize)
    if integer is not None and not slot.view(integer).any():  # compares bits: -0.0 is not 0.0
        return None
    host = torch.empty_like(slot, device="cpu")
    if slot.nbytes > _LARGE:  # the first touch of memory is slow; `fill_` does it with several threads
        host.fill_(0)
    return host.copy_(slot)


def _host_memory() -> int:
    """Return the free bytes of host memory that the system reports; without a report, there is enough."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        known = "SC_AVPHYS_PAGES" in os.sysconf_names
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else sys.maxsize
