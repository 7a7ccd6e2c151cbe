"""Which stored value each leaf gets: the one of its name, or of a part of the names, under another name if need be."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LayoutError
from ..shards.tensor import Sharded
from ..state.arena import BufferSpec, unplaceable
from ..state.leaf import Leaf
from ..tensors.overlap import storage_key

__all__ = ["Part", "check_range", "matched", "memory_of", "type_of"]

Part = str | Sequence[str] | Mapping[str, str | None] | None
_Routes = Sequence[tuple[str, str | None]]
# Of the floating dtypes, those that have a sign and a zero.
_FLOATING = re.compile(r"(?!f8_e8m0|f4)b?f\d\w*(\[.*\])")


def matched(
    slots: Mapping[str, Any],
    types: Mapping[str, str],
    function: str,
    where: str,
    part: Part,
    *,
    cast: bool,
    optional: Collection[str] = (),
) -> dict[str, str]:
    """Return the name of the stored value for each leaf that is asked for.

    Args:
      slots: The leaves, by name; one tensor under several names needs a value for one of them.
      types: Shape and dtype of each stored value, by name.
      function: For the error.
      where: For the error, too: in which file.
      part: As :func:`functional_cg.load` takes it.
      cast: Whether a floating value may have another floating dtype.
      optional: Leaves that need no value.
    Raises:
      LayoutError: If a leaf has no value, a value of the part no leaf, shape or dtype differ, or a name in ``part`` is
        that of nothing; with one row for each.
      TypeError: If ``part`` is not a part.
    """
    wanted = {name: (type_of(slot), memory_of(slot)) for name, slot in slots.items()}
    found, rows = _compared(wanted, types, _routes(part, slots, function), optional, cast=cast)
    if not rows:
        return found
    fields = dict.fromkeys(name.partition(".")[0] for name in ["params.", *slots, *types] if "." in name)
    parts: list[Part] = [part]
    if not isinstance(part, Mapping):
        parts += [*({field: ""} for field in fields), ["params", "buffers"], *fields]
    fixes = (
        ", ".join([f"part={json.dumps(one)}"] * (one != part) + ["cast=True"] * (casts != cast))
        for casts in (cast, True)
        for one in parts
        if not _compared(wanted, types, _routes(one, slots, function), optional, cast=casts)[1]
    )
    fix = next(fixes, "")
    raise LayoutError.of(
        "",
        f"{function}: the values{where} do not fit `state`, which is unchanged.",
        rows=rows,
        why="The memory of each name has a fixed shape and dtype.",
        fix=f"`{fix}` fits them."
        if fix
        else "create the state as it was when the values were saved (model, optimizer, fields); or load a part of it, "
        '`part="params"`, or under other names, `part={"params": "ema", "params.head": None}`; nothing is broadcast, '
        "and floating values are cast by `cast=True` only.",
    )


def memory_of(slot: Any) -> tuple[Any, ...]:
    """Return what identifies the memory of a leaf: two tensors of the same elements, in the same order, are tied."""
    if type(slot) in (Tensor, nn.Parameter) and slot.layout is torch.strided and slot.numel():
        return storage_key(slot), slot.storage_offset(), slot.dtype, slot.shape, slot.stride()
    return (id(slot),)


def type_of(value: Any) -> str:
    """Return dtype and shape as text, without the device, which may differ."""
    problem = "" if isinstance(value, Leaf | Sharded) else unplaceable(value)
    return problem or str(BufferSpec.of(value)).partition("@")[0]


def _compared(
    wanted: Mapping[str, tuple[str, tuple[Any, ...]]],
    types: Mapping[str, str],
    routes: _Routes,
    optional: Collection[str],
    *,
    cast: bool,
) -> tuple[dict[str, str], list[str]]:
    """Return the name of the stored value for each leaf, and a row for each difference."""
    back = [(source, to) for to, source in routes if source is not None]
    found: dict[str, str] = {}
    misfits, missing = [], {}
    for name, (kind, _) in wanted.items():
        sources = _ends(name, routes)
        there = [source for source in sources if source is not None and source in types]
        row = f"{name}  expected {kind}{f' from {sources[0]!r}' if sources not in ([], [name]) else ''}   got"
        if there:
            found[name] = there[0]
            shapes = [match and match[1] for match in map(_FLOATING.fullmatch, (kind, types[there[0]]))]
            if kind != types[there[0]] and not (cast and all(shapes) and shapes[0] == shapes[1]):
                misfits.append(f"{row} {types[there[0]]}")
            misfits += [f"{row} {source!r}, too" for source in there[1:]]
            ends = _ends(there[0], back)
            if name not in ends:  # a longer route takes the value away, and another leaf would get it, too
                misfits.append(f"{row} what `part` gives to {ends[0]!r}")
        elif sources and None not in sources and name not in optional:
            missing[name] = f"{row} nothing"
    tied, taken = {wanted[name][1] for name in found}, set(found.values())
    lost = [row for name, row in missing.items() if wanted[name][1] not in tied]
    all_ends = {name: _ends(name, back) for name in types}
    left = [
        f"{name}  expected nothing   got {types[name]}"
        for name in types
        if name not in taken and any(name in _ends(str(end), routes) for end in all_ends[name])
    ]
    known = {*wanted, *chain(*all_ends.values())}
    empty = [
        f"part {to!r}  expected leaves   got none"
        for to, source in routes
        if to and not _below(known if source is None else wanted, to)
    ]
    empty += [
        f"part {source!r}  expected values   got none"
        for source, _ in back
        if source and not _below(types, source)
    ]
    return found, empty + misfits + [row for row in chain(*zip_longest(lost, left)) if row]


def _routes(part: Part, slots: Collection[str], function: str) -> _Routes:
    """Return pairs: how names of leaves begin, and how those of their values begin instead; None for no value."""
    if part is None:
        return [("", "")]
    names = [part] if isinstance(part, str) else part
    routes: list[tuple[str, str | None]] = []
    if isinstance(names, Mapping):
        routes = list(names.items())
    elif isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        routes = [(name if _below(slots, name) else "", name) for name in names]
    if all(
        source is None for _, source in routes
    ):  # there may be none: it would load nothing, without a word
        raise TypeError(
            f"{function}: part must be names, got {part!r}.\n"
            'To fix: `part="params"`, `part=["params", "buffers"]`, or `part={"params": "ema", "params.head": None}`.'
        )
    return routes


def _ends(name: str, routes: _Routes) -> list[str | None]:
    """Return what a name is called on the other side, by the routes of its longest beginning."""
    ways = [(start, end) for start, end in routes if _below([name], start)]
    most = max((len(start) for start, _ in ways), default=0)
    rest = name[most + 1 :] if most else name
    return [
        None if end is None else ".".join(filter(None, (end, rest)))
        for start, end in ways
        if len(start) == most
    ]


def _below(names: Collection[Any], start: str) -> bool:
    """Whether one of the names is a part, or in it."""
    return any(not start or name == start or str(name).startswith(f"{start}.") for name in names)


def check_range(slots: Mapping[str, Tensor], values: Mapping[str, Tensor], function: str) -> None:
    """Refuse values that would saturate in the dtype of their leaves; of sharded ones, those of this rank's shards.

    Raises:
      LayoutError: Naming them.
    """
    beyond = [
        f"{name}  expected numbers up to {torch.finfo(slots[name].dtype).max:.3g}   got {_largest(value):.3g}"
        for name, value in values.items()
        if value.dtype != slots[name].dtype and _largest(value) > torch.finfo(slots[name].dtype).max
    ]
    if beyond:
        raise LayoutError.of(
            "",
            f"{function}: values do not fit the dtype that they are cast to; `state` is unchanged.",
            rows=beyond,
            fix="load them as they are, into a state of their own dtype.",
        )


def _largest(value: Tensor) -> float:
    """Return the largest magnitude of a tensor's finite numbers."""
    here = value.local if isinstance(value, Sharded) else value
    numbers = here.float() if here.itemsize == 1 else here
    return float(numbers.abs().where(numbers.isfinite(), 0).max()) if numbers.numel() else 0.0
