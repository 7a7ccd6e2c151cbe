"""Trains a byte-level GPT on real text with a captured step: ``python -m functional_cg.examples.gpt``.

The text is the source code of Python's standard library, or the path given by ``--data``. Its last tenth is held out: a
model that has learned to use context reaches a validation loss below the unigram entropy of the held-out bytes.

``--module`` uses the model as an ordinary ``nn.Module``; ``--compare`` also trains that module with an ordinary loop.
``--save FILE`` writes a checkpoint; the same options with ``--resume FILE`` continue from it, and the result is bitwise
that of an uninterrupted run.

``torchrun --nproc_per_node=2 -m functional_cg.examples.gpt --mesh data=2 --zero 3`` trains on two ranks, each with a
shard of the state and a slice of the batch. A checkpoint is always one file, and any number of ranks can resume from
it.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import functional_cg as fcg

from .measure import EagerTwin
from .module_gpt import GPTModule, PureGPT
from .options import gpt_parser
from .ordinary import train_ordinary
from .outcome import (
    History,
    draw_losses,
    finite,
    losses_and_entropy,
    speed_and_agreement,
    summary,
    write_history,
)
from .ranks import Ranks, ranks_of, stop_request
from .sampling import generate, make_sampler
from .text import Batch, batches, read_bytes, split, text_files, unigram_entropy, validation_batches
from .transformer import GPT, Params

__all__ = [
    "Model",
    "create_state",
    "cross_entropy",
    "main",
    "make_evaluate",
    "make_optimizer",
    "make_train_step",
    "train",
]

Lowering = Literal["auto", "aten", "inductor"]
State = fcg.TrainState[Params]
Metrics = dict[str, Tensor]
TrainStep = fcg.GraphStep[[State, Batch], tuple[State, Metrics]]
Evaluate = fcg.GraphFn[[Params, Batch], Tensor]

_TEXT_BYTES = 4 * 2**20
_VALIDATION_BATCHES = 16
_EVALUATIONS = 4
_READ_EVERY = 10  # steps; reading a loss waits for the device
_CHECKED_CALLS = 4
_COMPARED_STEPS = 60
_PROMPT = b"def "


class Model(Protocol):
    """The model interface of the training step: initial parameters and a pure forward function."""

    def init(self, key: Tensor, /) -> Params:
        """Draw initial parameters."""
        ...

    def apply(self, params: Params, tokens: Tensor, key: Tensor | None = None, /) -> Tensor:
        """Compute logits; without a key, no dropout."""
        ...


def make_model(options: Namespace) -> Model:
    """Make the model as two functions over a parameter tree, or (``--module``) from an ``nn.Module``."""
    sizes = options.layers, options.width, options.heads, options.block_size, options.dropout
    functions = GPT(*sizes)  # validates the sizes
    return PureGPT(GPTModule(*sizes)) if options.module else functions


def make_optimizer(peak_lr: float, steps: int) -> fcg.optim.GradientTransformation:
    """Make AdamW with weight decay on matrices only, after clipping by the global norm."""
    schedule = fcg.optim.warmup_cosine(peak_lr, steps // 10, steps, end_value=peak_lr / 10)
    return fcg.optim.chain(
        fcg.optim.clip_by_global_norm(1.0),
        fcg.optim.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices),
    )


def matrices(params: Params) -> Params:
    """Mark the leaves that decay: all but the scales and shifts of the norms."""
    return fcg.tree.map(lambda leaf: leaf.ndim >= 2, params)  # type: ignore[no-any-return]


def create_state(
    model: Model,
    optimizer: fcg.optim.GradientTransformation,
    seed: int,
    device: torch.device,
    sharding: Any = None,
) -> State:
    """Create the initial state, with the same parameters on every device; on ranks, a shard of it."""
    init_key, dropout_key = fcg.random.split(fcg.random.key(seed))
    params = fcg.tree.map(lambda leaf: leaf.to(device), model.init(init_key))
    return fcg.TrainState.create(params=params, optimizer=optimizer, key=dropout_key, sharding=sharding)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean over all positions, in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_train_step(model: Model, lowering: Lowering = "auto") -> TrainStep:
    """Make ``state, metrics = train_step(state, batch)``; on ranks, ``batch`` is this rank's slice."""

    @fcg.graph_step(lowering=lowering)
    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        assert state.key is not None
        key = fcg.random.fold_in(fcg.sharding.fold_in(state.key), state.step)  # each rank draws its own masks

        def loss_fn(params: Params) -> Tensor:
            return cross_entropy(model.apply(params, batch["x"], key), batch["y"])

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": fcg.sharding.mean(loss)}

    return train_step


