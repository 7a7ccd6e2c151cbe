"""Layout changes are refused: a new state unlike the old one, inputs unlike the captured ones."""

import enum
import re

import numpy
import pytest
import torch

import functional_cg as fcg
from functional_cg import LayoutError
from tests.refusals.judge import SpyBackend, a_batch, a_state, assert_refused, assert_still_good, same

# -- what a step returns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "rows"),
    [
        (lambda s: {"w": s["w"][None], "n": s["n"]}, ["state['w']  expected f32[3]@cpu   got f32[1,3]@cpu"]),
        (lambda s: {"w": s["w"].sum(), "n": s["n"]}, ["state['w']  expected f32[3]@cpu   got f32[]@cpu"]),
        (lambda s: {"w": s["w"].double(), "n": s["n"]}, ["state['w']  expected f32[3]@cpu   got f64[3]@cpu"]),
        (
            lambda s: {"w": s["w"].half(), "n": s["n"] * 0.5},
            [
                "state['n']  expected i64[]@cpu   got f32[]@cpu",
                "state['w']  expected f32[3]@cpu   got f16[3]@cpu",
            ],
        ),
        (lambda s: {"w": s["w"], "n": 3}, ["state['n']  expected i64[]@cpu   got int"]),
        (lambda s: {"w": s["w"], "n": None}, ["state['n']  expected a leaf   got None"]),
        (lambda s: {"w": s["w"]}, ["state['n']  expected a leaf   got nothing"]),
        (lambda s: {**s, "z": s["w"]}, ["state['z']  expected nothing   got a leaf"]),
        (lambda s: [s["w"], s["n"]], ["state  expected dict with 2 children   got list with 2 children"]),
        (
            lambda s: {"w": s["w"].double(), "a": s["n"], "b": s["n"]},
            [
                "state['n']  expected a leaf   got nothing",
                "state['a']  expected nothing   got a leaf",
                "state['b']  expected nothing   got a leaf",
            ],
        ),
    ],
)
def test_new_state_unlike_the_old_one(returned, rows):
    def step(s, b):
        return returned(s), {}

    message = assert_refused(step, LayoutError, "returns a new state that is unlike the old one")
    assert sorted(line.strip() for line in message.splitlines() if line.startswith("  ")) == sorted(rows)


def test_a_list_that_has_become_a_tuple():
    """As by ``torch._foreach_add``."""

    def of(kind):
        return fcg.graph_step(lambda s, b: ({**s, "m": [kind(torch._foreach_add(s["m"][0], 1.0))]}, {}))

    state = {"w": torch.ones(2), "m": [[torch.ones(2), torch.ones(3)]]}
    with pytest.raises(
        LayoutError, match=r"To fix: return it as it was, `state\['m'\]\[0\]` as `list\(...\)`"
    ):
        of(tuple)(state, a_batch())
    state, _ = of(list)(state, a_batch())
    assert state["m"][0][1].tolist() == [2.0] * 3


def test_new_train_state_lists_all_differences():
    params = {f"w{i}": torch.ones(2) for i in range(8)}
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))

    def step(s, b):
        return s.replace(params={name: w.double() for name, w in s.params.items()}), {}

    with pytest.raises(LayoutError, match=r"state\.params\['w0'\]  expected f32\[2\](.|\n)*… and 3 more"):
        fcg.graph_step(step)(state, a_batch())
    assert state.generation == 0


@pytest.mark.parametrize("call", ["__call__", "eager"])
def test_what_a_step_returned_is_to_be_unpacked(call):
    def step(s, b):
        return {**s, "w": s["w"] + 1}, {"sum": b["x"].sum()}

    step = fcg.graph_step(step)
    pair = step(a_state(), a_batch())
    with pytest.raises(
        LayoutError, match=r"called with a pair(.|\n)*To fix: unpack .*`s, metrics = step\(s, ...\)`"
    ):
        getattr(step, call)(pair, a_batch())
    state, _ = pair
    assert getattr(step, call)(state, a_batch())[0].generation == 2


