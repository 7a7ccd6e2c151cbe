"""Signal handlers may raise and call the library at any moment, and no torch mode stays on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.ambient.modes import ordinary, without_gradients
from functional_cg.concurrency.interrupts import held_back
from functional_cg.testing import Simulator
from tests.shares import THOROUGH
from tests.stress import signals
from tests.stress.signals import modes
from tests.test_ownership import Strike

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread only"
)


class Late(Exception):
    """What a handler of the user's raises."""


@contextmanager
def handling(handler: Callable[..., Any], number: int = signal.SIGUSR1) -> Iterator[None]:
    old = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, old)


def raises(error: BaseException) -> Callable[..., Any]:
    def handler(number: int, frame: Any) -> None:
        raise error

    return handler


def ends(number: int, frame: Any) -> None:
    sys.exit(3)


class Struck:
    """A step that gets a signal in one of its ops, while it is traced, and the state that it works on."""

    def __init__(self, library: Any, number: int, times: int = 1, ops: int = 1) -> None:
        self.left, self.runs, self.seen = times, 0, 0
        self.state: Any = fcg.place({"w": torch.zeros(2), "n": torch.zeros((), dtype=torch.int64)})

        def strike(x: Tensor) -> Tensor:  # the trace sees its result only
            self.seen += 1
            self.runs += self.seen % 4 == 1
            if self.left and self.seen % 4 == ops:
                self.left, self.seen = self.left - 1, 0
                signal.raise_signal(number)
            return torch.empty_like(x)

        library.define("strike(Tensor x) -> Tensor")
        library.impl("strike", strike, "Meta")
        library.impl("strike", torch.clone, "CPU")
        op = torch.ops.fcg_signals.strike.default

        @fcg.graph_step
        def step(state: Any, x: Tensor) -> Any:
            def loss(w: Tensor) -> Tensor:
                for _ in range(4):
                    x2 = op(x)
                return (w * x2).sum()

            grad = torch.func.grad(loss)(state["w"])
            return {"w": state["w"] + grad, "n": state["n"] + 1}, {}

        self.step = step

    def __call__(self) -> None:
        self.state, _ = self.step(self.state, torch.ones(2))


@pytest.fixture
def striking() -> Iterator[Callable[..., Struck]]:
    """Makes what is struck."""
    with torch.library._scoped_library("fcg_signals", "FRAGMENT") as library:
        yield partial(Struck, library)


@pytest.mark.parametrize("ops", range(4))
@pytest.mark.parametrize(
    ("number", "handler", "raised"),
    [
        (signal.SIGTERM, ends, SystemExit),
        (signal.SIGUSR1, raises(Late()), Late),
        (signal.SIGALRM, raises(TimeoutError()), TimeoutError),
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
    ],
    ids=["SIGTERM", "SIGUSR1", "SIGALRM", "SIGINT"],
)
def test_what_a_handler_raises_in_a_trace_is_raised_by_the_call(
    number: Any, handler: Any, raised: Any, ops: int, striking: Any
) -> None:
    struck = striking(number, ops=ops)
    with handling(handler, number):
        before = modes()
        with pytest.raises(raised):
            struck()
        assert modes() == before
        assert struck.state["w"].tolist() == [0.0, 0.0]
        struck()
    assert struck.state["w"].tolist() == [1.0, 1.0]
    assert struck.step.stats.traces == struck.step.stats.captures == 1


def test_a_handler_may_call_the_library_in_a_trace(striking: Any) -> None:
    """It runs outside of the trace, which is begun anew; what it computes is real."""
    look, struck, seen = fcg.graph_fn(lambda s: s["n"] * 10), striking(signal.SIGUSR1), []

    def handler(number: int, frame: Any) -> None:
        struck.state = struck.state.replace(n=7)
        seen.append((int(look(struck.state)), fcg.snapshot(struck.state)["n"].item(), torch.ones(2).tolist()))

    given = struck.state
    with handling(handler), pytest.raises(fcg.DonatedStateError):
        struck()  # with a state that the handler has taken over
    assert seen == [(70, 7, [1.0, 1.0])]
    assert int(given.latest()["n"]) == 7
    struck()
    assert int(struck.state["n"]) == 8


def test_a_trace_gives_way_a_few_times_only(striking: Any) -> None:
    """A timer that strikes at each trace does not keep it from its end; what strikes while one waits is that one."""
    called: list[int] = []
    struck = striking(signal.SIGALRM, times=100)
    with handling(lambda number, frame: called.append(number), signal.SIGALRM):
        struck()
    assert struck.state["w"].tolist() == [1.0, 1.0]
    assert len(called) == 4 < 100 - struck.left


def test_code_that_catches_everything_does_not_keep_a_signal() -> None:
    called: list[int] = []

    def function(state: Any, x: Tensor) -> Any:
        if not called:
            signal.raise_signal(signal.SIGUSR1)
        try:
            x = x * 2
        except BaseException:
            x = x + 1000
        return {"w": state["w"] + x}, {}

    step = fcg.graph_step(function)
    with handling(lambda number, frame: called.append(number)):
        state, _ = step({"w": torch.zeros(2)}, torch.ones(2))
    assert called == [signal.SIGUSR1]
    assert state["w"].tolist() == [2.0, 2.0]


def hold(kinds: list[int], called: list[int]) -> None:
    with held_back():
        for number in kinds:
            signal.raise_signal(number)
        assert called == []


