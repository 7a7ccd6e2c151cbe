"""Saving and loading: names, values, files, and runs that continue as if uninterrupted."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import stat
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg import DonatedStateError, LayoutError, optim
from functional_cg.tree import register_dataclass
from tests.forked import Program
from tests.shares import share

Pair = namedtuple("Pair", ["first", "second"])


@register_dataclass(static=("name",))
class Layer:
    weight: Any
    name: str = "layer"


def assert_bitwise(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(got) == list(wanted)
    for name, tensor in got.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert tensor.shape == wanted[name].shape, name
        same = (
            tensor.contiguous().flatten().view(torch.uint8),
            wanted[name].contiguous().flatten().view(torch.uint8),
        )
        assert torch.equal(*same), name


# --- a run with everything that a run carries --------------------------------------------------------------


class Run(fcg.TrainState[Any]):
    """A state class of the user's own: an average of the parameters beside them."""

    ema: Any


def new_run(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    module = {
        "0.weight": torch.randn(8, 3, generator=generator),
        "1.bias": torch.randn(8, generator=generator),
        "2.weight": torch.randn(1, 8, generator=generator),
    }
    return Run.create(
        params=module,
        optimizer=optim.adamw(optim.warmup_cosine(1e-2, 3, 20), weight_decay=0.1),
        key=fcg.random.key(seed),
        buffers={"mean": torch.zeros(8), "var": torch.ones(8)},
        accumulate=True,
        ema=fcg.tree.map(torch.clone, module),
    )


def new_step() -> Any:
    @fcg.graph_step
    def train_step(state: Any, batch: Any) -> Any:
        key, dropout_key = fcg.random.split(state.key)

        def loss_fn(params: Any) -> Any:
            hidden = batch @ params["0.weight"].T
            mean, var = hidden.mean(0), hidden.var(0)
            hidden = (hidden - mean) / (var + 1e-5).sqrt() + params["1.bias"]
            out = fcg.random.dropout(dropout_key, torch.relu(hidden), 0.3) @ params["2.weight"].T
            moved = {"mean": mean, "var": var}
            return F.mse_loss(out, batch.sum(1, keepdim=True)), moved

        (loss, moved), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        buffers = fcg.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state.buffers, moved)
        total = fcg.tree.map(torch.add, state.grads, grads)
        state = state.apply_gradients(total, buffers=buffers, key=key)
        ema = fcg.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state.ema, state.params)
        halves = fcg.tree.map(lambda g: 0.5 * g, total)
        return state.replace(ema=ema, grads=halves), {"loss": loss}

    return train_step


def take(step: Any, state: Any, first: int, count: int) -> tuple[Any, dict[str, Tensor]]:
    """Steps ``first`` and on, each with a batch of its own: the state and the losses."""
    losses = {}
    for n in range(first, first + count):
        batch = torch.randn(16, 3, generator=torch.Generator().manual_seed(n))
        state, metrics = step(state, batch)
        losses[f"loss {n}"] = metrics["loss"]
    return state, losses


RESUME = """
import sys, torch
import functional_cg as fcg
from tests.test_checkpoint import new_run, new_step, take
from tests.shares import share
state = fcg.load(sys.argv[1], new_run(seed=99))
state, losses = take(new_step(), state, 5, 5)
torch.save((fcg.state_dict(state), losses), sys.argv[2])
"""


def test_a_new_process_goes_on_bitwise(tmp_path: Path) -> None:
    step = new_step()
    state, _ = take(step, new_run(seed=1), 0, 5)
    fcg.save(tmp_path / "five.safetensors", state)
    state, wanted = take(step, state, 5, 5)
    paths = str(tmp_path / "five.safetensors"), str(tmp_path / "ten.pt")
    with Program("-c", RESUME, *paths) as program:
        assert program.end(timeout=120) == 0, program.err
    resumed, losses = torch.load(paths[1])
    assert_bitwise(resumed, fcg.state_dict(state))
    assert_bitwise(losses, wanted)
    assert int(resumed["step"]) == 10


