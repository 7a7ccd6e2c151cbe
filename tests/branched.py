"""Steps in branches on a CPU: random schedules, which a simulated replay runs in any order that they allow."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import functional_cg as fcg
from functional_cg.stages.branches.listing import Timeline, listed
from functional_cg.stages.branches.units import Memory, Unit
from functional_cg.stages.plan import Plan
from functional_cg.testing import Simulator

__all__ = ["branched", "in_any_order", "inputs", "plan_of", "schedules"]


@contextmanager
def schedules(number: int, *, in_line: bool = False) -> Iterator[None]:
    """Spread steps over as many lanes as they ask for by random durations: any legal schedule may come.

    Args:
      number: Which.
      in_line: Whether all units run on the first of two lanes: compiled for lanes, and yet in one line.
    """

    def chosen(units: Sequence[Unit], kept: frozenset[Memory], **given: Any) -> Timeline:
        if in_line:
            return replace(listed(units, 1, kept), lanes=2)
        return in_any_order(number, given["asked"], units, kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("functional_cg.stages.lower.compiled.choose", chosen)
        if number % 2:  # lanes wait for any memory
            patch.setattr("functional_cg.stages.branches.listing._MUCH", 1)
        yield


def in_any_order(number: int, lanes: int, units: Sequence[Unit], kept: frozenset[Memory]) -> Timeline:
    """Spread units over lanes by random durations; two lanes stay two if all units are on one."""
    chance = random.Random(number)
    for unit in units:
        unit.micros = chance.choice((0.0, 1.0, 5.0, 50.0))
    found = listed(units, lanes, kept)
    return replace(found, lanes=max(found.lanes, min(lanes, 2)))


def branched(fn: Any, lanes: int = 3, **options: Any) -> Any:
    """A step on simulated lanes."""
    return fcg.graph_step(fn, backend=Simulator(), branches=lanes, **options)


def plan_of(step: Any, state: Any, *given: Any) -> Plan:
    """The plan of a step for a call."""
    plan = step.lower(fcg.fork(fcg.place(state)), *given).plan
    assert isinstance(plan, Plan)
    return plan


def inputs(like: torch.Tensor, calls: int, number: int = 0) -> list[torch.Tensor]:
    """Whole numbers, other ones for each call."""
    generator = torch.Generator().manual_seed(number)
    return [torch.randint(-8, 9, like.shape, generator=generator).to(like) for _ in range(calls)]
