"""Keyed random numbers: known answers, one node per draw, refusals, and plain statistics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from functional_cg import random
from functional_cg.errors import LayoutError
from functional_cg.random import samplers
from functional_cg.random import words as _random_bits
from tests.shares import share

RANDOM_BITS = torch.ops.fcg.random_bits.default
ONES = 0xFFFFFFFF

# `philox4x32 10` of Random123's tests/kat_vectors: counter, key, expected.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def reference(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 from section 3.3 of the paper, on Python integers of any size."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right // 2**32) ^ b ^ k0, right % 2**32, (left // 2**32) ^ d ^ k1, left % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def expected_words(key: Tensor, stream: int, n: int) -> list[int]:
    k0, k1, first = (*key.tolist(), 0)[:3]
    words: list[int] = []
    for block in range(first, first + (n + 3) // 4):
        counter = [block & ONES, block >> 32 & ONES, stream & ONES, stream >> 32 & ONES]
        words += reference(counter, [k0, k1])
    return words[:n]


def unsigned(words: Tensor) -> list[int]:
    return [word & ONES for word in words.tolist()]


class Ops(TorchDispatchMode):
    """Counts the ops that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


DRAWS: dict[str, Callable[..., Tensor]] = {
    "bits": lambda key, **more: random.bits(key, 37, **more),
    "fold_in": lambda key: random.fold_in(key, 3),
    "fold_in tensor": lambda key: random.fold_in(key, torch.full((), 3, device=key.device)),
    "split": lambda key: random.split(key, 5),
    "uniform": lambda key, **more: random.uniform(key, (5, 7), **more),
    "uniform scaled": lambda key, **more: random.uniform(key, (5, 7), low=-1.3, high=2.7, **more),
    "uniform f64": lambda key, **more: random.uniform(
        key, (5, 7), low=0.1, high=0.7, dtype=torch.float64, **more
    ),
    "uniform bf16": lambda key, **more: random.uniform(key, (5, 7), high=3.0, dtype=torch.bfloat16, **more),
    "normal": lambda key, **more: random.normal(key, (5, 7), mean=1.0, std=2.0, **more),
    "bernoulli": lambda key, **more: random.bernoulli(key, 0.3, (5, 7), **more),
    "bernoulli tensor": lambda key, **more: random.bernoulli(
        key, torch.full((7,), 0.3, device=key.device), (5, 7), **more
    ),
    "randint": lambda key, **more: random.randint(key, (5, 7), -3, 2**62, **more),
    "permutation": lambda key, **more: random.permutation(key, 35, **more),
    "dropout": lambda key, **more: random.dropout(key, torch.ones((5, 7), device=key.device), 0.3, **more),
    "categorical": lambda key, **more: random.categorical(key, torch.ones((5, 7), device=key.device), **more),
    "exponential": lambda key, **more: random.exponential(key, (5, 7), rate=2.0, **more),
    "truncated_normal": lambda key, **more: random.truncated_normal(key, (5, 7), -1.0, 2.0, **more),
    "gamma": lambda key, **more: random.gamma(key, 0.7, (5, 7), **more),
    "gamma tensor": lambda key, **more: random.gamma(
        key, torch.full((7,), 3.0, device=key.device), (5, 7), **more
    ),
    "beta": lambda key, **more: random.beta(key, 0.5, 3.0, (5, 7), **more),
    "dirichlet": lambda key, **more: random.dirichlet(
        key, torch.full((7,), 0.3, device=key.device), (5, 7), **more
    ),
    "poisson": lambda key, **more: random.poisson(key, 3.5, (5, 7), **more),
}
# What computes logarithms, or functions that are made of them.
ROUNDED = {
    "normal",
    "categorical",
    "exponential",
    "truncated_normal",
    "gamma",
    "gamma tensor",
    "beta",
    "dirichlet",
    "poisson",
}
all_draws = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    c = [int(word, 16) for word in counter.split()]
    k = [int(word, 16) for word in key.split()]
    want = [int(word, 16) for word in expected.split()]
    first, stream = ((high << 32 | low) for low, high in (c[:2], c[2:]))
    assert reference(c, k) == want
    state = torch.tensor([*k, (first ^ 2**63) - 2**63])
    stream = (stream ^ 2**63) - 2**63
    assert unsigned(RANDOM_BITS(state, stream, 4)) == want
    assert unsigned(random.decompose_random_bits(state, stream, 4)) == want


