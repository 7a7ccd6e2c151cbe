"""The host watch: every way a step can read a host value, and every change to it."""

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import gc
import math
import operator
import os
import pickle
import re
import sys
import sysconfig
import timeit
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.ambient.setting import canonical
from functional_cg.ambient.torch_modes import TORCH_MODES, modes_now, refuse_ambient_modes
from functional_cg.errors import BakedValueError
from functional_cg.stages.watch.frames import Follower
from functional_cg.stages.watch.host_reads import HostReads
from functional_cg.stages.watch.host_watch import HostWatch, refusal

LR = 0.1
ONES = torch.ones(2)
KEY = "lr"


@dataclasses.dataclass
class Inner:
    wd: float = 0.01


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    clip: float | None = None
    opt: Inner = dataclasses.field(default_factory=Inner)
    betas: tuple[float, float] = (0.9, 0.99)
    table: dict[str, Any] = dataclasses.field(default_factory=lambda: {"lr": 0.1, "deep": {"wd": [1, 2]}})


CFG = Config()


def watch(fn, *more, raises=(), constants=(), x=None, **named):
    """Run `fn` as a trace does, and watch what it has read."""
    reads = HostReads(constants)
    reads.root(fn, "self")
    with canonical(), Follower(reads).following(), contextlib.suppress(*raises):
        fn(torch.ones(2) if x is None else x, *more, **named)
    return HostWatch(reads.finish(), ["halves"] + ["autocast"] * reads.says_autocast)


def refuse(seen, function="step"):
    refuse_ambient_modes(function)
    if not seen.unchanged():
        raise refusal(function, seen.other_modes() + seen.differences())


def notices(fn, name, change, *more, **watching):
    """`fn` reads `name`; `change` changes it and nothing else."""
    seen = watch(fn, *more, **watching)
    assert name in seen.names(), seen.names()
    assert seen.unchanged()
    assert seen.differences() == []
    change()
    assert not seen.unchanged()
    assert [row[0] for row in seen.differences()] == [name]
    with pytest.raises(BakedValueError, match=re.escape(f"{name}  traced ")):
        refuse(seen)
    return seen


@pytest.fixture
def cfg(monkeypatch):
    config = Config()
    monkeypatch.setitem(globals(), "CFG", config)
    return config


# -- names ------------------------------------------------------------------------------------------------------


def test_global(monkeypatch):
    def step(x):
        return x * LR

    notices(step, "LR", lambda: monkeypatch.setitem(globals(), "LR", 0.2))


def test_global_that_is_deleted(monkeypatch):
    def step(x):
        return x * LR

    seen = notices(step, "LR", lambda: monkeypatch.delitem(globals(), "LR"))
    assert repr(seen.differences()) == "[('LR', 0.1, <gone>)]"


def test_closure_cell():
    scale = 2.0

    def step(x):
        return x * scale

    def change():
        nonlocal scale
        scale = 3.0

    notices(step, "scale", change)


def test_object_in_a_closure_cell_that_is_replaced():
    config = Config()

    def step(x):
        return x * config.lr

    def change():
        nonlocal config
        config = Config(lr=0.2)

    notices(step, "config.lr", change)


def test_default():
    def step(x, lr=0.1):
        return x * lr

    notices(step, "lr", lambda: setattr(step, "__defaults__", (0.2,)))


def test_object_that_is_a_default(cfg):
    def step(x, config=cfg, *, more=cfg.opt):
        return x * config.lr * more.wd

    assert watch(step).names() == ("config.lr", "more.wd")
    notices(step, "config.lr", lambda: setattr(cfg, "lr", 0.2))


def test_keyword_default():
    def step(x, *, lr=0.1):
        return x * lr

    notices(step, "lr", lambda: step.__kwdefaults__.update(lr=0.2))


def test_static_argument(cfg):
    def step(x, config, lr=0.1):
        return x * config.lr * lr

    seen = notices(step, "config.lr", lambda: setattr(cfg, "lr", 0.2), cfg, 0.3)
    assert seen.names() == ("config.lr",)  # the default of lr was not used


# -- chains -----------------------------------------------------------------------------------------------------


def test_attribute(cfg):
    notices(lambda x: x * CFG.lr, "CFG.lr", lambda: setattr(cfg, "lr", 0.2))


def test_attribute_of_an_attribute(cfg):
    notices(lambda x: x * CFG.opt.wd, "CFG.opt.wd", lambda: setattr(cfg, "opt", Inner(0.02)))


def test_none_that_becomes_a_number(cfg):
    notices(
        lambda x: x if CFG.clip is None else x.clamp(max=CFG.clip),
        "CFG.clip",
        lambda: setattr(cfg, "clip", 1.0),
    )


def test_tuple(cfg):
    seen = watch(lambda x: x * CFG.betas[0])
    assert seen.names() == ("CFG.betas",)
    cfg.betas = (0.8, 0.99)
    assert not seen.unchanged()


def test_constant_keys(cfg):
    def step(x):
        return x * CFG.table["lr"] * CFG.table["deep"]["wd"][1]

    assert watch(step).names() == ('CFG.table["lr"]', 'CFG.table["deep"]["wd"][1]')
    notices(step, 'CFG.table["deep"]["wd"][1]', lambda: cfg.table["deep"]["wd"].__setitem__(1, 3))


def test_key_that_is_itself_watched(cfg):
    def step(x):
        return x * CFG.table[KEY]

    assert watch(step).names() == ("KEY", 'CFG.table["lr"]')


def test_key_asked_for_with_get(cfg):
    notices(lambda x: x * CFG.table.get("lr", 1.0), 'CFG.table["lr"]', lambda: cfg.table.__setitem__("lr", 1))
    assert watch(lambda x: x * CFG.table.get("none", 1.0)).names() == ("'none' in CFG.table",)


