"""The law of host reads: after a host value changes, the next call uses the new value or raises.

The table is generated: where a value lives, how it is read, how it is changed. Beside it stand spellings of their own.
"""

from __future__ import annotations

import array
import builtins
import collections
import contextlib
import contextvars
import copy
import dataclasses
import decimal
import fractions
import functools
import gc
import itertools
import operator
import queue
import random
import re
import threading
import types
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

import functional_cg as fcg
from functional_cg.pytree.sameness import Exact, same
from tests.host_law import X, law
from tests.shares import share


class Cfg:
    """Holds what a step reads."""

    def __init__(self, lr: float = 2.0) -> None:
        self.lr, self.table, self.list = lr, {"lr": lr}, [lr, 1.0]


@dataclasses.dataclass
class Data:
    lr: float = 2.0


@dataclasses.dataclass
class Sizes:
    """Its constructor asks whether an argument is the mark for no argument."""

    sizes: list[int] = dataclasses.field(default_factory=list)
    lr: float = 2.0


MARK: Any = [0]
OTHER: Any = [0]


def test_what_is_not_a_default_may_become_another_object() -> None:
    held = types.SimpleNamespace(made=Sizes([1, 2]), spare=[1])

    def train_step(state: Any, x: Any) -> Any:
        made = dataclasses.replace(held.made, lr=3.0)
        return state, x * made.lr + (100 if held.spare is MARK else made.sizes[1])

    step, state = fcg.graph_step(train_step, lowering="aten"), fcg.place({"a": torch.zeros(())})
    for call in range(8):
        x = torch.full((2,), float(call))
        state, metric = step(state, x)
        assert torch.equal(metric, x * 3.0 + 2)
        held.made, held.spare = copy.deepcopy(held.made), [call]
    held.spare = MARK
    with pytest.raises(fcg.BakedValueError, match=r"held.spare"):
        step(state, x)
    held.spare, held.made.sizes = [1], [1, 3]
    with pytest.raises(fcg.BakedValueError, match=r"held.made.sizes"):
        step(state, x)


def test_the_mark_itself_may_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    held = types.SimpleNamespace(spare=OTHER)
    step = fcg.graph_step(lambda state, x: (state, x * (1 if held.spare is MARK else 2)), lowering="aten")
    state, _ = step(fcg.place({"a": torch.zeros(())}), X)
    monkeypatch.setitem(globals(), "MARK", OTHER)
    with pytest.raises(fcg.BakedValueError, match="MARK"):
        step(state, X)


# -- the table ------------------------------------------------------------------------------------------------------

CELL: Any = None


def in_a_global(read: Any, cfg: Any) -> Any:
    globals()["CELL"] = cfg
    return lambda x, one: x * read(CELL)


def in_a_closure(read: Any, cfg: Any) -> Any:
    return lambda x, one: x * read(cfg)


def in_a_default(read: Any, cfg: Any) -> Any:
    def step(x: Any, one: Any, held: Any = cfg) -> Any:
        return x * read(held)

    return lambda x, one: step(x, one)


def in_an_attribute(read: Any, cfg: Any) -> Any:
    class Trainer:
        def __init__(self) -> None:
            self.cfg = cfg

        def step(self, x: Any, one: Any) -> Any:
            return x * read(self.cfg)

    return Trainer().step


def in_a_class(read: Any, cfg: Any) -> Any:
    class Trainer:
        held = cfg

        def step(self, x: Any, one: Any) -> Any:
            return x * read(type(self).held)

    return Trainer().step


def in_slots(read: Any, cfg: Any) -> Any:
    class Held:
        __slots__ = ("cfg",)

    held = Held()
    held.cfg = cfg  # type: ignore[attr-defined]
    return lambda x, one: x * read(held.cfg)  # type: ignore[attr-defined]


def in_a_tuple(read: Any, cfg: Any) -> Any:
    held = (1, cfg)
    return lambda x, one: x * read(held[-1])


def in_a_list_that_is_walked(read: Any, cfg: Any) -> Any:
    held = [cfg, cfg]

    def step(x: Any, one: Any) -> Any:
        for each in held:
            x = x * read(each)
        return x

    return step


def in_a_dict_of_lists(read: Any, cfg: Any) -> Any:
    held = {"a": [cfg]}
    return lambda x, one: x * sum([read(each) for each in held["a"]])


def in_a_linked_list(read: Any, cfg: Any) -> Any:
    held = types.SimpleNamespace(next=types.SimpleNamespace(next=None, cfg=cfg), cfg=None)

    def step(x: Any, one: Any) -> Any:
        node = held
        while node is not None:
            if node.cfg is not None:
                x = x * read(node.cfg)
            node = node.next
        return x

    return step


def in_a_partial(read: Any, cfg: Any) -> Any:
    return functools.partial(lambda held, x, one: x * read(held), cfg)


def in_a_partial_of_the_step(read: Any, cfg: Any) -> Any:
    return lambda x, one: functools.partial(lambda held, y: y * read(held), cfg)(x)


def in_an_object_of_the_step(read: Any, cfg: Any) -> Any:
    class Loss:
        def __init__(self, held: Any) -> None:
            self.held = held

        def __call__(self, x: Any) -> Any:
            return x * read(self.held)

    return lambda x, one: Loss(cfg)(x)


def through_grad(read: Any, cfg: Any) -> Any:
    def loss(x: Any, y: Any, held: Any) -> Any:
        return (x * y * read(held)).sum()

    return lambda x, one: fcg.grad(loss)(x, x.detach(), cfg)


def through_grad_by_name(read: Any, cfg: Any) -> Any:
    def loss(x: Any, *, held: Any) -> Any:
        return (x * x * read(held)).sum()

    return lambda x, one: fcg.value_and_grad(loss)(x, held=cfg)[1]


