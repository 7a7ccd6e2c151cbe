"""``module_step``: a captured step of a torch module and its optimizer, whose values both of them keep showing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from functional_cg import optim, random
from functional_cg.errors import BakedValueError, CaptureError
from functional_cg.graph_step import graph_step
from functional_cg.manual import Documented
from functional_cg.nn import from_module
from functional_cg.tensors.aten import copies
from functional_cg.train_state import TrainState

__all__ = ["ModuleStep", "module_step"]

Loss = Callable[[Any, Any], Tensor]
Numbers = tuple[tuple[str, Any], ...]

# Arguments of an optimizer that choose its kernels, and no part of its formula.
_KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})
# Formulas that the transformations of this package do not have under the same name.
_OTHER_FORMULAS = MappingProxyType({"SGD": ("dampening", "maximize"), "AdamW": ("amsgrad", "maximize")})


def module_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Loss,
    *,
    max_norm: float | None = None,
    reduce: Literal["mean", "sum"] = "mean",
    seed: int = 0,
    **options: Any,
) -> ModuleStep:
    """Capture the step of an existing loop: forward, backward, clip and optimizer in one graph.

    ``metrics = train_step(batch)`` replaces the forward, ``backward()``, ``clip_grad_norm_``, ``optimizer.step()`` and
    ``zero_grad()``. The module shows the trained values after each call, and ``optimizer.state_dict()`` those of the
    optimizer. Values loaded into either are taken up by the next call, and learning rates are read at each call, so
    ``scheduler.step()`` stays as it is. Random ops draw from keys made of ``seed`` and the number of updates. The
    parameters are in memory twice.

    Args:
      model: The module in the mode to train it in; also one that accelerate or Fabric prepared for a single device.
      optimizer: Its optimizer, also a prepared one. ``AdamW`` and ``SGD`` take the fused ops of torch, other classes
        go through :func:`functional_cg.optim.from_torch`.
      loss_fn: ``loss_fn(model, batch)`` returns a tensor []; it gets a private copy of the module.
      max_norm: Clips the gradients as ``clip_grad_norm_`` does.
      reduce: ``train_step(a, b)`` accumulates over batches: the mean of their gradients, or the sum.
      seed: Seed of the keys.
      options: Options of :func:`functional_cg.graph_step`, such as ``max_captures=2`` for a shorter last batch.
    Returns:
      A :class:`ModuleStep`.
    Raises:
      CaptureError: If the optimizer has a gradient scaler, hooks, or a parameter that is not in ``model``.
      TypeError, SideEffectError, CaptureError: As :func:`functional_cg.from_module` and ``from_torch`` raise them.

    Example:
      >>> import torch, functional_cg as fcg
      >>> from functional_cg.trainers import module_step
      >>> model = torch.nn.Linear(2, 1)
      >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
      >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
      >>> train_step = module_step(model, optimizer, lambda model, x: model(x).square().mean(), max_norm=1.0)
      >>> for batch in torch.randn(3, 8, 2):
      ...     metrics = train_step(batch)
      ...     scheduler.step()
      >>> metrics["loss"].shape, len(optimizer.state_dict()["state"])
      (torch.Size([]), 2)
    """
    return ModuleStep(model, optimizer, loss_fn, max_norm, reduce, seed, options)


class ModuleStep(metaclass=Documented):
    """A captured step of a module and its optimizer; made by :func:`module_step`.

    Attributes:
      step: The :class:`functional_cg.GraphStep`, for ``explain()`` and ``profile()``.
      state: The :class:`functional_cg.TrainState` with the trained values.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        loss_fn: Loss,
        max_norm: float | None,
        reduce: Literal["mean", "sum"],
        seed: int,
        options: dict[str, Any],
    ) -> None:
        precision = getattr(getattr(model, "_strategy", None), "precision", None)
        if precision is not None and precision.precision != "32-true":
            fix = "pass `model.module`, and compute the loss in `with torch.autocast(...)`."
            raise refused(f"Fabric's precision {precision.precision!r}", fix)
        self._given = optimizer
        while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
            if getattr(optimizer, "scaler", None) is not None:
                raise refused("a gradient scaler (fp16)", "train in bfloat16, which needs none.")
            optimizer = optimizer.optimizer
        if optimizer._optimizer_step_pre_hooks:
            raise refused(
                "hooks that run before `optimizer.step()`", "remove them; clipping is `max_norm=1.0`."
            )
        self._model, self._optimizer, self._training = model, optimizer, model.training
        self._whole = _WithLoss(model)  # kept: changes of it after this are noticed
        apply, params, buffers = from_module(self._whole)
        tensors = {f"model.{name}": one for name, one in [*model.named_parameters(), *model.named_buffers()]}
        self._tensors = {name: tensors[name] for name in [*params, *buffers]}
        self._owners = _owners(optimizer, self._tensors)
        self._arguments = [
            *inspect.signature(type(optimizer)).parameters.keys() - _KERNELS - {"params", "lr"}
        ]
        self._numbers = self._numbers_now()
        rules = {
            number: optim.inject_hyperparams(partial(_rule, type(optimizer), numbers))(
                learning_rate=float(group["lr"])
            )
            for number, (group, numbers) in enumerate(zip(optimizer.param_groups, self._numbers, strict=True))
        }
        labels = {name: number for number, names in self._owners.items() for name in names.values()}
        self.state = TrainState.create(
            params=params,
            buffers=buffers,
            optimizer=optim.partition(
                {**rules, -1: optim.set_to_zero()}, {name: labels.get(name, -1) for name in params}
            ),
            key=random.key(seed),
        )
        self.step = graph_step(_traced(apply, loss_fn, max_norm, reduce), **options)
        self._ahead, self._stale, self._versions = False, bool(optimizer.state), self._versions_now()
        optimizer.register_state_dict_pre_hook(self._write_optimizer)
        optimizer.register_load_state_dict_post_hook(self._mark_stale)

    def __call__(self, *batches: Any) -> dict[str, Any]:
        """Make one update.

        Args:
          batches: One batch, or several to accumulate over: pytrees of tensors, as for a captured step.
        Returns:
          ``loss``: f32[], reduced over the batches; ``losses``: one for each batch; ``norm``: f32[], the norm of the
          gradients before clipping.
        Raises:
          BakedValueError: If the mode of the module, or a number of the optimizer other than a learning rate, changed.
          CaptureError: If a parameter has a gradient from outside of the step.
          LayoutError: If the shapes of the batches are new; the state is unchanged.
        """
        self._check()
        if self._versions != self._versions_now():
            parts = [getattr(self.state, part) for part in ("params", "buffers")]
            params, buffers = ({name: self._tensors[name].detach() for name in part} for part in parts)
            self.state = self.state.replace(params=params, buffers=buffers)
        if self._stale:
            kept = self._torch_state()
            is_counted = any("step" in own for own in kept["state"].values())  # not by SGD
            step = None if is_counted else int(self.state.step)
            self.state = optim.load_torch_state(self.state, kept, names=self._trained(), step=step)
            self._stale = False
        rates = torch.tensor(
            [float(group["lr"]) for group in self._optimizer.param_groups], dtype=torch.float64
        )
        self.state, metrics = self.step(self.state, rates, batches)
        values = {**self.state.params, **self.state.buffers}
        with torch.no_grad():
            for copy in copies([*self._tensors.values()], [values[name] for name in self._tensors]):
                copy()
        self._ahead, self._versions = True, self._versions_now()
        self._given.step()  # without gradients it changes nothing; schedulers and wrappers count its calls
        return cast("dict[str, Any]", metrics)

    def _check(self) -> None:
        if self._model.training != self._training:
            raise BakedValueError.of(
                "module_step",
                f"the module was captured with training={self._training}, and has training={self._model.training}.",
                why="The mode decides what is traced.",
                fix=f"`model.train({self._training})` before the call.",
            )
        rows = [
            f"param_groups[{i}][{name!r}]  expected {old!r}   got {new!r}"
            for i, pair in enumerate(zip(self._numbers, self._numbers_now(), strict=False))
            for (name, old), (_, new) in zip(*pair, strict=True)
            if old != new
        ]
        if rows or len(self._numbers) != len(self._optimizer.param_groups):
            raise BakedValueError.of(
                "module_step",
                "the optimizer changed after the step was captured; nothing was trained.",
                rows=rows or ["param_groups  expected the same number of them"],
                why="Only learning rates are read at each call.",
                fix="make a new step, `module_step(model, optimizer, loss_fn)`.",
            )
        if any(tensor.grad is not None for tensor in self._tensors.values()):
            raise refused(
                "gradients from outside of the step",
                "`optimizer.zero_grad()`, and pass all batches to one call.",
            )

    def _numbers_now(self) -> list[Numbers]:
        groups = self._optimizer.param_groups
        return [tuple((name, group[name]) for name in self._arguments if name in group) for group in groups]

    def _versions_now(self) -> list[int]:
        return [tensor._version for tensor in self._tensors.values()]

    def _trained(self) -> list[str]:
        return [name for names in self._owners.values() for name in names.values()]

    def _torch_state(self) -> dict[str, Any]:
        """The optimizer's state as it stands, of trained parameters, without the names that the user gave."""
        of_group = zip(self._optimizer.param_groups, self._owners.values(), strict=True)
        groups = [{**group, "params": [*names]} for group, names in of_group]
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        numbers = [number for group in groups for number in group["params"]]
        for group in groups:
            group.pop("param_names", None)
        kept = {
            number: self._optimizer.state[params[number]]
            for number in numbers
            if params[number] in self._optimizer.state
        }
        return {"state": kept, "param_groups": groups}

    def _write_optimizer(self, _: Any) -> None:
        """Before ``optimizer.state_dict()``: write the trained values into the optimizer."""
        if self._ahead:
            new = optim.torch_state(self.state, {**self._torch_state(), "state": {}}, names=self._trained())
            first, groups = 0, []
            for group in self._optimizer.param_groups:
                groups.append({**group, "params": [*range(first, first + len(group["params"]))]})
                first += len(group["params"])
            self._optimizer.load_state_dict({"state": new["state"], "param_groups": groups})
            self._ahead = self._stale = False

    def _mark_stale(self, _: Any) -> None:
        """After ``optimizer.load_state_dict()``: the next call reads it."""
        self._ahead, self._stale = False, True


