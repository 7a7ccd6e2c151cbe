"""``from_module``: modules as pure functions, traced and eager, compared with the plain modules."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import math
import pickle
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import functional_cg as fcg
from functional_cg.testing import (
    Simulator,
    assert_replay_equals_eager,
    assert_trees_all_close,
    assert_trees_all_equal,
)
from tests.nn_models import (
    DRAWING,
    GPT,
    PLAIN,
    WRITING,
    Attention,
    Tied,
    conv_net,
    encoder_layer,
    mean_square,
    mlp,
    state_of,
    tokens,
    train_step,
)
from tests.shares import CALLS, THOROUGH, diagonal, share

KEY = fcg.random.key(7)


def second(out: Any, batch: Any) -> Tensor:
    return out[1]


class Wrapped(nn.Module):
    """A module whose forward is a function of the module and an input."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


# --- replay equals eager -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "backend"), diagonal(share([*PLAIN, *DRAWING], 2), ["cpu", "simulator"]))
def test_replay_equals_eager(case: str, backend: str) -> None:
    make, batch = (PLAIN | DRAWING)[case]
    apply, state = state_of(make(), fcg.optim.adamw(1e-2, weight_decay=0.1))
    step = train_step(apply, lowering="aten", backend=Simulator() if backend == "simulator" else "auto")
    assert_replay_equals_eager(step, state, [batch() for _ in range(CALLS)])


