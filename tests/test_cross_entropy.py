"""A large cross-entropy and its gradient in one kernel: the kernel, and which losses of a step use it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.stages.core import lookup
from functional_cg.stages.fx_passes import logits as large
from functional_cg.stages.fx_passes.canonical import VIEWS, pick_by_comparison
from functional_cg.stages.fx_passes.cross_entropy import rewrite_losses
from tests.compiled_graphs import assert_same_results, graph_of
from tests.shares import few, share

IGNORED = -100
ROWS, CLASSES, WIDTH = 256, 1_032, 8
LARGE = 2**20  # bytes, as many as log-probabilities have: more of them in the package
OP = torch.ops.fcg.cross_entropy_.default
HALF, WIDE = torch.bfloat16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(autouse=True, scope="module")
def _large_enough() -> Iterator[None]:
    with mock.patch.object(large, "_LARGE", LARGE):
        yield


# --- the kernel --------------------------------------------------------------------------------------------


def kernel(
    rows: Tensor, target: Tensor, scale: float, links: Any = ([], [], []), *, apart: bool = False
) -> Tensor:
    """Losses by the kernel, which overwrites the rows with their gradient; with ``apart``, by two."""
    counts, classes = target != IGNORED, rows.shape[1]
    factor = torch.where(counts, scale, 0.0)
    factors = torch.stack([factor, -factor, torch.zeros_like(factor)])
    index = torch.where(counts, target, 0)
    if apart:
        numbers = torch.ops.fcg.read_rows(rows, index, False, classes, *links)
        torch.ops.fcg.write_rows_(rows, index, numbers, factors, classes, *links)
    else:
        numbers = OP(rows, index, factors, False, classes, *links)
    return torch.where(counts, -numbers[2], 0)


def judge(rows: Tensor, target: Tensor, scale: float, ignored: int = IGNORED) -> tuple[Tensor, Tensor]:
    """Losses and gradient by torch, in fp64."""
    wide = rows.double().requires_grad_()
    losses = F.cross_entropy(wide, target, reduction="none", ignore_index=ignored)
    return losses.detach(), torch.autograd.grad((losses * scale).sum(), wide)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("classes", [1, 2, 17, 1000, 8192, 8193, 50_257])
@pytest.mark.parametrize("apart", [False, True])
def test_losses_and_slopes_are_those_of_torch(
    device: str, dtype: torch.dtype, classes: int, apart: bool
) -> None:
    torch.manual_seed(classes)
    rows = (torch.randn(9, classes) * 5).to(dtype)
    target = torch.randint(0, classes, (9,))
    target[[1, 4]] = IGNORED
    expected, slopes = judge(rows, target, 0.25)
    mine = rows.to(device)
    losses = kernel(mine, target.to(device), 0.25, apart=apart)
    # fp32 arithmetic on sums of up to 50,257 terms; the gradient is rounded to the dtype of the logits once.
    torch.testing.assert_close(losses.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(mine.double().cpu(), slopes, rtol=rounding, atol=1e-7)
    assert mine[[1, 4]].eq(0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_targets_may_be_a_column(device: str) -> None:
    torch.manual_seed(0)
    rows, target = torch.randn(9, 50), torch.randint(0, 50, (9, 3))[:, 1]
    expected, slopes = judge(rows, target, 1.0)
    mine = rows.to(device)
    losses = kernel(mine, target.to(device), 1.0)
    torch.testing.assert_close(losses.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.double().cpu(), slopes, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_masked_classes_and_extreme_logits(device: str) -> None:
    rows = torch.zeros(4, 9000)
    rows[0, :8500] = -torch.inf  # the whole first block
    rows[1, 5] = 3e38
    rows[2] = -3e38
    rows[3] = -torch.inf
    target = torch.tensor([8999, 5, 7, 0])
    expected, slopes = judge(rows, target, 1.0)
    mine = rows.to(device)
    losses = kernel(mine, target.to(device), 1.0)
    torch.testing.assert_close(losses.double().cpu(), expected, equal_nan=True)
    torch.testing.assert_close(mine.double().cpu(), slopes, equal_nan=True)


# Calls, numbers and dtypes of what is made of logits before their loss.
CHAINS = {
    "cap": (HALF, ["div", "tanh", "mul"], [30.0, 1.0, 30.0], [HALF] * 3),
    "cap, then cast": (HALF, ["div", "tanh", "mul", "cast"], [30.0, 1.0, 30.0, 1.0], [HALF] * 3 + [WIDE]),
    "cast, then cap": (HALF, ["cast", "mul", "tanh", "mul"], [1.0, 0.07, 1.0, 9.0], [WIDE] * 4),
    "halves": (torch.float16, ["div", "tanh", "mul"], [5.0, 1.0, 5.0], [torch.float16] * 3),
    "narrowed": (WIDE, ["tanh", "cast", "mul"], [1.0, 1.0, 3.0], [WIDE, HALF, HALF]),
    "scale": (HALF, ["div"], [8.0], [HALF]),
    "two caps": (WIDE, ["tanh", "mul", "tanh"], [1.0, 3.0, 1.0], [WIDE] * 3),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("classes", [17, 2048, 5000])
@pytest.mark.parametrize("apart", [False, True])
def test_what_is_made_of_logits_is_made_in_the_kernel(
    device: str, chain: str, classes: int, apart: bool
) -> None:
    """Losses and slopes are those of the same calls one by one; where a call rounds, the kernel rounds.

    The judge is a CPU, whose gradient of ``tanh`` rounds once; that of a GPU rounds the square and the difference, too.
    """
    torch.manual_seed(classes)
    dtype, *links = CHAINS[chain]
    rows = torch.cat([torch.randn(40, classes) * 40, torch.randn(9, classes) * 0.2]).to(dtype)
    rows[0, :9] = torch.tensor([0.0, -0.0, 1e-6, 0.25, -0.25, 0.2499, 30.0, torch.inf, -torch.inf])
    target = torch.randint(0, classes, (49,))
    target[[1, 4]] = IGNORED
    names = [str(into).removeprefix("torch.") for into in links[2]]
    leaf = rows.clone().requires_grad_()
    made = leaf
    for call, number, into in zip(*links, strict=True):
        made = {"cast": made, "mul": made * number, "div": made / number, "tanh": made.tanh()}[call].to(into)
    losses = F.cross_entropy(made.float(), target, reduction="none", ignore_index=IGNORED)
    (slopes,) = torch.autograd.grad((losses * 0.25).sum(), leaf)
    mine = rows.to(device, copy=True)
    found = kernel(mine, target.to(device), 0.25, (*links[:2], names), apart=apart).cpu()
    rows = mine.cpu()
    # A tanh whose last bit differs may round the other way, which moves all that follows from it.
    halves = {dtype, *links[2]} - {WIDE}
    atol, rtol = (1e-3, 2**-6) if halves else (1e-5, 2e-5)
    torch.testing.assert_close(found, losses.detach(), rtol=1e-4, atol=atol, equal_nan=True)
    torch.testing.assert_close(rows, slopes, rtol=rtol, atol=1e-6, equal_nan=True)
    # In single precision the last bits of a tanh differ, and those of one minus its square.
    near = {"rtol": 1e-5, "atol": 2e-7} if dtype is WIDE else {"rtol": 0.0, "atol": 0.0}
    same = torch.isclose(rows, slopes, **near, equal_nan=True)
    assert not halves or same.float().mean() > 0.97
    assert rows[[1, 4]].eq(0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("classes", [3, 8193])
def test_numbers_of_rows(device: str, dtype: torch.dtype, classes: int) -> None:
    """What all logits have in common costs no digits of the sum of log-probabilities."""
    torch.manual_seed(classes)
    rows = (torch.randn(6, classes) + torch.tensor([0.0, 1e4, -1e4, 3.0, 5.0, 0.0]).unsqueeze(1)).to(dtype)
    rows[3, 0], rows[4, 1] = -torch.inf, -torch.inf
    target, factors = torch.tensor([0, 1, 2, 2, 0, 2]), torch.tensor([[2.0, -1.0, 0.25]] * 6).T.contiguous()
    wide = rows.double()
    logp = wide.log_softmax(1)
    slopes = 2 * logp.exp() - F.one_hot(target, classes) + 0.25
    mine, links = rows.to(device, copy=True), ([], [], [])
    apart = torch.ops.fcg.read_rows(mine, target.to(device), True, classes, *links).cpu().double()
    numbers = OP(mine, target.to(device), factors.to(device), True, classes, *links).cpu().double()
    assert numbers.equal(apart)
    near: Any = {"rtol": 2e-6, "atol": 1e-5}
    torch.testing.assert_close(numbers[0], wide.amax(1), rtol=0, atol=0)
    torch.testing.assert_close(numbers[0] + numbers[1], wide.logsumexp(1), **near)
    torch.testing.assert_close(numbers[2], logp.gather(1, target.unsqueeze(1)).squeeze(1), **near)
    torch.testing.assert_close(numbers[3], logp.sum(1), rtol=2e-6, atol=1e-5 * classes)
    rounding = 1e-5 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(mine.double().cpu(), slopes, rtol=rounding, atol=1e-6)


@pytest.mark.cuda
def test_rows_beyond_32_bits_of_elements() -> None:
    rows = torch.zeros(43_000, 50_304, dtype=torch.bfloat16, device="cuda")
    target = torch.arange(43_000, device="cuda")
    losses = kernel(rows, target, 1.0)
    torch.testing.assert_close(losses, torch.full_like(losses, 50_304).log())
    assert rows[-1, 42_999].item() == pytest.approx(-1, abs=1e-2)
    assert rows[-1, :42_999].eq(torch.tensor(1 / 50_304).bfloat16().item()).all()


@pytest.mark.cuda
def test_a_target_that_is_no_class_is_an_error_on_the_device() -> None:
    source = textwrap.dedent("""
        import torch
        import functional_cg
        rows = torch.zeros(2, 100, device="cuda")
        target = torch.tensor([3, 100], device="cuda")
        torch.ops.fcg.cross_entropy_(rows, target, torch.ones(3, 2, device="cuda"), False, 100, [], [], [])
        torch.cuda.synchronize()
    """)
    found = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode != 0
    assert "a target is no class" in found.stderr + found.stdout
    assert "device-side assert" in found.stderr


# --- which losses get it -----------------------------------------------------------------------------------


def mean_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), y)


def initial(device: str = "cpu") -> Any:
    torch.manual_seed(0)
    head = torch.randn(CLASSES, WIDTH) * 0.5
    return fcg.TrainState.create(params={"head": head.to(device)}, optimizer=fcg.optim.sgd(10.0))


def batch(seed: int, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    y[seed % ROWS] = IGNORED
    return {"x": torch.randn(ROWS, WIDTH, generator=generator).to(device), "y": y.to(device)}


def step_of(loss: Any, dtype: torch.dtype = torch.bfloat16, *, gradient: bool = True) -> Any:
    def train_step(state: Any, batch: Any) -> Any:
        def fn(p: Any) -> Tensor:
            logits = batch["x"].to(dtype) @ p["head"].to(dtype).T
            return loss(logits, batch["y"])  # type: ignore[no-any-return]

        if not gradient:
            return state, {"loss": fn(state.params)}
        value, grads = fcg.value_and_grad(fn)(state.params)
        return state.apply_gradients(grads), {"loss": value}

    return train_step


def picked_and_joined(graph: Any) -> None:
    pick_by_comparison(graph)
    rewrite_losses(graph)


def joined(train_step: Any, *, in_range: bool = False) -> tuple[int, int]:
    """How many losses of a step get one kernel, and how many get two; what it computes stays what it was.

    With targets that are all in range, the step is prepared as on a GPU.
    """
    given = batch(3)
    if in_range:
        given["y"].clamp_(min=0)
    module, arguments = graph_of(train_step, initial(), given, prepared=in_range)
    # Where a slope is rounded to bf16 the other way, the sum of a weight's gradient moves by 2**-8 of that slope.
    # Three losses may be rounded apart.
    atol = 4e-3 if in_range else 1e-3
    assert_same_results(module, arguments, picked_and_joined, rtol=2e-5, atol=atol)
    calls = [node.target for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    assert all(map(lookup._is_known, calls)), "a later process would compile it again"
    return count(module, OP), count(module, torch.ops.fcg.write_rows_.default)


def count(module: Any, op: Any) -> int:
    return len(module.graph.find_nodes(op="call_function", target=op))


@pytest.mark.parametrize(
    "loss",
    share([
        mean_loss,
        lambda logits, y: F.cross_entropy(logits.float(), y, reduction="sum"),
        lambda logits, y: F.cross_entropy(logits.float(), torch.where(y == IGNORED, 7, y), ignore_index=7),
        lambda logits, y: F.cross_entropy(logits.view(2, -1, CLASSES).flatten(0, 1).float(), y),
        lambda logits, y: mean_loss(logits, y) * 0.125 + 3.0,
        lambda logits, y: mean_loss(logits, y) * (y != IGNORED).sum() / 100,
        lambda logits, y: -mean_loss(logits, y),
        lambda logits, y: F.cross_entropy(logits.float(), y, reduction="none").mean(),
        lambda logits, y: (F.cross_entropy(logits.float(), y, reduction="none") * (y % 3)).sum() / 7,
        lambda logits, y: F.nll_loss(logits.float().log_softmax(1), (y + 1) % CLASSES),
        lambda logits, y: F.cross_entropy(logits.float().tanh(), y),
        lambda logits, y: mean_loss(30.0 * torch.tanh(logits / 30.0), y),
        lambda logits, y: mean_loss(logits.view(2, -1, CLASSES).div(3).tanh().mul(2).flatten(0, 1), y),
        lambda logits, y: F.cross_entropy((logits.view(2, -1, CLASSES).float() / 8).flatten(0, 1), y),
        lambda logits, y: mean_loss((torch.tanh(logits) * 3).tanh() * 0.5, y),
    ], 3),
    ids=share([
        "mean", "sum", "ignored", "views", "scaled", "scaled by the batch", "negative", "by row", "weighted rows",
        "later targets", "tanh", "cap", "cap of views", "scaled logits", "two caps",
    ], 3),
)  # fmt: skip
def test_losses_that_get_it(loss: Any) -> None:
    assert joined(step_of(loss)) == (1, 0)


def rounded(logits: Tensor, y: Tensor, reduction: str) -> Tensor:
    """As autocast has it on a GPU."""
    return F.nll_loss(logits.flatten(0, 1).log_softmax(-1).float(), y, reduction=reduction)


SPELLINGS = {
    "cast, then view": lambda logits: logits.float().view(-1, logits.shape[-1]),
    "view, then cast": lambda logits: logits.view(-1, logits.shape[-1]).float(),
    "cast between views": lambda logits: logits.view(4, -1, logits.shape[-1]).float().flatten(0, 1),
    "cast, then two views": lambda logits: logits.float().view(4, -1, logits.shape[-1]).flatten(0, 1),
    "log-softmax of three dimensions": None,
    "rounded log-probabilities": rounded,
    "flattened": lambda logits: logits.flatten(0, 1).float(),
}
CAPS = {
    "none": lambda logits: logits,
    "cap": lambda logits: 30.0 * torch.tanh(logits / 30.0),
    "cap in fp32": lambda logits: torch.tanh(logits.float() / 3.0).mul(3.0),
    "scale": lambda logits: logits * 0.125,
}
PRODUCTS = {
    "linear": lambda x, head, bias: F.linear(x, head),
    "with a bias": F.linear,
    "from the left": lambda x, head, bias: x @ head.t().contiguous(),
}


@few
@given(
    st.sampled_from(sorted(SPELLINGS)),
    st.sampled_from(sorted(CAPS)),
    st.sampled_from(sorted(PRODUCTS)),
    st.sampled_from([CLASSES, CLASSES + 1, CLASSES + 2]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.sampled_from(["mean", "sum"]),
)
def test_the_spelling_does_not_matter(
    spelling: str, cap: str, product: str, classes: int, dtype: torch.dtype, reduction: str
) -> None:
    """Casts, caps and views in any order, odd numbers of classes: one kernel, on the product, no copy of its rows."""

    def train_step(state: Any, batch: Any) -> Any:
        def fn(p: Any) -> Tensor:
            x = batch["x"].to(dtype).view(2, -1, WIDTH)
            logits = CAPS[cap](PRODUCTS[product](x, p["head"].to(dtype), p["bias"].to(dtype)))
            spell = SPELLINGS[spelling]
            if spell is None:
                logp = logits.float().log_softmax(-1).view(-1, classes)
                return F.nll_loss(logp, batch["y"], reduction=reduction)
            if spell is rounded:
                return rounded(logits, batch["y"], reduction)
            return F.cross_entropy(spell(logits), batch["y"], reduction=reduction)

        value, grads = fcg.value_and_grad(fn)(state.params)
        return state.apply_gradients(grads), {"loss": value}

    torch.manual_seed(0)
    params = {"head": torch.randn(classes, WIDTH) * 0.5, "bias": torch.randn(classes)}
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(1.0))
    module, arguments = graph_of(train_step, state, batch(3))
    # Log-probabilities that are rounded differ by as much; a slope is rounded to the dtype of the logits once.
    near = (
        {"rtol": 2e-5, "atol": 1e-3}
        if spelling != "rounded log-probabilities"
        else {"rtol": 0.1, "atol": 0.1}
    )
    assert_same_results(module, arguments, rewrite_losses, **near)
    (joined,) = module.graph.find_nodes(op="call_function", target=OP)
    rows = joined.args[0]
    while rows.target in VIEWS:
        rows = rows.args[0]
    width = rows.meta["spec"].shape[1]
    assert rows.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    assert width * dtype.itemsize % 16 == 0
    products = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert all("slice" not in str(part.target) for one in products for part in one.all_input_nodes)


def test_logits_of_f32_get_it() -> None:
    assert joined(step_of(mean_loss, torch.float32)) == (1, 0)


def _smooth_by_hand(logits: Tensor, y: Tensor) -> Tensor:
    logp = logits.float().log_softmax(-1)
    return -(0.9 * logp.gather(1, y.unsqueeze(1)).squeeze(1) + 0.1 * logp.mean(-1)).mean()


def _focal(logits: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.float(), y, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


# Losses of rows, each with its gradient: whether it is known before the logits are read.
TERMS: dict[str, tuple[bool, Any]] = {
    "mean": (True, mean_loss),
    "sum": (True, lambda logits, y: F.cross_entropy(logits.float(), y, reduction="sum") / ROWS),
    "weighted": (True, lambda z, y: (F.cross_entropy(z.float(), y, reduction="none") * (y % 3)).mean()),
    "by hand": (True, lambda z, y: (z.float().logsumexp(1) - z.float().gather(1, y[:, None])[:, 0]).mean()),
    "smooth by hand": (True, _smooth_by_hand),
    "smooth": (False, lambda logits, y: F.cross_entropy(logits.float(), y, label_smoothing=0.1)),
    "squared": (False, lambda logits, y: mean_loss(logits, y) ** 2 / 10),
    "z-loss": (False, lambda logits, y: 1e-2 * logits.float().logsumexp(1).square().mean()),
    "negative": (
        False,
        lambda logits, y: -0.1 * logits.float().logsumexp(-1, keepdim=True).sqrt().sum() / ROWS,
    ),
    "focal": (False, _focal),
    "both": (True, lambda z, y: (z.float().log_softmax(1).sum(1) / -CLASSES).mean() + mean_loss(z, y)),
}


@few
@given(
    st.lists(st.sampled_from(sorted(TERMS)), min_size=1, max_size=3),
    st.sampled_from(sorted(CAPS)),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.booleans(),
)
def test_any_loss_of_rows_gets_them(terms: list[str], cap: str, dtype: torch.dtype, of_batches: bool) -> None:
    """Sums of losses of one product, whose gradients are made of softmax, one-hot rows and constants."""

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        if of_batches:
            logits = logits.view(4, -1, CLASSES)
        logits = CAPS[cap](logits).view(-1, CLASSES)
        return sum(TERMS[term][1](logits, y) for term in terms)  # type: ignore[no-any-return]

    if not any("z-loss" not in term and "negative" not in term for term in terms):
        terms = [*terms, "mean"]  # these two pick nothing
    known = all(TERMS[term][0] for term in terms)
    assert joined(step_of(loss, dtype), in_range=True) == ((1, 0) if known else (0, 1))


@pytest.mark.parametrize(
    "loss",
    share([
        lambda logits, y: F.cross_entropy(logits.float(), y, weight=torch.ones(CLASSES)),
        lambda logits, y: F.cross_entropy(logits.float().sigmoid(), y),
        lambda logits, y: mean_loss(logits * (y.max() * 0 + 2), y),
        lambda logits, y: mean_loss(capped := logits.tanh(), y) + capped.max(),
        lambda logits, y: mean_loss(logits.tanh(), y) + logits.max(),
        lambda logits, y: mean_loss(logits + 1.0, y),
        lambda logits, y: mean_loss(logits, y) + mean_loss(logits, (y + 1).clamp(0, CLASSES - 1)),
        lambda logits, y: mean_loss(logits[:16], y[:16]),
        lambda logits, y: mean_loss(logits, y.abs()) + F.cross_entropy(logits.float(), y.abs(), ignore_index=3),
        lambda logits, y: mean_loss(logits, y) - logits.float().softmax(1).square().mean(),
        lambda logits, y: F.nll_loss(logp := logits.float().log_softmax(-1), logp.argmax(1)),
        lambda logits, y: mean_loss(logits, logits.argmax(1)),
    ], 2),
    ids=share([
        "weights", "sigmoid", "scaled by a value", "cap that is read", "logits that are read", "shifted",
        "two targets", "small", "ignored twice", "squares of softmax", "own targets", "own, earlier",
    ], 2),
)  # fmt: skip
def test_losses_that_do_not(loss: Any) -> None:
    assert joined(step_of(loss)) == (0, 0)


class _OtherSlope(torch.autograd.Function):
    """A cap with the gradient of another one."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, other: Any) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(logits)
        ctx.other = other
        return 3.0 * torch.tanh(logits / 3.0)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:  # type: ignore[override]
        (logits,) = ctx.saved_tensors
        times, over, made = ctx.other(logits)
        return torch.ops.aten.tanh_backward(slope * times, made) / over, None


