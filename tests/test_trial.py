"""The trial of a compiled step refuses planted errors before anything is committed, and accepts rounding."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import signal
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._inductor import config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import functional_cg as fcg
from functional_cg.stages.evaluate import evaluate
from functional_cg.stages.plan import Buffers
from functional_cg.stages.program import Var
from functional_cg.stages.run.capture import CPUBackend
from functional_cg.stages.trial.distances import Distances, between
from functional_cg.stages.trial.judge import Judge
from functional_cg.stages.trial.offload import transferred
from functional_cg.stages.trial.reference import Output
from functional_cg.stages.trial.space import Space
from functional_cg.stages.trial.trial import Certificate
from functional_cg.stages.trial.ulps import Shaker
from functional_cg.stages.trial.variants import KINDS
from functional_cg.state.arena import BufferSpec
from functional_cg.step.certify import Certified
from functional_cg.testing import assert_trees_all_equal
from functional_cg.testing import strategies as fst
from tests.as_graphs import AsGraphs
from tests.compiled_graphs import ON_A_GPU, compiled, compiled_once, lower_as_on_a_gpu
from tests.other_rounding import STEPS, compile_wide
from tests.shares import THOROUGH, few

aten = torch.ops.aten
DEVICES = ["cpu", ON_A_GPU]
HERE = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]

Plant = Callable[[fx.Graph], None]


def measured(one: Tensor, other: Tensor) -> float:
    """How far apart two tensors are, as a norm; infinitely, if only one is finite somewhere."""
    distances = Distances()
    distances.add(0, one, other)
    return float(distances.known(1)[0][0].max())


class Following(fcg.TrainState):
    target: Any
    mean: Any


def train_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Tensor:
        hidden = torch.tanh(batch["x"] @ params["w1"] + params["b1"])
        return F.mse_loss(hidden @ params["w2"], batch["y"])

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    new = state.apply_gradients(grads)
    mean = state.mean.lerp(batch["x"].mean(0), 0.1)
    metrics = {"loss": loss, "moved": mean - state.mean}
    return new.replace(target=fcg.tree.map(torch.clone, state.params), mean=mean), metrics


def a_state(device: str) -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (6, 8), "b1": (8,), "w2": (8, 6)}
    params = {name: torch.randn(shape, generator=generator).to(device) / 4 for name, shape in shapes.items()}
    # The rate begins at zero: at the first step old and new parameters are the same.
    optimizer = fcg.optim.adamw(fcg.optim.warmup_cosine(1e-3, 10, 100), weight_decay=0.1)
    return Following.create(
        params=params, optimizer=optimizer, target=fcg.snapshot(params), mean=torch.zeros(6).to(device)
    )


def a_batch(device: str, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, 6, generator=generator).to(device) for name in ("x", "y")}


def calls(graph: fx.Graph, op: Any) -> list[fx.Node]:
    found: list[fx.Node] = graph.find_nodes(op="call_function", target=op)
    assert found, f"no {op} to plant a mistake in:\n{graph}"
    return found


def drops_a_clone(graph: fx.Graph) -> None:
    """The target is the parameter's slot itself, read when the slot has its new value."""
    for clone in calls(graph, aten.clone.default):
        (write,) = [user for user in clone.users if user.target is aten.copy_.default]
        clone.replace_all_uses_with(clone.args[0])
        graph.erase_node(clone)
        last = graph.output_node().prev
        if write is not last:
            last.append(write)


def writes_early(graph: fx.Graph) -> None:
    """A slot has its new value as soon as that is known, when the old one is still to be read."""
    (write,) = [one for one in calls(graph, aten.copy_.default) if one.args[0].meta["spec"].shape == (6,)]
    write.args[1].append(write)


def reads_by_a_wrong_stride(graph: fx.Graph) -> None:
    """A square input is read as if it lay the other way round."""
    x = next(node for node in graph.find_nodes(op="placeholder") if node.meta["spec"].shape == (6, 6))
    with graph.inserting_after(x):
        turned = graph.call_function(aten.as_strided.default, (x, [6, 6], [1, 6]))
    x.replace_all_uses_with(turned, delete_user_cb=lambda user: user is not turned)


def sums_over_the_wrong_axis(graph: fx.Graph) -> None:
    (mean,) = calls(graph, aten.mean.dim)
    mean.args = (mean.args[0], [1], *mean.args[2:])


def nothing(graph: fx.Graph) -> None:
    pass


def compiler(plant: Plant) -> Callable[..., Any]:
    """A compiler that only makes the one mistake."""

    def compile_graph(graph: fx.GraphModule, arguments: Any, **options: Any) -> Any:
        plant(graph.graph)
        graph.graph.lint()
        graph.recompile()
        return graph

    return compile_graph


def stale(graph: fx.GraphModule, arguments: Any, **options: Any) -> Any:
    """Reads the inputs that it was compiled with."""
    places = [node.meta["spec"].shape == (6, 6) for node in graph.graph.find_nodes(op="placeholder")]
    kept = [one.clone() if stays else None for one, stays in zip(arguments, places, strict=True)]
    return lambda *given: graph(*(one if old is None else old for one, old in zip(given, kept, strict=True)))


def stale_since_the_first_run(graph: fx.GraphModule, arguments: Any, **options: Any) -> Any:
    places = [node.meta["spec"].shape == (6, 6) for node in graph.graph.find_nodes(op="placeholder")]
    kept: list[Any] = []

    def run(*given: Tensor) -> Any:
        if not kept:
            kept.extend(one.clone() if stays else None for one, stays in zip(given, places, strict=True))
        return graph(*(one if old is None else old for one, old in zip(given, kept, strict=True)))

    return run