def test_loading_into_a_running_trainer_needs_no_recapture() -> None:
    step = new_step()
    state, _ = take(step, new_run(seed=1), 0, 3)
    kept = fcg.state_dict(state)
    state, wanted = take(step, state, 3, 2)
    later = fcg.state_dict(state)
    old = state
    state = fcg.load_state_dict(state, kept)
    assert_bitwise(fcg.state_dict(old.latest()), kept)
    state, losses = take(step, state, 3, 2)
    assert_bitwise(losses, wanted)
    assert_bitwise(fcg.state_dict(state), later)
    assert (step.stats.captures, step.stats.replays) == (1, 7)


# --- names and values --------------------------------------------------------------------------------------


def test_names_are_those_of_the_module_and_go_back_to_it() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    state = fcg.TrainState.create(
        params=dict(module.named_parameters()),
        buffers=dict(module.named_buffers()),
        optimizer=optim.sgd(0.1, momentum=0.9),
    )
    names = fcg.state_dict(state)
    assert {f"params.{name}" for name, _ in module.named_parameters()} < set(names)
    both = {**fcg.state_dict(state.params), **fcg.state_dict(state.buffers)}
    assert_bitwise(dict(sorted(both.items())), dict(sorted(module.state_dict().items())))
    pretrained = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict()
    state = state.replace(params={name: pretrained[name] for name in state.params})
    module.load_state_dict(
        {
            name.removeprefix("params."): value
            for name, value in fcg.state_dict(state).items()
            if name[:7] == "params."
        },
        strict=False,
    )
    assert torch.equal(module[0].weight, pretrained["0.weight"])


def test_every_kind_of_node_and_leaf_comes_back() -> None:
    nest = {
        "list": [torch.ones(2), {"x": torch.zeros(0, 3)}],
        "tuple": (torch.tensor(3), None),
        "pair": Pair(torch.tensor(True), OrderedDict(b=torch.ones(1).bfloat16(), a=torch.ones(1).half())),
        "layer": Layer(torch.arange(4)),
        "image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        7: torch.tensor([float("nan"), -0.0]),
        "f8": torch.ones(3).to(torch.float8_e4m3fn),
    }
    state: Any = fcg.place(nest)
    kept = fcg.state_dict(state)
    assert list(kept) == [
        "7", "f8", "image", "layer.weight", "list.0", "list.1.x",
        "pair.first", "pair.second.a", "pair.second.b", "tuple.0",
    ]  # fmt: skip
    assert all(tensor.is_contiguous() and type(tensor) is Tensor for tensor in kept.values())
    blank: Any = fcg.load_state_dict(fcg.place(fcg.tree.map(torch.zeros_like, nest)), kept)
    assert_bitwise(fcg.state_dict(blank), kept)
    assert blank["image"].is_contiguous(memory_format=torch.channels_last)
    plain = fcg.load_state_dict(nest, kept)
    assert_bitwise(fcg.state_dict(plain), kept)
    assert plain["image"].is_contiguous(memory_format=torch.channels_last)
    assert plain["tuple"][1] is None


def dotted(nest: Any, name: str = "") -> Iterator[str]:
    """Names of the leaves of a nest of dicts and lists."""
    if isinstance(nest, Tensor):
        yield name.removeprefix(".")
    else:
        for key, value in nest.items() if isinstance(nest, dict) else enumerate(nest):
            yield from dotted(value, f"{name}.{key}")


KEYS = st.sampled_from(["a", "a.a", "a.0", "", 0, "0"])
LEAVES = st.integers(0, 9).map(torch.tensor)
BRANCHES = st.dictionaries(KEYS, LEAVES, max_size=3) | st.lists(LEAVES, max_size=2)


