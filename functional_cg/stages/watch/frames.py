"""Follow the frames of a run; user code instruction by instruction.

Python 3.12 has ``sys.monitoring``, which leaves other code at full speed. Earlier versions use a trace
function; it replaces a debugger's, which still sees the other run of the trace.
"""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from types import CodeType, FrameType
from typing import Any

import torch

from ...concurrency.garbage import no_garbage_collection
from ...errors import CaptureError
from ...messages.source import frames, is_user_file
from .evaluation import readable
from .host_reads import HostReads, first_argument
from .instructions import Instructions
from .kinds import takes_arguments
from .places import Place

__all__ = ["Follower"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
# Methods of other libraries read attributes of the user's objects, such as modules or schedulers. These do not: parts
# of the standard library, and of torch what runs in each call.
_NOT_OF_OBJECTS = (
    *(
        os.path.join(path, name)
        for name in ("threading", "contextlib", "weakref", "logging", "typing", "abc", "warnings", "inspect")
        if (path := sysconfig.get_paths().get("stdlib"))
    ),
    *(
        _TORCH + name
        for name in """_compile.py _decomp _dynamo _functorch _higher_order_ops _inductor _library _ops.py
        _prims _refs _subclasses compiler fx overrides.py utils/_python_dispatch.py utils/_stats.py""".split()
    ),
)
_FROZEN = ("<frozen os>", "<frozen _collections_abc>")
_YIELDS = 0x20  # code flag of generators


class Follower:
    """The frames that run on this thread.

    Args:
      reads: Records what they read.

    Attributes:
      own: By the id of a code object: whether it is the user's, or None if its frames are ignored; and the code object,
        whose own hash would go through all of its instructions.
      away: Whether following is suspended.
      copies: Whether the library copies or lists the user's objects.
    """

    def __init__(self, reads: HostReads) -> None:
        self.away = self.copies = False
        self._reads = reads
        self._frames: dict[int, Instructions] = {}
        self.own: dict[int, tuple[bool | None, CodeType]] = {}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Record what the frames that run in this block read.

        Raises:
          CaptureError: If this interpreter has frames of an unknown layout.
        """
        if not readable():
            raise CaptureError.of(
                "",
                "what a step reads on the host cannot be seen in this interpreter.",
                rows=[sys.version],
                why="A graph bakes in what Python reads, so each call has to know whether it has changed.",
                fix="use CPython 3.11 to 3.14, not a free-threaded or a debug build.",
            )
        # Garbage collection may run frames that are not the step's, such as that of a dying generator.
        with no_garbage_collection(), self._callbacks_aside():
            try:
                with _traced(self) if sys.version_info < (3, 12) else _monitored(self):
                    yield
            finally:
                for followed in self._frames.values():  # that have not ended
                    del followed.frame
                self._frames.clear()

    def aside(self, act: Callable[..., Any], *args: Any) -> Any:
        """Call a function without following its frames: a library's, or a signal handler."""
        with self._suspended():
            return act(*args)

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        tracer, away = sys.gettrace(), self.away
        self.away = True
        if isinstance(tracer, _Tracer):  # it would slow down each frame
            sys.settrace(None)
        try:
            yield
        finally:
            self.away = away
            if isinstance(tracer, _Tracer):
                sys.settrace(tracer)

    @contextmanager
    def _callbacks_aside(self) -> Iterator[None]:
        """Do not follow what a collection reports to, if the step starts one: a profiler, a test runner."""
        thread, suspended = threading.get_ident(), ExitStack()

        def first(phase: str, info: object) -> None:
            if threading.get_ident() == thread:
                suspended.enter_context(self._suspended())

        def last(phase: str, info: object) -> None:
            if threading.get_ident() == thread:
                suspended.close()

        gc.callbacks.insert(0, first)
        gc.callbacks.append(last)
        try:
            yield
        finally:
            gc.callbacks.remove(first)
            gc.callbacks.remove(last)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Follow only the user's own code, and what that calls: a copy is followed where the step reads it."""
        before, self.copies = self.copies, True
        try:
            yield
        finally:
            self.copies = before

    def owned(self, frame: FrameType) -> bool | None:
        """Whether a frame is the user's; None if it is ignored."""
        code = frame.f_code
        known = self.own.get(id(code))
        if known is None:
            known = self.own[id(code)] = _is_own(frame), code
        return known[0]

    def followed(self, frame: FrameType | None) -> Instructions | None:
        """Return the record of a frame that has started; None if it is not followed."""
        found = self._frames.get(id(frame))
        return found if found is not None and found.frame is frame else None

    def start(self, frame: FrameType) -> Instructions | None:
        """Handle a frame that starts or resumes; return its record if its instructions are followed."""
        followed, own = self.followed(frame), self.owned(frame)
        if followed is not None:
            return followed
        if own is None or not (own or self._counts(frame)) or self._only_copies(frame):
            return None
        followed = self._frames[id(frame)] = Instructions(frame, self._reads, own=own)
        if own and frame.f_code.co_flags & _YIELDS and not followed.is_fresh:
            self._reads.goes_on(Place(frame, frame.f_code.co_name))
        return followed

    def _only_copies(self, frame: FrameType) -> bool:
        """Whether a frame takes part in a copy of the library's and no code of the user's has called it."""
        callers = frames(frame) if self.copies else ()
        inner = takewhile(
            lambda one: not one.f_code.co_filename.startswith(_OURS) or self.owned(one), callers
        )
        return self.copies and not any(map(self.owned, inner))

    def _counts(self, frame: FrameType) -> bool:
        """Whether a library's code may read what is the user's.

        It does as a method of a known object, or if the user's code asks for what depends on no argument: a flag.
        """
        if takes_arguments(frame.f_code):
            return self._reads.known(first_argument(frame.f_code, frame.f_locals)) is not None
        return frame.f_back is not None and bool(self.owned(frame.f_back))

    def returned(self, frame: FrameType) -> None:
        """Handle a frame that returns or yields."""
        if not frame.f_code.co_flags & _YIELDS:
            followed = self._frames.pop(id(frame), None)
            if followed is not None:
                followed.look_at_kept()
                del followed.frame


def _is_own(frame: FrameType) -> bool | None:
    filename, namespace = frame.f_code.co_filename, frame.f_globals
    lookup = torch.nn.Module.__getattr__.__code__  # it is known
    if frame.f_code is lookup or filename.startswith(_NOT_OF_OBJECTS):
        return None
    if not is_user_file(filename):
        return None if filename.startswith(("<", _OURS)) and filename not in _FROZEN else False
    if filename == "<string>":  # may be generated by a decorator, such as dataclass, or by namedtuple
        made_for = namespace.get("__file__")
        made = str(namespace.get("__name__")).startswith("namedtuple_")
        return None if made or (made_for is not None and not is_user_file(made_for)) else True
    return True


class _Tracer:
    """A trace function for ``sys.settrace``.

    Args:
      follower: Handles the frames' events.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._follower.start(frame) is None:
            return None  # as for most frames
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._inside

    def _inside(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            followed = self._follower.followed(frame)
            if followed is not None:
                followed.step(frame.f_lasti)
        elif event == "return":
            self._follower.returned(frame)
        return self._inside


@contextmanager
def _traced(follower: Follower) -> Iterator[None]:
    before, tracer = sys.gettrace(), _Tracer(follower)
    sys.settrace(tracer)
    try:
        yield
    finally:
        if sys.gettrace() is tracer:  # else the step has started a debugger
            sys.settrace(before)


@contextmanager
def _monitored(follower: Follower) -> Iterator[None]:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    events, thread = monitoring.events, threading.get_ident()
    tool = next(number for number in (4, 3, 2, 1, 0) if monitoring.get_tool(number) is None)
    entered: dict[int, CodeType] = {}
    inside = events.INSTRUCTION | events.PY_RETURN | events.PY_YIELD

    def started(code: CodeType, offset: int) -> Any:
        if threading.get_ident() != thread or (follower.away and id(code) in follower.own):
            return None
        frame = sys._getframe(1)
        if follower.owned(frame) is None:
            return monitoring.DISABLE
        if not follower.away and follower.start(frame) is not None and id(code) not in entered:
            entered[id(code)] = code
            monitoring.set_local_events(tool, code, inside)
        return None

    def instruction(code: CodeType, offset: int) -> Any:
        if not follower.away and threading.get_ident() == thread:
            followed = follower.followed(sys._getframe(1))
            if followed is not None and not followed.step(offset):
                return monitoring.DISABLE
        return None

    def returned(code: CodeType, offset: int, value: Any) -> None:
        if not follower.away and threading.get_ident() == thread:
            follower.returned(sys._getframe(1))

    callbacks = {
        events.PY_START: started,
        events.PY_RESUME: started,
        events.INSTRUCTION: instruction,
        events.PY_RETURN: returned,
        events.PY_YIELD: returned,
    }
    monitoring.use_tool_id(tool, "functional_cg")
    try:
        for event, callback in callbacks.items():
            monitoring.register_callback(tool, event, callback)
        monitoring.restart_events()
        monitoring.set_events(tool, events.PY_START | events.PY_RESUME)
        yield
    finally:
        monitoring.set_events(tool, 0)
        for code in entered.values():
            monitoring.set_local_events(tool, code, 0)
        for event in callbacks:
            monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)
