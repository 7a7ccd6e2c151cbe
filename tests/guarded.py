"""Functions that test values and raise. Not in a test file, where pytest rewrites ``assert``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Self

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


def with_numbers(x: Tensor) -> Tensor:
    if (MOST == 10.0 and (x > MOST).any()) or (x.dim() == 0 and MOST):
        raise ValueError
    assert MOST == 10.0 and not (x < -MOST).any()  # noqa: PT018
    return x * 2


def of_numbers(x: Tensor) -> Tensor:
    assert x.max().item() <= MOST
    if (x < -MOST).any().item() or not -MOST <= x.min().item() <= MOST:
        raise ValueError
    if (x.abs() > MOST).sum():
        raise ValueError
    return x * 2


def of_a_number_in_float64(x: Tensor) -> Tensor:
    tenth = x.new_full((), 0.1)
    assert tenth.item() > 0.1  # in float32, they are equal
    assert (x.abs().max() + tenth).item() < MOST
    return x * 2


def of_a_number_that_stays(x: Tensor) -> Tensor:
    most = x.max().item()
    if most > MOST:
        raise ValueError
    return x * 2


def of_a_number_among_others(x: Tensor) -> Tensor:
    if x.max().item() in (MOST, 99.0):
        raise ValueError
    return x * 2


def of_an_absolute_number(x: Tensor) -> Tensor:
    assert abs(x.max().item()) < MOST
    return x * 2


def with_a_long_text(x: Tensor) -> Tensor:
    """Jumps further than one byte tells."""
    if MOST == 10.0 and (x.abs() > MOST).any():
        first = (x[0], x[1], x[2], x[3], x[0], x[1], x[2], x[3], x[0], x[1], x[2], x[3], x[0], x[1])
        second = (x[0], x[1], x[2], x[3], x[0], x[1], x[2], x[3], x[0], x[1], x[2], x[3], x[0], x[1])
        third = (x[0], x[1], x[2], x[3], x[0], x[1], x[2], x[3], x[0], x[1], x[2], x[3], x[0], x[1])
        raise ValueError(f"{first} {second} {third}")
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


@contextlib.contextmanager
def watched() -> Iterator[None]:
    try:
        yield
    finally:
        pass


@contextlib.contextmanager
def gated(times: int) -> Iterator[None]:
    for _ in range(times):
        break
    if not times:
        yield
        return
    yield


@contextlib.contextmanager
def returning() -> Iterator[None]:
    try:
        yield
    finally:
        return  # noqa: B012


class Timer:
    """Catches nothing, though its end reads as if it might."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            for name in ("one", "other"):
                if name == "one":
                    continue
                try:
                    {}[name]
                except KeyError:
                    pass


@contextlib.contextmanager
def forgiving() -> Iterator[None]:
    with contextlib.suppress(ValueError):
        yield


class Forgiving:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> bool:
        return kind is ValueError


class Unless:
    """Yields 1 until values are large."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.count = x, 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        self.count += 1
        if self.count > 2:
            raise StopIteration
        if (self.x > MOST).any():
            raise StopIteration
        return 1

    @property
    def small(self) -> bool:
        if (self.x > MOST).any():
            raise AttributeError
        return True


def raised_again(x: Tensor) -> Tensor:
    try:
        with watched():
            return bare(x)
    except ValueError as error:
        raise ValueError("bad batch") from error


def timed(x: Tensor) -> Tensor:
    timer = Timer()
    with timer, gated(0), gated(1):
        return bare(x)


def in_a_handler(x: Tensor) -> Tensor:
    try:
        raise LookupError
    except LookupError:
        return bare(x)


def caught_by_a_caller(x: Tensor) -> Tensor:
    try:
        return bare(x)
    except ValueError:
        return x * 3


def suppressed(x: Tensor) -> Tensor:
    y = x
    with contextlib.suppress(ValueError):
        y = bare(x)
    return y


def suppressed_by_its_own(x: Tensor) -> Tensor:
    y = x
    with Forgiving():
        y = bare(x)
    return y


def suppressed_further_out(x: Tensor) -> Tensor:
    y = x
    with torch.no_grad(), forgiving():
        y = bare(x)
    return y


def suppressed_by_a_return(x: Tensor) -> Tensor:
    y = x
    with returning():
        y = bare(x)
    return y


def suppressed_by_a_decorator(x: Tensor) -> Tensor:
    found = [x]
    forgiving()(lambda: found.append(bare(x)))()
    return found[-1]


def lost_in_finally(x: Tensor) -> Tensor:
    y = x
    try:
        y = bare(x)
    finally:
        return y  # noqa: B012


def counted(x: Tensor) -> Tensor:
    return x * sum(Unless(x))


def had(x: Tensor) -> Tensor:
    return x * 2 if hasattr(Unless(x), "small") else x


def distributed(x: Tensor) -> Tensor:
    try:
        return torch.distributions.Normal(x, x + 1, validate_args=True).variance
    except ValueError:
        return x


TESTED = [
    bare,
    asserted,
    after_python,
    either,
    both,
    with_numbers,
    of_numbers,
    of_a_number_in_float64,
    with_a_long_text,
    chained,
    otherwise,
    finally_,
    raised_again,
    timed,
    in_a_handler,
]
DECIDING = [
    of_a_number_that_stays,
    of_a_number_among_others,
    of_an_absolute_number,
    caught,
    returned,
    returned_sometimes,
    together,
    chained_the_other_way,
    inside_a_call,
    chosen,
    repeated,
    caught_by_a_caller,
    suppressed,
    suppressed_by_its_own,
    suppressed_further_out,
    suppressed_by_a_return,
    suppressed_by_a_decorator,
    lost_in_finally,
    counted,
    had,
    distributed,
]
