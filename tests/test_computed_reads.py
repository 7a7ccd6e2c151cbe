"""Host values that a step reaches by what it computes: another element, a copy, the result of a call.

Each spelling is called, its value is changed, and the next call raises; it never goes on with the old value.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import typing
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_cg as fcg
from functional_cg.stages.watch.evaluation import readable

pytestmark = pytest.mark.skipif(
    not readable(), reason="what is computed is seen in CPython 3.11 to 3.13 only"
)


class Config:
    def __init__(self, k: float) -> None:
        self.k = k


class World:
    """All that the spellings read; the first configuration is the one that changes."""

    def __init__(self) -> None:
        self.a, self.b = Config(1.0), Config(2.0)
        self.all, self.named = [self.a, self.b], {"a": self.a, "b": self.b}
        self.cfg0, self.pairs, self.rates = self.a, [["x", 1.0], ["y", 2.0]], {"l0": {"lr": 1.0}}
        self.weak = weakref.WeakValueDictionary({"a": self.a})
        self.deep = [[[[[[1.0]]]]]]
        self.tensor, self.other = torch.zeros(2), torch.zeros(5)
        self.key, self.by_key = self.a, {self.a: 1.0, self.b: 5.0}

    def change(self) -> None:
        self.a.k = self.pairs[0][1] = self.rates["l0"]["lr"] = self.deep[0][0][0][0][0][0] = 5.0  # type: ignore[call-overload]
        self.tensor, self.key = self.other, self.b


W = World()


def summed(pairs: Any) -> float:
    total = 0.0
    for _, value in pairs:
        total += value
    return total


def matched(value: Any) -> Any:
    match value:
        case {"l0": {"lr": rate}}:
            return rate
    return None


READS: dict[str, Callable[[], Any]] = {
    "computed index": lambda: W.all[len(W.all) - 2].k,
    "computed key": lambda: W.rates[f"l{0}"]["lr"],
    "lower": lambda: W.named["A".lower()].k,
    "not": lambda: W.all[not 1].k,
    "getattr": lambda: getattr(W, f"cfg{0}").k,
    "vars": lambda: vars(W)[f"cfg{0}"].k,
    "next": lambda: next(iter(W.all)).k,
    "list": lambda: list(W.all)[0].k,  # noqa: RUF015
    "slice": lambda: W.all[:1][0].k,
    "sum of lists": lambda: (W.all + W.all)[2].k,
    "default": lambda: W.named.get("zz", W.a).k,
    "max": lambda: min(W.all, key=lambda one: one is W.b).k,
    "display": lambda: {"z": W.a}["z"].k,
    "copy": lambda: W.named.copy()["a"].k,
    "generator": lambda: next(one for one in W.all if one is W.a).k,
    "comprehension": lambda: [one for one in W.all if one is W.a][0].k,  # noqa: RUF015
    "lambda": lambda: (lambda one: one)(W.a).k,
    "cast": lambda: typing.cast(Config, W.a).k,
    "partial": lambda: functools.partial(lambda one: one, W.a)().k,
    "context": lambda: contextlib.nullcontext(W.a).__enter__().k,
    "islice": lambda: next(itertools.islice(W.all, 1)).k,
    "weak": lambda: W.weak["a"].k,
    "merged": lambda: {**W.rates}["l0"]["lr"],
    "unpacked": lambda: summed(W.pairs),
    "unpacked at once": lambda: (lambda rows: (lambda a, b: a[1] + b[1])(*rows))(W.pairs),
    "zip of lists": lambda: sum(list(zip(*W.pairs, strict=True))[1]),
    "chain": lambda: [*itertools.chain(*W.pairs)][1],
    "keywords": lambda: (lambda k: k)(**vars(W.a)),
    "pattern": lambda: matched(W.rates),
    "deep": lambda: torch.tensor(W.deep).sum(),
    "shape": lambda: float(W.tensor.shape[0]),
    "size": lambda: float(W.tensor.size(0)),
    "which tensor": lambda: 1.0 if W.tensor is not W.other else 5.0,
    "by identity": lambda: W.by_key[W.key],
    "is": lambda: 1.0 if W.key is W.a else 5.0,
    "equal": lambda: 1.0 if W.key == W.a else 5.0,
    "index": lambda: float(W.all.index(W.key)),
    "hash": lambda: {hash(W.a): 1.0, hash(W.b): 5.0}[hash(W.key)],
}


@pytest.mark.parametrize("name", READS)
def test_a_change_is_loud(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "W", World())
    read, x = READS[name], torch.ones(1)
    step = fcg.graph_fn(lambda x: x * read())
    for _ in range(3):
        assert torch.equal(step(x), x * read())
    W.change()
    with pytest.raises(fcg.BakedValueError):
        step(x)


@pytest.mark.parametrize("name", READS)
def test_nothing_is_refused_that_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "W", World())
    read, x = READS[name], torch.ones(1)
    step = fcg.graph_fn(lambda x: x * read())
    for call in range(4):
        assert torch.equal(step(x * call), x * call * read())
        W.b.k += call if name not in ("sum of lists",) else 0  # is not read


def advances() -> dict[str, Callable[[Any], Any]]:
    """What goes on from call to call, by what a step does first and reads then."""

    def kept(act: Callable[[Any], Any], read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda held: (act(held), read(held))[1]

    return {
        "append": kept(lambda h: h.list.append(1), lambda h: len(h.list)),
        "extend": kept(lambda h: h.list.extend([1]), lambda h: sum(h.list)),
        "insert": kept(lambda h: h.list.insert(0, 1), lambda h: len(list(h.list))),
        "add": kept(lambda h: h.set.add(object()), lambda h: len(h.set)),
        "put": kept(lambda h: h.dict.__setitem__(object(), 1), lambda h: len(h.dict)),
        "deque": kept(lambda h: h.deque.appendleft(1), lambda h: len(h.deque)),
        "setdefault": kept(lambda h: h.dict.setdefault("k", []).append(1), lambda h: len(h.dict["k"])),
        "defaultdict": kept(lambda h: h.default["k"].append(1), lambda h: len(h.default["k"])),
        "bytes": kept(lambda h: h.bytes.append(1), lambda h: len(h.bytes)),
        "map": kept(lambda h: list(map(h.list.append, [1])), lambda h: len(h.list)),
        "attribute": kept(lambda h: setattr(h, "n", h.n + 1), lambda h: h.n),
        "inner": kept(lambda h: h.list.append(1) or setattr(h, "n", len(h.list)), lambda h: h.n),
        "by what stands in a dict": kept(lambda h: {"a": h.list.append}["a"](1), lambda h: len(h.list)),
        "deleted": kept(lambda h: h.long.pop(), lambda h: len(h.long)),
    }


def holder() -> SimpleNamespace:
    return SimpleNamespace(
        list=[], set=set(), dict={}, deque=deque(), default=defaultdict(list), bytes=bytearray(), n=0, long=[1] * 99
    )  # fmt: skip


@pytest.mark.parametrize("name", advances())
def test_what_goes_on_from_call_to_call_is_refused(name: str) -> None:
    held, advance = holder(), advances()[name]
    with pytest.raises(fcg.SideEffectError, match=r"(changes|takes)(.|\n)*To fix"):
        fcg.graph_fn(lambda x: x * (1.0 if advance(held) < 50 else 5.0))(torch.ones(1))


@given(
    acts=st.lists(st.sampled_from(["append", "pop", "clear", "put"]), max_size=4),
    read=st.sampled_from(["len", "sum", "first", "nothing"]),
)
def test_exactly_what_goes_on_is_refused(acts: list[str], read: str) -> None:
    """The oracle calls the function forty times: a step that is not refused returns what the function does."""

    def function(held: list[float]) -> float:
        for act in acts:
            if act == "append":
                held.append(2.0)
            elif act == "pop" and held:
                held.pop()
            elif act == "clear":
                held.clear()
            else:
                held[:0] = [3.0] if not held else []
        if read == "nothing":
            return 1.0
        many = {"len": len(held), "sum": sum(held), "first": held[0] if held else 0}[read]
        return 1.0 if many < 20 else 5.0

    twin, held = [1.0], [1.0]
    values = [function(twin) for _ in range(40)]
    step = fcg.graph_fn(lambda x: x * function(held))
    try:
        got = [float(step(torch.ones(()))) for _ in range(40)]
    except (fcg.SideEffectError, fcg.BakedValueError):
        return
    assert got == values, "it goes on from call to call, and nobody said so"


def test_functions_by_type_are_noticed() -> None:
    @functools.singledispatch
    def scale(value: Any) -> float:
        return 1.0

    config, x = Config(1.0), torch.ones(1)
    step = fcg.graph_fn(lambda x: x * scale(config))
    assert torch.equal(step(x), x)
    scale.register(Config, lambda value: 5.0)
    with pytest.raises(fcg.BakedValueError):
        step(x)


def test_functions_of_the_user_are_not_asked_to_dispatch() -> None:
    def scale(value: Any) -> float:
        return 2.0

    scale.registry, scale.dispatch = {}, lambda kind: pytest.fail("the watch ran it")  # type: ignore[attr-defined]
    assert torch.equal(fcg.graph_fn(lambda x: x * scale(x))(torch.ones(1)), torch.full((1,), 2.0))


def test_containers_in_themselves_and_shared_ones_are_read_once() -> None:
    rows: list[Any] = [1.0]
    rows += [rows, rows]
    for _ in range(64):
        rows = [rows, rows]
    step = fcg.graph_fn(lambda x: x * (rows == rows) * len([*itertools.chain(rows)]))
    assert torch.equal(step(torch.ones(1)), torch.full((1,), 2.0))


def test_an_attribute_that_a_class_gets_later_is_noticed() -> None:
    class Empty:
        pass

    x = torch.ones(1)
    step = fcg.graph_fn(lambda x: x * getattr(Empty, "scale", 1.0))
    assert torch.equal(step(x), x)
    Empty.scale = 5.0  # type: ignore[attr-defined]
    with pytest.raises(fcg.BakedValueError, match="scale"):
        step(x)


@pytest.mark.parametrize("name", ["apply_", "map_"])
def test_python_on_each_element_is_refused(name: str) -> None:
    def step(x: Any) -> Any:
        return (
            x.clone().apply_(lambda v: v + 1) if name == "apply_" else x.clone().map_(x, lambda a, b: a + b)
        )

    with pytest.raises(fcg.HostSyncError, match="calls Python for each element"):
        fcg.graph_fn(step)(torch.ones(2))


class Frozen:
    """A module some of whose parameters are frozen later, and a list of its tensors."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        self.tensors = [torch.ones(2), torch.ones(3)]

    def change(self) -> None:
        for one in (self.model[0].weight.requires_grad_(False), self.tensors[0].requires_grad_(True)):
            one.note = 3


