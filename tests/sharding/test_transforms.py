"""Losses that differentiate and map, with torch's own functions, over leaves that are gathered as they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import functional_cg as fcg
from functional_cg import optim
from tests.sharding.programs import Setting, randn
from tests.sharding.ranks import on_ranks

func = torch.func
Loss = Callable[[Any, Tensor], Tensor]


def small(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"] + params["b"]).square().mean()


# Under `torch.func` nobody can say what autograd keeps: where leaves are gathered again in the backward it is refused.
FUNC: dict[str, Loss] = {
    "grad of all leaves": lambda p, x: small(p, x) + func.grad(small)(p, x)["w"].square().sum(),
    "grad of a leaf": lambda p, x: func.grad(lambda w: torch.tanh(x @ w).sum())(p["w"]).square().sum(),
    "grad of an input": lambda p, x: func.grad(lambda y: small(p, y))(x).square().sum(),
    "vjp": lambda p, x: func.vjp(lambda w: torch.tanh(x @ w).sum(), p["w"])[1](x.sum())[0].square().sum(),
    "jacrev": lambda p, x: func.jacrev(lambda w: torch.tanh(x @ w).sum(0))(p["w"]).square().sum(),
    "hessian": lambda p, x: func.hessian(lambda y: small(p, y))(x[0]).square().sum(),
    "gradients of samples": lambda p, x: func.vmap(func.grad(small), in_dims=(None, 0))(p, x)["w"].square().sum(),
}  # fmt: skip

EVERYWHERE: dict[str, Loss] = {
    "autograd.grad of a leaf": lambda p, x: (
        torch.autograd.grad(small(p, x), p["w"], create_graph=True)[0].square().sum()
    ),
    "fcg.grad of a leaf": lambda p, x: fcg.grad(lambda w: torch.tanh(x @ w).sum())(p["w"]).square().sum(),
    "vmap over data": lambda p, x: func.vmap(lambda row: small(p, row))(x).square().sum(),
    "vmap over a leaf": lambda p, x: (
        func.vmap(lambda column: torch.tanh(x @ column), in_dims=1)(p["w"]).square().sum()
    ),
    "jvp": lambda p, x: func.jvp(lambda w: torch.tanh(x @ w).sum(), (p["w"],), (p["w"] * 2,))[1],
    "jacfwd": lambda p, x: func.jacfwd(lambda w: torch.tanh(x @ w).sum(0))(p["w"]).square().sum(),
}


def leaves() -> dict[str, Tensor]:
    return {"w": randn(1, 5, 3), "b": randn(2, 3)}


def of_ranks(cases: list[tuple[int, bool]]) -> dict[Any, Any]:
    """Loss and gradients of each, captured; the same data on all ranks."""
    found: dict[Any, Any] = {}
    for stage, reshard in cases:
        zero = Setting({"data": 2}, stage, {"reshard": reshard}).zero("cpu")
        state = fcg.TrainState.create(params=leaves(), optimizer=optim.sgd(0.1), sharding=zero)
        for name, loss in {**EVERYWHERE, **({} if stage == 3 and reshard else FUNC)}.items():

            def read(state: Any, x: Tensor, loss: Loss = loss) -> Any:
                value, grads = fcg.value_and_grad(loss)(state.params, x)
                return value, fcg.sharding.gather(grads)

            found[stage, reshard, name] = fcg.graph_fn(read, lowering="aten")(state, randn(3, 4, 5))
    return found


def test_torchs_own_transforms_see_whole_leaves() -> None:
    first, second = on_ranks(2, of_ranks, [(1, True), (3, True), (3, False)])
    assert len(first) == 3 * len(EVERYWHERE) + 2 * len(FUNC)
    for (stage, reshard, name), (value, grads) in first.items():
        whole = {key: leaf.requires_grad_() for key, leaf in leaves().items()}
        expected = {**EVERYWHERE, **FUNC}[name](whole, randn(3, 4, 5))
        wanted = torch.autograd.grad(
            expected, list(whole.values()), allow_unused=True, materialize_grads=True
        )
        case = f"{name} at stage {stage}, reshard={reshard}"
        torch.testing.assert_close(value, expected.detach(), msg=case)
        for key, grad in zip(whole, wanted, strict=True):
            torch.testing.assert_close(grads[key], grad, msg=case)
            assert torch.equal(grads[key], second[stage, reshard, name][1][key]), case
