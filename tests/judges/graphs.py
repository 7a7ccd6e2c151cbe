"""torch's tests of CUDA graphs (`test_cuda.py`) and of graph trees (`test_cudagraph_trees.py`), as pure functions."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_cg as fcg
from tests.judges.rows import Verdict
from tests.judges.scenarios import Scenarios, holds, left_out, raises, same

__all__ = ["GRAPHS"]

# -- test_cuda.py -------------------------------------------------------------------------------------------------


def graph_simple(lowering: str, device: str) -> Iterator[Verdict]:
    def body(x: Tensor) -> Tensor:
        for _ in range(10):
            x = x + 1
        return x

    step = fcg.graph_fn(body, lowering=lowering)
    for value in (0.0, 5.0):
        x = torch.full((1000,), value, device=device)
        yield from same(step(x), x + 10)


def graph_is_reset_and_captured_again(lowering: str, device: str) -> Iterator[Verdict]:
    step = fcg.graph_fn(lambda x: x * 2, lowering=lowering)
    first = step(torch.ones(3, device=device))
    step.close()
    yield from same(first, torch.full((3,), 2.0, device=device), "a result after `close`")
    again = step.anew()
    yield from same(again(torch.ones(5, device=device)), torch.full((5,), 2.0, device=device))


def results_outlive_the_graph(lowering: str, device: str) -> Iterator[Verdict]:
    with fcg.graph_fn(lambda x: (x + 1, x.sum()), lowering=lowering) as step:
        results = [step(torch.full((3,), float(i), device=device)) for i in range(4)]
    for i, result in enumerate(results):
        x = torch.full((3,), float(i), device=device)
        yield from same(result, (x + 1, x.sum()))


def successive_graphs(lowering: str, device: str) -> Iterator[Verdict]:
    """Two and three graphs, each on the results of the one before, replayed in every order."""
    one = fcg.graph_fn(lambda x: x + 1, lowering=lowering)
    two = fcg.graph_fn(lambda x: x * 3, lowering=lowering)
    three = fcg.graph_fn(lambda x: x - 2, lowering=lowering)
    x = torch.arange(4.0, device=device)
    a = one(x)
    b = two(a)
    c = three(b)
    for step, given, expected in (
        (two, a, (x + 1) * 3),
        (one, b, (x + 1) * 3 + 1),
        (three, c, (x + 1) * 3 - 4),
    ):
        yield from same(step(given), expected)
    yield from same((a, b, c), (x + 1, (x + 1) * 3, (x + 1) * 3 - 2), "what was kept")


def graph_without_work(lowering: str, device: str) -> Iterator[Verdict]:
    step = fcg.graph_fn(lambda x: x, lowering=lowering)
    x = torch.ones(3, device=device)
    for _ in range(2):
        y = step(x)
        yield from same(y, x)
    x.add_(1)
    yield from same(y, torch.ones(3, device=device), "the result is no alias of the input")


DRAWS = (
    lambda x: torch.rand_like(x),
    lambda x: torch.empty_like(x).normal_(),
    lambda x: torch.empty_like(x).uniform_(),
    lambda x: torch.empty_like(x).exponential_(),
    lambda x: torch.empty_like(x).cauchy_(),
    lambda x: torch.empty_like(x).log_normal_(),
    lambda x: torch.bernoulli(x),
    lambda x: torch.multinomial(x, 2),
    lambda x: torch.randperm(4, device=x.device),
    lambda x: F.dropout(x, 0.5, training=True),
    lambda x: F.rrelu(x, training=True),
    lambda x: torch.poisson(x),
)


def generators_are_refused(lowering: str, device: str) -> Iterator[Verdict]:
    """torch registers a generator with a graph; here randomness comes from keys."""
    for number, draw in enumerate(DRAWS):
        step = fcg.graph_fn(draw, lowering=lowering)
        x = torch.full((4,), 0.5, device=device)
        yield raises(fcg.ImplicitRandomnessError, lambda step=step, x=x: step(x), f"draw {number}")


def random_numbers_differ_at_each_replay(lowering: str, device: str) -> Iterator[Verdict]:
    def body(key: Tensor, count: Tensor, x: Tensor) -> Any:
        now = fcg.random.fold_in(key, count)
        one, two = fcg.random.split(now)
        return fcg.random.dropout(one, x, 0.5), fcg.random.normal(two, (64,))

    step = fcg.graph_fn(body, lowering=lowering)
    key, x = fcg.random.key(7).to(device), torch.ones(64, device=device)
    seen = []
    for count in range(4):
        given = torch.tensor(count, device=device)
        results = step(key, given, x)
        yield from same(results, body(key, given, x))
        seen.append(results)
    yield holds(len({tuple(mask.tolist()) for mask, _ in seen}) == 4, "masks differ")
    yield from same(
        step(key, torch.tensor(1, device=device), x), seen[1], "the same key gives the same numbers"
    )


def gradient_scaling(lowering: str, device: str) -> Iterator[Verdict]:
    """Scale, skipped steps and parameters beside `torch.amp.GradScaler`, with infinite gradients in between."""
    scaler = torch.amp.GradScaler(device, init_scale=4096.0, growth_interval=3)
    weight = torch.ones(4, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25)

    class Scaled(fcg.TrainState):
        scale: Any

    def train(state: Any, x: Tensor) -> Any:
        grads = fcg.grad(lambda p: state.scale.scaled((p["w"] * x).sum()))(state.params)
        grads = state.scale.unscaled(grads)
        finite = fcg.optim.global_norm(grads).isfinite()
        new = state.apply_gradients(grads)
        kept = fcg.cond(finite, lambda: new, lambda: state)
        return kept.replace(scale=state.scale.adjusted(finite)), {"scale": state.scale.adjusted(finite).scale}

    state = Scaled.create(
        params={"w": torch.ones(4, device=device)},
        optimizer=fcg.optim.sgd(0.25),
        scale=fcg.LossScale.create(4096.0, growth_interval=3, device=device),
    )
    step = fcg.graph_step(train, lowering=lowering)
    for value in (1.0, 2.0, float("inf"), 1.0, 1.0, 1.0, float("inf"), 0.5):
        x = torch.full((4,), value, device=device)
        optimizer.zero_grad()
        scaler.scale((weight * x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        state, metrics = step(state, x)
        yield from same(fcg.snapshot(state.params)["w"], weight.detach(), f"after {value}")
        yield holds(float(metrics["scale"]) == scaler.get_scale(), f"the scale after {value}")


def callables_with_and_without_autocast(lowering: str, device: str) -> Iterator[Verdict]:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(device)
    apply, params, buffers = fcg.from_module(model)
    for enabled in (False, True):

        def gradients(params: Any, x: Tensor, enabled: bool = enabled) -> Any:
            def loss_fn(params: Any) -> Tensor:
                with torch.autocast(device, torch.bfloat16, enabled=enabled):
                    out = apply(params, buffers, x)[0]
                return out.float().square().mean()

            return fcg.value_and_grad(loss_fn)(params)

        step = fcg.graph_fn(gradients, lowering=lowering)
        for _ in range(2):
            x = torch.randn(4, 16, device=device)
            answers = []
            for wide in (False, True):
                twin = copy.deepcopy(model).double() if wide else copy.deepcopy(model)
                with torch.autocast(device, torch.bfloat16, enabled=enabled and not wide):
                    out = twin(x.double() if wide else x)
                loss = out.square().mean() if wide else out.float().square().mean()
                loss.backward()
                answers.append((loss.detach(), {name: p.grad for name, p in twin.named_parameters()}))
            loss, grads = step(params, x)
            names = list(grads)
            flat = [(one[0], [one[1][n] for n in names]) for one in answers]
            yield from same((loss, [grads[n] for n in names]), flat[0], f"autocast {enabled}", flat[1])


def recurrent_dropout(lowering: str, device: str) -> Iterator[Verdict]:
    """An LSTM whose dropout torch draws inside of a kernel."""
    model = nn.LSTM(8, 8, 2, dropout=0.5).to(device)
    apply, params, buffers = fcg.from_module(model)
    step = fcg.graph_fn(lambda p, x: apply(p, buffers, x)[0][0], lowering=lowering)
    x = torch.randn(5, 2, 8, device=device)
    yield raises(fcg.FunctionalCGError, lambda: step(params, x), "drawn inside of a kernel")


def host_reads_are_refused(lowering: str, device: str) -> Iterator[Verdict]:
    x = torch.ones(3, device=device)
    bodies = {
        "item": lambda x: x * x.sum().item(),
        "if": lambda x: x if x.sum() > 0 else -x,
        "nonzero": lambda x: x.nonzero().float(),
        "mask": lambda x: x[x > 0],
        "tolist": lambda x: x * x.tolist()[0],
    }
    for name, body in bodies.items():
        step = fcg.graph_fn(body, lowering=lowering)
        yield raises(fcg.HostSyncError, lambda step=step: step(x), name)


def unused_and_frozen_parameters(lowering: str, device: str) -> Iterator[Verdict]:
    params = {"used": torch.ones(3, device=device), "unused": torch.ones(3, device=device)}
    step = fcg.graph_fn(lambda p: fcg.grad(lambda p: (p["used"] * 2).sum())(p), lowering=lowering)
    for _ in range(2):
        yield from same(
            step(params),
            {"used": torch.full((3,), 2.0, device=device), "unused": torch.zeros(3, device=device)},
        )


def module_without_parameters_under_no_grad(lowering: str, device: str) -> Iterator[Verdict]:
    apply, params, buffers = fcg.from_module(nn.ReLU())

    def body(x: Tensor) -> Tensor:
        with torch.no_grad():
            return apply(params, buffers, x)[0]

    step = fcg.graph_fn(body, lowering=lowering)
    for _ in range(2):
        x = torch.randn(6, device=device)
        y = step(x)
        yield from same(y, x.relu())
        yield holds(not y.requires_grad, "no gradient")


# -- test_cudagraph_trees.py --------------------------------------------------------------------------------------


def inputs_written_in_place(lowering: str, device: str) -> Iterator[Verdict]:
    step = fcg.graph_fn(lambda x, y: (x.add_(y), x.mul_(2).sum()), lowering=lowering)
    x, y = torch.ones(4, device=device), torch.ones(4, device=device)
    for _ in range(3):
        yield from same(step(x, y), (torch.full((4,), 4.0, device=device), torch.tensor(16.0, device=device)))
        yield from same(x, torch.ones(4, device=device), "the input")


def outputs_that_alias(lowering: str, device: str) -> Iterator[Verdict]:
    def body(x: Tensor) -> Any:
        y = x * 2
        return y, y[1:], y.view(2, 2), y.t() if y.dim() == 2 else y.flip(0), x

    step = fcg.graph_fn(body, lowering=lowering)
    kept = [(x, step(x)) for x in (torch.arange(4.0, device=device), torch.ones(4, device=device))]
    for x, results in kept:
        yield from same(results, body(x))
    kept[0][1][0].add_(100)
    yield from same(kept[0][1][1], body(kept[0][0])[1], "writing one result leaves the others")


def expanded_and_unaligned_inputs(lowering: str, device: str) -> Iterator[Verdict]:
    step = fcg.graph_fn(lambda x, y: (x + 1, y * 2, (x * y[:4]).sum()), lowering=lowering)
    for value in (1.0, 3.0):
        x = torch.tensor([value], device=device).expand(4)
        y = torch.arange(9.0, device=device)[1:]
        got = step(x, y)
        yield from same(got, (x.contiguous() + 1, y * 2, (x * y[:4]).sum()))


def storage_without_elements(lowering: str, device: str) -> Iterator[Verdict]:
    step = fcg.graph_fn(lambda x, y: (torch.cat([x, y]), x.sum(), x * 2), lowering=lowering)
    x, y = torch.empty(0, 3, device=device), torch.ones(2, 3, device=device)
    for _ in range(2):
        yield from same(step(x, y), (torch.cat([x, y]), x.sum(), x * 2))


def several_live_results(lowering: str, device: str) -> Iterator[Verdict]:
    """Results of three functions stay alive together, and feed each other."""
    f = fcg.graph_fn(lambda x: (x @ x, x.relu()), lowering=lowering)
    g = fcg.graph_fn(lambda a, b: (a + b, (a - b).square()), lowering=lowering)
    x = torch.arange(9.0, device=device).reshape(3, 3) / 4
    for _ in range(3):
        a, b = f(x)
        c, d = g(a, b)
        e, _ = f(c / 64)
        yield from same((a, b, c, d), (x @ x, x.relu(), x @ x + x.relu(), (x @ x - x.relu()).square()))
        yield from same(e, (c / 64) @ (c / 64), "", (c.double() / 64) @ (c.double() / 64))


def constants_and_host_numbers(lowering: str, device: str) -> Iterator[Verdict]:
    def body(x: Tensor, scale: Any) -> Any:
        return x * scale + torch.tensor([1.0, 2.0], device=x.device), torch.ones(2, device=x.device)

    step = fcg.graph_fn(body, lowering=lowering)
    for scale in (2.0, 3.0):
        x = torch.ones(2, device=device)
        yield from same(step(x, scale), body(x, scale))


def accumulating_index_put(lowering: str, device: str) -> Iterator[Verdict]:
    def body(x: Tensor, index: Tensor, values: Tensor) -> Any:
        return x.index_put((index,), values, accumulate=True), x.index_add(0, index, values)

    step = fcg.graph_fn(body, lowering=lowering)
    for offset in (0, 1):
        x, values = torch.zeros(5, device=device), torch.tensor([1.0, 2.0, 4.0], device=device)
        index = (torch.tensor([1, 1, 3], device=device) + offset) % 5
        yield from same(step(x, index, values), body(x, index, values))


def forward_alone_then_with_backward(lowering: str, device: str) -> Iterator[Verdict]:
    """Evaluation and training of one function alternate, as generations of a tree."""

    def loss_of(w: Tensor, x: Tensor) -> Tensor:
        return (x * w).square().sum()

    evaluate = fcg.graph_fn(loss_of, lowering=lowering)
    train = fcg.graph_step(
        lambda state, x: ({"w": state["w"] - fcg.grad(loss_of)(state["w"], x) / 8}, {}), lowering=lowering
    )
    state, w = fcg.place({"w": torch.ones(3, device=device)}), torch.ones(3, device=device)
    for value in (1.0, 0.5, 1.0):
        x = torch.full((3,), value, device=device)
        yield from same(evaluate(state["w"], x), loss_of(w, x))
        state, _ = train(state, x)
        w = w - 2 * x * x * w / 8
        yield from same(fcg.snapshot(state)["w"], w)


def other_shapes(lowering: str, device: str) -> Iterator[Verdict]:
    one = fcg.graph_fn(lambda x: x + 1, lowering=lowering)
    one(torch.ones(3, device=device))
    yield raises(fcg.LayoutError, lambda: one(torch.ones(4, device=device)), "a second shape")
    many = fcg.graph_fn(lambda x: x + 1, lowering=lowering, max_captures=3)
    for size in (3, 4, 5, 3, 4):
        x = torch.full((size,), float(size), device=device)
        yield from same(many(x), x + 1)


def convolution_and_its_gradient(lowering: str, device: str) -> Iterator[Verdict]:
    def body(w: Tensor, x: Tensor) -> Any:
        return fcg.value_and_grad(lambda w: F.conv2d(x, w, padding=1).sum())(w)

    step = fcg.graph_fn(body, lowering=lowering)
    w = torch.randint(-2, 3, (4, 3, 3, 3), device=device).float()
    for _ in range(2):
        x = torch.randint(-2, 3, (2, 3, 8, 8), device=device).float()
        leaf = w.clone().requires_grad_()
        loss = F.conv2d(x, leaf, padding=1).sum()
        yield from same(step(w, x), (loss.detach(), torch.autograd.grad(loss, leaf)[0]))


GRAPHS = Scenarios(
    "PyTorch graphs",
    (
        graph_simple,
        graph_is_reset_and_captured_again,
        results_outlive_the_graph,
        successive_graphs,
        graph_without_work,
        generators_are_refused,
        random_numbers_differ_at_each_replay,
        gradient_scaling,
        callables_with_and_without_autocast,
        recurrent_dropout,
        host_reads_are_refused,
        unused_and_frozen_parameters,
        module_without_parameters_under_no_grad,
        inputs_written_in_place,
        outputs_that_alias,
        expanded_and_unaligned_inputs,
        storage_without_elements,
        several_live_results,
        constants_and_host_numbers,
        accumulating_index_put,
        forward_alone_then_with_backward,
        other_shapes,
        convolution_and_its_gradient,
        left_out(
            "test_graph_optims*", "test_graph_scaling_fused_optimizers", why="the judge torch.optim has them"
        ),
        left_out(
            "test_graph_debugdump",
            "test_graph_memory_stats*",
            "test_graph_record_stream",
            "test_graph_error_options",
            why="about torch's own objects and allocator",
        ),
        left_out(
            "test_checkpointing_*",
            "test_unstable_ptr",
            "test_cleanup",
            "test_warnings_on_dealloc",
            "test_manager_per_device",
            why="about the tree that manages recordings; a step has one graph",
        ),
    ),
)
