"""Small training programs for the sharding tests, and how their states are laid out on ranks.

Each makes a state, has a step, and makes another batch for each call and rank. Without a sharding the same source
trains on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim, sharding
from functional_cg.examples.transformer import GPT

__all__ = ["PROGRAMS", "Program", "Setting", "mlp_batch", "mlp_state", "randn", "warm_up"]

ROWS = 4


@dataclass(frozen=True)
class Setting:
    """How a state lies on ranks.

    Attributes:
      axes: Of the mesh.
      stage: Of ZeRO; or one for each top-level part of the parameters.
      options: Further arguments of ``sharding.zero``.
      timeout: Of the mesh, in seconds.
    """

    axes: Mapping[str, int]
    stage: int | Mapping[str, int] = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 60.0

    def mesh(self, device: str) -> Any:
        return sharding.mesh(self.axes, device=device, timeout=self.timeout)

    def zero(self, device: str) -> Any:
        mesh = self.mesh(device)
        if isinstance(self.stage, Mapping):
            return {part: self._zero(mesh, stage) for part, stage in self.stage.items()}
        return self._zero(mesh, self.stage)

    def _zero(self, mesh: Any, stage: int) -> Any:
        return sharding.zero(mesh, stage=stage, **self.options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
      state: ``state(sharding, device)``; no sharding makes an ordinary state.
      step: The function to capture.
      batch: ``batch(call, rank)``, on the host.
    """

    state: Callable[[Any, str], Any]
    step: Callable[..., Any]
    batch: Callable[[int, int], Any]


def randn(seed: int, *shape: int) -> Tensor:
    """Normal numbers, the same ones on every device and rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- an MLP with a leaf of each awkward size ----------------------------------------------------------------------


def mlp_params() -> dict[str, Tensor]:
    """Leaves that no number of ranks divides, with fewer elements than ranks, with one, of no dimension, with none."""
    return {
        "w1": randn(1, 5, 7) / 2, "b1": torch.zeros(7), "w2": randn(2, 7, 3) / 2, "b2": torch.zeros(3),
        "one": torch.ones(1), "scale": torch.tensor(1.5), "none": torch.zeros(0, 3), "even": randn(3, 8),
    }  # fmt: skip


def mlp(params: Any, x: Tensor, key: Tensor) -> Tensor:
    h = torch.tanh(x @ params["w1"] + params["b1"])
    h = fcg.random.dropout(key, h, 0.2)
    out = params["scale"] * (h @ params["w2"] + params["b2"]) * params["one"]
    return out + params["none"].sum() + params["even"].square().mean()


def mlp_loss(params: Any, batch: Any, key: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and its largest term: a part of the graph that no backward runs through."""
    error = (mlp(params, batch["x"], key) - batch["y"]).square()
    return error.float().mean(), error.amax()


def mlp_batch(call: int, rank: int) -> dict[str, Tensor]:
    seed = 1000 * call + rank
    return {"x": randn(seed, ROWS, 5), "y": randn(seed + 500, ROWS, 3)}


def _matrices(params: Any) -> Any:
    return fcg.tree.map(lambda leaf: leaf.dim() > 1, params)


def clipped_adamw() -> Any:
    return optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.05, weight_decay=0.1, mask=_matrices))


def mlp_state(optimizer: Callable[[], Any] = clipped_adamw, **fields: Any) -> Callable[[Any, str], Any]:
    def make(zero: Any, device: str) -> Any:
        params = fcg.tree.map(lambda leaf: leaf.to(device), mlp_params())
        return fcg.TrainState.create(
            params=params, optimizer=optimizer(), key=fcg.random.key(7), sharding=zero, **fields
        )

    return make


def key_of(state: Any) -> Tensor:
    """A key of this call and of this rank."""
    return sharding.fold_in(fcg.random.fold_in(state.key, state.step))


def mlp_step(state: Any, batch: Any) -> Any:
    (loss, worst), grads = fcg.value_and_grad(mlp_loss, has_aux=True)(state.params, batch, key_of(state))
    metrics = {
        "loss": sharding.mean(loss), "own loss": loss, "worst": worst, "norm": optim.global_norm(grads),
        "size": optim.global_norm(state.params), "largest": state.params["w1"].abs().max(),
    }  # fmt: skip
    return state.apply_gradients(grads), metrics


def bf16_step(state: Any, batch: Any) -> Any:
    """The loss sees parameters in bfloat16."""
    return mlp_step(state, {"x": batch["x"].bfloat16(), "y": batch["y"]})


def sliced_step(state: Any, batch: Any) -> Any:
    grads_of = fcg.microbatches(2)(fcg.value_and_grad(lambda p, b, *, key: mlp_loss(p, b, key)[0]))
    loss, grads = grads_of(state.params, batch, key=key_of(state))
    return state.apply_gradients(grads), {"loss": sharding.mean(loss), "norm": optim.global_norm(grads)}


