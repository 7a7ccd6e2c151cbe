"""Run the graphs that torch's compiler gets, call by call, where a test does not ask for its kernels.

A kernel of inductor's on a CPU is a run of g++, which takes longer than all the rest of a test, and what the compiler
makes of a graph is seldom the subject: the rewrites in front of it are. Tests marked ``kernels`` compile, and so do all
tests in the profile ``thorough``.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

__all__ = ["compiles", "interpreted"]


def _interpreter(module: fx.GraphModule) -> Callable[[list[Tensor]], Any]:
    """Return what calls a graph as a compiled function is called."""
    importlib.import_module("torch._inductor.lowering")  # what a pass has put into a graph may name it
    interpreter = fx.Interpreter(module)

    def call(given: list[Tensor]) -> Any:
        arguments = [*given]
        given.clear()  # a compiled function frees its arguments, too
        with torch.no_grad():
            return interpreter.run(*arguments)

    return call


def _no_key(*_: Any) -> None:
    importlib.import_module("torch._inductor.lowering")  # torch's formulas take it to be there


def compiles() -> bool:
    """Whether steps that are made now are compiled."""
    from functional_cg.stages.lower import inductor

    return inductor._made is not _interpreter


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Compile nothing inside of the block, and look up nothing that was compiled before."""
    lower = "functional_cg.stages.lower.inductor"
    with mock.patch(f"{lower}._made", _interpreter), mock.patch(f"{lower}.key_of", _no_key):
        yield
