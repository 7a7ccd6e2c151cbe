"""Handles and leaves: nothing a caller does to them changes the arena, and nothing old shows a new value."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import textwrap
import threading
import timeit
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import einops
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import functional_cg as fcg
from functional_cg import tree
from functional_cg.errors import DonatedStateError, LayoutError, ReadOnlyError
from functional_cg.state.handle import Handle, Leaf
from functional_cg.tensors.aten import copies
from functional_cg.testing import assert_trees_all_equal
from functional_cg.testing.strategies import pytrees
from tests.forked import Program

VALUES = torch.arange(6.0).view(2, 3) - 2.5


def placed() -> Any:
    """A state typed as users' code is: by what it stands for."""
    return fcg.place({"w": VALUES, "b": torch.tensor([1.0, 2.0, 3.0]), "n": torch.tensor(3)})


@contextmanager
def untouched(state: Any) -> Iterator[Any]:
    """Check that what lies in the arena, and the slots' views of it, are bit by bit what they were."""
    arena = state._lease.arena

    def image() -> Any:
        slots = [
            (s.shape, s.stride(), s.storage_offset(), s.untyped_storage()._cdata, s.requires_grad, s.grad)
            for s in arena.slots
        ]
        return slots, [slab.clone() for slab in arena.slabs]

    slots, slabs = image()
    yield state
    assert image()[0] == slots
    assert all(torch.equal(a, b) for a, b in zip(arena.slabs, slabs, strict=True))


# --- reading a leaf ----------------------------------------------------------------------------------------


def backward_through(leaf: Tensor) -> Tensor:
    x = torch.ones(4, 3, requires_grad=True)
    (x @ leaf.T).tanh().sum().backward()
    assert x.grad is not None
    return x.grad


def saved_by_a_function(leaf: Tensor) -> Tensor:
    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(w)
            return x * w

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * ctx.saved_tensors[0], None

    x = torch.ones(2, 3, requires_grad=True)
    return torch.autograd.grad(Times.apply(x, leaf).sum(), x)[0]


def into_a_module(leaf: Tensor) -> Tensor:
    module = torch.nn.Linear(3, 2, bias=False)
    module.load_state_dict({"weight": leaf})
    with torch.no_grad():
        module.weight.mul_(2)
    return module.weight.detach()


def copied_into(leaf: Tensor) -> Tensor:
    out = torch.zeros(2, 3)
    torch._foreach_copy_([out], [leaf])
    out.copy_(leaf).add_(leaf)
    return torch.add(leaf, out, out=torch.empty(2, 3))


READS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda w: (w * 2 + 1) @ w.T,
    "reflected": lambda w: 1 - w,
    "comparison": lambda w: w > 0,
    "indexing": lambda w: (w[0], w[:, 1], w[..., None], w[w > 0], w[torch.tensor([1, 0])]),
    "iteration": lambda w: list(w),
    "unpacking": lambda w: (lambda a, b: a - b)(*w),
    "views": lambda w: (w.T, w.mT, w.view(-1), w.reshape(3, 2), w.unbind(1), w.expand(2, 2, 3), w.real),
    "view as int": lambda w: w.view(torch.int32),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "clone": lambda w: w.clone(),
    "dtypes": lambda w: (w.double(), w.half(), w.to(torch.int64), w.float()),
    "cpu": lambda w: w.cpu(),
    "contiguous": lambda w: w.contiguous(),
    "as_subclass": lambda w: w.as_subclass(Tensor) + 0,
    "make_subclass": lambda w: Tensor._make_subclass(Tensor, w) + 0,
    "Tensor": lambda w: torch.Tensor(w) + 0,
    "as_tensor": lambda w: torch.as_tensor(w),
    "asarray": lambda w: torch.asarray(w) + 0,
    "as_strided": lambda w: w.as_strided((3,), (2,), w.storage_offset()),
    "scatter": lambda w: w.slice_scatter(torch.zeros(1, 3), 0, 0, 1),
    "stack": lambda w: torch.stack([w, w]),
    "broadcast": lambda w: torch.broadcast_tensors(w, torch.ones(4, 2, 3)),
    "foreach": lambda w: torch._foreach_add([w, w], 1),
    "item": lambda w: (w[0, 0].item(), float(w[0, 1]), bool(w[0, 1]), int(w[1, 1])),
    "tolist": lambda w: w.tolist(),
    "format": lambda w: f"{w[0, 0]:.3f} {w[1, 2]}",
    "equal": lambda w: (torch.equal(w, w), torch.allclose(w, w)),
    "numpy": lambda w: w.numpy(),
    "np.asarray": lambda w: np.asarray(w),
    "np.asarray f64": lambda w: np.asarray(w, dtype=np.float64),
    "np.from_dlpack": lambda w: np.from_dlpack(w),
    "from_dlpack": lambda w: torch.from_dlpack(w),
    "utils.from_dlpack": lambda w: torch.utils.dlpack.from_dlpack(w),
    "einops": lambda w: einops.rearrange(w, "a b -> b a"),
    "einops reduce": lambda w: einops.reduce(w, "a b -> b", "sum"),
    "einsum": lambda w: torch.einsum("ab,cb->ac", w, w),
    "linear": lambda w: F.linear(torch.ones(1, 3), w),
    "functional_call": lambda w: torch.func.functional_call(
        torch.nn.Linear(3, 2, bias=False), {"weight": w}, torch.ones(1, 3)
    ),
    "attention": lambda w: F.scaled_dot_product_attention(w[None], w[None], w[None]),
    "batch_norm eval": lambda w: F.batch_norm(torch.ones(4, 3), w[0], w[1].abs(), training=False),
    "func.grad": lambda w: torch.func.grad(lambda x: (x * x).sum())(w),
    "func.grad closure": lambda w: torch.func.grad(lambda x: (x * w).sum())(torch.ones(2, 3)),
    "vmap": lambda w: torch.func.vmap(lambda row: row.sum())(w),
    "vmap closure": lambda w: torch.func.vmap(lambda x: x * w)(torch.ones(4, 2, 3)),
    "jvp": lambda w: torch.func.jvp(torch.sin, (w,), (torch.ones(2, 3),)),
    "backward": backward_through,
    "autograd.Function": saved_by_a_function,
    "load_state_dict": into_a_module,
    "copied into": copied_into,
    "deepcopy": lambda w: copy.deepcopy(w),
    "copy": lambda w: copy.copy(w),
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "parameters_to_vector": lambda w: torch.nn.utils.parameters_to_vector([w]),
    "vector_norm": lambda w: torch.linalg.vector_norm(w),
    "empty_like": lambda w: torch.zeros_like(w),
    "sparse": lambda w: w.to_sparse().to_dense(),
    "compile": lambda w: torch.compile(lambda x: x * 2, backend="eager")(w),
    "sizes": lambda w: (len(w), w.shape, w.stride(), w.dtype, w.device, w.nbytes, w.is_contiguous()),
    "flags": lambda w: (w.requires_grad, w.is_leaf, w.grad, w.grad_fn, w.is_inference()),
}
# What reads only the spec, or hands back the leaf itself: no value is seen.
NO_VALUE = {"sizes", "flags", "empty_like", "cpu", "contiguous", "as_tensor"}


