"""Draws that share a key are found however they are written, and only where their numbers are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import functional_cg as fcg
from functional_cg.ambient.setting import in_a_backward
from functional_cg.random import bits, fold_in, split

State = dict[str, Tensor]


def state() -> State:
    return {"key": fcg.random.key(3), "n": torch.tensor(5), "w": torch.linspace(-1.0, 1.0, 16).view(4, 4)}


def pairs(draw: Callable[[State], Any]) -> tuple[tuple[str, str], ...]:
    """The draws of a read-only function that share a key."""
    found: tuple[tuple[str, str], ...] = fcg.graph_fn(draw).lower(state()).inspection.shared_keys
    return found


def written_in_between(s: State) -> Any:
    key = s["key"].clone()
    first = bits(key, 8)
    key.add_(1)
    return first, bits(key, 8)


def copies_that_part(s: State) -> Any:
    keys = [s["key"].clone() for _ in range(3)]
    for n, key in enumerate(keys):
        key[0].add_(n + 1)
    return [bits(key, 8) for key in (s["key"], *keys)]


def halves_of_one_split(s: State) -> Any:
    return [bits(key, 8) for key in split(s["key"])]


def number_and_its_negative(s: State) -> Any:
    """Numbers of another sign, which compare equal where they are zero, and of another type."""
    wide = s["n"].to(torch.float64)
    zeros = [torch.full((), zero, dtype=torch.float64) for zero in (0.0, -0.0)]
    folded = [fold_in(s["key"], torch.copysign(wide, zero).to(torch.int64)) for zero in zeros]
    return [bits(key, 8) for key in folded]


def by_the_same_number(s: State) -> Any:
    return bits(fold_in(s["key"], 1), 8), bits(fold_in(s["key"], 1), 12)


def by_the_step(s: State) -> Any:
    return bits(fold_in(s["key"], s["n"]), 8), bits(fold_in(s["key"], s["n"]), 8)


def of_equal_seeds(s: State) -> Any:
    return bits(fcg.random.key(4), 8), bits(fcg.random.key(4), 8)


def of_a_copy(s: State) -> Any:
    return bits(s["key"], 8), bits(s["key"].clone().detach(), 8)


def of_a_copy_of_what_was_written(s: State) -> Any:
    key = s["key"].clone()
    key.add_(1)
    return bits(key, 8), bits(key.detach(), 8)


def of_one_row(s: State) -> Any:
    keys = split(s["key"], 3)
    return bits(keys[1], 8), bits(keys[1], 8)


@pytest.mark.parametrize(
    ("draw", "shared"),
    [
        (written_in_between, 0),
        (copies_that_part, 0),
        (halves_of_one_split, 0),
        (number_and_its_negative, 0),
        (by_the_same_number, 1),
        (by_the_step, 1),
        (of_equal_seeds, 1),
        (of_a_copy, 1),
        (of_a_copy_of_what_was_written, 1),
        (of_one_row, 1),
    ],
)
def test_what_is_found_has_equal_numbers_and_the_rest_has_not(draw: Any, shared: int) -> None:
    words = [drawn[:8].tolist() for drawn in fcg.tree.leaves(draw(state()))]
    assert len(words) - len(set(map(tuple, words))) == shared
    assert len(pairs(draw)) == shared


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=2), st.integers(0, 1)), min_size=1, max_size=5)
)
def test_draws_are_found_exactly_if_their_numbers_are_equal(wanted: list[tuple[list[int], int]]) -> None:
    def draw(s: State) -> Any:
        drawn = []
        for path, stream in wanted:
            key = s["key"]
            for number in path:
                key = fold_in(key, number)
            drawn.append(bits(key, 8, stream=stream))
        return drawn

    seen: set[tuple[int, ...]] = set()
    again = 0
    for drawn in draw(state()):
        words = tuple(drawn.tolist())
        again += words in seen
        seen.add(words)
    assert len(pairs(draw)) == again


def with_a_mask(recompute: bool) -> Callable[[State], Any]:
    def gradient(s: State) -> Any:
        def block(w: Tensor) -> Tensor:
            return fcg.random.dropout(s["key"], w.tanh(), 0.5)

        def loss(w: Tensor) -> Tensor:
            return (checkpoint(block, w, use_reentrant=False) if recompute else block(w)).sum()

        return fcg.grad(loss)(s["w"])

    return gradient


def test_a_checkpoint_that_draws_its_mask_again_is_not_found() -> None:
    calls = [
        fcg.graph_fn(with_a_mask(recompute)).lower(state()).inspection.calls for recompute in (True, False)
    ]
    assert [number["fcg.random_bits.default"] for number in calls] == [2, 1]
    assert pairs(with_a_mask(True)) == pairs(with_a_mask(False)) == ()


def test_a_backward_is_seen() -> None:
    """Notices when torch moves the private call that tells."""
    seen = []
    x = torch.ones((), requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(in_a_backward()))
    seen.append(in_a_backward())
    torch.autograd.grad(y, x)
    seen.append(in_a_backward())
    assert seen == [False, True, False]


def test_pairs_are_named_in_the_certificate_and_beyond_eight_counted() -> None:
    def draw(s: State) -> Any:
        return [bits(s["key"], 4) for _ in range(11)]

    step = fcg.graph_fn(draw)
    inspection = step.lower(state()).inspection
    line = draw.__code__.co_firstlineno + 1
    assert inspection.shared_keys == ((f"test_keys.py:{line}", f"test_keys.py:{line}"),) * 10
    pair = f"test_keys.py:{line} and test_keys.py:{line}"
    assert f"  draws that share a key: {pair}, " in str(inspection)
    assert str(inspection).endswith("… and 2 more")
    assert "warning: … and 2 more" in step.explain()
    assert "draws that share a key: none" in str(fcg.graph_fn(halves_of_one_split).lower(state()).inspection)
