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
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import functional_cg as fcg
from functional_cg import tree
from functional_cg.call.inputs import input_layout
from functional_cg.call.staging import Staging
from functional_cg.errors import LayoutError
from functional_cg.testing.strategies import pytrees

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["left", "right"])


class Phase(Enum):
    TRAIN = "train"
    TEST = "test"


@tree.register_dataclass(static=("name",))
class Named:
    x: Any
    name: str


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tolist() == y.tolist()
        for x, y in zip(a, b, strict=True)
    )


# --- layouts -----------------------------------------------------------------------------------------------

# The first call's inputs, a later call's, and the row that refuses them; an empty one where the layout is the same.
LAYOUTS: dict[str, tuple[Any, Any, str]] = {
    "bool": (True, False, ""),
    "int": (3, 4, ""),
    "float": (0.5, 2.5, ""),
    "complex": (0.5j, 2j, ""),
    "float64 of numpy": (np.float64(0.5), 2.5, ""),  # a float, by inheritance
    "float32 of numpy": (np.float32(0.5), np.float32(2.5), ""),
    "int16 of numpy": (np.int16(3), np.int16(4), ""),
    "bool of numpy": (np.bool_(True), np.bool_(False), ""),
    "array": (np.arange(3), np.arange(3) + 1, ""),
    "complex array": (np.array(1j), np.array(2j), ""),
    "uint16": (np.ones(3, dtype=np.uint16), np.zeros(3, dtype=np.uint16), ""),
    "half": (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16), ""),
    "parameter": (torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(2)), ""),
    "frozen array": (np.arange(3), np.frombuffer(bytes(24), dtype=np.int64), ""),
    "backwards": (np.arange(6), np.arange(6)[::-1], ""),
    "broadcast": (np.ones((2, 3)), np.broadcast_to(np.arange(3.0), (2, 3)), ""),
    "transposed": (torch.ones(3, 2), torch.arange(6.0).view(2, 3).T, ""),
    "expanded": (torch.ones(3, 2), torch.arange(2.0).expand(3, 2), ""),
    "array for tensor": (torch.ones(3, 2), np.zeros((3, 2), dtype=np.float32), ""),
    "leaf of a state": (torch.ones(2), fcg.place({"w": torch.zeros(2)})["w"], ""),
    "conjugate": (torch.ones(2) + 0j, torch.tensor([1 + 2j, 3 - 4j]).conj(), ""),
    "negative": (torch.ones(2), torch.tensor([1 + 2j, 3 - 4j]).conj().imag, ""),
    "nothing": (None, None, ""),
    "text": ("a", "a", ""),
    "nested": ({"x": [1, Pair(2, "a")]}, {"x": [3, Pair(4, "a")]}, ""),
    "registered": (Named(torch.ones(2), "a"), Named(torch.zeros(2), "a"), ""),
    "shape": (torch.ones(2, 3), torch.ones(3, 2), "batch  expected f32[2,3]@cpu   got f32[3,2]@cpu"),
    "broadcastable": (torch.ones(2, 3), torch.ones(1, 3), "batch  expected f32[2,3]@cpu   got f32[1,3]@cpu"),
    "0-dim": (torch.ones(1), torch.ones(()), "batch  expected f32[1]@cpu   got f32[]@cpu"),
    "dtype": (torch.ones(2), torch.ones(2).double(), "batch  expected f32[2]@cpu   got f64[2]@cpu"),
    "int for float": (1.0, 1, "batch  expected f32[]@cpu   got i64[]@cpu"),
    "bool for int": (1, True, "batch  expected i64[]@cpu   got bool[]@cpu"),
    "number for tensor": (torch.ones(2), 1.0, "batch  expected f32[2]@cpu   got f32[]@cpu"),
    "string for tensor": (torch.ones(2), "a", "batch  expected f32[2]@cpu   got str 'a'"),
    "tensor for string": ("a", torch.ones(2), "batch  expected str 'a'   got f32[2]@cpu"),
    "string": ("a", "b", "batch  expected str 'a'   got str 'b'"),
    "enum": (Phase.TRAIN, Phase.TEST, "batch  expected Phase <Phase.TRAIN: 'train'>   got Phase <Phase.TEST"),
    "none": (torch.ones(2), None, "batch  expected f32[2]@cpu   got nothing"),
    "from none": (None, torch.ones(2), "batch  expected nothing   got f32[2]@cpu"),
    "below a key": ({"x": [1, 2]}, {"x": [1, 2.0]}, "batch['x'][1]  expected i64[]@cpu   got f32[]@cpu"),
    "of a tuple": (Pair(1, 2), Pair(1, 2.0), "batch.right  expected i64[]@cpu   got f32[]@cpu"),
    "static": (Named(torch.ones(2), "a"), Named(torch.ones(2), "b"), "batch"),
    "in a registered one": (Named(torch.ones(2), "a"), Named(torch.ones(3), "a"), "batch.x  expected f32[2]@cpu"),
    "list for registered": (Named(torch.ones(2), "a"), [torch.ones(2)], "batch"),
    "key less": ({"a": 1, "b": 2}, {"a": 1}, "batch"),
    "key more": ({"a": 1}, {"a": 1, "b": 2}, "batch"),
    "another key": ({"a": 1}, {"b": 1}, "batch"),
    "another dict": ({"a": 1}, OrderedDict(a=1), "batch"),
    "tuple for list": ([1, 2], (1, 2), "batch"),
    "shorter": ([1, 2], [1], "batch"),
    "longer": ([1], [1, 2], "batch"),
    "unnamed": (Pair(1, 2), (1, 2), "batch"),
    "named": ((1, 2), Pair(1, 2), "batch"),
    "elsewhere": ([[1], 2], [1, [2]], "batch"),
    "flat": ({"a": [1]}, {"a": 1}, "batch"),
    "key of text": ({1: 1}, {"1": 1}, "batch"),
    "key True": ({1: 1}, {True: 1}, "batch"),
    "key 0": ({False: 1, "a": 2}, {0: 1, "a": 2}, "batch"),
    "key 2.0": ({2: 1}, {2.0: 1}, "batch"),
    "key True in order": (OrderedDict({1: 1}), OrderedDict({True: 1}), "batch"),
}  # fmt: skip


