"""Laws of value_and_grad, grad and microbatches; the judge is torch.func.grad."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import functional_cg as fcg
from functional_cg import random, tree
from functional_cg.errors import CaptureError, LayoutError
from functional_cg.testing.strategies import tensors


def floats(shape: tuple[int, ...]) -> st.SearchStrategy[Tensor]:
    return tensors(shapes=st.just(shape), dtypes=st.just(torch.float64), strided=False)


shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)


def close(a: Any, b: Any, **tolerance: float) -> None:
    torch.testing.assert_close(a, b, check_stride=False, **tolerance)


def mlp(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"] + params["b"]).square().mean()


def mlp_params(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"w": torch.randn(3, 4, dtype=dtype), "b": torch.randn(4, dtype=dtype)}


# --- first order -------------------------------------------------------------------------------------------


@given(st.data())
def test_value_and_grad_equals_torch_func(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    params = {"a": data.draw(floats(shape)), "b": [data.draw(floats(shape)), data.draw(floats(()))]}

    def loss(p: Any, scale: float, *, shift: float) -> Tensor:
        return ((p["a"] * p["b"][0]).sin() * scale + p["b"][1] ** 2 + shift).sum()

    value, grads = fcg.value_and_grad(loss)(params, 2.0, shift=1.0)
    expected_grads, expected = torch.func.grad_and_value(loss)(params, 2.0, shift=1.0)
    close(value, expected)
    close(grads, expected_grads)
    assert tree.flatten(grads)[1] == tree.flatten(params)[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_grads_have_the_dtype_of_their_leaf(dtype: torch.dtype) -> None:
    params = mlp_params(dtype)
    value, grads = fcg.value_and_grad(mlp)(params, torch.randn(2, 3, dtype=dtype))
    assert value.dtype == dtype
    assert {name: grad.dtype for name, grad in grads.items()} == {"b": dtype, "w": dtype}


def test_complex_leaf_follows_the_convention_of_torch() -> None:
    z = torch.randn(3, dtype=torch.complex128)

    def loss(z: Tensor) -> Tensor:
        return (z * z.conj()).real.sum() + z.imag.sum()

    close(fcg.grad(loss)(z), torch.func.grad(loss)(z))


def test_has_aux_returns_the_auxiliary_tree() -> None:
    def loss(w: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return (w * w).sum(), {"w2": w * 2, "n": 3, "none": None}

    w = torch.tensor([1.0, 2.0])
    (value, aux), grads = fcg.value_and_grad(loss, has_aux=True)(w)
    assert (value.item(), aux["n"], aux["none"]) == (5.0, 3, None)
    assert torch.equal(aux["w2"], w * 2)
    assert torch.equal(grads, w * 2)
    only_grads, same_aux = fcg.grad(loss, has_aux=True)(w)
    assert torch.equal(only_grads, grads)
    assert torch.equal(same_aux["w2"], aux["w2"])


def test_unused_leaf_gets_zeros_in_its_own_layout() -> None:
    unused = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    params = {"used": torch.ones(2), "unused": unused}
    grads = fcg.grad(lambda p: p["used"].sum())(params)
    assert torch.equal(grads["unused"], torch.zeros(2, 3, 4, 4))
    assert grads["unused"].stride() == unused.stride()


def test_value_that_depends_on_nothing_gives_zeros_and_a_warning() -> None:
    """torch would raise; zeros alone would train nothing in silence."""
    with pytest.warns(UserWarning, match="depends on no leaf of its first argument"):
        value, grads = fcg.value_and_grad(lambda w: torch.tensor(3.0))(torch.ones(2))
    assert value.item() == 3.0
    assert torch.equal(grads, torch.zeros(2))
    with pytest.warns(UserWarning, match="compute it with its first argument"):  # it has no signature
        fcg.value_and_grad(torch.zeros_like)(torch.tensor(3.0))


def test_empty_params_are_fine() -> None:
    assert fcg.value_and_grad(lambda p: torch.tensor(1.0))({}) == (torch.tensor(1.0), {})


def test_value_that_is_the_leaf_itself() -> None:
    value, grads = fcg.value_and_grad(lambda w: w)(torch.tensor(3.0))
    assert (value.item(), grads.item()) == (3.0, 1.0)


def test_custom_autograd_function_is_followed() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.variable = "a name that autograd's own leaf nodes have"
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 10

    grads = fcg.grad(lambda w: Double.apply(w).sum())(torch.ones(2))
    assert torch.equal(grads, torch.full((2,), 10.0))
    assert not grads.requires_grad


def test_arguments_are_left_as_they_were() -> None:
    params, x = mlp_params(), torch.randn(2, 3, dtype=torch.float64)
    before = [leaf.clone() for leaf in tree.leaves(params)]
    fcg.value_and_grad(mlp)(params, x)
    for leaf, old in zip(tree.leaves(params), before, strict=True):
        assert torch.equal(leaf, old)
        assert (leaf.requires_grad, leaf.grad) == (False, None)


def test_wrapped_function_keeps_its_name() -> None:
    assert fcg.value_and_grad(mlp).__name__ == "mlp"
    assert fcg.grad(mlp).__wrapped__.__name__ == "mlp"  # type: ignore[attr-defined]
    fcg.grad(partial(mlp, x=torch.ones(1, 3, dtype=torch.float64)))(mlp_params())


# --- nothing is kept ---------------------------------------------------------------------------------------


def test_results_of_an_outermost_call_have_no_graph() -> None:
    def loss(p: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return mlp(p, torch.ones(1, 3, dtype=torch.float64)), {"w": p["w"], "twice": p["w"] * 2}

    result = fcg.value_and_grad(loss, has_aux=True)(mlp_params())
    assert not any(leaf.requires_grad or leaf.grad_fn for leaf in tree.leaves(result))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_ambient_modes_are_not_taken_over(mode: Callable[[], Any]) -> None:
    params, x = mlp_params(), torch.randn(2, 3, dtype=torch.float64)
    expected = torch.func.grad(mlp)(params, x)
    with mode():
        grads = fcg.grad(mlp)(params, x)
    close(grads, expected)
    assert not any(leaf.requires_grad for leaf in tree.leaves(grads))


def test_inference_tensors_can_be_differentiated() -> None:
    with torch.inference_mode():
        w = torch.tensor([1.0, 2.0])
    assert torch.equal(fcg.grad(lambda w: (w * w).sum())(w), torch.tensor([2.0, 4.0]))
    with torch.inference_mode():
        assert torch.equal(fcg.grad(lambda w: (w * w).sum())(w), torch.tensor([2.0, 4.0]))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_under_no_grad_leave_no_graph(mode: Callable[[], Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with mode():
        value, grads = fcg.value_and_grad(lambda w: (w * weight).sum())(weight)
    assert (value.requires_grad, grads.requires_grad) == (False, False)
    assert weight.grad is None


def test_state_handles_and_leaves_are_differentiated_as_copies() -> None:
    params = mlp_params()
    state = fcg.place({"params": params})
    x = torch.randn(2, 3, dtype=torch.float64)
    close(fcg.grad(mlp)(state["params"], x), torch.func.grad(mlp)(params, x))
    close(fcg.grad(lambda w: (w * w).sum())(state["params"]["w"]), 2 * params["w"])
    close(
        fcg.grad(lambda s: mlp(s["params"], x))(state)["params"],
        torch.func.grad(mlp)(params, x),
    )
    state.replace(params=params)  # the state was not written, its handle is alive


# --- nested calls keep second-order terms ------------------------------------------------------------------

Transform = Callable[..., Callable[..., Any]]


def penalty(grad: Transform) -> Callable[[Tensor], Tensor]:
    def inner(x: Tensor) -> Tensor:
        return (x**3).sum()

    return lambda x: inner(x) + grad(inner)(x).square().sum()


def grad_of_grad(grad: Transform) -> Callable[[Tensor], Tensor]:
    return lambda x: grad(lambda y: (y**3).sin().sum())(x).square().sum()


def three_deep(grad: Transform) -> Callable[[Tensor], Tensor]:
    def second(x: Tensor) -> Tensor:
        return grad(lambda y: (y**4).sum())(x).sum()

    return lambda x: grad(second)(x).cos().sum()


def maml(grad: Transform) -> Callable[[Tensor], Tensor]:
    task = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)

    def loss(w: Tensor, target: Tensor) -> Tensor:
        return ((w - target) ** 4).sum()

    return lambda w: loss(w - 0.1 * grad(loss)(w, task), 2 * task)


def through_a_closure(grad: Transform) -> Callable[[Tensor], Tensor]:
    """The inner call's argument is fresh; what it closes over is the outer call's leaf."""
    fresh = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    return lambda w: grad(lambda y: (y**2 * w**3).sum())(fresh).square().sum()


def through_a_value(grad: Transform) -> Callable[[Tensor], Tensor]:
    """The inner call's argument is an intermediate of the outer call, not its leaf."""
    return lambda w: (grad(lambda y: (y**3).sum())(torch.sin(w)) * w).sum()


