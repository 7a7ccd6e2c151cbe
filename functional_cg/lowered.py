"""What lowering and capture leave behind: ``Lowered`` (a plan, no device work) and ``Captured`` (bound to memory)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .arena import Arena, dtype_name
from .inputs import InputLayout, layout_differences
from .signature import Call
from .stages.capture import Replay
from .stages.inspect import Inspection
from .stages.lower import ExecutionPlan
from .stages.program import Program, Var
from .stages.trace import BoundState
from .stages.watch import HostWatch
from .state import Lease
from .tree import KeyPath, Treedef, path_string, structure_diff

__all__ = ["Captured", "Lowered"]


@dataclass(eq=False)
class Captured:
    """A lowered step captured on one arena (or several, for a function of several states).

    Attributes:
      call: ``call(args, kwargs)``: the result, or a miss if the call does not fit this capture.
      replay: The backend's replay.
      arenas: The memory that the capture is bound to, states first; it outlives the capture.
      constants: Tensors that the step owns; they live as long as the capture, which knows their addresses only.
      treedef: Structure of the first state.
      paths: Its key paths.
    """

    call: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    replay: Replay
    arenas: tuple[Arena, ...]
    constants: tuple[Tensor, ...]
    treedef: Treedef | None
    paths: list[KeyPath]

    @classmethod
    def of(
        cls,
        fast: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        replay: Replay,
        call: Call,
        constants: Sequence[Tensor],
    ) -> Captured:
        """A capture made for a call; it keeps the call's memory, not its handles."""
        lease = call.states[0].lease if call.states else None
        return cls(
            fast,
            replay,
            tuple(state.arena for state in call.states),
            tuple(constants),
            lease.treedef if lease else None,
            lease.paths if lease else [],
        )

    @property
    def arena(self) -> Arena:
        return self.arenas[0]

    @property
    def spare(self) -> bool:
        """Whether the last handle and leaf of one of its states is gone."""
        return any(arena.free for arena in self.arenas)

    def lease_again(self) -> Lease:
        """Start a new use of the first arena, once the old one has ended."""
        assert self.treedef is not None
        assert self.arena.free
        return Lease(self.arena, self.treedef, self.paths)

    def close(self) -> None:
        """Free the capture; the arenas live on as long as their handles."""
        self.replay.close()


@dataclass(eq=False)
class Lowered:
    """A traced, checked and planned step: no device work was done for it.

    Attributes:
      name: Name of the user's function.
      states: The states that it binds.
      layout: Layout of its inputs.
      program: The traced calls.
      plan: What runs.
      watch: Host values that are compared at each call.
      inspection: A purity certificate that prints.
    """

    name: str
    states: tuple[BoundState, ...]
    layout: InputLayout
    program: Program
    plan: ExecutionPlan
    watch: HostWatch
    inspection: Inspection
    capture_here: Callable[[], Captured] | None = None

    def at(self, capture_here: Callable[[], Captured]) -> Lowered:
        """The same plan, ready to be captured for the arguments of one call."""
        return replace(self, capture_here=capture_here)

    def capture(self) -> Captured:
        """Capture the plan on the memory of the state that it was lowered with."""
        assert self.capture_here is not None
        return self.capture_here()

    def fits(self, call: Call) -> bool:
        """Whether a call has this layout."""
        return (
            len(call.states) == len(self.states)
            and not self.state_differences(call)
            and call.layout.treedef == self.layout.treedef
            and not layout_differences(self.layout, call.layout)
        )

    def state_differences(self, call: Call) -> list[str]:
        """How the states of a call differ from those of this plan, one line each."""
        rows: list[str] = []
        if len(call.states) != len(self.states):
            return [f"states  expected {len(self.states)}   got {len(call.states)}"]
        for want, have in zip(self.states, call.states, strict=True):
            if have.handle._node != want.treedef:
                rows += structure_diff(want.treedef, have.handle._node, want.name)
                continue
            slots = have.arena.plan.slots[have.start : have.stop]
            rows += [
                f"{path_string(path, want.name)}  expected {spec}   got {slot.spec}"
                for path, spec, slot in zip(want.treedef.paths(), want.specs, slots, strict=True)
                if spec != slot.spec
            ]
        return rows

    def as_text(self) -> str:
        """The traced calls and the plan that runs them."""
        return f"{self.program.as_text()}\n\n{self.plan.as_text()}"

    def memory_analysis(self) -> dict[str, int]:
        """Bytes by use: ``state``, ``inputs``, ``constants``, ``metrics``, and ``temporaries`` (their sum)."""
        born = [var for instr in self.program.instrs for var in instr.outputs()]
        first = {var.storage: var.spec.nbytes for var in reversed(born)}
        outside = {var.storage for var in (*self.program.slots, *self.program.inputs)}
        return {
            "state": sum(var.spec.nbytes for var in self.program.slots),
            "inputs": sum(var.spec.nbytes for var in self.program.inputs),
            "constants": sum(constant.var.spec.nbytes for constant in self.program.constants),
            "metrics": sum(var.spec.nbytes for var in self.program.outputs if isinstance(var, Var)),
            "temporaries": sum(size for storage, size in first.items() if storage not in outside),
        }

    def __str__(self) -> str:
        dtypes = sorted({dtype_name(var.spec.dtype) for var in self.program.slots})
        sizes = ", ".join(f"{name} {size:,} B" for name, size in self.memory_analysis().items())
        return f"{self.inspection}\n  memory: {sizes}\n  dtypes of the state: {', '.join(dtypes)}"