MISTAKES = {
    "a dropped clone": (compiler(drops_a_clone), r"state\.target\['w1'\]"),
    "an early write": (compiler(writes_early), r"metrics\['moved'\]"),
    "a wrong stride": (compiler(reads_by_a_wrong_stride), r"metrics\['loss'\]"),
    "a sum over the wrong axis": (compiler(sums_over_the_wrong_axis), r"state\.mean"),
    "a stale input": (stale, r"metrics\['loss'\]"),
    "an input of the first run": (stale_since_the_first_run, r"metrics\['loss'\]"),
}


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Lets steps be compiled by a function of ours, in graphs that write the slots, as on a GPU."""

    def by(compile_graph: Any) -> None:
        in_line = partial(lower_as_on_a_gpu, lanes=False)  # what a compiler of ours makes has no launches
        monkeypatch.setattr("functional_cg.step.captures.lower", in_line)
        monkeypatch.setattr("functional_cg.stages.lower.functions.compile_graph", compile_graph)

    return by


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_refused(mistake: str, device: str, in_place: Callable[[Any], None]) -> None:
    compile_graph, where = MISTAKES[mistake]
    in_place(compile_graph)
    state, batch = a_state(device), a_batch(device)
    before = fcg.snapshot(state)
    step = fcg.graph_step(train_step, lowering="inductor")
    with pytest.raises(
        fcg.MiscompileError, match=rf"{where}(.|\n)*differs by .*, computed at test_trial.py:"
    ):
        step(state, batch)
    assert_trees_all_equal(state, before)
    assert state.generation == 0
    assert step.stats.replays == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_verified_call_finds_what_the_certificate_does(
    mistake: str, device: str, in_place: Callable[[Any], None]
) -> None:
    """Compiled calls are compared with eager ones: with what was compiled alone, a mistake agrees."""
    compile_graph, where = MISTAKES[mistake]
    in_place(compile_graph)
    state = a_state(device)
    step = fcg.graph_step(train_step, lowering="inductor", debug="verify", certify=False)

    def two_calls() -> None:  # at the first one, the rate is zero
        step(step(state, a_batch(device))[0], a_batch(device, 1))

    with pytest.raises(
        fcg.MiscompileError, match=rf"at verified call [12]\.(.|\n)*{where}(.|\n)*differs by"
    ) as error:
        two_calls()
    assert "`state.latest()` is the new one" in str(error.value)
    assert state.latest().generation >= 1


@pytest.mark.parametrize("device", DEVICES)
def test_no_mistake_is_none(device: str, in_place: Callable[[Any], None]) -> None:
    in_place(compiler(nothing))
    state, step = a_state(device), fcg.graph_step(train_step, lowering="inductor", debug="verify")
    twin = fcg.fork(state)
    state, metrics = step(state, a_batch(device))
    twin, expected = step.eager(twin, a_batch(device))
    torch.testing.assert_close(metrics["loss"], expected["loss"])
    assert "  certified: " in step.explain()


@pytest.mark.parametrize("name", STEPS)
def test_rounding_is_no_mistake(name: str) -> None:
    """Of steps that draw, route, rank, quantise: none is refused, by a compiler that rounds elsewhere."""
    shares = []
    for seed in range(8 if THOROUGH else 2):
        params, train_step, batch = STEPS[name](seed)
        rate = fcg.optim.adamw(1e-3, weight_decay=0.1) if seed % 2 else fcg.optim.sgd(0.1, momentum=0.9)
        optimizer = (
            fcg.optim.stochastic_rounding(rate, key=fcg.random.key(seed)) if name == "stochastic" else rate
        )
        state = fcg.TrainState.create(params=params, optimizer=optimizer, key=fcg.random.key(seed))
        step = fcg.graph_step(train_step, lowering=compile_wide)
        step(state, batch)
        (text,) = [line for line in step.explain().splitlines() if "certified" in line]
        assert text.startswith("  certified: ")
        shares.append("of what rounding explains" in text)
    assert any(shares)  # it does round elsewhere


@pytest.mark.parametrize("name", STEPS)
def test_a_mistake_among_what_jumps_is_found(name: str) -> None:
    """A product has the wrong sign."""

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        products = [
            n
            for op in (aten.mm.default, aten.bmm.default)
            for n in graph.graph.find_nodes(op="call_function", target=op)
        ]
        with graph.graph.inserting_after(products[0]):
            wrong = graph.graph.call_function(aten.neg.default, (products[0],))
        wrong.meta["spec"] = products[0].meta["spec"]
        products[0].replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
        graph.recompile()
        return compile_wide(graph, inputs)

    params, train_step, batch = STEPS[name](0)
    state = fcg.TrainState.create(
        params=params, optimizer=fcg.optim.adamw(1e-3, weight_decay=0.1), key=fcg.random.key(0)
    )
    with pytest.raises(fcg.MiscompileError):
        fcg.graph_step(train_step, lowering=compiler)(state, batch)


# -- what it costs, and when it is left out --------------------------------------------------------------------------


def test_the_options(caplog: pytest.LogCaptureFixture) -> None:
    def said(calls: int = 1, **options: Any) -> str:
        step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), **options)
        state: Any = {"w": torch.zeros(3)}
        for _ in range(calls):
            state, _ = step(state, torch.ones(3))
        return " ".join(line for line in step.explain().splitlines() if "certified" in line)

    plain = lambda graph, inputs: graph  # noqa: E731
    caplog.set_level(logging.INFO, logger="functional_cg")
    assert said(lowering="aten") == ""  # what runs is the program itself
    assert said(lowering=plain, certify=False) == ""
    assert "certified" not in caplog.text
    what = "it computes what its calls do one by one; bit by bit"
    for asked in ("auto", True, "first"):
        assert said(lowering=plain, certify=asked) == f"  certified: on the values of the first call {what}"
        assert "<lambda>: certified: " in caplog.text
    for asked, calls in (
        ("first", "the first call"),
        ("auto", "calls 1, 2, 4, …, 16"),
        (7, "calls 1, 8, 15"),
        (10, "calls 1, 11"),
    ):
        assert said(20, lowering=plain, certify=asked) == f"  certified: on the values of {calls} {what}"
    for wrong in ("yes", 0, -1, 2.0):
        with pytest.raises(
            ValueError, match="certify must be 'auto', 'first', a number of calls, True or False"
        ):
            fcg.graph_step(lambda s, x: (s, {}), certify=wrong)  # type: ignore[call-overload]


def test_a_certificate_of_many_calls_keeps_few() -> None:
    certificate = Certificate(certified=True)
    for call in range(2, 1001):
        certificate = certificate.also(call, 0.0)
        assert len(certificate.calls) <= 5
    assert "on the values of calls 1, 2, 3, …, 1,000 it" in str(certificate)


def test_too_little_memory_leaves_it_out_and_says_by_how_much(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """The step's own call makes 4 MiB; what is free comes and goes."""
    rooms, runs = iter([2**20] * 8), list[int]()
    monkeypatch.setattr("functional_cg.stages.trial.space.free_room", lambda buffers: next(rooms, 2**40))

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        return lambda *args: runs.append(1) or graph(*args)

    def step_of(certify: Any) -> Any:
        return fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), lowering=compiler, certify=certify)

    state, x = {"w": torch.zeros(2**20)}, torch.ones(2**20)
    with pytest.raises(
        fcg.CaptureError, match=r"not certified: by 0\.0\d GiB, which its calls one by one take more"
    ):
        step_of(True)(state, x)
    step = step_of("auto")
    runs.clear()
    state, _ = step(state, x)
    assert len(runs) == 2  # on other values, to see what it keeps of them, and the call itself
    assert "`<lambda>`: not certified: by 0.00 GiB" in str(recwarn.pop().message)
    assert "  not certified: by 0.00 GiB, which its calls one by one take more than is free" in step.explain()
    list(rooms)
    for _ in range(3):
        state, _ = step(state, x)
    assert "  certified: on the values of calls 2, 4 it computes" in step.explain()
    assert state["w"][0] == 4


