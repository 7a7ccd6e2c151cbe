"""The formulas of convolutions in small groups equal torch's own kernels, and the others stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import functional_cg as fcg
from functional_cg.stages.passes import convolutions
from tests.test_sweep import seeded

aten = torch.ops.aten
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "_on_gpu", lambda x: True)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]:
    """Input, weight, bias and the other arguments of a convolution."""
    dims, groups, inputs, outputs = (draw(st.integers(1, most)) for most in (3, 3, 3, 3))
    each = lambda least, most: draw(st.lists(st.integers(least, most), min_size=dims, max_size=dims))  # noqa: E731
    kernel, stride, padding, dilation = each(1, 3), each(1, 3), each(0, 2), each(1, 2)
    kernel = draw(st.sampled_from([kernel, [1] * dims]))
    padding, dilation = draw(st.sampled_from([(padding, dilation), ([0] * dims, [1] * dims)]))
    dtype, generator = draw(st.sampled_from([*ROUNDING])), seeded(draw(st.integers(0, 9)))

    def normal(*shape: int) -> Tensor:
        value = torch.randn(shape, generator=generator).to(dtype)
        return value.movedim(1, -1).contiguous().movedim(-1, 1) if draw(st.booleans()) and dims > 1 else value

    x, weight = (
        normal(draw(st.integers(0, 2)), groups * inputs, *each(5, 8)),
        normal(groups * outputs, inputs, *kernel),
    )
    bias = torch.randn(groups * outputs, generator=generator).to(dtype)
    return x, weight, bias, (stride, padding, dilation, False, [0] * dims, groups)


def close(found: Tensor, expected: Tensor) -> None:
    size = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING[expected.dtype] * max(size, 1.0))


@given(calls(), st.lists(st.booleans(), min_size=3, max_size=3))
def test_formulas_equal_the_kernels(call: Any, wanted: list[bool]) -> None:
    x, weight, bias, how = call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolutions, "_on_gpu", lambda x: True)
        expected = aten.convolution.default(x, weight, bias, *how)
        close(convolutions.convolution(x, weight, bias, *how), expected)
        given = expected.cos(), x, weight, [len(bias)], *how, wanted
        found = convolutions.convolution_backward(*given)
        for one, other, asked in zip(found, aten.convolution_backward.default(*given), wanted, strict=True):
            if asked:
                close(one, other)


class _Names(TorchDispatchMode):
    """Notes the convolutions and products that are called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.names = [*getattr(self, "names", []), *([name] if "conv" in name or "bmm" in name else [])]
        return func(*args, **kwargs or {})


# Channels, outputs, kernel, stride, groups -> what computes output and both gradients.
ONE, TWO = ["convolution", "convolution_backward"], ["convolution", "convolution", "convolution_backward"]
KINDS: dict[str, tuple[tuple[int, ...], list[str]]] = {
    "a stride": ((8, 12, 3, 2, 4), TWO),
    "one element": ((8, 12, 1, 1, 4), ["bmm"] * 3),
    "one element with a stride": ((8, 12, 1, 2, 4), ["bmm"] * 3),
    "no stride": ((8, 12, 3, 1, 4), ONE),
    "one group": ((8, 12, 1, 2, 1), ONE),
    "depthwise": ((8, 8, 3, 2, 8), ONE),
    "one channel for several": ((4, 8, 1, 1, 4), ONE),
    "large groups": ((130, 2, 1, 1, 2), ONE),
}


def called(channels: int, outputs: int, kernel: int, stride: int, groups: int) -> list[str]:
    x, weight = torch.randn(2, channels, 6, 6), torch.randn(outputs, channels // groups, kernel, kernel)
    how = [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups
    with _Names() as mode:
        out = convolutions.convolution(x, weight, None, *how)
        convolutions.convolution_backward(out, x, weight, None, *how, [True, True, False])
    return mode.names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_has_a_kernel_of_its_own_stays(kind: str) -> None:
    arguments, expected = KINDS[kind]
    assert called(*arguments) == expected


def test_on_a_host_all_stay() -> None:
    assert called(*KINDS["one element"][0]) == ONE


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_product_in_tf32_takes_no_convolution_that_may_not_round() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert called(*KINDS["one element"][0]) == ["bmm"] * 3
        with torch.backends.cudnn.flags(allow_tf32=False):
            assert called(*KINDS["one element"][0]) == ONE
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_product_may_not_sum_in_half_precision_either() -> None:
    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    torch.backends.cuda.matmul.allow_fp16_accumulation = not before
    try:
        assert called(*KINDS["one element"][0]) == ONE
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = before


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_is_not_finite_stays_in_its_group(kernel: int) -> None:
    x, weight = torch.randn(2, 4, 6, 6), torch.randn(4, 2, kernel, kernel)
    how = [2, 2], [0, 0], [1, 1], False, [0, 0], 2
    out = convolutions.convolution(x, weight, None, *how)
    out[:, :2] = torch.nan
    to_x, to_weight, _ = convolutions.convolution_backward(out, x, weight, None, *how, [True, True, False])
    assert to_x is not None
    assert to_weight is not None
    assert to_x[:, 2:].isfinite().all()
    assert to_weight[2:].isfinite().all()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_gradients_arrive_in_the_layout_of_the_input() -> None:
    last = torch.channels_last
    x, weight = torch.randn(2, 4, 6, 6).contiguous(memory_format=last), torch.randn(4, 2, 3, 3)
    seen = []

    class Strides(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.convolution_backward.default:
                seen.append(args[0].is_contiguous(memory_format=last))
            return func(*args, **kwargs or {})

    with Strides():
        how = [1, 1], [1, 1], [1, 1], False, [0, 0], 2, [True, True, False]
        convolutions.convolution_backward(torch.randn(2, 4, 6, 6), x, weight, None, *how)
    assert seen == [True]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_second_derivative_equals_that_of_the_kernels() -> None:
    def loss(weights: Any, x: Tensor) -> Tensor:
        hidden = F.conv2d(x, weights[0], stride=2, padding=1, groups=2).tanh()
        return F.conv2d(hidden, weights[1], groups=2).square().sum()

    def turned(weights: Any, x: Tensor) -> Any:
        slope = lambda x: fcg.grad(loss)(weights, x)[0].square().sum()  # noqa: E731
        return fcg.grad(slope)(x)

    given = [torch.randn(n, 2, k, k, dtype=torch.float64, generator=seeded(n)) for n, k in ((4, 3), (6, 1))]
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64, generator=seeded(0))
    found = fcg.graph_fn(turned, lowering="inductor")(given, x)
    torch.testing.assert_close(found, turned(given, x), rtol=1e-10, atol=1e-10)
