"""Laws of the optimizer algebra: composition, values, masks, hyper-parameters, layouts, tracing."""

from __future__ import annotations

import inspect
import math
import pickle
import re
import typing
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import functional_cg as fcg
from functional_cg import optim, tree
from functional_cg.errors import DonatedStateError, LayoutError
from functional_cg.state.handle import place

DECAY = {"w": True, "b": False}
SCHEDULE = optim.warmup_cosine(0.1, 2, 10)

TRANSFORMATIONS = [
    optim.identity(),
    optim.set_to_zero(),
    optim.scale(0.5),
    optim.scale_by_schedule(SCHEDULE),
    optim.scale_by_learning_rate(0.1),
    optim.scale_by_learning_rate(SCHEDULE),
    optim.trace(0.9, nesterov=True),
    optim.scale_by_adam(),
    optim.scale_by_adam(bias_correction=False),
    optim.scale_by_rss(),
    optim.scale_by_trust_ratio(),
    optim.scale_by_yogi(),
    optim.add_decayed_weights(0.1, mask=DECAY),
    optim.clip_by_global_norm(0.5),
    optim.clip_by_global_norm(0.5, math.inf),
    optim.clip_by_global_norm(0.5, 3),
    optim.clip_by_value(0.5),
    optim.clip_by_norm(0.5),
    optim.clip_by_rms(0.5),
    optim.adaptive_clip(0.1),
    optim.centralize(),
    optim.freeze(DECAY),
    optim.scale_by_adadelta(),
    optim.scale_by_adamax(),
    optim.scale_by_amsgrad(),
    optim.scale_by_belief(),
    optim.scale_by_factored_rms(),
    optim.scale_by_lars(0.1, mask=DECAY),
    optim.scale_by_lion(),
    optim.scale_by_nadam(),
    optim.scale_by_novograd(),
    optim.scale_by_param_rms(),
    optim.scale_by_radam(),
    optim.scale_by_rms(centered=True),
]
OPTIMIZERS = [
    optim.sgd(0.1),
    optim.sgd(SCHEDULE, momentum=0.9),
    optim.sgd(0.1, momentum=0.9, nesterov=True),
    optim.sgd(SCHEDULE, weight_decay=0.2),
    optim.sgd(0.1, momentum=0.9, weight_decay=0.2, mask=DECAY),
    optim.inject_hyperparams(optim.sgd)(learning_rate=0.1, momentum=0.5, weight_decay=0.2),
    optim.adam(0.1),
    optim.adam(SCHEDULE),
    optim.adamw(0.1, weight_decay=0.1),
    optim.adamw(SCHEDULE, weight_decay=0.1, mask=DECAY),
    optim.adagrad(0.1),
    optim.adagrad(SCHEDULE, initial_accumulator_value=0.1),
    optim.lamb(0.1, weight_decay=0.1, mask=DECAY),
    optim.lamb(0.1, weight_decay=0.0, bias_correction=False),
    optim.yogi(SCHEDULE),
    optim.adabelief(SCHEDULE),
    optim.adadelta(SCHEDULE),
    optim.adafactor(SCHEDULE, weight_decay=0.1, mask=DECAY),
    optim.adamax(0.1),
    optim.amsgrad(0.1),
    optim.lars(0.1, weight_decay=0.1, mask=DECAY),
    optim.lion(SCHEDULE, weight_decay=0.1, mask=DECAY),
    optim.muon(SCHEDULE, weight_decay=0.1),
    optim.muon(0.1, weight_decay=0.1, labels={"w": "muon", "b": "adamw"}),
    optim.nadam(SCHEDULE),
    optim.novograd(0.1, weight_decay=0.1, mask=DECAY),
    optim.radam(0.1),
    optim.rmsprop(0.1, momentum=0.9),
    optim.lookahead(optim.adamw(0.1, weight_decay=0.1), sync_period=3),
    optim.ema(optim.adamw(0.1, weight_decay=0.1), 0.9),
    optim.inject_hyperparams(optim.ema)(inner=optim.sgd(0.1), decay=0.5),
    optim.schedule_free(optim.sgd(SCHEDULE), SCHEDULE),
    optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(SCHEDULE, weight_decay=0.1, mask=DECAY)),
    optim.chain(optim.add_decayed_weights(0.1), optim.chain(optim.sgd(0.1))),
    optim.chain(optim.masked(optim.scale(0.5), DECAY), optim.trace(0.9), optim.scale(-0.1)),
    optim.partition(
        {"a": optim.adam(0.1), "z": optim.set_to_zero(), "unused": optim.yogi(0.1)}, {"w": "a", "b": "z"}
    ),
    optim.inject_hyperparams(optim.adamw)(learning_rate=0.1, weight_decay=0.1, mask=DECAY),
    optim.inject_hyperparams(optim.adamw, ("b1",))(learning_rate=0.1, b1=0.8, b2=0.99, weight_decay=0.1),
    optim.inject_hyperparams(optim.sgd)(learning_rate=0.1, momentum=0.9, nesterov=True),
    optim.inject_hyperparams(optim.lamb)(learning_rate=0.1, b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.1),
    optim.inject_hyperparams(optim.yogi)(learning_rate=0.1, b1=0.9, eps=1e-3),
    optim.inject_hyperparams(optim.adagrad)(learning_rate=0.1, eps=1e-10),
    optim.inject_hyperparams(optim.muon, ("ns_steps",))(learning_rate=0.1, momentum=0.9, weight_decay=0.1),
    optim.inject_hyperparams(optim.nadam)(learning_rate=0.1, b1=0.9, b2=0.9, eps=1e-8, momentum_decay=0.1),
    optim.inject_hyperparams(optim.adafactor)(learning_rate=0.1, decay_rate=0.8, clipping_threshold=1.0),
]
FLAT = [
    optim.flatten(optim.sgd(SCHEDULE, momentum=0.9)),
    optim.flatten(optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.1, weight_decay=0.1))),
    optim.flatten(optim.yogi(0.1)),
]
EVERY = [*TRANSFORMATIONS, *OPTIMIZERS, *FLAT]
WITH_STEP = [tx for tx in [*OPTIMIZERS, *FLAT] if tx.step is not None]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def fresh(*, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Any]:
    """A tree with a matrix, an empty leaf, a 0-dim one and one under a second level."""

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    return {"w": leaf(3, 4), "b": [leaf(0, 2), {"s": leaf()}, leaf(5)]}


def run(
    tx: optim.GradientTransformation, params: Any, grads: list[Any], *, fused: bool = False
) -> tuple[Any, Any]:
    state = tx.init(params)
    for grad in grads:
        if fused:
            assert tx.step is not None
            params, state = tx.step(grad, state, params)
        else:
            updates, state = tx.update(grad, state, params)
            params = optim.apply_updates(params, updates)
    return params, state


