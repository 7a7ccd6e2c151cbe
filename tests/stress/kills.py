"""kill -9 of a random rank at a random moment of training and of saving; checkpoints between any numbers of ranks."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import functional_cg as fcg
from functional_cg import sharding
from tests.sharding.law import batches, held, rank_of
from tests.sharding.programs import PROGRAMS, Setting
from tests.sharding.ranks import Outcome, on_ranks, outcomes_of_each

RANKS, STEPS = 4, 8
SETTING = Setting({"data": RANKS}, 3)
PROGRAM = "average"


def digest(state: Any) -> str:
    """Of all that this rank holds, padding included."""
    leaves = [
        leaf.clone().flatten().view(torch.uint8).numpy().tobytes() for leaf in fcg.tree.leaves(held(state))
    ]
    return hashlib.sha256(b"".join(leaves)).hexdigest()


def killed_in(seconds: float, pids: Path, later: float) -> None:
    """End this process from outside, and the other ranks a little later, as a launcher does; none gets to know."""
    victim, number = os.getpid(), rank_of()
    if os.fork() == 0:
        time.sleep(seconds)
        for rank in [number, *(rank for rank in range(RANKS) if rank != number)]:
            with contextlib.suppress(OSError, ValueError):
                if os.getppid() == victim or rank != number:
                    os.kill(int((pids / str(rank)).read_text()), signal.SIGKILL)
            time.sleep(later * (rank == number))
        os._exit(0)


def train(
    folder: str, victim: int, fuse: float, expected: Mapping[int, list[str]]
) -> tuple[int, dict[int, str]]:
    """Resume from the last checkpoint and train to the end, with a checkpoint after each step.

    Returns:
      The step that it resumed from, and the digest of the state after each step.
    """
    state = PROGRAMS[PROGRAM].state(SETTING.zero("cpu"), "cpu")
    step, batch_of = (
        fcg.graph_step(PROGRAMS[PROGRAM].step, lowering="aten"),
        batches(PROGRAM, "cpu", rank_of()),
    )
    pids = Path(f"{folder}.pids")
    (pids / str(rank_of())).write_text(str(os.getpid()))
    saved = fcg.checkpoints(folder, keep=2)
    began, digests = saved.latest() or 0, {}
    if began:
        state = saved.load(state)
        began = int(state.step)
        assert digest(state) == expected[began][rank_of()], f"another state than that of step {began}"
    for call in range(began, STEPS):
        if victim == rank_of() and call == min(max(fuse[0], began), STEPS - 1):
            killed_in(fuse[1], pids, later=0.1)
        state, _ = step(state, batch_of(call))
        digests[call + 1] = digest(state)
        saved.save(state)
    saved.close()
    (pids / str(rank_of())).unlink()
    return began, digests


def attempts(calls: list[tuple[Any, ...]]) -> list[list[Outcome]]:
    """Start runs side by side, each with no ranks of an earlier one to kill."""
    for folder, *_ in calls:
        shutil.rmtree(f"{folder}.pids", ignore_errors=True)
        os.mkdir(f"{folder}.pids")
    try:
        return outcomes_of_each(RANKS, train, calls)
    finally:
        for folder, *_ in calls:
            shutil.rmtree(f"{folder}.pids")


def uninterrupted() -> dict[int, list[str]]:
    """The digests of each step on each rank."""
    with tempfile.TemporaryDirectory() as folder:
        (found,) = attempts([(folder, -1, (0, 0.0), {})])
        assert not any(outcome.error for outcome in found), found
        digests = [outcome.value[1] for outcome in found]
        return {step: [of[step] for of in digests] for step in digests[0]}


def _fuse(chosen: random.Random) -> tuple[int, float]:
    """When a rank is killed: seconds after the beginning of a step."""
    return chosen.randrange(STEPS), chosen.uniform(0, 0.3)


def run(kills: int, *, seed: int = 0, at_once: int = 4, times: int = 3) -> Counter[str]:
    """Kill ranks, and resume; some runs are killed several times. Each ends as the uninterrupted one does.

    Args:
      kills: How many.
      seed: Of whom and when.
      at_once: How many runs go on side by side.
      times: How often each is killed.
    """
    expected = uninterrupted()
    chosen, counts = random.Random(seed), Counter[str]()
    while counts["killed"] < kills:
        folders = [tempfile.TemporaryDirectory() for _ in range(at_once)]
        for last in [*[False] * times, True]:
            calls = [
                (f.name, -1 if last else chosen.randrange(RANKS), _fuse(chosen), expected) for f in folders
            ]
            for found in attempts(calls):
                dead = [outcome for outcome in found if outcome.code == -signal.SIGKILL]
                counts["killed"] += bool(dead)
                for outcome in found:
                    assert dead or not outcome.error, outcome.error
                    assert "AssertionError" not in outcome.error, outcome.error
                ended = [outcome.value for outcome in found if not outcome.error]
                counts["resumed"] += any(began > 0 for began, _ in ended)
                counts["resumed in the middle"] += any(0 < began < STEPS for began, _ in ended)
                for rank, outcome in enumerate(found):
                    for step, value in (outcome.value[1] if not outcome.error else {}).items():
                        assert value == expected[step][rank], f"step {step} differs on rank {rank}"
        for folder in folders:
            assert fcg.checkpoints(folder.name).steps() == [STEPS - 1, STEPS]
            assert len(os.listdir(folder.name)) == 2, "what killed runs have left is gone"
            folder.cleanup()
        counts["runs"] += at_once
    return counts


# -- n to m ---------------------------------------------------------------------------------------------------------


def folder_of(folder: str, setting: Setting) -> str:
    return f"{folder}/{'x'.join(map(str, setting.axes.values()))}-{setting.stage}"


def write(folder: str, settings: list[Setting], calls: int = 2) -> list[dict[str, Any]]:
    """Train in each setting and save a checkpoint; the whole leaves, on rank 0, as gathered."""
    kept = []
    for setting in settings:
        state = PROGRAMS[PROGRAM].state(setting.zero("cpu"), "cpu")
        step, batch_of = (
            fcg.graph_step(PROGRAMS[PROGRAM].step, lowering="aten"),
            batches(PROGRAM, "cpu", rank_of()),
        )
        for call in range(calls):
            state, _ = step(state, batch_of(call))
        with fcg.checkpoints(folder_of(folder, setting)) as saved:
            saved.save(state)
            kept.append(dict(sharding.state_dict(state)))
            state, _ = step(state, batch_of(calls))  # donates what is being written
    return kept


def read(folder: str, pairs: list[tuple[Setting, Setting]]) -> list[dict[str, Any]]:
    """Load what one setting wrote into another."""
    kept = []
    for source, setting in pairs:
        state = PROGRAMS[PROGRAM].state(setting.zero("cpu"), "cpu")
        state = fcg.checkpoints(folder_of(folder, source)).load(state)
        for leaf in fcg.tree.leaves(state):
            placement = getattr(leaf, "placement", None)
            if placement is not None and placement.sharded:
                assert not bool(leaf.local[placement.elements :].any()), "padding is zeros"
        kept.append(dict(sharding.state_dict(state)))
    return kept


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert (found[name].dtype, found[name].shape) == (leaf.dtype, leaf.shape), name
        assert found[name].equal(leaf), name


def between(settings: list[Setting], into: list[Setting]) -> int:
    """Save in each setting, load in each other one, leaf by leaf; return how many pairs."""
    with tempfile.TemporaryDirectory() as folder:
        written: dict[str, Any] = {}
        for ranks, group in _by_ranks(settings):
            wholes = on_ranks(ranks, write, folder, group)[0] if ranks > 1 else write(folder, group)
            written |= {str(setting): whole for setting, whole in zip(group, wholes, strict=True)}
        for ranks, group in _by_ranks(into):
            pairs = [(source, setting) for setting in group for source in settings]
            found = on_ranks(ranks, read, folder, pairs)[0] if ranks > 1 else read(folder, pairs)
            for whole, (source, _) in zip(found, pairs, strict=True):
                assert_same(whole, written[str(source)])
    return len(settings) * len(into)


def _by_ranks(settings: list[Setting]) -> list[tuple[int, list[Setting]]]:
    groups: dict[int, list[Setting]] = {}
    for setting in settings:
        groups.setdefault(math.prod(setting.axes.values()), []).append(setting)
    return list(groups.items())


def run_between(ranks: int) -> Counter[str]:
    """All numbers of ranks up to some, at all stages, and a hybrid mesh."""
    settings = [Setting({"data": n}, stage) for n in range(1, ranks + 1) for stage in (1, 2, 3)]
    settings += [Setting({"replica": 2, "shard": 2}, stage) for stage in (1, 3)]
    return Counter(pairs=between(settings, settings))
