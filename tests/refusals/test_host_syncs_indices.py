"""Indices, masks and shapes that depend on values are refused; what only looks like them is accepted."""

import copy
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import functional_cg as fcg
from tests.refusals.judge import Spelling, accepted, assert_spelling, metric


def window(s, b):
    return b["x"][b["i"] : b["i"] + 2]


def prefix(s, b):
    return b["x"][: b["i"]]


def choice(s, b):
    return [s["w"], -s["w"]][b["i"]]


def mask_read(s, b):
    return b["x"][b["m"]].sum()


def mask_read_mean(s, b):
    return b["x"][b["x"] > 2].mean()


def mask_read_bytes(s, b):
    return b["x"][b["m"].to(torch.uint8)].sum()


def mask_write(s, b):
    x = b["x"].clone()
    x[b["m"]] = b["x"][0]
    return x


def mask_augmented(s, b):
    x = b["x"].clone()
    x[b["m"]] += 1
    return x


def nonzero(s, b):
    return b["m"].nonzero()


def where_of_one(s, b):
    return torch.where(b["m"])[0]


def argwhere(s, b):
    return torch.argwhere(b["m"])


def unique(s, b):
    return torch.unique(b["x"])


def unique_consecutive(s, b):
    return torch.unique_consecutive(b["x"])


def masked_select(s, b):
    return torch.masked_select(b["x"], b["x"] > 1).sum()


def repeat_interleave(s, b):
    return torch.repeat_interleave(b["idx"], b["idx"])


def bincount(s, b):
    return torch.bincount(b["idx"])


def one_hot(s, b):
    return F.one_hot(b["idx"])


def histogram(s, b):
    return torch.histc(b["x"], bins=4)


def view(s, b):
    return b["x"].view(b["i"], -1)


def arange(s, b):
    return torch.arange(b["i"])


def full(s, b):
    return torch.full((3,), b["s"])


def split(s, b):
    return torch.tensor_split(b["x"], b["idx"])[0]


def split_by_list(s, b):
    return torch.split(b["x"], b["idx"].tolist())[0]


def recurrent(x):
    zero = torch.zeros(1, len(x), 2)
    return rnn_weights(3, 1), zero


def packed(s, b):
    x, lengths = b["x"].expand(2, 4, 3), b["idx"] + 1
    sequences = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    weights, zero = recurrent(x)
    _, last = torch.gru(sequences.data, sequences.batch_sizes, zero, weights, True, 1, 0.0, True, False)
    return last[0, sequences.unsorted_indices]


def padded(s, b):
    x, lengths = b["x"].expand(2, 4, 3), b["idx"] + 1
    weights, zero = recurrent(x)
    out, _ = torch.gru(x, zero, weights, True, 1, 0.0, True, False, True)
    return out[torch.arange(len(lengths)), lengths - 1]


