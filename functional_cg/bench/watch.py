"""Times the host watch: ``python -m functional_cg.bench.watch``.

A step that reads many values on the host is called in turns with one that reads none; a row says what a value adds to a
call. The values are numbers that differ from each other, so that each is compared for itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from ..graph_step import graph_fn
from .measure import environment

__all__ = ["main", "rows"]

_VALUES, _CALLS, _TURNS = 256, 200, 30
_Step = Callable[[torch.Tensor], Any]


def _items(count: int) -> _Step:
    held = {f"k{number}": float(number) for number in range(count)}
    names = tuple(held)
    return lambda x: x * sum(held[name] for name in names)


def _attributes(count: int) -> _Step:
    held = SimpleNamespace(**{f"k{number}": float(number) for number in range(count)})
    names = tuple(vars(held))
    return lambda x: x * sum(getattr(held, name) for name in names)


def _objects(count: int) -> _Step:
    held = tuple(SimpleNamespace(k=float(number)) for number in range(count))
    return lambda x: x * sum(one.k for one in held)


def _a_list(count: int) -> _Step:
    held = [float(number) for number in range(count)]
    return lambda x: x * sum(held)


_KINDS: tuple[tuple[str, Callable[[int], _Step]], ...] = (
    ("items of a dict", _items),
    ("attributes of an object", _attributes),
    ("attributes of as many objects", _objects),
    ("a list, summed", _a_list),
)


def rows(values: int, turns: int) -> Iterator[dict[str, Any]]:
    """Yield one row for each way to read.

    Args:
      values: Values that a step reads.
      turns: Timed blocks of each of the two steps.
    """
    x = torch.ones(2)
    for name, make in _KINDS:
        steps = [graph_fn(make(0)), graph_fn(make(values))]
        blocks: list[list[float]] = [[], []]
        for turn in range(-2, turns):
            for step, samples in zip(steps, blocks, strict=True):
                start = time.perf_counter()
                for _ in range(_CALLS):
                    step(x)
                if turn >= 0:
                    samples.append((time.perf_counter() - start) / _CALLS * 1e6)
        without, with_them = map(median, blocks)
        for step in steps:
            step.close()
        yield {
            "reads": name,
            "values": values,
            "us_per_call_without": round(without, 2),
            "us_per_call": round(with_them, 2),
            "us_per_value": round((with_them - without) / values, 4),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program, and print a line of JSON per row, with times in µs."""
    parser = argparse.ArgumentParser("python -m functional_cg.bench.watch", description=__doc__)
    parser.add_argument("--values", type=int, default=_VALUES, help="values that a step reads")
    parser.add_argument("--turns", type=int, default=_TURNS, help="timed blocks of each step")
    options = parser.parse_args(argv)
    for name in ("values", "turns"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected a positive integer, got {getattr(options, name)}")
    print(json.dumps(environment(torch.device("cpu"))), flush=True)
    for row in rows(options.values, options.turns):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