@given(st.dictionaries(KEYS, LEAVES | BRANCHES, min_size=2))
def test_names_are_one_to_one_or_refused(nest: Any) -> None:
    names = list(dotted(nest))
    if len(set(names)) < len(names):
        with pytest.raises(ValueError, match="have the same name"):
            fcg.state_dict(nest)
        return
    kept = fcg.state_dict(nest)
    assert sorted(kept) == sorted(names)
    back = fcg.load_state_dict(fcg.tree.map(torch.zeros_like, nest), dict(reversed(kept.items())))
    assert [int(leaf) for leaf in fcg.tree.leaves(back)] == [int(leaf) for leaf in fcg.tree.leaves(nest)]


def test_two_leaves_of_one_name_are_refused_with_both_paths() -> None:
    state = fcg.place({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})
    with pytest.raises(
        ValueError, match=r"`state\['a'\]\['b'\]` and `state\['a\.b'\]` have the same name, 'a\.b'"
    ):
        fcg.state_dict(state)


def test_tensors_are_owned_and_fit_both_formats() -> None:
    shared = torch.ones(2, requires_grad=True)
    nest = {"a": shared, "tied": shared, "n": 3}
    kept = fcg.state_dict(nest)
    with torch.inference_mode():
        inside = fcg.state_dict(fcg.place({"a": shared}))
    for tensor in (*kept.values(), *inside.values()):
        assert not tensor.requires_grad
        assert not tensor.is_inference()
    kept["a"].zero_()
    assert kept["tied"].tolist() == shared.tolist() == [1.0, 1.0]
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    assert_bitwise(torch.load(file, weights_only=True), kept)
    assert kept["n"].dtype == torch.int64


def test_numpy_arrays_are_values_too() -> None:
    state: Any = fcg.place({"w": torch.zeros(2, 2), "n": 0})
    state = fcg.load_state_dict(state, {"w": np.eye(2, dtype=np.float32), "n": np.array(4)})
    assert state["w"].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert state["n"].item() == 4


# --- refusals ----------------------------------------------------------------------------------------------


def test_all_differences_are_listed_and_nothing_is_written() -> None:
    state: Any = fcg.place(
        {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2), "d": torch.zeros(2)}
    )
    values = {"a": torch.ones(2), "b": torch.ones(3), "c": np.ones(2), "x": torch.ones(1), "y": "?"}
    with pytest.raises(LayoutError) as caught:
        fcg.load_state_dict(state, values)
    text = str(caught.value)
    for row in (
        "b  expected f32[2]   got f32[3]",
        "c  expected f32[2]   got f64[2]",
        "d  expected f32[2]   got nothing",
        "x  expected nothing   got f32[1]",
        "y  expected nothing   got str",
    ):
        assert f"\n  {row}\n" in text
    assert "`state`, which is unchanged" in text
    assert state["a"].tolist() == [0.0, 0.0]
    assert state.generation == 0
    with pytest.raises(LayoutError, match="… and 7 more"):
        fcg.load_state_dict(state, {**{f"z{n}": torch.ones(1) for n in range(8)}})


def test_a_donated_handle_is_refused_with_the_call_to_use() -> None:
    old: Any = fcg.place({"w": torch.zeros(1)})
    new = fcg.load_state_dict(old, {"w": torch.ones(1)})
    for use in (fcg.state_dict, lambda s: fcg.load_state_dict(s, {"w": torch.ones(1)})):
        with pytest.raises(DonatedStateError, match=r"`state = fcg\.load_state_dict\(state, d\)`"):
            use(old)
    assert old.latest()["w"].item() == new["w"].item() == 1.0


