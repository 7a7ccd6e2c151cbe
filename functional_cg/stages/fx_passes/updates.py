"""Updates of a leaf as single calls: a compiler traces one call instead of a dozen, and lowers it to its formula.

A model with 148 parameters has 148 updates. As a dozen calls each, they would be half of the graph of its step, and of
the time that a compiler takes for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["UPDATE", "Kind", "as_calls", "update"]

Values = Sequence[Tensor | None]
Numbers = Sequence[float]

_library = torch.library.Library("fcg", "FRAGMENT")
_library.define("update(str formula, Tensor[] old, Tensor?[] values, float[] numbers) -> Tensor[]")
UPDATE = torch.ops.fcg.update.default


def update(formula: str, old: Sequence[Tensor], values: Values, numbers: Numbers) -> list[Tensor]:
    """Return the new values of a leaf and of what its optimizer remembers of it.

    Args:
      formula: Which: ``"adagrad"``, ``"adam"`` or ``"sgd"``.
      old: The leaf and what is remembered; the results are laid out like them, one by one.
      values: The gradient, and other tensors of the formula; None for those that it goes without.
      numbers: Numbers of the formula.
    """
    found: list[Tensor] = UPDATE(formula, old, values, numbers)
    return found


def _adam(old: Any, values: Any, numbers: Numbers) -> list[Tensor]:
    """Adam and AdamW, in the operation order of ``torch.optim`` (Kingma & Ba 2015; Loshchilov & Hutter 2019)."""
    p, mu, nu, *top = old
    gradient, step_size, root, kept, found_inf = values
    beta1, beta2, eps, weight_decay, keeps = numbers
    decayed = p if kept is None and keeps == 1 else p * _either(kept, keeps)
    if weight_decay:
        gradient = gradient + weight_decay * p
    new_mu = mu + (gradient - mu) * (1 - beta1)
    new_nu = nu * beta2 + gradient * gradient * (1 - beta2)
    bound = torch.maximum(top[0], new_nu) if top else new_nu
    new = decayed - step_size * new_mu / (bound.sqrt() / root + eps)
    results = [new.to(p.dtype), new_mu, new_nu, *([bound] if top else [])]
    if found_inf is None:
        return results
    keep = found_inf.bool()
    return [torch.where(keep, *pair) for pair in zip(old, results, strict=True)]


def _sgd(old: Any, values: Any, numbers: Numbers) -> list[Tensor]:
    """SGD with momentum and Nesterov momentum, as in ``torch.optim.SGD``."""
    p, *moment = old
    gradient, rate = values
    weight_decay, momentum, dampening, nesterov, is_first_step, lr = numbers
    rate = _either(rate, lr)
    if weight_decay:
        gradient = gradient + weight_decay * p
    if not momentum:
        return [(p - rate * gradient).to(p.dtype)]
    buffer = gradient.clone() if is_first_step else momentum * moment[0] + (1 - dampening) * gradient
    direction = gradient + momentum * buffer if nesterov else buffer
    return [(p - rate * direction).to(p.dtype), buffer]


def _adagrad(old: Any, values: Any, numbers: Numbers) -> list[Tensor]:
    """Adagrad (Duchi et al. 2011), as in ``torch.optim.Adagrad``."""
    p, total = old
    gradient, rate = values
    weight_decay, eps = numbers
    if weight_decay:
        gradient = gradient + weight_decay * p
    new_total = total + gradient * gradient
    return [(p - rate * gradient / (new_total.sqrt() + eps)).to(p.dtype), new_total]


def _either(value: Tensor | None, number: float) -> Any:
    return number if value is None else value


_FORMULAS: Mapping[str, Callable[..., list[Tensor]]] = MappingProxyType(
    {"adagrad": _adagrad, "adam": _adam, "sgd": _sgd}
)


def _results(formula: str, old: Sequence[Tensor], values: Values, numbers: Numbers) -> list[Tensor]:
    return _FORMULAS[formula](old, values, numbers)


def _batched(info: Any, dims: Any, formula: str, old: Any, values: Any, numbers: Numbers) -> Any:
    """Update the leaves of many models: a number of each one stands beside its leaf."""
    _, of_old, of_values, _ = dims
    columns = [_in_front(*pair, info.batch_size) for pair in zip(old, of_old, strict=True)]
    rank = columns[0].dim()
    beside = [
        value if value is None or dim is None else _beside(value.movedim(dim, 0), rank)
        for value, dim in zip(values, of_values, strict=True)
    ]
    return update(formula, columns, beside, numbers), [0] * len(old)


def _in_front(value: Tensor, dim: int | None, count: int) -> Tensor:
    return value.expand(count, *value.shape).clone() if dim is None else value.movedim(dim, 0)


def _beside(value: Tensor, rank: int) -> Tensor:
    return value.reshape(-1, *[1] * (rank - 1)) if value.dim() == 1 else value


_library.impl("update", _results, "CompositeExplicitAutograd")
_library._register_fake("update", lambda _, old, *others: list(map(torch.empty_like, old)))
torch.library.register_vmap("fcg::update", _batched, lib=_library)


Kind = tuple[torch.dtype, bool]  # of a tensor: its dtype, and whether it has dimensions


@functools.lru_cache(maxsize=64)
def as_calls(
    formula: str, old: tuple[Kind, ...], values: tuple[Kind | None, ...], numbers: tuple[float, ...]
) -> fx.GraphModule:
    """Return the calls of an update as a graph of those of its tensors that are not None.

    Args:
      formula: Which, as in :func:`update`.
      old: Of the leaf and of what is remembered.
      values: Of the other tensors, None for those that it goes without.
      numbers: Numbers of the formula.
    """
    from torch._inductor.decomposition import select_decomp_table

    def like(kind: Kind | None) -> Tensor | None:
        return None if kind is None else torch.empty((2,) if kind[1] else (), dtype=kind[0], device="meta")

    tensors = [like(kind) for kind in (*old, *values)]
    given = [place for place, tensor in enumerate(tensors) if tensor is not None]

    def calls(*present: Tensor) -> list[Tensor]:
        every: list[Any] = [None] * len(tensors)
        for place, tensor in zip(given, present, strict=True):
            every[place] = tensor
        return _results(formula, every[: len(old)], every[len(old) :], numbers)

    with unset_fake_temporarily():
        return make_fx(calls, decomposition_table=select_decomp_table())(*(tensors[place] for place in given))