def assert_same(got: Any, expected: Any) -> None:
    if isinstance(expected, (list, tuple)) and not isinstance(expected, torch.Size):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, (Tensor, np.ndarray)):
        assert isinstance(got, type(expected))
        assert got.dtype == expected.dtype
        torch.testing.assert_close(torch.as_tensor(got).clone(), torch.as_tensor(expected), rtol=0, atol=0)
    else:
        assert got == expected


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_leaf_reads_like_a_tensor(read: Callable[[Tensor], Any]) -> None:
    with untouched(placed()) as state:
        assert_same(read(state["w"]), read(VALUES.clone()))


NEEDS_GRAD_MODE = {"backward", "autograd.Function", "flags"}


@pytest.mark.parametrize(
    "read",
    [READS[n] for n in READS if n not in NEEDS_GRAD_MODE],
    ids=[n for n in READS if n not in NEEDS_GRAD_MODE],
)
def test_a_leaf_reads_like_a_tensor_in_inference_mode(read: Callable[[Tensor], Any]) -> None:
    with torch.inference_mode(), untouched(placed()) as state:
        assert_same(read(state["w"]), read(VALUES.clone()))


def tensors_of(result: Any) -> list[Any]:
    if isinstance(result, (list, tuple)):
        return [t for item in result for t in tensors_of(item)]
    return [result] if isinstance(result, (Tensor, np.ndarray)) else []


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_is_read_from_a_leaf_cannot_be_used_to_write_it(read: Callable[[Tensor], Any]) -> None:
    with untouched(placed()) as state:
        for result in tensors_of(read(state["w"])):
            try:
                if isinstance(result, np.ndarray) and result.flags.writeable:
                    result[...] = 7
                elif isinstance(result, Tensor):
                    result.detach().zero_()
            except ReadOnlyError:
                assert isinstance(result, Leaf)
            else:
                assert not isinstance(result, Leaf)


@pytest.mark.parametrize(
    "read", [READS[n] for n in READS if n not in NO_VALUE], ids=[n for n in READS if n not in NO_VALUE]
)
def test_after_donation_a_leaf_raises_and_results_keep_their_value(read: Callable[[Tensor], Any]) -> None:
    state = placed()
    leaf = state["w"]
    results = tensors_of(read(leaf))
    values = [copy.deepcopy(result) for result in results]
    state.replace(w=torch.full((2, 3), 9.0))
    # RuntimeError: load_state_dict puts its own around
    with pytest.raises(RuntimeError, match=r"`state\['w'\]` was used after `state` was donated to `replace`"):
        read(leaf)
    for result, value in zip(results, values, strict=True):
        if isinstance(result, Leaf):  # a view: as donated as its base
            with pytest.raises(DonatedStateError, match=r"`state\['w'\]` was used"):
                result.clone()
        else:
            assert_same(result, value)


def test_a_saved_leaf_raises_in_a_backward_after_donation() -> None:
    state = placed()
    x = torch.ones(4, 3, requires_grad=True)
    loss = (x @ state["w"].T).tanh().sum()
    state.replace(w=torch.zeros(2, 3))
    with pytest.raises(DonatedStateError, match=r"`state\['w'\]` was used after"):
        loss.backward()


