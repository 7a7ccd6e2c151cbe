"""Statistics by module: the numbers are those of hooks and of plain arithmetic, and the step stays what it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import functional_cg as fcg
from functional_cg.testing import assert_trees_all_equal

CALLS = 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
LOWERINGS = [
    ("cpu", "aten"),
    pytest.param("cpu", "inductor", marks=pytest.mark.kernels),
    pytest.param("cuda", "auto", marks=pytest.mark.cuda),
]


class Both(nn.Module):
    """Two outputs, a module that runs twice, one that writes in place, and one whose units die."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice, self.act = nn.Linear(6, 8), nn.Linear(8, 8), nn.ReLU(inplace=True)
        self.image, self.norm = nn.Conv2d(1, 3, 2), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        hidden = self.act(self.twice(self.twice(self.once(x))) - 1)
        seen = self.image(hidden.view(-1, 1, 2, 4)).relu()
        return {"count": hidden.long(), "out": self.norm(hidden)}, seen


def loss_of(out: Any) -> Tensor:
    first, second = out
    return first["out"].square().mean() + second.mean()


def training(apply: Any, around: Callable[[Any], Any] = lambda fn: fn) -> Any:
    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            out, buffers = around(lambda params, x: apply(params, state.buffers, x))(params, x)
            return loss_of(out), buffers

        (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads, buffers=buffers), {"loss": loss}

    return train_step


def created(seed: int = 0, device: str = "cpu") -> tuple[Any, Any]:
    torch.manual_seed(seed)
    apply, params, buffers = fcg.from_module(Both().to(device))
    state = fcg.TrainState.create(params=params, buffers=buffers, optimizer=fcg.optim.adam(1e-2))
    return apply, state


def batches(count: int = CALLS) -> list[Tensor]:
    return list(torch.randn(count, 16, 6, generator=torch.Generator().manual_seed(1)))


def numbers(x: Tensor, *, acts: bool) -> list[float]:
    """Root mean square, largest magnitude and share of dead units, by plain arithmetic."""
    rows = x.double().movedim(-1, 0).flatten(1)
    dead = float((rows == 0).all(1).double().mean()) if acts else -1.0
    return [float(rows.square().mean().sqrt()), float(rows.abs().max()), dead]


def by_hooks(params: Any, buffers: Any, x: Tensor) -> dict[str, list[float]]:
    """What a module's hooks see of its outputs."""
    module, found = Both().to(x.device).train(), dict[str, list[float]]()

    def note(name: str) -> Any:
        def hook(_module: nn.Module, _given: Any, out: Any) -> None:
            row = name if name not in found else f"{name} (2)"
            value = out[0]["out"] if isinstance(out, tuple) else out
            found[row] = numbers(value.detach(), acts=name == "act")

        return hook

    for name, part in module.named_modules():
        part.register_forward_hook(note(name or "Both"))
    values = {name: leaf.clone() for name, leaf in [*params.items(), *buffers.items()]}
    torch.func.functional_call(module, values, (x,))
    return found


@pytest.mark.parametrize(("device", "lowering"), LOWERINGS)
def test_numbers_are_those_of_hooks_and_of_arithmetic(device: str, lowering: Any) -> None:
    apply, state = created(device=device)
    step = fcg.graph_step(fcg.statistics(training(apply)), lowering=lowering)
    grads_of = fcg.graph_fn(
        lambda state, x: fcg.grad(lambda p: loss_of(apply(p, state.buffers, x)[0]))(state.params)
    )
    for x in torch.stack(batches()).to(device):
        expected, grads = by_hooks(state.params, state.buffers, x), grads_of(state, x)
        old = {name: leaf.clone() for name, leaf in state.params.items()}
        state, _ = step(state, x)
        found = step.statistics
        for name, row in expected.items():
            got = found.values[-1, found.modules.index(name), :3].tolist()
            assert got == pytest.approx(row, rel=1e-4, abs=1e-6), name
        for path in {name.rpartition(".")[0] for name in old}:
            own = [name for name in old if name.rpartition(".")[0] == path]
            trees = [grads, old, {name: state.params[name].clone() - old[name] for name in own}]
            norms = [float(torch.cat([of[name].flatten() for name in own]).norm()) for of in trees]
            got = found.values[-1, found.modules.index(path), 3:].tolist()
            assert got == pytest.approx(norms, rel=1e-4, abs=1e-6), path
    assert set(found.modules) == {*expected, *(name.rpartition(".")[0] for name in old)}
    assert found("ratio")[-1].nan_to_num(0).max() > 1e-4


