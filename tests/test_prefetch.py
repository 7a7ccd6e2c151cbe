"""Prefetch: order of operations, end of the loader, and the batches, on the CPU and on a GPU."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg.checkpoint.positions import decode, encode
from functional_cg.prefetch import PinnedRing, Prefetched, _batches, on_host


def total(state: Any, batch: Any) -> Any:
    new = {"sum": state["sum"] * 1.5 + batch["x"].sum()}
    return new, {"sum": new["sum"]}


def zero(device: str = "cpu") -> Any:
    return fcg.place({"sum": torch.zeros((), device=device)})


def fresh(count: int) -> Iterator[dict[str, Tensor]]:
    for i in range(count):
        yield {"x": torch.full((4,), float(i))}


class Planned(Exception):
    pass


class FakeTransfer:
    """A device on which every event is written down."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def settle(self) -> None:
        self.log.append("settle")

    def send(self, batch: Any) -> Any:
        self.log.append(f"send {batch}")
        return FakeSent(self.log, batch)

    def launched(self) -> None:
        self.log.append("launched")


class FakeSent:
    def __init__(self, log: list[str], batch: Any) -> None:
        self._log, self._batch = log, batch

    def arrive(self) -> Any:
        self._log.append(f"arrive {self._batch}")
        return self._batch


def run(source: Iterator[Any], ahead: int) -> tuple[list[Any], list[str]]:
    transfer, out = FakeTransfer(), []
    for batch in _batches(source, lambda: transfer, ahead):
        transfer.log.append(f"step {batch}")
        out.append(batch)
    return out, transfer.log


@given(count=st.integers(0, 9), ahead=st.integers(1, 4))
def test_all_batches_come_in_order_and_none_is_sent_too_early(count: int, ahead: int) -> None:
    out, log = run(iter(range(count)), ahead)
    assert out == list(range(count))
    for i in range(count):
        assert log.index(f"send {i}") < log.index(f"arrive {i}") < log.index(f"step {i}")
        sent = sum(line.startswith("send") for line in log[: log.index(f"step {i}")])
        assert sent <= i + 1 + ahead  # what is in device memory is bounded
        assert sent >= min(i + 2, count)  # and there is always one on its way while a step works
    assert log.count("launched") == count


def test_the_loader_gets_control_only_after_its_memory_was_read() -> None:
    transfer = FakeTransfer()

    def loader() -> Iterator[int]:
        for i in range(4):
            transfer.log.append(f"load {i}")
            yield i

    assert list(_batches(loader(), lambda: transfer, 1)) == [0, 1, 2, 3]
    loads = [i for i, line in enumerate(transfer.log) if line.startswith("load")]
    assert len(loads) == 4
    assert all(transfer.log[i - 1] == "settle" for i in loads)


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_a_failure_of_the_loader_comes_when_its_batch_is_due(ahead: int) -> None:
    def loader() -> Iterator[int]:
        yield from range(3)
        raise Planned("the fourth")

    batches = _batches(loader(), FakeTransfer, ahead)
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(Planned, match="the fourth") as caught:
        next(batches)
    assert any(entry.name == "loader" for entry in caught.traceback)
    assert list(batches) == []


def test_a_batch_that_cannot_be_sent_is_a_failure_too() -> None:
    class Refusing(FakeTransfer):
        def send(self, batch: Any) -> Any:
            if batch == 1:
                raise Planned("no memory")
            return super().send(batch)

    batches = _batches(iter(range(3)), Refusing, 2)
    assert next(batches) == 0
    with pytest.raises(Planned):
        next(batches)


def test_ctrl_c_in_the_loader_is_not_put_off() -> None:
    def loader() -> Iterator[int]:
        yield 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(_batches(loader(), FakeTransfer, 1))


def test_leaving_early_keeps_nothing_and_closes_the_loader() -> None:
    closed = []

    def loader() -> Iterator[dict[str, Tensor]]:
        try:
            yield from fresh(9)
        finally:
            closed.append(True)

    threads = threading.active_count()
    step, state = fcg.graph_step(total), zero()
    for batch in fcg.prefetch(loader(), step):
        state, _ = step(state, batch)
        kept = weakref.ref(batch["x"])
        break
    del batch
    gc.collect()
    assert closed == [True]
    assert kept() is None
    assert threading.active_count() == threads


