"""What a type checker sees of functional_cg: read by mypy (``test_typing.py``), never run.

To a type checker a handle *is* the state, and a step has the signature of the function it came from. A line
with ``type: ignore`` is a mistake that has to be found: mypy reports an ignore that hides nothing.
"""

from __future__ import annotations

from typing import Any, TypedDict, assert_type

import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.prefetch import Prefetched

Params = dict[str, Tensor]
Metrics = dict[str, Tensor]
State = fcg.TrainState[Params]


class Batch(TypedDict):
    """One batch of a regression."""

    x: Tensor
    y: Tensor


def loss_fn(params: Params, batch: Batch) -> Tensor:
    return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()


def step_fn(state: State, batch: Batch) -> tuple[State, Metrics]:
    loss, grads = fcg.value_and_grad(loss_fn)(state.params, batch)
    assert_type(loss, Tensor)
    return state.apply_gradients(grads), {"loss": loss}


def takes_any_state(state: fcg.TrainState) -> int:
    return int(state.step)


params: Params = {"w": torch.zeros(3, 1)}
batch: Batch = {"x": torch.zeros(8, 3), "y": torch.zeros(8, 1)}


def check_the_state() -> None:
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
    assert_type(state.params["w"], Tensor)
    assert_type(state.step, Tensor)
    assert_type(state.key, Tensor | Any)
    state.key.no_such_method()  # type: ignore[union-attr]
    takes_any_state(state)
    # Copies keep the type.
    assert_type(fcg.snapshot(state).params["w"], Tensor)
    assert_type(fcg.fork(state).params["w"], Tensor)
    assert_type(fcg.place(params), Params)
    state.params = params  # type: ignore[misc]


def check_a_step() -> None:
    state: State = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
    train_step = fcg.graph_step(step_fn)
    assert_type(train_step(state, batch), tuple[State, Metrics])
    state, metrics = train_step(state, batch)
    assert_type(metrics["loss"], Tensor)
    assert_type(train_step.eager(state, batch), tuple[State, Metrics])
    takes_any_state(state)
    train_step(batch, state)  # type: ignore[arg-type]
    train_step(state)  # type: ignore[call-arg]
    train_step(state, batch, 1)  # type: ignore[call-arg]
    with train_step as step:
        assert_type(step(state, batch), tuple[State, Metrics])
    train_step.close()


def check_a_loop_that_draws() -> None:
    @fcg.graph_step
    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        key = fcg.random.fold_in(state.key, state.step)
        assert_type(key, Tensor)

        def loss_fn(params: Params) -> Tensor:
            hidden = fcg.random.dropout(key, torch.relu(batch["x"] @ params["w"]), 0.1)
            return (hidden - batch["y"]).square().mean()

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    optimizer = fcg.optim.adamw(fcg.optim.warmup_cosine(1e-2, 20, 300), weight_decay=0.01)
    state: State = fcg.TrainState.create(params=params, optimizer=optimizer, key=fcg.random.key(0))
    for _ in range(3):
        state, metrics = train_step(state, batch)
        assert_type(metrics["loss"].item(), bool | int | float)


def check_a_step_with_options() -> None:
    @fcg.graph_step(max_captures=2)
    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        return step_fn(state, batch)

    @fcg.graph_step(static_argnames=("flip",), constants=(params["w"],))
    def with_static(state: State, batch: Batch, *, flip: bool = False) -> tuple[State, Metrics]:
        return step_fn(state, batch)

    state: State = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
    assert_type(train_step(state, batch), tuple[State, Metrics])
    assert_type(with_static(state, batch, flip=True), tuple[State, Metrics])
    with_static(state, batch, flip="yes")  # type: ignore[arg-type]
    fcg.graph_step(step_fn, max_capture=2)  # type: ignore[call-overload]


def check_a_step_of_any_pytree() -> None:
    def swap(state: tuple[Tensor, Tensor], scale: float) -> tuple[tuple[Tensor, Tensor], Tensor]:
        return (state[1], state[0] * scale), state[0].sum()

    step = fcg.graph_step(swap)
    assert_type(step((params["w"], params["w"]), 0.5), tuple[tuple[Tensor, Tensor], Tensor])


def check_a_reader() -> None:
    def evaluate(state: State, batch: Batch) -> Tensor:
        return loss_fn(state.params, batch)

    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
    assert_type(fcg.graph_fn(evaluate)(state, batch), Tensor)
    fcg.graph_fn(evaluate)(batch, state)  # type: ignore[arg-type]

    @fcg.graph_fn(max_captures=3)
    def predict(params: Params, x: Tensor) -> dict[str, Tensor]:
        return {"logits": x @ params["w"]}

    assert_type(predict(params, batch["x"]), dict[str, Tensor])
    assert_type(predict(state.params, batch["x"]), dict[str, Tensor])


