"""Members: a function that is traced for one model, recorded for many at once.

The function runs on tensors of one member and makes the calls of a single run. Each of them is then made once more, on
the tensors of all members, by torch's batching rules (``torch.func.vmap``): the member axis comes first. So whatever a
single step may do, a step of many may do, gradients and fused optimizers included. A call without a batching rule is
made for each member.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ...ambient.running import OwnWork
from ...errors import CaptureError
from ...state.arena import BufferSpec
from ...tensors.aten import only_batching_rules
from ...tensors.op_table import row_of
from ..blocks import Blocks
from ..evaluate import AS_STRIDED, assigned
from ..fx_passes.rounding import HALF
from ..passes.formulas import FORMULAS
from ..passes.fused import at_places, group_size
from ..program import Instr, Program, Report, Var, map_vars, vars_in, written_storages
from ..sub_programs import calls_of
from ..variables import History, Variables

__all__ = ["for_members"]

_aten = torch.ops.aten
_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default})
# torch's rules for them are wrong: one fills a tensor that all members share, the other counts places from the first.
_ONE_BY_ONE = frozenset({_aten.index_fill.int_Tensor, _aten.as_strided_scatter.default})
_SELECTS = frozenset({"condition", "mask"})  # arguments that choose, and are not computed with


class _Recorder(Protocol):
    """What records the running trace."""

    program: Program
    variables: Variables
    blocks: Blocks
    history: History
    work: OwnWork

    def fake(self, spec: BufferSpec, owner: str) -> tuple[Tensor, Var]: ...

    def as_before(self, place: Any) -> AbstractContextManager[None]: ...

    def announce(self, text: str) -> None: ...


def for_members(
    recorder: _Recorder,
    act: Callable[[list[Tensor]], list[Tensor]],
    given: Sequence[Tensor],
    names: Sequence[str],
    count: int,
) -> list[Tensor]:
    """Record a function of one member for all of them.

    Args:
      recorder: Records the running trace.
      act: The function, of the tensors of one member.
      given: The tensors of all members, each with the member axis first.
      names: Their names, for messages.
      count: Number of members.
    Returns:
      What it returns, for all members.
    """
    program, start = recorder.program, len(recorder.program.instrs)
    shown, applied, replaced = len(program.reports), len(recorder.work.applied), len(recorder.work.replaced)
    blocks, literals = len(recorder.blocks.known), len(program.constants)
    one = []
    for tensor, name in zip(given, names, strict=True):
        fake, var = recorder.fake(_of_one(tensor), name)
        recorder.history.mark(var)
        one.append(fake)
    results = act(one)
    if len(recorder.blocks.known) > blocks:
        raise CaptureError.of(
            program.function,
            "runs a pipeline for each member of a sweep.",
            why="The stages of a pipeline are traced once, and belong to one model.",
            fix="one member for each group of ranks, without `fcg.sweep`.",
        )
    of = recorder.variables.of
    wanted = [of(tensor) for tensor in results]
    calls = calls_of(program.instrs[start:])
    _check_gradients(program.function, [*given, *_read(recorder, calls)], names)
    _check_writes(program, calls, {*map(of, one), *(each.var for each in program.constants[literals:])})
    reports = program.reports[shown:]
    del program.instrs[start:], program.reports[shown:]
    recorder.history.forget()
    pairs = zip(map(of, one), given, strict=True)
    members = _Members(recorder, calls, {var: tensor for var, tensor in pairs if var is not None}, count)
    devices = {tensor.device.type for tensor in given}
    with contextlib.ExitStack() as modes:
        for mode in (torch.no_grad(), only_batching_rules()):
            modes.enter_context(mode)
        for device in devices:  # what it casts is among the calls
            modes.enter_context(torch.autocast(device, enabled=False))
        for call in calls:
            with recorder.as_before((call.site, call.backward, call.inner, call.origin)):
                members.make(call)
        out = [
            members.of(var) if var is not None else tensor
            for var, tensor in zip(wanted, results, strict=True)
        ]
        for report in reports:
            members.report(report)
    recorder.work.applied[applied:] = [
        (*told, list(map(members.like, written))) for *told, written in recorder.work.applied[applied:]
    ]
    recorder.work.replaced[replaced:] = [
        [[(members.like(old), members.like(new)) for old, new in part] for part in parts]
        for parts in recorder.work.replaced[replaced:]
    ]
    named = ", ".join(f"{name} ({times})" for name, times in members.repeated.most_common())
    but = f", but for calls without a batching rule: {named}" if named else ""
    recorder.announce(f"{count} members: one call for all{but}")
    return out


def _read(recorder: _Recorder, calls: Sequence[Instr]) -> list[Tensor]:
    """Return the tensors from outside that calls read."""
    known, made = recorder.variables.tensors(), {var for call in calls for var in call.outputs()}
    read = dict.fromkeys(var for call in calls for var in call.inputs() if var not in made)
    return [known[var] for var in read if var in known]


def _check_gradients(function: str, read: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise if autograd would have to follow the calls of all members: it has followed those of one."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in read):
        raise CaptureError.of(
            function,
            "differentiates a sweep.",
            rows=[
                f"{name}  requires a gradient"
                for name, one in zip(names, read, strict=False)
                if one.requires_grad
            ],
            why="A sweep runs whole steps, each with its own gradients.",
            fix="call `fcg.value_and_grad` in the function of one member; of tensors that need no gradient, pass "
            "`x.detach()`; or compute an ensemble by `torch.func.vmap`.",
        )


def _check_writes(program: Program, calls: Sequence[Instr], own: set[Var | None]) -> None:
    """Raise if a call writes into a tensor that all members share: each would find what another has written.

    Args:
      program: The program.
      calls: The calls of one member.
      own: What each member has of its own when they begin.
    """
    made, shared = {*own}, set[int]()
    for call in calls:
        shared.update(var.storage for var in call.inputs() if var not in made)
        made.update(call.outputs())
    for call in calls:
        if any(var.storage in shared for var in call.writes):
            raise CaptureError.of(
                program.function,
                "writes into a tensor that all members of a sweep share.",
                rows=[f"{call.op}, at {call.site}"],
                why="Each member would find what another one has written.",
                fix="write into a copy, `x.clone()`; or name the argument in `each`.",
            )


def _of_one(tensor: Tensor) -> BufferSpec:
    """Return the layout of one member's part."""
    shape, stride = tuple(tensor.shape[1:]), tuple(tensor.stride()[1:])
    return BufferSpec(shape, stride, tensor.dtype, tensor.device)


