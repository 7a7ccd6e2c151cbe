"""State left on a module by its forward, changes to a copied module, and new buffers that are dropped."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.errors import BakedValueError, ForeignTensorError, LayoutError, SideEffectError
from tests.shares import share

pytestmark = pytest.mark.usefixtures("scalar_loops")


class Plain:
    def __init__(self) -> None:
        self.n = 0
        self.deep = [[0]]


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Pickled:
    """Holds numbers and names that ``__reduce__`` alone tells, as a container written in C does."""

    __slots__ = ("__weakref__",)
    held: ClassVar[weakref.WeakKeyDictionary[Any, tuple[list[int], dict[str, int]]]] = (
        weakref.WeakKeyDictionary()
    )

    @property
    def numbers(self) -> list[int]:
        return self.held.setdefault(self, ([], {}))[0]

    @property
    def named(self) -> dict[str, int]:
        return self.held.setdefault(self, ([], {}))[1]

    def append(self, number: int) -> None:
        self.numbers.append(number)

    def __setitem__(self, name: str, number: int) -> None:
        self.named[name] = number

    def __reduce__(self) -> Any:
        return Pickled, (), None, iter(self.numbers), iter(self.named.items())


class OfThisThread(threading.local):
    n = 0

    def __deepcopy__(self, memo: Any) -> OfThisThread:
        return OfThisThread()


class Cached:
    @functools.cached_property
    def number(self) -> int:
        return 3


def add(value: Any, key: Any) -> None:
    value[key] += 1


def count(value: Any) -> None:
    value.n += 1


# What the module holds, what its forward does with it, and how the message calls it.
LEFT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "deque": (lambda: collections.deque([0]), lambda held: held.append(1), "held"),
    "dict in dict": (lambda: {"a": {"n": 0}}, lambda held: add(held["a"], "n"), "held['a']"),
    "list in list": (lambda: [[0]], lambda held: held[0].append(1), "held[0]"),
    "list in tuple": (lambda: ([0],), lambda held: add(held[0], 0), "held[0]"),
    "array": (lambda: np.zeros(2), lambda held: add(held, 0), "held"),
    "array in list": (lambda: [np.zeros(2)], lambda held: held[0].fill(3), "held[0]"),
    "bytearray": (lambda: bytearray(2), lambda held: add(held, 0), "held"),
    "counter": (collections.Counter, lambda held: add(held, "x"), "held"),
    "defaultdict": (lambda: collections.defaultdict(list), lambda held: held["x"], "held"),
    "set": (lambda: {1}, lambda held: held.add(2), "held"),
    "object": (Plain, count, "held.n"),
    "list of an object": (Plain, lambda held: add(held.deep[0], 0), "held.deep[0]"),
    "object in list": (lambda: [Plain()], lambda held: count(held[0]), "held[0].n"),
    "slots": (Slotted, count, "held.n"),
    "iterator": (lambda: iter(range(9)), next, "held"),
    "count": (itertools.count, next, "held"),
    "what it says to pickle": (Pickled, lambda held: held.numbers.append(1), "held"),
    "what it says to pickle, of keys": (Pickled, lambda held: held.named.update(a=1), "held"),
    "generator of numpy": (lambda: np.random.default_rng(0), lambda held: held.random(), "held"),
    "generator of Python": (lambda: random.Random(0), lambda held: held.random(), "held"),
    "of this thread": (OfThisThread, count, "held.n"),
    "partial": (lambda: functools.partial(max, [0]), lambda held: held.args[0].append(1), "held[0]"),
    "sign of zero": (lambda: [0.0], lambda held: held.__setitem__(0, -0.0), "held"),
    "type of a number": (lambda: [1], lambda held: held.__setitem__(0, True), "held"),
}


class Leaves(nn.Module):
    def __init__(self, held: Any, act: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.held, self.act = nn.Linear(2, 2), held, act

    def forward(self, x: Tensor) -> Tensor:
        self.act(self.held)
        return self.linear(x)


@pytest.mark.parametrize("kind", LEFT)
@pytest.mark.parametrize("nested", [False, True])
def test_what_a_forward_changes_in_place_is_refused_by_name(kind: str, nested: bool) -> None:
    make, act, name = LEFT[kind]
    module: nn.Module = Leaves(make(), act)
    module = nn.Sequential(nn.ReLU(), module) if nested else module
    apply, params, buffers = fcg.from_module(module)
    where = f"1.{name}" if nested else name
    with pytest.raises(SideEffectError, match="its forward changes 1 attribute") as caught:
        apply(params, buffers, torch.ones(1, 2))
    assert f"  `{where}`\n" in str(caught.value)


@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support:DeprecationWarning")
@pytest.mark.parametrize("kind", LEFT)
def test_what_a_forward_reads_is_none_of_it(kind: str) -> None:
    module = Leaves(LEFT[kind][0](), lambda held: copy.deepcopy(held))
    apply, params, buffers = fcg.from_module(module)
    out, _ = apply(params, buffers, torch.ones(1, 2))
    assert torch.equal(out, module(torch.ones(1, 2)))


def test_what_a_cached_property_leaves_is_computed_again() -> None:
    apply, params, buffers = fcg.from_module(Leaves(Cached(), lambda held: held.number))
    apply(params, buffers, torch.ones(1, 2))


def test_a_counter_in_a_class_is_refused() -> None:
    class Counted(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x)

    apply, params, buffers = fcg.from_module(Counted(2, 2))
    with pytest.raises(SideEffectError, match=r"`Counted\.calls`"):
        apply(params, buffers, torch.ones(1, 2))


class Settles(nn.Module):
    """Chooses a layer by the first input, as models do that attend to short sequences in full."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.layer = "sparse", nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "sparse" and len(x) < 9:
            self.kind = "full"
        return torch.relu(self.layer(x)) if self.kind == "sparse" else self.layer(x)


