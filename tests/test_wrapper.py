"""What a compiled function launches, recorded on fake tensors: each kind of statement, and any order of lanes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.select_algorithm import extern_kernels
from torch.utils._python_dispatch import _disable_current_modes

from functional_cg.stages.branches.launches import Launches, UnknownLaunch
from functional_cg.stages.branches.races import refuse_races
from functional_cg.stages.branches.source import Code, on_lanes, rehearsed
from functional_cg.stages.branches.units import GENERATOR, LINK, Unit
from functional_cg.stages.plan import Buffers
from functional_cg.testing.recorded import Address
from functional_cg.testing.simulator import _Recorder
from tests.branched import in_any_order
from tests.shares import THOROUGH

HEAD = """
two = async_compile.cpp_pybinding(['const float*', 'float*'], r'')
"""


def triton(run: Any, *names: str, mutated: Sequence[str] = (), kind: Any = HeuristicType.POINTWISE) -> Any:
    """What the compiler's module holds for a kernel in Triton."""
    return SimpleNamespace(
        run=run, fn=SimpleNamespace(arg_names=names), mutated_arg_names=mutated, heuristic_type=kind
    )


NAMES: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten, "c0": torch.ones(2, 2)}
NAMES |= dict.fromkeys(
    ("two", "reinterpret_tensor", "get_raw_stream", "assert_size_stride", "unheard_of"), print
)
NAMES |= {"empty_strided_cuda": None, "extern_kernels": extern_kernels, "copy_if_misaligned": lambda one: one}
NAMES["half"] = triton(
    None,
    "in_out_ptr0",
    "in_ptr0",
    "in_ptr1",
    "out_ptr0",
    "xnumel",
    "XBLOCK",
    mutated=["in_ptr1", "in_out_ptr0"],
)
NAMES["theirs"] = triton(None, "in_ptr0", "in_ptr1", kind=HeuristicType.USER_AUTOTUNE)
NAMES |= {"multi_kernel_0": print, "mkldnn": torch.ops.mkldnn}
SLOT, INPUT, CONSTANT = 0, 1, 2


def recorded(source: str, names: dict[str, Any], body: Sequence[str], values: Sequence[Tensor]) -> Launches:
    """The launches of a function with these lines."""
    scope = dict(names)
    exec("\n".join(["def call(args):", *(f"    {line}" for line in body)]), scope)
    return Launches("any", source, {**names, "call": scope["call"]}, values, 9)


def read(*lines: str) -> tuple[Code, list[Unit]]:
    body = ["arg0_1, arg1_1 = args", "args.clear()", *lines]
    launches = recorded(HEAD, NAMES, body, [torch.ones(2, 2), torch.ones(2, 2)])
    return launches.code, launches.units


def touched(unit: Unit) -> tuple[set[Any], set[Any], set[Any]]:
    return {*unit.reads}, {*unit.writes}, {*unit.made}


def called(unit: Unit) -> list[str]:
    return [str(instr.op) for instr in unit.calls]


@pytest.mark.parametrize(
    ("line", "reads", "writes"),
    [
        ("two(arg1_1, arg0_1)", {SLOT, INPUT}, {SLOT}),
        ("two(arg0_1, arg0_1)", {SLOT}, {SLOT}),
        ("two(c0, arg0_1)", {SLOT, CONSTANT}, {SLOT}),
        ("half.run(arg0_1, arg1_1, c0, c0, 8, stream=stream0)", {SLOT, INPUT, CONSTANT}, {SLOT, CONSTANT}),
        ("half.run(c0, arg0_1, arg1_1, c0, 8, stream=stream0)", {SLOT, INPUT, CONSTANT}, {INPUT, CONSTANT}),
        ("theirs.run(arg0_1, arg1_1, stream=stream0)", {SLOT, INPUT}, {SLOT, INPUT}),
        ("extern_kernels.mm(arg1_1, reinterpret_tensor(arg1_1, (2, 2), (1, 2)), out=arg0_1)", {SLOT, INPUT}, {SLOT}),
        ("buf0 = extern_kernels.addmm(c0, arg1_1, arg0_1)", {SLOT, INPUT, CONSTANT}, {3}),
        ("torch.ops.aten.add_.Tensor(arg0_1, arg1_1)", {SLOT, INPUT}, {SLOT}),
        ("aten.index_put_(arg0_1, [arg1_1 > 0], c0[0, 0])", {SLOT, 3, CONSTANT}, {SLOT}),
        ("aten.randint.low_out(0, 9, [2, 2], out=arg0_1)", {SLOT}, {SLOT, GENERATOR}),
        ("arg0_1.zero_()", {SLOT}, {SLOT}),
    ],
)  # fmt: skip
def test_what_a_launch_touches(line: str, reads: set[Any], writes: set[Any]) -> None:
    aligned, stream = "arg1_1 = copy_if_misaligned(arg1_1)", "stream0 = get_raw_stream(0)"
    code, units = read(aligned, stream, line, stream, "return (arg1_1, c0)")
    assert (units[-1].reads, units[-1].writes) == (reads, writes)
    assert code.kept == {INPUT, CONSTANT}


