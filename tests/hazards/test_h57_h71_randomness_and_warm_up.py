"""H57 to H71: randomness is a function of the key in the state, and warm-up leaves no trace."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.hazards.law import GPU, Place, as_it_is, assert_law, everywhere
from tests.shares import CALLS, few


def keyed(place: Place, seed: int = 0) -> Any:
    return {
        "w": place.randn(4, 4, seed=1),
        "n": torch.zeros((), dtype=torch.int64, device=place.device),
        "key": fcg.random.key(seed).to(place.device),
    }


def noisy(state: Any, x: Tensor) -> Any:
    key = fcg.random.fold_in(state["key"], state["n"])
    hidden = fcg.random.dropout(key, x @ state["w"], 0.5)
    noise = fcg.random.uniform(fcg.random.fold_in(key, 1), (4,))
    new = {**state, "w": state["w"] * 0.9 + hidden.mean() * 0.1, "n": state["n"] + 1}
    return new, {"mask": hidden == 0, "noise": noise}


@everywhere
@few
@given(seed=st.integers(0, 2**63 - 1))
def test_h57_masks_differ_from_call_to_call_and_equal_eager(place: Place, seed: int) -> None:
    _, _, kept = assert_law(
        place, noisy, keyed(place, seed), [place.randn(64, 4, seed=n) for n in range(CALLS)]
    )
    masks = [metrics["mask"] for metrics in kept]
    assert not any(torch.equal(a, b) for n, a in enumerate(masks) for b in masks[:n])


@everywhere
def test_h59_seeding_torch_between_calls_has_no_effect(place: Place) -> None:
    step, state = place.step(noisy), fcg.place(keyed(place))
    plain = fcg.fork(state)
    generators = torch.get_rng_state()
    for n in range(CALLS):
        x = place.randn(64, 4, seed=n)
        plain, expected = step(plain, x)
        torch.manual_seed(n % 3)
        torch.rand(n, device=place.device)
        state, metrics = step(state, x)
        assert_trees_all_equal((state, metrics), (plain, expected), f"call {n}")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    step(state, place.randn(64, 4, seed=0))
    assert torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(generators)


@everywhere
def test_h60_a_checkpoint_recomputes_the_same_mask(place: Place) -> None:
    """And has the gradients of the step without one; so H119 too."""

    def make(recompute: bool) -> Any:
        def step_fn(state: Any, x: Tensor) -> Any:
            key = fcg.random.fold_in(state["key"], state["n"])

            def block(w: Tensor) -> Tensor:
                return fcg.random.dropout(key, torch.tanh(x @ w), 0.5)

            def loss(w: Tensor) -> Tensor:
                hidden = checkpoint(block, w, use_reentrant=False) if recompute else block(w)
                return (hidden @ w).square().mean()

            value, grad = fcg.value_and_grad(loss)(state["w"])
            return {**state, "w": state["w"] - 0.1 * grad, "n": state["n"] + 1}, {
                "value": value,
                "grad": grad,
            }

        return step_fn

    def batches() -> list[Tensor]:
        return [place.randn(16, 4, seed=n) for n in range(CALLS)]

    runs = [assert_law(place, make(recompute), keyed(place), batches())[1:] for recompute in (True, False)]
    place.assert_same(runs[0], runs[1], "with and without a checkpoint", rtol=1e-5)


@everywhere
def test_h61_equal_keys_draw_equal_numbers_and_streams_tell_them_apart(place: Place) -> None:
    """Documented: a key is a value. ``from_module`` folds it by submodule and call, see test_nn.py."""

    def step_fn(state: Any, x: Tensor) -> Any:
        key = fcg.random.fold_in(state["key"], state["n"])
        draws = [fcg.random.dropout(key, x, 0.5, stream=stream) for stream in (0, 0, 1)]
        return {**state, "n": state["n"] + 1}, draws

    step, state = place.step(step_fn), fcg.place(keyed(place))
    for _ in range(4):
        state, (first, again, other) = step(state, torch.ones(64, device=place.device))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def two_layers(key: Tensor, x: Tensor) -> Any:
    hidden = fcg.random.dropout(key, x, 0.5).tanh()
    return fcg.random.dropout(key, hidden, 0.5)


def two_layers_with_two_keys(key: Tensor, x: Tensor) -> Any:
    first, second = fcg.random.split(key)
    hidden = fcg.random.dropout(first, x, 0.5).tanh()
    return fcg.random.dropout(second, hidden, 0.5)


def two_distributions(key: Tensor, x: Tensor) -> Any:
    noise = fcg.random.normal(key, (3,))
    return noise * fcg.random.uniform(key, (3,))


def two_distributions_with_two_keys(key: Tensor, x: Tensor) -> Any:
    noise = fcg.random.normal(fcg.random.fold_in(key, 0), (3,))
    return noise * fcg.random.uniform(fcg.random.fold_in(key, 1), (3,))


def one_key_by_two_ways(key: Tensor, x: Tensor) -> Any:
    hidden = fcg.random.dropout(fcg.random.fold_in(key, 7), x, 0.5)
    return fcg.random.dropout(fcg.random.fold_in(key, 7), hidden.tanh(), 0.5)


def two_streams_of_one_key(key: Tensor, x: Tensor) -> Any:
    hidden = fcg.random.dropout(key, x, 0.5, stream=0)
    return fcg.random.dropout(key, hidden.tanh(), 0.5, stream=1)


@as_it_is
@pytest.mark.parametrize(
    ("shared", "apart"),
    [
        (two_layers, two_layers_with_two_keys),
        (two_distributions, two_distributions_with_two_keys),
        (one_key_by_two_ways, two_streams_of_one_key),
    ],
)
def test_h61_two_draws_with_one_key_are_warned_of(
    shared: Any, apart: Any, place: Place, recwarn: pytest.WarningsRecorder
) -> None:
    """With both places and the advice; a twin that follows the advice is not warned of."""
    lines = []
    for draw in (shared, apart):

        def step_fn(state: Any, x: Tensor, draw: Any = draw) -> Any:
            key = fcg.random.fold_in(state["key"], state["n"])
            return {**state, "n": state["n"] + 1}, draw(key, x)

        recwarn.clear()
        assert_law(place, step_fn, keyed(place), [place.randn(64, seed=n) for n in range(CALLS)])
        lines.append([text for one in recwarn if "same key" in (text := str(one.message))])
    here, first = "test_h57_h71_randomness_and_warm_up.py", shared.__code__.co_firstlineno + 1
    warning = (
        f"`step_fn`: {here}:{first} and {here}:{first + 1} draw from one and the same key, so the numbers are "
        "correlated: give each draw a key of its own, `fcg.random.split(key)` or `fcg.random.fold_in(key, n)`."
    )
    assert lines == [[warning], []]


# -- warm-up ----------------------------------------------------------------------------------------------------------


@everywhere
def test_h65_call_n_is_n_updates(place: Place) -> None:
    """Counters, sums and running statistics; warm-up ran before the first call."""

    def step_fn(state: Any, x: Tensor) -> Any:
        mean, var = state["mean"].clone(), state["var"].clone()
        out = F.batch_norm(x, mean, var, training=True, momentum=0.1)
        return {"n": state["n"] + 1, "mean": mean, "var": var, "sum": state["sum"] + 1.0}, {"out": out}

    state = {
        "n": torch.zeros((), dtype=torch.int64, device=place.device),
        "mean": torch.zeros(3, device=place.device),
        "var": torch.ones(3, device=place.device),
        "sum": torch.zeros((), device=place.device),
    }
    judge = nn.BatchNorm1d(3).to(place.device)
    step = place.step(step_fn)
    after: Any = state
    for n in range(CALLS):
        x = place.randn(8, 3, seed=n)
        after, metrics = step(after, x)
        place.assert_same(metrics["out"], judge(x).detach(), f"call {n}")
        assert (int(after["n"]), float(after["sum"])) == (n + 1, n + 1)
        place.assert_same(
            {"mean": after["mean"], "var": after["var"]},
            {"mean": judge.running_mean, "var": judge.running_var},
            f"call {n}",
        )
    place.assert_same(
        {"n": state["n"], "mean": state["mean"]}, {"n": state["n"] * 0, "mean": state["mean"] * 0}
    )


@everywhere
def test_h67_warm_up_sees_the_real_batch_and_real_indices(place: Place) -> None:
    """Zeros in place of a batch, or of a counter, would be out of range here: an error, or a fault on a GPU."""

    def step_fn(state: Any, batch: Any) -> Any:
        row = batch["table"].index_select(0, state["at"] - 7)  # 7, 8, 9 -> 0, 1, 2
        column = row.index_select(1, batch["column"] - 5)
        return {"at": (state["at"] - 6) % 3 + 7}, {"value": column}

    def batches() -> list[Any]:
        columns = [torch.tensor([5 + n % 4], device=place.device) for n in range(CALLS)]
        return [{"table": place.randn(3, 4, seed=n), "column": column} for n, column in enumerate(columns)]

    step, state = place.step(step_fn), fcg.place({"at": torch.tensor([7], device=place.device)})
    for n, batch in enumerate(batches()):
        state, metrics = step(state, batch)
        assert_trees_all_equal(metrics["value"], batch["table"][n % 3, n % 4].reshape(1, 1), f"call {n}")
    place.wait()


@everywhere
def test_h198_each_run_of_a_warm_up_begins_where_the_state_is(place: Place) -> None:
    """At the last entry of a table."""
    assert_last_entry_is_read(place.step, place.device)
    place.wait()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_h198_so_does_each_step_of_a_certificate(device: str) -> None:
    """The second one begins with new values but for what is an index."""
    assert_last_entry_is_read(partial(fcg.graph_step, lowering="inductor", certify=True), device)


def assert_last_entry_is_read(step_of: Any, device: str) -> None:
    def step_fn(state: Any, rates: Tensor) -> Any:
        rate = rates[state["at"]]
        return {"at": state["at"] + 1, "sum": state["sum"] + rate}, {"rate": rate}

    step, zero = step_of(step_fn), torch.zeros((), device=device)
    state, metrics = step(
        {"at": torch.tensor(2, device=device), "sum": zero}, torch.arange(1.0, 4.0, device=device)
    )
    assert (int(state["at"]), float(state["sum"]), float(metrics["rate"])) == (3, 3.0, 3.0)


COLD = """
import torch
import torch.nn.functional as F
import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal

