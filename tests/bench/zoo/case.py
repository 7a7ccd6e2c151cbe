"""One model of the zoo, and how its loss is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Case", "Size", "chosen"]


@dataclass(frozen=True, slots=True)
class Size:
    """How large the models and batches are.

    Attributes:
      batch: Examples per batch.
      width: Hidden size of transformers.
      heads: Attention heads.
      layers: Layers.
      length: Tokens per example.
      vocabulary: Number of tokens.
      image: Height and width of images in pixels; 0 for the size that a model was made for.
      most: Parameters of the largest model to run.
    """

    batch: int
    width: int
    heads: int
    layers: int
    length: int
    vocabulary: int
    image: int
    most: int

    @staticmethod
    def of(device: str) -> Size:
        """Tiny on a CPU; on a GPU, small but real."""
        if device == "cpu":
            return Size(2, 32, 4, 2, 8, 96, 64, 30_000_000)
        return Size(16, 512, 8, 4, 128, 8192, 0, 200_000_000)


@dataclass(frozen=True, slots=True)
class Case:
    """A model with its batches.

    Attributes:
      name: Its name in its library.
      library: Name of the library.
      make: Makes the module; on a CPU, with weights from torch's generator.
      batch: Makes a batch by name, drawn from a generator.
      loss: ``loss(forward, batch)``, for the module as ``forward`` and for what stands for it in a step.
      channels_last: Whether it is trained in that memory format.
    """

    name: str
    library: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict[str, Tensor]]
    loss: Callable[[Callable[..., Any], dict[str, Tensor]], Tensor]
    channels_last: bool = False

    def module(self, device: str, *, double: bool = False) -> nn.Module:
        """Make the module, the same one each time."""
        torch.manual_seed(0)
        module = self.make().to(device)
        if double:
            module.double()
        if self.channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module

    def data(self, number: int, device: str, *, double: bool = False) -> dict[str, Tensor]:
        """Make a batch, the same one for the same number."""
        batch = self.batch(torch.Generator().manual_seed(number))
        if double:
            batch = {
                name: value.double() if value.is_floating_point() else value for name, value in batch.items()
            }
        return {name: self._placed(value.to(device)) for name, value in batch.items()}

    def _placed(self, value: Tensor) -> Tensor:
        last = self.channels_last and value.dim() == 4
        return value.contiguous(memory_format=torch.channels_last) if last else value


def chosen(cases: Iterable[Case], only: Iterable[str]) -> list[Case]:
    """Return the cases whose name or library begins with one of ``only``; all if there is none."""
    starts = tuple(only)
    return [
        one for one in cases if not starts or one.name.startswith(starts) or one.library.startswith(starts)
    ]