class Attributes(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Proxy:
    def __init__(self, of):
        self._of = of

    def __getattr__(self, name):
        return self._of[name]


@pytest.mark.parametrize("make", [Attributes, Proxy])
def test_attribute_that_the_users_class_looks_up(make):
    values = Attributes(lr=0.1)
    config = make(values) if make is Proxy else values
    seen = watch(lambda x: x * config.lr)
    assert any(known.endswith('["lr"]') for known in seen.names()), seen.names()
    values["lr"] = 0.2
    assert not seen.unchanged()


class Both(dict):
    """Has an attribute and a key of the same name, of different values."""

    lr = 0.1


@pytest.mark.parametrize("key_first", [True, False])
def test_attribute_and_key_of_one_name(key_first):
    for change in ("key", "attribute"):
        config = Both(lr=0.1)
        reads = [lambda config=config: config["lr"], lambda config=config: config.lr]
        one, other = reads if key_first else reversed(reads)
        seen = watch(lambda x, one=one, other=other: x * one() * other())
        assert seen.unchanged()
        if change == "key":
            config["lr"] = 0.2
        else:
            config.lr = 0.2
        assert not seen.unchanged(), change


def test_key_that_is_deleted(cfg):
    notices(lambda x: x * CFG.table["lr"], 'CFG.table["lr"]', lambda: cfg.table.pop("lr"))


def test_attribute_of_the_users_module():
    module = types.ModuleType("settings")
    module.__file__ = __file__
    module.LR = 0.1

    def step(x):
        return x * module.LR

    notices(step, "module.LR", lambda: setattr(module, "LR", 0.2))


def test_class_attribute():
    class Settings:
        lr = 0.1

    def step(x):
        return x * Settings.lr

    notices(step, "Settings.lr", lambda: setattr(Settings, "lr", 0.2))


def test_class_attribute_that_an_instance_hides():
    class Settings:
        lr = 0.1

    settings = Settings()

    def step(x):
        return x * settings.lr

    notices(step, "settings.lr", lambda: setattr(settings, "lr", 0.2))


def test_slots():
    class Settings:
        __slots__ = ("lr", "unset")

    settings = Settings()
    settings.lr = 0.1

    def step(x):
        return x * settings.lr * settings.unset

    assert watch(step, raises=[AttributeError]).names() == ("settings.lr", "hasattr(settings, 'unset')")
    notices(step, "settings.lr", lambda: setattr(settings, "lr", 0.2), raises=[AttributeError])
    notices(
        step, "hasattr(settings, 'unset')", lambda: setattr(settings, "unset", 0.2), raises=[AttributeError]
    )


def test_named_tuple():
    class Settings(NamedTuple):
        lr: float

    held = types.SimpleNamespace(settings=Settings(0.1))

    def step(x):
        return x * held.settings.lr

    notices(step, "held.settings.lr", lambda: setattr(held, "settings", Settings(0.2)))


def test_local_name(cfg):
    def step(x):
        config = CFG
        options = config.opt
        return x * options.wd

    notices(step, "CFG.opt.wd", lambda: setattr(cfg.opt, "wd", 0.02))


def test_local_name_that_is_assigned_twice_stands_for_what_it_is_then(cfg):
    def step(x):
        options = CFG.opt
        options = CFG
        return x * options.lr

    assert watch(step).names() == ("CFG.lr",)


# -- functions --------------------------------------------------------------------------------------------------


def test_inner_functions(cfg):
    def step(x):
        options = CFG.opt

        def loss(params):
            return params * options.wd

        return loss(x) + sum(row * CFG.lr for row in x) + (lambda y: y * LR)(x)

    assert watch(step).names() == ("CFG.opt.wd", "CFG.lr", "LR")
    notices(step, "CFG.opt.wd", lambda: setattr(cfg.opt, "wd", 0.02))


def helper(x, config=None, *, options=None):
    return x * (LR if config is None else config.lr) * (1 if options is None else options.wd)


def test_function_that_is_called(monkeypatch):
    notices(lambda x: helper(x), "LR", lambda: monkeypatch.setitem(globals(), "LR", 0.2))


def test_function_that_is_handed_on(monkeypatch):
    notices(lambda x: list(map(helper, x)), "LR", lambda: monkeypatch.setitem(globals(), "LR", 0.2))


def test_object_passed_as_an_argument(cfg):
    def step(x):
        return helper(x, CFG, options=CFG.opt)

    assert {"CFG.lr", "CFG.opt.wd"} <= set(watch(step).names())
    notices(step, "CFG.opt.wd", lambda: setattr(cfg.opt, "wd", 0.02))


def test_object_passed_on_beside_a_computed_argument(cfg):
    def step(x):
        return helper(x * 2 + 1 if x is not None else x, CFG, options=(x is None and CFG.lr) or CFG.opt)

    assert set(watch(step).names()) == {"CFG.lr", "CFG.opt.wd"}


def test_function_with_unpacked_arguments(monkeypatch):
    def step(*x):
        return helper(*x, **{})

    notices(step, "LR", lambda: monkeypatch.setitem(globals(), "LR", 0.2))


def test_recursion_over_a_cycle_of_objects_ends():
    node = types.SimpleNamespace(lr=0.1)
    node.next = types.SimpleNamespace(lr=0.2, next=node)

    def visit(x, at):
        return visit(x * at.lr, at.next) if x < 1e6 else x

    def step(x):
        return visit(x, node)

    node.lr = node.next.lr = 10.0
    assert watch(step, x=1.0).names() == ("node.lr", "node.next.lr")


class Trainer:
    rate = 0.1

    def __init__(self):
        self.cfg = {"lr": 0.1}
        self._wd = 0.01
        self.__hidden = 1

    def step(self, x):
        def loss(y):
            return y * self.cfg["lr"]

        return loss(x) * self.decay(x) * self.wd * self.rate * self.__hidden

    def decay(self, x):
        return x * self.double(LR)

    @staticmethod
    def double(x):
        return 2 * x * len(KEY)

    @property
    def wd(self):
        return self._wd

    @functools.cached_property
    def slow(self):
        raise AssertionError("a property is not run")

    def __call__(self, x):
        return self.step(x) * (self.slow if x is None else 1)


class FinerTrainer(Trainer):
    def step(self, x):
        return super().step(x) * super().rate


@pytest.mark.parametrize("make", [Trainer, FinerTrainer])
@pytest.mark.parametrize("call", [lambda trainer: trainer.step, lambda trainer: trainer])
def test_method(make, call):
    trainer = make()
    seen = watch(call(trainer))
    assert {'self.cfg["lr"]', "LR", "KEY", "self.rate", "self._wd", "self._Trainer__hidden"} == set(
        seen.names()
    ) - {"Trainer.rate"}
    notices(call(trainer), 'self.cfg["lr"]', lambda: trainer.cfg.update(lr=0.2))
    notices(call(trainer), "self._wd", lambda: setattr(trainer, "_wd", 0.02))


def test_method_of_another_object():
    trainer = Trainer()

    def step(x):
        return trainer.step(x)

    notices(step, 'trainer.cfg["lr"]', lambda: trainer.cfg.update(lr=0.2))


def test_callable_object():
    trainer = Trainer()

    def step(x):
        return trainer(x)

    notices(step, 'trainer.cfg["lr"]', lambda: trainer.cfg.update(lr=0.2))


def test_constructor(monkeypatch):
    class Scale:
        def __init__(self, x):
            self.x = x * LR

    notices(lambda x: Scale(x).x, "LR", lambda: monkeypatch.setitem(globals(), "LR", 0.2))


def test_partial(cfg):
    step = functools.partial(lambda config, x, lr: x * lr * config.lr, cfg, lr=0.1)
    assert watch(step).names() == ("self.args", "self", "self.args[0].lr")
    notices(step, "self.args[0].lr", lambda: setattr(cfg, "lr", 0.2))
    notices(step, "self", lambda: step.keywords.update(lr=0.2))


def test_decorated_function(cfg):
    def twice(fn):
        @functools.wraps(fn)
        def wrapper(x):
            return fn(fn(x))

        return wrapper

    @twice
    def step(x):
        return x * CFG.lr

    notices(step, "CFG.lr", lambda: setattr(cfg, "lr", 0.2))


@pytest.mark.parametrize(
    "wrap", [torch.func.vmap, functools.lru_cache, torch.no_grad(), contextlib.contextmanager]
)
def test_function_wrapped_by_a_library(wrap, cfg):
    def loss(x):
        return x * CFG.lr

    wrapped = wrap(loss)

    def step(x):
        return wrapped(x)

    notices(step, "CFG.lr", lambda: setattr(cfg, "lr", 0.2))


@pytest.mark.parametrize("wrap", [fcg.value_and_grad, fcg.graph_step, fcg.graph_fn])
def test_function_under_a_transform(wrap, cfg):
    wrapped = wrap(lambda params: params.sum() * CFG.lr)

    def step(x):
        return wrapped(x)

    notices(step, "CFG.lr", lambda: setattr(cfg, "lr", 0.2))


def test_schedule_of_the_user_in_an_optimizer(cfg):
    optimizer = fcg.optim.chain(
        fcg.optim.clip_by_global_norm(1.0), fcg.optim.adamw(lambda count: count * CFG.lr, weight_decay=0.1)
    )
    state = fcg.snapshot(fcg.TrainState.create(params={"w": torch.ones(2)}, optimizer=optimizer))
    grads = {"w": torch.ones(2)}
    notices(lambda x: state.apply_gradients(grads), "CFG.lr", lambda: setattr(cfg, "lr", 0.2))


def test_schedule_held_by_an_optimizer(cfg):
    @dataclasses.dataclass(frozen=True)
    class Optimizer:
        links: tuple[Any, ...]

    optimizer = Optimizer((functools.partial(lambda rate, count: rate(count), lambda count: count * CFG.lr),))
    notices(lambda optimizer: optimizer.links[0](1), "CFG.lr", lambda: setattr(cfg, "lr", 0.2), x=optimizer)


class Apply:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


def test_callable_schedule_held_by_an_optimizer():
    class Schedule:
        def __init__(self):
            self.peak = 0.1

        def __call__(self, count):
            return count * self.peak

    schedule = Schedule()
    held = Apply(schedule)
    seen = watch(lambda x: held(x))
    assert any(name.endswith(".peak") for name in seen.names())
    schedule.peak = 0.2
    assert not seen.unchanged()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * LR

    @staticmethod
    def backward(ctx, grad):
        return grad * CFG.lr


def test_custom_autograd_function():
    seen = watch(lambda x: fcg.grad(lambda y: Double.apply(y).sum())(x))
    assert seen.names() == ("LR", "CFG.lr")


# -- modules ----------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.rest = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Dropout(0.5))
        self.scale = 2.0

    def forward(self, x):
        return self.rest(self.linear(x)) * self.scale * self.linear.weight.sum()


def test_modes_of_a_module():
    net = Net()

    def step(x):
        return net(x)

    x = torch.ones(3)
    assert {
        'net.rest["1"].training',
        "net.scale",
        'net.rest["0"].inplace',
        'net.rest["1"].inplace',
        'net.rest["1"].p',
    } <= set(watch(step, x=x).names())
    notices(step, 'net.rest["1"].training', lambda: net.rest[1].eval(), x=x)
    net.train()
    seen = watch(step, x=x)
    net.eval()
    assert 'net.rest["1"].training' in [row[0] for row in seen.differences()]
    with pytest.raises(BakedValueError, match="make one step for training and one for evaluation"):
        refuse(seen)


def test_private_copy_of_a_library_is_followed_but_its_modes_are_not_watched():
    class Scaled(torch.nn.Module):
        def forward(self, x):
            return x * LR

    apply, _, _ = fcg.from_module(torch.nn.Sequential(Scaled()))
    apply({}, {}, torch.ones(2))  # as a trace does before it watches: torch imports what it needs
    assert watch(lambda x: apply({}, {}, x)).names() == ("LR",)


# -- what is not on the watch -------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


def test_constants_of_libraries_and_other_objects_are_not_entries():
    tensor = torch.ones(2)

    def step(x):
        return x.to(torch.float32) * math.pi * tensor.shape[0] + len(x) + Colour.RED.value

    assert watch(step).names() == ("tensor.shape",)


def test_no_code_of_the_user_is_run():
    class Loud:
        def __getattr__(self, name):
            raise AssertionError(name)

        def __getitem__(self, key):
            raise AssertionError(key)

        def __eq__(self, other):
            raise AssertionError

        __hash__ = None

        @property
        def rate(self):
            raise AssertionError

    class Louder(Loud):
        def __getattribute__(self, name):
            # isinstance() asks for the class
            return Louder if name == "__class__" else pytest.fail(name)

    loud, louder, counts = Loud(), Louder(), defaultdict(int)

    def step(x):
        return loud.lr + loud["lr"] + loud.rate + louder.lr + counts["lr"]

    assert watch(step, raises=[AssertionError]).names() == ("hasattr(loud, 'lr')", "hasattr(Loud, 'lr')")
    assert not counts


def test_unset_names_are_skipped():
    def step(x):
        return x * not_there * later.lr  # noqa: F821

    assert watch(step, raises=[NameError]).names() == ()
    later = Config()
    assert watch(step, raises=[NameError]).names() == ()


def test_builtin_function_as_a_step():
    assert watch(len, x=[1]).names() == ()


def test_one_value_read_twice_is_one_entry(cfg):
    assert watch(lambda x: x * CFG.lr + CFG.lr + helper(x, CFG)).names().count("CFG.lr") == 1


# -- spellings ------------------------------------------------------------------------------------------------------


def scaled(x, alpha=1.0):
    return x * alpha


def rates(*values):
    return types.SimpleNamespace(**{f"lr{place}": value for place, value in enumerate(values)}, lr=values[0])


class Heads:
    """An object of the user's that is read through its methods."""

    def __init__(self):
        self.cfg, self.table, self.on = rates(0.1), {"lr": 0.1}, True

    def __getitem__(self, key):
        return self.table[key]

    def __iter__(self):
        yield from [self.cfg.lr]

    def __len__(self):
        return 1 if self.on else 0

    def __float__(self):
        return self.cfg.lr

    def __mul__(self, other):
        return self.cfg.lr * other

    def __enter__(self):
        return self.cfg

    def __exit__(self, *error):
        pass

    def held(self):
        return self.cfg

    @property
    def current(self):
        return self.cfg


class Lookup(dict):
    __getattr__ = dict.__getitem__


def put(key, value=0.5):
    return lambda held: held.__setitem__(key, value)


def set_lr(held):
    held.lr = 0.5


def set_held_lr(held):
    held.cfg.lr = 0.5


def iterated(held):
    total = 0.0
    for group in held:
        total += group["lr"]
    return total


def unpacked(held):
    lr, _ = held
    return lr


def first_or(held, default):
    try:
        return held[0]
    except IndexError:
        return default


def entered(held):
    with held as cfg:
        return cfg.lr


def through_a_join(held):
    cfg = held["a"] if held["flag"] else held["b"]
    return cfg.lr


def assigned_twice(held):
    cfg = held
    cfg = cfg["a"]
    return cfg.lr


def matched(held):
    match held:
        case types.SimpleNamespace(lr=lr):
            return lr


def two():
    return {"a": rates(0.1), "b": rates(0.2), "flag": True}


def activations():
    return torch.nn.Sequential(torch.nn.LeakyReLU(0.1))


READ = {
    "**": (lambda: {"alpha": 0.1}, lambda held: scaled(1.0, **held), put("alpha")),
    "*": (lambda: [0.1], lambda held: scaled(1.0, *held), put(0)),
    "{**}": (lambda: {"lr": 0.1}, lambda held: {**held}["lr"], put("lr")),
    "unpacking": (lambda: [0.1, 0.2], unpacked, put(0)),
    "for": (lambda: [{"lr": 0.1}, {"lr": 0.2}], iterated, lambda held: held[1].update(lr=0.5)),
    "for, one more": (lambda: [{"lr": 0.1}], iterated, lambda held: held.append({"lr": 0.1})),
    "comprehension": (lambda: [rates(0.1)], lambda held: [c.lr for c in held], lambda held: set_lr(held[0])),
    "values": (lambda: {"a": 0.1}, lambda held: [v for v in held.values()], put("a")),
    "items": (
        lambda: {"a": rates(1)},
        lambda held: [v.lr for k, v in held.items()],
        lambda h: set_lr(h["a"]),
    ),
    "zip": (
        lambda: [rates(1)],
        lambda held: [a.lr for a, _ in zip(held, held, strict=True)],
        lambda held: set_lr(held[0]),
    ),
    "enumerate": (
        lambda: [rates(1)],
        lambda held: [c.lr for _, c in enumerate(held)],
        lambda h: set_lr(h[0]),
    ),
    "map": (lambda: [rates(1)], lambda held: list(map(lambda c: c.lr, held)), lambda held: set_lr(held[0])),
    "sum": (lambda: [0.1], lambda held: sum(held), put(0)),
    "torch.tensor": (lambda: [[0.1], [0.2]], lambda held: torch.tensor(held), lambda held: put(0)(held[1])),
    "slice": (lambda: [0.1, 0.2], lambda held: held[0:1], put(0)),
    "unknown key": (lambda: {"w": 0.1}, lambda held: [held[k] for k in "w"], put("w")),
    "formatted key": (lambda: {"lr_w": 0.1}, lambda held: [held[f"lr_{n}"] for n in "w"], put("lr_w")),
    "key of a tuple": (lambda: {"a": 0.1, "b": 0.2}, lambda held: [held[k] for k in ("a", "b")], put("b")),
    "enum key": (lambda: {Colour.RED: 0.1}, lambda held: held[Colour.RED], put(Colour.RED)),
    "tuple key": (lambda: {("a", 1): 0.1}, lambda held: held["a", 1], put(("a", 1))),
    "None as a key": (lambda: {None: 0.1}, lambda held: held[None], put(None)),
    "float key": (lambda: {0.5: 0.1}, lambda held: held[0.5], put(0.5)),
    "index, missing": (list, lambda held: first_or(held, 1), lambda held: held.append(2)),
    "in": (dict, lambda held: "lr" in held, put("lr")),
    "in a set": (set, lambda held: [k in held for k in torch.ones(1)], lambda held: held.add("w")),
    "get, missing": (dict, lambda held: held.get("lr", 0.1), put("lr")),
    "setdefault": (lambda: {"lr": 0.1}, lambda held: held.setdefault("lr", 0.2), put("lr")),
    "copy": (lambda: {"lr": 0.1}, lambda held: held.copy()["lr"], put("lr")),
    "dict": (lambda: {"lr": 0.1}, lambda held: dict(held)["lr"], put("lr")),
    "truth": (list, lambda held: 1 if held else 2, lambda held: held.append(1)),
    "len": (lambda: [1], lambda held: len(held), lambda held: held.append(1)),
    "is None": (lambda: [rates(1)], lambda held: held[0] is None, put(0, None)),
    "isinstance": (
        lambda: [rates(1)],
        lambda held: isinstance(held[0], Config),
        lambda h: put(0, Config())(h),
    ),
    "hasattr": (lambda: rates(1), lambda held: hasattr(held, "wd"), lambda held: setattr(held, "wd", 1)),
    "getattr": (lambda: rates(1), lambda held: getattr(held, "lr"), set_lr),  # noqa: B009
    "getattr, missing": (
        lambda: rates(1),
        lambda held: getattr(held, "wd", 1),
        lambda h: setattr(h, "wd", 2),
    ),
    "vars": (lambda: rates(1), lambda held: vars(held)["lr"], set_lr),
    "__dict__": (lambda: rates(1), lambda held: held.__dict__["lr"], set_lr),
    "attrgetter": (lambda: rates(1), lambda held: operator.attrgetter("lr")(held), set_lr),
    "itemgetter": (lambda: {"lr": 1}, lambda held: operator.itemgetter("lr")(held), put("lr")),
    "asdict": (Inner, lambda held: dataclasses.asdict(held)["wd"], lambda held: setattr(held, "wd", 2)),
    "match": (lambda: rates(1), matched, set_lr),
    "join": (two, through_a_join, lambda held: set_lr(held["a"])),
    "or": (lambda: [None, rates(1)], lambda held: (held[0] or held[1]).lr, lambda held: set_lr(held[1])),
    "assigned twice": (two, assigned_twice, lambda held: set_lr(held["a"])),
    "with": (Heads, entered, set_held_lr),
    "result": (Heads, lambda held: held.held().lr, set_held_lr),
    "property": (Heads, lambda held: held.current.lr, set_held_lr),
    "__getitem__": (Heads, lambda held: held["lr"], lambda held: held.table.update(lr=0.5)),
    "__iter__": (Heads, lambda held: sum(held), set_held_lr),
    "__len__": (Heads, lambda held: len(held), lambda held: setattr(held, "on", False)),
    "__float__": (Heads, lambda held: float(held), set_held_lr),
    "__mul__": (Heads, lambda held: held * 2, set_held_lr),
    "attributes": (lambda: Lookup(lr=0.1), lambda held: held.lr, put("lr")),
    "defaultdict": (lambda: defaultdict(float, lr=0.1), lambda held: held["lr"], put("lr")),
    "Counter": (lambda: collections.Counter(lr=1), lambda held: held["lr"], put("lr")),
    "UserDict": (lambda: collections.UserDict(lr=0.1), lambda held: held["lr"], put("lr")),
    "UserDict.get": (lambda: collections.UserDict(lr=0.1), lambda held: held.get("lr"), put("lr")),
    "ChainMap": (
        lambda: collections.ChainMap({}, {"lr": 1}),
        lambda held: held["lr"],
        lambda h: put("lr")(h.maps[1]),
    ),
    "deque": (lambda: collections.deque([0.1]), lambda held: held[0], put(0)),
    "bytearray": (lambda: bytearray(b"a"), lambda held: held[0], put(0, 1)),
    "array": (lambda: numpy.array([0.1]), lambda held: held[0], put(0)),
    "array as a whole": (lambda: numpy.array([0.1]), lambda held: held.sum(), put(0)),
    "function": (lambda: [torch.relu], lambda held: held[0](ONES), put(0, torch.tanh)),
    "function of torch": (lambda: [F.mse_loss], lambda held: held[0](ONES, ONES), put(0, F.l1_loss)),
    "class": (lambda: [int], lambda held: held[0](1), put(0, float)),
    "object of another class": (
        lambda: [Heads()],
        lambda held: held[0].held(),
        lambda h: put(0, Trainer())(h),
    ),
    "module": (
        lambda: [torch.nn.ReLU()],
        lambda held: held[0](ONES),
        lambda held: put(0, torch.nn.Tanh())(held),
    ),
    "setting of a module": (
        activations,
        lambda held: held(ONES),
        lambda held: setattr(held[0], "negative_slope", 0.5),
    ),
    "module inside": (activations, lambda held: held(ONES), lambda held: put(0, torch.nn.Tanh())(held)),
    "module appended": (activations, lambda held: held(ONES), lambda held: held.append(torch.nn.Tanh())),
}


@pytest.mark.parametrize(("make", "read", "change"), READ.values(), ids=READ)
def test_each_spelling_of_a_read_is_noticed(make, read, change):
    held = make()
    seen = watch(lambda x: read(held))
    assert seen.unchanged()
    assert seen.differences() == []
    change(held)
    assert not seen.unchanged()
    with pytest.raises(BakedValueError, match=r"  .*traced .* now "):
        refuse(seen)


def test_environment(monkeypatch):
    monkeypatch.setenv("RATE", "0.1")
    monkeypatch.delenv("OTHER", raising=False)
    for read in (
        lambda x: os.environ["RATE"],
        lambda x: os.environ.get("RATE"),
        lambda x: os.getenv("OTHER"),
    ):
        monkeypatch.setenv("RATE", "0.1")
        monkeypatch.delenv("OTHER", raising=False)
        seen = watch(read)
        assert seen.unchanged()
        monkeypatch.setenv("RATE", "0.5")
        monkeypatch.setenv("OTHER", "0.5")
        assert not seen.unchanged()


def test_import_in_the_function(monkeypatch):
    module = types.ModuleType("settings_of_this_test")
    module.__file__, module.LR = __file__, 0.1
    monkeypatch.setitem(sys.modules, "settings_of_this_test", module)

    def step(x):
        import settings_of_this_test as settings
        from settings_of_this_test import LR as rate

        return x * settings.LR * rate

    seen = watch(step)
    module.LR = 0.5
    assert not seen.unchanged()


def only_written(held):
    for _ in range(2):
        held.append(1)


UNREAD = {
    "appended to": (list, only_written, lambda held: held.append(2)),
    "written": (
        lambda: {"losses": [], "lr": 0.1, "last": 1.0, "count": rates(1)},
        lambda held: held["losses"].append(1.0) or held["lr"],
        lambda held: (held["losses"].append(2.0), held.update(last=3.0)),
    ),
    "beside what is read": (lambda: rates(1, 2), lambda held: held.lr0, lambda held: setattr(held, "lr1", 3)),
    "another key": (lambda: {"lr": 0.1}, lambda held: held["lr"], put("step", 1)),
    "object handed on": (lambda: rates(1), lambda held: repr(held), set_lr),
    "object in a list": (lambda: [rates(1)], lambda held: list(held), lambda held: set_lr(held[0])),
    "truth alone": (lambda: [1], lambda held: 1 if held else 2, lambda held: held.append(2)),
    "length alone": (lambda: [1], lambda held: len(held), put(0, 2)),
    "length compared": (lambda: [1], lambda held: 1 if len(held) < 2 else 2, put(0, 2)),
    "equal as before": (lambda: [[0.1]], lambda held: held[0] == [0.1], put(0, [0.1])),
    "kind alone": (lambda: [[1]], lambda held: isinstance(held[0], list), lambda held: held[0].append(2)),
    "equal again": (lambda: {"betas": [0.1, 0.2]}, lambda held: sum(held["betas"]), put("betas", [0.1, 0.2])),
    "printed": (lambda: [1], lambda held: print(held), put(0, 2)),  # noqa: T201
}


@pytest.mark.parametrize(("make", "read", "change"), UNREAD.values(), ids=UNREAD)
def test_what_is_not_read_may_change(make, read, change):
    held = make()
    seen = watch(lambda x: read(held))
    change(held)
    assert seen.differences() == []
    assert seen.unchanged()


def read_at(x, data):
    place = 9_000 + len("x")
    return data[place]


def test_large_container_is_compared_in_all_that_is_read():
    data = list(range(10_000))
    one, all_of_it = watch(read_at, data), watch(lambda x: sum(data))
    data[-1] = 0
    assert one.unchanged()
    assert not all_of_it.unchanged()
    data[9_001] = 0
    assert not one.unchanged()


def test_function_of_an_installed_package_is_followed():
    """Also in a virtual environment, whose folder Python calls the standard library's."""
    folder = sysconfig.get_paths()["purelib"]
    package: dict[str, Any] = {"__file__": f"{folder}/package.py", "SETTINGS": {"rate": 0.1}}
    exec(compile("def scaled(x): return x * SETTINGS['rate']", f"{folder}/package.py", "exec"), package)
    scaled = package["scaled"]
    seen = watch(lambda x: scaled(x))
    assert seen.unchanged()
    package["SETTINGS"]["rate"] = 0.2
    assert not seen.unchanged()


def test_what_a_class_says_of_itself_only_at_times():
    class Plain:
        pass

    seen = watch(lambda x: getattr(Plain, "__abstractmethods__", ()))
    assert seen.unchanged()
    Plain.__abstractmethods__ = frozenset({"forward"})
    assert not seen.unchanged()


def test_who_reads_all_of_a_container_of_a_package_depends_on_it():
    """It may grow for functions of the package, which take what they know from it."""
    folder = sysconfig.get_paths()["purelib"]
    package: dict[str, Any] = {"__file__": f"{folder}/package.py", "SETTINGS": {"rate": 0.1, "other": 1.0}}
    exec(compile("def get(k): return SETTINGS[k]", f"{folder}/package.py", "exec"), package)
    get, settings = package["get"], package["SETTINGS"]
    seen = watch(lambda x: x * get("other") * sum(settings.values()))
    assert seen.unchanged()
    settings["rate"] = 0.2
    assert not seen.unchanged()


class Rates:
    def __init__(self, copied=2.0):
        self.copied = copied


RATES = Rates()


class Factor:
    def __init__(self, factor=1.0):
        self.factor = factor


class CopiedByHand(Factor):
    """Copies itself as a global says."""

    def __deepcopy__(self, memo):
        return CopiedByHand(RATES.copied)


class CopiedWithHelp(Factor):
    """Copies itself by the standard library's copy of a global."""

    def __deepcopy__(self, memo):
        return CopiedWithHelp(copy.copy(RATES).copied)


class KeptAtFirst:
    """Computes its factor when it is first asked for, as may happen when a module's contents are listed."""

    __slots__ = ("factor",)

    def __deepcopy__(self, memo):
        return KeptAtFirst()

    def __getattr__(self, name):
        if name != "factor":
            raise AttributeError(name)
        self.factor = RATES.copied
        return self.factor


class Scaling(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale, self.parts = scale, [torch.nn.Identity() for _ in "123"]

    def forward(self, x):
        return x * self.scale.factor


@pytest.mark.parametrize("kind", [CopiedByHand, CopiedWithHelp, KeptAtFirst])
def test_what_a_copy_of_the_users_object_reads_is_watched(monkeypatch, kind):
    apply, params, buffers = fcg.from_module(Scaling(kind()))
    step = fcg.graph_fn(lambda x: apply(params, buffers, x)[0])
    assert step(torch.ones(2)).tolist() == [2.0, 2.0]
    assert step(torch.ones(2)).tolist() == [2.0, 2.0]
    monkeypatch.setattr(RATES, "copied", 3.0)
    with pytest.raises(BakedValueError, match="copied"):
        step(torch.ones(2))


class Failing:
    def __getattr__(self, name):
        raise KeyError(name)


def test_a_class_may_keep_what_cannot_be_asked_for_attributes():
    class Kept:
        settings = Failing()
        rate = 2.0

        def go(self):
            return self.rate

    kept = Kept()
    seen = watch(lambda x: x * kept.go())
    assert seen.unchanged()
    Kept.rate = 3.0
    assert not seen.unchanged()


def test_registry_of_an_installed_package_may_grow():
    package: dict[str, Any] = {
        "__file__": "/env/site-packages/package.py",
        "REGISTRY": {"a": 0.1},
        "RATE": 0.1,
    }
    exec(compile("def find(k): return REGISTRY.get(str(k)), RATE", "/env/package.py", "exec"), package)
    find = package["find"]
    find(torch.ones(2))  # as a trace does before it watches: to print a tensor, torch imports
    seen = watch(lambda x: find(x))
    package["REGISTRY"]["b"] = 0.2
    assert seen.unchanged()
    package["RATE"] = 0.2
    assert not seen.unchanged()


# -- comparison -----------------------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=3),
    st.none(),
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), Colour.RED]
    ),
    st.tuples(st.integers(0, 2), st.floats()),
)


