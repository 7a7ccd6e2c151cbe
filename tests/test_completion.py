"""What completion offers: public names, fields, keys; in IPython, and in Python's own prompt."""

from __future__ import annotations

import rlcompleter
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import errors, testing
from functional_cg.testing import stateful, strategies
from tests.exports import exports

MODULES = (
    fcg, fcg.nn, fcg.optim, fcg.precision, fcg.random, fcg.sharding, fcg.tree, errors, testing, strategies,
)  # fmt: skip
PARTS = {
    fcg: {
        "errors",
        "nn",
        "optim",
        "precision",
        "random",
        "report",
        "sharding",
        "testing",
        "tree",
    },
    testing: {"stateful", "strategies"},
}


class Averaged(fcg.TrainState):
    average: dict[str, Tensor]

    def evaluated(self) -> Tensor:
        return self.average["w"]


def state_of() -> Any:
    params = {"wte": torch.ones(2), "head": {"w": torch.ones(1)}}
    return Averaged.create(params=params, optimizer=fcg.optim.sgd(0.1), average={"w": torch.ones(1)})


def tapped() -> Any:
    step = fcg.graph_step(lambda state, x: (fcg.tap("double", 2 * x), (state, {}))[1])
    step(fcg.place({"w": torch.ones(2)}), torch.ones(2))
    return step


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_module_lists_what_it_exports(module: ModuleType) -> None:
    listed = {name for name in dir(module) if not name.startswith("__")}
    assert listed == {*exports(module)} | PARTS.get(module, set())


def test_what_is_imported_on_demand_is_there() -> None:
    assert fcg.testing is testing
    assert (testing.strategies, testing.stateful) == (strategies, stateful)
    report = pytest.importorskip("functional_cg.report", reason="needs matplotlib", exc_type=ImportError)
    assert fcg.report is report
    assert {name for name in dir(report) if not name.startswith("__")} == {*exports(report)}


def test_a_module_that_cannot_be_imported_is_an_attribute_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``hasattr`` and ``help(fcg)`` must not fail for want of matplotlib."""
    monkeypatch.delattr(fcg, "report", raising=False)
    monkeypatch.setitem(sys.modules, "functional_cg.report", None)
    assert not hasattr(fcg, "report")


def test_a_state_lists_fields_methods_and_keys() -> None:
    state, step = state_of(), tapped()
    fields = {"average", "buffers", "grads", "key", "opt_state", "optimizer", "params", "step"}
    assert fields | {"apply_gradients", "evaluated", "latest", "replace"} <= set(dir(state))
    assert all(hasattr(state, name) for name in dir(state) if not name.startswith("_"))
    keys = {
        "params": (state.params, ["head", "wte"]),
        "nested": (state.params["head"], ["w"]),
        "a state": (state, []),
        "taps": (step.taps, ["double"]),
    }
    assert {name: thing._ipython_key_completions_() for name, (thing, _) in keys.items()} == {
        name: expected for name, (_, expected) in keys.items()
    }
    state.replace(average={"w": torch.zeros(1)})  # an old handle completes, too
    assert "params" in dir(state)


def test_the_prompt_of_python() -> None:
    completer = rlcompleter.Completer({"fcg": fcg, "state": state_of()})

    def completed(text: str) -> set[str]:
        found = iter(lambda: completer.complete(text, len(seen)), None)
        seen: list[str] = []
        for one in found:
            seen.append(one)
        return {one.removeprefix(text).rstrip("()") for one in seen}

    assert completed("fcg.") == {*exports(fcg)} | PARTS[fcg]
    assert {"params", "optimizer", "evaluated"} <= completed("state.")


def test_ipython() -> None:
    pytest.importorskip("IPython", reason="needs IPython")
    from IPython.core.completer import IPCompleter
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.user_ns.update(fcg=fcg, state=state_of(), params=state_of().params)
    completer: Any = IPCompleter(shell=shell, namespace=shell.user_ns, use_jedi=False)
    warnings.filterwarnings(
        "ignore", category=PendingDeprecationWarning
    )  # of `complete`, the stable way to ask

    def completed(text: str) -> set[str]:
        return {one.rpartition(".")[2].rpartition("'")[2] for one in completer.complete(text)[1]}

    assert completed("fcg.") == {*exports(fcg)} | PARTS[fcg]
    assert {"params", "optimizer", "evaluated"} <= completed("state.")
    assert completed("params['") == {"wte", "head"}
    completer.evaluation = (
        "unsafe"  # by default, IPython looks up no attribute of a class with a `__getattr__`
    )
    assert completed("state.params['") == {"wte", "head"}
    assert completed("state.params['head']['") == {"w"}
