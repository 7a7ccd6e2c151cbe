"""``debug="verify"``: compare replays with eager runs of the same function on the same values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import tree as pytree
from ..ambient.setting import AsTraced
from ..call.signature import Call
from ..errors import CaptureError
from ..errors.words import words_of
from ..pytree.sameness import same
from ..shards.peers import on_any
from ..stages.evaluate import quiet
from ..stages.plan import Buffers, Plan, lower_aten
from ..stages.run.results import output_builder
from ..stages.trial.distances import between
from ..stages.trial.judge import Judge, miscompiled
from ..state.arena import Arena, BufferSpec
from ..state.boundary import entered, held
from ..state.leaf import owned
from ..transforms.debug import Silence
from .eager import evaluate
from .lowered import Lowered

__all__ = ["Shadow"]


class Shadow:
    """Reruns the function of a call eagerly, on the values from before the call, and compares the results.

    Args:
      fn: The user's function.
      name: Its name.
      constants: Its declared constants.
      donates: Whether it returns a new state.
    """

    def __init__(
        self, fn: Callable[..., Any], name: str, constants: Iterable[Tensor], *, donates: bool
    ) -> None:
        self._fn, self._name, self._constants, self._donates = fn, name, constants, donates
        self._calls = 0

    def verify(self, call: Call, lowered: Lowered, replay: Callable[[], Any]) -> Any:
        """Replay a call and return its result, provided that it matches the eager run.

        Numbers must be equal, and tensors bitwise equal. A compiler sums in another order, and a step can
        amplify the rounding without limit (Adam turns a gradient that is pure rounding into an update of
        1e-3), so no fixed tolerance separates rounding from a bug. A compiled step is therefore compared in
        three ways: bit for bit, the replay with a direct run of the compiled function; bit for bit, the
        traced calls, run one by one, with the eager run; and up to rounding, which is measured, the compiled
        function with the traced calls. ``debug_print`` and taps are silent in all runs but the replay.

        Raises:
          CaptureError: If results differ, naming the leaves and the call; or if the eager run raises.
          MiscompileError: If a compiled function computes something other than the traced calls.
        """
        before = [state.arena.copy() for state in call.states]
        call = replace(call, live=[tensor.clone() for tensor in call.live])
        got = replay()
        self._calls += 1
        if lowered.plan.compiled:

            def fresh() -> Buffers:
                return lowered.buffers(call, [arena.copy() for arena in before])[0]

            result, outputs = self._rehearse(call, fresh(), lowered, lowered.plan)
            self._compare(call, result, "the compiled function run by itself", got)
            self._refuse_miscompiled(call, lowered, outputs, fresh())
            recorded, _ = self._rehearse(call, fresh(), lowered, lower_aten(lowered.program))
        else:
            recorded = got
        self._compare(call, self._eager_run(call, before), "the eager run", recorded)
        return got

    def _eager_run(self, call: Call, before: Sequence[Arena]) -> Any:
        slots = [arena.slots[s.start : s.stop] for s, arena in zip(call.states, before, strict=True)]
        try:
            with Silence(), AsTraced():
                return evaluate(self._fn, call, slots, call.live, self._constants, donates=self._donates)
        except Exception as error:  # whatever the user's function raises
            what = f"raises {type(error).__name__} in the eager run of verified call {self._calls}: {words_of(error)}"
            raise self._error(call, what) from error

    def _rehearse(
        self, call: Call, buffers: Buffers, lowered: Lowered, plan: Plan
    ) -> tuple[Any, list[Tensor]]:
        """Run a plan on the buffers of a call; return the function's result and the program's outputs."""
        with quiet():
            metrics = plan.bind(buffers)(())
        outputs = lowered.reference.made(metrics, buffers.slots)
        result = output_builder(lowered.program)(metrics)
        if not self._donates:
            return result, outputs
        state = call.states[0]
        values = buffers.slots[: state.stop - state.start]
        return (pytree.unflatten(state.node, entered(state.specs, values)), result), outputs

    def _refuse_miscompiled(
        self, call: Call, lowered: Lowered, outputs: Sequence[Tensor], buffers: Buffers
    ) -> None:
        judge = Judge(lowered.reference, partial(on_any, lowered.mesh, self._name))
        expected = lowered.reference.values(buffers, on_host=True)
        found = judge.compare(outputs, expected, buffers, lambda: None)
        if found:
            raise miscompiled(
                self._name,
                f"something else at verified call {self._calls}.",
                map(str, found),
                f"The compiled step is compared with its calls one by one.{self._kept(call)}",
            )

    def _compare(self, call: Call, expected: Any, run: str, got: Any) -> None:
        if not self._donates:
            rows = _differences("outputs", expected, got)
        elif not isinstance(expected, tuple) or len(expected) != 2:
            rows = [f"result  eager {type(expected).__name__}   replay (state, metrics)"]
        else:
            names = call.states[0].name, "metrics"
            triples = zip(names, expected, got, strict=True)
            rows = [row for name, want, have in triples for row in _differences(name, want, have)]
        if rows:
            raise self._error(call, f"replay differs from {run} at verified call {self._calls}.", rows)

    def _kept(self, call: Call) -> str:
        if not self._donates:
            return ""
        return f" The replay has changed the state: `{call.states[0].name}.latest()` is the new one."

    def _error(self, call: Call, what: str, rows: Iterable[str] = ()) -> CaptureError:
        return CaptureError.of(
            self._name,
            what,
            rows=list(rows),
            why=f"Something in the step is not a function of its arguments, or is not deterministic.{self._kept(call)}",
            fix="look for kernels with hidden state or atomics (`torch.use_deterministic_algorithms(True)`), and "
            "for host values reached in ways that are not watched.",
        )


def _differences(root: str, expected: Any, got: Any) -> list[str]:
    """Return where two trees differ, one line each."""
    pairs, treedef = pytree.flatten_with_path(expected)
    leaves, other = pytree.flatten(got)
    if treedef != other:
        return pytree.structure_diff(treedef, other, root) or [
            f"{root}  eager and replay differ in structure"
        ]
    return [
        f"{pytree.path_string(path, root)}  {text}"
        for (path, want), have in zip(pairs, leaves, strict=True)
        if (text := _difference(want, have))
    ]


def _difference(want: Any, have: Any) -> str:
    """Return how two leaves differ; an empty string if they do not."""
    if not isinstance(want, Tensor) or not isinstance(have, Tensor):
        return "" if have is want or same(have, want) else f"eager {_shown(want)}   replay {_shown(have)}"
    want, have = owned(held(want)).detach(), owned(held(have)).detach()
    if (want.shape, want.dtype) != (have.shape, have.dtype):
        return f"eager {_shown(want)}   replay {_shown(have)}"
    (((norm, greatest),), _) = (one.tolist() for one in between([have], [want]).known(1))
    if not (want.is_floating_point() or want.is_complex()):
        return f"differs in {round(norm**2)} of {want.numel()} elements" if norm else ""
    if greatest:
        return f"differs by {norm if math.isfinite(greatest) else math.inf:.3g} in norm"
    return "" if torch.equal(_negative_zeros(want), _negative_zeros(have)) else "differs in the sign of zeros"


def _shown(leaf: Any) -> str:
    return str(BufferSpec.of(leaf)) if isinstance(leaf, Tensor) else repr(leaf)


def _negative_zeros(tensor: Tensor) -> Tensor:
    parts = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()
    return (parts == 0) & parts.signbit()
