"""Equal parts of a program are compiled once: no value depends on it, and equal means equal in everything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

import functional_cg as fcg
from functional_cg.options import Options
from functional_cg.stages.lower import compiled, parts, repeats
from functional_cg.stages.lower.compiled import lower, prepare
from functional_cg.stages.lower.in_place import InPlacePlan
from functional_cg.stages.lower.parts import in_parts
from functional_cg.stages.passes.equal_calls import frozen
from functional_cg.stages.plan import lower_aten
from functional_cg.step import captures
from functional_cg.step.leaf_costs import leaf_costs
from functional_cg.testing import assert_trees_all_close, assert_trees_all_equal
from tests.exact_programs import EXACT
from tests.repeated import Repeated, repeated
from tests.shares import THOROUGH, share

CALLS = 3
PLAIN = Repeated(
    5,
    ("product", "bias", "halves", "times", "turned", "residual", "sums"),
    (2.0,) * 5,
    "by itself",
    frozenset(),
)


def as_it_is(graph: Any, arguments: Any) -> Any:
    """A compiler that runs the graph that it gets."""
    del arguments
    return graph


def in_place_on_a_host(program: Any, device: Any, choice: Any, reference: Any) -> Any:
    """The lowering in which parts write the state, as on a GPU, for a compiler that runs graphs as they are."""
    del choice
    prepare(program, large=1)
    return in_parts(program, device, as_it_is, reference, in_place=True) or lower_aten(program)


def in_place_by_inductor(program: Any, device: Any, choice: Any, reference: Any) -> Any:
    del choice
    prepare(program, large=1)
    return in_parts(program, device, None, reference, in_place=True)


@dataclass
class Loop:
    """A recurrence over time, whose states are joined with others before the loss reads them."""

    times: int

    @property
    def state(self) -> Any:
        return {"w": torch.eye(4).double(), "b": torch.ones(4).double()}

    def batch(self, number: int) -> Any:
        g = torch.Generator().manual_seed(number)
        return torch.randint(-2, 3, (self.times, 6, 4), generator=g).double()

    def __call__(self, state: Any, x: Any) -> Any:
        def turn(params: Any, h: Any, x: Any) -> Any:
            h = ((h @ params["w"] + params["b"]).clamp(-3, 3) @ params["w"].T + x).clamp(-2, 2)
            return h, h

        def loss_fn(params: Any) -> Any:
            _, hs = fcg.scan(lambda h, x: turn(params, h, x), torch.zeros_like(x[0]), x)
            joined = torch.cat([x, hs], -1)
            return (joined * (joined > 0)).sum()

        loss, grads = fcg.value_and_grad(loss_fn)(state)
        return fcg.tree.map(lambda w, g: (w - g).clamp(-1, 1), state, grads), {"loss": loss}


def assert_replays(program: Repeated | Loop, lowering: Any, device: str = "cpu") -> Any:
    """Every number of some calls is that of the eager run, with zeros of any sign by inductor; returns the plan."""
    same: Any = partial(assert_trees_all_close, rtol=EXACT, atol=EXACT)
    same = same if lowering == "inductor" else assert_trees_all_equal
    step = fcg.graph_step(program, lowering=lowering, compile_once=True)
    state = fcg.place(fcg.tree.map(lambda leaf: leaf.to(device), program.state))
    twin, kept = fcg.fork(state), []
    for call in range(CALLS):
        x = program.batch(call).to(device)
        twin, expected = step.eager(twin, x)
        state, metrics = step(state, x)
        kept.append((metrics, expected))
        same(state, twin)
    for metrics, expected in kept:
        same(metrics, expected)
    plan = step.lower(state, program.batch(0).to(device)).plan
    step.close()
    return plan


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@given(program=repeated())
@settings(max_examples=200 if THOROUGH else 4)
def test_every_value_is_that_of_the_eager_run(as_on_a_gpu: bool, program: Repeated) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_WORTH", 2)  # programs with few layers, too
        patch.setattr(repeats, "_LOSS", 2)
        patch.setattr(captures, "lower", in_place_on_a_host if as_on_a_gpu else lower)
        assert_replays(program, as_it_is)


@pytest.mark.parametrize(
    ("device", "as_on_a_gpu"),
    [
        pytest.param("cpu", True, marks=pytest.mark.skipif(not THOROUGH, reason="compiles for ten seconds")),
        pytest.param("cpu", False, marks=pytest.mark.skipif(not THOROUGH, reason="compiles for ten seconds")),
        pytest.param("cuda", False, marks=[pytest.mark.cuda, pytest.mark.filterwarnings("default")]),
    ],
)
def test_every_value_is_that_of_the_eager_run_by_inductor(
    device: str, as_on_a_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_on_a_gpu:
        monkeypatch.setattr(captures, "lower", in_place_by_inductor)
    program = Repeated(6, ("product", "bias", "turned"), (2.0,) * 6, "by itself", frozenset({"old biases"}))
    plan = assert_replays(program, "inductor", device)
    assert len(plan.heads) > 1
    assert max(plan.heads.values()) > 3


@pytest.mark.parametrize(
    ("steps", "odd"),
    [(("product", "either way", "turned"), 2.0), (("product", "times", "turned", "bias"), -2.0)],
    ids=["the same calls on other values", "another constant"],
)
def test_blocks_that_only_look_alike_share_nothing(
    steps: tuple[str, ...], odd: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_WORTH", 2)
    layers = 8
    plans = [
        assert_replays(Repeated(layers, steps, numbers, "by itself", frozenset()), as_it_is)
        for numbers in ((1.0,) * layers, (1.0,) * 4 + (odd,) + (1.0,) * 3)
    ]
    assert len(plans[1].heads) > len(plans[0].heads)


def test_a_leaf_is_written_after_its_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update of the last layer, which comes first, makes the new value of the first layer."""
    monkeypatch.setattr(parts, "_WORTH", 2)
    monkeypatch.setattr(captures, "lower", in_place_on_a_host)
    program = replace(PLAIN, keeps=frozenset({"turned over"}), update="twice")
    plan = assert_replays(program, as_it_is)
    assert len(plan.heads) > 1


