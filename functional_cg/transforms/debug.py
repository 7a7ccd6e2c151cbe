"""Print values from inside a step.

Printed values leave the step along with its metrics; the host formats them after each call. Printing reads the values,
so the call waits for the device.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..messages.tracebacks import entry
from ..state.arena import BufferSpec
from ..state.leaf import owned
from .alarms import ALARM
from .taps import TAP

__all__ = ["DEBUG_PRINT", "REPORTS", "Silence", "debug_print", "show"]

# The registration lives as long as this module.
_library = torch.library.Library("fcg", "FRAGMENT")
_library.define("debug_print(str text, Tensor[] values) -> ()")


def show(text: str, values: Sequence[Tensor]) -> None:
    """Write one line to ``sys.stdout``: ``text`` with the values filled in."""
    sys.stdout.write(text.format(*(value.cpu() for value in values)) + "\n")


_library.impl("debug_print", show, "CompositeExplicitAutograd")


def _show_each(info: Any, in_dims: Any, text: str, values: Sequence[Tensor]) -> tuple[None, None]:
    """Print under ``vmap``: one line for each element of the batch, in order."""
    for i in range(info.batch_size):
        pairs = zip(values, in_dims[1], strict=True)
        torch.ops.fcg.debug_print(
            text, [value if dim is None else value.select(dim, i) for value, dim in pairs]
        )
    return None, None


torch.library.register_vmap("fcg::debug_print", _show_each, lib=_library)
DEBUG_PRINT = torch.ops.fcg.debug_print.default


# Ops whose values leave a step along with its metrics.
REPORTS = frozenset({ALARM, DEBUG_PRINT, TAP})


class Silence(TorchFunctionMode):
    """A mode that suppresses prints, taps and alarms.

    Args:
      on: Whether to suppress. A mode that is off still counts as an active mode, which some modules of torch check for.
    """

    def __init__(self, *, on: bool = True) -> None:
        super().__init__()
        self._unsaid = REPORTS if on else frozenset()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return None if func in self._unsaid else func(*args, **(kwargs or {}))


@entry("fcg.debug_print('loss {}', loss)")
def debug_print(text: str, /, *args: Any, **kwargs: Any) -> None:
    """Print tensor values from inside a step at each call: in order, after the call, on the host.

    The computation does not change; in an eager run the line is printed at once. Values that are not tensors are
    printed as they were when the step was traced.

    Under ``vmap`` it prints one line for each element of the batch. If writing to ``sys.stdout`` fails, the call raises
    after it has changed the state: ``state.latest()`` is the new state.

    Args:
      text: A format string, as for ``str.format``. Fields of 0-dim tensors take number formats such as ``{:.3f}``.
      args: Tensors of any shape, or other values.
      kwargs: The same, by name.
    Raises:
      ValueError: If a format does not fit the tensor's dtype, or is meant for a number and the tensor has dimensions.
      IndexError: If ``text`` has more fields than there are values.
      KeyError: If ``text`` names a value that was not passed.

    Example:
      >>> import torch, functional_cg as fcg
      >>> @fcg.graph_step
      ... def step(state, x):
      ...     fcg.debug_print("n = {}, mean = {:.2f}", state["n"], x.mean())
      ...     return {"n": state["n"] + 1}, {}
      >>> state, _ = step({"n": torch.tensor(0)}, torch.tensor([1.0, 2.0]))
      n = 0, mean = 1.50
      >>> state, _ = step(state, torch.tensor([3.0, 5.0]))
      n = 1, mean = 4.00
    """
    template = _Template()
    line = template.vformat(text, args, kwargs)
    with torch.no_grad():  # copies, since the step may write to a tensor after printing it
        values = [owned(tensor).detach().clone() for tensor in template.tensors]
    DEBUG_PRINT(line, values or [torch.zeros(0)])


class _Template(string.Formatter):
    """Fills in all but the tensors, which become numbered fields of the result.

    Attributes:
      tensors: The tensors, by number.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def parse(self, text: Any) -> Any:
        for literal, *field in super().parse(text):
            yield _escaped(literal), *field

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return (value, conversion) if isinstance(value, Tensor) else super().convert_field(value, conversion)

    def format_field(self, value: Any, spec: str) -> str:
        if not (isinstance(value, tuple) and value and isinstance(value[0], Tensor)):
            return _escaped(super().format_field(value, spec))
        tensor, conversion = value
        _refuse_misfit(tensor, spec, conversion)
        self.tensors.append(tensor)
        ending = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
        return f"{{{len(self.tensors) - 1}{ending}}}"


def _refuse_misfit(tensor: Tensor, spec: str, conversion: str | None) -> None:
    if spec and tensor.dim() and not conversion:
        raise ValueError(
            f"debug_print: `{{:{spec}}}` formats a number, and the tensor is {BufferSpec.of(tensor)}; "
            "print it with `{}`, or one element of it"
        )
    try:
        format(string.Formatter().convert_field(_sample(tensor.dtype), conversion), spec)
    except ValueError as error:
        raise ValueError(
            f"debug_print: `{{:{spec}}}` does not format {BufferSpec.of(tensor)}: {error}"
        ) from None


def _sample(dtype: torch.dtype) -> complex | float | int | bool:
    """Return a Python number such as ``item()`` gives for the dtype; a tensor would become part of the step."""
    if dtype.is_complex:
        return 0j
    if dtype.is_floating_point:
        return 0.0
    return False if dtype is torch.bool else 0


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