SAID: dict[str, Callable[[Frozen], float]] = {
    "a loop over parameters": lambda f: float([p.requires_grad for p in f.model.parameters()].count(True)),
    "all": lambda f: float(all(p.requires_grad for p in f.model.parameters())),
    "named": lambda f: float(sum(p.requires_grad for _, p in f.model.named_parameters())),
    "the first": lambda f: float(next(f.model.parameters()).requires_grad),
    "a filter": lambda f: float(sum(p.numel() for p in f.model.parameters() if p.requires_grad)),
    "a list": lambda f: float(sum(t.requires_grad for t in f.tensors)),
    "map": lambda f: float(sum(map(lambda t: t.requires_grad, f.tensors))),
    "a key": lambda f: float(len(sorted(f.tensors, key=lambda t: t.requires_grad)[-1])),
    "an attribute": lambda f: float(sum(getattr(p, "note", 0) for p in f.model.parameters())),
}


@pytest.mark.parametrize("name", SAID)
def test_what_a_tensor_says_of_itself_is_read_wherever_it_came_from(name: str) -> None:
    held, x = Frozen(), torch.ones(1)
    step = fcg.graph_fn(lambda x: x * SAID[name](held))
    for _ in range(3):
        assert torch.equal(step(x), x * SAID[name](held))
        held.tensors[1].add_(1)  # is not read
    held.change()
    with pytest.raises(fcg.BakedValueError):
        step(x)


