"""Static arguments choose a capture by all that they hold, whatever their own ``==`` leaves out."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import functional_cg as fcg


@dataclass(frozen=True)
class Config:
    depth: int = 2
    scale: float = field(default=1.0, compare=False)


@dataclass(frozen=True)
class Extra:
    depth: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", 1.0)


@dataclass(frozen=True, slots=True)
class Slotted:
    depth: int = 2
    scale: float = field(default=1.0, compare=False)


def extra(scale: float) -> Extra:
    made = Extra()
    object.__setattr__(made, "scale", scale)
    return made


def at(fold: int) -> datetime.datetime:
    return datetime.datetime(2020, 10, 25, 2, 30, fold=fold, tzinfo=datetime.UTC)


PAIRS: dict[str, tuple[Any, Any, Any]] = {
    "a field that is not compared": (Config(scale=1.0), Config(scale=5.0), lambda c: c.scale),
    "in a tuple": ((Config(scale=1.0),), (Config(scale=5.0),), lambda c: c[0].scale),
    "of slots": (Slotted(scale=1.0), Slotted(scale=5.0), lambda c: c.scale),
    "an attribute that is no field": (extra(1.0), extra(5.0), lambda c: c.scale),
    "a range": (range(0, 3, 2), range(0, 4, 2), lambda c: c.stop),
    "a time": (at(0), at(1), lambda c: c.fold),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_what_its_own_comparison_leaves_out_is_seen(pair: str) -> None:
    one, other, read = PAIRS[pair]
    assert one == other
    step = fcg.graph_step(
        lambda s, x, *, cfg: ({"w": s["w"] + x * read(cfg)}, {}), static_argnames=("cfg",), max_captures=3
    )
    state = fcg.place({"w": torch.zeros(())})
    expected = 0.0
    for cfg in (one, other, one, other):
        state, _ = step(state, torch.ones(()), cfg=cfg)
        expected += float(read(cfg))
        assert float(state["w"]) == expected
    assert step.stats.captures == 2


def test_equal_ones_share_a_capture() -> None:
    step = fcg.graph_step(lambda s, x, *, cfg: ({"w": s["w"] + x * cfg.scale}, {}), static_argnames=("cfg",))
    state = fcg.place({"w": torch.zeros(())})
    for _ in range(3):
        state, _ = step(state, torch.ones(()), cfg=Config(scale=2.0))
    assert step.stats.captures == 1
    for _ in range(3):
        state, _ = step(state, torch.ones(()), cfg=Config(scale=2.0))
    assert (step.stats.captures, float(state["w"])) == (1, 12.0)


@pytest.mark.parametrize(
    "make", [lambda: float("nan"), lambda: complex(0, float("nan")), lambda: (1, float("nan"))]
)
def test_what_is_no_number_is_the_same_each_time(make: Any) -> None:
    step = fcg.graph_fn(lambda x, scale: 2 * x, static_argnames="scale")
    for _ in range(4):
        step(torch.ones(2), scale=make())
    assert step.stats.captures == 1
