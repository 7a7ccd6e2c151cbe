"""Buckets: what the mask marks is the batch, and a step captures one graph per size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import functional_cg as fcg


def rows(length: int, count: int = 3) -> torch.Tensor:
    return torch.arange(1.0, count * length + 1).reshape(count, length)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4).map(lambda sizes: (*sizes, 9)),
    pad=st.sampled_from([0, -100, 7]),
    axis=st.sampled_from([0, 1]),
)
def test_the_mask_gives_the_batch_back(
    lengths: list[int], sizes: tuple[int, ...], pad: int, axis: int
) -> None:
    given = [
        {"x": rows(n) if axis else rows(3, n), "y": np.arange(3 * n).reshape(3, n).T[:, :1]} for n in lengths
    ]
    if axis:
        given = [{**batch, "y": rows(n).long()} for batch, n in zip(given, lengths, strict=True)]
    else:
        given = [{**batch, "y": batch["y"][: len(batch["x"])]} for batch in given]
    batches = fcg.bucket(given, sizes=sizes, axis=axis, pad=pad)
    assert len(batches) == len(lengths)
    elements = real = 0
    for batch, before, length in zip(batches, given, lengths, strict=True):
        size = min(size for size in sizes if size >= length)
        assert batch["x"].shape[axis] == batch["y"].shape[axis] == size
        for name in ("x", "y"):
            kept = batch[name][batch["mask"]].reshape(before[name].shape)
            assert torch.equal(kept, torch.as_tensor(before[name]))
            assert (batch[name][~batch["mask"]] == pad).all()
        elements, real = elements + batch["mask"].numel(), real + int(batch["mask"].sum())
    assert batches.waste == pytest.approx(1 - real / elements)
    assert sum(batches.counts.values()) == len(lengths)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_step_has_one_capture_per_size_and_the_loss_of_the_data_alone(device: str) -> None:
    @fcg.graph_step(max_captures=2)
    def step(state: Any, batch: Any) -> Any:
        each = (batch["x"] * state["w"]).square()
        loss = (each * batch["mask"]).sum() / batch["mask"].sum()
        return {"w": state["w"] - 0.001 * loss}, {"loss": loss}

    generator = torch.Generator().manual_seed(0)
    loader = [{"x": torch.randn(4, n, generator=generator)} for n in (3, 8, 5, 2, 6, 1, 7, 4)]
    state, w = fcg.place({"w": torch.tensor(1.0, device=device)}), 1.0
    for batch, alone in zip(fcg.prefetch(fcg.bucket(loader, sizes=(8, 4)), step), loader, strict=True):
        loss = (alone["x"] * w).square().mean().item()
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
        w -= 0.001 * loss
    assert step.stats.captures == 2
    assert step.stats.replays == len(loader)
    for spec in ("f32[4,4]", "f32[4,8]"):
        assert f"batch['x']       {spec}" in step.explain()


def test_rows_know_their_own_lengths() -> None:
    batch = {"x": rows(4), "n": torch.tensor([4, 1, 3])}
    (padded,) = fcg.bucket([batch], sizes=[6], lengths="n", mask="data")
    assert padded["data"].sum(dim=1).tolist() == [4, 1, 3]
    assert padded["data"].shape == padded["x"].shape == (3, 6)
    assert padded["n"] is batch["n"]


def test_pads_have_numbers_by_key() -> None:
    batch = {"ids": rows(2).long(), "labels": rows(2).long(), "more": {"x": rows(2)}}
    (padded,) = fcg.bucket([batch], sizes=[3], pad={"labels": -100, "more": 5})
    assert [padded["ids"][0, 2], padded["labels"][0, 2], padded["more"]["x"][0, 2]] == [0, -100, 5]


def test_a_data_loader_and_its_short_last_batch() -> None:
    data = [(torch.full((2,), float(i)), i) for i in range(7)]
    batches = list(fcg.bucket(DataLoader(data, batch_size=4), sizes=[4], axis=0))
    ((x, y), mask) = batches[-1]
    assert (x.shape, y.tolist(), mask.tolist()) == ((4, 2), [4, 5, 6, 0], [True, True, True, False])


@pytest.mark.parametrize(
    ("make", "error", "said", "fixed"),
    [
        (
            lambda: fcg.bucket([{"x": rows(9)}], sizes=[4, 8]),
            fcg.LayoutError,
            r"longer than every size.*\n  batch\['x'\]  expected at most 8   got 9\n.*`sizes=\(4, 8, 9\)`",
            lambda: fcg.bucket([{"x": rows(9)}], sizes=(4, 8, 9)),
        ),
        (
            lambda: fcg.bucket([{"x": rows(2), "y": rows(3)}], sizes=[4]),
            fcg.LayoutError,
            r"differ in length along axis 1.*\n  batch\['x'\]  2\n  batch\['y'\]  3",
            lambda: fcg.bucket([{"x": rows(3), "y": rows(3)}], sizes=[4]),
        ),
        (
            lambda: fcg.bucket([torch.ones(3)], sizes=[4]),
            fcg.LayoutError,
            r"batch 0 has no tensor or array with axis 1.*\nTo fix: pass `axis=0`",
            lambda: fcg.bucket([torch.ones(3)], sizes=[4], axis=0),
        ),
        (
            lambda: fcg.bucket([{"x": rows(2), "mask": rows(2)}], sizes=[4]),
            ValueError,
            r"has a 'mask' already. To fix: name the other, `mask='padding'`",
            lambda: fcg.bucket([{"x": rows(2), "mask": rows(2)}], sizes=[4], mask="padding"),
        ),
        (
            lambda: fcg.bucket([{"x": rows(2), "n": torch.tensor([2, 3, 1])}], sizes=[4], lengths="n"),
            fcg.LayoutError,
            r"a row is longer than its batch.*\n  batch\['n'\]  expected at most 2   got 3",
            lambda: fcg.bucket([{"x": rows(2), "n": torch.tensor([2, 2, 1])}], sizes=[4], lengths="n"),
        ),
        (
            lambda: fcg.bucket([], sizes=[]),
            ValueError,
            r"sizes must be positive integers, got \[\]",
            lambda: fcg.bucket([], sizes=[1]),
        ),
        (
            lambda: fcg.bucket([], sizes=[1], axis=-1),
            ValueError,
            r"axis must not be negative, got -1. To fix: count it from the front",
            lambda: fcg.bucket([], sizes=[1], axis=2),
        ),
    ],
    ids=["long", "unequal", "no-axis", "mask", "lengths", "sizes", "axis"],
)
def test_mistakes_and_their_fixes(
    make: Callable[[], Any], error: type[Exception], said: str, fixed: Callable[[], Any]
) -> None:
    with pytest.raises(error, match=said):
        list(make())
    list(fixed())
