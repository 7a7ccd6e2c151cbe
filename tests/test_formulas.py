"""Formulas of the fused optimizer ops equal the ops; numbers of optimizers out of their ranges are refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim
from functional_cg.stages.passes.formulas import FORMULAS
from tests.exports import exports
from tests.shares import share

pytestmark = pytest.mark.usefixtures("scalar_loops")

SHAPES = [(3,), (2, 3), ()]


def leaves(seed: int, *, positive: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [leaf.abs() for leaf in drawn] if positive else drawn


def adam_calls() -> Any:
    for decay, amsgrad, maximize in itertools.product((0.0, 0.1), (False, True), (False, True)):
        args = [leaves(0), leaves(1), leaves(2), leaves(3, positive=True)]
        args += [leaves(4, positive=True) if amsgrad else [], [torch.tensor(3.0)] * len(SHAPES)]
        named = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": decay, "eps": 1e-3}
        yield args, {**named, "amsgrad": amsgrad, "maximize": maximize}


def sgd_calls() -> Any:
    for decay, momentum, maximize, first in itertools.product(
        (0.0, 0.1), (0.0, 0.9), (False, True), (False, True)
    ):
        for nesterov in (False, True) if momentum else (False,):
            args = [leaves(0), leaves(1), leaves(2) if momentum else []]
            named = {
                "weight_decay": decay,
                "momentum": momentum,
                "lr": 0.1,
                "dampening": 0.0 if nesterov else 0.2,
            }
            yield args, {**named, "nesterov": nesterov, "maximize": maximize, "is_first_step": first}


def adagrad_calls() -> Any:
    for decay, lr_decay, maximize in itertools.product((0.0, 0.1), (0.0, 0.5), (False, True)):
        args = [leaves(0), leaves(1), leaves(2, positive=True), [torch.tensor(3.0)] * len(SHAPES)]
        yield (
            args,
            {"lr": 0.1, "lr_decay": lr_decay, "weight_decay": decay, "eps": 1e-3, "maximize": maximize},
        )


CALLS = {
    "aten::_fused_adam": adam_calls,
    "aten::_fused_adamw": adam_calls,
    "aten::_fused_sgd": sgd_calls,
    "aten::_fused_adagrad": adagrad_calls,
}


def test_each_formula_has_calls() -> None:
    others = {
        "aten::_efficientzerotensor",
        "aten::convolution",  # test_convolutions.py
        "aten::convolution_backward",
        "aten::embedding_dense_backward",
        "aten::huber_loss",
        "aten::index_fill",
        "aten::ldexp",
        "aten::mse_loss",
        "aten::mse_loss_backward",
        "aten::nextafter",
        "aten::round",
        "aten::smooth_l1_loss",
        "aten::smooth_l1_loss_backward",
        "aten::soft_margin_loss_backward",
        "fcg::normalized",
    }
    assert CALLS.keys() | others == FORMULAS.keys()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_small_gradient_of_a_soft_margin_is_as_precise_as_a_large_one(reduction: str) -> None:
    x, target = torch.linspace(-16, 16, 33), torch.tensor([1.0, -1.0, 1.0]).repeat(11)

    def gradient(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.soft_margin_loss
        return fcg.grad(lambda x: loss(x, target, reduction=reduction).sum())(x)

    found = fcg.graph_fn(gradient, lowering="inductor")(x, target)
    torch.testing.assert_close(found, gradient(x, target), rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_complex_number_is_scaled_whole(*, in_place: bool) -> None:
    x, by = torch.tensor([1 + 1j, 2 - 3j]), torch.tensor([3, 1])
    scale = (lambda x, by: x.clone().ldexp_(by)) if in_place else torch.ldexp
    found = fcg.graph_fn(scale, lowering="inductor", certify=False)(x, by)
    assert torch.equal(found, torch.ldexp(x, by))


def test_an_op_that_writes_elsewhere_is_itself() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.huber_loss.out(x, x.flip(0), 1, 0.5, out=torch.empty(()))

    x = torch.tensor([1.0, 2.0, 4.0])
    assert torch.equal(fcg.graph_fn(loss, lowering="inductor")(x), loss(x))


def test_a_zero_tangent_has_memory() -> None:
    made = FORMULAS["aten::_efficientzerotensor"]([2, 3], dtype=torch.float64)
    assert torch.equal(made.fill_(1.0), torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_next_number_in_half_precision(dtype: torch.dtype, *, in_place: bool) -> None:
    limits = torch.finfo(dtype)
    numbers = [0.0, 1.0, 3.14, math.inf, limits.max, limits.tiny, limits.smallest_normal / 4]
    values = torch.tensor([*numbers, *(-one for one in numbers), math.nan]).to(dtype)
    x, other = values[:, None].expand(15, 15).contiguous(), values.expand(15, 15).contiguous()
    taken = (lambda x, other: x.clone().nextafter_(other)) if in_place else torch.nextafter
    found = fcg.graph_fn(taken, lowering="inductor")(x, other)
    expected = torch.nextafter(x, other)
    same = found.view(torch.int16) == expected.view(torch.int16)
    assert bool((same | (found.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("name", ["huber_loss", "mse_loss_backward", "smooth_l1_loss_backward"])
def test_losses_of_a_gpu_read_all_in_the_dtype_of_the_prediction(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("functional_cg.stages.passes.formulas._on_gpu", lambda x: True)
    half, target = torch.tensor([0.5, 1, 2]).half(), torch.tensor([0.7, 1.3, 2.1])
    before, after = ([target], [0]) if "backward" in name else ([], [0])  # a gradient, no mean
    after += [] if "mse" in name else [0.5]
    op = getattr(torch.ops.aten, name).default
    found = FORMULAS[f"aten::{name}"](*before, half, target, *after)
    assert torch.equal(found, op(*(one.half() for one in before), half, target.half(), *after))


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss"])
def test_other_losses_of_a_gpu_promote_their_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functional_cg.stages.passes.formulas._on_gpu", lambda x: True)
    half, target = torch.tensor([0.5, 1, 2]).half(), torch.tensor([0.7, 1.3, 2.1])
    op = getattr(torch.ops.aten, name).default
    found, expected = FORMULAS[f"aten::{name}"](half, target, 0), op(half, target, 0)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", CALLS)
def test_the_formula_is_that_of_the_op(name: str) -> None:
    """All but the gradients, which the ops give back as they use them, and moments where there are none."""
    op = getattr(torch.ops.aten, name.removeprefix("aten::")).default
    gradients = [result.name for result in op._schema.returns].index("grads_out")
    for args, named in CALLS[name]():
        got, expected = FORMULAS[name](*args, **named), op(*args, **named)
        for place, column in enumerate(expected):
            if place != gradients and column and args[place]:
                for ours, theirs in zip(got[place], column, strict=True):
                    torch.testing.assert_close(
                        ours, theirs, rtol=1e-12, atol=1e-12, msg=f"{name} {place} {named}"
                    )


@pytest.mark.parametrize("device", ["as a GPU", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["aten::_fused_adam", "aten::_fused_adamw"])
def test_the_betas_of_a_gpu_have_the_dtype_of_its_kernel(
    name: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a first step a moment is ``1 - beta`` of what it is of, and a parameter moves by the rate."""
    beta2, place = torch.tensor(0.999, dtype=dtype).double(), "cuda" if device == "cuda" else "cpu"
    p, g, zero = (
        torch.tensor(row, dtype=dtype, device=place) for row in ([0.25, 0.5, 0], [3, -0.5, 8], [0] * 3)
    )
    named = {"lr": 0.125, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 0.0}
    args = [[p], [g], [zero], [zero], [], [torch.tensor(1.0, device=place)]]
    moved = 0.125 * g.sign()
    if device == "cuda":
        op = getattr(torch.ops.aten, name.removeprefix("aten::")).default
        (new,), _, _, (kernels,), *_ = op(*args, **named, amsgrad=False, maximize=False)
        moved = p - new  # by a power that may differ in the last bit from 0.999
    else:
        monkeypatch.setattr("functional_cg.stages.passes.formulas._on_gpu", lambda x: True)
    (new,), _, _, (nu,), *_ = FORMULAS[name](*args, **named, amsgrad=False, maximize=False)
    expected = (g.double() ** 2 * (1 - beta2.to(place))).to(dtype)
    assert torch.equal(nu, expected)
    assert device != "cuda" or torch.equal(kernels, expected)
    torch.testing.assert_close(p - new, moved, rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("name", ["aten::_fused_adam", "aten::_fused_adamw"])
def test_a_gradient_that_is_not_finite_moves_nothing(name: str) -> None:
    (args, named), *_ = adam_calls()
    for bad in (0.0, 1.0):
        got = FORMULAS[name](*args, **named, found_inf=torch.tensor(bad))
        moved = [not torch.equal(new, old) for new, old in zip(got[0], args[0], strict=True)]
        assert moved == [not bad] * len(SHAPES)


@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize("grad_scale", [None, 4.0])
@pytest.mark.parametrize("name", ["sgd", "plain sgd", "adagrad", "adam", "adamw"])
def test_what_a_gradient_scaler_passes_counts(
    name: str, grad_scale: float | None, found_inf: float | None
) -> None:
    def leaves(*values: float) -> list[Tensor]:
        return [torch.full((3,), float(value)) for value in values]

    betas = {"beta1": 0.5, "beta2": 0.75, "amsgrad": False}
    rest, numbers = {
        "sgd": (
            [leaves(1, 2)],
            {"momentum": 0.5, "dampening": 0.0, "nesterov": False, "is_first_step": False},
        ),
        "plain sgd": ([[]], {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False}),
        "adagrad": ([leaves(1, 2), [torch.ones(()), torch.ones(())]], {"lr_decay": 0.0, "eps": 1e-8}),
        "adam": ([leaves(1, 2), leaves(3, 4), [], [torch.ones(())] * 2], betas | {"eps": 1e-8}),
        "adamw": ([leaves(1, 2), leaves(3, 4), [], [torch.ones(())] * 2], betas | {"eps": 1e-8}),
    }[name]
    given = {"grad_scale": grad_scale, "found_inf": found_inf}
    named: dict[str, Any] = {"lr": 0.125, "weight_decay": 0.5, "maximize": False, **numbers}  # type: ignore[dict-item]
    named |= {key: torch.tensor(value) for key, value in given.items() if value is not None}
    op = f"aten::_fused_{name.removeprefix('plain ')}"
    args = (leaves(1, 3), leaves(8, -4), *rest)
    expected = getattr(torch.ops.aten, op.removeprefix("aten::")).default(*args, **named)
    got = FORMULAS[op](*args, **named)
    for column, (news, wants) in enumerate(zip(got, expected, strict=False)):
        if column != 1:  # the gradients, which nobody reads again
            torch.testing.assert_close(list(news), list(wants))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("shape", "order"),
    share(
        [
            ((2, 3, 4), (2, 0, 1)),
            ((4,), (0,)),
            ((3, 4), (0, 1)),
            ((), ()),
            ((3, 4), (1, 0)),
            ((0, 3), (1, 0)),
        ],
        3,
    ),
)
def test_index_fill_in_all_strides(shape: tuple[int, ...], order: tuple[int, ...], *, compiled: bool) -> None:
    """Values and strides; numbers, tensors, negative dimensions, repeated indices, integers and booleans."""
    cases = []
    for dtype in (torch.float32, torch.int64, torch.bool):
        x = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        x = x.permute(order).contiguous().permute([order.index(dim) for dim in range(len(shape))])
        for dim in range(-x.dim(), x.dim()) if shape else (0, -1):
            for index in (
                torch.tensor([0, 0] if x.numel() else [], dtype=torch.int64),
                torch.tensor([0])[:0],
            ):
                cases += [(x, dim, index, value) for value in (1, torch.tensor(2, dtype=dtype))]
            cases += [(x, dim, torch.tensor(0), 1)] if x.numel() else []
    cases = cases[::5] if compiled else cases
    calls = [(dim, index, value) for _, dim, index, value in cases]

    def filled(leaves: list[Tensor]) -> list[Tensor]:
        return [leaf.index_fill(*call) for leaf, call in zip(leaves, calls, strict=True)]

    leaves = [x for x, *_ in cases]
    expected = filled(leaves)
    if compiled:
        found = fcg.graph_fn(
            filled,
            lowering="inductor",
            constants=[one for call in calls for one in call if isinstance(one, Tensor)],
        )(leaves)
    else:
        op = FORMULAS["aten::index_fill"]
        found = [op(leaf, *call) for leaf, call in zip(leaves, calls, strict=True)]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype is theirs.dtype
        assert ours.stride() == theirs.stride() or compiled


