"""The evaluation stack of a running frame is read where CPython keeps it; a new layout fails here."""

from __future__ import annotations

import contextlib
import dis
import json
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from functional_cg.stages.watch.evaluation import Evaluation, depths_of, readable

pytestmark = pytest.mark.skipif(not readable(), reason="another interpreter")


@contextlib.contextmanager
def at_each_instruction(code: types.CodeType, see: Callable[[types.FrameType, int], None]) -> Iterator[None]:
    """As the watch does it on this version."""
    if sys.version_info >= (3, 12):
        monitoring: Any = sys.monitoring
        tool = next(number for number in range(6) if monitoring.get_tool(number) is None)
        monitoring.use_tool_id(tool, "test")
        monitoring.register_callback(
            tool, monitoring.events.INSTRUCTION, lambda code, offset: see(sys._getframe(1), offset)
        )
        monitoring.set_local_events(tool, code, monitoring.events.INSTRUCTION)
        try:
            yield
        finally:
            monitoring.set_local_events(tool, code, 0)
            monitoring.register_callback(tool, monitoring.events.INSTRUCTION, None)
            monitoring.free_tool_id(tool)
        return

    def trace(frame: types.FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is code:
            frame.f_trace_opcodes = True
            if event == "opcode":
                see(frame, frame.f_lasti)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Manager:
    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *error: object) -> bool:
        return True


def plain(a: Any, b: Any, *rest: Any, key: Any = 3, **more: Any) -> Any:
    table = {"a": [a, b], **more}
    first, (second, *others) = table["a"][0], (b, a, *rest)
    total = sum(x for x in [1, 2, key] if x != 2) + len(others)
    return [f"{total:>{key}}", (lambda o: o)(second), *table["a"], first if total else second]


def control(a: Any, b: Any, *rest: Any) -> Any:
    out = []
    for i, (x, y) in enumerate([(a, b), (b, a)]):
        try:
            with Manager() as held:
                if i:
                    raise KeyError(x)
                out.append((held, [z for z in (x, y) if z is not None]))
        except ValueError:
            out.append(y)
        finally:
            out.append(i)
    while len(out) > 2 and out:
        out.pop()
    return out, a if a is b or not rest else b


def matching(a: Any, b: Any) -> Any:
    class Inner:
        held = a

        def method(self) -> Any:
            return super().__repr__(), b

    match {"x": [a, {"y": b}]}:
        case {"x": [first, {"y": second}]}:
            return Inner().method()[1], first, second
    return None


def generator(a: Any, b: Any) -> Any:
    def inner(n: int) -> Any:
        got = yield from (a for _ in range(n))
        sent = yield got
        yield [sent, b]

    run = inner(1)
    return [next(run), next(run), run.send(a)]


FUNCTIONS = {function.__name__: function for function in (plain, control, matching, generator)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_was_just_loaded_is_on_top(name: str) -> None:
    function, a, b = FUNCTIONS[name], object(), ["b"]
    code = function.__code__
    evaluation, instructions = Evaluation(code), {one.offset: one for one in dis.get_instructions(code)}
    seen = []
    last: list[dis.Instruction] = []

    def see(frame: types.FrameType, offset: int) -> None:
        slots = evaluation.top(frame, offset, depths_of(code)[offset])
        if last and last[0].opname in ("LOAD_FAST", "LOAD_CONST", "LOAD_DEREF"):
            held = last[0].argval if last[0].opname == "LOAD_CONST" else frame.f_locals[last[0].argval]
            seen.append(slots[-1] is held or slots[-1] == held)
        last[:] = [instructions[offset]]

    with at_each_instruction(code, see):
        function(a, b)
    assert len(seen) > 5
    assert all(seen)


def test_depths_agree_in_any_code() -> None:
    """Each instruction is reached with one depth, which is never more than the compiler provided for."""
    found = 0
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if not file.endswith(".py") or found > 150:
            continue
        with open(file, encoding="utf-8") as source:
            left = [compile(source.read(), file, "exec")]
        while left:
            code = left.pop()
            left += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            reached = list(depths_of(code).values())
            assert reached, code
            assert 0 <= min(reached), code
            assert max(reached) <= code.co_stacksize, code
            found += 1
    assert found > 100


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="only 3.11 keeps it while a function is traced")
def test_depths_are_those_of_the_interpreter() -> None:
    import ctypes

    wrong = []

    def see(frame: types.FrameType, offset: int) -> None:
        inner = ctypes.c_void_p.from_address(id(frame) + 24).value or 0
        used = ctypes.c_int.from_address(inner + 64).value
        code = frame.f_code
        cells = [name for name in code.co_cellvars if name not in code.co_varnames]
        depth = used - len(code.co_varnames) - len(cells) - len(code.co_freevars)
        if depths_of(code).get(offset) != depth:
            wrong.append((code.co_name, offset))

    for function in FUNCTIONS.values():
        with at_each_instruction(function.__code__, see):
            function(object(), ["b"])
    with at_each_instruction(json.JSONEncoder.encode.__code__, see):
        json.JSONEncoder().encode({"a": [1, {"b": 2}]})
    assert not wrong
