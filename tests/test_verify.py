"""``debug="verify"``: what it lets pass, what it tells apart, and what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.testing import assert_replay_equals_eager
from functional_cg.verify import _difference

NAN = float("nan")


def model_step() -> tuple[Any, Any]:
    apply, params, buffers = fcg.from_module(
        nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))
    )
    optimizer = fcg.optim.adamw(1e-2, weight_decay=0.1)

    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            return (apply(params, state.buffers, x)[0].softmax(-1) ** 2).mean()

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss, "rows": x.shape[0], "grads": grads}

    return step, fcg.TrainState.create(params=params, buffers=buffers, optimizer=optimizer)


@pytest.mark.parametrize("debug", ["verify", "verify+poison", "poison+verify"])
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_a_sound_step_passes(lowering: Any, debug: Any) -> None:
    torch.manual_seed(0)
    fn, state = model_step()
    step = fcg.graph_step(fn, lowering=lowering, debug=debug, verify_calls=4)
    for _ in range(5):
        state, _ = step(state, torch.randn(16, 32))
    assert step.stats.replays == 5


class Config:
    """Read in a way that is not watched."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def read(self) -> Any:
        return getattr(self, "".join(["val", "ue"]))


def first_and_second(cfg: Config, fn: Any, then: Any, **options: Any) -> Any:
    """Verify a call, change what the watch does not see, and return the error of the next one and its state."""
    step, state = fcg.graph_step(fn, debug="verify", **options), fcg.place({"w": torch.ones(3)})
    state, _ = step(state, torch.ones(3))
    cfg.value = then
    with pytest.raises(fcg.CaptureError) as error:
        step(state, torch.ones(3))
    return str(error.value), state


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_a_stale_number_is_found_and_the_state_is_not_lost(lowering: Any) -> None:
    cfg = Config(1.0)
    text, old = first_and_second(
        cfg, lambda s, x: ({"w": s["w"] + x * cfg.read()}, {}), 1.01, lowering=lowering
    )
    assert "replay differs from the eager run at verified call 2" in text
    assert r"s['w']  differs by 0.0173 in norm, allowed is " in text
    assert "`s.latest()` is its state" in text
    assert old.latest()["w"].tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("fn", "first", "then", "row"),
    [
        (lambda cfg, x: cfg.read(), 1, 2, "metrics  eager 2   replay 1"),
        (lambda cfg, x: cfg.read(), 1, 1.0, "metrics  eager 1.0   replay 1"),
        (lambda cfg, x: x[: cfg.read()], 2, 3, r"metrics  eager f32[3]@cpu   replay f32[2]@cpu"),
        (lambda cfg, x: [x] * cfg.read(), 1, 2, "metrics[1]  expected a leaf   got nothing"),
        (lambda cfg, x: 1 // cfg.read(), 1, 0, "raises ZeroDivisionError in the eager run of verified call 2"),
    ],
)  # fmt: skip
def test_metrics_of_any_kind_are_compared(fn: Any, first: Any, then: Any, row: str) -> None:
    cfg = Config(first)
    text, old = first_and_second(cfg, lambda s, x: (s, fn(cfg, x)), then)
    assert row in text
    assert old.latest().generation == 2


def test_a_result_that_is_no_pair_any_more() -> None:
    cfg = Config(2)
    text, _ = first_and_second(cfg, lambda s, x: (s, x, x)[: cfg.read()], 3)
    assert "result  eager tuple   replay (state, metrics)" in text


def test_a_read_only_function() -> None:
    cfg = Config(1.0)
    look = fcg.graph_fn(lambda x: x * cfg.read(), debug="verify")
    look(torch.ones(2))
    cfg.value = 2.0
    with pytest.raises(fcg.CaptureError, match=r"outputs  differs by 1\.41 in norm, allowed is 0") as error:
        look(torch.ones(2))
    assert "latest" not in str(error.value)


def test_lines_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    step = fcg.graph_step(lambda s, x: (fcg.debug_print("x {}", x), (s, {}))[1], debug="verify")
    step({"w": torch.ones(1)}, torch.tensor(2))
    assert capsys.readouterr().out == "x 2\n"


@pytest.mark.parametrize(
    ("want", "have", "exact", "close"),
    [
        ([0.0], [-0.0], False, True),
        ([NAN, 1.0], [NAN, 1.0], True, True),
        ([NAN, 1.0], [1.0, 1.0], False, False),
        ([float("inf")], [float("-inf")], False, False),
        ([float("inf"), 1.0], [float("inf"), 1.0 + 1e-6], False, True),
        ([100.0, 0.0], [100.0, 1e-2], False, True),  # of the leaf's norm, not of the element
        ([100.0, 0.0], [100.0, 0.1], False, False),
        ([0.0], [1e-7], False, True),
        ([1.0 + 1.0j], [1.0 + 1.00001j], False, True),
        ([complex(1.0, 0.0)], [complex(1.0, -0.0)], False, True),
        ([1, 2], [1, 3], False, False),
        ([True], [False], False, False),
        ([], [], True, True),
    ],
    ids=str,
)
def test_bits_or_a_part_of_the_norm(want: Any, have: Any, *, exact: bool, close: bool) -> None:
    tensors = torch.tensor(want), torch.tensor(have)
    assert (_difference(*tensors, 0.0) == "") == exact
    assert (_difference(*tensors, 3.5e-4) == "") == close


@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.svdvals,
        lambda x: torch.linalg.matrix_norm(x, "nuc"),
        lambda x: fcg.grad(lambda p: p[0].prod())(x),
    ],
    ids=["svdvals", "nuclear norm", "gradient of prod"],
)
def test_ops_that_a_trace_computes_otherwise_are_no_false_alarm(function: Any) -> None:
    """A few steps, since not all values round in another way."""
    step = fcg.graph_step(lambda s, x: (s, {"m": function(x)}), debug="verify")
    state = fcg.place({"w": torch.zeros(1)})
    inputs = [torch.randn(4, 3) for _ in range(16)]
    for x in inputs:
        state, _ = step(state, x)
    assert_replay_equals_eager(fcg.graph_step(step.__wrapped__), state, inputs)
