"""A trace copies the calls of a stage for the other micro-batches, and gets the program that it would have recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.ambient.running import running
from functional_cg.stages import blocks
from functional_cg.stages.blocks import Blocks
from functional_cg.stages.sub_programs import SubProgram, unrolled
from functional_cg.stages.trace.twice import another_start
from functional_cg.testing import assert_trees_all_equal
from tests.operations import COMMON
from tests.pipelines.programs import CUTS, FEATURES, ONE, Run, made, rows
from tests.pipelines.test_mistakes import pipe_of
from tests.shares import diagonal, few, share, thorough


def everything(program: Any) -> list[Any]:
    """All that a program says: each call with its variables, where they lie, and where it comes from."""
    program = unrolled(program)
    first = {str(one.value): one.var for one in reversed(program.constants)}
    one_of = {one.var: first[str(one.value)] for one in program.constants}  # of equal literals
    program.instrs = [one.again(lambda var: one_of.get(var, var)) for one in program.instrs]
    program.constants = [one for one in program.constants if one_of[one.var] is one.var]
    calls = [
        (
            [(var.index, var.storage, var.offset, var.fills) for var in (*one.inputs(), *one.outputs())],
            *(one.writes, one.site, one.backward, one.inner, one.origin),
        )
        for one in program.instrs
    ]
    literals = [(str(one.var), one.value.tolist()) for one in program.constants]
    return [program.as_text(), str(calls), literals, list(map(str, program.reports))]


NOTED = """
def noted(self, *args):
    counts[id(self)] += 1
    return recorded(self, *args)
"""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many blocks each run of a function has recorded."""
    names = {"counts": Counter[int](), "recorded": Blocks.recorded}
    # Were it this file's, the host watch would see that it counts.
    exec(compile(NOTED, blocks.__file__, "exec"), names)
    monkeypatch.setattr(Blocks, "recorded", names["noted"])
    return names["counts"]  # type: ignore[return-value]


def lowered(run: Run) -> Any:
    _, state, function = made(run, ONE)
    return fcg.graph_step(function, lowering="aten").lower(state, rows(0, 0)).reference.program


VARIANTS = [Run("zero_bubble", FEATURES), *(Run(s, (f,)) for s, f in diagonal([*CUTS], FEATURES))]


@pytest.mark.parametrize("run", share(VARIANTS, len(VARIANTS)), ids=str)
def test_a_program_is_the_one_that_is_recorded_call_by_call(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = lowered(run)
    monkeypatch.setattr(Blocks, "again", lambda *args: None)
    assert everything(copied) == everything(lowered(run))


def test_a_stage_is_recorded_once_whatever_the_number_of_micro_batches(recorded: Counter[int]) -> None:
    counts = set[int]()
    for microbatches in (3, 6):
        recorded.clear()
        lowered(Run("1f1b", ("dropout", "aux"), cuts=(2,), microbatches=microbatches))
        counts.update(recorded.values())
    assert len(counts) == 1


# -- losses whose calls could depend on the micro-batch -------------------------------------------------------------


class WritesWhatTheForwardKept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        kept = x.cos()
        ctx.save_for_backward(kept)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (kept,) = ctx.saved_tensors
        return kept.mul_(grad).clone()


PIPE = pipe_of(microbatches=4)


def with_a_literal(params: Any, x: Tensor) -> Tensor:
    scale = torch.tensor([1.0, 2.0, 3.0])
    scale.mul_(2)  # it is new each time
    return (PIPE.cut(x @ params["w"] * scale) @ params["v"]).square().mean()


def with_an_absolute_offset(params: Any, x: Tensor) -> Tensor:
    return (PIPE.cut(x.as_strided((1, 3), (3, 1), 0) @ params["w"]) @ params["v"]).square().mean()


def with_views(params: Any, x: Tensor) -> Tensor:
    first, second = PIPE.cut((x @ params["w"].T).T[:2].chunk(2))
    return ((first.T @ second).expand(3, 2, 2)[1:].mT.reshape(4, 2) @ params["v"].T[:2]).square().mean()


def with_reports(params: Any, x: Tensor) -> Tensor:
    h = PIPE.cut(torch.tanh(x @ params["w"]))
    fcg.debug_print("h {}", h.sum())
    return (h @ params["v"]).square().mean()


def with_writes_into_what_was_kept(params: Any, x: Tensor) -> Tensor:
    h = WritesWhatTheForwardKept.apply(PIPE.cut(x @ params["w"]))
    return (h @ params["v"]).square().mean()  # type: ignore[operator]


LOSSES = [with_a_literal, with_an_absolute_offset, with_views, with_reports, with_writes_into_what_was_kept]
PARAMS = {"w": torch.arange(9.0).reshape(3, 3) / 10, "v": torch.arange(9.0).reshape(3, 3) / 7}
X = torch.arange(24.0).reshape(8, 3) / 5


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda one: one.__name__)
def test_other_losses(
    loss_fn: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def grads(params: Any, x: Tensor) -> Any:
        return PIPE.value_and_grad(loss_fn)(params, x)

    def program() -> list[Any]:
        return everything(fcg.graph_fn(grads, lowering="aten").lower(PARAMS, X).reference.program)

    assert_trees_all_equal(fcg.graph_fn(grads, lowering="aten")(PARAMS, X), grads(PARAMS, X))
    replayed, eager = (text.count("h ") for text in (capsys.readouterr().out, "h " * 8))
    assert replayed == (eager if loss_fn is with_reports else 0)
    copied = program()
    monkeypatch.setattr(Blocks, "again", lambda *args: None)
    assert copied == program()


# name -> function of a value, another one, and a weight, all [4, 4]
OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    **COMMON,
    "relu": lambda a, b, w: torch.relu(a),
    "sort": lambda a, b, w: a.sort(-1)[0],
    "halves": lambda a, b, w: torch.cat(a.chunk(2)[::-1]),
    "write": lambda a, b, w: a.clone().add_(1),
    "write a part": lambda a, b, w: a.index_put((torch.tensor([0, 2]),), b[0].to(a.dtype)),
    "dropout": lambda a, b, w: fcg.random.dropout(
        fcg.random.fold_in(fcg.random.key(3), a.detach().float().abs().sum().long()), a, 0.5
    ),
    "literal": lambda a, b, w: a * torch.tensor([1.0, 2.0, 3.0, 4.0]).neg_(),
    "kept": lambda a, b, w: WritesWhatTheForwardKept.apply(a),  # type: ignore[no-any-return]
}


