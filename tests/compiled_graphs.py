"""What a step hands to the compiler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

import functional_cg as fcg
from functional_cg.stages.inductor import Entrance, build_graph
from functional_cg.stages.lower import schedule


def graph_of(train_step: Any, state: Any, batch: Any) -> tuple[fx.GraphModule, list[Tensor]]:
    """The graph of a step on the CPU, before any change that is made on a GPU, and arguments for it."""
    program = fcg.graph_step(train_step, lowering="aten").lower(state, batch).program
    plan = schedule(program, fuse=False)
    entrance = Entrance.of(program, plan)
    values = dict(zip(program.slots, state._lease.arena.slots, strict=True))
    given = [values[var].clone() for var in entrance.slots]
    return build_graph(program, plan, entrance), [*given, *fcg.tree.leaves(batch)]


def assert_same_results(
    module: fx.GraphModule, arguments: list[Tensor], change: Any, *, rtol: float, atol: float
) -> None:
    """Change the graph; its results and all that it writes stay what they were, within a tolerance."""
    twin = [argument.clone() for argument in arguments]
    expected = module(*twin)
    change(module.graph)
    module.graph.lint()
    module.recompile()
    mine = [argument.clone() for argument in arguments]
    found = module(*mine)
    for one, other in zip([*found, *mine], [*expected, *twin], strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
