"""Advice for a line in an installed library, which is not the user's to change: what to do at the user's own line."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from types import FrameType
from typing import Any

import torch

from .advice import SHOWS
from .code_reading import Site, sync_spelling, text_of
from .expressions import Axes
from .source import frames, is_installed, own_frame

__all__ = ["copy_fix", "in_place_fix", "keyed_fix", "sync_fix"]


# Libraries leave out layers at random, with a rate that is a number of the module or its configuration.
_LEFT_OUT = (
    "what is drawn decides which layers run; set that rate, such as `layerdrop`, to 0, and put each layer into "
    "a module that selects, `y = self.layer(x, *args, **kwargs)`, "
    "`return torch.where(torch.rand([], device=x.device) < p, x, y) if self.training else y`"
)
_EXPERTS = '`model.set_experts_implementation("batched_mm")` computes experts without a loop over them'


def sync_fix(
    frame: FrameType, own: FrameType | None = None, *, axes: Axes = None, drawn: bool = False
) -> tuple[str, str]:
    """Return how a line asks for a tensor's value, and what to do about it where the user can.

    Args:
      frame: The frame of the line.
      own: The frame of the user's own code that led to it; by default, the innermost outside of it.
      axes: How many axes a subscripted tensor has, and the mask that is its index; None if it is no mask.
      drawn: Whether the value is drawn at random.
    """
    what, fix = sync_spelling(frame, axes=axes)
    if told := _guessed(frame):
        return what, told
    if _call(frame, own) is None:
        return what, fix
    owner = frame.f_locals.get("self")
    if isinstance(owner, torch.nn.Module):
        switch = hasattr(getattr(owner, "config", None), "_experts_implementation")
        remedy = (
            _LEFT_OUT if drawn else _EXPERTS if switch and type(owner).__name__.endswith("Experts") else ""
        )
        if not remedy and (setting := _configured(frame)):
            remedy = f"{setting}; or, {_override(frame, fix)}"
        if remedy:
            return what, f"{_belongs(frame)}: {remedy}"
    outer = own or own_frame(frame)  # which may show a tensor, by whichever library
    shown = sync_spelling(outer) if outer is not None else ("", "")
    return shown if SHOWS in shown[1] else (what, in_place_fix(frame, fix, own))


def in_place_fix(frame: FrameType, fix: str, own: FrameType | None = None) -> str:
    """Return what to do in a line, and for a line of a library how to get there.

    Args:
      frame: The frame of the line.
      fix: What to do in the line.
      own: As for :func:`sync_fix`.
    """
    call, there = _call(frame, own), _override(frame, fix)
    if call is None:
        return fix
    if isinstance(frame.f_locals.get("self"), torch.nn.Module):  # what it returns is to be differentiated
        return f"{_belongs(frame)}: {there}"
    outside = f"call `{text_of(call)}` outside of the step and pass what it returns as an input"
    return f"{_belongs(frame)}: {outside}; or, {there}"


def _override(frame: FrameType, fix: str) -> str:
    name, owner = frame.f_code.co_name, type(frame.f_locals.get("self")).__name__
    if "self" not in frame.f_locals:
        return f"in a function of your own in place of `{name}`: {fix}"
    return f"in a class of your own that inherits from `{owner}`, override `{owner}.{name}`: {fix}"


def _belongs(frame: FrameType) -> str:
    library = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return f"the line belongs to `{library}`"


def _guessed(frame: FrameType) -> str:
    """Return what to pass to a module of torch that looks at a mask to find out whether it is causal; "" if none does.

    Args:
      frame: The user's frame, outside of torch's.
    """
    inner = takewhile(lambda one: one is not frame, frames(sys._getframe(1)))
    modules = [one for one in inner if one.f_globals.get("__name__", "").startswith("torch.nn.")]
    takes = ((one, one.f_code.co_varnames[: one.f_code.co_argcount]) for one in modules)
    unsaid = [
        [name for name in names if name.endswith("is_causal") and one.f_locals[name] is None]
        for one, names in takes
    ]
    if not any("is_causal" in names for names in unsaid):
        return ""
    given = " and ".join(f"`{name}=False`" for name in list(filter(None, unsaid))[-1])
    return f"pass {given} beside the mask, which then is used as it is, causal or not"


def _configured(frame: FrameType) -> str:
    """Return how to get past a line that a setting of the module's configuration leads to; "" if none does."""
    site = Site.of(frame, frame.f_lasti)
    for node in site.around() if site is not None else ():
        for setting in ast.walk(node.test) if isinstance(node, ast.If) else ():
            if isinstance(setting, ast.Attribute) and text_of(setting.value) == "self.config":
                if others := list(map(repr, _alternatives(node, text_of(setting)))):
                    return (
                        f"it runs since `{text_of(node.test)}`; before `from_module`, set "
                        f"`model.config.{setting.attr}` to {' or '.join(others)}"
                    )
    return ""


def _alternatives(node: ast.If, setting: str) -> Iterator[Any]:
    """Yield the constants with which the branches behind an ``if`` compare a setting."""
    match node.orelse:
        case [ast.If(test=test) as other]:
            match test:
                case ast.Compare(left, [ast.Eq()], [ast.Constant(value)]) if text_of(left) == setting:
                    yield value
            yield from _alternatives(other, setting)


def keyed_fix(frame: FrameType | None) -> str:
    """Return the fix for a library's function that draws by torch's generator; "" for the user's own line."""
    if frame is None or (call := _call(frame)) is None:
        return ""
    args = ", ".join(["key", *(text_of(one) for one in call.args)])
    return (
        f"{_belongs(frame)}: give its draws a key, `key = fcg.random.fold_in(state.key, state.step)`, then "
        f"`fcg.random.keyed({text_of(call.func)})({args})`."
    )


def copy_fix(frame: FrameType | None, owner: str) -> str:
    """Return the fix for a library's function that writes into what it is given; "" for the user's own line."""
    if frame is None or (call := _call(frame)) is None:
        return ""
    return f"{_belongs(frame)}: in `{text_of(call)}`, pass a copy, `{owner}.clone()`."


def _call(frame: FrameType, own: FrameType | None = None) -> ast.Call | None:
    """Return the user's own call that led to a library's line; None if the line is the user's, or nothing is known."""
    if not is_installed(frame.f_code.co_filename):
        return None
    own = own or own_frame(frame)
    site = None if own is None else Site.of(own, own.f_lasti)
    nodes: Sequence[ast.AST] = [] if site is None else [site.node, *ast.walk(site.node)]
    return next((node for node in nodes if isinstance(node, ast.Call)), None)
