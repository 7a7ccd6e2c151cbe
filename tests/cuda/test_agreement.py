"""Replay equals the pure function: all leaves, metrics and keys, bitwise, after each of 20 calls with new inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg
from functional_cg.examples.transformer import GPT
from tests.cuda.helpers_cuda import (
    DEVICE,
    ON_GPU,
    assert_same,
    clean_allocator,  # noqa: F401
    copies,
    distance,
    marks,
    mlp_batch,
    mlp_state,
    mlp_step,
    plain_step,
    poison,
    randn,
    say,  # noqa: F401
    uncaptured,
)

pytestmark = marks
CALLS = 20
# What a compiler may make of it: relative distance of a leaf to eager after 20 calls. It reorders sums and
# contracts products, and Adam's first steps amplify the sign of gradients near zero.
COMPILED_TOLERANCE = 5e-3


@pytest.fixture(autouse=True)
def deterministic_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN may pick kernels with atomics, which differ from themselves."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


def agree(
    fn: Any, state: Any, batch_of: Callable[[int], Any], calls: int = CALLS, *, check_oracle: bool = False
) -> None:
    """Compare a captured step with its eager run, call by call; the caller's buffers are poisoned at once."""
    step = fcg.graph_step(fn, lowering="aten")
    twin, third = fcg.fork(state), fcg.fork(state) if check_oracle else None
    initial = fcg.snapshot(state)
    for i in range(calls):
        batch = batch_of(i)
        kept, kept_too = copies(batch), copies(batch)
        state, metrics = step(state, batch)
        poison(batch)
        twin, expected = step.eager(twin, kept)
        if third is not None:
            third, _ = step.eager(third, kept_too)
            if distance(third, twin) != 0:
                pytest.skip("the eager run differs from itself: its kernels are not deterministic")
        assert_same(state, twin, f"call {i}")
        assert_same(metrics, expected, f"metrics of call {i}")
    assert distance(state, initial) > 0
    assert (step.stats.traces, step.stats.captures, step.stats.replays) == (1, 1, calls)


# -- the MLP ------------------------------------------------------------------------------------------------------


def test_mlp_with_dropout_clip_and_schedule() -> None:
    agree(mlp_step, mlp_state(), mlp_batch)


def test_mlp_under_autocast() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            return mlp_step(state, batch)

    agree(train_step, mlp_state(), mlp_batch)


def test_mlp_in_bfloat16_with_masters() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Tensor:
            x = batch["x"].bfloat16()
            for layer in params.values():
                x = F.gelu(F.linear(x, layer["w"].bfloat16(), layer["b"].bfloat16()))
            return F.mse_loss(x.float(), batch["y"])

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    agree(train_step, mlp_state(), mlp_batch)