INDICES = [
    Spelling(
        window,
        "`b['x'].index_select(0, torch.arange(2, device=b['x'].device) + b['i'])`",
        lambda s, b: b["x"].index_select(0, torch.arange(2, device=b["x"].device) + b["i"]),
    ),
    Spelling(
        prefix, "with a length `n` that is fixed; a window of varying length becomes a mask and `torch.where`"
    ),
    Spelling(
        choice,
        "write `torch.stack([s['w'], -s['w']])[b['i']]`",
        lambda s, b: torch.stack([s["w"], -s["w"]])[b["i"]],
    ),
    Spelling(
        mask_read,
        "`torch.where(b['m'][..., None], b['x'], 0)`",
        lambda s, b: torch.where(b["m"][..., None], b["x"], 0).sum(),
    ),
    Spelling(
        mask_read_mean,
        "`torch.where(b['x'] > 2, b['x'], 0).sum() / (b['x'] > 2).sum()`",
        lambda s, b: torch.where(b["x"] > 2, b["x"], 0).sum() / (b["x"] > 2).sum(),
    ),
    Spelling(mask_read_bytes, "`torch.where(b['m'].to(torch.uint8)[..., None], b['x'], 0)` keeps the shape"),
    Spelling(
        mask_write,
        "`x = torch.where(b['m'][..., None], b['x'][0], x)`",
        lambda s, b: torch.where(b["m"][..., None], b["x"][0], b["x"]),
    ),
    Spelling(
        mask_augmented,
        "`x = torch.where(b['m'][..., None], x + 1, x)`",
        lambda s, b: torch.where(b["m"][..., None], b["x"] + 1, b["x"]),
    ),
    Spelling(nonzero, "`torch.where(b['m'], values, 0)`"),
    Spelling(where_of_one, "`torch.where(b['m'], values, 0)`"),
    Spelling(argwhere, "`torch.where(b['m'], values, 0)`"),
    Spelling(unique, "`s = torch.sort(b['x']).values; s[1:] == s[:-1]`"),
    Spelling(unique_consecutive, "`b['x'][1:] == b['x'][:-1]`"),
    Spelling(
        masked_select,
        "`torch.where((b['x'] > 1), b['x'], 0)` keeps the shape",
        lambda s, b: torch.where((b["x"] > 1), b["x"], 0).sum(),
    ),
    Spelling(
        repeat_interleave,
        "`torch.repeat_interleave(b['idx'], b['idx'], output_size=n)`",
        lambda s, b: torch.repeat_interleave(b["idx"], b["idx"], output_size=2),
    ),
    Spelling(
        bincount,
        "`torch.zeros(n, dtype=b['idx'].dtype).scatter_add(0, b['idx'], torch.ones_like(b['idx']))`",
        lambda s, b: torch.zeros(3, dtype=b["idx"].dtype).scatter_add(0, b["idx"], torch.ones_like(b["idx"])),
    ),
    Spelling(
        one_hot,
        "`torch.nn.functional.one_hot(b['idx'], num_classes=n)`",
        lambda s, b: torch.nn.functional.one_hot(b["idx"], num_classes=3),
    ),
    Spelling(
        histogram,
        "`torch.histc(b['x'], bins=n, min=a, max=b)`",
        lambda s, b: torch.histc(b["x"], bins=4, min=0, max=11),
    ),
    Spelling(view, "take the size from `.shape` or a static argument"),
    Spelling(arange, "take the size from `.shape` or a static argument"),
    Spelling(full, "write `b['s'].expand(shape)`", lambda s, b: b["s"].expand((3,))),
    Spelling(split, "take the size from `.shape` or a static argument"),
    Spelling(packed, "`out[torch.arange(len(lengths)), lengths - 1]`", padded),
    Spelling(split_by_list, "stay with torch ops on `b['idx']`"),
]


@pytest.mark.parametrize("spelling", INDICES, ids=str)
def test_spelling_is_refused_and_its_fix_accepted(spelling):
    assert_spelling(spelling)


def test_what_only_inputs_decide_may_be_a_constant():
    """A graph whose edges never change: the part of it without loops has a fixed shape."""
    edges = torch.tensor([[0, 1, 2], [0, 2, 1]])

    def degrees(s, edges):
        source, _ = edges[:, edges[0] != edges[1]]
        return s, torch.zeros(3).index_add(0, source, torch.ones(len(source)))

    state = fcg.place({"w": torch.ones(2)})
    with pytest.raises(
        fcg.HostSyncError, match="if `edges` never changes, close over it and declare it, `constants=`"
    ):
        fcg.graph_step(degrees)(state, edges)
    step = fcg.graph_step(lambda s: degrees(s, edges), constants=edges)
    assert step(fcg.fork(state))[1].tolist() == [0.0, 1.0, 1.0]
    with pytest.raises(fcg.HostSyncError) as caught:  # part of the state plays a part
        fcg.graph_step(lambda s, b: (s, b[s["w"][:1].expand(2) > b]))(state, torch.ones(2))
    assert "constants" not in str(caught.value)


# -- what only looks like one -----------------------------------------------------------------------------------


def rows(b):
    return b["x"][None, None]


def rnn_weights(gates, layers):
    sizes = [3] + [2] * (layers - 1)
    return [
        torch.full(shape, 0.1)
        for size in sizes
        for shape in ((gates * 2, size), (gates * 2, 2), (gates * 2,), (gates * 2,))
    ]


def lstm(s, b):
    zero = torch.zeros(2, 1, 2)
    return torch.lstm(b["x"][None], [zero, zero.clone()], rnn_weights(4, 2), True, 2, 0.0, True, False, True)


def gru(s, b):
    return torch.gru(b["x"][None], torch.zeros(1, 1, 2), rnn_weights(3, 1), True, 1, 0.0, True, False, True)