class _WithLoss(nn.Module):
    """Calls a loss with a module, which makes them one pure function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss_fn: Loss, batch: Any) -> Tensor:
        return loss_fn(self.model, batch)


def refused(what: str, fix: str) -> CaptureError:
    """Make the error for a feature that a captured step does not have."""
    return CaptureError.of(
        "", f"trainers: {what} cannot be captured; nothing was trained.",
        why="The step is one graph, which the library cannot enter.", fix=fix,
    )  # fmt: skip


def _owners(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> dict[int, dict[int, str]]:
    """Group -> position of a trained parameter among all of the optimizer -> its name."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    found: dict[int, dict[int, str]] = {}
    position = 0
    for number, group in enumerate(optimizer.param_groups):
        found[number] = {}
        for param in group["params"]:
            if id(param) not in names:
                raise refused(
                    f"a parameter {list(param.shape)} of the optimizer that is not in the model",
                    "make the optimizer of `model.parameters()`.",
                )
            if param.requires_grad:
                found[number][position] = names[id(param)]
            position += 1
    return found


def _rule(cls: type[torch.optim.Optimizer], numbers: Numbers, learning_rate: Any) -> Any:
    """The transformation with the formula of a class of torch."""
    known = dict(numbers)
    if not any(known.get(name) for name in _OTHER_FORMULAS.get(cls.__name__, ("params",))):
        if cls is torch.optim.AdamW:
            b1, b2 = known["betas"]
            return optim.adamw(
                learning_rate, b1=b1, b2=b2, eps=known["eps"], weight_decay=known["weight_decay"]
            )
        if cls is torch.optim.SGD:
            return optim.sgd(
                learning_rate, **{name: known[name] for name in ("momentum", "nesterov", "weight_decay")}
            )
    return optim.from_torch(cls, lr=learning_rate, **known)


