"""The law of host reads for what is not written in Python: it is called, handed on, partly bound, or keeps results.

The table is generated: what holds a number, how compiled code gets at it, and who calls that. Beside it stand what
classes have and derive from, views, and the answers of things with a hidden state.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import operator
import queue
import re
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import functional_cg as fcg
from tests.host_law import X, law


class Slotted:
    __slots__ = ("k",)

    def __init__(self) -> None:
        self.k = 2.0


class Held:
    def __init__(self) -> None:
        self.k = 2.0


# What holds the number, by what it is found there, and how it is exchanged.
HOLDERS: dict[str, tuple[Callable[[], Any], Any, Callable[[Any], Any]]] = {
    "dict": (lambda: {"k": 2.0}, "k", lambda held: held.update(k=5.0)),
    "ordered dict": (lambda: collections.OrderedDict(k=2.0), "k", lambda held: held.update(k=5.0)),
    "proxy": (lambda: types.MappingProxyType({"k": [2.0]}), "k", lambda held: held["k"].__setitem__(0, 5.0)),
    "list": (lambda: [0.0, 2.0], 1, lambda held: held.__setitem__(1, 5.0)),
    "deque": (lambda: collections.deque([0.0, 2.0]), 1, lambda held: held.__setitem__(1, 5.0)),
    "array": (lambda: numpy.array([0.0, 2.0]), 1, lambda held: held.__setitem__(1, 5.0)),
    "array of lists": (lambda: objects([0.0], [2.0]), 1, lambda held: held[1].__setitem__(0, 5.0)),
    "record": (lambda: records(2.0), 0, lambda held: held.k.__setitem__(0, 5.0)),
    "object": (Held, "k", lambda held: setattr(held, "k", 5.0)),
    "slots": (Slotted, "k", lambda held: setattr(held, "k", 5.0)),
    "namespace": (lambda: types.SimpleNamespace(k=2.0), "k", lambda held: setattr(held, "k", 5.0)),
}


def objects(*held: Any) -> Any:
    array = numpy.empty(len(held), dtype=object)
    array[:] = held
    return array


def records(number: float) -> Any:
    return numpy.array([(number,)], dtype=[("k", float)]).view(numpy.recarray)


# What gives the number, of a holder and what it is found by: all of it compiled.
GETTERS: dict[str, Callable[[Any, Any], Callable[[Any], Any]]] = {
    "bound": lambda held, key: held.__getitem__ if hasattr(held, "__getitem__") else held.__getattribute__,
    "partial": lambda held, key: functools.partial(
        operator.getitem if hasattr(held, "__getitem__") else getattr, held
    ),
    "getter": lambda held, key: functools.partial(
        (operator.itemgetter if hasattr(held, "__getitem__") else operator.attrgetter)(key), held
    ),
    "partial of a partial": lambda held, key: functools.partial(
        functools.partial(operator.getitem if hasattr(held, "__getitem__") else getattr), held
    ),
}

# Who calls it.
CALLERS: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "the step": lambda get, key: get(key),
    "map": lambda get, key: next(iter(list(map(get, [key])))),
    "a map that is walked": lambda get, key: next(number for number in map(get, (key,))),
    "starmap": lambda get, key: next(iter(list(itertools.starmap(get, [(key,)])))),
    "a partial": lambda get, key: functools.partial(get, key)(),
    "an unpacked map": lambda get, key: max(*map(get, [key, key]), key=number),
}


def number(found: Any) -> float:
    return float(numpy.asarray(getattr(found, "k", found), dtype=float).ravel()[0])


CASES = [
    (holder, getter, caller)
    for (n, holder), (m, getter), (o, caller) in itertools.product(
        enumerate(HOLDERS), enumerate(GETTERS), enumerate(CALLERS)
    )
    if (getter != "getter" or caller == "the step") and (n + m + o) % 2 == 0
]


@pytest.mark.parametrize(("holder", "getter", "caller"), CASES)
def test_what_compiled_callables_read_is_loud(holder: str, getter: str, caller: str) -> None:
    make_held, key, change = HOLDERS[holder]

    def make() -> Any:
        held = make_held()
        get = GETTERS[getter](held, key)
        call = CALLERS[caller] if getter != "getter" else lambda get, key: get()
        return lambda x, one: x * number(call(get, key)), lambda: change(held)

    assert isinstance(law(make), fcg.BakedValueError)


# -- what is called, and keeps what it returned ------------------------------------------------------------------------


def a_cache_that_holds_a_dict() -> Any:
    @functools.cache
    def settings() -> dict[str, float]:
        return {"lr": 2.0}

    settings()
    return lambda x, one: x * settings()["lr"], lambda: settings().update(lr=5.0)


def a_cold_cache() -> Any:
    @functools.lru_cache
    def settings(name: str) -> Any:
        return types.SimpleNamespace(lr=2.0)

    return lambda x, one: x * settings("a").lr, lambda: setattr(settings("a"), "lr", 5.0)


def a_cache_that_is_emptied() -> Any:
    rate = [2.0]

    @functools.cache
    def settings(one: float) -> float:
        return rate[0] * one

    def change() -> None:
        rate[0] = 5.0
        settings.cache_clear()

    settings(1.0)
    return lambda x, one: x * settings(1.0), change


def a_cached_method() -> Any:
    class Config:
        @functools.cache  # noqa: B019
        def table(self) -> list[float]:
            return [2.0]

    config = Config()
    config.table()
    return lambda x, one: x * config.table()[0], lambda: config.table().__setitem__(0, 5.0)


def a_keyword_default() -> Any:
    def scale(x: Any, *, k: float = 2.0) -> Any:
        return x * k

    defaults: Any = scale.__kwdefaults__
    return lambda x, one: scale(x), lambda: defaults.__setitem__("k", 5.0)


# -- views, holders of the standard library ----------------------------------------------------------------------------


def a_view_of_items() -> Any:
    held = {"a": 2.0}
    view = held.items()
    return lambda x, one: x * sum(value for _, value in view), lambda: held.update(a=5.0)


def a_view_of_keys() -> Any:
    held = {"a": 2.0}
    view = held.keys()
    return lambda x, one: x * len(view), lambda: held.update(b=5.0)


def a_view_of_values() -> Any:
    held = {"a": 2.0}
    view = held.values()
    return lambda x, one: x * max(view), lambda: held.update(a=5.0)


def what_a_chain_lacks() -> Any:
    held: Any = collections.ChainMap({}, {"z": 2.0})
    return lambda x, one: x * held.get("k", 1.0), lambda: held.maps[1].update(k=5.0)


def whether_a_chain_has_a_key() -> Any:
    held: Any = collections.ChainMap({}, {"z": 2.0})
    return lambda x, one: x * (3.0 if "k" in held else 2.0), lambda: held.update(k=5.0)


def a_weak_key() -> Any:
    key = Held()
    held: Any = weakref.WeakKeyDictionary({key: 2.0})
    return lambda x, one: x * held[key], lambda: held.update({key: 5.0})


def a_weak_value() -> Any:
    one_held, other = Held(), Held()
    other.k = 5.0
    held: Any = weakref.WeakValueDictionary({"k": one_held})
    keep = [one_held, other]
    return lambda x, one: x * held["k"].k, lambda: (held.update(k=other), keep)


# -- attributes, spelled otherwise -------------------------------------------------------------------------------------


def as_object_stores_it() -> Any:
    held = Held()
    return lambda x, one: x * object.__getattribute__(held, "k"), lambda: setattr(held, "k", 5.0)


def through_a_lookup_of_its_own() -> Any:
    class Doubled:
        k = 2.0

        def __getattribute__(self, name: str) -> Any:
            value = object.__getattribute__(self, name)
            return 2 * value if isinstance(value, float) else value

    held = Doubled()
    return lambda x, one: x * held.k, lambda: setattr(held, "k", 5.0)


def in_a_format() -> Any:
    held = types.SimpleNamespace(k=2)
    return lambda x, one: x * float("{0.k}".format(held)), lambda: setattr(held, "k", 5)  # noqa: UP030, UP032


def in_a_format_by_name() -> Any:
    held = types.SimpleNamespace(d={"a": 2})
    return lambda x, one: x * float("{c.d[a]}".format(c=held)), lambda: held.d.update(a=5)  # noqa: UP032


MODULE = types.ModuleType("a_module_of_the_test")


def in_the_namespace_of_a_module() -> Any:
    vars(MODULE)["k"] = 2.0
    return lambda x, one: x * vars(MODULE)["k"], lambda: setattr(MODULE, "k", 5.0)


def in_a_directory() -> Any:
    held = Held()
    return lambda x, one: x * len([name for name in dir(held) if name[0] != "_"]), lambda: setattr(
        held, "b", 1
    )


def of_which_there_are_subclasses() -> Any:
    class Base:
        pass

    kinds = [type("First", (Base,), {})]
    return lambda x, one: x * len(Base.__subclasses__()), lambda: kinds.append(type("Second", (Base,), {}))


# -- classes -----------------------------------------------------------------------------------------------------------


def a_shadow_above() -> Any:
    class Base:
        k = 2.0

    class Middle(Base):
        pass

    class Last(Middle):
        def rate(self) -> float:
            return super().k

    held = Last()
    return lambda x, one: x * held.rate(), lambda: setattr(Middle, "k", 5.0)


def a_method_above() -> Any:
    class Base:
        def rate(self) -> float:
            return 2.0

    class Middle(Base):
        pass

    class Last(Middle):
        def rate(self) -> float:
            return super().rate()

    held = Last()
    return lambda x, one: x * held.rate(), lambda: setattr(Middle, "rate", lambda self: 5.0)


def another_base() -> Any:
    class One:
        pass

    class Two:
        pass

    class Last(One):
        pass

    held = Last()
    return (
        lambda x, one: x * (2.0 if isinstance(held, One) else 5.0),
        lambda: setattr(Last, "__bases__", (Two,)),
    )


def a_length_from_now_on() -> Any:
    class Empty:
        pass

    held = Empty()
    return lambda x, one: x * (2.0 if held else 5.0), lambda: setattr(Empty, "__len__", lambda self: 0)


def an_equality_from_now_on() -> Any:
    class One:
        pass

    one_held, other = One(), One()
    return (
        lambda x, one: x * (5.0 if one_held == other else 2.0),
        lambda: setattr(One, "__eq__", lambda self, other: True),
    )


# -- answers -----------------------------------------------------------------------------------------------------------


def an_event() -> Any:
    event = threading.Event()
    return lambda x, one: x * (5.0 if event.is_set() else 2.0), event.set


def a_level() -> Any:
    logger = logging.getLogger("of the test of levels")
    logger.setLevel(logging.WARNING)
    return (
        lambda x, one: x * (5.0 if logger.isEnabledFor(logging.INFO) else 2.0),
        lambda: logger.setLevel(logging.DEBUG),
    )


def a_lock() -> Any:
    lock = threading.Lock()
    return lambda x, one: x * (5.0 if lock.locked() else 2.0), lock.acquire


def the_length_of_a_queue() -> Any:
    held: Any = queue.SimpleQueue()
    return lambda x, one: x * (2.0 if held.empty() else 5.0), lambda: held.put(1)


CHANGES = [
    a_cache_that_holds_a_dict, a_cold_cache, a_cache_that_is_emptied, a_cached_method, a_keyword_default,
    a_view_of_items, a_view_of_keys, a_view_of_values, what_a_chain_lacks, whether_a_chain_has_a_key, a_weak_key,
    a_weak_value, as_object_stores_it, through_a_lookup_of_its_own, in_a_format, in_a_format_by_name,
    in_the_namespace_of_a_module, in_a_directory, a_shadow_above, a_method_above, another_base, a_length_from_now_on,
    an_equality_from_now_on, an_event, a_level, a_lock, the_length_of_a_queue, of_which_there_are_subclasses,
]  # fmt: skip


@pytest.mark.parametrize("make", CHANGES, ids=lambda make: make.__name__)
def test_each_change_is_loud(make: Any) -> None:
    assert isinstance(law(make), fcg.BakedValueError)


class Link:
    def __init__(self, after: Any) -> None:
        self.after, self.k = after, 2.0


def the_end_of_a_long_chain() -> Any:
    last = first = Link(None)
    for _ in range(1500):
        first = Link(first)

    def scale(x: Any, one: Any) -> Any:
        link = first
        while link.after is not None:
            link = link.after
        return x * link.k

    return scale, lambda: setattr(last, "k", 5.0)


def test_a_long_chain_is_followed_to_its_end() -> None:
    assert isinstance(law(the_end_of_a_long_chain), fcg.BakedValueError)


# -- what goes on from call to call ------------------------------------------------------------------------------------

TAKEN: dict[str, Callable[[Any], Any]] = {
    "a partial": lambda it: functools.partial(next, it)(),
    "a map": lambda it: next(iter(list(map(next, [it])))),
    "a bound method": lambda it: it.__next__(),
    "a bound method in a map": lambda it: sum(itertools.starmap(it.__next__, [()])),
    "a partial of a partial": lambda it: functools.partial(functools.partial(next), it)(),
    "an islice": lambda it: sum(itertools.islice(it, 1)),
}


@pytest.mark.parametrize("taken", TAKEN)
def test_an_iterator_that_compiled_code_takes_from_is_refused(taken: str) -> None:
    """Also where both traces get the same."""
    numbers = itertools.repeat(2.0)
    step = fcg.graph_fn(lambda x: x * TAKEN[taken](numbers))
    with pytest.raises(fcg.SideEffectError, match=r"(takes from what|changes)(.|\n)*To fix: "):
        step(X)


POPPED: dict[str, Callable[[], Any]] = {
    "popleft": lambda: functools.partial(collections.deque([2.0] * 40).popleft),
    "pop": lambda: functools.partial(([2.0] * 40).pop, 0),
    "a queue": lambda: filled(queue.SimpleQueue()).get,
    "a queue, partly bound": lambda: functools.partial(filled(queue.SimpleQueue()).get, timeout=1),
}


def filled(held: Any) -> Any:
    for _ in range(40):
        held.put(2.0)
    return held


@pytest.mark.parametrize("popped", POPPED)
def test_what_compiled_code_pops_is_refused(popped: str) -> None:
    pop = POPPED[popped]()
    step = fcg.graph_fn(lambda x: x * pop())
    with pytest.raises(fcg.SideEffectError, match=r"(takes from what|changes)(.|\n)*To fix: "):
        step(X)


# -- what is no change -------------------------------------------------------------------------------------------------


def a_number_more_in_the_class() -> Any:
    class Config:
        k = 2.0

    held = Config()
    return lambda x, one: x * held.k, lambda: setattr(Config, "other", 5.0)


def a_cache_asked_by_others() -> Any:
    @functools.cache
    def settings(name: str) -> float:
        return 2.0

    return lambda x, one: x * settings("a"), lambda: settings("b")


def another_key_of_a_dict() -> Any:
    held = {"k": 2.0, "n": 1.0}
    get = functools.partial(held.get)
    return lambda x, one: x * get("k"), lambda: None


def a_pattern() -> Any:
    pattern = re.compile("([0-9]+)")
    return lambda x, one: x * float(pattern.match("25")[1]), lambda: pattern.match("7")  # type: ignore[index]


def a_lock_that_is_held_meanwhile() -> Any:
    lock = threading.Lock()

    def scale(x: Any, one: Any) -> Any:
        with lock:
            return x * 2.0

    return scale, lambda: None


def a_message_for_the_log() -> Any:
    logger = logging.getLogger("of the test of calls")

    def scale(x: Any, one: Any) -> Any:
        logger.debug("scaled %s", tuple(x.shape))
        return x * 2.0

    return scale, lambda: logger.warning("another")


def a_text() -> Any:
    return lambda x, one: x * float("{:d}".format(x.shape[0])), lambda: None  # noqa: UP032


def a_cache_of_shapes() -> Any:
    @functools.lru_cache
    def half(n: int) -> int:
        return n // 2

    return lambda x, one: x * half(x.shape[0]), lambda: half(64)


class NeverAsked:
    """It is called, and not compared."""

    def __call__(self, x: Any) -> Any:
        return 2 * x

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    __hash__ = None  # type: ignore[assignment]


def what_must_not_be_compared() -> Any:
    call, held = NeverAsked(), [NeverAsked()]
    partly = functools.partial(call)

    def scale(x: Any, one: Any) -> Any:
        return call(x) + sum(map(partly, [x])) + held[0](x) + functools.reduce(lambda a, f: f(a), held, x)

    return scale, lambda: None


HARMLESS = [
    what_must_not_be_compared,
    a_number_more_in_the_class, a_cache_asked_by_others, another_key_of_a_dict, a_pattern,
    a_lock_that_is_held_meanwhile, a_message_for_the_log, a_text, a_cache_of_shapes,
]  # fmt: skip


@pytest.mark.parametrize("make", HARMLESS, ids=lambda make: make.__name__)
def test_what_is_no_change_is_not_refused(make: Any) -> None:
    found = law(make)
    assert not isinstance(found, fcg.FunctionalCGError), found
    assert torch.tensor(found).shape == (1, 2)
