"""Costs of lowered steps against numbers computed by hand, and FLOPs against torch's own counter."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import functional_cg as fcg
from functional_cg.messages.units import size_of
from functional_cg.step import costs

F32 = 4


def lowered_of(fn: Any, state: Any, *inputs: Any) -> fcg.Lowered:
    return fcg.graph_step(fn, lowering="aten").lower(state, *inputs)


def train(state: Any, batch: Any) -> Any:
    def loss_fn(p: Any) -> Any:
        return F.mse_loss(torch.relu(batch["x"] @ p["w1"]) @ p["w2"], batch["y"])

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


def adamw_state() -> Any:
    params = {"w1": torch.ones(8, 16), "w2": torch.ones(16, 4)}
    return fcg.TrainState.create(params=params, optimizer=fcg.optim.adamw(1e-3, weight_decay=0.1))


BATCH = {"x": torch.ones(32, 8), "y": torch.ones(32, 4)}
PARAMS = 8 * 16 + 16 * 4


def test_a_training_step_by_hand() -> None:
    lowered = lowered_of(train, adamw_state(), BATCH)
    found = lowered.cost_analysis()
    # x @ w1, h @ w2; their gradients: of w2, of h, of w1 (none of x)
    assert found.kinds["matmul"].calls == 5
    assert found.flops == 2 * 32 * (8 * 16 * 2 + 16 * 4 * 3)
    shapes = [(32, 8, 16), (32, 16, 4), (16, 32, 4), (32, 4, 16), (8, 32, 16)]
    assert found.kinds["matmul"].bytes == F32 * sum(m * k + k * n + m * n for m, k, n in shapes)
    steps = 2  # counters in fp32 that the fused update reads, beside i64 counters of the state
    assert found.kinds["optimizer"].calls == 1
    per_param = found.kinds["optimizer"].bytes - 28 * PARAMS
    assert 0 <= per_param <= 8 * 2 * steps
    assert found.floor_s is None
    assert found.distance is None
    state = lowered.memory_analysis()
    # all of the state is read and written but for what the step leaves alone; the batch is read, the loss written
    assert found.bytes_least == 2 * state["state"] + state["inputs"] + state["metrics"]


def test_memory_by_role_and_its_peak_by_hand() -> None:
    memory = lowered_of(train, adamw_state(), BATCH).memory_analysis()
    assert memory["state.params"] == F32 * PARAMS
    assert memory["state.opt_state"] == 2 * F32 * PARAMS + 8
    assert memory["state"] == memory["state.params"] + memory["state.opt_state"] + memory["state.step"]
    assert memory["inputs"] == F32 * 32 * 12
    n = 1000

    def chain(state: Any, x: Any) -> Any:
        a = x * 2  # one temporary
        b = a + 1  # two
        c = b * b  # a is gone: b and c
        return {"w": state["w"] + c.sum()}, {}  # b is gone

    memory = lowered_of(chain, {"w": torch.ones(())}, torch.ones(n)).memory_analysis()
    assert memory["temporaries"] == F32 * (3 * n + 2)
    assert memory["peak"] == F32 * (1 + n + 2 * n)
    owners = {(one.op, one.values): one.nbytes for one in memory.owners}
    assert owners == {("add", 1): F32 * n, ("mul", 1): F32 * n}
    assert all(one.site.startswith("test_costs.py:") and not one.backward for one in memory.owners)


def test_results_that_a_fused_optimizer_writes_in_place_take_no_memory() -> None:
    n = 10_000

    def update(state: Any, grads: Any) -> Any:
        return state.apply_gradients(fcg.tree.map(lambda g: g * 2, grads)), {}

    state = fcg.TrainState.create(
        params={"w": torch.ones(n)}, optimizer=fcg.optim.adamw(1e-3, weight_decay=0.1)
    )
    memory = lowered_of(update, state, {"w": torch.ones(n)}).memory_analysis()
    doubled = F32 * n
    assert 0 <= memory["peak"] - memory["state"] - memory["inputs"] - doubled < 64  # counters in fp32
    assert sum(one.nbytes for one in memory.owners) == memory["peak"] - memory["state"] - memory["inputs"]


def test_new_values_that_are_staged_count_at_the_end() -> None:
    n = 1000

    def swap(state: Any) -> Any:
        return {"a": state["b"], "b": state["a"]}, {}

    memory = lowered_of(swap, {"a": torch.ones(n), "b": torch.zeros(n)}).memory_analysis()
    assert memory["peak"] == F32 * (2 * n + 2 * n)


def test_memory_prints_for_people() -> None:
    memory = lowered_of(train, adamw_state(), BATCH).memory_analysis()
    text = repr(memory)
    assert str(memory) == text
    assert re.match(r"train: [\d,.]+ (MiB|B) at the peak\n", text)
    assert re.search(r"\n +state +[\d,.]+ (MiB|B)", text)
    assert sum(nbytes for name, nbytes in memory.parts() if "." not in name) == memory["peak"]
    assert sum(nbytes for name, nbytes in memory.parts() if "." in name) == memory["state"]
    assert f"all temporaries of a call come to {size_of(memory['temporaries'])}, not all at one time" in text
    assert re.search(
        r"\n  temporaries at the peak  +line +values +bytes\n +\w+ +test_costs.py:\d+.* +\d+x +[\d,.]+ (MiB|B)\n",
        text,
    )
    sizes = [one.nbytes for one in memory.owners]
    assert sizes == sorted(sizes, reverse=True) != sizes[::-1]
    assert dict(memory)["state"] == memory["state"]
    assert len(memory) == len(dict(memory))


def test_views_and_dropped_results_are_free() -> None:
    def fn(state: Any, x: Any) -> Any:
        values, _ = x.t().reshape(6, 2).max(0)  # the indices are dropped
        return {"w": state["w"] + values}, {}

    found = lowered_of(fn, {"w": torch.ones(2)}, torch.ones(4, 3).t()).cost_analysis()
    assert sum(kind.calls for name, kind in found.kinds.items() if name != "(copies)") <= 3
    assert found.bytes_least == F32 * (12 + 2 + 2)


def test_what_is_not_read_or_not_written_is_not_moved() -> None:
    state = {"a": torch.ones(10), "b": torch.ones(1000)}
    found = lowered_of(lambda s, x: ({**s, "a": s["a"] + x}, {}), state, torch.ones(10)).cost_analysis()
    assert found.bytes_least == F32 * (10 + 10 + 10)
    assert found.kinds["(copies)"].calls == 2  # the input, and the commit of `a`
    assert found.kinds["(copies)"].bytes == 2 * F32 * 20


def test_floor_and_distance() -> None:
    lowered = lowered_of(lambda s: ({"w": s["w"] @ s["w"]}, {}), {"w": torch.ones(10, 10)})
    slow = lowered.cost_analysis(1.0, bandwidth=1e12, peak_flops=1000.0)
    assert (slow.floor_s, slow.bound, slow.distance) == (2.0, "compute", 0.5)
    narrow = lowered.cost_analysis(16.0, bandwidth=100.0, peak_flops=1e12)
    assert (narrow.floor_s, narrow.bound, narrow.distance) == (8.0, "memory", 2.0)
    assert "8,000.0000 ms, bound by memory" in str(narrow)
    assert "2.00 times the floor" in str(narrow)
    assert "floor: unknown; pass bandwidth=" in str(lowered.cost_analysis())
    assert json.loads(json.dumps(narrow.as_dict()))["kinds"]["matmul"] == {
        "calls": 1,
        "flops": 2000,
        "bytes": 800,
    }


@pytest.mark.parametrize("name", ["seconds", "bandwidth", "peak_flops"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), "1", [1.0], True, 10**400])
def test_rates_that_mean_nothing_are_refused(name: str, value: Any) -> None:
    lowered = lowered_of(lambda s: ({"w": s["w"] + 1}, {}), {"w": torch.ones(1)})
    with pytest.raises(ValueError, match=f"{name} must be a positive number"):
        lowered.cost_analysis(**{name: value})


def test_rates_of_known_devices() -> None:
    h100 = next(rates for rates in costs._DEVICES if "H100" in rates.name)
    floor, bound = costs._floor(h100.name, {torch.bfloat16: 989 * 10**9}, 10**6, None, None)
    assert floor == pytest.approx(1e-3)
    assert bound == "compute"
    floor, bound = costs._floor(h100.name, {}, 335 * 10**8, None, None)
    assert floor == pytest.approx(1e-2)
    assert bound == "memory"
    assert costs._floor("some other device", {torch.float32: 1}, 10, None, None) == (None, None)
    assert torch.get_float32_matmul_precision() == "highest"
    assert h100.peak(torch.float32) == h100.single
    assert h100.peak(torch.float8_e4m3fn) == 2 * h100.half


@given(
    batch=st.integers(1, 3), sizes=st.tuples(*[st.integers(1, 9)] * 3), bias=st.booleans(), conv=st.booleans()
)
def test_flops_are_those_of_torchs_counter(batch: int, sizes: Any, bias: bool, conv: bool) -> None:
    a, b, c = sizes
    state = {"w": torch.ones(c, b, 3, 3) if conv else torch.ones(c, b), "b": torch.ones(c)}
    x = torch.ones(batch, b, a + 2, a + 2) if conv else torch.ones(batch, a, b)

    def loss_fn(p: Any, x: Any) -> Any:
        shift = p["b"] if bias else None
        return (F.conv2d(x, p["w"], shift) if conv else F.linear(x, p["w"], shift)).square().sum()

    def fn(state: Any, x: Any) -> Any:
        grads = fcg.grad(loss_fn)(state, x)
        return fcg.tree.map(lambda w, g: w - g, state, grads), {}

    with FlopCounterMode(display=False) as counter:
        fn(state, x)
    found = lowered_of(fn, state, x).cost_analysis()
    # the update needs the gradient of each leaf: nothing that the counter saw is dropped
    assert found.flops == counter.get_total_flops()
    assert found.flops > 0


def test_flops_of_grouped_filters_and_their_gradient() -> None:
    """Torch's counter counts the gradient once for each group."""
    state = {"w": torch.ones(6, 2, 3)}
    loss_fn = lambda p, x: F.conv1d(x, p["w"], groups=2).square().sum()  # noqa: E731
    lowered = lowered_of(lambda state, x: (fcg.grad(loss_fn)(state, x), {}), state, torch.ones(1, 4, 9))
    each = 2 * (6 * 7) * (2 * 3)
    assert lowered.cost_analysis().flops == 2 * each


