"""H95, H96: if ranks diverge, are missing or die, the others raise within bounded time.

In every test all processes end, with the exit code that they ought to have.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Never

import pytest
import torch
import torch.distributed as dist

import functional_cg as fcg
from functional_cg import sharding
from functional_cg.sharding import launch
from tests.sharding.law import on_gloo_and_nccl
from tests.sharding.mistakes import same
from tests.sharding.programs import Setting, mlp_batch, mlp_state
from tests.sharding.ranks import Outcome, on_ranks, outcomes, outcomes_of_each
from tests.shares import share

TIMEOUT = 1.0  # seconds that ranks wait for one that does not come
PATIENCE = 45.0  # seconds that they may wait where all of them come, also on a machine with twice its work
# of a mesh, where collectives would give up soon; NCCL's first one also connects the ranks, seconds on a busy machine
AWAY = {"cpu": 2.0, "cuda": 10.0}
AWAY_IN_A_CROWD = 4.0  # of a mesh, where one stays away from a replay, and other ranks are busy beside it
SLOW = 8.0  # seconds that a refusal takes at most: the mesh's timeout, a roll call, and a busy machine
EXIT = 12.0  # seconds that a process takes at most, from its start to its end
ENDED = 7  # an exit code of its own


def run(ranks: int, function: Callable[..., Any], *args: Any, device: str = "cpu") -> list[Outcome]:
    return outcomes(ranks, function, *args, device=device, timeout=60)


def meet(number: int) -> None:
    """Wait for the other ranks, as long as it takes, without a collective."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"test/{number}/{dist.get_rank()}", "")
    store.wait([f"test/{number}/{rank}" for rank in range(dist.get_world_size())], timedelta(seconds=50))


def told(act: Callable[[], Any]) -> tuple[str, float]:
    """The message of the error that a call raises, and after how many seconds."""
    start = time.monotonic()
    try:
        result = act()
    except fcg.FunctionalCGError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return f"nothing: {type(result).__name__}", time.monotonic() - start


def train_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        return (params["one"] * torch.tanh(batch["x"] @ params["w1"] + params["b1"])).square().mean()

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": sharding.mean(loss)}


class Bench:
    """A small state of this rank's, and what may be called with it."""

    def __init__(self, device: str, ranks: int, *, stage: int = 3, timeout: float = PATIENCE) -> None:
        self.zero = Setting({"data": ranks}, stage, timeout=timeout).zero(device)
        self.device, self.mesh = device, self.zero.mesh
        params = {
            "w1": torch.linspace(-1, 1, 35).reshape(5, 7),
            "b1": torch.zeros(7),
            "one": torch.tensor(1.0),
        }
        self.state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1), sharding=self.zero)

    def batch(self, call: int = 0, rows: int | None = None) -> Any:
        batch = mlp_batch(call, self.mesh.rank)
        return fcg.tree.map(lambda leaf: leaf[:rows].to(self.mesh.device), batch)

    def step(self, function: Any = train_step, rows: int | None = None) -> Any:
        return fcg.graph_step(function, lowering="aten")(fcg.fork(self.state), self.batch(0, rows))


def other_step(state: Any, batch: Any) -> Any:
    new, metrics = train_step(state, batch)
    return new, {"loss": metrics["loss"].sqrt()}


def same_name(step: Any) -> Any:
    @functools.wraps(train_step)
    def of_another_body(state: Any, batch: Any) -> Any:
        return step(state, batch)

    return of_another_body


def a_wrong_step(state: Any, batch: Any) -> Any:
    raise ValueError("only here")


def create(b: Bench, **options: Any) -> Any:
    zero = sharding.zero(b.mesh, **({"stage": 3} | options))
    params = {"w": torch.ones(5), "b": torch.zeros(())}
    return fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1), sharding=zero)


