"""H127 to H132: compiled functions, inference tensors, empty values, and rare dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal
from tests.hazards.law import CPU, Place, assert_law, everywhere, on_both_devices
from tests.shares import CALLS, few

DTYPES = [
    torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32,
    torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64,
]  # fmt: skip


@everywhere
@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}, {"backend": "eager"}], ids=str)
def test_h127_a_compiled_function_becomes_a_part_of_the_step(place: Place, options: Any) -> None:
    """Its ops are traced like others: nothing is compiled in a capture, and no graph of its own is nested."""

    def plain(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(w * x).sum()

    def make(loss: Any) -> Any:
        def step_fn(state: Any, x: Tensor) -> Any:
            value, grad = fcg.value_and_grad(loss)(state["w"], x)
            return {"w": state["w"] - 0.1 * grad}, {"value": value}

        return place.step(step_fn)

    step, reference = make(torch.compile(plain, **options)), make(plain)
    state, twin = (fcg.place({"w": place.randn(3, seed=0)}) for _ in range(2))
    for n in range(CALLS):
        state, metrics = step(state, place.randn(3, seed=n))
        twin, expected = reference.eager(twin, place.randn(3, seed=n))
        place.assert_same((state, metrics), (twin, expected), f"call {n}")
    assert (step.stats.captures, step.stats.replays) == (1, CALLS)


@everywhere
def test_h128_inference_tensors_and_inference_mode_are_not_taken_over(place: Place) -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        grad = fcg.grad(lambda w: (torch.tanh(w) * x).sum())(state["w"])
        return {"w": state["w"] - 0.1 * grad}, {"grad": grad}

    step = place.step(step_fn)
    with torch.inference_mode():
        mine = {"w": place.randn(3, seed=0)}
        state, twin = fcg.place(mine), fcg.place(mine)
        inference = [place.randn(3, seed=n) for n in range(CALLS)]
    for n in range(CALLS):
        with torch.inference_mode(n % 3 == 0):
            state, metrics = step(state, inference[n] if n % 2 else place.randn(3, seed=n))
        twin, expected = step.eager(twin, place.randn(3, seed=n))
        place.assert_same((state, metrics), (twin, expected), f"call {n}")
        assert not metrics["grad"].is_inference()
    metrics["grad"].add_(1)
    assert step.stats.captures == 1


SHAPES = [(0,), (0, 5), (5, 0), (2, 0, 3), (), (1,)]


@everywhere
@few
@given(shapes=st.lists(st.sampled_from(SHAPES), min_size=2, max_size=5))
def test_h129_leaves_without_elements_are_leaves_like_others(
    place: Place, shapes: list[tuple[int, ...]]
) -> None:
    """In state, inputs, metrics and gradients; several of them lie at the address 0."""

    def step_fn(state: list[Tensor], batch: list[Tensor]) -> Any:
        grads = fcg.grad(lambda p: sum((leaf * x).tanh().sum() for leaf, x in zip(p, batch, strict=True)))(
            state
        )
        new = [leaf - 0.1 * g for leaf, g in zip(state, grads, strict=True)]
        return new[::-1] if shapes == shapes[::-1] else new, {"grads": grads, "old": state, "batch": batch}

    def drawn(seed: int) -> list[Tensor]:
        return [place.randn(*shape, seed=seed + n) for n, shape in enumerate(shapes)]

    assert_law(place, step_fn, drawn(0), [drawn(10 * (n + 1)) for n in range(4)])


@everywhere
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_h130_any_dtype_is_a_leaf(place: Place, dtype: torch.dtype) -> None:
    def values(n: int) -> Tensor:
        return torch.tensor([1 + n, 0, 1, n]).to(dtype).to(place.device)

    def step_fn(state: Any, x: Tensor) -> Any:
        return {"new": x, "old": state["new"]}, {"older": state["old"], "x": x}

    step, state = place.step(step_fn), fcg.place({"new": values(0), "old": values(0)})
    kept = []
    for n in range(CALLS):
        x = values(n + 1)
        state, metrics = step(state, x)
        x.copy_(values(0))
        kept.append(metrics)
    assert_trees_all_equal([metrics["x"] for metrics in kept], [values(n + 1) for n in range(CALLS)])
    assert_trees_all_equal(state, {"new": values(CALLS), "old": values(CALLS - 1)})
    assert_trees_all_equal(kept[-1]["older"], values(CALLS - 2))


@on_both_devices  # the simulator does not replay the copy that resolves a conjugate view on commit
def test_h130_conjugate_and_negative_views_are_read_as_what_they_show(place: Place) -> None:
    def step_fn(state: Any, batch: Any) -> Any:
        return {"c": batch["c"].conj(), "n": batch["n"] * 1}, {
            "c": state["c"],
            "n": state["n"],
            "again": batch["c"],
        }

    step = place.step(step_fn)
    z = [torch.complex(place.randn(3, seed=n), place.randn(3, seed=n + 50)) for n in range(CALLS)]
    state = fcg.place({"c": z[0].conj(), "n": z[0].clone().conj().imag})
    expected = {"c": z[0].conj().resolve_conj(), "n": -z[0].imag}
    for n in range(CALLS):
        state, metrics = step(state, {"c": z[n].conj(), "n": z[n].conj().imag})
        assert_trees_all_equal({"c": metrics["c"], "n": metrics["n"]}, expected, f"call {n}")
        assert_trees_all_equal(metrics["again"], z[n].conj().resolve_conj(), f"call {n}")
        assert not metrics["again"].is_conj()
        expected = {"c": z[n].clone(), "n": -z[n].imag}


def test_h130_leaves_without_dense_memory_are_refused_by_name() -> None:
    for leaf in (torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(fcg.LayoutError, match=r"state\['x'\]  expected"):
            fcg.place({"x": leaf})


def test_h100_a_distributed_leaf_is_refused_by_its_class() -> None:
    """A subclass with a tensor inside: copying it in would copy its shell. Sharded states come with sharding."""

    class DTensor(Tensor):
        @staticmethod
        def __new__(cls, inner: Tensor) -> Any:
            return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError(func)

    with pytest.raises(fcg.LayoutError, match="expected a dense tensor   got the subclass DTensor"):
        fcg.place({"w": DTensor(torch.ones(4))})
    with pytest.raises(
        fcg.LayoutError, match=r"x  expected a dense tensor on cpu   got the subclass DTensor"
    ):
        CPU.step(lambda s, x: (s, {}))({"w": torch.ones(4)}, DTensor(torch.ones(4)))


def test_h131_lazy_parameters_are_refused_and_parametrised_ones_are_trained() -> None:
    with pytest.raises(fcg.LayoutError, match=r"`params\['weight'\]` has no shape yet"):
        fcg.from_module(nn.LazyLinear(3))
    model = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    apply, params, buffers = fcg.from_module(model)
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))

    def step_fn(state: Any, x: Tensor) -> Any:
        loss, grads = fcg.value_and_grad(lambda p: apply(p, buffers, x)[0].square().mean())(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    before = fcg.snapshot(state.params)
    _, after, _ = assert_law(
        CPU, step_fn, fcg.snapshot(state), [CPU.randn(4, 3, seed=n) for n in range(CALLS)]
    )
    moved = [
        not torch.equal(a, b)
        for a, b in zip(before.values(), fcg.snapshot(after.params).values(), strict=True)
    ]
    assert all(moved)


class Rotary(nn.Module):
    """A table that is a buffer but not saved, and one that is a plain attribute."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        if plain:
            self.cache = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        table: Tensor = self.cache if hasattr(self, "cache") else self.table
        return x * table


def test_h132_tables_of_a_module_are_found() -> None:
    apply, params, buffers = fcg.from_module(Rotary(plain=False))
    assert list(buffers) == ["table"]
    start = {"buffers": buffers, "params": params, "w": torch.zeros(4)}
    _, after, _ = assert_law(
        CPU,
        lambda s, x: ({**s, "w": s["w"] + apply(s["params"], s["buffers"], x)[0]}, {}),
        start,
        [torch.ones(4) for _ in range(CALLS)],
    )
    assert after["w"].tolist() == [CALLS * row for row in range(4)]
    with pytest.raises(
        fcg.ForeignTensorError, match=r"`cache` is a tensor, but neither a parameter nor a buffer"
    ):
        fcg.from_module(Rotary(plain=True))
