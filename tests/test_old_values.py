"""An old leaf kept in a new leaf or a metric has the old value, however the step is written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import functional_cg as fcg
from functional_cg.stages.fx_passes.old_values import KEPT, LATER, keep_old_values
from functional_cg.stages.lower.inductor import compile_graph, opened
from functional_cg.testing import assert_no_alias, assert_trees_all_close
from tests.compiled_graphs import compiled_as_head, compiled_in_turn, compiled_once, lower_as_on_a_gpu
from tests.sharding.programs import Setting
from tests.sharding.ranks import on_ranks
from tests.shares import CALLS, share, thorough

# Ways to write "equal to a leaf of [4, 3]": copies, views and casts there and back, ops that happen to change nothing.
SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "the leaf itself": lambda a: a,
    "clone": torch.clone,
    "to(copy=True)": lambda a: a.to(a.dtype, copy=True),
    "cat of one": lambda a: torch.cat([a]),
    "stack of one": lambda a: torch.stack([a])[0],
    "pad by nothing": lambda a: F.pad(a, (0, 0)),
    "repeat once": lambda a: a.repeat(1, 1),
    "tile once": lambda a: a.tile(1, 1),
    "to double and back": lambda a: a.double().float(),
    "first power": lambda a: a.pow(1),
    "clone of a flat view": lambda a: a.view(-1).clone().view(a.shape),
    "clone of a reshaped one": lambda a: a.reshape(2, 6).clone().reshape(a.shape),
    "copied into an empty one": lambda a: torch.empty_like(a).copy_(a),
    "added into a full one": lambda a: torch.full_like(a, 0.0).add_(a),
    "plus zero": lambda a: a + 0,
    "minus zero": lambda a: a - 0.0,
    "times one": lambda a: a * 1,
    "over one": lambda a: a / 1,
    "doubled and halved": lambda a: a.mul(2).div(2),
    "plus zeros": lambda a: a + torch.zeros_like(a),
    "times ones": lambda a: a * torch.ones_like(a),
    "negated twice": lambda a: a.neg().neg(),
    "its own maximum": lambda a: torch.maximum(a, a),
    "between itself": lambda a: a.lerp(a, 0.5),
    "clamped far out": lambda a: a.clamp(-1e30, 1e30),
    "hardtanh far out": lambda a: F.hardtanh(a, -1e30, 1e30),
    "threshold far out": lambda a: F.threshold(a, -1e30, 0.0),
    "two halves of relu": lambda a: torch.relu(a) - torch.relu(-a),
    "chosen everywhere": lambda a: torch.where(torch.ones_like(a, dtype=torch.bool), a, a * 2),
    "masked nowhere": lambda a: a.masked_fill(torch.zeros_like(a, dtype=torch.bool), 0),
    "dropout of nothing": lambda a: F.dropout(a, 0.0),
    "transposed twice": lambda a: a.t().clone().t(),
    "contiguous transposed": lambda a: a.t().contiguous().t(),
    "permuted": lambda a: a.permute(1, 0).clone().permute(1, 0),
    "axes moved": lambda a: a.movedim(0, 1).clone().movedim(0, 1),
    "turned round": lambda a: torch.rot90(a, 4),
    "flipped twice": lambda a: a.flip(0).flip(0),
    "rolled by nothing": lambda a: a.roll(0),
    "one more axis": lambda a: a.unsqueeze(0).clone().squeeze(0),
    "sum over one": lambda a: a.unsqueeze(-1).sum(-1),
    "mean over one": lambda a: a[None].mean(0),
    "maximum over one": lambda a: a.unsqueeze(-1).amax(-1),
    "expanded by one": lambda a: a.expand(1, *a.shape).sum(0),
    "all of a slice": lambda a: a[0 : a.shape[0]].clone(),
    "narrowed to all": lambda a: a.narrow(0, 0, a.shape[0]).clone(),
    "split in one": lambda a: torch.split(a, [a.shape[0]])[0].clone(),
    "split and joined": lambda a: torch.cat(a.split(2)),
    "one chunk": lambda a: torch.cat(a.chunk(1)),
    "rows apart and together": lambda a: torch.stack(a.unbind(0)),
    "all rows by index": lambda a: a[torch.arange(a.shape[0], device=a.device)],
    "all rows selected": lambda a: a.index_select(0, torch.arange(a.shape[0], device=a.device)),
    "all rows gathered": lambda a: a.gather(0, torch.arange(4, device=a.device)[:, None].expand_as(a)),
    "all rows written": lambda a: torch.zeros_like(a).index_copy(0, torch.arange(4, device=a.device), a),
    "sorted and back": lambda a: a.sort(0).values.gather(0, a.sort(0).indices.argsort(0)),
    "as_strided": lambda a: a.as_strided(a.shape, a.stride()).clone(),
    "windows of one": lambda a: a.unfold(0, 1, 1)[..., 0].clone(),
    "bits as integers": lambda a: a.view(torch.int32).clone().view(torch.float32),
    "pooled by one": lambda a: F.avg_pool2d(a[None, None], 1)[0, 0],
    "as large as before": lambda a: F.interpolate(a[None, None], scale_factor=1, mode="nearest")[0, 0],
    "pixels of one": lambda a: F.pixel_shuffle(a[None, None], 1)[0, 0],
    "copied in its format": lambda a: a.clone(memory_format=torch.contiguous_format),
    "detached": lambda a: a.view_as(a).detach().clone(),
    "mapped over rows": lambda a: torch.func.vmap(torch.clone)(a),
    "a gradient": lambda a: fcg.grad(lambda p: (p * a).sum())(torch.zeros_like(a)),
    "recomputed": lambda a: fcg.remat(torch.clone)(a),
    "one step of a scan": lambda a: fcg.scan(lambda c, x: (c.clone(), x), a, torch.zeros_like(a[:1]))[0],
    "chosen by a condition": lambda a: fcg.cond(a.sum() == a.sum(), lambda: a.clone(), lambda: a + 1),
}  # fmt: skip
# Of these a copy is what is kept; a part of it, and one that another leaf changes places with.
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a row of a clone": lambda a: a.clone()[1],
    "a column of a clone": lambda a: a.clone()[:, 1],
    "the last row of a stack": lambda a: torch.stack([a, a])[1, -1],
    "an element": lambda a: a.clone()[0, 0],
    "a diagonal": lambda a: a.clone().diagonal(),
}


def batch_of(call: int, device: str) -> Tensor:
    return (torch.arange(12.0).reshape(4, 3) + call).to(device)


def kept_everywhere(state: Any, x: Tensor) -> Any:
    """Each spelling in a leaf and in a metric, of a leaf that the step updates."""
    old = state["a"]
    kept = {name: spelled(old) for name, spelled in SPELLINGS.items()}
    metrics = {name: spelled(old) for name, spelled in (SPELLINGS | PARTS).items()}
    return {"a": old + x, "kept": kept}, metrics


def spelled_wrong(device: str, lowering: str) -> list[str]:
    """What five calls of :func:`kept_everywhere` get wrong."""
    old = batch_of(0, device)
    start = {"a": old, "kept": {name: torch.zeros_like(old) for name in SPELLINGS}}
    state, step = fcg.place(start), fcg.graph_step(kept_everywhere, lowering=lowering)
    wrong, held = set(), []
    for call in range(5):
        x = batch_of(call + 1, device)
        state, metrics = step(state, x)
        for name, spelled in (SPELLINGS | PARTS).items():
            expected = spelled(old)
            held.append((f"metric, {name}", metrics[name], expected))
            if name in SPELLINGS and not torch.equal(state["kept"][name] + 0, expected):
                wrong.add(f"leaf, {name}")
        old = old + x
    assert step.stats.replays == 5
    assert_no_alias([value for _, value, _ in held], state)
    return sorted(wrong | {name for name, value, expected in held if not torch.equal(value, expected)})


def test_old_values_on_aten() -> None:
    assert len(SPELLINGS) >= 30
    assert spelled_wrong("cpu", "aten") == []


@pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning")  # torch's own, of a diagonal
@compiled_once
def test_old_values_compiled(compiled_on: str) -> None:
    assert spelled_wrong(compiled_on, "inductor") == []


def moved_about(state: Any, x: Tensor) -> Any:
    """Leaves that change places: in a pair, in a ring, turned in place, and as parts of each other."""
    a, b = state["pair"]
    p, q, r = state["ring"]
    new = {
        "pair": (torch.cat([b]), a.clone()),
        "ring": [q.double().float(), r, p.pow(1) + x[0]],
        "mirror": state["mirror"].T.clone(),
        "turned": state["turned"].flip(0),
        "shifted": state["shifted"].roll(1, 0),
        "rows": torch.stack([state["turned"][1], state["mirror"][0], x[0]]),
        "sum": state["sum"] + state["rows"],
        "before": state["sum"].clone(),
        "half": state["sum"].bfloat16(),
    }
    return new, {"old": fcg.tree.map(torch.clone, state), "row": state["rows"].clone()[1]}


def exact_training(state: Any, x: Tensor) -> Any:
    """Whole numbers: an update, what it replaces, an accumulator that is emptied, and statistics that are kept."""

    def loss_fn(params: Any) -> Tensor:
        return ((x @ params["w"] + params["b"]) * state.buffers["sign"]).sum()

    loss, grads = fcg.value_and_grad(loss_fn)(state.params)
    fcg.tap("old", state.params["w"].clone())
    sums = fcg.tree.map(torch.add, state.grads, grads)
    new = state.apply_gradients(sums, grads=fcg.tree.map(torch.zeros_like, sums))
    new = new.replace(
        params=fcg.tree.map(lambda leaf: leaf.clamp(-9, 9), new.params),
        buffers={"sign": state.buffers["mean"].sign() * 2 - 1, "mean": x.sum(0)[:2], "last": state.buffers["mean"] + 0},
        target=fcg.tree.map(torch.clone, state.params),
        older=fcg.tree.map(lambda leaf: leaf.view_as(leaf), state.target),
    )  # fmt: skip
    return new, {"loss": loss, "old": fcg.snapshot(state.params), "grads": grads}


class Following(fcg.TrainState):
    target: Any
    older: Any


def training_state(optimizer: Any, device: str) -> Any:
    params = {"w": torch.arange(6.0).reshape(3, 2).to(device), "b": torch.ones(2).to(device)}
    buffers = {name: torch.tensor([1.0, -1.0]).to(device) for name in ("sign", "mean", "last")}
    return Following.create(
        params=params,
        optimizer=optimizer,
        buffers=buffers,
        accumulate=True,
        target=fcg.snapshot(params),
        older=fcg.snapshot(params),
    )


def assert_equal(got: Any, expected: Any, name: str) -> None:
    """Exactly, but for the sign of zeros: a sum that begins at zero has lost it."""
    assert_trees_all_close(got, expected, rtol=0, atol=0, name=name)


def assert_as_eager(train_step: Any, state: Any, batches: Callable[[int], Any], **options: Any) -> Any:
    """Calls, of which all metrics are kept: bits of the eager run. Returns the step."""
    state = fcg.place(state) if not hasattr(state, "generation") else state
    twin, step = fcg.fork(state), fcg.graph_step(train_step, lowering="inductor", **options)
    kept, expected = [], []
    for call in range(CALLS):
        twin, wanted = step.eager(twin, batches(call))
        state, metrics = step(state, batches(call))
        kept.append(metrics)
        expected.append(wanted)
        assert_equal((state, metrics), (twin, wanted), f"call {call}")
    assert_equal(kept, expected, "kept metrics")
    assert step.stats.replays == CALLS
    return step


def assert_close_to_eager(train_step: Any, state: Any, batches: Callable[[int], Any], **options: Any) -> None:
    """Four calls, each from the state of the last, close to the eager run."""
    state, step = fcg.place(state), fcg.graph_step(train_step, lowering="inductor", **options)
    for call in range(4):
        expected = step.eager(fcg.fork(state), batches(call))
        state, metrics = step(state, batches(call))
        assert_trees_all_close((state, metrics), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.kernels
@compiled_once
def test_leaves_that_change_places(compiled_on: str) -> None:
    names = ("mirror", "turned", "shifted", "rows", "sum", "before")
    first = {name: batch_of(n, compiled_on)[:3] for n, name in enumerate(names)}
    pair = (batch_of(7, compiled_on)[0], batch_of(8, compiled_on)[0])
    ring = [batch_of(n, compiled_on)[0] for n in (1, 2, 3)]
    state = {**first, "pair": pair, "ring": ring, "half": first["sum"].bfloat16()}
    assert_as_eager(moved_about, state, lambda call: batch_of(call % 3, compiled_on)[:3].remainder(4))


@compiled_in_turn("flat, steps", [(True, 3), (False, 1), (False, 3), (True, 1)], 2)
def test_exact_training(compiled_on: str, *, flat: bool, steps: int) -> None:
    optimizer = fcg.optim.sgd(1.0)
    state = training_state(fcg.optim.flatten(optimizer) if flat else optimizer, compiled_on)

    def batches(call: int) -> Tensor:
        return torch.stack([batch_of(call + n, compiled_on)[:3].remainder(5) - 2 for n in range(steps)])

    if steps == 1:
        assert_as_eager(exact_training, state, lambda call: batches(call)[0])
    else:
        assert_as_eager(exact_training, state, batches, steps_per_call=steps)


# -- leaves and metrics that are a leaf but for a part ----------------------------------------------------------------

PARTIAL = {
    "index_put": lambda w, b: w.index_put((b["i"],), b["v"]),
    "index_add": lambda w, b: w.index_add(0, b["i"], b["v"]),
    "index_fill": lambda w, b: w.index_fill(0, b["i"], 3.0),
    "index_copy": lambda w, b: w.index_copy(0, b["i"], b["v"]),
    "slice_scatter": lambda w, b: torch.slice_scatter(w, b["v"], 0, 0, 3),
    "select_scatter": lambda w, b: torch.select_scatter(w, b["v"][0], 0, 1),
    "diagonal_scatter": lambda w, b: torch.diagonal_scatter(w, b["v"][0, :2]),
    "twice": lambda w, b: w.index_put((b["i"],), b["v"]).index_put((b["i"] + 1,), b["v"] * 2),
    "a view of it": lambda w, b: w.index_put((b["i"],), b["v"]).t(),
    "of a copy": lambda w, b: written(w.clone(), b),
    "of a product with one": lambda w, b: written(w * 1, b),
    "by an op that writes": lambda w, b: tenfold(w.clone()),
}


@torch.library.custom_op("fcg_tests::tenfold_", mutates_args={"x"})
def tenfold_(x: Tensor) -> None:
    x.mul_(10)


def tenfold(copy: Tensor) -> Tensor:
    tenfold_(copy)
    return copy


def written(copy: Tensor, b: Any) -> Tensor:
    copy[b["i"]] = b["v"]
    return copy


def batch(call: int, device: str) -> dict[str, Tensor]:
    rows = torch.full((3, 2), float(call)) + torch.arange(2)
    return {"i": torch.tensor([0, 1, 3]).to(device), "v": rows.to(device)}


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning")  # torch's own, of a diagonal
@compiled_once
def test_a_metric_that_is_a_leaf_but_for_a_part(compiled_on: str) -> None:
    def train_step(state: Any, b: Any) -> Any:
        return {"w": state["w"] + 1}, {name: changed(state["w"], b) for name, changed in PARTIAL.items()}

    first = {"w": torch.ones(5, 2).to(compiled_on)}
    assert_as_eager(train_step, first, lambda call: batch(call, compiled_on))


@compiled_once
@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("name", ["index_put", "slice_scatter", "by an op that writes"])
def test_a_leaf_that_is_another_one_but_for_a_part(name: str, order: str, compiled_on: str) -> None:
    def train_step(state: Any, b: Any) -> Any:
        return {"w": state["w"] + 1, "x": PARTIAL[name](state["w"], b)}, {"m": PARTIAL[name](state["w"], b)}

    leaves = {"w": torch.ones(5, 2).to(compiled_on), "x": torch.zeros(5, 2).to(compiled_on)}
    state = leaves if order == "first" else dict(reversed(leaves.items()))
    assert_as_eager(train_step, state, lambda call: batch(call, compiled_on))


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning")  # torch's own, of a diagonal
@compiled_as_head
def test_a_value_that_is_kept_beside_itself_but_for_a_part(compiled_on: str) -> None:
    """What a call may write into, because nobody seems to read it later, is a metric, or another leaf."""

    def train_step(state: Any, b: Any) -> Any:
        values = {name: state["w"].sin() * (n + 1) for n, name in enumerate(PARTIAL)}
        new = {name: changed(values[name], b) for name, changed in PARTIAL.items()}
        turned = new.pop("a view of it").t()
        return {"w": state["w"] + 1, "kept": values, "new": new, "turned": turned}, {
            "kept": values,
            "new": new,
        }

    zeros = {name: torch.zeros(5, 2).to(compiled_on) for name in PARTIAL}
    new = {name: zero.clone() for name, zero in zeros.items() if name != "a view of it"}
    w, turned = torch.ones(5, 2).to(compiled_on), torch.zeros(5, 2).to(compiled_on)
    state = {"w": w, "kept": zeros, "new": new, "turned": turned}
    assert_close_to_eager(train_step, state, lambda call: batch(call, compiled_on))


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning")  # torch's own, of a diagonal
@compiled_in_turn("joined", [("stack",), ("cat",)], 2)
def test_a_value_that_is_kept_in_a_concatenation_but_for_a_part(compiled_on: str, joined: str) -> None:
    """A compiler computes the parts of a concatenation in its memory: what is run in place in a part changes it."""
    join = torch.stack if joined == "stack" else torch.cat

    def train_step(state: Any, b: Any) -> Any:
        new, kept = {}, {}
        for number, (name, changed) in enumerate(PARTIAL.items()):
            value = state["w"].cos() * (number + 1)
            first = changed(value, b)
            first = first.t() if name == "a view of it" else first
            kept[name] = join([state["w"], value, first])
            new[name] = changed(first, b)
        new["a view of it"] = new["a view of it"].t()
        return {"w": state["w"] + 1, "new": new}, kept

    zeros = {name: torch.zeros(5, 2).to(compiled_on) for name in PARTIAL}
    state = {"w": torch.ones(5, 2).to(compiled_on), "new": zeros}
    assert_close_to_eager(train_step, state, lambda call: batch(call, compiled_on), certify=False)


FOREIGN: dict[str, Callable[[Any], Tensor]] = {
    "imaginary": lambda s: s["c"].imag,
    "real": lambda s: s["c"].real[1:],
    "conjugate": lambda s: s["c"].conj().imag,
    "pairs": lambda s: torch.view_as_real(s["c"]),
    "turned": lambda s: s["c"].flip(0).real,
    "bytes": lambda s: s["a"].view(torch.uint8),
    "turned bytes": lambda s: s["a"].view(torch.int16).t(),
    "long": lambda s: s["a"].view(torch.int64).flip(0),
    "double of the imaginary": lambda s: s["c"].imag * 2,
    "sum of bytes": lambda s: s["a"].view(torch.uint8).sum(0),
}


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize(
    "moves", share([False, True], 2), ids=share(["from the fourth call on", "from the first call on"], 2)
)
@compiled_once
def test_views_that_a_compiler_leaves_to_torch(compiled_on: str, *, moves: bool) -> None:
    """In a certified step; where nothing moves at first, the certificate sees none of it."""

    def train_step(state: Any, x: Tensor) -> Any:
        kept = {name: look(state) for name, look in FOREIGN.items()}
        return {"a": state["a"] - x, "c": state["c"] * (1 + x.sum()), "kept": kept}, {"kept": state["kept"]}

    a, c = torch.full((4, 4), 8.0), torch.complex(torch.ones(3), torch.full((3,), 8.0))
    views = {name: look({"a": a, "c": c}).resolve_conj().clone() for name, look in FOREIGN.items()}
    first = {"a": a, "c": c, "kept": views}
    state = fcg.place(fcg.tree.map(lambda leaf: leaf.to(compiled_on), first))
    twin, step = fcg.fork(state), fcg.graph_step(train_step, lowering="inductor")
    for call in range(6):
        x = torch.full((4, 4), float(moves or call > 2)).to(compiled_on)
        twin, wanted = step.eager(twin, x)
        state, metrics = step(state, x)
        assert_equal((state, metrics), (twin, wanted), f"call {call}")


@compiled_once
def test_a_leaf_becomes_another_one_but_for_a_part_and_gets_an_input(compiled_on: str) -> None:
    """What is written into one slot, and becomes another, is in that one alone when the first is written again."""

    def train_step(state: Any, b: Any) -> Any:
        moved = {
            f"to {name}": PARTIAL[name](state[name], b) for name in ("index_put", "by an op that writes")
        }
        return {
            name: b["new"] + n for n, name in enumerate(("index_put", "by an op that writes"))
        } | moved, {}

    names = ("index_put", "by an op that writes", "to index_put", "to by an op that writes")
    first = {name: torch.ones(5, 2).to(compiled_on) for name in names}

    def batches(call: int) -> Any:
        return batch(call, compiled_on) | {"new": torch.full((5, 2), float(call)).to(compiled_on)}

    assert_as_eager(train_step, first, batches)
    assert_as_eager(train_step, dict(reversed(first.items())), batches)


def replaced_and_added(v: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """A value whose parts are replaced and added to, by rows that are known late; all that it was is kept."""
    rows = x[0].argsort(stable=True)[:2]
    replaced = v.mT.clone().index_put((rows,), x[:2])
    filled = replaced.diagonal_scatter(x[0]).clone()
    filled.diagonal().fill_(3)
    other = filled.diagonal_scatter(w[0])
    added = other.index_add(0, rows, x[:2])
    kept = torch.cat([added.mT, v, added]), added.repeat(2, 1), torch.cat([other, added], 1)
    return added.clamp(-8, 8), F.pad(replaced, (0, 1)), *kept


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning")  # torch's own, of a diagonal
@compiled_as_head
def test_what_is_added_to_a_value_is_there_for_all_that_read_the_sum(compiled_on: str) -> None:
    """Torch's compiler put some of them in front of the addition, on a host and for less memory (2.11 and 2.13)."""

    def step(s: Any, x: Tensor) -> Any:
        new, *metrics = replaced_and_added(s["v"], s["w"], x)
        return {"v": new, "w": s["w"]}, metrics

    generator = torch.Generator().manual_seed(0)

    def some() -> Tensor:
        return torch.randint(-8, 9, (4, 4), generator=generator).float().to(compiled_on)

    state = fcg.place({"v": some(), "w": some()})
    run, twin = fcg.graph_step(step, lowering="inductor", certify=False), fcg.fork(state)
    for _ in range(CALLS):
        x = some()
        twin, expected = run.eager(twin, x)
        state, metrics = run(state, x)
        assert_trees_all_close((state, metrics), (twin, expected), rtol=0, atol=0)


