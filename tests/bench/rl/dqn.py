"""Deep Q-learning with the replay buffer in the state: write new transitions to the ring, sample, learn, average.

Each system samples with its own random numbers: ours by key, torch with its generator. Every reward is 1, as a
cart-pole pays, and the nets begin near 0: so the first losses of two systems differ by little, whatever they sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import functional_cg as fcg

from ..workloads import Batch, Params
from .nets import Algorithm, Learner, Net, layers, mlp, moved, normal

__all__ = ["DISCOUNT", "RATE", "RING_SEED", "TAU", "Dqn"]

DISCOUNT, TAU, RATE = 0.99, 0.005, 2.5e-4
_DATA_SEED, RING_SEED = 2, 3


def loss_of(net: Params, target: Params, rows: Batch) -> Tensor:
    """Compute the temporal-difference loss of a minibatch."""
    with torch.no_grad():
        ahead = mlp(target, rows["next"]).amax(-1)
        goal = rows["reward"] + (1 - rows["done"]) * DISCOUNT * ahead
    chosen = mlp(net, rows["observation"]).gather(-1, rows["action"][:, None]).squeeze(-1)
    return (chosen - goal).square().mean()


@dataclass(frozen=True)
class Dqn(Algorithm):
    """Sizes of the net, of the ring and of a minibatch; ``fresh`` transitions arrive with each step."""

    width: int
    ring: int
    batch: int
    fresh: int
    observation: int = 8
    action: int = 4

    @property
    def text(self) -> str:
        return (
            f"DQN, net of 2 layers of {self.width}, a ring of {self.ring:,} transitions in the state, {self.fresh} new "
            f"ones and a minibatch of {self.batch} drawn inside of the step, fp32, Adam"
        )

    def params(self) -> dict[str, Params]:
        return {"net": layers(normal(), self.observation, self.width, self.width, self.action, last=0.01)}

    def transitions(self, count: int, seed: int) -> Batch:
        """Make transitions on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        draw = normal(seed)
        return {
            "observation": draw(count, self.observation),
            "action": torch.randint(self.action, (count,), generator=generator),
            "next": draw(count, self.observation),
            "reward": torch.ones(count),
            "done": (draw(count) > 2.0).float(),
        }

    def batches(self, count: int) -> list[Batch]:
        return [self.transitions(self.fresh, _DATA_SEED + 2 * i) for i in range(count)]

    def state(self, device: torch.device) -> Any:
        params = moved(self.params()["net"], device)
        state = fcg.TrainState.create(params=params, optimizer=fcg.optim.adam(RATE), key=fcg.random.key(0))
        ring = moved(self.transitions(self.ring, RING_SEED), device)
        return fcg.place({"learner": fcg.snapshot(state), "target": params, "ring": ring})

    def step(self, state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        learner = state["learner"]
        key = fcg.random.fold_in(learner.key, learner.step)
        places = (learner.step * self.fresh + torch.arange(self.fresh, device=key.device)) % self.ring
        ring = {name: value.index_copy(0, places, batch[name]) for name, value in state["ring"].items()}
        picks = fcg.random.randint(key, (self.batch,), 0, self.ring)
        rows = {name: value[picks] for name, value in ring.items()}
        loss, grads = fcg.value_and_grad(loss_of)(learner.params, state["target"], rows)
        learner = learner.apply_gradients(grads)
        target = fcg.tree.map(lambda old, new: old.lerp(new, TAU), state["target"], learner.params)
        return {"learner": learner, "target": target, "ring": ring}, {"loss": loss}

    def learner(self, device: torch.device, options: Mapping[str, Any]) -> Learner:
        return _Learner(self, options, device)


class _Learner(Learner):
    def __init__(self, sizes: Dqn, options: Mapping[str, Any], device: torch.device) -> None:
        super().__init__()
        self._sizes = sizes
        params = sizes.params()["net"]
        self.net, self.target = Net(params), Net(params, trained=False)
        self.ring = Net(sizes.transitions(sizes.ring, RING_SEED), trained=False)
        self.register_buffer("places", torch.arange(sizes.fresh))
        self.to(device)
        self.optimizers = [torch.optim.Adam(self.net.parameters(), lr=RATE, **options)]

    # Without loops and comprehensions: dynamo leaves a function uncompiled that has them and calls `backward`.
    def update(self, *tensors: Tensor) -> Tensor:
        optimizer, net, target = self.optimizers[0], self.net.tensors(), self.target.tensors()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(net, target, self._sampled(tensors))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(target.values()), list(net.values()), TAU)
        return loss.detach()

    def _sampled(self, tensors: Sequence[Tensor]) -> Batch:
        """Write new transitions to the ring, then draw a minibatch."""
        ring, places, sizes = self.ring.tensors(), self.get_buffer("places"), self._sizes
        for value, new in zip(ring.values(), tensors, strict=True):
            value.index_copy_(0, places, new)
        places.add_(sizes.fresh).remainder_(sizes.ring)
        picks = torch.randint(sizes.ring, (sizes.batch,), device=places.device)
        return {name: value[picks] for name, value in ring.items()}