def test_torch_save_and_load_give_an_ordinary_tensor() -> None:
    buffer = io.BytesIO()
    torch.save({"w": placed()["w"]}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["w"]
    assert type(loaded) is Tensor
    assert torch.equal(loaded, VALUES)


def test_a_view_of_a_leaf_is_a_leaf_so_that_no_weight_is_cloned() -> None:
    leaf = placed()["w"]
    for view in (
        leaf.T,
        leaf[0],
        leaf.view(-1),
        leaf.detach(),
        leaf.data,
        einops.rearrange(leaf, "a b -> b a"),
    ):
        assert type(view) is Leaf
    assert type(leaf + 0) is Tensor
    calls: list[Any] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with Recorder():
        F.linear(torch.randn(1, 3), leaf)
    names = {str(func.overloadpacket) for func in calls}
    assert "aten.mm" in names or "aten.linear" in names
    assert names.isdisjoint({"aten.clone", "aten.copy_", "aten._to_copy"})


def test_views_of_leaves_of_two_states_are_leaves_of_their_own_state() -> None:
    one, two = placed(), placed()
    a, b = torch.broadcast_tensors(one["w"], two["w"][:1])
    two.replace(w=torch.zeros(2, 3))
    assert torch.equal(a.clone(), VALUES)
    with pytest.raises(DonatedStateError, match="was used after"):
        b.clone()


def test_complex_views_of_a_leaf_read_right() -> None:
    z = torch.tensor([[1 + 2j, 3 - 4j]])
    leaf: Any = fcg.place({"z": z})["z"]
    for view in (
        lambda z: z.conj(),
        lambda z: z.mH,
        lambda z: z.conj().imag,
        lambda z: torch.view_as_real(z),
    ):
        assert view(leaf).tolist() == view(z).tolist()
        assert torch.equal(view(leaf) * 2, view(z) * 2)
        assert (
            view(leaf).resolve_conj().resolve_neg().numpy().tolist()
            == view(z).resolve_conj().resolve_neg().numpy().tolist()
        )


def test_a_leaf_taken_in_inference_mode_works_outside() -> None:
    state = placed()
    with torch.inference_mode():
        leaf = state["w"]
        view = leaf.T
        assert (leaf * 2).is_inference()
    x = torch.ones(2, 3, requires_grad=True)
    (x * leaf * view.T).sum().backward()
    assert torch.equal(x.grad, VALUES * VALUES)  # type: ignore[arg-type]


def test_autocast_casts_a_leaf_and_keeps_no_copy_of_it() -> None:
    state = placed()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = F.linear(torch.ones(1, 3), state["w"])
        state = state.replace(w=torch.zeros(2, 3))
        after = F.linear(torch.ones(1, 3), state["w"])
    assert before.dtype is torch.bfloat16
    assert before.any()
    assert not after.any()


def test_repr_of_a_leaf_has_path_spec_and_generation_first() -> None:
    state = placed()
    leaf = state["w"]
    assert repr(leaf) == f"state['w']  f32[2,3]@cpu  generation 0\n{VALUES!r}"
    state.replace()
    assert repr(leaf) == "state['w']  f32[2,3]@cpu  generation 0, donated to `replace`"


# --- writing to a leaf -------------------------------------------------------------------------------------


def custom_mutation(leaf: Tensor) -> None:
    with torch.library._scoped_library("fcg_test_state", "FRAGMENT") as library:
        library.define("inc(Tensor(a!) x) -> ()")
        library.impl("inc", lambda x: x.add_(1), "CPU")
        torch.ops.fcg_test_state.inc(leaf)


def augmented(leaf: Any) -> None:
    leaf += 1


def item_of(leaf: Any) -> None:
    leaf[0] = 1.0


def item_of_view(leaf: Any) -> None:
    leaf.view(-1)[0] = 1.0


def attribute(name: str, value: Any = None) -> Callable[[Any], None]:
    return lambda leaf: setattr(leaf, name, value)


WRITES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda w: w.add_(1),
    "Tensor.add_": lambda w: Tensor.add_(w, 1),
    "aten.add_": lambda w: torch.ops.aten.add_(w, 1),
    "+=": augmented,
    "[0] =": item_of,
    "view[0] =": item_of_view,
    "copy_": lambda w: w.copy_(torch.zeros(2, 3)),
    "zero_": lambda w: w.zero_(),
    "normal_": lambda w: w.normal_(),
    "data.add_": lambda w: w.data.add_(1),
    "detach.add_": lambda w: w.detach().add_(1),
    "view.add_": lambda w: w.view(-1).add_(1),
    "T.zero_": lambda w: w.T.zero_(),
    "[0].zero_": lambda w: w[0].zero_(),
    "as int": lambda w: w.view(torch.int32).zero_(),
    "as_subclass": lambda w: w.as_subclass(Tensor).zero_(),
    "make_subclass": lambda w: Tensor._make_subclass(Tensor, w).zero_(),
    "FloatTensor": lambda w: torch.FloatTensor(w).zero_(),
    "as_tensor": lambda w: torch.as_tensor(w).zero_(),
    "numpy protocol": lambda w: torch.asarray(w).zero_(),
    "out=": lambda w: torch.add(torch.ones(2, 3), 1, out=w),
    "out= of a reduction": lambda w: torch.sum(torch.ones(4, 3), 0, out=w[0]),
    "_foreach_add_": lambda w: torch._foreach_add_([w], 1),
    "_foreach_copy_": lambda w: torch._foreach_copy_([w], [torch.zeros(2, 3)]),
    "_fused_sgd_": lambda w: torch._fused_sgd_(
        [w],
        [torch.ones(2, 3)],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    ),
    "index_put_": lambda w: torch.index_put_(w, (torch.tensor([0]),), torch.tensor(0.0)),
    "masked_fill_": lambda w: w.masked_fill_(w > 0, 0.0),
    "scatter_": lambda w: w.scatter_(0, torch.zeros(1, 3, dtype=torch.int64), 0.0),
    "init": lambda w: torch.nn.init.zeros_(w),
    "relu inplace": lambda w: F.relu(w, inplace=True),
    "dropout inplace": lambda w: F.dropout(w, 0.5, True, inplace=True),
    "embedding max_norm": lambda w: F.embedding(torch.tensor([0]), w, max_norm=0.1),
    "batch_norm": lambda w: F.batch_norm(torch.randn(4, 3), w[0], w[1], training=True),
    "native_batch_norm": lambda w: torch.native_batch_norm(
        torch.randn(4, 3), None, None, w[0], w[1], True, 0.1, 1e-5
    ),
    "instance_norm": lambda w: F.instance_norm(torch.randn(4, 3, 5), w[0], w[1], use_input_stats=True),
    "batch_norm_update_stats": lambda w: torch.batch_norm_update_stats(torch.randn(4, 3), w[0], w[1], 0.1),
    "vmap": lambda w: torch.func.vmap(lambda row: row.add_(1))(w),
    "functionalize": lambda w: torch.func.functionalize(lambda x: x.add_(1))(w),
    "vector_to_parameters": lambda w: torch.nn.utils.vector_to_parameters(torch.zeros(6), [w]),
    "custom op": custom_mutation,
    "set_": lambda w: w.set_(torch.ones(3)),
    "set_ from it": lambda w: torch.empty(0).set_(w),
    "resize_": lambda w: w.resize_(10),
    "resize_as_": lambda w: w.resize_as_(torch.ones(10)),
    "t_": lambda w: w.t_(),
    "squeeze_": lambda w: w.squeeze_(),
    "__setstate__": lambda w: w.__setstate__((torch.ones(1), 0, (1,), (1,))),
    "share_memory_": lambda w: w.share_memory_(),
    "requires_grad_": lambda w: w.requires_grad_(),
    "nn.Parameter": lambda w: torch.nn.Parameter(w),
    "register_buffer": lambda w: _buffer_of(w).zero_(),
    ".requires_grad =": attribute("requires_grad", True),
    ".grad =": attribute("grad", torch.ones(2, 3)),
    ".data =": attribute("data", torch.ones(2, 3)),
    ".names =": attribute("names", ["a", "b"]),
    ".anything =": attribute("anything"),
    "untyped_storage": lambda w: w.untyped_storage().fill_(0),
    "storage": lambda w: w.storage().fill_(0),
    "data_ptr": lambda w: w.data_ptr(),
}


