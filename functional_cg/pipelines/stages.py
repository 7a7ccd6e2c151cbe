"""Run a loss once on fake tensors, and take it apart: what each stage computes forward and backward, and reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from .. import tree as pytree
from ..ambient.rehearsal import rehearsing, traced
from ..errors import HostSyncError, LayoutError
from ..random.arguments import used_keys
from ..tensors.fake_mode import FakeMode, without_log
from ..tensors.op_table import row_of
from ..tensors.overlap import storage_key
from ..transforms.autodiff import refuse_vector, split_result
from ..transforms.microbatches import refuse_objects, refuse_whole_numbers, shared_key
from .tape import Call, Part, Tape

__all__ = ["Layout", "Rehearsal", "Stage", "rehearse"]

_LEAF = "a leaf Variable that requires grad is being used in an in-place operation"  # in torch's error

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


@dataclass(eq=False, slots=True)
class Stage:
    """What one stage of a loss computes for one micro-batch, on the tensors of a tape.

    Attributes:
      inputs: What it gets from the stage before.
      outputs: What it hands to the next one.
      forward: Its calls.
      results: The leaves of the loss' result that it computes, by position.
      behind: For each output, its gradient, which the next stage sends; None if it has none.
      ahead: For each input, the gradient for the stage before; None if it has none.
      inward: The calls of the backward that the gradients of the inputs need.
      weights: The other calls of the backward.
      grads: The gradients of the parameters that it reads, by number.
      reads: Numbers of the parameters that it reads.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    forward: Part = field(default_factory=Part)
    results: dict[int, Tensor] = field(default_factory=dict)
    behind: list[Tensor | None] = field(default_factory=list)
    ahead: list[Tensor | None] = field(default_factory=list)
    inward: Part = field(default_factory=Part)
    weights: Part = field(default_factory=Part)
    grads: dict[int, Tensor] = field(default_factory=dict)
    reads: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Rehearsal:
    """A loss taken apart.

    Attributes:
      tape: Its calls.
      stages: Its stages.
      params: The tensors that stand for the parameters.
      batch: Those for the leaves of a micro-batch.
      key: That for its key, or None.
      results: The leaves of its result.
      structure: Structure of its result.
    """

    tape: Tape
    stages: list[Stage]
    params: list[Tensor]
    batch: list[Tensor]
    key: Tensor | None
    results: list[Tensor]
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
        stack.enter_context(rehearsing())
        if not traced():
            stack.enter_context(without_log())
            stack.enter_context(FakeMode())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autograd.set_multithreading_enabled(threads))
        tape = Tape()

        def made(layouts: Sequence[Layout]) -> list[Tensor]:
            return [tape.fake(shape, stride, dtype, device) for shape, stride, dtype in layouts]

        stack.enter_context(tape.recording())
        leaves, part = made(params), made(batch)
        key = tape.fake((2,), (1,), torch.int64, device) if keyed else None
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
            if value is None:
                stages = _stages(tape)
            else:
                refuse_vector(name, value)
                stages = _taken_apart(tape, value, leaves)
    found = Rehearsal(tape, stages, leaves, part, key, *pytree.flatten(out))
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


def _stages(tape: Tape) -> list[Stage]:
    """Return the stages between the cuts, without their calls."""
    bounds = [([], []), *tape.cuts, ([], [])]
    return [Stage(before[1], after[0]) for before, after in pairwise(bounds)]


def _taken_apart(tape: Tape, value: Tensor, leaves: Sequence[Tensor]) -> list[Stage]:
    """Run the backward of each stage, the last one first; return the stages, without their calls."""
    stages = _stages(tape)
    roots, seeds = [value] if value.requires_grad else [], [None]
    for number, stage in reversed(list(enumerate(stages))):
        tape.part = ("B", number)
        wanted = [one for one in stage.inputs if one.requires_grad]
        grads: list[Tensor | None] = [None] * (len(wanted) + len(leaves))
        if roots:
            # The graph of what depends on parameters alone is shared by the stages that read it.
            grads = list(
                torch.autograd.grad(roots, [*wanted, *leaves], seeds, retain_graph=True, allow_unused=True)
            )
        of_inputs = iter(grads[: len(wanted)])
        stage.ahead = [next(of_inputs) if one.requires_grad else None for one in stage.inputs]
        stage.grads = {i: g for i, g in enumerate(grads[len(wanted) :]) if g is not None}
        if number:
            before = stages[number - 1]
            before.behind = [None if g is None else tape.like(g) for g in stage.ahead]
            tape.give([g for g in before.behind if g is not None], "s")
            pairs = [(one, g) for one, g in zip(before.outputs, before.behind, strict=True) if g is not None]
            roots, seeds = [one for one, _ in pairs], [g for _, g in pairs]  # type: ignore[misc]
    return stages


