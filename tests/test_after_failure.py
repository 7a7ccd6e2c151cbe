"""A failed call leaves nothing behind: no layout, no capture, no workspace, no tensor without values."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.stages.run.capture import CPUBackend, CUDABackend
from functional_cg.stages.trace.strays import Stray
from functional_cg.testing import assert_trees_all_equal

# -- layouts -----------------------------------------------------------------------------------------------------------


def train(state: Any, x: Tensor) -> Any:
    return {"w": state["w"] + x.sum()}, {}


def a_state() -> Any:
    return fcg.place({"w": torch.zeros(3)})


class Small(CPUBackend):
    """Has no memory for large batches."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.made: list[Any] = []

    def capture(self, plan: Any, buffers: Any, scratch: Any) -> Any:
        if buffers.inputs[0].numel() > 32:
            raise self.error
        self.made.append(super().capture(plan, buffers, scratch))
        return self.made[-1]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        fcg.RankError("waited"),
        KeyboardInterrupt(),
        SystemExit(1),
    ],
)
def test_a_layout_that_could_not_be_captured_takes_no_place(error: BaseException) -> None:
    """Try 64, then 32: as everybody does who looks for the largest batch."""
    step, state = fcg.graph_step(train, backend=Small(error)), a_state()
    for size in (128, 64, 64):
        with pytest.raises(type(error)):
            step(state, torch.ones(size))
        assert (step.stats.captures, step._captured, step._lowered) == (0, {}, {})
    state, _ = step(state, torch.ones(32))
    state, _ = step(state, torch.ones(32))
    assert state["w"].tolist() == [64.0] * 3
    with pytest.raises(fcg.LayoutError, match="than it was captured for"):
        step(state, torch.ones(16))


@pytest.mark.parametrize("error", [IndexError, KeyboardInterrupt])
def test_a_layout_whose_first_call_fails_takes_no_place(error: type[BaseException]) -> None:
    class Failing(CPUBackend):
        def capture(self, *args: Any) -> Any:
            replay = super().capture(*args)
            if args[1].inputs[0].numel() > 32:
                replay.run = fails
            return replay

    def fails(before: Any) -> Any:
        raise error

    step, state = fcg.graph_step(train, backend=Failing()), a_state()
    with pytest.raises(error):
        step(state, torch.ones(64))
    assert (step._captured, step._lowered) == ({}, {})
    state, _ = step(state, torch.ones(32))
    assert state["w"].tolist() == [32.0] * 3


def test_a_layout_that_was_lowered_only_takes_no_place() -> None:
    step, state = fcg.graph_step(train), a_state()
    for size in (64, 48):
        step.lower(state, torch.ones(size))
    state, _ = step(state, torch.ones(32))
    assert state["w"].tolist() == [32.0] * 3
    with pytest.raises(fcg.LayoutError, match="than it was captured for"):
        step.lower(state, torch.ones(64))


def test_a_layout_that_was_captured_on_demand_takes_its_place() -> None:
    step, state = fcg.graph_step(train), a_state()
    step.lower(state, torch.ones(64)).capture()
    with pytest.raises(fcg.LayoutError, match="than it was captured for"):
        step(state, torch.ones(32))


def test_another_arena_that_fails_takes_nothing_with_it() -> None:
    """The plan runs on one state; its capture for a second one fails."""
    failing: list[bool] = []

    class Backend(CPUBackend):
        def capture(self, *args: Any) -> Any:
            if failing:
                raise torch.OutOfMemoryError
            return super().capture(*args)

    step, state = fcg.graph_step(train, backend=Backend()), a_state()
    state, _ = step(state, torch.ones(4))
    failing.append(True)
    with pytest.raises(torch.OutOfMemoryError):
        step(fcg.fork(state), torch.ones(4))
    state, _ = step(state, torch.ones(4))
    assert (step.stats.traces, step.stats.captures) == (1, 1)
    assert state["w"].tolist() == [8.0] * 3


