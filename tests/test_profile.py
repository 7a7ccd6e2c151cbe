"""Where the time and the memory of a step go: every call is in one row, and nothing happens to the state."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg import report
from functional_cg.stages.lower.inductor import compile_graph
from functional_cg.stages.run.ranges import in_a_range
from functional_cg.step.profile.kernels import launched_in, lines_told
from functional_cg.step.profile.result import Profile, ProfiledCall, ProfileRow, folded
from functional_cg.step.profile.timing import Clock, DeviceClock, device_seconds
from functional_cg.testing import assert_trees_all_equal
from tests.compiled_graphs import COMPILED
from tests.nn_models import GPT, conv_net
from tests.sharding.programs import Setting, mlp_batch, mlp_state, mlp_step
from tests.sharding.ranks import on_ranks
from tests.shares import thorough
from tests.test_report import html

mpl.use("Agg")

MEBI = 2**20


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    yield
    mpl.pyplot.close("all")


def language_model() -> tuple[Any, Any, Callable[[int], Any]]:
    torch.manual_seed(0)
    apply, params, buffers = fcg.from_module(GPT(dropout=0.1))
    optimizer = fcg.optim.adamw(1e-3, weight_decay=0.1)
    state = fcg.TrainState.create(params=params, optimizer=optimizer, key=fcg.random.key(0))

    def train_step(state: Any, ids: Tensor) -> Any:
        def loss_fn(p: Any, key: Tensor) -> Tensor:
            return apply(p, buffers, ids, ids.flip(1), key=key)[0][1]  # type: ignore[no-any-return]

        key = fcg.random.fold_in(state.key, state.step)
        loss, grads = fcg.value_and_grad(loss_fn)(state.params, key)
        grads = fcg.tree.map(lambda g: g / (1 + fcg.optim.global_norm(grads)), grads)
        return state.apply_gradients(grads), {"loss": loss}

    return (
        train_step,
        state,
        lambda n: torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(n)),
    )


def classifier() -> tuple[Any, Any, Callable[[int], Any]]:
    torch.manual_seed(0)
    apply, params, buffers = fcg.from_module(conv_net())
    state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=fcg.optim.sgd(0.1, momentum=0.9))

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> Any:
            out, buffers = apply(p, state.buffers, batch["x"], key=fcg.random.key(0))
            return F.cross_entropy(out, batch["y"]), buffers

        (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, buffers=buffers), {"loss": loss}

    return train_step, state, lambda n: {"x": torch.ones(4, 3, 8, 8) * n, "y": torch.arange(4)}


CASES = {"transformer": language_model, "conv net": classifier}
in_each_case = pytest.mark.parametrize("case", CASES)


@cache
def of_case(case: str) -> tuple[Profile, Any]:
    """The profile of a case, and what it was lowered to."""
    fn, state, batch = CASES[case]()
    step = fcg.graph_step(fn, lowering="aten")
    return step.profile(state, batch(0)), step.lower(state, batch(0))


def rows_of(profile: Profile) -> Iterator[Sequence[ProfileRow]]:
    yield from (profile.by_module(depth, fold=fold) for depth in (None, 1, 2) for fold in (True, False))
    yield profile.by_line()


# --- sums --------------------------------------------------------------------------------------------------


@in_each_case
def test_every_call_is_in_one_row_and_the_rows_add_up(case: str) -> None:
    profile, lowered = of_case(case)
    schedule = lowered.plan.schedule
    assert [one.op for one in profile.calls if one.module != "(copies)"] == [
        instr.name for instr in (*schedule.head, *schedule.fused)
    ]
    for rows in rows_of(profile):
        assert len({row.name for row in rows}) == len(rows)
        assert sum(row.calls for row in rows) == len(profile.calls)
        assert math.isclose(math.fsum(row.seconds for row in rows), profile.seconds)
        assert sum(row.nbytes for row in rows) == sum(one.nbytes for one in profile.calls)
        assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    assert profile.nbytes == lowered.memory_analysis()["peak"]
    assert all(one.seconds >= 0 for one in profile.calls)
    assert profile.seconds > 0
    assert profile.call_s > 0


@in_each_case
def test_rows_are_those_of_the_modules(case: str) -> None:
    profile, _ = of_case(case)
    unfolded = {row.name: row for row in profile.by_module(fold=False)}
    expected = {
        "transformer": {"GPT.transformer.wte", "GPT.transformer.h.1.attn.c_attn", "GPT.lm_head", "GPT"},
        "conv net": {"Sequential.0", "Sequential.1", "Sequential.5"},
    }[case]
    assert expected < unfolded.keys()
    for name in expected:
        assert unfolded[name].forward_s > 0
        assert unfolded[name].backward_s > 0
        assert unfolded[name].update_s == 0
    assert unfolded["(optimizer)"].update_s == unfolded["(optimizer)"].seconds > 0
    assert {row.name for row in profile.by_module(1)} > {next(iter(expected)).partition(".")[0]}


def test_blocks_that_are_alike_share_rows() -> None:
    profile, _ = of_case("transformer")
    one, both = ({row.name: row for row in profile.by_module(fold=fold)} for fold in (False, True))
    name = "GPT.transformer.h.{}.attn.c_proj"
    apart = [one[name.format(number)] for number in (0, 1)]
    together = both[name.format("0-1")]
    assert together.calls == sum(row.calls for row in apart)
    assert math.isclose(together.seconds, math.fsum(row.seconds for row in apart))


def test_a_slow_layer_is_seen_as_slow() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.thin, self.wide, self.last = nn.Linear(64, 64), nn.Linear(64, 4096), nn.Linear(4096, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.wide(self.thin(x)))  # type: ignore[no-any-return]

    apply, params, _ = fcg.from_module(Net())
    step = fcg.graph_step(
        lambda p, x: (p, {"g": fcg.grad(lambda p: apply(p, {}, x)[0].sum())(p)["wide.weight"].sum()}),
        lowering="aten",
    )
    start = time.perf_counter()
    profile = step.profile(params, torch.randn(512, 64))
    assert max(profile.seconds, profile.call_s) < time.perf_counter() - start
    # Whatever else runs here may hold up any one of them: the least times are their own.
    profiles = [profile, *(step.profile(params, torch.randn(512, 64)) for _ in range(7))]

    def least(rows: Callable[[Any], Any], name: Callable[[Any], str]) -> dict[str, float]:
        times: dict[str, float] = {}
        for row in (row for one in profiles for row in rows(one)):
            times[name(row)] = min(row.seconds, times.get(name(row), row.seconds))
        return times

    modules = least(lambda one: one.by_module(), lambda row: row.name)
    assert max(modules["Net.wide"], modules["Net.last"]) > 5 * modules["Net.thin"]
    lines = least(lambda one: one.by_line(), lambda row: row.source)
    assert "self.wide" in max(lines, key=lines.__getitem__)
    # the result of `wide`, or its gradient, is the largest value by far
    largest = max(profile.by_module(), key=lambda row: row.nbytes)
    assert largest.name in ("Net.wide", "Net.last")
    assert largest.nbytes >= 512 * 4096 * 4


def test_a_function_of_a_dict_has_rows_by_function() -> None:
    def layer(p: Any, x: Tensor) -> Tensor:
        return (x @ p["w"]).tanh()

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return layer(p, layer(p, x)).square().mean()

    def train_step(state: Any, x: Tensor) -> Any:
        grads = fcg.grad(loss_fn)(state, x)
        return {"w": state["w"] - grads["w"]}, {}

    profile = fcg.graph_step(train_step).profile({"w": torch.ones(3, 3)}, torch.ones(2, 3))
    rows = {row.name: row for row in profile.by_module()}
    assert rows.keys() == {"layer()", "loss_fn()", "train_step()", "(copies)"}
    assert rows["layer()"].backward_s > 0
    assert rows["train_step()"].update_s > 0
    assert all(row.name.startswith(("test_profile.py:", "(copies)")) for row in profile.by_line())


def test_what_a_remat_computes_again_is_backward() -> None:
    def loss_fn(wrap: Any, p: Any, x: Tensor) -> Tensor:
        return wrap(lambda p, x: (x @ p["w"]).exp())(p, x).sum()  # type: ignore[no-any-return]

    def profile(wrap: Any) -> Profile:
        step = fcg.graph_step(lambda s, x: (s, {"g": fcg.grad(partial(loss_fn, wrap))(s, x)["w"]}))
        return step.profile({"w": torch.ones(3, 3)}, torch.ones(2, 3))

    def products(found: Profile) -> list[str]:
        return [one.phase for one in found.calls if one.op == "mm"]

    assert products(profile(lambda fn: fn)) == ["forward", "backward"]
    assert products(profile(fcg.remat)) == ["forward", "backward", "backward"]


# --- the state ---------------------------------------------------------------------------------------------


@in_each_case
def test_a_profile_leaves_the_state_and_the_step_as_they_were(case: str) -> None:
    fn, state, batch = CASES[case]()
    step, twin = fcg.graph_step(fn), fcg.fork(state)
    plain = fcg.graph_step(fn)
    for n in range(3):
        before = fcg.snapshot(state)
        step.profile(state, batch(n))  # the first one before any call: it lowers
        assert_trees_all_equal(fcg.snapshot(state), before)
        state, metrics = step(state, batch(n + 10))
        twin, expected = plain(twin, batch(n + 10))
        assert_trees_all_equal((fcg.snapshot(state), metrics), (fcg.snapshot(twin), expected))
    assert (step.stats.traces, step.stats.captures, step.stats.replays) == (1, 1, 3)


def test_inputs_and_constants_stay_as_they_were() -> None:
    table = torch.zeros(3)

    def train_step(state: Any, x: Tensor) -> Any:
        drawn = torch.tensor([1.0, 2.0, 3.0])
        drawn.add_(x)  # a literal that each run writes anew
        return {"w": state["w"] + drawn + table}, {"sum": drawn.sum()}

    step, x = fcg.graph_step(train_step, constants=(table,)), torch.ones(3)
    state = fcg.place({"w": torch.zeros(3)})
    profile = step.profile(state, x)
    assert "clone" in {one.op for one in profile.calls}
    state, metrics = step(state, x)
    assert metrics["sum"] == 9.0
    assert torch.equal(x, torch.ones(3))
    assert state["w"].tolist() == [2.0, 3.0, 4.0]


def test_a_profile_prints_and_taps_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def train_step(state: Any, x: Tensor) -> Any:
        fcg.debug_print("x {}", x)
        fcg.tap("x", x)
        return {"w": state["w"] + x}, {}

    step = fcg.graph_step(train_step)
    state: Any = fcg.place({"w": torch.zeros(2)})
    step.profile(state, torch.ones(2))
    assert capsys.readouterr().out == ""
    state, _ = step(state, torch.ones(2) * 2)
    assert torch.equal(step.taps["x"], torch.ones(2) * 2)


def test_mistakes_raise_what_a_call_raises() -> None:
    fn, state, batch = classifier()
    step = fcg.graph_step(fn)
    old = state
    state, metrics = step(state, batch(0))
    with pytest.raises(fcg.DonatedStateError, match="donated to `train_step`"):
        step.profile(old, batch(0))
    with pytest.raises(fcg.LayoutError, match="called with another layout"):
        step.profile(state, fcg.tree.map(lambda leaf: leaf[:2], batch(0)))
    with pytest.raises(fcg.LayoutError, match="a pair of a state and metrics"):
        step.profile((state, metrics), batch(0))
    with pytest.raises(fcg.HostSyncError):
        fcg.graph_step(lambda s: (s, {"w": s["w"].sum().item()})).profile({"w": torch.ones(2)})
    state, _ = step(state, batch(1))  # none of them did it harm
    step.close()
    with pytest.raises(fcg.ClosedError):
        step.profile(state, batch(0))


def test_a_value_of_the_host_that_has_moved_is_refused() -> None:
    settings = SimpleNamespace(rate=0.1)
    step = fcg.graph_step(lambda s: ({"w": s["w"] * settings.rate}, {}))
    state, _ = step(fcg.place({"w": torch.ones(2)}))
    settings.rate = 0.2
    with pytest.raises(fcg.BakedValueError, match="rate"):
        step.profile(state)


def test_arguments_as_in_a_call() -> None:
    def scaled(state: Any, x: Tensor, *, power: int, y: Tensor) -> Any:
        return {"w": state["w"] + x**power + y}, {}

    step = fcg.graph_step(scaled, static_argnames=("power",))
    profile = step.profile({"w": torch.ones(2)}, torch.ones(2), power=3, y=torch.ones(2))
    assert {"pow", "add"} <= {one.op for one in profile.calls}
    several = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {}), steps_per_call=3)
    found = several.profile({"w": torch.ones(2)}, torch.ones(3, 2))
    assert sum(one.op == "add" for one in found.calls) == 3


def test_a_function_that_borrows_is_all_forward() -> None:
    apply, params, buffers = fcg.from_module(conv_net())
    state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=fcg.optim.sgd(0.1))
    evaluate = fcg.graph_fn(lambda state, x: apply(state.params, state.buffers, x, train=False)[0])
    with torch.inference_mode():
        profile = evaluate.profile(state, torch.ones(4, 3, 8, 8))
    rows = {row.name: row for row in profile.by_module()}
    assert all(row.seconds == row.forward_s for row in rows.values() if row.name != "(copies)")
    assert rows["Sequential.0"].seconds > 0
    assert evaluate(state, torch.ones(4, 3, 8, 8)).shape == (4, 5)


def test_methods_have_profiles() -> None:
    class Trainer:
        @fcg.graph_step
        def train_step(self, state: Any, x: Tensor) -> Any:
            return {"w": state["w"] + x}, {}

    profile = Trainer().train_step.profile({"w": torch.ones(2)}, torch.ones(2))
    assert profile.function == "train_step"


# --- on several ranks --------------------------------------------------------------------------------------


def profiles_of_ranks(device: str) -> Any:
    zero = Setting({"data": 2}, 3, timeout=8.0).zero(device)
    step, state = fcg.graph_step(mlp_step, lowering="aten"), mlp_state()(zero, device)
    rank = zero.mesh.rank
    profile = step.profile(state, mlp_batch(0, rank))
    said = ""
    try:
        if rank == 0:
            step.profile(state, mlp_batch(0, rank))
        else:
            step(state, mlp_batch(0, rank))
    except fcg.RankError as error:
        said = str(error)
    rows = profile.by_module()
    return sum(row.calls for row in rows) == len(profile.calls), profile.seconds > 0, said


def test_all_ranks_profile_together() -> None:
    for adds_up, timed, said in on_ranks(2, profiles_of_ranks, "cpu"):
        assert adds_up
        assert timed
        assert "profile `" in said


# --- a compiled step ---------------------------------------------------------------------------------------


def test_a_compiled_step_says_that_rows_are_not_of_its_kernels() -> None:
    fn, state, batch = classifier()
    step = fcg.graph_step(fn, lowering=lambda graph, inputs: graph)
    profile = step.profile(state, batch(0))
    assert profile.compiled
    assert "not compiled" in str(profile)
    assert "not compiled" not in str(fcg.graph_step(fn, lowering="aten").profile(state, batch(0)))
    for rows in rows_of(profile):
        assert sum(row.calls for row in rows) == len(profile.calls)
    assert profile.nbytes == step.lower(state, batch(0)).memory_analysis()["peak"]
    state, _ = step(state, batch(1))
    assert step.stats.traces == 1


# --- a compiled step on a GPU ------------------------------------------------------------------------------


GENERATED = """
class Runner:
    def call(self, args):
        buf0 = empty((2, 2))
        # Topologically Sorted Source Nodes: [mm_default], Original ATen: [aten.mm]
        extern_kernels.mm(args[0], args[1], out=buf0)
        # Topologically Sorted Source Nodes: [gelu_default, sum_default], Original ATen: [aten.gelu, aten.sum]
        stream0 = get_raw_stream(0)
        triton_red_fused_gelu_sum_0.run(buf0, 4, stream=stream0)
        del buf0
        triton_poi_fused_1.run(4)
        # Topologically Sorted Source Nodes: [norm_default, cast_default], Original ATen: [aten.norm]
        triton_per_fused_norm_2.run(workspace_0, 4)
        buf1 = workspace_0[0 * 4 : (0 + 1) * 4].view(2, 2).sum(dim=0)
        return (args[0],)
