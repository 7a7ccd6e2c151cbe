"""Side effects, exceptions and interrupts during a trace, which must leave everything outside it unchanged."""

import functools
import gc
import importlib
import io
import pdb
import sys
import warnings
import weakref

import pytest
import torch

import functional_cg as fcg
from functional_cg import CaptureError, SideEffectError
from tests.out_of_sight import OutOfSight
from tests.refusals.judge import (
    a_batch,
    a_state,
    accepted,
    assert_line_of,
    assert_refused,
    assert_still_good,
)

# -- tensors that outlive the trace -----------------------------------------------------------------------------


def keep_in_a_list():
    kept = []

    def step(s, b):
        kept.append(s["w"] * 2)
        return s, {}

    return step


def keep_in_an_attribute():
    module = torch.nn.Module()

    def step(s, b):
        module.activation = b["x"].sum()
        return s, {}

    return step


def keep_in_a_cache():
    @functools.lru_cache
    def table(box):
        return torch.zeros(3) + box.value

    class Box:
        def __init__(self, value):
            self.value = value

    def step(s, b):
        return s, table(Box(s["w"]))

    return step


def keep_in_a_cell():
    best = None

    def step(s, b):
        nonlocal best
        best = s["w"].max()
        return s, {"best": best}

    return step


def keep_in_a_global():
    def step(s, b):
        global KEPT
        KEPT = s["w"].max()
        return s, {}

    return step


def keep_in_a_default():
    def step(s, b, *, seen={}):  # noqa: B006
        seen["x"] = b["x"] + 1
        return s, {}

    return step


def keep_a_graph():
    losses = []

    def step(s, b):
        def loss(w):
            losses.append((w**2).sum())
            return losses[-1]

        return s, fcg.grad(loss)(s["w"])

    return step


def keep_in_a_cycle():
    class Box:
        pass

    boxes = []

    def step(s, b):
        box = Box()
        box.self, box.value = box, s["w"] * 2
        boxes.append(weakref.proxy(box))
        globals()["KEPT"] = box
        return s, {}

    return step


KEPT = None


@pytest.mark.parametrize(
    "make",
    [
        keep_in_a_list,
        keep_in_an_attribute,
        keep_in_a_cache,
        keep_in_a_cell,
        keep_in_a_global,
        keep_in_a_default,
        keep_a_graph,
        keep_in_a_cycle,
    ],
)
def test_tensor_that_is_kept(make):
    match = (
        r"keeps (a tensor|\d tensors) of the step beyond its end(.|\n)*f32\[.*\]@cpu, made at test_.*py:\d+"
    )
    assert_refused(make(), SideEffectError, match, where=make)
    globals()["KEPT"] = None


def test_argument_that_is_kept():
    kept = []

    def step(s, b):
        kept.append(b["x"])
        return s, {}

    assert_refused(step, SideEffectError, r"f32\[4,3\]@cpu, made at entry")


def test_garbage_in_cycles_is_not_kept():
    class Box:
        pass

    def step(s, b):
        box = Box()
        box.self, box.value = box, s["w"] * 2
        return s, box.value + 1

    gc.disable()
    try:
        accepted(step)
    finally:
        gc.enable()


# -- values of the host that the step changes -------------------------------------------------------------------


def test_value_that_is_changed():
    """Spellings of it are in `tests/host/test_moving.py`."""

    class Meter:
        count = 0

    meter = Meter()

    def step(s, b):
        meter.count += 1
        return s, {}

    match = r"changes a value of the host while it runs(.|\n)*meter\.count  before 1   after 2"
    assert_refused(step, SideEffectError, match)


def test_counting_in_the_state_is_accepted():
    def counted(s, b):
        n = s["n"] + 1
        return {**s, "n": n}, {"calls": n}

    assert accepted(counted)["calls"] == 2


