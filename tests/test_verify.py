"""``debug="verify"``: what it accepts, what it distinguishes, and what it reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.step.verify import _difference
from functional_cg.testing import assert_replay_equals_eager
from tests.out_of_sight import OutOfSight

pytestmark = pytest.mark.usefixtures("scalar_loops")

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


def first_and_second(cfg: OutOfSight, fn: Any, then: Any, **options: Any) -> Any:
    """Verify a call, change what the watch does not see, and return the error of the next one and its state."""
    step, state = fcg.graph_step(fn, debug="verify", **options), fcg.place({"w": torch.ones(3)})
    state, _ = step(state, torch.ones(3))
    cfg.write(then)
    with pytest.raises(fcg.CaptureError) as error:
        step(state, torch.ones(3))
    return str(error.value), state


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_a_stale_number_is_found_and_the_state_is_not_lost(lowering: Any) -> None:
    cfg = OutOfSight(1.0)
    text, old = first_and_second(
        cfg, lambda s, x: ({"w": s["w"] + x * cfg.read()}, {}), 1.01, lowering=lowering
    )
    assert "replay differs from the eager run at verified call 2" in text
    assert r"s['w']  differs by 0.0173 in norm" in text
    assert "`s.latest()` is the new one" in text
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
    cfg = OutOfSight(first)
    text, old = first_and_second(cfg, lambda s, x: (s, fn(cfg, x)), then)
    assert row in text
    assert old.latest().generation == 2


def test_a_result_that_is_no_pair_any_more() -> None:
    cfg = OutOfSight(2)
    text, _ = first_and_second(cfg, lambda s, x: (s, x, x)[: cfg.read()], 3)
    assert "result  eager tuple   replay (state, metrics)" in text


def test_a_read_only_function() -> None:
    cfg = OutOfSight(1.0)
    look = fcg.graph_fn(lambda x: x * cfg.read(), debug="verify")
    look(torch.ones(2))
    cfg.write(2.0)
    with pytest.raises(fcg.CaptureError, match=r"outputs  differs by 1\.41 in norm") as error:
        look(torch.ones(2))
    assert "latest" not in str(error.value)


@pytest.mark.parametrize("lowering", ["aten", lambda graph, inputs: graph], ids=["aten", "a compiler"])
def test_lines_are_printed_once(lowering: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the compiled function and the recorded calls run once more, to be compared."""
    step = fcg.graph_step(
        lambda s, x: (fcg.debug_print("x {}", x), (s, {}))[1], debug="verify", lowering=lowering
    )
    step({"w": torch.ones(1)}, torch.tensor(2))
    assert capsys.readouterr().out == "x 2\n"


@pytest.mark.parametrize(
    ("want", "have", "text"),
    [
        ([0.0], [-0.0], "differs in the sign of zeros"),
        ([NAN, 1.0], [NAN, 1.0], ""),
        ([NAN, 1.0], [1.0, 1.0], "differs by inf in norm"),
        ([float("inf")], [float("-inf")], "differs by inf in norm"),
        ([float("inf"), 1.0], [float("inf"), 1.5], "differs by 0.5 in norm"),
        ([100.0, 0.0], [100.0, 1e-7], "differs by 1e-07 in norm"),
        ([1.0 + 1.0j], [1.0 + 1.5j], "differs by 0.5 in norm"),
        ([complex(1.0, 0.0)], [complex(1.0, -0.0)], "differs in the sign of zeros"),
        ([1, 2], [1, 3], "differs in 1 of 2 elements"),
        ([True], [False], "differs in 1 of 1 elements"),
        ([], [], ""),
    ],
    ids=str,
)
def test_all_bits_count(want: Any, have: Any, text: str) -> None:
    assert _difference(torch.tensor(want), torch.tensor(have)) == text


def test_rounding_that_an_optimizer_amplifies_is_no_false_alarm() -> None:
    """The gradient of a bias before a normalisation is nothing but rounding, of which Adam makes a whole update."""
    torch.manual_seed(0)
    optimizer = fcg.optim.adam(0.1)

    def fn(state: Any, x: Tensor) -> Any:
        def loss_fn(p: Any) -> Tensor:
            return nn.functional.layer_norm((x @ p["w"]).sum(-1, keepdim=True) + p["b"], (64, 1)).sin().mean()

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    def state() -> Any:
        return fcg.TrainState.create(params={"w": w, "b": torch.zeros(1)}, optimizer=optimizer)

    w = torch.randn(32, 32)
    steps = [fcg.graph_step(fn, lowering=lowering, debug="verify") for lowering in ("aten", "inductor")]
    states = [state(), state()]
    for _ in range(4):
        x = torch.randn(3, 64, 32)
        states = [step(one, x)[0] for step, one in zip(steps, states, strict=True)]
    assert not torch.allclose(states[0].params["b"], states[1].params["b"], rtol=0.1), "the lowerings agree"


@pytest.mark.parametrize("donates", [True, False])
def test_a_compiler_that_changes_its_mind_is_found(*, donates: bool) -> None:
    """The replay is compared with the compiled function, since nobody knows how far that may be from the eager run."""
    runs: list[int] = []

    def compiler(graph: Any, example_inputs: Any) -> Any:
        del example_inputs

        def compiled(*args: Any) -> Any:
            runs.append(len(runs))
            out = graph(*args)
            return [out[0] + 1e-6 * len(runs), *out[1:]]

        return compiled

    text = r"replay differs from the compiled function run by itself at verified call 1(.|\n)*differs by"
    if donates:
        step: Any = fcg.graph_step(
            lambda s, x: (s, {"m": x * 2}), lowering=compiler, debug="verify", certify=False
        )
        with pytest.raises(fcg.CaptureError, match=text):
            step({"w": torch.ones(1)}, torch.ones(2))
    else:
        look: Any = fcg.graph_fn(lambda x: x * 2, lowering=compiler, debug="verify", certify=False)
        with pytest.raises(fcg.CaptureError, match=text):
            look(torch.ones(2))


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


def test_outputs_of_a_function_that_keeps_no_state_are_told_apart() -> None:
    cfg = OutOfSight(1)
    forward = fcg.graph_fn(lambda state, x: (state["w"] + x, cfg.read()), debug="verify")
    state = fcg.place({"w": torch.ones(3)})
    forward(state, torch.ones(3))
    cfg.write(2)
    with pytest.raises(fcg.CaptureError, match=r"outputs\[1\]  eager 2   replay 1"):
        forward(state, torch.ones(3))