def test_what_only_the_first_forward_changes_is_changed_before() -> None:
    model, x = Settles(), torch.ones(4, 3)
    apply, params, buffers = fcg.from_module(model)
    with pytest.raises(SideEffectError, match=r"run that before `from_module`, `model\(x\)`\.") as caught:
        apply(params, buffers, x)
    assert "`kind`" in str(caught.value)
    model(x)
    apply, params, buffers = fcg.from_module(model)
    torch.testing.assert_close(fcg.graph_fn(lambda p, x: apply(p, buffers, x)[0])(params, x), model(x))


def test_a_module_that_holds_itself_is_gone_through_once() -> None:
    module = Leaves({}, lambda held: held["self"].append(1))
    module.held["self"] = [module.held]
    apply, params, buffers = fcg.from_module(module)
    with pytest.raises(SideEffectError, match=r"`held\['self'\]`"):
        apply(params, buffers, torch.ones(1, 2))


# --- a module that is changed after it was copied ------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.drop = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.0)
        self.scale, self.cfg, self.table = 2.0, Plain(), {"a": {"b": 1}}

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.bn(self.fc(x))) * self.scale


class Other(Net):
    pass


CHANGES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "freeze": (lambda net: net.fc.requires_grad_(False), "fc.weight.requires_grad"),
    "forward hook": (lambda net: net.fc.register_forward_hook(lambda *_: None), "fc._forward_hooks"),
    "hook before": (lambda net: net.register_forward_pre_hook(lambda *_: None), "_forward_pre_hooks"),
    "hook of the backward": (lambda net: net.fc.register_full_backward_hook(lambda *_: None), "fc._"),
    "hook of a weight": (
        lambda net: net.fc.weight.register_hook(lambda grad: 3 * grad),
        "fc.weight._backward_hooks",
    ),
    "no bias": (lambda net: setattr(net.fc, "bias", None), "fc.bias"),
    "tie": (lambda net: setattr(net.bn, "bias", net.fc.bias), "bn.bias is"),
    "class": (lambda net: setattr(net.drop, "__class__", nn.AlphaDropout), "drop.__class__"),
    "class of itself": (lambda net: setattr(net, "__class__", Other), "__class__"),
    "attribute": (lambda net: setattr(net, "scale", 3.0), "scale"),
    "attribute of a layer": (lambda net: setattr(net.drop, "p", 0.5), "drop.p"),
    "a type": (lambda net: setattr(net.bn, "eps", True), "bn.eps"),
    "new attribute": (lambda net: setattr(net, "more", 1), "more"),
    "gone": (lambda net: delattr(net, "scale"), "scale"),
    "config": (lambda net: setattr(net.cfg, "n", 3), "cfg.n"),
    "list of a config": (lambda net: net.cfg.deep[0].append(3), "cfg.deep[0]"),
    "dict in dict": (lambda net: net.table["a"].update(b=2), "table['a']"),
    "layer": (lambda net: setattr(net, "fc", nn.Linear(2, 2)), "fc"),
    "another layer": (lambda net: net.add_module("more", nn.ReLU()), "more"),
    "forward": (lambda net: setattr(net, "forward", lambda x: x), "forward"),
}
HARMLESS: dict[str, Callable[[Net], Any]] = {
    "mode": lambda net: net.eval(),
    "values": lambda net: net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()}),
    "tensors": lambda net: net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()}, assign=True),
    "a run": lambda net: net(torch.randn(3, 2)).sum().backward(),
    "dtype": lambda net: net.double(),
}


