"""Losses, states and ranks that do not fit a pipeline are refused, and what the message advises works."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_cg as fcg
from functional_cg import optim, sharding
from functional_cg.sharding.pipelining import refuse_moving_memory
from functional_cg.testing import assert_trees_all_equal
from tests.pipelines.programs import ONE, TWO
from tests.sharding.ranks import on_ranks, outcomes
from tests.shares import thorough


def pipe_of(axes: Any = ONE, schedule: str = "1f1b", microbatches: int = 2) -> Any:
    mesh = sharding.mesh(axes, device="cpu", timeout=5)
    return sharding.pipeline(mesh, schedule=schedule, microbatches=microbatches)


PIPE = pipe_of()
PARAMS = {"w": torch.ones(3, 3), "v": torch.ones(3, 3)}
X = torch.arange(12.0).reshape(4, 3)


def skips(cut: Callable[[Any], Any]) -> Callable[..., Tensor]:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x @ params["w"])
        return (cut(h) @ params["v"] + h).mean()

    return loss_fn


def skips_through(params: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x @ params["w"])
    y, h = PIPE.cut((h, h))
    return (y @ params["v"] + h).mean()


def writes(params: Any, x: Tensor) -> Tensor:
    h = PIPE.cut(x @ params["w"])
    h.mul_(2)
    return (h @ params["v"]).mean()


def writes_a_copy(params: Any, x: Tensor) -> Tensor:
    h = PIPE.cut(x @ params["w"]).clone()
    h.mul_(2)
    return (h @ params["v"]).mean()


def writes_the_batch(params: Any, x: Tensor) -> Tensor:
    x.mul_(2)
    return (PIPE.cut(x @ params["w"]) @ params["v"]).mean()


def cuts_where_it_is_computed_again(params: Any, x: Tensor) -> Tensor:
    def part(x: Tensor) -> Tensor:
        return PIPE.cut(torch.tanh(x @ params["w"])).sin()

    return (torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False) @ params["v"]).mean()


def normalizes(params: Any, x: Tensor) -> Tensor:
    h = nn.functional.batch_norm(x @ params["w"], torch.zeros(3), torch.ones(3), training=True)
    return (PIPE.cut(h) @ params["v"]).square().mean()


MISTAKES: dict[str, tuple[Any, str]] = {
    "a value jumps a stage": (skips(PIPE.cut), r"hands a value to a later stage that does not pass the cuts"),
    "a stage writes into what it got": (writes, "writes in place into a tensor that it was given"),
    "a stage writes into the batch": (writes_the_batch, "writes in place into a tensor that it was given"),
    "a cut in a checkpoint": (
        cuts_where_it_is_computed_again,
        "cuts a loss where its backward computes it again",
    ),
    "batch norm": (normalizes, "has a BatchNorm in training, with running statistics"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_loss_that_does_not_fit_is_refused(name: str, captured: bool) -> None:
    loss_fn, said = MISTAKES[name]
    step = fcg.graph_fn(lambda params, x: PIPE.value_and_grad(loss_fn)(params, x))
    call = step if captured else PIPE.value_and_grad(loss_fn)
    with pytest.raises(fcg.LayoutError, match=said) as error:
        call(PARAMS, X.clone())
    if captured and "jumps" in name:
        assert "test_mistakes.py" in str(error.value), "the user's line"


def decides(params: Any, x: Tensor) -> Tensor:
    h = PIPE.cut(x @ params["w"])
    if h.sum().item() > 0:
        h = h * 2
    return (h @ params["v"]).mean()


def test_a_value_is_not_read_on_the_host_where_there_are_only_shapes() -> None:
    with pytest.raises(fcg.HostSyncError, match="asks for the value of a tensor on the host"):
        PIPE.value_and_grad(decides)(PARAMS, X)
    with pytest.raises(fcg.HostSyncError, match=r"from `h\.sum\(\)\.item\(\)`"):
        fcg.graph_fn(lambda params, x: PIPE.value_and_grad(decides)(params, x))(PARAMS, X)


def test_what_is_no_tensor_is_not_averaged() -> None:
    with pytest.raises(fcg.LayoutError, match="cannot be averaged over micro-batches"):
        PIPE.value_and_grad(lambda p, x: (skips_through(p, x), {"n": 3}), has_aux=True)(PARAMS, X)


def normalizes_by_itself(params: Any, x: Tensor) -> Tensor:
    h = nn.functional.batch_norm(x @ params["w"], None, None, training=True)
    return (PIPE.cut(nn.functional.instance_norm(h[None])[0]) @ params["v"]).square().mean()


def test_the_repairs_work() -> None:
    found = PIPE.value_and_grad(normalizes_by_itself)(PARAMS, X)
    expected = fcg.microbatches(2)(fcg.value_and_grad(normalizes_by_itself))(PARAMS, X)
    assert_trees_all_equal(found, expected)
    value, _ = PIPE.value_and_grad(skips_through)(PARAMS, X)
    torch.testing.assert_close(value, skips(lambda h: h)(PARAMS, X))
    value, _ = PIPE.value_and_grad(writes_a_copy)(PARAMS, X)
    torch.testing.assert_close(value, (2 * (X @ PARAMS["w"]) @ PARAMS["v"]).mean())


def test_outside_of_value_and_grad_a_cut_is_nothing() -> None:
    h = {"x": X, "n": 3}
    assert PIPE.cut(h) is h
    assert torch.equal(skips(PIPE.cut)(PARAMS, X), skips(lambda h: h)(PARAMS, X))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mesh": {"stage": 1}}, "mesh must be made with `fcg.sharding.mesh"),
        ({"microbatches": 0}, "microbatches must be a positive integer, got 0"),
        ({"axis": "layers"}, "has no axis 'layers'"),
    ],
)
def test_arguments(change: dict[str, Any], said: str) -> None:
    given = {"mesh": sharding.mesh(ONE, device="cpu"), "microbatches": 2} | change
    with pytest.raises((TypeError, ValueError), match=said):
        sharding.pipeline(**given)


def test_memory_that_moves_is_refused_where_nccl_registers_it() -> None:
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    with pytest.raises(RuntimeError, match="NCCL_GRAPH_REGISTER=0"):
        refuse_moving_memory(expandable)
    refuse_moving_memory(expandable | {"NCCL_GRAPH_REGISTER": "0"})
    refuse_moving_memory({})


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x


def test_cuts_of_a_module_are_names_of_its_submodules() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute `g`|h\.7|g"):
        fcg.from_module(Layers(), cuts=("g.1",))
    apply, params, buffers = fcg.from_module(Layers(), cuts=("h.1",))
    plain, _, _ = fcg.from_module(Layers())

    def loss_fn(params: Any, x: Tensor, apply: Any) -> Tensor:
        return apply(params, buffers, x)[0].square().mean()

    pipe = pipe_of(schedule="interleaved")
    assert "2 stages" in str(explained(pipe, lambda p, x: loss_fn(p, x, apply), params))
    value, grads = pipe.value_and_grad(loss_fn)(params, X, apply)
    expected = fcg.microbatches(2)(fcg.value_and_grad(loss_fn))(params, X, plain)
    assert torch.equal(value, expected[0])
    assert all(torch.equal(grads[name], expected[1][name]) for name in grads)


def explained(pipe: Any, loss_fn: Any, params: Any) -> str:
    step = fcg.graph_fn(lambda params, x: pipe.value_and_grad(loss_fn)(params, x), lowering="aten")
    step(params, X)
    return step.explain()


def test_the_schedule_is_printed_and_is_part_of_the_capture() -> None:
    text = explained(PIPE, skips_through, PARAMS)
    assert re.search(
        r"pipeline\(1f1b, microbatches=2\) on stage=1, data=1, 2 stages, at best 100% busy", text
    )
    assert "rank 0  0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1" in text


HOLDER: dict[str, Any] = {}


def test_another_schedule_is_noticed_at_the_next_call() -> None:
    HOLDER["pipe"] = pipe_of()

    @fcg.graph_fn(lowering="aten")
    def grads(params: Any, x: Tensor) -> Any:
        return HOLDER["pipe"].value_and_grad(skips_through)(params, x)

    grads(PARAMS, X)
    HOLDER["pipe"] = pipe_of(microbatches=4)
    with pytest.raises(fcg.BakedValueError, match="pipe"):
        grads(PARAMS, X)


# -- on ranks -----------------------------------------------------------------------------------------------------


def stages(cut: Callable[[Any], Any]) -> Callable[..., Tensor]:
    return lambda params, x: (cut(torch.tanh(x @ params["w"])) @ params["v"]).square().mean()


def state_of(pipe: Any, loss_fn: Any = None) -> Any:
    zero = pipe.zero(loss_fn or stages(pipe.cut), PARAMS, X)
    return fcg.TrainState.create(params=PARAMS, optimizer=optim.sgd(0.1), sharding=zero)


def step_of(pipe: Any, loss_fn: Any = None) -> Any:
    @fcg.graph_step(lowering="aten")
    def train_step(state: Any, x: Tensor) -> Any:
        loss, grads = pipe.value_and_grad(loss_fn or stages(pipe.cut))(state.params, x)
        return state.apply_gradients(grads), {"loss": loss}

    return train_step


def misuses() -> dict[str, str]:
    """What a rank of two says to each of these, and what it does with the state afterwards."""
    pipe = pipe_of(TWO)
    state, said = state_of(pipe), {}

    def tried(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except fcg.FunctionalCGError as error:
            said[name] = f"{type(error).__name__}: {error}"

    tried("alone", lambda: fcg.value_and_grad(stages(lambda h: h))(state.params, X))
    plain = fcg.graph_step(
        lambda s, x: (s.apply_gradients(fcg.grad(stages(lambda h: h))(s.params, x)), {}), lowering="aten"
    )
    tried("plain", lambda: plain(state, X))
    swapped = stages(pipe.cut)
    tried("elsewhere", lambda: step_of(pipe, lambda p, x: swapped({"w": p["v"], "v": p["w"]}, x))(state, X))
    tried("whole", lambda: step_of(pipe)(fcg.TrainState.create(params=PARAMS, optimizer=optim.sgd(0.1)), X))
    tried("a product", lambda: state.params["w"] @ X.T)
    state, metrics = step_of(pipe)(state, X)
    said["then"] = f"{float(metrics['loss']):.4f}"
    return said


def test_misuses_on_two_ranks() -> None:
    for said in on_ranks(2, misuses):
        assert "LayoutError" in said["alone"]
        assert "pipe.value_and_grad(loss_fn)" in said["plain"]
        assert "reads leaves in stages whose ranks do not hold them" in said["elsewhere"]
        assert "pipe.zero(loss_fn, params, batch)" in said["whole"]
        assert "asks a" in said["a product"]
        assert said["then"] != ""


def apart(how: str) -> None:
    """Rank 1 does something else than rank 0."""
    pipe = pipe_of(TWO)
    other = pipe.mesh.stages.rank == 1
    microbatches = 4 if how == "schedule" and other else 2
    pipe = sharding.pipeline(pipe.links.mesh, schedule="1f1b", microbatches=microbatches)
    x = X[:, :3].repeat(2, 1) if how == "batch" and other else X
    step_of(pipe)(state_of(pipe), x)


def other_names() -> None:
    rank = int(os.environ["RANK"])
    pipe_of(TWO, schedule=("1f1b", "gpipe")[rank])


def test_ranks_make_one_pipeline() -> None:
    for outcome in outcomes(2, other_names):
        assert "ranks are about to do different things" in outcome.error
        assert "rank 0  1f1b   rank 1  gpipe" in outcome.error


@pytest.mark.parametrize("how", ["schedule", "batch"])
def test_ranks_that_do_not_fit_together_say_so_before_anything_is_sent(how: str) -> None:
    for outcome in outcomes(2, apart, how):
        assert "RankError: `train_step`: stages of a pipeline do not fit together" in outcome.error
        assert "schedule" not in how or "microbatches=4" in outcome.error
        assert (
            "schedule" in how
            or "transfer 0  rank 0 sends f32[2,3]   rank 1 receives f32[4,3]" in outcome.error
        )


class WithLoss(fcg.TrainState):
    last: Any = None


def keeps_its_own_loss(reduced: bool) -> float:
    """A loss of this rank's data goes into a leaf that all ranks hold whole; the first stages bring nothing to it."""
    pipe = pipe_of(TWO)
    loss_fn = stages(pipe.cut)
    state = WithLoss.create(
        params=PARAMS, optimizer=optim.sgd(0.1), sharding=pipe.zero(loss_fn, PARAMS, X), last=torch.zeros(())
    )

    @fcg.graph_step(lowering="aten")
    def train_step(state: Any, x: Tensor) -> Any:
        loss, grads = pipe.value_and_grad(loss_fn)(state.params, x)
        return state.apply_gradients(grads, last=sharding.mean(loss) if reduced else loss), {}

    state, _ = train_step(state, X + pipe.mesh.rank)
    return float(state.last)


