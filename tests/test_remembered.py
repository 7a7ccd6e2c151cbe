"""Tables that functions remember between calls: a step takes them as constants, and a change of one is loud."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal

N = 6
GLOBAL: Tensor | None = None

Case = tuple[Callable[[], Tensor], Callable[[Tensor], None]]


def new_table() -> Tensor:
    return torch.linspace(0, 1, N)


def cached() -> Case:
    rates = [1.0]

    @functools.lru_cache
    def table(n: int) -> Tensor:
        return torch.linspace(0, rates[0], n)

    def change(other: Tensor) -> None:
        rates[0] = 7.0
        table.cache_clear()

    return lambda: table(N), change


def cached_with_a_limit() -> Case:
    @functools.lru_cache(maxsize=2)
    def tables(n: int) -> tuple[Tensor, list[Tensor]]:
        angles = torch.outer(torch.arange(float(n)), torch.tensor([1.0, 0.5]))
        angles[0] += 1.0  # in place, as such code does
        return angles[:, 0], [angles.sin()[:, 1]]

    return lambda: tables(N)[0] + tables(N)[1][0], lambda other: tables.cache_clear()


def in_a_dict() -> Case:
    held: dict[Any, Tensor] = {}

    def table() -> Tensor:
        if (N, "cpu") not in held:
            held[N, "cpu"] = new_table()
        return held[N, "cpu"]

    return table, lambda other: held.update({(N, "cpu"): other})


def in_a_dict_by_get() -> Case:
    held: dict[int, Tensor] = {}

    def table() -> Tensor:
        found = held.get(N)
        if found is None:
            found = held[N] = new_table()[None, :].expand(2, N)[1]
        return found

    return table, lambda other: held.update({N: other})


def in_a_dict_behind_a_helper() -> Case:
    held: dict[int, Tensor] = {}

    def known() -> Tensor | None:
        return held.get(N)

    def table() -> Tensor:
        if known() is None:
            held[N] = new_table()
        return known()  # type: ignore[return-value]

    return table, lambda other: held.update({N: other})


def in_a_dict_by_setdefault() -> Case:
    held: dict[int, Tensor] = {}
    return lambda: held.setdefault(N, new_table()), lambda other: held.update({N: other})


def in_a_dict_of_pairs() -> Case:
    held: dict[int, tuple[Tensor, Tensor]] = {}

    def table() -> Tensor:
        try:
            cos, sin = held[N]
        except KeyError:
            cos, sin = held[N] = torch.stack([torch.arange(float(N)).cos(), new_table()]).unbind(0)
        return cos * sin

    return table, lambda other: held.update({N: (other, other)})


def in_a_list(held: list[Tensor] | None = None) -> Case:
    held = []

    def table() -> Tensor:
        if not held:
            held.append(new_table())
        return held[0]

    return table, lambda other: held.__setitem__(0, other)


def in_a_global() -> Case:
    globals()["GLOBAL"] = None

    def table() -> Tensor:
        global GLOBAL
        if GLOBAL is None or len(GLOBAL) < N:
            GLOBAL = new_table()
        return GLOBAL[:N]

    return table, lambda other: globals().update(GLOBAL=other)


def in_a_variable() -> Case:
    held: Tensor | None = None

    def table() -> Tensor:
        nonlocal held
        if held is None:
            held = new_table()
        return held

    def change(other: Tensor) -> None:
        nonlocal held
        held = other

    return table, change


def in_a_class() -> Case:
    class Tables:
        held: dict[int, Tensor]

        @classmethod
        def of(cls, n: int) -> Tensor:
            if n not in cls.held:
                cls.held[n] = new_table()
            return cls.held[n]

    Tables.held = {}
    return lambda: Tables.of(N), lambda other: Tables.held.update({N: other})


def in_an_object() -> Case:
    class Rotary:
        def __init__(self) -> None:
            self.table: Tensor | None = None

        def __call__(self) -> Tensor:
            if self.table is None:
                self.table = new_table()
            return self.table

    rotary = Rotary()
    return rotary, lambda other: setattr(rotary, "table", other)


def in_a_function() -> Case:
    def table() -> Tensor:
        if not hasattr(table, "held"):
            table.held = new_table()  # type: ignore[attr-defined]
        return table.held  # type: ignore[attr-defined,no-any-return]

    return table, lambda other: setattr(table, "held", other)


CASES = (
    cached, cached_with_a_limit, in_a_dict, in_a_dict_by_get, in_a_dict_behind_a_helper,
    in_a_dict_by_setdefault, in_a_dict_of_pairs, in_a_list, in_a_global, in_a_variable, in_a_class, in_an_object,
    in_a_function,
)  # fmt: skip


def batch(number: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(number))


def a_step(table: Callable[[], Tensor]) -> Any:
    @fcg.graph_step
    def step(state: Any, x: Tensor) -> Any:
        def loss(w: Tensor) -> Tensor:
            return ((w * table() - x) ** 2).sum()

        value, grad = fcg.value_and_grad(loss)(state["w"])
        return {"w": state["w"] - 0.1 * grad}, {"loss": value, "table": table()}

    return step


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "was called before"])
@pytest.mark.parametrize("case", CASES)
def test_what_a_function_remembers_is_a_constant(case: Callable[[], Case], warm: bool) -> None:
    table, change = case()
    if warm:
        table()
    step = a_step(table)
    state, twin = fcg.place({"w": torch.ones(N)}), fcg.place({"w": torch.ones(N)})
    for number in range(4):
        state, metrics = step(state, batch(number))
        twin, expected = step.eager(twin, batch(number))
        assert_trees_all_equal((fcg.snapshot(state), metrics), (fcg.snapshot(twin), expected))
    assert type(table()) is Tensor  # whatever reads the cache next finds an ordinary tensor
    assert_trees_all_equal(table(), case()[0]())
    assert (step.stats.traces, step.stats.replays) == (1, 4)

    change(torch.full((N,), 3.0))
    before = fcg.snapshot(state)
    with pytest.raises(fcg.BakedValueError):
        step(state, batch(4))
    assert_trees_all_equal(fcg.snapshot(state), before)
    again, _ = a_step(table)(state, batch(4))  # the fix: another step
    twin, _ = step.eager(twin, batch(4))
    assert_trees_all_equal(fcg.snapshot(again), fcg.snapshot(twin))


def test_a_table_may_equal_a_literal() -> None:
    table = functools.lru_cache(lambda n: torch.arange(n).float())

    @fcg.graph_step
    def step(state: Any, x: Tensor) -> Any:
        return {"w": state["w"] + table(3) * torch.tensor([0.0, 1.0, 2.0]) * x}, {}

    state, _ = step(fcg.place({"w": torch.zeros(3)}), torch.ones(3))
    assert_trees_all_equal(fcg.snapshot(state), {"w": torch.tensor([0.0, 1.0, 4.0])})


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "was called before"])
@pytest.mark.parametrize("case", [cached, in_a_dict, in_a_dict_by_get, in_a_global])
def test_a_table_that_is_written_is_loud(case: Callable[[], Case], warm: bool) -> None:
    table, _ = case()
    if warm:
        table()
    step = a_step(table)
    state, _ = step({"w": torch.ones(N)}, batch(0))
    table()[:2].fill_(9.0)  # through a view
    with pytest.raises(fcg.BakedValueError, match="a remembered constant was written"):
        step(state, batch(1))


def set_data(table: Tensor, other: Tensor) -> None:
    table.data = other


@pytest.mark.parametrize("change", [set_data, torch.utils.swap_tensors])
def test_a_table_that_gets_other_memory_is_loud(change: Callable[[Tensor, Tensor], None]) -> None:
    """Torch counts no write: the new memory may be of the same version."""
    table, _ = cached()
    found = table()
    step = fcg.graph_step(lambda state, x: ({"w": state["w"] + x * table()}, {"sum": x.sum()}))
    state, _ = step({"w": torch.zeros(N)}, torch.ones(N))
    change(found, torch.full((N,), 9.0))
    with pytest.raises(fcg.BakedValueError, match=r"(has other memory since)|(was written)"):
        step(state, torch.ones(N))


def test_a_module_reads_what_its_function_remembers() -> None:
    table, _ = in_a_dict()

    class Positions(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * table()

    apply, params, buffers = fcg.from_module(Positions(N, N))
    step = fcg.graph_fn(lambda state, x: apply(state, buffers, x)[0])
    state = fcg.place(params)
    for number in range(2):
        assert_trees_all_equal(step(state, batch(number)), step.eager(state, batch(number)))


def counts(held: dict[str, Tensor], x: Tensor) -> Tensor:
    if "n" not in held:
        held["n"] = torch.zeros(())
    held["n"] = held["n"] + 1
    return x * held["n"]


def counts_in_place(held: dict[str, Tensor], x: Tensor) -> Tensor:
    if "n" not in held:
        held["n"] = torch.zeros(())
    y = x * held["n"]
    held["n"].add_(1)
    return y


def does_more_at_first(held: dict[str, Tensor], x: Tensor) -> Tensor:
    if "table" not in held:
        held["table"] = new_table()
        x = x + 1
    return x * held["table"]


def writes_two_at_once(held: dict[str, Tensor], x: Tensor) -> Tensor:
    sums = [torch.zeros_like(x), torch.zeros_like(x)]
    torch._foreach_add_(sums, [x, x * 2])
    if "table" not in held:
        held["table"] = new_table()
        return sums[0]
    return sums[1]


def adds_a_number_later(number: int) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """Whatever number a numbering of values gives to `y`: it is not that number."""

    def function(held: dict[str, Tensor], x: Tensor) -> Tensor:
        y = x * 3
        if "table" not in held:
            held["table"] = new_table()
            return x + y
        return x + number

    return function


def remembers_an_input(held: dict[str, Tensor], x: Tensor) -> Tensor:
    if "x" not in held:
        held["x"] = x * 2
    return x * held["x"]


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (counts, fcg.BakedValueError),
        (counts_in_place, fcg.ReadOnlyError),
        (does_more_at_first, fcg.BakedValueError),
        (writes_two_at_once, fcg.BakedValueError),
        *((adds_a_number_later(number), fcg.BakedValueError) for number in range(8)),
        (remembers_an_input, fcg.SideEffectError),
    ],
)
def test_what_goes_on_from_call_to_call_is_refused(function: Any, error: type[Exception]) -> None:
    held: dict[str, Tensor] = {}
    step = fcg.graph_step(lambda state, x: ({"w": state["w"] + function(held, x)}, {}))
    with pytest.raises(error):
        step({"w": torch.ones(N)}, batch(0))


def test_what_is_only_read_is_declared() -> None:
    """Nothing says that it stays: a function that remembers puts there what it finds."""
    held = types.SimpleNamespace(table=new_table(), tables={N: new_table()})
    for read in (lambda: held.table, lambda: held.tables[N]):
        with pytest.raises(fcg.ForeignTensorError, match="or declare it"):
            a_step(read)({"w": torch.ones(N)}, batch(0))


class Alibi(nn.Module):
    """Makes its bias of a buffer at the first call, and slices it from then on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(N, N), kind
        self.register_buffer("slopes", torch.linspace(0.1, 1, N), persistent=False)
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.kind == "of what it writes":
            self.slopes.mul_(0.5)
        if self.bias is not None:
            return y + self.bias[-N:]
        of = self.linear.bias.detach() if self.kind == "of what is trained" else self.slopes
        bias = torch.arange(float(N)) * of
        self.register_buffer("bias", bias, persistent=False)
        return y + bias


