"""What transfers do to memory: it is kept until they are waited for, and by nobody else."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from functional_cg.shards.transfers import _alias


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int16, torch.float64]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (4, 5)])
def test_what_c10d_gets_lies_in_the_same_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.ones(shape).to(dtype)
    alias = _alias(value)
    assert alias.dtype == torch.uint8
    assert alias.numel() == value.numel() * value.itemsize
    alias.fill_(0)
    assert not value.to(torch.complex128).any()


def test_its_storage_is_another_one_and_keeps_the_memory() -> None:
    """What marks a storage as in use on a stream does not find that of the allocator."""
    value = torch.arange(4.0)
    memory = StorageWeakRef(value.untyped_storage())
    alias = _alias(value)
    assert alias.untyped_storage()._cdata != value.untyped_storage()._cdata
    del value
    assert not memory.expired()
    assert alias.view(torch.float32).tolist() == [0.0, 1.0, 2.0, 3.0]
    del alias
    assert memory.expired()


@pytest.mark.cuda
def test_a_use_on_another_stream_ends_with_it() -> None:
    """As c10d marks a transfer; the memory of a marked value is not taken again in a capture, that of an alias is."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    taken = []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for mark in (lambda one: one, _alias):
            value = torch.empty(4 * 2**20, device="cuda")
            mark(value).record_stream(side)
            place = value.data_ptr()
            del value
            again = torch.empty(4 * 2**20, device="cuda")
            taken.append(again.data_ptr() == place)
            del again
    assert taken == [False, True]
