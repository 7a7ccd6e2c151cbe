"""Find the process groups that the captures of a step hold kernels of."""

from __future__ import annotations

from ...shards.collectives import is_collective
from ...shards.groups import Captures, Groups
from ...shards.mesh import Mesh
from ...shards.transfers import RECEIVE, SEND
from ...stages.program import Program
from ...stages.sub_programs import unrolled

__all__ = ["groups_of"]


def groups_of(program: Program, mesh: Mesh | None) -> Groups:
    """Return the groups that a program communicates over on a GPU; none on a CPU, whose calls are run each time."""
    if mesh is None or mesh.device.type == "cpu":
        return Groups((), Captures() if mesh is None else mesh.captures)
    calls = (
        instr for instr in unrolled(program).instrs if instr.op in (SEND, RECEIVE) or is_collective(instr.op)
    )
    return Groups({instr.args[-1] for instr in calls}, mesh.captures)
