"""Linear layers of fp8 products: against manual quantization, and where the maxima that a step sees accumulate."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.nn import Fp8Scaling, fp8, fp8_linear
from functional_cg.stages.passes.float8 import to_float8
from functional_cg.testing import Simulator, assert_trees_all_equal
from tests.compiled_graphs import compiled
from tests.shares import CALLS

HISTORY = 4
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOPS = (2.0**8, 2.0**8, 2.0**15)

SCHEMA = (
    "aten::_scaled_mm(Tensor self, Tensor mat2, Tensor scale_a, Tensor scale_b, Tensor? bias=None, "
    "Tensor? scale_result=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor"
)


def test_the_private_op_of_torch_is_the_one_that_is_called() -> None:
    """If this fails, torch has changed ``_scaled_mm``: see whether ``nn/_scaled_mm.py`` calls it as it is meant."""
    assert str(torch.ops.aten._scaled_mm.default._schema) == SCHEMA


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- the judge: fp8 from its table of numbers, maxima and scales in Python -------------------------------------------


@functools.cache
def numbers(dtype: torch.dtype) -> Tensor:
    """The finite numbers that are not negative, f64."""
    values = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    return values[values.isfinite()]


def rounded(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of a format to ``scale * x``, those with an even last bit between two, divided again; f64."""
    table, size = numbers(dtype), (x.double() * scale).abs()
    above = torch.searchsorted(table, size).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    up, down = (table[above] - size).abs(), (size - table[below]).abs()
    nearest = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return torch.where(size >= table[-1], table[-1], table[nearest]).copysign(x.double()) / scale


def bound(maximum: float) -> float:
    """The smallest power of two that is not below."""
    return 0.0 if maximum == 0 else 2.0 ** math.ceil(math.log2(maximum))


class Judge:
    """Two layers with a ReLU between, a squared error, and their scales."""

    def __init__(self) -> None:
        self.scales = [[1.0] * 3 for _ in range(2)]
        self.history = [[[0.0] * HISTORY for _ in range(3)] for _ in range(2)]

    def step(self, params: list[Tensor], x: Tensor, target: Tensor) -> tuple[float, list[Tensor]]:
        """The loss and the gradients; moves the scales on."""
        inputs = [x.double()]
        (sx, sw, _), (sh, sv, _) = self.scales
        low_x, low_w = rounded(x, sx, E4M3), rounded(params[0], sw, E4M3)
        inputs.append((low_x @ low_w.T).relu())
        low_h, low_v = rounded(inputs[1], sh, E4M3), rounded(params[1], sv, E4M3)
        out = low_h @ low_v.T
        grads_of_outputs = [2 * (out - target) / out.numel()]
        low_out = rounded(grads_of_outputs[0], self.scales[1][2], E5M2)
        grads_of_outputs.insert(0, (low_out @ low_v) * (inputs[1] > 0))
        low_hidden = rounded(grads_of_outputs[0], self.scales[0][2], E5M2)
        for layer in range(2):
            seen = (inputs[layer], params[layer], grads_of_outputs[layer])
            for role, tensor in enumerate(seen):
                row = [bound(float(tensor.abs().max())), *self.history[layer][role][:-1]]
                self.history[layer][role] = row
                if max(row):
                    self.scales[layer][role] = TOPS[role] / max(row)
        return float((out - target).square().mean()), [low_hidden.T @ low_x, low_out.T @ low_h]


class State(fcg.TrainState):
    fp8: Fp8Scaling


def loss_of(trained: Any, batch: Any) -> Tensor:
    (first, second), scaling = trained
    one, other = scaling
    hidden = fp8_linear(batch["x"], first, None, one).relu()
    return (fp8_linear(hidden, second, None, other) - batch["y"]).square().mean()


def train_step(state: Any, batch: Any) -> Any:
    loss, (grads, seen) = fcg.value_and_grad(loss_of)((state.params, state.fp8), batch)
    return state.apply_gradients(grads, fp8=state.fp8.updated(seen)), {"loss": loss, "grads": grads}


