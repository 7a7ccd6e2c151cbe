"""What a second attack on the host watch found, made without a look at how the first one's findings were mended."""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_cg as fcg
from tests.host_law import law

Case = tuple[Callable[[Any, Any], Any], Callable[[], Any]]


class Computed:
    """A descriptor that an attribute of the instance precedes."""

    def __get__(self, instance: Any, owner: Any) -> float:
        return 2.0


def descriptor(found: Any) -> Callable[[], Case]:
    """Read an attribute that its class gives out; put another one into the instance."""

    def make() -> Case:
        held = type("Held", (), {"k": found, "__module__": __name__})()
        call = not isinstance(found, Computed)
        return lambda x, s: x * (held.k() if call else held.k), lambda: held.__dict__.update(
            k=(lambda: 5.0) if call else 5.0
        )

    return make


def text(read: Callable[[Any], str]) -> Callable[[], Case]:
    """Make a text of a container, and go by it."""

    def make() -> Case:
        held = [1, 2]
        return lambda x, s: x * len(read(held)), lambda: held.append(3)

    return make


def an_array_of_c() -> Case:
    held = (ctypes.c_double * 2)(1.0, 2.0)
    return lambda x, s: x * held[1], lambda: held.__setitem__(1, 5.0)


def a_part_of_an_array_of_c() -> Case:
    held = (ctypes.c_int * 3)(1, 2, 3)
    return lambda x, s: x * sum(held[1:]), lambda: held.__setitem__(1, 5)


def the_length_of_an_array_of_c() -> Case:
    held = SimpleNamespace(array=(ctypes.c_int * 3)())
    return lambda x, s: x * len(held.array), lambda: setattr(held, "array", (ctypes.c_int * 4)())


def doubled(function: Any) -> Any:
    @functools.wraps(function)
    def double(*args: Any) -> Any:
        return 2 * function(*args)

    return double


def method(name: str, function: Any) -> Callable[[], Case]:
    """Call a method that the step gets bound, as a library calls it; define it anew."""

    def make() -> Case:
        cls = type("Held", (), {name: function, "__module__": __name__})
        calls = [getattr(cls(), name)]
        return lambda x, s: next(map(lambda call: call(x), calls)), lambda: setattr(
            cls, name, lambda self, x: 5 * x
        )

    return make


def once(self: Any, x: Tensor) -> Tensor:
    return x * 1


def a_comparison_of_namespaces() -> Case:
    one, other = SimpleNamespace(k=[1]), SimpleNamespace(k=[1])
    return lambda x, s: x * (2.0 if one == other else 3.0), lambda: one.k.append(2)


def of_class(read: Callable[[Any], float], change: Callable[[Any], object]) -> Callable[[], Case]:
    """Read what a class says of itself."""

    def make() -> Case:
        cls = type("Config", (), {"rates": [1.0, 2.0], "rate": 2.0, "__module__": __name__})
        return lambda x, s: x * read(cls), lambda: change(cls)

    return make


def changed(cls: Any) -> None:
    cls.rate = 5.0


CASES = {
    "comparison of namespaces": a_comparison_of_namespaces,
    "vars of a class": of_class(lambda cls: vars(cls)["rate"], changed),
    "dict of a class": of_class(lambda cls: cls.__dict__.get("rate"), changed),
    "public attributes of a class": of_class(
        lambda cls: sum(v for k, v in vars(cls).items() if k == "rate"), changed
    ),
    "part of what a class has": of_class(
        lambda cls: vars(cls)["rates"][0], lambda cls: cls.rates.__setitem__(0, 5.0)
    ),
    "name of a class": of_class(lambda cls: len(cls.__name__), lambda cls: setattr(cls, "__name__", "C")),
    "long name of a class": of_class(
        lambda cls: len(cls.__qualname__), lambda cls: setattr(cls, "__qualname__", "C")
    ),
    "descriptor": descriptor(Computed()),
    "static method": descriptor(staticmethod(lambda: 2.0)),
    "class method": descriptor(classmethod(lambda cls: 2.0)),
    "method": descriptor(lambda self: 2.0),
    "repr": text(repr),
    "str": text(str),
    "format": text(format),
    "f-string": text(lambda held: f"{held}"),
    "f-string with repr": text(lambda held: f"{held!r:>3}"),
    "format of a string": text("{}".format),
    "array of C": an_array_of_c,
    "part of an array of C": a_part_of_an_array_of_c,
    "length of an array of C": the_length_of_an_array_of_c,
    "method by its name": method("once", once),
    "method by another name": method("other", once),
    "method without a name": method("other", lambda self, x: x * 3),
    "method behind a decorator": method("once", doubled(once)),
    "method behind a decorator by another name": method("other", doubled(once)),
}


