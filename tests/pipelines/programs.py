"""A program with stages, in many variants, and what a rank that trains it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim, sharding
from tests.sharding.programs import randn
from tests.shares import CALLS_ON_RANKS as CALLS

__all__ = [
    "CALLS", "CUTS", "FEATURES", "ONE", "TWO", "Run", "average_of", "loss_of", "made", "params", "rows", "trained",
]  # fmt: skip

LAYERS, ROWS, WORDS = 4, 24, 11
ONE, TWO = {"stage": 1, "data": -1}, {"stage": 2, "data": -1}
FEATURES = (
    "plain", "tied", "everywhere", "double", "dropout", "clip", "adamw", "accumulate", "aux", "skip", "averages",
)  # fmt: skip
# Schedule -> in front of which layers it is cut, on two ranks.
CUTS: Mapping[str, tuple[int, ...]] = {
    "gpipe": (2,), "1f1b": (2,), "interleaved": (1, 2, 3), "zero_bubble": (1, 2, 3), "zbv": (1, 2, 3),
    "dualpipev": (1, 2, 3), "looped_bfs": (1, 2, 3),
}  # fmt: skip


@dataclass(frozen=True)
class Average(optim.GradientTransformation):
    """The last link of an optimizer: it keeps a moving average of the parameters, where their moments are."""

    def init(self, params: Any) -> Any:
        return fcg.tree.map(torch.clone, params)

    def update(self, updates: Any, state: Any, params: Any = None) -> Any:
        return updates, fcg.tree.map(lambda mean, p, u: mean.lerp(p + u, 0.25), state, params, updates)


class Averaged(fcg.TrainState):
    """A state with an average that each rank holds whole."""

    ema: Any = None


@dataclass(frozen=True)
class Run:
    """A variant of the program.

    Attributes:
      schedule: Of the pipeline.
      features: Some of ``FEATURES``.
      cuts: In front of which layers it is cut; None for those of the schedule.
      stage: Of ZeRO.
      microbatches: How many.
      layers: How many there are between the embedding and the head.
      options: Of the step.
    """

    schedule: Any
    features: tuple[str, ...]
    cuts: tuple[int, ...] | None = None
    stage: int = 1
    microbatches: int = 4
    layers: int = LAYERS
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def at(self) -> tuple[int, ...]:
        return CUTS[self.schedule] if self.cuts is None else self.cuts


def params(layers: int = LAYERS) -> dict[str, Tensor]:
    out = {"emb": randn(1, WORDS, 6), "head": randn(2, 6, WORDS)}
    return out | {f"w{i}": randn(3 + i, 6, 6) / 3 for i in range(layers)}


def rows(call: int, rank: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(100 * call + rank)
    return {name: torch.randint(0, WORDS, (ROWS,), generator=draw) for name in ("x", "y")}


def loss_of(cut: Callable[[Any], Any], run: Run) -> Callable[..., Any]:
    has = run.features.__contains__

    def loss_fn(params: Any, batch: Any, *, key: Tensor) -> Any:
        x = params["emb"][batch["x"]]
        first = x
        weight = batch["x"].float().mean() / WORDS  # of the data alone: each stage computes it
        for i in range(run.layers):
            if i in run.at:
                x, first = cut((x, first)) if has("skip") else (cut(x), first)
            x = torch.tanh(x @ params[f"w{i}"]) * weight
            if has("everywhere"):
                x = x + params["emb"][i]
            if has("dropout"):
                x = fcg.random.dropout(fcg.random.fold_in(key, i), x, 0.2)
        x = x + first if has("skip") else x
        logits = x @ (params["emb"].T if has("tied") else params["head"])
        loss = F.cross_entropy(logits, batch["y"])
        return (
            (loss, {"top": logits.detach().amax(), "rows": (batch["y"] > 3).float().sum()})
            if has("aux")
            else loss
        )

    return loss_fn


def optimizer_of(run: Run) -> Any:
    rule = optim.adamw(0.05, weight_decay=0.1) if "adamw" in run.features else optim.sgd(0.1, momentum=0.9)
    rule = optim.chain(optim.clip_by_global_norm(0.3), rule) if "clip" in run.features else rule
    return optim.chain(rule, Average()) if "averages" in run.features else rule


def average_of(state: Any) -> Any:
    """The average that the optimizer keeps."""
    return state.opt_state[-1]


def moved(mean: Any, params: Any) -> Any:
    """An average that each rank holds whole, one call later."""
    return fcg.tree.map(lambda m, p: m.lerp(p, 0.25), mean, sharding.gather(params, masters=True))


def made(run: Run, axes: Mapping[str, int], device: str = "cpu", mesh: Any = None) -> tuple[Any, Any, Any]:
    """The pipeline, a state and the function to capture; on a mesh of its own, or on one that is there."""
    mesh = mesh or sharding.mesh(axes, device=device, timeout=20)
    pipe = sharding.pipeline(mesh, schedule=run.schedule, microbatches=run.microbatches)
    loss_fn, has_aux = loss_of(pipe.cut, run), "aux" in run.features
    values = params(run.layers)
    values = fcg.tree.map(torch.Tensor.double, values) if "double" in run.features else values
    zero = pipe.zero(loss_fn, values, rows(0, 0), key=fcg.random.key(0), stage=run.stage, has_aux=has_aux)  # type: ignore[arg-type]
    accumulates, averages = "accumulate" in run.features, "averages" in run.features
    state = Averaged.create(
        params=values,
        optimizer=optimizer_of(run),
        key=fcg.random.key(3),
        sharding=zero,
        accumulate=accumulates,
        ema=fcg.snapshot(values) if averages else None,
    )

    def train_step(state: Any, batch: Any) -> Any:
        key = fcg.random.fold_in(sharding.fold_in(state.key), state.step)
        out, grads = pipe.value_and_grad(loss_fn, has_aux=has_aux)(state.params, batch, key=key)
        loss, aux = out if has_aux else (out, {})
        metrics = {"loss": sharding.mean(loss), "own loss": loss, "norm": optim.global_norm(grads), **aux}
        if not accumulates:
            new = state.apply_gradients(grads)
            return (new.replace(ema=moved(state.ema, new.params)) if averages else new), metrics
        total, due = fcg.tree.map(torch.add, state.grads, grads), state.step % 3 == 2
        new = state.apply_gradients(total)
        kept = fcg.tree.map(lambda g: torch.where(due, torch.zeros_like(g), g), total)
        params, moments = fcg.tree.map(
            lambda a, b: torch.where(due, a, b), (new.params, new.opt_state), (state.params, state.opt_state)
        )
        new = new.replace(params=params, opt_state=moments, grads=kept)
        return (new.replace(ema=moved(state.ema, params)) if averages else new), metrics

    return pipe, state, train_step


def trained(runs: Sequence[Run], axes: Mapping[str, int], device: str = "cpu") -> list[Any]:
    """For each run, the metrics of all calls and the whole state, or an empty one beside rank 0."""
    out = []
    for run in runs:
        pipe, state, function = made(run, axes, device)
        step, kept = fcg.graph_step(function, **{"lowering": "aten", **run.options}), []
        for call in range(CALLS):
            batch = {name: leaf.to(pipe.mesh.device) for name, leaf in rows(call, pipe.mesh.rank).items()}
            state, metrics = step(state, batch)
            kept.append({name: value.cpu() for name, value in metrics.items()})
        assert (step.stats.traces, step.stats.captures, step.stats.replays) == (1, 1, CALLS)
        out.append((kept, dict(sharding.state_dict(state))))
        step.close()
    return out
