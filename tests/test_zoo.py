"""The zoo judges models as it says: what works, what is refused, what is wrong, and what ends its process."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from tests.bench.zoo.case import Case, chosen
from tests.bench.zoo.judge import Outcome, judge
from tests.bench.zoo.page import page
from tests.bench.zoo.processes import Run, outcomes
from tests.bench.zoo.rounding import MOST, excess
from tests.other_rounding import compile_wide
from tests.stress.forks import differentiates


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 3, generator=generator), "y": torch.randint(0, 2, (4,), generator=generator)}


def loss(forward: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(forward(batch["x"]), batch["y"])


def case(module: Callable[[], nn.Module], loss: Any = loss, name: str = "model") -> Case:
    return Case(name, "ours", module, batch, loss)


def outcome(module: Callable[[], nn.Module], loss: Any = loss, most: int = 1000) -> Outcome:
    return judge(case(module, loss), "cpu", "aten", 3, most)


class Branches(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.sum() > 0 else 1)


class Draws(nn.Linear):
    """Draws without effect on the first loss: its scale is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * torch.randn(4, 2)


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.Linear(3, 2),
        lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)),
        lambda: Draws(3, 2),
    ],
)
def test_models_that_work(module: Callable[[], nn.Module]) -> None:
    assert outcome(module) == Outcome("works")


def test_a_refusal_is_told_with_its_fix() -> None:
    found = outcome(lambda: Branches(3, 2))
    assert found.verdict == "refused"
    assert found.reason.startswith("HostSyncError: `train_step`: asks for the value")
    assert "torch.where" in found.fix


def test_a_step_unlike_the_ordinary_loop_is_wrong() -> None:
    def other(forward: Any, batch: Any) -> Tensor:
        return loss(forward, batch) * (1 if isinstance(forward, nn.Module) else 1.01)

    found = outcome(lambda: nn.Linear(3, 2), other)
    assert found.verdict == "wrong"
    assert found.reason.endswith("as in an ordinary loop")


def test_what_no_ordinary_loop_trains_is_left_out() -> None:
    def fails(forward: Any, batch: Any) -> Tensor:
        raise ValueError("three\nlines\n")

    assert outcome(lambda: nn.Linear(3, 2), fails) == Outcome("unusable", "ValueError: three lines")
    assert outcome(lambda: nn.Linear(3, 2), most=3) == Outcome("unusable", "too large")
    assert outcome(lambda: nn.Linear(3, 2), lambda f, b: loss(f, b) * float("nan")).verdict == "unusable"


def ends(forward: Any, batch: Any) -> Tensor:
    os._exit(3)


def hangs(forward: Any, batch: Any) -> Tensor:
    time.sleep(600)
    raise AssertionError


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_process_that_ends_or_hangs_ends_nothing_else() -> None:
    if not differentiates():
        pytest.skip("a child of a fork does not train here")

    def run(losses: list[Any], timeout: float) -> dict[str, str]:
        cases = [case(lambda: nn.Linear(3, 2), one, one.__name__) for one in losses]
        found = outcomes(cases, Run("cpu", "aten", 2, jobs=2, timeout=timeout))
        return {one.name: result.reason or result.verdict for one, result, _ in found}

    assert run([ends, loss], 200) == {"ends": "its process ended with 3", "loss": "works"}
    assert run([hangs], 1) == {"hangs": "takes more than 1 s"}


def test_the_page_counts_what_was_judged() -> None:
    rows = [
        ("a", Outcome("works")), ("b", Outcome("works")), ("c", Outcome("refused", "Error: x | y", "do z")),
        ("d", Outcome("unusable", "too large")),
    ]  # fmt: skip
    text = page({"ours 1.0": rows})
    assert "2 of 3 models work (66.7 %), 1 refused." in text
    assert "## ours 1.0: 2 of 3" in text
    assert "| `c` | refused | Error: x \\| y | do z |" in text
    assert "`d`" not in text


def test_names_choose() -> None:
    cases = [case(lambda: nn.Linear(3, 2), name=name) for name in ("one", "two")]
    assert [one.name for one in chosen(cases, ["tw"])] == ["two"]
    assert (
        [one.name for one in chosen(cases, [])]
        == [one.name for one in chosen(cases, ["our"])]
        == ["one", "two"]
    )


def results(weight: float, *, step: int = 1, moved: float = 0.0) -> Any:
    """A state and metrics, as a step returns them."""
    params = {"w": torch.tensor([1.0, 2.0]) + moved, "b": torch.zeros(2) + moved / 100}
    return {"params": params, "step": torch.tensor(step)}, {"loss": torch.tensor(weight)}


def test_what_rounding_explains_is_what_other_roundings_show() -> None:
    others = [results(1.0, moved=1e-6), results(1.0, moved=-2e-6)]
    assert excess(results(1.0), results(1.0), others).times == 0
    off = excess(results(1.0, moved=4e-6), results(1.0), others)
    assert off.times == pytest.approx(2, rel=0.1)
    assert "times what rounding explains" in str(off)
    assert excess(results(1.0, moved=2e-5), results(1.0), others).times > MOST
    assert excess(results(1.001), results(1.0), others).name == "metrics['loss']"
    assert excess(results(1.0, step=2), results(1.0), others).times > MOST
    assert excess(results(float("nan")), results(1.0), others).times > MOST
    assert excess(results(1.0, moved=1e-7), results(1.0), ()).times == float("inf")


def drifts(graph: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """Compile, into what is right in the first calls only, which the certificate sees."""
    right, calls = compile_wide(graph, example_inputs), itertools.count()

    def run(*args: Any) -> Any:
        grown = 1 + 1e-3 * (next(calls) > 4)
        return tree_map(lambda x: x * grown if x.is_floating_point() else x, right(*args))

    return run


def bends(times: int) -> Any:
    """A compiler whose results of float32 are off in so many calls, as behind a rectifier of what is almost 0."""

    def compiler(graph: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        right, calls = compile_wide(graph, example_inputs), itertools.count()

        def run(*args: Any) -> Any:
            grown = 1 + 1e-3 * (4 < next(calls) <= 4 + times)
            return tree_map(lambda x: x * grown if x.dtype is torch.float32 else x, right(*args))

        return run

    return compiler


@pytest.mark.parametrize(("times", "verdict"), [(1, "works"), (2, "wrong")])
def test_a_single_call_may_be_off_if_none_is_in_double_precision(times: int, verdict: str) -> None:
    assert judge(case(lambda: nn.Linear(3, 2)), "cpu", bends(times), 8, 1000).verdict == verdict


def test_a_compiled_step_is_judged_call_by_call() -> None:
    found = judge(
        case(lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))),
        "cpu",
        compile_wide,
        8,
        1000,
    )
    assert found.verdict == "works"
    assert 0 < found.worst < MOST
    wrong = judge(case(lambda: nn.Linear(3, 2)), "cpu", drifts, 8, 1000)
    assert wrong.verdict == "wrong"
    assert "MiscompileError" in wrong.reason
