"""Values are turned, split, joined and multiplied: a compiler lays them out as it likes, and reads what it wrote."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor import config

import functional_cg as fcg
from functional_cg.stages.lower.inductor import compile_graph, opened
from functional_cg.testing import assert_trees_all_close
from tests.compiled_graphs import PADDED, compiled_once, graph_of
from tests.exact_programs import EXACT, drawn
from tests.shares import CALLS, share

_SHAPE = (4, 7, 12)
_LARGEST = 2000  # elements

# Functions of a value of at least two dimensions, whole numbers to whole numbers.
OPERATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "doubled": lambda a: a * 2,
        "heads": lambda a: a.unflatten(-1, (-1, 2)).transpose(0, 1) if a.shape[-1] % 2 == 0 else a,
        "groups": lambda a: a.unflatten(-1, (3, -1)).movedim(-2, 0) if a.shape[-1] % 3 == 0 else a,
        "turned": lambda a: a.transpose(-2, -1),
        "rotated": lambda a: a.movedim(0, -1),
        "joined": lambda a: a.flatten(0, 1) if a.ndim > 2 else a,
        "joined behind": lambda a: a.flatten(-2) if a.ndim > 2 else a,
        "in order": lambda a: a.contiguous(),
        "cut": lambda a: a[..., 1:],
        "one fewer": lambda a: a[1:],
        "padded": lambda a: torch.cat([a, torch.ones_like(a[..., :1])], -1),
    }
)
PRODUCTS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "rows by rows": lambda a: a @ a.transpose(-2, -1),
        "columns by columns": lambda a: a.transpose(-2, -1) @ a,
        "as one batch": lambda a: (a.flatten(0, -3) @ a.flatten(0, -3).mT) if a.ndim > 2 else a @ a.mT,
    }
)


class Program:
    """A step whose loss adds up all that is made of a value in turn.

    Args:
      chain: The names of operations and products, and which earlier value each takes.
    """

    def __init__(self, chain: list[tuple[str, int]]) -> None:
        self.chain = chain

    def __repr__(self) -> str:
        return f"Program({self.chain})"

    def __call__(self, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        loss, gradient = fcg.value_and_grad(lambda w: self.loss(w, x))(w)
        return w - gradient.sign(), loss

    def loss(self, w: Tensor, x: Tensor) -> Tensor:
        """The loss: whole numbers below 2**53, as each product of a chain squares the largest."""
        values, products = [x * w], 0
        for name, back in self.chain:
            value = values[-1 - back % len(values)]
            if name in OPERATIONS:
                made = OPERATIONS[name](value)
            else:
                products += 1
                made = PRODUCTS[name](value) if products < 4 else value
            if 0 < made.numel() <= _LARGEST:
                values.append(made)
        return torch.stack([(value * (value.shape[-1] - 3)).sum() for value in values]).sum()


@st.composite
def chains(draw: Any) -> Program:
    """Chains of operations, one in three a product."""
    names = st.one_of(
        st.sampled_from(sorted(OPERATIONS)),
        st.sampled_from(sorted(OPERATIONS)),
        st.sampled_from(sorted(PRODUCTS)),
    )
    return Program(
        draw(st.lists(st.tuples(names, st.sampled_from([0, 0, 0, 1, 2])), min_size=3, max_size=12))
    )


@pytest.mark.kernels
@compiled_once
def test_turned_values(compiled_on: str) -> None:
    programs = share(drawn(24, 0, chains()), 8, compiled_on)

    def train_step(state: Any, inputs: Any) -> Any:
        pairs = [program(w, x) for program, w, x in zip(programs, state, inputs, strict=True)]
        return tuple(new for new, _ in pairs), [loss for _, loss in pairs]

    def whole(low: int, high: int) -> tuple[Tensor, ...]:
        return tuple(
            torch.randint(low, high, _SHAPE, generator=generator).double().to(compiled_on) for _ in programs
        )

    generator = torch.Generator().manual_seed(0)
    state = fcg.place(whole(-1, 2))
    twin, step = fcg.fork(state), fcg.graph_step(train_step, lowering="inductor")
    for _ in range(CALLS):
        x = whole(-1, 2)
        twin, expected = step.eager(twin, x)
        state, metrics = step(state, x)
        assert_trees_all_close(metrics, expected, rtol=EXACT, atol=0, name="losses")
        assert_trees_all_close(state, twin, rtol=EXACT, atol=0, name="state")
    assert step.stats.replays == CALLS


@pytest.mark.kernels
def test_no_row_is_padded() -> None:
    """Else a value may be laid out anew after views of it were taken, as torch 2.11 does to large ones on a GPU."""

    def train_step(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        loss, gradient = fcg.value_and_grad(lambda w: ((x @ w).t() @ x).square().sum())(w)
        return w - gradient, loss

    module, arguments = graph_of(train_step, fcg.place(torch.ones(9, 9)), torch.ones(7, 9), prepared=True)
    with config.patch(PADDED):
        written = opened(compile_graph(module, arguments, on_host=True, small=False, in_order=False))
    assert written is not None
    made = re.findall(r"empty_strided_cpu\(\(([\d, ]+)\), \(([\d, ]+)\)", written[0])
    assert made
    for shape, stride in made:
        sizes, steps = ([int(one) for one in text.split(",") if one.strip()] for text in (shape, stride))
        last = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        assert last + 1 == math.prod(sizes), f"{shape} in strides {stride}"
