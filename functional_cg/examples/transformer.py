"""A byte-level GPT as two pure functions: ``init`` draws parameters, ``apply`` computes logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import functional_cg as fcg

__all__ = ["GPT", "Params"]

Params = dict[str, Any]


@dataclass(frozen=True)
class GPT:
    """A decoder-only transformer: pre-norm, learned positions, and a head tied to the embedding.

    The object holds sizes only; the parameters are a dict that is passed to each call. Matrices are [out, in], as in
    ``torch.nn.Linear``. Only the norms have biases.

    Attributes:
      layers: Number of blocks.
      width: Size of the residual stream, a multiple of ``heads``.
      heads: Attention heads of each block.
      block_size: Longest context, in bytes.
      dropout: Probability, in [0, 1), on the embeddings and on the output of each layer.
      vocab: Number of tokens.

    Example:
      >>> import torch
      >>> import functional_cg as fcg
      >>> from functional_cg.examples.transformer import GPT
      >>> model = GPT(layers=1, width=16, heads=2, block_size=8)
      >>> params = model.init(fcg.random.key(0))
      >>> model.apply(params, torch.zeros(3, 8, dtype=torch.int64)).shape
      torch.Size([3, 8, 256])
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    block_size: int = 128
    dropout: float = 0.1
    vocab: int = 256

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")

    def init(self, key: Tensor) -> Params:
        """Draw initial parameters on the key's device."""
        wte, wpe, *blocks = fcg.random.split(key, 2 + self.layers)
        return {
            "wte": fcg.random.normal(wte, (self.vocab, self.width), std=0.02),
            "wpe": fcg.random.normal(wpe, (self.block_size, self.width), std=0.02),
            "blocks": [self._init_block(block) for block in blocks],
            "norm": _init_norm(self.width, key.device),
        }

    def _init_block(self, key: Tensor) -> Params:
        width = self.width
        qkv, out, up, down = fcg.random.split(key, 4)
        # The residual stream sums 2 * layers outputs: these start smaller, so that the sum does not grow.
        std, added = width**-0.5, (2 * width * self.layers) ** -0.5
        return {
            "norm1": _init_norm(width, key.device),
            "qkv": fcg.random.normal(qkv, (3 * width, width), std=std),
            "out": fcg.random.normal(out, (width, width), std=added),
            "norm2": _init_norm(width, key.device),
            "up": fcg.random.normal(up, (4 * width, width), std=std),
            "down": fcg.random.normal(down, (width, 4 * width), std=added / 2),
        }

    def apply(self, params: Params, tokens: Tensor, key: Tensor | None = None) -> Tensor:
        """Compute next-byte logits at each position.

        Args:
          params: Parameters from ``init``.
          tokens: i64[batch, time], with time at most ``block_size``.
          key: i64[2] for dropout; None for evaluation.
        Returns:
          f32[batch, time, vocab].
        """
        x = F.embedding(tokens, params["wte"]) + params["wpe"][: tokens.shape[1]]
        x = self._dropout(x, key, 0)
        for i, block in enumerate(params["blocks"]):
            x = x + self._dropout(self._attention(block, _norm(block["norm1"], x)), key, 2 * i + 1)
            x = x + self._dropout(_mlp(block, _norm(block["norm2"], x)), key, 2 * i + 2)
        return F.linear(_norm(params["norm"], x), params["wte"])

    def _attention(self, block: Params, x: Tensor) -> Tensor:
        q, k, v = rearrange(
            F.linear(x, block["qkv"]), "b t (three h d) -> three b h t d", three=3, h=self.heads
        )
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)
        return F.linear(rearrange(heads, "b h t d -> b t (h d)"), block["out"])

    def _dropout(self, x: Tensor, key: Tensor | None, place: int) -> Tensor:
        return x if key is None else fcg.random.dropout(key, x, self.dropout, stream=place)


def _mlp(block: Params, x: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, block["up"])), block["down"])


def _norm(params: Params, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], params["weight"], params["bias"])


def _init_norm(width: int, device: torch.device) -> Params:
    return {"weight": torch.ones(width, device=device), "bias": torch.zeros(width, device=device)}
