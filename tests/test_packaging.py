"""The source distribution makes a wheel, and the wheel holds a package that runs by itself."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import functional_cg as fcg

ROOT = Path(__file__).resolve().parent.parent

SMOKE = """
import sys
sys.path.insert(0, sys.argv[1])
from importlib.metadata import version
import torch
import functional_cg as fcg
assert fcg.__file__.startswith(sys.argv[1]), fcg.__file__
assert version("functional-cg") == fcg.__version__
state = fcg.TrainState.create(params={"w": torch.ones(3)}, optimizer=fcg.optim.sgd(0.5))
step = fcg.graph_step(lambda state, x: (state.apply_gradients({"w": x}), {"sum": x.sum()}))
for _ in range(3):
    state, metrics = step(state, torch.ones(3))
print(state.params["w"].tolist(), step.stats.replays)
"""


def build(source: Path, target: Path, kind: str) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (built,) = target.iterdir()
    return built


def test_a_wheel_made_of_the_source_distribution_runs(tmp_path: Path) -> None:
    source = build(ROOT, tmp_path / "sdist", "sdist")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    wheel = build(tmp_path / source.name.removesuffix(".tar.gz"), tmp_path / "wheel", "wheel")
    assert fcg.__version__ in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    assert {"functional_cg/py.typed", "functional_cg/optim/README.md", "functional_cg/CHANGELOG.md"} <= {
        *names
    }
    assert not [name for name in names if not name.startswith(("functional_cg/", "functional_cg-"))]
    said = subprocess.run(
        [sys.executable, "-I", "-c", SMOKE, str(tmp_path / "installed")],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert said.stdout == "[-0.5, -0.5, -0.5] 3\n"


def test_the_release_notes_begin_with_this_version() -> None:
    notes = (ROOT / "functional_cg" / "CHANGELOG.md").read_text(encoding="utf-8")
    assert notes.split("\n## ")[1].startswith(fcg.__version__)
