"""Flex attention inside of a step: scores and masks by functions, block masks as constants and as inputs."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.shares import CALLS, thorough

# True here, too: the scores take memory.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

B, H, T, D = 2, 4, 160, 16
BLOCK = 32
# Tiles of torch's kernel that fit into a block.
TILES = {f"BLOCK_{name}": BLOCK for name in ("M", "N", "M1", "N1", "M2", "N2")}


@pytest.fixture(autouse=True)
def _backward_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses a backward on a CPU before it comes to the operator; on a GPU it does not."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def distance(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - (q - k).abs() * 0.01 * (h + 1)


def blocks_of(mask: Any, device: str, *sizes: int | None) -> BlockMask:
    return create_block_mask(mask, *(sizes or (None, None)), T, T, device=device, BLOCK_SIZE=BLOCK)


def alternate(device: str) -> BlockMask:
    """Blocks without a function: each row of blocks sees every other one, in no order."""
    rows = -(-T // BLOCK)
    indices = torch.tensor([4, 0, 2, 1, 3], dtype=torch.int32, device=device).expand(1, 1, rows, rows)
    count = torch.full((1, 1, rows), 3, dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(count, indices.contiguous(), BLOCK_SIZE=BLOCK, seq_lengths=(T, T))


# What a step may ask for, by name -> options of `flex_attention`, given parameters, a batch and a declared mask; and
# what the scores become: (scores [B, H, T, T], places q and k, parameters, batch) -> scores.
Given = Callable[[Any, Any, BlockMask], dict[str, Any]]
Meant = Callable[[Tensor, Tensor, Tensor, Any, Any], Tensor]


def hidden(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.masked_fill(~visible, -math.inf)


def of_alternate(scores: Tensor, q: Tensor, k: Tensor, p: Any, b: Any) -> Tensor:
    return hidden(scores, k // BLOCK % 2 == 0)


def same_document(b: Any) -> Any:
    return lambda n, h, q, k: (b["documents"][n, q] == b["documents"][n, k]) & (q >= k)


CASES: dict[str, tuple[Given, Meant]] = {
    "plain": (lambda p, b, mask: {}, lambda s, q, k, p, b: s),
    "scale": (lambda p, b, mask: {"scale": 0.5}, lambda s, q, k, p, b: s * 0.5 * D**0.5),
    "scores": (
        lambda p, b, mask: {"score_mod": distance},
        lambda s, q, k, p, b: (
            s - (q - k).abs() * 0.01 * (torch.arange(H, device=s.device) + 1)[:, None, None]
        ),
    ),
    "learned bias": (
        lambda p, b, mask: {"score_mod": lambda s, n, h, q, k: s + p["bias"][h, q - k + T]},
        lambda s, q, k, p, b: s + p["bias"][:, q - k + T],
    ),
    "one head's bias": (
        lambda p, b, mask: {"score_mod": lambda s, n, h, q, k: s * p["bias"][1, k]},
        lambda s, q, k, p, b: s * p["bias"][1, k],
    ),
    "constant mask": (lambda p, b, mask: {"block_mask": mask}, lambda s, q, k, p, b: hidden(s, q >= k)),
    "mask of a batch": (
        lambda p, b, mask: {"block_mask": b["mask"]},
        lambda s, q, k, p, b: hidden(s, (q - k < 40) & (q >= k)),
    ),
    "documents": (
        lambda p, b, mask: {"block_mask": blocks_of(same_document(b), b["x"].device.type, B, None)},
        lambda s, q, k, p, b: hidden(
            s, ((b["documents"][:, :, None] == b["documents"][:, None]) & (q >= k))[:, None]
        ),
    ),
    "blocks alone": (lambda p, b, mask: {"block_mask": b["blocks"]}, of_alternate),
    "both": (
        lambda p, b, mask: {"block_mask": mask, "score_mod": lambda s, n, h, q, k: torch.tanh(s / 2) * 2},
        lambda s, q, k, p, b: hidden(torch.tanh(s / 2) * 2, q >= k),
    ),
}


def near(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k < 40) & (q >= k)


def data(call: int, device: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(call)
    ends = torch.randint(1, 40, (B, T // 8), generator=generator).cumsum(1)
    documents = (torch.arange(T)[None, :, None] >= ends[:, None]).sum(-1)
    return {
        "x": torch.randn(B, H, T, D, generator=generator).to(device), "documents": documents.to(device),
        "mask": blocks_of(near, device), "blocks": alternate(device),
    }  # fmt: skip


def parameters(device: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "w": torch.randn(D, 3 * D, generator=generator).to(device, dtype) / D**0.5,
        "bias": torch.randn(H, 2 * T, generator=generator).to(device, dtype),
    }


def loss_of(case: str, mask: BlockMask, attention: Any = flex_attention) -> Any:
    def loss_fn(params: Any, batch: Any) -> Tensor:
        q, k, v = (batch["x"].to(params["w"].dtype) @ params["w"]).chunk(3, -1)
        out = attention(q, k, v, **CASES[case][0](params, batch, mask))
        return out.float().square().sum(-1).mean()

    return loss_fn


def meant(case: str, params: Any, batch: Any) -> dict[str, Any]:
    """Loss and gradients by the formula; those of single precision are computed in double precision."""

    def loss_fn(params: Any) -> Tensor:
        dtype = params["w"].dtype
        wide = torch.promote_types(dtype, torch.float32)
        q, k, v = (batch["x"].to(dtype) @ params["w"]).chunk(3, -1)
        places = torch.arange(T, device=q.device)
        scores = (q @ k.mT).to(wide) * D**-0.5
        scores = CASES[case][1](scores, places[:, None], places, params, batch)
        return (scores.softmax(-1).to(dtype) @ v).to(wide).square().sum(-1).mean()

    def cast(tree: Any, one: torch.dtype, other: torch.dtype) -> Any:
        return fcg.tree.map(lambda leaf: leaf.to(other) if leaf.dtype == one else leaf, tree)

    loss, grads = fcg.value_and_grad(loss_fn)(cast(params, torch.float32, torch.float64))
    found: dict[str, Any] = cast({"loss": loss, "grads": grads}, torch.float64, torch.float32)
    return found


def step_of(case: str, device: str, lowering: str, attention: Any = flex_attention) -> Any:
    mask = blocks_of(causal, device)
    loss_fn = loss_of(case, mask, attention)

    @fcg.graph_step(lowering=lowering, constants=mask)
    def train_step(params: Any, batch: Any) -> Any:
        loss, grads = fcg.value_and_grad(loss_fn)(params, batch)
        return fcg.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss, "grads": grads}

    return train_step


@pytest.mark.parametrize("case", CASES)
def test_replay_equals_eager_and_the_formula(case: str) -> None:
    step, state = step_of(case, "cpu", "aten"), fcg.fork(parameters("cpu"))
    twin = fcg.fork(state)
    for call in range(CALLS):
        batch, before = data(call, "cpu"), fcg.snapshot(state)
        state, metrics = step(state, batch)
        twin, expected = step.eager(twin, batch)
        assert_trees_all_equal((fcg.snapshot(state), metrics), (fcg.snapshot(twin), expected))
        torch.testing.assert_close(metrics, meant(case, before, batch), rtol=1e-4, atol=1e-6)
    assert step.stats.replays == CALLS
    assert step.stats.captures == 1


@thorough
@pytest.mark.parametrize("case", ["learned bias", "both", "documents"])
def test_compiled_replay_is_close_to_the_formula(case: str) -> None:
    step, state = step_of(case, "cpu", "inductor"), fcg.fork(parameters("cpu"))
    for call in range(4):
        batch, before = data(call, "cpu"), fcg.snapshot(state)
        state, metrics = step(state, batch)
        torch.testing.assert_close(metrics, meant(case, before, batch), rtol=1e-4, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_it_is_what_torch_compiles(case: str, dtype: torch.dtype) -> None:
    fused = functools.partial(torch.compile(flex_attention), kernel_options=TILES)
    step, state = step_of(case, "cuda", "auto"), fcg.fork(parameters("cuda", dtype))
    compiled = loss_of(case, blocks_of(causal, "cuda"), fused)
    tolerance = {"rtol": 1e-3, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 2e-3}
    for call in range(8):
        batch, before = data(call, "cuda"), fcg.snapshot(state)
        state, metrics = step(state, batch)
        torch.testing.assert_close(metrics, meant(case, before, batch), **tolerance)
        if (
            call == 0 and dtype == torch.float32
        ):  # in bf16 torch finds no tiles for its backward in small blocks
            loss, grads = fcg.value_and_grad(compiled)(before, batch)
            torch.testing.assert_close(metrics, {"loss": loss, "grads": grads}, **tolerance)
    assert step.stats.replays == 8


# -- arguments ----------------------------------------------------------------------------------------------------


def run(function: Callable[[Any, Any], Any], *inputs: Any, **options: Any) -> Any:
    """The result of a function of tensors as a step, which is that of its eager run."""
    step = fcg.graph_step(lambda s, *given: (s, function(*given)), lowering="aten", **options)
    device = fcg.tree.leaves(inputs)[0].device
    state = fcg.fork({"unused": torch.zeros((), device=device)})
    expected = step.eager(fcg.fork(state), *inputs)[1]
    metrics = step(state, *inputs)[1]
    assert_trees_all_equal(metrics, expected)
    return metrics


def triple(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + n))
        for n, shape in enumerate(shapes)
    ]


def test_few_heads_of_keys_and_other_lengths() -> None:
    q, k, v = triple((2, 4, 20, 8), (2, 2, 33, 8), (2, 2, 33, 5))
    out = run(lambda q, k, v: flex_attention(q, k, v, enable_gqa=True), q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    )
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_logarithms_and_a_row_that_sees_nothing(device: str) -> None:
    q, k, v = (one.to(device) for one in triple((1, 1, 16, 8), (1, 1, 16, 8), (1, 1, 16, 8)))
    asked = AuxRequest(lse=True, max_scores=device == "cuda")  # torch refuses the second on a CPU

    def before(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q > k

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = create_block_mask(before, None, None, 16, 16, device=device)
        grads = fcg.grad(lambda q: flex_attention(q, k, v, block_mask=mask).square().sum())(q)
        out, aux = flex_attention(q, k, v, block_mask=mask, return_aux=asked)
        return {"out": out, "lse": aux.lse, "largest": aux.max_scores, "grads": grads}

    got = run(attend, q, k, v)
    scores = hidden(q @ k.mT * 8**-0.5, torch.ones(16, 16, device=device).tril(-1).bool())
    torch.testing.assert_close(got["lse"], scores.logsumexp(-1))
    if device == "cuda":
        torch.testing.assert_close(got["largest"], scores.amax(-1))
    assert not got["out"][:, :, 0].any()
    assert not got["grads"][:, :, 0].any()
    torch.testing.assert_close(got["out"][:, :, 1:], (scores.softmax(-1) @ v)[:, :, 1:])


def test_results_lie_in_memory_as_queries_do() -> None:
    q, k, v = (one.reshape(2, 16, 4, 8).transpose(1, 2) for one in triple(*[(2, 16, 32)] * 3))
    out = run(lambda q, k, v: flex_attention(q, k, v).transpose(1, 2).view(2, 16, 32), q, k, v)
    assert out.shape == (2, 16, 32)


def test_autocast_reaches_it() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return flex_attention(q, k, v)

    assert run(attend, *triple(*[(1, 1, 16, 8)] * 3)).dtype == torch.bfloat16


def test_a_function_that_torch_was_to_compile() -> None:
    compiled = torch.compile(flex_attention)
    q, k, v = triple(*[(1, 2, 16, 8)] * 3)
    out = run(compiled, q, k, v)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))


def test_a_table_of_numbers_is_indexed_on_the_device() -> None:
    table = torch.randn(3, 16)
    q, k, v = triple(*[(1, 2, 16, 8)] * 3)
    out = run(
        lambda q, k, v: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[1, j] + table[2][i]),
        q, k, v, constants=table,
    )  # fmt: skip
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=table[1] + table[2][:, None]
    )
    torch.testing.assert_close(out, expected)


def test_a_decision_by_a_score_is_refused() -> None:
    def attend(s: Any, x: Tensor) -> Any:
        return s, flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s if s > 0 else -s)

    with pytest.raises(fcg.CaptureError, match=r"test_flex\.py.*data-dependent control flow"):
        fcg.graph_step(attend)(fcg.fork({"unused": torch.zeros(())}), *triple((1, 2, 16, 8)))


def test_a_block_mask_is_a_tree() -> None:
    mask = blocks_of(causal, "cpu")
    leaves, treedef = fcg.tree.flatten({"mask": mask})
    again = fcg.tree.unflatten(treedef, leaves)["mask"]
    assert isinstance(again, BlockMask)
    for one, other in zip(mask.as_tuple(), again.as_tuple(), strict=True):
        assert one is other or one == other
    assert fcg.tree.flatten({"mask": blocks_of(causal, "cpu")})[1] == treedef
    assert fcg.tree.flatten({"mask": blocks_of(near, "cpu")})[1] != treedef


def test_a_mask_that_nobody_declared_is_refused_whole() -> None:
    mask = blocks_of(causal, "cpu")
    q, k, v = triple(*[(1, 2, T, 8)] * 3)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask)

    with pytest.raises(fcg.ForeignTensorError, match=r"pass `.*mask` as an input .* `constants=\(.*mask,\)`"):
        run(attend, q, k, v)
    run(attend, q, k, v, constants=mask)


def test_torch_calls_its_operator_as_we_expect() -> None:
    """Private to torch: the operator's arguments, and what a mask of blocks hands it."""
    from functional_cg.tensors.recorded import higher_order

    theirs = list(inspect.signature(type(torch.ops.higher_order.flex_attention).__call__).parameters)[1:]
    ours = list(inspect.signature(higher_order.flex_attention).parameters)
    assert len(theirs) == len(ours)
    assert theirs[:7] == ours[:7]
    mask = blocks_of(causal, "cpu")
    given = mask.as_tuple()
    shown = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    assert given[:2] == mask.seq_lengths
    assert all(one is other for one, other in zip(given[2:6], shown, strict=True))
    assert given[-3:] == (*mask.BLOCK_SIZE, mask.mask_mod)
