"""What is timed: models as pure functions, in torch and in jax, with their initial values and batches.

All systems of a workload start from the same values, see the same batches and run the same arithmetic: parameters are
kept in fp32 and cast to the compute dtype where they are used; norms, softmax and losses are computed in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Batch", "Params", "Workload", "jax_loss", "names", "torch_loss", "workload"]

Params = dict[str, Tensor]
Batch = dict[str, Tensor]

_INITIAL_SEED, _BATCH_SEED = 1, 2


@dataclass(frozen=True)
class Workload:
    """A training step to be timed.

    Attributes:
      name: What the command line calls it.
      kind: ``mlp`` (mean squared error), ``gpt`` (next-token loss), or ``leaves`` (many leaves, one of them updated).
      layers: Number of layers or blocks.
      width: Features of a layer, or size of a leaf.
      batch: Examples.
      time: Tokens of an example.
      vocab: Number of tokens.
      leaves: Number of leaves of the state, for ``leaves``.
      bf16: Whether the arithmetic is in bf16 (with fp32 parameters and moments) instead of fp32.
      steps: Timed steps for each system, where the command line does not say.
      tolerance: How far the first losses of two systems may be apart, relatively.
    """

    name: str
    kind: Literal["mlp", "gpt", "leaves"]
    layers: int = 0
    width: int = 0
    batch: int = 0
    time: int = 0
    vocab: int = 0
    leaves: int = 0
    bf16: bool = False
    steps: int = 100
    tolerance: float = 1e-4
    learning_rate: float = 3e-4
    weight_decay: float = 0.1

    @property
    def heads(self) -> int:
        """Attention heads, of 64 features where that divides the width."""
        return max(1, self.width // 64)

    def describe(self) -> str:
        """The sizes, for a reader."""
        if self.kind == "leaves":
            return f"{self.leaves:,} leaves of f32[{self.width}], of which the step updates one"
        arithmetic = "bf16 compute, fp32 masters" if self.bf16 else "fp32"
        if self.kind == "mlp":
            return f"{self.layers} layers of {self.width}, batch {self.batch}, {arithmetic}, AdamW"
        return (
            f"{self.layers} blocks, {self.width} wide, {self.heads} heads, vocab {self.vocab:,}, "
            f"{self.batch}x{self.time} tokens, tied head, no dropout, {arithmetic}, AdamW"
        )

    def params(self) -> Params:
        """Initial values on the CPU, the same ones at each call."""
        generator = torch.Generator().manual_seed(_INITIAL_SEED)

        def normal(*shape: int, std: float) -> Tensor:
            return torch.randn(shape, generator=generator) * std

        if self.kind == "leaves":
            return {f"leaf{i:05d}": torch.full((self.width,), float(i % 7)) for i in range(self.leaves)}
        width, params = self.width, {}
        if self.kind == "mlp":
            for i in range(self.layers):
                params[f"w{i}"] = normal(width, width, std=(2 / width) ** 0.5)
                params[f"b{i}"] = torch.zeros(width)
            return params
        std, added = 0.02, 0.02 / math.sqrt(2 * self.layers)
        params["wte"], params["wpe"] = normal(self.vocab, width, std=std), normal(self.time, width, std=std)
        for i in range(self.layers):
            params |= {f"norm1_{i}": torch.ones(width), f"shift1_{i}": torch.zeros(width)}
            params[f"qkv_{i}"] = normal(3 * width, width, std=std)
            params[f"out_{i}"] = normal(width, width, std=added)
            params |= {f"norm2_{i}": torch.ones(width), f"shift2_{i}": torch.zeros(width)}
            params[f"up_{i}"] = normal(4 * width, width, std=std)
            params[f"down_{i}"] = normal(width, 4 * width, std=added)
        return params | {"norm": torch.ones(width), "shift": torch.zeros(width)}

    def batches(self, count: int) -> list[Batch]:
        """Batches on the CPU, the same ones at each call."""
        generator = torch.Generator().manual_seed(_BATCH_SEED)
        if self.kind == "leaves":
            return [{"x": torch.randn(self.width, generator=generator)} for _ in range(count)]
        if self.kind == "mlp":
            shape = (self.batch, self.width)
            return [
                {name: torch.randn(shape, generator=generator) for name in ("x", "y")} for _ in range(count)
            ]
        tokens = torch.randint(self.vocab, (count, self.batch, self.time + 1), generator=generator)
        return [{"x": row[:, :-1].contiguous(), "y": row[:, 1:].contiguous()} for row in tokens]


def _all() -> tuple[Workload, ...]:
    gpt = {"kind": "gpt", "bf16": True, "tolerance": 1e-2}
    return (
        Workload("mlp-tiny", "mlp", 4, 256, 256, bf16=True, steps=1000, tolerance=1e-2),
        Workload("gpt-nano", layers=4, width=256, batch=8, time=256, vocab=256, steps=300, **gpt),  # type: ignore[arg-type]
        Workload("gpt2-124m", layers=12, width=768, batch=16, time=1024, vocab=50304, steps=40, **gpt),  # type: ignore[arg-type]
        Workload("leaves-10-one", "leaves", width=4, leaves=10, steps=300),
        Workload("leaves-1000-one", "leaves", width=4, leaves=1000, steps=300),
        Workload("leaves-10000-one", "leaves", width=4, leaves=10_000, steps=100),
        Workload("mlp-4x64", "mlp", 4, 64, 32, steps=1000),
        Workload("mlp-4x256", "mlp", 4, 256, 256, steps=200),
    )


def names() -> tuple[str, ...]:
    """The workloads that the command line knows."""
    return tuple(one.name for one in _all())


def workload(name: str) -> Workload:
    """The workload of a name."""
    return next(one for one in _all() if one.name == name)


def torch_loss(work: Workload) -> Callable[[Params, Tensor, Tensor], Tensor]:
    """The loss ``f(params, x, y) -> f32[]``, for eager, compiled and captured systems alike."""
    dtype = torch.bfloat16 if work.bf16 else torch.float32
    layers, heads, width = work.layers, work.heads, work.width

    def mlp(p: Params, x: Tensor, y: Tensor) -> Tensor:
        h = x.to(dtype)
        for i in range(layers):
            h = F.linear(h if i == 0 else F.relu(h), p[f"w{i}"].to(dtype), p[f"b{i}"].to(dtype))
        return F.mse_loss(h.float(), y)

    def norm(h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(h, (width,), scale.to(dtype), shift.to(dtype))

    def gpt(p: Params, x: Tensor, y: Tensor) -> Tensor:
        rows, time = x.shape
        wte = p["wte"].to(dtype)
        h = F.embedding(x, wte) + p["wpe"].to(dtype)
        for i in range(layers):
            n = norm(h, p[f"norm1_{i}"], p[f"shift1_{i}"])
            qkv = F.linear(n, p[f"qkv_{i}"].to(dtype)).view(rows, time, 3, heads, width // heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + F.linear(mixed.transpose(1, 2).reshape(rows, time, width), p[f"out_{i}"].to(dtype))
            n = norm(h, p[f"norm2_{i}"], p[f"shift2_{i}"])
            n = F.gelu(F.linear(n, p[f"up_{i}"].to(dtype)), approximate="tanh")
            h = h + F.linear(n, p[f"down_{i}"].to(dtype))
        logits = F.linear(norm(h, p["norm"], p["shift"]), wte)
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    return mlp if work.kind == "mlp" else gpt


def jax_loss(work: Workload, jax: Any, optax: Any, attention: str | None) -> Callable[..., Any]:
    """The same loss in jax: ``f(params, x, y)``.

    Args:
      work: The workload.
      jax: The module.
      optax: The module.
      attention: ``implementation`` of ``jax.nn.dot_product_attention``.
    """
    jnp = jax.numpy
    dtype = jnp.bfloat16 if work.bf16 else jnp.float32
    layers, heads, width = work.layers, work.heads, work.width

    def mlp(p: Any, x: Any, y: Any) -> Any:
        h = x.astype(dtype)
        for i in range(layers):
            h = h if i == 0 else jax.nn.relu(h)
            h = h @ p[f"w{i}"].astype(dtype).T + p[f"b{i}"].astype(dtype)
        return jnp.mean((h.astype(jnp.float32) - y) ** 2)

    def norm(h: Any, scale: Any, shift: Any) -> Any:
        wide = h.astype(jnp.float32)
        mean = wide.mean(-1, keepdims=True)
        spread = jax.lax.rsqrt(((wide - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
        return ((wide - mean) * spread * scale.astype(dtype) + shift.astype(dtype)).astype(dtype)

    def gpt(p: Any, x: Any, y: Any) -> Any:
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
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return mlp if work.kind == "mlp" else gpt
