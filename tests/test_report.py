"""What states and steps look like: text, HTML, ``explain`` and plots. Nothing but a leaf's own repr reads values."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import functional_cg as fcg
from functional_cg import report
from functional_cg.state.outline import TEXT_LINES, columns, outline, segments
from functional_cg.testing import assert_trees_all_equal
from functional_cg.testing.strategies import pytrees
from tests.shares import share

from .small_step import a_state, data, train

mpl.use("Agg")

VOID = {"br", "hr", "img"}


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    yield
    mpl.pyplot.close("all")


class Reader(HTMLParser):
    """Reads HTML: refuses what is not balanced, keeps tags and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.opened == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "onclick", "id", "class"}
        self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


class Ops(TorchDispatchMode):
    """Counts the ops of a block, and the bytes that it copies."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.seen.append(name)
        targets = {"aten::copy_": args[:1], "aten::clone": args[:1], "aten::_foreach_copy_": args and args[0]}
        self.copied += sum(t.numel() * t.itemsize for t in targets.get(name, ()))
        return func(*args, **(kwargs or {}))


def html(value: Any) -> Reader:
    return Reader(value._repr_html_())


def trained() -> Any:
    return fcg.TrainState.create(
        params={"w": torch.zeros(2, 3), "b": torch.zeros(3)},
        optimizer=fcg.optim.adam(1e-3),
        key=fcg.random.key(0),
    )


def gpt(layers: int = 12) -> Any:
    params = {f"h.{i}.{name}": torch.zeros(4, 4) for i in range(layers) for name in "abcdefghijkl"}
    return fcg.TrainState.create(params=params, optimizer=fcg.optim.adam(1e-3))


def wide(count: int = 10_000) -> Any:
    return fcg.place([torch.zeros(3) for _ in range(count)])


def nested() -> Any:
    return fcg.place({f"a{i}": {f"b{j}": torch.zeros(2) for j in range(100)} for i in range(100)})


# --- text of a handle --------------------------------------------------------------------------------------


def test_text_of_a_small_state_has_one_line_per_leaf() -> None:
    assert repr(trained()).splitlines() == [
        "state: TrainState, generation 0, on cpu, 9 leaves, 140 B",
        "  state.step                  i64[]      8 B",
        "  state.params['b']           f32[3]    12 B",
        "  state.params['w']           f32[2,3]  24 B",
        "  state.opt_state[0].count    i64[]      8 B",
        "  state.opt_state[0].mu['b']  f32[3]    12 B",
        "  state.opt_state[0].mu['w']  f32[2,3]  24 B",
        "  state.opt_state[0].nu['b']  f32[3]    12 B",
        "  state.opt_state[0].nu['w']  f32[2,3]  24 B",
        "  state.key                   i64[2]    16 B",
    ]


def test_text_of_a_large_state_folds_subtrees() -> None:
    assert repr(gpt()).splitlines() == [
        "state: TrainState, generation 0, on cpu, 434 leaves, 0.03 MiB",
        "  state.step                i64[]               8 B",
        "  state.params              144 leaves f32  9,216 B",
        "  state.opt_state[0].count  i64[]               8 B",
        "  state.opt_state[0].mu     144 leaves f32  9,216 B",
        "  state.opt_state[0].nu     144 leaves f32  9,216 B",
    ]


@pytest.mark.parametrize("make", [wide, nested, gpt])
def test_text_is_bounded(make: Callable[[], Any]) -> None:
    text = repr(make())
    assert len(text.splitlines()) <= TEXT_LINES + 2
    assert max(map(len, text.splitlines())) < 140


def test_the_end_of_a_wide_state_is_counted() -> None:
    assert repr(wide()).splitlines()[-1].split() == [*"… and 9,940 more 9,940 leaves f32 0.11 MiB".split()]


@given(pytrees())
def test_the_shown_lines_sum_up_to_the_state(nest: Any) -> None:
    state = fcg.place(nest)
    entries = state._entries()
    for limits in ({}, {"lines": 3, "widest": 2}, {"lines": 3, "widest": 2, "cut": True}):
        root = outline(state._node, entries, "state", **limits)
        assert sum(end.nbytes for end in root.ends()) == root.nbytes == sum(e.spec.nbytes for e in entries)
    Reader(state._repr_html_())


def test_long_keys_are_clipped() -> None:
    state = fcg.place({"x" * 1000 + "end": torch.ones(1)})
    assert len(repr(state).splitlines()[1]) < 120
    assert "end']" in repr(state)


def test_text_of_a_donated_state_says_when_and_by_whom() -> None:
    step, state = fcg.graph_step(train), a_state()
    first, part = state, state["w"]
    for n in range(3):
        state, _ = step(state, data(n))
    assert repr(first).splitlines()[0] == (
        "state: dict, generation 0, donated to `train` (its buffers now hold generation 3), on cpu, 2 leaves, 20 B"
    )
    assert "donated to `train` (its buffers now hold generation 3)" in html(first).text
    assert repr(part) == "state['w']  f32[3]@cpu  generation 0, donated to `train`"
    assert "donated to `train`" in html(part).text
    other = trained()
    params, _ = other.params, other.replace(step=1)
    assert "state.params: dict, generation 0, donated to `replace`" in repr(params)


# --- nothing waits -----------------------------------------------------------------------------------------


def test_reprs_run_no_op_and_touch_no_memory() -> None:
    step, state = fcg.graph_step(train), a_state()
    old = state
    lowered = step.lower(state, data(0))
    captured = lowered.capture()
    state, _ = step(state, data(0))
    state._lease.arena.slots = ()
    with Ops() as ops:
        for value in (state, old, step, lowered):
            assert repr(value)
            assert value._repr_html_()
        assert repr(captured)
        assert str(lowered)
        assert step.explain()
    assert ops.seen == []


def test_bars_leave_room_for_their_sizes() -> None:
    report = pytest.importorskip("functional_cg.report", exc_type=ImportError)
    state = fcg.TrainState.create(params={"w": torch.zeros(256, 256)}, optimizer=fcg.optim.adam(1e-3))
    ax = report.bytes_by_role(state)
    assert max(bar.get_x() + bar.get_width() for bar in ax.patches) < 0.8 * ax.get_xlim()[1]


def test_a_leaf_in_a_notebook_is_summed_up() -> None:
    state: Any = fcg.place({"w": torch.tensor([1.0, 3.0, float("inf")]), "n": 3, "z": torch.zeros(0)})
    shown = html(state["w"]).texts
    assert shown[0] == "state['w']  f32[3]@cpu  generation 0"
    pairs = dict(zip(shown[1::2], shown[2::2], strict=True))
    assert pairs == {
        "min": "1", "max": "3", "mean": "2", "std": "1.41421", "not finite": "1 of 3", "first": "1, 3, inf",
    }  # fmt: skip
    assert html(state["n"]).texts[-2:] == ["first", "3"]
    assert html(state["z"])
    leaf = state["w"]
    state.replace(n=4)
    with Ops() as ops:
        assert html(leaf).texts == ["state['w']  f32[3]@cpu  generation 0, donated to `replace`"]
    assert ops.seen == []


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint8]
)
def test_leaves_of_every_kind_can_be_shown(dtype: torch.dtype) -> None:
    state: Any = fcg.place({"x": torch.ones(9).to(dtype)})
    assert "first" in html(state["x"]).texts


# --- HTML --------------------------------------------------------------------------------------------------


def test_html_of_a_state_has_a_tree_and_its_arena() -> None:
    page = html(trained())
    for part in ("state.params['w']", "f32[2,3]", "24 B", "opt_state", "f32 on cpu", "of it padding"):
        assert part in page.text
    assert page.tags.count("svg") == 1
    assert "script" not in page.tags
    assert "padding  8 B" in page.texts
    assert "where it lies in memory" in page.texts
    assert "where it lies in memory" not in html(trained().params).texts


class Columns(Reader):
    """Finds where the columns after the first one begin, in characters from the left."""

    def __init__(self, text: str) -> None:
        self.indents: list[int] = []
        self.starts: list[int] = []
        super().__init__(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        style = dict(attrs).get("style") or ""
        self.indents.append(sum(map(int, re.findall(r"margin-left:(\d+)ch", style))))
        if first := re.search(r"grid-template-columns:(\d+)ch", style):
            self.starts.append(sum(self.indents) + int(first[1]))

    def handle_endtag(self, tag: str) -> None:
        super().handle_endtag(tag)
        self.indents.pop()


@settings(max_examples=30)
@given(pytrees())
def test_lines_of_a_tree_share_their_columns_however_deep_they_are(nest: Any) -> None:
    state = fcg.place({"a": nest, "n": {"m": {"o": 1}}})
    page = Columns(state._repr_html_())
    assert len(page.starts) >= 3
    assert len(set(page.starts)) == 1
    paths = [text for text in page.texts if text.startswith("state[") and "  " not in text]
    assert max(map(len, paths)) <= page.starts[0]


def test_titles_stand_over_their_numbers() -> None:
    lines = columns([("kind", "calls"), ("matmul", "12,000"), ("copy", "")])
    assert lines == ["  kind     calls", "  matmul  12,000", "  copy"]


def test_costs_and_memory_in_a_notebook() -> None:
    lowered = fcg.graph_step(train).lower(a_state(), data(0))
    costs, memory = html(lowered.cost_analysis()), html(lowered.memory_analysis())
    assert {"kind of call", "(copies)", "read and written"} <= set(costs.texts)
    assert any(text.startswith("(copies) of inputs in") for text in costs.texts)
    assert {"state", "inputs", "temporaries at the peak"} <= set(memory.texts)


def test_keys_are_escaped() -> None:
    state: Any = fcg.place({"<script>alert('&')</script>": {"<b>": torch.ones(2)}})
    step = fcg.graph_fn(lambda state: state["<script>alert('&')</script>"]["<b>"] * 2)
    step(state)
    for value in (state, step, step.lower(state), state["<script>alert('&')</script>"]["<b>"]):
        page = html(value)
        assert not {"script", "b"} & set(page.tags)
        assert "<b>" in page.text


@pytest.mark.parametrize("make", share([wide, nested, gpt], 2))
def test_html_is_bounded(make: Callable[[], Any]) -> None:
    state = make()
    step = fcg.graph_step(lambda state: (state, {}))
    lowered = step.lower(state)
    for value in (state, lowered, step):
        page = html(value)
        assert sum(map(len, page.texts)) < 60_000
        assert len(value._repr_html_()) < 150_000
    assert len(step.explain()) < 15_000


def test_the_end_of_a_wide_page_is_counted() -> None:
    assert "… and 9,936 more" in html(wide()).texts


def test_notebooks_show_donated_handles_too() -> None:
    formatter = pytest.importorskip("IPython.core.formatters").HTMLFormatter()
    state = a_state()
    state.replace(n=1)
    assert "donated to `replace`" in formatter(state)
    assert "f32[3]" in formatter(state.latest()["w"])


@given(pytrees())
def test_a_strip_covers_the_arena_without_gaps(nest: Any) -> None:
    lease = fcg.place(nest)._lease  # type: ignore[attr-defined]
    end = 0
    for segment in segments(lease.arena.plan, lease.paths):
        assert segment.start == end
        assert segment.size > 0
        end += segment.size
    assert end == lease.arena.plan.nbytes


def test_a_strip_of_many_slots_is_short() -> None:
    lease = wide()._lease
    found = segments(lease.arena.plan, lease.paths)
    assert len(found) < 300
    assert sum(segment.size for segment in found) == lease.arena.plan.nbytes
    assert re.fullmatch(r"\d+ neighbours  [\d,.]+ (B|MiB)", found[0].label)


# --- explain -----------------------------------------------------------------------------------------------


def rows(text: str) -> dict[str, tuple[str, int, str]]:
    """Key path -> (spec, bytes copied per call, role), of the table in an explanation."""
    found = re.findall(r"^  (\S+) +(\S+) +[\d,]+ B +([\d,]+) B  ([\w ,]+)$", text, re.MULTILINE)
    return {path: (spec, int(copied), role) for path, spec, copied, role in found}


def test_explain_says_what_each_leaf_costs() -> None:
    table = torch.ones(3)

    def shuffle(state: Any, batch: Any) -> Any:
        new = {
            **state,
            "n": state["n"] + 1,
            "a": state["b"],
            "b": state["a"],
            "w": state["w"] * table + batch["x"],
        }
        return new, {"w": state["w"]}

    state: Any = fcg.place(
        {
            "a": torch.zeros(2),
            "b": torch.ones(2),
            "k": torch.ones(5),
            "n": torch.tensor(0),
            "w": torch.ones(3),
        }
    )
    step = fcg.graph_step(shuffle, constants=(table,))
    batch = {"x": torch.ones(3), "unused": 1.0}
    state, _ = step(state, batch)
    text = step.explain()
    assert rows(text) == {
        "state['a']": ("f32[2]", 16, "moved from another leaf, copied twice"),
        "state['b']": ("f32[2]", 16, "moved from another leaf, copied twice"),
        "state['k']": ("f32[5]", 0, "passed through"),
        "state['n']": ("i64[]", 8, "updated by a copy"),
        "state['w']": ("f32[3]", 12, "updated by a copy"),
        "batch['unused']": ("f32[]", 4, "copied in, never read"),
        "batch['x']": ("f32[3]", 12, "copied in"),
        "constants[0]": ("f32[3]", 0, "constant"),
        "metrics['w']": ("f32[3]", 12, "returned"),
    }
    assert "  copied twice: state['a'] <- state['b'], which the same call overwrites" in text.splitlines()
    assert "  plan: 3 ATen calls; 4 new values copied into the state, 2 of them twice" in text.splitlines()
    assert "  captured on 96 B of memory on cpu, whose state is in generation 1" in text.splitlines()
    captured = step.lower(state, batch).capture()
    with Ops() as ops:  # the judge: what a replay really copies, once its inputs are in place
        captured.replay(())
    copied_in = sum(copied for _, copied, role in rows(text).values() if "copied in" in role)
    assert ops.copied + copied_in == sum(copied for _, copied, _ in rows(text).values())


def test_a_fused_update_copies_nothing() -> None:
    @fcg.graph_step
    def step(state: Any, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: ((x @ p["w"] + p["b"]) ** 2).mean())(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    state, _ = step(trained(), torch.ones(4, 2))
    found = rows(step.explain())
    assert found["state.params['w']"] == ("f32[2,3]", 0, "updated in place")
    assert found["state.opt_state[0].mu['b']"] == ("f32[3]", 0, "updated in place")
    assert found["state.step"] == ("i64[]", 8, "updated by a copy")
    assert "1 of them in place" in repr(step.lower(state, torch.ones(4, 2)))


@pytest.mark.parametrize("make", [fcg.optim.adagrad, fcg.optim.adam, fcg.optim.sgd])
def test_any_fused_update_is_in_place(make: Any) -> None:
    step = fcg.graph_step(lambda state, grads: (state.apply_gradients(grads), {}))
    state = fcg.TrainState.create(params={"w": torch.ones(2, 3)}, optimizer=make(0.1))
    state, _ = step(state, {"w": torch.ones(2, 3)})
    assert rows(step.explain())["state.params['w']"] == ("f32[2,3]", 0, "updated in place")


def test_explain_a_function_that_borrows() -> None:
    step = fcg.graph_fn(lambda state, x: state["w"] * x)
    step(a_state(), 2.0)
    assert rows(step.explain())["state['w']"] == ("f32[3]", 0, "borrowed")


def test_explain_a_compiled_step() -> None:
    step = fcg.graph_step(train, lowering=lambda graph, inputs: graph)
    state, _ = step(a_state(), data(0))
    assert rows(step.explain())["state['w']"] == ("f32[3]", 12, "updated by a copy")
    assert "compiled into one function" in repr(step.lower(state, data(0)))


def test_explain_lists_the_captures() -> None:
    step, state = fcg.graph_step(train), a_state()
    step.lower(state, data(0))
    assert "  not captured yet" in step.explain().splitlines()
    twin = fcg.fork(state)
    state, _ = step(state, data(0))
    twin, _ = step(twin, data(0))
    twin, _ = step(twin, data(1))
    text = step.explain()
    for generation in (1, 2):
        assert (
            f"  captured on 32 B of memory on cpu, whose state is in generation {generation}"
            in text.splitlines()
        )
    page = html(step)
    assert "for batch['x'] f32[2,3]@cpu" in page.texts
    assert "what was checked" in page.texts
    step.close()
    assert repr(step).endswith(", closed>")


def test_explain_lists_each_capture_under_its_layout() -> None:
    step, state = fcg.graph_step(train, max_captures=2), a_state()
    for size in (2, 4):
        state, _ = step(state, {"x": torch.ones(size, 3)})
    first, second = step.explain().split("train is a pure function")[1:]
    for text, shape in ((first, "f32[2,3]"), (second, "f32[4,3]")):
        assert shape in text
        assert text.count("captured on ") == 1


def test_explain_keeps_the_words_of_the_last_refusal() -> None:
    step, state = fcg.graph_step(train), a_state()
    state, _ = step(state, data(0))
    assert "last refusal" not in step.explain()
    with pytest.raises(fcg.LayoutError):
        step(state, {"x": torch.ones(5, 3)})
    text = step.explain()
    assert "last refusal:\n  LayoutError: `train`: called with another layout" in text
    assert "last refusal" in html(step).texts
    with pytest.raises(fcg.HostSyncError):
        fcg.graph_step(lambda s: (s, {"w": s["w"].sum().item()})).lower(state)


def test_a_refusal_keeps_no_tensor() -> None:
    step = fcg.graph_step(lambda s: (s, {"w": s["w"].sum().item()}))
    with pytest.raises(fcg.HostSyncError):
        step.lower(a_state())
    assert "last refusal:\n  HostSyncError: " in step.explain()
    assert type(step._refusal) is str


# --- computed and dropped ----------------------------------------------------------------------------------


def batch_norm(state: Any, x: Tensor) -> Any:
    """As a functional model computes its statistics; the new ones are forgotten."""
    mean = state["mean"].lerp(x.mean(0), 0.1)
    torch.add(state["seen"], 1)
    return {**state, "w": state["w"] - x.sum()}, {"y": (x - x.mean(0)).sum(), "n": mean.shape[0]}


def in_place(state: Any, x: Tensor) -> Any:
    state["mean"].clone().mul_(0.9).add_(x.mean(0))
    return {**state, "w": state["w"] - x.sum()}, {}


def grouped(state: Any, x: Tensor) -> Any:
    torch._foreach_mul([state["w"], state["mean"]], 0.9)
    return {**state, "w": state["w"] - x.sum()}, {}


def from_native(state: Any, x: Tensor) -> Any:
    ones = torch.ones(3)
    out = torch.ops.aten._native_batch_norm_legit_functional(
        x, ones, ones, state["mean"], ones, True, 0.1, 1e-5
    )
    return {**state, "w": state["w"] - out[0].sum()}, {}


def written_by_an_op(state: Any, x: Tensor) -> Any:
    """The op is needed for all of its results, what it writes is not."""
    mean = state["mean"].clone()
    out = torch.ops.aten.native_batch_norm(x, None, None, mean, torch.ones(3), True, 0.1, 1e-5)
    return {**state, "w": state["w"] - sum(result.sum() for result in out)}, {}


@pytest.mark.parametrize(
    ("function", "leaves"),
    [
        (batch_norm, ["mean", "seen"]),
        (in_place, ["mean"]),
        (grouped, ["mean"]),
        (from_native, ["mean"]),
        (written_by_an_op, ["mean"]),
    ],
)
def test_dropped_values_are_named(
    function: Callable[..., Any], leaves: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    step, state = fcg.graph_step(function), statistics()
    for _ in range(2):
        state, _ = step(state, torch.ones(4, 3))
    dropped = step.lower(state, torch.ones(4, 3)).inspection.dropped
    assert [re.fullmatch(r"state\['(\w+)'\] \(test_report.py:\d+\)", text)[1] for text in dropped] == leaves  # type: ignore[index]
    assert [str(one.message) for one in recwarn] == [
        f"`{function.__name__}`: {text}: a new value was computed and dropped; return it in the new state, "
        "or do not compute it."
        for text in dropped
    ]
    assert f"warning: {dropped[0]}: a new value was computed and dropped" in step.explain()
    assert f"new values that were computed and dropped: {', '.join(dropped)}" in step.explain()
    assert any("computed and dropped" in text for text in html(step).texts)


def test_a_table_that_a_module_only_reads_is_no_dropped_value() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("table", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w * self.table.cos() * x).sum()

    apply, params, buffers = fcg.from_module(Scaled())

    def train_step(state: Any, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda params: apply(params, state["buffers"], x)[0])(
            state["params"]
        )
        return {**state, "params": grads}, {"loss": loss}

    state = fcg.place({"params": params, "buffers": buffers})
    assert fcg.graph_step(train_step).lower(state, torch.ones(3)).inspection.dropped == ()


def test_kept_gradients_are_updated_from_in_place_and_are_no_dropped_values() -> None:
    """The op gives gradients back as if it had written them, which it does with a `grad_scale` only."""
    torch.manual_seed(0)
    optimizer = fcg.optim.adamw(0.1, weight_decay=0.1)
    params = {"a": torch.randn(5), "b": torch.randn(3)}
    state = fcg.TrainState.create(params=params, optimizer=optimizer, accumulate=True)
    step = fcg.graph_step(lambda state, grads: (state.apply_gradients(state.grads, grads=grads), {}))
    grads = fcg.tree.map(torch.randn_like, params)
    lowered = step.lower(state, grads)
    assert lowered.inspection.dropped == ()
    assert "1 of them in place" in str(lowered)
    twin = fcg.fork(state)
    for _ in range(16):
        grads = fcg.tree.map(torch.randn_like, params)
        state, _ = step(state, grads)
        twin, _ = step.eager(twin, grads)
        assert_trees_all_equal(state, twin)


def test_an_update_of_kept_gradients_that_stay_names_none() -> None:
    optimizer = fcg.optim.adamw(0.1, weight_decay=0.1)
    state = fcg.TrainState.create(params={"a": torch.ones(5)}, optimizer=optimizer, accumulate=True)
    step = fcg.graph_step(lambda state: (state.apply_gradients(state.grads), {}))
    assert step.lower(state).inspection.dropped == ()


def statistics() -> Any:
    return fcg.place({"mean": torch.zeros(3), "seen": torch.tensor(0), "w": torch.ones(3)})


def returned(state: Any, x: Tensor) -> Any:
    return {**state, "mean": state["mean"].lerp(x.mean(0), 0.1), "w": state["w"] * 2}, {}


def only_read(state: Any, x: Tensor) -> Any:
    return {**state, "w": state["w"] - (x * state["mean"] + state["mean"].relu()).sum()}, {}


def looked_at(state: Any, x: Tensor) -> Any:
    """Views and tensors made to a leaf's shape are no new values of it."""
    state["mean"].view(3), state["mean"].detach(), torch.zeros_like(state["mean"])
    return {**state, "w": state["w"] - x.sum()}, {}