def test_what_a_part_hands_on_lies_as_the_trace_saw_it() -> None:
    """A compiler's formula for ``cat`` of one tensor with elements keeps its strides; the op itself does not."""

    def step_fn(state: Any, x: Any) -> Any:
        seen = x.new_zeros(())
        for w in state["layers"]:
            q = (x @ w).clamp(-9, 9).view(2, 4, 2, 8).transpose(1, 2)
            q = torch.cat([-q, q[..., 8:]], -1)
            x = (q @ q.mT @ q).transpose(1, 2).reshape(2, 4, 16).remainder(7) @ w.mT
            seen = seen + x.abs().sum()
        return {"layers": [w + 1 for w in state["layers"]]}, {"x": x, "seen": seen}

    step = fcg.graph_step(step_fn, lowering="inductor", compile_once=True)
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randint(-2, 3, (64, 16), generator=generator).double() for _ in range(5)]
    state = fcg.place({"layers": layers})
    twin = fcg.fork(state)
    for _ in range(CALLS):
        x = torch.randint(-3, 4, (2, 4, 64), generator=generator).double()
        twin, expected = step.eager(twin, x)
        state, metrics = step(state, x)
        assert_trees_all_equal(metrics, expected)
        assert_trees_all_equal(state, twin)
    assert "compiled once: " in step.explain()


def test_it_says_which_calls_share_a_function() -> None:
    step = fcg.graph_step(PLAIN, lowering=as_it_is, compile_once=True)
    step.lower(PLAIN.state, PLAIN.batch(0))
    assert "compiled once: 4 x " in step.explain()


def plan_on_a_gpu(program: Any, **options: Any) -> Any:
    """The plan of a step on a GPU, before it is compiled."""
    low = fcg.graph_step(program, lowering="aten").lower(program.state, program.batch(0))
    return lower(low.program, torch.device("cuda"), Options(branches=1, **options), low.reference)


