"""A long run that is interrupted and goes on: ``python -m functional_cg.examples.long_run FOLDER``.

The same command goes on from the last checkpoint, and ends bitwise where an uninterrupted run does. SIGTERM (Slurm, a
spot machine) and Ctrl-C finish the step, save, and exit with 0. Several ranks start again by themselves if one is lost:
``torchrun --nproc_per_node=2 --max-restarts=3 -m functional_cg.examples.long_run FOLDER``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import functional_cg as fcg

STEPS, EVERY, AGREE_EVERY = 2000, 100, 10  # in all; between checkpoints; between agreements of ranks to stop


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed))
    return x, x.prod(dim=1)


def batches(step: int, mesh: fcg.sharding.Mesh) -> Any:  # the step is the position in the data, for any ranks
    for seed in range(step, STEPS):
        yield tuple(whole.chunk(mesh.size)[mesh.rank] for whole in points(256, seed))


def create_state(mesh: fcg.sharding.Mesh) -> Any:
    key, zero = fcg.random.key(0, mesh.device), fcg.sharding.zero(mesh, stage=3)
    normal, zeros = fcg.random.normal, torch.zeros(64, device=mesh.device)
    params = {"w1": normal(key, (2, 64)), "b1": zeros, "w2": normal(key, (64,), std=0.1, stream=1)}
    return fcg.TrainState.create(params=params, optimizer=fcg.optim.adam(1e-3), key=key, sharding=zero)


@fcg.graph_step
def train_step(state: Any, batch: tuple[Tensor, ...]) -> Any:
    def loss_fn(params: Any) -> Tensor:
        hidden = torch.tanh(batch[0] @ params["w1"] + params["b1"])
        return F.mse_loss(fcg.random.dropout(key, hidden, 0.1) @ params["w2"], batch[1])

    key = fcg.sharding.fold_in(fcg.random.fold_in(state.key, state.step))
    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": fcg.sharding.mean(loss)}


@fcg.graph_fn
def evaluate(state: Any, x: Tensor, y: Tensor) -> Tensor:
    params = fcg.sharding.gather(state.params)
    return F.mse_loss(torch.tanh(x @ params["w1"] + params["b1"]) @ params["w2"], y)


def to_stop(signals: list[int], step: int, ranks: int) -> bool:  # the same on all ranks
    if ranks == 1 or step % AGREE_EVERY:
        return ranks == 1 and bool(signals)
    said = [False] * ranks
    torch.distributed.all_gather_object(said, bool(signals))
    return any(said)


def main(folder: Path) -> Any:
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    folder.mkdir(parents=True, exist_ok=True)
    mesh, log, new = fcg.sharding.mesh({"data": -1}), folder / "log.txt", folder / "log.new"
    state, held_out = create_state(mesh), points(1000, seed=STEPS)
    with fcg.checkpoints(folder, keep=2) as saved:
        if saved.steps():
            state = saved.load(state)
        step = first = int(state.step)
        lines = log.read_text().splitlines()[: first // EVERY] if log.exists() else []  # none of lost steps
        bar = tqdm(total=STEPS, initial=first, disable=mesh.rank > 0)
        for step, batch in enumerate(fcg.prefetch(batches(first, mesh), train_step), first + 1):
            state, metrics = train_step(state, batch)
            bar.update()
            if step % EVERY == 0:
                loss, error = float(metrics["loss"]), float(evaluate(state, *held_out))
                lines.append(f"step {step}: loss {loss:.6f}, {error:.6f} on what is held out")
                bar.set_postfix_str(lines[-1])
                if mesh.rank == 0:
                    new.write_text("\n".join(lines))
                    os.replace(new, log)
                saved.save(state)
            if to_stop(signals, step, mesh.size):
                break
        if step % EVERY:
            saved.save(state)
    return state


if __name__ == "__main__":
    main(Path(sys.argv[1]))