def copied(state: Any, x: Tensor) -> Any:
    """As `from_module` does with buffers, in case that the module writes to them."""
    state["mean"].clone()
    return {**state, "w": state["w"] - x.sum()}, {}


def read_after_a_write(state: Any, x: Tensor) -> Any:
    shifted = state["mean"].clone()
    shifted.add_(x.mean(0))
    return {**state, "w": state["w"] - shifted.sum()}, {}


@pytest.mark.parametrize("function", [returned, only_read, looked_at, copied, read_after_a_write])
def test_what_is_used_is_not_called_dropped(function: Callable[..., Any]) -> None:
    lowered = fcg.graph_step(function).lower(statistics(), torch.ones(4, 3))
    assert lowered.inspection.dropped == ()


def test_a_key_that_is_derived_and_not_used_is_no_mistake() -> None:
    def step(state: Any) -> Any:
        fcg.random.fold_in(state.key, state.step)
        fcg.random.split(state.key)
        return state.replace(step=state.step + 1), {}

    assert fcg.graph_step(step).lower(trained()).inspection.dropped == ()


# --- plots -------------------------------------------------------------------------------------------------


def legend(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_bytes_by_role_draws_each_byte_once() -> None:
    state = trained()
    ax = report.bytes_by_role(state)
    assert ax.get_xlabel() == "bytes"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["step", "params", "opt_state", "key"]
    drawn = {
        (bars.get_label(), row): patch.get_width()
        for bars in ax.containers
        for row, patch in enumerate(bars.patches)
        if patch.get_width()
    }
    assert drawn == {
        ("i64", 0): 8, ("padding", 0): 8,
        ("f32", 1): 36, ("padding", 1): 12,
        ("f32", 2): 72, ("i64", 2): 8, ("padding", 2): 32,
        ("i64", 3): 16,
    }  # fmt: skip
    assert sum(drawn.values()) == state._lease.arena.plan.nbytes
    assert len({bars.patches[0].get_hatch() for bars in ax.containers}) == 3


@pytest.mark.parametrize("n", [4, 64, 1024])
def test_sizes_by_role_stay_in_the_frame_and_are_those_of_the_leaves(n: int) -> None:
    state = fcg.TrainState.create(params={"w": torch.ones(n, n)}, optimizer=fcg.optim.adam(0.1))
    ax = report.bytes_by_role(state)
    ax.figure.canvas.draw()
    frame = ax.get_window_extent()
    for text in ax.texts:
        place = text.get_window_extent()
        assert frame.x0 <= place.x0
        assert place.x1 <= frame.x1
    assert ax.texts[0].get_text() == "8 bytes"
    plt.close(ax.figure)


def test_arena_draws_slots_where_they_lie() -> None:
    state = fcg.place({"a": torch.zeros(120), "b": torch.zeros(2000), "n": 1})
    ax = report.arena(state)
    places = [(round(1024 * patch.get_x()), round(1024 * patch.get_width())) for patch in ax.patches]
    # a; padding; b, aligned to 256 bytes; n and the padding after it are too narrow to be drawn apart
    assert places == [(0, 480), (480, 32), (512, 8000), (8512, 16)]
    assert ax.get_xlabel() == "offset in KiB"
    assert legend(ax) == ["state", "padding"]


@pytest.mark.parametrize("plot", [report.arena, report.bytes_by_role])
@pytest.mark.parametrize("layout", [None, "constrained", "tight", "tight afterwards"])
def test_legend_stays_in_the_place_of_the_axes_that_were_given(plot: Callable[..., Any], layout: Any) -> None:
    state = fcg.TrainState.create(params={"w": torch.ones(64)}, optimizer=fcg.optim.adam(0.1))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9, 2.5), layout=layout if layout != "tight afterwards" else None
    )
    end = right.get_window_extent().x1 if layout is None else figure.bbox.x1
    for ax in (left, right):
        assert plot(state, ax=ax) is ax
    if layout == "tight afterwards":
        figure.tight_layout()
    figure.canvas.draw()
    first, last = (ax.get_legend().get_window_extent() for ax in (left, right))
    assert left.get_window_extent().x1 <= first.x0
    assert first.x1 <= right.get_window_extent().x0
    assert last.x1 <= end + 1
    plt.close(figure)


