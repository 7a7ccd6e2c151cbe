"""Times jax on N GPUs to compare with ``bench.sharded``: ``python -m tests.bench.jax_sharded``.

``--devices N`` sets their number; one process drives all of them. The model, its initial values, the batches and the
optimizer are those of ``bench.sharded``. Each parameter and both moments are sharded along their largest dimension, the
batch along its first, and XLA inserts the collectives (``jax.jit`` with ``NamedSharding``, the state donated). Losses
are those of the first device's rows, to be compared with those of rank 0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .models import Config, LanguageModel, config, names
from .sharded import BLOCKS, LEARNING_RATE, WARM_UPS, WEIGHT_DECAY, batches_of
from .system import BETAS, EPS

__all__ = ["main", "mean_and_losses"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench, and print a line, or with ``--json`` a JSON object."""
    options = _options(arguments)
    row = _measured(config(options.model), _devices(options), options)
    text = (
        f"jax {row['ms']:.2f} ms [{row['ms_min']:.2f}, {row['ms_max']:.2f}]  {row['tokens_per_s']:,.0f} tokens/s  "
        f"peak {row['peak_gib']:.2f} GiB, {row['attention']}, jax {row['jax']}, {row['device']}"
    )
    sys.stdout.write((json.dumps(row) if options.json else text) + "\n")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.bench.jax_sharded", description=__doc__)
    parser.add_argument("--model", choices=names(), default="gpt2-124m")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="timed steps")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def _devices(options: argparse.Namespace) -> list[Any]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        jax: Any = importlib.import_module("jax")
        importlib.import_module("optax")
        found = jax.devices("gpu" if options.device == "cuda" else "cpu")
    except (ImportError, RuntimeError) as error:
        raise SystemExit(f"tests.bench.jax_sharded: {error}") from error
    if len(found) < options.devices:
        raise SystemExit(
            f"tests.bench.jax_sharded: jax has {len(found)} devices, asked for {options.devices}"
        )
    return list(found[: options.devices])


def _measured(c: Config, devices: Sequence[Any], options: argparse.Namespace) -> dict[str, Any]:
    jax: Any = importlib.import_module("jax")
    optax: Any = importlib.import_module("optax")
    here: Any = importlib.import_module("jax.sharding")
    mesh = here.Mesh(np.array(devices), ("data",))
    optimizer = optax.adamw(LEARNING_RATE, b1=BETAS[0], b2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY)

    def place(leaf: Any) -> Any:
        return here.NamedSharding(mesh, here.PartitionSpec(*_cut(leaf.shape, len(devices))))

    values = _first_values(c, options.device)
    params = {name: jax.device_put(value, place(value)) for name, value in values.items()}
    state: Any = (params, jax.jit(optimizer.init)(params))
    laid = jax.tree.map(place, state)
    state = jax.device_put(state, laid)
    rows = here.NamedSharding(mesh, here.PartitionSpec("data"))
    batches = [
        jax.device_put((x.astype(np.int32), y.astype(np.int32)), rows) for x, y in _batches(c, len(devices))
    ]

    attention = "cudnn" if options.device == "cuda" else None

    def train(state: Any, batch: Any) -> Any:
        (params, opt_state), (tokens, targets) = state, batch
        loss_fn = lambda p: mean_and_losses(p, tokens, targets, c, attention)  # noqa: E731
        grads, losses = jax.grad(loss_fn, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), losses[: c.batch].mean()

    whole = here.NamedSharding(mesh, here.PartitionSpec())
    step, losses = jax.jit(train, donate_argnums=0, out_shardings=(laid, whole)), []
    start = time.perf_counter()
    for i in range(WARM_UPS):
        state, loss = step(state, batches[i % len(batches)])
        losses.append(float(loss))
    first, times = time.perf_counter() - start, []
    for _ in range(BLOCKS):
        length = max(1, options.steps // BLOCKS)
        start = time.perf_counter()
        for i in range(length):
            state, loss = step(state, batches[i % len(batches)])
        jax.block_until_ready((state, loss))
        times.append((time.perf_counter() - start) / length * 1e3)
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]
    ms = statistics.median(times)
    return {
        "system": "jax", "model": c.name, "ranks": len(devices), "ms": ms, "ms_min": min(times), "ms_max": max(times),
        "tokens_per_s": c.batch * c.time * len(devices) / ms * 1e3, "first_s": first, "losses": losses,
        "peak_gib": max(peaks) / 2**30, "attention": f"attention {attention or 'by default'}",
        "jax": jax.__version__, "device": devices[0].device_kind,
    }  # fmt: skip


