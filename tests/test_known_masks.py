"""A mask that is the same at each call is said by a flag, in a compiled step; one that is not stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.stages.lower.known_masks import kind_of, use_known_masks
from functional_cg.tensors.aten import named_arguments
from functional_cg.testing import assert_trees_all_equal
from tests.compiled_graphs import compiled_in_turn
from tests.shares import CALLS

LENGTH = 16


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[2], device=x.device)


def by_vmap(rule: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    """A mask as libraries make them, expanded over the batch."""
    rows = torch.vmap(torch.vmap(rule, (None, 0)), (0, None))
    return rows(places(x), places(x)).expand(len(x), 1, LENGTH, LENGTH)


def added(x: Tensor) -> Tensor:
    hidden = torch.full((LENGTH, LENGTH), -torch.inf, device=x.device)
    return hidden.triu(1)[None, None]


def written(x: Tensor) -> Tensor:
    """A literal is a constant of the step, of which each call writes a copy."""
    hidden = torch.tensor([[0.0] * LENGTH] * LENGTH)
    hidden.view(-1)[:].sub_(1.0)
    return (hidden + 1.0).to(x.device)


def filled(x: Tensor) -> Tensor:
    """As torch's ``MultiheadAttention`` makes one of a table of booleans."""
    hides = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
    return torch.zeros_like(hides, dtype=x.dtype).masked_fill_(hides, -torch.inf)


MASKS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "all": ("empty", lambda x: by_vmap(lambda query, key: query + key >= 0, x)),
    "zeros": ("empty", lambda x: torch.zeros(LENGTH, LENGTH, device=x.device)),
    "zeros, written": ("empty", written),
    "past, filled": ("causal", filled),
    "past": ("causal", lambda x: by_vmap(lambda query, key: key <= query, x)),
    "past, added": ("causal", added),
    "future": ("kept", lambda x: by_vmap(lambda query, key: key >= query, x)),
    "window": ("kept", lambda x: by_vmap(lambda query, key: (key <= query) & (key > query - 4), x)),
    "a large number": ("kept", lambda x: added(x).clamp(min=-1e4)),
    "a bias": ("kept", lambda x: added(x) - places(x).float()),
    "from the data": ("kept", lambda x: (places(x) <= places(x)[:, None]) & (x[:, :1, :1, :1] > -99.0)),
}


def step_of(mask: Callable[[Tensor], Tensor], **options: Any) -> Any:
    @fcg.graph_step(**options)
    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(w: Tensor) -> Tensor:
            query, key, value = (x * w).chunk(3, -1)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask(x))
            return out.square().sum()

        loss, grad = fcg.value_and_grad(loss_fn)(state["w"])
        return {"w": state["w"] - 0.01 * grad}, {"loss": loss}

    return step


def state_on(device: str) -> Any:
    return fcg.place({"w": torch.ones(24, device=device)})


def data(call: int, device: str) -> Tensor:
    return torch.randn(2, 3, LENGTH, 24, generator=torch.Generator().manual_seed(call)).to(device)


def attention(program: Any) -> list[tuple[bool, bool]]:
    """Of each call of attention, whether it has a mask and whether it is causal."""
    found = []
    for instr in program.instrs:
        if "scaled_dot_product" in instr.name:
            named = named_arguments(instr.op, instr.args, instr.kwargs)
            found.append((named.get("attn_mask") is not None, named["is_causal"]))
    return found


@pytest.mark.parametrize("name", MASKS)
def test_what_a_flag_says_needs_no_mask(name: str) -> None:
    kind, mask = MASKS[name]
    program = step_of(mask).lower(state_on("cpu"), data(0, "cpu")).program
    constants = [constant.value.clone() for constant in program.constants]
    assert attention(program) == [(True, False)] * 2
    use_known_masks(program)
    assert attention(program) == [(kind == "kept", kind == "causal")] * 2
    assert_trees_all_equal([constant.value for constant in program.constants], constants)


