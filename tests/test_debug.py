"""Printing from inside a step, and poison between calls."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.testing.simulator import Simulator

pytestmark = pytest.mark.usefixtures("scalar_loops")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def talking(state: Any, x: Tensor) -> Any:
    w = state["w"]

    def loss_fn(w: Tensor) -> Tensor:
        loss = ((w - x) ** 2).sum()
        fcg.debug_print("loss {:.4f} of {} {{{kind}}}", loss, x, kind="sum")
        return loss

    loss, grad = fcg.value_and_grad(loss_fn)(w)
    scratch = grad.clone()
    fcg.debug_print("before {0} {0[1]:+.2f}", scratch)
    scratch.zero_()
    return {"w": w - 0.25 * grad}, {"loss": loss, "scratch": scratch}


def silent(state: Any, x: Tensor) -> Any:
    loss, grad = fcg.value_and_grad(lambda w: ((w - x) ** 2).sum())(state["w"])
    return {"w": state["w"] - 0.25 * grad}, {"loss": loss, "scratch": torch.zeros_like(grad)}


def lines(w: Tensor, x: Tensor) -> str:
    grad = 2 * (w - x)
    return f"loss {float(((w - x) ** 2).sum()):.4f} of {x} {{sum}}\nbefore {grad} {float(grad[1]):+.2f}\n"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options", [{"lowering": "aten"}, {"lowering": "inductor"}, {"backend": "eager"}], ids=str
)
def test_prints_at_each_call_in_order_and_changes_nothing(
    options: dict[str, Any], device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step, plain = fcg.graph_step(talking, **options), fcg.graph_step(silent, **options)
    state, other = (fcg.place({"w": torch.tensor([1.0, 2.0])}, device) for _ in range(2))
    for i in range(16):
        x, w = torch.tensor([float(i), 0.5]), state["w"].cpu().clone()
        capsys.readouterr()
        state, metrics = step(state, x)
        assert capsys.readouterr().out == lines(w, x)
        other, expected = plain(other, x)
        assert torch.equal(state["w"].clone(), other["w"].clone())
        assert torch.equal(metrics["loss"], expected["loss"])
        assert torch.equal(metrics["scratch"], expected["scratch"])
    assert step.stats.replays == (0 if "backend" in options else 16)


def test_prints_in_a_read_only_function(capsys: pytest.CaptureFixture[str]) -> None:
    @fcg.graph_fn
    def look(state: Any, n: int) -> Tensor:
        fcg.debug_print("{n} {b} {w.shape} {w[0]:.1f}", n=n, b=state["b"], w=state["w"])
        return state["w"] * n

    state = fcg.place({"w": torch.ones(2), "b": torch.tensor(True)})
    look(state, 1), look(state, 2)
    assert capsys.readouterr().out == "1 True torch.Size([2]) 1.0\n2 True torch.Size([2]) 1.0\n"


def test_prints_at_once_outside_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    fcg.debug_print("{} {!r} {:>4}|", torch.tensor(3), "a{b}", 7)
    fcg.debug_print("no value {{}}")
    assert capsys.readouterr().out == "3 'a{b}'    7|\nno value {}\n"


def test_a_refused_call_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    step = fcg.graph_step(talking)
    state, _ = step({"w": torch.ones(2)}, torch.zeros(2))
    capsys.readouterr()
    with pytest.raises(fcg.LayoutError):
        step(state, torch.zeros(3))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("{:.2f}", ValueError, r"`\{:.2f\}` formats a number, and the tensor is f32\[2\]"),
        ("{} {}", IndexError, "out of range"),
        ("{other}", KeyError, "other"),
    ],
)
def test_a_bad_format_is_refused_before_anything_runs(text: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        fcg.debug_print(text, torch.ones(2))
    step = fcg.graph_step(lambda state, x: (fcg.debug_print(text, x), (state, {}))[1])
    state = fcg.place({"w": torch.ones(2)})
    with pytest.raises(fcg.CaptureError, match=error.__name__):
        step(state, torch.ones(2))
    assert state["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "dtype", "match"),
    [
        ("{:d}", torch.float32, r"`\{:d\}` does not format f32\[\]@cpu: Unknown format code 'd'"),
        ("{:{w}.3q}", torch.float32, r"`\{:10.3q\}` does not format f32"),
        ("{:.3q}", torch.int64, "does not format i64"),
        ("{:x}", torch.complex64, "does not format c64"),
        ("{!z}", torch.bool, "z"),
    ],
)
def test_a_format_that_does_not_fit_the_dtype_is_refused_at_the_trace(
    text: str, dtype: torch.dtype, match: str
) -> None:
    step = fcg.graph_step(lambda s, x: (fcg.debug_print(text, s["n"], w=10), (s, {}))[1])
    state = fcg.place({"n": torch.zeros((), dtype=dtype)})
    with pytest.raises(fcg.CaptureError, match=match):
        step(state, 1)
    assert state.generation == 0
    assert state["n"] == 0


def test_formats_may_hold_fields_and_strings_may_be_padded(capsys: pytest.CaptureFixture[str]) -> None:
    texts = "{:{w}.3f}|", "{:{}}|", "{!r:>22}|"
    step = fcg.graph_step(
        lambda s, x: (fcg.debug_print("".join(texts), x[0], x[1], "8.1f", x, w=10), (s, {}))[1]
    )
    step({"w": torch.ones(1)}, torch.tensor([1.0, 2.0]))
    assert capsys.readouterr().out == "     1.000|     2.0|      tensor([1., 2.])|\n"


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_under_vmap_each_element_has_a_line(lowering: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def row(x: Tensor, shared: Tensor) -> Tensor:
        fcg.debug_print("{:.1f} {}", x.sum(), shared)
        return x.sum()

    @fcg.graph_step(lowering=lowering)
    def step(state: Any, x: Tensor) -> Any:
        return state, torch.func.vmap(torch.func.grad(row), in_dims=(1, None))(x, state["w"])

    state = {"w": torch.ones(1)}
    for _ in range(2):
        state, _ = step(state, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        assert capsys.readouterr().out == "4.0 tensor([1.])\n6.0 tensor([1.])\n"


def test_a_closed_stdout_loses_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    step, state = fcg.graph_step(talking), fcg.place({"w": torch.tensor([1.0, 2.0])})
    state, _ = step(state, torch.zeros(2))
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    with pytest.raises(ValueError, match="closed file"):
        step(state, torch.zeros(2))
    assert state.latest().generation == 2
    assert state.latest()["w"].tolist() == [0.25, 0.5]


def test_text_that_moves_between_traces_is_refused() -> None:
    moments = iter(range(10))
    step = fcg.graph_step(lambda state, x: (fcg.debug_print("at {} {}", next(moments), x), (state, {}))[1])
    with pytest.raises(fcg.BakedValueError, match="debug_print"):
        step({"w": torch.ones(2)}, torch.ones(2))


# -- poison ---------------------------------------------------------------------------------------------------------


def mixed(state: Any, x: Tensor, n: int, flag: bool) -> Any:
    new = torch.where(flag, state["w"] + x * n, state["w"])
    return {"w": new}, {"new": new, "n": n + 1, "flag": torch.logical_not(flag)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_poison_changes_no_result(lowering: Any, device: str) -> None:
    step = fcg.graph_step(mixed, lowering=lowering, debug="poison")
    state, eager = (fcg.place({"w": torch.zeros(3)}, device) for _ in range(2))
    kept = []
    for i in range(16):
        call = (torch.full((3,), float(i)), i, i % 3 > 0)
        state, got = step(state, *call)
        eager, want = step.eager(eager, *call)
        kept += [(got, want), ({"w": state["w"].clone()}, {"w": eager["w"].clone()})]
    for got, want in kept:
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert step.stats.replays == 16


class _Aliasing(Simulator):
    """A backend whose metrics are static memory, handed out as if they were fresh."""

    def capture(self, plan: Any, buffers: Any, scratch: Any) -> Any:
        replay, inputs = super().capture(plan, buffers, scratch), buffers.inputs

        class Replay:
            fresh = True
            close = staticmethod(replay.close)

            def __call__(self, before: Any, /) -> Any:
                replay(before)
                return inputs[:1]

        return Replay()


@pytest.mark.parametrize(("debug", "seen"), [(None, 5.0), ("poison", float("nan"))])
def test_poison_shows_who_reads_dead_memory(debug: Any, seen: float) -> None:
    step = fcg.graph_step(lambda state, x: (state, x * 1), backend=_Aliasing(), debug=debug)
    _, metric = step({"w": torch.ones(1)}, torch.tensor(5.0))
    torch.testing.assert_close(metric, torch.tensor(seen), equal_nan=True)


def test_a_replaced_method_of_tensors_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(state: Any, x: Tensor) -> Any:
        return {"w": state["w"] + x * float(torch.tensor(2.0).sigmoid())}, {}

    step = fcg.graph_step(scaled, debug="verify")
    state, _ = step({"w": torch.zeros(3)}, torch.ones(3))
    monkeypatch.setattr(torch.Tensor, "sigmoid", lambda tensor: tensor * 3)
    with pytest.raises(fcg.FunctionalCGError) as error:
        step(state, torch.ones(3))
    assert "w" in str(error.value)
