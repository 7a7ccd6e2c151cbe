"""What all updates share: nets as dicts of tensors, for pure functions, and as modules, for ``torch.optim``."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..workloads import Batch, Params

__all__ = ["Algorithm", "Learner", "Net", "Normal", "layers", "mlp", "moved", "normal"]

_SEED = 1
Normal = Callable[..., Tensor]


def normal(seed: int = _SEED) -> Normal:
    """Return ``f(*shape, std=1.0)``, which draws on the CPU, the same at each start."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, std=1.0: torch.randn(shape, generator=generator) * std


def layers(draw: Normal, *sizes: int, nets: int = 0, last: float = 1.0) -> Params:
    """Make an MLP, or ``nets`` of them side by side: weights ``w0, ...`` [nets, out, in], biases ``b0, ...``.

    Args:
      draw: From :func:`normal`.
      sizes: Features, from the input to the output.
      nets: Number of nets; 0 for one without that dimension.
      last: Scale of the last layer.
    """
    params, side = {}, (nets,) if nets else ()
    for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        scale = last if i == len(sizes) - 2 else 1.0
        params[f"w{i}"] = draw(*side, outputs, inputs, std=scale * inputs**-0.5)
        params[f"b{i}"] = torch.zeros(*side, *((1,) if nets else ()), outputs)
    return params


def mlp(p: Mapping[str, Tensor], x: Tensor, act: Callable[[Tensor], Tensor] = F.relu) -> Tensor:
    """Run an MLP on ``x`` [n, in]; of several side by side, each on the same ``x``: [nets, n, out]."""
    count = len(p) // 2
    side_by_side = p["w0"].dim() == 3
    h = x.expand(p["w0"].shape[0], -1, -1) if side_by_side else x
    for i in range(count):
        h = h if i == 0 else act(h)
        w, b = p[f"w{i}"], p[f"b{i}"]
        h = torch.baddbmm(b, h, w.mT) if side_by_side else F.linear(h, w, b)
    return h


def moved(tree: Any, device: torch.device) -> Any:
    """Copy a dict of dicts of tensors to a device."""
    if isinstance(tree, Tensor):
        return tree.to(device, copy=True)
    return {name: moved(value, device) for name, value in tree.items()}


class Net(nn.Module):
    """Tensors by name: parameters, or buffers if they are not trained.

    Args:
      params: Initial values, which are copied.
      trained: Whether they are parameters.
    """

    def __init__(self, params: Params, *, trained: bool = True) -> None:
        super().__init__()
        self._names = tuple(params)
        for name, value in params.items():
            if trained:
                self.register_parameter(name, nn.Parameter(value.clone()))
            else:
                self.register_buffer(name, value.clone())

    def tensors(self) -> Params:
        """Return the tensors by name."""
        return {name: getattr(self, name) for name in self._names}

    def fixed(self) -> Params:
        """Return the tensors by name, without gradients."""
        return {name: getattr(self, name).detach() for name in self._names}


class Learner(nn.Module):
    """An update in place, as CleanRL writes it: nets, targets, and optimizers of ``torch.optim``.

    Attributes:
      optimizers: All of them.
    """

    optimizers: Sequence[torch.optim.Optimizer]

    @abstractmethod
    def update(self, *tensors: Tensor) -> Tensor:
        """Update in place from a batch, its tensors in the order of their names, and return the loss."""

    def compile_with(self, mode: str | None) -> None:
        """Compile the update: whole, as LeanRL does, unless a subclass says otherwise."""
        self.update = torch.compile(self.update, mode=mode)  # type: ignore[method-assign]


@dataclass(frozen=True)
class Algorithm:
    """An update, its sizes and its data. Subclasses say how a step is made in each style."""

    @property
    @abstractmethod
    def text(self) -> str:
        """Describe the sizes for people."""

    @property
    def compile_once(self) -> bool:
        """Whether the step repeats itself so often that ours compiles what repeats once."""
        return False

    @property
    def branches(self) -> bool:
        """Whether ours is timed on several lanes, too, for which all of the step is compiled."""
        return True

    @abstractmethod
    def params(self) -> dict[str, Params]:
        """Make the initial values on the CPU, net by net, the same at each call."""

    @abstractmethod
    def batches(self, count: int) -> list[Batch]:
        """Make batches on the CPU, the same at each call."""

    @abstractmethod
    def state(self, device: torch.device) -> Any:
        """Place the state of the pure step."""

    @abstractmethod
    def step(self, state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        """Compute the pure step: the new state, and ``{"loss": f32[]}``."""

    @abstractmethod
    def learner(self, device: torch.device, options: Mapping[str, Any]) -> Learner:
        """Make the update in place.

        Args:
          device: Where.
          options: Of the optimizers, such as ``fused``.
        """
