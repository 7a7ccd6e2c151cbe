"""The GPT example on several ranks: what each does alone, and what they do together."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from functional_cg.examples import gpt, options, text
from functional_cg.examples.ranks import Ranks, stop_request
from tests.gpt_runs import run_on_ranks
from tests.shares import thorough

TINY = (
    "--layers",
    "1",
    "--width",
    "32",
    "--heads",
    "2",
    "--block-size",
    "32",
    "--sample",
    "4",
    "--dropout",
    "0",
)
ALIKE = (*TINY, "--steps", "20", "--lr", "0.01", "--device", "cpu", "--lowering", "aten")
INTERRUPTED = 12


def run_here(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    """Run the example on this process alone."""
    assert gpt.main([*ALIKE, *more, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(result, dict)
    return result


def interrupted(*args: Any, **kwargs: Any) -> Iterator[text.Batch]:
    yield from itertools.islice(text.batches(*args, **kwargs), INTERRUPTED)
    raise KeyboardInterrupt


@thorough
@pytest.mark.slow
def test_two_ranks_go_on_where_one_stopped_and_end_where_one_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without dropout, ranks that train on slices of a batch compute what one rank computes on all of it."""
    one, part, two = tmp_path / "one", tmp_path / "part", tmp_path / "two"
    alone = run_here(capsys, "--batch-size", "16", "--save", str(one))
    with monkeypatch.context() as patched:
        patched.setattr(gpt, "batches", interrupted)
        assert gpt.main([*ALIKE, "--batch-size", "16", "--save", str(part)]) == 130

    files = ("--resume", str(part), "--save", str(two), "--out", str(tmp_path / "out"))
    result, printed = run_on_ranks(2, *ALIKE, "--batch-size", "8", "--mesh", "data=2", "--zero", "3", *files)
    assert (result["ranks"], result["zero"], alone["ranks"], alone["zero"]) == (2, 3, 1, None)
    assert result["replay_equals_eager"] is True
    assert (result["steps"], result["captures"], result["replays"]) == (20, 1, 20 - INTERRUPTED)
    assert alone["bytes_per_rank"] / 2 <= result["bytes_per_rank"] < alone["bytes_per_rank"] * 0.51
    assert result["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-4)
    assert result["loss_last"] == pytest.approx(alone["loss_last"], rel=1e-4)
    assert printed.count("finished 20 steps") == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["history.json", "loss.png"]

    leaves, wanted = load_file(two), load_file(one)
    assert leaves.keys() == wanted.keys()
    for name, leaf in leaves.items():
        # Two halves of a sum, and Adam's division by small moments.
        torch.testing.assert_close(
            leaf, wanted[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
    again = run_here(capsys, "--batch-size", "16", "--resume", str(two))
    assert again["val_loss"] == pytest.approx(result["val_loss"], rel=1e-6)


def test_slices_of_all_ranks_are_one_batch() -> None:
    data = torch.arange(2000).to(torch.uint8)
    for cut in (
        lambda size, **own: next(text.batches(data, size, 8, 3, **own)),
        lambda size, **own: text.validation_batches(data, size, 8, 5, **own)[2],
    ):
        whole, slices = cut(12), [cut(4, rank=rank, ranks=3) for rank in range(3)]
        for name in ("x", "y"):
            assert torch.equal(torch.cat([part[name] for part in slices]), whole[name])


def test_a_mesh_of_one_rank_is_a_run_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    plain, meshed = (run_here(capsys, "--steps", "5", *more) for more in ((), ("--mesh", "data=-1")))
    differ = {name for name in plain if plain[name] != meshed[name] and "per_s" not in name}
    assert differ - {"speed_ratio"} == {"zero"}


@pytest.mark.parametrize(
    ("given", "started", "said"),
    [
        (["--mesh", "data"], 1, "--mesh: expected NAME=RANKS, or two such by a comma, got 'data'"),
        (["--mesh", "a=1,b=1,c=1"], 1, "expected NAME=RANKS, or two such"),
        (["--mesh", "data=2"], 1, "{'data': 2} does not lay out 1 rank. To fix: one or two axes"),
        (["--mesh", "replica=2,shard=-1"], 3, "does not lay out 3 ranks"),
        (["--zero", "4", "--mesh", "data=1"], 1, "--zero: invalid choice: 4"),
        (["--zero", "2"], 1, "--zero needs --mesh AXES"),
        (["--compare", "--mesh", "data=-1"], 2, "--compare trains in one process; leave out --mesh"),
        ([], 2, "2 processes were started, and each would train alone; add --mesh data=-1"),
        (["--zero", "many"], 1, "--zero: invalid int value: 'many'"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_bad_options_are_one_line_of_the_first_rank(
    given: list[str],
    started: int,
    said: str,
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(started))
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(options, "_GRACE_S", 0.0)
    with pytest.raises(SystemExit) as stopped:
        gpt.main([*given, "--device", "cpu"])
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1 - rank
    assert rank or said in err


@dataclass(frozen=True)
class OfTwo(Ranks):
    """One of two ranks, in a test that has no other; what the other says is given."""

    size: int = 2
    other: Any = None

    def exchange(self, value: Any) -> list[Any]:
        return [value, self.other]


def test_what_fails_on_one_rank_fails_on_all() -> None:
    assert OfTwo(other=None).together(lambda: 3) == 3
    with pytest.raises(ValueError, match="rank 1: no text"):
        OfTwo(other="no text").together(lambda: 3)
    with pytest.raises(FileNotFoundError, match="no/such"):
        OfTwo(other="no text").together(lambda: Path("no/such").read_text())


def test_ctrl_c_is_answered_alike_by_all_ranks() -> None:
    with stop_request(OfTwo(other=False)) as stopping:
        assert not stopping()
        signal.raise_signal(signal.SIGINT)
        assert stopping()
        with pytest.raises(KeyboardInterrupt):  # the second one does not wait
            signal.raise_signal(signal.SIGINT)
    with stop_request(OfTwo(other=True)) as stopping:
        assert stopping()
    with stop_request(Ranks()) as stopping, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
