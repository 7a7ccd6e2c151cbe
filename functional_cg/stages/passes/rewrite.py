"""Rewrite a traced program without changing a bit of its results.

``detach`` is dropped: below autograd it does nothing. Copies that nobody writes are dropped: a module gets copies of
all its buffers, and most modules only read them. So is a ``where`` between a tensor and itself, which a guard of the
whole state makes for each unchanged leaf.

A role becomes a vector: ``optim.flatten`` ravels parameters, updates one vector and returns views of it. Taken
literally, this costs one copy in and one copy out per leaf. Slots of a role lie in their slab exactly as ``ravel`` lays
them out, so both copies disappear: the vector *is* the slab. A guard that chooses between old and new leaves by one
condition then chooses between vectors. Leaves that are zero need not be copied into a fresh vector either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...shards.collectives import WAIT
from ...tensors.aten import returns_view
from ...tensors.op_table import row_of
from ..evaluate import AS_STRIDED
from ..program import Instr, Program, SlotRange, Var, map_vars, written_storages
from ..sub_programs import SubProgram, rename, rewrite_sub_programs
from .bounds import check_replacements
from .changes import Fresh, final

__all__ = ["clears", "range_tensor", "rewrite"]

_CLONE = torch.ops.aten.clone.default
_WHERE = torch.ops.aten.where.self
_RAVEL = torch.ops.fcg.ravel.default
_LAZY = frozenset({torch.ops.aten._conj.default, torch.ops.aten._neg_view.default})


def rewrite(program: Program, places: Sequence[tuple[int, int]]) -> None:
    """Rewrite a traced program in place, ready for lowering.

    Args:
      program: The program; its ``places``, ``updates`` and ``ranges`` are filled in.
      places: Slab and offset of each slot.
    """
    program.places = list(places)
    renamed = rewrite_sub_programs(program, _rewritten)
    _drop_copies(program, renamed)
    _alias_roles(program, renamed)
    program.outputs = map_vars(partial(final, renamed), program.outputs)
    program.reports = [
        replace(report, values=map_vars(partial(final, renamed), report.values)) for report in program.reports
    ]
    program.new_state = [final(renamed, var) for var in program.new_state]
    program.updates = [
        (old, new) for old, new in zip(program.slots, program.new_state, strict=False) if old is not new
    ]
    _share_storages(program)
    for known in program.ranges:
        _merge_updates(program, known)
    check_replacements(program)


def _rewritten(part: Program) -> None:
    """Rewrite the calls of a sub-program; what it gets or returns, others may write: a copy of it stays."""
    renamed: dict[Var, Var] = {}
    _drop_copies(part, renamed, {var.storage for var in (*part.inputs, *part.results)})
    _alias_roles(part, renamed)
    part.outputs = [final(renamed, var) for var in part.outputs]


def _drop_copies(program: Program, renamed: dict[Var, Var], known: Iterable[int] = ()) -> None:
    """Drop what autograd detaches, and copies if neither copy nor source is written, or known.

    A clone is dropped only if it does not leave the step.
    """
    written = written_storages(program.instrs).union(known)
    # A copy resolves a lazy conjugate or negative view, for kernels that cannot read such a view.
    kept_sources = written | {
        var.storage for instr in program.instrs if _may_be_lazy(instr) for var in instr.outputs()
    }
    kept_copies = kept_sources | {
        final(renamed, var).storage for var in (*program.results, *program.new_state)
    }
    original: dict[int, int] = {}
    kept = []
    for instr in program.instrs:
        instr = rename(instr, renamed)
        for var in instr.outputs():  # views of a dropped copy
            var.storage = original.get(var.storage, var.storage)
        source, kept_as = _copied(instr), kept_copies if instr.op is _CLONE else kept_sources
        if row_of(instr.op).copies and returns_view(instr.op):
            renamed[instr.out] = instr.args[0]
        elif source is not None and _is_superfluous(source, instr.out, kept_sources, kept_as):
            original[instr.out.storage] = source.storage
            renamed[instr.out] = source
        else:
            kept.append(instr)
    program.instrs = kept


def _may_be_lazy(instr: Instr) -> bool:
    if isinstance(instr.op, SubProgram):
        return bool(instr.op.known("lazy", lambda one: any(map(_may_be_lazy, one.calls))))
    return instr.op in _LAZY


def _copied(instr: Instr) -> Var | None:
    """Return the variable that a call copies, if copying is all it does."""
    if instr.op is _CLONE:
        return instr.args[0]  # type: ignore[no-any-return]
    if instr.op is _WHERE and instr.args[1] is instr.args[2]:
        return instr.args[1]  # type: ignore[no-any-return]
    return None


def _is_superfluous(source: Var, copy: Var, kept_sources: set[int], kept_copies: set[int]) -> bool:
    """Whether a copy can be replaced by its source; offsets must match, since views of the copy become its views."""
    return (
        source.spec == copy.spec
        and source.offset == copy.offset
        and source.storage not in kept_sources
        and copy.storage not in kept_copies
    )


def _alias_roles(program: Program, renamed: dict[Var, Var]) -> None:
    """Replace each ravel of a whole role by a variable for its range of slots."""
    written = written_storages(program.instrs)
    zeros = {
        instr.out
        for instr in program.instrs
        if row_of(instr.op).zeros and isinstance(instr.out, Var) and instr.out.storage not in written
    }
    place_of = dict(zip(program.slots, program.places, strict=True))
    kept = []
    for instr in program.instrs:
        instr = rename(instr, renamed)
        if instr.op is not _RAVEL:
            kept.append(instr)
            continue
        leaves, offsets, length = instr.args
        if _is_role(leaves, offsets, length, place_of) and instr.out.storage not in written:
            known = next(
                (r for r in program.ranges if r.leaves == tuple(leaves) and r.length == length), None
            )
            if known is None:
                program.ranges.append(SlotRange(instr.out, tuple(leaves), tuple(offsets), length))
            else:
                renamed[instr.out] = known.var
        else:
            kept.append(replace(instr, args=(*_without_zeros(leaves, offsets, zeros), length)))
    program.instrs = kept


def _is_role(
    leaves: Sequence[Var], offsets: Sequence[int], length: int, place_of: dict[Var, tuple[int, int]]
) -> bool:
    """Whether leaves are slots of one slab, laid out there as in the vector, with no other slot in between."""
    places = [place_of.get(leaf) for leaf in leaves]
    if None in places or len(set(leaves)) < len(leaves):
        return False
    slab, base = places[0][0], places[0][1] - offsets[0]  # type: ignore[index]
    members = set(leaves)  # another small slot may lie in the vector's padding
    alone = not any(
        other == slab and base <= at < base + length and slot.spec.numel and slot not in members
        for slot, (other, at) in place_of.items()
    )
    together = all(place == (slab, base + at) for place, at in zip(places, offsets, strict=True))
    return base >= 0 and alone and together


def _without_zeros(
    leaves: Sequence[Var], offsets: Sequence[int], zeros: set[Any]
) -> tuple[list[Var], list[int]]:
    pairs = [(leaf, at) for leaf, at in zip(leaves, offsets, strict=True) if leaf not in zeros]
    pairs = pairs or [(leaves[0], offsets[0])]  # the op takes its dtype and device from a leaf
    return [leaf for leaf, _ in pairs], [at for _, at in pairs]


def _share_storages(program: Program) -> None:
    """Give what shares memory one storage number: ranges of a slab, their slots and views; what is waited for."""
    slab_of = {slot: slab for slot, (slab, _) in zip(program.slots, program.places, strict=True)}
    of_slab: dict[int, int] = {}
    shared: dict[int, int] = {}
    for known in program.ranges:  # two ranges may partly overlap
        storage = of_slab.setdefault(slab_of[known.leaves[0]], known.var.storage)
        shared |= {var.storage: storage for var in (known.var, *known.leaves)}
    for instr in program.instrs:
        if instr.op is WAIT:  # it returns its argument, and a fake tensor of its own
            shared[instr.out.storage] = instr.args[0].storage
    if not shared:
        return
    ranges = (known.var for known in program.ranges)
    seen = [*program.slots, *ranges, *(var for instr in program.instrs for var in instr.outputs())]
    for var in dict.fromkeys(seen):
        var.storage = shared.get(var.storage, var.storage)


def _merge_updates(program: Program, known: SlotRange) -> None:
    """Replace the updates of a range's leaves by one update if the values are parts of a vector in its layout."""
    new_of = dict(program.updates)
    if not new_of.keys() >= set(known.leaves):
        return
    makers = {var: instr for instr in program.instrs for var in instr.outputs()}
    source = _as_vector(program, known, [new_of[leaf] for leaf in known.leaves], makers)
    if source is None:
        return
    members = set(known.leaves)
    program.updates = [(old, new) for old, new in program.updates if old not in members]
    program.updates.append((known.var, source))


