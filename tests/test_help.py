"""``help()`` of what is public: short, and an index first."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, get_overloads

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import errors, testing
from functional_cg.testing import strategies
from tests.exports import exports, index

report = pytest.importorskip("functional_cg.report", reason="needs matplotlib", exc_type=ImportError)

TWO_SCREENS = 100  # lines
MODULES = (
    fcg, fcg.nn, fcg.optim, fcg.precision, fcg.random, fcg.sharding, fcg.tree, errors, report, testing, strategies,
)  # fmt: skip
CLASSES = (fcg.GraphFn, fcg.GraphStep, fcg.LossScale, fcg.TrainState)


def shown(thing: object) -> list[str]:
    return pydoc.render_doc(thing, renderer=pydoc.plaintext).splitlines()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_module_fits_two_screens_and_has_an_index(module: ModuleType) -> None:
    page = shown(module)
    assert len(page) <= TWO_SCREENS
    assert exports(module) == index(module)
    assert not {"CLASSES", "FUNCTIONS"} & set(page)  # the manual pages are one `help()` further


@pytest.mark.parametrize("function", [fcg.graph_step, fcg.graph_fn, fcg.value_and_grad, fcg.from_module])
def test_a_function_fits_two_screens(function: object) -> None:
    assert len(shown(function)) <= TWO_SCREENS


@pytest.mark.parametrize("cls", CLASSES)
def test_a_class_lists_its_methods_first(cls: type) -> None:
    listed = (cls.__doc__ or "").partition("Methods:\n")[2].partition("\n\n")[0]
    names = [
        name
        for entry in re.findall(r"^      ([\w, ]+): ", listed, re.MULTILINE)
        for name in entry.split(", ")
    ]
    public = [name for name, _ in inspect.getmembers(cls, inspect.isroutine) if not name.startswith("_")]
    assert sorted(names) == public


def public_classes() -> list[type]:
    found = {name: getattr(module, name) for module in MODULES for name in exports(module)}
    return [
        one for one in found.values() if isinstance(one, type) and one.__module__.startswith("functional_cg")
    ]


def test_a_class_fits_two_screens() -> None:
    """A NamedTuple cannot hide what it inherits from tuple, which makes a third of a screen."""
    limits = {cls: TWO_SCREENS + 30 * issubclass(cls, tuple) for cls in public_classes()}
    assert len(limits) > 90
    assert not {cls for cls, limit in limits.items() if len(shown(cls)) > limit}


def test_states_and_classes_of_users_fit_too() -> None:
    class Averaged(fcg.TrainState):
        """A state with an average."""

        average: dict[str, Tensor]

        def evaluated(self) -> Tensor:
            return self.average["w"]

    assert {"create", "evaluated"} == {name for name in dir(Averaged) if not name.startswith("_")}
    state = Averaged.create(
        params={"w": torch.ones(2)}, optimizer=fcg.optim.sgd(0.1), average={"w": torch.ones(2)}
    )
    step = fcg.graph_step(lambda state: (state, {}))
    for thing in (Averaged, state, state.params, step, state.optimizer):
        assert len(shown(thing)) <= TWO_SCREENS
    assert {"apply_gradients", "evaluated", "average"} <= set(dir(state.tree))  # instances are not concerned


def test_the_checks_find_what_they_are_for() -> None:
    text = "Title.\n\nA group:\n\n  one, two  what they do\n  three,\n  four    the rest\n    code\n"
    module = ModuleType("planted", text)
    assert index(module) == ["four", "one", "three", "two"]
    module.__dict__.update(__all__=["render_doc"], render_doc=pydoc.render_doc)
    assert "FUNCTIONS" in shown(module)


def documented() -> dict[str, tuple[list[str], list[str]]]:
    """By name of what has a section of arguments: those of its page, and those of its signature."""
    found = {}
    for module in MODULES:
        for name in exports(module):
            one = getattr(module, name)
            parts = inspect.getmembers(one, inspect.isroutine) if isinstance(one, type) else []
            for path, thing in [(name, one), *((f"{name}.{part}", value) for part, value in parts)]:
                page = re.search(r"^Args:\n((?:  .*\n|\n)+)", f"{inspect.getdoc(thing)}\n", re.MULTILINE)
                if page and callable(thing):
                    lines = re.findall(r"^  \*{0,2}(\w[\w, ]*): ", page[1], re.MULTILINE)
                    own = [one for one in inspect.signature(thing).parameters if one != "self"]
                    found[f"{module.__name__}.{path}"] = (
                        [one for line in lines for one in line.split(", ")],
                        own,
                    )
    return found


def test_an_argument_is_documented_if_it_exists_and_only_then() -> None:
    pages = documented()
    assert len(pages) > 80
    assert {
        name: (page, own)
        for name, (page, own) in pages.items()
        if {*page} - {*own} or {*own} - {*page} - {"args", "kwargs"}
    } == {}


@pytest.mark.parametrize("transform", [fcg.graph_step, fcg.graph_fn])
def test_the_options_of_a_step_are_in_its_signature(transform: Callable[..., Any]) -> None:
    own = inspect.signature(transform)
    declared = [inspect.signature(one) for one in get_overloads(transform)]
    assert len(declared) == 2
    for one in declared:
        assert {name: p.default for name, p in one.parameters.items() if name != "fn"} == {
            name: p.default for name, p in own.parameters.items() if name != "fn"
        }
    assert "certify: 'Certify' = 'auto'" in "\n".join(shown(transform))
