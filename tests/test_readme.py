"""The README's program runs as printed, and learns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def test_the_program_runs_and_learns(capsys: Any) -> None:
    program = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert program is not None
    names: dict[str, Any] = {}
    exec(compile(program.group(1), "README.md", "exec"), names)
    assert "tensor(" in capsys.readouterr().out
    assert names["metrics"]["loss"] < 0.01
    assert names["train_step"].stats.captures == 1
    assert names["train_step"].stats.replays == 300


def test_the_error_names_exist() -> None:
    import functional_cg as fcg

    for name in set(re.findall(r"`(\w+Error)`", README)):
        assert name in fcg.__all__
