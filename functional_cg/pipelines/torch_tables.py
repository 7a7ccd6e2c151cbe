"""The tables of ``torch.distributed.pipelining``; the only module that uses its private parts.

Torch makes the order of computations; transfers are placed here, in :mod:`.order`, for all schedules alike.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from .actions import Action

__all__ = ["TORCH_NAMES", "load", "torch_rows"]

TORCH_NAMES = MappingProxyType(
    {
        "interleaved": "Interleaved1F1B",
        "zero_bubble": "InterleavedZeroBubble",
        "zbv": "ZBVZeroBubble",
        "dualpipev": "DualPipeV",
        "looped_bfs": "LoopedBFS",
    }
)


def load() -> Any:
    """Return torch's function that makes tables; the first call imports many modules, which no trace should do."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    return get_schedule_ops


def torch_rows(name: str, ranks: int, microbatches: int, stages: int) -> list[list[Action]]:
    """Return what each rank computes, in torch's order.

    Args:
      name: A key of ``TORCH_NAMES``.
      ranks: Number of ranks.
      microbatches: Number of micro-batches.
      stages: Number of stages, a multiple of the ranks.
    Raises:
      ValueError: If torch has no such table for these numbers.
    """
    try:
        rows = load()(TORCH_NAMES[name], ranks, microbatches, stages // ranks)
    except (AssertionError, ValueError) as error:
        raise ValueError(
            f"sharding.pipeline: torch has no schedule {TORCH_NAMES[name]!r} of {stages} stages on {ranks} ranks with "
            f"{microbatches} micro-batches: {str(error).strip()}"
        ) from error
    return [[action for entry in row for action in _flat(entry)] for row in rows]


def _flat(entry: Any) -> list[Action]:
    """Return torch's entry as actions: one, several that it would overlap, or none for a bubble."""
    if entry is None:
        return []
    if entry.sub_actions is not None:
        return [action for part in entry.sub_actions for action in _flat(part)]
    kind = entry.computation_type.value
    if kind == "REDUCE_GRAD":
        return []
    return [Action.read(f"{entry.stage_index}{kind}{entry.microbatch_index}")]
