"""Complete a program once the step has returned: its results, its reports, the inputs that it writes.

Results are tensors, by their variables; besides them, only immutable values are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor

from ... import tree as pytree
from ...ambient.running import OwnWork
from ...call.signature import new_state_and_metrics
from ...errors import ForeignTensorError, LayoutError, SideEffectError
from ...state.arena import BufferSpec
from ...state.boundary import held, sharding_fix
from ...tree import KeyPath, Treedef, path_string, structure_diff
from ..passes.changes import Fresh
from ..program import Application, Instr, Program, Var, written_storages
from .recipe import Recipe

__all__ = ["copy_what_is_written", "read_reports", "read_result", "refuse_new_state"]

# Types that define no hash but are immutable, or that nobody would mutate.
_ATOMS = (torch.dtype, torch.layout, torch.memory_format, type, type(None), FunctionType, BuiltinFunctionType)


def read_result(
    recipe: Recipe, program: Program, variable: Callable[[KeyPath, Tensor, str], Var], result: Any
) -> None:
    """Note in a program what the function returned.

    Args:
      recipe: What was traced.
      program: The program.
      variable: Returns the variable of a tensor, given its key path and the name of its tree.
      result: What the function returned.
    Raises:
      FunctionalCGError: If the new state is unlike the old one, or if a result cannot leave a step.
    """
    if recipe.donates:
        new_state, result = new_state_and_metrics(recipe.name, result)
        old = recipe.states[0]
        leaves, treedef = pytree.flatten(new_state)
        refuse_new_state(recipe.name, old.treedef, old.specs, treedef, leaves)
        program.state_def = treedef
        program.new_state = [
            variable(path, held(leaf), "state") for path, leaf in zip(treedef.paths(), leaves, strict=True)
        ]
    leaves, program.output_def = pytree.flatten(result)
    program.output_paths = program.output_def.paths()
    _refuse_unreturnable(recipe.name, program.output_paths, leaves)
    program.outputs = [
        variable(path, leaf, "metrics") if isinstance(leaf, Tensor) else leaf
        for path, leaf in zip(program.output_paths, leaves, strict=True)
    ]


def read_reports(program: Program, var_of: Callable[[Tensor], Var | None], work: OwnWork) -> None:
    """Note in a program what calls of the library reported.

    Args:
      program: The program.
      var_of: Returns the variable of a tensor, or None.
      work: What modules' functions and optimizers reported.
    """
    for original, name, by_mode, parts, buffers in work.applied:
        written = tuple(var for var in map(var_of, buffers) if var is not None)
        program.applications.append(Application(original, name, by_mode, parts, written))
    program.warnings = work.warnings
    for trees in work.replaced:
        program.replaced.append([])
        for part in trees:
            pairs = [(var_of(held(old)), var_of(held(new))) for old, new in part]
            program.replaced[-1].append([(old, new) for old, new in pairs if old and new])


def copy_what_is_written(program: Program, names: Sequence[str]) -> None:
    """Let a program that writes some of its inputs or literals in place write copies of them.

    Staged inputs stay as the call passed them, and literals as they are: several runs, as a warm-up and a replay, start
    from the same values.

    Args:
      program: The program.
      names: Names of its inputs.
    """
    written, fresh = written_storages(program.instrs), Fresh(program)

    def staged(var: Var) -> Var:
        source = fresh.like(var)
        copy = Instr(torch.ops.aten.clone.default, (source,), {}, var, (), None, inner=True)
        program.instrs.insert(0, copy)
        return source

    for place, (name, var) in enumerate(zip(names, program.inputs, strict=True)):
        if var.storage in written:
            program.inputs[place] = staged(var)
            program.copied.append(name)
    for one in program.constants:
        if one.var.storage in written:
            one.var = staged(one.var)


def _refuse_unreturnable(function: str, paths: Sequence[KeyPath], leaves: Sequence[Any]) -> None:
    """Refuse arrays and mutable objects among the results: replay would return the same one each time.

    Raises:
      ForeignTensorError: For numpy arrays.
      SideEffectError: For other mutable objects.
    """
    named = zip(paths, leaves, strict=True)
    others = [(path_string(path, "metrics"), leaf) for path, leaf in named if not isinstance(leaf, Tensor)]
    arrays = [one for one in others if hasattr(one[1], "__array__") and hasattr(one[1], "flags")]
    if arrays:
        raise ForeignTensorError.of(
            function,
            "returns an array that is not a tensor of the step.",
            rows=[f"{name}  expected a tensor   got {type(leaf).__name__}" for name, leaf in arrays],
            why="Replay would return the same array each time.",
            fix="pass it as an input and return that; or leave it outside of the step.",
        )
    changeable = [(name, type(leaf).__name__) for name, leaf in others if not _is_fixed(leaf)]
    if changeable:
        raise SideEffectError.of(
            function,
            "returns an object that can change.",
            rows=[f"{name}  expected a tensor or a plain value   got {kind}" for name, kind in changeable],
            why="Replay would return the same object each time: what one call's result is given, all would have.",
            fix="return tensors, numbers and strings, in dicts, lists and tuples; make the object of them in the loop.",
        )


def _is_fixed(value: Any) -> bool:
    """Whether a value is immutable: atomic, or of a type that defines a hash, as immutable values do."""
    if isinstance(value, _ATOMS):
        return True
    if not any("__hash__" in vars(owner) for owner in type(value).__mro__[:-1]):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True


def refuse_new_state(
    function: str, old_def: Treedef, old: Sequence[BufferSpec], new_def: Treedef, new: Sequence[Any]
) -> None:
    """Raise if the new state differs from the old one in structure, shape, dtype or device.

    Raises:
      LayoutError: Listing all differences.
    """
    rows = structure_diff(old_def, new_def, "state")
    if not rows:
        for path, spec, leaf in zip(old_def.paths(), old, new, strict=True):
            got = BufferSpec.of(leaf) if isinstance(leaf, Tensor) else None
            if got is None or not spec.same_layout(got):
                rows.append(
                    f"{path_string(path, 'state')}  expected {spec}   got {got or type(leaf).__name__}"
                )
    if rows:
        raise LayoutError.of(
            function,
            "returns a new state that is unlike the old one.",
            rows=rows,
            why="The new state is written into the memory of the old one.",
            fix=(sharding_fix(old, new) if old_def == new_def else _structure_fix(old_def, new_def))
            or _dtype_fix(old_def, old, new_def, new)
            or "return each leaf with its old shape, dtype and device; results of another kind belong in `metrics`.",
        )


def _structure_fix(old: Treedef, new: Treedef) -> str:
    if new.is_leaf and not old.is_leaf:
        return "the state comes first, `return state, metrics`."
    part = next((str(key) for key, child in zip(old.keys, old.children, strict=True) if child == new), "")
    if part:
        name = part.strip(".[]'")
        return f"return the whole state, `state.replace({name}=...)`."
    more = [str(key) for key in new.keys if key not in old.keys] if new.kind is old.kind else []
    if more:
        return f"`state{more[0]}` has to be there before the first call; or return it in `metrics`."
    place, kind = _other_sequence(old, new)
    return (
        f"return it as it was, `state{place}` as `{kind}(...)`; `torch._foreach_` ops return tuples."
        if kind
        else ""
    )


def _other_sequence(old: Treedef, new: Treedef) -> tuple[str, str]:
    """Return where a tuple has become a list, or a list a tuple, and which it was; if there is none, ("", "")."""
    if old.kind is not None and {old.kind, new.kind} == {list, tuple}:
        return "", old.kind.__name__
    if old.kind is not new.kind or old.keys != new.keys:
        return "", ""
    rows = zip(old.keys, old.children, new.children, strict=True)
    found = next(((key, *_other_sequence(one, two)) for key, one, two in rows if one != two), ("", "", ""))
    return f"{found[0]}{found[1]}", found[2]


def _dtype_fix(old_def: Treedef, old: Sequence[BufferSpec], new_def: Treedef, new: Sequence[Any]) -> str:
    if old_def != new_def:
        return ""
    for path, spec, leaf in zip(old_def.paths(), old, new, strict=True):
        if not isinstance(leaf, Tensor):
            name = path_string(path, "state")
            return f"return a tensor as `{name}`, computed from the old one, such as `{name} + 1`."
        if leaf.dtype != spec.dtype and leaf.shape == spec.shape:
            name = path_string(path, "state")
            return (
                f"begin with it in {leaf.dtype}, before the first call; or return `.to({spec.dtype})` as `{name}`; "
                "results of another kind belong in `metrics`."
            )
    return ""
