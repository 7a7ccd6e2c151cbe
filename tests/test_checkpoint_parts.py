"""Parts of a checkpoint: by name, renamed, onto other dtypes, into states, trees and modules; and nothing by halves."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg import LayoutError, optim


class Averaged(fcg.TrainState[Any]):
    ema: Any


def a_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def a_run() -> Averaged:
    _, params, buffers = fcg.from_module(a_model())
    average = fcg.tree.map(lambda p: p + 1, params)
    return Averaged.create(params=params, buffers=buffers, ema=average, optimizer=optim.adam(0.1), step=7)


@pytest.fixture(params=["folder", "file"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A run on disk, and what is in it."""
    state, path = a_run(), tmp_path / request.param
    if request.param == "file":
        fcg.save(path, state)
    else:
        with fcg.checkpoints(path) as saved:
            saved.save(state)
    return path, fcg.state_dict(state)


def assert_part(got: Any, run: dict[str, Tensor], *parts: str, dtype: torch.dtype | None = None) -> None:
    wanted = {
        name.removeprefix(f"{part}."): leaf
        for part in parts
        for name, leaf in run.items()
        if name.startswith(part)
    }
    values = fcg.state_dict(got)
    assert values.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert values[name].equal(
            leaf if dtype is None or not leaf.is_floating_point() else leaf.to(dtype)
        ), name


# --- programs ------------------------------------------------------------------------------------------------------


def test_fine_tuning_takes_parameters_and_begins_its_own_optimizer(run: Any) -> None:
    path, values = run
    apply, params, buffers = fcg.from_module(a_model())
    state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=optim.sgd(0.1, momentum=0.9))

    @fcg.graph_step
    def step(state: Any, x: Tensor) -> Any:
        grads = fcg.grad(lambda p: apply(p, state.buffers, x)[0].sum())(state.params)
        return state.apply_gradients(grads), {}

    state, _ = step(state, torch.ones(4, 2))
    moved = fcg.state_dict(state.opt_state)
    state = fcg.load(path, state, part=["params", "buffers"])
    assert_part(state.params, values, "params")
    assert_part(state.buffers, values, "buffers")
    assert fcg.state_dict(state.opt_state).keys() == moved.keys()
    assert all(leaf.equal(moved[name]) for name, leaf in fcg.state_dict(state.opt_state).items())
    assert int(state.step) == 1
    state, _ = step(state, torch.ones(4, 2))
    assert step.stats.captures == 1


