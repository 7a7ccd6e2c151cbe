"""An order that recomputes values reads what the program's own order reads, within its budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from functional_cg.shards.transfers import RECEIVE
from functional_cg.stages.lifetimes import storage_bytes
from functional_cg.stages.program import Instr, Var
from functional_cg.stages.trial.remat_plan import Action, in_order, within
from functional_cg.state.arena import BufferSpec

_OP = torch.ops.aten.relu.default
# Calls on earlier values: what they make, then the numbers of two arguments.
PROGRAMS = st.lists(
    st.tuples(
        st.sampled_from(["one", "one", "two", "view", "write", "read", "read"]),
        st.integers(0, 60),
        st.integers(0, 60),
    ),
    max_size=24,
)


def calls_of(program: Sequence[tuple[str, int, int]]) -> tuple[list[Instr], Var]:
    """Calls on values of one to three KiB, and their only input."""
    values: list[Var] = []

    def made(kib: int, storage: int | None = None) -> Var:
        spec = BufferSpec.of(torch.empty(256 * kib))
        new = Var(len(values), spec, len(values) if storage is None else storage, 0, True)
        values.append(new)
        return new

    made(1)
    calls = []
    for kind, i, j in program:
        a, b = values[i % len(values)], values[j % len(values)]
        if kind == "view":
            out = made(a.spec.numel // 256, a.storage)
            calls.append(Instr(torch.ops.aten.alias.default, (a,), {}, out, (), None))
        elif kind == "write" and a.storage != values[0].storage:
            calls.append(Instr(torch.ops.aten.add_.Tensor, (a, b), {}, a, (a,), None))
        elif kind == "read":
            calls.append(Instr(_OP, (a, b), {}, None, (), None))
        else:
            out = [made(1 + (i + n) % 3) for n in range(2 if kind == "two" else 1)]
            calls.append(Instr(_OP, (a, b), {}, out, (), None))
    return calls, values[0]


class Machine:
    """Runs actions on memory whose contents are numbers: one for each call together with what it has read."""

    def __init__(self, static: Var) -> None:
        self._given = {static: [0, 0]}
        self._known: dict[Any, int] = {}
        self.most = self.waiting = 0  # bytes in memory, and aside

    def run(self, actions: Sequence[Action], sizes: dict[int, int]) -> list[tuple[Instr, Any]]:
        """Return each call that only reads, with what it reads."""
        # Content and bytes of each variable; views have one list in common.
        memory = {var: [*one] for var, one in self._given.items()}
        aside: dict[int, dict[Var, list[int]]] = {}
        self.most, self.waiting, seen = 0, 0, []
        for action in actions:
            for var in action.forget:
                del memory[var]
            for group in action.aside:
                lies = {id(memory[var]) for var in group}
                assert len(lies) == 1, "the values of one storage wait together"
                assert not any(id(one) in lies for var, one in memory.items() if var not in group)
                aside[group[0].storage] = {var: memory.pop(var) for var in group}
            if action.back:
                found = aside.pop(action.back[0].storage)
                assert [*found] == action.back
                anew = [*next(iter(found.values()))]
                memory |= dict.fromkeys(found, anew)
                self.most = max(self.most, _held(memory))
            self.waiting = max(self.waiting, sum(_held(one) for one in aside.values()))
            if (instr := action.instr) is not None:
                read = tuple(memory[var][0] for var in instr.inputs())
                self._call(instr, read, memory, sizes)
                if not instr.outputs():
                    seen.append((instr, read))
        return seen

    def _call(self, instr: Instr, read: Any, memory: dict[Var, list[int]], sizes: dict[int, int]) -> None:
        lies = {var.storage: memory[var] for var in instr.inputs()}
        for var in instr.writes:
            memory[var][0] = self._content(instr, 0, read)
        made = {
            var: lies.get(var.storage) or [self._content(instr, number, read), sizes[var.storage]]
            for number, var in enumerate(instr.outputs())
        }
        # What a call makes again is there beside the old.
        self.most = max(self.most, _held({**memory, **{("new", var): one for var, one in made.items()}}))
        memory |= made

    def _content(self, *made: Any) -> int:
        return self._known.setdefault(made, 1 + len(self._known))


def _held(memory: Mapping[Any, list[int]]) -> int:
    """The bytes of what lies in memory, views not counted."""
    return sum({id(one): one[1] for one in memory.values()}.values())


@given(PROGRAMS, st.integers(1, 10), st.sampled_from([0, 3 * 2**10, 2**30]))
@example([("two", 7, 7), ("one", 12, 0), ("view", 8, 5), ("read", 6, 12)], 9, 0)
@example([("two", 0, 0), ("write", 1, 0), ("one", 0, 1), ("one", 3, 3), ("read", 4, 3), ("read", 2, 1)], 6, 0)
def test_in_less_memory_each_call_reads_the_same(
    program: list[tuple[str, int, int]], tenths: int, host: int
) -> None:
    """With enough host memory, each program whose calls fit one by one."""
    calls, static = calls_of(program)
    sizes, machine = storage_bytes(calls), Machine(static)
    expected = machine.run(in_order(calls), sizes)
    budget = machine.most * tenths // 10
    actions = within(calls, [static.storage], budget, host=host)
    if actions is not None:
        assert machine.run(actions, sizes) == expected
        assert machine.most <= budget
        assert machine.waiting <= host
    elif host == 2**30:
        storages = [{var.storage for var in (*one.inputs(), *one.outputs())} for one in calls]
        assert max(sum(sizes[one] for one in own if one != static.storage) for own in storages) > budget


def test_a_plan_is_the_same_each_time() -> None:
    """Variables are hashed by where they lie in memory, which must not show."""
    program = [("one", 0, 0)] * 20 + [("read", 20 - n, 1 + 7 * n % 20) for n in range(20)]
    programs = [calls_of(program) for _ in range(12)]  # all at once, so that no two lie in the same memory

    def plan(calls: Sequence[Instr], static: Var) -> tuple[list[int], ...]:
        actions = within(calls, [static.storage], sum(storage_bytes(calls).values()) // 4)
        assert actions is not None
        run = [action.instr for action in actions if action.instr is not None]
        assert len(run) > len(calls)
        return tuple([var.index for var in (*one.inputs(), *one.outputs())] for one in run)

    first, *others = [plan(*one) for one in programs]
    assert all(other == first for other in others)


@pytest.mark.parametrize("op", [torch.ops.aten.relu.default, RECEIVE], ids=["computed", "received"])
def test_what_another_rank_sent_is_not_received_again(op: Any) -> None:
    """It sends once; whatever else is cheap is computed again where memory is short."""
    nbytes = 2**20
    spec = BufferSpec.of(torch.empty(nbytes // 4))
    given, value, first, second, out, token = (Var(i, spec, i, 0, True) for i in range(6))
    received = op is RECEIVE
    calls = [
        Instr(op, (given,), {}, (value, token) if received else value, (), None),
        Instr(torch.ops.aten.neg.default, (value,), {}, first, (), None),
        Instr(torch.ops.aten.exp.default, (first,), {}, second, (), None),
        Instr(torch.ops.aten.sum.default, (second,), {}, second, (), None),
        Instr(torch.ops.aten.add.Tensor, (value, value), {}, out, (), None),
    ]
    found = within(calls, [given.storage, token.storage], 5 * nbytes // 2)
    assert (found is None) == received
    assert found is None or sum(action.instr is calls[0] for action in found) == 2