# Name of a number -> values that are none.
OUT_OF_RANGE: dict[str, tuple[float, ...]] = {
    "learning_rate": (-0.1, float("inf"), float("nan")),
    "b1": (1.0, -0.1, 1.5),
    "b2": (1.0, -0.1),
    "decay": (1.0, -0.1),
    "momentum": (1.0, -0.1),
    "eps": (-1e-9,),
    "weight_decay": (-0.1,),
    "momentum_decay": (-1.0,),
    "initial_accumulator_value": (-1.0,),
    "clipping_threshold": (-1.0,),
}


def numbers() -> Any:
    for name in exports(optim):
        made = getattr(optim, name)
        if dataclasses.is_dataclass(made) and isinstance(made, type):
            needed = {
                field.name for field in dataclasses.fields(made) if field.default is dataclasses.MISSING
            }
            rest = {"learning_rate": 0.1, "weight_decay": 0.0, "decay": 0.5}
            for field in dataclasses.fields(made):
                if (
                    field.name in OUT_OF_RANGE
                    and needed <= rest.keys()
                    and isinstance(field.default, (float, int))
                ):
                    yield name, field.name, {key: rest[key] for key in sorted(needed)}
                elif field.name in OUT_OF_RANGE and needed <= rest.keys() and field.name in needed:
                    yield name, field.name, {key: rest[key] for key in sorted(needed)}


@pytest.mark.parametrize(("name", "number", "needed"), list(numbers()), ids=lambda value: str(value)[:20])
def test_numbers_out_of_range_are_refused(name: str, number: str, needed: dict[str, float]) -> None:
    getattr(optim, name)(**needed)
    for value in OUT_OF_RANGE[number]:
        with pytest.raises(ValueError, match=rf"^{name}: .* must be "):
            getattr(optim, name)(**{**needed, number: value})
