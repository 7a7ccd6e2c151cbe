"""What a capture really takes from the device, beside what the simulation of the allocator says of its plan."""

from __future__ import annotations

from typing import Any

import torch

import functional_cg as fcg
from functional_cg.stages.run.reserve import at_once, events, highest, taken
from tests.cuda.helpers_cuda import (
    DEVICE,
    clean_allocator,  # noqa: F401
    marks,
    needs_gpu,
)
from tests.test_reserve import growing

pytestmark = marks
MIB = 2**20
WORKSPACE = 40 * MIB  # of cuBLAS, at most: a segment of its own


def large() -> int:
    """Bytes of the segments for large values in pools of graphs."""
    segments: Any = torch.cuda.memory_snapshot()
    return sum(
        one["total_size"]
        for one in segments
        if one["segment_type"] == "large" and tuple(one["segment_pool_id"]) != (0, 0)
    )


@needs_gpu
def test_a_capture_takes_what_the_simulation_says() -> None:
    state, x = {"w": torch.zeros(1024, 1024, device=DEVICE)}, torch.zeros(1024, 1024, device=DEVICE)
    step = fcg.graph_step(growing, lowering="aten", branches=1)
    plan: Any = step.lower(state, x).plan
    found, (chosen, _), before = events(plan), at_once(plan), large()
    said = taken(found, chosen)
    assert said < 1.05 * highest(found)
    step(state, x)
    assert 0 < large() - before - said <= WORKSPACE