def test_a_part_is_read_but_not_loaded_into() -> None:
    state = fcg.TrainState.create(params={"w": torch.zeros(1)}, optimizer=optim.sgd(0.1))
    assert list(fcg.state_dict(state.params)) == ["w"]
    with pytest.raises(TypeError, match=r'`state\.params` is a part of a state.*\n.*part=\{"params": ""\}\)'):
        fcg.load_state_dict(state.params, {"w": torch.ones(1)})
    state = fcg.load_state_dict(state, {"w": torch.ones(1)}, part={"params": ""})
    assert state.params["w"].item() == 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda state: fcg.load_state_dict(state, "last.pt"),
            "expected a dict of names and tensors, got str",
        ),
        (
            lambda state: fcg.save(state, "last"),
            r"expected a path, got Handle\. To fix: `fcg\.save\(path, state\)`",
        ),
        (
            lambda state: fcg.load(state, "last"),
            r"expected a path, got Handle\. To fix: `fcg\.load\(path, state\)`",
        ),
    ],
)
def test_swapped_arguments_are_named(call: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        call(fcg.place({"w": torch.zeros(1)}))


def test_leaves_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"state\['name'\]  expected a dense tensor   got str"):
        fcg.state_dict({"name": "run 1", "w": torch.ones(1)})


# --- files -------------------------------------------------------------------------------------------------

VALUES = {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(3), "none": torch.zeros(0)}


def test_a_file_comes_back_bitwise_and_is_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = tmp_path / "last.safetensors"
    state = fcg.place(VALUES)
    fcg.save(path, state)
    assert_bitwise(dict(sorted(load_file(path).items())), fcg.state_dict(state))
    back = fcg.load(path, fcg.place(fcg.tree.map(torch.zeros_like, VALUES)))
    assert_bitwise(fcg.state_dict(back), fcg.state_dict(state))
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_link_keeps_pointing_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "last").symlink_to(tmp_path / "run-1")
    fcg.save(tmp_path / "last", VALUES)
    assert (tmp_path / "last").is_symlink()
    assert (tmp_path / "run-1").is_file()


@pytest.mark.parametrize("failing", ["os.fsync", "os.replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_save_leaves_the_old_file(
    failing: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.safetensors"
    fcg.save(path, VALUES)
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(failing, fail)
    with pytest.raises(type(error)) as caught:
        fcg.save(path, {"w": torch.ones(1000)})
    if isinstance(error, OSError):
        assert str(caught.value) == f"[Errno 28] No space left on device: '{path}'"
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_the_disk_before_it_takes_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, real=real, name=name: (order.append(name), real(*args))[1]
        )
    fcg.save(tmp_path / "last.safetensors", VALUES)
    assert order == ["fsync", "replace", "fsync"]  # the file, its name, the directory


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    state = fcg.place(VALUES)
    fcg.save(tmp_path / "whole", state)
    whole = (tmp_path / "whole").read_bytes()
    for content in (b"", b"hello, this is a text and no checkpoint", whole[:-1], whole[:20], whole + b"x"):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(
            ValueError, match=r"fcg\.load: .*bad is no(t what was written| safetensors file, or not)"
        ):
            fcg.load(tmp_path / "bad", state)
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*absent'"):
        fcg.load(tmp_path / "absent", state)
    with pytest.raises(IsADirectoryError, match=r"fcg\.load: Is a directory without a complete checkpoint"):
        fcg.load(tmp_path, state)
    for target in (tmp_path, tmp_path / "absent" / "last", tmp_path / "whole" / "last"):
        with pytest.raises(OSError, match=f": '{target}'(\n|$)"):
            fcg.save(target, state)
    with pytest.raises(LayoutError, match=r"fcg\.load: the values in .*whole do not fit `state`"):
        fcg.load(tmp_path / "whole", {"other": torch.ones(1)})
    assert state["n"].item() == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "whole"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_leaves_of_any_precision_keep_their_bits(tmp_path: Path) -> None:
    """Those that the format lacks lie in the file as pairs, which other readers see."""
    parts = torch.tensor([[0.0, -0.0], [math.nan, 1.5], [-math.inf, 2.0]], dtype=torch.float64)
    state = {
        str(dtype): torch.view_as_complex(parts.to(dtype.to_real()))
        for dtype in (torch.complex32, torch.complex64, torch.complex128)
    }
    wide = torch.view_as_complex(parts)
    state |= {
        "single": wide[1].clone(),
        "turned": wide.conj(),
        "none": wide[:0],
        "matrix": wide.repeat(2, 1).T,
    }
    fcg.save(tmp_path / "last", state)
    fresh = fcg.place({name: torch.zeros_like(value) for name, value in state.items()})
    assert_bitwise(fcg.state_dict(fcg.load(tmp_path / "last", fresh)), fcg.state_dict(state))
    read = safetensors.torch.load_file(tmp_path / "last")["torch.complex128"]
    assert torch.equal(read.view(torch.int64), parts.view(torch.int64))


def test_what_the_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"cannot hold bits8\[2\], as `z` is"):
        fcg.save(tmp_path / "last", {"w": torch.ones(1), "z": torch.empty(2, dtype=torch.bits8)})
    with pytest.raises(ValueError, match="a leaf is named '__metadata__'"):
        fcg.save(tmp_path / "last", {"__metadata__": torch.ones(1)})
    assert not list(tmp_path.iterdir())


