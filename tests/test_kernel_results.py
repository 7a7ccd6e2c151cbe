"""Fake results lie as the kernels' results do, and are of their dtypes.

What lies otherwise is laid out before a later call relies on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, reject
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import functional_cg as fcg
from functional_cg.stages import plan
from functional_cg.stages.layouts import laid_out
from functional_cg.tensors.fake_mode import FakeMode
from functional_cg.testing import assert_trees_all_equal
from tests.compiled_graphs import ON_A_GPU, graph_of
from tests.shares import CALLS

aten = torch.ops.aten
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def batch_norm(x: Tensor, _: Tensor) -> Any:
    ones = x.new_ones(x.shape[1])
    return aten.native_batch_norm(x, ones, ones, ones.clone(), ones.clone(), True, 0.1, 1e-5)


def batch_norm_backward(x: Tensor, y: Tensor) -> Any:
    ones = x.new_ones(x.shape[1])
    return aten.native_batch_norm_backward(x, y, ones, ones, ones, ones, ones, True, 1e-5, [True, True, True])


def layer_norm(x: Tensor, _: Tensor) -> Any:
    ones = x.new_ones(x.shape[-1])
    return aten.native_layer_norm(x, [x.shape[-1]], ones, ones, 1e-5)


def layer_norm_backward(x: Tensor, y: Tensor) -> Any:
    ones, one = x.new_ones(x.shape[-1]), x.new_ones(*x.shape[:-1], 1)
    return aten.native_layer_norm_backward(x, y, [x.shape[-1]], one, one, ones, ones, [True, True, True])


# Two operands of one shape.
OPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": aten.add.Tensor,
    "where": lambda x, y: aten.where.self(x > 0, x, y),
    "copysign of a number": lambda x, y: aten.copysign.Tensor(x, y.sum()),
    "rounded quotient": lambda x, y: aten.div.Tensor_mode(x, y.sum(), rounding_mode="floor"),
    "floor_divide": lambda x, y: aten.floor_divide(x, y.sum()),
    "power of a number": lambda x, y: aten.pow.Scalar(2, x),
    "power of one": lambda x, y: aten.pow.Scalar(1, x),
    "xlogy": aten.xlogy.Tensor,
    "hardswish_backward": aten.hardswish_backward,
    "hardtanh_backward": lambda x, y: aten.hardtanh_backward(x, y, -1.0, 1.0),
    "threshold_backward": lambda x, y: aten.threshold_backward(x, y, 0.0),
    "gelu_backward": aten.gelu_backward,
    "silu_backward": aten.silu_backward,
    "softplus_backward": lambda x, y: aten.softplus_backward(x, y, 1.0, 20.0),
    "huber_loss_backward": lambda x, y: aten.huber_loss_backward(x, y, y, 1, 1.0),
    "mse_loss_backward": lambda x, y: aten.mse_loss_backward(x.sum(), x, y, 1),
    "smooth_l1_loss_backward": lambda x, y: aten.smooth_l1_loss_backward(x.sum(), x, y, 1, 1.0),
    "log_sigmoid": lambda x, y: aten.log_sigmoid_forward(x),
    "log_softmax": lambda x, y: aten._log_softmax(x, 1, False),
    "softmax": lambda x, y: aten._softmax(x, 1, False),
    "log_softmax backward": lambda x, y: aten._log_softmax_backward_data(x, y, 1, x.dtype),
    "softmax backward": lambda x, y: aten._softmax_backward_data(x, y, 1, x.dtype),
    "clone": lambda x, y: aten.clone(x),
    "contiguous clone": lambda x, y: aten.clone(x, memory_format=torch.contiguous_format),
    "other dtype": lambda x, y: aten._to_copy(x, dtype=torch.float64),
    "layer norm": layer_norm,
    "layer norm backward": layer_norm_backward,
    "batch norm": batch_norm,
    "batch norm backward": batch_norm_backward,
}


@st.composite
def operands(draw: Any) -> tuple[tuple[int, ...], list[tuple[int, ...]], list[tuple[int, ...]]]:
    """A shape, and for each of two tensors the order of its dimensions in memory, and its gaps.

    With a gap of 0, all are one value; with -1, elements of the next dimension overlap, as windows do. That of one
    element would overlap with nothing.
    """
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 5]), min_size=2, max_size=4)))
    ranks = st.permutations(range(len(shape)))
    gaps = st.lists(
        st.sampled_from([1, 1, 1, 1, 2, 0, -1 if min(shape) > 1 else 1]),
        min_size=len(shape),
        max_size=len(shape),
    )
    return shape, [tuple(draw(ranks)) for _ in range(2)], [tuple(draw(gaps)) for _ in range(2)]


def strides_of(shape: tuple[int, ...], order: tuple[int, ...], gaps: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [0] * len(shape), 1
    for place in order:
        step *= max(gaps[place], 1)
        stride[place] = step if gaps[place] else 0
        step = step + 1 if gaps[place] < 0 else step * shape[place] if gaps[place] else step
    return tuple(stride)


def laid(out: Any) -> list[tuple[int, ...]]:
    return [one.stride() for one in ([out] if isinstance(out, Tensor) else out)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
@given(drawn=operands())
def test_fake_results_lie_as_those_of_the_kernel(name: str, device: str, drawn: Any) -> None:
    shape, orders, gaps = drawn
    if name.startswith("batch norm"):  # they refuse expanded tensors and single values
        shape, gaps = (4, *shape[1:]), [tuple(max(abs(gap), 1) for gap in row) for row in gaps]
    strides = [strides_of(shape, *pair) for pair in zip(orders, gaps, strict=True)]
    room = [
        1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) for stride in strides
    ]
    held = [torch.full((length,), 0.5, device=device) for length in room]
    real = [one.as_strided(shape, stride) for one, stride in zip(held, strides, strict=True)]
    try:
        wanted = laid(OPS[name](*real))
    except RuntimeError:  # on some processors, a kernel has no code for some windows
        reject()
    mode = FakeMode()
    with mode:
        fake = [torch.empty_strided(shape, stride, device=device) for stride in strides]
        found = laid(OPS[name](*fake))
    assert found == wanted, f"{shape} {strides}"


MIXED: dict[str, Callable[..., Any]] = {
    "add": aten.add.Tensor,
    "where": lambda x, y: aten.where.self(x > 0, x, y),
    "outer product": lambda x, y: aten.addr(x, y[0], y[1]),
    "huber_loss": lambda x, y: aten.huber_loss(x, y, 0),
    "mean huber_loss": aten.huber_loss,
    "soft_margin_loss": lambda x, y: aten.soft_margin_loss(x, y, 0),
    "dropout backward": lambda x, y: aten.native_dropout_backward(x, y, 2.0),
    "layer norm": lambda x, y: aten.native_layer_norm(x, [4], y[0], y[1], 1e-5),
    "group norm": lambda x, y: aten.native_group_norm(x.view(2, 4, 2), y[0], y[1], 2, 4, 2, 2, 1e-5),
    "batch norm": lambda x, y: aten.native_batch_norm(x, y[0], y[1], y[2], y[3].abs(), True, 0.1, 1e-5),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MIXED)
def test_fake_results_are_of_the_dtypes_of_the_kernel(name: str, device: str) -> None:
    floats = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    compared = 0
    for one, other in itertools.product((*floats, torch.int64), floats):
        real = [torch.ones(4, 4, dtype=dtype, device=device) for dtype in (one, other)]
        try:
            wanted = MIXED[name](*real)
        except RuntimeError:  # no kernel takes these together
            continue
        with FakeMode():
            found = MIXED[name](*(torch.empty(4, 4, dtype=dtype, device=device) for dtype in (one, other)))
        pairs = zip(*([out] if isinstance(out, Tensor) else out for out in (found, wanted)), strict=True)
        assert all((a.dtype, a.shape) == (b.dtype, b.shape) for a, b in pairs), (one, other)
        compared += 1
    assert compared > 4 or device == "cuda"  # whose kernels take few of them together


def test_windows_that_overlap_are_differentiated() -> None:
    """As in a step with ``torch.istft``, or with a loss over windows."""

    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            windows = (x * params["w"]).unfold(-1, 4, 2)
            spectrum = torch.stft(x, 8, 2, window=torch.hann_window(8), return_complex=True)
            sound = torch.istft(spectrum * params["w"].sum(), 8, 2, window=torch.hann_window(8))
            return windows.square().mean() + sound.square().mean() + (windows[0] * 2).flatten().mean()

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    state = fcg.TrainState.create(params={"w": torch.randn(16)}, optimizer=fcg.optim.sgd(0.1))
    step = fcg.graph_step(train_step, lowering="aten")
    for _ in range(CALLS):
        x = torch.randn(2, 16)
        expected = step.eager(fcg.fork(state), x)
        state, metrics = step(state, x)
        assert_trees_all_equal((state, metrics), expected)


def test_calls_that_differ_in_a_number_alone_are_told_apart() -> None:
    real = [torch.full((4, 3, 2), 0.5).transpose(0, 2).contiguous().transpose(0, 2) for _ in range(2)]
    wanted = {name: laid(op(*real)) for name, op in OPS.items()}
    with FakeMode():
        fake = [torch.empty_strided(one.shape, one.stride()) for one in real]
        assert {name: laid(op(*fake)) for name, op in OPS.items()} == wanted


def test_no_op_that_draws_is_asked() -> None:
    state = torch.get_rng_state()
    with FakeMode():
        x = torch.empty(3, 4).t()
        for draw in (torch.bernoulli, torch.rand_like, torch.randn_like, lambda x: F.dropout(x, 0.5)):
            draw(x)
    assert torch.equal(torch.get_rng_state(), state)


def turned(x: Tensor) -> dict[str, Tensor]:
    """The fake ``channel_shuffle`` lies in the order of its dimensions, and the real one in channels_last."""
    shuffled = F.channel_shuffle(x, 2)
    return {
        "flat": shuffled.reshape(x.shape[0], -1) * 2,
        "strided": torch.as_strided(shuffled, (4,), (3,)) * 1
        if not shuffled.is_contiguous()
        else shuffled.view(-1)[:12:3],
        "product": (shuffled * x).sum((2, 3)),
    }


def image(call: int, device: str) -> Tensor:
    values = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(call))
    return values.to(device).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
def test_results_that_lie_otherwise_than_traced_are_laid_out(device: str, lowering: Any) -> None:
    step = fcg.graph_fn(turned, lowering=lowering)
    for call in range(CALLS):
        x = image(call, device)
        expected, out = turned(x), step(x)
        assert torch.equal(out["flat"], expected["flat"])
        assert torch.equal(out["strided"], F.channel_shuffle(x, 2).flatten()[:12:3])
        torch.testing.assert_close(out["product"], expected["product"])
    assert step.stats.replays == CALLS


def test_without_it_a_later_view_fails() -> None:
    """The case above is one: else it would prove nothing."""
    with mock.patch.object(plan, "unsure", return_value=[]), pytest.raises(RuntimeError, match="view size"):
        fcg.graph_fn(turned, lowering="aten")(image(0, "cpu"))


@given(drawn=operands())
def test_laid_out_keeps_values(drawn: Any) -> None:
    shape, orders, _ = drawn
    stride, other = (strides_of(shape, order, (1,) * len(shape)) for order in orders)
    x = torch.empty_strided(shape, stride).copy_(torch.arange(float(torch.Size(shape).numel())).view(shape))
    out = laid_out(x, other)
    assert torch.equal(out, x)
    assert all(size == 1 or a == b for size, a, b in zip(shape, out.stride(), other, strict=True))


class Net(torch.nn.Module):
    """Ends in images of one pixel, whose strides say little, and which kernels go by."""

    def __init__(self, last: str) -> None:
        super().__init__()
        conv, norm = torch.nn.Conv2d, torch.nn.BatchNorm2d
        self.body = torch.nn.Sequential(
            conv(3, 8, 3, 2), norm(8), torch.nn.Hardswish(), conv(8, 8, 3, 2), norm(8), torch.nn.Softplus(),
            conv(8, 4, 1), norm(4), torch.nn.Hardtanh() if last == "hardtanh" else torch.nn.Mish(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(1).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [7, 11])
@pytest.mark.parametrize("last", ["hardtanh", "mish"])
def test_an_image_net_is_bitwise_its_eager_run(size: int, last: str) -> None:
    torch.manual_seed(0)
    apply, params, buffers = fcg.from_module(Net(last).to(memory_format=torch.channels_last))  # type: ignore[call-overload]

    @fcg.graph_step(lowering="aten")
    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            return apply(params, state.buffers, x)

        (loss, new), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, buffers=new), {"loss": loss}

    state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=fcg.optim.adam(1e-2))
    twin = fcg.fork(state)
    for call in range(CALLS):
        x = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(call))
        x = x.contiguous(memory_format=torch.channels_last)
        state, metrics = train_step(state, x)
        twin, expected = train_step.eager(twin, x)
        assert_trees_all_equal((state, metrics), (twin, expected))


class Strides(TorchDispatchMode):
    """Notes the strides of what convolutions read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in str(func):
            self.seen.append((func, *(arg.stride() for arg in args if isinstance(arg, Tensor))))
        return func(*args, **(kwargs or {}))


