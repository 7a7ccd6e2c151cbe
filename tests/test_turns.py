"""Turn-taking: threads wait, code that interrupts a call may read or is refused, forks find whole states."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

import functional_cg as fcg
from functional_cg.concurrency import turns
from functional_cg.concurrency.turns import Turn, at_one_time
from tests.at_once import at_once
from tests.stress import forks, threads

BOTH = {"large": torch.zeros(64), "n": torch.zeros((), dtype=torch.int64)}


def advance(state: Any, x: Tensor) -> Any:
    return {name: leaf + x.to(leaf.dtype) for name, leaf in state.items()}, {"old": state["n"] + 0}


def a_state() -> Any:
    return fcg.place(BOTH)


# -- the lock itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a step", "a state"])
def test_a_turn_is_for_one(kind: Any) -> None:
    turn, inside, most = Turn(kind), [], []

    def work() -> None:
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.001)
        inside.pop()

    at_once(*[partial(turn.alone, work)] * 4, *[partial(turn.read, work)] * 4)
    assert most == [1] * 8
    assert not turn.busy


def test_in_the_middle_of_a_call_reading_is_all_there_is() -> None:
    turn = Turn("a state")

    def middle() -> list[Any]:
        with pytest.raises(
            fcg.BusyError, match=r"`step`: a state was used in the middle of a call that is using it"
        ):
            turn.alone(list, "step")
        return [turn.read(lambda: turn.read(lambda: "read")), turn.busy]

    assert turn.alone(middle) == ["read", True]
    assert turn.read(middle) == ["read", True]
    assert not turn.busy


def test_what_is_not_whole_is_not_read() -> None:
    turn = Turn("a state")
    with turn.shut():
        for use in (turn.alone, turn.read):
            with pytest.raises(fcg.BusyError, match="a state was used"):
                use(list)
    assert turn.read(lambda: "again") == "again"


def test_an_exception_gives_the_turn_back() -> None:
    turn = Turn("a step")
    for use in (turn.alone, turn.read):
        with pytest.raises(ZeroDivisionError):
            use(lambda: 1 // 0)
        assert not turn.busy
        assert at_once(lambda: turn.alone(lambda: "another thread")) == ["another thread"]


def test_several_are_taken_in_one_order() -> None:
    """Two threads that name them in different orders do not wait for each other."""
    several = [Turn("a state") for _ in range(4)]
    orders = [several, several[::-1]] * 4
    assert (
        at_once(*(partial(at_one_time, order, lambda: time.sleep(0.002)) for order in orders)) == [None] * 8
    )


def test_out_of_order_nobody_waits_for_whoever_waits_for_him() -> None:
    """A handler in the middle of a read wants a step; another thread is in that step, and wants what is read."""
    state, step = Turn("a state"), Turn("a step")
    reading, stepping = threading.Event(), threading.Event()

    def handler() -> Any:
        reading.set()
        assert stepping.wait(10)
        return step.alone(lambda: "done")

    def other() -> Any:
        assert reading.wait(10)

        def call() -> Any:
            stepping.set()
            return state.alone(lambda: "stepped")

        return step.alone(call)

    refused, stepped = at_once(lambda: state.read(handler), other)
    assert isinstance(refused, fcg.BusyError)
    assert stepped == "stepped"


def test_out_of_order_a_thread_waits_where_nobody_waits_for_it() -> None:
    state, step = Turn("a state"), Turn("a step")
    stepping, reading = threading.Event(), threading.Event()

    def handler() -> Any:
        reading.set()
        return step.alone(lambda: "done")

    def read() -> Any:
        assert stepping.wait(10)
        return state.read(handler)

    def other() -> Any:
        def call() -> Any:
            stepping.set()
            assert reading.wait(10)
            time.sleep(0.02)
            return "stepped"

        return step.alone(call)

    assert at_once(read, other) == ["done", "stepped"]


def test_private_names_that_are_used() -> None:
    lock = threading.RLock()
    assert not lock._is_owned()
    with lock:
        assert lock._is_owned()
        assert at_once(lock._is_owned) == [False]


def test_turns_die_with_what_they_are_for() -> None:
    step, state = fcg.graph_step(advance), a_state()
    state, _ = step(state, torch.ones(()))
    gone = [weakref.ref(turn) for turn in (step._turn, state._lease.arena.turn)]
    del step, state
    gc.collect()
    assert [turn() for turn in gone] == [None, None]


# -- reads of one generation -----------------------------------------------------------------------------------------


@contextmanager
def once_in_the_middle(what: Callable[[], Any]) -> Iterator[list[Any]]:
    """An op that does something in its kernel, as a handler would that Python runs then; and what came of it."""
    found: list[Any] = []
    with torch.library._scoped_library("fcg_turns", "FRAGMENT") as library:
        library.define("struck(Tensor x) -> Tensor")

        def kernel(x: Tensor) -> Tensor:
            if not found:
                found.append(None)
                try:
                    found[0] = what()
                except fcg.FunctionalCGError as error:
                    found[0] = error
            return x.clone()

        library.impl("struck", kernel, "CPU")
        library.impl("struck", torch.empty_like, "Meta")
        yield found


READS = {
    "aminmax": lambda state: float(torch.aminmax(state["large"])[1]),
    "numpy": lambda state: float(state["large"].numpy().max()),
    "DLPack": lambda state: float(np.from_dlpack(state["large"]).max()),
    "tolist": lambda state: max(state["large"].tolist()),
    "snapshot": lambda state: float(fcg.snapshot(state)["n"]),
    "state_dict": lambda state: float(fcg.state_dict(state)["n"]),
    "fork": lambda state: float(fcg.fork(state)["n"]),
    "repr": lambda state: float("tensor" in repr(state["large"])),
    "graph_fn": lambda state: float(fcg.graph_fn(lambda s: s["n"] * 1.0)(state)),
    "graph_fn.eager": lambda state: float(fcg.graph_fn(lambda s: s["n"] * 1.0).eager(state)),
    "an input": lambda state: float(fcg.graph_fn(lambda tree: tree["s"]["n"] * 1.0)({"s": state})),
}


@pytest.mark.parametrize("read", READS)
def test_who_reads_while_another_thread_writes_waits(read: str) -> None:
    """The writer is held in the middle; the read waits for its end, and then finds its state donated."""
    state, in_the_middle, go_on = a_state(), threading.Event(), threading.Event()
    turn = state._lease.arena.turn

    def write() -> Any:
        def slowly() -> Any:
            in_the_middle.set()
            assert go_on.wait(10)
            return state._written([0, 1], [torch.ones(64), torch.ones((), dtype=torch.int64)], "replace")

        return turn.alone(slowly)

    def reader() -> Any:
        assert in_the_middle.wait(10)
        threading.Timer(0.02, go_on.set).start()
        return READS[read](state)

    written, seen = at_once(write, reader)
    assert isinstance(seen, fcg.DonatedStateError)
    assert int(written["n"]) == 1


@pytest.mark.parametrize("write", ["step", "eager", "replace", "load_state_dict"])
def test_in_the_middle_of_a_step_reads_work_and_writes_are_refused(write: str) -> None:
    step, other = fcg.graph_step(advance), fcg.graph_step(advance)
    shared = [a_state()]
    shared[0], _ = other(shared[0], torch.ones(()))
    writes: dict[str, Callable[[], Any]] = {
        "step": lambda: other(shared[0], torch.ones(())),
        "eager": lambda: other.eager(shared[0], torch.ones(())),
        "replace": lambda: shared[0].replace(n=7),
        "load_state_dict": lambda: fcg.load_state_dict(shared[0], fcg.state_dict(shared[0])),
    }
    seen: list[float] = []

    def handler() -> Any:
        seen.extend(read(shared[0]) for name, read in READS.items() if name != "repr")
        return writes[write]()

    with once_in_the_middle(handler) as found:
        struck = torch.ops.fcg_turns.struck.default
        step = fcg.graph_step(
            lambda s, x: ({"large": struck(s["large"]) + x, "n": s["n"] + 1}, {}), lowering="aten"
        )
        shared[0], _ = step(shared[0], torch.ones(()))
    assert isinstance(found[0], fcg.BusyError)
    assert seen == [1.0] * len(seen)
    assert int(shared[0]["n"]) == 2
    shared[0], _ = other(shared[0], torch.ones(()))
    assert int(shared[0]["n"]) == 3


@pytest.mark.parametrize("what", ["call", "lower", "eager"])
def test_a_step_in_the_middle_of_itself(what: str) -> None:
    """Its buffers hold the inputs of the call outside; a function of no state at all has them too."""

    def again() -> Any:
        return {"call": fn, "lower": fn.lower, "eager": fn.eager}[what](torch.full((2,), 100.0))

    with once_in_the_middle(again) as found:
        struck = torch.ops.fcg_turns.struck.default
        fn = fcg.graph_fn(lambda x: struck(x) + x, lowering="aten")
        assert fn(torch.ones(2)).tolist() == [2.0, 2.0]
    if what == "eager":
        assert found[0].tolist() == [200.0, 200.0]
    else:
        assert isinstance(found[0], fcg.BusyError)
        assert str(found[0]).startswith("`<lambda>`: a step was used in the middle of a call")


def test_a_step_that_is_closed_in_the_middle_of_a_call() -> None:
    with once_in_the_middle(lambda: fn.close()) as found:
        struck = torch.ops.fcg_turns.struck.default
        fn = fcg.graph_fn(lambda x: struck(x) + x, lowering="aten")
        assert fn(torch.ones(2)).tolist() == [2.0, 2.0]
        assert found == [None]
        with pytest.raises(fcg.ClosedError):
            fn(torch.ones(2))
        fn.close()


def test_a_step_that_is_closed_twice_in_the_middle_of_its_first_call() -> None:
    """A handler that strikes again and again: what the call has just captured stays until its end."""

    def captured(*arguments: Any) -> Any:
        step.close()
        made = capture(*arguments)
        step.close()
        return made

    step = fcg.graph_step(advance)
    capture, step._captured_for = step._captured_for, captured  # type: ignore[method-assign]
    state, _ = step(a_state(), torch.ones(()))
    assert int(state["n"]) == 1
    with pytest.raises(fcg.ClosedError):
        step(state, torch.ones(()))


def test_a_call_that_comes_after_the_end() -> None:
    """Another thread has taken the fast path just before ``close``."""
    step, state = fcg.graph_step(advance), a_state()
    state, _ = step(state, torch.ones(()))
    late = step._fast
    step.close()
    step._fast = late
    with pytest.raises(fcg.ClosedError, match="called after"):
        step(state, torch.ones(()))
    assert int(state["n"]) == 1


def test_one_arena_is_taken_over_once() -> None:
    """Two steps have captured it; two threads call them with plain trees when its state is gone."""
    for _ in range(5):
        steps = [fcg.graph_step(advance), fcg.graph_step(advance)]
        state = a_state()
        for step in steps:
            state, _ = step(state, torch.ones(()))
        del state
        plain = [{name: leaf + k for name, leaf in BOTH.items()} for k in (10, 20)]
        found = at_once(
            *(partial(step, tree, torch.ones(())) for step, tree in zip(steps, plain, strict=True))
        )
        assert [int(state["n"]) for state, _ in found] == [11, 21]


def test_a_finalizer_that_calls_the_library_hangs_nothing() -> None:
    step, look = fcg.graph_step(advance), fcg.graph_fn(lambda s: s["n"] + 0)
    shared, seen = [a_state()], []
    shared[0], _ = step(shared[0], torch.ones(()))
    look(shared[0])

    class Dying:
        def __del__(self) -> None:
            for call in (lambda: int(look(shared[0])), lambda: step(shared[0], torch.ones(()))):
                try:
                    seen.append(call())
                except fcg.BusyError as error:
                    seen.append(error)

    def kill() -> None:
        cycle: list[Any] = [Dying()]
        cycle.append(cycle)
        del cycle
        gc.collect()

    with once_in_the_middle(kill):
        struck = torch.ops.fcg_turns.struck.default
        outer = fcg.graph_step(
            lambda s, x: ({"large": struck(s["large"]), "n": s["n"] + 1}, {}), lowering="aten"
        )
        shared[0], _ = outer(shared[0], torch.ones(()))
    assert seen[0] == 1
    assert isinstance(seen[1], fcg.BusyError)
    assert int(shared[0]["n"]) == 2


# -- results -----------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """A class among the metrics whose objects are made by the user's own code."""

    value: Any