@pytest.mark.kernels
@compiled_once
def test_what_reads_a_leaf_that_an_op_of_ones_own_writes_into(compiled_on: str) -> None:
    """A compiler waits with what is cheap to compute, here with all but the op."""

    def train_step(state: Any, x: Tensor) -> Any:
        w, b = state["w"], state["b"]
        first, row = (w + x) * 3, b.t()[1] + 1
        return {"w": tenfold(w.clone()), "b": tenfold(b.clone()), "first": first, "row": row * 2}, {
            "x": x * 2
        }

    square = {name: torch.ones(3, 3).to(compiled_on) for name in ("b", "first", "w")}
    first = square | {"row": torch.ones(3).to(compiled_on)}
    state, step = fcg.place(first), fcg.graph_step(train_step, lowering="inductor")
    for call in range(4):
        x = torch.full((3, 3), float(call)).to(compiled_on)
        twin, wanted = step.eager(fcg.place(fcg.snapshot(state)), x)
        state, metrics = step(state, x)
        assert_equal((state, metrics), (twin, wanted), f"call {call}")
        state = fcg.tree.at(lambda s: (s["w"], s["b"]), state, (square["w"] * call, square["b"] + call))


@compiled_once
def test_what_becomes_its_own_slot_and_is_kept_too(compiled_on: str) -> None:
    """The compiler may write these into their slots; what is kept of the old value it may not."""

    def train_step(state: Any, b: Any) -> Any:
        new = state["w"].index_put((b["i"],), b["v"])
        turned = state["turned"].index_put((b["i"],), b["v"][:, :1].expand(3, 5)).t()
        metrics = {"m": new, "sum": new.sum(), "old": state["w"][0], "cat": torch.cat([state["w"]])}
        return {
            "w": new,
            "turned": turned,
            "kept": state["w"].clone(),
            "cat": torch.cat([state["turned"]]),
        }, metrics

    first = {
        name: torch.ones(5, n).to(compiled_on)
        for name, n in (("w", 2), ("kept", 2), ("turned", 5), ("cat", 5))
    }
    assert_as_eager(train_step, first, lambda call: batch(call, compiled_on))