def _cut(shape: Sequence[int], parts: int) -> list[str | None]:
    """Shard the largest dimension that divides evenly; a leaf that has none is whole on each device."""
    cut: list[str | None] = [None] * len(shape)
    able = [i for i, size in enumerate(shape) if size % parts == 0 and size >= parts]
    if able:
        cut[max(able, key=lambda i: shape[i])] = "data"
    return cut


def _first_values(c: Config, device: str) -> dict[str, Any]:
    """Return the module's parameters as numpy arrays; torch draws different numbers on a GPU than on a CPU."""
    torch.manual_seed(0)
    with torch.device(device):
        model = LanguageModel(c)
    values = {name: value.detach().cpu().numpy().copy() for name, value in model.named_parameters()}
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return values


def _batches(c: Config, ranks: int) -> list[tuple[Any, Any]]:
    """Concatenate the batches of all ranks along the first dimension."""
    of_ranks = [batches_of(c, rank) for rank in range(ranks)]
    return [
        tuple(torch.cat(parts).numpy() for parts in zip(*together, strict=True))  # type: ignore[misc]
        for together in zip(*of_ranks, strict=True)
    ]


def mean_and_losses(
    p: Any, tokens: Any, targets: Any, c: Config, attention: str | None = None
) -> tuple[Any, Any]:
    """Compute the mean loss and that of each sequence, with the arithmetic of :class:`LanguageModel`."""
    jax: Any = importlib.import_module("jax")
    optax: Any = importlib.import_module("optax")
    jnp = jax.numpy
    low, size = jnp.bfloat16, c.width // c.heads

    def linear(x: Any, name: str) -> Any:
        return x @ p[f"{name}.weight"].astype(low).T

    def norm(x: Any, name: str) -> Any:
        wide, weight = x.astype(jnp.float32), p[f"{name}.weight"].astype(low).astype(jnp.float32)
        if c.kind == "llama":
            return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight).astype(low)
        centred = wide - wide.mean(-1, keepdims=True)
        bias = p[f"{name}.bias"].astype(low).astype(jnp.float32)
        return (centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias).astype(
            low
        )

    def rotated(x: Any) -> Any:
        steps = 10_000.0 ** -(jnp.arange(0, size, 2) / size)
        angles = jnp.outer(jnp.arange(c.time), steps)[:, None]
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(low)

    def attended(x: Any, name: str) -> Any:
        heads = linear(x, f"{name}.qkv").reshape(*x.shape[:2], c.heads + 2 * c.kv_heads, size)
        q, k, v = jnp.split(heads, [c.heads, c.heads + c.kv_heads], axis=2)
        if c.kind == "llama":
            q, k = rotated(q), rotated(k)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
        return linear(out.reshape(x.shape), f"{name}.out")

    def fed(x: Any, name: str) -> Any:
        if c.kind == "gpt":
            return linear(jax.nn.gelu(linear(x, f"{name}.up"), approximate=True), f"{name}.down")
        return linear(jax.nn.silu(linear(x, f"{name}.gate")) * linear(x, f"{name}.up"), f"{name}.down")

    embed = p["embed"].astype(low)
    x = embed[tokens]
    if c.kind == "gpt":
        x = x + p["positions"].astype(low)
    for i in range(c.layers):
        x = x + attended(norm(x, f"blocks.{i}.norm1"), f"blocks.{i}")
        x = x + fed(norm(x, f"blocks.{i}.norm2"), f"blocks.{i}")
    x = norm(x, "norm")
    logits = (x @ embed.T if c.kind == "gpt" else linear(x, "head")).astype(jnp.float32)
    rows = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(-1)
    return rows.mean(), rows


if __name__ == "__main__":
    sys.exit(main())