MAKING: list[Callable[[Any], Any]] = []


def _made(values: Any, _: Any) -> Report:
    (value,) = values
    if MAKING and type(value) is Tensor:
        MAKING[-1](value)
    return Report(value)


_pytree.register_pytree_node(Report, lambda report: ([report.value], None), _made)


@contextmanager
def making(what: Callable[[Any], Any]) -> Iterator[None]:
    MAKING.append(what)
    try:
        yield
    finally:
        MAKING.pop()


def reports(state: Any, x: Tensor) -> Any:
    return {name: leaf + x.to(leaf.dtype) for name, leaf in state.items()}, {
        "a": Report(x + 1),
        "n": state["n"] + 0,
    }


def test_result_error_has_what_was_computed() -> None:
    step, state = fcg.graph_step(reports), a_state()

    def fails(value: Any) -> None:
        raise KeyError("no such report")

    for call in range(3):  # the first call and those after it
        with making(fails), pytest.raises(fcg.ResultError, match="`reports`: KeyError was raised") as caught:
            step(state, torch.ones(()))
        assert isinstance(caught.value.__cause__, KeyError)
        assert [leaf.tolist() for leaf in caught.value.leaves] == [2.0, call]
        state = caught.value.state
        assert int(state["n"]) == call + 1 == state.generation
    state, metrics = step(state, torch.ones(()))
    assert metrics["a"].value == 2
    look = fcg.graph_fn(lambda x: Report(x * 2))
    with making(fails), pytest.raises(fcg.ResultError, match="its outputs are put together") as caught:
        look(torch.ones(()))
    assert caught.value.state is None
    assert caught.value.leaves[0] == 2


