"""Buckets: what is padded, with what, and what a step makes of it."""

from __future__ import annotations

import re
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import functional_cg as fcg
from functional_cg.testing import assert_replay_equals_eager, assert_trees_all_equal

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
SIZES = (4, 8)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def only(batch: Any, **options: Any) -> Any:
    (padded,) = fcg.bucket([batch], **{"sizes": SIZES, **options})
    return padded


def unpadded(padded: Tensor, mask: Tensor) -> Tensor:
    return padded[mask].reshape(*mask.shape[:-1], -1, *padded.shape[mask.dim() :])


@given(
    length=st.integers(0, 8),
    dim=st.integers(0, 2),
    dtype=st.sampled_from(
        [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16]
    ),
    more=st.integers(0, 2),
    as_array=st.booleans(),
)
def test_the_mask_gives_back_the_batch(
    length: int, dim: int, dtype: torch.dtype, more: int, as_array: bool
) -> None:
    shape = (*(2, 3)[:dim], length, *(2, 3)[:more])
    x = torch.randint(2, shape).to(dtype)
    y = torch.arange(len(x))
    batch = {"x": x.numpy() if as_array and dtype != torch.bfloat16 else x, "name": "a"}
    padded = only(batch | ({"y": y} if dim else {}), dim=dim)
    size = 4 if length <= 4 else 8
    assert padded["mask"].shape == (*shape[:dim], size)
    assert padded["mask"].sum() == padded["mask"].numel() // size * length
    assert padded["x"].is_contiguous()
    assert padded["name"] == "a"
    assert_trees_all_equal(unpadded(padded["x"], padded["mask"]), x)
    assert not padded["x"][~padded["mask"]].any()
    if dim:
        assert_trees_all_equal(padded["y"], y)


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "dict": (lambda x: {"x": x}, lambda batch: (batch["x"], batch["mask"])),
    "mapping": (lambda x: UserDict(x=x), lambda batch: (batch["x"], batch["mask"])),
    "ordered": (lambda x: OrderedDict(x=x), lambda batch: (batch["x"], batch["mask"])),
    "nested": (lambda x: {"in": {"x": [x]}}, lambda batch: (batch["in"]["x"][0], batch["mask"])),
    "tuple": (lambda x: (x, 3), lambda batch: (batch[0], batch[2])),
    "list": (lambda x: [x], lambda batch: batch),
    "tensor": (lambda x: x, lambda batch: batch),
    "array": (lambda x: x.numpy(), lambda batch: batch),
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_of_any_kind(kind: str) -> None:
    make, read = KINDS[kind]
    x = torch.arange(6.0).reshape(2, 3)
    padded, mask = read(only(make(x)))
    assert_trees_all_equal(padded, torch.nn.functional.pad(x, (0, 1)))
    assert_trees_all_equal(mask, torch.tensor([[True, True, True, False]] * 2))


def test_without_a_mask_the_kind_stays() -> None:
    x = torch.ones(2, 3)
    assert only(x, mask=None).shape == (2, 4)
    assert [part.shape for part in only([x], mask=None)] == [(2, 4)]
    assert list(only({"x": x}, mask=None)) == ["x"]


def test_pad_names_what_is_padded() -> None:
    batch = {"tokens": torch.ones(2, 3).long(), "labels": torch.ones(2, 3).long(), "image": torch.ones(2, 5)}
    padded = only(batch, pad={"tokens": 7, "labels": -100})
    assert padded["tokens"][:, 3].tolist() == [7, 7]
    assert padded["labels"][:, 3].tolist() == [-100, -100]
    assert padded["image"] is batch["image"]
    x, y, mask = only((torch.ones(2, 3), torch.ones(2, 5)), pad={0: -1})
    assert (x.shape, y.shape, mask.shape) == ((2, 4), (2, 5), (2, 4))


