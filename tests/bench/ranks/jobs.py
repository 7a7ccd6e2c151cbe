"""What the bench of pipelines trains: a small transformer, or one like Llama, in bf16 with f32 masters.

Both have blocks of one layout, and a cut in front of the first block of each stage but the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_cg.pipelines.actions import Table
from functional_cg.pipelines.schedules import table_of

__all__ = ["SIZES", "Job", "Shape", "cross_entropy"]

_DRAWN = 2**20  # numbers that are drawn; larger leaves repeat them
_EPSILON, _BASE = 1e-5, 500_000.0  # of norms, and of rotary positions


@dataclass(frozen=True)
class Shape:
    """The shape of a model and its data.

    Attributes:
      llama: Whether blocks are like Llama's: RMSNorm, rotary positions, grouped queries, SwiGLU.
      layers: Blocks.
      width: Of the residual stream.
      wide: Of the hidden layer of a block.
      heads: Of attention.
      groups: Heads of keys and values.
      time: Tokens of a row.
      vocab: Rows of the embedding.
    """

    llama: bool
    layers: int
    width: int
    wide: int
    heads: int
    groups: int
    time: int
    vocab: int


SIZES: Mapping[str, Shape] = MappingProxyType(
    {
        "small": Shape(llama=False, layers=8, width=1024, wide=4096, heads=8, groups=8, time=256, vocab=4096),
        # 1.10 billion parameters
        "llama-1b": Shape(
            llama=True, layers=16, width=2048, wide=8192, heads=32, groups=8, time=2048, vocab=32000
        ),
        # 3.2 billion
        "llama-3b": Shape(
            llama=True, layers=28, width=3072, wide=8192, heads=24, groups=8, time=2048, vocab=32000
        ),
        "llama-tiny": Shape(llama=True, layers=4, width=32, wide=64, heads=4, groups=2, time=16, vocab=64),
    }
)


@dataclass(frozen=True)
class Job:
    """What is trained, and how it is divided.

    Attributes:
      shape: The model and its data.
      stages: Ranks of a pipeline.
      copies: Ranks that hold the same stages: each has its own data.
      rows: Of a micro-batch.
      microbatches: Of a step, on each of these ranks.
      schedule: Of our pipelines.
      per_rank: Stages of a rank.
    """

    shape: Shape
    stages: int
    copies: int
    rows: int
    microbatches: int
    schedule: str
    per_rank: int

    @property
    def table(self) -> Table:
        """What our pipelines do."""
        return table_of(self.schedule, self.stages, self.microbatches, self.stages * self.per_rank)

    def params(self) -> dict[str, Any]:
        """Return f32 parameters on the CPU, the same on each rank."""
        drawn = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0)) * 0.02

        def normal(*shape: int) -> Tensor:
            count = torch.Size(shape).numel()
            return drawn.repeat(-(-count // _DRAWN))[:count].view(shape)

        s = self.shape
        keys = s.width // s.heads * s.groups
        leaves: dict[str, tuple[int, ...]] = {"qkv": (s.width, s.width + 2 * keys), "out": (s.width, s.width)}
        leaves |= {"up": (s.width, s.wide), "down": (s.wide, s.width)}
        leaves |= {"gate": (s.width, s.wide)} if s.llama else {}
        params: dict[str, Any] = {"embedding": normal(s.vocab, s.width), "head": normal(s.width, s.vocab)}
        for i in range(s.layers):
            block = {name: normal(*shape) for name, shape in leaves.items()}
            norms = {name: torch.ones(s.width) for name in (("before", "between") if s.llama else ())}
            params[f"h{i}"] = block | norms
        return params | ({"norm": torch.ones(s.width)} if s.llama else {})

    def batch(self, device: torch.device, rank: int, ranks: int) -> dict[str, Tensor]:
        """Return a rank's part of the tokens and targets i64[rows, time] of all ranks."""
        s, rows = self.shape, self.rows * self.microbatches * self.copies
        tokens = torch.randint(s.vocab, (rows, s.time + 1), generator=torch.Generator().manual_seed(1))
        tokens = tokens.chunk(ranks)[rank].to(device)
        return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}

    def firsts(self, stages: int) -> list[int]:
        """Return the first block of each stage."""
        return [self.shape.layers * stage // stages for stage in range(stages)]

    def loss_fn(self, cut: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        """Return the loss, with a cut before the first block of each stage but the first."""
        firsts = self.firsts(self.stages * self.per_rank)[1:]

        def loss_fn(params: Any, batch: Any, *, key: Any = None) -> Tensor:
            x = self.embedded(params["embedding"], batch["x"])
            turns = self.turns(x.device)
            for i in range(self.shape.layers):
                x = self.block(params[f"h{i}"], cut(x) if i in firsts else x, turns)
            return cross_entropy(self.logits(params, x), batch["y"])

        return loss_fn

    @staticmethod
    def embedded(embedding: Tensor, tokens: Tensor) -> Tensor:
        return embedding[tokens].bfloat16()

    def turns(self, device: torch.device) -> Any:
        """Return cosines and sines bf16[time, width of a head] of rotary positions; None without them."""
        s = self.shape
        if not s.llama:
            return None
        half = s.width // s.heads // 2
        speeds = _BASE ** (-torch.arange(half, device=device) / half)
        angles = torch.arange(s.time, device=device).unsqueeze(1) * torch.cat((speeds, speeds))
        return angles.cos().bfloat16(), angles.sin().bfloat16()

    def block(self, params: Mapping[str, Any], x: Tensor, turns: Any) -> Tensor:
        """Compute a block: bf16[rows, time, width] to the same."""
        s = self.shape
        rows, time, width = x.shape
        each, keys = width // s.heads, width // s.heads * s.groups
        normed = self._normed(x, params.get("before"))
        q, k, v = (normed @ params["qkv"].to(x.dtype)).split((width, keys, keys), -1)
        q, k, v = (one.view(rows, time, -1, each).transpose(1, 2) for one in (q, k, v))
        if turns is not None:
            q, k = (one * turns[0] + _turned(one) * turns[1] for one in (q, k))
        k, v = (_for_each_head(one, s.heads // s.groups) for one in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attended.transpose(1, 2).reshape(rows, time, width)
        x = x + attended @ params["out"].to(x.dtype)
        normed = self._normed(x, params.get("between"))
        wide = normed @ params["up"].to(x.dtype)
        wide = F.silu(normed @ params["gate"].to(x.dtype)) * wide if s.llama else F.gelu(wide)
        out: Tensor = x + wide @ params["down"].to(x.dtype)
        return out

    def logits(self, params: Mapping[str, Any], x: Tensor) -> Tensor:
        normed = self._normed(x, params["norm"]) if self.shape.llama else x
        out: Tensor = normed @ params["head"].to(x.dtype)
        return out

    @staticmethod
    def _normed(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return F.layer_norm(x, x.shape[-1:])
        return F.rms_norm(x.float(), x.shape[-1:], weight.float(), _EPSILON).to(x.dtype)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def _for_each_head(x: Tensor, times: int) -> Tensor:
    rows, groups, time, each = x.shape
    if times == 1:
        return x
    return x.unsqueeze(2).expand(rows, groups, times, time, each).reshape(rows, groups * times, time, each)


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)