def test_a_call_that_fails_keeps_the_captures_that_have_run_and_no_other() -> None:
    failing: list[bool] = []

    class Backend(CPUBackend):
        def capture(self, *args: Any) -> Any:
            replay = super().capture(*args)
            run = replay.run

            def runs(before: Any) -> Any:
                if failing:
                    raise IndexError
                return run(before)

            replay.run = runs
            return replay

    @fcg.graph_step(backend=Backend(), static_argnames="how")
    def step(state: Any, x: Tensor, *, how: str) -> Any:
        return train(state, x)

    state, _ = step(a_state(), torch.ones(4), how="slowly")
    failing.append(True)
    for one in (state, fcg.fork(state), state):
        with pytest.raises(IndexError):
            step(one, torch.ones(4), how="slowly")
        assert len(step._captured) == 1
    failing.clear()
    state, _ = step(state, torch.ones(4), how="slowly")
    assert (step.stats.traces, step.stats.captures, state["w"].tolist()) == (1, 2, [8.0] * 3)


def test_static_arguments_that_fail_take_no_place() -> None:
    @fcg.graph_step(static_argnames=("how",))
    def step(state: Any, *, how: int) -> Any:
        return {"w": state["w"] + 1 / how}, {}

    state = a_state()
    for _ in range(20):
        with pytest.raises(fcg.CaptureError, match="ZeroDivisionError"):
            step(state, how=0)
    small = fcg.graph_step(
        lambda s, x, *, how: ({"w": s["w"] + x.sum() * how}, {}),
        static_argnames=("how",),
        backend=Small(torch.OutOfMemoryError()),
    )
    for how in range(20):
        with pytest.raises(torch.OutOfMemoryError):
            small(state, torch.ones(64), how=how)
    state, _ = small(state, torch.ones(2), how=2)
    assert state["w"].tolist() == [4.0] * 3


# -- caches ------------------------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Makes its table at the first call, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            angles = torch.outer(torch.arange(3.0), 10.0 ** -torch.arange(4.0))
            angles[0] += 1.0  # in place, as such code does
            self.table = torch.stack([angles.cos(), angles.sin()])
        cos, sin = self.table.unbind(0)
        return x * self.scale * cos + x.flip(-1) * sin


@functools.lru_cache
def cached(n: int) -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0, 4.0]).repeat(n, 1).cumsum(0)


KNOWN: dict[str, Any] = {}


def known(x: Tensor) -> Tensor:
    if "pair" not in KNOWN:
        KNOWN["pair"] = (torch.linspace(0, 1, 4), [torch.full((3, 1), 2.0)])
    row, (column,) = KNOWN["pair"]
    return x * row + column


ROTARY = Rotary()
MODELS: dict[str, Callable[[Tensor], Tensor]] = {
    "lru_cache": lambda x: x * cached(3),
    "a dict": known,
    "an attribute": lambda x: ROTARY(x).detach(),
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a value that is asked for": lambda y: y * y.sum().item(),
    "an error of the user's": lambda y: y @ y,
    "a random number": lambda y: y + torch.rand(3, 4),
}


@pytest.mark.parametrize("ends", REFUSED)
@pytest.mark.parametrize("model", MODELS)
def test_what_a_refused_trace_leaves_in_caches_has_values(model: str, ends: str) -> None:
    """Whatever it was refused for: the plain model then computes what it would have computed."""
    cached.cache_clear()
    KNOWN.clear()
    ROTARY.table = None
    x, forward = torch.arange(12.0).reshape(3, 4), MODELS[model]
    expected = forward(x)
    cached.cache_clear()
    KNOWN.clear()
    ROTARY.table = None

    @fcg.graph_step(constants=tuple(ROTARY.parameters()))
    def step(state: Any, x: Tensor) -> Any:
        def loss(w: Tensor) -> Tensor:
            return REFUSED[ends](forward(w * x)).sum()

        return {"w": state["w"] - fcg.grad(loss)(state["w"])}, {}

    state = fcg.place({"w": torch.ones(3, 4)})
    with pytest.raises(fcg.FunctionalCGError) as first:
        step(state, x)
    assert_trees_all_equal(forward(x), expected)
    y = x.clone().requires_grad_()
    forward(y).sum()
    with pytest.raises(fcg.FunctionalCGError):  # what is kept there may be foreign to the step
        step(state, x)
    assert_trees_all_equal(forward(x), expected)
    assert state["w"].eq(1).all()
    del first


