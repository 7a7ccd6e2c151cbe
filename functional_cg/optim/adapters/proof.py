"""``from_torch``: adapts an optimizer class and checks that both take the same steps."""

from __future__ import annotations

import warnings
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from functional_cg.ambient.setting import inside_a_step
from functional_cg.errors import CaptureError
from functional_cg.optim.adapters.adapted import Adapted
from functional_cg.optim.adapters.hosted import RefusedError
from functional_cg.optim.algebra.schedules import Schedule
from functional_cg.optim.algebra.selection import freeze

STEPS = 12  # steps to compare
TOLERANCE = 1e-5  # in f64, relative to how far a leaf has moved: some classes compute in f32
# Shapes of the leaves to compare on; the second row is for classes that accept only matrices.
_SHAPES = (((3, 4), (5,), ()), ((3, 4), (4, 2)))

# The native replacement for a class that cannot be adapted.
NATIVE = MappingProxyType({"Lookahead": "optim.lookahead(inner, sync_period, slow_step_size)"})


def from_torch(cls: type[torch.optim.Optimizer], **hyper: Any) -> Adapted:
    """Turn a class of ``torch.optim``, ``torch_optimizer`` or your own into a gradient transformation.

    The step of the class runs as a pure function: its counts and bias corrections are f64[] on the device, branches on
    them or on data are computed both ways and joined by ``torch.where``, and each parameter has a separate optimizer
    object, so classes whose parameters interact are refused. If the first step has a different formula, both formulas
    are computed. Prefer a transformation from this package where one exists: it computes nothing twice.

    Before returning, it runs the class and its adaptation side by side for 12 steps in f64.

    State: a count, and the class's state for each parameter, with numbers as f64[].

    Args:
      cls: The class.
      hyper: Its constructor arguments. ``lr`` may be a schedule, or f64[] from a state; the class is then constructed
        with 1.0.
    Raises:
      TypeError: If ``cls`` is not an optimizer class, or a number other than ``lr`` is a tensor.
      CaptureError: If the two differ, or the step needs something only the host has; names the class. Also if called
        inside a captured step.

    Example:
      >>> import torch
      >>> from functional_cg import optim
      >>> optimizer = optim.from_torch(torch.optim.SGD, lr=0.5, momentum=0.9)
      >>> params = {"w": torch.tensor([1.0, 2.0])}
      >>> optimizer.step({"w": torch.tensor([1.0, -1.0])}, optimizer.init(params), params)[0]
      {'w': tensor([0.5000, 2.5000])}
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(
            f"from_torch: takes an optimizer class, as in `from_torch(torch.optim.NAdam, lr=0.1)`, got {cls!r}"
        )
    tensors = [name for name, value in hyper.items() if name != "lr" and isinstance(value, Tensor | Schedule)]
    if tensors:
        raise TypeError(
            f"from_torch: `{tensors[0]}` is a tensor or a schedule; of the numbers only `lr` may be one"
        )
    learning_rate = hyper.pop("lr", None)
    pairs = freeze(dict(hyper))
    if isinstance(learning_rate, Tensor):  # from a state: checked earlier with a number, and not read here
        return Adapted(cls, learning_rate, pairs, joined=True)
    if inside_a_step():
        raise CaptureError.of(
            "",
            f"from_torch: `{cls.__name__}` is adapted inside of a step.",
            why="It runs the class to compare, which is no part of the step.",
            fix="make the optimizer once, outside: `TrainState.create(params=params, optimizer=from_torch(...))`.",
        )
    for joined in (False, True):
        candidate = Adapted(cls, learning_rate, pairs, joined=joined)
        try:
            _prove(candidate)
        except RefusedError as error:
            reason = str(error)
        else:
            return candidate
    raise CaptureError.of(
        "",
        f"from_torch: `{cls.__module__.partition('.')[0]}.{cls.__name__}` cannot be made a pure function.",
        rows=[f"{cls.__name__}  {reason}"],
        why="A graph repeats kernels: what the host decides or keeps is decided once, for ever.",
        fix=f"use `{NATIVE[cls.__name__]}`."
        if cls.__name__ in NATIVE
        else "write its formula as a transformation, `optim.GradientTransformation.from_functions(init, update)`.",
    )


def _constructed(tx: Adapted) -> tuple[Any, list[Tensor], list[list[Tensor]]]:
    """Construct the class on the leaves to compare on, with gradients for them."""
    for shapes in _SHAPES:
        generator = torch.Generator().manual_seed(0)
        params, *grads = (
            [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
            for _ in range(1 + STEPS)
        )
        try:
            return tx.made(params), params, grads
        except ValueError:  # accepts only matrices, or has wrong arguments, which fail for matrices too
            if shapes is _SHAPES[-1]:
                raise
        except Exception as error:
            raise RefusedError(f"cannot be constructed of parameters: {_words(error)}") from error
    raise AssertionError


def _prove(tx: Adapted) -> None:
    """Run an adapted class and the original side by side; raises ``RefusedError``, which says how they differ."""
    optimizer, theirs, steps = _constructed(tx)
    ours = start = [leaf.clone() for leaf in theirs]
    try:
        state = tx.init(ours)
        for count, grads in enumerate(steps):
            for leaf, grad in zip(theirs, grads, strict=True):
                leaf.grad = grad.clone()
            if callable(tx.learning_rate):
                optimizer.param_groups[0]["lr"] = float(tx.learning_rate(count))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
            ours, state = tx.advance(grads, state, ours)
            _compare(ours, theirs, start, count + 1)
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(f"its step raises {_words(error)}") from error


def _compare(ours: list[Tensor], theirs: list[Tensor], start: list[Tensor], step: int) -> None:
    if not all(torch.isfinite(leaf).all() for leaf in theirs):
        raise RefusedError(f"is not finite at step {step} with these arguments: nothing to compare")
    smallest = torch.finfo(torch.float64).tiny  # for a leaf that has not moved yet
    gap = max(
        float((a - b).abs().max() / (b - before).abs().max().clamp(min=smallest))
        for a, b, before in zip(ours, theirs, start, strict=True)
    )
    if not gap <= TOLERANCE:
        raise RefusedError(
            f"differs from itself as a function at step {step}, by {gap:.1e} of the way so far"
        )


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
