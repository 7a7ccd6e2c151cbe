"""Which part of many cases runs by default; all of them run in the profile ``thorough`` and on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import cycle, product
from typing import Any, TypeVar

import hypothesis
import pytest
import torch

__all__ = [
    "CALLS",
    "CALLS_ON_RANKS",
    "THOROUGH",
    "diagonal",
    "few",
    "on_a_host_or_a_gpu",
    "share",
    "thorough",
]

S = TypeVar("S")
T = TypeVar("T")

# Where an example is a capture and many calls, in several places: a quarter of what the profile asks for.
few = hypothesis.settings(max_examples=max(hypothesis.settings().max_examples // 4, 1))

THOROUGH = os.environ.get("FCG_HYPOTHESIS_PROFILE") == "thorough"

# With new data, of a step that has to equal its eager run: some gates open late. A GPU has its own ways to be late.
CALLS = 16 if THOROUGH or torch.cuda.is_available() else 8

# Of ranks, whose eager calls take long; each replay is that of the second call.
CALLS_ON_RANKS = CALLS if THOROUGH else 5

# Where other tests keep the same law on fewer cases.
thorough = pytest.mark.skipif(not THOROUGH, reason="of the profile `thorough`")


def share(cases: Iterable[T], one_in: int, device: str = "cpu") -> list[T]:
    """The first of each so many cases, always the same ones; all where that is cheap or asked for."""
    return list(cases)[:: 1 if THOROUGH or device == "cuda" else one_in]


def on_a_host_or_a_gpu(names: str, cases: Iterable[Any], one_in: int) -> pytest.MarkDecorator:
    """Each case on a GPU and a share of them on a host: parametrizes ``names``, and ``device``."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [
        pytest.mark.cuda,
        pytest.mark.filterwarnings("default"),
    ]  # what libraries warn of depends on the machine
    gpu = [pytest.param(*case, "cuda", marks=marks) for case in cases]
    return pytest.mark.parametrize(
        f"{names}, device", [*((*case, "cpu") for case in share(cases, one_in)), *gpu]
    )


def diagonal(firsts: Sequence[S], seconds: Sequence[T], device: str = "cpu") -> list[tuple[S, T]]:
    """Each of the first with one of the second, in turn; all pairs where that is cheap or asked for."""
    if THOROUGH or device == "cuda":
        return list(product(firsts, seconds))
    return list(zip(firsts, cycle(seconds)))
