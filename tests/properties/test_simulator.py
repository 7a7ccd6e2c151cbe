"""The simulator is as strict as documented: what it delays, overwrites, repeats and reuses."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_cg as fcg
from functional_cg.stages.run.capture import CPUBackend
from functional_cg.stages.run.poison import poison
from functional_cg.testing import Simulator, assert_replay_equals_eager, assert_trees_all_equal
from functional_cg.testing import strategies as fst
from functional_cg.testing.recorded import Address, Block, Call, Foreign
from tests.shares import few

BACKENDS = {"cpu": lambda: "auto", "simulator": Simulator}

on_both_backends = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
streams_of = st.lists(st.sampled_from("abc"), min_size=8, max_size=8)


def advance(state: Any, x: torch.Tensor) -> Any:
    """Neither two calls nor two values of ``x`` commute."""
    return {"w": 2 * state["w"] + x, "n": state["n"] + 1}, {"w": state["w"], "x": x, "n": state["n"]}


def start() -> Any:
    return {"w": torch.zeros(3), "n": torch.tensor(0)}


def batch(n: int) -> torch.Tensor:
    return torch.arange(3.0) + n


# -- streams ------------------------------------------------------------------------------------------------------


@given(names=streams_of)
def test_calls_on_any_streams_are_done_in_order(names: list[str]) -> None:
    """H73, H07: updates, evaluation and kept metrics, where nothing is done until something waits for it."""
    simulator = Simulator()
    step = fcg.graph_step(advance, backend=simulator)
    evaluate = fcg.graph_fn(lambda s, x: s["w"] + x, backend=simulator)
    eager = fcg.graph_step(advance, backend="eager")
    state, expected = fcg.place(start()), fcg.place(start())
    kept, wanted = [], []
    for n, name in enumerate(names):
        expected, metrics = eager(expected, batch(n))
        wanted.append((metrics, expected["w"] + batch(n)))
        with simulator.stream(name):
            state, metrics = step(state, batch(n))
        with simulator.stream(names[-n]):
            kept.append((metrics, evaluate(state, batch(n))))
    simulator.synchronize()
    assert_trees_all_equal((state, kept), (expected, wanted), "after all calls")


@few
@given(data=st.data(), names=st.lists(st.sampled_from(["", *"abc"]), min_size=8, max_size=8))
def test_random_programs_on_any_streams_equal_eager(data: st.DataObject, names: list[str]) -> None:
    """Random programs, and one host buffer for all calls: it is overwritten while calls that read it still wait."""
    program = data.draw(fst.step_fns())
    simulator = Simulator()
    step, eager = (fcg.graph_step(program, backend=backend) for backend in (simulator, "eager"))
    state, expected = fcg.place(program.state), fcg.place(program.state)
    buffer = program.x.clone()
    kept, wanted = [], []
    for n, name in enumerate(names):
        buffer.copy_(program.x * (n + 1))
        expected, metrics = eager(expected, buffer)
        wanted.append(metrics)
        with simulator.stream(name) if name else nullcontext():
            state, metrics = step(state, buffer)
        kept.append(metrics)
        buffer.fill_(torch.nan)
    simulator.synchronize()
    assert_trees_all_equal((state, kept), (expected, wanted), "after all calls")


def test_a_stream_does_nothing_before_it_has_to() -> None:
    simulator = Simulator()
    step = fcg.graph_step(advance, backend=simulator)
    state, _ = step(start(), batch(0))
    with simulator.stream("a"):
        state, metrics = step(state, batch(1))
        sum_of = metrics["w"].sum()
        assert metrics["w"].isnan().all().item() is False  # `item` waits
        assert sum_of.tolist() == 3.0
        state, metrics = step(state, batch(2))
    assert torch.isnan(metrics["w"]).all()
    assert state["n"].tolist() == 3  # outside of streams the library waits for the last one
    assert metrics["n"].tolist() == 2


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_what_nobody_orders_happens_in_the_wrong_order(order: tuple[str, str]) -> None:
    """Two streams write one buffer: the stream that was made last is the first to work, unless it waits."""
    for waits in (False, True):
        simulator = Simulator()
        streams = [simulator.stream(name) for name in order]
        buffer = torch.zeros(2)
        simulator._device.add([buffer])
        for value, stream in enumerate(streams, 1):
            with stream:
                if waits and value == 2:
                    stream.wait_stream(streams[0])
                buffer.fill_(value)
        assert buffer.tolist() == [0.0, 0.0]
        simulator.synchronize()
        assert buffer.tolist() == ([2.0, 2.0] if waits else [1.0, 1.0])


@pytest.mark.parametrize("kind", ["tensor", "numpy"])
def test_host_memory_is_free_at_once_behind_a_busy_stream(kind: str) -> None:
    """H21: one host buffer for all calls, overwritten right after each, while the device has not yet read any of it."""
    simulator = Simulator()
    step = fcg.graph_step(advance, backend=simulator)
    eager = fcg.graph_step(advance, backend="eager")
    state, expected = fcg.place(start()), fcg.place(start())
    buffer: Any = np.zeros(3, dtype=np.float32) if kind == "numpy" else torch.zeros(3)
    kept, wanted = [], []
    with simulator.stream("a"):
        for n in range(10):
            buffer[:] = n + 1
            state, metrics = step(state, buffer)
            kept.append(metrics)
            buffer[:] = float("nan")
    for n in range(10):
        expected, metrics = eager(expected, torch.full((3,), n + 1.0))
        wanted.append(metrics)
    simulator.synchronize()
    assert_trees_all_equal((state, kept), (expected, wanted), "after all calls")


# -- the pool and its owners --------------------------------------------------------------------------------------


def chain(state: Any, x: torch.Tensor) -> Any:
    for _ in range(20):
        x = torch.tanh(x + state["w"])
    return {"w": x, "n": state["n"] + 1}, {"x": x, "n": state["n"] * 3}


def test_memory_of_temporaries_is_used_again() -> None:
    step = fcg.graph_step(chain, backend=Simulator())
    captured = step.lower(fcg.place(start()), batch(0)).capture()
    assert len(captured.replay.blocks) < 8  # for 40 results
    assert_replay_equals_eager(step, start(), [batch(n) for n in range(6)])


def test_between_replays_nothing_is_left_in_the_pool() -> None:
    """However often it is overwritten: twice the opposite of a bool would be the bool."""
    simulator = Simulator()
    step = fcg.graph_step(chain, backend=simulator)
    lowered = step.lower(fcg.place(start()), batch(0))
    replay = lowered.capture().replay
    for times in (1, 2, 3):
        n, x = (value.clone() for value in replay(()))
        assert not x.isnan().any()
        for _ in range(times):
            simulator.poison()
        dead_n, dead_x = (address.tensor() for address in replay._static)
        assert dead_x.isnan().all()
        assert dead_n.item() != n.item()


def test_steps_share_a_pool() -> None:
    simulator = Simulator()
    steps = [fcg.graph_step(advance, backend=simulator) for _ in range(2)]
    first, second = (step.lower(fcg.place(start()), batch(1)).capture().replay for step in steps)
    static = first(())
    assert not static[1].isnan().any()
    second(())
    assert static[1].isnan().all()


@on_both_backends
def test_outputs_of_an_evaluation_outlive_other_replays(backend: Callable[[], Any]) -> None:
    """H83: an evaluation between two updates, whose results are read after the second."""
    shared = backend()
    step = fcg.graph_step(advance, backend=shared)
    evaluate = fcg.graph_fn(lambda s, x: s["w"] + x, backend=shared)
    state, _ = step(start(), batch(1))
    kept = [evaluate(state, batch(n)) for n in range(3)]
    state, _ = step(state, batch(1))
    assert [out.tolist() for out in kept] == [(batch(1) + batch(n)).tolist() for n in range(3)]


def test_freed_memory_holds_garbage_and_lent_memory_does_not() -> None:
    owned, numbers = torch.arange(3.0), torch.arange(3)
    addresses = [Address(tensor, Foreign(tensor)) for tensor in (owned, numbers)]
    assert addresses[0].tensor().tolist() == [0.0, 1.0, 2.0]
    owned.fill_(7)
    assert addresses[0].tensor().tolist() == [7.0, 7.0, 7.0]
    del owned, numbers
    gc.collect()
    assert addresses[0].tensor().isnan().all()
    assert addresses[1].tensor().tolist() == [1, 1, 1]


# -- poison -------------------------------------------------------------------------------------------------------

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool,
)  # fmt: skip


@given(dtype=st.sampled_from(DTYPES), numbers=st.lists(st.integers(0, 7), max_size=4))
def test_no_value_survives_poison(dtype: torch.dtype, numbers: list[int]) -> None:
    value = torch.tensor(numbers).to(dtype)
    before = value.clone()
    poison(value)
    if value.is_floating_point() or value.is_complex():
        assert value.to(torch.complex64).isnan().all()
    else:
        now, was = value.to(torch.int64), before.to(torch.int64)
        assert (now != was).all()
        assert ((now == 0) | (now == 1)).all()


@given(index=st.lists(st.integers(0, 2), min_size=1, max_size=4).map(torch.tensor))
def test_a_poisoned_index_finds_a_wrong_row_and_raises_nothing(index: torch.Tensor) -> None:
    table = torch.tensor([[1.0], [2.0], [3.0]])
    right = table[index].clone()
    poison(index)
    for look_up in (table.__getitem__, lambda i: torch.nn.functional.embedding(i, table)):
        assert (look_up(index) != right).all()


@on_both_backends
def test_between_calls_the_poison_option_leaves_nothing_of_the_inputs(backend: Callable[[], Any]) -> None:
    """Two inputs in one slab are overwritten once."""
    inputs: list[torch.Tensor] = []

    class Spy:
        name = "spy"

        def capture(self, plan: Any, buffers: Any, scratch: Any) -> Any:
            inputs.extend(buffers.inputs)
            return (Simulator() if backend is Simulator else CPUBackend()).capture(plan, buffers, scratch)

    step = fcg.graph_step(lambda s, x, y: (s, {"x": x + y}), backend=Spy(), debug="poison")
    state, values = fcg.place({"w": torch.zeros(1)}), torch.tensor([0, 1, 2])
    for _ in range(3):
        state, metrics = step(state, values, values + 1)
        assert metrics["x"].tolist() == [1, 3, 5]
        assert [slot.tolist() for slot in inputs] == [[1, 0, 0], [0, 0, 0]]


# -- what is recorded ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True], ids=["global generator", "own generator"])
def test_draws_repeat_the_numbers_of_the_capture(own: bool) -> None:
    """As a graph's do, whose generator nobody registers; and those who draw from it elsewhere notice nothing."""
    generator = torch.Generator() if own else None
    out = torch.zeros(8)
    block = Block.of(out)
    call, drawn = Call.run(
        torch.ops.aten.rand.generator,
        ([8],),
        {"generator": generator},
        locate=Block.of,
        allocate=lambda _: block,
    )
    before = (generator or torch.default_generator).get_state()
    for _ in range(3):
        call.repeat()
        assert torch.equal(out, drawn)
        out.zero_()
    assert torch.equal((generator or torch.default_generator).get_state(), before)


