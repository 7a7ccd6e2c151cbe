"""Balances poles by advantage actor-critic: ``python -m functional_cg.examples.programs.agents.actor_critic``.

The environment is plain numpy; its arrays, and Python numbers, are passed to the steps unchanged. The critic learns
from returns that bootstrap from a target network, a copy of itself that is updated periodically.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg

HORIZON, SYNC_EVERY, DISCOUNT, LAMBDA = 32, 4, 0.98, 0.95

Params = dict[str, Any]


class State(fcg.TrainState[Params]):
    key: Tensor
    target: Params


class CartPoles:
    """Carts with poles (Barto, Sutton and Anderson 1983), pushed to either side every 20 ms, 200 times at most."""

    def __init__(self, count: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.now = self.rng.uniform(-0.05, 0.05, (count, 4)).astype(np.float32)
        self.age = np.zeros(count, dtype=np.int64)
        self.returns: list[int] = []  # returns of the finished episodes

    def push(self, action: Any) -> Any:
        _, speed, angle, spin = self.now.T
        force = (20.0 * action - 10.0 + 0.05 * spin**2 * np.sin(angle)) / 1.1
        twist = (9.8 * np.sin(angle) - np.cos(angle) * force) / (2 / 3 - 0.05 * np.cos(angle) ** 2 / 1.1)
        thrust = force - 0.05 * twist * np.cos(angle) / 1.1
        self.now = self.now + 0.02 * np.stack([speed, thrust, spin, twist], axis=1).astype(np.float32)
        self.age += 1
        done = (np.abs(self.now[:, 0]) > 2.4) | (np.abs(self.now[:, 2]) > 0.21) | (self.age == 200)
        self.returns += self.age[done].tolist()
        self.now[done] = self.rng.uniform(-0.05, 0.05, (done.sum(), 4))
        self.age[done] = 0
        return done


def init(key: Tensor, outputs: int) -> Params:
    return {
        "w1": fcg.random.normal(key, (4, 64), std=0.5),
        "b1": torch.zeros(64, device=key.device),
        "w2": fcg.random.normal(key, (64, outputs), std=0.01, stream=1),
    }


def mlp(params: Params, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]  # type: ignore[no-any-return]


def create_state(seed: int = 0, device: str = "cpu") -> State:
    actor, critic, draws = fcg.random.split(fcg.random.key(seed, device), 3)
    params = {"actor": init(actor, 2), "critic": init(critic, 1)}
    target = fcg.tree.map(torch.clone, params["critic"])
    optimizer = fcg.optim.chain(fcg.optim.clip_by_global_norm(1.0), fcg.optim.adam(3e-3))
    return State.create(params=params, optimizer=optimizer, key=draws, target=target)


@fcg.graph_fn
def act(state: State, observation: Any, time: int) -> Tensor:
    key = fcg.random.fold_in(fcg.random.fold_in(state.key, state.step), time)
    return fcg.random.categorical(key, mlp(state.params["actor"], observation))


@fcg.graph_step
def learn(state: State, rollout: Any, last: Any, entropy_weight: float) -> tuple[State, dict[str, Tensor]]:
    later = mlp(state.target, torch.cat([rollout["observation"][1:], last[None]])).squeeze(-1)
    returns, ahead = list[Tensor](), later[-1]
    for time in reversed(range(HORIZON)):
        ahead = (1 - LAMBDA) * later[time] + LAMBDA * ahead
        ahead = 1 + DISCOUNT * torch.where(rollout["done"][time], 0.0, ahead)
        returns.insert(0, ahead)

    def loss_fn(params: Params) -> Tensor:
        advantage = torch.stack(returns) - mlp(params["critic"], rollout["observation"]).squeeze(-1)
        logp = F.log_softmax(mlp(params["actor"], rollout["observation"]), dim=-1)
        chosen = logp.gather(-1, rollout["action"][..., None]).squeeze(-1)
        gain = (chosen * advantage.detach() / (advantage.detach().std() + 1e-6)).mean()
        entropy = -(logp.exp() * logp).sum(-1).mean()
        return advantage.square().mean() - gain - entropy_weight * entropy

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


def play(state: State, carts: CartPoles) -> dict[str, Any]:
    rows = []
    for time in range(HORIZON):
        observation = carts.now
        action = act(state, observation, time).cpu().numpy()
        rows.append({"observation": observation, "action": action, "done": carts.push(action)})
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def train(updates: int, device: str = "cpu") -> list[int]:
    """Train, and return the episode returns in the order in which episodes ended."""
    state, carts = create_state(device=device), CartPoles(32, seed=0)
    for update in range(updates):
        state, _ = learn(state, play(state, carts), carts.now, 0.01 * (1 - update / updates))
        if update % SYNC_EVERY == 0:
            state = state.replace(target=state.params["critic"])  # copied into the target's slots
    print(f"mean return {np.mean(carts.returns[:50]):.0f} at first, {np.mean(carts.returns[-50:]):.0f} last")
    return carts.returns


if __name__ == "__main__":
    train(updates=200)
