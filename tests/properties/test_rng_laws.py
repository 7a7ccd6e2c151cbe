"""Laws of keyed random numbers, for any key, shape and parameter."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_cg import random
from functional_cg.random import arguments as _draw_arguments

seeds = st.integers(-(2**63), 2**64 - 1)
keys = seeds.map(random.key)
streams = st.integers(0, 2**63 - 1)
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
integers64 = st.integers(-(2**63), 2**63 - 1)
probabilities = st.floats(0.0, 1.0)


@given(key=keys, n=st.integers(0, 300), stream=streams)
def test_decomposition_equals_the_op(key: Tensor, n: int, stream: int) -> None:
    assert torch.equal(random.bits(key, n, stream=stream), random.decompose_random_bits(key, stream, n))


@given(key=keys, n=st.integers(0, 300), stream=streams)
def test_a_draw_is_a_function_of_key_and_stream(key: Tensor, n: int, stream: int) -> None:
    before = key.clone()
    assert torch.equal(random.bits(key, n, stream=stream), random.bits(key.clone(), n, stream=stream))
    assert torch.equal(key, before)


@given(key=keys, n=st.integers(1, 40))
def test_split_i_equals_fold_in_i(key: Tensor, n: int) -> None:
    children = random.split(key, n)
    assert children.shape == (n, 2)
    assert children.dtype == torch.int64
    assert all(torch.equal(children[i], random.fold_in(key, i)) for i in range(n))
    assert ((children >= 0) & (children < 2**32)).all()


@given(key=keys, data=integers64)
def test_fold_in_takes_ints_and_tensors_alike(key: Tensor, data: int) -> None:
    assert torch.equal(random.fold_in(key, data), random.fold_in(key, torch.tensor(data)))


@given(key=keys, data=st.integers(-128, 127))
def test_fold_in_ignores_the_integer_dtype(key: Tensor, data: int) -> None:
    narrow = torch.tensor(data, dtype=torch.int8)
    assert torch.equal(random.fold_in(key, data), random.fold_in(key, narrow))


@given(key=keys, data=st.lists(integers64, min_size=2, max_size=8, unique=True))
def test_folded_keys_differ(key: Tensor, data: list[int]) -> None:
    children = {tuple(random.fold_in(key, number).tolist()) for number in data}
    assert len(children | {tuple(key.tolist())}) == len(data) + 1


@given(key=keys, chosen=st.lists(streams, min_size=2, max_size=4, unique=True))
def test_streams_and_derived_keys_share_no_block(key: Tensor, chosen: list[int]) -> None:
    draws = [random.bits(key, 256, stream=stream) for stream in chosen]
    derived = torch.ops.fcg.random_bits(key, -1, 256)
    blocks = torch.cat([*draws, derived]).view(-1, 4)
    assert len(torch.unique(blocks, dim=0)) == len(blocks)


@given(key=keys, shape=shapes, dtype=dtypes, ends=st.tuples(*[st.floats(-1e4, 1e4, width=32)] * 2))
def test_uniform_stays_in_range(
    key: Tensor, shape: tuple[int, ...], dtype: torch.dtype, ends: tuple[float, float]
) -> None:
    low, high = min(ends), max(ends)
    # Narrower ranges may hold no number of a 16-bit dtype and are refused.
    if high - low <= 0.05 * max(-low, high, 0.02):
        high = low + 1 + abs(low)
    draws = random.uniform(key, shape, low=low, high=high, dtype=dtype)
    assert draws.shape == shape
    assert draws.dtype == dtype
    assert ((draws.double() >= low) & (draws.double() < high)).all()


@given(key=keys, dtype=dtypes, low=st.sampled_from([-1.0, 0.0, 1.0, 100.0]))
def test_uniform_never_rounds_to_high(key: Tensor, dtype: torch.dtype, low: float) -> None:
    """Two numbers of the dtype wide: half of the draws would round to ``high``."""
    high = low + 2 * torch.finfo(dtype).eps * max(abs(low), 1.0)
    draws = random.uniform(key, (500,), low=low, high=high, dtype=dtype).double()
    assert ((draws >= low) & (draws < high)).all()


@given(value=st.floats(-(2.0**100), 2.0**100), dtype=dtypes, strict=st.booleans())
def test_round_down_is_the_neighbour(value: float, dtype: torch.dtype, strict: bool) -> None:
    limit = torch.finfo(dtype).max / 2
    value = max(-limit, min(limit, value))
    got = _draw_arguments.round_down(value, dtype, strict=strict)
    here = torch.tensor(got, dtype=torch.float64).to(dtype)
    assert here.double() == got
    assert got < value or (got == value and not strict)
    above = torch.nextafter(here, torch.tensor(torch.inf, dtype=dtype)).double()
    assert above >= value if strict else above > value


@given(key=keys, shape=shapes, dtype=dtypes)
def test_normal_has_the_asked_layout_and_is_finite(
    key: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    draws = random.normal(key, shape, dtype=dtype)
    assert draws.shape == shape
    assert draws.dtype == dtype
    assert (draws.abs() < 8.7).all()


@given(key=keys, shape=shapes, mean=st.floats(-10, 10), std=st.floats(0, 10))
def test_normal_is_scaled_and_shifted_in_float64(
    key: Tensor, shape: tuple[int, ...], mean: float, std: float
) -> None:
    standard = random.normal(key, shape, dtype=torch.float64)
    assert torch.equal(random.normal(key, shape, mean=mean, std=std), (standard * std + mean).float())


@given(key=keys, shape=shapes, p=probabilities)
def test_bernoulli_takes_numbers_and_tensors_alike(key: Tensor, shape: tuple[int, ...], p: float) -> None:
    draws = random.bernoulli(key, p, shape)
    assert draws.shape == shape
    assert draws.dtype == torch.bool
    assert torch.equal(draws, random.bernoulli(key, torch.tensor(p, dtype=torch.float64), shape))


@given(key=keys, p=probabilities, q=probabilities)
def test_bernoulli_is_monotone_in_p(key: Tensor, p: float, q: float) -> None:
    few, many = (random.bernoulli(key, x, (50,)) for x in sorted((p, q)))
    assert not (few & ~many).any()


@given(key=keys, low=integers64, span=st.integers(1, 2**63))
def test_randint_equals_exact_integer_arithmetic(key: Tensor, low: int, span: int) -> None:
    high = min(low + span, 2**63)
    words = [word & 0xFFFFFFFF for word in random.bits(key, 20).tolist()]
    want = [low + ((b << 32 | a) * (high - low) >> 64) for a, b in zip(words[::2], words[1::2], strict=True)]
    assert random.randint(key, (10,), low, high).tolist() == want
    assert all(low <= number < high for number in want)


@given(key=keys, n=st.integers(0, 200))
def test_permutation_is_a_permutation(key: Tensor, n: int) -> None:
    assert torch.equal(random.permutation(key, n).sort().values, torch.arange(n))


@given(key=keys, shape=shapes, p=probabilities, dtype=dtypes)
def test_dropout_keeps_scaled_or_zeroes(
    key: Tensor, shape: tuple[int, ...], p: float, dtype: torch.dtype
) -> None:
    x = random.normal(random.key(0), shape, dtype=dtype)
    out = random.dropout(key, x, p)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    quantised = round(p * 65536) / 65536
    if quantised < 1:
        assert ((out == 0) | (out == x * (1 / (1 - quantised)))).all()
    else:
        assert not out.any()


@given(key=keys, n=st.integers(1, 200), p=probabilities, other=seeds)
def test_dropout_mask_ignores_the_values(key: Tensor, n: int, p: float, other: int) -> None:
    x, y = torch.ones(n), 1 + random.uniform(random.key(other), (n,))
    assert torch.equal(random.dropout(key, x, p) == 0, random.dropout(key, y, p) == 0)


@given(key=keys, size=st.integers(1, 8), batch=st.integers(0, 8))
def test_categorical_draws_only_the_possible(key: Tensor, size: int, batch: int) -> None:
    only = random.randint(key, (batch,), 0, size)
    logits = torch.full((batch, size), -torch.inf).scatter(1, only[:, None], 0.0)
    assert torch.equal(random.categorical(key, logits), only)
