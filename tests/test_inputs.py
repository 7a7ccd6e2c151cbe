"""Inputs: their layout, the generated check of it, and the copy into static buffers."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

import functional_cg as fcg
from functional_cg import tree
from functional_cg.errors import LayoutError
from functional_cg.inputs import InputLayout, as_input, input_layout
from functional_cg.matcher import layout_matcher
from functional_cg.mismatch import layout_differences
from functional_cg.staging import Staging
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


@pytest.mark.parametrize(
    "value", ["text", Phase.TRAIN, None, 1j, object(), np.array(["a"]), b"x", torch.float32]
)
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
    layout, live = input_layout(["batch"], ((nest,), {}), CPU)
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
    "complex": (1j, 2j, "expected complex 1j   got complex 2j"),
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


def test_writing_order_of_dicts_does_not_matter() -> None:
    expected = layout_of({"a": 1, "b": 2.0}, x=1, y=2.0)
    live = match(expected, {"b": 3.0, "a": 4}, y=5.0, x=6)
    assert [leaf.item() for leaf in live] == [4, 3.0, 6, 5.0]


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
    layout, live = input_layout(["batch"], ((nest,), {}), CPU)
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
