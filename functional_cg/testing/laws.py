"""Assertions about steps: purity, replay equals eager, no aliasing. Failures name key paths and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import tree as pytree
from ..ambient.setting import AsTraced
from ..errors import FunctionalCGError
from ..graph_step import GraphFn, GraphStep, graph_step
from ..state.aliases import refuse_aliases
from ..state.arena import BufferSpec
from ..state.handle import Leaf, place, snapshot
from ..state.lifecycle import fork
from ..tensors.overlap import storage_key

__all__ = [
    "assert_no_alias",
    "assert_pure",
    "assert_replay_equals_eager",
    "assert_trees_all_close",
    "assert_trees_all_equal",
]


def _plain(leaf: Any) -> Any:
    return leaf._owned() if isinstance(leaf, Leaf) else leaf


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in logical order, so that NaNs and signed zeros compare by their bits."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _same(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and bool(a == b)
    return (
        a.shape == b.shape and a.dtype is b.dtype and a.device == b.device and torch.equal(_bits(a), _bits(b))
    )


def _close(a: Any, b: Any, rtol: float, atol: float) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or not (a.is_floating_point() or a.is_complex()):
        return False
    return a.shape == b.shape and a.dtype is b.dtype and torch.allclose(a, b, rtol=rtol, atol=atol)


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    numbers = value.flatten()[:4].tolist()
    return f"{BufferSpec.of(value)} {numbers}{' …' if value.numel() > 4 else ''}"


def _distance(a: Any, b: Any) -> str:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape or not a.numel():
        return ""
    if a.dtype is not b.dtype or not a.is_floating_point():
        return ""
    gap = (a.double() - b.double().to(a.device)).abs().nan_to_num(torch.inf, torch.inf, torch.inf)
    return f"   greatest difference {gap.max().item():g}"


def _first_difference(got: Any, expected: Any, root: str, rtol: float = 0, atol: float = 0) -> str | None:
    found, got_def = pytree.flatten(got)
    wanted, expected_def = pytree.flatten(expected)
    if got_def != expected_def:
        return "\n".join(["structures differ", *pytree.structure_diff(expected_def, got_def, root)])
    for path, a, b in zip(got_def.paths(), map(_plain, found), map(_plain, wanted), strict=True):
        if not _same(a, b) and not ((rtol or atol) and _close(a, b, rtol, atol)):
            where = pytree.path_string(path, root)
            return f"{where}\n  expected {_shown(b)}\n  got      {_shown(a)}{_distance(a, b)}"
    return None


def assert_trees_all_equal(got: Any, expected: Any, name: str = "tree") -> None:
    """Assert that two pytrees (states, metrics) have the same structure and bitwise equal leaves.

    Raises:
      AssertionError: With key path and values of the first leaf that differs.
    """
    difference = _first_difference(got, expected, name)
    if difference is not None:
        raise AssertionError(difference)


def assert_trees_all_close(
    got: Any, expected: Any, *, rtol: float = 1e-5, atol: float = 1e-6, name: str = "tree"
) -> None:
    """Assert that two pytrees have the same structure, dtypes and shapes, and close values.

    Raises:
      AssertionError: With the key path of the first leaf that differs.
    """
    found, got_def = pytree.flatten(got)
    wanted, expected_def = pytree.flatten(expected)
    if got_def != expected_def:
        raise AssertionError("\n".join(pytree.structure_diff(expected_def, got_def, name)))
    for path, a, b in zip(got_def.paths(), map(_plain, found), map(_plain, wanted), strict=True):
        where = pytree.path_string(path, name)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text: f"{where}\n{text}")  # noqa: B023
        elif not _same(a, b):
            raise AssertionError(f"{where}\n  expected {_shown(b)}\n  got      {_shown(a)}")


def assert_no_alias(*trees: Any) -> None:
    """Assert that no two leaves of the given trees share memory, and that none overlaps itself.

    Each tensor must have its own storage. Leaves of states share slabs, so they need only not overlap.

    Raises:
      AssertionError: With the key paths of two leaves that share memory.
    """
    flat, treedef = pytree.flatten(list(trees))
    pairs = [
        (path, leaf) for path, leaf in zip(treedef.paths(), flat, strict=True) if isinstance(leaf, Tensor)
    ]
    tensors = [leaf._read() if isinstance(leaf, Leaf) else leaf for _, leaf in pairs]
    try:
        refuse_aliases([path for path, _ in pairs], tensors, "trees")
    except FunctionalCGError as error:
        what, *lines = str(error).splitlines()
        rows = [line for line in lines if line.startswith("  ")]  # without the advice, which is for states
        raise AssertionError("\n".join([what, *rows])) from error
    owners: dict[int, str] = {}
    for (path, leaf), tensor in zip(pairs, tensors, strict=True):
        here = pytree.path_string(path, "trees")
        there = owners.setdefault(storage_key(tensor), here)
        if there != here and not isinstance(leaf, Leaf):
            raise AssertionError(f"{there} and {here} share one storage")


def arguments(call: Any) -> tuple[Any, ...]:
    return call if isinstance(call, tuple) else (call,)


def assert_replay_equals_eager(
    step: GraphStep[Any, Any] | Callable[..., Any],
    state: Any,
    inputs: Sequence[Any],
    *,
    rtol: float = 0,
    atol: float = 0,
) -> None:
    """Assert that every replay matches the pure function bit for bit: all leaves, all metrics, every call.

    Args:
      step: The captured step, or a function to capture.
      state: Pytree or handle to start from; it is copied, not modified.
      inputs: One entry per call: the input, or a tuple of the inputs. Use new data for each.
      rtol: Relative tolerance for floating leaves, for a lowering that compiles: a compiler may reorder arithmetic.
      atol: Absolute tolerance, likewise. Both runs go on from their own results, so differences add up.
    Raises:
      AssertionError: With the call's number, the first leaf that differs and how much; also if a call did not replay.
    """
    step = step if isinstance(step, GraphStep) else graph_step(step)
    start = snapshot(state)
    captured, eager = place(start), place(start)
    replays = step.stats.replays
    for number, call in enumerate(inputs, 1):
        args = arguments(call)
        with AsTraced():
            eager, expected = step.eager(eager, *args)
        captured, metrics = step(captured, *args)
        for name, got, want in (("metrics", metrics, expected), ("state", captured, eager)):
            difference = _first_difference(got, want, name, rtol, atol)
            if difference is not None:
                raise AssertionError(
                    f"call {number} of {len(inputs)}: replay differs from eager at {difference}"
                )
        if step.stats.replays != replays + number:
            raise AssertionError(f"call {number} of {len(inputs)} did not replay: {step!r}")


def assert_pure(step: Any, state: Any, *inputs: Any) -> None:
    """Assert that a step is a pure function of its arguments: it traces, and two eager runs agree bitwise.

    Args:
      step: A graph_step, a graph_fn, or a function ``fn(state, *inputs) -> (state, metrics)``.
      state: Pytree or handle to start from; it is copied, not modified.
      inputs: The inputs.
    Raises:
      AssertionError: With what the trace refuses, the argument that was written, or the leaf that differs.
    """
    transformed = step if isinstance(step, (GraphStep, GraphFn)) else graph_step(step)
    given = snapshot(inputs)
    try:
        transformed.lower(fork(state), *inputs)
        first = snapshot(transformed.eager(fork(state), *inputs))
        second = snapshot(transformed.eager(fork(state), *inputs))
    except FunctionalCGError as error:
        raise AssertionError(f"not pure: {error}") from error
    for name, got, want in (("inputs", inputs, given), ("result", second, first)):
        difference = _first_difference(got, want, name)
        if difference is not None:
            raise AssertionError(f"not pure: two runs from equal arguments differ at {difference}")
