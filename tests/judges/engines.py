"""What TransformerEngine's tests of CUDA graphs mean, with plain modules of torch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_cg as fcg
from tests.judges.rows import Verdict
from tests.judges.scenarios import Program, Scenarios, holds, left_out, raises, same

__all__ = ["ENGINES"]

WIDTH, HEADS, LENGTH, ROWS = 32, 2, 8, 2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(self.norm(x))))

        return checkpoint(inner, x, use_reentrant=False) if self.recompute else inner(x)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), _Attention(), _MLP()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm(x), mask)
        return x + self.mlp(x)


MODULES: tuple[tuple[str, Callable[[], nn.Module]], ...] = (
    ("linear", lambda: nn.Linear(WIDTH, WIDTH)),
    ("transformer", _Layer),
    ("layernorm_mlp_nocheckpoint", _MLP),
    ("layernorm_mlp_checkpoint", lambda: _MLP(recompute=True)),
    ("layernorm_linear", lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))),
    ("mha", _Attention),
)


def _data(device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, device=device, dtype=dtype)


def _by_torch(model: nn.Module, batches: Any, wide: bool = False) -> list[Tensor]:
    """Parameters after steps of two micro-batches each, and the last output."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for slices in batches:
        optimizer.zero_grad(set_to_none=False)
        for inputs, grad in slices:
            given = [x.double() if wide and x.is_floating_point() else x for x in inputs]
            out = model(*given)
            out.backward(grad.double() if wide else grad)
        optimizer.step()
    return [*(p.detach() for p in model.parameters()), out.detach()]


def _trains(model: nn.Module, batches: Any, lowering: str, where: str) -> Iterator[Verdict]:
    """A step of two micro-batches against the loop of torch."""
    apply, params, buffers = fcg.from_module(model)

    def train(state: Any, slices: Any) -> Any:
        total = None
        for inputs, upstream in slices:

            def loss_fn(params: Any, inputs: Any = inputs, upstream: Any = upstream) -> Any:
                out, _ = apply(params, buffers, *inputs)
                return (out * upstream).float().sum(), out

            (_, out), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
            total = grads if total is None else fcg.tree.map(torch.add, total, grads)
        return state.apply_gradients(total), {"out": out}

    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.001))
    with fcg.graph_step(train, lowering=lowering) as step:
        for slices in batches:
            state, metrics = step(state, slices)
        got = [*fcg.snapshot(state.params).values(), metrics["out"]]
    names = list(dict(model.named_parameters()))
    order = [names.index(name) for name in state.params]
    expected = _by_torch(_twin(model), batches)
    exact = _by_torch(_twin(model).double(), batches, wide=True)
    rows = [*order, len(names)]
    yield from same(got, [expected[i] for i in rows], where, [exact[i] for i in rows])


def _twin(model: nn.Module) -> nn.Module:
    """A copy whose parameters are fresh leaves."""
    import copy

    return copy.deepcopy(model)


def _kind(name: str, make: Callable[[], nn.Module]) -> Program:
    def program(lowering: str, device: str) -> Iterator[Verdict]:
        for dtype in DTYPES:
            model = nn.Sequential(*(make() for _ in range(3))).to(device, dtype)
            batches = [[((_data(device, dtype),), _data(device, dtype)) for _ in range(2)] for _ in range(3)]
            yield from _trains(model, batches, lowering, str(dtype))

    program.__name__ = f"graphed callables {name}"
    return program


def graphed_callables_dot_product_attention(lowering: str, device: str) -> Iterator[Verdict]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))

    def value_and_gradients(inputs: Any, upstream: Tensor) -> Any:
        return fcg.value_and_grad(
            lambda leaves: ((out := attention(*leaves)) * upstream).float().sum() + 0 * out.sum().float()
        )(inputs)

    for dtype in DTYPES:
        step = fcg.graph_fn(value_and_gradients, lowering=lowering)
        for _ in range(3):
            inputs = [torch.randn(ROWS, LENGTH, HEADS, 16, device=device, dtype=dtype) for _ in range(3)]
            upstream = torch.randn(ROWS, HEADS, LENGTH, 16, device=device, dtype=dtype)
            _, got = step(inputs, upstream)
            answers = []
            for wide in (False, True):
                kind = torch.float64 if wide else dtype
                leaves = [x.to(kind, copy=True).requires_grad_() for x in inputs]
                answers.append(torch.autograd.grad(attention(*leaves), leaves, upstream.to(kind)))
            yield from same(got, list(answers[0]), str(dtype), list(answers[1]))


