"""Printing from inside of a step.

What is printed leaves the step beside its metrics; the host formats it after each call. The call that prints reads
values, so it waits for the device.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .arena import BufferSpec
from .leaf import owned

__all__ = ["debug_print", "show"]

# The registration lives as long as this module.
_library = torch.library.Library("fcg", "FRAGMENT")
_library.define("debug_print(str text, Tensor[] values) -> ()")


def show(text: str, values: Sequence[Tensor]) -> None:
    """Write one line to ``sys.stdout``: ``text`` with the values filled in."""
    sys.stdout.write(text.format(*(value.cpu() for value in values)) + "\n")


_library.impl("debug_print", show, "CompositeExplicitAutograd")


def debug_print(text: str, /, *args: Any, **kwargs: Any) -> None:
    """Print values of tensors from inside of a step, at each call: in order, after the call, on the host.

    The program stays what it is; in an eager run the line is printed at once. Values that are no tensors are printed
    as they were when the step was traced.

    Args:
      text: A format string, as for ``str.format``. Fields of 0-dim tensors take number formats such as ``{:.3f}``.
      args: Tensors of any shape, or other values.
      kwargs: The same, by name.
    Raises:
      ValueError: If a format is meant for a number and the tensor has more than one element.
      IndexError: If ``text`` has more fields than there are values.
      KeyError: If ``text`` names a value that is not there.

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
    template, tensors = _template(text, args, kwargs)
    with torch.no_grad():  # copies, since the step may write to a tensor after it was printed
        values = [owned(tensor).detach().clone() for tensor in tensors]
    torch.ops.fcg.debug_print(template, values or [torch.zeros(0)])


def _template(text: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, list[Tensor]]:
    """The text with numbered fields for the tensors and everything else filled in; the tensors."""
    formatter, tensors, parts = string.Formatter(), list[Tensor](), list[str]()
    automatic = iter(range(len(args) + 1))
    for literal, name, spec, conversion in formatter.parse(text):
        parts.append(_escaped(literal))
        if name is None:
            continue
        if not name or name[0] in ".[":
            name = f"{next(automatic)}{name}"
        value, _ = formatter.get_field(name, args, kwargs)
        if not isinstance(value, Tensor):
            shown = format(
                formatter.convert_field(value, conversion), formatter.vformat(spec or "", args, kwargs)
            )
            parts.append(_escaped(shown))
            continue
        if spec and value.dim():
            raise ValueError(
                f"debug_print: `{{:{spec}}}` formats a number, and the tensor is {BufferSpec.of(value)}; "
                "print it with `{}`, or one element of it"
            )
        ending = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
        parts.append(f"{{{len(tensors)}{ending}}}")
        tensors.append(value)
    return "".join(parts), tensors


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
