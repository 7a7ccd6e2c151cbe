"""The world model of DreamerV3 on vectors: encoder, recurrent state-space model, heads, and one Adam.

Hafner et al. 2023, "Mastering Diverse Domains through World Models". What does not depend on the recurrence stands
outside of the loop over time, in all systems: the encoder, the products with actions and embeddings, priors and heads.
The Gumbel noise that draws the latents comes with the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg

from ..workloads import Batch, Params
from .nets import Algorithm, Learner, Net, Normal, moved, normal

__all__ = ["BINS", "EPS", "FREE", "KL", "MIX", "NORM", "RANGE", "RATE", "Dreamer"]

RATE, NORM = 1e-4, 1000.0
EPS, MIX, FREE = 1e-3, 0.01, 1.0  # of norms; share of the uniform in latents; nats that are free
KL = 0.5, 0.1  # weights of what trains the prior, and of what trains the posterior
BINS, RANGE = 255, 20.0  # of the reward's distribution, over symlog(reward)
_DATA_SEED = 2

Carry = tuple[Tensor, Tensor]  # deterministic state [n, deter], latents [n, groups * classes]


def normed(p: Params, name: str, h: Tensor) -> Tensor:
    """Normalize."""
    return F.layer_norm(h, h.shape[-1:], p[f"{name}_scale"], p[f"{name}_shift"], EPS)


def dense(p: Params, name: str, x: Tensor) -> Tensor:
    """Compute a layer: product, norm, SiLU."""
    return F.silu(normed(p, name, F.linear(x, p[f"{name}_w"])))


def symlog(x: Tensor) -> Tensor:
    """Compress large numbers."""
    return x.sign() * x.abs().log1p()


def mixed(logits: Tensor, classes: int) -> Tensor:
    """Compute log-probabilities, with a share of the uniform: [..., groups, classes]."""
    probs: Tensor = logits.unflatten(-1, (-1, classes)).softmax(-1)
    return ((1 - MIX) * probs + MIX / classes).log()


def encoded(p: Params, batch: Batch) -> Batch:
    """Compute what each turn of the loop reads, [time, n, ...]."""
    goes_on = 1 - batch["first"][..., None]
    seen = dense(p, "enc1", dense(p, "enc0", symlog(batch["observation"])))
    return {
        "pushed": F.linear(batch["action"] * goes_on, p["in_action_w"]),
        "seen": F.linear(seen, p["post_seen_w"]),
        "goes_on": goes_on,
        "noise": batch["noise"],
    }


def cell(p: Params, carry: Carry, x: Batch) -> tuple[Carry, tuple[Tensor, Tensor, Tensor]]:
    """Advance by one time step: the carry, and (deterministic state, latents, their log-probabilities)."""
    deter, latent = carry[0] * x["goes_on"], carry[1] * x["goes_on"]
    h = F.silu(normed(p, "in", F.linear(latent, p["in_w"]) + x["pushed"]))
    gates = normed(p, "gru", F.linear(torch.cat([h, deter], -1), p["gru_w"]))
    reset, candidate, update = gates.chunk(3, -1)
    update = torch.sigmoid(update - 1)
    deter = update * torch.tanh(torch.sigmoid(reset) * candidate) + (1 - update) * deter
    h = F.silu(normed(p, "post", F.linear(deter, p["post_w"]) + x["seen"]))
    logp = mixed(F.linear(h, p["post_out_w"], p["post_out_b"]), x["noise"].shape[-1])
    choice = (logp + x["noise"]).argmax(-1, keepdim=True)
    picked = (choice == torch.arange(logp.shape[-1], device=logp.device)).to(logp.dtype)
    probs = logp.exp()
    latent = (picked + probs - probs.detach()).flatten(-2)  # the gradient passes straight through
    return (deter, latent), (deter, latent, logp)


def divergence(logp: Tensor, logq: Tensor) -> Tensor:
    """Compute the Kullback-Leibler divergence, summed over groups, but for the free nats."""
    return (logp.exp() * (logp - logq)).sum((-1, -2)).clamp(min=FREE)


def loss_of_heads(p: Params, deter: Tensor, latent: Tensor, logp: Tensor, batch: Batch) -> Tensor:
    """Compute the loss from the states of all times: reconstruction, reward, continuation, and both divergences."""
    prior = F.linear(dense(p, "prior", deter), p["prior_out_w"], p["prior_out_b"])
    logq = mixed(prior, logp.shape[-1])
    features = torch.cat([deter, latent], -1)
    decoded = F.linear(dense(p, "dec1", dense(p, "dec0", features)), p["dec_out_w"], p["dec_out_b"])
    loss = (decoded - symlog(batch["observation"])).square().sum(-1)
    bins = F.linear(dense(p, "reward", features), p["reward_out_w"], p["reward_out_b"]).log_softmax(-1)
    place = (symlog(batch["reward"]) + RANGE) * ((BINS - 1) / (2 * RANGE))
    low = place.floor().clamp(0, BINS - 2)
    pair = bins.gather(-1, torch.stack([low, low + 1], -1).long())
    loss = loss - pair[..., 0] * (1 - place + low) - pair[..., 1] * (place - low)
    ends = F.linear(dense(p, "cont", features), p["cont_out_w"], p["cont_out_b"]).squeeze(-1)
    loss = loss + F.binary_cross_entropy_with_logits(ends, 1 - batch["done"], reduction="none")
    of_prior, of_posterior = divergence(logp.detach(), logq), divergence(logp, logq.detach())
    return (loss + KL[0] * of_prior + KL[1] * of_posterior).mean()


@dataclass(frozen=True)
class Dreamer(Algorithm):
    """Sizes of the model and of a batch of sequences."""

    width: int
    groups: int
    length: int
    batch: int
    observation: int = 64
    action: int = 6

    @property
    def text(self) -> str:
        return (
            f"world model of DreamerV3 on vectors, GRU and layers of {self.width}, "
            f"{self.groups}x{self.groups} latents, {self.batch} sequences of {self.length}, fp32, clip by norm, Adam"
        )

    @property
    def compile_once(self) -> bool:
        return True

    @property
    def branches(self) -> bool:
        return False  # 7,000 calls, which take minutes to compile as one function

    def params(self) -> dict[str, Params]:
        draw, width, latent = normal(), self.width, self.groups**2
        params: Params = {}
        for name, inputs, outputs in (
            ("enc0", self.observation, width), ("enc1", width, width), ("in", latent, width),
            ("gru", 2 * width, 3 * width), ("post", width, width), ("prior", width, width),
            *((name, width + latent, width) for name in ("dec0", "reward", "cont")), ("dec1", width, width),
        ):  # fmt: skip
            params |= {f"{name}_w": draw(outputs, inputs, std=inputs**-0.5)}
            params |= {f"{name}_scale": torch.ones(outputs), f"{name}_shift": torch.zeros(outputs)}
        params["in_action_w"] = draw(width, self.action, std=self.action**-0.5)
        params["post_seen_w"] = draw(width, width, std=width**-0.5)
        for name, outputs in (("post", latent), ("prior", latent), ("dec", self.observation)):
            params |= _head(draw, name, width, outputs)
        return {"model": params | _head(draw, "reward", width, BINS) | _head(draw, "cont", width, 1)}

    def batches(self, count: int) -> list[Batch]:
        draw, rows = normal(_DATA_SEED), (self.length, self.batch)
        generator = torch.Generator().manual_seed(_DATA_SEED)
        noise = (*rows, self.groups, self.groups)
        return [
            {
                "observation": draw(*rows, self.observation),
                "action": torch.tanh(draw(*rows, self.action)),
                "reward": draw(*rows),
                "done": (draw(*rows) > 2.3).float(),
                "first": (draw(*rows) > 2.3).float(),
                "noise": -torch.empty(noise).exponential_(generator=generator).log(),
            }
            for _ in range(count)
        ]

    def state(self, device: torch.device) -> Any:
        optimizer = fcg.optim.chain(fcg.optim.clip_by_global_norm(NORM), fcg.optim.adam(RATE))
        params = moved(self.params()["model"], device)
        return fcg.TrainState.create(params=params, optimizer=optimizer)

    def step(self, state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        def loss_fn(params: Params) -> Tensor:
            turn = lambda carry, x: cell(params, carry, x)  # noqa: E731
            _, (deter, latent, logp) = fcg.scan(turn, _nothing(self, batch), encoded(params, batch))
            return loss_of_heads(params, deter, latent, logp, batch)

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    def learner(self, device: torch.device, options: Mapping[str, Any]) -> Learner:
        return _Learner(self, options, device)


def _head(draw: Normal, name: str, inputs: int, outputs: int) -> Params:
    weight = draw(outputs, inputs, std=0.1 * inputs**-0.5)
    return {f"{name}_out_w": weight, f"{name}_out_b": torch.zeros(outputs)}


def _nothing(sizes: Dreamer, batch: Batch) -> Carry:
    """Return the carry before the first time step."""
    zeros = lambda features: torch.zeros(sizes.batch, features, device=batch["reward"].device)  # noqa: E731
    return zeros(sizes.width), zeros(sizes.groups**2)


class _Learner(Learner):
    def __init__(self, sizes: Dreamer, options: Mapping[str, Any], device: torch.device) -> None:
        super().__init__()
        self._names, self._sizes = tuple(sizes.batches(1)[0]), sizes
        self.model = Net(sizes.params()["model"]).to(device)
        self.optimizers = [torch.optim.Adam(self.model.parameters(), lr=RATE, **options)]
        self._encoded: Any = encoded
        self._cell: Any = cell
        self._heads: Any = loss_of_heads
        self._advance: Any = self._clip_and_step

    def compile_with(self, mode: str | None) -> None:
        """Compile what stands around the loop, and the cell in it: torch.compile takes minutes to unroll it."""
        self._encoded = torch.compile(encoded, mode=mode)
        self._cell = torch.compile(cell, mode=mode)
        self._heads = torch.compile(loss_of_heads, mode=mode)
        self._advance = torch.compile(self._clip_and_step, mode=mode)

    def update(self, *tensors: Tensor) -> Tensor:
        batch = dict(zip(self._names, tensors, strict=True))
        (optimizer,), params = self.optimizers, self.model.tensors()
        optimizer.zero_grad(set_to_none=True)
        columns = {name: value.unbind(0) for name, value in self._encoded(params, batch).items()}
        carry, rows = _nothing(self._sizes, batch), []
        for time in range(self._sizes.length):
            x = {name: column[time] for name, column in columns.items()}
            carry, row = self._cell(params, carry, x)
            rows.append(row)
        states = (torch.stack(column) for column in zip(*rows, strict=True))
        loss = self._heads(params, *states, batch)
        loss.backward()
        self._advance()
        return loss.detach()  # type: ignore[no-any-return]

    def _clip_and_step(self) -> None:
        torch.nn.utils.clip_grad_norm_(list(self.model.parameters()), NORM)
        self.optimizers[0].step()
