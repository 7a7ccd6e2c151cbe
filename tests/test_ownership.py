"""Memory ownership: the arena, the pool and declared constants, and nothing else.

T-OWN: no tensor of the caller is ever adopted. T-OUT: what leaves a call is the caller's. T-DEREF: nothing that host
code can reach between two calls matters. And Ctrl-C at any moment loses nothing.
"""

from __future__ import annotations

import dis
import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_cg as fcg
from functional_cg import tree
from functional_cg.concurrency import interrupts
from functional_cg.concurrency.interrupts import held_back
from functional_cg.testing import Simulator, assert_no_alias, assert_trees_all_equal
from functional_cg.testing import strategies as fst
from tests.forked import Program
from tests.shares import CALLS, THOROUGH, few

BACKENDS = {"cpu": lambda: "auto", "simulator": Simulator}
INTERRUPTS = 50 if THOROUGH else 20

on_both_backends = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())


def data(n: int) -> dict[str, torch.Tensor]:
    """The batch of call ``n``: a pure function of ``n``, a new tensor each time."""
    x = torch.linspace(-1, 1, 12).reshape(4, 3).mul(1 + n % 7).sin()
    return {"x": x, "y": torch.arange(4) * (n + 1) % 2}


def module() -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return net


def create(net: torch.nn.Module, **fields: Any) -> Any:
    return fcg.TrainState.create(
        params={name: parameter.detach() for name, parameter in net.named_parameters()},
        optimizer=fcg.optim.adamw(0.05, weight_decay=0.01),
        key=fcg.random.key(3),
        **fields,
    )


def train(state: Any, batch: Any) -> Any:
    key = fcg.random.fold_in(state.key, state.step)

    def loss_fn(p: Any) -> Any:
        hidden = torch.tanh(torch.nn.functional.linear(batch["x"], p["0.weight"], p["0.bias"]))
        hidden = fcg.random.dropout(key, hidden, 0.2)
        logits = torch.nn.functional.linear(hidden, p["2.weight"], p["2.bias"])
        return torch.nn.functional.cross_entropy(logits, batch["y"]), logits

    (loss, logits), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
    metrics = {
        "loss": loss,
        "logits": logits,
        "grads": grads,
        "x": batch["x"],
        "w": state.params["0.weight"].T,
    }
    return state.apply_gradients(grads), metrics


def eager_run(calls: int, state: Any) -> Iterator[Any]:
    """What the Python function gives, call by call: (state, metrics), both owned."""
    step = fcg.graph_step(train, backend="eager")
    for n in range(calls):
        state, metrics = step(state, data(n))
        yield fcg.snapshot(state), metrics


def poison(backend: Any) -> None:
    if isinstance(backend, Simulator):
        backend.poison()


def pressure(sizes: set[int]) -> None:
    """Fill freed memory of the sizes in use with NaN, so that whoever still reads it will see."""
    gc.collect()
    for size in sizes:
        blocks = [torch.full((max(size, 1),), torch.nan) for _ in range(8)]
        del blocks[::2]
        blocks += [torch.full((max(size, 1),), -torch.nan) for _ in range(4)]


# -- T-OWN --------------------------------------------------------------------------------------------------------


@on_both_backends
def test_nothing_that_the_caller_drops_matters(backend: Callable[[], Any]) -> None:
    """T-OWN-1: drop model, state and batches after capture, and keep the allocator busy."""
    expected = list(eager_run(CALLS + 2, create(module())))
    sim = backend()
    step = fcg.graph_step(train, backend=sim)
    net = module()
    params = {name: parameter.detach() for name, parameter in net.named_parameters()}
    state = create(net)
    sizes = {p.numel() for p in params.values()} | {12, 4, 8, 20}
    batches = [data(0), data(1)]
    for batch in batches:
        state, metrics = step(state, batch)
    del net, params, batches, batch, metrics
    for n in range(2, CALLS + 2):
        pressure(sizes)
        poison(sim)
        state, metrics = step(state, data(n))
        assert_trees_all_equal((state, metrics), expected[n], f"call {n}")
    assert step.stats.replays == CALLS + 2


