"""Hypothesis strategies for random pure steps and random optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from torch import Tensor, nn

from .. import optim
from .. import random as keyed
from .. import tree as pytree
from ..nn import from_module
from ..optim import GradientTransformation
from ..state.arena import BufferSpec
from ..state.handle import snapshot
from ..transforms.autodiff import grad
from .trees import Draw, dtypes, like, tensors

__all__ = ["StepProgram", "optimizers", "step_fns"]


@dataclass(frozen=True)
class Operation:
    """One line of a program: a function applied to earlier values, which are given by number."""

    name: str
    function: Callable[..., Tensor]
    operands: tuple[int, ...]


@dataclass(frozen=True)
class StepProgram:
    """A random pure step, ``program(state, x) -> (state, metrics)``, whose repr is its program text.

    Attributes:
      state: A state to start from; at least one of its leaves is new at each call.
      x: An example input.
      operations: Its operations. Values are numbered: the leaves of the state first, then the input, then results.
      new_state: For each leaf, the number of the value that it becomes.
      metrics: Numbers of the values that it returns.
    """

    state: Any
    x: Tensor
    operations: tuple[Operation, ...]
    new_state: tuple[int, ...]
    metrics: tuple[int, ...]

    def __call__(self, state: Any, x: Tensor) -> tuple[Any, dict[str, Tensor]]:
        leaves, treedef = pytree.flatten(state)
        values = [*leaves, x]
        for operation in self.operations:
            values.append(operation.function(*[values[i] for i in operation.operands]))
        new_state = pytree.unflatten(treedef, [values[i] for i in self.new_state])
        return new_state, {f"m{n}": values[i] for n, i in enumerate(self.metrics)}

    @property
    def __name__(self) -> str:
        return "random_step"

    @property
    def kinds(self) -> frozenset[str]:
        """Names of the error-prone constructs that the program contains."""
        names = {operation.name for operation in self.operations}
        leaves = pytree.leaves(self.state)
        swapped = any(n != i < len(leaves) and self.new_state[i] == n for n, i in enumerate(self.new_state))
        contained = {
            **{kind: not names.isdisjoint(members) for kind, members in _FAMILIES},
            "swapped leaves": swapped,
            "zero-size leaves": any(leaf.numel() == 0 for leaf in leaves),
            "mixed dtypes": len({leaf.dtype for leaf in leaves}) > 1,
        }
        return frozenset(kind for kind, there in contained.items() if there)

    def __repr__(self) -> str:
        leaves = pytree.leaves(self.state)
        lines = [f"v{i} = state leaf  {BufferSpec.of(leaf)}" for i, leaf in enumerate(leaves)]
        lines.append(f"v{len(leaves)} = x  {BufferSpec.of(self.x)}")
        for number, operation in enumerate(self.operations, len(lines)):
            lines.append(f"v{number} = {operation.name}({', '.join(f'v{i}' for i in operation.operands)})")
        new = ", ".join(f"v{i}" for i in self.new_state)
        return "\n".join([*lines, f"return [{new}], [{', '.join(f'v{i}' for i in self.metrics)}]"])


def _gradient(w: Tensor, x: Tensor) -> Tensor:
    gradient: Tensor = grad(lambda p: (torch.tanh(p) * x.sum().to(p.dtype)).square().mean())(w)
    return gradient


class _Layer(nn.Module):
    """A linear layer around an existing weight, so that no initial values are drawn."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT


def _tied(w: Tensor, x: Tensor) -> Tensor:
    """Call a module whose two layers share one weight."""
    weight = nn.Parameter(torch.zeros(3, 3))
    apply, _, _ = from_module(nn.Sequential(_Layer(weight), nn.Tanh(), _Layer(weight)))
    out: Tensor = apply({"0.weight": w}, {}, x)[0]
    return out


def _tied_gradient(w: Tensor, x: Tensor) -> Tensor:
    gradient: Tensor = grad(lambda p: _tied(p, x).square().mean())(w)
    return gradient


def _sum_gradient(w: Tensor) -> Tensor:
    gradient: Tensor = grad(lambda p: p.sum())(w)
    return gradient


def _into_clone(a: Tensor) -> Tensor:
    out = a.clone()
    (out[::2] if out.dim() else out).add_(1)
    return out


def _plus_literal(a: Tensor) -> Tensor:
    return a + torch.tensor([1, 2, 3])[1].to(a.dtype)


def _masks(key: Tensor, a: Tensor) -> Tensor:
    return torch.where(keyed.bernoulli(key, 0.5, tuple(a.shape)), a, torch.zeros_like(a))


def _noise(key: Tensor, a: Tensor) -> Tensor:
    return keyed.uniform(key, tuple(a.shape)).to(a.dtype)


def _advance(key: Tensor) -> Tensor:
    return keyed.fold_in(key, 1)


