"""Known surprises of captured training. No row may stay silent.

==========================================================  ==========
surprise                                                    outcome
==========================================================  ==========
``losses.append(metrics["loss"])`` gives N copies of one    impossible
a batch written after the call changes the result           impossible
the first batch, or the first state, becomes the buffer     impossible
one state read after it was donated                         raises
a leaf kept from before shows new values                    raises
a leaf written with ``+=``                                  raises
``{"params": p, "target": p}``                              raises
the last batch is smaller, and is broadcast                 raises
a dtype is cast in silence                                  raises
a Python number in the batch freezes                        impossible
a learning rate in a global freezes                         raises
``model.eval()`` after the capture                          raises
dropout draws the same mask for ever                        raises
``time.time()`` in the step                                 raises
``print(loss)``                                             raises
``if loss > x``                                             raises
``.item()`` of a closed-over tensor                         raises
a closed-over tensor that is freed                          raises
a closed-over numpy array that changes                      raises
a table declared as constant that changes                   raises
a list of tensors filled in the step                        raises
a counter of Python counted up in the step                  raises
``return {"a": s["b"], "b": s["a"]}`` loses one             impossible
warm-up counts as a step                                    impossible
an error half way leaves half of an update                  impossible
evaluation between steps disturbs the run                   impossible
the order in which keys are written matters                 impossible
``state = place(...)`` twice from one tree shares memory    impossible
a list of Python numbers filled in the step                 documented
``logging`` in the step speaks while tracing only           documented
a file read in the step                                     documented
a value reached by ``getattr`` with a computed name         raises
a Python number among the metrics is that of the trace      documented
metrics that are dicts come back as they were written       impossible
weight decay moves a parameter that the loss does not use   documented
==========================================================  ==========

*raises*: an error of its own class, before anything is launched. *impossible*: the result is right.
*documented*: it behaves as the test shows, the same at every call; the docs or ``debug="verify"`` tell.
"""

import logging
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import functional_cg as fcg
from tests.small_step import a_state, data, train

ROWS: dict[str, tuple[str, Callable[[], None]]] = {}
"""Outcome and proof of each row of the table above."""


