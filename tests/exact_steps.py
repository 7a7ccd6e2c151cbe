"""Strategy for random steps with exact arithmetic: small integers, well inside the range of their dtypes.

Sums of such integers do not depend on their order, and their products are never rounded. Every lowering must therefore
give the same numbers: no tolerance is needed, and any difference is a bug. (The exception is the sign of a zero, which
does depend on the order of a sum.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import event
from hypothesis import strategies as st
from torch import Tensor

from functional_cg import random as keyed
from functional_cg import tree as pytree
from functional_cg.state.handle import snapshot
from functional_cg.testing.programs import Operation, StepProgram
from functional_cg.testing.trees import Draw, like
from functional_cg.transforms.autodiff import grad
from functional_cg.transforms.control import cond
from functional_cg.transforms.remat import remat

__all__ = ["exact_step_fns", "whole_numbers"]

_MOST = 8  # largest magnitude of a leaf or an input
_NUMEL = 64  # largest value: repeated expansion stays bounded
_LIMITS = MappingProxyType(
    {torch.float32: 2**20, torch.float64: 2**40, torch.bfloat16: 2**7, torch.float16: 2**10}
)


def whole_numbers(most: int = _MOST) -> st.SearchStrategy[int]:
    """Draw whole numbers of either sign: ``like(tree, elements=whole_numbers())``.

    Args:
      most: The greatest magnitude.
    """
    return st.integers(-most, most)


def _limit(dtype: torch.dtype) -> int:
    """Return a bound below which a dtype holds every integer, with room for the next operation."""
    if dtype in _LIMITS:
        return _LIMITS[dtype]
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max // 8


def _number(a: Tensor) -> bool:
    return a.dtype is not torch.bool


def _float(a: Tensor) -> bool:
    return a.is_floating_point()


def _dims(a: Tensor) -> bool:
    return a.dim() > 0


def _rows(a: Tensor) -> bool:
    return a.dim() > 0 and a.shape[0] > 0


def _matrix(a: Tensor) -> bool:
    return a.dim() == 2 and a.numel() > 0


def _key(a: Tensor) -> bool:
    return a.dtype is torch.int64 and a.shape == (2,)


def _index(a: Tensor) -> Tensor:
    return torch.arange(a.shape[0], device=a.device)


def _into_clone(a: Tensor) -> Tensor:
    out = a.clone()
    (out[::2] if out.dim() else out).add_(1)
    return out


def _row_written(a: Tensor) -> Tensor:
    out = a.clone()
    out[0] = 3
    return out


def _by_moved_index(a: Tensor) -> Tensor:
    index = _index(a)
    before = a[index]
    index.add_(1).remainder_(a.shape[0])
    return before + a[index]


def _square_gradient(a: Tensor) -> Tensor:
    gradient: Tensor = grad(lambda p: (p * p).sum())(a)
    return gradient


def _remade(a: Tensor) -> Tensor:
    gradient: Tensor = grad(lambda p: remat(lambda q: q * q * 2)(p).sum())(a)
    return gradient


def _branch(a: Tensor) -> Tensor:
    out: Tensor = cond(a.sum() > 0, lambda: a.clone(), lambda: a + 1)
    return out


def _same(bound: float) -> float:
    return bound


def _alike(a: Tensor, b: Tensor) -> bool:
    return _rows(a) and a.shape == b.shape and a.dtype is b.dtype


# Name, predicate on the argument, function, and how the bound of the argument maps to that of the result.
_UNARY: tuple[
    tuple[str, Callable[[Tensor], bool], Callable[[Tensor], Tensor], Callable[[float], float]], ...
] = (
    # identities, in spellings that a compiler may remove
    ("clone", lambda a: True, torch.clone, _same),
    ("copy", lambda a: True, lambda a: a.to(a.dtype, copy=True), _same),
    ("cat_of_one", _dims, lambda a: torch.cat([a]), _same),
    ("stack_of_one", lambda a: True, lambda a: torch.stack([a])[0], _same),
    ("pad_by_nothing", _dims, lambda a: F.pad(a, (0, 0)), _same),
    ("repeat_once", lambda a: True, lambda a: a.repeat([1] * a.dim()), _same),
    ("through_double", _float, lambda a: a.double().to(a.dtype), _same),
    ("first_power", _float, lambda a: a.pow(1), _same),
    ("plus_zero", _number, lambda a: a + 0, _same),
    ("times_one", _number, lambda a: a * 1, _same),
    ("over_one", _float, lambda a: a / 1, _same),
    ("flat_clone", lambda a: True, lambda a: a.reshape(-1).clone().view(a.shape), _same),
    ("transposed_clone", _dims, lambda a: a.transpose(0, -1).clone().transpose(0, -1), _same),
    ("into_empty", lambda a: True, lambda a: torch.empty_like(a).copy_(a), _same),
    ("one_slice", _dims, lambda a: a[0 : a.shape[0]].clone(), _same),
    ("chosen", lambda a: True, lambda a: torch.where(torch.ones_like(a, dtype=torch.bool), a, a), _same),
    ("halves", _number, lambda a: a.relu() - (-a).relu() if _float(a) else a, _same),
    ("by_index", _rows, lambda a: a[_index(a)], _same),
    ("split_and_joined", _rows, lambda a: torch.cat(a.split(1)), _same),
    ("unbound", _rows, lambda a: torch.stack(a.unbind(0)), _same),
    ("window", _rows, lambda a: a.unfold(0, 1, 1)[..., 0], _same),
    # views
    ("alias", lambda a: True, lambda a: a.view_as(a), _same),
    ("detach", lambda a: True, torch.detach, _same),
    ("transpose", lambda a: a.dim() > 1, lambda a: a.transpose(0, -1), _same),
    ("head", _dims, lambda a: a[:1], _same),
    ("row", _rows, lambda a: a[-1], _same),
    ("flatten", lambda a: True, lambda a: a.reshape(-1), _same),
    ("expand", lambda a: a.dim() < 3 and a.numel() * 2 <= _NUMEL, lambda a: a.expand(2, *a.shape), _same),
    # arithmetic
    ("plus_one", _number, lambda a: a + 1, lambda b: b + 1),
    ("plus_multiple", _number, lambda a: torch.add(a, 2, alpha=3), lambda b: b + 6),
    ("plus_literal", _number, lambda a: a + torch.tensor([1, 2, 3])[1].to(a.dtype), lambda b: b + 2),
    ("double", _number, lambda a: a * 2, lambda b: 2 * b),
    ("negative", _float, torch.neg, _same),
    ("square", _number, lambda a: a * a, lambda b: b * b),
    ("clamped", _number, lambda a: a.clamp(-_MOST, _MOST), lambda b: min(b, _MOST)),
    ("relu", _float, torch.relu, _same),
    ("sign", _number, torch.sign, lambda b: 1),
    ("positive", _number, lambda a: a > 0, lambda b: 1),
    ("not", lambda a: a.dtype is torch.bool, torch.logical_not, _same),
    ("into_clone", _number, _into_clone, lambda b: b + 1),
    ("row_written", lambda a: _rows(a) and _number(a), _row_written, lambda b: max(b, 3)),
    ("by_moved_index", lambda a: _rows(a) and _number(a), _by_moved_index, lambda b: 2 * b),
    ("square_gradient", _float, _square_gradient, lambda b: 2 * b),
    ("remat_gradient", _float, _remade, lambda b: 4 * b),
    ("branch", _float, _branch, lambda b: b + 1),
    # rearranging
    ("flip", _dims, lambda a: a.flip(0), _same),
    ("roll", _dims, lambda a: a.roll(1, 0), _same),
    ("sort", _dims, lambda a: a.sort(-1).values, _same),
    ("largest", lambda a: _rows(a) and a.numel() > 0, lambda a: a.amax(0), _same),
    ("lower_half", _matrix, torch.tril, _same),
    ("slice_scatter", _rows, lambda a: torch.slice_scatter(a, a[-1:].clone(), 0, 0, 1), _same),
    (
        "row_filled",
        lambda a: _rows(a) and _number(a),
        lambda a: a.index_fill(0, _index(a)[:1], 2),
        lambda b: max(b, 2),
    ),
    ("padded", lambda a: _dims(a) and _number(a), lambda a: F.pad(a, (0, 1)), _same),
    ("as_float64", lambda a: True, lambda a: a.to(torch.float64), _same),
    ("as_float32", lambda a: True, lambda a: a.to(torch.float32), _same),
    ("as_bfloat16", lambda a: True, lambda a: a.to(torch.bfloat16), _same),
    ("as_int64", lambda a: True, lambda a: a.to(torch.int64), _same),
    # keyed
    ("advanced", _key, lambda key: keyed.fold_in(key, 1), lambda b: 0),
)
_BINARY: tuple[
    tuple[
        str,
        Callable[[Tensor, Tensor], bool],
        Callable[[Tensor, Tensor], Tensor],
        Callable[[float, float], float],
    ],
    ...,
] = (
    ("add", lambda a, b: a.shape == b.shape and _number(a) and _number(b), torch.add, lambda x, y: x + y),
    ("subtract", lambda a, b: a.shape == b.shape and _float(a) and _float(b), torch.sub, lambda x, y: x + y),
    (
        "add_multiple",
        lambda a, b: a.shape == b.shape and _number(a) and _number(b),
        lambda a, b: torch.add(a, b, alpha=3),
        lambda x, y: x + 3 * y,
    ),
    (
        "multiply",
        lambda a, b: a.shape == b.shape and _number(a) and _number(b),
        torch.mul,
        lambda x, y: x * y,
    ),
    ("larger", lambda a, b: a.shape == b.shape and a.dtype is b.dtype, torch.maximum, max),
    ("equal", lambda a, b: a.shape == b.shape, torch.eq, lambda x, y: 1),
    (
        "chosen_by_sign",
        lambda a, b: a.shape == b.shape and a.dtype is b.dtype and _number(a),
        lambda a, b: torch.where(a > 0, a, b),
        max,
    ),
    (
        "product",
        lambda a, b: _matrix(a) and a.shape == b.shape and a.dtype is b.dtype and _float(a),
        lambda a, b: a @ b.mT,
        lambda x, y: 4 * x * y,
    ),
    (
        "product_added",
        lambda a, b: _matrix(a) and a.shape == b.shape and a.dtype is b.dtype and _float(a),
        lambda a, b: torch.add(a.mT.sum(0), a @ b.mT, alpha=2),
        lambda x, y: 4 * x + 8 * x * y,
    ),
    (
        "product_gradient",
        lambda a, b: _matrix(a) and a.shape == b.shape and a.dtype is b.dtype and _float(a),
        lambda a, b: grad(lambda p: (p @ b.mT).sum())(a),
        lambda x, y: 4 * y,
    ),
    (
        "rows_added",
        lambda a, b: _alike(a, b) and _number(a),
        lambda a, b: a.index_add(0, torch.zeros(a.shape[0], dtype=torch.int64, device=a.device), b),
        lambda x, y: x + 4 * y,
    ),
    ("rows_put", _alike, lambda a, b: a.index_put((_index(a)[:1],), b[:1]), max),
    ("rows_copied", _alike, lambda a, b: a.index_copy(0, _index(a)[:1], b[-1:]), max),
    ("row_replaced", _alike, lambda a, b: torch.select_scatter(a, b[0], 0, -1), max),
    (
        "scattered",
        _alike,
        lambda a, b: a.scatter(-1, torch.zeros_like(a, dtype=torch.int64)[..., :1], b),
        max,
    ),
    ("joined", _alike, lambda a, b: torch.cat([a, b]), max),
    ("stacked", _alike, lambda a, b: torch.stack([b, a]), max),
    (
        "masked",
        lambda key, a: _key(key) and _number(a),
        lambda key, a: torch.where(keyed.bernoulli(key, 0.5, tuple(a.shape)), a, torch.zeros_like(a)),
        lambda x, y: y,
    ),
    (
        "drawn",
        lambda key, a: _key(key) and _number(a),
        lambda key, a: a + keyed.randint(key, tuple(a.shape), 0, 4).to(a.dtype),
        lambda x, y: y + 3,
    ),
)
# Sums: the bound of the result depends on the number of elements.
_SUMS: tuple[tuple[str, Callable[[Tensor], bool], Callable[[Tensor], Tensor]], ...] = (
    # Not of empty tensors: some compilers launch zero threads for them, which the driver refuses.
    ("sum", lambda a: _float(a) and a.numel() > 0, torch.sum),
    ("sum_of_rows", lambda a: _float(a) and _rows(a) and a.numel() > 0, lambda a: a.sum(0)),
    ("running_sum", lambda a: _float(a) and _rows(a) and a.numel() > 0, lambda a: a.cumsum(-1)),
)


def _candidates(values: Sequence[Tensor], bounds: Sequence[float]) -> list[tuple[Operation, float]]:
    """List all operations that apply to some values, with the bounds of their results."""
    found: list[tuple[Operation, float]] = []
    for i, a in enumerate(values):
        if bounds[i] < math.inf:
            found += [(Operation(n, f, (i,)), bound(bounds[i])) for n, fits, f, bound in _UNARY if fits(a)]
            found += [(Operation(n, f, (i,)), bounds[i] * a.numel()) for n, fits, f in _SUMS if fits(a)]
        for j, b in enumerate(values):
            found += [
                (Operation(n, f, (i, j)), bound(bounds[i], bounds[j]))
                for n, fits, f, bound in _BINARY
                if fits(a, b) and (bounds[i] < math.inf or _key(a)) and bounds[j] < math.inf
            ]
    return found


@st.composite
def exact_step_fns(
    draw: Draw, *, max_operations: int = 12, device: torch.device | str | None = None
) -> StepProgram:
    """Draw random pure steps on whole numbers, for which every lowering must give the same result.

    They keep old leaves in many spellings, swap them, take gradients, write rows, draw from keys, and return metrics
    that alias old leaves, new leaves, the input and each other. Leaves stay within [-8, 8], so a step may be called any
    number of times.

    Args:
      draw: Given by hypothesis.
      max_operations: Upper bound of the program's length.
      device: Device of its state and its input.

    Example:
      >>> import functional_cg as fcg
      >>> from hypothesis import given, settings, strategies as st
      >>> from functional_cg.testing import assert_replay_equals_eager
      >>> from functional_cg.testing.strategies import inputs
      >>> from tests.exact_steps import exact_step_fns, whole_numbers
      >>> @settings(deadline=None, max_examples=2)
      ... @given(st.data())
      ... def test_replays(data):
      ...     program = data.draw(exact_step_fns())
      ...     calls = data.draw(inputs(program.x, 4, elements=whole_numbers()))
      ...     assert_replay_equals_eager(fcg.graph_step(program), program.state, calls)
      >>> test_replays()
    """
    tree = pytree.map(lambda leaf: leaf.to(device), snapshot(draw(_states())))
    shape = draw(st.sampled_from(((2, 3), (3,), ())))
    x = draw(like(torch.zeros(shape), elements=whole_numbers())).to(device)
    leaves = pytree.leaves(tree)
    values: list[Tensor] = [*leaves, x]
    # A key is not a number: nothing may be added to its bits.
    bounds: list[float] = [math.inf if _key(leaf) else _MOST for leaf in leaves] + [_MOST]
    operations: list[Operation] = []
    for _ in range(draw(st.integers(1, max_operations))):
        fitting = _candidates(values, bounds)
        name = draw(st.sampled_from(sorted({one.name for one, _ in fitting})))
        chosen = draw(st.sampled_from([pair for pair in fitting if pair[0].name == name]))
        value = chosen[0].function(*[values[i] for i in chosen[0].operands])
        if chosen[1] <= _limit(value.dtype) and value.numel() <= _NUMEL:
            values.append(value)
            bounds.append(chosen[1])
            operations.append(chosen[0])
    new_state = draw(_new_states(leaves, values, bounds))
    some = st.lists(st.integers(0, len(values) - 1), max_size=4)
    # A value that is returned shows whether anything wrote into it, so sometimes return all of them.
    metrics = draw(some | st.just(list(range(len(leaves) + 1, len(values)))))
    program = StepProgram(tree, x, tuple(operations), new_state, tuple(metrics))
    for kind in sorted(program.kinds):
        event(kind)
    return program


@st.composite
def _states(draw: Draw) -> Any:
    def some(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
        return draw(like(torch.zeros(shape, dtype=dtype), elements=whole_numbers()))

    return {
        "twins": (some(2, 3), some(2, 3)),
        "ring": [some(3) for _ in range(3)],
        "square": some(3, 3),
        "other": some(2, 3, dtype=draw(st.sampled_from((torch.float64, torch.bfloat16, torch.int64)))),
        "scalar": some(),
        "none": torch.zeros(0),
        "flag": draw(like(torch.zeros(3, dtype=torch.bool))),
        "key": keyed.key(draw(st.integers(0, 2**31))),
    }


@st.composite
def _new_states(
    draw: Draw, leaves: Sequence[Tensor], values: Sequence[Tensor], bounds: Sequence[float]
) -> tuple[int, ...]:
    """Draw the value that becomes each leaf; computed values come first, so examples shrink towards change."""
    new_state = []
    for number, leaf in enumerate(leaves):
        most = math.inf if _key(leaf) else max(_MOST, 1)
        fitting = [
            i
            for i, value in enumerate(values)
            if value.shape == leaf.shape and value.dtype is leaf.dtype and (bounds[i] <= most or i == number)
            if _key(leaf) or bounds[i] < math.inf
        ]
        new_state.append(draw(st.sampled_from(fitting[::-1])))
    return tuple(new_state)
