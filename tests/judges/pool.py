"""Processes that run cases side by side, and the file to which their rows go.

A case has a process of its own to fail in: one that crashes or hangs is a row, and the run goes on in a new process.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.judges.judges import JUDGES
from tests.judges.rows import Row, Verdict, first_line

__all__ = ["Worker", "read", "run", "work"]

Case = tuple[str, str, str]

# After so many cases a process has kept the code of thousands of compiled kernels.
CASES_OF_A_PROCESS = 150


def read(files: Iterable[Path]) -> list[Row]:
    """The rows of some files; of equal cases the last."""
    rows: dict[Any, Row] = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            row = Row(**json.loads(line))
            rows[row.key] = row
    return list(rows.values())


def run(options: Any, lowerings: list[str]) -> None:
    """Run the cases that the file of rows lacks."""
    start = time.monotonic()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = {row.key for row in read([options.out])}
    first, step = (int(part) for part in options.shard.split("/"))
    cases: list[Case] = []
    for name in options.of:
        judge = JUDGES[name]
        for case in judge.cases(options.device):
            if options.only and case not in options.only:
                continue
            cases += [(name, case, lowering) for lowering in getattr(judge, "LOWERINGS", lowerings)]
    cases = [
        (name, case, lowering)
        for name, case, lowering in dict.fromkeys(cases[first::step])
        if lowering in lowerings and (JUDGES[name].JUDGE, case, lowering, options.device) not in done
    ]
    left: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for one in cases:
        left.put(one)
    lock, count = threading.Lock(), 0
    with options.out.open("a", encoding="utf-8") as out:

        def keep(rows: list[dict[str, Any]]) -> None:
            nonlocal count
            with lock:
                count += len(rows)
                for row in rows:
                    out.write(json.dumps(row) + "\n")
                out.flush()
                if rows and (count % 50 == 0 or count == len(cases)):
                    sys.stdout.write(f"{count} of {len(cases)} cases, {time.monotonic() - start:.0f} s\n")
                    sys.stdout.flush()

        def serve() -> None:
            worker = None
            while time.monotonic() - start < options.limit_s:
                try:
                    case = left.get_nowait()
                except queue.Empty:
                    break
                if worker is None or worker.served >= CASES_OF_A_PROCESS or worker.process.poll() is not None:
                    if worker is not None:
                        worker.stop()
                    worker = Worker(options.device)
                keep(worker.ask(case, options.device, options.case_s, start + options.limit_s + 30))
            if worker is not None:
                worker.stop()

        threads = [threading.Thread(target=serve) for _ in range(options.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if left.qsize():
        sys.stdout.write(f"{left.qsize()} cases are left; the same command goes on with them\n")


class Worker:
    """A process that runs one case after the other."""

    def __init__(self, device: str) -> None:
        variables = {
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            "TORCHINDUCTOR_DETERMINISTIC": "1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        self.served = 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.judges", "--worker", "--device", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**variables, **os.environ},
        )

    def ask(
        self, case: Case, device: str, seconds: float, until: float = float("inf")
    ) -> list[dict[str, Any]]:
        """The rows of a case; none if the run's time ends first."""
        self.served += 1
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        limit = min(seconds, max(1.0, until - time.monotonic()))
        begun = time.monotonic()
        watch = threading.Timer(limit, self.process.kill)
        watch.start()
        rows: list[dict[str, Any]] = []
        try:
            self.process.stdin.write(json.dumps(case) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                answer = json.loads(line)
                if isinstance(answer, bool):
                    if not answer:  # it ends
                        self.process.wait()
                    return rows
                rows.append(answer)
        except BrokenPipeError:
            pass
        finally:
            watch.cancel()
        spent = time.monotonic() - begun
        if spent >= limit and limit < seconds:
            return []
        why = (
            f"takes more than {seconds:.0f} s"
            if spent >= limit
            else f"the process dies: {self.process.wait()}"
        )
        outcome = "not run" if spent >= limit else "DIFFERS"
        name, title, lowering = case
        row = Row(
            JUDGES[name].JUDGE, title, lowering, device, counts={outcome: 1}, notes=[[outcome, "", why]]
        )
        row.seconds = round(spent, 1)
        return [row.as_dict()]

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def work(device: str) -> None:
    """Answer cases that are read from the standard input."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ops print is no answer
    for line in sys.stdin:
        name, case, lowering = json.loads(line)
        try:
            for row in JUDGES[name].run(case, lowering, device):
                answers.write(json.dumps(row.as_dict()) + "\n")
        except Exception as error:  # such as of a device that the case has made unusable
            why = f"{type(error).__name__}: {first_line(error)}"
            row = Row(JUDGES[name].JUDGE, case, lowering, device).add([Verdict("DIFFERS", "", why)])
            answers.write(json.dumps(row.as_dict()) + "\n")
        alive = device != "cuda" or _usable()
        answers.write(f"{json.dumps(alive)}\n")
        answers.flush()
        if not alive:
            return


def _usable() -> bool:
    """Whether the device, and its generator, have survived the case; frees its memory."""
    try:
        torch.rand(1, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
