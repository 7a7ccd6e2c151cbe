"""Laws of placements in one process, for any shape on any mesh, and which meshes are valid."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.shards.mesh import Axis, Mesh
from functional_cg.shards.placement import Placement
from functional_cg.testing.strategies import shapes

FILL = -7.0


def mesh_of(replicas: int, shards: int, replica: int = 0, shard: int = 0) -> Mesh:
    """A mesh as one of its ranks sees it, without processes."""
    axes = (Axis("replica", replicas, replica, ""), Axis("shard", shards, shard, ""))
    return Mesh(axes, torch.device("cpu"))


@st.composite
def leaves(draw: Callable[[Any], Any]) -> tuple[Tensor, list[Placement]]:
    """A leaf, strided in some way, and its placement on each rank."""
    shape = draw(shapes(max_dims=3, max_side=5))
    leaf = torch.arange(1.0, math.prod(shape) + 1).reshape(shape)
    if len(shape) > 1 and draw(st.booleans()):
        leaf = leaf.transpose(0, -1)
    replicas, size = draw(st.integers(1, 2)), draw(st.integers(1, 7))
    return leaf, [
        Placement(mesh_of(replicas, size, replica, shard), tuple(leaf.shape), sharded=True)
        for replica in range(replicas)
        for shard in range(size)
    ]


@given(leaves())
def test_shards_one_after_the_other_are_the_leaf(drawn: tuple[Tensor, list[Placement]]) -> None:
    leaf, places = drawn
    for replica in range(places[0].mesh.axes[0].size):
        of_replica = [place for place in places if place.mesh.axes[0].rank == replica]
        shards = [place.own(leaf) for place in of_replica]
        assert all(tuple(shard.shape) == of_replica[0].local_shape for shard in shards)
        assert torch.equal(of_replica[0].unpad(torch.cat(shards)), leaf)
        together = torch.cat([place.masked(own, FILL) for place, own in zip(of_replica, shards, strict=True)])
        assert torch.equal(together[: leaf.numel()], leaf.flatten())
        assert (together[leaf.numel() :] == FILL).all()
    hypothesis.event(f"padded: {places[0].padded}")


@given(leaves())
def test_what_is_not_cut_is_all_of_the_leaf(drawn: tuple[Tensor, list[Placement]]) -> None:
    leaf, places = drawn
    for place in (replace(one, sharded=False) for one in places):
        assert torch.equal(place.own(leaf), leaf.flatten())
        assert (place.start, place.elements) == (0, leaf.numel())


@given(leaves())
def test_padding_is_undone_and_is_zeros(drawn: tuple[Tensor, list[Placement]]) -> None:
    leaf, (place, *_) = drawn
    vector = place.pad(leaf)
    assert vector.numel() == place.length * place.mesh.shards.size < leaf.numel() + place.mesh.shards.size
    assert not vector[leaf.numel() :].any()
    assert torch.equal(place.unpad(vector), leaf)
    assert place.padded == (vector.numel() > leaf.numel())


@given(leaves())
def test_masking_keeps_what_is_on_one_rank_alone(drawn: tuple[Tensor, list[Placement]]) -> None:
    """Whatever stands in the padding: a sum over all shards counts each element once."""
    leaf, places = drawn
    last = [place for place in places if place.mesh.axes[0].rank == 0]
    dirty = [place.own(leaf).clone() for place in last]
    for place, shard in zip(last, dirty, strict=True):
        inside = max(0, min(place.length, place.numel - place.mesh.shards.rank * place.length))
        shard[inside:] = torch.nan
    total = sum(place.masked(shard).sum() for place, shard in zip(last, dirty, strict=True))
    assert float(total) == float(leaf.sum())


@given(replicas=st.integers(1, 4), shards=st.integers(1, 4))
def test_ranks_are_numbered_with_the_last_axis_fastest(replicas: int, shards: int) -> None:
    numbers = [
        mesh_of(replicas, shards, replica, shard).rank
        for replica in range(replicas)
        for shard in range(shards)
    ]
    assert numbers == list(range(replicas * shards))
    mesh = mesh_of(replicas, shards)
    assert mesh.size == len(numbers)
    assert [axis.size for axis in mesh.wide] == [size for size in (replicas, shards) if size > 1]


def test_a_mesh_says_what_it_is() -> None:
    assert str(mesh_of(2, 4)) == "replica=2, shard=4"
    assert Placement(mesh_of(2, 4), (3,), sharded=True).describe() == "sharded over replica=2, shard=4"
    assert Placement(mesh_of(1, 4), (3,), sharded=False).describe() == "replicated over replica=1, shard=4"


def test_meshes_are_equal_by_their_axes() -> None:
    assert mesh_of(2, 4) == mesh_of(2, 4) != mesh_of(4, 2)
    assert hash(mesh_of(2, 4)) == hash(mesh_of(2, 4))


# -- one process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [{"data": -1}, {"data": 1}, {"replica": -1, "shard": 1}])
def test_a_single_process_is_a_mesh_of_one(axes: dict[str, int]) -> None:
    mesh = fcg.sharding.mesh(axes, device="cpu")
    assert (mesh.size, mesh.rank, mesh.wide) == (1, 0, ())
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2},
        {},
        {"a": 1, "b": 1, "c": 1},
        {"a": -1, "b": -1},
        {"data": 0},
        {"a": -1, "b": 0},
        {"a": -2},
    ],
    ids=str,
)
def test_sizes_that_do_not_lay_out_the_ranks_are_refused(axes: dict[str, int]) -> None:
    with pytest.raises(
        ValueError, match=r"^sharding.mesh: \{.*\} does not lay out 1 rank\. To fix: one or two axes "
    ):
        fcg.sharding.mesh(axes, device="cpu")


@pytest.mark.parametrize("stage", [0, 4, "3", None])
def test_other_stages_are_refused(stage: Any) -> None:
    mesh = fcg.sharding.mesh({"data": -1}, device="cpu")
    with pytest.raises(ValueError, match=r"^sharding.zero: stage must be 1, 2 or 3, got"):
        fcg.sharding.zero(mesh, stage=stage)


def test_numbers_of_bytes_and_groups_that_make_no_sense_are_refused() -> None:
    mesh = fcg.sharding.mesh({"data": -1}, device="cpu")
    with pytest.raises(ValueError, match=r"^sharding.zero: bucket_bytes must be positive, got 0(\n|$)"):
        fcg.sharding.zero(mesh, bucket_bytes=0)
    with pytest.raises(ValueError, match=r"^sharding.zero: prefetch must not be negative, got -1(\n|$)"):
        fcg.sharding.zero(mesh, prefetch=-1)


def test_a_world_of_one_rank_is_none() -> None:
    """As `torchrun --nproc-per-node 1` starts it: programs for several ranks run on one, without a mesh."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        key, tree = fcg.random.key(0), {"w": torch.ones(3)}
        assert fcg.sharding.mean(tree) is tree
        assert fcg.sharding.sum(tree) is tree
        assert fcg.sharding.fold_in(key) is key
        assert fcg.sharding.gather(tree) is tree
    finally:
        torch.distributed.destroy_process_group()
