"""Small modules as users write them, and a training step for any of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import functional_cg as fcg


class SelfAttention(nn.Module):
    """Causal attention of one fused projection; `flash=False` writes it out with a mask that is a buffer."""

    def __init__(self, width: int, heads: int, block: int, dropout: float, *, flash: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.heads, self.dropout, self.flash = heads, dropout, flash
        if not flash:
            self.register_buffer("bias", torch.tril(torch.ones(block, block)).view(1, 1, block, block))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(c, dim=2)
        )
        if self.flash:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
            )
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(scores, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, block: int, dropout: float, *, flash: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = SelfAttention(width, heads, block, dropout, flash=flash)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A small GPT in the layout of nanoGPT: tied embedding and head, (logits, loss) if there are targets."""

    def __init__(self, dropout: float = 0.0, *, flash: bool = True, block: int = 8, width: int = 16) -> None:
        super().__init__()
        self.block = block
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(11, width),
                "wpe": nn.Embedding(block, width),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(Block(width, 2, block, dropout, flash=flash) for _ in range(2)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, 11, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        assert idx.size(1) <= self.block
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Attention(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, dropout=p, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


class Fused(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.proj, self.p = nn.Linear(16, 16), p

    def forward(self, x: Tensor) -> Tensor:
        q = self.proj(x)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=self.p if self.training else 0.0)


class Tied(nn.Module):
    """Embedding and head share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.wte((x > 0).long().sum(-1)))


def conv_net(p: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout2d(p),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )


def encoder_layer(p: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=p, batch_first=True)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 4))


def dropouts() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 16),
        nn.Dropout(0.2, inplace=True),
        nn.Dropout1d(0.2),
        nn.AlphaDropout(0.2),
        nn.FeatureAlphaDropout(0.2),
    )


class RunningScale(nn.Module):
    """Divides by a running deviation that it has just updated."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("std", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        with torch.no_grad():
            self.std.mul_(0.5).add_(h.std(0), alpha=0.5)
        return self.head(h / self.std)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.inner(x) * self.count


class Pruned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)
        self.register_buffer("mask", torch.ones(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mask.copy_(self.inner.weight.abs() > 0.1)
        return F.linear(x, self.inner.weight * self.mask, self.inner.bias)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wpe = nn.Embedding(8, 16)
        self.register_buffer("pos", torch.zeros(8, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.pos.copy_(torch.arange(8).flip(0))
        return self.wpe(self.pos) * x


class Remembering(nn.Module):
    """Attends to rows that it writes first, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("bank", torch.zeros(2, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        z, rows = self.inner(x), self.bank[1]
        with torch.no_grad():
            rows.copy_(z)
        return z @ rows.t()


class NormalizedTwice(nn.Module):
    """Batch norm that is updated by the inputs and then used as it is in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x)
        self.norm.eval()
        y = self.norm(self.inner(x))
        self.norm.train()
        return y


class Target(nn.Module):
    """A frozen twin that follows the trained layer, as in momentum contrast."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.twin = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, its in zip(self.inner.parameters(), self.twin.parameters(), strict=True):
                its.lerp_(mine, 0.1)
        return self.twin(self.inner(x))


def rows(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


# name -> (module, input); those of PLAIN draw nothing.
PLAIN: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, rows(8, 16)),
    "conv and batch norm": (conv_net, rows(4, 3, 8, 8)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), rows(8, 16)),
    # On a GPU it is one op, whose name begins like that of a fused optimizer.
    "rms norm": (lambda: nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16)), rows(8, 16)),
    "tied embedding": (Tied, rows(4, 6, 16)),
    "multihead attention": (Attention, rows(4, 6, 16)),
    "encoder layer": (encoder_layer, rows(4, 6, 16)),
    "fused attention": (Fused, rows(4, 6, 16)),
    "lstm": (lambda: nn.LSTM(16, 8, 2), rows(4, 6, 16)),
    "gru": (lambda: nn.GRU(16, 8, 2, batch_first=True), rows(4, 6, 16)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(16, 4)), rows(8, 16)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(16, 4)), rows(8, 16)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(16, 4)), rows(8, 16)),
}
DRAWING: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "conv and dropout2d": (lambda: conv_net(0.3), rows(4, 3, 8, 8)),
    "dropouts": (dropouts, rows(4, 6, 16)),
    "multihead attention, dropout": (lambda: Attention(0.1), rows(4, 6, 16)),
    "encoder layer, dropout": (lambda: encoder_layer(0.1), rows(4, 6, 16)),
    "fused attention, dropout": (lambda: Fused(0.1), rows(4, 6, 16)),
    "lstm, dropout": (lambda: nn.LSTM(16, 8, 2, dropout=0.3, bidirectional=True), rows(4, 6, 16)),
    "gru, dropout": (lambda: nn.GRU(16, 8, 2, dropout=0.3), rows(4, 6, 16)),
}

# They write a buffer and use it in the same forward.
WRITING: dict[str, Callable[[], nn.Module]] = {
    cls.__name__: cls
    for cls in (RunningScale, Counting, Pruned, Positions, Remembering, NormalizedTwice, Target)
}


def mean_square(out: Any, batch: Tensor) -> Tensor:
    """A loss for the modules above; RNNs return pairs."""
    return ((out[0] if isinstance(out, tuple) else out) ** 2).mean()


def state_of(module: nn.Module, optimizer: Any = None) -> tuple[Any, Any]:
    """(apply, state) of a module, on the module's device."""
    apply, params, buffers = fcg.from_module(module)
    optimizer = optimizer or fcg.optim.sgd(0.1)
    key = fcg.random.key(0)
    return apply, fcg.TrainState.create(params=params, buffers=buffers, optimizer=optimizer, key=key)


def tokens(batch: int = 2, length: int = 8) -> dict[str, Tensor]:
    """A batch for `GPT`."""
    ids = torch.randint(0, 11, (batch, length + 1))
    return {"idx": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def train_step(
    apply: Any,
    loss_of: Callable[[Any, Any], Tensor] = mean_square,
    inputs: Callable[[Any], dict[str, Any]] | None = None,
    **options: Any,
) -> Any:
    """A step over a module: `inputs` says how the batch is passed to the forward."""

    def step(state: Any, batch: Any) -> Any:
        key = fcg.random.fold_in(state.key, state.step)

        def loss_fn(params: Any) -> Any:
            args, kwargs = ((batch,), {}) if inputs is None else ((), inputs(batch))
            out, new_buffers = apply(params, state.buffers, *args, key=key, **kwargs)
            return loss_of(out, batch), new_buffers

        (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, buffers=buffers), {"loss": loss}

    return fcg.graph_step(**options)(step)