@pytest.mark.parametrize(("flash", "dropout"), diagonal([True, False], [0.1, 0.0]))
def test_replay_of_a_gpt_equals_eager(dropout: float, flash: bool) -> None:
    apply, state = state_of(GPT(dropout, flash=flash), fcg.optim.adamw(1e-2, weight_decay=0.1))
    step = train_step(apply, second, lambda batch: batch, lowering="aten")
    assert_replay_equals_eager(step, state, [tokens() for _ in range(CALLS)])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_replay_of_a_gpt2_of_transformers_equals_eager(
    dropout: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    model = transformers.GPT2LMHeadModel(config).to(device)
    apply, state = state_of(model, fcg.optim.adamw(1e-2, weight_decay=0.1))
    step = train_step(
        apply,
        lambda out, batch: out.loss,
        lambda batch: {"input_ids": batch["idx"], "labels": batch["idx"]},
        lowering="aten",
    )
    assert_replay_equals_eager(step, state, [tokens() for _ in range(CALLS)])  # from the host
    assert set(state.params) == {name for name, _ in model.named_parameters()}


def test_replay_under_autocast_in_microbatches_equals_eager() -> None:
    apply, state = state_of(encoder_layer(0.1))

    @fcg.graph_step(lowering="aten")
    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any, x: Tensor, key: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return mean_square(apply(params, state.buffers, x, key=key)[0].float(), x)

        grads_of = fcg.microbatches(2)(fcg.value_and_grad(loss_fn))
        loss, grads = grads_of(state.params, x, key=fcg.random.fold_in(state.key, state.step))
        return state.apply_gradients(grads), {"loss": loss}

    assert_replay_equals_eager(step, state, [torch.randn(4, 6, 16) for _ in range(CALLS)])


@pytest.mark.slow
def test_compiled_replay_is_close_to_eager() -> None:
    # A draw takes seconds to compile, and a layer of an encoder makes four of them.
    rest = [encoder_layer(0.1)] if THOROUGH else [nn.Linear(16, 16), nn.Dropout(0.1)]
    module = nn.Sequential(nn.Conv1d(6, 6, 3, padding=1, bias=False), nn.BatchNorm1d(6), *rest)
    apply, state = state_of(module)
    step = train_step(apply, lowering="inductor")
    # A compiler reorders sums; many steps add the differences up.
    assert_replay_equals_eager(
        step, state, [torch.randn(4, 6, 16) for _ in range(CALLS)], rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(
    "case", ["conv and dropout2d", "encoder layer, dropout", "multihead attention, dropout"]
)
def test_evaluation_takes_one_path_traced_or_not(case: str) -> None:
    make, batch = DRAWING[case]
    module, x = make(), batch()
    apply, state = state_of(module)

    @fcg.graph_fn(lowering="aten")
    def evaluate(state: Any, x: Tensor) -> Tensor:
        return apply(state.params, state.buffers, x, train=False)[0]

    replayed = evaluate(state, x)
    assert torch.equal(replayed, evaluate.eager(state, x))
    with torch.no_grad():
        alone = apply(state.params, state.buffers, x, train=False)[0]
        expected = module.eval()(x)
    assert torch.equal(replayed, alone)
    # In evaluation the plain module may take a fused path of its own.
    assert_trees_all_close(replayed, expected)


# --- the plain module as judge ---------------------------------------------------------------------------------

# The plain module takes oneDNN's LSTM, which is another kernel.
TOLERANCE = {"lstm": 1e-6}


@pytest.mark.parametrize("case", PLAIN)
def test_outputs_and_gradients_are_the_plain_modules(case: str) -> None:
    make, batch = PLAIN[case]
    module, x = make(), batch()
    apply, params, buffers = fcg.from_module(module)

    def loss_fn(params: Any) -> Any:
        out, new_buffers = apply(params, buffers, x.clone())
        return mean_square(out, x), new_buffers

    (loss, new_buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(params)
    expected = mean_square(module(x.clone()), x)
    expected.backward()
    atol = TOLERANCE.get(case, 0)
    got = {"loss": loss, "grads": grads, "buffers": new_buffers}
    want = {
        "loss": expected.detach(),
        "grads": {name: p.grad for name, p in module.named_parameters()},
        "buffers": dict(module.named_buffers()),
    }
    assert_trees_all_close(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("backend", [None, "auto", Simulator()], ids=["eager", "cpu", "simulator"])
@pytest.mark.parametrize("case", WRITING)
def test_buffers_written_and_then_used_have_the_plain_modules_gradients(case: str, backend: Any) -> None:
    module = WRITING[case]()
    apply, params, buffers = fcg.from_module(module)

    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            out, new_buffers = apply(params, state["buffers"], x)
            return mean_square(out, x), new_buffers

        (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params = {name: p - 0.1 * grads[name] for name, p in state["params"].items()}
        return {"params": params, "buffers": buffers}, {"loss": loss, "grads": grads}

    state: Any = {"params": params, "buffers": buffers}
    run = step if backend is None else fcg.graph_step(lowering="aten", backend=backend)(step)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for _ in range(3):
        x = torch.randn(8, 16)
        state, metrics = run(state, x)
        loss = mean_square(module(x), x)
        grads = dict(zip(trained, torch.autograd.grad(loss, [*trained.values()]), strict=True))
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(p - 0.1 * grads[name])
        assert_trees_all_equal(metrics, {"loss": loss.detach(), "grads": grads})
        frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        expected = {"params": trained, "buffers": {**dict(module.named_buffers()), **frozen}}
        assert_trees_all_equal(fcg.snapshot(state), expected)


def test_buffer_used_before_it_is_written_is_torchs_own_error() -> None:
    module = Wrapped(lambda self, x: (self.inner(x) * self.count, self.count.add_(1))[0])
    module.register_buffer("count", torch.zeros(4))
    apply, params, buffers = fcg.from_module(module)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fcg.grad(lambda params: apply(params, buffers, torch.ones(2, 4))[0].sum())(params)


def test_captured_step_copies_no_buffer_that_is_not_written() -> None:
    module = Wrapped(
        lambda self, x: self.inner(x)[:, :2] * self.mask.as_strided((2,), (1,), 1) + self.shift.mul_(2)
    )
    module.register_buffer("mask", torch.tensor([1.0, 2.0, 3.0]))
    module.register_buffer("shift", torch.ones(2))
    apply, state = state_of(module)
    step = train_step(apply, lowering="aten")
    assert step.lower(state, torch.ones(2, 4)).as_text().count("aten.clone") == 1
    assert_replay_equals_eager(step, state, [torch.randn(2, 4) for _ in range(4)])


@pytest.mark.parametrize("backend", ["auto", Simulator()], ids=["cpu", "simulator"])
def test_batch_norm_in_microbatches_is_the_plain_modules(backend: Any) -> None:
    module = conv_net()
    apply, params, buffers = fcg.from_module(module)

    @fcg.graph_step(lowering="aten", backend=backend)
    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any, x: Tensor, *, buffers: Any) -> Any:
            out, buffers = apply(params, buffers, x)
            return mean_square(out, x), {"buffers": buffers}

        grads_of = fcg.microbatches(2, carry="buffers")(fcg.value_and_grad(loss_fn, has_aux=True))
        (loss, aux), grads = grads_of(state["params"], x, buffers=state["buffers"])
        return {**state, "buffers": aux["buffers"]}, {"loss": loss, "grads": grads}

    state: Any = {"params": params, "buffers": buffers}
    for _ in range(3):
        x = torch.randn(4, 3, 8, 8)
        state, metrics = step(state, x)
        module.zero_grad()
        losses = [mean_square(module(part), part) for part in x.chunk(2)]
        sum(losses).backward()
        assert_trees_all_equal(dict(state["buffers"]), dict(module.named_buffers()))
        # The plain module adds gradients up in another order.
        expected = {name: p.grad / 2 for name, p in module.named_parameters()}
        assert_trees_all_close(metrics, {"loss": sum(losses).detach() / 2, "grads": expected})


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_trains_in_microbatches_as_in_torchs_own_loop(momentum: float | None) -> None:
    """Six steps of four slices; and buffers that are returned without being carried are refused."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum))
    apply, params, buffers = fcg.from_module(module)
    state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=fcg.optim.sgd(0.1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    @fcg.graph_step
    def refused(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any, x: Tensor) -> Any:
            out, new = apply(params, state.buffers, x)
            return out.square().mean(), new

        (loss, new), grads = fcg.microbatches(4)(fcg.value_and_grad(loss_fn, has_aux=True))(state.params, x)
        return state.apply_gradients(grads, buffers=new), {"loss": loss}

    @fcg.graph_step
    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any, x: Tensor, *, buffers: Any) -> Any:
            out, new = apply(params, buffers, x)
            return out.square().mean(), {"buffers": new}

        grads_of = fcg.microbatches(4, carry="buffers")(fcg.value_and_grad(loss_fn, has_aux=True))
        (loss, aux), grads = grads_of(state.params, x, buffers=state.buffers)
        return state.apply_gradients(grads, buffers=aux["buffers"]), {"loss": loss}

    with pytest.raises(
        fcg.LayoutError, match=r"num_batches_tracked'\]  expected floating numbers   got i64(.|\n)*carry="
    ):
        refused(state, torch.randn(16, 4))
    for call in range(1, 7):
        x = torch.randn(16, 4)
        state, metrics = step(state, x)
        optimizer.zero_grad()
        losses = [module(part).square().mean() / 4 for part in x.chunk(4)]
        sum(losses).backward()
        optimizer.step()
        assert state.buffers["1.num_batches_tracked"] == 4 * call
        assert_trees_all_close(dict(state.buffers), dict(module.named_buffers()), rtol=0, atol=1e-6)
        assert_trees_all_close(fcg.snapshot(state).params, dict(module.named_parameters()), rtol=0, atol=1e-6)
        assert_trees_all_close(metrics, {"loss": sum(losses).detach()}, rtol=0, atol=1e-6)


def test_batch_norm_after_three_steps_is_the_plain_modules() -> None:
    module = conv_net()
    apply, state = state_of(module)
    step, optimizer = train_step(apply, lowering="aten"), torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(4, 3, 8, 8)
        state, _ = step(state, x)
        optimizer.zero_grad()
        mean_square(module(x), x).backward()
        optimizer.step()
    assert state.buffers["1.num_batches_tracked"] == 3
    trained = {name: state.buffers[name] for name in state.buffers}
    assert_trees_all_close(trained, dict(module.named_buffers()), rtol=0, atol=1e-6)
    assert_trees_all_close(fcg.snapshot(state).params, dict(module.named_parameters()), rtol=0, atol=1e-6)
    _, kept = apply(state.params, state.buffers, torch.randn(4, 3, 8, 8), train=False)
    assert_trees_all_equal(kept, trained)


# --- keyed draws -------------------------------------------------------------------------------------------------


def call(module: nn.Module, x: Any, key: Tensor | None = KEY, **options: Any) -> Any:
    """The module's output; the global generator stays where it is."""
    apply, params, buffers = fcg.from_module(module)
    before = torch.get_rng_state()
    out = apply(params, buffers, x, key=key, **options)[0]
    assert torch.equal(torch.get_rng_state(), before)
    return out


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_dropout_keeps_the_rate_the_scale_and_one_mask_in_both_directions(p: float) -> None:
    x = torch.ones(200, 500, requires_grad=True)
    out = call(nn.Dropout(p), x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, out)  # of ones: zero and scaled at the same places
    kept = (out != 0).double().mean().item()
    assert abs(kept - (1 - p)) < 5 * (p * (1 - p) / x.numel()) ** 0.5 + 1e-12  # five standard deviations
    assert {round(v, 4) for v in out.unique().tolist()} <= {0.0, round(1 / max(1 - p, 1e-9), 4)}


@pytest.mark.parametrize("case", DRAWING)
def test_draws_are_a_function_of_the_key(case: str) -> None:
    make, batch = DRAWING[case]
    module, x = make(), batch()
    first, again = call(module, x), call(module, x)
    other, off = call(module, x, fcg.random.key(8)), call(module, x, None, train=False)
    assert_trees_all_equal(first, again)
    for different in (other, off):
        a, b = (out[0] if isinstance(out, tuple) else out for out in (first, different))
        assert not torch.allclose(a, b)


def test_layers_and_calls_draw_apart_and_by_path() -> None:
    x = torch.ones(1000)

    class Twice(nn.Module):
        def __init__(self, *others: str) -> None:
            super().__init__()
            for name in (*others, "a", "b"):
                self.add_module(name, nn.Dropout(0.5))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            before = [part(x) for name, part in self.named_children() if name not in "ab"]
            return self.a(x), self.a(x), self.b(x), *before

    masks = call(Twice(), x)
    for one, other in itertools.combinations(masks, 2):
        assert 0.4 < (one == other).double().mean() < 0.6
    assert_trees_all_equal(call(Twice("new", "newer"), x)[:3], masks)


def test_attention_drops_out_its_weights() -> None:
    class Weights(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            # One-hot keys: the output is the dropped-out matrix of uniform weights itself.
            return F.scaled_dot_product_attention(q, q, torch.eye(100).expand(8, 1, 100, 100), dropout_p=0.25)

    weights = call(Weights(), torch.zeros(8, 1, 100, 4))
    assert abs((weights != 0).double().mean().item() - 0.75) < 5 * (0.25 * 0.75 / weights.numel()) ** 0.5
    torch.testing.assert_close(weights.unique(), torch.tensor([0.0, 0.01 / 0.75]))


ONES = torch.ones(400, 500)
# name -> (draw, mean, standard deviation)
OPS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "rand": (lambda x: torch.rand(x.shape), 0.5, 12**-0.5),
    "rand_like": (torch.rand_like, 0.5, 12**-0.5),
    "uniform_": (lambda x: x.clone().uniform_(-1, 3), 1, 4 * 12**-0.5),
    "randn": (lambda x: torch.randn(400, 500, dtype=torch.float64), 0, 1),
    "randn_like": (torch.randn_like, 0, 1),
    "normal_": (lambda x: torch.empty_like(x).normal_(3, 2), 3, 2),
    "normal": (lambda x: torch.normal(3 * x, 2 * x), 3, 2),
    "normal of a number": (lambda x: torch.normal(3.0, 2.0, (400, 500)), 3, 2),
    "distribution": (lambda x: torch.distributions.Normal(3 * x, 2 * x).rsample(), 3, 2),
    "bernoulli": (lambda x: torch.bernoulli(0.3 * x), 0.3, 0.21**0.5),
    "bernoulli of p": (lambda x: torch.bernoulli(x, 0.3), 0.3, 0.21**0.5),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.3), 0.3, 0.21**0.5),
    "native_dropout": (lambda x: torch.native_dropout(x, 0.3, True)[0], 1, (0.3 / 0.7) ** 0.5),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
    "randint": (lambda x: torch.randint(2, 8, (400, 500)), 4.5, (35 / 12) ** 0.5),
    "randint_like": (lambda x: torch.randint_like(x, 6), 2.5, (35 / 12) ** 0.5),
    "randperm": (lambda x: torch.randperm(200_000), 99_999.5, 200_000 * 12**-0.5),
    "multinomial": (
        lambda x: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]), 200_000, replacement=True),
        1.5,
        0.75**0.5,
    ),
    "multinomial without replacement": (
        lambda x: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]).expand(200_000, 3), 1),
        1.5,
        0.75**0.5,
    ),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(torch.zeros(100_000, 2), hard=True)[:, 0], 0.5, 0.5),
    "log_normal_": (lambda x: torch.empty_like(x).log_normal_(3, 2).log(), 3, 2),
    "cauchy_": (lambda x: torch.empty_like(x).cauchy_(2, 0.5).sub(2).div(0.5).atan(), 0, math.pi * 12**-0.5),
    "geometric_": (lambda x: torch.empty_like(x).geometric_(0.3), 1 / 0.3, 0.7**0.5 / 0.3),
    "geometric_ of a certainty": (lambda x: torch.empty_like(x).geometric_(1.0) + torch.randn_like(x), 1, 1),
    "random_": (lambda x: torch.empty_like(x).random_(), 2**23, 2**24 * 12**-0.5),
    "random_ of integers": (
        lambda x: torch.empty(400, 500, dtype=torch.int8).random_(),
        63.5,
        (128**2 / 12) ** 0.5,
    ),
    "random_ from to": (lambda x: torch.empty_like(x).random_(2, 8), 4.5, (35 / 12) ** 0.5),
    "random_ of booleans": (lambda x: torch.empty(400, 500, dtype=torch.bool).random_(), 0.5, 0.5),
    "poisson": (lambda x: torch.poisson(3 * x), 3, 3**0.5),
    "gamma": (lambda x: torch.distributions.Gamma(0.5 * x, 2 * x).rsample(), 0.25, 0.5**0.5 / 2),
    "chi-squared": (lambda x: torch.distributions.Chi2(3 * x).sample(), 3, 6**0.5),
    "dirichlet": (
        lambda x: torch.distributions.Dirichlet(torch.tensor([1.0, 3.0]).expand(200_000, 2)).rsample()[:, 0],
        0.25,
        (3 / 16 / 5) ** 0.5,
    ),
    "beta": (lambda x: torch.distributions.Beta(x, 3 * x).rsample(), 0.25, (3 / 16 / 5) ** 0.5),
    "trunc_normal_": (lambda x: nn.init.trunc_normal_(torch.empty_like(x), 5, 2, 1, 9), 5, 2 * 0.87963),
    "trunc_normal_ to one side": (
        lambda x: nn.init.trunc_normal_(torch.empty_like(x), b=0),
        -0.72279,
        0.50131,
    ),
    "trunc_normal_ of a tail": (
        lambda x: nn.init.trunc_normal_(torch.empty_like(x), 1, 0.5, 3, 4),
        3.11277,
        0.10789,
    ),
    "rrelu": (lambda x: F.rrelu(-x, 0.2, 0.6, training=True), -0.4, 0.4 * 12**-0.5),
    "rrelu_": (lambda x: F.rrelu(-x, 0.2, 0.6, training=True, inplace=True), -0.4, 0.4 * 12**-0.5),
}