def test_a_closed_over_tensor_is_refused_with_its_place() -> None:
    """T-OWN-2: neither state nor input nor declared constant."""
    weight = torch.ones(3)

    def step(state: Any, x: torch.Tensor) -> Any:
        return {"w": state["w"] + x * weight}, {}

    with pytest.raises(
        fcg.ForeignTensorError, match=r"(?s)`step`: reads a tensor.*f32\[3\].*test_ownership.py:\d+"
    ):
        fcg.graph_step(step)({"w": torch.zeros(3)}, torch.ones(3))
    state, _ = fcg.graph_step(step, constants=(weight,))({"w": torch.zeros(3)}, torch.ones(3))
    assert state["w"].tolist() == [1.0, 1.0, 1.0]


def test_a_closed_over_module_is_refused() -> None:
    net = module()

    def step(state: Any, x: torch.Tensor) -> Any:
        return {"w": state["w"] + net(x).sum()}, {}

    with pytest.raises(fcg.ForeignTensorError, match="reads a tensor"):
        fcg.graph_step(step)({"w": torch.zeros(3)}, torch.ones(4, 3))


@given(draw=st.data())
def test_random_steps_survive_owners_that_let_go(draw: st.DataObject) -> None:
    """T-OWN-3: on the simulator, with every storage of the caller overwritten as soon as a call returns."""
    program = draw.draw(fst.step_fns())
    sim = Simulator()
    step = fcg.graph_step(program, backend=sim)
    eager = fcg.graph_step(program, backend="eager")
    mine = fcg.snapshot(program.state)
    state, expected = fcg.place(mine), fcg.place(program.state)
    for leaf in tree.leaves(mine):
        leaf.zero_()
    del mine, leaf
    for n in range(6):
        x = program.x * (n + 1)
        state, metrics = step(state, x)
        expected, wanted = eager(expected, program.x * (n + 1))
        x.fill_(torch.nan)
        sim.poison()
        assert_trees_all_equal((state, metrics), (expected, wanted), f"call {n}")


@on_both_backends
def test_constants_are_the_steps_own(backend: Callable[[], Any]) -> None:
    """The caller may drop a declared constant; it may not write it in silence."""
    table = torch.arange(6.0)

    def make(table: torch.Tensor) -> Any:
        return fcg.graph_step(
            lambda s, i: ({"w": s["w"] + table * i}, {}), constants=(table,), backend=backend()
        )

    step = make(table)
    state, _ = step({"w": torch.zeros(6)}, 1.0)
    state, _ = step(state, 2.0)
    assert state["w"].tolist() == [3.0 * n for n in range(6)]
    table.add_(1)
    with pytest.raises(fcg.BakedValueError, match="constant was written"):
        step(state, 1.0)
    assert state["w"].tolist() == [3.0 * n for n in range(6)]


# -- inputs -------------------------------------------------------------------------------------------------------


@on_both_backends
@given(draw=st.data())
def test_inputs_are_never_written(backend: Callable[[], Any], draw: st.DataObject) -> None:
    example = {
        "x": torch.zeros(2, 3),
        "n": torch.zeros(3, dtype=torch.int64),
        "m": torch.zeros(2, dtype=torch.bool),
    }
    calls = draw.draw(fst.inputs(example, 4))
    before = [fcg.snapshot(call) for call in calls]
    start = {"w": torch.zeros(2, 3), "n": torch.zeros(3, dtype=torch.int64)}
    step = fcg.graph_step(
        lambda s, b: ({"w": s["w"] + b["x"], "n": b["n"]}, {"m": ~b["m"], "x": b["x"]}), backend=backend()
    )
    state: Any = start
    for call in calls:
        state, _ = step(state, call)
    for call, was in zip(calls, before, strict=True):
        assert_trees_all_equal(call, was, "inputs")
    assert_trees_all_equal(
        start, {"w": torch.zeros(2, 3), "n": torch.zeros(3, dtype=torch.int64)}, "plain state"
    )


