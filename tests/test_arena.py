"""Placing a tree into an arena: what can be placed, how, and what is refused."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import tree
from functional_cg.errors import AliasError, LayoutError
from functional_cg.state.arena import Arena, BufferSpec, dtype_name, plan

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex32, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip


def slots(state: Any) -> tuple[Tensor, ...]:
    return state._lease.arena.slots  # type: ignore[no-any-return]


def plain(state: Any) -> Any:
    return fcg.snapshot(state)


def as_bytes(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


# --- what is placed ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_dtype_is_placed_bitwise(dtype: torch.dtype) -> None:
    raw = torch.arange(24 * dtype.itemsize).to(torch.uint8)
    raw = raw % 2 if dtype is torch.bool else raw
    leaf, other = raw.view(dtype), raw.flip(0).view(dtype)
    state: Any = fcg.place({"x": leaf, "y": other.reshape(4, 6).t()})
    assert state["x"].dtype is dtype
    assert as_bytes(slots(state)[0]) == as_bytes(leaf)
    assert as_bytes(slots(state)[1].t()) == as_bytes(other)
    new: Any = state.replace(x=other)
    assert as_bytes(slots(new)[0]) == as_bytes(other)


def test_numbers_and_numpy_become_tensors() -> None:
    nest = {
        "b": True,
        "i": 3,
        "f": 0.5,
        "s": np.float64(2),  # a float, by inheritance
        "a": np.arange(3, dtype=np.int16),
        "z": np.array(1j),
    }
    state: Any = fcg.place(nest)
    specs = [str(slot.spec) for slot in state._lease.arena.plan.slots]
    assert specs == ["i16[3]@cpu", "bool[]@cpu", "f32[]@cpu", "i64[]@cpu", "f32[]@cpu", "c128[]@cpu"]
    assert plain(state)["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1), (2, 1, 3)])
def test_small_and_empty_shapes(shape: tuple[int, ...]) -> None:
    leaf = torch.randn(shape)
    state: Any = fcg.place({"x": leaf, "y": torch.ones(2)})
    assert state["x"].shape == shape
    assert torch.equal(plain(state)["x"], leaf)
    assert torch.equal(plain(state.replace(x=leaf * 2))["x"], leaf * 2)


@pytest.mark.parametrize("nest", [{}, [], None, {"a": None, "b": {}}, torch.ones(2), (torch.ones(1),)])
def test_any_pytree_is_a_state(nest: Any) -> None:
    state = fcg.place(nest)
    assert tree.flatten(state)[1] == tree.flatten(nest)[1]
    assert re.match(r"state: \w+, generation 0, on cpu, \d lea", repr(state))
    torch.testing.assert_close(plain(state), nest)


def test_strides_are_kept_where_dense() -> None:
    image = torch.randn(2, 3, 4, 5)
    leaves = {
        "channels_last": image.to(memory_format=torch.channels_last),
        "channels_last_3d": torch.randn(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
        "transposed": torch.randn(3, 4).t(),
        "permuted": image.permute(2, 0, 3, 1),
    }
    state: Any = fcg.place(leaves)
    for name, leaf in leaves.items():
        assert state[name].stride() == leaf.stride()
        assert torch.equal(plain(state)[name], leaf)
        assert plain(state)[name].stride() == leaf.stride()
    assert state["channels_last"].is_contiguous(memory_format=torch.channels_last)
    again: Any = fcg.fork(state)
    assert again._lease.arena.plan == state._lease.arena.plan


def test_leaves_with_gaps_become_dense() -> None:
    state: Any = fcg.place({"rows": torch.arange(12.0).view(3, 4)[::2], "columns": torch.ones(4, 6)[:, ::3]})
    assert state["rows"].is_contiguous()
    assert plain(state)["rows"].tolist() == [[0.0, 1.0, 2.0, 3.0], [8.0, 9.0, 10.0, 11.0]]
    assert state["columns"].numel() == 8


def test_conjugate_and_negative_views_are_resolved() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    state: Any = fcg.place(
        {"conj": z.conj(), "neg": z.clone().conj().imag, "transposed": z.clone().reshape(1, 2).mH}
    )
    assert not slots(state)[0].is_conj()
    assert not slots(state)[1].is_neg()
    assert state["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert state["neg"].tolist() == [-2.0, 4.0]
    assert state["transposed"].tolist() == [[1 - 2j], [3 + 4j]]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_ambient_modes_do_not_reach_the_arena(mode: Any) -> None:
    with mode():
        inner = torch.ones(2) * 2
        state: Any = fcg.place({"w": inner, "p": torch.nn.Parameter(torch.ones(2))})
        state = state.replace(w=inner + 1)
        twin = fcg.fork(state)
        copy = fcg.snapshot(state)
    for handle in (state, twin):
        for slot in slots(handle):
            assert (slot.is_inference(), slot.requires_grad) == (False, False)
    assert not any(leaf.is_inference() or leaf.requires_grad for leaf in tree.leaves(copy))
    assert copy["w"].tolist() == [3.0, 3.0]


def test_leaves_that_require_gradients_are_copied_without_them() -> None:
    w = torch.ones(2, requires_grad=True)
    state: Any = fcg.place({"leaf": w, "result": w * 2, "parameter": torch.nn.Parameter(torch.ones(1))})
    assert not any(slot.requires_grad or slot.grad_fn for slot in slots(state))
    assert w.grad is None
    assert fcg.snapshot({"r": w * 2})["r"].grad_fn is None


def test_the_tree_stays_the_callers() -> None:
    w = torch.ones(2)
    nest = {"w": w}
    state: Any = fcg.place(nest)
    w.fill_(7)
    assert state["w"].tolist() == [1.0, 1.0]
    assert nest["w"] is w


def test_handles_and_leaves_inside_a_tree_are_copied() -> None:
    state: Any = fcg.place({"w": torch.ones(2), "b": torch.zeros(1)})
    both: Any = fcg.place({"old": state, "target": state["w"], "again": state["w"]})
    state.replace(w=torch.zeros(2))
    assert both["old"]["w"].tolist() == both["target"].tolist() == both["again"].tolist() == [1.0, 1.0]


def test_device_is_the_leaves_own_unless_given() -> None:
    assert fcg.place({"w": torch.ones(1)}, "cpu")["w"].device.type == "cpu"
    assert fcg.place({}, "cpu")._lease.arena.device.type == "cpu"  # type: ignore[attr-defined]


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_leaves_that_are_no_dense_tensors_are_listed() -> None:
    nest = {
        "name": "adam",
        "strings": np.array(["a"]),
        "large": 2**70,
        "sparse": torch.eye(2).to_sparse(),
        "csr": torch.eye(2).to_sparse_csr(),
    }
    with pytest.raises(LayoutError, match=r"`state` has leaves that cannot be placed") as error:
        fcg.place(nest)
    text = str(error.value)
    assert "state['csr']  expected a dense tensor   got layout torch.sparse_csr" in text
    assert "state['large']  expected a dense tensor   got int" in text
    assert "state['name']  expected a dense tensor   got str" in text
    assert "state['sparse']  expected a dense tensor   got layout torch.sparse_coo" in text
    assert "state['strings']  expected a dense tensor   got ndarray" in text
    assert "keep names and settings as static fields" in text


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_without_memory_of_their_own_are_refused() -> None:
    class Wrapper(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("a place must not compute with it")

    wrapped = Tensor._make_wrapper_subclass(Wrapper, (2,))
    with pytest.raises(
        LayoutError, match=r"state\['x'\]  expected a dense tensor   got the subclass Wrapper"
    ):
        fcg.place({"x": wrapped})
    with pytest.raises(LayoutError, match=r"state  expected a dense tensor   got f32\[2\]@meta"):
        fcg.place(torch.ones(2, device="meta"))
    quantized = torch._empty_affine_quantized([2], scale=0.1, zero_point=0, dtype=torch.quint8)
    with pytest.raises(LayoutError, match=r"got a quantized or nested tensor"):
        fcg.place([quantized])


class Doubling(Tensor):
    """Sums to twice what an ordinary tensor sums to."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is Tensor.sum else out