def test_memory_belongs_to_what_first_touches_it() -> None:
    code, (first, sort, last) = read(
        "with torch.cuda._DeviceGuard(0):",
        "    torch.cuda.set_device(0)",
        "    assert_size_stride(arg0_1, (2, 2), (2, 1))",
        "    buf0 = empty_strided_cuda((2, 2), (2, 1), torch.float32)",
        "    buf1 = reinterpret_tensor(buf0, (2, ), (1, ), 2)  # alias",
        "    buf2 = reinterpret_tensor(arg0_1, (2, ), (1, ), 2)  # alias",
        "    two(arg0_1, buf1)",
        "    del arg0_1",
        "    buf3 = buf0; del buf0  # reuse",
        "    buf4 = torch.ops.aten.sort.default(buf3)",
        "    buf5 = buf4[0]",
        "    assert_size_stride(buf5, (2, 2), (2, 1))",
        "    buf6 = torch.ops.aten.view.dtype(buf5, torch.int32)",
        "    two(buf2, buf6)",
        "return (buf5, )",
    )
    made, (values, places) = *first.made, sort.made
    assert touched(first) == ({SLOT, made}, {made}, {made})
    assert touched(sort) == ({made}, {values, places}, {values, places})
    assert touched(last) == ({SLOT, values}, {values}, set())
    assert called(first) == ["aten.empty_strided.default", "aten.as_strided.default", "two"]
    assert called(sort)[:2] == ["aten.sort.default", "aten.view.dtype"]
    assert [memory for memory, _ in first.defined] == [made, made]
    assert [memory for memory, _ in sort.defined][:3] == [values, places, values]
    assert called(code.first) == ["aten.as_strided.default"]
    assert code.kept == {values}


def test_a_wait_belongs_to_its_collective() -> None:
    """What is gathered is there once the unit has run, and what is sent is free then."""
    gather = "torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default"
    wait, reduce = (f"torch.ops._c10d_functional.{name}.default" for name in ("wait_tensor", "all_reduce_"))
    _, units = read(
        f"buf0 = {gather}([arg0_1, c0], 2, '0')",
        "buf1 = buf0[0]",
        "buf2 = buf0[1]",
        f"{wait}(buf1)",
        "two(arg1_1, arg0_1)",
        f"buf3 = {wait}(buf2)",
        f"{reduce}(arg1_1, 'sum', '0')",
        "two(buf3, c0)",
        f"{wait}(arg1_1)",
        "return (buf3, )",
    )
    launch, between, summed, last = units
    one, other = launch.made
    assert touched(launch) == ({SLOT, CONSTANT}, {one, other, LINK}, {one, other})
    assert [line.rpartition(".")[0] for line in called(launch)] == [
        "_c10d_functional.all_gather_into_tensor_coalesced", *["_c10d_functional.wait_tensor"] * 2,
    ]  # fmt: skip
    assert touched(summed) == ({INPUT}, {INPUT, LINK}, set())
    assert called(summed) == ["_c10d_functional.all_reduce_.default", "_c10d_functional.wait_tensor.default"]
    assert touched(last) == ({other, CONSTANT}, {CONSTANT}, set())
    assert [unit.link for unit in units] == [True, False, True, False]
    assert not any(unit.fixed for unit in units)
    assert called(between) == ["two"]


