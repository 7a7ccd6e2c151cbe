"""Buffers that a step never changes may be read on the host; a state with another value is refused, never misread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.shares import CALLS, on_a_host_or_a_gpu

pytestmark = pytest.mark.usefixtures("scalar_loops")


class Reads(nn.Module):
    """Reads its buffers on the host, in one of many ways."""

    def __init__(self, read: Callable[[Reads, Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0, 2.0]))
        self.register_buffer("on", torch.tensor(True))
        self.register_buffer("kind", torch.tensor([2, 0]))
        self.register_buffer("edges", torch.tensor([[0, 0, 1, 3], [0, 2, 1, 1]]))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.copy_(x)
        return self.read(self, x * self.weight)


def of_graph(m: Any, y: Tensor) -> Tensor:
    source, target = m.edges[:, m.edges[0] != m.edges[1]]
    return torch.zeros(int(m.edges.max()) + 1, device=y.device).index_add(0, target, y[source])


READS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "flag": lambda m, y: y * 2 if m.on else y,
    "item": lambda m, y: y * m.kind[0].item(),
    "element": lambda m, y: y * 3 if m.kind[1] == 0 else y,
    "tolist": lambda m, y: y * sum(m.kind.tolist()),
    "computed": lambda m, y: y.repeat(int((m.kind + 1).max())),
    "text": lambda m, y: y * len(f"{m.kind}"),
    "graph": of_graph,
    "two": lambda m, y: y * m.kind.sum().item() if m.on and m.edges.any() else y,
}


def step_of(apply: Any, **options: Any) -> Any:
    @fcg.graph_step(**options)
    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            out, buffers = apply(params, state["buffers"], x)
            return out.sum(), buffers

        (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params = fcg.tree.map(lambda p, g: (p - g).clamp(-8, 8).round(), state["params"], grads)
        return {"params": params, "buffers": buffers}, {"loss": loss}

    return train_step


def start(read: str, device: str = "cpu") -> tuple[Any, Any]:
    apply, params, buffers = fcg.from_module(Reads(READS[read]).to(device))
    return apply, fcg.fork({"params": params, "buffers": buffers})


def data(call: int, device: str = "cpu") -> Tensor:
    return torch.randint(-3, 4, (4,), generator=torch.Generator().manual_seed(call)).float().to(device)


@on_a_host_or_a_gpu("read, lowering", [(read, how) for how in ("aten", "inductor") for read in READS], 3)
def test_replay_equals_eager(read: str, device: str, lowering: Any) -> None:
    apply, state = start(read, device)
    step, expected = step_of(apply, lowering=lowering), fcg.fork(state)
    for call in range(CALLS):
        expected, wanted = step.eager(expected, data(call, device))
        state, metrics = step(state, data(call, device))
        assert_trees_all_equal((state, metrics), (expected, wanted))
    assert (step.stats.traces, step.stats.captures, step.stats.replays) == (1, 1, CALLS)
    evaluate = fcg.graph_fn(lambda state, x: apply(state["params"], state["buffers"], x)[0])
    for call in range(3):
        x = data(call, device)
        assert torch.equal(evaluate(state, x), evaluate.__wrapped__(fcg.snapshot(state), x))


def with_kind(state: Any, kind: list[int]) -> Any:
    return fcg.tree.at(lambda s: s["buffers"]["kind"], state, torch.tensor(kind))


@given(
    moves=st.lists(
        st.sampled_from(["step", "same", "other", "fork", "another step", "evaluate"]), max_size=12
    )
)
def test_another_value_is_refused_wherever_it_comes_from(moves: list[str]) -> None:
    """A model of the rule: a call goes through exactly if the state holds what the first one held."""
    apply, state = start("item")
    step, kind = step_of(apply, lowering="aten"), [2, 0]
    evaluate = fcg.graph_fn(lambda state, x: apply(state["params"], state["buffers"], x)[0])
    turned = fcg.graph_step(
        lambda s: ({**s, "buffers": {**s["buffers"], "kind": s["buffers"]["kind"].flip(0) + 0}}, {})
    )
    state, _ = step(state, data(0))
    evaluate(state, data(0))
    for call, move in enumerate(moves):
        if move == "other":
            kind = [kind[0] + 1, kind[1]]
        if move in ("same", "other"):
            state = with_kind(state, kind)
        elif move == "another step":
            (state, _), kind = turned(state), kind[::-1]
        elif move == "fork":
            state = fcg.fork(state)
        function = evaluate if move == "evaluate" else step
        if kind == [2, 0]:
            wanted = function.eager(fcg.fork(state), data(call))
            got = function(state, data(call))
            assert_trees_all_equal(got, wanted)
            state = state if move == "evaluate" else got[0]
        else:
            before = fcg.snapshot(state)
            with pytest.raises(
                fcg.BakedValueError, match=r"state\['buffers'\]\['kind'\]  traced with \[2, 0\]"
            ):
                function(state, data(call))
            assert_trees_all_equal(state, before)


def test_the_fix_for_another_value_works() -> None:
    apply, state = start("item")
    step = step_of(apply)
    state, _ = step(state, data(0))
    state = with_kind(state, [5, 0])
    with pytest.raises(
        fcg.BakedValueError, match=r"To fix: make a step for the new value, `graph_step\(fn\)`"
    ):
        step(state, data(1))
    new = fcg.graph_step(step.__wrapped__)
    wanted = new.eager(fcg.fork(state), data(1))
    assert_trees_all_equal(new(state, data(1)), wanted)


def test_a_checkpoint_with_another_value_is_refused(tmp_path: Path) -> None:
    apply, state = start("flag")
    step = step_of(apply)
    state, _ = step(state, data(0))
    off = fcg.tree.at(lambda s: s["buffers"]["on"], fcg.fork(state), torch.tensor(False))
    fcg.save(tmp_path / "off.pt", off)
    state = fcg.load(tmp_path / "off.pt", state)
    with pytest.raises(fcg.BakedValueError, match="traced with True   got False"):
        step(state, data(1))


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready.fill_(True)
        return x * self.weight


class Later(Writes):
    def forward(self, x: Tensor) -> Tensor:
        y = x if self.ready else x * 2
        self.ready.logical_not_()
        return y * self.weight


@pytest.mark.parametrize("module", [Writes, Later])
def test_a_buffer_that_the_step_changes_is_not_read(module: type[Writes]) -> None:
    apply, params, buffers = fcg.from_module(module())
    step, state = step_of(apply), {"params": params, "buffers": buffers}
    with pytest.raises(
        fcg.HostSyncError,
        match=r"asks for the value of `state\['buffers'\]\['ready'\]` on the host, and changes",
    ):
        step(state, data(0))


class Ring(Writes):
    """Keeps what it has seen in rows, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(3, 4))
        self.register_buffer("at", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.rows[self.at % 3] = x / 2
        self.at += 1
        return (x - self.rows.mean(0)) * self.weight


def test_a_row_that_the_step_advances_is_written_on_the_device() -> None:
    apply, params, buffers = fcg.from_module(Ring())
    step, plain = step_of(apply), Ring()
    state: Any = {"params": params, "buffers": buffers}
    for call in range(5):
        state, _ = step(state, data(call))
        plain(data(call))
    assert torch.equal(state["buffers"]["rows"], plain.rows)
    assert step.stats.captures == 1


def test_the_fix_for_an_initialisation_from_data_works() -> None:
    module = Writes()
    module(data(0))
    apply, params, buffers = fcg.from_module(module)
    step, state = step_of(apply), {"params": params, "buffers": buffers}
    for call in range(3):
        wanted = step.eager(fcg.fork(state), data(call))
        state, metrics = step(state, data(call))
        assert_trees_all_equal((state, metrics), wanted)


@pytest.mark.parametrize("leaf", ["params", "mine"])
def test_what_is_no_buffer_of_a_module_is_not_read(leaf: str) -> None:
    apply, params, buffers = fcg.from_module(nn.Linear(4, 4))

    @fcg.graph_step
    def step(state: Any, x: Tensor) -> Any:
        out = apply(state["params"], state["buffers"], x)[0]
        value = state["params"]["bias"][0] if leaf == "params" else state["mine"]
        return state, {"out": out * 2 if value > 0 else out}

    with pytest.raises(fcg.HostSyncError, match="To fix"):
        step({"params": params, "buffers": buffers, "mine": torch.ones(())}, data(0))


def test_several_steps_per_call_and_parts_of_a_state() -> None:
    apply, state = start("item")
    step = step_of(apply, steps_per_call=4)
    expected = fcg.fork(state)
    for call in range(4):
        batch = torch.stack([data(4 * call + i) for i in range(4)])
        wanted = step.eager(expected, batch)
        state, metrics = step(state, batch)
        expected = wanted[0]
        assert_trees_all_equal((state, metrics), wanted)
    of_parts = fcg.graph_fn(lambda params, buffers, x: apply(params, buffers, x)[0])
    parts = state["params"], state["buffers"]
    for call in range(3):
        assert torch.equal(of_parts(*parts, data(call)), of_parts.eager(*parts, data(call)))
    other = with_kind(state, [7, 7])
    with pytest.raises(fcg.BakedValueError, match=r"\['kind'\]  traced with \[2, 0\]   got \[7, 7\]"):
        of_parts(other["params"], other["buffers"], data(0))


def test_a_state_that_takes_over_the_memory_of_another_is_compared() -> None:
    apply, params, buffers = fcg.from_module(Reads(READS["item"]))
    count = fcg.graph_step(lambda state: ({**state, "n": state["n"] + 1}, {}))
    evaluate = fcg.graph_fn(lambda state, x: apply(state["params"], state["buffers"], x)[0])
    for kind in ([2, 0], [2, 0], [2, 0], [5, 0]):
        state = None
        made = count.stats.captures
        tree = {"params": params, "buffers": {**buffers, "kind": torch.tensor(kind)}, "n": torch.zeros(())}
        state, _ = count(tree)
        if kind == [2, 0]:
            evaluate(state, data(0))
            evaluate(state, data(0))
    assert count.stats.captures == made, "in the same memory"
    with pytest.raises(fcg.BakedValueError, match=r"traced with \[2, 0\]   got \[5, 0\]"):
        evaluate(state, data(0))
