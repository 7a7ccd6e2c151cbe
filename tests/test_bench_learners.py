"""Learners of the bench: each style of an update computes the same losses, and another number in it is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bench.measure import BATCHES, Row, bench, start
from tests.bench.modules import workload
from tests.bench.rl import dreamer, ppo, sac, systems
from tests.bench.rl.workloads import LearnerWorkload, names
from tests.bench.system import COMPILED, LANES, LINE
from tests.bench.systems.opponents import build
from tests.shares import THOROUGH, share, thorough

CPU = torch.device("cpu")
TINY = [name for name in names() if name.endswith("-tiny")]
each = pytest.mark.parametrize("name", TINY)
some = pytest.mark.parametrize("name", share(TINY, 2))


def run(work: Any, *against: str, anchor: str = "ours-aten") -> list[Row]:
    return bench(work, against, CPU, lambda row: None, anchor=anchor, steps=2)


@some
def test_ours_eager_and_jax_compute_the_same_losses(name: str) -> None:
    ours, *others = run(workload(name), "eager", "jax", "cudagraph-module")
    assert (ours.status, ours.counts["captures"]) == ("ok", 1), ours.reason
    assert len({*ours.losses}) == len(ours.losses)
    for row in others:
        assert row.status == "skipped" or row.losses_agree, (row.system, row.losses, ours.losses)
    assert [row.system for row in others if row.status == "ok"][:1] == ["eager"]
    assert others[-1].reason == "needs CUDA graphs"


@thorough
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # dynamo looks at the gradients of tensors that have none
@pytest.mark.parametrize("name", share(["rl-dqn-tiny", *(name for name in TINY if name != "rl-dqn-tiny")], 4))
def test_compiled_ones_compute_them_too(name: str) -> None:
    rows = run(workload(name), "compile", anchor="ours" if THOROUGH else "ours-aten")
    assert [(row.status, row.losses_agree) for row in rows] == [("ok", True)] * 2, rows[-1].reason


@each
def test_a_graph_by_hand_begins_where_others_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its warm-up is undone: here a graph is a function that runs the update again."""

    class Graph:
        def __init__(self, step: Any, out: Tensor) -> None:
            self.step, self.out = step, out

        def replay(self) -> None:
            self.out.copy_(self.step())

    def captured(step: Any, device: torch.device, between: Any) -> tuple[Graph, Tensor]:
        step()
        between()
        return Graph(step, out := torch.zeros(())), out

    monkeypatch.setattr(systems, "captured", captured)
    work = workload(name)
    assert isinstance(work, LearnerWorkload)
    given = work.batches(BATCHES)
    by_hand = systems._by_hand("hand-graph", work.learned.learner(CPU, {}), CPU, given, lambda: None)
    eager = build("eager", work, CPU, given)
    for batch in given:
        assert float(by_hand.step(batch)) == pytest.approx(float(eager.step(batch)), rel=work.tolerance)


@some
def test_an_update_that_is_left_out_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = workload(
        name.replace("rl-dqn-tiny", "rl-dqn")
    )  # small nets learn too slowly for what sampling changes
    rows = [Row(work.name, system) for system in ("ours-aten", "eager")]
    with monkeypatch.context() as planted:
        planted.setattr(torch.optim.Adam, "step", lambda *_: None)
        for row in rows:
            start(row.system, work, CPU, work.batches(BATCHES), row).close()
    distances = [abs(a - b) / abs(a) for a, b in zip(*(row.losses for row in rows), strict=True)]
    assert max(distances) > work.tolerance, distances


@each
def test_values_and_batches_are_the_same_at_each_call(name: str) -> None:
    work = workload(name)
    first, second = work.params(), work.params()
    assert all(torch.equal(first[key], second[key]) for key in first)
    for a, b in zip(work.batches(3), work.batches(3), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_what_is_compiled_is_filled() -> None:
    """The names that `--fill` compiles, of the workloads that are timed."""
    for name in ("rl-sac", "rl-dqn", "rl-ppo", "rl-dreamer"):
        work = workload(name)
        assert isinstance(work, LearnerWorkload)
        found = {system for system in COMPILED if system in work.systems}
        assert found - {LANES, LINE} == {"ours", "compile", "reduce-overhead", "hand-graph-compiled"}
        assert (LANES in found) == (LINE in found) == (name != "rl-dreamer")


def test_advantages_by_doublings_are_those_of_the_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    reward, value = torch.randn(2, 13, 5, generator=generator)
    last, done = torch.randn(5, generator=generator), (torch.rand(13, 5, generator=generator) < 0.2).float()
    ahead, after, wanted = torch.zeros(5), last, list[Tensor]()
    for time in reversed(range(13)):
        goes_on = 1 - done[time]
        ahead = (
            reward[time]
            + ppo.DISCOUNT * goes_on * after
            - value[time]
            + ppo.DISCOUNT * ppo.LAMBDA * goes_on * ahead
        )
        after = value[time]
        wanted.insert(0, ahead)
    torch.testing.assert_close(ppo.advantages(reward, done, value, last), torch.stack(wanted))


def test_densities_are_those_of_distributions() -> None:
    small = sac.Sac(8, 4)
    actor, noise = small.params()["actor"], torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    observation = small.batches(1)[0]["observation"][0]
    mean, spread = sac.mlp(actor, observation).chunk(2, -1)
    low, high = sac.LOWEST
    normal = torch.distributions.Normal(mean, (low + 0.5 * (high - low) * (spread.tanh() + 1)).exp())
    squashed = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())
    action, logp = sac.act(actor, observation, noise * 0.1)
    torch.testing.assert_close(logp, squashed.log_prob(action).sum(-1), rtol=1e-3, atol=1e-3)


def test_latents_are_drawn_one_of_each_group_and_pass_gradients() -> None:
    model = dreamer.Dreamer(8, 4, 2, 3)
    params, batch = model.params()["model"], model.batches(1)[0]
    x = {name: value[0] for name, value in dreamer.encoded(params, batch).items()}
    logp = torch.zeros(3, 8).requires_grad_()
    (_, latent), (_, _, found) = dreamer.cell(params, (logp, torch.zeros(3, 16)), x)
    picked = latent.detach().unflatten(-1, (4, 4))
    torch.testing.assert_close(picked.sum(-1), torch.ones(3, 4))
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(3, 4))
    assert picked.argmax(-1).equal((found + x["noise"]).argmax(-1))
    (slope,) = torch.autograd.grad((latent * torch.arange(16.0)).sum(), logp)
    assert slope.abs().max() > 0


def test_the_ring_holds_the_newest_transitions() -> None:
    work = replace(workload("rl-dqn-tiny"), name="ring")
    assert isinstance(work, LearnerWorkload)
    state, batches = work.learned.state(CPU), work.batches(2)
    before = state["ring"]["observation"].clone()
    for batch in batches:
        state, _ = work.learned.step(state, batch)
    ring = state["ring"]["observation"]
    fresh = torch.cat([batch["observation"] for batch in batches])
    assert torch.equal(ring[: len(fresh)], fresh)
    assert torch.equal(ring[len(fresh) :], before[len(fresh) :])
    learner = work.learned.learner(CPU, {})
    for batch in batches:
        learner.update(*batch.values())
    assert torch.equal(learner.get_submodule("ring").get_buffer("observation"), ring)
