"""The table of ops that torch tests itself with, in a sweep: each of two members computes what it computes alone.

Some tensors of a sample, drawn, are those of a member; the others are shared. The second member has the elements of the
first in another order.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

import functional_cg as fcg
from tests.judges.documented import UNINITIALISED
from tests.judges.opinfo import (
    Item,
    cases,
    eagerly,
    in_a_step,
    items_of,
    of_item,
    ops,
    refusal,
    verdict_of,
)  # fmt: skip
from tests.judges.rows import Row, Verdict, first_line

__all__ = ["JUDGE", "cases", "run"]

JUDGE = "OpInfo, two members"

_SAMPLES = {
    torch.float32: 3, torch.bfloat16: 2, torch.float64: 1, torch.complex64: 1, torch.int64: 2, torch.uint8: 1,
}  # fmt: skip


def run(case: str, lowering: str, device: str) -> Iterator[Row]:
    """Judge one op with all of its dtypes."""
    op = ops()[case]
    row, start = Row(JUDGE, case, lowering, device), time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype, count in _SAMPLES.items():
            items, verdicts = items_of(op, dtype, count, device)
            row.add(verdicts)
            for item in items:
                row.add([_judged(item, lowering, values=op.name not in UNINITIALISED)])
    if not row.counts:
        row.add([Verdict("not run", "", "the op has none of the judged dtypes on this device")])
    row.seconds = round(time.monotonic() - start, 1)
    yield row


def _judged(item: Item, lowering: str, *, values: bool) -> Verdict:
    if not item.tensors or any(tensor.layout is not torch.strided for tensor in item.tensors):
        return Verdict("not run", item.where, "no tensor, or a sparse one")
    draw = Random(item.where)
    own = [draw.random() < 0.7 for _ in item.tensors]
    own[draw.randrange(len(own))] = True
    second = [_turned(tensor) if one else tensor for tensor, one in zip(item.tensors, own, strict=True)]
    members = [item, replace(item, tensors=second)]
    try:
        for member in members:
            member.expected = eagerly(member)
        in_a_step(members, "aten")
    except Exception as error:
        return Verdict("not run", item.where, f"not alone: {first_line(error)}")
    try:
        results = _swept(members, own, lowering)
    except Exception as error:  # refusals and errors of torch alike
        return refusal(item, error)
    verdicts = [verdict_of(member, result, values) for member, result in zip(members, results, strict=True)]
    return max(verdicts, key=lambda verdict: ("equal", "rounded", "DIFFERS").index(verdict.outcome))


def _turned(tensor: Tensor) -> Tensor:
    return tensor.flip(0) if tensor.dim() and len(tensor) > 1 else tensor.clone()


def _swept(members: list[Item], own: list[bool], lowering: str) -> list[list[Tensor]]:
    """What a sweep returns for each member, with the strides of one alone."""

    def op(state: list[Tensor], shared: list[Tensor]) -> list[Tensor]:
        mine, others = iter(state), iter(shared)
        return of_item(members[0], [next(mine) if one else next(others) for one in own])

    states = [[t for t, one in zip(item.tensors, own, strict=True) if one] for item in members]
    shared = [t for t, one in zip(members[0].tensors, own, strict=True) if not one]
    with fcg.graph_fn(fcg.sweep(op), lowering=lowering, branches=1) as step:
        found = step(fcg.tree.stack(states), shared)
    return [
        [
            torch.empty_like(expected).copy_(one[number])
            if (one[number].shape, one.dtype) == (expected.shape, expected.dtype)
            else one[number]
            for one, expected in zip(found, item.expected, strict=True)
        ]
        for number, item in enumerate(members)
    ]