def applied(net: nn.Module) -> tuple[Any, Any, Any]:
    apply, params, buffers = fcg.from_module(net)

    @fcg.graph_step
    def step(state: Any, x: Tensor) -> Any:
        out, new = apply(state["params"], state["buffers"], x)
        return {"params": state["params"], "buffers": new}, out

    state, _ = step(fcg.place({"params": params, "buffers": buffers}), torch.randn(3, 2))
    return apply, step, state


@pytest.mark.parametrize("give", [torch.compile, torch.jit.script], ids=["torch.compile", "torch.jit.script"])
def test_a_mark_that_a_compiler_puts_on_the_module_is_no_change(give: Callable[[nn.Module], Any]) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    apply, params, buffers = fcg.from_module(net)
    step = fcg.graph_fn(lambda s, x: apply(s, buffers, x)[0])
    state, x = fcg.place(params), torch.randn(3, 2)
    expected = step(state, x)
    given = give(net)
    assert torch.equal(step(state, x), expected)
    net.extra = 1
    with pytest.raises(BakedValueError, match="Sequential was changed after"):
        step(state, x)
    del given


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_changed_after_it_was_copied_is_noticed_at_the_next_call(change: str) -> None:
    net = Net()
    _, step, state = applied(net)
    act, name = CHANGES[change]
    act(net)
    with pytest.raises(BakedValueError, match="Net was changed after `from_module` copied it") as caught:
        step(state, torch.randn(3, 2))
    assert f"`{name}" in str(caught.value)
    with pytest.raises(BakedValueError, match="Net was changed"):
        step.eager(state, torch.randn(3, 2))
    state.latest()


def test_a_hook_on_all_modules_is_noticed_at_the_next_call() -> None:
    _, step, state = applied(net := Net())
    hook = nn.modules.module.register_module_forward_hook(lambda module, given, out: out)
    try:
        with pytest.raises(BakedValueError, match="`hooks of all modules`"):
            step(state, torch.randn(3, 2))
    finally:
        hook.remove()
    step(state, torch.randn(3, 2))
    del net


@pytest.mark.parametrize("act", HARMLESS)
def test_modes_and_values_of_the_original_are_no_changes(act: str) -> None:
    net = Net()
    _, step, state = applied(net)
    for _ in range(2):
        HARMLESS[act](net)
        state, _ = step(state, torch.randn(3, 2))
    assert step.stats.replays == 3


@pytest.mark.parametrize("at", [0, 57, 99])
def test_a_change_of_a_large_module_is_noticed_within_a_quarter_as_many_calls(at: int) -> None:
    net = nn.Sequential(*[nn.Dropout(0.0) for _ in range(98)], nn.Linear(2, 2))
    assert len(list(net.modules())) == 100
    apply, params, buffers = fcg.from_module(net)
    step, x = fcg.graph_fn(lambda params, x: apply(params, buffers, x)[0]), torch.randn(3, 2)
    state = fcg.place(params)
    out = step(state, x)
    part = list(net.modules())[at]
    part.more = 1
    calls = 0
    with pytest.raises(BakedValueError, match=r"`(\d+\.)?more`"):  # noqa: PT012
        while calls < 25:
            calls += 1
            assert torch.equal(step(state, x), out)
    for again in (step, step.eager):  # from then on at each call
        with pytest.raises(BakedValueError, match="Sequential was changed"):
            again(state, x)
    del part.more
    for _ in range(30):
        assert torch.equal(step(state, x), out)