def assert_same(a: Any, b: Any) -> None:
    """Bitwise equal trees, dtypes and strides included."""
    (xs, a_def), (ys, b_def) = tree.flatten(a), tree.flatten(b)
    assert a_def == b_def
    for x, y in zip(xs, ys, strict=True):
        assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
        assert torch.equal(x, y)


def assert_near(a: Any, b: Any, *, steps: int) -> None:
    """Within 1e-6 (float32) a step of the largest number in the leaf, or of 1."""
    for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(
            x, y, rtol=0, atol=1e-6 * steps * max(1.0, y.abs().max().item() if y.numel() else 0)
        )


# Values


@pytest.mark.parametrize("tx", EVERY, ids=repr)
def test_transformations_are_values(tx: optim.GradientTransformation) -> None:
    copy = pickle.loads(pickle.dumps(tx))
    assert copy == tx
    assert hash(copy) == hash(tx)
    assert repr(copy) == repr(tx)
    assert sum(copy == other for other in EVERY) == 1


@pytest.mark.parametrize("tx", EVERY, ids=repr)
def test_repr_is_the_call_that_makes_it(tx: optim.GradientTransformation) -> None:
    assert eval(repr(tx), {**vars(optim), "optim": optim, "torch": torch, "inf": math.inf}) == tx


def test_a_mask_is_copied_and_its_writing_order_does_not_matter() -> None:
    mask = {"w": True, "b": False}
    tx = optim.adamw(0.1, weight_decay=0.1, mask=mask)
    mask["b"] = True
    assert tx == optim.adamw(0.1, weight_decay=0.1, mask={"b": False, "w": True})
    assert tx != optim.adamw(0.1, weight_decay=0.1, mask=mask)


def test_repr_shows_every_number() -> None:
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1, weight_decay=0.5))
    assert repr(tx) == (
        "chain(clip_by_global_norm(max_norm=1.0, order=2), "
        "adamw(learning_rate=0.1, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.5, mask=None))"
    )


@pytest.mark.parametrize("name", [name for name in dir(optim) if inspect.isclass(getattr(optim, name))])
def test_hints_of_arguments_are_those_of_any_class(name: str) -> None:
    """What makes a command line or a configuration of a signature asks for them, whichever module declares them."""
    assert "return" in typing.get_type_hints(getattr(optim, name).__init__) or name[0].isupper()


def test_frozen() -> None:
    with pytest.raises(AttributeError, match="cannot assign"):
        optim.sgd(0.1).learning_rate = 0.2  # type: ignore[misc]


# Every transformation


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tx", EVERY, ids=repr)
def test_layouts_are_kept_and_inputs_untouched(tx: optim.GradientTransformation, device: str) -> None:
    params, grads = fresh(device=device), fresh(device=device)
    state = tx.init(params)
    before = tree.map(torch.clone, (params, grads, state))
    updates, new_state = tx.update(grads, state, params)
    results = [(updates, new_state)]
    if tx.step is not None:
        results.append(tx.step(grads, state, params))
    for tree_out, state_out in results:
        for got, expected in ((tree_out, params), (state_out, state)):
            assert tree.flatten(got)[1] == tree.flatten(expected)[1]
            for x, y in zip(tree.leaves(got), tree.leaves(expected), strict=True):
                assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
    assert_same((params, grads, state), before)


@pytest.mark.parametrize("tx", [*TRANSFORMATIONS, *OPTIMIZERS], ids=repr)
def test_state_leaves_own_their_memory(tx: optim.GradientTransformation) -> None:
    params = fresh()
    grads = [fresh() for _ in range(2)]
    final, state = run(tx, params, grads)
    places = [x.untyped_storage().data_ptr() for x in tree.leaves((final, state)) if x.numel()]
    assert len(places) == len(set(places))


@pytest.mark.parametrize(
    "tx", [tx for tx in EVERY if not tx.parts and getattr(tx, "mask", None) is None], ids=repr
)
def test_a_tree_without_leaves(tx: optim.GradientTransformation) -> None:
    updates, _ = tx.update({"w": None}, tx.init({"w": None}), {"w": None})
    assert updates == {"w": None}
    if tx.step is not None:
        assert tx.step({"w": None}, tx.init({"w": None}), {"w": None})[0] == {"w": None}