"""


def test_lines_that_launch_have_the_nodes_of_the_comment_above_them(tmp_path: Path) -> None:
    path = tmp_path / "generated.py"
    path.write_text(GENERATED, encoding="utf-8")
    kernel = SimpleNamespace(run=lambda *args, stream=0: None)
    names: dict[str, Any] = {
        "empty": torch.empty,
        "get_raw_stream": lambda device: device,
        "extern_kernels": torch,
        "triton_red_fused_gelu_sum_0": kernel,
        "triton_poi_fused_1": kernel,
        "triton_per_fused_norm_2": kernel,
        "workspace_0": torch.ones(4),
    }
    exec(compile(GENERATED, str(path), "exec"), names)
    clock = Clock()
    with lines_told(clock):
        names["Runner"]().call([torch.ones(2, 2), torch.ones(2, 2)])
    assert clock.parts[-1] is None
    numbers = [line[1] for line in clock.parts[:-1]]
    assert numbers == [4, 6, 8, 9, 10, 11, 13, 14, 15]
    found = launched_in(str(path))
    assert {number: found[number] for number in (6, 9, 11, 13, 14)} == {
        6: ("extern_kernels.mm", ("mm_default",)),
        9: ("triton_red_fused_gelu_sum_0", ("gelu_default", "sum_default")),
        11: ("triton_poi_fused_1", ()),  # its comment is missing: it is not that of another kernel
        13: ("triton_per_fused_norm_2", ("norm_default", "cast_default")),
        14: ("workspace.sum", ("norm_default", "cast_default")),  # of what that kernel has left
    }


def test_a_trace_function_of_someone_else_is_put_back() -> None:
    before = sys.gettrace()
    with pytest.raises(RuntimeError, match="broken"), lines_told(Clock()):
        raise RuntimeError("broken")
    assert sys.gettrace() is before


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11
def test_the_source_that_this_torch_generates_has_the_nodes_in_comments() -> None:
    graph = torch.fx.Graph()
    x, w = (graph.placeholder(name) for name in "xw")
    first = graph.call_function(torch.ops.aten.mm.default, (x, w))
    graph.output((graph.call_function(torch.ops.aten.mm.default, (first, w)),))
    arguments = [torch.ones(4, 4), torch.ones(4, 4)]
    module = torch.fx.GraphModule(nn.Module(), graph)
    with torch.no_grad():
        compiled = compile_graph(module, arguments, on_host=True, small=False, in_order=False)
        compiled(*arguments)
        clock = DeviceClock()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            with lines_told(clock):
                compiled(*arguments)
            clock(None)
    lines = [(number, line) for number, line in enumerate(clock.parts) if line is not None]
    ranges = [event.name for event in profiler.events() or () if event.name.startswith("functional_cg ")]
    assert ranges == [f"functional_cg {number}" for number, _ in lines]
    launched = [launched_in(file)[number] for _, (file, number) in lines]
    products = [one for one in launched if one[0].startswith("extern_kernels")]
    assert products == [("extern_kernels.mm", ("mm_default",)), ("extern_kernels.mm", ("mm_default_1",))]


@pytest.mark.kernels
@thorough
@pytest.mark.parametrize("compiled_on", COMPILED[1:], indirect=True)
def test_kernels_of_a_compiled_step_are_joined_with_its_calls(
    compiled_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host, too, inductor names what it calls of other libraries; its own kernels there have no names."""
    monkeypatch.setenv("FCG_PROFILE_KERNELS", "1")
    apply, params, _ = fcg.from_module(
        nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(compiled_on)
    )

    def train_step(params: Any, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: apply(p, {}, x)[0].square().mean())(params)
        return fcg.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

    step, state = fcg.graph_step(train_step, lowering="inductor"), fcg.place(params)
    x = torch.randn(32, 8, device=compiled_on)
    before = fcg.snapshot(state)
    profile = step.profile(state, x)
    assert_trees_all_equal(fcg.snapshot(state), before)
    for rows in rows_of(profile):
        assert sum(row.calls for row in rows) == len(profile.calls)
        assert math.isclose(math.fsum(row.seconds for row in rows), profile.seconds)
    assert math.isclose(
        math.fsum(row.seconds for row in profile.by_kernel()), sum(k.seconds for k in profile.kernels)
    )
    products = [one for one in profile.kernels if one.name in ("extern_kernels.mm", "extern_kernels.addmm")]
    assert all(call.op in ("mm", "addmm") for one in products for call in one.calls)
    where = {(call.module, call.phase) for one in products for call in one.calls}
    assert where == {(f"Sequential.{n}", phase) for n in (0, 2) for phase in ("forward", "backward")}
    assert "It is compiled: its" in str(profile)
    if compiled_on == "cuda":
        lost = [one.seconds for one in profile.kernels if any(call.line == "(unknown)" for call in one.calls)]
        assert math.fsum(lost) < 0.05 * profile.seconds


