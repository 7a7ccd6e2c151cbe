"""Shorten the tracebacks of errors that leave the package to the frames of user code.

A wrong shape in a forward passes through a hundred frames of torch and of this package before it reaches the user, who
can act on two or three. With the environment variable ``FCG_TRACEBACK=full``, all frames stay. A debugger, such as
``pdb.pm()``, starts in the user's innermost frame either way.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar, cast

from ..ambient.setting import inside_a_step
from ..errors.words import words_of
from .source import raised_in

__all__ = ["entry", "shorten"]

Function = TypeVar("Function", bound=Callable[..., Any])

_NOTE = "(Frames of torch and functional_cg are left out of the traceback: FCG_TRACEBACK=full shows them.)"
_ROOMS = frozenset({"nn", "optim", "random", "sharding", "tree"})


def shorten(error: BaseException) -> None:
    """Leave only frames of user code in the traceback of an error, and of those that led to it.

    To be followed by a bare ``raise``, which adds no frame of its own. Inside of a step nothing is done: the error has
    yet to be explained by its frames, and leaves by the step.
    """
    if os.environ.get("FCG_TRACEBACK") == "full" or inside_a_step():
        return
    for one in _chain(error):
        one.__traceback__ = _of_user(one)
    if _NOTE not in getattr(error, "__notes__", ()):
        error.add_note(_NOTE)


def entry(usage: str = "") -> Callable[[Function], Function]:
    """Make a public function an entry: its errors have short tracebacks, and a call that does not fit says what would.

    Args:
      usage: How it is called, as the user writes it; by default, its name and the arguments it requires.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def entered(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                # No frame of the function: the arguments do not fit its signature.
                if isinstance(error, TypeError) and error.__traceback__ and not error.__traceback__.tb_next:
                    error.args = (f"{words_of(error)}.\nTo fix: `{usage or _usage(function)}`.",)
                shorten(error)
                raise

        return cast("Function", entered)

    return decorate


def _usage(function: Callable[..., Any]) -> str:
    room = function.__module__.split(".")[1]
    required = [
        f"{parameter.name}={parameter.name}" if parameter.kind is parameter.KEYWORD_ONLY else parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    return f"fcg.{f'{room}.' if room in _ROOMS else ''}{function.__name__}({', '.join(required)})"


def _of_user(error: BaseException) -> TracebackType | None:
    shown = None
    for one in reversed(raised_in(error)):
        shown = TracebackType(shown, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return shown


def _chain(error: BaseException | None, seen: set[int] | None = None) -> Iterator[BaseException]:
    """Yield an error and those that Python would show before it; leave out what torch caught on its way."""
    seen = set() if seen is None else seen
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    for one in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield from _chain(one, seen)
    if error.__context__ is not None and error.__cause__ is None and _of_user(error.__context__) is None:
        error.__suppress_context__ = True
    behind = None if error.__suppress_context__ else error.__context__
    yield from _chain(behind if error.__cause__ is None else error.__cause__, seen)
