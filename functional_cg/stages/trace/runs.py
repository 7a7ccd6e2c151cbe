"""Trace a step: run the user's function on fake tensors twice, or three times if it changes Python objects.

The first run gives the program; the second is compared with it, and tells what the function reads on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from ... import tree as pytree
from ...ambient.running import tracing
from ...ambient.setting import canonical
from ...ambient.torch_modes import modes_now
from ...concurrency.garbage import new_objects, no_garbage_collection
from ...errors import FunctionalCGError, LayoutError
from ...pytree.treedef import order_diff
from ...random.host_generators import HostRandomness
from ...shards.coalescing import close_groups, open_groups
from ...state.boundary import entered, left, shown
from ...tensors.fake_mode import FakeMode, without_log
from ...tensors.overlap import storage_key
from ...tree import path_string
from ..program import Program
from ..watch.frames import Follower
from ..watch.host_reads import HostReads
from ..watch.host_watch import HostWatch
from .exceptions import ended_checkpoints, mapped, raised_at
from .host import HostGuard, refuse_changes, refuse_moved
from .recipe import Recipe
from .recorder import Recorder
from .results import copy_what_is_written, read_reports, read_result
from .strays import GradsOfConstants, are_kept, disown, refuse_kept, refuse_unfound
from .twice import another_run, another_start, refuse_cold

__all__ = ["trace"]

_WATCHES = 5  # runs at most, if other threads collect garbage in each


def _run(
    recipe: Recipe,
    checkpoint: Callable[[], None],
    runs: list[Recorder],
    reads: HostReads | None = None,
) -> Recorder:
    mode = FakeMode()
    follower = Follower(HostReads((), lambda: (set(), lambda: iter(()), False)) if reads is None else reads)
    recorder = Recorder(recipe, mode, checkpoint, follower)
    runs.append(recorder)
    program = recorder.program
    trees: list[Any] = []
    for state in recipe.states:
        leaves = []
        for path, spec in zip(state.treedef.paths(), state.specs, strict=True):
            name = path_string(path, state.name)
            leaf, var = recorder.fake(spec, name)
            leaves.append(leaf)
            program.slots.append(var)
            program.slot_names.append(name)
        trees.append(pytree.unflatten(state.treedef, entered(state.specs, leaves)))
    inputs = []
    for name, spec in zip(recipe.input_names, recipe.inputs, strict=True):
        leaf, var = recorder.fake(spec, name)
        inputs.append(leaf)
        program.inputs.append(var)
        recorder.copied.add(storage_key(leaf))
    declared = [constant for _, constant in recipe.constants]
    for name, constant in recipe.constants:
        recorder.declare(name, constant)
    follow = nullcontext() if reads is None else follower.following()
    guard = HostGuard(recorder.rules, recorder.value_of)
    with canonical(recorder.mesh, declared), without_log():
        with ended_checkpoints(), mode, recorder, guard, follow, tracing(recorder):
            result = recipe.apply(recipe.function, trees, inputs)
            if reads is not None:
                reads.returned(result)
            old = recipe.states[0] if recipe.donates else None
            result = shown(result) if old is None else left(old.specs, old.treedef, result)
    recorder.rules.refuse_what_was_caught()
    program.reserved = recorder.variables.count, recorder.variables.storages
    read_result(recipe, program, recorder.variable, result)
    recorder.supposed.refuse_written()
    read_reports(program, recorder.variables.of, recorder.work)
    return recorder


def _once_filled(
    recipe: Recipe, cold: Recorder, checkpoint: Callable[[], None], runs: list[Recorder]
) -> Recorder:
    """Return a run in which functions find what they remember: the given one unless it has filled caches."""
    kept = cold.release()
    if not are_kept(kept):
        return cold
    tables = [(kept[number](), var) for number, var in enumerate(cold.variables.standing)]
    if not disown(cold.program, cold.history.given, kept, cold.variables.standing):
        return cold
    warm = _run(recipe, checkpoint, runs)
    known = {id(table.tensor): warm.variables.of(table.tensor) for table in warm.tables}
    found = {twin: var for tensor, var in tables if (twin := known.get(id(tensor))) is not None}
    refuse_cold(cold.program, warm.program, found)
    return warm


def _watched(
    recipe: Recipe, first: Recorder, checkpoint: Callable[[], None], runs: list[Recorder]
) -> tuple[Recorder, HostReads, HostWatch]:
    """Trace a second time; return the recorder, and what the function read on the host."""
    tables = [table.tensor for table in first.tables]
    for _ in range(_WATCHES):
        with no_garbage_collection(), new_objects() as made:
            reads = HostReads([*(constant for _, constant in recipe.constants), *tables], made)
            for name, value in (("self", recipe.function), *recipe.objects):
                reads.handed(value, name)
            try:
                run = _run(recipe, checkpoint, runs, reads)
            except Exception as error:
                if difference := another_start(first.program, runs[-1].program):  # it explains the error
                    raise difference.error(recipe.name) from error
                raise
            disown(run.program, run.history.given, run.release(), run.variables.standing)
            entries, autocast = reads.finish(), reads.says_autocast
        if not (reads.disturbed and (reads.taken_from() or reads.changes_older())):
            break  # else what the step has made may pass for older
    halves = any(var.spec.dtype in (torch.float16, torch.bfloat16) for var in run.variables.standing)
    return run, reads, HostWatch(entries, ["autocast"] * autocast + ["halves"] * halves)


def agree(one: Recipe, other: Recipe) -> bool:
    """Whether a function makes the same calls and returns the same for two recipes; no kernel is launched."""
    randomness, runs, collecting = HostRandomness.read(), list[Recorder](), open_groups()
    try:
        with torch.inference_mode(False):
            first, second = (_run(recipe, lambda: None, runs).program for recipe in (one, other))
            return another_run(first, second) is None
    except Exception:  # whatever the function raises for the other one: its own trace says so
        return False
    finally:
        _clear(randomness, collecting, runs)


def _clear(randomness: HostRandomness, collecting: Any, runs: list[Recorder]) -> None:
    randomness.restore_own()
    close_groups(but=collecting)
    for run in runs:
        disown(run.program, run.history.given, run.release(), run.variables.standing)


def _refuse_another_order(recipe: Recipe, program: Program) -> None:
    """Raise if the new state has its keys in another order, in which the function would do something else.

    The next call gets them in the order of the old state.
    """
    if program.state_def is None:
        return
    old, *rest = recipe.states
    rows = order_diff(old.treedef, program.state_def, "state")
    turned = replace(recipe, states=(replace(old, treedef=program.state_def), *rest))
    if rows and not agree(recipe, turned):
        raise LayoutError.of(
            recipe.name,
            "returns a new state with its keys in another order, and depends on their order.",
            rows=rows,
            why="A state keeps the order in which it was created: the next call would not see the new one.",
            fix=f"return them in that order, `{{key: new[key] for key in {old.name}}}`; or read them by name.",
        )


def trace(recipe: Recipe, checkpoint: Callable[[], None] = lambda: None) -> tuple[Program, HostWatch]:
    """Trace a step twice on fake tensors, a third time if it changes Python objects; no kernel is launched.

    Args:
      recipe: What to trace.
      checkpoint: Called before each ATen call, where an exception does no harm.
    Returns:
      (program, watch): the recorded calls, and the host values that the second run read.
    Raises:
      FunctionalCGError: One class per mistake, see :mod:`functional_cg.errors`.
    """
    randomness, modes, runs = HostRandomness.read(), modes_now(), list[Recorder]()
    grads = GradsOfConstants(recipe.constants)
    collecting = open_groups()
    # Not a context manager: contextlib would discard our error if the user's function raises StopIteration.
    try:
        with torch.inference_mode(False):
            recorder = _run(recipe, checkpoint, runs)
            grads.refuse_change(recipe.name)
            recorder = _once_filled(recipe, recorder, checkpoint, runs)
            randomness.refuse_draws(recipe.name, lambda: _run(recipe, checkpoint, runs))
            refuse_kept(recipe.name, recorder.program, recorder.variables.standing, recorder.release())
            again, reads, watched = _watched(recipe, recorder, checkpoint, runs)
            if difference := another_run(recorder.program, again.program):
                raise difference.error(recipe.name)
            refuse_unfound(recorder.tables, again.tables, watched.identical, reads.memory.remembered)
            refuse_changes(recipe.name, modes, watched, reads)
            _refuse_another_order(recipe, recorder.program)
            if reads.changes_older():  # does it read what it has changed?
                _run(recipe, checkpoint, runs)
                refuse_moved(recipe.name, watched.differences())
    except FunctionalCGError as error:
        error.within(recipe.name, raised_at(error))
        raise
    except Exception as error:
        raise mapped(recipe, error) from error
    finally:
        grads.restore()
        _clear(randomness, collecting, runs)
    recorder.program.tables = [(table.name, table.tensor) for table in recorder.tables]
    recorder.blocks.fold()
    copy_what_is_written(recorder.program, recipe.input_names)
    watched.let_go()
    return recorder.program, watched
