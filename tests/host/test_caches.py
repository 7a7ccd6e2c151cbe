"""Tables that functions remember between calls: a step takes them as constants, and a change of one is loud."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.host_law import Change, Row, X, judge, rows

TABLES = r"""
# a cache
rates = [1.0]
@functools.lru_cache
def table(n): return torch.linspace(0, rates[0], n)
step: x * table(2)
change: rates[0] = 7.0; table.cache_clear()
change: table(2)[:2].fill_(9.0)  -> a remembered constant was written
change: table(2).data = torch.full((2,), 9.0)
change: torch.utils.swap_tensors(table(2), torch.full((2,), 9.0))

# a cache with a limit
@functools.lru_cache(maxsize=2)
def tables(n):
    angles = torch.outer(torch.arange(float(n)), torch.tensor([1.0, 0.5]))
    angles[0] += 1.0  # in place, as such code does
    return angles[:, 0], [angles.sin()[:, 1]]
step: x * (tables(2)[0] + tables(2)[1][0])
any: tables.cache_clear()

# a table that equals a literal
table = functools.lru_cache(lambda n: torch.arange(n).float())
step: x * table(2) * torch.tensor([0.0, 1.0])

# a dict
held = {}
def table():
    if (2, "cpu") not in held: held[2, "cpu"] = torch.linspace(0, 1, 2)
    return held[2, "cpu"]
step: x * table()
change: held[2, "cpu"] = torch.full((2,), 3.0)
change: table()[:2].fill_(9.0)  -> a remembered constant was written

# a dict by get
held = {}
def table():
    found = held.get(2)
    if found is None: found = held[2] = torch.linspace(0, 1, 2)[None, :].expand(2, 2)[1]
    return found
step: x * table()
change: held[2] = torch.full((2,), 3.0)
change: table()[:2].fill_(9.0)  -> a remembered constant was written

# a dict behind a helper
held = {}
def known(): return held.get(2)
def table():
    if known() is None: held[2] = torch.linspace(0, 1, 2)
    return known()
step: x * table()
change: held[2] = torch.full((2,), 3.0)

# a dict by setdefault
held = {}
step: x * held.setdefault(2, torch.linspace(0, 1, 2))
change: held[2] = torch.full((2,), 3.0)

# a dict of pairs
held = {}
def table():
    try: cos, sin = held[2]
    except KeyError: cos, sin = held[2] = torch.stack([torch.arange(2.0).cos(), torch.linspace(0, 1, 2)]).unbind(0)
    return cos * sin
step: x * table()
change: held[2] = torch.full((2, 2), 3.0).unbind(0)

# a list
held = []
def table():
    if not held: held.append(torch.linspace(0, 1, 2))
    return held[0]
step: x * table()
change: held[0] = torch.full((2,), 3.0)

# a global
global TABLE
TABLE = None
def table():
    global TABLE
    if TABLE is None or len(TABLE) < 2: TABLE = torch.linspace(0, 1, 2)
    return TABLE[:2]
step: x * table()
change: TABLE = torch.full((2,), 3.0)
change: table()[:2].fill_(9.0)  -> a remembered constant was written

# a variable
held = None
def table():
    nonlocal held
    if held is None: held = torch.linspace(0, 1, 2)
    return held
step: x * table()
change: held = torch.full((2,), 3.0)

# a class
class Tables:
    held = {}
    @classmethod
    def of(cls, n):
        if n not in cls.held: cls.held[n] = torch.linspace(0, 1, n)
        return cls.held[n]
step: x * Tables.of(2)
change: Tables.held[2] = torch.full((2,), 3.0)

# an object
class Rotary:
    def __init__(self): self.table = None
    def __call__(self):
        if self.table is None: self.table = torch.linspace(0, 1, 2)
        return self.table
rotary = Rotary()
step: x * rotary()
change: rotary.table = torch.full((2,), 3.0)

# a function
def table():
    if not hasattr(table, "held"): table.held = torch.linspace(0, 1, 2)
    return table.held
step: x * table()
change: table.held = torch.full((2,), 3.0)

