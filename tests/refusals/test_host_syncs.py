"""Every way to ask for a tensor's value on the host is refused, with a fix of its own; the fix is accepted."""

import contextlib
import copy
import logging
import math
import operator
import pickle

import numpy
import pytest
import torch

import functional_cg as fcg
from functional_cg import CaptureError, HostSyncError, ImplicitRandomnessError
from tests.refusals.judge import Spelling, accepted, assert_refused, assert_spelling, metric

# -- numbers and text -------------------------------------------------------------------------------------------


def item(s, b):
    return s["w"] * b["s"].item()


def tolist(s, b):
    return b["x"].tolist()[0][0]


def to_float(s, b):
    return s["w"] * float(b["s"])


def to_int(s, b):
    return s["w"] * int(b["i"])


def to_complex(s, b):
    return complex(b["s"]).real


def index_protocol(s, b):
    return s["w"] * operator.index(b["i"])


def numpy_method(s, b):
    return b["x"].numpy().sum()


def numpy_function(s, b):
    return numpy.sqrt(b["x"])


def numpy_array(s, b):
    return numpy.asarray(b["x"]).sum()


def cpu(s, b):
    return b["x"].cpu().sum()


def square_root(s, b):
    return math.sqrt(b["s"]) * s["w"]


def exponential(s, b):
    return math.exp(-b["s"]) * s["w"]


def is_nan(s, b):
    return math.isnan(b["s"])


def f_string(s, b):
    return f"loss {b['s']}"


def f_string_with_format(s, b):
    return f"loss {b['s']:.3f}"


def percent(s, b):
    return "loss %.3f" % b["s"]  # noqa: UP031


def format_method(s, b):
    return "loss {:.3f}".format(b["s"])


def to_str(s, b):
    return str(b["s"])


def printed(s, b):
    print(b["s"])  # noqa: T201
    return b["s"]


def printed_with_a_label(s, b):
    print("loss", 3, b["s"])  # noqa: T201
    return b["s"]


def pickled(s, b):
    return len(pickle.dumps(b["x"]))


def shallow_copy(s, b):
    return copy.copy(b["x"]) * 1


def address(s, b):
    return b["x"].data_ptr() % 2


def literal_of_tensors(s, b):
    return torch.tensor([b["s"], 1.0])


NUMBERS = [
    Spelling(item, "use `b['s']` itself", lambda s, b: s["w"] * b["s"]),
    Spelling(tolist, "stay with torch ops on `b['x']`", lambda s, b: b["x"][0, 0]),
    Spelling(to_float, "use `b['s']` itself", lambda s, b: s["w"] * b["s"]),
    Spelling(to_int, "use `b['i']` itself", lambda s, b: s["w"] * b["i"]),
    Spelling(to_complex, "use `b['s']` itself", lambda s, b: b["s"]),
    Spelling(index_protocol, "return the value in `metrics`", lambda s, b: s["w"] * b["i"]),
    Spelling(numpy_method, "stay with torch ops on `b['x']`", lambda s, b: b["x"].sum()),
    Spelling(numpy_function, "write `torch.sqrt(b['x'])`"),
    Spelling(numpy_array, "use the tensor `b['x']` itself", lambda s, b: b["x"].sum()),
    Spelling(cpu, "leave `b['x']` on its device", lambda s, b: b["x"].sum()),
    Spelling(square_root, "write `torch.sqrt(b['s'])`", lambda s, b: torch.sqrt(b["s"]) * s["w"]),
    Spelling(exponential, "write `torch.exp(-b['s'])`", lambda s, b: torch.exp(-b["s"]) * s["w"]),
    Spelling(is_nan, "write `torch.isnan(b['s'])`", lambda s, b: torch.isnan(b["s"])),
    Spelling(f_string, "`fcg.debug_print('{}', b['s'])` prints at each call"),
    Spelling(f_string_with_format, "`fcg.debug_print('{}', b['s'])` prints at each call"),
    Spelling(percent, "`fcg.debug_print('{}', b['s'])` prints at each call"),
    Spelling(format_method, "`fcg.debug_print('{}', b['s'])` prints at each call"),
    Spelling(to_str, "`fcg.debug_print('{}', b['s'])` prints at each call"),
    Spelling(printed, "`step.eager(...)` runs once with real numbers", lambda s, b: b["s"]),
    Spelling(printed_with_a_label, "`fcg.debug_print('{}', b['s'])` prints", lambda s, b: b["s"]),
    Spelling(pickled, "to save it, return it in `metrics`"),
    Spelling(shallow_copy, "`b['x'].clone()` copies it", lambda s, b: b["x"].clone() * 1),
    Spelling(address, "leave addresses to kernels"),
    Spelling(
        literal_of_tensors,
        "write `torch.stack([b['s'], torch.tensor(1.0)])`",
        lambda s, b: torch.stack([b["s"], torch.tensor(1.0)]),
    ),
]


