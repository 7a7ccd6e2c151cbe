"""Command-line options of the GPT example."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

__all__ = ["Parser", "device", "gpt_parser"]

_GRACE_S = 5.0  # torchrun ends all ranks once one has failed: gives rank 0 time to print the error first


class Parser(argparse.ArgumentParser):
    """Argument parser with one-line errors; when all ranks fail together, only rank 0 prints."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_GRACE_S)
            self.exit(2)
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def integer(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """Make an argparse type: an integer from ``low`` to ``high``, inclusive."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected an integer from {low} to {high}, got {text}")
        return value

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """Make an argparse type: a number in [``low``, ``high``)."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
        if not low <= value < high:  # also rejects NaN
            raise argparse.ArgumentTypeError(f"expected at least {low:g} and less than {high:g}, got {text}")
        return value

    return parse


def device(name: str) -> torch.device:
    """Parse a device: ``cpu``, ``cuda``, or ``auto`` for the GPU if there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no GPU here")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def mesh(text: str) -> dict[str, int]:
    """Parse the names and sizes of one or two mesh axes: ``data=4`` or ``replica=2,shard=-1``."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if (
            not name.isidentifier()
            or name in axes
            or not size.removeprefix("-").isdecimal()
            or len(axes) == 2
        ):
            raise argparse.ArgumentTypeError(f"expected NAME=RANKS, or two such by a comma, got {text!r}")
        axes[name] = int(size)
    return axes


def gpt_parser(prog: str, description: str) -> Parser:
    """Make the parser of the GPT example; the defaults run in half a minute on two CPU cores."""
    parser = Parser(
        prog=prog,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add, positive = parser.add_argument, integer(1)
    add("--steps", type=positive, default=150, metavar="N", help="training steps")
    add(
        "--batch-size",
        type=positive,
        default=16,
        metavar="N",
        help="blocks in a batch; with --mesh, of each rank",
    )
    add("--block-size", type=positive, default=128, metavar="N", help="bytes in a block")
    add("--layers", type=positive, default=4, metavar="N", help="transformer blocks")
    add("--width", type=positive, default=128, metavar="N", help="size of the residual stream")
    add("--heads", type=positive, default=4, metavar="N", help="attention heads")
    add("--dropout", type=number(0, 1), default=0.1, metavar="P", help="probability of dropout")
    add("--lr", type=number(0, 1), default=2e-3, metavar="X", help="peak learning rate")
    add("--device", type=device, default="auto", metavar="NAME", help="auto, cpu or cuda")
    add("--lowering", choices=("auto", "aten", "inductor"), default="auto", help="auto: aten on the CPU")
    add(
        "--seed",
        type=integer(0, 2**63 - 1),
        default=0,
        metavar="N",
        help="of parameters, batches and dropout",
    )
    add("--data", type=Path, metavar="PATH", help="file or directory to read instead of Python's own library")
    add(
        "--module", action="store_true", help="write the model as an nn.Module and bring it in by from_module"
    )
    add("--sample", type=integer(0), default=200, metavar="N", help="bytes to generate before and after")
    add(
        "--compare",
        action="store_true",
        help="train by an ordinary loop with torch.optim, too: speed and loss",
    )
    add("--out", type=Path, metavar="DIR", help="directory for history.json and loss.png")
    add("--save", type=Path, metavar="FILE", help="checkpoint to write at the end, also after Ctrl-C")
    add("--save-every", type=positive, metavar="N", help="write it after every N steps, too")
    add("--resume", type=Path, metavar="FILE", help="checkpoint to go on from, up to --steps in all")
    add(
        "--mesh",
        type=mesh,
        metavar="AXES",
        help="how the processes that torchrun starts are laid out: data=N, or replica=N,shard=M, one of which may be "
        "-1 for what is left. A step trains on ranks x --batch-size blocks, and each rank on a slice of them",
    )
    add(
        "--zero",
        type=int,
        choices=(1, 2, 3),
        help="with --mesh, what a rank holds a shard of: 1 moments; 2 gradients, too; "
        "3, as without this option, parameters, too",
    )
    add("--json", action="store_true", help="print the result as JSON, as the last line")
    return parser