def test_step_times_of_seconds() -> None:
    ax = report.step_times({"one": [0.001, 0.002, 0.003, 0.004, 0.005], "two": [0.01]})
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "one: 3 ms (1.4 to 4.6)", "two: 10 ms (10 to 10)",
    ]  # fmt: skip
    points = [line for line in ax.lines if line.get_marker() == "."]
    assert sorted(points[0].get_xdata()) == pytest.approx([1, 2, 3, 4, 5])
    assert ax.get_xlabel() == "ms per call"
    tailed = report.step_times([0.001] * 9 + [0.1])
    assert tailed.get_xlabel() == "ms per call, logarithmic"
    with pytest.raises(ValueError, match="there are no seconds to draw"):
        report.step_times([])


def test_step_times_of_a_step_leave_its_state_alone() -> None:
    step, state = fcg.graph_step(train), a_state()
    ax = report.step_times(step, state, data(0), n=7)
    assert state.generation == 0
    assert state["w"].tolist() == a_state()["w"].tolist()
    assert len(next(line for line in ax.lines if line.get_marker() == ".").get_xdata()) == 7
    assert ax.get_yticklabels()[0].get_text().startswith("train: ")
    assert len(report.seconds_per_call(fcg.graph_fn(lambda s: s["w"] * 2), state, n=3)) == 3
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        report.seconds_per_call(step, state, data(0), n=0)


