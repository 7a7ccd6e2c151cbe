"""Tensors that a step makes may be given other strides in place, as kernels of channels-last pooling do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_close, assert_trees_all_equal
from functional_cg.testing.simulator import Simulator
from tests.compiled_graphs import ON_A_GPU, compiled_in_turn
from tests.shares import CALLS, share

pytestmark = pytest.mark.usefixtures("scalar_loops")


class Net(nn.Module):
    """A small convolutional network with batch norm, which ends as most do."""

    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)
        )
        self.pool, self.head = pool, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.body(x)).flatten(1))  # type: ignore[no-any-return]


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "adaptive": nn.AdaptiveAvgPool2d(1),
    "adaptive max": nn.AdaptiveMaxPool2d(1),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "adaptive, a value that is kept": lambda x: (
        F.adaptive_avg_pool2d(x, 1) * F.adaptive_avg_pool2d(x.relu(), (1, 1))
    ),
}


@pytest.mark.parametrize(
    ("pool", "device", "lowering"),
    [
        *((pool, "cpu", "aten") for pool in POOLS),
        *((pool, "cpu", "inductor") for pool in share(reversed(POOLS), 2)),
        *(
            pytest.param(pool, *ON_A_GPU.values, lowering, marks=ON_A_GPU.marks)
            for pool in POOLS
            for lowering in ("aten", "inductor")
        ),
    ],
)
def test_a_network_in_channels_last_trains_as_eager_does(pool: str, device: str, lowering: Any) -> None:
    torch.manual_seed(0)
    model = Net(POOLS[pool]).to(device, memory_format=torch.channels_last)
    apply, params, buffers = fcg.from_module(model)

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            out, new = apply(params, state.buffers, batch["x"])
            return F.cross_entropy(out, batch["y"]), new

        (loss, new), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads).replace(buffers=new), {"loss": loss}

    class State(fcg.TrainState):
        buffers: Any

    step = fcg.graph_step(train_step, lowering=lowering)
    state = State.create(params=params, buffers=buffers, optimizer=fcg.optim.sgd(0.05, 0.9))
    twin = fcg.fork(state)
    for call in range(CALLS):
        generator = torch.Generator().manual_seed(call)
        x = torch.randn(4, 3, 8, 8, generator=generator).to(device, memory_format=torch.channels_last)
        batch = {"x": x, "y": torch.randint(0, 4, (4,), generator=generator).to(device)}
        state, metrics = step(state, batch)
        twin, expected = step.eager(twin, batch)
        if lowering == "aten" and device == "cpu":
            assert_trees_all_equal((state, metrics), (twin, expected))
        else:
            assert_trees_all_close((state, metrics), (twin, expected), rtol=1e-3, atol=1e-4)
    assert step.stats.replays == CALLS


@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    data=st.data(),
    backend=st.sampled_from(["auto", "simulator"]),
)
def test_any_strides_of_what_is_made_here(shape: list[int], data: st.DataObject, backend: str) -> None:
    """Also overlapping ones and parts; what the tensor was called before is what it is then."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    strides = [data.draw(st.integers(0, 2)) for _ in sizes]
    room = torch.Size(shape).numel() - 1
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if reach > room:
        strides, reach = [0] * len(sizes), 0
    offset = data.draw(st.integers(0, room - reach))

    def step_fn(state: Any, x: Tensor) -> Any:
        made = state["w"] * 2 + x
        before = made.sum()
        same = made.as_strided_(sizes, strides, offset)
        return {"w": state["w"] + 1}, {"before": before, "made": made * 1, "same": same + 1}

    w = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    made = Simulator() if backend == "simulator" else "auto"
    step = fcg.graph_step(step_fn, lowering="aten", backend=made)
    state, twin = fcg.place({"w": w}), fcg.place({"w": w})
    for call in range(4):
        x = torch.full((), float(call))
        state, metrics = step(state, x)
        twin, expected = step.eager(twin, x)
        assert_trees_all_equal((state, metrics), (twin, expected))


