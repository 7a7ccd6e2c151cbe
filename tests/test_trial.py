"""The trial of a compiled step refuses planted errors before anything is committed, and accepts rounding."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import functional_cg as fcg
from functional_cg.stages.plan import Buffers
from functional_cg.stages.program import Var
from functional_cg.stages.trial.host_memory import HostMemory
from functional_cg.stages.trial.row_blocks import in_blocks
from functional_cg.stages.trial.sketch import Distance, distance, known, sketch
from functional_cg.stages.trial.ulps import Shaker
from functional_cg.state.arena import BufferSpec
from functional_cg.testing import assert_trees_all_equal
from functional_cg.testing import strategies as fst
from tests.compiled_graphs import ON_A_GPU, lower_as_on_a_gpu
from tests.other_rounding import STEPS, compile_wide

aten = torch.ops.aten
DEVICES = ["cpu", ON_A_GPU]
HERE = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]

Plant = Callable[[fx.Graph], None]


def measured(one: Tensor, other: Tensor) -> Distance:
    """How far apart two tensors are, by their sketches."""
    return known([distance(sketch(one), sketch(other))])[0]


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
        monkeypatch.setattr("functional_cg.step.captures.lower", lower_as_on_a_gpu)
        monkeypatch.setattr("functional_cg.stages.lower.head.compile_graph", compile_graph)

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
    for seed in range(8):
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
    def said(**options: Any) -> str:
        step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), **options)
        step({"w": torch.zeros(3)}, torch.ones(3))
        return " ".join(line for line in step.explain().splitlines() if "certified" in line)

    plain = lambda graph, inputs: graph  # noqa: E731
    caplog.set_level(logging.INFO, logger="functional_cg")
    assert said(lowering="aten") == ""  # what runs is the program itself
    assert said(lowering=plain, certify=False) == ""
    assert "certified" not in caplog.text
    for asked in ("auto", True):
        text = said(lowering=plain, certify=asked)
        assert (
            text
            == "  certified: on the values of the first call it computes what its calls do one by one; bit by bit"
        )
        assert "<lambda>: certified: " in caplog.text
    with pytest.raises(ValueError, match="certify must be 'auto', True or False, got 'yes'"):
        fcg.graph_step(lambda s, x: (s, {}), certify="yes")  # type: ignore[call-overload]


def test_a_host_without_room_leaves_it_out_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("functional_cg.step.certify._host_memory", lambda: 0)
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), lowering=lambda graph, inputs: graph)
    step({"w": torch.zeros(3)}, torch.ones(3))
    assert "<lambda>: not certified: the host has no 12 B to keep values in; in " in caplog.text
    assert "  not certified: the host has no 12 B" in step.explain()


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
    """Nothing of the failed first call stays."""
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


# -- its parts -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(0, 2**32))
def test_a_sketch_keeps_distances(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(size * 50_000 + 3, generator=generator)
    b = a + torch.randn(len(a), generator=generator) * 1e-3
    apart = measured(a, b)
    assert apart.norm == pytest.approx(float((a - b).norm()), rel=0.05)
    one = a.clone()
    one[seed % len(a)] += 1
    assert measured(a, one).norm == pytest.approx(1.0, rel=1e-6)
    assert measured(a, a.clone()).norm == 0
    assert sketch(a).nbytes <= max(a.nbytes / 8 * 1.5, 8 * 2**16)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_as_good_as_itself(value: float) -> None:
    a = torch.tensor([1.0, value, 3.0])
    assert measured(a, a.clone()).norm == 0
    assert measured(a, torch.tensor([1.0, 2.0, 3.0])).norm == float("inf")


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


def test_what_an_op_puts_into_its_out_argument_is_a_result_and_what_it_adds_to_is_none() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.mul(x, y, out=out)
        torch.add(out, x, out=out)
        return out.index_add_(0, torch.tensor([0]), y[:1])

    program = fcg.graph_fn(fn).lower(torch.rand(1000), torch.rand(1000)).program
    called = {str(instr.op): instr for instr in program.instrs}
    for name, moves in (("aten.mul.out", True), ("aten.add.out", True), ("aten.index_add_.default", False)):
        value = torch.rand(1000)
        made = [(called[name].writes[0], value.clone())]
        Shaker().results(called[name], made)
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


def outputs(reference: Any, buffers: Buffers) -> list[Tensor]:
    """What a reference shows, each output once."""
    shown: dict[int, Tensor] = {}

    def see(number: int, value: Tensor) -> None:
        assert number not in shown
        shown[number] = value.clone()

    reference.run(buffers, see)
    return [shown[number] for number in range(len(reference.outputs))]


@given(fst.step_fns(), st.integers(1, 10), st.sampled_from([0, 2**40]))
def test_within_less_memory_a_program_computes_the_same(program: Any, tenths: int, host: int) -> None:
    step = fcg.graph_step(program)
    state = fcg.place(program.state)
    lowered = step.lower(state, program.x)
    buffers = Buffers(state._lease.arena.slots, [program.x], [one.value for one in lowered.program.constants])
    expected = outputs(lowered.reference, buffers)
    room = lowered.reference.fit(2**60) * tenths // 10
    takes = lowered.reference.fit(room, host=host)
    assert _most(lowered.reference, buffers) <= takes
    for got, value in zip(outputs(lowered.reference, buffers), expected, strict=True):
        assert_trees_all_equal(got, value)


def assert_the_same_within(reference: Any, buffers: Buffers, part: int) -> None:
    """In so small a part of its memory it computes the same, with fewer than twice the calls."""
    expected = outputs(reference, buffers)
    room = reference.fit(2**60) // part
    assert reference.fit(room) == room
    assert _most(reference, buffers) <= room
    assert len(reference._actions) < 2 * len(reference._instrs)
    for got, value in zip(outputs(reference, buffers), expected, strict=True):
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


def test_a_net_with_batch_norms_in_half_of_the_memory() -> None:
    """What is made together with new statistics cannot be recomputed: it waits on the host."""
    train_step, state = batch_norms(8)
    x = torch.randn(4, 8, 16, 16)
    lowered = fcg.graph_step(train_step).lower(state, x)
    reference = lowered.reference
    given = Buffers(state._lease.arena.slots, [x], [one.value for one in lowered.program.constants])
    expected = outputs(reference, given)
    room = reference.fit(2**60) // 2
    assert reference.fit(room) > room
    assert reference.fit(room, host=2**40) == room
    assert _most(reference, given) <= room
    for got, value in zip(outputs(reference, given), expected, strict=True):
        assert_trees_all_equal(got, value)
    assert sum(action.instr is not None for action in reference._actions) < 1.1 * len(reference._instrs)


@pytest.mark.cuda
def test_it_is_certified_in_the_memory_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks: list[int] = []
    waited: list[Any] = []
    take = HostMemory.take
    monkeypatch.setattr(HostMemory, "take", lambda *given: waited.append(given) or take(*given))
    for certify in (False, "auto"):
        train_step, state = batch_norms(16, "cuda")
        x = torch.randn(64, 16, 64, 64, device="cuda")
        step = fcg.graph_step(train_step, certify=certify)  # type: ignore[call-overload]
        torch.cuda.reset_peak_memory_stats()
        step(state, x)
        peaks.append(torch.cuda.max_memory_allocated())
        said = step.explain()
        step.close()
    assert "  certified: " in said
    assert waited, "nothing waited on the host"
    assert peaks[1] <= 1.01 * peaks[0]


@pytest.mark.parametrize("device", HERE)
def test_views_of_one_storage_come_back_as_such(device: str) -> None:
    whole = torch.arange(24.0, device=device)
    views = [whole[2:].view(2, 11), whole.view(4, 6).t(), whole[5]]
    variables = [Var(n, BufferSpec.of(one), 7, one.storage_offset(), False) for n, one in enumerate(views)]
    expected = [view.clone() for view in views]
    host = HostMemory()
    for _ in range(2):
        host.put([*zip(variables, views, strict=True)])
        whole.zero_()  # it waits for the copy
        back = dict(host.take(7))
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
    host.free()


def test_a_deep_net_in_a_third_of_the_memory() -> None:
    def loss_of(params: Any, x: Tensor) -> Tensor:
        for w in params:
            x = F.gelu(x @ w)
        return x.square().mean()

    def train_step(state: Any, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: loss_of(p, x))(state["params"])
        return {"params": [w - 0.1 * g for w, g in zip(state["params"], grads, strict=True)]}, {"loss": loss}

    state = fcg.place({"params": [torch.randn(16, 16) / 4 for _ in range(16)]})
    x = torch.randn(2048, 16)
    reference = fcg.graph_step(train_step).lower(state, x).reference
    buffers = Buffers(state._lease.arena.slots, [x], [])
    assert_the_same_within(reference, buffers, 3)


def test_a_deep_residual_net_with_a_tied_head_in_a_fifth_of_the_memory() -> None:
    """Gradients wait for the end, one of them from the first call of the backward on; sums are made of all before."""
    rows, width, depth, classes = 512, 16, 24, 256

    def loss_of(params: Any, batch: Any) -> Tensor:
        x = params["table"][batch["x"]]
        for up, down in params["blocks"]:
            x = x + F.gelu(F.layer_norm(x, (width,)) @ up) @ down
        return F.cross_entropy(x @ params["table"].T, batch["y"])

    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = fcg.value_and_grad(loss_of)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    blocks = [(draw(width, 4 * width) / 4, draw(4 * width, width) / 8) for _ in range(depth)]
    state = fcg.TrainState.create(
        params={"table": draw(classes, width), "blocks": blocks},
        optimizer=fcg.optim.adamw(1e-3, weight_decay=0.1),
    )
    x, y = torch.randint(classes, (2, rows), generator=generator)
    lowered = fcg.graph_step(train_step).lower(state, {"x": x, "y": y})
    reference = lowered.reference
    buffers = Buffers(
        state._lease.arena.slots, [x, y], [constant.value for constant in lowered.program.constants]
    )
    assert_the_same_within(reference, buffers, 5)


# Room, in tensors as large as the logits, and a loss.
CLASSES: Any = {
    "cross entropy": (2.5, lambda rows, y: F.cross_entropy(rows, y)),
    "of halves": (1.7, lambda rows, y: F.cross_entropy(rows.float(), y)),
    "ignored": (2.5, lambda rows, y: F.cross_entropy(rows, y.where(y > 2, -100), reduction="sum")),
    "smoothed": (2.5, lambda rows, y: F.cross_entropy(rows, y, label_smoothing=0.1)),
    "in 3 dimensions": (
        2.5,
        lambda rows, y: F.cross_entropy(rows.view(4, -1, rows.shape[1]).flatten(0, 1), y),
    ),
    "of halves in 3 dimensions": (
        1.7,
        lambda rows, y: F.cross_entropy(rows.view(2, -1, rows.shape[1]).float().flatten(0, 1), y),
    ),
    "softmax in 4 dimensions": (
        2.5,
        lambda rows, y: F.nll_loss(rows.view(2, 1, -1, rows.shape[1]).log_softmax(-1).flatten(0, 2), y),
    ),
    "scaled in place": (2.5, lambda rows, y: F.cross_entropy((rows * 1.0).mul_(0.5), y)),
    "wide": (2.5, lambda rows, y: F.cross_entropy(rows.double(), y).float()),
    "capped": (2.5, lambda rows, y: F.cross_entropy(5 * torch.tanh(rows / 5), y)),
    "z loss": (
        2.5,
        lambda rows, y: F.cross_entropy(rows, y) + 1e-2 * rows.logsumexp(-1).square().mean(),
    ),
    "of each row": (
        2.5,
        lambda rows, y: (F.cross_entropy(rows, y, reduction="none") * (y > 9)).sum() / (y > 9).sum(),
    ),
    "by hand": (2.5, lambda rows, y: (rows.logsumexp(-1) - rows.gather(1, y[:, None])[:, 0]).mean()),
    "entropy": (2.5, lambda rows, y: -(rows.softmax(-1) * rows.log_softmax(-1)).sum(-1).mean()),
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_loss_over_many_classes_in_little_memory(name: str) -> None:
    """No order of the calls helps where one value is too large: it is computed in blocks of rows."""
    rows, classes = 512, 4096
    share, loss_of = CLASSES[name]

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Tensor:
            kind = torch.bfloat16 if name.startswith("of halves") else torch.float32
            rows = batch["x"].view(16, -1, 8).to(kind) @ params["w"].to(kind)
            return loss_of(rows.flatten(0, 1), batch["y"])

        loss, grads = fcg.value_and_grad(loss_fn)(state["params"])
        return {"params": fcg.tree.map(lambda w, g: w - g, state["params"], grads)}, {"loss": loss}

    state = fcg.place({"params": {"w": torch.randn(8, classes)}})
    batch = {"x": torch.randn(rows, 8), "y": torch.randint(0, classes, (rows,))}
    reference = fcg.graph_step(train_step).lower(state, batch).reference
    constants = [one.value for one in reference.program.constants]
    buffers = Buffers(state._lease.arena.slots, list(batch.values()), constants)
    expected = outputs(reference, buffers)
    room = int(share * rows * classes * 4)
    assert _most(reference, buffers) > room
    assert reference.fit(room) <= room
    while reference.fit(room) <= room:
        assert _most(reference, buffers) <= room
        for got, value in zip(outputs(reference, buffers), expected, strict=True):
            torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-6)
        room = room * 7 // 8


@pytest.mark.parametrize(("picked", "calls"), [(512, 8), (256, 1)])
def test_a_pick_in_fewer_rows_is_not_divided(picked: int, calls: int) -> None:
    """Its rows are the first ones: those of a block of places are not those of a block of values."""

    def train_step(state: Any, y: Tensor) -> Any:
        rows = state["w"] * 2
        return state, {"picked": rows.gather(1, y[:, None]).sum()}

    state = fcg.place({"w": torch.randn(512, 64)})
    lowered = fcg.graph_step(train_step).lower(state, torch.zeros(picked, dtype=torch.int64))
    divided = in_blocks(lowered.program.instrs, 512 * 64 * 4, 8)
    assert sum(instr.op is torch.ops.aten.gather.default for instr in divided) == calls


# Of rows [512, 1024].
IN_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "picked in fewer rows": lambda h: (
        h.tanh().gather(1, torch.arange(256)[:, None].expand(256, 64) * 7 % 64).sin()
    ),
    "bits in 3 dimensions": lambda h: (
        (h.tanh().view(8, 64, -1).exp().view(512, -1).view(torch.int32) % 7).float().sum(1)
    ),
    "bits of halves": lambda h: (h.tanh().view(torch.int16) % 7).sum(1),
    "bits that are masked": lambda h: ((h.tanh().view(torch.int32) + 1) & -65536).view(torch.float32).sum(),
    "mean of float16": lambda h: (h.tanh().half() + 3).exp().log().mean(),
    "mean of bfloat16": lambda h: (h.tanh().bfloat16() + 3).exp().mean(),
    "sum of float16": lambda h: (h.tanh().half() + 3).exp().log().sum() / 100,
    "loss of float16": lambda h: F.cross_entropy(
        40 * h.tanh().half(), torch.arange(len(h)) % h.shape[1], reduction="mean"
    ),
    "a number": lambda h: F.softmax(h.sum(), 0) + h.sum().sum(0),
}


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_in_blocks_of_rows_it_is_the_same_program(name: str) -> None:
    step = fcg.graph_step(lambda state, x: (state, {"m": IN_BLOCKS[name](x @ state["w"])}))
    state, x = fcg.place({"w": torch.randn(64, 1024) / 8}), torch.randn(512, 64)
    lowered = step.lower(state, x)
    constants = [one.value for one in lowered.program.constants]
    buffers = Buffers(state._lease.arena.slots, [x], constants)
    (expected,) = outputs(lowered.reference, buffers)
    for tenths in (9, 7, 5, 3, 0):
        lowered.reference.fit(lowered.reference.fit(2**60) * tenths // 10)
        (got,) = outputs(lowered.reference, buffers)
        torch.testing.assert_close(got, expected, rtol=2e-3 if expected.itemsize == 2 else 1e-6, atol=1e-6)


def test_copies_of_constants_that_are_written_count() -> None:
    def train_step(state: Any, x: Tensor) -> Any:
        c = torch.tensor([0.0] * 2048)
        c.add_((x @ state["w"]).sum())
        return state, {"m": c.sum()}

    state, x = fcg.place({"w": torch.randn(64, 8)}), torch.randn(64, 64)
    lowered = fcg.graph_step(train_step).lower(state, x)
    buffers = Buffers(state._lease.arena.slots, [x], [one.value for one in lowered.program.constants])
    assert _most(lowered.reference, buffers) <= lowered.reference.fit(2**60)


def test_a_view_of_a_large_input_is_no_copy_of_it() -> None:
    rows, classes = 512, 4096
    room = int(2.5 * rows * classes * 4)

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Tensor:
            seen = (batch["large"].view(-1, 64) @ params["v"]).square().mean()
            return F.cross_entropy(batch["x"] @ params["w"], batch["y"]) + seen

        loss, grads = fcg.value_and_grad(loss_fn)(state)
        return fcg.tree.map(lambda w, g: w - g, state, grads), {"loss": loss}

    state = fcg.place({"w": torch.randn(8, classes), "v": torch.randn(64, 1)})
    batch = {"x": torch.randn(rows, 8), "y": torch.arange(rows), "large": torch.randn(4096, 2048)}
    lowered = fcg.graph_step(train_step).lower(state, batch)
    inputs, constants = fcg.tree.leaves(batch), [one.value for one in lowered.program.constants]
    assert batch["large"].nbytes > room
    assert lowered.reference.fit(room) <= room
    assert _most(lowered.reference, Buffers(state._lease.arena.slots, inputs, constants)) <= room


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
    block = HostMemory._block

    def on_the_host(self: HostMemory, nbytes: int, device: torch.device) -> Tensor:
        with _disable_current_modes():
            made = block(self, nbytes, device)
        memory.static.append(StorageWeakRef(made.untyped_storage()))
        return made

    with mock.patch.object(HostMemory, "_block", on_the_host), memory:
        reference.run(buffers, lambda number, value: None)
    return memory.most
