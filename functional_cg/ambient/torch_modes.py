"""Torch's modes: one row for each that changes what a step computes, and who reads it.

Some are in the program (a default dtype), some are read by kernels when they run or are captured (TF32). So a call
compares them with those of the trace, and a step may not set one for a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BakedValueError
from ..tensors.aten import of_another_library
from ..tensors.op_table import row_of
from .modes import DEVICES, SWITCH
from .setting import default_device, foreign_function_modes

__all__ = ["TORCH_MODES", "KernelModes", "modes_now", "refuse_ambient_modes", "unchanged_modes"]


class Mode(NamedTuple):
    """A mode of torch.

    Attributes:
      name: How the user writes it.
      read: Reads it; in C, since torch's own wrappers cost more than the rest of a call.
      of: What `read` takes.
      kernels: The column of the op table that says which ops' kernels read it, or "all".
      counts: In which steps a call compares it: "always"; those that say "autocast"; those with "halves" of precision.
    """

    name: str
    read: Callable[..., Any]
    of: tuple[str, ...] = ()
    kernels: str = ""
    counts: str = "always"

    def now(self) -> object:
        """Return its value."""
        value = self.read(*self.of)
        return "ieee" if value == "none" else value  # "none" is "ieee" that was never set


_cuda, _cudnn, _mkldnn = "torch.backends.cuda.", "torch.backends.cudnn.", "torch.backends.mkldnn."
_fp32 = torch._C._get_fp32_precision_getter  # the older names of TF32 raise once both were used
_DEFAULT_DTYPE, _DEFAULT_DEVICE = "torch.get_default_dtype()", "torch.get_default_device()"
TORCH_MODES = (
    Mode("torch.get_autocast_dtype('cuda')", torch.get_autocast_dtype, ("cuda",), counts="autocast"),
    Mode("torch.get_autocast_dtype('cpu')", torch.get_autocast_dtype, ("cpu",), counts="autocast"),
    Mode(
        "torch.are_deterministic_algorithms_enabled()", torch._C._get_deterministic_algorithms, kernels="all"
    ),
    Mode(f"{_cuda}matmul.fp32_precision", _fp32, ("cuda", "matmul"), "multiplies"),
    Mode(f"{_cudnn}conv.fp32_precision", _fp32, ("cuda", "conv"), "cudnn"),
    Mode(f"{_cudnn}benchmark", torch._C._get_cudnn_benchmark, (), "cudnn"),
    Mode(f"{_cudnn}deterministic", torch._C._get_cudnn_deterministic, (), "cudnn"),
    Mode(f"{_cudnn}enabled", torch._C._get_cudnn_enabled, (), "cudnn"),
    Mode(_DEFAULT_DTYPE, torch.get_default_dtype, kernels="all"),
    Mode(_DEFAULT_DEVICE, default_device, counts="around"),
    Mode(f"{_cuda}flash_sdp_enabled()", torch._C._get_flash_sdp_enabled),
    Mode(f"{_cuda}mem_efficient_sdp_enabled()", torch._C._get_mem_efficient_sdp_enabled),
    Mode(f"{_cuda}math_sdp_enabled()", torch._C._get_math_sdp_enabled),
    Mode(f"{_cuda}cudnn_sdp_enabled()", torch._C._get_cudnn_sdp_enabled),
    Mode(
        f"{_cuda}matmul.allow_fp16_reduced_precision_reduction",
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
        (),
        "multiplies",
        "halves",
    ),
    Mode(
        f"{_cuda}matmul.allow_bf16_reduced_precision_reduction",
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
        (),
        "multiplies",
        "halves",
    ),
    Mode(
        f"{_cuda}matmul.allow_fp16_accumulation",
        torch._C._get_cublas_allow_fp16_accumulation,
        (),
        "multiplies",
        "halves",
    ),
    Mode(
        f"{_cuda}fp16_bf16_reduction_math_sdp_allowed()",
        torch._C._get_math_sdp_allow_fp16_bf16_reduction,
        counts="halves",
    ),
    # A replay on a CPU finds those around it, as an eager run does: no call compares them.
    Mode(f"{_mkldnn}matmul.fp32_precision", _fp32, ("mkldnn", "matmul"), "multiplies", "never"),
    Mode(f"{_mkldnn}conv.fp32_precision", _fp32, ("mkldnn", "conv"), "cudnn", "never"),
    Mode(f"{_mkldnn}enabled", torch._C._get_mkldnn_enabled, (), "multiplies", "never"),
)
_OF_KERNELS = tuple(mode for mode in TORCH_MODES if mode.kernels)
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def modes_now() -> tuple[object, ...]:
    """Return the current values of `TORCH_MODES`."""
    with SWITCH:
        return _values(TORCH_MODES)


def _values(modes: Sequence[Mode]) -> tuple[object, ...]:
    return tuple([mode.now() for mode in modes])


def unchanged_modes(then: Sequence[object], counting: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Return the source of a test for a call, and the names in it: are the modes as they were, and none around it.

    Args:
      then: What :func:`modes_now` returned.
      counting: Which modes to compare beside those that count always.
    """
    names: dict[str, Any] = {
        "autocast": torch._C._is_any_autocast_enabled,
        "saved_tensors_hooks": _saved_tensors_hooks,
        "function_modes": torch._C._len_torch_function_stack,
        "foreign_function_modes": foreign_function_modes,
    }
    terms = ["not autocast()", "saved_tensors_hooks(True) is None"]
    for number, (mode, old) in enumerate(zip(TORCH_MODES, then, strict=True)):
        read = f"read{number}({', '.join(map(repr, mode.of))})"
        if mode.counts == "around":  # slow, and a function mode
            usual = "not function_modes() or " if old == torch.device("cpu") else ""
            terms.append(f"({usual}({read} == then{number} and not foreign_function_modes()))")
        elif mode.counts == "always" or mode.counts in counting:
            terms.append(f"{read} {'in' if isinstance(old, str) else '=='} then{number}")
        names[f"read{number}"] = mode.read
        names[f"then{number}"] = (
            old if not isinstance(old, str) else ("ieee", "none") if old == "ieee" else (old,)
        )
    return " and ".join(terms), names


