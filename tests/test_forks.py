"""What a child of a fork finds: no lock that another thread of its parent held, and no thread to wait for."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import functional_cg as fcg
from functional_cg.ambient import compiling
from functional_cg.ambient.modes import SWITCH
from functional_cg.ambient.setting import canonical
from functional_cg.concurrency import turns
from functional_cg.concurrency.turns import Turn
from tests.at_once import at_once
from tests.stress.forks import differentiates, forked

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.filterwarnings("ignore:.*fork"),
]
LOCKS = {"modes of a compiler": compiling._SWITCH, "kernels": SWITCH, "turns": turns._turns._adding}
WORKS, REFUSED = 0, 3


def works() -> int:
    """Trace, train and read, by way of all that a lock guards."""
    lstm = nn.LSTM(2, 2)
    apply, params, buffers = fcg.from_module(lstm)

    def step(state: Any, x: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return apply(params, buffers, x)[0][0].float().sum()  # type: ignore[no-any-return]

        value, grads = fcg.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads), {"loss": value}

    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
    state, _ = fcg.graph_step(step)(state, torch.ones(3, 2))
    assert all(lock.acquire(blocking=False) for lock in LOCKS.values())
    assert torch.backends.mkldnn.enabled
    return WORKS if int(fcg.snapshot(state).step) == 1 else 1


@pytest.fixture
def gradients() -> None:
    if not differentiates():
        pytest.skip("torch differentiates in no child here: its engine has a thread for a device")


@contextmanager
def beside(act: Callable[[Callable[[], None]], object]) -> Iterator[None]:
    """Run something on another thread; the block begins when it says so, and ends with it."""
    said = threading.Event()
    thread = threading.Thread(target=act, args=(said.set,))
    thread.start()
    assert said.wait(10)
    try:
        yield
    finally:
        thread.join()


@pytest.mark.usefixtures("gradients")
@pytest.mark.parametrize("name", LOCKS)
def test_a_fork_waits_for_whoever_holds_a_lock(name: str) -> None:
    def hold(say: Callable[[], None]) -> None:
        with LOCKS[name]:
            say()
            threading.Event().wait(0.1)

    with beside(hold):
        assert forked(works) == WORKS


def test_whoever_holds_a_lock_gets_its_turn_before_a_fork() -> None:
    """As a thread that computes with a state's leaf under a lock: the fork, which has the turn, would wait for it."""
    turn, seen = Turn("a state"), []

    def hold(say: Callable[[], None]) -> None:
        with LOCKS["kernels"]:
            say()
            threading.Event().wait(0.1)
            seen.append(turn.read(lambda: "read"))

    with beside(hold):
        assert forked(lambda: WORKS if seen == ["read"] else 1) == WORKS


def test_a_fork_waits_for_a_step_that_is_made_meanwhile() -> None:
    turn, done = Turn("a step"), []

    def call(say: Callable[[], None]) -> None:
        def outside() -> None:
            say()
            threading.Event().wait(0.1)  # the fork waits for this turn
            later = threading.Thread(target=lambda: Turn("a step").alone(inside))
            later.start()
            assert begun.wait(10)

        def inside() -> None:
            begun.set()
            threading.Event().wait(0.1)
            done.append("whole")

        turn.alone(outside)

    begun = threading.Event()
    with beside(call):
        assert forked(lambda: WORKS if done == ["whole"] else 1) == WORKS


def test_a_child_computes_with_one_thread_even_if_no_state_lives() -> None:
    """The threads of OpenMP are gone also if no state has lived on, and a kernel would wait for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, 2))
    try:
        (torch.ones(1 << 20) + 1).sum()
        fcg.graph_fn(lambda x: x + 1)(torch.ones(1 << 20))
        assert forked(lambda: WORKS if torch.get_num_threads() == 1 else 1) == WORKS
    finally:
        torch.set_num_threads(threads)


# -- the cache of autocast, which has a lock in torch ------------------------------------------------------------------


class _Finalized(TorchDispatchMode):
    """Calls a function when autocast drops a cast that it has kept: it holds its lock then."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act = act

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].requires_grad:
            weakref.finalize(out, self._act)
        return out