def through_torch_func(read: Any, cfg: Any) -> Any:
    return lambda x, one: torch.func.grad(lambda y, held: (y * y * read(held)).sum())(x, cfg)


def through_vmap(read: Any, cfg: Any) -> Any:
    return lambda x, one: torch.func.vmap(lambda y: y * read(cfg))(x)


def through_apply(read: Any, cfg: Any) -> Any:
    class Net(torch.nn.Module):
        def forward(self, x: Any, held: Any) -> Any:
            return x * read(held)

    apply, params, buffers = fcg.from_module(Net())
    return lambda x, one: apply(params, buffers, x, cfg)[0]


def through_a_backward(read: Any, cfg: Any) -> Any:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * read(cfg)

    return lambda x, one: fcg.grad(lambda y: Double.apply(y).sum())(x)


def through_a_generator(read: Any, cfg: Any) -> Any:
    def inner() -> Any:
        yield read(cfg)

    def outer() -> Any:
        yield from inner()

    return lambda x, one: x * sum(outer())


def through_stars(read: Any, cfg: Any) -> Any:
    held, named = [cfg], {"each": cfg}

    def first(each: Any) -> Any:
        return read(each)

    return lambda x, one: x * first(*held) * first(**named)


def through_reduce(read: Any, cfg: Any) -> Any:
    held = [cfg, cfg]
    return lambda x, one: x * functools.reduce(lambda total, each: total + read(each), held, 0.0)


def through_filter_and_chain(read: Any, cfg: Any) -> Any:
    held = [cfg]
    return lambda x, one: x * sum(read(c) for c in filter(lambda c: read(c) > 0, itertools.chain(held, [])))


def through_sorted(read: Any, cfg: Any) -> Any:
    held = [cfg]
    return lambda x, one: x * read(sorted(held, key=read)[0])


def through_a_property(read: Any, cfg: Any) -> Any:
    class Trainer:
        @property
        def held(self) -> Any:
            return cfg

    trainer = Trainer()
    return lambda x, one: x * read(trainer.held)


def through_a_descriptor(read: Any, cfg: Any) -> Any:
    class Held:
        def __get__(self, instance: Any, owner: Any) -> Any:
            return cfg

    class Trainer:
        held = Held()

    trainer = Trainer()
    return lambda x, one: x * read(trainer.held)


def through_getattr_of_a_class(read: Any, cfg: Any) -> Any:
    class Proxy:
        def __getattr__(self, name: str) -> Any:
            return cfg

    proxy = Proxy()
    return lambda x, one: x * read(proxy.anything)


def through_a_context(read: Any, cfg: Any) -> Any:
    @contextlib.contextmanager
    def held() -> Any:
        yield cfg

    def step(x: Any, one: Any) -> Any:
        with held() as each:
            return x * read(each)

    return step


def through_a_cache(read: Any, cfg: Any) -> Any:
    @functools.lru_cache
    def held() -> Any:
        return cfg

    return lambda x, one: x * read(held())


def through_cond(read: Any, cfg: Any) -> Any:
    return lambda x, one: fcg.cond(x.sum() > 0, lambda y: y * read(cfg), lambda y: y, x)


def through_a_bound_method(read: Any, cfg: Any) -> Any:
    class Held:
        def __init__(self) -> None:
            self.cfg = cfg

        def read(self) -> Any:
            return read(self.cfg)

    reader = Held().read
    return lambda x, one: x * reader()


def through_a_deep_copy(read: Any, cfg: Any) -> Any:
    return lambda x, one: x * read(copy.deepcopy(cfg)) * read(copy.copy(cfg))


def through_unpacking(read: Any, cfg: Any) -> Any:
    held = [cfg, 1, 2]

    def step(x: Any, one: Any) -> Any:
        first, *_ = [*held]
        return x * read(first)

    return step


def through_max(read: Any, cfg: Any) -> Any:
    held = {"a": cfg}
    return lambda x, one: x * read(max(held.values(), key=lambda each: read(each)))


PLACES = [
    value for name, value in list(globals().items()) if name.startswith(("in_a", "in_slots", "through_"))
]


def matched(cfg: Any) -> float:
    match cfg:
        case Cfg(lr=lr) | types.SimpleNamespace(lr=lr):
            return lr  # type: ignore[no-any-return]
    return 0.0


def matched_mapping(cfg: Any) -> float:
    match cfg.table:
        case {"lr": lr}:
            return lr  # type: ignore[no-any-return]
    return 0.0


def matched_sequence(cfg: Any) -> float:
    match cfg.list:
        case [lr, *_]:
            return lr  # type: ignore[no-any-return]
    return 0.0


def counted(cfg: Any) -> float:
    total, place = 0.0, 0
    while place < len(cfg.list):
        total += cfg.list[place]
        place += 1
    return total


def unpacked(cfg: Any) -> float:
    lr, _ = cfg.list
    return lr  # type: ignore[no-any-return]


def set_lr(cfg: Any) -> None:
    cfg.lr = 5.0


def set_table(cfg: Any) -> None:
    cfg.table["lr"] = 5.0


def set_list(cfg: Any) -> None:
    cfg.list[0] = 5.0


def set_all(cfg: Any) -> None:
    cfg.__dict__.update(lr=5.0, table={"lr": 5.0}, list=[5.0, 1.0])


