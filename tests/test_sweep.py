"""Sweeps: each member computes what it computes alone.

The judge is the step of one model, captured on its own: on the same data, for each member, at each call. Numbers are of
double precision, in which sums in another order differ by some 1e-16 of their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import functional_cg as fcg
from functional_cg import optim
from functional_cg.tensors.aten import only_batching_rules

MEMBERS, CALLS = 3, 6


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def cnn() -> nn.Module:
    convolved = (
        nn.Conv2d(1, 3, 3, bias=False),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.MaxPool2d(2),
    )
    return nn.Sequential(*convolved, nn.Flatten(), nn.Linear(12, 5))


class Residual(nn.Module):
    """A block with a stride and a way around it, and a convolution by one element."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.skip, self.second = nn.Conv2d(2, 3, 1, stride=2, bias=False), nn.Conv2d(3, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.second((self.first(x) + self.skip(x)).relu()).mean((2, 3))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """A block of a GPT, with dropout and an embedding that is also its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 8), nn.LayerNorm(8)
        self.qkv, self.out, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(0.1)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.drop(self.out(y.transpose(1, 2).flatten(2))))  # type: ignore[no-any-return]


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def numbers(call: int) -> Any:
    return torch.randn(8, 4, generator=seeded(call)), torch.randn(8, 1, generator=seeded(call + 100))


def images(call: int) -> Any:
    return torch.randn(6, 1, 6, 6, generator=seeded(call)), torch.arange(6) % 5


def tokens(call: int) -> Any:
    return torch.randint(0, 7, (3, 6), generator=seeded(call))