@pytest.mark.parametrize(
    ("other", "gets_it"),
    [
        (lambda x: (3.0, 3.0, torch.tanh(x / 3.0)), True),
        (lambda x: (2.0, 3.0, torch.tanh(x / 3.0)), False),
        (lambda x: (3.0, 2.0, torch.tanh(x / 3.0)), False),
        (lambda x: (3.0, 3.0, torch.tanh(x / 2.0)), False),
        (lambda x: (3.0, 3.0, torch.tanh(x)), False),
    ],
    ids=["its own", "other factor", "other divisor", "of another value", "of the logits"],
)
def test_a_cap_gets_it_with_its_own_gradient_alone(other: Any, gets_it: bool) -> None:
    assert joined(step_of(lambda logits, y: mean_loss(_OtherSlope.apply(logits, other), y))) == (gets_it, 0)


def test_a_gradient_that_takes_many_calls_is_computed_earlier_once() -> None:
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        value, h = mean_loss(logits, y), y.double() / CLASSES
        for _ in range(40):
            h = h + torch.tanh(h) / 2**40  # 2**40 ways lead to the first
        return value * h.mean().float().detach()

    assert joined(step_of(loss)) == (1, 0)


def test_a_loss_without_gradient_is_left_alone() -> None:
    assert joined(step_of(mean_loss, gradient=False)) == (0, 0)


