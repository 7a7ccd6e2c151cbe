"""The example GPT as an ordinary ``nn.Module`` in the usual layout, and its adapter for a captured step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import functional_cg as fcg

from .transformer import Params

__all__ = ["GPTModule", "PureGPT"]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b t (three h d) -> three b h t d", three=3, h=self.heads)
        p = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(rearrange(heads, "b h t d -> b t (h d)"))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class GPTModule(nn.Module):
    """A decoder-only transformer over bytes; the head is tied to the embedding."""

    def __init__(
        self, layers: int, width: int, heads: int, block_size: int, dropout: float, vocab: int = 256
    ):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.wte(tokens) + self.wpe(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class PureGPT:
    """Adapts a module to the two functions that the training step uses: ``init`` and ``apply``.

    Args:
      module: A module without buffers; it is not modified.

    Example:
      >>> import torch
      >>> import functional_cg as fcg
      >>> from functional_cg.examples.module_gpt import GPTModule, PureGPT
      >>> model = PureGPT(GPTModule(layers=1, width=16, heads=2, block_size=8, dropout=0.1))
      >>> params = model.init(fcg.random.key(0))
      >>> model.apply(params, torch.zeros(3, 8, dtype=torch.int64)).shape
      torch.Size([3, 8, 256])
    """

    def __init__(self, module: nn.Module) -> None:
        self._apply, self._params, buffers = fcg.from_module(module)
        assert not buffers, "a module with buffers returns new ones, which belong into the state"

    def init(self, key: Tensor) -> Params:
        """Draw the matrices on the key's device; norms keep their scales and shifts."""
        drawn = {}
        for i, (name, value) in enumerate(self._params.items()):
            matrix = value.ndim >= 2
            std = 0.02 if name.startswith("w") else value.shape[-1] ** -0.5
            place = fcg.random.fold_in(key, i)
            drawn[name] = (
                fcg.random.normal(place, tuple(value.shape), std=std) if matrix else value.to(key.device)
            )
        return drawn

    def apply(self, params: Params, tokens: Tensor, key: Tensor | None = None) -> Tensor:
        """Compute next-byte logits at each position, f32[batch, time, vocab]; without a key, no dropout."""
        logits, _ = self._apply(params, {}, tokens, key=key, train=key is not None)
        return logits  # type: ignore[no-any-return]