@pytest.mark.parametrize(
    "line",
    [
        "u0 = arg0_1.item()",
        "multi_kernel_0.run(arg0_1, arg1_1)",
        "torch.cuda.synchronize()",
        "with torch.cuda.stream(1): two(arg0_1, arg1_1)",
        "unheard_of(arg0_1)",
        "two(undefined, arg0_1)",
        "buf0 = torch.ops.aten.nonzero.default(arg0_1)",
        "buf0 = torch.ops.aten.mm.out(arg0_1, arg1_1, out=torch.ops.aten.empty.memory_format([3]))",
    ],
)
def test_other_statements_end_the_reading(line: str) -> None:
    with pytest.raises(UnknownLaunch, match=r"."):
        read(line, "return (arg0_1, )")


def test_a_copy_of_an_argument_that_is_not_aligned_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "copy_if_misaligned", torch.clone)
    with pytest.raises(UnknownLaunch, match="copy_if_misaligned"):
        read("arg0_1 = copy_if_misaligned(arg0_1)", "return (arg0_1, )")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("mkldnn._linear_pointwise(arg0_1, arg1_1, None, 'none', [], '')", "is an op of another library"),
        ("aten.set_(arg0_1, arg1_1)", "gives a tensor other memory"),
    ],
)  # fmt: skip
def test_what_holds_a_compiled_step_on_one_lane(line: str, why: str) -> None:
    unit = read(line, "return (arg0_1, )")[1][-1]
    assert unit.fixed.endswith(why)


# -- any order ----------------------------------------------------------------------------------------------------

SIZE = 4


class _Lane:
    """Where a run is: in one line, or on the lanes of a recorder."""

    def __init__(self) -> None:
        self.recorder: _Recorder | None = None

    def number(self, device: int = 0) -> int:
        return 0 if self.recorder is None else self.recorder.lanes.lane

    def launch(self, kernel: Any, *tensors: Tensor, stream: int) -> None:
        """Launch a kernel as Triton's are: on a stream, unseen by the dispatcher."""
        assert stream == self.number(), "on the stream of another lane"
        kernel(*tensors)


def kernel(reads: int, number: int) -> Any:
    """A kernel that adds up all its arguments in one order, and writes all but the first."""

    def launch(*tensors: Tensor) -> None:
        with _disable_current_modes():
            value = torch.full((SIZE,), float(number))
            for tensor in tensors:
                value = (value * 2 + torch.nan_to_num(tensor)) % 1009
            for tensor in tensors[reads:]:
                tensor.copy_(value)

    return launch


@st.composite
def wrappers(draw: st.DrawFn) -> tuple[list[str], list[str], dict[str, Any], dict[str, Any]]:
    """Any launches on arguments, buffers and views: signatures, statements, functions, and kernels with ``run``."""
    head, lines = (
        list[str](),
        ["arg0_1, arg1_1, arg2_1 = args", "args.clear()", "stream0 = get_raw_stream(0)"],
    )
    functions, kernels = dict[str, Any](), dict[str, Any]()
    known = ["arg0_1", "arg1_1", "arg2_1"]
    for number in range(draw(st.integers(3, 12))):
        new, kind, one = f"buf{number}", draw(st.integers(0, 4)), draw(st.sampled_from(known))
        if kind == 0:
            lines.append(f"{new} = reinterpret_tensor({one}, ({SIZE},), (1,), 0)")
        elif kind == 1:
            lines.append(f"{new} = torch.ops.aten.add.Tensor({one}, {number})")
        else:
            read = draw(st.lists(st.sampled_from(known), max_size=2))
            written = [new, one] if draw(st.booleans()) else [new]
            lines += [f"{new} = empty_strided_cpu(({SIZE},), (1,), torch.float32)", f"{new}.fill_({number})"]
            given = ", ".join([*read, *written])
            if kind == 4:
                kernels[f"k{number}"] = kernel(len(read), number)
                names = [
                    *(f"in_ptr{i}" for i in range(len(read))),
                    *(f"out_ptr{i}" for i in range(len(written))),
                ]
                kernels[f"k{number}"] = kernels[f"k{number}"], names
                lines.append(f"k{number}.run({given}, stream=stream0)")
            else:
                functions[f"k{number}"] = kernel(len(read), number)
                kinds = ["const float*"] * len(read) + ["float*"] * len(written)
                head.append(f"k{number} = async_compile.cpp_pybinding({kinds}, '')")
                lines.append(f"k{number}({given})")
        known.append(new)
    results = draw(st.lists(st.sampled_from(known[3:]), min_size=1, max_size=2, unique=True))
    return head, [*lines, f"return ({', '.join(results)}, )"], functions, kernels