@pytest.mark.parametrize("device", [*DEVICES, "cpu as graphs"])
@pytest.mark.parametrize("call", [2, 4, 8])
def test_a_compiled_step_that_goes_wrong_later_is_refused_before_its_state_counts(
    call: int, device: str, in_place: Callable[[Any], None]
) -> None:
    """What was right at the first call is compared again."""
    device, _, graphs = device.partition(" ")
    off = torch.zeros((), device=device)

    def compile_graph(graph: fx.GraphModule, arguments: Any, **options: Any) -> Any:
        place = next(
            n
            for n, node in enumerate(graph.graph.find_nodes(op="placeholder"))
            if node.meta["spec"].shape == (8,)
        )

        def run(*given: Tensor) -> Any:
            results = graph(*given)
            given[place].mul_(1 + off)
            return results

        return run

    in_place(compile_graph)
    step = fcg.graph_step(train_step, lowering="inductor", backend=AsGraphs() if graphs else "auto")
    state, twin = a_state(device), a_state(device)
    for number in range(1, 20):
        batch = a_batch(device, number)
        twin, _ = step.eager(twin, batch)
        if number == call:
            off.fill_(1)
            generation, before = state.generation, fcg.snapshot(state)
            with pytest.raises(fcg.MiscompileError, match=rf"Before call {call} changes(.|\n)*") as error:
                step(state, batch)
            assert "state.params['b1']" in str(error.value)
            assert state.generation == generation
            assert_trees_all_equal(fcg.snapshot(state), before)
            assert f"not certified: call {call} found" in step.explain()
            break
        state, _ = step(state, batch)
        torch.testing.assert_close(fcg.snapshot(state).params, fcg.snapshot(twin).params)


@pytest.mark.parametrize("device", [*DEVICES, "cpu as graphs"])
def test_what_rounding_explains_at_a_later_call_alone_is_measured_there(device: str) -> None:
    """A thousand is added and taken away again from the fourth call on: 1e-4 is its rounding, and was none before."""
    device, _, graphs = device.partition(" ")
    off = torch.zeros((), device=device)

    def step_fn(state: Any, batch: Any) -> Any:
        return {"w": state["w"] / 3 + ((batch["x"].sum(0) + batch["large"]) - batch["large"])}, {}

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        return lambda *given: [one + off if one.shape == (5,) else one for one in graph(*given)]

    step = fcg.graph_step(step_fn, lowering=compiler, backend=AsGraphs() if graphs else "auto")
    state = fcg.place({"w": torch.ones(5)}, device)
    for call in range(1, 9):
        off.fill_(1e-4 * (call >= 4))
        x, large = torch.randn(2, 5, device=device), torch.tensor(1000.0 * (call >= 4), device=device)
        state, _ = step(state, {"x": x, "large": large})
    assert "on the values of calls 1, 2, 4, 8 " in step.explain()


def test_an_interrupt_of_a_compared_call_leaves_a_whole_state() -> None:
    """It comes once the new state counts, as in any other call."""
    strikes = [False]

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        def run(*given: Tensor) -> Any:
            if strikes[0]:
                os.kill(os.getpid(), signal.SIGINT)
            return graph(*given)

        return run

    state = fcg.place({"w": torch.zeros(3)})
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), lowering=compiler, certify=1)
    for call in range(1, 5):
        strikes[0] = call > 1
        with pytest.raises(KeyboardInterrupt) if call > 1 else contextlib.nullcontext():
            step(state, torch.ones(3))
        state = state.latest()
        assert (state.generation, state["w"].tolist()) == (call, [call] * 3)


def hinge(x: Tensor, batch: Tensor, count: Tensor) -> Tensor:
    rows = x * 1.0
    rows[[1, 4]] = batch[:2]
    return torch.relu(rows.sum() - 3.0)


def counted(x: Tensor, batch: Tensor, count: Tensor) -> Tensor:
    rows = x.clone()
    rows[[1, 4]] = batch[:2]
    return torch.where(count >= 3, rows.sum(), 0.0)