def _as_vector(
    program: Program, known: SlotRange, parts: Sequence[Any], makers: Mapping[Var, Instr]
) -> Var | None:
    """Return a vector with these parts where the range has its leaves: an existing one, or a ``where`` of two."""
    if list(parts) == list(known.leaves):
        return known.var
    calls = [makers[part] for part in parts if part in makers]
    if len(calls) < len(parts) or any(call.op is not calls[0].op for call in calls):
        return None
    if calls[0].op is AS_STRIDED:
        return _common_base(known, calls)
    if calls[0].op is not _WHERE:
        return None
    condition = calls[0].args[0]
    if condition.spec.shape or any(call.args[0] is not condition for call in calls):
        return None
    yes, no = (_as_vector(program, known, [call.args[i] for call in calls], makers) for i in (1, 2))
    if yes is None or no is None or yes.spec != no.spec:
        return None
    # The vectors are selected at the end of the step: nobody may write the operands or results of the selection.
    written = written_storages(program.instrs)
    if not written.isdisjoint(var.storage for var in (condition, yes, no, *(call.out for call in calls))):
        return None
    out = Fresh(program).like(yes, offset=0)
    program.instrs.append(replace(calls[0], args=(condition, yes, no), out=out))
    return out


def _common_base(known: SlotRange, views: Sequence[Instr]) -> Var | None:
    """Return the vector in a range's layout that these views are taken of; None if there is none."""
    source: Var | None = None
    for leaf, at, view in zip(known.leaves, known.offsets, views, strict=True):
        base, shape, stride, offset = (*view.args, 0)[:4]
        if (tuple(shape), tuple(stride), offset) != (leaf.spec.shape, leaf.spec.stride, base.offset + at):
            return None
        if source not in (None, base) or base.spec.shape != (known.length,) or base.spec.stride != (1,):
            return None
        source = base
    return source


