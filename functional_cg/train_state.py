"""TrainState: what a training step carries from call to call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, Self

import torch
from torch import Tensor
from typing_extensions import TypeVar, dataclass_transform

from . import tree as pytree
from .arena import BufferSpec, no_tensors
from .errors import LayoutError
from .optim import GradientTransformation, apply_updates
from .optim.base import refuse_unlike
from .random import fold_in
from .shards.mesh import Mesh
from .state import place
from .tree import KeyPath, path_string

__all__ = ["TrainState"]

Params = TypeVar("Params", default=Any)


Init = Callable[[str, Tensor, Tensor], Tensor]


class Sharding(Protocol):
    """What :meth:`TrainState.create` asks of a sharding."""

    @property
    def mesh(self) -> Mesh:
        """The ranks."""
        ...

    def parameters(self, params: Any, make: Any = None, /) -> Any:
        """Parameters as this rank holds them; ``make(number, path, leaf)`` makes each where that is given."""
        ...

    def moments(self, placed: Any, /) -> Any:
        """Those parameters as the optimizer sees them when it makes its state."""
        ...

    def accumulators(self, placed: Any, /) -> Any:
        """Zeros for their gradients."""
        ...

    def agreed(self, tree: Any, /) -> Any:
        """Leaves that every rank holds whole."""
        ...


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(pytree.static, dataclasses.field)
)
class _StateClass:
    """Makes every subclass a frozen dataclass and a pytree node, without a decorator."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclass(frozen=True, kw_only=True)(cls)
        pytree.register_dataclass_node(cls)


class TrainState(_StateClass, Generic[Params]):
    """State of a training run: an immutable pytree. Subclass it to add fields; ``fcg.tree.static()`` declares one
    that belongs to the structure.

    Attributes:
      step: i64[], number of updates so far.
      params: Pytree of trained tensors.
      opt_state: What the optimizer keeps.
      buffers: Pytree of tensors that are not trained (BatchNorm statistics), or None.
      key: i64[2], key of :mod:`functional_cg.random`, or None.
      grads: Accumulator with the structure of ``params``, or None.
      optimizer: The gradient transformation; part of the structure, not a leaf.

    Example:
      >>> import torch, functional_cg as fcg
      >>> class EMAState(fcg.TrainState):
      ...     ema: dict
      >>> params = {"w": torch.ones(2)}
      >>> state = EMAState.create(params=params, optimizer=fcg.optim.sgd(0.1), ema={"w": torch.ones(2)})
      >>> state.ema["w"].shape
      torch.Size([2])
    """

    step: Tensor
    params: Params
    opt_state: Any
    buffers: Any = None
    # A state is created with a key or without one, which no checker can know: with Any a step that draws may use it.
    key: Tensor | Any = None
    grads: Params | None = None
    optimizer: GradientTransformation = pytree.static()

    @classmethod
    def create(
        cls,
        *,
        params: Params,
        optimizer: GradientTransformation,
        key: Tensor | None = None,
        buffers: Any = None,
        accumulate: bool = False,
        sharding: Sharding | None = None,
        init: Init | None = None,
        **fields: Any,
    ) -> Self:
        """Place parameters, fresh optimizer state and the rest in an arena; returns a handle.

        Args:
          params: Pytree of floating tensors on one device. They stay the caller's: values are copied. With ``init``,
            on the meta device.
          optimizer: Gradient transformation, from :mod:`functional_cg.optim`.
          key: i64[2]; moved to the device of ``params``.
          buffers: Pytree of tensors that are not trained.
          accumulate: Add ``grads``, an accumulator of zeros for gradients over several calls.
          sharding: From :func:`functional_cg.sharding.zero`: a rank holds its shard of parameters and moments, with
            the values of rank 0; what else is in the state is whole on each rank, with the values of rank 0 too.
          init: ``init(path, leaf, key) -> tensor`` makes a parameter, called leaf by leaf: of a model that fits on no
            single device, a rank holds its shards and one whole leaf. ``path`` is text, ``params['w']``, ``leaf`` the
            one on the meta device, and the tensor of its shape and dtype. Each leaf has a key of its own, folded from
            ``key``.
          fields: Values of the fields that a subclass adds.
        Raises:
          AliasError: If two leaves share memory.
          LayoutError: If a leaf is no tensor, or ``init`` makes one of another shape or dtype.
          TypeError: If ``params`` is a module or a generator, or ``optimizer`` or ``key`` is of another kind.
        """
        _refuse_arguments(params, optimizer, key)
        if init is not None and key is None:
            raise TypeError("TrainState.create: `init` needs keys: `key=fcg.random.key(seed)`")
        device = _home(params, key, sharding, init)
        with torch.inference_mode(False), torch.no_grad():
            key = None if key is None else key.to(device)
            make = None if init is None or key is None else partial(_made, init, key)
            if sharding is not None:
                params = sharding.parameters(params, make)
                buffers, key, fields = sharding.agreed((buffers, key, fields))
            elif make is not None:
                flat, treedef = pytree.flatten_with_path(params)
                leaves = [make(i, path, leaf) for i, (path, leaf) in enumerate(flat)]
                params = pytree.unflatten(treedef, leaves)
            moved = params if sharding is None else sharding.moments(params)
            state = cls(
                step=torch.zeros((), dtype=torch.int64, device=device),
                params=params,
                opt_state=optimizer.init(moved),
                buffers=buffers,
                key=key,
                grads=_accumulator(params, sharding) if accumulate else None,
                optimizer=optimizer,
                **fields,
            )
            return place(state, device)

    def apply_gradients(self, grads: Params, /, **changes: Any) -> Self:
        """One optimizer update: new params and opt_state, ``step`` plus one.

        The accumulator ``self.grads`` is neither read nor cleared: pass it as ``grads``, and zeros as a change,
        ``grads=fcg.tree.map(torch.zeros_like, state.grads)``.

        Args:
          grads: Pytree with the structure and shapes of ``params``.
          changes: Other fields to replace, such as ``buffers`` or ``key``.
        Raises:
          LayoutError: If ``grads`` is unlike ``params``.
        """
        optimizer = self.optimizer
        if grads is None:
            raise LayoutError.of(
                "",
                "apply_gradients: there are no gradients, `grads` is None.",
                why="A state has an accumulator only if it was created with one.",
                fix="`TrainState.create(..., accumulate=True)` makes `state.grads`.",
            )
        refuse_unlike(self.params, grads)
        if optimizer.step is not None:
            params, opt_state = optimizer.step(grads, self.opt_state, self.params)
        else:
            updates, opt_state = optimizer.update(grads, self.opt_state, self.params)
            params = apply_updates(self.params, updates)
        return dataclasses.replace(self, step=self.step + 1, params=params, opt_state=opt_state, **changes)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)

    def latest(self) -> Self:
        """The state itself; on a handle, the living handle of the same arena."""
        return self


