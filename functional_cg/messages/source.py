"""Locate the line of user code where something happened.

A frame is user code unless its file belongs to torch, functional_cg, einops, numpy or the standard library; the
programs of functional_cg (examples, testing) count as user code. Of user code, some is the user's own to change,
and some is another library's, installed: there, a message names both lines, and its advice is for the user's own.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType

from .code_reading import sync_spelling

__all__ = [
    "Location",
    "at_here",
    "frames",
    "here",
    "is_installed",
    "is_user_file",
    "locate",
    "own_frame",
    "place_of",
    "raised_in",
    "sync_spelling",
    "user_frame",
    "warn",
]


def _folder(package: str) -> list[str]:
    # find_spec does not import a top-level package.
    spec = importlib.util.find_spec(package)
    return [os.path.dirname(spec.origin) + os.sep] if spec is not None and spec.origin else []


_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PROGRAMS = tuple(os.path.join(_HERE, name, "") for name in ("examples", "testing"))
_GENERATED = ("<frozen ", "<eval_with_key>", "<functional_cg", "<__array_function__")
_NO_FUNCTIONS = frozenset({"<locals>", "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"})
_LIBRARIES = (_HERE, *itertools.chain(*map(_folder, ("torch", "einops", "numpy"))), *_GENERATED)
_STANDARD = tuple(
    os.path.join(path, "") for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name))
)
# Python installs packages inside a folder that it calls the standard library's, with a virtual environment and without.
_INSTALLED = tuple(path + name for path in _STANDARD for name in ("site-packages", "dist-packages"))


@functools.cache
def is_user_file(filename: str) -> bool:
    """Whether code from `filename` is the user's rather than a library's."""
    if filename.startswith(_LIBRARIES):
        return filename.startswith(_PROGRAMS)
    return not filename.startswith(_STANDARD) or filename.startswith(_INSTALLED)


def is_installed(filename: str) -> bool:
    """Whether a file is below a folder that packages are installed in, and so not the user's to change."""
    return bool(_home_of(filename))


@functools.cache
def _home_of(filename: str) -> str:
    """Return the folder of installed packages that a file is in; "" for a file of the user's own."""
    folder = os.path.dirname(filename)
    while (parent := os.path.dirname(folder)) != folder:
        if os.path.basename(folder) in ("site-packages", "dist-packages"):
            return folder
        if folder in sys.path:  # `pip install --target` and the like
            there = os.listdir(folder) if os.path.isdir(folder) else []
            return folder if any(name.endswith(".dist-info") for name in there) else ""
        folder = parent
    return ""


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those around it, outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_frame(frame: FrameType | None = None, until: CodeType | None = None) -> FrameType | None:
    """Return the innermost frame of user code, from `frame` (default: the caller's) outwards.

    Args:
      frame: Where to begin.
      until: Code of the frame at which to stop and return None.
    """
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None and frame.f_code is not until:  # for each op of a trace: no generators
        if is_user_file(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def own_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's own code, from `frame` outwards; None if there is none."""
    names = ((one, one.f_code.co_filename) for one in frames(frame))
    return next((one for one, name in names if is_user_file(name) and not is_installed(name)), None)


def raised_in(error: BaseException) -> list[TracebackType]:
    """Return the entries of user code in the traceback of an error, the innermost last."""
    entries = [(one, one.tb_frame.f_code.co_filename) for one in _entries(error.__traceback__)]
    of_users = [(one, name) for one, name in entries if is_user_file(name)]
    # What is generated for the user's code, such as the methods of a dataclass, is not the user's, too.
    return [one for place, (one, name) in enumerate(of_users) if not place or name != "<string>"]


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


@dataclass(frozen=True, slots=True)
class Location:
    """A line of user code; prints as ``train.py:33``, ``timm/layers/mlp.py:33``, or ``In[3]:2`` in a notebook."""

    filename: str
    line: int
    function: str

    def __str__(self) -> str:
        home = _home_of(self.filename)
        name = os.path.relpath(self.filename, home) if home else os.path.basename(self.filename)
        return f"{_cell(self.filename) or name}:{self.line}"


def place_of(lines: Iterable[tuple[CodeType, int]]) -> str:
    """Return the first line of user code as ``train.py:33``; "" if there is none.

    One of an installed library has the user's own line with it.

    Args:
      lines: Pairs of code and line, from the innermost outwards.
    """
    of_users = (
        Location(code.co_filename, line, "") for code, line in lines if is_user_file(code.co_filename)
    )
    place = next(of_users, None)
    if place is None or not is_installed(place.filename):
        return str(place or "")
    own = next((one for one in of_users if not is_installed(one.filename)), None)
    return str(place) if own is None else f"{place}, called at {own}"


def _function(code: CodeType) -> str:
    """Return the name of a function; of the one around it for a comprehension, which has a frame of its own."""
    parts = [part for part in code.co_qualname.split(".") if part not in _NO_FUNCTIONS]
    return parts[-1] if parts else code.co_name


def here() -> str:
    """Return the user's line, ``train.py:33``; empty if there is none."""
    return place_of((one.f_code, one.f_lineno) for one in frames(sys._getframe(1)))


def at_here() -> str:
    """Return the user's line as the end of a sentence, ``, at train.py:33``; empty if there is none."""
    place = here()
    return place and f", at {place}"


def _cell(filename: str) -> str | None:
    """Return the name of the notebook cell that a file stands for; None outside IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    named = shell.compile.format_code_name(filename) if shell is not None else None
    return named[1] if named else None


def locate(frame: FrameType | None = None, until: CodeType | None = None) -> Location | None:
    """Return the line of the innermost user frame; arguments as for :func:`user_frame`."""
    found = user_frame(sys._getframe(1) if frame is None else frame, until)
    if found is None:
        return None
    return Location(found.f_code.co_filename, found.f_lineno, _function(found.f_code))


def warn(text: str) -> None:
    """Warn at the user's line: the innermost frame of user code, from the caller outwards."""
    of_users = (is_user_file(one.f_code.co_filename) for one in frames(sys._getframe(1)))
    depth = next((number for number, found in enumerate(of_users, 2) if found), 2)
    warnings.warn(text, stacklevel=depth)