def _float(a: Tensor) -> bool:
    return a.is_floating_point()


def _number(a: Tensor) -> bool:
    return a.dtype is not torch.bool


def _square(a: Tensor) -> bool:
    return a.dtype is torch.float32 and a.shape == (3, 3)


def _rows(a: Tensor) -> bool:
    return a.dtype is torch.float32 and a.dim() > 0 and a.shape[-1] == 3


def _key(a: Tensor) -> bool:
    return a.dtype is torch.int64 and a.shape == (2,)


_UNARY: tuple[tuple[str, Callable[[Tensor], bool], Callable[[Tensor], Tensor]], ...] = (
    ("tanh", _float, torch.tanh),
    ("half", _float, lambda a: a * 0.5),
    ("softmax", lambda a: _float(a) and a.dim() > 0, lambda a: torch.softmax(a, -1)),
    ("plus_one", _number, lambda a: a + 1),
    ("plus_literal", _number, _plus_literal),
    ("negative", _float, torch.neg),
    ("positive", _number, lambda a: a > 0),
    ("not", lambda a: a.dtype is torch.bool, torch.logical_not),
    ("sum", _float, lambda a: a.sum()),
    ("sort", lambda a: a.dim() > 0, lambda a: a.sort(-1).values),
    (
        "index",
        lambda a: _number(a) and a.dim() > 0 and a.shape[0] > 0,
        lambda a: a.index_select(0, torch.tensor([0], device=a.device)),
    ),
    ("clone", lambda a: True, torch.clone),
    ("into_clone", _number, _into_clone),
    ("sum_gradient", _float, _sum_gradient),
    ("advance", _key, _advance),
    # views: of a leaf, of the input, of each other
    ("alias", lambda a: True, lambda a: a.view_as(a)),
    ("detach", lambda a: True, torch.detach),
    ("transpose", lambda a: a.dim() > 1, lambda a: a.transpose(0, -1)),
    ("flip", lambda a: a.dim() > 0, lambda a: a.flip(0)),
    ("head", lambda a: a.dim() > 0, lambda a: a[:1]),
    ("flatten", lambda a: True, lambda a: a.reshape(-1)),
    ("expand", lambda a: a.dim() < 3, lambda a: a.expand(2, *a.shape)),
    ("to_float32", lambda a: True, lambda a: a.to(torch.float32)),
    ("to_float64", lambda a: True, lambda a: a.to(torch.float64)),
    ("to_bfloat16", lambda a: True, lambda a: a.to(torch.bfloat16)),
    ("to_bool", lambda a: True, lambda a: a.to(torch.bool)),
)
_BINARY: tuple[tuple[str, Callable[[Tensor, Tensor], bool], Callable[[Tensor, Tensor], Tensor]], ...] = (
    ("add", lambda a, b: a.shape == b.shape and _number(a) and _number(b), torch.add),
    ("mix", lambda a, b: a.shape == b.shape and _float(a) and _float(b), lambda a, b: torch.tanh(a * b)),
    ("equal", lambda a, b: a.shape == b.shape, torch.eq),
    ("matmul", lambda a, b: a.dim() == b.dim() == 2 and a.dtype == b.dtype and _float(a) and a.shape == b.shape,
     lambda a, b: torch.tanh(a @ b.mT)),
    ("gradient", lambda a, b: _float(a) and _float(b), _gradient),
    ("shift", lambda a, b: _float(a) and _float(b), lambda a, b: torch.tanh(a + b.sum().to(a.dtype))),
    ("tied_module", lambda w, x: _square(w) and _rows(x), _tied),
    ("tied_gradient", lambda w, x: _square(w) and _rows(x), _tied_gradient),
    ("noise", lambda key, a: _key(key) and _float(a), _noise),
    ("masked", lambda key, a: _key(key) and _float(a), _masks),
)  # fmt: skip


# Constructs that many programs must contain.
_FAMILIES = (
    ("gradients", frozenset({"gradient", "sum_gradient", "tied_gradient"})),
    ("randomness", frozenset({"noise", "masked"})),
    ("tied weights", frozenset({"tied_module", "tied_gradient"})),
)


def _candidates(values: Sequence[Tensor]) -> list[Operation]:
    """List all operations that apply to some values."""
    found = [
        Operation(name, function, (i,))
        for name, fits, function in _UNARY
        for i, a in enumerate(values)
        if fits(a) and a.numel() <= 64
    ]
    found += [
        Operation(name, function, (i, j))
        for name, fits, function in _BINARY
        for i, a in enumerate(values)
        for j, b in enumerate(values)
        if fits(a, b)
    ]
    return found