# What each rank does, all at one time. Rank 1 is the odd one; None is a rank that does nothing.
CALLS: dict[str, tuple[Callable[[Bench], Any] | None, Callable[[Bench], Any] | None]] = {
    "a step on some": (lambda b: b.step(), None),
    "a function on one": (None, lambda b: fcg.graph_fn(lambda s: sharding.gather(s.params["w1"]) + 0)(b.state)),
    "an eager step on some": (lambda b: fcg.graph_step(train_step).eager(fcg.fork(b.state), b.batch()), None),
    "gather on some": (lambda b: sharding.gather(b.state.params), None),
    "state_dict on some": (None, lambda b: sharding.state_dict(b.state)),
    "create on some": (lambda b: create(b), None),
    "another layout": (lambda b: b.step(), lambda b: b.step(rows=2)),
    "another function": (lambda b: b.step(), lambda b: b.step(other_step)),
    "another function of the same name": (lambda b: b.step(), lambda b: b.step(same_name(other_step))),
    "an exception in the trace": (lambda b: b.step(), lambda b: b.step(a_wrong_step)),
    "a step and gather": (lambda b: b.step(), lambda b: sharding.gather(b.state.params)),
    "other leaves": (lambda b: sharding.gather(b.state.params), lambda b: sharding.gather(b.state.params["w1"])),
    "other parameters": (lambda b: create(b), lambda b: create(b, stage=1)),
}  # fmt: skip

MISSING = r"RankError: `{}`: waited 1 s for rank{}, on rank \d of {}\."
DIFFER = (
    r"RankError: `{}`: ranks are about to do different things: rank 1 differs from rank 0\."
    r"\n  rank 0  {}   rank 1  {}"
)
# What the ranks but the odd one are told, and what the odd one is; None is told nothing.
SAID: dict[str, tuple[str | None, str | None]] = {
    "a step on some": (MISSING.format("train_step", " 1", "{n}"), None),
    "a function on one": (None, MISSING.format("<lambda>", "{others}", "{n}")),
    "an eager step on some": (MISSING.format("train_step", " 1", "{n}"), None),
    "gather on some": (MISSING.format("sharding.gather", " 1", "{n}"), None),
    "state_dict on some": (None, MISSING.format("sharding.state_dict", "{others}", "{n}")),
    "create on some": (MISSING.format("TrainState.create", " 1", "{n}"), None),
    "another layout": 2 * (DIFFER.format("train_step", r"batch\['x'\]  f32\[4,5\]", r"batch\['x'\]  f32\[2,5\]"),),
    "another function": (
        DIFFER.format("train_step", "capture `train_step`", "capture `other_step`"),
        DIFFER.format("other_step", "capture `train_step`", "capture `other_step`"),
    ),
    "another function of the same name": 2
    * (DIFFER.format("train_step", r"\d+ ATen calls, \w+", r"\d+ ATen calls, \w+"),),
    "an exception in the trace": (
        MISSING.format("train_step", " 1", "{n}"),
        "CaptureError: `a_wrong_step`: raised ValueError, at test_collective_calls.py:.*: only here",
    ),
    "a step and gather": (
        DIFFER.format("train_step", "capture `train_step`", "gather"),
        DIFFER.format("sharding.gather", "capture `train_step`", "gather"),
    ),
    "other leaves": 2 * (DIFFER.format("sharding.gather", r"torch.float32\[7\]", r"torch.float32\[5, 7\]"),),
    "other parameters": 2 * (DIFFER.format("TrainState.create", r"zero\(stage=3.*", r"zero\(stage=1.*"),),
}  # fmt: skip


def apart(device: str, ranks: int) -> Any:
    """All of CALLS one after the other; after each, all ranks take a step together."""
    b = Bench(device, ranks)
    said: dict[str, Any] = {}
    together = fcg.graph_step(train_step, lowering="aten")
    for number, (name, (act, odd)) in enumerate(CALLS.items()):
        meet(2 * number)
        here = odd if b.mesh.rank == 1 else act
        # Before a capture; collectives have the time that they need, and so have ranks that all come.
        b.mesh.ranks.timeout = TIMEOUT if any("waited" in (text or "") for text in SAID[name]) else PATIENCE
        said[name] = None if here is None else told(lambda here=here: here(b))
        b.mesh.ranks.timeout = PATIENCE
        meet(2 * number + 1)
        assert b.state.generation == 0, name
        new, _ = together.eager(fcg.fork(b.state), b.batch())
        assert int(new.step) == 1, name
    return said