@pytest.mark.parametrize(
    "optimizer",
    [
        fcg.optim.sgd(0.1, momentum=0.9, nesterov=True),
        fcg.optim.adam(fcg.optim.cosine(1e-2, 30)),
        fcg.optim.lamb(1e-2, weight_decay=0.1),
        fcg.optim.yogi(1e-2),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_optimizers(optimizer: Any) -> None:
    params = fcg.snapshot(mlp_state().params)
    agree(plain_step, fcg.TrainState.create(params=fcg.snapshot(params), optimizer=optimizer), mlp_batch)


# -- where inputs come from ---------------------------------------------------------------------------------------


def mixed_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Tensor:
        h = batch["device"] @ params["w"] + batch["pageable"] * batch["scale"] + batch["numpy"]
        h = h + batch["pinned"] * batch["shift"]
        return torch.where(batch["flag"], h, -h).square().mean()

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    total = batch["tokens"].sum() + batch["count"]
    return state.apply_gradients(grads), {"loss": loss, "total": total}


def mixed_batch(i: int) -> dict[str, Any]:
    pinned = randn(16, 16, seed=500 + i, device="cpu")
    return {
        "device": randn(16, 16, seed=100 + i),
        "pageable": randn(16, 16, seed=200 + i, device="cpu"),
        "pinned": pinned.pin_memory() if ON_GPU else pinned,
        "numpy": np.random.default_rng(i).standard_normal((16, 16), dtype=np.float32),
        "tokens": torch.arange(i, i + 7),
        "scale": 0.5 + i,
        "shift": float(i % 3),
        "count": i,
        "flag": i % 2 == 0,
    }


def test_inputs_of_mixed_origin() -> None:
    state = fcg.TrainState.create(params={"w": randn(16, 16, seed=0)}, optimizer=fcg.optim.sgd(0.01))
    agree(mixed_step, state, mixed_batch)


@pytest.mark.parametrize("origin", ["pageable", "pinned", "device", "numpy", "alternating"])
def test_inputs_of_one_origin(origin: str) -> None:
    def batch_of(i: int) -> dict[str, Any]:
        where = ("pageable", "device", "numpy", "pinned")[i % 4] if origin == "alternating" else origin
        batch = mlp_batch(i, device=DEVICE if where == "device" else "cpu")
        if where == "pinned" and ON_GPU:
            return {name: leaf.pin_memory() for name, leaf in batch.items()}
        return {name: leaf.numpy() for name, leaf in batch.items()} if where == "numpy" else batch

    agree(mlp_step, mlp_state(), batch_of)


def test_inputs_with_strides_of_their_own() -> None:
    def batch_of(i: int) -> dict[str, Tensor]:
        wide = randn(64, 2 * 32 + 3, seed=i)
        return {"x": wide[:, 3 : 3 + 32].t(), "y": wide[:, 3 + 32 :].t()}

    agree(mlp_step, mlp_state(), batch_of)


# -- BatchNorm ----------------------------------------------------------------------------------------------------


def native_norm(x: Tensor, p: Any, b: Any) -> tuple[Tensor, Any]:
    """``F.batch_norm`` on copies of the running statistics, which it writes in place."""
    mean, var = b["mean"].clone(), b["var"].clone()
    out = F.batch_norm(x, mean, var, p["scale"], p["shift"], training=True, momentum=0.1, eps=1e-5)
    return out, {"mean": mean, "var": var, "count": b["count"] + 1}


def written_out_norm(x: Tensor, p: Any, b: Any) -> tuple[Tensor, Any]:
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    spread = torch.rsqrt(var + 1e-5)[:, None, None]
    out = (x - mean[:, None, None]) * spread * p["scale"][:, None, None] + p["shift"][:, None, None]
    unbiased = var.detach() * (x.numel() / x.shape[1]) / (x.numel() / x.shape[1] - 1)
    return out, {
        "mean": b["mean"] * 0.9 + mean.detach() * 0.1,
        "var": b["var"] * 0.9 + unbiased * 0.1,
        "count": b["count"] + 1,
    }


def cnn_state(memory_format: torch.memory_format) -> Any:
    params, buffers = {}, {}
    for i, (c_in, c_out) in enumerate([(3, 16), (16, 24)]):
        kernel = randn(c_out, c_in, 3, 3, seed=i) / (c_in * 9) ** 0.5
        params[f"conv{i}"] = {
            "w": kernel.to(memory_format=memory_format),
            "scale": torch.ones(c_out, device=DEVICE),
            "shift": torch.zeros(c_out, device=DEVICE),
        }
        buffers[f"conv{i}"] = {
            "mean": torch.zeros(c_out, device=DEVICE),
            "var": torch.ones(c_out, device=DEVICE),
            "count": torch.zeros((), dtype=torch.int64, device=DEVICE),
        }
    params["head"] = {"w": randn(10, 24, seed=9) / 24**0.5, "b": torch.zeros(10, device=DEVICE)}
    optimizer = fcg.optim.chain(fcg.optim.clip_by_global_norm(1.0), fcg.optim.adamw(1e-2, weight_decay=0.1))
    return fcg.TrainState.create(params=params, buffers=buffers, optimizer=optimizer, key=fcg.random.key(3))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("norm", [native_norm, written_out_norm], ids=lambda norm: norm.__name__)
def test_conv_net_with_batch_norm(norm: Any, memory_format: torch.memory_format) -> None:
    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> tuple[Tensor, Any]:
            x, buffers = batch["x"], {}
            for name in ("conv0", "conv1"):
                x = F.conv2d(x, params[name]["w"], padding=1, stride=2)
                x, buffers[name] = norm(x, params[name], state.buffers[name])
                x = F.relu(x)
            x = fcg.random.dropout(fcg.random.fold_in(state.key, state.step), x.mean((2, 3)), 0.1)
            return F.cross_entropy(F.linear(x, params["head"]["w"], params["head"]["b"]), batch["y"]), buffers

        (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, buffers=buffers), {"loss": loss}

    def batch_of(i: int) -> dict[str, Tensor]:
        x = randn(8, 3, 16, 16, seed=100 + i).to(memory_format=memory_format)
        return {"x": x, "y": (torch.arange(8) * (i + 1) % 10).to(DEVICE)}

    state = cnn_state(memory_format)
    kernel = fcg.snapshot(state.params["conv1"]["w"])
    assert kernel.is_contiguous(memory_format=memory_format)
    agree(train_step, state, batch_of, check_oracle=True)


# -- the GPT ------------------------------------------------------------------------------------------------------


def test_gpt() -> None:
    model = GPT(layers=2, width=64, heads=2, block_size=64, dropout=0.1)

    def train_step(state: Any, batch: Any) -> Any:
        key = fcg.random.fold_in(state.key, state.step)

        def loss_fn(params: Any) -> Tensor:
            logits = model.apply(params, batch["x"], key)
            return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    def batch_of(i: int) -> dict[str, Tensor]:
        tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(i))
        return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}

    init, dropout = fcg.random.split(fcg.random.key(0))
    params = fcg.tree.map(lambda leaf: leaf.to(DEVICE), model.init(init))
    optimizer = fcg.optim.chain(
        fcg.optim.clip_by_global_norm(1.0),
        fcg.optim.adamw(
            fcg.optim.warmup_cosine(1e-3, 5, 40),
            weight_decay=0.1,
            mask=lambda p: fcg.tree.map(lambda leaf: leaf.ndim >= 2, p),
        ),
    )
    state = fcg.TrainState.create(params=params, optimizer=optimizer, key=dropout)
    agree(train_step, state, batch_of, check_oracle=True)