NESTED = [penalty, grad_of_grad, three_deep, maml, through_a_closure, through_a_value]


@pytest.mark.parametrize("program", NESTED)
@given(x=floats((3,)))
def test_nested_calls_equal_torch_func(program: Callable[[Any], Any], x: Tensor) -> None:
    grads = fcg.grad(program(fcg.grad))(x)
    close(grads, torch.func.grad(program(torch.func.grad))(x))
    assert not grads.requires_grad


def test_known_penalty() -> None:
    grads = fcg.grad(penalty(fcg.grad))(torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(grads, torch.tensor([39.0, 300.0, 999.0]))


def test_aux_of_an_inner_call_keeps_its_graph() -> None:
    """The inner value does not depend on the outer leaf, its auxiliary output does."""

    def outer(w: Tensor) -> Tensor:
        (_, aux), _ = fcg.value_and_grad(lambda y: (y.sum(), w * 2), has_aux=True)(torch.ones(2))
        return (aux**2).sum()

    assert torch.equal(fcg.grad(outer)(torch.tensor([1.0, 2.0])), torch.tensor([8.0, 16.0]))


def test_aux_that_is_the_outer_leaf_keeps_its_graph() -> None:
    def outer(w: Tensor) -> Tensor:
        (_, aux), _ = fcg.value_and_grad(lambda y: (y.sum(), w), has_aux=True)(torch.ones(2))
        return (aux**2).sum()

    assert torch.equal(fcg.grad(outer)(torch.tensor([1.0, 2.0])), torch.tensor([2.0, 4.0]))


def test_no_grad_around_an_inner_call_stops_gradients() -> None:
    def outer(w: Tensor) -> Tensor:
        with torch.no_grad():
            direction = fcg.grad(lambda y: (y**3).sum())(w)
        return (direction * w).sum()

    w = torch.tensor([1.0, 2.0])
    assert torch.equal(fcg.grad(outer)(w), 3 * w**2)


def test_inner_call_that_is_independent_is_a_constant() -> None:
    def outer(w: Tensor) -> Tensor:
        inner = fcg.grad(lambda y: (y**2).sum())(torch.ones(2))
        assert not inner.requires_grad
        return (inner * w).sum()

    assert torch.equal(fcg.grad(outer)(torch.ones(2)), torch.full((2,), 2.0))


def test_user_autograd_goes_through_a_call() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    fcg.grad(lambda y: (y**3).sum())(x).sum().backward()
    assert torch.equal(x.grad, 6 * x.detach())  # type: ignore[arg-type]


def test_nested_call_inside_a_captured_step_keeps_second_order_terms() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])

    @fcg.graph_step
    def step(state: Any, _: Any) -> Any:
        value, grads = fcg.value_and_grad(penalty(fcg.grad))(state["x"])
        return {"x": state["x"] + 0}, {"value": value, "grads": grads}

    _, metrics = step({"x": x}, torch.zeros(()))
    close(metrics["grads"], torch.tensor([39.0, 300.0, 999.0]))


