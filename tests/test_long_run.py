"""The program of a long run: interrupted in five ways, it goes on, and ends bitwise where an uninterrupted one does."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.checkpoint import disk
from functional_cg.examples import long_run
from functional_cg.testing import assert_trees_all_equal
from tests.forked import Program
from tests.sharding.law import held, rank_of
from tests.sharding.ranks import on_ranks
from tests.shares import thorough

STEPS, EVERY, STRUCK = 20, 4, 10  # in the last one something happens

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread only"
)


def crash() -> None:
    raise ConnectionError("the file server is gone")


IN_STEP: dict[str, Callable[[], None]] = {
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "an exception": crash,
    "kill -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


@contextmanager
def short() -> Iterator[pytest.MonkeyPatch]:
    """The program with fewer steps, and its handlers gone afterwards."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("STEPS", STEPS), ("EVERY", EVERY), ("AGREE_EVERY", 2)):
                patch.setattr(long_run, name, value)
            patch.setattr(
                fcg.sharding, "mesh", partial(fcg.sharding.mesh, device="cpu")
            )  # where an op can strike
            yield patch
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run(folder: str) -> Any:
    with short():
        return fcg.tree.map(torch.clone, held(long_run.main(Path(folder))))


def _strike(x: Tensor) -> Tensor:
    strikes[-1]()
    return x.clone()


# Defined once: torch 2.11 calls what it has freed after an operator of the same name is defined anew.
strikes: list[Callable[[], None]] = []
library = torch.library.Library("fcg_long_run", "DEF")
library.define("strike(Tensor x) -> Tensor")
library.impl("strike", _strike, "CPU")
library.impl("strike", torch.empty_like, "Meta")


def interrupted(folder: str, how: str, rank: int = 0) -> Any:
    """Run until something happens in the middle of a step, or of a save."""
    calls: list[int] = []

    def strike() -> None:
        calls.append(1)
        if len(calls) == STRUCK and how in IN_STEP and rank == rank_of():
            IN_STEP[how]()

    strikes.append(strike)
    write, of = disk.BlockWriter.write, long_run.train_step.__wrapped__

    def written(self: Any, raw: Tensor) -> Any:
        if fcg.checkpoints(folder).steps():  # not of the first save
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, raw)

    @fcg.graph_step
    def train_step(state: Any, batch: Any) -> Any:
        return of(state, (torch.ops.fcg_long_run.strike(batch[0]), batch[1]))

    with short() as patch:
        patch.setattr(long_run, "train_step", train_step)
        if how == "kill -9 in a save":
            patch.setattr(disk.BlockWriter, "write", written)
        state = long_run.main(Path(folder))
    return int(state.step), fcg.checkpoints(folder).latest()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    folder = tmp_path_factory.mktemp("whole")
    return run(str(folder)), (folder / "log.txt").read_text()


def assert_goes_on(folder: Path, expected: tuple[Any, str], *latest: int) -> None:
    assert fcg.checkpoints(folder).latest() in latest
    assert_trees_all_equal(run(str(folder)), expected[0])
    assert (folder / "log.txt").read_text() == expected[1]
    assert fcg.checkpoints(folder).steps() == [STEPS - EVERY, STEPS]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT"])
def test_a_signal_finishes_the_step_and_saves_it(how: str, tmp_path: Path, expected: tuple[Any, str]) -> None:
    assert interrupted(str(tmp_path), how) == (STRUCK, STRUCK)
    assert_goes_on(tmp_path, expected, STRUCK)


def test_an_exception_in_the_step(tmp_path: Path, expected: tuple[Any, str]) -> None:
    with pytest.raises(ConnectionError, match="the file server is gone"):
        interrupted(str(tmp_path), "an exception")
    assert_goes_on(tmp_path, expected, 2 * EVERY)


def test_kills_in_a_step_and_in_a_save(tmp_path: Path, expected: tuple[Any, str]) -> None:
    """In processes of their own, at one time."""
    code = "from tests.test_long_run import interrupted; interrupted({!r}, {!r})"
    hows = ("kill -9", "kill -9 in a save")
    programs = [Program("-c", code.format(str(tmp_path / how), how)) for how in hows]
    for how, program in zip(hows, programs, strict=True):
        with program:
            assert program.end(60) == -signal.SIGKILL, (how, program.err)
    assert_goes_on(tmp_path / hows[0], expected, EVERY, 2 * EVERY)  # the second one may not be complete yet
    assert_goes_on(tmp_path / hows[1], expected, EVERY)


@thorough
def test_on_two_ranks_one_signal_stops_both_at_one_step(tmp_path: Path) -> None:
    whole = on_ranks(2, run, str(tmp_path / "whole"))
    assert on_ranks(2, interrupted, str(tmp_path / "part"), "SIGTERM", 1) == [(STRUCK, STRUCK)] * 2
    shutil.copytree(tmp_path / "part", tmp_path / "alone")
    assert int(run(str(tmp_path / "alone")).step) == STEPS
    for rank, state in enumerate(on_ranks(2, run, str(tmp_path / "part"))):
        assert_trees_all_equal(state, whole[rank])
    run(str(tmp_path / "whole"))  # alone, it reads what two have written