def test_a_new_trace_compares_all_of_a_large_module() -> None:
    net = nn.Sequential(*[nn.Dropout(0.0) for _ in range(98)], nn.Linear(2, 2))
    apply, params, buffers = fcg.from_module(net)
    net[60].p = 0.5
    with pytest.raises(BakedValueError, match=r"`60\.p`"):
        fcg.graph_fn(lambda params, x: apply(params, buffers, x)[0])(fcg.place(params), torch.randn(3, 2))


def test_an_original_is_not_kept_alive() -> None:
    net = Net()
    part, _weight = weakref.ref(net.fc), weakref.ref(net.fc.weight)
    _, step, state = applied(net)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    assert part() is None
    step(state, torch.randn(3, 2))


def test_a_copy_of_a_function_has_no_original() -> None:
    net = Net()
    apply, _, state = applied(net)
    twin = copy.deepcopy(apply)
    net.scale = 4.0
    twin(state["params"], state["buffers"], torch.randn(3, 2))


# --- new buffers that are dropped ----------------------------------------------------------------------------


def batch_norm() -> Any:
    torch.manual_seed(0)
    apply, params, buffers = fcg.from_module(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=fcg.optim.sgd(0.1))
    return apply, buffers, state


def drop_from_state(apply: Any, buffers: Any) -> Any:
    def step(state: Any, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: apply(p, state.buffers, x)[0].mean())(state.params)
        return state.apply_gradients(grads), loss

    return fcg.graph_step(step)


def drop_from_constants(apply: Any, buffers: Any) -> Any:
    def step(state: Any, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: apply(p, buffers, x)[0].mean())(state.params)
        return state.apply_gradients(grads), loss

    return fcg.graph_step(step, constants=(buffers,))


def drop_from_input(apply: Any, buffers: Any) -> Any:
    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            return apply(
                params, {name: value + x.sum().to(value.dtype) for name, value in buffers.items()}, x
            )[0].mean()

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), loss

    return fcg.graph_step(step, constants=(buffers,))


def drop_under_func(apply: Any, buffers: Any) -> Any:
    def step(state: Any, x: Tensor) -> Any:
        grads = torch.func.grad(lambda p: apply(p, state.buffers, x)[0].mean())(dict(state.params))
        return state.apply_gradients(grads), {}

    return fcg.graph_step(step)


def keep_all(apply: Any, buffers: Any) -> Any:
    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            out, new = fcg.remat(apply)(params, state.buffers, x)
            out, new = apply(params, new, x)
            return out.mean(), new

        (loss, new), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, buffers=new), loss

    return fcg.graph_step(step)


def texts_of(recorded: pytest.WarningsRecorder) -> list[str]:
    return [str(one.message) for one in recorded]


@pytest.mark.parametrize("make", [drop_from_state, drop_from_constants, drop_from_input, drop_under_func])
def test_new_buffers_that_are_dropped_are_one_warning(make: Any, recwarn: pytest.WarningsRecorder) -> None:
    apply, buffers, state = batch_norm()
    step = make(apply, buffers)
    state, _ = step(state, torch.randn(4, 2))
    step(state, torch.randn(4, 2))
    (text,) = texts_of(recwarn)
    assert "the buffers of `1` (BatchNorm1d) in Sequential" in text
    assert "state.apply_gradients(grads, buffers=new_buffers)" in text
    assert (
        "If another call on the same input returns them, or this one is not to count, nothing is lost" in text
    )
    assert "other numbers" in text  # `train=False` is not the same step without the warning


def test_new_buffers_that_are_returned_are_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    apply, buffers, state = batch_norm()
    keep_all(apply, buffers)(state, torch.randn(4, 2))
    assert not len(recwarn)


@pytest.mark.parametrize("train", [True, False])
def test_training_mode_in_a_read_only_function_warns_once(
    train: bool, recwarn: pytest.WarningsRecorder
) -> None:
    apply, _, state = batch_norm()
    evaluate = fcg.graph_fn(lambda state, x: apply(state.params, state.buffers, x, train=train)[0])
    for _ in range(2):
        evaluate(state, torch.randn(4, 2))
    assert [("train=False" in text, "training mode" in text) for text in texts_of(recwarn)] == [
        (True, True)
    ] * train