# 32 and 33 words: the last in Python integers, the first in tensors. 262,148 words: two chunks.
@pytest.mark.parametrize("n", [0, 1, 4, 7, 32, 33, 262_148])
@pytest.mark.parametrize("first", [(), (2**32 - 3,)])
def test_every_path_follows_the_reference(n: int, first: tuple[int, ...]) -> None:
    key, stream = torch.tensor([0x9ABCDEF0, 0xFFFF0001, *first]), 2**40 + 17
    words = RANDOM_BITS(key, stream, n)
    assert words.dtype == torch.int32
    assert words.is_contiguous()
    assert torch.equal(words, random.decompose_random_bits(key, stream, n))
    assert unsigned(words[:64]) == expected_words(key, stream, n)[:64]
    if n > 64:
        assert unsigned(words[-6:]) == expected_words(key, stream, n)[-6:]


def test_bits_of_a_longer_draw_begin_with_the_shorter_one() -> None:
    key = random.key(5)
    assert torch.equal(random.bits(key, 1000)[:30], random.bits(key, 30))


def test_seeds_are_two_words() -> None:
    assert random.key(-1).tolist() == [ONES, ONES]
    assert random.key(2**64 - 1).tolist() == [ONES, ONES]
    assert random.key(7 << 32 | 5, device="cpu").tolist() == [5, 7]
    assert random.key(0, device="meta").device.type == "meta"


def test_derived_keys_are_the_reference_on_the_last_stream() -> None:
    key, data = random.key(99), 2**40 + 3
    counter = [data & ONES, data >> 32, ONES, ONES]
    assert random.fold_in(key, data).tolist() == reference(counter, key.tolist())[:2]
    assert torch.equal(random.fold_in(key, -1), random.fold_in(key, 2**64 - 1))


def test_the_op_is_deterministic_to_torch() -> None:
    assert torch.Tag.nondeterministic_seeded not in RANDOM_BITS.tags
    assert not RANDOM_BITS._schema.is_mutable


def test_draws_leave_the_default_generator_alone() -> None:
    before = torch.get_rng_state()
    for draw in DRAWS.values():
        draw(random.key(0))
    assert torch.equal(before, torch.get_rng_state())


def test_default_device_does_not_move_a_draw() -> None:
    key = random.key(0, device="cpu")
    with torch.device("meta"):
        assert random.bits(key, 4).device.type == "cpu"
        assert random.bits(key, 1000).device.type == "cpu"
        assert random.decompose_random_bits(key, 0, 4).device.type == "cpu"


@all_draws
def test_a_draw_is_one_random_op_and_no_sync(draw: Callable[[Tensor], Tensor]) -> None:
    key = random.key(0)
    with Ops() as ops:
        draw(key)
    assert ops.seen["fcg.random_bits.default"] == 1
    assert not any("local_scalar_dense" in op for op in ops.seen)
    assert sum(ops.seen.values()) < 100


@pytest.mark.parametrize("name", [name for name in DRAWS if not name.startswith(("fold_in", "split"))])
def test_streams_tell_draws_of_one_key_apart(name: str) -> None:
    streams = (0, 1, 2, 2**31, 2**32, 2**40)
    draws = [DRAWS[name](random.key(0), stream=stream) for stream in streams]
    assert torch.equal(draws[0], DRAWS[name](random.key(0)))
    for i, one in enumerate(draws):
        assert torch.equal(one, DRAWS[name](random.key(0), stream=streams[i]))
        assert not any(torch.equal(one, other) for other in draws[:i])


@all_draws
def test_fake_tensors_get_the_same_layout(draw: Callable[[Tensor], Tensor]) -> None:
    real = draw(random.key(0))
    with FakeTensorMode():
        fake = draw(random.key(0))
    assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
    assert fake.stride() == real.stride()


@all_draws
def test_a_trace_replays_for_another_key(draw: Callable[[Tensor], Tensor]) -> None:
    graph = make_fx(draw, tracing_mode="fake")(random.key(0))
    assert [node.target for node in graph.graph.nodes].count(RANDOM_BITS) == 1
    assert torch.equal(graph(random.key(1)), draw(random.key(1)))


@all_draws
def test_decomposed_trace_has_plain_ops_and_the_same_bits(draw: Callable[[Tensor], Tensor]) -> None:
    table = {RANDOM_BITS: random.decompose_random_bits}
    graph = make_fx(draw, tracing_mode="fake", decomposition_table=table)(random.key(0))
    assert RANDOM_BITS not in [node.target for node in graph.graph.nodes]
    assert torch.equal(graph(random.key(1)), draw(random.key(1)))


