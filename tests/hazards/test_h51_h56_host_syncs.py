"""H51 to H56: host synchronizations are refused, or replaced by work on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_close, assert_trees_all_equal
from tests.hazards.law import GPU, Place, assert_law, everywhere, on_both_devices
from tests.shares import CALLS, few

TOKENS = 3073  # one more than the sizes for which torch has a kernel that does not sort

SYNC_BY_SIZE = {
    "embedding": lambda w, i: torch.nn.functional.embedding(i % len(w), w).square().sum(),
    "index": lambda w, i: w[i % len(w)].square().sum(),
    "prod": lambda w, i: (w * 0.01 + 1).prod(0).sum() + w[0, 0] * i[0],
    # torch 2.11 differentiates it in a trace by a loop over its rows, with a dozen calls for each.
    "cumprod": lambda w, i: (w[:192] * 0.01 + 1).cumprod(0).sum() + w[0, 0] * i[0],
    "sort": lambda w, i: (w.sort(0).values * w).sum() + w[0, 0] * i[0],
}


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("op", SYNC_BY_SIZE.values(), ids=SYNC_BY_SIZE.keys())
def test_h53_ops_that_sync_for_some_sizes_are_captured_or_named(op: Any) -> None:
    """Where a kernel of this torch waits for the device, the error has its cause and nothing is lost."""

    def step_fn(state: Any, i: Tensor) -> Any:
        value, grad = fcg.value_and_grad(lambda w: op(w, i))(state["w"])
        return {"w": state["w"] - 1e-3 * grad}, {"value": value, "grad": grad}

    start = {
        "w": GPU.randn(TOKENS, 8, seed=0)
    }  # each row is taken once: no sum depends on the order of its terms
    tokens = [torch.arange(TOKENS, device=GPU.device) + n for n in range(CALLS)]
    step = GPU.step(step_fn)
    refused: tuple[Any, ...] = ()
    try:
        step(start, tokens[0].clone())
    except fcg.CaptureError as error:
        refused = (error.__cause__,)
    if not refused:
        assert_law(GPU, step_fn, start, tokens)
        return
    assert refused[0] is not None
    assert not torch.cuda.is_current_stream_capturing()
    assert_trees_all_equal(start, {"w": GPU.randn(64, 8, seed=0)})
    assert_law(GPU, lambda s, x: ({"w": s["w"] + x}, {}), start, [GPU.randn(64, 8, seed=1)])


@everywhere
def test_h54_clipping_stays_on_the_device_and_returns_the_norm(place: Place) -> None:
    """torch.nn.utils.clip_grad_norm_ is the judge."""

    def loss_of(p: Any, x: Tensor) -> Tensor:
        return (x @ p["w"] + p["b"]).square().mean()

    def step_fn(state: Any, x: Tensor) -> Any:
        grads = fcg.grad(loss_of)(state.params, x)
        return state.apply_gradients(grads), {"norm": fcg.optim.global_norm(grads)}

    params = {"w": place.randn(3, 2, seed=0), "b": place.randn(2, seed=1) / 50}
    optimizer = fcg.optim.chain(fcg.optim.clip_by_global_norm(0.5), fcg.optim.sgd(0.1))
    state = fcg.TrainState.create(params=params, optimizer=optimizer)
    batches = [place.randn(5, 3, seed=10 + n) * (n % 4) for n in range(CALLS)]
    judges = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in params.items()}
    norms = []
    for x in batches:
        loss_of(judges, x).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(judges.values(), 0.5))
        with torch.no_grad():
            for leaf in judges.values():
                leaf -= 0.1 * leaf.grad  # type: ignore[operator]
                leaf.grad = None
    _, after, kept = assert_law(place, step_fn, fcg.snapshot(state), batches)
    assert_trees_all_close([metrics["norm"].float() for metrics in kept], norms)
    assert_trees_all_close(after.params, {name: leaf.detach() for name, leaf in judges.items()})
    assert {bool(norm > 0.5) for norm in norms} == {True, False}


def skipping(state: Any, x: Tensor) -> Any:
    """A step that goes back to the old state where the loss is not finite; ``seen`` counts all calls."""
    key = fcg.random.fold_in(state["key"], state["n"])
    loss, grad = fcg.value_and_grad(lambda w: (fcg.random.dropout(key, x, 0.25) @ w).square().mean())(
        state["w"]
    )
    moment = 0.9 * state["moment"] + grad
    w = state["w"] - 0.05 * moment
    new = {
        "w": w,
        "moment": moment,
        "ema": state["ema"].lerp(w, 0.1),
        "key": state["key"],
        "n": state["n"] + 1,
    }
    finite = torch.isfinite(loss) & torch.isfinite(grad).all()
    old = {name: state[name] for name in new}
    kept = fcg.tree.map(lambda new, old: torch.where(finite, new, old), new, old)
    return {**kept, "seen": state["seen"] + 1}, {"skipped": ~finite}


@everywhere
@few
@given(bad=st.sets(st.integers(0, CALLS - 1), max_size=6), value=st.sampled_from([torch.nan, torch.inf]))
def test_h55_a_step_that_is_skipped_leaves_the_whole_tree(place: Place, bad: set[int], value: float) -> None:
    """H121 too: counter, moments, average and key go on as if the bad batches had never been."""

    def count() -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=place.device)

    w = place.randn(3, 2, seed=0)
    start = {
        **{
            "w": w,
            "moment": torch.zeros_like(w),
            "ema": w.clone(),
            "key": fcg.random.key(1).to(place.device),
        },
        **{"n": count(), "seen": count()},
    }
    batches = [place.randn(4, 3, seed=n + 1) for n in range(CALLS)]
    good = [batch.clone() for n, batch in enumerate(batches) if n not in bad]
    for n in bad:
        batches[n][1, 1] = value
    _, after, kept = assert_law(place, skipping, start, batches)
    assert [n for n, metrics in enumerate(kept) if metrics["skipped"]] == sorted(bad)
    assert int(after["seen"]) == CALLS
    without = fcg.place(start)
    step = place.step(skipping)
    for batch in good:
        without, _ = step.eager(without, batch)
    same = {name: leaf for name, leaf in fcg.snapshot(without).items() if name != "seen"}
    place.assert_same({name: after[name] for name in same}, same, "as if they had never been")


@contextmanager
def op_with_an_epoch() -> Iterator[Any]:
    """A kernel that is told by the host how often it has run: a replay repeats the number of the capture."""
    epochs = iter(range(10_000))
    with torch.library._scoped_library("fcg_hazards", "FRAGMENT") as library:
        library.define("epoch(Tensor x) -> Tensor")

        def kernel(x: Tensor) -> Tensor:
            return x + next(epochs)

        for key in ("CPU", "CUDA"):
            library.impl("epoch", kernel, key)
        library.impl("epoch", torch.empty_like, "Meta")
        yield torch.ops.fcg_hazards.epoch.default


@on_both_devices
def test_h56_a_kernel_with_hidden_state_is_found_by_verify(place: Place) -> None:
    with op_with_an_epoch() as epoch:
        step = place.step(lambda s, x: ({"w": s["w"] + 1}, {"out": epoch(x)}), debug="verify")
        state = fcg.place({"w": place.randn(3, seed=0)})
        with pytest.raises(
            fcg.CaptureError, match=r"replay differs from the eager run(.|\n)*metrics\['out'\]"
        ):
            step(state, place.randn(3, seed=1))
        assert state.latest().generation == 1
