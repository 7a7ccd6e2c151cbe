"""Inputs: their layout, the generated check of it, and the copy into static buffers."""

from __future__ import annotations

import collections
import dataclasses
import re
import types
import warnings
from collections import OrderedDict, namedtuple
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import functional_cg as fcg
from functional_cg import tree
from functional_cg.call.inputs import InputLayout, as_input, input_layout
from functional_cg.call.matcher import layout_matcher
from functional_cg.call.mismatch import alike, layout_differences
from functional_cg.call.staging import Staging
from functional_cg.errors import LayoutError
from functional_cg.testing.strategies import pytrees

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["left", "right"])


class Phase(Enum):
    TRAIN = "train"
    TEST = "test"


def layout_of(*args: Any, **kwargs: Any) -> InputLayout:
    return input_layout(["batch", "other"], (args, kwargs), CPU)[0]


def match(expected: InputLayout, *args: Any, **kwargs: Any) -> Any:
    return layout_matcher(expected, CPU)(args, kwargs)


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tolist() == y.tolist()
        for x, y in zip(a, b, strict=True)
    )


# --- live leaves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (True, torch.bool, ()),
        (3, torch.int64, ()),
        (0.5, torch.float32, ()),
        (0.5j, torch.complex64, ()),
        (np.float64(0.5), torch.float32, ()),  # a float, by inheritance
        (np.float32(0.5), torch.float32, ()),
        (np.int16(3), torch.int16, ()),
        (np.bool_(True), torch.bool, ()),
        (np.arange(3), torch.int64, (3,)),
        (np.ones((2, 3), dtype=np.float64), torch.float64, (2, 3)),
        (np.array(1j), torch.complex128, ()),
        (np.ones(3, dtype=np.uint16), torch.uint16, (3,)),
        (torch.ones(2, dtype=torch.bfloat16), torch.bfloat16, (2,)),
        (torch.nn.Parameter(torch.ones(2)), torch.float32, (2,)),
    ],
)
def test_live_leaves_become_tensors(value: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = as_input(value)
    assert tensor is not None
    assert (tensor.dtype, tuple(tensor.shape), tensor.requires_grad) == (dtype, shape, False)
    assert tensor.tolist() == (value.tolist() if hasattr(value, "tolist") else value)


@pytest.mark.parametrize("value", ["text", Phase.TRAIN, None, object(), np.array(["a"]), b"x", torch.float32])
def test_other_objects_are_no_live_leaves(value: Any) -> None:
    assert as_input(value) is None


def test_numpy_is_shared_where_torch_can() -> None:
    plain = np.arange(6.0)
    shared = as_input(plain)
    plain[0] = 7
    assert shared is not None
    assert shared[0].item() == 7
    frozen = np.arange(3)
    frozen.setflags(write=False)
    for array in (
        frozen,
        np.arange(6)[::-1],
        np.broadcast_to(np.arange(3), (2, 3)),
        np.arange(6).reshape(2, 3).T,
    ):
        tensor = as_input(array)
        assert tensor is not None
        assert tensor.tolist() == array.tolist()


def test_leaves_of_a_state_are_read_as_their_slot() -> None:
    state: Any = fcg.place({"w": torch.ones(2)})
    tensor = as_input(state["w"])
    assert type(tensor) is Tensor
    assert tensor.tolist() == [1.0, 1.0]


# --- layouts -----------------------------------------------------------------------------------------------


def test_names_start_at_the_parameters() -> None:
    layout = layout_of({"x": torch.ones(2), "y": [1, "text"]}, torch.ones(1), 3, key=Pair(1, 2))
    assert layout.names == (
        "batch['x']", "batch['y'][0]", "batch['y'][1]", "other", "inputs[2]", "key.left", "key.right",
    )  # fmt: skip
    assert "batch['y'][1]" not in layout.live_names
    assert [str(spec) for spec in layout.specs[:3]] == ["f32[2]@cpu", "i64[]@cpu", "f32[1]@cpu"]


@given(pytrees())
def test_a_layout_accepts_its_own_inputs(nest: Any) -> None:
    layout, live, _ = input_layout(["batch"], ((nest,), {}), CPU)
    assert layout_differences(layout, layout) == []
    assert same(match(layout, nest), live)
    assert tree.flatten(layout.fill(live))[1] == layout.treedef


@given(pytrees(), pytrees())
def test_the_generated_check_agrees_with_the_list_of_differences(one: Any, two: Any) -> None:
    expected, got = layout_of(one), layout_of(two)
    assert (match(expected, two) is None) == bool(layout_differences(expected, got))


CHANGES: dict[str, tuple[Any, Any, str]] = {
    "shape": (torch.ones(2, 3), torch.ones(3, 2), "expected f32[2,3]@cpu   got f32[3,2]@cpu"),
    "broadcastable": (torch.ones(2, 3), torch.ones(1, 3), "expected f32[2,3]@cpu   got f32[1,3]@cpu"),
    "0-dim": (torch.ones(1), torch.ones(()), "expected f32[1]@cpu   got f32[]@cpu"),
    "dtype": (torch.ones(2), torch.ones(2, dtype=torch.float64), "expected f32[2]@cpu   got f64[2]@cpu"),
    "int for float": (1.0, 1, "expected f32[]@cpu   got i64[]@cpu"),
    "bool for int": (1, True, "expected i64[]@cpu   got bool[]@cpu"),
    "number for tensor": (torch.ones(2), 1.0, "expected f32[2]@cpu   got f32[]@cpu"),
    "string for tensor": (torch.ones(2), "a", "expected f32[2]@cpu   got str 'a'"),
    "tensor for string": ("a", torch.ones(2), "expected str 'a'   got f32[2]@cpu"),
    "string": ("a", "b", "expected str 'a'   got str 'b'"),
    "enum": (
        Phase.TRAIN,
        Phase.TEST,
        "expected Phase <Phase.TRAIN: 'train'>   got Phase <Phase.TEST: 'test'>",
    ),
    "none": (torch.ones(2), None, "expected f32[2]@cpu   got nothing"),
    "from none": (None, torch.ones(2), "expected nothing   got f32[2]@cpu"),
}


@pytest.mark.parametrize(("before", "after", "row"), CHANGES.values(), ids=CHANGES)
def test_every_difference_is_seen_and_shown(before: Any, after: Any, row: str) -> None:
    expected, got = layout_of({"x": before}), layout_of({"x": after})
    assert layout_differences(expected, got) == [f"batch['x']  {row}"]
    assert match(expected, {"x": after}) is None
    assert match(expected, {"x": before}) is not None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        ([1, 2], (1, 2)),
        ([1, 2], [1]),
        ([1], [1, 2]),
        (Pair(1, 2), (1, 2)),
        ((1, 2), Pair(1, 2)),
        ([[1], 2], [1, [2]]),
        ({"a": [1]}, {"a": 1}),
        ({1: 1}, {"1": 1}),
        ({1: 1}, {True: 1}),
        ({False: 1, "a": 2}, {0: 1, "a": 2}),
        ({2: 1}, {2.0: 1}),
        (OrderedDict({1: 1}), OrderedDict({True: 1})),
    ],
)
def test_every_difference_of_structure_is_seen(before: Any, after: Any) -> None:
    expected, got = layout_of(before), layout_of(after)
    assert layout_differences(expected, got) != []
    assert match(expected, after) is None