@on_both_backends
def test_a_batch_that_is_kept_stays_as_it_was(backend: Callable[[], Any]) -> None:
    """A validation batch that the caller has in hand is no static buffer, least of all the first one."""
    step = fcg.graph_step(train, backend=backend())
    state, kept = create(module()), [data(n) for n in range(4)]
    for batch in kept:
        state, _ = step(state, batch)
    assert_trees_all_equal(kept, [data(n) for n in range(4)], "batches")


@on_both_backends
@pytest.mark.parametrize("kind", ["tensor", "numpy"])
def test_the_caller_may_overwrite_its_inputs_when_the_call_returns(
    backend: Callable[[], Any], kind: str
) -> None:
    """One host buffer for all calls, overwritten with garbage right after each."""
    step = fcg.graph_step(lambda s, x: ({"sum": s["sum"] + x}, {"x": x}), backend=backend())
    buffer: Any = np.zeros(5, dtype=np.float32) if kind == "numpy" else torch.zeros(5)
    state: Any = {"sum": torch.zeros(5)}
    kept = []
    for n in range(CALLS):
        buffer[:] = n
        state, metrics = step(state, buffer)
        buffer[:] = float("nan")
        kept.append(metrics["x"])
    assert state["sum"].tolist() == [sum(range(CALLS))] * 5
    assert [x[0].item() for x in kept] == list(range(CALLS))


@on_both_backends
def test_a_plain_state_stays_the_callers(backend: Callable[[], Any]) -> None:
    mine = {"w": torch.zeros(3)}
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), backend=backend())
    state, _ = step(mine, torch.ones(3))
    state, _ = step(state, torch.ones(3))
    assert mine["w"].tolist() == [0.0, 0.0, 0.0]
    mine["w"].fill_(torch.nan)
    state, _ = step(state, torch.ones(3))
    assert state["w"].tolist() == [3.0, 3.0, 3.0]


# -- T-OUT --------------------------------------------------------------------------------------------------------


@on_both_backends
def test_what_was_returned_never_changes(backend: Callable[[], Any]) -> None:
    """T-OUT-1: keep everything of 8 calls, run 8 more, compare; no two kept things share memory."""
    sim = backend()
    step = fcg.graph_step(train, backend=sim)
    state = create(module())
    kept: list[Any] = []
    copies: list[Any] = []
    for n in range(2 * CALLS):
        state, metrics = step(state, data(n))
        if n < CALLS:
            kept.append((metrics, fcg.snapshot(state), state.params["0.weight"] + 0))
            copies.append(fcg.snapshot(kept[-1]))
        poison(sim)
        for call, (mine, copy) in enumerate(zip(kept, copies, strict=True)):
            assert_trees_all_equal(mine, copy, f"after call {n}: kept at call {call}")
    assert_no_alias(kept, state)


@on_both_backends
@few
@given(draw=st.data())
def test_metrics_that_alias_anything_are_owned(backend: Callable[[], Any], draw: st.DataObject) -> None:
    """T-OUT-1 for random programs, whose metrics are views of leaves, of inputs and of each other."""
    program = draw.draw(fst.step_fns())
    sim = backend()
    step = fcg.graph_step(program, backend=sim)
    state: Any = program.state
    kept, copies = [], []
    for n in range(4):
        x = program.x * (n + 1)
        state, metrics = step(state, x)
        kept.append(metrics)
        copies.append(fcg.snapshot(metrics))
        x.fill_(torch.nan)
        poison(sim)
    assert_trees_all_equal(kept, copies, "kept")
    assert_no_alias(kept, state)


