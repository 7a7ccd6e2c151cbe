"""Ways in which a run on two ranks ends with captured steps alive; ``python -m tests.sharding.endings`` prints a table.

Each way runs in processes of its own, which are killed when they hang. The table, of two GPUs, has each way twice: once
with the thread that frees captures before their process groups end, and once without.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import functional_cg as fcg
from functional_cg.shards.groups import Captures
from functional_cg.shards.mesh import Axis
from tests.sharding.programs import mlp_batch, mlp_state, mlp_step
from tests.sharding.ranks import a_port

__all__ = ["LIMIT", "WAYS", "Ended", "Run", "ended", "leaves"]

LIMIT = 2.0  # seconds that an end takes at most
_HANGS = 15.0  # seconds after which it is said to hang
_START = 90.0  # seconds until it begins at most


class Run:
    """A step that is captured on two ranks, and its state.

    Args:
      device: Its device.
      own: Whether the mesh starts the process groups.
      apart: Whether collectives run over a process group beside that of all ranks.
    """

    def __init__(self, device: str, *, own: bool = True, apart: bool = False) -> None:
        if not own:
            rank = int(os.environ["RANK"])
            place = torch.device("cuda", rank) if device == "cuda" else None
            if place is not None:
                torch.cuda.set_device(place)
            dist.init_process_group("nccl" if device == "cuda" else "gloo", device_id=place)
        mesh = fcg.sharding.mesh({"data": 2}, device=device, timeout=20.0)
        self.rank, self.group = mesh.rank, dist.group.WORLD
        if apart:
            self.group = dist.new_group([0, 1])
            mesh = dataclasses.replace(mesh, axes=(Axis("data", 2, self.rank, self.group.group_name),))
        self.state: Any = mlp_state()(fcg.sharding.zero(mesh, stage=3), device)
        self.step: Any = fcg.graph_step(mlp_step, lowering="aten")
        self.device = device
        for call in range(3):
            self.call(call)

    def call(self, number: int) -> Any:
        batch = fcg.tree.map(lambda leaf: leaf.to(self.device), mlp_batch(number, self.rank))
        self.state, metrics = self.step(self.state, batch)
        return metrics


def _step_first(run: Run) -> None:
    del run.step
    gc.collect()
    dist.destroy_process_group()


def _closed_first(run: Run) -> None:
    run.step.close()
    dist.destroy_process_group()


def _in_a_thread(run: Run) -> None:
    thread = threading.Thread(target=dist.destroy_process_group)
    thread.start()
    thread.join()


def _twice(run: Run) -> None:
    dist.destroy_process_group(run.group)
    dist.destroy_process_group()


def _aborted_twice(run: Run) -> None:
    distributed_c10d._abort_process_group(run.group)
    distributed_c10d._abort_process_group()


# What each way does, whose process groups they are, and whether collectives have one of their own.
WAYS: Mapping[str, tuple[Callable[[Run], Any], Mapping[str, bool]]] = {
    "destroyed": (lambda run: dist.destroy_process_group(), {}),
    "destroyed by name": (lambda run: dist.destroy_process_group(dist.group.WORLD), {}),
    "the user's destroyed": (lambda run: dist.destroy_process_group(), {"own": False}),
    "destroyed in a thread": (_in_a_thread, {}),
    "one after the other": (lambda run: (time.sleep(0.5 * run.rank), dist.destroy_process_group()), {}),
    "step deleted, destroyed": (_step_first, {}),
    "step closed, destroyed": (_closed_first, {}),
    "no end": (lambda run: None, {}),
    "no end of the user's": (lambda run: None, {"own": False}),
    "a group of its own destroyed": (_twice, {"apart": True}),
    "all destroyed, with a group of its own": (lambda run: dist.destroy_process_group(), {"apart": True}),
    "aborted": (lambda run: distributed_c10d._abort_process_group(), {}),
    "a group of its own aborted": (_aborted_twice, {"apart": True}),
}
# Torch calls nothing in Python there: the table shows what comes of it.
BY_METHODS: Mapping[str, tuple[Callable[[Run], Any], Mapping[str, bool]]] = {
    "by its method `shutdown`": (lambda run: dist.group.WORLD.shutdown(), {}),
    "by its method `abort`": (lambda run: dist.group.WORLD.abort(), {}),
}


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def age() -> float:
    """Seconds since this process began."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")