@on_gloo_and_nccl
def test_h95_calls_that_are_not_the_same_on_all_ranks_are_refused(device: str) -> None:
    """Each rank that calls is told, in time; the state is as it was, and the ranks are in step again."""
    ranks = 3 if device == "cpu" else 2
    results = on_ranks(ranks, apart, device, ranks, device=device)
    for name, said in SAID.items():
        for rank, of_rank in enumerate(results):
            expected, found = said[rank == 1], of_rank[name]
            if expected is None:
                assert found is None
                continue
            others = "s 0, 2" if ranks == 3 else " 0"
            expected = expected.replace("{others}", others).replace("{n}", str(ranks))
            assert re.match(expected, found[0]), (name, rank, found[0])
            assert found[1] < SLOW, (name, rank, found[1])


def halved(state: Any) -> Any:
    return {"w": state["w"] / 2}, {"norm": state["w"].norm()}


def kept_by_one(device: str) -> Any:
    """Plain trees go into a step one after the other; one rank keeps what came of the first."""
    b = Bench(device, 2)
    step, kept = fcg.graph_step(halved, lowering="aten"), []
    norms = []
    for _ in range(3):
        new, metrics = step({"w": b.state.params["w1"]})
        norms.append(float(metrics["norm"]))
        kept += [new] * b.mesh.rank
        del new
    return norms, step.stats.captures


@on_gloo_and_nccl
def test_h95_a_state_that_lives_on_one_rank_alone_is_no_difference(device: str) -> None:
    """All ranks capture anew, or none: whether memory is free is not the same on all of them."""
    norm = float(torch.linspace(-1, 1, 35).norm())
    for norms, captures in on_ranks(2, kept_by_one, device, device=device):
        assert norms == pytest.approx([norm] * 3)
        assert captures == 3


def differing(device: str) -> Any:
    """Two captures of another layout, and of another function, on one of two ranks."""
    b = Bench(device, 2, timeout=AWAY[device])
    said = []
    for number, name in enumerate(("another layout", "another function")):
        act = CALLS[name][b.mesh.rank == 1]
        assert act is not None
        meet(number)
        b.mesh.ranks.timeout = PATIENCE
        said.append(told(lambda act=act: act(b))[0])
    return said


@on_gloo_and_nccl
def test_h95_layouts_and_functions_that_differ_are_refused(device: str) -> None:
    """Also where collectives themselves would give up soon: it is the agreement that speaks."""
    results = on_ranks(2, differing, device, device=device)
    for rank, (layout, function) in enumerate(results):
        assert re.match(SAID["another layout"][rank] or "", layout), layout
        assert re.match(SAID["another function"][rank] or "", function), function


# -- a rank that goes -----------------------------------------------------------------------------------------------


def end_here(how: str) -> None:
    if how == "exits":
        os._exit(ENDED)
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise ValueError("of this rank")
    time.sleep(AWAY_IN_A_CROWD + 3.5)  # stays away for longer than the others wait


def trains_until(who: int, how: str, stage: int) -> Any:
    """Three calls; before the next one a rank goes. What the others are told of the next call, and of one more."""
    b = Bench("cpu", 3, stage=stage, timeout=AWAY_IN_A_CROWD if how == "stays away" else PATIENCE)
    step, state = fcg.graph_step(train_step, lowering="aten"), b.state
    expected = fcg.fork(state)
    for call in range(3):
        expected, _ = step.eager(expected, b.batch(call))
        state, _ = step(state, b.batch(call))
    if b.mesh.rank == who:
        end_here(how)
    first = told(lambda: step(state, b.batch(3)))
    again = told(lambda: step(state, b.batch(3)))
    gather = told(lambda: sharding.gather(state.params["w1"]))
    kept = same(held(state), held(expected))
    return first, again, gather, kept, int(state.step), state.generation


def held(state: Any) -> Any:
    return [sharding.local(leaf) for leaf in fcg.tree.leaves(state)]


LOST = (
    r"RankError: `train_step`: rank {} of 3 has lost {}; the state is that of the last step\."
    r"\n  (Connection|Read|Timed|Application)"
)