def test_number_of_arguments_and_names_are_part_of_the_layout() -> None:
    expected = layout_of(1, key=2)
    assert match(expected, 1, key=2) is not None
    for args, kwargs in (
        ((1,), {}),
        ((1, 1), {"key": 2}),
        ((), {"key": 2}),
        ((1,), {"key": 2, "more": 3}),
        ((1,), {"kez": 2}),
    ):
        assert layout_matcher(expected, CPU)(args, kwargs) is None
        assert layout_differences(expected, layout_of(*args, **kwargs)) != []


def test_the_order_of_keys_is_told_apart_from_a_layout() -> None:
    """The function may loop over a dict; in which order a call names its parameters, it does not see."""
    expected = layout_of({"a": 1, "b": 2.0}, x=1, y=2.0)
    for args, kwargs in (
        (({"b": 3.0, "a": 4},), {"x": 6, "y": 5.0}),
        (({"a": 4, "b": 3.0},), {"y": 5.0, "x": 6}),
    ):
        assert layout_matcher(expected, CPU)(args, kwargs) is None
        assert alike(expected, layout_of(*args, **kwargs))
    named = input_layout(["batch"], ((1,), {"x": 1, "y": 2.0, "z": 3.0}), CPU, parameters={"x", "y"})[0]
    live = match(named, 1, z=4.0, y=5.0, x=6)
    assert [leaf.item() for leaf in live] == [1, 6, 5.0, 4.0]


def test_equal_keys_of_other_types_are_other_keys() -> None:
    step = fcg.graph_step(
        lambda s, batch: ({"w": s["w"] + sum(x if key is True else -x for key, x in batch.items())}, None),
        max_captures=3,
    )
    state, eager = fcg.place({"w": torch.zeros(())}), 0.0
    for i in range(16):
        key = (1, True, 1.0)[i % 3]
        state, _ = step(state, {key: torch.tensor(float(i))})
        eager += i if key is True else -i
        assert float(state["w"]) == eager