def refuse_ambient_modes(function_name: str) -> None:
    """Raise if a mode around the call would change what a trace records, though it does not affect a replay.

    Such modes are autocast, function modes other than that of a default device, and saved-tensor hooks.

    Raises:
      BakedValueError: Naming the mode.
    """
    on = [device for device in DEVICES[::-1] if torch.is_autocast_enabled(device)]
    rows = [
        f"torch.autocast({device!r})  expected off   got {torch.get_autocast_dtype(device)}" for device in on
    ]
    name, inside = "autocast", f"torch.autocast({(on or ['cuda'])[0]!r}, dtype=...)"
    foreign = foreign_function_modes()
    if foreign:
        name = inside = f"{foreign[-1]}()"
        rows = [f"{mode}  expected none   got one that is on" for mode in foreign]
    elif _saved_tensors_hooks(True) is not None:
        name, inside = "hooks on saved tensors", "torch.autograd.graph.saved_tensors_hooks(...)"
        rows = [f"{inside}  expected none   got hooks that are on"]
    elif not torch._C._is_any_autocast_enabled():
        return
    raise BakedValueError.of(
        function_name,
        f"is called under {name}; the state is unchanged.",
        rows=rows,
        why="A step runs as it was traced, with autocast off: what surrounds the call is not a part of it."
        if on
        else "A step runs as it was traced: what surrounds the call is not a part of it.",
        fix=f"put `with {inside}:` inside of `{function_name}`.",
    )


class KernelModes:
    """The modes that kernels read as they are now; :meth:`changed` tells which one an op would find to be another."""

    def __init__(self) -> None:
        with SWITCH:
            self._then = _values(_OF_KERNELS)

    def changed(
        self, func: Any, kwargs: Mapping[str, Any], tensors: Callable[[], Iterable[Tensor]]
    ) -> tuple[str, object, object] | None:
        """Return (name, before, now) of a mode that has changed and that an op asks for; None if there is none.

        Args:
          func: The op.
          kwargs: Its named arguments.
          tensors: Returns its tensors.
        """
        if _values(_OF_KERNELS) == self._then:
            return None
        with SWITCH:  # another thread may have been in the middle of an op
            now = _values(_OF_KERNELS)
        row, may_ask = row_of(func), of_another_library(func)
        for mode, before, after in zip(_OF_KERNELS, self._then, now, strict=True):
            asks = may_ask or mode.kernels == "all" or getattr(row, mode.kernels)
            if (
                before != after
                and asks
                and (mode.name != _DEFAULT_DTYPE or _takes_the_default(kwargs, tensors()))
            ):
                return mode.name, before, after
        return None


def _takes_the_default(kwargs: Mapping[str, Any], tensors: Iterable[Tensor]) -> bool:
    """Whether the dtype of a result may be the default one: no argument says another."""
    return kwargs.get("dtype") is None and not any(
        one.is_floating_point() or one.is_complex() for one in tensors
    )
