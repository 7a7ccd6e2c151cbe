"""What tells whether a tensor is still what it was: each change is noticed, and nothing else counts as one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg.errors import LayoutError
from functional_cg.tensors import fingerprint
from functional_cg.tensors.fingerprint import as_now

BASE = torch.arange(32, dtype=torch.float32)


def a_table() -> Tensor:
    return BASE.clone()[:16].view(4, 4)


def _data(other: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    def act(table: Tensor) -> None:
        table.data = other(table.data)

    return act


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "written": lambda t: t.add_(0),
    "written through a view": lambda t: t[0].zero_(),
    "written by index": lambda t: t.__setitem__(0, 1.0),
    "written through detach": lambda t: t.detach().zero_(),
    "written by a foreach": lambda t: torch._foreach_add_([t], 1),
    "out=": lambda t: torch.add(t, 1, out=t),
    "set_": lambda t: t.set_(a_table()),
    "resized": lambda t: t.resize_(2, 2),
    "transposed in place": lambda t: t.t_(),
    "other memory": _data(torch.clone),
    "a later part": _data(lambda t: t.as_strided((4, 4), (4, 1), 16)),
    "an earlier shape": _data(lambda t: t[:2]),
    "another shape": _data(lambda t: t.view(2, 8)),
    "other strides": _data(torch.t),
    "an expanded row": _data(lambda t: t[:1].expand(4, 4)),
    "other bits": _data(lambda t: t.view(torch.int32)),
    "swapped": lambda t: torch.utils.swap_tensors(t, a_table()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("others", [0, 2])
def test_each_change_is_noticed(change: str, others: int) -> None:
    table = a_table()
    unchanged = as_now([*(a_table() for _ in range(others)), table])
    assert unchanged()
    CHANGES[change](table)
    assert not unchanged()


def test_a_conjugate_of_the_same_memory_is_noticed() -> None:
    for table in (torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.complex64).conj()):
        unchanged = as_now([table])
        table.data = table.data.conj()
        assert not unchanged()


def test_a_tensor_of_inference_counts_no_writes_and_is_watched_otherwise() -> None:
    with torch.inference_mode():
        table = a_table()
        unchanged = as_now([table, a_table()])
        assert unchanged()
        table.data = table.t()
        assert not unchanged()


def test_what_is_no_change_of_a_value() -> None:
    table, empty = a_table(), torch.zeros(0, 3)
    unchanged = as_now([table, empty])
    found = []
    with torch.no_grad():
        found.append(unchanged())
    with torch.inference_mode():
        found.append(unchanged())
    thread = threading.Thread(target=lambda: found.append(unchanged()))
    thread.start()
    thread.join()
    table.requires_grad_()
    (table * 2).sum().backward()
    assert found == [True, True, True]
    assert unchanged()
    assert as_now([])()


def test_an_answer_takes_no_comparison_in_python_per_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """It notices a torch whose guards of tensors answer otherwise: then each answer would be a slow one."""
    tables = [a_table(), torch.ones(2, dtype=torch.complex64).conj(), torch.zeros(())]
    unchanged = as_now(tables)
    monkeypatch.setattr(fingerprint, "seen", pytest.fail)
    assert unchanged()


def test_a_step_that_shares_the_traces_of_another_watches_its_constants_too() -> None:
    table = a_table()
    step = fcg.graph_fn(lambda x: x * table, constants=(table,))
    again = step.anew()
    for one in (step, again):
        one(torch.ones(4))
    table.add_(1)
    for one in (step, again):
        with pytest.raises(fcg.BakedValueError):
            one(torch.ones(4))


def test_a_constant_of_a_subclass_is_refused_and_the_advice_works() -> None:
    class Marked(Tensor):
        pass

    table = torch.arange(3.0).as_subclass(Marked)
    with pytest.raises(
        LayoutError, match=r"got the subclass Marked(.|\n)*`constants\[0\]\.as_subclass\(torch.Tensor\)`"
    ):
        fcg.graph_fn(lambda x: x + table, constants=(table,))(torch.ones(3))
    plain = table.as_subclass(Tensor)
    step = fcg.graph_fn(lambda x: x + plain, constants=(plain,))
    assert step(torch.ones(3)).tolist() == [1.0, 2.0, 3.0]
