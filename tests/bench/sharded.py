"""Times ours, DDP and FSDP2 on N GPUs: ``torchrun --nproc_per_node=N -m tests.bench.sharded``.

All systems train the same module with AdamW, from the same values and on the same batches, which differ between ranks.
They run one after the other in one job. Milliseconds per step are medians of blocks on the slowest rank. Peak memory is
the allocator's, from the first step on and, separately, while the model is built. *Exposed* is the time in collectives
that do not overlap with another kernel; *compute* is the time in other kernels. ``ours-3-kept`` keeps gathered
parameters for the backward (``reshard=False``); ``ddp-compile-views`` has gradients as views of DDP's buckets.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import functional_cg as fcg

from .models import Config, LanguageModel, config, names
from .ranks.rounds import ROUNDS, timed

__all__ = ["BLOCKS", "LEARNING_RATE", "WARM_UPS", "WEIGHT_DECAY", "batches_of", "main"]

SYSTEMS = (
    "ddp-compile", "ddp-compile-views", "fsdp2-compile", "ours-1", "ours-2", "ours-3", "ours-3-kept",
)  # fmt: skip
BLOCKS, WARM_UPS = ROUNDS, 6
LEARNING_RATE, WEIGHT_DECAY = 3e-4, 0.1
_GIB = 2**30

Step = Callable[[tuple[Tensor, Tensor]], Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; rank 0 prints a table, and a JSON line per system with ``--json``."""
    options = _options(arguments)
    mesh = fcg.sharding.mesh({"data": -1}, device=options.device)
    c = config(options.model)
    batches = [tuple(part.to(mesh.device) for part in batch) for batch in batches_of(c, mesh.rank)]
    rows = []
    for name in options.systems.split(","):
        if name not in SYSTEMS:
            raise SystemExit(f"tests.bench.sharded: no system {name!r}; known are {', '.join(SYSTEMS)}")
        row = _measured(name, c, mesh, batches, options)
        rows.append(row)
        if mesh.rank == 0:
            _write(json.dumps(row) if options.json else _line(row, rows[0]))
    _refuse_different_losses(rows)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.bench.sharded", description=__doc__)
    parser.add_argument("--model", choices=names(), default="gpt2-124m")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="names, with commas in between")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each system")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=None)
    parser.add_argument("--lowering", choices=("auto", "aten", "inductor"), default="auto")
    parser.add_argument("--branches", default="1", help="of graph_step: auto, or a number of lanes")
    parser.add_argument("--bucket-mib", type=float, default=32.0, help="bucket_bytes of zero()")
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def batches_of(c: Config, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Draw the batches of one rank on the CPU: tokens and targets i64[batch, time]."""
    generator = torch.Generator().manual_seed(1 + rank)
    tokens = torch.randint(c.vocab, (8, c.batch, c.time + 1), generator=generator)
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in tokens]


def _measured(name: str, c: Config, mesh: Any, batches: Any, options: argparse.Namespace) -> dict[str, Any]:
    _free(mesh.device)
    left = _allocated(mesh.device)  # from the previous system: cuBLAS workspaces
    start = time.perf_counter()
    step, close = _build(name, c, mesh, options)
    create_peak = _peak(mesh.device) - left
    _free(mesh.device)
    losses = [float(step(batches[i % len(batches)])) for i in range(WARM_UPS)]
    first = time.perf_counter() - start
    turns, length = itertools.cycle(batches), max(1, options.steps // BLOCKS)
    times = timed(lambda: step(next(turns)), mesh.device, length, warm_ups=0).rounds
    row = {
        "system": name, "model": c.name, "ranks": mesh.size, "ms": statistics.median(times), "ms_min": min(times),
        "ms_max": max(times), "tokens_per_s": c.batch * c.time * mesh.size / statistics.median(times) * 1e3,
        "first_s": first, "losses": losses, "torch": torch.__version__,
    }  # fmt: skip
    if mesh.device.type == "cuda":
        row |= {
            "device": torch.cuda.get_device_name(mesh.device),
            "peak_gib": _peak(mesh.device) - left,
            "create_peak_gib": create_peak,
            "reserved_gib": torch.cuda.max_memory_reserved(mesh.device) / _GIB,
            **_communication(step, batches),
        }
    close()
    return row


def _build(name: str, c: Config, mesh: Any, options: argparse.Namespace) -> tuple[Step, Callable[[], None]]:
    torch.manual_seed(0)
    with mesh.device:
        model = LanguageModel(c)
    if name.startswith("ours-"):
        return _ours(model, name, mesh, options)
    if name.startswith("ddp-compile"):
        places = [mesh.device.index] if mesh.device.type == "cuda" else None
        views = name == "ddp-compile-views"
        trained: Any = torch.compile(DistributedDataParallel(model, places, gradient_as_bucket_view=views))
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
        for block in model.blocks:
            block.compile()
            fully_shard(block, mp_policy=policy)
        trained = fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(
        trained.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = trained(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, lambda: None


def _ours(
    model: LanguageModel, name: str, mesh: Any, options: argparse.Namespace
) -> tuple[Step, Callable[[], None]]:
    apply, params, buffers = fcg.from_module(model)
    stage: Any = int(name.split("-")[1])
    sharding = fcg.sharding.zero(
        mesh, stage=stage, param_dtype=torch.bfloat16, bucket_bytes=int(options.bucket_mib * 2**20),
        prefetch=options.prefetch, reshard=not name.endswith("-kept"),
    )  # fmt: skip
    optimizer = fcg.optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    states: list[Any] = [
        fcg.TrainState.create(params=params, buffers=buffers, optimizer=optimizer, sharding=sharding)
    ]

    lanes: Literal["auto"] | int = "auto" if options.branches == "auto" else int(options.branches)

    @fcg.graph_step(lowering=options.lowering, branches=lanes)
    def train_step(state: Any, batch: tuple[Tensor, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        loss_fn = lambda params: apply(params, state.buffers, *batch)[0]  # noqa: E731
        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        states[0], metrics = train_step(states[0], batch)
        return metrics["loss"]

    def close() -> None:
        states.clear()
        train_step.close()

    return step, close


def _communication(step: Step, batches: Sequence[Any], steps: int = 3) -> dict[str, Any]:
    """Profile ms per step in collectives, in exposed ones and in other kernels, and count the collectives."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for i in range(steps):
            step(batches[i])
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    spans = [
        (event.time_range.start, event.time_range.end, "nccl" in event.name.lower()) for event in kernels
    ]
    talk = [(start, end) for start, end, nccl in spans if nccl]
    work = sorted((start, end) for start, end, nccl in spans if not nccl)
    total = sum(end - start for start, end in talk)
    hidden = sum(_covered(start, end, work) for start, end in talk)
    return {
        "collective_ms": total / steps / 1e3, "exposed_ms": (total - hidden) / steps / 1e3,
        "collectives": len(talk) // steps, "compute_ms": sum(end - start for start, end in work) / steps / 1e3,
    }  # fmt: skip


def _covered(start: float, end: float, spans: Sequence[tuple[float, float]]) -> float:
    """Compute how much of an interval is covered by sorted spans."""
    covered, now = 0.0, start
    for first, last in spans:
        if first >= end:
            break
        if last > now:
            covered += max(0.0, min(last, end) - max(first, now))
            now = max(now, min(last, end))
    return covered


def _refuse_different_losses(rows: Sequence[dict[str, Any]]) -> None:
    """Exit unless the losses of all systems agree within bf16 rounding."""
    for row in rows[1:]:
        for ours, theirs in zip(row["losses"], rows[0]["losses"], strict=True):
            if abs(ours - theirs) > 1e-2 * abs(theirs):
                raise SystemExit(
                    f"losses differ: {row['system']} {row['losses']}, {rows[0]['system']} {rows[0]['losses']}"
                )


def _line(row: dict[str, Any], first: dict[str, Any]) -> str:
    text = (
        f"{row['system']:<14} {row['ms']:8.2f} ms [{row['ms_min']:.2f}, {row['ms_max']:.2f}]  "
        f"{first['ms'] / row['ms']:.3f}x of {first['system']}  {row['tokens_per_s']:,.0f} tokens/s"
    )
    if "peak_gib" in row:
        text += (
            f"  peak {row['peak_gib']:.2f} GiB  collectives {row['collective_ms']:.2f} ms in {row['collectives']}, "
            f"exposed {row['exposed_ms']:.2f} ms ({row['exposed_ms'] / row['ms']:.1%}), "
            f"compute {row['compute_ms']:.2f} ms"
        )
    return text


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _free(device: torch.device) -> None:
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _allocated(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / _GIB if device.type == "cuda" else 0.0


def _peak(device: torch.device) -> float:
    """Return the allocator's peak in GiB since the last reset."""
    return torch.cuda.max_memory_allocated(device) / _GIB if device.type == "cuda" else 0.0


if __name__ == "__main__":
    sys.exit(main())
