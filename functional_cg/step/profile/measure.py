"""Profile a call: run it on copies of its values, and give each of its calls a name, a time and its bytes."""

from __future__ import annotations

import linecache
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import cycle
from types import MappingProxyType, NoneType
from typing import Any, cast

import torch

from ...call.signature import Call
from ...messages.source import Location
from ...shards.peers import among, together
from ...stages.lower.in_place import InPlacePlan
from ...stages.plan import Buffers, Plan, lower_aten
from ...stages.program import Instr, Program
from ...stages.schedule import Schedule
from ...stages.sub_programs import unrolled
from ...stages.work import bytes_of
from ..costs import COPIES
from ..lowered import Lowered
from ..memory import memory_analysis, peak_of
from .kernels import launched_in, lines_told
from .result import Phase, Profile, ProfiledCall, ProfiledKernel
from .timing import Act, Clock, replaying, timed

__all__ = ["location_of", "phases", "profile_of"]

_OPTIMIZER = "(optimizer)"
_UNKNOWN = "(unknown)"
_INPUTS, _STATE = "inputs", "new state"

_Launch = tuple[str, float, tuple[Instr | str, ...]]  # its name, its seconds, the calls that it computes


def profile_of(call: Call, lowered: Lowered) -> Profile:
    """Profile a call that fits a lowered step, on copies of the values of its states and inputs.

    On several ranks, all of them have to profile the same call.

    Raises:
      RankError: If they do not.
      CaptureError: On a GPU, if torch's profiler records no kernel.
    """
    program, device, mesh = unrolled(lowered.program), call.device, lowered.mesh
    together(mesh, call.function, f"profile `{call.function}`")
    buffers, staging = lowered.buffers(call, [state.arena.copy() for state in call.states])
    copy_in, plan = partial(staging.copy_in, call.live), lowered.plan
    by_kernel = isinstance(plan, InPlacePlan) and os.environ.get("FCG_PROFILE_KERNELS") == "1"
    apart = cast("InPlacePlan", plan) if by_kernel else lower_aten(program, timed=True)
    run_on = partial(_run_on, apart, buffers, copy_in)
    captured = replaying(plan, buffers, lowered.reference.unchecked.slots, copy_in, device)
    with among(mesh, call.function), captured as replay:
        call_s, parts = timed(run_on, replay, device, call.function)
    launches = list(_launches(parts, apart))
    times: dict[Instr | str, float] = defaultdict(float)
    for _, seconds, computed in launches:  # shared among the calls, by the bytes of each
        weights = [1 if isinstance(one, str) else 1 + bytes_of(one, {*one.outputs()}) for one in computed]
        for one, weight in zip(computed, weights, strict=True):
            times[one] += seconds * weight / sum(weights)
    calls = _profiled(program, apart.schedule, times)
    return Profile(
        call.function,
        torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        plan.compiled,
        call_s,
        tuple(calls.values()),
        _resident(program),
        tuple(
            ProfiledKernel(name, seconds, tuple(calls[one] for one in computed if one in calls))
            for name, seconds, computed in launches
            if name and seconds
        ),
    )


def _run_on(plan: Plan, buffers: Buffers, copy_in: Act, clock: Clock) -> Act:
    """Return a run of a timed plan that begins with the copies of the inputs, and tells a clock of its parts."""
    compiled = isinstance(plan, InPlacePlan)
    ticks: list[Any] = plan.ticks
    if compiled:  # the lines of a function tell of themselves; then come the calls that update small leaves
        ticks = [None, *plan.schedule.fused, None, None][: len(ticks)]
    begin = cycle([*ticks, None])
    tick = lambda: clock(next(begin))  # noqa: E731
    run = plan.bind(buffers, tick)

    def once() -> None:
        clock(_INPUTS)
        copy_in()
        tick()  # the profiler's ranges may not overlap those that torch opens around the lines
        with lines_told(clock) if compiled else nullcontext():
            run(())

    return once


