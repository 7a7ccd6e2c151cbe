"""Hypothesis strategies for tensors, pytrees, states, leaf specs and inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from torch import Tensor

from .. import tree as pytree
from ..state.arena import BufferSpec

__all__ = ["buffer_specs", "dtypes", "inputs", "like", "pytrees", "shapes", "states", "tensors"]

Draw = Callable[[st.SearchStrategy[Any]], Any]


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """Draw dtypes: floating point of 16 to 64 bits, integers and booleans."""
    return st.sampled_from(
        (
            torch.float32, torch.float64, torch.bfloat16, torch.float16,
            torch.int64, torch.int32, torch.uint8, torch.bool,
        )
    )  # fmt: skip


def shapes(*, max_dims: int = 3, max_side: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw shapes, including 0-dim and zero-size ones."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


def elements_of(dtype: torch.dtype) -> st.SearchStrategy[Any]:
    """Draw values that a dtype holds exactly and that do not overflow within a few steps of arithmetic."""
    if dtype is torch.bool:
        return st.booleans()
    if dtype.is_floating_point or dtype.is_complex:
        return st.integers(-16, 16).map(lambda n: n / 8)
    return st.integers(0, 7)


@st.composite
def tensors(
    draw: Draw,
    *,
    shapes: st.SearchStrategy[tuple[int, ...]] = shapes(),  # noqa: B008 - strategies do not change
    dtypes: st.SearchStrategy[torch.dtype] = dtypes(),  # noqa: B008
    elements: st.SearchStrategy[Any] | None = None,
    strided: bool = True,
) -> Tensor:
    """Draw tensors on the CPU. For one fixed shape and dtype, use :func:`like`.

    Args:
      shapes: Shapes to draw from.
      dtypes: Dtypes to draw from.
      elements: Values; by default small ones that the dtype holds exactly.
      strided: Also draw transposed tensors, and views with an offset and gaps.
    Raises:
      InvalidArgument: If an argument is not a strategy.
    """
    for name, strategy in (("shapes", shapes), ("dtypes", dtypes), ("elements", elements)):
        if strategy is not None and not isinstance(strategy, st.SearchStrategy):
            raise InvalidArgument(
                f"tensors: `{name}` must be a strategy, got {strategy!r}; "
                "for tensors of one shape and dtype write `like(torch.zeros(2, 3))`"
            )
    return _drawn(draw, draw(shapes), draw(dtypes), elements, strided=strided)


def _drawn(
    draw: Draw,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    elements: st.SearchStrategy[Any] | None,
    *,
    strided: bool,
) -> Tensor:
    count = math.prod(shape)
    values_of = elements_of(dtype) if elements is None else elements
    values = draw(st.lists(values_of, min_size=min(count, 8), max_size=min(count, 8)))
    flat = torch.tensor((values * (count // max(len(values), 1) + 1))[:count], dtype=dtype)
    layout = draw(st.sampled_from(("dense", "transposed", "gaps"))) if strided else "dense"
    return _laid_out(flat.reshape(shape), layout)


def _laid_out(dense: Tensor, layout: str) -> Tensor:
    if layout == "transposed" and dense.dim() > 1:
        return dense.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "gaps" and dense.dim():
        wide = dense.new_zeros((*dense.shape[:-1], 2 * dense.shape[-1] + 1))
        wide[..., 1::2] = dense
        return wide[..., 1::2]
    return dense


def pytrees(leaves: st.SearchStrategy[Any] | None = None, *, max_leaves: int = 6) -> st.SearchStrategy[Any]:
    """Draw nested dicts, lists and tuples with at least one leaf (tensors by default) and some ``None``."""
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


def buffer_specs() -> st.SearchStrategy[BufferSpec]:
    """Draw specs of leaves on the CPU: shape, dtype, and dense strides in any order of the dimensions."""
    return tensors().map(BufferSpec.of)


def states(*, max_leaves: int = 6) -> st.SearchStrategy[Any]:
    """Draw pytrees that can be a state: dicts of trees of tensors, of mixed dtypes and layouts."""
    return st.dictionaries(st.sampled_from("pqrs"), pytrees(max_leaves=max_leaves), min_size=1, max_size=3)


@st.composite
def like(draw: Draw, tree: Any, *, elements: st.SearchStrategy[Any] | Mapping[str, Any] | None = None) -> Any:
    """Draw trees of the same structure, shapes and dtypes with other values.

    Args:
      tree: A pytree of tensors; other leaves stay as they are.
      elements: Strategy for the values, or a dict from printed key paths (``"['y']"``) to such strategies.
    Raises:
      InvalidArgument: If ``elements`` names a leaf that does not exist.

    Example:
      >>> import torch
      >>> from hypothesis import given, strategies as st
      >>> from functional_cg.testing.strategies import like
      >>> example = {"x": torch.zeros(4, 2), "label": torch.zeros(4, dtype=torch.int64)}
      >>> @given(like(example, elements={"['label']": st.integers(0, 9)}))
      ... def test_labels(batch):
      ...     assert batch["label"].max() <= 9
      >>> test_labels()
    """
    flat, treedef = pytree.flatten(tree)
    names = [pytree.path_string(path) for path in treedef.paths()]
    chosen = elements if isinstance(elements, Mapping) else dict.fromkeys(names, elements)
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        raise InvalidArgument(f"like: no leaf is named {', '.join(unknown)}; there are {', '.join(names)}")
    leaves = [
        _drawn(draw, tuple(leaf.shape), leaf.dtype, chosen.get(name), strided=True)
        if isinstance(leaf, Tensor)
        else leaf
        for name, leaf in zip(names, flat, strict=True)
    ]
    return pytree.unflatten(treedef, leaves)


def inputs(tree: Any, calls: int, *, elements: Any = None) -> st.SearchStrategy[list[Any]]:
    """Draw the inputs of several calls, each like ``tree``, for :func:`assert_replay_equals_eager`.

    Args:
      tree: The input of a call, or a tuple of its inputs.
      calls: How many.
      elements: As for :func:`like`; in a tuple, the second input is ``"[1]"``.

    Example:
      >>> import torch, functional_cg as fcg
      >>> from hypothesis import given, settings, strategies as st
      >>> from functional_cg.testing import assert_replay_equals_eager
      >>> from functional_cg.testing.strategies import inputs
      >>> example = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
      >>> step = fcg.graph_step(lambda state, x, y: ({"w": state["w"] + x.sum(0)[y].sum()}, {}))
      >>> @settings(max_examples=5, deadline=None)
      ... @given(inputs(example, 3, elements={"[1]": st.integers(0, 1)}))
      ... def test_replays(calls):
      ...     assert_replay_equals_eager(step, {"w": torch.zeros(())}, calls)
      >>> test_replays()
    """
    return st.lists(like(tree, elements=elements), min_size=calls, max_size=calls)
