"""What a compiled function launches, read from its wrapper: each kind of statement, and any order of lanes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from functional_cg.stages.branches.function import _allocated, scope_of, spread_launches
from functional_cg.stages.branches.source import on_lanes, rehearsed
from functional_cg.stages.branches.units import GENERATOR, LINK, Unit
from functional_cg.stages.branches.wrapper import UnknownStatement, Wrapper
from functional_cg.stages.plan import Buffers
from functional_cg.testing.recorded import Address
from functional_cg.testing.simulator import _Recorder
from tests.branched import in_any_order
from tests.shares import THOROUGH

HEAD = '''
import torch
from torch._inductor.select_algorithm import extern_kernels
aten = torch.ops.aten
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
two = async_compile.cpp_pybinding(['const float*', 'float*'], r"")
half = async_compile.triton('half', """
@triton_heuristics.pointwise(inductor_meta={'mutated_arg_names': ['in_ptr1', 'in_out_ptr0']})
@triton.jit
def half(in_out_ptr0, in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK): pass
""", device_str='cuda')
theirs = async_compile.triton('theirs', """
@triton_heuristics.user_autotune(configs=[])
@triton.jit
def theirs(in_ptr0, in_ptr1): pass
""", device_str='cuda')
class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
'''

NAMES: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten, "c0": torch.ones(2)}
NAMES |= dict.fromkeys(("two", "half", "theirs", "reinterpret_tensor", "extern_kernels"))


def read(*lines: str) -> Wrapper:
    return Wrapper(HEAD + "".join(f"        {line}\n" for line in lines), NAMES, ["slot", "input"])


def touched(unit: Unit) -> tuple[set[Any], set[Any], set[Any]]:
    return {*unit.reads}, {*unit.writes}, {*unit.made}


SLOT, INPUT, CONSTANT = "slot", "input", "c0"


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
        ("buf0 = extern_kernels.convolution(arg1_1, arg0_1, bias=c0)", {SLOT, INPUT, CONSTANT}, {"buf0"}),
        ("torch.ops.aten.add_.Tensor(arg0_1, arg1_1)", {SLOT, INPUT}, {SLOT}),
        ("aten.index_put_(arg0_1, [arg1_1], c0)", {SLOT, INPUT, CONSTANT}, {SLOT, INPUT, CONSTANT}),
        ("aten.randint.low_out(0, 9, [2], out=arg0_1)", {SLOT}, {SLOT, GENERATOR}),
        ("arg0_1.zero_()", {SLOT}, {SLOT}),
    ],
)  # fmt: skip
def test_what_a_launch_touches(line: str, reads: set[Any], writes: set[Any]) -> None:
    aligned, stream = "arg1_1 = copy_if_misaligned(arg1_1)", "stream0 = get_raw_stream(0)"
    wrapper = read(aligned, stream, line, stream, "return (arg1_1, )")
    (unit,) = wrapper.units
    assert (unit.reads, unit.writes) == (reads, writes)
    assert (wrapper.entering, wrapper.aligned) == ([stream], {"arg1_1"})
    assert wrapper.returned == {"input"}


def test_memory_belongs_to_what_first_touches_it() -> None:
    wrapper = read(
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
    first, sort, last = wrapper.units
    assert touched(first) == ({"slot", "buf0"}, {"slot", "buf0"} - {"slot"}, {"buf0"})
    assert touched(sort) == ({"buf0"}, {"buf4"}, {"buf4"})
    assert touched(last) == ({"slot", "buf4"}, {"buf4"}, set())
    assert [line.partition(" ")[0] for line in first.lines] == ["buf0", "buf1", "two(arg0_1,", "buf3"]
    assert [line.partition(" ")[0] for line in sort.lines] == ["buf4", "buf5", "buf6"]
    assert first.defined == [("buf0", name) for name in ("buf0", "buf1", "buf3")]
    assert sort.defined == [("buf4", name) for name in ("buf4", "buf5", "buf6")]
    assert [wrapper.first.lines[0], wrapper.first.lines[-1][:4]] == ["torch.cuda.set_device(0)", "buf2"]
    assert wrapper.returned == {"buf4"}


def test_a_wait_belongs_to_its_collective() -> None:
    """What is gathered is there once the unit has run, and what is sent is free then."""
    gather = "torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default"
    wait, reduce = (f"torch.ops._c10d_functional.{name}.default" for name in ("wait_tensor", "all_reduce_"))
    wrapper = read(
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
    launch, between, summed, last = wrapper.units
    assert touched(launch) == ({SLOT, CONSTANT}, {"buf0", LINK}, {"buf0"})
    assert [line.partition("(")[0] for line in launch.lines] == [
        f"buf0 = {gather}", "buf1 = buf0[0]", "buf2 = buf0[1]", wait, f"buf3 = {wait}",
    ]  # fmt: skip
    assert touched(summed) == ({INPUT}, {INPUT, LINK}, set())
    assert [line.partition("(")[0] for line in summed.lines] == [reduce, wait]
    assert touched(last) == ({"buf0", CONSTANT}, {CONSTANT}, set())
    assert [unit.link for unit in wrapper.units] == [True, False, True, False]
    assert not any(unit.fixed for unit in wrapper.units)
    assert between.lines == ["two(arg1_1, arg0_1)"]
    assert launch.defined == [("buf0", name) for name in ("buf0", "buf1", "buf2", "buf3")]


@pytest.mark.parametrize(
    "line",
    [
        "torch.ops._c10d_functional.wait_tensor.default(arg0_1)",
        "u0 = arg0_1.item()",
        "buf0 = copy_if_misaligned(arg0_1)",
        "arg0_1 = copy_if_misaligned(arg1_1)",
        "for i in range(2): two(arg0_1, arg1_1)",
        "multi_kernel_0.run(arg0_1, arg1_1)",
        "torch.cuda.synchronize()",
        "partition0_args = [arg0_1]",
        "buf0, buf1 = torch.ops.aten.sort.default(arg0_1)",
        "arg0_1 = arg1_1",
        "buf0 = c0.T",
        "buf0 = torch.where(arg0_1, arg1_1)",
        "two(unheard_of, arg0_1)",
        "two(*args)",
        "(lambda: arg0_1.zero_())()",
    ],
)
def test_other_statements_end_the_reading(line: str) -> None:
    with pytest.raises(UnknownStatement, match=r"."):
        read(line, "return (arg0_1, )")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("torch.ops.c10d.allreduce_.default(arg0_1)", "is an op of another library"),
        ("aten.resize_(arg0_1, [4])", "gives a tensor other memory"),
        ("buf0 = torch.ops.aten.expand_as.default(arg0_1, arg1_1)", "returns an argument"),
    ],
)  # fmt: skip
def test_what_holds_a_compiled_step_on_one_lane(line: str, why: str) -> None:
    (unit,) = read(line, "return (arg0_1, )").units
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
        (kernel if self.recorder is None else self.recorder.kernel(kernel))(*tensors)


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
                code = f"def k{number}({', '.join(names)}, n): pass"
                head.append(f"k{number} = async_compile.triton('k{number}', {code!r})")
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
    source = "\n".join([*head, "def call(args):", *(f"    {line}" for line in lines)])
    here = _Lane()
    names: dict[str, Any] = {"torch": torch, "get_raw_stream": here.number, "empty_strided_cpu": _allocated}
    names |= {"reinterpret_tensor": torch._C._dynamo.guards._reinterpret_tensor, **functions}
    names |= {name: SimpleNamespace(run=partial(here.launch, one)) for name, one in kernels.items()}
    values = [torch.arange(float(SIZE)) + 10 * i for i in range(3)]
    expected = [one.clone() for one in values]
    scope = dict(names)
    exec("\n".join(["def call(args):", *(f"    {line}" for line in lines)]), scope)
    wanted = [*scope["call"]([*expected]), *expected]

    static = [one.clone() for one in values]
    spread = partial(in_any_order, number, lanes)
    wrapper = Wrapper(source, names, ["a", "b", "c"])
    code = wrapper.code("any", 9)
    timeline = spread_launches(wrapper, code, names, values, spread)
    spare = [one.clone() for one in values]
    timeline = rehearsed(timeline, code, scope_of(wrapper, names, spare, ()), spare)
    here.recorder = recorder = _Recorder(Buffers(static, [], []))
    run = on_lanes(recorder.lanes, timeline, code, scope_of(wrapper, names, static, ()))
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
        assert all(map(torch.equal, found, wanted)), (turn, source)


def test_an_op_that_returns_other_memory_than_its_code_says_holds_all_on_one_lane() -> None:
    """Its result lies in its argument: the order of what touches one does not follow from the other."""
    lines = [
        "buf0 = torch.ops.aten.add.Tensor(arg0_1, 1)",
        "arg1_1.fill_(2)",
        "arg0_1.zero_()",
        "return (buf0, )",
    ]
    lying = SimpleNamespace(
        ops=SimpleNamespace(aten=SimpleNamespace(add=SimpleNamespace(Tensor=lambda a, b: a)))
    )
    values, spread = [torch.ones(SIZE), torch.ones(SIZE)], partial(in_any_order, 0, 2)
    for torch_of, lanes in ((torch, 2), (lying, 1)):
        names = {**NAMES, "torch": torch_of}
        wrapper = read(*lines)
        code = wrapper.code("any", 1)
        timeline = spread_launches(wrapper, code, names, values, spread)
        assert timeline.lanes == 2
        timeline = rehearsed(timeline, code, scope_of(wrapper, names, values, ()), values)
        assert timeline.lanes == lanes
        assert ("returns other memory than its trace says" in str(timeline)) == (lanes == 1)


def test_what_does_not_run_on_shapes_alone_ends_the_reading() -> None:
    wrapper = read("buf0 = torch.ops.aten.nonzero.default(arg0_1)", "return (buf0, )")
    code = wrapper.code("any", 1)
    with pytest.raises(UnknownStatement, match="nonzero"):
        spread_launches(wrapper, code, NAMES, [torch.ones(2)] * 2, partial(in_any_order, 0, 2))
