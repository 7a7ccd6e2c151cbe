"""Writes a profile as JSON and reads it again, so that a notebook on a CPU shows what was profiled on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from functional_cg.step.profile.result import Profile, ProfiledCall, ProfiledKernel

__all__ = ["packed", "unpacked"]


def packed(profile: Profile) -> dict[str, Any]:
    """Return a profile as lists and dicts, without what stands on the lines; each word stands once, in ``words``."""
    words: dict[str, int] = {}
    calls = [
        [
            *(words.setdefault(word, len(words)) for word in (call.op, call.module, call.line, call.phase)),
            call.seconds,
            call.nbytes,
        ]
        for call in profile.calls
    ]
    places = {id(call): place for place, call in enumerate(profile.calls)}
    return {
        "function": profile.function,
        "device": profile.device,
        "compiled": profile.compiled,
        "call_s": profile.call_s,
        "resident": dict(profile.resident),
        "words": list(words),
        "calls": calls,
        "kernels": [[k.name, k.seconds, [places[id(call)] for call in k.calls]] for k in profile.kernels],
    }


def unpacked(record: Mapping[str, Any]) -> Profile:
    """Return the profile that :func:`packed` was given; further entries of the record are ignored."""
    words = record["words"]
    calls = tuple(
        ProfiledCall(words[op], words[module], words[line], "", words[phase], seconds, nbytes)
        for op, module, line, phase, seconds, nbytes in record["calls"]
    )
    kernels = (
        ProfiledKernel(name, seconds, tuple(calls[place] for place in of))
        for name, seconds, of in record["kernels"]
    )
    return Profile(
        record["function"],
        record["device"],
        record["compiled"],
        record["call_s"],
        calls,
        record["resident"],
        tuple(kernels),
    )
