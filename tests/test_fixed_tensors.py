"""Tensors that plain objects of a module hold, such as the noise schedule of a diffusion model, are constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.errors import BakedValueError, ReadOnlyError
from functional_cg.testing import assert_trees_all_close, assert_trees_all_equal
from tests.shares import CALLS

pytestmark = pytest.mark.usefixtures("scalar_loops")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@dataclass
class Schedule:
    """No module: `to`, `parameters` and `buffers` do not see what it holds."""

    betas: Tensor
    steps: int = 8
    tables: dict[str, list[Tensor]] = field(default_factory=dict)

    def noisy(self, x: Tensor, time: Tensor) -> Tensor:
        kept = (1 - self.betas).cumprod(0)[time][:, None]
        return kept.sqrt() * x + (1 - kept).sqrt() * self.tables["signs"][0]


class Denoiser(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, device=device)
        betas = torch.linspace(0.01, 0.5, 8, device=device)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], device=device)
        self.schedule = Schedule(betas, tables={"signs": [signs]})

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        noisy = self.schedule.noisy(x, time)
        if self.schedule.betas[0] > 0.4:  # the host may read what never changes
            return noisy
        return x - self.inner(noisy)  # type: ignore[no-any-return]


def batch_of(call: int, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(call)
    x, time = torch.randn(6, 4, generator=generator), torch.randint(8, (6,), generator=generator)
    return {"x": x.to(device), "time": time.to(device)}


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
@pytest.mark.parametrize("device", DEVICES)
def test_replay_equals_eager_and_an_ordinary_loop(device: str, lowering: Any) -> None:
    model = Denoiser(device)
    apply, params, buffers = fcg.from_module(model)

    @fcg.graph_step(lowering=lowering)
    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Tensor:
            return apply(params, buffers, **batch)[0].square().mean()  # type: ignore[no-any-return]

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    same = assert_trees_all_equal if lowering == "aten" else assert_trees_all_close
    for call in range(CALLS):
        batch = batch_of(call, device)
        expected = train_step.eager(fcg.fork(state), batch)
        state, metrics = train_step(state, batch)
        same((state, metrics), expected)
        loss = model(**batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(metrics["loss"], loss.detach(), rtol=1e-4, atol=1e-5)
    assert train_step.stats.captures == 1


WRITES: dict[str, tuple[Callable[[Any], object], str]] = {
    "in place": (lambda m: m.schedule.betas.mul_(0.5), "schedule.betas"),
    "through a view": (lambda m: m.schedule.betas[2:].zero_(), "schedule.betas"),
    "by index": (lambda m: m.schedule.betas.__setitem__(0, 0.1), "schedule.betas"),
    "as an out": (lambda m: torch.neg(m.inner.bias, out=m.schedule.betas[:4]), "schedule.betas"),
    "deep inside": (lambda m: m.schedule.tables["signs"][0].neg_(), "schedule.tables['signs'][0]"),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_forward_that_writes_one_is_refused(write: str) -> None:
    act, path = WRITES[write]

    class Writing(Denoiser):
        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            with torch.no_grad():
                act(self)
            return super().forward(x, time)

    apply, params, buffers = fcg.from_module(Writing())
    step = fcg.graph_fn(lambda params, batch: apply(params, buffers, **batch)[0])
    with pytest.raises(ReadOnlyError, match="writes in place") as refusal:
        step(params, batch_of(0))
    assert f"`{path}`" in str(refusal.value)
    assert "make it a buffer" in str(refusal.value)
    with pytest.raises(ReadOnlyError, match="neither a parameter nor a buffer"):
        apply(params, buffers, **batch_of(0))  # outside of a step


def test_the_fix_for_a_write_works() -> None:
    class Registered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("betas", torch.ones(4))
            self.betas: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.betas.mul_(0.5)
            return x * self.betas

    apply, params, buffers = fcg.from_module(Registered())
    step = fcg.graph_step(lambda buffers, x: apply(params, buffers, x)[::-1])
    for call in range(1, 4):
        buffers, out = step(buffers, torch.ones(4))
        assert torch.equal(out, torch.full((4,), 0.5**call))


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda m: m.schedule.betas.mul_(0.5),
    "through a view": lambda m: m.schedule.betas[2:].zero_(),
    "other memory": lambda m: setattr(m.schedule.betas, "data", m.schedule.betas * 0.5),
    "swapped": lambda m: torch.utils.swap_tensors(m.schedule.betas, m.schedule.betas * 0.5),
    "replaced": lambda m: setattr(m.schedule, "betas", m.schedule.betas * 0.5),
    "deep inside": lambda m: m.schedule.tables["signs"][0].neg_(),
    "replaced deep inside": lambda m: m.schedule.tables["signs"].__setitem__(0, torch.ones(4)),
    "the object": lambda m: setattr(m, "schedule", Schedule(m.schedule.betas, tables=m.schedule.tables)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_on_the_original_is_noticed_at_the_next_call(change: str) -> None:
    model = Denoiser()
    apply, params, buffers = fcg.from_module(model)
    step = fcg.graph_fn(lambda params, batch: apply(params, buffers, **batch)[0])
    for call in range(2):
        step(params, batch_of(call))
    CHANGES[change](model)
    with pytest.raises(BakedValueError, match=r"was changed after `from_module` copied it[\s\S]*schedule"):
        step(params, batch_of(2))
    apply, params, buffers = fcg.from_module(model)  # the fix
    again = fcg.graph_fn(lambda params, batch: apply(params, buffers, **batch)[0])
    torch.testing.assert_close(again(params, batch_of(2)), model(**batch_of(2)).detach())


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_tensors_without_a_storage_refuse_no_write(kind: str) -> None:
    class Writing(Denoiser):
        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            scale = torch.ones(4).to_sparse()
            scale.mul_(2.0)
            return super().forward(x, time)

    model = Writing()
    model.schedule.tables["kept"] = [
        torch.eye(4).to_sparse() if kind == "sparse" else torch.ones(4, device="meta")
    ]
    apply, params, buffers = fcg.from_module(model)
    out, _ = apply(params, buffers, **batch_of(0))
    torch.testing.assert_close(out, model(**batch_of(0)))