def test_strides_and_origin_are_no_part_of_the_layout() -> None:
    expected = layout_of(torch.ones(3, 2))
    state: Any = fcg.place({"w": torch.full((3, 2), 7.0)})
    for value in (
        torch.zeros(2, 3).T,
        np.zeros((3, 2), dtype=np.float32),
        torch.nn.Parameter(torch.zeros(3, 2)),
        torch.zeros(1, 2).expand(3, 2),
        state["w"],
    ):
        (live,) = match(expected, value)
        assert not live.requires_grad
        assert layout_differences(expected, layout_of(value)) == []


def test_a_donated_leaf_among_the_inputs_does_not_match() -> None:
    state: Any = fcg.place({"w": torch.ones(2)})
    leaf = state["w"]
    expected = layout_of(leaf)
    state.replace(w=torch.zeros(2))
    assert match(expected, leaf) is None  # the slow path says why


def test_registered_classes_match_by_flattening() -> None:
    @tree.register_dataclass(static=("name",))
    class Batch:
        x: Any
        name: str

    expected = layout_of(Batch(torch.ones(2), "a"))
    assert same(match(expected, Batch(torch.zeros(2), "a")), [torch.zeros(2)])
    assert match(expected, Batch(torch.zeros(2), "b")) is None
    assert match(expected, Batch(torch.zeros(3), "a")) is None
    assert match(expected, [torch.zeros(2)]) is None


# --- staging -----------------------------------------------------------------------------------------------


@given(pytrees())
def test_staging_copies_every_leaf(nest: Any) -> None:
    layout, live, _ = input_layout(["batch"], ((nest,), {}), CPU)
    staging = Staging(layout.specs, CPU)
    staging.copy_in(live)
    assert same(staging.slots, live)
    for slot, leaf in zip(staging.slots, live, strict=True):
        assert slot.untyped_storage()._cdata != leaf.untyped_storage()._cdata


@pytest.mark.parametrize(
    "leaf",
    [
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        torch.ones(2, 1).expand(2, 3),
        torch.arange(6.0).view(2, 3).T,
    ],
)
def test_lazy_and_strided_views_are_resolved(leaf: Tensor) -> None:
    staging = Staging(layout_of(leaf).specs, CPU)
    staging.copy_in([leaf])
    assert staging.slots[0].tolist() == leaf.tolist()


def bits(tensor: Tensor) -> list[int]:
    flat = tensor.cpu().resolve_neg().reshape(-1).contiguous()
    return flat.view(torch.uint8).tolist() if flat.numel() else []