def test_logits_that_leave_the_step_are_left_alone() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        def fn(p: Any) -> Any:
            logits = batch["x"].bfloat16() @ p["head"].bfloat16().T
            return mean_loss(logits, batch["y"]), logits

        (value, logits), grads = fcg.value_and_grad(fn, has_aux=True)(state.params)
        return state.apply_gradients(grads), {"loss": value, "logits": logits}

    assert joined(train_step) == (0, 0)


def test_a_gradient_that_is_cast_twice_is_left_alone() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        logits = batch["x"].bfloat16() @ state.params["head"].bfloat16().T
        value, (slope,) = fcg.value_and_grad(lambda z: mean_loss(z[0], batch["y"]))((logits.float(),))
        kept, changed = slope.bfloat16(), slope.bfloat16()
        changed[0].mul_(0.0)
        return state, {"loss": value, "kept": kept.float().sum(0), "changed": changed.float().sum(0)}

    assert joined(train_step) == (0, 0)


def test_each_of_two_losses_gets_it() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        def fn(p: Any) -> Any:
            head = p["head"].bfloat16().T
            return sum(mean_loss((batch["x"] * k).bfloat16() @ head, batch["y"]) for k in (1, 2)) / 2

        value, grads = fcg.value_and_grad(fn)(state.params)
        return state.apply_gradients(grads), {"loss": value}

    assert joined(train_step) == (2, 0)


