"""What ranks make sure of before a capture: that they are about to do the same, or what fits together.

A step must keep replicated leaves equal on all ranks, and the shards of a leaf consistent. The program is followed to
find the mesh axes over which each value may differ: inputs differ over all axes, a shard over its own axis; a reduction
or a gather over an axis makes the result equal along it. A 0-d input, such as a learning rate or a flag, is assumed to
be equal everywhere.

Shards are expected to differ, as parts of one leaf. But shards computed from different data on each rank are not parts
of one leaf: gathering them gives the same patchwork everywhere. Only a reduction turns the ranks' data into one value.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product, zip_longest
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..concurrency.garbage import no_garbage_collection
from ..errors import RankError
from ..shards.collectives import ALL_REDUCE, is_collective, result_of
from ..shards.groups import Captures, Groups
from ..shards.mesh import Axis, Mesh
from ..shards.transfers import RECEIVE, SEND
from ..stages.program import Instr, Program, Var, numbers_in
from ..stages.schedule import live_instrs
from ..stages.sub_programs import SubProgram, each_once
from ..state.arena import BufferSpec
from ..tensors.op_table import row_of
from .report import grouped

__all__ = ["groups_of", "meet"]

_ODD = 6364136223846793005  # spreads the position of a byte over 64 bits

Axes = Mapping[str, str]  # axes over which a value may differ -> source of the difference


def groups_of(program: Program, mesh: Mesh | None) -> Groups:
    """Return the groups that a program communicates over on a GPU; none on a CPU, whose calls are run each time."""
    if mesh is None or mesh.device.type == "cpu":
        return Groups((), Captures() if mesh is None else mesh.captures)
    calls = filter(_meets, each_once(program.instrs))
    return Groups({instr.args[-1] for instr in calls}, mesh.captures)


def _meets(instr: Instr) -> bool:
    return instr.op in (SEND, RECEIVE) or is_collective(instr.op)


@no_garbage_collection()
def meet(
    mesh: Mesh,
    traced: Program,
    lowered: Program,
    specs: Sequence[BufferSpec],
    names: Sequence[str],
    *,
    on_lanes: bool,
) -> None:
    """Wait until all ranks of a mesh are about to capture the same step; else a collective would hang.

    Args:
      mesh: The ranks.
      traced: The step, as traced: what passes make of it may depend on the rank.
      lowered: The same, as it will run: each group's sums then have one order on all of its ranks.
      specs: Specs of its slots.
      names: Names of its inputs.
      on_lanes: Whether it will run on lanes, and so once more before the capture.
    Raises:
      RankError: On all ranks, naming those that are missing or differ, or leaves that would diverge.
    """
    function = traced.function
    leaves = zip((*traced.slot_names, *names), (*traced.slots, *traced.inputs), strict=True)
    ops = " ".join(str(instr.op) for instr in (*traced.instrs, *each_once(traced.instrs)))
    lines = [
        f"capture `{function}`",
        *(f"{name}  {_spec(var)}" for name, var in leaves),
        f"{len(traced.instrs)} ATen calls, {hashlib.blake2b(ops.encode(), digest_size=8).hexdigest()}",
        "on lanes" if on_lanes else "in one line",
        *_collectives(lowered, mesh),
    ]
    mesh.ranks.agree(function, "\n".join(lines))
    if mesh.stages is not None:
        _refuse_unmet(traced, lowered, mesh, mesh.stages)
    numbers = mesh.ranks.beside(_said(mesh, function, lines[0], told_apart(traced)))
    if mesh.wide:  # else no two ranks hold the same leaf whole, or shards of one
        _refuse_divergence(traced, specs, names, mesh, _apart(numbers, mesh))


def _said(mesh: Mesh, function: str, title: str, mine: Any) -> list[Any]:
    """Return what each rank says under a title, which tells what it is about to do."""
    texts = mesh.ranks.shared(function, f"{title}\n{json.dumps(mine)}")
    return [json.loads(text.partition("\n")[2]) for text in texts]


def _spec(var: Var) -> str:
    """Return dtype and shape of a variable: its device differs between ranks."""
    return str(var.spec).partition("@")[0]


def _collectives(program: Program, mesh: Mesh) -> Iterator[str]:
    """Yield the collectives of a program in their order, as text that is equal on all ranks that take part."""
    axes = {axis.group: axis.name for axis in mesh.axes}
    calls = (instr for instr in program.instrs if is_collective(instr.op))
    for number, instr in enumerate(calls, 1):
        what = ", ".join(map(_spec, instr.inputs()))
        yield f"collective {number}  {instr.name} of {what} over {axes.get(instr.args[-1], 'stages')}"


# -- the stages of a pipeline: what each sends to another one, that one receives -------------------------------------


def _refuse_unmet(program: Program, lowered: Program, mesh: Mesh, stages: Axis) -> None:
    """Raise on all ranks unless what is sent is received, in one order, and schedules are the same."""
    function, notes = program.function, "; ".join(program.notes) or "no pipeline"
    title = f"agree on what the stages of `{function}` send"
    mine = {f"sums of {stages.group}": ("adds", []), **_between_stages(program, lowered, mesh)}
    said = _said(mesh, function, title, [notes, mine])
    other = next((rank for rank, (one, _) in enumerate(said) if one != said[0][0]), 0)
    rows = [f"rank {rank}  {said[rank][0]}" for rank in (0, other)] if other else []
    ends = [(group, (rank, *end)) for rank, (_, groups) in enumerate(said) for group, end in groups.items()]
    for _, of_group in sorted(grouped(ends, itemgetter(0)).items()):
        rows += _unlike([end for _, end in of_group])
    if rows:
        raise RankError.of(
            function,
            "stages of a pipeline do not fit together; the state is unchanged.",
            rows=rows,
            why="What one rank sends, another one waits for, in one order.",
            fix="run one program on all ranks: one schedule, one loss, batches of one layout.",
        )


def _between_stages(program: Program, lowered: Program, mesh: Mesh) -> dict[str, tuple[str, list[str]]]:
    """Return what this rank does in each group of ranks that hold other stages, and of what, in order."""
    sent = [
        (instr.args[-1], *(("sends", instr.args[0]) if instr.op is SEND else ("receives", instr.out[0])))
        for instr in program.instrs
        if instr.op in (SEND, RECEIVE)
    ]
    added = [
        (f"sums of {instr.args[-1]}", "adds", f"{instr.args[1]} of {_spec(instr.args[0])}")
        for instr in live_instrs(lowered)
        if _is_between_stages(instr, mesh)
    ]
    ends = grouped([*((group, does, _spec(var)) for group, does, var in sent), *added], itemgetter(0))
    return {group: (some[0][1], [what for *_, what in some]) for group, some in ends.items()}


def _is_between_stages(instr: Instr, mesh: Mesh) -> bool:
    """Whether a call is a collective over ranks that hold other stages."""
    return instr.op is ALL_REDUCE and instr.args[-1] not in {axis.group for axis in mesh.axes}


def _unlike(ends: Sequence[tuple[Any, str, list[str]]]) -> Iterator[str]:
    """Yield the first difference between what ranks do in a group: the two of a transfer, or all that add up.

    Args:
      ends: The ranks, what they do, and of what, in order.
    """
    does = ends[0][1]
    name = "sum {} over stages" if does == "adds" else "transfer {}"
    if does != "adds" and len(ends) == 1:
        ends = [*ends, ("another", "receives" if does == "sends" else "sends", [])]
    (first, does, known), *others = sorted(ends, key=lambda end: end[1], reverse=True)  # who sends, first
    for rank, its, what in others:
        if what != known:
            pairs = enumerate(zip_longest(known, what, fillvalue="nothing"))
            number, (one, other) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
            yield f"{name.format(number)}  rank {first} {does} {one}   rank {rank} {its} {other}"


# -- replicas: which new leaves would differ between ranks -----------------------------------------------------------


def told_apart(program: Program) -> list[str]:
    """Return what ranks compare of a program: a hash of each constant, then of the numbers in each call.

    Those in a sub-program have one hash, however many calls it stands for: ranks read all of this from each other.
    """
    return [*(_digest_of(one.value) for one in program.constants), *map(_word_of, program.instrs)]


def _apart(said: Sequence[Sequence[str]], mesh: Mesh) -> dict[int, tuple[str, ...]]:
    """Return the positions at which ranks differ, each with the axes along which neighbouring ranks do.

    Args:
      said: The result of :func:`told_apart` on each rank.
      mesh: The ranks.
    """
    sizes = [axis.size for axis in mesh.axes]
    found: dict[int, tuple[str, ...]] = {}
    for position, words in enumerate(zip(*said, strict=True)):
        if len(set(words)) > 1:
            laid_out = {place: words[rank] for rank, place in enumerate(product(*map(range, sizes)))}
            found[position] = tuple(
                axis.name
                for number, axis in enumerate(mesh.axes)
                if any(
                    word != laid_out[(*place[:number], 0, *place[number + 1 :])]
                    for place, word in laid_out.items()
                )
            )
    return found


def _refuse_divergence(
    program: Program,
    specs: Sequence[BufferSpec],
    names: Sequence[str],
    mesh: Mesh,
    others: Mapping[int, Sequence[str]],
) -> None:
    """Raise if a new leaf would differ between ranks that hold it whole, or its shards would not fit.

    Args:
      program: The program of a step, as traced; its first slots are those of the new state.
      specs: Specs of the slots.
      names: Names of the inputs.
      mesh: The ranks.
      others: The result of :func:`_apart`.
    Raises:
      RankError: Naming each such leaf, and what it is computed from.
    """
    differs, own_data = _on_all_stages(program, specs, names, mesh, others)
    rows, patchworks = [], []
    leaves = zip(program.slot_names, specs, program.slots, program.new_state, strict=False)
    for name, spec, old, new in leaves:
        if old is not new and 0 not in spec.shape:  # without elements, as on a stage that does not hold it
            cut = _cut(spec)
            known, data = differs(new), own_data(new)
            found = {axis: source for axis, source in known.items() if axis not in cut}
            if found:
                rows.append(f"{name}  differs over {', '.join(found)}, by {next(iter(found.values()))}")
            elif data and not (spec.placement is not None and spec.placement.stacked):
                patchworks.append(
                    f"{name}  each shard over {', '.join(data)} by its own {next(iter(data.values()))}"
                )
    if rows:
        raise RankError.of(
            program.function,
            f"gives {_leaves(rows)} that all ranks hold whole another value on each; the state is unchanged.",
            rows=rows,
            why="Nobody would notice: each rank goes on with its own, and a checkpoint has that of the first.",
            fix="`sharding.mean(value)` of it, as for gradients, before it goes into the new state; of running "
            "statistics, `fcg.tree.map(lambda b: sharding.mean(b) if b.is_floating_point() else b, buffers)`.",
        )
    if patchworks:
        raise RankError.of(
            program.function,
            f"computes the shards of {_leaves(patchworks)} with other data on each rank; the state is unchanged.",
            rows=patchworks,
            why="They would be parts of different leaves: one scaled or chosen by this batch, another one by that.",
            fix="`sharding.mean(value)` or `sharding.sum(value)` of what comes from the data, before it meets a shard.",
        )


def _leaves(rows: Sequence[str]) -> str:
    return "a leaf" if len(rows) == 1 else f"{len(rows)} leaves"


def _cut(spec: BufferSpec) -> tuple[str, ...]:
    """Return the axis along which a leaf is sharded; empty if it is not."""
    placement = spec.placement
    return (placement.mesh.shards.name,) if placement is not None and placement.sharded else ()


def _on_all_stages(
    program: Program,
    specs: Sequence[BufferSpec],
    names: Sequence[str],
    mesh: Mesh,
    others: Mapping[int, Sequence[str]],
) -> list[Callable[[Var], Axes]]:
    """Follow the program with and without shards, given what the other stages of a pipeline bring to their sums."""
    known: dict[str, Axes] = {}
    while True:
        brought: dict[str, Axes] = {}
        found = [
            _followed(program, specs, names, mesh, given, known, brought, of_data=of_data)
            for given, of_data in ((others, False), ({}, True))
        ]
        if mesh.stages is None or mesh.ranks is None:
            return found
        title, joined = f"follow what the stages of `{program.function}` add up", dict[str, dict[str, str]]()
        for one in _said(mesh, program.function, title, brought):
            for place, axes in one.items():
                joined.setdefault(place, {}).update(axes)
        if {place: set(axes) for place, axes in joined.items()} == {
            p: set(axes) for p, axes in known.items()
        }:
            return found
        known = {**joined}


def _followed(
    program: Program,
    specs: Sequence[BufferSpec],
    names: Sequence[str],
    mesh: Mesh,
    others: Mapping[int, Sequence[str]],
    known: Mapping[str, Axes],
    brought: dict[str, Axes],
    *,
    of_data: bool = False,
) -> Callable[[Var], Axes]:
    """Return a function that maps a variable to the axes over which it may differ at the end of the program.

    Args:
      known: What is known of the sums over stages, by group, number in it, and ``of_data``.
      brought: What this rank brings to them; filled in.
      of_data: Follow only what is computed from inputs and not reduced since, whether sharded or whole.
    """
    counts: Counter[str] = Counter()
    axes = {axis.group: axis.name for axis in mesh.wide}
    everywhere = tuple(axes.values())
    differs = _Differences()
    for slot, spec, name in zip(program.slots, specs, program.slot_names, strict=True):
        differs.add(slot, {axis: name for axis in _cut(spec) if axis in everywhere and not of_data})
    for var, name in zip(program.inputs, names, strict=True):
        differs.add(var, dict.fromkeys(everywhere if var.spec.shape else (), name))
    for number, constant in enumerate(program.constants):
        differs.add(constant.var, dict.fromkeys(others.get(number, ()), constant.name))

    def follow(instr: Instr, differs: _Differences, told: Axes) -> None:
        if isinstance(instr.op, SubProgram):
            given, inside = instr.args[0], _Differences()
            for mine, var in zip(instr.op.given, given, strict=True):
                inside.note([mine], [mine.storage], differs.of(var))
            meets = instr.op.known("meets", lambda one: any(map(_meets, one.calls)))
            for one in instr.op.calls if meets or any(map(differs.of, given)) else ():
                follow(one, inside, {})
            for mine, var in zip(instr.op.results, instr.out, strict=True):
                differs.note([var], {one.storage for one in given}, {**inside.of(mine), **told})
            return
        found = {**told}
        for var in () if row_of(instr.op).fresh else reversed(instr.inputs()):
            found |= differs.of(var)
        if _is_between_stages(instr, mesh):
            group = instr.args[-1]
            place = f"{group} {counts[group]} {of_data}"
            counts[group] += 1
            brought[place] = found
            found = {**found, **known.get(place, {})}
        elif instr.op is RECEIVE:
            found = dict.fromkeys(everywhere, "what another stage sends")
        elif (result := result_of(instr.op)) == "equal" or result == ("own" if of_data else "gathered"):
            found.pop(axes.get(instr.args[-1], ""), None)
        elif result == "own":
            found.setdefault(axes.get(instr.args[-1], "ranks"), "the rank's own part of a sum")
        looked_at = {var.storage for var in instr.inputs()} - {var.storage for var in instr.writes}
        differs.note((*instr.outputs(), *instr.writes), looked_at, found)

    for number, instr in enumerate(program.instrs, len(program.constants)):
        follow(instr, differs, dict.fromkeys(others.get(number, ()), f"a number of Python in {instr.op}"))
    return differs.of


class _Differences:
    """The axes over which each value may differ, with the sources."""

    def __init__(self) -> None:
        self._storages: dict[int, dict[str, str]] = {}
        # Views in which each rank picks its own part of a storage that is equal on all.
        self._views: dict[Var, Axes] = {}

    def of(self, var: Var) -> Axes:
        return {**self._storages.get(var.storage, {}), **self._views.get(var, {})}

    def add(self, var: Var, found: Axes) -> None:
        known = self._storages.get(var.storage, {})
        self._storages[var.storage] = {**known, **found, **known}

    def note(self, made: Iterable[Var], looked_at: Collection[int], found: Axes) -> None:
        """Note what a call makes of some storages: a view differs by itself."""
        for var in made:
            if var.storage in looked_at:
                self._views[var] = found
            else:
                self.add(var, found)


def _word_of(instr: Instr) -> str:
    if isinstance(instr.op, SubProgram):
        word: str = instr.op.known("numbers", lambda one: _word(" ".join(map(_word_of, one.calls))))
        return word
    return _word(repr(list(numbers_in([instr.args, *instr.kwargs.values()]))))


def _word(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _digest_of(value: Tensor) -> str:
    """Return a hash of the bits of a tensor that depends on the position of each byte."""
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
    place = torch.arange(1, data.numel() + 1, device=data.device) * _ODD
    return _word(f"{value.dtype} {list(value.shape)} {int((data * place).sum())}")
