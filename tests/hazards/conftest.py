"""Compiled steps of the hazard tests write their slots, on a host, too."""

from __future__ import annotations

import pytest

from tests.compiled_graphs import lower_as_on_a_gpu
from tests.hazards.law import COMPILED
from tests.shares import share


@pytest.fixture(autouse=True)
def _as_on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place that is compiled, as on a GPU."""
    callspec = getattr(request.node, "callspec", None)  # of a test with parameters
    if callspec is not None and callspec.params.get("place") is COMPILED:
        monkeypatch.setattr("functional_cg.step.captures.lower", lower_as_on_a_gpu)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Compile one of four hazards on a host by default; on a GPU, and in the profile ``thorough``, all of them."""
    compiled = [
        item
        for item in items
        if (of := getattr(item, "callspec", None)) is not None and of.params.get("place") is COMPILED
    ]
    left_out = {id(item) for item in compiled} - {id(item) for item in share(compiled, 4)}
    if left_out and len(compiled) > 1:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
        items[:] = [item for item in items if id(item) not in left_out]