def holding(value):
    held = types.SimpleNamespace(value=value)
    return held, watch(lambda x: held.value)


@given(VALUES)
def test_equal_but_not_identical_is_unchanged(value):
    held, seen = holding(value)
    held.value = pickle.loads(pickle.dumps(value))
    assert seen.unchanged()
    assert seen.differences() == []


@given(VALUES, VALUES)
def test_changed_if_and_only_if_type_or_value_differ(old, new):
    held, seen = holding(old)
    held.value = new
    if "nan" not in repr(old):  # NaNs of different bits print alike
        assert seen.unchanged() is (type(old) is type(new) and repr(old) == repr(new))
    assert seen.unchanged() is (seen.differences() == [])


@pytest.mark.parametrize(
    ("old", "new"),
    [(0.0, -0.0), (1, True), (1, 1.0), (None, 0), ((1, 2.0), (1, -2.0)), ((0.0,), (-0.0,)), ("a", "b")],
)
def test_values_that_python_may_call_equal_differ(old, new):
    held, seen = holding(old)
    held.value = new
    assert not seen.unchanged()


def test_nan_equals_itself():
    held, seen = holding(float("nan"))
    held.value = float("nan")
    assert seen.unchanged()


def test_numpy_numbers():
    numpy = pytest.importorskip("numpy")
    held, seen = holding(numpy.float32(0.0))
    held.value = numpy.float32(0.0)
    assert seen.unchanged()
    held.value = numpy.float32(-0.0)
    assert not seen.unchanged()


