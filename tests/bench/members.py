"""Times many models at once: ``python -m tests.bench.members --members 1 4 16 64 256 --device cuda``.

Each system trains the same members, which differ in their initial values and rates, on the same batches. A row says how
long one step of all members takes: of one graph over all (``sweep``), of one captured step that runs on the state of
one member after another (``loop``), of a process for each member with a captured step of its own (``processes``), of
``jax.vmap`` under ``jax.jit`` with a donated state, and of ``torch.func.vmap`` under ``torch.compile``. The systems
take turns; the losses of all are compared first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import functional_cg as fcg

from .measure import BATCHES, environment, in_turns
from .system import BETAS, EPS, System, there, waiter
from .systems.jax_losses import jax_loss
from .systems.jax_systems import modules, narrow
from .systems.losses import Model, torch_loss
from .workloads import Batch, Params, Workload

__all__ = ["SYSTEMS", "WORKLOADS", "main"]

WORKLOADS = {
    "mlp": Workload("mlp", "mlp", 4, 64, 32),
    "cnn": Workload("cnn", "cnn", 1, 8, 16, tolerance=1e-2),
    "gpt": Workload("gpt", "gpt", 2, 64, 8, time=64, vocab=64, bf16=True, tolerance=1e-2),
}
_LOSSES = 3
_TURNS = 100  # calls of each system


def _member(work: Workload, number: int) -> Params:
    return {name: value * (1 + number / 100) for name, value in work.params().items()}


def _rates(work: Workload, count: int) -> list[float]:
    return [work.learning_rate * (1 + number) / count for number in range(count)]


def _of_ours(
    work: Workload, rates: Sequence[float], device: torch.device
) -> tuple[Any, Callable[[int], Any]]:
    """Return the step of one member, and what makes the state of each."""
    optimizer = fcg.optim.inject_hyperparams(fcg.optim.adamw)(
        learning_rate=work.learning_rate, b1=BETAS[0], b2=BETAS[1], eps=EPS, weight_decay=work.weight_decay
    )
    apply, _, _ = fcg.from_module(Model(work))

    def train_step(state: Any, batch: Batch) -> Any:
        loss_fn = lambda params: apply(params, state.buffers or {}, batch["x"], batch["y"])  # noqa: E731
        (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, buffers=buffers if state.buffers else None), {"loss": loss}

    def create(number: int) -> Any:
        params = {name: value.to(device) for name, value in _member(work, number).items()}
        buffers = {name: value.to(device) for name, value in work.buffers().items()} or None
        state = fcg.TrainState.create(params=params, optimizer=optimizer, buffers=buffers)
        return fcg.optim.set_hyperparams(state, learning_rate=rates[number])

    return train_step, create


def _sweep(work: Workload, rates: Sequence[float], device: torch.device, batches: Sequence[Batch]) -> System:
    train_step, create = _of_ours(work, rates, device)
    members = [create(number) for number in range(len(rates))]
    step, held = fcg.graph_step(fcg.sweep(train_step)), [fcg.tree.stack(members)]

    def run(batch: Batch) -> Any:
        held[0], metrics = step(held[0], batch)
        return metrics["loss"]

    return System("sweep", run, there(batches, device), waiter(device), step.close)


def _loop(work: Workload, rates: Sequence[float], device: torch.device, batches: Sequence[Batch]) -> System:
    train_step, create = _of_ours(work, rates, device)
    step, states = fcg.graph_step(train_step), [create(number) for number in range(len(rates))]

    def run(batch: Batch) -> Any:
        losses = []
        for member, state in enumerate(states):
            states[member], metrics = step(state, batch)
            losses.append(metrics["loss"])
        return torch.stack(losses)

    return System("loop", run, there(batches, device), waiter(device), step.close)


def _processes(
    work: Workload, rates: Sequence[float], device: torch.device, batches: Sequence[Batch]
) -> System:
    """A process for each member: the steps of a turn are made when somebody waits for them, by all at once."""
    context, pipes, asked = multiprocessing.get_context("spawn"), list[Any](), list[int]()
    for number in range(len(rates)):
        mine, others = context.Pipe()
        context.Process(target=_alone, args=(work, rates, device, number, others), daemon=True).start()
        pipes.append(mine)

    def losses() -> list[float]:
        for pipe in pipes:
            pipe.send([*asked])
        asked.clear()
        return [pipe.recv() for pipe in pipes]

    def run(batch: int) -> Any:
        asked.append(batch)
        return SimpleNamespace(tolist=losses)

    def wait() -> None:
        losses()

    def close() -> None:
        for pipe in pipes:
            pipe.send(None)

    return System("processes", run, list(range(len(batches))), wait, close)


def _alone(work: Workload, rates: Sequence[float], device: torch.device, number: int, pipe: Any) -> None:
    """Train one member in a process of its own, until the pipe says that it is over."""
    torch.set_num_threads(1)
    train_step, create = _of_ours(work, rates, device)
    step, state, batches = fcg.graph_step(train_step), create(number), there(work.batches(BATCHES), device)
    while (asked := pipe.recv()) is not None:
        loss = torch.zeros(())
        for batch in asked:
            state, metrics = step(state, batches[batch])
            loss = metrics["loss"]
        pipe.send(float(loss))


def _functional(
    work: Workload, rates: Sequence[float], device: torch.device, batches: Sequence[Batch]
) -> System:
    loss_of = torch_loss(work)

    def update(
        params: Params, buffers: Params, mu: Params, nu: Params, rate: Tensor, count: Tensor, batch: Batch
    ) -> Any:
        def loss_fn(params: Params) -> Any:
            new = {name: value.clone() for name, value in buffers.items()}
            return loss_of({**params, **new}, batch["x"], batch["y"]), new

        grads, (loss, new) = torch.func.grad_and_value(loss_fn, has_aux=True)(params)
        count = count + 1
        for name, grad in grads.items():
            mu = {**mu, name: BETAS[0] * mu[name] + (1 - BETAS[0]) * grad}
            nu = {**nu, name: BETAS[1] * nu[name] + (1 - BETAS[1]) * grad * grad}
            step = mu[name] / (1 - BETAS[0] ** count) / ((nu[name] / (1 - BETAS[1] ** count)).sqrt() + EPS)
            params = {**params, name: params[name] - rate * (step + work.weight_decay * params[name])}
        return (params, new, mu, nu, rate, count), loss

    members = [_member(work, number) for number in range(len(rates))]
    params = {name: torch.stack([one[name] for one in members]).to(device) for name in members[0]}
    buffers = {name: torch.stack([one] * len(rates)).to(device) for name, one in work.buffers().items()}
    zeros = [{name: torch.zeros_like(one) for name, one in params.items()} for _ in range(2)]
    state: tuple[Any, ...] = (
        params,
        buffers,
        *zeros,
        torch.tensor(rates, device=device),
        torch.zeros(len(rates), device=device),
    )
    compiled: Any = torch.compile(torch.func.vmap(update, in_dims=(*[0] * 6, None)))
    held = [state]

    def run(batch: Batch) -> Any:
        held[0], losses = compiled(*held[0], batch)
        return losses

    return System("functional", run, there(batches, device), waiter(device))


def _jax(work: Workload, rates: Sequence[float], device: torch.device, batches: Sequence[Batch]) -> System:
    jax, optax, place = modules(device)
    loss_of = jax_loss(work, jax, optax, None)
    optimizer = optax.inject_hyperparams(optax.adamw)(
        learning_rate=work.learning_rate, b1=BETAS[0], b2=BETAS[1], eps=EPS, weight_decay=work.weight_decay
    )

    def update(state: Any, batch: Any) -> Any:
        params, opt_state, extra = state
        (loss, extra), grads = jax.value_and_grad(loss_of, has_aux=True)(
            params, extra, batch["x"], batch["y"]
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, extra), loss

    def put(value: Tensor) -> Any:
        return jax.device_put(value.numpy().copy(), place)

    members = [_member(work, number) for number in range(len(rates))]
    params = {name: put(torch.stack([one[name] for one in members])) for name in members[0]}
    extra = {name: put(torch.stack([one] * len(rates))) for name, one in work.buffers().items()}
    opt_state = jax.vmap(optimizer.init)(params)
    opt_state.hyperparams["learning_rate"] = put(torch.tensor(rates))
    held = {"state": (params, opt_state, extra)}
    given = [{name: put(narrow(value)) for name, value in batch.items()} for batch in batches]
    step = jax.jit(jax.vmap(update, in_axes=(0, None)), donate_argnums=0)

    def run(batch: Any) -> Any:
        held["state"], held["losses"] = step(held["state"], batch)
        return held["losses"]

    return System("jax", run, given, lambda: jax.block_until_ready(held["losses"]), held.clear)


SYSTEMS = {
    "sweep": _sweep,
    "loop": _loop,
    "processes": _processes,
    "jax": _jax,
    "functional": _functional,
}


def _used(device: torch.device) -> int:
    """Return the bytes of the device that anybody uses, other processes and what is kept in reserve included."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _rows(work: Workload, names: Sequence[str], count: int, device: torch.device) -> list[dict[str, Any]]:
    batches, rates = work.batches(BATCHES), _rates(work, count)
    rows: dict[str, dict[str, Any]] = {}
    systems: dict[str, System] = {}
    expected: list[Any] = []
    for name in names:
        row = rows[name] = {"workload": work.name, "members": count, "system": name}
        start, before = time.perf_counter(), _used(device)
        try:
            system = SYSTEMS[name](work, rates, device, batches)
            losses = [torch.as_tensor(system.step(batch).tolist()) for batch in system.batches[:_LOSSES]]
        except Exception as error:  # of an opponent
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        print(f"{work.name}, {count} members: {name} is ready", file=sys.stderr, flush=True)
        row["first_s"] = round(time.perf_counter() - start, 2)
        if device.type == "cuda":
            row["mib"] = round((_used(device) - before) / 2**20, 1)
        expected = expected or losses
        row["apart"] = max(
            float(((one - other) / other).abs().max()) for one, other in zip(losses, expected, strict=True)
        )
        if row["apart"] > work.tolerance:
            row["error"] = "other losses than the first system's"
            continue
        systems[name] = system
    for name, times in zip(systems, in_turns([*systems.values()], _TURNS), strict=True):
        rows[name] |= {"ms": times.median, "least": times.least, "most": times.most}
        systems[name].close()
    return list(rows.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program, and print a line of JSON for each system."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser("python -m tests.bench.members", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--workload", choices=tuple(WORKLOADS), nargs="+", default=list(WORKLOADS))
    parser.add_argument("--members", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--system", choices=tuple(SYSTEMS), nargs="+", default=list(SYSTEMS))
    options = parser.parse_args(argv)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    print(json.dumps(environment(device)), flush=True)
    for name in options.workload:
        for count in options.members:
            for row in _rows(WORKLOADS[name], options.system, count, device):
                print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
