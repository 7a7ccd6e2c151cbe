"""Which inputs and slots may hold any value: warm-up runs must not hit values that a kernel refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg
from functional_cg.stages.trial.unchecked import Unchecked
from functional_cg.testing import Simulator
from tests.as_graphs import AsGraphs
from tests.compiled_graphs import compiled

pytestmark = pytest.mark.usefixtures("scalar_loops")

TABLE = torch.randn(5, 3)
ROW, IDS, X = torch.tensor(2), torch.tensor([1, 2]), torch.rand(2, 5)

# What is computed of an input, and whether the input may then hold any value.
CALLS: dict[str, tuple[Callable[[Tensor], Any], Tensor, bool]] = {
    "arithmetic": (lambda x: (x * 2 + 1).tanh().sum(), X, True),
    "a product": (lambda x: x @ x.T, X, True),
    "a mask": (lambda m: torch.where(m, 1.0, 0.0), X > 0.5, True),
    "integers added up": (lambda n: n.sum() + n.float().mean(), IDS, True),
    "rows": (lambda n: TABLE[n], IDS, False),
    "rows counted from elsewhere": (
        lambda n: TABLE.index_select(0, (n.view(2, 1) - 1).flatten()),
        IDS,
        False,
    ),
    "an embedding": (lambda n: F.embedding(n, TABLE), IDS, False),
    "an embedding of what was written into a copy": (
        lambda n: F.embedding(torch.zeros_like(n).copy_(n).reshape(-1), TABLE),
        IDS,
        False,
    ),
    "classes": (lambda n: F.cross_entropy(X, n), IDS, False),
    "logits": (lambda x: F.cross_entropy(x, IDS), X, True),
    "rows of floats": (lambda x: TABLE[(x * 5).long()], X, False),
    "the row of the largest": (lambda x: TABLE[x.argmax(-1)], X, True),
    "the largest ones": (lambda x: x.gather(1, x.topk(2).indices), X, True),
    "rows by comparison": (lambda x: TABLE[(x > 0.5).long()], X, True),
    "probabilities": (lambda x: F.binary_cross_entropy(x, torch.ones_like(x)), X, False),
    "a matrix to be factored": (lambda x: torch.linalg.cholesky(x @ x.T + torch.eye(2)), X, False),
    "a matrix to be inverted": (lambda x: torch.linalg.inv(x @ x.T + torch.eye(2)), X, False),
    "a matrix whose factors nobody checks": (lambda x: torch.linalg.cholesky_ex(x @ x.T)[0], X, True),
    "singular values": (torch.linalg.svdvals, X, False),
    "a norm": (lambda x: torch.linalg.vector_norm(x) + torch.linalg.norm(x), X, True),
    "places in an image": (
        lambda x: F.grid_sample(TABLE.view(1, 1, 5, 3), x[:, :4].reshape(1, 2, 2, 2), align_corners=False),
        X,
        False,
    ),
    "a mask of places that are out of range": (
        lambda m: torch.ops.aten._unsafe_masked_index(TABLE[:, 0], m, [torch.arange(1000)], 0.0),
        torch.arange(1000) < 5,
        False,
    ),
    "what is asserted": (lambda x: torch._assert_async((x >= 0).all()), X, False),
    "the place of the largest, asserted": (lambda x: torch._assert_async(x.argmax() < 10), X, False),
    "what is asserted of whole numbers": (lambda n: torch._assert_async(n.sum() > 0), IDS, False),
    "variances": (lambda x: F.gaussian_nll_loss(x.detach() * 0, X, x), X, False),
    "a mask that lets places through": (
        lambda x: torch.ops.aten._unsafe_masked_index(TABLE[:, 0], x > 0.5, [torch.arange(5)], 0.0),
        X,
        False,
    ),
    "the last row of a mask": (lambda m: X.gather(1, m.sum(-1, keepdim=True) - 1), X > 0.1, False),
    "how many are larger": (lambda x: TABLE[(x[0, :, None] >= X[0]).sum(-1) - 1], X, False),
    "a sum that becomes an index": (lambda x: TABLE[(x * 0.1).sum(dtype=torch.int64)], X, False),
    "a divisor": (lambda n: 7 // n, IDS, False),
    "a remainder": (lambda n: torch.tensor(7) % (n + 1), IDS, False),
    "a divisor that is no integer": (lambda x: 7 // x, X, True),
}


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
CALLS |= {f"a divisor, {dtype}": (lambda n: 7 // n, IDS.to(dtype), False) for dtype in INTEGERS}


@pytest.mark.parametrize("name", CALLS)
def test_what_may_hold_any_value(name: str) -> None:
    fn, value, free = CALLS[name]
    step = fcg.graph_step(
        lambda state, x: ({"s": state["s"].clone()}, (fn(x), fn(state["s"]))),
        backend=Simulator(),
        constants=(TABLE, IDS, X),
    )
    unchecked = step.lower({"s": value}, value).reference.unchecked
    assert unchecked == Unchecked((free,), (free,))


def test_what_a_checked_slot_becomes_is_checked_too() -> None:
    """A warm-up runs twice: any value of a moment would make any value of the place that the next run reads."""

    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            table = params["table"]
            return (table[(params["at"] * 4).long()] * params["at"]).square().mean() + (
                x * params["free"]
            ).sum()

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    params = {"at": torch.full((2,), 0.5), "table": torch.ones(4, 2), "free": torch.ones(3)}
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.adam(1e-3))
    step = fcg.graph_step(train_step, backend=Simulator())
    lowered = step.lower(state, torch.ones(3))
    free = lowered.reference.unchecked
    may_be_any = {name for name, one in zip(lowered.program.slot_names, free.slots, strict=True) if one}
    assert may_be_any == {"state.step"}  # one call updates all leaves
    assert free.inputs == (True,)
    for _ in range(3):
        state, _ = step(state, torch.randn(3))


def test_what_a_checked_place_was_computed_from_before_is_checked_too() -> None:
    """A place becomes what is asserted, after some calls: then it may not come from flags or ``argmax`` either."""

    def step(state: Any) -> Any:
        s, t, u, a, b, c, d = state["chain"]
        new = [t * 1.0, u * 1.0, a.float() * torch.eye(3), b + 0, c.argmax().reshape(1), d * 1.0, d * 1.0]
        return {"chain": new, "table": state["table"] * 1.0}, torch.linalg.cholesky(s) + state["table"][a]

    places = [torch.zeros(1, dtype=torch.long) for _ in "ab"]
    chain = [*(torch.eye(3) for _ in "stu"), *places, torch.ones(5), torch.ones(5)]
    lowered = fcg.graph_step(step).lower({"chain": chain, "table": torch.ones(5, 3)})
    assert lowered.reference.unchecked.slots == (*[False] * 7, True)


def test_the_mask_that_attention_draws_is_not_checked() -> None:
    """Else its bits, which the backward reads, would make all weights checked: a warm-up would copy them."""
    attention = torch.ops.fcg.scaled_dot_product_dropout_attention

    def loss_of(x: Tensor, key: Tensor) -> Tensor:
        how = 0, 6554, 1 / 0.9, False, 0.125, True
        out, sums, kept = attention(x, x, x, None, key, *how)
        return torch.ops.fcg.scaled_dot_product_dropout_attention_backward(
            out, x, x, x, None, key, out, sums, kept, *how
        )[0].sum()

    x, key = torch.ones(1, 2, 64, 64), torch.tensor([1, 2])
    step = fcg.graph_step(
        lambda state, x, key: ({"w": state["w"] * 2}, loss_of(x * state["w"], key)), backend=Simulator()
    )
    assert step.lower({"w": x}, x, key).reference.unchecked == Unchecked((True,), (True, True))


def _at_the_edge(x: Tensor, y: Tensor) -> Tensor:
    p = x / (x + y)  # 1 where y is 0, and never above: a run whose sums are an ulp less would be
    torch._assert_async((p <= 1).all())
    rows = torch.arange(22.0).view(11, 2)[(p * 10).ceil().long()]
    return F.binary_cross_entropy(p, (p > 0.5).float()) + rows.sum()


@pytest.mark.parametrize("backend", ["auto", AsGraphs()], ids=["direct", "as graphs"])
@pytest.mark.parametrize("noise", [0.0, 4e-7])
def test_what_a_call_checks_is_perturbed_within_its_bounds(backend: Any, noise: float) -> None:
    """Also where a compiler rounds otherwise, so that runs with larger perturbations are made."""

    def compiler(graph: Any, inputs: Any) -> Any:
        return lambda *given: [one * (1 + noise) if one.is_floating_point() else one for one in graph(*given)]

    def fn(state: Any, batch: Any) -> Any:
        x, y = batch
        return {"w": state["w"] / 3 + _at_the_edge(x, y)}, {"loss": _at_the_edge(x, y)}

    step, state = fcg.graph_step(fn, lowering=compiler, backend=backend, certify=3), fcg.place({"w": ROW / 3})
    for call in range(16):
        x = torch.rand(64, generator=torch.Generator().manual_seed(call)) + 0.1
        expected = fn(fcg.snapshot(state), (x, x.roll(1) * (x > 0.5)))
        state, metrics = step(state, (x, x.roll(1) * (x > 0.5)))
        torch.testing.assert_close((fcg.snapshot(state), metrics), expected)
    assert "  certified: " in step.explain()


@compiled
def test_no_step_is_tried_on_values_that_its_calls_refuse(compiled_on: str) -> None:
    """Zeros would end the process: a division of integers by zero on the host, a row before the first one on a GPU."""

    def step(state: Any, n: Tensor) -> Any:
        row = state["table"][(state["at"] - 7.0).long()]  # the place of a row, as a float
        return {"table": state["table"] + 1, "at": (state["at"] - 6) % 5 + 7}, (row, 100 // n, row[0][n - 1])

    table = torch.arange(10.0, device=compiled_on).reshape(5, 2)
    state = fcg.place({"table": table, "at": torch.tensor([8.0], device=compiled_on)})
    compiled, twin = fcg.graph_step(step, lowering="inductor"), fcg.fork(state)
    for call in range(6):
        n = torch.full((1,), 1 + call % 2, device=compiled_on)
        twin, expected = compiled.eager(twin, n)
        state, metrics = compiled(state, n)
        for one, other in zip(metrics, expected, strict=True):
            assert torch.equal(one, other)
