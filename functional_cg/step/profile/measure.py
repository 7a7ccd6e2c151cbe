"""Profile a call: run it on copies of its values, and give each of its calls a name, a time and its bytes."""

from __future__ import annotations

import linecache
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from ...call.signature import Call
from ...messages.source import Location
from ...shards.peers import among, together
from ...stages.lower.in_place import InPlacePlan
from ...stages.plan import lower_aten
from ...stages.program import Instr, Program
from ...stages.schedule import Schedule
from ...stages.sub_programs import unrolled
from ...stages.work import bytes_of
from ..costs import COPIES
from ..lowered import Lowered
from ..memory import Peak, memory_analysis
from .kernels import Kernel, kernels
from .phases import phases
from .result import Profile
from .rows import ProfiledCall, ProfiledKernel
from .timing import times_of, times_of_lines

__all__ = ["profile_of"]

_OPTIMIZER = "(optimizer)"
_UNKNOWN = "(unknown)"
_INPUTS, _STATE = "inputs", "new state"
_FIXED = ("state", "inputs", "constants")


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
    copy_in = partial(staging.copy_in, call.live)
    unchecked, where = lowered.reference.unchecked.slots, (device, call.function)
    compiled = lowered.plan
    with among(mesh, call.function):
        if isinstance(compiled, InPlacePlan) and os.environ.get("FCG_PROFILE_KERNELS") == "1":
            named = compiled.named_calls()
            a_call, inputs, lines, parts = times_of_lines(compiled, buffers, unchecked, copy_in, where)
            found = [(one, _calls_of(one, named)) for one in kernels(lines, parts)]
            schedule, times = compiled.schedule, _shared(found)
            times[_INPUTS] = inputs
        else:
            plan, found = lower_aten(program, timed=True), []
            a_call, seconds = times_of(lowered.plan, plan, buffers, unchecked, copy_in, where)
            schedule, times = plan.schedule, defaultdict[Instr | str, float](float)
            for of, took in zip([_INPUTS, *plan.ticks], seconds, strict=True):
                times[of] += took
    calls = _profiled(program, schedule, times)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    launched = tuple(
        ProfiledKernel(one.name, one.seconds, tuple(calls[of] for of in computed if of in calls))
        for one, computed in found
    )
    return Profile(
        call.function,
        name,
        lowered.plan.compiled,
        a_call,
        tuple(calls.values()),
        _resident(program),
        launched,
    )


def _calls_of(kernel: Kernel, named: Mapping[str, Instr]) -> tuple[Instr | str, ...]:
    """Return the calls that a kernel computes; views cost nothing, unless there is nothing else."""
    calls = dict.fromkeys(named[node] for node in kernel.nodes if node in named)
    return tuple([one for one in calls if not one.is_view] or calls) or (_UNKNOWN,)


def _shared(found: Sequence[tuple[Kernel, tuple[Instr | str, ...]]]) -> dict[Instr | str, float]:
    """Share the seconds of kernels among the calls that they compute, by the bytes of each."""
    times: dict[Instr | str, float] = defaultdict(float)
    for kernel, computed in found:
        weights = [1 if isinstance(one, str) else 1 + bytes_of(one, {*one.outputs()}) for one in computed]
        for one, weight in zip(computed, weights, strict=True):
            times[one] += kernel.seconds * weight / sum(weights)
    return times


def _profiled(
    program: Program, schedule: Schedule, times: Mapping[Instr | str, float]
) -> dict[Instr | str, ProfiledCall]:
    """Return the calls with their times; the copies of one kind are one, and calls that need no time are there."""
    peak = Peak.of(program, schedule)
    nbytes: Counter[Instr] = Counter()
    for maker, size in peak.alive:
        nbytes[maker] += size
    instrs = [*schedule.head, *schedule.fused]
    phase_of = phases(instrs)
    names = _names_of(instr.origin.line for instr in instrs)
    found: dict[Instr | str, ProfiledCall] = {}
    for instr in instrs:
        line, phase = instr.origin.line, phase_of[instr]
        module = instr.origin.module
        if not module and instr.inner and phase == "update":
            module = _OPTIMIZER
        source = "" if line is None else linecache.getline(line.filename, line.line).strip()
        found[instr] = ProfiledCall(
            instr.name,
            module or (f"{line.function}()" if line is not None else _UNKNOWN),
            names[line] if line is not None else _UNKNOWN,
            source,
            phase,
            times.get(instr, 0.0),
            nbytes[instr],
        )
    for kind in [of for of in times if isinstance(of, str)]:
        phase = "update" if kind == _STATE else "forward"
        where = _UNKNOWN if kind == _UNKNOWN else COPIES
        staged = peak.staged if kind == _STATE else 0
        what = kind if kind == _UNKNOWN else f"copy {kind}"
        found[kind] = ProfiledCall(what, where, where, "", phase, times[kind], staged)
    return found


def _names_of(lines: Iterable[Location | None]) -> dict[Location, str]:
    """Return a name for each line; files of one name in different folders are told apart by the folder."""
    known = {line for line in lines if line is not None}
    files = Counter(str(line) for line in {(one.filename, one.line): one for one in known}.values())

    def name(line: Location) -> str:
        folder = os.path.basename(os.path.dirname(line.filename))
        return str(line) if files[str(line)] == 1 else f"{folder}/{line}"

    return {line: name(line) for line in known}


def _resident(program: Program) -> dict[str, int]:
    """Return bytes by part of the state, and those of inputs and constants."""
    sizes = memory_analysis(program).sizes
    roles = {name: nbytes for name, nbytes in sizes.items() if "." in name}
    fixed = {name: sizes[name] for name in _FIXED}
    if sum(roles.values()) == fixed["state"]:
        fixed = {**roles, **{name: fixed[name] for name in _FIXED[1:]}}
    return {name: nbytes for name, nbytes in fixed.items() if nbytes}
