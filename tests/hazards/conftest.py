"""Compiled steps of the hazard tests write their slots, on a host, too."""

from __future__ import annotations

import pytest

from tests.compiled_graphs import lower_as_on_a_gpu
from tests.hazards.law import COMPILED


@pytest.fixture(autouse=True)
def _as_on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place that is compiled, as on a GPU."""
    callspec = getattr(request.node, "callspec", None)  # of a test with parameters
    if callspec is not None and callspec.params.get("place") is COMPILED:
        monkeypatch.setattr("functional_cg.step.captures.lower", lower_as_on_a_gpu)
