"""What a capture takes at once: torch's allocator, simulated, and how few gaps are left."""

from __future__ import annotations

from itertools import pairwise, permutations
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import functional_cg as fcg
from functional_cg.ambient.running import running
from functional_cg.stages.plan import Buffers
from functional_cg.stages.run import reserve
from functional_cg.stages.run.reserve import at_once, events, highest, taken
from functional_cg.stages.sub_programs import SubProgram

MIB = 2**20


@st.composite
def allocations(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Large values that come and go."""
    found: list[tuple[int, int]] = []
    alive: dict[int, int] = {}
    for number in range(draw(st.integers(1, 40))):
        if alive and draw(st.booleans()):
            storage = draw(st.sampled_from(sorted(alive)))
            found.append((storage, -alive.pop(storage)))
        else:
            alive[number] = draw(st.sampled_from([2, 3, 9, 10, 11, 16, 19, 32, 50])) * MIB + draw(
                st.integers(1, 4) | st.just(MIB)
            )
            found.append((number, alive[number]))
    return found


def by_bytes(found: list[tuple[int, int]], first: list[int]) -> int:
    """The same, told of gaps in a line of bytes rather than of blocks that are linked."""
    total, segments = 0, []
    for size in first:
        segments.append((total, size))
        total += size
    alive: dict[int, tuple[int, int]] = {}
    for storage, size in found:
        if size < 0:
            del alive[storage]
            continue
        size = -(-size // 512) * 512
        fits = []
        for start, length in segments:
            inside = sorted((at, at + of) for at, of in alive.values() if start <= at < start + length)
            ends = [(start, start), *inside, (start + length, start + length)]
            fits += [(b - a, a) for (_, a), (b, _) in pairwise(ends) if b - a >= size]
        if not fits:
            segments.append((total, 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB))
            fits = [(segments[-1][1], total)]
            total += segments[-1][1]
        gap, at = min(fits)
        alive[storage] = (at, size if gap - size > MIB else gap)
    return total


sizes = st.lists(st.sampled_from([10, 30, 100, 334]).map(lambda size: size * MIB), max_size=3)


@given(allocations(), sizes)
def test_segments_are_those_of_best_fits_among_gaps(found: list[tuple[int, int]], first: list[int]) -> None:
    assert taken(found, first) == by_bytes(found, first) >= highest(found)


@given(allocations(), sizes, st.sampled_from([0, 50 * MIB, 200 * MIB]))
def test_what_reaches_a_limit_is_not_followed_further(
    found: list[tuple[int, int]], first: list[int], limit: int
) -> None:
    whole, cut = taken(found, first), taken(found, first, limit)
    assert cut == whole if whole < limit else limit <= cut <= whole


def growing(state: Any, x: Tensor) -> Any:
    """A gradient through values of several sizes, which the backward frees in turn."""

    def loss_fn(w: Tensor) -> Tensor:
        loss, value = x.new_zeros(()), x
        for size in (3, 5, 2, 7, 4, 6):
            value = (value[:1024] @ w).tanh().repeat(size, 1)
            loss = loss + value.sin().sum()
        return loss

    return {"w": state["w"] - fcg.grad(loss_fn)(state["w"])}, {}


def as_it_runs(lowered: Any) -> list[int]:
    """The bytes of what a plan on a CPU really allocates and frees that is large, in order."""
    program = lowered.program

    def zeros(variables: list[Any]) -> list[Tensor]:
        return [torch.zeros(var.spec.shape, dtype=var.spec.dtype) for var in variables]

    constants = [constant.value for constant in program.constants]
    run = lowered.plan.bind(Buffers(zeros(program.slots), zeros(program.inputs), constants))
    recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with torch.no_grad(), recording as seen:
        run(())
    found: Any = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]  # type: ignore[union-attr]
    return [one.nbytes() for one in sorted(found, key=lambda one: one.start_ns()) if abs(one.nbytes()) > MIB]


def in_blocks(state: Any, x: Tensor) -> Any:
    """Values of several sizes that blocks hand on, keep for later ones and free."""

    def forward(given: list[Tensor]) -> list[Tensor]:
        wide = given[0].sin().repeat(3, 1)
        return [wide.cos()[:512].contiguous(), wide.exp()]

    def backward(given: list[Tensor]) -> list[Tensor]:
        return [given[1].neg()[512:1536].mul(2), given[0] + given[1][:512]]

    kept, value, total = [], state["w"], state["w"]
    for _ in range(4):
        value, saved = running().repeated("forward", forward, [value])
        kept.append((value, saved))
    for _ in range(4):
        first, second = running().repeated("backward", backward, [*kept.pop()])
        total = total + running().tensor(second).sum()
    return {"w": total + running().tensor(first).mean()}, {}


def named_late(state: Any, x: Tensor) -> Any:
    """A value that is older than another one, and that is dropped with it, but later: through a view of it."""

    def product(given: list[Tensor]) -> list[Tensor]:
        old, new = given[0].repeat(3, 2).sin(), given[0].repeat(1, 2).cos()
        return [new @ old.t()]

    total = state["w"]
    for _ in range(4):
        (made,) = running().repeated("product", product, [total])
        total = total + running().tensor(made)[:, :1024]
    return {"w": total}, {}


def exchanged(state: Any, x: Tensor) -> Any:
    """New leaves that are copied first, since old ones are still read."""
    wide = torch.cat([state["w"], x])
    return {"w": state["v"] + wide.mean(), "v": state["w"]}, {"wide": wide[:1024], "again": wide[1024:]}


@pytest.mark.parametrize(
    ("function", "templates"), [(growing, False), (in_blocks, True), (named_late, True), (exchanged, False)]
)
def test_what_a_plan_is_said_to_allocate_it_does(function: Any, templates: bool) -> None:
    state = {name: torch.zeros(1024, 1024) for name in ("wv" if function is exchanged else "w")}
    lowered = fcg.graph_step(function).lower(state, torch.zeros(1024, 1024))
    assert any(isinstance(instr.op, SubProgram) for instr in lowered.program.instrs) is templates
    said, real = [size for _, size in events(lowered.plan)], as_it_runs(lowered)
    assert said == real[: len(said)]
    assert all(size < 0 for size in real[len(said) :]), "what is kept until the end"
    assert len(said) > (3 if function is exchanged else 30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_half_precision_attention_takes_memory_beside_its_gradients(dtype: torch.dtype) -> None:
    """The gradient of queries in single precision, and a number for each of them."""

    def loss(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).float().sum()

    def step(state: Any) -> Any:
        return {"x": fcg.grad(loss)(state["x"])}, {}

    found = events(fcg.graph_step(step).lower({"x": torch.zeros(1, 8, 1024, 64, dtype=dtype)}).plan)
    beside = 4 * 8 * 1024 * (64 + 1)
    at = [number for number, (_, size) in enumerate(found) if size == beside]
    assert len(at) == (dtype is torch.bfloat16)
    for number in at:
        assert found[number + 1] == (found[number][0], -beside)


def test_most_gaps_are_gone_if_a_capture_takes_its_memory_at_once() -> None:
    lowered = fcg.graph_step(growing).lower({"w": torch.zeros(1024, 1024)}, torch.zeros(1024, 1024))
    found = events(lowered.plan)
    live = highest(found)
    assert taken(found) > 1.15 * live
    chosen, multiplies = at_once(lowered.plan)
    assert multiplies
    assert taken(found, chosen) < 1.05 * live
    assert all(size % (2 * MIB) == 0 for size in chosen)
    sizes = lowered.memory_analysis()
    counted = sizes["peak"] - sizes["state"] - sizes["inputs"]
    assert live == pytest.approx(counted, rel=0.01)


def test_little_memory_is_taken_as_it_comes() -> None:
    step = fcg.graph_step(lambda state, x: ({"w": state["w"] + x.sin()}, {}))
    assert at_once(step.lower({"w": torch.zeros(2**22)}, torch.zeros(2**22)).plan) == ([], False)


def test_segments_leave_few_gaps_wherever_the_driver_places_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two gaps of one size the lower is cut, so which values lie side by side depends on the addresses."""
    for seed in range(3):
        draw, found, alive = Random(seed), list[tuple[int, int]](), dict[int, int]()
        for number in range(300):
            if len(alive) > 20 + number // 8:
                found.append((storage := draw.choice(list(alive)), -alive.pop(storage)))
            alive[number] = draw.choice([2, 4, 12, 16, 32, 64]) * MIB
            found.append((number, alive[number]))
        monkeypatch.setattr(reserve, "events", lambda plan, found=found: found)
        schedule = SimpleNamespace(head=(), fused=())
        chosen, _ = at_once(SimpleNamespace(compiled=False, temporaries={}, schedule=schedule))  # type: ignore[arg-type]
        said = [taken(found, order) for order in permutations(chosen)]
        assert max(said) < taken(found), [size / MIB for size in chosen]