def leaves(way: str, device: str, *, watched: bool = True) -> tuple[float, float, str, int]:
    """End in a way; return this process' age before and after, what a call then says, and the state's count."""
    act, how = (WAYS | BY_METHODS)[way]
    with mock.patch.object(Captures, "_run", Captures._run if watched else lambda self: None):
        run = Run(device, **how)
    sys.modules[__name__].__dict__["_KEPT"] = run  # what is alive at the end of the interpreter
    begin = age()
    act(run)
    end, said = age(), ""
    if hasattr(run, "step") and not dist.is_initialized():
        try:
            run.call(3)
            said = "nothing"
        except fcg.FunctionalCGError as error:
            said = f"{type(error).__name__}: {error}"
    return begin, end, said, int(run.state.step)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a rank has ended: after how many seconds, with which code, and what it said."""

    seconds: float
    code: int
    log: str

    @property
    def right(self) -> bool:
        return self.seconds < LIMIT and self.code == 0

    def __str__(self) -> str:
        took = f"{self.seconds:.2f} s" if self.seconds < _HANGS else f"HANGS ({_HANGS:.0f} s)"
        return took + (f", code {self.code}" if self.code and self.seconds < _HANGS else "")


def ended(ways: Sequence[tuple[str, str, bool]]) -> list[list[Ended]]:
    """End in several ways (a name, a device, whether watched), in new interpreters, all at one time."""
    started = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (way, device, watched) in enumerate(ways):
            with a_port() as port:
                for rank in range(2):
                    log = Path(folder, f"{number} {rank}")
                    environment = os.environ | {
                        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                    }  # fmt: skip
                    command = [
                        sys.executable,
                        "-m",
                        __name__ if __name__ != "__main__" else "tests.sharding.endings",
                    ]
                    with open(log, "w") as out:
                        process = subprocess.Popen(
                            [*command, "--rank", way, device, str(watched)],
                            env=environment,
                            stdout=out,
                            stderr=out,
                        )
                    started.append((process, log))
        ends = _ends(started)
    return [ends[place : place + 2] for place in range(0, len(ends), 2)]


def _ends(started: Sequence[tuple[subprocess.Popen[bytes], Path]]) -> list[Ended]:
    begun: dict[int, float] = {}
    ends: dict[int, Ended] = {}
    start = time.monotonic()
    while len(ends) < len(started):
        for number, (process, log) in enumerate(started):
            if number in ends:
                continue
            code, now = process.poll(), time.time()
            text = log.read_text(errors="replace")
            if number not in begun and "ENDS AT " in text:
                begun[number] = float(text.partition("ENDS AT ")[2].split()[0])
            since = now - begun.get(number, now)
            if code is None and (since > _HANGS or time.monotonic() - start > _START + _HANGS):
                process.kill()
                code = process.wait()
            if code is not None:
                ends[number] = Ended(since, code, text)
        time.sleep(0.01)
    return [ends[number] for number in range(len(started))]


def _be_rank(way: str, device: str, watched: str) -> None:
    def says_when(run: Run) -> Any:
        torch.cuda.synchronize() if device == "cuda" else None
        say(f"ENDS AT {time.time():.3f}")
        return act(run)

    act, how = (WAYS | BY_METHODS)[way]
    with mock.patch.dict((WAYS if way in WAYS else BY_METHODS), {way: (says_when, how)}):
        begin, end, said, count = leaves(way, device, watched=watched == "True")
    say(
        f"after {end - begin:.2f} s; the next call: {said.splitlines()[0] if said else '-'}; state.step {count}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-once", type=int, default=2, help="how many ways run at one time")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return _be_rank(*options.rank)
    rows = [(way, watched) for way in WAYS | BY_METHODS for watched in (True, False)]
    bad = 0
    say(f"torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}: seconds until a process has ended")
    for place in range(0, len(rows), options.at_once):
        some = rows[place : place + options.at_once]
        found = ended([(way, "cuda", watched) for way, watched in some])
        for (way, watched), ends in zip(some, found, strict=True):
            right = all(end.right for end in ends)
            bad += watched and way in WAYS and not right
            last = next(
                (line for line in reversed(ends[0].log.splitlines()) if line.startswith("after ")), ""
            )
            words = [f"{way:40}", "watched" if watched else "without", *map(str, ends), last]
            say(f"{'ok ' if right else 'BAD'} | {' | '.join(words)}")
            if watched and way in WAYS and not right:
                say("\n".join(end.log[-3000:] for end in ends))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
