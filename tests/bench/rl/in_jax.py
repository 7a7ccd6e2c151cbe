"""The learners in jax: ``jax.jit`` with donated state, optax, and ``jax.lax.scan`` where a step repeats itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ..system import System
from ..systems.jax_systems import modules, peak_of
from ..workloads import Batch
from . import dqn, ppo, sac
from .dreamer import Dreamer
from .jax_nets import Jax, Step, numbers
from .jax_world import dreamer_in_jax
from .workloads import LearnerWorkload

__all__ = ["MAKERS", "in_jax"]


def in_jax(work: LearnerWorkload, device: torch.device, batches: Sequence[Batch]) -> System:
    """Build the jax system of a learner.

    Args:
      work: The workload.
      device: Where.
      batches: Batches on the CPU.
    Raises:
      Unavailable: If jax or optax is missing, or has no such device.
    """
    jax, optax, place = modules(device)
    peak = peak_of(place)
    state, step = MAKERS[type(work.learned)](Jax(jax, optax), work.learned)

    def precise(state: Any, batch: Any) -> Any:
        with jax.default_matmul_precision("float32"):  # as in torch: on a GPU the default is TF32
            return step(state, batch)

    fn = jax.jit(precise, donate_argnums=0)
    held: dict[str, Any] = {"state": jax.device_put(state, place)}
    del state

    def run(batch: Any) -> Any:
        held["state"], held["loss"] = fn(held["state"], batch)
        return held["loss"]

    def wait() -> None:
        jax.block_until_ready(held)

    def close() -> None:
        held.clear()
        jax.clear_caches()

    given = [jax.device_put(numbers(batch), place) for batch in batches]
    notes = [f"jax {jax.__version__}, optax {optax.__version__}"]
    return System("jax", run, given, wait, close, peak_bytes=peak, notes=notes)


def _sac(j: Jax, sizes: sac.Sac) -> tuple[Any, Step]:
    jnp, rates = j.np, dict(sac.RATES)
    optimizers = {name: j.optax.adam(rate) for name, rate in rates.items()}
    params = numbers(sizes.params())
    opt = {name: optimizer.init(params[name]) for name, optimizer in optimizers.items()}
    low, high = sac.LOWEST

    def act(actor: Any, observation: Any, noise: Any) -> Any:
        mean, spread = jnp.split(j.mlp(actor, observation), 2, -1)
        log_std = low + 0.5 * (high - low) * (jnp.tanh(spread) + 1)
        action = jnp.tanh(mean + jnp.exp(log_std) * noise)
        density = -0.5 * noise**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
        return action, (density - jnp.log(1 - action**2 + 1e-6)).sum(-1)

    def worth(critic: Any, observation: Any, action: Any) -> Any:
        return j.mlp(critic, jnp.concatenate([observation, action], -1))[..., 0]

    def critic_loss(critic: Any, actor: Any, target: Any, heat: Any, row: Any) -> Any:
        action, logp = act(actor, row["next"], row["noise"])
        ahead = worth(target, row["next"], action).min(0) - jnp.exp(heat["log"]) * logp
        goal = row["reward"] + (1 - row["done"]) * sac.DISCOUNT * ahead
        return ((worth(critic, row["observation"], row["action"]) - goal) ** 2).mean(-1).sum()

    def actor_loss(actor: Any, critic: Any, heat: Any, observation: Any, noise: Any) -> Any:
        action, logp = act(actor, observation, noise)
        return (jnp.exp(heat["log"]) * logp - worth(critic, observation, action).min(0)).mean(), logp

    def heat_loss(heat: Any, logp: Any) -> Any:
        return -(jnp.exp(heat["log"]) * (logp - sizes.action)).mean()

    def step(state: Any, batch: Any) -> Any:
        params, opt, target = dict(state["params"]), dict(state["opt"]), state["target"]

        def learn(name: str, grads: Any) -> None:
            params[name], opt[name] = j.updated(optimizers[name], params[name], opt[name], grads)

        total = 0.0
        for i in range(sac.DELAY):
            row = {name: value[i] for name, value in batch.items()}
            others = (params["actor"], target, params["heat"], row)
            loss, grads = j.grad(critic_loss)(params["critic"], *others)
            learn("critic", grads)
            target = j.average(target, params["critic"], sac.TAU)
            total += loss
        for i in range(sac.DELAY):
            others = (params["critic"], params["heat"], batch["observation"][-1], batch["noise_of_policy"][i])
            (loss, logp), grads = j.grad(actor_loss, has_aux=True)(params["actor"], *others)
            learn("actor", grads)
            warm, grads = j.grad(heat_loss)(params["heat"], logp)
            learn("heat", grads)
            total += loss + warm
        return {"params": params, "opt": opt, "target": target}, total

    return {"params": params, "opt": opt, "target": numbers(sizes.params()["critic"])}, step


def _dqn(j: Jax, sizes: dqn.Dqn) -> tuple[Any, Step]:
    jax, jnp, optimizer = j.jax, j.np, j.optax.adam(dqn.RATE)
    params = numbers(sizes.params()["net"])
    state = {
        "params": params,
        "opt": optimizer.init(params),
        "target": numbers(sizes.params()["net"]),
        "ring": numbers(sizes.transitions(sizes.ring, dqn.RING_SEED)),
        "count": numbers(torch.zeros((), dtype=torch.int32)),
    }

    def loss_of(net: Any, target: Any, rows: Any) -> Any:
        ahead = j.mlp(target, rows["next"]).max(-1)
        goal = rows["reward"] + (1 - rows["done"]) * dqn.DISCOUNT * ahead
        chosen = jnp.take_along_axis(j.mlp(net, rows["observation"]), rows["action"][:, None], -1)[:, 0]
        return ((chosen - goal) ** 2).mean()

    def step(state: Any, batch: Any) -> Any:
        count = state["count"]
        places = (count * sizes.fresh + jnp.arange(sizes.fresh)) % sizes.ring
        ring = {name: value.at[places].set(batch[name]) for name, value in state["ring"].items()}
        key = jax.random.fold_in(jax.random.key(0), count)
        picks = jax.random.randint(key, (sizes.batch,), 0, sizes.ring)
        rows = {name: value[picks] for name, value in ring.items()}
        loss, grads = j.grad(loss_of)(state["params"], state["target"], rows)
        params, opt = j.updated(optimizer, state["params"], state["opt"], grads)
        target = j.average(state["target"], params, dqn.TAU)
        return {"params": params, "opt": opt, "target": target, "ring": ring, "count": count + 1}, loss

    return state, step


def _ppo(j: Jax, sizes: ppo.Ppo) -> tuple[Any, Step]:
    jax, jnp = j.jax, j.np
    optimizer = j.optax.chain(j.optax.clip_by_global_norm(ppo.NORM), j.optax.adam(ppo.RATE, eps=ppo.EPS))
    params = numbers(sizes.params()["net"])
    count = numbers(torch.zeros((), dtype=torch.int32))
    state = {"params": params, "opt": optimizer.init(params), "count": count}

    def density(params: Any, observation: Any, action: Any) -> Any:
        mean = j.mlp(ppo.part(params, "actor_"), observation, jnp.tanh)
        scaled, log_std = (action - mean) * jnp.exp(-params["log_std"]), params["log_std"]
        return (-0.5 * scaled**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)).sum(-1)

    def value_of(params: Any, observation: Any) -> Any:
        return j.mlp(ppo.part(params, "critic_"), observation, jnp.tanh)[..., 0]

    def prepared(params: Any, batch: Any) -> Any:
        goes_on = 1 - batch["done"]
        value, last = value_of(params, batch["observation"]), value_of(params, batch["last"])
        ahead = jnp.concatenate([value[1:], last[None]])
        total = batch["reward"] + ppo.DISCOUNT * goes_on * ahead - value
        factor = ppo.DISCOUNT * ppo.LAMBDA * goes_on

        def join(late: Any, early: Any) -> Any:
            return early[0] * late[0], early[1] + early[0] * late[1]

        _, gain = jax.lax.associative_scan(join, (factor, total), reverse=True)
        logp = density(params, batch["observation"], batch["action"])
        rows = {name: batch[name] for name in ("observation", "action")}
        rows |= {"logp": logp, "value": value, "gain": gain}
        return {name: rows[name].reshape(-1, *rows[name].shape[2:]) for name in rows}

    def loss_of(params: Any, rows: Any) -> Any:
        ratio = jnp.exp(density(params, rows["observation"], rows["action"]) - rows["logp"])
        gain = (rows["gain"] - rows["gain"].mean()) / (rows["gain"].std(ddof=1) + 1e-8)
        policy = jnp.maximum(-gain * ratio, -gain * jnp.clip(ratio, 1 - ppo.CLIP, 1 + ppo.CLIP)).mean()
        value, goal = value_of(params, rows["observation"]), rows["gain"] + rows["value"]
        clipped = rows["value"] + jnp.clip(value - rows["value"], -ppo.CLIP, ppo.CLIP)
        wrong = jnp.maximum((value - goal) ** 2, (clipped - goal) ** 2)
        return policy + ppo.WEIGHT * 0.5 * wrong.mean()

    def step(state: Any, batch: Any) -> Any:
        rows = prepared(state["params"], batch)
        key = jax.random.fold_in(jax.random.key(0), state["count"])
        words = jax.random.uniform(key, (sizes.epochs, sizes.envs * sizes.length))
        order = words.argsort(-1).reshape(sizes.epochs * sizes.minibatches, -1)
        minibatches = {name: value[order] for name, value in rows.items()}

        def learn(carry: Any, rows: Any) -> Any:
            loss, grads = j.grad(loss_of)(carry[0], rows)
            return j.updated(optimizer, carry[0], carry[1], grads), loss

        (params, opt), losses = jax.lax.scan(learn, (state["params"], state["opt"]), minibatches)
        return {"params": params, "opt": opt, "count": state["count"] + 1}, losses.mean()

    return state, step


MAKERS: Mapping[type, Callable[[Jax, Any], tuple[Any, Step]]] = MappingProxyType(
    {sac.Sac: _sac, dqn.Dqn: _dqn, ppo.Ppo: _ppo, Dreamer: dreamer_in_jax}
)
