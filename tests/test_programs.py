"""The example programs: each replay is bitwise eager, and each program learns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.examples import long_run, programs, text
from functional_cg.examples.programs import (
    diffusion_unet_ema_bf16,
    exploration,
    force_matching,
    gan,
    image_classifier,
    lengths,
    logged,
    lora,
    nanogpt,
    population,
    property_test,
    trainer,
)
from functional_cg.examples.programs.agents import actor_critic, cartpole_swarm, sac
from functional_cg.testing import assert_replay_equals_eager, assert_trees_all_equal
from tests.shares import CALLS, on_a_host_or_a_gpu, thorough

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]

Start = tuple[Any, Any, list[tuple[Any, ...]]]  # the program's step, a state, and arguments for each call


def regression() -> trainer.Model:
    return trainer.Model(nn.Linear(2, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))


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


def start_image_classifier(device: str) -> Start:
    step, _, state = image_classifier.build(device)
    images, labels = image_classifier.stripes(8 * CALLS, seed=0).tensors
    return step, state, [([*pair],) for pair in zip(images.split(8), labels.split(8), strict=True)]


def start_gan(device: str) -> Start:
    step, _, _, generator, critic = gan.build(device)
    points = itertools.islice(gan.ring(seed=0), CALLS)
    return step, critic, [(fcg.snapshot(generator).params, real) for real in points]


def start_gan_generator(device: str) -> Start:
    _, step, _, generator, critic = gan.build(device)
    points = itertools.islice(gan.ring(seed=0), CALLS)
    return step, generator, [(fcg.snapshot(critic).params, real) for real in points]


def start_force_matching(device: str) -> Start:
    batches = [(force_matching.molecules(8, seed),) for seed in range(CALLS)]
    return force_matching.train_step, force_matching.create_state(device), batches


def start_sac(device: str) -> Start:
    rng = np.random.default_rng(0)
    shapes = {"observation": (64, 2), "action": (64, 1), "next": (64, 2), "reward": (64,)}

    def batch() -> dict[str, Any]:
        return {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}

    return sac.learn, sac.create_state(device), [(batch(),) for _ in range(CALLS)]


def start_cartpole_swarm(device: str) -> Start:
    return cartpole_swarm.learn, cartpole_swarm.create_state(device, count=8), [()] * CALLS


def start_logged(device: str) -> Start:
    return logged.train_step, logged.create_state(device), [(torch.rand(8, 2),) for _ in range(CALLS)]


def start_long_run(device: str) -> Start:
    mesh = fcg.sharding.mesh({"data": 1}, device=device)
    batches = itertools.islice(long_run.batches(0, mesh), CALLS)
    return long_run.train_step, long_run.create_state(mesh), [(batch,) for batch in batches]


def start_population(device: str) -> Start:
    batches = itertools.islice(exploration.spirals(seed=0, count=32), CALLS)
    state = population.create_state(torch.tensor([1e-4, 1e-3, 1e-2]), device)
    return population.train_step, state, [(batch,) for batch in batches]


class Output(NamedTuple):
    logits: Tensor


class Classifier(nn.Module):
    """What the program needs of a model of Hugging Face, with layers of the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(20, 16), nn.Dropout(0.1)
        self.attention = nn.ModuleDict({"query": nn.Linear(16, 16), "value": nn.Linear(16, 16)})
        self.classifier = nn.Linear(12 * 16, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Output:
        x = self.embedding(tokens) * mask[..., None]
        hidden = torch.tanh(self.attention["query"](x)) * self.attention["value"](x)
        return Output(self.classifier(self.dropout(hidden.flatten(1))))


def start_lora(device: str) -> Start:
    torch.manual_seed(0)
    step, _, state = lora.build(Classifier(), device)
    return step, state, [(lora.sentences(8, seed),) for seed in range(CALLS)]


def start_trainer(device: str) -> Start:
    torch.manual_seed(0)
    captured = trainer.Captured(regression().to(device))
    batches = [{"x": x, "labels": x.prod(dim=1)} for x in torch.rand(CALLS, 8, 2)]
    return captured.step, captured.state, [(batch,) for batch in batches]


STARTS = {
    "nanogpt": start_nanogpt,
    "actor_critic": start_actor_critic,
    "diffusion_unet_ema_bf16": start_diffusion,
    "exploration": start_exploration,
    "property_test": start_property_test,
    "image_classifier": start_image_classifier,
    "gan": start_gan,
    "gan: generator": start_gan_generator,
    "force_matching": start_force_matching,
    "sac": start_sac,
    "cartpole_swarm": start_cartpole_swarm,
    "logged": start_logged,
    "long_run": start_long_run,
    "lora": start_lora,
    "population": start_population,
    "trainer": start_trainer,
}


@on_a_host_or_a_gpu("name", STARTS, 2)
def test_replay_equals_eager(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # else convolutions add up in any order
    step, state, calls = STARTS[name](device)
    options = {"static_argnames": ("verbose",)} if step is exploration.train_step else {}
    step = fcg.graph_step(step.__wrapped__, lowering="aten", **options)
    batched = {"rtol": 1e-3, "atol": 1e-5} if name == "population" else {}  # eagerly, members run one by one
    assert_replay_equals_eager(step, state, calls, **batched)  # all leaves; metrics
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


@thorough
def test_nanogpt_learns() -> None:
    before, after, sample = nanogpt.train(steps=40)
    assert before == pytest.approx(5.5, abs=0.2)
    assert after < before - 1.5
    assert len(sample) > 200


@thorough
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


@thorough
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


def few_stripes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    stripes = image_classifier.stripes
    monkeypatch.setattr(image_classifier, "stripes", lambda _, seed: stripes(count, seed))


def test_image_classifier_learns_and_resumes_where_it_was_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few_stripes(monkeypatch, 700)  # the last batch is short
    whole = image_classifier.train(tmp_path / "whole.safetensors", epochs=2)
    image_classifier.train(tmp_path / "parts.safetensors", epochs=1)
    resumed = image_classifier.train(tmp_path / "parts.safetensors", epochs=2)
    assert_trees_all_equal(fcg.snapshot(resumed), fcg.snapshot(whole))
    assert 0.4 < float(whole.best) <= 1
    assert capsys.readouterr().out.count("epoch 0") == 2


def test_image_classifier_lowers_its_rate_and_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.safetensors"
    _, _, state = image_classifier.build()
    fcg.save(path, state.replace(best=1.0))  # which no epoch can improve on
    few_stripes(monkeypatch, 80)
    state = image_classifier.train(path, epochs=10)
    assert (int(state.epoch), int(state.stale)) == (image_classifier.PATIENCE, image_classifier.PATIENCE)
    assert "stopped early" in capsys.readouterr().out
    assert float(state.opt_state.hyperparams["learning_rate"]) == pytest.approx(2e-4)


def test_gan_learns() -> None:
    before, after = gan.train(steps=300)
    assert gan.off_the_ring(after)[0] < 0.4 * gan.off_the_ring(before)[0]


def test_force_matching_learns_the_forces() -> None:
    before, after = force_matching.train(steps=100)
    assert after < 0.3 * before
    batch = force_matching.molecules(4, seed=0)
    params = fcg.snapshot(force_matching.create_state()).params
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(force_matching.energy(params, x).sum(), x)
    torch.testing.assert_close(force_matching.predict(params, batch["x"])[1], -slope)


def test_sac_learns() -> None:
    rewards = sac.train(steps=250)
    assert np.mean(rewards[-50:]) > 0.5 * np.mean(rewards[:50])


def test_sac_knows_the_density_of_its_actions() -> None:
    actor = fcg.snapshot(sac.create_state()).params["actor"]
    mean, log_std = sac.mlp(actor, torch.zeros(8, 2)).chunk(2, dim=-1)
    action, logp = sac.act(actor, torch.zeros(8, 2), fcg.random.key(0))
    normal = torch.distributions.Normal(mean, log_std.exp())
    squashed = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())
    torch.testing.assert_close(logp, squashed.log_prob(action).sum(-1))


def test_cartpole_swarm_learns() -> None:
    lengths = cartpole_swarm.train(updates=25)
    assert np.mean(lengths[:3]) < 40
    assert np.mean(lengths[-3:]) > 80


def test_a_population_moves_to_the_rates_that_work() -> None:
    losses, best = population.train(members=8, rounds=4, steps=60)
    assert losses[-1].median() < 0.5 * losses[1].median()
    assert best.params["w2"].shape == (64, 64)
    assert 1e-3 < float(best.opt_state.hyperparams["learning_rate"]) < 0.5


def test_carts_of_the_swarm_move_as_those_in_numpy() -> None:
    carts = actor_critic.CartPoles(16, seed=0)
    moved, action = torch.from_numpy(carts.now.copy()), np.arange(16) % 2
    for _ in range(5):
        moved, fallen = cartpole_swarm.pushed(moved, torch.from_numpy(action).float())
        carts.push(action)
        torch.testing.assert_close(moved, torch.from_numpy(carts.now))
    assert not fallen.any()
    assert cartpole_swarm.pushed(torch.tensor([[2.5, 0, 0, 0], [0, 0, 0, 0]]), torch.ones(2))[1].tolist() == [
        True,
        False,
    ]


def test_logged_writes_every_step_once() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.rows: list[tuple[str, float, int]] = []

        def log(self, name: str, value: float, step: int) -> None:
            self.rows.append((name, value, step))

    writer = Recorder()
    logged.train(250, writer)
    for name in ("loss", "grad_norm", "saturated"):
        assert [step for other, _, step in writer.rows if other == name] == list(range(1, 251))
    losses = [value for name, value, _ in writer.rows if name == "loss"]
    assert losses[-1] < 0.1 * losses[0]


def test_lengths_learns_with_one_capture_per_size(capsys: pytest.CaptureFixture[str]) -> None:
    accuracies = lengths.train(epochs=2)
    assert accuracies[1] > accuracies[0]
    assert accuracies[1] > 0.75
    said = capsys.readouterr().out
    assert "3 captures" in said
    assert all(f"batch['tokens'] i64[32,{size}]" in said for size in lengths.SIZES)


def test_lora_learns() -> None:
    torch.manual_seed(0)
    model = Classifier()
    before, after = lora.train(model, steps=100)
    assert after > before + 0.2


def test_lora_learns_on_a_model_of_hugging_face() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    before, after = lora.train(lora.pretrained(), steps=100)
    assert after > before + 0.1


@pytest.mark.parametrize(
    ("train", "package"),
    [(trainer.own, "torch"), (trainer.hugging_face, "accelerate"), (trainer.fabric, "lightning_fabric")],
)
@pytest.mark.filterwarnings("ignore")  # of the libraries
def test_trainer_learns(train: Callable[..., None], package: str) -> None:
    pytest.importorskip(package)
    torch.manual_seed(0)
    x = torch.rand(500, 2)
    model, rows = regression(), [{"x": row, "labels": row.prod()} for row in x]
    before = float(model.eval()(x, x.prod(dim=1))["loss"])
    train(model, rows)
    assert float(model.cpu().eval()(x, x.prod(dim=1))["loss"]) < 0.3 * before


def test_each_program_is_short_and_uses_public_names_only() -> None:
    folder = Path(programs.__path__[0])
    elsewhere = {"gan: generator", "long_run"}
    assert {path.stem for path in folder.rglob("*.py")} == {"__init__", "lengths", *STARTS} - elsewhere
    for path in folder.rglob("*.py"):
        source = path.read_text()
        assert len(source.splitlines()) < 120, path.name
        assert "fcg._" not in source, path.name
