"""Record on a GPU what the second notebook shows on a CPU: ``python notebooks/record.py``.

Writes ``02_on_a_gpu.json`` beside the notebook, which draws it. Here the capture by hand is a real CUDA graph, made as
torch's notes advise: a warm-up on a side stream, and no gradients when the capture begins. Weights, batches and steps
are the notebook's.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from helpers.by_hand import (
    Usual,
    flat,
    losses_of_accumulation,
    new_model,
    noisy_sine,
)
from torch import Tensor

import functional_cg as fcg

COMMAND = "python notebooks/record.py"
RECORD = Path(__file__).resolve().with_name("02_on_a_gpu.json")
DEVICE = "cuda"
WARM_UPS = 3


def usual(**settings: Any) -> Usual:
    """Make the notebook's model and optimizer, on the GPU."""
    made = Usual(**settings)
    made.model.to(DEVICE)
    return made


def capture(model: torch.nn.Module, run: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Capture ``run`` by hand, and undo what the warm-up did to the model."""
    before = copy.deepcopy(model.state_dict())
    static_x, static_y = torch.zeros(32, 1, device=DEVICE), torch.zeros(32, 1, device=DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run(static_x, static_y)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()  # noqa: TID251
    with torch.cuda.graph(graph):  # noqa: TID251
        static_loss = run(static_x, static_y)
    model.load_state_dict(before)

    def replay(x: Tensor, y: Tensor, copy_in: Callable[..., object] = Tensor.copy_) -> Tensor:
        copy_in(static_x, x)
        copy_in(static_y, y)
        graph.replay()
        return static_loss

    return replay


class Recording:
    """The notebook's four comparisons, each a dict of numbers by run."""

    def __init__(self) -> None:
        self.x, self.y = (values.to(DEVICE) for values in noisy_sine(100, 32))
        self.apply, self.params, self.buffers = fcg.from_module(new_model().to(DEVICE))

    def loss_and_grads(self, params: Any, x: Tensor, y: Tensor, reduction: str = "mean") -> Any:
        def loss_fn(params: Any) -> Tensor:
            return F.mse_loss(self.apply(params, self.buffers, x)[0], y, reduction=reduction)

        return fcg.value_and_grad(loss_fn)(params)

    def step(self, reduction: str = "mean", **options: Any) -> Any:
        @fcg.graph_step(**options)
        def train_step(state: Any, x: Tensor, y: Tensor) -> Any:
            loss, grads = self.loss_and_grads(state.params, x, y, reduction)
            return state.apply_gradients(grads), loss

        return train_step

    def state(self, optimizer: Any, **options: Any) -> Any:
        return fcg.TrainState.create(params=self.params, optimizer=optimizer, **options)

    def kept_losses(self) -> dict[str, list[float]]:
        """Keep every loss, and read them at the end."""
        eager, hand, step = usual(), usual(), self.step()
        by_hand, state = capture(hand.model, hand.train), self.state(fcg.optim.sgd(0.1))
        kept: dict[str, list[Tensor]] = {"eager": [], "by hand": [], "graph_step": []}
        for x, y in zip(self.x, self.y, strict=True):
            kept["eager"].append(eager.train(x, y))
            kept["by hand"].append(by_hand(x, y))
            state, loss = step(state, x, y)
            kept["graph_step"].append(loss)
        return {name: [float(loss) for loss in losses] for name, losses in kept.items()}

    def accumulated(self) -> dict[str, list[float]]:
        """Add up the gradients of four batches for each update."""

        @fcg.graph_step
        def accumulate(state: Any, x: Tensor, y: Tensor) -> Any:
            loss, grads = self.loss_and_grads(state.params, x, y)
            total = fcg.tree.map(lambda total, g: total + g / 4, state.grads, grads)
            return state.replace(grads=total), loss

        @fcg.graph_step
        def update(state: Any) -> Any:
            zeros = fcg.tree.map(torch.zeros_like, state.grads)
            return state.apply_gradients(state.grads, grads=zeros), {}

        state = self.state(fcg.optim.sgd(0.1), accumulate=True)

        def add_ours(x: Tensor, y: Tensor) -> Tensor:
            nonlocal state
            state, loss = accumulate(state, x, y)
            return loss

        def update_ours() -> None:
            nonlocal state
            state, _ = update(state)

        eager, hand, zeroed = usual(), usual(), usual(set_to_none=False)
        ways = {
            "eager": (eager.backward, eager.update),
            "by hand, zero_grad()": (capture(hand.model, hand.backward), hand.update),
            "by hand, set_to_none=False": (capture(zeroed.model, zeroed.backward), zeroed.update),
            "graph_step": (add_ours, update_ours),
        }
        return {name: losses_of_accumulation(*way, self.x, self.y).tolist() for name, way in ways.items()}

    def moves(self) -> dict[str, list[float]]:
        """Lower the learning rate after 50 calls; how far do the weights move in each call?"""
        eager, hand, step = usual(), usual(), self.step()
        by_hand = capture(hand.model, hand.train)
        state = self.state(fcg.optim.inject_hyperparams(fcg.optim.sgd)(learning_rate=0.1))
        weights: dict[str, list[Tensor]] = {"eager": [], "by hand": [], "graph_step": []}
        for call, (x, y) in enumerate(zip(self.x, self.y, strict=True)):
            if call == 50:
                eager.sgd.param_groups[0]["lr"] = hand.sgd.param_groups[0]["lr"] = 0.001
                state = fcg.optim.set_hyperparams(state, learning_rate=0.001)
            eager.train(x, y)
            by_hand(x, y)
            state, _ = step(state, x, y)
            weights["eager"].append(flat(eager.model))
            weights["by hand"].append(flat(hand.model))
            weights["graph_step"].append(
                torch.cat([leaf.flatten() for leaf in fcg.tree.leaves(state.params)])
            )
        return {name: torch.stack(kept).diff(dim=0).norm(dim=1).tolist() for name, kept in weights.items()}

    def last_batch(self) -> dict[str, dict[str, float]]:
        """Train on ten batches of 32 points, then on the last 4, or the last one: the loss there."""

        def copy_first(static: Tensor, new: Tensor) -> None:
            static[: len(new)].copy_(new)

        def last_loss(train: Callable[..., Tensor], left: int, *copy_in: Callable[..., object]) -> float:
            for x, y in zip(self.x[:10], self.y[:10], strict=True):
                train(x, y)
            return float(train(self.x[10][:left], self.y[10][:left], *copy_in))

        def ours(left: int) -> float:
            state, step = self.state(fcg.optim.sgd(1e-3)), self.step("sum", max_captures=2)

            def train(x: Tensor, y: Tensor) -> Tensor:
                nonlocal state
                state, loss = step(state, x, y)
                return loss

            return last_loss(train, left)

        found = {}
        for left, copy_in in ((4, (copy_first,)), (1, ())):
            eager, hand = usual(lr=1e-3, reduction="sum"), usual(lr=1e-3, reduction="sum")
            wrong = last_loss(capture(hand.model, hand.train), left, *copy_in)
            right = last_loss(eager.train, left)
            found[f"points left: {left}"] = {"eager": right, "by hand": wrong, "graph_step": ours(left)}
        return found


def record() -> dict[str, Any]:
    """Run all four on this machine."""
    start, of = time.perf_counter(), Recording()
    parts = {}
    for part in (of.kept_losses, of.accumulated, of.moves, of.last_batch):
        parts[part.__name__] = part()
        print(f"{part.__name__}: after {time.perf_counter() - start:.0f} s", file=sys.stderr)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    return {"machine": machine, "date": datetime.now(UTC).date().isoformat(), "command": COMMAND, **parts}


def rounded(value: Any) -> Any:
    """Round every number of a record to five digits, which keeps its file small."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    text = json.dumps(rounded(record()))
    RECORD.write_text(text + "\n")
    print(text)