@pytest.mark.filterwarnings("ignore:mean is more than 2 std from:UserWarning")  # torch 2.11, of a tail
@pytest.mark.parametrize("name", share(OPS, 3))
def test_op_draws_from_its_distribution(name: str) -> None:
    op, mean, std = OPS[name]
    module = Wrapped(lambda self, x: op(x))
    values = call(module, ONES).double()
    assert abs(values.mean().item() - mean) < 5 * std / values.numel() ** 0.5
    assert abs(values.std().item() / std - 1) < 0.02
    assert not torch.equal(values, call(module, ONES, fcg.random.key(8)).double())
    with torch.inference_mode():
        assert torch.equal(values, call(module, ONES).double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_truncated_normal_distribution_keeps_its_bounds(dtype: torch.dtype) -> None:
    module = Wrapped(lambda self, x: nn.init.trunc_normal_(torch.empty_like(x), 0.1, 3.0, -0.301, 0.703))
    values = call(module, ONES.to(dtype))
    low, high = torch.tensor([-0.301, 0.703], dtype=dtype)
    assert values.dtype == dtype
    assert bool(((values >= low) & (values <= high)).all())
    assert float(values.max() - values.min()) > 0.99


def test_modules_in_inference_mode_draw_and_return_the_same() -> None:
    apply, params, buffers = fcg.from_module(conv_net(0.3))
    x = torch.randn(4, 3, 8, 8)
    expected = apply(params, buffers, x, key=KEY)
    with torch.inference_mode():
        assert_trees_all_equal(apply(params, buffers, x, key=KEY), expected)
    assert buffers["1.num_batches_tracked"] == 0


def test_multinomial_without_replacement_draws_each_once() -> None:
    rows = call(Wrapped(lambda self, x: torch.multinomial(x, 5)), torch.ones(1000, 5))
    assert torch.equal(rows.sort().values, torch.arange(5).expand(1000, 5))


# --- what needs a key ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "place"),
    [
        (nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)), r"`1` \(Dropout\)"),
        (nn.Sequential(Attention(0.1)), r"`0.attn` \(MultiheadAttention\)"),
        (nn.Sequential(nn.LSTM(16, 8, 2, dropout=0.1)), r"`0` \(LSTM\)"),
        (Wrapped(lambda self, x: x + torch.randn_like(x)), "`Wrapped` itself"),
    ],
)
def test_draw_without_a_key_is_refused_with_its_place(module: nn.Module, place: str) -> None:
    apply, state = state_of(module)
    x = torch.randn(4, 6, 16)
    message = place + r" draws random numbers and `apply` has no key(.|\n)*, at .*py:\d+(.|\n)*key="
    with pytest.raises(fcg.ImplicitRandomnessError, match=message):
        apply(state.params, state.buffers, x)

    @fcg.graph_fn
    def forward(state: Any, x: Tensor) -> Any:
        return apply(state.params, state.buffers, x)[0]

    with pytest.raises(fcg.ImplicitRandomnessError, match=place):
        forward(state, x)