def test_mode_that_is_changed():
    def step(s, b):
        torch.set_default_dtype(torch.float64)
        return s, {}

    state = a_state()
    try:
        with pytest.raises(
            SideEffectError, match=r"torch.get_default_dtype\(\)  before torch.float32   after torch.float64"
        ):
            fcg.graph_step(step)(state, a_batch())
    finally:
        torch.set_default_dtype(torch.float32)
    assert_still_good(state, fcg.snapshot(a_state()), 0)


# -- exceptions -------------------------------------------------------------------------------------------------


class Custom(Exception):
    """An exception of the user's own."""

    def __init__(self, first, second):
        super().__init__(first, second)


def raise_key_error(s, b):
    return s, b["missing"]


def raise_custom(s, b):
    raise Custom(1, 2)


def raise_assertion(s, b):
    assert b["x"].shape[0] == 5, "five rows"
    return s, {}


def raise_in_a_helper(s, b):
    return s, helper(s["w"])


def helper(w):
    raise ValueError("bad width\nof two lines")


def raise_stop_iteration(s, b):
    return s, next(iter(()))


@pytest.mark.parametrize(
    ("function", "where", "kind", "text"),
    [
        (raise_key_error, raise_key_error, KeyError, ": 'missing'"),
        (raise_custom, raise_custom, Custom, r": \(1, 2\)"),
        (raise_assertion, raise_assertion, AssertionError, ": five rows"),
        (raise_in_a_helper, helper, ValueError, ": bad width"),
        (raise_stop_iteration, raise_stop_iteration, StopIteration, ""),
    ],
)
def test_exception_of_the_user(function, where, kind, text):
    assert_refused(function, CaptureError, rf"raised {kind.__name__}, at .*py:\d+{text}\n", where=where)
    with pytest.raises(CaptureError, match="nothing was launched and the state is unchanged") as caught:
        fcg.graph_step(function)(a_state(), a_batch())
    assert type(caught.value.__cause__) is kind


def test_exception_of_torch():
    def step(s, b):
        return s, b["x"] @ b["x"]

    state = a_state()
    with pytest.raises(CaptureError, match="raised RuntimeError, at ") as caught:
        fcg.graph_step(step)(state, a_batch())
    assert_line_of(step, str(caught.value))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert_still_good(state, fcg.snapshot(a_state()), 0)


def test_list_of_numbers_in_place_of_a_tensor():
    def step(s, b):
        return s, {"out": b["x"] @ s["w"]}

    rows, state = [[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]], a_state()
    with pytest.raises(CaptureError, match=r"`b\['x'\]` is a list.*: pass `torch.tensor\(b\['x'\]\)`"):
        fcg.graph_step(step)(state, {"x": rows})
    _, metrics = fcg.graph_step(step)(state, {"x": torch.tensor(rows)})
    assert metrics["out"].tolist() == [8.0, 1.0]


def test_call_that_does_not_fit_the_signature():
    step = fcg.graph_step(lambda s, b: (s, {}))
    for args in ((a_state(),), (a_state(), 1, 2)):
        with pytest.raises(CaptureError, match="raised TypeError") as caught:
            step(*args)
        assert isinstance(caught.value.__cause__, TypeError)
    assert step(a_state(), 1)[0].generation == 1


def test_advice_for_an_exception_works():
    """``.eager`` runs on real values, where the exception is the user's own."""
    step, state = fcg.graph_step(raise_key_error), a_state()
    with pytest.raises(KeyError, match="missing"):
        step.eager(state, a_batch())
    assert_still_good(state, fcg.snapshot(a_state()), 0)