@pytest.mark.kernels
@pytest.mark.parametrize("loss", [hinge, counted])
@compiled_once
def test_what_the_first_batch_does_not_show_is_found_in_the_first_call(
    loss: Any, compiled_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gate is closed, so that all gradients are zero either way; then torch's own mistake behind it counts."""

    def train_step(state: Any, batch: Tensor) -> Any:
        value, grad = fcg.value_and_grad(lambda x: x.square().mean() + loss(x, batch, state["count"]))(
            state["x"]
        )
        return {"x": state["x"] - 0.1 * grad, "count": state["count"] + 1}, {"loss": value}

    start = {"x": torch.linspace(-0.2, 0.2, 24).view(6, 4), "count": torch.zeros((), dtype=torch.int64)}
    state = fcg.place(fcg.tree.map(lambda leaf: leaf.to(compiled_on), start))
    batch = torch.linspace(-0.3, 0.2, 24).view(6, 4).to(compiled_on)
    step = fcg.graph_step(train_step, lowering="inductor")
    step(fcg.fork(state), batch)
    assert "  certified: " in step.explain()
    monkeypatch.setattr("functional_cg.stages.fx_passes.old_values._copy_what_overlaps", lambda graph: None)
    with config.patch(force_disable_caches=True), pytest.raises(fcg.MiscompileError, match=r"state\['x'\]"):
        fcg.graph_step(train_step, lowering="inductor")(state, batch)


@pytest.mark.parametrize("call", [1, 4])
def test_an_overflow_that_a_compiler_loses_is_found(call: int) -> None:
    """The first batch is exact in half precision; on other values a cast to it is infinite."""

    def without_casts(graph: fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.find_nodes(op="call_function", target=aten._to_copy.default):
            if node.kwargs.get("dtype") == torch.float16 and call == 1:
                node.kwargs = {**node.kwargs, "dtype": torch.float32}
        graph.recompile()
        return graph

    def train_step(state: Any, x: Tensor) -> Any:
        finite = (x.half() * 2).float().sum().isfinite()
        return {"skipped": state["skipped"] + ~finite}, {}

    step = fcg.graph_step(train_step, lowering=without_casts)
    state: Any = {"skipped": torch.zeros((), dtype=torch.int64)}
    if call == 1:
        with pytest.raises(fcg.MiscompileError, match=r"state\['skipped'\]  differs in 1 of 1 elements"):
            step(state, torch.ones(4))
    else:
        for number in range(call):
            state, _ = step(state, torch.full((4,), 70000.0 if number else 1.0))
        assert state["skipped"] == call - 1


def test_a_result_of_another_dtype_is_refused_before_anything_counts() -> None:
    def widened(graph: fx.GraphModule, inputs: Any) -> Any:
        return lambda *given: [one.double() for one in graph(*given)]

    for certify in ("auto", False):
        state = fcg.place({"w": torch.ones(3)})
        step = fcg.graph_step(
            lambda s, x: ({"w": s["w"] + x}, {"m": x * 2}), lowering=widened, certify=certify
        )
        with pytest.raises(fcg.MiscompileError, match=r"metrics\['m'\]  expected f32\[3\].*got float64\[3\]"):
            step(state, torch.ones(3))
        assert fcg.snapshot(state)["w"].tolist() == [1.0, 1.0, 1.0]


def test_a_result_that_a_compiler_returns_as_a_vector_has_the_shape_of_the_trace() -> None:
    def flattened(graph: fx.GraphModule, inputs: Any) -> Any:
        return lambda *given: [one.flatten() for one in graph(*given)]

    def train_step(state: Any, x: Tensor) -> Any:
        return {"w": state["w"] + 1}, {"turned": (x * 2).t()}

    state = fcg.place({"w": torch.ones(2)})
    step = fcg.graph_step(
        lambda s, x: ({"w": s["w"] + 1}, {"row": x.sum(0, keepdim=True)}), lowering=flattened
    )
    for call in range(4):
        x = torch.randn(3, 2, generator=torch.Generator().manual_seed(call))
        state, metrics = step(state, x)
        assert_trees_all_equal(metrics, {"row": x.sum(0, keepdim=True)})
    turned = fcg.graph_step(train_step, lowering=flattened)
    with pytest.raises(
        fcg.MiscompileError, match=r"metrics\['turned'\]  expected f32\[2,3\].*got float32\[6\]"
    ):
        turned(state, x)


def test_a_part_of_a_result_takes_the_memory_of_that_part_and_shares_none() -> None:
    def train_step(state: Any, x: Tensor) -> Any:
        wide = x[:, :, None] * state["w"].sum(0)
        return {"w": state["w"] * 0.9}, {"windows": (x[0] + 1).unfold(0, 3, 1), "first": wide[:, :, 0]}

    step = fcg.graph_step(train_step, lowering=lambda graph, inputs: graph.forward)
    state = fcg.place({"w": torch.ones(4, 5000).t().contiguous().t()})
    for call in range(2):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(call))
        state, metrics = step(state, x)
        assert metrics["first"].untyped_storage().nbytes() == metrics["first"].nbytes
        assert_trees_all_equal(metrics["windows"], (x[0] + 1).unfold(0, 3, 1))
        metrics["windows"][0, 1] = 99.0
        assert metrics["windows"][1, 0] != 99.0


@pytest.mark.parametrize("wrong_at", [1, 2])
def test_a_step_that_was_found_wrong_stays_refused(wrong_at: int) -> None:
    """At calls that are not compared, too, and at a first call on other values."""
    calls = [0]

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        return lambda *given: [one + (calls[0] == wrong_at) for one in graph(*given)]

    state = fcg.place({"w": torch.ones(3)})
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), lowering=compiler)
    for call in range(1, 7):
        calls[0] = call
        if call < wrong_at:
            state, _ = step(state, torch.ones(3))
            continue
        with pytest.raises(
            fcg.MiscompileError, match=rf"s\['w'\]  differs (.|\n)*Before .*{('first', '2')[wrong_at - 1]}"
        ):
            step(state, torch.ones(3))
    assert fcg.snapshot(state)["w"].tolist() == [float(wrong_at)] * 3


@compiled
def test_a_sum_over_rows_beside_one_over_columns_keeps_its_dimensions(compiled_on: str) -> None:
    """As in the gradient of a norm: on a GPU, one kernel computes both, and returns a vector for the columns."""

    def train_step(state: Any, x: Tensor) -> Any:
        y = x * state["w"]
        return {"w": state["w"] + 1}, {
            "rows": y.sum(-1, keepdim=True),
            "columns": (y * x).sum((0, 1), keepdim=True),
        }

    eager = {"w": torch.ones(256, device=compiled_on)}
    state, step = fcg.place(eager), fcg.graph_step(train_step, lowering="inductor")
    for call in range(3):
        x = torch.randn(8, 1024, 256, generator=torch.Generator().manual_seed(call)).to(compiled_on)
        (state, metrics), (eager, expected) = step(state, x), train_step(eager, x)
        fcg.testing.assert_trees_all_close(metrics, expected, rtol=1e-4, atol=1e-4)


@few
@given(fst.step_fns())
def test_random_programs_are_certified_at_every_call(program: Any) -> None:
    """On values made from theirs, too: no program is refused for what rounding makes of it."""
    state, step = program.state, fcg.graph_step(program, lowering=compile_wide, certify=1)
    for _ in range(4):
        state, _ = step(state, program.x)
    assert "  certified: on the values of calls 1, 2, 3, 4 " in step.explain()


def test_one_certificate_serves_all_arenas() -> None:
    runs = []

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        return lambda *args: (runs.append(1), graph(*args))[1]

    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), lowering=compiler)
    first, second = fcg.place({"w": torch.zeros(3)}), fcg.place({"w": torch.ones(3)})
    step(first, torch.ones(3))
    before = len(runs)
    step(second, torch.ones(3))
    assert (len(runs) - before, step.stats.captures) == (1, 2)