def step_fn(state, x):
    def loss(p):
        h = F.conv2d(x, p["conv"])
        q = h.flatten(2).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q)
        h = F.layer_norm(h @ p["w"], (16,)).sort(-1).values
        return h.square().mean() + torch.linalg.vector_norm(p["w"].cumsum(0))
    value, grads = fcg.value_and_grad(loss)(state)
    return fcg.tree.map(lambda a, g: a - 0.1 * g, state, grads), {"value": value}

def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()

torch.backends.cudnn.deterministic = True
state = {"conv": randn(8, 3, 3, 3, seed=0), "w": randn(8, 16, seed=1)}
step = fcg.graph_step(step_fn, lowering="LOWERING")
captured, _ = step(state, randn(4, 3, 10, 10, seed=2))  # nothing of cuBLAS or cuDNN was used before
assert step.stats.captures == 1
if "LOWERING" == "aten":
    eager = fcg.place(state)
    for n in range(16):
        eager, expected = step.eager(eager, randn(4, 3, 10, 10, seed=2 + n))
        if n:
            captured, metrics = step(captured, randn(4, 3, 10, 10, seed=2 + n))
            assert_trees_all_equal(metrics, expected, f"call {n}")
        assert_trees_all_equal(captured, eager, f"call {n}")
print("DONE", torch.isfinite(fcg.snapshot(captured)["w"]).all().item())
"""


@pytest.mark.cuda
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_h69_a_cold_process_captures(lowering: str) -> None:
    """The libraries' handles, workspaces and modules are made in warm-up, not in the capture."""
    from tests.cuda.helpers_cuda import python

    run = python(COLD.replace("LOWERING", lowering))
    assert run.returncode == 0, run.stderr[-4000:]
    assert "DONE True" in run.stdout


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("benchmark", [False, True])
def test_h70_autotuned_convolutions_replay_as_eager(benchmark: bool) -> None:
    """What cuDNN picks is what the eager run of the same process has picked; the flag itself is compared."""
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, True
    try:

        def step_fn(state: Any, x: Tensor) -> Any:
            grads = fcg.grad(lambda p: F.conv2d(x, p["w"], padding=1).tanh().square().mean())(state)
            return {"w": state["w"] - 0.1 * grads["w"]}, {"grads": grads}

        warm = {"w": GPU.randn(8, 3, 3, 3, seed=0)}
        GPU.step(step_fn).eager(warm, GPU.randn(4, 3, 16, 16, seed=0))  # cuDNN tunes here
        batches = [GPU.randn(4, 3, 16, 16, seed=n) for n in range(CALLS)]
        step, state, _ = assert_law(GPU, step_fn, warm, batches)
        torch.backends.cudnn.benchmark = not benchmark
        with pytest.raises(fcg.BakedValueError, match=r"cudnn\.benchmark"):
            step(state, GPU.randn(4, 3, 16, 16, seed=0))
    finally:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before
