"""An independent version of the example GPT: an ordinary module, trained by ``torch.optim``.

An independent judge: it imports nothing of the package, spells attention out instead of calling the fused op, ties the
head as modules do, and computes the learning rate by a formula of its own. It is given initial weights and batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention with an explicit mask and softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        future = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class JudgeGPT(nn.Module):
    """A byte-level GPT without dropout."""

    def __init__(self, *, layers: int, width: int, heads: int, block_size: int, vocab: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(
    weights: Mapping[str, Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    sizes: Mapping[str, int],
    steps: int,
    warmup: int,
    peak_lr: float,
    end_lr: float,
    device: torch.device,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train from the given weights; the loss of each step, and the weights after the last one."""
    model = JudgeGPT(**sizes).to(device)
    model.load_state_dict({**weights, "head.weight": weights["wte.weight"]})
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_lr, betas=(0.9, 0.95), eps=1e-8, fused=False, foreach=False)

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        turn = math.cos(math.pi * min(step - warmup, steps - warmup) / (steps - warmup))
        return (end_lr + (peak_lr - end_lr) * (1 + turn) / 2) / peak_lr

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    losses = []
    for x, y in batches:
        logits = model(x.to(device))
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, {
        name: value.detach().clone() for name, value in model.state_dict().items() if name != "head.weight"
    }
