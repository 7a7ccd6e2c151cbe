"""What users read: the programs run as printed and learn, links lead somewhere, and what is named exists."""

from __future__ import annotations

import builtins
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_cg as fcg
from functional_cg.testing import assert_replay_equals_eager
from tests.exports import exports

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = sorted(
    [
        README,
        ROOT / "functional_cg" / "FAQ.md",
        *(
            page
            for of in ("functional_cg/**", "tests/**", "notebooks")
            for page in ROOT.glob(f"{of}/README.md")
        ),
    ]
)
OPTIMIZERS = ROOT / "functional_cg" / "optim" / "README.md"
WORDS = 900


def programs(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def run(page: Path, index: int = 0) -> dict[str, Any]:
    """Execute a program of a page, by default the first."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(compile(programs(page)[index], str(page), "exec"), names)
    return names


def test_the_program_runs_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(README)
    losses = [float(loss) for loss in re.findall(r"tensor\((\S+?)\)$", capsys.readouterr().out, re.MULTILINE)]
    assert len(losses) == 10
    assert losses[-1] < 0.002
    assert names["train_step"].stats.captures == 1
    assert names["train_step"].stats.replays == 320
    resumed = fcg.load(tmp_path / "run.safetensors", names["state"])
    assert torch.equal(resumed.step, torch.tensor(320))


def test_the_sweep_runs_and_its_table_is_true(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(ROOT / "functional_cg" / "transforms" / "README.md", 1)
    assert re.search(r"the best rate is \de-\d\d", capsys.readouterr().out)
    step, state, losses, x = names["train_step"], names["state"], names["losses"], names["x"]
    y = x.sum(dim=1, keepdim=True)
    fcg.save(tmp_path / "all.safetensors", state)
    before = fcg.snapshot(state)
    stopping = fcg.graph_step(step.__wrapped__)
    state, _ = stopping(state, (x, y), active=losses < 0.01)
    still = (before.params["weight"] == state.params["weight"]).flatten(1).all(dim=1)
    assert still.tolist() == (losses >= 0.01).tolist()
    with pytest.raises(fcg.LayoutError, match="max_captures=2"):
        step(fcg.tree.take(state, [3, 3, 2, 0]), (x, y))
    assert (
        len(fcg.graph_step(step.__wrapped__)(fcg.tree.take(state, losses.isfinite()), (x, y))[1]["loss"])
        == 16
    )
    best, median, worst = losses.nanquantile(torch.tensor([0.0, 0.5, 1.0]))
    assert best == losses.min() < median < worst == losses.max()
    found = step.find_nonfinite(state, (x * torch.nan, y))
    assert found.given[0].startswith("batch[0]")
    best, module = fcg.tree.take(state, 3), torch.nn.Linear(2, 1)
    module.load_state_dict(names["apply"].state_dict(best.params, best.buffers))
    assert torch.equal(module.weight, state.params["weight"][3])
    assert torch.equal(fcg.load(tmp_path / "all.safetensors", state).params["bias"], before.params["bias"])


def test_the_step_without_modules_runs_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(ROOT / "functional_cg" / "transforms" / "README.md")
    assert "tensor(" in capsys.readouterr().out
    assert names["metrics"]["loss"] < 0.01
    assert names["train_step"].stats.replays == 300


def test_the_bad_step_is_found_as_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "functional_cg" / "step" / "README.md"
    names = run(page)
    printed, shown = capsys.readouterr().out.splitlines(), page.read_text(encoding="utf-8").splitlines()
    told = [
        printed[0],
        printed[1],
        printed[4],
    ]  # the others name the file and the function, which is of this test
    assert set(told) <= set(shown)
    assert names["found"].number == 37


def test_the_answers_run(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for program in programs(ROOT / "functional_cg" / "FAQ.md"):
        exec(compile(program, "FAQ.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "peak" in shown
    assert "torch.Size([16, 1])" in shown
    assert names["state"].step == 5
    assert torch.equal(names["model"][0].weight, names["state"].params["0.weight"])
    assert int(names["model"][1].num_batches_tracked) == 8  # four calls, and four slices


@pytest.mark.parametrize("index", range(len(programs(OPTIMIZERS))))
def test_each_program_of_the_optimizers_runs_and_its_state_trains(index: int) -> None:
    names = run(OPTIMIZERS, index)

    @fcg.graph_step
    def train_step(state: Any, target: torch.Tensor) -> Any:
        def loss_fn(params: Any) -> torch.Tensor:
            return sum((p - target).square().sum() for p in fcg.tree.leaves(params))

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    assert_replay_equals_eager(train_step, names["state"], [torch.randn(1)[0] for _ in range(4)])


def test_it_is_two_screens() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_and_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert link.startswith("https://") or (page.parent / link).exists(), link
    for name in re.findall(r"`(\w+Error)`", text):
        assert name in exports(fcg) or hasattr(builtins, name)
    for path in re.findall(r"\bfcg((?:\.[a-zA-Z_]\w*)+)", text):
        reduce(getattr, path[1:].split("."), fcg)