class _Members:
    """The values of all members.

    Args:
      recorder: Records the calls.
      calls: Those of one member.
      given: The variables that differ from member to member, with the tensors of all members.
      count: Number of members.

    Attributes:
      repeated: How many calls of each op were made for each member.
    """

    def __init__(
        self, recorder: _Recorder, calls: Sequence[Instr], given: Mapping[Var, Tensor], count: int
    ) -> None:
        self.repeated: Counter[str] = Counter()
        self._recorder, self._values, self._count = recorder, dict(given), count
        self._shared = recorder.variables.tensors()
        self._written = written_storages(calls)
        self._own = _own_storages(calls, {var.storage for var in given})
        # Memory that is written, or read by strides, lies for each member as it does for one.
        self._laid_out = self._written | {
            var.storage for call in calls if call.op is AS_STRIDED for var in call.inputs()
        }

    def of(self, var: Var) -> Tensor:
        """Return the values of all members; one that all share is repeated."""
        value = self._value(var)
        return value if var.storage in self._own else value.expand(self._count, *value.shape).clone()

    def like(self, tensor: Tensor) -> Tensor:
        """Return what takes the place of a tensor of one member."""
        var = self._recorder.variables.of(tensor)
        return tensor if var is None or var not in self._values else self._values[var]

    def make(self, call: Instr) -> None:
        """Make a call for all members."""
        own = [var for var in dict.fromkeys(call.inputs()) if var.storage in self._own]
        if not own:
            made = dict(assigned(call.out, _run(call, self._value)))
            for var, value in made.items():
                if var.storage in self._own and value is not None:  # a member writes into it
                    value = value.expand(self._count, *value.shape).clone()
                self._values[var] = value
        elif call.op is AS_STRIDED:
            source, size, stride, *offset = call.args
            value = self._value(source)
            begin = offset[0] if offset and offset[0] is not None else source.offset
            moved = begin - source.offset + value.storage_offset()
            self._values[call.out] = value.as_strided([self._count, *size], [value.stride(0), *stride], moved)
        else:
            for part in _parts(call):
                found = self._as_rows(part, own)
                if found is None and part.op not in _ONE_BY_ONE and not _reads_unrounded(part, own):
                    found = self._batched(part, own)
                self._values.update(self._one_by_one(part, own) if found is None else found)

    def report(self, report: Report) -> None:
        """Record a report of one member for all."""
        own = [var for var in report.values if var.storage in self._own]

        def show(*values: Tensor) -> Tensor:
            known = dict(zip(own, values, strict=True))
            report.func(
                *report.args, [known[var] if var in known else self._value(var) for var in report.values]
            )
            return values[0]

        if own:
            torch.func.vmap(show)(*map(self.of, own))
        else:
            report.func(*report.args, list(map(self._value, report.values)))

    def _value(self, var: Var) -> Tensor:
        if var not in self._values:
            value = self._shared[var]
            if var.storage in self._own:  # a literal that each member writes into
                value = value.expand(self._count, *value.shape).clone()
            self._values[var] = value
        return self._values[var]

    def _as_rows(self, call: Instr, own: Sequence[Var]) -> dict[Var, Tensor] | None:
        """Make a call that computes row by row on the rows of all members; return None if it is no such call."""
        count = next(iter(call.inputs())).spec.shape[0] if row_of(call.op).by_row else 0
        in_rows = {var for var in call.inputs() if _has_rows(var.spec.shape, count)}
        if not count or any(len(var.spec.shape) > 1 and var not in in_rows for var in own):
            return None

        def rows_of(var: Var) -> Tensor:
            value = self._value(var)
            if var in in_rows:
                return (value if var in own else value.expand(self._count, *value.shape)).flatten(0, 1)
            return value[0] if var in own else value  # a seed that attention without dropout does not read

        def of_members(value: Tensor) -> Tensor:
            if _has_rows(value.shape, self._count * count):
                return value.view(self._count, count, *value.shape[1:])
            return value.expand(self._count, *value.shape)

        made = assigned(call.out, _run(call, rows_of))
        return {var: of_members(value) for var, value in made if value is not None}

    def _batched(self, call: Instr, own: Sequence[Var]) -> dict[Var, Tensor] | None:
        """Make a call by a batching rule; return its results, or None if there is no rule that makes these."""
        read = [var for var in own if var in set(call.inputs())]
        made: list[Var] = []
        for var in call.inputs():
            self._value(var)
        # A number of one member is a vector of all: it would count when dtypes are promoted.
        dtype, numbers = _computed_in(call), _numbers(call)
        cast = {var: self._value(var).to(dtype) for var in numbers} if dtype is not None else {}

        def act(*values: Tensor) -> tuple[Tensor, ...]:
            known = cast | dict(zip(read, values, strict=True))
            pairs = [*assigned(call.out, _run(call, lambda var: known.get(var, self._values.get(var))))]
            made[:] = [var for var, value in pairs if value is not None]
            return tuple(value for _, value in pairs if value is not None)

        start = len(self._recorder.program.instrs)
        try:
            results = torch.func.vmap(act)(*(cast.get(var, self._value(var)) for var in read))
        except (RuntimeError, ValueError, NotImplementedError):
            results = ()
        found = dict(zip(made, results, strict=True)) if results else {}
        right = all(
            _promoted(value.dtype, var.spec.dtype) and value.shape == (self._count, *var.spec.shape)
            for var, value in found.items()
        )
        if not found or not right:
            del self._recorder.program.instrs[start:]
            self._recorder.history.forget()
            return None
        return {var: self._as_one(call, var, value) for var, value in found.items()}

    def _as_one(self, call: Instr, var: Var, value: Tensor) -> Tensor:
        """Return a result in the dtype of a single run, whose members lie as that one where that counts."""
        value = value.to(var.spec.dtype)
        new = var.storage not in {one.storage for one in call.inputs()}
        if not new or var.storage not in self._laid_out or value.stride()[1:] == var.spec.stride:
            return value
        extent = 1 + sum(
            (size - 1) * step for size, step in zip(var.spec.shape, var.spec.stride, strict=True)
        )
        layout = (extent, *var.spec.stride)
        return torch.empty_strided(value.shape, layout, dtype=value.dtype, device=value.device).copy_(value)

    def _one_by_one(self, call: Instr, own: Sequence[Var]) -> dict[Var, Tensor]:
        """Make a call for each member."""
        self.repeated[call.name] += 1
        views = {var.storage for var in call.outputs()} & {var.storage for var in call.inputs()}
        if (views - {var.storage for var in call.writes}) & self._written:
            raise CaptureError.of(
                self._recorder.program.function,
                "writes into a view that torch cannot take of all members of a sweep.",
                rows=[f"{call.op}, at {call.site}"],
                why="There is no batching rule for it, and what is written into a copy is lost.",
                fix="write into the tensor itself; or, if it need not see it, into a copy, `x.clone()`.",
            )
        columns: list[list[Tensor]] = []
        made: list[Var] = []
        for number in range(self._count):

            def value(var: Var, number: int = number) -> Tensor:
                one = self._value(var)[number] if var in own else self._value(var)
                # `as_strided_scatter` counts places from the first of the memory.
                return one.clone() if call.op in _ONE_BY_ONE else one

            pairs = [*assigned(call.out, _run(call, value))]
            made = [var for var, one in pairs if one is not None]
            columns.append([one for _, one in pairs if one is not None])
        written = {var for var in made if var in call.writes}
        stacked = zip(made, zip(*columns, strict=True), strict=True)
        return {var: self._values[var] if var in written else torch.stack(column) for var, column in stacked}


