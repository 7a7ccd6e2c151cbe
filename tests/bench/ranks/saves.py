"""How long a save stops training: ``torchrun --nproc_per_node=N -m tests.bench.ranks.saves FOLDER``.

Rounds of twenty steps with a save in the middle, less rounds without, for a state of the size of GPT-2 124M with AdamW.
The first save allocates pinned memory on the host, so it is told apart. ``torch.save``, and ``dcp.save`` and
``dcp.async_save`` of ``torch.distributed.checkpoint``, save what DDP trains.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel

import functional_cg as fcg
from functional_cg import sharding

from ..system import waiter
from .rounds import together

__all__ = ["main"]

LEARNING_RATE, WEIGHT_DECAY, STEPS, SAVES = 1e-3, 0.1, 10, 3


@dataclass(frozen=True)
class Saver:
    """A system.

    Attributes:
      step: Makes a step.
      save: Saves what was trained, or begins to.
      wait: Waits until it is written.
    """

    step: Callable[[], object]
    save: Callable[[], object]
    wait: Callable[[], object]


def _shapes(layers: int, width: int, vocab: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"tokens": (vocab, width), "places": (1024, width)}
    for i in range(layers):
        shapes |= {
            f"qkv{i}": (width, 3 * width), f"out{i}": (width, width), f"up{i}": (width, 4 * width),
            f"down{i}": (4 * width, width), f"norms{i}": (4, width),
        }  # fmt: skip
    return shapes


def _params(shapes: dict[str, tuple[int, ...]], device: torch.device) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape, device=device) * 0.02 for name, shape in shapes.items()}


def _loss(params: Any, x: Tensor) -> Tensor:
    """Read each element once: the steps take little time, and a save is not hidden behind them."""
    return torch.stack([(leaf * x).square().sum() for leaf in params]).sum()


@contextmanager
def _ours(shapes: Any, stage: Any, folder: Path) -> Iterator[Saver]:
    mesh = sharding.mesh({"data": -1})
    state = fcg.TrainState.create(
        params=_params(shapes, mesh.device),
        optimizer=fcg.optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        sharding=sharding.zero(mesh, stage=stage),
    )
    states, x = [state], torch.ones((), device=mesh.device)

    @fcg.graph_step(lowering="aten")
    def train_step(state: Any, x: Tensor) -> Any:
        loss_fn = lambda params: _loss(fcg.tree.leaves(params), x)  # noqa: E731
        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    def step() -> None:
        states[0], _ = train_step(states[0], x)

    saved = fcg.checkpoints(str(folder), keep=1)
    yield Saver(step, lambda: saved.save(states[0]), saved.wait)
    saved.close()
    train_step.close()


class _Model(nn.Module):
    def __init__(self, params: dict[str, Tensor]) -> None:
        super().__init__()
        self.leaves = nn.ParameterDict(params)

    def forward(self, x: Tensor) -> Tensor:
        return _loss(self.leaves.values(), x)


@contextmanager
def _of_torch(shapes: Any, how: str, folder: Path) -> Iterator[Saver]:
    mesh = sharding.mesh({"data": -1})
    model = DistributedDataParallel(_Model(_params(shapes, mesh.device)).to(mesh.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    x, numbers, pending = torch.ones((), device=mesh.device), count(), list[Any]()
    beside = dist.new_group(backend="gloo")  # a thread meets on it while the steps meet on the usual one

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def save() -> None:
        content = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        to = str(folder / str(next(numbers)))
        if how == "torch.save" and mesh.rank == 0:
            torch.save(content, to)
        if how == "dcp.save":
            dcp_save(content, checkpoint_id=to)
        if how == "dcp.async_save":
            found: Any = dcp_async_save(content, checkpoint_id=to, process_group=beside)
            pending.append(getattr(found, "upload_completion", found))

    def wait() -> None:
        while pending:
            pending.pop().result()

    yield Saver(step, save, wait)


def _stalls(saver: Saver, device: torch.device) -> list[float]:
    """Return by how many ms a save makes twenty steps longer, for each of several saves."""

    def seconds(*, save: bool) -> float:
        together(device)
        start = time.perf_counter()
        for _ in range(STEPS):
            saver.step()
        if save:
            saver.save()
        for _ in range(STEPS):
            saver.step()
        waiter(device)()
        return time.perf_counter() - start

    seconds(save=False)
    usual, found = min(seconds(save=False) for _ in range(3)), []
    for _ in range(SAVES):
        found.append((seconds(save=True) - usual) * 1e3)
        saver.wait()
        together(device)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; rank 0 prints a line for each way to save."""
    parser = argparse.ArgumentParser(prog="tests.bench.ranks.saves", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to save; it must not exist, and is left there")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=50304)
    options = parser.parse_args(arguments)
    mesh = sharding.mesh({"data": -1})
    if mesh.rank == 0:
        options.folder.mkdir(parents=True)
    together(mesh.device)
    shapes = _shapes(options.layers, options.width, options.vocab)
    systems = {f"ours-{stage}": partial(_ours, shapes, stage) for stage in (1, 2, 3)}
    systems |= {how: partial(_of_torch, shapes, how) for how in ("torch.save", "dcp.save", "dcp.async_save")}
    for name, made in systems.items():
        to = options.folder / name
        if mesh.rank == 0:
            to.mkdir()
        together(mesh.device)
        with made(to) as saver:
            first, *others = _stalls(saver, mesh.device)
        if mesh.rank == 0:
            sys.stdout.write(f"{name:<14} stall {statistics.median(others):.0f} ms, first {first:.0f} ms\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