class Counting(fcg.TrainState):
    count: Any


def summed(state: Any, b: Any) -> Any:
    grads = fcg.tree.map(torch.ones_like, state.params)
    doubled = state.count * 2
    return state.apply_gradients(grads, count=doubled), {"m": fcg.sharding.sum(state.count)}


def sums_on_ranks() -> list[float]:
    """What was kept of a sum over ranks, of a leaf that each call doubles."""
    zero = Setting({"data": 2}, 1).zero("cpu")
    given = {"params": torch.ones(8), "optimizer": fcg.optim.sgd(0.1), "sharding": zero}
    state, step, kept = (
        Counting.create(**given, count=torch.ones(5)),
        fcg.graph_step(summed, lowering="inductor"),
        [],
    )
    for call in range(4):
        state, metrics = step(state, batch(call, "cpu"))
        kept.append(metrics["m"])
    return [float(metric[0]) for metric in kept]


def test_a_sum_over_ranks_that_is_kept() -> None:
    assert on_ranks(2, sums_on_ranks, device="cpu", timeout=240.0) == [[2.0, 4.0, 8.0, 16.0]] * 2


def traced(function: Any) -> torch.fx.Graph:
    """As the compiler sees it: arguments are written at the end."""
    values = (torch.ones(5, 2), torch.tensor([0, 1, 3]), torch.zeros(3, 2))
    return torch.fx.experimental.proxy_tensor.make_fx(function)(*values).graph