def test_value_that_cannot_be_compared_counts_as_changed():
    class Odd(str):
        def __eq__(self, other):
            raise ValueError("no")

        __hash__ = str.__hash__

    held, seen = holding(Odd("a"))
    held.value = Odd("a")
    assert not seen.unchanged()
    with pytest.raises(BakedValueError, match=r"held\.value"):
        refuse(seen)


# -- torch's modes ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def setting(read, write, value):
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def set_matmul(value):
    torch.backends.cuda.matmul.fp32_precision = value


def set_conv(value):
    torch.backends.cudnn.conv.fp32_precision = value


def set_flag(name):
    return lambda value: setattr(torch.backends.cudnn, name, value)


MODE_CHANGES = [
    (torch.get_default_dtype, torch.set_default_dtype, torch.float64, "torch.get_default_dtype()"),
    (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
        "torch.are_deterministic_algorithms_enabled()",
    ),
    (lambda: torch.backends.cudnn.benchmark, set_flag("benchmark"), True, "torch.backends.cudnn.benchmark"),
    (
        lambda: torch.backends.cudnn.deterministic,
        set_flag("deterministic"),
        True,
        "torch.backends.cudnn.deterministic",
    ),
    (lambda: modes_now()[3], set_matmul, "tf32", "torch.backends.cuda.matmul.fp32_precision"),
    (lambda: modes_now()[4], set_conv, "ieee", "torch.backends.cudnn.conv.fp32_precision"),
    *[
        (
            getattr(torch.backends.cuda, f"{kernel}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp"),
            False,
            f"torch.backends.cuda.{kernel}_sdp_enabled()",
        )
        for kernel in ("flash", "mem_efficient", "math", "cudnn")
    ],
    (lambda: torch.backends.cudnn.enabled, set_flag("enabled"), False, "torch.backends.cudnn.enabled"),
    *[
        (
            lambda name=name: getattr(torch.backends.cuda.matmul, name),
            lambda value, name=name: setattr(torch.backends.cuda.matmul, name, value),
            value,
            f"torch.backends.cuda.matmul.{name}",
        )
        for name, value in (
            ("allow_fp16_reduced_precision_reduction", False),
            ("allow_bf16_reduced_precision_reduction", False),
            ("allow_fp16_accumulation", True),
        )
    ],
    (
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
        True,
        "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()",
    ),
]


