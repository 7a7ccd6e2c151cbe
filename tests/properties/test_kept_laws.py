"""The forward of a compiled step keeps no more for its backward than torch's partitioner does on the same loss.

Whole values are counted, by the memory that they lie in: row statistics are not. Softmax is one op on both sides, as a
compiler recomputes it from its statistics. Not among the operations: `relu` alone, of which torch may keep a mask of
bytes, and slices, of which torch may keep what is computed from them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import hypothesis
import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, make_boxed_func
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import functional_cg as fcg
from functional_cg.stages.lower.compiled import prepare
from functional_cg.stages.passes.min_cut import _BACKWARD, _FORWARD, _cheapest
from functional_cg.stages.program import Program
from tests.operations import COMMON
from tests.shares import THOROUGH, share

ROWS, WIDTH = 16, 16
LARGE = ROWS * WIDTH // 2  # elements of a value that counts
_aten = torch.ops.aten
_VIEWS = frozenset(
    {
        _aten.view.default, _aten.permute.default, _aten.t.default, _aten.transpose.int, _aten.expand.default,
        _aten.slice.Tensor, _aten.select.int, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.alias.default,
        _aten.split.Tensor, _aten.detach.default,
    }
)  # fmt: skip

# name -> function of a value, another one, and a weight; all are [ROWS, WIDTH], in f32 or bf16
OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    **COMMON,
    "matmul in bf16": lambda a, b, w: a.bfloat16() @ w.bfloat16(),
    "mish": lambda a, b, w: F.mish(a),
    "softplus": lambda a, b, w: F.softplus(a),
    "hardswish": lambda a, b, w: F.hardswish(a),
    "softcap": lambda a, b, w: 30 * torch.tanh(a / 30),
    "softmax in f32": lambda a, b, w: torch.softmax(a.float(), -1).to(a.dtype),
    "norm": lambda a, b, w: F.layer_norm(a.float(), (WIDTH,)),
    "rms norm": lambda a, b, w: a.float() * torch.rsqrt(a.float().square().mean(-1, keepdim=True) + 1e-6),
    "gate": lambda a, b, w: a * torch.sigmoid(b.to(a.dtype)),
}
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda a: a.float().square().mean(),
    "mse": lambda a: F.mse_loss(a.float(), torch.zeros(a.shape)),
    "huber": lambda a: F.huber_loss(a.float(), torch.zeros(a.shape)),
}
Loss = Callable[[Tensor, Tensor], Tensor]


@st.composite
def losses(draw: Callable[[Any], Any]) -> tuple[str, Sequence[tuple[str, int, int]]]:
    """A loss, and calls on earlier values: mostly chains, some values read twice."""
    calls = []
    for number in range(draw(st.integers(1, 12))):
        near = st.integers(max(number - 2, 0), number)
        calls.append((draw(st.sampled_from(sorted(OPERATIONS))), draw(near), draw(st.integers(0, number))))
    return draw(st.sampled_from(sorted(LOSSES))), calls


def loss_of(name: str, calls: Sequence[tuple[str, int, int]]) -> Loss:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        values = [x @ w]
        for operation, a, b in calls:
            values.append(OPERATIONS[operation](values[a], values[b], w))
        return sum(LOSSES[name](value) for value in values[-2:])  # type: ignore[return-value]

    return loss


def arguments() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(WIDTH, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def prepared(loss: Loss, w: Tensor, x: Tensor, *, large: int) -> Program:
    """The program of a step with this loss, as a compiler on a GPU gets it."""

    def step(state: Any, x: Tensor) -> Any:
        value, gradient = fcg.value_and_grad(loss)(state["w"], x)
        return {"w": state["w"] - 0.1 * gradient}, {"loss": value}

    program = fcg.graph_step(step, lowering="aten").lower(fcg.place({"w": w}), x).program
    prepare(program, large=large)  # bytes: all that counts, and more
    return program


def kept(program: Program, *, large: int) -> int:
    """Bytes of whole values that the forward made and the backward reads, beside the arguments.

    Args:
      program: The program.
      large: Elements of a value that counts.
    """
    given = {var.storage for var in (*program.slots, *program.inputs, *(c.var for c in program.constants))}
    given |= {known.var.storage for known in program.ranges}
    made: dict[int, Any] = {}
    for instr in program.instrs:
        if not instr.backward:
            for var in instr.outputs():
                made.setdefault(var.storage, var.spec)
    read = {var.storage for instr in program.instrs if instr.backward for var in instr.inputs()}
    return sum(made[one].nbytes for one in (read & made.keys()) - given if made[one].numel >= large)


def kept_by_torch(loss: Loss, w: Tensor, x: Tensor, *, large: int) -> int:
    """The same, as torch's partitioner chooses."""
    saved: dict[fx.Node, int] = {}

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        parts = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        output = parts[0].graph.find_nodes(op="output")[0]
        for node in output.args[0][num_fwd_outputs:]:
            base = root(node)
            value = base.meta.get("val")
            if base.op != "placeholder" and isinstance(value, Tensor) and value.numel() >= large:
                saved[base] = value.numel() * value.itemsize
        return parts

    softmax = {_aten._softmax.default, _aten._softmax_backward_data.default}
    table = {op: how for op, how in select_decomp_table().items() if op not in softmax}
    compiled = aot_function(
        loss,
        fw_compiler=lambda graph, inputs: make_boxed_func(graph),
        bw_compiler=lambda graph, inputs: make_boxed_func(graph),
        partition_fn=partition,
        decompositions=table,
    )
    compiled(w.requires_grad_(), x)
    return sum(saved.values())