def test_on_the_cpu_batches_come_as_they_are_one_at_a_time() -> None:
    loaded, step, state = [], fcg.graph_step(total), zero()

    def loader() -> Iterator[dict[str, Tensor]]:
        for batch in fresh(3):
            loaded.append(batch)
            yield batch

    for i, batch in enumerate(fcg.prefetch(loader(), step)):
        assert batch is loaded[i]
        assert len(loaded) == i + 1
        state, _ = step(state, batch)
    assert step.stats.captures == 1
    assert float(state["sum"]) == (0 * 1.5 + 4) * 1.5 + 8


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((3, fcg.graph_step(total)), {}, TypeError, "not iterable"),
        (
            ([], total),
            {},
            TypeError,
            r"expected a step, got function.*\n?.*fcg\.prefetch\(loader, train_step\)",
        ),
        (([], fcg.graph_step(total)), {"ahead": 0}, ValueError, "ahead must be a positive integer, got 0"),
        (([], fcg.graph_step(total)), {"ahead": True}, ValueError, "got True"),
    ],
)
def test_what_is_no_loader_or_no_step_is_refused_at_once(
    arguments: Any, options: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fcg.prefetch(*arguments, **options)


class Event:
    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def test_a_slot_of_the_ring_is_filled_again_only_after_its_copy() -> None:
    ring = PinnedRing(2, pin_memory=False)
    first = ring.fill([torch.ones(3), torch.zeros(2, dtype=torch.int64)])
    first.sent = event = Event()
    second = ring.fill([torch.full((3,), 2.0), torch.zeros(2, dtype=torch.int64)])
    assert (event.waits, second is first) == (0, False)
    assert first.buffers[0].tolist() == [1, 1, 1]
    again = ring.fill([torch.full((3,), 3.0), torch.ones(2, dtype=torch.int64)])
    assert (again is first, event.waits) == (True, 1)
    assert (again.buffers[0].tolist(), again.buffers[1].tolist()) == ([3, 3, 3], [1, 1])


def test_another_layout_gets_another_slot_and_strides_stay() -> None:
    ring = PinnedRing(1, pin_memory=False)
    first = ring.fill([torch.ones(3)])
    first.sent = event = Event()
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    second = ring.fill([image])
    assert (second is first, event.waits) == (False, 1)
    assert second.buffers[0].stride() == image.stride()
    assert torch.equal(second.buffers[0], image)


def test_what_is_copied_from_the_host() -> None:
    state = fcg.place({"w": torch.ones(2)})
    for leaf in (
        torch.ones(2),
        np.array(3.0),
        np.ones(3, np.float32),
        np.ones((2, 2))[:, ::-1],
        torch.ones(4)[::2],
    ):
        found = on_host(leaf)
        assert isinstance(found, Tensor)
        assert found.tolist() == leaf.tolist()
    needs_grad = torch.ones(2, requires_grad=True)
    for leaf in (
        3,
        2.5,
        True,
        "name",
        None,
        np.float32(3),
        state["w"],
        torch.ones(2).to_sparse(),
        needs_grad,
    ):
        assert on_host(leaf) is None


# -- on a GPU -----------------------------------------------------------------------------------------------------


def losses(loader: Callable[[], Any], **options: Any) -> list[float]:
    """Sums of a run, read at the end so that nothing waits on the way."""
    step, state, out = fcg.graph_step(total, lowering="aten"), zero("cuda"), []
    batches = fcg.prefetch(loader(), step, **options) if options else loader()
    for batch in batches:
        state, metrics = step(state, batch)
        out.append(metrics["sum"])
    return [float(value) for value in out]


@pytest.mark.cuda
@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("kind", ["pageable", "pinned", "numpy", "channels_last"])
def test_a_loader_that_overwrites_its_one_buffer(kind: str, ahead: int) -> None:
    """The hardest loader: it fills one buffer, again and again, as soon as it is asked for more."""

    def loader() -> Iterator[Any]:
        buffer = torch.empty(64, 8, 32, 32, pin_memory=kind == "pinned")
        if kind == "channels_last":
            buffer = buffer.to(memory_format=torch.channels_last)
        for i in range(20):
            buffer.fill_(float(i))
            yield {"x": buffer.numpy() if kind == "numpy" else buffer}

    def copies() -> Iterator[Any]:
        for i in range(20):
            yield {"x": torch.full((64, 8, 32, 32), float(i))}

    assert losses(loader, ahead=ahead) == losses(copies)


@pytest.mark.cuda
def test_batches_are_on_the_device_and_stay_what_they_are() -> None:
    step, state, kept = fcg.graph_step(total), zero("cuda"), []
    for batch in fcg.prefetch(fresh(12), step):
        state, _ = step(state, batch)
        kept.append(batch["x"])
    assert kept[0].is_cpu
    assert all(x.is_cuda for x in kept[1:])
    assert [x.tolist() for x in kept] == [[float(i)] * 4 for i in range(12)]
    assert step.stats.captures == 1


@pytest.mark.cuda
def test_dropped_batches_are_not_overwritten_under_a_step_that_still_reads_them() -> None:
    step, state = fcg.graph_step(total, lowering="aten"), zero("cuda")
    state, _ = step(state, {"x": torch.zeros(2**20)})
    batches = fcg.prefetch(({"x": torch.full((2**20,), float(i))} for i in range(8)), step, ahead=3)
    seen = []
    for batch in batches:
        torch.cuda._sleep(20_000_000)  # the host is far ahead of the device
        seen.append(batch["x"].sum())
        del batch
    assert [float(value) for value in seen] == [2.0**20 * i for i in range(8)]


@pytest.mark.cuda
def test_the_host_does_not_run_further_ahead_than_said() -> None:
    ahead, size = 2, 2**22
    step, state = fcg.graph_step(total, lowering="aten"), zero("cuda")
    state, _ = step(state, {"x": torch.zeros(size)})
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]  # with what is dropped and still in use
    torch.cuda.reset_peak_memory_stats()
    for batch in fcg.prefetch(({"x": torch.ones(size)} for _ in range(30)), step, ahead=ahead):
        torch.cuda._sleep(5_000_000)
        state, _ = step(state, batch)
    batch = None
    peak = torch.cuda.memory_stats()["active_bytes.all.peak"]
    assert peak - before <= (2 * ahead + 2) * 4 * size + 2**20