def test_a_loss_may_be_weighted_by_what_another_one_overwrites() -> None:
    """The slope of the first loss stands in the memory of its logits; the weight of the second is made of the slope."""

    def train_step(state: Any, b: Any) -> Any:
        x = b["x"].bfloat16()

        def both(p: Any) -> Any:
            head = p["head"].bfloat16().T
            ahead = (2 * x @ head).float().log_softmax(1)
            loss = fcg.value_and_grad(lambda logits: 100 * mean_loss(logits.float(), b["y"]))
            first, slope = loss((x @ head).detach())
            weight = slope.float().square().sum()
            return F.nll_loss(ahead, b["y"]) * weight, {"first": first, "weight": weight}

        (value, metrics), grads = fcg.value_and_grad(both, has_aux=True)(state.params)
        return state.replace(params=grads), {"loss": value, **metrics}

    assert joined(train_step) == (2, 0)


def test_compiled_it_needs_no_copy_of_the_logits() -> None:
    from torch._inductor import standalone_compile
    from torch._inductor.utils import run_and_get_code

    module, arguments = graph_of(step_of(mean_loss), initial(), batch(3))
    rewrite_losses(module.graph)
    module.recompile()
    compiled = lambda: standalone_compile(module, arguments, dynamic_shapes="from_example_inputs")  # noqa: E731
    with torch.no_grad():
        _, (code,) = run_and_get_code(lambda: compiled()(*arguments))
    assert code.count(f"({ROWS}, {CLASSES}), ({CLASSES}, 1), torch.bfloat16)") == 1
    assert code.count("cross_entropy_.default(buf") == 1


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_captured_step_is_within_rounding_of_the_eager_one(dtype: torch.dtype) -> None:
    step = fcg.graph_step(step_of(mean_loss, dtype))
    state, twin = initial("cuda"), initial("cuda")
    for seed in range(16):
        state, metrics = step(state, batch(seed, "cuda"))
        twin, expected = step.eager(twin, batch(seed, "cuda"))
        torch.testing.assert_close(metrics["loss"], expected["loss"], rtol=1e-4, atol=1e-5)
    assert step.stats.replays == 16
    assert "cross_entropy_" in step.lower(state, batch(0, "cuda")).plan.as_text()
    torch.testing.assert_close(
        state.params["head"].clone(), twin.params["head"].clone(), rtol=1e-2, atol=2e-2
    )