def test_a_mask_of_the_batch_is_padded_with_zeros() -> None:
    own = torch.tensor([[1, 1, 0], [1, 1, 1]])
    padded = only({"x": torch.ones(2, 3), "seen": own}, mask="seen", pad=9)
    assert list(padded) == ["x", "seen"]
    assert padded["seen"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    assert only({"x": torch.ones(2, 3), "seen": own}, mask="seen", pad={"x": 9})["seen"].shape == (2, 4)


def test_calls_compose() -> None:
    (padded,) = fcg.bucket(fcg.bucket([{"x": torch.ones(2, 3)}], sizes=SIZES), sizes=[3], dim=0)
    assert padded["x"].shape == padded["mask"].shape == (3, 4)
    assert padded["mask"].sum() == 6


def test_all_batches_of_a_size_have_one_layout() -> None:
    turned = torch.ones(4, 2).T  # as long as the size, but with other strides
    assert only({"x": turned})["x"].stride() == only({"x": torch.ones(2, 3)})["x"].stride()
    image = torch.ones(3, 2, 5, 5).to(memory_format=torch.channels_last)
    assert only({"x": image}, dim=0)["x"].stride() == only({"x": image[:3]}, sizes=[3], dim=0)["x"].stride()


def test_length_and_waste() -> None:
    loader = [{"x": torch.ones(2, n)} for n in (4, 3, 6)]
    batches = fcg.bucket(loader, sizes=[8, 4, 4])
    assert batches.sizes == SIZES
    assert len(batches) == 3
    assert batches.waste == 0
    for _ in range(2):  # a loader is read anew in each epoch
        assert [batch["x"].shape[1] for batch in batches] == [4, 4, 8]
        assert batches.waste == pytest.approx(3 / 16)
    assert repr(batches) == "<bucket: sizes 4, 8; waste 19%>"
    endless = fcg.bucket(iter(loader), sizes=SIZES)
    assert len(list(endless)) == 3
    with pytest.raises(TypeError, match="a list_iterator has no length"):
        len(endless)


def ragged(count: int, device: str = "cpu") -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        lengths = torch.randint(1, SIZES[i % 2] + 1, (3,), generator=generator).tolist()
        rows = [torch.randn(n, 2, generator=generator) for n in lengths]
        mask = pad_sequence([torch.ones(n, dtype=torch.bool) for n in lengths], batch_first=True)
        yield {"x": pad_sequence(rows, batch_first=True).to(device), "mask": mask.to(device)}


def loss_of(w: Tensor, batch: dict[str, Tensor]) -> Tensor:
    errors = (torch.tanh(batch["x"] @ w) - 1).square().sum(-1)
    return torch.where(batch["mask"], errors, 0).sum() / batch["mask"].sum()


def learn(state: Any, batch: dict[str, Tensor]) -> Any:
    loss, grads = fcg.value_and_grad(loss_of)(state["w"], batch)
    return {"w": state["w"] - 0.1 * grads}, {"loss": loss}


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(0, 2**20))
def test_the_masked_loss_is_that_of_the_rows(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(n, 2, generator=generator) for n in lengths]
    mask = pad_sequence([torch.ones(n, dtype=torch.bool) for n in lengths], batch_first=True)
    padded = only({"x": pad_sequence(rows, batch_first=True), "mask": mask}, pad=1e6)
    w = torch.randn(2, 2, generator=generator)
    whole = torch.cat(rows)
    alone = loss_of(w, {"x": whole, "mask": torch.ones(len(whole), dtype=torch.bool)})
    torch.testing.assert_close(loss_of(w, padded), alone)


@pytest.mark.parametrize("device", DEVICES)
def test_one_capture_per_size(device: str) -> None:
    step = fcg.graph_step(max_captures=2, lowering="aten")(learn)
    state = {"w": torch.ones(2, 2, device=device)}
    batches = fcg.bucket(ragged(12), sizes=SIZES)
    assert_replay_equals_eager(step, state, list(batches))
    assert step.stats.captures == 2
    said = step.explain()
    for size in SIZES:
        assert (
            f"  traced for batch['mask'] bool[3,{size}]@{state['w'].device}, batch['x'] f32[3,{size},2]"
            in said
        )


