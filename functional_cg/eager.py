"""The oracle: the user's Python function run once on real values, in the setting that a trace has.

Leaves are private copies in the strides of their slots, inputs too; the new state is committed into the slots. A
replay of the aten lowering is bitwise equal to this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import tree as pytree
from .arena import Arena
from .errors import CaptureError, LayoutError
from .signature import Call
from .stages.inspect import refuse_new_state
from .state import Handle
from .surroundings import canonical

__all__ = ["Shadow", "run_eager"]


@torch.inference_mode(False)  # results are ordinary tensors
def run_eager(fn: Callable[..., Any], call: Call, name: str, *, donates: bool) -> Any:
    """Run ``fn`` on private copies; a donating call commits the new state and returns its handle.

    Raises:
      LayoutError: If the new state is unlike the old one; nothing was written.
    """
    result = _evaluate(fn, call, [_copies(s.arena, s.start, s.stop) for s in call.states], call.live)
    if not donates:
        return pytree.map(_own, result)
    new, metrics = _checked(result, call, name)
    state = call.states[0]
    with state.arena.lock:
        state.handle._check()
        object.__setattr__(state.handle, "_donor", name)
        state.lease.write(range(len(new)), new)
    return Handle(state.lease, state.lease.cell[0]), metrics


def _evaluate(
    fn: Callable[..., Any], call: Call, slots: Sequence[Sequence[Tensor]], live: Sequence[Tensor]
) -> Any:
    with canonical():
        trees = [
            pytree.unflatten(s.handle._node, leaves) for s, leaves in zip(call.states, slots, strict=True)
        ]
        inputs = [
            _private(t, spec.stride, call.device) for t, spec in zip(live, call.layout.specs, strict=True)
        ]
        args, kwargs = call.assemble(trees, inputs)
        return fn(*args, **kwargs)


def _checked(result: Any, call: Call, name: str) -> tuple[list[Tensor], Any]:
    """New state leaves and owned metrics of a donating function's result."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise LayoutError.of(
            name,
            "does not return a pair of new state and metrics.",
            rows=[f"result  expected (state, metrics)   got {type(result).__name__}"],
            fix="`return state, {}` if there are no metrics; for a read-only function use `graph_fn`.",
        )
    state = call.states[0]
    new, treedef = pytree.flatten(result[0])
    refuse_new_state(name, state.handle._node, [s.spec for s in state.arena.plan.slots], treedef, new)
    return new, pytree.map(_own, result[1])


def _copies(arena: Arena, start: int, stop: int) -> list[Tensor]:
    arena.join()
    with torch.no_grad():
        return [slot.clone() for slot in arena.slots[start:stop]]


def _private(tensor: Tensor, stride: tuple[int, ...], device: torch.device) -> Tensor:
    """A copy on the step's device with the strides of its slot."""
    out = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=device)
    return out.copy_(tensor)


def _own(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


class Shadow:
    """``debug="verify"``: runs a call's function eagerly on the values from before the call, and compares.

    Args:
      fn: The user's function.
      name: Its name.
      donates: Whether it returns a new state.
    """

    def __init__(self, fn: Callable[..., Any], name: str, *, donates: bool) -> None:
        self._fn, self._name, self._donates = fn, name, donates
        self._calls = 0

    def verify(self, call: Call, replay: Callable[[], Any]) -> Any:
        """Replay a call and return its result, if it is bitwise that of the eager run.

        Raises:
          CaptureError: Naming the leaf and the call that differ first.
        """
        slots = [_copies(s.arena, s.start, s.stop) for s in call.states]
        live = [tensor.clone() for tensor in call.live]
        result = replay()
        self._calls += 1
        expected = _evaluate(self._fn, call, slots, live)
        if not self._donates:
            self._compare("outputs", expected, result)
            return result
        self._compare("state", expected[0], result[0])
        self._compare("metrics", expected[1], result[1])
        return result

    def _compare(self, root: str, expected: Any, got: Any) -> None:
        pairs, _ = pytree.flatten_with_path(expected)
        rows = []
        for (path, want), have in zip(pairs, pytree.leaves(got), strict=True):
            if isinstance(want, Tensor) and not _same_bits(want.detach(), have.detach()):
                distance = (
                    (want.double() - have.double()).abs().max().item()
                    if not want.is_complex()
                    else float("nan")
                )
                rows.append(f"{pytree.path_string(path, root)}  differs by up to {distance:.3g}")
        if rows:
            raise CaptureError.of(
                self._name,
                f"replay differs from the eager run at verified call {self._calls}.",
                rows=rows,
                why="Something in the step is not a function of its arguments, or is not deterministic.",
                fix="look for kernels with hidden state or atomics (`torch.use_deterministic_algorithms(True)`), and "
                "for host values reached in ways that are not watched.",
            )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