def test_all_ways_to_read_a_stray() -> None:
    kept: list[Tensor] = []
    also: list[weakref.ref[Tensor]] = []

    def step(state: Any, x: Tensor) -> Any:
        kept.append(torch.arange(4.0) * 2)
        also.append(weakref.ref(kept[-1]))  # else it would become an ordinary tensor
        return state, {"y": x * kept[-1]}

    with pytest.raises(fcg.SideEffectError, match="keeps"):
        fcg.graph_step(step)(a_state(), torch.ones(4))
    stray, real = kept[0], torch.arange(4.0) * 2
    assert type(stray) is Stray
    assert (stray.shape, stray.dtype, stray.device) == (real.shape, real.dtype, real.device)
    assert torch.equal(stray, real)
    assert stray.tolist() == real.tolist()
    assert np.array_equal(stray.numpy(), real.numpy())
    assert np.array_equal(np.from_dlpack(stray), real.numpy())
    assert float(stray[1]) == 2.0
    assert repr(stray) == repr(real)
    assert torch.equal(copy.deepcopy(stray), real)
    assert torch.equal(torch.stack([stray, stray])[0], real)
    assert torch.equal(nn.functional.linear(torch.ones(1, 4), stray[None]), torch.full((1, 1), 12.0))
    w = torch.ones(4, requires_grad=True)
    (w * stray).sum().backward()
    assert torch.equal(w.grad, real)
    stray.add_(1)
    assert torch.equal(stray, real + 1)


def test_what_was_made_of_inputs_has_no_values_and_says_so() -> None:
    kept: list[Tensor] = []

    def step(state: Any, x: Tensor) -> Any:
        kept.append(x * 2)
        return state, {}

    with pytest.raises(fcg.SideEffectError, match="keeps"):
        fcg.graph_step(step)(a_state(), torch.ones(4))
    for use in (lambda t: t + 1, lambda t: t.tolist(), lambda t: t.numpy(), lambda t: float(t.sum())):
        with pytest.raises(
            fcg.SideEffectError, match=r"`step`: a tensor of a call that was refused is used; it has no"
        ):
            use(kept[0])
    assert repr(kept[0]) == "<a tensor of a refused trace, f32[4]@cpu>"
    kept[0] = torch.zeros(4)  # the fix: clear what keeps it
    assert (kept[0] + 1).tolist() == [1.0] * 4


def test_a_trace_that_was_fine_leaves_no_strays() -> None:
    def strays() -> int:
        return sum(type(one) is Stray for one in gc.get_objects())

    before, step = strays(), fcg.graph_step(train)
    step(a_state(), torch.ones(4))
    assert strays() == before


# -- workspaces --------------------------------------------------------------------------------------------------------

MIB = 2**20


def products(state: Any, x: Tensor) -> Any:
    return {"w": state["w"] + (x @ x).sum()}, {}


