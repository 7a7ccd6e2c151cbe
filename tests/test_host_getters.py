"""The law of host reads, for what torch, Python and libraries say of themselves: flags, counts, replaced methods."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from tests.host_law import X

Change = Callable[[], Any]
Made = tuple[Callable[[Tensor, float], Any], Change]


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return [leaf.tolist() for leaf in fcg.tree.leaves(call())]
    except fcg.FunctionalCGError as error:
        return error


def law(make: Callable[[], tuple[Callable[[Any, Any], Any], Callable[[], Any]]]) -> Any:
    """Call, change, call: equal to eager, or loud. `make` gives a function of a tensor and a change."""
    eager, change = make()
    expected = [eager(X, 1.0)]
    change()
    expected.append(eager(X, 1.0))
    scale, change = make()
    step = fcg.graph_fn(scale)
    first = outcome(lambda: step(X, 1.0))
    if isinstance(first, fcg.FunctionalCGError):
        return first
    assert first == [expected[0].tolist()]
    again = outcome(lambda: step(X, 1.0))
    if isinstance(again, fcg.FunctionalCGError):
        return again
    change()
    second = outcome(lambda: step(X, 1.0))
    if isinstance(second, fcg.BakedValueError):
        assert "To fix:" in str(second)
        return second
    assert second == [expected[1].tolist()], "the old value, in silence"
    return second


class Undo(contextlib.ExitStack):
    """Puts things back after a test."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        old = vars(owner).get(name, self)
        setattr(owner, name, value)
        self.callback(delattr, owner, name) if old is self else self.callback(setattr, owner, name, old)

    def call(self, act: Callable[..., Any], value: Any, old: Any) -> None:
        act(value)
        self.callback(act, old)


def num_threads(undo: Undo) -> Made:
    now = torch.get_num_threads()
    return lambda x, k: x * torch.get_num_threads(), lambda: undo.call(torch.set_num_threads, now + 1, now)


def anomaly_enabled(undo: Undo) -> Made:
    def change() -> None:
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        undo.call(lambda on: torch.autograd.set_detect_anomaly(on, check_nan=False), True, False)

    return lambda x, k: x * (2 if torch.is_anomaly_enabled() else 3), change


def warn_always(undo: Undo) -> Made:
    return (
        lambda x, k: x * (2 if torch.is_warn_always_enabled() else 3),
        lambda: undo.call(torch.set_warn_always, True, False),
    )


def initial_seed(undo: Undo) -> Made:
    now = torch.initial_seed()
    return lambda x, k: x * (torch.initial_seed() % 7), lambda: undo.call(torch.manual_seed, now + 1, now)


def recursion_limit(undo: Undo) -> Made:
    now = sys.getrecursionlimit()
    return lambda x, k: x * sys.getrecursionlimit(), lambda: undo.call(sys.setrecursionlimit, now + 1, now)


def switch_interval(undo: Undo) -> Made:
    now = sys.getswitchinterval()
    return lambda x, k: x * sys.getswitchinterval(), lambda: undo.call(sys.setswitchinterval, 2 * now, now)


def matmul_precision(undo: Undo) -> Made:
    return (
        lambda x, k: x * len(torch.get_float32_matmul_precision()),
        lambda: undo.call(torch.set_float32_matmul_precision, "medium", "highest"),
    )


def mkldnn_enabled(undo: Undo) -> Made:
    return (
        lambda x, k: x * (2 if torch._C._get_mkldnn_enabled() else 3),
        lambda: undo.call(torch._C._set_mkldnn_enabled, False, True),
    )


def opt_einsum_flag(undo: Undo) -> Made:
    from torch.backends import opt_einsum

    now = opt_einsum.strategy
    return (
        lambda x, k: x * len(torch.backends.opt_einsum.strategy or ""),
        lambda: undo.set(opt_einsum, "strategy", "greedy" if now != "greedy" else "optimal"),
    )


def fill_uninitialized(undo: Undo) -> Made:
    return (
        lambda x, k: x * (2 if torch.utils.deterministic.fill_uninitialized_memory else 3),
        lambda: undo.call(
            lambda on: setattr(torch.utils.deterministic, "fill_uninitialized_memory", on), False, True
        ),
    )


