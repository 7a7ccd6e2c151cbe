"""H10 to H29: inputs are copied, and only if they match what the step was captured for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from functional_cg.testing import strategies as fst
from tests.hazards.law import CPU, Place, as_it_is, assert_law, everywhere, living_tensors
from tests.shares import CALLS, few

SHAPE = (4, 1, 3)
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8,
    torch.bool, torch.complex64,
)  # fmt: skip


def add(state: Any, x: Tensor) -> Any:
    return {"sum": state["sum"] + x.sum()}, {"x": x}


def zero(place: Place, dtype: torch.dtype = torch.float32) -> Any:
    return fcg.place({"sum": torch.zeros((), dtype=dtype, device=place.device)})


@everywhere
def test_h11_what_the_caller_keeps_stays_as_it_was(place: Place) -> None:
    """The first batch and the first state are no static buffers, and neither is any other."""
    mine = {"w": place.randn(2, 3, seed=0), "n": torch.zeros((), dtype=torch.int64, device=place.device)}
    batches = [place.randn(2, 3, seed=n) for n in range(CALLS)]
    before = fcg.snapshot((mine, batches))
    step = place.step(lambda s, x: ({"w": s["w"] * 0.5 + x, "n": s["n"] + 1}, {"x": x.T}))
    state: Any = mine
    for batch in batches:
        state, _ = step(state, batch)
    assert_trees_all_equal((mine, batches), before, "kept")
    assert step.stats.replays == int(state["n"]) == CALLS


@everywhere
@few
@given(views=st.lists(st.sampled_from(["as it is", "transposed", "written"]), min_size=CALLS, max_size=CALLS))
def test_h12_one_address_is_read_anew_at_each_call(place: Place, views: list[str]) -> None:
    step, state = place.step(lambda s, x: (s, {"x": x * 2})), zero(place)
    buffer = place.randn(3, 3, seed=0)
    for number, view in enumerate(views):
        if view == "written":
            buffer.fill_(number)
        x = buffer.T if view == "transposed" else buffer
        state, metrics = step(state, x)
        assert_trees_all_equal(metrics["x"], x.clone() * 2, f"call {number}")


@as_it_is
@few
@given(other=st.lists(st.integers(0, 4), max_size=4).map(tuple))
def test_h13_no_shape_is_broadcast(place: Place, other: tuple[int, ...]) -> None:
    """Shapes of one element and those that broadcast either way are among the drawn ones."""
    assume(other != SHAPE)
    step = place.step(add)
    state, _ = step(zero(place), torch.ones(SHAPE, device=place.device))
    with pytest.raises(fcg.LayoutError, match=r"x  expected f32\[4,1,3\]"):
        step(state, torch.ones(other, device=place.device))
    state, metrics = step(state, torch.full(SHAPE, 2.0, device=place.device))
    assert float(state["sum"]) == 3 * math.prod(SHAPE)
    assert bool((metrics["x"] == 2).all())


@as_it_is
@pytest.mark.parametrize("expected", DTYPES, ids=str)
def test_h14_no_dtype_is_cast(place: Place, expected: torch.dtype) -> None:
    """Every pair of dtypes, also those where each value fits."""
    step = place.step(lambda s, x: (s, {"x": x}))
    state, _ = step(zero(place), torch.ones(3, dtype=expected, device=place.device))
    for other in DTYPES:
        x = torch.ones(3, dtype=other, device=place.device)
        if other is expected:
            state, metrics = step(state, x)
            assert_trees_all_equal(metrics["x"], x)
        else:
            with pytest.raises(fcg.LayoutError, match=r"x  expected \w+\[3\]"):
                step(state, x)
    assert step.stats.replays == 2


@as_it_is
@few
@given(rows=st.lists(st.sampled_from([8, 5]), min_size=CALLS, max_size=CALLS))
def test_h15_no_tail_of_an_earlier_batch_is_left(place: Place, rows: list[int]) -> None:
    """A shorter batch is refused; with a graph of its own, it is read to its own end."""
    strict, two = place.step(add), place.step(add, max_captures=2)
    state, other = zero(place), zero(place)
    state, _ = strict(state, torch.full((8,), 100.0, device=place.device))
    with pytest.raises(fcg.LayoutError, match="pad the last batch or drop it"):
        strict(state, torch.ones(5, device=place.device))
    total = 0.0
    for number, size in enumerate(rows):
        other, metrics = two(other, torch.full((size,), float(number), device=place.device))
        total += size * number
        assert metrics["x"].tolist() == [float(number)] * size
        assert float(other["sum"]) == total


@everywhere
@few
@given(x=fst.like(torch.zeros(SHAPE)))
def test_h16_strides_and_offsets_do_not_matter(place: Place, x: Tensor) -> None:
    step, state = place.step(add), zero(place)
    there = torch.empty_strided(x.shape, x.stride(), device=place.device).copy_(x)
    for value in (there, there.contiguous(), there[:, :, :]):
        state, metrics = step(state, value)
        assert_trees_all_equal(metrics["x"], x.to(place.device), "x")


@everywhere
@few
@given(axes=st.lists(st.booleans(), min_size=3, max_size=3), scale=st.integers(1, 9))
def test_h17_expanded_inputs_are_copied_out_dense(place: Place, axes: list[bool], scale: int) -> None:
    step, state = place.step(add), zero(place)
    small = tuple(1 if expanded else side for expanded, side in zip(axes, (4, 2, 3), strict=True))
    for factor in (scale, scale + 1):
        x = (torch.arange(math.prod(small)).reshape(small) * float(factor)).to(place.device).expand(4, 2, 3)
        state, metrics = step(state, x)
        assert_trees_all_equal(metrics["x"], x.clone(), "x")


@everywhere
def test_h17_a_state_that_overlaps_itself_is_refused(place: Place) -> None:
    with pytest.raises(fcg.AliasError, match=r"overlaps itself(.|\n)*\['b'\]"):
        fcg.place({"b": torch.ones(3, device=place.device).expand(4, 3)})
    state = fcg.place({"b": torch.ones(3, device=place.device).expand(4, 3).clone()})  # the fix
    assert state["b"].shape == (4, 3)


@everywhere
def test_h18_host_leaves_are_staged_and_other_devices_are_refused(place: Place) -> None:
    def step_fn(state: Any, batch: Any) -> Any:
        return {"sum": state["sum"] + batch["x"].sum() + batch["y"].sum()}, batch

    step, state, total = place.step(step_fn), zero(place), 0.0
    for number in range(CALLS):
        kinds = [torch.full((3,), number * 1.0), np.full(3, number, dtype=np.float32)]
        kinds += [torch.full((3,), number * 1.0, device=place.device)]
        x, y = kinds[number % 3], kinds[(number + 1) % 3]
        state, metrics = step(state, {"x": x, "y": y})
        total += 6 * number
        assert float(state["sum"]) == total
        assert all(leaf.device.type == place.device for leaf in metrics.values())
    with pytest.raises(fcg.LayoutError, match=r"@meta"):
        step(state, {"x": torch.ones(3, device="meta"), "y": torch.ones(3)})
    assert step.stats.captures == 1


# -- constants --------------------------------------------------------------------------------------------------------

TABLE = torch.ones(3)


def rebound_global() -> Any:
    return lambda: TABLE, (TABLE,), "TABLE", lambda new: globals().__setitem__("TABLE", new)


def rebound_cell() -> Any:
    table = torch.ones(3)

    def change(new: Tensor) -> None:
        nonlocal table
        table = new

    return lambda: table, (table,), "table", change


def rebound_attribute() -> Any:
    class Config:
        mask = torch.ones(3)

    config = Config()
    return lambda: config.mask, (config.mask,), "config.mask", lambda new: setattr(config, "mask", new)


def rebound_item() -> Any:
    tables = [torch.ones(3)]
    return lambda: tables[0], (tables,), "tables[0]", lambda new: tables.__setitem__(0, new)


@pytest.mark.parametrize("case", [rebound_global, rebound_cell, rebound_attribute, rebound_item])
def test_h25_a_constant_that_is_bound_anew_is_loud(case: Any) -> None:
    """The graph has a copy of the tensor that the name led to."""
    read, constants, name, bind = case()
    old = read()

    def step_fn(state: Any, x: Tensor) -> Any:
        return state, state["w"] * read()

    step = fcg.graph_step(step_fn, constants=constants)
    state, _ = step({"w": torch.ones(3)}, torch.ones(1))
    bind(torch.zeros(3))
    try:
        with pytest.raises(fcg.BakedValueError) as caught:
            step(state, torch.ones(1))
        assert f"\n  {name}  traced the tensor f32[3]@cpu   now the tensor f32[3]@cpu\n" in str(caught.value)
        assert "\nTo fix: a declared constant stays the tensor that it was" in str(caught.value)
        again = fcg.graph_step(step_fn, constants=(read(),))  # the fix: another step
        assert again(state, torch.ones(1))[1].tolist() == [0.0, 0.0, 0.0]
    finally:
        bind(old)


def test_h25_a_constant_changed_behind_torch_is_for_verify() -> None:
    """Documented: a write into ``.data`` leaves no mark; the step keeps its copy, and ``debug="verify"`` finds it."""
    table = torch.ones(3)
    fn = lambda s, x: (s, s["w"] * table)  # noqa: E731
    step, checked = (fcg.graph_step(fn, constants=(table,), debug=debug) for debug in (None, "verify"))
    (state, _), (other, _) = (one({"w": torch.ones(3)}, torch.ones(1)) for one in (step, checked))
    table.data.fill_(0)
    state, seen = step(state, torch.ones(1))
    assert seen.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(fcg.CaptureError, match="replay differs from the eager run"):
        checked(other, torch.ones(1))
    table.data = torch.zeros(3)
    with pytest.raises(fcg.BakedValueError, match=r"constants\[0\]  has other memory since"):
        step(state, torch.ones(1))


@pytest.mark.parametrize(
    "other", [lambda t: t[2:], lambda t: t[:1], lambda t: t[:3:2], lambda t: t[:2].view(torch.int32)]
)
def test_h25_a_constant_set_to_another_part_of_its_memory_is_noticed(other: Any) -> None:
    """``table.data = ...`` counts as no write, and the memory is the same."""
    memory = torch.arange(4.0)
    table = memory[:2]
    step = fcg.graph_step(lambda s, x: (s, s["w"] * table.sum()), constants=(table,))
    state, _ = step({"w": torch.ones(3)}, torch.ones(1))
    state, seen = step(state, torch.ones(1))
    assert seen.tolist() == [1.0, 1.0, 1.0]
    table.data = other(memory)
    with pytest.raises(fcg.BakedValueError, match=r"constants\[0\]  is another part of its memory since"):
        step(state, torch.ones(1))


def written(state: Any, batch: Any) -> Any:
    """Reads before and after it writes: by a view, another view, and through a second name of a tensor."""
    x, rows, before = batch["x"], batch["x"][1:], batch["x"] * 2
    x.mul_(3)
    rows.t().add_(state["w"][1:])
    batch["n"] += 1
    batch["same"][batch["mask"]] = 0
    metrics = {"x": x, "row": rows[0], "before": before, "n": batch["n"], "untouched": batch["y"]}
    return {"w": state["w"] + x.sum(1) + batch["same"].sum(0)[0]}, metrics


@everywhere
def test_h26_a_batch_written_in_place_is_the_steps_own_copy(
    place: Place, recwarn: pytest.WarningsRecorder
) -> None:
    """Documented: each call starts from what it was passed, and the caller's tensors stay as they were."""
    step, twin = place.step(written), place.step(written)
    state, other = (fcg.place({"w": torch.ones(3, device=place.device)}) for _ in range(2))
    for number in range(CALLS):
        x = place.randn(3, 2, seed=number)
        batch = {"x": x, "same": x, "y": x + 1, "mask": x > 0, "n": number}
        before = fcg.snapshot({name: value for name, value in batch.items() if name != "n"})
        state, metrics = step(state, batch)
        other, expected = twin.eager(other, batch)
        place.assert_same((fcg.snapshot(state), metrics), (fcg.snapshot(other), expected))
        assert int(metrics["n"]) == number + 1
        assert_trees_all_equal({name: batch[name] for name in before}, before, f"batch {number}")
    assert step.stats.replays == CALLS
    (said,) = [text for one in recwarn if "its own copy" in (text := str(one.message))]
    assert "`batch['n']`, `batch['same']`, `batch['x']`: the step writes in place" in said
    assert step.lower(state, batch).inspection.copied == ("batch['n']", "batch['same']", "batch['x']")


