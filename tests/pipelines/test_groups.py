"""How many process groups a pipeline has: each is a communicator, which takes memory, and time when a run ends."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch.distributed as dist

import functional_cg as fcg
from functional_cg import sharding
from functional_cg.sharding.launch import end_groups
from functional_cg.shards.collectives import ALL_REDUCE
from tests.pipelines.programs import CUTS, TWO, Run, loss_of, made, params, rows
from tests.sharding.ranks import on_ranks, outcomes
from tests.shares import diagonal, share, thorough

Ranks = tuple[int, ...]
FEATURES = (("plain",), ("tied",), ("clip",), ("tied", "clip"), ("everywhere",))


def groups() -> list[Ranks]:
    """The ranks of each group that this rank is in."""
    return [tuple(dist.get_process_group_ranks(one)) for one in dist.distributed_c10d._world.pg_map]


def groups_of(runs: Sequence[Run], axes: Mapping[str, int]) -> list[list[Ranks]]:
    """The groups of a mesh, then those that each run adds until its first call has returned."""
    mesh, found, count = sharding.mesh(axes, device="cpu", timeout=20), [], 0
    for run in [None, *runs]:
        if run is not None:
            pipe, state, function = made(run, axes, mesh=mesh)
            with fcg.graph_step(function, lowering="aten") as step:
                step(state, rows(0, pipe.mesh.rank))
        found.append(groups()[count:])
        count += len(found[-1])
    return found


def test_two_stages_have_a_group_for_each_way_and_the_one_of_their_axis() -> None:
    runs = [Run(schedule, features) for schedule, features in share(diagonal([*CUTS], FEATURES), 3)]
    for of_mesh, *added in on_ranks(2, groups_of, runs, {"stage": 2}):
        assert of_mesh == [(0, 1)]
        assert added == [[(0, 1), (0, 1)]] * len(runs)


@thorough
def test_beside_other_axes_too() -> None:
    runs = [Run("1f1b", features) for features in FEATURES]
    for rank, (of_mesh, *added) in enumerate(on_ranks(4, groups_of, runs, TWO)):
        assert sorted(of_mesh) == sorted(
            [(0, 1, 2, 3), (rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)]
        )
        assert added == [[(rank % 2, rank % 2 + 2)] * 2] * len(runs)


def groups_of_states(axes: Mapping[str, int]) -> list[list[Ranks]]:
    """The groups that a pipeline adds, then those of two states of it, whose first and last stage are tied."""
    mesh, counts = sharding.mesh(axes, device="cpu", timeout=20), [len(groups())]
    pipe = sharding.pipeline(mesh, schedule="1f1b", microbatches=4)
    run = Run("1f1b", ("tied",), cuts=(1, 2))
    values = params(run.layers)
    for _ in range(2):
        counts.append(len(groups()))
        pipe.zero(loss_of(pipe.cut, run), values, rows(0, 0), key=fcg.random.key(0))
    counts.append(len(groups()))
    return [groups()[a:b] for a, b in pairwise(counts)]


def test_those_that_hold_a_leaf_together_have_one_group() -> None:
    """Of three stages, the first and the last one; a second state needs no other group."""
    of_pipe, of_first, of_second = zip(*on_ranks(3, groups_of_states, {"stage": 3}), strict=True)
    assert list(map(len, of_pipe)) == [2, 4, 2]
    assert of_first == ([(0, 2)], [], [(0, 2)])
    assert of_second == ([], [], [])


def of_swapped_sums(where: int) -> None:
    """One rank would make the sum of a tied leaf after that of the loss, another one before, in one group."""
    pipe, state, function = made(Run("1f1b", ("tied",)), {"stage": 2})
    lowered = fcg.graph_step(function, lowering="aten").lower(state, rows(0, 0))
    instrs = lowered.program.instrs
    first, second = [place for place, instr in enumerate(instrs) if instr.op is ALL_REDUCE][:2]
    assert instrs[first].args[-1] == instrs[second].args[-1] == pipe.stages.group
    if pipe.stages.rank == where:
        instrs[first], instrs[second] = instrs[second], instrs[first]
    lowered.meet()


def test_sums_in_one_group_have_one_order_on_all_ranks_as_they_will_run() -> None:
    for swapped in outcomes(2, of_swapped_sums, 1):
        assert "stages of a pipeline do not fit together" in swapped.error
        assert "sum 0 over stages" in swapped.error
    on_ranks(2, of_swapped_sums, 2)


def ended(how: str) -> tuple[list[str], Any, int]:
    """In which order groups end that wait for each other; what is raised; and how many are left."""
    mesh = sharding.mesh({"stage": 3}, device="cpu", timeout=20)
    sharding.pipeline(mesh, microbatches=4)
    mesh.ranks.part()  # the first one to go may hold the store with which others still make groups
    others, order, end = len(groups()) - 1, list[str](), dist.destroy_process_group
    together, first = threading.Barrier(others), threading.Lock()

    def waiting(group: Any = None) -> None:
        if group is not None and how != "in line":
            together.wait(10)  # each ends only while all others do
        end(group)
        order.append("all" if group is None else "some")
        if how == "raises" and group is not None and first.acquire(blocking=False):
            raise ValueError("of the first")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", waiting)
        if how == "in line":
            patch.setattr(threading.Thread, "start", at_exit)
        try:
            end_groups()
        except ValueError as error:
            return order, str(error), len(groups())
    return order, None, len(groups())


def at_exit(_: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


@pytest.mark.parametrize("how", ["side by side", "in line", "raises"])
def test_groups_end_side_by_side_and_the_one_of_all_ranks_last(how: str) -> None:
    """In line only where Python starts no thread; each comes to its end, whatever another one raises."""
    for rank, (order, raised, left) in enumerate(on_ranks(3, ended, how)):
        assert order == ["some"] * (4 if rank == 1 else 2) + ["all"]
        assert (raised, left) == ("of the first" if how == "raises" else None, 0)
