"""The input of a trace: the function, and the specs of its states and inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...call.signature import Call
from ...state.arena import BufferSpec
from ...tree import Treedef

__all__ = ["BoundState", "Recipe"]


@dataclass(frozen=True, slots=True)
class BoundState:
    """A state argument, read from its arena's slots rather than copied in."""

    name: str
    treedef: Treedef
    specs: tuple[BufferSpec, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that a trace needs to know about a step.

    Attributes:
      function: The user's function.
      name: Its name, for messages.
      states: Bound states, in order; the first is donated if ``donates``.
      inputs: Specs of the input leaves.
      input_names: Their key paths, as text.
      apply: Calls the function on trees of the states and leaves of the inputs.
      constants: Declared constants.
      donates: Whether the function returns (new_state, metrics) rather than just outputs.
      value: Returns a copy on the host of what a slot of the states holds; None if nobody knows.
      objects: (name, object) for each argument that is not a tensor: static arguments, objects among the inputs.
    """

    function: Callable[..., Any]
    name: str
    states: tuple[BoundState, ...]
    inputs: tuple[BufferSpec, ...]
    input_names: tuple[str, ...]
    apply: Callable[[Callable[..., Any], Sequence[Any], Sequence[Any]], Any]
    constants: tuple[tuple[str, Tensor], ...]
    donates: bool
    value: Callable[[int], Tensor | None]
    objects: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(
        cls,
        call: Call,
        function: Callable[..., Any],
        constants: tuple[tuple[str, Tensor], ...],
        *,
        donates: bool,
    ) -> Recipe:
        """Return the recipe of a call."""
        return cls(
            function,
            call.function,
            tuple(BoundState(s.name, s.node, s.specs) for s in call.states),
            call.layout.specs,
            call.layout.live_names,
            call.apply,
            constants,
            donates,
            call.value,
            call.objects,
        )