def state_on(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    params = [(randn(0, 32, 48) / 6).to(device, dtype), (randn(1, 16, 32) / 4).to(device, dtype)]
    scaling = Fp8Scaling.create(2, history=HISTORY, device=device)
    return State.create(params=params, optimizer=fcg.optim.sgd(0.05), fp8=scaling)


def batch_of(call: int, device: str = "cpu") -> Any:
    """Inputs that grow and shrink, so that scales do."""
    x = randn(call + 2, 64, 48) * 2.0 ** (call % 7 - 3)
    return {"x": x.to(device), "y": (x[:, :16] * 0.5).to(device)}


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "auto"), ("cpu", Simulator), pytest.param("cuda", "auto", marks=pytest.mark.cuda)],
)
def test_scales_and_gradients_are_those_of_quantising_by_hand(device: str, backend: Any) -> None:
    """Twenty captured calls with the bits of eager ones; the judge gets the parameters of each call."""
    state, judge = state_on(device), Judge()
    twin = fcg.fork(state)
    step = fcg.graph_step(train_step, lowering="aten", backend=backend if backend == "auto" else backend())
    scales = []
    for call in range(CALLS):
        params = [leaf.cpu() for leaf in fcg.snapshot(state).params]
        state, metrics = step(state, batch_of(call, device))
        twin, expected = step.eager(twin, batch_of(call, device))
        assert_trees_all_equal((state, metrics), (twin, expected), f"call {call}")
        batch = batch_of(call)
        loss, grads = judge.step(params, batch["x"], batch["y"])
        # A value at a border may be rounded the other way: by 1/16 of itself in e4m3, by 1/8 in e5m2. On a GPU, which
        # adds up products in another order than the judge, some are.
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5 if device == "cpu" else 2e-3), (
            f"call {call}"
        )
        for got, wanted in zip(metrics["grads"], grads, strict=True):
            gap = (got.cpu().double() - wanted).norm() / wanted.norm()
            assert gap < (1e-3 if device == "cpu" else 2e-2), f"call {call}"
        assert state.fp8.history.tolist() == judge.history, f"call {call}"
        assert state.fp8.scale.tolist() == judge.scales, f"call {call}"
        assert not state.fp8.seen.any()
        scales.append(judge.scales[0][0])
    assert len(set(scales)) > 3
    assert (step.stats.captures, step.stats.replays) == (1, CALLS)


def test_training_goes_where_float32_leads() -> None:
    def wide_loss(params: Any, batch: Any) -> Tensor:
        hidden = (batch["x"] @ params[0].T).relu()
        return (hidden @ params[1].T - batch["y"]).square().mean()

    def wide_step(state: Any, batch: Any) -> Any:
        loss, grads = fcg.value_and_grad(wide_loss)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    low, wide = state_on(), state_on()
    low_step, other = fcg.graph_step(train_step, lowering="aten"), fcg.graph_step(wide_step, lowering="aten")
    for call in range(100):
        x = randn(call + 2, 64, 48)
        low, metrics = low_step(low, {"x": x, "y": x[:, :16]})
        wide, expected = other(wide, {"x": x, "y": x[:, :16]})
        if call == 0:
            first = float(expected["loss"])
    assert float(expected["loss"]) < 0.8 * first
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=0.05)


# -- what adds up -----------------------------------------------------------------------------------------------------


def newest(fn: Any, fp8: Fp8Scaling, *args: Any) -> list[float]:
    return fp8.updated(fcg.grad(fn)(fp8, *args)).history[..., 0].tolist()  # type: ignore[no-any-return]


def once(scaling: Fp8Scaling, x: Tensor) -> Tensor:
    return fp8_linear(x, torch.eye(16) * 3, None, scaling).sum()


SMALL, LARGE = torch.full((16, 16), 0.25), torch.full((16, 16), 50.0)


def test_a_layer_that_is_used_twice_sees_the_larger_maximum() -> None:
    one = Fp8Scaling.create()
    assert newest(once, one, SMALL) == [0.25, 4.0, 1.0]
    assert newest(lambda s, x, y: once(s, x) + 8 * once(s, y), one, LARGE, SMALL) == [64.0, 4.0, 8.0]
    assert newest(lambda s, x, y: once(s, x) + 8 * once(s, y), one, SMALL, LARGE) == [64.0, 4.0, 8.0]


def test_micro_batches_see_the_larger_maximum() -> None:
    one, x = Fp8Scaling.create(), torch.cat([SMALL, LARGE])
    _, grads = fcg.microbatches(2)(fcg.value_and_grad(once))(one, x)
    assert one.updated(grads).history[:, 0].tolist() == [64.0, 4.0, 1.0]


def test_an_overflow_is_not_clamped_to_a_gradient_that_looks_right() -> None:
    """In float16 2 * 63**2 * 2**4 is infinite: the step is to be skipped, as it is without fp8."""
    x, one, loss_scale = torch.eye(16).half(), Fp8Scaling.create(), fcg.LossScale.create(2.0**4)

    def loss(trained: Any, size: float) -> Tensor:
        weight, scaling = trained
        return loss_scale.scaled((size * fp8_linear(x, weight, None, scaling).float()).square().sum())

    grads, seen = fcg.grad(loss)((torch.ones(16, 16), one), 1.0)
    assert fcg.optim.global_norm(grads).isfinite()
    grads, _ = fcg.grad(loss)((torch.ones(16, 16), one.updated(seen)), 63.0)
    assert not fcg.optim.global_norm(grads).isfinite()


