"""The program: a traced step as a flat list of ATen calls on numbered variables.

``trace`` makes it, ``inspect`` certifies it and ``lower`` compiles it. Only its constants are tensors with memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..messages.origins import Origin
from ..messages.source import Location
from ..shards.transfers import TRANSFERS
from ..state.arena import BufferSpec
from ..tensors.aten import full_name, returns_view, tags_of
from ..tree import KeyPath, Treedef, path_string

__all__ = [
    "Application",
    "Constant",
    "Instr",
    "Program",
    "SlotRange",
    "Twins",
    "Var",
    "highest",
    "layouts_of",
    "live",
    "map_arguments",
    "map_vars",
    "numbers_in",
    "vars_in",
    "written_storages",
]


@dataclass(eq=False, slots=True)
class Var:
    """A variable: one tensor value of the program.

    Attributes:
      index: Number, in order of creation.
      spec: Shape, strides, dtype, device.
      storage: Number of the storage; two variables can share memory only if their numbers are equal.
      offset: Storage offset, in elements.
      fills: Whether the variable covers its whole storage.
    """

    index: int
    spec: BufferSpec
    storage: int
    offset: int
    fills: bool

    def __repr__(self) -> str:
        return f"t{self.index}"


class Twins(dict[Var, Var]):
    """Variables in place of others, each made when it is asked for."""

    def __missing__(self, var: Var) -> Var:
        self[var] = made = Var(var.index, var.spec, var.storage, var.offset, var.fills)
        return made

    __call__ = dict.__getitem__


@dataclass(eq=False, slots=True)
class Instr:
    """One ATen call, ``out = op(*args, **kwargs)``, with variables in place of tensors. It never changes.

    Attributes:
      writes: Variables that the call writes in place.
      site: The line of user code, if known.
      backward: Whether autograd's backward made the call.
      inner: Whether the library made it on the way to a result, in a module's function or an optimizer.
      origin: What it is a part of; for a call of the backward, what the call is a part of that it differentiates.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    writes: tuple[Var, ...]
    site: Location | None
    backward: bool = False
    inner: bool = False
    origin: Origin = field(default_factory=Origin)
    _inputs: Sequence[Var] | None = field(default=None, init=False, repr=False)
    _outputs: Sequence[Var] | None = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        """The op's name without namespace and overload."""
        return full_name(self.op).partition("::")[2]

    @property
    def by_element(self) -> bool:
        """Whether the call is elementwise."""
        return torch.Tag.pointwise in tags_of(self.op)

    @property
    def checks(self) -> bool:
        """Whether the call only checks: it has no result and raises on bad values, such as a singular matrix."""
        return not self.writes and not self.outputs()

    @property
    def is_view(self) -> bool:
        """Whether the call computes nothing: its result lies in the memory of an argument.

        An op such as ``contiguous`` may return a view, and a copy of other arguments.
        """
        return (
            returns_view(self.op)
            and isinstance(self.out, Var)
            and self.out.storage in {var.storage for var in self.inputs()}
        )

    @property
    def only_views(self) -> bool:
        """Whether the call computes nothing, whatever its op: all that it makes lies in the memory of its arguments."""
        if self.op._schema.name == "fcg::again":  # a sub-program, which is a call even if it only takes views
            return False
        made = {var.storage for var in self.outputs()}
        return bool(made) and not self.writes and made <= {var.storage for var in self.inputs()}

    def inputs(self) -> Sequence[Var]:
        """Return the variables among the arguments."""
        if self._inputs is None:
            self._inputs = tuple(vars_in((*self.args, *self.kwargs.values()) if self.kwargs else self.args))
        return self._inputs

    def outputs(self) -> Sequence[Var]:
        """Return the variables among the results."""
        if self._outputs is None:
            self._outputs = tuple(vars_in(self.out))
        return self._outputs

    def again(self, new: Callable[[Var], Var]) -> Instr:
        """Return the call with other variables."""
        (args, kwargs), out = map_arguments(new, self), map_vars(new, self.out)
        told = map_vars(new, self.writes), self.site, self.backward, self.inner, self.origin
        return Instr(self.op, args, kwargs, out, *told)

    def reading(self, new: Callable[[Var], Any]) -> Instr:
        """Return the call with other arguments."""
        args, kwargs = map_arguments(new, self)
        return replace(self, args=args, kwargs=kwargs)

    def __str__(self) -> str:
        kwargs = "".join(f", {name}={value!r}" for name, value in self.kwargs.items())
        return f"{self.out!r} = {self.op}({', '.join(map(repr, self.args))}{kwargs})"