def test_h95_a_rank_that_goes_is_told_to_the_others() -> None:
    """Not as an error of gloo, and with the state of the last step; all processes end.

    All at one time, as the others wait for many seconds.
    """
    gone = [
        (1, "stays away", 2), (1, "exits", 3), (0, "is killed", 3), (2, "is killed", 1), (2, "raises", 3),
    ]  # fmt: skip
    gone = share(gone, 2)
    for (who, how, _), ends in zip(gone, outcomes_of_each(3, trains_until, gone, timeout=60), strict=True):
        assert_told(who, how, ends)


def assert_told(who: int, how: str, ends: list[Outcome]) -> None:
    codes = {"exits": ENDED, "is killed": -signal.SIGKILL, "raises": 1, "stays away": 0}
    for rank, end in enumerate(ends):
        assert end.seconds < EXIT + SLOW, end
        if rank == who:
            assert end.code == codes[how], end
            if how != "stays away":
                continue
        assert (end.code, end.error) == (0, ""), end
        first, again, gather, kept, steps, generation = end.value
        # Beside it, a rank is named that waits for this one, and has not heard of it yet.
        lost = "the other ranks" if rank == who or who == 0 else rf"ranks? (\d, )*{who}(, \d)*"
        assert re.match(LOST.format(rank, lost), first[0]), first
        assert first[1] < SLOW, first
        for message, seconds in (again, gather):
            assert re.match(r"RankError: .*rank \d of 3 has lost another rank before", message), message
            assert seconds < SLOW / 8, "nobody waits for a rank twice"
        assert (kept, steps, generation) == (True, 3, 3)


def another_error() -> Any:
    """An error that is no matter of ranks stays what it is, with a mesh too."""
    b = Bench("cpu", 2)
    step = fcg.graph_step(train_step, lowering="aten")
    state, _ = step(b.state, b.batch())
    return told(lambda: step(state, b.batch(0, 2)))


def test_errors_of_another_kind_stay_what_they_are() -> None:
    for message, _ in on_ranks(2, another_error):
        assert message.startswith("LayoutError: `train_step`: called with another layout")


# -- the end of a process -----------------------------------------------------------------------------------------


def leaves(how: str, device: str) -> Any:
    """Ends in some way, after two steps whose capture is alive."""
    if how == "destroyed before the mesh":
        sharding.mesh({"data": -1}, device=device)
        dist.barrier()  # the other rank may still be connecting
        dist.destroy_process_group()
        return 0
    if how == "a mesh only":
        return sharding.mesh({"data": -1}, device=device).size
    b = Bench(device, 2)
    step, state = fcg.graph_step(train_step, lowering="aten"), b.state
    if how == "a state only":
        return int(state.step)
    for call in range(2):
        state, _ = step(state, b.batch(call))
    b.kept = (step, state)
    sys.modules[__name__].__dict__["_KEPT"] = b  # what is alive at the end of the interpreter
    return ENDINGS[how](b, step, state)


def late(b: Bench, step: Any, state: Any) -> int:
    time.sleep(2.0 * b.mesh.rank)
    return int(state.step)


def early(b: Bench, step: Any, state: Any) -> int:
    time.sleep(2.0 * (1 - b.mesh.rank))
    return int(state.step)


def raising(b: Bench, step: Any, state: Any) -> Never:
    raise KeyError("of all ranks")


def terminated(b: Bench, step: Any, state: Any) -> Never:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
    raise AssertionError("alive after SIGTERM")


def terminated_politely(b: Bench, step: Any, state: Any) -> Never:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    terminated(b, step, state)


def destroyed(b: Bench, step: Any, state: Any) -> Any:
    if b.device == "cuda":
        step.close()
    dist.destroy_process_group()
    return told(lambda: step(state, b.batch(2)))[0], int(state.step)


def twice(b: Bench, step: Any, state: Any) -> Any:
    """A second mesh on the same process groups: states of both live side by side."""
    other = Bench(b.device, 2)
    assert other.mesh == b.mesh
    fn = fcg.graph_fn(lambda s, o: s.params["w1"].sum() - o.params["w1"].sum())
    before = float(fn(fcg.fork(b.state.latest()), other.state))
    other.state, _ = step(other.state, other.batch(0))
    other.state, _ = step(other.state, other.batch(1))
    after = float(fn(b.state.latest(), other.state))
    return before != 0.0, after


def closed(b: Bench, step: Any, state: Any) -> str:
    step.close()
    return told(lambda: step(state, b.batch(2)))[0]


