"""What a capture takes at once: torch's allocator, simulated, and how few gaps are left."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.stages.run.reserve import at_once, events, highest, taken

MIB = 2**20


@st.composite
def allocations(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Large values that come and go."""
    found: list[tuple[int, int]] = []
    alive: dict[int, int] = {}
    for number in range(draw(st.integers(1, 40))):
        if alive and draw(st.booleans()):
            storage = draw(st.sampled_from(sorted(alive)))
            found.append((storage, -alive.pop(storage)))
        else:
            alive[number] = draw(st.sampled_from([2, 3, 9, 10, 11, 16, 19, 32, 50])) * MIB + draw(
                st.integers(1, 4) | st.just(MIB)
            )
            found.append((number, alive[number]))
    return found


def by_bytes(found: list[tuple[int, int]], first: int) -> int:
    """The same, told of gaps in a line of bytes rather than of blocks that are linked."""
    segments: list[tuple[int, int]] = [(0, -(-first // (2 * MIB)) * 2 * MIB)] if first else []
    total = sum(size for _, size in segments)
    alive: dict[int, tuple[int, int]] = {}
    for storage, size in found:
        if size < 0:
            del alive[storage]
            continue
        size = -(-size // 512) * 512
        fits = []
        for start, length in segments:
            inside = sorted((at, at + of) for at, of in alive.values() if start <= at < start + length)
            ends = [(start, start), *inside, (start + length, start + length)]
            fits += [(b - a, a) for (_, a), (b, _) in pairwise(ends) if b - a >= size]
        if not fits:
            segments.append((total, 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB))
            fits = [(segments[-1][1], total)]
            total += segments[-1][1]
        gap, at = min(fits)
        alive[storage] = (at, size if gap - size > MIB else gap)
    return total


@given(allocations(), st.sampled_from([0, 1, 30 * MIB, 100 * MIB, 333 * MIB]))
def test_segments_are_those_of_best_fits_among_gaps(found: list[tuple[int, int]], first: int) -> None:
    assert taken(found, first) == by_bytes(found, first) >= highest(found)


def growing(state: Any, x: Tensor) -> Any:
    """A gradient through values of several sizes, which the backward frees in turn."""

    def loss_fn(w: Tensor) -> Tensor:
        loss, value = x.new_zeros(()), x
        for size in (3, 5, 2, 7, 4, 6):
            value = (value[:1024] @ w).tanh().repeat(size, 1)
            loss = loss + value.sin().sum()
        return loss

    return {"w": state["w"] - fcg.grad(loss_fn)(state["w"])}, {}


def test_most_gaps_are_gone_if_a_capture_takes_its_memory_at_once() -> None:
    lowered = fcg.graph_step(growing).lower({"w": torch.zeros(1024, 1024)}, torch.zeros(1024, 1024))
    found = events(lowered.plan)
    live = highest(found)
    assert taken(found) > 1.15 * live
    assert taken(found, at_once(lowered.plan)) < 1.05 * live
    sizes, workspace = lowered.memory_analysis(), 32 * MIB
    counted = sizes["peak"] - sizes["state"] - sizes["inputs"]
    assert live == pytest.approx(counted + workspace, rel=0.01)


def test_little_memory_is_taken_as_it_comes() -> None:
    step = fcg.graph_step(lambda state, x: ({"w": state["w"] + x.sin()}, {}))
    assert at_once(step.lower({"w": torch.zeros(2**22)}, torch.zeros(2**22)).plan) == 0
