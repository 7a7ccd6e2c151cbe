"""Readers, savers, steppers and replacers of one state: each reads a single generation, or is refused."""

from __future__ import annotations

import itertools
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

import functional_cg as fcg

REFUSED = (fcg.DonatedStateError, fcg.BusyError)
APART = 1_000_000  # between the numbers of two replacements


def advance(state: Any, x: Tensor) -> Any:
    """All elements of all leaves are one number; a step adds one to it."""
    new = {name: leaf + x.to(leaf.dtype) for name, leaf in state.items()}
    return new, {
        "seen": torch.stack(
            [state["large"].aminmax()[0], state["large"].aminmax()[1], state["small"].sum() / 3]
        )
    }


def seen(state: Any) -> Tensor:
    leaves = [leaf.double() for leaf in state.values()]
    return torch.stack([bound for leaf in leaves for bound in leaf.aminmax()])


class Bench:
    """A state that threads share, and what they do with it.

    Args:
      floats: Size of the largest leaf.
      folder: Where it is saved.
    """

    def __init__(self, floats: int, folder: str) -> None:
        self.folder = Path(folder)
        self.step = fcg.graph_step(advance)
        self.look = fcg.graph_fn(seen)
        self.state: Any = fcg.place(
            {
                "large": torch.zeros(floats, dtype=torch.float64),
                "small": torch.zeros(3, dtype=torch.float64),
                "n": 0,
            }
        )
        self.numbers = itertools.count()
        self.counts: Counter[str] = Counter()
        self.torn: list[str] = []

    def one(self, what: str, values: Any) -> None:
        """All of them have to be one number."""
        numbers = {float(value) for value in values}
        if len(numbers) != 1:
            self.torn.append(f"{what}: {sorted(numbers)}")

    def do_step(self) -> None:
        self.state, metrics = self.step(self.state, torch.ones(()))
        self.one("metrics of a step", metrics["seen"])

    def do_step_anew(self) -> None:
        """Another step, of its own buffers and capture."""
        self.state, metrics = fcg.graph_step(advance)(self.state, torch.ones(()))
        self.one("metrics of a first step", metrics["seen"])

    def do_eager(self) -> None:
        self.state, metrics = self.step.eager(self.state, torch.ones(()))
        self.one("metrics of an eager step", metrics["seen"])

    def do_replace(self) -> None:
        value = float(next(self.numbers) * APART)
        like = {name: (leaf.shape, leaf.dtype) for name, leaf in self.state.tree.items()}
        self.state = self.state.replace(**{n: torch.full(s, value, dtype=d) for n, (s, d) in like.items()})

    def do_move(self) -> None:
        """Written from what is read before."""
        leaves = self.state.tree
        self.state = self.state.replace(**{name: leaf + 1 for name, leaf in leaves.items()})

    def do_evaluate(self) -> None:
        self.one("a graph_fn", self.look(self.state))

    def do_look_at_inputs(self) -> None:
        self.one("leaves as inputs", fcg.graph_fn(lambda tree: seen(tree["all"]))({"all": self.state}))

    def do_aminmax(self) -> None:
        self.one("aminmax", torch.aminmax(self.state["large"]))

    def do_numpy(self) -> None:
        array = self.state["large"].numpy()
        self.one("numpy", (array.min(), array.max()))

    def do_dlpack(self) -> None:
        array = np.from_dlpack(self.state["large"])
        self.one("DLPack", (array.min(), array.max()))

    def do_snapshot(self) -> None:
        self.one("snapshot", seen(fcg.snapshot(self.state)))

    def do_fork(self) -> None:
        self.one("fork", self.look.eager(fcg.fork(self.state)))

    def do_save(self) -> None:
        path = self.folder / f"{threading.get_ident()}.safetensors"
        fcg.save(path, self.state)
        self.one("save", seen(safetensors.torch.load_file(path)))

    def do_state_dict(self) -> None:
        self.one("state_dict", seen(fcg.state_dict(self.state)))


ROLES = {
    "stepper": ("do_step", "do_step", "do_step", "do_eager", "do_step_anew"),
    "replacer": ("do_replace", "do_move"),
    "reader": ("do_evaluate", "do_aminmax", "do_numpy", "do_dlpack", "do_look_at_inputs"),
    "saver": ("do_save", "do_snapshot", "do_state_dict", "do_fork"),
}


def run(seconds: float, *, floats: int = 1 << 18, each: int = 2) -> Counter[str]:
    """Let threads of each role work on one state.

    Args:
      seconds: For how long.
      floats: Size of the largest leaf.
      each: Threads of each role.
    Returns:
      How often each thing was done, and how often refused.
    """
    end = time.monotonic() + seconds
    failed: list[BaseException] = []

    def work(bench: Bench, role: str) -> None:
        chosen = random.Random(threading.get_ident())
        while time.monotonic() < end and not bench.torn and not failed:
            name = chosen.choice(ROLES[role])
            act: Callable[[], None] = getattr(bench, name)
            try:
                act()
                bench.counts[name] += 1
            except REFUSED:
                bench.counts[f"{name} refused"] += 1
                bench.state = bench.state.latest()
            except BaseException as error:  # told below, on the main thread
                failed.append(error)

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(floats, folder)
        threads = [
            threading.Thread(target=work, args=(bench, role), daemon=True)
            for role in ROLES
            for _ in range(each)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0) + 60)
        assert not any(thread.is_alive() for thread in threads), f"hangs: {bench.counts}"
        if failed:
            raise failed[0]
        assert not bench.torn, f"{bench.torn[:3]} of {bench.counts}"
        bench.one("the state at the end", seen(fcg.snapshot(bench.state.latest())))
        assert not bench.torn, bench.torn
    return bench.counts