@on_both_backends
def test_gradients_returned_are_owned_and_sum_in_order(backend: Callable[[], Any]) -> None:
    """T-OUT-2: the sum over k calls of what each call gave, never k times the last."""
    sim = backend()
    step = fcg.graph_step(train, backend=sim)
    state = create(module(), accumulate=True)

    @fcg.graph_step(backend=sim)
    def accumulate(state: Any, batch: Any) -> Any:
        grads = train(state, batch)[1]["grads"]
        return state.replace(grads=tree.map(torch.add, state.grads, grads)), {"grads": grads}

    kept = []
    for n in range(4):
        state, metrics = accumulate(state, data(n))
        kept.append(metrics["grads"])
        poison(sim)
    total = kept[0]
    for grads in kept[1:]:
        total = tree.map(torch.add, total, grads)
    assert_trees_all_equal(state.grads, total, "grads")
    assert not torch.equal(total["0.weight"], 4 * kept[-1]["0.weight"])
    assert step.stats.captures == 0


@on_both_backends
def test_writing_into_what_was_returned_has_no_effect(backend: Callable[[], Any]) -> None:
    """T-OUT-3: metrics are new objects with new storage each time, the caller's to overwrite."""
    expected = list(eager_run(CALLS, create(module())))
    step = fcg.graph_step(train, backend=backend())
    state = create(module())
    last: Any = None
    for n in range(CALLS):
        state, metrics = step(state, data(n))
        assert_trees_all_equal((state, metrics), expected[n], f"call {n}")
        if last is not None:
            assert metrics is not last
            assert_no_alias(metrics, last)
        for leaf in tree.leaves(metrics):
            leaf.fill_(torch.nan)
        last = metrics


def test_leaves_cannot_be_written() -> None:
    state, _ = fcg.graph_step(train)(create(module()), data(0))
    before = fcg.snapshot(state)
    w = state.params["0.weight"]
    for write in (
        w.zero_,
        lambda: w.add_(1),
        lambda: w.t().zero_(),
        lambda: w[0].fill_(1),
        lambda: w.copy_(w),
    ):
        with pytest.raises(fcg.ReadOnlyError, match="read-only"):
            write()
    with pytest.raises(fcg.ReadOnlyError, match="read-only"):
        w[0] = 1
    assert_trees_all_equal(state, before, "state")


# -- T-DEREF ------------------------------------------------------------------------------------------------------


@on_both_backends
def test_hostile_host_code_between_calls_has_no_effect(backend: Callable[[], Any]) -> None:
    """T-DEREF-1: everything that the user can reach is reset, moved or deleted between two calls."""
    expected = list(eager_run(CALLS, create(module())))
    net = module()
    mine: dict[str, Any] = {"net": net, "optimizer": torch.optim.AdamW(net.parameters(), lr=0.05)}
    step = fcg.graph_step(train, backend=backend())
    state = create(net)
    del net

    def no_gradients() -> None:
        for parameter in mine["net"].parameters():
            parameter.grad = None

    def no_data() -> None:
        for parameter in mine["net"].parameters():
            parameter.data = torch.full_like(parameter, torch.nan)

    def update() -> None:
        parameter = next(mine["net"].parameters())
        mine["net"](data(0)["x"].to(parameter.dtype)).sum().backward()
        mine["optimizer"].step()

    hostile: list[Callable[[], Any]] = [
        no_gradients,
        lambda: mine["optimizer"].zero_grad(set_to_none=True),
        no_data,
        lambda: mine["net"].to(torch.float64),
        update,
        lambda: mine["optimizer"].state.clear(),
        lambda: mine["net"].load_state_dict(module().state_dict()),
        lambda: mine["net"].half(),
        mine.clear,
        gc.collect,
    ]
    for n in range(CALLS):
        state, metrics = step(state, data(n))
        assert_trees_all_equal((state, metrics), expected[n], f"call {n}")
        hostile[min(n, len(hostile) - 1)]()
    assert step.stats.replays == CALLS