class _Event(SimpleNamespace):
    """An event of torch's profiler."""


def test_the_time_of_a_range_is_what_the_device_does_in_it() -> None:
    host, device = SimpleNamespace(name="CPU"), SimpleNamespace(name="CUDA")
    events = [
        _Event(name="functional_cg 0", device_type=host, device_time_total=2.0),
        _Event(name="aten::mm", device_type=host, device_time_total=2.0),  # a part of the range
        _Event(name="functional_cg 0", device_type=device, device_time_total=9.0),  # the range, on the device
        _Event(name="functional_cg 1", device_type=host, device_time_total=0.0),
        _Event(name="functional_cg 0", device_type=host, device_time_total=4.0),  # the next run
    ]
    assert device_seconds(events) == {0: pytest.approx(6e-6), 1: 0.0}


def test_the_events_of_this_torch_have_what_is_read_of_them() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for number in range(2):
            with torch.profiler.record_function(f"functional_cg {number}"):
                torch.ones(3).sum()
    assert device_seconds(profiler.events() or ()) == {0: 0.0, 1: 0.0}


# --- names of blocks ---------------------------------------------------------------------------------------

PATHS = st.lists(st.sampled_from(["a", "b", "0", "1", "2", "10"]), min_size=1, max_size=4).map(".".join)