@st.composite
def losses(draw: Callable[[Any], Any]) -> Sequence[tuple[str, int, int]]:
    """Calls on earlier values."""
    return [
        (draw(st.sampled_from(sorted(OPERATIONS))), draw(st.integers(0, n)), draw(st.integers(0, n)))
        for n in range(draw(st.integers(1, 8)))
    ]


@few
@given(calls=losses(), at=st.integers(0, 7))
def test_a_random_loss(calls: Sequence[tuple[str, int, int]], at: int) -> None:
    """In two stages, or in one if it has no such call."""
    pipe = pipe_of(microbatches=3)

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        values = [x @ w]
        for number, (name, a, b) in enumerate(calls):
            values = list(pipe.cut(tuple(values))) if number == at else values
            values.append(OPERATIONS[name](values[a], values[b], w))
        return sum(value.float().square().mean() for value in values[-2:])  # type: ignore[return-value]

    def grads(w: Tensor, x: Tensor) -> Any:
        return pipe.value_and_grad(loss_fn)(w, x)

    w, x = torch.arange(16.0).reshape(4, 4).cos(), torch.arange(48.0).reshape(12, 4).sin()
    step = fcg.graph_fn(grads, lowering="aten")
    assert_trees_all_equal(step(w, x), grads(w, x))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Blocks, "again", lambda *args: None)
        recorded = fcg.graph_fn(grads, lowering="aten").lower(w, x).reference.program
    assert everything(step.lower(w, x).reference.program) == everything(recorded)


# -- blocks on their own ----------------------------------------------------------------------------------------------

SAME, SHORTER, TURNED = (
    [slice(0, 2), slice(2, 4), slice(4, 6)],
    [slice(0, 2), slice(2, 3), slice(3, 4)],
    [slice(0, 2), slice(0, 6, 4), slice(2, 4)],
)


@pytest.mark.parametrize(
    ("parts", "act", "times"),
    [
        (SAME, lambda given: [given[0] * 2 + 1], 1),
        (SHORTER, lambda given: [given[0] * 2 + 1], 2),  # it is kept as it was last
        (TURNED, lambda given: [given[0] * 2 + 1], 3),
        (SAME, lambda given: [given[0].as_strided((2,), (1,), 0) + 1], 3),
        (SAME, lambda given: [given[0].view(-1), given[0]], 1),
        (SAME, lambda given: [given[0].T.clone().T[1:]], 1),
    ],
)
def test_a_block_is_copied_where_its_layouts_are_those_of_before(
    parts: Sequence[slice], act: Any, times: int, recorded: Counter[int]
) -> None:
    def function(x: Tensor) -> Any:
        found = [running().repeated("block", act, [x[part]]) for part in parts]
        return [running().tensor(one).sum() for of_part in found for one in of_part]

    x = torch.arange(18.0).reshape(6, 3)
    assert_trees_all_equal(fcg.graph_fn(function, lowering="aten")(x), function(x))
    assert set(recorded.values()) == {times}


def test_what_a_block_is_given_must_be_as_distinct_as_before(recorded: Counter[int]) -> None:
    """The first time, both are one tensor; a copy with two could not tell which is which."""

    def function(x: Tensor) -> Any:
        pairs = [(x, x), (x, x + 1), (x + 2, x)]
        found = [running().repeated("block", lambda g: [g[0] * 2 - g[1]], pair) for pair in pairs]
        return [running().tensor(one) for (one,) in found]

    x = torch.arange(3.0)
    assert_trees_all_equal(fcg.graph_fn(function, lowering="aten")(x), function(x))
    assert set(recorded.values()) == {2}


