"""Statistics of training by module: what modules return, and what an optimizer gets and does."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from . import tree
from .ambient.observing import observing
from .checkpoint import names_of
from .messages.source import here
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
    that is called several times has a row for each. A model that is applied several times in a call, as in
    ``microbatches``, has a record for each time, and so has an update; the last ones of a call stand together. An
    update that ``cond`` or ``active=`` undoes is shown as it was computed. On a mesh, outputs are the rank's own.
    What runs in another dispatch mode, such as a policy of ``torch.utils.checkpoint``, is not looked at. In a sweep,
    ``step.statistics.member(i)`` are those of one member. Compiled, a step that looks and one that does not agree up to
    rounding, as kernels are fused in another way.

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
    if not callable(fn):
        raise TypeError(
            f"statistics: expected a function, got {type(fn).__name__}.\nTo fix: `fcg.statistics(train_step)`."
        )
    if isinstance(fn, Transform):
        raise TypeError(
            f"statistics: `{fn._name}` is captured already.\n"
            "To fix: look at the function, and capture that, `fcg.graph_step(fcg.statistics(train_step))`."
        )
    if type(keep) is not int or keep < 1:
        raise ValueError(f"statistics: `keep` has to be an integer of 1 or more, got {keep!r}")

    names = _Names()

    @wraps(fn)
    def observed(*args: P.args, **kwargs: P.kwargs) -> R:
        with observing(_Observer(keep, names)):
            return fn(*args, **kwargs)

    return observed


class _Names:
    """Names of models and optimizers, the same in each call and capture."""

    def __init__(self) -> None:
        self._models: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._kinds, self._lines = Counter[str](), list[tuple[str, str]]()

    def of_model(self, model: Any, kind: str) -> str:
        """Return the name of a model: its class, and a number from the second of a class on."""
        if model not in self._models:
            self._kinds[kind] += 1
            self._models[model] = kind if self._kinds[kind] == 1 else f"{kind}#{self._kinds[kind]}"
        return self._models[model]

    def of_update(self, line: str, rows: str) -> str:
        """Return the name of an update: by the line that makes it, and its parameters."""
        if (line, rows) not in self._lines:
            self._lines.append((line, rows))
        return f"{UPDATES}{self._lines.index((line, rows)) + 1}"


class _Observer:
    """Taps what it looks at."""

    def __init__(self, keep: int, names: _Names) -> None:
        self._keep, self._names = keep, names

    def output(self, module: nn.Module, value: Any) -> Tensor | None:
        found = _first(value)
        if found is None or not found.numel():
            return None
        acts = not any(True for _ in (*module.children(), *module.parameters()))
        with torch.no_grad(), torch.autocast(found.device.type, enabled=False):
            x, wide = owned(found).detach(), torch.promote_types(found.dtype, torch.float32)
            norm = torch.linalg.vector_norm(x, 2, dtype=wide)
            x = x if x.dim() > 1 else x.reshape(1, -1)
            unit = 1 if x.dim() in (4, 5) else x.dim() - 1
            others = [dim for dim in range(x.dim()) if dim != unit]
            top = torch.linalg.vector_norm(x, math.inf, others if acts else None).to(wide)
            largest = top.amax()
            # Of what is not finite nobody knows which units are dead.
            dead = (top == 0).to(wide).mean() + 0 * largest if acts else torch.full_like(norm, ABSENT)
            return torch.stack([norm / math.sqrt(x.numel()), largest, dead])

    def applied(self, model: Any, kind: str, paths: Sequence[str], numbers: Sequence[Tensor]) -> None:
        name, times, rows = self._names.of_model(model, kind), Counter[str](), list[str]()
        for path in (path or name for path in paths):
            times[path] += 1
            rows.append(path if times[path] == 1 else f"{path} ({times[path]})")
        with torch.no_grad():
            wide = max((one.dtype for one in numbers), key=lambda dtype: dtype.itemsize)
            table = torch.stack([one.to(wide) for one in numbers])
            TAP(f"{OUTPUTS}{name}", "\n".join(rows), self._keep, [table])

    def updated(self, params: Any, grads: Any, new_params: Any) -> None:
        with torch.no_grad():
            moved = tree.map(lambda new, old: new - old if adds_up(old.dtype) else old, new_params, params)
            columns = [_norms(one) for one in (grads, params, moved)]
            if not (names := list(columns[1])):
                return
            absent = torch.full_like(next(iter(columns[1].values())), ABSENT)
            table = [torch.stack([of.get(name, absent).to(absent.dtype) for name in names]) for of in columns]
            rows = "\n".join(name or "params" for name in names)
            TAP(self._names.of_update(here(), rows), rows, self._keep, [torch.stack(table, 1)])


def _first(value: Any) -> Tensor | None:
    """Return the first floating tensor among what a module returns."""
    if isinstance(value, Tensor):
        return value if adds_up(value.dtype) else None
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    else:
        parts = [getattr(value, one.name) for one in fields(value)] if is_dataclass(value) else ()
    return next((found for part in parts if (found := _first(part)) is not None), None)


def _norms(values: Any) -> dict[str, Tensor]:
    leaves, treedef = tree.flatten(values)
    named = zip(names_of(treedef, "statistics", "params"), leaves, strict=True)
    counted = {name: leaf for name, leaf in named if adds_up(getattr(leaf, "dtype", None))}
    return dict(zip(counted, leaf_norms(list(counted.values())), strict=True))