# --- refusals ----------------------------------------------------------------------------------------------


def test_leaf_that_is_not_floating_is_refused_with_its_path() -> None:
    params = {"w": torch.ones(2), "n": torch.zeros(3, dtype=torch.int64), "s": "text"}
    with pytest.raises(LayoutError, match=r"cannot be differentiated") as error:
        fcg.grad(lambda p: p["w"].sum())(params)
    assert "params['n']  expected a floating tensor   got i64[3]@cpu" in str(error.value)
    assert "params['s']  expected a floating tensor   got str" in str(error.value)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (lambda w: w, r"f32\[2\]@cpu"),
        (lambda w: w.sum()[None], r"f32\[1\]@cpu"),
        (lambda w: w.sum().long(), r"i64\[\]@cpu"),
        (lambda w: torch.complex(w.sum(), w.sum()), r"c64\[\]@cpu"),
        (lambda w: (w.sum(), 1), "tuple"),
        (lambda w: 3.0, "float"),
        (lambda w: None, "NoneType"),
    ],
)
def test_value_that_is_no_floating_scalar_is_refused(value: Callable[[Tensor], Any], got: str) -> None:
    with pytest.raises(LayoutError, match=rf"not a floating scalar.\n  value  expected f32\[\]   got {got}"):
        fcg.grad(value)(torch.ones(2))