def test_a_read_only_function_is_compared_too() -> None:
    def wrong(graph: fx.GraphModule, inputs: Any) -> Any:
        return lambda *args: [out + 1 for out in graph(*args)]

    state = fcg.place({"w": torch.ones(3)})
    look = fcg.graph_fn(lambda s, x: s["w"] @ x, lowering=wrong)
    with pytest.raises(fcg.MiscompileError, match=r"metrics  differs by 1, of which"):
        look(state, torch.ones(3))
    assert fcg.graph_fn(lambda s, x: s["w"] @ x, lowering="aten")(state, torch.ones(3)) == 3


def test_a_refused_step_may_be_called_with_another_layout() -> None:
    """What was found wrong takes no place."""
    broken = [True]

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        return lambda *args: [out + broken[0] for out in graph(*args)]

    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x.sum()}, {}), lowering=compiler)
    state = fcg.place({"w": torch.zeros(3)})
    with pytest.raises(fcg.MiscompileError):
        step(state, torch.ones(4))
    broken[0] = False
    state, _ = step(state, torch.ones(2))
    assert state["w"].tolist() == [2.0, 2.0, 2.0]


def test_too_little_memory_at_a_later_call_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, s["w"].sum()), lowering=lambda graph, _: graph)
    state, _ = step({"w": torch.zeros(3)}, torch.ones(3))
    monkeypatch.setattr(Judge, "compare", lambda *_, **__: raise_(torch.OutOfMemoryError("no room")))
    with pytest.warns(UserWarning, match="not compared at call 2"):
        state, total = step(state, torch.ones(3))
    assert (state["w"].tolist(), total) == ([2.0, 2.0, 2.0], 3)
    monkeypatch.undo()
    for _ in range(2):
        state, _ = step(state, torch.ones(3))
    assert "calls 1, 4" in step.explain()


def test_an_error_of_a_compared_call_leaves_nothing_for_another_state() -> None:
    """All captures of a step share what compares; one of them is recorded here, the other is not."""
    raises, error = [False], ValueError("broken")

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        return lambda *given: raise_(error) if raises[0] else graph(*given)

    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, s["w"].sum()), lowering=compiler, max_captures=2)
    one, _ = step(fcg.place({"w": torch.zeros(3)}), torch.ones(3))
    raises[0] = True
    with pytest.raises(ValueError, match="broken"):
        step(one, torch.ones(3))
    raises[0] = False
    with mock.patch("functional_cg.step.certify._RECORDED", 0):
        other, _ = step(fcg.place({"w": torch.full((3,), 100.0)}), torch.ones(3))
    for _ in range(3):
        other, total = step(other, torch.ones(3))
    assert (other["w"].tolist(), float(total)) == ([104.0] * 3, 309.0)


def test_zeros_have_no_copy_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functional_cg.stages.trial.space.free_room", lambda buffers: 0)
    slots = [torch.zeros(4), torch.ones(4), torch.tensor([0.0, -0.0])]
    reference = fcg.graph_step(lambda s: ([one + 1 for one in s], {})).lower(slots).reference
    space, kept = Space.of(reference, Buffers(slots, (), ()), inputs=False), [one.clone() for one in slots]
    assert [one.untyped_storage().nbytes() for one in space.values] == [4, 16, 8]
    space.vary(KINDS[0])
    space.reset()
    for one, value in zip(slots, kept, strict=True):
        assert torch.equal(one.view(torch.int32), value.view(torch.int32))


def test_ranks_record_together_or_not_at_all() -> None:
    """Else their comparisons would ask the other ranks in another order."""
    others, trial = iter([False, True]), mock.Mock(lacking=0)
    trial.together = lambda flag: next(others)
    reference = mock.Mock(outputs=(), at_once=0)
    of_one = mock.Mock(_trial=trial, _arenas=(), fresh=False, _buffers=Buffers((), (), ()))
    of_one._lowered.reference, of_one._lowered.plan.one_by_one = reference, False
    with mock.patch.multiple("functional_cg.step.certify", Space=mock.DEFAULT, Recorded=mock.DEFAULT) as made:
        assert Certified._record(of_one, mock.Mock()) is None
    made["Recorded"].return_value.close.assert_called_once_with()


def test_metrics_of_a_compared_call_are_the_users() -> None:
    """Nothing keeps them, or what they were compared with, until the next comparison."""
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, s["w"] * 2), lowering=lambda graph, _: graph)
    state, _ = step({"w": torch.zeros(3)}, torch.ones(3))
    state, doubled = step(state, torch.ones(3))
    memory = StorageWeakRef(doubled.untyped_storage())
    del doubled
    assert memory.expired()


def test_what_cannot_be_recorded_is_compared_call_by_call() -> None:
    class Mixed(AsGraphs):
        """Its replays return new tensors, and what it records does not."""

        def capture(self, *given: Any) -> Any:
            return CPUBackend().capture(*given)

    off = torch.zeros(3)
    step = fcg.graph_step(
        lambda s, x: ({"w": s["w"] + x}, {}),
        lowering=lambda graph, _: lambda *given: [result + off for result in graph(*given)],
        backend=Mixed(),
    )
    state, _ = step({"w": torch.zeros(3)}, torch.ones(3))
    off.fill_(1)
    with pytest.raises(fcg.MiscompileError, match="Before call 2"):
        step(state, torch.ones(3))


def raise_(error: Exception) -> None:
    raise error


class Rerun:
    """A reference whose result becomes another one in each perturbed run."""

    def __init__(self, value: Tensor, rerun: Tensor) -> None:
        self.outputs = [Output("metrics", Var(0, BufferSpec.of(value), 0, 0, fills=True))]
        self.value, self.rerun = value, rerun

    def moved(self, buffers: Any, expected: Any, shaker: Any) -> Distances:
        return between([self.rerun], expected)

    def site_of(self, var: Var) -> None:
        return None