@pytest.mark.parametrize("spelling", ["apply", "module", "attribute"])
def test_buffers_of_a_module_are_told_to_go_into_the_state(spelling: str) -> None:
    apply, buffers, state = batch_norm()
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def step(state: Any, x: Tensor) -> Any:
        if spelling == "apply":
            return state, apply(state.params, buffers, x)[0]
        return state, (module(x) if spelling == "module" else x - module[1].running_mean)

    with pytest.raises(ForeignTensorError, match="in the state") as caught:
        fcg.graph_step(step)(state, torch.randn(4, 2))
    assert "constants" not in str(caught.value)


def test_inference_mode_inside_of_a_forward() -> None:
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                scale = (x * 2).abs().mean().clone()
                scale = scale.to(torch.float64).to(x.device)
            return self.linear(x) / (1 + scale.clone().float())

    module, x = Halved(), torch.randn(3, 2)
    apply, params, buffers = fcg.from_module(module)
    evaluate = fcg.graph_fn(lambda state, x: apply(state, buffers, x, train=False)[0])
    expected = module(x)
    assert torch.equal(evaluate(fcg.place(params), x), expected)
    assert torch.equal(apply(params, buffers, x)[0], expected)


class Config:
    def __init__(self) -> None:
        self.kind: str | None = None
        self.width: int | None = None


