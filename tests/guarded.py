"""Functions that test values and raise. Not in a test file, where pytest rewrites ``assert``."""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 10.0


def bare(x: Tensor) -> Tensor:
    if (x > MOST).any():
        raise ValueError("large")
    if torch.any(x < -MOST):
        raise ValueError("low")
    return x * 2


def asserted(x: Tensor) -> Tensor:
    assert (x.abs() <= MOST).all(), f"bad {x}"
    return x * 2


def after_python(x: Tensor | None) -> Tensor:
    if x is not None and x.max() >= MOST:
        text = "large"
        raise ValueError(text)
    assert x is None or x.min() > -MOST
    assert x is not None
    return x * 2


def either(x: Tensor) -> Tensor:
    if not (x < MOST).all() or torch.isnan(x).any() or (x < -MOST).any():
        raise ValueError
    return x * 2


def both(x: Tensor) -> Tensor:
    assert (x < MOST).all() and not (x < -MOST).any()  # noqa: PT018
    return x * 2


def chained(x: Tensor) -> Tensor:
    assert -MOST <= x.sum() <= MOST
    return x * 2


def otherwise(x: Tensor) -> Tensor:
    with torch.no_grad():
        if x is None:
            y = torch.zeros(4)
        elif (x.abs() < MOST).all():
            y = x * 2
        else:
            raise ValueError
    return y


def finally_(x: Tensor) -> Tensor:
    try:
        if (x.abs() > MOST).any():
            raise ValueError
    finally:
        y = x * 2
    return y


def caught(x: Tensor) -> Tensor:
    try:
        if (x > MOST).any():
            raise ValueError
    except ValueError:
        return x
    return x * 2


def returned(x: Tensor) -> Tensor:
    if (x > MOST).any():
        return x
    return x * 2


def returned_sometimes(x: Tensor) -> Tensor:
    if (x > MOST).any():
        if x.dim() > 1:
            return x
        raise ValueError
    return x * 2


def together(x: Tensor) -> Tensor:
    if (x > MOST).any() and (x < -MOST).any():
        raise ValueError
    return x * 2


def chained_the_other_way(x: Tensor) -> Tensor:
    if -MOST <= x.sum() <= MOST:
        raise ValueError
    return x * 2


def inside_a_call(x: Tensor) -> Tensor:
    if bool((x > MOST).any()):
        raise ValueError
    return x * 2


def chosen(x: Tensor) -> Tensor:
    if True if (x > MOST).any() else x.dim() > 1:
        raise ValueError
    return x * 2


def repeated(x: Tensor) -> Tensor:
    while (x > MOST).any():
        raise ValueError
    return x * 2


TESTED = [bare, asserted, after_python, either, both, chained, otherwise, finally_]
DECIDING = [
    caught,
    returned,
    returned_sometimes,
    together,
    chained_the_other_way,
    inside_a_call,
    chosen,
    repeated,
]