def dynamo_config(undo: Undo) -> Made:
    import torch._dynamo.config as config

    now = config.recompile_limit
    return (
        lambda x, k: x * torch._dynamo.config.recompile_limit,
        lambda: undo.call(lambda limit: setattr(config, "recompile_limit", limit), now + 1, now),
    )


def functorch_config(undo: Undo) -> Made:
    import torch._functorch.config as config

    now = config.activation_memory_budget
    return (
        lambda x, k: x * torch._functorch.config.activation_memory_budget,
        lambda: undo.call(lambda budget: setattr(config, "activation_memory_budget", budget), 0.5, now),
    )


def hasattr_of_tensors(undo: Undo) -> Made:
    return (
        lambda x, k: x * (2 if hasattr(torch.Tensor, "foo") else 3),
        lambda: undo.set(torch.Tensor, "foo", 1),
    )


def hasattr_of_a_tensor(undo: Undo) -> Made:
    return lambda x, k: x * (2 if hasattr(x, "foo") else 3), lambda: undo.set(torch.Tensor, "foo", 1)


def hasattr_of_torch(undo: Undo) -> Made:
    return lambda x, k: x * (2 if hasattr(torch, "foo") else 3), lambda: undo.set(torch, "foo", 1)


def replaced_method(undo: Undo) -> Made:
    return lambda x, k: x.sigmoid(), lambda: undo.set(torch.Tensor, "sigmoid", lambda x: x * 3)


def replaced_operator(undo: Undo) -> Made:
    def add(x: Tensor, other: Any) -> Tensor:
        return x * other

    return lambda x, k: x + 3, lambda: undo.set(torch.Tensor, "__add__", add)


def replaced_method_of_what_is_made(undo: Undo) -> Made:
    return (
        lambda x, k: x * float(torch.tensor(2.0).sigmoid()),
        lambda: undo.set(torch.Tensor, "sigmoid", lambda x: x * 3),
    )


def replaced_function(undo: Undo) -> Made:
    return lambda x, k: torch.sigmoid(x), lambda: undo.set(torch, "sigmoid", lambda x: x * 3)


def replaced_method_of_a_module(undo: Undo) -> Made:
    return (
        lambda x, k: torch.nn.functional.relu(x - 1.5),
        lambda: undo.set(torch.nn.functional, "relu", lambda x, inplace=False: x * 3),
    )


SPELLINGS = (
    num_threads,
    anomaly_enabled,
    warn_always,
    initial_seed,
    recursion_limit,
    switch_interval,
    matmul_precision,
    mkldnn_enabled,
    opt_einsum_flag,
    fill_uninitialized,
    dynamo_config,
    functorch_config,
    hasattr_of_tensors,
    hasattr_of_a_tensor,
    hasattr_of_torch,
    replaced_method,
    replaced_operator,
    replaced_method_of_what_is_made,
    replaced_function,
    replaced_method_of_a_module,
)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_change_is_loud(spelling: Callable[[Undo], Made]) -> None:
    with Undo() as undo:

        def made() -> Made:
            undo.close()
            return spelling(undo)

        law(made)


def first_calls() -> Iterator[Any]:
    yield pytest.param(lambda x: x * (2 if gc.isenabled() else 3), contextlib.nullcontext, id="gc.isenabled")
    yield pytest.param(lambda x: x * gc.get_threshold()[0], contextlib.nullcontext, id="gc.get_threshold")
    yield pytest.param(
        lambda x: x * (2 if torch._C._is_multithreading_enabled() else 3),
        contextlib.nullcontext,
        id="multithreading",
    )


@pytest.mark.parametrize(("scale", "around"), list(first_calls()))
def test_what_the_trace_sets_is_as_in_an_eager_run_or_refused(
    scale: Callable[[Tensor], Tensor], around: Callable[[], Any]
) -> None:
    with around():
        expected, step = scale(X), fcg.graph_fn(lambda x: scale(x))
        got = outcome(lambda: step(X))
    assert isinstance(got, fcg.FunctionalCGError) or got == [expected.tolist()]


def test_a_mode_that_the_step_sets_itself_is_its_own() -> None:
    def scale(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x * (2 if torch.is_grad_enabled() else 3)

    step = fcg.graph_fn(scale)
    for around in (contextlib.nullcontext, torch.no_grad, contextlib.nullcontext):
        with around():
            assert outcome(lambda: step(X)) == [(X * 3).tolist()]