@thorough
def test_what_stages_add_up_is_followed_to_the_ranks_that_bring_nothing() -> None:
    for outcome in outcomes(4, keeps_its_own_loss, False):
        assert "state.last  differs over data" in outcome.error
    assert len(set(on_ranks(4, keeps_its_own_loss, True))) == 1


CLOSED_OVER = fcg.random.key(7)
DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: CLOSED_OVER,
    "with a number": lambda x: fcg.random.fold_in(CLOSED_OVER, 3),
    "with a number that is made anew": lambda x: fcg.random.fold_in(CLOSED_OVER, torch.tensor(3)),
    "a row of several": lambda x: fcg.random.split(CLOSED_OVER)[1],
}


def drops(key_of: Callable[[Tensor], Tensor], x: Tensor, params: Any) -> Tensor:
    h = PIPE.cut(torch.tanh(x @ params["w"]))
    return (fcg.random.dropout(key_of(x), h, 0.5) @ params["v"]).mean()


@pytest.mark.parametrize("kind", DRAWN)
def test_a_key_that_the_loss_closes_over_is_refused(kind: str) -> None:
    def closed(params: Any, x: Tensor) -> Tensor:
        return drops(DRAWN[kind], x, params)

    with pytest.raises(fcg.CaptureError, match=r"draws from one key in several micro-batches(.|\n)*key=key"):
        PIPE.value_and_grad(closed)(PARAMS, X)
    pipe_of(microbatches=1).value_and_grad(closed)(PARAMS, X)