@pytest.mark.parametrize("out", [torch.tensor(1.0), (torch.tensor(1.0),), [torch.tensor(1.0), 2]])
def test_has_aux_without_a_pair_is_refused(out: Any) -> None:
    with pytest.raises(LayoutError, match=r"does not return a pair of value and auxiliary tree"):
        fcg.grad(lambda w: out, has_aux=True)(torch.ones(2))


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_torch_func_transforms_are_refused(transform: Any) -> None:
    """Also the test that notices when torch moves the private call that sees them."""
    with pytest.raises(CaptureError, match=r"use `torch.func.grad` or `torch.func.grad_and_value`"):
        transform(lambda x: fcg.grad(lambda w: (w * w).sum())(x))(torch.tensor(1.0).expand(1)[0].repeat(2))


def test_the_advice_for_vmap_works() -> None:
    per_sample = torch.func.vmap(torch.func.grad(lambda w: (w * w).sum()))(torch.ones(3, 2))
    assert torch.equal(per_sample, torch.full((3, 2), 2.0))


# --- microbatches ------------------------------------------------------------------------------------------


@given(k=st.integers(1, 4), size=st.integers(1, 3), data=st.data())
def test_microbatches_are_about_one_batch(k: int, size: int, data: st.DataObject) -> None:
    batch = {"x": data.draw(floats((k * size, 3))), "y": [data.draw(floats((k * size,)))]}
    params = mlp_params()

    def loss(p: dict[str, Tensor], batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        out = (batch["x"] @ p["w"] + p["b"]).mean(1)
        return F.mse_loss(out, batch["y"][0]), {
            "mean": out.mean(),
            "c": torch.complex(out, out).mean(),
        }

    whole = fcg.value_and_grad(loss, has_aux=True)
    close(fcg.microbatches(k)(whole)(params, batch), whole(params, batch))


def test_slices_are_contiguous_parts_in_order() -> None:
    seen: list[Tensor] = []

    def record(_: Any, batch: Tensor) -> Tensor:
        seen.append(batch)
        return batch.sum()

    fcg.microbatches(3)(record)(None, torch.arange(6.0))
    assert [part.tolist() for part in seen] == [[0, 1], [2, 3], [4, 5]]


def test_floating_and_complex_leaves_are_averaged() -> None:
    def count(_: Any, batch: Tensor) -> dict[str, Tensor]:
        return {"mean": batch.mean(), "z": torch.complex(batch, batch).mean()}

    out = fcg.microbatches(2)(count)(None, torch.arange(4.0))
    assert (out["mean"].item(), out["z"].item()) == (1.5, 1.5 + 1.5j)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("number", [torch.tensor(2), torch.tensor(True)], ids=["count", "flag"])
def test_whole_numbers_are_refused_and_the_advice_works(k: int, number: Tensor) -> None:
    """A batch norm counts up: the sum over slices would be four times as much after each step."""

    def run(to: Callable[[Tensor], Tensor]) -> Any:
        return fcg.microbatches(k)(lambda _, x: {"n": to(number), "mean": x.mean()})(None, torch.arange(4.0))

    with pytest.raises(
        LayoutError, match=r"result\['n'\]  expected floating numbers   got (i64|bool)"
    ) as error:
        run(lambda n: n)
    assert 'microbatches(k, carry="buffers")' in str(error.value)
    assert run(lambda n: n.float())["n"] == number
    carried = fcg.microbatches(k, carry="n")(lambda _, x, n: (x.mean(), {"n": n + 1}))
    assert carried(None, torch.arange(4.0), n=torch.tensor(5))[1]["n"] == 5 + k
    refused = fcg.microbatches(k, carry="n")(lambda _, x, n: (x.mean(), {"n": n, "m": number}))
    with pytest.raises(LayoutError, match=r"result\[1\]\['m'\](.|\n)*To fix: a count as `n.float\(\)`"):
        refused(None, torch.arange(4.0), n=torch.tensor(5))


CLOSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "drawn": lambda key, x: random.uniform(key, x.shape),
    "folded": lambda key, x: random.uniform(random.fold_in(key, 3), x.shape),
    "by a number of the state": lambda key, x: random.uniform(random.fold_in(key, STEP), x.shape),
    "split": lambda key, x: random.uniform(random.split(key)[1], x.shape),
    "a row": lambda key, x: random.uniform(KEYS[1], x.shape),
    "dropout": lambda key, x: random.dropout(key, x, 0.5),
}
STEP, KEYS = torch.tensor(4), random.split(random.key(1), 3)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("how", CLOSED)
def test_a_key_that_is_closed_over_is_refused_and_the_advice_works(how: str, captured: bool) -> None:
    """All slices would have the same masks."""

    def closed(state: Any, x: Tensor) -> Any:
        def loss(w: Tensor, x: Tensor) -> Tensor:
            return (w * CLOSED[how](state["key"], x)).sum()

        return state, fcg.microbatches(2)(fcg.value_and_grad(loss))(state["w"], x)[1]

    def passed(state: Any, x: Tensor) -> Any:
        def loss(w: Tensor, x: Tensor, *, key: Tensor) -> Tensor:
            return (w * CLOSED[how if how != "a row" else "drawn"](key, x)).sum()

        return state, fcg.microbatches(2)(fcg.value_and_grad(loss))(state["w"], x, key=state["key"])[1]

    def run(step: Any) -> Any:
        options: Any = {"constants": (STEP, KEYS)}
        return (fcg.graph_step(step, **options) if captured else step)(
            {"w": torch.ones(2), "key": random.key(0)}, torch.ones(4, 2)
        )

    with pytest.raises(fcg.CaptureError, match=r"draws from one key in several micro-batches(.|\n)*key=key"):
        run(closed)
    run(passed)