class Remembering(nn.Module):
    """Works out once what its loss is, as the classifiers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.config = Config()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.drop(self.norm(self.linear(x)))
        if self.config.kind is None:
            self.config.kind = "classes" if labels.dtype == torch.int64 else "numbers"
            self.config.width = logits.shape[-1]
        if self.config.kind == "classes":
            return nn.functional.cross_entropy(logits, labels)
        return (logits - labels).square().mean()


@pytest.mark.parametrize("lowering", share(["aten", "inductor"], 2))
def test_what_a_forward_works_out_once_is_no_state(lowering: Any) -> None:
    module = Remembering()
    apply, params, buffers = fcg.from_module(module)

    def train_step(state: Any, x: Tensor, labels: Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            return apply(params, state.buffers, x, labels, key=fcg.random.fold_in(state.key, state.step))

        (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads).replace(buffers=buffers), {"loss": loss}

    state = fcg.TrainState.create(
        params=params, buffers=buffers, optimizer=fcg.optim.sgd(0.1), key=fcg.random.key(0)
    )
    step, placed = fcg.graph_step(train_step, lowering=lowering), fcg.place(state)
    for _ in range(16):
        x, labels = torch.randn(8, 2), torch.randint(0, 3, (8,))
        state, expected = train_step(state, x, labels)
        placed, metrics = step(placed, x, labels)
        torch.testing.assert_close(metrics, expected)
        torch.testing.assert_close(placed.buffers["norm.running_mean"], state.buffers["norm.running_mean"])
    assert step.stats.captures == 1
    assert int(placed.buffers["norm.num_batches_tracked"]) == 16
    assert module.config.kind is None


class Table(nn.Module):
    """Makes a table of positions at its first call, as rotary embeddings do."""

    def __init__(self, make: Callable[[Any, Tensor], Tensor], where: str) -> None:
        super().__init__()
        self.linear, self.make, self.table = nn.Linear(2, 2), make, None
        if where != "an attribute":
            del self.table
            self.register_buffer(
                "table", torch.zeros(0) if where == "an empty buffer" else None, persistent=False
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < len(x):
            self.table = self.make(self, x)
        return self.linear(x * self.table[: len(x), None])


def filled_through_views(module: Any, x: Tensor) -> Tensor:
    table = torch.zeros(2, 2)
    table[0] = torch.arange(2.0)
    table.T[1].copy_(table[0] + 1)
    return table.flatten()


TABLES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "positions": lambda module, x: torch.arange(float(len(x)), device=x.device),
    "angles": lambda module, x: torch.outer(torch.arange(4.0), torch.ones(2)).cos().flatten() / 3,
    "a literal": lambda module, x: torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "written in place": lambda module, x: torch.zeros(4).add_(3).sqrt_(),
    "filled through views": filled_through_views,
}
WHERE = ["an attribute", "a buffer", "an empty buffer"]


@pytest.mark.parametrize("where", WHERE[:2])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_constants_is_no_state(name: str, where: str) -> None:
    module = Table(TABLES[name], where)
    apply, params, buffers = fcg.from_module(module)
    plain = copy.deepcopy(module)
    forward, placed = fcg.graph_fn(lambda state, x: apply(*state, x)[0]), fcg.place((params, buffers))
    for _ in range(16):
        x = torch.randn(4, 2)
        assert torch.equal(forward(placed, x), plain(x))
        out, new_buffers = apply(params, buffers, x)
        assert torch.equal(out, plain(x))
        assert new_buffers.keys() == buffers.keys()
        assert all(torch.equal(new_buffers[name], value) for name, value in buffers.items())
    assert module.table is None


NO_TABLES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "of an input": lambda module, x: x[:, 0].abs(),
    "of a parameter": lambda module, x: module.linear.bias.sum() * torch.ones(len(x)),
    "drawn": lambda module, x: torch.rand(len(x)),
    "too short": lambda module, x: torch.ones(len(x) - 1),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", NO_TABLES)
def test_a_table_of_anything_else_is_refused(name: str, where: str) -> None:
    class Short(Table):
        def forward(self, x: Tensor) -> Tensor:
            if self.table is None or len(self.table) < len(x):
                self.table = self.make(self, x)
            y: Tensor = self.linear(x) * self.table.sum()
            return y

    make = Short if name == "too short" else Table
    apply, params, buffers = fcg.from_module(make(NO_TABLES[name], where))
    x, key = torch.randn(4, 2), fcg.random.key(0)
    if where == "an empty buffer":  # it is state, and of another shape at the next call
        step = fcg.graph_step(
            lambda state, x: ({**state, "b": apply(state["p"], state["b"], x, key=state["key"])[1]}, {})
        )
        with pytest.raises(LayoutError, match=r"unlike the old one(.|\n)*table"):
            step({"p": params, "b": buffers, "key": key}, x)
        return
    changes = "which buffers the module has" if where == "a buffer" else "1 attribute of the module"
    with pytest.raises(SideEffectError, match=rf"changes {changes}(.|\n)*`table`"):
        apply(params, buffers, x, key=key)


def other_calls(self: Any, x: Tensor) -> Tensor:
    first, self.kind = self.kind is None, "known"
    return self.linear(x) * (2 if first else 1)


def counts(self: Any, x: Tensor) -> Tensor:
    self.kind = 1 if self.kind is None else self.kind + 1
    return self.linear(x)


def forgets(self: Any, x: Tensor) -> Tensor:
    self.kind = "known" if self.kind is None else None
    return self.linear(x)


def asks_the_data(self: Any, x: Tensor) -> Tensor:
    self.kind = float(x.sum())
    return self.linear(x)


def keeps_a_tensor(self: Any, x: Tensor) -> Tensor:
    self.kind = x if self.kind is None else self.kind
    return self.linear(self.kind)


def a_flag(self: Any, x: Tensor) -> Tensor:
    self.flag = True
    return self.linear(x)


@pytest.mark.parametrize("act", [other_calls, counts, forgets, asks_the_data, keeps_a_tensor, a_flag])
def test_what_a_forward_goes_by_or_counts_is_refused(act: Callable[..., Tensor]) -> None:
    class Acting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.kind, self.flag = nn.Linear(2, 2), None, False

        forward = act

    apply, params, buffers = fcg.from_module(Acting())
    name = "flag" if act is a_flag else "kind"
    with pytest.raises(SideEffectError, match=rf"changes 1 attribute of the module(.|\n)*`{name}`"):
        apply(params, buffers, torch.ones(1, 2))


class Capturing(nn.Module):
    """Installs hooks at its first call that hand out what its layers compute, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: Tensor, *, hidden: bool) -> tuple[Tensor, list[Tensor]]:
        found: list[Tensor] = []
        if hidden and not hasattr(self, "hooked"):
            for layer in self.layers:
                layer.register_forward_hook(Capture(self))
            self.hooked = True
        self.found = found
        for layer in self.layers:
            x = layer(x).relu()
        del self.found
        return x, found


class Capture:
    def __init__(self, owner: Capturing) -> None:
        self.owner = [owner]

    def __call__(self, layer: nn.Module, args: Any, out: Tensor) -> None:
        self.owner[0].found.append(out)


def test_hooks_that_a_forward_installs_once_are_no_state() -> None:
    module = Capturing()
    apply, params, buffers = fcg.from_module(module)
    forward = fcg.graph_fn(lambda state, x: apply(state, buffers, x, hidden=True)[0])
    placed, plain = fcg.place(params), copy.deepcopy(module)
    for _ in range(16):
        x = torch.randn(4, 2)
        out, found = forward(placed, x)
        expected, hidden = plain(x, hidden=True)
        assert torch.equal(out, expected)
        assert len(found) == 3
        assert all(map(torch.equal, found, hidden))


