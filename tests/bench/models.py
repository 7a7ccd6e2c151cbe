"""Models of the sharded bench as ordinary modules, for DDP, FSDP2 and ``from_module``.

Weights are cast to bf16 where they are used. Under FSDP2's mixed precision and under ``zero(param_dtype=...)`` they
already are bf16, and the cast does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

__all__ = ["Config", "LanguageModel", "config", "names"]

_COMPUTE = torch.bfloat16


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder-only language model and of the batch on one GPU.

    Attributes:
      name: Name on the command line.
      kind: ``gpt`` (layer norm, learned positions, gelu, tied head) or ``llama`` (RMS norm, rotary positions, SwiGLU,
        grouped keys and values, a head of its own).
      hidden: Width of the feed-forward layer.
      batch: Sequences on each GPU.
      time: Tokens of a sequence.
    """

    name: str
    kind: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    batch: int
    time: int


def _all() -> tuple[Config, ...]:
    return (
        Config("gpt2-124m", "gpt", 12, 768, 12, 12, 3072, 50304, 16, 1024),
        Config("llama-1b", "llama", 16, 2048, 32, 8, 8192, 32768, 2, 2048),
        Config("tiny", "llama", 2, 64, 4, 2, 128, 256, 2, 32),
    )


def names() -> tuple[str, ...]:
    """List the models for the command line."""
    return tuple(one.name for one in _all())


def config(name: str) -> Config:
    """Look up a model's configuration by name."""
    return next(one for one in _all() if one.name == name)


class _Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(_COMPUTE))


class _Norm(nn.Module):
    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if kind == "gpt" else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(_COMPUTE)
        if self.bias is None:
            return F.rms_norm(x, list(x.shape[-1:]), weight, 1e-5)
        return F.layer_norm(x, list(x.shape[-1:]), weight, self.bias.to(_COMPUTE))


class _Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.kind = c.heads, c.kv_heads, c.kind
        size = c.width // c.heads
        self.norm1, self.norm2 = _Norm(c.width, c.kind), _Norm(c.width, c.kind)
        self.qkv = _Linear(c.width, (c.heads + 2 * c.kv_heads) * size)
        self.out = _Linear(c.width, c.width)
        self.up = _Linear(c.width, c.hidden)
        self.gate = _Linear(c.width, c.hidden) if c.kind == "llama" else None
        self.down = _Linear(c.hidden, c.width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.out(self._attention(self.norm1(x), angles))
        h = self.norm2(x)
        if self.gate is None:
            added: Tensor = self.down(F.gelu(self.up(h), approximate="tanh"))
        else:
            added = self.down(F.silu(self.gate(h)) * self.up(h))
        return x + added

    def _attention(self, x: Tensor, angles: Tensor) -> Tensor:
        heads = rearrange(self.qkv(x), "b t (h d) -> b h t d", h=self.heads + 2 * self.kv_heads)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.kind == "llama":
            q, k = _rotated(q, angles), _rotated(k, angles)
        grouped = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return rearrange(out, "b h t d -> b t (h d)")


class LanguageModel(nn.Module):
    """``model(tokens, targets) -> f32[]``, the mean cross-entropy of the next token."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(c.vocab, c.width) * 0.02)
        self.positions = nn.Parameter(torch.randn(c.time, c.width) * 0.02) if c.kind == "gpt" else None
        self.blocks = nn.ModuleList([_Block(c) for _ in range(c.layers)])
        self.norm = _Norm(c.width, c.kind)
        self.head = _Linear(c.width, c.vocab) if c.kind == "llama" else None
        size = c.width // c.heads
        steps = 10_000.0 ** -(torch.arange(0, size, 2) / size)
        self.register_buffer("angles", torch.outer(torch.arange(c.time), steps), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embed.to(_COMPUTE))
        if self.positions is not None:
            x = x + self.positions.to(_COMPUTE)
        for block in self.blocks:
            x = block(x, self.angles)
        x = self.norm(x)
        logits = F.linear(x, self.embed.to(_COMPUTE)) if self.head is None else self.head(x)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