@pytest.mark.parametrize("device", DEVICES)
def test_prefetched(device: str) -> None:
    step = fcg.graph_step(max_captures=2)(learn)
    state = fcg.place({"w": torch.ones(2, 2, device=device)})
    for batch in fcg.prefetch(fcg.bucket(ragged(12), sizes=SIZES), step):
        state, _ = step(state, batch)
    by_hand = torch.ones(2, 2, device=device)
    for batch in ragged(12, device):
        by_hand = learn({"w": by_hand}, batch)[0]["w"]
    torch.testing.assert_close(fcg.snapshot(state)["w"], by_hand)


@pytest.mark.cuda
def test_batches_on_a_device_stay_there() -> None:
    padded = only({"x": torch.ones(2, 3, device="cuda")})
    assert padded["x"].is_cuda
    assert padded["mask"].is_cuda


def test_too_long_is_refused_and_the_advice_helps() -> None:
    batch = {"tokens": torch.ones(2, 9).long(), "row": torch.ones(2)}
    with pytest.raises(fcg.LayoutError, match="longer than the largest size, 8") as caught:
        only(batch)
    assert "batch['tokens']  i64[2,9]" in str(caught.value)
    assert "sizes=[4, 8, 9]" in str(caught.value)
    assert only(batch, sizes=[4, 8, 9])["tokens"].shape == (2, 9)


def test_different_lengths_are_refused_and_the_advice_helps() -> None:
    batch = {"source": torch.ones(2, 3), "target": torch.ones(2, 5)}
    with pytest.raises(fcg.LayoutError, match=r"batch\['target'\]  f32\[2,5\]") as caught:
        only(batch)
    assert "pad={'source': 0}" in str(caught.value)
    inner = fcg.bucket([batch], sizes=SIZES, pad={"source": 0}, mask="source_mask")
    (padded,) = fcg.bucket(inner, sizes=SIZES, pad={"target": 0}, mask="target_mask")
    assert {name: x.shape[1] for name, x in padded.items()} == {
        "source": 4,
        "source_mask": 4,
        "target": 8,
        "target_mask": 8,
    }


LAYOUT_REFUSALS: list[tuple[Any, dict[str, Any], str]] = [
    ({"x": torch.ones(3)}, {}, "`x` of a batch has no tensor with dimension 1"),
    ({"x": torch.ones(2, 3), "y": torch.ones(2)}, {"pad": {"x": 0, "y": 0}}, "`y` of a batch has no tensor"),
    ({"x": torch.ones(2, 3), "mask": torch.ones(2)}, {}, "`mask` of a batch has no tensor"),
    ({}, {}, "has no tensor"),
]


