"""Soft actor-critic: ``python -m functional_cg.examples.programs.agents.sac``.

An actor, two critics, their targets and a temperature learn in one step, from minibatches of a replay buffer on the
host. The task: push a point on a line to the origin and keep it there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg

ENVIRONMENTS, DISCOUNT, POLYAK, ENTROPY = 16, 0.9, 0.02, -1.0

Params = dict[str, Any]


class State(fcg.TrainState[Params]):
    target: Params  # of the critics


def sample(replay: list[dict[str, Any]], rng: np.random.Generator) -> dict[str, Any]:
    """Draw 64 transitions, each of any time and environment."""
    drawn = list(zip(rng.integers(len(replay), size=64), rng.integers(ENVIRONMENTS, size=64), strict=True))
    return {name: np.stack([replay[time][name][place] for time, place in drawn]) for name in replay[0]}


def pushed(points: Any, force: Any) -> Any:
    """Move points, f32[count, 2] of place and speed, under forces in [-1, 1]."""
    speed = 0.9 * points[:, 1] + 0.3 * force[:, 0]
    return np.stack([np.clip(points[:, 0] + 0.3 * speed, -2, 2), speed], axis=1)


def init(key: Tensor, inputs: int, outputs: int) -> Params:
    w1 = fcg.random.normal(key, (inputs, 64), std=inputs**-0.5)
    w2 = fcg.random.normal(key, (64, outputs), std=0.05, stream=1)
    return {"w1": w1, "b1": torch.zeros(64, device=key.device), "w2": w2}


def mlp(params: Params, x: Tensor) -> Tensor:
    return torch.relu(x @ params["w1"] + params["b1"]) @ params["w2"]  # type: ignore[no-any-return]


def act(actor: Params, observation: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Draw actions, f32[batch, 1], from a squashed Gaussian; return them and their log-densities, f32[batch]."""
    mean, log_std = mlp(actor, observation).chunk(2, dim=-1)
    log_std, noise = log_std.clamp(-5, 1), fcg.random.normal(key, mean.shape)
    raw = mean + log_std.exp() * noise
    density = -noise.square() / 2 - log_std - math.log(2 * math.pi) / 2
    return torch.tanh(raw), (density - 2 * (math.log(2) - raw - F.softplus(-2 * raw))).sum(-1)


def worth(critics: Params, observation: Tensor, action: Tensor) -> Tensor:
    """Compute the returns that the two critics expect, f32[2, batch]."""
    x = torch.cat([observation, action], dim=-1)
    return torch.stack([mlp(critic, x).squeeze(-1) for critic in critics.values()])


def create_state(device: str = "cpu") -> State:
    actor, first, second, draws = fcg.random.split(fcg.random.key(0, device), 4)
    critics = {"first": init(first, 3, 1), "second": init(second, 3, 1)}
    params = {"actor": init(actor, 2, 2), "critics": critics, "log_heat": torch.tensor(-2.0, device=device)}
    target = fcg.tree.map(torch.clone, critics)
    return State.create(params=params, optimizer=fcg.optim.adam(3e-3), key=draws, target=target)


@fcg.graph_fn
def explore(state: State, observation: Any) -> Tensor:
    key, _, _ = fcg.random.split(fcg.random.fold_in(state.key, state.step), 3)
    return act(state.params["actor"], observation, key)[0]


@fcg.graph_step
def learn(state: State, batch: dict[str, Any]) -> tuple[State, dict[str, Tensor]]:
    _, now, later = fcg.random.split(fcg.random.fold_in(state.key, state.step), 3)
    temperature, observation = state.params["log_heat"].exp(), batch["observation"]
    action, logp = act(state.params["actor"], batch["next"], later)
    ahead = worth(state.target, batch["next"], action).amin(0) - temperature * logp
    goal = batch["reward"] + DISCOUNT * ahead

    def loss_fn(params: Params) -> Any:
        critic_loss = (worth(params["critics"], observation, batch["action"]) - goal).square().mean()
        action, logp = act(params["actor"], observation, now)
        actor_loss = (temperature * logp - worth(state.params["critics"], observation, action).amin(0)).mean()
        return critic_loss + actor_loss - params["log_heat"] * (logp.detach().mean() + ENTROPY)

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    new = state.apply_gradients(grads)
    target = fcg.tree.map(lambda old, new: old.lerp(new, POLYAK), state.target, new.params["critics"])
    return new.replace(target=target), {"loss": loss, "temperature": temperature}


def train(steps: int, device: str = "cpu") -> list[float]:
    """Train, and return the mean reward at each time."""
    state, replay, rng = create_state(device), list[dict[str, Any]](), np.random.default_rng(0)
    for time in range(steps):
        if time % 50 == 0:
            points = rng.uniform(-1, 1, (ENVIRONMENTS, 2)).astype(np.float32)
        before, action = points, explore(state, points).cpu().numpy()
        points = pushed(before, action)
        reward = -np.abs(points[:, 0])
        replay.append({"observation": before, "action": action, "next": points, "reward": reward})
        state, _ = learn(state, sample(replay, rng))
    return [float(row["reward"].mean()) for row in replay]


def main() -> None:
    rewards = train(600, "cuda" if torch.cuda.is_available() else "cpu")
    print(f"mean reward {np.mean(rewards[:50]):.2f} at first, {np.mean(rewards[-50:]):.2f} in the end")


if __name__ == "__main__":
    main()
