"""The graph that inductor gets computes, bit by bit, what the graph of a step does, and writes at its end alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._higher_order_ops.effects import has_effects
from torch._inductor.decomposition import select_decomp_table

import functional_cg as fcg
from functional_cg.stages.core.expansion import Expander
from functional_cg.stages.core.graph import core_graph
from functional_cg.stages.lower.compiled import prepare
from functional_cg.stages.lower.in_place import InPlacePlan
from functional_cg.stages.lower.inductor import compile_graph
from functional_cg.tensors.fake_mode import compiler_mode
from functional_cg.tensors.overlap import storage_key

aten = torch.ops.aten
Call = Callable[[Any, fx.Node, fx.Node], Sequence[fx.Node]]


def doubled_halves(value: Tensor) -> tuple[Tensor, Tensor]:
    """A function of ours: two results in one new memory."""
    both = value * 2
    return both[:2], both[2:]


def written_and_returned(value: Tensor) -> Tensor:
    return value.copy_(value * 3)


def row(call: Any, of: fx.Node, number: int = 1) -> fx.Node:
    made: fx.Node = call(aten.select.int, (of, 0, number))
    return made


# Each takes what adds a call, and two matrices of integers; it returns new matrices, or other names of old ones.
CALLS: dict[str, Call] = {
    "product": lambda call, a, b: [call(aten.mul.Tensor, (a, b))],
    "sum with itself": lambda call, a, b: [call(aten.add.Tensor, (a, a))],
    "sum of three": lambda call, a, b: [call(aten.add.Tensor, (a, b), {"alpha": 3})],
    "transposed": lambda call, a, b: [call(aten.t.default, (a,))],
    "copy as it lies": lambda call, a, b: [call(aten.clone.default, (a,))],
    "reshaped twice": lambda call, a, b: [
        call(aten.reshape.default, (call(aten.reshape.default, (a, [2, 8])), [4, 4]))
    ],
    "elements as they lie": lambda call, a, b: [call(aten.as_strided.default, (a, [4, 4], [4, 1]))],
    "halves": lambda call, a, b: _halves(call, a),
    "sum of a row": lambda call, a, b: [call(aten.add.Tensor, (b, row(call, a)))],
    # Of another matrix than it writes: of its own, torch computes something else on each kind of processor.
    "matrix product in place": lambda call, a, b: [
        call(aten.addmm_.default, (a, made := call(aten.mul.Tensor, (b, 2)), made))
    ],
    "sum in place": lambda call, a, b: [call(aten.add_.Tensor, (a, b))],
    "a row in place": lambda call, a, b: [call(aten.add_.Tensor, (row(call, a), 7)), a][1:],
    "a row from another": lambda call, a, b: [call(aten.copy_.default, (row(call, a), row(call, b, 2))), a][
        1:
    ],
    "a row of a view": lambda call, a, b: [
        call(aten.mul_.Tensor, (row(call, call(aten.t.default, (a,))), row(call, b))),
        a,
    ][1:],
    "by a function": lambda call, a, b: [call(written_and_returned, (a,))],
    "transposed in place": lambda call, a, b: [call(aten.t_.default, (call(aten.t.default, (a,)),))],
    "a row turned in place": lambda call, a, b: [_turned(call, a, b)],
    "halves, said to be new": lambda call, a, b: _halves(call, a, aten.unsafe_split.Tensor),
    "filled": lambda call, a, b: [call(aten.fill_.Scalar, (a, 5))],
}
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(sorted(CALLS)), st.integers(0, 9), st.integers(0, 9)), max_size=12
)


def _turned(call: Any, a: fx.Node, b: fx.Node) -> fx.Node:
    """Writes a row that calls have given another dimension, turned, and taken it away from."""
    made = call(aten.unsqueeze_.default, (row(call, a), 1))
    call(aten.add_.Tensor, (made, call(aten.unsqueeze.default, (row(call, b, 2), 1))))
    turned = call(aten.squeeze_.default, (call(aten.transpose_.default, (made, 0, 1)),))
    call(aten.mul_.Tensor, (turned, row(call, b)))
    return a


def _halves(call: Any, of: fx.Node, split: Any = aten.split.Tensor) -> list[fx.Node]:
    parts = call(split, (of, 2))
    upper, lower = (call(operator.getitem, (parts, n)) for n in range(2))
    call(aten.add_.Tensor, (lower, upper))
    return [call(aten.cat.default, ([lower, upper],))]


def graph_of(calls: Sequence[tuple[str, int, int]]) -> fx.GraphModule:
    """A graph that makes these calls on two matrices, and returns all of its matrices."""
    graph = fx.Graph()
    values = [graph.placeholder("x"), graph.placeholder("y")]
    for name, i, j in calls:
        values += CALLS[name](graph.call_function, values[i % len(values)], values[j % len(values)])
    graph.output(tuple(values))
    return fx.GraphModule(torch.nn.Module(), graph)


def cored(module: fx.GraphModule, *arguments: Tensor) -> fx.GraphModule:
    mode = compiler_mode()
    return core_graph(module, [mode.from_tensor(one, static_shapes=True) for one in arguments], mode)


def matrices() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(-9, 9, (4, 4), generator=generator) for _ in range(2))
    return x, y.t()


@given(PROGRAMS)
@example([("transposed", 0, 0), ("sum in place", 0, 1), ("sum of a row", 2, 0)])
@example([("copy as it lies", 1, 0), ("matrix product in place", 2, 0), ("elements as they lie", 2, 0)])
@example([("sum in place", 0, 1), ("sum with itself", 0, 0), ("sum of three", 0, 1), ("sum of three", 0, 0)])
@example([("reshaped twice", 1, 0), ("reshaped twice", 0, 0), ("filled", 0, 0)])
@example([("transposed in place", 0, 0), ("sum in place", 2, 1)])
@example([("a row turned in place", 1, 0), ("a row turned in place", 0, 0)])
@example([("halves, said to be new", 0, 0), ("sum with itself", 0, 0)])
def test_a_core_graph_computes_what_the_graph_does(calls: list[tuple[str, int, int]]) -> None:
    """Results and arguments, whatever is a view of what, and whatever is written in between."""
    module, arguments = graph_of(calls), matrices()
    try:
        wanted = module(*(left := [one.clone() for one in arguments]))
    except RuntimeError:  # such a write does not go: two elements in one place, say
        return
    core = cored(module, *arguments)
    got = core(*(right := [one.clone() for one in arguments]))
    for a, b in zip([*wanted, *left], [*got, *right], strict=True):
        assert torch.equal(a, b)


def test_a_call_that_only_checks_is_made() -> None:
    """It returns nothing, and torch 2.13 keeps its place by tokens; 2.11 drops it, and steps check outside."""
    if not has_effects(aten._linalg_check_errors.default):
        pytest.skip("this version of torch drops such a call")
    graph = fx.Graph()
    info = graph.placeholder("info")
    graph.call_function(aten._linalg_check_errors.default, (info, "cholesky"), {"is_matrix": True})
    graph.output((graph.call_function(aten.add.Tensor, (info, 1)),))
    module, fine = fx.GraphModule(torch.nn.Module(), graph), torch.zeros((), dtype=torch.int32)
    compiled = compile_graph(module, [fine], on_host=True, small=True, in_order=False)
    for made in (cored(module, fine), compiled):
        assert int(made(fine)[0]) == 1
        with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
            made(fine + 1)


@torch.library.custom_op("core_graph_tests::doubled_", mutates_args=("row",))
def doubled_(row: Tensor) -> None:
    row.mul_(2)


def test_an_op_of_another_library_writes_a_view() -> None:
    """Torch copies what it writes, from the beginning of its memory."""
    graph = fx.Graph()
    made = graph.call_function(aten.mul.Tensor, (graph.placeholder("x"), 3))
    graph.call_function(torch.ops.core_graph_tests.doubled_.default, (row(graph.call_function, made, 2),))
    graph.output((graph.call_function(aten.mul.Tensor, (made, 1)),))
    module, x = fx.GraphModule(torch.nn.Module(), graph), torch.randn(4, 4)
    compiled = compile_graph(module, [x], on_host=True, small=True, in_order=False)
    assert torch.equal(compiled(x)[0], module(x)[0])


@given(PROGRAMS)
def test_fake_tensors_tell_what_a_core_graph_computes(calls: list[tuple[str, int, int]]) -> None:
    """Shapes and strides of all values, and which of them share memory."""
    module, arguments = graph_of(calls), matrices()
    try:
        module(*(one.clone() for one in arguments))
    except RuntimeError:
        return
    core = cored(module, *arguments)
    assert not [
        node for node in core.graph.nodes if node.target is not aten.copy_.default and _writes(node.target)
    ]
    real = _Values(core)
    real.run(*(one.clone() for one in arguments))
    told = {node: node.meta["val"] for node in real.values}
    for node, value in real.values.items():
        assert (told[node].shape, told[node].stride()) == (value.shape, value.stride()), node
    for a, one in real.values.items():
        for b, other in real.values.items():
            real_one = storage_key(one) == storage_key(other)
            assert not real_one or storage_key(told[a]) == storage_key(told[b]), (a, b)
            if storage_key(told[a]) == storage_key(told[b]) and a.target not in (aten.reshape.default,):
                assert real_one, (a, b)


class _Values(fx.Interpreter):
    """Keeps what each call computes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and n.target is not aten.copy_.default:
            self.values[n] = value
        return value


