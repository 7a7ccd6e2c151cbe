"""TrainState: what a training step carries from call to call."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Self

import torch
from torch import Tensor
from typing_extensions import TypeVar, dataclass_transform

from . import tree as pytree
from .ambient.observing import observer
from .ambient.running import hand_back, own_work
from .errors import LayoutError
from .manual import Documented
from .messages.source import warn
from .messages.tracebacks import entry
from .optim import GradientTransformation
from .optim.algebra.arguments import refuse_without_rate
from .optim.algebra.base import resting, step_or_update
from .optim.algebra.fitting import filled, hidden, kept, left_out, refuse_unlike
from .pytree.nodes import register_dataclass_node
from .pytree.trees import no_tensors
from .state.creation import Init, Sharding, create, parts_of
from .state.leaf import Leaf, owned
from .tensors.parts import as_complex

__all__ = ["TrainState"]

Params = TypeVar("Params", default=Any)


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(pytree.static, dataclasses.field)
)
class _StateClass(metaclass=Documented):
    """Makes every subclass a frozen dataclass and a pytree node, without a decorator."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclass(frozen=True, kw_only=True)(cls)
        register_dataclass_node(cls)


class TrainState(_StateClass, Generic[Params]):
    """State of a training run: an immutable pytree.

    Subclass it to add fields; ``fcg.tree.static()`` declares a field that is part of the structure.

    What `create` and a step return is a handle, which has the fields and methods of the class but is no instance of
    it: ``isinstance(state, fcg.TrainState)`` and ``dataclasses.is_dataclass(state)`` are true of ``state.tree``, and of
    the state inside of a step.

    Attributes:
      step: i64[], number of updates so far.
      params: Pytree of trained tensors.
      opt_state: State of the optimizer.
      buffers: Pytree of tensors that are not trained (BatchNorm statistics), or None.
      key: i64[2], key of :mod:`functional_cg.random`, or None.
      grads: Accumulator with the structure of ``params``, or None.
      optimizer: The gradient transformation; part of the structure, not a leaf.
    Methods:
      create: Make a state from parameters and an optimizer.
      apply_gradients: The state after one optimizer update.
      replace: A copy with some fields replaced.
      latest: The live handle of this state's memory, after an interrupted call.

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
    # A type checker cannot know whether a state has a key; with Any, a step that draws may use it.
    key: Tensor | Any = None
    grads: Params | None = None
    optimizer: GradientTransformation = pytree.static()

    if not TYPE_CHECKING:  # a type checker would let any arguments, and any name, pass

        def __new__(cls, *args: Any, **fields: Any) -> Self:
            if args or (fields and not {"step", "opt_state"} <= fields.keys()):
                raise TypeError(
                    f"{cls.__name__}: a state is made by `create`, which makes the optimizer's state and places both.\n"
                    f"To fix: `fcg.{cls.__name__}.create(params=params, optimizer=optimizer)`."
                )
            return super().__new__(cls)

        def __getattr__(self, name: str) -> Any:
            raise _no_such_attribute(self, name)

    @classmethod
    @entry("state = fcg.TrainState.create(params=params, optimizer=optimizer)")
    def create(
        cls,
        *,
        params: Params,
        optimizer: GradientTransformation,
        key: Tensor | None = None,
        buffers: Any = None,
        accumulate: bool = False,
        sharding: Sharding | Any = None,
        init: Init | None = None,
        step: int | Tensor | None = None,
        can_sleep: bool = False,
        **fields: Any,
    ) -> Self:
        """Place parameters, fresh optimizer state and the rest in an arena; return a handle.

        Args:
          params: Pytree of floating or complex tensors on one device; values are copied. With ``init``, on the
            meta device. As in torch, the optimizer updates a complex tensor as its real and imaginary parts: its
            moments hold them side by side in the last axis.
          optimizer: Gradient transformation, from :mod:`functional_cg.optim`.
          key: i64[2]; moved to the device of ``params``.
          buffers: Pytree of tensors that are not trained.
          accumulate: Whether to add ``grads``, an accumulator of zeros for gradients over several calls.
          sharding: From :func:`functional_cg.sharding.zero`, or a tree prefix of ``params`` with such leaves.
            Each rank holds its shard of parameters and moments, and the rest whole. Values are those of rank 0.
          init: ``init(path, leaf, key) -> tensor`` makes a parameter, leaf by leaf, so that a rank holds its shards
            and one whole leaf. ``path`` is text such as ``params['w']``, ``leaf`` is on the meta device, and the
            result has its shape and dtype. Each leaf has its own key, folded from ``key``.
          step: Number of updates so far, 0 by default. With the ``key`` of another state, pass its ``step`` too:
            key and step determine the random numbers of a call.
          can_sleep: Whether :func:`functional_cg.sleep` can send its memory away; see :func:`functional_cg.place`.
          fields: Values of the fields that a subclass adds.
        Raises:
          AliasError: If two leaves share memory.
          LayoutError: If a leaf is not a tensor, or ``init`` returns another shape or dtype.
          TypeError: If ``params``, ``optimizer`` or ``key`` has the wrong type, or the class lacks a field.
          ValueError: If ``optimizer`` applies no learning rate, or ``key`` is that of another state and ``step`` is
            not given.
        """
        _refuse_arguments(params, optimizer, key)
        _refuse_unknown(cls, fields)
        if step is None and isinstance(key, Leaf):
            raise ValueError(
                "TrainState.create: `key` is that of another state, and `step` would begin at 0 again: "
                "`fold_in(state.key, state.step)` would repeat the random numbers of the run so far.\n"
                "To fix: go on counting, `step=state.step`; or begin with other numbers, `key=fcg.random.key(seed)`."
            )
        if init is not None and key is None:
            raise TypeError("TrainState.create: `init` needs keys: `key=fcg.random.key(seed)`")
        with torch.inference_mode(False), torch.no_grad():
            handle: Any = create(
                cls, params=params, optimizer=optimizer, key=key, accumulate=accumulate, sharding=sharding, init=init,
                step=_counted(step), others={"buffers": buffers, **fields}, can_sleep=can_sleep,
            )  # fmt: skip
        return handle  # type: ignore[no-any-return]

    @entry("state = state.apply_gradients(grads)")
    def apply_gradients(self, grads: Params, /, **changes: Any) -> Self:
        """Return the state after one optimizer update: new params and opt_state, ``step`` plus one.

        The accumulator ``self.grads`` is neither read nor cleared: pass it as ``grads``, and clear it with
        the change ``grads=fcg.tree.map(torch.zeros_like, state.grads)``.

        Args:
          grads: Pytree with the structure and shapes of ``params``. The optimizer converts other floating
            dtypes, such as bfloat16 for float32 parameters; with a fused op, a few leaves at a time. In a
            ``chain``, links in front of it, such as a clip, compute in the dtype of the gradients. A
            parameter that the loss does not use has a gradient of zeros, so decay and moments still move it.
            None in place of a gradient, or of a subtree, leaves it out, like ``p.grad = None`` in torch: the
            parameter and its moments do not change, and the norm of a clip ignores it. Nor does a count, if all
            parameters that share it are left out: those of one label of a ``partition``. If others go on, so does
            the count they share, whereas torch has one per parameter: after a long rest, Adam's first step is up
            to ``(1 - b1) / sqrt(1 - b2)`` (3.2) times those of torch. Give what rests a label of its own.
          changes: Other fields to replace, such as ``buffers`` or ``key``.
        Raises:
          LayoutError: If ``grads`` is None or does not match ``params``.
        """
        if grads is None:
            raise LayoutError.of(
                "",
                "apply_gradients: there are no gradients, `grads` is None.",
                why="A state has an accumulator only if it was created with one.",
                fix="`TrainState.create(..., accumulate=True)` makes `state.grads`.",
            )
        old = (self.params, self.opt_state)
        with own_work():
            params, opt_state = self._updated(grads)
            if (seen := observer()) is not None:
                seen.updated(self.params, grads, params)
        hand_back(old, (params, opt_state))
        return dataclasses.replace(self, step=self.step + 1, params=params, opt_state=opt_state, **changes)

    def _updated(self, grads: Any) -> tuple[Any, Any]:
        """Return new params and optimizer state; what has no gradient stays."""
        out = left_out(self.params, grads)
        grads = filled(self.params, grads, out) if out else grads
        refuse_unlike(self.params, grads)
        weights, grads = pytree.map(parts_of, self.params), pytree.map(parts_of, grads)
        old = (weights, self.opt_state)
        still = [i in out for i in range(len(pytree.leaves(weights)))]
        flags = [still, resting(self.optimizer, self.opt_state, weights, out)] if out else [[], []]
        ours, theirs = (hidden(flag, part) if out else part for flag, part in zip(flags, old, strict=True))
        params, opt_state = step_or_update(self.optimizer, grads, theirs, ours)
        if out:
            params, opt_state = map(kept, flags, old, (params, opt_state))
        return pytree.map(as_complex, params, self.params), opt_state

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields replaced."""
        _refuse_unknown(type(self), changes, "replace")
        return dataclasses.replace(self, **changes)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") == "torch.serialization":
            warn(
                "torch.save pickles the class of a state and its optimizer, which torch.load refuses by default.\n"
                "To fix: `fcg.save(path, state)`, and `state = fcg.load(path, state)`."
            )
        return super().__reduce_ex__(protocol)

    def latest(self) -> Self:
        """Return the state itself; on a handle, the live handle of the same arena."""
        return self