@pytest.mark.parametrize("transform", ["twice", "micro-batches"])
def test_gradients_of_one_step_do_not_add_up_by_themselves(transform: str) -> None:
    """Two gradients with respect to the same leaves are two values; torch.func.grad is the judge."""

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ p["w"]).square().mean()

    @fcg.graph_step
    def step(state: Any, x: torch.Tensor) -> Any:
        if transform == "twice":
            grads = [fcg.grad(loss)(state, half) for half in (x[:2], x[2:])]
            return state, tree.map(lambda a, b: (a + b) / 2, *grads)
        return state, fcg.microbatches(2)(fcg.grad(loss))(state, x)

    params = {"w": torch.linspace(-1, 1, 3)}
    state: Any = params
    for n in range(4):
        x = data(n)["x"]
        state, grads = step(state, x)
        first, second = (torch.func.grad(loss)(params, half)["w"] for half in (x[:2], x[2:]))
        torch.testing.assert_close(grads["w"], (first + second) / 2, rtol=1e-6, atol=1e-7)
        assert params["w"].grad is None


# -- baked values -------------------------------------------------------------------------------------------------


@on_both_backends
def test_a_host_value_that_changed_is_loud(backend: Callable[[], Any]) -> None:
    """Learning rate, flag and mode: replay would go on with the old one."""
    settings = {"rate": 0.5, "flip": False}

    def step(state: Any, x: torch.Tensor) -> Any:
        sign = -1 if settings["flip"] else 1
        return {"w": state["w"] + sign * settings["rate"] * x}, {}

    captured = fcg.graph_step(step, backend=backend())
    state, _ = captured({"w": torch.zeros(2)}, torch.ones(2))
    for name, value in (("rate", 0.25), ("flip", True)):
        old, settings[name] = settings[name], value
        with pytest.raises(fcg.BakedValueError, match=name):
            captured(state, torch.ones(2))
        settings[name] = old
    state, _ = captured(state, torch.ones(2))
    assert state["w"].tolist() == [1.0, 1.0]


# -- Ctrl-C -------------------------------------------------------------------------------------------------------


def small_train(state: Any, x: torch.Tensor) -> Any:
    """Leaves that go in together or not at all: a sum, a swap and the count of calls."""
    loss, grads = fcg.value_and_grad(lambda p: (x * p["w"]).sum().tanh())(state.params)
    new = state.apply_gradients(grads)
    return new.replace(buffers=(state.buffers[1], state.buffers[0] + x)), {"loss": loss}


def small_state() -> Any:
    return fcg.TrainState.create(
        params={"w": torch.ones(3)},
        optimizer=fcg.optim.adamw(0.01, weight_decay=0.0),
        buffers=(torch.zeros(3), torch.ones(3)),
    )


def small_data(n: int) -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 3.0]) * (n % 5 - 2)


def uninterrupted_run(calls: int, backend: Any) -> Any:
    step, state = fcg.graph_step(small_train, backend=backend), small_state()
    for n in range(calls):
        state, _ = step(state, small_data(n))
    return fcg.snapshot(state)


def interrupted_run(backend: str) -> None:
    """A loop that is interrupted many times, half of them while it traces, and goes on by ``state.latest()``."""
    make, delays = BACKENDS[backend], random.Random(0)
    step, state = fcg.graph_step(small_train, backend=make()), small_state()
    state, _ = step(state, small_data(0))  # torch imports some of its modules at the first trace
    signal.signal(signal.SIGVTALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    for interrupt in range(INTERRUPTS):
        tracing = interrupt % 2 == 0
        try:
            # Again after a second: Python swallows what strikes inside of a weak reference's callback.
            signal.setitimer(signal.ITIMER_VIRTUAL, delays.uniform(0.0005, 0.06 if tracing else 0.01), 1.0)
            current = fcg.graph_step(small_train, backend=make()) if tracing else step
            while True:
                state, _ = current(state, small_data(int(state.step)))
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            state = state.latest()
    calls = int(state.step)
    assert_trees_all_equal(state, uninterrupted_run(calls, make()), "state")
    sys.stdout.write(f"{calls} calls, equal\n")


@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_at_any_moment_loses_nothing(backend: str) -> None:
    """In a process of its own: pytest's hooks do not like to be interrupted."""
    with Program("-c", f"import tests.test_ownership as t; t.interrupted_run({backend!r})") as program:
        assert program.end(timeout=120) == 0, program.err
        assert int(program.out.split()[0]) > INTERRUPTS


on_the_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread only"
)