@pytest.mark.parametrize(
    ("read", "write", "value", "name"), MODE_CHANGES, ids=[row[-1] for row in MODE_CHANGES]
)
def test_each_mode_is_compared(read, write, value, name):
    seen = watch(lambda x: x)
    with setting(read, write, value):
        assert not seen.unchanged()
        assert [row[0] for row in seen.other_modes()] == [name]
        with pytest.raises(BakedValueError, match="set the mode before the first call"):
            refuse(seen)
    assert seen.unchanged()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_how_products_of_half_precision_are_summed_counts_where_there_are_some(dtype):
    step = fcg.graph_fn(lambda w, x: w.to(dtype) @ x.to(dtype))
    w, x = torch.ones(2, 2), torch.ones(2, 2)
    first = step(w, x)
    with setting(
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        lambda value: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", value),
        False,
    ):
        if dtype.itemsize < 4:
            with pytest.raises(BakedValueError, match="allow_bf16_reduced_precision_reduction"):
                step(w, x)
        else:
            assert torch.equal(step(w, x), first)
    assert torch.equal(step(w, x), first)


def test_precision_that_says_ieee_is_the_default_spelt_out():
    seen = watch(lambda x: x)
    with setting(lambda: torch.backends.cuda.matmul.fp32_precision, set_matmul, "ieee"):
        assert seen.unchanged()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_default_dtype_of_autocast_counts_where_the_step_says_autocast(device):
    def uses(x):
        with torch.autocast(device, enabled=False):
            return x @ x

    using, other = watch(uses), watch(lambda x: x)
    with setting(
        lambda: torch.get_autocast_dtype(device), lambda d: torch.set_autocast_dtype(device, d), torch.float32
    ):
        assert not using.unchanged()
        assert other.unchanged()
        with pytest.raises(BakedValueError, match=re.escape(f"torch.get_autocast_dtype('{device}')")):
            refuse(using)