def test_a_buffer_that_is_written_in_place_is_not_copied() -> None:
    """As a replay buffer is, by one or by two calls: a copy of it at each call is what nobody wants to pay."""

    def function(w: Tensor, i: Tensor, v: Tensor) -> Tensor:
        new = w.index_put((i,), v).index_put((i + 1,), v)
        found = new.sum()
        w.copy_(new)
        return found

    graph = traced(function)
    keep_old_values(graph)
    (write,) = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert write.args[1].target is torch.ops.aten.index_put.default
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


@pytest.mark.cuda
def test_what_is_stored_lies_as_traced() -> None:
    """A value that is not laid out yet looks contiguous to its readers: a sum over all but the channels took one pass.

    On a host, the compiler asks for no strides so early.
    """
    graph = fx.Graph()
    x, gate = graph.placeholder("x"), graph.placeholder("gate")
    product = graph.call_function(torch.ops.aten.mul.Tensor, (x, gate))
    first = graph.call_function(LATER, (product, gate))
    second = graph.call_function(KEPT, (graph.call_function(torch.ops.aten.sub.Tensor, (first, x)),))
    sums = (
        graph.call_function(torch.ops.aten.sum.dim_IntList, (value, [0, 2, 3])) for value in (second, first)
    )
    graph.output(tuple(sums))
    shape = (8, 64, 32, 32)
    given = [torch.ones(shape, device="cuda").contiguous(memory_format=torch.channels_last)]
    given.append(torch.full((8, 64, 1, 1), 3.0, device="cuda"))
    compiled = compile_graph(
        fx.GraphModule(torch.nn.Module(), graph), given, on_host=False, small=False, in_order=False
    )
    found = opened(compiled)
    assert found
    assert found[0].count(f"empty_strided_cuda({shape}, (65536, 1, 2048, 64)") == 2
    both = tuple(compiled(*given))
    assert_trees_all_close(both, tuple(torch.full((64,), one * 8192.0, device="cuda") for one in (2, 3)))