def row(surprise: str, outcome: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(proof: Callable[[], None]) -> Callable[[], None]:
        ROWS[surprise] = (outcome, proof)
        return proof

    return add


def raises(error: type[Exception], match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=match):
        call()


# -- outputs and inputs -----------------------------------------------------------------------------------------


@row('``losses.append(metrics["loss"])`` gives N copies of one', "impossible")
def _() -> None:
    step, state, kept = fcg.graph_step(train), a_state(), []
    for n in range(4):
        state, metrics = step(state, data(n))
        kept.append(metrics["n"])
    assert torch.stack(kept).tolist() == [0, 1, 2, 3]


@row("a batch written after the call changes the result", "impossible")
def _() -> None:
    step, state, batch = fcg.graph_step(lambda s, b: (s, b["x"] * 1)), a_state(), data(0)
    state, out = step(state, batch)
    batch["x"].zero_()
    assert out.sum() == 15.0


@row("the first batch, or the first state, becomes the buffer", "impossible")
def _() -> None:
    step, batch, tree = fcg.graph_step(train), data(0), {"w": torch.ones(3), "n": torch.tensor(0)}
    state, _ = step(tree, batch)
    for n in range(1, 4):
        state, _ = step(state, data(n))
    assert batch["x"].tolist() == data(0)["x"].tolist()
    assert tree["w"].tolist() == [1.0, 1.0, 1.0]


@row("the last batch is smaller, and is broadcast", "raises")
def _() -> None:
    step = fcg.graph_step(train)
    state, _ = step(a_state(), data(0))
    raises(fcg.LayoutError, r"f32\[1,3\]", lambda: step(state, {"x": torch.ones(1, 3)}))


@row("a dtype is cast in silence", "raises")
def _() -> None:
    step = fcg.graph_step(train)
    state, _ = step(a_state(), data(0))
    raises(fcg.LayoutError, r"f64\[2,3\]", lambda: step(state, {"x": torch.ones(2, 3, dtype=torch.float64)}))


@row("a Python number in the batch freezes", "impossible")
def _() -> None:
    step, state = fcg.graph_step(lambda s, b: (s, b["lr"] * 2)), a_state()
    for lr in (0.5, 0.25):
        state, out = step(state, {"lr": lr})
        assert out == 2 * lr


@row("the order in which keys are written matters", "impossible")
def _() -> None:
    step, state = fcg.graph_step(lambda s, b: (s, b["p"] - b["q"])), a_state()
    state, first = step(state, {"p": 3.0, "q": 1.0})
    state, second = step(state, {"q": 1.0, "p": 3.0})
    assert first == second == 2.0


# -- states -----------------------------------------------------------------------------------------------------


@row("one state read after it was donated", "raises")
def _() -> None:
    step, state = fcg.graph_step(train), a_state()
    step(state, data(0))
    raises(fcg.DonatedStateError, r"state, metrics = train\(state, batch\)", lambda: step(state, data(1)))


@row("a leaf kept from before shows new values", "raises")
def _() -> None:
    step, state = fcg.graph_step(train), a_state()
    leaf, view = state["w"], state["w"][1:]
    step(state, data(0))
    for old in (leaf, view):
        raises(fcg.DonatedStateError, "was used after", lambda old=old: old + 1)


@row("a leaf written with ``+=``", "raises")
def _() -> None:
    leaf = a_state()["w"]

    def write() -> None:
        nonlocal leaf
        leaf += 1

    raises(fcg.ReadOnlyError, "was written to", write)


@row('``{"params": p, "target": p}``', "raises")
def _() -> None:
    params = {"w": torch.ones(3)}
    raises(
        fcg.AliasError, r"state\['target'\]\['w'\]", lambda: fcg.place({"params": params, "target": params})
    )


@row("``state = place(...)`` twice from one tree shares memory", "impossible")
def _() -> None:
    tree = {"w": torch.ones(3), "n": torch.tensor(0)}
    one, two = fcg.place(tree), fcg.place(tree)
    one, _ = fcg.graph_step(train)(one, data(0))
    assert two["w"].tolist() == tree["w"].tolist() == [1.0, 1.0, 1.0]


@row('``return {"a": s["b"], "b": s["a"]}`` loses one', "impossible")
def _() -> None:
    step = fcg.graph_step(lambda s, b: ({"a": s["b"], "b": s["a"]}, {}))
    state = {"a": torch.ones(2), "b": torch.zeros(2)}
    for _ in range(3):
        state, _metrics = step(state, None)
    assert (state["a"].tolist(), state["b"].tolist()) == ([0.0, 0.0], [1.0, 1.0])


@row("warm-up counts as a step", "impossible")
def _() -> None:
    state, _ = fcg.graph_step(train)(a_state(), data(0))
    assert state["n"] == 1


@row("an error half way leaves half of an update", "impossible")
def _() -> None:
    def fails(state: Any, batch: Any) -> Any:
        new = {**state, "w": state["w"] + 1}
        raise ValueError("half way") if batch["x"].shape[0] == 2 else None
        return new, {}

    state = a_state()
    raises(fcg.CaptureError, "half way", lambda: fcg.graph_step(fails)(state, data(0)))
    assert state["w"].tolist() == [0.0, 1.0, 2.0]


@row("evaluation between steps disturbs the run", "impossible")
def _() -> None:
    step, evaluate = fcg.graph_step(train), fcg.graph_fn(lambda s, b: (s["w"] * b["x"]).sum())
    plain, watched = a_state(), a_state()
    for n in range(4):
        plain, _ = step(plain, data(n))
        watched, _ = step(watched, data(n))
        evaluate(watched, data(n))
    assert plain["w"].tolist() == watched["w"].tolist()


# -- values of the host -----------------------------------------------------------------------------------------

RATE = 0.5


@row("a learning rate in a global freezes", "raises")
def _() -> None:
    step = fcg.graph_step(lambda s, b: (s, s["w"] * RATE))
    state, _ = step(a_state(), data(0))
    globals()["RATE"] = 0.25
    try:
        raises(fcg.BakedValueError, r"RATE  traced 0\.5   now 0\.25", lambda: step(state, data(0)))
    finally:
        globals()["RATE"] = 0.5


@row("``model.eval()`` after the capture", "raises")
def _() -> None:
    class Noisy(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x.cos() if self.training else x

    model = Noisy()
    step = fcg.graph_step(lambda s, b: (s, model(s["w"])))
    state, _ = step(a_state(), data(0))
    model.eval()
    raises(fcg.BakedValueError, r"model\.training  traced True   now False", lambda: step(state, data(0)))


@row("dropout draws the same mask for ever", "raises")
def _() -> None:
    model = torch.nn.Dropout(0.5)
    step = fcg.graph_step(lambda s, b: (s, model(s["w"])))
    raises(fcg.ImplicitRandomnessError, "not in the state", lambda: step(a_state(), data(0)))


@row("``time.time()`` in the step", "raises")
def _() -> None:
    step = fcg.graph_step(lambda s, b: (s, s["w"] * time.perf_counter()))
    raises(fcg.BakedValueError, "two traces of it differ", lambda: step(a_state(), data(0)))


@row("``print(loss)``", "raises")
def _() -> None:
    def prints(state: Any, batch: Any) -> Any:
        print(batch["x"].sum())  # noqa: T201
        return state, {}

    raises(fcg.HostSyncError, "debug_print", lambda: fcg.graph_step(prints)(a_state(), data(0)))


@row("``if loss > x``", "raises")
def _() -> None:
    def decides(state: Any, batch: Any) -> Any:
        return (state, {}) if batch["x"].sum() > 0 else (state, {"loss": batch["x"]})

    raises(fcg.HostSyncError, "torch.where", lambda: fcg.graph_step(decides)(a_state(), data(0)))


@row("``.item()`` of a closed-over tensor", "raises")
def _() -> None:
    table = torch.ones(3)
    for read in (lambda: table[0].item(), lambda: table.tolist()[0], lambda: float(table.numpy()[0])):
        step = fcg.graph_step(lambda s, b, read=read: (s, s["w"] * read()))
        raises(
            fcg.ForeignTensorError,
            "in neither the state nor the inputs",
            lambda step=step: step(a_state(), data(0)),
        )


@row("a closed-over tensor that is freed", "raises")
def _() -> None:
    table = torch.ones(3)
    step = fcg.graph_step(lambda s, b: (s, s["w"] * table))
    raises(fcg.ForeignTensorError, "in neither the state nor the inputs", lambda: step(a_state(), data(0)))


@row("a closed-over numpy array that changes", "raises")
def _() -> None:
    array = numpy.ones(3, dtype=numpy.float32)
    step = fcg.graph_step(lambda s, b: (s, s["w"] * torch.from_numpy(array)))
    raises(fcg.ForeignTensorError, "reads an array of numpy", lambda: step(a_state(), data(0)))


@row("a table declared as constant that changes", "raises")
def _() -> None:
    table = torch.ones(3)
    step = fcg.graph_step(lambda s, b: (s, s["w"] * table), constants=(table,))
    state, _ = step(a_state(), data(0))
    table.zero_()
    raises(fcg.BakedValueError, "a declared constant was written", lambda: step(state, data(0)))


@row("a list of tensors filled in the step", "raises")
def _() -> None:
    kept: list[Any] = []
    step = fcg.graph_step(lambda s, b: (s, kept.append(b["x"].sum())))
    raises(fcg.SideEffectError, "keeps a tensor of the step", lambda: step(a_state(), data(0)))


@row("a counter of Python counted up in the step", "raises")
def _() -> None:
    meters = {"calls": 0}

    def counts(state: Any, batch: Any) -> Any:
        meters["calls"] += 1
        return state, {}

    raises(fcg.SideEffectError, r'meters\["calls"\]', lambda: fcg.graph_step(counts)(a_state(), data(0)))


# -- documented -------------------------------------------------------------------------------------------------


@row("a list of Python numbers filled in the step", "documented")
def _() -> None:
    rows: list[int] = []

    def fills(state: Any, batch: Any) -> Any:
        rows.append(batch["x"].shape[0])
        return state, {}

    step, state = fcg.graph_step(fills), a_state()
    for n in range(4):
        state, _ = step(state, data(n))
    assert rows == [2, 2, 2]  # once for each trace: a step that changes something is traced three times


@row("``logging`` in the step speaks while tracing only", "documented")
def _() -> None:
    said: list[logging.LogRecord] = []
    log = logging.Logger("a step")
    log.addFilter(lambda record: bool(said.append(record)))

    def logs(state: Any, batch: Any) -> Any:
        log.info("rows: %d", batch["x"].shape[0])
        return state, {}

    step, state = fcg.graph_step(logs), a_state()
    for n in range(4):
        state, _ = step(state, data(n))
    assert len(said) == 3


@row("a file read in the step", "documented")
def _() -> None:
    def reads(state: Any, batch: Any) -> Any:
        return state, batch["x"].sum() * float(file.read_text())

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scale"
        file.write_text("2")
        step, checked = fcg.graph_step(reads), fcg.graph_step(reads, debug="verify")
        state, _ = step(a_state(), data(0))
        other, _ = checked(a_state(), data(0))
        file.write_text("3")
        assert step(state, data(0))[1] == 30.0  # the value of the trace, at every call
        raises(fcg.CaptureError, "replay differs from the eager run", lambda: checked(other, data(0)))


@row("a value reached by ``getattr`` with a computed name", "raises")
def _() -> None:
    class Config:
        rate = 2.0

    def reads(state: Any, batch: Any) -> Any:
        return state, batch["x"].sum() * getattr(Config, "".join(["ra", "te"]))

    step = fcg.graph_step(reads)
    state, _ = step(a_state(), data(0))
    Config.rate = 3.0
    raises(fcg.BakedValueError, "Config.rate  traced 2.0   now 3.0", lambda: step(state, data(0)))


@row("a Python number among the metrics is that of the trace", "documented")
def _() -> None:
    step, state = fcg.graph_step(lambda s, b: (s, {"rows": b["x"].shape[0], "rate": RATE})), a_state()
    for n in range(3):
        state, metrics = step(state, data(n))
        assert metrics == {"rows": 2, "rate": 0.5}


@row("metrics that are dicts come back as they were written", "impossible")
def _() -> None:
    step = fcg.graph_step(lambda s, b: (s, {"z": b["x"], "a": b["x"]}))
    assert list(step(a_state(), data(0))[1]) == list(step.eager(a_state(), data(0))[1]) == ["z", "a"]


@row("weight decay moves a parameter that the loss does not use", "documented")
def _() -> None:
    def step(state: Any, batch: Any) -> Any:
        grads = fcg.grad(lambda p: (p["used"] * batch["x"]).sum())(state.params)
        return state.apply_gradients(grads), grads

    state = fcg.TrainState.create(
        params={"used": torch.ones(3), "unused": torch.ones(3)},
        optimizer=fcg.optim.adamw(0.1, weight_decay=0.5),
    )
    state, grads = fcg.graph_step(step)(state, data(0))
    assert grads["unused"].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(state.params["unused"] + 0, torch.full((3,), 0.95))


# -- the table --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("surprise", ROWS)
def test_row(surprise: str) -> None:
    ROWS[surprise][1]()


def test_table_and_proofs_agree() -> None:
    lines = (__doc__ or "").split("\n=====")[1:]
    table = dict(
        re.findall(r"^(.+?)  +(raises|impossible|documented)$", "\n".join(lines), flags=re.MULTILINE)
    )
    assert table == {surprise: outcome for surprise, (outcome, _) in ROWS.items()}
