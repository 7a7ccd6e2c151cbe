"""Keyed random numbers on CUDA: bitwise those of the CPU, captured and replayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from functional_cg import random

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

RANDOM_BITS = torch.ops.fcg.random_bits.default
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "bits": lambda key: random.bits(key, 10_001, stream=2**40 + 1),
    "fold_in": lambda key: random.fold_in(key, -3),
    "fold_in tensor": lambda key: random.fold_in(key, torch.full((), 2**40, device=key.device)),
    "split": lambda key: random.split(key, 9),
    "uniform": lambda key: random.uniform(key, (99, 101)),
    "uniform scaled": lambda key: random.uniform(key, (99, 101), low=-1.3, high=2.7),
    "uniform f64": lambda key: random.uniform(key, (99, 101), dtype=torch.float64),
    "uniform f16": lambda key: random.uniform(key, (99, 101), low=-0.3, dtype=torch.float16),
    "uniform bf16": lambda key: random.uniform(key, (99, 101), high=3.0, dtype=torch.bfloat16),
    "bernoulli": lambda key: random.bernoulli(key, 0.3, (99, 101)),
    "bernoulli tensor": lambda key: random.bernoulli(
        key, torch.full((101,), 0.3, device=key.device), (99, 101)
    ),
    "randint": lambda key: random.randint(key, (99, 101), -3, 2**62),
    "randint u8": lambda key: random.randint(key, (99, 101), 0, 256, dtype=torch.uint8),
    "permutation": lambda key: random.permutation(key, 9_999),
    "dropout": lambda key: random.dropout(key, torch.ones((99, 101), device=key.device), 0.3),
    "dropout bf16": lambda key: random.dropout(
        key, torch.ones((99, 101), device=key.device, dtype=torch.bfloat16), 0.3
    ),
}
# A compiler may round the product and the sum of a scaled draw only once.
CLOSE: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform f64 scaled": lambda key: random.uniform(key, (99, 101), low=0.1, high=0.7, dtype=torch.float64),
    "normal": lambda key: random.normal(key, (99, 101), mean=1.0, std=2.0),
    "categorical": lambda key: random.categorical(key, torch.ones((999, 7), device=key.device)),
    "exponential": lambda key: random.exponential(key, (99, 101), rate=2.0),
    "truncated_normal": lambda key: random.truncated_normal(key, (99, 101), -1.0, 3.0),
    "gamma": lambda key: random.gamma(key, torch.linspace(0.1, 50, 101, device=key.device), (99, 101)),
    "beta": lambda key: random.beta(key, 0.5, 3.0, (99, 101)),
    "dirichlet": lambda key: random.dirichlet(key, torch.linspace(0.1, 5, 101, device=key.device), (99, 101)),
    "poisson": lambda key: random.poisson(key, torch.linspace(0.1, 500, 101, device=key.device), (99, 101)),
}
exact_draws = pytest.mark.parametrize("draw", EXACT.values(), ids=EXACT)
all_draws = pytest.mark.parametrize("draw", (EXACT | CLOSE).values(), ids=EXACT | CLOSE)


@pytest.mark.parametrize("stream", [0, 1, 16, -1, 2**31 + 5, 2**62 + 12_345])
@pytest.mark.parametrize("key", [[0, 0], [2**32 - 1, 5], [3, 2**32 - 1, -1], [7, 8, 2**32 - 3], [-1, -2]])
@pytest.mark.parametrize("n", [0, 1, 4, 7, 2047, 2048, 2049, 1_000_003])
def test_kernel_equals_cpu(key: list[int], stream: int, n: int) -> None:
    want = RANDOM_BITS(torch.tensor(key), stream, n)
    got = RANDOM_BITS(torch.tensor(key, device="cuda"), stream, n)
    assert got.dtype == torch.int32
    assert torch.equal(got.cpu(), want)


def test_strided_key() -> None:
    key = torch.arange(4, device="cuda")[::2]
    assert torch.equal(random.bits(key, 100).cpu(), random.bits(key.cpu(), 100))


def test_decomposition_equals_the_kernel() -> None:
    key = random.key(2**63 + 11, device="cuda")
    assert torch.equal(random.decompose_random_bits(key, 5, 10_001), RANDOM_BITS(key, 5, 10_001))


@exact_draws
def test_cuda_equals_cpu(draw: Callable[[Tensor], Tensor]) -> None:
    for seed in (0, 2**63 + 5):
        got = draw(random.key(seed, device="cuda"))
        assert got.is_cuda
        assert torch.equal(got.cpu(), draw(random.key(seed)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (1.0, 2.0), (-5.0, 0.1)])
def test_normal_is_within_its_bound(dtype: torch.dtype, mean: float, std: float) -> None:
    cpu, cuda = (
        random.normal(random.key(3, device=device), (1_000_000,), mean=mean, std=std, dtype=dtype)
        .cpu()
        .double()
        for device in ("cpu", "cuda")
    )
    last_place = torch.finfo(dtype).eps * cpu.abs()
    assert ((cpu - cuda).abs() <= 1e-13 * (abs(mean) + abs(std)) + last_place).all()


def test_categorical_agrees() -> None:
    logits = random.normal(random.key(1), (10_000, 13))
    cuda = random.categorical(random.key(2, device="cuda"), logits.cuda())
    assert torch.equal(cuda.cpu(), random.categorical(random.key(2), logits))


@pytest.mark.parametrize("draw", CLOSE.values(), ids=CLOSE)
def test_other_draws_are_close_to_the_cpus(draw: Callable[[Tensor], Tensor]) -> None:
    """But for a few where functions differ in their last bits just where a proposal is accepted, or a count changes."""
    cpu, cuda = (draw(random.key(5, device=device)).cpu().double() for device in ("cpu", "cuda"))
    apart = (cpu - cuda).abs() > 1e-6 * (1 + cpu.abs())
    assert int(apart.sum()) <= 2


def test_gradients_of_a_gamma_draw_are_the_cpus() -> None:
    def slopes(device: str) -> Tensor:
        alpha = torch.linspace(0.05, 20, 1001, dtype=torch.float64, device=device, requires_grad=True)
        draws = random.gamma(random.key(6, device=device), alpha, (1001,), dtype=torch.float64)
        return torch.autograd.grad(draws.log().sum(), alpha)[0].cpu()

    cpu, cuda = slopes("cpu"), slopes("cuda")
    assert int(((cpu - cuda).abs() > 1e-5 * (1 + cpu.abs())).sum()) <= 2


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@all_draws
def test_no_synchronisation(draw: Callable[[Tensor], Tensor]) -> None:
    key = random.key(0, device="cuda")
    draw(key)
    torch.cuda.set_sync_debug_mode("error")
    try:
        draw(key)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@all_draws
def test_replay_draws_anew_from_a_new_key(draw: Callable[[Tensor], Tensor]) -> None:
    key = random.key(0, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        draw(key)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = draw(key)
    for seed in range(16):
        key.copy_(random.key(seed, device="cuda"))
        out.zero_()
        graph.replay()
        assert torch.equal(out, draw(random.key(seed, device="cuda")))


def test_keys_are_made_inside_a_capture() -> None:
    random.key(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        key = random.key(2**40 + 3, device="cuda")
    graph.replay()
    assert torch.equal(key.cpu(), random.key(2**40 + 3))


def test_dropout_gradient_is_its_mask() -> None:
    x = torch.randn(1000, device="cuda", requires_grad=True)
    out = random.dropout(random.key(0, device="cuda"), x, 0.25)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out, x * grad)


@pytest.mark.slow
@exact_draws
def test_inductor_keeps_the_bits(draw: Callable[[Tensor], Tensor]) -> None:
    key = random.key(3, device="cuda")
    assert torch.equal(torch.compile(draw, fullgraph=True)(key), draw(key))


@pytest.mark.slow
def test_inductor_scales_to_the_last_bit_but_one() -> None:
    draw = CLOSE["uniform f64 scaled"]
    want = draw(random.key(3, device="cuda"))
    assert torch.equal(want.cpu(), draw(random.key(3)))
    got = torch.compile(draw, fullgraph=True)(random.key(3, device="cuda"))
    assert ((got - want).abs() <= torch.finfo(torch.float64).eps * want).all()


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 10_001])
def test_inductor_keeps_the_bits_of_the_decomposition(n: int) -> None:
    key = random.key(3, device="cuda")
    compiled = torch.compile(random.decompose_random_bits, fullgraph=True, dynamic=False)
    assert torch.equal(compiled(key, -1, n), RANDOM_BITS(key, -1, n))