def _buffer_of(leaf: Tensor) -> Any:
    module = torch.nn.Module()
    module.register_buffer("b", leaf)
    return module.b


@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=["", "no_grad", "inference"]
)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_to_a_leaf_raises(write: Callable[[Any], Any], mode: Any) -> None:
    with untouched(placed()) as state, mode():
        leaf = state["w"]
        with pytest.raises(ReadOnlyError, match=r"`state\['w'\]") as error:
            write(leaf)
        assert "leaves of a state are read-only" in str(error.value)
        assert "`fcg.snapshot(state)`" in str(error.value)
        assert torch.equal(leaf.clone(), VALUES)


def test_augmented_assignment_does_not_rebind() -> None:
    """A TypeError in ``__iadd__`` would make Python fall back to ``leaf = leaf + 1``, in silence."""
    batch = {"w": placed()["w"]}
    with pytest.raises(ReadOnlyError, match="was written to"):
        batch["w"] += 1
    assert type(batch["w"]) is Leaf
    assert not issubclass(ReadOnlyError, TypeError)


def test_full_message_of_a_write() -> None:
    with pytest.raises(ReadOnlyError) as error:
        placed()["w"].add_(1)
    assert str(error.value) == (
        "`state['w']` was written to; leaves of a state are read-only.\n"
        "The state changes only by what a step returns.\n"
        "To fix: `state = state.replace(...)`, or `state = fcg.tree.at(lambda s: ..., state, value)`; "
        "for a copy of your own, `.clone()` or `fcg.snapshot(state)`.\n"
        "Docs: help(functional_cg.ReadOnlyError)"
    )


def test_what_could_crash_raises() -> None:
    """In a process of its own: on a tensor without memory these once read a null pointer."""
    program = """
        import torch, functional_cg as fcg
        from torch.multiprocessing.reductions import reduce_tensor
        leaf = fcg.place({"w": torch.ones(2, 3)})["w"]
        calls = {
            "to_dlpack": lambda: torch.utils.dlpack.to_dlpack(leaf),
            "from_to_dlpack": lambda: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(leaf)),
            "_to_dlpack": lambda: torch._C._to_dlpack(leaf),
            "apply_": lambda: leaf.apply_(lambda v: 0.0),
            "map_": lambda: leaf.map_(torch.ones(2, 3), lambda a, b: 0.0),
            "share_memory_": lambda: leaf.share_memory_(),
            "reduce_tensor": lambda: reduce_tensor(leaf),
            "storage": lambda: bytes(leaf.untyped_storage()),
            "typed storage": lambda: leaf.storage()[0],
            "C storage": lambda: torch.Tensor.untyped_storage(leaf)[0],
            "swap_tensors": lambda: torch.utils.swap_tensors(leaf, torch.zeros(2, 3)),
            "memoryview": lambda: memoryview(leaf),
        }
        for name, call in calls.items():
            try:
                call()
            except (RuntimeError, TypeError) as error:
                print(name, "raised")
            else:
                print(name, "RETURNED")
        assert leaf.clone().tolist() == [[1.0] * 3] * 2
    """
    with Program("-c", textwrap.dedent(program)) as done:
        assert done.end(timeout=120) == 0, done.err
        assert "RETURNED" not in done.out, done.out
        assert done.out.count("raised") == 12


def test_no_array_interface_that_would_dangle() -> None:
    assert not hasattr(placed()["w"], "__cuda_array_interface__")


# --- donation ----------------------------------------------------------------------------------------------


@fcg.graph_step
def double(state: Any, x: Tensor) -> Any:
    return tree.map(lambda leaf: leaf * 2, state), {"x": x + 1}


def test_full_message_after_a_step() -> None:
    old: Any = fcg.place({"w": torch.ones(2)})
    leaf = old["w"]
    state, _ = double(old, torch.ones(()))
    with pytest.raises(DonatedStateError) as error:
        leaf.clone()
    assert str(error.value) == (
        "`state['w']` was used after `state` was donated to `double` (generation 0).\n"
        "Its buffers now hold generation 1.\n"
        "To fix: use the returned state, `state, metrics = double(state, batch)`, or `state.latest()`; "
        "to keep the old one, call `old = fcg.snapshot(state)` first.\n"
        "Docs: help(functional_cg.DonatedStateError)"
    )
    assert state["w"].tolist() == [2.0, 2.0]
    double.close()