READS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], None]]] = {
    "attribute": (lambda c: c.lr, set_lr),
    "getattr": (lambda c: getattr(c, "lr"), set_lr),  # noqa: B009
    "getattr, computed": (lambda c: getattr(c, "".join(["l", "r"])), set_lr),
    "vars": (lambda c: vars(c)["lr"], set_lr),
    "all of vars": (lambda c: {**vars(c)}["lr"], set_lr),
    "attrgetter": (lambda c: operator.attrgetter("lr")(c), set_lr),
    "item": (lambda c: c.table["lr"], set_table),
    "get": (lambda c: c.table.get("lr", 0.0), set_table),
    "values": (lambda c: sum(c.table.values()), set_table),
    "items": (lambda c: sum(v for _, v in c.table.items()), set_table),
    "dict": (lambda c: dict(c.table)["lr"], set_table),
    "list": (lambda c: c.list[0], set_list),
    "computed": (lambda c: c.list[len(c.list) - 2], set_list),
    "slice": (lambda c: c.list[:1][0], set_list),
    "sum": (lambda c: sum(c.list), set_list),
    "star": (lambda c: max(*c.list), set_list),
    "map": (lambda c: sum(list(map(float, c.list))), set_list),
    "zip": (lambda c: next(a for a, _ in zip(c.list, c.list, strict=True)), set_list),
    "while": (counted, set_list),
    "unpacked": (unpacked, set_list),
    "match": (matched, set_lr),
    "match a mapping": (matched_mapping, set_table),
    "match a sequence": (matched_sequence, set_list),
    "chained": (lambda c: c.lr if c.list else 0.0, set_lr),
    "emptiness": (lambda c: 3.0 if c.list else 1.0, lambda c: c.list.clear()),
    "length": (lambda c: float(len(c.list)), lambda c: c.list.append(1.0)),
    "membership": (lambda c: 3.0 if "wd" in c.table else 1.0, lambda c: c.table.update(wd=1)),
    "hasattr": (lambda c: 3.0 if hasattr(c, "wd") else 1.0, lambda c: setattr(c, "wd", 1)),
    "replaced": (lambda c: c.lr + c.list[0] + c.table["lr"], set_all),
}


# Each place with some reads, each read in some places; all of them take a minute.
PAIRED = share(product(PLACES, READS), 10)


@pytest.mark.parametrize(
    ("place", "read"), PAIRED, ids=[f"{place.__name__}-{read}" for place, read in PAIRED]
)
def test_call_change_call(place: Any, read: str) -> None:
    asked, change = READS[read]

    def make() -> Any:
        cfg = Cfg()
        return place(asked, cfg), lambda: change(cfg)

    assert isinstance(law(make), fcg.BakedValueError)


# -- spellings of their own -----------------------------------------------------------------------------------------


class Meta(type):
    rate = 2.0


def of_the_class() -> Any:
    class Trainer:
        k = 2.0

        def step(self, x: Any, one: Any) -> Any:
            return x * type(self).k

    return Trainer().step, lambda: setattr(Trainer, "k", 5.0)


def of_the_metaclass() -> Any:
    class Kind(type):
        rate = 2.0

    class Trainer(metaclass=Kind):
        pass

    return lambda x, one: x * Trainer.rate, lambda: setattr(Kind, "rate", 5.0)


def a_property_anew() -> Any:
    class Held:
        @property
        def lr(self) -> float:
            return 2.0

    held = Held()
    return lambda x, one: x * held.lr, lambda: setattr(Held, "lr", property(lambda self: 5.0))


def what_a_descriptor_holds() -> Any:
    class Rate:
        value = 2.0

        def __get__(self, instance: Any, owner: Any) -> float:
            return self.value

    class Held:
        lr = Rate()

    held, rate = Held(), vars(Held)["lr"]
    return lambda x, one: x * held.lr, lambda: setattr(rate, "value", 5.0)


def a_descriptor_anew() -> Any:
    class Rate:
        def __init__(self, value: float) -> None:
            self.value = value

        def __get__(self, instance: Any, owner: Any) -> float:
            return self.value

    class Held:
        lr = Rate(2.0)

    held = Held()
    return lambda x, one: x * held.lr, lambda: setattr(Held, "lr", Rate(5.0))


def a_method_anew() -> Any:
    class Held:
        def lr(self) -> float:
            return 2.0

    held = Held()
    return lambda x, one: x * held.lr(), lambda: setattr(Held, "lr", lambda self: 5.0)


def a_method_of_a_subclass() -> Any:
    class Base:
        def lr(self) -> float:
            return 2.0

    class Held(Base):
        pass

    held = Held()
    return lambda x, one: x * held.lr(), lambda: setattr(Held, "lr", lambda self: 5.0)


def a_method_of_one_object() -> Any:
    class Held:
        def lr(self) -> float:
            return 2.0

    held = Held()
    return lambda x, one: x * held.lr(), lambda: setattr(held, "lr", lambda: 5.0)


def a_class_method_anew() -> Any:
    class Held:
        @classmethod
        def lr(cls) -> float:
            return 2.0

    return lambda x, one: x * Held.lr(), lambda: setattr(Held, "lr", classmethod(lambda cls: 5.0))


def an_operator_anew() -> Any:
    class Held:
        def __rmul__(self, x: Any) -> Any:
            return x + 1

    held = Held()
    return lambda x, one: 3.0 * held + x, lambda: setattr(Held, "__rmul__", lambda self, x: x + 2)


def a_base_anew() -> Any:
    class Held:
        lr = 2.0

    class Base:
        lr = 5.0

    class Middle:
        pass

    class Of(Middle):
        pass

    Middle.lr = 2.0  # type: ignore[attr-defined]
    held = Of()
    return lambda x, one: x * held.lr, lambda: setattr(Middle, "lr", 5.0)  # type: ignore[attr-defined]


def a_long_list() -> Any:
    held = [1.0] * 400
    return lambda x, one: x * sum(held), lambda: put(held, 399, 7.0)


def a_large_array() -> Any:
    held = numpy.ones(5000)
    return lambda x, one: x * float(held.sum()), lambda: put(held, 4999, 7.0)


def a_view_of_an_array() -> Any:
    held = numpy.ones((4, 4))
    return lambda x, one: x * float(held.T[0, 3]), lambda: put(held, (3, 0), 7.0)


