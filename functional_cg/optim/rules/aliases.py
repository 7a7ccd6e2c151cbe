"""What optimizers are made of: links in a row, with a fused op of torch that runs them all where there is one.

A fused op is bitwise what ``torch.optim`` runs with ``fused=True``, but for SGD of 16-bit leaves on a CPU, where
torch's op skips elements: there it runs on float32 copies, and rounds once. It agrees with the links to a few
roundings: per step, relative to the largest number in the leaf, 1e-6 in float32, 1e-12 in float64, and an ulp in
16 bits, 8e-3 in bfloat16 and 1e-3 in float16, where ``eps`` must not round to 0.

A learning rate is a Python number (a constant of the capture), a schedule, or f32[]. A parameter the loss does not
use has a zero gradient, not None as in ``torch.optim``: moments and weight decay still move it.
"""

# Annotations are values here, not strings: dataclasses of other modules inherit the fields.
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from functional_cg.ambient.running import hand_back
from functional_cg.optim.algebra.base import (
    EmptyState,
    GradientTransformation,
    Optimizer,
    OptState,
    Params,
    ScalarOrSchedule,
    Shared,
    StepFn,
    Updates,
)
from functional_cg.optim.algebra.combine import Sequence
from functional_cg.optim.algebra.links import scale_by_learning_rate
from functional_cg.optim.algebra.selection import resolve_flags
from functional_cg.optim.rules import fused as _fused


@dataclass(frozen=True)
class Alias(Optimizer, Sequence):
    """An optimizer that is short for a chain; its state is that of the chain, a tuple.

    The chain is the links of the classes ``rule``, each made of the fields that have the names of its own, and the
    learning rate.

    Attributes:
      learning_rate: Number, f32[], or schedule.
    """

    learning_rate: ScalarOrSchedule

    rule: ClassVar[tuple[type[GradientTransformation], ...]]

    @property
    def links(self) -> tuple[GradientTransformation, ...]:
        """The transformations that run in sequence."""
        return (*(self._made(link) for link in self.rule), scale_by_learning_rate(self.learning_rate))

    def _made(self, link: Any) -> GradientTransformation:
        given = {one.name: getattr(self, one.name) for one in fields(link) if hasattr(self, one.name)}
        return link(**given)  # type: ignore[no-any-return]

    @property
    def paths(self) -> list[tuple[GradientTransformation, ...]]:
        return [(self,)]

    def update(
        self, updates: Updates, state: OptState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        new = super().update(updates, state, params)
        hand_back((updates, state), new)
        return new


class Fused(Alias):
    """An alias whose links one fused op of torch runs.

    The op takes no tensors but the learning rate and the decay of weights, and only floats of the rest.
    """

    packet: ClassVar[Any]  # the op
    names: ClassVar[Mapping[str, str]]  # a field -> what the op calls it
    constants: ClassVar[Mapping[str, Any]]  # other arguments of the op

    @property
    def step(self) -> StepFn | None:
        numbers = [getattr(self, name) for name in self.names]
        return None if any(isinstance(number, Tensor) for number in numbers) else self._step

    def _step(self, grads: Updates, state: OptState, params: Params) -> tuple[Params, OptState]:
        lr, last = scale_by_learning_rate(self.learning_rate).rate(state[-1])
        at = next(
            (i for i, link in enumerate(self.links[:-1]) if cast("Any", link).keeps is not EmptyState), None
        )
        moments = None if at is None else state[at]
        kept = {} if moments is None else moments._asdict()
        count = kept.pop("count") + 1 if "count" in kept else None
        numbers = {key: getattr(self, name) for name, key in self.names.items()}
        decay = getattr(self, "weight_decay", 0.0)
        # The op takes only a number: with a tensor, the same factor is applied first.
        keep = Shared(1 - lr * decay) if isinstance(decay, Tensor) else None

        def call(columns: Any, decays: Any) -> Any:
            if decays and keep is not None:
                columns = [torch._foreach_mul(columns[0], keep(columns[0][0])), *columns[1:]]
            weight_decay = decay if decays and keep is None else 0.0
            return _fused.run(
                self.packet,
                columns,
                lr=lr,
                count=count,
                weight_decay=weight_decay,
                **self.constants,
                **numbers,
            )

        flags = resolve_flags(getattr(self, "mask", None), params)
        new, *values = _fused.run_on_trees(call, [params, grads, *kept.values()], flags)
        if at is None or moments is None:
            return new, (*state[:-1], last)
        counted = {} if count is None else {"count": count}
        moved = moments._replace(**dict(zip(kept, values, strict=True)), **counted)
        return new, (*state[:at], moved, *state[at + 1 : -1], last)