def _writes(target: Any) -> bool:
    return bool(getattr(getattr(target, "_schema", None), "is_mutable", False))


@pytest.mark.parametrize(
    "pair",
    [
        ((aten.mul.Tensor, 2), (aten.mul.Tensor, 2.0)),
        ((aten.add.Tensor, True), (aten.add.Tensor, 1)),
        ((aten.div.Tensor, 0.0), (aten.div.Tensor, -0.0)),
    ],
    ids=["an integer and a float", "a bool and an integer", "a zero and a negative zero"],
)
def test_calls_with_constants_that_are_equal_in_python_are_told_apart(pair: Any) -> None:
    graph = fx.Graph()
    given = graph.placeholder("x")
    graph.output(tuple(graph.call_function(op, (given, number)) for op, number in pair))
    module, x = fx.GraphModule(torch.nn.Module(), graph), torch.tensor([True, True])
    for wanted, got in zip(module(x), cored(module, x)(x), strict=True):
        assert wanted.dtype == got.dtype
        assert torch.equal(wanted, got)


def test_an_equal_call_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced, call = [], Expander.call

    def counted(self: Expander, source: fx.Node, *given: Any) -> Any:
        traced.append(source.target)
        return call(self, source, *given)

    monkeypatch.setattr(Expander, "call", counted)
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(9):
        value = graph.call_function(aten.native_layer_norm.default, (value, [4], None, None, 1e-5))
        value = graph.call_function(operator.getitem, (value, 0))
    graph.output((value,))
    module, x = fx.GraphModule(torch.nn.Module(), graph), torch.randn(3, 4)
    core = cored(module, x)
    assert traced == [aten.native_layer_norm.default]
    torch.testing.assert_close(core(x), module(x))