def test_place_is_right_after_an_error_that_the_module_catches() -> None:
    def recovers(self: Any, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            self.inner(x[:, :1])  # of a wrong width
        return torch.rand_like(x)

    with pytest.raises(fcg.ImplicitRandomnessError, match="`Wrapped` itself draws"):
        call(Wrapped(recovers), torch.ones(2, 4), None)


@pytest.mark.parametrize("case", DRAWING)
def test_evaluation_needs_no_key(case: str) -> None:
    make, batch = DRAWING[case]
    call(make(), batch(), None, train=False)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: torch.binomial(3 * x, x / 2),
        lambda x: torch.rand(3, generator=torch.Generator()),
        lambda x: torch.rand(3, out=torch.empty(3)),
    ],
)
def test_draw_that_no_key_can_replace_is_refused(op: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(fcg.ImplicitRandomnessError, match="in a way that a key cannot replace"):
        call(Wrapped(lambda self, x: op(x)), ONES)


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (
            lambda x: nn.init.trunc_normal_(x.clone(), generator=torch.Generator()),
            r"in a way that a key cannot replace",
        ),
        (lambda x: x.clone().uniform_(2, 2), r"aten\.uniform_\.default(.|\n)*expected low < high"),
        (
            lambda x: torch.randn(3, dtype=torch.complex64),
            r"aten\.randn\.default(.|\n)*floating dtype, got torch\.complex64(.|\n)*`torch\.complex`",
        ),
    ],
)
def test_draw_with_arguments_that_a_key_cannot_follow_is_refused_with_its_place(
    op: Callable[[Tensor], Tensor], reason: str
) -> None:
    with pytest.raises(fcg.ImplicitRandomnessError, match=r"`0` \(Wrapped\) draws(.|\n)*" + reason):
        call(nn.Sequential(Wrapped(lambda self, x: op(x))), ONES)


def test_complex_numbers_are_drawn_as_two_real_ones() -> None:
    values = call(Wrapped(lambda self, x: torch.complex(torch.randn_like(x), torch.randn_like(x))), ONES)
    assert abs((values.real * values.imag).mean().item()) < 5 / values.numel() ** 0.5


# --- tensors: names, ties, buffers -------------------------------------------------------------------------------


def test_tied_weights_keep_one_name_and_load_under_both() -> None:
    module = Tied()
    apply, params, buffers = fcg.from_module(module)
    assert list(params) == ["wte.weight"]
    params = {"wte.weight": params["wte.weight"] + 1}
    state = apply.state_dict(params, buffers)
    assert set(state) == {"wte.weight", "head.weight"}
    module.load_state_dict(state, strict=True)
    assert module.head.weight is module.wte.weight
    assert torch.equal(module.wte.weight, params["wte.weight"])
    Tied().load_state_dict(params | buffers, strict=False)


def test_state_of_a_run_loads_into_the_module() -> None:
    module = conv_net()
    module.register_buffer("table", torch.ones(3), persistent=False)
    apply, state = state_of(module)
    assert "table" in state.buffers
    state, _ = train_step(apply)(state, torch.randn(4, 3, 8, 8))
    module.load_state_dict(apply.state_dict(state.params, state.buffers), strict=True)
    assert torch.equal(module[1].running_mean, state.buffers["1.running_mean"])


def test_state_dict_tells_the_versions_of_its_modules() -> None:
    """Modules refuse or convert values of another version, as torchvision's MNASNet does."""
    module = conv_net()
    apply, params, buffers = fcg.from_module(module)
    found = apply.state_dict(params, buffers)
    assert found._metadata == module.state_dict()._metadata  # type: ignore[attr-defined]
    assert found._metadata["1"] == {"version": 2}


def test_frozen_parameters_and_submodules_stay_so() -> None:
    module = conv_net()
    module[0].weight.requires_grad_(False)
    module[1].eval()
    apply, state = state_of(module)
    assert "0.weight" in state.buffers
    assert "0.weight" not in state.params
    before = fcg.snapshot(state).buffers
    state, _ = train_step(apply)(state, torch.randn(4, 3, 8, 8))
    assert_trees_all_equal(fcg.snapshot(state).buffers, before)


def test_shared_memory_that_is_no_tie_is_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = nn.Parameter(module[0].weight.detach())
    with pytest.raises(fcg.AliasError, match=r"params\['0.weight'\]"):
        fcg.from_module(module)


