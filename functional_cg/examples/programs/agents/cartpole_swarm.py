"""Balances a swarm of poles on the device: ``python -m functional_cg.examples.programs.agents.cartpole_swarm``.

The environment is torch code, and the carts are part of the state. One call plays all of them for a while inside of
`fcg.scan`, computes returns in a second scan that runs backwards, and updates the policy: one graph, without the host.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg

CARTS, HORIZON, DISCOUNT, ENTROPY = 256, 32, 0.98, 0.01

Params = dict[str, Any]


class State(fcg.TrainState[Params]):
    key: Tensor
    carts: Tensor  # f32[carts, 4]: place, speed, angle, spin


def upright(key: Tensor, *counts: int) -> Tensor:
    # A stream of its own: the actions are drawn from the same key.
    return fcg.random.uniform(key, (*counts, 4), low=-0.05, high=0.05, stream=1)


def pushed(carts: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Push carts to the left (0) or right (1) for 20 ms; return them, and which have fallen.

    A cart of 1 kg, a pole of 0.1 kg and 1 m; `thrust` and `twist` are the accelerations of place and angle.
    Source: Barto, Sutton and Anderson 1983.
    """
    _, speed, angle, spin = carts.unbind(-1)
    force = (20.0 * action - 10.0 + 0.05 * spin.square() * angle.sin()) / 1.1
    twist = (9.8 * angle.sin() - angle.cos() * force) / (2 / 3 - 0.05 * angle.cos().square() / 1.1)
    thrust = force - 0.05 * twist * angle.cos() / 1.1
    carts = carts + 0.02 * torch.stack([speed, thrust, spin, twist], dim=-1)
    return carts, (carts[:, 0].abs() > 2.4) | (carts[:, 2].abs() > 0.21)


def init(key: Tensor, outputs: int) -> Params:
    return {
        "w1": fcg.random.normal(key, (4, 64), std=0.5),
        "b1": torch.zeros(64, device=key.device),
        "w2": fcg.random.normal(key, (64, outputs), std=0.01, stream=1),
    }


def mlp(params: Params, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]  # type: ignore[no-any-return]


def create_state(device: str = "cpu", count: int = CARTS) -> State:
    actor, critic, first, draws = fcg.random.split(fcg.random.key(0, device), 4)
    params = {"actor": init(actor, 1), "critic": init(critic, 1)}
    optimizer = fcg.optim.chain(fcg.optim.clip_by_global_norm(1.0), fcg.optim.adam(5e-3))
    return State.create(params=params, optimizer=optimizer, key=draws, carts=upright(first, count))


def play(actor: Params, carts: Tensor, key: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Play for HORIZON steps; return the carts, and what was seen, done and fallen, each [HORIZON, carts, ...]."""

    def turn(carts: Tensor, drawn: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        chance, fresh = drawn
        action = (chance < torch.sigmoid(mlp(actor, carts)[:, 0])).float()
        after, fallen = pushed(carts, action)
        row = {"observation": carts, "action": action, "fallen": fallen}
        return torch.where(fallen[:, None], fresh, after), row

    chances = fcg.random.uniform(key, (HORIZON, len(carts)))
    return fcg.scan(turn, carts, (chances, upright(key, HORIZON, len(carts))))


@fcg.graph_step
def learn(state: State) -> tuple[State, dict[str, Tensor]]:
    carts, rollout = play(state.params["actor"], state.carts, fcg.random.fold_in(state.key, state.step))

    def discounted(ahead: Tensor, fallen: Tensor) -> tuple[Tensor, Tensor]:
        # Each step that a cart stands is worth this much, so that a return lies between 0 and 1.
        ahead = 1 - DISCOUNT + DISCOUNT * torch.where(fallen, 0.0, ahead)
        return ahead, ahead

    last = mlp(state.params["critic"], carts).squeeze(-1)
    _, returns = fcg.scan(discounted, last, rollout["fallen"], reverse=True)

    def loss_fn(params: Params) -> Tensor:
        advantage = returns - mlp(params["critic"], rollout["observation"]).squeeze(-1)
        logit = mlp(params["actor"], rollout["observation"]).squeeze(-1)
        logp = -F.binary_cross_entropy_with_logits(logit, rollout["action"], reduction="none")
        gain = (logp * advantage.detach() / (advantage.detach().std() + 1e-6)).mean()
        entropy = F.binary_cross_entropy_with_logits(logit, logit.sigmoid())
        loss: Tensor = advantage.square().mean() - gain - ENTROPY * entropy
        return loss

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads, carts=carts), {"loss": loss, "falls": rollout["fallen"].sum()}


def train(updates: int, device: str = "cpu") -> list[float]:
    """Train, and return the mean number of steps between two falls of a cart, for each update."""
    state, falls = create_state(device), list[Tensor]()
    for _ in range(updates):
        state, metrics = learn(state)
        falls.append(metrics["falls"])
    lengths = CARTS * HORIZON / torch.stack(falls).clamp(min=1)
    print(f"a cart stood for {lengths[:5].mean():.0f} steps at first, {lengths[-5:].mean():.0f} in the end")
    return lengths.tolist()


if __name__ == "__main__":
    train(updates=150, device="cuda" if torch.cuda.is_available() else "cpu")