def test_metrics_that_call_the_library() -> None:
    """Also the step itself: its call is over when its result is put together."""
    step, look = fcg.graph_step(reports), fcg.graph_fn(lambda s: s["n"] + 0)
    state, seen = a_state(), []
    deep = [0]

    def calls(value: Any) -> None:
        deep[0] += 1
        if deep[0] < 3:
            step(state.latest(), torch.ones(()))
        latest = state.latest()
        seen.append((int(look(latest)), int(fcg.snapshot(latest)["n"])))

    with making(calls):
        first, _ = step(state, torch.ones(()))
    assert seen == [(3, 3)] * 3
    assert int(first.latest()["n"]) == 3


def test_lines_that_are_printed_may_call_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    look, seen = fcg.graph_fn(lambda s: s["n"] + 0), []

    @fcg.graph_step
    def step(state: Any, x: Tensor) -> Any:
        fcg.debug_print("n = {}", state["n"])
        return {name: leaf + x.to(leaf.dtype) for name, leaf in state.items()}, {}

    class Out:
        def write(self, text: str) -> None:
            latest = state.latest()
            seen.append((text, int(look(latest))))
            if len(seen) == 2:
                step(latest, torch.ones(()))

    state = a_state()
    monkeypatch.setattr(sys, "stdout", Out())
    state, _ = step(state, torch.ones(()))
    state, _ = step(state, torch.ones(()))
    monkeypatch.undo()
    assert seen == [("n = 0\n", 1), ("n = 1\n", 2), ("n = 2\n", 3)]
    assert int(state.latest()["n"]) == 3