def literal_written(s, b):
    y = torch.tensor([1.0, 2.0, 3.0])
    y[0] = 5.0
    y.add_(s["w"])
    return y


def index_write(s, b):
    x = b["x"].clone()
    x[b["idx"]] = torch.zeros(2, 3)
    x[0] = b["s"]
    return x


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b: b["x"][b["idx"]],
        lambda s, b: b["x"][:, b["idx"]],
        lambda s, b: b["x"][[0, 2]],
        lambda s, b: b["x"][0, 1:, None],
        lambda s, b: b["x"][..., -1],
        lambda s, b: b["x"].index_put((b["idx"],), torch.ones(2, 3), accumulate=True),
        lambda s, b: F.embedding(b["idx"], b["x"]),
        lambda s, b: b["x"].gather(1, b["idx"][None].expand(4, 2)),
        lambda s, b: torch.where(b["m"][:, None], b["x"], -b["x"]),
        lambda s, b: b["x"].masked_fill(b["m"][:, None], 0.0),
        lambda s, b: F.scaled_dot_product_attention(rows(b), rows(b), rows(b)),
        lambda s, b: F.scaled_dot_product_attention(rows(b), rows(b), rows(b), is_causal=True),
        lambda s, b: F.scaled_dot_product_attention(rows(b), rows(b), rows(b), attn_mask=b["m"][None]),
        lambda s, b: torch.repeat_interleave(b["x"], 2, dim=0),
        lambda s, b: s["w"] * torch.tensor([1.0, 2.0, 3.0]),
        lambda s, b: sum(row.sum() for row in b["x"]) * len(b["x"]),
        lambda s, b: torch.sort(b["x"], dim=1, descending=True).values.cumsum(0),
        lambda s, b: F.cross_entropy(b["x"], torch.tensor([0, 1, 2, 0])),
        lambda s, b: copy.deepcopy(b["x"]) + 1,
        lambda s, b: 2.0 ** b["s"] + abs(-b["s"]),
        lambda s, b: F.one_hot(b["idx"], 4),
        lstm,
        gru,
        literal_written,
        index_write,
    ],
)
def test_accepted(function):
    accepted(metric(function))


def test_a_table_of_numpy_is_looked_up_outside_or_becomes_a_constant():
    table = np.linspace(0.0, 1.0, 10)
    state = fcg.place({"w": torch.ones(2)})
    fix = (
        r"To fix: make it a tensor where it is made, `table = torch.tensor\(table\)`, and declare it, "
        r"`constants=table`; or look the value up outside of the step and pass it as an input"
    )
    with pytest.raises(fcg.HostSyncError, match=fix):
        fcg.graph_step(lambda state, epoch: (state, table[epoch]))(state, 3)
    _, value = fcg.graph_step(lambda state, value: (state, value + 0))(fcg.fork(state), table[3])
    assert float(value) == pytest.approx(table[3])
    expected, table = table[3], torch.tensor(table)
    step = fcg.graph_step(lambda state, epoch: (state, table[epoch]), constants=table)
    assert float(step(state, 3)[1]) == expected


MEANS = {
    "rows": lambda x, w, m: x[m].mean(),
    "rows of a product": lambda x, w, m: (x @ w)[m].mean(),
    "along the rows": lambda x, w, m: x[m].mean(0),
    "along the rows of a product": lambda x, w, m: (x @ w)[m].mean(dim=0, keepdim=True),
    "rows by their sums": lambda x, w, m: x[x.sum(1) > 0].mean(),
    "columns": lambda x, w, m: (x @ w)[:, m].mean(),
    "elements": lambda x, w, m: x[x > 0].mean(),
    "elements of a product": lambda x, w, m: (x @ w)[x > 0].mean(),
}


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_the_advice_for_a_mean_of_what_a_mask_selects_is_that_mean(mean):
    """As text, run: the tensors are square, so that a mask along the wrong axis would fit, too."""
    torch.manual_seed(0)
    given = {"x": torch.randn(3, 3), "w": torch.randn(3, 3), "m": torch.tensor([True, False, True])}
    with pytest.raises(fcg.HostSyncError) as error:
        fcg.graph_fn(mean)(**given)
    (advice,) = re.findall(r"To fix: `(.*?)`", str(error.value))
    torch.testing.assert_close(eval(advice, {"torch": torch, **given}), mean(**given))
