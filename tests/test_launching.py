"""Notebook functions on ranks: the script that is generated, and the results."""

from __future__ import annotations

import os
import string as text
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from notebooks.helpers.collectives import pieces, planned_bytes
from notebooks.helpers.launching import on_ranks, script_of

LIMIT = 3
NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def letters(words: list[str]) -> Counter[str]:
    return Counter(letter for word in words for letter in word if letter in text.ascii_letters)


def most(words: list[str]) -> list[str]:
    return sorted(letters(words), key=lambda letter: -letters(words)[letter])[:LIMIT]


def factorial(n: int) -> int:
    return 1 if n < 2 else n * factorial(n - 1)


def rank_and(value: Any) -> tuple[int, Any]:
    return int(os.environ["RANK"]), value


def fails() -> None:
    raise KeyError("of this rank")


def test_a_script_has_what_its_function_uses() -> None:
    names: dict[str, Any] = {}
    exec(script_of(most), names)
    assert names["most"](["a b", "bab"]) == most(["a b", "bab"]) == ["b", "a"]
    assert {"most", "letters", "text", "Counter", "LIMIT"} <= names.keys()
    assert "words" not in names  # a name of an argument, whatever it is elsewhere


def test_a_function_may_call_itself() -> None:
    names: dict[str, Any] = {}
    exec(script_of(factorial), names)
    assert names["factorial"](4) == 24


def test_ranks_return_in_their_order_and_a_failure_is_told() -> None:
    assert on_ranks(2, rank_and, {"x": 1}) == [(0, {"x": 1}), (1, {"x": 1})]
    with pytest.raises(RuntimeError, match=r"rank 0 of `fails` failed:(.|\n)*KeyError: 'of this rank'"):
        on_ranks(1, fails)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [0, 1, 5, 16])
def test_pieces_are_equal_and_cover_all_elements(size: int, ranks: int) -> None:
    held = pieces(size, ranks)
    assert [element for piece in held for element in piece][:size] == list(range(size))
    assert len({len(piece) for piece in held}) == 1
    assert len(held) * len(held[0]) - size < max(ranks, 1)


def test_planned_bytes_shrink_with_the_stage() -> None:
    params = {"w": torch.zeros(8, 3), "scale": torch.tensor(1.0)}
    one = planned_bytes(params, 1, 3)
    assert one == planned_bytes(params, 1, 1) == {"parameters": 100, "gradients": 100, "moments": 200}
    totals = [sum(planned_bytes(params, 4, stage).values()) for stage in (1, 2, 3)]
    assert totals == [100 + 100 + 56, 100 + 28 + 56, 28 + 28 + 56]


def test_a_script_without_a_guard_of_its_main_part_runs_once(tmp_path: Path) -> None:
    """Ranks run the function; they do not import the program that starts them."""
    script = tmp_path / "program.py"
    script.write_text(
        "from helpers.launching import on_ranks\n"
        "print('begins')\n"
        "def seven():\n"
        "    return 7\n"
        "print(on_ranks(2, seven))\n"
    )
    here = {**os.environ, "PYTHONPATH": str(NOTEBOOKS)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False, env=here
    )
    assert done.stdout.splitlines() == ["begins", "[7, 7]"], done.stderr