def the_size_of_an_array() -> Any:
    held = types.SimpleNamespace(array=numpy.ones(3))
    return lambda x, one: x * held.array.size, lambda: setattr(held, "array", numpy.ones(4))


def a_flag_of_numpy() -> Any:
    held = types.SimpleNamespace(on=numpy.bool_(True))
    return lambda x, one: x * 2 if held.on else x, lambda: setattr(held, "on", numpy.bool_(False))


def a_partial_anew() -> Any:
    held = types.SimpleNamespace(f=functools.partial(torch.mul, other=2.0))
    return (
        lambda x, one: held.f(x),
        lambda: setattr(held, "f", functools.partial(torch.mul, other=5.0)),
    )


def a_partial_bound_anew() -> Any:
    def scaled(x: Any, by: float) -> Any:
        return x * by

    held = functools.partial(scaled, by=2.0)

    def change() -> None:
        nonlocal held
        held = functools.partial(scaled, by=5.0)

    return lambda x, one: held(x), change


def a_builtin_that_is_shadowed() -> Any:
    names: dict[str, Any] = {}
    exec(compile("def step(x, one): return x * max(2.0, 1.0)", "train.py", "exec"), names)
    return names["step"], lambda: names.update(max=min)


def a_builtin_anew() -> Any:
    names: dict[str, Any] = {"__builtins__": builtins}
    exec(compile("def step(x, one): return x * added_by_hand()", "train.py", "exec"), names)
    builtins.added_by_hand = lambda: 2.0  # type: ignore[attr-defined]
    return names["step"], lambda: setattr(builtins, "added_by_hand", lambda: 5.0)


def a_number_among_builtins() -> Any:
    names: dict[str, Any] = {"__builtins__": builtins}
    exec(compile("def step(x, one): return x * scale_by_hand", "train.py", "exec"), names)
    builtins.scale_by_hand = 2.0  # type: ignore[attr-defined]
    return names["step"], lambda: setattr(builtins, "scale_by_hand", 5.0)


def a_forward_of_one_module() -> Any:
    module = torch.nn.ReLU()
    return lambda x, one: module(x), lambda: setattr(module, "forward", lambda x: x * 5)


def a_hook() -> Any:
    module = torch.nn.ReLU()
    return (
        lambda x, one: module(x),
        lambda: module.register_forward_hook(lambda module, args, out: out * 5),
    )


def a_hook_on_all_modules() -> Any:
    module = torch.nn.ReLU()
    remove_hooks()

    def change() -> None:
        handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 5)
        HOOKS.append(handle)

    return lambda x, one: module(x), change


HOOKS: list[Any] = []


def remove_hooks() -> None:
    while HOOKS:
        HOOKS.pop().remove()


@pytest.fixture(autouse=True)
def _no_hooks() -> Any:
    yield
    remove_hooks()


def a_module_of_a_list() -> Any:
    layers = torch.nn.ModuleList([torch.nn.LeakyReLU(0.1), torch.nn.LeakyReLU(0.2)])
    place = types.SimpleNamespace(at=0)
    return lambda x, one: layers[place.at](-x), lambda: setattr(layers[0], "negative_slope", 0.5)


def a_module_that_is_replaced() -> Any:
    layers = torch.nn.ModuleList([torch.nn.ReLU()])
    return lambda x, one: layers[0](-x), lambda: put(layers, 0, torch.nn.Tanh())