def test_what_rounding_makes_infinite_may_be_so() -> None:
    """At that call alone; and no other number is explained by it."""
    value = torch.tensor([1.0, 2.0])
    rerun = Rerun(value, torch.tensor([1.0, torch.inf]))
    judge, buffers = Judge(cast("Any", rerun), lambda flag: flag), Buffers((), (), ())

    def compared(got: Tensor) -> list[Any]:
        return judge.compare([got], [rerun.value], buffers, lambda: None)

    assert compared(torch.tensor([1.0, torch.nan])) == []
    assert "differs by 0.5 in norm" in str(compared(torch.tensor([1.0, 2.5]))[0])
    rerun.value, rerun.rerun = torch.zeros(2), torch.zeros(2)
    assert compared(torch.zeros(2)) == []
    rerun.value, rerun.rerun = value, value
    assert "infinite or NaN in only one" in str(compared(torch.tensor([1.0, torch.nan]))[0])
    huge = Rerun(torch.tensor([1e200, -1e200], dtype=torch.float64), value)
    judge = Judge(cast("Any", huge), lambda flag: flag)
    assert judge.compare([huge.value], [huge.value], buffers, lambda: None) == []


# -- its parts -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 700_000), min_size=1, max_size=5), st.integers(0, 2**32))
def test_distances_of_many_tensors_are_those_of_each(sizes: list[int], seed: int) -> None:
    generator, distances = torch.Generator().manual_seed(seed), Distances()
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int16]
    pairs = []
    for number, size in enumerate(sizes):
        one = (torch.randn(size, generator=generator) * 100).to(dtypes[(seed + number) % len(dtypes)])
        pairs.append((one, one.roll(1)))
        distances.add(number, *pairs[-1])
    for (one, other), (norm, greatest) in zip(pairs, distances.known(len(pairs))[0].tolist(), strict=True):
        if one.dtype is torch.int16:
            apart = (one != other).double()
        else:
            apart = torch.view_as_real(one - other) if one.is_complex() else one.double() - other.double()
        assert norm == pytest.approx(float(apart.double().norm()), rel=1e-6)
        assert greatest == pytest.approx(float(apart.abs().max()) if apart.numel() else 0.0, rel=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_as_good_as_itself(value: float) -> None:
    a = torch.tensor([1.0, value, 3.0])
    assert measured(a, a.clone()) == 0
    assert measured(a, torch.tensor([1.0, 2.0, 3.0])) == float("inf")


def test_what_is_infinite_hides_no_other_difference() -> None:
    distances = Distances()
    distances.add(0, torch.tensor([1.0, math.nan, 3.0]), torch.tensor([4.0, 2.0, 7.0]))
    assert distances.known(1)[0].tolist() == [[5.0, math.inf]]


def test_what_is_not_finite_at_a_later_call_hides_no_other_difference() -> None:
    off = [0.0]

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        return lambda *args: [out + out.new_tensor([0.0, off[0], 0.0]) for out in graph(*args)]

    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), lowering=compiler, certify=1)
    state = fcg.place({"w": torch.zeros(3)})
    for value in (1.0, -torch.inf, torch.inf, 1.0):  # then infinite, then NaN
        state, _ = step(state, torch.tensor([value, 1.0, 1.0]))
    assert state["w"].isnan().tolist() == [True, False, False]
    off[0] = 1.0
    with pytest.raises(fcg.MiscompileError, match=r"'w'\]  differs by 1, of which"):
        step(state, torch.ones(3))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.interpolate(x.half()[None], scale_factor=2, mode="linear"),
        lambda x: F.multi_margin_loss((x.half() @ x.half().T).float(), torch.arange(4)),
        fcg.grad(lambda x: F.smooth_l1_loss(x.half() @ x.half().T, (x @ x.T).half(), beta=0.3).float()),
    ],
    ids=["interpolated", "margins", "gradient of a loss"],
)
def test_what_a_kernel_makes_of_infinity_may_be_its_own(fn: Callable[[Tensor], Tensor]) -> None:
    """Its formula may make NaN of it, or the other way round; the values of the calls are finite."""
    step = fcg.graph_step(lambda s, x: ({"n": s["n"] + 1}, fn(x)), lowering="inductor")
    state = fcg.place({"n": torch.zeros(())})
    for call in range(2):
        state, metric = step(state, torch.randn(4, 8, generator=torch.Generator().manual_seed(call)))
        assert bool(metric.isfinite().all())


def test_what_reads_infinity_at_each_call_is_compared_on_other_values() -> None:
    """As a softmax of masked scores does, before a gate that the first batch leaves closed."""

    def step_fn(state: Any, x: Tensor) -> Any:
        scores = x.abs().masked_fill(torch.eye(4, dtype=torch.bool), -math.inf)
        return {"n": state["n"] + 1}, (scores.softmax(-1) * x.relu()).sum()

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        return lambda *args: [graph(*args)[0] * 0, *graph(*args)[1:]]

    step = fcg.graph_step(step_fn, lowering=compiler)
    with pytest.raises(fcg.MiscompileError):
        step(fcg.place({"n": torch.zeros(())}), torch.linspace(-3, -1, 16).view(4, 4))


@pytest.mark.parametrize("off", [1.0, 1.01])
def test_an_element_that_rounding_makes_infinite_explains_no_other(off: float) -> None:
    """The difference of two equal values is zero, or anything near it, and its logarithm infinite, or NaN."""

    def step_fn(state: Any, x: Tensor) -> Any:
        metric = torch.stack([(x * 3.3 - x * 3.3).log(), (x * 1.3).sin()])
        return {"w": state["w"] + x}, metric

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Tensor) -> Any:
            metric, *others = graph(*args)
            return [metric * off, *others]

        return run

    step = fcg.graph_step(step_fn, lowering=compiler)
    state, x = fcg.place({"w": torch.zeros(())}), torch.tensor(0.7)
    if off == 1:
        assert step(state, x)[1][0] == -math.inf
        return
    with pytest.raises(
        fcg.MiscompileError, match=r"metrics  differs by .* in norm, of which rounding explains"
    ):
        step(state, x)
    assert fcg.snapshot(state)["w"] == 0


@pytest.mark.parametrize("device", HERE)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
)
def test_what_was_rounded_moves_by_an_ulp_and_what_is_exact_stays(dtype: torch.dtype, device: str) -> None:
    exact = torch.arange(-8, 9).to(device, dtype)
    special = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0]).to(device, dtype)
    rounded = torch.linspace(0.1, 0.9, 1000, dtype=torch.float64).sin().to(device, dtype)
    shaker = Shaker()
    for value, still in ((exact, True), (special, True), (rounded, False)):
        moved = value.clone()
        shaker.move(moved, 1, 0.0)
        assert torch.equal(moved, value) is still
        finite = torch.view_as_real(value) if value.is_complex() else value
        apart = (torch.view_as_real(moved) if value.is_complex() else moved) - finite
        limit = finite.abs().double().nan_to_num(0, 0, 0) * torch.finfo(dtype).eps
        assert bool((apart.double().nan_to_num(0).abs() <= limit).all())
    largest = torch.full((8,), torch.finfo(dtype).max, dtype=dtype, device=device)
    shaker.move(largest, 1, 0.0)
    assert bool(largest.isfinite().all())