def test_hooks_that_a_forward_installs_again_and_again_are_refused() -> None:
    class Piling(Capturing):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            self.layers[0].register_forward_hook(lambda layer, args, out: out + 1)
            y: Tensor = self.layers[0](x)
            return y

    apply, params, buffers = fcg.from_module(Piling())
    with pytest.raises(SideEffectError, match=r"`layers\.0\._forward_hooks`"):
        apply(params, buffers, torch.randn(4, 2))


def test_working_out_draws_and_writes_nothing_beside() -> None:
    """The runs on fake tensors advance no generator, no buffer, and no stream of a key."""
    module = Remembering()
    apply, params, buffers = fcg.from_module(module)
    x, labels = torch.randn(8, 2), torch.randint(0, 3, (8,))
    before = torch.get_rng_state()
    loss, new = apply(params, buffers, x, labels, key=fcg.random.key(3))
    assert torch.equal(torch.get_rng_state(), before)
    assert int(new["norm.num_batches_tracked"]) == 1
    known = Remembering()
    known.load_state_dict(module.state_dict())
    known.config.kind, known.config.width = "classes", 3
    expected, _ = fcg.from_module(known)[0](params, buffers, x, labels, key=fcg.random.key(3))
    assert torch.equal(loss, expected)


# --- training mode that changes nothing ----------------------------------------------------------------


class Policy(nn.Module):
    """Samples in any mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.distributions.Categorical(logits=self.layer(x)).sample()

    def times(self, x: Tensor) -> Tensor:
        return torch.rand(x.shape[0])


class Dropping(nn.Module):
    """Drops out in training mode, in a function that its forward calls."""

    def forward(self, x: Tensor) -> Tensor:
        return _dropped(x) if self.training else x


def _dropped(x: Tensor) -> Tensor:
    return x * torch.empty_like(x).bernoulli_(0.5)


@pytest.mark.parametrize(
    ("module", "method", "by_mode"),
    [
        (Policy(), "", False),
        (Policy(), "times", False),
        (nn.Sequential(nn.Linear(2, 2), Policy()), "", False),
        (nn.Dropout(0.5), "", True),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), Policy()), "", True),
        (Dropping(), "", True),
        (nn.TransformerEncoderLayer(2, 1, 4, batch_first=True), "", True),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.5), "", True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_training_mode_is_named_only_where_it_changes_what_is_computed(
    module: nn.Module, method: str, *, by_mode: bool, recwarn: pytest.WarningsRecorder
) -> None:
    apply, params, buffers = fcg.from_module(module)
    state = fcg.place({"params": params, "buffers": buffers, "key": fcg.random.key(0)})
    called = apply.method(method) if method else apply
    evaluate = fcg.graph_fn(
        lambda state, x: called(state["params"], state["buffers"], x, key=state["key"])[0]
    )
    evaluate(state, torch.randn(4, 1, 2) if isinstance(module, nn.LSTM) else torch.randn(4, 3, 2))
    assert any("in training mode" in text for text in texts_of(recwarn)) == by_mode
    with pytest.raises(fcg.ImplicitRandomnessError) as caught:
        called(params, buffers, torch.randn(4, 3, 2))
    assert ("train=False" in str(caught.value)) == by_mode or isinstance(module, nn.Sequential)


@torch.library.custom_op("fcg_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: grad * 2)


@pytest.mark.parametrize("lowering", share(["aten", "inductor"], 2))
def test_what_torch_notes_in_an_op_that_a_module_holds_is_no_change(lowering: Any) -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.op, self.inner = doubled, nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.op(self.inner(x)).square().mean()  # type: ignore[no-any-return]

    module = Holds()
    apply, params, buffers = fcg.from_module(module)

    @fcg.graph_step(lowering=lowering)
    def train_step(state: Any, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: apply(p, buffers, x)[0])(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
    for call in range(4):
        module.train(call % 2 == 0)  # the copy has its own mode; the original is compared again
        doubled._opoverload._dispatch_cache[-1 - call] = call  # as torch notes where kernels are
        state, _ = train_step(state, torch.full((2, 3), float(call)))
    doubled._opoverload._dispatch_cache.clear()
    assert train_step.stats.replays == 4
