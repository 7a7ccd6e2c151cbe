"""Advice for a line in an installed library, which is not the user's to change: what to do at the user's own line."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from .advice import SHOWS
from .code_reading import Site, sync_spelling, text_of
from .expressions import Axes
from .source import is_installed, own_frame

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
        if remedy := _LEFT_OUT if drawn else switch and type(owner).__name__.endswith("Experts") and _EXPERTS:
            return what, f"the line belongs to `{_named(frame)[0]}`: {remedy}"
        if remedy := _configured(frame):
            return what, f"the line belongs to `{_named(frame)[0]}`: {remedy}; or, {_override(frame, fix)}"
    asked = _asked_to_show(own or own_frame(frame))
    return asked or (what, in_place_fix(frame, fix, own))


def in_place_fix(frame: FrameType, fix: str, own: FrameType | None = None) -> str:
    """Return what to do in a line, and for a line of a library how to get there.

    Args:
      frame: The frame of the line.
      fix: What to do in the line.
      own: As for :func:`sync_fix`.
    """
    call = _call(frame, own)
    if call is None:
        return fix
    library, there = _named(frame)[0], _override(frame, fix)
    if isinstance(frame.f_locals.get("self"), torch.nn.Module):  # what it returns is to be differentiated
        return f"the line belongs to `{library}`: {there}"
    outside = f"call `{text_of(call)}` outside of the step and pass what it returns as an input"
    return f"the line belongs to `{library}`: {outside}; or, {there}"


def _override(frame: FrameType, fix: str) -> str:
    owner = _named(frame)[1]
    if "self" in frame.f_locals:
        return f"in a class of your own that inherits from `{owner.partition('.')[0]}`, override `{owner}`: {fix}"
    return f"in a function of your own in place of `{owner}`: {fix}"


def _guessed(frame: FrameType) -> str:
    """Return what to pass to a module of torch that looks at a mask to find out whether it is causal; "" if none does.

    Args:
      frame: The user's frame, outside of torch's.
    """
    inner: FrameType | None = sys._getframe(1)
    looks, names = False, list[str]()
    while inner is not None and inner is not frame:
        if inner.f_globals.get("__name__", "").startswith("torch.nn."):
            takes = inner.f_code.co_varnames[: inner.f_code.co_argcount]
            unsaid = [name for name in takes if name.endswith("is_causal") and inner.f_locals[name] is None]
            looks = looks or "is_causal" in unsaid
            names = unsaid or names
        inner = inner.f_back
    given = " and ".join(f"`{name}=False`" for name in names if looks)
    return given and f"pass {given} beside the mask, which then is used as it is, causal or not"


def _configured(frame: FrameType) -> str:
    """Return how to get past a line that a setting of the module's configuration leads to; "" if none does."""
    site = Site.of(frame, frame.f_lasti)
    if site is None:
        return ""
    node = site.node
    while (node := site.up(node)) is not None:
        if not isinstance(node, ast.If):
            continue
        for setting in ast.walk(node.test):
            if isinstance(setting, ast.Attribute) and text_of(setting.value) == "self.config":
                others = [repr(value) for value in _alternatives(node, text_of(setting))]
                if others:
                    return (
                        f"it runs since `{text_of(node.test)}`; before `from_module`, set "
                        f"`model.config.{setting.attr}` to {' or '.join(others)}"
                    )
    return ""


def _alternatives(node: ast.If, setting: str) -> list[Any]:
    """Return the constants with which the branches behind an ``if`` compare a setting."""
    found: list[Any] = []
    rest = node.orelse
    while len(rest) == 1 and isinstance(rest[0], ast.If):
        match rest[0].test:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value)]) if (
                text_of(left) == setting
            ):
                found.append(value)
        rest = rest[0].orelse
    return found


def keyed_fix(frame: FrameType | None) -> str:
    """Return the fix for a library's function that draws by torch's generator; "" for the user's own line."""
    call = None if frame is None else _call(frame, None)
    if call is None:
        return ""
    args = ", ".join(["key", *(text_of(one) for one in call.args)])
    return (
        f"the line belongs to `{_named(frame)[0]}`: give its draws a key, `key = fcg.random.fold_in(state.key, "
        f"state.step)`, then `fcg.random.keyed({text_of(call.func)})({args})`."
    )


def copy_fix(frame: FrameType | None, owner: str) -> str:
    """Return the fix for a library's function that writes into what it is given; "" for the user's own line."""
    call = None if frame is None else _call(frame, None)
    if call is None:
        return ""
    return f"the line belongs to `{_named(frame)[0]}`: in `{text_of(call)}`, pass a copy, `{owner}.clone()`."


def _asked_to_show(own: FrameType | None) -> tuple[str, str] | None:
    """Return how the user's own line shows a tensor, whichever library it shows it by; None if it does not."""
    if own is None:
        return None
    what, fix = sync_spelling(own)
    return (what, fix) if SHOWS in fix else None


def _named(frame: FrameType | None) -> tuple[str, str]:
    assert frame is not None
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    library = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return library, name if owner is None else f"{type(owner).__name__}.{name}"


def _call(frame: FrameType, own: FrameType | None) -> ast.Call | None:
    """Return the user's own call that led to a library's line; None if the line is the user's, or nothing is known."""
    if not is_installed(frame.f_code.co_filename):
        return None
    own = own or own_frame(frame)
    site = None if own is None else Site.of(own, own.f_lasti)
    nodes: Sequence[ast.AST] = [] if site is None else [site.node, *ast.walk(site.node)]
    return next((node for node in nodes if isinstance(node, ast.Call)), None)