JOINED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [*JOINED, torch.uint16, torch.complex64, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(
    "shapes",
    [
        [(64, 64), (64, 64)], [(8, 1024), (0, 1024), (3, 1024)], [(8192,), (1024,)], [(8192,), (3, 4096)], [(), ()],
        [(0, 3), (0, 3)], [(5,), (3,)], [(64, 64)] * 9,
    ],
    ids=["two", "an empty one", "vectors", "other rows", "scalars", "nothing", "gaps", "many"],
)  # fmt: skip
def test_what_is_on_the_device_is_copied_in_bit_for_bit(dtype: torch.dtype, shapes: Any) -> None:
    cuda = torch.device("cuda", 0)
    live, strided = [], []
    for shape in shapes:
        pairs = torch.randn(*shape, 2, device=cuda).mul(9).abs().to(dtype)
        strided.append(pairs[..., 0])
        live.append(pairs.cpu()[..., 1].contiguous().cuda())
    layout, _, _ = input_layout(["batch"], ((live,), {}), cuda)
    staging = Staging(layout.specs, cuda)
    negative = [torch._neg_view(leaf) for leaf in live] if dtype in JOINED[:4] else live
    for leaves in (live, strided, [*live[:1], *strided[1:]], [*live[:-1], live[-1].cpu()], negative, live):
        for slot in staging.slots:
            slot.zero_()
        staging.copy_in(leaves)
        torch.cuda.synchronize()
        for slot, leaf in zip(staging.slots, leaves, strict=True):
            assert bits(slot) == bits(leaf)


def test_inference_tensors_are_inputs() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
    predict = fcg.graph_fn(lambda x: x * 2)
    assert predict(x).tolist() == [2.0, 2.0]
    with torch.inference_mode():
        assert predict(x + 1).tolist() == [4.0, 4.0]


# --- through a call ----------------------------------------------------------------------------------------


def test_numbers_and_numpy_are_live_and_never_freeze() -> None:
    @fcg.graph_fn
    def combine(batch: Any, *, scale: Any) -> Any:
        return (batch["x"] * scale).sum() + batch["n"]

    for i in range(1, 4):
        batch = {"x": np.full((3,), float(i), dtype=np.float32), "n": i}
        assert combine(batch, scale=0.5 * i).item() == 1.5 * i * i + i
    assert combine.stats.captures == 1


def test_the_caller_may_overwrite_its_memory_after_the_call() -> None:
    @fcg.graph_step
    def add(state: Any, x: Tensor) -> Any:
        return {"sum": state["sum"] + x}, {"x": x + 0}

    state: Any = {"sum": torch.zeros(3)}
    x, seen = np.zeros(3, dtype=np.float32), []
    for i in range(4):
        x[:] = i
        state, metrics = add(state, x)
        x[:] = -100
        seen.append(metrics["x"])
    assert state["sum"].tolist() == [6.0, 6.0, 6.0]
    assert [t[0].item() for t in seen] == [0.0, 1.0, 2.0, 3.0]


def test_one_tensor_in_two_places_is_copied_twice() -> None:
    swap = fcg.graph_fn(lambda a, b: (b - a, a * 2))
    x = torch.ones(2)
    assert [out.tolist() for out in swap(x, x)] == [[0.0, 0.0], [2.0, 2.0]]
    assert [out.tolist() for out in swap(x, x + 1)] == [[1.0, 1.0], [2.0, 2.0]]


def test_another_layout_is_refused_with_all_rows_and_then_works() -> None:
    mean = fcg.graph_fn(lambda batch: batch["x"].mean() + batch["y"].mean())
    mean({"x": torch.ones(4), "y": torch.ones(2)})
    with pytest.raises(LayoutError, match=r"called with another layout than it was captured for") as error:
        mean({"x": torch.ones(3), "y": torch.ones(2, dtype=torch.float64)})
    assert "batch['x']  expected f32[4]@cpu   got f32[3]@cpu" in str(error.value)
    assert "batch['y']  expected f32[2]@cpu   got f64[2]@cpu" in str(error.value)
    assert mean({"y": torch.zeros(2), "x": torch.ones(4)}).item() == 1.0


@pytest.mark.parametrize("make", [lambda: torch.eye(2).to_sparse(), lambda: torch.ones(2, device="meta")])
def test_inputs_that_cannot_be_copied_in_are_refused(make: Any) -> None:
    @fcg.graph_step
    def add(state: Any, x: Tensor) -> Any:
        return {"w": state["w"] + 1}, {}

    state = fcg.place({"w": torch.ones(2)})
    with pytest.raises(LayoutError, match=r"has inputs that cannot be copied in"):
        add(state, make())
    assert state["w"].tolist() == [1.0, 1.0]


# --- what cannot be copied in ------------------------------------------------------------------------------


class Marked(torch.Tensor):
    """A tensor whose class says what it is."""


UNFIT: dict[str, tuple[Any, str, str]] = {
    "strings": (np.array(["a", "b"]), "ndarray of <U1", "numpy.unique(batch['x'], return_inverse=True)[1]"),
    "objects": (np.array([None]), "ndarray of object", "numpy.unique"),
    "large int": (2**63, f"int {2**63}", "`static_argnames`"),
    "byte order": (np.ones(2, dtype=">f4"), "ndarray of >f4", '.newbyteorder("=")'),
    "longdouble": (np.ones(2, dtype=np.longdouble), "ndarray of", 'dtype="float64"'),
    "longdouble scalar": (np.longdouble(1), "longdouble 1.0", 'dtype="float64"'),
    "structured": (np.zeros(2, dtype=[("a", "f4")]), "ndarray of [('a', '<f4')]", "batch['x'].dtype.names"),
    "dates": (np.array(["2020"], dtype="M8[s]"), "ndarray of datetime64[s]", '.astype("int64")'),
    "masked": (np.ma.array([1.0], mask=[True]), "MaskedArray of float64", "batch['x'].filled(0)"),
    "sparse": (torch.eye(2).to_sparse(), "layout torch.sparse_coo", "batch['x'].to_dense()"),
    "meta": (torch.ones(2, device="meta"), "f32[2]@meta", "plain tensors"),
    "subclass": (
        torch.ones(2).as_subclass(Marked),
        "the subclass Marked",
        "batch['x'].as_subclass(torch.Tensor)",
    ),
    "matrix": (
        np.ones((2, 2)).view(np.matrix),
        "matrix of float64",
        "numpy.asarray(batch['x'], dtype=\"float64\")",
    ),
    "recorded": (
        torch.ones(2, requires_grad=True) * 2,
        "f32[2]@cpu that requires grad",
        "batch['x'].detach()",
    ),
}


@pytest.mark.parametrize(("value", "got", "fix"), UNFIT.values(), ids=UNFIT)
def test_what_cannot_be_copied_in_is_named_with_its_fix(value: Any, got: str, fix: str) -> None:
    expected = (
        rf"^`f`: has inputs .*\n  batch\['x'\]  .*got {re.escape(got)}(.|\n)*To fix: .*{re.escape(fix)}"
    )

    def f(batch: Any) -> Any:
        return batch["y"] * 2

    cold, warm = fcg.graph_fn(f), fcg.graph_fn(f)
    warm({"x": torch.ones(2), "y": 1.0})
    for step in (cold, warm):
        with pytest.raises(LayoutError, match=expected):
            step({"x": value, "y": 1.0})
        assert step.stats.captures == (step is warm)
    assert warm({"x": torch.ones(2), "y": 2.0}).item() == 4.0


def test_quantized_and_nested_tensors_are_named_with_their_fix() -> None:
    with warnings.catch_warnings(action="ignore"):  # torch is about to change them
        quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)
        nested, jagged = (
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
            for layout in (torch.strided, torch.jagged)
        )
    for value, fix in (
        (quantized, "`x.dequantize()`"),
        (nested, "padded_tensor(x"),
        (jagged, "padded_tensor(x"),
    ):
        with pytest.raises(LayoutError, match=rf"x  expected a dense tensor(.|\n)*{re.escape(fix)}"):
            fcg.graph_fn(lambda x: 1)(value)


