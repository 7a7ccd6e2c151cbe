"""Runs a module's forward once, drawing random numbers from the key and tracking writes.

Two modes watch the call. One, below autograd so that the backward sees the same masks, draws each random op from the
key and records writes. The other, above autograd, keeps attention and RNNs on kernels whose draws are visible.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..ambient.compiling import compiling
from ..ambient.modes import beneath, dispatch_modes
from ..ambient.observing import observer
from ..ambient.running import own_work
from ..ambient.setting import in_a_backward
from ..errors import CaptureError, ImplicitRandomnessError, LayoutError, ReadOnlyError
from ..messages.source import at_here, here
from ..pipelines.tape import cut
from ..random.kernels import OpenKernels
from ..random.keyed import Draws, stream_of, under_checkpoint
from ..tensors.aten import can_draw, tensors_in, written_arguments
from .attributes import COMPILED
from .on_device import on_device
from .refusals import registered_fix
from .storage import storage_of

__all__ = ["Effects", "Place", "function_of", "title"]


def function_of(module: nn.Module, method: str) -> Any:
    """Return a method of a module, or of a submodule by its path; the module itself for an empty name."""
    return attrgetter(method)(module) if method else module


def title(module: nn.Module, method: str) -> str:
    """Name a module, or its method, for messages."""
    return f"{type(module).__name__}.{method}" if method else type(module).__name__


class Place:
    """Tracks where in a module its forward is, and how many draws each submodule has made.

    After the forward, ``torch.utils.checkpoint`` may run submodules again, in the backward: they then run as they did,
    under the same modes and with the same streams. Modes of a policy, which keep the results of some calls and hand
    them out instead of making those calls, lie above ours both times. As in PyTorch, the submodules find the buffers as
    the forward left them, and write them once more: what the forward returned is those same tensors.

    Args:
      module: Our private copy: a call of a submodule goes through here.
      original: What stands for the module that was copied.
      model: Its name in the running trace.
      cuts: Names of the submodules with which a stage of a pipeline begins.
    """

    def __init__(self, module: nn.Module, original: Any, model: str, cuts: Set[str]) -> None:
        self._name, self._original = type(module).__name__, original
        self._model, self._cuts = model, cuts
        self._trail: list[tuple[str, str]] = []
        self._draws: Counter[str] = Counter()
        self._began: dict[str, list[Counter[str]]] = {}  # the draws before each run of a submodule
        self._around = weakref.WeakSet(dispatch_modes())  # modes of the forward
        self._numbered: list[int] = []  # the draw that is passing through the modes of a policy
        self._effects: Callable[..., Effects] | None = None  # once the forward has ended
        self._observed: list[tuple[str, Tensor]] = []
        for path, part in module.named_modules():
            vars(part)[COMPILED] = partial(self._call, path, weakref.ref(part))  # what a call of it runs
            vars(part).update(on_device(part))

    def _call(self, path: str, part: weakref.ref[nn.Module], /, *args: Any, **kwargs: Any) -> Any:
        module = part()
        assert module is not None  # it is being called
        if path in self._cuts:
            args, kwargs = cut((args, kwargs))
        if self._effects is None:
            self._began.setdefault(path, []).append(self._draws.copy())
        run = partial(self._run, path, module, *args, **kwargs)
        return self._again(path, run) if self._effects and not self._trail else run()

    def _run(self, path: str, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        self._trail.append((path, type(module).__name__))
        try:  # not hooks: torch skips those after an exception, which is how a checkpoint stops early
            with own_work(f"{self._model}.{path}" if path else self._model):
                out = module._call_impl(*args, **kwargs)
        finally:
            self._trail.pop()
        self._observe(path, module, out)
        return out

    def _observe(self, path: str, module: nn.Module, out: Any) -> None:
        """Note the numbers of what a submodule returns, unless a policy counts its calls: it may run again."""
        seen = observer()
        if seen is None or self._effects is not None or not isinstance(dispatch_modes()[-1], Effects):
            return
        if (numbers := seen.output(module, out)) is not None:
            self._observed.append((path, numbers))

    def _again(self, path: str, run: Callable[[], Any]) -> Any:
        """Run a submodule as in the forward, for a checkpoint that recomputes in the backward."""
        assert self._effects is not None
        self._draws = self._began[path][0].copy()
        effects, modes = self._effects(place=self), dispatch_modes()
        known = [number for number, mode in enumerate(modes, 1) if mode in self._around]
        of_policy = modes[max(known, default=0) :]
        with OpenKernels(effects.truncated, effects.attend), beneath(of_policy, effects):
            with _Numbers(self.numbered) if of_policy else nullcontext():
                return compiling(run)

    def end(self, module: nn.Module, name: str, effects: Callable[..., Effects]) -> None:
        """The forward has ended: what runs from now on is run again, under ``effects(place=...)``.

        Nothing may assign the buffers of the module, our own copy, any more: that would be lost.
        """
        self._effects = effects
        if (seen := observer()) is not None and self._observed and not in_a_backward():
            seen.applied(self._original, self._name, *map(list, zip(*self._observed, strict=True)))
        for path, part in module.named_modules():
            vars(part)["_buffers"] = _Sealed(part._buffers, name, path)

    @property
    def path(self) -> str:
        """Name of the innermost running submodule, as in ``named_modules``."""
        return self._trail[-1][0] if self._trail else ""

    def next_stream(self) -> int:
        """Return the stream of the next draw of the innermost running submodule."""
        if self._effects is not None and len(self._began[self._trail[0][0]]) > 1:
            raise self._cannot_repeat(
                "it runs several times in one forward, and draws random numbers: they would be other ones"
            )
        return stream_of(self.path, self._numbered.pop() if self._numbered else self._next_number())

    def _next_number(self) -> int:
        self._draws[self.path] += 1
        return self._draws[self.path] - 1

    @contextmanager
    def numbered(self) -> Iterator[None]:
        """Number the draw of a block before it is made: whoever has kept its result will not make it again."""
        self._numbered = [self._next_number()]
        try:
            yield
        finally:
            self._numbered = []

    def refuse_draws_between(self, submodules: int) -> None:
        """Raise if a draw under ``torch.utils.checkpoint`` is in no submodule that will be known to run again."""
        if not submodules:
            raise self._cannot_repeat(
                "what it wraps draws random numbers outside of its submodules: they would be other ones",
                "draw in a submodule, of `self.drop = torch.nn.Dropout(p)` in `__init__`, `self.drop(y)`; or ",
            )

    def _cannot_repeat(self, why: str, first: str = "") -> CaptureError:
        return CaptureError.of(
            self._name,
            f"{self} calls `torch.utils.checkpoint`, as `fcg.remat` does.",
            rows=[here()],
            why=f"It runs the forward again in the backward pass, and {why}.",
            fix=f"{first}switch it off; in transformers, `model.gradient_checkpointing_disable()`. Around an `apply`, "
            "of the model or of a block, `fcg.remat(apply)(params, buffers, x, key=key)` does it.",
        )

    def __str__(self) -> str:
        path, name = self._trail[-1] if self._trail else ("", self._name)
        return f"`{path}` ({name})" if path else f"`{name}` itself"


class _Sealed(dict[str, Any]):
    """The buffers of a module after its forward: a checkpoint that runs it again may write them, in place."""

    def __init__(self, buffers: Mapping[str, Any], name: str, path: str) -> None:
        super().__init__(buffers)
        self._name, self._path = name, path

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self and self[key] is value:  # as of `self.count += 1`
            return
        raise CaptureError.of(
            self._name,
            "assigns a buffer while the backward runs the forward again, under `torch.utils.checkpoint`.",
            rows=[f"{self._path}.{key}{at_here()}" if self._path else f"{key}{at_here()}"],
            why="PyTorch would keep what is assigned last, but the forward has returned its buffers already.",
            fix=f"write it in place, which reaches what was returned: `self.{key}.copy_(...)`.",
        )


class _Numbers(TorchDispatchMode):
    """Numbers the draws of what is run again, in the order of the forward; in ``numbered()`` each one is made."""

    def __init__(self, numbered: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._numbered = numbered

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        draws = func.namespace != "prim" and can_draw(func, args, kwargs)
        with self._numbered() if draws else nullcontext():
            return func(*args, **kwargs)


# Draws of dropout. A module that samples in any mode, such as a policy, makes others.
_DROPS = frozenset({
    torch.ops.aten.native_dropout.default, torch.ops.aten.bernoulli_.float, "scaled_dot_product_attention",
})  # fmt: skip


class Effects(Draws):
    """Draws each random op from the key, records writes, and raises for whatever cannot be made pure.

    Args:
      name: Name of the module, for messages.
      key: i64[2], or None to raise for any op that draws.
      place: Where the forward is.
      params: Parameters by name; writing one raises.
      fixed: Tensors of the module's plain objects by path; writing one raises.
      empty: Buffers without elements by path; giving one a shape raises.

    Attributes:
      written: Storages that were written; None stands for all that cannot be identified.
      drops: Whether it dropped elements at random, as modules do in training mode.
    """

    def __init__(
        self,
        name: str,
        key: Tensor | None,
        place: Place,
        params: Mapping[str, Tensor],
        fixed: Mapping[str, Tensor] = MappingProxyType({}),
        empty: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        super().__init__(name, key)
        self._place = place
        self._params, self._fixed, self._empty = map(_by_storage, (params, fixed, empty))
        self.written: set[int | None] = {None}
        self.drops = False

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the forward, or what stands for it, in this mode."""
        with OpenKernels(self.truncated, self.attend), self:
            return compiling(function, *args, **kwargs)

    def watch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        under_checkpoint(self._name, Effects.run.__code__)  # raises in a reentrant one
        for tensor in written_arguments(func, args, kwargs):
            self._refuse_parameter(func, tensor)
            self._refuse_fixed(func, tensor)
            self._refuse_shaping(func, tensor, args)
            self.written.add(storage_of(tensor))

    def _by_key(self, func: Any, rule: Callable[[Tensor, int], Any] | None) -> Any:
        self.drops = self.drops or func in _DROPS
        return super()._by_key(func, rule)

    def next_stream(self) -> int:
        # The hooks of a `remat` around `apply` run here too while it recomputes; those are not the module's.
        submodules = under_checkpoint(self._name, Effects.run.__code__)
        if submodules is not None:
            self._place.refuse_draws_between(submodules)
        return self._place.next_stream()

    def refusal(self, func: Any, reason: str = "") -> ImplicitRandomnessError:
        if self._key is not None:
            return super().refusal(func, reason)
        fix = "pass one, `apply(params, buffers, x, key=fcg.random.fold_in(state.key, state.step))`"
        more = "; to evaluate, `train=False`." if func in _DROPS else "."
        return self.refused(func, "and `apply` has no key", reason, f"{fix}{more}")

    def place(self) -> str:
        return str(self._place)

    def _refuse_fixed(self, func: Any, tensor: Tensor) -> None:
        name = self._fixed.get(storage_of(tensor))
        if name is not None:
            raise ReadOnlyError.of(
                self._name,
                f"{self._place} writes in place into `{name}`, which is neither a parameter nor a buffer.",
                rows=[f"{func}{at_here()}"],
                why="It is not a part of the state: the next call would find the old value.",
                fix=registered_fix(name),
            )

    def _refuse_shaping(self, func: Any, tensor: Tensor, args: Sequence[Any]) -> None:
        name = self._empty.get(storage_of(tensor))
        shapes = any(one.numel() for one in tensors_in(list(args)))
        if func is torch.ops.aten.resize_.default:
            shapes = 0 not in args[1]
        if name is not None and shapes:
            raise LayoutError.of(
                self._name,
                f"`buffers[{name!r}]` has no shape yet: {self._place} gives it one.",
                rows=[f"{func}{at_here()}"],
                why="Each leaf of a state keeps its shape.",
                fix="run the module once on an example, `model(x)`, before `from_module`.",
            )

    def _refuse_parameter(self, func: Any, tensor: Tensor) -> None:
        name = self._params.get(storage_of(tensor))
        if name is not None:
            raise ReadOnlyError.of(
                self._name,
                f"{self._place} writes in place into `params[{name!r}]`.",
                rows=[f"{func}{at_here()}"],
                why="A module is applied as a pure function: only buffers may change, as `new_buffers`.",
                fix="write the parameter in the step, on the new state; or freeze it, `requires_grad_(False)`, "
                "before `from_module`, which makes it a buffer.",
            )


def _by_storage(tensors: Mapping[str, Tensor]) -> dict[int | None, str]:
    """Return the names of tensors by storage, without those whose storage cannot be identified."""
    names = {storage_of(tensor): name for name, tensor in tensors.items()}
    names.pop(None, None)
    return names