def replaces(places: list[str], *, put_back: bool) -> Callable[[], float]:
    held, depth = SimpleNamespace(n=0, dict={"n": 0}, list=[0]), 0

    def function() -> float:
        nonlocal depth
        old = held.n, held.dict["n"], held.list[0], depth
        for place in places:
            if place == "attribute":
                held.n = held.n + 1
            elif place == "item":
                held.dict["n"] = held.dict["n"] + 1
            elif place == "element":
                held.list[0] = held.list[0] + 1
            else:
                depth = depth + 1
        many = held.n + held.dict["n"] + held.list[0] + depth
        if put_back:
            held.n, held.dict["n"], held.list[0], depth = old
        return 1.0 if many < 20 else 5.0

    return function


@given(
    places=st.lists(st.sampled_from(["attribute", "item", "element", "cell"]), min_size=1, max_size=4),
    put_back=st.booleans(),
)
def test_a_step_may_put_back_what_it_replaces(places: list[str], put_back: bool) -> None:
    """The oracle calls the function forty times."""
    twin, function = (replaces(places, put_back=put_back) for _ in range(2))
    step = fcg.graph_fn(lambda x: x * function())
    if put_back:
        assert [float(step(torch.ones(()))) for _ in range(40)] == [twin() for _ in range(40)]
    else:
        with pytest.raises(fcg.SideEffectError, match=r"changes(.|\n)*To fix"):
            step(torch.ones(()))