def a_schedule_of_torch() -> Any:
    w = torch.nn.Parameter(torch.ones(1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD([w], lr=2.0), gamma=0.5)

    def change() -> None:
        schedule.optimizer.step()
        schedule.step()

    return lambda x, one: x * schedule.get_last_lr()[0], change


def a_rate_of_torch() -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    return lambda x, one: x * optimizer.param_groups[0]["lr"], lambda: put(
        optimizer.param_groups[0], "lr", 5.0
    )


def equal_keys() -> Any:
    held = {"on": 1}
    return lambda x, one: x * 2 if held["on"] is True else x, lambda: put(held, "on", True)


def the_sign_of_zero() -> Any:
    held = [0.0]
    return lambda x, one: x / torch.tensor(held), lambda: put(held, 0, -0.0)


def a_decimal() -> Any:
    held = {"a": decimal.Decimal("1.0")}
    return lambda x, one: x * len(str(held["a"])), lambda: put(held, "a", decimal.Decimal("1.00"))


def an_alias() -> Any:
    first = Cfg()
    second = first

    def change() -> None:
        nonlocal second
        second = Cfg(5.0)

    return lambda x, one: x * first.lr * second.lr, change


def an_alias_as_an_argument() -> Any:
    def read(cfg: Any) -> Any:
        return cfg.lr

    held = {"a": Cfg()}
    held["b"] = held["a"]
    return lambda x, one: x * read(held["a"]) * read(held["b"]), lambda: put(held, "b", Cfg(5.0))


def a_deque() -> Any:
    held = collections.deque([2.0, 3.0])
    return lambda x, one: x * held[0], lambda: held.rotate()


def an_ordered_dict() -> Any:
    held = collections.OrderedDict(a=2.0, b=5.0)
    return lambda x, one: x * next(iter(held.values())), lambda: held.move_to_end("a")


def a_chain_map() -> Any:
    held = collections.ChainMap({}, {"lr": 2.0})
    return lambda x, one: x * held["lr"], lambda: put(held.maps[0], "lr", 5.0)


def a_user_list() -> Any:
    held = collections.UserList([2.0])
    return lambda x, one: x * held[0], lambda: put(held, 0, 5.0)


def a_default_dict() -> Any:
    held = collections.defaultdict(lambda: 2.0)
    return lambda x, one: x * held.get("lr", 2.0), lambda: put(held, "lr", 5.0)


def a_named_tuple_anew() -> Any:
    Rates = collections.namedtuple("Rates", "lr wd")
    held = [Rates(2.0, 1.0)]
    return lambda x, one: x * held[0].lr, lambda: put(held, 0, Rates(5.0, 1.0))


def a_fraction() -> Any:
    held = [fractions.Fraction(2)]
    return lambda x, one: x * float(held[0]), lambda: put(held, 0, fractions.Fraction(5))


def a_global_that_is_deleted() -> Any:
    names: dict[str, Any] = {"max": min}
    exec(compile("def step(x, one): return x * max(2.0, 5.0)", "train.py", "exec"), names)
    return names["step"], lambda: names.pop("max")


def a_function_in_a_table() -> Any:
    held = {"act": torch.relu}
    return lambda x, one: held["act"](-x), lambda: put(held, "act", torch.abs)


def code_of_a_function() -> Any:
    def helper(x: Any) -> Any:
        return x * 2

    return lambda x, one: helper(x), lambda: setattr(helper, "__code__", (lambda x: x * 5).__code__)


def code_of_a_method() -> Any:
    class Rule:
        def scaled(self, x: Any) -> Any:
            return x * 2

    rule = Rule()
    return lambda x, one: rule.scaled(x), lambda: setattr(
        Rule.scaled, "__code__", (lambda self, x: x * 5).__code__
    )


def a_cell_of_a_helper() -> Any:
    rate = 2.0

    def helper(x: Any) -> Any:
        return x * rate

    def change() -> None:
        nonlocal rate
        rate = 5.0

    return lambda x, one: helper(x), change


def a_callback_in_a_table() -> Any:
    def make(rate: float) -> Any:
        return lambda x: x * rate

    held = [make(2.0)]
    return lambda x, one: functools.reduce(lambda y, f: f(y), held, x), lambda: put(held, 0, make(5.0))


def a_set() -> Any:
    held = {2.0}
    return lambda x, one: x * sum(held), lambda: held.add(5.0)


def a_byte() -> Any:
    held = bytearray(b"ab")
    return lambda x, one: x * held[0], lambda: put(held, 0, 5)


def a_number_in_an_exception() -> Any:
    held = [0]

    def step(x: Any, one: Any) -> Any:
        try:
            return x * (1 / held[0])
        except ZeroDivisionError:
            return x

    return step, lambda: put(held, 0, 4)


def a_while_with_an_else() -> Any:
    held = [2.0, 3.0]

    def step(x: Any, one: Any) -> Any:
        place = 0
        while place < len(held) and held[place] < 2.5:
            x, place = x * held[place], place + 1
        else:
            x = x + 1
        return x

    return step, lambda: put(held, 1, 1.0)


def a_walrus() -> Any:
    held = Cfg()
    return lambda x, one: x * (lr := held.lr) * lr, lambda: setattr(held, "lr", 5.0)


def a_nested_comprehension() -> Any:
    held = [[Cfg()], [Cfg()]]
    return (
        lambda x, one: x * sum(c.lr for row in held for c in row if c.list),
        lambda: setattr(held[1][0], "lr", 5.0),
    )


def a_dict_comprehension() -> Any:
    held = {"a": Cfg(), "b": Cfg()}
    return (
        lambda x, one: x * {k: v.lr for k, v in held.items()}["b"],
        lambda: setattr(held["b"], "lr", 5.0),
    )


def a_variable_of_the_context() -> Any:
    held = contextvars.ContextVar("held", default=2.0)
    return lambda x, one: x * held.get(), lambda: held.set(5.0)


def an_object_in_the_context() -> Any:
    held: contextvars.ContextVar[Any] = contextvars.ContextVar("held")
    held.set(Cfg())
    return lambda x, one: x * held.get().lr, lambda: setattr(held.get(), "lr", 5.0)


def a_weak_reference() -> Any:
    cfg = Cfg()
    held = weakref.ref(cfg)
    return lambda x, one: x * held().lr, lambda: setattr(cfg, "lr", 5.0)


def a_weak_proxy() -> Any:
    cfg = Cfg()
    held = weakref.proxy(cfg)
    return lambda x, one: x * held.lr, lambda: setattr(cfg, "lr", 5.0)


def of_a_thread() -> Any:
    held = threading.local()
    held.lr = 2.0
    return lambda x, one: x * held.lr, lambda: setattr(held, "lr", 5.0)


def an_array_of_python() -> Any:
    held = array.array("d", [2.0])
    return lambda x, one: x * held[0], lambda: put(held, 0, 5.0)


def a_memoryview() -> Any:
    held = bytearray(b"ab")
    view = memoryview(held)
    return lambda x, one: x * view[0], lambda: put(held, 0, 5)


def a_bound_method_in_a_global() -> Any:
    get = {"lr": 2.0}.get
    return lambda x, one: x * get("lr"), lambda: put(get.__self__, "lr", 5.0)


def sorted_by_an_attribute() -> Any:
    held = [Cfg(2.0), Cfg(3.0)]
    return (
        lambda x, one: x * (1 if sorted(held, key=operator.attrgetter("lr"))[0] is held[0] else 2),
        lambda: setattr(held[0], "lr", 5.0),
    )


def put(held: Any, key: Any, value: Any) -> None:
    held[key] = value


CHANGES = [
    of_the_class, of_the_metaclass, a_property_anew, what_a_descriptor_holds, a_descriptor_anew, a_method_anew,
    a_method_of_a_subclass, a_method_of_one_object, a_class_method_anew, an_operator_anew, a_base_anew, a_long_list,
    a_large_array, a_view_of_an_array, the_size_of_an_array, a_flag_of_numpy, a_partial_anew, a_partial_bound_anew,
    a_builtin_that_is_shadowed, a_builtin_anew, a_number_among_builtins, a_forward_of_one_module, a_hook,
    a_hook_on_all_modules, a_module_of_a_list,
    a_module_that_is_replaced, a_schedule_of_torch, a_rate_of_torch, equal_keys, the_sign_of_zero, a_decimal, an_alias,
    an_alias_as_an_argument, a_deque, an_ordered_dict, a_chain_map, a_user_list, a_default_dict, a_named_tuple_anew,
    a_fraction, a_global_that_is_deleted, a_function_in_a_table, code_of_a_function, code_of_a_method,
    a_cell_of_a_helper,
    a_callback_in_a_table, a_set, a_byte, a_number_in_an_exception, a_while_with_an_else, a_walrus,
    a_nested_comprehension, a_dict_comprehension, a_variable_of_the_context, an_object_in_the_context, a_weak_reference,
    a_weak_proxy, of_a_thread, an_array_of_python, a_memoryview, a_bound_method_in_a_global, sorted_by_an_attribute,
]  # fmt: skip


@pytest.mark.parametrize("make", CHANGES, ids=lambda make: make.__name__)
def test_each_change_is_loud(make: Any) -> None:
    try:
        assert isinstance(law(make), fcg.BakedValueError)
    finally:
        for name in {"added_by_hand", "scale_by_hand"} & set(vars(builtins)):
            delattr(builtins, name)


# -- what goes on from call to call ---------------------------------------------------------------------------------


def a_generator() -> Any:
    def numbers() -> Any:
        while True:
            yield 2.0

    held = numbers()
    return lambda x: x * next(held)


def a_generator_that_is_walked() -> Any:
    held = (2.0 for _ in itertools.count())

    def step(x: Any) -> Any:
        for rate in held:
            return x * rate

    return step


def an_iterator_of_a_list() -> Any:
    held = iter([2.0] * 100)
    return lambda x: x * next(held)


def a_cycle() -> Any:
    held = itertools.cycle([2.0])
    return lambda x: x * next(held)


def a_count() -> Any:
    held = itertools.count()
    return lambda x: x * (1 if next(held) >= 0 else 2)


def a_zip_in_an_attribute() -> Any:
    held = types.SimpleNamespace(pairs=zip([2.0] * 9, [1.0] * 9, strict=True))
    return lambda x: x * next(held.pairs)[0]


def an_iterator_of_the_users() -> Any:
    class Numbers:
        at = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> float:
            self.at += 1
            return 2.0

    held = Numbers()
    return lambda x: x * next(held)


def a_list_that_is_popped() -> Any:
    held = [2.0] * 100
    return lambda x: x * held.pop(0)


def a_deque_that_is_popped() -> Any:
    held = collections.deque([2.0] * 100)
    return lambda x: x * held.popleft()


def a_dict_that_is_popped() -> Any:
    held = dict.fromkeys(range(100), 2.0)
    return lambda x: x * held.popitem()[1]


def a_queue() -> Any:
    held: queue.Queue[float] = queue.Queue()
    for _ in range(100):
        held.put(2.0)
    return lambda x: x * held.get()


def a_deque_that_rotates() -> Any:
    held = collections.deque([2.0, 2.0, 3.0, 3.0, 3.0, 3.0])

    def step(x: Any) -> Any:
        held.rotate(1)
        return x * (2.0 if held[0] else 1.0)

    return step


def a_count_of_the_class() -> Any:
    class Trainer:
        n = 0

        def step(self, x: Any) -> Any:
            type(self).n += 1
            return x * (1 if type(self).n else 2)

    return Trainer().step


def a_count_in_a_cell() -> Any:
    count = 0

    def step(x: Any) -> Any:
        nonlocal count
        count += 1
        return x * 2

    return step


def a_count_in_a_dict() -> Any:
    held: dict[str, int] = collections.defaultdict(int)

    def step(x: Any) -> Any:
        held["calls"] += 1
        return x * 2

    return step


def a_counter() -> Any:
    held: collections.Counter[str] = collections.Counter()

    def step(x: Any) -> Any:
        held.update(["calls"])
        return x * (2 if held["calls"] else 1)

    return step


def a_count_in_an_array() -> Any:
    held = numpy.zeros(1)

    def step(x: Any) -> Any:
        held[0] += 1
        return x * 2

    return step


def random_numbers_of_numpy() -> Any:
    held = numpy.random.default_rng(0)
    return lambda x: x * (2.0 if held.random() < 2 else 1.0)


def old_random_numbers_of_numpy() -> Any:
    held = types.SimpleNamespace(rng=numpy.random.RandomState(0))
    return lambda x: x * (2.0 if held.rng.rand() < 2 else 1.0)


def random_numbers_of_python() -> Any:
    held = random.Random(0)
    return lambda x: x * held.choice([2.0, 2.0])


def a_method_that_draws() -> Any:
    draw = random.Random(0).random
    return lambda x: x * (2.0 if draw() < 2 else 1.0)


def a_shuffle() -> Any:
    rng, held = random.Random(0), [2.0, 2.0]

    def step(x: Any) -> Any:
        rng.shuffle(held)
        return x * held[0]

    return step


ADVANCED = [
    a_generator, a_generator_that_is_walked, an_iterator_of_a_list, a_cycle, a_count, a_zip_in_an_attribute,
    an_iterator_of_the_users, a_list_that_is_popped, a_deque_that_is_popped, a_dict_that_is_popped, a_queue,
    a_deque_that_rotates, a_count_of_the_class, a_count_in_a_cell, a_count_in_a_dict, a_counter, a_count_in_an_array,
    random_numbers_of_numpy, old_random_numbers_of_numpy, random_numbers_of_python, a_method_that_draws, a_shuffle,
]  # fmt: skip


@pytest.mark.parametrize("make", ADVANCED, ids=lambda make: make.__name__)
def test_what_goes_on_from_call_to_call_is_refused(make: Any) -> None:
    """Also where both traces happen to get the same."""
    step = fcg.graph_fn(make())
    with pytest.raises(
        fcg.SideEffectError, match=r"(takes from what|changes a value|changes \d)(.|\n)*To fix: "
    ):
        step(X)


def an_iterator_of_the_step() -> Any:
    held = [2.0, 3.0]

    def step(x: Any) -> Any:
        each = iter(held)
        numbers = (rate for rate in held)
        queue_of_the_step = collections.deque(held)
        return x * next(each) * next(each) * next(numbers) * queue_of_the_step.popleft()

    return step


def random_numbers_of_the_step() -> Any:
    return lambda x: x * random.Random(0).random() * float(numpy.random.default_rng(0).random())


def a_log() -> Any:
    held: list[float] = []

    def step(x: Any) -> Any:
        held.append(1.0)
        return x * 2

    return step


@pytest.mark.parametrize("make", [an_iterator_of_the_step, random_numbers_of_the_step, a_log])
def test_what_a_step_makes_for_itself_is_its_own(make: Any) -> None:
    step = fcg.graph_fn(make())
    for _ in range(3):
        assert torch.equal(step(X), make()(X))


# -- states, batches, static arguments --------------------------------------------------------------------------------


def test_attributes_of_a_states_class_are_watched() -> None:
    class State(fcg.TrainState):
        rate = 2.0

        def scaled(self, x: Any) -> Any:
            return x * self.rate

    state = State.create(params={"w": X}, optimizer=fcg.optim.sgd(0.1))
    step = fcg.graph_fn(lambda state, x: state.scaled(x))
    assert step(state, X).tolist() == [2.0, 4.0]
    State.rate = 5.0
    with pytest.raises(fcg.BakedValueError, match=r"rate  traced 2.0   now 5.0"):
        step(state, X)
    State.rate = 2.0
    step(state, X)
    State.scaled = lambda self, x: x * 7  # type: ignore[method-assign,assignment]
    with pytest.raises(fcg.BakedValueError, match="scaled  traced as defined then   now defined anew"):
        step(state, X)


def test_a_method_of_a_batch_is_watched() -> None:
    @fcg.tree.register_dataclass
    @dataclasses.dataclass
    class Batch:
        x: Any

        def scaled(self) -> Any:
            return self.x * 2

    step = fcg.graph_fn(lambda batch: batch.scaled())
    assert step(Batch(X)).tolist() == [2.0, 4.0]
    Batch.scaled = lambda self: self.x * 5  # type: ignore[method-assign]
    with pytest.raises(fcg.BakedValueError, match=r"Batch\.scaled"):
        step(Batch(X))


class WithSlots:
    __slots__ = ("lr",)

    def __init__(self) -> None:
        self.lr = 2.0


@pytest.mark.parametrize("kind", [WithSlots, Cfg])
def test_what_is_read_of_a_static_field_is_watched(kind: Any) -> None:
    @fcg.tree.register_dataclass(static=["cfg"])
    @dataclasses.dataclass
    class State:
        w: Any
        cfg: Any

    cfg = types.SimpleNamespace(inner=kind())
    step = fcg.graph_fn(lambda state: state.w * state.cfg.inner.lr)
    state: Any = fcg.place(State(X, cfg))
    assert step(state).tolist() == [2.0, 4.0]
    cfg.inner.lr = 5.0
    with pytest.raises(fcg.BakedValueError, match=r"inner\.lr  traced 2.0   now 5.0"):
        step(state)


@pytest.mark.parametrize("kind", [WithSlots, Cfg])
def test_what_is_read_of_a_static_argument_is_watched(kind: Any) -> None:
    step = fcg.graph_fn(lambda x, cfg: x * cfg.lr, static_argnames="cfg")
    cfg = kind()
    assert step(X, cfg=cfg).tolist() == [2.0, 4.0]
    cfg.lr = 5.0
    with pytest.raises(fcg.BakedValueError, match=r"cfg\.lr  traced 2.0   now 5.0"):
        step(X, cfg=cfg)


# -- modes around a call ----------------------------------------------------------------------------------------------


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.Tensor.add else out


AROUND = {
    "Doubles()": Doubles,
    "hooks on saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: 2 * x),
    "hooks on saved tensors, of torch": torch.autograd.graph.save_on_cpu,
}


@pytest.mark.parametrize(("name", "mode"), AROUND.items(), ids=AROUND)
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_mode_around_a_call_is_refused(name: str, mode: Any, calls: int) -> None:
    """Around the first call it would be a part of the graph for ever, around a later one nothing."""
    step = fcg.graph_step(lambda p, x: (p, fcg.grad(lambda p: (p["w"].exp() + x).sum())(p)))
    state: Any = fcg.place({"w": X})
    for _ in range(calls):
        state, _ = step(state, X)
    name = name.partition(",")[0]
    with (
        mode(),
        pytest.raises(fcg.BakedValueError, match=rf"is called under {re.escape(name)}(.|\n)*inside of"),
    ):
        step(state, X)
    state, grads = step(state, X)
    assert torch.equal(grads["w"], X.exp())
    assert state.generation == calls + 1


def test_a_mode_in_the_step_is_a_part_of_it() -> None:
    def f(x: Any) -> Any:
        with Doubles():
            return x.add(1)

    assert torch.equal(fcg.graph_fn(f)(X), f(X))


def test_a_default_device_is_compared() -> None:
    with torch.device("cpu"):
        step = fcg.graph_fn(lambda x: x + torch.ones(2))
        step(X)
    assert step(X).tolist() == [2.0, 3.0]
    with torch.device("meta"), pytest.raises(fcg.BakedValueError, match=r"get_default_device\(\)  traced"):
        step(X)


def test_another_part_of_a_state_is_another_argument() -> None:
    """Of one arena, one layout and one generation: what tells them apart is where they start."""
    double = fcg.graph_fn(lambda part: part["w"] * 2)
    state: Any = fcg.place({"p": {"w": torch.tensor([1.0])}, "q": {"w": torch.tensor([2.0])}})
    for part, twice in (("p", 2.0), ("q", 4.0), ("p", 2.0), ("q", 4.0)):
        assert double(state[part]).item() == twice


@dataclasses.dataclass(frozen=True)
class D:
    value: Any


PAIRS = [
    (D(True), D(1)),
    (D(2), D(2.0)),
    (D((0.0,)), D((-0.0,))),
    (D(D(1)), D(D(True))),
    (2, 2.0),
    (1, True),
    (0.0, -0.0),
    ((1, (2.0,)), (1, (2,))),
    (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    (frozenset({1}), frozenset({True})),
    (frozenset({(0.0,)}), frozenset({(-0.0,)})),
    (complex(0.0, 0.0), complex(0.0, -0.0)),
    (numpy.float32(0.0), numpy.float32(-0.0)),
    (fractions.Fraction(1), 1),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_static_arguments_that_python_calls_equal_have_graphs_of_their_own(one: Any, other: Any) -> None:
    step = fcg.graph_fn(lambda x, how: x * len(repr(how)), static_argnames="how")
    for how in (one, other, one, other):
        assert step(X, how=how).tolist() == (X * len(repr(how))).tolist()
    assert step.stats.traces == 2


@pytest.mark.parametrize(("one", "other"), [pair for pair in PAIRS if isinstance(pair[0], D)])
def test_input_objects_that_python_calls_equal_are_other_layouts(one: Any, other: Any) -> None:
    step = fcg.graph_fn(lambda x, how: x * len(repr(how)), max_captures=2)
    for how in (one, other, one, other):
        assert step(X, how).tolist() == (X * len(repr(how))).tolist()
    assert step.stats.traces == 2


VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(0, 2), st.sampled_from([0.0, -0.0, 1.0, 2.0, "a", b"a", None])),
    lambda parts: st.one_of(
        st.lists(parts, max_size=2).map(tuple), st.frozensets(parts, max_size=2), parts.map(D)
    ),
    max_leaves=4,
)


@given(VALUES, VALUES)
@example(0.0, -0.0)
@example(D(((1,),)), D(((True,),)))
def test_values_are_the_same_if_and_only_if_their_text_is(one: Any, other: Any) -> None:
    def text(value: Any) -> Any:
        if isinstance(value, frozenset):
            return "set", frozenset(map(text, value))
        if isinstance(value, tuple):
            return tuple(map(text, value))
        return ("D", text(value.value)) if isinstance(value, D) else repr(value)

    assert same(one, other) is (text(one) == text(other))
    assert (Exact(one) == Exact(other)) is same(one, other)
    assert same(copy.deepcopy(one), one)
    if same(one, other):
        assert hash(Exact(one)) == hash(Exact(other))


def test_the_order_of_a_dict_counts() -> None:
    one = collections.OrderedDict(a=1, b=2)
    other = collections.OrderedDict(b=2, a=1)
    assert same(one, collections.OrderedDict(a=1, b=2))
    assert not same(one, other)
    assert not same(dict(one), dict(other))


def collecting(
    held: contextvars.ContextVar[Any], x: torch.Tensor, *, asks_after: bool = False
) -> torch.Tensor:
    """Sets a context variable, reads it and resets it, as libraries do that collect what layers compute."""
    token = held.set({"seen": [], "scale": 2.0})
    try:
        held.get()["seen"].append(x)
        y = held.get()["seen"][0] * held.get()["scale"]
    finally:
        held.reset(token)
    return y * held.get() if asks_after else y


def test_a_variable_of_the_context_that_the_step_sets_is_not_read() -> None:
    held: contextvars.ContextVar[Any] = contextvars.ContextVar("held", default=3.0)
    step = fcg.graph_fn(lambda state, x: collecting(held, x) + state["w"])
    state = fcg.place({"w": torch.ones(2)})
    for number in range(16):
        held.set(float(number))
        x = torch.randn(2)
        assert torch.equal(step(state, x), x * 2 + 1)


def test_a_variable_of_the_context_is_read_once_the_step_has_reset_it() -> None:
    held: contextvars.ContextVar[Any] = contextvars.ContextVar("held", default=3.0)
    step = fcg.graph_fn(lambda state, x: collecting(held, x, asks_after=True))
    state = fcg.place({"w": torch.ones(2)})
    assert torch.equal(step(state, torch.ones(2)), torch.full((2,), 6.0))
    held.set(5.0)
    with pytest.raises(fcg.BakedValueError, match="held"):
        step(state, torch.ones(2))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_function_that_a_library_alone_holds_also_among_what_the_collector_leaves_alone(
    frozen: bool,
) -> None:
    """As after ``gc.freeze()``, which many training scripts call once everything is loaded."""
    scale = 2.0

    class Scaled:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    def flat(scaled: Scaled) -> tuple[list[torch.Tensor], None]:
        return [scaled.value * scale], None

    torch.utils._pytree.register_pytree_node(Scaled, flat, lambda children, _: Scaled(*children))
    step = fcg.graph_fn(lambda x: torch.utils._pytree.tree_flatten(Scaled(x))[0][0])
    gc.unfreeze()
    if frozen:
        gc.freeze()
    assert step(torch.ones(2)).tolist() == [2, 2]
    assert (gc.get_freeze_count() > 10_000) == frozen  # from 3.12 on, immortal objects are there always
    scale = 3.0
    with pytest.raises(fcg.BakedValueError, match=r"scale  traced 2\.0   now 3\.0"):
        step(torch.ones(2))
