"""Let modules that keep statistics ask the host for nothing.

torch's observers of ranges, in quantization-aware training, decide in Python whether a range of one number each is the
first one, and build scales from Python numbers; for ranges of several channels, they stay with tensors. A batch norm
without a momentum divides by the number of its batches. An adaptive softmax gives each cluster the rows whose targets
are in it; here each cluster gets all rows.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import adaptive
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["on_device"]

_FILE = "torch.ao.quantization.observer"


def on_device(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield, by name, what computes the same on the device as a method of a module that is one of these."""
    kind: Any = type(module)
    averages = isinstance(module, _BatchNorm) and module.momentum is None and module.track_running_stats
    if averages and kind.forward is _BatchNorm.forward:
        yield "forward", partial(_normalize, weakref.ref(module))
    if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
        for name, method in (("forward", _of_targets), ("predict", _likeliest)):
            if getattr(kind, name) is getattr(nn.AdaptiveLogSoftmaxWithLoss, name):
                yield name, partial(method, weakref.ref(module))
    torch_s = sys.modules.get(_FILE)  # not imported: no module is an observer
    if torch_s is None or not isinstance(module, torch_s.MinMaxObserver):
        return
    if kind.forward is torch_s.MovingAverageMinMaxObserver.forward:
        yield "forward", partial(_observe, weakref.ref(module))
    if kind.calculate_qparams is torch_s.MinMaxObserver.calculate_qparams:
        yield "calculate_qparams", partial(_parameters, weakref.ref(module))


def _normalize(norm: weakref.ref[Any], x: Tensor) -> Tensor:
    """Normalize, and average with the statistics of all batches before."""
    self: Any = norm()
    if not self.training or self.running_mean is None:
        return _BatchNorm.forward(self, x)
    self._check_input_dim(x)
    self.num_batches_tracked.add_(1)
    mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    out = F.batch_norm(x, mean, var, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)
    for held, now in ((self.running_mean, mean), (self.running_var, var)):  # now those of this batch
        share = 1 / self.num_batches_tracked.to(held.dtype)
        held.copy_((1 - share) * held + share * now)
    return out


def _of_targets(softmax: weakref.ref[Any], input_: Tensor, target_: Tensor) -> Any:
    """Return the log-probabilities of targets, and the loss."""
    self: Any = softmax()
    if target_.dim() > 1 or input_.shape[:-1] != target_.shape:
        raise RuntimeError(
            f"targets of shape {list(target_.shape)} do not fit inputs of shape {list(input_.shape)}: "
            "one target each"
        )
    of_all = self.log_prob(input_.reshape(-1, input_.shape[-1]))
    output = of_all.gather(1, target_.reshape(-1, 1)).reshape(target_.shape)
    return adaptive._ASMoutput(output, (-output).mean())


def _likeliest(softmax: weakref.ref[Any], input: Tensor) -> Tensor:
    """Return the likeliest class: one of the shortlist if the head prefers it to each cluster as a whole."""
    self: Any = softmax()
    output = self.head(input).argmax(1)
    return torch.where(output < self.shortlist_size, output, self.log_prob(input).argmax(1))


def _observe(observer: weakref.ref[Any], x: Tensor) -> Tensor:
    """Move the range towards that of ``x``; the first time, take it."""
    self: Any = observer()
    if not x.numel():
        return x
    low, high = torch.aminmax(x.detach().to(self.min_val.dtype))
    first = (self.min_val == torch.inf) & (self.max_val == -torch.inf)
    for held, now in ((self.min_val, low), (self.max_val, high)):
        held.copy_(torch.where(first, now, held + self.averaging_constant * (now - held)))
    return x


def _parameters(observer: weakref.ref[Any]) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point, as of one channel."""
    self: Any = observer()
    scale, zero_point = self._calculate_qparams(self.min_val[None], self.max_val[None])
    return scale, zero_point
