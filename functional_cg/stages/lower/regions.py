"""Compile what runs several times in a step once, such as a stage of a pipeline, and call it in the order of the trace.

A region is a run of calls with one name. Regions of one name and with the same calls share a compiled function; what
stands between them, such as transfers and sums, and regions that are unlike the others, stay ATen calls. So the first
call does not take longer with more micro-batches, and memory is allocated and freed in the order of the schedule.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from ...shards.collectives import is_collective
from ...shards.transfers import TRANSFERS
from ..program import Instr, Program, Var, vars_in
from ..schedule import Schedule, schedule
from ..template import Template
from ..trial.reference import Reference
from .functions import Compiler, FunctionsPlan, Head, checked, head_of
from .repeats import frozen_call

__all__ = ["in_regions"]


@dataclass(eq=False)
class _Region:
    """A run of calls.

    Attributes:
      name: Its name.
      views: Views of what it gets: they compute nothing, and stay outside.
      calls: The others.
      inputs: What it reads, in order of first use.
      needed: What others read of it.
      after: Views of its results that others read: they are taken again outside.
    """

    name: str
    views: list[Instr] = field(default_factory=list)
    calls: list[Instr] = field(default_factory=list)
    inputs: list[Var] = field(default_factory=list)
    needed: list[Var] = field(default_factory=list)
    after: list[Instr] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, run: Sequence[Instr], wanted: set[Var]) -> _Region | None:
        """Return the region of a run of calls; None if it cannot be called as a function.

        Args:
          name: Its name.
          run: The calls.
          wanted: What other calls read, and what leaves the step.
        """
        found, born = cls(name), set[Var]()
        for instr in run:
            if instr.is_view and born.isdisjoint(instr.inputs()):
                found.views.append(instr)
            else:
                found.calls.append(instr)
                born.update(instr.outputs())
        storages = {var.storage for var in born} - {
            var.storage for instr in found.calls for var in instr.inputs() if var not in born
        }
        unfit = any(
            instr.op in TRANSFERS or is_collective(instr.op) or not instr.outputs() for instr in found.calls
        )
        if not found.calls or unfit or any(var.storage not in storages for var in born):
            return None  # it sends, only has an effect, or its results lie in memory of others
        read = (var for instr in found.calls for var in instr.inputs() if var not in born)
        found.inputs = list(dict.fromkeys(read))
        return found if found._hand_on([var for var in born if var in wanted]) else None

    def _hand_on(self, wanted: Sequence[Var]) -> bool:
        """Find what to return so that each wanted variable is a result, or a view of one; whether that is possible."""
        makers = {var: instr for instr in self.calls for var in instr.outputs()}
        after: dict[Instr, None] = {}
        owners: dict[int, Var] = {}
        for var in sorted(wanted, key=lambda one: one.index):
            chain = [var]
            while makers[chain[-1]].is_view:
                chain.append(makers[chain[-1]].inputs()[0])
            base = chain[-1]
            if not base.fills or owners.setdefault(base.storage, base) is not base:
                return False
            after.update(dict.fromkeys(makers[one] for one in reversed(chain[:-1])))
        self.needed, self.after = list(owners.values()), list(after)
        return True

    @property
    def numbers(self) -> dict[Var, int]:
        """The variables, numbered in order of appearance."""
        every = (*self.inputs, *(var for instr in self.calls for var in instr.outputs()))
        return {var: number for number, var in enumerate(dict.fromkeys(every))}

    def signature(self) -> Hashable:
        """Return what is equal for regions with the same calls."""
        numbers, storages = self.numbers, dict[int, int]()
        for var in numbers:
            storages.setdefault(var.storage, len(storages))
        entering = len(self.inputs)
        specs = tuple(
            (var.spec, storages[var.storage], var.offset if number >= entering else 0)
            for var, number in numbers.items()
        )
        calls = tuple(frozen_call(instr, numbers.__getitem__) for instr in self.calls)
        return self.name, entering, specs, calls


def in_regions(
    program: Program, device: torch.device, compiler: Compiler | None, reference: Reference
) -> FunctionsPlan:
    """Return a plan that runs regions as compiled functions among ATen calls, in the order of the trace.

    Args:
      program: A rewritten program.
      device: Where it runs.
      compiler: Compiles a region; None for inductor.
      reference: Finds the user's line for an exception from a compiled function.
    """
    plan = schedule(program)
    runs = [(name, list(run)) for name, run in groupby(plan.head, lambda instr: instr.region)]
    found = list(_found(runs, plan, program))
    templates = dict.fromkeys(instr.op for instr in plan.head if isinstance(instr.op, Template))
    repeated = {one: _Region.of(one.name, one.calls, {*one.results}) for one in templates if _is_region(one)}
    shared: dict[Hashable, list[_Region]] = {}
    for region in (*(region for region, _ in found), *repeated.values()):
        if region is not None:
            shared.setdefault(region.signature(), []).append(region)
    heads: list[Head] = []
    calls: dict[_Region, list[Instr]] = {}
    for alike in shared.values():
        first = alike[0]
        wanted = {one.numbers[var] for one in alike for var in one.needed}
        columns = [[var for var, number in one.numbers.items() if number in wanted] for one in alike]
        part = Program(first.name, [], [], first.inputs, instrs=first.calls, outputs=columns[0])
        computed = Schedule(checked(part, first.calls, compiler, device), outputs=columns[0])
        heads.append(head_of(part, computed, compiler, device, program.function))
        for one, column in zip(alike, columns, strict=True):
            call = Instr(heads[-1], tuple(one.inputs), {}, column, (), None)
            calls[one] = [*one.views, call, *one.after]
    others = {
        one: one.with_calls(calls[region], one.given, one.results)
        for one, region in repeated.items()
        if region is not None
    }
    head = [instr for region, run in found for instr in (run if region is None else calls[region])]
    head = [replace(instr, op=others[instr.op]) if instr.op in others else instr for instr in head]
    return FunctionsPlan(program, plan, replace(plan, head=head), device, reference, heads, one_by_one=True)


def _is_region(template: Template) -> bool:
    return template.calls[0].region is not None


def _found(
    runs: Sequence[tuple[Any, list[Instr]]], plan: Schedule, program: Program
) -> Iterator[tuple[_Region | None, list[Instr]]]:
    """Yield each run of calls with its region; None for calls that stay as they are."""
    ends = {*plan.outputs, *(new for _, new in plan.commits), *vars_in([i.args for i in plan.fused])}
    readers: dict[Var, set[int]] = {}
    for number, (_, run) in enumerate(runs):
        for instr in run:
            for var in instr.inputs():
                readers.setdefault(var, set()).add(number)
    for number, (name, run) in enumerate(runs):
        wanted = {
            var
            for instr in run
            for var in instr.outputs()
            if var in ends or readers.get(var, set()) - {number}
        }
        alone = name is None or isinstance(run[0].op, Template)
        yield (None if alone else _Region.of(name[0], run, wanted)), run