def keyword_inputs(lowering: str, device: str) -> Iterator[Verdict]:
    """A mask by keyword that changes at each call."""
    model = _Layer().to(device)
    apply, params, buffers = fcg.from_module(model)

    @fcg.graph_fn(lowering=lowering)
    def gradients(params: Any, x: Tensor, upstream: Tensor, mask: Tensor) -> Any:
        return fcg.grad(lambda p: (apply(p, buffers, x, mask=mask)[0] * upstream).sum())(params)

    for _ in range(3):
        x, upstream = _data(device, torch.float32), _data(device, torch.float32)
        mask = torch.rand(ROWS, 1, LENGTH, LENGTH, device=device) > 0.3
        mask |= torch.eye(LENGTH, dtype=torch.bool, device=device)
        got = gradients(params, x, upstream, mask=mask)
        answers = []
        for twin, kind in ((_twin(model), torch.float32), (_twin(model).double(), torch.float64)):
            (twin(x.to(kind), mask=mask) * upstream.to(kind)).sum().backward()
            answers.append({name: p.grad for name, p in twin.named_parameters()})
        names = list(got)
        yield from same(
            [got[n] for n in names], [answers[0][n] for n in names], "", [answers[1][n] for n in names]
        )


def interleaved_order_of_micro_batches(lowering: str, device: str) -> Iterator[Verdict]:
    """Two layers, three micro-batches: forwards and backwards in the order of an interleaved pipeline."""
    order = (1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1)
    layers = [nn.Linear(WIDTH, WIDTH).to(device) for _ in range(2)]
    weights = [{name: p.detach().clone() for name, p in layer.named_parameters()} for layer in layers]

    def schedule(weights: Any, xs: Any, upstream: Any) -> Any:
        leaves = [{n: p.detach().requires_grad_() for n, p in layer.items()} for layer in weights]
        done, outs, grads = {}, {}, [None, None]
        count = {i: 0 for i in (1, 2, -1, -2)}
        for move in order:
            layer, micro = abs(move) - 1, count[move]
            count[move] += 1
            if move > 0:
                outs[layer, micro] = F.linear(
                    xs[layer][micro], leaves[layer]["weight"], leaves[layer]["bias"]
                )
                continue
            flat = [leaves[layer]["weight"], leaves[layer]["bias"]]
            new = torch.autograd.grad(outs[layer, micro], flat, upstream[layer][micro])
            old = grads[layer]
            grads[layer] = new if old is None else [a + b for a, b in zip(old, new, strict=True)]
            done[layer, micro] = outs[layer, micro].detach()
        return [list(g) for g in grads], [done[key] for key in sorted(done)]

    step = fcg.graph_fn(schedule, lowering=lowering)
    for _ in range(3):
        xs, upstream = (
            [[_data(device, torch.float32) for _ in range(3)] for _ in range(2)] for _ in range(2)
        )
        wide = fcg.tree.map(torch.Tensor.double, (weights, xs, upstream))
        yield from same(step(weights, xs, upstream), schedule(weights, xs, upstream), "", schedule(*wide))


def gradients_are_retained(lowering: str, device: str) -> Iterator[Verdict]:
    """Outputs and gradients of a call stay as they are while later calls run."""
    gradient = fcg.graph_fn(lambda x: fcg.value_and_grad(lambda x: x.square().sum())(x), lowering=lowering)
    inputs = [torch.full((4096,), float(i), device=device) for i in range(1, 5)]
    results = [gradient(x) for x in inputs]
    for x, (value, grad) in zip(inputs, results, strict=True):
        yield from same((value, grad), (x.square().sum(), 2 * x))
    yield holds(len({grad.data_ptr() for _, grad in results}) == 4, "each call has memory of its own")


def shared_keyword_is_copied(lowering: str, device: str) -> Iterator[Verdict]:
    """A scale that the caller overwrites after the call is not read again."""
    gradient = fcg.graph_fn(lambda x, scale: fcg.grad(lambda x: (x * scale).sum())(x), lowering=lowering)
    x, scale = torch.ones(4096, device=device), torch.full((4096,), 2.0, device=device)
    first = gradient(x, scale=scale)
    scale.fill_(3.0)
    second = gradient(x, scale=scale)
    yield from same((first, second), (torch.full_like(x, 2.0), torch.full_like(x, 3.0)))


