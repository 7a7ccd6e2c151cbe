"""Times a training step in several systems: ``python -m tests.bench --workload mlp-tiny,gpt-nano``.

With several workloads, each runs in its own process, so that they cannot disturb each other.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from .many import first_call
from .many.first_call import FIRST_CALL
from .many.processes import in_processes
from .measure import Row, bench, environment
from .modules import names, workload
from .system import BUDGETS, ONCE, OPPONENTS, OURS, TUNED, VARIANTS
from .tables import plot, refuse_unfit_path, table

__all__ = ["main"]

_PROGRAM = "python -m tests.bench"
_ON_CUDA = "mlp-tiny,gpt-nano,gpt2-124m"
_ON_CPU = "mlp-4x64,mlp-4x256"


class _Parser(argparse.ArgumentParser):
    """Argument parser with one-line errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def _list(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Make an argparse type: names separated by commas."""

    def parse(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in chosen if name not in known]
        if unknown or not chosen:
            wrong = f"unknown {', '.join(unknown)}" if unknown else "nothing is named"
            raise argparse.ArgumentTypeError(f"{wrong}; choose from {', '.join(known)}")
        return chosen

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no GPU here")
    name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(_PROGRAM, description="Time one training step through several systems.")
    add = parser.add_argument
    add(
        "--workload",
        type=_list((*names(), FIRST_CALL)),
        help=f"any of {', '.join((*names(), FIRST_CALL))}; default {_ON_CUDA}, on CPU {_ON_CPU}",
    )
    add(
        "--against",
        type=_list((*OPPONENTS, *OURS, *VARIANTS)),
        help="systems beside ours (default: all that there are for the workload)",
    )
    add(
        "--ours",
        choices=(*OURS, TUNED),
        help="which of ours to compare with (default: ours, by inductor; ours-aten where that takes minutes)",
    )
    add("--device", type=_device, default="auto", help="auto, cpu or cuda")
    add("--steps", type=_positive, help="timed steps for each system (default: by workload, 20 to 1000)")
    add(
        "--limit-s",
        type=_positive,
        default=460,
        help="no system of any workload is started after so many seconds (default: 460); it is a skipped row then",
    )
    add(
        "--nodes",
        action="store_true",
        help="count the nodes of opponents, too: their profiler may slow the next one",
    )
    add(
        "--fill",
        type=_positive,
        metavar="N",
        help="first compile what will be timed, N processes at a time; for at most half of the time limit",
    )
    add("--json", action="store_true", help="print a line of JSON for each row")
    add("--plot", type=Path, help="picture that gets the medians, for example times.png")
    add("--out", type=Path, help="file that gets these lines, with or without --json; it is emptied first")
    add("--told", action="store_true", help=argparse.SUPPRESS)  # how `many.processes` runs this program
    add("--verbose", action="store_true", help="log each stage of ours with its seconds")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit code is 1 if a system failed or its losses differ."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options = parser.parse_args(arguments)
    on_gpu = options.device.type == "cuda"
    chosen = options.workload or (_ON_CUDA if on_gpu else _ON_CPU).split(",")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # jax shares the GPU with torch
    if not on_gpu:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    _refuse_unfit(parser, chosen, options)
    if options.out is not None:
        try:
            options.out.write_text("")
        except OSError as error:
            parser.error(str(error))
    if options.told:
        _wait_until_told(chosen, options)
    if options.plot is not None:
        return _drawn(chosen, options)
    return _run(chosen, options)


def _wait_until_told(chosen: Sequence[str], options: argparse.Namespace) -> None:
    """Import what will be needed, and read how many seconds there are."""
    wanted = [
        "torch._inductor.compile_fx",
        *(getattr(workload(name), "library", "torch") for name in chosen if name != FIRST_CALL),
    ]
    for library in wanted:
        with contextlib.suppress(ImportError):  # the row will say so
            importlib.import_module(library)
    options.limit_s = int(sys.stdin.readline())


def _refuse_unfit(
    parser: argparse.ArgumentParser, chosen: Sequence[str], options: argparse.Namespace
) -> None:
    """Reject options that cannot work before anything is timed."""
    if chosen == [FIRST_CALL]:
        unused = [name for name in ("steps", "ours", "nodes", "plot", "fill") if getattr(options, name)]
        if unused:
            parser.error(f"{FIRST_CALL} times no steps: --{unused[0]} says nothing about it")
    if FIRST_CALL in chosen and (others := set(options.against or ()) - set(first_call.SYSTEMS)):
        parser.error(f"{FIRST_CALL} is not made for {min(others)}; it is for {', '.join(first_call.SYSTEMS)}")
    if options.plot is not None:
        if options.out is not None and (options.out == options.plot or not _is_file(options.out)):
            parser.error("--out has to be a file of its own, from which --plot reads")
        try:
            refuse_unfit_path(options.plot)
        except (OSError, ValueError, ImportError) as error:
            parser.error(f"--plot {options.plot}: {error}")


def _is_file(path: Path) -> bool:
    return path.is_file() or not path.exists()


def _run(chosen: Sequence[str], options: argparse.Namespace) -> int:
    if len(chosen) > 1 or options.fill:
        with tempfile.TemporaryDirectory() as folder:
            return in_processes(chosen, options, Path(folder))
    if options.verbose:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("functional_cg").setLevel(logging.INFO)
    return _first_calls(options) if chosen[0] == FIRST_CALL else _here(chosen[0], options)


def _drawn(chosen: Sequence[str], options: argparse.Namespace) -> int:
    """Run, then plot the rows that were written."""
    with tempfile.TemporaryDirectory() as folder:
        options.out = options.out or Path(folder) / "rows.jsonl"
        code = _run(chosen, options)
        rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    if any(row["ms"] is not None for row in rows):
        plot(rows, options.plot)
        print(f"wrote {options.plot}")
    else:
        print(f"no system has times to draw: {options.plot} was not written")
    return code


def _here(name: str, options: argparse.Namespace) -> int:
    work, where = workload(name), environment(options.device)
    _print_environment(where)

    def emit(row: Row) -> None:
        figure = row.reason if row.ms is None else f"{row.ms.median:.4f} ms, host {row.host_us or 0:.1f} µs"
        print(f"{row.workload}: {row.system}: {row.status}: {figure}", flush=True)
        if options.out is not None:
            with options.out.open("a") as file:  # in case the next system crashes the process
                file.write(row.as_json(where) + "\n")

    deadline = time.monotonic() + options.limit_s
    rows = bench(
        work,
        options.against or _all_for(name),
        options.device,
        emit,
        anchor=options.ours or work.anchor,
        steps=options.steps,
        deadline=deadline,
        nodes=options.nodes,
    )
    print(f"\n{table(work, rows)}\n", flush=True)
    return _written(rows, where, options)


def _all_for(name: str) -> list[str]:
    """List the systems of a workload and all opponents, including those that do not support it; jax comes last."""
    usual = [system for system in workload(name).systems if system not in (*BUDGETS, ONCE)]
    systems = dict.fromkeys([*usual, *OPPONENTS])
    return sorted(systems, key=lambda system: system == "jax")


def _first_calls(options: argparse.Namespace) -> int:
    work, where = (
        workload("gpt2-124m" if options.device.type == "cuda" else "mlp-4x64"),
        environment(options.device),
    )
    _print_environment(where)
    deadline = time.monotonic() + options.limit_s
    rows = []
    for row in first_call.rows(work, options.against or first_call.SYSTEMS, options.device, deadline):
        rows.append(row)
        print(f"{row.system}: {row.status}: {row.reason or f'{row.first_step_s:.2f} s'}", flush=True)
    print(f"\n{table(work, rows)}\n", flush=True)
    return _written(rows, where, options)


def _print_environment(where: dict[str, object]) -> None:
    versions = ", ".join(f"{key} {where[key]}" for key in ("torch", "cuda", "python"))
    print(f"{where['device']}, {versions}", flush=True)


def _written(rows: Sequence[Row], where: dict[str, object], options: argparse.Namespace) -> int:
    """Write the rows to the requested places, and return the exit code."""
    lines = [row.as_json(where) for row in rows]
    if options.json:
        print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    return int(any(row.status == "failed" or row.losses_agree is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