# -- the compiler -------------------------------------------------------------------------------------------------


def test_captured_equals_the_compiled_function_uncaptured(say: Callable[[str], None]) -> None:  # noqa: F811
    state = mlp_state()
    eager = fcg.fork(state)
    step = fcg.graph_step(mlp_step, lowering="inductor")
    twin, call = uncaptured(step, state, mlp_batch(0))
    names = ("loss", "mean")
    for i in range(CALLS):
        batch = mlp_batch(i)
        expected = call(batch)
        eager, by_hand = step.eager(eager, copies(batch))
        state, metrics = step(state, batch)
        poison(batch)
        assert_same(state, twin, f"call {i}")
        assert_same([metrics[name] for name in names], expected, f"metrics of call {i}")
        assert torch.equal(state.key, eager.key)
        assert torch.equal(state.step, eager.step)
        for name in names:
            assert float(metrics[name]) == pytest.approx(float(by_hand[name]), rel=1e-2, abs=1e-4), (i, name)
    far = distance(state, eager)
    say(f"inductor, {CALLS} calls: relative distance to eager {far:.2e} (tolerance {COMPILED_TOLERANCE:g})")
    assert far <= COMPILED_TOLERANCE
    assert (step.stats.captures, step.stats.replays) == (1, CALLS)


def test_aten_plan_uncaptured_is_the_replay() -> None:
    state = mlp_state()
    step = fcg.graph_step(mlp_step, lowering="aten")
    twin, call = uncaptured(step, state, mlp_batch(0))
    for i in range(CALLS):
        expected = call(mlp_batch(i))
        state, metrics = step(state, mlp_batch(i))
        assert_same(state, twin, f"call {i}")
        assert_same([metrics["loss"], metrics["mean"]], expected, f"metrics of call {i}")


def test_both_lowerings_draw_the_same_bits() -> None:
    def draw(state: Any) -> Any:
        key = fcg.random.fold_in(state["key"], state["n"])
        mask = fcg.random.bernoulli(key, 0.3, (1000,))
        return {**state, "n": state["n"] + 1}, {"mask": mask, "u": fcg.random.uniform(key, (1000,), low=-1.0)}

    runs = []
    for lowering in ("aten", "inductor"):
        tree = {"key": fcg.random.key(7).to(DEVICE), "n": torch.zeros((), dtype=torch.int64, device=DEVICE)}
        step, state, drawn = fcg.graph_step(draw, lowering=lowering), fcg.place(tree), []  # type: ignore[call-overload]
        for _ in range(5):
            state, metrics = step(state)
            drawn.append(metrics)
        runs.append(drawn)
    assert_same(runs[0], runs[1], "draws")
    assert not torch.equal(runs[0][0]["u"], runs[0][1]["u"])
