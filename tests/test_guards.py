"""Tests that only decide whether to raise are taken as passed by a trace, and made by each replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.guarded import DECIDING, TESTED, asserted

GOOD = torch.arange(4.0)
LARGE, LOW = torch.tensor([1.0, 99.0, 3.0, 0.0]), torch.tensor([1.0, 2.0, 3.0, -99.0])


def step_of(fn: Callable[[Tensor], Tensor], **options: Any) -> Any:
    return fcg.graph_step(lambda state, x: ({"w": state["w"] + fn(x)}, {"sum": x.sum()}), **options)


@pytest.mark.parametrize("fn", TESTED)
def test_a_replay_makes_the_test(fn: Callable[[Tensor], Tensor]) -> None:
    """It raises where eager code raises, loses no state, and goes on."""
    step, state = step_of(fn), fcg.place({"w": torch.zeros(4)})
    twin = fcg.fork(state)
    for call in range(6):
        bad = (LARGE, LOW)[call % 2]
        with pytest.raises((ValueError, AssertionError)):
            step.eager(twin, bad)
        if call:
            with pytest.raises(RuntimeError, match=r"`(if|assert) .*raises, at guarded.py:\d+"):
                step(state, bad)
        state, metrics = step(state, GOOD * call / 6)
        twin, expected = step.eager(twin, GOOD * call / 6)
        assert_trees_all_equal((state, metrics), (twin, expected), f"call {call}")
    assert step.stats.captures == 1


def test_a_compiled_step_makes_the_test() -> None:
    step, state = step_of(asserted, lowering="inductor"), fcg.place({"w": torch.zeros(4)})
    for call in range(3):
        state, _ = step(state, GOOD)
        with pytest.raises(RuntimeError, match=r"guarded\.py"):
            step(state, LARGE)
        assert torch.equal(fcg.snapshot(state)["w"], GOOD * 2 * (call + 1))


@pytest.mark.parametrize("fn", DECIDING)
def test_what_decides_more_is_refused(fn: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(fcg.HostSyncError, match="guarded"):
        step_of(fn)(fcg.place({"w": torch.zeros(4)}), GOOD)