@on_the_main_thread
def test_ctrl_c_while_tracing_is_raised_at_the_next_op() -> None:
    """Not in between, where torch would swallow it or end the process; a corrected call works."""
    reached: list[str] = []
    strike = True

    def step(state: Any, x: torch.Tensor) -> Any:
        if strike:
            signal.raise_signal(signal.SIGINT)
            reached.append("after the signal")
        y = x + 1
        reached.append("after the op")
        return {"w": state["w"] + y}, {}

    captured = fcg.graph_step(step)
    state = fcg.place({"w": torch.zeros(2)})
    with pytest.raises(KeyboardInterrupt):
        captured(state, torch.ones(2))
    assert reached == ["after the signal"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    strike = False
    state, _ = captured(state, torch.ones(2))
    assert state["w"].tolist() == [2.0, 2.0]


@on_the_main_thread
def test_ctrl_c_waits_at_most_until_a_step_is_built() -> None:
    """In a capture there is no safe place: it is raised at its end, and the state is as it was."""

    class Striking(Simulator):
        def capture(self, *arguments: Any) -> Any:
            replay = super().capture(*arguments)
            signal.raise_signal(signal.SIGINT)
            finished.append(replay)
            return replay

    finished: list[Any] = []
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), backend=Striking())
    state = fcg.place({"w": torch.zeros(2)})
    with pytest.raises(KeyboardInterrupt):
        step(state, torch.ones(2))
    assert len(finished) == 1
    assert state.latest()["w"].tolist() == [0.0, 0.0]


@on_the_main_thread
def test_a_second_ctrl_c_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first one waits for long: two at once are a finger that slipped, or a test."""
    monkeypatch.setattr(interrupts, "_IMPATIENCE", 0.0)
    with held_back():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_do_not_touch_signals() -> None:
    found: list[Any] = []

    def work() -> None:
        with held_back() as held:
            held.give_way()
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]


PACKAGE = f"{Path(fcg.__file__).parent}{os.sep}"
SIGNALS_ARRIVE_AFTER = frozenset({"CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD"})


class Strike:
    """Raises KeyboardInterrupt at the n-th place of the library's bytecode where Python looks for signals."""

    everywhere: tuple[str, ...] = (PACKAGE, "<")

    def __init__(self, moment: int) -> None:
        self.countdown = moment
        self._last: dict[Any, str] = {}

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self.everywhere):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            last = self._last.get(frame)
            self._last[frame] = dis.opname[code.co_code[frame.f_lasti]]
            self.countdown -= last in SIGNALS_ARRIVE_AFTER
            if self.countdown < 0:
                self.countdown = sys.maxsize
                raise KeyboardInterrupt
        return self


def struck_everywhere(step: Any, state: Any, data: Callable[[int], torch.Tensor]) -> Any:
    """Call a step with an interrupt at each place of a replay where Python looks for signals; the state at the end.

    After each of them the state is that of before the call or of after it, and says which.
    """
    before_commit = after_commit = 0
    for moment in range(10_000):
        calls = int(state.step)
        x = data(calls)
        tracer = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it when tracing starts
        struck = False
        try:
            sys.settrace(Strike(moment))
            state, _ = step(state, x)
        except KeyboardInterrupt:
            struck = True
        finally:
            sys.settrace(tracer)
        if not struck:
            break
        state = state.latest()
        assert state.generation == int(state.step)
        before_commit += int(state.step) == calls
        after_commit += int(state.step) == calls + 1
        assert before_commit + after_commit == moment + 1
    assert before_commit > 0
    assert after_commit > 0
    return state


@on_both_backends
def test_ctrl_c_at_every_bytecode_of_a_call(backend: Callable[[], Any]) -> None:
    """The same, exhaustively: an interrupt at each place of one replay where Python looks for signals."""
    step, state = fcg.graph_step(small_train, backend=backend()), small_state()
    state, _ = step(state, small_data(0))
    state = struck_everywhere(step, state, small_data)
    calls = int(state.step)
    assert_trees_all_equal(state, uninterrupted_run(calls, backend()), f"state after {calls} calls")