def test_the_fixes_for_arrays_work() -> None:
    strings, big, fields = (
        np.array(["a", "b", "a"]),
        np.ones(2, dtype=">f4"),
        np.zeros(2, dtype=[("a", "f4")]),
    )
    for array in (
        np.unique(strings, return_inverse=True)[1],
        big.astype(big.dtype.newbyteorder("=")),
        {field: fields[field] for field in fields.dtype.names or ()},
        np.asarray(np.longdouble(1), dtype="float64"),
        np.ma.array([1.0], mask=[True]).filled(0),
    ):
        copy = fcg.graph_fn(lambda x: x)(array)
        assert same(tree.leaves(copy), [torch.as_tensor(leaf) for leaf in tree.leaves(array)])


def test_an_object_whose_comparison_fails_is_another_object() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise ArithmeticError

        __hash__ = None  # type: ignore[assignment]

    first, f = Odd(), fcg.graph_fn(lambda x, setting: x + 1)
    for _ in range(2):
        assert f(1.0, first).item() == 2.0
    with pytest.raises(LayoutError, match=r"setting  expected Odd(.|\n)*static_argnames=\(\"setting\",\)"):
        f(1.0, Odd())


def test_an_object_among_the_inputs_is_watched() -> None:
    class Settings:
        scale = 2.0

    settings, f = Settings(), fcg.graph_fn(lambda x, settings: x * settings.scale)
    assert f(1.0, settings).item() == 2.0
    settings.scale = 3.0
    with pytest.raises(fcg.BakedValueError, match=r"settings\.scale  traced 2\.0   now 3\.0"):
        f(1.0, settings)


def test_objects_inside_of_an_input_are_watched() -> None:
    class Settings:
        lr = 2.0

    one, two = Settings(), Settings()
    step = fcg.graph_step(lambda s, batch: (s, batch["x"] * batch["cfg"].lr * batch["more"][0].lr))
    batch = {"x": torch.ones(1), "cfg": one, "more": [two, "name"]}
    state, metric = step({"w": torch.ones(1)}, batch)
    assert metric.item() == 4.0
    for settings, name in ((one, r"batch\['cfg'\]\.lr"), (two, r"batch\['more'\]\[0\]\.lr")):
        settings.lr = 100.0
        with pytest.raises(fcg.BakedValueError, match=rf"{name}  traced 2\.0   now 100\.0"):
            step(state, batch)
        settings.lr = 2.0
    assert step(state, batch)[1].item() == 4.0


class DotDict(dict):  # type: ignore[type-arg]
    __getattr__ = dict.get


@dataclasses.dataclass
class Batch:
    x: Tensor


@pytest.mark.parametrize(
    ("make", "got", "fix"),
    [
        (lambda: DotDict(x=torch.ones(2)), "DotDict", "pass `dict(batch)`"),
        (lambda: collections.UserDict(x=torch.ones(2)), "UserDict", "pass `dict(batch)`"),
        (lambda: Batch(torch.ones(2)), "Batch", "`fcg.tree.register_dataclass(Batch)`"),
    ],
)
def test_tensors_in_what_is_no_pytree_are_refused(make: Any, got: str, fix: str) -> None:
    def f(batch: Any) -> Any:
        return batch

    with pytest.raises(LayoutError, match=rf"batch  .*got {got}, which is no pytree(.|\n)*{re.escape(fix)}"):
        fcg.graph_fn(f)(make())


MUTABLE: dict[str, tuple[Any, Any, Any]] = {
    "set": (lambda: {"a"}, lambda held: 1.0 if "a" in held else 2.0, lambda held: held.clear()),
    "bytearray": (lambda: bytearray(b"a"), lambda held: held[0], lambda held: held.append(1) or held.pop(0)),
    "Counter": (lambda: collections.Counter(a=1), lambda held: held["a"], lambda held: held.update("a")),
    "UserDict": (lambda: collections.UserDict(a=1), lambda held: held["a"], lambda held: held.update(a=2)),
    "module": (
        lambda: torch.nn.LeakyReLU(0.1),
        lambda held: held(torch.ones(1)),
        lambda held: setattr(held, "negative_slope", 0.5),
    ),
    "object": (
        lambda: types.SimpleNamespace(rates=[0.1]),
        lambda held: sum(held.rates),
        lambda held: held.rates.append(1.0),
    ),
}


