"""A judge that is a list of programs, and what those programs say of themselves."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import functional_cg as fcg
from tests.judges.rows import Row, Verdict, compare, first_line

__all__ = ["Program", "Scenarios", "holds", "left_out", "raises", "same"]

Program = Callable[[str, str], Iterable[Verdict]]


@dataclass(frozen=True)
class Scenarios:
    """A judge.

    Attributes:
      JUDGE: Its name on the page.
      programs: Each takes a lowering and a device, and yields verdicts; named as it is, without underscores.
    """

    JUDGE: str
    programs: tuple[Program, ...]

    def cases(self, device: str) -> list[str]:
        """The names of its programs."""
        del device
        return [_title(program) for program in self.programs]

    def run(self, case: str, lowering: str, device: str) -> Iterator[Row]:
        """Run one program; whatever it raises is a defect."""
        [program] = [program for program in self.programs if _title(program) == case]
        row = Row(self.JUDGE, case, lowering, device)
        start = time.monotonic()
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for verdict in program(lowering, device):
                    row.add([verdict])
        except fcg.MiscompileError as error:
            row.add([Verdict("DIFFERS", "", f"MiscompileError: {first_line(error)}")])
        except fcg.FunctionalCGError as error:
            row.add([Verdict("refused", "", f"{type(error).__name__}: {first_line(error)}")])
        except Exception as error:  # any error is a finding of the judge
            row.add([Verdict("DIFFERS", "", f"{type(error).__name__}: {first_line(error)}")])
        row.seconds = round(time.monotonic() - start, 1)
        yield row


def _title(program: Program) -> str:
    return program.__name__.strip("_").replace("_", " ")


def same(got: Any, expected: Any, where: str = "", exact: Any = None) -> Iterator[Verdict]:
    """Compare two trees leaf by leaf."""
    ones, others = fcg.tree.leaves(got), fcg.tree.leaves(expected)
    truths = [None] * len(others) if exact is None else fcg.tree.leaves(exact)
    if len(ones) != len(others):
        yield Verdict("DIFFERS", where, f"{len(ones)} leaves, expected {len(others)}")
        return
    for one, other, truth in zip(ones, others, truths, strict=True):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            yield compare(one.detach(), other.detach(), where, lambda truth=truth: truth)
        else:
            yield holds(one == other, f"{where}: {one!r}, expected {other!r}")


def holds(truth: Any, what: str) -> Verdict:
    """A statement that has to hold."""
    return Verdict("equal", what) if truth else Verdict("DIFFERS", "", what)


def raises(
    error: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any], where: str
) -> Verdict:
    """What the judge, too, expects to fail, and by which class of error it does here."""
    try:
        call()
    except error:
        return Verdict("equal", where)
    except Exception as raised:  # another error tells the user something else
        return Verdict("DIFFERS", where, f"{where}: {type(raised).__name__}: {first_line(raised)}")
    return Verdict("DIFFERS", where, f"{where}: it runs")


def left_out(*names: str, why: str) -> Program:
    """Tests of a suite that have no meaning here, with the reason."""

    def program(lowering: str, device: str) -> Iterator[Verdict]:
        del lowering, device
        for name in names:
            yield Verdict("not run", name, f"{name}: {why}")

    program.__name__ = f"left out: {why}"
    return program
