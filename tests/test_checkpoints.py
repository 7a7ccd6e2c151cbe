"""A folder of checkpoints: complete or not there, from a copy, the last ones kept; on one process."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg.checkpoint import disk, series
from functional_cg.checkpoint.positions import decode, encode
from tests.shares import THOROUGH, share
from tests.stress import mutations
from tests.test_prefetch import Shuffled

DTYPES = (
    torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn,
)  # fmt: skip


EXAMPLES = 100 if THOROUGH else 10  # of damaged folders


def a_state(seed: int = 0) -> Any:
    """Leaves of all dtypes, of no dimension, with no elements, channels_last; one longer than a block."""
    generator = torch.Generator().manual_seed(seed)
    leaves: dict[str, Any] = {
        str(dtype): torch.randn(3, 5, generator=generator).mul(9).to(dtype) for dtype in DTYPES
    }
    image = torch.randn(2, 3, 4, 5, generator=generator).contiguous(memory_format=torch.channels_last)
    large = torch.randn(disk.BLOCK // 4 + 7, generator=generator)
    return fcg.place(leaves | {"step": seed, "none": torch.zeros(0, 3), "image": image, "large": large})


def assert_same(state: Any, expected: dict[str, Tensor]) -> None:
    found = fcg.state_dict(state)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert (found[name].shape, found[name].dtype) == (leaf.shape, leaf.dtype)
        assert found[name].flatten().view(torch.uint8).equal(leaf.flatten().view(torch.uint8)), name


def advance(state: Any, x: Tensor) -> Any:
    return {"w": state["w"] * 1.25 + x, "step": state["step"] + 1}, {}


def fresh() -> Any:
    return fcg.place({"w": torch.zeros(3), "step": 0})


def listed(folder: Path) -> list[str]:
    """What is in a folder, but for the lock."""
    return sorted(set(os.listdir(folder)) - {".writer"})


def test_what_was_saved_is_loaded_bit_by_bit(tmp_path: Path) -> None:
    state = a_state(3)
    expected = fcg.state_dict(state)
    with fcg.checkpoints(tmp_path / "run") as saved:
        assert (saved.steps(), saved.latest()) == ([], None)
        saved.save(state, wait=True)
        assert (saved.steps(), saved.latest()) == ([3], 3)
        assert_same(saved.load(a_state(4)), expected)
    assert_same(fcg.load(tmp_path / "run", a_state(5)), expected)
    assert_same(fcg.load(tmp_path / "run" / "000001-step-3", a_state(5)), expected)
    tree = fcg.checkpoints(tmp_path / "run").load(fcg.snapshot(a_state(6)))
    assert_same(tree, expected)
    assert tree["image"].is_contiguous(memory_format=torch.channels_last)


def test_a_folder_becomes_one_file_and_back(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    params = dict(module.named_parameters())
    adamw = fcg.optim.adamw(0.1, weight_decay=0.0)
    state = fcg.TrainState.create(params=params, optimizer=adamw, key=fcg.random.key(0))
    expected = fcg.state_dict(state)
    fcg.checkpoints(tmp_path / "run").save(state, wait=True)
    other = fcg.TrainState.create(
        params={n: p * 0 for n, p in params.items()}, optimizer=adamw, key=fcg.random.key(1)
    )
    other = fcg.load(tmp_path / "run", other)
    fcg.save(tmp_path / "one.safetensors", other)
    assert_same(fcg.load(tmp_path / "one.safetensors", fcg.fork(other)), expected)


def test_a_copy_is_saved_and_the_state_may_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes is held until the state has been donated ten times."""
    go, opened = threading.Event(), disk.BlockWriter.__init__

    def held(self: Any, path: Path) -> None:
        assert go.wait(30)
        opened(self, path)

    monkeypatch.setattr(disk.BlockWriter, "__init__", held)
    step, state = fcg.graph_step(advance), fresh()
    with fcg.checkpoints(tmp_path) as saved:
        state, _ = step(state, torch.ones(3))
        expected = fcg.state_dict(state)
        saved.save(state)
        for i in range(10):
            state, _ = step(state, torch.full((3,), float(i)))
        assert saved.steps() == []
        go.set()
        saved.wait()
        assert saved.steps() == [1]
        assert_same(saved.load(state), expected)


