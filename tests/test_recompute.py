"""The backward computes cheap values anew: the same bits, and no more memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg
from functional_cg.bench.models import LanguageModel, config
from functional_cg.stages.lower import Buffers, lower_aten
from functional_cg.stages.program import Program
from functional_cg.stages.recompute import recompute


def mlp(params: dict[str, Tensor], x: Tensor) -> Tensor:
    h = F.gelu(x @ params["a"])
    h = F.silu(h @ params["b"]) * (h @ params["c"])
    return (h.float() @ params["d"]).square().mean()


def with_dropout(params: dict[str, Tensor], x: Tensor) -> Tensor:
    h = fcg.random.dropout(fcg.random.key(3), torch.tanh(x @ params["a"]), 0.5)
    return (F.relu(h @ params["b"]) @ params["c"]).square().mean()


def language_model(name: str) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    apply, params, buffers = fcg.from_module(LanguageModel(config(name)))
    return lambda p, x: apply(p, buffers, x, x.flip(0))[0], params


def traced(loss: Callable[..., Tensor], params: dict[str, Tensor], x: Tensor) -> tuple[Program, list[Tensor]]:
    def step(state: Any, x: Tensor) -> Any:
        value, grads = fcg.value_and_grad(loss)(state, x)
        return fcg.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value}

    state = fcg.place(params)
    program = fcg.graph_step(step, lowering="aten", constants=constants_of(loss)).lower(state, x).program
    return program, [state[name].clone() for name in sorted(params)]


def constants_of(loss: Any) -> Any:
    cells = [cell.cell_contents for cell in loss.__closure__ or ()]
    return tuple(cell for cell in cells if isinstance(cell, dict))


def run(program: Program, slots: list[Tensor], x: Tensor) -> list[Tensor]:
    """What the plan of a program leaves in the slots, and the loss."""
    slots = [slot.clone() for slot in slots]
    constants = [constant.value.clone() for constant in program.constants]
    metrics = lower_aten(program).bind(Buffers(slots, [x.clone()], constants))(())
    return [*slots, *(metric.clone() for metric in metrics)]


def kept_bytes(program: Program) -> int:
    """Bytes that the forward made and the backward reads."""
    start = next(i for i, instr in enumerate(program.instrs) if instr.backward)
    made = {var.storage for instr in program.instrs[:start] for var in instr.outputs()}
    sizes: dict[int, int] = {}
    for instr in program.instrs[start:]:
        for var in instr.inputs():
            if var.storage in made:
                sizes[var.storage] = max(sizes.get(var.storage, 0), var.spec.nbytes)
    return sum(sizes.values())


def parameters(*names: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(8, 8, generator=generator) for name in names}


CASES = {
    "mlp": (mlp, parameters("a", "b", "c", "d"), torch.randn(16, 8)),
    "dropout": (with_dropout, parameters("a", "b", "c"), torch.randn(16, 8)),
    "llama": (*language_model("tiny"), torch.randint(256, (2, 32))),
}


@pytest.mark.parametrize("case", CASES)
def test_no_bit_changes_and_less_is_kept(case: str) -> None:
    loss, params, x = CASES[case]
    program, slots = traced(loss, params, x)
    calls, kept, expected = len(program.instrs), kept_bytes(program), run(program, slots, x)
    recompute(program, large=1)
    assert len(program.instrs) > calls
    assert kept_bytes(program) < kept
    for got, want in zip(run(program, slots, x), expected, strict=True):
        assert torch.equal(got, want)


def test_what_is_made_anew_comes_from_what_is_kept_anyway() -> None:
    """gelu's result goes, its argument stays: the activation's own gradient needs it."""
    params = parameters("a", "b")
    program, _ = traced(
        lambda p, x: (F.gelu(x @ p["a"]) @ p["b"]).square().mean(), params, torch.randn(16, 8)
    )
    recompute(program, large=1)
    gelus = [instr for instr in program.instrs if instr.op is torch.ops.aten.gelu.default]
    assert [instr.backward for instr in gelus] == [False, True]
    assert gelus[0].args == gelus[1].args


def test_what_is_kept_for_its_own_sake_stays() -> None:
    """exp's gradient needs exp's result and not its argument: there is nothing to make it from."""
    params = parameters("a", "b")
    program, _ = traced(lambda p, x: (torch.exp(x @ p["a"]) @ p["b"]).mean(), params, torch.randn(16, 8))
    calls = len(program.instrs)
    recompute(program, large=1)
    assert len(program.instrs) == calls


def test_values_below_the_threshold_are_kept() -> None:
    program, _ = traced(mlp, parameters("a", "b", "c", "d"), torch.randn(16, 8))
    before = list(program.instrs)
    recompute(program)
    assert [str(instr) for instr in program.instrs] == [str(instr) for instr in before]


def test_weights_are_not_cast_a_second_time() -> None:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (x.bfloat16() @ params["a"].bfloat16() @ params["b"].bfloat16()).float().square().mean()

    program, _ = traced(loss, parameters("a", "b"), torch.randn(16, 8))
    recompute(program, large=1)
    casts = [
        instr
        for instr in program.instrs
        if instr.op is torch.ops.aten._to_copy.default and set(instr.inputs()) & set(program.slots)
    ]
    assert len(casts) == 2
