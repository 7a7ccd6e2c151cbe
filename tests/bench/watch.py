"""Times the host watch: ``python -m tests.bench.watch``.

A step that reads many values on the host is called in turns with one that reads none; a row says what a value adds to a
call. The values are numbers that differ from each other, so that each is compared for itself; or tensors that never
change, of which a step computes nothing, so that a row has what it costs to see that they are as they were.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from functional_cg.graph_step import graph_fn
from functional_cg.nn import from_module

from .measure import environment

__all__ = ["main", "rows"]

_VALUES, _CALLS, _TURNS = 256, 20, 300
_Make = Callable[[int], Any]  # of a step that reads as many values


def _items(count: int) -> Any:
    held = {f"k{number}": float(number) for number in range(count)}
    names = tuple(held)
    return graph_fn(lambda x: x * sum(held[name] for name in names))


def _attributes(count: int) -> Any:
    held = SimpleNamespace(**{f"k{number}": float(number) for number in range(count)})
    names = tuple(vars(held))
    return graph_fn(lambda x: x * sum(getattr(held, name) for name in names))


def _objects(count: int) -> Any:
    held = tuple(SimpleNamespace(k=float(number)) for number in range(count))
    return graph_fn(lambda x: x * sum(one.k for one in held))


def _a_list(count: int) -> Any:
    held = [float(number) for number in range(count)]
    return graph_fn(lambda x: x * sum(held))


def _constants(count: int) -> Any:
    held = [torch.zeros(4) for _ in range(count)]
    return graph_fn(lambda x: x * sum(one.dim() for one in held), constants=held)


def _tables(count: int) -> Any:
    module = nn.Identity()
    vars(module)["held"] = SimpleNamespace(tables=[torch.zeros(4) for _ in range(count)])
    apply, params, buffers = from_module(module)
    step = graph_fn(lambda x: apply(params, buffers, x)[0] * len(type(module).__name__))
    return step  # and with it the module: what nobody holds cannot change


_KINDS: tuple[tuple[str, _Make], ...] = (
    ("items of a dict", _items),
    ("attributes of an object", _attributes),
    ("attributes of as many objects", _objects),
    ("a list, summed", _a_list),
    ("declared constants", _constants),
    ("constants of a module", _tables),
)


def rows(values: int, turns: int) -> Iterator[dict[str, Any]]:
    """Yield one row for each way to read.

    Args:
      values: Values that a step reads.
      turns: Timed blocks of each of the two steps.
    """
    x = torch.ones(2)
    for name, make in _KINDS:
        steps = [make(0), make(values)]
        blocks: list[list[float]] = [[], []]
        for turn in range(-2, turns):
            for step, samples in zip(steps, blocks, strict=True):
                start = time.perf_counter()
                for _ in range(_CALLS):
                    step(x)
                if turn >= 0:
                    samples.append((time.perf_counter() - start) / _CALLS * 1e6)
        without, with_them = map(min, blocks)  # whatever else the machine does adds to a time
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
    parser = argparse.ArgumentParser("python -m tests.bench.watch", description=__doc__)
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
