"""Writes of one number where a mask says: no index leaves the device, whatever the mask picks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.stages.trace.known import filled
from tests.compiled_graphs import compiled
from tests.shares import CALLS

pytestmark = pytest.mark.usefixtures("scalar_loops")


def written(at: Callable[[Tensor], Any], number: Any = 7.0) -> Callable[[Tensor, Tensor], Tensor]:
    def write(x: Tensor, n: Tensor) -> Tensor:
        y = x * 2
        y[at(x)] = n if number is None else number
        return y

    return write


WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "elements": written(lambda x: x > 0),
    "rows": written(lambda x: x[:, 0, 0] > 0),
    "rows of rows": written(lambda x: x[..., 0] > 0),
    "columns": written(lambda x: (slice(None), x[0, :, 0] > 0)),
    "the last": written(lambda x: (..., x[0, 0] > 0)),
    "in the middle": written(lambda x: (slice(None), x[0, :, :] > 0)),
    "of a mask that is turned": written(lambda x: (x[:, :, 0].T > 0).T),
    "a number of the step's": written(lambda x: x > 0, None),
    "a row of a number": lambda x, n: (x * 2).index_put((x[:, 0, 0] > 0,), n.view(1)),
    "out of place": lambda x, n: x.index_put((x > 0,), n),
    "nothing": written(lambda x: x > 100),
    "infinity": written(lambda x: x > 0, float("-inf")),
    "into a view": lambda x, n: written(lambda y: y > 0)(x.transpose(0, 2), n),
    "a copy": lambda x, n: torch.where(x > 0, x, written(lambda y: y < 0)(x, n)),
}


def everything(x: Tensor, n: Tensor) -> dict[str, Tensor]:
    found = {name: write(x, n) for name, write in WRITES.items()}
    for name, write in WRITES.items():
        if name != "infinity":
            found[f"gradient: {name}"] = fcg.grad(lambda x, write=write: write(x, n).square().sum())(x)
    found["gradient of the number"] = fcg.grad(lambda n: (torch.where(x > 0, n, x)).sum())(n)
    return found


def data(call: int, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randint(-3, 4, (3, 4, 5), generator=torch.Generator().manual_seed(call)).float()
    return x.to(device), torch.tensor(float(call), device=device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_number_is_written_where_a_mask_says(device: str) -> None:
    step = fcg.graph_fn(everything, lowering="aten")
    for call in range(CALLS):
        x, n = data(call, device)
        for name, value in everything(x, n).items():
            assert torch.equal(step(x, n)[name], value), name


@compiled
def test_a_number_is_written_where_a_mask_says_compiled(compiled_on: str) -> None:
    step = fcg.graph_fn(everything, lowering="inductor")
    for call in range(CALLS):
        x, n = data(call, compiled_on)
        expected, got = everything(x, n), step(x, n)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.index_put((x > 0,), x[x > 0]),
        lambda x: written(lambda x: x[:, 0, 0] > 0)(x, x).__setitem__(x[:, 0, 0] > 0, x[0]),
        lambda x: x.index_put((x > 0,), torch.tensor(1.0), accumulate=True),
    ],
    ids=["as many numbers as the mask picks", "a row", "added"],
)
def test_what_needs_the_indices_is_refused(write: Callable[[Tensor], Any]) -> None:
    with pytest.raises(fcg.HostSyncError, match=r"depends on the values of a mask(.|\n)*To fix"):
        fcg.graph_fn(lambda x: write(x * 1) or x)(data(0, "cpu")[0])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_a_number_of_another_dtype_is_written_as_torch_writes_it(dtype: torch.dtype) -> None:
    def write(x: Tensor, n: Tensor) -> Tensor:
        y = x.abs().to(dtype)
        y[x > 0] = n
        y[x < 0] = 1
        return y

    step = fcg.graph_fn(write)
    for call in range(CALLS):
        x, n = data(call, "cpu")
        assert torch.equal(step(x, n), write(x, n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize(
    "shapes", [((3, 4), (3, 4)), ((3, 4), (4,)), ((3, 4), (3, 1)), ((), ()), ((4,), (3, 4))]
)
def test_what_stands_for_a_fill_by_a_number_on_a_gpu(dtype: torch.dtype, shapes: Any) -> None:
    def call(func: Any, args: Any, kwargs: Any) -> Tensor:
        assert not func._schema.name.startswith("aten::masked_fill")
        out: Tensor = func(*args, **kwargs)
        return out

    of, at = shapes
    for seed, value in enumerate((0.0, 2.0, -1.5, 3)):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(-4, 5, of, generator=generator).to(dtype)
        mask, number = torch.rand(at, generator=generator) > 0.5, torch.tensor(value)
        for name, func in {
            "": torch.ops.aten.masked_fill.Tensor,
            "_": torch.ops.aten.masked_fill_.Tensor,
        }.items():
            if not name or torch.broadcast_shapes(of, at) == torch.Size(of):
                got, expected = x.clone(), x.clone()
                got = filled(func, (got, mask, number), call)
                assert torch.equal(got, func(expected, mask, number))
                assert got.dtype is dtype


@pytest.mark.cuda
def test_fills_by_a_number_of_the_device_are_captured() -> None:
    def everything(x: Tensor, n: Tensor) -> dict[str, Tensor]:
        y = x.clone()
        y.masked_fill_(x > 0, n)
        gradient = fcg.grad(lambda n: (x * 2).masked_fill(x > 0, n).square().sum())(n)
        return {"out of place": x.masked_fill(x > 0, n), "in place": y, "gradient": gradient}

    for lowering in ("aten", "inductor"):
        step = fcg.graph_fn(everything, lowering=lowering)  # type: ignore[arg-type]
        for call in range(CALLS):
            x, n = data(call, "cuda")
            for name, value in everything(x, n).items():
                assert torch.equal(step(x, n)[name], value), name
        assert step.stats.replays > 0