def _numbers(call: Instr) -> list[Var]:
    """Return the operands of a call without dimensions, but for those that it writes or chooses by."""
    arguments = zip(call.op._schema.arguments, call.args, strict=False)
    chosen_by = {
        var for argument, value in arguments if argument.name in _SELECTS for var in vars_in((value,))
    }
    every = dict.fromkeys(call.inputs())
    return [var for var in every if not var.spec.shape and var not in chosen_by and var not in call.writes]


def _computed_in(call: Instr) -> torch.dtype | None:
    """Return the dtype in which a call by element computes for one member, if its operands have several, else None.

    Of an operand without dimensions only the category counts (torch/aten, ``result_type``).
    """
    read = {var.spec.dtype for var in call.inputs()}
    numbers = _numbers(call)
    by_element = call.by_element or row_of(call.op).untagged or call.name.startswith("_foreach_")
    if len(read) < 2 or not numbers or not by_element:
        return None
    dims = [var.spec.dtype for var in call.inputs() if var.spec.shape and var.spec.dtype is not torch.bool]
    number = functools.reduce(torch.promote_types, [var.spec.dtype for var in numbers])
    found = functools.reduce(torch.promote_types, dims) if dims else number
    if found.is_floating_point and number.is_complex:
        found = found.to_complex()
    elif not found.is_floating_point and not found.is_complex and _category(number) > _category(found):
        found = torch.promote_types(found, number)
    makes = next((var.spec.dtype for var in call.outputs()), found)
    return makes if _category(makes) > _category(found) else found