@given(st.sets(PATHS))
def test_folding_joins_only_what_differs_by_numbers(paths: set[str]) -> None:
    names = folded(paths)
    assert names.keys() == paths
    for path, name in names.items():
        parts, found = path.split("."), name.split(".")
        assert len(parts) == len(found)
        for one, other in zip(parts, found, strict=True):
            assert one == other or (one.isdecimal() and other.replace("-", "").replace(",", "").isdecimal())


def test_folding_by_example() -> None:
    block = ["", ".fc", ".act"]
    paths = {f"h.{number}{part}" for number in (0, 1, 2, 3, 5) for part in block}
    assert {folded(paths | {"h.4", "head"})[path] for path in paths} == {f"h.0-3,5{part}" for part in block}
    layers = {"Sequential.0", "Sequential.1", "Sequential.10"}
    assert folded(layers) == {layer: layer for layer in layers}
    twice = {f"stage.{i}.block.{j}.{part}" for i in (0, 1) for j in (0, 1) for part in ("conv", "norm")}
    assert set(folded(twice).values()) == {"stage.0-1.block.0-1.conv", "stage.0-1.block.0-1.norm"}


# --- what it looks like ------------------------------------------------------------------------------------


def made(*times: tuple[str, float, int], compiled: bool = False) -> Profile:
    calls = [
        ProfiledCall("mm", name, "model.py:3", "x @ w", "forward", s, nbytes) for name, s, nbytes in times
    ]
    return Profile("train_step", "cpu", compiled, 0.01, tuple(calls), {"state": 2 * MEBI})