class Queue(nn.Module):
    """Buffers written in every way: in place, through a view, by assignment, not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(3, 4))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, early = self.rows[0], self.rows[1:]
        before = early.sum()
        self.rows.add_(1)
        first.mul_(2)
        self.rows.view(-1)[4:].copy_(x.flatten()[:8])
        torch.add(self.count, 1, out=self.count)
        self.scale = self.scale * x.mean()
        return before, early.sum(), self.rows, first, (x * self.mask).sum()


def test_written_buffers_are_returned_and_the_given_ones_kept() -> None:
    module, x = Queue(), torch.randn(3, 4)
    apply, params, buffers = fcg.from_module(module)
    given = {name: buffer.clone() for name, buffer in buffers.items()}
    out, new = apply(params, buffers, x)
    expected = module(x)
    assert_trees_all_equal(list(out), list(expected))
    assert_trees_all_equal(new, dict(module.named_buffers()))
    assert_trees_all_equal(buffers, given)
    assert new["mask"] is buffers["mask"]  # not written, so a step that returns it leaves it alone


@pytest.mark.parametrize("view", [lambda b: b.expand(2, *b.shape)[0], lambda b: torch.stack([b, b])[1]])
def test_written_buffers_that_are_views_are_kept_too(view: Callable[[Tensor], Tensor]) -> None:
    apply, params, buffers = fcg.from_module(Queue())
    buffers = {name: view(buffer) for name, buffer in buffers.items()}
    given = {name: buffer.clone() for name, buffer in buffers.items()}
    _, new = apply(params, buffers, torch.ones(3, 4))
    assert_trees_all_equal(buffers, given)
    assert new["count"] == 1


def test_replay_of_written_buffers_equals_eager() -> None:
    apply, state = state_of(Queue())
    step = fcg.graph_step(
        lambda s, x: (lambda out: (s.replace(buffers=out[1]), out[0]))(apply(s.params, s.buffers, x)),
        lowering="aten",
    )
    assert_replay_equals_eager(step, state, [torch.randn(3, 4) for _ in range(CALLS)])


def test_gradients_of_both_orders_are_those_of_torch_func() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 1))
    apply, params, buffers = fcg.from_module(module)
    x = torch.randn(8, 4)

    def loss_fn(params: Any) -> Any:
        out, new_buffers = apply(params, buffers, x, key=KEY)
        return out.square().mean(), new_buffers

    def penalty(grad: Callable[..., Any]) -> Callable[[Any], Tensor]:
        return lambda params: sum(g.square().sum() for g in grad(loss_fn, has_aux=True)(params)[0].values())

    assert_trees_all_close(
        fcg.grad(loss_fn, has_aux=True)(params), torch.func.grad(loss_fn, has_aux=True)(params)
    )
    assert_trees_all_close(
        fcg.grad(penalty(fcg.grad))(params), torch.func.grad(penalty(torch.func.grad))(params)
    )
    assert buffers["1.num_batches_tracked"] == 0


def test_ensemble_under_vmap() -> None:
    modules = [mlp() for _ in range(3)]
    applied = [fcg.from_module(module) for module in modules]
    stacked = {name: torch.stack([params[name] for _, params, _ in applied]) for name in applied[0][1]}
    x = torch.randn(8, 16)
    outs = torch.func.vmap(lambda params: applied[0][0](params, {}, x)[0])(stacked)
    torch.testing.assert_close(outs, torch.stack([module(x) for module in modules]))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_one_key_under_vmap_draws_as_torch_is_told(randomness: str) -> None:
    apply, params, buffers = fcg.from_module(nn.Dropout(0.5))
    outs = torch.func.vmap(
        lambda x, key: apply(params, buffers, x, key=key)[0], in_dims=(0, None), randomness=randomness
    )(torch.ones(2, 1000), KEY)
    equal = (outs[0] == outs[1]).double().mean()
    assert equal == 1 if randomness == "same" else 0.4 < equal < 0.6
    assert torch.equal(outs[0].unique(), torch.tensor([0.0, 2.0]))


def test_batch_of_keys_is_refused() -> None:
    apply, params, buffers = fcg.from_module(nn.Dropout(0.5))
    f = torch.func.vmap(lambda x, key: apply(params, buffers, x, key=key)[0], randomness="different")
    with pytest.raises(TypeError, match=r'expected `key` i64\[2\], got a batch(.|\n)*randomness="different"'):
        f(torch.ones(2, 4), fcg.random.split(KEY, 2))


@pytest.mark.parametrize(
    ("args", "got"),
    [((torch.ones(2, 4),), r"`buffers`(.|\n)*f32\[2,4\]"), ((None, 1), "`buffers`(.|\n)*None")],
)
def test_forgotten_buffers_are_refused(args: Any, got: str) -> None:
    apply, params, _ = fcg.from_module(nn.Linear(4, 4))
    with pytest.raises(TypeError, match=rf"`Linear`: expected {got}(.|\n)*apply\(params, buffers, x\)"):
        apply(params, *args)
    with pytest.raises(TypeError, match="`Linear`: expected `params`"):
        apply(torch.ones(2, 4), *args)


def test_tensors_that_are_not_the_modules_are_refused() -> None:
    apply, params, buffers = fcg.from_module(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    wrong = {**params, "0.weight": torch.ones(4, 3), "extra": torch.ones(1)}
    del wrong["0.bias"]
    with pytest.raises(fcg.LayoutError) as caught:
        apply(wrong, buffers, torch.ones(2, 4))
    for row in (
        "params['0.weight']  expected a tensor [3, 4]   got f32[4,3]",
        "params['extra']  expected nothing",
    ):
        assert row in str(caught.value)
    with pytest.raises(
        fcg.LayoutError, match=r"buffers\['1.running_mean'\]  expected a tensor \[3\]   got None"
    ):
        apply(params, {}, torch.ones(2, 4))


# --- the original ---------------------------------------------------------------------------------------------------


def test_the_original_is_left_alone_and_may_go() -> None:
    module = conv_net(0.3).eval()
    module(torch.randn(4, 3, 8, 8)).sum().backward()
    values, grads = copy.deepcopy(module.state_dict()), [p.grad for p in module.parameters()]
    apply, params, buffers = fcg.from_module(module)
    out, _ = apply(params, buffers, torch.randn(4, 3, 8, 8), key=KEY)
    out.sum().backward() if out.requires_grad else None
    assert not any(part.training for part in module.modules())
    assert all(p.grad is grad for p, grad in zip(module.parameters(), grads, strict=True))
    assert_trees_all_equal(dict(module.state_dict()), dict(values))
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert not storages & {p.untyped_storage().data_ptr() for p in params.values()}
    gone = [weakref.ref(p) for p in module.parameters()]
    del module, grads
    gc.collect()
    assert all(reference() is None for reference in gone)
    apply(params, buffers, torch.randn(4, 3, 8, 8), key=KEY)


def test_apply_can_be_pickled_and_printed() -> None:
    apply, params, buffers = fcg.from_module(conv_net())
    x = torch.randn(4, 3, 8, 8)
    assert repr(apply) == "<apply of Sequential>"
    again = pickle.loads(pickle.dumps(apply))
    assert torch.equal(again(params, buffers, x)[0], apply(params, buffers, x)[0])


def test_threads_do_not_share_a_mode() -> None:
    apply, params, buffers = fcg.from_module(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    x, wrong = torch.ones(64, 4), []

    def repeat(train: bool) -> None:
        expected = apply(params, buffers, x, key=KEY, train=train)[0]
        for _ in range(100):
            if not torch.equal(apply(params, buffers, x, key=KEY, train=train)[0], expected):
                wrong.append(train)

    threads = [threading.Thread(target=repeat, args=(train,)) for train in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_backends_are_as_before_after_an_error() -> None:
    def fails(self: Any, x: Tensor) -> Tensor:
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        raise KeyError("mine")

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with pytest.raises(KeyError, match="mine"):
            call(Wrapped(fails), torch.ones(1, 1, 4, 4))
        assert not torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.mkldnn.enabled
    assert torch.backends.cudnn.enabled


def test_an_rnn_runs_where_the_flags_of_backends_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are once a program has imported torch's own testing tools."""
    frozen = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(frozen, "__allow_nonbracketed_mutation_flag", False)
    with pytest.raises(RuntimeError, match="flags"):
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    gru = nn.GRU(3, 2)
    apply, params, buffers = fcg.from_module(gru)
    x = torch.ones(4, 1, 3)
    torch.testing.assert_close(apply(params, buffers, x)[0], gru(x))
    assert torch.backends.mkldnn.enabled
    assert torch.backends.cudnn.enabled


# --- refused while it runs ----------------------------------------------------------------------------------------


def keeps(self: Any, x: Tensor) -> Tensor:
    self.last = self.inner(x)
    return self.last