@pytest.mark.parametrize(("make", "read", "change"), MUTABLE.values(), ids=MUTABLE)
@pytest.mark.parametrize("wrap", [lambda held: held, lambda held: {"held": held}])
def test_an_input_that_is_changed_in_place_is_loud(make: Any, read: Any, change: Any, wrap: Any) -> None:
    held = make()
    f = fcg.graph_fn(lambda x, batch: x * read(batch["held"] if type(batch) is dict else batch))
    for _ in range(2):
        f(1.0, wrap(held))
    change(held)
    with pytest.raises(fcg.BakedValueError, match=r"traced .* now "):
        f(1.0, wrap(held))


@dataclasses.dataclass(frozen=True)
class Frozen:
    rates: dict[str, float]


@pytest.mark.parametrize(
    ("held", "read", "change"),
    [
        ({"lr": 0.1}, lambda held: held["lr"], lambda held: held.update(lr=5.0)),
        ([0.1], lambda held: held[-1], lambda held: held.append(5.0)),
        (types.SimpleNamespace(lr=0.1), lambda held: held.lr, lambda held: setattr(held, "lr", 5.0)),
        (Frozen({"lr": 0.1}), lambda held: held.rates["lr"], lambda held: held.rates.update(lr=5.0)),
    ],
)
def test_a_static_field_that_is_changed_in_place_is_loud(held: Any, read: Any, change: Any) -> None:
    class Run(fcg.TrainState):
        held: Any = tree.static()

    state: Any = Run.create(params={"w": torch.ones(1)}, optimizer=fcg.optim.sgd(0.1), held=held)
    step = fcg.graph_step(lambda s, x: (s, x * read(s.held)))
    for _ in range(2):
        state, _ = step(state, 1.0)
    change(held)
    with pytest.raises(fcg.BakedValueError, match=r"static \w+.*  traced .* now "):
        step(state, 1.0)


def test_a_constant_that_is_bound_anew_is_loud_and_a_write_through_data_is_for_verify() -> None:
    teacher = torch.nn.Linear(2, 2)

    def f(x: Tensor) -> Tensor:
        return x @ teacher.weight

    plain, checked = (fcg.graph_fn(f, constants=(teacher.weight,), debug=debug) for debug in (None, "verify"))
    for step in (plain, checked):
        step(torch.ones(2))
    teacher.weight.data.mul_(0.5)
    with pytest.raises(fcg.CaptureError, match="differs by"):
        checked(torch.ones(2))
    teacher.weight = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(fcg.BakedValueError, match=r"teacher\.weight  traced the tensor"):
        plain(torch.ones(2))


def test_numbers_are_made_on_the_host_whatever_the_default_device() -> None:
    double = fcg.graph_fn(lambda x: x * 2)
    with torch.device("meta"):
        assert [double(x).item() for x in (1.0, 2.0)] == [2.0, 4.0]
        assert fcg.place({"a": 3, "b": np.arange(2)[::-1]})["b"].tolist() == [1, 0]


# --- states among the inputs -------------------------------------------------------------------------------


def test_states_in_containers_and_by_name_take_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher: Any = fcg.TrainState.create(params={"w": torch.ones(2)}, optimizer=fcg.optim.sgd(0.5))
    scale: Any = fcg.place(torch.tensor(2.0))

    def f(batch: Any, *, teacher: Any) -> Any:
        return batch["x"] * batch["teachers"][0].params["w"] * batch["scale"] + teacher.params["w"]

    read = fcg.graph_fn(f)

    def call(x: float) -> Any:
        return read(
            {"x": torch.full((2,), x), "teachers": [teacher], "scale": scale}, teacher=teacher
        ).tolist()

    assert call(1.0) == [3.0, 3.0]
    monkeypatch.setattr(type(read), "_slow", lambda *_: pytest.fail("the fast path did not take the call"))
    assert call(2.0) == [5.0, 5.0]
    teacher = teacher.replace(params={"w": torch.full((2,), 2.0)})
    assert call(2.0) == [10.0, 10.0]
    monkeypatch.undo()
    old, teacher = teacher, teacher.replace(params={"w": torch.zeros(2)})
    teacher, living = old, teacher
    with pytest.raises(fcg.DonatedStateError, match="was used after"):
        call(1.0)
    teacher = living
    assert call(1.0) == [0.0, 0.0]
    assert (read.stats.traces, read.stats.captures) == (1, 1)