# --- what is overwritten in between ------------------------------------------------------------------------


def odd_step(loss: Any) -> Any:
    """A step whose product has to be padded."""

    def train_step(state: Any, b: Any) -> Any:
        value, grads = fcg.value_and_grad(lambda p: loss(p["head"], b))(state)
        return fcg.tree.map(lambda p, g: p - g, state, grads), {"loss": value}

    return train_step


def overwritten_weight(head: Tensor, b: Any) -> Tensor:
    weight = head * 1.0
    weight[0].fill_(3.0)
    return F.cross_entropy(b["x"] @ weight.t(), b["y"])


def checked(head: Tensor, b: Any) -> Tensor:
    torch._assert_async((b["x"] < 100).all(), "too large")
    return F.cross_entropy(b["x"] @ head.t(), b["y"])


def number_as_bias(head: Tensor, b: Any) -> Tensor:
    return F.cross_entropy(torch.addmm(b["x"].sum(), b["x"], head.t()), b["y"])


@pytest.mark.parametrize("loss", [overwritten_weight, checked, number_as_bias])
def test_a_padded_product_has_what_the_product_has(loss: Any) -> None:
    """A weight that was overwritten in part, checks beside it, a bias without dimensions."""
    torch.manual_seed(0)
    state = fcg.place({"head": torch.randn(CLASSES + 1, WIDTH)})
    module, arguments = graph_of(odd_step(loss), state, batch(3))
    checks = len(module.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_async.msg))
    assert_same_results(module, arguments, rewrite_losses, rtol=2e-5, atol=1e-3)
    assert len(module.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_async.msg)) == checks
    assert checks == (loss is checked)


