"""Products that are summed become one product: of all their rows, one after another.

What is applied at each step of a loop gets a gradient from each, and autograd adds them up: the sum of ``g.T @ x`` over
the steps is ``cat(gs).T @ cat(xs)``. Each of these products writes a matrix of the weight's size, and each sum reads
two; the product of all rows writes one. It pays where a product has few rows, as in a recurrent network.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...state.arena import BufferSpec
from ..fx_passes.canonical import CAST
from ..lifetimes import peak_bytes, storage_bytes
from ..program import Instr, Program, Var, live, written_storages
from .changes import Fresh

__all__ = ["join_summed_products"]

_ADD = torch.ops.aten.add.Tensor
_MM = torch.ops.aten.mm.default
_T = torch.ops.aten.t.default
_CAT = torch.ops.aten.cat.default
# Casts of which each value, and each sum, of the first dtype is one of the second: the sum may be cast as a whole. Not
# those of float16, whose range a sum of few products leaves.
_WIDER = frozenset(
    {
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.float32, torch.float64),
        (torch.complex64, torch.complex128),
    }
)
# What the peak may grow by, since rows are kept until the last of them is there: this part of it, or these bytes.
_MORE, _FEW = 0.05, 2**20


@dataclass(frozen=True, slots=True)
class _Product:
    """A product that is added to others.

    Attributes:
      call: The product, [height, rows] by [rows, width].
      term: What is added: the product, or a transpose or a wider dtype of it.
      turned: Whether it is the transpose.
    """

    call: Instr
    term: Var
    turned: bool

    @property
    def kind(self) -> tuple[Any, ...]:
        """What is equal for products that one can compute: all but the number of rows."""
        made = self.call.out.spec
        return made.shape, made.dtype, made.device, self.turned, self.term.spec.dtype

    @property
    def stride(self) -> tuple[int, ...]:
        """The strides of a sum of such products alone."""
        _, width = self.call.out.spec.shape
        return (1, width) if self.turned else (width, 1)

    @property
    def rows(self) -> int:
        return int(self.call.args[0].spec.shape[1])


def join_summed_products(program: Program) -> None:
    """Rewrite a program in place so that products that are summed are one product, where it moves fewer bytes.

    Args:
      program: A rewritten program, whose calls write over no temporary that they cover.
    """
    results = [*program.results, *program.new_state, *(new for _, new in program.updates)]
    sums = _Sums(program, results)
    found = {root: [group for group in sums.groups(root) if _pays(group)] for root in sums.roots()}
    if not any(found.values()):
        return
    joined, _ = live(sums.joined(found), results)
    kept = {var.storage for var in results}
    before, after = (peak_bytes(one, kept, storage_bytes(one)) for one in (program.instrs, joined))
    if after - before <= max(_MORE * before, _FEW):
        program.instrs = joined


def _pays(group: Sequence[_Product]) -> bool:
    """Whether to gather the rows moves fewer bytes than to read and write a matrix for each product."""
    height, width = group[0].call.out.spec.shape
    rows = sum(product.rows for product in group)
    return bool(rows * (height + width) < (len(group) - 1) * height * width)


class _Sums:
    """The sums of a program, each with all its terms: what nothing else reads is a part of the sum that reads it."""

    def __init__(self, program: Program, results: Sequence[Var]) -> None:
        self._instrs = program.instrs
        self._makers = {var: instr for instr in program.instrs for var in instr.outputs()}
        self._reads = Counter(results)
        self._reads.update(var for instr in program.instrs for var in instr.inputs())
        self._written = written_storages(program.instrs)
        self._fresh = Fresh(program)

    def roots(self) -> list[Var]:
        """Return the sums that are no part of another one."""
        sums = [instr for instr in self._instrs if _is_sum(instr)]
        parts = {var for instr in sums for var in instr.inputs() if self._is_part(var)}
        return [instr.out for instr in sums if instr.out not in parts]

    def groups(self, root: Var) -> list[list[_Product]]:
        """Return the products among the terms of a sum, those together that one product can compute."""
        groups: dict[Any, list[_Product]] = defaultdict(list)
        for term in self._terms(root):
            if (product := self._product(term)) is not None:
                groups[product.kind].append(product)
        stride = root.spec.stride
        return [group for group in groups.values() if len(group) > 1 and group[0].stride == stride]

    def joined(self, found: dict[Var, list[list[_Product]]]) -> list[Instr]:
        """Return the program's calls, with one product for each group where their sum is complete."""
        out: list[Instr] = []
        for instr in self._instrs:
            groups = found.get(instr.out, ()) if _is_sum(instr) else ()
            gone = {product.term for group in groups for product in group}
            left = [term for term in self._terms(instr.out) if term not in gone] if groups else []
            for group in groups:
                out += self._as_one(group, instr)
                left.append(out[-1].out)
            if not groups:
                out.append(instr)
            elif len(left) == 1:
                # The last call makes the sum, in the memory in which it made its own.
                for one in out[-1].inputs() if out[-1].is_view else ():
                    one.storage = instr.out.storage
                out[-1] = replace(out[-1], out=instr.out)
            else:
                out += self._added(instr, left)
        return out

    def _terms(self, root: Var) -> list[Var]:
        """Return what a sum adds up: a part of it counts as its own terms."""
        terms, waiting = list[Var](), [root]
        while waiting:
            one = waiting.pop()
            if one is root or self._is_part(one):
                waiting += reversed(self._makers[one].inputs())
            else:
                terms.append(one)
        return terms

    def _is_part(self, var: Var) -> bool:
        """Whether a variable is a sum that only a later one reads, which can add the terms as they still are there."""
        made = self._makers.get(var)
        if made is None or self._reads[var] != 1 or not _is_sum(made):
            return False
        return self._written.isdisjoint(term.storage for term in made.inputs())

    def _product(self, term: Var) -> _Product | None:
        """Return the product that a term is; None if it is none, or something else reads or writes it."""
        turned, var = False, term
        while self._reads[var] == 1 and var in self._makers:
            call = self._makers[var]
            touched = {one.storage for one in (*call.inputs(), var)}
            if not touched.isdisjoint(self._written):
                return None
            if call.op is _MM:
                return _Product(call, term, turned)
            if call.op is not _T and not _casts(call):
                return None
            turned ^= call.op is _T
            (var,) = call.inputs()
        return None

    def _as_one(self, group: Sequence[_Product], root: Instr) -> Iterator[Instr]:
        """Yield the calls that compute the sum of a group."""
        call = group[0].call

        def make(op: Any, args: Any, shape: Sequence[int], **kwargs: Any) -> Instr:
            dtype = kwargs.get("dtype", call.out.spec.dtype)
            spec = BufferSpec(tuple(shape), (shape[1], 1), dtype, call.out.spec.device)
            var = self._fresh.like(call.out, spec=spec, offset=0, fills=True)
            return replace(call, op=op, args=args, kwargs=kwargs, out=var, backward=root.backward)

        height, width = call.out.spec.shape
        rows = sum(product.rows for product in group)
        lefts, rights = zip(*(product.call.args for product in group), strict=True)
        turned = [self._makers.get(left) for left in lefts]
        if all(one is not None and one.op is _T for one in turned):
            gathered = make(_CAT, ([one.args[0] for one in turned if one is not None], 0), (rows, height))
            left = self._turned(gathered)
        else:
            gathered = left = make(_CAT, (list(lefts), 1), (height, rows))
        yield gathered
        if left is not gathered:
            yield left
        yield (right := make(_CAT, (list(rights), 0), (rows, width)))
        yield (made := make(_MM, (left.out, right.out), (height, width)))
        if group[0].term.spec.dtype != call.out.spec.dtype:
            yield (made := make(CAST, (made.out,), (height, width), dtype=group[0].term.spec.dtype))
        if group[0].turned:
            yield self._turned(made)

    def _added(self, root: Instr, terms: Sequence[Var]) -> Iterator[Instr]:
        """Yield the calls that add terms up to what a sum makes."""
        total = terms[0]
        for term in terms[1:-1]:
            yield (call := replace(root, args=(total, term), out=self._fresh.like(root.out)))
            total = call.out
        yield replace(root, args=(total, terms[-1]))

    def _turned(self, call: Instr) -> Instr:
        made = call.out
        spec = replace(made.spec, shape=made.spec.shape[::-1], stride=made.spec.stride[::-1])
        turned = self._fresh.like(made, spec=spec, storage=made.storage)
        return replace(call, op=_T, args=(made,), kwargs={}, out=turned)


def _casts(instr: Instr) -> bool:
    """Whether a call makes the dtype wider, and does nothing else."""
    if instr.op is not CAST or not instr.kwargs.keys() <= {"dtype", "layout", "device"}:
        return False
    given, made = instr.args[0].spec, instr.out.spec
    return (given.dtype, made.dtype) in _WIDER and bool(replace(made, dtype=given.dtype) == given)


def _is_sum(instr: Instr) -> bool:
    """Whether a call adds two tensors of one shape and dtype, as autograd adds gradients."""
    if instr.op is not _ADD or instr.kwargs or len(instr.inputs()) != 2:
        return False
    made, *given = (var.spec for var in (instr.out, *instr.inputs()))
    return all(one.shape == made.shape and one.dtype == made.dtype for one in given)