# a module
held = {}
def table():
    if 2 not in held: held[2] = torch.linspace(0, 1, 2)
    return held[2]
class Positions(nn.Linear):
    def forward(self, x): return super().forward(x) * table()
apply, params, buffers = fcg.from_module(Positions(2, 2))
params = {name: torch.ones(value.shape).tolist() for name, value in params.items()}
step: apply({name: torch.tensor(value) * x.sum() for name, value in params.items()}, buffers, x)[0]
change: held[2] = torch.full((2,), 3.0)
"""


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "was called before"])
@rows(TABLES)
def test_row(row: Row, change: Change, warm: bool) -> None:
    called = f"\n(lambda x: {row.step.removeprefix('return ')})(torch.ones(2))" if warm else ""
    judge(replace(row, setup=row.setup + called), change)


MOVING = r"""
# counts
held = {}
step:
    if "n" not in held: held["n"] = torch.zeros(())
    held["n"] = held["n"] + 1
    return x * held["n"]
refused: BakedValueError:

# counts in place
held = {}
step:
    if "n" not in held: held["n"] = torch.zeros(())
    y = x * held["n"]
    held["n"].add_(1)
    return y
refused: ReadOnlyError:

# does more at first
held = {}
step:
    if "table" not in held: held["table"], x = torch.linspace(0, 1, 2), x + 1
    return x * held["table"]
refused: BakedValueError:

# writes two at once
held = {}
step:
    sums = [torch.zeros_like(x), torch.zeros_like(x)]
    torch._foreach_add_(sums, [x, x * 2])
    if "table" not in held:
        held["table"] = torch.linspace(0, 1, 2)
        return sums[0]
    return sums[1]
refused: BakedValueError:

# remembers an input
held = {}
step:
    if "x" not in held: held["x"] = x * 2
    return x * held["x"]
refused: SideEffectError:

# only read
held = SimpleNamespace(table=torch.linspace(0, 1, 2), tables={2: torch.linspace(0, 1, 2)})
step: x * held.table
refused: ForeignTensorError: in neither the state nor the inputs

# only read of a dict
held = {2: torch.linspace(0, 1, 2)}
step: x * held[2]
refused: ForeignTensorError: in neither the state nor the inputs
""" + "".join(
    # Whatever number a numbering of values gives to `y`: it is not that number.
    f"""
# adds {number} later
held = {{}}
step:
    y = x * 3
    if "table" not in held:
        held["table"] = torch.linspace(0, 1, 2)
        return x + y
    return x + {number}
refused: BakedValueError:
"""
    for number in range(8)
)


@rows(MOVING)
def test_what_goes_on_from_call_to_call_is_refused(row: Row, change: Change) -> None:
    judge(row, change)


def test_a_change_leaves_the_state_alone_and_the_fix_goes_on_with_it() -> None:
    held: dict[int, Tensor] = {}

    def train_step(state: Any, x: Tensor) -> Any:
        table = held.setdefault(2, torch.linspace(0, 1, 2))
        value, grad = fcg.value_and_grad(lambda w: ((w * table - x) ** 2).sum())(state["w"])
        return {"w": state["w"] - 0.1 * grad}, {"loss": value, "table": table}

    step, state = fcg.graph_step(train_step), fcg.place({"w": torch.ones(2)})
    twin = fcg.fork(state)
    for n in range(4):
        state, metrics = step(state, X * n)
        twin, expected = step.eager(twin, X * n)
        assert_trees_all_equal((fcg.snapshot(state), metrics), (fcg.snapshot(twin), expected))
    assert type(held[2]) is Tensor  # whatever reads the cache next finds an ordinary tensor
    assert (step.stats.traces, step.stats.replays) == (1, 4)
    held[2] = torch.full((2,), 3.0)
    before = fcg.snapshot(state)
    with pytest.raises(fcg.BakedValueError):
        step(state, X)
    assert_trees_all_equal(fcg.snapshot(state), before)
    again, _ = fcg.graph_step(train_step)(state, X)
    twin, _ = step.eager(twin, X)
    assert_trees_all_equal(fcg.snapshot(again), fcg.snapshot(twin))
