"""The maintainers' page matches the package."""

from __future__ import annotations

import re

import pytest

from tests.rooms import PAGE, page
from tests.test_layers import FOLDERS, ROOT, SOURCES

PATHS = sorted(set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", PAGE.read_text(encoding="utf-8"))))


def test_the_drawing_is_that_of_the_imports() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "`python -m tests.rooms` draws it anew"


@pytest.mark.parametrize("path", PATHS)
def test_what_the_page_names_is_there(path: str) -> None:
    places = (ROOT, ROOT / "stages", ROOT.parent)
    assert any((place / path).exists() for place in places)


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_each_room_says_what_it_is(folder: str) -> None:
    assert SOURCES[folder].startswith('"""')
