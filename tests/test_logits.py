"""Cross-entropies in a compiled plan: target logits are read first; loss and gradient are unchanged."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from functional_cg.stages.fx_passes.logits import read_targets_first
from functional_cg.state.arena import BufferSpec

N, CLASSES, IGNORED = 6, 11, 4
aten = torch.ops.aten


def recorded(fn: Any, *args: Tensor) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    module = make_fx(fn)(*args)
    for node in module.graph.nodes:  # as the graphs of steps have it
        if isinstance(value := node.meta.get("val"), Tensor):
            node.meta["spec"] = BufferSpec.of(value)
    return module


def loss_and_gradient(reduction: str, cast: Any, **options: Any) -> Any:
    def fn(h: Tensor, w: Tensor, target: Tensor) -> Any:
        logits = F.linear(h, w)
        loss = F.cross_entropy(
            cast(logits), target.flatten(), reduction=reduction, ignore_index=IGNORED, **options
        )
        return loss, *torch.autograd.grad(loss.sum(), [h, w])

    return fn


def arguments(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    h, w = torch.randn(2, N // 2, 5, dtype=dtype), torch.randn(CLASSES, 5, dtype=dtype)
    return h.requires_grad_(), w.requires_grad_(), torch.tensor([[0, IGNORED, 10], [3, 2, IGNORED]])


def widened(logits: Tensor) -> Tensor:
    return logits.flatten(0, 1).float()


def doubled(logits: Tensor) -> Tensor:
    return logits.flatten(0, 1).double()


def capped(logits: Tensor) -> Tensor:
    return widened(2.0 * torch.tanh(logits / 2.0))


def by_elements(logits: Tensor) -> Tensor:
    """Several calls by element, of which one reads its argument twice, views and a second cast between them.

    What is computed in halves is rounded in one way by every kernel: a last bit of a half, which a kernel for vectors
    and one for the rest of a row may leave different, is larger than any mistake that the test is to find.
    """
    scaled = (logits * 0.25).flatten(0, 1) + 1.0
    return (scaled * scaled).half().relu().double().sigmoid().exp().view(-1, CLASSES)


def written(logits: Tensor) -> Tensor:
    rows = logits.flatten(0, 1).double()
    rows[:, :3] = 0.5
    return rows


def targets(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes]


def doubled_and_capped(logits: Tensor) -> Tensor:
    return 2.0 * torch.tanh(doubled(logits) / 2.0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "cast", [doubled, doubled_and_capped, by_elements], ids=["plain", "capped", "by elements"]
)
def test_loss_and_gradients_are_the_same(cast: Any, reduction: str, dtype: torch.dtype) -> None:
    """In doubles, whose last bits tell which kernel of the processor has run, and are far from any mistake."""
    args = arguments(dtype)
    module = recorded(loss_and_gradient(reduction, cast), *args)
    expected = module(*args)
    read_targets_first(module.graph)
    module.recompile()
    assert aten.nll_loss_forward.default not in targets(module.graph)
    assert aten._log_softmax.default not in targets(module.graph)
    assert aten._log_softmax_backward_data.default not in targets(module.graph)
    # The formula adds up a row in another order than the kernel. Gradients are rounded as the logits were.
    loss, *grads = module(*args)
    torch.testing.assert_close(loss, expected[0], rtol=1e-12, atol=0.0)
    eps = 1e-12 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(grads, list(expected[1:]), rtol=eps, atol=eps)


def with_later_targets(h: Tensor, w: Tensor, target: Tensor) -> Any:
    logp = widened(F.linear(h, w)).log_softmax(1)
    loss = F.nll_loss(logp, (target + 1).clamp(max=CLASSES - 1).flatten(), ignore_index=IGNORED + 1)
    return loss, *torch.autograd.grad(loss, [h, w])


@pytest.mark.parametrize(
    "fn",
    [loss_and_gradient("mean", widened), loss_and_gradient("mean", capped), with_later_targets],
    ids=["plain", "capped", "later targets"],
)
def test_the_targets_are_read_before_the_rows(fn: Any) -> None:
    module = recorded(fn, *arguments(torch.float32))
    read_targets_first(module.graph)
    names = [getattr(target, "__name__", "") for target in targets(module.graph)]
    assert names.index("_picked") < names.index("_log_softmax") < names.index("_loss")
    module.graph.lint()


@pytest.mark.parametrize("cast", [widened, capped], ids=["plain", "capped"])
def test_compiled_in_all_bits(cast: Any) -> None:
    """What inductor makes of the op itself and of the formula has the same bits."""
    from torch._inductor import standalone_compile

    args = [arg.detach() for arg in arguments(torch.float32)]
    module = recorded(loss_and_gradient("mean", cast), *arguments(torch.float32))
    results = []
    for change in (False, True):
        if change:
            read_targets_first(module.graph)
            module.recompile()
        with torch.no_grad():
            results.append(standalone_compile(module, args, dynamic_shapes="from_example_inputs")(*args))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("reduction", [1, 2])
def test_the_loss_of_halves_is_wide(reduction: int) -> None:
    """On a GPU `log_softmax` widens halves by itself, under autocast too; sum and number are larger than a half."""
    graph = fx.Graph()
    h, w, target = (graph.placeholder(name) for name in ("h", "w", "target"))
    product = graph.call_function(aten.mm.default, (h, w))
    logp = graph.call_function(aten._log_softmax.default, (product, 1, True))
    nll = graph.call_function(aten.nll_loss_forward.default, (logp, target, None, reduction, IGNORED))
    graph.output(tuple(graph.call_function(operator.getitem, (nll, i)) for i in range(2)))
    read_targets_first(graph)
    rows = 2**17
    args = torch.zeros(rows, 5).half(), torch.zeros(5, CLASSES).half(), torch.zeros(rows, dtype=torch.int64)
    loss, number = fx.GraphModule(torch.nn.Module(), graph)(*args)
    expected = torch.tensor(float(CLASSES)).log() * (rows if reduction == 2 else 1)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(number, torch.tensor(float(rows)))


@pytest.mark.parametrize(
    ("cast", "options", "reduction"),
    [
        (lambda logits: widened(logits) + torch.arange(CLASSES), {}, "mean"),
        (lambda logits: widened(logits).softmax(1), {}, "mean"),
        (lambda logits: torch.bernoulli(widened(logits).sigmoid()), {}, "mean"),
        (written, {}, "mean"),
        (widened, {"weight": torch.ones(CLASSES)}, "mean"),
        (widened, {}, "none"),
    ],
    ids=["another value", "not by element", "random", "written", "weights", "no reduction"],
)  # fmt: skip
def test_other_losses_are_left_alone(cast: Any, options: Any, reduction: str) -> None:
    module = recorded(loss_and_gradient(reduction, cast, **options), *arguments(torch.float32))
    before = targets(module.graph)
    read_targets_first(module.graph)
    assert targets(module.graph) == before