def test_arguments_by_name_are_arguments_at_their_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(state: Any, batch: Any, scale: Any = 1.0, *, shift: Any = 0.0) -> Any:
        return {"sum": state["sum"] + batch * scale}, state["sum"] + shift

    step, state = fcg.graph_step(add), fcg.place({"sum": torch.zeros(2)})
    state, _ = step(state, torch.ones(2), shift=1.0)
    monkeypatch.setattr(type(step), "_slow", lambda *_: pytest.fail("the fast path did not take the call"))
    state, _ = step(state, batch=torch.ones(2), shift=1.0)
    state, out = step(shift=2.0, batch=torch.ones(2), state=state)
    assert (state["sum"].tolist(), out.tolist()) == ([3.0, 3.0], [4.0, 4.0])
    monkeypatch.undo()
    with pytest.raises(
        LayoutError, match=r"scale  expected nothing   got f32\[\]@cpu(.|\n)*leave `scale` out"
    ):
        step(state, torch.ones(2), shift=1.0, scale=2.0)


def test_a_state_as_a_constant_is_refused_at_once() -> None:
    def f(x: Any) -> Any:
        return x

    state: Any = fcg.place({"w": torch.ones(2)})
    for constants in (state, (state,), {"w": state["w"]}):
        with pytest.raises(TypeError, match=r"`f`: constants.* is of a state(.|\n)*`f\(state, \.\.\.\)`"):
            fcg.graph_fn(f, constants=constants)


# --- what surrounds a call ---------------------------------------------------------------------------------


