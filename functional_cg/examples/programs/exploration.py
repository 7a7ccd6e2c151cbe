"""Explores a live training run: ``python -m functional_cg.examples.programs.exploration``.

A small network learns to tell two spirals apart. On the way: print inside the step, look at a weight, try two learning
rates side by side, continue after an exception in the loop, change the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg

Params = dict[str, Tensor]
State = fcg.TrainState[Params]
Batch = dict[str, Tensor]


def spirals(seed: int, count: int = 256) -> Iterator[Batch]:
    """Draw batches endlessly: points, f32[count, 2], and which of two arms each is on, f32[count]."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        radius = 0.1 + 0.9 * torch.rand(count, generator=generator)
        arm = torch.randint(2, (count,), generator=generator)
        angle = 9 * radius + torch.pi * arm
        x = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        yield {"x": x + 0.05 * torch.randn(count, 2, generator=generator), "y": arm.float()}


def unreliable(batches: Iterator[Batch], good: int) -> Iterator[Batch]:
    for _ in range(good):
        yield next(batches)
    raise ConnectionError("the data server went away")


def create_state(device: str = "cpu") -> State:
    first, second, third = fcg.random.split(fcg.random.key(0, device), 3)
    params = {
        "w1": fcg.random.normal(first, (2, 64), std=3.0),
        "b1": fcg.random.normal(first, (64,), stream=1),
        "w2": fcg.random.normal(second, (64, 64), std=0.125),
        "w3": fcg.random.normal(third, (64,), std=0.125),
    }
    optimizer = fcg.optim.inject_hyperparams(fcg.optim.adam)(learning_rate=0.1)
    return fcg.TrainState.create(params=params, optimizer=optimizer)


def loss_fn(params: Params, batch: Batch) -> Tensor:
    hidden = torch.tanh(batch["x"] @ params["w1"] + params["b1"])
    logits = torch.relu(hidden @ params["w2"]) @ params["w3"]
    return F.binary_cross_entropy_with_logits(logits, batch["y"])


@fcg.graph_fn
def evaluate(params: Params, batch: Batch) -> Tensor:
    return loss_fn(params, batch)


@fcg.graph_step(static_argnames=("verbose",), max_captures=2)  # another step for the second optimizer
def train_step(state: State, batch: Batch, *, verbose: bool = False) -> tuple[State, dict[str, Tensor]]:
    loss, grads = fcg.value_and_grad(loss_fn)(state.params, batch)
    if verbose:
        fcg.debug_print("  loss {:.3f}, gradient {:.3f}", loss, fcg.optim.global_norm(grads))
    return state.apply_gradients(grads), {"loss": loss}


def run(state: State, batches: Iterable[Batch], *, verbose: bool = False) -> State:
    for batch in batches:
        state, _ = train_step(state, batch, verbose=verbose)
    return state


def take(count: int, batches: Iterator[Batch]) -> list[Batch]:
    return [next(batches) for _ in range(count)]


def explore(device: str = "cpu") -> list[float]:
    """Run the exploration, and return the held-out losses in the order printed."""
    state, batches, held_out = create_state(device), spirals(seed=0), next(spirals(seed=1, count=2000))
    losses: list[float] = []

    def report(what: str, state: State) -> None:
        losses.append(float(evaluate(state.params, held_out)))
        print(f"{what:>22}: step {int(state.step)}, held-out loss {losses[-1]:.4f}")

    report("fresh", state)
    state = run(state, take(3, batches), verbose=True)
    state = run(state, take(200, batches))
    report("learning rate 0.1", state)

    w2 = state.params["w2"]  # a normal tensor for reading
    print(f"w2: std {w2.std():.2f}, histogram {torch.histc(w2, bins=9).long().tolist()}")

    twin = fcg.fork(state)
    state = fcg.optim.set_hyperparams(state, learning_rate=0.005)
    same = take(100, batches)
    state, twin = run(state, same), run(twin, same)
    report("still 0.1, in a fork", twin)
    report("lowered to 0.005", state)

    try:
        state = run(state, unreliable(batches, 60))
    except ConnectionError as error:
        state = state.latest()
        report(f"{error}", state)

    sgd = fcg.optim.sgd(0.1, momentum=0.9)
    state = fcg.TrainState.create(params=fcg.snapshot(state).params, optimizer=sgd)
    state = run(state, take(100, batches))
    report("SGD from there", state)
    return losses


if __name__ == "__main__":
    explore()