# -- forks -------------------------------------------------------------------------------------------------------------

on_posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
ignores_fork = pytest.mark.filterwarnings("ignore:.*fork")


def in_a_child(act: Callable[[], bool]) -> int:
    """The exit code of a child: 0 where it is true; negative if it hangs."""
    return forks.forked(lambda: 0 if act() else 2)


@on_posix
@ignores_fork
def test_a_fork_waits_for_the_call_of_another_thread() -> None:
    state, step = a_state(), fcg.graph_step(advance)
    state, _ = step(state, torch.ones(()))
    turn, inside = state._lease.arena.turn, threading.Event()

    def call() -> None:
        inside.set()
        time.sleep(0.1)

    thread = threading.Thread(target=partial(turn.alone, call))
    thread.start()
    assert inside.wait(10)
    assert in_a_child(lambda: int(step(state, torch.ones(()))[0]["n"]) == 2) == 0
    thread.join()
    assert int(step(state, torch.ones(()))[0]["n"]) == 2


@on_posix
@ignores_fork
def test_a_child_of_a_fork_in_a_long_call_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is of no concern to that call works: another state, and the step itself."""
    monkeypatch.setattr(turns, "_PATIENCE", 0.01)
    state, other, step = a_state(), a_state(), fcg.graph_step(advance)
    other, _ = step(other, torch.ones(()))
    inside, over = threading.Event(), threading.Event()

    def call() -> None:
        inside.set()
        assert over.wait(10)

    def refused() -> bool:
        seen = []
        for use in (*READS.values(), lambda s: s.replace(n=1), lambda s: step(s, torch.ones(()))):
            try:
                use(state)
            except fcg.BusyError as error:
                seen.append("when this process was forked" in str(error))
        new, _ = step(other, torch.ones(()))
        return seen == [True] * (len(READS) + 2) and int(new["n"]) == 2

    held = partial(step._turn.alone, partial(state._lease.arena.turn.alone, call))
    thread = threading.Thread(target=held)
    thread.start()
    assert inside.wait(10)
    try:
        assert in_a_child(refused) == 0
    finally:
        over.set()
        thread.join()
    assert int(step(state, torch.ones(()))[0]["n"]) == 1


@on_posix
@ignores_fork
def test_a_child_computes_with_one_thread() -> None:
    """OpenMP's threads are not there, and it would wait for them for ever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, 2))
    state = fcg.place({"large": torch.zeros(1 << 20), "n": 0})
    step = fcg.graph_step(advance)
    try:
        state, _ = step(state, torch.ones(()))
        assert in_a_child(lambda: float(step(state, torch.ones(()))[0]["large"].sum()) == 2 << 20) == 0
    finally:
        torch.set_num_threads(threads)