@hypothesis.settings(max_examples=2000 if THOROUGH else 20)
@given(wrappers(), st.integers(2, 5), st.integers(0, 2**16))
def test_launches_in_any_order(wrapper: Any, lanes: int, number: int) -> None:
    """On simulated lanes, in orders that a device may take: the bits of what the compiler wrote, run as it is."""
    head, lines, functions, kernels = wrapper
    here, guards = _Lane(), torch._C._dynamo.guards
    names: dict[str, Any] = {"torch": torch, "get_raw_stream": here.number, **functions}
    names |= {
        "reinterpret_tensor": guards._reinterpret_tensor,
        "empty_strided_cpu": guards._empty_strided_cpu,
    }
    names |= {name: triton(partial(here.launch, one), *given) for name, (one, given) in kernels.items()}
    values = [torch.arange(float(SIZE)) + 10 * i for i in range(3)]
    expected = [one.clone() for one in values]
    scope = dict(names)
    exec("\n".join(["def call(args):", *(f"    {line}" for line in lines)]), scope)
    wanted = [*scope["call"]([*expected]), *expected]

    static = [one.clone() for one in values]
    spread = partial(in_any_order, number, lanes)
    launches = recorded("\n".join(head), names, lines, values)
    code = launches.code
    timeline = spread(launches.units, code.kept)
    refuse_races(timeline, "any")
    spare = [one.clone() for one in values]
    timeline = rehearsed(timeline, code, launches.scope(spare, ()), spare)
    here.recorder = recorder = _Recorder(Buffers(static, [], []))
    run = on_lanes(recorder.lanes, timeline, code, launches.scope(static, ()))
    with torch.no_grad(), recorder:
        out = run(())
    results = [Address(one, recorder.locate(one)) for one in out]
    del out
    for turn in range(6):
        for block in recorder.pool.blocks:
            block.revive()
            block.poison()
        for one, value in zip(static, values, strict=True):
            one.copy_(value)
        for call in recorder.lanes.order(turn):
            call.repeat()
        found = [*(one.tensor() for one in results), *static]
        assert all(map(torch.equal, found, wanted)), (turn, lines)


def test_an_op_that_returns_other_memory_than_its_trace_says_holds_all_on_one_lane() -> None:
    """Its result lies in its argument: the order of what touches one does not follow from the other."""
    lines = [
        "buf0 = torch.ops.aten.add.Tensor(arg0_1, 1)",
        "arg1_1.fill_(2)",
        "arg0_1.zero_()",
        "return (buf0, )",
    ]
    values, spread = [torch.ones(SIZE), torch.ones(SIZE)], partial(in_any_order, 0, 2)
    for lies in (False, True):
        launches = recorded("", NAMES, ["arg0_1, arg1_1 = args", *lines], values)
        code = launches.code
        timeline = spread(launches.units, code.kept)
        assert timeline.lanes == 2
        scope = launches.scope(values, ())
        if lies:
            scope["op_aten_add_Tensor"] = lambda a, b: a
        timeline = rehearsed(timeline, code, scope, values)
        assert timeline.lanes == 2 - lies
        assert ("returns other memory than its trace says" in str(timeline)) == lies
