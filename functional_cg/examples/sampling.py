"""Generates text from a byte-level model: one captured call per byte, on a window of fixed shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import functional_cg as fcg

__all__ = ["generate", "make_sampler"]

Sampler = fcg.GraphFn[..., Tensor]


def make_sampler(apply: Callable[..., Tensor], lowering: Any = "auto") -> Sampler:
    """Make ``sample(params, window, place, key)``, which draws the next byte, i64[] in [0, 256).

    Args:
      apply: ``apply(params, i64[1, time]) -> f32[1, time, 256]``.
      lowering: As for ``graph_fn``.
    """

    @fcg.graph_fn(lowering=lowering)
    def sample(params: Any, window: Tensor, place: Tensor, key: Tensor) -> Tensor:
        logits = apply(params, window[None])[0].index_select(0, place[None])[0]
        return fcg.random.categorical(key, logits)

    return sample


def generate(sample: Sampler, params: Any, prompt: bytes, count: int, block_size: int, seed: int = 0) -> str:
    """Continue a prompt by ``count`` bytes; the window holds the last ``block_size`` bytes.

    Bytes that are not valid UTF-8 become replacement characters.
    """
    text, key = bytearray(prompt), fcg.random.key(seed)
    for i in range(count):
        recent = text[-block_size:]
        window = torch.zeros(block_size, dtype=torch.int64)  # positions after the last byte are ignored
        window[: len(recent)] = torch.tensor(list(recent))
        text.append(int(sample(params, window, len(recent) - 1, fcg.random.fold_in(key, i))))
    return bytes(text).decode(errors="replace")