@pytest.mark.parametrize(("batch", "options", "text"), LAYOUT_REFUSALS)
def test_what_cannot_be_padded_is_refused(batch: Any, options: Any, text: str) -> None:
    with pytest.raises(fcg.LayoutError, match=re.escape(text)):
        only(batch, **options)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.uint8, -100),
        (torch.int64, 0.5),
        (torch.bool, 2),
        (torch.int32, float("nan")),
        (torch.half, 1e9),
    ],
)
def test_a_value_that_the_dtype_cannot_hold_is_refused(dtype: torch.dtype, value: float) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        only({"x": torch.ones(2, 3, dtype=dtype)}, pad=value)
    assert only({"x": torch.ones(2, 3).double()}, pad=value)["x"].shape == (2, 4)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="expected an iterable of batches, got int"):
        fcg.bucket(3, sizes=SIZES)  # type: ignore[arg-type]
    for sizes in ((), (0,), (4.0,), (True,), 8):
        with pytest.raises(ValueError, match="sizes must be positive integers"):
            fcg.bucket([], sizes=sizes)  # type: ignore[arg-type]
    for dim in (-1, True, "x"):
        with pytest.raises(ValueError, match="dim must be 0 or a positive integer"):
            fcg.bucket([], sizes=SIZES, dim=dim)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pad must be a number"):
        fcg.bucket([], sizes=SIZES, pad="0")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mask must be a name or None"):
        fcg.bucket([], sizes=SIZES, mask=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`pad` names 'y', but a batch has 'x'"):
        only({"x": torch.ones(2, 3)}, pad={"y": 0})
    with pytest.raises(TypeError, match="a tensor, got Pair"):
        only(Pair(torch.ones(2, 3), torch.ones(2)))
    with pytest.raises(TypeError, match="a tensor, got str"):
        only("abc")


@pytest.mark.parametrize("length", [3, 4])
def test_a_batch_is_a_copy_whether_or_not_it_is_padded(length: int) -> None:
    def loader() -> Iterator[Any]:
        x = np.zeros((2, length), np.float32)
        for i in range(3):
            x[:] = i
            yield x

    assert [x[0, 0].item() for x, _ in list(fcg.bucket(loader(), sizes=SIZES))] == [0, 1, 2]
    rows = torch.zeros(2, length)
    only({"x": rows, "mask": rows > 0})["x"].add_(1)
    assert not rows.any()


@pytest.mark.cuda
@pytest.mark.parametrize("length", [3, 4])
def test_a_pinned_batch_stays_pinned(length: int) -> None:
    assert only({"x": torch.ones(2, length).pin_memory()})["x"].is_pinned()


# -- packed ---------------------------------------------------------------------------------------------------------

CAPACITY, MOST, WORDS = 24, 5, 7


def parameters(device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"words": (WORDS, 8), "places": (CAPACITY, 8), "qkv": (24, 8), "out": (WORDS, 8)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
        for name, shape in shapes.items()
    }


def packed_loss(params: dict[str, Tensor], batch: dict[str, Tensor], **attention: Any) -> Tensor:
    """Sum of the losses of a causal transformer of one layer and two heads."""
    x = params["words"][batch["tokens"]] + params["places"][batch["positions"]]
    q, k, v = (x @ params["qkv"].T).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    if not attention:
        documents = batch["documents"]
        attention = {"attn_mask": (documents[:, None, :, None] == documents[:, None, None, :]).tril()}
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, **attention)
    logits = (x + mixed.transpose(1, 2).flatten(2)) @ params["out"].T
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def alone(params: dict[str, Tensor], tokens: Tensor) -> Tensor:
    batch = {
        "tokens": tokens[None],
        "positions": torch.arange(len(tokens), device=tokens.device)[None],
        "labels": torch.cat([tokens[1:], tokens.new_tensor([-100])])[None],
    }
    return packed_loss(params, batch, is_causal=True)


def packed_step(state: Any, batch: dict[str, Tensor]) -> Any:
    loss, grads = fcg.value_and_grad(packed_loss)(state["params"], batch)
    return {"params": state["params"], "grads": grads}, {"loss": loss}