# -- decisions --------------------------------------------------------------------------------------------------


def if_statement(s, b):
    y = s["w"]
    if b["s"] > 0:
        y = y * 2
    return y


def if_else(s, b):
    if b["s"] > 3:
        y = s["w"]
    else:
        y = -s["w"]
    return y


def if_else_of_trees(s, b):
    if b["s"] > 3:
        new = fcg.tree.map(torch.neg, s)
    else:
        new = s
    return new["w"]


def ternary_of_calls(s, b):
    new = fcg.tree.map(torch.neg, s) if b["s"] > 0 else s
    return new["w"]


def while_loop(s, b):
    y = b["s"]
    while y < 10:
        y = y * 2
    return y


def ternary(s, b):
    return s["w"] if b["s"] > 0 else -s["w"]


def assertion(s, b):
    assert b["s"] > 0
    return b["s"]


def to_bool(s, b):
    return bool(b["s"] > 1)


def conjunction(s, b):
    return b["s"] > 0 and b["s"] < 3


def negation(s, b):
    return not b["s"]


def chain(s, b):
    return 0 < b["s"] < 3


def membership(s, b):
    return b["s"] in [1.0, 2.0]


def contains(s, b):
    return 2.0 in b["x"]


def any_of(s, b):
    return any(b["m"])


def all_of(s, b):
    return all(b["m"])


def maximum(s, b):
    return max(b["s"], 3.0)


def maximum_of_some(s, b):
    return max(*b["x"][0])


def minimum_with_some(s, b):
    return min(b["s"], *b["x"][0])


def minimum(s, b):
    return min(b["x"][0, 0], b["x"][0, 1])


def ordered(s, b):
    return torch.stack(sorted(b["x"][0]))


def loop_over_range(s, b):
    y = s["w"]
    for _ in range(b["i"]):
        y = y + 1
    return y


def equal(s, b):
    return torch.equal(b["x"], b["x"])


def all_close(s, b):
    return torch.allclose(b["x"], b["x"])


def is_nonzero(s, b):
    return b["s"].is_nonzero()


def dropped_mask(s, b):
    mask = b["x"] > 4
    if not mask.any():
        mask = None
    return b["x"] if mask is None else b["x"].masked_fill(mask, 0)


def parts_by_sizes(s, b):
    sizes = (b["x"] > 2).sum(0)
    return torch.cat([part * i for i, part in enumerate(b["x"].view(-1).split(sizes.tolist()))])


def nonzero_of_a_mask(s, b):
    x = b["x"].view(-1)
    return x[(x > 2).nonzero()].sum()


def least_squares(s, b):
    x = b["x"].double()
    return torch.linalg.lstsq(x, x).solution


