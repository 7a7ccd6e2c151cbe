"""Modes of torch that kernels ask for when they run: a step that sets one for a part of it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_cg as fcg
from tests.hazards.law import assert_trees_all_equal


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def medium() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def without_mkldnn() -> Iterator[None]:
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = True  # type: ignore[assignment]


def cudnn_flags() -> Any:
    return torch.backends.cudnn.flags(enabled=False, deterministic=True, benchmark=False, allow_tf32=False)


Inside = Callable[[], AbstractContextManager[None]]
DOUBLE: Inside = lambda: default_dtype(torch.float64)  # noqa: E731
HALF: Inside = lambda: default_dtype(torch.bfloat16)  # noqa: E731

REFUSED: dict[str, tuple[Inside, Callable[[Tensor], Tensor], str]] = {
    "a number divided": (DOUBLE, lambda x: x.long() / 3, "get_default_dtype"),
    "a number times a fraction": (DOUBLE, lambda x: x.long() * 0.1, "get_default_dtype"),
    "ones": (DOUBLE, lambda x: x + torch.ones(3) * 0.1, "get_default_dtype"),
    "zeros in half precision": (HALF, lambda x: x + (torch.zeros(3) + 0.1), "get_default_dtype"),
    "memory filled": (deterministic, lambda x: x + torch.empty(3).isnan(), "deterministic_algorithms"),
    "a sum by index": (
        deterministic,
        lambda x: x.index_add(0, torch.tensor([0, 1, 1]), x),
        "deterministic_algorithms",
    ),
    "a product": (medium, lambda x: x.expand(3, 3) @ x, "matmul.fp32_precision"),
    "a layer": (medium, lambda x: F.linear(x, x.expand(3, 3)), "matmul.fp32_precision"),
    "a convolution": (without_mkldnn, lambda x: F.conv1d(x[None], x[None, None, :2]), "mkldnn.enabled"),
    "a convolution of cuDNN": (cudnn_flags, lambda x: F.conv1d(x[None], x[None, None, :2]), "cudnn"),
}
ACCEPTED: dict[str, tuple[Inside, Callable[[Tensor], Tensor]]] = {
    "dtypes said": (DOUBLE, lambda x: x.double() * 0.1 + torch.ones(3, dtype=torch.float64)),
    "a mask's numbers": (DOUBLE, lambda x: torch.where(x > 0, 0.1, 0.3)),
    "floats alone": (DOUBLE, lambda x: (x / 3).softmax(0)),
    "no convolution": (cudnn_flags, lambda x: x.expand(3, 3) @ x),
    "no product": (medium, lambda x: x.exp()),
}


@pytest.mark.parametrize(("inside", "compute", "name"), REFUSED.values(), ids=REFUSED)
def test_a_mode_for_a_part_of_a_step_is_refused(inside: Inside, compute: Any, name: str) -> None:
    """Also where it computes gradients; the state is as it was, and the mode is what it was."""

    def by_hand(x: Tensor) -> Tensor:
        with inside():
            return compute(x)  # type: ignore[no-any-return]

    def in_a_loss(x: Tensor) -> Tensor:
        return fcg.grad(lambda w: (w * by_hand(x)).sum().float())(x)  # type: ignore[no-any-return]

    for function in (by_hand, in_a_loss):
        before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
        with pytest.raises(
            fcg.SideEffectError,
            match=rf"sets a mode of torch for a part of it\.\n  torch\.\S*{name}\S*  before .* now .*, in aten",
        ):
            fcg.graph_fn(function)(torch.tensor([1.0, -2.0, 3.0]))
        assert (torch.get_default_dtype(), torch.get_float32_matmul_precision()) == before


@pytest.mark.parametrize(("inside", "compute"), ACCEPTED.values(), ids=ACCEPTED)
def test_one_that_no_kernel_asks_for_is_accepted(inside: Inside, compute: Any) -> None:
    def f(x: Tensor) -> Tensor:
        with inside():
            return compute(x)  # type: ignore[no-any-return]

    step = fcg.graph_fn(f, lowering="aten")
    for n in range(3):
        x = torch.arange(3.0) - n
        assert_trees_all_equal(step(x), f(x), f"call {n}")


def test_a_kernel_of_another_library_may_ask_for_any_mode() -> None:
    """Nobody knows what it multiplies, whatever its name."""

    def halved(x: Tensor) -> Tensor:
        with medium():
            return torch.ops.functional_cg_tests.halved(x)  # type: ignore[no-any-return]

    with torch.library._scoped_library("functional_cg_tests", "FRAGMENT") as library:
        library.define("halved(Tensor x) -> Tensor")
        library.impl("halved", lambda x: x / 2, "CompositeExplicitAutograd")
        torch.library.register_fake("functional_cg_tests::halved", torch.empty_like, lib=library)
        with pytest.raises(fcg.SideEffectError, match=r"matmul\.fp32_precision"):
            fcg.graph_fn(halved)(torch.ones(3))


def test_the_advice_works() -> None:
    def refused(x: Tensor) -> Tensor:
        with default_dtype(torch.float64):
            return torch.linspace(0, 1, 3) + x

    def advised(x: Tensor) -> Tensor:
        return torch.linspace(0, 1, 3, dtype=torch.float64) + x

    x = torch.ones(3)
    with pytest.raises(fcg.SideEffectError, match=r"To fix: say which dtype, .*dtype=torch.float64"):
        fcg.graph_fn(refused)(x)
    assert_trees_all_equal(fcg.graph_fn(advised)(x), refused(x), "advised")


def test_a_mode_around_the_whole_step_stays() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.ones(3) * 0.1 + x.long() / 3

    x = torch.arange(3.0)
    with default_dtype(torch.float64):
        assert_trees_all_equal(fcg.graph_fn(f)(x), f(x), "float64")
        assert f(x).dtype is torch.float64


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_an_rnn_from_a_key_has_the_bits_of_eager_in_half_precision(kind: Any) -> None:
    """It is taken apart into products, which run with the backends that are on around it."""
    torch.manual_seed(0)
    module = kind(64, 64, 2, dropout=0.5, batch_first=True).bfloat16()
    apply, params, _ = fcg.from_module(module)

    def f(params: Any, x: Tensor, n: Tensor) -> Any:
        return apply(params, {}, x.bfloat16(), key=fcg.random.fold_in(fcg.random.key(0), n))[0][0]

    step = fcg.graph_fn(f, lowering="aten")
    for n in range(3):
        x = torch.randn(32, 9, 64)
        assert_trees_all_equal(step(params, x, n), step.eager(params, x, n), f"call {n}")
