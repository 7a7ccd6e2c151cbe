"""Make the ranks of a pipeline agree before a capture: what each sends to another one, that one receives."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...errors import RankError
from ...shards.collectives import ALL_REDUCE
from ...shards.mesh import Mesh
from ...shards.transfers import RECEIVE, SEND
from ...stages.program import Instr, Program
from ...stages.schedule import live_instrs

__all__ = ["agree_on_transfers", "is_between_stages"]

_Said = Mapping[str, Any]


def is_between_stages(instr: Instr, mesh: Mesh) -> bool:
    """Whether a call is a collective over ranks that hold other stages."""
    return instr.op is ALL_REDUCE and instr.args[-1] not in {axis.group for axis in mesh.axes}


def agree_on_transfers(function: str, program: Program, lowered: Program, mesh: Mesh) -> None:
    """Raise on all ranks unless what is sent is received, in one order, and schedules are the same.

    Args:
      function: Name of the step.
      program: The step, as traced.
      lowered: The same, as it will run: each group's sums then have one order on all of its ranks.
      mesh: The ranks that hold the same stages.
    Raises:
      RankError: Naming the transfers that differ.
    """
    mine = {
        "notes": program.notes,
        "sends": _by_group(program, SEND),
        "receives": _by_group(program, RECEIVE),
        "sums": _sums(live_instrs(lowered), mesh),
    }
    texts = mesh.ranks.shared(function, f"agree on what the stages of `{function}` send\n{json.dumps(mine)}")
    said = [json.loads(text.partition("\n")[2]) for text in texts]
    rows = [*_other_notes(said), *_unmet(said), *_other_sums(said)]
    if rows:
        raise RankError.of(
            function,
            "stages of a pipeline do not fit together; the state is unchanged.",
            rows=rows,
            why="What one rank sends, another one waits for, in one order.",
            fix="run one program on all ranks: one schedule, one loss, batches of one layout.",
        )


def _by_group(program: Program, op: Any) -> dict[str, list[str]]:
    """Return what is sent or received, in order, by the name of the group."""
    found: dict[str, list[str]] = {}
    for instr in program.instrs:
        if instr.op is op:
            spec = (instr.args[0] if op is SEND else instr.out[0]).spec
            found.setdefault(instr.args[-1], []).append(str(spec).partition("@")[0])
    return found


def _sums(instrs: Iterable[Instr], mesh: Mesh) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {} if mesh.stages is None else {mesh.stages.group: []}
    for instr in instrs:
        if is_between_stages(instr, mesh):
            spec = str(instr.args[0].spec).partition("@")[0]
            found.setdefault(instr.args[-1], []).append(f"{instr.args[1]} of {spec}")
    return found


def _other_notes(said: Sequence[_Said]) -> Iterator[str]:
    first = said[0]["notes"]
    for rank, one in enumerate(said):
        if one["notes"] != first:
            yield f"rank 0  {'; '.join(first) or 'no pipeline'}"
            yield f"rank {rank}  {'; '.join(one['notes']) or 'no pipeline'}"
            return


def _unmet(said: Sequence[_Said]) -> Iterator[str]:
    sent = {group: (rank, what) for rank, one in enumerate(said) for group, what in one["sends"].items()}
    received = {
        group: (rank, what) for rank, one in enumerate(said) for group, what in one["receives"].items()
    }
    for group in sorted({*sent, *received}):
        source, sends = sent.get(group, ("another", []))
        target, receives = received.get(group, ("another", []))
        if sends != receives:
            number = _first_difference(sends, receives)
            yield (
                f"transfer {number}  rank {source} sends {_nth(sends, number)}   "
                f"rank {target} receives {_nth(receives, number)}"
            )


def _other_sums(said: Sequence[_Said]) -> Iterator[str]:
    firsts: dict[str, tuple[int, list[str]]] = {}
    for rank, one in enumerate(said):
        for group, sums in one["sums"].items():
            first, known = firsts.setdefault(group, (rank, sums))
            if sums != known:
                number = _first_difference(known, sums)
                yield (
                    f"sum {number} over stages  rank {first} has {_nth(known, number)}   "
                    f"rank {rank} has {_nth(sums, number)}"
                )


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _nth(items: Sequence[str], number: int) -> str:
    return items[number] if number < len(items) else "nothing"
