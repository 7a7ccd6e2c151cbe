"""Muon: orthogonalizes the momentum of matrices.

A sharded leaf is gathered for its matrix products, and the result is sharded again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from functional_cg import tree
from functional_cg.errors import LayoutError
from functional_cg.optim.algebra.arithmetic import averaged, placed_like, whole
from functional_cg.optim.algebra.base import (
    Direction,
    GradientTransformation,
    Params,
    Scalar,
    ScalarOrSchedule,
    require,
)
from functional_cg.optim.algebra.combine import chain, partition
from functional_cg.optim.algebra.links import TraceState, add_decayed_weights, scale_by_learning_rate
from functional_cg.optim.rules.adam import adamw
from functional_cg.optim.rules.aliases import Alias

# From torch.optim.Muon, by Keller Jordan: steepest at 0, where singular values start.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(
    matrix: Tensor, steps: int, coefficients: tuple[float, float, float], eps: float, dtype: torch.dtype
) -> Tensor:
    """Orthogonalize a matrix by Newton-Schulz iteration: ``x <- a x + (b s + c s s) x``, with ``s = x x^T``.

    Its singular values end up near 1.

    Args:
      matrix: [rows, columns].
      steps: Number of iterations.
      coefficients: a, b, c.
      eps: Lower bound of the norm by which the matrix is first divided.
      dtype: Dtype of the iteration.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype)
    x = x.T if tall else x
    x = x / torch.linalg.vector_norm(x).clamp(min=eps)
    for _ in range(steps):
        s = x @ x.T
        x = torch.addmm(x, torch.addmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


@dataclass(frozen=True)
class scale_by_muon(Direction):
    """Replace momentum with the nearest orthogonal matrix; takes matrices only.

    ``t <- momentum t + (1 - momentum) u``; the result is ``t``, or ``momentum t + (1 - momentum) u`` with ``nesterov``,
    orthogonalized (singular values end between 0.7 and 1.2), times ``sqrt(max(1, rows / columns))``. With
    ``match_rms``, the factor is ``0.2 sqrt(max(rows, columns))``, so that elements move about as far as with AdamW.

    State: a trace like params.

    Source: Jordan et al. 2024, "Muon"; ``torch.optim.Muon``.

    Attributes:
      momentum: In [0, 1).
      nesterov: Look one step ahead.
      match_rms: Scale to the size of AdamW's steps (Liu et al. 2025).
      ns_steps: Newton-Schulz iterations.
      ns_coefficients: Coefficients of its polynomial.
      ns_dtype: Dtype of the iteration.
      eps: Lower bound of the norm by which a matrix is divided.
    Raises:
      LayoutError: At the first use, if a leaf is not a matrix.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> link = optim.scale_by_muon(ns_dtype=torch.float32)
      >>> grads = {"w": torch.tensor([[0.0, 5.0], [-5.0, 0.0]])}
      >>> link.update(grads, link.init(grads))[0]["w"].abs().round(decimals=1)
      tensor([[0.0000, 1.1000],
              [1.1000, 0.0000]])
    """

    momentum: Scalar = 0.95
    nesterov: bool = True
    match_rms: bool = False
    ns_steps: int = 5
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS
    ns_dtype: torch.dtype = torch.bfloat16
    eps: float = 1e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ns_coefficients", tuple(self.ns_coefficients))
        require(len(self.ns_coefficients) == 3, "scale_by_muon: ns_coefficients are three numbers")

    acts_per_leaf = True
    keeps = TraceState

    def init(self, params: Params) -> Any:
        flat, _ = tree.flatten_with_path(params)
        rows = [f"params{tree.path_string(path)}  got {list(x.shape)}" for path, x in flat if x.dim() != 2]
        if rows:
            raise LayoutError.of(
                "",
                "scale_by_muon: takes matrices; these leaves are none.",
                rows=rows,
                fix='`optim.muon(...)` gives them to AdamW; its `labels` say "muon" or "adamw" for each leaf.',
            )
        return super().init(params)

    def leaf(self, n: Any, u: Tensor, p: Any, t: Tensor) -> tuple[Tensor, Tensor]:
        t = averaged(n.momentum, t, u)
        ahead = averaged(n.momentum, t, u) if self.nesterov else t
        rows, columns = u.shape
        size = 0.2 * max(rows, columns) ** 0.5 if self.match_rms else max(1, rows / max(1, columns)) ** 0.5
        x = orthogonalized(whole(ahead), self.ns_steps, self.ns_coefficients, self.eps, self.ns_dtype)
        return placed_like(x.to(u.dtype) * size, u), t


def _matrices(params: Params) -> Any:
    """Default labels: "muon" for leaves with two dimensions, "adamw" for all others."""
    return tree.map(lambda leaf: "muon" if leaf.dim() == 2 else "adamw", params)


@dataclass(frozen=True)
class muon(Alias):
    """Muon for matrices and AdamW for all other leaves.

    ``p <- p - learning_rate * (u + weight_decay * p)`` with the ``u`` of ``scale_by_muon``. Embeddings and the last
    layer, though matrices, do better with AdamW: label them so in ``labels``.

    State: a trace like the matrices; count i64[], mu and nu like the rest; count i64[] for a schedule.

    Source: Jordan et al. 2024; ``torch.optim.Muon``, ``optax.contrib.muon``.

    Attributes:
      learning_rate: Number, f32[], or schedule; for matrices.
      momentum: In [0, 1).
      nesterov: Look one step ahead.
      match_rms: Scale to the size of AdamW's steps, so that both can share a learning rate.
      ns_steps: Newton-Schulz iterations.
      ns_dtype: Dtype of the iteration.
      weight_decay: Number or f32[], for all leaves; no default.
      adamw_learning_rate: Number, f32[], or schedule; None for ``learning_rate``.
      labels: "muon" or "adamw": a prefix tree, or a function from the parameters to one; None for "muon" where a
        leaf has two dimensions.
    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> params = {"w": torch.eye(2), "b": torch.ones(2)}
      >>> optimizer = optim.muon(0.1, weight_decay=0.0)
      >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
      >>> updates["b"]
      tensor([-0.1000, -0.1000])
    """

    momentum: Scalar = 0.95
    nesterov: bool = True
    match_rms: bool = False
    ns_steps: int = 5
    ns_dtype: torch.dtype = torch.bfloat16
    weight_decay: Scalar = field(kw_only=True)
    adamw_learning_rate: ScalarOrSchedule | None = field(default=None, kw_only=True)
    labels: Any = field(default=None, kw_only=True)

    @property
    def links(self) -> tuple[GradientTransformation, ...]:
        decayed = (add_decayed_weights(self.weight_decay), scale_by_learning_rate(self.learning_rate))
        rest = self.learning_rate if self.adamw_learning_rate is None else self.adamw_learning_rate
        parted = {
            "muon": chain(self._made(scale_by_muon), *decayed),
            "adamw": adamw(rest, weight_decay=self.weight_decay),
        }
        return (partition(parted, _matrices if self.labels is None else self.labels),)
