"""Roles as vectors in a captured step: raveled leaves are read and written as their slab."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.state.flat import ravel, unravel
from functional_cg.testing.simulator import Simulator
from tests.shares import share

pytestmark = pytest.mark.usefixtures("scalar_loops")

State = dict[str, Any]


def leaves(count: int = 5) -> dict[str, Tensor]:
    return {f"p{i}": torch.randn(3 + i, generator=torch.Generator().manual_seed(i)) for i in range(count)}


def some(state: State, *names: str) -> State:
    return {name: state[name] for name in names}


def one_of_many(state: Any, x: Tensor) -> Any:
    """The vector is written, and one slot of it is read by itself."""
    loss, grads = fcg.value_and_grad(lambda params: ((params["p2"] - x.sum()) ** 2).mean())(state.params)
    return state.apply_gradients(grads), {"loss": loss}


def in_the_middle(state: State, x: Tensor) -> Any:
    """The vector begins somewhere in its slab, and its parts are read through strides."""
    vector = ravel(some(state, "p1", "p2"))
    parts = unravel(some(state, "p1", "p2"), vector)
    return {**state, "p0": state["p0"] + parts["p2"].sum()}, {"p1": parts["p1"], "twice": parts["p2"] * 2}


def read_beside(state: State, x: Tensor) -> Any:
    """The vector is read only; its slots are written one by one."""
    norm = ravel(state).norm()
    return {name: leaf / norm + x.sum() for name, leaf in state.items()}, {"norm": norm}


def overlapping(state: State, x: Tensor) -> Any:
    """Two vectors share slots; one of them is written, the other one is returned."""
    first, second = some(state, "p0", "p1", "p2"), some(state, "p1", "p2", "p3")
    vector = ravel(second)
    parts = {"old": vector.norm(), "vector": ravel(first), "p2": unravel(second, vector)["p2"]}
    return {**state, **unravel(first, ravel(first) + x.sum())}, parts


def odd_strides(state: State, x: Tensor) -> Any:
    """Windows that no slot has."""
    window = torch.as_strided(ravel(some(state, "p1", "p2")), (3, 2), (2, 3), 1)
    return {**state, "p0": state["p0"] + window.sum()}, {
        "window": window,
        "p4": torch.as_strided(state["p4"], (2, 3), (1, 2), 1),
    }


def shapes(state: State, x: Tensor) -> Any:
    """Channels last, transposed, 0-dim and odd leaves."""
    new = unravel(state, ravel(state) * 1.5 + x.sum())
    return new, {"image": state["image"].sum(0), "matrix": state["matrix"].t() + 1}


def of_shapes() -> State:
    image = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))
    return {
        "image": image.to(memory_format=torch.channels_last),
        "matrix": torch.randn(3, 2, generator=torch.Generator().manual_seed(2)).t(),
        "number": torch.ones(()),
        "thin": torch.ones(1, 1, 4),
    }


def trained(device: str) -> Any:
    optimizer = fcg.optim.flatten(fcg.optim.adamw(1e-2, weight_decay=0.1))
    params = {name: leaf.to(device) for name, leaf in leaves().items()}
    return fcg.TrainState.create(params=params, optimizer=optimizer)


def views_of_views(state: State, x: Tensor) -> Any:
    """`as_strided` without an offset starts where the view does."""
    parts = {"leaf": state["p4"][2:], "input": x[1:], "vector": ravel(some(state, "p1", "p2"))[3:]}
    return {**state, "p0": state["p0"] + x.sum()}, {
        name: part.as_strided((part.numel(),), (1,)).clone() for name, part in parts.items()
    }


def returns_its_argument(state: State, x: Tensor) -> Any:
    """An op whose result is the slot itself."""
    kept, _ = torch.native_dropout(state["p0"], 0.5, False)
    return {**state, "p0": state["p0"] + x.sum()}, {"kept": kept}


def differentiated(state: State, x: Tensor) -> Any:
    """The vector inside of a loss."""
    loss, grads = fcg.value_and_grad(lambda p: (ravel(p) ** 2).sum() * x.sum() + p["p0"].sum())(state)
    return fcg.tree.map(lambda leaf, grad: leaf - 0.01 * grad, state, grads), {"loss": loss}


def chosen(new: Any, old: Any, condition: Callable[[int], Tensor]) -> Any:
    number = itertools.count()
    return fcg.tree.map(lambda after, before: torch.where(condition(next(number)), after, before), new, old)


def guarded(state: Any, x: Tensor) -> Any:
    """Old or new vectors, by one condition inside of another one."""
    new, metrics = one_of_many(state, x)
    first, second = x[0] > 0, x[1] < 0
    return chosen(state, chosen(new, state, lambda i: first), lambda i: second), metrics


def guarded_apart(state: Any, x: Tensor) -> Any:
    """Each leaf by a condition of its own."""
    new, metrics = one_of_many(state, x)
    return chosen(new, state, lambda i: x[i % 2] > 0), metrics


def guarded_then_written(what: str) -> Callable[..., Any]:
    def step(state: State, x: Tensor) -> Any:
        """What was chosen from, or a part of what was chosen, is written afterwards."""
        vector, flag = ravel(state) + x.sum(), x[0] > 0
        new = chosen(unravel(state, vector), state, lambda i: flag)
        {"vector": vector, "flag": flag, "part": new["p1"][:2]}[what].zero_()
        return new, {"vector": vector, "flag": flag}

    return step


def chosen_from_itself(state: State, x: Tensor) -> Any:
    """Leaves that stay, by themselves and elsewhere; values that are written after such a choice."""
    flag, moved = x[0] > 0, state["p1"] + x.sum()

    def same(value: Tensor) -> Tensor:
        return torch.where(flag, value, value)

    before, after = same(moved), moved.clone()
    kept = same(after)
    after.mul_(2)
    new = {
        "p0": same(state["p0"]),
        "p1": after,
        "p2": same(state["p2"][:1]).expand(5),
        "p3": same(state["p4"][:6]),
    }
    metrics = {
        "before": before,
        "kept": kept,
        "written": same(moved).mul_(3),
        "p0": same(state["p0"]),
        "wide": torch.where(x > 0, flag, flag),
    }
    return {**new, "p4": same(state["p4"]).clone().mul_(0.5)}, metrics


def around_a_slot(state: State, x: Tensor) -> Any:
    """A slot that is not in the vector lies where the vector has padding."""
    ends = some(state, "a", "c")
    return {**state, **unravel(ends, ravel(ends) * 0.5 + x.sum())}, {"sum": ravel(ends).sum()}


def of_ends() -> State:
    return {"a": torch.ones(1), "b": torch.full((2,), 7.0), "c": torch.ones(1024)}


def twins(state: State, x: Tensor) -> Any:
    """Two vectors of one length, such as parameters and what is added up of their gradients."""
    vector, total = ravel(state["params"]), ravel(state["total"])
    total = total + vector * x.sum()
    new = {"params": unravel(state["params"], vector - 0.1 * total), "total": unravel(state["total"], total)}
    return new, {"norm": total.norm()}


def of_twins() -> State:
    return {"params": leaves(), "total": {name: -leaf for name, leaf in leaves().items()}}


CASES: dict[str, tuple[Callable[..., Any], Callable[[str], Any]]] = {
    "one-of-many": (one_of_many, trained),
    "guarded": (guarded, trained),
    "guarded-apart": (guarded_apart, trained),
    **{
        f"guarded-then-written-{what}": (
            guarded_then_written(what),
            lambda device: fcg.place(leaves(), device),
        )
        for what in ("vector", "flag", "part")
    },
    "chosen-from-itself": (chosen_from_itself, lambda device: fcg.place(leaves(), device)),
    "twins": (twins, lambda device: fcg.place(of_twins(), device)),
    "around-a-slot": (around_a_slot, lambda device: fcg.place(of_ends(), device)),
    "in-the-middle": (in_the_middle, lambda device: fcg.place(leaves(), device)),
    "read-beside": (read_beside, lambda device: fcg.place(leaves(), device)),
    "overlapping": (overlapping, lambda device: fcg.place(leaves(), device)),
    "odd-strides": (odd_strides, lambda device: fcg.place(leaves(), device)),
    "views-of-views": (views_of_views, lambda device: fcg.place(leaves(), device)),
    "returns-its-argument": (returns_its_argument, lambda device: fcg.place(leaves(), device)),
    "differentiated": (differentiated, lambda device: fcg.place(leaves(), device)),
    "shapes": (shapes, lambda device: fcg.place(of_shapes(), device)),
}


def run(case: str, lowering: Any, device: str) -> fcg.GraphStep[Any, Any]:
    """Run a case beside its eager twin."""
    fn, make = CASES[case]
    step = fcg.graph_step(fn, lowering=lowering)
    state, eager = make(device), make(device)
    for i in range(16):
        x = torch.randn(2, generator=torch.Generator().manual_seed(i)) * 0.01
        state, got = step(state, x)
        eager, want = step.eager(eager, x)
        ours, theirs = (
            fcg.tree.leaves(tree) for tree in ((fcg.snapshot(state), got), (fcg.snapshot(eager), want))
        )
        for have, due in zip(ours, theirs, strict=True):
            if lowering == "aten":
                assert torch.equal(have, due)
            else:  # sums in another order, in fp32
                torch.testing.assert_close(have, due, rtol=1e-4, atol=1e-5)
    return step


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
@pytest.mark.parametrize(
    ("case", "device"),
    [
        *((case, "cpu") for case in share(CASES, 3)),
        *(pytest.param(case, "cuda", marks=pytest.mark.cuda) for case in CASES),
    ],
)
def test_vectors_and_slots_are_one_memory(case: str, lowering: Any, device: str) -> None:
    step = run(case, lowering, device)
    assert (step.stats.captures, step.stats.replays) == (1, 16)


def test_a_guard_chooses_between_vectors() -> None:
    """Parameters are one update, like without the guard; moments are vectors anyway."""
    updates = {}
    for case in ("one-of-many", "guarded", "guarded-apart"):
        fn, make = CASES[case]
        program = fcg.graph_step(fn).lower(make("cpu"), torch.randn(2)).program
        ranges = {known.var for known in program.ranges}
        updates[case] = sum(old in ranges for old, _ in program.updates)
    assert updates == {"one-of-many": 1, "guarded": 1, "guarded-apart": 0}


def test_a_guard_of_the_whole_state_does_not_touch_what_stays() -> None:
    def step(state: State, x: Tensor) -> Any:
        new = {**state, "p0": state["p0"] + x.sum(), "p1": state["p2"].sum() * state["p1"].detach()}
        return chosen(new, state, lambda i: x[0] > 0), {}

    program = fcg.graph_step(step).lower(fcg.place(leaves()), torch.ones(2)).program
    assert [program.slots.index(old) for old, _ in program.updates] == [0, 1]
    assert sum("where" in str(instr.op) for instr in program.instrs) == 2


@pytest.mark.cuda
@pytest.mark.timeout(400)  # inductor takes its time for 10,000 leaves, more so beside other tests
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_ten_thousand_leaves_are_one_vector(lowering: Any) -> None:
    """AdamW over all leaves: a handful of kernels, whatever the number of leaves."""
    params = {f"p{i}": torch.full((16,), i / 10_000, device="cuda") for i in range(10_000)}
    optimizer = fcg.optim.flatten(fcg.optim.adamw(1e-3, weight_decay=0.1))
    state = fcg.TrainState.create(params=params, optimizer=optimizer)
    step = fcg.graph_step(one_of_many, lowering=lowering)
    for i in range(16):
        state, metrics = step(state, torch.full((2,), i / 16))
    assert torch.isfinite(metrics["loss"])
    # Decay alone moves the other leaves: 16 times by 1e-3 of a tenth of themselves.
    expected = torch.tensor(9_999 / 10_000) * (1 - 1e-4) ** 16
    torch.testing.assert_close(state.params["p9999"][0].cpu(), expected, rtol=1e-5, atol=0)


def test_a_partition_leaves_a_bias_between_its_matrices_alone() -> None:
    """The first matrix ends 192 bytes before the next one may begin: the bias fits in there."""
    params = {"a": torch.ones(10, 1000), "bias": torch.ones(10), "w": torch.ones(32, 32)}
    optimizer = fcg.optim.partition(
        {"flat": fcg.optim.flatten(fcg.optim.sgd(0.1)), "rest": fcg.optim.sgd(0.0)},
        {"a": "flat", "bias": "rest", "w": "flat"},
    )
    step = fcg.graph_step(
        lambda s, x: (s.apply_gradients(fcg.tree.map(lambda p: p * x, s.params)), {}), lowering="aten"
    )
    state = fcg.TrainState.create(params=params, optimizer=optimizer)
    for _ in range(2):
        state, _ = step(state, torch.tensor(1.0))
    assert torch.equal(state.params["bias"].clone(), torch.ones(10))


def test_gradients_of_a_vector_are_those_of_its_leaves() -> None:
    _, grads = fcg.value_and_grad(lambda p: (ravel(p) ** 3).sum())(leaves())
    fcg.tree.map(lambda got, leaf: torch.testing.assert_close(got, 3 * leaf**2), grads, leaves())


@pytest.mark.parametrize("make", [fcg.optim.sgd, lambda rate: fcg.optim.flatten(fcg.optim.sgd(rate))])
def test_one_step_maml_through_an_optimizer(make: Any) -> None:
    optimizer = make(0.1)

    def adapted(p: Any, x: Tensor) -> Any:
        grads = fcg.grad(lambda q: ((q["w"] - x) ** 2).sum())(p)
        updates, _ = optimizer.update(grads, optimizer.init(p), p)
        return fcg.optim.apply_updates(p, updates)

    def meta_step(state: Any, x: Tensor) -> Any:
        return state, fcg.value_and_grad(lambda p: ((adapted(p, x)["w"] - 2 * x) ** 2).sum())(state)

    params, x = {"w": torch.tensor([1.0, 2.0, 3.0])}, torch.tensor(0.5)
    want = torch.func.grad(lambda w: ((w - 0.1 * 2 * (w - x) - 2 * x) ** 2).sum())(params["w"])
    step = fcg.graph_step(meta_step)
    for run in (step, step.eager):
        torch.testing.assert_close(run(params, x)[1][1]["w"], want)


def test_leaves_without_elements_in_a_vector_on_scratch_memory() -> None:
    params = {"a": torch.zeros(0), "b": torch.ones(3)}
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.flatten(fcg.optim.sgd(0.1)))
    step = fcg.graph_step(
        lambda s, x: (s.apply_gradients({"a": s.params["a"], "b": x}), {}), backend=Simulator()
    )
    for _ in range(3):
        state, _ = step(state, torch.ones(3))
    torch.testing.assert_close(state.params["b"].clone(), torch.full((3,), 0.7))


@pytest.mark.parametrize("name", ["as_strided_copy", "as_strided_scatter"])
def test_ops_that_count_from_the_storage_are_refused(name: str) -> None:
    def step(state: State, x: Tensor) -> Any:
        if name == "as_strided_copy":
            return state, torch.as_strided_copy(state["p1"], (2,), (1,), 1)
        return {**state, "p1": torch.as_strided_scatter(state["p1"], x, (2,), (1,), 1)}, {}

    with pytest.raises(fcg.CaptureError, match=rf"calls `aten.{name}`(.|\n)*test_flat.py:\d+(.|\n)*To fix"):
        fcg.graph_step(step)(leaves(), torch.ones(2))


def test_trees_of_different_structures_are_refused() -> None:
    """Also those with the same leaves: what a place in the vector stands for would change."""
    tree = {"a": torch.ones(2), "b": torch.zeros(1)}
    for like in (
        {"a": torch.ones(2), "c": torch.zeros(1)},
        [torch.ones(2), torch.zeros(1)],
        {"a": torch.ones(2)},
    ):
        with pytest.raises(fcg.LayoutError, match="the trees have different structures"):
            ravel(tree, like)


@pytest.mark.parametrize(
    "other",
    [torch.zeros(2, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(6), torch.zeros(3, 2)],
    ids=["shape", "dtype", "dimensions", "turned"],
)
def test_a_tree_that_is_unlike_its_model_is_refused(other: Tensor) -> None:
    with pytest.raises(
        fcg.LayoutError, match=r"unlike `like`.\n  tree\['w'\]  expected f32\[2,3\]@cpu   got f"
    ):
        ravel({"w": other}, {"w": torch.zeros(2, 3)})
