"""Misuse of sharded leaves, meshes and shardings is refused on the rank that commits it, with good advice.

The mistakes are made on one rank alone, and all ranks train on afterwards: had one of them started a collective, the
others would wait for it, or take it for theirs.
"""

from __future__ import annotations

import copy
import math
import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import functional_cg as fcg
from functional_cg import sharding
from functional_cg.sharding import launch
from tests.sharding.law import on_gloo_and_nccl
from tests.sharding.mistakes import MISTAKES, WithAverage, close, same
from tests.sharding.programs import Setting, mlp_batch, mlp_params, mlp_state, mlp_step
from tests.sharding.ranks import on_ranks

# Of a mesh, in seconds: no test waits for it unless it fails, as with a mutant.
TIMEOUT = float(os.environ.get("SECONDS_OF_MESHES", "8"))


def bench(device: str) -> Any:
    """What the mistakes are made with, made on all ranks."""
    from torch.distributed.fsdp import fully_shard

    zero = Setting({"data": 2}, 3, timeout=TIMEOUT).zero(device)
    other = Setting({"other": 2}, 3, timeout=TIMEOUT).zero(device)
    state, home = mlp_state()(zero, device), zero.mesh.device
    fsdp = torch.nn.Linear(2, 2).to(home)
    fully_shard(fsdp, mesh=torch.distributed.init_device_mesh(device, (2,)))
    return SimpleNamespace(
        mesh=zero.mesh, zero=zero, state=state, twin=fcg.fork(state), other=mlp_state()(other, device),
        device=home, w=state.params["w1"], one=state.params["one"], scale=state.params["scale"],
        average=WithAverage.create(
            params=mlp_params(), ema={"w1": mlp_params()["w1"]}, optimizer=fcg.optim.sgd(0.1), sharding=zero
        ),
        whole={name: leaf.to(home) for name, leaf in mlp_params().items()}, key=fcg.random.key(7).to(home),
        ddp=torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).to(home)), fsdp=fsdp,
    )  # fmt: skip


def made_on_one_rank(device: str) -> Any:
    """What each mistake raised on the last rank, and what became of its repair on all of them."""
    b = bench(device)
    said: dict[str, Any] = {}
    if b.mesh.rank == 1:
        for name, mistake in MISTAKES.items():
            try:
                said[name] = f"nothing: it returned {mistake.make(b)!r}"
            except mistake.error as error:
                said[name] = str(error)
            except Exception as error:
                said[name] = f"another error, {type(error).__name__}: {error}"
    assert_trains_on(b)
    repaired: dict[str, Any] = {}
    for name, mistake in MISTAKES.items():
        try:
            repaired[name] = mistake.repair(b)
        except Exception as error:
            repaired[name] = f"{type(error).__name__}: {error}"
    assert_trains_on(b)
    return said, repaired


def assert_trains_on(b: Any) -> None:
    """All ranks take two steps with the bits of the eager run."""
    captured, eager = fcg.fork(b.state), fcg.fork(b.state)
    step = fcg.graph_step(mlp_step, lowering="aten")
    for call in range(2):
        batch = fcg.tree.map(lambda leaf: leaf.to(b.device), mlp_batch(call, b.mesh.rank))
        captured, metrics = step(captured, batch)
        eager, expected = step.eager(eager, batch)
        assert same(metrics, expected)


@on_gloo_and_nccl
def test_mistake_is_refused_and_its_repair_works(device: str) -> None:
    (_, first), (said, second) = on_ranks(2, made_on_one_rank, device, device=device)
    for name, mistake in MISTAKES.items():
        message = said[name]
        assert re.match(mistake.says, message), (name, message)
        assert re.search(mistake.names, message), (name, message)
        if isinstance(mistake.error, type) and issubclass(mistake.error, fcg.FunctionalCGError):
            assert_template(message, mistake.error)
        assert (first[name], second[name]) == (True, True), name


def assert_template(message: str, error: type) -> None:
    """What happened, why, one fix and the page of the manual, a line each; rows are indented."""
    lines = message.splitlines()
    assert lines[-1] == f"Docs: help(functional_cg.{error.__name__})", message
    assert lines[-2].startswith("To fix: "), message
    assert not lines[0].startswith(" "), message
    assert lines[-3].endswith((".", "?")), message
    assert not lines[-3].startswith(" "), "why is missing\n" + message
    assert all(line.startswith("  ") for line in lines[1:-3]), message


