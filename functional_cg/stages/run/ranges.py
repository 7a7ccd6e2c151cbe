"""Name the calls of a step for `nsys` and other profilers that show NVTX ranges."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..plan import Before

__all__ = ["in_a_range"]


def in_a_range(
    replay: Callable[[Before], Sequence[Tensor]], name: str
) -> Callable[[Before], Sequence[Tensor]]:
    """Return a replay that runs in an NVTX range of the step's name if ``FCG_NVTX=1``, else the replay itself.

    The environment is read once, when a step is captured: two calls into the driver's library would cost each replay
    a microsecond or two.
    """
    if os.environ.get("FCG_NVTX") != "1":
        return replay
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop

    def named(before: Before) -> Any:
        push(name)
        try:
            return replay(before)
        finally:
            pop()

    return named