def clears(program: Program, tensors: Mapping[Var, Tensor]) -> list[Callable[[], Any]]:
    """Return the calls that follow the commit: they zero the padding of written ranges."""
    written = {old for old, _ in program.updates}
    calls: list[Callable[[], Any]] = []
    for known in program.ranges:
        if known.var in written and (free := _padding(known)):
            vector = tensors[known.var]
            calls.append(partial(vector.index_fill_, 0, torch.tensor(free, device=vector.device), 0))
    return calls


def _padding(known: SlotRange) -> list[int]:
    """Return the positions of the vector that belong to no leaf."""
    free = torch.ones(known.length, dtype=torch.bool)
    for leaf, at in zip(known.leaves, known.offsets, strict=True):
        free[at : at + leaf.spec.numel] = False
    return free.nonzero().flatten().tolist()


def range_tensor(known: SlotRange, slots: Sequence[Tensor]) -> Tensor:
    """Return a range's memory in the slab as one vector; a copy if the slots are scratch, not in one slab."""
    first = slots[0]
    base = first.storage_offset() - known.offsets[0]
    storage = first.untyped_storage()
    in_place = all(
        slot.untyped_storage()._cdata == storage._cdata and slot.storage_offset() == base + at
        for slot, at in zip(slots, known.offsets, strict=True)
    )
    if in_place and base >= 0 and storage.nbytes() >= (base + known.length) * first.itemsize:
        return torch.as_strided(first, (known.length,), (1,), base)
    vector = torch.zeros(known.length, dtype=first.dtype, device=first.device)
    for slot, at in zip(slots, known.offsets, strict=True):
        vector[at : at + slot.numel()] = torch.as_strided(slot, (slot.numel(),), (1,))
    return vector
