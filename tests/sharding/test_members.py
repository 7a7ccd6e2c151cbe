"""The members of a sweep over ranks: ``sharding.members``.

The judges are the step of one model without a mesh, of the bits of a rank that holds one member, and the sweep of one
process, whose program is the same but for the line that creates the state. Numbers are of double precision, in which
sums in another order differ by some 1e-16 of their size.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor

import functional_cg as fcg
from functional_cg import optim, sharding
from functional_cg.errors import FunctionalCGError
from tests.sharding.law import on_gloo_and_nccl
from tests.sharding.ranks import on_ranks

RANKS, MEMBERS, CALLS = 2, 4, 20
PEAKS = torch.tensor([1e-2, 5e-3, 2e-2, 1e-3], dtype=torch.float64)


def net() -> nn.Module:
    """Convolution, batch norm and dropout."""
    convolved = (nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.3))
    return nn.Sequential(*convolved, nn.Flatten(), nn.Linear(48, 5)).double()


def optimizer() -> Any:
    """Adamw that clips by the norm of a member's gradients, along a schedule whose peak is the member's own."""
    rates = optim.inject_hyperparams(
        lambda peak: optim.adamw(optim.warmup_cosine(peak, 3, 50), weight_decay=0.01)
    )
    return optim.chain(optim.clip_by_global_norm(0.05), rates(peak=1e-2))


OPTIMIZER = optimizer()


def create(number: int) -> Any:
    torch.manual_seed(number)
    _, params, buffers = fcg.from_module(net())
    return fcg.TrainState.create(
        params=params, buffers=buffers, optimizer=OPTIMIZER, key=fcg.random.key(number)
    )


def step_of(apply: Any, *, on_mesh: bool = False) -> Any:
    """The step of one member; one for data-parallel runs asks for means and keys of ranks, too."""
    mean, key_of = (sharding.mean, sharding.fold_in) if on_mesh else (lambda x: x, lambda key: key)

    def train_step(state: Any, batch: Any) -> Any:
        x, y = batch
        key = fcg.random.fold_in(key_of(state.key), state.step)

        def loss_fn(params: Any) -> Any:
            out, buffers = apply(params, state.buffers, x, key=key)
            return F.cross_entropy(out, y), buffers

        (loss, buffers), grads = fcg.value_and_grad(loss_fn, has_aux=True)(state.params)
        new = state.apply_gradients(mean(grads)).replace(buffers=buffers)
        return new, {"loss": mean(loss), "kind": "mean"}

    return train_step


def batch_of(call: int, *sizes: int, device: Any = "cpu") -> Any:
    draws = torch.Generator().manual_seed(call)
    x = torch.randn(*sizes, 6, 1, 6, 6, generator=draws, dtype=torch.float64)
    return x.to(device), (torch.arange(6) % 5).expand(*sizes, 6).contiguous().to(device)


def together(mesh: Any, count: int = MEMBERS) -> Any:
    """The state of all members: on a mesh, or in one process."""
    if mesh is None:
        state = fcg.tree.stack([create(number) for number in range(count)])
    else:
        state = sharding.members(mesh, create, count)
    return optim.set_hyperparams(state, peak=PEAKS[:count])


def plain(tree: Any) -> list[Tensor]:
    """The tensors of a tree, whole, on the host."""
    leaves = fcg.tree.leaves(sharding.gather(tree))
    return [leaf.cpu().clone() for leaf in leaves if isinstance(leaf, Tensor)]


def trained(mesh: Any, given: str = "shared", count: int = MEMBERS) -> tuple[list[Tensor], list[Tensor]]:
    """Train all members: what each call returned, and the state at the end."""
    shared, device = given == "shared", "cpu" if mesh is None else mesh.device
    sweep = fcg.sweep(
        step_of(fcg.from_module(net())[0], on_mesh=mesh is not None), each=() if shared else "batch"
    )
    step, state, losses = fcg.graph_step(sweep, lowering="aten"), together(mesh, count), []
    for call in range(CALLS):
        batch = batch_of(call, *(() if shared else (count,)), device=device)
        if given == "own" and mesh is not None:
            each = count // mesh.size
            batch = tuple(part[mesh.rank * each :][:each] for part in batch)
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].cpu())
    return losses, plain(state)


def over_ranks(given: str, device: str = "cpu") -> Any:
    return trained(sharding.mesh({"data": -1}, device=device), given)


def close(found: list[Tensor], wanted: list[Tensor], rtol: float = 1e-9) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-11)


@on_gloo_and_nccl
def test_a_program_on_ranks_is_that_of_one_process(device: str) -> None:
    losses, leaves = trained(None)
    for of_rank in on_ranks(RANKS, over_ranks, "shared", device, device=device):
        close(of_rank[0], losses)
        close(of_rank[1], leaves)


@pytest.mark.parametrize("given", ["all", "own"])
def test_a_batch_of_each_member_is_that_of_all_or_of_the_rank(given: str) -> None:
    losses, leaves = trained(None, "all")
    for of_rank in on_ranks(RANKS, over_ranks, given):
        close(of_rank[0], losses)
        close(of_rank[1], leaves)


def alone(_: int) -> bool:
    """Whether the member of this rank has the bits of a run of its own."""
    mesh = sharding.mesh({"data": -1}, device="cpu")
    of_all, leaves = trained(mesh, count=RANKS)
    state = optim.set_hyperparams(create(mesh.rank), peak=PEAKS[mesh.rank])
    step = fcg.graph_step(step_of(fcg.from_module(net())[0]), lowering="aten")
    for call in range(CALLS):
        state, metrics = step(state, batch_of(call))
        assert torch.equal(of_all[call][mesh.rank], metrics["loss"])
    mine = [leaf[mesh.rank] for leaf in leaves]
    return all(map(torch.equal, mine, plain(fcg.snapshot(state))))


def test_one_member_on_a_rank_has_the_bits_of_a_run_of_its_own() -> None:
    assert on_ranks(RANKS, alone, 0) == [True] * RANKS


# --- checkpoints -------------------------------------------------------------------------------------------------


def on(mesh: Any, state: Any, calls: range) -> list[Tensor]:
    step = fcg.graph_step(fcg.sweep(step_of(fcg.from_module(net())[0])), lowering="aten")
    for call in calls:
        state, _ = step(state, batch_of(call))
    return [*plain(state)]


def saved(folder: str, ranks: int) -> list[Tensor]:
    """Train, save as a folder and as a file, and go on."""
    mesh = sharding.mesh({"data": -1}, device="cpu") if ranks > 1 else None
    step = fcg.graph_step(fcg.sweep(step_of(fcg.from_module(net())[0])), lowering="aten")
    state, _ = step(together(mesh), batch_of(0))
    fcg.checkpoints(folder).save(state, step=1, wait=True)
    whole = sharding.state_dict(state)
    if mesh is None or mesh.rank == 0:
        fcg.save(f"{folder}/all.safetensors", whole)
    for call in range(1, 4):
        state, _ = step(state, batch_of(call))
    return plain(state)


def resumed(folder: str, ranks: int) -> list[list[Tensor]]:
    mesh = sharding.mesh({"data": -1}, device="cpu") if ranks > 1 else None
    loads = (fcg.checkpoints(folder).load, lambda state: fcg.load(f"{folder}/all.safetensors", state))
    return [on(mesh, load(together(mesh)), range(1, 4)) for load in loads]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_a_checkpoint_is_read_by_any_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    wanted = on_ranks(before, saved, folder, before)[0] if before > 1 else saved(folder, 1)
    of_ranks = on_ranks(after, resumed, folder, after) if after > 1 else [resumed(folder, 1)]
    for found in of_ranks:
        for leaves in found:
            close(leaves, wanted)


# --- members that are copied, stopped, taken ---------------------------------------------------------------------


def small(number: int) -> dict[str, Tensor]:
    return {"w": torch.arange(3.0) + number, "n": torch.tensor(0)}


def grown(state: Any, x: Tensor) -> Any:
    return {"w": state["w"] * x.sum(), "n": state["n"] + 1}, {"mean": state["w"].mean()}


def copied(state: Any, x: Tensor) -> Any:
    """Copy the best over the worst in the step itself."""
    state, metrics = fcg.sweep(grown)(state, x)
    order = metrics["mean"].argsort(descending=True)
    return fcg.tree.take(state, torch.stack([order[0], order[0], order[1], order[2]])), metrics


def scanned(state: Any, xs: Tensor) -> Any:
    return fcg.scan(fcg.sweep(grown), state, xs)


def uses(ranks: int) -> dict[str, Any]:
    """What a program does with members; the program of one process is the same."""
    mesh = sharding.mesh({"data": -1}, device="cpu") if ranks > 1 else None
    x, some = torch.ones(3), torch.tensor([True, False, False, True])

    def state() -> Any:
        if mesh is None:
            return fcg.tree.stack([small(number) for number in range(MEMBERS)])
        return sharding.members(mesh, small, MEMBERS)

    step = fcg.graph_step(fcg.sweep(grown), lowering="aten")
    new, metrics = step(state(), x)
    out = {
        "metrics": metrics["mean"],
        "a member": fcg.tree.take(new, 3),
        "the last": fcg.tree.take(new, -1),
        "in a new order": sharding.gather(fcg.tree.take(new, [3, 3, 2, 0])),
        "some": sharding.gather(fcg.tree.take(new, metrics["mean"] > 2)),
        "evaluated": fcg.graph_fn(fcg.sweep(lambda state, x: (state["w"] * x).sum()))(new, x),
        "of plain values": sharding.gather(fcg.tree.at(lambda s: s["n"], state(), torch.arange(4)))["n"],
        "on the host": fcg.tree.map(lambda one: one.clone(), sharding.gather(new)),
    }
    calls = {
        "active": lambda: fcg.graph_step(fcg.sweep(grown))(state(), x, active=some),
        "eagerly": lambda: step.eager(state(), x),
        "copied": lambda: fcg.graph_step(copied, lowering="aten")(state(), x),
        "steps per call": lambda: fcg.graph_step(fcg.sweep(grown), steps_per_call=2)(
            state(), torch.ones(2, 3)
        ),
        "scanned": lambda: fcg.graph_step(scanned, lowering="aten")(state(), torch.ones(2, 3)),
        "onwards": lambda: step(fcg.tree.take(fcg.place(state()), [3, 3, 2, 0]), x),
    }
    for name, call in calls.items():
        after, metrics = call()
        out[name] = (sharding.gather(fcg.snapshot(after)), metrics)
    return fcg.tree.map(lambda one: one.tolist(), out)


def test_what_a_program_does_with_members_is_that_of_one_process() -> None:
    wanted = uses(1)
    assert wanted["copied"][0]["w"][1] == wanted["copied"][0]["w"][0] == [9.0, 12.0, 15.0]
    for found in on_ranks(RANKS, uses, RANKS):
        assert found == wanted


def as_on_the_page(path: str) -> list[float]:
    """The program of the page, with the lines for several ranks in place of the one that stacks."""
    programs = re.findall(r"```python\n(.*?)```", Path(path).read_text(encoding="utf-8"), re.DOTALL)
    program = next(one for one in programs if "fcg.tree.stack" in one)
    lines = next(one for one in programs if "fcg.sharding.members" in one)
    if not started():
        lines = "state = fcg.tree.stack([create(seed) for seed in range(16)])\ntorch.manual_seed(0)\n"
    program, replaced = re.subn(r"state = fcg\.tree\.stack\(.*\n", lines, program)
    names: dict[str, Any] = {}
    exec(compile(program, path, "exec"), names)
    assert replaced == 1
    return names["losses"].tolist()  # type: ignore[no-any-return]


def started() -> bool:
    return "RANK" in os.environ


def test_the_page_is_right() -> None:
    page = str(Path(fcg.__file__).parent / "transforms" / "README.md")
    found = on_ranks(RANKS, as_on_the_page, page)
    assert found[0] == found[1] == pytest.approx(as_on_the_page(page), rel=1e-4)


def parallel(_: int) -> Any:
    """Two ranks train the same members, each on its own data."""
    mesh = sharding.mesh({"data": 2, "members": 2}, device="cpu")
    warnings.simplefilter("ignore", FutureWarning)  # torch renames its functional collectives

    def with_losses(state: Any, x: Tensor) -> Any:
        state, metrics = step_of_line(state, x)
        of_both = all_gather_tensor(metrics["mine"][None], 0, mesh.axes[0].group)
        return state, {**metrics, "of both": of_both}

    step = fcg.graph_step(fcg.sweep(with_losses, each="x"), lowering="aten")
    state = sharding.members(mesh, line, MEMBERS)
    for call in range(3):
        state, metrics = step(state, rows(call)[:, mesh.axes[0].rank :: 2])
    torch.testing.assert_close(metrics["of both"].mean(1), metrics["loss"])
    assert torch.equal(metrics["of both"][:, mesh.axes[0].rank], metrics["mine"])
    return [metrics["loss"], metrics["ranks"], *plain(state)]


def line(number: int) -> Any:
    return fcg.TrainState.create(params={"w": torch.full((3,), 0.1 * number)}, optimizer=optim.sgd(0.1))


def rows(call: int) -> Tensor:
    return torch.randn(MEMBERS, 4, 3, generator=torch.Generator().manual_seed(call))


def step_of_line(state: Any, x: Tensor) -> Any:
    loss, grads = fcg.value_and_grad(lambda params: (x @ params["w"] - 1).square().mean())(state.params)
    metrics = {"loss": sharding.mean(loss), "mine": loss, "ranks": sharding.sum(torch.ones(()))}
    return state.apply_gradients(sharding.mean(grads)), metrics


def test_a_mean_in_a_member_is_one_of_the_ranks_that_hold_it() -> None:
    step = fcg.graph_step(fcg.sweep(step_of_line, each="x"), lowering="aten")
    state = fcg.tree.stack([line(number) for number in range(MEMBERS)])
    for call in range(3):
        state, metrics = step(state, rows(call))
    for loss, ranks, *leaves in on_ranks(4, parallel, 0):
        assert ranks.tolist() == [2.0] * MEMBERS
        torch.testing.assert_close(loss, metrics["loss"])
        for one, other in zip(leaves, plain(state), strict=True):
            torch.testing.assert_close(one, other)


# --- what is refused ---------------------------------------------------------------------------------------------


def mistake(kind: str) -> str:
    """What a rank is told."""
    mesh = sharding.mesh({"data": -1}, device="cpu", timeout=5.0)
    state = sharding.members(mesh, small, MEMBERS)
    step, x = fcg.graph_step(fcg.sweep(grown), lowering="aten"), torch.ones(3)
    zero = fcg.TrainState.create(
        params={"w": torch.ones(4, 3), "n": torch.zeros(4)},
        optimizer=optim.sgd(0.1),
        sharding=sharding.zero(mesh, stage=1),
    )
    acts: dict[str, Any] = {
        "a number that is not divisible": lambda: sharding.members(mesh, small, 3),
        "no number": lambda: sharding.members(mesh, small, 2.0),  # type: ignore[arg-type]
        "three of two ranks": lambda: fcg.tree.take(state, [0, 1, 2]),
        "others on another rank": lambda: fcg.tree.take(fcg.place(state), mesh.rank),
        "on one rank": lambda: fcg.tree.take(state, 0) if mesh.rank == 0 else "",
        "outside of a step": lambda: fcg.sweep(grown)(fcg.place(state), x),
        "a leaf that is whole": lambda: step({**state, "n": torch.zeros(4).long()}, x),
        "a state that is sharded": lambda: step(dict(zero.params), x),
        "a batch of others": lambda: fcg.graph_step(fcg.sweep(grown, each="x"))(state, torch.ones(3, 3)),
    }
    try:
        return str(acts[kind]())
    except (FunctionalCGError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("a number that is not divisible", r"ValueError: .*divisible by 2, .*'data', got 3.*`count=4`"),
        ("no number", r"ValueError: .*a positive integer.*got 2\.0.*`count=4`"),
        ("three of two ranks", r"LayoutError: 3 members cannot be divided equally among 2 ranks.*such as 4"),
        ("others on another rank", r"RankError: `tree.take`: .*members 0 +rank 1  members 1"),
        ("on one rank", r"RankError: `tree.take`: waited 5 s for rank 1|^$"),
        ("outside of a step", r"LayoutError: .*all of its members outside of the step"),
        ("a leaf that is whole", r"LayoutError: .*state\['n'\]\n.*sharding.members\(mesh, create, 16\)"),
        ("a state that is sharded", r"LayoutError: .*state\['w'\]\n.*sharding.members\(mesh, create, 16\)"),
        ("a batch of others", r"LayoutError: .*x  expected a tensor \[4, \.\.\.\] +got f32\[3,3\]"),
    ],
)
def test_a_mistake_is_named_on_all_ranks(kind: str, says: str) -> None:
    for told in on_ranks(RANKS, mistake, kind):
        assert re.search(says, told, re.DOTALL), told