@pytest.mark.parametrize("case", CASES)
def test_each_change_is_loud(case: str) -> None:
    of_before = case.startswith("method ")  # what was bound before stays the old one
    assert isinstance(law(CASES[case]), list if of_before else fcg.BakedValueError)


@pytest.mark.parametrize("forward", [lambda self, x: F.linear(x, self.weight), doubled(nn.Linear.forward)])
def test_a_forward_by_another_name_is_watched(forward: Any) -> None:
    cls = type("Layer", (nn.Linear,), {"forward": forward, "__module__": __name__})
    apply, params, buffers = fcg.from_module(cls(2, 2))
    step = fcg.graph_fn(lambda state, x: apply(*state, x)[0])
    step((params, buffers), torch.ones(2))
    step((params, buffers), torch.ones(2))
    cls.forward = lambda self, x: x  # type: ignore[attr-defined]
    with pytest.raises(fcg.BakedValueError, match="forward"):
        step((params, buffers), torch.ones(2))


def a_thread(x: Tensor) -> Tensor:
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(x))
    thread.start()
    thread.join()
    return x * len(made)


def a_timer(x: Tensor) -> Tensor:
    timer = threading.Timer(0, print)
    timer.start()
    timer.join()
    return x


@pytest.mark.parametrize("function", [a_thread, a_timer])
def test_a_step_that_starts_a_thread_is_refused(function: Any) -> None:
    with pytest.raises(fcg.SideEffectError, match="starts a thread") as caught:
        fcg.graph_fn(function)(torch.ones(2))
    assert "test_second_attack.py" in str(caught.value)


def test_as_a_message_about_a_thread_advises() -> None:
    def function(x: Tensor) -> Tensor:
        made: list[Tensor] = []
        made.append(x)
        return x * len(made)

    assert fcg.graph_fn(function)(torch.ones(2)).tolist() == [1.0, 1.0]


def test_what_a_step_gives_to_other_threads_is_refused() -> None:
    held, left = [2.0], SimpleQueue[float]()
    with ThreadPoolExecutor(1) as pool:
        for function in (lambda x: x * pool.submit(held.copy).result()[0], lambda x: (x, left.put(1.0))[0]):
            with pytest.raises(fcg.SideEffectError, match="adds to it"):
                fcg.graph_fn(function)(torch.ones(2))


@pytest.mark.parametrize("read", [repr, str, lambda held: f"{held}", lambda held: f"{held!r:>60}"])
def test_a_text_of_what_stays_is_no_change(read: Callable[[Any], str]) -> None:
    held = {"sizes": [1, 2], "on": torch.device("cpu"), "at": torch.ones(2).shape}
    step = fcg.graph_fn(lambda x: x * len(read(held)) + len(read(x.shape)) + len(read(x.dtype)))
    for _ in range(3):
        assert step(torch.ones(2))[0] == len(read(held)) + len(read(torch.ones(2).shape)) + len(
            read(torch.float32)
        )


# -- what a message shows of a long container --------------------------------------------------------------------------