def test_without_safetensors_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (fcg.save, fcg.load):
        with pytest.raises(ImportError, match=r"To fix: `pip install safetensors`"):
            call(tmp_path / "last", VALUES)


# --- pickles: what they can do, and what the docs send to `fcg.save` -----------------------------------------


def test_pickles_hold_classes_that_torch_load_refuses() -> None:
    state = fcg.TrainState.create(params={"w": torch.ones(2)}, optimizer=optim.sgd(0.1))
    for value in (state, fcg.snapshot(state)):
        for back in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
            assert type(back) is fcg.TrainState
        file = io.BytesIO()
        with pytest.warns(
            UserWarning, match=r"torch\.load refuses by default.\nTo fix: `fcg\.save\(path, state\)`"
        ):
            torch.save(value, file)
        file.seek(0)
        with pytest.raises(pickle.UnpicklingError, match="functional_cg"):
            torch.load(file)


def test_a_state_that_does_not_pickle_can_be_saved(tmp_path: Path) -> None:
    def create() -> Any:
        schedule = lambda count: 0.1 / (1 + count)  # noqa: E731
        return fcg.TrainState.create(params={"w": torch.ones(2)}, optimizer=optim.sgd(schedule))

    state = create().replace(step=5)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(state)
    fcg.save(tmp_path / "last", state)
    assert int(fcg.load(tmp_path / "last", create()).step) == 5


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o444])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path, state = tmp_path / "run", fcg.place({"w": torch.ones(2)})
    fcg.save(path, state)
    path.chmod(mode)
    link = tmp_path / "last"
    link.symlink_to(path)
    for target in (path, link):
        fcg.save(target, state.replace(w=torch.zeros(2)) if target is link else state)
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert link.is_symlink()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _second_name(path: Path) -> None:
    path.write_bytes(b"old")
    os.link(path, path.with_name("other"))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_pipe, "is no regular file, and would be replaced by one: '.*run'"),
        (_loop, "Too many levels of symbolic links: '.*run'"),
        (_second_name, "has a second name .* which would keep the old data; delete one of them: '.*run'"),
        (Path.mkdir, "Is a directory: '.*run'"),
    ],
)
def test_what_is_no_regular_file_is_not_replaced(
    tmp_path: Path, make: Callable[[Path], None], says: str
) -> None:
    path = tmp_path / "run"
    make(path)
    before = os.lstat(path)
    with pytest.raises(OSError, match=says):
        fcg.save(path, fcg.place({"w": torch.ones(2)}))
    after = os.lstat(path)
    assert (after.st_ino, after.st_mode, after.st_nlink) == (before.st_ino, before.st_mode, before.st_nlink)
    assert not list(tmp_path.glob(".*"))


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    """Nobody may ever write into it."""
    _pipe(tmp_path / "run")
    os.symlink(tmp_path / "run", tmp_path / "last")
    for name in ("run", "last"):
        with pytest.raises(OSError, match=f"fcg.load: is no regular file: '.*{name}'"):
            fcg.load(tmp_path / name, fcg.place({"w": torch.ones(2)}))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_is_named_and_its_fix_reads_it(tmp_path: Path, *, zipped: bool) -> None:
    state = fcg.place(VALUES)
    torch.save(dict(fcg.state_dict(state)), tmp_path / "t.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        ValueError, match=r"t\.pt was written by `torch\.save`.*\nTo fix: `values = torch\.load\(path\)`"
    ):
        fcg.load(tmp_path / "t.pt", state)
    fcg.load_state_dict(state, torch.load(tmp_path / "t.pt"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_the_same_values_are_the_same_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also with several entries in the metadata, which safetensors writes in an order of its own."""
    state = fcg.place({name: torch.ones(3, dtype=dtype) for name in "abc"})
    files = set()
    for number in range(20):
        fcg.save(tmp_path / f"{number}", state)
        files.add((tmp_path / f"{number}").read_bytes())
    assert len(files) == 1
    again = fcg.load(tmp_path / "0", state)
    assert torch.equal(again["b"], torch.ones(3, dtype=dtype))


def test_each_flipped_bit_of_a_file_is_found(tmp_path: Path) -> None:
    """In its header, its checksum, its names and its numbers; the values of a complex leaf have a name of their own."""
    state = {"w": torch.arange(3.0), "n": torch.tensor(5), "z": torch.tensor([1.0 + 2.0j, 0.5j])}
    path, damaged = tmp_path / "whole.safetensors", tmp_path / "damaged.safetensors"
    fcg.save(path, state)
    assert_bitwise(fcg.load(path, fcg.tree.map(torch.zeros_like, state)), state)
    content = path.read_bytes()
    for place in share(range(8 * len(content)), 7):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        damaged.write_bytes(flipped)
        kept = fcg.tree.map(torch.zeros_like, state)
        with pytest.raises(ValueError, match=r"damaged|no safetensors file") as error:
            fcg.load(damaged, kept)
        assert not isinstance(error.value, LayoutError), place
        assert not kept["w"].any()
    fcg.load(path, kept)  # the advice: another copy


def test_a_file_without_a_checksum_is_loaded(tmp_path: Path) -> None:
    """Of an earlier version, or of another library; `help(fcg.load)` says that nothing is compared."""
    state = {"w": torch.arange(3.0)}
    safetensors.torch.save_file(state, tmp_path / "old.safetensors", {"format": "pt"})
    assert_bitwise(fcg.load(tmp_path / "old.safetensors", {"w": torch.zeros(3)}), state)
    assert "has none, and what has changed in it is not noticed" in " ".join((fcg.load.__doc__ or "").split())


def test_what_a_killed_save_left_goes_and_what_another_writes_stays(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    target = tmp_path / "last.safetensors"
    left, alive = (tmp_path / f".{target.name}.{number}.tmp" for number in ("0123abcd", "89abcdef"))
    others = [tmp_path / ".other.safetensors.0123abcd.tmp", tmp_path / f".{target.name}.tmp"]
    for one in (left, alive, *others):
        one.write_bytes(b"a part")
    with open(alive, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as whoever writes it holds it
        fcg.save(target, {"w": torch.ones(2)})
        assert sorted(tmp_path.iterdir()) == sorted([target, alive, *others])
    fcg.save(target, {"w": torch.ones(2)})
    assert sorted(tmp_path.iterdir()) == sorted([target, *others])


def test_a_file_is_locked_until_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another save to the same path meanwhile does not take it for one that was left."""
    target, replace, seen = tmp_path / "last.safetensors", os.replace, []

    def save_meanwhile(source: Any, to: Any) -> None:
        if not seen:
            seen.append(source)
            fcg.save(target, {"w": torch.zeros(2)})
        replace(source, to)

    monkeypatch.setattr(os, "replace", save_meanwhile)
    fcg.save(target, {"w": torch.ones(2)})
    assert seen
    assert_bitwise(fcg.load(target, {"w": torch.zeros(2)}), {"w": torch.ones(2)})