@pytest.mark.parametrize(
    ("pairs", "times"),
    [
        (lambda x, y: [(x[:2], x[2:]), (y[:2], y[2:])], 1),
        (lambda x, y: [(x[:2], x[2:]), (x[:2], y[2:])], 2),  # in one storage, and then in two
        (lambda x, y: [(x[:2], x[2:]), (x[2:], x[:2])], 2),  # moved in it by numbers that differ
        (lambda x, y: [(x.clone(), y), (x.repeat(2)[:4], y)], 2),  # all of a storage, and then a part
    ],
)
def test_what_a_block_is_given_must_lie_as_before(pairs: Any, times: int, recorded: Counter[int]) -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        given = pairs(x, y)
        found = [running().repeated("block", lambda g: [g[0] * 2 - g[1]], pair) for pair in given]
        return [running().tensor(one) for (one,) in found]

    x, y = torch.arange(4.0), torch.arange(4.0, 8.0)
    assert_trees_all_equal(fcg.graph_fn(function, lowering="aten")(x, y), function(x, y))
    assert set(recorded.values()) == {times}


def test_a_block_that_is_given_something_else_in_a_second_trace_is_refused() -> None:
    program = lowered(Run("1f1b", ("tied",), cuts=(1,)))
    other = program.twin()
    assert another_start(program, other) is None
    place, instr = next((n, one) for n, one in enumerate(other.instrs) if isinstance(one.op, SubProgram))
    first, second, *others = instr.args[0]
    other.instrs[place] = replace(instr, args=([second, first, *others], *instr.args[1:]))
    difference = another_start(program, other)
    assert difference is not None
    assert "two traces of it differ" in difference.what


def test_a_block_that_writes_what_it_is_given_is_recorded_each_time(recorded: Counter[int]) -> None:
    """The rules say what may be written, so they see each write."""

    def function(x: Tensor) -> Any:
        own = [x + 1, x + 2, x + 3]
        return [running().tensor(running().repeated("block", lambda g: [g[0].mul_(2)], [o])[0]) for o in own]

    def refused(state: Any) -> Any:
        for one in (state["w"] + 1, state["w"]):
            running().repeated("block", lambda g: [g[0].mul_(2)], [one])
        return state, {}

    x = torch.arange(3.0)
    assert_trees_all_equal(fcg.graph_fn(function, lowering="aten")(x), function(x))
    assert set(recorded.values()) == {3}
    with pytest.raises(fcg.ReadOnlyError, match=r"writes in place into `state\['w'\]`"):
        fcg.graph_step(refused, lowering="aten")({"w": x})


def test_results_of_blocks_are_tensors_where_one_is_asked_for() -> None:
    """In the same memory, if they are views of each other."""

    def function(x: Tensor) -> Any:
        total: Any = x[0]
        for row in x:
            whole, half = running().repeated("block", lambda g: [t := g[0] + g[1], t[1:]], [total, row])
            total = whole
        running().tensor(half).mul_(2)
        return running().tensor(whole), running().tensor(half)

    x = torch.arange(12.0).reshape(4, 3)
    assert_trees_all_equal(fcg.graph_fn(function, lowering="aten")(x), function(x))


def test_memory_of_a_result_is_as_large_as_at_first() -> None:
    """Of a part, before anybody asks for the whole; among blocks and values of other sizes."""
    sizes = list[list[int]]()

    def act(given: list[Tensor]) -> list[Tensor]:
        wide = given[0].repeat(5)
        return [wide.exp()[2:4], given[0].sin()[1:]]

    def function(x: Tensor) -> Any:
        found = [
            (
                running().repeated("some", act, [row]),
                running().repeated("others", act, [row.repeat(2)]),
                row.neg(),
            )
            for row in x
        ]
        parts = [[running().tensor(one) for one in (*some, *others)] for some, others, _ in found]
        sizes.extend([one.untyped_storage().nbytes() for one in of_row] for of_row in parts)
        return parts

    x = torch.arange(12.0).reshape(4, 3)
    assert_trees_all_equal(fcg.graph_fn(function, lowering="aten")(x), function(x))
    assert sizes == [[60, 12, 120, 24]] * len(sizes)


@thorough
def test_blocks_on_many_micro_batches() -> None:
    run = Run("1f1b", ("tied", "dropout", "clip", "adamw"), cuts=(1, 3), microbatches=12)
    pipe, state, function = made(Run([[*str_rows(3, 12)]], run.features, cuts=run.at, microbatches=12), ONE)
    step, eager = fcg.graph_step(function, lowering="aten"), fcg.fork(state)
    for call in range(2):
        state, metrics = step(state, rows(call, pipe.mesh.rank))
        eager, expected = step.eager(eager, rows(call, pipe.mesh.rank))
        assert_trees_all_equal(metrics, expected)


def str_rows(stages: int, microbatches: int) -> list[str]:
    """One rank's row: all stages forward, then all backward, for one micro-batch after the other."""
    return [
        f"{stage}{kind}{m}"
        for m in range(microbatches)
        for kind, order in (("F", range(stages)), ("B", reversed(range(stages))))
        for stage in order
    ]