def test_the_text_of_a_profile() -> None:
    text = str(made(("Net.a", 0.003, MEBI), ("Net.b", 0.001, 0)))
    assert text.splitlines() == [
        "train_step on cpu: 10.000 ms a call, 3.00 MiB at the peak",
        "Its 2 calls take 4.000 ms, run one by one; the rows below add up to it.",
        "",
        "  by module  calls  forward  backward  update     ms     %  peak MiB",
        "  Net.a          1    3.000                    3.000  75.0      1.00",
        "  Net.b          1    1.000                    1.000  25.0",
        "",
        "  by line            calls  forward  backward  update     ms      %  peak MiB",
        "  model.py:3  x @ w      2    4.000                    4.000  100.0      1.00",
        "",
        "MiB at the peak: state 2.00, results of calls, by the names above 1.00",
    ]
    assert repr(made()) == str(made())


def test_a_long_table_is_cut_and_its_rest_summed_up() -> None:
    profile = made(*((f"Net.part{i}", 1e-3 * (50 - i), 1) for i in range(50)))
    text = profile.table(rows=10)
    assert "… and 40 more" in text
    assert "820.000" in text  # 1 + ... + 40 ms
    assert len(str(profile).splitlines()) < 50
    for wrong in (0, -1, 1.5, True, None):
        with pytest.raises(ValueError, match="rows must be a positive int"):
            profile.table(wrong)  # type: ignore[arg-type]
        if wrong is not None:
            with pytest.raises(ValueError, match="depth must be None or a positive int"):
                profile.by_module(wrong)  # type: ignore[arg-type]