def test_inference_needs_no_optimizer(run: Any) -> None:
    path, values = run
    _, params, buffers = fcg.from_module(a_model())
    before = fcg.snapshot(params)
    assert_part(fcg.load(path, params, part="params"), values, "params")
    assert_part(fcg.load(path, params, part="ema"), values, "ema")
    assert_part(fcg.load(path, buffers, part="buffers"), values, "buffers")
    assert all(leaf.equal(before[name]) for name, leaf in params.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_goes_into_a_module(run: Any, dtype: torch.dtype) -> None:
    path, values = run
    model = a_model().to(dtype)
    weight = model[0].weight
    assert fcg.load(path, model, part=["ema", "buffers"], cast=dtype is not torch.float32) is model
    assert model[0].weight is weight
    assert weight.requires_grad
    assert_part(model.state_dict(), values, "ema", "buffers", dtype=dtype)


def test_a_subtree_goes_below_another_name_beside_a_new_head(run: Any) -> None:
    path, values = run
    _, body, _ = fcg.from_module(a_model())
    params = {"body": body, "head": {"weight": torch.zeros(5)}}
    state = fcg.TrainState.create(params=params, optimizer=optim.sgd(0.1))
    state = fcg.load(path, state, part={"params.body": "ema", "params.body.2": None})
    assert state.params["body"]["0.weight"].equal(values["ema.0.weight"])
    assert state.params["body"]["2.weight"].equal(body["2.weight"])
    state = fcg.load(path, state, part={"params.body": "params", "params.body.2": "ema.2"})
    assert state.params["body"]["0.weight"].equal(values["params.0.weight"])
    assert state.params["body"]["2.weight"].equal(values["ema.2.weight"])
    assert not state.params["head"]["weight"].any()


def test_one_value_may_go_to_two_leaves_and_one_leaf_may_be_asked_for(run: Any) -> None:
    path, values = run
    state = fcg.load(path, a_run(), part={"params": "ema", "ema": "ema", "step": "step"})
    assert_part(state.params, values, "ema")
    assert_part(state.ema, values, "ema")
    _, params, _ = fcg.from_module(a_model())
    one = fcg.load(path, params, part={"0.bias": "ema.0.bias"})
    assert one["0.bias"].equal(values["ema.0.bias"])
    assert one["0.weight"].equal(params["0.weight"])
    assert fcg.load(path, torch.zeros(3), part="ema.0.bias").equal(values["ema.0.bias"])


@pytest.mark.parametrize("most", ["10GB", 40])
def test_a_folder_of_hugging_face_is_read_and_written(tmp_path: Path, most: Any) -> None:
    """Judged by ``huggingface_hub``, which reads what we write and writes what we read."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    model, others = a_model(), [a_model(), a_model()]
    (tmp_path / "theirs").mkdir()
    huggingface_hub.save_torch_model(model, tmp_path / "theirs", max_shard_size=most)
    state = fcg.load(tmp_path / "theirs", a_run(), part={"params": "", "buffers": ""})
    assert_part({**state.params, **state.buffers}, model.state_dict(), "")
    fcg.load(tmp_path / "theirs", others[0])
    (tmp_path / "ours").mkdir()
    limit = 10**10 if isinstance(most, str) else most
    fcg.save(tmp_path / "ours/model.safetensors", {**state.params, **state.buffers}, shard_bytes=limit)
    huggingface_hub.load_torch_model(others[1], tmp_path / "ours")
    for other in others:
        assert_part(other.state_dict(), model.state_dict(), "")
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert ("model.safetensors.index.json" in names) == (most == 40) == ("model.safetensors" not in names)
    assert names == {path.name for path in (tmp_path / "theirs").iterdir()}


def test_a_folder_written_by_hand_as_hugging_face_does_is_read(tmp_path: Path) -> None:
    """Without that library: files of safetensors, whose index holds names that its writer chose."""
    model, values = a_model(), fcg.state_dict(a_model().state_dict())
    names = sorted(values)
    files = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, held in files.items():
        save_file({name: values[name] for name in held}, tmp_path / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-00003-of-00003.safetensors").write_bytes(b"of a save that was killed")
    (tmp_path / "config.json").write_text("{}")
    assert_part(fcg.load(tmp_path, model).state_dict(), values, "")


# --- nothing by halves ---------------------------------------------------------------------------------------------

BOTH = 'part=["params", "buffers"]'
MISFITS = [
    ("", {}, "0.bias  expected f32[3]   got nothing", BOTH),
    (
        "",
        {"part": "params"},
        "1.running_mean  expected f32[3] from 'params.1.running_mean'   got nothing",
        BOTH,
    ),
    ("", {"part": "parms"}, "part 'parms'  expected values   got none", BOTH),
    (
        "",
        {"part": ["params", "ema"]},
        "0.bias  expected f32[3] from 'params.0.bias'   got 'ema.0.bias', too",
        BOTH,
    ),
    ("params", {"part": "params"}, "0.bias  expected bf16[3] from 'params.0.bias'   got f32[3]", "cast=True"),
    ("params", {}, "0.bias  expected bf16[3]   got nothing", 'part="params", cast=True'),
    ("params", {"part": {"": "params", "0": None, "3": None}}, "part '3'  expected leaves   got none", ""),
    ("state", {}, "opt_state.0.count  expected nothing   got i64[]", BOTH),
    ("state", {"part": {"params": "params", "ema": "params"}}, "part 'ema'  expected leaves   got none", ""),
    (
        "state",
        {"part": {"params": "ema", "params.0.bias": None, "params.0": "ema.2"}},
        "params.0.weight  expected f32[3,2] from 'ema.2.weight'   got f32[1,3]",
        "",
    ),
    (
        "state",
        {"part": {"params": "params", "params.0.bias": "params.2.bias"}},
        "params.2.bias  expected f32[1]   got what `part` gives to 'params.0.bias'",
        "",
    ),
    (
        "state",
        {"part": {"step": "params.2.bias"}, "cast": True},
        "step  expected i64[] from 'params.2.bias'   got f32[1]",
        "",
    ),
]


def a_target(kind: str) -> Any:
    _, params, buffers = fcg.from_module(a_model())
    if kind == "params":
        return {name: leaf.bfloat16() for name, leaf in params.items()}
    return (
        fcg.TrainState.create(params=params, buffers=buffers, optimizer=optim.sgd(0.1)) if kind else a_model()
    )


@pytest.mark.parametrize(("kind", "asked", "row", "fix"), MISFITS)
def test_what_does_not_fit_is_listed_and_nothing_is_written(
    run: Any, kind: str, asked: Any, row: str, fix: str
) -> None:
    target = a_target(kind)
    before = fcg.state_dict(target.state_dict() if isinstance(target, nn.Module) else target)
    with pytest.raises(LayoutError) as caught:
        fcg.load(run[0], target, **asked)
    text = str(caught.value)
    assert f"\n  {row}\n" in text, text
    after = fcg.state_dict(target.state_dict() if isinstance(target, nn.Module) else target)
    assert all(leaf.equal(before[name]) for name, leaf in after.items())
    advised = re.search(r"To fix: `(.*)` fits them\.", text)
    assert (advised[1] if advised else "") == fix, text
    if fix:  # it is true
        fcg.load(run[0], target, **{**asked, **eval(f"dict({fix})")})


def test_both_sides_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "old"
    fcg.save(path, {"layer": {"w": torch.ones(2)}, "same": torch.ones(1)})
    with pytest.raises(
        LayoutError, match=r"layers\.w  expected f32\[2\]   got nothing\n  layer\.w  expected nothing"
    ):
        fcg.load(path, {"layers": {"w": torch.zeros(2)}, "same": torch.zeros(1)})


def test_another_dtype_needs_a_word(tmp_path: Path) -> None:
    fcg.save(tmp_path / "w", {"w": torch.ones(2)})
    for dtype in (torch.bfloat16, torch.float64):
        with pytest.raises(LayoutError, match="`cast=True` fits them"):
            fcg.load(tmp_path / "w", {"w": torch.zeros(2, dtype=dtype)})
    with pytest.raises(LayoutError, match=r"expected i64\[2\]   got f32\[2\]"):
        fcg.load(tmp_path / "w", {"w": torch.zeros(2, dtype=torch.int64)}, cast=True)


@pytest.mark.parametrize("part", [3, [3], {"params"}, [], {}, {"params": None}])
def test_a_part_is_names(run: Any, part: Any) -> None:
    with pytest.raises(TypeError, match=r"part must be names, got .*\n.*part=\"params\""):
        fcg.load(run[0], a_run(), part=part)


def test_damage_in_a_part_is_found(run: Any) -> None:
    path, values = run
    file = path if path.is_file() else path / "000001-step-7" / "rank-00000.bin"
    content = bytearray(file.read_bytes())
    at = content.index(bytes(values["ema.0.weight"].flatten().view(torch.uint8).tolist()))
    content[at] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is not what was written"):
        fcg.load(path, a_model(), part=["ema", "buffers"])


class Tied(nn.Module):
    """Two names of one tensor, and a table that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("angles", torch.ones(2), persistent=False)


def test_tied_tensors_need_one_of_their_names_and_say_if_two_differ(tmp_path: Path) -> None:
    for names in (["table.weight"], ["head.weight"], ["table.weight", "head.weight"]):
        fcg.save(tmp_path / "tied", dict.fromkeys(names, torch.full((3, 2), 2.0)))
        assert (fcg.load(tmp_path / "tied", Tied()).head.weight == 2).all()
    fcg.save(tmp_path / "tied", {"table.weight": torch.ones(3, 2), "head.weight": torch.zeros(3, 2)})
    with pytest.raises(LayoutError, match=r"one tensor have different values(.|\n)*table\.weight"):
        fcg.load(tmp_path / "tied", Tied())
    with pytest.raises(LayoutError, match=r"table\.weight  expected f32\[3,2\]   got nothing"):
        fcg.load_state_dict(Tied(), {"angles": torch.zeros(2)})


@pytest.mark.parametrize("number", [2.0, math.nan])
def test_parameters_that_share_memory_are_one_tensor(tmp_path: Path, number: float) -> None:
    """Two objects, and NaN, which is equal to itself here."""
    for names in (["table.weight"], ["head.weight"], ["table.weight", "head.weight"]):
        model, value = Tied(), torch.full((3, 2), number)
        model.head.weight = nn.Parameter(model.table.weight.detach())
        fcg.save(tmp_path / "tied", dict.fromkeys(names, value))
        assert_part(
            {"": fcg.load(tmp_path / "tied", model).head.weight.nan_to_num()}, {"": value.nan_to_num()}, ""
        )
    fcg.save(tmp_path / "tied", {"table.weight": value, "head.weight": torch.ones(3, 2)})
    with pytest.raises(LayoutError, match=r"one tensor have different values"):
        fcg.load(tmp_path / "tied", model)
    part = {"a": "table.weight", "b": "table.weight"}
    tree = fcg.load(tmp_path / "tied", {"a": torch.zeros(3, 2), "b": torch.zeros(3, 2)}, part=part)
    assert tree["a"].nan_to_num().equal(value.nan_to_num())


# --- several files -------------------------------------------------------------------------------------------------


def broken(folder: Path) -> dict[str, Any]:
    """Ways to break a folder of three files, and what is said."""
    index = folder / "model.safetensors.index.json"
    text, shard = index.read_text(), folder / "model-00002-of-00003.safetensors"
    content = shard.read_bytes()
    weights = json.loads(text)["weight_map"]
    elsewhere = {"weight_map": weights | {next(iter(weights)): "../x"}}
    fewer = {"weight_map": dict(list(weights.items())[1:])}
    return {
        "is not what was written": lambda: shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1])),
        "No such file": lambda: (shard.unlink(), index.write_text(text)),
        "outside of its folder": lambda: index.write_text(json.dumps(elsewhere)),
        "does not hold what its index says": lambda: (
            shard.write_bytes(content),
            index.write_text(json.dumps(fewer)),
        ),
        "is no index": lambda: index.write_text("[]"),
        "their index is missing": index.unlink,
    }


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    model = a_model()
    path = tmp_path / "model.safetensors"
    fcg.save(path, model.state_dict(), shard_bytes=40)
    for said, change in broken(tmp_path).items():
        change()
        with pytest.raises((ValueError, OSError), match=said):
            fcg.load(tmp_path, model)