def _home(params: Any, key: Any, sharding: Sharding | None, init: Init | None) -> torch.device:
    """Where the state is to live."""
    if sharding is not None:
        return sharding.mesh.device
    if init is not None:
        return key.device  # type: ignore[no-any-return]
    first = next((leaf for leaf in pytree.leaves(params) if isinstance(leaf, Tensor)), None)
    return torch.device("cpu") if first is None else first.device


def _made(init: Init, key: Tensor, number: int, path: KeyPath, like: Tensor) -> Tensor:
    name = path_string(path, "params")
    made = init(name, like, fold_in(key, number))
    spec = BufferSpec.of(like)
    if not isinstance(made, Tensor) or (made.shape, made.dtype) != (like.shape, like.dtype):
        got = BufferSpec.of(made) if isinstance(made, Tensor) else type(made).__name__
        raise LayoutError.of(
            "",
            "TrainState.create: `init` makes another tensor than it was asked for.",
            rows=[f"{name}  expected {spec}   got {got}"],
            fix="return a tensor of `leaf.shape` and `leaf.dtype`, `fcg.random.normal(key, leaf.shape, std=0.02)`.",
        )
    return made.to(key.device)


def _accumulator(params: Any, sharding: Sharding | None) -> Any:
    return pytree.map(torch.zeros_like, params) if sharding is None else sharding.accumulators(params)


def _refuse_arguments(params: Any, optimizer: Any, key: Any) -> None:
    if not isinstance(optimizer, GradientTransformation):
        got = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise TypeError(
            f"TrainState.create: optimizer must be one of `fcg.optim`, such as `fcg.optim.sgd(0.1)`, got {got}"
        )
    if isinstance(params, (torch.nn.Module, Iterator)):
        got = "a module" if isinstance(params, torch.nn.Module) else f"a {type(params).__name__}"
        raise TypeError(
            f"TrainState.create: params must be a pytree of tensors, got {got}: "
            "`apply, params, buffers = fcg.from_module(module)`, and in the step "
            "`out, new_buffers = apply(params, buffers, x)`"
        )
    if key is not None and not isinstance(key, Tensor):
        raise TypeError(f"TrainState.create: key must be made with `fcg.random.key(seed)`, got {key!r}")
    rows = no_tensors(params, "params")
    if rows:
        raise LayoutError.of(
            "",
            "TrainState.create: `params` has leaves that are no tensors.",
            rows=rows,
            why="Each parameter has a gradient and a state of the optimizer.",
            fix="make them tensors, `torch.tensor(...)`; keep names and settings as static fields.",
        )
