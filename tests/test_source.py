"""Locating the user's frame, and the expression that asks for a tensor's value."""

import linecache
import math
import os
import re
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import einops
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from functional_cg.messages.source import (
    Location,
    is_user_file,
    locate,
    raised_in,
    sync_spelling,
    user_frame,
)
from tests.forked import Program


class Sync(Exception):
    """Carries the answer out of the dispatch mode."""


class RefuseSyncs(TorchDispatchMode):
    """Asks for the spelling at the first op that reads a value, as the inspection of a trace does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_value = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        indices = args[1] if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_) else ()
        by_mask = any(index is not None and index.dtype is torch.bool for index in indices)
        integer_index = func.overloadpacket is torch.ops.aten.index and not by_mask
        if by_mask or (by_value and not integer_index) or func.overloadpacket is torch.ops.aten.equal:
            frame = user_frame(sys._getframe(1))  # the mode itself is in the user's file here
            assert frame is not None
            raise Sync(*sync_spelling(frame))
        return func(*args, **(kwargs or {}))


def spelling(function: Callable[..., Any], *args: Any) -> tuple[str, str]:
    """What `sync_spelling` says of the line in `function` that reads a value."""
    with FakeTensorMode(allow_non_fake_inputs=True), RefuseSyncs():
        try:
            function(*args)
        except Sync as error:
            return error.args
        except Exception as error:  # torch itself refuses: .numpy() of a fake tensor
            return sync_spelling(raised_in(error)[-1].tb_frame)
    raise AssertionError(f"{function.__name__} reads no value")


@dataclass(frozen=True)
class Batch:
    """Tensors that a step might touch, under the names that the fixes must use."""

    x: torch.Tensor = field(default_factory=lambda: torch.tensor([3.0, -1.0, 2.0, 5.0]))
    table: torch.Tensor = field(default_factory=lambda: torch.arange(12.0).reshape(4, 3))
    i: torch.Tensor = field(default_factory=lambda: torch.tensor(2))
    loss: torch.Tensor = field(default_factory=lambda: torch.tensor(1.5))
    mask: torch.Tensor = field(default_factory=lambda: torch.tensor([True, False, True, False]))


# -- one function per spelling -------------------------------------------------------------------------------


def item(x, loss):
    return loss.item()


def tolist(x, loss):
    return x.tolist()


def to_numpy(x, loss):
    return x.numpy()


def as_float(x, loss):
    return float(loss)


def as_int(x, loss):
    return int(loss + 1)


def as_bool(x, loss):
    return bool(loss > 0)


def if_assigns(x, loss):
    if loss > 0:
        x = x * 2
    return x


def if_else(x, loss):
    if loss > 0:
        y = x + 1
    else:
        y = x - 1
    return y


def if_returns(x, loss):
    if loss > 0:
        return x
    return -x


def if_elif(x, loss):
    if x is None:
        return x
    elif loss.isnan():
        return -x
    return x


def if_not(x, loss):
    if not loss > 0:
        x = -x
    return x


def if_and(x, loss):
    if loss > 0 and loss < 3:
        return x
    return -x


def if_call(x, loss):
    if (x > 0).any():
        return x
    return -x


def while_loop(x, loss):
    while loss > 0:
        loss = loss - 1
    return loss


def ternary(x, loss):
    return x if loss > 0 else -x


def assertion(x, loss):
    assert loss < 100, "diverged"
    return x


def comprehension(x, loss):
    return [row for row in (loss, -loss) if row > 0]


def boolean_or(x, loss):
    y = loss > 0 or loss < -1
    return y


def boolean_not(x, loss):
    y = not loss
    return y


def chained(x, loss):
    y = 0 < loss < 1
    return y


def f_string(x, loss):
    return f"loss {loss:.3f}"


def f_string_of_item(x, loss):
    return f"loss {loss.item():.3f}"


def f_string_of_two(x, loss):
    return f"step {len(x)}: {loss:.1f}"


def percent(x, loss):
    return "loss %.3f" % loss  # noqa: UP031


def percent_of_one_in_a_tuple(x, loss):
    return "loss %.3f" % (loss,)  # noqa: UP031


def str_format(x, loss):
    return "loss {:.3f}".format(loss)  # noqa: UP032


def format_builtin(x, loss):
    return format(loss, ".3f")


def range_of(x, loss):
    for _ in range(loss.long()):
        x = x + 1
    return x


def max_of_two(x, loss):
    return max(loss, x[0])


def min_with_number(x, loss):
    return min(loss, 1.0)


def max_of_list(x, loss):
    return max([loss, -loss])


def max_of_tensor(x, loss):
    return max(x)


def sort(x, loss):
    return sorted(x)


def any_of(x, loss):
    return any(x > 0)


def math_function(x, loss):
    return math.sqrt(loss)


def math_only(x, loss):
    return math.fabs(loss)


def nonzero(x, loss):
    return x.nonzero()


def where_one_arm(x, loss):
    return torch.where(x > 0)


def unique(x, loss):
    return torch.unique(x)


def masked_select(x, loss):
    return torch.masked_select(x, x > 0)


def masked_select_method(x, loss):
    return x.masked_select(x > 0)


def repeat_interleave(x, loss):
    return torch.repeat_interleave(x, x.long())


def equal(x, loss):
    return torch.equal(x, -x)


def allclose(x, loss):
    return torch.allclose(x, loss)


def tensor_of_list(x, loss):
    return torch.tensor([loss, 1.0])


def zeros(x, loss):
    return torch.zeros(loss.long())


def unknown_call(x, loss):
    return torch.nn.functional.leaky_relu(x, loss)


def contained(x, loss):
    return loss in x


def contained_in_list(x, loss):
    return loss in [1.0, 2.0]


SPELLINGS = [
    (item, "`loss.item()`", "use `loss` itself"),
    (tolist, "`x.tolist()`", "torch ops on `x`"),
    (to_numpy, "`x.numpy()`", "torch ops on `x`"),
    (as_float, "`float(loss)`", "use `loss` itself"),
    (as_int, "`int(loss + 1)`", "use `(loss + 1)` itself"),
    (as_bool, "`bool(loss > 0)`", "`torch.where((loss > 0), a, b)`"),
    (if_assigns, "`if loss > 0:`", "`x = torch.where(loss > 0, x * 2, x)`"),
    (if_else, "`if loss > 0:`", "`y = torch.where(loss > 0, x + 1, x - 1)`"),
    (if_returns, "`if loss > 0:`", "`torch.where(loss > 0, a, b)`"),
    (if_elif, "`if loss.isnan():`", "`torch.where(loss.isnan(), a, b)`"),
    (if_not, "`if not loss > 0:`", "`x = torch.where(torch.logical_not(loss > 0), -x, x)`"),
    (if_and, "`if loss > 0 and loss < 3:`", "`torch.where(torch.logical_and(loss > 0, loss < 3), a, b)`"),
    (if_call, "`if (x > 0).any():`", "`torch.where((x > 0).any(), a, b)`"),
    (while_loop, "`while loss > 0:`", "a fixed number of times"),
    (ternary, "`x if loss > 0 else -x`", "`torch.where(loss > 0, x, -x)`"),
    (assertion, "`assert loss < 100`", "return `loss < 100` in `metrics`"),
    (comprehension, "`... if row > 0` in a comprehension", "`torch.where(row > 0, x, 0)`"),
    (boolean_or, "`loss > 0 or loss < -1`", "`torch.logical_or(loss > 0, loss < -1)`"),
    (boolean_not, "`not loss`", "`torch.logical_not(loss)`"),
    (chained, "`0 < loss < 1`", "`torch.logical_and(0 < loss, loss < 1)`"),
    (f_string, "`f'loss {loss:.3f}'`", "`fcg.debug_print('{}', loss)` prints at each call"),
    (f_string_of_item, "`loss.item()`", "use `loss` itself"),
    (f_string_of_two, "`f'step {len(x)}: {loss:.1f}'`", "`fcg.debug_print('{}', loss)` prints"),
    (percent, "`'loss %.3f' % loss`", "`fcg.debug_print('{}', loss)` prints"),
    (percent_of_one_in_a_tuple, "`'loss %.3f' % (loss,)`", "`fcg.debug_print('{}', loss)` prints"),
    (str_format, "`'loss {:.3f}'.format(loss)`", "`fcg.debug_print('{}', loss)` prints"),
    (format_builtin, "`format(loss, '.3f')`", "`fcg.debug_print('{}', loss)` prints"),
    (range_of, "`range(loss.long())`", "`torch.where(i < loss.long(), new, old)`"),
    (max_of_two, "`max(loss, x[0])`", "`torch.maximum(loss, x[0])`"),
    (min_with_number, "`min(loss, 1.0)`", "`torch.clamp(loss, max=1.0)`"),
    (max_of_list, "`max([loss, -loss])`", "`torch.stack(list([loss, -loss])).amax(0)`"),
    (max_of_tensor, "`max(x)`", "`x.amax()`"),
    (sort, "`sorted(x)`", "`torch.sort(x).values`"),
    (any_of, "`any(x > 0)`", "`torch.stack(list((x > 0))).any()`"),
    (math_function, "`math.sqrt(loss)`", "`torch.sqrt(loss)`"),
    (math_only, "`math.fabs(loss)`", "use the torch op for `math.fabs`"),
    (nonzero, "`x.nonzero()`", "`torch.where(x != 0, values, 0)`"),
    (where_one_arm, "`torch.where(x > 0)`", "`torch.where((x > 0), values, 0)`"),
    (unique, "`torch.unique(x)`", "`s = torch.sort(x).values"),
    (masked_select, "`torch.masked_select(x, x > 0)`", "`torch.where((x > 0), x, 0)`"),
    (masked_select_method, "`x.masked_select(x > 0)`", "`torch.where((x > 0), x, 0)`"),
    (repeat_interleave, "`torch.repeat_interleave(x, x.long())`", "(x, x.long(), output_size=n)`"),
    (equal, "`torch.equal(x, -x)`", "`(x == (-x)).all()`"),
    (allclose, "`torch.allclose(x, loss)`", "`torch.isclose(x, loss).all()`"),
    (tensor_of_list, "`torch.tensor([loss, 1.0])`", "`torch.stack([loss, torch.tensor(1.0)])`"),
    (zeros, "`torch.zeros(loss.long())`", "from `.shape` or a static argument"),
    (unknown_call, "`torch.nn.functional.leaky_relu(x, loss)`", "`torch.where(cond, a, b)`"),
    (contained, "`loss in x`", "`(x == loss).any()`"),
    (contained_in_list, "`loss in [1.0, 2.0]`", "`torch.logical_or(loss == 1.0, loss == 2.0)`"),
]


@pytest.mark.parametrize(
    ("function", "what", "fix"), SPELLINGS, ids=lambda value: getattr(value, "__name__", "")
)
def test_each_spelling_has_its_own_fix(function, what, fix):
    batch = Batch()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, loss = mode.from_tensor(batch.x), mode.from_tensor(batch.loss)
    said, advised = spelling(function, x, loss)
    assert said == what
    assert fix in advised


# -- subscripts: the fix is run, and gives what the subscript gave ---------------------------------------------


def read_layer(b):
    layers, i = list(b.table.unbind()), b.i
    return layers[i]


def read_window(b):
    x, i = b.x, b.i
    return x[i : i + 2]


def read_columns(b):
    table, i = b.table, b.i - 1
    return table[:, i : i + 2]


def write_window(b):
    x, i = b.x, b.i
    x[i : i + 2] = x[:2]
    return x


def write_masked(b):
    x, mask = b.x, b.mask
    x[mask] = 0.0
    return x


def add_masked(b):
    x = b.x
    x[x > 0] += 1
    return x


def mean_masked(b):
    x = b.x
    return x[x > 0].mean()


def sum_masked(b):
    x, mask = b.x, b.mask
    return x[~mask].sum()


SUBSCRIPTS = [
    (read_layer, "`layers[i]`", "torch.stack(layers)[i]"),
    (read_window, "`x[i:i + 2]`", "x.index_select(0, torch.arange(2, device=x.device) + i)"),
    (read_columns, "`table[:, i:i + 2]`", "table.index_select(1, torch.arange(2, device=table.device) + i)"),
    (write_window, "`x[i:i + 2]`", "x = x.index_copy(0, torch.arange(2, device=x.device) + i, x[:2])"),
    (write_masked, "`x[mask]`", "x = torch.where(mask, 0.0, x)"),
    (add_masked, "`x[x > 0]`", "x = torch.where(x > 0, x + 1, x)"),
    (mean_masked, "`x[x > 0]`", "torch.where(x > 0, x, 0).sum() / (x > 0).sum()"),
    (sum_masked, "`x[~mask]`", "torch.where(~mask, x, 0)"),
]


@pytest.mark.parametrize(
    ("function", "what", "code"), SUBSCRIPTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_fix_of_a_subscript_computes_what_the_subscript_did(function, what, code):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        real = Batch()
        fake = Batch(**{name: mode.from_tensor(value) for name, value in vars(real).items()})
    said, advised = spelling(function, fake)
    assert said == what
    assert f"`{code}`" in advised

    names = {**vars(Batch()), "b": Batch(), "torch": torch, "layers": list(Batch().table.unbind())}
    names["i"] = names["i"] - 1 if function is read_columns else names["i"]
    target, _, expression = code.rpartition(" = ")
    fixed = eval(expression, names)
    assert not target or target.isidentifier()
    torch.testing.assert_close(fixed.sum() if function is sum_masked else fixed, function(Batch()))


def test_fix_of_a_ternary_and_of_an_if_compute_what_they_did():
    for function in (if_assigns, if_else, ternary):
        with FakeTensorMode() as mode:
            x, loss = mode.from_tensor(Batch().x), mode.from_tensor(Batch().loss)
        _, advised = spelling(function, x, loss)
        code = re.search("`(.*?)`", advised)[1].rpartition(" = ")[2]
        expected = function(Batch().x, Batch().loss)
        assert torch.equal(eval(code, {"torch": torch, **vars(Batch())}), expected)


# -- without source ------------------------------------------------------------------------------------------


def test_without_source_the_answer_is_general():
    names: dict[str, Any] = {}
    exec(compile("def step(x):\n    return float(x)\n", "<stdin>", "exec"), names)
    with FakeTensorMode() as mode:
        what, fix = spelling(names["step"], mode.from_tensor(torch.ones(())))
    assert what == "a tensor's value"
    assert fix.startswith("`torch.where(cond, a, b)`")


def test_source_of_a_notebook_cell_is_found():
    text, name, names = "def step(x):\n    return float(x * 2)\n", "<ipython-input-7>", {}
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), names)
    with FakeTensorMode() as mode:
        assert spelling(names["step"], mode.from_tensor(torch.ones(())))[0] == "`float(x * 2)`"


def test_source_that_changed_since_import_gives_a_general_answer():
    text, name, names = "def step(x):\n    return float(x * 2)\n", "<edited>", {}
    linecache.cache[name] = (9, None, ["def (\n", ")]\n"], name)
    exec(compile(text, name, "exec"), names)
    with FakeTensorMode() as mode:
        assert spelling(names["step"], mode.from_tensor(torch.ones(())))[0] == "a tensor's value"


def test_spelling_of_a_frame_that_moved_on_is_found_by_its_instruction():
    try:
        as_float(None, "no number")
    except ValueError as error:
        traceback = error.__traceback__.tb_next
        what, _ = sync_spelling(traceback.tb_frame, traceback.tb_lasti)
    assert what == "`float(loss)`"


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8))
def test_columns_are_counted_in_bytes(text):
    # Positions in bytecode count UTF-8 bytes: a string before the call must not shift it.
    name, names = "<unicode>", {"text": text}
    line = f"def step(x): return ({text!r}, float(x * 2))\n"
    linecache.cache[name] = (len(line), None, [line], name)
    exec(compile(line, name, "exec"), names)
    with FakeTensorMode() as mode:
        assert spelling(names["step"], mode.from_tensor(torch.ones(())))[0] == "`float(x * 2)`"


# -- frames ----------------------------------------------------------------------------------------------------


def test_user_frame_skips_torch_and_einops():
    seen = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(user_frame(sys._getframe(1)).f_code.co_name)
            return func(*args, **(kwargs or {}))

    def step(x):
        return torch.nn.functional.gelu(einops.rearrange(x, "a b -> (b a)"))

    x = torch.ones(2, 3)
    with Note():
        step(x)
    assert set(seen) == {"step"}
    assert user_frame().f_code.co_name == "test_user_frame_skips_torch_and_einops"


def test_innermost_user_frame_below_library_frames():
    found = {}
    torch.utils._pytree.tree_map(lambda _: found.update(frame=user_frame()), [1])
    assert found["frame"].f_code.co_name == "<lambda>"
    # From the library's own frame outwards, the test function is the innermost.
    torch.utils._pytree.tree_map(lambda _: found.update(frame=user_frame(sys._getframe(1))), [1])
    assert found["frame"].f_code.co_name == "test_innermost_user_frame_below_library_frames"


def test_a_location_agrees_with_user_frame():
    frame = user_frame()
    first, second = locate(), locate()
    assert (first.filename, first.function) == (__file__, frame.f_code.co_name)
    assert first == Location(__file__, second.line, frame.f_code.co_name)
    assert str(first) == f"test_source.py:{first.line}"
    assert locate(frame).line == sys._getframe().f_lineno


@pytest.mark.parametrize(
    ("filename", "user"),
    [
        (torch.nn.functional.__file__, False),
        (einops.__file__, False),
        (os.__file__, False),
        (sys.modules["functional_cg"].__file__, False),
        (
            os.path.join(os.path.dirname(sys.modules["functional_cg"].__file__), "examples", "main.py"),
            True,
        ),
        (
            os.path.join(os.path.dirname(sys.modules["functional_cg"].__file__), "testing", "laws.py"),
            True,
        ),
        (os.path.join(os.path.dirname(os.__file__), "site-packages", "mine", "model.py"), True),
        (os.path.join(sysconfig.get_paths()["purelib"], "mine", "model.py"), True),
        ("<frozen importlib._bootstrap>", False),
        ("<eval_with_key>.3", False),
        ("<stdin>", True),
        ("train.py", True),
        (__file__, True),
    ],
)
def test_whose_file(filename, user):
    assert is_user_file(filename) is user


def test_no_user_frame_is_none():
    assert user_frame(None) is not None
    code = (
        "from functional_cg.messages.source import *; import sys; "
        "print(locate(), user_frame().f_code.co_filename)"
    )
    with Program("-c", code) as done:
        assert done.end(60.0) == 0, done.err
        assert done.out.split() == ["<string>:1", "<string>"]


def test_the_innermost_entry_of_a_traceback_is_the_users():
    def fails():
        torch.ones(2) @ torch.ones(3)

    with pytest.raises(RuntimeError, match="size") as caught:
        fails()
    assert raised_in(caught.value)[-1].tb_frame.f_code.co_name == "fails"
    assert raised_in(ValueError()) == []


def test_a_line_in_a_notebook_names_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiler:
        def format_code_name(self, name: str) -> tuple[str, str] | None:
            return ("Cell", "In[3]") if name == "/tmp/ipykernel_1/5.py" else None

    shell = SimpleNamespace(compile=Compiler())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert str(Location("/tmp/ipykernel_1/5.py", 2, "f")) == "In[3]:2"
    assert str(Location("/home/train.py", 2, "f")) == "train.py:2"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert str(Location("/tmp/ipykernel_1/5.py", 2, "f")) == "5.py:2"
