"""Runs a module's forward once, drawing random numbers from the key and tracking writes.

Two modes watch the call. One, below autograd so that the backward sees the same masks, draws each random op from the
key and records writes. The other, above autograd, keeps attention and RNNs on kernels whose draws are visible.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from ..ambient.setting import refuse_reentrant_checkpoint
from ..errors import CaptureError, ImplicitRandomnessError, ReadOnlyError
from ..messages.source import Location, user_frame
from ..tensors.aten import can_draw, written_arguments
from .attributes import Held, buffers_set, held, refuse_changed, refuse_changed_buffers, refuse_unmade
from .draws import draw, is_drawn
from .storage import storage_of

__all__ = ["run"]

# Kernel selection is process-wide: two threads switching it would restore each other's settings.
_SWITCH = threading.RLock()
_CALL = nn.Module._call_impl.__code__
_RNNS = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
_ATTENTION = frozenset({F.scaled_dot_product_attention, F.multi_head_attention_forward})


def run(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    key: Tensor | None,
    params: Mapping[str, Tensor],
    made: Set[str],
    only_remembers: Callable[[Held, Held], bool],
) -> tuple[Any, Set[int | None], Place]:
    """Call our private copy of a module, which holds ``params`` and buffers that it may write.

    Args:
      module: The copy.
      args: Arguments of the forward.
      kwargs: Likewise.
      key: What random ops draw from, or None.
      params: Its parameters by name.
      made: Attributes that its hooks set at each call.
      only_remembers: Whether from one of the given contents to the other the forward only remembers what it knows.
    Returns:
      (out, written, place): the result of the forward, the storages it wrote, and what it did where.
    Raises:
      ImplicitRandomnessError: If an op draws and ``key`` is None, or if a key cannot replace it.
      ReadOnlyError: If a parameter is written.
      SideEffectError: If an attribute of the module is written, or a buffer appears or disappears.
      CaptureError: If it calls ``torch.utils.checkpoint`` with ``use_reentrant=True``, or of what draws random numbers
        in no submodule of its own.
    """
    names = {storage_of(param): name for name, param in params.items()}
    names.pop(None, None)  # None stands for every storage that cannot be identified
    name, place = type(module).__name__, Place(module)
    before, buffers = held(module), buffers_set(module)
    effects = Effects(name, key, place, names)
    with OpenKernels(), effects:
        out = module(*args, **kwargs)
    refuse_changed_buffers(name, buffers, buffers_set(module))
    refuse_unmade(name, module, made)
    after = held(module)
    for path in made:
        for contents in (before, after):
            contents.pop(path, None)
    refuse_changed(name, before, after, only_remembers)
    place.end(partial(Effects, name, key, params=names))
    return out, effects.written, place


class Place:
    """Tracks where in a module its forward is, and how many draws each submodule has made.

    After the forward, ``torch.utils.checkpoint`` may run submodules again, in the backward: they then run as they did,
    under the same modes and with the same streams.

    Args:
      module: Our private copy: its submodules get hooks that report when they start and end.

    Attributes:
      recomputes: Whether the forward called ``torch.utils.checkpoint``.
    """

    def __init__(self, module: nn.Module) -> None:
        self.recomputes = False
        self._name = type(module).__name__
        self._trail: list[tuple[str, str]] = []
        self._draws: Counter[str] = Counter()
        self._began: dict[str, list[Counter[str]]] = {}  # the draws before each run of a submodule
        self._effects: Callable[..., Effects] | None = None  # once the forward has ended
        self._again = ExitStack()
        for path, part in module.named_modules():
            part.register_forward_pre_hook(partial(self._enter, path))
            part.register_forward_hook(self._leave, always_call=True)

    def _enter(self, path: str, module: nn.Module, args: Any) -> None:
        if self._effects is None:
            self._began.setdefault(path, []).append(self._draws.copy())
        elif not self._trail:
            self._draws = self._began[path][0].copy()
            self._again.enter_context(OpenKernels())
            self._again.enter_context(self._effects(place=self))
        self._trail.append((path, type(module).__name__))

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self._trail.pop()
        if self._effects is not None and not self._trail:
            self._again.close()

    def end(self, effects: Callable[..., Effects]) -> None:
        """The forward has ended: what runs from now on is run again, under ``effects(place=...)``."""
        self._effects = effects

    @property
    def path(self) -> str:
        """Name of the innermost running submodule, as in ``named_modules``."""
        return self._trail[-1][0] if self._trail else ""

    @property
    def drew(self) -> bool:
        """Whether any random numbers were drawn."""
        return bool(self._draws)

    def next_stream(self) -> int:
        """A stream for one draw: a hash of the path and of the number of earlier draws there."""
        if self._effects is not None and len(self._began[self._trail[0][0]]) > 1:
            raise self._cannot_repeat("it runs several times in one forward, and draws random numbers")
        number = self._draws[self.path]
        self._draws[self.path] += 1
        digest = hashlib.blake2b(f"{self.path}:{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def refuse_draws_between(self, submodules: int) -> None:
        """Raise if a draw under ``torch.utils.checkpoint`` is in no submodule that will be known to run again."""
        if not submodules:
            raise self._cannot_repeat("what it wraps draws random numbers outside of its submodules")

    def _cannot_repeat(self, why: str) -> CaptureError:
        return CaptureError.of(
            self._name,
            f"{self} calls `torch.utils.checkpoint`, as `fcg.remat` does.",
            rows=[_at().removeprefix(", at ")],
            why=f"It runs the forward again in the backward pass, and {why}: they would be other ones.",
            fix="switch it off; in transformers, `model.gradient_checkpointing_disable()`. Around an `apply`, "
            "of the model or of a block, `fcg.remat(apply)(params, buffers, x, key=key)` does it.",
        )

    def __str__(self) -> str:
        path, name = self._trail[-1] if self._trail else ("", self._name)
        return f"`{path}` ({name})" if path else f"`{name}` itself"


class OpenKernels(TorchFunctionMode):
    """Keeps attention and RNNs on kernels composed of ATen calls where a fused one would hide its draws.

    Fused attention and cuDNN's RNNs draw internally; and seen from below autograd, cuDNN's and oneDNN's RNNs omit what
    their backward needs. While any function mode is active, ``MultiheadAttention`` and the transformer layers take the
    same path, traced or not, in training and in evaluation.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ATTENTION and _drops_out(func, args, kwargs):
            with _SWITCH, sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        if func in _RNNS:
            with (
                _SWITCH,
                _without(torch.backends.mkldnn),
                _without(torch.backends.cudnn),
            ):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def _without(backend: Any) -> Iterator[None]:
    # `backend.flags(enabled=False)` would also change the precision of matrix products.
    enabled = backend.enabled
    backend.enabled = False
    try:
        yield
    finally:
        backend.enabled = enabled


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *more: Any, **named: Any
) -> None:
    """The first parameters of ``scaled_dot_product_attention``, a builtin without a signature."""