def _reads_unrounded(call: Instr, own: Collection[Var]) -> bool:
    """Whether a call in half precision reads a member's number of another dtype, which kernels on a CPU do not round.

    A batching rule rounds it first.
    """
    dtype = _computed_in(call)
    numbers = [var for var in _numbers(call) if var in own and var.spec.device.type == "cpu"]
    return dtype in HALF and any(var.spec.dtype not in (dtype, torch.bool) for var in numbers)


def _category(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def _promoted(made: torch.dtype, asked: torch.dtype) -> bool:
    """Whether a rule has made a dtype, or computes in a wider one, as it does if arguments are of several dtypes."""
    return made is asked or (
        made.is_floating_point and asked.is_floating_point and made.itemsize > asked.itemsize
    )


def _has_rows(shape: Sequence[int], count: int) -> bool:
    return len(shape) > 2 and shape[0] == count  # log-sums have three


def _own_storages(calls: Sequence[Instr], given: set[int]) -> set[int]:
    """Return the storages whose content differs from member to member."""
    own, known = set(given), -1
    while known != (known := len(own)):
        for call in calls:
            if any(var.storage in own for var in call.inputs()):
                own.update(var.storage for var in (*call.outputs(), *call.writes))
    return own


def _parts(call: Instr) -> Iterator[Instr]:
    """Yield the calls to make in place of a call: those on lists have no batching rules."""
    grouped = 0 if row_of(call.op).kind == "optimizer" else group_size(call)
    yield from (at_places(call, [place]) for place in range(grouped)) if grouped else [call]


def _run(call: Instr, value: Callable[[Var], Any]) -> Any:
    """Run a call, on lists of one tensor by the op for a tensor; fused optimizers by their formulas."""
    args, kwargs = (
        map_vars(value, list(call.args)),
        {n: map_vars(value, one) for n, one in call.kwargs.items()},
    )
    name = call.op._schema.name
    if row_of(call.op).kind == "optimizer":
        return FORMULAS[name](*args, **kwargs)
    if name.startswith("aten::_foreach_") and not call.writes and group_size(call) == 1:
        alone = [one[0] if isinstance(one, (list, tuple)) and len(one) == 1 else one for one in args]
        if name in ("aten::_foreach_addcmul", "aten::_foreach_addcdiv"):
            *alone, kwargs["value"] = alone if len(alone) > 3 else [*alone, 1]
        if name == "aten::_foreach_norm":
            order, *dtype = alone[1:] or [2]
            return [_aten.linalg_vector_norm.default(alone[0], order, dtype=dtype[0] if dtype else None)]
        return [getattr(_aten, name.removeprefix("aten::_foreach_"))(*alone, **kwargs)]
    if call.op in _VIEWS:
        return args[0].reshape(args[1])
    return call.op(*args, **kwargs)