def accumulating_step(state: Any, batch: Any) -> Any:
    """Add up gradients, and update where a batch says so."""
    (loss, _), grads = fcg.value_and_grad(mlp_loss, has_aux=True)(state.params, batch, key_of(state))
    total, due = fcg.tree.map(torch.add, state.grads, grads), batch["due"]
    new = state.apply_gradients(total, key=fcg.random.fold_in(state.key, 1))
    params, opt_state = fcg.tree.map(
        lambda a, b: torch.where(due, a, b), (new.params, new.opt_state), (state.params, state.opt_state)
    )
    kept = fcg.tree.map(lambda g: torch.where(due, torch.zeros_like(g), g), total)
    metrics = {"loss": sharding.mean(loss), "norm": optim.global_norm(total)}
    return new.replace(params=params, opt_state=opt_state, grads=kept), metrics


def accumulating_batch(call: int, rank: int) -> Any:
    return mlp_batch(call, rank) | {"due": torch.tensor(call % 3 == 2)}


def sharpness_aware_step(state: Any, batch: Any) -> Any:
    """Two gradients, the second one where the first one leads: its gathers wait for the first one's reductions.

    Source: Foret et al. 2021, "Sharpness-Aware Minimization".
    """
    grads_of, key = fcg.value_and_grad(lambda p: mlp_loss(p, batch, key)[0]), key_of(state)
    loss, uphill = grads_of(state.params)
    scale = 0.05 / (optim.global_norm(uphill).float() + 1e-6)
    _, grads = grads_of(fcg.tree.map(lambda p, g: p + scale * g, state.params, uphill))
    return state.apply_gradients(grads), {"loss": sharding.mean(loss), "norm": optim.global_norm(grads)}


class Average(fcg.TrainState):
    """A state with a moving average of the parameters, and with a running mean of the inputs."""

    ema: Any = None


def average_state(zero: Any, device: str) -> Any:
    params = fcg.tree.map(lambda leaf: leaf.to(device), mlp_params())
    params["frozen"] = torch.arange(5, device=device)
    rules = {"trained": optim.sgd(0.02, momentum=0.9), "frozen": optim.set_to_zero()}
    labels = {name: "frozen" if name == "frozen" else "trained" for name in params}
    return Average.create(
        params=params, optimizer=optim.partition(rules, labels), key=fcg.random.key(7), sharding=zero,
        buffers={"mean": torch.zeros(5, device=device)}, ema={"w1": params["w1"].clone()},
    )  # fmt: skip


def average_step(state: Any, batch: Any) -> Any:
    """A whole leaf follows a sharded one, an integer leaf among the parameters stays as it is."""
    trained = {name: leaf for name, leaf in state.params.items() if name != "frozen"}
    x = batch["x"] + 0.1 * state.params["frozen"]
    loss, grads = fcg.value_and_grad(lambda p: mlp_loss(p, {"x": x, "y": batch["y"]}, key_of(state))[0])(
        trained
    )
    new = state.apply_gradients(grads | {"frozen": torch.zeros_like(state.params["frozen"])})
    ema = {"w1": 0.9 * state.ema["w1"] + 0.1 * sharding.gather(new.params["w1"])}
    mean = 0.9 * state.buffers["mean"] + 0.1 * sharding.mean(batch["x"].mean(0))
    return new.replace(ema=ema, buffers={"mean": mean}), {"loss": sharding.mean(loss)}


# -- the GPT of the example, with its embedding tied --------------------------------------------------------------

_GPT = GPT(layers=1, width=8, heads=2, block_size=6, dropout=0.1, vocab=19)


def gpt_state(zero: Any, device: str) -> Any:
    params = _GPT.init(fcg.random.key(3).to(device))
    return fcg.TrainState.create(
        params=params, optimizer=clipped_adamw(), key=fcg.random.key(7), sharding=zero
    )


def gpt_batch(call: int, rank: int) -> Tensor:
    return torch.randint(0, 19, (3, 7), generator=torch.Generator().manual_seed(1000 * call + rank))


def gpt_loss(params: Any, tokens: Tensor, key: Tensor) -> Tensor:
    logits = _GPT.apply(params, tokens[:, :-1], key)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def gpt_step(state: Any, tokens: Tensor) -> Any:
    loss, grads = fcg.value_and_grad(gpt_loss)(state.params, tokens, key_of(state))
    metrics = {"loss": sharding.mean(loss), "own loss": loss, "norm": optim.global_norm(grads)}
    return state.apply_gradients(grads), metrics


PROGRAMS = {
    "mlp": Program(mlp_state(), mlp_step, mlp_batch),
    "mlp in bf16": Program(mlp_state(), bf16_step, mlp_batch),
    "sharpness-aware": Program(mlp_state(), sharpness_aware_step, mlp_batch),
    "lamb": Program(mlp_state(lambda: optim.lamb(0.05, weight_decay=0.1)), mlp_step, mlp_batch),
    "accumulation": Program(mlp_state(accumulate=True), accumulating_step, accumulating_batch),
    "micro-batches": Program(mlp_state(), sliced_step, mlp_batch),
    "average": Program(average_state, average_step, mlp_batch),
    "gpt": Program(gpt_state, gpt_step, gpt_batch),
}


def warm_up(zero: Any = None) -> None:
    """Trace most of the calls that the programs make: torch remembers what each does on fake tensors."""
    for name in ("mlp", "gpt"):
        program = PROGRAMS[name]
        fcg.graph_step(program.step).lower(program.state(zero, "cpu"), program.batch(0, 0))
