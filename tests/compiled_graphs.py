"""Helpers for compiled steps: the graphs that the compiler receives, and the devices they run on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config

import functional_cg as fcg
from functional_cg.stages.branches.source import Lanes
from functional_cg.stages.lower.compiled import prepare
from functional_cg.stages.lower.graph import Entrance, build_graph
from functional_cg.stages.lower.in_place import InPlacePlan
from functional_cg.stages.plan import Buffers, Plan, Run
from functional_cg.stages.program import Program
from functional_cg.stages.schedule import schedule
from tests.branched import in_any_order
from tests.interpreted import compiles
from tests.shares import THOROUGH, diagonal, share

# Warnings are printed and not raised on a GPU: what libraries warn of depends on the machine.
ON_A_GPU = pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.filterwarnings("default")])
# Options with which torch's compiler pads rows of any length, on a host, too.
PADDED = {"disable_padding_cpu": False, "padding_stride_threshold": 8}
# On a host a compiled function writes no slot; on a GPU it writes them all, which a host can do, too. The fixture
# `compiled_on` gives the device.
COMPILED = ("cpu", "cpu as a GPU", ON_A_GPU)


def lower_as_on_a_gpu(
    program: Program, device: torch.device, choice: Any, reference: Any, *, lanes: bool = True
) -> Plan:
    """The lowering that writes slots in the compiled function, on whatever device."""
    del choice, reference
    prepare(program, large=1)  # programs of tests are small; they would not meet these passes
    number = len(program.instrs)
    on_lanes = lanes and number % 2 and compiles()
    return _CopiedOut(program, device, partial(in_any_order, number, 3) if on_lanes else None)


class _CopiedOut(InPlacePlan):
    """Its metrics are copied out, as those of a graph are; every other step launches in an order of lanes.

    Its loops are scalar, unless a test says how long vectors are: a compilation takes two thirds of the time, and those
    of a host's own lowering have vectors.
    """

    def bind(self, buffers: Buffers, *tick: Any) -> Run:
        with config.patch({"cpp.simdlen": config.cpp.simdlen or 1}):
            run = super().bind(buffers, *tick)
        assert not any(text in self.branches for text in ("does not show", "not known")), self.branches
        if self.timeline.lanes > 1:
            every = (buffers.slots, buffers.inputs, buffers.constants)
            self.rehearse(Buffers(*([one.clone() for one in some] for some in every)))
            run = self.bind_to(buffers, Lanes())
        return lambda before: [metric.clone() for metric in run(before)]


compiled = pytest.mark.parametrize("compiled_on", COMPILED, indirect=True)
# Where a compilation takes ten seconds, by default on a host as a GPU alone: there it writes slots, which is harder.
compiled_once = pytest.mark.parametrize("compiled_on", COMPILED if THOROUGH else COMPILED[1:], indirect=True)

# Where what a host's own lowering makes is the subject, by default as that alone.
compiled_as_head = pytest.mark.parametrize(
    "compiled_on", COMPILED if THOROUGH else (COMPILED[0], ON_A_GPU), indirect=True
)


def compiled_in_turn(names: str, cases: Sequence[tuple[Any, ...]], one_in: int = 1) -> pytest.MarkDecorator:
    """Each case on a GPU; on a host a share of them, compiled as on one and not, in turn, or both where thorough."""
    some = share(cases, one_in)
    hosts = [pytest.param(place, *case) for case, place in diagonal(some, ["cpu as a GPU", "cpu"])]
    gpu = [pytest.param(*ON_A_GPU.values, *case, marks=ON_A_GPU.marks) for case in cases]
    return pytest.mark.parametrize(f"compiled_on, {names}", [*hosts, *gpu], indirect=["compiled_on"])


def as_on_a_gpu(name: str, cases: Iterable[Any], one_in: int) -> pytest.MarkDecorator:
    """Each case on a GPU, a share of them on a host, compiled as on one."""
    cases = list(cases)
    hosts = [("cpu as a GPU", case) for case in share(cases, one_in)]
    gpu = [pytest.param(*ON_A_GPU.values, case, marks=ON_A_GPU.marks) for case in cases]
    return pytest.mark.parametrize(("compiled_on", name), [*hosts, *gpu], indirect=["compiled_on"])


def graph_of(
    train_step: Any, state: Any, batch: Any, *, prepared: bool = False
) -> tuple[fx.GraphModule, list[Tensor]]:
    """The graph of a step on the CPU, before or after the changes that are made on a GPU, and arguments for it."""
    program = fcg.graph_step(train_step, lowering="aten").lower(state, batch).program
    if prepared:
        prepare(program, large=1)
    plan = schedule(program, fuse=())
    entrance = Entrance.of(program, plan, writes=plan.commits)
    values = dict(zip(program.slots, state._lease.arena.slots, strict=True))
    given = [values[var].clone() for var in entrance.slots]
    graph = build_graph(program, plan, entrance, writes=plan.commits)
    return graph, [*given, *fcg.tree.leaves(batch)]


class _OfItsSpecs(fx.Interpreter):
    """Runs a graph; each value has the shape and the dtype that its node says, which the compiler will rely on."""

    def run_node(self, n: fx.Node) -> Any:
        value, spec = super().run_node(n), n.meta.get("spec")
        if spec is not None:
            assert (value.shape, value.dtype) == (spec.shape, spec.dtype), n.format_node()
        return value


def assert_same_results(
    module: fx.GraphModule, arguments: list[Tensor], change: Any, *, rtol: float, atol: float
) -> None:
    """Change the graph; its results and all that it writes stay what they were, within a tolerance."""
    twin = [argument.clone() for argument in arguments]
    expected = module(*twin)
    change(module.graph)
    module.graph.lint()
    mine = [argument.clone() for argument in arguments]
    found = _OfItsSpecs(module).run(*mine)
    for one, other in zip([*found, *mine], [*expected, *twin], strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