def test_a_target_that_is_overwritten_between_two_losses_is_read_when_it_is_read() -> None:
    def train_step(state: Any, b: Any) -> Any:
        y = b["y"] * 1
        fn = fcg.value_and_grad(lambda p: F.cross_entropy(b["x"] @ p["head"].t(), y))
        first, _ = fn(state)
        y[:5].fill_(0)
        second, grads = fn(state)
        return fcg.tree.map(lambda p, g: p - g, state, grads), {"first": first, "second": second}

    state = fcg.place({"head": torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))})
    module, arguments = graph_of(train_step, state, batch(3))
    assert_same_results(module, arguments, rewrite_losses, rtol=2e-5, atol=1e-3)


def test_a_view_of_a_cast_that_is_overwritten_is_one_memory() -> None:
    def train_step(state: Any, b: Any) -> Any:
        def fn(p: Any) -> Any:
            loss = F.cross_entropy(b["x"] @ p["head"].t(), b["y"])
            wide = b["x"].bfloat16().float()
            flat, other = wide.view(-1), wide.view(4, -1)
            flat[:8].zero_()
            return loss, other * 1.0

        (value, other), grads = fcg.value_and_grad(fn, has_aux=True)(state)
        return fcg.tree.map(lambda p, g: p - g, state, grads), {"loss": value, "other": other}

    state = fcg.place({"head": torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))})
    module, arguments = graph_of(train_step, state, batch(3))
    assert_same_results(module, arguments, rewrite_losses, rtol=2e-5, atol=1e-3)
