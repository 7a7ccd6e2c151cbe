"""What templates hand on as one list: a plan computes what its calls do, however its templates are wired."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count

import pytest
import torch
from hypothesis import given, target
from hypothesis import strategies as st

from functional_cg.stages.plan import Buffers, lower_aten
from functional_cg.stages.program import Instr, Program, Var
from functional_cg.stages.template import Template, unrolled
from functional_cg.state.arena import BufferSpec

SPEC = BufferSpec((3,), (1,), torch.float32, torch.device("cpu"))
ADD, MUL, NEG = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.neg.default
numbers = count()


def var() -> Var:
    number = next(numbers)
    return Var(number, SPEC, number, 0, fills=True)


def template(name: str, given: int, results: int) -> Template:
    """Each result is another number; it depends on all that is given, and on the order of that."""
    read, start, calls = [var() for _ in range(given)], (0, next(numbers)), list[Instr]()

    def call(op: object, *args: object) -> Var:
        calls.append(Instr(op, args, {}, out := var(), (), None))
        return out

    total = call(MUL, read[0], 0.5)
    for place, one in enumerate(read[1:], 2):
        total = call(ADD, total, call(MUL, one, 0.5**place))
    return Template(name, read, calls, [call(ADD, total, float(n)) for n in range(results)], start)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Forwards whose results their backwards get, each kind in one order, and a few that are wired otherwise."""
    kept, also = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    forward = template("forward", 2, 1 + kept + also)
    backward, weights = template("backward", 1 + kept + also, 2), template("weights", also + 2, 2)
    order = draw(st.permutations(range(1 + kept + also)))
    x, w = var(), var()
    program = Program("step", [], [], [x, w])
    outputs, later, sums = list[Var](), list[list[Var]](), [w, w]

    def again(of: Template, given: Sequence[Var]) -> list[Var]:
        out = [var() for _ in of.results]
        first = next(numbers)
        for _ in range(50):  # numbers that its variables take when the call is taken apart
            next(numbers)
        moved = first - of.given[0].index
        program.instrs.append(of.call([*given], out, (moved, moved), len(program.instrs)))
        return out

    def finish(made: list[Var]) -> None:
        nonlocal sums
        given = [made[place] for place in order]
        if draw(st.integers(0, 3)) == 0:
            a, b = draw(st.tuples(*[st.integers(0, len(given) - 1)] * 2))
            given[a], given[b] = given[b], draw(st.sampled_from([given[a], *made, x]))
        if draw(st.integers(0, 3)) == 0:
            program.instrs.append(Instr(NEG, (draw(st.sampled_from(made)),), {}, one := var(), (), None))
            outputs.append(one)
        if draw(st.integers(0, 7)) == 0:
            outputs.append(draw(st.sampled_from(made)))
        back = again(backward, given)
        sums = again(weights, [*made[1 : 1 + also], *(sums if draw(st.booleans()) else back)])
        outputs.append(back[0])

    for _ in range(draw(st.integers(1, 5))):
        later.append(again(forward, [x, w]))
        if draw(st.booleans()):
            finish(later.pop(0))
    for made in later:
        finish(made)
    program.outputs = [*outputs, *sums]
    return program


def assert_computes_what_its_calls_do(program: Program) -> str:
    """Returns the source of its plan."""
    plans = lower_aten(program), lower_aten(unrolled(program))
    x, w = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.25, -1.0, 7.0])
    found = [plan.bind(Buffers([], [x, w][: len(program.inputs)], []))(()) for plan in plans]
    assert len(found[0]) == len(program.outputs)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    return plans[0].as_text()


@given(programs())
def test_values_are_those_of_the_calls(program: Program) -> None:
    text = assert_computes_what_its_calls_do(program)
    target(float(text.count("*h")))


class Wired:
    """Micro-batches: the backwards get four values of their forward, and other calls, too.

    Args:
      otherwise: What is wired otherwise.
    """

    def __init__(self, otherwise: str = "") -> None:
        self.program = Program("step", [], [], [x := var()])
        forward, other = template("forward", 1, 5), template("other forward", 1, 5)
        backward, another = template("backward", 4, 1), template("another backward", 4, 1)
        weights = template("weights", 2, 1)
        for number in range(3):
            made = self._again(other if (otherwise, number) == ("two forwards", 2) else forward, x)
            same = made[1:]
            if (otherwise, number) in (("two forwards", 2), ("turned", 0)):
                same.reverse()
            if otherwise == "one twice":
                same[1] = same[0]
            ends = [another if (otherwise, number) == ("two backwards", 0) else backward]
            ends += [backward] * (otherwise == "twice") + [weights] * (otherwise == "weights")
            for end in ends:
                self.program.outputs += self._again(end, *(made[2:4] if end is weights else same))
            self.program.outputs += [made[0]] + [made[3]] * ((otherwise, number) == ("a result", 0))
            if otherwise == "a plain call" or (otherwise, number) == ("read once more", 0):
                read = made[1:3] if otherwise == "a plain call" else [x, made[3]]
                self.program.instrs.append(Instr(ADD, (*read,), {}, one := var(), (), None))
                self.program.outputs.append(one)

    def _again(self, of: Template, *given: Var) -> list[Var]:
        out, moved = [var() for _ in of.results], 1_000_000 * (1 + len(self.program.instrs))
        self.program.instrs.append(of.call([*given], out, (moved, moved), 0))
        return out


@pytest.mark.parametrize(
    ("otherwise", "lists"),
    [
        ("", 3),
        ("a result", 2),
        ("two backwards", 2),
        ("two forwards", 2),
        ("twice", 0),
        ("weights", 6),
        ("a plain call", 3),
        ("read once more", 2),
        ("turned", 2),
        ("one twice", 3),
    ],
)
def test_what_the_same_calls_read_has_one_name(otherwise: str, lists: int) -> None:
    """In all calls but those in which it is wired otherwise."""
    text = assert_computes_what_its_calls_do(Wired(otherwise).program)
    assert len({*re.findall(r"\*(h\d+)", text)}) == lists, text
