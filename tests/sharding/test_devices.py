"""No program of several ranks copies from the host: a graph could not be captured with that, and gloo would not notice.

Programs are traced as if their state were on another device than the host's; meta stands for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import functional_cg as fcg
from functional_cg import transform
from functional_cg.stages.program import Program
from tests.sharding.law import batches, rank_of
from tests.sharding.programs import PROGRAMS, Setting
from tests.sharding.ranks import on_ranks

META = torch.device("meta")
NO_META_KERNEL = {"average"}  # the fused op of SGD has none
TRACED = sorted(PROGRAMS.keys() - NO_META_KERNEL)


class TracedError(Exception):
    """Ends a call after its trace."""


def traced_on_meta(names: list[str]) -> list[str]:
    """The calls with an argument or a result on the host, of each program at stages 1 and 3."""
    found = []
    for name in names:
        for stage in (1, 3):
            options = {"param_dtype": torch.bfloat16} if name == "mlp in bf16" else {}
            program = traced(name, Setting({"data": 2}, stage, options))
            found += [
                f"{name}, stage {stage}: {instr.op} at {instr.site}"
                for instr in program.instrs
                for var in (*instr.inputs(), *instr.outputs())
                if var.spec.device != META
            ]
    return found


def traced(name: str, setting: Setting) -> Program:
    def moved(specs: Any) -> list[Any]:
        return [dataclasses.replace(spec, device=META) for spec in specs]

    def on_meta(recipe: Any, *args: Any) -> Any:
        states = tuple(dataclasses.replace(state, specs=moved(state.specs)) for state in recipe.states)
        traces.append(trace(dataclasses.replace(recipe, states=states, inputs=moved(recipe.inputs)), *args))
        raise TracedError

    traces: list[Program] = []
    trace = transform.trace
    program = PROGRAMS[name]
    state = program.state(setting.zero("cpu"), "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transform, "trace", on_meta)
        with pytest.raises(TracedError):
            fcg.graph_step(program.step, lowering="aten").lower(state, batches(name, "cpu", rank_of())(0))
    return traces[0]


def test_programs_copy_nothing_from_the_host() -> None:
    assert on_ranks(2, traced_on_meta, TRACED) == [[], []]
