"""Methods of modules, and functions that draw, as pure functions of a key."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.compiled_graphs import compiled_once
from tests.shares import share

pytestmark = pytest.mark.usefixtures("scalar_loops")

KEY = fcg.random.key(3)


class Autoencoder(nn.Module):
    """Has a forward, and methods that draw, write a buffer, remember, and call each other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Linear(8, 4))
        self.decoder = Decoder()
        self.table: Tensor | None = None
        self.width = 2

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encode(x).mean)

    def encode(self, x: Tensor) -> torch.distributions.Normal:
        mean, log_std = self.encoder(x).chunk(2, -1)
        return torch.distributions.Normal(mean, log_std.exp())

    def loss(self, x: Tensor, *, beta: float = 1.0) -> Tensor:
        posterior = self.encode(x)
        prior = torch.distributions.Normal(x.new_zeros(2), x.new_ones(2))
        error = (self.decoder(posterior.rsample()) - x).square().sum(-1)
        return (error + beta * torch.distributions.kl_divergence(posterior, prior).sum(-1)).mean()

    def sample(self, like: Tensor) -> Tensor:
        return self.decoder.sample(torch.randn_like(like) * self.width)

    def positions(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(6) / 6.0
        return x + self.table

    def counted(self, x: Tensor) -> Tensor:
        self.width += 1
        return x

    def scaled_in_place(self, x: Tensor) -> Tensor:
        self.decoder.linear.weight.mul_(2)
        return x


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 6)

    def forward(self, code: Tensor) -> Tensor:
        return self.linear(code).tanh()

    def sample(self, code: Tensor) -> Tensor:
        return self(code) + 0.1 * torch.randn_like(self(code))


def model() -> Any:
    torch.manual_seed(0)
    return fcg.from_module(Autoencoder())


class State(fcg.TrainState):
    buffers: Any


def assert_trains(device: str, lowering: Any, tolerance: float) -> None:
    apply, params, buffers = model()
    loss_of, sample = apply.method("loss"), apply.method("sample")

    def train_step(state: Any, x: Tensor) -> Any:
        key, other = fcg.random.split(fcg.random.fold_in(state.key, state.step))

        def loss_fn(params: Any) -> Any:
            return loss_of(params, state.buffers, x, beta=0.5, key=key)

        (loss, new), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        seen, _ = sample(state.params, new, x[:3, :2], key=other, train=False)
        return state.apply_gradients(grads, buffers=new), {"loss": loss, "seen": seen}

    params, buffers = fcg.tree.map(lambda one: one.to(device), (params, buffers))
    state = State.create(
        params=params, optimizer=fcg.optim.sgd(1e-2), key=fcg.random.key(0, device), buffers=buffers
    )
    step, twin = fcg.graph_step(train_step, lowering=lowering), fcg.fork(state)
    for call in range(16):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(call)).to(device)
        twin, expected = step.eager(twin, x)
        state, metrics = step(state, x)
        torch.testing.assert_close(metrics, expected, rtol=tolerance, atol=tolerance)
    assert int(state.buffers["encoder.1.num_batches_tracked"]) == 16
    assert step.stats.replays == 16


def test_a_step_trains_by_a_method() -> None:
    assert_trains("cpu", "aten", 0.0)


@compiled_once
def test_a_step_trains_by_a_method_compiled(compiled_on: str) -> None:
    assert_trains(compiled_on, "inductor", 1e-3)


def test_a_method_computes_what_the_module_computes() -> None:
    module = Autoencoder().eval()
    apply, params, buffers = fcg.from_module(copy.deepcopy(module))
    x = torch.randn(5, 6)
    out, new = apply.method("encode")(params, buffers, x, train=False)
    assert torch.equal(out.mean, module.encode(x).mean)
    assert_trees_all_equal(new, buffers)
    for name in ("forward", "decoder", "decoder.forward", "positions", "encoder.0.forward"):
        given = x[:, :2] if name.startswith("decoder") else x
        expected = module.get_submodule(name)(given) if name == "decoder" else None
        if expected is None:
            owner, _, method = name.rpartition(".")
            expected = getattr(module.get_submodule(owner), method)(given)
        assert torch.equal(apply.method(name)(params, buffers, given, train=False)[0], expected), name