DECISIONS = [
    Spelling(
        dropped_mask,
        "leave out the `if`: what follows then runs at each call",
        lambda s, b: b["x"].masked_fill(b["x"] > 4, 0),
    ),
    Spelling(parts_by_sizes, "for parts of such sizes, compute each on all rows and mask"),
    Spelling(
        nonzero_of_a_mask,
        "`torch.where((x > 2), values, 0)`",
        lambda s, b: torch.where(b["x"] > 2, b["x"], 0).sum(),
    ),
    Spelling(
        least_squares,
        "write `torch.linalg.pinv(x) @ x`",
        lambda s, b: torch.linalg.pinv(b["x"].double()) @ b["x"].double(),
    ),
    Spelling(
        if_statement,
        "`y = torch.where(b['s'] > 0, y * 2, y)`",
        lambda s, b: torch.where(b["s"] > 0, s["w"] * 2, s["w"]),
    ),
    Spelling(
        if_else,
        "`y = torch.where(b['s'] > 3, s['w'], -s['w'])`",
        lambda s, b: torch.where(b["s"] > 3, s["w"], -s["w"]),
    ),
    Spelling(
        if_else_of_trees,
        "`new = fcg.cond(b['s'] > 3, lambda: fcg.tree.map(torch.neg, s), lambda: s)`",
        lambda s, b: fcg.cond(b["s"] > 3, lambda: fcg.tree.map(torch.neg, s), lambda: s)["w"],
    ),
    Spelling(
        ternary_of_calls,
        "`fcg.cond(b['s'] > 0, lambda: fcg.tree.map(torch.neg, s), lambda: s)`",
        lambda s, b: fcg.cond(b["s"] > 0, lambda: fcg.tree.map(torch.neg, s), lambda: s)["w"],
    ),
    Spelling(
        while_loop, "loop a fixed number of times and mask the update, `x = torch.where(y < 10, new_x, x)`"
    ),
    Spelling(
        ternary,
        "`torch.where(b['s'] > 0, s['w'], -s['w'])`",
        lambda s, b: torch.where(b["s"] > 0, s["w"], -s["w"]),
    ),
    Spelling(assertion, "return `b['s'] > 0` in `metrics` and assert outside", lambda s, b: b["s"]),
    Spelling(to_bool, "keep `(b['s'] > 1)` a tensor", lambda s, b: b["s"] > 1),
    Spelling(
        conjunction,
        "write `torch.logical_and(b['s'] > 0, b['s'] < 3)`",
        lambda s, b: torch.logical_and(b["s"] > 0, b["s"] < 3),
    ),
    Spelling(negation, "write `torch.logical_not(b['s'])`", lambda s, b: torch.logical_not(b["s"])),
    Spelling(
        chain,
        "write `torch.logical_and(0 < b['s'], b['s'] < 3)`",
        lambda s, b: torch.logical_and(0 < b["s"], b["s"] < 3),
    ),
    Spelling(
        membership,
        "write `torch.logical_or(b['s'] == 1.0, b['s'] == 2.0)`",
        lambda s, b: torch.logical_or(b["s"] == 1.0, b["s"] == 2.0),
    ),
    Spelling(contains, "write `(b['x'] == 2.0).any()`", lambda s, b: (b["x"] == 2.0).any()),
    Spelling(any_of, "write `torch.stack(list(b['m'])).any()`", lambda s, b: torch.stack(list(b["m"])).any()),
    Spelling(all_of, "write `torch.stack(list(b['m'])).all()`", lambda s, b: torch.stack(list(b["m"])).all()),
    Spelling(maximum, "write `torch.clamp(b['s'], min=3.0)`", lambda s, b: torch.clamp(b["s"], min=3.0)),
    Spelling(
        maximum_of_some,
        "write `torch.stack([*b['x'][0]]).amax(0)`",
        lambda s, b: torch.stack([*b["x"][0]]).amax(0),
    ),
    Spelling(
        minimum_with_some,
        "write `torch.stack([b['s'], *b['x'][0]]).amin(0)`",
        lambda s, b: torch.stack([b["s"], *b["x"][0]]).amin(0),
    ),
    Spelling(
        minimum,
        "write `torch.minimum(b['x'][0, 0], b['x'][0, 1])`",
        lambda s, b: torch.minimum(b["x"][0, 0], b["x"][0, 1]),
    ),
    Spelling(ordered, "write `torch.sort(b['x'][0]).values`", lambda s, b: torch.sort(b["x"][0]).values),
    Spelling(loop_over_range, "loop a fixed number of times and mask, `torch.where(i < b['i'], new, old)`"),
    Spelling(equal, "`(b['x'] == b['x']).all()`", lambda s, b: (b["x"] == b["x"]).all()),
    Spelling(
        all_close, "`torch.isclose(b['x'], b['x']).all()`", lambda s, b: torch.isclose(b["x"], b["x"]).all()
    ),
    Spelling(is_nonzero, "`b['s'] != 0` stays a tensor", lambda s, b: b["s"] != 0),
]


@pytest.mark.parametrize("spelling", [*NUMBERS, *DECISIONS], ids=str)
def test_spelling_is_refused_and_its_fix_accepted(spelling):
    assert_spelling(spelling)


