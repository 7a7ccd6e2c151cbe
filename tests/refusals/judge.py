"""Checks what every refusal promises: its class, its message, nothing launched, the state still valid."""

import inspect
import os
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

import functional_cg as fcg
from functional_cg.stages.run.capture import CPUBackend

Step = Callable[[Any, Any], Any]


class SpyBackend(CPUBackend):
    """Counts captures: a refusal comes before the first one."""

    def __init__(self) -> None:
        self.captures = 0

    def capture(self, *args: Any) -> Any:
        self.captures += 1
        return super().capture(*args)


def a_state() -> Any:
    """A small state: ``w`` f32[3] and ``n`` i64[]."""
    return fcg.place({"w": torch.arange(3.0), "n": torch.zeros((), dtype=torch.int64)})


def a_batch() -> dict[str, Any]:
    """Inputs of the kinds that steps stumble over."""
    return {
        "x": torch.arange(12.0).reshape(4, 3),
        "s": torch.tensor(2.0),
        "i": torch.tensor(1),
        "idx": torch.tensor([0, 2]),
        "m": torch.tensor([True, False, True, False]),
    }


def pure(state: Any, batch: Any) -> Any:
    """The corrected step: nothing in it is refused."""
    return {**state, "w": state["w"] + batch["x"].sum()}, {"sum": batch["x"].sum()}


def metric(function: Callable[[Any, Any], Any]) -> Step:
    """A step that leaves the state alone and returns `function` of it as a metric."""

    def step(s: Any, b: Any) -> Any:
        return s, {"out": function(s, b)}

    step.__name__ = function.__name__
    return step


def same(a: Any, b: Any) -> bool:
    """Whether two pytrees are equal, tensors bit for bit."""
    pairs = zip(fcg.tree.leaves(a), fcg.tree.leaves(b), strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def assert_still_good(state: Any, before: Any, generation: int) -> None:
    """The state is what it was, of the same generation, and a corrected call takes it on."""
    assert state.generation == generation
    assert same(fcg.snapshot(state), before)
    batch = a_batch()
    expected = fcg.graph_step(pure).eager(fcg.place(before), batch)
    new, metrics = fcg.graph_step(pure)(state, batch)
    assert new.generation == generation + 1
    assert same(fcg.snapshot(new), fcg.snapshot(expected[0]))
    assert same(metrics, expected[1])


def assert_line_of(function: Callable[..., Any], message: str) -> None:
    """The message names a line inside of `function`."""
    source = inspect.unwrap(function)
    lines, first = inspect.getsourcelines(source)
    name = os.path.basename(source.__code__.co_filename)
    named = [int(line) for line in re.findall(rf"{re.escape(name)}:(\d+)", message)]
    assert named, f"no line of {name} in:\n{message}"
    assert first <= named[-1] < first + len(lines), message


def assert_refused(
    function: Step,
    error: type[fcg.FunctionalCGError],
    match: str,
    *,
    where: Callable[..., Any] | None = None,
    **options: Any,
) -> str:
    """Call `function` as a step: it is refused with `error` before anything runs, and nothing is lost.

    Args:
      function: The step.
      error: The exact class.
      match: A regular expression for the message.
      where: The function whose line the message has to name; None where there is no line to name.
      options: Of ``graph_step``.
    Returns:
      The message.
    """
    backend, state, batch = SpyBackend(), a_state(), a_batch()
    before, inputs = fcg.snapshot(state), fcg.tree.map(torch.clone, batch)
    generators = torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state())
    step = fcg.graph_step(function, backend=backend, **options)
    with pytest.raises(error, match=match) as caught:
        step(state, batch)
    message = str(caught.value)
    assert type(caught.value) is error
    assert message.startswith(f"`{function.__name__}`: "), message
    assert "\nTo fix: " in message
    assert message.endswith(f"\nDocs: help(functional_cg.{error.__name__})")
    if where is not None:
        assert_line_of(where, message)
    assert backend.captures == step.stats.captures == step.stats.replays == 0
    assert same(batch, inputs)
    assert torch.equal(generators[0], torch.get_rng_state())
    if (
        threading.active_count() == 1
    ):  # what another thread may have drawn, such as a compiler's, is not drawn again
        assert generators[1:] == (random.getstate(), repr(numpy.random.get_state()))
    assert_still_good(state, before, 0)
    return message


def accepted(function: Step, **options: Any) -> Any:
    """Metrics of a step that is accepted, after two replays; each is bitwise the eager run."""
    step, state, batch = fcg.graph_step(function, **options), a_state(), a_batch()
    twin = fcg.fork(state)
    for _ in range(2):
        state, metrics = step(state, batch)
        twin, expected = step.eager(twin, batch)
        assert same(metrics, expected)
        assert same(fcg.snapshot(state), fcg.snapshot(twin))
    return metrics


@dataclass(frozen=True)
class Spelling:
    """One way to ask for a value.

    Attributes:
      refused: The function that asks.
      fix: Words of the fix, as the message gives them.
      twin: The function written as advised; the same value, where there is one.
    """

    refused: Step
    fix: str
    twin: Step | None = None

    def __str__(self) -> str:
        return self.refused.__name__


def assert_spelling(spelling: Spelling) -> None:
    """The function is refused with its own fix; its twin is accepted and means the same."""
    fix = rf"\nTo fix: .*{re.escape(spelling.fix)}"
    assert_refused(metric(spelling.refused), fcg.HostSyncError, fix, where=spelling.refused)
    if spelling.twin is not None:
        got = accepted(metric(spelling.twin))["out"]
        meant = spelling.refused(fcg.snapshot(a_state()), a_batch())
        torch.testing.assert_close(got, torch.as_tensor(meant, dtype=got.dtype), rtol=1e-6, atol=0.0)