class Recorder(TorchDispatchMode):
    """Notes every op, as a tracer does."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def advance(tx: optim.GradientTransformation, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    if tx.step is not None:
        return tx.step(grads, state, params)
    updates, state = tx.update(grads, state, params)
    return optim.apply_updates(params, updates), state


@pytest.mark.parametrize("tx", EVERY, ids=repr)
def test_traces_without_host_sync_or_host_data(tx: optim.GradientTransformation) -> None:
    params, grads = fresh(), fresh()
    state = tx.init(params)
    leaves, treedef = tree.flatten((grads, state, params))
    out_def: list[Any] = []
    recorder = Recorder()

    def flat(*values: Tensor) -> list[Tensor]:
        with recorder:
            out, structure = tree.flatten(advance(tx, *tree.unflatten(treedef, values)))
        out_def.append(structure)
        return out

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = [mode.from_tensor(leaf) for leaf in leaves]
    graph = make_fx(flat, tracing_mode="real")(*fake)
    banned = ("_local_scalar_dense", "lift_fresh", "nonzero", "_tensor_constant")
    names = [*map(str, recorder.ops), *(str(node.target) for node in graph.graph.nodes)]
    assert not [name for name in names if any(word in name for word in banned)]
    assert not [op for op in recorder.ops if op._schema.is_mutable]
    assert_same(tree.unflatten(out_def[0], graph(*leaves)), advance(tx, grads, state, params))


@pytest.mark.cuda
@pytest.mark.parametrize("tx", EVERY, ids=repr)
def test_replay_of_a_cuda_graph_equals_eager(tx: optim.GradientTransformation) -> None:
    params, *grads = [fresh(device="cuda") for _ in range(6)]
    eager, state = tree.map(torch.clone, (params, tx.init(params)))
    slots = tree.map(torch.clone, (params, tx.init(params), grads[0]))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        advance(tx, slots[2], slots[1], slots[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = advance(tx, slots[2], slots[1], slots[0])
        for slot, value in zip(tree.leaves(slots[:2]), tree.leaves(out), strict=True):
            slot.copy_(value)
    for grad in grads:
        tree.map(torch.Tensor.copy_, slots[2], grad)
        graph.replay()
        eager, state = advance(tx, grad, state, eager)
        assert_same(slots[:2], (eager, state))


@pytest.mark.parametrize("tx", OPTIMIZERS, ids=repr)
def test_init_traces_on_fake_tensors(tx: optim.GradientTransformation) -> None:
    real = tx.init(fresh())
    with FakeTensorMode() as mode:
        state = tx.init(tree.map(mode.from_tensor, fresh()))
    assert [x.shape for x in tree.leaves(state)] == [x.shape for x in tree.leaves(real)]


# The fused step


@pytest.mark.parametrize("tx", WITH_STEP, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", DEVICES)
def test_step_equals_update(tx: optim.GradientTransformation, dtype: torch.dtype, device: str) -> None:
    params = fresh(dtype=dtype, device=device)
    grads = [fresh(dtype=dtype, device=device) for _ in range(12)]
    assert_near(run(tx, params, grads, fused=True), run(tx, params, grads), steps=12)


def fused_ops(lr: float | Tensor) -> Iterator[tuple[str, list[int], dict[str, Any]]]:
    """Name, the columns that it returns, and keyword arguments of each fused op."""
    moments = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False}
    for name in ("_fused_adam", "_fused_adamw"):
        yield name, [0, 2, 3], {**moments, "lr": lr, "maximize": False}
    sgd = {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": True, "is_first_step": False}
    yield "_fused_sgd", [0, 2], {**sgd, "lr": lr, "maximize": False}
    yield (
        "_fused_adagrad",
        [0, 2],
        {"lr": lr, "lr_decay": 0.0, "weight_decay": 0.1, "eps": 1e-10, "maximize": False},
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_functional_ops_equal_the_in_place_ops(tensor_lr: bool, dtype: torch.dtype, device: str) -> None:
    for name, outputs, kwargs in fused_ops(torch.full((), 0.1, device=device) if tensor_lr else 0.1):
        columns = [tree.leaves(tree.map(torch.abs, fresh(dtype=dtype, device=device))) for _ in range(4)]
        columns = columns[: 4 if "adam" in name else 3]
        count = len(columns[0])

        def extra(*, shared: bool, count: int = count, name: str = name) -> list[Any]:
            one = torch.full((), 3.0, device=device)
            steps = [one] * count if shared else [one.clone() for _ in range(count)]
            return (
                [[], steps]
                if "adamw" in name or name == "_fused_adam"
                else [steps]
                if "adagrad" in name
                else []
            )

        in_place = [[leaf.clone() for leaf in column] for column in columns]
        overload = "tensor_lr" if tensor_lr else "default"
        shared = extra(shared=True)
        out = getattr(getattr(torch.ops.aten, name), overload)(*columns, *shared, **kwargs)
        getattr(getattr(torch.ops.aten, name + "_"), overload)(*in_place, *extra(shared=False), **kwargs)
        for i in outputs:
            assert_same(list(out[i]), in_place[i])
        assert all(step == 3.0 for steps in shared for step in steps), "the op writes its state_steps"


@pytest.mark.parametrize("tx", [optim.sgd(0.1, 0.9), optim.adam(0.1), optim.adagrad(0.1)], ids=repr)
def test_layouts_of_grads_and_params_do_not_matter(tx: optim.GradientTransformation) -> None:
    plain = [torch.randn(2, 3, 4, 5) for _ in range(4)]
    strange = [
        plain[0].to(memory_format=torch.channels_last),
        plain[1].transpose(0, 3).contiguous().transpose(0, 3),
        torch.cat([plain[2], plain[2]], 3)[..., :5],
    ]
    expected, _ = run(tx, {"w": plain[0]}, [{"w": g} for g in plain[1:3]], fused=True)
    for params in (strange[0], plain[0]):
        got, state = run(tx, {"w": params}, [{"w": g} for g in strange[1:]], fused=True)
        assert torch.equal(got["w"], expected["w"])
        assert got["w"].stride() == params.stride()
        assert {m.stride() for m in tree.leaves(state) if m.dim()} == {params.stride()}


def test_a_gradient_of_stride_zero() -> None:
    grad = torch.ones(()).expand(3, 4)
    expected, _ = run(optim.adam(0.1), {"w": torch.ones(3, 4)}, [{"w": grad.clone()}], fused=True)
    got, _ = run(optim.adam(0.1), {"w": torch.ones(3, 4)}, [{"w": grad}], fused=True)
    assert_same(got, expected)


def test_mixed_dtypes_are_grouped() -> None:
    params = {
        "half": torch.randn(4, dtype=torch.bfloat16),
        "full": torch.randn(4),
        "wide": torch.randn(4).double(),
    }
    grads = [tree.map(torch.randn_like, params) for _ in range(3)]
    tx = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(SCHEDULE, weight_decay=0.1))
    got, _ = run(optim.adamw(SCHEDULE, weight_decay=0.1), params, grads, fused=True)
    for name in params:
        alone, _ = run(
            optim.adamw(SCHEDULE, weight_decay=0.1), params[name], [g[name] for g in grads], fused=True
        )
        assert torch.equal(alone, got[name])
    run(tx, params, grads, fused=True)


def test_who_has_a_step() -> None:
    clip, adamw = optim.clip_by_global_norm(1.0), optim.adamw(0.1, weight_decay=0.1)
    assert optim.chain(clip, adamw).step is not None
    assert optim.chain(clip, optim.chain(adamw)).step is not None
    assert optim.chain(adamw, clip).step is None
    assert optim.chain().step is None
    assert optim.yogi(0.1).step is None
    assert optim.partition({0: adamw, 1: clip}, 0).step is not None
    assert optim.partition({0: clip}, 0).step is None


# Composition


def test_chain_equals_by_hand() -> None:
    links = (optim.clip_by_global_norm(0.5), optim.scale_by_adam(), optim.scale(-0.1))
    params, updates = fresh(), fresh()
    got, state = optim.chain(*links).update(updates, optim.chain(*links).init(params), params)
    states = []
    for link in links:
        updates, one = link.update(updates, link.init(params), params)
        states.append(one)
    assert_same((got, state), (updates, tuple(states)))


def test_chain_step_feeds_the_last_step() -> None:
    clip, adamw = optim.clip_by_global_norm(0.5), optim.adamw(0.1, weight_decay=0.1)
    params, grads = fresh(), fresh()
    tx = optim.chain(clip, adamw)
    assert tx.step is not None
    assert adamw.step is not None
    clipped, _ = clip.update(grads, (), params)
    expected, last = adamw.step(clipped, adamw.init(params), params)
    got, state = tx.step(grads, tx.init(params), params)
    assert_same((got, state[-1]), (expected, last))


@pytest.mark.parametrize(
    ("alias", "links"),
    [
        (optim.sgd(0.1, 0.9), [optim.trace(0.9), optim.scale_by_learning_rate(0.1)]),
        (optim.adam(SCHEDULE), [optim.scale_by_adam(), optim.scale_by_learning_rate(SCHEDULE)]),
        (
            optim.adamw(0.1, weight_decay=0.2, mask=DECAY),
            [optim.scale_by_adam(), optim.add_decayed_weights(0.2, DECAY), optim.scale(-0.1)],
        ),
        (optim.adagrad(0.1), [optim.scale_by_rss(), optim.scale(-0.1)]),
        (
            optim.lamb(0.1, weight_decay=0.2),
            [
                optim.scale_by_adam(eps=1e-6),
                optim.add_decayed_weights(0.2),
                optim.scale_by_trust_ratio(),
                optim.scale(-0.1),
            ],
        ),
        (optim.yogi(0.1), [optim.scale_by_yogi(), optim.scale(-0.1)]),
    ],
    ids=repr,
)
def test_alias_equals_its_links(alias: optim.GradientTransformation, links: list[Any]) -> None:
    params = fresh()
    grads = [fresh() for _ in range(3)]
    assert_same(run(alias, params, grads)[0], run(optim.chain(*links), params, grads)[0])


def test_scale_by_schedule_keeps_the_sign() -> None:
    tx = optim.scale_by_schedule(optim.linear(1.0, 0.0, 2))
    state = tx.init(params := {"w": torch.ones(2)})
    seen = []
    for _ in range(3):
        updates, state = tx.update(params, state)
        seen.append(updates["w"][0].item())
    assert seen == [1.0, 0.5, 0.0]


def test_from_functions() -> None:
    tx = optim.GradientTransformation.from_functions(
        lambda params: (), lambda u, s, p: (tree.map(torch.neg, u), s)
    )
    assert tx.step is None
    assert_same(tx.update(grads := fresh(), ())[0], tree.map(torch.neg, grads))
    own = optim.GradientTransformation.from_functions(tx.init, tx.update, lambda g, s, p: (g, s))
    assert optim.chain(tx, own).step is not None
    assert own == optim.GradientTransformation.from_functions(own.init_fn, own.update_fn, own.step_fn)  # type: ignore[attr-defined]
    counts = optim.GradientTransformation.from_functions(
        lambda params: {"n": torch.zeros(())}, lambda u, s, p: (u, {"n": s["n"] + 1})
    )
    state = counts.init(params := fresh())
    for _ in range(3):
        _, state = counts.update(grads, state, params)
    assert_same(state, {"n": torch.tensor(3.0)})


def test_updates_keep_the_dtype_of_the_parameters() -> None:
    out = optim.apply_updates({"w": torch.ones(2, dtype=torch.bfloat16)}, {"w": torch.ones(2)})
    assert out["w"].dtype is torch.bfloat16


@pytest.mark.parametrize("tx", FLAT, ids=repr)
def test_flatten_is_inner_up_to_rounding(tx: optim.GradientTransformation) -> None:
    params = fresh()
    params["image"] = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    grads = [{**fresh(), "image": torch.randn(2, 3, 4, 4)} for _ in range(8)]
    for fused in {False, tx.step is not None}:
        got, state = run(tx, params, grads, fused=fused)
        assert_near(got, run(tx.parts[0], params, grads, fused=fused)[0], steps=8)
        assert got["image"].stride() == params["image"].stride()
        assert {leaf.dim() for leaf in tree.leaves(state)} <= {0, 1}


def test_flatten_refuses_what_acts_per_leaf() -> None:
    for inner in (
        optim.lamb(0.1, weight_decay=0.1),
        optim.chain(optim.scale_by_trust_ratio(), optim.sgd(0.1)),
    ):
        with pytest.raises(ValueError, match=r"flatten: .* takes a norm per leaf"):
            optim.flatten(inner)


# Masks and labels


def test_masked_is_inner_on_the_part_and_identity_elsewhere() -> None:
    params, grads = fresh(), fresh()
    tx = optim.masked(optim.scale_by_adam(), DECAY)
    updates, state = tx.update(grads, tx.init(params), params)
    inner = optim.scale_by_adam()
    expected, _ = inner.update({"w": grads["w"]}, inner.init({"w": params["w"]}), {"w": params["w"]})
    assert_same(updates, {"w": expected["w"], "b": grads["b"]})
    assert len(tree.leaves(state)) == 3


@pytest.mark.parametrize("flag", [True, False])
def test_masked_with_one_flag_for_all(flag: bool) -> None:
    params, grads = fresh(), fresh()
    tx = optim.masked(optim.scale(2.0), flag)
    updates, state = tx.update(grads, tx.init(params), params)
    assert_same(updates, tree.map(lambda g: g * (2.0 if flag else 1.0), grads))
    assert not tree.leaves(state)


def test_a_mask_may_be_a_function() -> None:
    def matrices(params: Any) -> Any:
        return tree.map(lambda p: p.dim() > 1, params)

    params, grads = fresh(), fresh()
    for make in (optim.scale(2.0), optim.chain(optim.add_decayed_weights(0.5, matrices))):
        by_function = optim.masked(make, matrices)
        by_tree = optim.masked(make, matrices(params))
        assert_same(
            by_function.update(grads, by_function.init(params), params),
            by_tree.update(grads, by_tree.init(params), params),
        )


def test_decay_mask_equals_two_optimizers() -> None:
    params = fresh()
    grads = [fresh() for _ in range(4)]
    got, _ = run(optim.adamw(0.1, weight_decay=0.3, mask=DECAY), params, grads, fused=True)
    for name, decay in (("w", 0.3), ("b", 0.0)):
        alone, _ = run(
            optim.adamw(0.1, weight_decay=decay), params[name], [g[name] for g in grads], fused=True
        )
        assert_same(got[name], alone)


@pytest.mark.parametrize("fused", [True, False])
def test_partition_equals_each_on_its_part(fused: bool) -> None:
    params = fresh()
    grads = [fresh() for _ in range(4)]
    parts = {"w": optim.adamw(0.1, weight_decay=0.3), "b": optim.sgd(0.1, 0.9)}
    got, state = run(optim.partition(parts, {"w": "w", "b": "b"}), params, grads, fused=fused)
    for name, tx in parts.items():
        alone, _ = run(tx, params[name], [g[name] for g in grads], fused=fused)
        assert_same(got[name], alone)
    assert sorted(state.inner_states) == ["b", "w"]


def test_partition_freezes_with_set_to_zero() -> None:
    params = fresh()
    tx = optim.partition({True: optim.sgd(0.1), False: optim.set_to_zero()}, DECAY)
    got, _ = run(tx, params, [fresh()], fused=True)
    assert_same(got["b"], params["b"])


def test_unused_parameters_decay() -> None:
    params = {"w": torch.ones(2)}
    got, _ = run(optim.adamw(0.1, weight_decay=0.5), params, [{"w": torch.zeros(2)}], fused=True)
    assert torch.equal(got["w"], torch.full((2,), 0.95))


# Hyper-parameters in the state


def test_injected_numbers_equal_constants() -> None:
    params = fresh(dtype=torch.float64)
    grads = [fresh(dtype=torch.float64) for _ in range(6)]
    numbers = {"learning_rate": 0.125, "b1": 0.8, "b2": 0.9, "eps": 1e-6, "weight_decay": 0.25}
    injected, state = run(optim.inject_hyperparams(optim.adamw)(**numbers), params, grads)
    constant, _ = run(optim.adamw(**numbers), params, grads)
    for x, y in zip(tree.leaves(injected), tree.leaves(constant), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)
    assert sorted(state.hyperparams) == sorted(numbers)


@pytest.mark.parametrize("fused", [True, False])
def test_set_hyperparams_changes_what_the_next_update_uses(fused: bool) -> None:
    params = {"w": torch.ones(2)}
    tx = optim.chain(optim.identity(), optim.inject_hyperparams(optim.sgd)(learning_rate=0.5))
    _, state = run(tx, params, [])
    for rate in (0.25, torch.tensor(0.125), 1):
        state = optim.set_hyperparams(state, learning_rate=rate)
        if fused:
            assert tx.step is not None
            new, _ = tx.step(params, state, params)
        else:
            updates, _ = tx.update(params, state, params)
            new = optim.apply_updates(params, updates)
        assert torch.equal(new["w"], torch.full((2,), 1 - float(rate)))


def test_set_hyperparams_finds_them_inside_a_state() -> None:
    @tree.register_dataclass
    class State:
        opt_state: Any
        params: Any

    tx = optim.inject_hyperparams(optim.adamw, "eps")(learning_rate=0.5, eps=1e-6, weight_decay=0.1)
    old = State(tx.init({"w": torch.ones(2)}), {"w": torch.ones(2)})
    new = optim.set_hyperparams(old, learning_rate=0.25, weight_decay=0.0)
    assert isinstance(new, State)
    assert new.opt_state.hyperparams == {
        "learning_rate": torch.tensor(0.25),
        "weight_decay": torch.tensor(0.0),
    }
    assert old.opt_state.hyperparams["learning_rate"] == 0.5
    assert optim.set_hyperparams(old) is old


def test_set_hyperparams_writes_into_a_handle() -> None:
    tx = optim.chain(optim.identity(), optim.inject_hyperparams(optim.sgd)(learning_rate=0.5))
    params = {"w": torch.ones(2)}
    old = place({"params": params, "opt_state": tx.init(params)})
    new = optim.set_hyperparams(old, learning_rate=0.25)
    assert type(new) is type(old)
    assert new["opt_state"][1].hyperparams["learning_rate"] == 0.25
    assert torch.equal(new["params"]["w"], torch.ones(2))
    with pytest.raises(DonatedStateError, match="donated"):
        old["opt_state"][1].hyperparams["learning_rate"].item()


def test_step_survives_numbers_that_the_fused_op_cannot_take() -> None:
    tx = optim.inject_hyperparams(optim.adam)(learning_rate=0.1, b1=0.8)
    params = fresh()
    grads = [fresh() for _ in range(3)]
    assert_same(run(tx, params, grads, fused=True), run(tx, params, grads))


# Norms


def test_clipping_scales_all_leaves_by_one_factor() -> None:
    grads = fresh()
    norm = torch.cat([g.flatten() for g in tree.leaves(grads)]).norm()
    torch.testing.assert_close(optim.global_norm(grads), norm.double(), rtol=1e-6, atol=0)
    clipped, _ = optim.clip_by_global_norm(0.5).update(grads, ())
    assert_near(clipped, tree.map(lambda g: g * (0.5 / norm), grads), steps=1)
    assert_same(optim.clip_by_global_norm(1e6).update(grads, ())[0], grads)


def test_clipping_zeros_and_nans() -> None:
    clip = optim.clip_by_global_norm(1.0)
    zeros = {"a": torch.zeros(3), "b": torch.zeros(0)}
    assert_same(clip.update(zeros, ())[0], zeros)
    bad, _ = clip.update({"a": torch.tensor([1.0, float("nan")]), "b": torch.ones(2)}, ())
    assert all(leaf.isnan().all() for leaf in tree.leaves(bad))
    assert optim.global_norm({}) == 0


def test_global_norm_of_many_small_leaves_is_accumulated_in_float64() -> None:
    grads = [torch.full((), 4096.0), *[torch.ones(()) for _ in range(1000)]]
    assert optim.global_norm(grads).item() == pytest.approx((4096.0**2 + 1000) ** 0.5, rel=1e-12)


# Mistakes


def test_masked_refuses_an_optimizer() -> None:
    sgd = optim.sgd(0.1)
    inners = [
        optim.adamw(0.1, weight_decay=0.1),
        optim.chain(optim.identity(), sgd),
        optim.scale(-0.1),
        optim.scale_by_schedule(SCHEDULE),
        optim.inject_hyperparams(optim.sgd)(learning_rate=0.1),
        optim.partition({0: sgd}, 0),
        optim.yogi(0.1),
    ]
    for inner in inners:
        with pytest.raises(ValueError, match=r"raw gradients would be added.*mask=.*partition"):
            optim.masked(inner, True)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: optim.adamw(0.1), TypeError, "weight_decay"),
        (lambda: optim.lamb(0.1), TypeError, "weight_decay"),
        (lambda: optim.adam(0.1, b1=1.0), ValueError, r"adam: b1 must be in \[0, 1\), got 1.0"),
        (lambda: optim.adam(0.1, b2=-0.1), ValueError, r"adam: b2 must be in \[0, 1\)"),
        (lambda: optim.adam(-0.1), ValueError, "adam: learning_rate must be at least 0 and finite, got -0.1"),
        (lambda: optim.sgd(float("nan")), ValueError, "sgd: learning_rate must be at least 0"),
        (lambda: optim.adamw(0.1, weight_decay=-1.0), ValueError, "adamw: weight_decay must be at least 0"),
        (lambda: optim.sgd(0.1, nesterov=True), ValueError, "nesterov=True needs momentum"),
        (lambda: optim.sgd(0.1, momentum=1.0), ValueError, "sgd: momentum must be in"),
        (lambda: optim.clip_by_global_norm(0.0), ValueError, "max_norm must be positive"),
        (lambda: optim.adam(None), TypeError, "adam: learning_rate must be .* a schedule, got NoneType"),
        (lambda: optim.adamw(0.1, weight_decay=None), TypeError, "adamw: weight_decay must be a number"),
        (lambda: optim.sgd(0.1, None), TypeError, "sgd: momentum must be a number or a tensor, got NoneType"),
        (lambda: optim.adam(0.1, eps=(1e-8, 1e-8)), TypeError, "adam: eps must be .* got tuple"),
        (
            lambda: optim.schedule_free(optim.sgd(0.1), b1=None),
            TypeError,
            "schedule_free: b1 must be a number",
        ),
        (
            lambda: optim.lookahead(optim.sgd(0.1), slow_step_size=None),
            TypeError,
            "lookahead: slow_step_size must be a number",
        ),
        *(
            (make, TypeError, rf"{name}: takes gradient transformations, such as .* got {kind}")
            for name, make, kind in (
                ("chain", lambda: optim.chain(optim.sgd), "the class `sgd`"),
                ("partition", lambda: optim.partition({"a": 1}, "a"), "int"),
                ("partition", lambda: optim.partition({"a": None}, "a"), "NoneType"),
                ("masked", lambda: optim.masked(optim.sgd, True), "the class `sgd`"),
                ("flatten", lambda: optim.flatten(None), "NoneType"),
                ("lookahead", lambda: optim.lookahead(optim.sgd), "the class `sgd`"),
                ("schedule_free", lambda: optim.schedule_free(None), "NoneType"),
                ("stochastic_rounding", lambda: optim.stochastic_rounding(optim.sgd, 0), "the class `sgd`"),
            )
        ),
        (lambda: optim.inject_hyperparams(float)(), TypeError, "the factory returned float"),
        (
            lambda: optim.sgd(torch.nn.Linear(1, 1).parameters()),
            TypeError,
            "sgd: learning_rate must be a number, a tensor or a schedule, got generator",
        ),
    ],
)
def test_arguments_are_checked(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    "factory", [optim.sgd, optim.adam, optim.adamw, optim.adagrad, optim.lamb, optim.yogi]
)
def test_names_of_torch_are_translated(factory: Any) -> None:
    rest = {"weight_decay": 0.1} if factory in (optim.adamw, optim.lamb) else {}
    match = rf"{factory.__name__}: has no argument `lr`; it takes `learning_rate`.*in place of `lr`"
    for make in (factory, optim.inject_hyperparams(factory)):
        with pytest.raises(TypeError, match=match):
            make(lr=0.1, **rest)
        assert isinstance(make(learning_rate=0.1, **rest), optim.GradientTransformation)


@pytest.mark.parametrize(
    ("make", "advised", "as_advised", "torchs"),
    [
        (
            lambda: optim.adam(0.1, weight_decay=0.1),  # type: ignore[call-arg]
            "`fcg.optim.chain(fcg.optim.add_decayed_weights(...), fcg.optim.adam(...))` in place of `weight_decay`",
            optim.chain(optim.add_decayed_weights(0.1), optim.adam(0.1)),
            partial(torch.optim.Adam, lr=0.1, weight_decay=0.1),
        ),
        (
            lambda: optim.sgd(0.1, momentum=0.9, dampening=0.5),  # type: ignore[call-arg]
            "`fcg.optim.from_torch(torch.optim.SGD, dampening=..., ...)` in place of `dampening`",
            optim.from_torch(torch.optim.SGD, dampening=0.5, lr=0.1, momentum=0.9),
            partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
        ),
        (
            lambda: optim.rmsprop(0.1, alpha=0.9),  # type: ignore[call-arg]
            "`decay=...` in place of `alpha`",
            optim.rmsprop(0.1, decay=0.9),
            partial(torch.optim.RMSprop, lr=0.1, alpha=0.9),
        ),
        (
            lambda: optim.adam(0.1, foreach=True),  # type: ignore[call-arg]
            "leave `foreach` out",
            optim.adam(0.1),
            partial(torch.optim.Adam, lr=0.1, foreach=True),
        ),
    ],
)
def test_what_is_advised_for_arguments_of_torch_steps_as_torch_does(
    make: Any, advised: str, as_advised: Any, torchs: Any
) -> None:
    with pytest.raises(TypeError, match=re.escape(f"To fix: {advised}.")):
        make()
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    params, judge = {"w": weight.detach().clone()}, torchs([weight])
    state = as_advised.init(params)
    for seed in range(4):
        weight.grad = torch.randn(3, generator=torch.Generator().manual_seed(seed))
        judge.step()
        updates, state = as_advised.update({"w": weight.grad}, state, params)
        params = {"w": params["w"] + updates["w"]}
    torch.testing.assert_close(params["w"], weight.detach())


def test_arguments_of_an_own_transformation_have_its_own_names() -> None:
    class Own(optim.GradientTransformation):
        def __init__(self, lr: float, **more: float) -> None:
            self.lr = lr + sum(more.values())

        def init(self, params: Any) -> Any:
            return ()

        def update(self, updates: Any, state: Any, params: Any = None) -> Any:
            return updates, state

    assert Own(lr=1.0, warmup=2.0).lr == 3.0


def test_trees_are_checked() -> None:
    params = fresh()
    with pytest.raises(LayoutError, match=r"not a prefix(.|\n)*mask\['v'\]  expected nothing"):
        optim.add_decayed_weights(0.1, {"w": True, "b": True, "v": True}).update(params, (), params)
    with pytest.raises(LayoutError, match=r"mask\['w'\]  expected a leaf   got list"):
        optim.adamw(0.1, weight_decay=0.1, mask={"w": [True], "b": True}).step(  # type: ignore[misc]
            params, optim.adam(0.1).init(params), params
        )
    with pytest.raises(TypeError, match="mask: every leaf must be a Python bool, got Tensor"):
        optim.masked(optim.scale(1.0), lambda p: tree.map(lambda x: x.sum() > 0, p)).init(params)
    with pytest.raises(ValueError, match=r"params\['b'\]\[0\] has the label 'c', which is none of \['a'\]"):
        optim.partition({"a": optim.identity()}, {"w": "a", "b": "c"}).init(params)
    with pytest.raises(LayoutError, match=r"must be floating(.|\n)*params\['n'\]  got torch.int64"):
        optim.adam(0.1).init({"n": torch.zeros(2, dtype=torch.int64)})


@pytest.mark.parametrize(
    "tx",
    [optim.adamw(0.1, weight_decay=0.1), optim.lamb(0.1, weight_decay=0.1), optim.add_decayed_weights(0.1)],
)
def test_missing_params_are_named(tx: optim.GradientTransformation) -> None:
    grads = fresh()
    with pytest.raises(ValueError, match="add_decayed_weights: needs the parameters"):
        tx.update(grads, tx.init(grads))


def test_set_hyperparams_names_what_there_is() -> None:
    params = {"w": torch.ones(2)}
    tx = optim.inject_hyperparams(optim.sgd)(learning_rate=0.1)
    with pytest.raises(ValueError, match=r"no injected number 'lr', it has \['learning_rate'\]"):
        optim.set_hyperparams(tx.init(params), lr=0.1)


def test_set_hyperparams_sets_a_number_wherever_it_is_injected() -> None:
    make = optim.inject_hyperparams(optim.adamw)
    groups = {"x": make(learning_rate=0.1, weight_decay=0.1), "y": make(learning_rate=0.1, weight_decay=0.0)}
    state = place(
        optim.partition(groups, {"w": "x", "v": "y"}).init({"w": torch.ones(3), "v": torch.ones(2)})
    )
    state = optim.set_hyperparams(state, learning_rate=0.05)
    numbers = {label: one.hyperparams for label, one in fcg.snapshot(state).inner_states.items()}
    assert {label: float(one["learning_rate"]) for label, one in numbers.items()} == {"x": 0.05, "y": 0.05}
    assert {label: float(one["weight_decay"]) for label, one in numbers.items()} == {"x": 0.1, "y": 0.0}
    state = fcg.tree.at(lambda s: s.inner_states["x"].hyperparams["learning_rate"], state, 0.01)
    assert float(state.inner_states["x"].hyperparams["learning_rate"]) == 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], ids=str)
def test_sgd_moves_every_element_of_a_16_bit_leaf(options: dict[str, Any], dtype: torch.dtype) -> None:
    """torch's fused op skips most of them on a CPU, so the judge is the loop over tensors."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(33, generator=generator).to(dtype)
    params, tx = {"w": start.clone()}, optim.sgd(0.1, **options)
    state, theirs = tx.init(params), start.clone().requires_grad_()
    judge = torch.optim.SGD([theirs], 0.1, foreach=False, fused=False, **options)
    for _ in range(5):
        theirs.grad = torch.randn(33, generator=generator).to(dtype)
        assert tx.step is not None
        params, state = tx.step({"w": theirs.grad}, state, params)
        judge.step()
    # Each step may round once more or less: an ulp of 16 bits.
    torch.testing.assert_close(params["w"], theirs.detach(), rtol=2e-2, atol=2e-2)