def plain(batch: Any) -> list[Any]:
    """The leaves of inputs as a step returns them."""
    leaves = tree.leaves(batch)
    return [leaf if isinstance(leaf, str | Enum) else as_given(leaf) for leaf in leaves]


def as_given(leaf: Any) -> tuple[str, Any]:
    tensor = (
        leaf if isinstance(leaf, Tensor) else torch.as_tensor(leaf.copy() if hasattr(leaf, "copy") else leaf)
    )
    narrow = torch.float32 if isinstance(leaf, float) else tensor.dtype
    return str(narrow), tensor.to(narrow).tolist()


@pytest.mark.parametrize(("before", "after", "row"), LAYOUTS.values(), ids=LAYOUTS)
def test_another_layout_is_refused_by_name_and_the_same_one_is_live(
    before: Any, after: Any, row: str
) -> None:
    f = fcg.graph_fn(lambda batch: batch)
    assert plain(f(before)) == plain(before)
    if row:
        with pytest.raises(LayoutError, match=rf"(?s)another layout.*\n  {re.escape(row)}"):
            f(after)
    else:
        assert plain(f(after)) == plain(after)
    assert plain(f(before)) == plain(before)
    assert f.stats.traces == 1


def layout(batch: Any) -> tuple[Any, list[Any]]:
    leaves, treedef = tree.flatten(batch)
    return treedef, [
        leaf if isinstance(leaf, str | Enum) else (as_given(leaf)[0], np.shape(leaf)) for leaf in leaves
    ]


@settings(max_examples=25)
@given(pytrees(), pytrees())
def test_a_call_is_refused_only_if_its_layout_is_another_one(one: Any, two: Any) -> None:
    f = fcg.graph_fn(lambda batch: batch)
    assert plain(f(one)) == plain(f(one)) == plain(one)
    try:
        assert plain(f(two)) == plain(two)
    except LayoutError:
        assert layout(one) != layout(two)


def test_number_of_arguments_and_names_are_part_of_the_layout() -> None:
    f = fcg.graph_fn(lambda *batch, **more: (batch, more))
    f(1, key=2)
    for args, kwargs in (
        ((1,), {}),
        ((1, 1), {"key": 2}),
        ((), {"key": 2}),
        ((1,), {"key": 2, "more": 3}),
        ((1,), {"kez": 2}),
    ):
        with pytest.raises(LayoutError):
            f(*args, **kwargs)
    assert [leaf.item() for leaf in tree.leaves(f(3, key=4))] == [3, 4]


def test_the_order_of_keys_is_told_apart_from_a_layout() -> None:
    """The function may loop over a dict; in which order a call names its parameters, it does not see."""
    f = fcg.graph_fn(lambda batch, x, y: [*batch.values(), x, y])
    f({"a": 1, "b": 2.0}, x=1, y=2.0)
    assert [leaf.item() for leaf in f({"a": 4, "b": 3.0}, y=5.0, x=6)] == [4, 3.0, 6, 5.0]
    with pytest.raises(LayoutError, match="order"):
        f({"b": 3.0, "a": 4}, x=6, y=5.0)


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
    for held, name in ((one, r"batch\['cfg'\]\.lr"), (two, r"batch\['more'\]\[0\]\.lr")):
        held.lr = 100.0
        with pytest.raises(fcg.BakedValueError, match=rf"{name}  traced 2\.0   now 100\.0"):
            step(state, batch)
        held.lr = 2.0
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