LONG: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], object], str, str]] = {
    "array": (
        lambda: numpy.ones(100_000),
        lambda held: float(held[77_777]),
        lambda held: held.__setitem__(77_777, 3.0),
        "ndarray of ..., 1.0, 1.0,",
        "ndarray of ..., 3.0, 1.0,",
    ),
    "array of another shape": (
        lambda: numpy.ones((2, 3), dtype=numpy.int32),
        lambda held: float(held.sum() * len(held)),
        lambda held: held.resize((3, 3), refcheck=False),
        "ndarray of (2, 3), 'int32', 1, 1, 1, 1, 1, 1",
        "ndarray of (3, 3), 'int32', 1, 1, 1, 1, 1, 1, 0, 0, 0",
    ),
    "records": (
        lambda: numpy.zeros(500, dtype=[("k", "f8")]),
        lambda held: float(held["k"].sum()),
        lambda held: held["k"].__setitem__(400, 3.0),
        "ndarray of ..., 0, 0,",
        "ndarray of ..., 8, 64,",
    ),
    "bytes": (
        lambda: memoryview(bytearray(1000)),
        lambda held: float(held[900] + len(bytes(held))),
        lambda held: held.__setitem__(900, 7),
        "memoryview of ..., 0, 0,",
        "memoryview of ..., 7, 0,",
    ),
    "list": (
        lambda: [1] * 1000,
        sum,
        lambda held: held.__setitem__(990, 2),
        "list of ..., 1, 1,",
        "list of ..., 2, 1, 1, 1, 1, 1, 1, 1, 1, 1\n",
    ),
    "dict": (
        lambda: dict.fromkeys(range(1000), 1),
        lambda held: sum(held.values()),
        lambda held: held.__setitem__(990, 2),
        "{..., 990: 1, ",
        "{..., 990: 2, ",
    ),
    "text": (
        lambda: {"k": "a" * 10**6},
        lambda held: float(ord(held["k"][0])),
        lambda held: held.update(k="b" * 10**6),
        "'aaa",
        "'bbb",
    ),
}


@pytest.mark.parametrize("case", LONG)
def test_a_message_is_short_and_shows_the_difference(case: str) -> None:
    make, read, change, old, new = LONG[case]
    held = make()
    step = fcg.graph_fn(lambda x: x * read(held))
    step(torch.ones(2))
    change(held)
    with pytest.raises(fcg.BakedValueError) as caught:
        step(torch.ones(2))
    assert f"traced {old}" in str(caught.value)
    assert f"now {new}" in str(caught.value)
    assert len(str(caught.value)) < 6000
    assert "To fix: " in str(caught.value)


# -- what a step keeps alive -------------------------------------------------------------------------------------------


class Part:
    def __init__(self, k: float) -> None:
        self.k, self.parts = k, [k]


READS: dict[str, Callable[[Any], float]] = {
    "attribute": lambda held: held["part"].k,
    "item of an attribute": lambda held: held["part"].parts[0],
    "all of an attribute": lambda held: sum(held["part"].parts),
    "loop": lambda held: sum(part.k for part in (held["part"],)),
    "vars": lambda held: vars(held["part"])["k"],
}


@pytest.mark.parametrize("read", READS)
def test_a_step_keeps_nothing_alive_that_the_program_has_replaced(read: str) -> None:
    held = {"part": Part(2.0)}
    step = fcg.graph_fn(lambda x: x * READS[read](held))
    step(torch.ones(2))
    first = weakref.ref(held["part"])
    held["part"] = Part(2.0)
    gc.collect()
    assert first() is None
    assert step(torch.ones(2)).tolist() == [2.0, 2.0]
    held["part"] = Part(3.0)
    with pytest.raises(fcg.BakedValueError):
        step(torch.ones(2))


def test_what_a_step_found_by_a_weak_reference_may_go() -> None:
    held = [Part(2.0)]
    found = weakref.ref(held[0])
    step = fcg.graph_fn(lambda x: x * (9.0 if found() is None else found().k))  # type: ignore[union-attr]
    assert step(torch.ones(2)).tolist() == step(torch.ones(2)).tolist() == [2.0, 2.0]
    held.clear()
    gc.collect()
    assert found() is None
    with pytest.raises(fcg.BakedValueError):
        step(torch.ones(2))
