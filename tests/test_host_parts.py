"""Host values in places that seldom change: modules, definitions, slots, numbers that have attributes.

Each spelling is called, its value is changed, and the next call raises; it never goes on with the old value.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import importlib
import math
import operator
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import functional_cg as fcg
from functional_cg.stages.watch.kinds import is_user_module
from tests.host_law import law

Case = tuple[Callable[[Any, Any], Any], Callable[[], Any]]


SHARED = (math, F, torch.Tensor, torch.nn.ReLU)
KEPT = [dict(vars(owner)) for owner in SHARED]


def as_before() -> None:
    """Put back what a change has put into modules and classes that are everyone's."""
    for owner, before in zip(SHARED, KEPT, strict=True):
        for name in set(vars(owner)) - set(before):
            delattr(owner, name)
        for name, value in before.items():
            if vars(owner)[name] is not value:
                setattr(owner, name, value)
    for name in [name for name in sys.modules if name.startswith("made_")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    as_before()


def a_module(name: str, **held: Any) -> types.ModuleType:
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(held)
    return module


# -- modules ------------------------------------------------------------------------------------------------------


def imported_by_name() -> Case:
    module = a_module("made_here", rate=2.0)

    def scale(x: Any, one: Any) -> Any:
        import made_here  # type: ignore[import-not-found]

        return x * made_here.rate

    return scale, lambda: setattr(module, "rate", 5.0)


def imported_from() -> Case:
    outer, inner = a_module("made_outer", rate=3.0), a_module("made_outer.inner", rate=2.0)
    outer.inner, outer.__path__ = inner, []  # type: ignore[attr-defined]

    def scale(x: Any, one: Any) -> Any:
        from made_outer.inner import rate  # type: ignore[import-not-found]

        return x * rate

    return scale, lambda: setattr(inner, "rate", 5.0)


def another_module_of_the_name() -> Case:
    a_module("made_here", rate=2.0)

    def scale(x: Any, one: Any) -> Any:
        import made_here

        return x * made_here.rate

    return scale, lambda: a_module("made_here", rate=5.0)


def found_by_importlib() -> Case:
    module = a_module("made_here", rate=2.0)
    return lambda x, one: x * importlib.import_module("made_here").rate, lambda: setattr(module, "rate", 5.0)


def made_by_the_module() -> Case:
    module = a_module("made_here", __getattr__=lambda name: 2.0)
    return lambda x, one: x * module.rate, lambda: setattr(module, "rate", 5.0)


def asked_whether_it_is_there() -> Case:
    module = a_module("made_here")
    return lambda x, one: x * (5.0 if hasattr(module, "rate") else 2.0), lambda: setattr(module, "rate", 1)


def missing_from_the_module() -> Case:
    module = a_module("made_here")

    def scale(x: Any, one: Any) -> Any:
        try:
            return x * module.rate
        except AttributeError:
            return x * 2.0

    return scale, lambda: setattr(module, "rate", 5.0)


# -- libraries, where a program puts something of its own ----------------------------------------------------------


def a_function_of_torch() -> Case:
    return lambda x, one: F.softplus(x), lambda: setattr(F, "softplus", lambda x: x * 7.0)


def a_function_put_there() -> Case:
    F.own_scale = lambda x: x * 2.0  # type: ignore[attr-defined]
    return lambda x, one: F.own_scale(x), lambda: setattr(F, "own_scale", lambda x: x * 5.0)  # type: ignore[attr-defined]


def a_number_of_a_library() -> Case:
    return lambda x, one: x * math.tau, lambda: setattr(math, "tau", 5.0)


def an_object_put_there() -> Case:
    F.own_settings = SimpleNamespace(rate=2.0)  # type: ignore[attr-defined]
    other = SimpleNamespace(rate=5.0)
    return lambda x, one: x * F.own_settings.rate, lambda: setattr(F, "own_settings", other)  # type: ignore[attr-defined]


def another_library_under_the_name() -> Case:
    globals()["G"] = F
    return lambda x, one: G.relu(x), lambda: globals().update(G=SimpleNamespace(relu=lambda x: x * 5.0))  # type: ignore[name-defined] # noqa: F821


def a_method_of_all_tensors() -> Case:
    torch.Tensor.doubled = lambda self: self * 2.0  # type: ignore[attr-defined]
    return lambda x, one: x.doubled(), lambda: setattr(torch.Tensor, "doubled", lambda self: self * 5.0)


def a_number_of_all_tensors() -> Case:
    torch.Tensor.own_rate = 2.0  # type: ignore[attr-defined]
    return lambda x, one: x * x.own_rate, lambda: setattr(torch.Tensor, "own_rate", 5.0)


def the_forward_of_a_class_of_torch() -> Case:
    relu = torch.nn.ReLU()
    return lambda x, one: relu(x), lambda: setattr(torch.nn.ReLU, "forward", lambda self, x: x * 5.0)


# -- numbers and strings that have attributes, enum members -------------------------------------------------------


class Level(enum.Enum):
    LOW = 1

    def __init__(self, number: int) -> None:
        self.rate = 2.0

    def scaled(self) -> float:
        return self.rate


SCALED = Level.scaled


class Count(int):
    rate: float

    def __mul__(self, x: Any) -> Any:
        return x * self.rate


class Label(str):
    rate = 2.0


class Weekday(enum.IntEnum):
    MONDAY = 1


def of_a_member() -> Case:
    Level.LOW.rate = 2.0
    return lambda x, one: x * Level.LOW.rate, lambda: setattr(Level.LOW, "rate", 5.0)


def of_all_members() -> Case:
    Level.LOW.rate = 2.0
    return lambda x, one: x * sum(one.rate for one in Level), lambda: setattr(Level.LOW, "rate", 5.0)


def a_method_of_members() -> Case:
    Level.LOW.rate = 2.0
    Level.scaled = SCALED  # type: ignore[method-assign]
    return lambda x, one: x * Level.LOW.scaled(), lambda: setattr(Level, "scaled", lambda self: 5.0)


def of_a_member_that_is_a_number() -> Case:
    Weekday.MONDAY.rate = 2.0  # type: ignore[attr-defined]
    return lambda x, one: x * Weekday.MONDAY.rate, lambda: setattr(Weekday.MONDAY, "rate", 5.0)  # type: ignore[attr-defined]


def of_a_number() -> Case:
    count = Count(1)
    count.rate = 2.0
    return lambda x, one: x * count.rate, lambda: setattr(count, "rate", 5.0)


def an_operator_of_a_number() -> Case:
    count = Count(1)
    count.rate = 2.0
    return lambda x, one: count * x, lambda: setattr(count, "rate", 5.0)


def of_the_class_of_a_string() -> Case:
    label, Label.rate = Label("a"), 2.0
    return lambda x, one: x * label.rate, lambda: setattr(Label, "rate", 5.0)


def an_equal_number() -> Case:
    one_count, other = Count(1), Count(1)
    one_count.rate, other.rate = 2.0, 5.0
    held = {"count": one_count}
    return lambda x, one: x * held["count"].rate, lambda: held.update(count=other)


# -- slots, fields, descriptors -----------------------------------------------------------------------------------


class Slots:
    __slots__ = ("rate",)
    rate: float


def a_slot_that_is_filled_later() -> Case:
    slots = Slots()
    return lambda x, one: x * getattr(slots, "rate", 2.0), lambda: setattr(slots, "rate", 5.0)


def a_slot_that_raises() -> Case:
    slots = Slots()

    def scale(x: Any, one: Any) -> Any:
        try:
            return x * slots.rate
        except AttributeError:
            return x * 2.0

    return scale, lambda: setattr(slots, "rate", 5.0)


def a_field_of_c() -> Case:
    class Struct(ctypes.Structure):
        _fields_ = (("rate", ctypes.c_double),)

    struct = Struct(2.0)
    return lambda x, one: x * struct.rate, lambda: setattr(struct, "rate", 5.0)


def a_property_without_python() -> Case:
    class Holder:
        rate = property(operator.attrgetter("kept.rate"))

    holder = Holder()
    holder.kept = SimpleNamespace(rate=2.0)  # type: ignore[attr-defined]
    return lambda x, one: x * holder.rate, lambda: setattr(holder.kept, "rate", 5.0)  # type: ignore[attr-defined]


def a_partial_method() -> Case:
    class Holder:
        def of(self, x: Any, rate: float) -> Any:
            return x * rate

        scaled = functools.partialmethod(of, rate=2.0)

    holder = Holder()
    return lambda x, one: holder.scaled(x), lambda: vars(Holder)["scaled"].keywords.update(rate=5.0)


def a_method_for_another_type() -> Case:
    class Holder:
        @functools.singledispatchmethod
        def rate(self, value: object) -> float:
            return 2.0

    holder = Holder()
    change = functools.partial(vars(Holder)["rate"].register, int, lambda self, value: 5.0)
    return lambda x, one: x * holder.rate(3), change


# -- definitions --------------------------------------------------------------------------------------------------


def the_code_of_the_step() -> Case:
    def scale(x: Any, one: Any) -> Any:
        return x * 2.0

    def other(x: Any, one: Any) -> Any:
        return x * 5.0

    return scale, lambda: setattr(scale, "__code__", other.__code__)


def the_order_of_a_pattern() -> Case:
    class Pair:
        __match_args__: tuple[str, ...] = ("first", "second")

        def __init__(self) -> None:
            self.first, self.second = 2.0, 5.0

    pair = Pair()

    def scale(x: Any, one: Any) -> Any:
        match pair:
            case Pair(rate, _):
                return x * rate

    return scale, lambda: setattr(Pair, "__match_args__", ("second", "first"))


def a_base_that_is_asked_for() -> Case:
    class One: ...

    class Two: ...

    class Derived(One): ...

    return (
        lambda x, one: x * (2.0 if issubclass(Derived, One) else 5.0),
        lambda: setattr(Derived, "__bases__", (Two,)),
    )


def a_call_that_is_possible_later() -> Case:
    class Holder: ...

    holder = Holder()
    return (
        lambda x, one: x * (5.0 if callable(holder) else 2.0),
        lambda: setattr(Holder, "__call__", lambda self: None),
    )


# -- generators ---------------------------------------------------------------------------------------------------


def what_a_generator_delegates_to() -> Case:
    held = [1.0, 2.0]

    def rates() -> Iterator[float]:
        yield from held

    return lambda x, one: x * sum(rates()), lambda: held.append(5.0)


def what_generators_delegate_to_in_turn() -> Case:
    held = [[1.0], [2.0]]

    def rates() -> Iterator[float]:
        for one in held:
            yield from one

    def all_rates() -> Iterator[float]:
        yield from rates()

    return lambda x, one: x * sum(all_rates()), lambda: held[1].append(5.0)


CASES = [
    imported_by_name, imported_from, another_module_of_the_name, found_by_importlib, made_by_the_module,
    asked_whether_it_is_there, missing_from_the_module, a_function_of_torch, a_function_put_there, an_object_put_there,
    a_number_of_a_library, another_library_under_the_name, a_method_of_all_tensors, a_number_of_all_tensors,
    the_forward_of_a_class_of_torch, of_a_member, of_all_members, a_method_of_members, of_a_member_that_is_a_number,
    of_a_number, an_operator_of_a_number, of_the_class_of_a_string, an_equal_number, a_slot_that_is_filled_later,
    a_slot_that_raises, a_field_of_c, a_property_without_python, a_partial_method, a_method_for_another_type,
    the_code_of_the_step, the_order_of_a_pattern, a_base_that_is_asked_for, a_call_that_is_possible_later,
    what_a_generator_delegates_to, what_generators_delegate_to_in_turn,
]  # fmt: skip


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_each_change_is_loud(make: Callable[[], Case]) -> None:
    assert isinstance(law(lambda: (as_before(), make())[1]), fcg.BakedValueError)


# -- what is no change --------------------------------------------------------------------------------------------


def printing_somewhere_else() -> Case:
    show = functools.partial(print, end="")
    return lambda x, one: (show(file=sys.stdout), x * 2.0)[1], lambda: setattr(sys, "stdout", sys.__stderr__)


def another_name_in_a_module() -> Case:
    module = a_module("made_here", rate=2.0)
    return lambda x, one: x * module.rate * F.relu(x), lambda: (
        setattr(module, "other", 1), setattr(F, "own", 1), setattr(torch.Tensor, "own", 1)
    )  # fmt: skip


def another_member_of_a_class() -> Case:
    class Struct(ctypes.Structure):
        _fields_ = (("rate", ctypes.c_double), ("other", ctypes.c_double))

    struct = Struct(2.0, 3.0)
    return lambda x, one: x * struct.rate, lambda: setattr(struct, "other", 5.0)


@pytest.mark.parametrize(
    "make",
    [printing_somewhere_else, another_name_in_a_module, another_member_of_a_class],
    ids=lambda make: make.__name__,
)
def test_what_is_no_change_is_not_refused(make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back at the end
    assert isinstance(law(make), list)


def test_a_module_without_a_file_is_the_programs_but_for_those_of_libraries() -> None:
    for one in (types.ModuleType("made_here"), types.ModuleType("__main__"), sys.modules[__name__]):
        assert is_user_module(one)
    for one in (sys, math, torch._C, fcg, torch, types.ModuleType("torch.made"), importlib):
        assert not is_user_module(one)
