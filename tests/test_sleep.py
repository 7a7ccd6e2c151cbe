"""A state whose memory goes away and comes back: the same values at the same addresses, and no use in between."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.concurrency import driver
from functional_cg.stages.run.capture import CPUBackend
from functional_cg.state import pages
from functional_cg.testing import Simulator, assert_trees_all_equal
from tests.shares import few

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
DTYPES = (
    torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def train(state: Any, x: Tensor) -> Any:
    def loss_fn(params: Any) -> Tensor:
        hidden = torch.tanh(x @ params["weight"].T + params["bias"])
        return fcg.random.dropout(fcg.random.fold_in(state.key, state.step), hidden, 0.2).square().mean()

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


def batch(call: int, device: str = "cpu") -> Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(call)).to(device)


def a_state(device: str = "cpu", **options: Any) -> Any:
    torch.manual_seed(0)
    params = {name: leaf.to(device) for name, leaf in nn.Linear(5, 3).named_parameters()}
    options = {"can_sleep": True} | options
    adamw = fcg.optim.adamw(0.05, weight_decay=0.1)
    return fcg.TrainState.create(params=params, optimizer=adamw, key=fcg.random.key(0, device), **options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_that_sleeps_is_one_that_does_not(device: str) -> None:
    """Bitwise, with one capture; a second state has slept beside it."""
    state, twin, beside = a_state(device), a_state(device, can_sleep=False), a_state(device)
    step = fcg.graph_step(train, lowering="aten")
    plain = fcg.graph_step(train, lowering="aten")
    look = fcg.graph_fn(lambda state: (state.params["weight"] * 2).sum(), lowering="aten")
    for call in range(6):
        state, metrics = step(state, batch(call, device))
        twin, expected = plain.eager(twin, batch(call, device))
        assert_trees_all_equal(
            (fcg.snapshot(state), metrics, look(state)), (fcg.snapshot(twin), expected, look.eager(twin))
        )
        if call % 2:
            assert fcg.sleep(state) is state
            beside = fcg.wake(fcg.sleep(fcg.sleep(beside)))
            torch.full((1 << 16,), 7.0, device=device)  # somebody else uses the memory
            assert fcg.wake(state) is state
            assert fcg.wake(state) is state
    assert (step.stats.captures, look.stats.captures) == (1, 1)


def test_a_run_that_sleeps_under_the_simulator_and_its_streams() -> None:
    simulator = Simulator()
    step, state, twin = fcg.graph_step(train, backend=simulator), a_state(), a_state(can_sleep=False)
    plain = fcg.graph_step(train)
    streams = itertools.cycle("ab")
    for call in range(6):
        with simulator.stream(next(streams)):
            state, _ = step(state, batch(call))
            if call % 2:
                state = fcg.sleep(state)  # waits for what is queued
        twin, _ = plain.eager(twin, batch(call))
        simulator.synchronize()
        state = fcg.wake(state)
        assert_trees_all_equal(fcg.snapshot(state), fcg.snapshot(twin))


@given(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=6), st.integers(0, 2**16), st.integers(0, 9))
@few
def test_all_bytes_come_back(dtypes: list[torch.dtype], seed: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree = [torch.randn(rows, 7, generator=generator).mul(9).to(dtype) for dtype in dtypes]
    state = fcg.place({"step": 3, "leaves": tree, "none": torch.zeros(0, 3)}, can_sleep=True)
    arena = state._lease.arena
    expected, addresses = fcg.snapshot(state), [slab.data_ptr() for slab in arena.slabs]
    fcg.sleep(state)
    assert not any(slab.view(torch.uint8).any() for slab in arena.slabs), "the memory is gone"
    fcg.wake(state)
    assert [slab.data_ptr() for slab in arena.slabs] == addresses
    assert_trees_all_equal(fcg.snapshot(state), expected)


USES: dict[str, Callable[[Any, Any, Path], Any]] = {
    "a call": lambda state, step, path: step(state, batch(9)),
    "the first call of a step": lambda state, step, path: fcg.graph_step(train)(state, batch(9)),
    "an eager call": lambda state, step, path: step.eager(state, batch(9)),
    "lower": lambda state, step, path: fcg.graph_step(train).lower(state, batch(9)),
    "profile": lambda state, step, path: step.profile(state, batch(9)),
    "a graph_fn": lambda state, step, path: fcg.graph_fn(lambda state: state.step + 1)(state),
    "a part in a graph_fn": lambda state, step, path: fcg.graph_fn(lambda p: p["bias"] + 1)(state.params),
    "an op on a leaf": lambda state, step, path: state.params["weight"] + 1,
    "a number": lambda state, step, path: int(state.step),
    "print": lambda state, step, path: repr(state.step),
    "tree.map": lambda state, step, path: fcg.tree.map(torch.clone, state.params),
    "replace": lambda state, step, path: state.replace(step=0),
    "tree.at": lambda state, step, path: fcg.tree.at(lambda s: s.step, state, 0),
    "snapshot": lambda state, step, path: fcg.snapshot(state),
    "fork": lambda state, step, path: fcg.fork(state),
    "place": lambda state, step, path: fcg.place(state),
    "deepcopy": lambda state, step, path: copy.deepcopy(state),
    "pickle": lambda state, step, path: pickle.dumps(state),
    "save": lambda state, step, path: fcg.save(path / "file.safetensors", state),
    "state_dict": lambda state, step, path: fcg.state_dict(state),
    "load_state_dict": lambda state, step, path: fcg.load_state_dict(state, fcg.state_dict(a_state())),
    "checkpoints": lambda state, step, path: fcg.checkpoints(path).save(state, step=1),
    "an input": lambda state, step, path: fcg.graph_fn(lambda x: x + 1)(state.params["bias"]),
    "another state": lambda state, step, path: fcg.graph_fn(lambda a, b: a.step + b.step)(a_state(), state),
}  # fmt: skip


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_no_use_of_a_state_that_sleeps(use: Callable[[Any, Any, Path], Any], tmp_path: Path) -> None:
    step, state = fcg.graph_step(train), a_state()
    state, _ = step(state, batch(0))
    expected = fcg.snapshot(state)
    fcg.sleep(state)
    with pytest.raises(
        fcg.AsleepError, match=r"`state` was used while it is asleep(.|\n)*`state = fcg\.wake\(state\)`"
    ):
        use(state, step, tmp_path)
    state = fcg.wake(state)  # as the message says
    assert_trees_all_equal(fcg.snapshot(state), expected)
    use(state, step, tmp_path)


def test_what_may_be_done_with_a_state_that_sleeps() -> None:
    state = fcg.sleep(a_state())
    assert ", on cpu, asleep, " in repr(state)
    assert state.generation == 0
    assert state.params["weight"].shape == (3, 5)
    assert ", asleep" not in repr(fcg.wake(state.latest()))


def test_what_cannot_sleep() -> None:
    state = a_state(can_sleep=False)
    for act in (fcg.sleep, fcg.wake):
        with pytest.raises(
            ValueError, match=r"cannot leave its addresses(.|\n)*create\(\.\.\., can_sleep=True\)"
        ):
            act(state)
        with pytest.raises(TypeError, match=r"expected a whole state, got a part, `state\.params`"):
            act(a_state().params)
        with pytest.raises(TypeError, match="expected a whole state, got dict"):
            act({"w": torch.ones(2)})
    old = a_state()
    new = old.replace(step=1)
    for asleep in (False, True):
        for act in (fcg.sleep, fcg.wake):
            with pytest.raises(fcg.DonatedStateError):
                act(old)
        if not asleep:
            fcg.sleep(new)
    assert int(fcg.wake(new).step) == 1


@pytest.mark.parametrize("act", [fcg.sleep, fcg.wake])
def test_no_state_sleeps_or_wakes_inside_of_a_step(act: Callable[[Any], Any]) -> None:
    other = fcg.place({"w": torch.ones(2)}, can_sleep=True)

    def act_on(state: Any, which: Any) -> Any:
        act(other if which is None else state)
        return state, {}

    state = fcg.place({"w": torch.zeros(2)}, can_sleep=True)
    for which in (None, 1.0):
        with pytest.raises(
            fcg.SideEffectError,
            match=rf"`act_on`: calls `fcg\.{act.__name__}`(.|\n)*before or after the step",
        ):
            fcg.graph_step(act_on)(state, which)
    assert_trees_all_equal(fcg.snapshot(state), {"w": torch.zeros(2)})


def test_a_state_that_was_dropped_asleep_is_not_where_the_next_one_is_placed() -> None:
    step, tree = fcg.graph_step(lambda state, x: ({"w": state["w"] + x}, {})), {"w": torch.ones(2)}
    state, _ = step(fcg.place(tree, can_sleep=True), torch.ones(2))
    fcg.sleep(state)
    del state
    again, _ = step(tree, torch.ones(2))
    assert again["w"].tolist() == [2, 2]


def test_other_states_go_on_with_the_same_steps() -> None:
    step, look = fcg.graph_step(train), fcg.graph_fn(lambda state: state.params["bias"] * 2)
    one, two, twin = a_state(), a_state(), a_state(can_sleep=False)
    plain = fcg.graph_step(train)
    for call in range(4):
        one, _ = step(one, batch(call))  # the last to use the step
        look(one)
        fcg.sleep(one)
        two, metrics = step(two, batch(call))
        twin, expected = plain.eager(twin, batch(call))
        assert_trees_all_equal(
            (metrics, look(two), fcg.snapshot(two)), (expected, look.eager(twin), fcg.snapshot(twin))
        )
        with pytest.raises(fcg.AsleepError):
            step(one, batch(call))
        fcg.wake(one)
    assert_trees_all_equal(fcg.snapshot(one), fcg.snapshot(two))
    assert step.stats.captures == 2


def test_memory_that_does_not_suffice_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the way out the state stays awake, on the way back asleep; both can be tried again."""
    state = a_state()
    expected = fcg.snapshot(state)

    def fails(*args: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    memory = type(state._lease.arena.pages._memory)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "unmap", fails)
        with pytest.raises(torch.OutOfMemoryError):
            fcg.sleep(state)
    assert_trees_all_equal(fcg.snapshot(state), expected)
    fcg.sleep(state)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "map", fails)
        with pytest.raises(torch.OutOfMemoryError):
            fcg.wake(state)
    with pytest.raises(fcg.AsleepError):
        fcg.snapshot(state)
    assert_trees_all_equal(fcg.snapshot(fcg.wake(state)), expected)


