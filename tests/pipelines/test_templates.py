"""What a trace makes again is one call of a sub-program: what is said of that holds of all the calls it stands for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim, sharding
from functional_cg.ambient.running import running
from functional_cg.shards.mesh import Axis, Mesh
from functional_cg.stages.blocks import Blocks
from functional_cg.stages.plan import Buffers, Plan, lower_aten
from functional_cg.stages.program import Instr, Program, Var
from functional_cg.stages.run.reserve import events
from functional_cg.stages.schedule import Schedule, schedule
from functional_cg.stages.sub_programs import SubProgram, unrolled
from functional_cg.stages.trace.footprint import inspection_of
from functional_cg.stages.trial.unchecked import Unchecked
from functional_cg.state.arena import BufferSpec
from functional_cg.step.ranks import _followed, told_apart
from tests.bench.ranks.jobs import Job, Shape
from tests.pipelines.programs import CUTS, FEATURES, ONE, Run, made, rows
from tests.pipelines.test_mistakes import pipe_of
from tests.shares import diagonal, share

HERE = Path(__file__)
VARIANTS = [Run("zero_bubble", FEATURES), *(Run(s, (f,)) for s, f in diagonal([*CUTS], FEATURES))]
each_variant = pytest.mark.parametrize("run", share(VARIANTS, len(VARIANTS)), ids=str)


def lowered(run: Run) -> Any:
    _, state, function = made(run, ONE)
    return fcg.graph_step(function, lowering="aten").lower(state, rows(0, 0))


def templates_of(program: Program) -> list[Instr]:
    return [instr for instr in program.instrs if isinstance(instr.op, SubProgram)]


@pytest.mark.parametrize("features", share([("dropout", "aux"), ("tied",)], 2))
def test_a_micro_batch_adds_as_many_calls_whatever_a_stage_computes(features: tuple[str, ...]) -> None:
    added = set[int]()
    for layers in (4, 8):
        sizes = [
            len(lowered(Run("1f1b", features, cuts=(2,), microbatches=count, layers=layers)).program.instrs)
            for count in (3, 6)
        ]
        added.add(sizes[1] - sizes[0])
    assert len(added) == 1
    assert added.pop() < 3 * 24, "a dozen for each of two stages"


def test_a_bound_plan_is_freed_by_reference_counts_alone() -> None:
    """The copy of a state that a warm-up runs on goes before the capture, not when garbage is looked for."""
    _, state, function = made(Run("1f1b", ("tied",), cuts=(2,)), ONE)
    found = fcg.graph_step(function, lowering="aten").lower(state, rows(0, 0))
    program = found.program
    assert templates_of(program)
    slots = zeros(program.slots)
    kept = [weakref.ref(slot) for slot in slots]
    constants = [constant.value for constant in program.constants]
    run = found.plan.bind(Buffers(slots, zeros(program.inputs), constants))
    run(())
    enabled = gc.isenabled()
    gc.disable()
    try:
        del run, slots
        assert not any(one() is not None for one in kept)
    finally:
        if enabled:
            gc.enable()


def zeros(variables: Sequence[Var]) -> list[Tensor]:
    return [torch.zeros(var.spec.shape, dtype=var.spec.dtype) for var in variables]


@each_variant
def test_what_is_said_of_a_program_is_what_is_said_of_its_calls(run: Run) -> None:
    """What is read and drawn, and over which ranks each new leaf may differ."""
    program = lowered(run).reference.program
    every = unrolled(program)
    assert len(every.instrs) > len(program.instrs)
    assert inspection_of(program, ()) == inspection_of(every, ())
    mesh = Mesh((Axis("data", 2, 0, "group"),))
    specs, names = [var.spec for var in program.slots], [f"input {i}" for i, _ in enumerate(program.inputs)]
    for of_data in (False, True):
        found = [_followed(one, specs, names, mesh, {}, {}, {}, of_data=of_data) for one in (program, every)]
        for var in (*program.new_state, *program.results):
            assert found[0](var) == found[1](var)


def test_all_that_a_checked_result_is_made_of_is_checked() -> None:
    """By a sub-program, too: an index is out of range because of either of the two that it is a sum of."""

    def function(x: Tensor, y: Tensor, i: Tensor, j: Tensor) -> Any:
        pairs = [(x.long(), y.long()), (i, j)]
        out = [running().repeated("block", lambda g: [g[0] + g[1], g[1] * 2], pair) for pair in pairs]
        return x[running().tensor(out[1][0])], running().tensor(out[1][1])

    x, i = torch.ones(3), torch.tensor([0, 1, 2])
    program = fcg.graph_fn(function, lowering="aten").lower(x, x + 1, i, i - 1).reference.program
    assert templates_of(program)
    assert Unchecked.of(program).inputs == (True, True, False, False)


@each_variant
def test_a_rewritten_program_makes_the_calls_of_one_that_is_recorded(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded = lowered(run)
    peak, plan = folded.memory_analysis()["peak"], schedule(unrolled(folded.program))
    monkeypatch.setattr(Blocks, "again", lambda *args: None)
    monkeypatch.setattr(Blocks, "fold", lambda blocks: None)
    recorded = lowered(run)
    assert recorded.memory_analysis()["peak"] == peak
    assert [str(instr.op) for instr in schedule(recorded.program).head] == [str(i.op) for i in plan.head]


@pytest.mark.parametrize("schedule", share(["zero_bubble", *CUTS], 9))
def test_what_a_plan_allocates_is_what_its_calls_do(schedule: str) -> None:
    """Of large values: those that a sub-program keeps for itself, is given and hands on."""
    stages = len(CUTS[schedule]) + 1
    shape = Shape(llama=True, layers=4, width=256, wide=512, heads=4, groups=2, time=2048, vocab=512)
    job = Job(shape, stages, 1, rows=1, microbatches=4, schedule=schedule, per_rank=1)
    pipe = sharding.pipeline(sharding.mesh(ONE), schedule=schedule, microbatches=4)
    state = fcg.TrainState.create(params=job.params(), optimizer=optim.adamw(0.1, weight_decay=0.1))

    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = pipe.value_and_grad(job.loss_fn(pipe.cut))(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    batch = job.batch(torch.device("cpu"), 0, 1)
    plan: Any = fcg.graph_step(train_step, lowering="aten").lower(state, batch).plan
    assert templates_of(plan.program)
    found = events(plan)
    # What is dropped at one place is dropped in the order of names, which is another one there.
    assert in_groups(found) == in_groups(events(lower_aten(unrolled(plan.program))))
    assert len(found) > 500


def in_groups(found: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return what is allocated, and what is freed between two allocations in the order of numbers."""
    return [sorted(group) for _, group in groupby(found, lambda one: one[1] > 0 and one)]


