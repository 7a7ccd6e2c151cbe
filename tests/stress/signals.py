"""Signals of three kinds at random bytecodes: one raises, one ends the program in order, one calls the library."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import functional_cg as fcg


class Late(Exception):
    """What the third handler raises now and then."""


def advance(state: Any, x: Tensor) -> Any:
    def loss(w: Tensor) -> Tensor:
        return (w * 0).sum() + w.sum()

    value, grad = fcg.value_and_grad(loss)(state["w"])
    return {"w": state["w"] + grad * x, "n": state["n"] + 1}, {"loss": value}


def seen(state: Any) -> Tensor:
    return torch.cat([state["w"].flatten(), state["n"].double().reshape(1)])


def modes() -> dict[str, Any]:
    """What a handler that raises must not leave changed."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "multithreaded autograd": torch.autograd.is_multithreading_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "transforms": torch._C._functorch.peek_interpreter_stack(),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
    }


class Bench:
    """A program that is struck, and its handlers.

    They raise only while the program is ready for it, once.
    """

    def __init__(self, folder: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.path = os.path.join(folder, "state.safetensors")
        self.step = fcg.graph_step(advance)
        self.look = fcg.graph_fn(seen)
        self.watch = fcg.graph_fn(seen)  # the handler's own
        self.state: Any = fcg.place({"w": torch.zeros(5, dtype=torch.float64), "n": 0})
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.ready = False

    def one(self, what: str, values: Any) -> None:
        numbers = {float(value) for value in values}
        if len(numbers) != 1:
            self.wrong.append(f"{what}: {sorted(numbers)}")

    # -- the program

    def do_step(self) -> None:
        for _ in range(20):
            self.state, _ = self.step(self.state, torch.ones((), dtype=torch.float64))

    def do_trace(self) -> None:
        step = fcg.graph_step(advance)
        self.state, _ = step(self.state, torch.ones((), dtype=torch.float64))

    def do_evaluate(self) -> None:
        self.one("evaluate", self.look(self.state))

    def do_replace(self) -> None:
        value = float(self.random.randrange(1000))
        self.state = self.state.replace(w=torch.full((5,), value, dtype=torch.float64), n=int(value))

    def do_snapshot(self) -> None:
        self.one("snapshot", seen(fcg.snapshot(self.state)))

    def do_save(self) -> None:
        fcg.save(self.path, self.state)
        self.state = fcg.load(self.path, self.state)

    def do_in_inference_mode(self) -> None:
        guard = torch._C._InferenceMode(
            True
        )  # Python's own `torch.inference_mode` may be left on by a signal
        with guard:
            self.state, _ = self.step(self.state, torch.ones((), dtype=torch.float64))
            self.one("snapshot in inference mode", seen(fcg.snapshot(self.state)))

    # -- the handlers

    def interrupted(self, number: int, frame: FrameType | None) -> None:
        self.counts["SIGINT"] += 1
        if self.ready:
            self.ready = False
            raise KeyboardInterrupt

    def terminated(self, number: int, frame: FrameType | None) -> None:
        self.counts["SIGTERM"] += 1
        if self.ready:
            self.ready = False
            fcg.save(self.path, self.state.latest())
            sys.exit(1)

    def asked(self, number: int, frame: FrameType | None) -> None:
        self.counts["SIGUSR1"] += 1
        try:
            state = self.state.latest()
            self.one("a snapshot by the handler", seen(fcg.snapshot(state)))
            self.one("a graph_fn by the handler", self.watch(state))
            self.state = self.step(state, torch.ones((), dtype=torch.float64))[0]
            self.counts["stepped by the handler"] += 1
        except fcg.BusyError:
            self.counts["refused to the handler"] += 1
        except fcg.DonatedStateError:  # by the handler that came in the middle of this one
            self.counts["overtaken by a handler"] += 1
        if self.ready and self.random.random() < 0.5:
            self.ready = False
            raise Late

    # -- both

    def run(self, signals: int, rate: float) -> None:
        acts: list[Callable[[], None]] = [getattr(self, name) for name in dir(self) if name.startswith("do_")]
        for act in acts:  # torch imports more of itself
            act()
        self.watch(self.state)
        before = modes()
        over = threading.Event()
        sender = threading.Thread(target=self._send, args=(signals, rate, over), daemon=True)
        sender.start()
        try:
            self._struck(acts, before, over)
        finally:
            over.set()
            sender.join()
        assert not self.wrong, f"{self.wrong[:5]} in {self.counts}"

    def _struck(self, acts: list[Callable[[], None]], before: dict[str, Any], over: threading.Event) -> None:
        while not over.is_set() and not self.wrong:
            act = self.random.choice(acts)
            try:
                self.ready = True
                act()
                self.ready = False
                self.counts[act.__name__] += 1
            except (KeyboardInterrupt, SystemExit, Late, fcg.DonatedStateError) as error:
                self.ready = False
                self.counts[f"{act.__name__} ended by {type(error).__name__}"] += 1
            self.one(f"the state after {act.__name__}", self._values())
            now = modes()
            self.wrong += [
                f"after {act.__name__}: {k} {before[k]} -> {now[k]}" for k in now if now[k] != before[k]
            ]

    def _values(self) -> Tensor:
        """Those of the state as it is now, which a handler may step at any moment."""
        while True:
            self.state = self.state.latest()
            with contextlib.suppress(fcg.DonatedStateError):
                return seen(fcg.snapshot(self.state))

    def _send(self, signals: int, rate: float, over: threading.Event) -> None:
        chosen = random.Random(1)
        kinds = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        while not over.is_set() and sum(self.counts[kind.name] for kind in kinds) < signals:
            time.sleep(chosen.expovariate(rate))
            os.kill(os.getpid(), chosen.choice(kinds))
        over.set()


def run(signals: int, *, seed: int = 0, rate: float = 300.0) -> Counter[str]:
    """Strike a program that steps, traces, reads, writes and saves; on the main thread of a process of its own.

    Args:
      signals: How many reach it; of those that come at one time, Python makes one.
      seed: Of what the program does.
      rate: Signals a second, on average.
    """
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder, seed)
        handlers = {
            signal.SIGINT: bench.interrupted, signal.SIGTERM: bench.terminated, signal.SIGUSR1: bench.asked,
        }  # fmt: skip
        old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            bench.run(signals, rate)
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
    return bench.counts
