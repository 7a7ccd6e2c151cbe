"""Soft actor-critic as in CleanRL and LeanRL: two critics, a policy and a temperature, with an optimizer each.

One step is what two steps of the environment bring: two minibatches for the critics, each followed by a polyak average,
and then two updates of the delayed policy and its temperature, on the second minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import functional_cg as fcg

from ..workloads import Batch, Params
from .nets import Algorithm, Learner, Net, layers, mlp, moved, normal

__all__ = ["DELAY", "DISCOUNT", "LOWEST", "RATES", "TAU", "Sac"]

DELAY = 2  # updates of the critics for each visit of the policy
DISCOUNT, TAU = 0.99, 0.005
LOWEST = -5.0, 2.0  # bounds of the logarithm of a standard deviation
RATES = (("critic", 1e-3), ("actor", 3e-4), ("heat", 1e-3))
_DATA_SEED = 2


def act(actor: Params, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw actions from a squashed Gaussian; return them and their log-densities, f32[n]."""
    mean, spread = mlp(actor, observation).chunk(2, dim=-1)
    low, high = LOWEST
    log_std = low + 0.5 * (high - low) * (torch.tanh(spread) + 1)
    action = torch.tanh(mean + log_std.exp() * noise)
    density = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    return action, (density - torch.log(1 - action.square() + 1e-6)).sum(-1)


def worth(critic: Params, observation: Tensor, action: Tensor) -> Tensor:
    """Compute what the critics expect, f32[2, n]."""
    return mlp(critic, torch.cat([observation, action], -1)).squeeze(-1)


def critic_loss(critic: Params, actor: Params, target: Params, heat: Params, row: Batch) -> Tensor:
    """Compute the loss of both critics on a minibatch."""
    with torch.no_grad():
        action, logp = act(actor, row["next"], row["noise"])
        ahead = worth(target, row["next"], action).amin(0) - heat["log"].exp() * logp
        goal = row["reward"] + (1 - row["done"]) * DISCOUNT * ahead
    return (worth(critic, row["observation"], row["action"]) - goal).square().mean(-1).sum()