def test_all_that_wait_are_called_also_where_one_raises() -> None:
    called: list[int] = []

    def noted(number: int, frame: Any) -> None:
        called.append(number)
        if number == signal.SIGUSR1:
            raise Late

    kinds = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM]
    with handling(noted), handling(noted, signal.SIGUSR2), handling(noted, signal.SIGALRM):
        with pytest.raises(Late):
            hold(kinds, called)
        assert called == kinds
        assert [signal.getsignal(number) for number in kinds] == [noted] * 3


def test_a_timer_that_strikes_all_the_while_is_answered_once() -> None:
    """As Python keeps one of a signal, however often it comes; each one more would be a frame more at the end."""
    called: list[int] = []
    with (
        handling(lambda number, frame: called.append(number), signal.SIGALRM),
        handling(ends, signal.SIGUSR2),
    ):
        with pytest.raises(SystemExit):
            hold([signal.SIGALRM] * 2 * sys.getrecursionlimit() + [signal.SIGUSR2], called)
    assert called == [signal.SIGALRM]


def test_a_handler_that_is_exchanged_meanwhile_stays() -> None:
    with handling(ends):
        with held_back():
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_what_is_raised_while_handlers_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one that is back is called at once; the others are back all the same."""
    called, put = [], signal.signal

    def strikes(number: int, frame: Any) -> None:
        called.append(number)
        raise Late

    def put_and_strike(number: int, handler: Any) -> Any:
        old = put(number, handler)
        if handler is strikes:
            signal.raise_signal(number)
        return old

    with handling(strikes), handling(ends, signal.SIGUSR2), handling(ends, signal.SIGALRM):
        with pytest.raises(Late), held_back():
            monkeypatch.setattr(signal, "signal", put_and_strike)
        monkeypatch.undo()
        assert called == [signal.SIGUSR1] * 5  # put back again each time, until it gives up
        assert [signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGALRM)] != [ends] * 2
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR2) is not ends


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_child_that_is_forked_meanwhile_gets_its_signals() -> None:
    with handling(lambda number, frame: os._exit(5)), held_back():
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGUSR1)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5


def test_signals_wait_for_the_end_of_a_capture() -> None:
    class Striking(Simulator):
        def capture(self, *arguments: Any) -> Any:
            signal.raise_signal(signal.SIGTERM)
            finished.append(super().capture(*arguments))
            return finished[-1]

    finished: list[Any] = []
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), backend=Striking())
    state = fcg.place({"w": torch.zeros(2)})
    with handling(ends, signal.SIGTERM), pytest.raises(SystemExit):
        step(state, torch.ones(2))
    assert len(finished) == 1
    assert state.latest()["w"].tolist() == [0.0, 0.0]


# -- modes -------------------------------------------------------------------------------------------------------------


def test_the_guard_restores_both_modes() -> None:
    """Private to torch: a change would show here."""
    for inference in (False, True):
        for grad in (False, True):
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                before = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
                with ordinary():
                    without_gradients()
                    assert not torch.is_inference_mode_enabled()
                    assert not torch.is_grad_enabled()
                    assert not torch.ones(1).is_inference()
                assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == before


STEP = fcg.graph_step(lambda s, x: ({"w": s["w"] + x, "n": s["n"] + 1}, {"sum": s["w"].sum()}))
LOOK = fcg.graph_fn(lambda s: s["w"].sum())
CALLS: dict[str, Callable[[Any], Any]] = {
    "snapshot": fcg.snapshot,
    "state_dict": fcg.state_dict,
    "replace": lambda state: state.replace(n=1),
    "load_state_dict": lambda state: fcg.load_state_dict(state, {"w": torch.ones(2), "n": torch.tensor(3)}),
    "read": lambda state: state["w"] + 1,
    "numpy": lambda state: state["w"].numpy(),
    "step": lambda state: STEP(state, torch.ones(2)),
    "graph_fn": lambda state: LOOK(state),
    "eager": lambda state: STEP.eager(state, torch.ones(2)),
}


class Anywhere(Strike):
    """Strikes in torch's and Python's own bytecode, too."""

    everywhere = ("",)


@pytest.mark.filterwarnings("ignore")  # Python swallows what strikes in the callback of a weak reference
@pytest.mark.parametrize("inference", [False, True], ids=["", "in inference mode"])
@pytest.mark.parametrize("call", CALLS)
def test_no_mode_stays_on_at_any_bytecode(call: str, inference: bool) -> None:
    """And the turn is given back, and the state is of one generation: it goes on after each of them.

    By default each bytecode in one of the two modes.
    """
    first, each = (0, 1) if THOROUGH else (int(inference), 2)
    act, state = CALLS[call], fcg.place({"w": torch.zeros(2), "n": 0})
    state, _ = STEP(state, torch.ones(2))
    LOOK(state)
    guard = torch._C._InferenceMode(inference)
    with guard:
        act(fcg.fork(state))
        before = modes()
        for moment in range(first, 3000, each if call != "eager" else 7):
            tracer = sys.gettrace()
            sys._getframe().f_trace_opcodes = True
            struck = False
            try:
                sys.settrace(Anywhere(moment))
                act(state)
            except KeyboardInterrupt:
                struck = True
            finally:
                sys.settrace(tracer)
            assert modes() == before, moment
            state = state.latest()
            assert not state._lease.arena.turn.busy
            assert fcg.snapshot(state).keys() == {"w", "n"}
            if not struck:
                break
        assert moment > 3


@pytest.mark.filterwarnings("ignore")  # a file that Python closes late, as a signal struck before its `with`
def test_stress_by_signals() -> None:
    counts = signals.run(150)
    assert counts["do_step"] + counts["do_trace"] > 0
