"""Trains models of installed libraries and writes what works: ``python -m tests.bench.zoo --page ZOO.md``.

Each model runs in a process of its own: an ordinary loop, the captured step and its eager run, with new data at each
call. ``works`` means that all three agree. Each call is compared with an eager run from the same state: bitwise on a
CPU; if the step is compiled, a leaf may be off by 8 times what it differs between eager runs in other roundings, and by
more in one call of eight if none is in float64.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from . import hugging_face, vision
from .case import Case, Size, chosen
from .judge import Outcome
from .page import page
from .processes import Run, outcomes

_LIBRARIES = ("timm", "torchvision", "transformers")


def main(arguments: Sequence[str]) -> int:
    """Run the zoo; returns how many models are wrong or crash."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.zoo", description=__doc__)
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
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each model")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args(arguments)
    on_cpu = options.device == "cpu"
    cases = chosen(_cases(Size.of(options.device)), options.only)
    if options.list:
        sys.stdout.writelines(f"{case.library:12} {case.name}\n" for case in cases)
        return 0
    found: dict[str, list[tuple[str, Outcome]]] = {}
    run = Run(
        device=options.device,
        lowering=options.lowering or ("aten" if on_cpu else "auto"),
        calls=options.calls or (4 if on_cpu else 8),
        jobs=options.jobs,
        timeout=options.timeout,
    )
    for case, outcome, seconds in outcomes(cases, run):
        found.setdefault(case.library, []).append((case.name, outcome))
        line = (
            json.dumps(
                {"model": case.name, "library": case.library, **asdict(outcome), "seconds": round(seconds)}
            )
            if options.json
            else f"{outcome.verdict:9} {case.library:12} {case.name:44} {seconds:5.0f} s  {outcome.reason[:240]}"
        )
        print(line, flush=True)
    text = page(
        {f"{name} {version(name)}": sorted(found[name], key=lambda row: row[0]) for name in sorted(found)}
    )
    if options.page:
        options.page.write_text(text)
    print(text.partition("\n\n")[2].partition("\n\n")[0])
    return sum(outcome.verdict in ("wrong", "crashed") for rows in found.values() for _, outcome in rows)


def _cases(size: Size) -> Iterator[Case]:
    """Yield the cases of the libraries that are installed."""
    for library, make in zip(
        _LIBRARIES, (vision.of_timm, vision.of_torchvision, hugging_face.cases), strict=True
    ):
        try:
            version(library)
        except PackageNotFoundError:
            print(f"{library} is not installed", file=sys.stderr)
        else:
            yield from make(size)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