def counts(self: Any, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return self.inner(x)


def appends(self: Any, x: Tensor) -> Tensor:
    self.history.append(x)
    return self.inner(x)


def registers(self: Any, x: Tensor) -> Tensor:
    self.register_buffer("late", x)
    return x


@pytest.mark.parametrize(
    ("forward", "attribute"),
    [(keeps, "`0.last`"), (counts, "`0.calls`"), (appends, "`0.history`"), (registers, "`0.late`")],
)
def test_attributes_that_the_forward_writes_are_refused(
    forward: Callable[..., Tensor], attribute: str
) -> None:
    module = Wrapped(forward)
    module.history = []
    apply, state = state_of(nn.Sequential(module))
    with pytest.raises(fcg.SideEffectError, match=attribute):
        apply(state.params, state.buffers, torch.ones(2, 4))
    with pytest.raises(fcg.SideEffectError, match=attribute):
        train_step(apply)(state, torch.ones(2, 4))
    assert not hasattr(module, "last")
    assert module.history == []


def starts(self: Any, x: Tensor) -> Tensor:
    self.ema = x.mean(0) if self.ema is None else self.ema.lerp(x.mean(0), 0.1)
    return self.inner(x) - self.ema


def forgets(self: Any, x: Tensor) -> Tensor:
    self.ema = None
    return self.inner(x)


@pytest.mark.parametrize(
    ("forward", "value", "row", "fix"),
    [
        (starts, None, "before None   after a tensor", r"self\.register_buffer\('ema', value\)"),
        (
            forgets,
            torch.ones(4),
            "before a tensor   after None",
            r"self\.ema = torch\.zeros_like\(self\.ema\)",
        ),
    ],
)
def test_buffers_that_come_or_go_are_refused(
    forward: Callable[..., Tensor], value: Tensor | None, row: str, fix: str
) -> None:
    module = Wrapped(forward)
    module.register_buffer("ema", value)
    apply, state = state_of(nn.Sequential(module))
    message = rf"`0\.ema`  {row}(.|\n)*{fix}"
    with pytest.raises(fcg.SideEffectError, match=message):
        apply(state.params, state.buffers, torch.ones(2, 4))
    with pytest.raises(fcg.SideEffectError, match=message):
        train_step(apply)(state, torch.ones(2, 4))


def test_buffer_registered_with_its_first_value_is_returned() -> None:
    module = Wrapped(starts)
    module.register_buffer("ema", torch.zeros(4))
    apply, params, buffers = fcg.from_module(module)
    torch.testing.assert_close(apply(params, buffers, torch.ones(2, 4))[1]["ema"], torch.full((4,), 0.1))


def test_parameters_that_the_forward_writes_are_refused() -> None:
    def clips(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.clamp_(-1, 1)
        return self.inner(x)

    with pytest.raises(fcg.ReadOnlyError, match=r"params\['inner.weight'\]"):
        call(Wrapped(clips), torch.ones(2, 4))


def normalizes(self: Any, x: Tensor) -> Tensor:
    self.inner.weight.data = self.inner.weight.data / self.inner.weight.data.norm()
    return self.inner(x)


def transposes(self: Any, x: Tensor) -> Tensor:
    self.inner.weight.data = self.inner.weight.data.t()  # the same memory, read in another order
    return self.inner(x)


def counts_twice(self: Any, x: Tensor) -> Tensor:
    for _ in range(2):  # the second finds the first one's memory free again
        self.count.data = self.count.data + 1
    return self.inner(x)


@pytest.mark.parametrize(
    ("forward", "row", "fix"),
    [
        (normalizes, r"params\['inner.weight'\]", "`weight = ...`"),
        (transposes, r"params\['inner.weight'\]", "`weight = ...`"),
        (counts_twice, r"buffers\['count'\]", r"`self.count.copy_\(...\)`"),
    ],
)
@pytest.mark.parametrize("view", [torch.clone, lambda tensor: torch.stack([tensor, tensor])[1]])
def test_tensors_whose_memory_the_forward_exchanges_are_refused(
    forward: Callable[..., Tensor], row: str, fix: str, view: Callable[[Tensor], Tensor]
) -> None:
    module = Wrapped(forward)
    module.register_buffer("count", torch.zeros(1000))
    apply, params, buffers = fcg.from_module(module)
    params, buffers = fcg.tree.map(view, (params, buffers))
    before = fcg.tree.map(torch.clone, (params, buffers))

    def loss_fn(params: Any) -> Tensor:
        return apply(params, buffers, torch.ones(2, 4))[0].sum()

    for call in (loss_fn, fcg.value_and_grad(loss_fn)):
        with pytest.raises(
            fcg.ReadOnlyError, match=rf"exchanges the memory of 1 tensor(.|\n)*{row}(.|\n)*{fix}"
        ):
            call(params)
        assert_trees_all_equal((params, buffers), before)


def test_buffer_whose_values_the_forward_copies_is_returned() -> None:
    module = Wrapped(lambda self, x: self.count.copy_(self.count + 1) * x)
    module.register_buffer("count", torch.zeros(4))
    apply, params, buffers = fcg.from_module(module)
    assert_trees_all_equal(apply(params, buffers, torch.ones(2, 4))[1], {"count": torch.ones(4)})
    assert_trees_all_equal(buffers, {"count": torch.zeros(4)})


@pytest.mark.parametrize("assign", [True, False])
def test_a_buffer_that_a_checkpoint_assigns_is_refused(assign: bool) -> None:
    """PyTorch assigns it twice, but the forward has returned its buffers by then. In place, both writes count."""

    def body(self: Any, x: Tensor) -> Tensor:
        self.count = self.count + 1 if assign else self.count.add_(1)
        return torch.sin(self.inner(x)) ** 2

    module = Wrapped(lambda self, x: checkpoint(lambda x: body(self, x), x, use_reentrant=False))
    module.register_buffer("count", torch.zeros(()))
    apply, params, buffers = fcg.from_module(module)

    def loss(params: Any) -> Any:
        out, new = apply(params, buffers, torch.ones(2, 4))
        return out.sum(), new

    if assign:
        with pytest.raises(fcg.CaptureError, match=r"assigns a buffer(.|\n)*count.*(.|\n)*copy_"):
            fcg.value_and_grad(loss, has_aux=True)(params)
    else:
        (_, new), _ = fcg.value_and_grad(loss, has_aux=True)(params)
        assert new["count"] == 2


def test_a_reentrant_checkpoint_is_refused() -> None:
    module = Wrapped(lambda self, x: checkpoint(torch.relu, self.inner(x), use_reentrant=True))
    apply, state = state_of(module)
    params = {name: value.clone().requires_grad_() for name, value in dict(state.params).items()}
    with pytest.raises(fcg.CaptureError, match=r"calls `torch.utils.checkpoint`(.|\n)*use_reentrant=False"):
        apply(params, state.buffers, torch.ones(2, 4))
    with pytest.raises(fcg.CaptureError, match=r"torch.utils.checkpoint"):
        train_step(apply)(state, torch.ones(2, 4))


class Blocks(nn.Module):
    """Blocks that draw, write buffers and remember nothing, each recomputed if it is asked for."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.how == "block":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.how == "closure":
                x = (
                    checkpoint(
                        lambda x, block=block: x + block[3](block[2](block[1](block[0](x)))),
                        x,
                        use_reentrant=False,
                    )
                    - x
                )
            elif self.how == "nested":
                x = checkpoint(
                    lambda x, block=block: checkpoint(block, x, use_reentrant=False), x, use_reentrant=False
                )
            elif self.how == "without state":
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("how", "outside"), diagonal(["block", "closure", "nested", "without state"], [True, False])
)
def test_what_a_checkpoint_recomputes_is_what_it_was(how: str, outside: bool) -> None:
    """The same draws and the same gradients; in a `remat` as well, and captured."""

    def stepped(how: str) -> tuple[Any, Any]:
        torch.manual_seed(0)
        apply, params, buffers = fcg.from_module(Blocks(how))
        applied = fcg.remat(apply) if outside else apply

        def train_step(state: Any, x: Tensor) -> Any:
            key = fcg.random.fold_in(state["key"], state["count"])

            def loss_fn(params: Any) -> Any:
                out, buffers = applied(params, state["buffers"], x, key=key)
                return out.square().mean(), buffers

            (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state["params"])
            params = fcg.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
            new = {"params": params, "buffers": buffers, "key": state["key"], "count": state["count"] + 1}
            return new, {"loss": loss}

        state = {
            "params": params,
            "buffers": buffers,
            "key": fcg.random.key(0),
            "count": torch.zeros((), dtype=torch.int64),
        }
        return fcg.graph_step(train_step), fcg.place(state)

    (plain, expected), (step, state) = stepped("not"), stepped(how)
    twin = fcg.fork(state)
    for call in range(CALLS):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(call))
        expected, wanted = plain(expected, x)
        state, metrics = step(state, x)
        twin, of_eager = step.eager(twin, x)
        assert_trees_all_equal((state, metrics), (twin, of_eager), f"eager, call {call}")
        if how != "closure":  # which computes something else
            assert_trees_all_equal((state["params"], metrics), (expected["params"], wanted), f"call {call}")
    assert step.stats.captures == 1


@pytest.mark.parametrize("how", ["not", "block", "closure", "nested"])
def test_a_checkpoint_writes_buffers_as_often_as_in_pytorch(how: str) -> None:
    """Once in the forward, and once more when it recomputes."""
    torch.manual_seed(0)
    model = Blocks(how)
    for block in model.blocks:
        block[2].p = 0.0
    apply, state = state_of(model)
    step = train_step(apply)
    for call in range(4):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(call))
        loss = model(x).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
        state, metrics = step(state, x)
        torch.testing.assert_close(metrics["loss"], loss.detach())
        for name, value in apply.state_dict(state.params, state.buffers).items():
            torch.testing.assert_close(
                value, model.state_dict()[name], msg=lambda text, name=name: f"{name}: {text}"
            )


def test_buffers_that_a_checkpoint_will_write_may_be_used_before() -> None:
    """A second model in evaluation mode keeps for its backward the buffers that it was given, as they were then."""
    apply, params, buffers = fcg.from_module(Blocks("block"))

    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            out, new = apply(params, state["buffers"], x, key=fcg.random.key(0))
            again, _ = apply(params, new, x, train=False)
            kept = fcg.tree.map(torch.clone, new)
            return (out * again).mean(), (new, kept)

        (loss, (new, kept)), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params = fcg.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "buffers": new}, {"loss": loss, "kept": kept}

    step, state = fcg.graph_step(train_step), fcg.place({"params": params, "buffers": buffers})
    twin = fcg.fork(state)
    for call in range(4):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(call))
        state, metrics = step(state, x)
        twin, expected = step.eager(twin, x)
        assert_trees_all_equal((state, metrics), (twin, expected), f"call {call}")
        name = "blocks.0.1.num_batches_tracked"
        assert (int(metrics["kept"][name]), int(state["buffers"][name])) == (2 * call + 1, 2 * call + 2)


class DrawsThrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.inner(x)) * torch.rand_like(x)
        return F.dropout(x, 0.3)


class Keeping(nn.Module):
    """Recomputes blocks but for some results of calls that draw and of products; zero keeps all without recomputing."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DrawsThrice() for _ in range(2))
        self.every = every

    def contexts(self) -> Any:
        return create_selective_checkpoint_contexts(keeps(self.every))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=False, context_fn=self.contexts)
                if self.every
                else block(x)
            )
        return x


