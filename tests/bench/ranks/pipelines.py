"""Times a pipeline on N GPUs: ``torchrun --nproc_per_node=N -m tests.bench.ranks.pipelines --size llama-1b``.

All systems train one model on one batch with AdamW and clipping, in bf16 with f32 masters: a small transformer, or one
like Llama (``--size``). The ranks are the stages of a pipeline, or of several of them (``--stages``). The systems:

- ``ours`` is compiled, ``ours-aten`` is not. Like the opponents, they cast weights in each micro-batch;
  ``ours-once`` and ``ours-once-aten`` do it once a step, by ``param_dtype=``.
- ``torch`` is ``torch.distributed.pipelining``'s 1F1B with one stage a rank; ``torch-compiled`` compiles its stages,
  ``torch-captured`` captures its step by hand. They clip by the norm of a rank's own gradients, which is less work than
  the norm of all; several pipelines average each gradient at the end of a step.
- ``alone`` makes the micro-batches of one pipeline on one GPU. After it, ours of the same kind are compared with its
  time, divided by the stages and by how busy the table keeps them at best.
- ``zero-1``, ``zero-2`` and ``zero-3`` give each rank a share of the rows, at once, and have no micro-batches.
- ``ours-evaluation`` computes the loss alone, forward through the stages, and ``alone-evaluation`` on one GPU.

Systems run one after the other, for each number of micro-batches; one that fails says why. Milliseconds are those of
the slowest rank: of a step, and until a call returns on the host, with an idle device before. Memory is that of the
rank with most: the allocator's peak, first call included; what is held between steps, the graph's memory included; and
for ``lowering="aten"`` what the program counts, with the largest difference of a rank between the two. Beside it stands
how many micro-batches the table has in flight on rank 0.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import functional_cg as fcg
from functional_cg import optim, sharding
from functional_cg.pipelines.schedules import forward_of
from tests.pipelines.model import run

from ..systems.by_hand import captured
from .jobs import SIZES, Job, cross_entropy
from .rounds import Times, held_gib, of_each_rank, peak_gib, timed, together, until_it_returns

__all__ = ["main"]

LEARNING_RATE, WEIGHT_DECAY, NORM = 1e-3, 0.1, 1.0

Step = Callable[[], Any]
System = tuple[Step, Callable[[], float]]  # a step, and the GiB that its program counts, or 0


def _optimizer() -> Any:
    return optim.chain(optim.clip_by_global_norm(NORM), optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY))


def _in_stages(job: Job, lowering: str, *, trains: bool = True, once: bool = False) -> System:
    mesh = sharding.mesh({"stage": job.stages, "data": -1})
    pipe = sharding.pipeline(mesh, schedule=job.schedule, microbatches=job.microbatches)
    loss_fn, params = job.loss_fn(pipe.cut), job.params()
    batch = job.batch(mesh.device, pipe.mesh.rank, pipe.mesh.size)
    low, sums = (torch.bfloat16, torch.float32) if once else (None, None)
    zero = pipe.zero(loss_fn, params, batch, param_dtype=low)
    state = fcg.TrainState.create(params=params, optimizer=_optimizer(), sharding=zero)
    if not trains:
        return _evaluating(state, batch, pipe.value(loss_fn), lowering)
    return _stepping(state, batch, pipe.value_and_grad(loss_fn, dtype=sums), lowering)


def _alone(job: Job, lowering: str, *, trains: bool = True) -> System:
    device = sharding.mesh({"data": -1}).device
    params = fcg.tree.map(lambda leaf: leaf.to(device), job.params())
    state = fcg.TrainState.create(params=params, optimizer=_optimizer())
    loss_fn, in_turn = job.loss_fn(lambda x: x), fcg.microbatches(job.microbatches)
    batch = job.batch(device, 0, job.copies)
    if not trains:
        return _evaluating(state, batch, in_turn(loss_fn), lowering)
    return _stepping(state, batch, in_turn(fcg.value_and_grad(loss_fn)), lowering, mean=lambda loss: loss)


def _sharded(job: Job, lowering: str, stage: Any) -> System:
    mesh = sharding.mesh({"data": -1})
    params = fcg.tree.map(lambda leaf: leaf.to(mesh.device), job.params())
    state = fcg.TrainState.create(
        params=params, optimizer=_optimizer(), sharding=sharding.zero(mesh, stage=stage)
    )
    batch = job.batch(mesh.device, mesh.rank, mesh.size)
    return _stepping(state, batch, fcg.value_and_grad(job.loss_fn(lambda x: x)), lowering)


def _stepping(state: Any, batch: Any, gradients: Any, lowering: Any, mean: Any = sharding.mean) -> System:
    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = gradients(state.params, batch)
        return state.apply_gradients(grads), {"loss": mean(loss)}

    states, step = [state], fcg.graph_step(train_step, lowering=lowering)

    def run() -> Any:
        states[0], metrics = step(states[0], batch)
        return metrics["loss"]

    return run, lambda: _counted(step, states[0], batch) if lowering == "aten" else 0.0


def _evaluating(state: Any, batch: Any, value: Any, lowering: Any) -> System:
    evaluate = fcg.graph_fn(lambda state, batch: value(state.params, batch), lowering=lowering)
    counted = partial(_counted, evaluate, state, batch)
    return lambda: evaluate(state, batch), counted if lowering == "aten" else lambda: 0.0


def _counted(step: Any, state: Any, batch: Any) -> float:
    """Return the GiB that a step takes by the calls of its program, in their order."""
    sizes = step.lower(state, batch).memory_analysis()
    return float(sizes["peak"] + sizes["metrics"]) / 2**30


class _Stage(nn.Module):
    """The blocks of one rank, for torch."""

    def __init__(self, job: Job, rank: int, device: torch.device) -> None:
        super().__init__()
        firsts, params = [*job.firsts(job.stages), job.shape.layers], job.params()
        self.job, self.first, self.last = job, rank == 0, rank == job.stages - 1

        def owned(leaf: Tensor) -> nn.Parameter:
            return nn.Parameter(leaf.to(device, copy=True))

        self.blocks = nn.ModuleList(
            nn.ParameterDict({name: owned(leaf) for name, leaf in params[f"h{i}"].items()})
            for i in range(firsts[rank], firsts[rank + 1])
        )
        self.embedding = owned(params["embedding"]) if self.first else None
        ends = ("norm", "head") if job.shape.llama else ("head",)
        self.ends = nn.ParameterDict({name: owned(params[name]) for name in ends} if self.last else {})
        self.turns = job.turns(device)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.job.embedded(self.embedding, x)
        for block in self.blocks:
            x = self.job.block(dict(block.items()), x, self.turns)  # type: ignore[operator]
        return self.job.logits(dict(self.ends.items()), x) if self.last else x


def _by_torch(job: Job, how: str) -> System:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    device = sharding.mesh({"data": -1}).device
    ranks = init_device_mesh(device.type, (job.stages, job.copies), mesh_dim_names=("stage", "data"))
    rank, copy = ranks.get_coordinate() or (0, 0)
    batch = job.batch(device, copy, job.copies)
    stage = _Stage(job, rank, device)
    optimizer = torch.optim.AdamW(
        stage.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True,
        capturable=how == "torch-captured",
    )  # fmt: skip
    if how == "torch-compiled":
        stage.compile()
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, job.stages, device, group=ranks.get_group("stage")),
        job.microbatches, loss_fn=cross_entropy,
    )  # fmt: skip
    beside = ranks.get_group("data")

    arguments: tuple[Tensor, ...] = (batch["x"],) if stage.first else ()
    losses: list[Tensor] = []
    options: dict[str, Any] = {"target": batch["y"], "losses": losses} if stage.last else {}

    def run() -> Tensor | None:
        losses.clear()
        schedule.step(*arguments, **options)
        if job.copies > 1:
            grads = [leaf.grad for leaf in stage.parameters() if leaf.grad is not None]
            for grad in grads:
                dist.all_reduce(grad, dist.ReduceOp.SUM, beside)
            torch._foreach_div_(grads, job.copies)
        nn.utils.clip_grad_norm_(stage.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    if how != "torch-captured":
        return run, lambda: 0.0
    # Threads of NCCL call CUDA meanwhile.
    graph, loss = captured(run, device, lambda: None, capture_error_mode="thread_local")
    held = (graph, run)  # a graph reads addresses: what the step reads must stay alive

    def replayed() -> Tensor | None:
        held[0].replay()
        return loss  # type: ignore[no-any-return]

    return replayed, lambda: 0.0


SYSTEMS: Mapping[str, Callable[[Job], System]] = MappingProxyType(
    {
        "ours": lambda job: _in_stages(job, "auto"),
        "ours-aten": lambda job: _in_stages(job, "aten"),
        "ours-once": lambda job: _in_stages(job, "auto", once=True),
        "ours-once-aten": lambda job: _in_stages(job, "aten", once=True),
        "torch": lambda job: _by_torch(job, "torch"),
        "torch-compiled": lambda job: _by_torch(job, "torch-compiled"),
        "torch-captured": lambda job: _by_torch(job, "torch-captured"),
        "alone": lambda job: _alone(job, "auto"),
        "alone-aten": lambda job: _alone(job, "aten"),
        "alone-evaluation": lambda job: _alone(job, "auto", trains=False),
        "alone-evaluation-aten": lambda job: _alone(job, "aten", trains=False),
        "ours-evaluation": lambda job: _in_stages(job, "auto", trains=False),
        "ours-evaluation-aten": lambda job: _in_stages(job, "aten", trains=False),
        "zero-1": lambda job: _sharded(job, "auto", 1),
        "zero-1-aten": lambda job: _sharded(job, "aten", 1),
        "zero-2": lambda job: _sharded(job, "auto", 2),
        "zero-2-aten": lambda job: _sharded(job, "aten", 2),
        "zero-3": lambda job: _sharded(job, "auto", 3),
        "zero-3-aten": lambda job: _sharded(job, "aten", 3),
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; rank 0 prints a line for each system."""
    options, began = _options(arguments), time.perf_counter()
    mesh = sharding.mesh({"data": -1})
    stages = options.stages or mesh.size
    given = {name: getattr(options, name) for name in ("layers", "width", "time", "vocab")}
    shape = replace(SIZES[options.size], **{name: value for name, value in given.items() if value})
    shape = replace(shape, wide=shape.wide * shape.width // SIZES[options.size].width)
    for microbatches in options.microbatches:
        job = Job(
            shape, stages, mesh.size // stages, options.rows, microbatches, options.schedule, options.per_rank
        )
        found: dict[str, Times] = {}
        for name in options.systems:
            if any(of_each_rank(time.perf_counter() - began > options.seconds)):
                break
            line = _line(name, job, mesh.device, options.steps, found)
            if mesh.rank == 0:
                sys.stdout.write(f"{name:<20} {microbatches:>3} micro-batches  {line}\n")
                sys.stdout.flush()
            gc.collect()
    return 0


def _line(name: str, job: Job, device: torch.device, steps: int, found: dict[str, Times]) -> str:
    try:
        found[name], line = _measured(SYSTEMS[name], job, device, steps)
    except Exception as error:  # of any system: the others are run
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return line + _of_the_best(job, name, found)


def _of_the_best(job: Job, name: str, found: Mapping[str, Times]) -> str:
    """Return how close one of our systems comes to what the table allows, by the time of the same on one GPU."""
    alone = found.get(name.replace("-once", "").replace("ours", "alone"))
    if alone is None or not name.startswith("ours"):
        return ""
    table = forward_of(job.table) if "evaluation" in name else job.table
    best = alone.median / (job.stages * run(table).efficiency(table))
    return f", {best / found[name].median:.3f} of the best, {best:.2f} ms"


def _measured(
    system: Callable[[Job], System], job: Job, device: torch.device, steps: int
) -> tuple[Times, str]:
    before, start = held_gib(device), time.perf_counter()
    step, counted = system(job)
    peak_gib(device)
    built = time.perf_counter() - start
    loss = step()
    together(device)
    first = time.perf_counter() - start - built
    times, returns = timed(step, device, steps), until_it_returns(step, device, steps)
    known = -1.0 if loss is None else float(loss)
    mine = (peak_gib(device) - before, held_gib(device) - before, counted(), known)
    peaks, helds, counts, losses = zip(*of_each_rank(mine), strict=True)
    memory = f"peak {max(peaks):.2f} held {max(helds):.2f}"
    if all(counts) and device.type == "cuda":
        apart = [held / count - 1 for held, count in zip(helds, counts, strict=True)]
        memory += f" counted {max(counts):.2f} ({max(apart, key=abs):+.1%})"
    in_flight = run(job.table).in_flight[0]
    return times, (
        f"{times}  returns {returns:.3f} ms  built {built:.1f} first {first:.2f} s  {memory} GiB, "
        f"{in_flight} in flight  "
        f"loss {max(losses):.4f}"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests.bench.ranks.pipelines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=float("inf"), help="after which no system begins any more")
    add("--size", choices=[*SIZES], default="small", help="of the model; small by default")
    add("--systems", type=_names, default=[*SYSTEMS], help=f"of {','.join(SYSTEMS)}")
    add("--schedule", default="1f1b", help="of our pipelines")
    add("--stages", type=int, default=0, help="ranks of a pipeline; by default all")
    for name, what in (
        ("layers", "blocks"), ("width", "of the residual stream"), ("time", "tokens of a row"),
        ("vocab", "tokens known"),
    ):  # fmt: skip
        add(f"--{name}", type=int, help=f"{what}; by default that of the size")
    for name, default, what in (
        ("rows", 1, "of a micro-batch"), ("per-rank", 1, "stages of a rank"), ("steps", 10, "of each of five rounds"),
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