class Mixer(nn.Module):
    """A block that normalizes pictures over their channels, as ConvNeXt does."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 4, 4), norm
        self.deep = nn.Conv2d(8, 8, 7, padding=3, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + self.deep(x).relu()


@pytest.mark.kernels
@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.RMSNorm(8)], ids=["layer norm", "rms norm"])
def test_convolutions_of_a_compiled_step_read_what_lies_as_traced(norm: nn.Module) -> None:
    """What is computed again for the backward is computed by formulas, which lay it out in their own way."""
    apply, params, _ = fcg.from_module(Mixer(norm))

    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            return apply(params, {}, x)[0].square().mean()  # type: ignore[no-any-return]

        loss, grads = fcg.value_and_grad(loss_fn)(state)
        return fcg.tree.map(torch.sub, state, grads), {"loss": loss}

    state, x = fcg.place(dict(params)), torch.randn(2, 3, 16, 16)
    graph, given = graph_of(step, state, x, prepared=True)
    with Strides() as compiled, torch.no_grad():
        graph(*given)
    with Strides() as eager:
        fcg.graph_step(step).eager(state, x)
    assert len(eager.seen) == 4
    assert compiled.seen == eager.seen


@torch.library.custom_op("fcg_tests::cached_attention", mutates_args=("cache",))
def cached_attention(cache: Tensor, x: Tensor) -> Tensor:
    """An op of a library, which may have any name."""
    cache.add_(1.0)
    return cache * x


@cached_attention.register_fake
def _(cache: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_what_an_op_writes_is_no_copy_in_other_strides() -> None:
    """The compiler's formula for this logarithm lays it out in another way than the kernel does."""

    def written(x: Tensor) -> dict[str, Tensor]:
        cache = F.logsigmoid(x)
        return {"out": cached_attention(cache, x), "cache": cache * 1}

    step = fcg.graph_fn(written, lowering="inductor")
    for call in range(CALLS):
        x = image(call, "cpu")
        torch.testing.assert_close(step(x), written(x))
    assert step.stats.replays == CALLS
