"""Swings up a pendulum by soft actor-critic (Haarnoja et al. 2018): ``python -m functional_cg.examples.programs.sac``.

One graph updates the actor, two critics, their targets and the temperature. The policy is an ordinary object of
``torch.distributions``, the critics are one stacked network, and the replay buffer is numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal, TanhTransform, TransformedDistribution

import functional_cg as fcg

BATCH, DISCOUNT, FOLLOW, EPISODE, ENVIRONMENTS = 128, 0.97, 0.01, 100, 8


class State(fcg.TrainState[dict[str, Any]]):
    target: Any


class Pendulums:
    """Poles on a pivot, with a torque too weak to lift them at once; the cost grows with angle, spin and torque."""

    def __init__(self, count: int, seed: int) -> None:
        self.angle, self.spin = np.random.default_rng(seed).uniform(-np.pi, np.pi, (2, count))

    def look(self) -> Any:
        return np.stack([np.cos(self.angle), np.sin(self.angle), self.spin / 4], axis=1).astype(np.float32)

    def push(self, action: Any) -> Any:
        angle = (self.angle + np.pi) % (2 * np.pi) - np.pi
        reward = -(angle**2 + 0.1 * self.spin**2 + 0.004 * action**2)
        self.spin = np.clip(self.spin + 0.05 * (15 * np.sin(angle) + 6 * action), -8, 8)
        self.angle = angle + 0.05 * self.spin
        return reward.astype(np.float32)


def mlp(inputs: int, outputs: int) -> nn.Module:
    inner = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    return inner.append(nn.Linear(64, outputs))


def build(device: str = "cpu") -> tuple[Any, Any, State]:
    """Make the step, the policy and the state."""
    actor, of_actor, _ = fcg.from_module(mlp(3, 2).to(device))
    critic, _, _ = fcg.from_module(mlp(4, 1))
    critics, _ = torch.func.stack_module_state([mlp(4, 1), mlp(4, 1)])
    params = {"actor": of_actor, "critics": critics, "temperature": torch.tensor(-2.0)}
    key, target = fcg.random.key(0), fcg.snapshot(critics)
    state = State.create(params=params, optimizer=fcg.optim.adam(2e-3), key=key, target=target)

    @fcg.random.keyed
    def acted(params: Any, seen: Tensor) -> Any:  # actions, f32[batch, 1], and their log-probabilities
        mean, log_std = actor(params, {}, seen)[0].chunk(2, dim=-1)
        squash = TanhTransform(cache_size=1)
        policy = TransformedDistribution(Normal(mean, log_std.clamp(-5, 1).exp()), squash)
        action = policy.rsample()
        return action, policy.log_prob(action)[:, 0]

    def values(params: Any, seen: Tensor, action: Tensor) -> Any:  # of both critics, f32[2, batch]
        both = torch.cat([seen, action], dim=1)
        return torch.func.vmap(lambda p: critic(p, {}, both)[0][:, 0])(params)

    @fcg.graph_step
    def learn(state: State, batch: Any) -> Any:
        one, two = fcg.random.split(fcg.random.fold_in(state.key, state.step))
        seen, after = batch["seen"], batch["after"]
        action, likely = acted(one, state.params["actor"], after)
        soft = values(state.target, after, action).amin(dim=0) - state.params["temperature"].exp() * likely
        goal = batch["reward"] + DISCOUNT * soft

        def loss_fn(params: Any) -> Any:
            error = (values(params["critics"], seen, batch["action"]) - goal).square().mean()
            action, likely = acted(two, params["actor"], seen)
            temperature = params["temperature"].exp()
            of_actor = temperature.detach() * likely - values(state.params["critics"], seen, action).amin(
                dim=0
            )
            return error + (of_actor - temperature * (likely.detach() - 1)).mean()

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        new = state.apply_gradients(grads)
        target = fcg.tree.map(lambda a, b: a.lerp(b, FOLLOW), state.target, new.params["critics"])
        return new.replace(target=target), {"loss": loss}

    @fcg.graph_fn
    def act(state: State, seen: Tensor, count: int) -> Any:
        return acted(fcg.random.fold_in(state.key, -count), state.params["actor"], seen)[0][:, 0]

    return learn, act, state


def train(episodes: int = 25, device: str = "cpu") -> list[float]:
    """Play and learn, and return the mean reward per step of each episode."""
    learn, act, state = build(device)
    rng, rewards, count, total = np.random.default_rng(0), [], 0, episodes * EPISODE * ENVIRONMENTS
    shapes = {"seen": (total, 3), "action": (total, 1), "reward": total, "after": (total, 3)}
    memory: Any = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for episode in range(episodes):
        poles = Pendulums(ENVIRONMENTS, seed=episode)
        for _ in range(EPISODE):
            rows, count = slice(count, count + ENVIRONMENTS), count + ENVIRONMENTS
            memory["seen"][rows] = seen = poles.look()
            action = act(state, seen, count).cpu().numpy()
            memory["reward"][rows], memory["action"][rows] = poles.push(action), action[:, None]
            memory["after"][rows] = poles.look()
            picked = rng.integers(count, size=BATCH)
            state, _ = learn(state, {name: part[picked] for name, part in memory.items()})
        rewards.append(float(memory["reward"][:count][-EPISODE * ENVIRONMENTS :].mean()))
        print(f"episode {episode}: reward {rewards[-1]:.2f}")
    return rewards


if __name__ == "__main__":
    train(device="cuda" if torch.cuda.is_available() else "cpu")
