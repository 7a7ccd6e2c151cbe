"""Models that no library here brings: a diffusion model's U-Net, and torch's own transformer layers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Encoder", "UNet"]

_HEAD = 64  # features
_GROUPS = 32
_FREQUENCIES = 64


class Encoder(nn.Module):
    """A language model of ``nn.TransformerEncoder`` as it comes, dropout included; returns its loss."""

    def __init__(self, vocab: int, time: int, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, width // _HEAD, 4 * width, batch_first=True, norm_first=True
        )
        self.embedding = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(0.02 * torch.randn(time, width))
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(self.body(self.embedding(x) + self.positions))
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


class _Block(nn.Module):
    """Two convolutions with group norms, between which the embedding of the time is added."""

    def __init__(self, before: int, after: int, embedded: int, *, attends: bool) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(_GROUPS, before), nn.GroupNorm(_GROUPS, after)
        self.into = nn.Conv2d(before, after, 3, padding=1)
        self.out = nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(embedded, after)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1)
        self.attention = _Attention(after) if attends else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.into(F.silu(self.first(x))) + self.time(F.silu(time))[:, :, None, None]
        y: Tensor = self.attention(self.skip(x) + self.out(F.silu(self.second(h))))
        return y


class _Attention(nn.Module):
    """Attention over the places of a picture."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(_GROUPS, channels)
        self.products, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        products = self.products(self.norm(x))
        heads = products.view(batch, 3, channels // _HEAD, _HEAD, height * width).transpose(-1, -2)
        mixed = F.scaled_dot_product_attention(*heads.unbind(1))
        y: Tensor = x + self.out(mixed.transpose(-1, -2).reshape(batch, channels, height, width))
        return y


class UNet(nn.Module):
    """Predicts the noise in a picture. Source: Ho, Jain, Abbeel 2020, "Denoising Diffusion Probabilistic Models"."""

    def __init__(self, channels: int, multiples: tuple[int, ...], attends_at: int) -> None:
        super().__init__()
        embedded = 4 * channels
        self.time = nn.Sequential(
            nn.Linear(2 * _FREQUENCIES, embedded), nn.SiLU(), nn.Linear(embedded, embedded)
        )
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down, self.smaller = nn.ModuleList(), nn.ModuleList()
        self.up, self.larger = nn.ModuleList(), nn.ModuleList()
        widths, wide = [channels], channels
        for level, multiple in enumerate(multiples):
            attends = level == attends_at
            for _ in range(2):
                self.down.append(_Block(wide, channels * multiple, embedded, attends=attends))
                wide = channels * multiple
                widths.append(wide)
            if level + 1 < len(multiples):
                self.smaller.append(nn.Conv2d(wide, wide, 3, stride=2, padding=1))
                widths.append(wide)
        self.middle = nn.ModuleList(_Block(wide, wide, embedded, attends=one) for one in (True, False))
        for level, multiple in reversed(list(enumerate(multiples))):
            for _ in range(3):
                after = channels * multiple
                self.up.append(_Block(wide + widths.pop(), after, embedded, attends=level == attends_at))
                wide = after
            if level:
                self.larger.append(nn.Conv2d(wide, wide, 3, padding=1))
        self.last = nn.Sequential(nn.GroupNorm(_GROUPS, wide), nn.SiLU(), nn.Conv2d(wide, 3, 3, padding=1))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        rates = torch.exp(-math.log(1e4) * torch.arange(_FREQUENCIES, device=x.device) / _FREQUENCIES)
        angles = time[:, None].float() * rates
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        kept = [self.first(x)]
        kept += self._going_down(kept[0], embedded)
        h = kept[-1]
        for block in self.middle:
            h = block(h, embedded)
        larger = iter(self.larger)
        for number, block in enumerate(self.up):
            h = block(torch.cat([h, kept.pop()], 1), embedded)
            if number % 3 == 2 and kept:
                h = next(larger)(F.interpolate(h, scale_factor=2.0))
        y: Tensor = self.last(h)
        return y

    def _going_down(self, h: Tensor, embedded: Tensor) -> Iterator[Tensor]:
        smaller = iter(self.smaller)
        for number, block in enumerate(self.down):
            h = block(h, embedded)
            yield h
            if number % 2 == 1 and (layer := next(smaller, None)) is not None:
                h = layer(h)
                yield h
