"""Runs of many workloads: caches that are filled side by side, and what rows add up to."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench import rates
from tests.bench.many import fill, means
from tests.bench.measure import Row, Samples
from tests.bench.modules import workload

CPU = torch.device("cpu")
WRITES = "import os, pathlib, sys; folder = pathlib.Path(os.environ['TORCHINDUCTOR_CACHE_DIR']);"
WRITES += "folder.mkdir(exist_ok=True); (folder / sys.argv[1]).touch(); (folder / 'x.best_config').touch()"


def filled(
    monkeypatch: pytest.MonkeyPatch, folder: Path, code: str, names: list[str], seconds: float, jobs: int = 2
) -> dict[str, str]:
    def child(system: str, work: str, device: torch.device, out: Path) -> list[str]:
        return [sys.executable, "-S", "-c", code, system]

    monkeypatch.setattr(fill, "child", child)
    pairs = [("work", name) for name in names]
    found = fill.fill(pairs, CPU, jobs, folder, time.monotonic() + seconds)
    return {system: end for _, system, end in found}


def test_what_is_compiled_stays_and_what_is_tuned_beside_others_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends = filled(monkeypatch, tmp_path, WRITES, ["ours", "compile", "max-autotune"], 30.0)
    assert ends.keys() == {"ours", "compile", "max-autotune"}
    assert all(end.endswith(" s") for end in ends.values())
    assert {one.name for one in Path(fill.caches(tmp_path)["TORCHINDUCTOR_CACHE_DIR"]).iterdir()} == {
        "ours",
        "compile",
    }
    apart = fill.caches(tmp_path, tuned=True)
    assert [one.name for one in Path(apart["TORCHINDUCTOR_CACHE_DIR"]).iterdir()] == ["max-autotune"]
    assert apart["TRITON_CACHE_DIR"] == fill.caches(tmp_path)["TRITON_CACHE_DIR"]


def test_a_process_that_fails_or_takes_too_long_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = (
        "import sys, time; time.sleep(60 * (sys.argv[1] == 'slow')); sys.exit(3 * (sys.argv[1] == 'wrong'))"
    )
    ends = filled(monkeypatch, tmp_path, code, ["slow", "wrong", "fine"], 1.5)
    assert ends["slow"] == "ended: the time limit was reached"
    assert ends["wrong"] == "ended with 3"
    assert ends["fine"].endswith(" s")


def row(
    work: str, system: str, ms: float | None, gib: float | None, ratio: float | None = None
) -> dict[str, Any]:
    times = None if ms is None else Samples(ms, 0.9 * ms, 1.1 * ms, 40)
    peak = None if gib is None else int(gib * 2**30)
    status = "skipped" if ms is None else "ok"
    made = Row(work, system, status, "no room" if ms is None else "", times, ratio=ratio, peak_bytes=peak)
    made.losses_agree = ms is not None
    found: dict[str, Any] = json.loads(made.as_json({"device": "a GPU"}))
    return found


ROWS = [
    row("zoo-a", "ours", 10.0, 6.0),
    row("zoo-a", "compile", 12.0, 8.0, 1.2),
    row("zoo-b", "ours", 20.0, 8.0),
    row("zoo-b", "compile", 19.0, 4.0, 0.95),
    row("zoo-c", "ours", 5.0, 1.0),
    row("zoo-c", "compile", None, None),
]


def test_means_name_the_worst_and_what_is_missing() -> None:
    (mean,) = means.means(ROWS)
    assert mean.times == {"zoo-a": 1.2, "zoo-b": 0.95}
    assert mean.memory == {"zoo-a": 0.75, "zoo-b": 2.0}
    text = str(mean)
    assert f"{math.sqrt(1.2 * 0.95):.2f}x of our time, the least for zoo-b: 0.95x" in text
    assert f"{math.sqrt(0.75 * 2):.2f} of its memory, the most for zoo-b: 2.00" in text
    assert "not compared: zoo-c" in text
    assert "nothing to compare" in str(replace(mean, times={}, memory={}, missing=[]))


def test_the_command_prints_rows_and_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in [*ROWS, row("mlp", "ours", 1.0, None)]))
    assert means.main([str(path), "--workload", "zoo-"]) == 0
    printed = capsys.readouterr().out
    assert "compile, 2 workloads" in printed
    assert "10.80-13.20" in printed
    assert "no room" in printed
    assert "mlp" not in printed


def test_utilization_is_of_the_peak_that_the_vendor_states(monkeypatch: pytest.MonkeyPatch) -> None:
    work = workload("gpt-nano")
    assert rates.utilization(work, CPU, 1.0) is None  # whose peak nobody states
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    found = rates.utilization(work, torch.device("cuda", 0), 1.0)
    assert found == pytest.approx(work.model_flops() / 1e-3 / 989e12)
    assert rates.utilization(workload("mlp-tiny"), torch.device("cuda", 0), 1.0) is None  # no language model


def test_children_do_not_fill_the_caches_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "of the user"))
    filled(monkeypatch, tmp_path / "run", WRITES.replace("mkdir(", "mkdir(parents=True, "), ["ours"], 30.0)
    assert not (tmp_path / "of the user").exists()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "of the user")
