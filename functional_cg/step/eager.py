"""The oracle: run the user's Python function once on real values, in the same setting as a trace.

Leaves and inputs are private copies with the strides of their slots; the new state is committed into the
slots. A replay of the aten lowering is bitwise equal to this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import tree as pytree
from ..ambient.modes import ordinary, restore, surrounding
from ..ambient.setting import canonical
from ..call.signature import Call, new_state_and_metrics
from ..shards.peers import among, together
from ..stages.trace.results import refuse_new_state
from ..state.boundary import entered, held, left, mesh_of, shown
from ..transforms.taps import Taps

__all__ = ["evaluate", "run_eager"]


def run_eager(
    fn: Callable[..., Any], call: Call, name: str, taps: Taps, constants: Iterable[Tensor], *, donates: bool
) -> Any:
    """Run ``fn`` on private copies; a donating call commits the new state and returns its handle.

    Tapped values go to ``taps``.

    Raises:
      LayoutError: If the new state does not match the old one; nothing is written.
    """
    with ordinary():  # results are ordinary tensors
        mesh = mesh_of([spec for s in call.states for spec in s.specs])
        named = zip(call.layout.live_names, call.layout.specs, strict=True)
        lines = [f"run `{name}` eagerly", *(f"{leaf}  {str(spec).partition('@')[0]}" for leaf, spec in named)]
        together(mesh, name, "\n".join(lines))
        with among(mesh, name), taps.listening():
            slots = [s.handle._copied() for s in call.states]
            result = evaluate(fn, call, slots, call.live, constants, donates=donates)
        if not donates:
            return pytree.map(_own, result)
        changed, metrics = new_state_and_metrics(name, result)
        state, (leaves, treedef) = call.states[0], pytree.flatten(changed)
        refuse_new_state(name, state.node, [s.spec for s in state.arena.plan.slots], treedef, leaves)
        new, own = list(map(held, leaves)), pytree.map(_own, metrics)
        return state.arena.turn.alone(partial(state.handle._written, range(len(new)), new, name), name), own


def evaluate(
    fn: Callable[..., Any],
    call: Call,
    slots: Sequence[Sequence[Tensor]],
    live: Sequence[Tensor],
    constants: Iterable[Tensor],
    *,
    donates: bool,
) -> Any:
    """Call ``fn`` with these leaves in place of the states' slots and the inputs; return its result.

    Args:
      constants: The step's declared constants, which ``fn`` closes over.
    """
    modes = surrounding()
    try:
        with canonical(mesh_of([spec for s in call.states for spec in s.specs]), constants):
            trees = [
                pytree.unflatten(s.node, entered(s.specs, leaves))
                for s, leaves in zip(call.states, slots, strict=True)
            ]
            inputs = [
                torch.empty_strided(one.shape, spec.stride, dtype=one.dtype, device=call.device).copy_(one)
                for one, spec in zip(live, call.layout.specs, strict=True)
            ]
            result = call.apply(fn, trees, inputs)
            return left(call.states[0].specs, call.states[0].node, result) if donates else shown(result)
    except BaseException:
        restore(modes)
        raise


def _own(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
