"""Attention with dropout on a GPU: one kernel, with the numbers of the math backend."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import functional_cg as fcg
from functional_cg.random.attention import ATTENTION
from functional_cg.testing import assert_trees_all_equal
from tests.shares import CALLS

pytestmark = pytest.mark.cuda

BATCH, HEADS = 2, 3
LARGE = MappingProxyType({"-1e9": -1e9, "least number": torch.finfo(torch.float32).min})


def operands(queries: int, keys: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    # Laid out as projections are: heads side by side.
    return [
        torch.randn(BATCH, length, HEADS, width, generator=generator, device="cuda", dtype=dtype)
        .transpose(1, 2)
        .requires_grad_()
        for length in (queries, keys, keys)
    ]


def mask_of(kind: str, queries: int, keys: int) -> Tensor | None:
    generator = torch.Generator("cuda").manual_seed(1)
    if kind == "padding":
        return torch.rand(BATCH, 1, 1, keys, generator=generator, device="cuda") > 0.3
    if kind == "padding to add":
        hidden = torch.rand(BATCH, 1, 1, keys, generator=generator, device="cuda") > 0.7
        return torch.zeros(hidden.shape, device="cuda").masked_fill(hidden, -torch.inf)
    if kind == "bias":
        return torch.randn(1, HEADS, queries, keys, generator=generator, device="cuda", dtype=torch.float16)
    if kind == "nothing":
        return torch.zeros(queries, keys, dtype=torch.bool, device="cuda")
    if kind in LARGE:  # of every key of every other row: it hides none from another
        mask = torch.zeros(queries, keys, device="cuda")
        mask[::2] = LARGE[kind]
        return mask
    return None


def attended(given: list[Tensor], *, fused: bool, **options: Any) -> list[Tensor]:
    """The result and the gradients."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.25, **options)

    draws = fcg.random.keyed(attend)
    if fused:
        out = draws(fcg.random.key(7, "cuda"), *given)
    else:
        with sdpa_kernel(SDPBackend.MATH):
            out = draws(fcg.random.key(7, "cuda"), *given)
    weight = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda")
    return [out, *torch.autograd.grad((out.float() * weight).sum(), given)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "padding", "padding to add", "bias", "nothing", *LARGE])
@pytest.mark.parametrize(
    ("queries", "keys", "width"), [(8, 8, 16), (130, 136, 32), (200, 200, 64), (72, 264, 128), (264, 72, 64)]
)
def test_values_and_gradients_are_those_of_the_math_backend(
    queries: int, keys: int, width: int, kind: str, causal: bool
) -> None:
    if causal and kind != "none":
        pytest.skip("torch takes a mask or `is_causal`")
    mask = mask_of(kind, queries, keys)
    given = operands(queries, keys, width, torch.float16)
    found = attended(given, fused=True, attn_mask=mask, is_causal=causal)
    expected = attended(given, fused=False, attn_mask=mask, is_causal=causal)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=4e-3, atol=4e-3)


