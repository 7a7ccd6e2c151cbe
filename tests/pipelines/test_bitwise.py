"""Ranks that run a pipeline get the bits of one rank that runs all stages, after each of twelve calls with new data."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim, sharding
from functional_cg.shards.transfers import SEND
from functional_cg.testing import assert_trees_all_equal
from tests.pipelines.programs import (
    CALLS,
    CUTS,
    FEATURES,
    ONE,
    TWO,
    Run,
    loss_of,
    made,
    optimizer_of,
    params,
    rows,
    trained,
)
from tests.sharding.law import on_gloo_and_nccl
from tests.sharding.ranks import on_ranks
from tests.shares import THOROUGH, share, thorough

# The order that TransformerEngine's own test gives to two chunks of layers and three micro-batches.
TRANSFORMER_ENGINE = (1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1)


def assert_as_on_one_rank(
    runs: Sequence[Run], ranks: int, axes: Mapping[str, int], device: str = "cpu"
) -> None:
    data = ranks // axes["stage"]
    patience = 60.0 + 10.0 * len(runs)  # seconds
    alone = (
        [trained(runs, ONE, device)]
        if data == 1
        else on_ranks(data, trained, runs, ONE, device, device=device, timeout=patience)
    )
    found = on_ranks(ranks, trained, runs, axes, device, device=device, timeout=patience)
    for number, run in enumerate(runs):
        for rank, of_rank in enumerate(found):
            metrics, state = of_rank[number]
            assert_trees_all_equal(metrics, alone[rank % data][number][0], f"{run}, rank {rank}")
            if rank == 0:
                assert_trees_all_equal(state, alone[0][number][1], str(run))


EACH = {"everything": [Run("zero_bubble", FEATURES)]}
EACH |= {schedule: [Run(schedule, (feature,)) for feature in FEATURES] for schedule in CUTS}


@on_gloo_and_nccl
@pytest.mark.parametrize("runs", share(EACH, len(EACH)))
def test_each_schedule_on_two_ranks(runs: str, device: str) -> None:
    assert_as_on_one_rank(EACH[runs], 2, TWO, device)


@thorough
def test_four_stage_ranks() -> None:
    """Of one stage each or two; a tied leaf on the first and the last of them."""
    features = ("tied", "clip", "adamw", "dropout", "averages")
    runs = [
        Run(schedule, features, cuts=tuple(range(1, 4 * (1 + len(cuts) // 2))), microbatches=8, layers=8)
        for schedule, cuts in CUTS.items()
    ]
    assert_as_on_one_rank(runs, 4, {"stage": 4})


def test_zero_beside_stages() -> None:
    features = ("tied", "clip", "adamw", "dropout", "averages")
    runs = [Run("1f1b", features, stage=stage) for stage in (3, 2)]
    runs += [Run(schedule, (*features, "accumulate")) for schedule in CUTS]
    assert_as_on_one_rank(share(runs, len(runs)), 4, TWO)


def in_the_order_of(order: Sequence[int], rank: int, ranks: int) -> list[str]:
    """The actions of a rank with several stages, in an order of its chunks as TransformerEngine writes it."""
    seen, row = Counter[int](), []
    for one in order:
        row.append(f"{(abs(one) - 1) * ranks + rank}{'F' if one > 0 else 'B'}{seen[one]}")
        seen[one] += 1
    return row


def test_transformer_engines_interleaved_order_gives_the_same_weights() -> None:
    """There, stages that reuse each other's buffers once gave others."""
    features = ("dropout", "clip", "adamw")
    assert in_the_order_of(TRANSFORMER_ENGINE, 0, 1)[:6] == ["0F0", "1F0", "0F1", "1F1", "1B0", "0B0"]
    on_one = Run([in_the_order_of(TRANSFORMER_ENGINE, 0, 1)], features, cuts=(2,), microbatches=3)
    usual = Run("1f1b", features, cuts=(2,), microbatches=3)
    assert_trees_all_equal(*(trained([run], ONE)[0] for run in (on_one, usual)))
    if THOROUGH:
        table = [in_the_order_of(TRANSFORMER_ENGINE, rank, 2) for rank in range(2)]
        assert_as_on_one_rank([Run(table, features, cuts=(1, 2, 3), microbatches=3)], 2, TWO)


