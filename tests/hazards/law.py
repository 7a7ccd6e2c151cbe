"""Shared by the hazard tests: the backends on which a step runs, and the law that holds on all of them.

A test marked ``everywhere`` runs on the CPU backend, on the simulator, compiled as for a GPU, and, where there is one,
on a GPU, as it is and compiled; one marked ``as_it_is`` is not compiled.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import functional_cg as fcg
from functional_cg.ambient.setting import AsTraced
from functional_cg.testing import Simulator, assert_no_alias, assert_trees_all_equal


@dataclass(frozen=True)
class Place:
    """A device and the backend that replays there.

    Attributes:
      device: Where states live.
      backend: Makes the ``backend=`` of a step.
      lowering: Of a step. Where it is ``"aten"``, a replay repeats the calls of the eager run.
    """

    device: str
    backend: Callable[[], Any]
    lowering: Any = "aten"

    def step(self, fn: Any, **options: Any) -> Any:
        """A step that runs here."""
        return fcg.graph_step(fn, lowering=self.lowering, **{"backend": self.backend(), **options})

    def assert_same(self, got: Any, expected: Any, name: str = "tree", rtol: float = 2e-4) -> None:
        """Two trees are equal bit by bit; where a compiler rounds elsewhere, one call's results are that near."""
        if self.lowering == "aten":
            assert_trees_all_equal(got, expected, name)
            return
        fcg.tree.map(lambda one, other: _assert_near(one, other, rtol, name), got, expected)

    def put(self, tree: Any) -> Any:
        """Copies of the tensors of a tree, on the device."""
        return fcg.tree.map(lambda leaf: leaf.to(self.device, copy=True), tree)

    def randn(self, *shape: int, seed: int) -> Tensor:
        """Normal numbers, the same ones on every device; no global generator is touched."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def poison(self, backend: Any) -> None:
        """Overwrite what lives in captures between two calls, where the backend can."""
        if isinstance(backend, Simulator):
            backend.poison()

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()


CPU = Place("cpu", lambda: "auto")
SIMULATOR = Place("cpu", Simulator)
GPU = Place("cuda", lambda: "auto")
# That complex numbers are compiled is warned of.
_complex = pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
# What is compiled for a GPU writes the slots itself; the fixture of this folder has it do so on a host.
COMPILED = Place("cpu", lambda: "auto", "inductor")
COMPILED_ON_A_GPU = Place("cuda", lambda: "auto", "inductor")

# Warnings are printed and not raised on a GPU: what libraries warn of depends on the machine.
on_a_gpu = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]
_AS_IT_IS = [
    pytest.param(CPU, id="cpu"),
    pytest.param(SIMULATOR, id="simulator"),
    pytest.param(GPU, id="cuda", marks=on_a_gpu),
]
_COMPILED = [
    pytest.param(COMPILED, id="compiled", marks=_complex),
    pytest.param(COMPILED_ON_A_GPU, id="cuda-compiled", marks=on_a_gpu),
]
everywhere = pytest.mark.parametrize("place", [*_AS_IT_IS, *_COMPILED])
# For what is decided before anything is lowered.
as_it_is = pytest.mark.parametrize("place", _AS_IT_IS)
on_both_devices = pytest.mark.parametrize(
    "place", [pytest.param(CPU, id="cpu"), pytest.param(GPU, id="cuda", marks=on_a_gpu)]
)


def _assert_near(one: Any, other: Any, rtol: float, name: str) -> None:
    if isinstance(one, Tensor):
        assert_close(
            one, other, rtol=rtol, atol=rtol / 16, equal_nan=True, msg=lambda text: f"{name}: {text}"
        )
    else:
        assert one == other, name


def overwrite(tree: Any) -> None:
    """Fill a caller's tensors with what nobody computes: the call has returned, so they are the caller's again."""
    for leaf in fcg.tree.leaves(tree):
        leaf.fill_(torch.nan if leaf.is_floating_point() or leaf.is_complex() else 1)


def assert_law(
    place: Place, fn: Any, state: Any, calls: Iterable[Any], *, rtol: float = 2e-4, **options: Any
) -> Any:
    """Each replay gives what the eager run gives, bitwise or but for rounding, and what was returned stays as it was.

    Args:
      place: Where to run.
      fn: The step's function.
      state: Pytree to start from; it stays as it is.
      calls: The batch of each call; all are overwritten once their call has returned.
      rtol: How near the results of a compiled call are.
      options: Of ``graph_step``.
    Returns:
      The step, its last state, and the metrics of each call.
    """
    backend = place.backend()
    step = place.step(fn, backend=backend, **options)
    captured, eager = fcg.place(state), fcg.place(state)
    kept: list[Any] = []
    copies: list[Any] = []
    for number, batch in enumerate(calls):
        if place.lowering != "aten":  # rounding does not add up
            eager = fcg.fork(captured)
        with AsTraced():
            eager, expected = step.eager(eager, batch)
        captured, metrics = step(captured, batch)
        overwrite(batch)
        place.assert_same((captured, metrics), (eager, expected), f"call {number}", rtol)
        kept.append(metrics)
        copies.append(fcg.snapshot(metrics))
        place.poison(backend)
    assert_trees_all_equal(kept, copies, "kept metrics")
    assert_no_alias(kept, captured)
    assert (step.stats.traces, step.stats.captures, step.stats.replays) == (1, 1, len(kept))
    return step, captured, kept


def living_tensors() -> int:
    """How many tensors Python holds."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
