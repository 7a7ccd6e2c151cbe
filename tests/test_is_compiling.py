"""In a module ``torch.compiler.is_compiling()``, in a step nothing of ``torch.compile``; and as before after both."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_cg as fcg
from functional_cg.ambient.compiling import compiling, inlining
from tests.shares import CALLS

pytestmark = pytest.mark.usefixtures("scalar_loops")


def stance() -> str:
    """Private to torch: what its compiler does with the functions that it was given."""
    return torch._dynamo.eval_frame._stance.stance


@pytest.fixture(autouse=True)
def never_left() -> Iterator[None]:
    assert (torch.compiler.is_compiling(), stance()) == (False, "default")
    yield
    assert (torch.compiler.is_compiling(), stance()) == (False, "default")


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
    for call in range(CALLS):
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


# What runs a function, and whether torch shows that it does.
SHOWN: dict[Any, Callable[[], bool]] = {
    compiling: torch.compiler.is_compiling,
    inlining: lambda: stance() == "force_eager",
}


class Inside:
    """A thread that goes into one of both and out of it as it is told."""

    def __init__(self, run: Any) -> None:
        self.depth = 0
        self._run = run
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
            self._run(self._inside)
            self.depth -= 1
            self._done.put(SHOWN[self._run]())

    def _inside(self) -> None:
        self._done.put(SHOWN[self._run]())
        self._obey()


@pytest.mark.parametrize("run", SHOWN, ids=["compiling", "inlining"])
@given(moves=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["enter", "leave"])), max_size=24))
def test_torch_shows_it_while_any_thread_is_inside(run: Any, moves: list[tuple[int, str]]) -> None:
    threads = [Inside(run) for _ in range(3)]
    try:
        for number, move in moves:
            if move == "enter" or threads[number].depth:
                said = threads[number].tell(move)
                assert said == SHOWN[run]() == any(one.depth for one in threads)
    finally:
        for one in threads:
            one.end()
    assert not SHOWN[run]()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("run", SHOWN, ids=["compiling", "inlining"])
def test_a_fork_keeps_nothing_of_another_thread(run: Any) -> None:
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        entered.set()
        leave.wait()

    thread = threading.Thread(target=run, args=(stay,))
    thread.start()
    entered.wait()
    child = os.fork()
    if child == 0:
        other = threading.Thread(target=run, args=(int,), daemon=True)
        other.start()
        other.join(10)
        os._exit(int(SHOWN[run]() or other.is_alive()))
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        run(lambda: None)
        assert SHOWN[run]()
    finally:
        leave.set()
        thread.join()


# -- functions that were given to torch's compiler ------------------------------------------------------------------


def wave(x: Tensor) -> Tensor:
    return torch.sin(x * 3.0) * torch.exp(-x) + x.mean()


class Compiled(nn.Module):
    """Compiles one of its methods, as some models do."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return torch.compile(self.inner, **self.options)(x)

    def inner(self, x: Tensor) -> Tensor:
        return wave(x * self.weight)


def of_a_function(**options: Any) -> Any:
    compiled = torch.compile(wave, **options)
    return {"w": torch.linspace(-1, 1, 8)}, lambda p, x: compiled(x * p["w"])


def of_a_module(**options: Any) -> Any:
    apply, params, buffers = fcg.from_module(Compiled(**options))
    return params, lambda p, x: apply(p, buffers, x)[0]


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
@pytest.mark.parametrize(
    "options",
    [{}, {"fullgraph": True}, {"fullgraph": True, "backend": "eager"}, {"dynamic": True, "fullgraph": True}],
    ids=str,
)
@pytest.mark.parametrize("made", [of_a_function, of_a_module])
def test_what_torch_was_to_compile_is_a_part_of_the_step(made: Any, options: Any, lowering: Any) -> None:
    params, forward = made(**options)

    @fcg.graph_step(lowering=lowering)
    def train_step(params: Any, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: forward(p, x).square().sum())(params)
        return fcg.tree.map(lambda p, g: p - 0.01 * g, params, grads), {"loss": loss}

    def plain_step(params: Any, x: Tensor) -> Any:
        [weight] = fcg.tree.leaves(params)
        loss, grad = fcg.value_and_grad(lambda w: wave(x * w).square().sum())(weight)
        return fcg.tree.map(lambda p: p - 0.01 * grad, params), {"loss": loss}

    state = fcg.fork(params)
    twin, plain = fcg.fork(state), fcg.graph_step(plain_step)
    reference = fcg.fork(state)
    for call in range(8):
        x = torch.randn(8, generator=torch.Generator().manual_seed(call))
        state, metrics = train_step(state, x)
        twin, expected = train_step.eager(twin, x)
        reference, meant = plain.eager(reference, x)
        assert torch.equal(expected["loss"], meant["loss"]), "compiled in the eager run"
        torch.testing.assert_close(metrics, expected, rtol=0 if lowering == "aten" else 1e-5, atol=0)
    assert train_step.stats.replays == 8


def test_torch_s_compiler_is_out_of_a_step() -> None:
    step = fcg.graph_step(lambda s: (s, torch.zeros(()) if stance() == "force_eager" else torch.ones(())))
    state = fcg.fork({"unused": torch.zeros(())})
    assert float(step.eager(fcg.fork(state))[1]) == float(step(state)[1]) == 0.0


def test_a_stance_of_the_user_s_outlives_it() -> None:
    with torch.compiler.set_stance("fail_on_recompile"):
        assert inlining(stance) == "force_eager"
        assert stance() == "fail_on_recompile"
        with pytest.raises(ZeroDivisionError):
            inlining(lambda: 1 // 0)
        assert stance() == "fail_on_recompile"
