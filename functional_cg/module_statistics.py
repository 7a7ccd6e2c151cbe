"""Statistics of training by module: what modules return, and what an optimizer gets and does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from . import tree
from .ambient.observing import observing
from .checkpoint import names_of
from .messages.tracebacks import entry
from .optim.algebra.arithmetic import leaf_norms
from .state.leaf import owned
from .step.captures import Transform
from .step.statistics import ABSENT, OUTPUTS, UPDATES
from .tensors.aten import adds_up
from .transforms.taps import TAP

__all__ = ["statistics"]

P = ParamSpec("P")
R = TypeVar("R")


@entry("fcg.graph_step(fcg.statistics(train_step))")
def statistics(fn: Callable[P, R], *, keep: int = 1) -> Callable[P, R]:
    """Make a step that also looks at what its modules return and at what its optimizer does.

    The new function computes what ``fn`` does, and taps numbers by module, which ``step.statistics`` has after any
    call: of the value that a module returns, its root mean square and the largest magnitude; if the module has neither
    parameters nor submodules, as a ReLU, the share of its units that are zero for the whole batch; and of the
    parameters of a module, the norms of the gradient, of the weights and of the update. Nothing waits for the device
    until they are read. It costs a kernel or two for each module and parameter, so call the step that looks now and
    then::

        watched = fcg.graph_step(fcg.statistics(train_step))
        step = fcg.graph_step(train_step)
        for number, batch in enumerate(loader):
            state, metrics = (step if number % 50 else watched)(state, batch)
        print(watched.statistics)

    Modules are those of :func:`from_module`; the unit of an image, of 4 or 5 dimensions, is a channel in its second
    dimension, any other value has its units last. Parameters are those that ``state.apply_gradients`` gets. A module
    that is called several times has a row for each, and a model that is applied several times, as in ``microbatches``,
    a record for each. On a mesh, what modules return is the rank's own. A module whose calls ``torch.utils.checkpoint``
    may keep by a policy is left out. In a sweep, ``step.statistics.member(i)`` are those of one member. Compiled, the
    step agrees with one that does not look up to rounding, as kernels are fused in another way.

    Args:
      fn: ``fn(state, *inputs) -> (state, metrics)``.
      keep: How many records to keep on the device, to be drawn by ``report.statistics(step.statistics)``.
    Raises:
      TypeError: If ``fn`` is a captured step already.
      ValueError: If ``keep`` is below 1.

    Example:
      >>> import torch, functional_cg as fcg
      >>> apply, params, _ = fcg.from_module(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()))
      >>> @fcg.graph_step
      ... @fcg.statistics
      ... def step(state, x):
      ...     grads = fcg.grad(lambda params: apply(params, {}, x)[0].square().mean())(state.params)
      ...     return state.apply_gradients(grads), {}
      >>> state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
      >>> state, _ = step(state, torch.ones(2, 4))
      >>> step.statistics.modules
      ('0', '1', 'Sequential')
    """
    if isinstance(fn, Transform):
        raise TypeError(
            f"statistics: `{fn._name}` is captured already.\n"
            "To fix: look at the function, and capture that, `fcg.graph_step(fcg.statistics(train_step))`."
        )
    if type(keep) is not int or keep < 1:
        raise ValueError(f"statistics: `keep` has to be an integer of 1 or more, got {keep!r}")

    @wraps(fn)
    def observed(*args: P.args, **kwargs: P.kwargs) -> R:
        with observing(_Observer(keep)):
            return fn(*args, **kwargs)

    return observed


class _Observer:
    """Taps what it looks at."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._optimized: list[str] = []  # the rows of each optimizer; in a loop they come again

    def output(self, module: nn.Module, value: Any) -> Tensor | None:
        found = _first(value)
        if found is None or not found.numel():
            return None
        acts = not any(True for _ in (*module.children(), *module.parameters()))
        with torch.no_grad(), torch.autocast(found.device.type, enabled=False):
            x = owned(found).detach()
            norm = torch.linalg.vector_norm(x, 2, dtype=torch.promote_types(x.dtype, torch.float32))
            x = x if x.dim() > 1 else x.reshape(1, -1)
            unit = 1 if x.dim() in (4, 5) else x.dim() - 1
            others = [dim for dim in range(x.dim()) if dim != unit]
            largest = torch.linalg.vector_norm(x, math.inf, others if acts else None)
            dead = (largest == 0).float().mean() if acts else torch.tensor(ABSENT, device=x.device)
            return torch.stack([norm.float() / math.sqrt(x.numel()), largest.amax().float(), dead])

    def applied(self, model: str, paths: Sequence[str], numbers: Sequence[Tensor]) -> None:
        times, rows = Counter[str](), list[str]()
        for path in (path or model for path in paths):
            times[path] += 1
            rows.append(path if times[path] == 1 else f"{path} ({times[path]})")
        with torch.no_grad():
            TAP(f"{OUTPUTS}{model}", "\n".join(rows), self._keep, [torch.stack(list(numbers))])

    def updated(self, params: Any, grads: Any, new_params: Any) -> None:
        with torch.no_grad():
            moved = tree.map(lambda new, old: new - old if adds_up(old.dtype) else old, new_params, params)
            columns = [_norms(one) for one in (grads, params, moved)]
            absent = torch.tensor(ABSENT)
            if not (names := list(columns[1])):
                return
            table = [torch.stack([of.get(name, absent) for name in names]) for of in columns]
            if (rows := "\n".join(names)) not in self._optimized:
                self._optimized.append(rows)
            TAP(f"{UPDATES}{self._optimized.index(rows)}", rows, self._keep, [torch.stack(table, 1)])


def _first(value: Any) -> Tensor | None:
    """Return the first floating tensor among what a module returns."""
    if isinstance(value, Tensor):
        return value if adds_up(value.dtype) else None
    parts = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    )
    return next((found for part in parts if (found := _first(part)) is not None), None)


def _norms(values: Any) -> dict[str, Tensor]:
    leaves, treedef = tree.flatten(values)
    named = zip(names_of(treedef, "statistics", "params"), leaves, strict=True)
    counted = {name: leaf for name, leaf in named if adds_up(getattr(leaf, "dtype", None))}
    return dict(zip(counted, (norm.float() for norm in leaf_norms(list(counted.values()))), strict=True))
