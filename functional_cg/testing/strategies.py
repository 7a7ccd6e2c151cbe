"""Hypothesis strategies: tensors, pytrees, states, inputs, and whole random step programs.

The first example of a test captures its step, the others replay: set ``deadline=None``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from .. import random as keyed
from .. import tree as pytree
from ..arena import BufferSpec
from ..autodiff import grad
from ..state import Leaf

__all__ = ["StepProgram", "buffer_specs", "inputs", "like", "pytrees", "states", "step_fns", "tensors"]

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.uint8)
_DTYPES = (*_FLOATS, *_INTEGERS, torch.bool)
_CPU = torch.device("cpu")

Draw = Callable[[st.SearchStrategy[Any]], Any]


# -- tensors and trees --------------------------------------------------------------------------------------------


def shapes(max_dims: int = 3, max_side: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes, also 0-dim and zero-size ones."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


def elements_of(dtype: torch.dtype) -> st.SearchStrategy[Any]:
    """Values that a dtype holds exactly, small enough that a few steps of arithmetic do not overflow."""
    if dtype is torch.bool:
        return st.booleans()
    if dtype.is_floating_point or dtype.is_complex:
        return st.integers(-16, 16).map(lambda n: n / 8)
    return st.integers(0, 7)


@st.composite
def tensors(
    draw: Draw,
    shape: st.SearchStrategy[tuple[int, ...]] | tuple[int, ...] | None = None,
    dtype: st.SearchStrategy[torch.dtype] | torch.dtype | None = None,
    *,
    elements: st.SearchStrategy[Any] | None = None,
    strided: bool = True,
) -> Tensor:
    """Tensors on the CPU; with ``strided`` also transposed ones, and views with an offset and gaps."""
    size = draw(
        shape if isinstance(shape, st.SearchStrategy) else shapes() if shape is None else st.just(shape)
    )
    kind = draw(
        dtype
        if isinstance(dtype, st.SearchStrategy)
        else st.sampled_from(_DTYPES)
        if dtype is None
        else st.just(dtype)
    )
    count = math.prod(size)
    values_of = elements_of(kind) if elements is None else elements
    values = draw(st.lists(values_of, min_size=min(count, 8), max_size=min(count, 8)))
    flat = torch.tensor((values * (count // max(len(values), 1) + 1))[:count], dtype=kind)
    return _laid_out(
        flat.reshape(size), draw(st.sampled_from(("dense", "transposed", "gaps"))) if strided else "dense"
    )


def _laid_out(dense: Tensor, layout: str) -> Tensor:
    if layout == "transposed" and dense.dim() > 1:
        return dense.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "gaps" and dense.dim():
        wide = dense.new_zeros((*dense.shape[:-1], 2 * dense.shape[-1] + 1))
        wide[..., 1::2] = dense
        return wide[..., 1::2]
    return dense


def pytrees(leaves: st.SearchStrategy[Any] | None = None, *, max_leaves: int = 6) -> st.SearchStrategy[Any]:
    """Nested dicts, lists and tuples with at least one leaf (tensors by default) and ``None`` here and there."""
    base = tensors() if leaves is None else leaves
    names = st.sampled_from("abcdef")

    def nested(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        inner = children | st.none()
        return (
            st.dictionaries(names, inner, min_size=1, max_size=3)
            | st.lists(inner, min_size=1, max_size=3)
            | st.tuples(inner, inner)
        )

    trees = st.recursive(base, nested, max_leaves=max_leaves)
    return trees.filter(lambda tree: bool(pytree.leaves(tree)))


@st.composite
def buffer_specs(draw: Draw, *, device: torch.device = _CPU) -> BufferSpec:
    """Specs of leaves: shape, dtype, and dense strides in any order of the dimensions."""
    example = draw(tensors())
    return BufferSpec(tuple(example.shape), BufferSpec.of(example).stride, example.dtype, device)


def states(*, max_leaves: int = 6) -> st.SearchStrategy[Any]:
    """Pytrees that can be a state: dicts of trees of tensors, of mixed dtypes and layouts."""
    return st.dictionaries(st.sampled_from("pqrs"), pytrees(max_leaves=max_leaves), min_size=1, max_size=3)


def like(
    tree: Any, *, elements: st.SearchStrategy[Any] | Mapping[str, Any] | None = None
) -> st.SearchStrategy[Any]:
    """Trees of the same structure, shapes and dtypes with other values.

    Args:
      tree: A pytree of tensors.
      elements: Values to draw from; or a dict from key paths, as they print (``"['y']"``), to such strategies.
    """
    flat, treedef = pytree.flatten(tree)
    names = [pytree.path_string(path) for path in treedef.paths()]
    chosen = elements if isinstance(elements, Mapping) else dict.fromkeys(names, elements)
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        raise ValueError(f"like: no leaf is named {', '.join(unknown)}; there are {', '.join(names)}")
    parts = [
        tensors(tuple(leaf.shape), leaf.dtype, elements=chosen.get(name))
        if isinstance(leaf, Tensor)
        else st.just(leaf)
        for name, leaf in zip(names, flat, strict=True)
    ]
    return st.tuples(*parts).map(lambda leaves: pytree.unflatten(treedef, leaves))


def inputs(tree: Any, calls: int, *, elements: Any = None) -> st.SearchStrategy[list[Any]]:
    """Inputs for several calls, each like ``tree``."""
    return st.lists(like(tree, elements=elements), min_size=calls, max_size=calls)


# -- step programs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """One line of a program: ``function`` of earlier values, given by number."""

    name: str
    function: Callable[..., Tensor]
    operands: tuple[int, ...]


@dataclass(frozen=True)
class StepProgram:
    """A random pure step: ``program(state, x) -> (state, metrics)``. It prints as a program.

    Attributes:
      state: A state to start from; some leaf of it is new at each call.
      x: An example input.
      operations: What it computes; values are numbered, leaves of the state first, then the input.
      new_state: Number of the value that becomes each leaf.
      metrics: Numbers of the values that it returns.
    """

    state: Any
    x: Tensor
    operations: tuple[Operation, ...]
    new_state: tuple[int, ...]
    metrics: tuple[int, ...]

    def __call__(self, state: Any, x: Tensor) -> tuple[Any, dict[str, Tensor]]:
        leaves, treedef = pytree.flatten(state)
        values = [*leaves, x]
        for operation in self.operations:
            values.append(operation.function(*[values[i] for i in operation.operands]))
        new_state = pytree.unflatten(treedef, [values[i] for i in self.new_state])
        return new_state, {f"m{n}": values[i] for n, i in enumerate(self.metrics)}

    @property
    def __name__(self) -> str:
        return "random_step"

    def __repr__(self) -> str:
        leaves = pytree.leaves(self.state)
        lines = [f"v{i} = state leaf  {BufferSpec.of(leaf)}" for i, leaf in enumerate(leaves)]
        lines.append(f"v{len(leaves)} = x  {BufferSpec.of(self.x)}")
        for number, operation in enumerate(self.operations, len(lines)):
            lines.append(f"v{number} = {operation.name}({', '.join(f'v{i}' for i in operation.operands)})")
        new = ", ".join(f"v{i}" for i in self.new_state)
        return "\n".join([*lines, f"return [{new}], [{', '.join(f'v{i}' for i in self.metrics)}]"])


def _gradient(w: Tensor, x: Tensor) -> Tensor:
    gradient: Tensor = grad(lambda p: (torch.tanh(p) * x.sum().to(p.dtype)).square().mean())(w)
    return gradient


def _sum_gradient(w: Tensor) -> Tensor:
    gradient: Tensor = grad(lambda p: p.sum())(w)
    return gradient


def _into_clone(a: Tensor) -> Tensor:
    out = a.clone()
    (out[::2] if out.dim() else out).add_(1)
    return out


def _plus_literal(a: Tensor) -> Tensor:
    return a + torch.tensor([1, 2, 3])[1].to(a.dtype)


def _masks(key: Tensor, a: Tensor) -> Tensor:
    return torch.where(keyed.bernoulli(key, 0.5, tuple(a.shape)), a, torch.zeros_like(a))


def _noise(key: Tensor, a: Tensor) -> Tensor:
    return keyed.uniform(key, tuple(a.shape)).to(a.dtype)


def _advance(key: Tensor) -> Tensor:
    return keyed.fold_in(key, 1)


def _float(a: Tensor) -> bool:
    return a.is_floating_point()


def _number(a: Tensor) -> bool:
    return a.dtype is not torch.bool


def _key(a: Tensor) -> bool:
    return a.dtype is torch.int64 and a.shape == (2,)


_UNARY: tuple[tuple[str, Callable[[Tensor], bool], Callable[[Tensor], Tensor]], ...] = (
    ("tanh", _float, torch.tanh),
    ("half", _float, lambda a: a * 0.5),
    ("softmax", lambda a: _float(a) and a.dim() > 0, lambda a: torch.softmax(a, -1)),
    ("plus_one", _number, lambda a: a + 1),
    ("plus_literal", _number, _plus_literal),
    ("negative", _float, torch.neg),
    ("positive", _number, lambda a: a > 0),
    ("not", lambda a: a.dtype is torch.bool, torch.logical_not),
    ("sum", _float, lambda a: a.sum()),
    ("sort", lambda a: a.dim() > 0, lambda a: a.sort(-1).values),
    (
        "index",
        lambda a: _number(a) and a.dim() > 0 and a.shape[0] > 0,
        lambda a: a.index_select(0, torch.tensor([0])),
    ),
    ("clone", lambda a: True, torch.clone),
    ("into_clone", _number, _into_clone),
    ("sum_gradient", _float, _sum_gradient),
    ("advance", _key, _advance),
    # views: of a leaf, of the input, of each other
    ("alias", lambda a: True, lambda a: a.view_as(a)),
    ("detach", lambda a: True, torch.detach),
    ("transpose", lambda a: a.dim() > 1, lambda a: a.transpose(0, -1)),
    ("flip", lambda a: a.dim() > 0, lambda a: a.flip(0)),
    ("head", lambda a: a.dim() > 0, lambda a: a[:1]),
    ("flatten", lambda a: True, lambda a: a.reshape(-1)),
    ("expand", lambda a: a.dim() < 3, lambda a: a.expand(2, *a.shape)),
    ("to_float32", lambda a: True, lambda a: a.to(torch.float32)),
    ("to_float64", lambda a: True, lambda a: a.to(torch.float64)),
    ("to_bfloat16", lambda a: True, lambda a: a.to(torch.bfloat16)),
    ("to_bool", lambda a: True, lambda a: a.to(torch.bool)),
)
_BINARY: tuple[tuple[str, Callable[[Tensor, Tensor], bool], Callable[[Tensor, Tensor], Tensor]], ...] = (
    ("add", lambda a, b: a.shape == b.shape and _number(a) and _number(b), torch.add),
    ("mix", lambda a, b: a.shape == b.shape and _float(a) and _float(b), lambda a, b: torch.tanh(a * b)),
    ("equal", lambda a, b: a.shape == b.shape, torch.eq),
    ("matmul", lambda a, b: a.dim() == b.dim() == 2 and a.dtype == b.dtype and _float(a) and a.shape == b.shape,
     lambda a, b: torch.tanh(a @ b.mT)),
    ("gradient", lambda a, b: _float(a) and _float(b), _gradient),
    ("shift", lambda a, b: _float(a) and _float(b), lambda a, b: torch.tanh(a + b.sum().to(a.dtype))),
    ("noise", lambda key, a: _key(key) and _float(a), _noise),
    ("masked", lambda key, a: _key(key) and _float(a), _masks),
)  # fmt: skip


def _candidates(values: Sequence[Tensor]) -> list[Operation]:
    """All operations that fit some values."""
    found = [
        Operation(name, function, (i,))
        for name, fits, function in _UNARY
        for i, a in enumerate(values)
        if fits(a) and a.numel() <= 64
    ]
    found += [
        Operation(name, function, (i, j))
        for name, fits, function in _BINARY
        for i, a in enumerate(values)
        for j, b in enumerate(values)
        if fits(a, b)
    ]
    return found


def _fits(value: Tensor, leaf: Tensor) -> bool:
    return value.shape == leaf.shape and value.dtype is leaf.dtype


@st.composite
def step_fns(draw: Draw, *, state: Any = None, max_operations: int = 12) -> StepProgram:
    """Random pure steps over random states.

    They take gradients, draw keyed randomness, swap leaves, pass them through or return one tensor in two places, and
    return metrics that alias old leaves, new leaves, the input and each other.

    Args:
      state: Pytree or strategy to start from; by default a dict with twins to swap, a key, a counter and random leaves.
      max_operations: Upper bound of the program's length.
    """
    tree = (
        draw(_default_states() if state is None else state) if state is None or _is_strategy(state) else state
    )
    x = draw(tensors(st.sampled_from(((2, 3), (3,), ())), st.sampled_from((torch.float32, torch.float64))))
    leaves = [leaf._owned() if isinstance(leaf, Leaf) else leaf for leaf in pytree.leaves(tree)]
    values: list[Tensor] = [*leaves, x]
    operations: list[Operation] = []
    for _ in range(draw(st.integers(1, max_operations))):
        fitting = _candidates(values)
        names = sorted({operation.name for operation in fitting})
        name = draw(
            st.sampled_from(names)
        )  # by name first: kinds that fit often must not crowd out the others
        operation = draw(st.sampled_from([operation for operation in fitting if operation.name == name]))
        values.append(operation.function(*[values[i] for i in operation.operands]))
        operations.append(operation)
    new_state = []
    for leaf in leaves:
        fitting_values = [i for i, value in enumerate(values) if _fits(value, leaf)]
        new_state.append(
            draw(st.sampled_from(fitting_values[::-1]))
        )  # computed values first: shrinks towards change
    metrics = draw(st.lists(st.integers(0, len(values) - 1), max_size=4))
    return StepProgram(tree, x, tuple(operations), tuple(new_state), tuple(metrics))


def _is_strategy(value: Any) -> bool:
    return isinstance(value, st.SearchStrategy)


@st.composite
def _default_states(draw: Draw) -> Any:
    shape = draw(st.sampled_from(((2, 3), (3,), (0,), (2, 0, 3), ())))
    dtype = draw(st.sampled_from(_DTYPES))
    return {
        "twins": (draw(tensors((2, 3), torch.float32)), draw(tensors((2, 3), torch.float32))),
        "same": [draw(tensors(shape, dtype)) for _ in range(draw(st.integers(1, 3)))],
        "flag": draw(tensors((3,), torch.bool)),
        "half": draw(tensors((2, 3), torch.bfloat16)),
        "count": torch.zeros((), dtype=torch.int64),
        "key": keyed.key(draw(st.integers(0, 2**31))),
        "none": None,
    }
