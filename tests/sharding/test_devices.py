"""Programs on several ranks never copy from the host: no graph could capture that, and gloo would not notice.

Programs are traced as if their state were on another device than the host's; meta stands for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import functional_cg as fcg
from functional_cg.stages.program import Program
from functional_cg.step import captures as transform
from tests.sharding.law import batches, rank_of
from tests.sharding.programs import PROGRAMS, Setting
from tests.sharding.ranks import on_ranks
from tests.shares import diagonal

STAGES = (1, 3)
META = torch.device("meta")
NO_META_KERNEL = {"average"}  # the fused op of SGD has none
TRACED = sorted(PROGRAMS.keys() - NO_META_KERNEL)


class TracedError(Exception):
    """Ends a call after its trace."""


def traced_on_meta(names: list[str]) -> tuple[int, list[str]]:
    """Number of programs, and their calls with an argument or a result on the host.

    All ranks make the states, of programs at stages 1 and 3; they trace one program, so each traces its part.
    """
    cases = diagonal(names, STAGES)
    states = [PROGRAMS[name].state(setting_of(name, stage).zero("cpu"), "cpu") for name, stage in cases]
    mine = range(rank_of(), len(cases), 2)
    found = [
        f"{cases[i]}: {instr.op} at {instr.site}"
        for i in mine
        for instr in traced(cases[i][0], states[i]).instrs
        for var in (*instr.inputs(), *instr.outputs())
        if var.spec.device != META
    ]
    return len(mine), found


def setting_of(name: str, stage: int) -> Setting:
    return Setting({"data": 2}, stage, {"param_dtype": torch.bfloat16} if name == "mlp in bf16" else {})


def traced(name: str, state: Any) -> Program:
    def moved(specs: Any) -> list[Any]:
        return [dataclasses.replace(spec, device=META) for spec in specs]

    def on_meta(recipe: Any, *args: Any) -> Any:
        states = tuple(dataclasses.replace(state, specs=moved(state.specs)) for state in recipe.states)
        recipe = dataclasses.replace(recipe, states=states, inputs=moved(recipe.inputs))
        traces.append(trace(recipe, *args)[0])
        raise TracedError

    traces: list[Program] = []
    trace = transform.trace
    program = PROGRAMS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transform, "trace", on_meta)
        with pytest.raises(TracedError):
            fcg.graph_step(program.step, lowering="aten").lower(state, batches(name, "cpu", rank_of())(0))
    return traces[0]


def test_programs_copy_nothing_from_the_host() -> None:
    (one, found), (other, more) = on_ranks(2, traced_on_meta, TRACED)
    assert one + other == len(diagonal(TRACED, STAGES))
    assert found == more == []