@pytest.fixture
def few_memory() -> Iterator[None]:
    """Other tests share the GPU."""
    torch.cuda.set_per_process_memory_fraction(0.1)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def too_large(state: Any, x: Tensor) -> Any:
    """No compiler gets by without the memory of a product."""
    rows = x.new_zeros(1 << 30, x.shape[0])
    return {"w": state["w"] + (rows @ x).sum()}, {}


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
@pytest.mark.parametrize("where", ["in the warm-up", "in the capture"])
def test_twenty_failures_leave_no_workspaces(where: str, lowering: Any) -> None:
    """cuBLAS has one of some 30 MB for each stream; nobody but the library clears them here."""
    x, state = torch.ones(512, 512, device="cuda"), fcg.place({"w": torch.zeros((), device="cuda")})
    state, _ = fcg.graph_step(products, lowering=lowering)(
        state, x
    )  # what torch and its compiler keep for ever
    with torch.library._scoped_library("fcg_failures", "FRAGMENT") as library:
        library.define("fails(Tensor x) -> Tensor")

        def kernel(x: Tensor) -> Tensor:
            if torch.cuda.is_current_stream_capturing():
                raise ValueError("not in a capture")
            return x.clone()

        library.impl("fails", kernel, "CUDA")
        library.impl("fails", torch.empty_like, "Meta")
        op = torch.ops.fcg_failures.fails.default

        def fails(state: Any, x: Tensor) -> Any:
            return {"w": state["w"] + op(x @ x).sum()}, {}

        fn = too_large if where == "in the warm-up" else fails
        levels = []
        for _ in range(20):
            with pytest.raises((fcg.CaptureError, torch.OutOfMemoryError, RuntimeError)):
                fcg.graph_step(fn, lowering=lowering, certify=False)(state, x)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            levels.append(torch.cuda.memory_reserved())
    assert levels[-1] - levels[0] <= 4 * MIB, [level // MIB for level in levels]
    state, _ = fcg.graph_step(products, lowering=lowering)(state, x)
    assert float(state["w"]) == 2 * 512.0**3


@pytest.mark.cuda
def test_what_a_failed_trial_put_back_comes_before_what_is_read_next() -> None:
    x = torch.zeros((), device="cuda")

    def trial() -> None:
        with CUDABackend(x.device).aside():
            torch.cuda._sleep(500_000_000)
            x.fill_(1.0)
            raise ValueError("it differs")

    with pytest.raises(ValueError, match="differs"):
        trial()
    assert float(x) == 1.0


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
def test_a_graph_outlives_the_failures_of_others() -> None:
    """Its workspace is from its own pool: clearing those of all streams does not take it away."""
    x, state = torch.ones(512, 512, device="cuda"), fcg.place({"w": torch.zeros((), device="cuda")})
    step = fcg.graph_step(products, lowering="aten")
    state, _ = step(state, x)
    for n in range(4):
        with pytest.raises((fcg.CaptureError, torch.OutOfMemoryError)):
            fcg.graph_step(too_large, lowering="aten")(state, x)
        torch.cuda.empty_cache()
        noise = [torch.full((16 * MIB,), torch.nan, device="cuda") for _ in range(4)]
        state, _ = step(state, x)
        assert float(state["w"]) == (n + 2) * 512.0**3
        assert all(block.isnan().all() for block in noise)


@pytest.mark.cuda
def test_a_graph_has_its_own_workspace_whatever_ran_on_its_stream_before() -> None:
    """torch has 32 streams of a priority: the step's are others' underneath, and those have workspaces by now."""
    x = torch.ones(512, 512, device="cuda")
    for stream in [torch.cuda.Stream(priority=-1) for _ in range(40)]:
        with torch.cuda.stream(stream):
            x @ x
    torch.cuda.synchronize()
    state = fcg.place({"w": torch.zeros((), device="cuda")})
    step = fcg.graph_step(products, lowering="aten")
    state, _ = step(state, x)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    noise = [torch.full((16 * MIB,), torch.nan, device="cuda") for _ in range(24)]
    for n in range(16):
        state, _ = step(state, x)
        assert float(state["w"]) == (n + 2) * 512.0**3
    assert all(block.isnan().all() for block in noise)


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_the_largest_batch_is_looked_for(lowering: Any, few_memory: None) -> None:
    del few_memory

    def step(state: Any, x: Tensor) -> Any:
        return {"w": state["w"] + (x @ x.T).sum()}, {}

    fitting = fcg.graph_step(step, lowering=lowering)
    state, batch = fcg.place({"w": torch.zeros((), device="cuda")}), 1 << 18
    failures = 0
    while True:
        try:
            state, _ = fitting(state, torch.ones(batch, 16, device="cuda"))
            break
        except (torch.OutOfMemoryError, fcg.CaptureError):
            batch, failures = batch // 2, failures + 1
    assert failures
    assert float(state["w"]) == batch * batch * 16.0
    state, _ = fitting(state, torch.ones(batch, 16, device="cuda"))
    assert fitting.stats.captures == 1