@on_posix
@ignores_fork
def test_a_fork_from_the_middle_of_a_call() -> None:
    """As from a handler: parent and child both go on with it."""
    codes = []

    def fork() -> None:
        number = os.fork()
        codes.append(number)

    with once_in_the_middle(fork):
        struck = torch.ops.fcg_turns.struck.default
        step = fcg.graph_step(
            lambda s, x: ({"large": struck(s["large"]), "n": s["n"] + 1}, {}), lowering="aten"
        )
        state, _ = step(a_state(), torch.ones(()))
        ok = int(state["n"]) == 1 and int(step(state, torch.ones(()))[0]["n"]) == 2
    if codes == [0]:
        os._exit(0 if ok else 2)
    assert ok
    assert os.waitstatus_to_exitcode(os.waitpid(codes[0], 0)[1]) == 0


def test_states_on_a_gpu_are_refused_in_a_child() -> None:
    turn = Turn("a state", on_gpu=True)
    try:
        turns._turns.before_fork()
        living = turns._turns.living()
        assert turn in living
    finally:
        turns._turns.after_fork()
    turn.end(turns._on_a_gpu)
    with pytest.raises(fcg.BusyError, match="start processes by spawn"):
        turn.read(list)


# -- stress, in short --------------------------------------------------------------------------------------------------


def test_stress_by_threads() -> None:
    counts = threads.run(1.0, floats=1 << 15)
    assert sum(counts.values()) > 20


@on_posix
@ignores_fork
def test_stress_by_forks() -> None:
    assert forks.run(3)["works"] > 0


def test_stress_is_a_command() -> None:
    text = Path(__file__).with_name("stress").joinpath("__main__.py").read_text()
    assert "python -m tests.stress" in text
