"""The op table names ops that exist, and is asked by name: of torch and ours, not of a user's op of the same name."""

from __future__ import annotations

import fnmatch

import pytest
import torch

from functional_cg.tensors import op_table
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