@dataclass(eq=False, slots=True)
class Constant:
    """A tensor that the step owns: declared with ``constants=``, or a literal ``torch.tensor([1, 2])`` on a line."""

    var: Var
    value: Tensor
    name: str
    site: Location | None = None

    def holds(self, other: Tensor) -> bool:
        """Whether another tensor has the same shape, dtype and bits."""
        if other.shape != self.value.shape or other.dtype != self.value.dtype:
            return False
        mine, its = (one.contiguous().reshape(-1).view(torch.uint8) for one in (self.value, other))
        return torch.equal(mine, its)


@dataclass(frozen=True, slots=True)
class SlotRange:
    """A contiguous range of slots that is read as one vector.

    Attributes:
      var: The vector.
      leaves: Its slots, in order.
      offsets: Where each slot starts in the vector, in elements.
      length: Length of the vector in elements, padding included.
    """

    var: Var
    leaves: tuple[Var, ...]
    offsets: tuple[int, ...]
    length: int


@dataclass(frozen=True, slots=True)
class Report:
    """A call of ``debug_print`` or ``tap`` in the step.

    Attributes:
      func: The op.
      args: All arguments except the last.
      values: The last argument: the variables to show.
    """

    func: OpOverload
    args: tuple[Any, ...]
    values: tuple[Var, ...]

    def __str__(self) -> str:
        return f"{self.func.__name__.split('.')[0]}({', '.join(repr(one) for one in self.args if one is not None)})"


@dataclass(frozen=True, slots=True)
class Application:
    """A call of the pure function made from a module.

    Attributes:
      original: The module that was copied, which tells whether it has changed since.
      module: Name of its class.
      by_mode: Whether it did something that modules do only in training mode.
      parts: Submodules whose buffers were written.
      written: New values of these buffers.
    """

    original: Any
    module: str
    by_mode: bool
    parts: tuple[str, ...]
    written: tuple[Var, ...]