USES: dict[str, Callable[[Any], Any]] = {
    "field": lambda s: s.params,
    "leaf": lambda s: s.params["w"],
    "branch": lambda s: s.params,
    "method": lambda s: s.apply_gradients({}),
    "static": lambda s: s.optimizer,
    "tree": lambda s: s.tree,
    "replace": lambda s: s.replace(step=1),
    "at": lambda s: fcg.tree.at(lambda t: t.step, s, 1),
    "snapshot": fcg.snapshot,
    "fork": fcg.fork,
    "place": fcg.place,
    "map": lambda s: tree.map(torch.neg, s),
    "leaves": tree.leaves,
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_donated_handle_raises(use: Callable[[Any], Any]) -> None:
    state = fcg.TrainState.create(params={"w": torch.ones(2)}, optimizer=fcg.optim.sgd(0.1))
    branch = state.params
    new = state.replace(step=5)
    with pytest.raises(
        DonatedStateError, match=r"`state.*` was used after `state` was donated to `replace` \(generation 0\)"
    ):
        use(state)
    with pytest.raises(DonatedStateError, match=r"`state.params\['w'\]` was used|`state.params` was used"):
        branch["w"]
    assert new.step.item() == 5


def test_the_advice_names_the_call_that_donated() -> None:
    for edit, advice in (
        (lambda s: s.replace(n=1), r"`state = state.replace\(...\)`"),
        (
            lambda s: fcg.tree.at(lambda t: t["n"], s, 1),
            r"`state = fcg.tree.at\(lambda s: ..., state, value\)`",
        ),
    ):
        state = placed()
        edit(state)
        with pytest.raises(
            DonatedStateError, match=rf"use the returned state, {advice}, or `state.latest\(\)`"
        ):
            state["w"]


def test_repr_generation_and_latest_of_a_donated_handle_work() -> None:
    state = placed()
    branch: Any = fcg.place({"p": {"w": torch.ones(1)}})
    part = branch["p"]
    new = state.replace(n=5)
    assert repr(state).splitlines() == [
        "state: dict, generation 0, donated to `replace` (its buffers now hold generation 1), on cpu, 3 leaves, 44 B",
        "  state['b']  f32[3]    12 B",
        "  state['n']  i64[]      8 B",
        "  state['w']  f32[2,3]  24 B",
    ]
    assert (state.generation, new.generation) == (0, 1)
    assert state.latest()["n"].item() == 5
    assert state.latest().generation == 1
    branch.replace(p={"w": torch.zeros(1)})
    assert part.latest()["w"].tolist() == [0.0]
    title = "state['p']: dict, generation 1, on cpu, 1 leaf, 4 B"
    assert repr(part.latest()) == f"{title}\n  state['p']['w']  f32[1]  4 B"


def test_a_second_handle_of_one_generation_is_donated_too() -> None:
    state = placed()
    second = state.latest()
    state.replace(n=5)
    with pytest.raises(
        DonatedStateError, match=r"`state` was used after `state` was donated \(generation 0\)"
    ):
        second.tree  # noqa: B018


def test_two_threads_that_replace_one_state_have_one_winner() -> None:
    for _ in range(20):
        state, barrier, results = placed(), threading.Barrier(4), []

        def run(value: int, state: Any = state, barrier: Any = barrier, results: Any = results) -> None:
            barrier.wait()
            try:
                results.append(state.replace(n=value))
            except DonatedStateError:
                results.append(None)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [r for r in results if r is not None]
        assert len(winners) == 1
        assert state.latest().generation == 1
        assert winners[0]["n"].item() == state.latest()["n"].item()


def test_the_lease_ends_with_the_last_handle_and_leaf() -> None:
    state = placed()
    lease = weakref.ref(state._lease)
    leaf, branch = state["w"].T, fcg.place({"p": {"w": torch.ones(1)}})
    del state
    assert lease() is not None
    del leaf
    assert lease() is None  # by reference counts alone: handles make no cycles
    part = branch["p"]
    lease = weakref.ref(branch._lease)  # type: ignore[attr-defined]
    del branch
    assert lease() is not None
    del part
    assert lease() is None


# --- handles stand for any pytree --------------------------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])


@tree.register_dataclass(static=("scale",))
@dataclass(frozen=True)
class Model:
    weight: Any
    bias: Any = None
    scale: float = 2.0

    @property
    def doubled(self) -> Any:
        return self.weight * 2

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale

    def norm(self) -> Tensor:
        return self.weight.norm()


def test_a_mapping_forwards_its_protocol() -> None:
    nest = {"w": torch.ones(2), "b": {"x": torch.zeros(1), "y": None}}
    state: Any = fcg.place(nest)
    assert list(state) == list(state.keys()) == ["w", "b"]
    assert [name for name, _ in state.items()] == ["w", "b"]
    assert state.get("nope", 3) == 3
    assert ("w" in state, "nope" in state, len(state), bool(state)) == (True, False, 2, True)
    assert {**state}["w"].tolist() == [1.0, 1.0]
    assert dict(state)["w"].tolist() == [1.0, 1.0]
    assert (lambda w, b: w.tolist())(**state) == [1.0, 1.0]
    assert state["b"]["y"] is None
    assert type(state["b"]) is Handle
    assert [type(value) for value in state.values()] == [Leaf, Handle]
    with pytest.raises(KeyError, match="nope"):
        state["nope"]
    with pytest.raises(AttributeError, match="'dict' object has no attribute 'w'"):
        state.w  # noqa: B018


def test_keys_that_look_like_names_of_the_handle_are_items() -> None:
    state: Any = fcg.place(
        {"tree": torch.ones(1), "replace": torch.zeros(1), "generation": 3, 0: 4, None: 5, (1, 2): 6}
    )
    assert state["tree"].tolist() == [1.0]
    assert (state["generation"].item(), state[0].item(), state[None].item(), state[1, 2].item()) == (
        3,
        4,
        5,
        6,
    )
    assert state.generation == 0
    assert state.replace(tree=torch.zeros(1))["tree"].tolist() == [0.0]


def test_fields_hidden_by_names_of_the_handle_are_reached_through_tree() -> None:
    @tree.register_dataclass
    class Shadowed:
        generation: Any
        tree: Any

    state: Any = fcg.place(Shadowed(torch.ones(1), torch.zeros(1)))
    assert state.generation == 0
    assert state.tree.generation.tolist() == [1.0]
    assert state.replace(tree=torch.ones(1)).tree.tree.tolist() == [1.0]


def test_sequences_forward_their_protocol() -> None:
    for kind in (list, tuple):
        state: Any = fcg.place(kind([torch.tensor(0), torch.tensor(1), [torch.tensor(2)]]))
        first, second, rest = state
        assert (first.item(), second.item(), rest[0].item(), state[-1][0].item()) == (0, 1, 2, 2)
        assert type(state[1:]) is kind
        assert [leaf.item() for leaf in state[:2]] == [0, 1]
        assert (len(state), bool(state)) == (3, True)
        assert [type(item) for item in reversed(state)] == [Handle, Leaf, Leaf]
        for index in (3, -4):
            with pytest.raises(IndexError, match="out of range"):
                state[index]
    assert not fcg.place([])


def test_namedtuples_forward_fields_items_and_methods() -> None:
    state: Any = fcg.place(Pair(torch.tensor(1), {"x": torch.tensor(2)}))
    left, right = state
    assert (left.item(), right["x"].item(), state.left.item(), state[1]["x"].item(), len(state)) == (
        1,
        2,
        1,
        2,
        2,
    )
    assert state._replace(left=3)[0] == 3
    assert list(state._asdict()) == ["left", "right"]


def test_dataclasses_forward_fields_methods_properties_and_statics() -> None:
    state: Any = fcg.place(Model(torch.tensor([3.0, 4.0])))
    assert (state.scale, state.bias, state.norm().item()) == (2.0, None, 5.0)
    assert state.doubled.tolist() == [6.0, 8.0]
    assert state.tree(torch.ones(2)).tolist() == [6.0, 8.0]
    assert "weight" in dir(state)
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'nope'"):
        state.nope  # noqa: B018
    with pytest.raises(TypeError, match="not subscriptable"):
        state["weight"]
    assert not hasattr(state, "__array__")
    assert type(state.tree) is Model


@pytest.mark.parametrize("kind", [OrderedDict, lambda d: defaultdict(list, d)])
def test_other_mappings_keep_their_type(kind: Callable[[Any], Any]) -> None:
    nest = kind({"b": torch.ones(1), "a": torch.zeros(1)})
    state: Any = fcg.place(nest)
    assert state["b"].tolist() == [1.0]
    assert type(state.tree) is type(nest)
    with pytest.raises(KeyError, match="c"):
        state["c"]


def test_a_bare_tensor_is_a_state() -> None:
    state: Any = fcg.place(torch.ones(2, 3))
    assert (state.shape, state.sum().item(), len(state)) == ((2, 3), 6.0, 2)
    assert fcg.tree.at(lambda s: s, state, torch.zeros(2, 3)).tree.sum().item() == 0.0


@given(pytrees())
def test_a_handle_flattens_as_its_tree(nest: Any) -> None:
    state = fcg.place(nest)
    copied = fcg.snapshot(state)
    assert tree.flatten(state)[1] == tree.flatten(nest)[1] == tree.flatten(copied)[1]
    assert tree.flatten(state.tree)[1] == tree.flatten(nest)[1]  # type: ignore[attr-defined]
    for leaf, value, old in zip(tree.leaves(state), tree.leaves(copied), tree.leaves(nest), strict=True):
        assert isinstance(leaf, Leaf)
        assert type(value) is Tensor
        assert value.tolist() == old.tolist() == leaf.tolist()
    assert "generation 0, on cpu" in repr(state).splitlines()[0]


def test_handles_are_immutable() -> None:
    state = placed()
    for act, where in (
        (lambda: setattr(state, "w", 1), r"state\.w"),
        (lambda: setattr(state, "_generation", 1), r"state\._generation"),
        (lambda: state.__setitem__("w", 1), r"state\['w'\]"),
    ):
        with pytest.raises(ReadOnlyError, match=rf"`{where}` was assigned to; a state is immutable"):
            act()
    with pytest.raises(AttributeError, match="__delitem__"):
        del state["w"]


def test_repr_is_short_and_shows_no_values() -> None:
    nest = {
        "m": Model(torch.ones(2)),
        "p": Pair(torch.tensor(1), [torch.ones(1)]),
        "t": (torch.ones(1),),
        "e": {},
    }
    assert repr(fcg.place(nest)).splitlines() == [
        "state: dict, generation 0, on cpu, 4 leaves, 24 B",
        "  state['m'].weight    f32[2]  8 B",
        "  state['p'].left      i64[]   8 B",
        "  state['p'].right[0]  f32[1]  4 B",
        "  state['t'][0]        f32[1]  4 B",
    ]


def test_repr_does_not_need_values() -> None:
    """A user's own repr is not called: it would read leaves, and a GPU would have to be waited for."""

    @tree.register_dataclass
    class Loud:
        w: Any

        def __repr__(self) -> str:
            raise AssertionError

    state: Any = fcg.place(Loud(torch.ones(2)))
    object.__setattr__(state._lease.arena, "slots", None)
    assert repr(state) == "state: Loud, generation 0, on cpu, 1 leaf, 8 B\n  state.w  f32[2]  8 B"


def test_pickles_and_copies_of_a_handle_own_their_values() -> None:
    state: Any = fcg.place({"m": Model(torch.ones(2)), "l": [torch.zeros(1)]})
    copies = [pickle.loads(pickle.dumps(state)), copy.deepcopy(state), copy.copy(state), fcg.snapshot(state)]
    state.replace(l=[torch.ones(1)])
    for nest in copies:
        assert type(nest) is dict
        assert type(nest["m"]) is Model
        assert type(nest["m"].weight) is Tensor
        assert nest["l"][0].tolist() == [0.0]
        assert fcg.place(nest)["l"][0].tolist() == [0.0]


# --- replace and tree.at -----------------------------------------------------------------------------------


def test_replace_accepts_host_values_of_every_kind() -> None:
    state: Any = fcg.place({"f": torch.zeros(2), "n": 0, "b": False, "x": 0.5, "t": {"a": torch.zeros(1)}})
    slots = state._lease.arena.slots
    w = torch.ones(2, requires_grad=True)
    state = state.replace(f=w * 3, n=np.int64(7), b=True, x=0.25, t={"a": np.ones(1, dtype=np.float32)})
    copied = fcg.snapshot(state)
    assert copied["f"].tolist() == [3.0, 3.0]
    assert (copied["n"].item(), copied["b"].item(), copied["x"].item()) == (7, True, 0.25)
    assert copied["t"]["a"].tolist() == [1.0]
    assert state._lease.arena.slots is slots
    assert not any(slot.requires_grad for slot in slots)
    assert state.replace(n=8).generation == 2


def test_replace_and_at_swap_in_parallel() -> None:
    state: Any = fcg.place(
        {"a": torch.tensor(1), "b": torch.tensor(2), "c": [torch.tensor(3), torch.tensor(4)]}
    )
    state = state.replace(a=state["b"], b=state["a"])
    assert (state["a"].item(), state["b"].item()) == (2, 1)
    state = fcg.tree.at(lambda s: (s["a"], s["b"]), state, (state["b"], state["a"]))
    assert (state["a"].item(), state["b"].item()) == (1, 2)
    state = state.replace(c=[state["c"][1], state["c"][0]])
    assert [leaf.item() for leaf in state["c"]] == [4, 3]
    state = state.replace(a=state["b"], b=state["b"])  # one leaf in two places
    assert (state["a"].item(), state["b"].item()) == (2, 2)


def test_replace_with_views_of_own_leaves() -> None:
    state: Any = fcg.place({"w": torch.arange(4.0).view(2, 2)})
    state = state.replace(w=state["w"].T)
    assert state["w"].tolist() == [[0.0, 2.0], [1.0, 3.0]]
    state = state.replace(w=state["w"][0].expand(2, 2))
    assert state["w"].tolist() == [[0.0, 2.0], [0.0, 2.0]]


def test_replace_with_branches_of_itself_and_of_other_states() -> None:
    state: Any = fcg.place({"params": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}})
    other: Any = fcg.place({"w": torch.full((2,), 5.0)})
    state = state.replace(ema=state["params"])
    assert state["ema"]["w"].tolist() == [1.0, 1.0]
    state = state.replace(ema=other)
    assert state["ema"]["w"].tolist() == [5.0, 5.0]


