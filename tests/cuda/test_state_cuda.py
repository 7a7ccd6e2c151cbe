"""Handles and leaves on CUDA: differences from the CPU, since leaves are not on the host."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg
from functional_cg.errors import DonatedStateError, LayoutError, ReadOnlyError
from functional_cg.state.leaf import Leaf

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]

VALUES = torch.arange(6.0).view(2, 3) - 2.5


def placed() -> Any:
    return fcg.place({"w": VALUES, "n": 3}, "cuda")


def test_numbers_and_numpy_go_where_the_tensors_are() -> None:
    state: Any = fcg.place({"n": 3, "a": np.ones(2), "w": VALUES.cuda(), "x": 0.5})
    assert {str(slot.spec.device) for slot in state._lease.arena.plan.slots} == {"cuda:0"}
    assert (state["n"].item(), state["a"].tolist(), state["x"].item()) == (3, [1.0, 1.0], 0.5)


def test_tensors_on_several_devices_are_refused_unless_one_is_given() -> None:
    nest = {"a": VALUES, "b": VALUES.cuda()}
    with pytest.raises(LayoutError, match=r"state\['b'\]  expected device cpu   got cuda:0"):
        fcg.place(nest)
    state: Any = fcg.place(nest, "cuda")
    assert torch.equal(state["a"].cpu(), VALUES)
    assert fcg.place(nest, "cpu")["b"].device.type == "cpu"
    assert fcg.place({}, "cuda")._lease.arena.device.type == "cuda"  # type: ignore[attr-defined]


def test_placing_a_host_tree_costs_its_own_size() -> None:
    nest = {f"w{i}": torch.zeros(2**20) for i in range(16)}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    state = fcg.place(nest, "cuda")
    assert torch.cuda.max_memory_allocated() - before < 1.1 * 16 * 2**22
    del state


def test_replace_takes_host_values() -> None:
    state = placed()
    state = state.replace(w=torch.zeros(2, 3), n=np.int64(7))
    assert (state["w"].sum().item(), state["n"].item()) == (0.0, 7)
    state = state.replace(w=VALUES.pin_memory())
    assert torch.equal(state["w"].cpu(), VALUES)
    assert state["w"].is_cuda


READS: dict[str, Callable[[Tensor], Any]] = {
    "cpu": lambda w: w.cpu(),
    "arithmetic": lambda w: (w * 2).cpu(),
    "linear": lambda w: F.linear(torch.ones(1, 3, device="cuda"), w).cpu(),
    "dlpack": lambda w: torch.from_dlpack(w).cpu(),
    "numpy": lambda w: torch.from_numpy(w.numpy(force=True)),
    "item": lambda w: torch.tensor(w[0, 0].item()),
    "non_blocking": lambda w: w.to("cpu", non_blocking=False),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_leaf_reads_like_a_tensor_until_it_is_donated(read: Callable[[Tensor], Any]) -> None:
    state = placed()
    leaf = state["w"]
    result = read(leaf)
    assert type(result) is Tensor
    assert torch.equal(result, read(VALUES.cuda()))
    result.zero_()
    assert torch.equal(state["w"].cpu(), VALUES)
    state.replace(n=4)
    with pytest.raises(DonatedStateError, match=r"`state\['w'\]` was used after"):
        read(leaf)


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.add_(1),
        lambda w: w.data.zero_(),
        lambda w: torch._foreach_mul_([w], 2),
        lambda w: F.batch_norm(torch.randn(4, 3, device="cuda"), w[0], w[1], training=True),
        lambda w: torch.add(w.clone(), 1, out=w),
        lambda w: w.data_ptr(),
        lambda w: w.untyped_storage(),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_write_to_a_leaf_raises(write: Callable[[Any], Any], mode: Any) -> None:
    state = placed()
    with mode(), pytest.raises(ReadOnlyError, match=r"`state\['w'\]"):
        write(state["w"])
    assert torch.equal(state["w"].cpu(), VALUES)


def test_no_array_interface_that_would_dangle() -> None:
    assert not hasattr(placed()["w"], "__cuda_array_interface__")
    with pytest.raises(TypeError, match="can't convert cuda"):
        np.asarray(placed()["w"])


def test_the_old_spelling_of_dlpack_raises_and_does_not_crash() -> None:
    program = """
        import torch, functional_cg as fcg
        leaf = fcg.place({"w": torch.ones(2, 3, device="cuda")})["w"]
        try:
            torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(leaf))
        except RuntimeError:
            print("raised")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "raised"), done.stderr


def test_a_leaf_read_on_another_stream_waits_for_the_last_update() -> None:
    state: Any = fcg.place({"w": torch.zeros(2**22, device="cuda")})
    side = torch.cuda.Stream()
    for i in range(1, 6):
        torch.cuda._sleep(20_000_000)
        state = state.replace(w=torch.full((2**22,), float(i), device="cuda"))
        with torch.cuda.stream(side):
            leaf = state["w"]
            assert type(leaf) is Leaf
            assert leaf.amin().item() == leaf.amax().item() == float(i)