@given(heads=st.integers(1, 3), queries=st.integers(1, 9), keys=st.integers(1, 9), causal=st.booleans())
def test_flops_of_attention(heads: int, queries: int, keys: int, causal: bool) -> None:
    state = {"q": torch.ones(2, heads, queries, 8), "k": torch.ones(2, heads, keys, 8)}

    def fn(state: Any) -> Any:
        loss_fn = lambda p: F.scaled_dot_product_attention(p["q"], p["k"], p["k"], is_causal=causal).sum()  # noqa: E731
        return fcg.grad(loss_fn)(state), {}

    found = lowered_of(fn, state).cost_analysis()
    mask = torch.ones(queries, keys).tril() if causal else torch.ones(queries, keys)
    kept = int(mask.sum())
    if "attention" in found.kinds:
        assert found.kinds["attention"].flops == 2 * 2 * heads * kept * (2 * 8 + 5 * 8)
    else:  # the math backend: products of whole matrices
        assert found.flops >= 2 * 2 * heads * kept * (2 * 8)


def test_a_capture_knows_its_costs_and_a_compiled_one_says_so() -> None:
    step, state = fcg.graph_step(train, lowering="aten"), adamw_state()
    lowered = step.lower(state, BATCH)
    captured = lowered.capture()
    assert captured.cost_analysis().as_dict() == lowered.cost_analysis().as_dict()
    state, _ = step(state, BATCH)
    assert step.stats.captures == 1
    plan = SimpleNamespace(schedule=lowered.plan.schedule, compiled=True, copied=set())
    fused = costs.cost_analysis(lowered.program, plan)  # type: ignore[arg-type]
    assert "before fusion" in str(fused)
    assert "before fusion" not in str(lowered.cost_analysis())
    assert fused.flops == lowered.cost_analysis().flops
