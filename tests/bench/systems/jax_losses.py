"""The workloads' losses in jax: the arithmetic of ``losses`` in idiomatic jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..workloads import Workload, blocks
from .losses import RATE

__all__ = ["jax_actor", "jax_loss"]


def jax_loss(work: Workload, jax: Any, optax: Any, attention: str | None) -> Callable[..., Any]:
    """Make ``f(params, extra, x, y) -> (loss, extra)``; ``extra`` holds running statistics and a count.

    Args:
      work: The workload.
      jax: The module.
      optax: The module.
      attention: ``implementation`` of ``jax.nn.dot_product_attention``.
    """
    jnp = jax.numpy
    dtype = jnp.bfloat16 if work.bf16 else jnp.float32
    layers, heads, width = work.layers, work.heads, work.width
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    outputs = jax_actor(work, jax)

    def mlp(p: Any, extra: Any, x: Any, y: Any) -> Any:
        h = x.astype(dtype)
        for i in range(layers):
            h = h if i == 0 else jax.nn.relu(h)
            h = h @ p[f"w{i}"].astype(dtype).T + p[f"b{i}"].astype(dtype)
        return jnp.mean((h.astype(jnp.float32) - y) ** 2), extra

    def dropped(p: Any, extra: Any, x: Any, y: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), extra["count"])
        keep = jax.random.bernoulli(key, 1 - RATE, p["x"].shape)
        h = jnp.where(keep, p["x"] / (1 - RATE), 0.0)
        return jnp.mean(h.mean(1) ** 2), {"count": extra["count"] + 1}

    def actor(p: Any, extra: Any, x: Any, y: Any) -> Any:
        logits, value = outputs(p, x)
        action, target = y[:, :1].astype(jnp.int32), y[:, 1]
        log_p = jax.nn.log_softmax(logits)
        advantage = jax.lax.stop_gradient(target - value)
        entropy = -(jnp.exp(log_p) * log_p).sum(-1)
        gain = jnp.take_along_axis(log_p, action, 1)[:, 0] * advantage
        return jnp.mean((value - target) ** 2) + jnp.mean(-gain - 0.01 * entropy), extra

    def norm(h: Any, scale: Any, shift: Any) -> Any:
        wide = h.astype(jnp.float32)
        mean = wide.mean(-1, keepdims=True)
        spread = jax.lax.rsqrt(((wide - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
        return ((wide - mean) * spread * scale.astype(dtype) + shift.astype(dtype)).astype(dtype)

    def gpt(p: Any, extra: Any, x: Any, y: Any) -> Any:
        rows, time = x.shape
        wte = p["wte"].astype(dtype)
        h = wte[x] + p["wpe"].astype(dtype)
        for i in range(layers):
            n = norm(h, p[f"norm1_{i}"], p[f"shift1_{i}"])
            qkv = (n @ p[f"qkv_{i}"].astype(dtype).T).reshape(rows, time, 3, heads, width // heads)
            q, k, v = (qkv[:, :, j] for j in range(3))
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
            h = h + mixed.reshape(rows, time, width) @ p[f"out_{i}"].astype(dtype).T
            n = norm(h, p[f"norm2_{i}"], p[f"shift2_{i}"])
            n = jax.nn.gelu(n @ p[f"up_{i}"].astype(dtype).T, approximate=True)
            h = h + n @ p[f"down_{i}"].astype(dtype).T
        logits = (norm(h, p["norm"], p["shift"]) @ wte.T).astype(jnp.float32)
        return cross_entropy(logits, y).mean(), extra

    def cnn(p: Any, extra: Any, x: Any, y: Any) -> Any:
        new = dict(extra)

        def conv(h: Any, name: str, stride: int = 1) -> Any:
            weight = p[f"conv_{name}"].astype(dtype)
            side = weight.shape[-1] // 2
            numbers = ("NHWC", "OIHW", "NHWC")
            return jax.lax.conv_general_dilated(
                h, weight, (stride, stride), [(side, side)] * 2, dimension_numbers=numbers
            )

        def normed(h: Any, name: str) -> Any:
            wide = h.astype(jnp.float32)
            mean, spread = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
            count = wide.size // wide.shape[-1]
            for key, value in ((f"mean_{name}", mean), (f"var_{name}", spread * count / (count - 1))):
                new[key] = 0.9 * extra[key] + 0.1 * jax.lax.stop_gradient(value)
            out = (wide - mean) * jax.lax.rsqrt(spread + 1e-5) * p[f"scale_{name}"] + p[f"shift_{name}"]
            return out.astype(dtype)

        h = jax.nn.relu(normed(conv(x.astype(dtype), "stem"), "stem"))
        for name, inputs, channels, stride in blocks(work):
            skip = h if inputs == channels else conv(h, f"{name}_skip", stride)
            h = jax.nn.relu(normed(conv(h, f"{name}_a", stride), f"{name}_a"))
            h = jax.nn.relu(skip + normed(conv(h, f"{name}_b"), f"{name}_b"))
        logits = h.mean((1, 2)).astype(jnp.float32) @ p["head"].T + p["bias"]
        return cross_entropy(logits, y).mean(), new

    loss = {
        "mlp": mlp, "dropout": dropped, "actor": actor, "loop": actor, "gpt": gpt, "cnn": cnn,
    }[work.kind]  # fmt: skip

    def precise(*args: Any) -> Any:
        with jax.default_matmul_precision("float32"):  # as in torch: on a GPU the default is TF32
            return loss(*args)

    return precise if not work.bf16 else loss


def jax_actor(work: Workload, jax: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Make ``f(params, x)``, the logits and values of observations."""

    def outputs(p: Any, x: Any) -> tuple[Any, Any]:
        h = x
        for i in range(work.layers):
            h = jax.nn.relu(h @ p[f"w{i}"].T + p[f"b{i}"])
        return h @ p["policy"].T, (h @ p["value"].T)[:, 0]

    return outputs