@pytest.mark.usefixtures("gradients")
def test_a_child_does_not_wait_for_the_lock_of_autocast() -> None:
    """Another thread empties the cache while the process is forked; a trace in the child has nothing to empty."""
    forked_by_now, weight = threading.Event(), torch.ones(4, 4, requires_grad=True)

    def empty(say: Callable[[], None]) -> None:
        def hold() -> None:
            say()
            assert forked_by_now.wait(60)

        with torch.autocast("cpu", dtype=torch.bfloat16), _Finalized(hold):
            weight @ weight

    with beside(empty):
        try:
            assert forked(works) == WORKS
        finally:
            forked_by_now.set()


def test_casts_that_a_step_has_kept_do_not_outlive_it() -> None:
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
    with canonical(), torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
        assert (x @ weight).any()
    weight.data.zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not (x @ weight).any()


# -- imports, whose locks are Python's ---------------------------------------------------------------------------------

IMPORTING = threading.Event()


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], object]]:
    """Imports a module of torch, which takes a while."""
    said = f"sys.modules[{__name__!r}].IMPORTING.set()"
    (tmp_path / "fcg_slow.py").write_text(f"import sys, threading\n{said}\nthreading.Event().wait(0.3)\n")
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])
    IMPORTING.clear()
    yield lambda: importlib.import_module("torch.fcg_slow")
    sys.modules.pop("torch.fcg_slow", None)


def importing(slow: Callable[[], object]) -> Callable[[Callable[[], None]], None]:
    def act(say: Callable[[], None]) -> None:
        waiting = threading.Thread(target=lambda: IMPORTING.wait(10) and say())
        waiting.start()
        slow()

    return act


def test_a_fork_waits_for_what_another_thread_imports_of_torch(slow: Callable[[], object]) -> None:
    """Its lock would be held in the child for ever, and the module half made."""
    with beside(importing(slow)):
        assert forked(lambda: WORKS if traced() == WORKS and slow() else 1) == WORKS


def test_a_child_is_told_of_an_import_that_took_too_long(
    slow: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_IMPORT", 0.0)
    with beside(importing(slow)):
        assert forked(lambda: traced("was importing `torch.fcg_slow`")) == REFUSED
    assert forked(traced) == WORKS


def test_a_child_imports_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread was importing the compiler when the process was forked: it stands among the modules already."""
    monkeypatch.delattr(torch, "_dynamo")
    monkeypatch.delitem(sys.modules, "torch._dynamo.eval_frame")
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    compiling._forked()


# -- generators of the whole process, which have locks in torch and numpy ----------------------------------------------


def traced(said: str = "was drawing random numbers") -> int:
    """Whether a trace works, or is refused at once."""
    try:
        return WORKS if fcg.graph_fn(lambda x: x + 1)(torch.ones(2)).tolist() == [2, 2] else 1
    except fcg.BusyError as error:
        return REFUSED if said in str(error) else 1


def test_a_child_of_a_fork_in_a_draw_of_numpy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_DRAW", 0.1)
    with np.random.mtrand._rand._bit_generator.lock:
        (code,) = at_once(lambda: forked(traced))
    assert code == REFUSED
    assert traced() == WORKS


def test_a_child_of_a_fork_in_a_draw_of_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_DRAW", 0.3)
    over = threading.Event()

    def draw(say: Callable[[], None]) -> None:
        numbers = torch.empty(1 << 22)
        say()
        while not over.is_set():
            numbers.normal_()

    with beside(draw):
        try:
            codes = (forked(traced) for _ in range(50))  # one of them forks in the middle
            assert next(code for code in codes if code != WORKS) == REFUSED
        finally:
            over.set()
    monkeypatch.undo()
    assert forked(traced) == WORKS