@compiled_in_turn("name", [(name,) for name in ("past", "window", "from the data")])
def test_a_compiled_step_attends_as_its_eager_run_does(compiled_on: str, name: str) -> None:
    step, state = step_of(MASKS[name][1], lowering="inductor"), state_on(compiled_on)
    for call in range(CALLS):
        x = data(call, compiled_on)
        expected, losses = step.eager(fcg.snapshot(state), x)
        state, metrics = step(state, x)
        torch.testing.assert_close(metrics["loss"], losses["loss"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state["w"] + 0, expected["w"] + 0, rtol=1e-4, atol=1e-4)
    assert step.stats.replays == CALLS


def test_what_torch_writes_for_cudnn_hides_a_key() -> None:
    table = torch.zeros(4, 4, dtype=torch.bfloat16).masked_fill(~torch.ones(4, 4).tril().bool(), -65504.0)
    assert kind_of(table, -65504.0) == "causal"
    assert kind_of(table, -math.inf) == ""
    assert kind_of(table.clamp(min=-60000.0), -65504.0) == ""


@pytest.mark.cuda
@pytest.mark.parametrize("name", MASKS)
def test_what_a_flag_says_needs_no_mask_on_a_gpu(name: str) -> None:
    kind, mask = MASKS[name]
    x = torch.randn(2, 3, LENGTH, 96, device="cuda")

    @fcg.graph_step
    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(w: Tensor) -> Tensor:
            parts = (x * w).bfloat16().chunk(3, -1)
            return F.scaled_dot_product_attention(*parts, attn_mask=half(mask(x))).float().square().sum()

        loss, grad = fcg.value_and_grad(loss_fn)(state["w"])
        return {"w": state["w"] - 0.01 * grad}, {"loss": loss}

    def half(mask: Tensor) -> Tensor:
        return mask.bfloat16() if mask.is_floating_point() else mask

    program = step.lower(fcg.place({"w": torch.ones(96, device="cuda")}), x).program
    use_known_masks(program)
    fused = [instr for instr in program.instrs if "scaled_dot" in instr.name]
    assert len(fused) == 2
    for instr in fused:
        named = named_arguments(instr.op, instr.args, instr.kwargs)
        found = named.get("attn_bias") is not None, named["is_causal"]
        assert found == (kind == "kept", kind == "causal"), instr.op


@given(st.booleans(), st.sets(st.integers(0, LENGTH * LENGTH - 1), max_size=2))
def test_a_mask_of_another_pattern_stays(causal: bool, flipped: set[int]) -> None:
    table = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    table = table.tril() if causal else table
    for place in flipped:
        table.view(-1)[place].logical_not_()
    rows = table.tolist()
    program = step_of(lambda x: torch.tensor(rows)).lower(state_on("cpu"), data(0, "cpu")).program
    use_known_masks(program)
    assert attention(program) == [(bool(flipped), causal and not flipped)] * 2


def test_a_mask_whose_gradient_is_asked_for_stays() -> None:
    """Of a mask that it does not get, torch's backward returns no gradient."""

    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(parts: tuple[Tensor, Tensor]) -> Tensor:
            query, key, value = (x * parts[0]).chunk(3, -1)
            mask = parts[1].expand(2, 3, LENGTH, LENGTH)
            # The op of a GPU, of which fake tensors of a host have no kernel and need none.
            out = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, True)[0]
            return out.square().sum()

        loss, (grad, slope) = fcg.value_and_grad(loss_fn)((state["w"], torch.zeros(LENGTH, LENGTH)))
        return {"w": state["w"] - grad}, {"loss": loss, "slope": slope}

    program = fcg.graph_step(step, lowering="aten").lower(state_on("cpu"), data(0, "cpu")).program
    use_known_masks(program)
    backward = next(instr for instr in program.instrs if instr.name.endswith("attention_backward"))
    assert backward.args[4] is not None


def test_a_mask_that_is_written_between_two_calls_is_read_as_it_was_at_each() -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        mask, late = torch.zeros(LENGTH, LENGTH), []
        for number in (0.0, -torch.inf, -1.0, 0.0):
            mask[0, 1:] = number
            mask[1:].copy_(torch.full((LENGTH - 1, LENGTH), number).triu(2))
            late.append(F.scaled_dot_product_attention(x, x, x, attn_mask=mask))
        return tuple(late)

    x = torch.randn(2, 3, LENGTH, 8)
    program = fcg.graph_fn(step, lowering="aten").lower(x).program
    use_known_masks(program)
    assert attention(program) == [(False, False), (False, True), (True, False), (False, False)]