def test_a_module_remembers_what_it_makes_of_buffers_that_never_change() -> None:
    module = Alibi("of a buffer")
    apply, params, buffers = fcg.from_module(module)
    step = fcg.graph_fn(lambda state, x: apply(state["params"], state["buffers"], x)[0])
    state = fcg.place({"params": params, "buffers": buffers})
    for number in range(3):
        got = step(state, batch(number))
        assert_trees_all_equal(got, step.eager(state, batch(number)))
        torch.testing.assert_close(got, module(batch(number)).detach())


@pytest.mark.parametrize("kind", ["of what it writes", "of what is trained"])
def test_a_module_must_not_remember_what_it_makes_of_what_changes(kind: str) -> None:
    apply, params, buffers = fcg.from_module(Alibi(kind))
    with pytest.raises(fcg.SideEffectError, match="changes which buffers the module has"):
        apply(params, buffers, batch(0))


class Registry:
    """Replaces its entries by a copy with one more at each call, as a library may that is read by several threads."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.known: dict[Any, float] = {"scale": 2.0}

    def get(self, key: Any) -> float:
        seen, known = set[str](), dict[Any, float]()
        seen.update(self.seen)
        known.update(self.known)
        seen.add(str(key))
        known.setdefault(key, 3.0)
        self.seen, self.known = seen, known
        return known[key]


def test_a_registry_that_is_copied_at_each_call_is_no_change() -> None:
    registry = Registry()
    step = fcg.graph_step(lambda state, x: ({"w": state["w"] + x * registry.get("a")}, {}))
    state = fcg.place({"w": torch.ones(N)})
    twin = fcg.fork(state)
    for number in range(3):
        state, _ = step(state, batch(number))
        twin, _ = step.eager(twin, batch(number))
        assert_trees_all_equal(fcg.snapshot(state), fcg.snapshot(twin))
    registry.known["a"] = 5.0
    with pytest.raises(fcg.BakedValueError):
        step(state, batch(3))