@dataclass(eq=False, slots=True)
class Program:
    """A traced step: variables, calls, new state and metrics.

    Attributes:
      function: Name of the user's function.
      slots: One variable per leaf of the bound states, in order.
      slot_names: Their key paths, as text.
      inputs: One variable per input leaf.
      constants: Tensors that the program owns.
      instrs: The calls.
      new_state: New value of each of the first ``len(new_state)`` slots; empty for a read-only function.
      places: Slab and offset in elements of each slot; filled in when the program is lowered.
      ranges: Ranges of slots that the lowered program reads as one vector.
      updates: Pairs (slot or range, new value) of the lowered program, without slots that are returned unchanged.
      outputs: Metrics: each a variable, or a Python value that is returned as it is.
      output_def, state_def: Tree structures of them and of the new state, as returned.
      reports: What is printed or tapped at each call.
      applications: Calls of modules' functions.
      replaced: For each update, the trees that it handed back: the pairs (old value, new value) of their leaves.
      suppositions: Slots that it never changes, with the values that it was traced with, on the host.
      tables: Tensors that caches hold, by name: each is one of the constants.
      copied: Names of the inputs that it writes, each in a copy of its own.
      warnings: What calls of the library warn of.
      notes: What parts of the step say of themselves, such as the schedule of a pipeline; the same on all ranks.
      reserved: How many numbers of variables and of storages its trace has given away.
    """

    function: str
    slots: list[Var]
    slot_names: list[str]
    inputs: list[Var]
    constants: list[Constant] = field(default_factory=list)
    instrs: list[Instr] = field(default_factory=list)
    new_state: list[Var] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    ranges: list[SlotRange] = field(default_factory=list)
    updates: list[tuple[Var, Var]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    output_def: Treedef | None = None
    state_def: Treedef | None = None
    output_paths: list[KeyPath] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    applications: list[Application] = field(default_factory=list)
    replaced: list[list[list[tuple[Var, Var]]]] = field(default_factory=list)
    suppositions: list[Constant] = field(default_factory=list)
    tables: list[tuple[str, Tensor]] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reserved: tuple[int, int] = (0, 0)

    @property
    def results(self) -> list[Var]:
        """The variables that leave the step: metrics, then printed and tapped values."""
        return vars_in([*self.outputs, *(report.values for report in self.reports)])

    def named_results(self) -> Iterator[tuple[str, Var]]:
        """Yield the variables that leave the step, each with its key path or the report that shows it."""
        for path, value in zip(self.output_paths, self.outputs, strict=True):
            if isinstance(value, Var):
                yield path_string(path, "metrics"), value
        yield from ((str(report), value) for report in self.reports for value in report.values)

    def twin(self) -> Program:
        """Return a copy with separate variables and calls, unaffected by rewrites of this program."""
        new = Twins()
        return replace(
            self,
            slots=list(map(new, self.slots)),
            inputs=list(map(new, self.inputs)),
            constants=[replace(constant, var=new(constant.var)) for constant in self.constants],
            instrs=[one.again(new) for one in self.instrs],
            new_state=list(map(new, self.new_state)),
            outputs=map_vars(new, self.outputs),
            reports=[replace(report, values=map_vars(new, report.values)) for report in self.reports],
        )

    def as_text(self) -> str:
        """Return the program as text, one call per line."""
        lines = [f"{self.function}:"]
        lines += [
            f"  {var!r} = {name}  {var.spec}" for var, name in zip(self.slots, self.slot_names, strict=True)
        ]
        lines += [f"  {var!r} = input {i}  {var.spec}" for i, var in enumerate(self.inputs)]
        lines += [f"  {c.var!r} = {c.name}  {c.var.spec}" for c in self.constants]
        lines += [f"  {instr}" + (f"  # {instr.site}" if instr.site else "") for instr in self.instrs]
        names = dict(zip(self.slots, self.slot_names, strict=True))
        lines[1:1] = [
            f"  {r.var!r} = {len(r.leaves)} leaves from {names[r.leaves[0]]} on" for r in self.ranges
        ]
        lines += [f"  {names.get(old, repr(old))} <- {new!r}" for old, new in self.updates]
        lines.append(f"  return {self.outputs!r}")
        return "\n".join(lines)


def highest(program: Program) -> tuple[int, int]:
    """Return the highest variable number and the highest storage number of a program; -1 if there are none."""
    every = {*program.slots, *program.inputs, *(one.var for one in program.constants)}
    every.update(one.var for one in program.ranges)
    every.update(*(found for instr in program.instrs for found in (instr.inputs(), instr.outputs())))
    index, storage = (number - 1 for number in program.reserved)
    return max([index, *(var.index for var in every)]), max([storage, *(var.storage for var in every)])


def layouts_of(variables: Iterable[Var]) -> tuple[Hashable, ...]:
    """Return what is equal for variables that lie alike: of one layout each, and in one memory where others are."""
    numbers: dict[Var, int] = {}
    start: dict[
        int, tuple[int, int]
    ] = {}  # of each storage: its number, and the offset of the first variable
    found = []
    for var in variables:
        storage, offset = start.setdefault(var.storage, (len(start), var.offset))
        number = numbers.setdefault(var, len(numbers))
        found.append((number, var.spec, storage, var.offset - offset, var.fills))
    return tuple(found)


def written_storages(instrs: Iterable[Instr]) -> set[int]:
    """Return the numbers of the storages that some call writes in place."""
    return {var.storage for instr in instrs for var in instr.writes}


def live(instrs: Sequence[Instr], results: Iterable[Var]) -> tuple[list[Instr], set[Var]]:
    """Return the live instructions, in order, and the variables that they or the results use.

    An instruction is live if one of its results is used, if it writes in place to memory that is used later, if it is
    a check, which has no result, or if another rank waits for it.
    """
    used = set(results)
    storages = {var.storage for var in used}
    kept = []
    for instr in reversed(instrs):
        reaches = not used.isdisjoint(instr.outputs())
        reaches = reaches or any(var.storage in storages for var in instr.writes)
        if reaches or instr.checks or instr.op in TRANSFERS:
            kept.append(instr)
            used.update(instr.inputs())
            storages.update([var.storage for var in instr.inputs()])
    kept.reverse()
    return kept, used


def vars_in(value: Any) -> list[Var]:
    """Return all variables in an argument or result, including those in nested lists and tuples."""
    kind = type(value)
    if kind is Var:
        return [value]
    found: list[Var] = []
    if kind is tuple or kind is list:
        if {*map(type, value)} == {Var}:  # what a sub-program is given, or returns
            return [*value]
        for item in value:
            kind = type(item)
            if kind is Var:
                found.append(item)
            elif kind is tuple or kind is list:
                found += vars_in(item)
    return found


def numbers_in(value: Any) -> Iterator[Any]:
    """Yield all numbers in an argument, including those in nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, (bool, int, float, complex)):
        yield value


def map_vars(function: Callable[[Var], Any], value: Any) -> Any:
    """Return an argument or result with ``function`` applied to each variable."""
    kind = type(value)
    if kind is Var:
        return function(value)
    if kind is tuple or kind is list:
        return kind([function(one) if type(one) is Var else map_vars(function, one) for one in value])
    return value


def map_arguments(function: Callable[[Var], Any], instr: Instr) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a call with ``function`` applied to each variable: those by place, and those by name."""
    return map_vars(function, instr.args), {k: map_vars(function, v) for k, v in instr.kwargs.items()}