def both(loss: Loss, w: Tensor, x: Tensor, *, large: int) -> tuple[int, int]:
    """Bytes of values of so many elements that ours keeps, and torch's."""
    return kept(prepared(loss, w, x, large=large), large=large), kept_by_torch(loss, w, x, large=large)


def root(node: fx.Node) -> fx.Node:
    """The node whose memory a node lies in."""
    while node.target in _VIEWS or (node.target is operator.getitem and node.args[0].target in _VIEWS):  # type: ignore[union-attr]
        node = node.args[0]  # type: ignore[assignment]
    return node


@given(drawn=losses())
def test_no_more_is_kept_than_torch_keeps(drawn: tuple[str, Sequence[tuple[str, int, int]]]) -> None:
    loss = loss_of(*drawn)
    mine, other = both(loss, *arguments(), large=LARGE)
    assert mine <= other
    hypothesis.event(f"keeps less: {mine < other}")


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        # The backward takes views of products' arguments: what is computed from those may be recomputed all the same.
        (
            "square",
            [
                ("matmul", 0, 0),
                ("gelu", 1, 0),
                ("gelu", 0, 2),
                ("mul", 3, 2),
                ("gelu", 3, 3),
                ("mul", 5, 1),
                ("exp", 4, 4),
                ("tanh", 6, 5),
                ("exp", 8, 2),
            ],
        ),
        # Elementwise, though torch does not tag them so.
        ("mse", [("hardswish", 0, 0), ("matmul in bf16", 1, 0)]),
        ("huber", [("matmul in bf16", 0, 0), ("hardswish", 1, 0), ("matmul", 2, 0)]),
    ],
)
def test_these_kept_more_once(name: str, calls: Sequence[tuple[str, int, int]]) -> None:
    loss = loss_of(name, calls)
    mine, other = both(loss, *arguments(), large=LARGE)
    assert 0 < other >= mine


def norm(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, x.new_ones(x.shape[1]), x.new_zeros(x.shape[1]), training=True)


def block(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(x + norm(F.conv2d(F.relu(norm(F.conv2d(x, w))), w)))


def gated(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x.mean((2, 3), keepdim=True))


CONVOLUTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "norm and relu": lambda h, w: F.relu(norm(h)),
    "relu": lambda h, w: F.relu(h),
    "gelu": lambda h, w: F.gelu(h),
    "norm and silu": lambda h, w: F.silu(norm(h)),
    "residual": block,
    "norm first": lambda h, w: h + F.conv2d(F.relu(norm(h)), w),
    "dense": lambda h, w: F.relu(norm(torch.cat([h, F.conv2d(F.relu(norm(h)), w)]))),
    "gate": lambda h, w: gated(F.relu(norm(h))),
    "gate of silu": lambda h, w: gated(F.silu(norm(h))),
}


@pytest.mark.parametrize("name", share(CONVOLUTIONS, 3))
def test_no_more_is_kept_for_large_convolutions(name: str) -> None:
    """Of values that no cache holds, those for the gradient of a convolution are kept, as torch keeps them."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return F.conv2d(CONVOLUTIONS[name](F.conv2d(x, w), w), w).square().mean()

    x = torch.zeros(12, 8, 300, 300)
    mine, other = both(loss, torch.ones(8, 8, 1, 1), x, large=x.numel() // 2)
    assert 0 < mine <= other


@st.composite
def networks(draw: Callable[[Any], Any]) -> Any:
    """Costs to keep and to compute each of some values, what each is made from, costs of reads, and what is needed."""
    count = draw(st.integers(2, 5))
    cost = st.integers(0, 9)
    keep = [draw(cost) for _ in range(count)]
    compute = [draw(st.one_of(cost, cost, st.just(math.inf))) for _ in range(count)]
    made = [draw(st.sets(st.integers(0, number - 1))) if number else set() for number in range(count)]
    reads = {(a, b): draw(cost) for b in range(count) for a in range(b)}
    return keep, compute, made, reads, draw(st.sets(st.integers(0, count - 1), min_size=1))


@hypothesis.settings(max_examples=200 if THOROUGH else 40)
@given(networks())
def test_no_choice_costs_less(drawn: Any) -> None:
    """Each choice of what is computed again: the rest of what is needed, or made from, is kept."""
    keep, compute, made, reads, needed = drawn
    network: Any = nx.DiGraph()
    for one in range(len(keep)):
        network.add_edge((one, 0), (one, 1), capacity=keep[one])
        network.add_edge(_FORWARD, (one, 0), capacity=compute[one])
        for source in made[one] if compute[one] < math.inf else ():
            network.add_edge((source, 1), (one, 0), capacity=math.inf)
    for (source, one), cost in reads.items():
        network.add_edge((source, 0), (one, 0), capacity=cost)
    for one in needed:
        network.add_edge((one, 1), _BACKWARD, capacity=math.inf)

    def total(again: set[int]) -> float:
        kept = (needed | {source for one in again for source in made[one]}) - again
        read = sum(cost for (source, one), cost in reads.items() if one in again and source not in again)
        return sum(keep[one] for one in kept) + sum(compute[one] for one in again) + read

    again, kept = _cheapest(network)
    assert kept >= (needed | {source for one in again for source in made[one]}) - again
    choices = (set(some) for size in range(len(keep) + 1) for some in combinations(range(len(keep)), size))
    assert total(again) == min(map(total, choices))
