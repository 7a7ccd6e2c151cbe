"""Trains models of installed libraries and writes what works: ``python -m functional_cg.bench.zoo --page ZOO.md``.

Each model runs in a process of its own: an ordinary loop, the captured step and its eager run, with new data at each
call. ``works`` means that all three agree: bitwise with the eager run on a CPU, else up to how rounding errors grow.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from .case import Case, Size, chosen
from .judge import Outcome, judge
from .page import page

_LIBRARIES = ("timm", "torchvision", "transformers")


def main(arguments: Sequence[str]) -> int:
    """Run the zoo; returns how many models are wrong or crash."""
    parser = argparse.ArgumentParser(prog="python -m functional_cg.bench.zoo", description=__doc__)
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="NAME", help="beginnings of names or libraries"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lowering", help="as for graph_step; default: aten on a CPU, auto elsewhere")
    parser.add_argument("--calls", type=int, help="steps of each; default: 4 on a CPU, 8 elsewhere")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300, metavar="S", help="for each model")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write a page of what works and what does not"
    )
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args(arguments)
    on_cpu = options.device == "cpu"
    options.lowering = options.lowering or ("aten" if on_cpu else "auto")
    options.calls = options.calls or (4 if on_cpu else 8)
    cases = chosen(_cases(Size.of(options.device)), options.only)
    if options.list:
        sys.stdout.writelines(f"{case.library:12} {case.name}\n" for case in cases)
        return 0
    found: dict[str, list[tuple[str, Outcome]]] = {}
    for case, outcome, seconds in _outcomes(cases, options):
        found.setdefault(case.library, []).append((case.name, outcome))
        print(
            f"{outcome.verdict:9} {case.library:12} {case.name:44} {seconds:5.0f} s  {outcome.reason[:120]}",
            flush=True,
        )
    text = page(
        {f"{name} {version(name)}": sorted(found[name], key=lambda row: row[0]) for name in sorted(found)}
    )
    if options.page:
        options.page.write_text(text)
    print(text.partition("\n\n")[2].partition("\n\n")[0])
    return sum(outcome.verdict in ("wrong", "crashed") for rows in found.values() for _, outcome in rows)


def _cases(size: Size) -> Iterator[Case]:
    """Yield the cases of the libraries that are installed."""
    from . import hugging_face, vision

    for library, make in zip(
        _LIBRARIES, (vision.of_timm, vision.of_torchvision, hugging_face.cases), strict=True
    ):
        try:
            version(library)
        except PackageNotFoundError:
            print(f"{library} is not installed", file=sys.stderr)
        else:
            yield from make(size)


def _outcomes(cases: Iterable[Case], options: Any) -> Iterator[tuple[Case, Outcome, float]]:
    """Judge cases in processes of their own, several at a time."""
    context: Any = multiprocessing.get_context("fork" if options.device == "cpu" else "spawn")
    left = list(cases)[::-1]
    running: dict[Any, tuple[Case, Any, float]] = {}
    while left or running:
        while left and len(running) < options.jobs:
            case = left.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(case, options, there))
            process.start()
            there.close()
            running[here] = case, process, time.monotonic()
        for connection in [*wait(list(running), timeout=1)]:
            assert isinstance(connection, Connection)
            case, process, start = running.pop(connection)
            try:
                outcome = connection.recv()
            except EOFError:
                process.join()
                outcome = Outcome("crashed", f"its process ended with {process.exitcode}")
            process.join()
            yield case, outcome, time.monotonic() - start
        for connection, (case, process, start) in list(running.items()):
            if time.monotonic() - start > options.timeout:
                del running[connection]
                process.kill()
                process.join()
                yield case, Outcome("unusable", f"takes more than {options.timeout:.0f} s"), options.timeout


def _child(case: Case, options: Any, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    most = Size.of(options.device).most
    pipe.send(judge(case, options.device, options.lowering, options.calls, most))


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