def only_value(value: Any) -> Callable[[Any], bool]:
    return lambda found: bool(found == value)


ENDINGS: dict[str, Callable[..., Any]] = {
    "one after the other": late, "first rank last": early, "an exception": raising, "SIGTERM": terminated,
    "SIGTERM with a handler": terminated_politely, "destroyed by the user": destroyed, "two meshes": twice,
    "closed": closed,
}  # fmt: skip
CODES = {"an exception": 1, "SIGTERM": -signal.SIGTERM, "SIGTERM with a handler": 1}
VALUES: dict[str, Callable[[Any], bool]] = {
    "destroyed before the mesh": only_value(0),
    "a mesh only": only_value(2),
    "a state only": only_value(0),
    "one after the other": only_value(2),
    "first rank last": only_value(2),
    "destroyed by the user": lambda found: found[1] == 2 and (
        "the process groups of the mesh are gone" in found[0] or "ClosedError" in found[0]
    ),
    "two meshes": only_value((True, 0.0)),
    "closed": lambda found: found.startswith("ClosedError: "),
}  # fmt: skip


@on_gloo_and_nccl
def test_h96_processes_end(device: str) -> None:
    """Without a call of the user's, in any order, whatever is alive: on gloo all at one time, as they mostly wait."""
    ways = [*VALUES, *CODES]
    if device == "cpu":
        found = outcomes_of_each(2, leaves, [(how, device) for how in ways], timeout=60)
    else:
        found = [run(2, leaves, how, device, device=device) for how in ways]
    for how, ends in zip(ways, found, strict=True):
        for end in ends:
            assert end.code == CODES.get(how, 0), (how, end)
            assert end.seconds < (EXIT if device == "cpu" else 3 * EXIT), (how, end)
            if how in VALUES:
                assert not end.error, (how, end)
                assert VALUES[how](end.value), (how, end)
            elif how == "an exception":
                assert "KeyError: 'of all ranks'" in end.error


def timeout_of(group: str) -> float:
    """Seconds that a collective of a group waits for a rank that does not come."""
    found = dist.distributed_c10d._resolve_process_group(group)
    return float(found._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def hybrid_twice() -> Any:
    """Two meshes of other axes over one set of ranks."""
    settings = Setting({"data": 4}, 3), Setting({"replica": 2, "shard": 2}, 3)
    states = [mlp_state()(setting.zero("cpu"), "cpu") for setting in settings]
    rank = dist.get_rank()
    step = fcg.graph_step(train_step, lowering="aten", max_captures=2)
    for call in range(2):
        for number, state in enumerate(states):
            states[number], metrics = step(state, mlp_batch(call, rank))
    assert {timeout_of(axis.group) for s in settings for axis in s.mesh("cpu").axes} == {settings[0].timeout}
    return [sharding.state_dict(state) for state in states], float(metrics["loss"])


def test_h96_two_meshes_of_other_axes() -> None:
    """One step over each of them in turn: to the last bits the same training."""
    (whole, loss), *others = on_ranks(4, hybrid_twice)
    assert whole[0].keys() == whole[1].keys()
    for name, leaf in whole[0].items():
        torch.testing.assert_close(leaf, whole[1][name])
    assert all(other == ([{}, {}], loss) for other in others)


def test_the_rows_are_complete() -> None:
    assert SAID.keys() == CALLS.keys()
    assert {*VALUES, *CODES} == {*ENDINGS, "destroyed before the mesh", "a mesh only", "a state only"}


def test_gloo_says_what_the_errors_are_told_by() -> None:
    """A rank that dies in a collective of torch's own: its words are those that the package looks for."""
    ends = run(2, raw_collective)
    assert ends[0].value is not None, ends[0]
    assert any(word in ends[0].value for word in words()), ends[0].value


def words() -> Sequence[str]:
    from functional_cg.shards.peers import _CONNECTION

    return _CONNECTION


def raw_collective() -> str:
    sharding.mesh({"data": 2}, device="cpu", timeout=5.0)
    if dist.get_rank() == 1:
        os._exit(0)
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        atexit.unregister(launch._end)  # nobody is to be waited for
        return str(error)
    raise AssertionError("the other rank is gone")
