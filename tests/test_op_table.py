"""The op table names ops that exist, and is asked by name: of torch and ours, not of a user's op of the same name."""

from __future__ import annotations

import fnmatch

import pytest
import torch

from functional_cg.tensors import op_table
from functional_cg.tensors.aten import written_arguments
from functional_cg.tensors.op_table import OpRow, row_of

aten = torch.ops.aten


def test_each_name_is_an_op() -> None:
    """Torch renames ops now and then; a row that nothing finds says nothing."""
    full = [one.split(".")[0].split("::") for one in torch._C._dispatch_get_all_op_names()]
    ops = {name.rstrip("_") for space, name in full if space in ("aten", "prims", "fcg")}
    for pattern, *_ in op_table._rows():
        assert fnmatch.filter(ops, pattern), pattern


@pytest.mark.parametrize(
    ("op", "row"),
    [
        (aten.mm.default, OpRow("matmul", product=True, library=True, multiplies=True, once=True)),
        (aten.addmm_.default, OpRow("matmul", product=True, library=True, multiplies=True, once=True)),
        (aten.scatter_add.default, OpRow("indexing", bounded=True)),
        (
            aten.native_layer_norm_backward.default,
            OpRow("normalization", cancels=True, one_pass=True, shapeless=True),
        ),
        (aten.bernoulli_.float, OpRow("random", checks=True)),
        (aten.exp.default, OpRow()),
    ],
    ids=str,
)
def test_an_op_has_what_all_of_its_rows_say(op: object, row: OpRow) -> None:
    assert row_of(op) == row


def test_an_op_of_another_library_has_no_row() -> None:
    with torch.library._scoped_library("functional_cg_tests", "FRAGMENT") as library:
        library.define("mm(Tensor x) -> Tensor")
        assert row_of(torch.ops.functional_cg_tests.mm.default) == OpRow()


@pytest.mark.parametrize("op", [aten.native_batch_norm.default, aten.cudnn_batch_norm.default], ids=str)
def test_a_batch_norm_writes_its_statistics_where_it_trains(op: object) -> None:
    """Their schemas do not say so."""
    mean, var = torch.zeros(3), torch.ones(3)
    given = torch.ones(2, 3), None, None, mean, var
    assert written_arguments(op, (*given, False, 0.1, 1e-5), {}) == []
    written = written_arguments(op, (*given, True, 0.1, 1e-5), {})
    assert [id(one) for one in written] == [id(mean), id(var)]


def test_where_a_schema_says_what_a_batch_norm_writes_it_is_said_once() -> None:
    mean, var, out = torch.zeros(3), torch.ones(3), torch.empty(2, 3)
    given, saved = (
        (torch.ones(2, 3), None, None, mean, var, True, 0.1, 1e-5),
        (torch.empty(3), torch.empty(3)),
    )
    names = dict(zip(("out", "save_mean", "save_invstd"), (out, *saved), strict=True))
    for op in (aten._native_batch_norm_legit.out, aten.native_batch_norm.out):
        written = written_arguments(op, given, names)
        assert [id(one) for one in written] == [*map(id, (mean, var, out, *saved))]
