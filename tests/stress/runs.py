"""The program of a long run, struck by signals until it is done; it ends as one that is left alone."""

from __future__ import annotations

import hashlib
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import functional_cg as fcg
from functional_cg.examples import long_run
from tests.forked import Program

STEPS, EVERY = 1500, 50
CODE = """
from pathlib import Path
from functional_cg.examples import long_run
long_run.STEPS, long_run.EVERY = {}, {}
long_run.main(Path({!r}))
"""
CODES = {signal.SIGTERM: {0}, signal.SIGINT: {0}, signal.SIGKILL: {0, -signal.SIGKILL}}
BEFORE = {signal.SIGTERM: {-signal.SIGTERM}, signal.SIGINT: {1, -signal.SIGINT}, signal.SIGKILL: set[int]()}


def started(folder: Path) -> Program:
    return Program("-c", CODE.format(STEPS, EVERY, str(folder)))


def digest(folder: Path) -> str:
    """Of the last checkpoint and the log."""
    state = fcg.load(folder, long_run.create_state(fcg.sharding.mesh({"data": 1}, device="cpu")))
    found = hashlib.sha256((folder / "log.txt").read_bytes())
    for leaf in fcg.state_dict(state).values():
        found.update(leaf.numpy().tobytes())
    return f"{int(state.step)} {found.hexdigest()}"


def run(times: int, *, seed: int = 0) -> Counter[str]:
    """Strike so many times; some strikes come before the program has begun, some after its end."""
    chosen, counts = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        with started(Path(folder)) as program:
            assert program.end(120) == 0, program.err
        expected = digest(Path(folder))
    while sum(counts[number.name] for number in CODES) < times:
        with tempfile.TemporaryDirectory() as folder:
            while fcg.checkpoints(folder).latest() != STEPS:
                number = chosen.choice(list(CODES))
                with started(Path(folder)) as program:
                    time.sleep(chosen.uniform(0.5, 4))
                    begun = "step" in program.err or "it/s" in program.err
                    program.interrupt(number)
                    code = program.end(60)
                    counts[number.name] += 1
                    counts["before it has begun"] += not begun
                    assert code in CODES[number] | BEFORE[number], (number, code, program.err)
                    assert not begun or code in CODES[number], (number, code, program.err)
            counts["runs"] += 1
            assert digest(Path(folder)) == expected
    return counts
