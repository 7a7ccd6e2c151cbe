"""The tensors of a trace are of a class of their own: a step that asks for it is refused, however it asks."""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_cg as fcg


class Visitor:
    """Chooses what to do by the name of a class."""

    def visit_Tensor(self, x: Any) -> float:
        return 1.0

    def other(self, x: Any) -> float:
        return 2.0


BY_CLASS = {torch.Tensor: 1.0, float: 3.0}
CONTAINERS = {list: 2.0, dict: 3.0}
ASKED_TYPES: dict[str, Callable[[Any], Any]] = {
    "is": lambda x: type(x) is torch.Tensor,
    "is not": lambda x: type(x) is not torch.Tensor,
    "equals": lambda x: type(x) == torch.Tensor,  # noqa: E721
    "of its class": lambda x: x.__class__ is torch.Tensor,
    "among classes": lambda x: type(x) in (torch.Tensor, torch.nn.Parameter),
    "among the classes of a table": lambda x: type(x) in BY_CLASS,
    "looked up": lambda x: BY_CLASS.get(type(x), 2.0),
    "its name": lambda x: type(x).__name__ == "Tensor",
    "a method by its name": lambda x: getattr(Visitor(), f"visit_{x.__class__.__name__}", Visitor().other)(x),
    "its module": lambda x: type(x).__module__.startswith("torch._sub"),
    "as text": lambda x: "torch.Tensor" in str(type(x)),
    "in text": lambda x: "torch.Tensor" in f"{type(x)}",
    "in a list": lambda x: list(map(type, [x, x])) == [torch.Tensor, torch.Tensor],
    "in a set": lambda x: {type(one) for one in (x, x)} == {torch.Tensor},
    "each of them": lambda x: all(type(one) is torch.Tensor for one in (x, x)),
    "by a function of C": lambda x: operator.is_(type(x), torch.Tensor),
}
OTHER_TYPES: dict[str, Callable[[Any], Any]] = {
    "is an instance": lambda x: isinstance(x, torch.Tensor),
    "is a subclass": lambda x: issubclass(type(x), torch.Tensor),
    "no container": lambda x: type(x) in (list, tuple, dict),
    "no node of a table": lambda x: CONTAINERS.get(type(x), 5.0),
    "another class": lambda x: type(x) is list or type(x) == dict,  # noqa: E721
    "one class": lambda x: type(x) is type(x * 2) and type(x) == type(x + 1),  # noqa: E721
    "other classes": lambda x: [type(x)] == [list] or {type(x)} <= {list, dict},
    "tensors compared": lambda x: 2.0 if [x, 3] == [x, 4] else 1.0,
    "the type of a number": lambda x: float in (float, int) and float.__name__ == "float",
}


@pytest.mark.parametrize("ask", ASKED_TYPES.values(), ids=ASKED_TYPES)
def test_the_type_of_a_traced_tensor_is_not_asked_for(ask: Any) -> None:
    with pytest.raises(fcg.CaptureError, match=r"asks for the type(.|\n)*isinstance\(x, torch.Tensor\)"):
        fcg.graph_fn(lambda x: x * ask(x))(torch.ones(2))


@pytest.mark.parametrize("ask", OTHER_TYPES.values(), ids=OTHER_TYPES)
def test_a_question_that_any_tensor_answers_alike_is_accepted(ask: Any) -> None:
    def f(x: Any) -> Any:
        return x * ask(x)

    assert torch.equal(fcg.graph_fn(f)(torch.ones(2)), f(torch.ones(2)))


LIBRARY = """
import torch

BACKENDS = {torch.Tensor: "known"}


def looked_up(x):
    found = BACKENDS.get(type(x))
    if found is None and isinstance(x, torch.Tensor):
        found = BACKENDS[type(x)] = "known"
    return found == "known"


def by_its_text(x):
    return str(type(x)).startswith("<class 'torch.")


def by_its_name(x):
    return type(x).__name__ in ("Tensor", "Parameter") or isinstance(x, torch.Tensor)


def compared(x):
    return type(x) is torch.Tensor


def compared_with_several(x):
    return type(x) in (torch.Tensor, torch.nn.Parameter)


def compared_all_at_once(x):
    return [type(one) for one in (x, x)] == [torch.Tensor] * 2


def compared_with_others(x):
    return type(x) not in {list, tuple} and [type(x)] == [type(x * 2)]
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that is installed as packages are."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "choosing_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "choosing_library", raising=False)
    return importlib.import_module("choosing_library")


@pytest.mark.parametrize("name", ["looked_up", "by_its_text", "by_its_name", "compared_with_others"])
def test_an_installed_library_may_ask_since_it_falls_back_on_isinstance(library: Any, name: str) -> None:
    """As transformers asks for its outputs (``str(type(x))``), and einops for its backends (a table)."""
    ask = getattr(library, name)
    assert ask(torch.ones(2))
    assert torch.equal(
        fcg.graph_fn(lambda x: x * (2.0 if ask(x) else 3.0))(torch.ones(2)), torch.full((2,), 2.0)
    )


@pytest.mark.parametrize("name", ["compared", "compared_with_several", "compared_all_at_once"])
def test_an_installed_library_that_compares_classes_is_refused(library: Any, name: str) -> None:
    ask = getattr(library, name)
    assert ask(torch.ones(2))
    with pytest.raises(fcg.CaptureError, match="asks for the type"):
        fcg.graph_fn(lambda x: x * (2.0 if ask(x) else 3.0))(torch.ones(2))


def test_the_type_may_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    """As the message advises."""

    def f(x: Any) -> Any:
        print(type(x))  # noqa: T201
        return x * 2

    assert torch.equal(fcg.graph_fn(f)(torch.ones(2)), torch.full((2,), 2.0))
    assert "Tensor" in capsys.readouterr().out


class Marked(torch.Tensor):
    """A tensor whose class says what it is."""


@pytest.mark.parametrize(
    ("asks", "advice"),
    [
        (lambda x: x * BY_CLASS[type(x)], "choose by `isinstance(x, torch.Tensor)`"),
        (lambda x: x.as_subclass(Marked) * 2, "a step computes on plain tensors"),
    ],
)
def test_what_raises_because_of_the_class_is_told_so(asks: Any, advice: str) -> None:
    with pytest.raises(fcg.CaptureError) as error:
        fcg.graph_fn(asks)(torch.ones(2))
    assert f"To fix: {advice}" in str(error.value)
