"""Raised: what an exception says that came out of the user's function while it was traced."""

from __future__ import annotations

import bdb
import dataclasses
import re
from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ...errors import CaptureError, FunctionalCGError, HostSyncError
from ...messages.source import Location, is_user_file, raised_frame, sync_spelling
from ...state.arena import BufferSpec
from .rules import MIXED_DTYPES, host_sync

__all__ = ["mapped", "raised_at"]

# Parts of the messages with which torch refuses to read a fake tensor's memory.
_READS_MEMORY = (".numpy() is not supported", "Cannot access data pointer", "its data is not allocated yet")
_IN_A_LIST = re.compile(r"(\[\d+\])+$")


def mapped(name: str, inputs: Mapping[str, BufferSpec], error: Exception) -> FunctionalCGError:
    """Our error for an exception of the user's function, or for one with which the fake mode refuses a read.

    Args:
      name: The function's.
      inputs: The input leaves by key path.
      error: What it raised.
    """
    text = str(error)
    by_value = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
    if by_value or any(part in text for part in _READS_MEMORY):
        return _host_sync(name, error)
    where = raised_at(error)
    if isinstance(error, NotImplementedError) and "HigherOrderOperator" in text:
        return CaptureError.of(
            name,
            f"calls an operator that takes functions, such as `torch.cond`{where}.",
            why="A graph replays one sequence of kernels; what such an operator runs is not part of it.",
            fix="compute both sides and select, `torch.where(cond, a, b)`; write a loop of fixed length in Python.",
        )
    return CaptureError.of(
        name,
        f"raised {type(error).__name__}{where}: {text.splitlines()[0] if text else ''}".rstrip(": "),
        why="The step was being traced; nothing was launched and the state is unchanged.",
        fix=_fix(name, inputs, error),
    )


def _fix(name: str, inputs: Mapping[str, BufferSpec], error: Exception) -> str:
    if "does not require grad" in str(error):
        return "in place of `backward()`, `loss, grads = fcg.value_and_grad(loss_fn)(state.params)`."
    if isinstance(error, dataclasses.FrozenInstanceError):
        return "a state is immutable: `state = state.replace(...)` gives one with other fields."
    if isinstance(error, bdb.BdbQuit):
        return f"a debugger works where there are values: `{name}.eager(...)`, or FCG_DISABLE_CAPTURE=1 for all calls."
    doubles = [path for path, spec in inputs.items() if spec.dtype is torch.float64]
    if doubles and MIXED_DTYPES in str(error):
        return f"`{doubles[0]}` is f64, as numpy makes it: pass it with `.astype(np.float32)`, or `.float()`."
    of_lists = [_IN_A_LIST.sub("", path) for path in inputs if _IN_A_LIST.search(path)]
    if of_lists and isinstance(error, TypeError) and re.search(r"\b(list|tuple)\b", str(error)):
        return f"`{of_lists[0]}` is a list, each number of it an input of its own: pass `torch.tensor({of_lists[0]})`."
    return "see the original exception above; `step.eager(state, *inputs)` runs the function on real values."


def _host_sync(name: str, error: Exception) -> HostSyncError:
    frame = raised_frame(error)
    what, fix = sync_spelling(frame) if frame is not None else ("", "")
    row = f"{what or str(error).splitlines()[0]}{raised_at(error)}"
    return host_sync(name, "asks for the values of a tensor on the host", row, fix)


def raised_at(error: BaseException) -> str:
    """The innermost line of the user's code in the traceback, as ``, at train.py:33``; empty without one."""
    line, traceback = "", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        generated = line and code.co_filename == "<string>"  # such as a method that dataclasses wrote
        if is_user_file(code.co_filename) and not generated:
            line = f", at {Location(code.co_filename, traceback.tb_lineno, code.co_name)}"
        traceback = traceback.tb_next
    return line