def _drops_out(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    signature = inspect.signature(_attention if func is F.scaled_dot_product_attention else func)
    given = signature.bind(*args, **kwargs).arguments
    return given.get("dropout_p", 0.0) > 0 and bool(given.get("training", True))


class Effects(TorchDispatchMode):
    """Draws each random op from the key, records writes, and raises for whatever cannot be made pure.

    Args:
      name: Name of the module, for messages.
      key: i64[2], or None to raise for any op that draws.
      place: Where the forward is.
      params: Names of the parameters by storage; writing one raises.

    Attributes:
      written: Storages that were written; None stands for all that cannot be identified.
    """

    def __init__(
        self,
        name: str,
        key: Tensor | None,
        place: Place,
        params: Mapping[int | None, str],
    ) -> None:
        super().__init__()
        self._name, self._key, self._place = name, key, place
        self._params = params
        self.written: set[int | None] = {None}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # a question about a tensor, not a computation
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:  # only its parts reveal what it draws and writes
                return func.decompose(*args, **kwargs)
        if not self._place.recomputes:
            self._place.recomputes = self._under_checkpoint() is not None
        for tensor in written_arguments(func, args, kwargs):
            self._refuse_parameter(func, tensor)
            self.written.add(storage_of(tensor))
        return self._run(func, *args, **kwargs)

    def _run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if not can_draw(func, args, kwargs):
            return func(*args, **kwargs)
        if self._key is None or not is_drawn(func, args, kwargs):
            raise self._random(func)
        self._refuse_draw_between()
        try:
            return draw(func, args, kwargs, self._key, self._place.next_stream())
        except (TypeError, ValueError) as error:
            raise self._random(func, str(error)) from error

    def _random(self, func: Any, reason: str = "") -> ImplicitRandomnessError:
        what = "in a way that a key cannot replace"
        fix = "draw them with `fcg.random` outside of the module and pass them in."
        if reason:
            fix = (
                "call it with what `fcg.random` takes; complex numbers are `torch.complex` of two real draws."
            )
        if self._key is None:
            what = "and `apply` has no key"
            fix = "pass one, `apply(params, buffers, x, key=fcg.random.fold_in(state.key, state.step))`; to evaluate, "
            fix += "`train=False`."
        return ImplicitRandomnessError.of(
            self._name,
            f"{self._place} draws random numbers {what}.",
            rows=[f"{func}{_at()}", *reason.splitlines()[:1]],
            why="Replay would draw from a generator that nobody manages, or the same numbers each time.",
            fix=fix,
        )

    def _refuse_parameter(self, func: Any, tensor: Tensor) -> None:
        name = self._params.get(storage_of(tensor))
        if name is not None:
            raise ReadOnlyError.of(
                self._name,
                f"{self._place} writes in place into `params[{name!r}]`.",
                rows=[f"{func}{_at()}"],
                why="A module is applied as a pure function: only buffers may change, as `new_buffers`.",
                fix="write the parameter in the step, on the new state; or freeze it, `requires_grad_(False)`, "
                "before `from_module`, which makes it a buffer.",
            )

    def _refuse_draw_between(self) -> None:
        submodules = self._under_checkpoint()
        if submodules is not None:
            self._place.refuse_draws_between(submodules)

    def _under_checkpoint(self) -> int | None:
        """How many submodules run inside of the innermost ``torch.utils.checkpoint`` of the module; None outside."""
        frame: FrameType | None = sys._getframe(2)
        submodules = 0
        # The hooks of a `remat` around `apply` run here too while it recomputes; those are not the module's.
        while frame is not None and frame.f_code is not run.__code__:
            submodules += frame.f_code is _CALL
            if frame.f_code.co_filename == checkpoint.__file__:
                if frame.f_code is checkpoint.CheckpointFunction.forward.__code__:
                    refuse_reentrant_checkpoint(self._name)
                if frame.f_code.co_name == "checkpoint":
                    return submodules
            frame = frame.f_back
        return None


def _at() -> str:
    frame = user_frame()
    return f", at {Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)}" if frame else ""