def shown(device: str) -> Any:
    """What a sharded leaf prints, copies and clones to: no number of another rank is needed for it."""
    b = bench(device)
    twin = copy.deepcopy(b.w)
    page = b.state._repr_html_()
    return repr(b.w), f"{b.w}", len(b.w), same(sharding.gather(twin), b.whole["w1"]), str(b.average), page


@on_gloo_and_nccl
def test_printing_and_copying_ask_nobody(device: str) -> None:
    for rank, result in enumerate(on_ranks(2, shown, device, device=device)):
        printed, formatted, length, same_values, tree, page = result
        assert printed == formatted == "Sharded(state.params['w1']  float32[5, 7] sharded over data=2)"
        assert length == 5
        assert same_values
        assert re.search(rf"^state: WithAverage, .* 312 B on rank {rank} of 2$", tree, re.MULTILINE), tree
        assert re.search(
            r"state\.params\['w1'\] +f32\[5,7\] sharded over data=2 +72 B$", tree, re.MULTILINE
        ), tree
        assert re.search(r"state\.ema\['w1'\] +f32\[5,7\] +140 B$", tree, re.MULTILINE), tree
        assert "<span>f32[5,7] sharded over data=2</span>" in page
        assert "f32[18]" not in page


def replaced_by_a_shard(device: str) -> Any:
    """A shard in place of its leaf, which on the first rank has the shape of its slot."""
    b = bench(device)
    try:
        fcg.fork(b.state).replace(params={**b.state.params, "w1": sharding.local(b.w)})
    except fcg.LayoutError as error:
        return str(error), b.state.generation
    return "nothing", b.state.generation


@on_gloo_and_nccl
def test_a_shard_is_no_leaf_on_any_rank(device: str) -> None:
    for (said, generation), size in zip(
        on_ranks(2, replaced_by_a_shard, device, device=device), (18, 17), strict=True
    ):
        assert re.search(rf"expected f32\[5,7\]@\S+ sharded over data=2   got f32\[{size}\]@\S+\n", said), (
            said
        )
        assert "To fix: give the leaf itself, or all of it, `fcg.sharding.gather(leaf)`" in said
        assert generation == 0


# -- one process --------------------------------------------------------------------------------------------------


def test_with_one_rank_all_of_it_is_the_identity() -> None:
    mesh = sharding.mesh({"data": -1}, device="cpu")
    state = mlp_state()(sharding.zero(mesh), "cpu")
    assert sharding.mean(3.0) == 3.0
    assert sharding.sum({"a": 1}) == {"a": 1}
    assert same(sharding.fold_in(state.key), state.key)
    assert close(state.params["w1"].norm(), mlp_params()["w1"].norm())
    params = state.params
    assert sharding.gather(params) is params
    assert set(sharding.state_dict(state)) == set(fcg.state_dict(state))