AROUND = {"plain": lambda fn: fn, "remat": fcg.remat}


@pytest.mark.parametrize("around", AROUND)
def test_a_step_that_looks_has_the_bits_of_one_that_does_not(around: str) -> None:
    apply, state = created()
    train_step, other = training(apply, AROUND[around]), fcg.fork(state)
    watched = fcg.graph_step(fcg.statistics(train_step, keep=4), lowering="aten")
    step = fcg.graph_step(train_step, lowering="aten")
    for x in batches():
        state, metrics = watched(state, x)
        other, expected = step(other, x)
        assert_trees_all_equal((state, metrics), (other, expected))
    assert len(watched.statistics.values) == 4


class Kept(nn.Module):
    """A checkpoint whose policy hands out results by the number of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        def policy(_context: Any, func: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
            kept = func is torch.ops.aten.linalg_vector_norm.default or "mm" in str(func)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        run = lambda y: self.b(self.a(y).tanh()).tanh()  # noqa: E731
        out = checkpoint(run, x, use_reentrant=False, context_fn=contexts)
        return checkpoint(lambda y: self.a(y).sin(), out, use_reentrant=False)


def test_what_a_checkpoint_runs_again_is_looked_at_once() -> None:
    torch.manual_seed(0)
    apply, params, _ = fcg.from_module(Kept())

    def train_step(state: Any, x: Tensor) -> Any:
        grads = fcg.grad(lambda p: apply(p, {}, x)[0].square().mean())(state.params)
        return state.apply_gradients(grads), {}

    step, plain = fcg.graph_step(fcg.statistics(train_step)), fcg.graph_step(train_step)
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
    other = fcg.fork(state)
    for x in batches(3):
        state, other = step(state, x)[0], plain(other, x)[0]
        assert_trees_all_equal(state, other)
    assert step.statistics.modules == ("a", "Kept", "b")  # b runs under the policy alone
    assert step.statistics("rms")[-1].isnan().tolist() == [False, False, True]


def test_members_of_a_sweep_have_the_numbers_that_they_have_alone() -> None:
    made = [created(seed) for seed in range(3)]
    step = fcg.graph_step(fcg.sweep(fcg.statistics(training(made[0][0]), keep=2)))
    alone = [fcg.graph_step(fcg.statistics(training(made[0][0]), keep=2)) for _ in made]
    states = [fcg.fork(state) for _, state in made]
    swept = fcg.tree.stack([state for _, state in made])
    for x in batches(3):
        swept, _ = step(swept, x)
        states = [one(state, x)[0] for one, state in zip(alone, states, strict=True)]
    for number, one in enumerate(alone):
        mine = step.statistics.member(number)
        assert mine.modules == one.statistics.modules
        torch.testing.assert_close(mine.values, one.statistics.values, rtol=1e-3, atol=1e-5)
    assert "3 members" in str(step.statistics)
    with pytest.raises(IndexError, match="no member 0: the step has 0 members"):
        alone[0].statistics.member(0)


def test_loops_record_each_time() -> None:
    apply, state = created()
    train_step = training(apply)
    many = fcg.graph_step(fcg.statistics(lambda state, xs: fcg.scan(train_step, state, xs), keep=CALLS))
    one, other = fcg.graph_step(fcg.statistics(train_step, keep=CALLS)), fcg.fork(state)
    state, _ = many(state, torch.stack(batches()))
    for x in batches():
        other, _ = one(other, x)
    torch.testing.assert_close(many.statistics.values, one.statistics.values)


def test_a_record_is_looked_at_afterwards() -> None:
    apply, state = created()
    train = fcg.record(fcg.graph_step(training(apply)), every=5)
    for x in batches():
        state, _ = train(state, x)
    watched = fcg.graph_step(fcg.statistics(training(apply), keep=CALLS))
    train.replay(state, 9, 12, step=watched)
    assert watched.statistics("rms").shape[0] == 4


def test_models_and_parameters_outside_of_modules_have_rows_of_their_own() -> None:
    first, second = (fcg.from_module(nn.Sequential(nn.Linear(4, 4), nn.ReLU())) for _ in range(2))

    def train_step(state: Any, x: Tensor) -> Any:
        def loss_fn(p: Any) -> Tensor:
            return second[0](p["b"], {}, first[0](p["a"], {}, x)[0])[0].mean() * p["scale"]

        grads = {**fcg.grad(loss_fn)(state.params), "scale": None}
        return state.apply_gradients(grads), {}

    params = {"a": first[1], "b": second[1], "scale": torch.tensor(2.0)}
    state = fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(0.1))
    step = fcg.graph_step(fcg.statistics(train_step))
    state, _ = step(state, torch.ones(2, 4))
    modules = step.statistics.modules
    assert set(modules) == {
        *("Sequential.0", "Sequential.1", "Sequential", "Sequential#2.0", "Sequential#2.1", "Sequential#2"),
        *("a.0", "b.0", "scale"),
    }
    assert step.statistics.values[-1, modules.index("scale")].tolist() == [-1, -1, -1, -1, 2, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_two_states_of_one_kind_have_rows_of_their_own(device: str, eager: bool) -> None:
    """Their names are the same in each capture, and in eager runs; what has no gradient has no number."""
    first, second = (fcg.from_module(nn.Sequential(nn.Linear(4, 4)).to(device)) for _ in range(2))

    def train_step(state: Any, x: Tensor) -> Any:
        new = {}
        if "a" in state:
            grads = fcg.grad(lambda p: first[0](p, {}, x)[0].square().mean())(state["a"].params)
            new["a"] = state["a"].apply_gradients({**grads, "0.bias": None})
        grads = fcg.grad(lambda p: 1e3 * second[0](p, {}, x)[0].square().mean())(state["b"].params)
        new["b"] = state["b"].apply_gradients(grads)
        return new, {}

    def create(one: Any, times: float) -> Any:
        params = {name: leaf * times for name, leaf in one[1].items()}
        return fcg.TrainState.create(params=params, optimizer=fcg.optim.sgd(1e-9))

    step, x = (
        fcg.graph_step(fcg.statistics(train_step, keep=4), max_captures=2),
        torch.ones(2, 4, device=device),
    )
    both = fcg.place({"a": create(first, 1.0), "b": create(second, 10.0)})
    alone = fcg.place({"b": create(second, 10.0)})
    run = step.eager if eager else step
    both, _ = run(both, x)
    run(alone, x)
    both, _ = run(both, x)
    found = step.statistics
    rows = ["Sequential.0", "Sequential", "0", "Sequential#2.0", "Sequential#2", "0, update 2"]
    assert list(found.modules) == rows
    assert found.calls == (0, 1, 2)
    assert found("rms").isnan()[:, 0].tolist() == [False, True, False]
    assert not found("rms")[:, 3].isnan().any()
    first_weights, second_weights = found("weight")[:, 2], found("weight")[:, 5]
    assert first_weights.isnan().tolist() == [False, True, False]
    expected = torch.cat([leaf.flatten() for leaf in second[1].values()]).double().norm()
    torch.testing.assert_close(second_weights / 10, expected.cpu().expand(3), rtol=1e-5, atol=1e-5)


def test_records_of_one_call_stand_together() -> None:
    apply, state = created()

    def of_slices(state: Any, x: Tensor) -> Any:
        loss = lambda params, x: loss_of(apply(params, state.buffers, x)[0])  # noqa: E731
        _, grads = fcg.microbatches(4)(fcg.value_and_grad(loss))(state.params, x)
        return state.apply_gradients(grads), {}

    step = fcg.graph_step(fcg.statistics(of_slices, keep=8))
    for x in batches(3):
        state, _ = step(state, x)
    found = step.statistics
    assert found.calls == (0, 1, 1, 1, 1, 2, 2, 2, 2)
    assert found("rms")[:, 0].isnan().tolist() == [True] + [False] * 8
    assert found("gradient")[:, 0].isnan().tolist() == [False, *[True] * 3, False, *[True] * 3, False]


def test_what_is_not_finite_is_shown_and_drawn() -> None:
    from functional_cg import report

    apply, state = created()
    step = fcg.graph_step(fcg.statistics(training(apply), keep=3))
    assert "no statistics yet" in str(step.statistics)
    with pytest.raises(ValueError, match="nothing to draw"):
        report.statistics(step.statistics)
    state, _ = step(state, batches()[0])
    state, _ = step(state, batches()[0] * torch.inf)
    text = str(step.statistics)
    assert text.splitlines()[1].split() == [
        *("module", "rms", "largest", "dead", "gradient", "weight", "update", "update/weight"),
    ]
    (row,) = [line for line in text.splitlines() if line.startswith("    once")]
    assert row.split()[1:] == ["nan", "nan", "nan", *row.split()[4:]]
    assert step.statistics("dead")[-1, list(step.statistics.modules).index("act")].isnan()
    assert "update/weight" in step.statistics._repr_html_()
    assert len(report.statistics(step, "rms")) == 1
    axes = report.statistics(step.statistics, ["rms", "ratio"])
    assert [ax.get_title() for ax in axes] == ["outputs: root mean square", "norm of update / weight"]
    with pytest.raises(KeyError, match="'loss' is no column; there are rms"):
        step.statistics("loss")


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="expected a function, got int"):
        fcg.statistics(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is captured already"):
        fcg.statistics(fcg.graph_step(lambda state: (state, {})))
    with pytest.raises(ValueError, match="`keep` has to be an integer of 1 or more, got 0"):
        fcg.statistics(lambda state: (state, {}), keep=0)


# --- alarms ------------------------------------------------------------------------------------------------


def counting(state: Any, x: Tensor) -> Any:
    fcg.alarm("x is negative", x < 0)
    return {"sum": state["sum"] + x}, {}


@pytest.mark.parametrize("device", DEVICES)
def test_an_alarm_goes_off_once_each_time_that_it_turns_true(device: str) -> None:
    step, state = fcg.graph_step(counting), fcg.place({"sum": torch.tensor(0.0, device=device)})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for x in [1.0, -1.0, -2.0, 3.0, float("nan"), -1.0, 1.0, -4.0]:
            state, _ = step(state, torch.tensor(x, device=device))
        step.close()
    ours = [one for one in seen if "negative" in str(one.message)]
    assert [str(one.message) for one in ours] == [
        f"`counting`, call {number}: x is negative" for number in (1, 5, 7)
    ]
    assert {one.filename for one in ours} == {__file__}


def test_an_alarm_as_an_error_loses_no_state() -> None:
    step, state = fcg.graph_step(counting), fcg.place({"sum": torch.tensor(0.0)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="call 0: x is negative"):
            step(state, torch.tensor(-1.0))
    assert float(state.latest()["sum"]) == -1


def test_an_alarm_of_an_eager_run_and_of_members() -> None:
    step, state = fcg.graph_step(counting), fcg.place({"sum": torch.tensor(0.0)})
    with pytest.warns(UserWarning, match="^x is negative$"):
        step.eager(state, torch.tensor(-1.0))
    swept = fcg.graph_step(fcg.sweep(counting, each="x"))
    with pytest.warns(UserWarning, match="call 0: x is negative, of 2 of 4 members: 1, 3$"):
        swept({"sum": torch.zeros(4)}, torch.tensor([1.0, -1.0, 2.0, -2.0]))


def test_alarms_of_a_loop_of_members_and_of_one_text() -> None:
    """Each member is told once it turns true; in a loop an alarm is heard in order; one text is one alarm."""

    def heard(step: Any, state: Any, *inputs: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for x in inputs:
                state, _ = step(state, x)
        return [str(one.message).partition(": ")[2] for one in seen]

    several = fcg.graph_step(counting, steps_per_call=4)
    start = fcg.place({"sum": torch.tensor(0.0)})
    assert (
        heard(several, start, torch.tensor([-1.0, -1.0, 1.0, -1.0]), -torch.ones(4)) == ["x is negative"] * 2
    )
    swept = fcg.graph_step(fcg.sweep(counting, each="x"))
    found = heard(swept, {"sum": torch.zeros(3)}, *torch.tensor([[-1.0, 1, 1], [-1, -1, 1], [1, 1, -1]]))
    assert found == [f"x is negative, of 1 of 3 members: {member}" for member in range(3)]

    def twice(state: Any, x: Tensor) -> Any:
        fcg.alarm("a", x > 0)
        fcg.alarm("b", x > 0)
        return state, {}

    step, state = fcg.graph_step(twice), fcg.place({"sum": torch.tensor(0.0)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in ("a", "b"):
            with pytest.raises(UserWarning, match=f"call 0: {text}"):
                step(state.latest(), torch.tensor(1.0 - 2 * (text == "b")))


@pytest.mark.parametrize(
    ("text", "when", "error", "words"),
    [
        (3, torch.tensor(True), TypeError, "`text` has to be a text, got 3"),
        (torch.tensor(True), "high", TypeError, "got a tensor, which comes second"),
        ("high", 3 > 2, TypeError, "'high' needs a tensor, bool\\[\\], got bool"),
        ("high", torch.ones(3) > 2, fcg.LayoutError, "expected bool\\[\\] +got bool\\[3\\]"),
        ("high", torch.tensor(1.0), fcg.LayoutError, "expected bool\\[\\] +got f32\\[\\]"),
    ],
)
def test_a_bad_alarm(text: Any, when: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fcg.alarm(text, when)