def test_numbers_of_a_slice_may_be_folded_into_one_key() -> None:
    """Draws for each example, whatever slice it is in."""
    key = random.key(3)

    def draw(_: Any, ids: Tensor) -> Any:
        return {"u": torch.stack([random.uniform(random.fold_in(key, i), ()) for i in ids])}

    out = fcg.microbatches(2)(draw)(None, torch.arange(4))
    expected = [random.uniform(random.fold_in(key, i), ()) for i in range(4)]
    close(out["u"], torch.stack([expected[0] + expected[2], expected[1] + expected[3]]) / 2)


def test_a_key_is_seen_through_micro_batches_of_micro_batches() -> None:
    key = random.key(3)

    def inner(w: Tensor, x: Tensor) -> Tensor:
        return (w * random.dropout(key, x, 0.5)).sum()

    def outer(w: Tensor, x: Tensor) -> Any:
        return fcg.microbatches(1)(inner)(w, x)

    with pytest.raises(fcg.CaptureError, match="draws from one key in several micro-batches"):
        fcg.microbatches(2)(fcg.value_and_grad(outer))(torch.ones(2), torch.ones(4, 2))


def test_each_slice_has_a_key_of_its_own() -> None:
    key = random.key(3)

    def draw(_: Any, batch: Tensor, *, key: Tensor) -> dict[str, Tensor]:
        return {"u": random.uniform(key, (2,))}

    out = fcg.microbatches(2)(draw)(None, torch.zeros(4), key=key)
    expected = [random.uniform(random.fold_in(key, i), (2,)) for i in range(2)]
    close(out["u"], (expected[0] + expected[1]) / 2)


