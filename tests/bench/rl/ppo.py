"""Proximal policy optimization as in CleanRL: all epochs and minibatches of one rollout in one step.

Log-densities and values of the rollout are computed at the start, with the parameters that played. Advantages take
log2(time) doublings, where CleanRL takes as many turns of a Python loop as the rollout is long: all systems use them.

Each system shuffles with its own random numbers: ours by key, torch with its generator. The loss is the mean over all
minibatches, which a permutation hardly changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg

from ..workloads import Batch, Params
from .nets import Algorithm, Learner, Net, layers, mlp, moved, normal

__all__ = ["CLIP", "DISCOUNT", "EPS", "LAMBDA", "NORM", "RATE", "WEIGHT", "Ppo", "part"]

DISCOUNT, LAMBDA = 0.99, 0.95
CLIP, WEIGHT, NORM = 0.2, 0.5, 0.5  # of ratios, of the value's loss, of gradients
RATE, EPS = 3e-4, 1e-5
_DATA_SEED = 2


def part(params: Params, name: str) -> Params:
    """Return the parameters whose names begin so, without that beginning."""
    return {key.removeprefix(name): value for key, value in params.items() if key.startswith(name)}


def density(params: Params, observation: Tensor, action: Tensor) -> Tensor:
    """Compute log-densities of actions, f32[n], under a Gaussian policy."""
    mean, log_std = mlp(part(params, "actor_"), observation, torch.tanh), params["log_std"]
    scaled = (action - mean) * (-log_std).exp()
    return (-0.5 * scaled.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def value_of(params: Params, observation: Tensor) -> Tensor:
    """Compute values, f32[n]."""
    return mlp(part(params, "critic_"), observation, torch.tanh).squeeze(-1)


def advantages(reward: Tensor, done: Tensor, value: Tensor, last: Tensor) -> Tensor:
    """Compute generalized advantage estimates, f32[time, n], by doublings of their recurrence."""
    goes_on = 1 - done
    ahead = torch.cat([value[1:], last[None]])
    total, factor = reward + DISCOUNT * goes_on * ahead - value, DISCOUNT * LAMBDA * goes_on
    reach = 1
    while reach < len(reward):
        beyond = lambda x, reach=reach: F.pad(x[reach:], (0, 0, 0, reach))  # noqa: E731
        total, factor = total + factor * beyond(total), factor * beyond(factor)
        reach *= 2
    return total


def prepared(params: Params, rollout: Batch) -> Batch:
    """Compute what the epochs need of a rollout, each f32[time * n, ...]."""
    with torch.no_grad():
        time, count, _ = rollout["observation"].shape
        seen = torch.cat([rollout["observation"], rollout["last"][None]]).flatten(0, 1)
        observation, action = seen[: time * count], rollout["action"].flatten(0, 1)
        value, last = value_of(params, seen).view(time + 1, count).split([time, 1])
        gain = advantages(rollout["reward"], rollout["done"], value, last[0])
        return {
            "observation": observation,
            "action": action,
            "logp": density(params, observation, action),
            "value": value.flatten(),
            "gain": gain.flatten(),
        }


def shuffled(rows: Batch, words: Tensor, count: int) -> Batch:
    """Arrange rows in ``count`` minibatches, [count, n, ...], in the order of random words [epochs, rows]."""
    order = words.argsort(-1).view(count, -1)
    return {name: value[order] for name, value in rows.items()}


def loss_of(params: Params, rows: Batch) -> Tensor:
    """Compute the loss of a minibatch: clipped ratios, clipped values."""
    ratio = (density(params, rows["observation"], rows["action"]) - rows["logp"]).exp()
    gain = (rows["gain"] - rows["gain"].mean()) / (rows["gain"].std() + 1e-8)
    policy = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
    value, goal = value_of(params, rows["observation"]), rows["gain"] + rows["value"]
    clipped = rows["value"] + (value - rows["value"]).clamp(-CLIP, CLIP)
    wrong = torch.maximum((value - goal).square(), (clipped - goal).square())
    return policy + WEIGHT * 0.5 * wrong.mean()


@dataclass(frozen=True)
class Ppo(Algorithm):
    """Sizes of the nets and of a rollout, epochs, and minibatches of an epoch."""

    width: int
    envs: int
    length: int
    epochs: int = 4
    minibatches: int = 4
    observation: int = 17
    action: int = 6

    @property
    def text(self) -> str:
        return (
            f"PPO, nets of 2 layers of {self.width}, {self.envs} environments x {self.length} steps, "
            f"{self.epochs} epochs x {self.minibatches} minibatches shuffled inside, fp32, clip by norm, Adam"
        )

    @property
    def compile_once(self) -> bool:
        return True

    def params(self) -> dict[str, Params]:
        draw, hidden = normal(), (self.width, self.width)
        nets = {
            "actor_": layers(draw, self.observation, *hidden, self.action, last=0.01),
            "critic_": layers(draw, self.observation, *hidden, 1),
        }
        named = {f"{net}{name}": value for net, params in nets.items() for name, value in params.items()}
        return {"net": {**named, "log_std": torch.zeros(self.action)}}

    def batches(self, count: int) -> list[Batch]:
        draw, rows = normal(_DATA_SEED), (self.length, self.envs)
        return [
            {
                "observation": draw(*rows, self.observation),
                "action": draw(*rows, self.action),
                "reward": 1 + draw(*rows),
                "done": (draw(*rows) > 2.3).float(),
                "last": draw(self.envs, self.observation),
            }
            for _ in range(count)
        ]

    def state(self, device: torch.device) -> Any:
        optimizer = fcg.optim.chain(fcg.optim.clip_by_global_norm(NORM), fcg.optim.adam(RATE, eps=EPS))
        params = moved(self.params()["net"], device)
        return fcg.TrainState.create(params=params, optimizer=optimizer, key=fcg.random.key(0))

    def step(self, state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        rows = prepared(state.params, batch)
        key = fcg.random.fold_in(state.key, state.step)
        words = fcg.random.uniform(key, (self.epochs, self.envs * self.length))

        def learn(state: Any, rows: Batch) -> tuple[Any, Tensor]:
            loss, grads = fcg.value_and_grad(loss_of)(state.params, rows)
            return state.apply_gradients(grads), loss

        state, losses = fcg.scan(learn, state, shuffled(rows, words, self.epochs * self.minibatches))
        return state, {"loss": losses.mean()}

    def learner(self, device: torch.device, options: Mapping[str, Any]) -> Learner:
        return _Learner(self, options, device)


class _Learner(Learner):
    def __init__(self, sizes: Ppo, options: Mapping[str, Any], device: torch.device) -> None:
        super().__init__()
        self._names, self._sizes = tuple(sizes.batches(1)[0]), sizes
        self.net = Net(sizes.params()["net"]).to(device)
        self.optimizers = [torch.optim.Adam(self.net.parameters(), lr=RATE, eps=EPS, **options)]
        self._prepared: Any = prepared
        self._learn: Any = self._minibatch

    def compile_with(self, mode: str | None) -> None:
        """Compile what prepares the rollout, and the update of a minibatch, which runs once for each."""
        self._prepared = torch.compile(prepared, mode=mode)
        self._learn = torch.compile(self._minibatch, mode=mode)

    def update(self, *tensors: Tensor) -> Tensor:
        sizes, count = self._sizes, self._sizes.epochs * self._sizes.minibatches
        rows = self._prepared(self.net.tensors(), dict(zip(self._names, tensors, strict=True)))
        words = torch.rand(sizes.epochs, len(rows["gain"]), device=rows["gain"].device)
        minibatches = shuffled(rows, words, count)
        losses = [self._learn(*(value[i] for value in minibatches.values())).clone() for i in range(count)]
        return torch.stack(losses).mean()

    def _minibatch(
        self, observation: Tensor, action: Tensor, logp: Tensor, value: Tensor, gain: Tensor
    ) -> Tensor:
        (optimizer,) = self.optimizers
        optimizer.zero_grad(set_to_none=True)
        rows = {"observation": observation, "action": action, "logp": logp, "value": value, "gain": gain}
        loss = loss_of(self.net.tensors(), rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.net.parameters()), NORM)
        optimizer.step()
        return loss.detach()