def test_ambient_autocast_is_refused():
    seen = watch(lambda x: x)
    refuse_ambient_modes("train_step")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not seen.unchanged()
        with pytest.raises(BakedValueError, match="under autocast") as caught:
            refuse(seen, "train_step")
        with pytest.raises(BakedValueError, match="under autocast"):
            refuse_ambient_modes("train_step")
        # Made under autocast, the watch still says that off is what was traced.
        assert not watch(lambda x: x).unchanged()
    assert str(caught.value) == (
        "`train_step`: is called under autocast; the state is unchanged.\n"
        "  torch.autocast('cpu')  expected off   got torch.bfloat16\n"
        "A step runs as it was traced, with autocast off: what surrounds the call is not a part of it.\n"
        "To fix: put `with torch.autocast('cpu', dtype=...):` inside of `train_step`.\n"
        "Docs: help(functional_cg.BakedValueError)"
    )
    assert seen.unchanged()


def test_grad_and_inference_mode_are_the_steps_own():
    seen = watch(lambda x: x)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with mode:
            assert seen.unchanged()


def test_the_private_getters_agree_with_the_public_ones():
    for mode, value in zip(TORCH_MODES, modes_now(), strict=True):
        public = eval(mode.name, {"torch": torch})
        first = value[0] if isinstance(value, tuple) else value
        assert first == ("ieee" if public == "none" else public), mode.name


