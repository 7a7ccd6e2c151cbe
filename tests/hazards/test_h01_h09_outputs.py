"""H01 to H09: the caller owns what a step returns, and no two returned values share memory."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.testing import Simulator, assert_no_alias, assert_trees_all_equal
from functional_cg.testing import strategies as fst
from tests.hazards.law import GPU, Place, assert_law, everywhere
from tests.shares import CALLS, few


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@few
@hypothesis.given(data=st.data())
def test_h01_random_programs_return_what_is_the_callers(data: st.DataObject) -> None:
    """Metrics that are views of leaves, of the input and of each other; leaves swapped, doubled, passed through."""
    program = data.draw(fst.step_fns())
    # An index made on the host does not reach into a tensor of the device, in eager code either.
    hypothesis.assume(not any(operation.name == "index" for operation in program.operations))
    batches = [GPU.put(program.x) * (n + 1) for n in range(CALLS)]
    assert_law(GPU, program, GPU.put(program.state), batches)


@everywhere
def test_h04_views_are_returned_as_memory_of_their_own(place: Place) -> None:
    """A leaf, a row of it, its transpose and an expansion: writing one of them changes no other."""

    def step_fn(state: Any, x: Tensor) -> Any:
        w = state["w"]
        return {"w": w + x}, {
            "w": w,
            "row": w[0],
            "turned": w.T,
            "wide": w[:1].expand(4, 3),
            "x": x,
            "again": x,
        }

    _, state, kept = assert_law(
        place,
        step_fn,
        {"w": place.randn(3, 3, seed=0)},
        [place.randn(3, 3, seed=n + 1) for n in range(CALLS)],
    )
    before = fcg.snapshot((state, kept[1:]))
    for leaf in fcg.tree.leaves(kept[0]):
        leaf.fill_(torch.nan)
        assert_trees_all_equal((state, kept[1:]), before, "the others")


@everywhere
def test_h05_what_was_returned_may_be_written(place: Place) -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        new = state["w"] * 0.5 + x
        return {"w": new}, {"old": state["w"], "new": new, "x": x}

    step = place.step(step_fn)
    state, twin = (fcg.place({"w": place.randn(3, seed=0)}) for _ in range(2))
    for n in range(CALLS):
        twin, expected = step.eager(twin, place.randn(3, seed=n + 1))
        state, metrics = step(state, place.randn(3, seed=n + 1))
        assert_trees_all_equal((state, metrics), (twin, expected), f"call {n}")
        for leaf in metrics.values():
            leaf.fill_(torch.nan)
        with pytest.raises(fcg.ReadOnlyError, match="read-only"):
            state["w"].zero_()


@everywhere
def test_h133_exports_of_what_was_returned_do_not_change(place: Place) -> None:
    """numpy and DLPack, of metrics and of leaves."""
    step = place.step(lambda s, x: ({"w": s["w"] + x}, {"x": x * 2}))
    state: Any = fcg.place({"w": place.randn(3, seed=0)})
    kept: list[Any] = []
    copies: list[Any] = []
    for n in range(CALLS):
        state, metrics = step(state, place.randn(3, seed=n + 1))
        leaf = state["w"]
        arrays = [np.asarray(metrics["x"].cpu()), leaf.detach().cpu().numpy()]
        tensors = [torch.from_dlpack(metrics["x"]), torch.from_dlpack(leaf)]
        kept.append((arrays, tensors))
        copies.append(([array.copy() for array in arrays], [tensor.clone() for tensor in tensors]))
        del leaf
    for (arrays, tensors), (array_copies, tensor_copies) in zip(kept, copies, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(arrays, array_copies, strict=True))
        assert_trees_all_equal(tensors, tensor_copies, "DLPack")
    assert_no_alias([tensors[1] for _, tensors in kept], state)


def test_the_law_notices_metrics_that_are_not_copied_out() -> None:
    """The law can fail: a backend that hands out its static metrics."""

    class Leaky(Simulator):
        def capture(self, *arguments: Any) -> Any:
            replay = super().capture(*arguments)
            replay.fresh = True
            return replay

    leaky = Place("cpu", Leaky)
    step_fn = lambda s, x: ({"w": s["w"] + x}, {"x": x * 2})  # noqa: E731
    with pytest.raises(AssertionError, match="kept metrics"):
        assert_law(leaky, step_fn, {"w": leaky.randn(3, seed=0)}, [leaky.randn(3, seed=n) for n in range(4)])
