"""Packed sequences of known lengths, and one-hot rows under ``torch.func``: what torch's kernels read on the host."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn

import functional_cg as fcg

LENGTHS = [2, 4, 1]


class Lengths(nn.Module):
    """An RNN over sequences of known lengths, which stand in a list, a literal or a buffer."""

    def __init__(self, layers: nn.Module, kept: str, **padding):
        super().__init__()
        self.layers, self.kept, self.padding = layers, kept, padding
        self.register_buffer("lengths", torch.tensor(LENGTHS))

    def forward(self, x):
        lengths = {"list": LENGTHS, "literal": torch.tensor(LENGTHS), "buffer": self.lengths}[self.kept]
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, last = self.layers(packed)
        packed = rnn.PackedSequence(
            out.data.tanh(), out.batch_sizes, out.sorted_indices, out.unsorted_indices
        )
        out, counts = rnn.pad_packed_sequence(packed, batch_first=True, **self.padding)
        last = last[0] if isinstance(last, tuple) else last
        return out.sum((1, 2)) / counts, last, counts


def one_step_of(model):
    """Return what a step and torch itself make of a batch: outputs, and gradients of the weights."""
    model = model.double()
    apply, params, buffers = fcg.from_module(model)
    state = {"params": params, "buffers": buffers}

    @fcg.graph_step
    def step(state, x):
        def loss(params):
            outs, _ = apply(params, state["buffers"], x)
            return outs[0].square().sum() + outs[1].sum(), outs

        (_, outs), grads = fcg.value_and_grad(loss, has_aux=True)(state["params"])
        return state, (outs, grads)

    x = torch.randn(3, 4, 5, dtype=torch.float64)
    for _ in range(2):  # traced, then replayed
        state, (outs, grads) = step(state, x)
    expected = model(x)
    (expected[0].square().sum() + expected[1].sum()).backward()
    return (outs, grads), (expected, {name: one.grad for name, one in model.named_parameters()})


@pytest.mark.parametrize("kept", ["list", "literal", "buffer"])
@pytest.mark.parametrize(
    ("layers", "padding"),
    [
        (lambda: nn.LSTM(5, 3, 2, batch_first=True, bidirectional=True), {}),
        (lambda: nn.LSTM(5, 3, proj_size=2, batch_first=True), {"total_length": 6}),
        (lambda: nn.GRU(5, 3, batch_first=True), {"padding_value": -1.0, "total_length": 4}),
        (lambda: nn.RNN(5, 3, nonlinearity="relu", batch_first=True), {}),
    ],
)
def test_sequences_of_known_lengths_are_packed_as_torch_packs_them(layers, padding, kept):
    (outs, grads), (expected, of_torch) = one_step_of(Lengths(layers(), kept, **padding))
    for got, wanted in zip(outs, expected, strict=True):
        torch.testing.assert_close(got, wanted.detach())
    for name, wanted in of_torch.items():
        torch.testing.assert_close(grads[name], wanted)


def test_what_is_packed_and_unpacked_again_is_what_it_was_bit_by_bit():
    sequences = [torch.randn(4, 3), torch.randn(2, 3), torch.randn(1, 3)]

    @fcg.graph_step
    def step(state, a, b, c):
        packed = rnn.pack_sequence([a, b, c])
        return state, (packed.data, packed.batch_sizes, *rnn.unpack_sequence(packed))

    _, (data, sizes, *again) = step({"w": torch.ones(1)}, *sequences)
    packed = rnn.pack_sequence(sequences)
    assert torch.equal(data, packed.data)
    assert torch.equal(sizes, packed.batch_sizes)
    assert all(map(torch.equal, again, sequences))


@pytest.mark.parametrize(
    ("lengths", "says"),
    [([2, 4, 1], "enforce_sorted=False"), ([4, 2], "do not fit"), ([4, 2, 0], "do not fit")],
)
def test_lengths_that_torch_refuses_are_refused(lengths, says):
    @fcg.graph_step
    def step(state, x):
        return state, rnn.pack_padded_sequence(x, lengths, batch_first=True).data

    x = torch.randn(3, 4, 5)
    with pytest.raises(RuntimeError, match="length"):
        rnn.pack_padded_sequence(x, lengths, batch_first=True)
    with pytest.raises(fcg.CaptureError, match=says):
        step({"w": torch.ones(1)}, x)


def test_a_total_length_that_is_too_short_is_refused():
    @fcg.graph_step
    def step(state, x):
        packed = rnn.pack_padded_sequence(x, [4, 2, 1], batch_first=True)
        return state, rnn.pad_packed_sequence(packed, total_length=3)[0]

    with pytest.raises(fcg.CaptureError, match="total_length"):
        step({"w": torch.ones(1)}, torch.randn(3, 4, 5))


def test_other_lengths_in_a_list_are_noticed():
    lengths = [4, 2, 1]

    @fcg.graph_step
    def step(state, x):
        return state, rnn.pack_padded_sequence(x, lengths, batch_first=True).data.sum()

    state, _ = step({"w": torch.ones(1)}, torch.randn(3, 4, 5))
    lengths[1] = 3
    with pytest.raises(fcg.BakedValueError, match="lengths"):
        step(state, torch.randn(3, 4, 5))


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_one_hot_rows_under_a_transform_ask_for_nothing(transform):
    labels = torch.tensor([[0, 3], [2, 1]])

    @fcg.graph_step
    def step(state, labels):
        def loss(w):
            return (F.one_hot(labels, 4).to(w.dtype) * w).sum()

        if transform == "vmap":
            return state, torch.func.vmap(lambda one: F.one_hot(one, 4))(labels)
        return state, torch.func.grad(loss)(state["w"])

    _, got = step({"w": torch.ones(4)}, labels)
    rows = F.one_hot(labels, 4)
    assert torch.equal(got, rows if transform == "vmap" else rows.sum((0, 1)).float())


def test_an_eager_one_hot_refuses_what_torch_does():
    @fcg.graph_step
    def step(state, labels):
        return state, F.one_hot(labels, 3)

    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        step.eager({"w": torch.ones(1)}, torch.tensor([3]))