def test_another_thread_in_a_call_is_waited_for() -> None:
    step, state = fcg.graph_step(train), a_state()
    state, _ = step(state, batch(0))
    arena, begun, go = state._lease.arena, threading.Event(), threading.Event()
    reader = threading.Thread(target=lambda: arena.turn.read(lambda: (begun.set(), go.wait(30))))
    reader.start()
    begun.wait(30)
    sleeper = threading.Thread(target=fcg.sleep, args=(state,))
    sleeper.start()
    assert not arena.asleep
    go.set()
    sleeper.join(30)
    reader.join(30)
    assert arena.asleep


def test_a_state_stays_while_another_thread_captures_a_step_with_it() -> None:
    """A capture reads the memory for as long as a compiler works, and other threads may read the state meanwhile."""
    state, begun, go, ends = a_state(), threading.Event(), threading.Event(), []

    class Slow(CPUBackend):
        def capture(self, *args: Any) -> Any:
            begun.set()
            assert go.wait(30)
            return super().capture(*args)

    step = fcg.graph_step(train, backend=Slow())
    thread = threading.Thread(target=lambda: ends.append(step(state, batch(0))))
    thread.start()
    assert begun.wait(30)
    with pytest.raises(fcg.BusyError, match="cannot sleep while a step is being captured with it"):
        fcg.sleep(state)
    assert int(state.step) == 0
    go.set()
    thread.join(30)
    assert int(fcg.wake(fcg.sleep(ends[0][0])).step) == 1


