"""Where a NaN comes from: the first call that makes it is named, with the user's line, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.compiled_graphs import ON_A_GPU
from tests.pipelines.programs import Run, made, rows
from tests.sharding.programs import Setting, mlp_batch, mlp_state, mlp_step
from tests.sharding.ranks import on_ranks

Loss = Callable[[dict[str, Tensor], Tensor], Tensor]
START = torch.tensor([0.5, 1.0, 2.0, 4.0])
BIG = torch.tensor([1.0, 300.0, 2.0, 300.0])


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad / x.sqrt() * 0.5


def _masked(scores: Tensor, x: Tensor) -> Tensor:
    """Two rows of scores: of one, three are masked, of the other all."""
    return torch.stack([scores, scores]).masked_fill(torch.stack([x > 0.7, x > 0]), -torch.inf)


# Loss of w and x; x; the op, the phase and the first line's text of what has to be named.
FAULTS: dict[str, tuple[Loss, Tensor, str, str]] = {
    "log of 0": (lambda p, x: (p["w"] * x).log().mean(), START - 0.5, "log", "forward"),
    "sqrt at 0 in a backward": (lambda p, x: (p["w"] * x).sqrt().sum(), START - 0.5, "div", "backward"),
    "a square root of one's own": (lambda p, x: _Root.apply(p["w"] * x).sum(), START - 0.5, "div", "backward"),
    "sqrt of a negative number": (lambda p, x: (p["w"] * x).sqrt().sum(), START - 1, "sqrt", "forward"),
    "a norm at 0": (lambda p, x: (p["w"] * x).pow(2).sum().pow(0.5), START * 0, "pow", "backward"),
    "overflow in half precision": (
        lambda p, x: (p["w"].half() * x.half()).square().float().mean(), BIG, "pow", "forward",
    ),
    "overflow of a product in half precision": (
        lambda p, x: (p["w"].half() * x.half() * 300).float().mean(), BIG, "mul", "forward",
    ),
    "exp of a large number": (lambda p, x: (p["w"] * x).exp().sum(), BIG, "exp", "forward"),
    "a softmax by hand": (
        lambda p, x: ((p["w"] * x).exp() / (p["w"] * x).exp().sum())[0], BIG, "exp", "forward",
    ),
    "division by a masked count": (
        lambda p, x: (p["w"] * x * (x > 9)).sum() / (x > 9).sum(), START, "div", "forward",
    ),
    "0 by 0": (lambda p, x: (p["w"] * x / x).sum(), START - 1, "div", "forward"),
    "a bad batch": (lambda p, x: (p["w"] * x).sum(), START.clone().fill_(torch.nan), "", ""),
    "NaN in the other branch of a where": (
        lambda p, x: torch.where(x > 0, (p["w"] * x).sqrt(), x).sum(), START - 0.5, "div", "backward",
    ),
    "a softmax over -inf alone": (
        lambda p, x: _masked(p["w"] * x, x).softmax(1).square().sum(), START, "_softmax", "forward",
    ),
    "a log-softmax that picks what is masked": (
        lambda p, x: _masked(p["w"] * x, x)[:1].log_softmax(1)[0, 1:].exp().log().sum(),
        START, "log", "forward",
    ),
    "a variance of one": (lambda p, x: (p["w"] * x)[:1].std(), START, "std", "forward"),
    "a power of a negative number": (lambda p, x: (p["w"] * x).pow(0.5).sum(), START - 1, "pow", "forward"),
    "acos beyond 1": (lambda p, x: (p["w"] * x).acos().sum(), START, "acos", "forward"),
    "inf - inf": (lambda p, x: ((p["w"] * x).exp() - (p["w"] * x).exp()).sum(), BIG, "exp", "forward"),
    "a number of ours": (lambda p, x: (p["w"] * x).sum() * torch.full((), torch.nan), START, "full", "forward"),
}  # fmt: skip


def step_of(loss: Loss, **options: Any) -> Any:
    def train_step(state: Any, x: Tensor) -> Any:
        value, grads = fcg.value_and_grad(lambda p: loss(p, x))(state)
        return fcg.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value}

    return fcg.graph_step(train_step, **options)


def state_of(device: str = "cpu") -> Any:
    return fcg.place({"w": START.to(device), "other": torch.ones(2, device=device)})


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
@pytest.mark.parametrize("lowering", ["aten", pytest.param("inductor", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("name", FAULTS)
def test_the_first_call_is_named(name: str, lowering: Any, device: str) -> None:
    loss, x, op, phase = FAULTS[name]
    step, state = step_of(loss, lowering=lowering), state_of(device)
    before = fcg.snapshot(state)
    found = step.find_nonfinite(state, x.to(device))
    assert found
    assert "state['w']" in found.results or "metrics['loss']" in found.results
    assert "state['other']" not in found.results
    assert not found.compiled
    if op:
        first = found.calls[0]
        assert (first.op, first.phase) == (op, phase)
        assert first.line.startswith("test_nonfinite.py:")
        assert first.source
        assert not found.given
    else:
        assert not found.calls
        assert found.given == ("x  f32[4]  nan in 4 of 4, first at [0]",)
    assert_trees_all_equal(fcg.snapshot(state), before)
    state, metrics = step(state, x.to(device))  # the state was not donated, and the replay agrees
    bad = {"w": state["w"], "loss": metrics["loss"]}
    assert {key for key, one in bad.items() if not one.isfinite().all()} == {
        key for key in bad if any(f"'{key}'" in one for one in found.results)
    }


FINE: dict[str, tuple[Loss, Tensor]] = {
    "a mask": (lambda p, x: _masked(p["w"] * x, x)[0].softmax(0).square().sum(), START),
    "a causal attention": (
        lambda p, x: F.scaled_dot_product_attention(
            *[(p["w"] * x).outer(x)[None]] * 3, is_causal=True
        ).square().mean(),
        START,
    ),
    "a maximum over nothing": (lambda p, x: (p["w"] * x).sum() + x.new_full((2,), -torch.inf).amax().exp(), START),
    "an infinity whose inverse counts": (lambda p, x: (p["w"] * x).sum() + 1 / (x * 1e38 * 1e3).sum(), START),
    "a place that is written before it is read": (
        lambda p, x: (torch.empty(4, device=x.device).copy_(x) * p["w"]).sum(), START,
    ),
    "a NaN that is overwritten": (
        lambda p, x: (p["w"] * (x - x).div(x - x).nan_to_num(1.0)).sum(), START,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FINE)
def test_nothing_is_found_where_all_results_are_finite(name: str) -> None:
    loss, x = FINE[name]
    found = step_of(loss).find_nonfinite(state_of(), x)
    assert not found
    assert (found.calls, found.given, found.results) == ((), (), ())
    assert str(found) == "train_step: all results are finite"


def test_a_leaf_that_is_not_finite_before_is_named() -> None:
    state = fcg.place({"w": START * torch.nan, "other": torch.ones(2)})
    found = step_of(lambda p, x: (p["w"] * x).log().mean()).find_nonfinite(state, START)
    assert not found.calls
    assert found.given == ("state['w']  f32[4]  nan in 4 of 4, first at [0]",)


def test_infinities_that_are_given_and_stay_are_told() -> None:
    state = fcg.place({"w": START * torch.inf, "other": torch.ones(2)})
    found = step_of(lambda p, x: p["other"].sum()).find_nonfinite(state, START)
    assert (found.calls, found.results) == ((), ("state['w']",))
    assert found.given == ("state['w']  f32[4]  inf in 4 of 4, first at [0]",)
    step = fcg.graph_step(lambda state, x: (state, {"least": x.new_full((2,), -torch.inf).amax()}))
    assert step.find_nonfinite(state_of(), START).given == ("infinite numbers in the code",)


def test_it_is_looked_for_by_module_and_in_the_update() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return (self.head(self.body(x).relu()) - x.abs().sum() * 9).log()

    torch.manual_seed(0)
    apply, params, _ = fcg.from_module(Net())

    def train_step(state: Any, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: apply(p, {}, x)[0].mean())(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.adamw(1e-3, weight_decay=0.0))
    found = fcg.graph_step(train_step).find_nonfinite(state, torch.randn(2, 4))
    assert (found.calls[0].op, found.calls[0].module, found.calls[0].phase) == ("log", "Net", "forward")
    assert "return (self.head(self.body(x).relu()) - x.abs().sum() * 9).log()" in str(found)

    def bad_update(state: Any, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: p["head.weight"].square().mean())(state.params)
        grads = fcg.tree.map(
            lambda g: g / (fcg.optim.global_norm(grads) - fcg.optim.global_norm(grads)), grads
        )
        return state.apply_gradients(grads), {"loss": loss}

    found = fcg.graph_step(bad_update).find_nonfinite(state, torch.randn(2, 4))
    assert (found.calls[0].op, found.calls[0].phase) == ("div", "update")


def test_of_many_models_the_member_is_told() -> None:
    step = fcg.graph_step(
        fcg.sweep(
            lambda state, x: ({"w": state["w"] - (state["w"] * x).log().sum()}, {"loss": state["w"].sum()})
        )
    )
    found = step.find_nonfinite(
        fcg.place({"w": torch.tensor([[1.0, 2.0], [1.0, 0.0], [3.0, 4.0]])}), torch.ones(2)
    )
    assert found.calls[0].made == "f32[3,2]  -inf in 1 of 6, first at [1, 1]; 0 to 1.39"


def test_a_fault_of_the_compiler_is_told() -> None:
    def lying(graph: Any, inputs: Any) -> Any:
        return lambda *args: [one * torch.nan if one.is_floating_point() else one for one in graph(*args)]

    found = step_of(lambda p, x: (p["w"] * x).sum(), lowering=lying).find_nonfinite(state_of(), START)
    assert found.compiled
    assert not found.calls
    assert "metrics['loss']" in found.results
    assert str(found).endswith("its traced calls, run one by one, are finite.")


def test_a_report_of_many_calls_is_short() -> None:
    found = step_of(
        lambda p, x: sum((p["w"] * x * n).log().mean() for n in range(1, 9)), lowering="aten"
    ).find_nonfinite(state_of(), START - 0.5)
    assert len(found.calls) == 16
    assert str(found).count("log ->") == 3
    assert str(found).endswith("and 13 more calls, in `.calls`")


def test_a_fault_in_a_loop_is_found() -> None:
    def train_step(state: Any, xs: Tensor) -> Any:
        def body(carry: Tensor, x: Tensor) -> Any:
            return carry - (carry * x).log().sum(), carry.sum()

        carry, sums = fcg.scan(body, state["w"], xs)
        return {"w": carry}, {"sums": sums}

    xs = torch.ones(3, 2)
    xs[1, 0] = 0
    found = fcg.graph_step(train_step).find_nonfinite(fcg.place({"w": torch.ones(2)}), xs)
    assert found.calls[0].op == "log"
    assert found.calls[0].made == "f32[2]  -inf in 1 of 2, first at [0]; 0"


def look(device: str) -> list[str]:
    zero = Setting({"data": 2}).zero(device)
    state, step, rank = mlp_state()(zero, device), fcg.graph_step(mlp_step, lowering="aten"), zero.mesh.rank
    batches = [
        {name: one.to(device) * factor for name, one in mlp_batch(0, rank).items()}
        for factor in (1.0, torch.nan if rank else 1.0)
    ]
    return [str(step.find_nonfinite(state, batch)) for batch in batches]


def look_in_stages(device: str) -> list[str]:
    run = Run("1f1b", ())
    _, state, train_step = made(run, {"stage": 2}, device)
    step = fcg.graph_step(train_step, lowering="aten")
    fine = str(step.find_nonfinite(state, rows(0, 0)))
    bad = fcg.tree.at(
        lambda s: s.params["emb"], state, fcg.tree.map(lambda p: p * torch.nan, state.params["emb"])
    )
    return [fine, str(step.find_nonfinite(bad, rows(0, 0)))]


def test_several_ranks_look_together() -> None:
    (fine, other), (_, mine) = on_ranks(2, look, "cpu")
    assert fine == "mlp_step: all results are finite"
    assert "given: batch['x']  f32[4,5]  nan in 20 of 20, first at [0, 0]" in mine
    assert "given: from another rank, at programs.py:" in other
    assert "first call" not in mine + other


def test_stages_of_a_pipeline_look_together() -> None:
    (fine, mine), (_, other) = on_ranks(2, look_in_stages, "cpu")
    assert fine == "train_step: all results are finite"
    assert "given: state.params['emb']  f32[" in mine
    assert "given: from another rank, at programs.py:" in other
    assert "state.params['emb']" not in other
    assert "  then" not in mine + other


def test_bits_that_are_read_as_numbers_are_no_fault_of_the_view() -> None:
    step = fcg.graph_step(lambda state, x: ({"w": state["w"] + x.view(torch.float32)}, {}))
    found = step.find_nonfinite({"w": torch.ones(1)}, torch.tensor([torch.nan]).view(torch.int32))
    assert not found.calls
    assert found.given[0].startswith("from bits that are read as numbers, at test_nonfinite.py:")