def test_what_cannot_be_told_apart_is_not_written() -> None:
    """Two results in one memory that is no argument's: they may be read, a write to one of them is refused."""
    for written in (False, True):
        graph = fx.Graph()
        halves = graph.call_function(doubled_halves, (graph.placeholder("x"),))
        upper, lower = (graph.call_function(operator.getitem, (halves, n)) for n in range(2))
        if written:
            graph.call_function(aten.add_.Tensor, (upper, 1))
        graph.output((upper, lower))
        module, x = fx.GraphModule(torch.nn.Module(), graph), torch.arange(4)
        if written:
            with pytest.raises(NotImplementedError, match="memory that another result lies in"):
                cored(module, x)
        else:
            assert [one.tolist() for one in cored(module, x)(x)] == [[0, 2], [4, 6]]


def test_it_is_the_graph_that_torch_itself_makes() -> None:
    """Of a training step, call by call: what torch's compiler was made for, and a change of torch is seen."""

    class Block(torch.nn.Sequential):
        def __init__(self) -> None:
            super().__init__(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.GELU())

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), torch.nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.log_softmax(self.head(self.block(x).mean((2, 3))), -1)

    apply, params, buffers = fcg.from_module(Net())
    optimizer = fcg.optim.adamw(1e-3, weight_decay=0.1)
    state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=optimizer)

    def train_step(state: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Any:
            out, new = apply(p, state.buffers, x)
            return out.square().mean(), new

        (value, new), grads = fcg.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads, buffers=new), value

    program = fcg.graph_step(train_step, lowering="aten").lower(state, torch.randn(2, 3, 8, 8)).program
    prepare(program)
    (head,) = InPlacePlan(program, torch.device("cpu")).heads
    entering = head.takes
    arguments = [
        torch.empty_strided(var.spec.shape, var.spec.stride, dtype=var.spec.dtype) for var in entering
    ]
    found = []

    def kept(module: Any, inputs: Any) -> Any:
        found.append(module)
        return module.forward

    keep: Any = kept
    with torch.no_grad():
        aot_module_simplified(
            head.graph,
            arguments,
            fw_compiler=keep,
            inference_compiler=keep,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
        ours = cored(head.graph, *arguments)
    (theirs,) = found
    assert _calls(ours) == _calls(theirs)


def _calls(module: fx.GraphModule) -> list[Any]:
    """The calls of a graph: arguments by the place of what computes them, and the layout of the result."""
    places = {node: place for place, node in enumerate(module.graph.nodes)}

    def layout(value: Any) -> Any:
        return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else type(value)

    return [
        (
            str(node.target) if node.op == "call_function" else node.op,
            str(fx.node.map_arg((node.args, node.kwargs), lambda one: places[one])),
            layout(node.meta.get("val")),
        )
        for node in module.graph.nodes
    ]