def test_a_method_draws_from_the_key() -> None:
    apply, params, buffers = model()
    for name in ("sample", "decoder.sample"):
        sample, argument = apply.method(name), torch.ones(4, 2)
        before = torch.get_rng_state()
        one, other, third = (
            sample(params, buffers, argument, key=key)[0] for key in (KEY, KEY, fcg.random.key(4))
        )
        assert torch.equal(one, other)
        assert not torch.equal(one, third)
        assert torch.equal(before, torch.get_rng_state())
        with pytest.raises(fcg.ImplicitRandomnessError, match=f"`Autoencoder.{name}`"):
            sample(params, buffers, argument)


def test_a_method_is_as_pure_as_the_forward() -> None:
    apply, params, buffers = model()
    x = torch.randn(5, 6)
    with pytest.raises(fcg.SideEffectError, match=r"`Autoencoder.counted`(.|\n)*`width`"):
        apply.method("counted")(params, buffers, x)
    with pytest.raises(fcg.ReadOnlyError, match=r"`Autoencoder.scaled_in_place`(.|\n)*decoder.linear.weight"):
        apply.method("scaled_in_place")(params, buffers, x)
    assert repr(apply.method("decoder.sample")) == "<apply of Autoencoder.decoder.sample>"
    assert apply.method("sample").state_dict(params, buffers).keys() == Autoencoder().state_dict().keys()


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("smaple", AttributeError, r"`Autoencoder` has no method `smaple`: .*no attribute 'smaple'"),
        ("decoder.smaple", AttributeError, r"`Autoencoder` has no method `decoder.smaple`"),
        ("width", TypeError, r"`Autoencoder.width` is no method, but a int"),
        ("decoder.linear.weight", TypeError, r"is no method, but a Parameter"),
        ("", TypeError, r"expected the name of a method, got ''"),
        (Autoencoder.sample, TypeError, r"expected the name of a method, got <function"),
    ],
    ids=["misspelt", "misspelt below", "a number", "a tensor", "empty", "a function"],
)
def test_what_is_no_method_is_refused(name: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        model()[0].method(name)


# -- functions ---------------------------------------------------------------------------------------------------------

X = torch.linspace(0.1, 0.9, 12).view(3, 4)
DRAWN: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda x: x + torch.rand(3, 4),
    "randn": lambda x: x + torch.randn_like(x),
    "randint": lambda x: torch.randint(0, 1000, (3, 4)) + x,
    "randperm": lambda x: torch.randperm(12),
    "normal": lambda x: torch.normal(x, 2.0),
    "bernoulli": lambda x: torch.bernoulli(x.expand(9, 3, 4)),
    "in place": lambda x: x.clone().uniform_(-1, 1) + x.clone().normal_(),
    "multinomial": lambda x: torch.multinomial(x.expand(9, 3, 4).reshape(-1, 4), 1),
    "dropout": lambda x: F.dropout(x.expand(9, 3, 4), 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x.expand(9, 3, 4), 0.5, training=True),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(torch.empty_like(x), std=0.5) + x,
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "distributions": lambda x: torch.distributions.Gamma(x, x).rsample(),
    "poisson": torch.poisson,
    "dirichlet": lambda x: torch.distributions.Dirichlet(x).rsample(),
    "mixture": lambda x: torch.distributions.Categorical(logits=x.expand(9, 3, 4)).sample(),
    "two": lambda x: (torch.rand(3), torch.rand(3)),
}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_a_keyed_function_is_a_function_of_its_key(name: str, lowering: Any) -> None:
    if lowering == "inductor" and name not in share(("dropout", "rand", "in place"), 3):
        pytest.skip("compiling takes long")
    fn = fcg.random.keyed(DRAWN[name])
    before = torch.get_rng_state()
    one, other = fn(KEY, X), fn(KEY, X)
    assert_trees_all_equal(one, other)
    step = fcg.graph_fn(lambda key, x: fn(key, x), lowering=lowering)
    seen = []
    for call in range(16):
        key, x = fcg.random.key(call), X.roll(call, 0)
        expected, got = fn(key, x), step(key, x)
        for a, b in zip(fcg.tree.leaves(got), fcg.tree.leaves(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        seen.append(str(fcg.tree.leaves(got)))
    assert len(set(seen)) == 16
    assert torch.equal(before, torch.get_rng_state())
    if name == "two":
        assert not torch.equal(one[0], one[1])


def test_a_keyed_function_takes_all_arguments_and_keeps_its_name() -> None:
    def noisy(x: Tensor, /, scale: float, *, shift: float = 0.0) -> Tensor:
        """Add noise."""
        return x + scale * torch.randn(2000) + shift

    fn = fcg.random.keyed(noisy)
    assert (fn.__name__, fn.__doc__, fn.__module__) == ("noisy", "Add noise.", __name__)
    out = fn(KEY, torch.zeros(2000), 0.5, shift=3.0)
    assert abs(float(out.mean()) - 3) < 0.05
    assert abs(float(out.std()) - 0.5) < 0.05


def test_gradients_go_through_a_keyed_function_and_remat_draws_the_same_again() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (F.dropout(x * w, 0.5) * torch.randn(3, 4)).tanh().square().sum()

    fn = fcg.random.keyed(loss)
    mask_of = fcg.random.keyed(lambda x: (F.dropout(x, 0.5), torch.randn(3, 4)))(KEY, torch.ones(3, 4))
    w = torch.full((4,), 0.7)
    expected = fcg.grad(lambda w: (X * w * mask_of[0] * mask_of[1]).tanh().square().sum())(w)
    torch.testing.assert_close(fcg.grad(lambda w: fn(KEY, w, X))(w), expected)
    torch.testing.assert_close(fcg.grad(lambda w: fcg.remat(fn)(KEY, w, X))(w), expected)


@pytest.mark.parametrize(
    "act",
    [lambda x: checkpoint(F.dropout, x, 0.5, use_reentrant=False), fcg.remat(lambda x: F.dropout(x, 0.5))],
    ids=["checkpoint", "remat"],
)
def test_draws_that_would_run_again_without_the_key_are_refused(act: Callable[[Tensor], Tensor]) -> None:
    fn = fcg.random.keyed(act)
    with pytest.raises(
        fcg.CaptureError, match=r"under `torch.utils.checkpoint`(.|\n)*test_methods(.|\n)*fcg.remat"
    ):
        fn(KEY, X.clone().requires_grad_())


@pytest.mark.parametrize(
    ("act", "error", "match"),
    [
        (lambda: fcg.random.keyed(nn.Dropout()), TypeError, "got Dropout.\nTo fix: of a module"),
        (lambda: fcg.random.keyed(3), TypeError, "expected a function, got int"),  # type: ignore[arg-type]
        (lambda: fcg.random.keyed(torch.rand)(3), (TypeError, ValueError), "key"),  # type: ignore[arg-type]
        (
            lambda: fcg.random.keyed(lambda: torch.rand(3, generator=torch.Generator()))(KEY),
            fcg.ImplicitRandomnessError,
            "in a way that a key cannot replace",
        ),
        (
            lambda: fcg.random.keyed(
                lambda: nn.init.trunc_normal_(torch.empty(3), generator=torch.Generator())
            )(KEY),
            fcg.ImplicitRandomnessError,
            "in a way that a key cannot replace",
        ),
        (
            lambda: fcg.random.keyed(lambda: nn.init.trunc_normal_(torch.empty(3), a=2.0, b=-2.0))(KEY),
            fcg.ImplicitRandomnessError,
            r"nn\.init\.trunc_normal_|expected low < high",  # torch 2.11 draws it from `uniform_`
        ),
        (
            lambda: fcg.random.keyed(lambda: torch.randn(3, dtype=torch.complex64))(KEY),
            fcg.ImplicitRandomnessError,
            "complex numbers are `torch.complex` of two real draws",
        ),
    ],
    ids=[
        "a module",
        "no function",
        "no key",
        "a generator",
        "truncated, by one",
        "no bounds",
        "complex numbers",
    ],
)
def test_what_cannot_be_keyed_is_refused(act: Callable[[], Any], error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        act()


def test_a_module_that_is_to_be_compiled_runs_its_forward() -> None:
    """``module.compile()`` says how to run it, not what it computes; a step has a compiler of its own."""
    module = Autoencoder().eval()
    module.encoder.compile()
    apply, params, buffers = fcg.from_module(module)
    module.compile()
    step = fcg.graph_fn(lambda params, buffers, x: apply(params, buffers, x, train=False)[0])
    x = torch.randn(5, 6)
    assert torch.equal(step(params, buffers, x), Autoencoder.forward(copy.deepcopy(module), x))
