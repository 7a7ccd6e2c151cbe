"""Runs of the GPT example, shared by the CPU and CUDA tests."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import Any

import torch

import functional_cg as fcg
from functional_cg.examples import gpt
from functional_cg.examples.module_gpt import GPTModule, PureGPT
from functional_cg.examples.text import Batch, batches
from functional_cg.examples.transformer import GPT, Params
from tests import judge_gpt
from tests.forked import Program

TINY = ("--layers", "1", "--width", "32", "--heads", "2", "--block-size", "32", "--batch-size", "8")


def random_batches(model: GPT, batch_size: int, count: int) -> list[Batch]:
    """New batches of text that has some structure to learn: words of a small random vocabulary."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(model.vocab, (32, 5), generator=generator)
    text = words[torch.randint(32, (2000,), generator=generator)].flatten()
    return list(itertools.islice(batches(text, batch_size, model.block_size, seed=2), count))


def assert_replay_equals_eager(
    model: GPT, *, batch_size: int, calls: int, device: torch.device, module: bool = False
) -> None:
    """All leaves (the key among them) and metrics, bitwise, after each call with new inputs."""
    sizes = model.layers, model.width, model.heads, model.block_size, model.dropout, model.vocab
    trained: gpt.Model = PureGPT(GPTModule(*sizes)) if module else model
    step = gpt.make_train_step(trained, "aten")
    optimizer = gpt.make_optimizer(1e-2, calls)
    replayed = gpt.create_state(trained, optimizer, seed=3, device=device)
    eager = fcg.fork(replayed)
    for call, batch in enumerate(random_batches(model, batch_size, calls)):
        replayed, got = step(replayed, batch)
        eager, wanted = step.eager(eager, batch)
        pairs, _ = fcg.tree.flatten_with_path((fcg.snapshot(replayed), got))
        for (path, leaf), twin in zip(pairs, fcg.tree.leaves((fcg.snapshot(eager), wanted)), strict=True):
            assert torch.equal(leaf, twin), f"call {call}: {fcg.tree.path_string(path)} differs"
    assert (step.stats.captures, step.stats.replays, step.stats.eager_calls) == (1, calls, calls)
    assert int(replayed.step) == calls


def judge_weights(params: Params) -> dict[str, torch.Tensor]:
    """The parameters under the names that the judge's module has for them."""
    names = {
        "wte": "wte.weight",
        "wpe": "wpe.weight",
        "qkv": "attention.qkv.weight",
        "out": "attention.out.weight",
        "up": "mlp.0.weight",
        "down": "mlp.2.weight",
    }
    weights = {names[name]: params[name] for name in ("wte", "wpe")}
    weights |= {f"norm.{name}": leaf for name, leaf in params["norm"].items()}
    for i, block in enumerate(params["blocks"]):
        for name, value in block.items():
            leaves = value if isinstance(value, dict) else {None: value}
            for part, leaf in leaves.items():
                weights[f"blocks.{i}.{names[name] if part is None else f'{name}.{part}'}"] = leaf
    return weights


def train_both(
    model: GPT, *, batch_size: int, steps: int, device: torch.device
) -> tuple[tuple[list[float], dict[str, torch.Tensor]], tuple[list[float], dict[str, torch.Tensor]]]:
    """Train with the package and with the judge on the same batches: losses and final weights of each."""
    peak_lr = 3e-3
    data = random_batches(model, batch_size, steps)
    step = gpt.make_train_step(model, "aten")
    state = gpt.create_state(model, gpt.make_optimizer(peak_lr, steps), seed=4, device=device)
    weights = judge_weights(fcg.snapshot(state.params))
    losses = []
    for batch in data:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    judged = judge_gpt.train(
        weights,
        [(batch["x"], batch["y"]) for batch in data],
        sizes={name: getattr(model, name) for name in ("layers", "width", "heads", "block_size", "vocab")},
        steps=steps,
        warmup=steps // 10,
        peak_lr=peak_lr,
        end_lr=peak_lr / 10,
        device=device,
    )
    return (losses, judge_weights(fcg.snapshot(state.params))), judged


def start_example(*options: str) -> Program:
    """Start the example in a process of its own."""
    return Program("-m", "functional_cg.examples.gpt", *options)


def run_on_ranks(ranks: int, *options: str) -> tuple[dict[str, Any], str]:
    """Run the example by torchrun: the JSON object that it prints, and all that stands before it."""
    launcher = ("torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
    process = subprocess.Popen(
        [sys.executable, "-m", *launcher, "-m", "functional_cg.examples.gpt", *options, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.terminate()  # torchrun takes its ranks along
    assert process.returncode == 0, err
    printed, _, last = out.rstrip("\n").rpartition("\n")
    return json.loads(last), printed


def run_example(*options: str) -> dict[str, Any]:
    """Run the example to its end: the JSON object of its last line."""
    with start_example(*options, "--json") as program:
        assert program.end(timeout=240) == 0, program.err
        result = json.loads(program.out.splitlines()[-1])
    assert isinstance(result, dict)
    return result
