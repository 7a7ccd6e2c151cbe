"""The trial of a compiled step: planted mistakes are refused before anything is committed, and rounding is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.compiled_graphs import ON_A_GPU, lower_as_on_a_gpu

aten = torch.ops.aten
DEVICES = ["cpu", ON_A_GPU]
Plant = Callable[[fx.Graph], None]


class Following(fcg.TrainState):
    target: Any
    mean: Any


def train_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Tensor:
        hidden = torch.tanh(batch["x"] @ params["w1"] + params["b1"])
        return F.mse_loss(hidden @ params["w2"], batch["y"])

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    new = state.apply_gradients(grads)
    mean = state.mean.lerp(batch["x"].mean(0), 0.1)
    metrics = {"loss": loss, "moved": mean - state.mean}
    return new.replace(target=fcg.tree.map(torch.clone, state.params), mean=mean), metrics


def a_state(device: str) -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (6, 8), "b1": (8,), "w2": (8, 6)}
    params = {name: torch.randn(shape, generator=generator).to(device) / 4 for name, shape in shapes.items()}
    # The rate begins at zero: at the first step old and new parameters are the same.
    optimizer = fcg.optim.adamw(fcg.optim.warmup_cosine(1e-3, 10, 100), weight_decay=0.1)
    return Following.create(
        params=params, optimizer=optimizer, target=fcg.snapshot(params), mean=torch.zeros(6).to(device)
    )


def a_batch(device: str, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, 6, generator=generator).to(device) for name in ("x", "y")}


def calls(graph: fx.Graph, op: Any) -> list[fx.Node]:
    found: list[fx.Node] = graph.find_nodes(op="call_function", target=op)
    assert found, f"no {op} to plant a mistake in:\n{graph}"
    return found


def drops_a_clone(graph: fx.Graph) -> None:
    """The target is the parameter's slot itself, read when the slot has its new value."""
    for clone in calls(graph, aten.clone.default):
        (write,) = [user for user in clone.users if user.target is aten.copy_.default]
        clone.replace_all_uses_with(clone.args[0])
        graph.erase_node(clone)
        last = graph.output_node().prev
        if write is not last:
            last.append(write)


def writes_early(graph: fx.Graph) -> None:
    """A slot has its new value as soon as that is known, when the old one is still to be read."""
    (write,) = [one for one in calls(graph, aten.copy_.default) if one.args[0].meta["spec"].shape == (6,)]
    write.args[1].append(write)


def reads_by_a_wrong_stride(graph: fx.Graph) -> None:
    """A square input is read as if it lay the other way round."""
    x = next(node for node in graph.find_nodes(op="placeholder") if node.meta["spec"].shape == (6, 6))
    with graph.inserting_after(x):
        turned = graph.call_function(aten.as_strided.default, (x, [6, 6], [1, 6]))
    x.replace_all_uses_with(turned, delete_user_cb=lambda user: user is not turned)


def sums_over_the_wrong_axis(graph: fx.Graph) -> None:
    (mean,) = calls(graph, aten.mean.dim)
    mean.args = (mean.args[0], [1], *mean.args[2:])


def nothing(graph: fx.Graph) -> None:
    pass


def compiler(plant: Plant) -> Callable[..., Any]:
    """A compiler that only makes the one mistake."""

    def compile_graph(graph: fx.GraphModule, arguments: Any, **options: Any) -> Any:
        plant(graph.graph)
        graph.graph.lint()
        graph.recompile()
        return graph

    return compile_graph


def stale(graph: fx.GraphModule, arguments: Any, **options: Any) -> Any:
    """Reads the inputs that it was compiled with."""
    places = [node.meta["spec"].shape == (6, 6) for node in graph.graph.find_nodes(op="placeholder")]
    kept = [one.clone() if stays else None for one, stays in zip(arguments, places, strict=True)]
    return lambda *given: graph(*(one if old is None else old for one, old in zip(given, kept, strict=True)))


def stale_since_the_first_run(graph: fx.GraphModule, arguments: Any, **options: Any) -> Any:
    places = [node.meta["spec"].shape == (6, 6) for node in graph.graph.find_nodes(op="placeholder")]
    kept: list[Any] = []

    def run(*given: Tensor) -> Any:
        if not kept:
            kept.extend(one.clone() if stays else None for one, stays in zip(given, places, strict=True))
        return graph(*(one if old is None else old for one, old in zip(given, kept, strict=True)))

    return run


MISTAKES = {
    "a dropped clone": (compiler(drops_a_clone), r"state\.target\['w1'\]"),
    "an early write": (compiler(writes_early), r"metrics\['moved'\]"),
    "a wrong stride": (compiler(reads_by_a_wrong_stride), r"metrics\['loss'\]"),
    "a sum over the wrong axis": (compiler(sums_over_the_wrong_axis), r"state\.mean"),
    "a stale input": (stale, r"metrics\['loss'\]"),
    "an input of the first run": (stale_since_the_first_run, r"metrics\['loss'\]"),
}


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Lets steps be compiled by a function of ours, in graphs that write the slots, as on a GPU."""

    def by(compile_graph: Any) -> None:
        monkeypatch.setattr("functional_cg.transform.lower", lower_as_on_a_gpu)
        monkeypatch.setattr("functional_cg.stages.compiled.compile_graph", compile_graph)

    return by


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_refused(mistake: str, device: str, in_place: Callable[[Any], None]) -> None:
    compile_graph, where = MISTAKES[mistake]
    in_place(compile_graph)
    state, batch = a_state(device), a_batch(device)
    before = fcg.snapshot(state)
    step = fcg.graph_step(train_step, lowering="inductor")
    with pytest.raises(
        fcg.MiscompileError, match=rf"{where}(.|\n)*differs by .*, computed at test_trial.py:"
    ):
        step(state, batch)
    assert_trees_all_equal(state, before)
    assert state.generation == 0
    assert step.stats.replays == 0


@pytest.mark.parametrize("device", DEVICES)
def test_no_mistake_is_none(device: str, in_place: Callable[[Any], None]) -> None:
    in_place(compiler(nothing))
    state, step = a_state(device), fcg.graph_step(train_step, lowering="inductor")
    twin = fcg.fork(state)
    state, metrics = step(state, a_batch(device))
    twin, expected = step.eager(twin, a_batch(device))
    torch.testing.assert_close(metrics["loss"], expected["loss"])
    assert "  certified: " in step.explain()