@all_draws
def test_vmap_over_keys_equals_a_loop(draw: Callable[[Tensor], Tensor]) -> None:
    keys = random.split(random.key(0), 3)
    assert torch.equal(torch.func.vmap(draw)(keys), torch.stack([draw(key) for key in keys]))


def test_no_product_of_the_decomposition_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A C++ compiler drops the masks that repair an overflow: draws of one block came out wrong under inductor."""
    products = []

    def recorded(word: Any, factor: int, multiply: Callable[..., Any] = _random_bits.multiply) -> Any:
        products.append(factor if factor < 2**31 else factor - 2**32)
        return multiply(word, factor)

    for module in (_random_bits, samplers):
        monkeypatch.setattr(module, "multiply", recorded)
    random.decompose_random_bits(random.key(0), -1, 2)
    random.randint(random.key(0), (1,), 0, 2**63)
    assert products
    assert all(-(2**63) <= factor * ONES < 2**63 for factor in products)


@pytest.mark.slow
@pytest.mark.parametrize("decompose", [False, True])
def test_inductor_keeps_the_bits(decompose: bool) -> None:
    # A decomposed draw takes seconds to compile: one for each way to use the words.
    few = ("bits", "fold_in", "uniform scaled", "randint", "dropout")
    exact = share(few, len(few)) if decompose else DRAWS.keys() - ROUNDED

    def program(key: Tensor) -> tuple[Tensor, ...]:
        return tuple(DRAWS[name](key) for name in sorted(exact))

    key = random.key(3)
    table = {RANDOM_BITS: random.decompose_random_bits} if decompose else {}
    graph = make_fx(program, tracing_mode="fake", decomposition_table=table)(key)
    compiled = torch._inductor.standalone_compile(graph, [key], dynamic_shapes="from_example_inputs")
    for got, want in zip(compiled(key), program(key), strict=True):
        assert torch.equal(got, want)


NOT_KEYS = [
    torch.zeros(2),
    torch.zeros(3, dtype=torch.int64),
    torch.zeros(2, dtype=torch.int32),
    torch.zeros((2, 2), dtype=torch.int64),
]


@all_draws
@pytest.mark.parametrize("key", NOT_KEYS, ids=["f32", "3", "i32", "2x2"])
def test_what_is_not_a_key_is_refused(draw: Callable[[Tensor], Tensor], key: Tensor) -> None:
    with pytest.raises(LayoutError, match=r"expected int64\[2\]   got"):
        draw(key)


KEY, CPU = random.key(0), torch.ones(3)
META = torch.ones(3, device="meta")
REFUSALS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: random.bits(0, 4), TypeError, r"To fix: `fcg\.random\.key\(0\)`"),
    (lambda: random.key(2**64), ValueError, "`seed`: expected an integer from"),
    (lambda: random.key(torch.tensor(1)), TypeError, "`seed`: expected a Python int, got int64"),
    (lambda: random.key(1.0), TypeError, "got float 1.0"),
    (lambda: random.bits(KEY, -1), ValueError, "`n`: expected"),
    (lambda: random.bits(KEY, 4, stream=-1), ValueError, "`stream`: expected an integer from 0"),
    (lambda: random.split(KEY, torch.tensor(2)), TypeError, "`n`: expected a Python int"),
    (lambda: random.fold_in(KEY, torch.zeros(1, dtype=torch.int64)), LayoutError, r"got int64\[1\]@cpu"),
    (lambda: random.fold_in(KEY, torch.tensor(1.0)), LayoutError, "a key folds in one integer"),
    (lambda: random.fold_in(KEY, torch.tensor(1, device="meta")), LayoutError, r"\[\] on cpu   got .*meta"),
    (lambda: random.fold_in(KEY, 1.5), TypeError, "`data`: expected a Python int"),
    (lambda: random.fold_in(KEY, 2**64), ValueError, "`data`: expected"),
    (lambda: random.uniform(KEY, 3), TypeError, "`shape`: expected a tuple of integers, got int 3"),
    (lambda: random.uniform(KEY, (2.0,)), TypeError, "`shape`: expected a Python int"),
    (lambda: random.uniform(KEY, (-1,)), ValueError, "`shape`: expected an integer from 0"),
    (lambda: random.uniform(KEY, (1,), dtype=torch.int64), TypeError, "expected a floating dtype"),
    (lambda: random.uniform(KEY, (1,), low=1.0), ValueError, "expected low < high"),
    (lambda: random.uniform(KEY, (1,), high=math.inf), ValueError, "expected low < high"),
    (lambda: random.uniform(KEY, (1,), high=math.nan), ValueError, "expected low < high"),
    (lambda: random.uniform(KEY, (1,), high=1e5, dtype=torch.float16), ValueError, "at most 6.55e"),
    (lambda: random.uniform(KEY, (1,), low=1.001, high=1.002, dtype=torch.bfloat16), ValueError, "no number"),
    (lambda: random.normal(KEY, (1,), dtype=torch.int32), TypeError, "expected a floating dtype"),
    (lambda: random.bernoulli(KEY, 1.5, (1,)), ValueError, "`p`: expected a Python number from 0 to 1"),
    (lambda: random.bernoulli(KEY, torch.ones(2, 3), (3,)), LayoutError, "does not broadcast"),
    (lambda: random.bernoulli(KEY, torch.ones(3), (1,)), LayoutError, r"broadcasts to \[1\]"),
    (lambda: random.bernoulli(KEY, META, (3,)), LayoutError, "on two devices"),
    (lambda: random.bernoulli(KEY, torch.tensor(1), (3,)), TypeError, "`p`: expected a floating tensor"),
    (lambda: random.randint(KEY, (1,), 3, 3), ValueError, "`high`: expected an integer from 4"),
    (lambda: random.randint(KEY, (1,), 0, 300, dtype=torch.uint8), ValueError, "`high`: expected .* to 256"),
    (lambda: random.randint(KEY, (1,), -(2**63), 1), ValueError, "`high`: expected"),
    (lambda: random.randint(KEY, (1,), 0, torch.tensor(3)), TypeError, "`high`: expected a Python int"),
    (lambda: random.randint(KEY, (1,), 0, 3, dtype=torch.float32), TypeError, "expected an integer dtype"),
    (lambda: random.permutation(KEY, 2.0), TypeError, "`n`: expected a Python int"),
    (lambda: random.dropout(KEY, CPU, 1.1), ValueError, "`p`: expected a Python number from 0 to 1"),
    (lambda: random.dropout(KEY, CPU, math.nan), ValueError, "got float nan"),
    (lambda: random.dropout(KEY, CPU, torch.tensor(0.5)), ValueError, r"got float32\[\]@cpu"),
    (lambda: random.dropout(KEY, CPU.long(), 0.5), TypeError, "`x`: expected a floating tensor"),
    (lambda: random.dropout(KEY, META, 0.5), LayoutError, "x  expected a tensor on cpu"),
    (lambda: random.categorical(KEY, CPU.long()), TypeError, "`logits`: expected a floating tensor"),
    (
        lambda: random.exponential(KEY, (1,), rate=0.0),
        ValueError,
        "`rate`: expected a positive Python number",
    ),
    (lambda: random.exponential(KEY, (1,), dtype=torch.int32), TypeError, "expected a floating dtype"),
    (lambda: random.truncated_normal(KEY, (1,), 2.0, 2.0), ValueError, "expected low < high"),
    (lambda: random.truncated_normal(KEY, (1,), 40.0, 50.0), ValueError, "expected low < high"),
    (lambda: random.truncated_normal(KEY, (1,), math.nan, 1.0), ValueError, "expected low < high"),
    (lambda: random.gamma(KEY, -1.0, (1,)), ValueError, "`concentration`: expected a positive Python number"),
    (lambda: random.gamma(KEY, math.inf, (1,)), ValueError, "got float inf"),
    (lambda: random.gamma(KEY, CPU, (4,)), LayoutError, "`concentration` does not broadcast to `shape`"),
    (lambda: random.gamma(KEY, META, (3,)), LayoutError, "concentration  expected a tensor on cpu"),
    (lambda: random.gamma(KEY, CPU.long(), (3,)), TypeError, "`concentration`: expected a floating tensor"),
    (lambda: random.beta(KEY, CPU, 0.0, (3,)), ValueError, "`b`: expected a positive Python number"),
    (lambda: random.dirichlet(KEY, CPU, 3), TypeError, "`shape`: expected a tuple of integers, got int 3"),
    (lambda: random.poisson(KEY, math.nan, (1,)), ValueError, "`rate`: expected a positive Python number"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS)
def test_refusals_say_what_was_expected(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with Ops() as ops, pytest.raises(error, match=message):
        call()
    assert not any("random_bits" in op or "local_scalar" in op for op in ops.seen)


def test_dropout_gradient_is_its_mask() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = random.dropout(KEY, x, 0.25)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out, x * grad)
    assert sorted(set(grad.tolist())) == pytest.approx([0.0, 4 / 3])


def test_dropout_of_nothing_and_of_everything() -> None:
    x = torch.ones(5, requires_grad=True)
    assert random.dropout(KEY, x, 0.0) is x
    gone = random.dropout(KEY, x, 1)
    assert not gone.any()
    assert not torch.autograd.grad(gone.sum(), x)[0].any()


def test_dropout_under_vmap_shares_a_mask_unless_keys_differ() -> None:
    x = torch.ones(2, 50)
    shared = torch.func.vmap(lambda row: random.dropout(KEY, row, 0.5))(x)
    assert torch.equal(shared[0], shared[1])
    own = torch.func.vmap(lambda key, row: random.dropout(key, row, 0.5))(random.split(KEY), x)
    assert not torch.equal(own[0], own[1])


N = 100_000


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Pearson's statistic in standard deviations from its mean: about normal."""
    freedom = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_uniform_is_uniform(dtype: torch.dtype) -> None:
    draws = random.uniform(random.key(1), (N,), dtype=dtype).double()
    assert abs(draws.mean().item() - 0.5) < 5 * math.sqrt(1 / 12 / N)
    assert abs(draws.var().item() - 1 / 12) < 1e-3
    counts = torch.histc(random.uniform(random.key(1), (N,)), 64, 0, 1)
    assert abs(chi_square(counts, torch.full((64,), N / 64))) < 5


