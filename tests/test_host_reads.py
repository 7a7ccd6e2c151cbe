"""A law: call, change, call. What a step reads on the host is the old value nowhere: the call is right, or it raises.

The table is generated: where a value lives, how it is read, how it is changed. Beside it stand spellings of their own.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import decimal
import fractions
import functools
import itertools
import operator
import queue
import random
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_cg as fcg

X = torch.tensor([1.0, 2.0])


class Cfg:
    """Holds what a step reads."""

    def __init__(self, lr: float = 2.0) -> None:
        self.lr, self.table, self.list = lr, {"lr": lr}, [lr, 1.0]


@dataclasses.dataclass
class Data:
    lr: float = 2.0


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return [leaf.tolist() for leaf in fcg.tree.leaves(call())]
    except fcg.FunctionalCGError as error:
        return error


def law(make: Callable[[], tuple[Callable[[Any, Any], Any], Callable[[], Any]]], *, refused: bool = False) -> Any:
    """Call, change, call: equal to eager, or loud. `make` gives a function of a tensor and a change."""
    eager, change = make()
    expected = [eager(X, 1.0)]
    change()
    expected.append(eager(X, 1.0))
    scale, change = make()
    step = fcg.graph_fn(scale)
    first = outcome(lambda: step(X, 1.0))
    if isinstance(first, fcg.FunctionalCGError):
        return first
    assert first == [expected[0].tolist()]
    again = outcome(lambda: step(X, 1.0))
    if isinstance(again, fcg.FunctionalCGError):
        return again
    change()
    second = outcome(lambda: step(X, 1.0))
    if isinstance(second, fcg.BakedValueError):
        assert "To fix:" in str(second)
        return second
    assert second == [expected[1].tolist()], "the old value, in silence"
    assert not refused, "nothing has changed"
    return second


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
    return lambda x, one: x * [read(each) for each in held["a"]][0]


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
    "items": (lambda c: [v for _, v in c.table.items()][0], set_table),
    "dict": (lambda c: dict(c.table)["lr"], set_table),
    "list": (lambda c: c.list[0], set_list),
    "computed": (lambda c: c.list[len(c.list) - 2], set_list),
    "slice": (lambda c: c.list[:1][0], set_list),
    "sum": (lambda c: sum(c.list), set_list),
    "star": (lambda c: max(*c.list), set_list),
    "map": (lambda c: list(map(float, c.list))[0], set_list),
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


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_call_change_call(place: Any, read: str) -> None:
    asked, change = READS[read]

    def make() -> Any:
        cfg = Cfg()
        return place(asked, cfg), lambda: change(cfg)

    assert isinstance(law(make), fcg.BakedValueError)
