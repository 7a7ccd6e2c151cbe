"""The benches of several ranks run: their numbers mean something on GPUs alone."""

from __future__ import annotations

from pathlib import Path

from tests.bench.ranks import pipelines, saves
from tests.sharding.ranks import on_ranks, outcomes
from tests.shares import thorough

SMALL = "--layers=2 --width=32 --time=8 --microbatches=4 --vocab=64 --steps=2".split()


@thorough
def test_pipelines_are_timed() -> None:
    systems = "--systems=alone-aten,ours-aten,torch,zero-2-aten,alone-evaluation-aten,ours-evaluation-aten"
    assert on_ranks(2, pipelines.main, [systems, *SMALL]) == [0, 0]
    several = (
        "--systems=ours-aten,ours-evaluation-aten --schedule=zero_bubble --per-rank=2 --layers=4".split()
    )
    assert on_ranks(2, pipelines.main, [*SMALL, *several]) == [0, 0]


@thorough
def test_a_model_like_llama_is_timed() -> None:
    """On pipelines beside each other; what cannot run there says so, and the others do."""
    systems = "--systems=ours-once-aten,torch-captured,torch,zero-1-aten,zero-3-aten"
    llama = "--size=llama-tiny --stages=2 --microbatches=2 --steps=1".split()
    found = outcomes(4, pipelines.main, [systems, *llama], timeout=200.0)
    assert [one.value for one in found] == [0] * 4
    lines = found[0].log.splitlines()
    losses = [line.rpartition("loss ")[2] for line in lines if "loss" in line]
    assert len(losses) == 4
    assert len(set(map(float, losses))) <= 2, "one model on one batch: they differ by rounding at most"
    assert any(line.startswith("torch-captured") and "Error" in line for line in lines)


@thorough
def test_saves_are_timed(tmp_path: Path) -> None:
    small = "--layers=1 --width=16 --vocab=64".split()
    assert on_ranks(2, saves.main, [str(tmp_path / "saved"), *small]) == [0, 0]
    assert {one.name for one in (tmp_path / "saved").iterdir()} >= {"ours-1", "torch.save", "dcp.async_save"}