def test_normal_is_normal() -> None:
    draws = random.normal(random.key(2), (N,), mean=3.0, std=2.0).double()
    standard = (draws - 3.0) / 2.0
    assert abs(standard.mean().item()) < 5 / math.sqrt(N)
    assert abs(standard.var().item() - 1) < 5 * math.sqrt(2 / N)
    assert abs((standard**4).mean().item() - 3) < 5 * math.sqrt(96 / N)
    edges = torch.tensor([-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    cdf = torch.cat([torch.zeros(1), torch.special.ndtr(edges), torch.ones(1)])
    counts = torch.bincount(torch.bucketize(standard, edges), minlength=10)
    assert abs(chi_square(counts, cdf.diff() * N)) < 5


def test_normal_pairs_are_uncorrelated() -> None:
    draws = random.normal(random.key(3), (2, N // 2))
    assert abs((draws[0] * draws[1]).mean().item()) < 5 / math.sqrt(N / 2)


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.3, 0.5, 1.0])
def test_bernoulli_has_mean_p(p: float) -> None:
    draws = random.bernoulli(random.key(4), p, (N,))
    assert draws.dtype == torch.bool
    assert abs(draws.double().mean().item() - p) <= 5 * math.sqrt(p * (1 - p) / N)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_randint_is_uniform(dtype: torch.dtype) -> None:
    draws = random.randint(random.key(5), (N,), 3, 100, dtype=dtype).long()
    assert abs(chi_square(torch.bincount(draws - 3, minlength=97), torch.full((97,), N / 97))) < 5


def test_permutations_are_equally_likely() -> None:
    keys = random.split(random.key(6), 6000)
    orders = torch.func.vmap(lambda key: random.permutation(key, 3))(keys)
    counts = torch.unique(orders, dim=0, return_counts=True)[1]
    assert len(counts) == 6
    assert abs(chi_square(counts, torch.full((6,), 1000.0))) < 5


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_is_unbiased(p: float) -> None:
    draws = random.dropout(random.key(7), torch.ones(N), p)
    assert abs(draws.double().mean().item() - 1) < 5 * math.sqrt(p / (1 - p) / N)


def test_categorical_follows_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0, -1.0])
    draws = random.categorical(random.key(8), logits.expand(N, 5))
    counts = torch.bincount(draws, minlength=5)
    assert counts[2] == 0
    possible = [0, 1, 3, 4]
    assert abs(chi_square(counts[possible], logits.softmax(0)[possible] * N)) < 5


def test_categorical_takes_an_axis() -> None:
    logits = random.normal(KEY, (3, 4, 5))
    assert random.categorical(KEY, logits, axis=1).shape == (3, 5)


def test_sequential_seeds_are_unrelated() -> None:
    draws = torch.stack([random.uniform(random.key(seed), (1000,)) for seed in range(40)])
    correlation = torch.corrcoef(draws) - torch.eye(40)
    assert correlation.abs().max() < 6 / math.sqrt(1000)