def test_loss_curves_take_what_a_loop_collects() -> None:
    step, state = fcg.graph_step(train), a_state()
    norms = []
    for n in range(3):
        state, metrics = step(state, data(n))
        norms.append(metrics["norm"])
    ax = mpl.pyplot.figure().subplots()
    assert report.loss_curves({"tensors": norms, "floats": [2.0, 1.0]}, ax=ax) is ax
    first, second = ax.lines
    assert list(first.get_xdata()) == [1, 2, 3]
    assert list(first.get_ydata()) == [norm.item() for norm in norms]
    assert list(second.get_ydata()) == [2.0, 1.0]
    assert first.get_linestyle() != second.get_linestyle()
    assert (ax.get_xlabel(), ax.get_ylabel(), legend(ax)) == (
        "call of the step",
        "loss",
        ["tensors", "floats"],
    )


def test_losses_of_a_sweep_are_a_line_for_each_member() -> None:
    losses = [torch.tensor([3.0, 2.0, 1.0]), torch.tensor([2.0, 0.5, torch.nan])]
    ax = report.loss_curves({"rates": losses})
    assert [line.get_ydata()[0] for line in ax.lines] == [3.0, 2.0, 1.0]
    assert [line.get_linewidth() > 1 for line in ax.lines] == [False, True, False]
    assert legend(ax) == ["rates, 1 of 3 not finite"]
    ax = report.members(losses[-1], torch.tensor([0.25, 0.5, 1.0]), name="rate")
    finite, lost = ax.lines
    assert (list(finite.get_ydata()), list(lost.get_xdata())) == ([2.0, 0.5], [1.0])
    assert (ax.get_xscale(), ax.get_xlabel()) == ("log", "rate")
    for wrong in ([torch.nan], [1.0, 2.0]):
        with pytest.raises(ValueError, match=r"report.members: .* To fix: `metrics"):
            report.members(wrong, [1.0])


@pytest.mark.parametrize("curves", [{}, {"a": []}])
def test_empty_curves_are_refused(curves: Any) -> None:
    with pytest.raises(ValueError, match="has no losses"):
        report.loss_curves(curves)


@pytest.mark.parametrize("plot", [report.arena, report.bytes_by_role])
def test_plots_of_states_want_a_handle(plot: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=rf"report.{plot.__name__}: expected a state handle, got dict"):
        plot({"w": torch.ones(2)})
    assert "0 bytes" in plot(fcg.place({})).get_title()


def test_without_matplotlib_the_error_says_what_to_do() -> None:
    script = "import sys; sys.modules['matplotlib'] = None; import functional_cg; import functional_cg.report"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "To fix: `pip install matplotlib`." in run.stderr.splitlines()[-1]