def create(make: Callable[[], nn.Module], optimizer: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    _, params, buffers = fcg.from_module(make())
    return fcg.TrainState.create(
        params=params, buffers=buffers, optimizer=optimizer, key=fcg.random.key(seed)
    )


def regression(apply: Any) -> Callable[[Any, Any], Any]:
    def train_step(state: Any, batch: Any) -> Any:
        x, y = batch
        loss, grads = fcg.value_and_grad(lambda params: F.mse_loss(apply(params, {}, x)[0], y))(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    return train_step


def classification(apply: Any) -> Callable[[Any, Any], Any]:
    def train_step(state: Any, batch: Any) -> Any:
        x, y = batch
        key = fcg.random.fold_in(state.key, state.step)

        def loss_fn(params: Any) -> Any:
            out, buffers = apply(params, state.buffers, x, key=key)
            return F.cross_entropy(out, y), buffers

        (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads).replace(buffers=buffers), {"loss": loss, "kind": "mean"}

    return train_step


def language(apply: Any) -> Callable[[Any, Any], Any]:
    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            key = fcg.random.fold_in(state.key, state.step)
            out, _ = apply(params, state.buffers, batch[:, :-1], key=key)
            return F.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten())

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    return train_step


def in_microbatches(apply: Any) -> Callable[[Any, Any], Any]:
    def train_step(state: Any, batch: Any) -> Any:
        loss_fn = lambda params, part: F.mse_loss(apply(params, {}, part[0])[0], part[1])  # noqa: E731
        loss, grads = fcg.microbatches(2)(fcg.value_and_grad(loss_fn))(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    return train_step


def gated(apply: Any) -> Callable[[Any, Any], Any]:
    def train_step(state: Any, batch: Any) -> Any:
        x, y = batch
        loss, grads = fcg.value_and_grad(lambda params: F.mse_loss(apply(params, {}, x)[0], y))(state.params)
        halved = fcg.tree.map(lambda grad: grad / 2, grads)
        return state.apply_gradients(fcg.cond(loss > 1, lambda: grads, lambda: halved)), {"loss": loss}

    return train_step


def scanned(apply: Any) -> Callable[[Any, Any], Any]:
    def train_step(state: Any, batch: Any) -> Any:
        return fcg.scan(regression(apply), state, fcg.tree.map(lambda one: one.unflatten(0, (2, 4)), batch))

    return train_step


def in_place(apply: Any) -> Callable[[Any, Any], Any]:
    def train_step(state: Any, batch: Any) -> Any:
        state, metrics = regression(apply)(state, batch)
        sums, row = torch.zeros(3), torch.ones(4)
        sums[0] = metrics["loss"]
        sums[1:].add_(state.params["0.bias"][:2])
        row.t().mul_(metrics["loss"]).index_put_((torch.tensor([1]),), metrics["loss"][None] * 2)
        turned = state.params["0.weight"].t().as_strided((2, 3), (1, 4), 1)
        # In the convolution of all members, the channels of one lie between those of others.
        weight = state.params["0.weight"][:2, None, :3]
        hidden = F.conv1d(batch[0][:, None], weight).as_strided((2, 3), (4, 1), 1)
        return state, {
            **metrics,
            "sums": sums * 2,
            "row": row,
            "turned": turned,
            "hidden": hidden,
            "same": torch.tensor([1.0, 2.0]),
        }

    return train_step


def tapped(apply: Any) -> Callable[[Any, Any], Any]:
    def train_step(state: Any, batch: Any) -> Any:
        state, metrics = regression(apply)(state, batch)
        fcg.tap("loss", metrics["loss"])
        return state, metrics

    return train_step


CLIPPED = optim.chain(
    optim.clip_by_global_norm(1.0), optim.adamw(optim.warmup_cosine(1e-2, 3, 50), weight_decay=0.01)
)
RATES = optim.inject_hyperparams(optim.adamw)(learning_rate=1e-2, weight_decay=0.01)
PROGRAMS: dict[str, tuple[Any, Any, Any, Any]] = {
    "mlp": (mlp, CLIPPED, regression, numbers),
    "cnn": (cnn, CLIPPED, classification, images),
    "residual": (Residual, CLIPPED, classification, images),
    "attention": (Attention, optim.sgd(0.1, momentum=0.9), language, tokens),
    "microbatches": (mlp, CLIPPED, in_microbatches, numbers),
    "cond": (mlp, CLIPPED, gated, numbers),
    "scan": (mlp, CLIPPED, scanned, numbers),
    "in place": (mlp, CLIPPED, in_place, numbers),
    "tap": (mlp, CLIPPED, tapped, numbers),
    "rates": (mlp, RATES, regression, numbers),
}
OPTIMIZERS: dict[str, Any] = {
    "adabelief": optim.adabelief(1e-2),
    "adadelta": optim.adadelta(0.1),
    "adafactor": optim.adafactor(1e-2),
    "adagrad": optim.adagrad(0.1),
    "adam": optim.adam(1e-2),
    "adamax": optim.adamax(1e-2),
    "amsgrad": optim.amsgrad(1e-2),
    "from_torch": optim.from_torch(torch.optim.Rprop, lr=1e-2),
    "lamb": optim.lamb(1e-2, weight_decay=0.01),
    "lion": optim.lion(1e-3, weight_decay=0.01),
    "muon": optim.muon(1e-2, weight_decay=0.01, ns_dtype=torch.float64),
    "nadam": optim.nadam(1e-2),
    "nesterov": optim.sgd(0.1, momentum=0.9, nesterov=True),
    "radam": optim.radam(1e-2),
    "rmsprop": optim.rmsprop(1e-2),
    "sgd": optim.sgd(0.1),
    "yogi": optim.yogi(1e-2),
}


def alike(whole: Any, members: list[Any]) -> None:
    """Each member of a tree equals its own tree."""
    for number, alone in enumerate(members):
        pairs = zip(fcg.tree.leaves(alone), fcg.tree.leaves(whole), strict=True)
        for one, of_all in pairs:
            if isinstance(one, Tensor):
                torch.testing.assert_close(of_all[number], one, rtol=1e-9, atol=1e-12)
            else:
                assert of_all == one


def agrees(make: Any, optimizer: Any, step_of: Any, batch_of: Any, lowering: Any = "aten") -> None:
    """Train members together and alone."""
    train_step = step_of(fcg.from_module(make())[0])
    alone = [create(make, optimizer, seed) for seed in range(MEMBERS)]
    if optimizer is RATES:
        alone = [optim.set_hyperparams(one, learning_rate=1e-2 / (1 + n)) for n, one in enumerate(alone)]
    state = fcg.tree.stack(alone)
    single, many = (fcg.graph_step(one, lowering=lowering) for one in (train_step, fcg.sweep(train_step)))
    for call in range(CALLS):
        batch, metrics = batch_of(call), [None] * MEMBERS
        state, of_all = many(state, batch)
        for number in range(MEMBERS):
            alone[number], metrics[number] = single(alone[number], batch)
        alike(of_all, metrics)
    alike(fcg.snapshot(state), list(map(fcg.snapshot, alone)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_member_computes_what_it_computes_alone(name: str) -> None:
    agrees(*PROGRAMS[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_of_each_optimizer_too(name: str) -> None:
    agrees(mlp, OPTIMIZERS[name], regression, numbers)


@pytest.mark.parametrize("name", [pytest.param("mlp", marks=pytest.mark.kernels), "cnn", "attention"])
def test_compiled_too(name: str) -> None:
    agrees(*PROGRAMS[name], lowering="inductor")


def test_convolutions_compiled_as_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functional_cg.stages.passes.convolutions._on_gpu", lambda x: True)
    agrees(*PROGRAMS["residual"], lowering="inductor")


def train_step(state: Any, x: Tensor) -> Any:
    return {"w": state["w"] * x.sum(), "n": state["n"] + 1}, {"mean": state["w"].mean(), "kind": "plain"}


def members() -> Any:
    return fcg.tree.stack([{"w": torch.full((2,), 1.0 + n), "n": torch.tensor(0)} for n in range(4)])


def test_members_that_are_not_active_keep_their_state() -> None:
    step = fcg.graph_step(fcg.sweep(train_step))
    state = members()
    for active in ([1, 0, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]):
        state, _ = step(state, torch.ones(3), active=torch.tensor(active).bool())
    assert fcg.snapshot(state)["n"].tolist() == [2, 1, 3, 2]
    assert fcg.snapshot(state)["w"][:, 0].tolist() == [9.0, 6.0, 81.0, 36.0]


def test_each_member_may_have_a_batch_of_its_own() -> None:
    step = fcg.graph_step(fcg.sweep(train_step, each="x"))
    state, metrics = step(members(), torch.arange(12.0).view(4, 3))
    assert fcg.snapshot(state)["w"][:, 0].tolist() == [3.0, 24.0, 63.0, 120.0]
    assert metrics["kind"] == "plain"


def test_members_are_taken_and_copied_over_others() -> None:
    step = fcg.graph_step(fcg.sweep(train_step))
    state, metrics = step(members(), torch.ones(3))
    best = fcg.tree.take(state, int(metrics["mean"].argmax()))
    assert best["w"].tolist() == [12.0, 12.0]
    assert fcg.tree.take(state, -1)["n"].shape == ()
    state, _ = step(fcg.tree.take(state, torch.tensor([3, 3, 2, 3])), torch.ones(3))
    assert fcg.snapshot(state)["w"][:, 0].tolist() == [36.0, 36.0, 27.0, 36.0]
    kept = fcg.tree.take(state, metrics["mean"] > 2)  # also without those that diverged
    assert fcg.tree.take(state, (metrics["mean"] > 2).tolist())["w"].tolist() == kept["w"].tolist()
    assert len(kept["w"]) == int((metrics["mean"] > 2).sum()) < 4


def test_a_number_is_set_for_all_members_or_for_each() -> None:
    state = fcg.tree.stack([create(mlp, RATES, seed) for seed in range(2)])
    numbers = torch.tensor([0.1, 0.01])
    for placed in (state, fcg.place(state)):
        one_each = optim.set_hyperparams(placed, learning_rate=numbers)
        assert one_each.opt_state.hyperparams["learning_rate"].tolist() == numbers.tolist()
        both = optim.set_hyperparams(one_each, learning_rate=0.5, weight_decay=torch.tensor(0.25))
        assert both.opt_state.hyperparams["learning_rate"].tolist() == [0.5, 0.5]
        assert both.opt_state.hyperparams["weight_decay"].tolist() == [0.25, 0.25]
        with pytest.raises(ValueError, match=r"learning_rate is \[2\] in the state, and got \[3\]"):
            optim.set_hyperparams(both, learning_rate=torch.ones(3))


def test_eagerly_one_member_runs_after_another() -> None:
    step = fcg.graph_step(fcg.sweep(train_step))
    state, metrics = step.eager(members(), torch.ones(3))
    assert fcg.snapshot(state)["w"][:, 0].tolist() == [3.0, 6.0, 9.0, 12.0]
    assert metrics["mean"].tolist() == [1.0, 2.0, 3.0, 4.0]


MASKS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "shared by rows": (lambda bias, given: given[:, :1], True),
    "shared": (lambda bias, given: given[0, 0], True),
    "of each member, by rows": (lambda bias, given: bias + given, True),
    "of each member": (lambda bias, given: bias, False),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_attention_takes_the_rows_of_all_members_at_once(name: str, rows: int) -> None:
    mask_of, at_once = MASKS[name]

    def attend(state: Any, batch: Any) -> Any:
        x, given = batch

        def loss_fn(params: Any) -> Tensor:
            q, k, v = (x @ params["w"]).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
            mask = mask_of(params["bias"], given).detach()
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().mean()

        loss, grads = fcg.value_and_grad(loss_fn)(state)
        return fcg.tree.map(lambda one, grad: one - 0.1 * grad, state, grads), loss

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=seeded(len(shape)))

    given = draw(rows, 5, 6), draw(rows, 3, 5, 5)
    alone = [{"w": draw(6, 36) * n, "bias": draw(5, 5) * n} for n in (1, 2)]
    many, single = (fcg.graph_step(one, lowering="aten") for one in (fcg.sweep(attend), attend))
    state, loss = many(fcg.tree.stack(alone), given)
    results = [single(one, given) for one in alone]
    alike((fcg.snapshot(state), loss), [(fcg.snapshot(one), value) for one, value in results])
    # What has no batching rule is made for each member, and named.
    assert ("2 members: one call for all, but for" in many.explain()) is not at_once


@pytest.mark.cuda
def test_a_norm_in_half_precision_takes_all_members_at_once() -> None:
    """There are statistics in f32; torch's batching rules compute all that depends on them in f32."""

    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            half = {name: value.bfloat16() for name, value in params.items()}
            return F.layer_norm(x.bfloat16() * half["x"], (8,), half["w"], half["b"]).float().square().mean()

        loss, grads = fcg.value_and_grad(loss_fn)(state)
        return fcg.tree.map(lambda one, grad: one - 0.1 * grad, state, grads), loss

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=seeded(len(shape))).cuda()

    alone = [{"x": draw(8) * n, "w": draw(8) + n, "b": draw(8)} for n in (1, 2, 3)]
    many, single = (fcg.graph_step(one, lowering="aten") for one in (fcg.sweep(train_step), train_step))
    state, loss = many(fcg.tree.stack(alone), draw(4, 8))
    results = [single(one, draw(4, 8)) for one in alone]
    for found, (_, value) in zip(loss, results, strict=True):
        torch.testing.assert_close(found, value, rtol=2e-2, atol=0)
    for number, (one, _) in enumerate(results):
        torch.testing.assert_close(
            fcg.tree.take(fcg.snapshot(state), number), fcg.snapshot(one), rtol=2e-2, atol=2e-2
        )
    assert "one call for all, but for" not in many.explain()


def one_in_place_of_all() -> None:
    step = fcg.graph_step(fcg.sweep(train_step))
    state, _ = step(members(), torch.ones(3))
    step(fcg.tree.take(state, 0), torch.ones(3))


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a state of one": (
        lambda: fcg.graph_step(fcg.sweep(train_step))({"w": torch.ones(2), "n": torch.tensor(0)}, torch.ones(3)),
        fcg.LayoutError,
        r"state\['n'\]  expected a tensor \[n, ...\]   got i64\[\]",
    ),
    "members of other shapes": (
        lambda: fcg.tree.stack([{"w": torch.ones(2)}, {"w": torch.ones(3)}]),
        fcg.LayoutError,
        r"tree 1  torch.float64 \[3\]",
    ),
    "members with other optimizers": (
        lambda: fcg.tree.stack([create(mlp, optim.sgd(0.1), 0), create(mlp, optim.sgd(0.2), 1)]),
        fcg.LayoutError,
        r"(?s)tree.stack: .*expected static fields.*set_hyperparams\(state, learning_rate=torch.tensor",
    ),
    "a mask of other members": (
        lambda: fcg.graph_step(fcg.sweep(train_step))(members(), torch.ones(3), active=torch.ones(3).bool()),
        fcg.LayoutError,
        r"active  expected bool\[4\]   got bool\[3\]",
    ),
    "one that says nothing": (
        lambda: fcg.graph_step(fcg.sweep(train_step))(members(), torch.ones(3), active=torch.ones(4)),
        fcg.LayoutError,
        r"active  expected bool\[4\]   got f64\[4\]",
    ),
    "a member in place of all": (
        lambda: one_in_place_of_all(), fcg.LayoutError, r"a state of one member: stack those of all",
    ),
    "fractions of members": (
        lambda: fcg.tree.take(members(), torch.tensor([1.5])),
        TypeError,
        r"(?s)bool\[n\], got torch.float64 \[1\].*To fix",
    ),
    "true": (lambda: fcg.tree.take(members(), True), TypeError, r"got torch.bool \[\]"),
    "a member too many": (lambda: fcg.tree.take(members(), [0, 4]), IndexError, r"there are 4 members, got \[0, 4\]"),
    "a mask of fewer": (lambda: fcg.tree.take(members(), [True]), IndexError, r"there are 4 members, got bool\[1\]"),
    "a member of one": (lambda: fcg.tree.take({"n": torch.tensor(1)}, 0), IndexError, "a leaf has no dimensions"),
    "no members": (lambda: fcg.tree.stack([]), ValueError, "there is no tree"),
    "a batch without the axis": (
        lambda: fcg.graph_step(fcg.sweep(train_step, each="x"))(members(), torch.ones(3)),
        fcg.LayoutError,
        r"x  expected a tensor \[4, ...\]   got f64\[3\]",
    ),
    "a write into what all share": (
        lambda: fcg.graph_step(fcg.sweep(lambda state, x: (state, {"x": x.add_(state["w"].sum())})))(
            members(), torch.ones(3)
        ),
        fcg.CaptureError,
        r"`x.clone\(\)`; or name the argument in `each`",
    ),
    "no such argument": (lambda: fcg.sweep(train_step, each="batch"), TypeError, "it has state, x"),
    "an argument of ours": (
        lambda: fcg.sweep(lambda state, active: (state, {})), TypeError, "give it another name",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    act, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message):
        act()


def test_torch_tells_which_calls_have_a_batching_rule() -> None:
    with only_batching_rules(), pytest.raises(RuntimeError, match=r"[Bb]atching rule not implemented"):
        torch.func.vmap(lambda x: torch._foreach_norm([x])[0])(torch.ones(2, 2))
