"""Each mistake of the pages gets the message written below it, and its advice, applied, works."""

from __future__ import annotations

import collections
import re

import pytest

from tests.mistakes.table import Row, message_of, rows

ROWS = rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.page}: {row.name}")
def test_the_message_names_the_mistake_and_its_fix_works(row: Row) -> None:
    text = message_of(row, "-")
    assert matches(row.says, text), text
    places = re.findall(r"(\w+)\.py:\d+", text.partition("To fix:")[0])
    assert not places or row.page in places, "not a line of the user's own"
    assert message_of(row, "+") == ""
    assert row.advice_taken(text), text


def matches(said: tuple[str, ...], text: str) -> bool:
    """Whether a text has these lines in this order; ``...`` stands for anything."""
    pattern = r"(.|\n)*\n".join(re.escape(line).replace(r"\.\.\.", ".*") for line in said)
    return re.search(f"(?:^|\n){pattern}(?:\n|$)", text) is not None


def test_there_are_many_mistakes_and_each_has_a_name() -> None:
    assert len(ROWS) >= 200
    assert [name for name, count in collections.Counter(row.name for row in ROWS).items() if count > 1] == []
    assert [row.name for row in ROWS if len(row.says) < 1] == []


def test_a_row_that_says_something_else_fails() -> None:
    assert matches(("a ... c", "e"), "a b c\nd\ne")
    assert not matches(("a ... c", "e"), "a b c\nd e")
    assert not matches(("a",), "a b")
