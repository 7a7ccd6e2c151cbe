"""Turn an exception raised while tracing the user's function into an error of this library."""

from __future__ import annotations

import bdb
import contextlib
import dataclasses
import re
from collections.abc import Iterator
from traceback import walk_tb

import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ...errors import CaptureError, FunctionalCGError, HostSyncError
from ...errors.words import words_of
from ...messages.causes import fix_of, takes, wording
from ...messages.libraries import sync_fix
from ...messages.source import is_installed, place_of, raised_in
from ..kinds import MIXED_DTYPES, not_strided
from .recipe import Recipe
from .rules import host_sync

__all__ = ["ended_checkpoints", "mapped", "raised_at"]

# Fragments of the messages that torch raises on reading a fake tensor's memory.
_READS_MEMORY = (".numpy() is not supported", "Cannot access data pointer", "its data is not allocated yet")
_IN_A_LIST = re.compile(r"(\[\d+\])+$")


@contextlib.contextmanager
def ended_checkpoints() -> Iterator[None]:
    """End the checkpoints that an exception leaves open.

    Before torch 2.12 their hooks on saved tensors stay on for as long as a traceback keeps their frames.
    """
    try:
        yield
    except BaseException as error:
        chain: list[BaseException] = [error]
        for one in chain:  # which grows
            chain += [
                other
                for other in (one.__cause__, one.__context__)
                if other is not None and other not in chain
            ]
            for frame, _ in walk_tb(one.__traceback__):
                if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
                    frame.clear()
        raise


def mapped(recipe: Recipe, error: Exception) -> FunctionalCGError:
    """Return the library's error for an exception from the user's function or from a read the fake mode refused."""
    name, text = recipe.name, words_of(error)
    by_value = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
    if by_value or any(part in text for part in _READS_MEMORY):
        return _host_sync(name, error)
    where = raised_at(error)
    if _raised_by("torch.nested", error):
        return not_strided(name, "torch.nested", where=where)
    if isinstance(error, NotImplementedError) and "HigherOrderOperator" in text:
        return CaptureError.of(
            name,
            f"calls an operator that takes functions, such as `torch.cond`{where}.",
            why="A graph replays one sequence of kernels; what such an operator runs is not part of it.",
            fix="use `fcg.cond` and `fcg.scan`, which a step records; or compute both sides and select, "
            "`torch.where(cond, a, b)`, and write a loop of fixed length in Python.",
        )
    return CaptureError.of(
        name,
        f"raised {type(error).__name__}{where}: {wording(text)}".rstrip(": "),
        why="The step was being traced; nothing was launched and the state is unchanged.",
        fix=_ended(_fix(recipe, error)),
    )


def _fix(recipe: Recipe, error: Exception) -> str:
    name, text = recipe.name, words_of(error)
    inputs = dict(zip(recipe.input_names, recipe.inputs, strict=True))
    if isinstance(error, dataclasses.FrozenInstanceError):
        return (
            fix_of(error) or "a state is immutable: `state = state.replace(...)` gives one with other fields"
        )
    if isinstance(error, bdb.BdbQuit):
        return f"a debugger works where there are values: `{name}.eager(...)`, or FCG_DISABLE_CAPTURE=1 for all calls"
    if "derivative for aten::_scaled_dot_product" in text:
        return "torch knows one derivative of fused attention: `with sdpa_kernel(SDPBackend.MATH):` around it has two"
    doubles = [path for path, spec in inputs.items() if spec.dtype is torch.float64]
    if doubles and MIXED_DTYPES in text:
        return f"`{doubles[0]}` is f64, as numpy makes it: pass it with `.astype(np.float32)`, or `.float()`"
    call = takes(recipe.function, name)
    if isinstance(error, TypeError) and text.partition("()")[0].endswith(name) and not raised_in(error):
        return f"call it as `{call}`"
    if isinstance(error, AttributeError | KeyError) and _is_swapped(recipe, error):
        return f"the arguments are in another order, `{call}`"
    of_lists = [
        _IN_A_LIST.sub("", path)
        for path, spec in inputs.items()
        if _IN_A_LIST.search(path) and not spec.shape
    ]
    if of_lists and isinstance(error, TypeError) and re.search(r"\b(list|tuple)\b", text):
        return f"`{of_lists[0]}` is a list, each number of it an input of its own: pass `torch.tensor({of_lists[0]})`"
    return (
        fix_of(error)
        or f"`{name}.eager(...)` stops at the same line with real values, for `print` and a debugger"
    )


def _raised_by(package: str, error: Exception) -> bool:
    """Whether an exception passed through the code of a package."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return any(module == package or module.startswith(f"{package}.") for module in modules)


def _ended(text: str) -> str:
    return text if text.endswith("?") else f"{text}."


def _is_swapped(recipe: Recipe, error: AttributeError | KeyError) -> bool:
    """Whether a state is asked for what another argument, also a state, has."""
    asked = f".{error.name}" if isinstance(error, AttributeError) else f"[{error.args[0]!r}]"
    if not recipe.states:
        return False
    first, *others = ({str(key) for key in state.treedef.keys} for state in recipe.states)
    return asked not in first and any(asked in other for other in others)


def _host_sync(name: str, error: Exception) -> HostSyncError:
    entries = raised_in(error)
    own = [one.tb_frame for one in entries if not is_installed(one.tb_frame.f_code.co_filename)]
    what, fix = sync_fix(entries[-1].tb_frame, own[-1] if own else None) if entries else ("", "")
    row = f"{what or words_of(error).splitlines()[0]}{raised_at(error)}"
    return host_sync(name, "asks for the values of a tensor on the host", row, fix)


def raised_at(error: BaseException) -> str:
    """Return the innermost line of user code in the traceback, as ``, at train.py:33``; "" if there is none."""
    place = place_of((one.tb_frame.f_code, one.tb_lineno) for one in reversed(raised_in(error)))
    return place and f", at {place}"
