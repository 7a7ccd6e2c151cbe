"""Wait for all ranks before a capture, and compare what they are about to capture."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ...shards.mesh import Mesh
from ...stages.program import Program
from ...state.arena import BufferSpec
from .between_stages import agree_on_transfers
from .replicas import apart, refuse_divergence, told_apart

__all__ = ["meet"]


def meet(
    function: str, mesh: Mesh, program: Program, specs: Sequence[BufferSpec], names: Sequence[str]
) -> None:
    """Wait until all ranks of a mesh are about to capture the same step; else a collective would hang.

    Args:
      function: Name of the step.
      mesh: The ranks.
      program: The step, as traced.
      specs: Specs of its slots.
      names: Names of its inputs.
    Raises:
      RankError: On all ranks, naming those that are missing or differ, or leaves that would diverge.
    """
    leaves = zip((*program.slot_names, *names), (*program.slots, *program.inputs), strict=True)
    ops = [str(instr.op) for instr in program.instrs]
    lines = [
        f"capture `{function}`",
        *(f"{name}  {str(var.spec).partition('@')[0]}" for name, var in leaves),
        f"{len(ops)} ATen calls, {hashlib.blake2b(repr(ops).encode(), digest_size=8).hexdigest()}",
    ]
    mesh.ranks.agree(function, "\n".join(lines))
    if mesh.stages is not None:
        agree_on_transfers(function, program, mesh)
    numbers = "\n".join([lines[0], *told_apart(program)])
    texts = mesh.ranks.beside(mesh.ranks.shared(function, numbers))
    said = [text.splitlines()[1:] for text in texts]
    refuse_divergence(program, specs, names, mesh, apart(said, mesh))