class Slotted:
    __slots__ = ("collector",)

    def __init__(self) -> None:
        self.collector: Any = None


@pytest.mark.parametrize(
    ("held", "last", "traces"),
    [
        (SimpleNamespace(collector=None), None, 2),
        (SimpleNamespace(collector=None), 1, 3),
        (Slotted(), None, 3),
    ],
    ids=["put back", "not put back", "nobody knows"],
)
def test_what_is_put_back_takes_no_third_trace(
    held: Any, last: int | None, traces: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(x: Any) -> Any:
        print("run")  # noqa: T201
        held.collector = [2.0]
        total = sum(held.collector)
        held.collector = last and [last]
        return x * total

    fcg.graph_fn(step)(torch.ones(()))
    assert capsys.readouterr().out.count("run") == traces


def takes(way: str) -> Callable[[Any], float]:
    def function(held: Any) -> float:
        first = float(held[0])
        if way == "del":
            del held[0]
        elif way == "del of a slice":
            del held[:1]
        elif way == "a slice by nothing":
            held[:1] = type(held)()
        else:
            held.append(held[0])
            del held[0]
        return first

    return function


@pytest.mark.parametrize("way", ["del", "del of a slice", "a slice by nothing", "del of what went behind"])
@pytest.mark.parametrize("kind", [list, bytearray])
def test_what_is_deleted_from_the_front_is_seen(kind: type[Any], way: str) -> None:
    held, take = kind([1] * 9 + [2] * 9), takes(way)
    with pytest.raises(fcg.SideEffectError, match=r"changes(.|\n)*To fix"):
        fcg.graph_fn(lambda x: x * take(held))(torch.ones(()))