def make_evaluate(model: Model, lowering: Lowering = "auto") -> Evaluate:
    """Make ``evaluate(state.params, batch)``, the loss without dropout, which borrows the parameters."""

    @fcg.graph_fn(lowering=lowering)
    def evaluate(params: Params, batch: Batch) -> Tensor:
        logits = model.apply(fcg.sharding.gather(params), batch["x"])
        return fcg.sharding.mean(cross_entropy(logits, batch["y"]))

    return evaluate


def mean_loss(evaluate: Evaluate, state: State, held_out: Sequence[Batch]) -> float:
    """Compute the validation loss of a state, which is borrowed."""
    return float(torch.stack([evaluate(state.params, batch) for batch in held_out]).mean())


def train(
    train_step: TrainStep,
    evaluate: Evaluate,
    state: State,
    stream: Iterator[Batch],
    held_out: Sequence[Batch],
    steps: int,
    ranks: Ranks,
    checkpoint: Path | None = None,
    save_every: int | None = None,
) -> tuple[State, History]:
    """Train until ``state.step`` is ``steps``, and evaluate. Ctrl-C ends the run early; no finished step is lost.

    ``checkpoint`` is written at the end, and after every ``save_every`` steps.
    """
    start = int(state.step)
    lowered = train_step.lower(state, held_out[0])
    lowered.capture()  # now, so that it is not timed with the first call
    history = History(EagerTwin(train_step, state), state_bytes=lowered.memory_analysis()["state"])
    evaluate_every = _READ_EVERY * max(1, steps // (_READ_EVERY * _EVALUATIONS))
    every_s = 0.1 if sys.stderr.isatty() else 3600  # in a log file, a line per reading is enough
    with (
        tqdm(
            total=steps,
            initial=start,
            unit="step",
            mininterval=every_s,
            dynamic_ncols=True,
            disable=not ranks.first,
        ) as bar,
        stop_request(ranks) as stopping,
    ):
        try:
            history.meter.mark()
            for step in range(start + 1, steps + 1):
                call = step - start
                batch = next(stream)
                state, metrics = train_step(state, batch)
                history.losses.append(metrics["loss"])
                bar.update()
                saving = save_every is not None and step % save_every == 0 and step < steps
                if call > _CHECKED_CALLS and step % _READ_EVERY and step < steps and not saving:
                    continue
                history.meter.lap(call, metrics)
                tokens_per_s = history.meter.calls_per_s * batch["x"].numel() * ranks.size
                bar.set_postfix_str(f"loss {float(metrics['loss']):.3f}, {tokens_per_s:,.0f} tokens/s")
                if call <= _CHECKED_CALLS:
                    history.twin.follow(batch, state, metrics)
                if step % evaluate_every == 0 and step < steps:
                    history.validation.append((step, mean_loss(evaluate, state, held_out)))
                    if ranks.first:
                        bar.write(f"step {step}: validation loss {history.validation[-1][1]:.4f}")
                if saving and checkpoint is not None:
                    save(checkpoint, state, ranks)
                if stopping():
                    raise KeyboardInterrupt
                history.meter.mark()
        except KeyboardInterrupt:
            state, history.interrupted = state.latest(), True
    if checkpoint is not None:
        save(checkpoint, state, ranks)
    history.validation.append((int(state.step), mean_loss(evaluate, state, held_out)))
    return state, history


def save(path: Path, state: State, ranks: Ranks) -> None:
    """Write a checkpoint of the whole state. All ranks call it; rank 0 writes."""
    whole = fcg.sharding.state_dict(state)
    ranks.together(lambda: fcg.save(path, whole) if ranks.first else None)


def model_and_text(options: Namespace, ranks: Ranks) -> tuple[Model, Tensor]:
    """Load the text and make the model, after checking everything that can be checked before the run.

    Raises:
      OSError: If the text cannot be read, or the output directory cannot be created.
      ValueError: If sizes do not fit each other or the text, or the checkpoint would overwrite another one.
    """
    model = make_model(options)
    text = read_bytes(text_files(options.data), _TEXT_BYTES)
    split(text, options.block_size)
    if ranks.first and options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    if ranks.first and options.save is not None and options.resume is None and options.save.exists():
        raise ValueError(
            f"{options.save} is there already; go on from it by --resume, or choose another name"
        )
    return model, text


def first_state(options: Namespace, model: Model, ranks: Ranks) -> State:
    """Return the state to start from: a new one, or the checkpoint of ``--resume``.

    Raises:
      ImportError: If a checkpoint is to be read or written and safetensors is not installed.
      OSError: If a file cannot be read or written.
      ValueError: If the file is not a checkpoint, or one of another model.
    """
    optimizer = make_optimizer(options.lr, options.steps)
    state = create_state(model, optimizer, options.seed, options.device, ranks.sharding)
    if options.resume is not None:
        state = ranks.together(lambda: resumed(options.resume, state))
    if options.save is not None:
        save(options.save, state, ranks)  # a bad path should fail now, not after the training
    return state


def resumed(path: Path, state: State) -> State:
    """Load a checkpoint into the state; each rank keeps its shards."""
    try:
        return fcg.load(path, state)
    except fcg.LayoutError as error:
        difference = str(error).splitlines()[1].strip()
        raise ValueError(f"{path} is a checkpoint of another model: {difference}") from error


def run(
    options: Namespace, model: Model, text: Tensor, state: State, ranks: Ranks
) -> tuple[dict[str, Any], History]:
    """Train as the options say, and return the result and the history."""
    lowering = options.lowering
    if lowering == "auto":
        lowering = "inductor" if options.device.type == "cuda" else "aten"
    train_step, evaluate = make_train_step(model, lowering), make_evaluate(model, lowering)
    parameters = sum(leaf.numel() for leaf in fcg.tree.leaves(state.params))
    training, held_out = split(text, options.block_size)
    ranks.say(f"{parameters:,} parameters on {options.device}, lowering {lowering}")
    ranks.say(f"{len(training):,} bytes to train on, {len(held_out):,} held out")

    sizes = options.batch_size, options.block_size
    done = int(state.step)  # skip the batches of the steps already taken
    own = {"rank": ranks.rank, "ranks": ranks.size}
    stream = islice(batches(training, *sizes, options.seed, **own), done, None)
    fixed = validation_batches(held_out, *sizes, _VALIDATION_BATCHES, **own)
    sampler = make_sampler(lambda params, tokens: model.apply(fcg.sharding.gather(params), tokens), lowering)

    def sample(state: State) -> str:
        return generate(sampler, state.params, _PROMPT, options.sample, options.block_size, options.seed)

    before = sample(state)
    state, history = train(
        train_step, evaluate, state, stream, fixed, options.steps, ranks, options.save, options.save_every
    )
    after = sample(state)
    if options.compare:
        history.ordinary = compare(options, training)
    result = {
        "steps": int(state.step),
        **losses_and_entropy(history, unigram_entropy(held_out)),
        **speed_and_agreement(history, ranks, math.prod(sizes) * ranks.size, bitwise=lowering == "aten"),
        "ordinary_tokens_per_s": history.ordinary[1] * math.prod(sizes) if history.ordinary else None,
        "sample_before": before,
        "sample_after": after,
        "captures": train_step.stats.captures,
        "replays": train_step.stats.replays,
        "parameters": parameters,
        "ranks": ranks.size,
        "zero": options.zero if options.mesh else None,
        "bytes_per_rank": history.state_bytes,
        "device": options.device.type,
        "lowering": lowering,
        "torch": torch.__version__,
    }
    return result, history


def compare(options: Namespace, training: Tensor) -> tuple[list[float], float]:
    """Train the module with an ordinary loop from the first batch on; return its losses and steps per second."""
    module = GPTModule(options.layers, options.width, options.heads, options.block_size, options.dropout)
    init_key, _ = fcg.random.split(fcg.random.key(options.seed))
    first = PureGPT(module).init(init_key)
    module.load_state_dict(first, strict=False)  # the head is tied: one name there, two here
    stream = batches(training, options.batch_size, options.block_size, options.seed)
    steps = min(_COMPARED_STEPS, options.steps)
    return train_ordinary(module.to(options.device), stream, steps, options.steps, options.lr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    parser = gpt_parser("python -m functional_cg.examples.gpt", "Train a byte-level GPT on real text.")
    options = parser.parse_args(argv)
    if options.save_every is not None and options.save is None:
        parser.error("--save-every needs --save FILE")
    if options.zero is not None and options.mesh is None:
        parser.error("--zero needs --mesh AXES")
    if options.compare and options.mesh is not None:
        parser.error("--compare trains in one process; leave out --mesh")
    options.zero = options.zero or 3
    try:
        ranks = ranks_of(options)
        model, text = ranks.together(lambda: model_and_text(options, ranks))
        state = first_state(options, model, ranks)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    logging.basicConfig(format="%(message)s")
    if ranks.first:
        logging.getLogger("functional_cg").setLevel(logging.INFO)  # logs each stage with its duration

    try:
        result, history = run(options, model, text, state, ranks)
    except KeyboardInterrupt:  # before the loop, or once more after it
        return 130
    if ranks.first:
        tell(options, result, history)
    return 130 if history.interrupted else 0


def tell(options: Namespace, result: dict[str, Any], history: History) -> None:
    """Print the result, and write the files that the options name."""
    print(summary(result))
    if options.out is not None:
        write_history(options.out, result, history)
        if history.losses:
            draw_losses(options.out / "loss.png", history)
    if options.json:
        print(json.dumps(finite(result)))


if __name__ == "__main__":
    sys.exit(main())
