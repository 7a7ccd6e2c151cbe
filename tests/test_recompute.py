"""The backward recomputes cheap values: the same bits, and no more memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_cg as fcg
from functional_cg.stages.fx_passes.old_values import KEPT, LATER
from functional_cg.stages.lower.inductor import compile_graph
from functional_cg.stages.passes.min_cut import is_fused
from functional_cg.stages.passes.recompute import keep_as_buffers, recompute
from functional_cg.stages.plan import Buffers, lower_aten
from functional_cg.stages.program import Program
from tests.bench.models import LanguageModel, config
from tests.compiled_graphs import ON_A_GPU
from tests.shares import share


def mlp(params: dict[str, Tensor], x: Tensor) -> Tensor:
    h = F.gelu(x @ params["a"])
    h = F.silu(h @ params["b"]) * (h @ params["c"])
    return (h.float() @ params["d"]).square().mean()


def with_dropout(params: dict[str, Tensor], x: Tensor) -> Tensor:
    h = fcg.random.dropout(fcg.random.key(3), torch.tanh(x @ params["a"]), 0.5)
    return (F.relu(h @ params["b"]) @ params["c"]).square().mean()


def language_model(name: str) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    apply, params, buffers = fcg.from_module(LanguageModel(config(name)))
    return lambda p, x: apply(p, buffers, x, x.flip(0))[0], params


def traced(loss: Callable[..., Tensor], params: dict[str, Tensor], x: Tensor) -> tuple[Program, list[Tensor]]:
    def step(state: Any, x: Tensor) -> Any:
        value, grads = fcg.value_and_grad(loss)(state, x)
        return fcg.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value}

    state = fcg.place(params)
    program = fcg.graph_step(step, lowering="aten", constants=constants_of(loss)).lower(state, x).program
    return program, [state[name].clone() for name in sorted(params)]


def constants_of(loss: Any) -> Any:
    cells = [cell.cell_contents for cell in loss.__closure__ or ()]
    return tuple(cell for cell in cells if isinstance(cell, dict))


def run(program: Program, slots: list[Tensor], x: Tensor) -> list[Tensor]:
    """What the plan of a program leaves in the slots, and the loss."""
    slots = [slot.clone() for slot in slots]
    constants = [constant.value.clone() for constant in program.constants]
    metrics = lower_aten(program).bind(Buffers(slots, [x.clone()], constants))(())
    return [*slots, *(metric.clone() for metric in metrics)]


def kept_bytes(program: Program) -> int:
    """Bytes that the forward made and the backward reads."""
    start = next(i for i, instr in enumerate(program.instrs) if instr.backward)
    made = {var.storage for instr in program.instrs[:start] for var in instr.outputs()}
    sizes: dict[int, int] = {}
    for instr in program.instrs[start:]:
        for var in instr.inputs():
            if var.storage in made:
                sizes[var.storage] = max(sizes.get(var.storage, 0), var.spec.nbytes)
    return sum(sizes.values())


def parameters(*names: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(8, 8, generator=generator) for name in names}


CASES = {
    "mlp": (mlp, parameters("a", "b", "c", "d"), torch.randn(16, 8)),
    "dropout": (with_dropout, parameters("a", "b", "c"), torch.randn(16, 8)),
    "llama": (*language_model("tiny"), torch.randint(256, (2, 32))),
}


@pytest.mark.parametrize("case", CASES)
def test_no_bit_changes_and_less_is_kept(case: str) -> None:
    loss, params, x = CASES[case]
    program, slots = traced(loss, params, x)
    calls, kept, expected = len(program.instrs), kept_bytes(program), run(program, slots, x)
    recompute(program, large=1)
    assert len(program.instrs) > calls
    assert kept_bytes(program) < kept
    for got, want in zip(run(program, slots, x), expected, strict=True):
        assert torch.equal(got, want)


def test_what_is_made_anew_comes_from_what_is_kept_anyway() -> None:
    """gelu's result goes, its argument stays: the activation's own gradient needs it."""
    params = parameters("a", "b")
    program, _ = traced(
        lambda p, x: (F.gelu(x @ p["a"]) @ p["b"]).square().mean(), params, torch.randn(16, 8)
    )
    recompute(program, large=1)
    gelus = [instr for instr in program.instrs if instr.op is torch.ops.aten.gelu.default]
    assert [instr.backward for instr in gelus] == [False, True]
    assert gelus[0].args == gelus[1].args


def test_what_is_kept_for_its_own_sake_stays() -> None:
    """exp's gradient needs exp's result and not its argument: there is nothing to make it from."""
    params = parameters("a", "b")
    program, _ = traced(lambda p, x: (torch.exp(x @ p["a"]) @ p["b"]).mean(), params, torch.randn(16, 8))
    calls = len(program.instrs)
    recompute(program, large=1)
    assert len(program.instrs) == calls


def test_values_below_the_threshold_are_kept() -> None:
    program, _ = traced(mlp, parameters("a", "b", "c", "d"), torch.randn(16, 8))
    before = list(program.instrs)
    recompute(program, large=2**20)
    assert [str(instr) for instr in program.instrs] == [str(instr) for instr in before]


def conv_net(p: dict[str, Tensor], x: Tensor) -> Tensor:
    h = F.relu(F.batch_norm(F.conv2d(x, p["a"]), None, None, p["w"], p["b"], training=True))
    return F.conv2d(h, p["a"]).square().mean()


def swish_net(p: dict[str, Tensor], x: Tensor) -> Tensor:
    h = F.silu(F.batch_norm(F.conv2d(x, p["a"]), None, None, p["w"], p["b"], training=True))
    return F.conv2d(h, p["a"]).square().mean()


def pooled_net(p: dict[str, Tensor], x: Tensor) -> Tensor:
    h = F.relu(F.batch_norm(F.conv2d(x, p["a"]), None, None, p["w"], p["b"], training=True))
    return F.max_pool2d(h, 2).square().mean()


def linear_net(p: dict[str, Tensor], x: Tensor) -> Tensor:
    rows = (x.movedim(1, -1).reshape(-1, 8) @ p["a"].flatten(1)).unflatten(0, (len(x), -1))
    return (F.gelu(rows) @ p["a"].flatten(1)).square().mean()


@pytest.mark.parametrize(
    ("net", "width", "again", "values"),
    [
        pytest.param(conv_net, 300, False, 4, id="conv, large"),
        pytest.param(conv_net, 100, True, 3, id="conv, in cache"),
        pytest.param(swish_net, 300, True, 3, id="conv, and the activation's gradient wants the norm"),
        pytest.param(linear_net, 300, True, 4, id="linear, large"),
        pytest.param(linear_net, 100, True, 4, id="linear, in cache"),
        pytest.param(pooled_net, 300, True, 2, id="pool, large"),
    ],
)
def test_what_is_recomputed_shares_a_read_or_lies_in_the_cache(
    net: Any, width: int, again: bool, values: int
) -> None:
    """The gradient of a convolution waits for its argument: what makes it anew is a kernel of its own.

    It reads and writes a large value to save a read. Beside a linear layer, the kernel of the activation's own gradient
    makes it.
    """
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.ones(8) for name in ("w", "b")} | {
        "a": torch.randn(8, 8, 1, 1, generator=generator)
    }
    x = torch.zeros(12, 8, width, width)
    program, _ = traced(net, params, x)
    kept = kept_bytes(program)
    recompute(program, large=2**20)
    assert (kept_bytes(program) < kept) == again
    assert kept_bytes(program) // x.nbytes == values


def test_weights_are_not_cast_a_second_time() -> None:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (x.bfloat16() @ params["a"].bfloat16() @ params["b"].bfloat16()).float().square().mean()

    program, _ = traced(loss, parameters("a", "b"), torch.randn(16, 8))
    recompute(program, large=1)
    casts = [
        instr
        for instr in program.instrs
        if instr.op is torch.ops.aten._to_copy.default and set(instr.inputs()) & set(program.slots)
    ]
    assert len(casts) == 2


def test_what_the_backward_reads_is_in_memory() -> None:
    """Of a sum that a compiler would rather keep as its parts."""

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        h = x @ params["a"]
        h = h + torch.sin(h) @ params["b"]
        h = h + torch.sin(h) @ params["c"]
        return h.square().mean()

    program, slots = traced(loss, parameters("a", "b", "c"), x := torch.randn(16, 8))
    expected = run(program, slots, x)
    sums = [
        instr.out for instr in program.instrs if instr.op is torch.ops.aten.add.Tensor and not instr.backward
    ]
    keep_as_buffers(program, large=1)
    views = {i.args[0]: i.out for i in program.instrs if i.op is KEPT}
    read = {var for instr in program.instrs if instr.backward for var in instr.inputs()}
    assert len(sums) == 2
    for value in sums:
        assert views[value].storage == value.storage
        assert views[value] in read
        assert value not in read
    for got, want in zip(run(program, slots, x), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("case", share(sorted(CASES), 2))
def test_a_larger_budget_keeps_more_and_changes_nothing(case: str) -> None:
    loss, params, x = CASES[case]
    kept = []
    for budget in (0.0, 0.3, 0.7, 1.0):
        program, slots = traced(loss, params, x)
        most, expected = kept_bytes(program), run(program, slots, x)
        recompute(program, budget=budget, large=1)
        kept.append(kept_bytes(program))
        for got, want in zip(run(program, slots, x), expected, strict=True):
            assert torch.equal(got, want)
    assert kept == sorted(kept)
    assert kept[0] < kept[-1] <= most


def test_a_budget_is_a_fraction() -> None:
    for budget in (-0.1, 1.5, "all", True):
        with pytest.raises(
            ValueError, match=r"activation_memory_budget must be None or a number from 0 to 1"
        ):
            fcg.graph_step(lambda state, x: (state, {}), activation_memory_budget=budget)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unexpected keyword argument 'activation_memory_budget'"):
        fcg.graph_fn(lambda state, x: x, activation_memory_budget=0.5)  # type: ignore[call-overload]


NORMS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "layer": (lambda x, w, b: F.layer_norm(x, (6,), w, b), True),
    "layer without weights": (lambda x, w, b: F.layer_norm(x, (6,)), True),
    "batch": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), True),
    "group": (lambda x, w, b: F.group_norm(x, 2, w, b), True),
    "batch, as evaluated": (lambda x, w, b: F.batch_norm(x, torch.zeros(6), torch.ones(6), w, b), False),
}


@pytest.mark.parametrize("rows", [(8, 6), (2, 6, 3, 5)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_recomputed_from_its_statistics(name: str, rows: tuple[int, ...]) -> None:
    norm, again = NORMS[name]
    if name.startswith("layer"):
        rows = (rows[0], *rows[2:], rows[1])
    generator = torch.Generator().manual_seed(0)
    params = {key: torch.randn(6, generator=generator) for key in ("w", "b", "a")}
    x = torch.randn(rows, generator=generator)

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        out = norm(x * p["a"].sum(), p["w"], p["b"])
        return (out.flatten(1).t() @ out.flatten(1)).square().mean()

    program, slots = traced(loss, params, x)
    expected = run(program, slots, x)
    recompute(program, large=1)
    assert any(instr.op is torch.ops.fcg.normalized.default for instr in program.instrs) == again
    for got, want in zip(run(program, slots, x), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
def test_a_compiler_stores_what_is_kept(device: str) -> None:
    """What `keep_as_buffers` relies on."""
    from torch._inductor.utils import run_and_get_code

    def graph(kept: bool) -> torch.fx.GraphModule:
        made = torch.fx.Graph()
        a, b, w = (made.placeholder(name) for name in "abw")
        total = made.call_function(torch.ops.aten.add.Tensor, (a, b))
        if kept:
            total = made.call_function(KEPT, (total,))
        more = made.call_function(torch.ops.aten.add.Tensor, (total, b))
        product = made.call_function(torch.ops.aten.mm.default, (more, w))
        made.output((made.call_function(torch.ops.aten.mul.Tensor, (total, product)),))
        return torch.fx.GraphModule(torch.nn.Module(), made)

    args = [torch.randn(shape, device=device) for shape in ((16, 8), (16, 8), (8, 8))]

    def stored(kept: bool) -> int:
        with torch.no_grad():
            compiled, codes = run_and_get_code(
                compile_graph, graph(kept), args, on_host=device == "cpu", small=False, in_order=False
            )
            (got,) = compiled(*args)
        total = args[0] + args[1]
        torch.testing.assert_close(got, total * ((total + args[1]) @ args[2]))
        return sum(code.count(f"empty_strided_{device}((16, 8)") for code in codes)

    assert stored(kept=True) == stored(kept=False) + 1


@pytest.mark.kernels
@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
def test_a_compiler_computes_later_what_shall_be_later(device: str) -> None:
    """What `recompute` relies on: a value is not computed again in the kernel that has its parts at hand."""
    from torch._inductor.utils import run_and_get_code

    def graph(later: bool) -> torch.fx.GraphModule:
        made = torch.fx.Graph()
        x, w = (made.placeholder(name) for name in "xw")
        mean = made.call_function(torch.ops.aten.mean.dim, (x, [1], True))
        first, again = (made.call_function(torch.ops.aten.sub.Tensor, (x, mean)) for _ in range(2))
        product = made.call_function(torch.ops.aten.mm.default, (first, w))
        slope = made.call_function(torch.ops.aten.mm.default, (product, w))
        if later:
            again = made.call_function(LATER, (again, slope))
        turned = made.call_function(torch.ops.aten.t.default, (again,))
        made.output((made.call_function(torch.ops.aten.mm.default, (turned, slope)),))
        return torch.fx.GraphModule(torch.nn.Module(), made)

    x, w = (torch.randn(shape, device=device) for shape in ((16, 8), (8, 8)))

    def written_before_the_first_product(later: bool) -> int:
        with torch.no_grad():
            compiled, (code,) = run_and_get_code(
                compile_graph, graph(later), [x, w], on_host=device == "cpu", small=False, in_order=False
            )
            (got,) = compiled(x, w)
        centred = x - x.mean(1, keepdim=True)
        torch.testing.assert_close(got, centred.T @ (centred @ w @ w), rtol=1e-4, atol=1e-4)
        before = code.partition("extern_kernels.mm(")[0]
        return before.count(f"empty_strided_{device}((16, 8)")

    assert written_before_the_first_product(later=False) == written_before_the_first_product(later=True) + 1


ACTIVATIONS = (
    "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish", "relu",
    "selu", "silu", "softplus", "softshrink", "softsign", "tanhshrink",
)  # fmt: skip
DISTANCES = (
    "binary_cross_entropy_with_logits",
    "huber_loss",
    "mse_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
)


@pytest.mark.parametrize("name", share((*ACTIVATIONS, *DISTANCES), 3))
def test_a_compiler_fuses_what_torch_does_not_tag_as_elementwise(name: str) -> None:
    """So neither an activation nor its gradient makes the choice count values as stored."""
    fn = getattr(F, name)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        found = x * params["a"]
        return fn(found, *([x.sigmoid()] if name in DISTANCES else [])).square().sum()  # type: ignore[no-any-return]

    program, _ = traced(loss, parameters("a"), torch.ones(8, 8))
    apart = {instr.name for instr in program.instrs if not is_fused(instr)}
    assert apart <= {"ones_like"}  # the gradient that a backward begins with, a number
