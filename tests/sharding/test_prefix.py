"""Prefix trees of shardings: what each rank holds, and what is refused. Their law is in `test_bitwise`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import functional_cg as fcg
from functional_cg import sharding
from functional_cg.shards.mesh import Axis, Mesh
from functional_cg.shards.tensor import Sharded
from tests.sharding.ranks import on_ranks


def params() -> Any:
    return {"embedding": torch.arange(6.0).view(3, 2), "blocks": [{"w": torch.ones(5)}, {"w": torch.ones(4)}]}


def created(axes: dict[str, int]) -> Any:
    mesh = sharding.mesh(axes, device="cpu", timeout=30.0)
    kept, cut = sharding.zero(mesh, stage=1), sharding.zero(mesh, stage=3, param_dtype=torch.bfloat16)
    return fcg.TrainState.create(
        params=params(), optimizer=fcg.optim.adam(0.1), accumulate=True,
        sharding={"embedding": kept, "blocks": [cut, kept]},
    )  # fmt: skip


def held() -> Any:
    """Elements that a rank holds of parameters, moments and accumulators, the state as a dict, and dtypes read."""

    def elements(tree: Any) -> list[int]:
        return [leaf.local.numel() for leaf in fcg.tree.leaves(tree) if isinstance(leaf, Sharded)]

    state = created({"data": 2})
    snapshot = fcg.snapshot(state)
    counts = [elements(part) for part in (snapshot.params, snapshot.opt_state[0].mu, snapshot.grads)]
    return counts, sharding.state_dict(state)


def test_each_part_lies_as_its_sharding_says() -> None:
    (counts, whole), _ = on_ranks(2, held)
    # In the order of keys: the first block, the second one, the embedding. Five elements are cut into three and three.
    assert counts == [[3, 4, 6], [3, 2, 3], [3, 4, 6]]
    for name, leaf in {"embedding": params()["embedding"], "blocks[0]['w']": torch.ones(5)}.items():
        found = [
            value for key, value in whole.items() if key.startswith("params") and name.split("[")[0] in key
        ]
        assert any(torch.equal(value, leaf) for value in found), name


def test_with_one_rank_all_is_whole() -> None:
    state = created({"data": 1})
    assert torch.equal(state.params["embedding"], params()["embedding"])


def of_two_ranks(name: str = "data") -> Mesh:
    return Mesh((Axis(name, 2, 0, "none"),))


@pytest.mark.parametrize(
    ("parts", "rows"),
    [
        (lambda z: {"blocks": z}, ["params['embedding']  expected a sharding   got none"]),
        (
            lambda z: {"embedding": z, "blocks": [z]},
            ["params['blocks'][1]['w']  expected a sharding   got none"],
        ),
        (
            lambda z: {"embedding": z, "blocks": z, "head": z},
            ["params['head']  expected a parameter   got none"],
        ),
    ],
    ids=["a part is missing", "below a list", "a part too many"],
)
def test_a_tree_that_is_no_prefix_is_refused(parts: Any, rows: list[str]) -> None:
    mesh = sharding.mesh({"data": 1}, device="cpu")
    with pytest.raises(fcg.LayoutError, match="`sharding` is no prefix of `params`") as error:
        fcg.TrainState.create(
            params=params(), optimizer=fcg.optim.sgd(0.1), sharding=parts(sharding.zero(mesh))
        )
    assert [line.strip() for line in str(error.value).splitlines() if "expected" in line] == rows
    # The advice of the error.
    fcg.TrainState.create(params=params(), optimizer=fcg.optim.sgd(0.1), sharding=sharding.zero(mesh))


def test_parts_on_two_meshes_are_refused() -> None:
    parts = {"embedding": sharding.zero(of_two_ranks()), "blocks": sharding.zero(of_two_ranks("other"))}
    with pytest.raises(fcg.LayoutError, match=re.escape("sharding['embedding']  on data=2")):
        fcg.TrainState.create(params=params(), optimizer=fcg.optim.sgd(0.1), sharding=parts)


@pytest.mark.parametrize("strange", [{}, {"embedding": None, "blocks": 3}, [torch.ones(1)]], ids=str)
def test_what_is_no_sharding_is_refused(strange: Any) -> None:
    with pytest.raises(TypeError, match=r"sharding must be made with `fcg\.sharding\.zero"):
        fcg.TrainState.create(params=params(), optimizer=fcg.optim.sgd(0.1), sharding=strange)