def drawn(seed: int) -> Run:
    """A table in which four stages lie on two ranks anyhow, and all that is ready may come next."""
    draw = random.Random(seed)
    microbatches, owners = draw.choice((2, 3)), draw.sample((0, 0, 1, 1), 4)
    kinds = draw.choice((("F", "B"), ("F", "I", "W")))
    left = {(stage, m): list(kinds) for stage in range(4) for m in range(microbatches)}
    table: list[list[str]] = [[], []]
    done = set[tuple[int, int, str]]()

    def ready(stage: int, m: int, kind: str) -> bool:
        if kind == "F":
            return not stage or (stage - 1, m, "F") in done
        return kind == "W" or stage == 3 or not done.isdisjoint({(stage + 1, m, "B"), (stage + 1, m, "I")})

    while any(left.values()):
        stage, m, kind = draw.choice([(s, m, k[0]) for (s, m), k in left.items() if k and ready(s, m, k[0])])
        left[stage, m].pop(0)
        done.add((stage, m, kind))
        table[owners[stage]].append(f"{stage}{kind}{m}")
    return Run(table, ("dropout", "tied", "adamw"), cuts=(1, 2, 3), microbatches=microbatches)


@thorough
def test_any_table_that_is_proven_ends_and_gives_the_bits_of_one_rank() -> None:
    assert_as_on_one_rank([drawn(seed) for seed in range(12)], 2, TWO)


@pytest.mark.parametrize("late", share([1, 2], 2))
def test_gradients_of_weights_may_come_late(late: int) -> None:
    """They need what their micro-batch has kept, whatever runs in between, and none may be left out."""
    rows_of = [
        [f"{s}{kind}{m}" for kind, order in (("F", (0, 1)), ("I", (1, 0))) for s in order] for m in range(3)
    ]
    weights = [[f"{s}W{m}" for s in (0, 1)] for m in range(3)]
    row = [action for m in range(3) for action in (*rows_of[m], *(weights[m - late] if m >= late else ()))]
    row += [action for m in range(3 - late, 3) for action in weights[m]]
    features = ("dropout", "adamw", "tied")
    runs = [Run([row], features, cuts=(2,), microbatches=3), Run("1f1b", features, cuts=(2,), microbatches=3)]
    assert_trees_all_equal(*trained(runs, ONE))


def peaks(schedule: str, cuts: tuple[int, ...]) -> list[int]:
    """Bytes at the peak without the inputs, with 4 and 8 micro-batches of equal size."""
    found = []
    for microbatches in (4, 8):
        mesh = sharding.mesh(TWO, device="cpu", timeout=20)
        pipe = sharding.pipeline(mesh, schedule=schedule, microbatches=microbatches)
        weights = {f"w{i}": torch.ones(16, 16) for i in range(4)}

        def loss_fn(params: Any, x: Tensor, pipe: Any = pipe) -> Tensor:
            for i in range(4):
                x = torch.tanh((pipe.cut(x) if i in cuts else x) @ params[f"w{i}"])
            return x.square().mean()

        x = torch.zeros(64 * microbatches, 16)
        zero = pipe.zero(loss_fn, weights, x)
        state = fcg.TrainState.create(params=weights, optimizer=optim.sgd(0.1), sharding=zero)

        def train_step(state: Any, x: Tensor, loss_fn: Any = loss_fn, pipe: Any = pipe) -> Any:
            loss, grads = pipe.value_and_grad(loss_fn)(state.params, x)
            return state.apply_gradients(grads), {"loss": loss}

        found.append(
            fcg.graph_step(train_step, lowering="aten").lower(state, x).memory_analysis()["peak"] - x.nbytes
        )
    return found


@pytest.mark.parametrize(("schedule", "cuts", "grows"), share([("1f1b", (2,), 0), ("gpipe", (2,), 4)], 2))
def test_activations_take_the_memory_that_the_schedule_says(
    schedule: str, cuts: tuple[int, ...], grows: int
) -> None:
    """With more micro-batches, ``1f1b`` holds no more of them; ``gpipe`` holds the inputs and results of two layers."""
    for few, many in on_ranks(2, peaks, schedule, cuts):
        one = 64 * 16 * 4  # bytes of an activation
        assert 2 * grows * one <= many - few <= (4 * grows * one if grows else 100)