def keeps(every: int) -> Any:
    seen: Counter[tuple[bool, Any]] = Counter()
    drawn_or_product = ("rand_like", "mm")

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen[context.is_recompute, op] += 1
        kept = (
            any(part in str(op) for part in drawn_or_product) and seen[context.is_recompute, op] % every == 0
        )
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


@pytest.mark.parametrize("every", [1, 2, 3, 100])
def test_what_a_policy_keeps_changes_no_draw(every: int) -> None:
    """A kept draw is not made again; those after it have the numbers that they had."""
    gradients = []
    for kept in (0, every):
        torch.manual_seed(0)
        apply, params, buffers = fcg.from_module(Keeping(kept))

        @fcg.graph_fn(lowering="aten")
        def of_loss(params: Any, x: Tensor, key: Tensor, apply: Any = apply, buffers: Any = buffers) -> Any:
            return fcg.grad(lambda p: apply(p, buffers, x, key=key)[0].square().mean())(params)

        found = []
        for call in range(3):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(call))
            found.append(of_loss(params, x, fcg.random.key(call)))
            assert_trees_all_equal(
                found[-1], of_loss.eager(params, x, fcg.random.key(call)), f"eager, {call}"
            )
        gradients.append(found)
    assert_trees_all_equal(*gradients)


def test_a_checkpoint_that_cannot_draw_the_same_again_is_refused() -> None:
    """Drawn outside of its submodules, or in one that runs several times."""
    between = Wrapped(lambda self, x: checkpoint(lambda x: F.dropout(self.inner(x)), x, use_reentrant=False))
    apply, state = state_of(between)
    with pytest.raises(
        fcg.CaptureError, match=r"calls `torch.utils.checkpoint`(.|\n)*outside of its submodules"
    ):
        apply(state.params, state.buffers, torch.ones(2, 4), key=fcg.random.key(0))
    shared = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    twice = Wrapped(
        lambda self, x: checkpoint(
            self.inner, checkpoint(self.inner, x, use_reentrant=False), use_reentrant=False
        )
    )
    twice.inner = shared
    apply, params, buffers = fcg.from_module(twice)
    with pytest.raises(fcg.CaptureError, match="it runs several times in one forward"):
        fcg.grad(lambda p: apply(p, buffers, torch.ones(2, 4), key=fcg.random.key(0))[0].sum())(params)


# --- refused at once ------------------------------------------------------------------------------------------------


def hooked(register: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    getattr(module[0], register)(lambda *args: None)
    return module


def with_tensor_hook(register: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    getattr(module[0].weight, register)(lambda *args: None)
    return module


def with_attribute(value: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].table = value
    return module


def patched(make: Callable[[nn.Module], Callable[..., Tensor]], name: str = "forward") -> nn.Module:
    module = nn.Linear(4, 4)
    setattr(module, name, make(module))
    return module


def around(function: Callable[..., Tensor], *more: Any) -> Callable[..., Tensor]:
    return lambda x: function(x) * 2


def with_default(module: nn.Module) -> Callable[..., Tensor]:
    def forward(x: Tensor, *, weight: Tensor = module.weight) -> Tensor:
        return x @ weight

    return forward


def of_globals(module: nn.Module) -> Callable[..., Tensor]:
    known: dict[str, Any] = {"original": module.forward}
    exec(
        "def helper(x):\n    return original(x)\nforward = lambda x: [helper(part) for part in x]", known
    )  # as a script's top level would
    return known["forward"]


# How a function reaches the module that it is an attribute of.
REACHING: dict[str, Callable[[nn.Module], Any]] = {
    "closure": lambda module: lambda x: module.weight @ x,
    "bound method": lambda module: around(module.forward),
    "default": lambda module: lambda x, m=module: m.weight @ x,
    "keyword default": with_default,
    "partial": lambda module: around(functools.partial(F.linear, weight=module.weight)),
    "function in a closure": lambda module: around(around(module.forward)),
    "function in a partial": lambda module: functools.partial(around(module.forward)),
    "function in a list": lambda module: [[around(module.forward)]],
    "function in a set of a set": lambda module: {frozenset({around(module.forward)})},
    "list in a closure": lambda module: (lambda parts: lambda x: parts[0](x))([module.forward]),
    "globals": of_globals,
}


def with_sparse_buffer() -> nn.Module:
    module = nn.Linear(4, 4)
    module.register_buffer("graph", torch.eye(4).to_sparse())
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    **{
        kind: (
            lambda kind=kind: hooked(f"register_{kind}"),
            fcg.SideEffectError,
            r"`0` \(Linear\) has hooks on its backward",
        )
        for kind in ("full_backward_hook", "full_backward_pre_hook")
    },
    **{
        kind: (
            lambda kind=kind: with_tensor_hook(kind),
            fcg.SideEffectError,
            r"params\['0.weight'\]` has hooks",
        )
        for kind in ("register_hook", "register_post_accumulate_grad_hook")
    },
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), fcg.LayoutError, r"params\['0.weight'\]` has no shape"),
    "meta": (lambda: nn.Linear(3, 3, device="meta"), fcg.LayoutError, r"params\['bias'\]|params\['weight'\]"),
    "sparse": (with_sparse_buffer, fcg.LayoutError, r"buffers\['graph'\]` is torch.sparse_coo"),
    "data parallel": (lambda: nn.DataParallel(nn.Linear(3, 3)), TypeError, "inside, `model.module`"),
    "compiled": (lambda: torch.compile(nn.Linear(3, 3)), TypeError, "before `torch.compile`"),
    "scripted": (lambda: torch.jit.script(nn.Linear(3, 3)), TypeError, "before `torch.jit.script`"),
    "tensor": (lambda: with_attribute(torch.ones(3)), fcg.ForeignTensorError, "`0.table` is a tensor"),
    "tensors": (lambda: with_attribute([torch.ones(3)]), fcg.ForeignTensorError, "`0.table` is a tensor"),
    "nested tensors": (
        lambda: with_attribute({"a": [(torch.ones(3),)]}),
        fcg.ForeignTensorError,
        r"`0.table` is a tensor(.|\n)*self\.register_buffer\(",
    ),
    "not a module": (lambda: {"w": torch.ones(3)}, TypeError, "expected a torch.nn.Module"),
    "lock": (lambda: with_attribute(threading.Lock()), TypeError, "Sequential cannot be copied"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_module_that_is_not_pure_is_refused_by_name(case: str) -> None:
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        fcg.from_module(make())


@pytest.mark.parametrize("tracks", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_batch_norm_without_momentum_averages_over_all_batches(*, trains: bool, tracks: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None, track_running_stats=tracks))
    module[1].train(trains)
    apply, state = state_of(module)
    inputs = [torch.randn(4, 3) + n for n in range(6)]
    step = train_step(apply, lowering="aten")
    assert_replay_equals_eager(step, state, inputs)
    state = fcg.place(fcg.fork(state))
    optimizer = torch.optim.SGD(module.parameters(), 0.0)
    frozen = fcg.graph_fn(lambda s, x: apply(s.params, s.buffers, x)[1])
    for x in inputs:
        state = state.replace(buffers=frozen(state, x))
        module(x).sum().backward()
        optimizer.step()
    assert_trees_all_close(dict(state.buffers), dict(module.named_buffers()), rtol=1e-6, atol=1e-6)


class Cutoffs(nn.Module):
    """An adaptive softmax, which torch computes for the rows of each cluster alone."""

    def __init__(self, *, head_bias: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10], head_bias=head_bias)

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        return self.last(self.first(x), targets)

    def predict(self, x: Tensor) -> Tensor:
        return self.last.predict(self.first(x))