def test_what_decides_is_asked_of_numbers_that_were_rounded() -> None:
    program = fcg.graph_fn(lambda x, n: (x < n, x + n)).lower(torch.rand(1000), torch.arange(1000)).program
    (x, n), (compared, added) = program.inputs, program.instrs
    values = {x: torch.rand(1000), n: torch.arange(1000)}
    assert Shaker().arguments(compared, values) == Shaker(1, 8).arguments(added, values) == {}
    moved = Shaker(1, 8).arguments(compared, values)
    assert moved.keys() == {x}
    assert 0 < float((moved[x] - values[x]).abs().max()) < 1e-5


def test_what_cancels_within_a_call_is_asked_of_other_roundings_of_its_arguments() -> None:
    """A sum over what is normalized does not depend on it: the gradient is what rounding has left."""

    def gradient(x: Tensor) -> Tensor:
        return fcg.grad(lambda x: F.batch_norm(x, None, None, training=True).sum())(x)

    program = fcg.graph_fn(gradient).lower(torch.rand(8, 4)).program
    call = next(instr for instr in program.instrs if instr.name == "native_batch_norm_backward")
    values = {var: torch.rand(var.spec.shape) for var in call.inputs()}
    moved = Shaker(2).arguments(call, values)
    assert moved.keys() == values.keys()
    for var, one in moved.items():
        assert 0 < float((one - values[var]).abs().max()) < 1e-6


def test_what_an_op_writes_as_a_whole_is_a_result_and_what_it_adds_to_is_none() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.mul(x, y, out=out)
        torch.add(out, x, out=out)
        out.erf_()
        return out.index_add_(0, torch.tensor([0]), y[:1])

    program = fcg.graph_fn(fn).lower(torch.rand(1000), torch.rand(1000)).program
    called = {str(instr.op): instr for instr in program.instrs}
    whole = ("aten.mul.out", "aten.add.out", "aten.erf_.default")
    for name, moves in (*((name, True) for name in whole), ("aten.index_add_.default", False)):
        value = torch.rand(1000)
        made = [(called[name].writes[0], value.clone())]
        Shaker().after(called[name], made)
        assert torch.equal(made[0][1], value) is not moves, name


@pytest.mark.parametrize("device", HERE)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shaker_that_leans_moves_all_the_same_way(dtype: torch.dtype, seed: int, device: str) -> None:
    """Upwards, downwards, away from zero or towards it: so are equal numbers rounded, and a sum of them is far off."""
    value = (torch.linspace(-0.9, 0.9, 4000, dtype=torch.float64).sin() * 1.234567).to(device, dtype)
    shaker = Shaker(2, leans=True, dice=random.Random(seed))
    moved = value.clone()
    shaker.move(moved, 2, 0.0)
    apart = moved.double() - value.double()
    ways = [apart, -apart, apart * value.sign(), -apart * value.sign()]
    assert any(bool((way >= 0).all()) for way in ways)
    assert (apart != 0).sum() > 2000