@dataclass
class Kept:
    """A step with one more leaf, which becomes the old value of another one."""

    state: Any
    batch: Any = PLAIN.batch

    def __call__(self, state: Any, x: Any) -> Any:
        new, metrics = PLAIN(state["own"], x)
        return {"own": new, "kept": state["own"]["shared"]}, metrics


def test_only_what_no_part_writes_is_said_to_be_copied() -> None:
    plan = plan_on_a_gpu(Kept({"own": PLAIN.state, "kept": torch.ones(4).double()}), compile_once=True)
    costs = leaf_costs(plan.program, plan, ["x"])["state"]
    copied = {name.partition("state")[2]: entry.copied for name, entry in costs if entry.copied}
    assert copied == {"['kept']": 64, "['own']['shared']": 32}
    assert len(plan.copied) == 2


def test_deep_programs_are_cut_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where so many calls need not be compiled that the first call takes half as long."""
    assert isinstance(plan_on_a_gpu(PLAIN), InPlacePlan)
    assert len(plan_on_a_gpu(PLAIN, compile_once=True).heads) > 1
    every = len(fcg.graph_step(PLAIN, lowering="aten").lower(PLAIN.state, PLAIN.batch(0)).program.instrs)
    monkeypatch.setattr(compiled, "_PAYS", every // 2)
    plan = plan_on_a_gpu(PLAIN)
    assert len(plan.heads) > 1
    assert any("compiled once" in line for line in plan.shared)
    assert isinstance(plan_on_a_gpu(PLAIN, compile_once=False), InPlacePlan)
    monkeypatch.setattr(compiled, "_PAYS", every - 1)  # its calls would do, but not those that are saved
    assert isinstance(plan_on_a_gpu(PLAIN), InPlacePlan)


@pytest.mark.parametrize("wrong", [None, 2, "once", 1.0])
def test_what_compile_once_may_be(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"compile_once must be 'auto', True or False, got"):
        fcg.graph_step(PLAIN, compile_once=wrong)


def test_arguments_are_equal_only_if_all_of_them_is() -> None:
    class Anything:
        def __repr__(self) -> str:
            return "Anything()"

    one = Anything()
    different = [
        0.0,
        -0.0,
        0,
        False,
        None,
        "0",
        (0,),
        [0],
        [0, 0],
        [(0,)],
        torch.float32,
        "torch.float32",
        one,
        Anything(),
    ]
    found = [frozen(value, id) for value in different]
    assert len(set(found)) == len(different)
    assert found == [frozen(value, id) for value in different]


@pytest.mark.parametrize(
    ("as_on_a_gpu", "update", "stacked"),
    share(
        [
            (True, "by itself", True),
            (True, "by itself", False),
            (False, "by the norm", False),
            (True, "by the norm", False),
        ],
        2,
    ),
)
def test_functions_do_not_grow_with_the_number_of_blocks(
    as_on_a_gpu: bool, update: str, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for :func:`functional_cg.scan` over stacked parameters."""
    monkeypatch.setattr(captures, "lower", in_place_on_a_host if as_on_a_gpu else lower)
    functions = []
    for layers in (6, 9):
        program = replace(PLAIN, layers=layers, numbers=(2.0,) * layers, update=update, stacked=stacked)
        plan = assert_replays(program, as_it_is)
        assert len(plan.heads) > 1
        functions.append(len(plan.heads))
        assert (
            sum(times for times in plan.heads.values() if times > 1) >= layers
        )  # of two, where every other sum is kept
    assert functions[0] == functions[1] <= 7, functions


def test_each_turn_of_a_loop_reads_its_row_of_a_half_of_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "lower", in_place_on_a_host)
    plans = [assert_replays(Loop(times), as_it_is) for times in (8, 12)]
    assert all(len(plan.heads) > 1 for plan in plans)
    assert len(plans[0].heads) == len(plans[1].heads) <= 7


