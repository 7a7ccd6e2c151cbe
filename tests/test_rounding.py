"""Stochastic rounding: one of two neighbours, unbiased, the same bits everywhere; training with it."""

from __future__ import annotations

import functools
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim, random
from functional_cg.precision import rounding, stochastic_round
from functional_cg.random.words import half_words
from functional_cg.testing import Simulator, assert_trees_all_equal
from tests.shares import CALLS

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)

on_all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
keys = st.integers(0, 2**64 - 1).map(random.key)
dtypes = st.sampled_from(DTYPES)
numbers = st.lists(st.floats(width=32), min_size=1, max_size=20).map(torch.tensor)
# Where the numbers of a dtype lie close to zero, and between.
small = st.lists(st.floats(-(2.0**-13), 2.0**-13, width=32), min_size=1, max_size=20).map(torch.tensor)


@functools.cache
def all_numbers(dtype: torch.dtype) -> Tensor:
    """The finite numbers of a dtype, f64, in their order."""
    bits = torch.arange(2 ** (8 * dtype.itemsize)).to(torch.int16 if dtype.itemsize == 2 else torch.uint8)
    values = bits.view(dtype).double()
    return values[values.isfinite()].unique()


def neighbours(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The numbers below and above each element, f64; twice the same for one of them."""
    values, x = all_numbers(dtype), x.double()
    above = values[torch.searchsorted(values, x).clamp(max=len(values) - 1)]
    below = values[(torch.searchsorted(values, x, right=True) - 1).clamp(min=0)]
    return below, above


@given(key=keys, x=numbers | small, dtype=dtypes, wide=st.sampled_from([torch.float32, torch.float64]))
def test_only_neighbours_and_what_is_exact_stays(
    key: Tensor, x: Tensor, dtype: torch.dtype, wide: torch.dtype
) -> None:
    out = stochastic_round(key, x.to(wide), dtype)
    assert (out.dtype, out.shape) == (dtype, x.shape)
    inside = x.abs() <= torch.finfo(dtype).max
    below, above = neighbours(x[inside], dtype)
    got = out[inside].double()
    assert ((got == below) | (got == above)).all()
    assert torch.equal(out[inside].float().signbit(), x[inside].signbit())
    torch.testing.assert_close(
        out[~inside].float(), x[~inside].to(dtype).float(), equal_nan=True, rtol=0, atol=0
    )


@on_all_dtypes
def test_every_number_of_a_dtype_stays(dtype: torch.dtype) -> None:
    values = all_numbers(dtype)
    for wide in (torch.float32, torch.float64):
        assert torch.equal(stochastic_round(random.key(1), values.to(wide), dtype).double(), values)


@given(bits=st.integers(0, 2**31 - 1 - 2**23))
def test_the_mean_over_all_draws_is_the_number_itself(bits: int) -> None:
    """From f32 to bf16, subnormal numbers included: without any tolerance."""
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    if x > torch.finfo(torch.bfloat16).max:
        return
    draws = torch.arange(-(2**15), 2**15).to(torch.int16)
    below, above = neighbours(x, torch.bfloat16)
    up = (rounding._rounded(x.expand(len(draws)), draws, torch.bfloat16).double() > x.double()).sum()
    share = (x.double() - below) / (above - below) if above > below else torch.zeros(())
    assert int(up) == float(share) * 2**16


@given(x=numbers | small, dtype=st.sampled_from(DTYPES[1:]))
def test_the_mean_over_all_draws_is_within_the_stated_bound(x: Tensor, dtype: torch.dtype) -> None:
    x = x[x.abs() <= torch.finfo(dtype).max][:3]
    draws = torch.arange(-(2**15), 2**15).to(torch.int16)[:, None].expand(-1, len(x))
    mean = rounding._rounded(x.expand(draws.shape), draws, dtype).double().mean(0)
    below, above = neighbours(x, dtype)
    assert ((mean - x.double()).abs() <= 2.0**-14 * (above - below)).all()


@given(key=keys, share=st.floats(0.01, 0.99))
def test_the_mean_over_elements_is_right(key: Tensor, share: float) -> None:
    """Within six standard deviations of a binomial distribution, for neighbours 1 and 1 + 2**-7."""
    n = 4096
    x = torch.tensor(1 + share * 2**-7)
    share = (float(x) - 1) * 2**7
    mean = float(stochastic_round(key, x.expand(n)).double().mean())
    assert abs(mean - float(x)) <= 6 * math.sqrt(share * (1 - share) / n) * 2**-7


@given(key=keys, other=keys, n=st.integers(0, 40), stream=st.integers(1, 2**63 - 1))
def test_a_draw_is_a_function_of_key_stream_and_place(
    key: Tensor, other: Tensor, n: int, stream: int
) -> None:
    x = torch.linspace(0.1, 1.3, 64)
    out = stochastic_round(key, x)
    assert torch.equal(out, stochastic_round(key.clone(), x.clone()))
    assert torch.equal(out[:n], stochastic_round(key, x[:n]))
    assert torch.equal(out.view(8, 8).T, stochastic_round(key, x.view(8, 8)).T)
    assert not torch.equal(out, stochastic_round(key, x, stream=stream))
    assert torch.equal(key, other) or not torch.equal(out, stochastic_round(other, x))


@given(key=keys, start=st.integers(0, 50), n=st.integers(0, 20))
def test_words_from_a_place_on_are_a_part_of_all(key: Tensor, start: int, n: int) -> None:
    """What shards draw."""
    assert torch.equal(random.bits(key, n, start=start), random.bits(key, start + n)[start:])
    assert torch.equal(half_words(key, n, 0, start), half_words(key, start + n)[start:])


def test_gradients_pass_as_through_a_cast() -> None:
    x = torch.linspace(-1, 1, 9)
    grad = fcg.grad(lambda x: (stochastic_round(random.key(0), x).float() * torch.arange(9)).sum())(x)
    assert torch.equal(grad, torch.arange(9.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_under_vmap_an_element_draws_what_it_draws_alone(dtype: torch.dtype) -> None:
    keys, x = random.split(random.key(0), 5), torch.linspace(-1, 1, 30).view(5, 6)
    alone = torch.stack([stochastic_round(key, row, dtype) for key, row in zip(keys, x, strict=True)])
    together = torch.vmap(lambda key, row: stochastic_round(key, row, dtype))(keys, x)
    assert torch.equal(together.float(), alone.float())
    grad = torch.func.grad(lambda x: stochastic_round(keys[0], 2 * x, dtype).float().sum())
    assert torch.equal(torch.vmap(grad)(x), torch.full_like(x, 2))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((random.key(0), torch.ones(2).half()), TypeError, r"expected x of f32 or f64, got torch.float16. To fix"),
        ((random.key(0), 1.0), TypeError, "expected x of f32 or f64, got float"),
        ((random.key(0), torch.ones(2), torch.float32), TypeError, "expected dtype to be one of torch.bfloat16, "),
        ((torch.ones(2), torch.ones(2)), fcg.LayoutError, "this is not a random key"),
    ],
)  # fmt: skip
def test_arguments_are_checked(arguments: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        stochastic_round(*arguments)


# -- captured -----------------------------------------------------------------------------------------------------


def rounding_step(state: Any, x: Tensor) -> Any:
    key = random.fold_in(state["key"], state["n"])
    rounded = {str(dtype): stochastic_round(key, x, dtype).float() for dtype in DTYPES}
    return {**state, "n": state["n"] + 1}, rounded


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "auto"), ("cpu", Simulator), pytest.param("cuda", "auto", marks=pytest.mark.cuda)],
)
def test_captured_rounding_has_the_bits_of_eager_rounding(device: str, backend: Any) -> None:
    state = fcg.place({"key": random.key(5, device), "n": torch.zeros((), dtype=torch.int64, device=device)})
    twin = fcg.fork(state)
    made = backend if backend == "auto" else backend()
    step = fcg.graph_step(rounding_step, lowering="aten", backend=made)
    for call in range(CALLS):
        x = torch.randn(33, device=device) * 10.0 ** (call - 8)
        state, metrics = step(state, x)
        twin, expected = step.eager(twin, x)
        assert_trees_all_equal((state, metrics), (twin, expected), f"call {call}")
    assert (step.stats.captures, step.stats.replays) == (1, CALLS)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_compiled_rounding_has_the_bits_of_eager_rounding(device: str) -> None:
    """A compiler may keep numbers of bfloat16 in float32; rounding does not compute with any."""

    def step_fn(state: Any, x: Tensor) -> Any:
        rounded = stochastic_round(state["key"], x * 3)
        return {"key": random.fold_in(state["key"], 1)}, {"sum": rounded.float() + x, "rounded": rounded}

    state = fcg.place({"key": random.key(5, device)})
    twin, step = fcg.fork(state), fcg.graph_step(step_fn, lowering="inductor")
    for call in range(3):
        x = torch.randn(1000, device=device) * 10.0 ** (20 * call - 20)
        state, metrics = step(state, x)
        twin, expected = step.eager(twin, x)
        assert_trees_all_equal((state, metrics), (twin, expected), f"call {call}")


# -- training -----------------------------------------------------------------------------------------------------


def make_params(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Any:
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(6, 4, generator=generator) / 2, "b": torch.zeros(4)}
    return fcg.tree.map(lambda leaf: leaf.to(device, dtype), params)


def loss_of(params: Any, batch: Any) -> Tensor:
    out = torch.tanh(batch["x"].to(params["w"].dtype) @ params["w"] + params["b"])
    return (out.float() - batch["y"]).square().mean()


def step_of(state: Any, batch: Any) -> Any:
    loss, grads = fcg.value_and_grad(loss_of)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


def batch_of(call: int, device: str = "cpu") -> Any:
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(call + 1)).to(device)
    return {"x": x, "y": torch.tanh(x[:, :4] - x[:, 2:])}


def trained(optimizer: Any, calls: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Any:
    """The last state of a captured run, which has the bits of the eager one at its first calls."""
    state = fcg.TrainState.create(params=make_params(device, dtype), optimizer=optimizer)
    twin, step = fcg.fork(state), fcg.graph_step(step_of, lowering="aten")
    for call in range(calls):
        state, metrics = step(state, batch_of(call, device))
        if call < CALLS:
            twin, expected = step.eager(twin, batch_of(call, device))
            assert_trees_all_equal((state, metrics), (twin, expected), f"call {call}")
    assert step.stats.captures == 1
    return state


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_bfloat16_trains_on_where_rounding_to_the_nearest_stands_still(device: str) -> None:
    """Steps of less than a rounding, 200 of them: the way of float32 is what they make on average."""
    rate, calls = 1e-3, 200
    rounded = trained(optim.stochastic_rounding(optim.adam(rate), key=0), calls, device)
    nearest = trained(optim.adam(rate), calls, device)
    masters = trained(optim.adam(rate), calls, device, torch.float32)
    assert {leaf.dtype for leaf in fcg.tree.leaves(rounded.params)} == {torch.bfloat16}
    assert {leaf.dtype for leaf in fcg.tree.leaves(rounded.opt_state.inner_state[0].mu)} == {torch.float32}
    gaps = [float((run.params["w"] - masters.params["w"]).norm()) for run in (rounded, nearest)]
    assert gaps[0] < 0.25 * gaps[1], gaps


def test_updates_lead_where_a_step_leads() -> None:
    params, grads = make_params(), fcg.tree.map(torch.ones_like, make_params())
    tx = optim.stochastic_rounding(optim.sgd(1e-3), key=0)
    stepped, _ = tx.step(grads, tx.init(params), params)
    updates, state = tx.update(grads, tx.init(params), params)
    assert_trees_all_equal(optim.apply_updates(params, updates), stepped)
    assert int(state.count) == 1


def test_leaves_and_steps_draw_differently_and_wide_leaves_are_not_rounded() -> None:
    params = {"a": torch.ones(64).bfloat16(), "b": torch.ones(64).bfloat16(), "c": torch.ones(64)}
    tx = optim.stochastic_rounding(optim.sgd(1e-3), key=0)
    state = tx.init(params)
    first, state = tx.step(params, state, params)
    second, _ = tx.step(params, state, params)
    assert not torch.equal(first["a"], first["b"])
    assert not torch.equal(first["a"], second["a"])
    assert torch.equal(first["c"], params["c"] - 1e-3 * params["c"])


def test_the_optimizer_is_a_value() -> None:
    tx = optim.stochastic_rounding(optim.sgd(0.1), random.key(4))
    assert tx == optim.stochastic_rounding(optim.sgd(0.1), 4) == pickle.loads(pickle.dumps(tx))
    assert repr(tx).endswith("key=4)")
    with pytest.raises(TypeError, match="stochastic_rounding: key must be a key"):
        optim.stochastic_rounding(optim.sgd(0.1), 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"stochastic_rounding: .* makes no steps"):
        optim.stochastic_rounding(optim.scale_by_adam(), 0)