def test_misfits_are_all_listed_and_nothing_is_written() -> None:
    with untouched(placed()) as state:
        bad = {
            "w": torch.ones(3, 2), "b": {"x": torch.ones(1)}, "n": 1.5,
        }  # fmt: skip
        with pytest.raises(
            LayoutError, match=r"replace: values do not fit `state`, which is unchanged"
        ) as error:
            state.replace(**bad)
        text = str(error.value)
        assert "state['w']  expected f32[2,3]@cpu   got f32[3,2]@cpu" in text
        assert "state['b']  expected a leaf   got dict with 1 children" in text
        assert "state['n']  expected i64[]@cpu   got f32[]@cpu" in text
        assert state.generation == state.latest().generation == 0
        state["w"].clone()


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (torch.ones(1, 3), r"f32\[1,3\]@cpu"),
        (torch.ones(3), r"f32\[3\]@cpu"),
        (torch.ones(()), r"f32\[\]@cpu"),
        (1.0, r"f32\[\]@cpu"),
        (torch.ones(2, 3, dtype=torch.float64), r"f64\[2,3\]@cpu"),
        (torch.ones(2, 3, dtype=torch.bool), r"bool\[2,3\]@cpu"),
        (torch.ones(2, 3).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(2, 3, device="meta"), r"f32\[2,3\]@meta"),
        ("text", "str"),
        (np.array([["a"] * 3] * 2), "ndarray"),
        (None, "None"),
        ([1.0], "list with 1 children"),
    ],
)
def test_nothing_is_broadcast_or_cast(value: Any, got: str) -> None:
    with untouched(placed()) as state:
        with pytest.raises(LayoutError, match=rf"state\['w'\]  expected .*   got {got}"):
            state.replace(w=value)
        with pytest.raises(LayoutError, match=rf"expected .*   got {got}"):
            fcg.tree.at(lambda s: s["w"], state, value)