# -- messages and costs ----------------------------------------------------------------------------------------------


def test_message(cfg):
    seen = watch(lambda x: x * CFG.lr)
    cfg.lr = 0.2
    with pytest.raises(BakedValueError) as caught:
        refuse(seen, "train_step")
    assert str(caught.value) == (
        "`train_step`: reads a Python value that the graph has baked in, and that has changed since; "
        "the state is unchanged.\n"
        "  CFG.lr  traced 0.1   now 0.2\n"
        "Replay repeats kernels, not Python: it would go on with the old value.\n"
        "To fix: pass `CFG.lr` in the batch (a Python number in the inputs is live) or keep it in the state; if it "
        'seldom changes, make it an argument of its own and name it in `static_argnames=("lr",)`.\n'
        "Docs: help(functional_cg.BakedValueError)"
    )


def test_cost_of_an_entry(capsys):
    def cost(seen: HostWatch) -> float:
        return min(timeit.repeat(seen.unchanged, number=2000, repeat=5)) / 2000 * 1e6

    names = {f"number_{i}": i + 0.5 for i in range(100)}
    step: dict[str, Any] = dict(names)
    exec(compile(f"def step(x): return ({' + '.join(names)})", "train.py", "exec"), step)
    held = types.SimpleNamespace(cfg=types.SimpleNamespace(**names))
    chains: dict[str, Any] = {"held": held}
    exec(
        compile(f"def step(x): return ({' + '.join(f'held.cfg.{n}' for n in names)})", "train.py", "exec"),
        chains,
    )
    only_modes = cost(watch(lambda x: x))
    per_global, per_chain = ((cost(watch(n["step"])) - only_modes) / 100 for n in (step, chains))
    assert len(watch(step["step"]).names()) == len(watch(chains["step"]).names()) == 100
    line = f"host watch: modes {only_modes:.2f} µs, a global {per_global:.3f} µs, a chain {per_chain:.3f} µs"
    with capsys.disabled():
        print(line)  # noqa: T201


