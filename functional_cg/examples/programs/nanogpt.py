"""Trains a GPT from an ordinary module: ``python -m functional_cg.examples.programs.nanogpt``.

The module has the layout of nanoGPT: tied embeddings, dropout, ``(logits, loss)``. It learns from Python's own sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.examples import text


@dataclass(frozen=True)
class Config:
    block_size: int = 64
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 64
    dropout: float = 0.1


class CausalSelfAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj, self.resid_dropout = nn.Linear(config.n_embd, config.n_embd), nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (t.unflatten(2, (self.n_head, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout * self.training, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))


class MLP(nn.Sequential):
    def __init__(self, width: int, dropout: float) -> None:
        c_fc, c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        super().__init__(c_fc, nn.GELU(), c_proj, nn.Dropout(dropout))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd), CausalSelfAttention(config)
        self.ln_2, self.mlp = nn.LayerNorm(config.n_embd), MLP(config.n_embd, config.dropout)

    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, config.n_embd), nn.Embedding(config.block_size, config.n_embd)
        self.drop, self.h = nn.Dropout(config.dropout), nn.Sequential(*map(Block, [config] * config.n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(config.n_embd), nn.Linear(config.n_embd, 256, bias=False)
        self.lm_head.weight = self.wte.weight
        for matrix in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Any]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        logits = self.lm_head(self.ln_f(self.h(self.drop(x))))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(steps: int, device: str = "cpu") -> tuple[Any, Any, Any, fcg.TrainState]:
    torch.manual_seed(0)
    apply, params, buffers = fcg.from_module(GPT(Config()).to(device))
    decay = {name: value.dim() >= 2 for name, value in params.items()}
    adamw = fcg.optim.adamw(fcg.optim.warmup_cosine(5e-3, steps // 10, steps), weight_decay=0.1, mask=decay)
    optimizer = fcg.optim.chain(fcg.optim.clip_by_global_norm(1.0), adamw)
    state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=optimizer, key=fcg.random.key(1))

    @fcg.graph_step
    def train_step(state: Any, batch: text.Batch) -> tuple[Any, dict[str, Tensor]]:
        def loss_fn(params: Any) -> Any:
            key = fcg.random.fold_in(state.key, state.step)
            return apply(params, state.buffers, batch["x"], batch["y"], key=key)[0][1]

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    @fcg.graph_fn
    def evaluate(state: Any, batch: text.Batch) -> Any:
        return apply(state.params, state.buffers, batch["x"], batch["y"], train=False)[0][1]

    @fcg.graph_fn
    def write(state: Any, idx: Tensor, number: int) -> Tensor:
        (logits, _), _ = apply(state.params, state.buffers, idx, train=False)
        return fcg.random.categorical(fcg.random.fold_in(state.key, number), logits[:, -1])

    return train_step, evaluate, write, state


def train(steps: int, device: str = "cpu") -> tuple[float, float, str]:
    """Train; return held-out losses before and after, in nats per byte, and a sample."""
    training, held_out = text.split(text.read_bytes(text.text_files(), 2**20), block_size=64)
    fixed = text.validation_batches(held_out, batch_size=64, block_size=64, count=1)[0]
    train_step, evaluate, write, state = build(steps, device)
    before = float(evaluate(state, fixed))
    for _, batch in zip(range(steps), text.batches(training, 16, 64, seed=0), strict=False):
        state, _ = train_step(state, batch)
    sample = held_out[None, :64].long()
    for number in range(200):
        sample = torch.cat([sample, write(state, sample[:, -64:], number).cpu()[:, None]], dim=1)
    return before, float(evaluate(state, fixed)), bytes(sample[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    before, after, sample = train(steps=400)
    print(f"{sample}\nheld-out loss {before:.2f} at first, {after:.2f} in the end, in nats per byte")
