"""The world model in jax: its loop over time is ``jax.lax.scan``."""

from __future__ import annotations

from typing import Any

from . import dreamer as world
from .dreamer import Dreamer
from .jax_nets import Jax, Step, numbers

__all__ = ["dreamer_in_jax"]


def dreamer_in_jax(j: Jax, sizes: Dreamer) -> tuple[Any, Step]:
    """Make the first state, and the step.

    Args:
      j: Jax.
      sizes: Of the model.
    """
    jax, jnp = j.jax, j.np
    optimizer = j.optax.chain(j.optax.clip_by_global_norm(world.NORM), j.optax.adam(world.RATE))
    params = numbers(sizes.params()["model"])

    def normed(p: Any, name: str, h: Any) -> Any:
        centred = h - h.mean(-1, keepdims=True)
        spread = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + world.EPS)
        return centred * spread * p[f"{name}_scale"] + p[f"{name}_shift"]

    def linear(p: Any, name: str, x: Any) -> Any:
        return x @ p[f"{name}_w"].T

    def dense(p: Any, name: str, x: Any) -> Any:
        return jax.nn.silu(normed(p, name, linear(p, name, x)))

    def head(p: Any, name: str, x: Any) -> Any:
        return linear(p, f"{name}_out", x) + p[f"{name}_out_b"]

    def symlog(x: Any) -> Any:
        return jnp.sign(x) * jnp.log1p(jnp.abs(x))

    def mixed(logits: Any) -> Any:
        probs = jax.nn.softmax(logits.reshape(*logits.shape[:-1], sizes.groups, sizes.groups), -1)
        return jnp.log((1 - world.MIX) * probs + world.MIX / sizes.groups)

    def cell(p: Any, carry: Any, x: Any) -> Any:
        deter, latent = carry[0] * x["goes_on"], carry[1] * x["goes_on"]
        h = jax.nn.silu(normed(p, "in", linear(p, "in", latent) + x["pushed"]))
        gates = normed(p, "gru", linear(p, "gru", jnp.concatenate([h, deter], -1)))
        reset, candidate, update = jnp.split(gates, 3, -1)
        update = jax.nn.sigmoid(update - 1)
        deter = update * jnp.tanh(jax.nn.sigmoid(reset) * candidate) + (1 - update) * deter
        h = jax.nn.silu(normed(p, "post", linear(p, "post", deter) + x["seen"]))
        logp = mixed(head(p, "post", h))
        probs = jnp.exp(logp)
        picked = jax.nn.one_hot((logp + x["noise"]).argmax(-1), sizes.groups)
        latent = (picked + probs - jax.lax.stop_gradient(probs)).reshape(len(h), -1)
        return (deter, latent), (deter, latent, logp)

    def divergence(logp: Any, logq: Any) -> Any:
        return jnp.maximum((jnp.exp(logp) * (logp - logq)).sum((-1, -2)), world.FREE)

    def loss_of(p: Any, batch: Any) -> Any:
        stop, goes_on = jax.lax.stop_gradient, 1 - batch["first"][..., None]
        seen = dense(p, "enc1", dense(p, "enc0", symlog(batch["observation"])))
        xs = {
            "pushed": linear(p, "in_action", batch["action"] * goes_on), "seen": linear(p, "post_seen", seen),
            "goes_on": goes_on, "noise": batch["noise"],
        }  # fmt: skip
        nothing = jnp.zeros((sizes.batch, sizes.width)), jnp.zeros((sizes.batch, sizes.groups**2))
        _, (deter, latent, logp) = jax.lax.scan(lambda carry, x: cell(p, carry, x), nothing, xs)
        logq = mixed(head(p, "prior", dense(p, "prior", deter)))
        features = jnp.concatenate([deter, latent], -1)
        decoded = head(p, "dec", dense(p, "dec1", dense(p, "dec0", features)))
        loss = ((decoded - symlog(batch["observation"])) ** 2).sum(-1)
        bins = jax.nn.log_softmax(head(p, "reward", dense(p, "reward", features)))
        place = (symlog(batch["reward"]) + world.RANGE) * ((world.BINS - 1) / (2 * world.RANGE))
        low = jnp.clip(jnp.floor(place), 0, world.BINS - 2)
        pair = jnp.take_along_axis(bins, jnp.stack([low, low + 1], -1).astype(jnp.int32), -1)
        loss -= pair[..., 0] * (1 - place + low) + pair[..., 1] * (place - low)
        ends = head(p, "cont", dense(p, "cont", features))[..., 0]
        loss += j.optax.sigmoid_binary_cross_entropy(ends, 1 - batch["done"])
        loss += world.KL[0] * divergence(stop(logp), logq) + world.KL[1] * divergence(logp, stop(logq))
        return loss.mean()

    def step(state: Any, batch: Any) -> Any:
        loss, grads = j.grad(loss_of)(state[0], batch)
        return j.updated(optimizer, state[0], state[1], grads), loss

    return (params, optimizer.init(params)), step