@st.composite
def step_fns(
    draw: Draw, *, states: st.SearchStrategy[Any] | None = None, max_operations: int = 12
) -> StepProgram:
    """Draw random pure steps over random states.

    They take gradients, draw keyed randomness, call a module with tied weights, swap leaves, pass them through, return
    one tensor in two places, and return metrics that alias old leaves, new leaves, the input and each other. Each
    construct is reported as a hypothesis ``event``, which ``pytest --hypothesis-show-statistics`` counts.

    Args:
      states: Pytrees to start from; by default dicts with twins to swap, a key, a counter and random leaves.
      max_operations: Upper bound of the program's length.
    Raises:
      InvalidArgument: If ``states`` is no strategy.
    """
    if states is not None and not isinstance(states, st.SearchStrategy):
        raise InvalidArgument(f"step_fns: `states` must be a strategy, got {states!r}")
    tree = snapshot(draw(_states() if states is None else states))
    x = draw(
        tensors(
            shapes=st.sampled_from(((2, 3), (3,), ())),
            dtypes=st.sampled_from((torch.float32, torch.float64)),
        )
    )
    leaves = pytree.leaves(tree)
    values: list[Tensor] = [*leaves, x]
    operations: list[Operation] = []
    for _ in range(draw(st.integers(1, max_operations))):
        operation = draw(_operations(values))
        values.append(operation.function(*[values[i] for i in operation.operands]))
        operations.append(operation)
    new_state = draw(_new_states(leaves, values))
    metrics = draw(st.lists(st.integers(0, len(values) - 1), max_size=4))
    program = StepProgram(tree, x, tuple(operations), new_state, tuple(metrics))
    for kind in sorted(program.kinds):
        event(kind)
    return program


@st.composite
def _operations(draw: Draw, values: Sequence[Tensor]) -> Operation:
    """Draw an operation by family, then name, so that those that fit often do not crowd out the rest."""
    fitting = _candidates(values)
    names = {operation.name for operation in fitting}
    families = [sorted(names & members) for _, members in _FAMILIES]
    name = draw(
        st.sampled_from([family for family in (sorted(names), sorted(names), *families) if family]).flatmap(
            st.sampled_from
        )
    )
    operation: Operation = draw(st.sampled_from([found for found in fitting if found.name == name]))
    return operation


@st.composite
def _new_states(draw: Draw, leaves: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[int, ...]:
    """Draw the value that becomes each leaf; often two leaves are swapped."""
    new_state = [draw(_values_for(leaf, values)) for leaf in leaves]
    pairs = [
        (i, j)
        for j, later in enumerate(leaves)
        for i, leaf in enumerate(leaves[:j])
        if leaf.shape == later.shape and leaf.dtype is later.dtype
    ]
    if pairs and draw(st.booleans()):
        i, j = draw(st.sampled_from(pairs))
        new_state[i], new_state[j] = j, i
    return tuple(new_state)


def _values_for(leaf: Tensor, values: Sequence[Tensor]) -> st.SearchStrategy[int]:
    """Draw one of the values that can become a leaf, computed ones first, so that examples shrink towards change."""
    fitting = [i for i, v in enumerate(values) if v.shape == leaf.shape and v.dtype is leaf.dtype]
    return st.sampled_from(fitting[::-1])


@st.composite
def _states(draw: Draw) -> Any:
    shape = draw(st.sampled_from(((2, 3), (3,), (0,), (2, 0, 3), ())))
    some = tensors(shapes=st.just(shape), dtypes=st.just(draw(dtypes())))
    twin = like(torch.zeros(2, 3))
    return {
        "twins": (draw(twin), draw(twin)),
        "same": [draw(some) for _ in range(draw(st.integers(1, 3)))],
        "flag": draw(like(torch.zeros(3, dtype=torch.bool))),
        "half": draw(like(torch.zeros(2, 3, dtype=torch.bfloat16))),
        "tied": draw(like(torch.zeros(3, 3))),
        "count": torch.zeros((), dtype=torch.int64),
        "key": keyed.key(draw(st.integers(0, 2**31))),
        "none": None,
    }


@st.composite
def optimizers(draw: Draw) -> GradientTransformation:
    """Draw optimizers with and without momentum, weight decay, a schedule, clipping and flat storage."""
    rate = draw(st.sampled_from((0.1, optim.warmup_cosine(0.1, 3, 20), optim.linear(0.1, 0.0, 20))))
    rule = draw(
        st.sampled_from(
            (
                optim.sgd(rate),
                optim.sgd(rate, momentum=0.9, nesterov=True),
                optim.adam(rate),
                optim.adamw(rate, weight_decay=0.01),
                optim.adagrad(rate),
                optim.lamb(rate, weight_decay=0.01),
                optim.yogi(rate),
            )
        )
    )
    clipped = optim.chain(optim.clip_by_global_norm(0.5), rule) if draw(st.booleans()) else rule
    return optim.flatten(clipped) if draw(st.booleans()) else clipped