def test_a_scaled_loss_changes_the_gradient_alone() -> None:
    one, loss_scale = Fp8Scaling.create(), fcg.LossScale.create(2.0**10)
    grads = fcg.grad(lambda s: loss_scale.scaled(once(s, SMALL)))(one)
    assert one.updated(loss_scale.unscaled(grads)).history[:, 0].tolist() == [0.25, 4.0, 1024.0]


def test_what_is_computed_again_counts_as_it_would_have() -> None:
    def loss(trained: Any, layer: Any) -> Tensor:
        w, scaling = trained
        return layer(LARGE, w, None, scaling).square().mean()  # type: ignore[no-any-return]

    trained = (randn(0, 16, 16), Fp8Scaling.create())
    again = fcg.value_and_grad(loss)(trained, fcg.remat(fp8_linear))
    assert_trees_all_equal(again, fcg.value_and_grad(loss)(trained, fp8_linear))


def test_layers_by_index_and_by_iteration() -> None:
    stacked = Fp8Scaling.create(2, 3, history=5, margin=1)
    assert [one.scale.shape for one in stacked] == [(3, 3)] * 2
    assert stacked[1][2].history.shape == (3, 5)
    assert stacked[1][2].margin == 1

    def by_index(s: Fp8Scaling) -> Tensor:
        return once(s[0], SMALL) + once(s[2], LARGE)

    def by_iteration(s: Fp8Scaling) -> Tensor:
        first, _, last = s
        return once(first, SMALL) + once(last, LARGE)

    assert newest(by_index, stacked[0]) == newest(by_iteration, stacked[0])
    assert newest(by_index, stacked[0]) == [[0.25, 4.0, 1.0], [0.0, 0.0, 0.0], [64.0, 4.0, 1.0]]


def test_a_scale_follows_the_peak_of_its_history_and_its_margin() -> None:
    one = Fp8Scaling.create(history=2, margin=3)
    peaks = []
    for x in (LARGE, SMALL, SMALL, 0 * SMALL, 0 * SMALL):
        one = one.updated(fcg.grad(once)(one, x))
        peaks.append(32.0 / float(one.scale[0]))
    assert peaks == [64.0, 64.0, 0.25, 0.25, 0.25]  # and where nothing was seen it stays


def test_evaluation_and_the_first_step_use_the_scales_as_they_are() -> None:
    x = randn(3, 32, 16)
    out = fp8_linear(x, torch.eye(16), torch.ones(16), Fp8Scaling.create())
    assert torch.equal(out.double(), rounded(x, 1.0, E4M3) + 1)
    narrow = fp8_linear(x.bfloat16(), torch.eye(16).bfloat16(), None, Fp8Scaling.create())
    assert narrow.dtype == torch.bfloat16


def test_what_is_larger_than_ever_is_clamped_and_what_is_not_finite_is_nan() -> None:
    x = SMALL.clone()
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = 1e6, -1e38, torch.nan, -torch.inf
    out = fp8_linear(x, torch.eye(16), None, Fp8Scaling.create())
    assert out[:2, 0].tolist() == [448.0, -448.0]
    assert out[2:4].isnan().all()
    assert out[4:].isfinite().all()
    assert newest(once, Fp8Scaling.create(), x)[0] == 0.0


