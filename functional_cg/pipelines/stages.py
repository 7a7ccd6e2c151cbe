"""Run a loss once on fake tensors, and take it apart: what each stage computes forward and backward, and reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from .. import tree as pytree
from ..ambient.running import running
from ..errors import HostSyncError, LayoutError
from ..random.arguments import used_keys
from ..stages.program import Instr, Program, Var
from ..tensors.fake_mode import FakeMode, without_log
from ..tensors.op_table import row_of
from ..tensors.overlap import storage_key
from ..transforms.autodiff import refuse_vector, split_result
from ..transforms.microbatches import refuse_objects, refuse_whole_numbers, shared_key
from .tape import Tape

__all__ = ["Layout", "Rehearsal", "Stage", "rehearse"]

_LEAF = "a leaf Variable that requires grad is being used in an in-place operation"  # in torch's error

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


@dataclass(eq=False, slots=True)
class Stage:
    """What one stage of a loss computes for one micro-batch.

    Attributes:
      inputs: What it gets from the stage before.
      outputs: What it sends to the next one.
      results: The leaves of the loss' result that it computes, by position.
      behind: The gradients of its outputs, of those that have one, which the next stage sends.
      ahead: The gradients of its inputs, of those that have one, for the stage before.
      grads: The gradients of the parameters that it reads, by number.
      reads: Numbers of the parameters that it reads.
      forward: Its calls.
      inward: The calls of the backward that the gradients of the inputs need.
      weights: The other calls of the backward.
    """

    inputs: list[Var]
    outputs: list[Var]
    results: dict[int, Var] = field(default_factory=dict)
    behind: list[Var] = field(default_factory=list)
    ahead: list[Var] = field(default_factory=list)
    grads: dict[int, Var] = field(default_factory=dict)
    reads: set[int] = field(default_factory=set)
    forward: Program = field(init=False)
    inward: Program = field(init=False)
    weights: Program = field(init=False)


@dataclass(eq=False, slots=True)
class Rehearsal:
    """A loss taken apart.

    Attributes:
      tape: Its calls.
      stages: Its stages.
      params: The parameters.
      batch: The leaves of a micro-batch.
      key: Its key, or None.
      results: The leaves of its result.
      structure: Structure of its result.
    """

    tape: Tape
    stages: list[Stage]
    params: list[Var]
    batch: list[Var]
    key: Var | None
    results: list[Var]
    structure: pytree.Treedef


def rehearse(
    name: str,
    call: Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | None], Any],
    params: Sequence[Layout],
    batch: Sequence[Layout],
    device: torch.device,
    *,
    keyed: bool,
    several: bool,
    has_aux: bool,
    forward_only: bool = False,
) -> Rehearsal:
    """Run a loss and its gradients once on fake tensors.

    Args:
      name: Name of the loss.
      call: Calls it with leaves of the parameters and of a micro-batch, and a key.
      params: Layouts of the parameters.
      batch: Layouts of the leaves of a micro-batch.
      device: Where all of them are.
      keyed: Whether it gets a key.
      several: Whether there are several micro-batches, which must not draw from one key.
      has_aux: Whether it returns an auxiliary tree beside the value.
      forward_only: Whether it runs without its gradients, and may return any tree of tensors.
    """
    threads = torch.autograd.is_multithreading_enabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(running().rehearsal())
        if running().work is None:
            stack.enter_context(without_log())
            stack.enter_context(FakeMode())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autograd.set_multithreading_enabled(threads))
        tape = Tape()
        leaves, part = ([tape.fake(*one, device) for one in layouts] for layouts in (params, batch))
        key = tape.fake((2,), (1,), torch.int64, device) if keyed else None
        stack.enter_context(tape.recording())
        tape.give(leaves, "p")
        tape.give([*part, *([] if key is None else [key])], "d")
        with torch.set_grad_enabled(not forward_only):
            for leaf in () if forward_only else leaves:
                leaf.requires_grad_()
            with used_keys() as used:
                out = _called(name, partial(call, leaves, part, key))
            if several:
                _refuse_shared(name, tape, used)
            value, aux = (None, out) if forward_only else split_result(name, out) if has_aux else (out, None)
            refuse_objects(name, aux)
            if not forward_only:  # of an evaluation, what is counted is summed
                refuse_whole_numbers(name, aux)
                refuse_vector(name, value)
            stages = _stages(tape, value, leaves)
    results, structure = pytree.flatten(out)
    given = tape.vars(leaves), tape.vars(part), None if key is None else tape.var(key)
    found = Rehearsal(tape, stages, *given, tape.vars(results), structure)
    _Parts(name, found).assign()
    return found


def _refuse_shared(name: str, tape: Tape, used: Sequence[tuple[Tensor, Any]]) -> None:
    """Raise if the loss draws from a key that is the same for all micro-batches, with nothing of theirs folded in."""
    letters = tape.letters()
    for one in used:
        own = [letters.get(storage_key(part), set()) for part in one if isinstance(part, Tensor)]
        if not any(part & {"d", "s"} for part in own):
            raise shared_key(name)


def _called(name: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except DataDependentOutputException as error:  # outside of a trace, which says more
        raise HostSyncError.of(
            name,
            "asks for the value of a tensor on the host.",
            rows=[str(error)],
            why="Each rank runs the loss once on shapes, to find its stages.",
            fix="`torch.where(cond, a, b)`; or return the value in the auxiliary tree, `has_aux=True`.",
        ).with_traceback(error.__traceback__) from error
    except RuntimeError as error:
        if _LEAF not in str(error):
            raise
        raise _written(name, [str(error)]).with_traceback(error.__traceback__) from error


def _written(name: str, rows: Sequence[str]) -> LayoutError:
    return LayoutError.of(
        name,
        "writes in place into a tensor that it was given, or that came through a cut.",
        rows=rows,
        why="Stages run on several ranks, and each has its own copy.",
        fix="write into a copy, `x = x.clone()`.",
    )


def _stages(tape: Tape, value: Tensor | None, leaves: Sequence[Tensor]) -> list[Stage]:
    """Return the stages between the cuts, without their calls; run the backward of each, the last one first.

    Args:
      tape: The calls of the forward.
      value: The value of the loss; None for no backward.
      leaves: The parameters.
    """
    bounds = [([], []), *tape.cuts, ([], [])]
    stages = [Stage(tape.vars(before[1]), tape.vars(after[0])) for before, after in pairwise(bounds)]
    roots: list[Tensor] = [value] if value is not None and value.requires_grad else []
    seeds: list[Any] = [None]
    for number in reversed(range(len(stages))):
        if not roots:
            break
        tape.part = ("B", number)
        sent, arrived = bounds[number]
        wanted = [(one, source) for one, source in zip(arrived, sent, strict=True) if one.requires_grad]
        # The graph of what depends on parameters alone is shared by the stages that read it.
        grads = torch.autograd.grad(
            roots, [*(one for one, _ in wanted), *leaves], seeds, retain_graph=True, allow_unused=True
        )
        stages[number].grads = {i: tape.var(g) for i, g in enumerate(grads[len(wanted) :]) if g is not None}
        pairs = [(source, g) for (_, source), g in zip(wanted, grads, strict=False) if g is not None]
        stages[number].ahead = tape.vars(g for _, g in pairs)
        roots, seeds = [source for source, _ in pairs], [tape.like(g) for _, g in pairs]
        if number:
            stages[number - 1].behind = tape.give(seeds, "s")
    return stages


class _Parts:
    """Finds which calls belong to which stage.

    What depends on a stage's input, or on parameters and data together, belongs to the stage in which it stands. What
    depends on parameters alone, such as a cast, or on data alone, such as a mask, belongs to each stage that reads it.
    """

    def __init__(self, name: str, found: Rehearsal) -> None:
        self._name, self._found, self._calls = name, found, list(found.tape.calls)
        self._letters = found.tape.letters()
        self._home: dict[int, int] = {}  # by storage: the stage of what stays in its stage
        for number, stage in enumerate(found.stages):
            self._home.update({var.storage: number for var in (*stage.inputs, *stage.behind)})

    def assign(self) -> None:
        self._refuse_statistics()
        self._refuse_writes()
        self._refuse_jumps()
        found = self._found
        last = len(found.stages) - 1
        for position, result in enumerate(found.results):
            found.stages[self._home.get(result.storage, last)].results[position] = result
        for number, stage in enumerate(found.stages):
            self._fill(number, stage)

    def _refuse_statistics(self) -> None:
        """Refuse running statistics of a batch norm in training, which go from one micro-batch to the next."""
        rows = [_title(call) for call in self._calls if call.writes and row_of(call.op).statistics]
        if rows:
            raise LayoutError.of(
                self._name,
                "has a BatchNorm in training, with running statistics.",
                rows=rows,
                why="They go from one micro-batch to the next, and other stages are at other micro-batches.",
                fix="GroupNorm or LayerNorm; `track_running_stats=False`; or `apply(..., train=False)`.",
            )

    def _refuse_writes(self) -> None:
        """Refuse writes into what comes from outside: another stage, on another rank, would not see them."""
        made = {var.storage for call in self._calls for var in call.outputs()} - self._found.tape.given.keys()
        rows = [_title(call) for call in self._calls for var in call.writes if var.storage not in made]
        if rows:
            raise _written(self._name, rows)

    def _stays(self, call: Instr) -> bool:
        """Whether a call belongs to the stage in which it stands."""
        touched = (*call.inputs(), *call.outputs())
        return call.checks or any("s" in self._letters.get(var.storage, ()) for var in touched)

    def _refuse_jumps(self) -> None:
        rows = []
        for call in filter(self._stays, self._calls):
            _, number = self._found.tape.calls[call]
            for var in call.inputs():
                home = self._home.get(var.storage, number)
                if home != number and "s" in self._letters.get(var.storage, ()):
                    shape = list(var.spec.shape)
                    rows.append(f"{shape} of stage {home}  read by stage {number}, in {_title(call)}")
            for var in (*call.outputs(), *call.writes):
                if "s" in self._letters[var.storage]:
                    self._home.setdefault(var.storage, number)
        if rows:
            raise LayoutError.of(
                self._name,
                "hands a value to a later stage that does not pass the cuts in between.",
                rows=rows,
                why="Stages run on several ranks, and only what a cut returns is sent.",
                fix="cut it with the others, `x, y = pipe.cut((x, y))`.",
            )

    def _fill(self, number: int, stage: Stage) -> None:
        """Give a stage its calls, and what depends on parameters or data alone as far as they need it."""
        ends, grads = [*stage.outputs, *stage.results.values()], [*stage.ahead, *stage.grads.values()]
        forward = self._needed(("F", number), ends, ())
        backward = self._needed(("B", number), grads, forward)
        inward = set(_behind(backward, stage.ahead))
        if any(call.writes for call in backward):  # the order of reads and writes matters
            inward = set(backward)
        late = [call for call in backward if call not in inward]
        stage.weights = _part(f"weights of stage {number}", late, grads)
        soon = [call for call in backward if call in inward]
        stage.inward = _part(f"backward of stage {number}", soon, [*grads, *stage.weights.inputs])
        wanted = [*grads, *ends, *stage.weights.inputs, *stage.inward.inputs]
        stage.forward = _part(f"forward of stage {number}", forward, wanted)
        read = {*ends, *grads}.union(*(call.inputs() for call in (*forward, *backward)))
        stage.reads = {i for i, var in enumerate(self._found.params) if var in read}

    def _needed(self, part: tuple[str, int], ends: Iterable[Var], known: Sequence[Instr]) -> list[Instr]:
        """Return the calls of a part, and those that float and whose results they or the ends need."""
        parts = self._found.tape.calls
        last = max((place for place, call in enumerate(self._calls) if parts[call] == part), default=-1)
        before = [call for call in self._calls[: last + 1] if parts[call] == part or not self._stays(call)]
        keep = {call for call in before if parts[call] == part and self._stays(call)}
        return _behind(before, ends, keep, known)


def _part(name: str, calls: Sequence[Instr], wanted: Iterable[Var]) -> Program:
    """Return calls that are made together, once for each micro-batch, as a program of what is wanted of them."""
    made, read = dict[Var, None](), dict[Var, None]()
    for call in calls:
        read.update((var, None) for var in call.inputs() if var not in made)
        made.update((var, None) for var in call.outputs())
    ends = set(wanted)
    return Program(name, [], [], list(read), instrs=list(calls), outputs=[var for var in made if var in ends])


def _behind(
    calls: Sequence[Instr], ends: Iterable[Var], keep: Collection[Instr] = (), skip: Collection[Instr] = ()
) -> list[Instr]:
    """Return the calls that some variables depend on, and those to keep, in order."""
    used = set(ends)
    memory = {var.storage for var in used}
    out = []
    for call in reversed(calls):
        needed = not used.isdisjoint(call.outputs()) or any(var.storage in memory for var in call.writes)
        if (needed or call in keep) and call not in skip:
            out.append(call)
            used.update(call.inputs())
            memory.update(var.storage for var in call.inputs())
    return out[::-1]


def _title(call: Instr) -> str:
    return f"{call.op}" + (f", at {call.site}" if call.site else "")
