"""Packed sequences by calls that a trace can record: their lengths are asked for once, and may be known there.

torch's kernels read the lengths in memory of the host, which a fake tensor does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["PACKED"]


def _pack(padded: Tensor, lengths: Tensor, batch_first: Any) -> tuple[Tensor, Tensor]:
    """Return what ``torch._pack_padded_sequence`` does: the rows of all first steps, of all second ones, and so on."""
    rows = padded.transpose(0, 1) if batch_first else padded
    counts = lengths.tolist()
    if len(counts) != rows.shape[1] or not all(0 < count <= rows.shape[0] for count in counts):
        raise RuntimeError(
            f"lengths {counts} do not fit a batch of {rows.shape[1]} sequences of {rows.shape[0]} steps"
        )
    if counts != sorted(counts, reverse=True):
        raise RuntimeError("lengths must be sorted in decreasing order; `enforce_sorted=False` sorts them")
    sizes = [sum(step < count for count in counts) for step in range(counts[0])]
    return rows.flatten(0, 1).index_select(0, _places(sizes, rows)), torch.tensor(sizes, device="cpu")


def _unpack(
    data: Tensor, batch_sizes: Tensor, batch_first: Any, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Return what ``torch._pad_packed_sequence`` does: [time, batch, ...], or batch first, and the lengths."""
    sizes = batch_sizes.tolist()
    if 0 < total_length < len(sizes):
        raise RuntimeError(
            f"total_length={total_length} is less than the longest sequence, of {len(sizes)} steps"
        )
    steps, batch = max(total_length, len(sizes)), sizes[0]
    padded = data.new_full((steps * batch, *data.shape[1:]), padding_value)
    padded = padded.index_copy(0, _places(sizes, data), data).unflatten(0, (steps, batch))
    lengths = torch.tensor([sum(row < size for size in sizes) for row in range(batch)], device="cpu")
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _places(sizes: list[int], like: Tensor) -> Tensor:
    """Return where the rows of a packed sequence stand in [time * batch, ...]."""
    places = [step * sizes[0] + row for step, size in enumerate(sizes) for row in range(size)]
    return torch.tensor(places, device=like.device)


def _layers(run: Callable[..., Any], data: Tensor, *args: Any) -> Any:
    """Run the layers of an RNN; those on a packed sequence are given the sizes in memory of the host."""
    if len(args) > 2 and isinstance(args[2], (list, tuple)):  # (batch_sizes, state, weights, ...)
        sizes = args[0].tolist()
        with _disable_current_modes():
            held = torch.tensor(sizes)
        args = (held, *args[1:])
    return run(data, *args)


# torch's functions -> the same by calls.
PACKED: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch._pack_padded_sequence: _pack,
        torch._pad_packed_sequence: _unpack,
        torch.lstm: lambda *args: _layers(torch.lstm, *args),
        torch.gru: lambda *args: _layers(torch.gru, *args),
        torch.rnn_tanh: lambda *args: _layers(torch.rnn_tanh, *args),
        torch.rnn_relu: lambda *args: _layers(torch.rnn_relu, *args),
    }
)