@pytest.mark.parametrize("targets", [torch.arange(20).repeat(2), torch.full((40,), 3), torch.tensor(17)])
@pytest.mark.parametrize("head_bias", [True, False])
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_adaptive_softmax_is_that_of_torch(targets: Tensor, *, head_bias: bool) -> None:
    module = Cutoffs(head_bias=head_bias).double()
    apply, params, buffers = fcg.from_module(module)
    x = torch.randn(*targets.shape, 6, dtype=torch.float64) * 4

    @fcg.graph_step
    def step(state: Any, x: Tensor, targets: Tensor) -> Any:
        def loss(params: Any) -> Any:
            out, _ = apply(params, state["buffers"], x, targets)
            return out.loss, out.output

        (loss_, output), grads = fcg.value_and_grad(loss, has_aux=True)(state["params"])
        return state, (loss_, output, grads)

    _, (loss, output, grads) = step({"params": params, "buffers": buffers}, x, targets)
    expected = module(x, targets)
    expected.loss.backward()
    assert_trees_all_close((output, loss), tuple(one.detach() for one in expected), rtol=1e-12, atol=1e-12)
    of_torch = {
        name: torch.zeros_like(one) if one.grad is None else one.grad
        for name, one in module.named_parameters()
    }
    assert_trees_all_close(dict(grads), of_torch, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_prediction_of_an_adaptive_softmax_is_that_of_torch() -> None:
    module = Cutoffs(head_bias=True)
    with torch.no_grad():
        module.last.head.weight.mul_(
            8
        )  # clusters are preferred that hold no class as likely as one of the shortlist
    apply, params, buffers = fcg.from_module(module)
    x = torch.randn(200, 6) * 4
    predicted, _ = fcg.graph_fn(lambda s, x: apply.method("predict")(s["p"], s["b"], x, train=False))(
        {"p": params, "b": buffers}, x
    )
    assert torch.equal(predicted, module.predict(x))
    assert len(predicted.unique()) > 5


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_targets_that_do_not_fit_an_adaptive_softmax_are_refused() -> None:
    apply, params, buffers = fcg.from_module(Cutoffs())
    evaluate = fcg.graph_fn(lambda s, x, y: apply(s["p"], s["b"], x, y)[0].loss)
    with pytest.raises(fcg.CaptureError, match="one target each"):
        evaluate({"p": params, "b": buffers}, torch.randn(4, 6), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="out of bounds"):
        evaluate({"p": params, "b": buffers}, torch.randn(4, 6), torch.full((4,), 20))


@pytest.mark.parametrize("name", ["forward", "f"])
@pytest.mark.parametrize("case", REACHING)
def test_function_that_reaches_the_original_is_refused(case: str, name: str) -> None:
    module = nn.Sequential(patched(REACHING[case], name))
    message = rf"`0.{name}` is a function that holds on(.|\n)*`def {name}\(self, ...\)`"
    with pytest.raises(fcg.ForeignTensorError, match=message):
        fcg.from_module(module)


class Doubled(nn.Module):
    """What the message advises for `linear.forward = lambda x: original(x) * 2`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


@pytest.mark.parametrize(
    "make",
    [
        Doubled,
        lambda: patched(
            lambda module: types.MethodType(lambda self, x: F.linear(x, self.weight) * 2, module)
        ),
        lambda: patched(lambda module: functools.partial(lambda self, x: self.weight @ x.T, module)),
        lambda: patched(lambda module: F.relu, "act"),
    ],
)
def test_functions_that_are_copied_with_the_module_give_its_gradients(make: Callable[[], nn.Module]) -> None:
    module, x = make(), torch.randn(2, 4)
    apply, params, buffers = fcg.from_module(module)
    grads = fcg.grad(lambda params: apply(params, buffers, x)[0].square().sum())(params)
    module(x).square().sum().backward()
    # A bias that is not used has no gradient.
    expected = {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()
    }
    assert_trees_all_equal(grads, expected)


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"])
def test_wrapper_of_torch_distributed_is_refused(wrapper: str) -> None:
    # Real ones need a process group; what is looked at is the class.
    cls = type(wrapper, (nn.Linear,), {"__module__": "torch.distributed.anywhere"})
    with pytest.raises(TypeError, match="is a wrapper"):
        fcg.from_module(nn.Sequential(cls(3, 3)))


def test_names_of_the_wrappers_are_torchs() -> None:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    for cls in (FSDPModule, FullyShardedDataParallel, DistributedDataParallel):
        assert cls.__module__.startswith("torch.")
        assert cls.__name__ in ("FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel")


def test_rnn_that_keeps_what_it_was_called_with_is_refused_with_the_way_out() -> None:
    module = nn.GRU(4, 4)

    @fcg.graph_fn
    def forward(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(params), (x,))[0]

    with pytest.raises(
        fcg.SideEffectError,
        match=r"keeps 4 tensors(.|\n)*call the module by (.|\n)*fcg\.from_module(.|\n)*GRU\._flat_weights",
    ):
        forward(fcg.place({name: p.detach() for name, p in module.named_parameters()}), torch.ones(2, 4))


def test_a_seed_is_no_key() -> None:
    apply, params, buffers = fcg.from_module(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    with pytest.raises(TypeError, match=r"expected a key, got int 0.\nTo fix: `fcg.random.key\(0\)`"):
        apply(params, buffers, torch.ones(1, 2), key=0)


def test_torchs_attention_still_asks_for_modes_by_the_name_that_is_replaced() -> None:
    """Private to torch: with another name it would ask without end."""
    assert "has_torch_function" in F.multi_head_attention_forward.__code__.co_names
