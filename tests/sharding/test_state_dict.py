"""Checkpoints are independent of ranks: they load bit for bit at any stage and on any mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg import optim, sharding
from tests.sharding.law import HYBRID, batches, held, on_gloo_and_nccl, rank_of
from tests.sharding.mistakes import same
from tests.sharding.programs import PROGRAMS, Setting
from tests.sharding.ranks import on_ranks

# Leaves that no number of ranks divides, smaller than it, of no dimension, with none; integers, a key, whole leaves.
PROGRAM = "average"
CALLS = 3
ONE = {"data": 1}


def file_of(folder: str, setting: Setting) -> str:
    return f"{folder}/{'x'.join(map(str, setting.axes.values()))}-{setting.stage}.safetensors"


def trained(setting: Setting, device: str, calls: int = CALLS) -> tuple[Any, Any]:
    state = PROGRAMS[PROGRAM].state(setting.zero(device), device)
    step, batch_of = (
        fcg.graph_step(PROGRAMS[PROGRAM].step, lowering="aten"),
        batches(PROGRAM, device, rank_of()),
    )
    for call in range(calls):
        state, _ = step(state, batch_of(call))
    return state, step


def write(folder: str, settings: list[Setting], device: str) -> list[Any]:
    """Train in each setting, and write a file; what was written, on rank 0, in memory too."""
    kept = []
    for setting in settings:
        state, _ = trained(setting, device)
        whole = sharding.state_dict(state)
        if rank_of() == 0:
            fcg.save(file_of(folder, setting), whole)
        kept.append(dict(whole))
        assert {leaf.device.type for leaf in whole.values()} <= {"cpu"}
        gathered = fcg.state_dict(sharding.gather(state))  # on all ranks
        assert rank_of() or same(whole, gathered)
    return kept


def read(folder: str, pairs: list[tuple[Setting, Setting]], device: str) -> list[Any]:
    """Load what one setting wrote into another; what is a checkpoint of it then, and what shards it has."""
    kept = []
    for source, setting in pairs:
        state = PROGRAMS[PROGRAM].state(setting.zero(device), device)
        state = fcg.load(file_of(folder, source), state)
        whole = sharding.state_dict(state)
        if rank_of() == 0:
            fcg.save(file_of(folder, setting), whole)
        padding = [
            leaf.local[-(leaf.placement.length * leaf.placement.mesh.shards.size - leaf.numel()) :]
            for leaf in fcg.tree.leaves(state)
            if getattr(leaf, "placement", None) is not None and leaf.placement.sharded and leaf.placement.padded
            and leaf.placement.mesh.shards.rank == leaf.placement.mesh.shards.size - 1
        ]  # fmt: skip
        assert not any(bool(part.any()) for part in padding), "padding is zeros"
        kept.append(dict(whole))
    return kept


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert (found[name].dtype, found[name].shape) == (leaf.dtype, leaf.shape), name
        assert found[name].equal(leaf), name


def settings(axes: dict[str, int]) -> list[Setting]:
    return [Setting(axes, stage) for stage in (1, 2, 3)]


def test_any_ranks_read_what_others_wrote(tmp_path: Path) -> None:
    """2 -> 4, a hybrid of 2 x 2, and 1; 1 -> 2; 4 -> 1; stage 1 -> 3 and 3 -> 1."""
    folder, two, four = str(tmp_path), settings({"data": 2}), settings({"data": 4})
    written, nothing = on_ranks(2, write, folder, two, "cpu")
    assert nothing == [{}] * 3
    pairs = [(two[0], four[2]), (two[2], four[0]), (two[1], Setting(HYBRID, 3)), (two[2], Setting(HYBRID, 1))]
    wide, *others = on_ranks(4, read, folder, pairs, "cpu")
    assert others == [[{}] * 4] * 3
    for whole, (source, _) in zip(wide, pairs, strict=True):
        assert_equal(whole, written[source.stage - 1])

    narrow = [(four[2], Setting(ONE, 3)), (Setting(HYBRID, 3), Setting(ONE, 1)), (two[2], Setting(ONE, 2))]
    origins = (written[0], written[1], written[2])
    for whole, origin in zip(read(folder, narrow, "cpu"), origins, strict=True):
        assert_equal(whole, origin)

    (alone,) = write(folder, [Setting(ONE, 3)], "cpu")
    assert any(not alone[name].equal(leaf) for name, leaf in written[2].items()), "another training"
    spread, _ = on_ranks(2, read, folder, [(Setting(ONE, 3), setting) for setting in two], "cpu")
    for whole in spread:
        assert_equal(whole, alone)


def goes_on(folder: str, setting: Setting, device: str) -> Any:
    """A run that is taken back to its file goes on with the same bits, without another trace or capture."""
    state, step = trained(setting, device)
    whole, batch_of = sharding.state_dict(state), batches(PROGRAM, device, rank_of())
    path = file_of(folder, setting)
    if rank_of() == 0:
        fcg.save(path, whole)
    torch.distributed.barrier()
    for call in range(2):
        state, metrics = step(state, batch_of(CALLS + call))
    expected = [leaf.clone() for leaf in fcg.tree.leaves(held(state))]
    state = fcg.load(path, state)
    for call in range(2):
        state, again = step(state, batch_of(CALLS + call))
    assert same(again, metrics)
    assert same(held(state), expected)
    return step.stats.traces, step.stats.captures


@on_gloo_and_nccl
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_goes_on_from_its_file(stage: int, device: str, tmp_path: Path) -> None:
    assert (
        on_ranks(2, goes_on, str(tmp_path), Setting({"data": 2}, stage), device, device=device)
        == [(1, 1)] * 2
    )  # type: ignore[arg-type]


def a_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 1, bias=False))


def from_a_module(device: str) -> Any:
    """Parameters come from a module's state dict, and go back into one."""
    mesh = sharding.mesh({"data": 2}, device=device)
    module = a_module()
    if mesh.rank == 1:  # the values of rank 0 are those of all
        with torch.no_grad():
            for leaf in module.parameters():
                leaf.zero_()
    apply, params, buffers = fcg.from_module(module)
    adamw, zero = optim.adamw(0.1, weight_decay=0.0), sharding.zero(mesh, stage=3)
    state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=adamw, sharding=zero)
    before = sharding.state_dict(state.params)

    @fcg.graph_step
    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return F.mse_loss(apply(params, state.buffers, batch)[0], batch.sum(1, keepdim=True))

        loss, grads = fcg.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": sharding.mean(loss)}

    x = torch.arange(20.0, device=mesh.device).reshape(4, 5) / 20 + mesh.rank
    for _ in range(3):
        state, _ = train_step(state, x)
    after = sharding.state_dict(state.params)
    whole = {name: leaf.cpu() for name, leaf in sharding.gather(state.params).items()}
    if mesh.rank == 1:
        assert before == after == {}
        return None, None, whole
    return dict(before), dict(after), whole