class Image(Tensor):
    """An ordinary tensor, but for its class."""


class Counted(torch.nn.Parameter):
    """A parameter, but for its class."""


def test_parameters_are_placed_as_tensors() -> None:
    state: Any = fcg.place({"p": torch.nn.Parameter(torch.ones(1)), "c": Counted(torch.ones(2))})
    assert [type(one) for one in plain(state).values()] == [Tensor, Tensor]
    assert state["c"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", [Doubling, Image])
def test_other_subclasses_are_refused_and_the_advice_works(kind: type[Tensor]) -> None:
    """A step would see a plain tensor, and what the class decides would be lost without a word."""
    tree = {"x": torch.ones(2).as_subclass(kind)}
    with pytest.raises(
        LayoutError, match=rf"state\['x'\]  expected a dense tensor   got the subclass {kind.__name__}\n"
    ) as error:
        fcg.place(tree)
    assert "To fix: pass it as a plain tensor, `state['x'].as_subclass(torch.Tensor)`." in str(error.value)
    tree["x"] = tree["x"].as_subclass(Tensor)
    placed: Any = fcg.place(tree)
    assert placed["x"].sum() == 2


def test_one_tensor_under_two_names_is_refused() -> None:
    p = {"w": torch.ones(2, 3)}
    with pytest.raises(AliasError) as error:
        fcg.place({"params": p, "target": p})
    assert str(error.value) == (
        "two leaves of `state` share memory.\n"
        "  state['params']['w']  f32[2,3]@cpu   bytes 0 to 24\n"
        "  state['target']['w']  f32[2,3]@cpu   bytes 0 to 24\n"
        "Each leaf has memory of its own; shared memory would be updated twice per replay.\n"
        "To fix: copy it, `state['target'] = fcg.tree.map(torch.clone, state['params'])` (targets, EMA copies); "
        "or keep one leaf and read it twice in the loss (tied weights).\n"
        "Docs: help(functional_cg.AliasError)"
    )
    state: Any = {"params": p, "target": p}
    state["target"] = fcg.tree.map(torch.clone, state["params"])
    fcg.place(state)


def overlapping() -> list[Any]:
    base = torch.arange(24.0)
    image = torch.randn(1, 3, 2, 2).to(memory_format=torch.channels_last)
    z = torch.zeros(4, dtype=torch.complex64)
    return [
        [base, base[3:5]],
        [base[:10], base[9:]],
        [base[20:], base[:3], base[10:21]],
        [base.view(4, 6)[:, :3], base.view(4, 6)[:, 2:4]],
        [base.view(4, 6)[::2], base.view(4, 6)[2]],
        [base.view(4, 6).t(), base.view(4, 6)[1:2]],
        [base.view(torch.int32), base[:1]],
        [base.detach(), torch.nn.Parameter(base)],
        [image, image.permute(0, 2, 3, 1)],
        [z, torch.view_as_real(z)[1:]],
        [z.conj(), z],
    ]


@pytest.mark.parametrize("leaves", overlapping())
def test_overlapping_views_are_refused_with_both_paths(leaves: list[Tensor]) -> None:
    with pytest.raises(
        AliasError, match=r"two leaves of `state` share memory.\n  state\[\d\].*\n  state\[\d\]"
    ):
        fcg.place(leaves)


def test_the_pair_that_overlaps_is_the_one_named() -> None:
    base = torch.arange(10.0)
    with pytest.raises(
        AliasError, match=r"state\[1\]  f32\[3\]@cpu   bytes 8 to 20\n  state\[3\]  f32\[1\]@cpu"
    ):
        fcg.place([base[:2], base[2:5], base[5:], base[4:5]])


def disjoint() -> list[Any]:
    base = torch.arange(24.0)
    z = torch.zeros(4, dtype=torch.complex64)
    return [
        [base[:10], base[10:]],
        list(base.view(4, 6).unbind(1)),
        list(base.view(4, 6).unbind(0)),
        [base.view(4, 6)[:, :3], base.view(4, 6)[:, 3:]],
        [base.view(4, 6)[::2, ::2], base.view(4, 6)[1::2], base.view(4, 6)[::2, 1::2]],
        [z.real, z.imag],
        [base[:0], base, base[3:3]],
        list(base.view(2, 12).t().split(4)),
    ]


@pytest.mark.parametrize("leaves", disjoint())
def test_views_that_only_interleave_are_placed(leaves: list[Tensor]) -> None:
    torch.testing.assert_close(plain(fcg.place(leaves)), leaves, rtol=0, atol=0, check_stride=False)


@pytest.mark.parametrize(
    "leaf",
    [
        torch.ones(1).expand(3),
        torch.ones(2, 1).expand(2, 3),
        torch.as_strided(torch.arange(5.0), (3, 2), (1, 1)),
        torch.arange(6.0).unfold(0, 3, 1),
    ],
)
def test_leaf_that_overlaps_itself_is_refused(leaf: Tensor) -> None:
    with pytest.raises(AliasError, match=r"a leaf of `state` overlaps itself.\n  state\['x'\]"):
        fcg.place({"x": leaf})
    fcg.place({"x": leaf.clone(memory_format=torch.contiguous_format)})


@pytest.mark.parametrize(
    "leaf", [torch.arange(24.0).as_strided((2, 3), (12, 2)), torch.arange(9.0).as_strided((2, 2), (3, 5))]
)
def test_leaf_with_odd_strides_that_does_not_overlap_is_placed(leaf: Tensor) -> None:
    assert torch.equal(plain(fcg.place({"x": leaf}))["x"], leaf)


def test_ten_thousand_views_of_one_tensor_are_checked_in_a_sweep() -> None:
    rows = torch.zeros(10_000, 4).unbind(0)
    columns = torch.zeros(50, 2_000).unbind(1)
    start = time.perf_counter()
    fcg.place([*rows, *columns])
    assert time.perf_counter() - start < 10


# --- the arena itself --------------------------------------------------------------------------------------


def test_slabs_are_zero_between_slots_for_ever() -> None:
    state: Any = fcg.place(
        {"a": torch.full((3,), 5.0), "b": torch.full((1500,), 5.0), "c": torch.full((5,), 5.0)}
    )
    state = state.replace(a=torch.full((3,), 6.0), c=torch.full((5,), 6.0))
    (slab,) = state._lease.arena.slabs
    padding = torch.ones(slab.numel(), dtype=torch.bool)
    for slot in slots(state):
        padding[slot.storage_offset() : slot.storage_offset() + slot.numel()] = False
    assert padding.sum() > 0
    assert not slab[padding].any()


def test_fields_of_a_state_class_are_roles() -> None:
    state: Any = fcg.TrainState.create(
        params={"w": torch.ones(3), "n": torch.ones(2, dtype=torch.float64)},
        optimizer=fcg.optim.adamw(1e-3, weight_decay=0.0),
        accumulate=True,
    )
    layout = state._lease.arena.plan
    roles = {(slab.role, dtype_name(slab.dtype)) for slab in layout.slabs}
    assert {
        ("params", "f32"),
        ("params", "f64"),
        ("opt_state", "f32"),
        ("grads", "f32"),
        ("step", "i64"),
    } <= roles
    for path, slot in zip(state._lease.paths, layout.slots, strict=True):
        assert layout.slabs[slot.slab].role == path[0].name


def test_allocation_under_inference_mode_is_ordinary_memory() -> None:
    spec = BufferSpec.of(torch.ones(3))
    with torch.inference_mode():
        arena = Arena.allocate(plan([spec], ["state"]), torch.device("cpu"))
    assert not arena.slabs[0].is_inference()


def test_specs_print_short() -> None:
    leaves = [
        torch.ones(8, 1024, dtype=torch.bfloat16),
        torch.ones((), dtype=torch.bool),
        torch.ones(2, dtype=torch.uint16),
    ]
    assert [str(BufferSpec.of(leaf)) for leaf in leaves] == ["bf16[8,1024]@cpu", "bool[]@cpu", "u16[2]@cpu"]
    assert dtype_name(torch.float8_e4m3fn) == "f8_e4m3fn"
    assert BufferSpec.of(leaves[0]).nbytes == 16384