def test_sync_in_a_loss_and_in_a_backward():
    def loss(w):
        return w.sum() * (2.0 if w.sum() > 0 else 1.0)

    class Guarded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * float(grad.sum())

    for function, where in ((loss, loss), (lambda w: Guarded.apply(w).sum(), Guarded.backward)):

        def step(s, b, function=function):
            return s, fcg.grad(function)(s["w"])

        assert_refused(step, HostSyncError, "asks for the value of a tensor on the host", where=where)


def test_sync_on_a_state_leaf():
    def leaf(s, b):
        return s["w"] * s["n"].item()

    assert_refused(metric(leaf), HostSyncError, "asks for the value", where=leaf)


def caught_number(s, b):
    try:
        return s["w"] * b["s"].item()
    except Exception:
        return s["w"]


def caught_decision(s, b):
    with contextlib.suppress(RuntimeError):
        if b["s"] > 0:
            return s["w"] + 1
    return s["w"]


def caught_draw(s, b):
    try:
        return torch.rand(3)
    except fcg.FunctionalCGError:
        return s["w"]


def caught_array(s, b):
    try:
        return s["w"] * float(b["s"].numpy())
    except Exception:
        return s["w"]


def caught_by_the_logger(s, b):
    logging.getLogger("a user's").warning("%s", b["s"])
    return s["w"]


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (caught_number, HostSyncError),
        (caught_decision, HostSyncError),
        (caught_draw, ImplicitRandomnessError),
        (caught_array, HostSyncError),
        (caught_by_the_logger, HostSyncError),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_a_refusal_that_the_function_catches_is_raised_all_the_same(function, error, monkeypatch):
    """It would go on with another value than an eager run has."""
    monkeypatch.setattr(logging, "raiseExceptions", False)
    assert_refused(metric(function), error, "asks for the value|draws random numbers|To fix", where=function)


def conditional(s, b):
    return torch.cond(b["s"] > 0, lambda x: x + 1, lambda x: x - 1, (s["w"],))


def test_operators_that_take_functions():
    match = r"calls an operator that takes functions, such as `torch.cond`(.|\n)*To fix: use `fcg.cond`"
    assert_refused(metric(conditional), CaptureError, match, where=conditional)

    def advised(s, b):
        return fcg.cond(b["s"] > 0, lambda x: x + 1, lambda x: x - 1, s["w"])

    accepted(metric(advised))


def test_what_a_newcomer_writes_gets_a_fix_of_its_own():
    @fcg.graph_step
    def branch(state, x):
        if x > 0:
            state = state.replace(params={"w": state.params["w"] * 2})
        return state, {}

    @fcg.graph_step
    def backward(state, x):
        (state.params["w"].sum() * x).backward()
        return state, {}

    @fcg.graph_step
    def assigned(state, x):
        state.key = x
        return state, {}

    state = fcg.TrainState.create(params={"w": torch.ones(2)}, optimizer=fcg.optim.sgd(0.1))
    select = r"`state = fcg.tree.map\(lambda new, old: torch.where\(x > 0, new, old\), state.replace\(.*\), state\)`"
    for step, error, fix in (
        (branch, HostSyncError, select),
        (backward, CaptureError, r"in place of `backward\(\)`, `loss, grads = fcg.value_and_grad"),
        (
            assigned,
            CaptureError,
            r"test_host_syncs.py:\d+: cannot assign(.|\n)*`state = state.replace\(...\)`",
        ),
    ):
        with pytest.raises(error, match=fix):
            step(state, 1.0)


# -- flags of Python --------------------------------------------------------------------------------------------


def test_a_flag_of_python_is_a_static_argument():
    def step(s, b, training):
        if training:
            s = {**s, "w": s["w"] + 1}
        return s, {}

    state = fcg.place({"w": torch.zeros(2)})
    with pytest.raises(
        HostSyncError, match=r"To fix: if `training` is a Python .*`static_argnames=\(\"training\",\)`; else "
    ):
        fcg.graph_step(step)(state, {}, True)
    static = fcg.graph_step(step, static_argnames=("training",))
    for flag in (True, False, True):
        state, _ = static(state, {}, flag)
    assert state["w"].tolist() == [2.0, 2.0]