# What a module, or a state of flax, has -> what to write here.
_ELSEWHERE = MappingProxyType(
    {
        "state_dict": "`fcg.state_dict(state)`; of the parameters alone, `fcg.state_dict(state.params)`",
        "load_state_dict": "`state = fcg.load_state_dict(state, values)`",
        "parameters": "`state.params`",
        "named_parameters": "`state.params`, by name",
        "apply_fn": "`apply` of `apply, params, buffers = fcg.from_module(model)`, outside of the state",
        "batch_stats": "`state.buffers`",
        "tx": "`state.optimizer`",
        "model": "`apply(state.params, state.buffers, x)`, with `apply` from `fcg.from_module(model)`",
        "train": "`apply(..., train=True)`",
        "eval": "`apply(..., train=False)`",
        "save": "`fcg.save(path, state)`",
        "load": "`state = fcg.load(path, state)`",
        "clone": "`fcg.snapshot(state)`",
        "copy": "`fcg.snapshot(state)`",
    }
)


def _no_such_attribute(state: TrainState, name: str) -> AttributeError:
    known = [field.name for field in dataclasses.fields(state)]
    close = [f"`state.{one}`" for one in difflib.get_close_matches(name, known, 1)]
    meant = _ELSEWHERE.get(name) or "".join(close)
    fix = f".\nTo fix: {meant}." if meant else ""
    return AttributeError(
        f"{type(state).__name__!r} object has no attribute {name!r}{fix}", name=name, obj=state
    )