def out_of_nothing(x: torch.Tensor) -> torch.Tensor:
    return torch.add(x, 1, out=torch.empty(0))


def transposed_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.t_()
    return y * torch.tensor([1.0, 10.0, 100.0])[:, None]


def resized(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.resize_(9)[6:] = 0
    y.resize_(3, 3)
    return y * 2


def squeezed(x: torch.Tensor) -> torch.Tensor:
    y = (x + 1).unsqueeze_(0)
    return y.squeeze_(0).swapaxes_(0, 1) @ x


def set_to_another(x: torch.Tensor) -> torch.Tensor:
    y, z = x + 1, x * 3
    y.set_(z)
    return y.add_(1) + z


@on_both_backends
@pytest.mark.parametrize(
    "change",
    [out_of_nothing, transposed_in_place, resized, squeezed, set_to_another],
    ids=lambda f: f.__name__,
)
def test_calls_that_change_the_shape_or_memory_of_their_argument(
    backend: Callable[[], Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def step(state: Any, x: torch.Tensor) -> Any:
        y = change(x)
        return {"sum": state["sum"] + y.sum()}, {"y": y}

    assert_replay_equals_eager(
        fcg.graph_step(step, backend=backend()),
        {"sum": torch.zeros(())},
        [torch.arange(6.0).reshape(2, 3) * (n + 1) for n in range(4)],
    )


# -- errors -------------------------------------------------------------------------------------------------------


@on_both_backends
def test_a_replay_that_raises_consumes_nothing(backend: Callable[[], Any]) -> None:
    """H104: an index out of range raises on the CPU; the state is the old one, and a corrected call works."""
    step = fcg.graph_step(
        lambda s, i: (
            {"n": s["n"] + 1, "row": torch.nn.functional.embedding(i, s["table"]), "table": s["table"]},
            {},
        ),
        backend=backend(),
    )
    state = fcg.place({"n": torch.tensor(0), "row": torch.zeros(2), "table": torch.arange(6.0).reshape(3, 2)})
    for n in range(3):
        state, _ = step(state, torch.tensor(n))
        before = fcg.snapshot(state)
        with pytest.raises(IndexError):
            step(state, torch.tensor(3))
        assert_trees_all_equal(state, before, "state")
    assert before["n"].item() == 3
    assert before["row"].tolist() == [4.0, 5.0]


def test_a_lazy_conjugate_becomes_a_leaf() -> None:
    """Its bits are computed by the commit, and not by a call of the step."""

    def step(state: Any, x: torch.Tensor) -> Any:
        spectrum = torch.fft.fft(x)
        new = {"conj": spectrum.conj(), "neg": spectrum.conj().imag, "n": state["n"] + 1}
        return new, {"old": state["conj"]}

    start = {
        "conj": torch.zeros(4, dtype=torch.complex64), "neg": torch.zeros(4), "n": torch.zeros(()),
    }  # fmt: skip
    inputs = [torch.randn(4) for _ in range(16)]
    assert_replay_equals_eager(fcg.graph_step(step, backend=Simulator()), start, inputs)