@given(maximum=st.floats(2.0**-70, 2.0**70, width=32))
def test_a_maximum_is_counted_at_the_smallest_power_of_two_above(maximum: float) -> None:
    (row,) = fp8._counted(torch.tensor([maximum]))
    expected = min(max(bound(maximum), 2.0**-64), 2.0**63)
    assert row.sum() == 1
    assert 2.0 ** (int(row.argmax()) - 64) == expected


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "weight", "bias", "error", "match"),
    [
        ((16, 24), (16, 24), None, ValueError, r"multiples of 16, got 16 rows, x \[16, 24\]"),
        ((2, 5, 16), (16, 16), None, ValueError, r"multiples of 16, got 10 rows, x \[2, 5, 16\](.|\n)*pad them"),
        ((16, 16), (8, 16), None, ValueError, r"multiples of 16(.|\n)*weight \[8, 16\]"),
        ((0, 16), (16, 16), None, ValueError, "multiples of 16, got 0 rows"),
        ((16, 16), (16, 32), None, ValueError, r"expected x \[..., k\] and weight \[n, k\], got"),
        ((16, 16), (16, 16), (8,), ValueError, r"expected bias \[16\], got \[8\]"),
    ],
)  # fmt: skip
def test_shapes_are_refused(x: Any, weight: Any, bias: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        fp8_linear(
            torch.ones(x), torch.ones(weight), None if bias is None else torch.ones(bias), Fp8Scaling.create()
        )


def test_other_arguments_are_refused() -> None:
    one, x = Fp8Scaling.create(), torch.ones(16, 16)
    with pytest.raises(TypeError, match=r"expected weight of f32, bf16 or f16, got torch.float64"):
        fp8_linear(x, x.double(), None, one)
    with pytest.raises(TypeError, match=r"Fp8Scaling of one layer, got that of \[2\](.|\n)*`scaling\[i\]`"):
        fp8_linear(x, x, None, Fp8Scaling.create(2))
    with pytest.raises(TypeError, match=r"Fp8Scaling of one layer, got 1\.0"):
        fp8_linear(x, x, None, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected weight of f32, bf16 or f16, got NoneType"):
        fp8_linear(x, None, None, one)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected bias of f32, bf16 or f16, got torch.int64"):
        fp8_linear(x, x, torch.ones(16, dtype=torch.int64), one)
    with pytest.raises(TypeError, match=r"of layers \[\], got tuple(.|\n)*`state.fp8.updated\(seen\)`"):
        one.updated((one,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"of layers \[\], got \[2\]"):
        one.updated(Fp8Scaling.create(2))
    for layers in (-1, 0, 2.0, True):
        with pytest.raises(ValueError, match=f"layers as integers of 1 or more, got .{layers},"):
            Fp8Scaling.create(layers)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="this is the scaling of one layer"):
        one[0]
    for options in ({"history": 0}, {"margin": -1}, {"margin": 9}):
        with pytest.raises(
            ValueError, match=r"(history must be an int of 1 or more|margin must be an int from 0 to 8)"
        ):
            Fp8Scaling.create(**options)
    with pytest.raises(RuntimeError, match=r"nn.fp8_linear: it is differentiated twice"):
        fcg.grad(lambda s: fcg.grad(lambda x: fp8_linear(x, x, None, s).square().sum())(x).sum())(one)


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from functional_cg.nn import _scaled_mm

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(
        ValueError, match=r"expected a GPU of compute capability 8.9 or higher, got 8.0 \(cuda:0\)"
    ):
        _scaled_mm.refuse_device("nn.fp8_linear", torch.device("cuda:0"))
    _scaled_mm.refuse_device("nn.fp8_linear", torch.device("cpu"))


@compiled
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_compiled_cast_overflows_as_torch_has_it(compiled_on: str, dtype: torch.dtype) -> None:
    """Of all numbers of 16 bits, and of what lies about the largest ones: NaN, infinity or the largest number."""
    ends = torch.tensor([448.0, 464.0, 480.0, 57344.0, 61440.0, 65536.0, 1e30], device=compiled_on)
    ends = torch.cat([ends, ends.nextafter(2 * ends), ends.nextafter(0 * ends)])
    x = (
        torch.arange(2**16, dtype=torch.int32, device=compiled_on)
        .to(torch.int16)
        .view(torch.bfloat16)
        .float()
    )
    x = torch.cat([x, ends, -ends])
    cast = fcg.graph_fn(lambda x: (x.to(dtype).float(), (x * 2).to(dtype).float()), lowering="inductor")
    for one, other in zip(cast(x), (x.to(dtype).float(), (x * 2).to(dtype).float()), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(one.isnan(), other.isnan())


def test_what_is_too_large_has_the_bits_that_are_asked_for() -> None:
    """Whatever the cast itself makes of it: a Triton kernel makes the largest number of it."""
    x = torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan, 464.0, 448.0, -1.5])
    got = to_float8(x, dtype=E4M3, overflow=0x7F).view(torch.uint8)
    assert got.tolist() == [0x7F, 0xFF, 0x7F, 0xFF, got[4].item(), 0x7E, 0x7E, 0xBC]
    assert got[4] & 0x7F == 0x7F
    got = to_float8(x * 128, dtype=E5M2, overflow=0x7C).float()
    assert got.tolist()[:4] == [torch.inf, -torch.inf, torch.inf, -torch.inf]
    assert got[4].isnan()
    assert got.tolist()[5:] == [57344.0, 57344.0, -192.0]