def test_the_gradient_of_a_large_loss_lies_in_the_memory_of_the_logits() -> None:
    """Its targets are a view, which a part takes in front of the loss and not in front of the log-probabilities."""
    width, classes = 8, 33_000

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            h, y = batch["x"].flatten(0, 1), batch["y"].flatten()
            for w, b in params["blocks"]:
                h = h + torch.tanh(h @ w + b) @ w.T
            return F.cross_entropy((h @ params["head"]).float(), y)

        loss, grads = fcg.value_and_grad(loss_fn)(state)
        return fcg.tree.map(lambda p, g: p - g, state, grads), {"loss": loss}

    blocks = [(torch.eye(width), torch.ones(width)) for _ in range(12)]
    state = fcg.place({"blocks": blocks, "head": torch.ones(width, classes)})
    batch = {"x": torch.ones(2, 300, width), "y": torch.zeros(2, 300, dtype=torch.int64)}
    lowered = fcg.graph_step(train_step, lowering="aten").lower(state, batch)
    prepare(lowered.program, large=1)
    plan = in_parts(lowered.program, torch.device("cuda"), None, lowered.reference, in_place=True)
    assert plan is not None
    losses = [
        node for head in plan.heads for node in head.graph.graph.nodes if "cross_entropy_" in str(node.target)
    ]
    assert len(losses) == 1


ADAMW = fcg.optim.adamw(0.01, weight_decay=0.1)


def plan_of_layers(
    monkeypatch: pytest.MonkeyPatch, *, half: bool, optimizer: Any = ADAMW, members: int = 0
) -> Any:
    """The plan on a GPU of six layers whose output has the weight of their input, in parts."""
    monkeypatch.setattr(parts, "_WORTH", 2)
    monkeypatch.setattr(repeats, "_LOSS", 2)

    def train_step(state: fcg.TrainState, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                h = x * params["tied"].mean(0)
                for a, b, c in params["layers"]:
                    h = torch.tanh(h @ a + b) * 1.5 + h * 0.5
                    h = torch.sin(h @ c) * 0.7 - h.cos()
                return (h @ params["tied"].t()).square().mean()

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    layers = [(torch.zeros(64, 64), torch.zeros(64), torch.zeros(64, 64)) for _ in range(6)]
    params = {"tied": torch.zeros(64, 64), "layers": layers}
    state = fcg.TrainState.create(params=params, optimizer=optimizer)
    if members:
        state, train_step = fcg.tree.stack([state] * members), fcg.sweep(train_step)
    low = fcg.graph_step(train_step, lowering="aten").lower(state, torch.ones(4, 64))
    options = Options(branches=1, compile_once=True)
    plan = lower(low.program, torch.device("cuda"), options, low.reference)
    assert len(plan.heads) > 1
    return plan


def test_a_gradient_lives_no_longer_than_the_part_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part updates the leaves of its gradients: they do not wait for the end of the backward."""
    plan = plan_of_layers(monkeypatch, half=False)
    assert plan.timeline.peak < 6 * (2 * 64 + 1) * 64 * 4 / 2


def test_a_part_casts_to_a_wider_dtype_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one part makes in half precision, another one reads in half precision: of that there is half as much."""
    plan = plan_of_layers(monkeypatch, half=True)
    widened = {
        instr.out
        for instr in plan.schedule.head
        if instr.op is torch.ops.aten._to_copy.default
        and instr.out.spec.nbytes > instr.inputs()[0].spec.nbytes
    }
    read = {var for head in plan.heads for var in head.takes}
    assert widened
    assert not widened & read


def test_a_number_that_is_cast_is_no_value_to_make_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = fcg.optim.inject_hyperparams(fcg.optim.adamw)(
        learning_rate=0.01, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1
    )
    plan = plan_of_layers(monkeypatch, half=False, optimizer=rates, members=2)
    casts = [one for one in plan.schedule.head if one.op is torch.ops.aten._to_copy.default]
    assert any(not one.inputs() for one in casts)