class Trainer:
    """Steps as attributes and as methods."""

    def __init__(self) -> None:
        self.step = fcg.graph_step(step_fn)
        self.state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))

    @fcg.graph_step
    def method(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        return step_fn(state, batch)

    @fcg.graph_step(max_captures=2)
    def method_with_options(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        return step_fn(state, batch)

    @fcg.graph_fn
    def evaluate(self, state: State, batch: Batch) -> Tensor:
        return loss_fn(state.params, batch)

    def run(self) -> None:
        self.state, metrics = self.step(self.state, batch)
        assert_type(metrics, Metrics)
        assert_type(self.method(self.state, batch), tuple[State, Metrics])
        assert_type(self.method_with_options(self.state, batch), tuple[State, Metrics])
        assert_type(self.evaluate(self.state, batch), Tensor)
        self.method(batch)  # type: ignore[arg-type, call-arg]
        self.method.close()


class EMAState(fcg.TrainState[Params]):
    """A state with one field more."""

    ema: Params


def check_a_subclass() -> None:
    def ema_step(state: EMAState, batch: Batch) -> tuple[EMAState, Metrics]:
        loss, grads = fcg.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads, ema=state.params), {"loss": loss}

    state = EMAState.create(params=params, ema=params, optimizer=fcg.optim.sgd(0.1))
    assert_type(state, EMAState)
    state, _ = fcg.graph_step(ema_step)(state, batch)
    assert_type(state, EMAState)
    assert_type(state.ema["w"], Tensor)
    takes_any_state(state)


def check_gradients() -> None:
    def with_aux(params: Params, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        return loss_fn(params, batch), {"n": 1}

    assert_type(fcg.value_and_grad(loss_fn)(params, batch), tuple[Tensor, Params])
    assert_type(
        fcg.value_and_grad(with_aux, has_aux=True)(params, batch),
        tuple[tuple[Tensor, dict[str, Any]], Params],
    )
    assert_type(fcg.grad(loss_fn)(params, batch), Params)
    assert_type(fcg.microbatches(4)(fcg.value_and_grad(loss_fn))(params, batch), tuple[Tensor, Params])


def check_prefetch() -> None:
    batches: list[Batch] = [batch]
    assert_type(iter(fcg.prefetch(batches, fcg.graph_step(step_fn))), Prefetched[Batch])
    fcg.prefetch(batches, step_fn)  # type: ignore[arg-type]


def check_pack() -> None:
    rows = [torch.tensor([5, 6, 7])]
    assert_type(fcg.pack(rows, capacity=4, max_sequences=2), dict[str, Tensor])
    fcg.pack(rows)  # type: ignore[call-arg]


def check_record(state: State) -> None:
    train = fcg.record(fcg.graph_step(step_fn))
    assert_type(train(state, batch), tuple[State, dict[str, Tensor]])
    train(state)  # type: ignore[call-arg]
    fcg.record(step_fn)  # type: ignore[arg-type]


def check_statistics(state: State) -> None:
    step = fcg.graph_step(fcg.statistics(step_fn, keep=3))
    assert_type(step(state, batch), tuple[State, dict[str, Tensor]])
    assert_type(step.statistics("rms"), Tensor)
    fcg.alarm("high", 3)  # type: ignore[arg-type]


def check_costs(state: State) -> None:
    lowered = fcg.graph_step(step_fn).lower(state, batch)
    assert_type(lowered.cost_analysis().flops, int)
    assert_type(lowered.capture().cost_analysis(0.1).distance, float | None)
    assert_type(lowered.memory_analysis()["peak"], int)
    profile = fcg.graph_step(step_fn).profile(state, batch)
    assert_type(profile.by_module()[0].backward_s, float)
    fcg.graph_step(step_fn).profile(batch, state)  # type: ignore[arg-type]
    hidden, targets = batch["x"], batch["y"].long()[:, 0]
    assert_type(fcg.nn.linear_cross_entropy(hidden, params["w"], targets, reduction="sum"), Tensor)
    fcg.nn.linear_cross_entropy(hidden, params["w"], targets, reduction="average")  # type: ignore[arg-type]


def parts_of_checkpoints(state: State, model: torch.nn.Linear, folder: str) -> None:
    assert_type(fcg.load(folder, state, part=["params", "buffers"]), State)
    assert_type(fcg.load(folder, state, part={"params": "ema", "params.head": None}), State)
    assert_type(fcg.load(folder, model, part="params", cast=True), torch.nn.Linear)
    assert_type(fcg.checkpoints(folder).load(state, step=3, part="params"), State)
    fcg.load(folder, state, part=3)  # type: ignore[arg-type]
    fcg.microbatches(4, reduce="tokens")  # type: ignore[arg-type]