def test_a_long_name_keeps_its_end() -> None:
    name = "SomeVeryLongModelForCausalLanguageModeling.transformer.layers.17.self_attention.query"
    assert "…layers.17.self_attention.query" in str(made((name, 0.1, 0)))


def test_files_of_one_name_are_told_apart(tmp_path: Any) -> None:
    found = []
    for folder in ("ours", "theirs"):
        path = tmp_path / folder / "layers.py"
        path.parent.mkdir()
        path.write_text("def f(x):\n    return x.exp()\n", encoding="utf-8")
        names: dict[str, Any] = {}
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
        found.append(names["f"])
    step = fcg.graph_step(lambda s: ({"w": found[1](found[0](s["w"]))}, {}))
    rows = {row.name: row.source for row in step.profile({"w": torch.ones(2)}).by_line()}
    assert rows["ours/layers.py:2"] == rows["theirs/layers.py:2"] == "return x.exp()"


def test_a_profile_in_a_notebook() -> None:
    page = html(made(("Net.<a>", 0.003, MEBI), ("Net.b", 0.001, 0)))
    for part in ("train_step on cpu", "Net.<a>", "3.000", "75.0", "1.00", "by line", "x @ w", " backward "):
        assert part in page.text
    assert "script" not in page.tags
    many = made(*((f"Net.part{i}", 1e-3, 1) for i in range(500)))
    assert len(many._repr_html_()) < 30_000