LAUNCHER = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": None}, r"sharding\.mesh: RANK is not set, and there are 2 ranks\. To fix: `torchrun "),
        ({"MASTER_ADDR": None}, r"sharding\.mesh: MASTER_ADDR is not set"),
        ({"MASTER_PORT": None}, r"sharding\.mesh: MASTER_PORT is not set"),
        ({"WORLD_SIZE": "two"}, r"sharding\.mesh: WORLD_SIZE is 'two', expected an integer"),
    ],
    ids=str,
)
def test_what_a_launcher_left_out_is_named(
    environment: dict[str, str | None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, LAUNCHER | environment)
    with pytest.raises(RuntimeError, match=says):
        sharding.mesh({"data": -1}, device="cpu")


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, r"sharding\.mesh: LOCAL_RANK is 1, and torch sees 1 GPU on this machine.*--nproc_per_node=1 "),
        ({"LOCAL_RANK": None}, r"sharding\.mesh: LOCAL_RANK is not set, and there are 2 ranks"),
        ({"LOCAL_RANK": "-1"}, r"sharding\.mesh: LOCAL_RANK is '-1', expected an integer"),
    ],
    ids=str,
)
def test_a_rank_without_a_gpu_of_its_own_is_refused(
    environment: dict[str, str | None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any process group or CUDA context is made."""
    set_environment(monkeypatch, LAUNCHER | environment)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RuntimeError, match=says):
        sharding.mesh({"data": -1}, device="cuda")
    assert not torch.distributed.is_initialized()


def test_the_gpu_of_a_rank() -> None:
    assert [launch._gpu(rank, 2) for rank in range(2)] == [torch.device("cuda", 0), torch.device("cuda", 1)]


def set_environment(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((4,), TypeError, r"axes must be a dict of names and sizes, got 4\. To fix"),
        ((["data"],), TypeError, r"axes must be a dict of names and sizes, got \['data'\]"),
        (
            ({"data": 1.0},),
            TypeError,
            r"an axis has a text as its name and an integer as its size, got 'data': 1\.0",
        ),
        (({"data": "1"},), TypeError, r"an axis has .*, got 'data': '1'"),
        (({"data": True},), TypeError, r"an axis has .*, got 'data': True"),
        (({1: 1},), TypeError, r"an axis has .*, got 1: 1"),
        (({"": 1},), TypeError, r"an axis has .*, got '': 1"),
        (({"data": 3},), ValueError, r"\{'data': 3\} does not lay out 1 rank\. To fix"),
    ],
    ids=str,
)
def test_axes_of_another_kind_are_refused(arguments: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=rf"^sharding\.mesh: {says}"):
        sharding.mesh(*arguments, device="cpu")
    assert sharding.mesh({"data": -1}, device="cpu").size == 1


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"device": "tpu"}, ValueError, r'device must be "cuda" or "cpu", got \'tpu\''),
        ({"device": 0}, ValueError, r'device must be "cuda" or "cpu", got 0'),
        ({"timeout": 0}, ValueError, r"timeout must be a positive number of seconds, 1e\+06 at most, got 0"),
        ({"timeout": -1.0}, ValueError, "timeout must be a positive number"),
        ({"timeout": "1"}, ValueError, "timeout must be a positive number of seconds, .* got '1'"),
        ({"timeout": math.nan}, ValueError, "timeout must be a positive number"),
        (
            {"timeout": math.inf},
            ValueError,
            r"timeout must be a positive number of seconds, 1e\+06 at most, got inf",
        ),
    ],
    ids=str,
)
def test_options_of_a_mesh_are_checked(options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=rf"^sharding\.mesh: {says}"):
        sharding.mesh({"data": -1}, **({"device": "cpu"} | options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_mesh_of_gpus_where_there_is_none() -> None:
    with pytest.raises(RuntimeError, match=r"^sharding\.mesh: torch sees no GPU\. To fix: `sharding\.mesh"):
        sharding.mesh({"data": -1}, device="cuda")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"mesh": {"data": 2}}, TypeError, r"mesh must be made with `fcg\.sharding\.mesh\(.*\)`, got dict"),
        ({"stage": True}, ValueError, "stage must be 1, 2 or 3, got True"),
        ({"stage": 3.0}, ValueError, r"stage must be 1, 2 or 3, got 3\.0"),
        ({"reshard": "no"}, TypeError, "reshard must be True or False, got 'no'"),
        (
            {"param_dtype": torch.float8_e5m2},
            TypeError,
            r"param_dtype must be .* of 16 bits or more, .*float8_e5m2",
        ),
        ({"bucket_bytes": "1"}, TypeError, "bucket_bytes must be an integer, got '1'"),
        ({"bucket_bytes": 1.5}, TypeError, r"bucket_bytes must be an integer, got 1\.5"),
        ({"prefetch": None}, TypeError, "prefetch must be an integer, got None"),
        ({"param_dtype": "bf16"}, TypeError, "param_dtype must be a floating dtype .*, got 'bf16'"),
        (
            {"reduce_dtype": torch.int32},
            TypeError,
            r"reduce_dtype must be a floating dtype .*, got torch\.int32",
        ),
    ],
    ids=str,
)
def test_options_of_a_sharding_are_checked(options: Any, error: type[Exception], says: str) -> None:
    arguments = {"mesh": sharding.mesh({"data": -1}, device="cpu")} | options
    with pytest.raises(error, match=rf"^sharding\.zero: {says}"):
        sharding.zero(**arguments)
