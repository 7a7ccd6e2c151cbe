"""The certificate of a compiled step: its plan was compared with the program on real values before it committed any.

It takes no memory that the step does not take itself: on a GPU the old values of the slots that the plan writes wait on
the host, and the program runs in what the plan has left behind. Where that is too little, the certificate is left out.
"""

from __future__ import annotations

import contextlib
import logging
import os
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
from ..stages.plan import Buffers
from ..stages.run.capture import Backend, CUDABackend, scratch
from ..stages.trial.judge import Difference, load_kernels, miscompiled
from ..stages.trial.trial import Certificate, Trial
from ..state.arena import Arena
from ..tensors.aten import copies
from .lowered import Lowered

__all__ = ["certify"]

_log = logging.getLogger("functional_cg")
_LARGE = 2**20  # bytes
_WORKSPACE = 8  # one part in so many is left for what kernels take to compute in
_INTEGERS = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


def certify(
    lowered: Lowered, buffers: Buffers, arenas: Sequence[Arena], backend: Backend, asked: Certify
) -> Certificate:
    """Compare a compiled plan with its program on the values in the static buffers, which end as they were.

    Args:
      lowered: What was lowered.
      buffers: Static buffers with real values.
      arenas: Where the slots lie.
      backend: Where it will run.
      asked: Whether it is wanted; ``"auto"`` is where the memory of the step is enough.
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
    trial = Trial(lowered.reference, lowered.plan, together)
    on_gpu = any(one.is_cuda for one in (*buffers.slots, *buffers.inputs))
    with ThreadPoolExecutor(1) as meanwhile:  # the compiler of the plan leaves it time
        loaded = [meanwhile.submit(load_kernels, _gpu(buffers))] if on_gpu else []
        trial.rehearse(buffers, scratch(buffers.slots, lowered.reference.unchecked.slots))
    for one in loaded:
        one.result()
    of = _InPlace.of(buffers, written, arenas, asked) if on_gpu else _Copied.of(buffers, arenas)
    with no_garbage_collection(), of as space:  # it takes long after compiling, and a capture begins with one
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
        "Before the first call commits, the compiled step is compared with its calls one by one.",
    )


@dataclass
class _Copied:
    """Buffers like the given ones, with slots in memory of their own.

    Attributes:
      given: The buffers.
      buffers: Those that may be written.
    """

    given: Buffers
    buffers: Buffers

    @classmethod
    @contextlib.contextmanager
    def of(cls, buffers: Buffers, arenas: Sequence[Arena]) -> Iterator[Self]:
        """The space of a trial."""
        slots: dict[int, Tensor] = {}
        for arena in dict.fromkeys(arenas):
            slots |= zip(map(id, arena.slots), arena.copy().slots, strict=True)
        yield cls(buffers, replace(buffers, slots=[slots[id(slot)] for slot in buffers.slots]))

    def reset(self) -> None:
        for mine, slot in zip(self.buffers.slots, self.given.slots, strict=True):
            mine.copy_(slot)

    def room(self) -> int | None:
        return None


@dataclass
class _InPlace:
    """The buffers themselves; what the written slots hold is kept on the host, where it takes none of the GPU's memory.

    Attributes:
      buffers: The buffers.
      kept: The slots that the step writes, with what they held; None for zeros.
      limited: Whether no more memory may be taken than was before.
    """

    buffers: Buffers
    kept: list[tuple[Tensor, Tensor | None]]
    limited: bool

    @classmethod
    @contextlib.contextmanager
    def of(
        cls, buffers: Buffers, written: Sequence[int], arenas: Sequence[Arena], asked: Certify
    ) -> Iterator[Self]:
        """The space of a trial; at its end the slots hold what they held."""
        slots = [buffers.slots[slot] for slot in written]
        with contextlib.ExitStack() as locks:
            for arena in sorted(dict.fromkeys(arenas), key=lambda arena: arena.turn.rank):
                locks.enter_context(arena.turn.shut())
            space = cls(buffers, [(slot, _on_host(slot)) for slot in slots], asked == "auto")
            try:
                yield space
            finally:
                space.reset()

    def reset(self) -> None:
        pairs = [(slot, value) for slot, value in self.kept if value is not None]
        zeros = [partial(slot.zero_) for slot, value in self.kept if value is None]
        uninterrupted([*copies([slot for slot, _ in pairs], [value for _, value in pairs]), *zeros])

    def room(self) -> int | None:
        if not self.limited:
            return None
        stats: dict[str, Any] = torch.cuda.memory_stats(_gpu(self.buffers))
        room = int(stats["allocated_bytes.all.peak"]) - int(stats["allocated_bytes.all.current"])
        return room - room // _WORKSPACE


def _gpu(buffers: Buffers) -> torch.device:
    return next(one.device for one in (*buffers.slots, *buffers.inputs) if one.is_cuda)


def _on_host(slot: Tensor) -> Tensor | None:
    """A copy of a slot in the host's memory; None if it is zero, as the moments of an optimizer are at first."""
    integer = _INTEGERS.get(slot.itemsize)
    if integer is not None and not slot.view(integer).any():  # all bits: there are two zeros
        return None
    host = torch.empty_like(slot, device="cpu")
    if slot.nbytes > _LARGE:  # memory that nobody has touched is slow to get, by several threads less so
        host.fill_(0)
    return host.copy_(slot)


def _host_memory() -> int:
    """Bytes of the host's memory that are free, as far as the system tells."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pages: int = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return pages