def _of_torch(optimizer: Any) -> bool:
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    return issubclass(kind, torch.optim.Optimizer)


def _counted(step: int | Tensor | None) -> Tensor:
    """Return the number of updates as i64[]."""
    count: Tensor = owned(step) if isinstance(step, Tensor) else torch.tensor(0 if step is None else step)
    if count.shape != () or count.dtype is not torch.int64:
        raise TypeError(
            f"TrainState.create: step must be a whole number, got {step!r}. To fix: `step=state.step`."
        )
    return count.detach().clone()


def _refuse_unknown(cls: type, fields: Mapping[str, Any], method: str = "create") -> None:
    unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(cls)})
    if unknown:
        raise TypeError(
            f"{cls.__name__}.{method}: `{cls.__name__}` has no field `{unknown[0]}`.\n"
            f"To fix: declare it, `class MyState(fcg.TrainState): {unknown[0]}: dict`, and call `MyState.create(...)`."
        )


def _refuse_arguments(params: Any, optimizer: Any, key: Any) -> None:
    if not isinstance(optimizer, GradientTransformation):
        got = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        adapted = f"; or `optimizer=fcg.optim.from_torch(torch.optim.{got}, lr=0.1)`, of its class"
        raise TypeError(
            f"TrainState.create: optimizer must be one of `fcg.optim`, got {got}.\n"
            f"To fix: `optimizer=fcg.optim.sgd(0.1)`{adapted if _of_torch(optimizer) else ''}."
        )
    refuse_without_rate("TrainState.create", optimizer)
    if isinstance(params, (torch.nn.Module, Iterator)):
        got = "a module" if isinstance(params, torch.nn.Module) else f"a {type(params).__name__}"
        raise TypeError(
            f"TrainState.create: params must be a pytree of tensors, got {got}.\n"
            "To fix: `apply, params, buffers = fcg.from_module(model)`; in the step, `out, new_buffers = "
            "apply(params, buffers, x)`."
        )
    if key is not None and not isinstance(key, Tensor):
        raise TypeError(
            f"TrainState.create: key must be a key, got {key!r}.\nTo fix: make one, `key=fcg.random.key(0)`."
        )
    rows = no_tensors(params, "params")
    if rows:
        raise LayoutError.of(
            "",
            "TrainState.create: `params` has leaves that are no tensors.",
            rows=rows,
            why="Each parameter has a gradient and a state of the optimizer.",
            fix="make them tensors, `torch.tensor(...)`; keep names and settings as static fields.",
        )