def test_sgd_widens_one_16_bit_leaf_at_a_time() -> None:
    alive: list[weakref.ref[Tensor]] = []

    class Wide(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            found = [
                one for one in tree.leaves(out) if isinstance(one, Tensor) and one.dtype == torch.float32
            ]
            alive.extend(map(weakref.ref, found))
            Wide.most = max(Wide.most, sum(one() is not None for one in alive))
            return out

    params = [torch.randn(33).bfloat16() for _ in range(8)]
    tx = optim.sgd(0.1, 0.9)
    state = tx.init(params)
    with Wide():
        together, _ = tx.step(params, state, params)
    assert 0 < Wide.most <= 8, "three that go in, two that come out"
    for leaf, moved in zip(params, together, strict=True):
        assert_same(tx.step([leaf], tx.init([leaf]), [leaf])[0], [moved])


def test_inject_hyperparams_wants_a_factory() -> None:
    with pytest.raises(
        TypeError,
        match=r"a factory, got the optimizer .*\n.*`fcg\.optim\.inject_hyperparams\(fcg\.optim\.sgd\)",
    ):
        optim.inject_hyperparams(optim.sgd(0.1))  # type: ignore[arg-type]


def test_injected_numbers_go_by_name() -> None:
    with pytest.raises(TypeError, match=r"numbers go by name, got 0.1: `learning_rate=0.1`"):
        optim.inject_hyperparams(optim.sgd)(0.1)


class _Mine(optim.GradientTransformation):
    def init(self, params: Any) -> Any:
        return ()

    def update(self, updates: Any, state: Any, params: Any = None) -> Any:
        return updates, state


_LABELS = {"w": "a", "b": "b"}
_UPHILL = [
    optim.chain(optim.clip_by_global_norm(1.0), optim.scale_by_adam()),
    optim.scale_by_adam(),
    optim.trace(0.9),
    optim.identity(),
    optim.chain(),
    optim.chain(optim.scale_by_adam(), optim.scale(0.1)),
    optim.chain(optim.scale_by_adam(), optim.add_decayed_weights(0.1)),
    optim.chain(optim.scale_by_adam(), optim.scale_by_schedule(optim.warmup_cosine(0.1, 10, 100))),
    optim.partition({"a": optim.sgd(0.1), "b": optim.scale_by_adam()}, _LABELS),
    optim.inject_hyperparams(optim.scale_by_adam)(b1=0.9),
    optim.masked(optim.set_to_zero(), {"w": True, "b": False}),
]
_DOWNHILL = [
    optim.set_to_zero(),
    optim.chain(optim.scale_by_adam(), optim.scale_by_learning_rate(0.1)),
    optim.chain(optim.scale_by_adam(), optim.scale(-0.1)),
    optim.chain(
        optim.scale_by_adam(), optim.scale_by_schedule(optim.linear(0.1, 0.0, 10)), optim.scale(-1.0)
    ),
    optim.chain(optim.scale_by_adam(), optim.scale_by_schedule(lambda count: -0.1)),
    optim.chain(optim.sgd(0.1), optim.masked(optim.set_to_zero(), {"w": True, "b": False})),
    optim.partition({"a": optim.sgd(0.1), "b": optim.set_to_zero()}, _LABELS),
    optim.inject_hyperparams(optim.adam)(learning_rate=0.1),
    optim.lookahead(optim.adafactor(0.1)),
    _Mine(),
    optim.chain(optim.scale_by_adam(), _Mine()),
    optim.chain(
        optim.scale_by_adam(), optim.GradientTransformation.from_functions(_Mine().init, _Mine().update)
    ),
    optim.chain(optim.scale_by_adam(), optim.scale(torch.tensor(-0.1))),
]


@pytest.mark.parametrize(
    "tx",
    [
        optim.chain(optim.sgd(0.5), optim.sgd(0.5)),
        optim.chain(optim.adamw(0.1, weight_decay=0.0), optim.scale_by_learning_rate(0.1)),
        optim.chain(optim.clip_by_global_norm(1.0), optim.chain(optim.sgd(0.1)), optim.adam(0.1)),
        optim.partition({"a": optim.chain(optim.sgd(0.5), optim.lion(0.5, weight_decay=0.0))}, "a"),
        optim.flatten(optim.chain(optim.sgd(0.5), optim.scale_by_learning_rate(optim.constant(0.1)))),
    ],
    ids=repr,
)
def test_two_learning_rates_in_a_row_are_refused(tx: Any) -> None:
    """The sign would be turned twice, and each step would climb."""
    with pytest.raises(ValueError, match=r"2 learning rates in a row: (.|\n)*To fix: keep one"):
        fcg.TrainState.create(params={"w": torch.ones(2)}, optimizer=tx)


_DIRECTIONS = [
    optim.scale_by_adam(),
    optim.scale_by_rms(),
    optim.scale_by_lion(),
    optim.scale_by_rss(),
    optim.scale_by_trust_ratio(),
    optim.add_decayed_weights(0.1),
    optim.scale_by_muon(),
]


@pytest.mark.parametrize("link", _DIRECTIONS, ids=lambda link: type(link).__name__)
def test_what_takes_gradients_comes_before_the_learning_rate(link: Any) -> None:
    """Behind it, the rate is gone, or weights grow; as the message advises, it is a part of the optimizer."""
    for late in (
        optim.chain(optim.sgd(0.1), link),
        optim.chain(optim.sgd(0.1), optim.chain(optim.clip_by_global_norm(1.0), link)),
        optim.chain(
            optim.scale_by_adam(), optim.scale_by_learning_rate(0.1), optim.masked(link, {"w": True})
        ),
    ):
        with pytest.raises(ValueError, match=r"behind a learning rate(.|\n)*To fix: put it before"):
            fcg.TrainState.create(params={"w": torch.ones(2, 2)}, optimizer=late)
    fcg.TrainState.create(params={"w": torch.ones(2, 2)}, optimizer=optim.chain(link, optim.sgd(0.1)))


@pytest.mark.parametrize(
    "name", [name for name in dir(optim) if name.startswith("scale_by_") or name == "add_decayed_weights"]
)
def test_a_link_behind_a_rate_leaves_it_its_size_or_says_that_it_takes_gradients(name: str) -> None:
    """The law behind the list: twice the rate is twice the step, wherever the link may stand behind it."""
    numbers = {"scale_by_schedule": optim.constant(0.5), "scale_by_learning_rate": 0.5, "scale_by_lars": 0.1}
    given = [numbers[name]] if name in numbers else [0.1] if name == "add_decayed_weights" else []
    link, params = getattr(optim, name)(*given), {"w": torch.tensor([[1.0, -2.0], [3.0, 0.5]])}
    steps = []
    for rate in (0.125, 0.25):
        state = link.init(params)
        for _ in range(8):  # the first ones of some are plain momentum
            step, state = link.update({"w": params["w"].cos() * rate}, state, params)
        steps.append(step["w"])
    assert torch.allclose(2 * steps[0], steps[1], rtol=1e-4) is not (link.role == "direction")


@pytest.mark.parametrize(
    "tx",
    [
        optim.chain(optim.scale(-1.0), optim.sgd(0.1)),  # it maximises
        optim.chain(optim.sgd(0.1), optim.scale(0.5)),
        optim.partition({"a": optim.sgd(0.5), "b": optim.adam(0.1)}, {"w": "a"}),
        optim.lookahead(optim.chain(optim.trace(0.9), optim.sgd(0.1))),
    ],
    ids=repr,
)
def test_one_learning_rate_for_each_leaf_is_enough(tx: Any) -> None:
    fcg.TrainState.create(params={"w": torch.ones(2)}, optimizer=tx)


def test_ways_through_many_masks_are_few() -> None:
    """24 masked links have 2**24 ways through them, and learning rates are looked for on ways that differ."""
    masks = [optim.masked(optim.scale(0.5), DECAY) for _ in range(24)]
    params = {"w": torch.ones(2), "b": torch.ones(1)}
    tx = optim.chain(*masks, optim.adam(0.1))
    assert len(tx.paths) == 1
    fcg.TrainState.create(params=params, optimizer=tx)
    late = [optim.masked(optim.scale_by_adam(), DECAY) for _ in range(24)]
    assert len(optim.chain(*late, optim.adam(0.1)).paths) < 5
    with pytest.raises(ValueError, match="behind a learning rate"):
        fcg.TrainState.create(params=params, optimizer=optim.chain(optim.sgd(0.1), *masks, *late))
    with pytest.raises(ValueError, match="2 learning rates in a row"):
        fcg.TrainState.create(params=params, optimizer=optim.chain(optim.sgd(0.1), *masks, optim.sgd(0.1)))
    with pytest.raises(ValueError, match="no learning rate"):
        fcg.TrainState.create(params=params, optimizer=optim.chain(*masks))


@pytest.mark.parametrize("optimizer", _UPHILL, ids=lambda tx: repr(tx)[:60])
def test_a_state_wants_an_optimizer_with_a_learning_rate(optimizer: Any) -> None:
    params = {"w": torch.ones(2), "b": torch.ones(1)}
    with pytest.raises(ValueError, match=r"no learning rate: .*(.|\n)*optim\.scale_by_learning_rate\(1e-3\)"):
        fcg.TrainState.create(params=params, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", _DOWNHILL, ids=lambda tx: repr(tx)[:60].partition(" object")[0])
def test_what_may_have_a_learning_rate_is_taken(optimizer: Any) -> None:
    fcg.TrainState.create(params={"w": torch.ones(2), "b": torch.ones(1)}, optimizer=optimizer)


@pytest.mark.parametrize(
    "tx",
    [
        optim.sgd(0.1, 0.9, weight_decay=0.1),
        optim.sgd(0.1, weight_decay=0.1),
        optim.adamw(0.1, weight_decay=0.1),
        optim.ema(optim.adam(SCHEDULE), 0.5),
    ],
    ids=repr,
)
def test_a_state_outside_of_a_step_is_updated_as_in_one(tx: optim.GradientTransformation) -> None:
    alone, stepped = (fcg.TrainState.create(params={"w": torch.ones(2)}, optimizer=tx) for _ in range(2))
    step = fcg.graph_step(lambda state, x: (state.apply_gradients({"w": x}), {}))
    for i in range(3):
        alone = alone.apply_gradients({"w": torch.full((2,), i + 1.0)})
        stepped, _ = step(stepped, torch.full((2,), i + 1.0))
    ends = fcg.state_dict(alone), fcg.state_dict(stepped)
    assert ends[0].keys() == ends[1].keys()
    assert all(leaf.equal(ends[1][name]) for name, leaf in ends[0].items())


@pytest.mark.parametrize("order", [0.5, 1, 3, 10, 1e4])
@pytest.mark.parametrize("size", [1e-30, 3e-4, 1e5, 1e30])
def test_a_norm_of_any_order_neither_overflows_nor_vanishes(order: float, size: float) -> None:
    tree = {"a": torch.tensor([size, -size / 2]), "b": torch.tensor(size / 4)}
    numbers = torch.tensor([1, 0.5, 0.25], dtype=torch.float64)
    expected = size * torch.linalg.vector_norm(numbers, order)
    torch.testing.assert_close(optim.global_norm(tree, order), expected, rtol=1e-4, atol=0.0)
    assert optim.global_norm({"a": torch.zeros(3)}, order) == 0
    assert optim.global_norm({"a": torch.tensor([1.0, torch.nan])}, order).isnan()