@on_gloo_and_nccl
def test_a_module_goes_in_and_comes_back(device: str) -> None:
    (before, after, whole), (_, _, other) = on_ranks(2, from_a_module, device, device=device)
    module = a_module()
    assert_equal(before, module.state_dict())
    module.load_state_dict(after)
    assert_equal(module.state_dict(), whole)
    assert_equal(other, whole)
    assert all(not after[name].equal(leaf) for name, leaf in before.items() if leaf.numel() > 1)


def gathered_twice(device: str) -> Any:
    """Whole leaves before and after a step; what was gathered before stays what it was."""
    state, step = trained(Setting({"data": 2}, 3), device, calls=1)
    first, one = sharding.gather(state.params), sharding.gather(state.params["w1"])
    before = [leaf.clone() for leaf in fcg.tree.leaves(first)]
    state, _ = step(state, batches(PROGRAM, device, rank_of())(1))
    second, two = sharding.gather(state.params), sharding.gather(state.params["w1"])
    assert same(first, before)
    assert not one.equal(two)
    assert same(sharding.local(state.params["w1"]), second["w1"].flatten()[18 * rank_of() :][:18])
    return not same(first, second) and same(second["w1"], two)


@on_gloo_and_nccl
def test_what_is_gathered_is_that_of_now(device: str) -> None:
    assert on_ranks(2, gathered_twice, device, device=device) == [True, True]


def not_its_own() -> str:
    """A checkpoint of another model, on all ranks; what differs is listed and nothing is written."""
    state, _ = trained(Setting({"data": 2}, 3), "cpu", calls=1)
    before = [leaf.clone() for leaf in fcg.tree.leaves(held(state))]
    whole = {name: torch.zeros(2) for name in ("step", "params.w1")}
    try:
        fcg.load_state_dict(state, whole)
    except fcg.LayoutError as error:
        assert same(held(state), before)
        assert state.generation == 1
        return str(error)
    raise AssertionError("it fits")


def test_another_models_checkpoint_is_refused_on_all_ranks() -> None:
    for message in on_ranks(2, not_its_own):
        assert message.startswith(
            "fcg.load_state_dict: the values do not fit `state`, which is unchanged.\n  step  expec"
        )
        assert "\n  params.b1  expected f32[7]   got nothing\n" in message
