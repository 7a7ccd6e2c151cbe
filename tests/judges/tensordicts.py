"""tensordict's tests of CUDA graphs and of compilation: a TensorDict goes in as a dict and is one inside."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import functional_cg as fcg
from tests.judges.rows import Verdict
from tests.judges.scenarios import Program, Scenarios, left_out, raises, same

__all__ = ["TENSORDICTS"]


def _wrapped(fn: Callable[[Any], Any], lowering: str) -> Any:
    """A function of a TensorDict as a captured function of a dict."""
    from tensordict import TensorDict

    def body(leaves: Any) -> Any:
        result = fn(TensorDict(leaves))
        return result.to_dict() if isinstance(result, TensorDict) else result

    return fcg.graph_fn(body, lowering=lowering)


def _of_td(fn: Callable[[Any], Any], name: str) -> Program:
    """A pure function of a TensorDict, inside and outside of a step."""

    def program(lowering: str, device: str) -> Iterator[Verdict]:
        if importlib.util.find_spec("tensordict") is None:
            yield Verdict("not run", "", "tensordict is not installed")
            return
        from tensordict import TensorDict

        step = _wrapped(fn, lowering)
        for call in range(4):
            leaves = {
                "a": torch.arange(6.0, device=device).reshape(2, 3) + call,
                "b": {"c": torch.full((2, 3), 2.0 + call, device=device)},
            }
            expected = fn(TensorDict(leaves))
            yield from same(
                step(leaves), expected.to_dict() if isinstance(expected, TensorDict) else expected
            )

    program.__name__ = name
    return program


def _stacked(td: Any) -> Any:
    from tensordict import TensorDict

    return TensorDict.stack([td, td + 1])


def _module(td: Any) -> Any:
    from tensordict.nn import TensorDictModule, TensorDictSequential

    one = TensorDictModule(lambda x: x + 1, in_keys=["a"], out_keys=["y"])
    two = TensorDictModule(lambda x, y: x * y, in_keys=["a", "y"], out_keys=[("b", "z")])
    return TensorDictSequential(one, two)(td)


def _selected(td: Any) -> Any:
    from tensordict.nn import TensorDictModule

    return TensorDictModule(lambda x: x + 1, in_keys=["a"], out_keys=["y"])(td).select("y")


def cudagraphs_random(lowering: str, device: str) -> Iterator[Verdict]:
    x = torch.zeros(10, device=device)
    step = fcg.graph_fn(lambda x: x + torch.randn_like(x), lowering=lowering)
    yield raises(fcg.ImplicitRandomnessError, lambda: step(x), "a generator: keys draw here")
    keyed = fcg.graph_fn(lambda key, x: x + fcg.random.normal(key, (10,)), lowering=lowering)
    keys = fcg.random.split(fcg.random.key(0).to(device), 3)
    results = [keyed(key, x) for key in keys]
    for key, result in zip(keys, results, strict=True):
        yield from same(result, fcg.random.normal(key, (10,)))


def cudagraphs_backprop(lowering: str, device: str) -> Iterator[Verdict]:
    """Two parameters of ones under the gradient of their sum, with a rate of one: 1 - i after i steps."""

    def train(state: Any) -> Any:
        grads = fcg.grad(lambda p: (p["x"] + p["y"]).sum())(state.params)
        return state.apply_gradients(grads), {}

    params = {name: torch.ones(3, device=device) for name in "xy"}
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(1.0))
    step = fcg.graph_step(train, lowering=lowering)
    for i in range(1, 11):
        state, _ = step(state)
        for name in "xy":
            yield from same(
                fcg.snapshot(state.params)[name], torch.full((3,), 1.0 - i, device=device), str(i)
            )


def cudagraphs_input_that_is_no_tensor(lowering: str, device: str) -> Iterator[Verdict]:
    """A number beside a tensor: tensordict refuses another one later, here it is live."""
    step = fcg.graph_fn(lambda x, y: x + y, lowering=lowering)
    zero = torch.zeros((), device=device)
    for value in (1.0, 1.0, 2.0):
        yield from same(step(zero, value), torch.tensor(value, device=device))


def a_tensordict_as_an_argument(lowering: str, device: str) -> Iterator[Verdict]:
    if importlib.util.find_spec("tensordict") is None:
        yield Verdict("not run", "", "tensordict is not installed")
        return
    from tensordict import TensorDict

    step = fcg.graph_fn(lambda td: td["a"] + 1, lowering=lowering)
    for call in range(3):
        a = torch.full((2,), float(call), device=device)
        got: Tensor = step(TensorDict({"a": a}))
        yield from same(got, a + 1)


TENSORDICTS = Scenarios(
    "tensordict",
    (
        cudagraphs_random,
        cudagraphs_backprop,
        _of_td(_module, "cudagraphs tdmodule"),
        _of_td(lambda td: td.copy().set("y", td.get("a") + 1), "cudagraphs tdmodule that copies"),
        _of_td(_selected, "cudagraphs tdmodule with an output of its own"),
        _of_td(lambda td: td + 1, "cudagraphs td input non tdmodule"),
        cudagraphs_input_that_is_no_tensor,
        a_tensordict_as_an_argument,
        _of_td(lambda td: td["b", "c"] * td["a"], "compile nested keys"),
        _of_td(lambda td: td.clone().apply(lambda x: x * 2), "compile apply"),
        _of_td(lambda td: td.unflatten_keys("."), "compile unflatten keys"),
        _of_td(lambda td: td.flatten_keys("."), "compile flatten keys"),
        _of_td(_stacked, "compile stack"),
        _of_td(lambda td: (td * td).update({"d": td["a"].sum()}), "compile arithmetic and update"),
        _of_td(lambda td: td.auto_batch_size_(1)[0].clone(), "compile index"),
        _of_td(lambda td: td.auto_batch_size_(1).reshape(2).to(torch.float64), "compile reshape and to"),
        left_out("test_signature", why="about annotations of the wrapper"),
        left_out("TestONNXExport", "TestExport", why="about export"),
    ),
)
