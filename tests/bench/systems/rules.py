"""Muon, LAMB and Adafactor from each package, with the same settings.

Muon updates the matrices of a GPT's blocks and AdamW the rest, with one learning rate. Where defaults differ between
packages, they are set alike: LAMB has no decay (``torch_optimizer`` does not correct its moments, which makes no
difference without decay) and no bound on the norm of a parameter, and Adafactor has no minimum size for factoring.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import functional_cg as fcg

from ..system import BETAS, EPS, Unavailable
from ..workloads import Workload

__all__ = ["in_classes", "in_optax", "in_ours"]


def in_ours(work: Workload) -> Any:
    """Make this package's transformation."""
    rate, decay = work.learning_rate, work.weight_decay
    if work.rule == "muon":
        return fcg.optim.muon(rate, weight_decay=decay)
    if work.rule == "lamb":
        return fcg.optim.lamb(rate, *BETAS, EPS, weight_decay=decay)
    return fcg.optim.adafactor(rate, weight_decay=decay)


def in_classes(work: Workload, leaves: Sequence[Tensor]) -> list[torch.optim.Optimizer]:
    """Make the optimizers from ``torch.optim`` or ``torch_optimizer``.

    Raises:
      Unavailable: If a class is missing.
    """
    options: dict[str, Any] = {"lr": work.learning_rate, "weight_decay": work.weight_decay}
    if work.rule == "muon":
        matrices = [leaf for leaf in leaves if leaf.dim() == 2]
        rest = [leaf for leaf in leaves if leaf.dim() != 2]
        adamw = torch.optim.AdamW(rest, betas=BETAS, eps=EPS, **options)
        return [_class("torch.optim", "Muon")(matrices, **options), adamw]
    if work.rule == "lamb":
        lamb = _class("torch_optimizer", "Lamb")
        return [lamb(leaves, betas=BETAS, eps=EPS, clamp_value=math.inf, **options)]
    return [_class("torch.optim", "Adafactor")(leaves, **options)]


def _class(package: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(package), name)
    except (AttributeError, ImportError) as error:
        raise Unavailable(f"needs {package}.{name}: {error}") from error


def in_optax(work: Workload, optax: Any) -> Any:
    """Make optax's transformation, for matrices transposed as is usual in jax.

    Raises:
      Unavailable: If this version of optax does not have it.
    """
    rate, decay = work.learning_rate, work.weight_decay
    if work.rule == "muon":
        if not hasattr(getattr(optax, "contrib", None), "muon"):
            raise Unavailable(f"optax {optax.__version__} has no optax.contrib.muon")
        # Here vectors get Nesterov momentum, too.
        return optax.contrib.muon(rate, weight_decay=decay, adam_weight_decay=decay)
    if work.rule == "lamb":
        return optax.lamb(rate, *BETAS, EPS, weight_decay=decay)
    # Its decay is not scaled by the learning rate.
    return optax.adafactor(rate, min_dim_size_to_factor=1, weight_decay_rate=rate * decay)
