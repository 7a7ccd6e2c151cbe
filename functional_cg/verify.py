"""``debug="verify"``: replays beside eager runs of the same function on the same values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from . import tree as pytree
from .arena import BufferSpec
from .debug import Silence
from .eager import copies, evaluate
from .errors import CaptureError
from .leaf import owned
from .lowered import Lowered
from .shards.boundary import held
from .signature import Call
from .stages.values import same
from .surroundings import AsTraced

__all__ = ["Shadow", "tolerance_of"]


def tolerance_of(lowered: Lowered) -> float:
    """How far a replay may be from the eager run: the norm of the difference over that of the leaf.

    Nothing for ATen calls: they are repeated as they are, bit for bit. A compiler adds in another order, fuses products
    with sums and keeps what it fuses unrounded, and a step amplifies that by its condition, which nobody knows. Half
    of the digits of the coarsest floating dtype that the step computes in leaves room for it (3.5e-4 in f32, 0.088 in
    bf16): a number that is stale, or a kernel that has read dead memory, differs in the first ones.
    """
    if not lowered.plan.compiled:
        return 0.0
    computed = {var.spec.dtype for instr in lowered.program.instrs for var in instr.outputs()}
    return _half_the_digits(computed | {spec.dtype for state in lowered.states for spec in state.specs})


def _half_the_digits(dtypes: Iterable[torch.dtype]) -> float:
    inexact = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return max((float(torch.finfo(dtype).eps) ** 0.5 for dtype in inexact), default=0.0)


class Shadow:
    """Runs a call's function eagerly on the values from before the call, and compares.

    Args:
      fn: The user's function.
      name: Its name.
      donates: Whether it returns a new state.
    """

    def __init__(self, fn: Callable[..., Any], name: str, *, donates: bool) -> None:
        self._fn, self._name, self._donates = fn, name, donates
        self._calls = 0

    def verify(self, call: Call, replay: Callable[[], Any], tolerance: float) -> Any:
        """Replay a call and return its result, if it is that of the eager run.

        Numbers and integer tensors have to be equal, floating tensors equal in their bits; with a ``tolerance``, equal
        up to this part of their norm, plus one rounding of 1.0 per element. What the eager run prints is not shown.

        Raises:
          CaptureError: Naming the leaves that differ and the call; or the eager run has raised.
        """
        slots = [copies(s.arena, s.start, s.stop) for s in call.states]
        live = [tensor.clone() for tensor in call.live]
        got = replay()
        self._calls += 1
        try:
            with Silence(), AsTraced():
                expected = evaluate(self._fn, call, slots, live, donates=self._donates)
        except Exception as error:  # whatever the user's function raises
            raise self._error(
                call,
                f"raises {type(error).__name__} in the eager run of verified call {self._calls}: {error}",
            ) from error
        rows = self._differences(call, expected, got, tolerance)
        if rows:
            raise self._error(
                call, f"replay differs from the eager run at verified call {self._calls}.", rows
            )
        return got

    def _differences(self, call: Call, expected: Any, got: Any, tolerance: float) -> list[str]:
        if not self._donates:
            return _differences("outputs", expected, got, tolerance)
        if not isinstance(expected, tuple) or len(expected) != 2:
            return [f"result  eager {type(expected).__name__}   replay (state, metrics)"]
        names = call.states[0].name, "metrics"
        triples = zip(names, expected, got, strict=True)
        return [row for name, want, have in triples for row in _differences(name, want, have, tolerance)]

    def _error(self, call: Call, what: str, rows: Iterable[str] = ()) -> CaptureError:
        kept = (
            f" The replay has committed: `{call.states[0].name}.latest()` is its state."
            if self._donates
            else ""
        )
        return CaptureError.of(
            self._name,
            what,
            rows=list(rows),
            why=f"Something in the step is not a function of its arguments, or is not deterministic.{kept}",
            fix="look for kernels with hidden state or atomics (`torch.use_deterministic_algorithms(True)`), and "
            "for host values reached in ways that are not watched.",
        )


def _differences(root: str, expected: Any, got: Any, tolerance: float) -> list[str]:
    """Where two trees differ, one line each."""
    pairs, treedef = pytree.flatten_with_path(expected)
    leaves, other = pytree.flatten(got)
    if treedef != other:
        return pytree.structure_diff(treedef, other, root) or [
            f"{root}  eager and replay differ in structure"
        ]
    triples = [
        (pytree.path_string(path, root), want, have) for (path, want), have in zip(pairs, leaves, strict=True)
    ]
    return [f"{name}  {text}" for name, want, have in triples if (text := _difference(want, have, tolerance))]


def _difference(want: Any, have: Any, tolerance: float) -> str:
    """How two leaves differ; an empty string if they do not."""
    if not isinstance(want, Tensor) or not isinstance(have, Tensor):
        return "" if have is want or same(have, want) else f"eager {_shown(want)}   replay {_shown(have)}"
    want, have = owned(held(want)).detach(), owned(held(have)).detach()
    if (want.shape, want.dtype) != (have.shape, have.dtype):
        return f"eager {_shown(want)}   replay {_shown(have)}"
    if _same_bits(want, have):
        return ""
    if not (want.is_floating_point() or want.is_complex()):
        return f"differs in {int((want != have).sum())} of {want.numel()} elements"
    distance, allowed = _distance(want, have), _allowed(want, tolerance)
    if tolerance and distance <= allowed:
        return ""
    if not distance:
        return "differs in the sign of zeros"
    return f"differs by {distance:.3g} in norm, allowed is {allowed if tolerance else 0:.3g}"


def _shown(leaf: Any) -> str:
    return str(BufferSpec.of(leaf)) if isinstance(leaf, Tensor) else repr(leaf)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _distance(want: Tensor, have: Tensor) -> float:
    """Norm of the difference; where both are NaN, or the same infinity, there is none."""
    want, have = _wide(want), _wide(have)
    equal = (want == have) | (want.isnan() & have.isnan())
    distance: float = torch.where(equal, 0.0, have - want).abs().norm().item()
    return math.inf if math.isnan(distance) else distance


def _allowed(want: Tensor, tolerance: float) -> float:
    finite = torch.where(want.isfinite(), _wide(want), 0.0)
    norm: float = finite.abs().norm().item()
    return tolerance * norm + torch.finfo(want.dtype).eps * math.sqrt(want.numel())


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether the bits agree; one NaN is as good as another."""
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return all(
        torch.equal(_bits(one), _bits(other)) for one, other in zip(_numbers(a), _numbers(b), strict=True)
    )


def _numbers(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Which elements are NaN, and the others with their signs."""
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    nan = parts.double().isnan()
    return nan, torch.where(nan, 0.0, parts.double())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