def test_unknown_fields_name_those_there_are() -> None:
    state: Any = fcg.place(Model(torch.ones(1), torch.ones(1)))
    with pytest.raises(
        TypeError, match="replace: `state` has no field `nope` that holds leaves; it has `weight`, `bias`"
    ):
        state.replace(nope=1)
    with pytest.raises(TypeError, match="has no field `scale` that holds leaves"):
        state.replace(scale=3.0)
    assert state.generation == state.latest().generation


def test_a_part_of_a_state_is_written_through_the_whole() -> None:
    state: Any = fcg.place({"p": {"w": torch.ones(1)}})
    with pytest.raises(TypeError, match=r"`state\['p'\]` is a part of a state; write through the whole"):
        state["p"].replace(w=torch.zeros(1))
    with pytest.raises(TypeError, match="is a part of a state"):
        fcg.tree.at(lambda p: p["w"], state["p"], torch.zeros(1))
    state = fcg.tree.at(lambda s: s["p"]["w"], state, torch.zeros(1))
    assert state["p"]["w"].tolist() == [0.0]


def test_at_on_a_state_selects_leaves_subtrees_and_tuples() -> None:
    state: Any = fcg.place(
        {"a": Model(torch.ones(1), torch.zeros(1)), "b": [torch.tensor(1), torch.tensor(2)]}
    )
    state = fcg.tree.at(lambda s: s["a"], state, Model(torch.zeros(1), torch.ones(1)))
    assert (state["a"].weight.item(), state["a"].bias.item()) == (0.0, 1.0)
    state = fcg.tree.at(lambda s: (s["a"].weight, s["b"][1]), state, (torch.ones(1), 7))
    assert (state["a"].weight.item(), state["b"][1].item()) == (1.0, 7)
    with pytest.raises(LayoutError, match=r"value  expected Model with 2 children   got list"):
        fcg.tree.at(lambda s: s["a"], state, [torch.ones(1), torch.ones(1)])
    assert state.generation == state.latest().generation == 2


# --- snapshot, fork, latest --------------------------------------------------------------------------------


def test_forks_go_on_by_themselves() -> None:
    state: Any = fcg.place({"w": torch.ones(2)})
    state = state.replace(w=torch.full((2,), 2.0))
    twin: Any = fcg.fork(state)
    assert twin._lease is not state._lease
    assert twin.generation == 0
    state = state.replace(w=torch.zeros(2))
    twin = twin.replace(w=twin["w"] + 1)
    assert (state["w"].tolist(), twin["w"].tolist()) == ([0.0, 0.0], [3.0, 3.0])
    part: Any = fcg.fork(fcg.place({"p": {"w": torch.ones(1)}})["p"])
    assert part.replace(w=torch.zeros(1))["w"].tolist() == [0.0]