class _Parts:
    """Finds which calls belong to which stage.

    What depends on a stage's input, or on parameters and data together, belongs to the stage in which it stands. What
    depends on parameters alone, such as a cast, or on data alone, such as a mask, belongs to each stage that reads it.
    """

    def __init__(self, name: str, found: Rehearsal) -> None:
        self._name, self._found, self._calls = name, found, found.tape.calls
        self._letters = found.tape.letters()
        self._home: dict[int, int] = {}  # by storage: the stage of what stays in its stage
        for number, stage in enumerate(found.stages):
            arriving = [*stage.inputs, *(g for g in stage.behind if g is not None)]
            self._home.update({storage_key(one): number for one in arriving})

    def assign(self) -> None:
        self._refuse_statistics()
        self._refuse_writes()
        self._refuse_jumps()
        found = self._found
        last = len(found.stages) - 1
        for position, result in enumerate(found.results):
            home = self._home.get(storage_key(result), last)
            found.stages[home].results[position] = result
        for number, stage in enumerate(found.stages):
            self._fill(number, stage)

    def _refuse_statistics(self) -> None:
        """Refuse running statistics of a batch norm in training, which go from one micro-batch to the next."""
        rows = [str(call) for call in self._calls if call.written and row_of(call.op).statistics]
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
        given = self._found.tape.given
        made = {storage_key(one) for call in self._calls for one in call.made} - given.keys()
        rows = [str(call) for call in self._calls for one in call.written if storage_key(one) not in made]
        if rows:
            raise _written(self._name, rows)

    def _stays(self, call: Call) -> bool:
        """Whether a call belongs to the stage in which it stands."""
        touched = (*call.read, *call.made)
        return not (call.made or call.written) or any(
            "s" in self._letters.get(storage_key(one), ()) for one in touched
        )

    def _refuse_jumps(self) -> None:
        rows = []
        for call in self._calls:
            if not self._stays(call):
                continue
            number = call.part[1]
            for one in call.read:
                home = self._home.get(storage_key(one), number)
                if home != number and "s" in self._letters.get(storage_key(one), ()):
                    rows.append(f"{list(one.shape)} of stage {home}  read by stage {number}, in {call}")
            for one in (*call.made, *call.written):
                if "s" in self._letters[storage_key(one)]:
                    self._home.setdefault(storage_key(one), number)
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
        ends = [*stage.outputs, *stage.results.values()]
        forward = self._needed(("F", number), ends, ())
        ahead = [g for g in stage.ahead if g is not None]
        backward = self._needed(("B", number), [*ahead, *stage.grads.values()], forward)
        inward = set(_behind(backward, ahead))
        if any(call.written for call in backward):  # the order of reads and writes matters
            inward = set(backward)
        wanted = set(map(id, (*ahead, *stage.grads.values())))
        stage.weights = Part([call for call in backward if call not in inward], wanted)
        stage.inward = Part([call for call in backward if call in inward], wanted.union(stage.weights.read))
        wanted.update(map(id, ends), stage.inward.read, stage.weights.read)
        stage.forward = Part(forward, wanted)
        read = {id(one) for call in (*forward, *backward) for one in call.read}
        read |= {id(one) for one in (*ends, *ahead, *stage.grads.values())}
        stage.reads = {i for i, one in enumerate(self._found.params) if id(one) in read}

    def _needed(self, part: tuple[str, int], ends: Iterable[Tensor], known: Sequence[Call]) -> list[Call]:
        """Return the calls of a part, and those that float and whose results they or the ends need."""
        own = [place for place, call in enumerate(self._calls) if call.part == part and self._stays(call)]
        last = max((p for p, call in enumerate(self._calls) if call.part == part), default=-1)
        skip, keep = set(known), {self._calls[place] for place in own}
        return _behind(
            [call for call in self._calls[: last + 1] if call in keep or not self._stays(call)],
            ends,
            keep,
            skip,
        )


def _behind(
    calls: Sequence[Call],
    ends: Iterable[Tensor],
    keep: Iterable[Call] = (),
    skip: Iterable[Call] = (),
) -> list[Call]:
    """Return the calls that some tensors depend on, and those to keep, in order."""
    keep, skip = set(keep), set(skip)
    used = {id(one) for one in ends}
    memory = {storage_key(one) for one in ends}
    out = []
    for call in reversed(calls):
        needed = any(id(one) in used for one in call.made)
        needed |= any(storage_key(one) in memory for one in call.written)
        if (needed or call in keep) and call not in skip:
            out.append(call)
            used |= {id(one) for one in call.read}
            memory |= {storage_key(one) for one in call.read}
    return out[::-1]
