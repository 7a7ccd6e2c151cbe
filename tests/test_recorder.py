"""``fcg.record``: any of the last calls is made again with the same bits, whatever happened between them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.sharding.programs import Setting, mlp_batch, mlp_state, mlp_step
from tests.sharding.ranks import on_ranks

MODEL = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
SCHEDULE = fcg.optim.warmup_cosine(0.1, warmup_steps=5, decay_steps=600)


def noisy(steps: int = 1, **options: Any) -> tuple[Any, Any]:
    """A step with dropout, batch norm and a schedule, and its state."""
    apply, params, buffers = fcg.from_module(MODEL)

    @fcg.graph_step(steps_per_call=steps, **options)
    def train_step(state: Any, x: Tensor) -> Any:
        key, drop = fcg.random.split(state.key)

        def loss_fn(params: Any) -> Any:
            out, new = apply(params, state.buffers, x, key=drop)
            return out.square().mean(), new

        (loss, new), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        fcg.tap("loss", loss)
        return state.apply_gradients(grads, buffers=new, key=key), {"loss": loss}

    state = fcg.TrainState.create(
        params=params, optimizer=fcg.optim.adam(SCHEDULE), buffers=buffers, key=fcg.random.key(0)
    )
    return train_step, state


def batch(number: int, *shape: int) -> Tensor:
    return torch.randn(*shape, 4, generator=torch.Generator().manual_seed(number))


class Run:
    """A recorded run, and the plain list of its states and metrics that it has to agree with."""

    def __init__(self, every: int, keep: int, steps: int = 1, **options: Any) -> None:
        step, self.state = noisy(steps)
        self.train = fcg.record(step, every=every, keep=keep, **options)
        self.shape = (6,) if steps == 1 else (steps, 6)
        self.before: list[Any] = []
        self.losses: list[Tensor] = []
        self.edited: set[int] = set()
        self.seed = 0

    def call(self) -> None:
        self.seed += 1
        x = batch(self.seed, *self.shape)
        before = fcg.snapshot(self.state)
        self.state, metrics = self.train(self.state, x)
        x.fill_(torch.nan)  # the loop may use its memory again
        del self.before[self.train.calls - 1 :], self.losses[self.train.calls - 1 :]
        self.before.append(before)
        self.losses.append(metrics["loss"])

    def edit(self) -> None:
        self.edited.add(self.train.calls)
        value = torch.full((8,), float(self.seed))
        self.state = fcg.tree.at(lambda s: s.params["0.bias"], self.state, value)

    def back(self, number: int) -> None:
        self.state = self.train.rewind(self.state, number)
        if number < len(self.before):
            assert_trees_all_equal(fcg.snapshot(self.state), self.before[number])

    def again(self, first: int, last: int) -> None:
        def see(number: int, state: Any, metrics: Any) -> None:
            assert torch.equal(metrics["loss"], self.losses[number])
            if number + 1 < len(self.before) and number + 1 not in self.edited:
                assert_trees_all_equal(fcg.snapshot(state), self.before[number + 1])
            seen.append(number)

        seen: list[int] = []
        self.state = self.train.replay(self.state, first, last, see)
        assert seen == list(range(first, last + 1))


@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 1, 3]))
def test_each_call_of_the_recording_comes_again(
    data: st.DataObject, every: int, keep: int, steps: int
) -> None:
    run = Run(every, keep, steps)
    for _ in range(data.draw(st.integers(1, 25), label="acts")):
        act = data.draw(st.sampled_from(["call"] * 5 + ["edit", "fail", "rewind", "replay"]))
        first, calls = run.train.first, run.train.calls
        if act == "call" or not calls:
            run.call()
        elif act == "edit":
            run.edit()
        elif act == "fail":
            with pytest.raises(fcg.LayoutError):
                run.train(run.state, torch.ones(6, 5))
            assert (run.train.first, run.train.calls) == (first, calls)
        elif act == "rewind":
            run.back(data.draw(st.integers(first, calls)))
        elif first < calls:
            run.again(*sorted(data.draw(st.tuples(*[st.integers(first, calls - 1)] * 2))))
        assert calls - first <= every * keep
    assert run.train.step.stats.captures <= 1


def test_what_the_loop_edits_comes_again() -> None:
    run = Run(50, 3)
    for _ in range(2):
        run.call()
        run.edit()
        run.call()
    for number in (3, 1, 2, 0, 4):
        run.back(number)
    run.again(0, 3)


@pytest.mark.parametrize("lowering", ["aten", pytest.param("inductor", marks=pytest.mark.cuda)])
def test_500_steps_of_a_shuffled_loader(lowering: str) -> None:
    device = "cpu" if lowering == "aten" else "cuda"
    step, state = noisy(lowering=lowering)
    state = fcg.place(fcg.snapshot(state), device)
    train, losses, kept = fcg.record(step, every=50, keep=11), [], {}
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0)).tolist()
    for number, which in enumerate(order):
        kept |= {number: fcg.snapshot(state)} if number in (0, 377) else {}
        state, metrics = train(state, batch(which, 6).to(device))
        losses.append(metrics["loss"])
    for number in (377, 0):
        state = train.rewind(state, number)
        assert_trees_all_equal(fcg.snapshot(state), kept[number])
    again: list[Tensor] = []
    train.replay(state, 0, -1, lambda number, state, metrics: again.append(metrics["loss"]))
    assert torch.equal(torch.stack(again), torch.stack(losses))
    assert step.stats.captures == 1


def halves(state: Any, x: Any) -> Any:
    return {"w": state["w"] * 0.5 + x}, {"sum": state["w"].sum()}


def test_a_run_goes_on_from_an_edited_rewind() -> None:
    train, state = fcg.record(fcg.graph_step(halves), every=3, keep=9), fcg.place({"w": torch.zeros(2)})
    for number in range(8):
        state, _ = train(state, float(number))
    state = train.rewind(state, 4).replace(w=torch.full((2,), 100.0))
    sums = []
    for number in range(4, 8):
        state, metrics = train(state, float(number))
        sums.append(metrics["sum"])
    newest = fcg.snapshot(state)
    assert (train.first, train.calls) == (0, 8)
    again: list[Tensor] = []
    state = train.replay(state, 2, -1, lambda number, state, metrics: again.append(metrics["sum"]))
    assert torch.equal(torch.stack(again[2:]), torch.stack(sums))
    assert_trees_all_equal(fcg.snapshot(state), newest)
    # From what call 3 returned, before it was edited, the run goes on as it is.
    state = train.replay(state, 0, 3)
    plain = state["w"].clone()
    state, _ = train(state, 4.0)
    assert_trees_all_equal(fcg.snapshot(train.replay(state, 4)), {"w": plain * 0.5 + 4})


def test_what_another_step_makes_is_not_recorded() -> None:
    step = fcg.graph_step(halves)
    train, state = fcg.record(step), fcg.place({"w": torch.zeros(2)})
    for _ in range(4):
        state, _ = train(state, torch.ones(2))
    newest = fcg.snapshot(state)
    state = train.replay(state, 1, -1, step=lambda state, x: step(state, x.mul_(3)))
    assert_trees_all_equal(train.inputs(2), ((torch.ones(2),), {}))
    assert_trees_all_equal(fcg.snapshot(train.rewind(state, 4)), newest)


def test_inputs_are_compared_with_those_of_the_call() -> None:
    step = fcg.graph_step(halves)
    for wrong in (lambda number: (number + 1.0,), lambda number: float(number), lambda number: (1.0, 2.0)):
        train, state = fcg.record(step, every=2, inputs=wrong), fcg.place({"w": torch.zeros(2)})  # type: ignore[arg-type, return-value]
        with pytest.raises(ValueError, match=r"`inputs\(0\)` is not what call 0 of `halves` gets"):
            train(state, 0.0)
    train, state = (
        fcg.record(step, every=2, inputs=lambda number: (float(number),)),
        fcg.place({"w": torch.zeros(2)}),
    )
    for number in (0, 1, 2, 4):  # the loop leaves one out
        state, _ = train(state, float(number))
    with pytest.raises(ValueError, match=r"`inputs\(4\)` is not what call 4"):
        train(state, 5.0)
    assert train.calls == 4


def test_a_number_in_an_array_that_is_written_again() -> None:
    train, state, x = (
        fcg.record(fcg.graph_step(halves)),
        fcg.place({"w": torch.zeros(2)}),
        np.array(0, np.float32),
    )
    for number in range(4):
        x[...] = number
        state, _ = train(state, x)
    newest = fcg.snapshot(state)
    assert_trees_all_equal(fcg.snapshot(train.replay(state, 0)), newest)


def test_inputs_that_the_step_donates() -> None:
    train, state = fcg.record(fcg.graph_step(halves)), fcg.place({"w": torch.ones(2)})
    state, _ = train(state, state["w"])
    assert_trees_all_equal(fcg.snapshot(train.replay(state, 0)), {"w": torch.full((2,), 1.5)})


def test_the_first_state_in_other_strides_or_in_inference_mode() -> None:
    for mode in (torch.inference_mode(), torch.no_grad()):
        train = fcg.record(fcg.graph_step(halves))
        with mode:
            state, _ = train({"w": torch.empty_strided((1, 4), (7, 1)).fill_(2.0)}, 1.0)
        assert train.rewind(state, 0)["w"].tolist() == [[2.0] * 4]


def test_threads_take_turns() -> None:
    train = fcg.record(fcg.graph_step(halves), keep=1000)

    def loop() -> None:
        state: Any = {"w": torch.zeros(2)}
        for _ in range(40):
            state, _ = train(state, 1.0)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(loop) for _ in range(2)]:
            done.result()
    assert train.calls == 80


def test_inputs_that_are_made_again() -> None:
    run = Run(4, 3, inputs=lambda number: (batch(number + 1, 6),))
    for _ in range(12):
        run.call()
    held = run.train.nbytes
    run.again(0, 11)
    assert held == 3 * sum(leaf.nbytes for leaf in fcg.tree.leaves(run.before[0]))


@pytest.mark.parametrize(
    "x",
    [
        np.arange(3, dtype=np.float32),
        2.5,
        [torch.ones(3), {"y": torch.zeros(3, dtype=torch.int8)}],
        torch.ones(3, 2).T,
        torch.ones(1).expand(3),
    ],
    ids=["numpy", "number", "tree", "strides", "expanded"],
)
def test_kinds_of_inputs(x: Any) -> None:
    step = fcg.graph_step(
        lambda state, x, *, sign=1: ({"n": state["n"] + sign}, {"x": x}), static_argnames="sign"
    )
    train, state = fcg.record(step), fcg.place({"n": 0})
    for sign in (1, -1, 1):
        state, metrics = train(state, x, sign=sign)
    captures, seen = step.stats.captures, []
    train.replay(state, 0, 2, lambda number, state, again: seen.append((state["n"].item(), again)))
    for (number, again), expected in zip(seen, (1, 0, 1), strict=True):
        assert number == expected
        assert_trees_all_equal(again, metrics)
    assert step.stats.captures == captures


def test_another_state_among_the_inputs_has_to_stay_as_it_is() -> None:
    step = fcg.graph_step(lambda state, other: ({"n": state["n"] + other["n"]}, {}))
    train, state, other = fcg.record(step), fcg.place({"n": 1}), fcg.place({"n": 2})
    state, _ = train(state, other)
    state = train.replay(train.rewind(state, 0), 0)
    assert state["n"] == 3
    other.replace(n=5)
    with pytest.raises(fcg.DonatedStateError, match="other"):
        train.replay(state, 0)


def test_a_stretch_is_made_again_with_taps_or_line_by_line() -> None:
    run, seen, lines = Run(5, 3), [], []  # type: ignore[var-annotated]
    for _ in range(12):
        run.call()
    taps = run.train.step.taps
    run.state = run.train.replay(
        run.state,
        6,
        9,
        lambda number, state, metrics: seen.append(torch.equal(taps["loss"], run.losses[number])),
    )
    twin = fcg.graph_step(lambda state, x: (lines.append(0), run.train.step.__wrapped__(state, x))[1])
    run.train.replay(
        run.state,
        7,
        8,
        lambda number, state, metrics: seen.append(torch.equal(metrics["loss"], run.losses[number])),
        step=twin.eager,
    )
    assert seen == [True] * 6
    assert len(lines) == 2


@given(st.integers(0, 29), st.integers(1, 9))
def test_the_first_call_after_which_something_holds(turn: int, every: int) -> None:
    step = fcg.graph_step(lambda state, x: ({"n": state["n"] + 1}, {"x": x}))
    train, state = fcg.record(step, every=every, keep=40), fcg.place({"n": 0})
    for number in range(30):
        state, _ = train(state, float(number))
    before = step.stats.replays
    state, found = train.find(state, lambda state, metrics: metrics["x"] >= turn)
    assert (state["n"].item(), found) == (turn, turn)
    assert step.stats.replays - before <= 2 * every + 6
    state, found = train.find(state, lambda state, metrics: state["n"] > 99)
    assert (state["n"].item(), found) == (30, None)


def logs(**options: Any) -> tuple[Any, Any]:
    step = fcg.graph_step(
        lambda state, x: ({"w": state["w"] - x.log().sum(), "least": state["least"]}, {"loss": x.sum()})
    )
    return fcg.record(step, **options), fcg.place({"w": torch.zeros(2), "least": torch.inf})


@pytest.mark.parametrize("bad", [0, 1, 16, 17, 36, 49])
def test_a_nan_is_traced_to_its_call(bad: int) -> None:
    train, state = logs(every=16, start=100)
    for number in range(50):
        state, _ = train(state, torch.full((2,), -1.0 if number == bad else 1.0))
    state, found = train.find_nonfinite(state)
    assert found.number == 100 + bad
    assert str(found).startswith(f"<lambda>, call {100 + bad}: not finite: state['least'], state['w']")
    assert found.calls[0].op == "log"
    assert state["w"].tolist() == [0.0, 0.0]


def test_a_nan_that_goes_again_is_found() -> None:
    def guarded(state: Any, x: Tensor) -> Any:
        loss = x.log().sum()
        return {"w": torch.where(loss.isfinite(), state["w"] - loss, state["w"])}, {
            "loss": loss,
            "best": torch.full((2,), -torch.inf),
        }

    train, state = fcg.record(fcg.graph_step(guarded), every=4), fcg.place({"w": torch.zeros(2)})
    for number in range(14):
        state, _ = train(state, torch.full((2,), float(number != 10)))
    state, found = train.find_nonfinite(state)
    assert found.number == 10


@pytest.mark.parametrize("bad", range(12))
def test_a_number_that_the_loop_sets_is_traced_to_its_call(bad: int) -> None:
    step = fcg.graph_step(lambda state, x: ({"w": state["w"] - state["rate"] * x, "rate": state["rate"]}, {}))
    train, state = fcg.record(step, keep=100), fcg.place({"w": torch.zeros(2), "rate": 0.0})
    for number in range(12):
        state, _ = train(state.replace(rate=torch.inf if number == bad else 0.1), torch.ones(2))
    state, found = train.find_nonfinite(state)
    assert (bool(found), found.number) == (True, bad)


def test_what_was_not_finite_before_is_said() -> None:
    train, state = logs(every=2, keep=2)
    for number in range(9):
        state, _ = train(state, torch.full((2,), float(number != 1)))
    _, found = train.find_nonfinite(state)
    assert not found
    assert "calls 6 to 8: no call makes a NaN or an infinity; what is not finite is older:" in str(found)
    assert "state['w'] inf in 2, from call 6 on" in str(found)


def test_nothing_is_found_where_all_is_finite() -> None:
    train, state = logs()
    for _ in range(5):
        state, _ = train(state, torch.ones(2))
    state, found = train.find_nonfinite(state)
    assert not found
    assert state["least"] == torch.inf


def test_what_is_not_recorded_is_refused() -> None:
    train, state = logs(every=2, keep=2)
    with pytest.raises(IndexError, match=r"call -1 was not recorded: nothing is, yet"):
        train.inputs(-1)
    for _ in range(9):
        state, _ = train(state, torch.ones(2))
    for number in (5, 10, -4):
        with pytest.raises(IndexError, match=rf"call {number} is not in the recording, which has 6 to [89]"):
            train.rewind(state, number)
    with pytest.raises(fcg.LayoutError, match="another layout than `state`"):
        train.rewind(fcg.place({"w": torch.zeros(2)}), 7)
    with pytest.raises(fcg.LayoutError, match="another layout than `state`"):
        train.rewind(fcg.place({"w": torch.zeros(2), "most": torch.inf}), 7)
    with pytest.raises(ValueError, match="start must be an integer from 0 on, got -1"):
        fcg.record(train.step, start=-1)
    with pytest.raises(TypeError, match=r"expected a step that returns `\(state, metrics\)`, and got dict"):
        train.replay(state, 7, step=lambda state, x: (fcg.snapshot(state), {}))
    state = state.latest()
    with pytest.raises(TypeError, match="integer"):
        train.rewind(state, 7.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a state that `<lambda>` has returned, got dict"):
        train.rewind({"w": torch.zeros(2)}, 7)
    with pytest.raises(TypeError, match="expected a step, got function"):
        fcg.record(lambda state, x: (state, {}))  # type: ignore[arg-type]
    for name in ("every", "keep"):
        with pytest.raises(ValueError, match=f"{name} must be an integer from 1 on, got 0"):
            fcg.record(train.step, **{name: 0})
    assert train.rewind(state, 6)["w"].tolist() == [0.0, 0.0]
    with pytest.raises(
        fcg.DonatedStateError, match=r"use the returned state, `state = train\.rewind\(state, number\)`"
    ):
        state["w"].sum()
    outer = fcg.graph_step(lambda state, x: train(state, x))
    with pytest.raises(
        fcg.CaptureError, match=r"its recorder was called in a step(.|\n)*record the step that calls it"
    ):
        outer(fcg.place({"w": torch.zeros(2), "least": torch.inf}), torch.ones(2))


# -- is it the hardware ------------------------------------------------------------------------------------------------


@torch.library.custom_op("recorder_tests::unsound", mutates_args=())
def unsound(x: Tensor) -> Tensor:
    """Adds 1 to one element at its third run: hardware that computes wrong now and then."""
    out = x.clone()
    if (runs := RUNS.setdefault("runs", 0)) == RUNS.get("bad", -1):
        out[1] += 1
    RUNS["runs"] = runs + 1
    return out


@unsound.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


RUNS: dict[str, int] = {}


@pytest.mark.parametrize("bad", [0, 5, 6, 11])
def test_a_call_that_gives_other_bits_is_noticed(bad: int) -> None:
    RUNS.clear()
    step = fcg.graph_step(
        lambda state, x: ({"v": state["v"] * 0.5, "w": state["w"] + unsound(x)}, {"sum": x.sum()})
    )
    train, state = (
        fcg.record(step, every=4, verify=True),
        fcg.place({"v": torch.ones(2), "w": torch.zeros(2)}),
    )
    state, _ = step(state, torch.zeros(2))  # traced
    RUNS.clear()
    RUNS["bad"] = bad
    wrong = None
    for number in range(9):  # runs 0 1 | 2 3 4 | 5 6 | 7 8 9 | 10 11
        try:
            state, _ = train(state, torch.full((2,), float(number)))
        except fcg.CaptureError as error:
            wrong, state = error, state.latest()
    assert (
        f"call {dict([(0, 0), (5, 4), (6, 4), (11, 8)])[bad]} gives other bits when it is made again, on cpu"
        in str(wrong)
    )
    assert "state['w']  in 1 of 2 elements" in str(wrong)
    assert "state['v']" not in str(wrong)


# -- several ranks, and a run that was killed --------------------------------------------------------------------------


def pieces(state: Any) -> list[Tensor]:
    return [fcg.sharding.local(leaf).clone() for leaf in fcg.tree.leaves(state)]


def recorded(device: str) -> list[bool]:
    zero = Setting({"data": 2}, stage=2).zero(device)
    rank = zero.mesh.rank
    step = fcg.graph_step(mlp_step)
    train, state = fcg.record(step, every=4, keep=3, verify=True), mlp_state()(zero, device)
    before = []
    for number in range(10):
        before.append(pieces(state))
        state, _ = train(state, {name: one.to(device) for name, one in mlp_batch(number, rank).items()})
    same = []
    for number in (9, 3, 0, 6):
        state = train.rewind(state, number)
        same.append(all(torch.equal(*pair) for pair in zip(pieces(state), before[number], strict=True)))
    state, found = train.find(state, lambda state, metrics: state.step >= 6)
    return [*same, found == 5]


def test_each_rank_records_its_pieces() -> None:
    assert on_ranks(2, recorded, "cpu") == [[True] * 5] * 2


KILLED = textwrap.dedent("""
    import os, signal, sys
    import functional_cg as fcg
    from tests.test_recorder import batch, noisy

    step, state = noisy()
    train, saved = fcg.record(step, every=8), fcg.checkpoints(sys.argv[1])
    for number in range(40):
        state, metrics = train(state, batch(number, 6))
        if number == 20:
            saved.save(state, wait=True)
        print(metrics["loss"].item().hex(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
""")


def test_a_run_that_was_killed_comes_again_from_its_checkpoint(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    losses = run.stdout.split()
    assert len(losses) == 40, run.stderr
    step, state = noisy()
    train = fcg.record(step, every=8, start=21)
    with fcg.checkpoints(tmp_path) as saved:
        state = saved.load(state)
    for number in range(21, 40):
        state, metrics = train(state, batch(number, 6))
        assert metrics["loss"].item().hex() == losses[number]
    again: list[str] = []
    train.replay(state, 24, 39, lambda number, state, metrics: again.append(metrics["loss"].item().hex()))
    assert again == losses[24:]


def test_a_call_whose_alarm_raises_is_recorded() -> None:
    """Its state counts, `state.latest()`, and so the call that went wrong is found."""

    @fcg.graph_step
    def step(state: Any, x: Tensor) -> Any:
        new = state["w"] + x.log().sum()
        fcg.alarm("not finite", ~new.isfinite())
        return {"w": new}, {}

    train, state = fcg.record(step, every=4), fcg.place({"w": torch.tensor(0.0)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            state, _ = train(state, torch.ones(2))
        with pytest.raises(UserWarning, match="call 6: not finite"):
            train(state, torch.tensor([1.0, 0.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, found = train.find_nonfinite(state.latest())
    assert (found.number, found.calls[0].op) == (6, "log")