@pytest.mark.parametrize(
    ("commands", "kind"),
    [("", CaptureError), ("continue\n" * 2, SideEffectError), ("next\ncontinue\n" * 2, SideEffectError)],
)
def test_debugger_is_sent_to_the_eager_run(commands, kind, capsys):
    """Whether its user quits, goes on or steps through: what a debugger sees are tensors without values."""
    seen = io.StringIO()

    def debugged(s, b):
        pdb.Pdb(stdin=io.StringIO(commands), stdout=seen, readrc=False, nosigint=True).set_trace()
        return s, {"out": b["x"].sum()}

    state, tracer = a_state(), sys.gettrace()
    try:
        with pytest.raises(kind, match=r"`debugged.eager\(...\)`.*FCG_DISABLE_CAPTURE=1"):
            fcg.graph_step(debugged)(state, a_batch())
    finally:
        sys.settrace(tracer)
    commands = "p b['x'].sum()\ncontinue\n"
    fcg.graph_step(debugged).eager(state, a_batch())
    assert "tensor(66.)" in seen.getvalue()


def test_same_step_works_once_its_function_does():
    rows = {"n": 5}

    def step(s, b):
        assert b["x"].shape[0] == rows["n"], "rows"
        return s, {"sum": b["x"].sum()}

    step = fcg.graph_step(step)
    state = a_state()
    with pytest.raises(CaptureError, match="rows"):
        step(state, a_batch())
    rows["n"] = 4
    state, metrics = step(state, a_batch())
    assert metrics["sum"] == 66.0
    assert (step.stats.traces, step.stats.captures) == (1, 1)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("run", [1, 2])
def test_interrupt_in_a_trace(interrupt, run):
    """In the first run of the function or in the second: it propagates as it is, and nothing is lost."""
    runs = OutOfSight(0)

    def step(s, b):
        with torch.enable_grad():
            w = s["w"].detach().requires_grad_()
            loss = (w * 2).sum()
            runs.write(runs.read() + 1)
            if runs.read() == run:
                raise interrupt
            (grad,) = torch.autograd.grad(loss, w)
        return {**s, "w": s["w"] - grad}, {"loss": loss.detach()}

    step, state = fcg.graph_step(step), a_state()
    generator = torch.get_rng_state()
    with pytest.raises(interrupt):
        step(state, a_batch())
    assert torch.equal(generator, torch.get_rng_state())
    assert torch.is_grad_enabled()
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert state.generation == 0
    state, metrics = step(state.latest(), a_batch())  # the same step goes on
    assert metrics["loss"] == 6.0
    assert state["w"].tolist() == [-2.0, -1.0, 0.0]


# -- the world around a trace -----------------------------------------------------------------------------------


def world():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "default dtype": torch.get_default_dtype(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "garbage collection": gc.isenabled(),
        "generator": torch.get_rng_state().tolist(),
        "warnings": list(warnings.filters),
    }


def leaves_modes_on(s, b):
    torch.set_grad_enabled(True)
    torch.set_autocast_cache_enabled(True)
    return s, {}


def fails_under_autocast(s, b):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        raise ValueError


@pytest.mark.parametrize("ambient", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "function", [lambda s, b: (s, {}), raise_custom, leaves_modes_on, fails_under_autocast, keep_in_a_list()]
)
@pytest.mark.parametrize("way", ["__call__", "eager", "lower"])
def test_world_is_left_alone(function, ambient, way):
    importlib.import_module(
        "sympy"
    )  # torch's first trace does so, and sympy has a filter for its own warnings
    step = fcg.graph_step(function)
    with ambient():
        before = world()
        try:
            getattr(step, way)(a_state(), a_batch())
        except (fcg.FunctionalCGError, Custom, ValueError):
            assert function is not leaves_modes_on
        assert world() == before


def test_collectives_without_a_mesh_are_refused() -> None:
    """Nothing sees to it that the other ranks take part: gloo aborts the process where shapes differ."""
    ops = torch.ops._c10d_functional

    @fcg.graph_step
    def step(state, x):
        return {"w": state["w"] + ops.wait_tensor(ops.all_reduce(x, "sum", "0"))}, {}

    with pytest.raises(CaptureError, match=r"its state is on no mesh(.|\n)*fcg\.sharding\.mean\(value\)"):
        step(fcg.place({"w": torch.zeros(2)}), torch.ones(2))