# -- states -----------------------------------------------------------------------------------------------------------

slices = st.builds(slice, st.integers(0, 11), st.integers(0, 12), st.integers(1, 3))


@given(first=slices, second=slices)
def test_h28_two_views_are_refused_exactly_if_they_share_a_byte(first: slice, second: slice) -> None:
    flat = torch.arange(12.0)
    shared = set(flat[first].tolist()) & set(flat[second].tolist())
    if shared:
        with pytest.raises(fcg.AliasError, match=r"state\['a'\](.|\n)*state\['b'\]"):
            fcg.place({"a": flat[first], "b": flat[second]})
    else:
        state = fcg.place({"a": flat[first], "b": flat[second]})
        assert_trees_all_equal(state, {"a": flat[first], "b": flat[second]})


@everywhere
def test_h29_no_autograd_graph_is_kept(place: Place) -> None:
    """A new leaf that still has a graph is committed without it, and memory is flat."""

    def step_fn(state: Any, x: Tensor) -> Any:
        with torch.enable_grad():
            w = state["w"].clone().requires_grad_()
            loss = torch.tanh(w * x).sum()
            (g,) = torch.autograd.grad(loss, w, create_graph=True)
            return {"w": w - 0.1 * g}, {"loss": loss, "g": g}

    def batches(calls: int) -> list[Tensor]:
        return [place.randn(64, seed=n) for n in range(calls)]

    step, state, kept = assert_law(place, step_fn, {"w": place.randn(64, seed=99)}, batches(CALLS))
    assert not state["w"].requires_grad
    assert not any(metrics["loss"].requires_grad or metrics["g"].requires_grad for metrics in kept)
    del kept
    tensors = 0
    for number in range(100):
        state, metrics = step(state, place.randn(64, seed=number))
        if number == 10:
            tensors = living_tensors()
    del metrics
    assert living_tensors() <= tensors


def test_h46_a_scalar_of_the_host_in_a_state_is_named_by_its_device() -> None:
    """A state lives on one device; where it does not, each leaf of another one is listed."""
    with pytest.raises(fcg.LayoutError, match=r"(?s)state\['lr'\].*@meta"):
        fcg.place({"w": torch.ones(3), "lr": torch.tensor(1e-3, device="meta")})
    assert CPU.step(lambda s, x: (s, {"lr": s["lr"] * 1}))({"w": torch.ones(3), "lr": 1e-3}, 0)[1]["lr"] > 0
