"""Mistakes with sharded leaves, the error of each, and the result of its advice: the table of ``test_misuse``."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import sharding

__all__ = ["MISTAKES", "Mistake", "close", "same"]


class WithAverage(fcg.TrainState):
    ema: Any = None


@dataclass(frozen=True)
class Mistake:
    """A mistake and its repair.

    Attributes:
      make: Made on the last rank alone.
      error: What it raises.
      says: How the message begins.
      names: What it names: a key path, or what was expected and got.
      repair: What the advice says, on all ranks; returns whether its result is right.
    """

    make: Callable[[Any], Any]
    error: type[Exception]
    says: str
    names: str
    repair: Callable[[Any], Any]


def metric(function: Callable[..., Any], *args: Any) -> Any:
    """What a step returns as its metric, on a fork of the first argument."""

    def train_step(state: Any, *inputs: Any) -> Any:
        return state, {"out": function(state, *inputs)}

    return fcg.graph_step(train_step, lowering="aten")(fcg.fork(args[0]), *args[1:])[1]["out"]


def read(function: Callable[..., Any], *args: Any) -> Any:
    """What a read-only function returns."""

    def show(*args: Any) -> Any:
        return function(*args)

    return fcg.graph_fn(show, lowering="aten")(*args)


def close(a: Any, b: Any) -> bool:
    return math.isclose(float(a), float(b), rel_tol=1e-5)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def assigned(leaf: Tensor) -> None:
    leaf.data = torch.zeros(leaf.shape)


def same(tree: Any, other: Any) -> bool:
    return all(
        torch.equal(a.cpu(), b.cpu())
        for a, b in zip(fcg.tree.leaves(tree), fcg.tree.leaves(other), strict=True)
    )


def stepped(new: Callable[[Any], Any], state: Any, *inputs: Any) -> Any:
    """What a step returns as its new state."""

    def train_step(state: Any, *inputs: Any) -> Any:
        return new(state, *inputs), {}

    return fcg.graph_step(train_step, lowering="aten")(fcg.fork(state), *inputs)[0]


NUMBER = r"asks a sharded leaf for a number of the host, by `\.item\(\)`, `float\(\)` or `if`\."
W1 = r"state\.params\['w1'\]  float32\[5, 7\] sharded over data=2"
SCALE = r"state\.params\['scale'\]  float32\[\] sharded over data=2"
OUTSIDE = r"asks a leaf of 2 ranks for \S+ outside of the step that got it"
PICKLE = r"state\.params\['w1'\]  float32\[5, 7\] sharded over data=2 cannot be pickled: its mesh is one of running"
COPIED_IN = r"`{}`: has inputs that cannot be copied in; the state is unchanged\."
BESIDE = r"`{}`: returns sharded leaves beside the new state\."
MESHES = r"gets leaves on 2 meshes; nothing was changed\."


def gathers(b: Any) -> bool:
    return same(sharding.gather(b.w), b.whole["w1"])


def gives_a_number(b: Any) -> bool:
    return float(sharding.gather(b.scale)) == 1.5


def local_is_a_part(b: Any) -> bool:
    """The shard, saved and read again."""
    part = pickle.loads(pickle.dumps(sharding.local(b.w).cpu()))
    start = 18 * b.mesh.rank
    return same(part, b.whole["w1"].flatten()[start : start + 18])


def returns_in_metrics(name: str) -> Callable[[Any], bool]:
    return lambda b: close(
        metric(lambda s: getattr(s.params["w1"], name)(), b.state), getattr(b.whole["w1"], name)()
    )


def gradients_in_a_step(b: Any) -> bool:
    grads = fcg.value_and_grad(lambda p: p["w1"].square().sum())
    found = metric(lambda s: fcg.optim.global_norm(grads({"w1": s.params["w1"]})[1]), b.state)
    return close(found, 2 * b.whole["w1"].norm())


def updates_out_of_place(b: Any) -> bool:
    new = fcg.tree.at(lambda s: s.params["w1"], fcg.fork(b.state), b.whole["w1"] + 1)
    return same(sharding.gather(new.params["w1"]), b.whole["w1"] + 1)


def everything(b: Any) -> bool:
    whole = sharding.state_dict(b.state)
    return not whole if b.mesh.rank else same(whole["params.w1"], b.whole["w1"])


def created_of_whole_leaves(b: Any) -> bool:
    made = WithAverage.create(
        params=sharding.gather(b.state.params),
        ema=sharding.gather(b.state.params),
        optimizer=fcg.optim.sgd(0.1),
        sharding=b.zero,
    )
    return same(sharding.gather(made.params["w1"]), b.whole["w1"]) and same(made.ema["w1"], b.whole["w1"])


def average_of(gather: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda s: s.replace(ema={"w1": gather(s.params["w1"]) * 2})


def average_follows(b: Any) -> bool:
    new = stepped(average_of(sharding.gather), b.average)
    return same(new.ema["w1"], 2 * b.whole["w1"])


def curvature(grad: Callable[..., Any]) -> Callable[[Any], Any]:
    """A loss with a gradient in it, and its own gradient."""

    def loss(params: Any) -> Any:
        return grad(lambda w: torch.tanh(w).sum())(params["w1"]).square().sum()

    return lambda s: fcg.grad(loss)({"w1": s.params["w1"]})["w1"].norm()


def curvature_in_a_step(b: Any) -> bool:
    stay = sharding.zero(b.mesh, reshard=False)
    kept = fcg.TrainState.create(params=b.whole, optimizer=fcg.optim.sgd(0.1), sharding=stay)
    w = b.whole["w1"].clone().requires_grad_()
    (expected,) = torch.autograd.grad((1 - torch.tanh(w).square()).square().sum(), w)
    return close(metric(curvature(fcg.grad), b.state), expected.norm()) and close(
        metric(curvature(torch.func.grad), kept), expected.norm()
    )


def reduced(x: Any) -> Any:
    torch.distributed.all_reduce(y := x * 2)
    return y


def sent_on(x: Any) -> Any:
    torch.distributed.send(x * 2, 0)
    return x


def mean_in_a_step(b: Any) -> bool:
    return close(metric(lambda s, x: sharding.mean(x.float()), b.state, torch.tensor(b.mesh.rank)), 0.5)


MISTAKES = {
    # numbers of the host
    "item": Mistake(
        lambda b: b.one.item(), fcg.LayoutError, NUMBER, r"state\.params\['one'\]", gives_a_number
    ),
    "float": Mistake(lambda b: float(b.scale), fcg.LayoutError, NUMBER, SCALE, gives_a_number),
    "bool": Mistake(lambda b: bool(b.scale), fcg.LayoutError, NUMBER, SCALE, gives_a_number),
    "if": Mistake(
        lambda b: 1 if b.scale > 0 else 0, fcg.LayoutError, NUMBER, r"bool\[\] sharded", gives_a_number
    ),
    "format": Mistake(
        lambda b: f"{b.scale:.2f}",
        fcg.LayoutError,
        "asks a sharded leaf for its number in the format '.2f'",
        SCALE,
        gives_a_number,
    ),
    "tolist": Mistake(
        lambda b: b.w.tolist(), fcg.LayoutError, r"asks a sharded leaf for tolist\.", W1, gathers
    ),
    "numpy": Mistake(lambda b: b.w.numpy(), fcg.LayoutError, r"asks a sharded leaf for numpy\.", W1, gathers),
    "array": Mistake(
        lambda b: numpy.asarray(b.w), fcg.LayoutError, r"asks a sharded leaf for numpy\.", W1, gathers
    ),
    "dlpack": Mistake(
        lambda b: torch.utils.dlpack.to_dlpack(b.w),
        (fcg.LayoutError, RuntimeError, BufferError),
        "",
        "",
        gathers,
    ),
    "address": Mistake(
        lambda b: b.w.data_ptr(), fcg.LayoutError, r"asks a sharded leaf for the address\.", W1, gathers
    ),
    "storage": Mistake(
        lambda b: b.w.untyped_storage(),
        fcg.LayoutError,
        r"asks a sharded leaf for the storage\.",
        W1,
        gathers,
    ),
    # elements
    "index": Mistake(lambda b: b.w[0], fcg.LayoutError, r"asks a sharded leaf for aten\.select", W1, gathers),
    "mask": Mistake(
        lambda b: b.w[b.w > 0], fcg.LayoutError, r"asks a sharded leaf for aten\.index", W1, gathers
    ),
    "rows": Mistake(
        lambda b: list(b.w), fcg.LayoutError, r"asks a sharded leaf for aten\.unbind", W1, gathers
    ),
    "equal": Mistake(
        lambda b: torch.equal(b.w, b.w), fcg.LayoutError, r"asks a sharded leaf for aten\.equal", W1, gathers
    ),
    "matrix product": Mistake(
        lambda b: torch.ones(2, 5, device=b.device) @ b.w,
        fcg.LayoutError,
        r"asks a sharded leaf for aten\.mm",
        W1,
        gathers,
    ),
    "along a dimension": Mistake(
        lambda b: read(lambda s: s.params["w1"].sum(0), b.state),
        fcg.LayoutError,
        r"`show`: asks a sharded leaf for aten\.sum\.dim_IntList along a dimension",
        r"at mistakes",
        gathers,
    ),
    "broadcast": Mistake(
        lambda b: read(lambda s: (s.params["w1"] + s.params["b1"].sum().expand(7)).sum(), b.state),
        fcg.LayoutError,
        r"`show`: combines a sharded leaf with a tensor of another shape",
        r"\[5, 7\] sharded over data=2   with \[7\]",
        lambda b: close(
            read(lambda s: (s.params["w1"] + s.params["b1"].sum().expand(5, 7)).sum(), b.state),
            b.whole["w1"].sum(),
        ),
    ),
    # collectives outside of a step
    **{
        name: Mistake(
            lambda b, name=name: getattr(b.w, name)(), fcg.LayoutError, OUTSIDE, W1, returns_in_metrics(name)
        )
        for name in ("sum", "mean", "norm", "max", "min", "amax")
    },
    "contains": Mistake(lambda b: 1.0 in b.w, fcg.LayoutError, OUTSIDE, r"bool\[5, 7\] sharded", gathers),
    "of what was computed": Mistake(
        lambda b: (2 * b.w.reshape(7, 5)).abs().amax(),
        fcg.LayoutError,
        OUTSIDE,
        r"float32\[7, 5\]",
        returns_in_metrics("amax"),
    ),
    "of a copy": Mistake(
        lambda b: copy.deepcopy(b.w).sum(), fcg.LayoutError, OUTSIDE, r"float32\[5, 7\]", gathers
    ),
    "global norm": Mistake(
        lambda b: fcg.optim.global_norm(b.state.params),
        fcg.LayoutError,
        OUTSIDE,
        r"state\.params\['b1'\]",
        lambda b: close(
            metric(lambda s: fcg.optim.global_norm(s.params), b.state),
            torch.stack([leaf.norm() for leaf in b.whole.values()]).norm(),
        ),
    ),
    "gradients": Mistake(
        lambda b: fcg.value_and_grad(lambda p: p["w1"].sum())(b.state.params),
        fcg.LayoutError,
        r"asks a leaf of 2 ranks for gradients outside of the step",
        r"state\.params\['b1'\]",
        gradients_in_a_step,
    ),
    "closed over": Mistake(
        lambda b: read(lambda s: s.params["scale"].sum() + b.w.sum(), b.state),
        fcg.LayoutError,
        r"`show`: asks a leaf of 2 ranks for aten\.sum\.default outside of the step that got it, at mistakes",
        W1,
        returns_in_metrics("sum"),
    ),
    # writes
    "setitem": Mistake(
        lambda b: b.w.__setitem__(0, 1.0),
        fcg.ReadOnlyError,
        "a sharded leaf was written to",
        W1,
        updates_out_of_place,
    ),
    "in place": Mistake(
        lambda b: b.w.add_(1),
        fcg.ReadOnlyError,
        r"`state\.params\['w1'\]` was written to",
        "",
        updates_out_of_place,
    ),
    "data": Mistake(
        lambda b: assigned(b.w),
        fcg.ReadOnlyError,
        r"`\.data` of a sharded leaf was written to",
        W1,
        updates_out_of_place,
    ),
    "requires_grad": Mistake(
        lambda b: b.w.requires_grad_(),
        fcg.ReadOnlyError,
        r"`\.requires_grad` of a sharded leaf was written to",
        W1,
        updates_out_of_place,
    ),
    "copied over": Mistake(
        lambda b: torch.zeros(5, 7, device=b.device).copy_(b.w),
        fcg.LayoutError,
        r"asks a sharded leaf for aten\.copy_\.default, which writes it into a tensor that is whole",
        W1,
        gathers,
    ),
    # files
    "torch.save": Mistake(lambda b: saved(b.w), TypeError, PICKLE, W1, local_is_a_part),
    "pickle": Mistake(lambda b: pickle.dumps(b.w), TypeError, PICKLE, W1, local_is_a_part),
    "pickle of a state": Mistake(
        lambda b: pickle.dumps(b.state),
        TypeError,
        r".* cannot be pickled",
        r"sharding\.state_dict",
        everything,
    ),
    "fcg.state_dict": Mistake(
        lambda b: fcg.state_dict(b.state),
        fcg.LayoutError,
        r"fcg\.state_dict: the state is sharded",
        r"params\.b1  f32\[7\]",
        everything,
    ),
    "fcg.save": Mistake(
        lambda b: fcg.save("/dev/null/none", b.state),
        fcg.LayoutError,
        r"fcg\.state_dict: the state is sharded",
        r"params\.b1",
        everything,
    ),
    # the border of a step
    "metric": Mistake(
        lambda b: metric(lambda s: s.params["w1"], b.state),
        fcg.LayoutError,
        BESIDE.format("train_step"),
        r"metrics\['out'\]  f32\[5,7\]\S* sharded over data=2",
        lambda b: (
            same(metric(lambda s: sharding.gather(s.params["w1"]), b.state), b.whole["w1"])
            and returns_in_metrics("norm")(b)
            and metric(lambda s: sharding.local(s.params["w1"]), b.state).numel() == 18
        ),
    ),
    "output": Mistake(
        lambda b: read(lambda s: {"a": [s.params["w1"] * 2]}, b.state),
        fcg.LayoutError,
        BESIDE.format("show"),
        r"\['a'\]\[0\]  f32\[5,7\]",
        lambda b: same(
            read(lambda s: {"a": [sharding.gather(s.params["w1"]) * 2]}, b.state), 2 * b.whole["w1"]
        ),
    ),
    "input": Mistake(
        lambda b: metric(lambda s, w: w.sum(), b.state, b.w),
        fcg.LayoutError,
        COPIED_IN.format("train_step"),
        r"inputs\[1\]  expected a dense tensor on \S+( or \S+)?   got f32\[5,7\]@\S+ sharded over data=2",
        lambda b: close(metric(lambda s, w: w.sum(), b.state, sharding.gather(b.w)), b.whole["w1"].sum()),
    ),
    "new leaf of another shape": Mistake(
        lambda b: fcg.tree.at(lambda s: s.params["w1"], fcg.fork(b.state), torch.zeros(3, 2)),
        fcg.LayoutError,
        r"fcg\.tree\.at: values do not fit `state`",
        r"state\.params\['w1'\]  expected f32\[5,7\]\S* sharded over data=2   got f32\[3,2\]",
        updates_out_of_place,
    ),
    "an average that is sharded": Mistake(
        lambda b: stepped(average_of(lambda leaf: leaf), b.average),
        fcg.LayoutError,
        r"`train_step`: returns a new state that is unlike the old one",
        r"state\.ema\['w1'\]  expected f32\[5,7\]@\S+   got f32\[5,7\]@\S+ sharded over data=2\n"
        r"[^\n]*\nTo fix: give `fcg\.sharding\.gather\(leaf\)`: the old leaf is whole on each rank",
        average_follows,
    ),
    "an average that is sharded, eagerly": Mistake(
        lambda b: fcg.fork(b.average).replace(ema={"w1": b.w}),
        fcg.LayoutError,
        r"replace: values do not fit `state`, which is unchanged\.",
        r"state\.ema\['w1'\]  expected f32\[5,7\]@\S+   got f32\[5,7\]@\S+ sharded over data=2\n"
        r"[^\n]*\nTo fix: give `fcg\.sharding\.gather\(leaf\)`",
        lambda b: same(
            fcg.fork(b.average).replace(ema={"w1": sharding.gather(b.w)}).ema["w1"], b.whole["w1"]
        ),
    ),
    "a shard as a new leaf": Mistake(
        lambda b: stepped(
            lambda s: s.replace(params={**s.params, "w1": sharding.local(s.params["w1"])}), b.state
        ),
        fcg.LayoutError,
        r"`train_step`: returns a new state that is unlike the old one",
        r"expected f32\[5,7\]@\S+ sharded over data=2   got f32\[18\]@\S+\n"
        r"[^\n]*\nTo fix: give the leaf itself, or all of it, `fcg\.sharding\.gather\(leaf\)`",
        lambda b: same(
            sharding.gather(
                stepped(lambda s: s.replace(params={**s.params, "w1": s.params["w1"] * 2}), b.state)
            ).params["w1"],
            2 * b.whole["w1"],
        ),
    ),
    # of another kind than ours
    "norm of order 0": Mistake(
        lambda b: read(lambda s: s.params["w1"].norm(0), b.state),
        fcg.LayoutError,
        r"`show`: asks a sharded leaf for its norm of order 0, at mistakes",
        r"sharding\.gather\(leaf\)",
        lambda b: close(read(lambda s: sharding.gather(s.params["w1"]).norm(0), b.state), 35),
    ),
    "torch.func.grad": Mistake(
        lambda b: metric(curvature(torch.func.grad), b.state),
        fcg.LayoutError,
        r"`train_step`: differentiates with `torch\.func` in a loss whose leaves are gathered again .*, at mistakes",
        r"\n  params\['w1'\]  float32\[5, 7\] sharded over data=2\n",
        curvature_in_a_step,
    ),
    "all_reduce of torch in a step": Mistake(
        lambda b: metric(lambda s, x: reduced(x), b.state, torch.ones(2)),
        fcg.CaptureError,
        r"`train_step`: talks to other ranks by c10d\.allreduce_\.default, at mistakes",
        r"fcg\.sharding\.mean",
        mean_in_a_step,
    ),
    "send in a step": Mistake(
        lambda b: metric(lambda s, x: sent_on(x), b.state, torch.ones(2)),
        fcg.CaptureError,
        r"`train_step`: talks to other ranks by c10d\.send\.default, at mistakes",
        r"of a pipeline send by `fcg\.sharding\.pipeline",
        mean_in_a_step,
    ),
    "state_dict in a step": Mistake(
        lambda b: metric(sharding.state_dict, b.state),
        fcg.CaptureError,
        r"`train_step`: `sharding\.state_dict` was called in a step, at mistakes",
        "",
        everything,
    ),
    "state_dict of an object": Mistake(
        lambda b: sharding.state_dict({"w": b.w, "name": "mlp"}),
        fcg.LayoutError,
        r"sharding\.state_dict: the state has leaves that are no tensors\.",
        r"state\['name'\]  expected a tensor   got str",
        everything,
    ),
    "fold_in of no key": Mistake(
        lambda b: metric(lambda s: sharding.fold_in(3), b.state),
        fcg.CaptureError,
        r"`train_step`: raised TypeError, at mistakes.*: `key`: expected a key, got int 3\.",
        "",
        lambda b: metric(lambda s: sharding.fold_in(s.key), b.state).shape == (2,),
    ),
    "fold_in of a state": Mistake(
        lambda b: metric(sharding.fold_in, b.state),
        fcg.CaptureError,
        r"`train_step`: raised TypeError, at mistakes.*: `key`: expected a key, got TrainState\.",
        "",
        lambda b: metric(lambda s: sharding.fold_in(s.key), b.state).shape == (2,),
    ),
    "mean of float8": Mistake(
        lambda b: metric(lambda s, x: sharding.mean(x.to(torch.float8_e5m2)), b.state, torch.ones(2)),
        fcg.LayoutError,
        r"`train_step`: `sharding\.mean` cannot reduce a leaf",
        r"got f8_e5m2\[2\]",
        mean_in_a_step,
    ),
    # reductions over ranks
    "mean outside": Mistake(
        lambda b: sharding.mean(torch.ones(())),
        fcg.RankError,
        r"`sharding\.mean` was called outside of a step, with 2 ranks",
        "",
        mean_in_a_step,
    ),
    "sum outside": Mistake(
        lambda b: sharding.sum({"n": torch.ones(())}),
        fcg.RankError,
        r"`sharding\.sum` was called outside of a step, with 2 ranks",
        "",
        lambda b: close(metric(lambda s, x: sharding.sum(x), b.state, torch.tensor(b.mesh.rank)), 1.0),
    ),
    "fold_in outside": Mistake(
        lambda b: sharding.fold_in(b.state.key),
        fcg.RankError,
        r"`sharding\.fold_in` was called outside of a step, with 2 ranks",
        "",
        lambda b: same(
            fcg.random.fold_in(b.key, b.mesh.rank), metric(lambda s: sharding.fold_in(s.key), b.state)
        ),
    ),
    "mean over no mesh": Mistake(
        lambda b: metric(lambda s: sharding.mean(s["w"]), fcg.place({"w": torch.ones((), device=b.device)})),
        fcg.RankError,
        r"`train_step`: `sharding\.mean` was called in a step whose states lie on no mesh, with 2 ranks",
        "",
        mean_in_a_step,
    ),
    "mean of a sharded leaf": Mistake(
        lambda b: metric(lambda s: sharding.mean({"w": s.params["w1"]}), b.state),
        fcg.LayoutError,
        r"`train_step`: `sharding\.mean` cannot reduce a leaf",
        r"tree\['w'\]  expected a tensor of numbers   got f32\[5,7\]",
        returns_in_metrics("mean"),
    ),
    "mean of a mask": Mistake(
        lambda b: metric(lambda s, x: sharding.mean(x > 0), b.state, torch.tensor(b.mesh.rank)),
        fcg.LayoutError,
        r"`train_step`: `sharding\.mean` cannot reduce a leaf",
        r"got bool\[\]",
        lambda b: close(
            metric(lambda s, x: sharding.mean((x > 0).float()), b.state, torch.tensor(b.mesh.rank)), 0.5
        ),
    ),
    "mean of a number": Mistake(
        lambda b: metric(lambda s: sharding.mean(2.0), b.state),
        fcg.LayoutError,
        r"`train_step`: `sharding\.mean` cannot reduce a leaf",
        r"tree  expected a tensor of numbers   got float",
        lambda b: close(metric(lambda s: sharding.mean(torch.tensor(2.0, device=b.device)), b.state), 2),
    ),
    # arguments of another kind
    "local of a tree": Mistake(
        lambda b: sharding.local(b.state.params),
        TypeError,
        r"sharding\.local: expected a leaf, got Handle\. To fix",
        "fcg.tree.map",
        lambda b: fcg.tree.map(sharding.local, b.state.params)["w1"].numel() in (18, 17),
    ),
    "local of a name": Mistake(
        lambda b: sharding.local("w1"),
        TypeError,
        r"sharding\.local: expected a leaf, got str\. To fix",
        "",
        local_is_a_part,
    ),
    "sharding is a mesh": Mistake(
        lambda b: fcg.TrainState.create(params=b.whole, optimizer=fcg.optim.sgd(0.1), sharding=b.mesh),
        TypeError,
        r"TrainState\.create: sharding must be made with `fcg\.sharding\.zero\(mesh, stage=3\)`, got Mesh\.",
        "",
        created_of_whole_leaves,
    ),
    "sharding is a dict": Mistake(
        lambda b: fcg.TrainState.create(params=b.whole, optimizer=fcg.optim.sgd(0.1), sharding={"data": 2}),
        TypeError,
        r"TrainState\.create: sharding must be made with .*, got int\.",
        "",
        created_of_whole_leaves,
    ),
    "created of sharded leaves": Mistake(
        lambda b: fcg.TrainState.create(params=b.state.params, optimizer=fcg.optim.sgd(0.1), sharding=b.zero),
        fcg.LayoutError,
        r"TrainState\.create: gets sharded leaves",
        r"state\.params\['b1'\]  expected a whole tensor   got f32\[7\]",
        created_of_whole_leaves,
    ),
    "a field of sharded leaves": Mistake(
        lambda b: WithAverage.create(
            params=b.whole, ema={"w1": b.w}, optimizer=fcg.optim.sgd(0.1), sharding=b.zero
        ),
        fcg.LayoutError,
        r"TrainState\.create: gets sharded leaves",
        r"state\.ema\['w1'\]  expected a whole tensor",
        created_of_whole_leaves,
    ),
    "sharded leaves without a sharding": Mistake(
        lambda b: fcg.TrainState.create(params=b.state.params, optimizer=fcg.optim.sgd(0.1)),
        fcg.LayoutError,
        r"TrainState\.create: gets sharded leaves",
        r"state\.params\['b1'\]",
        created_of_whole_leaves,
    ),
    # several meshes
    "two meshes in a state": Mistake(
        lambda b: fcg.place({"a": b.w, "b": b.other.params["w1"]}),
        fcg.LayoutError,
        MESHES,
        r"state\['a'\]  on data=2\n  state\['b'\]  on other=2",
        lambda b: fcg.place({"a": b.w, "b": sharding.gather(b.other.params["w1"])}) is not None,
    ),
    "two meshes in a function": Mistake(
        lambda b: read(lambda a, o: a.params["w1"].sum() + o.params["w1"].sum(), b.state, b.other),
        fcg.LayoutError,
        f"`show`: {MESHES}",
        r"inputs\[0\]  on data=2\n  inputs\[1\]  on other=2",
        lambda b: close(
            read(lambda a, o: a.params["w1"].sum() + o.params["w1"].sum(), b.state, b.twin),
            2 * b.whole["w1"].sum(),
        ),
    ),
    "two meshes in a step": Mistake(
        lambda b: metric(lambda s, o: o.params["w1"].sum(), b.state, b.other),
        fcg.LayoutError,
        f"`train_step`: {MESHES}",
        "state  on data=2",
        lambda b: close(metric(lambda s, o: o.params["w1"].sum(), b.state, b.twin), b.whole["w1"].sum()),
    ),
    "values of another mesh": Mistake(
        lambda b: fcg.fork(b.state).replace(params=b.other.params),
        fcg.LayoutError,
        "combines a sharded leaf with one of another mesh",
        r"\[7\] sharded over data=2   with \[7\] sharded over other=2",
        lambda b: same(
            sharding.gather(fcg.fork(b.state).replace(params=sharding.gather(b.other.params)).params["w1"]),
            b.whole["w1"],
        ),
    ),
    # wrappers of torch
    "DDP": Mistake(
        lambda b: fcg.from_module(b.ddp),
        TypeError,
        r"from_module: `DistributedDataParallel` itself is a wrapper",
        r"To fix: pass the module inside, `model\.module`",
        lambda b: len(fcg.from_module(b.ddp.module)[1]) == 2,
    ),
    "FSDP2": Mistake(
        lambda b: fcg.from_module(b.fsdp),
        TypeError,
        r"from_module: `FSDPLinear` itself is a wrapper",
        r"To fix: pass the module before `fully_shard`",
        lambda b: len(fcg.from_module(torch.nn.Linear(2, 2))[1]) == 2,
    ),
    "DDP in a step": Mistake(
        lambda b: metric(lambda s, x: b.ddp(x).sum(), b.state, torch.ones(1, 2)),
        fcg.ForeignTensorError,
        r"`train_step`: reads a tensor that is in neither the state nor the inputs",
        r"make the DistributedDataParallel a pure function",
        lambda b: len(fcg.from_module(b.ddp.module)[1]) == 2,
    ),
    "parameters of FSDP2": Mistake(
        lambda b: fcg.TrainState.create(params=dict(b.fsdp.named_parameters()), optimizer=fcg.optim.sgd(0.1)),
        fcg.LayoutError,
        r"`state` has leaves that cannot be placed",
        r"state\.params\['bias'\]  expected a dense tensor   got the subclass DTensor",
        lambda b: (
            fcg.TrainState.create(
                params=dict(b.fsdp.named_parameters()), optimizer=fcg.optim.sgd(0.1), sharding=b.zero
            )
            .params["bias"]
            .shape
            == (2,)
        ),
    ),
}
