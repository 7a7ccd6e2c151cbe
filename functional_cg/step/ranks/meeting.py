"""Wait for all ranks before a capture, and compare what they are about to capture."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from ...concurrency.garbage import no_garbage_collection
from ...shards.collectives import is_collective
from ...shards.mesh import Mesh
from ...stages.program import Program
from ...stages.sub_programs import each_once
from ...state.arena import BufferSpec
from .between_stages import agree_on_transfers
from .replicas import apart, refuse_divergence, told_apart

__all__ = ["meet"]


@no_garbage_collection()
def meet(
    function: str,
    mesh: Mesh,
    program: Program,
    lowered: Program,
    specs: Sequence[BufferSpec],
    names: Sequence[str],
    *,
    on_lanes: bool,
) -> None:
    """Wait until all ranks of a mesh are about to capture the same step; else a collective would hang.

    Args:
      function: Name of the step.
      mesh: The ranks.
      program: The step, as traced.
      lowered: The same, as it will run.
      specs: Specs of its slots.
      names: Names of its inputs.
      on_lanes: Whether it will run on lanes, and so once more before the capture.
    Raises:
      RankError: On all ranks, naming those that are missing or differ, or leaves that would diverge.
    """
    leaves = zip((*program.slot_names, *names), (*program.slots, *program.inputs), strict=True)
    ops = [str(instr.op) for instr in (*program.instrs, *each_once(program.instrs))]
    lines = [
        f"capture `{function}`",
        *(f"{name}  {str(var.spec).partition('@')[0]}" for name, var in leaves),
        f"{len(program.instrs)} ATen calls, {hashlib.blake2b(repr(ops).encode(), digest_size=8).hexdigest()}",
        "on lanes" if on_lanes else "in one line",
        *_collectives(lowered, mesh),
    ]
    mesh.ranks.agree(function, "\n".join(lines))
    if mesh.stages is not None:
        agree_on_transfers(function, program, lowered, mesh)
    numbers = "\n".join([lines[0], *told_apart(program)])
    texts = mesh.ranks.beside(mesh.ranks.shared(function, numbers))
    said = [text.splitlines()[1:] for text in texts]
    refuse_divergence(program, specs, names, mesh, apart(said, mesh))


def _collectives(program: Program, mesh: Mesh) -> Iterator[str]:
    """Yield the collectives of a program in their order, as text that is equal on all ranks that take part."""
    axes = {axis.group: axis.name for axis in mesh.axes}
    calls = (instr for instr in program.instrs if is_collective(instr.op))
    for number, instr in enumerate(calls, 1):
        what = ", ".join(str(var.spec).partition("@")[0] for var in instr.inputs())
        yield f"collective {number}  {instr.name} of {what} over {axes.get(instr.args[-1], 'stages')}"