def variants_without_elements(lowering: str, device: str) -> Iterator[Verdict]:
    for elements in (0, 4096):
        gradient = fcg.graph_fn(
            lambda x: fcg.value_and_grad(lambda x: x.square().sum() * 3.0)(x), lowering=lowering
        )
        for seed in range(2):
            x = torch.full((elements,), 0.5 + seed, device=device)
            yield from same(gradient(x), (x.square().sum() * 3.0, 6.0 * x), str(elements))


def first_microbatch_flag(lowering: str, device: str) -> Iterator[Verdict]:
    """A Python flag, as for cached fp8 weights: each value has its own capture, and none is frozen."""

    def cached(state: Any, x: Tensor, is_first_microbatch: bool) -> Any:
        cache = state["w"] * 2 if is_first_microbatch else state["cache"]
        return {"w": state["w"] + 1, "cache": cache}, {"y": x * cache}

    step = fcg.graph_step(cached, lowering=lowering, static_argnames=("is_first_microbatch",))
    state = fcg.place({"w": torch.ones(3, device=device), "cache": torch.zeros(3, device=device)})
    w, cache = 1.0, 0.0
    for call in range(6):
        first = call % 2 == 0
        cache = 2 * w if first else cache
        state, metrics = step(state, torch.ones(3, device=device), is_first_microbatch=first)
        yield from same(metrics["y"], torch.full((3,), cache, device=device))
        w += 1


def state_of_the_process_is_restored(lowering: str, device: str) -> Iterator[Verdict]:
    """An error in a trace leaves garbage collection, gradients, hooks and random numbers as they were."""
    model = nn.Linear(3, 3).to(device)
    apply, params, buffers = fcg.from_module(model)
    x = torch.ones(2, 3, device=device, requires_grad=True)
    x.grad = torch.full_like(x, 2.0)
    kept, hooks, random = x.grad, len(model._forward_hooks), torch.get_rng_state()

    def fails(params: Any, x: Tensor) -> Any:
        apply(params, buffers, x)
        raise RuntimeError("capture failed")

    gc.enable()
    step = fcg.graph_fn(fails, lowering=lowering)
    yield raises((RuntimeError, fcg.CaptureError), lambda: step(params, x.detach()), "the error arrives")
    yield holds(gc.isenabled(), "garbage collection is on")
    yield holds(x.grad is kept, "the gradient is the same object")
    yield holds(len(model._forward_hooks) == hooks, "the module has no new hook")
    yield holds(torch.equal(random, torch.get_rng_state()), "the generator has drawn nothing")
    yield holds(torch.is_grad_enabled() and type(model).__call__ is nn.Module.__call__, "modes and methods")


def module_that_keeps_its_output(lowering: str, device: str) -> Iterator[Verdict]:
    """A tensor that is kept on a module would be stale after the next call: refused."""

    class Keeps(nn.Module):
        kept: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.kept = x.square() * 3.0
            return self.kept

    model = Keeps()
    gradient = fcg.graph_fn(lambda x: fcg.grad(lambda x: model(x).sum())(x), lowering=lowering)
    x = torch.ones(4, device=device)
    yield from same(gradient(x), 6 * x)


ENGINES = Scenarios(
    "TransformerEngine",
    (
        *(_kind(name, make) for name, make in MODULES),
        graphed_callables_dot_product_attention,
        keyword_inputs,
        interleaved_order_of_micro_batches,
        gradients_are_retained,
        shared_keyword_is_copied,
        variants_without_elements,
        first_microbatch_flag,
        state_of_the_process_is_restored,
        module_that_keeps_its_output,
        left_out("test_cp_p2p_transport_group_override", why="context parallelism of that library"),
        left_out(
            "test_slot_memory_rejects_non_native_allocator",
            "test_slot_memory_checkpoint_rolls_back_restore_failure",
            "test_slot_memory_fork_reuses_native_saved_allocations",
            "test_slot_memory_checkpoint_aliases_parameter_gradients",
            why="slots of graph memory that a caller lays out; a step has one graph and one arena",
        ),
    ),
)
