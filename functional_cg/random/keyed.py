"""Draw torch's own random ops from a key, in a block or a function."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CodeType, FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from ..ambient.setting import refuse_reentrant_checkpoint
from ..errors import CaptureError, ImplicitRandomnessError
from ..errors.words import words_of
from ..messages.source import at_here, here
from ..tensors.aten import can_draw
from .arguments import validate_key
from .kernels import OpenKernels
from .rules import draw, fill_truncated, is_drawn

__all__ = ["Draws", "keyed", "stream_of", "under_checkpoint"]

P = ParamSpec("P")
R = TypeVar("R")

_CALL = nn.Module._call_impl.__code__


def keyed(fn: Callable[P, R]) -> Callable[Concatenate[Tensor, P], R]:
    """Turn a function that draws with torch's random ops into a function of a key: ``keyed(fn)(key, *args, **kwargs)``.

    Each random op that runs in ``fn`` (``torch.randn``, ``F.dropout``, ``torch.distributions``,
    ``nn.init.trunc_normal_``) draws from the key, on a stream of its own: equal keys give equal numbers, and torch's
    generators are left alone. RNNs run one time step at a time. For a module, use
    :func:`from_module`, whose ``apply`` takes a key.

    Args:
      fn: Any function; draws by a generator of its own, by ``random`` or by ``numpy`` are refused in a step.
    Returns:
      The function; it takes the key i64[2] first. Under ``torch.func.vmap``, all examples share one key.
    Raises:
      TypeError: If ``fn`` is a module or cannot be called; when called, if the first argument is not a key.
      ImplicitRandomnessError: When called, for an op that a key cannot replace.
      CaptureError: When called, if it draws under ``torch.utils.checkpoint``, as in ``remat``; ``remat(keyed(fn))`` is
        fine.

    Example:
      >>> import torch, functional_cg as fcg
      >>> def noisy(x, scale):
      ...     return x + scale * torch.distributions.Normal(0.0, 1.0).sample(x.shape)
      >>> draw, key = fcg.random.keyed(noisy), fcg.random.key(0)
      >>> torch.equal(draw(key, torch.zeros(3), 0.1), draw(key, torch.zeros(3), 0.1))
      True
      >>> torch.equal(draw(key, torch.zeros(3), 0.1), draw(fcg.random.key(1), torch.zeros(3), 0.1))
      False
    """
    if isinstance(fn, nn.Module) or not callable(fn):
        raise TypeError(
            f"random.keyed: expected a function, got {type(fn).__name__}.\n"
            "To fix: of a module, `apply, params, buffers = fcg.from_module(module)`; `apply` takes `key=`."
        )
    name = getattr(fn, "__name__", type(fn).__name__)

    def of_key(key: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        validate_key(key)
        draws = _Function(name, key, of_key.__code__)
        with OpenKernels(draws.truncated, draws.attend), draws:
            return fn(*args, **kwargs)

    # Not `functools.wraps`: the signature is another one.
    functools.update_wrapper(
        of_key, fn, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=()
    )
    del of_key.__wrapped__  # type: ignore[attr-defined]
    return of_key


class Draws(TorchDispatchMode):
    """In this mode, each random op draws from a key; raises for what a key cannot replace.

    Args:
      name: Name of what draws, for messages.
      key: i64[2], or None to raise for any op that draws.
    """

    def __init__(self, name: str, key: Tensor | None) -> None:
        super().__init__()
        self._name, self._key = name, key

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # a question about a tensor, not a computation
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:  # only its parts reveal what it draws and writes
                return func.decompose(*args, **kwargs)
        self.watch(func, args, kwargs)
        if not can_draw(func, args, kwargs):
            return func(*args, **kwargs)
        return self._by_key(func, partial(draw, func, args, kwargs) if is_drawn(func, args, kwargs) else None)

    def truncated(self, tensor: Tensor, mean: float, std: float, low: float, high: float) -> None:
        """Fill a tensor as ``nn.init.trunc_normal_`` does."""
        fill = partial(fill_truncated, tensor, mean, std, low, high)
        self._by_key("nn.init.trunc_normal_", fill)

    def attend(self, rule: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Attend with dropout, by a function of key and stream."""
        attended: Tensor = self._by_key("scaled_dot_product_attention", rule)
        return attended

    def _by_key(self, func: Any, rule: Callable[[Tensor, int], Any] | None) -> Any:
        if self._key is None or rule is None:
            raise self.refusal(func)
        stream = self.next_stream()
        try:
            return rule(self._key, stream)
        except (TypeError, ValueError) as error:
            raise self.refusal(func, words_of(error)) from error

    def watch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See a call before it runs."""

    def next_stream(self) -> int:
        """Return the stream of the next draw."""
        raise NotImplementedError

    def refusal(self, func: Any, reason: str = "") -> ImplicitRandomnessError:
        """Say that a key cannot replace a draw, or why its arguments are refused."""
        fix = "draw them with `fcg.random` outside, and pass them in."
        if reason:
            fix = (
                "call it with what `fcg.random` takes; complex numbers are `torch.complex` of two real draws."
            )
        return self.refused(func, "in a way that a key cannot replace", reason, fix)

    def refused(self, func: Any, how: str, reason: str, fix: str) -> ImplicitRandomnessError:
        """Build the error for an op that draws."""
        return ImplicitRandomnessError.of(
            self._name,
            f"{self.place()} draws random numbers {how}.",
            rows=[f"{func}{at_here()}", *reason.splitlines()[:1]],
            why="Replay would draw from a generator that nobody manages, or the same numbers each time.",
            fix=fix,
        )

    def place(self) -> str:
        """Name what runs, for messages."""
        return f"`{self._name}`"


class _Function(Draws):
    """Draws of one call of a keyed function, which runs as ``code``."""

    def __init__(self, name: str, key: Tensor, code: CodeType) -> None:
        super().__init__(name, key)
        self._code, self._drawn = code, 0

    def next_stream(self) -> int:
        if under_checkpoint(self._name, self._code) is not None:
            raise CaptureError.of(
                self._name,
                "draws random numbers under `torch.utils.checkpoint`.",
                rows=[here()],
                why="It runs the function again in the backward pass, where they would be other ones.",
                fix="`fcg.remat` around the keyed function, `fcg.remat(fcg.random.keyed(fn))(key, ...)`.",
            )
        self._drawn += 1
        return stream_of("", self._drawn - 1)


def stream_of(path: str, number: int) -> int:
    """Return a stream for one draw: a hash of where it is made and of the number of earlier draws there."""
    digest = hashlib.blake2b(f"{path}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def under_checkpoint(name: str, code: CodeType) -> int | None:
    """Count the submodules that run inside the innermost ``torch.utils.checkpoint``; None outside of one.

    Args:
      name: Name of what runs, for messages.
      code: Code of the frame at which to stop: who calls that is of no interest.
    """
    frame: FrameType | None = sys._getframe(2)
    submodules = 0
    while frame is not None and frame.f_code is not code:
        submodules += frame.f_code is _CALL
        if frame.f_code.co_filename == checkpoint.__file__:
            if frame.f_code is checkpoint.CheckpointFunction.forward.__code__:
                refuse_reentrant_checkpoint(name)
            if frame.f_code.co_name == "checkpoint":
                return submodules
        frame = frame.f_back
    return None