def _launches(parts: Sequence[tuple[Any, float]], plan: Plan) -> Iterator[_Launch]:
    """Yield what takes time; only a kernel has a name. Views that it computes cost nothing, unless that is all."""
    named, fused = (plan.named_calls(), plan.schedule.fused) if isinstance(plan, InPlacePlan) else ({}, ())
    names = {instr: f"{instr.name}.{number}" for number, instr in enumerate(fused)}
    launched = cache(launched_in)
    for part, seconds in parts:
        if isinstance(part, tuple) and seconds:
            file, number = part
            name, nodes = launched(file)[number]
            calls = dict.fromkeys(named[node] for node in nodes if node in named)
            yield name, seconds, tuple([one for one in calls if not one.is_view] or calls) or (_UNKNOWN,)
        elif not isinstance(part, tuple | NoneType):
            yield names.get(part, ""), seconds, (part,)


def phases(instrs: Iterable[Instr]) -> dict[Instr, Phase]:
    """Return the phase of each call.

    Calls of autograd's backward are the backward, what it recomputes included. Calls of an optimizer are the update,
    and so is all that is computed from gradients where nothing is differentiated: a clip, a norm, an update by hand.
    The rest is the forward; a module's calls are, even if its parameters were updated in the same step.
    """
    found: dict[Instr, Phase] = {}
    after: set[int] = set()  # storages of what was computed from gradients
    for instr in instrs:
        late = not after.isdisjoint(var.storage for var in instr.inputs())
        updates = (late or instr.inner) and not instr.origin.forward
        found[instr] = "backward" if instr.backward else "update" if updates else "forward"
        if instr.backward or late:
            after.update(var.storage for var in (*instr.outputs(), *instr.writes))
    return found


def _profiled(
    program: Program, schedule: Schedule, times: Mapping[Instr | str, float]
) -> dict[Instr | str, ProfiledCall]:
    """Return the calls with their times; the copies of one kind are one, and calls that need no time are there."""
    alive, staged = peak_of(program, schedule)
    nbytes: Counter[Instr] = Counter()
    for maker, size in alive:
        nbytes[maker] += size
    instrs = [*schedule.head, *schedule.fused]
    names = _names_of(instr.origin.line for instr in instrs)
    found: dict[Instr | str, ProfiledCall] = {}
    for instr, phase in phases(instrs).items():
        place = location_of(instr, phase, names)
        found[instr] = ProfiledCall(*place, times.get(instr, 0.0), nbytes[instr])
    for kind in [of for of in times if isinstance(of, str)]:
        of_state = kind == _STATE
        what, where = (kind, kind) if kind == _UNKNOWN else (f"copy {kind}", COPIES)
        phase = "update" if of_state else "forward"
        found[kind] = ProfiledCall(what, where, where, "", phase, times[kind], staged if of_state else 0)
    return found


def location_of(
    instr: Instr, phase: Phase, names: Mapping[Location, str] = MappingProxyType({})
) -> tuple[str, str, str, str, Phase]:
    """Return what a :class:`LocatedCall` says of a call.

    Args:
      instr: The call.
      phase: Its phase.
      names: Names of lines; of one that is not there, that of its file and its number.
    """
    line, module = instr.origin.line, instr.origin.module
    if not module and instr.inner and phase == "update":
        module = _OPTIMIZER
    if line is None:
        return instr.name, module or _UNKNOWN, _UNKNOWN, "", phase
    source = linecache.getline(line.filename, line.line).strip()
    return instr.name, module or f"{line.function}()", names.get(line, str(line)), source, phase


def _names_of(lines: Iterable[Location | None]) -> dict[Location, str]:
    """Return a name for each line; files of one name in different folders are told apart by the folder."""
    known = {line for line in lines if line is not None}
    files = Counter(str(line) for line in {(one.filename, one.line): one for one in known}.values())
    folders = {line: os.path.basename(os.path.dirname(line.filename)) for line in known}
    return {line: f"{folders[line]}/{line}" if files[str(line)] > 1 else str(line) for line in known}


def _resident(program: Program) -> dict[str, int]:
    """Return bytes by part of the state, and those of inputs and constants."""
    sizes = memory_analysis(program).sizes
    fields = {name: nbytes for name, nbytes in sizes.items() if "." in name}
    state = fields if sum(fields.values()) == sizes["state"] else {"state": sizes["state"]}
    others = ((name, sizes[name]) for name in ("inputs", "constants"))
    return {name: nbytes for name, nbytes in (*state.items(), *others) if nbytes}