@pytest.mark.parametrize("device", HERE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sum_is_moved_by_its_spread(dtype: torch.dtype, device: str) -> None:
    """In parts of the root mean square, whatever an element is; in a layout of any order."""
    value = (
        (torch.linspace(-3, 3, 40_000, dtype=torch.float64).sin() * 1.234567).view(200, 200).to(device, dtype)
    )
    moved = value.t().clone(memory_format=torch.preserve_format)
    Shaker().move(moved, 1, 0.125)
    apart = moved.t().double() - value.double()
    root = value.double().square().mean().sqrt()
    assert abs(float(apart.std() / root) - 0.125) < 0.01
    assert abs(float(apart.mean() / root)) < 0.005
    assert abs(float((apart * value).mean() / root**2)) < 0.005


def test_an_update_is_made_leaf_by_leaf() -> None:
    """Not all new parameters and moments are there at a time, only their gradients."""

    def train_step(state: Any, x: Tensor) -> Any:
        grads = fcg.grad(lambda p: sum((x * leaf).square().sum() for leaf in p))(state.params)
        return state.apply_gradients(grads), {}

    params = [torch.randn(1024) for _ in range(32)]
    state = fcg.place(fcg.TrainState.create(params=params, optimizer=fcg.optim.adamw(1e-3, weight_decay=0.1)))
    reference = fcg.graph_step(train_step).lower(state, torch.randn(1024)).reference
    buffers = Buffers(state._lease.arena.slots, [torch.randn(1024)], [])
    assert _most(reference, buffers) < 44 * 4096


def test_a_result_that_a_kernel_omits_is_none_of_a_run() -> None:
    """As attention of cuDNN does: without gradients, nobody reads the logarithms of its sums."""
    x = torch.randn(1, 2, 16, 8)
    reference = fcg.graph_fn(lambda x: F.scaled_dot_product_attention(x, x, x)).lower(x).reference
    (expected,) = reference.values(Buffers([], [x], []))

    def omitting(instr: Any, value: Any) -> Any:
        result = evaluate(instr, value)
        return (result[0], None) if isinstance(result, tuple) else result

    with mock.patch("functional_cg.stages.trial.reference.evaluate", omitting):
        shaken: list[Tensor] = []
        reference.run(Buffers([], [x], []), lambda number, value: shaken.append(value), after=Shaker().after)
        assert torch.equal(reference.values(Buffers([], [x], []))[0], expected)
    torch.testing.assert_close(shaken[0], expected)


def test_a_perturbed_run_keeps_nothing_of_its_calls() -> None:
    reference = fcg.graph_fn(lambda x: x * 0.1 + 0.7).lower(torch.ones(3)).reference
    for _ in range(2):
        reference.moved(Buffers([], [torch.ones(3)], []), [torch.ones(3)], Shaker())
        assert reference._unsure.keys() == set(reference._instrs)


def outputs(reference: Any, buffers: Buffers) -> list[Tensor]:
    """What a reference shows, each output once."""
    shown: dict[int, Tensor] = {}

    def see(number: int, value: Tensor) -> None:
        assert number not in shown
        shown[number] = value.clone()

    reference.run(buffers, see)
    return [shown[number] for number in range(len(reference.outputs))]


@given(fst.step_fns(), st.integers(1, 10), st.sampled_from([0, 2**10, 2**40]))
def test_within_less_memory_a_program_computes_the_same(program: Any, tenths: int, host: int) -> None:
    """What is needed last waits on the host; where that does not do, it says how much is lacking."""
    step = fcg.graph_step(program)
    state = fcg.place(program.state)
    lowered = step.lower(state, program.x)
    buffers = Buffers(state._lease.arena.slots, [program.x], [one.value for one in lowered.program.constants])
    expected = outputs(lowered.reference, buffers)
    assert lowered.reference.fit(2**60) == 0
    room = _most(lowered.reference, buffers) * tenths // 10
    lacking = lowered.reference.fit(room, host=host)
    if host == 2**40:
        assert lowered.reference.fit(room + lacking, host=host) == 0
        assert _most(lowered.reference, buffers) <= room + lacking
    for got, value in zip(outputs(lowered.reference, buffers), expected, strict=True):
        assert_trees_all_equal(got, value)


def batch_norms(width: int, device: str = "cpu") -> tuple[Any, Any]:
    """A step of six convolutions with batch norms, and its state."""
    layers = [
        layer
        for _ in range(6)
        for layer in (nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
    ]
    apply, params, buffers = fcg.from_module(nn.Sequential(*layers).to(device))

    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            out, buffers = apply(params, state.buffers, x, train=True)
            return out.square().mean(), buffers

        (loss, new), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, buffers=new), {"loss": loss}

    return train_step, fcg.TrainState.create(params=params, buffers=buffers, optimizer=fcg.optim.sgd(0.1))


def test_a_net_in_half_of_the_memory() -> None:
    train_step, state = batch_norms(8)
    x = torch.randn(4, 8, 16, 16)
    lowered = fcg.graph_step(train_step).lower(state, x)
    reference = lowered.reference
    given = Buffers(state._lease.arena.slots, [x], [one.value for one in lowered.program.constants])
    expected = outputs(reference, given)
    assert reference.fit(2**60) == 0
    room = _most(reference, given) // 2
    assert reference.fit(room) > 0
    assert reference.fit(room, host=2**40) == 0
    assert _most(reference, given) <= room
    for got, value in zip(outputs(reference, given), expected, strict=True):
        assert_trees_all_equal(got, value)


@pytest.mark.cuda
def test_values_wait_on_the_host_where_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks: list[int] = []
    waited: list[bool] = []

    def watched(values: Any, *, to_host: bool) -> Any:
        waited.append(to_host)  # not the values, which would stay on the device
        return transferred(values, to_host=to_host)

    monkeypatch.setattr("functional_cg.stages.trial.reference.transferred", watched)
    for room in (2**40, 2**27):
        monkeypatch.setattr("functional_cg.stages.trial.space.free_room", lambda buffers, room=room: room)
        train_step, state = batch_norms(16, "cuda")
        x = torch.randn(64, 16, 64, 64, device="cuda")
        step = fcg.graph_step(train_step, lowering="inductor", certify=1)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            state, _ = step(state, x)
        peaks.append(torch.cuda.max_memory_allocated())
        assert "  certified: on the values of calls 1, 2, 3 " in step.explain()
        step.close()
    assert waited, "nothing waited on the host"
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize("device", HERE)
def test_views_of_one_storage_come_back_as_such(device: str) -> None:
    whole = torch.arange(24.0, device=device)
    views = [whole[2:].view(2, 11), whole.view(4, 6).t(), whole[5]]
    variables = [Var(n, BufferSpec.of(one), 7, one.storage_offset(), False) for n, one in enumerate(views)]
    expected = [view.clone() for view in views]
    for _ in range(2):
        host = transferred(dict(zip(variables, views, strict=True)), to_host=True)
        whole.zero_()  # it waits for the copy
        back = transferred(host, to_host=False)
        assert [*back] == variables
        for view, value, var in zip(views, expected, variables, strict=True):
            assert_trees_all_equal(back[var], value)
            assert (back[var].stride(), back[var].storage_offset()) == (view.stride(), view.storage_offset())
        back[variables[2]].fill_(-1)  # of the one storage that all of them have
        assert back[variables[0]][0, 3] == -1
        assert back[variables[1]][5, 0] == -1
        back[variables[2]].fill_(5)
        views = [back[var] for var in variables]
        whole = views[0]


def test_copies_of_constants_that_are_written_count() -> None:
    def train_step(state: Any, x: Tensor) -> Any:
        c = torch.tensor([0.0] * 2048)
        c.add_((x @ state["w"]).sum())
        return state, {"m": c.sum()}

    state, x = fcg.place({"w": torch.randn(64, 8)}), torch.randn(64, 64)
    lowered = fcg.graph_step(train_step).lower(state, x)
    buffers = Buffers(state._lease.arena.slots, [x], [one.value for one in lowered.program.constants])
    assert lowered.reference.fit(_most(lowered.reference, buffers)) == 0
    assert lowered.reference.fit(_most(lowered.reference, buffers) - 2048 * 4) > 0


class _Memory(TorchDispatchMode):
    """Counts the bytes of the storages that are alive after each call."""

    def __init__(self, static: Iterable[Tensor]) -> None:
        super().__init__()
        self.static = [StorageWeakRef(one.untyped_storage()) for one in static]
        self._alive: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in fcg.tree.leaves(result):
            storage = one.untyped_storage() if isinstance(one, Tensor) else None
            if storage is not None and StorageWeakRef(storage) not in self.static:
                self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self._alive = {one: size for one, size in self._alive.items() if not one.expired()}
        self.most = max(self.most, sum(self._alive.values()))
        return result


def _most(reference: Any, buffers: Buffers) -> int:
    """The most bytes that a run takes at a time besides its buffers: counted, not planned."""
    memory = _Memory([*buffers.slots, *buffers.inputs, *buffers.constants])

    def on_the_host(values: Any, *, to_host: bool) -> Any:
        if not to_host:
            return transferred(values, to_host=False)
        with _disable_current_modes():
            found = transferred(values, to_host=True)
        memory.static += [StorageWeakRef(one.untyped_storage()) for one in found.values()]
        return found

    with mock.patch("functional_cg.stages.trial.reference.transferred", on_the_host), memory:
        reference.run(buffers, lambda number, value: None)
    return memory.most