def test_state_that_is_a_tuple_of_a_state_and_more_is_accepted():
    tree = (fcg.place({"w": torch.ones(2)}), {"n": torch.zeros(())})
    assert fcg.graph_step(lambda s, b: (s, {}))(tree, a_batch())[0].generation == 1


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (lambda s: s, "dict"),
        (lambda s: [s, {}], "list of 2"),
        (lambda s: (s, {}, {}), "tuple of 3"),
        (lambda s: (s,), "tuple of 1"),
        (lambda s: None, "nothing"),
        (lambda s: s["w"], "a tensor, f32[3]@cpu"),
    ],
)
def test_not_a_pair(result, got):
    def step(s, b):
        return result(s)

    got = re.escape(got)
    match = rf"does not return a pair(.|\n)*expected \(state, metrics\)   got {got}\n(.|\n)*To fix: `return state, "
    assert_refused(step, LayoutError, match)


def test_the_eager_run_refuses_the_same():
    def wrong(s, b):
        return {"w": s["w"][None], "n": s["n"]}, {}

    for function, match in ((lambda s, b: s, "does not return a pair"), (wrong, "unlike the old one")):
        state = a_state()
        before = fcg.snapshot(state)
        with pytest.raises(LayoutError, match=match):
            fcg.graph_step(function).eager(state, a_batch())
        assert_still_good(state, before, 0)


# -- what a step is called with ---------------------------------------------------------------------------------


class Mode(enum.Enum):
    """A setting among the inputs."""

    TRAIN = 1
    TEST = 2


SHAPES = [(), (1,), (3,), (1, 1), (1, 3), (4, 1), (3, 4), (2, 3), (5, 3), (0, 3), (12,), (1, 4, 3), (4, 3, 1)]
DTYPES = [
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.fixture(scope="module")
def captured():
    """A step after its first call, the state, and the spy that counts captures."""
    backend = SpyBackend()
    step = fcg.graph_step(lambda s, b, *, mode=None: ({**s, "w": s["w"] + b["x"].sum()}, {}), backend=backend)
    state, _ = step(a_state(), {"x": torch.ones(4, 3)}, mode="train")
    return step, state, backend


def assert_other_layout(captured, row, *args, **kwargs):
    step, state, backend = captured
    before, replays = fcg.snapshot(state), step.stats.replays
    with pytest.raises(LayoutError, match=re.escape(f"\n  {row}\n")) as caught:
        step(state, *args, **kwargs)
    assert "the state is unchanged" in str(caught.value)
    assert (step.stats.traces, backend.captures, step.stats.replays) == (1, 1, replays)
    assert state.generation == 1
    assert same(fcg.snapshot(state), before)


@pytest.mark.parametrize("shape", SHAPES)
def test_input_of_another_shape(captured, shape):
    shown = ",".join(map(str, shape))
    row = f"b['x']  expected f32[4,3]@cpu   got f32[{shown}]@cpu"
    assert_other_layout(captured, row, {"x": torch.ones(shape)}, mode="train")
    assert_other_layout(captured, row, {"x": numpy.ones(shape, dtype=numpy.float32)}, mode="train")


@pytest.mark.parametrize("dtype", DTYPES)
def test_input_of_another_dtype(captured, dtype):
    step, state, backend = captured
    with pytest.raises(LayoutError, match=r"b\['x'\]  expected f32\[4,3\]@cpu   got (?!f32)\w+\[4,3\]@cpu"):
        step(state, {"x": torch.ones(4, 3).to(dtype)}, mode="train")
    assert backend.captures == 1


X = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("batch", "mode", "row"),
    [
        ({}, "train", "b['x']  expected f32[4,3]@cpu   got nothing"),
        ({"x": X, "y": X}, "train", "b['y']  expected nothing   got f32[4,3]@cpu"),
        ({"z": X}, "train", "b['z']  expected nothing   got f32[4,3]@cpu"),
        ({"x": None}, "train", "b['x']  expected f32[4,3]@cpu   got nothing"),
        ({"x": [X]}, "train", "b['x'][0]  expected nothing   got f32[4,3]@cpu"),
        ([X], "train", "b[0]  expected nothing   got f32[4,3]@cpu"),
        ({"x": "hello"}, "train", "b['x']  expected f32[4,3]@cpu   got str 'hello'"),
        ({"x": 1.0}, "train", "b['x']  expected f32[4,3]@cpu   got f32[]@cpu"),
        ({"x": numpy.ones((4, 3))}, "train", "b['x']  expected f32[4,3]@cpu   got f64[4,3]@cpu"),
        ({"x": X}, "test", "mode  expected str 'train'   got str 'test'"),
        ({"x": X}, None, "mode  expected str 'train'   got nothing"),
        ({"x": X}, Mode.TEST, f"mode  expected str 'train'   got Mode {Mode.TEST!r}"),
        ({"x": X}, 1, "mode  expected str 'train'   got i64[]@cpu"),
        ({"x": X}, X, "mode  expected str 'train'   got f32[4,3]@cpu"),
    ],
)
def test_input_of_another_structure(captured, batch, mode, row):
    assert_other_layout(captured, row, batch, mode=mode)