def test_a_number_that_differs_between_ranks_counts_where_a_template_is_called() -> None:
    def program(number: float) -> Program:
        def function(x: Tensor) -> Any:
            out = [running().repeated("block", lambda g: [g[0] * number + 1], [x + n]) for n in range(2)]
            return [running().tensor(one) for (one,) in out]

        traced = fcg.graph_fn(function, lowering="aten").lower(torch.tensor(1.0)).reference.program
        assert len(templates_of(traced)) == 2
        return traced

    one, other = program(2.0), program(3.0)
    words = list(zip(told_apart(one), told_apart(other), strict=True))
    assert len(words) == len(one.constants) + len(one.instrs)  # one word for all that a template holds
    _, place = (number for number, (mine, its) in enumerate(words) if mine != its)
    specs = [var.spec for var in one.slots]
    mesh = Mesh((Axis("data", 2, 0, "group"),))
    for told in ({}, {place: ("data",)}):
        of = _followed(
            one, specs, ["x"], mesh, told, {}, {}
        )  # a number for all, and so the same on all ranks
        assert set(of(one.results[1])) == ({"data"} if told else set())


class Seen:
    """An op that says whether a tensor was still alive when it ran."""

    _schema = torch._C.parse_schema("tests::seen(Tensor one) -> Tensor[]")

    def __init__(self, name: str) -> None:
        self.name, self.of, self.alive = name, weakref.ref(torch.ones(1)), False

    def __str__(self) -> str:
        return self.name

    def __call__(self, one: Tensor) -> Sequence[Tensor]:
        self.alive = self.of() is not None
        return [one + 1]