def assert_as_alone(step: Any, lengths: list[int], device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    rows = [torch.randint(WORDS, (n,), generator=generator).to(device) for n in lengths]
    params = parameters(device)
    state = fcg.place({"params": params, "grads": fcg.tree.map(torch.zeros_like, params)})
    state, metrics = step(state, fcg.pack(rows, capacity=CAPACITY, max_sequences=MOST, pad=3))
    loss, grads = fcg.value_and_grad(lambda p: sum(alone(p, row) for row in rows if len(row)))(params)
    torch.testing.assert_close(metrics["loss"].clone(), loss, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(fcg.snapshot(state["grads"]), grads, rtol=1e-10, atol=1e-10)


some_lengths = st.lists(st.integers(0, CAPACITY), min_size=1, max_size=MOST).filter(
    lambda lengths: 0 < sum(lengths) <= CAPACITY
)


def test_loss_and_gradients_of_a_packed_row_are_those_of_its_sequences() -> None:
    step = fcg.graph_step(lowering="aten")(packed_step)

    @settings(deadline=None, max_examples=30)
    @given(some_lengths)
    def holds(lengths: list[int]) -> None:
        assert_as_alone(step, lengths)

    holds()
    assert step.stats.traces == 1


@pytest.mark.kernels
def test_a_packed_row_in_a_compiled_step() -> None:
    assert_as_alone(fcg.graph_step(lowering="inductor")(packed_step), [5, 1, 9])


@pytest.mark.cuda
def test_a_packed_row_on_a_gpu() -> None:
    step = fcg.graph_step(packed_step)
    for lengths in ([5, 1, 9], [24], [2, 2, 2, 2, 2]):
        assert_as_alone(step, lengths, "cuda")
    assert step.stats.traces == 1


@given(lengths=some_lengths, dtype=st.sampled_from([torch.int64, torch.int32, torch.uint8]))
def test_a_row_gives_back_its_sequences(lengths: list[int], dtype: torch.dtype) -> None:
    rows = [torch.randint(1, 9, (n,)).to(dtype) for n in lengths]
    batch = fcg.pack([row.numpy() for row in rows], capacity=CAPACITY, max_sequences=MOST)
    starts = batch["cu_seqlens"]
    assert (starts.dtype, len(starts), int(starts[-1])) == (torch.int32, MOST + 2, CAPACITY)
    assert all(batch[name].shape == (1, CAPACITY) for name in ("tokens", "labels", "positions", "documents"))
    for i, row in enumerate(rows):
        place = slice(int(starts[i]), int(starts[i + 1]))
        assert_trees_all_equal(batch["tokens"][0, place], row)
        assert batch["labels"][0, place].tolist() == [*row[1:].tolist(), -100][: len(row)]
        assert batch["positions"][0, place].tolist() == list(range(len(row)))
        assert (batch["documents"][0, place] == i).all()
    assert (batch["labels"][0, sum(lengths) :] == -100).all()


def test_tokens_hold_their_padding() -> None:
    narrow, wide = torch.tensor([1], dtype=torch.uint8), torch.tensor([300])
    row = fcg.pack([narrow, wide], capacity=3, max_sequences=2, pad=50256)["tokens"]
    assert row.tolist() == [[1, 300, 50256]]
    with pytest.raises(ValueError, match=r"cannot hold pad=-1\.\nTo fix: `pad=0`"):
        fcg.pack([narrow], capacity=3, max_sequences=2, pad=-1)
    with pytest.raises(ValueError, match="pad must be an integer"):
        fcg.pack([wide], capacity=3, max_sequences=2, pad=0.5)  # type: ignore[arg-type]


def test_what_cannot_be_packed_is_refused_and_the_advice_helps() -> None:
    rows = [torch.ones(3, dtype=torch.int64)] * 3
    for sizes in ({"capacity": 8, "max_sequences": 3}, {"capacity": 9, "max_sequences": 2}):
        with pytest.raises(
            fcg.LayoutError, match=r"do not fit in one row(.|\n)*`capacity=9, max_sequences=3`"
        ):
            fcg.pack(rows, **sizes)
    assert fcg.pack(rows, capacity=9, max_sequences=3)["tokens"].shape == (1, 9)
    for name in ("capacity", "max_sequences"):
        for size in (0, 2.0, True):
            with pytest.raises(ValueError, match=f"pack: {name} must be a positive integer"):
                fcg.pack(rows, **{"capacity": 9, "max_sequences": 3, name: size})
    for wrong, got in (
        ([], "none"),
        ([torch.ones(3)], r"f32\[3\]"),
        ([rows], "list"),
        ([torch.ones(1, 2).long()], "i64"),
    ):
        with pytest.raises(TypeError, match=f"1-dim tensors of integers, got {got}"):
            fcg.pack(wrong, capacity=9, max_sequences=3)