def test_key_none_and_further_arguments_are_handed_on() -> None:
    def loss(w: Tensor, x: Tensor, scale: float, *, key: Any = None) -> Tensor:
        assert key is None
        return (w * x).mean() * scale

    _, grads = fcg.microbatches(2)(fcg.value_and_grad(loss))(
        torch.tensor(1.0), torch.arange(4.0), 2.0, key=None
    )
    assert grads.item() == 3.0


def test_carried_argument_is_handed_on_and_the_last_one_returned() -> None:
    def total(w: Tensor, x: Tensor, *, kept: Any) -> Any:
        kept = {"sum": kept["sum"] * w + x.sum(), "count": kept["count"] + 1}
        return kept["sum"] * w, {"kept": kept, "mean": x.mean()}

    start = {"count": torch.tensor(5), "sum": torch.tensor(1.0)}
    grads_of = fcg.microbatches(2, carry="kept")(fcg.value_and_grad(total, has_aux=True))
    (value, aux), _ = grads_of(torch.tensor(2.0), torch.arange(4.0), kept=start)
    assert fcg.tree.map(Tensor.item, aux["kept"]) == {"count": 7, "sum": (1 * 2 + 1) * 2 + 5}
    assert (value.item(), aux["mean"].item()) == ((6 + 22) / 2, 1.5)
    assert fcg.tree.map(Tensor.item, start) == {"count": 5, "sum": 1.0}


@pytest.mark.parametrize(
    ("result", "row"),
    [
        ({"sum": torch.ones(())}, r"kept\['sum'\]  expected one   got 0"),
        ({"kept": {"other": torch.ones(())}}, r"kept\['sum'\]  expected one   got 0"),
        ({"kept": {"sum": torch.ones(()), "other": torch.ones(())}}, r"kept\['other'\]  expected nothing"),
        ([{"kept": {"sum": torch.ones(())}}] * 2, r"kept\['sum'\]  expected one   got 2"),
    ],
)
def test_carried_argument_that_is_not_returned_is_refused(result: Any, row: str) -> None:
    run = fcg.microbatches(2, carry="kept")(lambda params, x, kept: result)
    with pytest.raises(LayoutError, match=rf"does not hand on `kept`(.|\n)*{row}(.|\n)*return loss, "):
        run(None, torch.ones(4), kept={"sum": torch.zeros(())})
    with pytest.raises(TypeError, match=r"called without a keyword argument `kept`(.|\n)*batch, kept=\.\.\."):
        run(None, torch.ones(4), {"sum": torch.zeros(())})


def test_a_second_batch_is_refused_and_the_advice_works() -> None:
    """Only the second argument is cut: ``y`` would meet each slice of ``x`` as a whole, and may broadcast."""
    x, y, w = torch.arange(4.0), torch.tensor([1.0, -1.0, 2.0, 0.0]), torch.tensor(2.0)
    losses = fcg.microbatches(2)(fcg.value_and_grad(lambda w, x, y: (w * x - y[:, None]).square().mean()))
    with pytest.raises(
        fcg.LayoutError, match=r"args\[0\]  f32\[4\](.|\n)*To fix: pass one batch, `\(x, y\)`"
    ):
        losses(w, x, y)
    together = fcg.value_and_grad(
        lambda w, batch, scale=1.0: (scale * w * batch[0] - batch[1]).square().mean()
    )
    torch.testing.assert_close(fcg.microbatches(2)(together)(w, (x, y)), together(w, (x, y)))
    assert fcg.microbatches(2)(together)(w, (x, y), scale=torch.ones(4)[:1])
    shared = fcg.value_and_grad(lambda w, x, rows: (w * x).mean() * rows.sum())
    assert fcg.microbatches(2)(shared)(w, x, rows=y) == shared(w, x, y)
    assert fcg.microbatches(1)(shared)(w, x, y) == shared(w, x, y)


def test_uneven_batch_is_refused_with_all_rows() -> None:
    batch = {"x": torch.ones(6, 2), "y": torch.ones(5), "n": torch.tensor(1), "s": "text"}
    with pytest.raises(LayoutError, match=r"cannot be cut into 3 equal micro-batches") as error:
        fcg.microbatches(3)(fcg.value_and_grad(lambda p, b: p.sum()))(torch.ones(2), batch)
    text = str(error.value)
    assert "batch['x']" not in text
    for row in ("batch['y']", "batch['n']", "batch['s']"):
        assert f"{row}  expected a tensor whose first dimension divides by 3" in text


