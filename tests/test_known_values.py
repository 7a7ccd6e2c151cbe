"""Literals, declared constants and what is computed of them may be read on the host; what is not known may not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.compiled_graphs import ON_A_GPU
from tests.shares import diagonal, share

pytestmark = pytest.mark.usefixtures("scalar_loops")

MASK = [True, False, True, True, False]
EDGES = torch.tensor([[0, 0, 1, 2, 2], [1, 2, 2, 0, 2]])
TABLE = torch.tensor([3.0, -1.0, 0.5, 2.0, -4.0])


def mask(x: Tensor) -> Tensor:
    return torch.tensor(MASK, device=x.device)


def degree(table: Tensor, edges: Tensor) -> Tensor:
    """A graph without its self-loops, as libraries of graphs make it anew at each call."""
    source, target = edges[:, edges[0] != edges[1]]
    return torch.zeros(int(edges.max()) + 1, device=table.device).index_add(0, target, table[source])


READS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "branch": lambda x, table, edges: x * 2 if table[0] > 1 else x * 3,
    "item": lambda x, table, edges: x * table[3].item(),
    "int": lambda x, table, edges: x.repeat(int(edges.max())),
    "tolist": lambda x, table, edges: x * sum(table.tolist()),
    "nonzero": lambda x, table, edges: x[torch.nonzero(table > 0).flatten()],
    "unique": lambda x, table, edges: x[edges.unique()],
    "mask": lambda x, table, edges: x[table > 0],
    "mask that selects": lambda x, table, edges: torch.outer(x, x).masked_select(table > 0),
    "combinations": lambda x, table, edges: torch.combinations(x, 3, with_replacement=True),
    "mask of two": lambda x, table, edges: torch.outer(x, x)[torch.outer(table, table) > 0],
    "mask and index": lambda x, table, edges: torch.outer(x, x)[table > 0, edges[0][:3]],
    "mask that is written": lambda x, table, edges: x.clone().index_put_((table > 0,), x.sum()),
    "literal": lambda x, table, edges: x[mask(x)] if mask(x).any() else x,
    "equal": lambda x, table, edges: x if torch.equal(edges[0], edges[1]) else -x,
    "written": lambda x, table, edges: x * int(mask(x).float().add_(1.0).sum()),
    "graph": lambda x, table, edges: x[:3] * degree(table, edges),
    "repeat_interleave": lambda x, table, edges: x.repeat_interleave(
        torch.tensor([1, 0, 2, 1, 1], device=x.device)
    ),
    "text": lambda x, table, edges: x * len(f"{table.sum():.1f}"),
    "made on the host": lambda x, table, edges: x * torch.arange(5).to(x.device) + torch.ones(5).to(x),
    "written on the host": lambda x, table, edges: x * torch.tensor([1.0, 2, 3, 4, 5]).mul_(2).to(x.device),
    "written, then read": lambda x, table, edges: x * torch.tensor([1.0, 2.0]).mul_(2)[1].item(),
    "a number of the host": lambda x, table, edges: x.clone().index_put_((table > 0,), torch.zeros(())),
}


@pytest.mark.parametrize(
    ("read", "lowering", "device"),
    [
        *((read, "aten", "cpu") for read in READS),
        *((read, "inductor", "cpu") for read in share(READS, 8)),
        *(
            pytest.param(*pair, *ON_A_GPU.values, marks=ON_A_GPU.marks)
            for pair in product(READS, ["aten", "inductor"])
        ),
    ],
)
def test_known_values_are_read(read: str, device: str, lowering: Any) -> None:
    table, edges = TABLE.to(device), EDGES.to(device)

    def step_fn(state: Any, x: Tensor) -> Any:
        value, grad = fcg.value_and_grad(lambda w: (READS[read](w * x, table, edges) ** 2).sum())(state["w"])
        return {"w": state["w"] - 0.125 * grad}, {"value": value}

    w = torch.arange(5.0, device=device)
    step = fcg.graph_step(step_fn, constants=(table, edges), lowering=lowering)
    state, twin = fcg.place({"w": w}), fcg.place({"w": w})
    for call in range(4):
        x = torch.full((5,), float(call + 1) / 4, device=device)
        state, metrics = step(state, x)
        twin, expected = step.eager(twin, x)
        if lowering == "aten" and device == "cpu":
            assert_trees_all_equal((state, metrics), (twin, expected))
        else:
            torch.testing.assert_close(fcg.snapshot(state)["w"], fcg.snapshot(twin)["w"])
    assert step.stats.replays == 4


UNKNOWN: dict[str, Callable[[Any, Tensor], Any]] = {
    "input": lambda w, x: w * x.sum().item(),
    "leaf": lambda w, x: w if w.sum() > 0 else -w,
    "mask of an input": lambda w, x: w[x > 0],
    "literal with an input": lambda w, x: w * int((torch.ones(5) * x).sum()),
    "literal that an input is written to": lambda w, x: w * float(torch.zeros(5).add_(x).sum()),
    "input that is written": lambda w, x: w * x.masked_fill_(x == 9, 0.0).eq(0).any().item(),
    "draw": lambda w, x: w * fcg.random.normal(fcg.random.fold_in(fcg.random.key(0), x[0].long()), ()).item(),
}


@pytest.mark.parametrize("read", UNKNOWN)
def test_what_depends_on_a_leaf_or_an_input_is_refused(read: str) -> None:
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + UNKNOWN[read](s["w"], x).sum()}, {}))
    with pytest.raises(fcg.HostSyncError):
        step({"w": torch.ones(5)}, torch.ones(5))


def test_a_constant_that_is_written_later_is_an_error() -> None:
    table = TABLE.clone()
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + (x if table[0] > 1 else -x)}, {}), constants=(table,))
    state, _ = step({"w": torch.zeros(())}, torch.ones(()))
    table[0] = 0.0
    with pytest.raises(fcg.BakedValueError, match="constant was written"):
        step(state, torch.ones(()))


def test_a_literal_that_changes_is_an_error() -> None:
    values = [1.0]
    step = fcg.graph_step(lambda s, x: ({"w": s["w"] + (x if torch.tensor(values) > 0 else -x)}, {}))
    state, _ = step({"w": torch.zeros(1)}, torch.ones(1))
    values[0] = -1.0
    with pytest.raises(fcg.BakedValueError):
        step(state, torch.ones(1))


def test_shapes_alone_are_no_values() -> None:
    """A base model on the meta device, as of an ensemble: what it holds has no values that could go stale."""
    base = nn.Linear(3, 2, device="meta")
    stacked = {"weight": torch.randn(4, 2, 3), "bias": torch.randn(4, 2)}

    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            one = lambda p, x: torch.func.functional_call(base, dict(p), (x,))  # noqa: E731
            outs = torch.func.vmap(one, in_dims=(0, None))(dict(params), x)
            shapes = torch.empty(2, 3, device="meta").t() @ torch.empty(2, 5, device="meta")
            return outs.square().mean() * shapes.shape[1]

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    state = fcg.TrainState.create(params=stacked, optimizer=fcg.optim.sgd(0.1))
    step, placed = fcg.graph_step(train_step, lowering="aten"), fcg.place(state)
    for _ in range(16):
        x = torch.randn(5, 3)
        state, expected = train_step(state, x)
        placed, metrics = step(placed, x)
        assert torch.equal(metrics["loss"], expected["loss"])
        assert torch.equal(placed.params["weight"], state.params["weight"])


def test_shapes_do_not_mix_with_values() -> None:
    base = torch.ones(3, device="meta")
    with pytest.raises(fcg.ForeignTensorError, match="reads a tensor that is in neither"):
        fcg.graph_fn(lambda state, x: state["w"] + base)(fcg.place({"w": torch.ones(3)}), torch.ones(1))


class LayerDrop(nn.Module):
    """Leaves layers out at random, as many transformers do, by default with a rate of 0."""

    def __init__(self, draw: Callable[[], Tensor], skip: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.head = nn.Linear(3, 1)
        self.draw, self.skip = draw, skip

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.skip(self.draw()):
                x = x + layer(x)
        return self.head(x).square().mean()


def _partly() -> Tensor:
    rates = torch.full((2,), 9.0)
    rates[:1].uniform_()
    return rates[0]


def _partly_else() -> Tensor:
    rates = torch.rand(2)
    rates[1] = 9.0
    return rates[1]


UNIFORM: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand([]),
    "rand(1)": lambda: torch.rand(1),
    "uniform_": lambda: torch.empty(()).uniform_(0, 1),
    "of two": lambda: torch.zeros(2).uniform_()[1],
    "of a part": _partly,
    "in float64": lambda: torch.rand([], dtype=torch.float64),
    "halved": lambda: torch.rand([]) * 0.5,
    "in float16": lambda: torch.rand([]).half(),
}
SURE: dict[str, Callable[[Tensor], Tensor]] = {
    "< 0.0": lambda r: r < 0.0,
    "< 0": lambda r: r < 0,
    "<= -0.5": lambda r: r <= -0.5,
    "> 1": lambda r: r > 1,
    ">= 1.5": lambda r: r >= 1.5,
    "turned in place": lambda r: (r < 0.0).logical_not_(),
    "turned in place by a view": lambda r: (whole := (r < 0.0), whole.view(-1)[0].fill_(True))[0],
}
UNSURE: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "inside": (lambda: torch.rand([]), lambda r: r < 0.1),
    "at its end": (lambda: torch.rand([]), lambda r: r <= 0.0),
    "of another part": (_partly_else, lambda r: r > 1.0),
    "normal": (lambda: torch.randn([]), lambda r: r < -100.0),
    "rounded to its end": (lambda: torch.rand([]).half(), lambda r: r >= 1.0),
    "wrapped around": (lambda: torch.rand([]).mul(1e6).to(torch.int8), lambda r: r < 0),
    "turned in place": (lambda: torch.rand([]).mul_(6.0).sin_(), lambda r: r < 0.5),
    "folded in place": (lambda: torch.rand([]).sub_(0.5).abs_(), lambda r: r < 0.25),
    "no number": (lambda: torch.rand([]) * float("inf"), lambda r: r >= 0),
}


def _trained(draw: Callable[[], Tensor], skip: Callable[[Tensor], Tensor], calls: int) -> Any:
    apply, params, buffers = fcg.from_module(LayerDrop(draw, skip))

    @fcg.graph_step(lowering="aten")
    def train_step(state: Any, x: Tensor) -> Any:
        key = fcg.random.fold_in(state.key, state.step)
        loss, grads = fcg.value_and_grad(lambda p: apply(p, buffers, x, key=key)[0])(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1), key=fcg.random.key(0))
    twin = fcg.fork(state)
    for call in range(calls):
        x = torch.full((2, 3), float(call))
        state, metrics = train_step(state, x)
        twin, expected = train_step.eager(twin, x)
        assert_trees_all_equal((state, metrics), (twin, expected))
    return train_step


@pytest.mark.parametrize(("draw", "skip"), diagonal([*UNIFORM], [*SURE]))
def test_a_draw_is_compared_with_what_it_never_reaches(draw: str, skip: str) -> None:
    assert _trained(UNIFORM[draw], SURE[skip], 16).stats.replays == 16


@pytest.mark.parametrize("case", UNSURE)
def test_a_draw_that_decides_is_asked_for_on_the_host(case: str) -> None:
    with pytest.raises(fcg.HostSyncError, match="value of a tensor"):
        _trained(*UNSURE[case], 1)