def actor_loss(
    actor: Params, critic: Params, heat: Params, observation: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the loss of the policy, and the log-densities of its actions."""
    action, logp = act(actor, observation, noise)
    return (heat["log"].exp().detach() * logp - worth(critic, observation, action).amin(0)).mean(), logp


def heat_loss(heat: Params, logp: Tensor, entropy: float) -> Tensor:
    """Compute the loss of the temperature."""
    return -(heat["log"].exp() * (logp.detach() + entropy)).mean()


@dataclass(frozen=True)
class Sac(Algorithm):
    """Sizes of the nets and of a minibatch."""

    width: int
    batch: int
    observation: int = 17
    action: int = 6

    @property
    def text(self) -> str:
        return (
            f"SAC, nets of 2 layers of {self.width}, {DELAY} minibatches of {self.batch}: {DELAY} updates of 2 critics "
            f"and their targets, then {DELAY} of policy and temperature, fp32, 3 Adams"
        )

    def params(self) -> dict[str, Params]:
        draw, hidden = normal(), (self.width, self.width)
        return {
            "critic": layers(draw, self.observation + self.action, *hidden, 1, nets=2),
            "actor": layers(draw, self.observation, *hidden, 2 * self.action, last=0.1),
            "heat": {"log": torch.zeros(())},
        }

    def batches(self, count: int) -> list[Batch]:
        draw, rows = normal(_DATA_SEED), (DELAY, self.batch)
        return [
            {
                "observation": draw(*rows, self.observation),
                "action": torch.tanh(draw(*rows, self.action)),
                "next": draw(*rows, self.observation),
                "reward": draw(*rows),
                "done": (draw(*rows) > 2.3).float(),
                "noise": draw(*rows, self.action),
                "noise_of_policy": draw(*rows, self.action),
            }
            for _ in range(count)
        ]

    def state(self, device: torch.device) -> Any:
        params = moved(self.params(), device)
        learned = {
            name: fcg.snapshot(fcg.TrainState.create(params=params[name], optimizer=fcg.optim.adam(rate)))
            for name, rate in RATES
        }
        return fcg.place({**learned, "target": params["critic"]})

    def step(self, state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        critic, actor, heat, target = (state[name] for name in ("critic", "actor", "heat", "target"))
        total = torch.zeros((), device=batch["reward"].device)
        for i in range(DELAY):
            row = {name: value[i] for name, value in batch.items()}
            loss, grads = fcg.value_and_grad(critic_loss)(
                critic.params, actor.params, target, heat.params, row
            )
            critic, total = critic.apply_gradients(grads), total + loss
            target = fcg.tree.map(lambda old, new: old.lerp(new, TAU), target, critic.params)
        observation = batch["observation"][-1]
        for i in range(DELAY):
            (loss, logp), grads = fcg.value_and_grad(actor_loss, has_aux=True)(
                actor.params, critic.params, heat.params, observation, batch["noise_of_policy"][i]
            )
            actor = actor.apply_gradients(grads)
            warm, grads = fcg.value_and_grad(heat_loss)(heat.params, logp, -float(self.action))
            heat, total = heat.apply_gradients(grads), total + loss + warm
        return {"critic": critic, "actor": actor, "heat": heat, "target": target}, {"loss": total}

    def learner(self, device: torch.device, options: Mapping[str, Any]) -> Learner:
        return _Learner(self, options, device)


class _Learner(Learner):
    def __init__(self, sizes: Sac, options: Mapping[str, Any], device: torch.device) -> None:
        super().__init__()
        params = sizes.params()
        self._names, self._entropy = tuple(sizes.batches(1)[0]), -float(sizes.action)
        self.critic, self.actor, self.heat = (Net(params[name]) for name, _ in RATES)
        self.target = Net(params["critic"], trained=False)
        self.to(device)
        nets = (self.critic, self.actor, self.heat)
        self.optimizers = [
            torch.optim.Adam(net.parameters(), lr=rate, **options)
            for net, (_, rate) in zip(nets, RATES, strict=True)
        ]
        self._of_critic: Any = self._update_critic
        self._of_policy: Any = self._update_policy

    def compile_with(self, mode: str | None) -> None:
        """Compile the update of the critics and that of the policy, as LeanRL does."""
        self._of_critic = torch.compile(self._update_critic, mode=mode)
        self._of_policy = torch.compile(self._update_policy, mode=mode)

    def update(self, *tensors: Tensor) -> Tensor:
        batch = dict(zip(self._names, tensors, strict=True))
        losses: list[Tensor] = []
        for i in range(DELAY):
            row = {name: value[i] for name, value in batch.items()}
            losses.append(self._of_critic(row).clone())
        for i in range(DELAY):
            losses.append(self._of_policy(batch["observation"][-1], batch["noise_of_policy"][i]).clone())
        return torch.stack(losses).sum()

    # Without loops and comprehensions: dynamo leaves a function uncompiled that has them and calls `backward`.
    def _update_critic(self, row: Batch) -> Tensor:
        critic, optimizer, target = self.critic.tensors(), self.optimizers[0], self.target.tensors()
        optimizer.zero_grad(set_to_none=True)
        loss = critic_loss(critic, self.actor.tensors(), target, self.heat.tensors(), row)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(target.values()), list(critic.values()), TAU)
        return loss.detach()

    def _update_policy(self, observation: Tensor, noise: Tensor) -> Tensor:
        of_actor, of_heat, heat = self.optimizers[1], self.optimizers[2], self.heat.tensors()
        of_actor.zero_grad(set_to_none=True)
        of_heat.zero_grad(set_to_none=True)
        loss, logp = actor_loss(self.actor.tensors(), self.critic.fixed(), heat, observation, noise)
        loss.backward()
        of_actor.step()
        warm = heat_loss(heat, logp, self._entropy)
        warm.backward()
        of_heat.step()
        return loss.detach() + warm.detach()
