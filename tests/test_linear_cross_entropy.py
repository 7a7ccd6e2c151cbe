"""Chunked linear + cross-entropy, compared with the two calls that it replaces."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import functional_cg as fcg
from functional_cg.testing import assert_replay_equals_eager

loss_of = fcg.nn.linear_cross_entropy
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}  # as its docstring says


def judge(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    logits = F.linear(hidden, weight).flatten(0, -2)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=ignore_index, reduction=reduction)
    return loss.view(targets.shape) if reduction == "none" else loss


def distance(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    if not expected.numel():
        return 0.0
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=0.1))


def problem(rows: tuple[int, ...], features: int, classes: int, dtype: torch.dtype, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*rows, features, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(classes, features, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(classes, rows, generator=generator)


@given(
    rows=st.lists(st.integers(0, 6), min_size=1, max_size=2).map(tuple),
    features=st.integers(1, 9),
    classes=st.integers(1, 12),
    chunk=st.integers(1, 40),
    dtype=st.sampled_from(list(BOUNDS)),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    ignored=st.sampled_from([-100, 0, -1, 3]),
    seed=st.integers(0, 2**16),
)
def test_value_and_gradients_are_those_of_the_two_calls(
    rows: tuple[int, ...], features: int, classes: int, chunk: int, dtype: torch.dtype, reduction: Any,
    ignored: int, seed: int,
) -> None:  # fmt: skip
    hidden, weight, targets = problem(rows, features, classes, dtype, seed)
    targets[torch.rand(rows) < 0.3] = ignored
    got = loss_of(hidden, weight, targets, chunk=chunk, ignore_index=ignored, reduction=reduction)
    expected = judge(hidden, weight, targets, ignored, reduction)
    if reduction == "mean" and not (targets != ignored).any():
        assert got.isnan()
        assert expected.isnan()
    else:
        assert distance(got, expected) <= BOUNDS[dtype]
    incoming = torch.randn(expected.shape, dtype=expected.dtype)
    found = torch.autograd.grad(got, (hidden, weight), incoming)
    wanted = torch.autograd.grad(expected, (hidden, weight), incoming)
    for one, other in zip(found, wanted, strict=True):
        assert distance(one, other) <= BOUNDS[dtype]


def test_gradients_are_those_of_finite_differences() -> None:
    hidden, weight, targets = problem((5,), 3, 4, torch.float64, 0)
    targets[2] = -100
    for reduction in ("mean", "sum", "none"):
        assert torch.autograd.gradcheck(
            lambda h, w, how=reduction: loss_of(h, w, targets, chunk=2, reduction=how),
            (hidden, weight),
        )


def test_large_logits_and_small_gradients_of_half_precision_survive() -> None:
    """Gradients are rounded before they are divided by the number of rows, so that fp16 does not lose them."""
    hidden, weight, targets = problem((512,), 4, 300, torch.float16, 1)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    found = torch.autograd.grad(1024 * loss_of(hidden, weight, targets), (hidden, weight))
    wanted = torch.autograd.grad(1024 * judge(*wide, targets, -100, "mean"), wide)
    for one, other in zip(found, wanted, strict=True):
        assert distance(one.double(), other) < 2e-2
    assert loss_of(hidden * 30, weight * 30, targets).isfinite()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_all_logits_are_never_there_at_once(reduction: Any) -> None:
    hidden, weight, targets = problem((64,), 4, 100, torch.float32, 2)
    with Largest() as ours:
        loss_of(hidden, weight, targets, chunk=8, reduction=reduction).sum().backward()
    assert ours.numel == 8 * 100
    with Largest() as theirs:
        judge(hidden, weight, targets, -100, reduction).sum().backward()
    assert theirs.numel == 64 * 100


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11
def test_what_needs_no_gradient_gets_no_work() -> None:
    hidden, weight, targets = problem((6,), 3, 4, torch.float32, 3)

    def products(h: Tensor, w: Tensor) -> int:
        with torch.profiler.profile() as profiler:
            loss = loss_of(h, w, targets, chunk=3)
            if loss.requires_grad:
                loss.backward()
        return sum(event.count for event in profiler.key_averages() if event.key == "aten::mm")

    fixed_h, fixed_w = hidden.detach(), weight.detach()
    assert [products(fixed_h, fixed_w), products(hidden, fixed_w), products(fixed_h, weight)] == [2, 4, 4]
    assert products(hidden, weight) == 6


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_differentiating_twice_is_refused_and_never_loses_terms(reduction: Any) -> None:
    hidden, weight, targets = problem((3,), 3, 4, torch.float32, 4)

    def penalized(w: Tensor) -> Tensor:
        fn = lambda w: loss_of(hidden, w, targets, reduction=reduction).sum()  # noqa: E731
        return fcg.grad(fn)(w).square().sum()

    with pytest.raises(RuntimeError, match="differentiated twice"):
        fcg.grad(penalized)(weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_captured_step_repeats_the_eager_one_and_learns(dtype: torch.dtype, reduction: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    params = {"embed": torch.randn(11, 8, generator=generator), "head": torch.zeros(11, 8)}
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.5))

    def train_step(state: Any, tokens: Tensor) -> Any:
        def compute(p: Any) -> Tensor:
            hidden = F.embedding(tokens, p["embed"]).to(dtype)
            return loss_of(hidden, p["head"].to(dtype), tokens, chunk=4, reduction=reduction).mean()

        loss, grads = fcg.value_and_grad(compute)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    batches = [(torch.randint(11, (2, 5), generator=generator),) for _ in range(20)]
    step = fcg.graph_step(train_step, lowering="aten")
    assert_replay_equals_eager(step, state, batches)
    losses = []
    for (tokens,) in batches:
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    assert step.stats.captures >= 1


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"targets": torch.zeros(2, dtype=torch.int64)}, ValueError, r"hidden \[3, 4\].*targets \[2\]"),
        ({"weight": torch.zeros(5, 3)}, ValueError, r"weight \[5, 3\]"),
        ({"weight": torch.zeros(0, 4)}, ValueError, r"weight \[0, 4\]"),
        ({"weight": torch.zeros(5, 4, dtype=torch.float64)}, TypeError, r"weight\.to\(hidden\.dtype\)"),
        ({"targets": torch.zeros(3, dtype=torch.int32)}, TypeError, r"targets\.long\(\)"),
        ({"chunk": 0}, ValueError, "chunk must be a positive integer, got 0"),
        ({"chunk": True}, ValueError, "chunk must be"),
        ({"reduction": "avg"}, ValueError, "one of mean, sum, none, got 'avg'"),
        ({"targets": torch.tensor([0, 5, 1])}, RuntimeError, "out of bounds"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(5, 4)}
    with pytest.raises(error, match=text):
        loss_of(**(arguments | {"targets": torch.zeros(3, dtype=torch.int64)} | change))


@pytest.mark.cuda
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_memory_on_a_gpu_is_what_the_docstring_says(lowering: Any) -> None:
    rows, features, classes, chunk = 4096, 256, 16_384, 512
    generator = torch.Generator().manual_seed(6)
    head = torch.randn(classes, features, generator=generator)
    state = fcg.TrainState.create(params={"head": head.cuda() * 0.02}, optimizer=fcg.optim.sgd(0.1))
    x = torch.randn(rows, features, generator=generator).bfloat16().cuda()
    y = torch.randint(classes, (rows,), generator=generator).cuda()

    def train_step(state: Any, x: Tensor, y: Tensor) -> Any:
        fn = lambda p: loss_of(x, p["head"].bfloat16(), y, chunk=chunk)  # noqa: E731
        loss, grads = fcg.value_and_grad(fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    expected = judge(x.cpu(), head.mul(0.02).bfloat16(), y.cpu(), -100, "mean")
    # The compiler tries variants of its kernels on copies of what they write: a first time, not from its cache.
    fcg.graph_step(train_step, lowering=lowering, branches=1)(fcg.fork(state), x, y)
    step = fcg.graph_step(train_step, lowering=lowering, branches=1)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    state, metrics = step(state, x, y)
    assert abs(float(metrics["loss"]) - float(expected)) < 2e-2
    weights = 4 * head.numel()  # the largest tensor beside the logits: a few copies of it are alive
    assert torch.cuda.max_memory_allocated() - before < chunk * classes * 12 + 6 * weights + 2**24
    assert chunk * classes * 12 + 6 * weights < rows * classes * 6  # else the line above proves nothing