def test_the_last_ones_stay_and_what_a_killed_run_left_goes(tmp_path: Path) -> None:
    left = tmp_path / ".0123456789abcdef.tmp"
    left.mkdir()
    (left / "rank-00000.bin").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("of the user")
    step, state = fcg.graph_step(advance), fresh()
    with fcg.checkpoints(tmp_path, keep=2) as saved:
        for _ in range(4):
            state, _ = step(state, torch.ones(3))
            saved.save(state)
        saved.wait()
        assert saved.steps() == [3, 4]
        assert listed(tmp_path) == ["000003-step-3", "000004-step-4", "notes.txt"]
        # From an earlier step on: what is written last is the latest, and it stays.
        state = saved.load(state, step=3)
        saved.save(state.replace(w=torch.zeros(3)), wait=True)
        assert (saved.steps(), saved.latest()) == ([4, 3], 3)
        assert saved.load(fresh())["w"].tolist() == [0, 0, 0]
        assert repr(saved) == f"checkpoints({str(tmp_path)!r}, keep=2), steps [4, 3]"
    assert len(fcg.checkpoints(tmp_path, keep=None).steps()) == 2


@pytest.mark.parametrize("keep", [None, 1, 2, 4, 5, 6, 9])
def test_as_many_stay_as_asked(tmp_path: Path, keep: int | None) -> None:
    with fcg.checkpoints(tmp_path, keep=keep) as saved:
        for number in range(5):
            saved.save({"w": torch.ones(1)}, step=number)
            saved.wait()
            assert saved.steps() == list(range(number + 1))[-(keep or 5) :]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda saved: fcg.checkpoints(3), TypeError, "expected a path, got int"),
        (
            lambda saved: fcg.checkpoints("x", keep=0),
            ValueError,
            "keep must be a positive integer or None, got 0",
        ),
        (
            lambda saved: saved.save({"w": torch.ones(1)}),
            ValueError,
            r"no leaf `step`(.|\n)*`save\(state, step=n\)`",
        ),
        (
            lambda saved: saved.save({"step": torch.ones(1)}),
            ValueError,
            r"a leaf `step` of torch.float32 \[1\]",
        ),
        (lambda saved: saved.save(fresh(), step=-1), ValueError, "step must be a number from 0 on, got -1"),
        (
            lambda saved: saved.save(fresh(), loader=[]),
            TypeError,
            "list has no `state_dict`(.|\n)*StatefulDataLoader",
        ),
        (
            lambda saved: saved.load(fresh()),
            FileNotFoundError,
            "no complete checkpoint is in the folder: '.*run'",
        ),
        (lambda saved: saved.load(fresh(), step=3), FileNotFoundError, "no complete checkpoint of step 3"),
    ],
)
def test_wrong_calls_are_refused(tmp_path: Path, call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(fcg.checkpoints(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    saved = fcg.checkpoints(tmp_path)
    saved.save({"w": torch.ones(2), "b": torch.ones(1)}, step=1, wait=True)
    state = fcg.place({"w": torch.zeros(3), "c": torch.zeros(1)})
    text = r"values in .*000001-step-1 do not fit `state`, which is unchanged(.|\n)*w  expected f32\[3\]   got f32\[2\]"
    with pytest.raises(fcg.LayoutError, match=text):
        saved.load(state)
    assert state["w"].tolist() == [0, 0, 0]


def test_it_is_refused_in_a_step_and_for_a_donated_state(tmp_path: Path) -> None:
    saved = fcg.checkpoints(tmp_path)

    def saving(state: Any, x: Tensor) -> Any:
        saved.save(state)
        return advance(state, x)

    with pytest.raises(fcg.CaptureError, match="`save` was called in a step"):
        fcg.graph_step(saving)(fresh(), torch.ones(3))
    old = fresh()
    old.replace(step=4)
    with pytest.raises(fcg.DonatedStateError):
        saved.save(old)
    assert saved.steps() == []


@pytest.mark.parametrize("method", ["__init__", "close"])
def test_who_saves_in_the_folder_of_another_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The second takes what the first is writing for the remains of a killed run: before its file, or behind it."""
    go, reached, original = threading.Event(), threading.Event(), getattr(disk.BlockWriter, method)

    def held(self: Any, *args: Any, **options: Any) -> None:
        if not reached.is_set():
            reached.set()
            assert go.wait(30)
        original(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(disk.BlockWriter, method, held)
        first, second = fcg.checkpoints(tmp_path), fcg.checkpoints(tmp_path)
        first.save(fresh())
        assert reached.wait(30)
        second.save(fresh(), step=3, wait=True)
        go.set()
        with pytest.raises(OSError, match="someone else saves there, too, and has removed it"):
            first.wait()
    assert second.steps() == [3]
    other = fcg.checkpoints(tmp_path / "of its own")  # as the message says
    other.save(fresh(), step=4)
    second.save(fresh(), step=5)
    other.close()
    second.close()
    assert (other.steps(), second.steps()) == ([4], [3, 5])


SAVER = """
import os, sys, time, torch, functional_cg as fcg
saved = fcg.checkpoints(sys.argv[1])
saved.save({"w": torch.ones(3)}, step=1, wait=True)
if not os.fork():
    time.sleep(60)
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.readline()
saved.close()
print("closed", flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no such locks")
@pytest.mark.parametrize("end", share(["killed", "closed"], 2))
def test_a_second_process_is_refused_while_the_first_one_lives(tmp_path: Path, end: str) -> None:
    """It may read; and it may save once the first one has closed, or died, even if a child of that lives on."""
    command = [sys.executable, "-c", SAVER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdin is not None
        number = int(first.stdout.readline())
        second, state = fcg.checkpoints(tmp_path), {"w": torch.zeros(3)}
        second.save(state, step=2)
        with pytest.raises(fcg.BusyError, match=rf"another process saves in(.|\n)*process {number} on"):
            second.wait()
        with pytest.raises(fcg.BusyError, match="To fix: a folder for each run"):
            second.save(state, step=2, wait=True)
        other = fcg.checkpoints(tmp_path / "of its own")  # as the message says
        other.save(state, step=2, wait=True)
        assert (second.steps(), other.steps()) == ([1], [2])
        assert torch.equal(second.load(state)["w"], torch.ones(3))
        if end == "killed":
            first.kill()
            first.wait()
        else:
            first.stdin.write("\n")
            first.stdin.flush()
            assert first.stdout.readline() == "closed\n"
        second.save(state, step=2, wait=True)
        assert second.steps() == [1, 2]
        first.kill()


def test_a_failure_shows_at_the_next_call_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, data: Tensor) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    state = fresh()
    saved = fcg.checkpoints(tmp_path)
    saved.save(state, wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(disk.BlockWriter, "write", full)
        saved.save(state.replace(step=5))
        with pytest.raises(OSError, match="No space left"):
            saved.wait()
    assert (saved.steps(), listed(tmp_path)) == ([0], ["000001-step-0"])
    saved.save({"w": torch.ones(3), "step": 6})
    saved.close()
    assert saved.steps() == [0, 6]

    def interrupted() -> None:
        with saved:
            saved.save({"w": torch.ones(3), "step": 7})
            raise KeyError("mine")

    monkeypatch.setattr(disk.BlockWriter, "write", full)
    with pytest.raises(KeyError, match="mine") as caught:
        interrupted()
    assert "the last checkpoint was not written: [Errno 28] No space left" in caught.value.__notes__[0]


def test_a_forked_process_is_refused(tmp_path: Path) -> None:
    saved = fcg.checkpoints(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            saved.wait()
        except fcg.BusyError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# -- positions of loaders ----------------------------------------------------------------------------------------------


def trained(folder: Path, stop: int) -> tuple[Any, list[float]]:
    """Three epochs, resumed in mid-epoch if there is a checkpoint; killed, in effect, after some steps."""
    step, state, loader = fcg.graph_step(advance), fresh(), Shuffled(5)
    saved, losses = fcg.checkpoints(folder), []
    if saved.steps():
        state = saved.load(state, loader=loader)
    while loader.epoch < 3:
        batches = (
            fcg.prefetch(({"x": x} for x in ()), step) if loader.epoch == 3 else fcg.prefetch(loader, step)
        )
        for batch in batches:
            state, _ = step(state, batch["x"][:3])
            losses.append(float(state["w"].sum()))
            saved.save(state, loader=batches, wait=True)
            if int(state["step"]) == stop:
                return state, losses
    return state, losses


def test_a_run_goes_on_in_mid_epoch(tmp_path: Path) -> None:
    whole, losses = trained(tmp_path / "whole", 99)
    assert len(losses) == 15
    for stop in (2, 5):
        folder = tmp_path / str(stop)
        _, before = trained(folder, stop)
        state, after = trained(folder, 99)
        assert before + after == losses
        assert_same(state, fcg.state_dict(whole))


def test_positions_are_plain_data() -> None:
    class Odd:
        pass

    generator = torch.Generator().manual_seed(1)
    position = {
        "a": [1, 2.5, None, True, "text", float("inf")], 3: (b"bytes", {4, 5}), None: {"": []},
        "generator": generator.get_state(), "numpy": np.random.RandomState(0).get_state(), "number": np.int64(7),
        "none": torch.zeros(0, 2), "flags": torch.tensor([True, False]),
    }  # fmt: skip
    found = decode(encode(position))
    assert found.keys() == position.keys()
    assert found["a"] == position["a"]
    assert found[3] == position[3]
    assert found[None] == {"": []}
    assert found["generator"].equal(generator.get_state())
    assert found["numpy"][1].tolist() == position["numpy"][1].tolist()
    assert found["numpy"][2:] == position["numpy"][2:]
    assert (found["number"], type(found["number"])) == (7, np.int64)
    assert (found["none"].shape, found["flags"].tolist()) == ((0, 2), [True, False])
    with pytest.raises(TypeError, match=r"`state_dict\(\)\['a'\]\[1\]` of the loader is of type Odd"):
        encode({"a": [1, Odd()]})
    for text in (b"", b"{", b'{"a": 1}', b'{"tensor": ["torch.float32", [3], ""]}', b"[" * 100_000):
        with pytest.raises(ValueError, match="no position of a loader"):
            decode(text)


def test_a_checkpoint_without_a_position_says_so(tmp_path: Path) -> None:
    saved = fcg.checkpoints(tmp_path)
    saved.save(fresh(), wait=True)
    state, loader = fresh(), Shuffled()
    with pytest.raises(
        ValueError, match=r"holds no position of a loader(.|\n)*`save\(state, loader=loader\)`"
    ):
        saved.load(state, loader=loader)
    assert saved.load(state)["step"].item() == 0


# -- damage, and kill -9 -----------------------------------------------------------------------------------------------


def test_damaged_and_malicious_folders() -> None:
    counts = mutations.run(EXAMPLES, ranks=1, derandomize=True)
    assert sum(counts.values()) == EXAMPLES
    assert counts["loaded"] < EXAMPLES


def test_each_byte_is_checked(tmp_path: Path) -> None:
    fcg.checkpoints(tmp_path / "run").save(fresh(), wait=True)
    for path in sorted((tmp_path / "run" / "000001-step-0").iterdir()):
        content = path.read_bytes()
        for place in range(0, len(content), max(len(content) // 10, 1)):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(
                ValueError, match=rf"{path.name} (is|has|contradicts)|values in .* do not fit"
            ):
                fcg.load(tmp_path / "run", fresh())
        path.write_bytes(content)
    assert fcg.load(tmp_path / "run", fresh())["step"].item() == 0


def test_the_oracle_sees_a_torn_checkpoint(tmp_path: Path) -> None:
    """A marker that counts before all files are there would be found."""
    fcg.checkpoints(tmp_path / "run").save(fresh(), wait=True)
    shutil.copytree(tmp_path / "run" / "000001-step-0", tmp_path / "run" / "000002-step-1")
    (tmp_path / "run" / "000002-step-1" / "rank-00000.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"rank-00000\.bin"):
        fcg.checkpoints(tmp_path / "run").load(fresh())
    (tmp_path / "run" / "000002-step-1" / "index.json").unlink()
    assert fcg.checkpoints(tmp_path / "run").latest() == 0


def of_one_number(number: int, size: int = 50_000) -> dict[str, Any]:
    return {"w": torch.full((size,), float(number)), "v": torch.full((size,), float(number))}


def test_threads_that_save_at_one_time_save_whole_checkpoints(tmp_path: Path) -> None:
    """Each is of one state, as many as were saved; a copy in host memory is not overwritten while it is written."""
    interval = sys.getswitchinterval()
    with fcg.checkpoints(tmp_path, keep=None) as saved:
        sys.setswitchinterval(1e-6)  # or one thread may save all before another has its turn
        try:
            with ThreadPoolExecutor(4) as threads:
                numbers = [base + call for call in range(10) for base in (1000, 2000, 3000, 4000)]
                list(threads.map(lambda number: saved.save(of_one_number(number), step=number), numbers))
        finally:
            sys.setswitchinterval(interval)
        saved.wait()
        assert sorted(saved.steps()) == sorted(numbers)
        for number in numbers:
            found = saved.load(of_one_number(0), step=number)
            assert {value for leaf in found.values() for value in leaf.unique().tolist()} == {number}


def test_a_save_in_the_middle_of_a_save_leaves_both_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a signal handler; the failure of either is raised."""
    with fcg.checkpoints(tmp_path, keep=None) as saved:
        taken = series.Stage.take

        def interrupted(stage: Any, names: Any, leaves: Any) -> Any:
            copy = taken(stage, names, leaves)
            monkeypatch.undo()
            saved.save(of_one_number(2), step=2)
            return copy

        saved.save(of_one_number(0), step=0)
        monkeypatch.setattr(series.Stage, "take", interrupted)
        saved.save(of_one_number(1), step=1)
        saved.wait()
        assert sorted(saved.steps()) == [0, 1, 2]
        for number in range(3):
            assert (saved.load(of_one_number(9), step=number)["v"] == number).all()
