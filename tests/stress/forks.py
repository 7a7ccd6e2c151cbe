"""Forks while other threads step: the child continues with a whole state, or is refused at once."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import functional_cg as fcg

PATIENCE = 20  # seconds that a child has on a busy machine
WORKS, REFUSED, TORN = 0, 3, 4


def advance(state: Any, x: Tensor) -> Any:
    return {"large": state["large"] + x, "small": state["small"] + x, "n": state["n"] + 1}, {"sum": x.sum()}


def seen(state: Any) -> Tensor:
    return torch.stack([*state["large"].aminmax(), *state["small"].aminmax()]).double()


def is_one(values: Tensor) -> bool:
    return len(set(values.tolist())) == 1


def child(step: Any, look: Any, state: Any, x: Tensor) -> int:
    """What a child does with what it has inherited: steps, evaluates, writes, and traces a step of its own."""
    try:
        state = state.latest()
        state, _ = step(state, x)
        state, _ = fcg.graph_step(advance)(state, x)
        whole = is_one(look(state)) and is_one(seen(fcg.snapshot(state)))
        state = state.replace(large=state["large"] * 2)
        whole &= is_one(look(state)[:2])
        return WORKS if whole else TORN
    except fcg.BusyError:
        return REFUSED


def forked(act: Callable[[], int]) -> int:
    """The exit code of a child, as it returns it; negative for a signal, such as the alarm of one that hangs."""
    number = os.fork()
    if number == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            faulthandler.dump_traceback_later(PATIENCE / 2)  # where it hangs, if it does
            signal.alarm(PATIENCE)
            code = act()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def differentiates() -> bool:
    """Whether torch differentiates in a child of this process: not where its engine has a thread for a device."""

    def sum_backward() -> int:
        torch.ones(2, requires_grad=True).sum().backward()
        return WORKS

    sum_backward()  # starts such threads
    return forked(sum_backward) == WORKS


def run(forks: int, *, floats: int = 1 << 17, threads: int = 3) -> Counter[str]:
    """Fork while threads step and read two states, and trace steps of their own.

    Args:
      forks: How many.
      floats: Size of the largest leaf; from some ten thousand on, torch computes with several threads.
      threads: How many work meanwhile.
    """
    step, look, x = fcg.graph_step(advance), fcg.graph_fn(seen), torch.ones(())
    shared: list[Any] = [fcg.place({"large": torch.zeros(floats), "small": torch.zeros(3), "n": 0})]
    shared[0], _ = step(shared[0], x)
    look(shared[0])
    over = threading.Event()

    def work(number: int) -> None:
        n = 0
        while not over.is_set():
            n += 1
            try:
                if number == 0 and n % 50 == 0:
                    shared[0], _ = fcg.graph_step(advance)(shared[0], x)
                elif number % 2:
                    fcg.snapshot(shared[0])
                else:
                    shared[0], _ = step(shared[0], x)
            except fcg.DonatedStateError:
                shared[0] = shared[0].latest()

    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(threads)]
    for worker in workers:
        worker.start()
    counts: Counter[str] = Counter()
    names = {WORKS: "works", REFUSED: "refused", TORN: "torn", -signal.SIGALRM: "hangs"}
    longest = 0.0
    try:
        for _ in range(forks):
            start = time.monotonic()
            code = forked(partial(child, step, look, shared[0], x))
            longest = max(longest, time.monotonic() - start)
            counts[names.get(code, f"exit code {code}")] += 1
    finally:
        over.set()
        for worker in workers:
            worker.join(60)
    counts["longest, in ms"] = round(1000 * longest)
    assert counts.keys() <= {"works", "refused", "longest, in ms"}, counts
    assert not any(worker.is_alive() for worker in workers)
    return counts