def test_what_leaves_is_owned_and_once() -> None:
    def function(w: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        new = w + 1
        v.copy_(w[:3])
        w.copy_(new)
        return w.t(), new

    graph = traced(function)
    keep_old_values(graph)
    own = graph.find_nodes(op="call_function", target=torch.ops.fcg.own.default)
    left = [
        *graph.output_node().args[0],
        *(
            write.args[1]
            for write in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        ),
    ]
    assert set(left) == set(own)
    assert len({node.args[0] for node in own}) == len(own)


@thorough
def test_what_is_no_old_value_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step has the same kernels as without the rule, with the powers of the optimizer in one of them."""

    def kernels(*, owned: bool) -> Counter[str]:
        monkeypatch.setattr("functional_cg.step.captures.lower", lower_as_on_a_gpu)
        if not owned:
            monkeypatch.setattr(
                "functional_cg.stages.fx_passes.old_values._own_what_leaves", lambda graph, writes: None
            )
        params = {"w1": torch.randn(8, 8), "b": torch.zeros(8), "w2": torch.randn(8, 8)}
        optimizer = fcg.optim.adamw(fcg.optim.warmup_cosine(1e-2, 2, 9), weight_decay=0.1)
        state = fcg.TrainState.create(params=params, optimizer=optimizer)

        def train_step(state: Any, x: Tensor) -> Any:
            def loss_fn(p: Any) -> Tensor:
                return (torch.tanh(x @ p["w1"] + p["b"]) @ p["w2"]).square().mean()

            loss, grads = fcg.value_and_grad(loss_fn)(state.params)
            return state.apply_gradients(grads), {"loss": loss, "grads": grads}

        step = fcg.graph_step(train_step, lowering="inductor", certify=False)
        with config.patch(force_disable_caches=True):
            _, (text,) = run_and_get_code(step, state, torch.randn(4, 8))
        return Counter(re.findall(r"extern_kernels\.\w+|async_compile|empty_strided_cpu\(|std::pow", text))

    found = kernels(owned=True)
    assert found == kernels(owned=False)
    assert found["async_compile"] > 2
    assert found["std::pow"] <= 4  # two of them, in a loop and in its tail
