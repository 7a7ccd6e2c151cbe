"""Laws of the arena's planner: pure, deterministic, slots disjoint, aligned, in order, inside their slabs."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_cg as fcg
from functional_cg.state.arena import Arena, BufferSpec, Plan, offsets, plan

CPU = torch.device("cpu")
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.complex128,
    torch.uint8,
]
ROLES = ["params", "opt_state", "grads"]


@st.composite
def specs(draw: st.DrawFn) -> BufferSpec:
    """Specs from empty to a few times the size from which slots are aligned to 256 bytes."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 40, 129]), max_size=3)))
    order = draw(st.permutations(range(len(shape))))
    meta = torch.empty([shape[i] for i in order], dtype=draw(st.sampled_from(DTYPES)), device="meta")
    return replace(BufferSpec.of(meta.permute([order.index(i) for i in range(len(shape))])), device=CPU)


LEAVES = st.lists(st.tuples(specs(), st.sampled_from(ROLES)), max_size=12)


def planned(leaves: list[tuple[BufferSpec, str]]) -> Plan:
    return plan([spec for spec, _ in leaves], [role for _, role in leaves])


def byte_range(layout: Plan, i: int) -> tuple[int, int]:
    slot = layout.slots[i]
    start = slot.offset * slot.spec.dtype.itemsize
    return start, start + slot.spec.nbytes


@given(LEAVES)
def test_slots_keep_specs_and_order(leaves: list[tuple[BufferSpec, str]]) -> None:
    layout = planned(leaves)
    assert [slot.spec for slot in layout.slots] == [spec for spec, _ in leaves]
    for number, slab in enumerate(layout.slabs):
        members = [i for i, slot in enumerate(layout.slots) if slot.slab == number]
        places = [byte_range(layout, i) for i in members]
        assert places == sorted(places)
        assert members == [
            i for i, (s, r) in enumerate(leaves) if (s.device, s.dtype, r) == (CPU, slab.dtype, slab.role)
        ]


@given(LEAVES)
def test_slots_are_disjoint_aligned_and_inside_their_slab(leaves: list[tuple[BufferSpec, str]]) -> None:
    layout = planned(leaves)
    ends = [0] * len(layout.slabs)
    for i, slot in enumerate(layout.slots):
        start, end = byte_range(layout, i)
        assert ends[slot.slab] <= start
        assert end <= layout.slabs[slot.slab].nbytes
        assert start % (256 if slot.spec.nbytes >= 4096 else 16) == 0
        assert start - ends[slot.slab] < 256  # no more padding than alignment asks for
        ends[slot.slab] = end
    for slab, end in zip(layout.slabs, ends, strict=True):
        assert slab.nbytes % 16 == 0
        assert slab.nbytes - end < 16


@given(LEAVES)
def test_a_role_is_one_range_per_dtype(leaves: list[tuple[BufferSpec, str]]) -> None:
    layout = planned(leaves)
    kinds = [(slab.device, slab.dtype, slab.role) for slab in layout.slabs]
    assert len(set(kinds)) == len(kinds)
    assert set(kinds) == {(spec.device, spec.dtype, role) for spec, role in leaves}
    assert layout.nbytes == sum(slab.nbytes for slab in layout.slabs)


@given(LEAVES)
def test_planning_is_deterministic(leaves: list[tuple[BufferSpec, str]]) -> None:
    assert planned(leaves) == planned(list(leaves))
    assert hash(planned(leaves)) == hash(planned(list(leaves)))


@given(LEAVES)
def test_a_role_is_planned_alone_as_among_others(leaves: list[tuple[BufferSpec, str]]) -> None:
    whole = planned(leaves)
    for role in ROLES:
        alone = planned([leaf for leaf in leaves if leaf[1] == role])
        among = [slot for slot, (_, r) in zip(whole.slots, leaves, strict=True) if r == role]
        assert [slot.offset for slot in alone.slots] == [slot.offset for slot in among]


@given(LEAVES)
def test_offsets_are_those_of_the_plan(leaves: list[tuple[BufferSpec, str]]) -> None:
    layout = planned(leaves)
    for number, slab in enumerate(layout.slabs):
        members = [slot for slot in layout.slots if slot.slab == number]
        assert offsets(slot.spec for slot in members) == ([slot.offset for slot in members], slab.numel)


@given(LEAVES)
def test_allocated_slots_are_where_the_plan_says_and_own_their_elements(
    leaves: list[tuple[BufferSpec, str]],
) -> None:
    layout = planned(leaves)
    arena = Arena.allocate(layout, CPU)
    for i, (slot, view) in enumerate(zip(layout.slots, arena.slots, strict=True)):
        assert (tuple(view.shape), view.stride()) == (slot.spec.shape, slot.spec.stride)
        assert view.storage_offset() == slot.offset
        assert view.untyped_storage()._cdata in arena.storages
        view.fill_(1 + i % 2)
    for number, slab in enumerate(arena.slabs):
        written = sum(slot.spec.numel for slot in layout.slots if slot.slab == number)
        assert int((slab != 0).sum()) == written  # as many as if no two slots shared an element


@given(LEAVES)
def test_placing_gives_back_every_value(leaves: list[tuple[BufferSpec, str]]) -> None:
    values = [
        torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype).copy_(
            torch.arange(spec.numel).remainder(2).reshape(spec.shape)
        )
        for spec, _ in leaves
    ]
    state = fcg.place(values)
    for leaf, value in zip(fcg.snapshot(state), values, strict=True):
        assert torch.equal(leaf, value)
    assert [slot.spec for slot in state._lease.arena.plan.slots] == [spec for spec, _ in leaves]  # type: ignore[attr-defined]