def test_snapshot_of_states_parts_leaves_and_plain_trees() -> None:
    state: Any = fcg.place({"p": {"w": torch.ones(1)}, "n": 3})
    taken = [fcg.snapshot(state), fcg.snapshot(state["p"]), fcg.snapshot(state["p"]["w"])]
    state.replace(p={"w": torch.zeros(1)})
    assert taken[0]["p"]["w"].tolist() == taken[1]["w"].tolist() == taken[2].tolist() == [1.0]
    plain = {"w": torch.ones(1, requires_grad=True), "name": "x", "n": 3}
    copied = fcg.snapshot(plain)
    assert (copied["name"], copied["n"]) == ("x", 3)
    assert copied["w"] is not plain["w"]
    assert not copied["w"].requires_grad  # type: ignore[union-attr]


def test_latest_after_an_exception_in_the_loop() -> None:
    state = placed()
    with pytest.raises(ZeroDivisionError, match="division"):
        state.replace(n=state["n"] + 1).replace(n=5).replace(w=1 / 0)
    assert state.latest()["n"].item() == 5
    assert state.latest().replace(n=6)["n"].item() == 6


# --- cost --------------------------------------------------------------------------------------------------


def test_a_lookup_costs_the_same_in_ten_and_ten_thousand_keys() -> None:
    def fastest(count: int) -> float:
        state: Any = fcg.place({"p": {f"k{i}": torch.zeros(1) for i in range(count)}})
        name = f"k{count - 1}"
        return min(
            timeit.repeat(
                lambda: (state["p"][name], name in state["p"], len(state["p"])), number=20, repeat=30
            )
        )

    assert fastest(10_000) < 3 * fastest(10)


def test_a_handle_and_an_edit_do_not_walk_over_the_state() -> None:
    def calls(count: int) -> int:
        state: Any = fcg.place({f"k{i}": torch.zeros(1) for i in range(count)})
        state["k0"]  # the index is made at the first look-up
        value, seen = torch.ones(1), []
        sys.setprofile(lambda frame, event, argument: seen.append(event))
        try:
            state.replace(k1=value)
        finally:
            sys.setprofile(None)
        return len(seen)

    assert calls(10) == calls(10_000)


def test_leaves_are_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        state = placed()
        leaf = state["w"]
        reference = weakref.ref(leaf)
        view = leaf.T + 0
        del leaf, view
        assert reference() is None
    finally:
        gc.enable()


def test_generators_of_strategies_make_states(getkey: Callable[[], Tensor]) -> None:
    state: Any = fcg.place({"key": getkey()})
    assert state.replace(key=getkey())["key"].shape == (2,)


class _Counts:
    """A node whose methods write to it, in a slot and in a dict of its own."""

    made: ClassVar[int] = 0

    def __init__(self, n: Any) -> None:
        _Counts.made += 1
        self.n = n

    def bump(self) -> int:
        self.n = self.n + 1
        return 3

    def note(self) -> None:
        self.seen = True

    @property
    def touched(self) -> bool:
        self.n = None
        return True

    def read(self) -> float:
        return self.n.item() + self.other()

    def other(self) -> float:
        return 1.0


pytree.register_pytree_node(_Counts, lambda node: ([node.n], None), lambda children, _: _Counts(*children))


def test_an_eager_run_makes_a_registered_node_once() -> None:
    step = fcg.graph_step(lambda state, x: (_Counts(state.n + x), {}))
    state = fcg.place(_Counts(torch.zeros(2)))
    _Counts.made = 0
    step.eager(state, torch.ones(2))
    assert _Counts.made == 2, "for the function, and by it"


@pytest.mark.parametrize("kind", [dict, OrderedDict, partial(defaultdict, list)])
def test_methods_that_would_change_a_passing_container_are_refused(kind: Callable[[Any], Any]) -> None:
    state: Any = fcg.place(
        kind({"a": torch.ones(1), "l": [torch.ones(1), torch.zeros(1)], "d": deque([torch.ones(1)])})
    )
    calls = [
        lambda: state.update(a=torch.zeros(1)),
        lambda: state.pop("a"),
        lambda: state.popitem(),
        lambda: state.clear(),
        lambda: state.setdefault("b", 1),
        lambda: state["l"].append(torch.zeros(1)),
        lambda: state["l"].reverse(),
        lambda: state["d"].rotate() or state["d"].append(1),
    ]
    calls += [lambda: state.move_to_end("a")] if kind is OrderedDict else []
    for call in calls:
        with pytest.raises(
            ReadOnlyError, match=r"was called and changes it; a state is immutable(.|\n)*tree\.at"
        ):
            call()
    assert state.setdefault("a", 1).item() == state.get("a").item() == 1.0
    assert fcg.place(dict(update=torch.ones(1)))["update"].item() == 1.0


def test_methods_of_a_node_that_write_to_it_are_refused() -> None:
    state: Any = fcg.place({"counts": _Counts(torch.zeros(()))})["counts"]
    for call in (state.bump, state.note, lambda: state.touched):
        with pytest.raises(ReadOnlyError, match=r"`state\['counts'\]\.\w+` was called and changes it"):
            call()
    assert state.read() == 1.0
    assert state.read.__name__ == "read"


def test_few_calls_copy_many_tensors() -> None:
    """One for all of a dtype; 16 to 64 bit unsigned integers, of which CUDA has no grouped copy, have one each."""
    dtypes = (torch.float32, torch.uint16, torch.float32, torch.uint32, torch.uint64, torch.uint8)
    sources = [torch.tensor([3, 4]).to(dtype) for dtype in dtypes]
    targets = [torch.zeros_like(source) for source in sources]
    calls: Any = copies(targets, sources)
    for call in calls:
        call()
    assert len(calls) == 5
    grouped = [[target.dtype for target in call.args[0]] for call in calls[-2:]]
    assert grouped == [[torch.float32, torch.float32], [torch.uint8]]
    assert_trees_all_equal(targets, sources)
