"""Which tensors share memory, and whether each element with the one at its own place alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from functional_cg.tensors.overlap import crosses, share_bytes

DTYPES = (torch.float32, torch.int8, torch.float16, torch.complex64)


@st.composite
def views(draw: DrawFn) -> Tensor:
    """Any view of a storage."""
    dtype = draw(st.sampled_from(DTYPES))
    base = torch.zeros(512, dtype=torch.uint8).view(dtype)
    dims = draw(st.lists(st.tuples(st.integers(0, 4), st.sampled_from((0, 1, 2, 3, 4, 6, 8))), max_size=3))
    reach = sum((size - 1) * step for size, step in dims if size)
    offset = draw(st.integers(0, max(base.numel() - 1 - reach, 0)))
    return base.as_strided([size for size, _ in dims], [step for _, step in dims], offset)


def bytes_of(tensor: Tensor) -> list[set[int]]:
    """The bytes of each element."""
    places = torch.full((), tensor.storage_offset())
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + step * torch.arange(size)
    return [
        set(range(one * tensor.itemsize, (one + 1) * tensor.itemsize)) for one in places.flatten().tolist()
    ]


@given(views(), views())
def test_tensors_share_memory_if_they_share_a_byte(one: Tensor, other: Tensor) -> None:
    shared = set().union(*bytes_of(one)) & set().union(*bytes_of(other))
    assert share_bytes(one, other) is share_bytes(other, one) is bool(shared)


@given(views(), views())
def test_tensors_do_not_cross_if_each_element_shares_with_its_own(one: Tensor, other: Tensor) -> None:
    """Of shapes that differ, or that share by chance alone, nothing is said but that they share."""
    if not crosses(one, other) and share_bytes(one, other):
        pairs: Any = zip(bytes_of(one), bytes_of(other), strict=True)
        assert all(a <= b or b <= a for a, b in pairs)


def test_what_lies_side_by_side_is_told_from_shapes_alone() -> None:
    whole = torch.empty(2**20, 2**10, 2**4, device="meta")
    halves = [whole[..., ::2], whole[..., 1::2], whole[..., :8], whole[..., 8:], whole[:, 1:], whole[:, :-1]]
    found = Counter(share_bytes(one, other) for one, other in zip(halves[::2], halves[1::2], strict=True))
    assert found == {False: 2, True: 1}