@pytest.mark.parametrize("k", [1, 2])
def test_result_that_is_no_tensor_is_refused(k: int) -> None:
    with pytest.raises(LayoutError, match=r"result\['n'\]  expected a tensor   got int"):
        fcg.microbatches(k)(lambda p, b: {"n": 3})(None, torch.ones(4))


@pytest.mark.parametrize("k", [0, -1, 2.0, "2"])
def test_number_of_slices_is_a_positive_int(k: Any) -> None:
    with pytest.raises(ValueError, match=r"microbatches: expected a positive int, got"):
        fcg.microbatches(k)


@given(mask=st.lists(st.booleans(), min_size=8, max_size=8).filter(any), k=st.sampled_from([1, 2, 4]))
def test_a_sum_over_tokens_is_that_of_one_batch(mask: list[bool], k: int) -> None:
    batch = torch.arange(16.0).view(8, 2), torch.tensor(mask)

    def loss(w: Tensor, batch: Any) -> Any:
        return ((batch[0] * w).square().sum(1) * batch[1]).sum(), {"tokens": batch[1].sum()}

    (total, aux), grad = fcg.microbatches(k, reduce="sum")(fcg.value_and_grad(loss, has_aux=True))(
        torch.ones(2), batch
    )
    chosen = batch[0][batch[1]]
    assert aux["tokens"] == len(chosen)
    assert torch.equal(total / aux["tokens"], chosen.square().sum(1).mean())
    assert torch.equal(grad / aux["tokens"], 2 * chosen.square().mean(0))


def test_results_are_averaged_or_summed() -> None:
    with pytest.raises(
        ValueError, match=r"reduce must be 'mean' or 'sum', got 'tokens'\.\nTo fix: .*`reduce=\"sum\"`"
    ):
        fcg.microbatches(2, reduce="tokens")  # type: ignore[arg-type]


def test_microbatches_in_a_captured_step_equal_eager() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        def loss(p: dict[str, Tensor], x: Tensor, *, key: Tensor) -> Tensor:
            return mlp(p, random.dropout(key, x, 0.5))

        value, grads = fcg.microbatches(2)(fcg.value_and_grad(loss))(state["params"], batch, key=state["key"])
        new = tree.map(lambda p, g: p - g, state["params"], grads)
        return {"params": new, "key": random.fold_in(state["key"], 1)}, {"loss": value}

    start = {"params": mlp_params(), "key": random.key(1)}
    captured, batch = fcg.graph_step(step), torch.randn(4, 3, dtype=torch.float64)
    state, metrics = captured(start, batch)
    expected, expected_metrics = step(start, batch)
    close(metrics, expected_metrics, rtol=0, atol=0)
    close(fcg.snapshot(state), expected, rtol=0, atol=0)


def test_gradients_stay_on_the_thread_that_the_caller_wants() -> None:
    """Autograd has a thread for each GPU, on which a capture sees another thread's work."""
    seen = []

    def loss(w: Tensor) -> Tensor:
        w.register_hook(lambda grad: seen.append(torch.autograd.is_multithreading_enabled()))
        seen.append(torch.autograd.is_multithreading_enabled())
        return w.sum()

    for enabled in (True, False):
        with torch.autograd.set_multithreading_enabled(enabled):
            fcg.grad(loss)(torch.ones(2))
    assert seen == [True, True, False, False]


@pytest.mark.parametrize("transform", [fcg.value_and_grad, fcg.grad])
def test_what_is_no_function_is_refused_at_once(transform: Any) -> None:
    with pytest.raises(TypeError, match="value_and_grad: expected a function, got Tensor"):
        transform(torch.ones(2))


def test_flags_and_small_numbers_are_counted() -> None:
    def counts(_: Any, x: Tensor) -> Any:
        return {"flags": (x > 0).any(), "small": torch.full((), 200, dtype=torch.uint8)}

    found = fcg.microbatches(4, reduce="sum")(counts)(None, torch.ones(8))
    assert (found["flags"].item(), found["small"].item()) == (4, 800)
