"""``torch.compiler.is_compiling()`` in a module: True, traced or not; and False again whatever happens inside."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_cg as fcg
from functional_cg.ambient.compiling import compiling


@pytest.fixture(autouse=True)
def never_left() -> Iterator[None]:
    assert torch.compiler.is_compiling() is False
    yield
    assert torch.compiler.is_compiling() is False


class Asks(nn.Module):
    """A branch on values, but for a compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return x * self.weight * torch.where(x.sum() > 0, 2.0, 3.0)
        return x * self.weight * (2.0 if x.sum() > 0 else 3.0)


class Nested(nn.Module):
    """Asks at each depth, in a checkpoint too."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.asks, self.checkpointed = nn.ModuleList([Asks(), Asks()]), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for asks in self.asks:
            x = checkpoint(asks, x, use_reentrant=False) if self.checkpointed else asks(x)
        return x


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
@pytest.mark.parametrize(
    "model", [Asks(), Nested(False), Nested(True)], ids=["plain", "nested", "checkpoint"]
)
def test_a_module_takes_its_compiled_branch(model: nn.Module, lowering: Any) -> None:
    apply, params, buffers = fcg.from_module(model)

    def step_fn(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            assert not torch.compiler.is_compiling()
            loss = (apply(params, buffers, x)[0] ** 2).sum()
            assert not torch.compiler.is_compiling()
            return loss

        loss, grads = fcg.value_and_grad(loss_fn)(state["params"])
        new = fcg.tree.map(lambda p, g: torch.where(p > 8, p / 2, p + g.sign()), state["params"], grads)
        return {"params": new}, {"loss": loss}

    step = fcg.graph_step(step_fn, lowering=lowering)
    state, expected = {"params": params}, {"params": params}
    for call in range(16):
        x = torch.randint(-3, 4, (3,), generator=torch.Generator().manual_seed(call)).float()
        state, metrics = step(state, x)
        expected, wanted = step_fn(expected, x)
        assert torch.equal(metrics["loss"], wanted["loss"])
        for name, value in expected["params"].items():
            assert torch.equal(state["params"][name], value)


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError


class Recovers(nn.Module):
    """Goes on after a submodule has raised."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = Fails(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.first(x)
        except ZeroDivisionError:
            x = x * 1
        return self.drop(x)  # type: ignore[no-any-return]


def test_the_flag_falls_after_an_exception() -> None:
    apply, params, buffers = fcg.from_module(Fails())
    with pytest.raises(ZeroDivisionError):
        apply(params, buffers, torch.ones(1))


def test_a_draw_after_an_exception_is_its_own_module_s() -> None:
    failing, fine = Recovers(), Recovers()
    fine.first = nn.Identity()
    drawn = [
        apply(params, buffers, torch.ones(64), key=fcg.random.key(0))[0]
        for apply, params, buffers in map(fcg.from_module, (failing, fine))
    ]
    assert torch.equal(*drawn)


def test_torch_s_own_flag_outlives_it() -> None:
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        assert compiling(torch.compiler.is_compiling)
        assert torch.compiler.is_compiling()
    finally:
        torch.compiler._is_compiling_flag = before


class Inside:
    """A thread that goes into ``compiling`` and out of it as it is told."""

    def __init__(self) -> None:
        self.depth = 0
        self._told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._obey)
        self._thread.start()

    def tell(self, what: str) -> bool:
        """Return what torch says on that thread once it has obeyed."""
        self._told.put(what)
        return self._done.get(timeout=30)

    def end(self) -> None:
        while self.depth:
            self.tell("leave")
        self._told.put("leave")
        self._thread.join()

    def _obey(self) -> None:
        while self._told.get() == "enter":
            self.depth += 1
            compiling(self._inside)
            self.depth -= 1
            self._done.put(torch.compiler.is_compiling())

    def _inside(self) -> None:
        self._done.put(torch.compiler.is_compiling())
        self._obey()


@given(moves=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["enter", "leave"])), max_size=24))
def test_torch_compiles_while_any_thread_is_inside(moves: list[tuple[int, str]]) -> None:
    threads = [Inside() for _ in range(3)]
    try:
        for number, move in moves:
            if move == "enter" or threads[number].depth:
                said = threads[number].tell(move)
                assert said == torch.compiler.is_compiling() == any(one.depth for one in threads)
    finally:
        for one in threads:
            one.end()
    assert not torch.compiler.is_compiling()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_does_not_keep_the_flag_of_another_thread() -> None:
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        entered.set()
        leave.wait()

    thread = threading.Thread(target=compiling, args=(stay,))
    thread.start()
    entered.wait()
    child = os.fork()
    if child == 0:
        other = threading.Thread(target=compiling, args=(int,), daemon=True)
        other.start()
        other.join(10)
        os._exit(int(torch.compiler.is_compiling() or other.is_alive()))
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        compiling(lambda: None)
        assert torch.compiler.is_compiling()
    finally:
        leave.set()
        thread.join()