def test_missing_and_further_arguments(captured):
    assert_other_layout(captured, "b['x']  expected f32[4,3]@cpu   got nothing", mode="train")
    assert_other_layout(
        captured, "extra['x']  expected nothing   got f32[4,3]@cpu", {"x": X}, mode="train", extra={"x": X}
    )


def test_all_differences_are_listed():
    step = fcg.graph_step(lambda s, b: (s, {}))
    state, _ = step(a_state(), {name: torch.ones(2) for name in "abcdefg"})
    with pytest.raises(
        LayoutError, match=r"b\['a'\]  expected f32\[2\]@cpu   got f32\[3\]@cpu\n(.|\n)*… and 2 more"
    ):
        step(state, {name: torch.ones(3) for name in "abcdefg"})


@pytest.mark.parametrize(
    ("convert", "match"),
    [
        (lambda x: x.to("meta"), "expected a dense tensor on cpu   got f32"),
        (torch.Tensor.to_sparse, r"torch\.sparse_coo"),
        (torch.Tensor.to_sparse_csr, r"torch\.sparse_csr"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_input_that_cannot_be_copied_in(convert, match):
    state, x = a_state(), convert(torch.ones(4, 3))
    with pytest.raises(
        LayoutError, match=f"inputs that cannot be copied in; the state is unchanged(.|\n)*{match}"
    ):
        fcg.graph_step(lambda s, b: (s, {}))(state, {"x": x})
    assert_still_good(state, fcg.snapshot(a_state()), 0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_input(captured):
    step, state, _ = captured
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(LayoutError, match=r"b\['x'\]  .* nested tensor(.|\n)*to_padded_tensor"):
        step(state, {"x": nested}, mode="train")
    with pytest.raises(LayoutError, match="nested tensor"):
        fcg.graph_step(lambda s, b: (s, {}))(a_state(), nested)


def test_what_is_not_another_layout():
    """Strides, parameters, numpy and the order of a dict's keys are no part of a layout; conjugates are resolved."""
    step = fcg.graph_step(lambda s, b: (s, (b["x"] * 2, b["z"] * 1)))
    z = torch.tensor([1 + 2j])
    state, (first, _) = step(a_state(), {"x": X, "z": z})
    for x in (
        torch.ones(3, 4).t(),
        torch.ones(1, 3).expand(4, 3),
        torch.nn.Parameter(torch.ones(4, 3)),
        numpy.ones((4, 3), dtype=numpy.float32),
        numpy.ones((3, 4), dtype=numpy.float32).T[::-1],
        fcg.place({"x": X})["x"],
    ):
        state, (out, conjugate) = step(state, {"z": z.conj(), "x": x})
        assert same(out, first)
        assert conjugate.tolist() == [1 - 2j]
    assert (step.stats.traces, step.stats.captures) == (1, 1)


def test_advice_for_another_layout_works():
    step = fcg.graph_step(lambda s, b: (s, b.sum()), max_captures=2)
    state = a_state()
    for size in (4, 3, 4, 3):
        state, total = step(state, torch.ones(size))
        assert total == size
    assert (step.stats.traces, step.stats.captures) == (2, 2)
    with pytest.raises(LayoutError, match=r"\(max_captures=2\)(.|\n)*`graph_step\(max_captures=3\)`"):
        step(state, torch.ones(5))


def test_state_of_another_layout():
    step = fcg.graph_step(lambda s, b: (s, {}))
    step(a_state(), a_batch())
    for tree, row in (
        ({"w": torch.ones(4), "n": torch.tensor(0)}, "s['w']  expected f32[3]@cpu   got f32[4]@cpu"),
        ({"w": torch.ones(3), "n": torch.tensor(0.0)}, "s['n']  expected i64[]@cpu   got f32[]@cpu"),
        ({"w": torch.ones(3)}, "s['n']  expected a leaf   got nothing"),
    ):
        for state in (tree, fcg.place(tree)):
            with pytest.raises(LayoutError, match=re.escape(row)):
                step(state, a_batch())
    assert step.stats.traces == 1


def test_tree_that_is_no_state():
    step = fcg.graph_step(lambda s, b: (s, {}))
    with pytest.raises(
        LayoutError,
        match=r"`s` has leaves that cannot be placed(.|\n)*s\['n'\]  expected a (dense )?tensor   got str",
    ):
        step({"w": torch.ones(3), "n": "adam"}, a_batch())
    with pytest.raises(TypeError, match="the state must be the first argument"):
        step(b=a_batch())


# -- static arguments -------------------------------------------------------------------------------------------


def scaled(s, b, k=2):
    return s, b["s"] * k


def test_static_arguments():
    step = fcg.graph_step(scaled, static_argnames="k")
    state = a_state()
    for k in (2, 3, 2, 3):
        state, out = step(state, a_batch(), k=k)
        assert out == 2.0 * k
    state, out = step(state, a_batch(), 5)
    assert out == 10.0
    assert step.stats.traces == 3


def test_static_values_that_are_equal_but_not_the_same():
    def shown(s, b, k):
        return s, {"k": k if isinstance(k, bool) else type(k).__name__, "sign": b["s"] * 0.0 * k}

    step, state = fcg.graph_step(shown, static_argnames=("k",)), a_state()
    for k, expected in ((1, "int"), (1.0, "float"), (True, True), (1, "int")):
        state, metrics = step(state, a_batch(), k=k)
        assert metrics["k"] == expected
    for k, negative in ((0.0, False), (-0.0, True)):
        state, metrics = step(state, a_batch(), k=k)
        assert torch.signbit(metrics["sign"]) == negative


@pytest.mark.parametrize(
    ("names", "error", "match"),
    [
        (("z",), ValueError, "`scaled`: static_argnames names no parameter: z"),
        ("z", ValueError, "`scaled`: static_argnames names no parameter: z"),
        (1, TypeError, "`scaled`: static_argnames must be names of parameters, got 1"),
        (("k", 0), TypeError, r"`scaled`: static_argnames must be names of parameters, got \('k', 0\)"),
    ],
)
def test_static_names_are_checked_at_once(names, error, match):
    with pytest.raises(error, match=match):
        fcg.graph_step(scaled, static_argnames=names)


def test_static_argument_that_is_not_hashable():
    state = a_state()
    with pytest.raises(TypeError, match="static argument `k` must be hashable, got list"):
        fcg.graph_step(scaled, static_argnames=("k",))(state, a_batch(), k=[2])
    assert_still_good(state, fcg.snapshot(a_state()), 0)
    summed = fcg.graph_fn(lambda state, x, k: x * sum(k), static_argnames=("k",))
    with pytest.raises(TypeError, match="To fix: pass a tuple"):
        summed(a_state(), torch.ones(2), k=[1, 2])
    assert torch.equal(summed(a_state(), torch.ones(2), k=(1, 2)), torch.full((2,), 3.0))


def test_too_many_static_combinations():
    step, state = fcg.graph_step(scaled, static_argnames=("k",)), a_state()
    for k in range(8):
        state, _ = step(state, a_batch(), k=k)
    with pytest.raises(LayoutError, match="more than 8 combinations of static arguments"):
        step(state, a_batch(), k=8)
    state, out = step(state, a_batch(), k=7)
    assert out == 14.0


# -- the fix fits the difference --------------------------------------------------------------------------------

MORE = "to pay for one more graph, use `graph_step(max_captures=2)`."
B = {"x": torch.ones(4, 3), "y": torch.ones(4), "mode": "train", "lr": 0.5, "pair": (1.0, 2.0)}
FIXES = {
    "last batch": (
        {**B, "x": torch.ones(2, 3), "y": torch.ones(2)},
        f"pad the last batch or drop it; {MORE}",
    ),
    "another size": ({**B, "x": torch.ones(4, 5)}, f"give `b['x']` the shape that it had; {MORE}"),
    "another rank": ({**B, "x": torch.ones(3)}, f"give `b['x']` the shape that it had; {MORE}"),
    "dtype": (
        {**B, "x": torch.ones(4, 3).double()},
        "convert it, `b['x'].to(torch.float32)`, or `.astype(...)`",
    ),
    "number": ({**B, "lr": 1}, "pass `float(b['lr'])`."),
    "string": (
        {**B, "mode": "test"},
        "make `b['mode']` an argument of its own and name it in `static_argnames`",
    ),
    "misspelt": (
        {"X": B["x"], **{k: v for k, v in B.items() if k != "x"}},
        "did you mean `b['x']` by `b['X']`?",
    ),
    "extra": ({**B, "mask": B["y"]}, f"leave `b['mask']` out; {MORE}"),
    "missing": ({k: v for k, v in B.items() if k != "y"}, f"pass `b['y']` as before; {MORE}"),
    "longer": ({**B, "pair": (1.0, 2.0, 3.0)}, f"leave `b['pair'][2]` out; {MORE}"),
    "list for dict": (list(B.values()), f"pass a dict as `b`; {MORE}"),
    "list for tuple": ({**B, "pair": [1.0, 2.0]}, f"pass a tuple as `b['pair']`; {MORE}"),
    "None for tensor": ({**B, "y": None}, f"pass a tensor as `b['y']`; {MORE}"),
    "tree for tensor": ({**B, "y": {"a": B["y"]}}, "pass a tensor as `b['y']`"),
    "empty for tensor": ({**B, "y": ()}, "pass a tensor as `b['y']`"),
    "state for batch": (a_state(), "pass a state as `s`, as in the first call, and nowhere else"),
}


@pytest.mark.parametrize(("batch", "fix"), FIXES.values(), ids=FIXES)
def test_the_fix_fits_the_difference(batch, fix):
    step, state = fcg.graph_step(lambda s, b: (s, {})), a_state()
    state, _ = step(state, B)
    with pytest.raises(LayoutError, match=rf"max_captures=1(.|\n)*\nTo fix: {re.escape(fix)}"):
        step(state, batch)
    step(state, B)


def test_the_fix_for_a_whole_argument_and_for_a_graph_fn():
    def show(x, mode, scale=1.0):
        return x * scale, mode

    fn = fcg.graph_fn(show)
    fn(torch.ones(4), "train")
    for args, kwargs, fix in (
        ((torch.ones(3), "train"), {}, "use `graph_fn(max_captures=2)`"),
        ((torch.ones(4), "test"), {}, 'name it, `static_argnames=("mode",)`: each value'),
        ((torch.ones(4), "train"), {"scale": 2.0}, "leave `scale` out"),
        ((torch.ones(4), "train"), {"sclae": 2.0}, "leave `sclae` out"),
        ((torch.ones(4),), {"moed": "train"}, "did you mean `mode` by `moed`?"),
    ):
        with pytest.raises(LayoutError, match=rf"^`show`: (.|\n)*{re.escape(fix)}"):
            fn(*args, **kwargs)
    static = fcg.graph_fn(show, static_argnames=("mode",))
    assert [static(torch.ones(1), mode)[1] for mode in ("train", "test", "train")] == [
        "train",
        "test",
        "train",
    ]


def test_state_and_batch_in_the_wrong_order():
    step = fcg.graph_step(lambda s, b: (s, {}))
    state, _ = step(a_state(), {"x": torch.ones(2)})
    with pytest.raises(
        LayoutError, match=r"b  expected no state   got one(.|\n)*as `s`(.|\n)*order of the arguments"
    ):
        step({"x": torch.ones(2)}, state)
    step(state, {"x": torch.ones(2)})


def test_the_fix_for_a_state_of_another_layout():
    step = fcg.graph_step(lambda s, b: (s, {}))
    step({"w": torch.ones(2)}, 1.0)
    with pytest.raises(
        LayoutError,
        match=r"To fix: make a step for each layout of the state, `graph_step\(step.__wrapped__\)`",
    ):
        step({"w": torch.ones(3)}, 1.0)
