"""What c10d is given to send and to receive: the same memory, which the allocator does not know as its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_cg.shards import transfers


class Group:
    """A group of which both ranks are this one: what is sent is received later."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.bytes: Tensor

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        self.given += tensors
        self.bytes = tensors[0].clone().view(torch.uint8)
        return torch.futures.Future[None]()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        self.given += tensors
        tensors[0].copy_(self.bytes)
        return torch.futures.Future[None]()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    made = Group()
    monkeypatch.setattr(transfers, "_group", lambda name: made)
    monkeypatch.setattr(transfers._c10d, "_register_work", lambda tensor, work: None)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 3)])
def test_bytes_go_from_memory_to_memory_that_the_allocator_does_not_know(
    dtype: torch.dtype, shape: tuple[int, ...], group: Group
) -> None:
    """Told of another stream, it would keep that memory until the end of a capture."""
    value = torch.arange(15)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    token = transfers.send(value, transfers.start(value.device), 1, "")
    received, _ = transfers.receive(token, shape, dtype, 0, "")
    assert torch.equal(received, value)
    for given, whole in zip(group.given, (value, received), strict=True):
        assert given.data_ptr() == whole.data_ptr()
        assert given.nbytes == whole.nbytes
        assert given.untyped_storage()._cdata != whole.untyped_storage()._cdata


def test_a_view_is_sent_as_its_own_values(group: Group) -> None:
    value = torch.arange(12.0).reshape(3, 4).t()[1:]
    transfers.send(value, transfers.start(value.device), 1, "")
    assert group.given[0].nbytes == value.nbytes
    assert torch.equal(group.given[0].view(torch.float32).view(3, 3), value)