def test_a_template_frees_what_it_is_given_after_its_last_use() -> None:
    """As a line of calls does: what a forward keeps is free as soon as the backward has read it."""
    spec = BufferSpec((3,), (1,), torch.float32, torch.device("cpu"))
    a, b, c, d, e, f = (Var(number, spec, number, 0, fills=True) for number in range(6))
    maker, first, second = Seen("maker"), Seen("first"), Seen("second")

    def call(op: Any, given: Var, out: Var) -> Instr:
        return Instr(op, (given,), {}, [out], (), None)

    template = SubProgram("block", [d], [call(first, d, e), call(second, e, f)], [f])
    program = Program("step", [], [], [a], outputs=[c])
    plan = Plan(program, Schedule([call(maker, a, b), template.call([b], [c], (0, 0))], outputs=[c]))
    taken = maker.__call__

    def made_by(one: Tensor) -> Sequence[Tensor]:
        out = taken(one)
        first.of = second.of = weakref.ref(out[0])
        return out

    plan._writer.names["op_maker"] = made_by
    (found,) = plan.bind(Buffers([], [torch.zeros(3)], []))(())
    assert found.tolist() == [3.0, 3.0, 3.0]
    assert (first.alive, second.alive) == (True, False)


def test_an_error_on_a_later_micro_batch_names_the_line() -> None:
    pipe = pipe_of(microbatches=3)

    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        hidden = pipe.cut(params["emb"][batch].sin())  # here
        return (hidden.cos() @ params["w"]).mean()

    params = {"emb": torch.ones(4, 3), "w": torch.ones(3)}
    step = fcg.graph_fn(lambda p, x: pipe.value_and_grad(loss_fn)(p, x), lowering="aten")
    step(params, torch.tensor([0, 1, 2]))
    with pytest.raises(IndexError) as found:
        step(params, torch.tensor([0, 1, 7]))
    line = next(n for n, text in enumerate(HERE.read_text().splitlines(), 1) if text.endswith("# here"))
    assert f"raised by its replay, at {HERE.name}:{line}" in found.value.__notes__[0]


def test_results_that_are_one_value_and_what_nobody_reads_are_left_out() -> None:
    def act(given: list[Tensor]) -> list[Tensor]:
        x, y = given
        kept = x.exp()
        return [kept, kept.detach(), x.detach(), y.sin().cos(), kept.log()]

    def function(x: Tensor, y: Tensor) -> Any:
        out = [running().repeated("block", act, [x + number, y + number]) for number in range(3)]
        return [
            running().tensor(one).neg()
            for kept, same, again, _, log in out
            for one in (kept, same, again, log)
        ]

    x, y = torch.arange(3.0), torch.ones(3)
    step = fcg.graph_fn(function, lowering="aten")
    fcg.testing.assert_trees_all_equal(step(x, y), function(x, y))
    for instr in templates_of(step.lower(x, y).program):
        assert [one.name for one in instr.op.calls] == ["exp", "log"]
        assert len(instr.op.results) == 2


class Counted(torch.autograd.Function):
    """The backward writes what the forward has made of a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.count = torch.tensor([0.0])
        return x * (2 + ctx.count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        ctx.count.add_(1)
        return grad * ctx.count


def _in_stages(stages: Any, microbatches: int) -> Any:
    mesh = sharding.mesh({"stage": -1, "data": 1})
    pipe = sharding.pipeline(mesh, schedule="1f1b", microbatches=microbatches)
    params = {"w": torch.full((2, 4), 0.5), "v": torch.full((2, 1), 0.25)}
    batch = {"x": torch.arange(16.0).reshape(8, 2) / 16}

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return stages(pipe.cut, batch["x"] @ params["w"], params["v"])  # type: ignore[no-any-return]

    state = fcg.TrainState.create(
        params=params, optimizer=optim.sgd(1.0), sharding=pipe.zero(loss_fn, params, batch)
    )

    @fcg.graph_step(lowering="aten")
    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = pipe.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss, "grad": grads["w"]}

    return train_step(state, batch)[1]


def test_a_literal_that_a_later_block_writes_is_another_one_in_each_micro_batch() -> None:
    def stages(cut: Any, h: Tensor, v: Tensor) -> Tensor:
        return ((cut(Counted.apply(h))[:, :2] @ v) ** 2).mean()

    fcg.testing.assert_trees_all_close(_in_stages(stages, 4), _in_stages(stages, 1))


def test_a_stage_may_take_views_alone() -> None:
    def stages(cut: Any, h: Tensor, v: Tensor) -> Tensor:
        return ((cut(cut(h).unflatten(1, (2, 2)).transpose(1, 2)) @ v) ** 2).mean()

    fcg.testing.assert_trees_all_close(_in_stages(stages, 4), _in_stages(stages, 1))
