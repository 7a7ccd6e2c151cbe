"""The CTC loss, on the device from end to end: lengths may be inputs of a step.

Torch's own kernels read the lengths on the host. Here each recursion over time is one op, ``fcg::ctc_scan``, and all
else is ATen. Values and gradients are those of ``torch.nn.functional.ctc_loss`` up to rounding.

Source: Graves et al., "Connectionist temporal classification" (2006), equations 6 to 16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..once import knows_one_derivative

__all__ = ["ctc_loss"]

_REDUCTIONS = ("none", "mean", "sum")
_MINUS_INFINITY = -math.inf


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,  # noqa: FBT001, FBT002 - torch's signature
) -> Tensor:
    """Compute the CTC loss with the arguments and the result of ``torch.nn.functional.ctc_loss``.

    Args:
      log_probs: f32 or f64[T, N, C] or [T, C], from ``log_softmax``.
      targets: i64[N, S], i64[sum of target lengths], or i64[S] for a single example.
      input_lengths: N numbers up to T, on any device.
      target_lengths: N numbers up to S, likewise.
      blank: Number of the blank label.
      reduction: ``"mean"`` (of the losses, each divided by its target length), ``"sum"`` or ``"none"``.
      zero_infinity: Whether to replace infinite losses, and their gradients, with zero.
    Returns:
      A number; with ``reduction="none"`` one per example.
    Raises:
      ValueError: If a length on the host is out of range, or the numbers of lengths differ.
    """
    if isinstance(reduction, int):
        reduction = _REDUCTIONS[reduction]
    if reduction not in _REDUCTIONS:
        raise ValueError(f"ctc_loss: expected `reduction` to be one of {_REDUCTIONS}, got {reduction!r}")
    if torch.is_autocast_enabled(log_probs.device.type) and log_probs.dtype != torch.float64:
        log_probs = log_probs.float()
    batched = log_probs.dim() == 3
    if not batched:
        log_probs = log_probs.unsqueeze(1)
        targets = targets.unsqueeze(0) if targets.dim() == 1 else targets
    times, examples, _ = log_probs.shape
    longest = _longest(target_lengths, targets)
    inputs = _lengths("input_lengths", input_lengths, examples, times, log_probs.device)
    outputs = _lengths("target_lengths", target_lengths, examples, longest, log_probs.device)
    labels = _padded(targets.to(log_probs.device, torch.int64), outputs, longest)
    losses = _Losses.apply(log_probs, labels, inputs, outputs, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == math.inf, 0.0, losses)
    if reduction == "mean":
        return (losses / outputs.clamp(min=1)).mean()  # type: ignore[no-any-return]
    if reduction == "sum":
        return losses.sum()  # type: ignore[no-any-return]
    return losses if batched else losses[0]  # type: ignore[no-any-return]


def _longest(lengths: Tensor | Sequence[int], targets: Tensor) -> int:
    """Return the number of labels to provide for: of concatenated targets, what is known."""
    if targets.dim() == 2:
        return targets.shape[1]
    return targets.numel() if isinstance(lengths, Tensor) else max(lengths, default=0)


def _lengths(
    name: str, lengths: Tensor | Sequence[int], count: int, longest: int, device: torch.device
) -> Tensor:
    if not isinstance(lengths, Tensor):
        wrong = [length for length in lengths if not 0 <= length <= longest]
        if wrong:
            raise ValueError(f"ctc_loss: expected `{name}` from 0 to {longest}, got {wrong[0]}")
        lengths = torch.tensor(list(lengths), dtype=torch.int64, device=device)
    lengths = lengths.reshape(-1)
    if len(lengths) != count:
        raise ValueError(f"ctc_loss: expected {count} `{name}`, one per example, got {len(lengths)}")
    return lengths.to(device, torch.int64)


def _padded(targets: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """Return targets as i64[N, longest]; what lies behind the end of one is never used."""
    if targets.dim() == 2:
        return targets
    if not targets.numel():
        return targets.new_zeros((len(lengths), longest))
    starts = lengths.cumsum(0) - lengths
    places = starts[:, None] + torch.arange(longest, device=targets.device)
    return targets[places.clamp(max=targets.numel() - 1)]


class _Losses(torch.autograd.Function):
    """Negative log-likelihood of each example."""

    @staticmethod
    def forward(
        ctx: Any,
        log_probs: Tensor,
        labels: Tensor,
        inputs: Tensor,
        outputs: Tensor,
        blank: int,
        zero_infinity: bool,  # noqa: FBT001
    ) -> Tensor:
        times, examples, _ = log_probs.shape
        states = 2 * labels.shape[1] + 1
        # Labels with blanks between them, and where a path may pass over a blank.
        path = labels.new_full((examples, states), blank)
        path[:, 1::2] = labels
        skip = torch.zeros_like(path, dtype=torch.bool)
        skip[:, 2:] = (path[:, 2:] != blank) & (path[:, 2:] != path[:, :-2])
        values = log_probs.gather(2, path.expand(times, -1, -1)).contiguous()
        zeros = torch.zeros_like(outputs)
        alpha = torch.ops.fcg.ctc_scan(values, skip, zeros, zeros)
        last = alpha.gather(0, (inputs - 1).clamp(min=0)[None, :, None].expand(1, -1, states))[0]
        at_end = last.gather(1, 2 * outputs[:, None])[:, 0]
        before = last.gather(1, (2 * outputs - 1).clamp(min=0)[:, None])[:, 0]
        before = torch.where(outputs > 0, before, _MINUS_INFINITY)
        losses = -torch.logaddexp(at_end, before)
        losses = torch.where(inputs > 0, losses, torch.where(outputs > 0, math.inf, 0.0).to(losses))
        ctx.save_for_backward(log_probs, path, skip, values, alpha, inputs, outputs, losses)
        ctx.zero_infinity = zero_infinity
        return losses

    @staticmethod
    @knows_one_derivative(
        "ctc_loss: it is differentiated twice, and knows its first derivative only, as torch's does.\n"
        "To fix: leave it out of what `fcg.grad` differentiates inside of another loss."
    )
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, path, skip, values, alpha, inputs, outputs, losses = ctx.saved_tensors
        times, _, states = values.shape
        # Backwards in time and through the path, the recursion is the same.
        reversed_skip = torch.zeros_like(skip)
        reversed_skip[:, 2:] = skip.flip(1)[:, :-2]
        beta = torch.ops.fcg.ctc_scan(
            values.flip(0, 2).contiguous(), reversed_skip, times - inputs, states - 1 - 2 * outputs
        ).flip(0, 2)
        through = alpha + beta
        never = (through == _MINUS_INFINITY) & losses.isfinite()[:, None]
        share = torch.where(never, 0.0, (through - values + losses[:, None]).exp())
        occupied = torch.zeros_like(log_probs).scatter_add_(2, path.expand(times, -1, -1), share)
        result = (log_probs.exp() - occupied) * grad[:, None]
        dropped = torch.arange(times, device=grad.device)[:, None] >= inputs
        if ctx.zero_infinity:
            dropped = dropped | (losses == math.inf)
        return torch.where(dropped[:, :, None], 0.0, result), None, None, None, None, None


def _scan_on_cpu(values: Tensor, skip: Tensor, first: Tensor, begin: Tensor) -> Tensor:
    times, examples, states = values.shape
    out = torch.empty_like(values)
    place = torch.arange(states, device=values.device)
    starts = (place == begin[:, None]) | (place == begin[:, None] + 1)
    # Two states before the first, from which nothing comes.
    before = values.new_full((examples, states + 2), _MINUS_INFINITY)
    nothing = values.new_full((), _MINUS_INFINITY)
    for time in range(times):
        start = torch.where(starts & (first == time)[:, None], 0.0, nothing)
        over = torch.where(skip, before[:, :-2], nothing)
        stacked = torch.stack([before[:, 2:], before[:, 1:-1], over, start])
        torch.add(stacked.logsumexp(0), values[time], out=out[time])
        before[:, 2:] = out[time]
    return out


def _scan_on_cuda(values: Tensor, skip: Tensor, first: Tensor, begin: Tensor) -> Tensor:
    # Imported at the first call on CUDA: CPU builds of torch come without triton.
    from functional_cg.tensors.recorded.ctc_triton import scan

    return scan(values, skip, first, begin)


# a[t, s] = values[t, s] + logsumexp(a[t-1, s], a[t-1, s-1], a[t-1, s-2] where skip[s], 0 where a path starts), with
# values f[T, N, L], skip bool[N, L], and paths that start at time first[N] in states begin[N] and begin[N] + 1.
_LIBRARY = torch.library.Library("fcg", "FRAGMENT")
_LIBRARY.define("ctc_scan(Tensor values, Tensor skip, Tensor first, Tensor begin) -> Tensor")
_LIBRARY.impl("ctc_scan", _scan_on_cpu, "CPU")
_LIBRARY.impl("ctc_scan", _scan_on_cuda, "CUDA")
torch.library.register_fake(
    "fcg::ctc_scan", lambda values, skip, first, begin: torch.empty_like(values), lib=_LIBRARY
)
