"""The main job: a GPT on real text, as a program and as a step."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import functional_cg as fcg
from functional_cg.examples import gpt, text
from functional_cg.examples.transformer import GPT
from tests.gpt_runs import TINY, assert_replay_equals_eager, run_example, start_example

FIELDS = {
    "steps", "loss_first", "loss_last", "val_loss", "unigram_entropy", "tokens_per_s", "eager_tokens_per_s",
    "replay_equals_eager", "captures", "replays", "device", "lowering", "torch",
}  # fmt: skip


@pytest.mark.parametrize("module", [False, True])
def test_replay_equals_eager_bitwise(module: bool) -> None:
    model = GPT(layers=2, width=32, heads=2, block_size=16, dropout=0.2)
    assert_replay_equals_eager(model, batch_size=4, calls=20, device=torch.device("cpu"), module=module)


def test_the_module_beside_an_ordinary_loop(tmp_path: Path) -> None:
    """Without dropout both train the same model on the same batches: the losses agree, and so do the pictures."""
    options = (
        "--module",
        "--compare",
        "--dropout",
        "0",
        "--steps",
        "30",
        "--sample",
        "40",
        "--out",
        str(tmp_path),
    )
    result = run_example(*TINY, "--device", "cpu", "--lowering", "aten", *options)
    assert result["replay_equals_eager"] is True
    assert result["speed_ratio"] > 0
    assert result["ordinary_tokens_per_s"] > 0
    assert len(result["sample_after"]) > 20
    assert result["sample_before"].startswith("def ")
    assert result["sample_before"] != result["sample_after"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    losses = json.loads((tmp_path / "history.json").read_text())["losses"]

    options_ = gpt.gpt_parser("test", "").parse_args(
        [*TINY, "--dropout", "0", "--steps", "30", "--device", "cpu"]
    )
    training, _ = text.split(text.read_bytes(text.text_files(None), 4 * 2**20), options_.block_size)
    ordinary, _ = gpt.compare(options_, training)
    # fp32 sums in another order: torch.optim's fused AdamW per tensor and norms of another grouping.
    assert losses == pytest.approx(ordinary, rel=1e-3)


def test_program_learns_and_tells(tmp_path: Path) -> None:
    result = run_example(
        *TINY,
        "--steps",
        "60",
        "--lr",
        "0.01",
        "--device",
        "cpu",
        "--lowering",
        "aten",
        "--out",
        str(tmp_path),
    )
    assert result.keys() >= FIELDS
    assert result["replay_equals_eager"] is True
    assert (result["steps"], result["captures"], result["replays"]) == (60, 1, 60)
    assert (result["device"], result["lowering"], result["torch"]) == ("cpu", "aten", torch.__version__)
    assert result["loss_first"] == pytest.approx(math.log(256), rel=0.05)
    assert result["loss_last"] < result["loss_first"] - 1.5
    assert result["val_loss"] < math.log(256) - 1.5
    assert 2.5 < result["unigram_entropy"] < 3.5
    assert result["tokens_per_s"] > 0
    assert result["eager_tokens_per_s"] > 0

    history = json.loads((tmp_path / "history.json").read_text())
    assert history["result"] == result
    assert len(history["losses"]) == 60
    assert history["losses"][-1] == result["loss_last"]
    assert history["validation"][-1] == [60, result["val_loss"]]
    assert [step for step, _ in history["validation"]] == [10, 20, 30, 40, 50, 60]


def test_ctrl_c_ends_the_run_with_its_result() -> None:
    with start_example(*TINY, "--steps", "1000000", "--device", "cpu", "--json") as program:
        while "loss" not in program.err:  # the bar: the loop is running
            assert program.code is None
            time.sleep(0.01)
        program.interrupt()
        assert program.end(timeout=60) == 130, program.err
        assert "Traceback" not in program.err
        result = json.loads(program.out.splitlines()[-1])
    assert result["interrupted"] is True
    assert result["steps"] > 0
    assert (
        abs(result["replays"] - result["steps"]) <= 1
    )  # the signal may come between an update and its count
    assert math.isfinite(result["val_loss"])


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = [*TINY, "--steps", "300", "--device", "cpu", "--lowering", "aten"]
    run_example(*options, "--save", str(whole))
    with start_example(*options, "--save", str(killed), "--save-every", "7") as program:
        while steps_in(killed) == 0:
            assert program.code is None
            time.sleep(0.01)
        program.kill()
    done = steps_in(killed)
    assert done in range(7, 300, 7)
    result = run_example(*options, "--resume", str(killed), "--save", str(killed))
    assert result["steps"] == 300
    assert result["captures"] == 1
    assert result["replays"] == 300 - done
    assert killed.read_bytes() == whole.read_bytes()


def steps_in(checkpoint: Path) -> int:
    """Steps that a checkpoint has behind it; none if it is not there yet."""
    return int(load_file(checkpoint)["step"]) if checkpoint.exists() else 0


def test_ctrl_c_leaves_a_checkpoint_of_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Iterator[text.Batch]:
        yield from itertools.islice(batches(*args, **kwargs), 12)
        raise KeyboardInterrupt

    batches = text.batches
    monkeypatch.setattr(gpt, "batches", interrupted)
    path = tmp_path / "last"
    assert (
        gpt.main([*TINY, "--steps", "50", "--device", "cpu", "--lowering", "aten", "--save", str(path)])
        == 130
    )
    assert steps_in(path) == 12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "0"], "--steps: expected an integer from 1"),
        (["--steps", "many"], "--steps: expected an integer, got 'many'"),
        (["--width", "65", "--heads", "2"], "width 65 is not a multiple of 2 heads"),
        (["--dropout", "1"], "--dropout: expected at least 0 and less than 1"),
        (["--lr", "nan"], "--lr: expected at least 0"),
        (["--device", "tpu"], "--device: expected auto, cpu or cuda"),
        (["--lowering", "magic"], "--lowering: invalid choice"),
        (["--step", "3"], "unrecognized arguments"),
        (["--data", "no/such/file"], "no text found at no/such/file"),
        (["--data", "{short}"], "the text has 100 bytes; blocks of 128 need at least 1290"),
        (["--data", "{empty}"], "the text is empty"),
        (["--out", "{short}"], "File exists"),
        (["--save-every", "3"], "--save-every needs --save FILE"),
        (["--save", "{short}/last"], "Not a directory: '{short}/last'"),
        (["--resume", "no/such/file"], "No such file or directory: 'no/such/file'"),
        (["--resume", "{short}"], "{short} is no safetensors file, or not a whole one"),
        (
            ["--resume", "{other}"],
            "{other} is a checkpoint of another model: step expected i64[] got nothing",
        ),
    ],
)
def test_bad_options_are_one_line(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short").write_text("x" * 100)
    (tmp_path / "empty").write_text("")
    fcg.save(tmp_path / "other", {"w": torch.ones(1)})
    places = {name: tmp_path / name for name in ("short", "empty", "other")}
    options, said = [option.format_map(places) for option in options], said.format_map(places)
    with pytest.raises(SystemExit) as stopped:
        gpt.main(options)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1
    assert said in err


def test_cuda_is_refused_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        gpt.main(["--device", "cuda"])
    assert capsys.readouterr().err.endswith("argument --device: torch sees no GPU here\n")


def test_text_is_the_same_at_each_run() -> None:
    files = text.text_files()
    assert files == sorted(files)
    assert Path(json.__file__).parent.parent == files[0].parent
    first, again = (text.read_bytes(files, 100_000) for _ in range(2))
    assert first.shape == (100_000,)
    assert torch.equal(first, again)
    assert bytes(first[: files[0].stat().st_size].tolist()) == files[0].read_bytes()[:100_000]


def test_directory_is_read_without_what_is_hidden(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.txt", ".git/d", "a/__pycache__/e.pyc"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    assert bytes(text.read_bytes(text.text_files(tmp_path), 1000).tolist()) == b"a/c.txtb.txt"


def test_held_out_part_is_never_trained_on() -> None:
    data = torch.arange(200).to(torch.uint8)
    training, held_out = text.split(data, block_size=8)
    assert torch.equal(torch.cat([training, held_out]), data)
    for batch in text.validation_batches(held_out, batch_size=4, block_size=8, count=3):
        assert torch.equal(batch["y"], batch["x"] + 1)
        assert batch["x"].min() >= 180
    for _, batch in zip(range(50), text.batches(training, 4, 8, seed=0), strict=False):
        assert torch.equal(batch["y"], batch["x"] + 1)
        assert batch["y"].max() < 180


def test_batches_reach_both_ends_of_the_text() -> None:
    data = torch.arange(10).to(torch.uint8)
    _, *rest = [batch for _, batch in zip(range(50), text.batches(data, 4, 8, seed=0), strict=False)]
    assert min(int(batch["x"].min()) for batch in rest) == 0
    assert max(int(batch["y"].max()) for batch in rest) == 9
    whole = text.validation_batches(data, 2, 8, 1)[0]
    assert whole["x"][:, 0].tolist() == [0, 1]


def test_later_bytes_do_not_reach_earlier_logits() -> None:
    model = GPT(layers=2, width=16, heads=2, block_size=8)
    params = model.init(torch.tensor([1, 2]))
    tokens = torch.randint(256, (3, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 256
    before, after = model.apply(params, tokens), model.apply(params, changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5:], after[:, 5:]).all(dim=-1).any()


def test_dropout_depends_on_the_key_only() -> None:
    model = GPT(layers=1, width=16, heads=2, block_size=8, dropout=0.5)
    params, tokens = model.init(torch.tensor([1, 2])), torch.randint(256, (3, 8))
    first, second = torch.tensor([3, 4]), torch.tensor([5, 6])
    assert torch.equal(model.apply(params, tokens, first), model.apply(params, tokens, first))
    assert not torch.equal(model.apply(params, tokens, first), model.apply(params, tokens, second))
    assert not torch.equal(model.apply(params, tokens, first), model.apply(params, tokens))


def test_width_is_a_multiple_of_heads() -> None:
    with pytest.raises(ValueError, match="width 10 is not a multiple of 4 heads"):
        GPT(width=10, heads=4)
