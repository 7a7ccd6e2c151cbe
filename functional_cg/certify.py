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
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .arena import Arena
from .errors import MiscompileError
from .leaf import uninterrupted
from .lowered import Lowered
from .ops import copies
from .options import Certify
from .shards.mesh import Mesh
from .stages.capture import Backend, CUDABackend, scratch
from .stages.lower import Buffers
from .stages.trial import Certificate, Difference, Trial

__all__ = ["certify"]

_log = logging.getLogger("functional_cg")


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
    reference, mesh = lowered.reference, lowered.mesh
    together = partial(_on_any_rank, lowered.name, mesh)
    device = next((one.device for one in (*buffers.slots, *buffers.inputs)), torch.device("cpu"))
    on_gpu = device.type == "cuda"
    written = [buffers.slots[out.slot] for out in reference.outputs if out.slot is not None]
    wanted = 4 * sum(slot.nbytes for slot in written)
    if together(_host_memory() < wanted):
        return Certificate(False, f"the host has no {wanted:,} B to keep values in")
    independent = (
        partial(_set_aside, buffers, written, arenas) if on_gpu else partial(_copied, buffers, arenas)
    )
    trial = Trial(reference, lowered.plan, independent)
    trial.rehearse(buffers, scratch(buffers.slots))
    got = trial.run()
    if asked == "auto" and on_gpu:
        room = _room(device)
        needed = reference.fit(room)
        if together(needed > room):
            return Certificate(
                False,
                f"call by call its program takes {needed:,} B beside the state, where the step takes {room:,} B; "
                "`certify=True` takes them",
            )
    found = trial.differences(got, together)
    if together(bool(found)):
        raise _error(lowered.name, found, mesh)
    return Certificate(certified=True, share=trial.share)


def _on_any_rank(name: str, mesh: Mesh | None, flag: bool) -> bool:  # noqa: FBT001 - it is what is asked
    """Whether a flag is set on any rank; all of them ask."""
    if mesh is None or mesh.ranks is None:
        return flag
    said = mesh.ranks.shared(name, f"certify `{name}`\n{'yes' if flag else 'no'}")
    return any(text.endswith("yes") for text in said)


def _error(name: str, found: Sequence[Difference], mesh: Mesh | None) -> MiscompileError:
    where = f"rank {mesh.rank} has found no difference, another rank has" if mesh is not None else ""
    return MiscompileError.of(
        name,
        "what the compiler made of it computes something else; the state is unchanged.",
        rows=[str(difference) for difference in found] or [where],
        why="Before the first call commits, the compiled step is compared with its calls one by one.",
        fix='`lowering="aten"` runs these calls as they are; please report it, with the step.',
    )


@contextlib.contextmanager
def _copied(buffers: Buffers, arenas: Sequence[Arena]) -> Iterator[Buffers]:
    """Buffers like the given ones, with slots in memory of their own."""
    slots: dict[int, Tensor] = {}
    for arena in dict.fromkeys(arenas):
        slots |= zip(map(id, arena.slots), arena.copy().slots, strict=True)
    yield replace(buffers, slots=[slots[id(slot)] for slot in buffers.slots])


@contextlib.contextmanager
def _set_aside(buffers: Buffers, written: Sequence[Tensor], arenas: Sequence[Arena]) -> Iterator[Buffers]:
    """The buffers themselves; what the slots that the step writes hold is kept on the host, and put back."""
    with contextlib.ExitStack() as locks:
        for arena in sorted(dict.fromkeys(arenas), key=id):
            locks.enter_context(arena.lock)
        kept = [slot.cpu() for slot in written]
        try:
            yield buffers
        finally:
            uninterrupted(copies(written, kept))


def _host_memory() -> int:
    """Bytes of the host's memory that are free, as far as the system tells."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pages: int = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return pages


def _room(device: torch.device) -> int:
    """Bytes of a GPU that may be allocated again without a new peak."""
    stats: dict[str, Any] = torch.cuda.memory_stats(device)
    return int(stats["allocated_bytes.all.peak"]) - int(stats["allocated_bytes.all.current"])
