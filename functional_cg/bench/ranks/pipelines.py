"""Times a pipeline on N GPUs: ``torchrun --nproc_per_node=N -m functional_cg.bench.ranks.pipelines``.

All systems train one model on one batch with AdamW and clipping: an embedding, blocks of a transformer, and a head, in
bf16 with f32 masters. ``torch`` is ``torch.distributed.pipelining``'s 1F1B with one stage a rank; ``torch-compiled``
compiles its stages, and ``torch-captured`` captures its step by hand. They clip by the norm of a rank's own gradients,
which is less work than the norm of all. ``alone`` makes the micro-batches on one GPU; ``zero`` gives each rank a share
of the rows and has no micro-batches. Systems run one after the other, for each number of micro-batches; milliseconds
are those of the slowest rank: of a step, and until a call returns on the host, with an idle device before. Beside the
peak memory of rank 0 stands how many micro-batches the table has in flight there: if it is the same for two numbers of
micro-batches, so should the peak be, up to the inputs. ``ours-evaluation`` computes the loss alone, forward through
the stages, and ``alone-evaluation`` on one GPU. After a system that runs alone, ours of the same kind are compared with
its time, divided by the ranks and by how busy the table keeps them at best.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg import optim, sharding
from functional_cg.pipelines.actions import Table
from functional_cg.pipelines.model import run
from functional_cg.pipelines.schedules import forward_of, table_of

from ..systems.by_hand import captured
from .rounds import Times, peak_gib, timed, together, until_it_returns

__all__ = ["main"]

LEARNING_RATE, WEIGHT_DECAY, NORM, HEADS = 1e-3, 0.1, 1.0, 8

Step = Callable[[], object]


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
      ranks: Ranks of the pipeline.
      layers: Blocks.
      width: Of the residual stream.
      rows: Of a micro-batch.
      time: Tokens of a row.
      microbatches: Of a step.
      vocab: Rows of the embedding.
      schedule: Of our pipelines.
      per_rank: Stages of a rank.
    """

    ranks: int
    layers: int
    width: int
    rows: int
    time: int
    microbatches: int
    vocab: int
    schedule: str
    per_rank: int

    @property
    def table(self) -> Table:
        """What our pipelines do."""
        return table_of(self.schedule, self.ranks, self.microbatches, self.ranks * self.per_rank)

    def params(self) -> dict[str, Any]:
        """Draw f32 parameters on the CPU, the same on each rank."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * 0.02

        w = self.width
        blocks = {
            f"h{i}": {
                "qkv": normal(w, 3 * w),
                "out": normal(w, w),
                "up": normal(w, 4 * w),
                "down": normal(4 * w, w),
            }
            for i in range(self.layers)
        }
        return {"embedding": normal(self.vocab, w), "head": normal(w, self.vocab), **blocks}

    def batch(self, device: torch.device, share: int = 1) -> dict[str, Tensor]:
        """Draw tokens and targets i64[rows, time], or one of ``share`` parts of them."""
        rows = self.rows * self.microbatches // share
        tokens = torch.randint(self.vocab, (rows, self.time + 1), generator=torch.Generator().manual_seed(1))
        return {"x": tokens[:, :-1].to(device).contiguous(), "y": tokens[:, 1:].to(device).contiguous()}

    def loss_fn(self, cut: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        """Return the loss, with a cut before the first block of each stage but the first."""
        stages = self.ranks * self.per_rank
        firsts = {self.layers * stage // stages for stage in range(1, stages)}

        def loss_fn(params: Any, batch: Any, *, key: Any = None) -> Tensor:
            x = params["embedding"][batch["x"]].bfloat16()
            for i in range(self.layers):
                x = _block(params[f"h{i}"], cut(x) if i in firsts else x)
            logits = x @ params["head"].to(x.dtype)
            return F.cross_entropy(logits.flatten(0, 1).float(), batch["y"].flatten())

        return loss_fn


def _block(params: Any, x: Tensor) -> Tensor:
    rows, time_, width = x.shape
    qkv = F.layer_norm(x, (width,)) @ params["qkv"].to(x.dtype)
    q, k, v = qkv.view(rows, time_, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
    attended = (
        F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, time_, width)
    )
    x = x + attended @ params["out"].to(x.dtype)
    wide = F.layer_norm(x, (width,)) @ params["up"].to(x.dtype)
    out: Tensor = x + F.gelu(wide) @ params["down"].to(x.dtype)
    return out


def _optimizer() -> Any:
    return optim.chain(optim.clip_by_global_norm(NORM), optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY))


def _in_stages(job: Job, lowering: str, *, trains: bool = True) -> Step:
    mesh = sharding.mesh({"stage": job.ranks, "data": 1})
    pipe = sharding.pipeline(mesh, schedule=job.schedule, microbatches=job.microbatches)
    loss_fn, params, batch = job.loss_fn(pipe.cut), job.params(), job.batch(mesh.device)
    state = fcg.TrainState.create(
        params=params, optimizer=_optimizer(), sharding=pipe.zero(loss_fn, params, batch)
    )
    if not trains:
        return _evaluating(state, batch, pipe.value(loss_fn), lowering)
    return _stepping(state, batch, pipe.value_and_grad(loss_fn), lowering)


def _alone(job: Job, lowering: str, *, trains: bool = True) -> Step:
    device = sharding.mesh({"data": -1}).device
    params = fcg.tree.map(lambda leaf: leaf.to(device), job.params())
    state = fcg.TrainState.create(params=params, optimizer=_optimizer())
    loss_fn, in_turn = job.loss_fn(lambda x: x), fcg.microbatches(job.microbatches)
    if not trains:
        return _evaluating(state, job.batch(device), in_turn(loss_fn), lowering)
    return _stepping(state, job.batch(device), in_turn(fcg.value_and_grad(loss_fn)), lowering)


def _sharded(job: Job, lowering: str) -> Step:
    mesh = sharding.mesh({"data": -1})
    params = fcg.tree.map(lambda leaf: leaf.to(mesh.device), job.params())
    state = fcg.TrainState.create(
        params=params, optimizer=_optimizer(), sharding=sharding.zero(mesh, stage=2)
    )
    batch = job.batch(mesh.device, mesh.size)
    return _stepping(state, batch, fcg.value_and_grad(job.loss_fn(lambda x: x)), lowering)


def _stepping(state: Any, batch: Any, gradients: Any, lowering: Any) -> Step:
    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = gradients(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    states, step = [state], fcg.graph_step(train_step, lowering=lowering)

    def run() -> Any:
        states[0], metrics = step(states[0], batch)
        return metrics

    return run


def _evaluating(state: Any, batch: Any, value: Any, lowering: Any) -> Step:
    evaluate = fcg.graph_fn(lambda state, batch: value(state.params, batch), lowering=lowering)
    return lambda: evaluate(state, batch)


class _Stage(nn.Module):
    """The blocks of one rank, for torch."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__()
        bounds = [job.layers * stage // job.ranks for stage in range(job.ranks + 1)]
        params = job.params()
        self.first, self.last = rank == 0, rank == job.ranks - 1
        self.names = [f"h{i}" for i in range(bounds[rank], bounds[rank + 1])]
        self.blocks = nn.ParameterDict(
            {f"{name}_{key}": nn.Parameter(leaf) for name in self.names for key, leaf in params[name].items()}
        )
        self.embedding = nn.Parameter(params["embedding"]) if self.first else None
        self.head = nn.Parameter(params["head"]) if self.last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding[x].bfloat16()
        for name in self.names:
            x = _block({key: self.blocks[f"{name}_{key}"] for key in ("qkv", "out", "up", "down")}, x)
        return x if self.head is None else x @ self.head.to(x.dtype)


def _by_torch(job: Job, how: str) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = sharding.mesh({"data": -1})
    device, batch = mesh.device, job.batch(mesh.device)
    stage = _Stage(job, mesh.rank).to(device)
    optimizer = torch.optim.AdamW(
        stage.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True,
        capturable=how == "torch-captured",
    )  # fmt: skip
    if how == "torch-compiled":
        stage.compile()
    schedule = Schedule1F1B(
        PipelineStage(stage, mesh.rank, job.ranks, device), job.microbatches,
        loss_fn=lambda out, y: F.cross_entropy(out.flatten(0, 1).float(), y.flatten()),
    )  # fmt: skip

    arguments: tuple[Tensor, ...] = (batch["x"],) if stage.first else ()
    options: dict[str, Any] = {"target": batch["y"]} if stage.last else {}

    def run() -> None:
        schedule.step(*arguments, **options)
        nn.utils.clip_grad_norm_(stage.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()

    if how != "torch-captured":
        return run
    # Threads of NCCL call CUDA meanwhile.
    graph, _ = captured(run, device, lambda: None, capture_error_mode="thread_local")
    held = (graph, run)  # a graph reads addresses: what the step reads must stay alive
    return lambda: held[0].replay()


SYSTEMS: Mapping[str, Callable[[Job], Step]] = MappingProxyType(
    {
        "ours": lambda job: _in_stages(job, "auto"),
        "ours-aten": lambda job: _in_stages(job, "aten"),
        "torch": lambda job: _by_torch(job, "torch"),
        "torch-compiled": lambda job: _by_torch(job, "torch-compiled"),
        "torch-captured": lambda job: _by_torch(job, "torch-captured"),
        "alone": lambda job: _alone(job, "auto"),
        "alone-aten": lambda job: _alone(job, "aten"),
        "alone-evaluation": lambda job: _alone(job, "auto", trains=False),
        "alone-evaluation-aten": lambda job: _alone(job, "aten", trains=False),
        "ours-evaluation": lambda job: _in_stages(job, "auto", trains=False),
        "ours-evaluation-aten": lambda job: _in_stages(job, "aten", trains=False),
        "zero": lambda job: _sharded(job, "auto"),
        "zero-aten": lambda job: _sharded(job, "aten"),
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; rank 0 prints a line for each system."""
    options = _options(arguments)
    mesh = sharding.mesh({"data": -1})
    for microbatches in options.microbatches:
        job = Job(
            mesh.size, options.layers, options.width, options.rows, options.time, microbatches,
            options.vocab, options.schedule, options.per_rank,
        )  # fmt: skip
        found: dict[str, Times] = {}
        for name in options.systems:
            found[name], line = _measured(SYSTEMS[name], job, mesh.device, options.steps)
            if mesh.rank == 0:
                sys.stdout.write(f"{name:<20} {line}{_of_the_best(job, name, found)}\n")
                sys.stdout.flush()
            gc.collect()
    return 0


def _of_the_best(job: Job, name: str, found: Mapping[str, Times]) -> str:
    """Return how close one of our systems comes to what the table allows, by the time of the same on one GPU."""
    alone = found.get(name.replace("ours", "alone"))
    if alone is None or not name.startswith("ours"):
        return ""
    table = forward_of(job.table) if "evaluation" in name else job.table
    best = alone.median / (job.ranks * run(table).efficiency(table))
    return f", {best / found[name].median:.3f} of the best, {best:.2f} ms"


def _measured(system: Callable[[Job], Step], job: Job, device: torch.device, steps: int) -> tuple[Times, str]:
    peak_gib(device)
    start = time.perf_counter()
    step = system(job)
    step()
    together(device)
    first = time.perf_counter() - start
    times, returns = timed(step, device, steps), until_it_returns(step, device, steps)
    in_flight = run(job.table).in_flight[0]
    return times, (
        f"{job.microbatches:>3} micro-batches  {times}  returns after {returns:.2f} ms  first {first:.1f} s  "
        f"peak {peak_gib(device):.2f} GiB on rank 0, {in_flight} in flight by the table"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="functional_cg.bench.ranks.pipelines", description=__doc__)
    add = parser.add_argument
    add("--systems", type=_names, default=[*SYSTEMS], help=f"of {','.join(SYSTEMS)}")
    add("--schedule", default="1f1b", help="of our pipelines")
    for name, default, what in (
        ("layers", 8, "blocks"), ("width", 1024, "of the residual stream"), ("rows", 1, "of a micro-batch"),
        ("time", 256, "tokens of a row"), ("vocab", 4096, "tokens known"), ("per-rank", 1, "stages of a rank"),
        ("steps", 10, "of each of five rounds"),
    ):  # fmt: skip
        add(f"--{name}", type=int, default=default, help=f"{what}; {default} by default")
    add("--microbatches", type=_counts, default=[8], help="of a step, such as 8,32; 8 by default")
    return parser.parse_args(arguments)


def _counts(text: str) -> list[int]:
    return list(map(int, text.split(",")))


def _names(text: str) -> Iterable[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(SYSTEMS):
        raise argparse.ArgumentTypeError(f"no system {min(unknown)!r}; known are {', '.join(SYSTEMS)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