def test_keys_of_a_micro_batch_are_its_own() -> None:
    """The fix of the refusal; and a key into which a number of the micro-batch is folded."""

    def passed(params: Any, x: Tensor, *, key: Tensor) -> Tensor:
        return drops(lambda _: fcg.random.fold_in(key, 1), x, params)

    def by_example(params: Any, x: Tensor) -> Tensor:
        return drops(lambda x: fcg.random.fold_in(CLOSED_OVER, x[0, 0].long()), x, params)

    losses = [
        PIPE.value_and_grad(passed)(PARAMS, X, key=CLOSED_OVER),
        PIPE.value_and_grad(by_example)(PARAMS, X),
    ]
    plain = fcg.microbatches(2)(fcg.value_and_grad(passed))(PARAMS, X, key=CLOSED_OVER)
    assert_trees_all_equal(losses[0], plain)
    assert_trees_all_equal(losses[1], fcg.microbatches(2)(fcg.value_and_grad(by_example))(PARAMS, X))


@pytest.mark.parametrize("train", [True, False])
def test_a_module_that_draws_nothing_uses_no_key(train: bool) -> None:
    """A dropout in evaluation gets a key that the loss closes over, and leaves it alone."""
    apply, params, buffers = fcg.from_module(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)))

    def value(params: Any, x: Tensor) -> Tensor:
        return apply(params, buffers, x, train=train, key=CLOSED_OVER)[0].square().mean()  # type: ignore[no-any-return]

    for several in (PIPE.value(value), fcg.microbatches(2)(value)):
        if train:
            with pytest.raises(fcg.CaptureError, match="draws from one key in several micro-batches"):
                several(params, X)
        else:
            torch.testing.assert_close(several(params, X), value(params, X))