# Those of 600 keys and 16 wide have more bits than two queries: drawn again, and not all at once.
@pytest.mark.parametrize("kind", ["none", "causal", "padding"])
@pytest.mark.parametrize(
    ("queries", "keys", "width"),
    [(72, 600, 16), (33, 77, 24), (130, 131, 40), (77, 45, 80), (140, 141, 96), (70, 65, 200), (1, 1, 1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_of_any_width_any_number_of_keys_and_single_precision(
    dtype: torch.dtype, queries: int, keys: int, width: int, kind: str
) -> None:
    given = operands(queries, keys, width, dtype)
    options = {"attn_mask": mask_of(kind, queries, keys), "is_causal": kind == "causal"}
    found, expected = (attended(given, fused=fused, **options) for fused in (True, False))
    tolerance = 4e-3 if dtype == torch.float16 else 2e-5
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=tolerance, atol=tolerance)


def test_a_negative_scale_is_one_like_another() -> None:
    given = operands(72, 80, 64, torch.float16)
    found, expected = (attended(given, fused=fused, scale=-0.2) for fused in (True, False))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=4e-3, atol=4e-3)


def test_the_mask_is_that_of_keep_mask() -> None:
    """With equal scores and the identity as values, the result shows which weights stay."""
    size = 128
    zeros = torch.zeros(BATCH, HEADS, size, size, device="cuda", dtype=torch.float16)
    eye = torch.eye(size, device="cuda", dtype=torch.float16).expand_as(zeros)
    key = fcg.random.key(3, "cuda")
    attend = fcg.random.keyed(lambda: F.scaled_dot_product_attention(zeros, zeros, eye, dropout_p=0.5))
    drop = fcg.random.keyed(lambda: F.dropout(torch.ones_like(zeros), 0.5))
    assert torch.equal(attend(key) != 0, drop(key) != 0)


def test_a_key_may_be_a_column_and_the_heads_may_be_many() -> None:
    """A grid of CUDA has at most 65535 programs in its second dimension."""
    x = torch.randn(2**15, 2, 8, 16, device="cuda", dtype=torch.float16)
    keys = torch.stack([fcg.random.key(1, "cuda"), fcg.random.key(5, "cuda")], 1)
    attend = fcg.random.keyed(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
    found = attend(keys[:, 0], x.requires_grad_())
    with sdpa_kernel(SDPBackend.MATH):
        expected = attend(keys[:, 0].clone(), x)
    for one, other in zip(
        [found, *torch.autograd.grad(found.float().sum(), x)],
        [expected, *torch.autograd.grad(expected.float().sum(), x)],
        strict=True,
    ):
        # Another key is off by ones; of 8 million numbers in half precision, a few are off by hundredths.
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-2, atol=5e-2)


class Net(nn.Module):
    """A causal transformer of one block, with dropout where Hugging Face's have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.qkv, self.out = width, nn.Linear(2 * width, 6 * width), nn.Linear(2 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, 2, self.width)).permute(2, 0, 3, 1, 4)
        p = 0.1 if self.training else 0.0
        seen = F.scaled_dot_product_attention(*parts, dropout_p=p, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def step_of(width: int, lowering: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    apply, params, buffers = fcg.from_module(Net(width).cuda())

    @fcg.graph_step(lowering=lowering)
    def step(state: Any, x: Tensor) -> Any:
        key = fcg.random.fold_in(state.key, state.step)

        def loss_fn(params: Any) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return apply(params, buffers, x, key=key)[0].float().square().mean()  # type: ignore[no-any-return]

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1), key=fcg.random.key(1, "cuda"))
    return step, state


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_a_captured_step_draws_as_its_eager_run_does(lowering: Any) -> None:
    step, state = step_of(64, lowering)
    for call in range(CALLS):
        x = torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(call)).cuda()
        expected = step.eager(fcg.snapshot(state), x)
        state, metrics = step(state, x)
        if lowering == "aten":
            assert_trees_all_equal((state, metrics), expected)
        else:
            torch.testing.assert_close(metrics["loss"], expected[1]["loss"], rtol=1e-2, atol=1e-4)
    assert step.stats.replays == CALLS
    names = {instr.op._schema.name for instr in step.lower(state, x).program.instrs}
    assert {ATTENTION, f"{ATTENTION}_backward"} <= names


def test_what_no_kernel_fits_is_left_to_the_math_backend() -> None:
    step, state = step_of(264, "aten")
    x = torch.randn(4, 64, 528).cuda()
    state, _ = step(state, x)
    assert all("scaled_dot" not in str(instr.op) for instr in step.lower(state, x).program.instrs)


class Masked(nn.Module):
    """Its mask is made by ``vmap``, as those of Hugging Face's are: expanded along the keys."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[2], device=x.device)
        sees = torch.vmap(torch.vmap(lambda query, key: query >= 0, (None, 0)), (0, None))(places, places)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=sees.expand(len(x), 1, *sees.shape))


def test_a_mask_expanded_along_its_keys_does_not_keep_torch_from_a_fused_kernel() -> None:
    apply, _, _ = fcg.from_module(Masked())
    step = fcg.graph_step(lambda state, x: (state, apply({}, {}, x)[0]), lowering="aten")
    x = torch.randn(4, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    state = fcg.place({"w": torch.zeros(1, device="cuda")})
    state, out = step(state, x)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(x, x, x), rtol=2e-2, atol=2e-2)
    names = {instr.name for instr in step.lower(state, x).program.instrs}
    assert any("scaled_dot_product" in name for name in names), names


@pytest.mark.parametrize("masked", [False, True])
def test_torchs_transformer_layer_attends_in_one_kernel(masked: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 2, 256, dropout=0.1, batch_first=True, device="cuda")
    apply, params, buffers = fcg.from_module(layer)
    mask = nn.Transformer.generate_square_subsequent_mask(64, device="cuda") if masked else None

    @fcg.graph_step(lowering="aten", constants=(mask,) if masked else ())
    def step(state: Any, x: Tensor) -> Any:
        key = fcg.random.fold_in(state.key, state.step)

        def loss_fn(params: Any) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                out = apply(params, buffers, x, src_mask=mask, key=key)[0]
            return out.float().square().mean()  # type: ignore[no-any-return]

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1), key=fcg.random.key(1, "cuda"))
    for call in range(CALLS):
        x = torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(call)).cuda()
        expected = step.eager(fcg.snapshot(state), x)
        state, metrics = step(state, x)
        assert_trees_all_equal((state, metrics), expected)
    names = [instr.op._schema.name for instr in step.lower(state, x).program.instrs]
    assert names.count(ATTENTION) == names.count(f"{ATTENTION}_backward") == 1
