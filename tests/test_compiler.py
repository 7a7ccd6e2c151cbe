"""Torch's compiler: its disk cache, which holds the traced graph, too, keyed with our functions; its failures."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.exc import InductorError
from torch._inductor.utils import fresh_cache

import functional_cg as fcg
from functional_cg.options import Options
from functional_cg.random import decompose_random_bits
from functional_cg.stages.lower import graph
from functional_cg.stages.lower.compiled import announce
from tests.compiled_graphs import compiled
from tests.shares import CALLS, share


def train_step(state: Any, x: Tensor) -> Any:
    def loss(params: Any) -> Tensor:
        key = fcg.random.fold_in(state.key, state.step)
        return fcg.random.dropout(key, x @ params["w"], 0.5).square().mean()

    value, grads = fcg.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads), {"loss": value}


def found() -> tuple[int, int, int]:
    """Compile the step in a way that a new process would; hits, misses and graphs that cannot be kept."""
    counters.clear()
    state = fcg.TrainState.create(
        params={"w": torch.ones(4, 4)},
        optimizer=fcg.optim.chain(
            fcg.optim.clip_by_global_norm(1.0), fcg.optim.adamw(1e-2, weight_decay=0.1)
        ),
        key=fcg.random.key(0),
    )
    fcg.graph_step(train_step, lowering="inductor")(state, torch.ones(2, 4))
    seen = counters["inductor"]
    return tuple(seen[f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass"))  # type: ignore[return-value]


@pytest.mark.kernels
def test_a_step_is_found_again_unless_our_functions_or_the_cpu_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What functions compute is in the graph that torch looks up, and for which CPU is in the key."""
    with fresh_cache():
        assert found() == (0, 1, 0)
        assert found() == (1, 0, 0)
        if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
            with monkeypatch.context() as patch:  # loops for vectors are no good on a CPU without
                patch.setenv("ATEN_CPU_CAPABILITY", "default")
                assert found() == (0, 1, 0)
        changed = lambda *given: decompose_random_bits(*given) + 1 - 1  # noqa: E731
        monkeypatch.setattr(graph, "decompose_random_bits", changed)
        assert found() == (0, 1, 0)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "error", [AssertionError("a pass\nits graph"), InductorError(RuntimeError("a pass"), "aten.add")]
)
@compiled
def test_a_compiler_that_gives_up(
    compiled_on: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whatever torch's compiler raises names the step and the way around; the state stays valid."""

    def gives_up(*args: Any, **options: Any) -> Any:
        raise error

    state, x = fcg.place({"w": torch.zeros(3, device=compiled_on)}), torch.ones(3, device=compiled_on)

    def train_step(state: Any, x: Any) -> Any:
        return {"w": state["w"] + x}, {"m": x.sum()}

    with monkeypatch.context() as patch:
        patch.setattr("functional_cg.stages.lower.functions.compile_graph", gives_up)
        with pytest.raises(fcg.CaptureError, match=r'gave up on it.*\n.*a pass\n.*`lowering="aten"`'):
            fcg.graph_step(train_step, lowering="inductor")(state, x)
    state, metrics = fcg.graph_step(train_step, lowering="aten")(state, x)
    assert (state["w"].tolist(), metrics["m"].item()) == ([1, 1, 1], 3)


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_a_kernel_with_other_strides_than_its_trace_is_refused() -> None:
    """Torch's trace gives a solved complex system other strides than its kernel; the compiled code asserts them."""

    def train_step(state: Any, x: Tensor) -> Any:
        return {"w": state["w"] + 1}, torch.linalg.solve_triangular(x.mH, x[:, :3], upper=False) * 2

    x = torch.randn(5, 5, dtype=torch.complex64) + 5 * torch.eye(5)
    state = fcg.place({"w": torch.zeros(())})
    with pytest.raises(fcg.CaptureError, match=r'gave up on it.*\n.*stride.*\n.*`lowering="aten"`'):
        fcg.graph_step(train_step, lowering="inductor")(state, x)
    step = fcg.graph_step(train_step, lowering="aten")
    state, found = step(state, x)
    assert state["w"] == 1
    assert torch.equal(found, step.eager(state, x)[1])


@pytest.mark.kernels
@compiled
def test_a_sum_with_a_product_keeps_what_multiplies_the_product(compiled_on: str) -> None:
    """Of a mean that moves, such as that of a codebook; the numbers are small integers, so all sums are exact."""

    def step(state: Any, x: Tensor) -> Any:
        products = [x.T @ (x + i) for i in range(4)]  # each in one sum
        new = {
            "in place": state["in place"].clone().mul_(0.5).add_(products[0], alpha=2),
            "out of place": torch.add(state["out of place"], products[1], alpha=0.5),
            "the product first": torch.add(products[2], state["the product first"], alpha=-1),
            "a row": torch.add(state["row"], products[3], alpha=4),
            "another dtype": torch.add(state["another dtype"], x[:3].to(torch.float16), alpha=0.25),
            "a number": torch.add(state["a number"], 2, alpha=3),
            "row": state["row"],
        }
        return new, {}

    names = ("in place", "out of place", "the product first", "a row", "another dtype", "a number")
    tree = {name: torch.full((3, 3), 8.0, device=compiled_on) for name in names}
    state: Any = fcg.place({**tree, "row": torch.ones(3, device=compiled_on)})
    compiled_step = fcg.graph_step(step, lowering="inductor", certify=True)
    for call in range(3):
        x = torch.randint(0, 3, (4, 3), generator=torch.Generator().manual_seed(call)).float().to(compiled_on)
        expected, _ = compiled_step.eager(fcg.fork(state), x)
        state, _ = compiled_step(state, x)
        for name in names:
            assert torch.equal(state[name], expected[name]), name


@pytest.mark.parametrize("ahead", share([True, False], 2), ids=share(["an index", "a divisor"], 2))
def test_what_was_checked_before_it_was_written_is_checked_anew(*, ahead: bool) -> None:
    """Tokens that are written one after another, each from those before."""

    def step(state: Any, x: Tensor) -> Any:
        tokens = torch.full((2, 6), 1)
        for at in range(1, 6):
            if ahead:
                tokens[:, at] = (state["table"][tokens].cumsum(1)[:, at - 1] + x[:, at]).argmax(-1)
            else:
                tokens[:, at] = (60 // tokens).sum(1) % 7 + 1
        return {"table": state["table"] + 1}, tokens

    compiled = fcg.graph_step(step, lowering="inductor", certify=False)
    state: Any = {"table": torch.arange(16.0).reshape(4, 4).sin()}
    for call in range(3):
        x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(call))
        expected = compiled.eager(fcg.place(state), x)[1]
        state, tokens = compiled(state, x)
        assert torch.equal(tokens, expected)
        state = fcg.snapshot(state)


@pytest.mark.parametrize(
    ("device", "lowering", "starts"),
    [("cuda", "auto", True), ("cuda", "inductor", True), ("cuda", "aten", False), ("cpu", "inductor", False)],
)
def test_what_a_compilation_waits_for_starts_before_a_trace(device: str, lowering: Any, starts: bool) -> None:
    """Processes that compile, and hashes of the compilers; only for a GPU: what a host compiles does not wait."""
    with (
        mock.patch("torch._inductor.async_compile.maybe_warm_pool") as started,
        mock.patch("torch._inductor.codecache.torch_key") as hashed,
    ):
        announce(torch.device(device), Options(lowering=lowering))
        for thread in threading.enumerate():
            if thread.name == "hash of compilers":
                thread.join(60.0)
    assert started.called == hashed.called == starts


@pytest.mark.parametrize("lowering", ["inductor", lambda graph, inputs: graph], ids=["inductor", "given"])
def test_a_step_without_calls_needs_no_compiler(lowering: Any) -> None:
    state = fcg.place({"a": torch.ones(2), "b": torch.zeros(2)})
    step = fcg.graph_step(lambda s: ({"a": s["b"], "b": s["a"]}, {"m": s["a"]}), lowering=lowering)
    for call in range(CALLS):
        state, metrics = step(state)
        assert (metrics["m"].tolist(), state["a"].tolist()) == ([(call + 1) % 2] * 2, [call % 2] * 2)
