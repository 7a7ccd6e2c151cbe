"""What was compiled for an equal graph is found without its core graph; graphs that may differ have other keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import fresh_cache

import functional_cg as fcg
from functional_cg.stages.core import lookup
from functional_cg.stages.fx_passes import rounding
from functional_cg.stages.lower import inductor
from functional_cg.tensors.fake_mode import compiler_mode
from tests.test_core_graph import PROGRAMS, cored, graph_of, matrices

aten = torch.ops.aten


@pytest.fixture
def cache() -> Iterator[None]:
    with fresh_cache():
        yield


def key_of(module: fx.GraphModule, *arguments: Tensor) -> str | None:
    mode = compiler_mode()
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        return lookup.key_of(module, [mode.from_tensor(one, static_shapes=True) for one in arguments])


def graph_with(target: Any, *args: Any, **kwargs: Any) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output((graph.call_function(target, (graph.placeholder("x"), *args), kwargs),))
    return fx.GraphModule(torch.nn.Module(), graph)


def compile_it(module: fx.GraphModule, *arguments: Tensor) -> Callable[..., Sequence[Tensor]]:
    return inductor.compile_graph(module, arguments, on_host=True, small=True, in_order=False)


def core_graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """A list that grows by each graph whose core graph is made."""
    made, core_graph = [], inductor.core_graph

    def counted(module: fx.GraphModule, *given: Any) -> fx.GraphModule:
        made.append(module)
        return core_graph(module, *given)

    monkeypatch.setattr(inductor, "core_graph", counted)
    return made


@pytest.mark.kernels
@pytest.mark.usefixtures("cache")
def test_an_equal_graph_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And computes the same, also on other values; one of another layout is not it."""
    made = core_graphs(monkeypatch)
    calls = [("sum of a row", 0, 1), ("sum in place", 0, 2), ("transposed", 2, 0)]
    for number in range(3):
        module, x, y = graph_of(calls), *(one + number for one in matrices())
        wanted = module(*(left := [x.clone(), y.clone()]))
        got = compile_it(module, x, y)(*(right := [x.clone(), y.clone()]))
        for a, b in zip([*wanted, *left], [*got, *right], strict=True):
            assert torch.equal(a, b)
        assert len(made) == 1
    compile_it(graph_of(calls), y, x)
    assert len(made) == 2


@pytest.mark.kernels
@pytest.mark.usefixtures("cache")
def test_what_is_gone_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's entry, ours, or what ours says."""
    made, module, (x, y) = core_graphs(monkeypatch), graph_of([("sum with itself", 0, 0)]), matrices()
    compile_it(module, x, y)
    (entry,) = Path(inductor_cache()).glob("functional_cg/*/*")
    for number, lose in enumerate((entry.unlink, partial(entry.write_text, "["), _forget_all), start=2):
        lose()
        assert torch.equal(compile_it(module, x, y)(x, y)[2], x + x)
        assert len(made) == number
    compile_it(module, x, y)
    assert len(made) == 4


@pytest.mark.kernels
@pytest.mark.usefixtures("cache")
def test_what_another_version_of_a_pass_makes_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an older version of this library compiled is not found, by torch's key either."""

    whole, half = torch.arange(2000, 4000), torch.linspace(0.1, 0.9, 2000).half()

    def compiled() -> Tensor:
        step = fcg.graph_fn(lambda x, y: x * y, lowering="inductor", certify=False)
        return step(whole, half)  # type: ignore[no-any-return]

    with monkeypatch.context() as older:
        older.setattr(lookup, "_digest", lambda: "older")
        older.setattr(rounding, "_round_operands", lambda graph, node: False)
        assert not torch.equal(compiled(), whole * half)
    assert torch.equal(compiled(), whole * half)


def inductor_cache() -> str:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def _forget_all() -> None:
    from torch._inductor.codecache import FxGraphCache

    FxGraphCache.clear()


@pytest.mark.kernels
@given(PROGRAMS, PROGRAMS, st.integers(0, 9), st.booleans())
def test_graphs_with_one_key_compute_the_same(a: Any, more: Any, at: int, swapped: bool) -> None:
    """Of a graph, and one in which a few calls are others."""
    b = [*a[:at], *more[:2], *a[at + len(more[:2]) :]]
    x, y = matrices()
    given = ((x, y), (y, x) if swapped else (x, y))
    keys = [key_of(graph_of(calls), *values) for calls, values in zip((a, b), given, strict=True)]
    ours = [{"by a function"}.isdisjoint(name for name, *_ in calls) for calls in (a, b)]
    assert [key is not None for key in keys] == ours
    if keys[0] is not None and keys[0] == keys[1]:
        results = [_outcome(graph_of(calls), values) for calls, values in zip((a, b), given, strict=True)]
        assert results[0] == results[1]