def _traced(apply: Any, loss_fn: Loss, max_norm: float | None, reduce: str) -> Callable[..., Any]:
    """The function of a step: what the loop of a trainer does between two batches."""

    def train_step(
        state: TrainState, rates: Tensor, batches: Sequence[Any]
    ) -> tuple[TrainState, dict[str, Any]]:
        trained = {name: param.detach().requires_grad_() for name, param in state.params.items()}
        key, buffers, losses = random.fold_in(state.key, state.step), state.buffers, []
        for number, batch in enumerate(batches):
            loss, buffers = apply(trained, buffers, loss_fn, batch, key=random.fold_in(key, number))
            part = loss / len(batches) if reduce == "mean" else loss
            part.backward()
            losses.append(part.detach())
        grads = {name: param.grad for name, param in trained.items()}
        norm = torch.nn.utils.get_total_norm([grad for grad in grads.values() if grad is not None])
        if max_norm is not None:  # as `clip_grad_norm_`
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            grads = {name: None if grad is None else grad * scale for name, grad in grads.items()}
        rules = {
            number: own._replace(hyperparams={"learning_rate": rates[number]}) if number >= 0 else own
            for number, own in state.opt_state.inner_states.items()
        }
        state = state.replace(opt_state=state.opt_state._replace(inner_states=rules))
        metrics = {"loss": torch.stack(losses).sum(), "losses": losses, "norm": norm}
        return state.apply_gradients(grads, buffers=buffers), metrics

    return train_step
