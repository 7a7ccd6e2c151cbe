"""Split large values into blocks of rows, such as the float32 logits of a loss over many classes.

If a single value is larger than the available memory, no order of the calls helps. But most large values are computed
row by row: casts, a softmax over the classes, the gradient of a loss. Such calls run on one block of rows after the
other, and sums over the rows are added up over the blocks. A call that needs all rows, such as a product, gets the
blocks joined. Rows are those of a matrix: calls on values of more dimensions, such as logits [batch, time, classes],
run on such a view of them.

The results are those of the original calls, except for the order of summation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...state.arena import BufferSpec
from ..program import Instr, Var, highest_of, map_arguments, map_vars, written_storages
from .row_rules import (
    COPIES,
    DIM,
    FILLED,
    MEAN,
    PICKS,
    SUM,
    VIEWS,
    Rows,
    is_dense,
    is_half,
    name_of,
    rows_of,
    viewed,
)

__all__ = ["in_blocks"]

_aten = torch.ops.aten


def in_blocks(instrs: Sequence[Instr], large: int, blocks: int) -> list[Instr]:
    """Return the calls, with those on large values split into blocks of rows.

    Args:
      instrs: The calls; they are not changed.
      large: Bytes from which a value is large.
      blocks: How many blocks to split a value into; values whose rows cannot be split evenly stay whole.
    """
    return _Divided(_Flat(instrs, large).calls(), large, blocks).calls()


class _Flat:
    """Walks the calls and lets those by element, softmaxes, and writes to places take large values as matrices."""

    def __init__(self, instrs: Sequence[Instr], large: int) -> None:
        self._instrs, self._large = instrs, large
        self._index, _ = highest_of(instrs)
        self._written = written_storages(instrs)
        self._matrices: dict[Var, Var] = {}  # large values, as matrices
        self._names: dict[Var, Var] = {}  # for matrices that are views of those
        self._out: list[Instr] = []

    def calls(self) -> list[Instr]:
        for instr in self._instrs:
            if instr.outputs() and not self._names.keys().isdisjoint(instr.inputs()):
                args, kwargs = map_arguments(lambda var: self._names.get(var, var), instr)
                instr = replace(instr, args=args, kwargs=kwargs)
            if name_of(instr) in VIEWS and instr.inputs()[0] in self._matrices:
                self._view(instr)
            elif self._takes_matrices(instr):
                self._on_matrices(instr)
            else:
                self._out.append(instr)
            for var in instr.outputs():
                if len(var.spec.shape) == 2 and self._is_large(var) and is_dense(var):
                    self._matrices.setdefault(var, var)
        return self._read()

    def _is_large(self, var: Var) -> bool:
        return var.spec.nbytes >= self._large and var.storage not in self._written

    def _view(self, instr: Instr) -> None:
        """Know a view of a matrix whose rows stay what they are."""
        matrix, out = self._matrices[instr.inputs()[0]], instr.out
        self._out.append(instr)
        if out.spec.shape == matrix.spec.shape:
            self._names[out] = matrix
        elif len(out.spec.shape) > 2 and out.spec.shape[-1] == matrix.spec.shape[-1]:
            self._matrices[out] = matrix

    def _takes_matrices(self, instr: Instr) -> bool:
        out, name = instr.out, name_of(instr)
        if not isinstance(out, Var) or len(out.spec.shape) < 3 or not self._is_large(out) or instr.writes:
            return False
        place, last = DIM.get(name, len(instr.args)), len(out.spec.shape) - 1
        along_rows = place < len(instr.args) and instr.args[place] % (last + 1) == last
        if not (along_rows or instr.by_element or name in COPIES) or "memory_format" in instr.kwargs:
            return False
        values = [var for var in instr.inputs() if var.spec.shape]
        axes = slice(last if name in PICKS else None)
        return viewed(instr, out) is None and all(
            var.spec.shape[axes] == out.spec.shape[axes]
            and var.storage not in self._written
            and is_dense(var)
            for var in (*values, out)
        )

    def _on_matrices(self, instr: Instr) -> None:
        spec = instr.out.spec
        rows = spec.numel // spec.shape[-1]
        made = self._as(instr.out, (rows, spec.shape[-1]))

        def matrix(var: Var) -> Var:
            if not var.spec.shape:
                return var
            if var not in self._matrices:
                view = self._matrices[var] = self._as(var, (rows, var.spec.shape[-1]))
                self._out.append(Instr(_aten.view.default, (var, [*view.spec.shape]), {}, view, (), None))
            return self._matrices[var]

        args, kwargs = map_arguments(matrix, instr)
        if (place := DIM.get(name_of(instr))) is not None:
            args = (*args[:place], 1, *args[place + 1 :])
        self._out.append(replace(instr, args=args, kwargs=kwargs, out=made))
        self._out.append(Instr(_aten.view.default, (made, [*spec.shape]), {}, instr.out, (), instr.site))
        self._matrices[instr.out] = self._matrices[made] = made

    def _as(self, var: Var, shape: Sequence[int]) -> Var:
        """Return a variable for a value in another shape, in the same memory."""
        self._index += 1
        strides = torch.empty(shape, device="meta").stride()
        return replace(var, index=self._index, spec=replace(var.spec, shape=tuple(shape), stride=strides))

    def _read(self) -> list[Instr]:
        """Return the calls without views that nothing reads."""
        read: set[Var] = set()
        calls = []
        for instr in reversed(self._out):
            if name_of(instr) not in VIEWS or not read.isdisjoint(instr.outputs()):
                calls.append(instr)
                read.update(instr.inputs())
        return calls[::-1]


class _Divided:
    """Walks the calls and holds back those that run in blocks until one of their results is needed."""

    def __init__(self, instrs: Sequence[Instr], large: int, blocks: int) -> None:
        self._instrs, self._large, self._blocks = instrs, large, blocks
        self._index, self._storage = highest_of(instrs)
        self._written = written_storages(instrs)
        self._parts: dict[Var, list[Var]] = {}
        self._waiting: list[tuple[Instr, Rows]] = []
        self._out: list[Instr] = []
        rules = {instr: self._rule(instr) for instr in instrs}
        self._rules = {instr: rule for instr, rule in rules.items() if rule is not None}
        # Values needed whole: read by a call that is not split, or by one that reads more than its own rows.
        self._whole: set[Var] = set()
        for instr in instrs:
            rule = self._rules.get(instr)
            self._whole |= {var for var in instr.inputs() if rule is None or var not in rule.sliced}

    def calls(self) -> list[Instr]:
        for instr in self._instrs:
            rule = self._rules.get(instr)
            made = {var for waiting, _ in self._waiting for var in waiting.outputs()}
            if all(viewed(instr, var) not in (None, *made, *self._parts) for var in instr.outputs()):
                rule = None  # a view of what is there as a whole takes nothing
            summed = {var for waiting, rows in self._waiting if rows.sums for var in waiting.outputs()}
            read = {var.storage for waiting, _ in self._waiting for var in waiting.inputs()}
            needs = made if rule is None else {var for var in made if var in summed or var not in rule.sliced}
            if not needs.isdisjoint(instr.inputs()) or any(var.storage in read for var in instr.writes):
                self._flush()
            if rule is None:
                self._out.append(instr)
            else:
                self._waiting.append((instr, rule))
        self._flush()
        return self._out

    def _rule(self, instr: Instr) -> Rows | None:
        """Return how to run a call in blocks; None if it is small or cannot be split."""
        outputs = instr.outputs()
        values = (*outputs, *instr.inputs())
        if not outputs or max((var.spec.nbytes for var in values), default=0) < self._large:
            return None
        if any(var.storage in self._written for var in values):
            return None  # parts of it would not be written
        rule = rows_of(instr)
        if rule is None or not (rule.sums or all(map(is_dense, outputs))):
            return None
        rows = {var.spec.shape[0] for var in rule.sliced}
        rows |= set() if rule.sums else {var.spec.shape[0] for var in outputs if var.spec.shape}
        return rule if all(count % self._blocks == 0 and count for count in rows) else None

    def _flush(self) -> None:
        """Emit the waiting calls, block by block."""
        waiting, self._waiting = self._waiting, []
        for instr, rows in waiting:
            for var in () if rows.sums else _of_rows(instr):
                self._parts[var] = [self._some_rows(var, instr, block) for block in range(self._blocks)]
        sums: dict[Instr, list[Any]] = {instr: [] for instr, rows in waiting if rows.sums}
        for block in range(self._blocks):
            for instr, rows in waiting:
                part = self._part(instr, rows, block)
                self._out.append(part)
                if rows.sums:
                    sums[instr].append(part.out)
        for instr, rows in waiting:
            if rows.sums:
                self._out += self._added_up(instr, sums[instr])
                continue
            for var in _of_rows(instr):
                if var not in self._whole:
                    continue
                if viewed(instr, var) in self._whole:
                    self._out.append(instr)  # a view of what has just been joined
                else:
                    self._out.append(Instr(_aten.cat.default, (self._parts[var],), {}, var, (), instr.site))

    def _part(self, instr: Instr, rows: Rows, block: int) -> Instr:
        """Return a call restricted to the rows of one block."""
        names: dict[Var, Var] = {}
        for var in rows.sliced:
            names[var] = self._parts[var][block] if var in self._parts else self._slice(var, block)

        def new(var: Var) -> Var:
            return names.get(var, var)

        def made(var: Var) -> Var:
            if rows.sums:
                return self._fresh(_wide(var.spec))
            if var in self._parts:
                return self._parts[var][block]
            # A number beside rows is the same for each block.
            return var if block == self._blocks - 1 else self._fresh(var.spec)

        (args, kwargs), out = map_arguments(new, instr), map_vars(made, instr.out)
        name = name_of(instr)
        if name in VIEWS:
            args = (args[0], [*out.spec.shape])
        elif name in FILLED:
            args = (*args[: FILLED[name]], [*out.spec.shape], *args[FILLED[name] + 1 :])
        elif name == "nll_loss_forward" and rows.sums:
            args = (*args[:3], SUM, args[4])
        elif name in ("sum", "mean") and rows.sums:
            kwargs = {**kwargs, "dtype": out.spec.dtype}
            return replace(instr, op=_aten.sum.default, args=args, kwargs=kwargs, out=out)
        return replace(instr, args=args, kwargs=kwargs, out=out)

    def _spec_of_block(self, var: Var) -> BufferSpec:
        rows, *others = var.spec.shape
        return replace(var.spec, shape=(rows // self._blocks, *others))

    def _slice(self, var: Var, block: int) -> Var:
        spec = self._spec_of_block(var)
        rows = spec.shape[0]
        offset = var.offset + block * rows * var.spec.stride[0]
        self._index += 1
        part = replace(var, index=self._index, spec=spec, offset=offset, fills=False)
        self._out.append(
            Instr(_aten.slice.Tensor, (var, 0, block * rows, (block + 1) * rows), {}, part, (), None)
        )
        return part

    def _added_up(self, instr: Instr, parts: Sequence[Any]) -> list[Instr]:
        """Return calls that add up the sums of the blocks to sums over all rows."""
        calls: list[Instr] = []

        def total(values: Sequence[Var], out: Var) -> None:
            for number, value in enumerate(values[1:]):
                before = values[0] if number == 0 else calls[-1].out
                after = out if number == len(values) - 2 else self._fresh(out.spec)
                calls.append(Instr(_aten.add.Tensor, (before, value), {}, after, (), instr.site))

        if isinstance(instr.out, Var):
            made, ends, dtype = instr.out, list[Instr](), instr.out.spec.dtype
            if is_half(made.spec):
                out, made = made, self._fresh(_wide(made.spec))
                ends.append(Instr(_aten._to_copy.default, (made,), {"dtype": dtype}, out, (), instr.site))
            if name_of(instr) == "mean":
                out, made = made, self._fresh(made.spec)
                count = instr.inputs()[0].spec.numel
                ends.append(Instr(_aten.div.Tensor, (made, count), {}, out, (), instr.site))
            total(parts, made)
            return [*calls, *reversed(ends)]
        loss, weight = instr.out
        total([part[1] for part in parts], weight)
        mean = instr.args[3] == MEAN
        out = self._fresh(loss.spec) if mean else loss
        total([part[0] for part in parts], out)
        if mean:
            calls.append(Instr(_aten.div.Tensor, (out, weight), {}, loss, (), instr.site))
        return calls

    def _some_rows(self, var: Var, instr: Instr, block: int) -> Var:
        """Return a variable for one block of a result; a view shares the memory of what it is a view of."""
        part = self._fresh(self._spec_of_block(var))
        source = viewed(instr, var)
        if source is None:
            return part
        storage = self._parts[source][block].storage if source in self._parts else source.storage
        return replace(part, storage=storage, fills=False)

    def _fresh(self, spec: BufferSpec) -> Var:
        self._index, self._storage = self._index + 1, self._storage + 1
        return Var(self._index, spec, self._storage, 0, True)


def _of_rows(instr: Instr) -> list[Var]:
    """Return the results of a call that runs in blocks, without the weight that a loss of each row returns, too."""
    return [var for var in instr.outputs() if var.spec.shape]


def _wide(spec: BufferSpec) -> BufferSpec:
    """Return the spec in which sums of blocks are added up: single precision for halves, which round or overflow."""
    return replace(spec, dtype=torch.float32) if is_half(spec) else spec