@pytest.mark.cuda
def test_the_bytes_leave_the_device() -> None:
    size = 1 << 30
    state = fcg.place({"w": torch.ones(size // 4, device="cuda")}, can_sleep=True)
    torch.cuda.empty_cache()

    def freed() -> bool:
        before = torch.cuda.mem_get_info()[0]
        fcg.sleep(state)
        after = torch.cuda.mem_get_info()[0]
        fcg.wake(state)
        return after - before >= 0.9 * size

    # Other processes take and free memory of the same device meanwhile.
    assert any(freed() for _ in range(20))
    assert float(state["w"].sum(dtype=torch.float64)) == size // 4

    def ended() -> bool:
        other = fcg.place({"w": torch.ones(size // 4, device="cuda")}, can_sleep=True)
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        del other
        return torch.cuda.mem_get_info()[0] - before >= 0.9 * size

    assert any(ended() for _ in range(20))


@pytest.mark.cuda
def test_wake_without_memory_on_the_device() -> None:
    """It asks for as much as the device has, which no device can give, whoever else uses it."""
    state = fcg.place({"w": torch.arange(1 << 10, dtype=torch.int32, device="cuda")}, can_sleep=True)
    memory = fcg.sleep(state)._lease.arena.pages._memory
    grains = -(-torch.cuda.get_device_properties(0).total_memory // memory._size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_size", grains * memory._size)  # that of few values is one grain
        with pytest.raises(torch.OutOfMemoryError):
            fcg.wake(state)
    fcg.wake(state)
    assert state["w"].tolist() == [*range(1 << 10)]


def test_without_the_drivers_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        RuntimeError, match=r"needs cuda\.bindings and numpy(.|\n)*`pip install cuda-bindings numpy`"
    ):
        pages._driver()


def test_parts_of_no_bytes() -> None:
    memory = pages.Pages([0, 5, 0], torch.device("cpu"))
    assert [len(part) for part in memory.parts] == [0, 5, 0]
    memory.leave()
    memory.come_back()
    assert not memory.away