def total(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).sum()


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f)(torch.ones(2), torch.ones(2)),
    "vmap": lambda f: torch.func.vmap(f)(torch.ones(3, 2), torch.ones(3, 2)),
    "jvp": lambda f: torch.func.jvp(f, (torch.ones(2),) * 2, (torch.ones(2),) * 2),
    "functionalize": lambda f: torch.func.functionalize(f)(torch.ones(2), torch.ones(2)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_around_a_call_are_refused_and_inside_of_a_step_work(transform: Any) -> None:
    f = fcg.graph_fn(total)

    @fcg.graph_step
    def inner(state: Any, x: Tensor) -> Any:
        return state, total(state["w"], x)

    def outer(state: Any, x: Tensor) -> Any:
        state, _ = inner(state, x)
        return state, transform(f)

    for _ in range(2):  # cold and warm
        with pytest.raises(
            fcg.CaptureError, match=r"`total`: is called under a transform(.|\n)*`total.__wrapped__`"
        ):
            transform(f)
        with pytest.raises(fcg.CaptureError, match="is called under a transform"):
            transform(lambda w, x: inner({"w": w}, x)[1])
        assert f(torch.ones(2), torch.ones(2)).item() == 2.0
    expected = transform(total)
    whole, state = fcg.graph_step(outer), fcg.place({"w": torch.ones(2)})
    for run in (whole, whole.eager):
        state, out = run(state, torch.ones(2))
        assert same(tree.leaves(out), tree.leaves(expected))
    assert whole.stats.captures == 1


def test_gradients_do_not_vanish_in_a_replay() -> None:
    f = fcg.graph_fn(total)
    f(torch.ones(2), torch.ones(2))
    with pytest.raises(LayoutError, match=r"w  .*requires grad(.|\n)*fcg\.value_and_grad"):
        fcg.grad(f)(torch.ones(2), torch.ones(2))
    with torch.no_grad():
        assert f(torch.ones(2, requires_grad=True), torch.ones(2)).item() == 2.0
    step = fcg.graph_step(lambda s, x: (s, fcg.grad(f)(s["w"], x)))
    state: Any = fcg.place({"w": torch.ones(2)})
    for run in (step, step.eager):
        state, out = run(state, torch.full((2,), 3.0))
        assert out.tolist() == [3.0, 3.0]


def test_a_fake_mode_around_a_call_is_refused() -> None:
    f, x = fcg.graph_fn(total), torch.ones(2)
    for _ in range(2):
        with (
            FakeTensorMode(),
            pytest.raises(fcg.CaptureError, match=r"under a `FakeTensorMode`(.|\n)*total\.lower"),
        ):
            f(x, x)
        assert f(x, x).item() == 2.0


def test_a_mode_that_looks_on_changes_nothing() -> None:
    step: Any = fcg.graph_step(lambda state, x: ({"w": state["w"] + x.sum()}, x @ x))
    state, x = fcg.place({"w": torch.zeros(2)}), torch.ones(2, 2)
    for i in range(3):  # cold, then warm
        with FlopCounterMode(display=False):
            state, out = step(state, x)
        assert out.tolist() == [[2.0, 2.0], [2.0, 2.0]]
        assert state["w"].tolist() == [4.0 * (i + 1)] * 2
    assert (step.stats.captures, step.stats.replays) == (1, 3)


def test_anomaly_detection_is_refused_while_tracing_and_works_in_an_eager_run() -> None:
    step, state = (
        fcg.graph_step(lambda s, x: (s, fcg.grad(total)(s["w"], x))),
        fcg.place({"w": torch.ones(2)}),
    )
    with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly():
        with pytest.raises(fcg.CaptureError, match=r"detect_anomaly\(\)`(.|\n)*find_nonfinite(.|\n)*eager"):
            step(state, torch.ones(2))
        state, out = step.eager(state, torch.ones(2))
    assert not step.find_nonfinite(state, torch.ones(2))
    assert out.tolist() == step(state, torch.ones(2))[1].tolist() == [1.0, 1.0]


def test_anomaly_detection_for_a_part_of_a_step_is_named() -> None:
    def f(s: Any, x: Tensor) -> Any:
        with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly():
            return s, fcg.grad(total)(s["w"], x)

    with pytest.raises(fcg.CaptureError, match=r"detect_anomaly\(\)`(.|\n)*eager"):
        fcg.graph_step(f)({"w": torch.ones(2)}, torch.ones(2))


def test_results_under_inference_mode_are_ordinary_tensors() -> None:
    step, f = fcg.graph_step(lambda s, x: ({"w": s["w"] + x}, {"w": s["w"] * 1})), fcg.graph_fn(total)
    state: Any = fcg.place({"w": torch.ones(2)})
    with torch.inference_mode():
        for _ in range(2):
            state, metrics = step(state, torch.ones(2))
            assert not metrics["w"].is_inference()
            assert not f(metrics["w"], torch.ones(2)).is_inference()
            assert not f.eager(metrics["w"], torch.ones(2)).is_inference()
            assert torch.is_inference_mode_enabled()
    weight = torch.ones(2, requires_grad=True)
    (metrics["w"] * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0]


# --- strides of a replay -----------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [None, "verify"])
def test_inputs_have_the_strides_of_the_first_call_in_every_run(debug: Any) -> None:
    @fcg.graph_step(lowering="aten", debug=debug)
    def step(state: Any, x: Tensor) -> Any:
        return {"n": state["n"] + 1}, {"first": x.view(-1)[:3], "mean": x.mean(0).sum()}

    rows = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    columns = rows.t().contiguous().t()
    state, other = (fcg.place({"n": torch.tensor(0)}) for _ in range(2))
    state, want = step(state, rows)
    for x in (rows, columns):  # on the arena of the trace, on another one, and eagerly
        state, again = step(state, x)
        other, there = step(other, x)
        other, eager = step.eager(other, x)
        for got in (again, there, eager):
            assert torch.equal(got["first"], want["first"])
            assert torch.equal(got["mean"], want["mean"])
    assert step.stats.traces == 1


def test_products_of_two_dtypes_are_refused_at_their_line() -> None:
    act = fcg.graph_fn(lambda state, obs: obs @ state["w"])
    state = fcg.place({"w": torch.ones(4, 2)})
    with pytest.raises(
        fcg.CaptureError, match=r"test_inputs.py:\d+: expected tensors of one dtype, got f64\[3,4\]"
    ):
        act(state, np.zeros((3, 4)))
    assert act(state, np.zeros((3, 4), np.float32)).shape == (3, 2)
    assert act.stats.captures == 1


def test_a_shape_belongs_to_the_layout_and_comes_back_as_one() -> None:
    step = fcg.graph_step(
        lambda s, x, shape: ({"w": s["w"] + x.view(shape).sum(0)}, {"shape": shape, "own": x.shape})
    )
    state = {"w": torch.zeros(3)}
    for _ in range(2):
        state, metrics = step(state, torch.ones(6), torch.Size([2, 3]))
        assert metrics == {"shape": torch.Size([2, 3]), "own": torch.Size([6])}
        assert type(metrics["shape"]) is torch.Size
    assert state["w"].tolist() == [4.0, 4.0, 4.0]
    assert step.stats.replays == 2
    with pytest.raises(fcg.LayoutError, match=r"shape  expected Size torch.Size\(\[2, 3\]\)   got Size"):
        step(state, torch.ones(6), torch.Size([1, 6]))


def test_a_product_with_an_array_of_doubles_names_the_array() -> None:
    step = fcg.graph_step(lambda s, b: (s, {"out": b["obs"] @ s["w"]}))
    with pytest.raises(fcg.CaptureError, match="expected tensors of one dtype") as error:
        step({"w": torch.ones(2, 3)}, {"obs": np.ones((1, 2))})
    assert "`b['obs']` is f64, as numpy makes it: pass it with `.astype(np.float32)`" in str(error.value)
    _, metrics = step({"w": torch.ones(2, 3)}, {"obs": np.ones((1, 2)).astype(np.float32)})
    assert metrics["out"].tolist() == [[2.0, 2.0, 2.0]]