# -- what is made in the step, and what a collection ends ---------------------------------------------------------


def memoised(x: Tensor) -> Tensor:
    known: dict[int, Tensor] = {}

    def term(n: int) -> Tensor:
        if n not in known:
            known[n] = x if n == 0 else torch.sin(term(n - 1)) + term(n - 1)
        return known[n]

    return term(4)


def visited(x: Tensor) -> Tensor:
    seen: set[int] = set()

    def walk(n: int) -> Any:
        if n in seen or n > 5:
            return 0
        seen.add(n)
        return x * n + walk(n + 1) + walk(n + 2)

    return walk(1)  # type: ignore[no-any-return]


class Ring:
    """An object of the step that holds itself, and is read in part before it is whole."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.size = len(self.held)
        self.held["a"] = 2
        self.itself = self


def in_a_ring(x: Tensor) -> Tensor:
    ring = Ring()
    return x * ring.itself.held["a"] * len(ring.held.keys())


def in_a_default(x: Tensor) -> Tensor:
    def fibonacci(n: int, known: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
        if n < 2:
            return x
        if n not in known:
            known[n] = fibonacci(n - 1) + fibonacci(n - 2)
        return known[n]

    return fibonacci(8)


@pytest.mark.parametrize("function", [memoised, visited, in_a_default, in_a_ring], ids=lambda f: f.__name__)
def test_what_holds_itself_is_of_the_step(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in a cycle of references, so that it is still there when the step has ended, whatever else there is."""
    monkeypatch.setitem(globals(), "HUGE", [[number] for number in range(300_000)])
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + function(x).sum()}, {}))
    state, expected = fcg.place({"w": torch.zeros(())}), 0.0
    for call in range(3):
        x = torch.full((3,), float(call))
        state, _ = step(state, x)
        expected += float(function(x).sum())
        assert float(state["w"]) == pytest.approx(expected)
    assert step.stats.captures == 1


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_a_step_is_followed(collects: bool) -> None:
    """A collection would end somebody's generators, whose frames would be taken for the step's."""
    seen = []

    def step_fn(state: Any, x: Tensor) -> Any:
        seen.append(gc.isenabled())
        return {"w": state["w"] + x}, {}

    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with Follower(HostReads([])).following():
            step_fn({"w": torch.zeros(())}, torch.ones(()))
        assert (seen, gc.isenabled()) == ([False], collects)
    finally:
        (gc.enable if was else gc.disable)()


class _Given:
    """What a container gives out in place of the class that it stores."""

    scale = 2.0


def _giving(kind: type) -> type:
    class Giving(kind):
        def __getitem__(self, key: Any) -> Any:
            return super().__getitem__(key)()

    return Giving


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, defaultdict, list, tuple, collections.deque])
def test_a_container_may_give_out_something_else_than_it_stores(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As registries of activations do, which make a new one at each lookup."""
    in_dict = issubclass(kind, dict)
    stored = {0: _Given} if in_dict else [_Given]
    held = _giving(kind)(*([None] if kind is defaultdict else []), stored)
    step = fcg.graph_fn(lambda x: x * held[0].scale)
    for call in range(4):
        assert torch.equal(step(torch.full((2,), float(call))), torch.full((2,), 2.0 * call))
    monkeypatch.setattr(_Given, "scale", 3.0)
    with pytest.raises(fcg.BakedValueError, match="scale"):
        step(torch.ones(2))
    monkeypatch.undo()
    assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))
    if kind is not tuple:

        class Other(_Given):
            scale = 5.0

        kind.__setitem__(held, 0, Other)
        with pytest.raises(fcg.BakedValueError):
            step(torch.ones(2))
