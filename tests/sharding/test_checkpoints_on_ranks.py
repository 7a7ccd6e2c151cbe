"""Checkpoints of ranks: each writes its part; any number of ranks reads it; a rank may be killed at any moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import functional_cg as fcg
from functional_cg.checkpoint import writing
from functional_cg.checkpoint.index import Index
from tests.sharding.law import HYBRID, held, rank_of
from tests.sharding.programs import PROGRAMS, Setting
from tests.sharding.ranks import on_ranks
from tests.shares import thorough
from tests.stress import kills
from tests.test_prefetch import Shuffled, reading_ahead


def test_any_ranks_read_what_others_wrote() -> None:
    """3 -> 2, 1 and a hybrid of 2 x 2, at other stages, in one round; all pairs are in ``python -m tests.stress``."""
    sources = [Setting({"data": 3}, 3), Setting({"data": 3}, 1), Setting(HYBRID, 3)]
    assert kills.between(sources, [Setting({"data": 2}, 2), Setting({"data": 1}, 3)]) == 6


@thorough
def test_ranks_killed_at_random_moments_go_on_bitwise() -> None:
    counts = kills.run(1, seed=1, at_once=1, times=1)
    assert counts["killed"] >= 1


def small(size: int = 10) -> Any:
    zero = Setting({"data": 2}, 3, timeout=20.0).zero("cpu")
    return fcg.TrainState.create(
        params={"w": torch.arange(float(size)).reshape(2, -1)},
        optimizer=fcg.optim.adamw(0.1, weight_decay=0.0),
        sharding=zero,
    )


def misused(folder: str) -> dict[str, str]:
    """What goes wrong between ranks; each time, the state stays and nothing is left in the folder."""
    state, found = small(), {}
    saved = fcg.checkpoints(folder)

    def said(call: Any) -> str:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', ()))}"
        return ""

    found["two steps"] = said(lambda: saved.save(state, step=rank_of(), wait=True))
    found["nothing there"] = said(lambda: saved.load(state))
    loader = Shuffled()
    batches = reading_ahead(loader, 2)
    for _ in range(1 + rank_of()):
        next(batches)
    saved.save(state, step=4, loader=batches, wait=True)
    again = Shuffled()
    before = [leaf.clone() for leaf in fcg.tree.leaves(held(state))]
    state = saved.load(state, loader=again)
    found["at"] = str(again.at)
    if rank_of() == 1:
        # Rank 1's shards are damaged for rank 1 alone: as if its machine saw another file.
        path = Path(folder, "000001-step-4", "rank-00001.bin")
        path.write_bytes(path.read_bytes()[:-1])
    torch.distributed.barrier()
    found["damaged"] = said(lambda: saved.load(state))
    assert all(a.equal(b) for a, b in zip(before, fcg.tree.leaves(held(state)), strict=True))
    saved.save(state, step=5, loader=batches)
    saved.close()
    return found


def failing(folder: str) -> list[str]:
    """Rank 1 fails to write, by an error that cannot be pickled; then the answers of all ranks cannot be gathered."""

    class Local(Exception):
        pass

    def fail(*_: Any) -> Any:
        raise Local("the disk of rank 1")

    state, saved, found = small(), fcg.checkpoints(folder), []
    with pytest.MonkeyPatch.context() as patch:
        if rank_of() == 1:
            patch.setattr(writing, "_written", fail)
        with pytest.raises(RuntimeError, match=r"Local: the disk of rank 1") as caught:
            saved.save(state, step=1, wait=True)
        found += caught.value.__notes__
    gather, calls = torch.distributed.all_gather_object, []

    def lost(*args: Any) -> None:
        calls.append(args)
        gather(*args)
        if len(calls) == 2:  # each rank says what it saves; rank 0 says where
            raise ConnectionError("a rank is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_gather_object", lost)
        with pytest.raises(ConnectionError):
            saved.save(state, step=2, wait=True)
    torch.distributed.barrier()
    saved.save(state, step=3)
    saved.close()
    return [*found, *sorted(path.name for path in Path(folder).iterdir())]


def test_an_error_of_any_kind_is_raised_on_all_ranks(tmp_path: Path) -> None:
    for found in on_ranks(2, failing, str(tmp_path)):
        assert found == [
            "The checkpoint was not written: this happened on rank 1.", ".writer", "000001-step-3"
        ]  # fmt: skip


def test_mistakes_between_ranks_are_refused_on_all(tmp_path: Path) -> None:
    zero, one = on_ranks(2, misused, str(tmp_path))
    for found in (zero, one):
        assert "ranks are about to save different things" in found["two steps"]
        assert "rank 1  step 1" in found["two steps"]
        assert found["nothing there"].startswith("FileNotFoundError")
    assert (zero["at"], one["at"]) == ("1", "2")
    assert "other ranks cannot read the checkpoint" in zero["damaged"]
    assert "rank-00001.bin has" in zero["damaged"]
    assert one["damaged"].startswith("ValueError")
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {".writer", "000001-step-4", "000002-step-5"}
    index = Index.read(tmp_path / "000002-step-5")
    assert len(index.pieces["params.w"]) == 2, "each rank wrote its shard"
    adamw = fcg.optim.adamw(0.1, weight_decay=0.0)
    state = fcg.TrainState.create(params={"w": torch.zeros(2, 5)}, optimizer=adamw)
    with pytest.raises(
        ValueError, match="holds the positions of 2 loaders, one per rank, and this run has 1"
    ):
        fcg.checkpoints(tmp_path).load(state, loader=Shuffled())
    assert (
        fcg.checkpoints(tmp_path).load(state).params["w"].tolist() == torch.arange(10.0).view(2, 5).tolist()
    )


def test_the_program_of_the_stress_has_odd_leaves() -> None:
    state = PROGRAMS[kills.PROGRAM].state(None, "cpu")
    shapes = [tuple(leaf.shape) for leaf in fcg.tree.leaves(state)]
    assert () in shapes
    assert any(0 in shape for shape in shapes)


def parts(folder: str) -> list[dict[str, torch.Tensor]]:
    """Parameters for another optimizer at another stage, another dtype, and from files of another library."""
    params = {"w": torch.arange(35.0).reshape(5, 7), "b": torch.arange(3.0)}

    def fresh(stage: int, dtype: torch.dtype = torch.float32) -> Any:
        return fcg.TrainState.create(
            params=fcg.tree.map(lambda leaf: torch.zeros_like(leaf, dtype=dtype), params),
            optimizer=fcg.optim.sgd(0.1),
            sharding=Setting({"data": 2}, stage).zero("cpu"),
        )

    adam = Setting({"data": 2}, 3).zero("cpu")
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.adam(0.1), sharding=adam, step=4)
    with fcg.checkpoints(folder) as saved:
        saved.save(state, wait=True)
        loaded = [fcg.load(folder, fresh(1), part="params"), saved.load(fresh(3), part="params")]
        loaded.append(saved.load(fresh(3, torch.bfloat16), part={"params": "opt_state.0.mu"}, cast=True))
        with pytest.raises(fcg.LayoutError, match=r"to .*cast=True|`cast=True` fits them"):
            saved.load(fresh(3, torch.bfloat16), part="params")
        saved.save(state.replace(params={"w": params["w"] * 2e3, "b": params["b"]}), step=5, wait=True)
        # The shard of one rank has numbers that are too large; the other rank is told.
        refused = (fcg.LayoutError, "got 6.8e\\+04") if rank_of() == 1 else (fcg.RankError, "rank 1")
        with pytest.raises(refused[0], match=refused[1]):
            saved.load(half := fresh(3, torch.float16), part="params", cast=True)
        assert not fcg.sharding.gather(half).params["w"].any()
    if rank_of() == 0:
        Path(folder, "hub").mkdir()
        fcg.save(f"{folder}/hub/model.safetensors", params, shard_bytes=20)
    torch.distributed.barrier()
    loaded.append(fcg.load(f"{folder}/hub", fresh(3), part={"params": ""}))
    loaded.append(fcg.load(f"{folder}/hub", fresh(2, torch.bfloat16), part={"params": ""}, cast=True))
    return [fcg.sharding.state_dict(one) for one in loaded]


def test_a_part_is_loaded_onto_shards(tmp_path: Path) -> None:
    whole = {"params.w": torch.arange(35.0).reshape(5, 7), "params.b": torch.arange(3.0)}
    for found in on_ranks(2, parts, str(tmp_path / "run"))[:1]:
        for i, state in enumerate(found):
            assert state.keys() - {"step"} == whole.keys()
            assert state["step"] == 0
            for name, leaf in whole.items():
                wanted = torch.zeros_like(leaf) if i == 2 else leaf
                assert state[name].equal(wanted.to(torch.bfloat16) if i in (2, 4) else wanted), (i, name)