def test_a_file_of_another_save_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        fcg.save(tmp_path / name / "model.safetensors", a_model().state_dict(), shard_bytes=40)
    (tmp_path / "two/model-00001-of-00003.safetensors").replace(
        tmp_path / "one/model-00001-of-00003.safetensors"
    )
    with pytest.raises(ValueError, match=r"00001-of-00003\.safetensors is of another save than its index"):
        fcg.load(tmp_path / "one", a_model())


def test_of_two_saves_at_a_time_the_second_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins while the first writes its first file."""
    path, values, replace = tmp_path / "model.safetensors", a_model().state_dict(), os.replace
    others: list[Future[None]] = []

    def interrupted(*names: Any) -> None:
        if not others:
            others.append(pool.submit(fcg.save, path, a_model().state_dict(), shard_bytes=40))
            wait(others, 0.1)
        replace(*names)

    monkeypatch.setattr(os, "replace", interrupted)
    with ThreadPoolExecutor() as pool:
        fcg.save(path, values, shard_bytes=40)
        with pytest.raises(FileExistsError, match="not written over others"):
            others[0].result()
    assert_part(fcg.load(tmp_path, a_model()).state_dict(), values, "")


def test_several_files_are_not_mixed_with_others(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    fcg.save(path, a_model().state_dict(), shard_bytes=40)
    with pytest.raises(FileExistsError, match=r"not written over others.*model\.safetensors\.index\.json"):
        fcg.save(path, a_model().state_dict(), shard_bytes=40)
    fcg.save(path, a_model().state_dict())
    with pytest.raises(
        ValueError, match=r"several safetensors files that could be meant: model\.safetensors\.index"
    ):
        fcg.load(tmp_path, a_model())
    with pytest.raises(TypeError, match=r"got '5GB'\.\nTo fix: `shard_bytes=5_000_000_000`"):
        fcg.save(path, a_model().state_dict(), shard_bytes="5GB")  # type: ignore[arg-type]


def test_complex_numbers_lie_where_they_may(tmp_path: Path) -> None:
    """In a file, pairs of f64 begin at any multiple of 8 bytes."""
    for pad in range(3):
        state = {f"pad{n}": torch.ones(1, dtype=torch.float64) for n in range(pad)}
        state |= {
            "a": torch.full((2,), 1j, dtype=torch.complex128),
            "n": torch.tensor(2j, dtype=torch.complex128),
        }
        fcg.save(tmp_path / "run", state)
        found = fcg.load(tmp_path / "run", fcg.tree.map(torch.zeros_like, state))
        assert found["a"].tolist() == [1j, 1j]
        assert found["n"].item() == 2j


def test_both_names_of_a_tensor_in_a_tree_get_the_value(tmp_path: Path) -> None:
    tied = torch.zeros(2)
    fcg.save(tmp_path / "run", {"a": torch.ones(2)})
    found = fcg.load(tmp_path / "run", {"a": tied, "b": tied})
    assert found["a"].tolist() == found["b"].tolist() == [1, 1]


@pytest.mark.parametrize("fixed", ["expanded", "inference"])
def test_a_module_that_cannot_be_written_whole_is_not_written(tmp_path: Path, fixed: str) -> None:
    module = nn.Module()
    module.register_buffer("a", torch.zeros(2))
    with torch.inference_mode(fixed == "inference"):
        module.register_buffer("b", torch.zeros(1).expand(3) if fixed == "expanded" else torch.zeros(3))
    fcg.save(tmp_path / "run", {"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(LayoutError, match="b  expected memory that can be written"):
        fcg.load(tmp_path / "run", module)
    assert module.a.tolist() == [0, 0]
    module.b = module.b.clone()
    assert fcg.load(tmp_path / "run", module).b.tolist() == [1, 1, 1]


def test_a_save_of_several_files_that_did_not_end_is_no_save(tmp_path: Path) -> None:
    state = {name: torch.ones(4) for name in "abc"}
    fcg.save(tmp_path / "model.safetensors", state, shard_bytes=16)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"their index is missing: the save did not end\."):
        fcg.load(tmp_path, {"a": torch.zeros(4)})
    (tmp_path / "._model.safetensors").write_bytes(b"")
    fcg.save(tmp_path / "model.safetensors", state, shard_bytes=10_000)
    assert fcg.load(tmp_path, fcg.tree.map(torch.zeros_like, state))["c"].tolist() == [1] * 4


@pytest.mark.parametrize("killed_at", range(1, 5))
@pytest.mark.parametrize("limit", [16, 32, None])
def test_a_save_removes_what_killed_ones_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int, limit: int | None
) -> None:
    """Killed at the first, second, third file or the index, before it has its name."""
    path, replace = tmp_path / "model.safetensors", os.replace
    others = {"model-00001-of-00009.safetensors", "model2-00001-of-00003.safetensors"}
    save_file({"theirs": torch.ones(1)}, tmp_path / "model-00001-of-00009.safetensors")
    fcg.save(tmp_path / "model2-00001-of-00003.safetensors", {"a": torch.ones(1)})
    renamed: list[Any] = []

    def killed(*names: Any) -> None:
        renamed.append(names)
        if len(renamed) < killed_at:
            replace(*names)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        patched.setattr(Path, "unlink", lambda *_, **__: None)  # nothing is tidied up
        with contextlib.suppress(OSError):
            fcg.save(path, {name: torch.zeros(4) for name in "abc"}, shard_bytes=16)
    fcg.save(path, {name: torch.ones(4) for name in "abc"}, shard_bytes=limit)
    loaded = fcg.load(path if limit is None else tmp_path, {name: torch.zeros(4) for name in "abc"})
    assert all(leaf.tolist() == [1] * 4 for leaf in loaded.values())
    left = {one.name for one in tmp_path.iterdir()} - others
    if limit is None:  # whole files may be those of an index that comes
        left = {name for name in left if name.endswith(".tmp") or "-" not in name}
    count = {16: 3, 32: 2, None: 1}[limit]
    written = {f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)}
    assert left == ({"model.safetensors"} if limit is None else written | {"model.safetensors.index.json"})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_cast_that_loses_a_number_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    fcg.save(tmp_path / "run", {"a": torch.tensor([1.0, -1e6]), "b": torch.tensor([torch.inf, torch.nan])})
    state = {"a": torch.zeros(2, dtype=dtype), "b": torch.zeros(2)}
    with pytest.raises(LayoutError, match=r"a  expected numbers up to .*   got 1e\+06"):
        fcg.load(tmp_path / "run", state, cast=True)
    found = fcg.load(tmp_path / "run", {"b": torch.zeros(2, dtype=torch.float16)}, part="b", cast=True)
    assert found["b"][0] == torch.inf