# -- the position of the loader ----------------------------------------------------------------------------------------


class Shuffled:
    """A loader that knows its position: an epoch in an order of its own, then the next one."""

    def __init__(self, length: int = 7) -> None:
        self.length, self.epoch, self.at = length, 0, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch))
        while self.at < self.length:
            self.at += 1
            yield {"x": torch.full((4,), float(order[self.at - 1]) + 10 * self.epoch)}
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return vars(self)  # what it changes later itself

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def numbers(batches: Any) -> list[float]:
    return [float(batch["x"][0]) for batch in batches]


def reading_ahead(loader: Any, ahead: int) -> Prefetched[Any]:
    return Prefetched(loader, FakeTransfer, ahead)


@given(st.integers(0, 8), st.integers(1, 4), st.integers(0, 2))
def test_the_position_is_that_of_the_last_batch_handed_over(taken: int, ahead: int, epoch: int) -> None:
    whole, first = Shuffled(), Shuffled()
    for _ in range(epoch):
        assert numbers(whole) == numbers(reading_ahead(first, ahead))
    batches = reading_ahead(first, ahead)
    before = [batch for _, batch in zip(range(taken), batches, strict=False)]
    again = Shuffled()
    resumed = reading_ahead(again, ahead)
    next(resumed)  # what was read before does not matter
    resumed.load_state_dict(batches.state_dict())
    expected = numbers(whole)
    assert numbers(before) + numbers(resumed) == expected
    assert numbers(reading_ahead(again, ahead)) == numbers(whole), "the next epoch"
    assert resumed.state_dict()["epoch"] == epoch + 1


def test_the_position_after_close_is_that_of_the_last_batch() -> None:
    batches = reading_ahead(Shuffled(), 3)
    next(batches)
    batches.close()
    assert numbers(batches) == []
    assert batches.state_dict()["at"] == 1


def test_a_loader_without_a_position_is_refused() -> None:
    batches = fcg.prefetch([1, 2], fcg.graph_step(total))
    for ask in (batches.state_dict, lambda: batches.load_state_dict({})):
        with pytest.raises(TypeError, match=r"list has no `(load_)?state_dict`(.|\n)*StatefulDataLoader"):
            ask()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_goes_on_in_mid_epoch(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return stateful.StatefulDataLoader(
            [{"x": torch.full((4,), float(i))} for i in range(9)],
            batch_size=None,
            shuffle=True,
            generator=torch.Generator().manual_seed(3),
            num_workers=workers,
        )

    expected = numbers(loader())
    batches = reading_ahead(loader(), 2)
    before = [next(batches) for _ in range(4)]
    resumed = reading_ahead(loader(), 2)
    resumed.load_state_dict(decode(encode(batches.state_dict())))
    assert numbers(before) + numbers(resumed) == expected
    assert sorted(expected) == list(range(9))
    assert sorted(numbers(reading_ahead(loader(), 2))) == list(range(9))
