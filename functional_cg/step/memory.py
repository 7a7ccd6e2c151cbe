"""The memory of a step: bytes by use, and what the largest values at the peak are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..messages.html import bar
from ..messages.units import size_of
from ..stages.lifetimes import alive_at_peak
from ..stages.program import Instr, Program, Var
from ..stages.schedule import Schedule, schedule, temporaries
from ..stages.sub_programs import unrolled
from .report import Part, Report, grouped, shortened

__all__ = ["MemoryAnalysis", "Owner", "memory_analysis", "peak_of"]

_ROLE = re.compile(r"\w+\.\w+")
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Owner:
    """Temporaries at the peak that one line makes by one op.

    Attributes:
      nbytes: Their bytes.
      values: How many they are.
      op: Name of the op.
      site: The line, ``model.py:33``, of a call of the backward the one that it differentiates; empty if unknown.
      backward: Whether the backward makes them.
    """

    nbytes: int
    values: int
    op: str
    site: str
    backward: bool


@dataclass(frozen=True, repr=False, slots=True)
class MemoryAnalysis(Report, Mapping[str, int]):
    """Bytes of a step by use, as a mapping; prints as a table.

    Attributes:
      function: Name of the user's function.
      sizes: Bytes by use; see :meth:`functional_cg.Lowered.memory_analysis`.
      owners: What the temporaries at the peak are, most bytes first.
    """

    function: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    owners: tuple[Owner, ...] = ()

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def parts(self) -> list[tuple[str, int]]:
        """Return what lies in memory at the peak, with its bytes: they add up to it, but for the state's fields."""
        fixed = {name: self[name] for name in ("state", "inputs", "constants")}
        fields = [(f"  {name}", size) for name, size in self.sizes.items() if "." in name]
        state, *others = fixed.items()
        return [state, *fields, *others, ("temporaries", self["peak"] - sum(fixed.values()))]

    def bars(self) -> list[tuple[str, ...]]:
        """Return rows of the parts of the peak; in a notebook, with a bar for the share of each."""
        peak = max(self["peak"], 1)
        return [(name, size_of(size), bar(size / peak)) for name, size in self.parts()]

    def report(self) -> list[Part]:
        """Return the parts of the peak, and the temporaries at it."""
        owners = [
            (one.op, f"{one.site}{', backward' * one.backward}", f"{one.values}x", size_of(one.nbytes))
            for one in shortened(self.owners, _SHOWN, "op")
        ]
        apart = (
            f"  besides: metrics {size_of(self['metrics'])}; all temporaries of a call come to "
            f"{size_of(self['temporaries'])}, not all at one time"
        )
        return [
            f"{self.function}: {size_of(self['peak'])} at the peak",
            self.bars(),
            apart,
            *([[("temporaries at the peak", "line", "values", "bytes"), *owners]] if owners else []),
        ]


def peak_of(program: Program, plan: Schedule) -> tuple[list[tuple[Instr, int]], int]:
    """Return what is alive while a program takes most memory, besides its state, inputs and constants.

    Args:
      program: The program.
      plan: The schedule that it runs by.
    Returns:
      (alive, staged): the temporaries, each with the call that makes it and its bytes; and the bytes of new values that
      are copied before they are written, if the peak is at the end.
    """
    sizes, instrs = temporaries(program, plan), [*plan.head, *plan.fused]
    makers = {var.storage: instr for instr in reversed(instrs) for var in instr.outputs()}
    kept = {var.storage for var in (*plan.outputs, *(new for _, new in plan.commits))}
    most = alive_at_peak(instrs, kept, sizes)
    left = [one for one in makers if one in kept and one in sizes]
    staged = sum(old.spec.nbytes for old in plan.staged)
    if sum(map(sizes.__getitem__, most)) >= staged + sum(map(sizes.__getitem__, left)):
        staged, left = 0, most
    return [(makers[one], sizes[one]) for one in left], staged


def memory_analysis(program: Program, on_lanes: int = 0) -> MemoryAnalysis:
    """Return bytes by use; see :meth:`functional_cg.Lowered.memory_analysis`.

    Args:
      program: The program.
      on_lanes: Bytes of temporaries at the peak, if its calls run side by side.
    """
    roles: Counter[str] = Counter()
    for name, var in zip(program.slot_names, program.slots, strict=True):
        if role := _ROLE.match(name):
            roles[role.group()] += var.spec.nbytes
    fixed = {
        "state": sum(var.spec.nbytes for var in program.slots),
        "inputs": sum(var.spec.nbytes for var in program.inputs),
        "constants": sum(constant.var.spec.nbytes for constant in program.constants),
    }
    program = unrolled(program)
    plan = schedule(program)
    alive, staged = peak_of(program, plan)
    used = {
        **fixed,
        "metrics": sum(var.spec.nbytes for var in program.outputs if isinstance(var, Var)),
        "temporaries": sum(temporaries(program, plan).values()),
        "peak": sum(fixed.values()) + max(staged + sum(size for _, size in alive), on_lanes),
        **roles,
    }
    makers = grouped(alive, lambda one: (one[0].name, str(one[0].origin.line or ""), one[0].backward))
    owners = (Owner(sum(size for _, size in made), len(made), *maker) for maker, made in makers.items())
    return MemoryAnalysis(
        program.function, used, tuple(sorted(owners, key=lambda one: one.nbytes, reverse=True))
    )
