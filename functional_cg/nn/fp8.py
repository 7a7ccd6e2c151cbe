"""Linear layers with fp8 matrix products and delayed scaling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from .. import tree as pytree
from ..ambient.setting import current_mesh
from ..manual import Documented
from ..shards.collectives import all_reduce
from ._scaled_mm import MULTIPLE, refuse_device, scaled_product

__all__ = ["Fp8Scaling", "fp8_linear"]

_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_ROLES = 3  # input, weight, gradient of the output
# Powers of two to count: 2**-64 to 2**63.
_BINS, _LOWEST = 128, -64
_MANTISSA, _BIAS = 23, 127  # mantissa bits of f32, and the bias of its exponent
_WIDE = (torch.float32, torch.bfloat16, torch.float16)


@pytree.register_dataclass
@dataclass(frozen=True)
class Fp8Scaling(metaclass=Documented):
    """Delayed scales for the input, the weight and the output gradient of linear layers; part of the state.

    With delayed scaling, a step quantizes by what earlier steps saw, so that no product waits for a maximum. The scale
    is a power of two, ``2**(top - margin) / peak``: ``peak`` is the largest absolute value of the last ``n`` steps,
    rounded up to a power of two, and ``2**top`` the largest power of two in the format, 2**8 for e4m3 and 2**15 for
    e5m2. A value above that range is clamped to the largest number of the format, for one step; an infinity becomes
    NaN, so that a loss scale sees it. The first step has scales of 1, which round small gradients to zero: in a deep
    model, each of the first steps reaches one layer further.

    A step also sees maxima in its backward pass, which cannot return them, so they come out as the gradient of
    ``seen``. It counts, for each power of two, the maxima that it bounds; counts add up wherever gradients do: over
    several uses of a layer, micro-batches, and ranks. The largest power counted bounds them all. :meth:`updated` turns
    the counts into the next step's scaling; with several ranks, in one collective.

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; the delayed scaling of NVIDIA's Transformer
    Engine, here with powers of two.

    Attributes:
      scale: f32[..., 3], the factor applied before rounding.
      history: f32[..., 3, n], bounds on the absolute values of the last steps, newest first; 0 where nothing was seen.
      seen: f32[..., 3, 128], zeros; its gradient counts what a step saw.
      margin: Powers of two of headroom.

    Example:
      Two layers, trained together with their scales:

      >>> import torch, functional_cg as fcg
      >>> class State(fcg.TrainState):
      ...     fp8: fcg.nn.Fp8Scaling
      >>> def loss_fn(trained, x):
      ...     params, fp8 = trained
      ...     for weight, scaling in zip(params, fp8):
      ...         x = torch.relu(fcg.nn.fp8_linear(x, weight, None, scaling))
      ...     return x.float().square().mean()
      >>> @fcg.graph_step
      ... def train_step(state, x):
      ...     loss, (grads, seen) = fcg.value_and_grad(loss_fn)((state.params, state.fp8), x)
      ...     return state.apply_gradients(grads, fp8=state.fp8.updated(seen)), {"loss": loss}
      >>> params = [torch.full((16, 32), 0.25), torch.full((16, 16), 0.25)]
      >>> state = State.create(params=params, optimizer=fcg.optim.sgd(0.1), fp8=fcg.nn.Fp8Scaling.create(2))
      >>> state, metrics = train_step(state, torch.ones(16, 32))
      >>> float(metrics["loss"]), state.fp8.history[:, :2, 0].tolist()  # a layer saw 1 and 1/4, the next one 8 and 1/4
      (1024.0, [[1.0, 0.25], [8.0, 0.25]])
    """

    scale: Tensor
    history: Tensor
    seen: Tensor
    margin: int = pytree.static(default=0)

    @classmethod
    def create(
        cls, *layers: int, history: int = 16, margin: int = 0, device: torch.device | str = "cpu"
    ) -> Self:
        """Make scales of 1 for one layer, or for ``layers`` of them, to be indexed or iterated over.

        Args:
          layers: Leading dimensions.
          history: Number of steps for which a maximum counts.
          margin: Powers of two of headroom above the peak, for values that grow from step to step.
          device: Where the state lives.
        Raises:
          ValueError: If a dimension or ``history`` is not positive, or ``margin`` negative or above 8.
        """
        if not all(type(size) is int and size >= 1 for size in layers):
            raise ValueError(f"nn.Fp8Scaling: expected layers as integers of 1 or more, got {layers!r}")
        if not isinstance(history, int) or history < 1:
            raise ValueError(f"nn.Fp8Scaling: history must be an int of 1 or more, got {history!r}")
        if not isinstance(margin, int) or not 0 <= margin <= 8:
            raise ValueError(f"nn.Fp8Scaling: margin must be an int from 0 to 8, got {margin!r}")
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        return cls(
            zeros((*layers, _ROLES)) + 1,
            zeros((*layers, _ROLES, history)),
            zeros((*layers, _ROLES, _BINS)),
            margin,
        )

    def __getitem__(self, layer: int) -> Self:
        """The scaling of one layer."""
        self._refuse_single()
        return replace(self, scale=self.scale[layer], history=self.history[layer], seen=self.seen[layer])

    def __iter__(self) -> Iterator[Self]:
        """Iterate over the scalings of all layers; autograd joins their gradients in one op."""
        self._refuse_single()
        for parts in zip(self.scale.unbind(), self.history.unbind(), self.seen.unbind(), strict=True):
            yield replace(self, scale=parts[0], history=parts[1], seen=parts[2])

    def _refuse_single(self) -> None:
        if self.scale.dim() < 2:
            raise TypeError("nn.Fp8Scaling: this is the scaling of one layer; `Fp8Scaling.create(n)` makes n")

    def updated(self, grads: Self) -> Self:
        """Compute the scaling for the next step.

        In a step over several ranks, all of them get the same result, from the maxima of all ranks.

        Args:
          grads: The gradient with respect to this scaling, or a mean or sum of several.
        Raises:
          TypeError: If ``grads`` is not such a gradient.
        """
        if not isinstance(grads, Fp8Scaling) or grads.seen.shape != self.seen.shape:
            got = list(grads.seen.shape[:-2]) if isinstance(grads, Fp8Scaling) else type(grads).__name__
            raise TypeError(
                f"nn.Fp8Scaling: expected the gradient of this scaling, of layers {list(self.seen.shape[:-2])}, got "
                f"{got}. To fix: `loss, (grads, seen) = fcg.value_and_grad(loss_fn)((state.params, state.fp8), x)`, "
                "and `state.fp8.updated(seen)`."
            )
        mesh = current_mesh()
        counts = grads.seen if mesh is None or mesh.size == 1 else all_reduce(grads.seen, mesh)
        powers = ((_exponents(counts.device) + _BIAS) << _MANTISSA).view(torch.float32)
        newest = torch.where(counts > 0, powers, 0.0).amax(-1, keepdim=True)
        history = torch.cat([newest, self.history[..., :-1]], -1)
        peak = history.amax(-1)
        scale = torch.where(peak > 0, _tops(peak) * 2.0**-self.margin / peak, self.scale)
        return replace(self, scale=scale, history=history)


def _tops(peak: Tensor) -> Tensor:
    """The largest power of two in the format of each role."""
    e4m3, e5m2 = torch.full_like(peak[..., :2], 2.0**8), torch.full_like(peak[..., 2:], 2.0**15)
    return torch.cat([e4m3, e5m2], -1)


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Fp8Scaling) -> Tensor:
    """Compute ``F.linear(x, weight, bias)`` in fp8, accumulating in f32.

    Input and weight are scaled and rounded to e4m3, the output gradient to e5m2; all three products, in the forward and
    the backward, use these. What a step sees goes into the gradient of ``scaling``: differentiate with respect to it,
    and put :meth:`Fp8Scaling.updated` of that gradient into the next state. A layer may be used several times in one
    step. Without a gradient of ``scaling``, as in evaluation, scales do not change.

    It runs on a CPU (slowly) and on GPUs of compute capability 8.9 and higher.

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning".

    Args:
      x: f32, bf16 or f16 [..., k]; ``k`` and the product of the other dimensions are multiples of 16.
      weight: f32, bf16 or f16 [n, k], with ``n`` also a multiple of 16. Pass f32 masters directly: they are rounded
        only once.
      bias: f32, bf16 or f16 [n], or None; added in the dtype of ``x``.
      scaling: The scaling of one layer.
    Returns:
      [..., n] in the dtype of ``x``. Gradients have the dtypes of their tensors.
    Raises:
      ValueError: If shapes do not match or are not multiples of 16, or the GPU lacks fp8 products.
      TypeError: If a tensor has another dtype, or ``scaling`` covers several layers.
      RuntimeError: If differentiated twice.

    Example:
      >>> import torch, functional_cg as fcg
      >>> x, weight, scaling = torch.full((16, 32), 0.3), torch.ones(16, 32), fcg.nn.Fp8Scaling.create()
      >>> fcg.nn.fp8_linear(x, weight, None, scaling)[0, 0]  # 0.3 is rounded to 0.3125
      tensor(10.)
    """
    _refuse_unfit(x, weight, bias, scaling)
    rows = x.reshape(-1, x.shape[-1])
    # The view reads the weight here: a leaf gathered on read must be read outside the autograd function.
    out: Tensor = _Fp8Linear.apply(rows, weight.view_as(weight), scaling.scale.detach(), scaling.seen)
    out = out.view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias.to(out.dtype)


class _Fp8Linear(torch.autograd.Function):
    """``f(rows, weight, scale, seen)``; the gradient of ``seen`` counts maxima, whatever the incoming gradient is."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, scale: Tensor, seen: Tensor) -> Tensor:
        of_rows, of_weight, _ = scale.unbind()
        low_rows, low_weight = _rounded(rows, of_rows, _FORWARD), _rounded(weight, of_weight, _FORWARD)
        ctx.dtypes = rows.dtype, weight.dtype
        maxima = [_maximum(rows), _maximum(weight)] if ctx.needs_input_grad[3] else [None, None]
        ctx.save_for_backward(low_rows, low_weight, scale, *maxima)
        return scaled_product(low_rows, low_weight, of_rows, of_weight, rows.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # rounding has no second derivative: it would be lost silently
            raise RuntimeError(
                "nn.fp8_linear: it is differentiated twice, and knows its first derivative only.\n"
                "To fix: `torch.nn.functional.linear` where you need the second one."
            )
        low_rows, low_weight, scale, *maxima = ctx.saved_tensors
        of_rows, of_weight, of_grad = scale.unbind()
        low_grad = _rounded(grad, of_grad, _BACKWARD)
        to_rows = to_weight = counts = None
        if ctx.needs_input_grad[0]:
            to_rows = scaled_product(low_grad, low_weight.t(), of_grad, of_weight, ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            to_weight = scaled_product(low_grad.t(), low_rows.t(), of_grad, of_rows, ctx.dtypes[1])
        if ctx.needs_input_grad[3]:
            counts = _counted(torch.stack([*maxima, _maximum(grad)]))
        return to_rows, to_weight, None, counts


def _rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale ``x`` and round it to fp8, clamping what is too large and turning infinities into NaN.

    An infinity is an overflow, which a loss scale must see; e4m3 has no infinities.
    """
    largest = torch.finfo(dtype).max
    clamped = (x.float() * scale).clamp(-largest, largest)
    return torch.where(x.isfinite(), clamped, torch.nan).to(dtype)


def _maximum(x: Tensor) -> Tensor:
    """The largest absolute value, f32[]."""
    return x.abs().amax().float()


def _counted(maxima: Tensor) -> Tensor:
    """One-hot encode the smallest power of two not below each maximum; all zeros for 0, infinity and NaN.

    Args:
      maxima: f32[roles].
    Returns:
      f32[roles, bins].
    """
    # Read the exponent from the bits, rounded up: a logarithm may be off by one at a power of two.
    exponents = ((maxima.view(torch.int32) + (2**_MANTISSA - 1)) >> _MANTISSA) - _BIAS
    here = _exponents(maxima.device) == exponents.clamp(_LOWEST, _LOWEST + _BINS - 1)[:, None]
    counted: Tensor = (here & ((maxima > 0) & maxima.isfinite())[:, None]).float()
    return counted


def _exponents(device: torch.device) -> Tensor:
    """The exponents to count, i32[bins]."""
    return torch.arange(_LOWEST, _LOWEST + _BINS, device=device, dtype=torch.int32)


def _refuse_unfit(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Fp8Scaling) -> None:
    if not isinstance(scaling, Fp8Scaling) or scaling.scale.shape != (_ROLES,):
        got = (
            f"that of {list(scaling.scale.shape[:-1])}" if isinstance(scaling, Fp8Scaling) else repr(scaling)
        )
        raise TypeError(
            f"nn.fp8_linear: expected the Fp8Scaling of one layer, got {got}. To fix: `scaling[i]`, or "
            "`for weight, one in zip(weights, scaling)`."
        )
    for name, tensor in (("x", x), ("weight", weight), ("bias", x if bias is None else bias)):
        dtype = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        if dtype not in _WIDE:
            raise TypeError(f"nn.fp8_linear: expected {name} of f32, bf16 or f16, got {dtype}")
    shapes = f"x {list(x.shape)}, weight {list(weight.shape)}"
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"nn.fp8_linear: expected x [..., k] and weight [n, k], got {shapes}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"nn.fp8_linear: expected bias {list(weight.shape[:1])}, got {list(bias.shape)}")
    rows = x.numel() // max(x.shape[-1], 1)
    if any(size % MULTIPLE or not size for size in (rows, *weight.shape)):
        raise ValueError(
            f"nn.fp8_linear: expected rows, k and n to be multiples of {MULTIPLE}, got {rows} rows, {shapes}. "
            "To fix: pad them with zeros, or compute this layer in bfloat16, `torch.nn.functional.linear`."
        )
    refuse_device("nn.fp8_linear", x.device)