def test_the_pictures_show_what_the_rows_say() -> None:
    profile, _ = of_case("transformer")
    ax = report.profile(profile, rows=5)
    assert ax.get_xlabel() == "ms"
    assert len(ax.get_yticklabels()) == 6
    assert ax.get_yticklabels()[-1].get_text().startswith("… and")
    widths = math.fsum(bar.get_width() for bar in ax.patches)
    assert math.isclose(widths, 1e3 * profile.seconds)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["forward", "backward", "update"]
    ax = report.profile(profile, what="memory", rows=5)
    assert ax.get_xlabel() == "MiB"
    assert math.isclose(math.fsum(bar.get_width() for bar in ax.patches) * MEBI, profile.nbytes)
    assert report.profile(profile, by="line", depth=1).get_title().endswith("by line")
    assert report.profile(made(("Net.a", 0.1, 0), compiled=True)).get_title().count("compiled")
    assert report.profile(made()).get_title()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"what": "bytes"}, "what must be 'time' or 'memory'"),
        ({"by": "op"}, "by must be"),
        ({"rows": 0}, "rows must be"),
    ],
)
def test_pictures_refuse_what_they_do_not_know(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        report.profile(made(), **given)
    with pytest.raises(TypeError, match=r"report.profile\(step.profile\(state, batch\)\)"):
        report.profile(fcg.graph_step(lambda s: (s, {})))  # type: ignore[arg-type]


# --- ranges of NVTX ----------------------------------------------------------------------------------------


def test_replays_are_named_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("end"))

    def replay(before: Any) -> Any:
        said.append("replay")
        if before:
            raise RuntimeError("broken")
        return ()

    monkeypatch.delenv("FCG_NVTX", raising=False)
    assert in_a_range(replay, "train_step") is replay
    monkeypatch.setenv("FCG_NVTX", "1")
    named = in_a_range(replay, "train_step")
    named(())
    with pytest.raises(RuntimeError, match="broken"):
        named((len,))
    assert said == ["train_step", "replay", "end"] * 2