def test_a_leaf_keeps_its_strides() -> None:
    def step_fn(state: Any) -> Any:
        state["w"].as_strided_((2,), (1,), 1)
        return state, {}

    with pytest.raises(fcg.FunctionalCGError, match=r"as_strided_(.|\n)*To fix"):
        fcg.graph_step(step_fn)(fcg.place({"w": torch.ones(4)}))


# A compiler lays these out otherwise than torch's kernels do.
TURNED: dict[str, Callable[[Tensor], Tensor]] = {
    "cat of one": lambda a: torch.cat([a], 0),
    "cat with nothing": lambda a: torch.cat([a, a[:, :0]], 1),
    "cat with an empty vector": lambda a: torch.cat([torch.zeros(0, device=a.device), a], -1),
    "cat of two": lambda a: torch.cat([a, a], 0),
    "stack": lambda a: torch.stack([a, a]),
    "where": lambda a: torch.where(a > 3, a, -a),
    "product": lambda a: a * 2,
    "clone": torch.clone,
    "one in row-major order": lambda a: a.clone(memory_format=torch.contiguous_format),
    "repeat": lambda a: a.repeat(1, 2, 1),
    "flip": lambda a: a.flip(0),
    "index_select": lambda a: a.index_select(2, torch.arange(2, device=a.device)),
}
SEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda a: a.as_strided((a.numel(),), (1,)),
    "from an element on": lambda a: a.as_strided((3, 2), (2, 1), 5),
    "from a part of it": lambda a: a[1:].as_strided((4,), (2,)),
    "before the part": lambda a: a[1:].as_strided((4,), (1,), 1),
}


@pytest.mark.kernels
@compiled_in_turn("kind", [(kind,) for kind in TURNED], 4)
def test_memory_is_read_as_it_lies_in_an_eager_run(kind: str, compiled_on: str) -> None:
    """By `as_strided`, of values that are turned; and what the backward reads of them is what they are."""

    def step(state: dict[str, Tensor], x: Tensor) -> Any:
        value = TURNED[kind]((x + state["w"]).transpose(1, 2))

        def loss(w: Tensor) -> Tensor:
            turned = TURNED[kind]((x * w).transpose(1, 2)).transpose(-1, -2) * 3
            place = torch.arange(turned.numel(), device=w.device).view(turned.shape)
            return (turned * turned * place).sum()

        grad = fcg.grad(loss)(state["w"])
        return {"w": state["w"] + grad % 5}, {name: see(value) * 2 for name, see in SEEN.items()}

    step = fcg.graph_step(step, lowering="inductor")
    state = fcg.place({"w": torch.ones((), device=compiled_on)})
    twin = fcg.fork(state)
    for call in range(4):
        x = (torch.arange(24.0) + call).view(2, 3, 4).to(compiled_on)
        state, metrics = step(state, x)
        twin, expected = step.eager(twin, x)
        assert_trees_all_equal((state, metrics), (twin, expected))
    assert step.stats.replays == 4


_LIBRARY = torch.library.Library("fcg_tests_strides", "DEF")
_LIBRARY.define("with_sums(Tensor x) -> (Tensor, Tensor)")
_LIBRARY.impl("with_sums", lambda x: (x * 2, None), "CompositeExplicitAutograd")
torch.library.register_fake(
    "fcg_tests_strides::with_sums", lambda x: (torch.empty_like(x), x.new_empty(2, 3)), lib=_LIBRARY
)


def test_a_result_that_a_kernel_omits() -> None:
    """Attention of cuDNN has no logarithms of sums where nothing is differentiated."""

    def twice(state: Any, x: Tensor) -> Any:
        return torch.ops.fcg_tests_strides.with_sums(x.T)[0] + state["w"]

    evaluate = fcg.graph_fn(twice, lowering="aten")
    state = fcg.place({"w": torch.ones(())})
    for n in range(16):
        x = torch.arange(6.0).view(2, 3) + n
        assert torch.equal(evaluate(state, x), x.T * 2 + 1)
