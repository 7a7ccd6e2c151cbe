"""Programs written to break a step: the surroundings of the call are unusual, the result is not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import functional_cg as fcg
from functional_cg.testing import Simulator

_OPTIMIZERS = {
    "sgd": fcg.optim.sgd(0.1, momentum=0.9),
    "adam": fcg.optim.adam(0.1),
    "adamw": fcg.optim.adamw(0.1, weight_decay=0.01),
    "adagrad": fcg.optim.adagrad(0.1),
}


def _same(a: Any, b: Any) -> bool:
    pairs = zip(fcg.tree.leaves(fcg.snapshot(a)), fcg.tree.leaves(fcg.snapshot(b)), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("name", _OPTIMIZERS)
@pytest.mark.parametrize("backend", ["auto", "simulator"])
def test_gradients_overwritten_after_the_update_do_not_change_it(name: str, backend: str) -> None:
    """A fused update that moved to the end of the replay would read gradients that are zero by then."""
    tx = _OPTIMIZERS[name]

    def update(state: Any, x: torch.Tensor) -> tuple[Any, Any]:
        grads = fcg.grad(lambda params: ((x @ params["w"]) ** 2).mean())(state.params)
        state = state.apply_gradients(grads)
        grads["w"].view(-1)[1:].zero_()
        return state, {"grad": grads["w"]}

    step = fcg.graph_step(update, backend=Simulator() if backend == "simulator" else "auto", lowering="aten")
    state = fcg.TrainState.create(params={"w": torch.randn(4, 3)}, optimizer=tx)
    twin = fcg.fork(state)
    for _ in range(3):
        x = torch.randn(5, 4)
        state, metrics = step(state, x)
        twin, expected = step.eager(twin, x)
        assert _same(state, twin)
        assert _same(metrics, expected)


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Threads that take turns as often as Python allows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("restless_threads")
def test_threads_that_share_a_function_and_a_state_get_their_own_results() -> None:
    """Its input buffers belong to one call at a time, from the first call on."""
    scaled = fcg.graph_fn(lambda state, x: x * 2 + state["w"])
    state = fcg.place({"w": torch.ones(3)})
    wrong: list[Any] = []
    start = threading.Barrier(4)

    def work(number: float) -> None:
        try:
            start.wait()
            for _ in range(1000):
                got = scaled(state, torch.full((3,), number))[0].item()
                if got != 1 + 2 * number:
                    wrong.append((number, got))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert scaled.stats.traces == 1


@dataclass(frozen=True)
class _Update(fcg.optim.GradientTransformation):
    """Updates that are any function of gradients and parameters; remembers the parameters."""

    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def init(self, params: Any) -> Any:
        return {"seen": fcg.tree.map(torch.clone, params)}

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return fcg.tree.map(self.of, updates, params), {"seen": fcg.tree.map(torch.detach, params)}


@pytest.mark.parametrize(
    "of",
    [
        lambda g, p: -0.1 * g,
        lambda g, p: torch.cat([p, -0.1 * g])[g.shape[0] :],
        lambda g, p: torch.stack([p, -0.1 * g], 1)[:, 1],
        lambda g, p: (0.01 * g.sum()).expand_as(g),
    ],
    ids=["dense", "slice", "strided", "expanded"],
)
@pytest.mark.parametrize("backend", ["auto", "simulator"])
def test_flat_updates_may_be_views(of: Any, backend: str) -> None:
    """What a flat transformation returns need not begin at its storage's begin; two may keep one vector."""
    twice = fcg.optim.chain(fcg.optim.flatten(_Update(of)), fcg.optim.flatten(_Update(of)))
    values = {"w": torch.randn(4, 3), "b": torch.randn(3)}
    lengths = {name: value.numel() for name, value in values.items()}

    def update(state: Any, x: torch.Tensor) -> tuple[Any, Any]:
        grads = fcg.tree.map(lambda p: p * x.sum(), state["params"])
        updates, memory = twice.update(grads, state["memory"], state["params"])
        return {"params": updates, "memory": memory}, {}

    step = fcg.graph_step(update, backend=Simulator() if backend == "simulator" else "auto", lowering="aten")
    state = fcg.place({"params": values, "memory": twice.init(values)})
    plain = {"params": values, "memory": twice.init(values)}
    for _ in range(3):
        x = torch.randn(5)
        flat = [
            torch.cat([(plain["params"][name] * k).reshape(-1) for name in sorted(lengths)])
            for k in (x.sum(), torch.ones(()))
        ]
        vector = of(of(*flat), flat[1]).contiguous()
        b, w = vector[: lengths["b"]], vector[-lengths["w"] :].view(4, 3)
        state, _ = step(state, x)
        plain, _ = update(plain, x)
        assert _same(state, plain)
        if vector.numel() == sum(lengths.values()):
            torch.testing.assert_close(fcg.snapshot(state)["params"]["b"], b)
            torch.testing.assert_close(fcg.snapshot(state)["params"]["w"], w)


@pytest.mark.parametrize("backend", ["auto", "simulator"])
def test_offsets_into_a_storage_count_from_the_leaf(backend: str) -> None:
    """A leaf begins its storage in the pure function, and lies somewhere in a slab in the replay."""

    def window(state: Any, x: torch.Tensor) -> tuple[Any, Any]:
        return state, {
            "leaf": torch.as_strided(state["b"], (2,), (1,), 1),
            "batch": torch.as_strided(x["b"] * 1, (2,), (1,), 1) + torch.as_strided(x["b"], (2,), (1,), 1),
        }

    step = fcg.graph_step(window, backend=Simulator() if backend == "simulator" else "auto", lowering="aten")
    state = fcg.place({"a": torch.zeros(3), "b": torch.arange(4.0)})
    _, metrics = step(state, {"a": torch.zeros(3), "b": torch.arange(4.0)})
    assert metrics["leaf"].tolist() == [1.0, 2.0]
    assert metrics["batch"].tolist() == [2.0, 4.0]
