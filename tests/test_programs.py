"""The five example programs: each replay is bitwise eager, and each program learns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import functional_cg as fcg
from functional_cg.examples import programs, text
from functional_cg.examples.programs import (
    actor_critic,
    diffusion_unet_ema_bf16,
    exploration,
    nanogpt,
    property_test,
)
from functional_cg.testing import assert_replay_equals_eager, assert_trees_all_equal

CALLS = 20
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]

Start = tuple[Any, Any, list[tuple[Any, ...]]]  # the program's step, a state, and arguments for each call


def random_text() -> torch.Tensor:
    return torch.randint(256, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def start_nanogpt(device: str) -> Start:
    step, _, _, state = nanogpt.build(CALLS, device)
    batches = text.batches(random_text(), batch_size=4, block_size=64, seed=0)
    return step, state, [(batch,) for batch in itertools.islice(batches, CALLS)]


def start_actor_critic(device: str) -> Start:
    state, carts = actor_critic.create_state(device=device), actor_critic.CartPoles(32, seed=0)
    with pytest.MonkeyPatch.context() as patch:  # the program's own may be captured on another device already
        patch.setattr(actor_critic, "act", fcg.graph_fn(actor_critic.act.__wrapped__))
        calls = [(actor_critic.play(state, carts), carts.now, 1 / (call + 1)) for call in range(CALLS)]
    return actor_critic.learn, state, calls


def start_diffusion(device: str) -> Start:
    step, _, state = diffusion_unet_ema_bf16.build(CALLS, device)
    return step, state, [(diffusion_unet_ema_bf16.discs(8, seed),) for seed in range(CALLS)]


def start_exploration(device: str) -> Start:
    batches = exploration.take(CALLS, exploration.spirals(seed=0, count=32))
    return exploration.train_step, exploration.create_state(device), [(batch,) for batch in batches]


def property_batches() -> Iterator[property_test.Batch]:
    generator = torch.Generator().manual_seed(0)
    while True:
        x, y = torch.randn(8, 3, generator=generator), torch.randn(8, generator=generator)
        yield {"x": x, "y": y, "mask": y > 0}


def start_property_test(device: str) -> Start:
    calls = [(batch,) for batch in itertools.islice(property_batches(), CALLS)]
    return property_test.train_step, property_test.create_state(device), calls


STARTS = {
    "nanogpt": start_nanogpt,
    "actor_critic": start_actor_critic,
    "diffusion_unet_ema_bf16": start_diffusion,
    "exploration": start_exploration,
    "property_test": start_property_test,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_replay_equals_eager(start: Callable[[str], Start], device: str) -> None:
    step, state, calls = start(device)
    options = {"static_argnames": ("verbose",)} if step is exploration.train_step else {}
    step = fcg.graph_step(step.__wrapped__, lowering="aten", **options)
    assert_replay_equals_eager(step, state, calls)  # params, optimizer, key and all other leaves; metrics
    assert (step.stats.captures, step.stats.replays, step.stats.eager_calls) == (1, CALLS, CALLS)


@pytest.mark.parametrize("device", DEVICES)
def test_actions_and_samples_equal_eager(device: str) -> None:
    agent, carts = actor_critic.create_state(device=device), actor_critic.CartPoles(32, seed=0)
    act = fcg.graph_fn(actor_critic.act.__wrapped__, lowering="aten")
    _, denoise, painter = diffusion_unet_ema_bf16.build(CALLS, device)
    denoise = fcg.graph_fn(denoise.__wrapped__, lowering="aten")
    for time in range(CALLS):
        actions = act(agent, carts.now, time)
        assert_trees_all_equal(actions, act.eager(agent, carts.now, time))
        carts.push(actions.cpu().numpy())
        noisy, level = torch.randn(2, 1, 16, 16, device=device), 1 - time / CALLS
        arguments = (painter.ema, noisy, level, level - 1 / CALLS)
        assert_trees_all_equal(denoise(*arguments), denoise.eager(*arguments))
    assert len(set(actions.tolist())) > 1  # the key matters


def test_nanogpt_learns() -> None:
    before, after, sample = nanogpt.train(steps=40)
    assert before == pytest.approx(5.5, abs=0.2)
    assert after < before - 1.5
    assert len(sample) > 200


def test_actor_critic_learns() -> None:
    returns = actor_critic.train(updates=80)
    assert np.mean(returns[:50]) < 30
    assert np.mean(returns[-50:]) > 60


def test_target_of_the_critic_is_a_copy_of_it_at_the_last_sync() -> None:
    state, carts = actor_critic.create_state(), actor_critic.CartPoles(32, seed=0)
    state, _ = actor_critic.learn(state, actor_critic.play(state, carts), carts.now, 0.0)
    critic = fcg.snapshot(state.params["critic"])
    state = state.replace(target=state.params["critic"])
    state, _ = actor_critic.learn(state, actor_critic.play(state, carts), carts.now, 0.0)
    assert_trees_all_equal(fcg.snapshot(state.target), critic)
    assert not torch.equal(state.params["critic"]["w1"], critic["w1"])


def test_diffusion_learns() -> None:
    losses, samples = diffusion_unet_ema_bf16.train(steps=60)
    noise = torch.randn(64, 1, 16, 16)
    assert losses[-10:].mean() < 0.3 * losses[0]
    distance = diffusion_unet_ema_bf16.distance
    assert distance(samples) < 0.5 * distance(noise)


def test_diffusion_averages_the_parameters_that_it_trains_in_float32() -> None:
    step, _, state = diffusion_unet_ema_bf16.build(CALLS)
    before = fcg.snapshot(state)
    state, _ = step(state, diffusion_unet_ema_bf16.discs(8, seed=0))
    assert {leaf.dtype for leaf in fcg.tree.leaves((state.params, state.ema))} == {torch.float32}
    for name, old in before.ema.items():
        assert_trees_all_equal(
            fcg.snapshot(state.ema[name]), old.lerp(fcg.snapshot(state.params[name]), 0.03)
        )


def test_exploration_goes_as_told(capsys: pytest.CaptureFixture[str]) -> None:
    fresh, high, still_high, lowered, interrupted, after_sgd = exploration.explore()
    assert high < 0.2 * fresh
    assert lowered < still_high
    assert max(lowered, interrupted, after_sgd) < 0.1 * fresh
    said = capsys.readouterr().out
    assert said.count("gradient") == 3
    assert "the data server went away: step 363" in said


def test_each_program_is_short_and_uses_public_names_only() -> None:
    folder = Path(programs.__path__[0])
    assert {path.stem for path in folder.glob("*.py")} == {"__init__", *STARTS}
    for path in folder.glob("*.py"):
        source = path.read_text()
        assert len(source.splitlines()) < 120, path.name
        assert "fcg._" not in source, path.name