def _outcome(module: fx.GraphModule, values: Sequence[Tensor]) -> Any:
    copies = [one.clone() for one in values]
    try:
        results = module(*copies)
    except RuntimeError:
        return None
    return [(one.tolist(), one.stride(), one.dtype) for one in (*results, *copies)]


@pytest.mark.parametrize(
    "pair",
    [
        (graph_with(aten.mul.Tensor, 2), graph_with(aten.mul.Tensor, 2.0)),
        (graph_with(aten.add.Tensor, True), graph_with(aten.add.Tensor, 1)),
        (graph_with(aten.div.Tensor, 0.0), graph_with(aten.div.Tensor, -0.0)),
        (graph_with(aten.add.Tensor, 0.1), graph_with(aten.add.Tensor, 0.1 + 1e-17 * 2)),
        (graph_with(aten.add.Tensor, 1, alpha=2), graph_with(aten.add.Tensor, 1, alpha=3)),
        (graph_with(aten.sum.dim_IntList, [0]), graph_with(aten.sum.dim_IntList, [1])),
    ],
    ids=["integer, float", "bool, integer", "zeros", "last bit", "keyword", "list"],
)
def test_calls_that_differ_in_a_constant_have_other_keys(pair: tuple[fx.GraphModule, fx.GraphModule]) -> None:
    x = torch.ones(2, 2)
    texts = {module.code for module in pair}
    assert len({key_of(module, x) for module in pair}) == len(texts) == 2 or pair[0].code == pair[1].code


def test_arguments_that_differ_have_other_keys() -> None:
    x = torch.ones(4, 4)
    others = [x[:2], x[1:3], x.t()[:2], x[:2].double(), x[:2, :2], torch.ones(2, 4), torch.zeros(2, 4)]
    keys = [key_of(graph_with(aten.mul.Tensor, 2), one) for one in others]
    assert len(set(keys)) == len(keys) - 1
    assert keys[-2] == keys[-1]


def test_so_do_options_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = graph_with(aten.mul.Tensor, 2), torch.ones(2)
    keys = [key_of(module, x)]
    for name in ("inplace_buffers", "deterministic", "combo_kernels"):
        with config.patch({name: not getattr(config, name)}):
            keys.append(key_of(module, x))
    torch.set_default_dtype(torch.float64)
    try:
        keys.append(key_of(module, x))
    finally:
        torch.set_default_dtype(torch.float32)
    assert key_of(module, x) == keys[0]
    monkeypatch.setattr(lookup, "_digest", lambda: "a change of this library")
    keys.append(key_of(module, x))
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_what_its_name_does_not_tell_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that has no name, an op made of others by the user's code, a formula of the user's."""

    def local(x: Tensor) -> Tensor:
        return x * 2

    with torch.library._scoped_library("fcg_tests_before", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
        library.define("thrice(Tensor x) -> Tensor")
        library.impl("thrice", lambda x: x * 3, "CPU")
        x, ours = torch.ones(2), torch.ops.fcg_tests_before
        for target in (local, lambda x: x, graph_with, ours.twice.default):
            assert key_of(graph_with(target), x) is None
        assert key_of(graph_with(ours.thrice.default), x) is not None
    module = graph_with(aten.mul.Tensor, 2)
    assert key_of(module, x) is not None
    with monkeypatch.context() as patch:
        patch.setitem(select_decomp_table(), aten.mul.Tensor, lambda x, y: x + x)
        assert key_of(module, x) is None
    with config.patch(force_disable_caches=True):
        assert key_of(module, x) is None


def test_an_op_of_another_library_that_changed_has_another_key() -> None:
    """In what it takes, or in what it returns."""
    x, keys, texts = torch.ones(4, 4), set(), set()
    for schema, results in (
        ("Tensor x", "x.t()"),
        ("Tensor x", "x.t().clone()"),
        ("Tensor x, int n=0", "x.t()"),
    ):
        with torch.library._scoped_library("fcg_tests_other", "DEF") as library:
            library.define(f"turned({schema}) -> Tensor")
            fake = {"x.t()": lambda x, n=0: x.t().contiguous(), "x.t().clone()": lambda x, n=0: x.clone().t()}
            library.impl("turned", fake[results], "CPU")
            torch.library.register_fake("fcg_tests_other::turned", fake[results], lib=library)
            module = graph_with(torch.ops.fcg_tests_other.turned.default)
            keys.add(key_of(module, x))
            texts.add(lookup.signatures(cored(module, x).graph))
    assert len(keys) == 2
    assert len(texts) == 3
