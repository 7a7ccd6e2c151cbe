"""One GPT in the spellings that people use: of casts, norms, attention's products, and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "LOSSES", "SPELLINGS", "Size"]

_STD = 0.02
_HEAD = 64  # features
_CAP, _SMOOTHING, _Z, _IGNORED = 30.0, 0.1, 1e-4, -100
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    """Size of a GPT and its batch."""

    layers: int
    width: int
    vocab: int
    batch: int
    time: int


def _cast_last(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def _cast_first(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), y.view(-1))


def _by_log_softmax(logits: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits.float(), -1).view(-1, logits.shape[-1]), y.view(-1))


def _by_logsumexp(logits: Tensor, y: Tensor) -> Tensor:
    logits = logits.float()
    return (logits.logsumexp(-1) - logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)).mean()


def _masked(logits: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="none")
    mask = (y.flatten() % 7 != 0).float()
    return (losses * mask).sum() / mask.sum()


def _ignored(logits: Tensor, y: Tensor) -> Tensor:
    return _cast_first(logits, torch.where(y % 7 == 0, _IGNORED, y))


def _smooth(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), label_smoothing=_SMOOTHING)


def _with_z_loss(logits: Tensor, y: Tensor) -> Tensor:
    logits = logits.float().flatten(0, 1)
    return F.cross_entropy(logits, y.flatten()) + _Z * logits.logsumexp(-1).square().mean()


def _capped(logits: Tensor, y: Tensor) -> Tensor:
    return _cast_last(_CAP * torch.tanh(logits / _CAP), y)


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "plain": _cast_last, "cast-first": _cast_first, "log-softmax": _by_log_softmax, "logsumexp": _by_logsumexp,
        "masked": _masked, "ignored": _ignored, "smooth": _smooth, "z-loss": _with_z_loss, "softcap": _capped,
    }
)  # fmt: skip

# Loss, norm, products of attention.
SPELLINGS: Mapping[str, tuple[str, str, int]] = MappingProxyType(
    {
        "plain": ("plain", "module", 1),
        "cast-first": ("cast-first", "fp32", 1),
        "log-softmax": ("log-softmax", "module", 3),
        "logsumexp": ("logsumexp", "by hand", 1),
        "masked": ("masked", "module", 1),
        "ignored": ("ignored", "module", 3),
        "smooth": ("smooth", "module", 1),
        "z-loss": ("z-loss", "fp32", 1),
        "softcap": ("softcap", "module", 1),
        "odd-vocab": ("cast-first", "module", 1),
    }
)


class _Norm(nn.LayerNorm):
    """A layer norm in one of its spellings."""

    def __init__(self, width: int, spelling: str) -> None:
        super().__init__(width)
        self._spelling = spelling

    def forward(self, x: Tensor) -> Tensor:
        if self._spelling == "module":
            return super().forward(x)
        if self._spelling == "fp32":
            return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float())
        centred = x.float() - x.float().mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class _Block(nn.Module):
    def __init__(self, width: int, norm: str, products: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _Norm(width, norm), _Norm(width, norm)
        self.inputs = nn.ModuleList(
            nn.Linear(width, 3 * width // products, bias=False) for _ in range(products)
        )
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        seen = self.norm1(x)
        parts = [linear(seen) for linear in self.inputs]
        heads = parts if len(parts) == 3 else parts[0].split(width, -1)
        q, k, v = (part.view(batch, time, max(1, width // _HEAD), -1).transpose(1, 2) for part in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        grown: Tensor = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + grown


class GPT(nn.Module):
    """A GPT that returns its loss; see :data:`SPELLINGS` for how it is spelled.

    Args:
      size: Its size.
      spelling: Name of the spelling.
    """

    def __init__(self, size: Size, spelling: str) -> None:
        super().__init__()
        loss, norm, products = SPELLINGS[spelling]
        self._loss = LOSSES[loss]
        self.wte, self.wpe = nn.Embedding(size.vocab, size.width), nn.Embedding(size.time, size.width)
        self.blocks = nn.ModuleList(_Block(size.width, norm, products) for _ in range(size.layers))
        self.norm = _Norm(size.width, norm)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=_STD)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        loss: Tensor = self._loss(F.linear(self.norm(hidden), self.wte.weight), y)
        return loss