def kept_until_they_are_sent(run: Run) -> int:
    """How many values this rank sends, each of which is an argument of what waits until it is sent."""
    pipe, state, function = made(run, TWO)
    program = fcg.graph_step(function, lowering="aten").lower(state, rows(0, pipe.mesh.rank)).program
    sent = {instr.out: instr.args[0] for instr in program.instrs if instr.op is SEND}
    kept = {instr.args[0]: instr.args[1] for instr in program.instrs if str(instr.op) == "fcg.end.default"}
    assert kept == sent
    return len(sent)


def test_what_is_sent_keeps_its_memory_until_it_is_sent() -> None:
    assert on_ranks(2, kept_until_they_are_sent, Run("zbv", ("skip",))) == [16, 16]


def plain(run: Run) -> Any:
    """The same program without any pipeline: micro-batches of ``value_and_grad``."""
    loss_fn = loss_of(lambda tree: tree, run)
    state = fcg.TrainState.create(params=params(), optimizer=optimizer_of(run), key=fcg.random.key(3))

    @fcg.graph_step(lowering="aten")
    def train_step(state: Any, batch: Any) -> Any:
        key = fcg.random.fold_in(state.key, state.step)
        grads_of = fcg.microbatches(run.microbatches)(fcg.value_and_grad(loss_fn))
        loss, grads = grads_of(state.params, batch, key=key)
        return state.apply_gradients(grads), {"loss": loss}

    for call in range(CALLS):
        state, _ = train_step(state, rows(call, 0))
    return dict(fcg.state_dict(state))


def test_one_rank_is_what_micro_batches_are() -> None:
    """To the bit, except for a leaf that two stages read: its sum is taken in another order."""
    run = Run("zero_bubble", ("dropout", "clip", "adamw"))
    assert_trees_all_equal(trained([run], ONE)[0][1], plain(run))
    if THOROUGH:
        tied = Run("zero_bubble", ("tied", "clip", "adamw"))
        found = trained([tied], ONE)[0][1]
        for name, leaf in plain(tied).items():
            torch.testing.assert_close(found[name], leaf, rtol=1e-4, atol=1e-5)


def eager_and_captured(run: Run, axes: Mapping[str, int]) -> None:
    pipe, state, function = made(run, axes)
    step, eager = fcg.graph_step(function, lowering="aten"), fcg.fork(state)
    for call in range(3):
        batch = rows(call, pipe.mesh.rank)
        state, metrics = step(state, batch)
        eager, expected = step.eager(eager, batch)
        assert_trees_all_equal(metrics, expected)
    assert_trees_all_equal(sharding.state_dict(state), sharding.state_dict(eager))


def test_a_replay_has_the_bits_of_the_eager_run() -> None:
    run = Run("zbv", ("tied", "dropout", "clip", "adamw", "aux"))
    eager_and_captured(run, ONE)
    if THOROUGH:
        on_ranks(2, eager_and_captured, run, TWO)


@thorough
def test_compiled_steps_agree() -> None:
    run = Run("1f1b", ("tied", "adamw"), microbatches=2, options={"lowering": "inductor"})
    alone, found = trained([run], ONE), on_ranks(2, trained, [run], TWO, timeout=200.0)
    for metrics, _ in (of_rank[0] for of_rank in found):
        for name in ("loss", "norm"):
            torch.testing.assert_close(metrics[-1][name], alone[0][0][-1][name], rtol=1e-4, atol=1e-5)


def trained_behind_data(axes: Mapping[str, int]) -> Any:
    """A first stage without parameters: what it sends, and receives, is computed from nothing of a state."""
    mesh = sharding.mesh(axes, device="cpu", timeout=6)
    pipe = sharding.pipeline(mesh, schedule="1f1b", microbatches=2)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        hidden = pipe.cut(batch["x"].float().relu())
        return (hidden * params["head"].sum() - batch["y"]).square().mean()

    zero = pipe.zero(loss_fn, {"head": params()["head"]}, rows(0, 0))
    state = fcg.TrainState.create(params={"head": params()["head"]}, optimizer=optim.sgd(1e-5), sharding=zero)

    @fcg.graph_step(lowering="aten")
    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = pipe.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss, "norm": optim.global_norm(grads)}

    kept = []
    for call in range(3):
        state, metrics = train_step(state, rows(call, 0))
        kept.append(metrics)
    return kept


def test_a_trace_never_waits_for_what_another_rank_sends() -> None:
    """To a stage that reads no state, all of it looked known: its trace made the transfers, and waited for ever."""
    alone = trained_behind_data(ONE)
    for found in on_ranks(2, trained_behind_data, TWO):
        assert_trees_all_equal(found, alone)
